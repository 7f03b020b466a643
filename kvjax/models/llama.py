"""Llama family (Llama 2, SmolLM2): full attention in every layer."""

from collections.abc import Mapping
from typing import Any

from kvjax.errors import WeightsError
from kvjax.geometry import Retention
from kvjax.models.family import Family, Reader
from kvjax.models.spec import MLP, Attention, Layer, ModelSpec, Rope


def spec(metadata: Mapping[str, Any]) -> ModelSpec:
  """GGUF metadata -> layers."""
  read = Reader(metadata, "llama")
  read.refuse("expert_count", "attention.sliding_window", "attention.clamp_kqv")
  width = read.integer("embedding_length")
  heads, kv_heads, head_dim = read.heads(width // read.integer("attention.head_count"))
  if (rotated := read.integer("rope.dimension_count", head_dim)) != head_dim:
    raise WeightsError(
      f"llama.rope.dimension_count: expected the head size {head_dim} (whole heads are rotated), "
      f"got {rotated}"
    )
  layer = Layer(
    Attention(
      heads=heads,
      kv_heads=kv_heads,
      head_dim=head_dim,
      retention=Retention(),
      rope=Rope(read.number("rope.freq_base", 10_000.0), read.rope_scale()),
      scale=head_dim**-0.5,
    ),
    MLP(read.integer("feed_forward_length"), "silu"),
  )
  return ModelSpec(
    name=read.name(),
    vocab_size=read.vocab_size(),
    width=width,
    layers=(layer,) * read.integer("block_count"),
    norm_eps=read.number("attention.layer_norm_rms_epsilon", 1e-5),
    embedding_scale=1.0,
    tied_head=False,
    max_length=read.integer("context_length"),
  )


FAMILY = Family("llama", spec, interleaved_rope=True)
