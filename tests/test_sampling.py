"""Sampling against plain numpy: filters by sorting, penalties by counting, draws by statistics."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvjax import sampling
from kvjax.sampling import TOP_LOGPROBS, Sampled, Sampling, threshold

CONTEXT = 12
FOREVER = 2**31 - 1

sample = jax.jit(sampling.sample)
thresholds = jax.jit(threshold)
penalise = jax.jit(sampling._penalize)


def settings_of(rows: int, **fields: Any) -> Sampling:
  """Greedy rows with some fields set; scalars hold for all rows."""
  plain = sampling.greedy(rows)
  given = {
    name: jnp.broadcast_to(
      jnp.asarray(value, getattr(plain, name).dtype), np.shape(value) or (rows,)
    )
    for name, value in fields.items()
  }
  return dataclasses.replace(plain, **given)


def choose(
  logits: Any, s: Sampling, position: Any = None, tokens: Any = None, slots: Any = None
) -> Sampled:
  logits = jnp.asarray(logits, jnp.float32)
  rows = len(logits)
  return sample(
    logits,
    s,
    jnp.zeros((rows,), jnp.int32) if position is None else jnp.asarray(position, jnp.int32),
    jnp.zeros((2, CONTEXT), jnp.int32) if tokens is None else jnp.asarray(tokens, jnp.int32),
    jnp.zeros((rows,), jnp.int32) if slots is None else jnp.asarray(slots, jnp.int32),
  )


def seeds(rows: int, salt: int = 0) -> np.ndarray:
  return np.random.default_rng(salt).integers(0, 2**32, (rows, 2), dtype=np.uint32)


def normal(rows: int, vocabulary: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=(rows, vocabulary)).astype(np.float32) * 3


# Greedy.


def test_greedy_takes_the_best_and_the_first_of_equals():
  logits = normal(5, 40)
  logits[3, [4, 9, 30]] = 50
  out = choose(logits, sampling.greedy(5))
  assert out.token.tolist() == logits.argmax(-1).tolist()
  assert out.token[3] == 4
  assert out.token.dtype == jnp.int32
  assert out.finite.all()


def test_greedy_ignores_filters_and_seed():
  logits = normal(4, 40)
  s = settings_of(4, top_k=3, top_p=0.1, min_p=0.5, seed=seeds(4))
  assert choose(logits, s).token.tolist() == logits.argmax(-1).tolist()


# Filters.


def kept_by_sorting(logits: np.ndarray, k: int, p: float, min_p: float) -> tuple[set[int], bool]:
  """The tokens that pass, in float64, and whether rounding could decide otherwise."""
  order = np.argsort(-logits, kind="stable")
  value = logits[order].astype(np.float64)
  if 0 < k < len(order):
    value = value[value >= value[k - 1]]
  weight = np.exp(value - value[0])
  close = False
  if p < 1:
    share = np.cumsum(weight) / weight.sum()
    last = int(np.argmax(share >= p))
    close |= bool((np.abs(share - p) < 1e-5).any())
    value = value[value >= value[last]]
  if min_p > 0:
    floor = value[0] + np.log(min_p)
    close |= bool((np.abs(value - floor) < 1e-5).any()) and min_p < 1
    value = value[value >= floor]
  lowest = value.min()
  return set(np.flatnonzero(logits >= lowest).tolist()), close


VOCABULARY = 12
ROWS = 4
filters = st.tuples(
  st.integers(0, VOCABULARY + 3),
  st.sampled_from([1e-6, 1e-3, 1.0]) | st.floats(2**-20, 1, width=32),
  st.sampled_from([0.0, 1.0]) | st.floats(0, 1, width=32, allow_subnormal=False),
)
# Few values, so that ties are common; infinities as a bias of -inf makes them.
values = st.sampled_from([-np.inf, -5.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0]) | st.floats(
  -30, 30, width=32, allow_subnormal=False
)


@settings(deadline=None, max_examples=150)
@given(
  st.lists(
    st.tuples(st.lists(values, min_size=VOCABULARY, max_size=VOCABULARY), filters),
    min_size=ROWS,
    max_size=ROWS,
  )
)
def test_filters_keep_what_a_sort_keeps(rows: list[tuple[list[float], tuple[int, float, float]]]):
  logits = np.array([row for row, _ in rows], np.float32)
  logits[:, 0] = np.where(np.isinf(logits).all(-1), 0, logits[:, 0])  # one token must be allowed
  k, p, min_p = (np.array(x) for x in zip(*(f for _, f in rows), strict=True))
  limit = thresholds(
    jnp.asarray(logits),
    jnp.asarray(k, jnp.int32),
    jnp.asarray(p, jnp.float32),
    jnp.asarray(min_p, jnp.float32),
  )
  for r in range(ROWS):
    expected, close = kept_by_sorting(logits[r], int(k[r]), float(p[r]), float(min_p[r]))
    kept = set(np.flatnonzero(logits[r] >= float(limit[r, 0])).tolist())
    assert int(logits[r].argmax()) in kept
    if not close:
      assert kept == expected


@pytest.mark.parametrize(
  ("fields", "kept"),
  [
    ({"top_k": 1}, {2}),
    ({"top_k": 3}, {2, 0, 4, 5}),  # 4 and 5 tie for the third place
    ({"top_k": 50}, {0, 1, 2, 3, 4, 5}),
    ({"top_p": 1e-6}, {2}),
    ({"top_p": 1e-42}, {2}),  # times anything, it underflows
    ({"top_p": 0.0}, {2}),
    ({"top_p": 0.6}, {2, 0}),  # shares .5, .2, .1, .1, .06, .04
    ({"top_p": 0.75}, {2, 0, 4, 5}),
    ({"top_p": 1.0}, {0, 1, 2, 3, 4, 5}),
    ({"min_p": 0.3}, {2, 0}),
    ({"min_p": 1.0}, {2}),
    ({"top_k": 2, "top_p": 0.75}, {2, 0}),  # of what is left, .5 are less than .75
    ({"top_k": 2, "top_p": 0.7}, {2}),
    ({"top_k": 4, "min_p": 0.3}, {2, 0}),
  ],
)
def test_filters_on_known_shares(fields: dict[str, float], kept: set[int]):
  shares = np.array([0.2, 0.04, 0.5, 0.06, 0.1, 0.1], np.float32)
  rows = 400
  s = settings_of(rows, temperature=1.0, seed=seeds(rows), **fields)
  out = choose(np.tile(np.log(shares), (rows, 1)), s)
  assert set(out.token.tolist()) == kept


# Draws.


def chi_square(tokens: np.ndarray, share: np.ndarray) -> float:
  expected = share * len(tokens)
  observed = np.bincount(tokens, minlength=len(share))
  assert observed[share == 0].sum() == 0
  real = share > 0
  return float((((observed - expected) ** 2)[real] / expected[real]).sum())


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float, vary: str):
  rows = 20000
  logits = np.array([1.0, 0.0, -1.0, 2.0, 0.5, -np.inf, 1.5, -0.5], np.float32)
  share = np.exp(logits / temperature)
  share /= share.sum()
  if vary == "seed":
    s, position = settings_of(rows, temperature=temperature, seed=seeds(rows)), None
  else:
    s = settings_of(rows, temperature=temperature, seed=np.tile(seeds(1), (rows, 1)))
    position = np.arange(rows)
  tokens = np.asarray(choose(np.tile(logits, (rows, 1)), s, position).token)
  # 6 degrees of freedom: 22.5 is passed once in a thousand; the seeds are fixed.
  assert chi_square(tokens, share) < 22.5


def test_draws_from_what_filters_leave_are_renormalised():
  rows = 20000
  share = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
  s = settings_of(rows, temperature=1.0, top_p=0.8, seed=seeds(rows))
  tokens = np.asarray(choose(np.tile(np.log(share), (rows, 1)), s).token)
  left = np.array([0.4, 0.3, 0.15, 0, 0]) / 0.85
  assert chi_square(tokens, left) < 13.8  # 2 degrees of freedom


def test_neighbouring_seeds_and_positions_are_independent():
  rows = 4096
  logits = np.zeros((rows, 16), np.float32)
  ordered = np.stack([np.zeros(rows), np.arange(rows)], 1).astype(np.uint32)
  s = settings_of(rows, temperature=1.0, seed=ordered)
  tokens = np.asarray(choose(logits, s).token)
  pairs = tokens[:-1] * 16 + tokens[1:]
  # 255 degrees of freedom: 330 is passed once in a thousand.
  assert chi_square(pairs, np.full(256, 1 / 256)) < 330


def test_temperatures_from_tiny_to_huge():
  logits = np.tile(np.array([10.0, 30.0, 29.9, -20.0], np.float32), (64, 1))
  for temperature in (1.2e-38, 1e-6, 1e-3):  # the first makes infinities of both 10 and 30
    s = settings_of(64, temperature=temperature, seed=seeds(64))
    assert set(choose(logits, s).token.tolist()) == {1}
    assert set(choose(logits, dataclasses.replace(s, top_p=s.top_p * 0.5)).token.tolist()) == {1}
  hot = choose(logits, settings_of(64, temperature=1e6, seed=seeds(64)))
  assert set(hot.token.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 9, "min_p": 0.01}])
def test_a_token_depends_on_its_seed_and_position_alone(fields: dict[str, float]):
  """Not on the row, the slot, the number of rows, or what the other rows ask for."""
  vocabulary = 300
  logits, seed = normal(1, vocabulary), seeds(1, salt=5)
  tokens = []
  for position in range(20):
    alone = choose(logits, settings_of(1, temperature=0.9, seed=seed, **fields), [position])
    tokens.append(int(alone.token[0]))
    for rows, row in ((3, 2), (8, 0), (8, 5)):
      others = normal(rows, vocabulary, seed=position + 1)
      others[row] = logits[0]
      changed = {
        "temperature": np.linspace(0, 2, rows),
        "top_k": np.arange(rows),
        "top_p": np.linspace(0.1, 1, rows),
        "min_p": np.linspace(0, 0.3, rows),
        "repetition": np.linspace(1, 2, rows),
        "presence": np.linspace(0, 1, rows),
        "seed": seeds(rows, salt=position),
      }
      plain = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition": 1, "presence": 0}
      for name, values in changed.items():
        own = {**plain, "temperature": 0.9, "seed": seed[0], **fields}
        values[row] = own[name]
      at = np.arange(rows) + 50
      at[row] = position
      slots = np.arange(rows) % 2
      out = choose(others, settings_of(rows, **changed), at, slots=slots)
      assert int(out.token[row]) == tokens[-1]
  assert len(set(tokens)) > 3


def test_the_same_seed_at_two_positions_draws_anew():
  logits = np.zeros((2, 1000), np.float32)
  s = settings_of(2, temperature=1.0, seed=np.tile(seeds(1), (2, 1)))
  a, b = choose(logits, s, [3, 4]).token.tolist()
  assert a != b
  same = choose(logits, s, [4, 4]).token.tolist()
  assert same == [b, b]


# Penalties and biases.


def penalised(
  logits: np.ndarray, history: list[int], prompt: int, by: float, presence: float, frequency: float
) -> np.ndarray:
  out = logits.astype(np.float64).copy()
  for token in set(history):
    out[token] = out[token] / by if out[token] > 0 else out[token] * by
  for token in history[prompt:]:
    out[token] -= frequency
  for token in set(history[prompt:]):
    out[token] -= presence
  return out


@st.composite
def penalties(draw):
  count = draw(st.integers(0, CONTEXT))
  return {
    "history": draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)),
    "prompt": draw(st.integers(0, count)),
    "repetition": draw(st.sampled_from([0.5, 1.0, 1.3, 2.0])),
    "presence": draw(st.sampled_from([-2.0, 0.0, 0.7])),
    "frequency": draw(st.sampled_from([-1.0, 0.0, 0.3])),
  }


@settings(deadline=None, max_examples=80)
@given(penalties(), penalties(), st.integers(0, 100))
@example(
  {"history": [1] * CONTEXT, "prompt": 0, "repetition": 1.0, "presence": 0.0, "frequency": 0.3},
  {"history": [], "prompt": 0, "repetition": 2.0, "presence": 0.7, "frequency": 0.0},
  0,
)
def test_penalties_count_what_they_say(first: dict[str, Any], second: dict[str, Any], seed: int):
  both = (first, second)
  logits = normal(2, 6, seed) + np.float32(0.01)
  tokens = np.full((2, CONTEXT), 3)  # what lies beyond the known tokens must not count
  for slot, x in enumerate(both):
    tokens[slot, : len(x["history"])] = x["history"]
  s = settings_of(
    2,
    **{name: [x[name] for x in both] for name in ("repetition", "presence", "frequency")},
    prompt_length=[x["prompt"] for x in both],
  )
  position = jnp.array([len(x["history"]) for x in both], jnp.int32)
  # Row 0 is in slot 1 and the other way round, to tell rows and slots apart.
  out = penalise(jnp.asarray(logits), s, position, jnp.asarray(tokens[::-1]), jnp.array([1, 0]))
  for r, x in enumerate(both):
    expected = penalised(
      logits[r], x["history"], x["prompt"], x["repetition"], x["presence"], x["frequency"]
    )
    np.testing.assert_allclose(out[r], expected, rtol=1e-5, atol=1e-5)


def test_penalties_change_the_choice():
  logits = [[2.0, 1.9, 0.0]] * 4
  s = settings_of(
    4,
    repetition=[1.0, 1.2, 1.0, 1.0],
    presence=[0, 0, 0.2, 0],
    frequency=[0, 0, 0, 0.06],
    prompt_length=[2, 2, 0, 0],
  )
  tokens = np.zeros((2, CONTEXT), int)
  assert choose(logits, s, [2] * 4, tokens).token.tolist() == [0, 1, 1, 1]
  # In the prompt alone, presence and frequency do not count.
  s = dataclasses.replace(s, prompt_length=jnp.full((4,), 2, jnp.int32))
  assert choose(logits, s, [2] * 4, tokens).token.tolist() == [0, 1, 0, 0]


def test_biases_hold_for_their_row_until_their_position():
  logits = [[1.0, 0.5, 0.0, -3.0]] * 3
  s = settings_of(
    3,
    bias_row=[0, 1, 2, 2, 3, FOREVER],
    bias_token=[3, 0, 1, 1, 2, 2],
    bias_value=[9.0, -np.inf, 0.3, 0.3, 99.0, 99.0],
    bias_until=[FOREVER, 5, FOREVER, 6, FOREVER, FOREVER],
  )
  tokens = [choose(logits, s, [at] * 3).token.tolist() for at in (4, 5, 6)]
  assert tokens[0] == [3, 1, 1]
  assert tokens[1] == [3, 0, 1]  # the ban is over; two entries of one token still add up
  assert tokens[2] == [3, 0, 0]


def test_a_forbidden_token_is_never_drawn():
  rows = 500
  s = settings_of(
    rows,
    temperature=5.0,
    seed=seeds(rows),
    bias_row=np.arange(rows),
    bias_token=np.full(rows, 1),
    bias_value=np.full(rows, -np.inf),
    bias_until=np.full(rows, FOREVER),
  )
  assert set(choose(np.zeros((rows, 3)), s).token.tolist()) == {0, 2}


# What is reported.


@pytest.mark.parametrize("vocabulary", [7, 20, 50])
def test_logprobs_are_those_of_the_unmodified_logits(vocabulary: int):
  logits = normal(4, vocabulary)
  s = settings_of(
    4,
    temperature=1.5,
    seed=seeds(4),
    logprobs=[True, True, False, True],
    bias_row=[0],
    bias_token=[2],
    bias_value=[50.0],
    bias_until=[FOREVER],
  )
  out = choose(logits, s)
  assert out.token[0] == 2
  expected = np.asarray(jax.nn.log_softmax(logits))
  order = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP_LOGPROBS]
  n = min(vocabulary, TOP_LOGPROBS)
  for r in (0, 1, 3):
    np.testing.assert_allclose(out.logprob[r], expected[r, out.token[r]], rtol=1e-5, atol=1e-5)
    assert out.top_token[r, :n].tolist() == order[r].tolist()
    np.testing.assert_allclose(out.top_logprob[r, :n], expected[r, order[r]], rtol=1e-5, atol=1e-5)
    assert np.isneginf(out.top_logprob[r, n:]).all()
  assert (out.logprob[2], out.top_token[2].max(), out.top_logprob[2].min()) == (0, 0, 0)
  assert out.top_token.shape == out.top_logprob.shape == (4, TOP_LOGPROBS)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.7}])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_flagged_and_disturb_nobody(fields, poison: float):
  logits = normal(4, 30)
  s = settings_of(4, seed=seeds(4), logprobs=True, repetition=1.1, **fields)
  clean = choose(logits, s, [3] * 4)
  poisoned = logits.copy()  # jax may still read the array that it was given
  poisoned[1, 7] = poison
  out = choose(poisoned, s, [3] * 4)
  assert clean.finite.tolist() == [True] * 4
  assert out.finite.tolist() == [True, False, True, True]
  assert 0 <= int(out.token[1]) < 30
  for name in ("token", "logprob", "top_token", "top_logprob"):
    a, b = np.asarray(getattr(clean, name)), np.asarray(getattr(out, name))
    np.testing.assert_array_equal(np.delete(a, 1, 0), np.delete(b, 1, 0))


def test_minus_infinity_is_a_finite_choice():
  logits = np.full((1, 5), -np.inf, np.float32)
  logits[0, 3] = -2
  for temperature in (0.0, 1.0):
    out = choose(logits, settings_of(1, temperature=temperature, top_p=0.5, seed=seeds(1)))
    assert (out.token.tolist(), out.finite.tolist()) == ([3], [True])


def test_traces_with_abstract_arguments():
  s = jax.eval_shape(functools.partial(sampling.greedy, 3))
  abstract = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
  out = jax.eval_shape(
    sampling.sample,
    jax.ShapeDtypeStruct((3, 50), jnp.float32),
    s,
    abstract((3,)),
    abstract((2, CONTEXT)),
    abstract((3,)),
  )
  assert out.token.shape == (3,)
  assert out.top_token.shape == (3, TOP_LOGPROBS)
