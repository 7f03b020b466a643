"""Result lines out: formats, appending, order, and resuming a file that was torn anywhere."""

import errno
import json
import math
import os
import resource

import pytest

from kvjax.job import results as results_module
from kvjax.job.prompts import BadLine, PromptLine
from kvjax.job.records import (
  Record,
  batch_record,
  encode_record,
  error_record,
  native_record,
  read_record,
  readable,
)
from kvjax.job.results import ALL, Finished, InOrder, OutputError, OutputRefused, ResultFile
from kvjax.request import Completion, SamplingParams, TokenLogprobs


class Tokenizer:
  """Token i stands for one of these byte strings; the last two are halves of é."""

  vocab_size = 4
  table = (b"a", "日".encode(), b"\xc3", b"\xa9")

  def encode(self, text):
    raise NotImplementedError

  encode_chat = encode

  def token_bytes(self, token):
    return self.table[token]

  def token_text(self, token):
    return self.table[token].decode(errors="replace")


def completion(index=0, logprobs=True):
  entries = tuple(
    TokenLogprobs(token, -0.5, ((0, -0.25), (3, -math.inf))) for token in (1, 2, 3, 0)
  )
  return Completion("r", index, "日éa", (1, 2, 3, 0), "stop", 5, entries if logprobs else None)


def line(style="native", id="c", **more):
  return PromptLine(3, id, style, "x", SamplingParams(), **more)


def test_native_record():
  record = native_record(line(), completion(1), Tokenizer())
  logprobs = record.pop("logprobs")
  assert record == {
    "id": "c",
    "index": 1,
    "text": "日éa",
    "token_ids": [1, 2, 3, 0],
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9},
  }
  assert logprobs[0] == {
    "token_id": 1,
    "token": "日",
    "logprob": -0.5,
    "top": [
      {"token_id": 0, "token": "a", "logprob": -0.25},
      {"token_id": 3, "token": "\ufffd", "logprob": -9999.0},
    ],
  }
  assert "logprobs" not in native_record(line(), completion(logprobs=False), Tokenizer())


def test_chat_response():
  both = [completion(0), completion(1, logprobs=False)]
  record = batch_record(line("chat"), both, Tokenizer(), model="served", created=8)
  body = record["response"]["body"]
  assert record["custom_id"] == "c"
  assert record["error"] is None
  assert record["response"]["status_code"] == 200
  assert (body["object"], body["model"], body["created"]) == ("chat.completion", "served", 8)
  assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
  assert [choice["index"] for choice in body["choices"]] == [0, 1]
  first = body["choices"][0]
  assert first["message"] == {"role": "assistant", "content": "日éa", "refusal": None}
  token = first["logprobs"]["content"][1]
  assert (token["bytes"], token["logprob"]) == ([0xC3], -0.5)
  assert token["top_logprobs"][0] == {"token": "a", "logprob": -0.25, "bytes": [97]}
  assert body["choices"][1]["logprobs"] is None
  again = batch_record(line("chat"), both, Tokenizer(), model="served", created=8)
  other = batch_record(line("chat", id="d"), both, Tokenizer(), model="served", created=8)
  assert record == again
  assert record["id"] != other["id"]


def test_completions_response():
  record = batch_record(
    line("completions", model="m"), [completion()], Tokenizer(), model="served", created=8
  )
  body = record["response"]["body"]
  assert (body["object"], body["model"]) == ("text_completion", "m")
  assert body["choices"][0]["text"] == "日éa"
  logprobs = body["choices"][0]["logprobs"]
  assert logprobs["tokens"] == ["日", "bytes:\\xc3", "bytes:\\xa9", "a"]
  assert logprobs["text_offset"] == [0, 1, 2, 2]
  assert logprobs["token_logprobs"] == [-0.5] * 4
  assert logprobs["top_logprobs"][0] == {"a": -0.25, "bytes:\\xa9": -9999.0, "日": -0.5}


def test_error_records():
  error = BadLine(7, "n: expected 1, got 0", id="a", param="n")
  assert error_record(error) == {
    "id": "a",
    "error": {
      "message": "line 7: n: expected 1, got 0",
      "type": "invalid_request_error",
      "param": "n",
      "code": "invalid_value",
      "line": 7,
    },
  }
  record = error_record(BadLine(7, "bad", id="a", style="chat"))
  assert (record["custom_id"], record["error"]) == ("a", None)
  assert record["response"]["status_code"] == 400
  assert record["response"]["body"]["error"]["message"] == "line 7: bad"


def test_records_are_read_back():
  served = [line("chat"), line("completions")]
  for each in served:
    record = batch_record(each, [completion()], Tokenizer(), model="m", created=8)
    assert read_record(record) == Record("c", None, None)
  assert read_record(native_record(line(id=4), completion(2), Tokenizer())) == Record(4, 2, None)
  for style in ("native", "chat"):
    assert read_record(error_record(BadLine(7, "bad", style=style))) == Record(None, None, 7)
  for other in [3, [], {}, {"id": "a"}, {"id": "a", "index": -1, "token_ids": []}, {"error": {}}]:
    assert read_record(other) is None


def test_records_are_utf8_whatever_the_id():
  for name, raw in [("日", "日".encode()), ("\ud800", b"\\ud800")]:
    data = encode_record({"id": name})
    assert raw in data
    assert data.endswith(b"\n")
    assert json.loads(data.decode()) == {"id": name}
  assert data.count(b"\n") == 1
  assert encode_record({"id": "a\nb\u2028"}).count(b"\n") == 1
  assert "日éa" in readable(line(), [completion()]).decode()


def native(name, index=0, text="é"):
  return encode_record({"id": name, "index": index, "text": text, "token_ids": [1]})


@pytest.fixture
def path(tmp_path):
  return str(tmp_path / "out.jsonl")


def content_of(path):
  with open(path, "rb") as file:
    return file.read()


def write(path, *records, **options):
  file = ResultFile(path, **options)
  for record in records:
    file.append(record)
  file.close()
  return file


def test_an_existing_file_is_refused_kept_or_dropped(path):
  open(path, "w").close()
  write(path, native("a"))  # an empty file holds nothing that could be lost
  with pytest.raises(OutputRefused, match="--resume"):
    ResultFile(path)
  assert write(path, native("b"), existing="keep").finished.records == 1
  assert content_of(path) == native("a") + native("b")
  write(path, native("c"), existing="drop")
  assert content_of(path) == native("c")


def test_two_runs_cannot_share_a_file(path):
  first = ResultFile(path)
  for existing in ("refuse", "keep", "drop"):
    with pytest.raises(OutputRefused, match="another run"):
      ResultFile(path, existing)
  first.append(native("a"))
  first.close()
  assert content_of(path) == native("a")
  assert write(path, existing="keep").finished.records == 1


def test_a_line_torn_at_any_byte_is_cut(path):
  whole, torn = native("a"), native("b")
  for length in range(len(torn)):
    with open(path, "wb") as file:
      file.write(whole + torn[:length])
    result = write(path, existing="keep")
    assert (result.cut, result.finished.records) == (length, 1)
    assert content_of(path) == whole
  with open(path, "wb") as file:
    file.write(whole + torn)
  assert write(path, existing="keep").cut == 0
  with open(path, "wb") as file:
    file.write(whole + b"\0" * 100)  # what a power cut may leave
  assert write(path, existing="keep").cut == 100


@pytest.mark.parametrize(
  ("content", "word"),
  [
    (native("a") + b'{"id": \n' + native("b"), "line 2: expected a result record"),
    (native("a") + b'{"name": 1}\n', "line 2: expected a record with id"),
    (b"my notes\n", "line 1: expected a result record"),
    (b"my notes", "line 1: expected a result record"),
    (encode_record({"id": "a", "index": 128, "token_ids": []}), "line 1"),
  ],
)
def test_a_file_that_is_not_ours_is_left_alone(path, content, word):
  with open(path, "wb") as file:
    file.write(content)
  with pytest.raises(OutputRefused, match=word):
    ResultFile(path, "keep")
  assert content_of(path) == content


def test_finished_lines():
  finished = Finished(ordered=True)
  for name, index, error_line in [("a", 0, None), ("a", 2, None), ("b", None, None), (1, 0, None)]:
    finished.add(name, index, error_line)
  finished.add("x", None, 7)
  assert finished.take("x") == 0, "an error record stands for its line, not for the id"
  assert finished.take("x", error_line=8) == 0
  assert finished.take("a") == 0b101
  assert finished.take("a") == 0
  assert finished.take("1") == 0, "a number and its text are different ids"
  assert finished.take("x", error_line=7) == ALL
  assert finished.in_order
  assert finished.take("b") == ALL
  assert not finished.in_order
  assert len(finished) == 1


def test_a_full_disk_leaves_whole_records(path, monkeypatch):
  file = ResultFile(path)
  file.append(native("a"))
  real = os.write
  left = 10

  def write_some(fd, data):
    nonlocal left
    if left == 0:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    written = real(fd, bytes(data)[:left])
    left -= written
    return written

  monkeypatch.setattr(results_module.os, "write", write_some)
  with pytest.raises(OutputError, match=r"out\.jsonl: cannot be written: No space left.*--resume"):
    file.append(native("b"))
  assert content_of(path) == native("a")
  monkeypatch.undo()
  file.append(native("c"))
  file.close()
  assert content_of(path) == native("a") + native("c")


def test_a_limit_on_file_sizes_leaves_whole_records(path):
  file = ResultFile(path)
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(native("a")) + 10, before[1]))
    file.append(native("a"))
    with pytest.raises(OutputError, match="File too large"):
      file.append(native("b"))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  file.close()
  assert content_of(path) == native("a")


def test_outputs_that_cannot_be_written(tmp_path):
  with pytest.raises(OutputError, match="No such file or directory"):
    ResultFile(str(tmp_path / "missing" / "out.jsonl"))
  with pytest.raises(OutputError, match="directory"):
    ResultFile(str(tmp_path))
  full = ResultFile("/dev/full")
  with pytest.raises(OutputError, match="/dev/full: cannot be written: No space left"):
    full.append(native("a"))
  full.close()
  write("/dev/null", native("a"))


def test_in_order():
  written = []
  order = InOrder(written.append)
  for place, held in [(2, 1), (0, 1), (3, 2), (1, 0)]:
    order.put(place, bytes([place]))
    assert len(order) == held
  assert written == [b"\0", b"\1", b"\2", b"\3"]
