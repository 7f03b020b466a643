"""Paged attention in plain XLA operations: runs everywhere, and is the reference for kernels.

The online softmax of FlashAttention (Dao et al. 2022) over blocks of keys: a loop whose trip count
follows the longest sequence at run time, so that one compiled shape serves every context length.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

KEY_BLOCK = 128  # keys per iteration, rounded to whole pages
SEQUENCE_BLOCK = 4  # decode rows that share one key loop, and so wait for the longest of them

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_MASKED = -1e30  # finite, so that a block without any readable key gives no NaN


def paged_attention(
  query: jax.Array,
  pool: jax.Array,
  table: jax.Array,
  slots: jax.Array,
  positions: jax.Array,
  *,
  decode_rows: int,
  query_block: int,
  scale: float,
  window: int | None,
  softcap: float | None,
) -> jax.Array:
  """See `pallas_kernels.attention.paged_attention`."""
  attend = functools.partial(_attend, pool, table, scale=scale, window=window, softcap=softcap)
  out = []
  if decode_rows:
    out.append(_decode(attend, query[:decode_rows], slots[:decode_rows], positions[:decode_rows]))
  if len(query) > decode_rows:
    out.append(
      _prefill(
        attend, query[decode_rows:], slots[decode_rows:], positions[decode_rows:], query_block
      )
    )
  return jnp.concatenate(out) if len(out) > 1 else out[0]


def _decode(attend: Attend, query: jax.Array, slots: jax.Array, positions: jax.Array) -> jax.Array:
  """Rows of one token each, in blocks of SEQUENCE_BLOCK rows."""
  rows = len(query)
  block = min(rows, SEQUENCE_BLOCK)
  pad = -rows % block
  query = jnp.pad(query, ((0, pad), (0, 0), (0, 0)))
  slots = jnp.pad(slots, (0, pad), constant_values=jnp.iinfo(jnp.int32).max)
  positions = jnp.pad(positions, (0, pad))

  def one(args: tuple[jax.Array, ...]) -> jax.Array:
    q, s, p = args
    return attend(q[:, None], s[:, None], p[:, None])[:, 0]

  split = tuple(x.reshape(-1, block, *x.shape[1:]) for x in (query, slots, positions))
  out = one(tuple(x[0] for x in split))[None] if rows <= block else lax.map(one, split)
  return out.reshape(-1, *out.shape[2:])[:rows]


def _prefill(
  attend: Attend, query: jax.Array, slots: jax.Array, positions: jax.Array, query_block: int
) -> jax.Array:
  """Query blocks, one after the other: each is a matrix product of its own."""

  def one(args: tuple[jax.Array, ...]) -> jax.Array:
    q, s, p = args
    return attend(q[None], s[None], p[None])[0]

  split = tuple(x.reshape(-1, query_block, *x.shape[1:]) for x in (query, slots, positions))
  out = one(tuple(x[0] for x in split))[None] if len(split[0]) == 1 else lax.map(one, split)
  return out.reshape(-1, *out.shape[2:])


def _attend(
  pool: jax.Array,
  table: jax.Array,
  query: jax.Array,
  slots: jax.Array,
  positions: jax.Array,
  *,
  scale: float,
  window: int | None,
  softcap: float | None,
) -> jax.Array:
  """query [n, B, H, D], slots and positions [n, B] -> [n, B, H, Dv]."""
  n, block, heads, size = query.shape
  _, page_size, kv_heads, width = pool.shape
  value_size, group = width - size, heads // kv_heads
  pages = max(1, KEY_BLOCK // page_size)
  keys = pages * page_size

  valid = slots < len(table)
  # A block's valid rows come first, so its first row names the sequence.
  rows = table.at[slots[:, 0]].get(mode="clip")
  positions = jnp.where(valid, positions, -1)
  stop = positions.max() + 1
  start = jnp.zeros((), jnp.int32)
  if window is not None:
    lowest = jnp.where(valid, positions, jnp.iinfo(jnp.int32).max).min()
    start = jnp.maximum(lowest - (window - 1), 0)

  flat = pool.reshape(len(pool), -1)  # a page is one row: gathered twice as fast on CPU

  # Rows of one KV head become rows of one product: [n, K, B * group, D].
  q = query.reshape(n, block, kv_heads, group, size)
  q = q.transpose(0, 2, 1, 3, 4).reshape(n, kv_heads, block * group, size)
  precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
  einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)

  def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    most, total, acc = carry
    logical = i * pages + jnp.arange(pages, dtype=jnp.int32)
    column = logical % table.shape[1]
    kv = flat.at[rows[:, column]].get(mode="clip").reshape(n, keys, kv_heads, width)
    at = i * keys + jnp.arange(keys, dtype=jnp.int32)
    readable = at <= positions[:, :, None]
    if window is not None:
      readable &= at > positions[:, :, None] - window
    # Values that nobody may read can be anything, NaN included, and 0 * NaN is NaN.
    value = jnp.where(readable.any(1)[:, :, None, None], kv[..., size:], 0)
    # Scaled here and not in the query, where bfloat16 would round the product.
    logits = scale * einsum("nkqd,nckd->nkqc", q, kv[..., :size])
    if softcap is not None:
      logits = softcap * jnp.tanh(logits / softcap)
    mask = jnp.repeat(readable, group, axis=1)[:, None]
    logits = jnp.where(mask, logits, _MASKED)
    new = jnp.maximum(most, logits.max(-1))
    weight = jnp.where(mask, jnp.exp(logits - new[..., None]), 0)
    old = jnp.exp(most - new)
    acc = acc * old[..., None] + einsum("nkqc,nckd->nkqd", weight.astype(value.dtype), value)
    return new, total * old + weight.sum(-1), acc

  shape = (n, kv_heads, block * group)
  init = (
    jnp.full(shape, _MASKED, jnp.float32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros((*shape, value_size), jnp.float32),
  )
  _, total, acc = lax.fori_loop(start // keys, (stop + keys - 1) // keys, body, init)
  out = (acc / jnp.where(total == 0, 1, total)[..., None]).astype(query.dtype)
  out = out.reshape(n, kv_heads, block, group, value_size).transpose(0, 2, 1, 3, 4)
  return out.reshape(n, block, heads, value_size)
