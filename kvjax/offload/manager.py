"""Offload: which pieces go to the tiers, which come back, and what is on its way.

Order between copies and steps needs no locks. A store is a gather from the pools that is dispatched
after the step that wrote the pages and before any step that may write them again, into memory of
its own; a load is a scatter into the pools that is dispatched when its bytes are in host memory,
before the step that reads them. The device runs what it is given in order. What blocks, files, is
done by worker threads; a sequence that waits for them holds no slot and no page.

A tier can fail, an answer cannot be wrong: a piece that is lost, damaged or late is a miss, and
what it held is computed again.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from kvjax.config import OffloadConfig
from kvjax.geometry import Layout
from kvjax.offload.host import HostTier
from kvjax.offload.piece import Piece, piece_key
from kvjax.offload.search import Found, Reach
from kvjax.prefix import Chain

_REMEMBERED = 2**16  # names whose look-ups or refusals are remembered
_WARN_AFTER = 64  # searches that found nothing, before a group is named for it


class Files(Protocol):
  """What Offload asks of a disk tier, see `kvjax.offload.disk.DiskTier`."""

  def size(self, key: bytes) -> int | None: ...
  def read(self, key: bytes, group: str) -> Piece | None: ...
  def write(self, piece: Piece) -> bool: ...
  def clear(self) -> None: ...
  def figures(self) -> dict[str, Any]: ...


class Jobs(Protocol):
  """What Offload asks of its workers, see `kvjax.offload.workers.Workers`."""

  def submit(self, job: Callable[[], Any]) -> "Future[Any]": ...
  def close(self) -> None: ...


@dataclasses.dataclass(slots=True)
class Store:
  """Pages to be packed before the next step that is dispatched.

  Attributes:
    group: index; pages: int32 [n] physical pages of the logical pages from `first` on.
    packed: once dispatched: [at least n, elements] in host memory or on its way there.
  """

  key: bytes
  group: int
  first: int
  pages: np.ndarray
  generation: int
  packed: Any = None


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
    pieces: those that are in memory; those of the host tier are pinned there.
    deadline: on Offload's clock.
  """

  def __init__(self, deadline: float, generation: int):
    self.pieces: dict[bytes, tuple[Piece, str]] = {}
    self.pinned: list[bytes] = []
    self.reading: dict[bytes, Future[Any]] = {}
    self.nbytes = 0
    self.lost = 0
    self.deadline = deadline
    self.generation = generation
    self.released = False


@dataclasses.dataclass(slots=True)
class Rates:
  """Measured, for the choice between taking back and computing; None before the first sample."""

  host: float | None = None  # bytes/s from host memory into the pools
  disk: float | None = None  # bytes/s from files into host memory
  prefill: float | None = None  # tokens/s

  def add(self, name: str, value: float) -> None:
    """A sample: the mean moves a fifth of the way to it."""
    old = getattr(self, name)
    setattr(self, name, value if old is None else 0.8 * old + 0.2 * value)


class Offload:
  """The tiers of one engine. All calls come from the engine's thread.

  Args:
    layout: with every group's `blocks_per_chunk`.
    config: what is declared.
    host, disk: the tiers; None for one that is not there.
    workers: run what may block.
    clock: seconds.
    report: is told once of each kind of trouble.

  Attributes:
    queue: stores that no dispatch has taken yet.
    rates: see `worth`.
    version: changes when a search may find more than before.
  """

  def __init__(
    self,
    layout: Layout,
    config: OffloadConfig,
    host: HostTier | None,
    disk: Files | None,
    workers: Jobs | None,
    clock: Callable[[], float],
    report: Callable[[str], None],
  ):
    self.layout = layout
    self.host = host
    self.disk = disk
    self.rates = Rates()
    self.queue: list[Store] = []
    self.version = 0
    self.generation = 0
    self._config = config
    self._workers = workers
    self._clock = clock
    self._report = report
    self._storing: dict[bytes, Store] = {}
    self._storing_bytes = 0
    self._writing: dict[Future[Any], int] = {}
    self._writing_bytes = 0
    self._reading: dict[bytes, Future[Any]] = {}
    self._fetching: set[Fetch] = set()
    self._late: set[Future[Any]] = set()  # reads that missed their deadline and still hang
    self._looked: collections.OrderedDict[bytes, Any] = collections.OrderedDict()
    self._refused: collections.OrderedDict[bytes, int] = collections.OrderedDict()
    self._vetoes = [0] * len(layout)
    self._searches = self._reached = 0
    self._warned = False
    self.counts: dict[str, int] = dict.fromkeys(
      ("stored", "stored_bytes", "loaded", "loaded_bytes", "refused", "lost", "late", "dropped"), 0
    )
    self.by_group = [
      dict.fromkeys(("stored", "stored_bytes", "loaded", "loaded_bytes", "refused"), 0)
      for _ in layout
    ]

  # Stores.

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
    g = self.layout[group]
    key = piece_key(g, chain, tokens, part.stop)
    if key in self._storing:
      return
    found = self._in_host(group, key, part.stop)
    if found is not None and found.first <= part.start:
      if self.host is not None:
        self.host.pin(key)  # counts as use
        self.host.unpin(key)
      return
    if found is None and self._on_disk(group, key, part.stop, part.start):
      return
    if not urgent and self._config.store_after:
      seen, last = self._looked.get(key, (0, None))
      if last != by or last is None:
        seen += 1
        self._remember(self._looked, key, (seen, by))
      if seen <= self._config.store_after:
        return
    if self.host is not None and self._refused.get(key) == self.host.version:
      return  # nothing has changed since
    nbytes = len(part) * g.page_bytes
    if self._storing_bytes + nbytes > self._config.in_flight_bytes and self._storing:
      self._refuse(group)
      return
    if self.host is not None:
      if found is not None:
        self.host.remove(key)  # what is there starts too late
      if not self.host.reserve(key, nbytes) and self.disk is None:
        self._remember(self._refused, key, self.host.version)
        self._refuse(group)
        return
    store = Store(key, group, part.start, pages(), self.generation)
    self._storing[key] = store
    self._storing_bytes += nbytes
    self.queue.append(store)

  def _refuse(self, group: int) -> None:
    self.counts["refused"] += 1
    self.by_group[group]["refused"] += 1

  @staticmethod
  def _remember(table: "collections.OrderedDict[bytes, Any]", key: bytes, value: Any) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > _REMEMBERED:
      table.popitem(last=False)

  def take(self) -> list[Store]:
    """The stores that the next dispatch packs, in its first place."""
    stores, self.queue = self.queue, []
    return stores

  def poll(self) -> None:
    """Takes note of what has arrived."""
    for key, store in list(self._storing.items()):
      if store.packed is None or not _ready(store.packed):
        continue
      del self._storing[key]
      nbytes = len(store.pages) * self.layout[store.group].page_bytes
      self._storing_bytes -= nbytes
      if store.generation == self.generation:
        self._keep(store)
    for future in [f for f in self._writing if f.done()]:
      self._writing_bytes -= self._writing.pop(future)
    self._late = {f for f in self._late if not f.done()}

  def _keep(self, store: Store) -> None:
    g = self.layout[store.group]
    piece = Piece(store.key, g.name, store.first, _rows(store.packed, len(store.pages)))
    kept = False
    if self.host is not None and self.host.pending(store.key):
      kept = self.host.fill(piece)
    if self.disk is not None and self._workers is not None:
      if self._writing_bytes + piece.nbytes <= self._config.in_flight_bytes or not self._writing:
        future = self._workers.submit(
          functools.partial(self._write, self.disk, piece, self.generation)
        )
        self._writing[future] = piece.nbytes
        self._writing_bytes += piece.nbytes
        kept = True
      else:
        self._refuse(store.group)
    if kept:
      self.version += 1
      self.counts["stored"] += 1
      self.counts["stored_bytes"] += piece.nbytes
      self.by_group[store.group]["stored"] += 1
      self.by_group[store.group]["stored_bytes"] += piece.nbytes

  def _write(self, disk: Files, piece: Piece, generation: int) -> bool:
    return generation == self.generation and disk.write(piece)

  # Look-ups.

  def probe(self, group: int, key: bytes, stop: int) -> Found | None:
    """The piece of a name, wherever it is. Allocates nothing, changes nothing."""
    return self._in_host(group, key, stop) or self._on_disk(group, key, stop)

  def _in_host(self, group: int, key: bytes, stop: int) -> Found | None:
    piece = None if self.host is None else self.host.find(key)
    return None if piece is None else Found(key, group, piece.first, stop, "host")

  def _on_disk(self, group: int, key: bytes, stop: int, first: int | None = None) -> Found | None:
    if self.disk is None or self._late:  # a disk that hangs is left alone until it answers
      return None
    size = self.disk.size(key)
    if size is None:
      return None
    found = Found(key, group, stop - size // self.layout[group].page_bytes, stop, "disk")
    return found if first is None or found.first <= first else None

  def searched(self, reach: Reach | None, veto: int | None) -> None:
    """Counts a search, and says once when pieces are stored and a group makes all of them miss."""
    self._searches += 1
    self._reached += reach is not None
    if veto is not None:
      self._vetoes[veto] += 1
    if self._warned or self._reached or self._searches < _WARN_AFTER or not self.counts["stored"]:
      return
    most = max(range(len(self._vetoes)), key=self._vetoes.__getitem__)
    if self._vetoes[most] * 2 > self._searches:
      self._warned = True
      g = self.layout[most]
      self._report(
        f"offload: {self.counts['stored']} chunks were stored and none was ever used: in "
        f"{self._vetoes[most]} of {self._searches} look-ups group {g.name} ({g.page_size} tokens "
        f"per page, {g.blocks_per_chunk} pages per chunk, keeps {g.retention}) lacked what the "
        "others had. Give that group smaller chunks (config.offload.blocks_per_chunk)"
      )

  def worth(self, tokens: int, reach: Reach) -> bool:
    """Whether taking back is faster than computing `tokens` tokens, as far as rates are known."""
    if self._config.restore != "auto":
      return self._config.restore == "always"
    if self.rates.prefill is None:
      return True
    seconds = 0.0
    for source, nbytes in self._bytes(reach).items():
      if self.rates.host is not None:
        seconds += nbytes / self.rates.host
      if source == "disk" and self.rates.disk is not None:
        seconds += nbytes / self.rates.disk
    return seconds < tokens / self.rates.prefill

  @property
  def restores(self) -> bool:
    return self._config.restore != "never"

  def _bytes(self, reach: Reach) -> dict[str, int]:
    out = {"host": 0, "disk": 0}
    for g, pieces in zip(self.layout, reach.pieces, strict=True):
      for found in pieces:  # one for each page
        out[found.source] += g.page_bytes
    return out

  # Fetches.

  def fetch(self, reach: Reach) -> Fetch | None:
    """Starts to bring the pieces of a reach into memory; None while too much is on its way."""
    nbytes = sum(self._bytes(reach).values())
    flying = sum(f.nbytes for f in self._fetching)
    if flying and flying + nbytes > self._config.in_flight_bytes:
      return None
    out = Fetch(self._clock() + self._config.deadline_seconds, self.generation)
    out.nbytes = nbytes
    for pieces in reach.pieces:
      for found in pieces:
        if found.key in out.pieces or found.key in out.reading:
          continue
        piece = None if self.host is None else self.host.pin(found.key)
        if piece is not None:
          out.pieces[found.key] = piece, "host"
          out.pinned.append(found.key)
        elif self.disk is not None and self._workers is not None:
          out.reading[found.key] = self._read(found)
    self._fetching.add(out)
    return out

  def _read(self, found: Found) -> "Future[Any]":
    """One read for all who want a piece."""
    assert self.disk is not None
    assert self._workers is not None
    future = self._reading.get(found.key)
    if future is None:
      name = self.layout[found.group].name
      future = self._workers.submit(
        functools.partial(_timed, self._clock, self.disk.read, found.key, name)
      )
      self._reading[found.key] = future
    return future

  def arrived(self, fetch: Fetch) -> bool:
    """Whether everything that will come has come."""
    if fetch.generation != self.generation:
      self.release(fetch)
      fetch.pieces.clear()
      return True
    for key, future in list(fetch.reading.items()):
      if future.done():
        self._reading.pop(key, None)
        del fetch.reading[key]
        piece, seconds = (None, 0.0) if future.exception() else future.result()
        if piece is None:
          self.counts["lost"] += 1
          fetch.lost += 1
        else:
          fetch.pieces[key] = piece, "disk"
          self.rates.add("disk", piece.nbytes / max(seconds, 1e-6))
          self._promote(piece)
    if fetch.reading and self._clock() > fetch.deadline:
      self.counts["late"] += len(fetch.reading)
      fetch.lost += len(fetch.reading)
      for key, future in fetch.reading.items():
        self._reading.pop(key, None)
        self._late.add(future)
      fetch.reading.clear()
      self._report(
        f"offload: the disk did not answer within {self._config.deadline_seconds} s; what it holds "
        "is computed again until it does"
      )
    return not fetch.reading

  def _promote(self, piece: Piece) -> None:
    """What came from disk is kept in host memory if there is room."""
    if (
      self.host is not None
      and self.host.find(piece.key) is None
      and self.host.reserve(piece.key, piece.nbytes)
    ):
      self.host.fill(piece)

  def release(self, fetch: Fetch) -> None:
    """Lets go of a fetch, in any state; reads that are under way end unheard."""
    if fetch.released:
      return
    fetch.released = True
    self._fetching.discard(fetch)
    if self.host is not None:
      for key in fetch.pinned:
        self.host.unpin(key)
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

  def loaded(self, loads: Sequence[Load]) -> None:
    """Counts what a step brings back."""
    for load in loads:
      nbytes = len(load.rows) * self.layout[load.group].page_bytes
      self.counts["loaded"] += 1
      self.counts["loaded_bytes"] += nbytes
      self.by_group[load.group]["loaded"] += 1
      self.by_group[load.group]["loaded_bytes"] += nbytes

  # The whole.

  def reset(self) -> None:
    """Forgets everything; what is on its way arrives unheard."""
    self.generation += 1
    self.version += 1
    for store in self.queue:
      self._storing.pop(store.key, None)
      self._storing_bytes -= len(store.pages) * self.layout[store.group].page_bytes
    self.queue.clear()
    self._refused.clear()
    self._looked.clear()
    self._reading.clear()
    if self.host is not None:
      self.host.clear()
    if self.disk is not None:
      self.disk.clear()

  def flush(self, seconds: float) -> bool:
    """Waits until what was stored is written, at most so long."""
    end = self._clock() + seconds
    for store in list(self._storing.values()):
      if store.packed is not None:
        np.asarray(store.packed)
    self.poll()
    for future in list(self._writing):
      try:
        future.exception(timeout=max(end - self._clock(), 0))
      except TimeoutError:
        self.counts["dropped"] += len(self._writing)
        return False
    self.poll()
    return True

  def close(self) -> None:
    if self._workers is not None:
      self._workers.close()

  def figures(self) -> dict[str, Any]:
    """JSON-able."""
    return {
      **self.counts,
      "in_flight_bytes": self._storing_bytes + self._writing_bytes,
      "searches": self._searches,
      "searches_that_reached_farther": self._reached,
      "rates": {
        "host_bytes_per_second": self.rates.host,
        "disk_bytes_per_second": self.rates.disk,
        "prefill_tokens_per_second": self.rates.prefill,
      },
      "rule": f"{self._config.restore}: taken back where bytes / rates < tokens / prefill rate",
      "groups": {
        g.name: {
          **counts,
          "blocks_per_chunk": g.blocks_per_chunk,
          "chunk_tokens": g.chunk_tokens,
          "chunk_bytes": g.chunk_bytes,
          "vetoes": vetoes,
        }
        for g, counts, vetoes in zip(self.layout, self.by_group, self._vetoes, strict=True)
        if g.reusable
      },
      "host": None if self.host is None else self.host.figures(),
      "disk": None if self.disk is None else self.disk.figures(),
    }


def _timed(clock: Callable[[], float], read: Any, key: bytes, group: str) -> tuple[Any, float]:
  start = clock()
  return read(key, group), clock() - start


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
