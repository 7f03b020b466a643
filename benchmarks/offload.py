"""What offload to host memory and disk brings, and what it costs: `python benchmarks/offload.py`.

  python benchmarks/offload.py --json=offload.json --pictures=docs/pictures
  python benchmarks/offload.py --quick --sections=copies,bytes

Each figure stands beside what it is better or worse than, from the same run; alternatives that are
timed take turns, several times, and medians are given. Run it on an idle machine. Files are read
back from the operating system's page cache, as after a restart of the process, not of the machine.
"""

import importlib
import os
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import app, flags
from machine import keep_compiled, machine, write

SECTIONS = ("copies", "bytes", "first_token", "hits", "sessions")

_JSON = flags.DEFINE_string("json", None, "file for all figures")
_QUICK = flags.DEFINE_bool("quick", False, "a small version of everything")
_SECTIONS = flags.DEFINE_list("sections", list(SECTIONS), f"of {', '.join(SECTIONS)}")
_PICTURES = flags.DEFINE_string("pictures", None, "directory for pictures of the figures")


def main(argv: list[str]) -> int:
  if len(argv) > 1:
    print(f"error: expected flags only, got {argv[1:]}", file=sys.stderr)
    return 2
  wrong = [name for name in _SECTIONS.value if name not in SECTIONS]
  if wrong:
    print(f"error: --sections: expected some of {list(SECTIONS)}, got {wrong}", file=sys.stderr)
    return 2
  keep_compiled()
  figures: dict[str, Any] = {"machine": machine(), "quick": _QUICK.value}
  for name in _SECTIONS.value:
    start = time.perf_counter()
    figures[name] = importlib.import_module(f"offload_{name}").run(_QUICK.value)
    print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    if _JSON.value:
      write(_JSON.value, figures)
  if _PICTURES.value:
    import offload_pictures

    for path in offload_pictures.draw(figures, _PICTURES.value):
      print(f"wrote {path}")
  return 0


if __name__ == "__main__":
  app.run(main)
