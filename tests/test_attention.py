"""Paged attention against a dense float64 reference, in memory that is poisoned with NaN.

Every page and offset that no row may read holds NaN, and every table entry without a page holds
NO_PAGE, so that a read of one position too many shows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import IMPLEMENTATIONS, paged_attention, validate
from pallas_kernels.attention import choices
from pallas_kernels.attention_xla import KEY_BLOCK, SEQUENCE_BLOCK

NO_PAGE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Case:
  """One call. `decode` holds the position of each decode row, -1 for padding; `prefill` holds
  (start, count) of each chunk, of a sequence of its own."""

  decode: tuple[int, ...] = ()
  prefill: tuple[tuple[int, int], ...] = ()
  padding_blocks: int = 0
  query_block: int = 4
  page_size: int = 16
  heads: int = 4
  kv_heads: int = 2
  size: int = 8
  value_size: int = 8
  window: int | None = None
  softcap: float | None = None
  dtype: str = "float32"
  scale: float = 0.35
  shared: bool = False  # decode rows 0 and 1 share every full page that both read
  ring: bool = False  # the table is only as wide as the most pages that a sequence reads
  seed: int = 0


@dataclasses.dataclass
class Call:
  query: np.ndarray
  pool: np.ndarray
  table: np.ndarray
  slots: np.ndarray
  positions: np.ndarray
  expected: np.ndarray
  largest: float  # largest |value|


def readable(case: Case, position: int) -> range:
  low = 0 if case.window is None else max(position - case.window + 1, 0)
  return range(low, position + 1)


def build(case: Case) -> Call:
  rng = np.random.default_rng(case.seed)
  chunks = [(p, 1) for p in case.decode if p >= 0] + list(case.prefill)
  sequences = len(chunks)
  live = []  # (first, last) page that each sequence reads
  for start, count in chunks:
    first = readable(case, start)[0] // case.page_size
    live.append((first, (start + count - 1) // case.page_size))
  most = max(last - first + 1 for first, last in live)
  width = most if case.ring else max(last for _, last in live) + 2
  total = sum(last - first + 1 for first, last in live) + 3
  kv = case.size + case.value_size
  pool = np.full((total, case.page_size, case.kv_heads, kv), np.nan, jnp.dtype(case.dtype))
  table = np.full((sequences, width), NO_PAGE, np.int32)
  # The highest page stays NaN: out-of-range entries are clipped to it.
  unused = list(rng.permutation(total - 1))
  # Slots in an order of their own, not that of the rows.
  order = rng.permutation(sequences)
  cached = {}  # (sequence, position) -> key and value of all KV heads, in float64
  for s, (start, count) in enumerate(chunks):
    first, last = live[s]
    for page in range(first, last + 1):
      full = (page + 1) * case.page_size <= min(start, chunks[0][0])
      physical = unused.pop()
      if case.shared and s == 1 and full and page >= live[0][0]:
        physical = table[order[0], page % width]
      table[order[s], page % width] = physical
    for position in range(readable(case, start)[0], start + count):
      cell = (table[order[s], position // case.page_size % width], position % case.page_size)
      if np.isnan(pool[cell].astype(np.float64)).all():
        pool[cell] = rng.normal(size=(case.kv_heads, kv))
      cached[s, position] = pool[cell].astype(np.float64)

  rows: list[tuple[int, int]] = []  # (sequence, position), (-1, anything) for padding
  live_rows = iter(range(sequences))
  for p in case.decode:
    rows.append((next(live_rows) if p >= 0 else -1, max(p, 0)))
  for s, (start, count) in zip(live_rows, case.prefill, strict=True):
    rows += [(s, start + i) for i in range(count)]
    rows += [(-1, 0)] * (-count % case.query_block)
  rows += [(-1, 7)] * (case.padding_blocks * case.query_block)

  query = rng.normal(size=(len(rows), case.heads, case.size)).astype(jnp.dtype(case.dtype))
  expected = np.zeros((len(rows), case.heads, case.value_size))
  group = case.heads // case.kv_heads
  for r, (s, p) in enumerate(rows):
    if s < 0:
      query[r] = np.nan if r % 2 else 0
      continue
    read = np.stack([cached[s, q] for q in readable(case, p)])  # [n, K, D + Dv]
    for h in range(case.heads):
      kv_head = read[:, h // group]
      logits = case.scale * (kv_head[:, : case.size] @ query[r, h].astype(np.float64))
      if case.softcap is not None:
        logits = case.softcap * np.tanh(logits / case.softcap)
      weight = np.exp(logits - logits.max())
      expected[r, h] = weight @ kv_head[:, case.size :] / weight.sum()
  past_end = [sequences, sequences + 5, NO_PAGE]
  slots = [order[s] if s >= 0 else past_end[r % 3] for r, (s, _) in enumerate(rows)]
  return Call(
    query=query,
    pool=pool,
    table=table,
    slots=np.array(slots, np.int32),
    positions=np.array([p for _, p in rows], np.int32),
    expected=expected,
    largest=max(np.abs(x[:, case.size :]).max() for x in cached.values()),
  )


def run(case: Case, implementation: str = "xla") -> None:
  call = build(case)
  attend = functools.partial(
    paged_attention,
    decode_rows=len(case.decode),
    query_block=case.query_block,
    scale=case.scale,
    window=case.window,
    softcap=case.softcap,
    implementation=implementation,
  )
  out = jax.jit(attend)(call.query, call.pool, call.table, call.slots, call.positions)
  assert out.shape == call.expected.shape
  assert out.dtype == case.dtype
  # float32: a few roundings of weights that sum to one. bfloat16: the weights and the output are
  # rounded to 8 bits, 2**-9 of the largest value each; everything before is float32.
  tolerance = 1e-5 if case.dtype == "float32" else 2**-8
  difference = np.abs(np.asarray(out, np.float64) - call.expected).max()
  assert difference <= tolerance * max(call.largest, 1), difference / call.largest
  padding = call.slots >= len(call.table)
  assert (np.asarray(out)[padding] == 0).all()


RAGGED = (0, 1, 15, 16, 17, 130, -1, 300)
MIXED = ((0, 9), (37, 5), (127, 4), (128, 1))

CASES = {
  "lengths of one token": Case(decode=(0, 0, 0)),
  "ragged decode": Case(decode=RAGGED),
  "prefill": Case(prefill=MIXED),
  "mixed": Case(decode=RAGGED, prefill=MIXED, padding_blocks=1),
  "one row": Case(decode=(40,)),
  "one block": Case(prefill=((3, 4),)),
  "more decode rows than a block": Case(decode=tuple(range(3, 3 + 2 * SEQUENCE_BLOCK + 5))),
  "all padding but one": Case(decode=(-1, -1, 5), padding_blocks=2),
  "one query head per KV head": Case(decode=RAGGED, prefill=MIXED, heads=3, kv_heads=3),
  "page 1": Case(decode=RAGGED, prefill=MIXED, page_size=1),
  "page 3, smaller values": Case(
    decode=RAGGED, prefill=MIXED, page_size=3, size=24, value_size=4,
  ),
  "page 64, larger values": Case(decode=RAGGED, prefill=MIXED, page_size=64, value_size=20),
  "page 256": Case(decode=RAGGED, prefill=MIXED, page_size=256),
  "softcap, one KV head": Case(
    decode=RAGGED, prefill=MIXED, softcap=1.5, scale=1.0, heads=6, kv_heads=1,
  ),
  "large logits": Case(decode=RAGGED, prefill=MIXED, scale=30.0),
  "window 1": Case(decode=RAGGED, prefill=MIXED, window=1),
  "window below a page": Case(decode=RAGGED, prefill=MIXED, window=5),
  "window above a page, softcap": Case(decode=RAGGED, prefill=MIXED, window=40, softcap=2.0),
  "window above a key block": Case(decode=RAGGED, prefill=((290, 9),), window=KEY_BLOCK + 2),
  "window longer than any": Case(decode=RAGGED, prefill=MIXED, window=1000),
  "ring": Case(decode=RAGGED, prefill=MIXED, window=20, ring=True),
  "ring, page 1": Case(decode=RAGGED, prefill=MIXED, window=7, ring=True, page_size=1),
  "ring, page 3": Case(decode=RAGGED, prefill=MIXED, window=20, ring=True, page_size=3),
  "ring, page 256": Case(decode=(900, 3, 600), window=200, ring=True, page_size=256),
  "shared pages": Case(decode=(90, 70, 8), shared=True),
  "shared pages, page 1": Case(decode=(90, 70, 8), shared=True, page_size=1),
  "shared pages in a window": Case(decode=(90, 85), shared=True, window=50, page_size=4),
  "bfloat16": Case(decode=RAGGED, prefill=MIXED, dtype="bfloat16"),
  "bfloat16, window": Case(decode=RAGGED, prefill=MIXED, dtype="bfloat16", window=20, ring=True),
  "bfloat16, large logits": Case(
    # 0.0884 = 128**-0.5 is no bfloat16, and logits of 30 show what that costs.
    decode=RAGGED, prefill=MIXED, dtype="bfloat16", size=128, scale=0.0884 * 8,
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(name: str):
  run(CASES[name])


@st.composite
def cases(draw) -> Case:
  kv_heads = draw(st.integers(1, 3))
  return Case(
    decode=tuple(draw(st.lists(st.integers(-1, 200), max_size=20))),
    prefill=tuple(draw(st.lists(st.tuples(st.integers(0, 150), st.integers(1, 9)), max_size=3))),
    padding_blocks=draw(st.integers(0, 1)),
    query_block=draw(st.integers(1, 6)),
    page_size=draw(st.sampled_from([1, 2, 3, 7, 16, 100, 200])),
    heads=kv_heads * draw(st.integers(1, 3)),
    kv_heads=kv_heads,
    size=draw(st.integers(1, 9)),
    value_size=draw(st.integers(1, 9)),
    window=draw(st.none() | st.integers(1, 210)),
    softcap=draw(st.none() | st.floats(0.5, 50)),
    dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    shared=draw(st.booleans()),
    ring=draw(st.booleans()),
    seed=draw(st.integers(0, 1000)),
  )


@settings(deadline=None, max_examples=8)
@given(cases().filter(lambda c: c.prefill or any(p >= 0 for p in c.decode)))
def test_random_geometries(case: Case):
  run(case)


def test_a_row_does_not_depend_on_its_company():
  """Bit for bit in decode blocks of one size, whatever the other rows hold."""
  call = build(Case(decode=(130, 40, 60), seed=3))
  options = {"decode_rows": 3, "query_block": 1, "scale": 0.3, "implementation": "xla"}
  attend = jax.jit(functools.partial(paged_attention, **options))
  alone = call.slots.copy()
  alone[1:] = NO_PAGE
  both = [attend(call.query, call.pool, call.table, s, call.positions) for s in (call.slots, alone)]
  np.testing.assert_array_equal(both[0][0], both[1][0])


# Static errors.

SHAPES = {
  "query": ((6, 4, 8), "float32"),
  "pool": ((5, 4, 2, 16), "float32"),
  "table": ((3, 7), "int32"),
  "slots": ((6,), "int32"),
  "positions": ((6,), "int32"),
}
OPTIONS = {"decode_rows": 2, "query_block": 4, "window": None, "softcap": None}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"query": ((6, 32), "float32")}, r"expected query \[T, H, D\].*got \(6, 32\)"),
    ({"pool": ((5, 4, 16), "float32")}, r"pool \[P, page, K, D \+ Dv\].*\(5, 4, 16\)"),
    ({"table": ((3,), "int32")}, r"table \[S, W\].*\(3,\)"),
    ({"table": ((3, 0), "int32")}, r"no empty dimension.*table \(3, 0\)"),
    ({"query": ((0, 4, 8), "float32")}, r"no empty dimension.*query \(0, 4, 8\)"),
    ({"table": ((3, 7), "float32")}, "table: expected int32, got float32"),
    ({"slots": ((6,), "int8")}, "slots: expected int32, got int8"),
    ({"positions": ((6,), "uint32")}, "positions: expected int32, got uint32"),
    ({"pool": ((5, 4, 3, 16), "float32")}, "multiple of KV heads, got 4, 3"),
    ({"pool": ((5, 4, 2, 8), "float32")}, "wider than the key size 8, got 8"),
    ({"slots": ((5,), "int32")}, r"slots and positions \[6\], got \(5,\)"),
    ({"positions": ((6, 1), "int32")}, r"slots and positions \[6\].*\(6, 1\)"),
    ({"decode_rows": 7}, "decode_rows 7 and query_block 4"),
    ({"decode_rows": -2}, "decode_rows -2 and query_block 4"),
    ({"query_block": 0}, "decode_rows 2 and query_block 0"),
    ({"query_block": 3}, "decode_rows 2 and query_block 3"),
    ({"pool": ((5, 4, 2, 16), "bfloat16")}, "one dtype, got float32, bfloat16"),
    ({"window": 0}, "window: expected at least 1, got 0"),
    ({"softcap": 0.0}, "softcap: expected a number above 0 or None, got 0.0"),
  ],
)
def test_static_errors(changes, message: str):
  arrays = [jax.ShapeDtypeStruct(*changes.get(name, default)) for name, default in SHAPES.items()]
  options = {name: changes.get(name, default) for name, default in OPTIONS.items()}
  with pytest.raises(ValueError, match=message):
    validate(*arrays, **options)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(functools.partial(paged_attention, scale=1.0, **options), *arrays)


def test_valid_arguments_pass():
  validate(*(jax.ShapeDtypeStruct(*x) for x in SHAPES.values()), **OPTIONS)


def test_choice_of_implementation(monkeypatch: pytest.MonkeyPatch):
  assert choices(None) == tuple(IMPLEMENTATIONS)
  assert choices("xla") == choices(["xla"]) == ("xla",)
  with pytest.raises(ValueError, match=r"expected one of \['xla'.*got 'cuda'"):
    choices("cuda")

  def refuse(*_, **__):
    raise NotImplementedError("this platform is too old")

  monkeypatch.setitem(IMPLEMENTATIONS, "old", refuse)
  arrays = [jax.ShapeDtypeStruct(*x) for x in SHAPES.values()]
  attend = functools.partial(paged_attention, scale=1.0, **OPTIONS)
  out = jax.eval_shape(functools.partial(attend, implementation=["old", "xla"]), *arrays)
  assert out.shape == (6, 4, 8)
  with pytest.raises(NotImplementedError, match="fits: old: this platform is too old"):
    jax.eval_shape(functools.partial(attend, implementation="old"), *arrays)
