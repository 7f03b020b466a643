"""Who leaves first when a tier is full: eviction policies over keys of different sizes.

A policy knows the resident keys and their bytes, nothing else: it neither counts the tier's budget
nor knows what is pinned. All sizes are in bytes.
"""

import collections
from collections.abc import Iterator
from typing import Protocol


class Policy(Protocol):
  """The order in which resident keys should leave.

  `touch`, `remove` and `evict` of a key that is not resident raise KeyError.
  """

  def insert(self, key: bytes, nbytes: int) -> None:
    """A new resident key. Raises ValueError when it is resident already."""

  def touch(self, key: bytes) -> None:
    """A resident key was used."""

  def remove(self, key: bytes) -> None:
    """A resident key left for another reason than eviction; nothing remembers it."""

  def victims(self) -> Iterator[bytes]:
    """All resident keys, each once, in the order in which they should leave.

    Each is given as if those before it had left. Iterating changes nothing; the caller skips what
    is pinned, stops when it has enough, and calls nothing else of the policy until it has stopped.
    """

  def evict(self, key: bytes) -> None:
    """A resident key was evicted to make room; the policy may remember that it was there."""


class _Queue:
  """Keys and their bytes, the one that was put in first at the front.

  Attributes:
    nbytes: of all keys together.
  """

  def __init__(self) -> None:
    self.nbytes = 0
    # Not a dict: finding its first key takes longer for every key deleted before it.
    self._sizes: collections.OrderedDict[bytes, int] = collections.OrderedDict()

  def __contains__(self, key: bytes) -> bool:
    return key in self._sizes

  def __iter__(self) -> Iterator[bytes]:
    return iter(self._sizes)

  def items(self) -> Iterator[tuple[bytes, int]]:
    return iter(self._sizes.items())

  def put(self, key: bytes, nbytes: int) -> None:
    """At the back."""
    self._sizes[key] = nbytes
    self.nbytes += nbytes

  def pop(self, key: bytes) -> int:
    """Takes a key out; returns its bytes."""
    nbytes = self._sizes.pop(key)
    self.nbytes -= nbytes
    return nbytes

  def shorten(self, most: int) -> None:
    """Takes keys from the front until at most `most` bytes are left, or none."""
    while self._sizes and self.nbytes > most:
      self.nbytes -= self._sizes.popitem(last=False)[1]


class LRU:
  """What was not used for the longest time leaves first."""

  def __init__(self) -> None:
    self._keys = _Queue()

  def insert(self, key: bytes, nbytes: int) -> None:
    _check_new(key, self._keys)
    self._keys.put(key, nbytes)

  def touch(self, key: bytes) -> None:
    self._keys.put(key, self._keys.pop(key))

  def remove(self, key: bytes) -> None:
    self._keys.pop(key)

  def victims(self) -> Iterator[bytes]:
    return iter(self._keys)

  def evict(self, key: bytes) -> None:
    self._keys.pop(key)


class ARC:
  """Adaptive replacement cache, after N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead
  Replacement Cache", FAST 2003, with bytes in place of a number of pages.

  Keys used once are in T1, keys used again in T2; B1 and B2 remember keys (their names only) that
  were evicted from them. T1 gives way while it has more than `target` bytes, else T2. A key that
  comes back while B1 remembers it says that T1 is too small, one in B2 that T2 is: the target moves
  by the key's bytes, or more where the other list of ghosts is the longer one.

  As in the paper T1 and B1 have at most `capacity` bytes together and all four lists twice that, as
  long as the resident keys have at most `capacity`. The paper adapts the target first and then
  makes room; here room was made when the piece was reserved, so a ghost hit steers what leaves
  next.

  Attributes:
    capacity: bytes that the resident keys may have together.
    target: bytes that T1 should have, in [0, capacity]; the paper's p.
  """

  def __init__(self, capacity: int):
    self.capacity = capacity
    self.target = 0
    self._once, self._again = _Queue(), _Queue()  # T1, T2
    self._once_ghosts, self._again_ghosts = _Queue(), _Queue()  # B1, B2

  def insert(self, key: bytes, nbytes: int) -> None:
    _check_new(key, self._once, self._again)
    b1, b2 = self._once_ghosts, self._again_ghosts
    if key in b1:
      step = max(nbytes, nbytes * b2.nbytes // b1.nbytes)
      self.target = min(self.capacity, self.target + step)
      b1.pop(key)
      self._again.put(key, nbytes)
    elif key in b2:
      step = max(nbytes, nbytes * b1.nbytes // b2.nbytes)
      self.target = max(0, self.target - step)
      b2.pop(key)
      self._again.put(key, nbytes)
    else:
      self._once.put(key, nbytes)
    # Only here do the lists grow: an eviction moves bytes from T to B, a touch from T1 to T2.
    b1.shorten(self.capacity - self._once.nbytes)
    b2.shorten(2 * self.capacity - self._once.nbytes - self._again.nbytes - b1.nbytes)

  def touch(self, key: bytes) -> None:
    self._again.put(key, self._resident(key).pop(key))

  def remove(self, key: bytes) -> None:
    self._resident(key).pop(key)

  def victims(self) -> Iterator[bytes]:
    once, again = self._once.items(), iter(self._again)
    left = self._once.nbytes
    # The target decides which list gives way, but what one list lacks the other one gives: all of
    # T1 while T2 is empty, and the rest of either when the other is through.
    second = next(again, None)
    for key, nbytes in once:
      while left <= self.target and second is not None:
        yield second
        second = next(again, None)
      yield key
      left -= nbytes
    if second is not None:
      yield second
      yield from again

  def evict(self, key: bytes) -> None:
    queue = self._resident(key)
    ghosts = self._once_ghosts if queue is self._once else self._again_ghosts
    ghosts.put(key, queue.pop(key))

  def _resident(self, key: bytes) -> _Queue:
    """The list that a resident key is in; for any other one, a list that it is not in."""
    return self._once if key in self._once else self._again


def policy(name: str, capacity: int) -> Policy:
  """A new policy.

  Args:
    name: "lru" or "arc"; ValueError for any other.
    capacity: bytes that the resident keys may have together.
  """
  if name == "lru":
    return LRU()
  if name == "arc":
    return ARC(capacity)
  raise ValueError(f"expected an eviction policy 'lru' or 'arc', got {name!r}")


def _check_new(key: bytes, *queues: _Queue) -> None:
  if any(key in queue for queue in queues):
    raise ValueError(
      f"expected a key that is not resident, got {key.hex()[:16]}; call touch when a key is used"
    )
