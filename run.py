"""Serves prompts with a declared model: `python run.py --config=configs/smollm2.py`.

  python run.py --config=configs/smollm2.py --prompts=in.jsonl --output=out.jsonl
  python run.py --config=configs/smollm2.py --prompts=in.jsonl --output=out.jsonl --resume
  python run.py --config=configs/smollm2.py --config.cache.page_size=32 --plan

Without --prompts the configuration's own sample prompts run. Without --output the results go to
standard output: as text for reading when they are the samples or standard output is a terminal,
else as JSON lines; --output=- is always JSON lines.

A prompt line is {"id", "prompt"}, {"id", "prompt_token_ids"} or {"id", "messages"} with sampling
fields beside them, or a line of the OpenAI batch format for /v1/chat/completions or
/v1/completions. The id is a string or an integer; without one it is the line number. Results are
appended as they finish; with --ordered in input order, where finished results wait in memory,
without bound, for earlier lines. A line that cannot be served gets an error record; --resume counts
it as done and matches it by line number and id, so a kept output belongs to one unchanged input
(lines may be added at its end).

Ctrl-C and SIGTERM stop after the current step and keep what is done; a second one kills at once.

Exit codes: 0 every line served; 1 some lines have error records, from this run or kept ones;
2 wrong flags or configuration; 3 the output could not be written; 4 the model could not be loaded
or the engine failed; 130 and 143 stopped by SIGINT or SIGTERM.
"""

import logging
import os
from typing import Any

from absl import app, flags

import kvjax.flags
from kvjax.job.runner import Exit, Options, print_plan, run_job, say
from kvjax.job.serve import Serving

_CACHE = os.path.join(
  os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvjax", "xla"
)
_CONFIG = kvjax.flags.DEFINE_config()
_PROMPTS = flags.DEFINE_string("prompts", None, "file of prompt lines; - is standard input")
_OUTPUT = flags.DEFINE_string("output", None, "file of result lines; - is standard output")
_ORDERED = flags.DEFINE_bool("ordered", False, "write results in input order")
_RESUME = flags.DEFINE_bool("resume", False, "keep the results in --output and do the other lines")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "drop the results in --output")
_STRICT = flags.DEFINE_bool("strict", False, "an unknown field of a prompt line is an error")
_PLAN = flags.DEFINE_bool("plan", False, "print the memory plan and stop")
_METRICS = flags.DEFINE_string("metrics", None, "JSON file for the run's figures")
_COMPILATION_CACHE = flags.DEFINE_string(
  "compilation_cache", _CACHE, "directory that keeps compiled steps; none: do not keep them"
)
_QUIET = flags.DEFINE_bool("quiet", False, "no progress bar and no closing line")


def main(argv: list[str]) -> int:
  if len(argv) > 1:
    say(f"error: expected flags only, got {argv[1:]}")
    return Exit.USAGE
  config = _CONFIG.value
  logging.getLogger("jax").setLevel(logging.WARNING)  # it reports every platform it does not find

  def load() -> Any:
    import kvjax
    from kvjax.engine import enable_compilation_cache

    directory = _COMPILATION_CACHE.value
    enable_compilation_cache(None if directory.lower() == "none" else directory)
    return kvjax.load(config.model.source, dtype=config.model.dtype, weights=not _PLAN.value)

  def start() -> Serving:
    from kvjax.engine import Engine

    model = load()
    return Serving(Engine(model, config), model.tokenizer, config.model.source)

  if _PLAN.value:
    import kvjax.report

    return print_plan(lambda: kvjax.report.plan_report(load(), config))
  options = Options(
    prompts=_PROMPTS.value,
    output=_OUTPUT.value,
    ordered=_ORDERED.value,
    resume=_RESUME.value,
    overwrite=_OVERWRITE.value,
    strict=_STRICT.value,
    metrics=_METRICS.value,
    quiet=_QUIET.value,
  )
  return run_job(
    options,
    start,
    defaults=config.sampling.params(),
    samples=config.prompts,
    look_ahead=3 * config.scheduler.max_sequences,
  )


if __name__ == "__main__":
  app.run(main, flags_parser=kvjax.flags.parse)
