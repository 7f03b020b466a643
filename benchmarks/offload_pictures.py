"""Pictures of offload's figures, as PNG files."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_SIZE = (6.4, 3.6)


def draw(figures: dict[str, Any], directory: str) -> list[Path]:
  """One picture for each section that was measured; returns their paths."""
  folder = Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  out = []
  for name, picture in _PICTURES.items():
    if name in figures:
      fig, ax = plt.subplots(figsize=_SIZE, layout="constrained")
      picture(ax, figures[name])
      path = folder / f"offload_{name}.png"
      fig.savefig(path, dpi=110)
      plt.close(fig)
      out.append(path)
  return out


def _copies(ax: Any, section: dict[str, Any]) -> None:
  rows = section["rows"]
  for name in rows[0]["gigabytes_per_second"]:
    rates = [r["gigabytes_per_second"][name] for r in rows]
    ax.plot([r["bytes"] for r in rows], rates, marker="o", label=name)
  ax.axvline(section["default_bytes"], color="grey", linestyle=":", label="default")
  ax.set_xscale("log", base=2)
  ax.set_yscale("log")
  ax.set_xlabel("bytes of a chunk")
  ax.set_ylabel("GB/s")
  ax.legend(fontsize=7)


def _first_token(ax: Any, section: dict[str, Any]) -> None:
  rows = section["rows"]
  for source in rows[0]["seconds"]:
    ax.plot(
      [r["length"] for r in rows], [r["seconds"][source] for r in rows], marker="o", label=source
    )
  ax.set_xscale("log", base=2)
  ax.set_yscale("log")
  ax.set_xlabel("tokens of the prompt")
  ax.set_ylabel("seconds to the first token")
  ax.legend()


def _hits(ax: Any, section: dict[str, Any]) -> None:
  rows = section["rows"]
  ax.plot([r["host_hits_percent"] for r in rows], [r["times_without"] for r in rows], marker="o")
  ax.axhline(1, color="grey", linestyle=":")
  ax.set_ylim(bottom=0)
  ax.set_xlabel("requests with a hit in host memory, %")
  ax.set_ylabel("throughput, times that without offload")


def _sessions(ax: Any, section: dict[str, Any]) -> None:
  rows = section["rows"]
  for kind in dict.fromkeys(r["tiers"] for r in rows):
    mine = [r for r in rows if r["tiers"] == kind]
    ax.plot(
      [r["sessions"] for r in mine], [1000 * r["seconds"] for r in mine], marker="o", label=kind
    )
  ax.axvline(section["device_sessions"], color="grey", linestyle=":", label="room on the device")
  ax.set_xscale("log", base=2)
  ax.set_ylim(bottom=0)
  ax.set_xlabel("conversations that return in turn")
  ax.set_ylabel("ms per turn")
  ax.legend()


_PICTURES = {
  "copies": _copies,
  "first_token": _first_token,
  "hits": _hits,
  "sessions": _sessions,
}
