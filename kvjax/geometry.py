"""GroupGeometry: every number that describes the cache of one group of layers, in one place.

Layers whose cache has the same shape and the same retention form a group. No size in kvjax is
global: page size, bytes, retention, table width and pool size belong to a group, and the planner,
the allocator, the steps, the host loop and the reports all ask this object.

Positions count tokens of one sequence from 0. A *length* n means that the positions [0, n) have
been processed. A *logical page* i covers the positions [i * page_size, (i + 1) * page_size).
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

NO_PAGE = 2**31 - 1
"""Table entry without a page. Larger than any pool, so that scatters in `drop` mode skip it."""

MAX_POOL_ELEMENTS = 2**31 - 1
"""Elements of one pool array that 32-bit index arithmetic can address."""


@dataclasses.dataclass(frozen=True)
class Retention:
  """Which past positions a layer may still read.

  Attributes:
    window: None when every position stays readable (full attention); W when the token at position
      p reads [p - (W - 1), p] (sliding window, itself included).
  """

  window: int | None = None

  def __post_init__(self) -> None:
    if self.window is not None and self.window < 1:
      raise ValueError(f"window: expected at least 1 token or None, got {self.window}")

  @property
  def name(self) -> str:
    return "full" if self.window is None else "sliding"

  def first_readable(self, length: Any) -> Any:
    """First position that a token at position >= `length` may read.

    Works on ints and on integer arrays of either namespace (elementwise).
    """
    if self.window is None:
      return length * 0
    start = length - (self.window - 1)
    return start * (start > 0)

  def __str__(self) -> str:
    return "all positions" if self.window is None else f"last {self.window} positions"


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One cached array of a layer: `shape` is what one token stores."""

  name: str
  shape: tuple[int, ...]
  dtype: str

  @property
  def token_bytes(self) -> int:
    return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class GroupGeometry:
  """The geometry of one group. Hashable: it is a static part of the engine state.

  Attributes:
    name: "full", "sliding", … (a suffix tells groups of one retention with other shapes apart).
    layers: indices of the model's layers that share these page tables.
    page_size: tokens per page.
    retention: which positions stay readable.
    leaves: arrays that each layer of the group caches.
    pages: pages in the pool, shared by all sequences.
    max_length: most tokens of one sequence.
    step_tokens: most tokens that one sequence gains in one step.
    max_sequences: rows of the page table: sequences that can run at once.
  """

  name: str
  layers: tuple[int, ...]
  page_size: int
  retention: Retention
  leaves: tuple[Leaf, ...]
  pages: int
  max_length: int
  step_tokens: int
  max_sequences: int

  def __post_init__(self) -> None:
    for field in ("page_size", "pages", "max_length", "step_tokens", "max_sequences"):
      if getattr(self, field) < 1:
        raise ValueError(
          f"group {self.name!r}: {field}: expected at least 1, got {getattr(self, field)}"
        )
    for leaf in self.leaves:
      elements = self.pages * self.page_size * math.prod(leaf.shape)
      if elements > MAX_POOL_ELEMENTS:
        raise ValueError(
          f"group {self.name!r}: a pool of {self.pages} pages of {self.page_size} tokens × "
          f"{leaf.shape} has {elements} elements; expected at most {MAX_POOL_ELEMENTS} "
          "(32-bit indices). Use fewer pages or less memory."
        )

  # Bytes.

  @property
  def token_bytes(self) -> int:
    """Bytes that one token takes in all layers of the group."""
    return len(self.layers) * sum(leaf.token_bytes for leaf in self.leaves)

  @property
  def page_bytes(self) -> int:
    """Bytes of one page in all layers of the group."""
    return self.page_size * self.token_bytes

  @property
  def pool_bytes(self) -> int:
    """Bytes of the whole pool."""
    return self.pages * self.page_bytes

  # Pages. These work on ints and on integer arrays of either namespace.

  def pages_for(self, length: Any) -> Any:
    """Logical pages that [0, length) touches: ceil(length / page_size)."""
    return (length + (self.page_size - 1)) // self.page_size

  def first_page(self, length: Any) -> Any:
    """First logical page that a token at position >= `length` may read or write."""
    return self.retention.first_readable(length) // self.page_size

  def coverage(self, length: int) -> range:
    """Logical pages that must be held to continue from `length` processed tokens.

    The allocator keeps exactly these between steps, and a reader can ask for no others.
    """
    return range(self.first_page(length), self.pages_for(length))

  def span(self, length: int, tokens: int) -> range:
    """Logical pages held while the positions [length, length + tokens) are computed."""
    return range(self.first_page(length), self.pages_for(length + tokens))

  def column(self, logical_page: Any) -> Any:
    """Where a logical page stands in a row of the page table.

    A row is a ring as wide as the most pages that a sequence can hold at once, so that a sliding
    group's table does not grow with the context. For full attention this is the identity.
    """
    return logical_page % self.table_width

  def peak_pages(self, length: int, step_tokens: int | None = None) -> int:
    """Most pages that one sequence holds at once on its way to `length` tokens.

    Full attention: ceil(length / page). A window of W tokens read and s written in one step are
    W - 1 + s consecutive positions, which touch at most ceil((W - 2 + s) / page) + 1 pages.
    """
    total = self.pages_for(length)
    if self.retention.window is None:
      return total
    step = min(self.step_tokens if step_tokens is None else step_tokens, length)
    return min(total, self.pages_for(self.retention.window - 2 + step) + 1)

  @property
  def table_width(self) -> int:
    """Entries in one row of the page table."""
    return self.peak_pages(self.max_length)

  def pages_per_step(self, tokens: int) -> int:
    """Most new pages that one sequence can need for `tokens` further tokens."""
    return min(self.pages_for(max(tokens - 1, 0)) + 1, self.pages_for(self.max_length))

  def sequences(self, length: int) -> int:
    """How many sequences of `length` tokens the pool holds at once without any shortfall.

    They come one after the other: while one computes its chunks of up to step_tokens, the others
    decode, and hold one window each wherever it stands.
    """
    peak = self.peak_pages(length)
    if peak > self.pages:
      return 0
    return 1 + (self.pages - peak) // self.peak_pages(length, 1)

  def longest(self, pages: int) -> int:
    """Most tokens that a sequence with `pages` pages to itself can reach, at most max_length."""
    if self.peak_pages(self.max_length) <= pages:
      return self.max_length
    return pages * self.page_size


Layout = tuple[GroupGeometry, ...]
"""The groups of one model, in the order of their first layer."""


def token_bytes(layout: Layout) -> int:
  """Bytes that one more token takes while every group still retains everything."""
  return sum(group.token_bytes for group in layout)


def pool_bytes(layout: Layout) -> int:
  """Bytes of all pools."""
  return sum(group.pool_bytes for group in layout)


def sequence_bytes(layout: Layout, length: int) -> int:
  """Peak bytes of the pages that one sequence of `length` tokens holds."""
  return sum(group.peak_pages(length) * group.page_bytes for group in layout)


def concurrency(layout: Layout, length: int) -> int:
  """How many sequences of `length` tokens the pools hold at once, see GroupGeometry.sequences."""
  return min(group.sequences(length) for group in layout)


def longest(layout: Layout) -> int:
  """Most tokens that a single sequence with all pools to itself can reach."""
  return min(group.longest(group.pages) for group in layout)
