"""The scheduler: which sequences run, and what the next step computes. No device, no clock.

Policy, in the order in which it is applied:
  - order: by priority (lower first), then first come, first served; the n completions of a request
    stand one after the other;
  - a waiting sequence is admitted when a slot is free and every group has the pages that its known
    tokens really need (those of a cached prefix are there already), besides the pages still
    promised to admitted prompts. One that was preempted waits until every running sequence can also
    grow by HEADROOM tokens, so that it does not come back only to be preempted again;
  - a sequence whose prefix another one of no lower priority is just computing waits for it
    as long as that should take, and no longer; completions of one prompt fork from the first when
    its prompt is done;
  - where a sequence lacks pages, later ones may pass it, but PATIENCE of them at most; then nobody
    is admitted before it;
  - a sequence of higher priority takes the slots and pages of running ones of lower priority;
  - every running sequence whose prompt is done decodes in every step, whatever prompts there are;
    prompts are computed in chunks within the token budget, in every other step oldest first, in
    the steps between those with the least left first: a short prompt never waits for a long one to
    end, and the oldest has at least half of the steps for itself;
  - when a pool runs short the last running sequence in the order gives everything back and waits at
    its place, to be computed again later. The first always goes on, so there is progress.
"""

import bisect
import dataclasses
import operator
from typing import NamedTuple

import numpy as np

from kvjax import pages as pages_lib
from kvjax.config import SchedulerConfig
from kvjax.engine.cache_manager import CacheManager, Copy, Hit
from kvjax.engine.sequence import Scheduled
from kvjax.offload.fetches import Load
from kvjax.offload.stores import Store

HEADROOM = 16
"""Tokens that every running sequence must be able to grow by before a preempted one comes back."""

PATIENCE = 16
"""Admissions that may pass a sequence which lacks pages."""

_CANDIDATES = 32  # waiting sequences that one step looks at,
_MOST_LOOKED = 256  # and with those that wait for a prefix or a token
_MOST_LACKING = 4  # of them such that lack pages

_order = operator.attrgetter("order")


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
  """One sequence's part of a step: the positions [start, start + count)."""

  sequence: Scheduled
  slot: int
  start: int
  count: int
  samples: int  # tokens sampled: 0 inside a prompt, 1, or up to decode_steps
  decode: bool  # feeds the last known token; otherwise a chunk of a prompt


class Admission(NamedTuple):
  """A sequence that entered a slot, and the tokens that it found computed there."""

  sequence: Scheduled
  slot: int
  found: int
  reached: int  # before: what is found below it had been computed once already
  loads: tuple[Load, ...]  # to be unpacked before its first step
  sources: tuple[tuple[int, str], ...]  # (up to which token, from where) of what was found
  forked: bool  # from another completion: it will need its own copy of that one's last page


@dataclasses.dataclass(frozen=True)
class Plan:
  """What one device call computes.

  Decoding sequences are hundreds in every step and all alike, so there is no object for each: row i
  of the arrays is decode[i], and the chunks in `prefill` come after them.

  Attributes:
    decode: sequences that feed their last token.
    known: those of them (indices) whose last token came with them, and not from a step of this run.
    prefill: chunks of prompts.
    steps: decode steps in the call; more than 1 only without prefill.
    pages: the tables as this call sees them (numpy).
    admitted: sequences that are new in their slots.
    stores: pages to be packed before anything else of the call writes.
    copies: pages to be copied before the call, by group; None for none.
    slots, starts, stops: int32 [n] of decode + prefill: the positions [start, stop) are computed.
    computed_before, prompt_tokens: how many of the step's tokens are recomputed, and how many are
      prompt tokens that were never computed before.
  """

  decode: list[Scheduled]
  known: list[int]
  prefill: list[Work]
  steps: int
  pages: pages_lib.Pages
  admitted: tuple[Admission, ...]
  stores: list[Store]
  copies: tuple[Copy, ...] | None
  slots: np.ndarray
  starts: np.ndarray
  stops: np.ndarray
  computed_before: int
  prompt_tokens: int

  def work(self) -> list[Work]:
    """Every sequence's part, decoding ones first."""
    n = len(self.decode)
    places = zip(
      self.decode,
      self.slots[:n].tolist(),
      self.starts[:n].tolist(),
      self.stops[:n].tolist(),
      strict=True,
    )
    rows = [
      Work(s, slot, start, stop - start, stop - start, True) for s, slot, start, stop in places
    ]
    return rows + self.prefill


class Scheduler:
  """`plan` advances every count as if the step had run."""

  def __init__(self, cache: CacheManager, config: SchedulerConfig):
    self.layout = cache.layout
    self.cache = cache
    self.config = config
    self.waiting: list[Scheduled] = []
    self.running: list[Scheduled] = []
    self.preemptions = 0
    self._free_slots = list(range(self.layout[0].max_sequences))
    self._step_tokens = min(config.token_budget, self.layout[0].step_tokens)
    self._most_blocks = -(-config.token_budget // config.query_block)
    self._shortest_first = False
    self._admitted: list[Admission] = []

  def can_ever_fit(self, limit: int) -> dict[str, tuple[int, int]]:
    """Groups whose whole pool is too small for one sequence of `limit` tokens: name -> (needed,
    total) pages. Pure. The last token is sampled but never written."""
    needed = {g.name: (g.peak_pages(max(limit - 1, 1)), g.pages) for g in self.layout}
    return {name: pair for name, pair in needed.items() if pair[0] > pair[1]}

  def add(self, sequence: Scheduled) -> None:
    """Puts a sequence at its place in the waiting order."""
    bisect.insort(self.waiting, sequence, key=_order)

  def remove(self, sequence: Scheduled, urgent: bool = False) -> None:
    """Takes a sequence out, in any state, and gives back exactly what it holds; `urgent` when it
    will come back."""
    if sequence.slot is not None:
      self.running.remove(sequence)
      self._give_back(sequence, urgent)
    elif sequence in self.waiting:
      self.waiting.remove(sequence)
      self.cache.leave(sequence)

  def plan(self) -> Plan | None:
    """The next step, or None when nothing can be computed before more results are read."""
    self.cache.publish(self.running)
    self._admit()
    while True:
      decode, prefill = self._work()
      if not decode and not prefill:
        return None
      # One scan for each column: what is done for every row of every step is the host's time.
      slots = np.array([s.slot for s in decode] + [w.slot for w in prefill], np.int32)
      starts = np.array([s.computed for s in decode] + [w.start for w in prefill], np.int32)
      steps = 1 if prefill or self.waiting else self.config.decode_steps
      counts = self._counts(decode, prefill, steps)
      stops = starts + counts
      if len(slots) < len(self.running):
        busy = set(slots.tolist())
        self.cache.retire([s for s in self.running if s.slot not in busy])
      copies, shortfall = None, None
      if not self.cache.covers(slots, stops):
        copies, shortfall = self.cache.reserve(slots, starts, stops, self._ends(decode, prefill))
      if shortfall is None or not shortfall.any():
        break
      self._preempt(shortfall)
    known = [i for i, s in enumerate(decode) if s.computed < s.settled]
    again, fresh = _kinds([(decode[i], decode[i].computed, 1) for i in known])
    if prefill:
      more = _kinds([(w.sequence, w.start, w.count) for w in prefill])
      again, fresh = again + more[0], fresh + more[1]
    admitted, self._admitted = tuple(self._admitted), []
    for a in admitted:
      a.sequence.loading = False  # from here on it is part of a step
      if a.loads and self.cache.offload is not None:
        self.cache.offload.loaded(a.loads)
    plan = Plan(
      decode=decode,
      known=known,
      prefill=prefill,
      steps=1 if steps == 1 else int(counts.max()),
      pages=self.cache.pages,
      admitted=admitted,
      stores=[] if self.cache.offload is None else self.cache.offload.stores.take(),
      copies=copies,
      slots=slots,
      starts=starts,
      stops=stops,
      computed_before=again,
      prompt_tokens=fresh,
    )
    self._shortest_first = bool(prefill) and not self._shortest_first
    self._advance(decode, prefill, counts)
    return plan

  # Admission.

  def _admit(self) -> None:
    if not self.waiting:
      return
    lacking: list[Scheduled] = []
    promised: np.ndarray | None = None
    looked = 0
    for s in self.waiting[:_MOST_LOOKED]:
      if looked == _CANDIDATES or (not self._free_slots and not self._outranks(s)):
        return
      if s.in_flight:
        continue  # preempted a moment ago: its last token has not been read yet
      lead = self._lead(s)
      if lead is None and (self._must_wait(s) or not self.cache.ready(s)):
        continue
      looked += 1
      if promised is None:
        promised = self._promised(self.running)
      hit = None if lead is not None else self.cache.hit(s)
      need = self._need(s, lead, hit)
      fits = bool(self._free_slots) and bool((need <= self.cache.available() - promised).all())
      if not fits and self._outranks(s) and self._make_room(s):
        # What gave way may have been the lead, or have held the hit.
        fits, lead, hit, promised = True, None, self.cache.hit(s), None
      if not fits:
        lacking.append(s)
        if s.passed >= PATIENCE or len(lacking) == _MOST_LACKING:
          return
        continue
      self._enter(s, lead, hit)
      promised = None
      for other in lacking:
        other.passed += 1
      if any(other.passed >= PATIENCE for other in lacking):
        return

  def _enter(self, s: Scheduled, lead: Scheduled | None, hit: Hit | None) -> None:
    slot = self._free_slots.pop(0)
    loads: tuple[Load, ...] = ()
    if lead is not None:
      self.cache.fork(lead, s, slot)
      sources: tuple[tuple[int, str], ...] = ((s.computed, "device"),)
    else:
      loads = self.cache.adopt(s, slot, hit)
      sources = () if hit is None else hit.sources(self.layout)
    s.passed = 0
    self._admitted.append(Admission(s, slot, s.computed, s.reached, loads, sources, bool(lead)))
    s.reached = max(s.reached, s.computed)
    self.waiting.remove(s)
    bisect.insort(self.running, s, key=_order)

  def _lead(self, s: Scheduled) -> Scheduled | None:
    """A sibling from which a fresh completion of the same prompt can fork now."""
    if s.reached:
      return None
    return next((other for other in s.siblings if self.cache.can_fork(other)), None)

  def _must_wait(self, s: Scheduled) -> bool:
    """Whether a running sequence is computing what this one could go on from."""
    hit = -1
    for other in self.running:
      if other.remaining <= 1 and other.computed and not other.loading:
        continue
      if not s.reached and other in s.siblings and self.cache.forks:
        return True
      if other.order[0] > s.order[0] or s.patience == 0:
        continue
      coming = self.cache.coming(s, other)
      if coming:
        if hit < 0:
          found = self.cache.hit(s)
          hit = 0 if found is None else found.length
        if coming > hit:
          if s.patience < 0:  # the oldest prompt has every other step; twice that is enough
            chunks = -(-max(coming - other.computed, 0) // self._step_tokens)
            s.patience = 4 * chunks + 4
          s.patience -= 1
          return True
    return False

  def _need(self, s: Scheduled, lead: Scheduled | None, hit: Hit | None) -> np.ndarray:
    if lead is not None:
      return np.ones(len(self.layout), int)  # its own copy of the page of the last prompt token
    need = self.cache.needed(s, hit, self._step_tokens)
    if s.preempted and self.running:
      # A window that is full takes a page and gives one back.
      each = [g.pages_for(HEADROOM) if g.retention.reach is None else 1 for g in self.layout]
      growth = [pages * (len(self.running) + 1) for pages in each]
      # Never more than there is: what can run alone must be able to come back.
      need = np.minimum(need + growth, np.maximum([g.pages for g in self.layout], need))
    return need

  def _promised(self, sequences: list[Scheduled]) -> np.ndarray:
    """int [groups]: pages that those of the sequences take whose prompts are not done, or that have
    only just come in and taken none yet."""
    fresh = {id(a.sequence): a.forked for a in self._admitted}
    owing = [r for r in sequences if r.remaining > 1 or id(r) in fresh]
    copies = sum(fresh.get(id(r), False) for r in owing)
    return self.cache.promised(owing, self._step_tokens) + copies

  def _outranks(self, s: Scheduled) -> bool:
    return bool(self.running) and self.running[-1].order[0] > s.order[0]

  def _make_room(self, s: Scheduled) -> bool:
    """Preempts running sequences of lower priority, the last in the order first, until `s` has a
    slot and pages; changes nothing when even all of them would not do."""
    lower = [r for r in self.running if r.order[0] > s.order[0]]
    others = [r for r in self.running if r.order[0] <= s.order[0]]
    promised = self._promised(others)
    held = [
      {int(x) for r in others for x in p.table[r.slot] if x < g.pages}
      for g, p in zip(self.layout, self.cache.pages, strict=True)
    ]
    need = self.cache.needed(s, self.cache.hit(s), self._step_tokens, held)
    if (need > [g.pages - len(h) for g, h in zip(self.layout, held, strict=True)] - promised).any():
      return False
    while lower:
      self._withdraw(lower.pop())
      free = self.cache.available() - self._promised(self.running)
      need = self._need(s, None, self.cache.hit(s))
      if (need <= free).all():
        return True
    return False

  # Work.

  def _work(self) -> tuple[list[Scheduled], list[Work]]:
    """What every running sequence computes next, within the token budget: those that decode, and
    the chunks of the others' prompts."""
    decode = [s for s in self.running if s.computed and s.length - s.computed == 1]
    if len(decode) == len(self.running):
      return decode, []
    tokens, blocks = self.config.token_budget, self._most_blocks
    block = self.config.query_block
    decoding = set(map(id, decode))
    prompts = [s for s in self.running if id(s) not in decoding]
    if self._shortest_first:
      prompts.sort(key=lambda s: s.remaining)  # stable: the older of equals first
    out = []
    for s in prompts:
      assert s.slot is not None
      count = min(s.remaining, tokens, blocks * block, self._step_tokens)
      if count > 0:
        tokens -= count
        blocks -= -(-count // block)
        out.append(Work(s, s.slot, s.computed, count, int(count == s.remaining), False))
    return decode, out

  def _counts(self, decode: list[Scheduled], prefill: list[Work], steps: int) -> np.ndarray:
    """int32 [n]: tokens that each row of a plan computes."""
    if steps == 1:
      return np.array([1] * len(decode) + [w.count for w in prefill], np.int32)
    return np.minimum(np.array([s.limit - s.length for s in decode], np.int32), np.int32(steps))

  def _ends(self, decode: list[Scheduled], prefill: list[Work]) -> np.ndarray:
    """int32 [n]: positions up to which pages may be taken early. That begins behind the prompt, up
    to which its other completions may fork, and takes nothing that somebody waits for."""
    if self.waiting and self._free_slots:
      return np.zeros(len(decode) + len(prefill), np.int32)
    ends = [s.limit - 1 if s.computed >= s.prompt_length else 0 for s in decode]
    ends += [w.sequence.limit - 1 if w.start >= w.sequence.prompt_length else 0 for w in prefill]
    return np.array(ends, np.int32)

  def _preempt(self, shortfall: np.ndarray) -> None:
    if len(self.running) == 1:
      lacking = {g.name: int(n) for g, n in zip(self.layout, shortfall, strict=True)}
      raise RuntimeError(f"a lone sequence lacks pages that admission had promised: {lacking}")
    self._withdraw(self.running[-1])

  def _withdraw(self, victim: Scheduled) -> None:
    """Takes everything from a running sequence, which waits again."""
    self.running.remove(victim)
    self._give_back(victim, urgent=True)
    victim.computed = 0
    victim.searched = victim.patience = -1
    victim.preempted = True
    for a in self._admitted:
      if a.sequence is victim:  # as if it had not come in
        victim.reached = a.reached
    self._admitted = [a for a in self._admitted if a.sequence is not victim]
    self.preemptions += 1
    self.add(victim)

  def _advance(self, decode: list[Scheduled], prefill: list[Work], counts: np.ndarray) -> None:
    """Counts a planned step as done; a sequence that has all its tokens leaves at once, since the
    device runs steps in order and nothing later can disturb this one."""
    ended = []
    for s, count in zip(decode, counts.tolist(), strict=False):
      s.computed = computed = s.computed + count
      s.length = length = s.length + count
      if computed > s.reached:
        s.reached = computed
      if length >= s.limit:
        ended.append(s)
    for w in prefill:
      s = w.sequence
      s.computed = w.start + w.count
      s.reached = max(s.reached, s.computed)
      s.length += w.samples
      if s.length >= s.limit:
        ended.append(s)
    for s in ended:
      self.running.remove(s)
      self._give_back(s)

  def _give_back(self, s: Scheduled, urgent: bool = False) -> None:
    assert s.slot is not None
    slot = s.slot
    self.cache.give_back(s, urgent)
    bisect.insort(self._free_slots, slot)
    # What has just ended may never be asked for; what was preempted will be.
    for other in self.waiting[:_CANDIDATES]:
      if other.preempted and not other.in_flight:
        self.cache.touch(other)


def _kinds(parts: list[tuple[Scheduled, int, int]]) -> tuple[int, int]:
  """Of (sequence, start, count): tokens computed before, and prompt tokens that were not."""
  again = fresh = 0
  for s, start, count in parts:
    known = max(min(start + count, s.reached) - start, 0)
    again += known
    fresh += max(min(start + count, s.prompt_length) - start - known, 0)
  return again, fresh
