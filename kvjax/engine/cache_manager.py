"""The cache manager: the host's page tables and prefix index, moved together.

It knows sequences only by what they hold; which of them run is the scheduler's business. Whatever
changes the tables goes through here, so that the index hears of every page that is written, given
back or evicted.
"""

import dataclasses

import numpy as np

from kvjax import pages as pages_lib
from kvjax.engine.sequence import Scheduled
from kvjax.geometry import NO_PAGE, Layout, chunk_stride, hash_unit
from kvjax.offload.fetches import Load
from kvjax.offload.manager import Offload
from kvjax.offload.piece import Piece
from kvjax.offload.search import Found, Search
from kvjax.prefix import Boundary, PrefixIndex, padded

_FETCHES = 3  # searches of one sequence after pieces were lost
_NEVER = 2**62  # a length that no sequence reaches

Copy = tuple[np.ndarray, np.ndarray]  # pages to copy from and to, int32 [m] each


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
  """What a sequence can go on from.

  Attributes:
    length: tokens.
    boundary: the deepest named one above it, or at it when the device has everything.
    pages: for each group the physical pages of coverage(length), -1 for those that are loaded.
    pieces: for each -1, in order, the piece with that page, and the tier that it came from.
    on_device: the length that the device alone would have given.
  """

  length: int
  boundary: Boundary | None
  pages: tuple[list[int], ...]
  pieces: tuple[tuple[tuple[Piece, str], ...], ...]
  on_device: int

  @property
  def loads(self) -> bool:
    return any(self.pieces)

  def sources(self, layout: Layout) -> tuple[tuple[int, str], ...]:
    """(up to which token, from where): "device", then "host", or "disk" where any group's entries
    of a token came from there."""
    if not self.loads:
      return ((self.length, "device"),)
    unit = hash_unit(layout)
    disk = np.zeros((self.length - self.on_device) // unit, bool)
    for g, pages, pieces in zip(layout, self.pages, self.pieces, strict=True):
      first = g.coverage(self.length).start
      holes = [at for at, page in enumerate(pages) if page < 0]
      for at, (_, source) in zip(holes, pieces, strict=True):
        if source == "disk":
          start = (first + at) * g.page_size - self.on_device
          disk[max(start, 0) // unit : max(start + g.page_size, 0) // unit] = True
    stops = [*(np.flatnonzero(np.diff(disk)) + 1).tolist(), len(disk)]
    out = [(self.on_device, "device")]
    for stop in stops:
      out.append((self.on_device + stop * unit, "disk" if disk[stop - 1] else "host"))
    return tuple(out)


class CacheManager:
  """Tables of every group, and what of them later sequences may use.

  Args:
    layout: the groups.
    sharing: whether prefixes are shared at all.
    look_ahead: tokens for which a decoding sequence takes its pages at once, where there are
      enough: in the steps between, the tables need no change.
    offload: the tiers beyond the device; needs sharing, since they are asked by name.
    checked: whether every invariant is checked after every change (for tests and debugging).

  Attributes:
    pages: the tables (numpy).
    index: the prefix index; None without sharing.
    evictions: cached pages that were taken for something else, by group.
    forks: whether completions of one prompt share the pages of the first.
  """

  def __init__(
    self,
    layout: Layout,
    sharing: bool = True,
    checked: bool = False,
    look_ahead: int = 4,
    offload: Offload | None = None,
  ):
    self.layout = layout
    self.pages = pages_lib.init(layout, np)
    shareable = any(g.reusable for g in layout)
    self.index = PrefixIndex(layout) if sharing and shareable else None
    self.evictions = [0] * len(layout)
    # A completion goes back by one token when it forks; a recurrent state cannot.
    self.forks = sharing and not any(g.retention.state for g in layout)
    self.offload = offload if self.index is not None else None
    self._chunk_stride = chunk_stride(layout)
    self._checked = checked
    self._look_ahead = min(look_ahead, *(g.step_tokens for g in layout))
    # Positions of each slot up to which nothing needs to be reserved any more.
    self._covered = np.zeros(layout[0].max_sequences, np.int32)

  # What a sequence could go on from.

  def on_device(self, s: Scheduled) -> Boundary | None:
    """The longest prefix of a waiting sequence that every group still has. Changes nothing."""
    if self.index is None:
      return None
    return self.index.lookup(s.chain, s.tokens, len(s.tokens) - 1)

  def ready(self, s: Scheduled) -> bool:
    """Whether all that a waiting sequence will go on from is in memory; begins to bring it."""
    if self.offload is None or not self.offload.restores:
      return True
    if s.fetch is None and s.searched != self.offload.tiers.version:
      assert self.index is not None
      found = self.on_device(s)
      length = 0 if found is None else found.length
      search = Search(self.layout, s.chain, s.tokens, self.offload.tiers.probe)
      reach = search.reach(self.index, self._standing(s), length)
      self.offload.searched(reach, search.veto)
      s.searched = self.offload.tiers.version
      if reach is not None and self.offload.worth(reach.length - length, reach):
        s.fetch = self.offload.fetches.fetch(reach)
        if s.fetch is None:
          s.searched = -1
          return False
    if s.fetch is None:
      return True
    if not self.offload.fetches.arrived(s.fetch):
      return False
    if s.fetch.lost and s.fetches < _FETCHES:
      # A shorter prefix may need other pieces, which are asked for next time.
      s.fetches += 1
      s.searched = -1
      self._let_go(s)
      return False
    return True

  def hit(self, s: Scheduled) -> Hit | None:
    """The longest prefix that a waiting sequence can go on from now, with what has been brought
    into memory for it. Changes nothing."""
    found = self.on_device(s)
    length = 0 if found is None else found.length
    fetch = s.fetch
    if fetch is not None and fetch.pieces and self.index is not None and not fetch.reading:

      def probe(group: int, key: bytes, stop: int) -> Found | None:
        entry = fetch.pieces.get(key)
        return None if entry is None else Found(key, group, entry[0].first, stop, entry[1])

      standing = self._standing(s)
      search = Search(self.layout, s.chain, s.tokens, probe)
      reach = search.reach(self.index, standing, length)
      if reach is not None:
        while standing is not None and standing.length >= reach.length:
          standing = standing.parent
        pieces = tuple(tuple(fetch.pieces[f.key] for f in row) for row in reach.pieces)
        return Hit(reach.length, standing, reach.pages, pieces, length)
    if found is None:
      return None
    assert self.index is not None
    nothing: tuple[tuple[tuple[Piece, str], ...], ...] = ((),) * len(self.layout)
    return Hit(found.length, found, self.index.brought(found), nothing, found.length)

  def _standing(self, s: Scheduled) -> Boundary | None:
    assert self.index is not None
    return self.index.standing(s.chain, s.tokens, len(s.tokens) - 1)

  def coming(self, s: Scheduled, other: Scheduled) -> int:
    """Tokens of a common prefix that a running sequence will have written and not yet named."""
    if self.index is None or other.boundary is None:
      return 0
    limit = min(len(s.tokens) - 1, len(other.tokens))
    most = self.index.common(s.chain, s.tokens, other.chain, other.tokens, limit)
    return most if most > other.boundary.length else 0

  # What it would take.

  def available(self) -> np.ndarray:
    """int [groups]: pages that nobody holds."""
    return np.asarray(pages_lib.available(self.pages))

  def needed(
    self,
    s: Scheduled,
    hit: Hit | None,
    step_tokens: int,
    held: list[set[int]] | None = None,
  ) -> np.ndarray:
    """int [groups]: most pages that a waiting sequence takes at once up to its known length, were
    only the pages `held` (by group) held by others; as things are when None."""
    length = 0 if hit is None else hit.length
    brought = [[]] * len(self.layout) if hit is None else hit.pages
    out = []
    for i, (g, p, pages) in enumerate(zip(self.layout, self.pages, brought, strict=True)):
      there = [page for page in pages if page >= 0]
      if held is not None:
        unheld = len([page for page in there if page not in held[i]])
      else:
        unheld = int((p.refs[there] == 0).sum()) if there else 0
      unheld += len(pages) - len(there)  # taken, to be loaded into
      last = g.pages_for(length) if pages else length // g.page_size
      own = unheld if g.retention.reach is not None else 0
      further = g.further_pages(len(pages), own, last, s.length, step_tokens)
      out.append(unheld + int(further))
    return np.array(out)

  def promised(self, sequences: list[Scheduled], step_tokens: int) -> np.ndarray:
    """int [groups]: pages that running prompts still take on the way to their known lengths."""
    total = np.zeros(len(self.layout), int)
    for s in sequences:
      for i, (g, p) in enumerate(zip(self.layout, self.pages, strict=True)):
        first, last = int(p.first[s.slot]), int(p.last[s.slot])
        own = held = last - first
        if g.retention.reach is not None and held:
          row = p.table[s.slot]
          own = int((p.refs[row[row < NO_PAGE]] == 1).sum())
        total[i] += int(g.further_pages(held, own, last, s.length, step_tokens))
    return total

  # Changes.

  def adopt(self, s: Scheduled, slot: int, hit: Hit | None) -> tuple[Load, ...]:
    """Puts a sequence into a slot with the pages of a hit, held before anything is taken.

    Returns:
      What must be unpacked before its first step; until then the sequence is `loading`.
    """
    s.slot, s.computed = slot, 0
    self._covered[slot] = 0
    s.settled, s.next_boundary = len(s.tokens), 0
    s.offered = 0
    if self.index is None:
      s.next_boundary = _NEVER
      return ()
    if hit is None or hit.boundary is None:
      s.boundary = self.index.start(s.chain)
    else:
      s.boundary = self.index.pin(hit.boundary)
    if hit is None:
      self._let_go(s)
      return ()
    s.computed = hit.length
    slots, lengths = np.array([slot], np.int32), np.array([hit.length], np.int32)
    if not hit.loads:
      self.pages = pages_lib.share(self.pages, self.layout, slots, lengths, padded(hit.pages))
      self._let_go(s)
      return ()
    before = self.pages
    self.pages, filled, shortfall = pages_lib.restore(
      before, self.layout, slots, lengths, padded(hit.pages)
    )
    assert not shortfall.any(), "pages that admission had counted are not there"
    self._evicted(before)
    s.loading = True
    loads = self._loads(hit, filled)
    self._let_go(s)
    self.check()
    return loads

  def _loads(self, hit: Hit, filled: tuple[np.ndarray, ...]) -> tuple[Load, ...]:
    out = []
    for i, (g, pages, pieces) in enumerate(zip(self.layout, hit.pages, hit.pieces, strict=True)):
      first = g.coverage(hit.length).start
      holes = [at for at, page in enumerate(pages) if page < 0]
      by_piece: dict[bytes, tuple[Piece, list[int]]] = {}
      for at, (piece, _) in zip(holes, pieces, strict=True):
        by_piece.setdefault(piece.key, (piece, []))[1].append(at)
      for piece, places in by_piece.values():
        rows = np.array(places) + (first - piece.first)
        out.append(Load(i, piece, rows, filled[i][0, places]))
    return tuple(out)

  def _let_go(self, s: Scheduled) -> None:
    """A sequence does not wait for pieces any more."""
    if s.fetch is not None and self.offload is not None:
      self.offload.fetches.release(s.fetch)
    s.fetch = None

  def leave(self, s: Scheduled) -> None:
    """A waiting sequence is not wanted any more; it holds nothing but pieces that it fetches."""
    self._let_go(s)

  def can_fork(self, lead: Scheduled) -> bool:
    """Whether a running sequence has its prompt computed, nothing more, and still holds all that
    its last prompt token reads: what came with a hit on the whole prompt may be less."""
    if not self.forks or lead.slot is None or not lead.computed == lead.prompt_length > 1:
      return False
    if self.index is not None and lead.boundary is None:
      return False  # from before a reset
    last = lead.prompt_length - 1
    return all(
      p.first[lead.slot] <= g.first_page(last) and p.last[lead.slot] >= g.pages_for(last + 1)
      for g, p in zip(self.layout, self.pages, strict=True)
    )

  def fork(self, lead: Scheduled, s: Scheduled, slot: int) -> None:
    """Puts a sequence with the same prompt into a slot, sharing all pages of `lead` (`can_fork`);
    the last prompt token is computed again, for its own sampling."""
    self.pages = pages_lib.fork(
      self.pages, np.array([lead.slot], np.int32), np.array([slot], np.int32)
    )
    assert lead.slot is not None
    self._let_go(s)
    s.offered = 0
    self._covered[[lead.slot, slot]] = 0  # what they share must be copied before it is written
    s.slot, s.computed = slot, lead.prompt_length - 1
    s.settled, s.next_boundary = len(s.tokens), _NEVER
    if self.index is not None and lead.boundary is not None:
      s.boundary = self.index.pin(lead.boundary)

  def publish(self, sequences: list[Scheduled]) -> None:
    """Names what running sequences have written of the tokens that they came in with.

    What they generate is named when they leave (`give_back`): until then nobody asks for it, and
    the windows in the middle of it are gone when somebody does.
    """
    if self.index is None:
      return
    for s in sequences:
      if s.computed >= s.next_boundary:
        self._publish(s, min(s.computed, s.settled))
    self.pages = self.index.flush(self.pages)

  def _publish(self, s: Scheduled, length: int) -> None:
    if self.index is None or s.boundary is None or s.slot is None:
      return
    s.boundary = self.index.publish(s.boundary, s.chain, s.tokens, length, self.pages, s.slot)
    self._offer(s)
    following = self.index.following(max(s.boundary.length, length))
    s.next_boundary = _NEVER if following is None or following > s.settled else following

  def covers(self, slots: np.ndarray, stops: np.ndarray) -> bool:
    """Whether all positions below `stops` are writable as things are."""
    return bool((stops <= self._covered[slots]).all())

  def _offer(self, s: Scheduled, ending: bool = False, urgent: bool = False) -> None:
    """Offers to the tiers what a sequence has named: whole chunks while it runs; when it leaves,
    the rest as well. Of each length it is the coverage, which is what a search asks for."""
    if self.offload is None or s.boundary is None:
      return
    stop, step = s.boundary.length, self._chunk_stride
    lengths = list(range(s.offered - s.offered % step + step, stop + 1, step))
    s.offered = max([s.offered, *lengths])
    if ending and stop > s.offered:
      lengths.append(stop)
    before = 0 if not lengths else max(lengths[0] - step, 0)
    for length in lengths:
      for i, g in enumerate(self.layout):
        if not g.reusable:
          continue
        needed = g.coverage(length)
        if g.retention.reach is None:
          needed = range(g.chunk(before // g.page_size).start, needed.stop)
        for part in g.chunks(needed):
          self._offer_part(i, s, part, urgent)
      before = length

  def _offer_part(self, group: int, s: Scheduled, part: range, urgent: bool) -> None:
    g, p, slot = self.layout[group], self.pages[group], s.slot
    assert self.offload is not None
    if p.first[slot] <= part.start and part.stop <= p.last[slot]:
      self.offload.stores.offer(
        group,
        s.chain,
        s.tokens,
        part,
        lambda: p.table[slot, g.column(np.arange(part.start, part.stop))],
        s.order,
        urgent,
      )

  def reserve(
    self, slots: np.ndarray, starts: np.ndarray, stops: np.ndarray, ends: np.ndarray
  ) -> tuple[tuple[Copy, ...] | None, np.ndarray]:
    """Makes the positions [starts, stops) of running sequences writable, see `pages.reserve`.

    Args (int32 [n]):
      ends: positions up to which pages may be taken early.

    Returns:
      (pages to copy before the step, by group, or None for none; shortfall int32 [groups]).
    """
    ahead = np.maximum(stops, np.minimum(starts + self._look_ahead, ends))
    copies, shortfall = self._reserve(slots, starts, ahead)
    if shortfall.any():
      ahead = stops
      copies, shortfall = self._reserve(slots, starts, ahead)
    if shortfall.any():
      self._covered[slots] = 0  # some have given back what their windows have passed
    else:
      self._covered[slots] = ahead
    return copies, shortfall

  def _reserve(
    self, slots: np.ndarray, starts: np.ndarray, stops: np.ndarray
  ) -> tuple[tuple[Copy, ...] | None, np.ndarray]:
    before = self.pages
    tokens = int((stops - starts).max())
    self.pages, copies, shortfall = pages_lib.reserve(
      before, self.layout, slots, starts, stops, tokens
    )
    self._evicted(before)
    self.check()
    wanted = tuple((c.source[c.target < NO_PAGE], c.target[c.target < NO_PAGE]) for c in copies)
    return wanted if any(len(target) for _, target in wanted) else None, shortfall

  def _evicted(self, before: pages_lib.Pages) -> None:
    """Tells the index which cached pages were taken since `before`."""
    if self.index is None:
      return
    evicted = pages_lib.evicted(before, self.pages)
    if any(len(pages) for pages in evicted):
      for i, pages in enumerate(evicted):
        self.evictions[i] += len(pages)
      self.index.evict(evicted)
      self.pages = self.index.flush(self.pages)

  def give_back(self, s: Scheduled, urgent: bool = False) -> None:
    """Gives back everything that a sequence holds; what it has written stays cached under its
    names as long as nobody needs the memory, and is offered to the tiers.

    Args:
      urgent: the sequence will come back.
    """
    assert s.slot is not None
    if not s.loading:  # what it was to load has not been written
      self._publish(s, min(s.computed, len(s.tokens)))
      self._offer(s, ending=True, urgent=urgent)
    s.loading = False
    now = 0
    if self.index is not None:
      self.pages = self.index.flush(self.pages)
      now = self.index.tick(max(g.table_width for g in self.layout))
    self.pages = pages_lib.release(self.pages, np.array([s.slot], np.int32), now)
    if self.index is not None and s.boundary is not None:
      self.index.unpin(s.boundary)
      self.pages = self.index.flush(self.pages)
    s.boundary, s.slot = None, None
    self.check()

  def touch(self, s: Scheduled) -> None:
    """Makes what a waiting sequence could go on from the last to be evicted."""
    hit = self.on_device(s)
    if hit is not None:
      assert self.index is not None
      self.index.touch(hit)
      self.pages = self.index.flush(self.pages)

  def retire(self, sequences: list[Scheduled]) -> None:
    """Gives back what windows have passed of running sequences that compute nothing now."""
    slots = np.array([s.slot for s in sequences], np.int32)
    computed = np.array([s.computed for s in sequences], np.int32)
    self.pages = pages_lib.retire(self.pages, self.layout, slots, computed)

  def reset(self, running: list[Scheduled]) -> None:
    """Forgets every cached prefix. What runs keeps its pages and names nothing any more."""
    if self.index is None:
      return
    for s in running:
      s.boundary, s.next_boundary = None, _NEVER
    self.index.clear()
    self.pages = self.index.flush(self.pages)
    if self.offload is not None:
      self.offload.reset()
    self.check()

  def check(self) -> None:
    """Raises AssertionError where an invariant does not hold; does nothing unless `checked`."""
    if self._checked:
      pages_lib.check(self.pages, self.layout)
      if self.index is not None:
        self.index.check(self.pages)
