"""Tiny GGUF files for the tests, written by the gguf package's own writer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize

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


def write_gguf(
  path: Path,
  tensors: Mapping[str, np.ndarray | Encoded],
  metadata: Mapping[str, Any] | None = None,
  architecture: str = "llama",
) -> Path:
  """Writes one file and returns its path.

  An array goes in as F32, F16 or integers by its dtype. A metadata value is written as a string,
  bool, float32, or array by its type; an int as uint32.
  """
  writer = GGUFWriter(path, architecture)
  for key, value in (metadata or {}).items():
    match value:
      case bool():
        writer.add_bool(key, value)
      case int():
        writer.add_uint32(key, value)
      case float():
        writer.add_float32(key, value)
      case str():
        writer.add_string(key, value)
      case []:
        writer.add_key_value(key, value, GGUFValueType.ARRAY, GGUFValueType.STRING)
      case _:
        writer.add_array(key, value)
  for name, tensor in tensors.items():
    if isinstance(tensor, Encoded):
      writer.add_tensor(name, tensor.rows, raw_dtype=tensor.kind)
    else:
      writer.add_tensor(name, tensor)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


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
