"""run.py from the outside, on a tiny model file: jobs, kill -9 and resume, plans, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvjax import testing

ROOT = Path(__file__).parent.parent
CONFIG = """
from kvjax.config import *

def get_config():
  return Config(
    model=ModelConfig(source="gguf:{path}", dtype="float32", max_length=128),
    cache=CacheConfig(page_size=4),
    scheduler=SchedulerConfig(max_sequences=4, token_budget=16, query_block=8,
                              decode_buckets=(64,), prefill_buckets=(64,)),
    sampling=SamplingDefaults(max_tokens=12, ignore_eos=True),
    prompts=("one", {{"messages": [{{"role": "user", "content": "two"}}]}}),
  )
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
  """A folder with a model file and a configuration, and a compilation cache for all runs."""
  folder = tmp_path_factory.mktemp("run")
  testing.write_tiny_gguf(folder / "tiny.gguf", kind="mixed")
  (folder / "config.py").write_text(CONFIG.format(path=folder / "tiny.gguf"))
  return folder


def command(home, *flags):
  return [
    sys.executable,
    str(ROOT / "run.py"),
    f"--config={home / 'config.py'}",
    f"--compilation_cache={home / 'xla'}",
    *flags,
  ]


def environment():
  path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
  return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": path}


def run(home, *flags, expect=0, **more):
  done = subprocess.run(
    command(home, *flags),
    capture_output=True,
    text=True,
    timeout=300,
    env=environment(),
    check=False,
    **more,
  )
  assert done.returncode == expect, done.stderr[-3000:]
  return done


def prompts(folder, count, **fields):
  path = folder / "in.jsonl"
  lines = [
    json.dumps({"id": i, "prompt": f"prompt {i} " * (i % 5 + 1), **fields}) for i in range(count)
  ]
  path.write_text("\n".join(lines) + "\n")
  return path


def records(path):
  return {(r["id"], r.get("index")): r for r in map(json.loads, path.read_text().splitlines())}


@pytest.mark.smoke
def test_samples_and_metrics(home, tmp_path):
  metrics = tmp_path / "m.json"
  done = run(home, f"--metrics={metrics}")
  assert "[1] one" in done.stdout
  assert "[2] two" in done.stdout
  m = json.loads(metrics.read_text())
  assert m["prompt_tokens"] == sum(m["prompt_tokens_by_source"].values()) > 0
  assert m["decode_tokens"] == 24
  assert m["job"]["served"] == 2
  assert set(m["pages"]) == {"sliding", "full"}
  for key in ("time_to_first_token_seconds", "time_between_tokens_seconds"):
    assert m[key]["p50"] <= m[key]["p90"] <= m[key]["p99"]
  assert m["compilations"]["count"] == len(m["compilations"]["shapes"]) > 0


def test_kill_and_resume_loses_nothing_and_repeats_nothing(home, tmp_path):
  given = prompts(tmp_path, 40, max_tokens=60, temperature=0.9, n=2)
  whole = tmp_path / "whole.jsonl"
  run(home, f"--prompts={given}", f"--output={whole}")
  wanted = records(whole)
  assert len(wanted) == 80

  output = tmp_path / "out.jsonl"
  flags = (f"--prompts={given}", f"--output={output}")
  job = subprocess.Popen(
    command(home, *flags),
    env=environment(),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  deadline = time.monotonic() + 200
  while not (output.exists() and output.read_bytes().count(b"\n") >= 10):
    assert job.poll() is None
    assert time.monotonic() < deadline
    time.sleep(0.005)
  job.send_signal(signal.SIGKILL)
  job.wait()
  kept = output.read_bytes()
  lines = kept.count(b"\n")
  assert 10 <= lines < 80
  with output.open("ab") as f:
    f.write(b'{"id": 3, "index": 0, "te')  # what a torn write leaves

  run(home, *flags, expect=2)  # an existing file is not overwritten by accident
  run(home, *flags, "--resume")
  assert output.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
  assert output.read_bytes().count(b"\n") == 80
  assert records(output) == wanted


def test_interrupt_keeps_what_is_done(home, tmp_path):
  given = prompts(tmp_path, 60, max_tokens=60)
  output, metrics = tmp_path / "out.jsonl", tmp_path / "m.json"
  job = subprocess.Popen(
    command(home, f"--prompts={given}", f"--output={output}", f"--metrics={metrics}"),
    env=environment(),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )
  deadline = time.monotonic() + 200
  while not (output.exists() and output.read_bytes().count(b"\n") >= 5):
    assert job.poll() is None
    assert time.monotonic() < deadline
    time.sleep(0.005)
  job.send_signal(signal.SIGINT)
  _, errors = job.communicate(timeout=60)
  assert job.returncode == 130
  assert "--resume" in errors
  assert 5 <= len(records(output)) < 60
  assert json.loads(metrics.read_text())["job"]["exit_code"] == 130


def test_bad_lines_beside_good_ones(home, tmp_path):
  lines = [
    '{"id": "good", "prompt": "hello"}',
    '{"id": "both", "prompt": "a", "prompt_token_ids": [5]}',
    '{"id": "neither"}',
    '{"id": "empty", "prompt": ""}',
    '{"id": "long", "prompt_token_ids": [' + ", ".join(["5"] * 200) + "]}",
    '{"id": "outside", "prompt_token_ids": [123456]}',
    '{"id": "none", "prompt": "a", "max_tokens": 0}',
    '{"id": "hot", "prompt": "a", "temperature": -3}',
    '{"id": "nul", "prompt": "a\\u0000b"}',
    '{"id": "lone", "prompt": "a\\ud800b"}',
    "{broken",
    json.dumps(
      {
        "custom_id": "chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "n": 2},
      }
    ),
    json.dumps(
      {
        "custom_id": "bad",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "x", "top_p": 7},
      }
    ),
  ]
  given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
  given.write_text("\n".join(lines) + "\n")
  run(home, f"--prompts={given}", f"--output={output}", expect=1)
  found = [json.loads(line) for line in output.read_text().splitlines()]
  by_id = {r.get("custom_id") or r["id"]: r for r in found}
  assert len(found) == len(lines)
  assert len(by_id["good"]["token_ids"]) == 12
  assert len(by_id["nul"]["token_ids"]) == 12
  wrong = {
    "both": (2, "prompt_token_ids"),
    "neither": (3, "prompt"),
    "long": (5, "prompt"),
    "outside": (6, "prompt_token_ids[0]"),
    "none": (7, "max_tokens"),
    "hot": (8, "temperature"),
    "lone": (10, "prompt"),
  }
  for name, (line, key) in wrong.items():
    error = by_id[name]["error"]
    assert (error["line"], error["param"]) == (line, key), error
    assert error["message"].startswith(f"line {line}: ")
  assert by_id["empty"]["error"]["line"] == 4
  assert by_id[None]["error"]["line"] == 11
  assert by_id["chat"]["response"]["status_code"] == 200
  assert len(by_id["chat"]["response"]["body"]["choices"]) == 2
  assert by_id["bad"]["response"]["body"]["error"]["param"] == "top_p"


def test_preemption_in_a_small_pool_gives_the_same_answers(home, tmp_path):
  given = prompts(tmp_path, 8, max_tokens=40)
  outputs = []
  for name, more in {
    "roomy": (),
    "tight": (
      "--config.cache.groups.full.pages=26",
      "--config.cache.groups.sliding.pages=20",
    ),
  }.items():
    output, metrics = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.json"
    run(home, f"--prompts={given}", f"--output={output}", f"--metrics={metrics}", *more)
    outputs.append(records(output))
    preemptions = json.loads(metrics.read_text())["preemptions"]
    assert (preemptions > 0) == (name == "tight")
  assert outputs[0] == outputs[1]


def test_plan_shows_each_group(home):
  text = run(home, "--plan", "--config.cache.groups.sliding.page_size=8").stdout
  lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
  assert "8 tok" in lines["sliding"]
  assert "4 tok" in lines["full"]
  assert "max_sequences" in text


def test_tensor_parallel_gives_the_same_answers(home, tmp_path):
  given = prompts(tmp_path, 4)
  outputs = []
  for tensor in (1, 2):
    output = tmp_path / f"{tensor}.jsonl"
    env = environment() | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
      command(home, f"--prompts={given}", f"--output={output}", f"--config.mesh.tensor={tensor}"),
      capture_output=True,
      text=True,
      env=env,
      timeout=300,
      check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outputs.append(records(output))
  assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
  ("flags", "code", "says"),
  [
    (["--config.cache.page_sise=4"], 2, "page_size"),
    (["--config.cache.groups.slidin.page_size=4"], 2, "sliding"),
    (["--config.mesh.tensor=64"], 2, "config.mesh.tensor"),
    (["--config.kernels.attention=mosaic"], 2, "config.kernels.attention"),
    (["--config.model.max_length=100000"], 2, "config.model.max_length"),
    (["--config.cache.memory_bytes=10"], 2, "config.cache.memory_bytes"),
    (["--config.model.source=gguf:/nowhere.gguf"], 4, "/nowhere.gguf"),
    (["--output=/nowhere/out.jsonl"], 3, "/nowhere"),
    (["--plan", "--config.cache.memory_bytes=10"], 2, "config.cache.memory_bytes"),
    (["--plan", "--config.cache.groups.slidin.page_size=4"], 2, "sliding"),
    (["--plan", "--config.model.source=gguf:/nowhere.gguf"], 4, "/nowhere.gguf"),
  ],
)
def test_one_clean_line_for_a_wrong_command(home, flags, code, says):
  done = run(home, *flags, expect=code)
  assert says in done.stderr
  assert "Traceback" not in done.stderr
