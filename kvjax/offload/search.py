"""Searching the tiers: how far a prefix reaches with what lies beyond the device.

A length can be resumed from when every reusable group's `coverage(length)` is there, each page on
the device or in a piece. Groups without a bound need all pages from the start, so their pieces are
followed upwards until one is missing; the others are asked at the boundaries below that, longest
first, and only for the pages that their windows need.
"""

import dataclasses
from collections.abc import Callable, Sequence

from kvjax.geometry import GroupGeometry, Layout
from kvjax.prefix import Boundary, Chain, PrefixIndex, digest


def piece_key(g: GroupGeometry, chain: Chain, tokens: Sequence[int], stop: int) -> bytes:
  """The name of a piece of group g whose last page is `stop` - 1, of a sequence's prefix.

  The chain's root names model, types, geometries, adapter and salt; its link every token before.
  """
  link = chain.key(stop * g.page_size, tokens)
  return digest(kind="piece", group=g.name, blocks=g.blocks_per_chunk, link=link)


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
  """A piece that some tier has: the logical pages [first, stop) of a group (index)."""

  key: bytes
  group: int
  first: int
  stop: int
  source: str  # "host" or "disk"


Probe = Callable[[int, bytes, int], Found | None]
"""(group, key, stop) -> the piece of that name, if some tier has it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
  """What a prefix can be resumed from.

  Attributes:
    length: tokens.
    pages: for each group the physical pages of coverage(length) that the device has, -1 elsewhere.
    pieces: for each -1, in order, the piece with that page.
  """

  length: int
  pages: tuple[list[int], ...]
  pieces: tuple[tuple[Found, ...], ...]

  def nbytes(self, layout: Layout) -> dict[str, int]:
    """Bytes of the pages that come from "host" and from "disk"."""
    out = {"host": 0, "disk": 0}
    for g, pieces in zip(layout, self.pieces, strict=True):
      for found in pieces:  # one for each page
        out[found.source] += g.page_bytes
    return out


class Search:
  """One search for one sequence; every name is asked for once.

  Attributes:
    veto: after `reach`: the group without which it would have gone farther, None for none.
  """

  def __init__(self, layout: Layout, chain: Chain, tokens: Sequence[int], probe: Probe):
    self.layout = layout
    self.veto: int | None = None
    self._chain = chain
    self._tokens = tokens
    self._probe = probe
    self._probed: dict[tuple[int, int], Found | None] = {}

  def page(self, group: int, logical: int) -> Found | None:
    """A piece that holds a logical page: the one that goes farthest within its chunk."""
    g = self.layout[group]
    last = min(g.chunk(logical).stop, len(self._tokens) // g.page_size)
    for stop in range(last, logical, -1):
      at = (group, stop)
      if at not in self._probed:
        key = piece_key(g, self._chain, self._tokens, stop)
        self._probed[at] = self._probe(group, key, stop)
      found = self._probed[at]
      if found is not None and found.first <= logical:
        return found
    return None

  def reach(self, index: PrefixIndex, standing: Boundary | None, above: int) -> Reach | None:
    """The longest boundary above `above` tokens that can be resumed from; None for none.

    Args:
      standing: the deepest boundary of the sequence's path in the index: its full-attention pages
        are on the device.
    """
    self.veto = None
    on_device = 0 if standing is None else standing.length
    most = len(self._tokens) - 1
    bounded, reached = [], {}
    for i, g in enumerate(self.layout):
      if not g.reusable:
        continue
      if g.retention.reach is not None:
        bounded.append(i)
      else:
        reached[i] = self._run(i, g, on_device, most)
    if reached:
      shortest = min(reached, key=lambda i: reached[i])
      if reached[shortest] < max(reached.values()):
        self.veto = shortest
      elif bounded and reached[shortest] <= above:
        # Nothing of the groups without a bound: is it they that lack it, or is all of it new?
        following = index.following(above)
        if following is not None and following <= most:
          pages = index.held(standing, following, bounded)
          if self._lacking(bounded, following, pages) is None and any(pages):
            self.veto = shortest
      most = min(most, reached[shortest])
    for length in index.lengths(above, most):
      pages = index.held(standing, length, bounded)
      lacking = self._lacking(bounded, length, pages)
      if lacking is None:
        return self._found(index.held(standing, length), length)
      self.veto = lacking if self.veto is None else self.veto
    return None

  def _run(self, group: int, g: GroupGeometry, length: int, most: int) -> int:
    """Tokens up to which a full-attention group has every page."""
    page = g.pages_for(length)
    while page * g.page_size < most:
      found = self.page(group, page)
      if found is None:
        break
      page = found.stop
    return page * g.page_size

  def _lacking(
    self, groups: Sequence[int], length: int, pages: tuple[list[int], ...]
  ) -> int | None:
    for i in groups:
      first = self.layout[i].coverage(length).start
      for at, page in enumerate(pages[i]):
        if page < 0 and self.page(i, first + at) is None:
          return i
    return None

  def _found(self, pages: tuple[list[int], ...], length: int) -> Reach:
    pieces = []
    for i, (g, row) in enumerate(zip(self.layout, pages, strict=True)):
      first = g.coverage(length).start if row else 0
      missing = [self.page(i, first + at) for at, page in enumerate(row) if page < 0]
      pieces.append(tuple(found for found in missing if found is not None))
      assert len(pieces[-1]) == len(missing)
    return Reach(length, pages, tuple(pieces))
