"""GroupGeometry against brute force over positions and over every possible progress."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import geometry, pages
from kvjax.config import SchedulerConfig
from kvjax.engine.cache_manager import CacheManager
from kvjax.engine.scheduler import Scheduler
from kvjax.geometry import GroupGeometry, Leaf, Retention

fast = settings(deadline=None, max_examples=60)


def group(
  page_size: int,
  window: int | None = None,
  *,
  pages: int = 64,
  max_length: int = 64,
  step_tokens: int = 8,
  max_sequences: int = 4,
  leaves: tuple[Leaf, ...] = (Leaf("kv", (2, 8), "float32"),),
  layers: tuple[int, ...] = (0,),
) -> GroupGeometry:
  return GroupGeometry(
    name="full" if window is None else "sliding",
    layers=layers,
    page_size=page_size,
    retention=Retention(window),
    leaves=leaves,
    pages=pages,
    max_length=max_length,
    step_tokens=min(step_tokens, max_length),
    max_sequences=max_sequences,
  )


@st.composite
def groups(draw, longest: int = 40) -> GroupGeometry:
  max_length = draw(st.integers(1, longest))
  return group(
    draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16])),
    draw(st.none() | st.integers(1, longest + 5)),
    pages=draw(st.integers(1, 30)),
    max_length=max_length,
    step_tokens=draw(st.integers(1, max_length)),
    max_sequences=40,
  )


def readable(g: GroupGeometry, length: int) -> set[int]:
  """Positions below `length` that some token at a position >= length reads, one by one."""
  if g.retention.window is None:
    return set(range(length))
  readers = range(length, length + g.retention.window + 1)
  return {q for q in range(length) for p in readers if q > p - g.retention.window}


def touched(g: GroupGeometry, positions: set[int]) -> set[int]:
  return {p // g.page_size for p in positions}


def held(g: GroupGeometry, start: int, stop: int) -> int:
  """Pages from the first that the positions [start, stop) read up to the last that they write."""
  found = touched(g, readable(g, start) | set(range(start, stop)))
  return max(found) - min(found) + 1 if found else 0


@fast
@given(groups())
def test_coverage_is_what_can_be_read_and_the_page_to_be_written(g: GroupGeometry):
  for length in range(g.max_length + 1):
    wanted = touched(g, readable(g, length))
    if wanted and length % g.page_size:
      wanted |= touched(g, {length})  # partially filled: the next token goes there
    assert set(g.coverage(length)) == wanted


@fast
@given(groups())
def test_span_is_what_a_step_reads_and_writes(g: GroupGeometry):
  for length in range(g.max_length):
    for tokens in range(1, min(g.step_tokens, g.max_length - length) + 1):
      span = set(g.span(length, tokens))
      assert span == touched(g, readable(g, length) | set(range(length, length + tokens)))
      # Two pages that live together never share a column of the table.
      assert len({g.column(page) for page in span}) == len(span) <= g.table_width
      written = touched(g, set(range(length, length + tokens)))
      assert len(written) <= g.pages_per_step(tokens)


@fast
@given(groups())
def test_peak_pages_is_the_maximum_over_every_progress(g: GroupGeometry):
  """Tight: not only a bound. Every (start, chunk) can be met, since chunks can be of any size."""
  for length in range(1, g.max_length + 1):
    for step in {1, g.step_tokens}:
      most = max(
        held(g, start, start + tokens)
        for start in range(length)
        for tokens in range(1, min(step, length - start) + 1)
      )
      assert g.peak_pages(length, step) == most
    assert g.peak_pages(length) == g.peak_pages(length, g.step_tokens)
  assert g.table_width == g.peak_pages(g.max_length)


@fast
@given(groups())
def test_pages_per_step_is_reached(g: GroupGeometry):
  for tokens in range(1, g.step_tokens + 1):
    most = max(
      len(touched(g, set(range(start, start + tokens))))
      for start in range(g.max_length - tokens + 1)
    )
    assert most <= g.pages_per_step(tokens)
    if g.max_length >= tokens + g.page_size:  # room for every alignment
      assert most == g.pages_per_step(tokens)


@fast
@given(groups(), st.integers(1, 12))
def test_longest_is_the_last_length_that_fits(g: GroupGeometry, count: int):
  fitting = [n for n in range(1, g.max_length + 1) if g.peak_pages(n) <= count]
  assert g.longest(count) == max(fitting)
  assert fitting == list(range(1, len(fitting) + 1)), "a longer sequence never needs fewer pages"


@fast
@given(groups())
def test_arrays_give_what_ints_give(g: GroupGeometry):
  lengths = np.arange(g.max_length + 1, dtype=np.int32)
  assert g.first_page(lengths).tolist() == [g.first_page(int(n)) for n in lengths]
  assert g.pages_for(lengths).tolist() == [g.pages_for(int(n)) for n in lengths]
  assert g.first_page(lengths).dtype == np.int32


def measured(g: GroupGeometry, length: int) -> int:
  """Sequences that real tables hold when each runs to `length` through its widest chunk, while
  those before it stand where a decoding sequence is widest."""
  tables = pages.init((g,), np)

  def widest(tokens: int) -> int:
    return max(range(length), key=lambda n: len(g.span(n, min(tokens, length - n))))

  def run(slot: int, stops: list[int]) -> bool:
    nonlocal tables
    for start, stop in itertools.pairwise([0, *stops]):
      rows = (np.array([x], np.int32) for x in (slot, start, stop))
      tables, _, short = pages.reserve(tables, (g,), *rows)
      pages.check(tables, (g,))
      if short.any():
        return False
    return True

  for slot in range(g.max_sequences):
    if not run(slot, stops_through(g, widest(g.step_tokens), length)):
      return slot
    tables = pages.release(tables, np.array([slot], np.int32))
    assert run(slot, list(range(1, widest(1) + 2)))
  return g.max_sequences


def stops_through(g: GroupGeometry, worst: int, length: int) -> list[int]:
  """Chunk ends of a way to `length` with a full chunk from `worst`."""
  stops = list(range(g.step_tokens, worst, g.step_tokens)) + ([worst] if worst else [])
  while not stops or stops[-1] < length:
    stops.append(min((stops[-1] if stops else 0) + g.step_tokens, length))
  return stops


@settings(deadline=None, max_examples=80)
@given(groups(longest=24))
def test_predicted_concurrency_is_what_filling_the_tables_measures(g: GroupGeometry):
  for length in {1, (g.max_length + 1) // 2, g.max_length}:
    predicted = geometry.concurrency((g,), length)
    assert measured(g, length) == min(predicted, g.max_sequences)


def test_concurrency_and_longest_of_a_layout_are_those_of_its_tightest_group():
  layout = (
    group(4, pages=10, max_length=64),
    group(2, 6, pages=21, max_length=64, step_tokens=4),
  )
  # At 16 tokens: 10 // 4 = 2 of the full group; sliding peaks at 5 pages and decodes in 4.
  assert (layout[1].peak_pages(16), layout[1].peak_pages(16, 1)) == (5, 4)
  assert [g.sequences(16) for g in layout] == [2, 5]
  assert geometry.concurrency(layout, 16) == 2
  assert geometry.longest(layout) == 40
  assert geometry.concurrency(layout, 41) == 0


def test_a_long_request_needs_only_the_live_pages_of_a_sliding_group():
  layout = (group(16, pages=7, max_length=100), group(4, 8, pages=5, max_length=100))
  assert layout[1].pages_for(100) == 25
  scheduler = Scheduler(CacheManager(layout), SchedulerConfig(token_budget=8))
  assert scheduler.can_ever_fit(100) == {}
  tables = pages.init(layout, np)
  slot = np.zeros(1, np.int32)
  for start in range(0, 100, 8):
    ends = (np.array([x], np.int32) for x in (start, min(start + 8, 100)))
    tables, _, short = pages.reserve(tables, layout, slot, *ends)
    assert not short.any()
  assert tables[1].last[0] == 25
  # One page less is refused with the figures.
  small = (layout[0], dataclasses.replace(layout[1], pages=4))
  figures = Scheduler(CacheManager(small), SchedulerConfig(token_budget=8)).can_ever_fit(100)
  assert figures == {"sliding": (5, 4)}


def test_bytes():
  leaves = (Leaf("kv", (2, 16), "bfloat16"), Leaf("scale", (2,), "float32"))
  full = group(4, leaves=leaves, layers=(0, 5), pages=10)
  sliding = group(2, 6, leaves=leaves[:1], layers=(1, 2, 3), pages=20, step_tokens=4)
  assert full.token_bytes == 2 * (2 * 16 * 2 + 2 * 4)
  assert full.page_bytes == 4 * full.token_bytes
  assert full.pool_bytes == 10 * full.page_bytes
  assert geometry.token_bytes((full, sliding)) == full.token_bytes + 3 * 64
  assert geometry.pool_bytes((full, sliding)) == full.pool_bytes + 20 * 2 * 3 * 64
  assert geometry.sequence_bytes((full, sliding), 10) == (
    3 * full.page_bytes + 5 * sliding.page_bytes
  )


# What must be held to resume from a prefix (a hit).


@pytest.mark.parametrize(("extra", "wanted"), [(0, [2, 3]), (1, [2, 3]), (3, [1, 2, 3])])
def test_hit_at_64_needs_the_window_and_nothing_else(extra: int, wanted: list[int]):
  # Tokens kept beyond the window are a window that is so much longer.
  assert list(group(16, 32 + extra, max_length=128).coverage(64)) == wanted


def test_an_unaligned_window_touches_one_page_more():
  g = group(32, 4096, max_length=131072)
  assert len(g.coverage(98012)) == 129
  assert len(g.coverage(98016)) == 128


def test_legal_hits_are_those_whose_window_is_cached():
  g = group(1, 4)
  cached = {2, 3, 4, 5, 11, 12, 13}
  legal = [n for n in range(1, 15) if set(g.coverage(n)) <= cached]
  assert legal == [5, 6, 14]


@pytest.mark.parametrize(
  ("page_size", "window", "held_pages", "kept"),
  [(8, 8, 8, [3, 7]), (16, 32, 7, [0, 1, 2, 3, 4, 5])],
)
def test_what_hits_at_every_hash_unit_can_ask_for(page_size, window, held_pages, kept):
  g = group(page_size, window, max_length=256)
  hits = range(32, held_pages * page_size + 1, 32)
  assert sorted({page for n in hits for page in g.coverage(n)}) == kept


# Errors.


@pytest.mark.parametrize(
  "field", ["page_size", "pages", "max_length", "step_tokens", "max_sequences"]
)
def test_sizes_below_one_are_refused(field: str):
  sizes = {"page_size": 4, "pages": 4, "max_length": 4, "step_tokens": 4, "max_sequences": 4}
  with pytest.raises(ValueError, match=f"'g': {field}: expected at least 1, got 0"):
    GroupGeometry(name="g", layers=(0,), retention=Retention(), leaves=(), **{**sizes, field: 0})


def test_a_window_below_one_is_refused():
  with pytest.raises(ValueError, match="window: expected at least 1 token or None, got 0"):
    Retention(0)


def test_a_pool_past_32_bit_indices_is_refused():
  # 8 heads × 128 × (key, value): 2048 elements per token.
  leaf = (Leaf("kv", (8, 256), "bfloat16"),)
  with pytest.raises(ValueError, match="2147483648 elements; expected at most 2147483647"):
    group(16, pages=65536, leaves=leaf)
  assert group(16, pages=65535, leaves=leaf).pages == 65535
  # Each leaf is an array of its own.
  assert group(16, pages=65535, leaves=(*leaf, Leaf("more", (8, 256), "int8"))).pages == 65535


def test_words():
  assert (Retention().name, str(Retention())) == ("full", "all positions")
  assert (Retention(9).name, str(Retention(9))) == ("sliding", "last 9 positions")
