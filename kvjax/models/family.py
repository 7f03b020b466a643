"""What a family file declares: how a source's configuration becomes layer specs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.errors import WeightsError
from kvjax.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Family:
  """Attributes:
  architecture: the name in `general.architecture` of a GGUF file.
  spec: GGUF metadata -> ModelSpec. WeightsError where the metadata cannot be served.
  interleaved_rope: the file stores query and key rows for the rotation of neighbouring pairs;
    loading reorders them for the rotation of halves that the decoder uses.
  """

  architecture: str
  spec: Callable[[Mapping[str, Any]], ModelSpec]
  interleaved_rope: bool = False


class Reader:
  """Typed access to the keys of one architecture in GGUF metadata, with errors that name them."""

  def __init__(self, metadata: Mapping[str, Any], architecture: str):
    self.metadata = metadata
    self.architecture = architecture

  def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
    value = self._get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
      raise WeightsError(f"{self._name(key)}: expected an integer of at least {low}, got {value!r}")
    return value

  def number(self, key: str, default: float | None = None) -> float:
    value = self._get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
      raise WeightsError(f"{self._name(key)}: expected a number above 0, got {value!r}")
    return float(value)

  def heads(self, head_dim: int | None = None) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size); `head_dim` where the file does not give it."""
    heads = self.integer("attention.head_count")
    kv_heads = self.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
      raise WeightsError(
        f"{self._name('attention.head_count_kv')}: expected a divisor of the {heads} query heads, "
        f"got {kv_heads}"
      )
    size = self.integer("attention.key_length", head_dim)
    if size % 2:
      raise WeightsError(
        f"{self._name('attention.key_length')}: expected an even head size (rotary halves), "
        f"got {size}"
      )
    if (value := self.integer("attention.value_length", size)) != size:
      raise WeightsError(
        f"{self._name('attention.value_length')}: expected the key length {size}, got {value}"
      )
    return heads, kv_heads, size

  def refuse(self, *keys: str) -> None:
    """WeightsError for keys that would change the result and are not served."""
    present = [self._name(key) for key in keys if self._name(key) in self.metadata]
    if present:
      values = ", ".join(f"{key} = {self.metadata[key]!r}" for key in present)
      raise WeightsError(f"{values}: not supported for {self.architecture!r} models yet")

  def rope_scale(self) -> float:
    """Linear position scaling; any other kind is refused."""
    kind = self.metadata.get(self._name("rope.scaling.type"), "none")
    if kind not in ("none", "linear"):
      raise WeightsError(
        f"{self._name('rope.scaling.type')}: expected 'none' or 'linear', got {kind!r}"
      )
    return self.number("rope.scaling.factor", 1.0) if kind == "linear" else 1.0

  def vocab_size(self) -> int:
    tokens = self.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
      raise WeightsError("tokenizer.ggml.tokens: expected the list of tokens, found none")
    return len(tokens)

  def name(self) -> str:
    return str(self.metadata.get("general.name", self.architecture))

  def _name(self, key: str) -> str:
    return f"{self.architecture}.{key}"

  def _get(self, key: str, default: Any) -> Any:
    value = self.metadata.get(self._name(key), default)
    if value is None:
      raise WeightsError(f"{self._name(key)}: missing from the file's metadata")
    return value
