"""The host tier: pieces in host memory, within a budget of bytes that is exact."""

import dataclasses
from typing import Any

from kvjax.offload.piece import Piece
from kvjax.offload.policy import policy as make_policy


@dataclasses.dataclass(slots=True)
class _Entry:
  piece: Piece
  pins: int = 0


class HostTier:
  """Immutable pieces by name. All calls come from one thread.

  Bytes are booked before a piece arrives (`reserve`), and each piece takes exactly its own: there
  is no slot that all groups would have to fit.

  Args:
    capacity: bytes.
    policy: "lru" or "arc".

  Attributes:
    used: bytes of what is resident, reserved, or dropped while somebody still has it pinned.
    version: changes when room may have appeared, so that a refusal need not be tried again before.
  """

  def __init__(self, capacity: int, policy: str = "lru"):
    self.capacity = capacity
    self.used = 0
    self.version = 0
    self._policy = make_policy(policy, capacity)
    self._entries: dict[bytes, _Entry] = {}
    self._reserved: dict[bytes, int] = {}
    self._late: dict[bytes, int] = {}  # reservations that `clear` has cancelled
    self._dropped: dict[bytes, list[_Entry]] = {}  # pinned ones that nobody can find any more
    self._pinned_bytes = 0
    self._refused = (-1, 0)  # (version, bytes) of the last refusal
    self._counts = dict.fromkeys(
      ("stored", "stored_bytes", "evictions", "evicted_bytes", "refusals", "repeated_refusals"), 0
    )
    self._peak = 0

  @property
  def free(self) -> int:
    """Bytes."""
    return self.capacity - self.used

  def reserve(self, key: bytes, nbytes: int) -> bool:
    """Books bytes for a piece, evicting others in the policy's order; pinned ones stay.

    Returns:
      False where that cannot be, or the key is resident or reserved; then nothing was evicted.
    """
    if key in self._entries or key in self._reserved:
      return False
    version, refused = self._refused
    if version == self.version and nbytes >= refused:
      self._counts["repeated_refusals"] += 1
      return False
    if nbytes > self.free + self._evictable:
      self._refused = (self.version, nbytes)
      self._counts["refusals"] += 1
      return False
    if nbytes > self.free:
      lacking, chosen = nbytes - self.free, []
      for victim in self._policy.victims():
        if not self._entries[victim].pins:
          chosen.append(victim)
          lacking -= self._entries[victim].piece.nbytes
          if lacking <= 0:
            break
      for victim in chosen:
        self._policy.evict(victim)
        size = self._entries.pop(victim).piece.nbytes
        self.used -= size
        self._counts["evictions"] += 1
        self._counts["evicted_bytes"] += size
      self.version += 1
    self._reserved[key] = nbytes
    self.used += nbytes
    self._peak = max(self._peak, self.used)
    return True

  def pending(self, key: bytes) -> bool:
    return key in self._reserved

  def fill(self, piece: Piece) -> bool:
    """Turns a reservation into a resident piece.

    Returns:
      False for a reservation made before `clear`: the piece comes too late.

    Raises:
      ValueError: a piece that was not reserved, or of another size.
    """
    if piece.key in self._late and piece.key not in self._reserved:
      del self._late[piece.key]
      return False
    booked = self._reserved.get(piece.key)
    if booked != piece.nbytes:
      raise ValueError(f"expected a reservation of {piece.nbytes} bytes, found {booked}")
    del self._reserved[piece.key]
    self._entries[piece.key] = _Entry(piece)
    self._policy.insert(piece.key, piece.nbytes)
    self._counts["stored"] += 1
    self._counts["stored_bytes"] += piece.nbytes
    return True

  def cancel(self, key: bytes) -> None:
    """Gives a reservation back."""
    self.used -= self._reserved.pop(key, 0)
    self.version += 1

  def find(self, key: bytes) -> Piece | None:
    """Looks up; changes nothing."""
    entry = self._entries.get(key)
    return None if entry is None else entry.piece

  def pin(self, key: bytes) -> Piece | None:
    """Looks up and keeps from eviction, in one step; counts as use. Pins nest."""
    entry = self._entries.get(key)
    if entry is None:
      return None
    if not entry.pins:
      self._pinned_bytes += entry.piece.nbytes
    entry.pins += 1
    self._policy.touch(key)
    return entry.piece

  def unpin(self, key: bytes) -> None:
    dropped = self._dropped.get(key)
    if dropped:
      entry = dropped[0]
      entry.pins -= 1
      if not entry.pins:
        dropped.pop(0)
        if not dropped:
          del self._dropped[key]
        self.used -= entry.piece.nbytes
        self.version += 1
      return
    entry = self._entries[key]
    entry.pins -= 1
    if not entry.pins:
      self._pinned_bytes -= entry.piece.nbytes
      self.version += 1

  def remove(self, key: bytes) -> None:
    """Drops a piece; where it is pinned its bytes come back with the last pin."""
    entry = self._entries.pop(key, None)
    if entry is None:
      return
    self._policy.remove(key)
    if entry.pins:
      self._pinned_bytes -= entry.piece.nbytes
      self._dropped.setdefault(key, []).append(entry)
    else:
      self.used -= entry.piece.nbytes
    self.version += 1

  def clear(self) -> None:
    """Drops every piece and cancels every reservation; what arrives for one is ignored."""
    for key in list(self._entries):
      self.remove(key)
    for key, nbytes in self._reserved.items():
      self._late[key] = nbytes
      self.used -= nbytes
    self._reserved.clear()
    self.version += 1

  def check(self) -> None:
    """Raises AssertionError where the books are wrong."""
    resident = sum(e.piece.nbytes for e in self._entries.values())
    dropped = sum(e.piece.nbytes for entries in self._dropped.values() for e in entries)
    assert self.used == resident + sum(self._reserved.values()) + dropped, "bytes are booked wrong"
    assert self.used <= self.capacity, "more bytes than there are"
    pinned = sum(e.piece.nbytes for e in self._entries.values() if e.pins)
    assert pinned == self._pinned_bytes, "pinned bytes are booked wrong"
    victims = list(self._policy.victims())
    assert sorted(victims) == sorted(self._entries), "the policy and the tier differ"

  def figures(self) -> dict[str, Any]:
    """JSON-able."""
    groups: dict[str, dict[str, int]] = {}
    for entry in self._entries.values():
      each = groups.setdefault(entry.piece.group, {"pieces": 0, "bytes": 0})
      each["pieces"] += 1
      each["bytes"] += entry.piece.nbytes
    return {
      **self._counts,
      "pieces": len(self._entries),
      "bytes": sum(each["bytes"] for each in groups.values()),
      "peak_bytes": self._peak,
      "capacity_bytes": self.capacity,
      "groups": groups,
    }

  @property
  def _evictable(self) -> int:
    """Bytes of resident pieces that nobody has pinned."""
    dropped = sum(e.piece.nbytes for entries in self._dropped.values() for e in entries)
    return self.used - sum(self._reserved.values()) - dropped - self._pinned_bytes
