"""Sequences: the host's records of completions that are being made."""

import numpy as np

from kvjax.detokenizer import IncrementalDetokenizer
from kvjax.offload.fetches import Fetch
from kvjax.prefix import Boundary, Chain
from kvjax.request import Completion, Request, SamplingParams, TokenLogprobs
from kvjax.tokenizer import Tokenizer

FOREVER = 2**31 - 1
"""`bias_until` of an entry that always holds."""


class Scheduled:
  """What scheduling knows of a sequence: how many tokens there are, never which are coming.

  Attributes:
    order: (priority, arrival of the request, index): the order of admission and, reversed, of
      preemption.
    tokens: ids that the host has read: prompt, then output.
    prompt_length: how many of them are the prompt.
    limit: most tokens, prompt and output.
    chain: names of its prefixes.
    siblings: all sequences of the same prompt's request, itself included.
    length: tokens that exist, those still in flight on the device included.
    computed: tokens whose cache entries are written by steps already dispatched.
    reached: most tokens ever computed or found in the cache; computing below it is recomputation.
    slot: row of the engine state while running.
    settled: tokens that it had when it entered its slot.
    boundary, next_boundary: the last prefix that is named in the index, and the next length that
      will be while it runs.
    preempted: whether it ran before and had to give its pages back.
    passed: later sequences that were admitted while this one lacked pages.
    fetch, searched, fetches: pieces from beyond the device that it waits for, the version of the
      tiers in which it last searched for some, and how often some were lost.
    patience: steps for which it still waits for a prefix that another one computes; -1 when it has
      not begun to.
    loading: whether pages up to `computed` are loaded by a step that is only planned yet.
    offered: length up to which its pages were offered to the tiers.
  """

  def __init__(self, tokens: list[int], limit: int, order: tuple[int, int, int], chain: Chain):
    self.order = order
    self.tokens = tokens
    self.prompt_length = len(tokens)
    self.limit = limit
    self.chain = chain
    self.siblings: list[Scheduled] = [self]
    self.length = len(tokens)
    self.computed = 0
    self.reached = 0
    self.slot: int | None = None
    self.settled = 0
    self.boundary: Boundary | None = None
    self.next_boundary = 0
    self.preempted = False
    self.passed = 0
    self.fetch: Fetch | None = None
    self.searched = -1
    self.fetches = 0
    self.patience = -1
    self.loading = False
    self.offered = 0

  @property
  def remaining(self) -> int:
    """Known tokens whose cache entries are not written yet; 1 means a decode row."""
    return self.length - self.computed

  @property
  def in_flight(self) -> int:
    """Tokens sampled on the device that the host has not read."""
    return self.length - len(self.tokens)


class Sequence(Scheduled):
  """One of a request's n completions, with what makes its tokens and its text.

  Attributes:
    request, index: which completion of which request.
    finish_reason: why it ended; None before.
    logprobs_wanted: how many most likely tokens to report besides; None for no logprobs.
    bias, biases: its logit-bias entries, and how many there are.
    arrived, last_token_at: on the engine's clock.
  """

  def __init__(
    self,
    request: Request,
    index: int,
    arrival: int,
    tokenizer: Tokenizer,
    limit: int,
    chain: Chain,
    arrived: float,
  ):
    super().__init__(
      list(request.prompt_token_ids), limit, (request.priority, arrival, index), chain
    )
    self.request = request
    self.index = index
    self.finish_reason: str | None = None
    self.logprobs: list[TokenLogprobs] = []
    self.arrived = arrived
    self.last_token_at: float | None = None
    self.seed = _seed_words(request, index)
    sampling = request.sampling
    self.stop_ids = frozenset(sampling.stop_token_ids) | (
      frozenset() if sampling.ignore_eos else frozenset(tokenizer.eos_ids)
    )
    self.bias = _bias(sampling, self.stop_ids, self.prompt_length)
    self.biases = len(self.bias[0])
    self.text = IncrementalDetokenizer(tokenizer, sampling.stop)
    self.logprobs_wanted = sampling.logprobs
    self._stops = bool(sampling.stop)

  def go_on_from(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> None:
    """Takes tokens that were sampled for it elsewhere as its first ones; it has not run yet."""
    self.tokens += tokens
    self.length = len(self.tokens)
    self.logprobs += logprobs
    if self._stops:
      for token in tokens:
        self.text.push(token)

  def accept(self, token: int, logprobs: TokenLogprobs | None) -> None:
    """Appends a token that the host has read and decides whether it ends the sequence."""
    tokens = self.tokens
    tokens.append(token)
    if logprobs is not None:
      self.logprobs.append(logprobs)
    if token in self.stop_ids:
      self.finish_reason = "stop"  # the ending token is not part of the text
      return
    if self._stops:  # otherwise there is no hurry, see `completion`
      self.text.push(token)
      if self.text.stopped is not None:
        self.finish_reason = "stop"
        return
    if len(tokens) >= self.limit:
      self.finish_reason = "length"

  def completion(self) -> Completion:
    assert self.finish_reason is not None
    if not self._stops:
      ended = self.finish_reason == "stop"
      for token in self.tokens[self.prompt_length : len(self.tokens) - ended]:
        self.text.push(token)
    return Completion(
      request_id=self.request.id,
      index=self.index,
      text=self.text.finish(),
      token_ids=tuple(self.tokens[self.prompt_length :]),
      finish_reason=self.finish_reason,
      prompt_tokens=self.prompt_length,
      logprobs=None if self.request.sampling.logprobs is None else tuple(self.logprobs),
    )


def _seed_words(request: Request, index: int) -> np.ndarray:
  """uint32 [2]: one random stream per (seed, completion index).

  SeedSequence mixes all bits, so that neighbouring seeds or indices share nothing. It is always
  given three words of 32 bits, since it reads what is shorter as if zeros followed.
  """
  seed = request.sampling.seed
  if seed is None:
    seed = request.default_seed
  seed %= 2**64
  entropy = [seed % 2**32, seed >> 32, index]
  return np.random.SeedSequence(entropy).generate_state(2, np.uint32)


def _bias(
  sampling: SamplingParams, stop_ids: frozenset[int], prompt_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(token int32 [e], value float32 [e], until int32 [e]): logit bias, and the stop ids that
  `min_tokens` forbids at first."""
  entries: list[tuple[int, float, int]] = [
    (token, value, FOREVER) for token, value in sampling.logit_bias.items()
  ]
  if sampling.min_tokens:
    until = prompt_length + sampling.min_tokens
    entries += [(token, -np.inf, until) for token in sorted(stop_ids)]
  return (
    np.array([token for token, _, _ in entries], np.int32),
    np.array([value for _, value, _ in entries], np.float32),
    np.array([min(until, FOREVER) for _, _, until in entries], np.int32),
  )
