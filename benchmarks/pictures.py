"""Pictures of the cache's figures, as PNG files."""

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
      path = folder / f"cache_{name}.png"
      fig.savefig(path, dpi=110)
      plt.close(fig)
      out.append(path)
  return out


def _waste(ax: Any, section: dict[str, Any]) -> None:
  labels, contiguous, paged = [], [], []
  for r in section["rows"]:
    labels.append(f"{r['model']}\npage {r['page_size']}")
    contiguous.append(100 * r["contiguous"])
    paged.append(100 * r["total"])
  at = range(len(labels))
  ax.bar([x - 0.2 for x in at], contiguous, 0.4, label="contiguous, maximum length")
  bars = ax.bar([x + 0.2 for x in at], paged, 0.4, label="paged by group")
  ax.bar_label(bars, fmt="%.1f")
  ax.set_xticks(list(at), labels, fontsize=8)
  ax.set_ylabel("allocated token slots wasted, %")
  ax.legend()


def _capacity(ax: Any, section: dict[str, Any]) -> None:
  kinds = {
    "contiguous": "contiguous",
    "all_full": "paged, all layers full",
    "grouped": "paged by group",
    "shared_pool": "one pool of equal pages",
  }
  rows = section["rows"]
  for i, (key, label) in enumerate(kinds.items()):
    bars = ax.bar([x + 0.2 * i for x in range(len(rows))], [r[key] for r in rows], 0.2, label=label)
    ax.bar_label(bars, fontsize=7)
  ax.set_xticks([x + 0.3 for x in range(len(rows))], [r["mix"] for r in rows], fontsize=8)
  ax.set_ylabel(f"sequences in {section['memory_bytes'] / 2**30:.3g} GiB")
  ax.set_yscale("log")
  ax.legend(fontsize=8)


def _host(ax: Any, section: dict[str, Any]) -> None:
  steady = [r for r in section["rows"] if r["case"] == "steady"]
  for groups in sorted({r["groups"] for r in steady}):
    rows = [r for r in steady if r["groups"] == groups]
    ax.plot(
      [r["slots"] for r in rows],
      [r["step_us"] for r in rows],
      marker="o",
      label=f"{groups} group{'s' if groups > 1 else ''}",
    )
  ax.axhline(section["target_us"], color="grey", linestyle=":", label="wanted at 256 × 3")
  ax.set_xscale("log", base=2)
  ax.set_yscale("log")
  ax.set_xlabel("slots")
  ax.set_ylabel("host time per step, µs")
  ax.legend(fontsize=8)


def _batching(ax: Any, section: dict[str, Any]) -> None:
  rows = section["rows"]
  for kind in ("static", "continuous"):
    ax.plot(
      [r["variation"] for r in rows],
      [r[kind]["tokens_per_second"] for r in rows],
      marker="o",
      label=kind,
    )
  for r in rows:
    ax.annotate(
      f"{r['speedup']:.2f} ×",
      (r["variation"], r["continuous"]["tokens_per_second"]),
      textcoords="offset points",
      xytext=(0, 6),
      ha="center",
      fontsize=8,
    )
  ax.set_ylim(bottom=0)
  ax.set_xlabel("coefficient of variation of output lengths")
  ax.set_ylabel("new tokens per second")
  ax.legend()


def _sharing(ax: Any, section: dict[str, Any]) -> None:
  off, on = section["rows"]
  names = ["prompt tokens computed", "mean time to first token", "wall time"]
  shares = [
    on["prefill_tokens"] / off["prefill_tokens"],
    on["first"]["mean"] / off["first"]["mean"],
    on["wall"] / off["wall"],
  ]
  bars = ax.barh(names[::-1], [100 * s for s in shares[::-1]])
  ax.bar_label(bars, fmt="%.0f %%")
  ax.axvline(100, color="grey", linestyle=":")
  ax.set_xlabel("with sharing, in % of without")


_PICTURES = {
  "waste": _waste,
  "capacity": _capacity,
  "host": _host,
  "batching": _batching,
  "sharing": _sharing,
}
