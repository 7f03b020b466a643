"""What prefix sharing costs where no prompt starts like another: hashing, names, evictions."""

import dataclasses
import statistics
from typing import Any

import numpy as np
import workloads
from serving_runs import SOURCE, engine, serve

import kvjax
from kvjax import Request, SamplingParams


def unlike(count: int, length: int, vocabulary: int, round: int) -> list[Request]:
  rng = np.random.default_rng(200 + round)
  sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
  return [
    Request(f"u{round} {i}", workloads.tokens(rng, length, vocabulary), sampling)
    for i in range(count)
  ]


def run(quick: bool) -> dict[str, Any]:
  """Figures of the section; prints them."""
  model = kvjax.load(SOURCE, "float32")
  vocabulary = model.spec.vocab_size
  engines = {"off": engine(model, False), "on": engine(model, True)}
  for e in engines.values():  # compile, warm up
    serve(e, unlike(20, 96, vocabulary, 90))
    serve(e, unlike(2, 40, vocabulary, 91), batch=1)
  pairs = []
  for round in range(2 if quick else 7):
    items = unlike(8 if quick else 48, 200, vocabulary, round)
    order = ("off", "on") if round % 2 else ("on", "off")
    walls = {k: serve(engines[k], [dataclasses.replace(r) for r in items])["wall"] for k in order}
    pairs.append(walls["on"] / walls["off"])
  print(
    f"\ncost of prefix sharing without any hit: {statistics.median(pairs) - 1:+.1%} of the time "
    f"(pairs from {min(pairs) - 1:+.1%} to {max(pairs) - 1:+.1%}; wanted: at most +2 %)"
  )
  return {"ratios": pairs, "median": statistics.median(pairs)}
