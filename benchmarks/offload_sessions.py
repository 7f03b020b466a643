"""The cliff: more and more conversations that return in turn, over one small device pool."""

import tempfile
from typing import Any

import numpy as np
import workloads
from offload_serving import PAGE, engine, timed
from serving_runs import SOURCE
from tables import show

import kvjax
from kvjax import OffloadConfig

HISTORY, TURN, NEW, TURNS = 240, 16, 8, 3
KINDS = ("device", "+ host", "+ disk")


def run(quick: bool) -> dict[str, Any]:
  """Figures of the section; prints them. The device has room for about four conversations; the
  host memory beside a disk for one."""
  model = kvjax.load(SOURCE, "float32")
  longest = HISTORY + TURNS * (TURN + NEW) + TURN
  pages = 4 * -(-longest // PAGE)
  one = pages // 4 * PAGE * sum(2 * a.kv_heads * a.head_dim * 4 for a in _attentions(model))
  counts = [2, 6] if quick else [2, 4, 8, 16]
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    for count in counts:
      for kind in KINDS:
        offload = {
          "device": None,
          "+ host": OffloadConfig(host_bytes=2**32, restore="always"),
          "+ disk": OffloadConfig(host_bytes=one, disk_path=f"{folder}/{count}", restore="always"),
        }[kind]
        e = engine(model, longest, offload, pages=pages)
        timed(e, "compile", workloads.tokens(np.random.default_rng(9), 40, 1000), 2)
        rows.append({"sessions": count, "tiers": kind, **_turns(e, count, model.spec.vocab_size)})
        e.close()
  show(
    f"conversations that return in turn, {HISTORY} tokens and {TURN} more in each turn; turns "
    "after the first",
    ["conversations", "tiers", "ms per turn", "from device", "host", "disk", "computed"],
    [
      [
        r["sessions"],
        r["tiers"],
        1000 * r["seconds"],
        *(r["sources"][k] for k in ("device", "host", "disk", "computed")),
      ]
      for r in rows
    ],
  )
  return {"rows": rows, "device_sessions": 4}


def _attentions(model: Any) -> list[Any]:
  return [layer.attention for layer in model.spec.layers]


def _turns(e: Any, count: int, vocabulary: int) -> dict[str, Any]:
  """Mean seconds per turn and prompt tokens by source, of all turns but everybody's first."""
  rng = np.random.default_rng(count)
  histories = [workloads.tokens(rng, HISTORY, vocabulary) for _ in range(count)]
  seconds, sources = [], dict.fromkeys(("computed", "device", "host", "disk"), 0)
  answers = []
  for turn in range(TURNS):
    for i in range(count):
      histories[i] += workloads.tokens(rng, TURN, vocabulary)
      got = timed(e, f"{turn} {i}", histories[i], NEW)
      histories[i] += got["tokens"]
      answers.append(got["tokens"])
      if turn:
        seconds.append(got["seconds"])
        for source, tokens in got["sources"].items():
          sources[source] += tokens
  return {"seconds": float(np.mean(seconds)), "sources": sources, "answers": answers}
