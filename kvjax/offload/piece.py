"""Pieces: what the tiers keep. One piece holds consecutive pages of one group, all its layers."""

import dataclasses
from typing import Any

LAYOUT_VERSION = 1
"""Of the order of bytes within a piece; a part of every namespace."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
  """Immutable pages of one group, named by content.

  Attributes:
    key: names group, namespace and every token up to the last page's end (32 bytes).
    group: the group's name.
    first: the logical page that stands first.
    array: [pages, elements], one row for each page: every layer's leaves in the geometry's order.
      A numpy array, or a jax array in host memory.
  """

  key: bytes
  group: str
  first: int
  array: Any

  @property
  def count(self) -> int:
    """Pages."""
    return int(self.array.shape[0])

  @property
  def nbytes(self) -> int:
    return int(self.array.nbytes)
