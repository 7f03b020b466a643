"""Packing pages of one group into one contiguous array, and back: pure, usable under jit.

The order of elements in a page is the geometry's: layer by layer, leaf by leaf, token by token. It
is never inferred from shapes (KV heads and tokens of a page can be equally many); what was packed
for one geometry is named by it (`kvjax.prefix.namespace`, `piece.LAYOUT_VERSION`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.arrays import Array
from kvjax.geometry import GroupGeometry
from kvjax.state import EngineState


def chunk_dtype(g: GroupGeometry) -> Any:
  """Type of a packed page's elements: that of the leaves, bytes where they differ."""
  kinds = {jnp.dtype(leaf.dtype) for leaf in g.leaves}
  return kinds.pop() if len(kinds) == 1 else jnp.dtype(jnp.uint8)


def page_elements(g: GroupGeometry) -> int:
  """Elements of one packed page."""
  return g.page_bytes // chunk_dtype(g).itemsize


def pack(state: EngineState, group: int, pages: Any) -> Array:
  """Pages of one group, all its layers and leaves, as one contiguous array.

  Args:
    group: index in state.layout, static.
    pages: int32 [n] physical pages; those past the pool read the last one.

  Returns:
    [n, page_elements] of `chunk_dtype`; the bits are those of the pool.
  """
  return pack_pool(state.pools[group], state.layout[group], pages)


def unpack(state: EngineState, group: int, pages: Any, chunk: Any) -> EngineState:
  """Writes packed pages (`pack`) into physical pages of a group; donate the state.

  Args:
    pages: int32 [n] distinct; NO_PAGE writes nothing.
    chunk: [n, page_elements] of `chunk_dtype`.

  Raises:
    ValueError: a chunk of another shape or type.
  """
  pools = list(state.pools)
  pools[group] = unpack_pool(pools[group], state.layout[group], pages, chunk)
  return state.replace(pools=tuple(pools))


def pack_pool(pool: Any, g: GroupGeometry, pages: Any) -> Array:
  """`pack` on the pools of one group's layers."""
  pages, dtype = jnp.asarray(pages, jnp.int32), chunk_dtype(g)
  parts = []
  for layer in pool:
    for leaf in g.leaves:
      x = layer[leaf.name].at[pages].get(mode="clip")
      if x.dtype != dtype:
        x = jax.lax.bitcast_convert_type(x, dtype)
      parts.append(x.reshape(len(pages), -1))
  return jnp.concatenate(parts, axis=1)


def unpack_pool(pool: Any, g: GroupGeometry, pages: Any, chunk: Any) -> Any:
  """`unpack` on the pools of one group's layers."""
  pages, dtype = jnp.asarray(pages, jnp.int32), chunk_dtype(g)
  want = (len(pages), page_elements(g))
  if chunk.shape != want or chunk.dtype != dtype:
    raise ValueError(
      f"chunk: expected {dtype} {want} for {len(pages)} pages of group {g.name}, got {chunk.dtype} "
      f"{chunk.shape}"
    )
  out, at = [], 0
  for layer in pool:
    new = {}
    for leaf in g.leaves:
      target = jnp.dtype(leaf.dtype)
      width = g.page_size * math.prod(leaf.shape) * target.itemsize // dtype.itemsize
      x = chunk[:, at : at + width]
      at += width
      shape = (len(pages), g.page_size, *leaf.shape)
      if dtype != target:
        more = (target.itemsize,) if target.itemsize > 1 else ()
        x = jax.lax.bitcast_convert_type(x.reshape(*shape, *more), target)
      new[leaf.name] = layer[leaf.name].at[pages].set(x.reshape(shape), mode="drop")
    out.append(new)
  return tuple(out)
