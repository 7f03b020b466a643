"""The result file: whole lines appended, in input order on request, resumed after any kill.

Each record goes to the operating system in one unbuffered write as soon as it is due, so a killed
process loses none of them; fsync every few seconds bounds what a power cut takes.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable
from typing import Any, Literal

from kvjax.errors import KvjaxError, show
from kvjax.job.prompts import LineId
from kvjax.job.records import read_record

_SYNC_SECONDS = 5.0
_MOST_COMPLETIONS = 128  # bits of a mask; at least engine.request.MAX_N
ALL = (1 << _MOST_COMPLETIONS) - 1

log = logging.getLogger(__name__)


class OutputRefused(KvjaxError):
  """The output exists, is in use, or does not fit the options: nothing was touched."""


class OutputError(KvjaxError):
  """The output cannot be opened or written; whole records that were written are still there."""


def key_of(name: LineId | None, error_line: int | None = None) -> int:
  """A 128-bit digest that stands for a line's results, or for its error record.

  Digests instead of ids keep the memory per line small and independent of the ids' length; at a
  billion lines the chance that any two meet is below 1e-20.
  """
  text = json.dumps([error_line, name]).encode()
  return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest())


class Finished:
  """What an existing result file already holds, forgotten line by line as the input is read.

  Attributes:
    records: how many records the file held.
    in_order: whether lines were taken in the order of their records; only kept when `ordered`.
  """

  def __init__(self, *, ordered: bool = False):
    self.records = 0
    self._masks: dict[int, int] = {}
    self._places: dict[int, int] | None = {} if ordered else None
    self._last = -1
    self.in_order = True

  def add(self, name: LineId | None, index: int | None, error_line: int | None) -> None:
    """Notes one record. `index` None stands for all completions."""
    key = key_of(name, error_line)
    self._masks[key] = self._masks.get(key, 0) | (ALL if index is None else 1 << index)
    if self._places is not None:
      self._places.setdefault(key, self.records)
    self.records += 1

  def take(self, name: LineId | None, error_line: int | None = None) -> int:
    """The completions of a line that are there, as a bit mask; 0 for none. Forgets the line."""
    key = key_of(name, error_line)
    mask = self._masks.pop(key, 0)
    if mask and self._places is not None:
      place = self._places.pop(key)
      self.in_order = self.in_order and place > self._last
      self._last = place
    return mask

  def __len__(self) -> int:
    """How many lines with records have not been taken."""
    return len(self._masks)


class ResultFile:
  """Appends records to a file, or to standard output for the path "-".

  Args:
    path: where to write; created when it does not exist.
    existing: what to do with a file that has content: "refuse" it, "keep" its records and append,
      or "drop" them, once there is something in their place (`append`) or `drop_old` says so.
    ordered: `finished` also watches that the kept records follow the input's order.

  The file is locked while it is open, so that two runs cannot append to one file.

  Attributes:
    finished: what a kept file holds.
    cut: bytes of a torn last line that were cut off.

  Raises OutputRefused or OutputError.
  """

  def __init__(
    self,
    path: str,
    existing: Literal["refuse", "keep", "drop"] = "refuse",
    *,
    ordered: bool = False,
  ):
    self.path = "standard output" if path == "-" else path
    self.finished = Finished(ordered=ordered)
    self.cut = 0
    self._synced = time.monotonic()
    self._dirty = False
    try:
      flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
      with contextlib.suppress(FileNotFoundError):
        if path != "-" and stat.S_ISFIFO(os.stat(path).st_mode):
          # Waits for a reader, and hears when it leaves.
          flags = os.O_WRONLY | os.O_CLOEXEC
      self._fd = os.dup(1) if path == "-" else os.open(path, flags, 0o666)
    except OSError as error:
      raise OutputError(f"{path}: cannot be opened for writing: {error.strerror}") from error
    # Only a regular file has content to keep, a length to cut to and something to sync.
    self._regular = path != "-" and stat.S_ISREG(os.fstat(self._fd).st_mode)
    self._size = 0
    self._old = False  # content that is to be dropped is still there
    if not self._regular:
      return
    try:
      self._lock()
      self._size = os.fstat(self._fd).st_size
      if self._size and existing == "refuse":
        raise OutputRefused(
          f"{path}: exists and is not empty. Use --resume to continue it, --overwrite to drop its "
          "content, or another name"
        )
      kept = self._scan() if existing == "keep" else 0
      self.cut = self._size - kept if existing == "keep" else 0
      self._old = existing == "drop" and self._size > 0
      if not self._old:
        os.ftruncate(self._fd, kept)
      os.lseek(self._fd, kept, os.SEEK_SET)
      self._size = kept
    except OSError as error:
      os.close(self._fd)
      raise OutputError(f"{path}: cannot be prepared: {error.strerror}") from error
    except KvjaxError:
      os.close(self._fd)
      raise

  def _lock(self) -> None:
    try:
      fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise OutputRefused(
        f"{self.path}: another run is writing to it. Wait for it, or use another name"
      ) from None
    except OSError as error:  # some network file systems have no locks
      log.warning("%s: cannot be locked (%s); make sure no other run uses it", self.path, error)

  def _scan(self) -> int:
    """Notes the records of the file; returns how many bytes of whole records it has."""
    good = number = 0
    with open(os.dup(self._fd), "rb") as file:
      file.seek(0)
      for data in file:
        number += 1
        value = _parse(data)
        if value is None:
          # What a kill leaves is the beginning of a record; what a power cut leaves may be zeros.
          torn = good + len(data) == self._size and data[:1] in (b"{", b"\0")
          if torn:
            break
          raise OutputRefused(
            f"{self.path}: line {number}: expected a result record, got {show(data[:200])}. It is "
            "no result file, or was damaged: repair it or use another name"
          )
        record = read_record(value)
        if record is None or (record.index is not None and record.index >= _MOST_COMPLETIONS):
          raise OutputRefused(
            f"{self.path}: line {number}: expected a record with id and index, custom_id and "
            f"response, or error, got {show(data[:200])}. Is it the output of this program?"
          )
        self.finished.add(record.id, record.index, record.error_line)
        good += len(data)
    return good

  def append(self, data: bytes) -> None:
    """Writes whole lines. Raises OutputError, after cutting off what was written of them."""
    self.drop_old()
    left = memoryview(data)
    try:
      while left:
        left = left[os.write(self._fd, left) :]
    except OSError as error:
      if self._regular:
        with contextlib.suppress(OSError):
          os.ftruncate(self._fd, self._size)
          os.lseek(self._fd, self._size, os.SEEK_SET)
      raise OutputError(self._failure(error)) from error
    self._size += len(data)
    self._dirty = True

  def drop_old(self) -> None:
    """Drops the content that was there before, if it is to be dropped. Raises OutputError."""
    if self._old:
      try:
        os.ftruncate(self._fd, 0)
      except OSError as error:
        raise OutputError(f"{self.path}: cannot be emptied: {error.strerror}") from error
      self._old = False

  def _failure(self, error: OSError) -> str:
    advice = {
      errno.ENOSPC: "Free some space",
      errno.EDQUOT: "Free some of the quota",
      errno.EFBIG: "Raise the limit on file sizes",
    }.get(error.errno or 0)
    text = f"{self.path}: cannot be written: {error.strerror} after {self._size} bytes of records"
    if not self._regular:
      return text
    return f"{text}, which are kept. {advice + ' and c' if advice else 'C'}ontinue with --resume"

  def tick(self) -> None:
    """To be called now and then: brings what was written to the disk every few seconds."""
    if self._dirty and time.monotonic() - self._synced >= _SYNC_SECONDS:
      self.sync()

  def sync(self) -> None:
    """Brings what was written to the disk. Raises OutputError."""
    if self._regular and self._dirty:
      try:
        os.fsync(self._fd)
      except OSError as error:
        raise OutputError(self._failure(error)) from error
    self._dirty = False
    self._synced = time.monotonic()

  def close(self) -> None:
    """Syncs and closes. Raises OutputError when the last records did not reach the disk."""
    if self._fd < 0:
      return
    try:
      self.sync()
    finally:
      os.close(self._fd)
      self._fd = -1


def _parse(data: bytes) -> Any:
  """The JSON value of a whole line, or None."""
  if not data.endswith(b"\n"):
    return None
  try:
    return json.loads(data)
  except (ValueError, RecursionError):
    return None


class InOrder:
  """Holds records back until those of all earlier places are written.

  What it holds is not bounded: one slow request holds back everything that came after it.
  """

  def __init__(self, append: Callable[[bytes], None]):
    self._append = append
    self._next = 0
    self._held: dict[int, bytes] = {}

  def put(self, place: int, data: bytes) -> None:
    """Takes the records of one place; places count from 0 without gaps."""
    self._held[place] = data
    while self._next in self._held:
      self._append(self._held.pop(self._next))
      self._next += 1

  def __len__(self) -> int:
    """How many places are finished and held back."""
    return len(self._held)
