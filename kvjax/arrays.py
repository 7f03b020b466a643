"""Functional scatters that accept numpy and jax arrays alike.

The page allocator is one piece of code: the host loop calls it with numpy arrays (microseconds,
no device), research code calls it inside jit with jax arrays. Everything else that it needs has
the same spelling in both namespaces; scatters do not.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Array = Any
"""A numpy or a jax array."""


def namespace(x: Array) -> Any:
  """numpy for numpy arrays, jax.numpy for jax arrays and tracers."""
  return np if isinstance(x, np.ndarray) else jax.numpy


def scatter_set(x: Array, index: tuple[Array, ...] | Array, values: Array) -> Array:
  """A copy of x with x[index] = values; indices past the end are dropped, not errors."""
  return _scatter(x, index, values, np.ndarray.__setitem__, "set")


def scatter_add(x: Array, index: tuple[Array, ...] | Array, values: Array) -> Array:
  """A copy of x with values added at index (repeats add up); indices past the end are dropped."""
  return _scatter(x, index, values, np.add.at, "add")


def scatter_max(x: Array, index: tuple[Array, ...] | Array, values: Array) -> Array:
  """A copy of x with x[index] = max(x[index], values); indices past the end are dropped."""
  return _scatter(x, index, values, np.maximum.at, "max")


def _scatter(
  x: Array, index: Any, values: Array, on_host: Callable[..., None], on_device: str
) -> Array:
  if isinstance(x, np.ndarray):
    index, values = _inside(x, index, values)
    out = x.copy()
    on_host(out, index, values)
    return out
  return getattr(x.at[index], on_device)(values, mode="drop")


def gather(x: Array, index: Array) -> Array:
  """x[index] along the first axis; indices past the end read the last row."""
  if isinstance(x, np.ndarray):
    return x.take(index, axis=0, mode="clip")
  return x.at[index].get(mode="clip")


def gather2(x: Array, row: Array, column: Array) -> Array:
  """x[row, column], broadcast; a row past the end reads the last one."""
  if isinstance(x, np.ndarray):
    return x[np.minimum(row, len(x) - 1), column]
  return x.at[row, column].get(mode="clip")


def _inside(x: np.ndarray, index: Any, values: Any) -> tuple[Any, Any]:
  """Index and values without those past the end, which numpy would refuse."""
  index = index if isinstance(index, tuple) else (index,)
  if index[0].size and all(i.max() < size for i, size in zip(index, x.shape, strict=False)):
    return index, values
  index = np.broadcast_arrays(*index)
  values = np.broadcast_to(values, index[0].shape)
  inside = np.logical_and.reduce([i < size for i, size in zip(index, x.shape, strict=False)])
  return tuple(i[inside] for i in index), values[inside]
