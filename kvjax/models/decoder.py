"""The one forward pass: rows in, hidden states out, keys and values written to their pages.

Shapes: T rows, E width, F MLP width, H heads, K KV heads, D head size, S slots, V vocabulary.
Weights are [out, in], as in GGUF and Hugging Face files: on every backend the product contracts
the last axis of both sides.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.arrays import Array
from kvjax.geometry import NO_PAGE, GroupGeometry
from kvjax.models.spec import Attention, Layer, ModelSpec, Rope
from kvjax.pages import GroupPages
from kvjax.state import EngineState, PoolLeaves, writable
from pallas_kernels import paged_attention

Params = dict[str, Any]
"""{"embed": [V, E], "norm": [E], "head": [V, E] unless tied, "layers": [layer, …]}; a layer is
{"qkv": [(H + 2K) D, E], "out": [E, H D], "gate_up": [2F, E], "down": [E, F], "attention_norm",
"mlp_norm": [E], and as declared "post_attention_norm", "post_mlp_norm": [E], "q_norm",
"k_norm": [D]}."""


_LEAST_ROWS = 4  # of a bfloat16 product with a weight matrix


def forward(
  params: Params,
  spec: ModelSpec,
  state: EngineState,
  tokens: Array,
  slots: Array,
  positions: Array,
  *,
  decode_rows: int,
  query_block: int,
  implementation: Any = None,
) -> tuple[Array, EngineState]:
  """Runs all layers over the rows of a step.

  Args:
    tokens, slots, positions: int32 [T]; slots >= S are padding.
    decode_rows, query_block: the layout of the rows, see `pallas_kernels.paged_attention`.

  Returns:
    (hidden [T, E] after the final norm, state with the rows' keys and values written).
  """
  x = params["embed"][tokens]
  if spec.embedding_scale != 1.0:
    # Gemma rounds the factor to the compute dtype.
    x = x * jnp.asarray(spec.embedding_scale, x.dtype)
  pools = [list(pool) for pool in state.pools]
  ropes: dict[tuple[Rope, int], tuple[Array, Array]] = {}
  where = {}
  for index, g in enumerate(state.layout):
    table = jnp.asarray(state.pages[index].table)
    target = writable(g, state.pages[index], slots, positions)
    for member, i in enumerate(g.layers):
      where[i] = (index, member, table, target)
  for i, (layer, weights) in enumerate(zip(spec.layers, params["layers"], strict=True)):
    group, member, table, target = where[i]
    key = (layer.attention.rope, layer.attention.head_dim)
    if key not in ropes:
      ropes[key] = _rope_table(*key, positions)
    with jax.named_scope(f"layer{i}"):
      x, pools[group][member] = _layer(
        x,
        weights,
        layer,
        spec.norm_eps,
        pools[group][member],
        target,
        ropes[key],
        table=table,
        slots=slots,
        positions=positions,
        decode_rows=decode_rows,
        query_block=query_block,
        implementation=implementation,
      )
  hidden = rms_norm(x, params["norm"], spec.norm_eps)
  return hidden, state.replace(pools=tuple(tuple(pool) for pool in pools))


def logits(params: Params, hidden: Array) -> Array:
  """Output head: hidden [R, E] -> float32 [R, V]."""
  head = params["head"] if "head" in params else params["embed"]
  return linear(hidden, head, jnp.float32)


def unreserved(state: EngineState, slots: Array, positions: Array) -> Array:
  """int32 [groups]: rows of a step that have no page of their own to be written to, or whose
  window reaches back to pages that were given back."""
  real = slots < state.slots

  def count(g: GroupGeometry, pages: GroupPages) -> Array:
    first = jnp.asarray(pages.first).at[slots].get(mode="clip")
    lacking = writable(g, pages, slots, positions)[0] == NO_PAGE
    return (real & (lacking | (g.first_page(positions) < first))).sum()

  counts = [count(g, pages) for g, pages in zip(state.layout, state.pages, strict=True)]
  return jnp.stack(counts).astype(jnp.int32)


def _layer(
  x: Array,
  weights: Params,
  layer: Layer,
  eps: float,
  pool: PoolLeaves,
  target: tuple[Array, Array],
  rope: tuple[Array, Array],
  **rows: Any,
) -> tuple[Array, PoolLeaves]:
  with jax.named_scope("attention"):
    h = rms_norm(x, weights["attention_norm"], eps)
    h, pool = _attention(h, weights, layer.attention, eps, pool, target, rope, **rows)
    h = linear(h, weights["out"])
    if layer.post_norms:
      h = rms_norm(h, weights["post_attention_norm"], eps)
    x = x + h
  with jax.named_scope("mlp"):
    h = rms_norm(x, weights["mlp_norm"], eps)
    gate, up = jnp.split(linear(h, weights["gate_up"]), 2, axis=-1)
    h = linear(ACTIVATIONS[layer.mlp.activation](gate) * up, weights["down"])
    if layer.post_norms:
      h = rms_norm(h, weights["post_mlp_norm"], eps)
    return x + h, pool


def _attention(
  x: Array,
  weights: Params,
  a: Attention,
  eps: float,
  pool: PoolLeaves,
  target: tuple[Array, Array],
  rope: tuple[Array, Array],
  **rows: Any,
) -> tuple[Array, PoolLeaves]:
  """Projects, writes keys and values to their pages, and attends; [T, E] -> [T, H D]."""
  qkv = linear(x, weights["qkv"]).reshape(len(x), a.heads + 2 * a.kv_heads, a.head_dim)
  query, key, value = jnp.split(qkv, [a.heads, a.heads + a.kv_heads], axis=1)
  if a.qk_norm:
    query = rms_norm(query, weights["q_norm"], eps)
    key = rms_norm(key, weights["k_norm"], eps)
  query, key = _rotate(query, rope), _rotate(key, rope)
  kv = jnp.concatenate([key, value], axis=-1).astype(pool["kv"].dtype)
  pool = {**pool, "kv": _write(pool["kv"], target, kv)}
  out = paged_attention(
    query.astype(pool["kv"].dtype),
    pool["kv"],
    scale=a.scale,
    window=a.retention.window,
    **rows,
  )
  return out.astype(x.dtype).reshape(len(x), a.heads * a.head_dim), pool


def _write(pool: Array, target: tuple[Array, Array], entries: Array) -> Array:
  """The pool [P, page_size, …] with entries [T, …] at (page, offset); NO_PAGE writes nothing."""
  page, offset = target
  if len(page) == 1:
    # XLA turns a scatter of one row into an update and a select, which copies the whole pool.
    page = jnp.pad(page, (0, 1), constant_values=NO_PAGE)
    offset = jnp.pad(offset, (0, 1))
    entries = jnp.pad(entries, ((0, 1), *((0, 0),) * (entries.ndim - 1)))
  return pool.at[page, offset].set(entries, mode="drop")


def linear(x: Array, weight: Array, dtype: Any = None) -> Array:
  """x [n, in] · weight [out, in]ᵀ, accumulated in float32; float32 inputs at full precision."""
  precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  rows = len(x)
  if x.dtype == jnp.bfloat16:
    # XLA on CPU walks a bfloat16 matrix element by element for a single row.
    x = jnp.pad(x, ((0, max(_LEAST_ROWS - rows, 0)), (0, 0)))
  out = lax.dot_general(
    x,
    weight,
    (((1,), (1,)), ((), ())),
    precision=precision,
    preferred_element_type=dtype or x.dtype,
  )
  return out[:rows]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
  """x / rms(x) * weight over the last axis, computed in float32 (Zhang & Sennrich 2019)."""
  y = x.astype(jnp.float32)
  y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
  return (y * weight.astype(jnp.float32)).astype(x.dtype)


def _rope_table(rope: Rope, head_dim: int, positions: Array) -> tuple[Array, Array]:
  """cos and sin, float32 [T, 1, D / 2]."""
  exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  angle = positions[:, None].astype(jnp.float32) / rope.scale / rope.base**exponent
  return jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]


def _rotate(x: Array, rope: tuple[Array, Array]) -> Array:
  cos, sin = rope
  low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)


ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


__all__ = ["Params", "forward", "linear", "logits", "rms_norm", "unreserved"]
