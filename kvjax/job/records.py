"""Result lines out: native records, OpenAI batch responses, error records, text for reading.

Everything in a record derives from the line and its completions, except `created`. Records are
UTF-8 with one newline at the end; a lone surrogate (in an id, say) makes its record ASCII-escaped.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from kvjax.job.prompts import BadLine, LineId, PromptLine, Tokenizer
from kvjax.request import Completion, TokenLogprobs

_LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


def encode_record(record: dict[str, Any]) -> bytes:
  """One record as a whole line of UTF-8."""
  try:
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
  except UnicodeEncodeError:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def usage(completions: Sequence[Completion]) -> dict[str, int]:
  """Tokens of a prompt and of all completions of it."""
  prompt, new = completions[0].prompt_tokens, sum(len(each.token_ids) for each in completions)
  return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def native_record(line: PromptLine, completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
  """One completion of a native line."""
  record: dict[str, Any] = {
    "id": line.id,
    "index": completion.index,
    "text": completion.text,
    "token_ids": list(completion.token_ids),
    "finish_reason": completion.finish_reason,
    "usage": usage([completion]),
  }
  if completion.logprobs is not None:
    record["logprobs"] = [
      {
        **_native_token(entry.token_id, entry.logprob, tokenizer),
        "top": [_native_token(token, logprob, tokenizer) for token, logprob in entry.top],
      }
      for entry in completion.logprobs
    ]
  return record


def _native_token(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
  return {"token_id": token, "token": tokenizer.token_text(token), "logprob": _finite(logprob)}


def _finite(logprob: float) -> float:
  return max(logprob, _LEAST_LOGPROB) if not math.isnan(logprob) else _LEAST_LOGPROB


def batch_record(
  line: PromptLine,
  completions: Sequence[Completion],
  tokenizer: Tokenizer,
  *,
  model: str,
  created: int,
) -> dict[str, Any]:
  """The batch response of an OpenAI line with all its choices, in order of index.

  `model` is used when the line does not name one; `created` is in seconds since 1970.
  """
  chat = line.style == "chat"
  body = {
    "id": ("chatcmpl-" if chat else "cmpl-") + _hex(line.id),
    "object": "chat.completion" if chat else "text_completion",
    "created": created,
    "model": line.model or model,
    "choices": [
      (_chat_choice if chat else _completions_choice)(each, tokenizer) for each in completions
    ],
    "usage": usage(completions),
  }
  return _batch_response(line.id, line.id, 200, body)


def _batch_response(
  custom_id: LineId | None, name: LineId, status: int, body: dict[str, Any]
) -> dict[str, Any]:
  return {
    "id": "batch_req_" + _hex(name),
    "custom_id": custom_id,
    "response": {"status_code": status, "request_id": "req_" + _hex(name), "body": body},
    "error": None,
  }


def _hex(name: LineId) -> str:
  return hashlib.blake2b(json.dumps(name).encode(), digest_size=12).hexdigest()


def _chat_choice(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
  logprobs = None
  if completion.logprobs is not None:
    content = [
      {
        **_chat_token(entry.token_id, entry.logprob, tokenizer),
        "top_logprobs": [_chat_token(token, logprob, tokenizer) for token, logprob in entry.top],
      }
      for entry in completion.logprobs
    ]
    logprobs = {"content": content, "refusal": None}
  return {
    "index": completion.index,
    "message": {"role": "assistant", "content": completion.text, "refusal": None},
    "logprobs": logprobs,
    "finish_reason": completion.finish_reason,
  }


def _chat_token(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
  return {
    "token": tokenizer.token_text(token),
    "logprob": _finite(logprob),
    "bytes": list(tokenizer.token_bytes(token)),
  }


def _completions_choice(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
  return {
    "index": completion.index,
    "text": completion.text,
    "logprobs": None
    if completion.logprobs is None
    else _completions_logprobs(completion.text, completion.logprobs, tokenizer),
    "finish_reason": completion.finish_reason,
  }


def _completions_logprobs(
  text: str, entries: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> dict[str, Any]:
  """The completions form: parallel lists, alternatives as a map from token text."""
  offsets, characters = [], 0
  for entry in entries:
    offsets.append(min(characters, len(text)))
    # A character begins at each byte that does not continue one.
    characters += sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(entry.token_id))
  tops = []
  for entry in entries:
    top = {_token_name(token, tokenizer): _finite(logprob) for token, logprob in entry.top}
    top.setdefault(_token_name(entry.token_id, tokenizer), _finite(entry.logprob))
    tops.append(top)
  return {
    "tokens": [_token_name(entry.token_id, tokenizer) for entry in entries],
    "token_logprobs": [_finite(entry.logprob) for entry in entries],
    "top_logprobs": tops,
    "text_offset": offsets,
  }


def _token_name(token: int, tokenizer: Tokenizer) -> str:
  """A token's text, or `bytes:\\x..` for a part of a character: maps need distinct keys."""
  data = tokenizer.token_bytes(token)
  try:
    data.decode()
  except UnicodeDecodeError:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
  return tokenizer.token_text(token)


def error_record(error: BadLine) -> dict[str, Any]:
  """The record of a line that is not served, in the format of its style."""
  detail = {
    "message": str(error),
    "type": "invalid_request_error",
    "param": error.param,
    "code": error.code,
    "line": error.number,
  }
  if error.style == "native":
    return {"id": error.id, "error": detail}
  name = error.number if error.id is None else error.id
  return _batch_response(error.id, name, 400, {"error": detail})


@dataclasses.dataclass(frozen=True)
class Record:
  """What a result file's record stands for.

  Attributes:
    id: the line's id, None for a line whose id could not be read.
    index: which completion, None for all of them or for an error.
    error_line: the line number of an error record, else None.
  """

  id: LineId | None
  index: int | None
  error_line: int | None


def read_record(value: Any) -> Record | None:
  """Which line a parsed record belongs to, or None when it is not a record of ours."""
  if not isinstance(value, dict):
    return None
  if "custom_id" in value:
    name, response = value["custom_id"], value.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    if not isinstance(body, dict) or not isinstance(name, str | None):
      return None
    if "error" not in body:
      return None if name is None else Record(name, None, None)
    error = body["error"]
  else:
    name, error = value.get("id"), value.get("error")
    if isinstance(name, bool) or not isinstance(name, str | int | None):
      return None
    if error is None:
      index = value.get("index")
      ok = name is not None and type(index) is int and index >= 0 and "token_ids" in value
      return Record(name, index, None) if ok else None
  line = error.get("line") if isinstance(error, dict) else None
  return Record(name, None, line) if type(line) is int else None


def readable(line: PromptLine, completions: Sequence[Completion]) -> bytes:
  """A prompt and its completions as text for reading."""
  if isinstance(line.prompt, str):
    shown = line.prompt
  else:
    last = line.prompt[-1]
    shown = str(last["content"]) if isinstance(last, dict) else " ".join(map(str, line.prompt))
  parts = [f"[{line.id}] {shown}"]
  for each in completions:
    number = f"{each.index + 1}. " if len(completions) > 1 else ""
    cut = " […]" if each.finish_reason == "length" else ""
    parts.append(f"  → {number}{each.text.strip()}{cut}")
  return ("\n".join(parts) + "\n\n").encode("utf-8", "backslashreplace")


def readable_error(error: BadLine) -> bytes:
  return f"[line {error.number}] error: {error}\n\n".encode("utf-8", "backslashreplace")
