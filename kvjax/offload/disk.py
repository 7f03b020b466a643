"""The disk tier: pieces as content-addressed files in a directory that many processes may share.

A piece lies in DIR/<hex of the namespace's first 16 bytes>/<first 2 hex of its key>/<key hex>.kv.
It is written under a temporary name, synced and renamed, so that under its own name there is only
ever a whole file, whenever a process is killed. Readers trust nothing all the same: a file with
anything wrong is a miss.

Processes agree through the file system alone, without locks: a name stands for one content, a hit
renews the file's modification time, and whoever finds the directory too large deletes the files
that were used least recently. That a file vanishes is normal.

Only files whose place and name have this form are counted or deleted; others are left alone.
"""

import contextlib
import errno
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvjax.errors import ConfigError
from kvjax.offload import files
from kvjax.offload.files import HEADER_BYTES
from kvjax.offload.piece import Piece

_NAMESPACE = re.compile("[0-9a-f]{32}")
_FOLDER = re.compile("[0-9a-f]{2}")
_PIECE = re.compile(r"[0-9a-f]{64}\.kv")
_TEMPORARY = re.compile(r"\.([0-9a-f]{64}|probe)\.[0-9a-f]{16}\.tmp")
_LEFTOVER_SECONDS = 3600  # since the last write to a temporary file: its writer is gone

_ADVICE = {
  "checksum": "Check the disk if there are more",
  "short": "Check the disk if there are more",
  "long": "Keep other programs from writing into this directory",
  "foreign": "Keep other files out of this directory",
  "version": "Give each version of kvjax a directory of its own",
  "unreadable": "Check the permissions in this directory, and the disk",
  "unwritable": "Check the permissions in this directory, and the disk",
  "undeletable": "Check the permissions in this directory",
  "full": "Free some space, or lower the capacity",
  "large": "Raise the capacity, or make the pieces smaller",
}


class DiskTier:
  """Keeps pieces in files. Every method may be called from several threads at once.

  Args:
    directory: where; created when it does not exist.
    capacity: bytes that the files of all namespaces may take together, headers included; None for
      no limit. Processes that share the directory should declare the same. While they write they
      may exceed it by a twentieth each, or by the piece that each has just written.
    namespace: names all that must be equal besides the key (32 bytes): model revision, dtypes,
      geometry, order of bytes.
    report: is told in one sentence of the first failure of each kind, by the thread that met it.

  Attributes:
    stores, loads: files written and read.
    refusals: writes that returned False.
    evictions: files that this object deleted to keep the capacity.
    failures: by kind. Of files that were read: "checksum", "short", "long", "foreign", "version",
      "unreadable"; of writes: "large" (than the capacity), "full" (the disk), "unwritable"; of
      evictions: "undeletable".

  Raises ConfigError when files there cannot be written, synced, renamed, read and deleted.
  """

  def __init__(
    self, directory: str, capacity: int | None, namespace: bytes, report: Callable[[str], None]
  ):
    if len(namespace) != 32:
      raise ValueError(f"namespace: expected 32 bytes, got {len(namespace)}")
    self.capacity = capacity
    self.namespace = namespace
    self.stores = self.loads = self.evictions = self.refusals = 0
    self.bytes_written = self.bytes_read = 0
    self.seconds_writing = self.seconds_reading = 0.0
    self.failures: dict[str, int] = {}
    self._report = report
    self._lock = threading.Lock()  # guards the counters; nothing slow happens under it
    self._evicting = threading.Lock()  # one scan at a time
    try:
      os.makedirs(directory, exist_ok=True)
      self.directory = os.path.abspath(directory)
      self._own = os.path.join(self.directory, namespace[:16].hex())
      os.makedirs(self._own, exist_ok=True)
      files.probe(self._own)
    except OSError as error:
      raise ConfigError(
        "config.offload.disk_path: expected a directory in which files can be written, synced, "
        f"renamed, read and deleted, got {directory!r}: {error.strerror or error}. Choose a "
        "directory on a disk with some space, for which this user has permission"
      ) from error
    # The directory's bytes: found by the last scan, and written by this process since it began.
    pieces, temporary = self._scan()
    self._found = temporary + sum(size for _, size, _ in pieces)
    self._since = 0

  def size(self, key: bytes) -> int | None:
    """Bytes of a piece's payload, None when it is not there. One look at the directory."""
    try:
      found = os.stat(self._path(key))
    except OSError:
      return None
    if not stat.S_ISREG(found.st_mode) or found.st_size < HEADER_BYTES:
      return None
    return found.st_size - HEADER_BYTES

  def write(self, piece: Piece) -> bool:
    """Stores a piece; deletes others when there is more than the capacity then.

    Returns:
      Whether it is there now. False when it is larger than the capacity or cannot be written:
      the reason is counted, and nothing is left of it.

    Raises ValueError for a piece that no file can hold (`files.encode`).
    """
    began = time.perf_counter()
    try:
      return self._write(piece)
    finally:
      with self._lock:
        self.seconds_writing += time.perf_counter() - began

  def _write(self, piece: Piece) -> bool:
    path = self._path(piece.key)
    size = HEADER_BYTES + piece.nbytes
    if self.capacity is not None and size > self.capacity:
      what = f"expected pieces of at most the capacity, {self.capacity} bytes, got {size}"
      return self._refuse("large", f"{path}: {what}")
    if self.size(piece.key) == piece.nbytes:  # a damaged one leaves when it is read
      files.renew(path)
      return True
    header, payload = files.encode(piece, self.namespace)
    try:
      files.place(path, header, payload)
    except OSError as error:
      kind = "full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "unwritable"
      what = f"cannot be written: {error.strerror or error}. What is stored is still served"
      return self._refuse(kind, f"{path}: {what}")
    with self._lock:
      self.stores += 1
      self.bytes_written += size
      self._since += size
    self._make_room(path)
    return True

  def read(self, key: bytes, group: str) -> Piece | None:
    """The piece of a key, exactly as it was written; its array cannot be written to.

    Returns None when it is not there, or when anything about the file is wrong: then that is
    counted in `failures` and the file deleted. A hit makes the file the one used last.
    """
    began = time.perf_counter()
    path = self._path(key)
    piece = None
    try:
      piece = files.load(path, self.namespace, key, group)
    except files.BadFile as bad:
      self._discard(path, bad.kind, str(bad))
    except (OSError, MemoryError) as error:
      number = getattr(error, "errno", errno.ENOMEM)
      if number not in (errno.ENOENT, errno.ESTALE):  # it vanished: some process deleted it
        # That this process has run out of something says nothing about the file.
        keep = number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
        what = getattr(error, "strerror", None) or error
        self._discard(path, "unreadable", f"cannot be read: {what}", keep)
    with self._lock:
      self.seconds_reading += time.perf_counter() - began
      if piece is not None:
        self.loads += 1
        self.bytes_read += HEADER_BYTES + piece.nbytes
    return piece

  def remove(self, key: bytes) -> None:
    """Deletes a piece, if it is there and can be deleted."""
    with contextlib.suppress(OSError):
      self._unlink(self._path(key))

  def clear(self) -> None:
    """Deletes all pieces of this namespace that can be deleted."""
    for entry in _files(self._own):
      if _PIECE.fullmatch(entry.name):
        with contextlib.suppress(OSError):
          self._unlink(entry.path)

  def figures(self) -> dict[str, Any]:
    """JSON-able; bytes with headers, times in seconds, summed over threads."""
    with self._lock:
      return {
        "stores": self.stores,
        "loads": self.loads,
        "bytes_written": self.bytes_written,
        "bytes_read": self.bytes_read,
        "seconds_writing": self.seconds_writing,
        "seconds_reading": self.seconds_reading,
        "evictions": self.evictions,
        "refusals": self.refusals,
        "failures": dict(self.failures),
      }

  def _path(self, key: bytes) -> str:
    name = key.hex()
    return os.path.join(self._own, name[:2], f"{name}.kv")

  def _unlink(self, path: str) -> bool:
    """Deletes a file; False when it has vanished. Raises OSError."""
    try:
      size = os.lstat(path).st_size
      os.unlink(path)
    except FileNotFoundError:
      return False
    with self._lock:
      self._found -= size
    return True

  # Capacity.

  def _make_room(self, kept: str) -> None:
    """Deletes what was used least recently, when there may be too much, except the file `kept`."""
    if self.capacity is None:
      return
    with self._evicting:
      with self._lock:
        # What other processes write is seen by scanning only. So that happens now and then in any
        # case, as often as a directory that is always full makes it necessary.
        due = self._found + self._since > self.capacity or self._since > self.capacity // 20
        if not due:  # or another thread has seen to it while this one waited
          return
        self._since = 0
      pieces, total = self._scan()
      total += sum(size for _, size, _ in pieces)
      evictions, refused = 0, None
      if total > self.capacity:
        for _, size, path in sorted(pieces):
          if 20 * total < 19 * self.capacity:
            break
          if path == kept:
            continue
          try:
            evictions += self._unlink(path)
            total -= size
          except OSError as error:
            refused = f"{path}: cannot be deleted: {error.strerror}. There may be too many files"
      with self._lock:
        # What other threads have written meanwhile may be counted twice, until the next scan.
        self._found = total
        self.evictions += evictions
    if refused is not None:
      self._fail("undeletable", refused)

  def _scan(self) -> tuple[list[tuple[int, int, str]], int]:
    """Looks at all namespaces, and deletes temporary files that a killed process has left.

    Returns:
      Of each piece: time of the last use in ns, bytes, path; and the bytes of temporary files.
    """
    pieces, temporary = [], 0
    for namespace in _entries(self.directory, _NAMESPACE):
      for entry in _files(namespace.path):
        with contextlib.suppress(OSError):
          found = entry.stat(follow_symlinks=False)
          if not stat.S_ISREG(found.st_mode):
            continue
          if _PIECE.fullmatch(entry.name):
            pieces.append((found.st_mtime_ns, found.st_size, entry.path))
          elif time.time() - found.st_mtime > _LEFTOVER_SECONDS:
            os.unlink(entry.path)
          else:
            temporary += found.st_size
    return pieces, temporary

  # Counting.

  def _refuse(self, kind: str, what: str) -> bool:
    with self._lock:
      self.refusals += 1
    self._fail(kind, what)
    return False

  def _discard(self, path: str, kind: str, what: str, keep: bool = False) -> None:
    """Counts a bad file and deletes it; a good one that has just taken its place is lost too."""
    end = "stays there"
    if not keep:
      try:
        self._unlink(path)
        end = "was deleted"
      except OSError as error:
        end = f"cannot be deleted ({error.strerror})"
    self._fail(kind, f"{path}: {what}. It counts as not stored and {end}")

  def _fail(self, kind: str, what: str) -> None:
    with self._lock:
      count = self.failures[kind] = self.failures.get(kind, 0) + 1
    if count == 1:
      advice = f"{_ADVICE[kind]}. More failures of this kind ({kind}) are counted only"
      self._report(f"{what}. {advice}")


def _entries(directory: str, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
  """Entries with names of a form; none of a directory that vanished or cannot be read."""
  try:
    with os.scandir(directory) as found:
      return [entry for entry in found if name.fullmatch(entry.name)]
  except OSError:
    return []


def _files(namespace: str) -> Iterator[os.DirEntry[str]]:
  """Pieces and temporary files in the folder of a namespace."""
  yield from _entries(namespace, _TEMPORARY)
  for folder in _entries(namespace, _FOLDER):
    yield from _entries(folder.path, _PIECE)
    yield from _entries(folder.path, _TEMPORARY)
