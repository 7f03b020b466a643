"""Model files in the GGUF format: metadata, and tensors dequantised on demand.

Sizes of the quantised formats and their dequantisation come from the gguf package.
"""

import collections
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import DTypeLike

from kvjax.errors import WeightsError
from kvjax.weights.check import bullets
from kvjax.weights.header import Header, TensorInfo
from kvjax.weights.parts import Parts

SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))

# x.gguf.part00, x.gguf.part01 … or x.gguf.1 …: byte ranges of x.gguf.
PART_NAME = re.compile(r"(?P<stem>.+\.gguf)\.(?:part)?(?P<number>\d+)", re.IGNORECASE)

_WINDOW = 1 << 20  # bytes of header that are held at a time
# Elements dequantised at a time. Smaller pieces lose to Python's overhead, larger ones leave the
# cache: 2**17 to 2**18 are fastest for every format.
_PIECE = 1 << 17
_SAMPLE, _SAMPLES = 1 << 14, 256  # bytes of a block, and blocks, that a fingerprint reads


class GGUFFile:
  """An open GGUF file. Tensor data is mapped, and read when asked for.

  Attributes:
    metadata: key -> str, int, float, bool or list of these.
    tensors: name -> TensorInfo, in the file's order.
    name: the path, for messages; of a file in parts, that of the first and the last.
  """

  def __init__(self, parts: Parts, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]):
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
    parts = Parts(given)
    metadata, tensors = Header(parts, _WINDOW).parse()
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

  def fingerprint(self) -> str:
    """Hexadecimal name of the content: sha256 over its size, its first bytes and blocks all over.

    Other weights differ everywhere, so that blocks tell them apart and a large file is not read.
    """
    size = self._parts.size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    starts = [0, *(size * i // _SAMPLES for i in range(_SAMPLES))]
    for start, length in zip(starts, [_WINDOW] + [_SAMPLE] * _SAMPLES, strict=True):
      digest.update(self._parts.view(start, min(length, size - start)).tobytes())
    return digest.hexdigest()

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
