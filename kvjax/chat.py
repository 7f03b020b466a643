"""Chat messages to prompt text, through the model's own Jinja template."""

import datetime
import functools
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

from kvjax.errors import RequestError, nearest

# A template comes with the model file and is not trusted: what it may use up for one chat.
MAX_SECONDS = 10.0
MAX_EXTRA_CHARS = 1_000_000  # rendered text beyond eight times the size of the messages
MAX_REPEATED = 1_000_000  # characters or items out of one multiplication
MAX_RANGE = 100_000  # steps of one range(), the bound that jinja2's sandbox has

_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_ROLE = re.compile(r"[A-Za-z][\w-]{0,63}")


def check_text(key: str, text: Any, rule: str = "a string") -> str:
  """Returns `text` if it is one that can be encoded; RequestError for `key` if not."""
  if not isinstance(text, str):
    raise RequestError(key, rule, text)
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise RequestError(
      key,
      "text that UTF-8 can write",
      text[error.start],
      f"Character {error.start} is a lone surrogate: remove it or give its pair",
    ) from error
  return text


def check_messages(messages: Any) -> list[dict[str, Any]]:
  """Checks a chat and returns it in the form that templates expect.

  A message is {"role": str, "content": str | list of {"type": "text", "text": str}} and may have
  `name`, `tool_call_id` and `reasoning_content` (strings) and `tool_calls` (a list of objects with
  `function`: {"name", "arguments"}). Text parts are joined as they are; `arguments` given as JSON
  text are parsed; keys whose value is null count as absent. `content` may be null or absent only
  beside `tool_calls`.

  Raises:
    RequestError: names the entry, for example messages[2].content[0].text.
  """
  if not isinstance(messages, list) or not messages:
    raise RequestError("messages", "a list of at least one message", messages)
  return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(key: str, message: Any) -> dict[str, Any]:
  if not isinstance(message, dict):
    raise RequestError(key, 'an object {"role", "content"}', message)
  given = {name: value for name, value in message.items() if value is not None}
  for name in given:
    if name not in _KEYS:
      raise RequestError(
        f"{key}.{name}", f"only {', '.join(_KEYS)}", given[name], nearest(str(name), _KEYS).strip()
      )
  role = given.get("role")
  # The role is pasted into the prompt: anything but a name could write special tokens there.
  if not isinstance(role, str) or not _ROLE.fullmatch(role):
    raise RequestError(f"{key}.role", "a name such as system, user or assistant", role)
  for name in ("name", "tool_call_id", "reasoning_content"):
    if name in given:
      given[name] = check_text(f"{key}.{name}", given[name])
  if "tool_calls" in given:
    given["tool_calls"] = _check_calls(f"{key}.tool_calls", given["tool_calls"])
    given.setdefault("content", None)
    if given["content"] is None:
      return given
  given["content"] = _check_content(f"{key}.content", given.get("content"))
  return given


def _check_content(key: str, content: Any) -> str:
  if not isinstance(content, list):
    return check_text(key, content, 'a string or a list of {"type": "text", "text"} parts')
  texts = []
  for i, part in enumerate(content):
    if not isinstance(part, dict) or part.get("type") != "text":
      raise RequestError(
        f"{key}[{i}]", '{"type": "text", "text"}', part, "The models served here read text only"
      )
    texts.append(check_text(f"{key}[{i}].text", part.get("text")))
  return "".join(texts)


def _check_calls(key: str, calls: Any) -> list[dict[str, Any]]:
  rule = '{"function": {"name", "arguments"}}'
  if not isinstance(calls, list) or not calls:
    raise RequestError(key, f"a list of {rule}", calls)
  checked = []
  for i, call in enumerate(calls):
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
      raise RequestError(f"{key}[{i}]", rule, call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
      try:
        arguments = json.loads(arguments or "{}")
      except (ValueError, RecursionError) as error:
        raise RequestError(
          f"{key}[{i}].function.arguments", "JSON", arguments, str(error)
        ) from error
    checked.append({**call, "function": {**function, "arguments": arguments}})
  return checked


class ChatTemplate:
  """A model's chat template, in the dialect that Hugging Face's templates are written in.

  Compiled at its first use, so that a broken template does not keep a model from plain prompts.

  Attributes:
    source: the Jinja source.
    names: what every rendering can read, such as bos_token and eos_token.
  """

  def __init__(self, source: str, names: Mapping[str, str]):
    self.source = source
    self.names = dict(names)

  @functools.cached_property
  def _compiled(self) -> jinja2.Template:
    return _environment().from_string(self.source)

  def render(self, messages: Any, variables: Mapping[str, Any]) -> str:
    """The prompt text of `messages`.

    Time is measured between the pieces that the template writes and the steps of its ranges, and
    what it writes is counted; memory inside one expression is bounded for multiplication only.

    Raises:
      RequestError: a malformed message (its own key), or key `messages`: the template is broken,
        refuses the chat, or writes or works without end.
    """
    checked = check_messages(messages)
    most = MAX_EXTRA_CHARS + 8 * len(json.dumps([checked, list(variables.values())], default=str))
    deadline = time.monotonic() + MAX_SECONDS
    names = {**self.names, **variables, "messages": checked}
    names["range"] = functools.partial(_Range, deadline)
    pieces: list[str] = []
    length = 0
    try:
      for piece in self._compiled.generate(names):
        pieces.append(piece)
        length += len(piece)
        _check_deadline(deadline)
        if length > most:
          raise jinja2.TemplateRuntimeError(f"it writes more than {most} characters")
    except Exception as error:  # a template can raise anything that a Python expression can
      raise RequestError(
        "messages",
        "a chat that the model's template can render",
        [message["role"] for message in checked],
        f"The template stopped with {type(error).__name__}: {error}",
      ) from error
    return "".join(pieces)


def _check_deadline(deadline: float) -> None:
  if time.monotonic() > deadline:
    raise jinja2.TemplateRuntimeError(f"it takes more than {MAX_SECONDS:g} s")


class _Range:
  """range() that is as long as the sandbox allows and ends with the time of its rendering."""

  def __init__(self, deadline: float, *bounds: int):
    self._range = range(*bounds)
    self._deadline = deadline
    if len(self._range) > MAX_RANGE:
      raise OverflowError(f"range of {len(self._range)} steps, more than {MAX_RANGE}")

  def __len__(self) -> int:
    return len(self._range)

  def __getitem__(self, place: Any) -> Any:
    return self._range[place]

  def __iter__(self) -> Iterator[int]:
    for step in self._range:
      _check_deadline(self._deadline)
      yield step


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
  """The sandbox, with a bound on what one multiplication can make."""

  intercepted_binops = frozenset({"*", "**"})

  def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
    if operator == "**" and not (abs(left) <= 1e6 and abs(right) <= 64):
      raise jinja2.sandbox.SecurityError(f"power of {left!r:.40} and {right!r:.40}")
    for items, times in ((left, right), (right, left)):
      if isinstance(times, int) and hasattr(items, "__len__") and len(items) * times > MAX_REPEATED:
        raise jinja2.sandbox.SecurityError(f"repetition to {len(items) * times} items")
    return super().call_binop(context, operator, left, right)


@functools.cache
def _environment() -> _Environment:
  environment = _Environment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise_exception
  environment.globals["strftime_now"] = _strftime_now
  return environment


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  # Jinja's own filter writes <, > and & as HTML escapes, which a prompt must not have.
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _raise_exception(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)
