"""The tier in host memory: pieces within one budget of bytes."""

import dataclasses
from typing import Any

from kvjax.offload import policy as policy_lib
from kvjax.offload.piece import Piece


@dataclasses.dataclass(slots=True)
class _Entry:
  """A piece that is there, its bytes, and how many pins hold it."""

  piece: Piece
  nbytes: int
  pins: int = 0


class HostTier:
  """Pieces of all groups in host memory; every byte counts as itself, whatever its group.

  A piece comes in two steps, so that its copy can be under way in between: `reserve` books its
  bytes, then exactly one of `fill` and `cancel` ends the reservation. One that was made before a
  `clear` or `remove` must be ended as well: its copy takes memory until then, so its bytes stay
  booked, but it brings nothing in.

  All calls come from one thread; there are no locks.

  Attributes:
    capacity: bytes.
    used: bytes of what is resident, of reservations, and of dropped pieces that are still pinned;
      at most `capacity`.
    version: increases whenever a reservation that was refused may succeed: after an eviction, a
      fill (what is resident can be evicted, what is reserved cannot), a cancel, the last unpin, a
      remove, a clear.
    stored, stored_bytes: pieces that came in, ever.
    evictions, evicted_bytes: pieces that left to make room, ever.
    refusals: reservations for which there was no room.
    repeated_refusals: those of at least the bytes that were refused before at the same version,
      which are answered at once; not counted in `refusals`.
    peak: most bytes used at once.
  """

  def __init__(self, capacity: int, policy: str = "lru"):
    """Args:
    capacity: bytes; ValueError below 0.
    policy: "lru" or "arc"; ValueError for any other.
    """
    if capacity < 0:
      raise ValueError(f"expected a host tier of 0 or more bytes, got {capacity}")
    self.capacity = capacity
    self.used = 0
    self.version = 0
    self.stored = 0
    self.stored_bytes = 0
    self.evictions = 0
    self.evicted_bytes = 0
    self.refusals = 0
    self.repeated_refusals = 0
    self.peak = 0
    self._policy_name = policy
    self._policy = policy_lib.policy(policy, capacity)
    self._resident: dict[bytes, _Entry] = {}
    self._reserved: dict[bytes, int] = {}  # bytes
    self._late: set[bytes] = set()  # reserved ones that bring nothing in any more
    self._dropped: dict[bytes, _Entry] = {}  # out of the look-up, still pinned
    self._evictable = 0  # bytes of resident pieces without a pin
    self._refused: int | None = None  # fewest bytes refused at this version

  @property
  def free(self) -> int:
    """Bytes that nothing uses."""
    return self.capacity - self.used

  # Coming in.

  def reserve(self, key: bytes, nbytes: int) -> bool:
    """Books bytes for a piece, after evicting as many unpinned ones as that takes.

    Returns:
      False when there is no room even without all unpinned pieces, or when the key is resident,
      reserved, or dropped and still pinned (an unpin could not say which of the two it means).
      Nothing was evicted then.
    """
    if nbytes < 1:
      raise ValueError(f"expected at least 1 byte to reserve, got {nbytes}")
    if key in self._resident or key in self._reserved or key in self._dropped:
      return False
    if self._refused is not None and nbytes >= self._refused:
      # Since then room can only have become less.
      self.repeated_refusals += 1
      return False
    if nbytes > self.free + self._evictable:
      self._refused = nbytes
      self.refusals += 1
      return False
    if nbytes > self.free:
      self._evict(nbytes - self.free)
    self._reserved[key] = nbytes
    self.used += nbytes
    self.peak = max(self.peak, self.used)
    return True

  def fill(self, piece: Piece) -> bool:
    """Ends a reservation with its piece.

    Raises ValueError for a piece without a reservation, or of other bytes than were booked; the
    reservation stays then.

    Returns:
      Whether the piece is resident now. False when a clear or remove came after the reservation.
    """
    key, nbytes = piece.key, piece.nbytes
    booked = self._booked(key)
    if key in self._late:
      self.cancel(key)
      return False
    if nbytes != booked:
      raise ValueError(
        f"expected a piece of {booked} bytes as reserved, got {nbytes} (group {piece.group!r}, "
        f"{piece.count} pages); reserve the bytes of the array that is stored"
      )
    del self._reserved[key]
    self._resident[key] = _Entry(piece, nbytes)
    self._policy.insert(key, nbytes)
    self._evictable += nbytes
    self.stored += 1
    self.stored_bytes += nbytes
    self._room()
    return True

  def cancel(self, key: bytes) -> None:
    """Ends a reservation without a piece. ValueError when there is none."""
    self.used -= self._booked(key)
    del self._reserved[key]
    self._late.discard(key)
    self._room()

  def pending(self, key: bytes) -> bool:
    """Whether a piece is on its way in. Not one that a clear or remove has overtaken."""
    return key in self._reserved and key not in self._late

  # Reading.

  def find(self, key: bytes) -> Piece | None:
    """The resident piece of a name. Changes nothing: it does not count as use."""
    entry = self._resident.get(key)
    return None if entry is None else entry.piece

  def pin(self, key: bytes) -> Piece | None:
    """The resident piece of a name, kept from eviction until it is unpinned as often as pinned."""
    entry = self._resident.get(key)
    if entry is None:
      return None
    if not entry.pins:
      self._evictable -= entry.nbytes
    entry.pins += 1
    self._policy.touch(key)
    return entry.piece

  def unpin(self, key: bytes) -> None:
    """Takes one pin away, from a dropped piece too. ValueError when there is none."""
    entry = self._resident.get(key) or self._dropped.get(key)
    if entry is None or not entry.pins:
      raise ValueError(
        f"expected a pinned piece to unpin, got {_name(key)}; call unpin once for each pin that "
        "gave a piece"
      )
    entry.pins -= 1
    if entry.pins:
      return
    if key in self._dropped:
      del self._dropped[key]
      self.used -= entry.nbytes
    else:
      self._evictable += entry.nbytes
    self._room()

  # Going out.

  def remove(self, key: bytes) -> None:
    """Drops a piece, resident or on its way; nothing happens when there is none.

    It is out of the look-up at once. Its bytes are free at once as well, but for a pinned piece
    with the last unpin, and for a reservation when it ends.
    """
    if key in self._reserved:
      self._late.add(key)
    elif key in self._resident:
      self._policy.remove(key)
      if self._drop(key):
        self._room()

  def clear(self) -> None:
    """Drops every piece as `remove` does; the policy forgets what it has learnt."""
    self._late.update(self._reserved)
    for key in list(self._resident):
      self._drop(key)
    self._policy = policy_lib.policy(self._policy_name, self.capacity)
    self._room()

  # Figures.

  def figures(self) -> dict[str, Any]:
    """JSON-able; sizes in bytes. Groups without a resident piece are left out."""
    groups: dict[str, dict[str, int]] = {}
    for entry in self._resident.values():
      group = groups.setdefault(entry.piece.group, {"resident": 0, "resident_bytes": 0})
      group["resident"] += 1
      group["resident_bytes"] += entry.nbytes
    return {
      "capacity_bytes": self.capacity,
      "used_bytes": self.used,
      "peak_bytes": self.peak,
      "resident": len(self._resident),
      "resident_bytes": sum(group["resident_bytes"] for group in groups.values()),
      "stored": self.stored,
      "stored_bytes": self.stored_bytes,
      "evictions": self.evictions,
      "evicted_bytes": self.evicted_bytes,
      "refusals": self.refusals,
      "repeated_refusals": self.repeated_refusals,
      "groups": groups,
    }

  def check(self) -> None:
    """Counts everything anew; raises AssertionError where the books are wrong."""
    keys = [*self._resident, *self._reserved, *self._dropped]
    assert len(keys) == len(set(keys)), "a key is in two places"
    assert self._late <= set(self._reserved), "a late reservation that is not booked"
    entries = {**self._resident, **self._dropped}
    for key, entry in entries.items():
      assert entry.piece.key == key, "a piece under another name"
      assert entry.piece.nbytes == entry.nbytes, "a piece has other bytes than were booked"
      assert entry.pins >= (key in self._dropped), "a dropped piece that nothing pins"
    used = sum(entry.nbytes for entry in entries.values()) + sum(self._reserved.values())
    assert self.used == used, f"{self.used} bytes booked, {used} counted"
    assert self.used <= self.peak <= self.capacity, "more bytes than the budget or the peak"
    evictable = sum(entry.nbytes for entry in self._resident.values() if not entry.pins)
    assert self._evictable == evictable, f"{self._evictable} bytes evictable, {evictable} counted"
    order = list(self._policy.victims())
    assert len(order) == len(self._resident), "the policy has another number of keys"
    assert set(order) == set(self._resident), "the policy has other keys"

  def _evict(self, nbytes: int) -> None:
    """Takes unpinned pieces out until `nbytes` more are free; there are enough of them."""
    victims = []
    for key in self._policy.victims():
      if nbytes <= 0:
        break
      entry = self._resident[key]
      if not entry.pins:
        victims.append(key)
        nbytes -= entry.nbytes
    assert nbytes <= 0, "the policy does not list every resident key"
    for key in victims:
      self.evictions += 1
      self.evicted_bytes += self._resident[key].nbytes
      self._policy.evict(key)
      self._drop(key)
    self._room()

  def _drop(self, key: bytes) -> bool:
    """Takes a piece out of the look-up; returns whether its bytes are free. Policy apart."""
    entry = self._resident.pop(key)
    if entry.pins:
      self._dropped[key] = entry
      return False
    self._evictable -= entry.nbytes
    self.used -= entry.nbytes
    return True

  def _booked(self, key: bytes) -> int:
    """Bytes of a reservation."""
    booked = self._reserved.get(key)
    if booked is None:
      raise ValueError(
        f"expected a reserved key, got {_name(key)}; reserve it first, and end each reservation "
        "with one fill or cancel"
      )
    return booked

  def _room(self) -> None:
    """Room may have appeared: what was refused may be tried again."""
    self.version += 1
    self._refused = None


def _name(key: bytes) -> str:
  return key.hex()[:16]
