"""The fields of one prompt line that shape its result: sampling, OpenAI parameters, prompts.

Names and value forms are those of the OpenAI chat and completions interfaces, with the usual
extensions (`top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`, `ignore_eos`).
A null means that the line does not say.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from kvjax.chat import check_text
from kvjax.errors import RequestError
from kvjax.request import MAX_LOGPROBS, SamplingParams, check_serving

Style = Literal["native", "chat", "completions"]

SAMPLING_FIELDS = frozenset(
  [field.name for field in dataclasses.fields(SamplingParams)] + ["max_completion_tokens"]
)

SERVING_FIELDS = frozenset(["priority", "cache_salt"])
"""Fields of a line that say how it is served; they change no token."""

# Parameters that would change the result and that nothing here honours, each with the values at
# which it changes nothing. Null is neutral for all of them.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
  "audio": (),
  "best_of": (1,),  # also n itself: then nothing is chosen among more than n
  "echo": (False,),
  "function_call": ("none", "auto"),
  "functions": ([],),
  "modalities": (["text"],),
  "parallel_tool_calls": (True, False),
  "reasoning_effort": (),
  "response_format": ({"type": "text"},),
  "stream": (False,),
  "stream_options": (),
  "suffix": ("",),
  "tool_choice": ("none", "auto"),
  "tools": ([],),
  "verbosity": ("medium",),
  "web_search_options": (),
}

# Fields of an OpenAI body that cannot change the tokens.
WITHOUT_EFFECT = frozenset(
  [
    "metadata",
    "model",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
  ]
)


class Unsupported(RequestError):
  """A parameter that is known, would change the result, and is not offered."""


def read_sampling(
  fields: Mapping[str, Any], defaults: SamplingParams, style: Style
) -> SamplingParams:
  """The sampling of one line: what it says, over `defaults`.

  Raises RequestError naming the field: a value out of range, a parameter that cannot be honoured,
  `max_tokens` and `max_completion_tokens` that differ.
  """
  given = {
    name: fields[name]
    for name in SAMPLING_FIELDS - {"max_completion_tokens"}
    if fields.get(name) is not None
  }
  most = fields.get("max_completion_tokens")
  if most is not None and given.setdefault("max_tokens", most) != most:
    raise RequestError(
      "max_completion_tokens", f"the same as max_tokens ({given['max_tokens']})", most
    )
  if style == "chat":
    given.pop("logprobs", None)
    given.update(_chat_logprobs(fields))
  if isinstance(given.get("stop"), str):
    given["stop"] = (given["stop"],)
  for name in ("stop", "stop_token_ids"):
    if isinstance(given.get(name), list):
      given[name] = tuple(given[name])
  if isinstance(given.get("logit_bias"), dict):
    given["logit_bias"] = {_token_key(key): value for key, value in given["logit_bias"].items()}
  sampling = dataclasses.replace(defaults, **given)
  _refuse_unsupported(fields, sampling)
  return sampling


def read_serving(fields: Mapping[str, Any]) -> dict[str, Any]:
  """`priority` and `cache_salt` as far as a line has them. Raises RequestError naming the field."""
  given = {name: fields[name] for name in SERVING_FIELDS if fields.get(name) is not None}
  check_serving(given.get("priority", 0), given.get("cache_salt"))
  return given


def _token_key(key: str) -> int:
  """A JSON object's key as the token id that it spells; one spelling per id."""
  if not (key.isascii() and key.isdigit() and (key == "0" or key[0] != "0") and len(key) <= 10):
    raise RequestError("logit_bias", 'token ids as keys, like {"42": -100}', key)
  return int(key)


def _chat_logprobs(fields: Mapping[str, Any]) -> dict[str, int | None]:
  """The chat form: `logprobs` says whether, `top_logprobs` how many alternatives."""
  wanted, top = fields.get("logprobs"), fields.get("top_logprobs")
  if wanted is not None and not isinstance(wanted, bool):
    raise RequestError("logprobs", "true or false (top_logprobs says how many)", wanted)
  if top is not None:
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_LOGPROBS:
      raise RequestError("top_logprobs", f"an integer in [0, {MAX_LOGPROBS}]", top)
    if top > 0 and not wanted:
      raise RequestError("top_logprobs", "logprobs: true beside it", top)
  if wanted is None:
    return {}
  return {"logprobs": (top or 0) if wanted else None}


def _refuse_unsupported(fields: Mapping[str, Any], sampling: SamplingParams) -> None:
  for name, neutral in NEUTRAL.items():
    value = fields.get(name)
    if value is None or value in neutral or (name == "best_of" and value == sampling.n):
      continue
    allowed = " or ".join(["nothing", *map(repr, neutral)])
    raise Unsupported(name, allowed, value, "It is not supported and would change the result")


def read_token_ids(value: Any, key: str) -> tuple[int, ...]:
  """A list of token ids; whether the model has them is asked of the tokenizer later."""
  if not isinstance(value, list) or not value:
    raise RequestError(key, "a non-empty list of token ids", value)
  for place, token in enumerate(value):
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
      raise RequestError(f"{key}[{place}]", "a token id (an integer of at least 0)", token)
  return tuple(value)


def read_text(value: Any, key: str) -> str:
  if not isinstance(value, str) or not value:
    raise RequestError(key, "a non-empty string", value)
  return check_text(key, value)
