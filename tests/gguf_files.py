"""Tiny GGUF files for the tests: quantised tensors, and files cut into parts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

from kvjax.testing import write_gguf

__all__ = ["Encoded", "cut", "encode", "random_blocks", "write_gguf"]

# Byte offset, in one block, of each half-precision scale of a format.
_SCALES_AT = {
  "Q4_0": (0,),
  "Q4_1": (0, 2),
  "Q5_0": (0,),
  "Q5_1": (0, 2),
  "Q8_0": (0,),
  "Q4_K": (0, 2),
  "Q5_K": (0, 2),
  "Q6_K": (208,),
}


class Encoded:
  """A tensor in one of the file's formats: uint8 rows of whole blocks."""

  def __init__(self, quantization: str, rows: np.ndarray):
    self.kind = GGMLQuantizationType[quantization]
    self.rows = rows


def encode(quantization: str, values: np.ndarray) -> Encoded:
  """Values quantised by the gguf package (which cannot write the K formats)."""
  kind = GGMLQuantizationType[quantization]
  rows = quantize(np.ascontiguousarray(values, np.float32), kind)
  return Encoded(quantization, rows.view(np.uint8))


def random_blocks(quantization: str, shape: tuple[int, ...], seed: int = 0) -> Encoded:
  """Random contents with finite scales, for any quantised format of `_SCALES_AT`."""
  block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[quantization]]
  random = np.random.default_rng(seed)
  count = int(np.prod(shape)) // block
  raw = random.integers(0, 256, (count, block_bytes), dtype=np.uint8)
  for at in _SCALES_AT[quantization]:
    raw[:, at : at + 2] = random.normal(size=(count, 1)).astype("<f2").view(np.uint8)
  return Encoded(quantization, raw.reshape(*shape[:-1], shape[-1] // block * block_bytes))


def cut(path: Path, borders: Sequence[int]) -> list[Path]:
  """The file as consecutive byte ranges x.gguf.part00 …, cut at the given offsets."""
  data = path.read_bytes()
  ends = [*borders, len(data)]
  parts = []
  for i, (begin, end) in enumerate(zip([0, *borders], ends, strict=True)):
    part = path.with_name(f"{path.name}.part{i:02d}")
    part.write_bytes(data[begin:end])
    parts.append(part)
  return parts
