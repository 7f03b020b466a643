"""EngineState: everything that serving changes, as one frozen pytree.

Shapes: S slots, L max_length, P pages, T rows of a step, R sampled rows, E logit-bias entries.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from kvjax import pages as pages_lib
from kvjax.arrays import Array
from kvjax.geometry import NO_PAGE, GroupGeometry, Layout

FROM_STATE = -1
"""Token of a row whose id the state already knows (the last sampled one)."""

PoolLeaves = dict[str, Array]


class EngineState(struct.PyTreeNode):
  """Paged memory and what is known of each slot. Donate it to every step.

  `pages` may hold numpy arrays (the host loop plans there) or jax arrays.
  """

  pools: tuple[tuple[PoolLeaves, ...], ...]  # group -> layer -> leaf -> [P, page_size, *leaf.shape]
  pages: pages_lib.Pages  # tables and reference counts of each group
  tokens: Array  # int32 [S, L]  ids known so far: prompt, then sampled
  lengths: Array  # int32 [S]     tokens whose cache entries are written
  known: Array  # int32 [S]       ids that `admit` gave: sampling never overwrites them
  shortfall: Array  # int32 [groups]  pages that calls lacked, added up; 0 = none ever fell short
  layout: Layout = struct.field(pytree_node=False)  # static geometry of each group

  @property
  def slots(self) -> int:
    return self.tokens.shape[0]


def init(layout: Layout) -> EngineState:
  """An empty state for a layout from `kvjax.plan`: zeroed pools, every page free, empty slots."""
  slots = layout[0].max_sequences
  return EngineState(
    pools=tuple(tuple(_empty_pool(g) for _ in g.layers) for g in layout),
    pages=pages_lib.init(layout, jnp),
    tokens=jnp.zeros((slots, layout[0].max_length), jnp.int32),
    lengths=jnp.zeros((slots,), jnp.int32),
    known=jnp.zeros((slots,), jnp.int32),
    shortfall=jnp.zeros((len(layout),), jnp.int32),
    layout=layout,
  )


def _empty_pool(g: GroupGeometry) -> PoolLeaves:
  return {
    leaf.name: jnp.zeros((g.pages, g.page_size, *leaf.shape), jnp.dtype(leaf.dtype))
    for leaf in g.leaves
  }


def admit(state: EngineState, slot: int | Array, tokens: Any) -> EngineState:
  """Puts a new sequence into a slot: pure; usable under jit with a traced `slot`.

  What the slot held before is given back. Pages for the first min(len(tokens), step_tokens)
  tokens are reserved in every group; nothing is computed yet.

  Args:
    state: donated if the caller's jit says so.
    slot: which slot; an int is range-checked.
    tokens: int32 [n], 1 <= n <= max_length.

  Returns:
    The state. Where pages were missing the slot is left empty and `state.shortfall` grows by
    exactly the pages that each group lacked.

  Raises:
    ValueError: no tokens, more tokens than max_length, or a slot that does not exist.
  """
  tokens = jnp.asarray(tokens)
  if not jnp.issubdtype(tokens.dtype, jnp.integer):
    raise ValueError(f"tokens: expected integer ids, got {tokens.dtype}")
  tokens = tokens.astype(jnp.int32)
  longest = state.layout[0].max_length
  if tokens.ndim != 1 or not 1 <= len(tokens) <= longest:
    raise ValueError(f"tokens: expected 1 to {longest} ids in one dimension, got {tokens.shape}")
  if isinstance(slot, int | np.integer) and not 0 <= slot < state.slots:
    raise ValueError(f"slot: expected 0 to {state.slots - 1}, got {slot}")
  slots = jnp.asarray(slot, jnp.int32)[None]
  state = release(state, slots)
  state = state.replace(
    tokens=state.tokens.at[slots[0], : len(tokens)].set(tokens),
    known=state.known.at[slots].set(len(tokens), mode="drop"),
  )
  stop = min(len(tokens), min(g.step_tokens for g in state.layout))
  return reserve(state, slots, jnp.full((1,), stop, jnp.int32))


def reserve(state: EngineState, slots: Any, stops: Any, tokens: int | None = None) -> EngineState:
  """Makes the positions [lengths[slot], stop) of each slot writable: pure, usable under jit.

  Pages that a window has passed are given back, missing pages are taken, and a page shared with a
  fork is copied before it is written.

  Args:
    slots: int32 [n], distinct; outside [0, S) is padding.
    stops: int32 [n] positions, at most max_length.
    tokens: static bound on stops - lengths; step_tokens by default.

  Returns:
    The state. Where pages were missing no page was taken in any group, and `state.shortfall` grows
    by exactly the pages that each group lacked.
  """
  slots, stops = _slots(state, slots, distinct=True), jnp.atleast_1d(jnp.asarray(stops, jnp.int32))
  starts = state.lengths.at[slots].get(mode="clip")
  taken, copies, shortfall = pages_lib.reserve(
    _on_device(state.pages), state.layout, slots, starts, stops, tokens
  )
  pools = tuple(copy_pages(pool, c) for pool, c in zip(state.pools, copies, strict=True))
  return state.replace(pages=taken, pools=pools, shortfall=state.shortfall + shortfall)


def release(state: EngineState, slots: Any) -> EngineState:
  """Empties slots (int32 [n]) and gives back all their pages: pure, usable under jit."""
  slots = _slots(state, slots)
  return state.replace(
    pages=pages_lib.release(_on_device(state.pages), slots),
    lengths=state.lengths.at[slots].set(0, mode="drop"),
    known=state.known.at[slots].set(0, mode="drop"),
  )


def fork(state: EngineState, source: Any, target: Any) -> EngineState:
  """Makes each target slot a copy of its source slot: pages are shared, copied when written.

  Pure, usable under jit. `source` and `target` are slots or int32 [n]; targets are distinct and
  give back what they held; all copies happen at once, so `source` may permute and repeat.
  """
  sources = _slots(state, source)
  targets = _slots(state, target, distinct=True)
  if sources.shape != targets.shape:
    raise ValueError(f"expected as many sources as targets, got {sources.shape}, {targets.shape}")
  return state.replace(
    pages=pages_lib.fork(_on_device(state.pages), sources, targets),
    tokens=state.tokens.at[targets].set(state.tokens[sources], mode="drop"),
    lengths=state.lengths.at[targets].set(state.lengths[sources], mode="drop"),
    known=state.known.at[targets].set(state.known[sources], mode="drop"),
  )


def _slots(state: EngineState, slots: Any, distinct: bool = False) -> Array:
  """Slots as int32 [n]; negative ones are padding too. ValueError for known slots that repeat."""
  if distinct and not isinstance(slots, jax.Array):
    known = [int(s) for s in np.atleast_1d(slots) if 0 <= s < state.slots]
    if len(set(known)) < len(known):
      raise ValueError(f"slots: expected distinct ones, got {known}")
  slots = jnp.atleast_1d(jnp.asarray(slots, jnp.int32))
  return jnp.where(slots < 0, state.slots, slots)


def locate(
  g: GroupGeometry, pages: pages_lib.GroupPages, slots: Array, positions: Array
) -> tuple[Array, Array]:
  """Where the cache entry of each position lies: (page, offset in the page), int32 [n] each.

  NO_PAGE for padding slots (>= S) and for positions outside the pages that the slot holds, whose
  column in the table's ring may belong to another page.
  """
  logical = positions // g.page_size
  first, last = (
    jnp.asarray(x).at[slots].get(mode="fill", fill_value=0) for x in (pages.first, pages.last)
  )
  page = jnp.asarray(pages.table).at[slots, g.column(logical)].get(mode="fill", fill_value=NO_PAGE)
  held = (logical >= first) & (logical < last)
  return jnp.where(held, page, NO_PAGE), positions % g.page_size


def writable(
  g: GroupGeometry, pages: pages_lib.GroupPages, slots: Array, positions: Array
) -> tuple[Array, Array]:
  """`locate`, with NO_PAGE also for pages that another slot shares or that the cache keeps for
  others: they are copied before a write (`reserve`), never written."""
  page, offset = locate(g, pages, slots, positions)
  refs, stamp = (
    jnp.asarray(x).at[page].get(mode="fill", fill_value=0) for x in (pages.refs, pages.stamp)
  )
  shared = (refs > 1) | (stamp > 0)
  return jnp.where(shared, NO_PAGE, page), offset


def copy_pages(pool: tuple[PoolLeaves, ...], copies: pages_lib.Copies) -> tuple[PoolLeaves, ...]:
  """Copies whole pages in every layer of a group; does nothing when there is none to copy."""

  def copy(pool: tuple[PoolLeaves, ...]) -> tuple[PoolLeaves, ...]:
    return jax.tree.map(
      lambda x: x.at[copies.target].set(x.at[copies.source].get(mode="clip"), mode="drop"), pool
    )

  some = (copies.target < pool_pages(pool)).any()
  copied: tuple[PoolLeaves, ...] = jax.lax.cond(some, copy, lambda pool: pool, pool)
  return copied


def pool_pages(pool: tuple[PoolLeaves, ...]) -> int:
  """Pages of one group's pool."""
  return next(iter(pool[0].values())).shape[0]


def _on_device(pages: pages_lib.Pages) -> pages_lib.Pages:
  return jax.tree.map(jnp.asarray, pages)
