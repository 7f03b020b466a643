"""What a user asks for and what comes back: requests, sampling parameters, completions."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.errors import RequestError

MAX_LOGPROBS = 20  # top alternatives per token that a step returns
MAX_LOGIT_BIAS = 300  # entries per request, the bound of the OpenAI interface
MAX_STOP_TOKEN_IDS = 16  # per request, on top of the model's end-of-sequence ids
MAX_N = 128


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How the tokens of one request are chosen.

  Attributes:
    max_tokens: most new tokens; None means as many as the model's context allows.
    min_tokens: stop conditions by token id are not allowed before this many new tokens.
    temperature: 0 is greedy.
    top_p: keep the smallest set of most likely tokens whose probability reaches top_p, in (0, 1].
    top_k: keep the k most likely tokens; 0 keeps all.
    min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
    repetition_penalty: > 0; divides positive and multiplies negative logits of every token seen in
      prompt or output (Keskar et al. 2019, CTRL).
    presence_penalty: in [-2, 2]; subtracted once for each token seen in the output.
    frequency_penalty: in [-2, 2]; subtracted for each occurrence in the output.
    logit_bias: token id -> value added to its logit, in [-100, 100].
    seed: randomness comes from (seed, completion index, position) alone; None draws one from the
      request's place in the input.
    stop: strings that end the completion; the text is cut before the one that is complete first.
    stop_token_ids: ids that end the completion, besides the model's end-of-sequence ids.
    ignore_eos: the model's end-of-sequence ids do not end the completion.
    n: completions per prompt.
    logprobs: None for no log-probabilities, else how many alternatives per token (0 to 20).
  """

  max_tokens: int | None = None
  min_tokens: int = 0
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
  seed: int | None = None
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  ignore_eos: bool = False
  n: int = 1
  logprobs: int | None = None

  def __post_init__(self) -> None:
    for name, kind, low, high, rule in _RANGES:
      _check_number(name, getattr(self, name), kind, low, high, rule)
    if self.max_tokens is not None:
      _check_number("max_tokens", self.max_tokens, int, 1, 2**31 - 1, "an integer of at least 1")
      if self.min_tokens > self.max_tokens:
        raise RequestError("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
    if self.seed is not None:
      _check_number("seed", self.seed, int, -(2**63), 2**63 - 1, "a 64-bit integer")
    if self.logprobs is not None:
      _check_number(
        "logprobs", self.logprobs, int, 0, MAX_LOGPROBS, f"an integer in [0, {MAX_LOGPROBS}]"
      )
    if not isinstance(self.ignore_eos, bool):
      raise RequestError("ignore_eos", "true or false", self.ignore_eos)
    _check_stop(self.stop)
    _check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
    if not isinstance(self.logit_bias, Mapping):
      raise RequestError("logit_bias", "a map from token id to a number", self.logit_bias)
    _check_ids("logit_bias", tuple(self.logit_bias), MAX_LOGIT_BIAS)
    for token, value in self.logit_bias.items():
      _check_number(f"logit_bias.{token}", value, float, -100, 100, "a number in [-100, 100]")

  @property
  def greedy(self) -> bool:
    return self.temperature == 0.0


# name, type, lowest, highest, the rule in words
_RANGES = (
  ("min_tokens", int, 0, 2**31 - 1, "an integer of at least 0"),
  ("temperature", float, 0.0, 100.0, "a number in [0, 100]"),
  ("top_p", float, 1e-6, 1.0, "a number in [1e-6, 1]"),
  ("top_k", int, 0, 2**31 - 1, "an integer of at least 0 (0 keeps all)"),
  ("min_p", float, 0.0, 1.0, "a number in [0, 1]"),
  ("repetition_penalty", float, 1e-2, 100.0, "a number in [0.01, 100]"),
  ("presence_penalty", float, -2.0, 2.0, "a number in [-2, 2]"),
  ("frequency_penalty", float, -2.0, 2.0, "a number in [-2, 2]"),
  ("n", int, 1, MAX_N, f"an integer in [1, {MAX_N}]"),
)


def _check_number(name: str, value: Any, kind: type, low: float, high: float, rule: str) -> None:
  allowed = (int,) if kind is int else (int, float)
  ok = isinstance(value, allowed) and not isinstance(value, bool)
  if not ok or not low <= value <= high:  # a NaN fails the comparison
    raise RequestError(name, rule, value)


def _check_ids(name: str, ids: Any, most: int) -> None:
  if not isinstance(ids, tuple) or len(ids) > most:
    raise RequestError(name, f"at most {most} token ids", ids)
  for token in ids:
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
      raise RequestError(name, "token ids (integers of at least 0)", token)


def _check_stop(stop: Any) -> None:
  rule = "at most 16 non-empty strings"
  if not isinstance(stop, tuple) or len(stop) > 16:
    raise RequestError("stop", rule, stop)
  for text in stop:
    if not isinstance(text, str) or not text:
      raise RequestError("stop", rule, text)


@dataclasses.dataclass(frozen=True)
class Request:
  """One prompt to be completed `sampling.n` times.

  Attributes:
    id: the caller's name for it, unique among the requests in flight.
    prompt_token_ids: int ids, at least one.
    sampling: how tokens are chosen.
    default_seed: stands in for `sampling.seed` when that is None, so that a run can be repeated.
    priority: requests with a lower value go first, whenever they came, and are preempted last.
    cache_salt: cached prefixes are shared only among requests with the same salt.
  """

  id: str
  prompt_token_ids: tuple[int, ...]
  sampling: SamplingParams = SamplingParams()
  default_seed: int = 0
  priority: int = 0
  cache_salt: str | None = None

  def __post_init__(self) -> None:
    check_serving(self.priority, self.cache_salt)


def check_serving(priority: Any, cache_salt: Any) -> None:
  """Raises RequestError for values that a Request does not take."""
  _check_number("priority", priority, int, -(2**31), 2**31 - 1, "a 32-bit integer")
  if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
    raise RequestError("cache_salt", "a non-empty string", cache_salt)


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
  """Natural-log probabilities of one emitted token, before temperature, filters and penalties.

  `top` holds the most likely tokens, best first, as (token id, log-probability).
  """

  token_id: int
  logprob: float
  top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Completion:
  """One finished completion of a request.

  Attributes:
    request_id, index: which request, and which of its n completions.
    text: decoded text, cut before a stop string, without special tokens.
    token_ids: every sampled token, the ending one included.
    finish_reason: "stop" (end of sequence, stop id or stop string), "length", "abort", or "error"
      (the model gave no finite logits).
    prompt_tokens: length of the prompt in tokens.
    logprobs: one entry per token id when asked for, else None.
  """

  request_id: str
  index: int
  text: str
  token_ids: tuple[int, ...]
  finish_reason: str
  prompt_tokens: int
  logprobs: tuple[TokenLogprobs, ...] | None = None
