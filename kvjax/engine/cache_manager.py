"""The cache manager: the host's page tables and prefix index, moved together.

It knows sequences only by what they hold; which of them run is the scheduler's business. Whatever
changes the tables goes through here, so that the index hears of every page that is written, given
back or evicted.
"""

import numpy as np

from kvjax import pages as pages_lib
from kvjax.engine.sequence import Scheduled
from kvjax.geometry import NO_PAGE, Layout
from kvjax.prefix import Boundary, PrefixIndex, padded

_NEVER = 2**62  # a length that no sequence reaches

Copy = tuple[np.ndarray, np.ndarray]  # pages to copy from and to, int32 [m] each


class CacheManager:
  """Tables of every group, and what of them later sequences may use.

  Args:
    layout: the groups.
    sharing: whether prefixes are shared at all.
    look_ahead: tokens for which a decoding sequence takes its pages at once, where there are
      enough: in the steps between, the tables need no change.
    checked: whether every invariant is checked after every change (for tests and debugging).

  Attributes:
    pages: the tables (numpy).
    index: the prefix index; None without sharing.
    evictions: cached pages that were taken for something else, by group.
    forks: whether completions of one prompt share the pages of the first.
  """

  def __init__(
    self, layout: Layout, sharing: bool = True, checked: bool = False, look_ahead: int = 4
  ):
    self.layout = layout
    self.pages = pages_lib.init(layout, np)
    shareable = any(g.reusable for g in layout)
    self.index = PrefixIndex(layout) if sharing and shareable else None
    self.evictions = [0] * len(layout)
    # A completion goes back by one token when it forks; a recurrent state cannot.
    self.forks = sharing and not any(g.retention.state for g in layout)
    self._checked = checked
    self._look_ahead = min(look_ahead, *(g.step_tokens for g in layout))
    # Positions of each slot up to which nothing needs to be reserved any more.
    self._covered = np.zeros(layout[0].max_sequences, np.int32)

  # What a sequence could go on from.

  def hit(self, s: Scheduled) -> Boundary | None:
    """The longest prefix of a waiting sequence that every group still has. Changes nothing."""
    if self.index is None:
      return None
    return self.index.lookup(s.chain, s.tokens, len(s.tokens) - 1)

  def coming(self, s: Scheduled, other: Scheduled) -> int:
    """Tokens of a common prefix that a running sequence will have written and not yet named."""
    if self.index is None or other.boundary is None:
      return 0
    most = self.index.common(s.chain, s.tokens[:-1], other.chain, other.tokens)
    return most if most > other.boundary.length else 0

  # What it would take.

  def available(self) -> np.ndarray:
    """int [groups]: pages that nobody holds."""
    return np.asarray(pages_lib.available(self.pages))

  def needed(self, s: Scheduled, hit: Boundary | None, step_tokens: int) -> np.ndarray:
    """int [groups]: most pages that a waiting sequence takes at once up to its known length."""
    length = 0 if hit is None else hit.length
    brought = (
      [[]] * len(self.layout) if hit is None or self.index is None else self.index.brought(hit)
    )
    out = []
    for g, p, pages in zip(self.layout, self.pages, brought, strict=True):
      unheld = int((p.refs[pages] == 0).sum()) if pages else 0
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

  def adopt(self, s: Scheduled, slot: int, hit: Boundary | None) -> None:
    """Puts a sequence into a slot with the pages of a hit, held before anything is taken."""
    s.slot, s.computed = slot, 0
    self._covered[slot] = 0
    s.settled, s.next_boundary = len(s.tokens), 0
    if self.index is None:
      s.next_boundary = _NEVER
      return
    if hit is None:
      s.boundary = self.index.start(s.chain)
      return
    s.boundary = self.index.pin(hit)
    s.computed = hit.length
    self.pages = pages_lib.share(
      self.pages,
      self.layout,
      np.array([slot], np.int32),
      np.array([hit.length], np.int32),
      padded(self.index.brought(hit)),
    )

  def can_fork(self, lead: Scheduled) -> bool:
    """Whether a running sequence has its prompt computed, nothing more, and still holds all that
    its last prompt token reads: what came with a hit on the whole prompt may be less."""
    if not self.forks or lead.slot is None or not lead.computed == lead.prompt_length > 1:
      return False
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
    following = self.index.following(max(s.boundary.length, length))
    s.next_boundary = _NEVER if following is None or following > s.settled else following

  def covers(self, slots: np.ndarray, stops: np.ndarray) -> bool:
    """Whether all positions below `stops` are writable as things are."""
    return bool((stops <= self._covered[slots]).all())

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
    if self.index is not None:
      evicted = pages_lib.evicted(before, self.pages)
      if any(len(pages) for pages in evicted):
        for i, pages in enumerate(evicted):
          self.evictions[i] += len(pages)
        self.index.evict(evicted)
        self.pages = self.index.flush(self.pages)
    self.check()
    wanted = tuple((c.source[c.target < NO_PAGE], c.target[c.target < NO_PAGE]) for c in copies)
    return wanted if any(len(target) for _, target in wanted) else None, shortfall

  def give_back(self, s: Scheduled) -> None:
    """Gives back everything that a sequence holds; what it has written stays cached under its
    names as long as nobody needs the memory."""
    assert s.slot is not None
    self._publish(s, min(s.computed, len(s.tokens)))
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
    hit = self.hit(s)
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
    self.check()

  def check(self) -> None:
    """Raises AssertionError where an invariant does not hold; does nothing unless `checked`."""
    if self._checked:
      pages_lib.check(self.pages, self.layout)
      if self.index is not None:
        self.index.check(self.pages)
