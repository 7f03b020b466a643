"""Stores: pages on their way from the device to the tiers."""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from kvjax.config import OffloadConfig
from kvjax.offload.piece import Piece
from kvjax.offload.search import piece_key
from kvjax.offload.tiers import Files, Tiers
from kvjax.prefix import Chain

_REMEMBERED = 2**16  # names whose look-ups or refusals are remembered


@dataclasses.dataclass(slots=True)
class Store:
  """Pages to be packed before the next step that is dispatched.

  Attributes:
    group: index; pages: int32 [n] physical pages of the logical pages from `first` on.
    booked: bytes are reserved for it in the host tier.
    packed: once dispatched: [at least n, elements] in host memory or on its way there.
  """

  key: bytes
  group: int
  first: int
  pages: np.ndarray
  generation: int
  booked: bool
  packed: Any = None


class Stores:
  """What is on its way out. All calls come from the engine's thread.

  Attributes:
    queue: stores that no dispatch has taken yet.
  """

  def __init__(self, tiers: Tiers, config: OffloadConfig):
    self.queue: list[Store] = []
    self._tiers = tiers
    self._config = config
    self._storing: dict[bytes, Store] = {}
    self._storing_bytes = 0
    self._writing: dict[Future[Any], int] = {}
    self._writing_bytes = 0
    self._looked: collections.OrderedDict[bytes, Any] = collections.OrderedDict()
    self._refused: collections.OrderedDict[bytes, int] = collections.OrderedDict()

  @property
  def in_flight_bytes(self) -> int:
    return self._storing_bytes + self._writing_bytes

  def offer(
    self,
    group: int,
    chain: Chain,
    tokens: Sequence[int],
    part: range,
    pages: Callable[[], np.ndarray],
    by: object = None,
    urgent: bool = False,
  ) -> None:
    """Stores logical pages of a sequence unless the tiers have them, or refuse.

    Args:
      part: logical pages within one chunk.
      pages: gives their physical pages, int32 [n].
      by: who offers; the second offer of one sequence is no second look-up.
      urgent: not subject to `store_after`: somebody will come back for it.
    """
    host, g = self._tiers.host, self._tiers.layout[group]
    key = piece_key(g, chain, tokens, part.stop)
    if key in self._storing:
      return
    found = self._tiers.in_host(group, key, part.stop)
    if found is not None and host is not None and found.first <= part.start:
      host.pin(key)  # counts as use
      host.unpin(key)
      return
    if found is None:
      on_disk = self._tiers.on_disk(group, key, part.stop)
      if on_disk is not None and on_disk.first <= part.start:
        return
    if not urgent and not self._looked_often(key, by):
      return
    if host is not None and self._refused.get(key) == host.version:
      return  # nothing has changed since
    nbytes = len(part) * g.page_bytes
    if self._storing_bytes + nbytes > self._config.in_flight_bytes and self._storing:
      self._tiers.count(group, "refused")
      return
    booked = False
    if host is not None:
      if found is not None:
        host.remove(key)  # what is there starts too late
      booked = host.reserve(key, nbytes)
      if not booked and self._tiers.disk is None:
        _remember(self._refused, key, host.version)
        self._tiers.count(group, "refused")
        return
    store = Store(key, group, part.start, pages(), self._tiers.generation, booked)
    self._storing[key] = store
    self._storing_bytes += nbytes
    self.queue.append(store)

  def _looked_often(self, key: bytes, by: object) -> bool:
    if not self._config.store_after:
      return True
    seen, last = self._looked.get(key, (0, None))
    if last != by or last is None:
      seen += 1
      _remember(self._looked, key, (seen, by))
    return seen > self._config.store_after

  def take(self) -> list[Store]:
    """The stores that the next dispatch packs, in its first place."""
    stores, self.queue = self.queue, []
    return stores

  def poll(self) -> None:
    """Takes note of what has arrived."""
    for store in list(self._storing.values()):
      if store.packed is not None and _ready(store.packed):
        self._drop(store)
        self._keep(store)
    for future in [f for f in self._writing if f.done()]:
      self._writing_bytes -= self._writing.pop(future)

  def _drop(self, store: Store) -> None:
    del self._storing[store.key]
    self._storing_bytes -= len(store.pages) * self._tiers.layout[store.group].page_bytes

  def _keep(self, store: Store) -> None:
    tiers = self._tiers
    g = tiers.layout[store.group]
    if store.generation != tiers.generation:
      self._cancel(store)
      return
    piece = Piece(store.key, g.name, store.first, _rows(store.packed, len(store.pages)))
    kept = False
    if store.booked and tiers.host is not None:
      kept = tiers.host.fill(piece)
    if tiers.disk is not None and tiers.workers is not None:
      if self._writing_bytes + piece.nbytes <= self._config.in_flight_bytes or not self._writing:
        job = functools.partial(_write, tiers, tiers.disk, piece, tiers.generation)
        future = tiers.workers.submit(job)
        self._writing[future] = piece.nbytes
        self._writing_bytes += piece.nbytes
        kept = True
      else:
        tiers.count(store.group, "refused")
    if kept:
      tiers.version += 1
      tiers.count(store.group, "stored", piece.nbytes)

  def _cancel(self, store: Store) -> None:
    if store.booked and self._tiers.host is not None:
      self._tiers.host.cancel(store.key)

  def reset(self) -> None:
    """Nothing of what is on its way will be kept; what has been dispatched arrives unheard."""
    for store in self.queue:
      self._drop(store)
      self._cancel(store)
    self.queue.clear()
    self._refused.clear()
    self._looked.clear()

  def flush(self, seconds: float) -> bool:
    """Waits until what was stored is written, at most so long."""
    end = time.monotonic() + seconds
    for store in list(self._storing.values()):
      if store.packed is not None:
        np.asarray(store.packed)
    self.poll()
    for future in list(self._writing):
      try:
        future.exception(timeout=max(end - time.monotonic(), 0))
      except TimeoutError:
        self._tiers.counts["dropped"] += len([f for f in self._writing if not f.done()])
        return False
    self.poll()
    return True


def _write(tiers: Tiers, disk: Files, piece: Piece, generation: int) -> bool:
  return generation == tiers.generation and disk.write(piece)


def _remember(table: "collections.OrderedDict[bytes, Any]", key: bytes, value: Any) -> None:
  table[key] = value
  table.move_to_end(key)
  if len(table) > _REMEMBERED:
    table.popitem(last=False)


def _ready(array: Any) -> bool:
  ready = getattr(array, "is_ready", None)
  return True if ready is None else bool(ready())


def _rows(array: Any, count: int) -> Any:
  """The first `count` rows and no more memory than they take."""
  kind = getattr(getattr(array, "sharding", None), "memory_kind", None)
  if kind == "pinned_host" and array.shape[0] == count:
    return array
  rows = np.asarray(array)
  return rows if len(rows) == count else rows[:count].copy()
