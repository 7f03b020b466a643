"""A small driver for tests of the steps: every batch has one shape, so that it compiles once."""

import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

import kvjax
from kvjax import pages as pages_lib
from kvjax import testing
from kvjax.config import CacheConfig, GroupConfig
from kvjax.sampling import greedy
from kvjax.state import FROM_STATE

SLOTS = 4
DECODE_ROWS, BLOCK, BLOCKS = 4, 8, 6
ROWS = DECODE_ROWS + BLOCK * BLOCKS

# The tests compile much and compute little.
_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=_FAST)

admit = jit(kvjax.admit, donate_argnames="state")
reserve = jit(kvjax.reserve, static_argnames="tokens", donate_argnames="state")
fork = jit(kvjax.fork, donate_argnames="state")
release = jit(kvjax.release, donate_argnames="state")
step = jit(kvjax.step, static_argnames="spec", donate_argnames="state")


@functools.cache
def model(kind: str):
  return testing.tiny_model(kind)


@functools.cache
def reference(kind: str, tokens: tuple[int, ...]) -> np.ndarray:
  """Logits [n, V] of the plain forward."""
  return testing.reference_logits(model(kind).params, model(kind).spec, tokens)


def ids(count: int, seed: int = 0) -> tuple[int, ...]:
  """Random token ids."""
  return tuple(int(i) for i in np.random.default_rng(seed).integers(0, 264, count))


def plan(kind: str, sizes: int | Mapping[str, int] = 3, pages: Mapping[str, int] | None = None):
  """A layout for SLOTS sequences: one page size, or one per group; pools of `pages`."""
  each = {} if isinstance(sizes, int) else sizes
  groups = {
    name: GroupConfig(page_size=each.get(name), pages=(pages or {}).get(name))
    for name in {*each, *(pages or {})}
  }
  cache = CacheConfig(page_size=sizes if isinstance(sizes, int) else 16, groups=groups)
  return kvjax.plan(
    model(kind).spec, cache, max_sequences=SLOTS, step_tokens=BLOCK * BLOCKS, max_length=192
  )


def ragged(work: Sequence[tuple[int, int, Sequence[int] | int]]) -> kvjax.Batch:
  """A batch of the one shape; every block's last row is sampled.

  Args:
    work: (slot, first position, ids or how many ids that the state knows); one id goes into a
      decode row, more into blocks.
  """
  tokens = np.full(ROWS, FROM_STATE, np.int32)
  slots = np.full(ROWS, SLOTS, np.int32)
  positions = np.zeros(ROWS, np.int32)
  sampled = np.full(DECODE_ROWS + BLOCKS, ROWS, np.int32)
  decode, block = 0, 0
  for slot, start, given in work:
    count = given if isinstance(given, int) else len(given)
    at = np.arange(count)
    if count == 1:
      rows = np.array([decode])
      sampled[decode] = decode
      decode += 1
    else:
      rows = DECODE_ROWS + block * BLOCK + at
      blocks = -(-count // BLOCK)
      last = rows[0] + np.minimum(BLOCK * np.arange(1, blocks + 1), count) - 1
      sampled[DECODE_ROWS + block :][:blocks] = last
      block += blocks
    slots[rows], positions[rows] = slot, start + at
    if not isinstance(given, int):
      tokens[rows] = given
  assert decode <= DECODE_ROWS, "more decode rows than the one shape has"
  assert block <= BLOCKS, "more blocks than the one shape has"
  return kvjax.Batch(
    tokens=tokens,
    slots=slots,
    positions=positions,
    sampled=sampled,
    sampling=greedy(len(sampled)),
    decode_rows=DECODE_ROWS,
    query_block=BLOCK,
  )


class Runner:
  """A state, and a record of the logits after every sampled position of each slot."""

  def __init__(self, kind: str, layout):
    self.kind, self.layout = kind, layout
    self.state = kvjax.init(layout)

  @property
  def lengths(self) -> np.ndarray:
    return np.asarray(self.state.lengths)

  def step(self, *work: tuple[int, Sequence[int] | int]) -> dict[tuple[int, int], np.ndarray]:
    """Reserves and runs (slot, ids or count); (slot, position) -> logits of the sampled rows."""
    lengths = self.lengths
    counts = [n if isinstance(n, int) else len(n) for _, n in work]
    slots = np.full(SLOTS, SLOTS, np.int32)
    stops = np.zeros(SLOTS, np.int32)
    for i, ((slot, _), count) in enumerate(zip(work, counts, strict=True)):
      slots[i], stops[i] = slot, lengths[slot] + count
    self.state = reserve(self.state, slots, stops)
    batch = ragged([(slot, int(lengths[slot]), given) for slot, given in work])
    spec, params = model(self.kind).spec, model(self.kind).params
    self.state, out = step(params, self.state, batch, spec=spec)
    assert not np.asarray(out.unreserved).any()
    self.check()
    logits = np.asarray(out.logits)
    real = [(r, row) for r, row in enumerate(batch.sampled) if row < ROWS]
    return {(int(batch.slots[row]), int(batch.positions[row])): logits[r] for r, row in real}

  def check(self) -> None:
    """Pages are conserved, and no sequence holds more of them than its geometry says."""
    pages_lib.check(self.state.pages, self.layout)
    for g, p in zip(self.layout, self.state.pages, strict=True):
      for slot, (first, last) in enumerate(zip(p.first.tolist(), p.last.tolist(), strict=True)):
        reached = min(last * g.page_size, g.max_length)
        assert last - first <= g.peak_pages(reached), (g.name, slot)


def close(got: np.ndarray, want: np.ndarray) -> None:
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
