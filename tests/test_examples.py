"""The examples run with the tiny model, and print what the plain forward says they should."""

import ast
import math
import pathlib
import re
import runpy
import sys

import jax
import numpy as np
import pytest
from absl import app, flags, logging
from absl.testing import flagsaver

from kvjax import testing
from kvjax.errors import ConfigError

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
PROMPT = "The sea is"
MODEL = testing.tiny_model("mixed")
IDS = MODEL.tokenizer.encode(PROMPT)

app.define_help_flags()  # once per process: before the first of them is run


@pytest.fixture(scope="module", autouse=True)
def fast_compilation():
  """The examples compile much and compute little."""
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def run(monkeypatch, capsys):
  """Runs one example as a script; the lines that it printed."""

  def call(name, *arguments):
    verbosity = logging.get_verbosity()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as end:
      runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    logging.set_verbosity(verbosity)
    assert not end.value.code, end.value.code
    return capsys.readouterr().out.splitlines()

  before = set(flags.FLAGS)
  yield call
  assert set(flags.FLAGS) == before  # one example's flags do not meet the next one's


def logprobs(tokens):
  """Of each further token after the prompt: float64 [n, V]."""
  logits = testing.reference_logits(MODEL.params, MODEL.spec, [*IDS, *tokens])[len(IDS) - 1 : -1]
  top = logits.max(-1, keepdims=True)
  return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def score(tokens):
  return float(logprobs(tokens)[np.arange(len(tokens)), tokens].sum())


def scored(line):
  """(score, tokens) of a line '… score  [tokens]  text'."""
  found = re.search(r"(-?\d+\.\d+)  (\[.*?\])  ", line)
  return float(found[1]), ast.literal_eval(found[2])


def test_every_example_is_short_and_says_what_it_shows():
  files = sorted(EXAMPLES.glob("*.py"))
  assert len(files) >= 5
  for file in files:
    text = file.read_text(encoding="utf-8")
    assert 30 <= len(text.splitlines()) <= 80, file
    doc = ast.get_docstring(ast.parse(text))
    for part in (f"python examples/{file.name}", "Command:", "Shows:", "Prints:"):
      assert part in doc, (file, part)


def test_decode_loop(run):
  lines = [line.split() for line in run("decode_loop", "--tokens=12")]
  tokens = [int(line[0]) for line in lines]
  assert len(tokens) == 12
  want = logprobs(tokens)
  assert tokens == list(want.argmax(-1))
  entropy = -(np.exp(want) * want).sum(-1)
  np.testing.assert_allclose([float(line[1]) for line in lines], entropy, atol=2e-3)


def test_best_of_n(run):
  lines = [scored(line) for line in run("best_of_n", "--tokens=6", "--n=3", "--seed=1")]
  assert len(lines) == 3
  assert len({tuple(tokens) for _, tokens in lines}) == 3  # each sample has its own seed
  assert lines == sorted(lines, reverse=True)
  for printed, tokens in lines:
    assert math.isclose(printed, score(tokens), abs_tol=1e-3)


def test_beam_search(run):
  greedy, *beams = [scored(line) for line in run("beam_search", "--tokens=6", "--beams=3")]
  assert len(beams) == 3
  for printed, tokens in (greedy, *beams):
    assert len(tokens) == 6
    assert math.isclose(printed, score(tokens), abs_tol=1e-3)
  assert greedy[1] == list(logprobs(greedy[1]).argmax(-1))
  assert beams == sorted(beams, reverse=True)
  assert beams[0][0] > greedy[0]  # of this prompt and model the greedy one is not the best
  assert beams == beam_search(3, 6)


def beam_search(width, count):
  """The same search by the plain forward, a whole sequence per beam and step."""
  beams = [(0.0, [])]
  for _ in range(count):
    longer = []
    for total, tokens in beams:
      last = logprobs([*tokens, 0])[-1]
      longer += [(total + float(last[t]), [*tokens, t]) for t in range(MODEL.spec.vocab_size)]
    beams = sorted(longer, reverse=True)[:width]
  return [(pytest.approx(total, abs=1e-3), tokens) for total, tokens in beams]


def test_edit_cache(run):
  lines = run("edit_cache", "--layers=0,5", f"--positions=0,1,2,3,{len(IDS) - 1}")
  sizes = [line.split(": ") for line in lines[:10]]
  assert [where for where, _ in sizes] == [
    f"layer {layer} position {position}" for layer in (0, 5) for position in (0, 1, 2, 3, 9)
  ]
  # The last token is not computed yet; the rest is within the window.
  assert [size == "not in the cache" for _, size in sizes] == 2 * [*4 * [False], True]
  before, after = (line.split("  ")[1:] for line in lines[10:])
  # The prompt's next token is the plain forward's; zeroed values give another one.
  want = logprobs([0])[0]
  assert int(before[0].split()[0]) == want.argmax()
  assert math.isclose(float(before[0].split()[-1]), want.max(), abs_tol=1e-3)
  assert before != after
  assert before[0].split()[0] != after[0].split()[0]


def test_sweep(run):
  lines = run(
    "sweep",
    "--sweep=cache.page_size=1,16",
    "--sweep=scheduler.max_sequences=1",
    "--requests=2",
    "--tokens=5",
  )
  head, *rows = [line.split() for line in lines]
  assert head[:3] == ["cache.page_size", "scheduler.max_sequences", "steps"]
  assert [row[:2] for row in rows] == [["1", "1"], ["16", "1"]]
  assert rows[0][-1] == rows[1][-1]  # the same tokens
  waste = [int(row[row.index("full") + 1].rstrip("%")) for row in rows]
  assert waste[0] < waste[1]  # the smallest pages waste least


def test_sweep_names_a_wrong_key(run, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["sweep.py", "--sweep=cache.page=1"])
  with flagsaver.flagsaver(), pytest.raises(ValueError, match=r"config\.cache\.page: .*page_size"):
    runpy.run_path(str(EXAMPLES / "sweep.py"), run_name="__main__")


def test_checkpoint(run, tmp_path):
  lines = run("checkpoint", "--tokens=5", f"--directory={tmp_path}")
  before, went_on, restored = (ast.literal_eval(line[line.index("[") :]) for line in lines)
  assert went_on == restored
  first = int(logprobs([0])[0].argmax())
  tokens = [first, *before, *went_on]
  assert tokens == list(logprobs(tokens).argmax(-1))
  assert (tmp_path / "state").is_dir()


def test_chunks(run):
  def chunks(*arguments):
    lines = run("chunks", *arguments)
    tables = [i for i, line in enumerate(lines) if line.split()[:2] == ["chunks", "of"]]
    rows = [
      line.split() for i, n in zip(tables, (5, 2), strict=True) for line in lines[i + 1 :][:n]
    ]
    return {row[0] if i < 5 else f"gemma {row[0]}": row[1:3] for i, row in enumerate(rows)}

  assert list(chunks("--block_size=512").values()) == [
    *(["2", "512"], ["8", "512"], ["8", "512"], ["128", "512"], ["64", "512"]),
    *(["32", "512"], ["16", "512"]),
  ]
  for sizes, tokens in (("16,32", ["32", "64"]), ("16,64", ["32", "128"]), ("32,16", ["64", "32"])):
    got = chunks("--blocks_per_chunk=2", f"--page_sizes={sizes}")
    assert [pages for pages, _ in got.values()] == 7 * ["2"]
    assert [each for _, each in got.values()] == ["512", "128", "128", "8", "16", *tokens]


def test_chunks_of_a_size_that_does_not_divide(monkeypatch):
  monkeypatch.setattr(sys, "argv", ["chunks.py", "--block_size=128"])
  with (
    flagsaver.flagsaver(),
    pytest.raises(ConfigError, match=r"block_size.*next.*256.*blocks_per"),
  ):
    runpy.run_path(str(EXAMPLES / "chunks.py"), run_name="__main__")
