"""Host time per step: everything that an engine does besides waiting for the device.

A real engine runs with an executor that computes nothing and answers random tokens at once, so that
`Engine.step` is planning, laying out the rows, counting and reading, and nothing else.
"""

import gc
import statistics
import time
from typing import Any

import numpy as np
import workloads
from tables import show

from kvjax import Engine, Request, SamplingParams, testing
from kvjax import config as C
from kvjax.engine import loop
from kvjax.engine.batching import SlotSampling, build
from kvjax.engine.executor import Dispatched, Results
from kvjax.steps import PACKED_WIDTH
from kvjax.weights.load import Model

CONTEXT = 2048
PHASES = ("plan", "build", "count", "read")


class HostOnly:
  """Stands in for the executor: lays rows out as it does, and answers random tokens."""

  def __init__(self, slots: int, vocabulary: int):
    self.compiled: dict[Any, float] = {}
    self.compile_seconds = 0.0
    self.seconds = 0.0
    self._sampling = SlotSampling(slots)
    rng = np.random.default_rng(0)
    self._packed = np.zeros((4 * slots + 65, PACKED_WIDTH), np.int32)
    self._packed[:-1, 0] = rng.integers(3, vocabulary, 4 * slots + 64)
    self._packed[:-1, 1] = 1

  def dispatch(self, plan: Any, shape: Any) -> Dispatched:
    self.compiled[shape] = 0.0
    start = time.perf_counter()
    _, _, rows = build(plan, shape, self._sampling)
    self.seconds += time.perf_counter() - start
    return Dispatched(plan, rows, self._packed)  # type: ignore[arg-type]

  def read(self, dispatched: Dispatched) -> Results:
    return Results(np.asarray(dispatched.packed))


def engine(slots: int, groups: int, *, pages: dict[str, int] | None = None) -> Engine:
  """An engine of `slots` sequences over a model with that many cache groups."""
  model = Model(workloads.spec_with_groups(groups, CONTEXT), {}, testing.tiny_tokenizer(), "float32", "host")
  names = workloads.group_names(model.spec)
  cache = C.CacheConfig(
    page_size=16, groups={n: C.GroupConfig(pages=count) for n, count in (pages or {}).items() if n in names}
  )
  config = C.Config(
    model=C.ModelConfig(source="gguf:host"),
    cache=cache,
    scheduler=C.SchedulerConfig(max_sequences=slots, token_budget=4096, query_block=64),
  )
  e = Engine(model, config)
  e._executor = HostOnly(slots, model.spec.vocab_size)  # type: ignore[assignment]
  return e


def fill(e: Engine, slots: int, waiting: int = 0, length: int = 256) -> None:
  """Starts `slots` decoding sequences of unlike lengths; `waiting` more find no slot."""
  rng = np.random.default_rng(1)
  for i in range(slots + waiting):
    ids = rng.integers(3, 200, int(length * (0.5 + rng.random())))
    e.add(Request(f"r{i}", tuple(ids.tolist()), SamplingParams(temperature=0, ignore_eos=True)))
    if i % 16 == 15:
      e.step()
  while any(s.remaining > 1 for s in e._scheduler.running):
    e.step()


def measure(e: Engine, steps: int) -> dict[str, float]:
  """Median microseconds per step, whole and by phase."""
  spent = dict.fromkeys(PHASES, 0.0)
  executor: Any = e._executor
  executor.seconds = 0.0
  restore = (e._scheduler.plan, e._count, e._read)

  def timed(name: str, function: Any) -> Any:
    def call(*args: Any) -> Any:
      start = time.perf_counter()
      out = function(*args)
      spent[name] += time.perf_counter() - start
      return out

    return call

  samples = []
  gc.collect()
  gc.disable()
  try:
    for _ in range(steps):  # whole steps first, without the clocks of the phases
      start = time.perf_counter()
      e.step()
      samples.append(time.perf_counter() - start)
    e._scheduler.plan = timed("plan", e._scheduler.plan)  # type: ignore[method-assign]
    e._count = timed("count", e._count)  # type: ignore[method-assign]
    e._read = timed("read", e._read)  # type: ignore[method-assign]
    executor.seconds = 0.0
    for _ in range(steps):
      e.step()
  finally:
    gc.enable()
    e._scheduler.plan, e._count, e._read = restore  # type: ignore[method-assign]
  spent["build"] = executor.seconds
  return {
    "step_us": statistics.median(samples) * 1e6,
    "p90_us": sorted(samples)[int(0.9 * len(samples))] * 1e6,
    **{f"{name}_us": seconds / steps * 1e6 for name, seconds in spent.items()},
  }


def law(rows: list[dict[str, Any]]) -> dict[str, Any]:
  """Least squares of microseconds = a + b slots + c groups + d slots groups."""
  x = np.array([[1, r["slots"], r["groups"], r["slots"] * r["groups"]] for r in rows], float)
  y = np.array([r["step_us"] for r in rows])
  found, *_ = np.linalg.lstsq(x, y, rcond=None)
  error = np.abs(x @ found - y) / y
  names = ("constant", "per_slot", "per_group", "per_slot_and_group")
  return {
    **dict(zip(names, map(float, found), strict=True)),
    "median_relative_error": float(np.median(error)),
  }


def run(quick: bool) -> dict[str, Any]:
  """Figures of the section; prints them."""
  slots = (8, 64, 256) if quick else (8, 32, 64, 128, 256, 512)
  groups = (1, 3) if quick else (1, 2, 3, 6)
  steps = 60 if quick else 300
  rows = []
  for s in slots:
    for g in groups:
      e = engine(s, g)
      fill(e, s)
      rows.append({"slots": s, "groups": g, "case": "steady", **measure(e, steps)})
      e.close()
  fitted = law(rows)
  at = 64 if quick else 256
  # Every page is in use or cached, so that each new page evicts one.
  e = engine(at, 3)
  fill(e, at)
  for i in range(400):
    e.add(Request(f"old{i}", tuple(range(3, 203)), SamplingParams(max_tokens=2), cache_salt=f"{i}"))
  rows.append({"slots": at, "groups": 3, "case": "64 waiting", **measure(e, steps)})
  e.close()
  show(
    "host time per step (µs, median)",
    ["case", "slots", "groups", "step", "p90", *PHASES],
    [
      [r["case"], r["slots"], r["groups"], r["step_us"], r["p90_us"]]
      + [r[f"{name}_us"] for name in PHASES]
      for r in rows
    ],
  )
  print(
    "  law: {constant:.0f} + {per_slot:.2f} slots + {per_group:.1f} groups + "
    "{per_slot_and_group:.3f} slots × groups µs (median error {median_relative_error:.0%})".format(
      **fitted
    )
  )
  target = next(r for r in rows if r["slots"] == 256 and r["groups"] == 3)
  print(f"  256 slots × 3 groups: {target['step_us'] / 1e3:.2f} ms per step (target: at most 0.5)")
  return {"rows": rows, "law": fitted, "target_us": 500}


__all__ = ["engine", "fill", "loop", "measure", "run"]
