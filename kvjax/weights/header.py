"""The header of a GGUF file: metadata, and where each tensor lies.

Parsed here rather than by gguf.GGUFReader, which takes 12 s and 700 MB for a vocabulary of 262,144
pieces, needs the file in one piece and trusts every count that it reads. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import itertools
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvjax.errors import WeightsError
from kvjax.weights.check import bullets
from kvjax.weights.parts import Parts

VERSIONS = (2, 3)  # version 1 has 32-bit counts and was in use for two months

_MOST_DIMS = 4  # GGML_MAX_DIMS
_MOST_NESTING = 4  # arrays of arrays
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


class Header:
  """A cursor over the header that checks each size against the file before it believes it.

  Args:
    parts: the file.
    window: bytes of the header that are held at a time.

  Raises:
    WeightsError: here and in every method, when the file is no GGUF file, truncated or damaged.
  """

  def __init__(self, parts: Parts, window: int):
    self._parts = parts
    self._most = window
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
      length = min(max(nbytes, self._most), self._parts.size - self._base)
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
    """metadata, key -> str, int, float, bool or list of these; tensors by name, in file order."""
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
