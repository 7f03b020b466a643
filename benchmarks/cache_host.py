"""Host time per step: everything that an engine does besides waiting for the device."""

import gc
import statistics
import time
from typing import Any

import host_only
import numpy as np
import workloads
from tables import show

from kvjax import Engine, Request, SamplingParams, testing
from kvjax import config as C
from kvjax.weights.load import Model

CONTEXT = 2048
TARGET_US = 500
PHASES = ("plan", "build", "count", "read")


def engine(slots: int, groups: int, decode_steps: int = 1) -> Engine:
  """An engine of `slots` sequences over a model with that many cache groups."""
  spec = workloads.spec_with_groups(groups, CONTEXT)
  model = Model(spec, None, testing.tiny_tokenizer(), "float32", "host")
  config = C.Config(
    model=C.ModelConfig(source="gguf:host"),
    cache=C.CacheConfig(page_size=16),
    scheduler=C.SchedulerConfig(
      max_sequences=slots, token_budget=512, query_block=64, decode_steps=decode_steps
    ),
  )
  return host_only.engine(model, config)


def fill(e: Engine, slots: int, waiting: int = 0) -> None:
  """Starts `slots` sequences of 128 to 384 tokens; `waiting` more find no slot."""
  rng = np.random.default_rng(1)
  for i in range(slots + waiting):
    ids = workloads.tokens(rng, int(rng.integers(128, 384)), 200)
    e.add(Request(f"r{i}", ids, SamplingParams(temperature=0, ignore_eos=True)))
  while any(s.remaining > 1 for s in e._scheduler.running) or not e._scheduler.running:
    e.step()


def measure(e: Engine, steps: int) -> dict[str, float]:
  """Microseconds per step: median and 90th percentile of the whole, means of the phases."""
  spent = dict.fromkeys(PHASES, 0.0)
  executor: Any = e._executor

  def timed(name: str, function: Any) -> Any:
    def call(*args: Any) -> Any:
      start = time.perf_counter()
      out = function(*args)
      spent[name] += time.perf_counter() - start
      return out

    return call

  samples = []
  restore = (e._scheduler.plan, e._count, e._read)
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


def law(rows: list[dict[str, Any]]) -> dict[str, float]:
  """Least squares of microseconds = a + b slots + c groups + d slots groups, relative errors."""
  x = np.array([[1, r["slots"], r["groups"], r["slots"] * r["groups"]] for r in rows], float)
  y = np.array([r["step_us"] for r in rows])
  found, *_ = np.linalg.lstsq(x / y[:, None], np.ones(len(y)), rcond=None)
  names = ("constant", "per_slot", "per_group", "per_slot_and_group")
  error = float(np.median(np.abs(x @ found - y) / y))
  return {**dict(zip(names, map(float, found), strict=True)), "median_relative_error": error}


def run(quick: bool) -> dict[str, Any]:
  """Figures of the section; prints them."""
  grid = [(s, g) for s in (8, 64, 256) for g in (1, 3)]
  if not quick:
    grid = [(s, g) for s in (8, 32, 64, 128, 256, 512) for g in (1, 2, 3, 6)]
  steps = 40 if quick else 300
  rows: list[dict[str, Any]] = []

  def add(case: str, slots: int, groups: int, **more: int) -> dict[str, Any]:
    e = engine(slots, groups, more.get("decode_steps", 1))
    fill(e, slots, more.get("waiting", 0))
    row = {"case": case, "slots": slots, "groups": groups, **measure(e, steps)}
    e.close()
    rows.append(row)
    return row

  for slots, groups in grid:
    add("steady", slots, groups)
  fitted = law(rows)
  add("64 waiting", 256, 3, waiting=64)
  several = add("4 steps a call", 256, 3, decode_steps=4)
  show(
    "host time per step (µs; the phases are means of another run of steps)",
    ["case", "slots", "groups", "median", "p90", *PHASES],
    [
      [r["case"], r["slots"], r["groups"], r["step_us"], r["p90_us"]]
      + [r[f"{name}_us"] for name in PHASES]
      for r in rows
    ],
  )
  print(
    f"  law: {fitted['constant']:.0f} + {fitted['per_slot']:.2f} slots + "
    f"{fitted['per_group']:.1f} groups + {fitted['per_slot_and_group']:.3f} slots × groups µs "
    f"(median error {fitted['median_relative_error']:.0%})"
  )
  one = next(r for r in rows if r["slots"] == 256 and r["groups"] == 3)
  print(
    f"  256 slots × 3 groups: {one['step_us']:.0f} µs a step, with 4 steps a call "
    f"{several['step_us'] / 4:.0f} µs a step (wanted: at most {TARGET_US})"
  )
  return {"rows": rows, "law": fitted, "target_us": TARGET_US}
