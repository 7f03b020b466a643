"""The steps against the plain forward: chunks, decode, ragged batches, forks, windows."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stepping
from stepping import BLOCK, BLOCKS, DECODE_ROWS, SLOTS, Runner, close, ids, model, plan, reference

import kvjax
from kvjax import pages as pages_lib
from kvjax import testing

MIXED = {"sliding": 3, "full": 5}
LAYOUTS = [
  ("full", 1),
  ("full", 16),
  ("mixed", MIXED),
  ("mixed", 16),
  ("varied", {"sliding": 1, "sliding2": 3, "full": 16}),
]


def same(got, want):
  """Both trees hold the same values."""
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(("kind", "sizes"), LAYOUTS)
def test_any_cut_of_a_sequence_gives_the_plain_forward(kind, sizes):
  runner = Runner(kind, plan(kind, sizes))
  # Longer than a block of keys of the attention, than the window, and than the table's ring.
  texts = [ids(150, 1), ids(40, 2), ids(40, 3), ids(60, 4)]
  chunks = {0: (48, 1, 7), 1: (40,), 2: (1,), 3: (7,)}
  seen = runner.step((1, texts[1]))  # alone and whole
  steps = 0
  while True:
    blocks, work = BLOCKS, []
    for slot, text in enumerate(texts):
      start = int(runner.lengths[slot])
      count = min(chunks[slot][steps % len(chunks[slot])], len(text) - start)
      if count > 1:
        count = min(count, blocks * BLOCK)
        blocks -= -(-count // BLOCK)
      if count:
        work.append((slot, text[start : start + count]))
    if not work:
      break
    seen |= runner.step(*work)
    steps += 1
  assert list(runner.lengths) == [150, 40, 40, 60]
  assert {position for slot, position in seen if slot == 2} == set(range(40))  # one by one
  assert {6, 13, 20, 59} <= {position for slot, position in seen if slot == 3}  # sevens
  for (slot, position), logits in seen.items():
    close(logits, reference(kind, texts[slot])[position])
  for g, p in zip(runner.layout, runner.state.pages, strict=True):
    if g.retention.window is not None:
      assert p.first[3] > 0  # pages were given back
      assert p.last[0] > g.table_width  # the ring wrapped
  runner.state = stepping.release(runner.state, jnp.arange(SLOTS))
  assert list(pages_lib.available(runner.state.pages)) == [g.pages for g in runner.layout]


@pytest.mark.parametrize(("kind", "sizes"), [("full", 16), ("mixed", MIXED)])
def test_forks_go_on_apart_over_shared_pages(kind, sizes):
  runner = Runner(kind, plan(kind, sizes))
  prompt = ids(10, 5)
  runner.step((0, prompt))
  used = [int((p.refs > 0).sum()) for p in runner.state.pages]
  runner.state = stepping.fork(runner.state, jnp.array([0, 0]), jnp.array([1, 3]))
  assert [int((p.refs > 0).sum()) for p in runner.state.pages] == used  # shared, not copied
  assert all(int(p.refs.max()) == 3 for p in runner.state.pages)
  ends = {0: ids(14, 6), 1: ids(14, 7), 3: ids(14, 8)}
  seen = runner.step(*((slot, end[:1]) for slot, end in ends.items()))
  seen |= runner.step((1, ends[1][1:9]), (3, ends[3][1:3]))
  for i in range(1, 14):
    more = [(slot, end) for slot, end in ends.items() if runner.lengths[slot] == 10 + i]
    seen |= runner.step(*((slot, end[i : i + 1]) for slot, end in more))
  assert len(seen) == 3 + 2 + 13 + 5 + 11
  for (slot, position), logits in seen.items():
    close(logits, reference(kind, prompt + ends[slot])[position])


def test_a_shortfall_is_counted_and_takes_nothing():
  layout = plan("mixed", MIXED, pages={"sliding": 12, "full": 9})
  tokens = jnp.asarray(ids(20), jnp.int32)
  admit = stepping.jit(kvjax.admit)
  before = admit(kvjax.init(layout), 0, tokens)
  assert list(before.shortfall) == [0, 0]
  assert list(pages_lib.available(before.pages)) == [12 - 7, 9 - 4]
  # Again 7 pages of 3 tokens and 4 pages of 5: the sliding group lacks 2, the full one has them.
  after = admit(before, 1, tokens)
  assert list(after.shortfall) == [2, 0]
  same((after.pages, after.pools), (before.pages, before.pools))
  after = admit(after, 1, tokens)
  assert list(after.shortfall) == [4, 0]  # adds up
  # What slot 0 gives back serves the same call.
  after = admit(stepping.release(after, 0), 1, tokens)
  assert list(after.shortfall) == [4, 0]
  assert [int(p.last[1]) for p in after.pages] == [7, 4]
  pages_lib.check(after.pages, layout)


class TestUnreserved:
  """Rows without a page of their own: counted, and nothing else is touched."""

  def runner(self):
    runner = Runner("mixed", plan("mixed", MIXED))
    for slot in (0, 1):
      text = ids(30, slot)
      runner.step((slot, text[:20]))
      runner.step((slot, text[20:]))
    return runner

  def check(self, runner, work, unreserved):
    before = jax.tree.map(np.asarray, runner.state)
    batch = stepping.ragged(work)
    m = model("mixed")
    runner.state, out = stepping.step(m.params, runner.state, batch, spec=m.spec)
    assert list(out.unreserved) == unreserved
    same(runner.state.pools, before.pools)
    same(runner.state.pages, before.pages)
    pages_lib.check(runner.state.pages, runner.layout)

  def test_padding_is_no_error(self):
    self.check(self.runner(), [], [0, 0])

  def test_a_slot_without_pages(self):
    self.check(self.runner(), [(2, 0, ids(9)), (3, 5, ids(1))], [10, 10])

  def test_past_the_reserved_pages(self):
    runner = self.runner()
    g = runner.layout[0]
    held = int(runner.state.pages[0].last[0])
    # A whole ring further: the columns hold pages, of other positions.
    self.check(runner, [(0, 3 * (held + g.table_width), ids(3))], [3, 3])

  def test_given_back_pages(self):
    runner = self.runner()
    runner.step((0, ids(40)))
    runner.step((0, ids(20)))
    g, pages = runner.layout[0], runner.state.pages[0]
    # A whole ring before a held page: its column names a page, of a later position.
    passed = int(pages.last[0]) - 1 - g.table_width
    assert 0 <= passed < pages.first[0]
    before = jax.tree.map(np.asarray, runner.state.pools)
    m = model("mixed")
    batch = stepping.ragged([(0, 3 * passed, ids(2))])
    runner.state, out = stepping.step(m.params, runner.state, batch, spec=m.spec)
    assert list(out.unreserved) == [2, 0]  # the full group still holds its page
    same(runner.state.pools[0], before[0])

  def test_a_window_that_reaches_back_to_given_back_pages(self):
    runner = self.runner()
    first = int(runner.state.pages[0].first[0])
    m = model("mixed")
    batch = stepping.ragged([(0, 3 * first, ids(1))])  # its own page is there, its window is not
    _, out = stepping.step(m.params, runner.state, batch, spec=m.spec)
    assert list(out.unreserved) == [1, 0]

  def test_reserved_before_a_fork(self):
    runner = self.runner()
    runner.state = stepping.reserve(runner.state, np.array([0, 4, 4, 4]), np.array([34, 0, 0, 0]))
    runner.state = stepping.fork(runner.state, 0, 2)
    self.check(runner, [(0, 30, ids(1)), (2, 30, ids(3))], [4, 4])


def test_many_decode_steps_in_one_call_equal_single_ones():
  kind, layout = "mixed", plan("mixed", MIXED)
  m, steps = model(kind), 7
  runner = Runner(kind, layout)
  texts = {0: ids(9, 1), 1: ids(5, 2), 2: ids(21, 3)}
  runner.step(*texts.items())
  start = runner.lengths.copy()
  stops = start + np.array([7, 3, 0, 0])
  slots = jnp.array([0, 1, 2, SLOTS])
  state = stepping.reserve(runner.state, slots, jnp.asarray(stops))
  kept = jax.tree.map(jnp.copy, state)
  decode = stepping.jit(kvjax.decode, static_argnames=("spec", "steps"), donate_argnames="state")
  batch = kvjax.decode_batch(state, slots)
  many, out = decode(m.params, state, batch, spec=m.spec, steps=steps, stops=jnp.asarray(stops))
  assert out.logits is None
  assert out.sampled.token.shape == (steps, 4)
  assert not np.asarray(out.unreserved).any()
  assert list(many.lengths) == list(stops)

  for i in range(steps):
    work = [(slot, int(start[slot]) + i, 1) for slot in (0, 1) if start[slot] + i < stops[slot]]
    kept, single = stepping.step(m.params, kept, stepping.ragged(work), spec=m.spec)
    for row, (slot, position, _) in enumerate(work):
      assert out.sampled.token[i, slot] == single.sampled.token[row]
      assert many.tokens[slot, position + 1] == single.sampled.token[row]
  jax.tree.map(lambda a, b: close(np.asarray(a), np.asarray(b)), many.pools, kept.pools)
  same((many.tokens, many.lengths), (kept.tokens, kept.lengths))
  # And it is what greedy decoding by the plain forward gives.
  text = [*texts[0], *(int(t) for t in many.tokens[0, 9:17])]
  best = reference(kind, tuple(text)).argmax(-1)
  assert text[9:] == list(best[8:16])

  with pytest.raises(ValueError, match=r"decode rows only \(4\), got 52"):
    kvjax.decode(m.params, many, stepping.ragged([]), spec=m.spec, steps=2)


def test_a_decode_loop_under_scan_vmap_and_eval_shape():
  sizes = {"sliding": 1, "sliding2": 3, "full": 16}
  m, layout = model("varied"), plan("varied", sizes)
  prompts = [ids(14, 1), ids(14, 2)]

  def chunk(params, state):
    state, out = kvjax.step(
      params, state, kvjax.prefill_batch(state, 0, 7, query_block=4), spec=m.spec
    )
    return state, (out.sampled.token[-1], out.unreserved)

  def one(params, state):
    state = kvjax.reserve(state, jnp.zeros(1, jnp.int32), state.lengths[:1] + 1, tokens=1)
    state, out = kvjax.step(params, state, kvjax.decode_batch(state, 0), spec=m.spec)
    return state, (out.sampled.token[0], out.unreserved)

  def generate(params, state, prompt):
    """The prompt in two chunks, then 12 greedy tokens in a scan that reserves as it goes."""
    state = kvjax.admit(state, 0, prompt)
    state, (first, lacking) = jax.lax.scan(lambda s, _: chunk(params, s), state, length=2)
    state, (rest, more) = jax.lax.scan(lambda s, _: one(params, s), state, length=12)
    return state, jnp.append(first[1], rest), jnp.concatenate([lacking, more])

  # Independent states with their pools stacked, as engines side by side.
  states = jax.tree.map(lambda x: jnp.stack([x, x]), kvjax.init(layout))
  run = stepping.jit(jax.vmap(generate, in_axes=(None, 0, 0)))
  args = (m.params, states, jnp.asarray(prompts))
  shapes = jax.eval_shape(run, *args)
  out = run(*args)
  assert jax.tree.map(jax.typeof, out) == jax.tree.map(jax.typeof, shapes)
  state, tokens, unreserved = out
  assert not np.asarray(unreserved).any()
  assert not np.asarray(state.shortfall).any()
  for i, prompt in enumerate(prompts):
    text = (*prompt, *tokens[i].tolist())
    best = reference("varied", text).argmax(-1)
    assert text[14:] == tuple(best[13:26])
    assert state.tokens[i, 0, :27].tolist() == list(text)
  assert tokens[0].tolist() != tokens[1].tolist()


def test_one_state_sampled_under_many_seeds():
  runner = Runner("full", plan("full", 16))
  runner.step((0, ids(12)))
  m, state = model("full"), runner.state
  state = stepping.reserve(state, np.array([0, 4, 4, 4]), np.array([13, 0, 0, 0]))
  sampling = kvjax.greedy(1).replace(temperature=jnp.full((1,), 2.0))

  def draw(params, state, seed):
    drawn = sampling.replace(seed=jnp.array([[0, 1]], jnp.uint32) * seed)
    batch = kvjax.decode_batch(state, 0, drawn)
    return kvjax.step(params, state, batch, spec=m.spec)[1].sampled.token[0]

  seeds = jnp.arange(24, dtype=jnp.uint32)
  tokens = stepping.jit(jax.vmap(draw, in_axes=(None, None, 0)))(m.params, state, seeds)
  assert len(set(tokens.tolist())) > 8
  single = stepping.jit(draw)
  assert tokens[:3].tolist() == [int(single(m.params, state, seed)) for seed in seeds[:3]]


def test_donation_static_arguments_and_compilations():
  layout = plan("full", 16)
  assert hash(layout) == hash(plan("full", 16))
  assert hash(model("full").spec) == hash(testing.tiny_spec("full"))
  runner = Runner("full", layout)
  runner.step((0, ids(9)))
  compiled = stepping.step._cache_size()
  with warnings.catch_warnings():
    warnings.simplefilter("error")  # "Some donated buffers were not usable"
    for position in (9, 10):
      old, batch = runner.state, stepping.ragged([(0, position, ids(1))])
      spec = testing.tiny_spec("full")  # equal, another object
      runner.state, _ = stepping.step(model("full").params, old, batch, spec=spec)
      assert old.pools[0][0]["kv"].is_deleted()
      assert old.tokens.is_deleted()
  assert stepping.step._cache_size() == compiled


def test_batches_that_cannot_be():
  state = kvjax.init(plan("full", 16))
  with pytest.raises(ValueError, match="tokens: expected at least 1, got 0"):
    kvjax.prefill_batch(state, 0, 0)
  batch = kvjax.prefill_batch(state, 0, 9, query_block=4)
  assert len(batch.tokens) == 12
  assert list(batch.sampled) == [12, 12, 8]
  assert list(batch.slots) == [0] * 9 + [SLOTS] * 3
  assert len(kvjax.decode_batch(state, range(DECODE_ROWS)).sampled) == DECODE_ROWS
