"""The page allocator: pure functions over page tables and reference counts.

One allocator serves every caller: the host loop calls these functions with numpy arrays, research
code calls them inside jit with jax arrays. A shortfall is a returned value, never an exception and
never silence, and a call that falls short takes nothing in any group.

Three facts are the whole state: which page each table entry names, how many entries name each page,
and which pages hold content that a later sequence may want (`stamp`). A page that no entry names is
cached when it has a stamp and free when it has none, so there is no free list that could disagree.
Pages are taken from the free ones first, then from the cached ones, lowest stamp first; a page that
is taken loses its stamp.

Shapes: S slots, W table width, P pages of the group, n sequences in a call.
"""

from typing import Any

import numpy as np
from flax import struct

from kvjax import arrays
from kvjax.arrays import Array
from kvjax.geometry import NO_PAGE, GroupGeometry, Layout


class GroupPages(struct.PyTreeNode):
  """Who holds what in one group.

  The sequence in slot s holds the logical pages [first[s], last[s]); page l stands in column
  l % W of its row.
  """

  table: Array  # int32 [S, W]  physical page of each held logical page, NO_PAGE elsewhere
  first: Array  # int32 [S]     first logical page held
  last: Array  # int32 [S]      one past the last logical page held
  refs: Array  # int32 [P]      table entries that name the page; 0 = nobody holds it
  stamp: (
    Array  # int32 [P]     0 = content of no later use; else its turn to be evicted, lowest first
  )


HOLE = -1
"""In `restore`: a page that is brought from elsewhere."""

Pages = tuple[GroupPages, ...]


class Copies(struct.PyTreeNode):
  """Pages whose content must be copied before the next write: page source[i] to target[i]."""

  source: Array  # int32 [m]  NO_PAGE where there is nothing to copy
  target: Array  # int32 [m]  NO_PAGE where there is nothing to copy


def init(layout: Layout, xp: Any) -> Pages:
  """Empty tables of every group, in the namespace `xp` (numpy or jax.numpy)."""
  return tuple(
    GroupPages(
      table=xp.full((g.max_sequences, g.table_width), NO_PAGE, xp.int32),
      first=xp.zeros((g.max_sequences,), xp.int32),
      last=xp.zeros((g.max_sequences,), xp.int32),
      refs=xp.zeros((g.pages,), xp.int32),
      stamp=xp.zeros((g.pages,), xp.int32),
    )
    for g in layout
  )


def available(pages: Pages) -> Array:
  """int32 [groups]: pages that nobody holds, free or cached."""
  xp = arrays.namespace(pages[0].refs)
  return xp.stack([(p.refs == 0).sum() for p in pages]).astype(xp.int32)


def reserve(
  pages: Pages,
  layout: Layout,
  slots: Array,
  starts: Array,
  stops: Array,
  tokens: int | None = None,
) -> tuple[Pages, tuple[Copies, ...], Array]:
  """Makes the positions [starts, stops) of each sequence writable, in every group.

  Pages that no position >= starts can read are given back first (sliding windows); then missing
  pages are taken, and a shared page that is about to be written is replaced by one of its own
  (copy on write: when all its holders write in this call, the last of them keeps the original,
  unless it has a stamp: content that others may want is never overwritten).

  Args:
    slots: int32 [n], distinct; values >= S are padding and take nothing.
    starts, stops: int32 [n] positions; every position below starts has been processed. An empty
      range takes nothing.
    tokens: most tokens per sequence in this call, static; the layout's step_tokens by default.

  Returns:
    (pages, copies per group, shortfall int32 [groups]). Where any shortfall is > 0 nothing was
    taken in any group. The shortfall is exactly the pages missing in that group; pages that no
    pool could serve (below what the sequence still holds, after a gap, past `tokens`, or wider
    than its row of the table) count as missing.
  """
  pages = retire(pages, layout, slots, starts)
  wants = [
    _want(p, g, slots, starts, stops, g.step_tokens if tokens is None else tokens)
    for p, g in zip(pages, layout, strict=True)
  ]
  xp = arrays.namespace(pages[0].refs)
  shortfall = xp.stack([short for _, _, _, short in wants]).astype(xp.int32)
  fits = (shortfall == 0).all()
  taken, copies = [], []
  for p, g, (logical, new, copy, _) in zip(pages, layout, wants, strict=True):
    p, c = _take(p, g, slots, logical, new & fits, copy & fits)
    taken.append(p)
    copies.append(c)
  return tuple(taken), tuple(copies), shortfall


def retire(pages: Pages, layout: Layout, slots: Array, lengths: Array) -> Pages:
  """Gives back the pages that no position >= lengths can read. int32 [n] each; slots distinct."""
  out = []
  for p, g in zip(pages, layout, strict=True):
    if g.retention.reach is None:
      out.append(p)  # full attention never gives back a page of a living sequence
      continue
    xp = arrays.namespace(p.refs)
    first = arrays.gather(p.first, slots)
    last = arrays.gather(p.last, slots)
    keep = xp.maximum(first, g.first_page(lengths).astype(xp.int32))
    passed = _inside(p, slots) & (keep > first)
    if _nowhere(passed):
      out.append(p)
      continue
    passed, rows, first, last, keep = _narrow(passed, slots, first, last, keep)
    p = _drop(p, rows, passed, keep)
    out.append(
      p.replace(
        first=arrays.scatter_set(p.first, rows, xp.where(passed, keep, first)),
        last=arrays.scatter_set(p.last, rows, xp.where(passed, xp.maximum(last, keep), last)),
      )
    )
  return tuple(out)


def release(pages: Pages, slots: Array, now: Array | int = 0) -> Pages:
  """Gives back everything that the sequences in `slots` (int32 [n]) hold; the slots are empty.

  A slot that is named twice is given back once. Stamped pages get new stamps from `now` on, the
  last page of a sequence the lowest: tails are evicted before heads. A stamp never goes down.
  """
  xp = arrays.namespace(pages[0].refs)
  slots = xp.where(_rank(xp.asarray(slots), xp) > 0, len(pages[0].first), slots)
  out = []
  for p in pages:
    p = _restamp(p, slots, now)
    p = _drop(p, slots, _inside(p, slots), arrays.gather(p.last, slots))
    zero = xp.zeros_like(arrays.gather(p.first, slots))
    out.append(
      p.replace(
        first=arrays.scatter_set(p.first, slots, zero),
        last=arrays.scatter_set(p.last, slots, zero),
      )
    )
  return tuple(out)


def fork(pages: Pages, sources: Array, targets: Array) -> Pages:
  """Each slot targets[i] becomes a copy of slot sources[i], sharing all its pages.

  All copies happen at once, so that a permutation with repeats (beam search) is one call. What the
  targets held before is given back. int32 [n] each; targets distinct, values >= S are padding.
  """
  out = []
  for p in pages:
    rows = arrays.gather(p.table, sources)
    shared = _held(p, sources) & _inside(p, targets)[:, None]
    first, last = arrays.gather(p.first, sources), arrays.gather(p.last, sources)
    xp = arrays.namespace(p.refs)
    gained = arrays.scatter_add(p.refs, xp.where(shared, rows, NO_PAGE), 1)
    p = _drop(p.replace(refs=gained), targets, _inside(p, targets), arrays.gather(p.last, targets))
    out.append(
      p.replace(
        table=arrays.scatter_set(p.table, *_row(p, targets, rows)),
        first=arrays.scatter_set(p.first, targets, first),
        last=arrays.scatter_set(p.last, targets, last),
      )
    )
  return tuple(out)


def share(
  pages: Pages, layout: Layout, slots: Array, lengths: Array, physical: tuple[Array, ...]
) -> Pages:
  """Each slot continues from `lengths` tokens of other sequences, whose pages it holds as well.

  What the slots held before is given back. int32 [n] each; slots distinct, values >= S are padding.

  Args:
    physical: for each group int32 [n, m], the pages of `GroupGeometry.coverage(length)` in logical
      order, NO_PAGE after them; m = 0 for a group that brings nothing.
  """
  out = []
  for p, g, brought in zip(pages, layout, physical, strict=True):
    xp = arrays.namespace(p.refs)
    inside = _inside(p, slots)
    p = _drop(p, slots, inside, arrays.gather(p.last, slots))
    count = (brought < NO_PAGE).sum(-1).astype(xp.int32)
    # What is not brought lies before what is: a chunk that starts here, scratch memory.
    first = xp.where(count > 0, g.first_page(lengths), lengths // g.page_size).astype(xp.int32)
    logical = first[:, None] + xp.arange(brought.shape[1], dtype=xp.int32)
    real = inside[:, None] & (brought < NO_PAGE)
    row = xp.where(real, slots[:, None], len(p.first))
    out.append(
      p.replace(
        table=arrays.scatter_set(p.table, (row, g.column(logical)), brought),
        refs=arrays.scatter_add(p.refs, xp.where(real, brought, NO_PAGE), 1),
        first=arrays.scatter_set(p.first, slots, first),
        last=arrays.scatter_set(p.last, slots, first + count),
      )
    )
  return tuple(out)


def restore(
  pages: Pages, layout: Layout, slots: Array, lengths: Array, physical: tuple[Array, ...]
) -> tuple[Pages, tuple[Array, ...], Array]:
  """`share` where some of the pages are to be brought from elsewhere, and get pages for that.

  What is shared is held before anything is taken, so that no page of the hit makes room for it.

  Args:
    slots: int32 [n], distinct slots that hold nothing.
    physical: as in `share`, HOLE for each page that is brought.

  Returns:
    (pages, `physical` with a page for each hole, shortfall int32 [groups]). Where any shortfall is
    > 0 nothing was taken or shared in any group.
  """
  xp = arrays.namespace(pages[0].refs)
  held, filled, short = [], [], []
  for p, brought in zip(pages, physical, strict=True):
    known = xp.where((brought >= 0) & _inside(p, slots)[:, None], brought, NO_PAGE)
    holding = p.replace(refs=arrays.scatter_add(p.refs, known, 1))
    hole = (brought == HOLE) & _inside(p, slots)[:, None]
    count = hole.sum()
    short.append(xp.maximum(count - (holding.refs == 0).sum(), 0))
    candidates = _candidates(holding, count)
    if len(candidates):
      rank = xp.cumsum(hole.reshape(-1)).reshape(hole.shape)
      taken = arrays.gather(candidates, xp.maximum(rank - 1, 0))
    else:
      taken = xp.full(hole.shape, NO_PAGE, xp.int32)
    filled.append(xp.where(hole, taken, brought).astype(xp.int32))
    held.append(xp.where(hole, taken, NO_PAGE))
  shortfall = xp.stack(short).astype(xp.int32)
  fits = (shortfall == 0).all()
  nobody = xp.where(fits, slots, len(pages[0].first))
  out = tuple(
    p.replace(stamp=arrays.scatter_set(p.stamp, xp.where(fits, new, NO_PAGE), 0))
    for p, new in zip(pages, held, strict=True)
  )
  return share(out, layout, nobody, lengths, tuple(filled)), tuple(filled), shortfall


def stamp(pages: Pages, which: tuple[Array, ...], values: tuple[Array, ...]) -> Pages:
  """Sets the stamps of pages: for each group int32 [n] pages (NO_PAGE is padding) and stamps."""
  return tuple(
    p.replace(stamp=arrays.scatter_set(p.stamp, ids, new)) if len(ids) else p
    for p, ids, new in zip(pages, which, values, strict=True)
  )


def evicted(before: Pages, after: Pages) -> tuple[Any, ...]:
  """For each group the pages that lost their stamp between two states (numpy)."""
  return tuple(
    np.flatnonzero((a.stamp > 0) & (b.stamp == 0)) if a.stamp is not b.stamp else np.zeros(0, int)
    for a, b in zip(before, after, strict=True)
  )


def check(pages: Pages, layout: Layout) -> None:
  """Raises AssertionError unless pages are conserved and counted right (numpy).

  Every table entry inside [first, last) names a page, every other is NO_PAGE, no sequence holds a
  page twice, refs are the number of entries, and free + cached + in use = total.
  """
  for p, g in zip(pages, layout, strict=True):
    table, first, last, refs, stamps = (
      np.asarray(x) for x in (p.table, p.first, p.last, p.refs, p.stamp)
    )
    width = table.shape[1]
    assert (last >= first).all(), f"{g.name}: a slot ends before it starts"
    assert (last - first <= width).all(), f"{g.name}: a slot holds more pages than its row"
    logical = first[:, None] + (np.arange(width) - first[:, None]) % width
    held = logical < last[:, None]
    assert (table[held] < g.pages).all(), f"{g.name}: an entry names no page"
    assert (table[~held] == NO_PAGE).all(), f"{g.name}: a slot names pages that it does not hold"
    ordered = np.sort(np.where(held, table, -1 - np.arange(width)), axis=1)
    assert (np.diff(ordered, axis=1) > 0).all(), f"{g.name}: a slot holds a page twice"
    named = np.bincount(table[held], minlength=g.pages)
    assert (named == refs).all(), f"{g.name}: reference counts differ from the tables"
    assert (stamps >= 0).all(), f"{g.name}: a stamp is negative"
    counts = (
      ((refs == 0) & (stamps == 0)).sum(),
      ((refs == 0) & (stamps > 0)).sum(),
      (refs > 0).sum(),
    )
    assert sum(counts) == g.pages, f"{g.name}: free, cached, in use: {counts} of {g.pages} pages"


def _want(
  p: GroupPages, g: GroupGeometry, slots: Array, starts: Array, stops: Array, tokens: int
) -> tuple[Array, Array, Array, Array]:
  """What `reserve` needs in one group: (logical pages [n, m], new, copy [n, m], shortfall)."""
  xp = arrays.namespace(p.refs)
  valid = _inside(p, slots) & (stops > starts)
  first, last = arrays.gather(p.first, slots), arrays.gather(p.last, slots)
  begin, end = starts // g.page_size, g.pages_for(stops)
  m = g.pages_per_step(tokens)
  logical = begin[:, None] + xp.arange(m, dtype=xp.int32)
  inside = valid[:, None] & (logical < end[:, None])
  held = inside & (logical >= first[:, None]) & (logical < last[:, None])
  new = inside & ~held
  physical = xp.where(held, arrays.gather2(p.table, slots[:, None], g.column(logical)), NO_PAGE)
  # A stamp counts as a holder that never writes.
  holders = arrays.gather(p.refs, physical) + (arrays.gather(p.stamp, physical) > 0)
  holders = xp.where(held, holders, 0)
  shared = holders > 1
  if _nowhere(shared):
    copy = shared
  else:
    copy = shared & (_rank(physical, xp) < holders - 1)
  # Cells past the static grid or the row, given back before, or after a gap could not be served
  # whatever the pool holds.
  beyond = (end - begin - m, end - first - p.table.shape[1], first - begin, begin - last)
  outside = (valid * xp.maximum(xp.stack(beyond), 0)).sum()
  wanted = new | copy
  if _nowhere(wanted):
    return logical, new, copy, outside
  lacking = xp.maximum(wanted.sum() - (p.refs == 0).sum(), 0)
  return logical, new, copy, outside + lacking


def _take(
  p: GroupPages, g: GroupGeometry, slots: Array, logical: Array, new: Array, copy: Array
) -> tuple[GroupPages, Copies]:
  """Gives pages that nobody holds to the cells `new | copy` [n, m] of one group."""
  xp = arrays.namespace(p.refs)
  take = new | copy
  nothing = xp.full((take.size,), NO_PAGE, xp.int32)
  copies = Copies(source=nothing, target=nothing)
  if _nowhere(take):
    return p, copies
  copying = not _nowhere(copy)
  if not copying:
    _, slots, logical, new, take = _narrow(take.any(-1), slots, logical, new, take)
  rank = xp.cumsum(take.reshape(-1)).reshape(take.shape)
  candidates = _candidates(p, rank.reshape(-1)[-1])
  fresh = xp.where(take, arrays.gather(candidates, rank - 1), NO_PAGE).astype(xp.int32)
  column = g.column(logical)
  row = xp.where(take, slots[:, None], len(p.table))
  refs = arrays.scatter_add(p.refs, fresh, 1)
  if copying:
    old = xp.where(copy, arrays.gather2(p.table, slots[:, None], column), NO_PAGE)
    refs = arrays.scatter_add(refs, old, -1)
    targets = xp.where(copy, fresh, NO_PAGE)
    copies = Copies(source=old.reshape(-1), target=targets.reshape(-1))
  stamp = p.stamp
  if not _nowhere(arrays.gather(stamp, fresh) > 0):
    stamp = arrays.scatter_set(stamp, fresh, 0)
  last = xp.maximum(
    arrays.gather(p.last, slots), xp.where(new, logical + 1, 0).max(-1).astype(xp.int32)
  )
  p = p.replace(
    table=arrays.scatter_set(p.table, (row, column), fresh),
    last=arrays.scatter_set(p.last, slots, last),
    refs=refs,
    stamp=stamp,
  )
  return p, copies


def _candidates(p: GroupPages, count: Array) -> Array:
  """Pages in the order in which they are taken, at least `count` of them: free ones by number, then
  cached ones by stamp. Fewer only where nobody may take them."""
  xp = arrays.namespace(p.refs)
  unheld = p.refs == 0
  if not isinstance(p.refs, np.ndarray):
    return xp.argsort(xp.where(unheld, p.stamp, NO_PAGE), stable=True)
  free = np.flatnonzero(unheld & (p.stamp == 0))
  lacking = int(count) - len(free)
  if lacking <= 0:
    return free
  cached = np.flatnonzero(unheld & (p.stamp > 0))
  if lacking < len(cached):
    cached = cached[np.argpartition(p.stamp[cached], lacking - 1)[:lacking]]
  order = np.lexsort((cached, p.stamp[cached]))
  return np.concatenate([free, cached[order]])


def _restamp(p: GroupPages, slots: Array, now: Array | int) -> GroupPages:
  """Renews the stamps of stamped pages of `slots`: last page now, the one before now + 1, …"""
  xp = arrays.namespace(p.refs)
  rows = arrays.gather(p.table, slots)
  held = _held(p, slots) & _inside(p, slots)[:, None]
  stamped = held & (arrays.gather(p.stamp, xp.where(held, rows, 0)) > 0)
  if _nowhere(stamped):
    return p
  age = arrays.gather(p.last, slots)[:, None] - 1 - _logical(p, slots)
  at = xp.where(stamped, rows, NO_PAGE)
  return p.replace(stamp=arrays.scatter_max(p.stamp, at, (now + age).astype(xp.int32)))


def _drop(p: GroupPages, slots: Array, which: Array, keep: Array) -> GroupPages:
  """Gives back the pages below logical page keep[i] of slots[i] where which[i] (tables, refs)."""
  xp = arrays.namespace(p.refs)
  first, width = arrays.gather(p.first, slots), p.table.shape[1]
  stop = xp.where(which, xp.minimum(keep, arrays.gather(p.last, slots)), first)
  most = width
  if isinstance(stop, np.ndarray):  # the host knows how few they are
    most = max(int((stop - first).max(initial=0)), 0)
  logical = first[:, None] + xp.arange(most, dtype=xp.int32)
  drop = logical < stop[:, None]
  row, column = xp.where(drop, slots[:, None], len(p.first)), logical % width
  pages = xp.where(drop, arrays.gather2(p.table, slots[:, None], column), NO_PAGE)
  return p.replace(
    table=arrays.scatter_set(p.table, (row, column), NO_PAGE),
    refs=arrays.scatter_add(p.refs, pages, -1),
  )


def _logical(p: GroupPages, slots: Array) -> Array:
  """[n, W]: the one logical page >= first that each column of a row could hold."""
  xp = arrays.namespace(p.refs)
  width = p.table.shape[1]
  first = arrays.gather(p.first, slots)[:, None]
  return first + (xp.arange(width, dtype=xp.int32) - first) % width


def _held(p: GroupPages, slots: Array) -> Array:
  """bool [n, W]: which columns of a row hold a page."""
  return _logical(p, slots) < arrays.gather(p.last, slots)[:, None]


def _inside(p: GroupPages, slots: Array) -> Array:
  """bool [n]: which entries of `slots` are slots and not padding."""
  return slots < len(p.first)


def _row(p: GroupPages, slots: Array, values: Array) -> tuple[tuple[Array, Array], Array]:
  """Index and values that write whole table rows."""
  xp = arrays.namespace(p.refs)
  return (slots[:, None], xp.arange(p.table.shape[1], dtype=xp.int32)), values


def _nowhere(mask: Array) -> bool:
  """True when a numpy mask is empty, to skip work on the host; a traced mask is never known."""
  return isinstance(mask, np.ndarray) and not mask.any()


def _narrow(which: Array, *rows: Array) -> tuple[Array, ...]:
  """(which, *rows) without the rows where a numpy mask [n] is False, to save work on the host."""
  if not isinstance(which, np.ndarray) or which.all():
    return (which, *rows)
  return (which[which], *(x[which] for x in rows))


def _rank(values: Array, xp: Any) -> Array:
  """How many earlier cells (in row-major order) hold the same value; same shape as `values`."""
  flat = values.reshape(-1)
  order = xp.argsort(flat, stable=True)
  ordered = flat[order]
  rank = xp.arange(len(flat)) - xp.searchsorted(ordered, ordered)
  out = xp.zeros_like(rank)
  return arrays.scatter_set(out, order, rank).reshape(values.shape)


def describe(pages: Pages, layout: Layout) -> dict[str, dict[str, int]]:
  """{group: {"used", "cached", "free", "total"}} in pages (numpy)."""
  out = {}
  for p, g in zip(pages, layout, strict=True):
    used = int((p.refs > 0).sum())
    cached = int(((p.refs == 0) & (p.stamp > 0)).sum())
    out[g.name] = {
      "used": used,
      "cached": cached,
      "free": g.pages - used - cached,
      "total": g.pages,
    }
  return out
