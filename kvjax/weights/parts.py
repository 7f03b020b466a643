"""A file, whole or cut into byte ranges, as one range of bytes that is mapped and never copied."""

import bisect
import hashlib
import itertools
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvjax.errors import WeightsError


class Parts:
  """One file, whole or cut into byte ranges, mapped read-only and seen as one range of bytes.

  Args:
    paths: the file, or its parts in order.

  Attributes:
    label: the path, for messages; of a file in parts, that of the first and the last.
    order_hint: what to add to a message about damage when the file is in parts, else "".
    size: bytes of the whole file.

  Raises:
    WeightsError: no path, or one that is missing, unreadable, empty or no regular file.
  """

  def __init__(self, paths: Sequence[Path]):
    if not paths:
      raise WeightsError("expected at least one GGUF file, got an empty list of paths")
    self.label = str(paths[0])
    self.order_hint = ""
    if len(paths) > 1:
      self.label += f" to {paths[-1].name} ({len(paths)} parts)"
      self.order_hint = ". Or a part is missing, or they are in the wrong order: " + ", ".join(
        path.name for path in paths
      )
    self._maps = [_map(path) for path in paths]
    self._starts = [0, *itertools.accumulate(part.size for part in self._maps)]
    self.size = self._starts[-1]

  def view(self, offset: int, nbytes: int) -> np.ndarray:
    """uint8 [nbytes > 0], read-only; a copy only where the range crosses a border of parts."""
    at = bisect.bisect_right(self._starts, offset) - 1
    pieces = []
    while nbytes > 0:
      begin = offset - self._starts[at]
      piece = self._maps[at][begin : begin + nbytes]
      pieces.append(piece)
      offset, nbytes, at = offset + piece.size, nbytes - piece.size, at + 1
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

  def sha256(self) -> str:
    """Hexadecimal checksum of the whole file; reads every byte."""
    digest = hashlib.sha256()
    for part in self._maps:
      digest.update(part)
    return digest.hexdigest()


def _map(path: Path) -> np.ndarray:
  """uint8 [size], read-only, of a regular file that is not empty."""
  try:
    mode = path.stat().st_mode  # before it is opened: opening a pipe would wait
    if not stat.S_ISREG(mode):
      kind = "a directory" if stat.S_ISDIR(mode) else "something that is no regular file"
      raise WeightsError(f"{path}: expected a GGUF file, got {kind}")
    with path.open("rb") as file:
      if os.fstat(file.fileno()).st_size == 0:
        raise WeightsError(f"{path}: expected a GGUF file, got an empty file")
      return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
  except OSError as error:
    raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from error
