"""The allocator against a plain-Python model of it, page contents included."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import pages
from kvjax.geometry import NO_PAGE, GroupGeometry, Layout, Retention

SLOTS = 4


def group(
  page_size: int, window: int | None, count: int, max_length: int = 24, step_tokens: int = 6
) -> GroupGeometry:
  return GroupGeometry(
    name="full" if window is None else "sliding",
    layers=(0,),
    page_size=page_size,
    retention=Retention(window),
    leaves=(),
    pages=count,
    max_length=max_length,
    step_tokens=step_tokens,
    max_sequences=SLOTS,
  )


JITTED = (
  (group(4, None, 9), group(2, 5, 11)),
  (group(1, 3, 16), group(5, None, 8), group(16, 20, 4)),
)


@st.composite
def layouts(draw) -> Layout:
  max_length, step_tokens = draw(st.integers(6, 24)), draw(st.integers(1, 6))
  return tuple(
    group(
      draw(st.sampled_from([1, 2, 3, 4, 8])),
      draw(st.none() | st.integers(1, 26)),
      draw(st.integers(1, 24)),
      max_length,
      step_tokens,
    )
    for _ in range(draw(st.integers(1, 3)))
  )


class Page:
  """A page of the model: an identity."""


class Model:
  """What the allocator promises, in dictionaries."""

  def __init__(self, layout: Layout):
    self.layout = layout
    # [group][slot]: logical page -> Page
    self.held: list[list[dict[int, Page]]] = [[{} for _ in range(SLOTS)] for _ in layout]

  def holders(self, g: int, page: Page) -> int:
    return sum(other is page for row in self.held[g] for other in row.values())

  def free(self, g: int) -> int:
    return self.layout[g].pages - len({id(p) for row in self.held[g] for p in row.values()})

  def retire(self, slot: int, length: int) -> None:
    for g, rows in zip(self.layout, self.held, strict=True):
      readable = g.retention.window
      for logical in list(rows[slot]):
        end = (logical + 1) * g.page_size  # the page's last position is end - 1
        if readable is not None and end - 1 <= length - readable:
          del rows[slot][logical]

  def reserve(self, work: list[tuple[int, int, int]]) -> list[int]:
    """work: (slot, start, stop). Returns the shortfall of each group; takes all or nothing."""
    for slot, start, _ in work:
      self.retire(slot, start)
    changes, shortfall = [], []
    for i, g in enumerate(self.layout):
      cells = [
        (slot, logical)
        for slot, start, stop in work
        for logical in sorted({p // g.page_size for p in range(start, stop)})
      ]
      left: dict[int, int] = {}  # holders of a shared page that have not left it
      take = []
      for slot, logical in cells:
        page = self.held[i][slot].get(logical)
        if page is None:
          take.append((i, slot, logical))
        elif left.setdefault(id(page), self.holders(i, page)) > 1:
          left[id(page)] -= 1
          take.append((i, slot, logical))
      changes += take
      shortfall.append(max(len(take) - self.free(i), 0))
    if not any(shortfall):
      for i, slot, logical in changes:
        self.held[i][slot][logical] = Page()
    return shortfall

  def release(self, slot: int) -> None:
    for rows in self.held:
      rows[slot] = {}

  def fork(self, pairs: list[tuple[int, int]]) -> None:
    for g, rows in enumerate(self.held):
      before = [dict(row) for row in rows]
      for source, target in pairs:
        self.held[g][target] = dict(before[source])


@functools.cache
def jitted(name: str, layout: Layout) -> Any:
  function = getattr(pages, name)
  if name in ("reserve", "retire"):
    return jax.jit(lambda p, *args: function(p, layout, *args))
  return jax.jit(function)


class Run:
  """Real tables, their contents and the model, moved together; everything is checked each time.

  The content of a position is a number that is new for every write, so that a page written by one
  sequence and read by another shows.
  """

  def __init__(self, layout: Layout, on_device: bool):
    self.layout = layout
    self.model = Model(layout)
    self.tables = pages.init(layout, np)
    self.device = pages.init(layout, jnp) if on_device else None
    self.content = [np.full((g.pages, g.page_size), -1) for g in layout]
    self.tokens: list[list[int]] = [[] for _ in range(SLOTS)]
    self.written = 0
    self.shortages = 0
    self.copies = 0

  def call(self, name: str, *args: np.ndarray) -> Any:
    layout = (self.layout,) if name in ("reserve", "retire") else ()
    out = getattr(pages, name)(self.tables, *layout, *args)
    if self.device is not None:
      other = jitted(name, self.layout)(self.device, *map(jnp.asarray, args))
      self.device = other[0] if name == "reserve" else other
      jax.tree.map(self.same, out, other)
    self.tables = out[0] if name == "reserve" else out
    return out

  @staticmethod
  def same(x: np.ndarray, y: jax.Array) -> None:
    assert x.dtype == y.dtype == np.int32
    np.testing.assert_array_equal(x, y)

  def advance(self, work: list[tuple[int, int]], padding: list[int]) -> None:
    """work: (slot, tokens)."""
    rows = [(s, len(self.tokens[s]), len(self.tokens[s]) + n) for s, n in work]
    # Padding rows hold nonsense, in places of their own.
    calls = [*rows]
    for i, s in enumerate(padding):
      calls.insert(i * 2, (s, 5, 9))
    before = [x.copy() for x in self.content]
    slots, starts, stops = np.array(calls, np.int32).reshape(-1, 3).T
    _, copies, shortfall = self.call("reserve", slots, starts, stops)
    expected = self.model.reserve(rows)
    assert shortfall.tolist() == expected
    for g, c in enumerate(copies):
      real = c.target != NO_PAGE
      assert (real == (c.source != NO_PAGE)).all()
      assert len(np.unique(c.target[real])) == real.sum()
      self.content[g][c.target[real]] = before[g][c.source[real]]
      self.copies += int(real.sum())
    self.check()
    if any(expected):
      self.shortages += 1
      return
    for s, start, stop in rows:
      for position in range(start, stop):
        self.written += 1
        self.tokens[s].append(self.written)
        for g, (geometry, p) in enumerate(zip(self.layout, self.tables, strict=True)):
          page = p.table[s, geometry.column(position // geometry.page_size)]
          assert p.refs[page] == 1, "a page with several holders is never written"
          self.content[g][page, position % geometry.page_size] = self.written
    self.check()

  def retire(self, slots: list[int]) -> None:
    lengths = [len(self.tokens[s]) if s < SLOTS else 7 for s in slots]
    self.call("retire", np.array(slots, np.int32), np.array(lengths, np.int32))
    for s, n in zip(slots, lengths, strict=True):
      if s < SLOTS:
        self.model.retire(s, n)
    self.check()

  def release(self, slots: list[int]) -> None:
    self.call("release", np.array(slots, np.int32))
    for s in slots:
      if s < SLOTS:
        self.model.release(s)
        self.tokens[s] = []
    self.check()

  def fork(self, pairs: list[tuple[int, int]]) -> None:
    sources, targets = np.array(pairs, np.int32).reshape(-1, 2).T
    self.call("fork", sources, targets)
    pairs = [(s, t) for s, t in pairs if t < SLOTS]
    self.model.fork(pairs)
    before = [list(x) for x in self.tokens]
    for s, t in pairs:
      self.tokens[t] = list(before[s])
    self.check()

  def check(self) -> None:
    pages.check(self.tables, self.layout)
    assert pages.available(self.tables).tolist() == [
      self.model.free(g) for g in range(len(self.layout))
    ]
    for g, (geometry, p) in enumerate(zip(self.layout, self.tables, strict=True)):
      names: dict[int, Page] = {}  # physical page -> the model's page: one to one
      for s, row in enumerate(self.model.held[g]):
        assert sorted(row) == list(range(p.first[s], p.last[s]))
        for logical, page in row.items():
          physical = int(p.table[s, geometry.column(logical)])
          assert names.setdefault(physical, page) is page, "two owners"
      assert len({id(page) for page in names.values()}) == len(names)
      assert (p.refs > 0).sum() + (p.refs == 0).sum() == geometry.pages
      self.check_content(g)

  def check_content(self, g: int) -> None:
    geometry, p = self.layout[g], self.tables[g]
    for s, tokens in enumerate(self.tokens):
      window = geometry.retention.window
      start = 0 if window is None else max(len(tokens) - (window - 1), 0)
      for position in range(start, len(tokens)):
        page = p.table[s, geometry.column(position // geometry.page_size)]
        assert self.content[g][page, position % geometry.page_size] == tokens[position]


def drive(run: Run, data: st.DataObject, steps: int) -> None:
  """Random calls; the shapes of arrays are fixed when a device run would compile each anew."""
  fixed = run.device is not None
  past_end = st.sampled_from([SLOTS, SLOTS + 1, NO_PAGE])

  def fill(values: list[Any], pad: Any) -> list[Any]:
    return values + [pad() for _ in range(SLOTS - len(values))] if fixed else values

  for _ in range(steps):
    kind = data.draw(st.sampled_from(["advance"] * 5 + ["retire", "release", "fork", "fork"]))
    order = data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, SLOTS))]
    if kind == "advance":
      work = []
      for s in order:
        room = run.layout[0].max_length - len(run.tokens[s])
        work.append((s, data.draw(st.integers(0, min(run.layout[0].step_tokens, room)))))
      padding = SLOTS - len(work) if fixed else data.draw(st.integers(0, 2))
      run.advance(work, [data.draw(past_end) for _ in range(padding)])
    elif kind == "retire":
      run.retire(fill(order, functools.partial(data.draw, past_end)))
    elif kind == "release":
      # Half of them, so that pools do fill up; some twice.
      again = past_end | st.just(order[0])
      run.release(fill(order[:2], functools.partial(data.draw, again)))
    else:
      targets = fill(order, functools.partial(data.draw, past_end))
      run.fork([(data.draw(st.integers(0, SLOTS - 1)), t) for t in targets])


@settings(deadline=None, max_examples=150)
@given(layouts(), st.data())
def test_numpy_tables_follow_the_model(layout: Layout, data: st.DataObject):
  drive(Run(layout, on_device=False), data, steps=16)


@pytest.mark.parametrize("layout", JITTED, ids=["2 groups", "3 groups"])
def test_jitted_tables_are_the_numpy_tables(layout: Layout):
  @settings(deadline=None, max_examples=20)
  @given(st.data())
  def follow(data: st.DataObject) -> None:
    drive(Run(layout, on_device=True), data, steps=12)

  follow()


def test_random_runs_meet_shortages_and_copies():
  """A long run from a seed: the events that the properties are about do take place."""
  rng = np.random.default_rng(0)
  run = Run((group(4, None, 12), group(2, 5, 14)), on_device=False)
  for _ in range(300):
    if rng.random() < 0.2:
      run.fork([(int(rng.integers(SLOTS)), int(rng.integers(SLOTS)))])
    elif rng.random() < 0.15:
      run.release([int(rng.integers(SLOTS))])
    else:
      slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)]
      room = [24 - len(run.tokens[s]) for s in slots]
      run.advance(
        [(int(s), int(min(rng.integers(7), r))) for s, r in zip(slots, room, strict=True)], []
      )
  assert run.shortages > 20
  assert run.copies > 20
  assert run.written > 300


# Single cases.


def int32(*values: int) -> np.ndarray:
  return np.array(values, np.int32)


def filled(layout: Layout, *lengths: int) -> pages.Pages:
  tables = pages.init(layout, np)
  for s, n in enumerate(lengths):
    tables, _, short = pages.reserve(tables, layout, int32(s), int32(0), int32(n), n)
    assert not short.any()
  return tables


def same_tables(a: pages.Pages, b: pages.Pages) -> bool:
  return all(
    bool((x == y).all()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def test_one_short_group_takes_nothing_in_any_group():
  layout = (group(4, None, 9), group(1, None, 5))
  before = filled(layout, 3)
  after, copies, short = pages.reserve(before, layout, int32(0, 1), int32(3, 0), int32(5, 4))
  assert short.tolist() == [0, 4]  # 3 + 2 + 4 of 5
  assert same_tables(before, after)
  assert all((c.target == NO_PAGE).all() for c in copies)


def test_release_of_a_slot_named_twice_counts_its_pages_once():
  layout = (group(4, None, 9),)
  tables = pages.fork(filled(layout, 6, 5), int32(1), int32(2))
  tables = pages.release(tables, int32(1, 1, SLOTS, 1))
  pages.check(tables, layout)
  assert pages.describe(tables, layout) == {"full": {"used": 4, "cached": 0, "free": 5, "total": 9}}


def test_a_page_exists_before_the_token_after_a_page_boundary_is_written():
  layout = (group(4, None, 9),)
  tables = filled(layout, 4)
  assert tables[0].last[0] == 1
  tables, _, _ = pages.reserve(tables, layout, int32(0), int32(4), int32(5))
  assert tables[0].last[0] == 2


def test_the_last_writer_of_a_shared_page_keeps_it():
  layout = (group(4, None, 3),)
  tables = pages.fork(filled(layout, 2), int32(0, 0), int32(1, 2))
  held = tables[0].table[0, 0]
  # Three holders and two free pages: enough, since one of them keeps the original.
  slots = int32(0, 1, 2)
  tables, copies, short = pages.reserve(tables, layout, slots, int32(2, 2, 2), int32(3, 3, 3))
  assert short.tolist() == [0]
  assert tables[0].table[:3, 0].tolist() == [1, 2, held]
  assert copies[0].source[copies[0].source != NO_PAGE].tolist() == [held, held]
  pages.check(tables, layout)


def test_a_shared_page_that_is_only_read_stays_shared():
  layout = (group(4, None, 3),)
  tables = pages.fork(filled(layout, 4), int32(0), int32(1))
  tables, copies, _ = pages.reserve(tables, layout, int32(1), int32(4), int32(5))
  assert tables[0].table[0, 0] == tables[0].table[1, 0]
  assert (copies[0].target == NO_PAGE).all()


def test_an_empty_range_takes_and_copies_nothing():
  layout = (group(4, None, 1),)
  tables = pages.fork(filled(layout, 2), int32(0), int32(1))
  after, copies, short = pages.reserve(tables, layout, int32(0, 2), int32(2, 9), int32(2, 9))
  assert short.tolist() == [0]
  assert same_tables(tables, after)
  assert (copies[0].target == NO_PAGE).all()


@pytest.mark.parametrize(
  ("start", "stop", "tokens", "why"),
  [
    (8, 9, 6, "a gap after the last page"),
    (2, 16, 6, "more tokens than the call allows for"),
    (6, 26, 20, "past max_length, which would wrap around in the table"),
  ],
)
def test_ranges_that_no_pool_could_serve_are_a_shortfall(start, stop, tokens, why):
  layout = (group(4, None, 50),)
  before = filled(layout, 6 if start == 6 else 2)
  after, _, short = pages.reserve(before, layout, int32(0), int32(start), int32(stop), tokens)
  assert short[0] > 0, why
  assert same_tables(before, after)


def test_a_window_row_that_is_too_narrow_is_a_shortfall():
  """More tokens at once than the geometry was made for: the ring would overwrite its own pages."""
  layout = (group(1, 4, 50, step_tokens=2),)
  tables = filled(layout, 2)
  after, _, short = pages.reserve(tables, layout, int32(0), int32(2), int32(8), 6)
  assert layout[0].table_width == 5
  assert short.tolist() == [3]
  pages.check(after, layout)


def test_pages_that_a_window_gave_back_cannot_be_reserved_again():
  layout = (group(1, 3, 50),)
  tables = pages.init(layout, np)
  for start in (0, 6, 12):
    tables, _, _ = pages.reserve(tables, layout, int32(0), int32(start), int32(start + 6))
  after, _, short = pages.reserve(tables, layout, int32(0), int32(5), int32(7))
  assert short[0] > 0
  pages.check(after, layout)


def broken(tables: pages.Pages, **fields: Any) -> pages.Pages:
  return (dataclasses.replace(tables[0], **fields),)


def test_check_finds_what_is_wrong():
  layout = (group(4, None, 9),)
  tables = filled(layout, 6, 5)
  table, refs = tables[0].table, tables[0].refs
  cases = {
    "reference counts": {"refs": refs + (np.arange(9) == 8)},
    "twice": {"table": np.where(np.arange(6) == 1, table[:, :1], table)},
    "names no page": {"last": tables[0].last + 1},
    "does not hold": {"last": tables[0].last - [1, 1, 0, 0]},
    "ends before": {"last": tables[0].last - 9},
    "stamp": {"stamp": tables[0].stamp - 1},
    "more pages than its row": {"last": tables[0].last + 7},
  }
  for words, fields in cases.items():
    with pytest.raises(AssertionError, match=words):
      pages.check(broken(tables, **fields), layout)
  pages.check(tables, layout)


def stamped(tables: pages.Pages, stamps: list[int]) -> pages.Pages:
  which = np.flatnonzero(stamps).astype(np.int32)
  return pages.stamp(tables, (which,), (np.array(stamps, np.int32)[which],))


def test_free_pages_are_taken_first_then_cached_ones_by_stamp():
  layout = (group(4, None, 6),)
  for xp in (np, jnp):
    tables = stamped(pages.init(layout, xp), [5, 0, 3, 9, 0, 7])
    after, _, short = pages.reserve(
      tables, layout, xp.asarray(int32(0)), xp.asarray(int32(0)), xp.asarray(int32(20)), 20
    )
    assert short.tolist() == [0]
    assert np.asarray(after[0].table)[0, :5].tolist() == [1, 4, 2, 0, 5]
    assert np.asarray(after[0].stamp).tolist() == [0, 0, 0, 9, 0, 0]
    if xp is np:
      assert [x.tolist() for x in pages.evicted(tables, after)] == [[0, 2, 5]]
      pages.check(after, layout)


def test_a_stamped_page_is_copied_before_it_is_written():
  layout = (group(4, None, 6),)
  tables = filled(layout, 6)
  page = int(tables[0].table[0, 1])
  tables = stamped(tables, [3 * (i == page) for i in range(6)])
  after, copies, _ = pages.reserve(tables, layout, int32(0), int32(6), int32(7))
  assert copies[0].source.tolist()[0] == page
  assert after[0].stamp[page] == 3
  assert after[0].refs[page] == 0


def test_release_renews_stamps_tail_first_and_never_lowers_them():
  layout = (group(4, None, 9),)
  tables = filled(layout, 16)
  row = tables[0].table[0, :4]
  which = np.zeros(9, int)
  which[row[:3]] = [1, 1, 99]
  tables = pages.release(stamped(tables, which.tolist()), int32(0), 50)
  assert tables[0].stamp[row].tolist() == [53, 52, 99, 0]
  assert pages.describe(tables, layout) == {"full": {"used": 0, "cached": 3, "free": 6, "total": 9}}


_SHARE = jax.jit(lambda tables, *brought: pages.share(tables, JITTED[1], *brought))


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_share_is_the_same_on_host_and_device_and_counts(data):
  """Slots that go on from pages of another one, in every kind of group."""
  layout = JITTED[1]
  tables = pages.init(layout, np)
  length = data.draw(st.integers(1, 3)) * 5
  for start in range(0, length, 5):
    tables, _, short = pages.reserve(tables, layout, int32(0), int32(start), int32(start + 5))
    assert not short.any()
  tables = pages.retire(tables, layout, int32(0), int32(length))
  brought = []
  pad = [NO_PAGE] * data.draw(st.integers(0, 1))
  for g, p in zip(layout, tables, strict=True):
    rows = [int(p.table[0, g.column(i)]) for i in g.coverage(length)]
    brought.append(np.array([rows + pad, rows + pad], np.int32))
  slots, lengths = int32(2, SLOTS), int32(length, length)
  after = pages.share(tables, layout, slots, lengths, tuple(brought))
  pages.check(after, layout)
  other = _SHARE(jax.tree.map(jnp.asarray, tables), slots, lengths, tuple(brought))
  jax.tree.map(Run.same, after, other)
  for g, p in zip(layout, after, strict=True):
    held = [int(p.table[2, g.column(i)]) for i in range(p.first[2], p.last[2])]
    assert held == [int(p.table[0, g.column(i)]) for i in g.coverage(length)]
  # It goes on, and gives back exactly what it held.
  more, _, short = pages.reserve(after, layout, int32(2), int32(length), int32(length + 3))
  if not short.any():
    pages.check(more, layout)
  back = pages.release(more, int32(2))
  assert (pages.available(back) == pages.available(tables)).all()
