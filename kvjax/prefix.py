"""Prefix sharing: which cached pages a new sequence can go on from.

Pages are named by a chained sha256 over tagged fields, one link per hash unit of tokens. A
*boundary* is a length at which a sequence could take over from another one: every reusable group
must bring whole pages there (`geometry.resumable`). Boundaries of one namespace form a tree, as
prefixes do. A boundary is *live* while every group still holds its `coverage(length)`; the longest
hit of a prompt is the deepest live boundary on its path.

Pages leave in two ways. The allocator evicts by stamp, per group; the boundaries that needed the
page die, and pages that no live boundary needs any more lose their stamps at once, so that no
cached page is out of reach of every later hit. Full-attention pages are needed by everything below
them in the tree, pages of a window, a chunk or a state by the boundaries whose coverage has them.

Nothing here touches a device or a clock.
"""

import bisect
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from kvjax import pages as pages_lib
from kvjax.geometry import GroupGeometry, Layout, hash_unit, resumable, stride

_MAX_STAMP = 2**30  # then stamps are counted from 1 again


def digest(**fields: bytes | str | int | None) -> bytes:
  """sha256 over tagged fields: each name and value with its length and kind before it, so that no
  two sets of fields read the same (a salt that equals an adapter's name is another key)."""
  h = hashlib.sha256(b"kvjax.prefix.1")
  for name, value in sorted(fields.items()):
    kind = type(value).__name__
    data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    h.update(f"{name}:{kind}:{len(data)}:".encode())
    h.update(data)
  return h.digest()


def namespace(model: str, layout: Layout) -> bytes:
  """What all pages of one engine have in common.

  Args:
    model: names weights, revision and compute type.
    layout: geometry of every reusable group: layers, page size, retention, leaves and dtypes.
  """
  groups = ";".join(
    repr((g.name, g.layers, g.page_size, g.retention, g.leaves)) for g in layout if g.reusable
  )
  return digest(model=model, groups=groups)


def root_key(namespace: bytes, salt: str | None = None, adapter: str | None = None) -> bytes:
  """The start of a hash chain: what must be equal besides the tokens.

  Args:
    salt: keeps requests of different owners apart.
    adapter: name of a change to the weights.
  """
  return digest(namespace=namespace, salt=salt, adapter=adapter)


class Chain:
  """The hash chain of one sequence, made as far as it is asked for.

  Attributes:
    unit: tokens per link.
  """

  def __init__(self, root: bytes, unit: int):
    self.unit = unit
    self._keys = [root]

  def copy(self) -> "Chain":
    """The same chain, for tokens that may go on differently."""
    other = Chain(self._keys[0], self.unit)
    other._keys = list(self._keys)
    return other

  def key(self, length: int, tokens: Sequence[int]) -> bytes:
    """The key of the prefix of `length` tokens, a multiple of the unit.

    `tokens` only grows from call to call.
    """
    links, unit = length // self.unit, self.unit
    for i in range(len(self._keys) - 1, links):
      part = np.asarray(tokens[i * unit : (i + 1) * unit], "<i4")
      if len(part) != unit:
        raise ValueError(f"expected {(i + 1) * unit} tokens to name a prefix, got {len(tokens)}")
      self._keys.append(hashlib.sha256(self._keys[i] + part.tobytes()).digest())
    return self._keys[links]


class Boundary:
  """A place in the tree of prefixes; see the module's text.

  Attributes:
    length, key: of the prefix.
    parent, children: neighbours in the tree, children by key.
    pages: for each group, logical -> physical page of those whose last token lies after the
      parent's length: of a full group all of them, of another one those that live boundaries need.
    live: whether a sequence can go on from here.
    brought: while live, for each group that is not full the physical pages int32 of its coverage.
    holds: reasons to stay in the tree: being live, children in it, sequences that stand here.
    attached: whether it is in the tree.
  """

  __slots__ = (
    "attached",
    "brought",
    "children",
    "holds",
    "key",
    "length",
    "live",
    "pages",
    "parent",
  )

  def __init__(self, length: int, key: bytes, parent: "Boundary | None", groups: int):
    self.length = length
    self.key = key
    self.parent = parent
    self.children: dict[bytes, Boundary] = {}
    self.pages: list[dict[int, int]] = [{} for _ in range(groups)]
    self.live = False
    self.brought: dict[int, np.ndarray] = {}
    self.holds = 0
    self.attached = True

  def path(self) -> "Iterator[Boundary]":
    """From here up to the root."""
    at: Boundary | None = self
    while at is not None:
      yield at
      at = at.parent


class PrefixIndex:
  """The host's index of cached prefixes over all groups.

  It decides which pages bear stamps; `flush` brings its decisions to the allocator's arrays and is
  called before anything is reserved. Roots of namespaces are dropped when nothing hangs on them.

  Attributes:
    unit: tokens per link of the hash chain.
    now: the next stamp.
  """

  def __init__(self, layout: Layout):
    self.layout = layout
    self.unit = hash_unit(layout)
    self.now = 1
    step = stride(layout)
    lengths = range(step, layout[0].max_length + 1, step)
    self._lengths = [length for length in lengths if resumable(layout, length)]
    self._groups = [i for i, g in enumerate(layout) if g.reusable]
    self._full = [i for i in self._groups if layout[i].retention.reach is None]
    self._bounded = [i for i in self._groups if layout[i].retention.reach is not None]
    self._roots: dict[bytes, Boundary] = {}
    # Which boundary records a page, and as which logical page.
    self._where: list[dict[int, tuple[Boundary, int]]] = [{} for _ in layout]
    # Live boundaries that need a page, of the groups that are not full.
    self._uses = [np.zeros(g.pages, np.int32) for g in layout]
    self._changes: list[dict[int, int]] = [{} for _ in layout]  # stamps to be set

  # Reading.

  def following(self, length: int) -> int | None:
    """The next boundary above `length`; None past the longest sequence."""
    at = bisect.bisect_right(self._lengths, length)
    return self._lengths[at] if at < len(self._lengths) else None

  def common(
    self, chain: Chain, tokens: Sequence[int], other: Chain, others: Sequence[int], limit: int
  ) -> int:
    """The longest boundary of at most `limit` tokens that two sequences have in common, both of one
    namespace; else 0."""
    if chain.key(0, tokens) != other.key(0, others):
      return 0
    most = bisect.bisect_right(self._lengths, limit)
    equal = bisect.bisect_left(
      self._lengths[:most],
      True,
      key=lambda length: chain.key(length, tokens) != other.key(length, others),
    )
    return self._lengths[equal - 1] if equal else 0

  def lookup(self, chain: Chain, tokens: Sequence[int], limit: int) -> Boundary | None:
    """The deepest live boundary of at most `limit` tokens on a sequence's path. Changes nothing."""
    at = self._roots.get(chain.key(0, tokens))
    best = None
    while at is not None:
      if at.live:
        best = at
      length = self.following(at.length)
      if length is None or length > limit:
        break
      at = at.children.get(chain.key(length, tokens))
    return best

  def brought(self, boundary: Boundary) -> tuple[list[int], ...]:
    """For each group the physical pages of coverage(length), in logical order; it is live."""
    return tuple(
      self._brought(boundary, i) if g.reusable else [] for i, g in enumerate(self.layout)
    )

  def _brought(self, boundary: Boundary, group: int) -> list[int]:
    if group in boundary.brought:
      pages: list[int] = boundary.brought[group].tolist()
      return pages
    spans = [list(at.pages[group].values()) for at in boundary.path()]
    return [page for span in reversed(spans) for page in span]

  def standing(self, chain: Chain, tokens: Sequence[int], limit: int) -> Boundary | None:
    """The deepest boundary of at most `limit` tokens on a path, live or not. Changes nothing."""
    at = self._roots.get(chain.key(0, tokens))
    while at is not None:
      length = self.following(at.length)
      child = None
      if length is not None and length <= limit:
        child = at.children.get(chain.key(length, tokens))
      if child is None:
        return at
      at = child
    return None

  def held(
    self, boundary: Boundary | None, length: int, groups: Sequence[int] | None = None
  ) -> tuple[list[int], ...]:
    """For each group the physical pages of coverage(length) as far as a path has them, in logical
    order; -1 for the others. Empty for groups that are not reusable or not among `groups`."""
    out: list[list[int]] = []
    for i, g in enumerate(self.layout):
      wanted = g.reusable and (groups is None or i in groups)
      needed = g.coverage(length) if wanted else range(0)
      row = [-1] * len(needed)
      for at in () if boundary is None else boundary.path():
        if at.length <= needed.start * g.page_size:
          break
        for logical, page in at.pages[i].items():
          if logical in needed:
            row[logical - needed.start] = page
      out.append(row)
    return tuple(out)

  def lengths(self, above: int, most: int) -> list[int]:
    """The boundaries in (above, most], longest first."""
    first = bisect.bisect_right(self._lengths, above)
    return self._lengths[first : bisect.bisect_right(self._lengths, most)][::-1]

  # Writing.

  def pin(self, boundary: Boundary) -> Boundary:
    """A sequence stands here: the path above keeps its full-attention pages in the index."""
    boundary.holds += 1
    return boundary

  def unpin(self, boundary: Boundary) -> None:
    if boundary.attached:
      self._let_go(boundary)

  def start(self, chain: Chain) -> Boundary:
    """The root of a chain's namespace, pinned."""
    return self.pin(self._root(chain))

  def publish(
    self,
    at: Boundary,
    chain: Chain,
    tokens: Sequence[int],
    length: int,
    pages: pages_lib.Pages,
    slot: int,
  ) -> Boundary:
    """Names what a sequence has written up to `length` tokens, from boundary `at` on.

    Pages that the index has already under their names stay; those of the sequence fill gaps.

    Args:
      at: pinned; the result is pinned in its place.
      tokens: at least `length` of them.
      pages, slot: the sequence's rows of the tables.

    Returns:
      The last boundary within `length`.
    """
    deepest = at
    while not deepest.attached and deepest.parent is not None:
      deepest = deepest.parent
    if not deepest.attached:
      deepest = self._root(chain)
    following = self.following(deepest.length)
    while following is not None and following <= length:
      key = chain.key(following, tokens)
      child = deepest.children.get(key)
      if child is None:
        child = self._grow(deepest, following, key, pages, slot)
        if child is None:
          break
      if not child.live and self._revive(child, pages, slot):
        # Pages that are back may have been the last that boundaries below lacked.
        for below in [at for g in self._bounded for at in self._reading(child, self.layout[g])]:
          if not below.live:
            self._revive(below)
      deepest = child
      following = self.following(deepest.length)
    if deepest is not at:
      self.pin(deepest)
      self.unpin(at)
    return deepest

  def evict(self, evicted: Sequence[np.ndarray]) -> None:
    """Pages (by group) were taken by the allocator: forgets them and what needed them."""
    for group in self._groups:
      for page in evicted[group].tolist():
        entry = self._where[group].get(page)
        if entry is None:
          continue
        boundary, logical = entry
        if group in self._full:
          self._cut(boundary)
        else:
          g = self.layout[group]
          for below in list(_within(boundary, g, logical)):
            self._die(below)

  def touch(self, boundary: Boundary) -> None:
    """Gives the pages of a live boundary new stamps, the last page of each group the lowest."""
    brought = self.brought(boundary)
    now = self.tick(max(map(len, brought)))
    for changes, pages in zip(self._changes, brought, strict=True):
      for age, page in enumerate(reversed(pages)):
        changes[page] = now + age

  def clear(self) -> None:
    """Forgets everything; pages that nobody holds become free."""
    for root in list(self._roots.values()):
      self._cut(root)

  def flush(self, pages: pages_lib.Pages) -> pages_lib.Pages:
    """The tables with the stamps that the index wants."""
    if self.now >= _MAX_STAMP:
      pages = self._renumber(pages)
    if not any(self._changes):
      return pages
    which = tuple(np.fromiter(c.keys(), np.int32, len(c)) for c in self._changes)
    values = tuple(np.fromiter(c.values(), np.int32, len(c)) for c in self._changes)
    for c in self._changes:
      c.clear()
    return pages_lib.stamp(pages, which, values)

  def tick(self, count: int = 1) -> int:
    """The current stamp, and moves it on by `count`."""
    now = self.now
    self.now += count
    return now

  def check(self, pages: pages_lib.Pages) -> None:
    """Raises AssertionError unless names, stamps and the tree agree (nothing may be unflushed)."""
    assert not any(self._changes), "changes that were not flushed"
    for i, (g, p) in enumerate(zip(self.layout, pages, strict=True)):
      named = np.flatnonzero(p.stamp)
      assert set(named.tolist()) == set(self._where[i]), f"{g.name}: names and stamps differ"
    seen = 0
    used = [np.zeros(g.pages, np.int32) for g in self.layout]
    stack = list(self._roots.values())
    while stack:
      at = stack.pop()
      stack.extend(at.children.values())
      assert at.attached
      assert at.holds >= at.live + len(at.children), "a boundary has lost a hold"
      assert at.holds > 0, "a boundary without a reason to stay"
      seen += sum(len(pages) for pages in at.pages)
      for i in self._full:
        g = self.layout[i]
        start = 0 if at.parent is None else at.parent.length
        assert list(at.pages[i]) == list(range(g.pages_for(start), g.pages_for(at.length)))
      if at.live:
        for i in self._bounded:
          assert (at.brought[i] == self._known(at, i)).all(), "a live boundary lacks pages"
          used[i][at.brought[i]] += 1
    assert seen == sum(map(len, self._where)), "pages are recorded outside the tree"
    assert all(map(np.array_equal, used, self._uses)), (
      "the uses of pages differ from the live boundaries"
    )

  # The tree.

  def _root(self, chain: Chain) -> Boundary:
    key = chain.key(0, ())
    root = self._roots.get(key)
    if root is None:
      root = self._roots[key] = Boundary(0, key, None, len(self.layout))
    return root

  def _grow(
    self, parent: Boundary, length: int, key: bytes, pages: pages_lib.Pages, slot: int
  ) -> Boundary | None:
    """A new boundary below `parent`, with the full-attention pages of a sequence's row."""
    child = Boundary(length, key, parent, len(self.layout))
    for i in self._full:
      g, p = self.layout[i], pages[i]
      for logical in range(g.pages_for(parent.length), g.pages_for(length)):
        if not p.first[slot] <= logical < p.last[slot]:
          return None
        child.pages[i][logical] = int(p.table[slot, g.column(logical)])
    for i in self._full:
      for page in child.pages[i].values():
        if page in self._where[i]:
          return None  # the page has another name: a sequence's row that a hit did not bring
    for i in self._full:
      for logical, page in child.pages[i].items():
        self._record(i, child, logical, page)
    parent.children[key] = child
    parent.holds += 1
    return child

  def _reading(self, boundary: Boundary, g: GroupGeometry) -> list[Boundary]:
    """Boundaries below that need pages of group g from before `boundary`."""
    last = (boundary.length - 1) // g.page_size
    return [at for child in boundary.children.values() for at in _within(child, g, last)]

  def _revive(
    self, boundary: Boundary, pages: pages_lib.Pages | None = None, slot: int = 0
  ) -> bool:
    """Makes a boundary live if its bounded groups' pages are all there or in a sequence's row."""
    found: dict[int, np.ndarray] = {}
    fresh: list[tuple[int, int, int]] = []  # group, logical, physical page of the row
    for i in self._bounded:
      known = self._known(boundary, i)
      if -1 in known:
        if pages is None:
          return False
        g, p = self.layout[i], pages[i]
        first = g.coverage(boundary.length).start
        for at in np.flatnonzero(known < 0).tolist():
          logical = first + at
          if not p.first[slot] <= logical < p.last[slot]:
            return False
          known[at] = page = int(p.table[slot, g.column(logical)])
          if page in self._where[i]:
            return False
          fresh.append((i, logical, page))
      found[i] = known
    for i, logical, page in fresh:
      self._record(i, self._owner(boundary, i, logical), logical, page)
    for i, known in found.items():
      self._uses[i][known] += 1
    boundary.brought = found
    boundary.live = True
    boundary.holds += 1
    return True

  def _known(self, boundary: Boundary, group: int) -> np.ndarray:
    """Physical pages of a boundary's coverage as far as the index has them, -1 for the others."""
    g = self.layout[group]
    needed = g.coverage(boundary.length)
    out = np.full(len(needed), -1, np.int32)
    parent = boundary.parent
    if parent is not None and parent.live:
      # The parent's coverage, moved on: all but what lies in this boundary's own span.
      first = g.coverage(parent.length).start
      common = parent.brought[group][max(needed.start - first, 0) :]
      out[: len(common)] = common[: len(out)]
      sources = [boundary]
    else:
      sources = []
      for at in boundary.path():
        sources.append(at)
        if at.length <= needed.start * g.page_size:
          break
    for at in sources:
      for logical, page in at.pages[group].items():
        if logical in needed:
          out[logical - needed.start] = page
    return out

  def _owner(self, boundary: Boundary, group: int, logical: int) -> Boundary:
    """The boundary in whose span a page of its coverage ends."""
    end = (logical + 1) * self.layout[group].page_size
    for at in boundary.path():
      if at.parent is None or at.parent.length < end:
        return at
    raise AssertionError("a page before the root")

  def _record(self, group: int, boundary: Boundary, logical: int, page: int) -> None:
    boundary.pages[group][logical] = page
    self._where[group][page] = (boundary, logical)
    self._changes[group][page] = self.tick()

  def _forget(self, group: int, page: int) -> None:
    boundary, logical = self._where[group].pop(page)
    del boundary.pages[group][logical]
    self._changes[group][page] = 0

  def _die(self, boundary: Boundary, prune: bool = True) -> None:
    """A live boundary loses its hit; pages that only it needed lose their names."""
    if not boundary.live:
      return
    boundary.live = False
    for i, pages in boundary.brought.items():
      uses = self._uses[i]
      uses[pages] -= 1
      for page in pages[uses[pages] == 0].tolist():
        self._forget(i, page)
    boundary.brought = {}
    if prune:
      self._let_go(boundary)
    else:
      boundary.holds -= 1

  def _let_go(self, boundary: Boundary) -> None:
    """Takes away one reason to stay; without any the boundary leaves, and maybe its parents."""
    at: Boundary | None = boundary
    while at is not None:
      at.holds -= 1
      if at.holds > 0:
        return
      parent = at.parent
      self._remove(at)
      at = parent

  def _remove(self, boundary: Boundary) -> None:
    """Takes a boundary that is not live out of the tree, without looking at its parent's holds."""
    for i in self._full:
      for page in list(boundary.pages[i].values()):
        self._forget(i, page)
    boundary.attached = False
    if boundary.parent is None:
      self._roots.pop(boundary.key, None)
    else:
      boundary.parent.children.pop(boundary.key, None)

  def _cut(self, boundary: Boundary) -> None:
    """Removes a boundary and everything below it."""
    below = [boundary]
    for at in below:
      below.extend(at.children.values())
    for at in reversed(below):
      self._die(at, prune=False)
      self._remove(at)
    if boundary.parent is not None and boundary.parent.attached:
      self._let_go(boundary.parent)

  def _renumber(self, pages: pages_lib.Pages) -> pages_lib.Pages:
    """The same order of stamps, counted from 1."""
    values = np.unique(np.concatenate([p.stamp for p in pages]))
    values = values[values > 0]
    out = []
    for p, changes in zip(pages, self._changes, strict=True):
      ranks = np.where(p.stamp > 0, np.searchsorted(values, p.stamp) + 1, 0)
      out.append(p.replace(stamp=ranks.astype(np.int32)))
      for n, page in enumerate(page for page, value in changes.items() if value):
        changes[page] = len(values) + 1 + n
    self.now = len(values) + 1 + sum(map(len, self._changes))
    return tuple(out)


def _within(boundary: Boundary, g: GroupGeometry, logical: int) -> Iterator[Boundary]:
  """Boundaries from here down whose coverage has a logical page of group g."""
  stack = [boundary]
  while stack:
    at = stack.pop()
    if g.first_page(at.length) > logical:
      continue
    yield at
    stack.extend(at.children.values())


def padded(brought: Sequence[Sequence[int]]) -> tuple[np.ndarray, ...]:
  """`PrefixIndex.brought` as the arrays [1, m] that `pages.share` takes."""
  return tuple(np.asarray(pages, np.int32).reshape(1, -1) for pages in brought)


__all__ = ["Boundary", "Chain", "PrefixIndex", "digest", "namespace", "padded", "root_key"]
