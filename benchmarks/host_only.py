"""Engines without a device: the whole host side runs, and random tokens come back at once."""

import time
from typing import Any, cast

import numpy as np

from kvjax import Engine
from kvjax import config as C
from kvjax.engine.batching import SlotSampling, build
from kvjax.engine.executor import Dispatched, Executor, Results
from kvjax.steps import PACKED_WIDTH
from kvjax.weights.load import Model


class HostOnly:
  """Stands in for the executor: lays out the rows as it does, and answers random tokens.

  Attributes:
    seconds: spent on laying out rows.
  """

  def __init__(self, slots: int, rows: int, vocabulary: int):
    self.compiled: dict[Any, float] = {}
    self.compile_seconds = 0.0
    self.seconds = 0.0
    self._sampling = SlotSampling(slots)
    rng = np.random.default_rng(0)
    self._packed = np.zeros((rows + 1, PACKED_WIDTH), np.int32)
    self._packed[:-1, 0] = rng.integers(3, vocabulary, rows)
    self._packed[:-1, 1] = 1  # finite

  def dispatch(self, plan: Any, shape: Any) -> Dispatched:
    self.compiled[shape] = 0.0
    start = time.perf_counter()
    _, _, rows = build(plan, shape, self._sampling)
    self.seconds += time.perf_counter() - start
    packed = self._packed if shape.steps == 1 else np.stack([self._packed] * shape.steps)
    return Dispatched(plan, rows, cast(Any, packed))

  def read(self, dispatched: Dispatched) -> Results:
    return Results(np.asarray(dispatched.packed))


def engine(model: Model, config: C.Config) -> Engine:
  """An engine over a model's geometry; its weights are not needed."""
  scheduler = config.scheduler
  rows = 2 * scheduler.max_sequences + scheduler.token_budget
  executor = HostOnly(scheduler.max_sequences, rows, model.spec.vocab_size)
  return Engine(model, config, executor=cast(Executor, executor))
