"""Runs a batch job: what `run.py` does once its flags are read. Imports nothing heavy."""

import contextlib
import dataclasses
import enum
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from kvjax.errors import ConfigError, KvjaxError
from kvjax.job.progress import Progress
from kvjax.job.prompts import LineParser
from kvjax.job.results import OutputError, OutputRefused, ResultFile
from kvjax.job.serve import Counts, Job, Serving
from kvjax.job.source import UsageError, count_lines, open_source
from kvjax.job.stop import Interrupted, Stop
from kvjax.request import SamplingParams

log = logging.getLogger(__name__)


class Exit(enum.IntEnum):
  """Exit codes; after a signal it is 128 + the signal's number (130, 143)."""

  OK = 0
  BAD_LINES = 1
  USAGE = 2
  OUTPUT = 3
  ENGINE = 4


@dataclasses.dataclass(frozen=True)
class Options:
  """What the command line says about a job; `run.py` documents each."""

  prompts: str | None = None
  output: str | None = None
  ordered: bool = False
  resume: bool = False
  overwrite: bool = False
  strict: bool = False
  metrics: str | None = None
  quiet: bool = False

  def check(self) -> None:
    """Raises UsageError for options that do not go together."""
    if self.resume and self.overwrite:
      raise UsageError("--resume and --overwrite: expected one of them, got both")
    for name in ("resume", "overwrite"):
      if getattr(self, name) and self.output in (None, "-"):
        raise UsageError(f"--{name}: expected a file to write beside it, like --output=out.jsonl")
    for name in ("prompts", "output", "metrics"):
      if getattr(self, name) == "":
        raise UsageError(f"--{name}: expected a path, got an empty one")
    if self.metrics is not None:
      path = os.path.realpath(self.metrics)
      special = os.path.exists(path) and not os.path.isfile(path)
      if special or not os.access(os.path.dirname(path), os.W_OK):
        raise UsageError(f"--metrics: {self.metrics}: expected a file in a writable directory")
    for one, other in (("output", "prompts"), ("metrics", "prompts"), ("metrics", "output")):
      first, second = getattr(self, one), getattr(self, other)
      if first is not None and second is not None and _same_file(first, second):
        raise UsageError(f"--{one}: {first}: expected another file than --{other}")


def _same_file(first: str, second: str) -> bool:
  """Whether two paths name one regular file, which may not be there yet."""
  if "-" in (first, second):
    return False
  if os.path.realpath(first) == os.path.realpath(second):
    return not os.path.exists(first) or os.path.isfile(first)
  with contextlib.suppress(OSError):
    return os.path.samefile(first, second) and os.path.isfile(first)
  return False


def write_metrics(path: str, metrics: Mapping[str, Any]) -> None:
  """Writes a JSON file in one step: whole, or not at all. Raises OutputError."""
  path = os.path.realpath(path)  # a link stays a link
  temporary = f"{path}.{os.getpid()}.tmp"
  try:
    with open(temporary, "w", encoding="utf-8") as file:
      json.dump(metrics, file, indent=2)
      file.write("\n")
    os.replace(temporary, path)
  except OSError as error:
    with contextlib.suppress(OSError):
      os.unlink(temporary)
    raise OutputError(f"{path}: cannot be written: {error.strerror}") from error


def run_job(
  options: Options,
  start: Callable[[], Serving],
  *,
  defaults: SamplingParams,
  samples: Sequence[str | Mapping[str, Any]] = (),
  look_ahead: int = 64,
) -> int:
  """Runs a whole job and returns the exit code; what went wrong is on standard error.

  Args:
    options: what the command line says.
    start: loads the model and makes the engine; called when the first line needs it.
    defaults: sampling for what a line does not say.
    samples: the prompts of a run without --prompts.
    look_ahead: completions that the engine holds at most before no more lines are read.
  """
  began = time.monotonic()
  results: ResultFile | None = None
  job: Job | None = None
  stop = Stop()
  code: int = Exit.OK
  try:
    options.check()
    source = open_source(options.prompts, samples)
    pretty = options.output is None and (options.prompts is None or sys.stdout.isatty())
    existing: Literal["refuse", "keep", "drop"] = "refuse"
    if options.resume or options.overwrite:
      existing = "keep" if options.resume else "drop"
    results = ResultFile(options.output or "-", existing, ordered=options.ordered)
    if results.cut:
      say(f"{results.path}: cut off a torn last line of {results.cut} bytes")
    total = None if options.quiet else count_lines(options.prompts, samples)
    progress = Progress(total, quiet=options.quiet)

    def warn(text: str) -> None:
      with progress.aside():
        say(f"warning: {text}")

    parser = LineParser(defaults, strict=options.strict, warn=warn)
    job = Job(
      source,
      results,
      parser,
      start,
      look_ahead=look_ahead,
      ordered=options.ordered or pretty,
      pretty=pretty,
      progress=progress,
    )
    try:
      with stop:
        job.run(stop)
      results.drop_old()
    finally:
      progress.close()
    if stop.signal:
      code = 128 + stop.signal
    else:
      code = Exit.BAD_LINES if job.counts.failed or job.counts.kept_failed else Exit.OK
      if results.finished:
        say(f"warning: {results.path}: {len(results.finished)} results are of no line of the input")
  except (Interrupted, KeyboardInterrupt):
    code = 128 + (stop.signal or signal.SIGINT)
  except (UsageError, OutputRefused, ConfigError) as error:
    say(f"error: {error}")
    code = Exit.USAGE
  except OutputError as error:
    say(f"error: {error}")
    code = Exit.OUTPUT
  except KvjaxError as error:
    say(f"error: {error}")
    code = Exit.ENGINE
  except Exception:
    log.exception("the engine failed")
    code = Exit.ENGINE
  return _finish(options, results, job, code, time.monotonic() - began)


def _finish(
  options: Options, results: ResultFile | None, job: Job | None, code: int, seconds: float
) -> int:
  """Brings everything to disk and reports; returns the exit code."""
  figures: Mapping[str, Any] = {}
  steps: list[Callable[[], None]] = []
  if job is not None and job.serving is not None:
    engine = job.serving.engine
    try:
      figures = engine.figures()
      engine.close()
    except Exception:
      log.exception("the engine could not be closed")
      code = code or Exit.ENGINE
  if results is not None:
    steps.append(results.close)
  if job is not None and options.metrics is not None:
    counts = dataclasses.asdict(job.counts) | {"seconds": seconds, "exit_code": int(code)}
    metrics = {**figures, "job": counts}
    steps.append(lambda: write_metrics(str(options.metrics), metrics))
  for step in steps:
    try:
      step()
    except OutputError as error:
      say(f"error: {error}")
      code = Exit.OUTPUT if code in (Exit.OK, Exit.BAD_LINES) else code
  if job is not None and not options.quiet:
    for text in itertools.chain(summary(job.counts, figures, seconds), _advice(options, job, code)):
      say(text)
  return int(code)


def summary(counts: Counts, figures: Mapping[str, Any], seconds: float) -> Iterator[str]:
  """The closing line of a run."""
  kept = f", {counts.kept} kept" if counts.kept else ""
  yield (
    f"{counts.served} lines served, {counts.failed} refused{kept}; "
    f"{figures.get('prefill_tokens', 0)} prefill and {figures.get('decode_tokens', 0)} decode "
    f"tokens in {seconds:.1f} s"
  )


def _advice(options: Options, job: Job, code: int) -> Iterator[str]:
  if code in (Exit.OK, Exit.BAD_LINES):
    return
  if job.unwritten and options.output not in (None, "-"):
    yield f"{job.unwritten} more are finished but wait for earlier lines: they will be done again"
  if options.output not in (None, "-") and code != Exit.USAGE:
    yield f"stopped before the end: continue with --resume --output={options.output}"


def print_plan(report: Callable[[], str]) -> int:
  """Prints a plan; errors end it as they end a job. Returns the exit code."""
  try:
    text = report()
    if sys.stdout is None:
      raise OutputError("standard output: cannot be written: it is closed")
    try:
      print(text, flush=True)
    except OSError as error:
      sys.stdout = None  # or it would be flushed, and fail, once more at exit
      raise OutputError(f"standard output: cannot be written: {error.strerror}") from error
  except OutputError as error:
    say(f"error: {error}")
    return Exit.OUTPUT
  except ConfigError as error:
    say(f"error: {error}")
    return Exit.USAGE
  except KvjaxError as error:
    say(f"error: {error}")
    return Exit.ENGINE
  return Exit.OK


def say(text: str) -> None:
  """One line on standard error."""
  print(text.encode("utf-8", "backslashreplace").decode(), file=sys.stderr, flush=True)
