"""Ragged paged attention: one signature over mixed prefill and decode rows.

Shapes: T query rows, H query heads, K key/value heads, D key size, Dv value size, P pages,
S sequences, W table width, N query blocks of B rows.

The T rows are laid out as `decode_rows` single-token rows, then N = (T - decode_rows) / B query
blocks, each with up to B consecutive tokens of one sequence; rows with slot >= S are padding.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import attention_xla

IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {"xla": attention_xla.paged_attention}
"""Name -> implementation, in the order in which `implementation=None` tries them.

An implementation that does not serve a platform, dtype or geometry raises NotImplementedError
with the reason, and the next one is tried.
"""


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
  window: int | None = None,
  softcap: float | None = None,
  implementation: str | Sequence[str] | None = None,
) -> jax.Array:
  """Causal attention of every row over the cached positions of its own sequence.

  Row t with position p reads the positions q <= p of its sequence, with q > p - window where a
  window is given: softmax(softcap(scale * query · key)) · value, accumulated in float32. The keys
  and values of the rows themselves must already be in the pool. Table entries of positions that
  no row may read are never used, whatever they or their pages hold.

  Args:
    query: [T, H, D].
    pool: [P, page_size, K, D + Dv], key and value of a token side by side; H is a multiple of K.
    table: int32 [S, W]; logical page l of sequence s is page table[s, l % W].
    slots: int32 [T] sequence of each row; within a query block the rows of its one sequence come
      first, padding after them.
    positions: int32 [T] position of each row in its sequence.
    decode_rows, query_block: the static layout of the rows.
    scale: factor on the logits before softcap and softmax.
    window: static sliding window in tokens, the row's own position included; None = all.
    softcap: static c for logits c * tanh(logits / c) (Gemma 2); None = none.
    implementation: None tries all in order; a name or a sequence of names tries those.

  Returns:
    [T, H, Dv] in the query's dtype; padding rows hold zeros.

  Raises:
    ValueError: shapes or options that no implementation could accept, with the values.
    NotImplementedError: every implementation tried refused, with each reason.
  """
  validate(query, pool, table, slots, positions, decode_rows, query_block, window, softcap)
  reasons = []
  for name in choices(implementation):
    try:
      return IMPLEMENTATIONS[name](
        query,
        pool,
        table,
        slots,
        positions,
        decode_rows=decode_rows,
        query_block=query_block,
        scale=scale,
        window=window,
        softcap=softcap,
      )
    except NotImplementedError as e:
      reasons.append(f"{name}: {e}")
  raise NotImplementedError("no implementation of paged_attention fits: " + "; ".join(reasons))


def choices(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
  """The implementations to try, in order. ValueError for a name that does not exist."""
  if implementation is None:
    return tuple(IMPLEMENTATIONS)
  names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
  for name in names:
    if name not in IMPLEMENTATIONS:
      raise ValueError(f"implementation: expected one of {list(IMPLEMENTATIONS)}, got {name!r}")
  return names


def validate(
  query: jax.Array,
  pool: jax.Array,
  table: jax.Array,
  slots: jax.Array,
  positions: jax.Array,
  decode_rows: int,
  query_block: int,
  window: int | None,
  softcap: float | None = None,
) -> None:
  """Static checks of `paged_attention`'s arguments: shapes and dtypes, never values."""
  if query.ndim != 3 or pool.ndim != 4 or table.ndim != 2:
    raise ValueError(
      "expected query [T, H, D], pool [P, page, K, D + Dv] and table [S, W], "
      f"got {query.shape}, {pool.shape}, {table.shape}"
    )
  if 0 in (*query.shape, *pool.shape, *table.shape):
    raise ValueError(
      f"expected no empty dimension, got query {query.shape}, pool {pool.shape}, "
      f"table {table.shape}"
    )
  for name, array in (("table", table), ("slots", slots), ("positions", positions)):
    if array.dtype != jnp.int32:
      raise ValueError(f"{name}: expected int32, got {array.dtype}")
  rows, heads, size = query.shape
  if heads % pool.shape[2]:
    raise ValueError(f"expected query heads a multiple of KV heads, got {heads}, {pool.shape[2]}")
  if pool.shape[3] <= size:
    raise ValueError(f"expected pool rows wider than the key size {size}, got {pool.shape[3]}")
  if slots.shape != (rows,) or positions.shape != (rows,):
    raise ValueError(f"expected slots and positions [{rows}], got {slots.shape}, {positions.shape}")
  if not 0 <= decode_rows <= rows or query_block < 1 or (rows - decode_rows) % query_block:
    raise ValueError(
      f"expected {rows} rows = decode_rows + a multiple of query_block, got decode_rows "
      f"{decode_rows} and query_block {query_block}"
    )
  if query.dtype != pool.dtype:
    raise ValueError(f"expected query and pool of one dtype, got {query.dtype}, {pool.dtype}")
  if window is not None and window < 1:
    raise ValueError(f"window: expected at least 1, got {window}")
  if softcap is not None and not softcap > 0:
    raise ValueError(f"softcap: expected a number above 0 or None, got {softcap}")
