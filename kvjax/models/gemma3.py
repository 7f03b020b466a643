"""Gemma 3 (text): five sliding-window layers to one full layer, qk-norm, post norms."""

from collections.abc import Mapping
from typing import Any

from kvjax.geometry import Retention
from kvjax.models.family import Family, Reader
from kvjax.models.spec import MLP, Attention, Layer, ModelSpec, Rope

# Fixed by the architecture; GGUF files do not carry them.
LOCAL_ROPE_BASE = 10_000.0
PATTERN = 6  # every sixth layer is full

# The 27B model scales its logits by width / heads instead of the head size.
_LAYERS_27B = 62


def spec(metadata: Mapping[str, Any]) -> ModelSpec:
  """GGUF metadata -> layers."""
  read = Reader(metadata, "gemma3")
  read.refuse("attn_logit_softcapping", "final_logit_softcapping")
  width = read.integer("embedding_length")
  heads, kv_heads, head_dim = read.heads()
  count = read.integer("block_count")
  scale = (width // heads if count == _LAYERS_27B else head_dim) ** -0.5

  def layer(i: int) -> Layer:
    full = i % PATTERN == PATTERN - 1
    base = read.number("rope.freq_base", 1_000_000.0)
    return Layer(
      Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        retention=Retention(None if full else read.integer("attention.sliding_window")),
        rope=Rope(base, read.rope_scale()) if full else Rope(LOCAL_ROPE_BASE),
        scale=scale,
        qk_norm=True,
      ),
      MLP(read.integer("feed_forward_length"), "gelu_tanh"),
      post_norms=True,
    )

  return ModelSpec(
    name=read.name(),
    vocab_size=read.vocab_size(),
    width=width,
    layers=tuple(layer(i) for i in range(count)),
    norm_eps=read.number("attention.layer_norm_rms_epsilon", 1e-6),
    embedding_scale=width**0.5,
    tied_head=True,
    max_length=read.integer("context_length"),
  )


FAMILY = Family("gemma3", spec)
