"""The disk tier: pieces as content-addressed files in a directory that many processes may share.

A file is written under a temporary name, synced and renamed, so that under its own name it is whole
or absent, whenever a process is killed. It is trusted for nothing: a read verifies header and
checksum, and what is wrong is a miss.
"""

import contextlib
import hashlib
import os
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvjax.errors import ConfigError
from kvjax.offload.piece import Piece

_MAGIC = b"kvjaxpc1"
# magic, namespace, key, group, dtype, first page, pages, elements per page, payload bytes
_FIELDS = struct.Struct("<8s32s32s64s32sqqqq")
_SUM = 32  # sha256 over the fields and the payload
HEADER = 512
"""Bytes before the payload."""

_STALE_SECONDS = 3600  # after which a temporary file belongs to nobody
_KEEP = 0.95  # of the capacity, after an eviction


class _Bad(Exception):
  """A file that cannot be used; the text is the kind of fault."""


class DiskTier:
  """Pieces of one namespace in a directory; its methods may be called from several threads.

  Args:
    directory: made if it is not there.
    capacity: bytes of all files in it, of every namespace and process; None for no bound. The least
      recently used leave first.
    namespace: 32 bytes; pieces of other namespaces are never found.
    report: is told once of each kind of trouble.

  Raises:
    ConfigError: the directory cannot be written.
  """

  def __init__(
    self,
    directory: str,
    capacity: int | None,
    namespace: bytes,
    report: Callable[[str], None],
  ):
    self._root = Path(directory).expanduser()
    self._home = self._root / namespace[:16].hex()
    self._namespace = namespace
    self._capacity = capacity
    self._report = report
    self._lock = threading.Lock()
    self._evicting = threading.Lock()
    self._told: set[str] = set()
    self.failures: dict[str, int] = {}
    self._counts: dict[str, float] = dict.fromkeys(
      ("stores", "loads", "bytes_written", "bytes_read", "evictions", "refusals"), 0
    )
    self._seconds = {"seconds_writing": 0.0, "seconds_reading": 0.0}
    self._try_out()
    self._total = sum(size for _, size, _ in self._files())

  def _try_out(self) -> None:
    probe = self._home / f"probe.{uuid.uuid4().hex}.tmp"
    try:
      self._home.mkdir(parents=True, exist_ok=True)
      _write_synced(probe, [b"kvjax"])
      os.replace(probe, probe.with_suffix(".probe"))
      if probe.with_suffix(".probe").read_bytes() != b"kvjax":
        raise OSError("what was written is not what is read")
      probe.with_suffix(".probe").unlink()
    except OSError as error:
      raise ConfigError(
        f"config.offload.disk_path: expected a directory that can be written, got {self._root}: "
        f"{error}"
      ) from error
    now = time.time()
    for path in self._root.rglob("*.tmp"):
      with contextlib.suppress(OSError):
        if now - path.stat().st_mtime > _STALE_SECONDS:
          path.unlink()

  def _path(self, key: bytes) -> Path:
    name = key.hex()
    return self._home / name[:2] / f"{name}.kv"

  def size(self, key: bytes) -> int | None:
    """Payload bytes of a piece; None where there is no file for it. Never raises."""
    try:
      size = os.stat(self._path(key)).st_size
    except OSError:
      return None
    return size - HEADER if size > HEADER else None

  def write(self, piece: Piece) -> bool:
    """Stores a piece; True when it is there, False when it could not be written."""
    start = time.perf_counter()
    path, array = self._path(piece.key), np.ascontiguousarray(np.asarray(piece.array))
    if path.exists():
      return True
    total = HEADER + array.nbytes
    if self._capacity is not None and total > self._capacity:
      return self._refused("too large", piece, "more than the whole capacity")
    payload = array.reshape(-1).view(np.uint8)
    fields = _FIELDS.pack(
      _MAGIC,
      self._namespace,
      piece.key,
      _name(piece.group, 64),
      _name(array.dtype.name, 32),
      piece.first,
      *array.shape,
      array.nbytes,
    )
    checksum = hashlib.sha256(fields)
    checksum.update(payload)
    header = (fields + checksum.digest()).ljust(HEADER, b"\0")
    temporary = path.with_name(f"{piece.key.hex()}.{uuid.uuid4().hex}.tmp")
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      _write_synced(temporary, [header, payload])
      os.replace(temporary, path)
      _sync_directory(path.parent)
    except OSError as error:
      with contextlib.suppress(OSError):
        temporary.unlink()
      return self._refused("unwritable", piece, str(error))
    with self._lock:
      self._counts["stores"] += 1
      self._counts["bytes_written"] += total
      self._seconds["seconds_writing"] += time.perf_counter() - start
      self._total += total
      full = self._capacity is not None and self._total > self._capacity
    if full:
      self._evict(path)
    return True

  def read(self, key: bytes, group: str) -> Piece | None:
    """The piece of a name, verified: its array is [pages, elements], read-only. None for a miss,
    which is everything else."""
    start, path = time.perf_counter(), self._path(key)
    try:
      piece = self._verified(path, key, group)
      os.utime(path)  # the least recently used leave first, whoever used them
    except FileNotFoundError:
      return None
    except (_Bad, OSError) as error:
      kind = str(error) if isinstance(error, _Bad) else "unreadable"
      self._failed(kind, path)
      return None
    with self._lock:
      self._counts["loads"] += 1
      self._counts["bytes_read"] += HEADER + piece.nbytes
      self._seconds["seconds_reading"] += time.perf_counter() - start
    return piece

  def _verified(self, path: Path, key: bytes, group: str) -> Piece:
    data = path.read_bytes()
    if len(data) < HEADER:
      raise _Bad("short")
    fields = data[: _FIELDS.size]
    magic, namespace, named, name, kind, first, pages, elements, nbytes = _FIELDS.unpack(fields)
    if magic != _MAGIC:
      raise _Bad("foreign")
    if len(data) - HEADER != nbytes:
      raise _Bad("short" if len(data) - HEADER < nbytes else "long")
    payload = memoryview(data)[HEADER:]
    checksum = hashlib.sha256(fields)
    checksum.update(payload)
    if checksum.digest() != data[_FIELDS.size : _FIELDS.size + _SUM]:
      raise _Bad("checksum")
    if (namespace, named, name) != (self._namespace, key, _name(group, 64)):
      raise _Bad("foreign")
    try:
      array = np.frombuffer(payload, _dtype(kind)).reshape(pages, elements)
    except (TypeError, ValueError) as error:
      raise _Bad("foreign") from error
    return Piece(key, group, first, array)

  def remove(self, key: bytes) -> None:
    with contextlib.suppress(OSError):
      self._path(key).unlink()

  def clear(self) -> None:
    """Removes every piece of this namespace, whoever wrote it."""
    for path, size, _ in list(self._files(self._home)):
      with contextlib.suppress(OSError):
        path.unlink()
        with self._lock:
          self._total -= size

  def figures(self) -> dict[str, Any]:
    """JSON-able."""
    with self._lock:
      return {
        **self._counts,
        **self._seconds,
        "failures": dict(self.failures),
        "bytes": self._total,
        "capacity_bytes": self._capacity,
      }

  def _refused(self, kind: str, piece: Piece, why: str) -> bool:
    with self._lock:
      self._counts["refusals"] += 1
    self._tell(
      kind,
      f"offload: cannot write chunks of group {piece.group} to {self._root} ({why}); they are "
      "computed again when they are needed. Make room or change config.offload.disk_path",
    )
    return False

  def _failed(self, kind: str, path: Path) -> None:
    with self._lock:
      self.failures[kind] = self.failures.get(kind, 0) + 1
    with contextlib.suppress(OSError):
      path.unlink()
    self._tell(
      kind,
      f"offload: {path}: {kind} file, dropped; what it held is computed again. If this repeats, "
      "check the disk",
    )

  def _tell(self, kind: str, text: str) -> None:
    with self._lock:
      if kind in self._told:
        return
      self._told.add(kind)
    self._report(text)

  def _files(self, under: Path | None = None) -> Iterator[tuple[Path, int, float]]:
    """(path, bytes, time of last use) of every piece."""
    for path in (under or self._root).rglob("*.kv"):
      with contextlib.suppress(OSError):
        found = path.stat()
        yield path, found.st_size, found.st_mtime

  def _evict(self, newest: Path) -> None:
    """Removes the least recently used files until there is room, as other processes may, too."""
    assert self._capacity is not None
    with self._evicting:
      files = sorted(self._files(), key=lambda file: file[2])
      total = sum(size for _, size, _ in files)
      for path, size, _ in files:
        if total <= _KEEP * self._capacity:
          break
        if path == newest:
          continue
        with contextlib.suppress(OSError):
          path.unlink()
          with self._lock:
            self._counts["evictions"] += 1
        total -= size
      with self._lock:
        self._total = total


def _write_synced(path: Path, parts: list[Any]) -> None:
  file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
  try:
    for part in parts:
      view = memoryview(part).cast("B")
      while view:
        view = view[os.write(file, view) :]
    os.fsync(file)
  finally:
    os.close(file)


def _sync_directory(path: Path) -> None:
  file = os.open(path, os.O_RDONLY)
  try:
    os.fsync(file)
  finally:
    os.close(file)


def _name(text: str, width: int) -> bytes:
  """A name in a field of fixed width; what does not fit is hashed."""
  data = text.encode()
  if len(data) > width:
    data = hashlib.sha256(data).hexdigest().encode()[:width]
  return data.ljust(width, b"\0")


def _dtype(field: bytes) -> np.dtype[Any]:
  name = field.rstrip(b"\0").decode("ascii")
  return np.dtype(getattr(ml_dtypes, name, name))
