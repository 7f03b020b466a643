"""Chunks: what is packed is unpacked bit for bit, whatever the group is made of."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import config as C
from kvjax.errors import ConfigError
from kvjax.geometry import NO_PAGE, GroupGeometry, Leaf, Retention, chunk_stride
from kvjax.offload.chunks import chunk_dtype, pack, page_elements, unpack
from kvjax.offload.sizes import with_chunks

DTYPES = ("float32", "bfloat16", "float16", "int8", "uint8", "float8_e4m3fn", "int32")


def group(name="full", page_size=16, *, layers=(0,), pages=8, longest=4096, leaves=None, **more):
  return GroupGeometry(
    name=name,
    layers=layers,
    page_size=page_size,
    retention=more.pop("retention", Retention()),
    leaves=leaves or (Leaf("kv", (2, 4), "float32"),),
    pages=pages,
    max_length=longest,
    step_tokens=64,
    max_sequences=2,
    **more,
  )


def filled(layout, seed=0):
  """A state whose pools hold random bits, NaNs and negative zeros among them."""
  rng = np.random.default_rng(seed)

  def bits(x):
    data = rng.integers(0, 256, x.size * x.dtype.itemsize, np.uint8)
    return jnp.asarray(data.view(x.dtype).reshape(x.shape))

  state = kvjax.init(layout)
  return state.replace(pools=jax.tree.map(bits, state.pools))


def same_bits(a, b):
  return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@st.composite
def geometries(draw):
  leaves = tuple(
    Leaf(
      f"leaf{i}",
      tuple(draw(st.lists(st.integers(1, 3), max_size=2))),
      draw(st.sampled_from(DTYPES)),
    )
    for i in range(draw(st.integers(1, 3)))
  )
  layers = tuple(range(draw(st.integers(1, 3))))
  return group(page_size=draw(st.integers(1, 5)), layers=layers, leaves=leaves, pages=6)


@settings(deadline=None, max_examples=10)
@given(
  geometries(), st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), st.integers(0, 9)
)
def test_bits_packed_are_bits_unpacked(g, pages, seed):
  layout = (group("other", 3), g)
  source, target = filled(layout, seed), filled(layout, seed + 1)
  chunk = pack(source, 1, np.array(pages))
  assert chunk.shape == (len(pages), page_elements(g))
  assert chunk.dtype == chunk_dtype(g)
  assert chunk.nbytes == len(pages) * g.page_bytes
  where = [5 - page for page in pages]
  where[0] = NO_PAGE  # rows that nobody wants
  after = unpack(target, 1, np.array(where), chunk)
  for old, new, wanted in zip(target.pools[1], after.pools[1], source.pools[1], strict=True):
    for leaf in g.leaves:
      for page in range(6):
        if page in where:
          expected = wanted[leaf.name][pages[where.index(page)]]
        else:
          expected = old[leaf.name][page]
        assert same_bits(new[leaf.name][page], expected)
  assert all(map(same_bits, jax.tree.leaves(after.pools[0]), jax.tree.leaves(target.pools[0])))


def test_equal_shapes_do_not_confuse_the_order():
  """As many KV heads as tokens in a page: a layout that was guessed from shapes would be wrong."""
  g = group(page_size=2, leaves=(Leaf("kv", (2, 3), "float32"),))
  state = filled((g,))
  (row,) = pack(state, 0, [1])
  assert same_bits(row.reshape(2, 2, 3), state.pools[0][0]["kv"][1])


def test_they_work_under_jit_and_scan():
  layout = (group(pages=5),)
  state = filled(layout)
  packing = jax.jit(pack, static_argnames="group")
  unpacking = jax.jit(unpack, static_argnames="group", donate_argnums=0)
  want = np.asarray(state.pools[0][0]["kv"][3])
  chunk = packing(state, group=0, pages=np.array([3, 3]))
  state = unpacking(state, group=0, pages=np.array([1, 2]), chunk=chunk)
  assert same_bits(state.pools[0][0]["kv"][2], want)
  shapes = jax.eval_shape(functools.partial(pack, group=0, pages=jnp.arange(2)), state)
  assert shapes.shape == (2, page_elements(layout[0]))


def test_a_chunk_of_another_shape_or_type_is_refused():
  state = kvjax.init((group(),))
  with pytest.raises(ValueError, match=r"expected float32 \(2, 128\) for 2 pages of group full"):
    unpack(state, 0, [0, 1], np.zeros((1, 128), np.float32))
  with pytest.raises(ValueError, match="got uint8"):
    unpack(state, 0, [0], np.zeros((1, 128), np.uint8))


# The declared sizes.

SPARSE = (256, 64, 64, 4, 8)  # DeepSeek-V4-Flash


def groups_of(sizes, **more):
  return tuple(group(f"g{i}", size, **more) for i, size in enumerate(sizes))


def blocks(sizes, **offload):
  layout = with_chunks(groups_of(sizes), C.OffloadConfig(**offload))
  return [g.blocks_per_chunk for g in layout], [g.chunk_tokens for g in layout]


def test_blocks_per_chunk_is_each_groups_own():
  assert blocks(SPARSE, blocks_per_chunk=2)[1] == [512, 128, 128, 8, 16]
  given = {"g0": 1, "g3": 7}
  layout = with_chunks(groups_of(SPARSE), C.OffloadConfig(blocks_per_chunk=given))
  assert [layout[0].blocks_per_chunk, layout[3].blocks_per_chunk] == [1, 7]


def test_block_size_is_converted_exactly():
  assert blocks(SPARSE, block_size=512) == ([2, 8, 8, 128, 64], [512] * 5)
  assert blocks((256, 64), block_size=512)[0] == [2, 8]


@pytest.mark.parametrize(
  ("sizes", "tokens", "next_one"),
  [((16, 32), 48, 64), (SPARSE, 128, 256), ((16,), 24, 32), ((6, 4), 13, 24), (SPARSE, 513, 768)],
)
def test_a_block_size_that_does_not_divide_names_groups_and_a_way_out(sizes, tokens, next_one):
  with pytest.raises(ConfigError) as error:
    blocks(sizes, block_size=tokens)
  text = str(error.value)
  assert f"next that works is {next_one};" in text
  assert "config.offload.blocks_per_chunk" in text
  for i, size in enumerate(sizes):
    assert f"g{i}: {size}" in text
  assert blocks(sizes, block_size=next_one)[1] == [next_one] * len(sizes)


def test_scratch_memory_has_no_say():
  layout = (*groups_of((16, 32)), group("scratch", 7, reusable=False))
  sized = with_chunks(layout, C.OffloadConfig(block_size=64))
  assert [g.blocks_per_chunk for g in sized] == [4, 2, 1]
  assert chunk_stride(sized) == 64
  with pytest.raises(ConfigError, match=r"blocks_per_chunk.scratch: .* no such group"):
    with_chunks(layout, C.OffloadConfig(blocks_per_chunk={"scratch": 2}))


def test_an_unknown_group_is_answered_with_the_nearest():
  with pytest.raises(ConfigError, match=r"blocks_per_chunk\.g9: .*\['g0', 'g1'\].*g"):
    with_chunks(groups_of((16, 16)), C.OffloadConfig(blocks_per_chunk={"g9": 2}))


def test_a_chunk_larger_than_the_host_tier_is_refused():
  with pytest.raises(ConfigError, match=r"host_bytes: expected at least 1024 bytes, .* group g0"):
    with_chunks(groups_of((16,)), C.OffloadConfig(host_bytes=1000, blocks_per_chunk=2))


def test_without_a_word_chunks_are_near_the_wanted_bytes():
  wide = group("wide", 16, layers=tuple(range(30)), leaves=(Leaf("kv", (8, 256), "bfloat16"),))
  narrow = group("narrow", 16, leaves=(Leaf("kv", (1, 64), "bfloat16"),))
  a, b = with_chunks((wide, narrow), C.OffloadConfig())
  assert a.blocks_per_chunk == 1
  assert 2**19 < a.chunk_bytes < 2**21
  assert b.chunk_tokens == 512  # never so long that prefixes are missed
  assert with_chunks((narrow,), C.OffloadConfig(chunk_bytes=8192))[0].chunk_bytes == 8192
  (small,) = with_chunks((narrow,), C.OffloadConfig(host_bytes=5000))
  assert small.chunk_bytes <= 5000
  short = dataclasses.replace(narrow, max_length=40)
  assert with_chunks((short,), C.OffloadConfig())[0].chunk_tokens <= 40


BAD = {
  "blocks_per_chunk": ["2", 2.9, True, 0, -1, "abc", {"full": True}, {"full": 0}, [2]],
  "block_size": ["512", 2.9, True, 0, -1, "abc"],
  "host_bytes": [-1, 1.5, "1", True],
  "disk_bytes": [0, "many"],
  "store_after": [-1, True],
  "deadline_seconds": [0, "soon"],
  "policy": ["fifo", 1],
  "restore": [True, "sometimes"],
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in BAD.items() for v in values])
def test_types_are_strict(key, value):
  with pytest.raises(ConfigError, match=rf"config\.offload\.{key}: expected .*, got "):
    C.OffloadConfig(**{key: value})


def test_both_sizes_are_an_error():
  with pytest.raises(
    ConfigError, match=r"blocks_per_chunk, config\.offload\.block_size: expected one"
  ):
    C.OffloadConfig(blocks_per_chunk=2, block_size=512)


@given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 60))
def test_ranges_are_cut_where_chunks_end(count, a, b):
  g = dataclasses.replace(group(), blocks_per_chunk=count)
  pages = range(min(a, b), max(a, b))
  parts = list(g.chunks(pages))
  assert [page for part in parts for page in part] == list(pages)
  for part in parts:
    assert g.chunk(part[0]) == g.chunk(part[-1])
    assert len(part) <= count
  assert all(len(part) == count for part in parts[1:-1])
