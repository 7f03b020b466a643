"""What a model is: a list of layers, each declared by small frozen dataclasses.

Hashable and apart from arrays: a ModelSpec is a static argument of the step.
"""

import dataclasses

from kvjax.geometry import Leaf, Retention


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotary position embedding (Su et al. 2021), halves rotated against each other.

  Attributes:
    base: frequencies are base ** (-2i / head_dim).
    scale: positions are divided by this (linear scaling); 1 for none.
  """

  base: float
  scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Attention:
  """Attributes:
  heads, kv_heads, head_dim: query heads, key/value heads, size of each.
  retention: which past positions are read.
  rope: position embedding.
  scale: factor on the logits.
  qk_norm: RMS norm over head_dim on queries and keys before rope (Gemma 3).
  """

  heads: int
  kv_heads: int
  head_dim: int
  retention: Retention
  rope: Rope
  scale: float
  qk_norm: bool = False

  def __post_init__(self) -> None:
    if self.retention.chunk is not None or self.retention.state:
      raise ValueError(f"expected full or sliding-window attention, got {self.retention}")

  def leaves(self, dtype: str) -> tuple[Leaf, ...]:
    """What one token caches in this layer: key and value side by side in one array."""
    return (Leaf("kv", (self.kv_heads, 2 * self.head_dim), dtype),)


@dataclasses.dataclass(frozen=True)
class MLP:
  """Gated feed-forward: down(activation(gate(x)) * up(x)).

  Attributes:
    width: size of the hidden layer.
    activation: "silu" or "gelu_tanh".
  """

  width: int
  activation: str


@dataclasses.dataclass(frozen=True)
class Layer:
  """One decoder layer; `post_norms` adds an RMS norm after attention and MLP (Gemma 2 and 3)."""

  attention: Attention
  mlp: MLP
  post_norms: bool = False


@dataclasses.dataclass(frozen=True)
class ModelSpec:
  """Attributes:
  name: for people.
  vocab_size, width: rows of the embedding and size of the residual stream.
  layers: in order.
  norm_eps: of every RMS norm.
  embedding_scale: factor on embeddings (Gemma: sqrt(width)).
  tied_head: the output head is the embedding.
  max_length: context length in tokens that the model was made for.
  """

  name: str
  vocab_size: int
  width: int
  layers: tuple[Layer, ...]
  norm_eps: float
  embedding_scale: float
  tied_head: bool
  max_length: int


@dataclasses.dataclass(frozen=True)
class Group:
  """Layers that share page tables: one retention, one set of cached shapes."""

  name: str
  layers: tuple[int, ...]
  retention: Retention
  leaves: tuple[Leaf, ...]


def groups(spec: ModelSpec, cache_dtype: str) -> tuple[Group, ...]:
  """The cache groups of a model, in the order of their first layer.

  Names are the retention's ("full", "sliding"); where one retention kind has several shapes or
  windows, the later ones get a number ("sliding2").
  """
  found: dict[tuple[Retention, tuple[Leaf, ...]], list[int]] = {}
  for i, layer in enumerate(spec.layers):
    attention = layer.attention
    found.setdefault((attention.retention, attention.leaves(cache_dtype)), []).append(i)
  out: list[Group] = []
  for (retention, leaves), layers in found.items():
    same = sum(g.retention.name == retention.name for g in out)
    name = retention.name if not same else f"{retention.name}{same + 1}"
    out.append(Group(name, tuple(layers), retention, leaves))
  return tuple(out)


def parameter_count(spec: ModelSpec) -> int:
  """Weights of the model, norms included, a tied head counted once."""
  total = spec.vocab_size * spec.width * (1 if spec.tied_head else 2) + spec.width
  for layer in spec.layers:
    a, m = layer.attention, layer.mlp
    total += spec.width * (a.heads + 2 * a.kv_heads) * a.head_dim
    total += a.heads * a.head_dim * spec.width + 3 * spec.width * m.width
    total += spec.width * (4 if layer.post_norms else 2) + (2 * a.head_dim if a.qk_norm else 0)
  return total
