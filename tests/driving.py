"""A scheduler driven without a model: every cache entry is the hash of the prefix that it is for.

The driver plays device and host. What a step reads must be what its own sequence wrote, whoever
wrote it, through sharing, forks, copies, preemption and eviction; and the tokens of a sequence are
a function of its prefix alone, so that they can be told beforehand.
"""

import dataclasses
import hashlib
import itertools
import random

import numpy as np
from slow_tiers import Packed

from kvjax.config import SchedulerConfig
from kvjax.engine.cache_manager import CacheManager
from kvjax.engine.scheduler import PATIENCE, Plan, Scheduler
from kvjax.engine.sequence import Scheduled
from kvjax.geometry import GroupGeometry, Layout, Leaf, Retention, hash_unit
from kvjax.prefix import Chain, root_key

_NOTHING = -1


def group(
  name="full",
  page_size=4,
  pages=16,
  *,
  slots=4,
  longest=64,
  step=16,
  reusable=True,
  **retention,
) -> GroupGeometry:
  """A group of one layer; `retention` as in kvjax.geometry.Retention."""
  return GroupGeometry(
    name=name,
    layers=(0,),
    page_size=page_size,
    retention=Retention(**retention),
    leaves=(Leaf("kv", (1, 2), "float32"),),
    pages=pages,
    max_length=longest,
    step_tokens=min(step, longest),
    max_sequences=slots,
    reusable=reusable,
  )


def random_layout(
  rng: random.Random, *, slots: int, longest: int, step: int, most: int = 6
) -> Layout:
  """One to `most` groups of every kind, in pools from the least that serves one sequence up."""
  out = []
  for i in range(rng.randint(1, most)):
    kind = rng.choice(["full", "full", "window", "window", "chunk", "state", "scratch"])
    retention = {
      "window": {"window": rng.choice([1, 2, 4, 7, 16])},
      "chunk": {"chunk": rng.choice([4, 8, 12])},
      "state": {"state": True},
      "scratch": rng.choice([{}, {"window": 5}]),
    }.get(kind, {})
    size = rng.choice([1, 2, 4, 4, 8, 8, 6])
    more = {"slots": slots, "longest": longest, "step": step, "reusable": kind != "scratch"}
    g = group(f"{kind}{i}", size, 1, **more, **retention)
    least = g.peak_pages(longest)
    pages = rng.randint(least, max(least, 3 * least, slots * least // 2))
    out.append(dataclasses.replace(g, pages=pages))
  return tuple(out)


def prefix_hash(h: int, token: int) -> int:
  return int.from_bytes(hashlib.blake2b(b"%d,%d" % (h, token), digest_size=7).digest(), "little")


class Stub(Scheduled):
  """A sequence whose next token is a function of its prefix and its place among its siblings."""

  def __init__(self, prompt, limit, order, root, unit, salt=None):
    super().__init__(list(prompt), limit, order, Chain(root, unit))
    self.salt = salt
    self.hashes = [prefix_hash(0, hash_of(salt))]
    self.ended = False
    self.aborted = False
    self.found = 0
    for token in prompt:
      self.hashes.append(prefix_hash(self.hashes[-1], token))


def _spans(sources):
  stops = [0, *(stop for stop, _ in sources)]
  return itertools.pairwise(stops)


def hash_of(salt) -> int:
  return 0 if salt is None else 1 + sum(salt.encode())


def next_token(h: int, index: int) -> int:
  return (h >> 8 * index) % 3


class Driver:
  """Device and host around a scheduler; every step is checked."""

  def __init__(
    self,
    layout: Layout,
    config: SchedulerConfig,
    *,
    sharing=True,
    checked=True,
    offload=None,  # a function of the clock
    rng=None,
  ):
    self.layout = layout
    self.rng = rng or random.Random(0)
    self.steps = 0
    self.offload = None if offload is None else offload(lambda: float(self.steps))
    self.cache = CacheManager(layout, sharing, checked, offload=self.offload)
    self.scheduler = Scheduler(self.cache, config)
    self.unit = hash_unit(layout)
    self.content = [np.full((g.pages, g.page_size), _NOTHING, np.int64) for g in layout]
    self.in_flight: Plan | None = None
    self.arrivals = 0
    self.counts = dict.fromkeys(
      (
        *("hits", "hit_tokens", "forks", "copies", "computed", "idle", "restored"),
        *("loads", "stores", "aborts that waited for a tier", "resets in flight"),
      ),
      0,
    )
    self.alive: list[Stub] = []
    self.log = hashlib.sha256()

  def add(self, prompt, new, *, n=1, priority=0, salt=None) -> list[Stub]:
    """n completions of one prompt; none if the pools can never hold it."""
    limit = min(len(prompt) + new, self.layout[0].max_length)
    if len(prompt) >= limit or self.scheduler.can_ever_fit(limit):
      return []
    root = root_key(b"stub", salt)
    out = [
      Stub(prompt, limit, (priority, self.arrivals, i), root, self.unit, salt) for i in range(n)
    ]
    self.arrivals += 1
    for s in out:
      s.siblings = list(out)
      self.scheduler.add(s)
    self.alive += out
    return out

  def abort(self, s: Stub) -> None:
    s.aborted = s.ended = True
    self.scheduler.remove(s)
    self.alive.remove(s)

  def step(self) -> Plan | None:
    """Plans and computes one step, and reads the one before."""
    self.steps += 1
    if self.offload is not None:
      if getattr(self.offload.tiers.workers, "tick", None):
        self.offload.tiers.workers.tick()
      self.offload.poll()
      if self.offload.tiers.host is not None:
        self.offload.tiers.host.check()
    plan = self.scheduler.plan()
    if plan is None and self.offload is not None:
      self._pack(self.offload.stores.take())
    if plan is not None:
      self._compute(plan)
    previous, self.in_flight = self.in_flight, plan
    if previous is not None:
      self._read(previous)
    if plan is None and previous is None:
      self.counts["idle"] += 1
    return plan

  def drain(self, most=100_000) -> None:
    """Steps until everything has been served."""
    start = self.steps
    while self.alive or self.in_flight is not None:
      self.step()
      assert self.steps - start < most, "no progress"

  def _pack(self, stores) -> None:
    for store in stores:
      store.packed = Packed(self.content[store.group][store.pages], self.rng)
      self.counts["stores"] += 1

  def _compute(self, plan: Plan) -> None:
    self._pack(plan.stores)
    self.log.update(repr([(w.slot, w.start, w.count) for w in plan.work()]).encode())
    for a in plan.admitted:
      fork = a.found and a.found == a.sequence.prompt_length - 1 and len(a.sequence.siblings) > 1
      self.counts["forks" if fork else "hits"] += bool(a.found)
      self.counts["hit_tokens"] += a.found
      self.counts["restored"] += bool(a.found and a.reached)
      a.sequence.found = a.found
      assert sum(b - s for s, b in _spans(a.sources)) == a.found
      for load in a.loads:
        p = plan.pages[load.group]
        assert (p.refs[load.pages] >= 1).all(), "loaded into a page that nobody holds"
        assert (p.stamp[load.pages] == 0).all(), "loaded into a page that others may want"
        rows = np.asarray(load.piece.array)[load.rows]
        self.content[load.group][load.pages] = rows
        self.counts["loads"] += 1
    if plan.copies is not None:
      for content, (source, target) in zip(self.content, plan.copies, strict=True):
        assert len(target) <= len(plan.pages[0].first)
        content[target] = content[source]
        self.counts["copies"] += len(target)
    work = plan.work()
    assert len({w.slot for w in work}) == len(work)
    for w in work:
      # Tokens in flight are known to the device, and to whoever knows the model.
      while len(w.sequence.hashes) <= w.start + w.count:
        h = w.sequence.hashes[-1]
        w.sequence.hashes.append(prefix_hash(h, next_token(h, w.sequence.order[2])))
      self.counts["computed"] += w.count
      for i, g in enumerate(self.layout):
        self._write(i, g, plan, w)
    for w in work:
      for i, g in enumerate(self.layout):
        self._check_readable(i, g, plan, w)

  def _place(self, g, p, slot, positions):
    logical = positions // g.page_size
    assert (logical >= p.first[slot]).all(), f"{g.name}: reads pages that were given back"
    assert (logical < p.last[slot]).all(), f"{g.name}: writes where no page is"
    return p.table[slot, g.column(logical)], positions % g.page_size

  def _write(self, i, g, plan, w) -> None:
    p = plan.pages[i]
    positions = np.arange(w.start, w.start + w.count)
    page, offset = self._place(g, p, w.slot, positions)
    assert (p.refs[page] == 1).all(), f"{g.name}: a shared page is written"
    assert (p.stamp[page] == 0).all(), f"{g.name}: a cached page is written"
    hashes = np.array(w.sequence.hashes[w.start + 1 : w.start + w.count + 1])
    if g.retention.state:
      offset = 0 * offset  # one state per page, of its last position
      for where, value in zip(page, hashes, strict=True):
        self.content[i][where, 0] = value
    else:
      self.content[i][page, offset] = hashes

  def _check_readable(self, i, g, plan, w) -> None:
    first = int(g.retention.first_readable(w.start))
    if not g.reusable:
      first = max(first, w.sequence.found)  # nothing is said of scratch memory before a hit
    if g.retention.state:
      positions = np.array([w.start + w.count - 1])
      page, offset = self._place(g, plan.pages[i], w.slot, positions)
      offset = 0 * offset
      if w.start and w.start % g.page_size == 0:
        before, _ = self._place(g, plan.pages[i], w.slot, np.array([w.start - 1]))
        assert self.content[i][before[0], 0] == w.sequence.hashes[w.start], (
          f"{g.name}: a wrong state"
        )
    else:
      positions = np.arange(first, w.start + w.count)
      page, offset = self._place(g, plan.pages[i], w.slot, positions)
    got = self.content[i][page, offset]
    want = np.array([w.sequence.hashes[p + 1] for p in positions])
    assert (got == want).all(), (
      f"{g.name}: slot {w.slot} reads what is not its own at {positions[got != want]}"
    )

  def _read(self, plan: Plan) -> None:
    for w in plan.work():
      s = w.sequence
      for _ in range(w.samples):
        if s.ended:
          break
        token = next_token(s.hashes[len(s.tokens)], s.order[2])
        s.tokens.append(token)
        if len(s.hashes) <= len(s.tokens):
          s.hashes.append(prefix_hash(s.hashes[-1], token))
        if len(s.tokens) >= s.limit:
          s.ended = True
          self.alive.remove(s)
          self.scheduler.remove(s)

  def settle(self) -> None:
    """Lets everything that is on its way to a tier arrive; nobody waits for anything any more."""
    offload = self.offload
    self._pack(offload.stores.take())
    for _ in range(500):
      if getattr(offload.tiers.workers, "tick", None):
        offload.tiers.workers.tick()
      offload.poll()
    assert not offload.stores.queue
    assert len(offload.fetches) == 0
    assert offload.figures()["in_flight_bytes"] == 0
    host = offload.tiers.host
    if host is not None:
      host.check()
      host.clear()
      assert host.used == 0, "a reservation or a pin that nobody ended"

  def stop(self, s: Stub) -> None:
    """The host decides that a sequence has ended: a stop string, say."""
    s.ended = True
    self.alive.remove(s)
    self.scheduler.remove(s)


def brute_force_hit(driver: Driver, tokens, salt=None, limit=None) -> int:
  """The longest prefix that every group can resume from, from stamps and contents alone."""
  limit = len(tokens) - 1 if limit is None else limit
  hashes = [prefix_hash(0, hash_of(salt))]
  for token in tokens:
    hashes.append(prefix_hash(hashes[-1], token))
  return max((n for n in range(1, limit + 1) if _resumable(driver, hashes, n)), default=0)


def needed_pages(g: GroupGeometry, length: int) -> set[int]:
  """Logical pages with a position below `length` that some token at or after it may read."""
  r = g.retention
  if r.state:
    readable = [length - 1]
  elif r.chunk is not None:
    readable = [p for p in range(length) if p // r.chunk == length // r.chunk]
  elif r.window is not None:
    readable = [p for p in range(length) if length - p < r.window]
  else:
    readable = list(range(length))
  return {p // g.page_size for p in readable}


def _resumable(driver: Driver, hashes, length) -> bool:
  anything = False
  for g, p, content in zip(driver.layout, driver.cache.pages, driver.content, strict=True):
    if not g.reusable:
      continue
    for logical in needed_pages(g, length):
      anything = True
      end = (logical + 1) * g.page_size
      if end > length:
        return False  # not a whole page
      at = content[:, 0] if g.retention.state else content[:, g.page_size - 1]
      if not ((at == hashes[end]) & (p.stamp > 0)).any():
        return False
  return anything


__all__ = [
  "PATIENCE",
  "Driver",
  "Stub",
  "brute_force_hit",
  "group",
  "needed_pages",
  "random_layout",
]
