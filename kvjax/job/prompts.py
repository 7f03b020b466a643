"""Prompt lines in: one JSON object a line, read lazily, each line valid or refused on its own.

A line is `{"id", "prompt"}`, `{"id", "prompt_token_ids"}`, `{"id", "messages"}`, each with sampling
fields beside them, or a line of the OpenAI batch format (`custom_id`, `method`, `url`, `body`).
An `id` is a string or an integer; a native line without one is named by its line number.
Blank lines are skipped but counted, so that a line number is the one an editor shows.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Protocol

from kvjax.chat import check_messages
from kvjax.errors import KvjaxError, RequestError, nearest, show
from kvjax.job.fields import (
  NEUTRAL,
  SAMPLING_FIELDS,
  SERVING_FIELDS,
  WITHOUT_EFFECT,
  Style,
  Unsupported,
  read_sampling,
  read_serving,
  read_text,
  read_token_ids,
)
from kvjax.request import SamplingParams

MAX_LINE_BYTES = 16 * 2**20
_MAX_WARNED = 32  # different unknown fields that are reported; further ones are ignored in silence

_URLS: Mapping[str, Style] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
_BATCH_FIELDS = frozenset(["custom_id", "method", "url", "body"])
_PROMPT_FORMS = ("prompt", "prompt_token_ids", "messages")
_COMMON = SAMPLING_FIELDS | SERVING_FIELDS | NEUTRAL.keys()
_NATIVE_FIELDS = frozenset(["id", *_PROMPT_FORMS]) | _COMMON
_COMMON_BODY = _COMMON | WITHOUT_EFFECT
_BODY_FIELDS: Mapping[Style, frozenset[str]] = {
  "chat": _COMMON_BODY | {"messages", "top_logprobs"},
  "completions": _COMMON_BODY | {"prompt"},
}

LineId = str | int


@dataclasses.dataclass(frozen=True)
class RawLine:
  """A line as it came: its number from 1, and its bytes (None: longer than MAX_LINE_BYTES)."""

  number: int
  data: bytes | None


@dataclasses.dataclass(frozen=True)
class PromptLine:
  """One valid line.

  Attributes:
    number: line number in the input, from 1.
    id: the line's id or custom_id, or its number.
    style: which output format it gets.
    prompt: text, token ids, or messages as `kvjax.chat.check_messages` returns them.
    sampling: what the line says over the configuration's defaults.
    model: the model's name as an OpenAI line gives it, else None.
    priority, cache_salt: as in `kvjax.request.Request`.
  """

  number: int
  id: LineId
  style: Style
  prompt: str | tuple[int, ...] | tuple[dict[str, Any], ...]
  sampling: SamplingParams
  model: str | None = None
  priority: int = 0
  cache_salt: str | None = None


class BadLine(KvjaxError):
  """A line that gets an error record instead of a result.

  Attributes:
    number, id, style: the line; id is None when it could not be read.
    param: the field that is wrong, None when the line as a whole is.
    code: a word for programs: invalid_json, line_too_long, invalid_value, unsupported_parameter,
      unknown_field, duplicate_id, cannot_be_served, model_error.
  """

  def __init__(
    self,
    number: int,
    problem: str,
    *,
    id: LineId | None = None,
    style: Style = "native",
    param: str | None = None,
    code: str = "invalid_value",
  ):
    self.number, self.id, self.style, self.param, self.code = number, id, style, param, code
    super().__init__(f"line {number}: {problem}")


class Tokenizer(Protocol):
  """What a job asks of a tokenizer; each method raises RequestError for what it cannot do."""

  @property
  def vocab_size(self) -> int: ...
  def encode(self, text: str, /) -> Any: ...
  def encode_chat(self, messages: Any, /) -> Any: ...
  def token_text(self, token_id: int, /) -> str: ...
  def token_bytes(self, token_id: int, /) -> bytes: ...


def read_lines(stream: BinaryIO, limit: int = MAX_LINE_BYTES) -> Iterator[RawLine]:
  """Lines of a binary stream, one at a time; of a line over `limit` bytes only its number."""
  number = 0
  while data := stream.readline(limit + 1):
    number += 1
    if len(data) <= limit or data.endswith(b"\n"):
      yield RawLine(number, data)
      continue
    while data and not data.endswith(b"\n"):
      data = stream.readline(limit)
    yield RawLine(number, None)


def lines_of_samples(samples: Iterable[str | Mapping[str, Any]]) -> Iterator[RawLine]:
  """A configuration's own prompts as lines; a bare string is a prompt."""
  for number, sample in enumerate(samples, start=1):
    line = {"prompt": sample} if isinstance(sample, str) else dict(sample)
    yield RawLine(number, json.dumps(line).encode())


class LineParser:
  """Turns raw lines into prompts.

  Args:
    defaults: sampling for what a line does not say.
    strict: an unknown field is an error; otherwise it is ignored with one warning per name.
    warn: takes the text of a warning.
  """

  def __init__(
    self, defaults: SamplingParams, *, strict: bool = False, warn: Callable[[str], None]
  ):
    self._defaults = defaults
    self._strict = strict
    self._warn = warn
    self._warned: set[str] = set()

  def parse(self, raw: RawLine) -> PromptLine | None:
    """The prompt of one line, or None for a blank one. Raises BadLine."""
    fields = _load(raw)
    if fields is None:
      return None
    batch = "custom_id" in fields or "body" in fields
    style: Style = "native"
    name: LineId | None = None
    try:
      if not batch:
        name = _native_id(fields.get("id"), raw.number)
        return self._native(raw.number, name, fields)
      style = _URLS.get(fields["url"], "chat") if isinstance(fields.get("url"), str) else "chat"
      name = _custom_id(fields.get("custom_id"))
      return self._batch(raw.number, name, style, fields)
    except _UnknownField as error:
      code = "unknown_field"
      problem: RequestError = error
    except Unsupported as error:
      code = "unsupported_parameter"
      problem = error
    except RequestError as error:
      code = "invalid_value"
      problem = error
    raise BadLine(
      raw.number, str(problem), id=name, style=style, param=problem.key, code=code
    ) from problem

  def _native(self, number: int, name: LineId, fields: dict[str, Any]) -> PromptLine:
    self._check_known(number, fields, _NATIVE_FIELDS)
    given = [form for form in _PROMPT_FORMS if fields.get(form) is not None]
    if len(given) != 1:
      raise RequestError(
        given[1] if given else "prompt", f"exactly one of {', '.join(_PROMPT_FORMS)}", given
      )
    prompt: str | tuple[int, ...] | tuple[dict[str, Any], ...]
    if given == ["prompt"]:
      prompt = read_text(fields["prompt"], "prompt")
    elif given == ["prompt_token_ids"]:
      prompt = read_token_ids(fields["prompt_token_ids"], "prompt_token_ids")
    else:
      prompt = tuple(check_messages(fields["messages"]))
    sampling = read_sampling(fields, self._defaults, "native")
    return PromptLine(number, name, "native", prompt, sampling, **read_serving(fields))

  def _batch(self, number: int, name: LineId, style: Style, fields: dict[str, Any]) -> PromptLine:
    self._check_known(number, fields, _BATCH_FIELDS)
    if fields.get("method") != "POST":
      raise RequestError("method", "'POST'", fields.get("method"))
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in _URLS:
      raise RequestError("url", " or ".join(map(repr, _URLS)), url)
    if not isinstance(body, dict):
      raise RequestError("body", "an object", body)
    self._check_known(number, body, _BODY_FIELDS[style])
    prompt: str | tuple[int, ...] | tuple[dict[str, Any], ...]
    if style == "chat":
      prompt = tuple(check_messages(body.get("messages")))
    elif isinstance(body.get("prompt"), list):
      if body["prompt"] and isinstance(body["prompt"][0], str | list):
        raise Unsupported("prompt", "one prompt per line, a string or token ids", body["prompt"])
      prompt = read_token_ids(body["prompt"], "prompt")
    else:
      prompt = read_text(body.get("prompt"), "prompt")
    sampling = read_sampling(body, self._defaults, style)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
      raise RequestError("model", "a string", model)
    return PromptLine(number, name, style, prompt, sampling, model, **read_serving(body))

  def _check_known(self, number: int, fields: Mapping[str, Any], known: frozenset[str]) -> None:
    for field in sorted(fields.keys() - known):
      hint = nearest(field, known).strip()
      if self._strict:
        raise _UnknownField(field, "only known fields (--strict)", fields[field], hint)
      if field not in self._warned and len(self._warned) < _MAX_WARNED:
        self._warned.add(field)
        self._warn(
          f"line {number}: the unknown field {show(field)} is ignored, here and in later lines; "
          f"--strict makes it an error. {hint}".rstrip()
        )


class _UnknownField(RequestError):
  pass


def _native_id(value: Any, number: int) -> LineId:
  if value is None:
    return number
  if isinstance(value, bool) or not isinstance(value, str | int):
    raise RequestError("id", "a string or an integer", value)
  return value


def _custom_id(value: Any) -> str:
  if not isinstance(value, str) or not value:
    raise RequestError("custom_id", "a non-empty string", value)
  return value


def _refuse_constant(name: str) -> Any:
  raise ValueError(f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  out: dict[str, Any] = {}
  for name, value in pairs:
    if name in out:
      raise ValueError(f"the key {show(name)} stands there twice")
    out[name] = value
  return out


def _load(raw: RawLine) -> dict[str, Any] | None:
  """The object of a line, or None for a blank one. Raises BadLine without an id."""
  if raw.data is None:
    raise BadLine(
      raw.number, f"expected at most {MAX_LINE_BYTES} bytes, got more", code="line_too_long"
    )
  try:
    text = raw.data.decode("utf-8-sig" if raw.number == 1 else "utf-8").strip()
    if not text:
      return None
    value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
  except UnicodeDecodeError as error:
    bad = raw.data[error.start]
    problem = f"expected UTF-8, got the byte 0x{bad:02x} at column {error.start + 1}"
    raise BadLine(raw.number, problem, code="invalid_json") from error
  except (ValueError, RecursionError) as error:
    why = "too deeply nested" if isinstance(error, RecursionError) else str(error)
    problem = f"expected a JSON object, got {show(raw.data[:200])} ({why})"
    raise BadLine(raw.number, problem, code="invalid_json") from error
  if not isinstance(value, dict):
    raise BadLine(raw.number, f"expected a JSON object, got {show(value)}", code="invalid_json")
  return value


def encode_prompt(line: PromptLine, tokenizer: Tokenizer) -> tuple[int, ...]:
  """The token ids of a line's prompt.

  Raises RequestError when the tokenizer refuses it, or when the line names a token id that the
  vocabulary does not have (as prompt, logit_bias or stop_token_ids).
  """
  rule = f"a token id below the vocabulary's {tokenizer.vocab_size}"
  given = line.prompt if isinstance(line.prompt, tuple) else ()
  key = "prompt" if line.style == "completions" else "prompt_token_ids"
  for place, token in enumerate(given):
    if isinstance(token, int) and token >= tokenizer.vocab_size:
      raise RequestError(f"{key}[{place}]", rule, token)
  for name in ("logit_bias", "stop_token_ids"):
    for token in getattr(line.sampling, name):
      if token >= tokenizer.vocab_size:
        raise RequestError(name, rule, token)
  if isinstance(line.prompt, str):
    return tuple(tokenizer.encode(line.prompt))
  if isinstance(line.prompt[0], dict):
    return tuple(tokenizer.encode_chat(list(line.prompt)))
  return tuple(token for token in line.prompt if isinstance(token, int))
