"""Dividing memory over groups: what the plan says fits is what filling the pools really holds."""

import dataclasses
import random

import numpy as np
import pytest
from driving import Driver

import kvjax
from kvjax import geometry, testing
from kvjax import pages as pages_lib
from kvjax.config import CacheConfig, GroupConfig, SchedulerConfig
from kvjax.errors import ConfigError
from kvjax.models.spec import ModelSpec

BUDGET = 64


def plan(spec: ModelSpec, memory, *, lengths=(), sequences=1000, longest=256, **cache):
  return kvjax.plan(
    spec,
    CacheConfig(memory_bytes=memory, lengths=lengths, **cache),
    max_sequences=sequences,
    max_length=longest,
    step_tokens=BUDGET,
    decode_tokens=1,
  )


def hold(layout, lengths, most=2000):
  """Sequences of `lengths` in turn until the allocator is short: each in chunks, then by tokens."""
  tables = pages_lib.init(layout, np)
  at = []
  for count in range(min(most, layout[0].max_sequences)):
    n = lengths[count % len(lengths)]
    at.append([0, n])
    slot = np.array([count], np.int32)
    while at[-1][0] < n:
      # Chunks first, then a few tokens at a time, and one by one at the end, as decoding does.
      size = min(BUDGET, n // 2 - at[-1][0]) if at[-1][0] < n // 2 else 7
      size = 1 if at[-1][0] + size > n - 8 else size
      ends = (np.array([x], np.int32) for x in (at[-1][0], at[-1][0] + size))
      tables, _, short = pages_lib.reserve(tables, layout, slot, *ends, size)
      if short.any():
        return count
      at[-1][0] += size
  return len(at)


MIXES = [(256,), (32,), (16, 16, 16, 240), (100, 60, 250, 9)]


@pytest.mark.parametrize("kind", ["full", "mixed", "varied"])
@pytest.mark.parametrize("lengths", MIXES)
@pytest.mark.parametrize("sizes", [16, {"full": 16, "sliding": 4, "sliding2": 8}])
def test_predicted_is_what_filling_holds(kind, lengths, sizes):
  """Within 2 %, for windows that are many pages long and pools of about two hundred sequences."""
  spec = testing.tiny_spec(kind, window=64)
  names = [g.name for g in kvjax.plan(spec, max_length=64)]
  groups = {}
  if isinstance(sizes, dict):
    groups = {n: GroupConfig(page_size=sizes[n]) for n in names}
  page = sizes if isinstance(sizes, int) else 16
  one = sum(g.token_bytes for g in kvjax.plan(spec, max_length=64))
  memory = 120 * one * sum(lengths) // len(lengths)
  layout = plan(spec, memory, lengths=lengths, page_size=page, groups=groups)
  predicted = geometry.concurrency(layout, *lengths)
  measured = hold(layout, lengths)
  assert predicted >= 50
  assert abs(measured - predicted) <= max(1, 0.02 * measured)


@pytest.mark.parametrize("lengths", MIXES)
def test_the_split_is_the_best_for_the_declared_workload(lengths):
  """No other division of the same bytes holds more sequences of the mix."""
  spec = testing.tiny_spec("varied", window=64)
  memory = 3_000_000
  layout = plan(spec, memory, lengths=lengths, prefix_sharing=False)
  assert geometry.pool_bytes(layout) <= memory
  best = geometry.concurrency(layout, *lengths)
  rng = random.Random(1)
  for _ in range(300):
    shares = [rng.random() for _ in layout]
    pages = [
      max(1, int(memory * x / sum(shares) / g.page_bytes))
      for g, x in zip(layout, shares, strict=True)
    ]
    other = [dataclasses.replace(g, pages=n) for g, n in zip(layout, pages, strict=True)]
    assert geometry.concurrency(tuple(other), *lengths) <= best


def test_a_given_budget_is_used_for_cached_prefixes():
  spec = testing.tiny_spec("mixed", window=64)
  one = plan(spec, 10_000_000, sequences=4, prefix_sharing=False)
  spare = plan(spec, 10_000_000, sequences=4)
  assert geometry.concurrency(one, 256) == 4
  assert 9_900_000 < geometry.pool_bytes(spare) <= 10_000_000
  for a, b in zip(one, spare, strict=True):
    assert b.pages > 2 * a.pages


def test_short_sequences_leave_more_to_the_full_group():
  """Below the window every group grows alike; above it only the full one."""
  spec = testing.tiny_spec("mixed", window=64)
  share = {}
  for n in (32, 256):
    layout = plan(spec, 2_000_000, lengths=(n,))
    sliding = next(g for g in layout if g.name == "sliding")
    share[n] = sliding.pool_bytes / geometry.pool_bytes(layout)
  assert share[256] < share[32]


def test_small_budgets_still_serve_one_of_the_longest():
  spec = testing.tiny_spec("mixed", window=64)
  for memory in range(100_000, 400_000, 25_000):
    layout = plan(spec, memory, lengths=(8, 200))
    assert geometry.pool_bytes(layout) <= memory
    if geometry.longest(layout) >= 200:
      assert geometry.concurrency(layout, 200) >= 1


def test_lengths_beyond_the_longest_sequence_are_refused():
  spec = testing.tiny_spec("full")
  with pytest.raises(ConfigError, match=r"cache\.lengths: expected at most .*256.*\[300\]"):
    plan(spec, 10**6, lengths=(8, 300))


def test_the_engine_holds_what_the_plan_says():
  """max_sequences of the planned length run at once, in chunks, and nobody is preempted."""
  spec = testing.tiny_spec("mixed", window=16)
  layout = plan(spec, None, sequences=6, longest=128)
  config = SchedulerConfig(max_sequences=6, token_budget=BUDGET, query_block=8)
  d = Driver(layout, config, sharing=False)
  for i in range(18):
    assert d.add([i % 3] * (100 + i % 7), 20)
  d.drain()
  assert d.scheduler.preemptions == 0


@pytest.mark.parametrize("memory", [None, 10_000])
def test_pools_that_are_declared_too_large_are_named(memory):
  spec = testing.tiny_spec("mixed", window=64)
  groups = {"sliding": GroupConfig(pages=10**6), "full": GroupConfig(pages=5)}
  if memory is None:
    del groups["full"]
  with pytest.raises(ConfigError, match=r"groups\.sliding\.pages.*expected pools within"):
    kvjax.plan(spec, CacheConfig(memory_bytes=memory, groups=groups), available_bytes=10**6)
