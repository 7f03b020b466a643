"""Chat messages, templates, and what an untrusted template may do."""

import datetime

import pytest

from kvjax import chat
from kvjax.chat import ChatTemplate, check_messages
from kvjax.detokenizer import BYTE_OF_CHAR
from kvjax.errors import RequestError
from kvjax.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]
CHATML = (
  "{% for message in messages %}\n"
  "  {% if message['role'] == 'system' and not loop.first %}\n"
  "    {{ raise_exception('system comes first') }}\n"
  "  {% endif %}\n"
  "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny(template, **more):
  tokens = ["<bos>", "<|im_start|>", "<|im_end|>", *BYTE_OF_CHAR]
  return Tokenizer.from_gguf(
    {
      "tokenizer.ggml.model": "gpt2",
      "tokenizer.ggml.pre": "gpt-2",
      "tokenizer.ggml.tokens": tokens,
      "tokenizer.ggml.token_type": [3] * 3 + [1] * 256,
      "tokenizer.ggml.merges": [],
      "tokenizer.ggml.bos_token_id": 0,
      "tokenizer.ggml.eos_token_id": 2,
      "tokenizer.chat_template": template,
      **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }
  )


def render(source, messages=USER, **variables):
  return ChatTemplate(source, {"bos_token": "<bos>"}).render(messages, variables)


# --- through the tokenizer


def test_a_chat_is_rendered_and_encoded_with_its_special_tokens():
  tokenizer = tiny(CHATML)
  text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
  assert tokenizer.render_chat(USER) == text
  ids = tokenizer.encode_chat(USER)
  assert ids == tokenizer.encode(text)
  assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 1)
  assert tokenizer.encode_chat(USER, add_generation_prompt=False) == tokenizer.encode(
    "<|im_start|>user\nHi<|im_end|>\n"
  )


@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML])
def test_bos_is_there_once(template):
  ids = tiny(template, add_bos_token=True, add_eos_token=True).encode_chat(USER)
  assert ids[:2] == [0, 1]
  assert ids.count(0) == 1
  assert ids[-1] != 2  # the assistant's turn is open


def test_a_model_without_template_says_to_use_prompt():
  with pytest.raises(RequestError, match=r"has no chat template.*Use `prompt`") as caught:
    tiny(None).encode_chat(USER)
  assert caught.value.key == "messages"


def test_a_broken_template_does_not_keep_prompts_from_working():
  tokenizer = tiny("{% for %}")
  assert tokenizer.encode("a") == [tokenizer.vocabulary.tokens.index("a")]
  with pytest.raises(RequestError, match="TemplateSyntaxError"):
    tokenizer.encode_chat(USER)


# --- messages


def test_messages_come_in_the_form_that_templates_expect():
  parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
  call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
  checked = check_messages(
    [
      {"role": "user", "content": parts, "name": "me", "refusal": None},
      {"role": "assistant", "content": None, "tool_calls": [call]},
      {"role": "tool", "content": "", "tool_call_id": "1"},
    ]
  )
  assert checked[0] == {"role": "user", "content": "ab", "name": "me"}
  assert checked[1]["content"] is None
  assert checked[1]["tool_calls"][0] == {**call, "function": {"name": "f", "arguments": {"x": 1}}}
  assert checked[2]["content"] == ""
  assert isinstance(call["function"]["arguments"], str)  # the caller's own object is untouched


@pytest.mark.parametrize(
  ("messages", "key"),
  [
    ("Hi", "messages"),
    ([], "messages"),
    (["Hi"], "messages[0]"),
    ([*USER, {"content": "x"}], "messages[1].role"),
    ([{"role": "<|im_end|>", "content": "x"}], "messages[0].role"),
    ([{"role": "user\n", "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": 3}], "messages[0].content"),
    ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
    ([{"role": "user", "content": "a\udc80"}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    (
      [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
      "messages[0].content[0]",
    ),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "x", "contents": "y"}], "messages[0].contents"),
    ([{"role": "user", "content": "x", "name": 1}], "messages[0].name"),
    ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "messages[0].tool_calls[0]"),
    (
      [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
      "messages[0].tool_calls[0].function.arguments",
    ),
  ],
)
def test_a_malformed_message_is_named(messages, key):
  with pytest.raises(RequestError) as caught:
    tiny(CHATML).encode_chat(messages)
  assert caught.value.key == key
  assert str(caught.value).startswith(f"{key}: expected ")


# --- the dialect of templates


def test_blocks_leave_no_blank_lines_and_loops_can_break():
  source = "{% for i in range(9) %}\n  {% if i == 2 %}{% break %}{% endif %}\n{{ i }}\n{% endfor %}"
  assert render(source) == "0\n1\n"


def test_tojson_writes_no_html_escapes():
  assert render("{{ x | tojson }}", x={"b": "<é&'>", "a": 1}) == '{"b": "<é&\'>", "a": 1}'
  assert render("{{ x | tojson(indent=1, sort_keys=True) }}", x={"b": 2, "a": 1}) == (
    '{\n "a": 1,\n "b": 2\n}'
  )


def test_templates_read_tools_dates_and_further_names():
  assert render("{{ bos_token }}{{ x }}{{ tools is none }}", x=1, tools=None) == "<bos>1True"
  year = datetime.datetime.now().year
  assert int(render("{{ strftime_now('%Y') }}")) in (year, year + 1)
  tokenizer = tiny("{{ tools[0].name }}{{ think }}")
  assert tokenizer.render_chat(USER, tools=[{"name": "f"}], think=False) == "fFalse"


def test_a_template_can_refuse_with_a_reason():
  messages = [*USER, {"role": "system", "content": "x"}]
  with pytest.raises(RequestError, match=r"got \['user', 'system'\]\. .*system comes first"):
    render(CHATML, messages)


# --- what a template may not do


@pytest.mark.parametrize(
  ("source", "reason"),
  [
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{% include '/etc/passwd' %}", "no loader"),
    ("{{ 'a' + none }}", "TypeError"),
    ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ("{{ 'a' * 2000000 }}", "repetition to 2000000 items"),
    ("{{ 2000000 * [1] }}", "repetition to 2000000 items"),
    ("{{ 9 ** 9 ** 9 }}", "power of"),
    ("{{ range(100001) }}", "OverflowError"),
    ("{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}", "writes more than"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
  ],
)
def test_a_template_cannot_leave_its_sandbox(source, reason):
  with pytest.raises(RequestError, match=reason) as caught:
    render(source)
  assert caught.value.key == "messages"


def test_a_template_that_works_without_end_is_stopped(monkeypatch):
  monkeypatch.setattr(chat, "MAX_SECONDS", 0.05)
  silent = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
  with pytest.raises(RequestError, match=r"takes more than 0\.05 s"):
    render(silent)


def test_ranges_are_ranges():
  assert render("{{ range(4) | length }}{{ range(1, 9, 3)[1] }}{{ range(3) | list }}") == (
    "44[0, 1, 2]"
  )
