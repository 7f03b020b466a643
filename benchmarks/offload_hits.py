"""Throughput against the share of requests whose prefix is in host memory, and the cost at none."""

import statistics
from typing import Any

import numpy as np
import workloads
from offload_serving import engine, forget_device, greedy, settle
from serving_runs import SOURCE, serve
from tables import show

import kvjax
from kvjax import Engine, OffloadConfig, Request

SLOTS, LENGTH, NEW = 8, 192, 16


def requests(name: str, prompts: list[tuple[int, ...]]) -> list[Request]:
  return [Request(f"{name} {i}", ids, greedy(NEW)) for i, ids in enumerate(prompts)]


def run(quick: bool) -> dict[str, Any]:
  """Figures of the section; prints them."""
  model = kvjax.load(SOURCE, "float32")
  count, rounds, pairs = (5, 1, 2) if quick else (10, 3, 9)
  rng = np.random.default_rng(0)

  def prompts(n: int) -> list[tuple[int, ...]]:
    return [workloads.tokens(rng, LENGTH, model.spec.vocab_size) for _ in range(n)]

  host = OffloadConfig(host_bytes=2**32, restore="always")
  on = engine(model, 256, host, slots=SLOTS)
  off = engine(model, 256, None, slots=SLOTS)
  for e in (on, off):  # compile
    for size in (SLOTS, 1):
      serve(e, requests("warm", prompts(size)))
  warm = prompts(count)
  serve(on, requests("warm again", warm))
  settle(on)
  serve(on, requests("from host", _forgotten(on, warm)))

  rows = []
  levels = [0, 50, 100] if quick else [0, 20, 40, 60, 80, 100]
  walls: dict[Any, list[float]] = {}
  hits: dict[int, int] = {}
  for round in range(rounds):
    for level in [*levels, "off"]:
      known = 0 if level == "off" else count * level // 100
      mixed = [*warm[:known], *prompts(count - known)]
      order = np.random.default_rng(round).permutation(count)
      e = off if level == "off" else on
      _forgotten(e, [])
      done = serve(e, requests(f"{round} {level}", [mixed[i] for i in order]))
      walls.setdefault(level, []).append(done["wall"])
      if level != "off":
        settle(on)
        hits[level] = done["figures"]["prompt_tokens_by_source"]["host"]
        assert hits[level] >= 0.8 * known * LENGTH, (level, hits)
  tokens = count * (LENGTH + NEW)
  base = statistics.median(walls["off"])
  for level in levels:
    wall = statistics.median(walls[level])
    rows.append(
      {
        "host_hits_percent": level,
        "tokens_per_second": tokens / wall,
        "times_without": base / wall,
        "host_tokens": hits[level],
      }
    )
  show(
    f"{count} requests of {LENGTH} + {NEW} tokens, {SLOTS} slots (without offload: "
    f"{tokens / base:.0f} tokens/s)",
    ["requests with a hit", "tokens/s", "times without"],
    [[f"{r['host_hits_percent']} %", r["tokens_per_second"], r["times_without"]] for r in rows],
  )
  ratios = []
  for i in range(pairs):
    both = {}
    for e in (on, off) if i % 2 else (off, on):
      _forgotten(e, [])
      both[e is on] = serve(e, requests(f"pair {i} {e is on}", prompts(count)))["wall"]
    ratios.append(both[True] / both[False])
  print(
    f"  cost where nothing is ever hit: {statistics.median(ratios) - 1:+.1%} of the time (pairs "
    f"from {min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}; wanted: at most +2 %)"
  )
  return {"rows": rows, "cost_ratios": ratios, "cost": statistics.median(ratios) - 1}


def _forgotten(e: Engine, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
  """The prompts, when the device has forgotten everything."""
  forget_device(e)
  return prompts
