"""Which resident piece leaves first: eviction policies behind one interface, sizes in bytes."""

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol


class Policy(Protocol):
  """Keeps the order of resident keys; the tier keeps their content."""

  def insert(self, key: bytes, nbytes: int) -> None:
    """A new resident key."""

  def touch(self, key: bytes) -> None:
    """A hit on a resident key."""

  def remove(self, key: bytes) -> None:
    """A resident key left for another reason than eviction."""

  def evict(self, key: bytes) -> None:
    """A resident key was evicted."""

  def victims(self) -> Iterator[bytes]:
    """Resident keys in the order in which they should leave. Changes nothing."""


class LRU:
  """Least recently used first."""

  def __init__(self) -> None:
    self._order: OrderedDict[bytes, None] = OrderedDict()

  def insert(self, key: bytes, nbytes: int) -> None:
    self._order[key] = None

  def touch(self, key: bytes) -> None:
    self._order.move_to_end(key)

  def remove(self, key: bytes) -> None:
    del self._order[key]

  evict = remove

  def victims(self) -> Iterator[bytes]:
    return iter(self._order)


class ARC:
  """Adaptive replacement (Megiddo and Modha, FAST 2003), for entries of different sizes.

  Keys seen once stand in one list, keys seen again in another; a hit on a key that was evicted from
  one of them moves the target size of the first by that key's bytes (at least; by more when its
  list of ghosts is the smaller one). A scan passes through the first list and leaves the second.

  Args:
    capacity: bytes of the tier; each list of ghosts remembers at most so many.
  """

  def __init__(self, capacity: int):
    self._capacity = capacity
    self._target = 0.0  # bytes of the first list
    # once, again: resident; ghosts of each. Oldest first.
    self._lists: tuple[OrderedDict[bytes, int], ...] = (OrderedDict(), OrderedDict())
    self._ghosts: tuple[OrderedDict[bytes, int], ...] = (OrderedDict(), OrderedDict())
    self._bytes = [0, 0]
    self._ghost_bytes = [0, 0]

  @property
  def target(self) -> float:
    """Bytes that keys seen once may take before they leave first."""
    return self._target

  def insert(self, key: bytes, nbytes: int) -> None:
    which = next((i for i in (0, 1) if key in self._ghosts[i]), None)
    if which is None:
      self._add(0, key, nbytes)
      return
    other = self._ghost_bytes[1 - which]
    step = nbytes * max(1.0, other / max(self._ghost_bytes[which], 1))
    self._target += step if which == 0 else -step
    self._target = min(max(self._target, 0.0), float(self._capacity))
    self._ghost_bytes[which] -= self._ghosts[which].pop(key)
    self._add(1, key, nbytes)

  def touch(self, key: bytes) -> None:
    which = self._of(key)
    nbytes = self._lists[which].pop(key)
    self._bytes[which] -= nbytes
    self._add(1, key, nbytes)

  def remove(self, key: bytes) -> None:
    which = self._of(key)
    self._bytes[which] -= self._lists[which].pop(key)

  def evict(self, key: bytes) -> None:
    which = self._of(key)
    nbytes = self._lists[which].pop(key)
    self._bytes[which] -= nbytes
    ghosts = self._ghosts[which]
    ghosts[key] = nbytes
    self._ghost_bytes[which] += nbytes
    while self._ghost_bytes[which] > self._capacity:
      self._ghost_bytes[which] -= ghosts.popitem(last=False)[1]

  def victims(self) -> Iterator[bytes]:
    """From the first list while it is above its target, else from the second; then what is left."""
    sizes = list(self._bytes)
    queues = [iter(list(entries.items())) for entries in self._lists]
    left = [len(entries) for entries in self._lists]
    while any(left):
      which = 0 if left[0] and (sizes[0] > self._target or not left[1]) else 1
      key, nbytes = next(queues[which])
      left[which] -= 1
      sizes[which] -= nbytes
      yield key

  def _of(self, key: bytes) -> int:
    return 0 if key in self._lists[0] else 1

  def _add(self, which: int, key: bytes, nbytes: int) -> None:
    self._lists[which][key] = nbytes
    self._bytes[which] += nbytes

  def keys(self) -> Iterator[bytes]:
    """Resident keys."""
    return itertools.chain(*self._lists)


def policy(name: str, capacity: int) -> Policy:
  """The policy of a name; ValueError for one that does not exist."""
  if name == "lru":
    return LRU()
  if name == "arc":
    return ARC(capacity)
  raise ValueError(f"policy: expected 'lru' or 'arc', got {name!r}")
