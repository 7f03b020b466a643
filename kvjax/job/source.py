"""Where prompt lines come from: a file, a pipe, or a configuration's samples."""

import os
import queue
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from kvjax.errors import KvjaxError
from kvjax.job.prompts import RawLine, lines_of_samples, read_lines


class UsageError(KvjaxError):
  """Options that do not go together, or an input that cannot be opened."""


class Source:
  """Raw lines that can be asked for without waiting.

  Args:
    lines: where they come from.
    waits: reading may block (a pipe, a terminal): a thread reads, a few lines ahead.
  """

  def __init__(self, lines: Iterator[RawLine], *, waits: bool):
    self._lines = lines
    self.ended = False
    self._queue: queue.Queue[RawLine | Exception | None] | None = None
    if waits:
      self._queue = queue.Queue(maxsize=16)
      threading.Thread(target=self._read, name="prompt lines", daemon=True).start()

  def _read(self) -> None:
    assert self._queue is not None
    try:
      for line in self._lines:
        self._queue.put(line)
      self._queue.put(None)
    except Exception as error:
      self._queue.put(error)

  def next(self, patience: float) -> RawLine | None:
    """The next line; None when there is none within `patience` seconds, or at the end."""
    if self._queue is None:
      try:
        line = next(self._lines, None)
      except OSError as error:
        raise _unreadable(error) from error
      self.ended = line is None
      return line
    try:
      item = self._queue.get(block=patience > 0, timeout=patience or None)
    except queue.Empty:
      return None
    if isinstance(item, OSError):
      raise _unreadable(item) from item
    if isinstance(item, Exception):
      raise item
    self.ended = item is None
    return item


def _unreadable(error: OSError) -> UsageError:
  return UsageError(f"--prompts: cannot be read: {error.strerror}")


def open_source(prompts: str | None, samples: Sequence[str | Mapping[str, Any]]) -> Source:
  """The lines of --prompts, of standard input for "-", or the samples. Raises UsageError."""
  if prompts is None:
    if not samples:
      raise UsageError("--prompts: expected a file, as the configuration has no sample prompts")
    return Source(lines_of_samples(samples), waits=False)
  try:
    file: BinaryIO = (
      open(0 if prompts == "-" else prompts, "rb", closefd=prompts != "-")  # noqa: SIM115
    )
    waits = not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
  except OSError as error:
    raise UsageError(f"--prompts: {prompts}: cannot be opened: {error.strerror}") from error
  return Source(read_lines(file), waits=waits)


def count_lines(prompts: str | None, samples: Sequence[Any]) -> int | None:
  """How many lines there are, for the bar; None when only reading can tell."""
  if prompts is None:
    return len(samples)
  if prompts == "-" or not os.path.isfile(prompts):
    return None
  count, last = 0, b"\n"
  try:
    with open(prompts, "rb") as file:
      while data := file.read(2**20):
        count, last = count + data.count(b"\n"), data[-1:]
  except OSError as error:
    raise _unreadable(error) from error
  return count + (last != b"\n")
