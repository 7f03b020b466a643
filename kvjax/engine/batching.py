"""From a plan to the arrays of one device call, padded to a short list of shapes."""

import dataclasses
from typing import cast

import numpy as np

from kvjax.config import SchedulerConfig
from kvjax.engine.scheduler import Plan
from kvjax.engine.sequence import Sequence
from kvjax.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from kvjax.sampling import Sampling
from kvjax.state import FROM_STATE
from kvjax.steps import Batch

_BIAS_BUCKETS = (0, 64, 1024, 16384, 131072)  # logit-bias entries of all rows together


@dataclasses.dataclass(frozen=True)
class Shape:
  """The static sizes of a call: everything that decides which compiled program runs."""

  decode_rows: int
  prefill_blocks: int
  query_block: int
  bias_entries: int
  steps: int
  sampled_rows: int

  def __str__(self) -> str:
    if self.sampled_rows < self.decode_rows:
      return f"{self.decode_rows} rows of any kind, {self.sampled_rows} of them sampled"
    text = f"{self.decode_rows} decode rows"
    if self.prefill_blocks:
      text += f" + {self.prefill_blocks} × {self.query_block} prefill rows"
    if self.bias_entries:
      text += f", {self.bias_entries} logit biases"
    return text + (f", {self.steps} steps" if self.steps > 1 else "")


def decode_buckets(config: SchedulerConfig) -> tuple[int, ...]:
  """Numbers of decode rows that steps are padded to: powers of 4, and max_sequences."""
  most = config.max_sequences
  if config.decode_buckets:
    return (*(b for b in config.decode_buckets if b < most), most)
  sizes, size = [], 1
  while size < most:
    sizes.append(size)
    size *= 4
  return (*sizes, most)


def prefill_buckets(config: SchedulerConfig) -> tuple[int, ...]:
  """Numbers of query blocks that steps are padded to: one, and all that the budget allows."""
  most = -(-config.token_budget // config.query_block)
  if config.prefill_buckets:
    return (*(b for b in config.prefill_buckets if b < most), most)
  return (1, most) if most > 1 else (1,)


def shapes(config: SchedulerConfig, invariant: bool = False) -> tuple[Shape, ...]:
  """Every shape that a run without logit biases can meet.

  A step with prefill pads its decode rows to none or all, since its cost is that of the prompt.
  """
  if invariant:
    return (invariant_shape(config),)
  most = config.max_sequences
  block = config.query_block
  steps = sorted({1, config.decode_steps})
  decode = [Shape(d, 0, block, 0, k, d) for k in steps for d in decode_buckets(config)]
  mixed = [Shape(d, n, block, 0, 1, d + n) for d in (0, most) for n in prefill_buckets(config)]
  return tuple(decode + mixed)


def invariant_shape(config: SchedulerConfig) -> Shape:
  """The one shape of batch-invariant runs: a row for every sequence and every prompt token of a
  step, each attending by itself, so that products and sums are the same whoever else is there."""
  rows = config.max_sequences + config.token_budget
  entries = config.max_sequences * (MAX_LOGIT_BIAS + 2 * MAX_STOP_TOKEN_IDS)
  entries = next((size for size in _BIAS_BUCKETS if size >= entries), entries)
  return Shape(rows, 0, config.query_block, entries, 1, config.max_sequences)


def shape_of(plan: Plan, config: SchedulerConfig, invariant: bool = False) -> Shape:
  """The smallest listed shape that holds a plan."""
  if invariant:
    return invariant_shape(config)
  block = config.query_block
  blocks = sum(-(-w.count // block) for w in plan.prefill)
  entries = sum([s.biases for s in _sequences(plan)])
  if blocks:
    rows = config.max_sequences if plan.decode else 0
    blocks = _bucket(prefill_buckets(config), blocks)
  else:
    rows = _bucket(decode_buckets(config), len(plan.decode))
  # Only two numbers of decode steps are compiled: a call may do more than its rows still need.
  steps = config.decode_steps if plan.steps > 1 else 1
  return Shape(rows, blocks, block, _bucket(_BIAS_BUCKETS, entries), steps, rows + blocks)


def _bucket(sizes: tuple[int, ...], n: int) -> int:
  """The first size that holds n; a multiple of the last one where none does."""
  return next((size for size in sizes if size >= n), -(-n // sizes[-1]) * sizes[-1])


class SlotSampling:
  """Sampling parameters of the running sequences, one numpy row per slot."""

  def __init__(self, slots: int):
    self.slots = slots
    self.temperature = np.zeros(slots, np.float32)
    self.top_p = np.ones(slots, np.float32)
    self.top_k = np.zeros(slots, np.int32)
    self.min_p = np.zeros(slots, np.float32)
    self.repetition = np.ones(slots, np.float32)
    self.presence = np.zeros(slots, np.float32)
    self.frequency = np.zeros(slots, np.float32)
    self.seed = np.zeros((slots, 2), np.uint32)
    self.prompt_length = np.zeros(slots, np.int32)
    self.logprobs = np.zeros(slots, bool)

  def fill(self, sequence: Sequence, slot: int) -> None:
    """Copies a sequence's parameters into its slot."""
    s = sequence.request.sampling
    self.temperature[slot] = s.temperature
    self.top_p[slot] = s.top_p
    self.top_k[slot] = s.top_k
    self.min_p[slot] = s.min_p
    self.repetition[slot] = s.repetition_penalty
    self.presence[slot] = s.presence_penalty
    self.frequency[slot] = s.frequency_penalty
    self.seed[slot] = sequence.seed
    self.prompt_length[slot] = sequence.prompt_length
    self.logprobs[slot] = s.logprobs is not None

  def rows(self, slots: np.ndarray, bias: tuple[np.ndarray, ...]) -> Sampling:
    """The rows of `slots` (int [R]); slots past the end are greedy padding."""
    real = slots < self.slots
    at = np.where(real, slots, 0)
    row, token, value, until = bias
    return Sampling(
      temperature=np.where(real, self.temperature[at], np.float32(0)),
      top_p=np.where(real, self.top_p[at], np.float32(1)),
      top_k=np.where(real, self.top_k[at], np.int32(0)),
      min_p=np.where(real, self.min_p[at], np.float32(0)),
      repetition=np.where(real, self.repetition[at], np.float32(1)),
      presence=np.where(real, self.presence[at], np.float32(0)),
      frequency=np.where(real, self.frequency[at], np.float32(0)),
      seed=self.seed[at],
      prompt_length=self.prompt_length[at],
      logprobs=self.logprobs[at] & real,
      bias_row=row,
      bias_token=token,
      bias_value=value,
      bias_until=until,
    )


def build(plan: Plan, shape: Shape, sampling: SlotSampling) -> tuple[Batch, np.ndarray, list[int]]:
  """Fills the arrays of a call.

  Returns:
    (batch, stops int32 [decode_rows], sampled row of each of plan.decode + plan.prefill).
    stops bounds the positions that a call of several decode steps may compute.
  """
  for admission in plan.admitted:
    sampling.fill(cast(Sequence, admission.sequence), admission.slot)
  if shape.sampled_rows < shape.decode_rows:
    return _build_rows(plan, shape, sampling)
  d, block = shape.decode_rows, shape.query_block
  rows = d + shape.prefill_blocks * block
  tokens = np.zeros(rows, np.int32)
  slots = np.full(rows, sampling.slots, np.int32)
  positions = np.zeros(rows, np.int32)
  sampled = np.full(d + shape.prefill_blocks, rows, np.int32)
  sampled[:d] = np.arange(d)
  sampled_slots = np.full(len(sampled), sampling.slots, np.int64)
  stops = np.zeros(d, np.int32)

  # Neighbouring rows share a loop over keys, so rows of like length stand together.
  n = len(plan.decode)
  order = np.argsort(plan.starts[:n], kind="stable")
  tokens[:n] = FROM_STATE  # sampled there
  slots[:n] = sampled_slots[:n] = plan.slots[order]
  positions[:n] = plan.starts[order]
  stops[:n] = plan.stops[order]
  rank = np.empty(n, np.int64)
  rank[order] = np.arange(n)
  where = rank.tolist()
  for i in plan.known:  # the last one of a prompt, say
    tokens[where[i]] = plan.decode[i].tokens[plan.starts[i]]
  at = 0
  for w in plan.prefill:
    begin = d + at * block
    tokens[begin : begin + w.count] = w.sequence.tokens[w.start : w.start + w.count]
    slots[begin : begin + w.count] = w.slot
    positions[begin : begin + w.count] = np.arange(w.start, w.start + w.count)
    at += -(-w.count // block)
    where.append(d + at - 1)
    if w.samples:
      sampled[where[-1]] = begin + w.count - 1
      sampled_slots[where[-1]] = w.slot
  batch = Batch(
    tokens=tokens,
    slots=slots,
    positions=positions,
    sampled=sampled,
    sampling=_sampling(plan, shape, sampling, where, sampled_slots),
    decode_rows=d,
    query_block=block,
  )
  return batch, stops, where


def _build_rows(
  plan: Plan, shape: Shape, sampling: SlotSampling
) -> tuple[Batch, np.ndarray, list[int]]:
  """`build` for batch-invariant shapes: prompt tokens are rows like those that decode."""
  rows, most = shape.decode_rows, shape.sampled_rows
  tokens, positions = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
  slots = np.full(rows, sampling.slots, np.int32)
  sampled = np.full(most, rows, np.int32)
  sampled_slots = np.full(most, sampling.slots, np.int64)
  where, at = [], 0
  # Neighbouring rows share a loop over keys, so rows of like length stand together.
  work = plan.work()
  begin = [0] * len(work)
  for i in sorted(range(len(work)), key=lambda i: work[i].start):
    begin[i], at = at, at + work[i].count
  for i, w in enumerate(work):
    part = slice(begin[i], begin[i] + w.count)
    known = w.sequence.tokens[w.start : w.start + w.count]
    tokens[part] = known if len(known) == w.count else FROM_STATE
    slots[part] = w.slot
    positions[part] = np.arange(w.start, w.start + w.count)
    where.append(i)
    if w.samples:
      sampled[i] = part.stop - 1
      sampled_slots[i] = w.slot
  batch = Batch(
    tokens=tokens,
    slots=slots,
    positions=positions,
    sampled=sampled,
    sampling=_sampling(plan, shape, sampling, where, sampled_slots),
    decode_rows=rows,
    query_block=shape.query_block,
  )
  return batch, np.zeros(rows, np.int32), where


def _sampling(
  plan: Plan, shape: Shape, sampling: SlotSampling, where: list[int], slots: np.ndarray
) -> Sampling:
  """Parameters of the sampled rows: `slots` int [R], `where` as `build` returns it."""
  return sampling.rows(slots, _bias(plan, where, shape.bias_entries, len(slots)))


def _bias(plan: Plan, where: list[int], entries: int, rows: int) -> tuple[np.ndarray, ...]:
  row = np.full(entries, rows, np.int32)
  token, until = np.zeros(entries, np.int32), np.zeros(entries, np.int32)
  value = np.zeros(entries, np.float32)
  at = 0
  if not entries:
    return row, token, value, until
  for s, r in zip(_sequences(plan), where, strict=True):
    if s.biases:
      part = slice(at, at + s.biases)
      row[part] = r
      token[part], value[part], until[part] = s.bias
      at += s.biases
  return row, token, value, until


def _sequences(plan: Plan) -> list[Sequence]:
  """Those of plan.decode and plan.prefill. Whatever reaches a device is a whole sequence."""
  return cast(list[Sequence], plan.decode + [w.sequence for w in plan.prefill])
