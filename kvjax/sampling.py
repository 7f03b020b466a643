"""Per-request sampling inside the step. Randomness comes from (seed, position) alone.

A token is argmax(filtered logits / temperature + Gumbel noise), which draws from the softmax
(Gumbel-max); the noise is a function of the request's seed and the position of the new token, so
neither the slot, nor the company, nor a preemption changes it.

Thresholds (top-k, top-p) are found by bisection over the 32 bits of the logits instead of a sort:
exact, and each probe is one pass over the vocabulary.

Shapes: R rows, V vocabulary, E logit-bias entries, S slots, L max_length.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from kvjax.arrays import Array

TOP_LOGPROBS = 20
"""Alternatives per token in every step's output; a request asks for at most as many."""

_COLDEST = 1e-6  # a temperature below it acts like it: logits divided by less could overflow


class Sampling(struct.PyTreeNode):
  """Sampling parameters of the sampled rows of a step. Padding rows can hold anything."""

  temperature: Array  # float32 [R]   0 = greedy
  top_p: Array  # float32 [R]         1 = off
  top_k: Array  # int32 [R]           0 = off
  min_p: Array  # float32 [R]         0 = off
  repetition: Array  # float32 [R]    1 = off
  presence: Array  # float32 [R]      0 = off
  frequency: Array  # float32 [R]     0 = off
  seed: Array  # uint32 [R, 2]        one random stream per completion
  prompt_length: Array  # int32 [R]   positions from here on are output
  logprobs: Array  # bool [R]         whether log-probabilities are wanted
  bias_row: Array  # int32 [E]        row that an entry applies to; >= R = padding
  bias_token: Array  # int32 [E]
  bias_value: Array  # float32 [E]    added to the logit; -inf forbids
  bias_until: Array  # int32 [E]      the entry holds while the new token's position is below this


def greedy(rows: int) -> Sampling:
  """Sampling that picks the most likely token in every row."""
  return Sampling(
    temperature=jnp.zeros((rows,), jnp.float32),
    top_p=jnp.ones((rows,), jnp.float32),
    top_k=jnp.zeros((rows,), jnp.int32),
    min_p=jnp.zeros((rows,), jnp.float32),
    repetition=jnp.ones((rows,), jnp.float32),
    presence=jnp.zeros((rows,), jnp.float32),
    frequency=jnp.zeros((rows,), jnp.float32),
    seed=jnp.zeros((rows, 2), jnp.uint32),
    prompt_length=jnp.zeros((rows,), jnp.int32),
    logprobs=jnp.zeros((rows,), bool),
    bias_row=jnp.zeros((0,), jnp.int32),
    bias_token=jnp.zeros((0,), jnp.int32),
    bias_value=jnp.zeros((0,), jnp.float32),
    bias_until=jnp.zeros((0,), jnp.int32),
  )


class Sampled(struct.PyTreeNode):
  """What a step chose. Log-probabilities are those of the unmodified logits, 0 where not asked."""

  token: Array  # int32 [R]
  finite: Array  # bool [R]          False: a logit was NaN or +inf, the token means nothing
  logprob: Array  # float32 [R]
  top_token: Array  # int32 [R, 20]
  top_logprob: Array  # float32 [R, 20]


def sample(
  logits: Array, sampling: Sampling, position: Array, tokens: Array, slots: Array
) -> Sampled:
  """Chooses one token per row.

  Args:
    logits: float32 [R, V].
    position: int32 [R], of the token to be chosen: row r has `position` known tokens.
    tokens: int32 [S, L], the known tokens of every slot.
    slots: int32 [R], the slot of each row.
  """
  raw = logits
  logits = _penalize(logits, sampling, position, tokens, slots)
  logits = _bias(logits, sampling, position)
  best = jnp.argmax(logits, -1).astype(jnp.int32)
  finite = jnp.max(raw, -1) < jnp.inf  # a NaN compares false
  token = lax.cond(
    (sampling.temperature > 0).any(),
    lambda: jnp.where(sampling.temperature > 0, _draw(logits, sampling, position), best),
    lambda: best,
  )
  logprob, top_token, top_logprob = _logprobs(raw, token, sampling.logprobs)
  return Sampled(token, finite, logprob, top_token, top_logprob)


def _penalize(logits: Array, s: Sampling, position: Array, tokens: Array, slots: Array) -> Array:
  """Repetition (prompt and output), presence and frequency (output) penalties."""

  def apply() -> Array:
    history = tokens.at[slots].get(mode="clip")
    rows = jnp.arange(len(logits))[:, None]
    at = jnp.arange(history.shape[1], dtype=jnp.int32)
    known = at < position[:, None]
    output = known & (at >= s.prompt_length[:, None])
    zeros = jnp.zeros(logits.shape, jnp.int32)
    seen = zeros.at[rows, history].max(known.astype(jnp.int32)) > 0
    count = zeros.at[rows, history].add(output.astype(jnp.int32))
    by = s.repetition[:, None]
    out = jnp.where(seen, jnp.where(logits > 0, logits / by, logits * by), logits)
    return out - s.frequency[:, None] * count - s.presence[:, None] * (count > 0)

  used = (s.repetition != 1) | (s.presence != 0) | (s.frequency != 0)
  return lax.cond(used.any(), apply, lambda: logits)


def _bias(logits: Array, s: Sampling, position: Array) -> Array:
  if not len(s.bias_row):
    return logits
  holds = position.at[s.bias_row].get(mode="fill", fill_value=0) < s.bias_until
  row = jnp.where(holds, s.bias_row, len(logits))
  return logits.at[row, s.bias_token].add(s.bias_value, mode="drop")


def _draw(logits: Array, s: Sampling, position: Array) -> Array:
  """One token per row from the filtered distribution; filters in the order of the fields below."""
  scaled = logits / jnp.where(s.temperature > 0, jnp.maximum(s.temperature, _COLDEST), 1)[:, None]
  filtered = (s.top_k > 0) | (s.top_p < 1) | (s.min_p > 0)

  def restrict() -> Array:
    return jnp.where(scaled >= threshold(scaled, s.top_k, s.top_p, s.min_p), scaled, -jnp.inf)

  kept = lax.cond(filtered.any(), restrict, lambda: scaled)

  def noise(seed: Array, at: Array) -> Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), at)
    return jax.random.gumbel(key, (logits.shape[1],), jnp.float32)

  # Row by row, so that a row's noise takes the same code whatever the number of rows.
  gumbel = lax.map(lambda x: noise(*x), (s.seed, position))
  return jnp.argmax(kept + gumbel, -1).astype(jnp.int32)


def threshold(logits: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
  """The smallest logit that passes all filters: float32 [R, 1].

  top-k keeps the k largest; top-p, among those, the smallest set whose renormalised probability
  reaches p (Holtzman et al. 2020); min-p, tokens of at least p times the best one's probability
  (Nguyen et al. 2024). Tokens that tie with the last one kept are kept.
  """
  vocabulary = logits.shape[1]
  k = jnp.where(top_k > 0, jnp.minimum(top_k, vocabulary), vocabulary)
  keys = _ordered(logits)
  best = logits.max(-1, keepdims=True)
  weight = jnp.exp(logits - best)

  kth = _largest(lambda t: (keys >= t[:, None]).sum(-1) >= k, len(logits))
  weight = jnp.where(keys >= kth[:, None], weight, 0)
  # Never zero, whatever underflows: a set without any token would be enough.
  enough = jnp.maximum(top_p * weight.sum(-1), jnp.finfo(jnp.float32).tiny)
  pth = _largest(lambda t: jnp.where(keys >= t[:, None], weight, 0).sum(-1) >= enough, len(logits))
  pth = jnp.where(top_p < 1, pth, kth)
  floor = jnp.where(min_p > 0, best[:, 0] + jnp.log(jnp.where(min_p > 0, min_p, 1)), -jnp.inf)
  lowest = jnp.maximum(_unordered(jnp.maximum(kth, pth)), floor)
  # The best token always passes, whatever rounding did to the sums.
  return jnp.minimum(lowest, best[:, 0])[:, None]


def _ordered(x: Array) -> Array:
  """float32 -> uint32 with the same order (sign bit flipped; negatives complemented)."""
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _unordered(key: Array) -> Array:
  """The inverse of `_ordered`."""
  bits = jnp.where(key >> 31 == 1, key & jnp.uint32(0x7FFFFFFF), ~key)
  return lax.bitcast_convert_type(bits, jnp.float32)


def _largest(holds: Callable[[Array], Array], rows: int) -> Array:
  """Largest uint32 key [R] for which the monotone predicate `holds` (true at 0) is true."""

  def bit(i: Array, key: Array) -> Array:
    trial = key | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
    return jnp.where(holds(trial), trial, key)

  return lax.fori_loop(0, 32, bit, jnp.zeros((rows,), jnp.uint32))


def _logprobs(logits: Array, token: Array, wanted: Array) -> tuple[Array, Array, Array]:
  rows, vocabulary = logits.shape
  most = min(TOP_LOGPROBS, vocabulary)

  def compute() -> tuple[Array, Array, Array]:
    normal = logits - jax.nn.logsumexp(logits, -1, keepdims=True)
    top, index = lax.top_k(normal, most)
    pad = ((0, 0), (0, TOP_LOGPROBS - most))
    asked = wanted[:, None]
    return (
      jnp.where(wanted, jnp.take_along_axis(normal, token[:, None], 1)[:, 0], 0),
      jnp.where(asked, jnp.pad(index.astype(jnp.int32), pad), 0),
      jnp.where(asked, jnp.pad(top, pad, constant_values=-jnp.inf), 0),
    )

  def skip() -> tuple[Array, Array, Array]:
    return (
      jnp.zeros((rows,), jnp.float32),
      jnp.zeros((rows, TOP_LOGPROBS), jnp.int32),
      jnp.zeros((rows, TOP_LOGPROBS), jnp.float32),
    )

  return lax.cond(wanted.any(), compute, skip)
