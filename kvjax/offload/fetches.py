"""Fetches: pieces on their way from the tiers to sequences that wait for them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from kvjax.config import OffloadConfig
from kvjax.offload.piece import Piece
from kvjax.offload.rates import Rates
from kvjax.offload.search import Found, Reach
from kvjax.offload.tiers import Tiers


@dataclasses.dataclass(slots=True)
class Load:
  """Rows of a piece that are unpacked before a step: rows[i] to physical page pages[i]."""

  group: int
  piece: Piece
  rows: np.ndarray
  pages: np.ndarray


class Fetch:
  """Pieces that a waiting sequence will go on from.

  Attributes:
    pieces: those that are in memory, and where from; those of the host tier are pinned there.
    reading: reads that have not ended.
    lost: pieces that did not come.
    deadline: on the engine's clock.
  """

  def __init__(self, nbytes: int, deadline: float, generation: int):
    self.pieces: dict[bytes, tuple[Piece, str]] = {}
    self.pinned: list[bytes] = []
    self.reading: dict[bytes, Future[Any]] = {}
    self.nbytes = nbytes
    self.lost = 0
    self.deadline = deadline
    self.generation = generation
    self.released = False


class Fetches:
  """What is on its way in. All calls come from the engine's thread.

  Args:
    clock: seconds.
    report: is told when the disk does not answer.
  """

  def __init__(
    self,
    tiers: Tiers,
    config: OffloadConfig,
    rates: Rates,
    clock: Callable[[], float],
    report: Callable[[str], None],
  ):
    self._tiers = tiers
    self._config = config
    self._rates = rates
    self._clock = clock
    self._report = report
    self._reading: dict[bytes, Future[Any]] = {}
    self._fetching: set[Fetch] = set()

  def __len__(self) -> int:
    return len(self._fetching)

  def fetch(self, reach: Reach) -> Fetch | None:
    """Starts to bring the pieces of a reach into memory; None while too much is on its way."""
    nbytes = sum(reach.nbytes(self._tiers.layout).values())
    flying = sum(f.nbytes for f in self._fetching)
    if flying and flying + nbytes > self._config.in_flight_bytes:
      return None
    out = Fetch(nbytes, self._clock() + self._config.deadline_seconds, self._tiers.generation)
    host = self._tiers.host
    for pieces in reach.pieces:
      for found in pieces:
        if found.key in out.pieces or found.key in out.reading:
          continue
        piece = None if host is None else host.pin(found.key)
        if piece is not None:
          out.pieces[found.key] = piece, "host"
          out.pinned.append(found.key)
        elif self._tiers.disk is not None and self._tiers.workers is not None:
          out.reading[found.key] = self._read(found)
    self._fetching.add(out)
    return out

  def _read(self, found: Found) -> "Future[Any]":
    """One read for all who want a piece."""
    disk, workers = self._tiers.disk, self._tiers.workers
    assert disk is not None
    assert workers is not None
    future = self._reading.get(found.key)
    if future is None:
      name = self._tiers.layout[found.group].name
      future = workers.submit(functools.partial(_timed, self._clock, disk.read, found.key, name))
      self._reading[found.key] = future
    return future

  def arrived(self, fetch: Fetch) -> bool:
    """Whether everything that will come has come."""
    if fetch.generation != self._tiers.generation:
      self.release(fetch)
      fetch.pieces.clear()
      return True
    for key, future in list(fetch.reading.items()):
      if future.done():
        self._reading.pop(key, None)
        del fetch.reading[key]
        self._received(fetch, key, future)
    if fetch.reading and self._clock() > fetch.deadline:
      self._give_up(fetch)
    return not fetch.reading

  def _received(self, fetch: Fetch, key: bytes, future: "Future[Any]") -> None:
    piece, seconds = (None, 0.0) if future.exception() else future.result()
    if piece is None:
      self._tiers.counts["lost"] += 1
      fetch.lost += 1
      return
    fetch.pieces[key] = piece, "disk"
    self._rates.add("disk", piece.nbytes / max(seconds, 1e-6))
    host = self._tiers.host  # keeps what came from disk, if there is room
    if host is not None and host.find(key) is None and host.reserve(key, piece.nbytes):
      host.fill(piece)

  def _give_up(self, fetch: Fetch) -> None:
    self._tiers.counts["late"] += len(fetch.reading)
    fetch.lost += len(fetch.reading)
    for key, future in fetch.reading.items():
      self._reading.pop(key, None)
      self._tiers.hanging.add(future)
    fetch.reading.clear()
    self._report(
      f"offload: the disk did not answer within {self._config.deadline_seconds} s; what it holds "
      "is computed again until it does"
    )

  def release(self, fetch: Fetch) -> None:
    """Lets go of a fetch, in any state; reads that are under way end unheard."""
    if fetch.released:
      return
    fetch.released = True
    self._fetching.discard(fetch)
    if self._tiers.host is not None:
      for key in fetch.pinned:
        self._tiers.host.unpin(key)
    fetch.pinned.clear()
    wanted = {key for other in self._fetching for key in other.reading}
    for key in fetch.reading:
      if key not in wanted:
        self._reading.pop(key, None)

  def wait(self, seconds: float) -> bool:
    """Waits for a read or for `seconds`, when there is nothing else to do; False if nothing is on
    its way."""
    reading = [f for fetch in self._fetching for f in fetch.reading.values()]
    if not reading:
      return False
    with contextlib.suppress(TimeoutError):
      reading[0].exception(timeout=seconds)
    return True

  def poll(self) -> None:
    """Takes note of a disk that answers again."""
    if self._tiers.hanging:
      self._tiers.hanging = {f for f in self._tiers.hanging if not f.done()}

  def reset(self) -> None:
    """What is being read now is for nobody who asks later."""
    self._reading.clear()


def _timed(clock: Callable[[], float], read: Any, key: bytes, group: str) -> tuple[Any, float]:
  start = clock()
  return read(key, group), clock() - start
