"""The job around an engine, with an engine that finishes requests in an odd order."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvjax.errors import ConfigError, RequestError, WeightsError
from kvjax.job.runner import Exit, Options, print_plan, run_job
from kvjax.job.serve import Serving
from kvjax.request import Completion, SamplingParams

LOOK_AHEAD = 6


class Tokenizer:
  vocab_size = 256

  def encode(self, text):
    return list(text.encode())

  def encode_chat(self, messages):
    return self.encode("".join(message["content"] for message in messages))

  def token_bytes(self, token):
    return bytes([token])

  def token_text(self, token):
    return bytes([token]).decode(errors="replace")


class Engine:
  """Answers follow from prompt, seed and index alone; the newest completion ends first."""

  def __init__(self, *, fail_after=None, sleep=0.0):
    self.queue = []
    self.added = []
    self.most = 0
    self.steps = 0
    self.closed = False
    self._fail_after = fail_after
    self._sleep = sleep

  @property
  def unfinished(self):
    return len(self.queue)

  def add(self, request):
    if len(request.prompt_token_ids) > 50:
      raise RequestError("prompt", "at most 50 tokens", len(request.prompt_token_ids))
    self.added.append(request.id)
    self.queue += [(request, index) for index in range(request.sampling.n)]
    self.most = max(self.most, len(self.queue))

  def step(self):
    self.steps += 1
    time.sleep(self._sleep)
    if self._fail_after is not None and self.steps > self._fail_after:
      raise RuntimeError("device lost")
    request, index = self.queue.pop()
    seed = request.sampling.seed if request.sampling.seed is not None else request.default_seed
    text = hashlib.sha1(repr((request.prompt_token_ids, seed, index)).encode()).hexdigest()[:9]
    length = len(request.prompt_token_ids)
    return [Completion(request.id, index, text, tuple(text.encode()), "length", length)]

  def figures(self):
    pages = {"full": {"used": len(self.queue), "total": 99}}
    return {"prefill_tokens": 3, "decode_tokens": self.steps, "running": 1, "pages": pages}

  def close(self):
    self.closed = True


def lines():
  """Every style, several completions, errors of every kind, blanks, a repeated id."""
  chat = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
  given = [
    {"id": "a", "prompt": "one"},
    {"id": "b", "prompt": "two", "n": 3},
    {"prompt": "three"},
    None,
    {"id": "a", "prompt": "again"},
    {"id": "c", "prompt": "x", "temperature": -1},
    "{broken",
    {"id": "é\ud800", "prompt_token_ids": [1, 2]},
    {"custom_id": "k", "method": "POST", "url": "/v1/chat/completions", "body": chat},
    {"custom_id": "l", "method": "POST", "url": "/v1/completions", "body": {"prompt": ""}},
    {"id": "d", "prompt": "long" * 20},
    {"id": "e", "prompt": "five", "n": 2},
    {"id": "c", "prompt": "seen"},
  ]
  texts = ["" if each is None else each if isinstance(each, str) else json.dumps(each)
           for each in given]  # fmt: skip
  return "\n".join(texts) + "\n"


SERVED, FAILED = 6, 6


def run(folder, text=None, *, engine=None, look_ahead=LOOK_AHEAD, start=None, **options):
  prompts = folder / "in.jsonl"
  prompts.write_text(lines() if text is None else text)
  engine = engine or Engine()
  more = {"prompts": str(prompts), "output": str(folder / "out.jsonl"), "quiet": True} | options
  code = run_job(
    Options(**more),
    start or (lambda: Serving(engine, Tokenizer(), "fake")),
    defaults=SamplingParams(),
    look_ahead=look_ahead,
  )
  return code, engine


def read(folder):
  records = [json.loads(each) for each in (folder / "out.jsonl").read_bytes().splitlines()]
  for record in records:
    if record.get("response") and "created" in record["response"]["body"]:
      del record["response"]["body"]["created"]
  return records


def canonical(records):
  return sorted(json.dumps(record, sort_keys=True) for record in records)


def input_line(record):
  """The number of the input line that a record of `lines()` belongs to."""
  error = record.get("error") or (record.get("response") or {"body": {}})["body"].get("error")
  if error:
    return error["line"]
  places = {"a": 1, "b": 2, 3: 3, "é\ud800": 8, "k": 9, "e": 12}
  return places[record["custom_id"] if "custom_id" in record else record["id"]]


def test_every_line_gets_its_records(tmp_path, capfd):
  code, engine = run(tmp_path)
  assert code == Exit.BAD_LINES
  assert engine.closed
  records = read(tmp_path)
  served = [(r["id"], r["index"]) for r in records if "index" in r]
  expected = [("a", 0), ("b", 0), ("b", 1), ("b", 2), (3, 0), ("é\ud800", 0), ("e", 0), ("e", 1)]
  assert sorted(served, key=str) == sorted(expected, key=str)
  errors = {r["error"]["line"]: r for r in records if r.get("error")}
  codes = {number: record["error"]["code"] for number, record in errors.items()}
  assert codes == {
    5: "duplicate_id",
    6: "invalid_value",
    7: "invalid_json",
    11: "cannot_be_served",
    13: "duplicate_id",
  }
  assert errors[7]["id"] is None
  assert errors[11]["error"]["message"] == "line 11: prompt: expected at most 50 tokens, got 80"
  batch = {r["custom_id"]: r["response"] for r in records if "custom_id" in r}
  assert [choice["index"] for choice in batch["k"]["body"]["choices"]] == [0, 1]
  assert batch["l"]["status_code"] == 400
  assert batch["l"]["body"]["error"]["message"].startswith("line 10: prompt: expected")
  assert capfd.readouterr().out == ""


def test_input_order_on_request(tmp_path):
  run(tmp_path)
  free = read(tmp_path)
  run(tmp_path, ordered=True, overwrite=True)
  ordered = read(tmp_path)
  places = [(input_line(record), record.get("index", 0)) for record in ordered]
  assert places == sorted(places)
  assert [input_line(record) for record in free] != [place for place, _ in places]
  assert canonical(free) == canonical(ordered)


def test_look_ahead_is_bounded(tmp_path):
  text = "".join(json.dumps({"prompt": f"p{i}", "n": 2}) + "\n" for i in range(100))
  code, engine = run(tmp_path, text)
  assert code == Exit.OK
  assert engine.most <= LOOK_AHEAD + 1, "one line may bring more completions than were free"
  assert len(engine.added) == 100


@pytest.mark.parametrize("ordered", [False, True])
@settings(
  max_examples=60,
  deadline=None,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_resume_after_a_kill_at_any_byte(tmp_path, ordered, data):
  run(tmp_path, ordered=ordered, overwrite=True)
  path = tmp_path / "out.jsonl"
  whole, everything = path.read_bytes(), read(tmp_path)
  cut = data.draw(st.integers(0, len(whole)))
  path.write_bytes(whole[:cut])
  kept = whole[:cut].count(b"\n")
  code, engine = run(tmp_path, ordered=ordered, resume=True)
  assert code == Exit.BAD_LINES
  records = read(tmp_path)
  assert canonical(records) == canonical(everything)
  assert path.read_bytes().startswith(b"".join(whole.splitlines(keepends=True)[:kept]))
  if ordered:
    assert records == everything
  if cut == len(whole):
    assert engine.steps == 0


def test_a_finished_run_resumes_without_an_engine(tmp_path, capfd):
  run(tmp_path)
  whole = (tmp_path / "out.jsonl").read_bytes()

  def start():
    raise AssertionError("not needed")

  metrics = tmp_path / "m.json"
  code, _ = run(tmp_path, start=start, resume=True, metrics=str(metrics))
  assert code == Exit.BAD_LINES, "the kept error records still count"
  assert (tmp_path / "out.jsonl").read_bytes() == whole
  job = json.loads(metrics.read_text())["job"]
  assert (job["lines"], job["kept"], job["kept_failed"]) == (SERVED + FAILED, SERVED + FAILED, 6)


def test_resume_warns_of_results_without_a_line(tmp_path, capfd):
  run(tmp_path)
  code, _ = run(tmp_path, '{"id": "a", "prompt": "one"}\n', resume=True)
  assert code == Exit.OK
  assert "11 results are of no line of the input" in capfd.readouterr().err


def test_ordered_resume_of_an_unordered_file_is_refused(tmp_path, capfd):
  run(tmp_path)
  code, _ = run(tmp_path, ordered=True, resume=True)
  assert code == Exit.USAGE
  assert "continue without --ordered" in capfd.readouterr().err


def test_metrics(tmp_path):
  run(tmp_path, metrics=str(tmp_path / "m.json"))
  metrics = json.loads((tmp_path / "m.json").read_text())
  assert metrics["decode_tokens"] == 10
  assert metrics["pages"] == {"full": {"used": 0, "total": 99}}
  job = metrics["job"]
  assert job.pop("seconds") >= 0
  assert job == {
    "lines": 12,
    "served": SERVED,
    "failed": FAILED,
    "kept": 0,
    "kept_failed": 0,
    "records": 15,
    "exit_code": 1,
  }
  assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "m.json", "out.jsonl"]


def test_an_engine_failure_keeps_what_is_done(tmp_path, capfd):
  _, _ = run(tmp_path)
  everything = read(tmp_path)
  code, engine = run(tmp_path, engine=Engine(fail_after=4), overwrite=True, quiet=False)
  assert code == Exit.ENGINE
  assert engine.closed
  part = canonical(read(tmp_path))
  assert 0 < len(part) < len(everything)
  assert set(part) < set(canonical(everything))
  assert "--resume" in capfd.readouterr().err
  assert run(tmp_path, resume=True)[0] == Exit.BAD_LINES
  assert canonical(read(tmp_path)) == canonical(everything)


@pytest.mark.parametrize(
  ("error", "code"),
  [
    (WeightsError("tensor missing"), Exit.ENGINE),
    (ConfigError("config.cache: too small"), Exit.USAGE),
    (RuntimeError("no device"), Exit.ENGINE),
  ],
)
def test_a_model_that_does_not_load(tmp_path, capfd, caplog, error, code):
  def start():
    raise error

  assert run(tmp_path, start=start)[0] == code
  assert str(error) in capfd.readouterr().err + caplog.text


@pytest.mark.parametrize(
  ("options", "code", "word"),
  [
    ({"resume": True, "overwrite": True}, Exit.USAGE, "one of them"),
    ({"resume": True, "output": "-"}, Exit.USAGE, "--output"),
    ({"overwrite": True, "output": None}, Exit.USAGE, "--output"),
    ({"prompts": "/nowhere/in.jsonl"}, Exit.USAGE, "/nowhere/in.jsonl: cannot be opened"),
    ({"prompts": None}, Exit.USAGE, "no sample prompts"),
    ({"metrics": "/nowhere/m.json"}, Exit.USAGE, "writable directory"),
    ({"output": "/nowhere/out.jsonl"}, Exit.OUTPUT, "/nowhere/out.jsonl"),
    ({"output": "/dev/full"}, Exit.OUTPUT, "No space left"),
  ],
)
def test_options_and_outputs_that_cannot_work(tmp_path, capfd, options, code, word):
  assert run(tmp_path, **options)[0] == code
  assert word in capfd.readouterr().err


def test_the_input_is_not_overwritten(tmp_path, capfd):
  assert run(tmp_path, output=str(tmp_path / "in.jsonl"), overwrite=True)[0] == Exit.USAGE
  assert (tmp_path / "in.jsonl").read_text() == lines()


def test_an_existing_output_is_refused(tmp_path, capfd):
  run(tmp_path)
  before = (tmp_path / "out.jsonl").read_bytes()
  assert run(tmp_path)[0] == Exit.USAGE
  assert (tmp_path / "out.jsonl").read_bytes() == before


def test_samples_are_printed_for_reading(capfd):
  samples = ["one", {"id": "s", "messages": [{"role": "user", "content": "two"}]}, {"prompt": ""}]
  serving = Serving(Engine(), Tokenizer(), "fake")
  code = run_job(Options(), lambda: serving, defaults=SamplingParams(), samples=samples)
  out, err = capfd.readouterr()
  assert code == Exit.BAD_LINES
  assert out.index("[1] one\n  → ") < out.index("[s] two\n  → ") < out.index("[line 3] error:")
  assert "2 lines served, 1 refused" in err


def test_standard_output_gets_json_lines(tmp_path, capfd):
  run(tmp_path, output="-")
  assert len([json.loads(each) for each in capfd.readouterr().out.splitlines()]) == 15


def test_strict_and_warnings(tmp_path, capfd):
  text = '{"prompt": "x", "temprature": 1}\n' * 2
  assert run(tmp_path, text)[0] == Exit.OK
  assert capfd.readouterr().err.count("temprature") == 1
  assert run(tmp_path, text, strict=True, overwrite=True)[0] == Exit.BAD_LINES
  assert read(tmp_path)[0]["error"]["param"] == "temprature"


CHILD = textwrap.dedent("""
  import sys
  from test_runner import Engine, Tokenizer
  from kvjax.request import SamplingParams
  from kvjax.job.runner import Options, run_job
  from kvjax.job.serve import Serving
  options = Options(prompts=sys.argv[1], output=sys.argv[2], resume=True, metrics=sys.argv[3])
  serving = Serving(Engine(sleep=0.02), Tokenizer(), "fake")
  sys.exit(run_job(options, lambda: serving, defaults=SamplingParams(), look_ahead=6))
""")


def child(tmp_path, prompts, **more):
  here = os.path.dirname(os.path.abspath(__file__))
  environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(here), here])}
  command = [sys.executable, "-c", CHILD, prompts, tmp_path / "out.jsonl", tmp_path / "m.json"]
  return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, **more)


def wait_for_records(path, count, process):
  for _ in range(2000):
    if path.exists() and path.read_bytes().count(b"\n") >= count:
      return
    assert process.poll() is None
    time.sleep(0.01)
  raise AssertionError("no records within 20 s")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_loses_and_repeats_nothing(tmp_path, number):
  text = "".join(json.dumps({"id": i, "prompt": f"p{i}", "n": 2}) + "\n" for i in range(100))
  run(tmp_path, text)
  everything = read(tmp_path)
  os.unlink(tmp_path / "out.jsonl")
  process = child(tmp_path, tmp_path / "in.jsonl")
  wait_for_records(tmp_path / "out.jsonl", 5, process)
  process.send_signal(number)
  _, err = process.communicate(timeout=20)
  part = (tmp_path / "out.jsonl").read_bytes()
  assert 5 <= part.count(b"\n") < 200
  if number != signal.SIGKILL:
    assert process.returncode == 128 + number
    assert "continue with --resume" in err
    assert part.endswith(b"\n")
    assert json.loads((tmp_path / "m.json").read_text())["job"]["exit_code"] == 128 + number
  assert run(tmp_path, text, resume=True)[0] == Exit.OK
  assert canonical(read(tmp_path)) == canonical(everything)


def test_a_slow_pipe_does_not_hold_up_the_engine_or_a_signal(tmp_path):
  process = child(tmp_path, "-", stdin=subprocess.PIPE)
  assert process.stdin is not None
  process.stdin.write('{"id": "a", "prompt": "x"}\n')
  process.stdin.flush()
  wait_for_records(tmp_path / "out.jsonl", 1, process)  # though the pipe is still open
  process.send_signal(signal.SIGINT)
  assert process.wait(timeout=20) == 130
  process.stdin.close()
  process.stderr.close()


@pytest.mark.parametrize("one", ["output", "prompts"])
def test_metrics_never_replace_results_or_prompts(tmp_path, capfd, one):
  target = tmp_path / ("out.jsonl" if one == "output" else "in.jsonl")
  link = tmp_path / "link"
  link.symlink_to(target)
  for name in (target, link):
    assert run(tmp_path, overwrite=True, metrics=str(name))[0] == Exit.USAGE
    assert f"expected another file than --{one}" in capfd.readouterr().err
  assert (tmp_path / "in.jsonl").read_text() == lines()


def test_metrics_follow_a_link_and_leave_special_files_alone(tmp_path, capfd):
  (tmp_path / "link").symlink_to(tmp_path / "m.json")
  assert run(tmp_path, metrics=str(tmp_path / "link"))[0] == Exit.BAD_LINES
  assert (tmp_path / "link").is_symlink()
  assert "job" in json.loads((tmp_path / "m.json").read_text())
  os.mkfifo(tmp_path / "fifo")
  code, *_ = run(tmp_path, overwrite=True, metrics=str(tmp_path / "fifo"))
  assert code == Exit.USAGE
  assert (tmp_path / "fifo").is_fifo()


@pytest.mark.parametrize("name", ["prompts", "output", "metrics"])
def test_an_empty_path_is_refused(tmp_path, capfd, name):
  assert run(tmp_path, **{name: ""})[0] == Exit.USAGE
  assert f"--{name}: expected a path" in capfd.readouterr().err


def test_old_results_stay_until_there_are_new_ones(tmp_path, capfd):
  out = tmp_path / "out.jsonl"
  out.write_text("old\n")

  def start():
    raise WeightsError("no such model")

  assert run(tmp_path, '{"prompt": "x"}\n', start=start, overwrite=True)[0] == Exit.ENGINE
  assert out.read_text() == "old\n"
  assert run(tmp_path, '{"prompt": "x"}\n', overwrite=True)[0] == Exit.OK
  assert "old" not in out.read_text()
  assert out.read_text()
  assert run(tmp_path, "\n", overwrite=True)[0] == Exit.OK
  assert out.read_text() == ""


def test_a_pipe_by_name_waits_for_its_reader_and_hears_it_leave(tmp_path, capfd):
  """A fifo as output: nothing is lost before a reader comes; when it leaves the run ends."""
  import threading

  fifo = tmp_path / "out.jsonl"
  os.mkfifo(fifo)
  got = []

  def read(count):
    time.sleep(0.2)
    with open(fifo, "rb") as file:
      for _ in range(count):
        got.append(file.readline())

  text = "".join(f'{{"id": {i}, "prompt": "x"}}\n' for i in range(40))
  reader = threading.Thread(target=read, args=(40,))
  reader.start()
  assert run(tmp_path, text)[0] == Exit.OK
  reader.join()
  assert sorted(json.loads(each)["id"] for each in got) == list(range(40))
  reader = threading.Thread(target=read, args=(1,))
  reader.start()
  code, *_ = run(tmp_path, text, engine=Engine(sleep=0.02))
  reader.join()
  assert code == Exit.OUTPUT
  assert "cannot be written" in capfd.readouterr().err


def test_prompts_that_cannot_be_read(tmp_path, capfd):
  code = run_job(
    Options(prompts="/proc/self/mem", output=str(tmp_path / "o"), quiet=True),
    lambda: Serving(Engine(), Tokenizer(), "m"),
    defaults=SamplingParams(),
  )
  assert code == Exit.USAGE
  assert "--prompts: cannot be read" in capfd.readouterr().err


def test_a_plan_that_cannot_be_printed(capfd, monkeypatch):
  with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing fails as well
    monkeypatch.setattr(sys, "stdout", full)
    assert print_plan(lambda: "plan") == Exit.OUTPUT
  monkeypatch.setattr(sys, "stdout", None)
  assert print_plan(lambda: "plan") == Exit.OUTPUT
  assert "standard output: cannot be written" in capfd.readouterr().err
