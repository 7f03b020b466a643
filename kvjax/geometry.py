"""GroupGeometry: every number that describes the cache of one group of layers, in one place.

Layers whose cache has the same shape and the same retention form a group. No size in kvjax is
global: page size, bytes, retention, table width and pool size belong to a group, and the planner,
the allocator, the steps, the host loop and the reports all ask this object.

Positions count tokens of one sequence from 0. A *length* n means that the positions [0, n) have
been processed. A *logical page* i covers the positions [i * page_size, (i + 1) * page_size).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

NO_PAGE = 2**31 - 1
"""Table entry without a page. Larger than any pool, so that scatters in `drop` mode skip it."""

MAX_POOL_ELEMENTS = 2**31 - 1
"""Elements of one pool array that 32-bit index arithmetic can address."""


@dataclasses.dataclass(frozen=True)
class Retention:
  """Which past positions a layer may still read; at most one attribute is set.

  Attributes:
    window: W when the token at position p reads [p - (W - 1), p] (sliding window, itself
      included).
    chunk: C when it reads [floor(p / C) * C, p] (local attention in fixed chunks).
    state: when it reads only what stands at position p - 1 (a recurrent state).
    None of them: every position stays readable (full attention).
  """

  window: int | None = None
  chunk: int | None = None
  state: bool = False

  def __post_init__(self) -> None:
    for name in ("window", "chunk"):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f"{name}: expected at least 1 token or None, got {value}")
    if (self.window is not None) + (self.chunk is not None) + self.state > 1:
      raise ValueError(f"expected one of window, chunk and state, got {self!r}")

  @property
  def name(self) -> str:
    if self.state:
      return "state"
    if self.chunk is not None:
      return "local"
    return "full" if self.window is None else "sliding"

  @property
  def reach(self) -> int | None:
    """Most positions before its own that a token may read; None for all of them."""
    if self.state:
      return 1
    most = self.window if self.chunk is None else self.chunk
    return None if most is None else most - 1

  def first_readable(self, length: Any) -> Any:
    """First position that a token at position >= `length` may read.

    Works on ints and on integer arrays of either namespace (elementwise).
    """
    if self.chunk is not None:
      return length - length % self.chunk
    if self.reach is None:
      return length * 0
    start = length - self.reach
    return start * (start > 0)

  def __str__(self) -> str:
    if self.state:
      return "the last state"
    if self.chunk is not None:
      return f"its chunk of {self.chunk} positions"
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
    reusable: whether later sequences may reuse its pages; False for scratch memory, which takes
      no part in prefix sharing or offload.
    blocks_per_chunk: pages that offload moves at once; chunk c holds the logical pages
      [c * blocks_per_chunk, (c + 1) * blocks_per_chunk).
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
  reusable: bool = True
  blocks_per_chunk: int = 1

  def __post_init__(self) -> None:
    counts = ("page_size", "pages", "max_length", "step_tokens", "max_sequences")
    for field in (*counts, "blocks_per_chunk"):
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

  @property
  def most_pages(self) -> int:
    """Pages of the largest pool that 32-bit indices can address."""
    widest = max((math.prod(leaf.shape) for leaf in self.leaves), default=1)
    return MAX_POOL_ELEMENTS // (self.page_size * widest)

  # Pages. These work on ints and on integer arrays of either namespace.

  def pages_for(self, length: Any) -> Any:
    """Logical pages that [0, length) touches: ceil(length / page_size)."""
    return (length + (self.page_size - 1)) // self.page_size

  def first_page(self, length: Any) -> Any:
    """First logical page that a token at position >= `length` may read or write."""
    return self.retention.first_readable(length) // self.page_size

  def coverage(self, length: int) -> range:
    """Logical pages that hold what must be there to continue from `length` processed tokens.

    The allocator keeps these between steps, a prefix hit brings exactly these, and the prefix index
    keeps no others. Empty where nothing below `length` will be read again.
    """
    if self.retention.first_readable(length) >= length:
      return range(length // self.page_size, length // self.page_size)
    return range(self.first_page(length), self.pages_for(length))

  def aligned(self, length: int) -> bool:
    """Whether coverage(length) is made of whole pages, so that others may go on from them."""
    return length % self.page_size == 0 or not self.coverage(length)

  # Chunks.

  @property
  def chunk_tokens(self) -> int:
    """Tokens that a whole chunk covers."""
    return self.blocks_per_chunk * self.page_size

  @property
  def chunk_bytes(self) -> int:
    """Bytes of a whole chunk: its pages in all layers of the group."""
    return self.blocks_per_chunk * self.page_bytes

  def chunk(self, logical_page: int) -> range:
    """The logical pages of the chunk that holds a page."""
    first = logical_page - logical_page % self.blocks_per_chunk
    return range(first, first + self.blocks_per_chunk)

  def chunks(self, pages: range) -> Iterator[range]:
    """A range of logical pages, cut where chunks end: the first and last part may be partial."""
    at = pages.start
    while at < pages.stop:
      stop = min(self.chunk(at).stop, pages.stop)
      yield range(at, stop)
      at = stop

  # Tables.

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
    if self.retention.reach is None:
      return total
    step = min(self.step_tokens if step_tokens is None else step_tokens, length)
    return min(total, self.pages_for(self.retention.reach - 1 + step) + 1)

  def further_pages(self, held: Any, own: Any, last: Any, length: int, step_tokens: int) -> Any:
    """Most pages that a sequence still takes from the pool at once on its way to `length` tokens.

    Args (ints or integer arrays of either namespace):
      held: pages that it holds now; own: those of them that nobody else holds, which come back to
        the pool as a window passes.
      last: one past its last logical page.
    """
    peak = self.peak_pages(length, step_tokens)
    left = self.pages_for(length) - last
    left = left * (left > 0)
    kept = held if self.retention.reach is None else own
    room = peak - kept
    room = room * (room > 0)
    return left * (left <= room) + room * (room < left)

  @property
  def table_width(self) -> int:
    """Entries in one row of the page table."""
    return self.peak_pages(self.max_length)

  def pages_per_step(self, tokens: int) -> int:
    """Most new pages that one sequence can need for `tokens` further tokens."""
    return min(self.pages_for(max(tokens - 1, 0)) + 1, self.pages_for(self.max_length))

  def room(self, lengths: Sequence[int], sequences: float, step_tokens: int = 1) -> int:
    """Pages for that many sequences at once, of `lengths` in turn, without any shortfall.

    One of them computes chunks of up to the group's step_tokens while the others gain `step_tokens`
    at most: they hold one window each, wherever it stands.
    """
    each = sum(self.peak_pages(n, step_tokens) for n in lengths)
    return self._chunk_pages(lengths, step_tokens) + math.ceil(sequences * each / len(lengths))

  def sequences(self, *lengths: int) -> int:
    """How many sequences of `lengths` in turn the pool holds at once; they come one by one."""
    each = [(self.peak_pages(n, 1), self.peak_pages(n)) for n in lengths]
    # Whole rounds that surely fit, then one by one.
    rounds = max(self.pages - max(peak for _, peak in each), 0) // sum(rest for rest, _ in each)
    used, count = rounds * sum(rest for rest, _ in each), rounds * len(each)
    while True:
      for rest, peak in each:
        if used + peak > self.pages:
          return count
        used += rest
        count += 1

  def _chunk_pages(self, lengths: Sequence[int], step_tokens: int) -> int:
    """What a sequence that computes a whole chunk holds beyond one that gains `step_tokens`."""
    return max(self.peak_pages(n) - self.peak_pages(n, step_tokens) for n in lengths)

  def longest(self, pages: int) -> int:
    """Most tokens that a sequence with `pages` pages to itself can reach, at most max_length."""
    if self.peak_pages(self.max_length) <= pages:
      return self.max_length
    return pages * self.page_size


Layout = tuple[GroupGeometry, ...]
"""The groups of one model, in the order of their first layer."""


def hash_unit(layout: Layout) -> int:
  """Tokens per link of the prefix hash chain: every page of a reusable group ends on a link."""
  return math.gcd(*(g.page_size for g in layout if g.reusable)) or 1


def resumable(layout: Layout, length: int) -> bool:
  """Whether a later sequence could continue from `length` tokens of another one: what every
  reusable group must bring is whole pages, and some group brings any."""
  groups = [g for g in layout if g.reusable]
  return all(g.aligned(length) for g in groups) and any(g.coverage(length) for g in groups)


def stride(layout: Layout) -> int:
  """Every resumable length is a multiple of this."""
  # A chunk's coverage is empty at its start, and a window of one token's always.
  always = [g for g in layout if g.reusable and g.retention.chunk is None]
  sizes = [g.page_size for g in always if g.retention.reach != 0]
  return math.lcm(*sizes) if sizes else hash_unit(layout)


def chunk_stride(layout: Layout) -> int:
  """Tokens between the lengths whose pages are offloaded while a sequence runs: whole chunks in
  every reusable group, so that no chunk is stored twice because a length lies inside it."""
  return math.lcm(stride(layout), *(g.chunk_tokens for g in layout if g.reusable))


def token_bytes(layout: Layout) -> int:
  """Bytes that one more token takes while every group still retains everything."""
  return sum(group.token_bytes for group in layout)


def pool_bytes(layout: Layout) -> int:
  """Bytes of all pools."""
  return sum(group.pool_bytes for group in layout)


def sequence_bytes(layout: Layout, length: int) -> int:
  """Peak bytes of the pages that one sequence of `length` tokens holds."""
  return sum(group.peak_pages(length) * group.page_bytes for group in layout)


def concurrency(layout: Layout, *lengths: int) -> int:
  """How many sequences of `lengths` in turn the pools hold at once."""
  return min(group.sequences(*lengths) for group in layout)


def longest(layout: Layout) -> int:
  """Most tokens that a single sequence with all pools to itself can reach."""
  return min(group.longest(group.pages) for group in layout)
