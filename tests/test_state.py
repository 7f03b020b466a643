"""The state: admission, forks as permutations, entries by position, and a round trip to disk."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import stepping
from stepping import SLOTS, Runner, close, ids, model, plan, reference

import kvjax
from kvjax import pages as pages_lib

MIXED = {"sliding": 3, "full": 5}
LAYOUT = plan("mixed", MIXED)
SLIDING, FULL = 0, 5  # a layer of each group

read = stepping.jit(kvjax.read_cache, static_argnames="layer")
write = stepping.jit(kvjax.write_cache, static_argnames="layer")


def same(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)


def greedy(runner: Runner, slot: int, count: int) -> list[int]:
  """Decodes further tokens of a slot, feeding what the step sampled."""
  out = []
  for _ in range(count):
    length = int(runner.lengths[slot])
    runner.step((slot, 1))
    out.append(int(runner.state.tokens[slot, length + 1]))
  return out


def test_a_new_state_is_empty_and_its_shape_needs_no_memory():
  state = kvjax.init(LAYOUT)
  assert list(pages_lib.available(state.pages)) == [g.pages for g in LAYOUT]
  assert not np.asarray(state.lengths).any()
  shapes = jax.eval_shape(lambda: kvjax.init(LAYOUT))
  assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, shapes)
  admitted = jax.eval_shape(
    kvjax.admit, shapes, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((9,), jnp.int32)
  )
  assert jax.tree.map(jax.typeof, admitted) == jax.tree.map(jax.typeof, shapes)
  assert admitted.layout == LAYOUT


def test_admission_takes_over_a_slot():
  tokens = jnp.asarray(ids(40), jnp.int32)
  state = stepping.admit(kvjax.init(LAYOUT), 2, tokens)  # the slot is traced
  assert state.tokens[2, :40].tolist() == list(ids(40))
  assert list(state.known) == [0, 0, 40, 0]
  assert list(state.lengths) == [0] * 4  # nothing is computed yet
  used = [g.pages - int(n) for g, n in zip(LAYOUT, pages_lib.available(state.pages), strict=True)]
  assert used == [14, 8]  # 40 tokens by 3 and by 5
  state = stepping.admit(state.replace(lengths=state.lengths.at[2].set(40)), 2, tokens)
  assert list(state.lengths) == [0] * 4
  assert [
    g.pages - int(n) for g, n in zip(LAYOUT, pages_lib.available(state.pages), strict=True)
  ] == used
  pages_lib.check(state.pages, LAYOUT)
  state = stepping.release(state, np.array([2, SLOTS], np.int32))
  assert list(pages_lib.available(state.pages)) == [g.pages for g in LAYOUT]
  assert not np.asarray(state.known).any()


@pytest.mark.parametrize(
  ("slot", "tokens", "message"),
  [
    (0, [], "1 to 192 ids in one dimension, got \\(0,\\)"),
    (0, [1] * 193, "got \\(193,\\)"),
    (0, [[1, 2]], "got \\(1, 2\\)"),
    (4, [1], "slot: expected 0 to 3, got 4"),
    (-1, [1], "slot: expected 0 to 3, got -1"),
  ],
)
def test_what_admission_refuses(slot, tokens, message):
  with pytest.raises(ValueError, match=message):
    kvjax.admit(kvjax.init(LAYOUT), slot, np.asarray(tokens, np.int32))


def test_a_permutation_with_repeats_is_one_fork():
  runner = Runner("mixed", LAYOUT)
  texts = [ids(12, slot) for slot in range(SLOTS)]
  runner.step((0, texts[0]), (1, texts[1]), (2, texts[2]))
  runner.step((3, texts[3]))
  source = [3, 0, 0, 2]
  runner.state = stepping.fork(runner.state, jnp.array(source), jnp.arange(SLOTS))
  pages_lib.check(runner.state.pages, LAYOUT)
  shared = [int((p.refs == 2).sum()) for p in runner.state.pages]
  assert shared == [g.pages_for(12) for g in LAYOUT]  # slot 0's pages, twice; slot 1's are free
  ends = [ids(3, 10 + slot) for slot in range(SLOTS)]
  for i in range(3):
    seen = runner.step(*((slot, ends[slot][i : i + 1]) for slot in range(SLOTS)))
    for (slot, position), logits in seen.items():
      close(logits, reference("mixed", texts[source[slot]] + ends[slot])[position])
  with pytest.raises(ValueError, match=r"as many sources as targets, got \(2,\), \(1,\)"):
    kvjax.fork(runner.state, [0, 1], 2)


def test_a_fork_knows_the_rest_of_its_prompt():
  runner, prompt = Runner("mixed", LAYOUT), ids(40)
  runner.state = stepping.admit(runner.state, 0, jnp.asarray(prompt, jnp.int32))
  runner.step((0, 7))
  runner.state = stepping.fork(runner.state, jnp.array([0, 0]), jnp.array([1, 3]))
  for slot in (1, 0):
    for count in (1, 7, 16, 9):
      seen = runner.step((slot, count))
    close(seen[slot, 39], reference("mixed", prompt)[39])
    assert runner.state.tokens[slot, :40].tolist() == list(prompt)


class TestCache:
  def runner(self):
    runner = Runner("mixed", LAYOUT)
    runner.step((0, ids(20, 1)), (1, ids(20, 2)))
    runner.step((0, ids(4, 3)), (1, ids(4, 3)))
    return runner

  def test_positions_that_are_held(self):
    runner = self.runner()
    at = np.arange(-2, 40)
    for layer, g in ((SLIDING, LAYOUT[0]), (FULL, LAYOUT[1])):
      # Reserved last when 20 tokens were done: those pages are still there.
      held = (at >= g.first_page(20) * g.page_size) & (at < 24)
      assert kvjax.cached(runner.state, layer, 0, at).tolist() == held.tolist()
      entries = read(runner.state, layer=layer, slot=0, positions=at)["kv"]
      assert entries.shape == (42, 1, 16)
      assert np.isnan(entries[~held]).all()
      assert np.isfinite(entries[held]).all()
    assert not kvjax.cached(runner.state, FULL, 2, at).any()

  def test_the_key_of_the_first_layer(self):
    runner = self.runner()
    m = model("mixed")
    entry = read(runner.state, layer=SLIDING, slot=1, positions=np.array([21, 22, 23]))["kv"]
    # The value half of layer 0 is a projection of the normed embedding.
    w = {k: np.asarray(v, np.float64) for k, v in m.params["layers"][0].items()}
    x = np.asarray(m.params["embed"], np.float64)[list(ids(4, 3)[1:])] * 32**0.5
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w["attention_norm"]
    close(entry[:, 0, 8:], x @ w["qkv"][-8:].T)

  def test_entries_of_one_sequence_in_another(self):
    """With all entries of slot 1 in its place, slot 0 goes on as slot 1 would."""
    runner = self.runner()
    at = np.arange(24)
    for layer in range(6):
      entries = read(runner.state, layer=layer, slot=1, positions=at)
      runner.state = write(runner.state, layer=layer, slot=0, positions=at, values=entries)
    end = ids(2, 4)
    for i in range(2):
      seen = runner.step((0, end[i : i + 1]))
      want = reference("mixed", ids(20, 2) + ids(4, 3) + end)
      close(seen[0, 24 + i], want[24 + i])

  def test_a_fork_keeps_its_entries(self):
    runner = self.runner()
    runner.state = stepping.fork(runner.state, 0, 3)
    for layer in (SLIDING, FULL):
      # The first position is passed by the sliding window: left out.
      at = np.array([0, 22])
      before = read(runner.state, layer=layer, slot=3, positions=at)
      new = {"kv": jnp.full((2, 1, 16), 7.0)}
      runner.state = write(runner.state, layer=layer, slot=0, positions=at, values=new)
      same(read(runner.state, layer=layer, slot=3, positions=at), before)
      got = np.asarray(read(runner.state, layer=layer, slot=0, positions=at)["kv"])
      assert (got[1] == 7).all()
      assert (got[0] == 7).all() if layer == FULL else np.isnan(got[0]).all()
    assert not np.asarray(runner.state.shortfall).any()
    pages_lib.check(runner.state.pages, LAYOUT)
    end = ids(1, 5)
    close(runner.step((3, end))[3, 24], reference("mixed", ids(20, 1) + ids(4, 3) + end)[24])

  def test_no_page_for_a_copy(self):
    layout = plan("mixed", MIXED, pages={"full": 3})
    state = stepping.admit(kvjax.init(layout), 0, jnp.asarray(ids(12), jnp.int32))
    state = stepping.fork(state, 0, 1)
    new = {"kv": jnp.ones((2, 1, 16))}
    after = write(state, layer=FULL, slot=0, positions=np.array([4, 5]), values=new)
    assert list(after.shortfall) == [0, 2]
    same((after.pools, after.pages), (state.pools, state.pages))

  @pytest.mark.parametrize(
    ("layer", "slot", "values", "message"),
    [
      (6, 0, {"kv": np.zeros((2, 1, 16))}, "layer: expected 0 to 5, got 6"),
      (0, 4, {"kv": np.zeros((2, 1, 16))}, "slot: expected 0 to 3, got 4"),
      (0, 0, {"key": np.zeros((2, 1, 16))}, r"leaves among \['kv'\], got 'key'"),
      (0, 0, {"kv": np.zeros((2, 16))}, r"expected shape \(2, 1, 16\), got \(2, 16\)"),
    ],
  )
  def test_what_is_refused(self, layer, slot, values, message):
    with pytest.raises(ValueError, match=message):
      kvjax.write_cache(kvjax.init(LAYOUT), layer, slot, np.arange(2), values)


def test_a_generation_goes_on_after_a_round_trip_to_disk(tmp_path):
  runner = Runner("mixed", LAYOUT)
  runner.step((0, ids(13, 1)), (1, ids(7, 2)))
  runner.state = stepping.fork(runner.state, 1, 2)
  before = [greedy(runner, slot, 3) for slot in (0, 2)]
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", runner.state)
  want = [greedy(runner, slot, 10) for slot in (0, 1, 2)]

  # Another process knows the layout and nothing else.
  abstract = jax.eval_shape(lambda: kvjax.init(plan("mixed", MIXED)))
  with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore(tmp_path / "state", abstract)
  assert restored.layout == LAYOUT
  again = Runner("mixed", LAYOUT)
  again.state = restored
  again.check()
  assert [greedy(again, slot, 10) for slot in (0, 1, 2)] == want
  text = (*ids(13, 1), int(again.state.tokens[0, 13]), *before[0], *want[0])
  assert text[13:] == tuple(reference("mixed", text).argmax(-1)[12:-1])


def test_slots_that_repeat_or_do_not_exist():
  state = kvjax.init(LAYOUT)
  state = kvjax.admit(state, 0, [3, 4, 5])
  for wrong in (
    lambda: kvjax.fork(state, [0, 0], [1, 1]),
    lambda: kvjax.reserve(state, [0, 0], [4, 4]),
  ):
    with pytest.raises(ValueError, match="distinct"):
      wrong()
  for slot in (-1, np.int64(9), np.int32(-1)):
    with pytest.raises(ValueError, match="slot: expected 0 to"):
      kvjax.admit(state, slot, [3])
  with pytest.raises(ValueError, match="integer ids"):
    kvjax.admit(state, 0, [1.5])
  state = kvjax.release(state, [3, -1])  # negative slots are padding
  host = jax.tree.map(np.asarray, state.pages)
  pages_lib.check(host, LAYOUT)
  assert not kvjax.reserve(state, 0, 3).shortfall.any()  # a single slot
