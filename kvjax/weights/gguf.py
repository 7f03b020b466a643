"""Model files in the GGUF format: metadata, and tensors dequantised on demand.

The header is parsed here rather than by gguf.GGUFReader, which takes 12 s and 700 MB for a
vocabulary of 262,144 pieces, needs the file in one piece and trusts every count that it reads.
Sizes of the quantised formats and their dequantisation come from the gguf package. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import bisect
import collections
import hashlib
import itertools
import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import DTypeLike

from kvjax.errors import WeightsError
from kvjax.weights.check import bullets

SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
VERSIONS = (2, 3)  # version 1 has 32-bit counts and was in use for two months

# x.gguf.part00, x.gguf.part01 … or x.gguf.1 …: byte ranges of x.gguf.
PART_NAME = re.compile(r"(?P<stem>.+\.gguf)\.(?:part)?(?P<number>\d+)", re.IGNORECASE)

_WINDOW = 1 << 20  # bytes of header that are held at a time
_MOST_DIMS = 4  # GGML_MAX_DIMS
_MOST_NESTING = 4  # arrays of arrays
# Elements dequantised at a time. Smaller pieces lose to Python's overhead, larger ones leave the
# cache: 2**17 to 2**18 are fastest for every format.
_PIECE = 1 << 17

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
  number: np.dtype(code)
  for number, code in (
    (0, "<u1"), (1, "<i1"), (2, "<u2"), (3, "<i2"), (4, "<u4"), (5, "<i4"), (6, "<f4"), (7, "?"),
    (10, "<u8"), (11, "<i8"), (12, "<f8"),
  )
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
  """Where one tensor lies and what it holds.

  Attributes:
    name: its name in the file.
    shape: row-major, the reverse of the file's order: a linear layer is [out, in].
    quantization: the gguf package's name of its format, as "Q4_K".
    nbytes: bytes in the file.
    offset: first byte, counted from the start of the file.
  """

  name: str
  shape: tuple[int, ...]
  quantization: str
  nbytes: int
  offset: int


class _Parts:
  """One file, whole or cut into byte ranges, mapped read-only and seen as one range of bytes."""

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
    digest = hashlib.sha256()
    for part in self._maps:
      digest.update(part)
    return digest.hexdigest()


class GGUFFile:
  """An open GGUF file. Tensor data is mapped, and read when asked for.

  Attributes:
    metadata: key -> str, int, float, bool or list of these.
    tensors: name -> TensorInfo, in the file's order.
    name: the path, for messages; of a file in parts, that of the first and the last.
  """

  def __init__(self, parts: _Parts, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]):
    self._parts = parts
    self.name = parts.label
    self.metadata = metadata
    self.tensors = tensors

  @classmethod
  def open(cls, paths: Sequence[Path] | Path, sha256: str | None = None) -> "GGUFFile":
    """Maps a file, given whole or as the byte ranges into which it was cut, and reads its header.

    Args:
      paths: the file, or its parts in order.
      sha256: hexadecimal checksum of the whole file; every byte is read to verify it.

    Raises:
      WeightsError: naming the file: missing, empty, unreadable, truncated, damaged, not GGUF, or
        with another checksum than `sha256`.
    """
    given = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    _check_order(given)
    parts = _Parts(given)
    metadata, tensors = _Header(parts).parse()
    if sha256 is not None and (got := parts.sha256()) != sha256.lower():
      raise WeightsError(
        f"{parts.label}: expected sha256 {sha256} of the whole file, got {got}. "
        f"It is damaged; get it again{parts.order_hint}"
      )
    if metadata.get("split.count", 0) not in (0, 1):
      raise WeightsError(
        f"{parts.label}: expected a whole model, got one of {metadata['split.count']} split GGUF "
        "files. Join them with llama.cpp's `llama-gguf-split --merge`"
      )
    return cls(parts, metadata, tensors)

  @property
  def description(self) -> str:
    """One line: name, architecture, number of tensors per format, bytes."""
    counts = collections.Counter(tensor.quantization for tensor in self.tensors.values())
    formats = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    title = self.metadata.get("general.name", self.name)
    architecture = self.metadata.get("general.architecture", "unknown architecture")
    return f"{title} ({architecture}): tensors {formats}; {self._parts.size / 1e6:.1f} MB"

  def check_readable(self, names: Iterable[str] | None = None) -> None:
    """Can the named tensors (all if None) be dequantised?

    Raises:
      WeightsError: listing every tensor whose format is not in SUPPORTED, or that is not there.
    """
    chosen = list(self.tensors if names is None else names)
    absent = [name for name in chosen if name not in self.tensors]
    if absent:
      raise WeightsError(f"{self.name}: no such tensors:\n{bullets(absent)}")
    wrong = [
      tensor for name in chosen if (tensor := self.tensors[name]).quantization not in SUPPORTED
    ]
    if wrong:
      lines = [f"{tensor.name}: {tensor.quantization}" for tensor in wrong]
      raise WeightsError(
        f"{self.name}: {len(wrong)} tensors have a format that cannot be read:\n{bullets(lines)}\n"
        f"Expected {', '.join(SUPPORTED)}. Use the model in one of these formats"
      )

  def read(self, name: str, dtype: DTypeLike = np.float32) -> np.ndarray:
    """One tensor, dequantised in float32 and rounded to `dtype`: a new contiguous array.

    Args:
      name: a key of `tensors`.
      dtype: np.float32 or ml_dtypes.bfloat16.

    Raises:
      WeightsError: no such tensor, a format that cannot be read, or NaN or infinity in the data.
    """
    self.check_readable([name])
    wanted = np.dtype(dtype)
    if wanted not in DTYPES:
      raise WeightsError(f"{name}: expected dtype float32 or bfloat16, got {wanted}")
    tensor = self.tensors[name]
    kind = GGMLQuantizationType[tensor.quantization]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    out = np.empty(math.prod(tensor.shape), wanted)
    # In pieces, so that bfloat16 needs no whole float32 tensor beside it. A second thread does not
    # make it faster: the pieces are short and Python's lock is taken between them.
    for first in range(0, out.size, _PIECE):
      last = min(first + _PIECE, out.size)
      begin, end = first // block * block_bytes, last // block * block_bytes
      raw = self._parts.view(tensor.offset + begin, end - begin)
      # One long row: the formats are blockwise, and the package loops over rows in Python.
      with np.errstate(invalid="ignore", over="ignore"):
        values = dequantize(raw.reshape(1, -1), kind).reshape(-1)
      if not np.isfinite(values).all():
        raise WeightsError(f"{self.name}: tensor {name} holds NaN or infinity: the file is damaged")
      out[first:last] = values
    return out.reshape(tensor.shape)

  def read_all(
    self, names: Iterable[str] | None = None, dtype: DTypeLike = np.float32
  ) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of each named tensor (all if None), one at a time, in order.

    Names and formats are checked before this returns, thus before anything is read. Raises as
    `read`.
    """
    chosen = list(self.tensors if names is None else names)
    self.check_readable(chosen)
    return ((name, self.read(name, dtype)) for name in chosen)


class _Header:
  """A cursor over the header that checks each size against the file before it believes it."""

  def __init__(self, parts: _Parts):
    self._parts = parts
    self._base = 0  # offset in the file of the window's first byte
    self._window = b""
    self._at = 0  # in the window
    if parts.size < 24 or (magic := self.take(4)) != b"GGUF":
      got = f"{parts.size} bytes" if parts.size < 24 else repr(magic)
      raise WeightsError(
        f"{parts.label}: expected a GGUF file (magic b'GGUF'), got {got}{parts.order_hint}"
      )

  @property
  def position(self) -> int:
    return self._base + self._at

  def fail(self, text: str) -> WeightsError:
    return WeightsError(
      f"{self._parts.label}: {text} (header, byte {self.position} of {self._parts.size}). "
      "The file is damaged, truncated, or written for something else; get it again"
    )

  def require(self, nbytes: int, what: str) -> None:
    rest = self._parts.size - self.position
    if nbytes > rest:
      raise self.fail(f"{what} needs at least {nbytes} bytes, but only {rest} are left")

  def take(self, nbytes: int, what: str = "a field") -> bytes:
    if self._at + nbytes > len(self._window):
      self.require(nbytes, what)
      self._base, self._at = self.position, 0
      length = min(max(nbytes, _WINDOW), self._parts.size - self._base)
      self._window = self._parts.view(self._base, length).tobytes()
    self._at += nbytes
    return self._window[self._at - nbytes : self._at]

  def number(self, kind: int) -> Any:
    return self.numbers(kind, 1, "a number")[0]

  def numbers(self, kind: int, count: int, what: str) -> list[Any]:
    dtype = _SCALARS[kind]
    return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()

  def string(self, what: str) -> str:
    raw = self.take(self.number(10), what)
    try:
      return raw.decode()
    except UnicodeDecodeError as error:
      raise self.fail(f"{what} is not UTF-8 ({error})") from None

  def strings(self, count: int, what: str) -> list[str]:
    self.require(8 * count, what)
    length = struct.Struct("<Q").unpack_from
    texts: list[str] = []
    while len(texts) < count:
      texts.append(self.string(what))  # moves the window on when it has to
      # Vocabularies are long: the strings that lie in the window without a call for each.
      window, at = self._window, self._at
      while len(texts) < count and at + 8 <= len(window):
        end = at + 8 + length(window, at)[0]
        if end > len(window):
          break
        try:
          texts.append(window[at + 8 : end].decode())
        except UnicodeDecodeError:
          break  # string() reports it
        at = end
      self._at = at
    return texts

  def value(self, kind: int, what: str, depth: int = 0) -> Any:
    if kind in _SCALARS:
      return self.number(kind)
    if kind == _STRING:
      return self.string(what)
    if kind != _ARRAY or depth >= _MOST_NESTING:
      raise self.fail(f"{what} has value type {kind}, expected 0 to 12, nested at most 4 deep")
    element, count = self.number(4), self.number(10)
    if element in _SCALARS:
      return self.numbers(element, count, what)
    if element == _STRING:
      return self.strings(count, what)
    self.require(12 * count, what)
    return [self.value(element, what, depth + 1) for _ in range(count)]

  def parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    version = self.number(4)
    if version not in VERSIONS:
      hint = "; the file is big-endian" if version & 0xFFFF == 0 else ""
      raise self.fail(f"GGUF version {version}, expected one of {VERSIONS}{hint}")
    tensor_count, key_count = self.number(10), self.number(10)
    self.require(13 * key_count, f"{key_count} metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
      key = self.string("a metadata key")
      if key in metadata:
        raise self.fail(f"metadata key {key!r} occurs twice")
      metadata[key] = self.value(self.number(4), f"metadata {key!r}")
    self.require(24 * tensor_count, f"{tensor_count} tensor descriptions")
    raw = [self._tensor() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
      raise self.fail(f"general.alignment is {alignment!r}, expected a power of two")
    start = -(-self.position // alignment) * alignment
    return metadata, self._place(raw, start, alignment)

  def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
    """name, row-major shape, number of the format, offset from the start of the data."""
    name = self.string("a tensor name")
    dims = self.number(4)
    if dims > _MOST_DIMS:
      raise self.fail(f"tensor {name!r} has {dims} dimensions, expected at most {_MOST_DIMS}")
    shape = tuple(reversed(self.numbers(10, dims, "a shape")))
    if 0 in shape:
      raise self.fail(f"tensor {name!r} has the shape {shape}, expected no 0 in it")
    return name, shape, self.number(4), self.number(10)

  def _place(
    self, raw: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
  ) -> dict[str, TensorInfo]:
    """Checks format, size and place of each tensor; reports all that are wrong at once."""
    tensors: dict[str, TensorInfo] = {}
    wrong: list[str] = []
    for name, shape, number, offset in raw:
      if name in tensors:
        wrong.append(f"{name}: occurs twice")
        continue
      try:
        kind = GGMLQuantizationType(number)
      except ValueError:
        wrong.append(f"{name}: format number {number} is unknown to the gguf package")
        continue
      block, block_bytes = GGML_QUANT_SIZES[kind]
      if block > 1 and (not shape or shape[-1] % block):
        wrong.append(f"{name}: rows of shape {shape} are no multiple of {kind.name}'s {block}")
        continue
      nbytes = math.prod(shape) // block * block_bytes
      tensors[name] = TensorInfo(name, shape, kind.name, nbytes, start + offset)
      if offset % alignment:
        wrong.append(f"{name}: offset {offset} is no multiple of the alignment {alignment}")
      elif start + offset + nbytes > self._parts.size:
        wrong.append(
          f"{name}: bytes {start + offset} to {start + offset + nbytes} are past the end"
        )
    placed = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(placed):
      if before.offset + before.nbytes > after.offset:
        wrong.append(f"{before.name}: overlaps {after.name}")
    if wrong:
      raise WeightsError(
        f"{self._parts.label}: {len(wrong)} things are wrong with its {len(raw)} tensors (file of "
        f"{self._parts.size} bytes):\n{bullets(wrong)}\nThe file is truncated, lacks a part, or is "
        "damaged; get it again"
      )
    return tensors


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


def _check_order(paths: Sequence[Path]) -> None:
  """Where the names carry numbers (x.gguf.part00 …), they must count up without a gap."""
  matches = [PART_NAME.fullmatch(path.name) for path in paths]
  numbers = [int(match["number"]) for match in matches if match]
  if not numbers or len(numbers) < len(paths):
    return
  first = min(numbers[0], 1)
  if numbers != list(range(first, first + len(numbers))):
    raise WeightsError(
      f"{paths[0].parent}: expected every part of the file, in order, got "
      + ", ".join(path.name for path in paths)
    )
