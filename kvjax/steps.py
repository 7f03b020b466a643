"""The pure steps: state -> state. Everybody shares them: the host loop, scans, notebooks.

A step runs ragged rows: `decode_rows` sequences with one token each and query blocks with
consecutive prompt tokens of one sequence each (chunked prefill). Pages must have been reserved;
rows without a page are not written, and counted in the output.

Shapes: T rows, B query_block, N = (T - decode_rows) / B blocks, R = decode_rows + N sampled rows,
S slots, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from kvjax import sampling as sampling_lib
from kvjax.arrays import Array
from kvjax.models import decoder
from kvjax.models.spec import ModelSpec
from kvjax.sampling import TOP_LOGPROBS, Sampling
from kvjax.state import FROM_STATE, EngineState


class Batch(struct.PyTreeNode):
  """The rows of one step.

  Sampled row r < decode_rows is row r; sampled row decode_rows + j is a row of block j.
  """

  tokens: Array  # int32 [T]     token of each row; FROM_STATE reads state.tokens[slot, position]
  slots: Array  # int32 [T]      sequence of each row; >= S is padding
  positions: Array  # int32 [T]  position of each row in its sequence
  sampled: Array  # int32 [R]    row whose next token is wanted; >= T for none
  sampling: Sampling  # [R]      how it is chosen
  decode_rows: int = struct.field(pytree_node=False)
  query_block: int = struct.field(pytree_node=False)


class StepOutput(struct.PyTreeNode):
  """What a step returns besides the state."""

  sampled: sampling_lib.Sampled  # the chosen tokens of the R sampled rows
  logits: Array  # float32 [R, V]   unmodified; unused outputs cost nothing under jit
  unreserved: Array  # int32 [groups]  rows without a page of their own: a caller's error, see step


def step(
  params: decoder.Params,
  state: EngineState,
  batch: Batch,
  *,
  spec: ModelSpec,
  implementation: Any = None,
) -> tuple[EngineState, StepOutput]:
  """One ragged step of prefill and decode rows together.

  Writes the rows' keys and values, samples the next token of the sampled rows and stores it in
  `state.tokens` (unless `admit` gave the id of that position: a prompt computed in chunks), and
  moves `state.lengths` past the rows.

  A row whose position has no reserved page, or one that a fork shares since it was reserved, is
  not written; its output means nothing, and `out.unreserved` counts it in that group, as it does
  rows whose window reaches back to pages that were given back.

  Args:
    params: see `kvjax.models.decoder.Params`.
    state: donate it (`donate_argnames="state"`), or the pools are copied.
    batch: rows whose pages are reserved (`kvjax.reserve`).
    spec: static.
    implementation: static; attention implementation(s), see `pallas_kernels.paged_attention`.
  """
  state, tokens = _take_tokens(state, batch)
  unreserved = decoder.unreserved(state, batch.slots, batch.positions)
  hidden, state = decoder.forward(
    params,
    spec,
    state,
    tokens,
    batch.slots,
    batch.positions,
    decode_rows=batch.decode_rows,
    query_block=batch.query_block,
    implementation=implementation,
  )
  with jax.named_scope("head"):
    logits = decoder.logits(params, hidden.at[batch.sampled].get(mode="clip"))
  with jax.named_scope("sampling"):
    state, sampled = _sample(state, batch, logits)
  lengths = state.lengths.at[batch.slots].max(batch.positions + 1, mode="drop")
  return state.replace(lengths=lengths), StepOutput(sampled, logits, unreserved)


def decode(
  params: decoder.Params,
  state: EngineState,
  batch: Batch,
  *,
  spec: ModelSpec,
  steps: int,
  stops: Any = None,
  implementation: Any = None,
) -> tuple[EngineState, StepOutput]:
  """`steps` decode steps in one call: each feeds the token that the one before chose.

  Args:
    batch: decode rows only; pages up to min(position + steps, stop) of each must be reserved.
    steps: static.
    stops: int32 [R]; a row whose position reaches its stop turns into padding, and what it
      samples from then on means nothing. max_length by default.

  Returns:
    (state, StepOutput with a leading axis [steps]; logits are None).
  """
  if len(batch.tokens) != batch.decode_rows:
    raise ValueError(
      f"decode: expected decode rows only ({batch.decode_rows}), got {len(batch.tokens)} rows"
    )
  longest = state.tokens.shape[1]
  stops = jnp.full_like(batch.positions, longest) if stops is None else jnp.asarray(stops)

  def body(carry: tuple[EngineState, Batch], _: None) -> tuple[Any, StepOutput]:
    state, batch = carry
    state, out = step(params, state, batch, spec=spec, implementation=implementation)
    positions = batch.positions + 1
    batch = batch.replace(
      tokens=jnp.full_like(batch.tokens, FROM_STATE),
      positions=positions,
      slots=jnp.where(positions < stops, batch.slots, state.slots),
    )
    return (state, batch), out.replace(logits=None)

  # The carry must keep its type: tables planned on the host become device arrays first.
  state, batch = jax.tree.map(jnp.asarray, (state, batch))
  batch = batch.replace(slots=jnp.where(batch.positions < stops, batch.slots, state.slots))
  (state, _), out = lax.scan(body, (state, batch), length=steps)
  return state, out


def decode_batch(state: EngineState, slots: Any, sampling: Sampling | None = None) -> Batch:
  """A batch that feeds the last known token of each slot: pure, usable under jit.

  Args:
    slots: int32 [n], distinct; values >= S are padding.
    sampling: [n]; greedy by default.
  """
  slots = jnp.atleast_1d(jnp.asarray(slots, jnp.int32))
  rows = len(slots)
  return Batch(
    tokens=jnp.full((rows,), FROM_STATE, jnp.int32),
    slots=slots,
    positions=state.lengths.at[slots].get(mode="clip"),
    sampled=jnp.arange(rows, dtype=jnp.int32),
    sampling=sampling_lib.greedy(rows) if sampling is None else sampling,
    decode_rows=rows,
    query_block=1,
  )


def prefill_batch(
  state: EngineState,
  slot: Any,
  tokens: int,
  sampling: Sampling | None = None,
  query_block: int = 64,
) -> Batch:
  """A batch that computes the next `tokens` known tokens of one slot: pure, usable under jit.

  Args:
    slot: an int or int32 [].
    tokens: static, at least 1; positions lengths[slot] … lengths[slot] + tokens - 1.
    sampling: [blocks]; only the last row, in the last block, is sampled. Greedy by default.
    query_block: rows per block; the last block is padded.
  """
  if tokens < 1:
    raise ValueError(f"tokens: expected at least 1, got {tokens}")
  blocks = -(-tokens // query_block)
  rows = blocks * query_block
  row = jnp.arange(rows, dtype=jnp.int32)
  start = state.lengths[slot]
  return Batch(
    tokens=jnp.full((rows,), FROM_STATE, jnp.int32),
    slots=jnp.where(row < tokens, jnp.asarray(slot, jnp.int32), state.slots),
    positions=jnp.where(row < tokens, start + row, 0),
    sampled=jnp.full((blocks,), rows, jnp.int32).at[-1].set(tokens - 1),
    sampling=sampling_lib.greedy(blocks) if sampling is None else sampling,
    decode_rows=0,
    query_block=query_block,
  )


PACKED_WIDTH = 3 + 2 * TOP_LOGPROBS
"""int32 words per sampled row in a packed output."""


def pack(out: StepOutput) -> Array:
  """Everything that the host reads of a step, in one int32 array [.. R + 1, PACKED_WIDTH].

  Row r: token, finite, log-probability bits, top tokens, top log-probability bits. The last row
  starts with the unreserved rows of all groups.
  """
  s = out.sampled
  bits = lax.bitcast_convert_type
  rows = jnp.concatenate(
    [
      s.token[..., None],
      s.finite[..., None].astype(jnp.int32),
      bits(s.logprob, jnp.int32)[..., None],
      s.top_token,
      bits(s.top_logprob, jnp.int32),
    ],
    axis=-1,
  )
  flags = jnp.zeros((*rows.shape[:-2], 1, PACKED_WIDTH), jnp.int32)
  flags = flags.at[..., 0, 0].set(out.unreserved.sum(-1))
  return jnp.concatenate([rows, flags], axis=-2)


def _take_tokens(state: EngineState, batch: Batch) -> tuple[EngineState, Array]:
  """Tokens of the rows; ids that came with the batch are stored in the state."""
  given = batch.tokens != FROM_STATE
  slots = jnp.where(given, batch.slots, state.slots)
  stored = state.tokens.at[slots, batch.positions].set(batch.tokens, mode="drop")
  known = stored.at[batch.slots, batch.positions].get(mode="fill", fill_value=0)
  return state.replace(tokens=stored), known


def _sample(
  state: EngineState, batch: Batch, logits: Array
) -> tuple[EngineState, sampling_lib.Sampled]:
  slots = batch.slots.at[batch.sampled].get(mode="fill", fill_value=state.slots)
  positions = batch.positions.at[batch.sampled].get(mode="fill", fill_value=0) + 1
  sampled = sampling_lib.sample(logits, batch.sampling, positions, state.tokens, slots)
  # A prompt computed in chunks goes on after each of them: its own ids stay.
  fresh = positions >= state.known.at[slots].get(mode="fill", fill_value=0)
  at = jnp.where(fresh, slots, state.slots)
  tokens = state.tokens.at[at, positions].set(sampled.token, mode="drop")
  return state.replace(tokens=tokens), sampled
