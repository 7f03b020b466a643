"""The tiers of one engine: where a piece is, and what is counted of them."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from kvjax.geometry import Layout
from kvjax.offload.host import HostTier
from kvjax.offload.piece import Piece
from kvjax.offload.search import Found

_COUNTED = ("stored", "stored_bytes", "loaded", "loaded_bytes", "refused")


class Files(Protocol):
  """What is asked of a disk tier, see `kvjax.offload.disk.DiskTier`."""

  def size(self, key: bytes) -> int | None: ...
  def read(self, key: bytes, group: str) -> Piece | None: ...
  def write(self, piece: Piece) -> bool: ...
  def clear(self) -> None: ...
  def figures(self) -> dict[str, Any]: ...


class Jobs(Protocol):
  """What is asked of workers, see `kvjax.offload.workers.Workers`."""

  def submit(self, job: Callable[[], Any]) -> "Future[Any]": ...
  def close(self) -> None: ...


class Tiers:
  """Look-ups in host memory and on disk.

  Args:
    layout: with every group's `blocks_per_chunk`.
    host, disk: None for one that is not there.
    workers: run what may block; None without a disk.

  Attributes:
    version: changes when a search may find more than before.
    generation: changes with each reset; what began in an earlier one is not kept.
    hanging: jobs of the disk that missed their deadline and have not ended yet.
    counts, by_group: what went to the tiers and came back.
  """

  def __init__(
    self, layout: Layout, host: HostTier | None, disk: Files | None, workers: Jobs | None
  ):
    self.layout = layout
    self.host = host
    self.disk = disk
    self.workers = workers
    self.version = 0
    self.generation = 0
    self.hanging: set[Future[Any]] = set()
    self.counts: dict[str, int] = dict.fromkeys((*_COUNTED, "lost", "late", "dropped"), 0)
    self.by_group: list[dict[str, int]] = [dict.fromkeys(_COUNTED, 0) for _ in layout]

  def probe(self, group: int, key: bytes, stop: int) -> Found | None:
    """The piece of a name, wherever it is. Allocates nothing, changes nothing."""
    return self.in_host(group, key, stop) or self.on_disk(group, key, stop)

  def in_host(self, group: int, key: bytes, stop: int) -> Found | None:
    piece = None if self.host is None else self.host.find(key)
    return None if piece is None else Found(key, group, piece.first, stop, "host")

  def on_disk(self, group: int, key: bytes, stop: int) -> Found | None:
    if self.disk is None or self.hanging:  # a disk that hangs is left alone until it answers
      return None
    size = self.disk.size(key)
    if size is None:
      return None
    return Found(key, group, stop - size // self.layout[group].page_bytes, stop, "disk")

  def count(self, group: int, what: str, nbytes: int | None = None) -> None:
    """Counts something "stored" or "loaded", with its bytes, or "refused"."""
    for counts in (self.counts, self.by_group[group]):
      counts[what] += 1
      if nbytes is not None:
        counts[f"{what}_bytes"] += nbytes
