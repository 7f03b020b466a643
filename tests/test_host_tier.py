"""The tier in host memory against brute-force counting, and its eviction policies against naive
ones."""

import random

import numpy as np
import pytest

from kvjax.offload.host import HostTier
from kvjax.offload.piece import Piece
from kvjax.offload.policy import ARC, LRU, policy

POLICIES = ("lru", "arc")
both = pytest.mark.parametrize("name", POLICIES)


def key(n):
  return f"key {n}".encode()


def piece(k, nbytes, group="full"):
  return Piece(k, group, 0, np.zeros((1, nbytes), np.uint8))


def put(tier, k, nbytes, group="full"):
  """A piece all the way in; whether there was room."""
  if not tier.reserve(k, nbytes):
    return False
  assert tier.fill(piece(k, nbytes, group))
  tier.check()
  return True


def use(tier, k):
  """A hit; whether it was one."""
  if tier.pin(k) is None:
    return False
  tier.unpin(k)
  return True


def resident(tier, keys):
  return [k for k in keys if tier.find(k) is not None]


# Policies.


class NaiveLRU:
  """Lists, sums, and one victim at a time."""

  def __init__(self, capacity):
    self.keys = []

  def insert(self, k, nbytes):
    self.keys.append(k)

  def touch(self, k):
    self.keys.remove(k)
    self.keys.append(k)

  def remove(self, k):
    self.keys.remove(k)

  evict = remove

  def victims(self):
    return list(self.keys)


class NaiveARC:
  """The paper's four lists of (key, bytes), the least recently used one first."""

  def __init__(self, capacity):
    self.capacity = capacity
    self.p = 0
    self.t1, self.t2, self.b1, self.b2 = [], [], [], []

  @staticmethod
  def size(*lists):
    return sum(nbytes for each in lists for _, nbytes in each)

  @staticmethod
  def take(entries, k):
    entry = next(entry for entry in entries if entry[0] == k)
    entries.remove(entry)
    return entry

  def insert(self, k, nbytes):
    ratio = self.size(self.b2), self.size(self.b1)
    if any(k == ghost for ghost, _ in self.b1):
      self.p = min(self.capacity, self.p + max(nbytes, nbytes * ratio[0] // ratio[1]))
      self.take(self.b1, k)
      self.t2.append((k, nbytes))
    elif any(k == ghost for ghost, _ in self.b2):
      self.p = max(0, self.p - max(nbytes, nbytes * ratio[1] // ratio[0]))
      self.take(self.b2, k)
      self.t2.append((k, nbytes))
    else:
      self.t1.append((k, nbytes))
    while self.b1 and self.size(self.t1, self.b1) > self.capacity:
      self.b1.pop(0)
    while self.b2 and self.size(self.t1, self.t2, self.b1, self.b2) > 2 * self.capacity:
      self.b2.pop(0)

  def home(self, k):
    return self.t1 if any(k == other for other, _ in self.t1) else self.t2

  def touch(self, k):
    self.t2.append(self.take(self.home(k), k))

  def remove(self, k):
    self.take(self.home(k), k)

  def evict(self, k):
    ghosts = self.b1 if self.home(k) is self.t1 else self.b2
    ghosts.append(self.take(self.home(k), k))

  def victims(self):
    t1, t2, out = list(self.t1), list(self.t2), []
    while t1 or t2:
      first = t1 if t1 and (self.size(t1) > self.p or not t2) else t2
      out.append(first.pop(0)[0])
    return out


NAIVE = {"lru": NaiveLRU, "arc": NaiveARC}


@both
@pytest.mark.parametrize("seed", range(30))
def test_a_policy_orders_as_a_naive_one(name, seed):
  rng = random.Random(seed)
  capacity = rng.choice([40, 100, 300])
  real, naive = policy(name, capacity), NAIVE[name](capacity)
  sizes = {key(n): rng.randint(1, 30) for n in range(40)}
  inside = {}
  for _ in range(300):
    if inside and rng.random() < 0.5:
      k = rng.choice(list(inside))
      what = rng.choice(["touch", "touch", "touch", "remove"])
      getattr(real, what)(k)
      getattr(naive, what)(k)
      if what == "remove":
        del inside[k]
    else:
      k = rng.choice([k for k in sizes if k not in inside])
      pinned = set(rng.sample(list(inside), len(inside) // 4))
      for victim in naive.victims():
        if sum(inside.values()) + sizes[k] <= capacity:
          break
        if victim not in pinned:
          real.evict(victim)
          naive.evict(victim)
          del inside[victim]
      if sum(inside.values()) + sizes[k] <= capacity:
        real.insert(k, sizes[k])
        naive.insert(k, sizes[k])
        inside[k] = sizes[k]
    order = list(real.victims())
    assert order == naive.victims() == list(real.victims())
    assert sorted(order) == sorted(inside)
    if name == "arc":
      assert real.target == naive.p
      ghosts = real._once_ghosts.nbytes, real._again_ghosts.nbytes
      assert ghosts == (naive.size(naive.b1), naive.size(naive.b2))
      assert real._once.nbytes + ghosts[0] <= capacity
      assert sum(inside.values()) + sum(ghosts) <= 2 * capacity


def test_arc_moves_its_target_on_ghost_hits():
  arc = ARC(100)
  for n in range(10):
    arc.insert(key(n), 10)
  for n in range(5, 10):
    arc.touch(key(n))  # T1 = 0..4, T2 = 5..9
  assert list(arc.victims()) == [key(n) for n in range(10)]
  arc.evict(key(0))
  arc.insert(key(0), 10)  # B1 remembers it: T1 should have been larger
  assert arc.target == 10
  # T1 = 1..4 gives way down to the target, then T2, and only then the rest of T1.
  assert list(arc.victims()) == [key(n) for n in (1, 2, 3, 5, 6, 7, 8, 9, 0, 4)]
  arc.evict(key(1))
  arc.insert(key(1), 10)
  assert arc.target == 20
  for n in (5, 6, 2):
    arc.evict(key(n))
  arc.insert(key(5), 10)  # B2 remembers it: T2 should have been larger
  assert arc.target == 10
  arc.insert(key(2), 40)  # as much as the piece has, more when the other ghosts are more
  assert arc.target == 50


def test_arc_has_no_ghost_of_what_was_removed():
  arc = ARC(100)
  for leave, target in ((arc.remove, 0), (arc.evict, 10)):
    arc.insert(key(0), 10)
    leave(key(0))
    arc.insert(key(0), 10)
    assert arc.target == target
    arc.remove(key(0))


@both
def test_a_policy_refuses_what_would_spoil_its_books(name):
  p = policy(name, 100)
  p.insert(key(0), 10)
  p.touch(key(0))
  with pytest.raises(ValueError, match="not resident"):
    p.insert(key(0), 10)
  for what in (p.touch, p.remove, p.evict):
    with pytest.raises(KeyError):
      what(key(1))
  assert list(p.victims()) == [key(0)]


def test_policies_by_name():
  assert isinstance(policy("lru", 10), LRU)
  assert isinstance(policy("arc", 10), ARC)
  with pytest.raises(ValueError, match="'lru' or 'arc', got 'mru'"):
    policy("mru", 10)
  with pytest.raises(ValueError, match="'mru'"):
    HostTier(10, "mru")


# The tier against a brute-force model.


class Model:
  """What the tier should hold, counted from nothing every time."""

  def __init__(self, capacity, name):
    self.capacity, self.name = capacity, name
    self.policy = NAIVE[name](capacity)
    self.pieces = {}  # resident
    self.dropped = {}
    self.pins = {}  # of resident and dropped ones
    self.reserved = {}
    self.late = set()
    self.stored, self.evicted, self.refusals = [], [], 0
    self.peak = 0

  def used(self):
    pieces = [*self.pieces.values(), *self.dropped.values()]
    return sum(p.nbytes for p in pieces) + sum(self.reserved.values())

  def evictable(self):
    return sum(p.nbytes for k, p in self.pieces.items() if not self.pins[k])

  def reserve(self, k, nbytes):
    if k in self.pieces or k in self.reserved or k in self.dropped:
      return False
    if self.used() - self.evictable() + nbytes > self.capacity:
      self.refusals += 1
      return False
    for victim in self.policy.victims():
      if self.used() + nbytes <= self.capacity:
        break
      if not self.pins[victim]:
        self.policy.evict(victim)
        self.evicted.append(self.pieces.pop(victim).nbytes)
        del self.pins[victim]
    self.reserved[k] = nbytes
    self.peak = max(self.peak, self.used())
    return True

  def fill(self, p):
    del self.reserved[p.key]
    if p.key in self.late:
      self.late.remove(p.key)
      return False
    self.pieces[p.key] = p
    self.pins[p.key] = 0
    self.policy.insert(p.key, p.nbytes)
    self.stored.append(p.nbytes)
    return True

  def cancel(self, k):
    del self.reserved[k]
    self.late.discard(k)

  def pin(self, k):
    if k in self.pieces:
      self.pins[k] += 1
      self.policy.touch(k)
    return self.pieces.get(k)

  def unpin(self, k):
    self.pins[k] -= 1
    if k in self.dropped and not self.pins[k]:
      del self.dropped[k], self.pins[k]

  def remove(self, k):
    if k in self.reserved:
      self.late.add(k)
    if k in self.pieces:
      self.policy.remove(k)
      p = self.pieces.pop(k)
      if self.pins[k]:
        self.dropped[k] = p
      else:
        del self.pins[k]

  def clear(self):
    for k in [*self.pieces, *self.reserved]:
      self.remove(k)
    self.policy = NAIVE[self.name](self.capacity)

  def compare(self, tier, keys):
    tier.check()
    assert tier.used == self.used() <= tier.capacity
    assert tier.free == tier.capacity - self.used()
    assert [tier.find(k) for k in keys] == [self.pieces.get(k) for k in keys]
    for k in keys:
      assert tier.pending(k) == (k in self.reserved and k not in self.late)
    figures = tier.figures()
    assert figures["stored"] == len(self.stored)
    assert figures["stored_bytes"] == sum(self.stored)
    assert figures["evictions"] == len(self.evicted)
    assert figures["evicted_bytes"] == sum(self.evicted)
    assert figures["refusals"] + figures["repeated_refusals"] == self.refusals
    assert figures["resident"] == len(self.pieces)
    assert figures["resident_bytes"] == sum(p.nbytes for p in self.pieces.values())
    assert figures["used_bytes"] == self.used()
    assert figures["peak_bytes"] == self.peak
    groups = {}
    for p in self.pieces.values():
      count, nbytes = groups.get(p.group, (0, 0))
      groups[p.group] = count + 1, nbytes + p.nbytes
    assert groups == {
      g: (values["resident"], values["resident_bytes"]) for g, values in figures["groups"].items()
    }


def random_move(rng, tier, model, pieces):
  """One call, made to both; every answer must be the same."""
  keys = list(pieces)
  what = rng.choices(
    ["reserve", "fill", "cancel", "pin", "unpin", "remove", "clear"], [40, 25, 3, 20, 12, 3, 1]
  )[0]
  if what == "reserve":
    k = rng.choice(keys)
    evictions, version = tier.evictions, tier.version
    answer = model.reserve(k, pieces[k].nbytes)
    assert tier.reserve(k, pieces[k].nbytes) == answer
    if not answer:  # nothing was evicted
      assert (tier.evictions, tier.version) == (evictions, version)
    assert (tier.version > version) == (tier.evictions > evictions)
  elif what == "fill" and model.reserved:
    p = pieces[rng.choice(list(model.reserved))]
    assert tier.fill(p) == model.fill(p)
  elif what == "cancel" and model.reserved:
    k = rng.choice(list(model.reserved))
    tier.cancel(k)
    model.cancel(k)
  elif what == "pin":
    k = rng.choice(keys)
    assert tier.pin(k) is model.pin(k)
  elif what == "unpin" and any(model.pins.values()):
    k = rng.choice([k for k, pins in model.pins.items() if pins])
    tier.unpin(k)
    model.unpin(k)
  elif what == "remove":
    k = rng.choice(keys)
    tier.remove(k)
    model.remove(k)
  elif what == "clear":
    tier.clear()
    model.clear()


@both
@pytest.mark.parametrize("seed", range(40))
def test_the_books_are_those_of_a_brute_force_count(name, seed):
  rng = random.Random(seed)
  capacity = rng.choice([40, 60, 80])
  tier, model = HostTier(capacity, name), Model(capacity, name)
  groups = ("full", "window", "state")
  pieces = {}
  for n in range(14):
    k, g = key(n), rng.randrange(3)
    pieces[k] = piece(k, rng.choice([5, 16, rng.randint(1, 70)]), groups[g])
  for _ in range(200):
    random_move(rng, tier, model, pieces)
    model.compare(tier, pieces)
  while any(model.pins.values()):
    k = next(k for k, pins in model.pins.items() if pins)
    tier.unpin(k)
    model.unpin(k)
  for k in list(model.reserved):
    tier.cancel(k)
    model.cancel(k)
  tier.clear()
  model.clear()
  model.compare(tier, pieces)
  assert tier.used == 0
  assert tier.stored
  assert tier.evictions
  assert tier.refusals + tier.repeated_refusals


@both
@pytest.mark.parametrize("seed", range(20))
def test_enough_evictable_bytes_are_enough(name, seed):
  """Pins anywhere on T1 and T2, any target, every size that could be asked for."""
  for need in range(1, 101, 3):
    rng = random.Random(seed)
    tier = HostTier(100, name)
    sizes = {key(n): rng.randint(3, 20) for n in range(30)}
    for _ in range(60):  # hits, evictions and ghosts
      k = rng.choice(list(sizes))
      if not use(tier, k):
        put(tier, k, sizes[k])
    there = resident(tier, sizes)
    pinned = [k for k in there if rng.random() < 0.4]
    if rng.random() < 0.3:
      pinned = there[:-1]
    for k in pinned:
      tier.pin(k)
    room = 100 - sum(sizes[k] for k in pinned)
    assert tier.reserve(b"new", need) == (need <= room)
    assert set(pinned) <= set(resident(tier, sizes))
    if need > room:
      assert resident(tier, sizes) == there
    tier.check()


def test_arc_evicts_several_while_nothing_was_used_twice():
  tier = HostTier(40, "arc")
  for n in range(4):
    assert put(tier, key(n), 10)
  assert put(tier, key(4), 30)
  assert resident(tier, map(key, range(5))) == [key(3), key(4)]
  assert tier.evictions == 3


def test_arc_goes_on_to_the_other_list_past_pins():
  """Either list pinned altogether: the other one gives all that is needed."""
  for pinned in (range(2), range(2, 4)):
    tier = HostTier(40, "arc")
    for n in range(4):
      put(tier, key(n), 10)
    for n in range(2, 4):
      use(tier, key(n))  # T1 = 0, 1; T2 = 2, 3
    for n in pinned:
      tier.pin(key(n))
    assert tier.reserve(key(9), 20)
    assert resident(tier, map(key, range(4))) == [key(n) for n in pinned]


# Bytes, not rows or groups.


@both
@pytest.mark.parametrize("groups", [1, 8])
def test_sixteen_chunks_fit_where_their_bytes_do(name, groups):
  """However many groups they belong to: no row is kept for all groups, no share for each."""
  chunk = 24
  tier = HostTier(16 * chunk, name)
  chunks = {key(n): f"group {n % groups}" for n in range(16)}
  for k, group in chunks.items():
    assert put(tier, k, chunk, group)
  assert resident(tier, chunks) == list(chunks)
  assert (tier.evictions, tier.free) == (0, 0)
  each = {"resident": 16 // groups, "resident_bytes": 16 // groups * chunk}
  assert tier.figures()["groups"] == {f"group {g}": each for g in range(groups)}
  assert put(tier, key(16), chunk)
  assert tier.evictions == 1


@both
def test_a_mixture_of_sizes_uses_the_bytes(name):
  """Chunks of nine groups in any order: a full tier stays full."""
  sizes = [*[32] * 7, 64, 8]
  rng = random.Random(0)
  tier = HostTier(4 * sum(sizes), name)
  least, n = tier.capacity, 0
  for turn in range(60):
    for group in rng.sample(range(9), 9):
      n += 1
      assert put(tier, key(n), sizes[group], f"group {group}")
      if n > 5:
        use(tier, key(rng.randint(n - 5, n)))
    if turn >= 4:
      least = min(least, tier.used)
  assert tier.evictions
  assert least >= 0.9 * tier.capacity
  assert len(tier.figures()["groups"]) == 9


# Order.


def test_lru_evicts_what_was_not_used_for_longest():
  tier = HostTier(40)
  for n in range(4):
    put(tier, key(n), 10)
  use(tier, key(0))
  assert tier.find(key(1)) is not None  # a look is no use
  gone = []
  for n in range(4, 8):
    before = set(resident(tier, map(key, range(4))))
    put(tier, key(n), 10)
    gone += before - set(resident(tier, map(key, range(4))))
  assert gone == [key(n) for n in (1, 2, 3, 0)]


def test_arc_keeps_a_reused_set_under_a_scan_that_flushes_lru():
  left = {}
  for name in POLICIES:
    tier = HostTier(100, name)
    hot = [key(n) for n in range(5)]
    for k in hot:
      put(tier, k, 10)
    for k in hot:
      use(tier, k)
    for n in range(100, 150):
      assert put(tier, key(n), 10)
    left[name] = resident(tier, hot)
  assert left == {"lru": [], "arc": hot}


def test_arc_gives_recent_pieces_more_when_they_come_back():
  """A working set somewhat larger than T1, after a time of hits that were worth keeping."""
  tier = HostTier(100, "arc")
  hot = [key(n) for n in range(8)]
  for k in hot:
    put(tier, k, 10)
    use(tier, k)
  for _ in range(3):
    for n in range(100, 105):  # two have room: they come back while their ghosts are known
      if not use(tier, key(n)):
        put(tier, key(n), 10)
  assert tier._policy.target > 0
  assert len(resident(tier, map(key, range(100, 105)))) == 5
  assert len(resident(tier, hot)) == 5


# Pins, clear, late completions.


@both
def test_a_pinned_piece_survives_pressure_and_clear(name):
  tier = HostTier(40, name)
  for n in range(4):
    put(tier, key(n), 10)
  held = tier.pin(key(0))
  assert tier.pin(key(0)) is held is tier.find(key(0))
  for n in range(10, 30):
    assert put(tier, key(n), 30)
    assert tier.find(key(0)) is held
  assert not tier.reserve(key(30), 31)
  tier.clear()
  assert tier.find(key(0)) is None
  assert tier.pin(key(0)) is None
  assert tier.used == 10
  assert not tier.reserve(key(0), 10)  # the name is taken until the last pin goes
  assert not tier.reserve(key(31), 31)
  tier.check()
  tier.unpin(key(0))
  assert tier.used == 10
  tier.unpin(key(0))
  assert tier.used == 0
  assert held.array.shape == (1, 10)
  assert put(tier, key(0), 40)


@both
def test_a_removed_piece_frees_its_bytes_with_the_last_pin(name):
  tier = HostTier(20, name)
  put(tier, key(0), 10)
  put(tier, key(1), 10)
  tier.pin(key(1))
  tier.remove(key(0))
  tier.remove(key(1))
  assert resident(tier, [key(0), key(1)]) == []
  assert tier.used == 10
  tier.check()
  tier.unpin(key(1))
  assert tier.used == 0
  assert tier.evictions == 0
  tier.remove(key(1))  # not there: nothing happens
  tier.check()


@both
@pytest.mark.parametrize("drop", ["clear", "remove"])
def test_a_late_fill_is_ignored(name, drop):
  tier = HostTier(40, name)
  for n in range(2):
    assert tier.reserve(key(n), 10)
  assert tier.pending(key(0))
  if drop == "clear":
    tier.clear()
  else:
    tier.remove(key(0))
    tier.remove(key(1))
  assert not tier.pending(key(0))
  assert tier.used == 20  # their copies are still under way
  # Made anew the same name would be brought in by the late fill.
  assert not tier.reserve(key(0), 10)
  version = tier.version
  assert tier.fill(piece(key(0), 10)) is False
  tier.cancel(key(1))
  assert tier.version > version
  assert tier.find(key(0)) is None
  assert (tier.used, tier.stored) == (0, 0)
  tier.check()
  assert put(tier, key(0), 10)
  assert tier.find(key(0)) is not None


def test_a_fill_needs_its_reservation():
  tier = HostTier(40)
  with pytest.raises(ValueError, match="reserve it first"):
    tier.fill(piece(key(0), 10))
  with pytest.raises(ValueError, match="reserve it first"):
    tier.cancel(key(0))
  assert tier.reserve(key(0), 10)
  assert not tier.reserve(key(0), 10)
  with pytest.raises(ValueError, match="10 bytes as reserved, got 9"):
    tier.fill(piece(key(0), 9))
  assert tier.pending(key(0))
  assert tier.fill(piece(key(0), 10)) is True
  assert not tier.pending(key(0))
  assert not tier.reserve(key(0), 10)
  with pytest.raises(ValueError, match="reserve it first"):
    tier.fill(piece(key(0), 10))
  assert tier.refusals == 0  # these were not for want of room
  tier.check()


def test_calls_that_make_no_sense_raise():
  tier = HostTier(40)
  put(tier, key(0), 10)
  for k in (key(0), key(1)):
    with pytest.raises(ValueError, match="expected a pinned piece"):
      tier.unpin(k)
  with pytest.raises(ValueError, match="at least 1 byte"):
    tier.reserve(key(1), 0)
  with pytest.raises(ValueError, match="0 or more bytes, got -1"):
    HostTier(-1)
  assert not HostTier(0).reserve(key(0), 1)
  tier.check()


# Refusals.


@both
def test_a_repeated_refusal_does_not_scan(name):
  tier = HostTier(40, name)
  for n in range(4):
    put(tier, key(n), 10)
  for n in range(3):
    tier.pin(key(n))
  scans = []
  victims = tier._policy.victims
  tier._policy.victims = lambda: scans.append(1) or victims()
  assert not tier.reserve(key(9), 20)
  assert (tier.refusals, tier.repeated_refusals) == (1, 0)
  for n in range(10, 20):
    assert not tier.reserve(key(n), 20 + n % 2)
  assert (tier.refusals, tier.repeated_refusals) == (1, 10)
  assert not tier.reserve(key(9), 15)  # less than what was refused: looked at
  assert (tier.refusals, tier.repeated_refusals) == (2, 10)
  assert not tier.reserve(key(9), 15)
  assert (tier.refusals, tier.repeated_refusals) == (2, 11)
  assert scans == []
  assert tier.reserve(key(9), 10)  # less again, and there is room
  assert scans == [1]


@both
def test_the_version_tells_that_room_appeared(name):
  """After each of these a reservation that was refused succeeds, and not before."""

  def full():
    tier = HostTier(40, name)
    for n in range(2):
      put(tier, key(n), 10)
      tier.pin(key(n))
    assert tier.reserve(key(2), 20)
    return tier

  def unpin_twice(tier):
    tier.pin(key(0))
    version = tier.version
    tier.unpin(key(0))
    assert tier.version == version  # not the last one
    tier.unpin(key(0))

  def remove(tier):
    tier.remove(key(0))
    tier.unpin(key(0))

  def clear(tier):
    tier.clear()
    tier.unpin(key(0))

  changes = {
    "unpin": unpin_twice,
    "fill": lambda tier: tier.fill(piece(key(2), 20)),
    "cancel": lambda tier: tier.cancel(key(2)),
    "remove": remove,
    "clear": clear,
  }
  for what, change in changes.items():
    tier = full()
    version = tier.version
    assert not tier.reserve(key(9), 10), what
    assert not tier.reserve(key(9), 10), what
    assert tier.version == version, what
    change(tier)
    assert tier.version > version, what
    assert tier.reserve(key(9), 10), what
    tier.check()
  for drop in (lambda tier: tier.remove(key(0)), HostTier.clear):
    tier = HostTier(40, name)
    put(tier, key(0), 10)
    assert not tier.reserve(key(9), 41)
    version = tier.version
    drop(tier)
    assert tier.version > version


# The check itself.


def _booked_twice(tier):
  tier.used += 1


def _over_budget(tier):
  tier.capacity = 19


def _lost_to_the_policy(tier):
  tier._policy.remove(key(0))


def _strange_to_the_policy(tier):
  tier._policy.remove(key(0))
  tier._policy.insert(key(7), 10)


def _evictable_but_pinned(tier):
  tier._resident[key(0)].pins += 1


def _other_bytes(tier):
  tier._resident[key(0)].piece = piece(key(0), 9)


def _other_name(tier):
  tier._resident[key(0)].piece = piece(key(1), 10)


def _twice(tier):
  tier._dropped[key(0)] = tier._resident[key(0)]


def _dropped_without_a_pin(tier):
  tier._policy.remove(key(0))
  tier._dropped[key(0)] = tier._resident.pop(key(0))
  tier._evictable -= 10


def _late_without_a_reservation(tier):
  tier._late.add(key(0))


@both
@pytest.mark.parametrize(
  "spoil",
  [
    _booked_twice,
    _over_budget,
    _lost_to_the_policy,
    _strange_to_the_policy,
    _evictable_but_pinned,
    _other_bytes,
    _other_name,
    _twice,
    _dropped_without_a_pin,
    _late_without_a_reservation,
  ],
)
def test_check_finds_wrong_books(name, spoil):
  tier = HostTier(40, name)
  put(tier, key(0), 10)
  tier.reserve(key(1), 10)
  tier.check()
  spoil(tier)
  with pytest.raises(AssertionError):
    tier.check()
