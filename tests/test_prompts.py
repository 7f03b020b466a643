"""Prompt lines in: every form that is read, and every form that is refused by line and key."""

import io
import json

import pytest

from kvjax.errors import RequestError
from kvjax.job.prompts import (
  BadLine,
  LineParser,
  PromptLine,
  RawLine,
  encode_prompt,
  lines_of_samples,
  read_lines,
)
from kvjax.request import SamplingParams

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def parse(line, *, strict=False, warnings=None, number=7, **defaults):
  data = line if isinstance(line, bytes) else json.dumps(line).encode()
  sink = warnings if warnings is not None else []
  parser = LineParser(SamplingParams(**defaults), strict=strict, warn=sink.append)
  return parser.parse(RawLine(number, data))


def batch(body, url="/v1/chat/completions", **more):
  return {"custom_id": "c", "method": "POST", "url": url, "body": body, **more}


def completions(**body):
  return batch({"prompt": "x", **body}, "/v1/completions")


class Tokenizer:
  vocab_size = 100

  def encode(self, text):
    return [1, *(ord(each) % 50 for each in text)]

  def encode_chat(self, messages):
    return [len(messages), 2]


def test_native_forms():
  assert parse({"id": "a", "prompt": "x"}) == PromptLine(7, "a", "native", "x", SamplingParams())
  assert parse({"prompt_token_ids": [3, 4]}).prompt == (3, 4)
  assert parse({"prompt_token_ids": [3]}).id == 7, "a line without an id is named by its number"
  assert parse({"id": 0, "prompt": "x"}).id == 0
  assert parse({"id": None, "prompt": "x", "messages": None}).id == 7
  parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
  line = parse({"messages": [{"role": "user", "content": parts}]})
  assert line.prompt == ({"role": "user", "content": "ab"},)


def test_how_a_line_is_served():
  line = parse({"prompt": "a", "priority": -3, "cache_salt": "x"})
  assert (line.priority, line.cache_salt) == (-3, "x")
  line = parse({"prompt": "a", "priority": None})
  assert (line.priority, line.cache_salt) == (0, None)
  body = {"prompt": "a", "priority": 7, "cache_salt": "y"}
  line = parse({"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body})
  assert (line.priority, line.cache_salt) == (7, "y")


def test_sampling_fields_over_defaults():
  line = parse(
    {
      "prompt": "x",
      "max_completion_tokens": 9,
      "temperature": None,
      "stop": "END",
      "stop_token_ids": [5],
      "logit_bias": {"12": -100, "0": 1.5},
      "logprobs": 2,
      "n": 3,
      "seed": 11,
      "ignore_eos": True,
    },
    temperature=0.25,
    top_k=4,
  )
  assert line.sampling == SamplingParams(
    max_tokens=9,
    temperature=0.25,
    top_k=4,
    stop=("END",),
    stop_token_ids=(5,),
    logit_bias={12: -100, 0: 1.5},
    logprobs=2,
    n=3,
    seed=11,
    ignore_eos=True,
  )


@pytest.mark.parametrize(
  ("body", "expected"),
  [
    ({"logprobs": True}, 0),
    ({"logprobs": True, "top_logprobs": 5}, 5),
    ({"logprobs": False}, None),
    ({"logprobs": False, "top_logprobs": 0}, None),
    ({}, 1),
  ],
)
def test_chat_logprobs(body, expected):
  assert parse(batch(CHAT | body), logprobs=1).sampling.logprobs == expected


def test_batch_lines():
  line = parse(batch(CHAT | {"model": "m", "max_tokens": 3, "user": "u"}))
  assert (line.id, line.style, line.model) == ("c", "chat", "m")
  assert line.sampling.max_tokens == 3
  line = parse(completions(logprobs=3, echo=False, best_of=2, n=2))
  assert (line.style, line.prompt, line.sampling.logprobs) == ("completions", "x", 3)
  assert parse(completions(prompt=[1, 2])).prompt == (1, 2)


def test_neutral_parameters_are_accepted_without_a_word():
  warnings = []
  neutral = {
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "stream": False,
    "suffix": "",
    "best_of": 1,
    "parallel_tool_calls": True,
    "stream_options": None,
  }
  assert parse(batch(CHAT | neutral), warnings=warnings, strict=True).style == "chat"
  assert warnings == []


# line, key, a word of the message, code
BAD = [
  (b"{", None, "JSON", "invalid_json"),
  (b"[1]", None, "JSON object", "invalid_json"),
  (b'"text"', None, "JSON object", "invalid_json"),
  (b'{"prompt": "\xff"}', None, "0xff at column 13", "invalid_json"),
  (b'{"prompt": "x", "temperature": NaN}', None, "NaN", "invalid_json"),
  (b'{"prompt": "x", "prompt": "y"}', None, "stands there twice", "invalid_json"),
  (b'{"prompt": "x", "priority": 1.5}', "priority", "32-bit integer", "invalid_value"),
  (b'{"prompt": "x", "priority": true}', "priority", "32-bit integer", "invalid_value"),
  (b'{"prompt": "x", "cache_salt": ""}', "cache_salt", "non-empty string", "invalid_value"),
  (b'{"prompt": "x", "cache_salt": [1]}', "cache_salt", "non-empty string", "invalid_value"),
  (b'{"prompt": "x"} {}', None, "JSON", "invalid_json"),
  (b'{"id": ' + b"9" * 5000 + b', "prompt": "x"}', None, "JSON", "invalid_json"),
  (b"[" * 100_000, None, "nested", "invalid_json"),
  (b"\xef\xbb\xbf{}", None, "JSON", "invalid_json"),
  ({}, "prompt", "exactly one of", "invalid_value"),
  ({"id": 1}, "prompt", "exactly one of", "invalid_value"),
  ({"id": True, "prompt": "x"}, "id", "string or an integer", "invalid_value"),
  ({"id": 1.5, "prompt": "x"}, "id", "string or an integer", "invalid_value"),
  ({"id": ["a"], "prompt": "x"}, "id", "string or an integer", "invalid_value"),
  ({"prompt": "x", "prompt_token_ids": [1]}, "prompt_token_ids", "exactly one", "invalid_value"),
  ({"prompt": ""}, "prompt", "non-empty string", "invalid_value"),
  ({"prompt": ["a"]}, "prompt", "non-empty string", "invalid_value"),
  ({"prompt_token_ids": []}, "prompt_token_ids", "non-empty list", "invalid_value"),
  ({"prompt_token_ids": [1, -2]}, "prompt_token_ids[1]", "token id", "invalid_value"),
  ({"prompt_token_ids": [True]}, "prompt_token_ids[0]", "token id", "invalid_value"),
  ({"prompt_token_ids": [1.0]}, "prompt_token_ids[0]", "token id", "invalid_value"),
  ({"messages": []}, "messages", "at least one message", "invalid_value"),
  ({"messages": ["x"]}, "messages[0]", "object", "invalid_value"),
  ({"messages": [{"content": "x"}]}, "messages[0].role", "a name such as", "invalid_value"),
  ({"messages": [{"role": "user"}]}, "messages[0].content", "string", "invalid_value"),
  (
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "messages[0].content[0]",
    "text only",
    "invalid_value",
  ),
  ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1", "invalid_value"),
  ({"prompt": "x", "max_tokens": "9"}, "max_tokens", "at least 1", "invalid_value"),
  ({"prompt": "x", "temperature": -1}, "temperature", "[0, 100], got -1", "invalid_value"),
  (b'{"prompt": "x", "temperature": 1e999}', "temperature", "got inf", "invalid_value"),
  ({"prompt": "x", "top_p": 0}, "top_p", "[1e-6, 1]", "invalid_value"),
  ({"prompt": "x", "n": 0}, "n", "[1, 128]", "invalid_value"),
  ({"prompt": "x", "n": True}, "n", "[1, 128]", "invalid_value"),
  ({"prompt": "x", "logprobs": 21}, "logprobs", "[0, 20]", "invalid_value"),
  ({"prompt": "x", "logprobs": True}, "logprobs", "[0, 20]", "invalid_value"),
  ({"prompt": "x", "stop": [""]}, "stop", "non-empty", "invalid_value"),
  ({"prompt": "x", "stop": 3}, "stop", "strings", "invalid_value"),
  ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token ids as keys", "invalid_value"),
  ({"prompt": "x", "logit_bias": {"01": 1}}, "logit_bias", "token ids as keys", "invalid_value"),
  ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias.1", "[-100, 100]", "invalid_value"),
  ({"prompt": "x", "logit_bias": [1]}, "logit_bias", "map", "invalid_value"),
  ({"prompt": "x", "seed": 2**63}, "seed", "64-bit", "invalid_value"),
  ({"prompt": "x", "stream": True}, "stream", "not supported", "unsupported_parameter"),
  (
    {"prompt": "x", "max_tokens": 2, "max_completion_tokens": 3},
    "max_completion_tokens",
    "the same as max_tokens (2)",
    "invalid_value",
  ),
  ({"custom_id": "c"}, "method", "POST", "invalid_value"),
  (batch(CHAT) | {"custom_id": 3}, "custom_id", "non-empty string", "invalid_value"),
  (batch(CHAT, "/v1/embeddings"), "url", "/v1/chat/completions", "invalid_value"),
  (batch(CHAT, ["x"]), "url", "/v1/chat/completions", "invalid_value"),
  (batch("x"), "body", "object", "invalid_value"),
  (batch({"prompt": "x"}), "messages", "at least one message", "invalid_value"),
  (batch(CHAT | {"model": 3}), "model", "string", "invalid_value"),
  (batch(CHAT | {"logprobs": 3}), "logprobs", "true or false", "invalid_value"),
  (batch(CHAT | {"top_logprobs": 3}), "top_logprobs", "logprobs: true", "invalid_value"),
  (
    batch(CHAT | {"logprobs": True, "top_logprobs": 21}),
    "top_logprobs",
    "[0, 20]",
    "invalid_value",
  ),
  (batch(CHAT | {"tools": [{}]}), "tools", "not supported", "unsupported_parameter"),
  (
    batch(CHAT | {"response_format": {"type": "json_object"}}),
    "response_format",
    "not supported",
    "unsupported_parameter",
  ),
  (completions(echo=True), "echo", "not supported", "unsupported_parameter"),
  (completions(suffix="x"), "suffix", "not supported", "unsupported_parameter"),
  (completions(best_of=4, n=2), "best_of", "not supported", "unsupported_parameter"),
  (completions(prompt=["a", "b"]), "prompt", "one prompt per line", "unsupported_parameter"),
]


@pytest.mark.parametrize(("line", "key", "word", "code"), BAD)
def test_bad_lines(line, key, word, code):
  with pytest.raises(BadLine) as caught:
    parse(line)
  error = caught.value
  assert str(error).startswith("line 7: ")
  assert word in str(error)
  assert (error.param, error.code, error.number) == (key, code, 7)
  assert len(str(error)) < 400
  if key is not None:
    assert key in str(error)


def test_a_bad_line_keeps_its_id_and_style():
  with pytest.raises(BadLine) as caught:
    parse({"id": "a", "prompt": ""})
  assert (caught.value.id, caught.value.style) == ("a", "native")
  with pytest.raises(BadLine) as caught:
    parse(completions(n=0))
  assert (caught.value.id, caught.value.style) == ("c", "completions")


def test_unknown_fields_warn_once_or_are_refused():
  warnings = []
  parser = LineParser(SamplingParams(), warn=warnings.append)
  for number in range(3):
    assert parser.parse(RawLine(number + 2, b'{"prompt": "x", "temprature": 1}')).prompt == "x"
  assert len(warnings) == 1
  assert "line 2" in warnings[0]
  assert "'temperature'" in warnings[0]
  for line, key in [({"prompt": "x", "temprature": 1}, "temprature"), (batch(CHAT, x=1), "x")]:
    with pytest.raises(BadLine) as caught:
      parse(line, strict=True)
    assert (caught.value.param, caught.value.code) == (key, "unknown_field")


@pytest.mark.parametrize(
  "text",
  ["\0", "\ud800", "日本語 🎉 العربية", "x" * 100_000, "\u2028\x85\r"],
  ids=["nul", "lone surrogate", "scripts", "long", "separators"],
)
def test_text_of_any_kind_is_one_line(text):
  for ascii_only in (True, False):
    data = json.dumps({"prompt": text}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if text == "\ud800":
      with pytest.raises(BadLine, match="surrogate" if ascii_only else "UTF-8"):
        parse(data)
      continue
    lines = list(read_lines(io.BytesIO(data + b"\n" + b'{"prompt": "y"}')))
    assert [parse(line.data).prompt for line in lines] == [text, "y"]


def test_lines_are_bounded_and_counted():
  stream = io.BytesIO(b"aa\n\n" + b"x" * 25 + b"\n" + b"y" * 9 + b"\n" + b"z" * 10)
  lines = list(read_lines(stream, limit=10))
  assert lines == [
    RawLine(1, b"aa\n"),
    RawLine(2, b"\n"),
    RawLine(3, None),
    RawLine(4, b"y" * 9 + b"\n"),
    RawLine(5, b"z" * 10),
  ]
  parser = LineParser(SamplingParams(), warn=print)
  with pytest.raises(BadLine, match="line 3: expected at most") as caught:
    parser.parse(lines[2])
  assert caught.value.code == "line_too_long"


def test_blank_lines_and_a_byte_order_mark():
  assert parse(b" \r\n") is None
  assert parse(b'\xef\xbb\xbf{"prompt": "x"}\r\n', number=1).prompt == "x"


def test_samples_of_a_configuration():
  lines = [parse(raw.data, number=raw.number) for raw in lines_of_samples(["x", {"id": 5} | CHAT])]
  assert [(line.id, line.number) for line in lines] == [(1, 1), (5, 2)]


def test_encode_prompt():
  tokenizer = Tokenizer()
  assert encode_prompt(parse({"prompt": "ab"}), tokenizer) == (1, 47, 48)
  assert encode_prompt(parse(CHAT), tokenizer) == (1, 2)
  assert encode_prompt(parse({"prompt_token_ids": [99]}), tokenizer) == (99,)
  for line, key in [
    ({"prompt_token_ids": [1, 100]}, "prompt_token_ids[1]"),
    (completions(prompt=[100]), "prompt[0]"),
    ({"prompt": "x", "logit_bias": {"100": 1}}, "logit_bias"),
    ({"prompt": "x", "stop_token_ids": [100]}, "stop_token_ids"),
  ]:
    with pytest.raises(RequestError, match="below the vocabulary's 100, got 100") as caught:
      encode_prompt(parse(line), tokenizer)
    assert caught.value.key == key
