"""Cache entries of one sequence by layer and position: reading and editing between steps.

Pure and usable under jit (`layer` static). A position has an entry while the layer's group holds
its page: from the moment the position is computed until a sliding window passes its whole page.

Shapes: n positions; an entry of a leaf has the leaf's shape, for "kv" [K, 2 D]: key and value side
by side, the key normed and rotated as attention reads it.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from kvjax import pages as pages_lib
from kvjax.arrays import Array
from kvjax.geometry import NO_PAGE
from kvjax.state import EngineState, copy_pages, locate, writable


def cached(state: EngineState, layer: int, slot: Any, positions: Any) -> Array:
  """Which positions of a slot have an entry in a layer: bool [n].

  Args:
    layer: index of the model's layer, static.
    slot: an int or int32 [].
    positions: int32 [n].

  Raises:
    ValueError: the layer or the slot (when an int) does not exist, or positions are not [n].
  """
  group, _ = _member(state, layer)
  positions = _positions(state, slot, positions)
  page, _ = _locate(state, group, slot, positions)
  return (page != NO_PAGE) & (positions < state.lengths[slot])


def read_cache(state: EngineState, layer: int, slot: Any, positions: Any) -> dict[str, Array]:
  """Entries of one layer: leaf name -> [n, *leaf.shape] in the cache's dtype.

  Positions without an entry (not computed yet, or passed by the window and given back) read as
  NaN, so that nobody takes them for entries; `cached` tells which they are. Arguments and errors
  as in `cached`.
  """
  group, member = _member(state, layer)
  there = cached(state, layer, slot, positions)
  page, offset = _locate(state, group, slot, _positions(state, slot, positions))
  page = jnp.where(there, page, NO_PAGE)
  return {
    name: pool.at[page, offset].get(mode="fill", fill_value=jnp.nan)
    for name, pool in state.pools[group][member].items()
  }


def write_cache(
  state: EngineState, layer: int, slot: Any, positions: Any, values: Mapping[str, Any]
) -> EngineState:
  """Replaces entries of one layer.

  Pages that a fork shares are copied first, so that the other holders keep theirs: in the layer's
  group, from the page of the first position to that of the last. Positions whose page the slot
  does not hold are left out, as `cached` would tell; positions that are reserved but not computed
  yet are written.

  Args:
    state: donate it (`donate_argnames="state"`), or the pools are copied.
    positions: int32 [n], distinct.
    values: leaf name -> [n, *leaf.shape], cast to the cache's dtype; leaves not named stay.

  Returns:
    The state. Where the group lacked pages for the copies, entries on shared pages are not written
    and `state.shortfall` grows by exactly the pages lacking.

  Raises:
    ValueError: as in `cached`, a leaf that the layer does not have, or values of another shape.
  """
  group, member = _member(state, layer)
  positions = _positions(state, slot, positions)
  leaves = {leaf.name: leaf for leaf in state.layout[group].leaves}
  for name, value in values.items():
    if name not in leaves:
      raise ValueError(f"values: expected leaves among {list(leaves)}, got {name!r}")
    want = (len(positions), *leaves[name].shape)
    if jnp.shape(value) != want:
      raise ValueError(f"values[{name!r}]: expected shape {want}, got {jnp.shape(value)}")
  state = _unshare(state, group, slot, positions)
  slots = jnp.full(positions.shape, slot, jnp.int32)
  page, offset = writable(state.layout[group], state.pages[group], slots, positions)
  pools = [list(pool) for pool in state.pools]
  pool = pools[group][member]
  pools[group][member] = pool | {
    name: pool[name].at[page, offset].set(jnp.asarray(x, pool[name].dtype), mode="drop")
    for name, x in values.items()
  }
  return state.replace(pools=tuple(tuple(pool) for pool in pools))


def _member(state: EngineState, layer: int) -> tuple[int, int]:
  """(group, place in the group) of a layer."""
  for index, g in enumerate(state.layout):
    if layer in g.layers:
      return index, g.layers.index(layer)
  count = sum(len(g.layers) for g in state.layout)
  raise ValueError(f"layer: expected 0 to {count - 1}, got {layer!r}")


def _positions(state: EngineState, slot: Any, positions: Any) -> Array:
  if isinstance(slot, int) and not 0 <= slot < state.slots:
    raise ValueError(f"slot: expected 0 to {state.slots - 1}, got {slot}")
  out = jnp.asarray(positions, jnp.int32)
  if out.ndim != 1:
    raise ValueError(f"positions: expected one dimension, got {out.shape}")
  return out


def _locate(state: EngineState, group: int, slot: Any, positions: Array) -> tuple[Array, Array]:
  slots = jnp.full(positions.shape, slot, jnp.int32)
  return locate(state.layout[group], state.pages[group], slots, positions)


def _unshare(state: EngineState, group: int, slot: Any, positions: Array) -> EngineState:
  """Copies the shared pages of one group between the first and the last held position."""
  g, slots = state.layout[group], jnp.asarray(slot, jnp.int32)[None]
  page, _ = _locate(state, group, slot, positions)
  held = page != NO_PAGE
  far = jnp.iinfo(jnp.int32).max
  start = jnp.where(held, positions, far).min(initial=far)
  stop = jnp.where(held, positions + 1, 0).max(initial=0)
  # The allocator also gives back what no position >= start can read: nothing that is needed later.
  slots = jnp.where(held.any(), slots, state.slots)
  taken, copies, shortfall = pages_lib.reserve(
    (state.pages[group],),
    (g,),
    slots,
    jnp.minimum(start, state.lengths[slot])[None],
    stop[None],
    g.max_length,
  )
  pages, pools = list(state.pages), list(state.pools)
  pages[group], pools[group] = taken[0], copy_pages(pools[group], copies[0])
  return state.replace(
    pages=tuple(pages),
    pools=tuple(pools),
    shortfall=state.shortfall.at[group].add(shortfall[0]),
  )
