"""The scheduler: which sequences run, and what the next step computes. No device, no clock.

Policy, in the order in which it is applied:
  - first come, first served; the n completions of a request stand one after the other;
  - a waiting sequence is admitted when a slot is free and every group has the pages that its known
    tokens really need, besides those still promised to admitted prompts;
  - every running sequence whose prompt is done decodes in every step; prompts are computed in
    chunks within the token budget, oldest first;
  - when a pool runs short the newest running sequence gives everything back and waits at its
    place in the order, to be computed again later. The oldest always goes on, so there is progress.
"""

import bisect
import dataclasses

import numpy as np

from kvjax import pages as pages_lib
from kvjax.config import SchedulerConfig
from kvjax.engine.sequence import Sequence
from kvjax.geometry import Layout


@dataclasses.dataclass(frozen=True)
class Work:
  """One sequence's part of a step: the positions [start, start + count)."""

  sequence: Sequence
  slot: int
  start: int
  count: int
  samples: int  # tokens sampled: 0 inside a prompt, 1, or up to decode_steps
  decode: bool  # feeds the last known token; otherwise a chunk of a prompt
  reached: int  # most tokens of the sequence ever computed before; below it, this is recomputation


@dataclasses.dataclass(frozen=True)
class Plan:
  """What one device call computes.

  Attributes:
    decode, prefill: rows of one token, and chunks.
    steps: decode steps in the call; more than 1 only without prefill.
    pages: the tables as this call sees them (numpy).
  """

  decode: tuple[Work, ...]
  prefill: tuple[Work, ...]
  steps: int
  pages: pages_lib.Pages


class Scheduler:
  """Owns the host's page tables; `plan` advances every count as if the step had run."""

  def __init__(self, layout: Layout, config: SchedulerConfig):
    self.layout = layout
    self.config = config
    self.pages = pages_lib.init(layout, np)
    self.waiting: list[Sequence] = []
    self.running: list[Sequence] = []
    self.preemptions = 0
    self._free_slots = list(range(layout[0].max_sequences))
    self._step_tokens = min(config.token_budget, layout[0].step_tokens)

  def can_ever_fit(self, limit: int) -> dict[str, tuple[int, int]]:
    """Groups whose whole pool is too small for one sequence of `limit` tokens: name -> (needed,
    total) pages. Pure. The last token is sampled but never written."""
    needed = {g.name: (g.peak_pages(max(limit - 1, 1)), g.pages) for g in self.layout}
    return {name: pair for name, pair in needed.items() if pair[0] > pair[1]}

  def add(self, sequence: Sequence) -> None:
    """Puts a sequence at its place in the waiting order."""
    bisect.insort(self.waiting, sequence, key=lambda s: s.order)

  def remove(self, sequence: Sequence) -> None:
    """Takes a sequence out, in any state, and gives back exactly what it holds."""
    if sequence.slot is not None:
      self.running.remove(sequence)
      self._give_back(sequence)
    elif sequence in self.waiting:
      self.waiting.remove(sequence)

  def plan(self) -> Plan | None:
    """The next step, or None when nothing can be computed before more results are read."""
    self._admit()
    while True:
      work = self._work()
      if not work:
        return None
      slots = np.array([w.slot for w in work], np.int32)
      starts = np.array([w.start for w in work], np.int32)
      stops = starts + np.array([w.count for w in work], np.int32)
      pages, _, shortfall = pages_lib.reserve(
        self.pages, self.layout, slots, starts, stops, int((stops - starts).max())
      )
      if not shortfall.any():
        break
      self._preempt(shortfall)
    self.pages = pages
    decode = tuple(w for w in work if w.decode)
    prefill = tuple(w for w in work if not w.decode)
    plan = Plan(decode, prefill, 1 if prefill else max(w.samples for w in work), pages)
    for w in work:
      self._advance(w)
    return plan

  def _admit(self) -> None:
    while self.waiting and self._free_slots:
      sequence = self.waiting[0]
      if sequence.in_flight:
        return  # preempted a moment ago: its last token has not been read yet
      free = pages_lib.free(self.pages)
      promised = [self._promised(i) for i in range(len(self.layout))]
      for i, g in enumerate(self.layout):
        if g.peak_pages(sequence.length, self._step_tokens) > free[i] - promised[i]:
          return
      del self.waiting[0]
      sequence.slot = self._free_slots.pop(0)
      bisect.insort(self.running, sequence, key=lambda s: s.order)

  def _promised(self, group: int) -> int:
    """Pages that running prompts still need in a group, on the way to their known length."""
    g, p = self.layout[group], self.pages[group]
    total = 0
    for s in self.running:
      if s.remaining > 1:
        held = int(p.last[s.slot] - p.first[s.slot])
        total += max(g.peak_pages(s.length, self._step_tokens) - held, 0)
    return total

  def _work(self) -> list[Work]:
    """What every running sequence computes next, oldest first, within the token budget."""
    tokens, blocks = self.config.token_budget, self._most_blocks
    prefills = any(s.remaining > 1 or not s.computed for s in self.running)
    steps = 1 if prefills or self.waiting else self.config.decode_steps
    work = []
    for s in self.running:
      assert s.slot is not None
      if s.remaining == 1 and s.computed:
        count = min(steps, s.limit - s.length)
        work.append(Work(s, s.slot, s.computed, count, count, True, s.reached))
        continue
      room = min(tokens, blocks * self.config.query_block, self._step_tokens)
      count = min(s.remaining, room)
      if count > 0:
        tokens -= count
        blocks -= -(-count // self.config.query_block)
        work.append(Work(s, s.slot, s.computed, count, int(count == s.remaining), False, s.reached))
    return work

  @property
  def _most_blocks(self) -> int:
    return -(-self.config.token_budget // self.config.query_block)

  def _preempt(self, shortfall: np.ndarray) -> None:
    if len(self.running) == 1:
      lacking = {g.name: int(n) for g, n in zip(self.layout, shortfall, strict=True)}
      raise RuntimeError(f"a lone sequence lacks pages that admission had promised: {lacking}")
    victim = self.running.pop()
    self._give_back(victim)
    victim.computed = 0
    self.preemptions += 1
    self.add(victim)

  def _advance(self, w: Work) -> None:
    """Counts a planned step as done; a sequence that has all its tokens leaves at once, since the
    device runs steps in order and nothing later can disturb this one."""
    s = w.sequence
    s.computed += w.count
    s.reached = max(s.reached, s.computed)
    s.length += w.samples
    if s.length >= s.limit:
      self.running.remove(s)
      self._give_back(s)

  def _give_back(self, s: Sequence) -> None:
    assert s.slot is not None
    self.pages = pages_lib.release(self.pages, np.array([s.slot], np.int32))
    bisect.insort(self._free_slots, s.slot)
    s.slot = None
