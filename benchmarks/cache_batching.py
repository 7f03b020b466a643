"""Continuous against static batching: the same engine, kernels and requests, only another order.

All requests arrive at time 0. Static: batches of as many as there are slots, in order of arrival,
each starting when the last one has ended. Continuous: a request joins as soon as a slot is free.
The spread of output lengths is what static batching pays for, so it is what the curve is over.
"""

import dataclasses
import statistics
from typing import Any

import numpy as np
import workloads
from serving_runs import SLOTS, SOURCE, engine, percentiles, serve
from tables import show

import kvjax
from kvjax import Request, SamplingParams


def requests(count: int, mean: int, variation: float, vocabulary: int) -> list[Request]:
  rng = np.random.default_rng(3)
  outputs = workloads.spread_lengths(count, mean, variation, seed=4)
  return [
    Request(
      f"{variation} {i}",
      workloads.tokens(rng, int(rng.integers(24, 65)), vocabulary),
      SamplingParams(max_tokens=min(int(n), 900), temperature=0, ignore_eos=True),
    )
    for i, n in enumerate(outputs)
  ]


def run(quick: bool) -> dict[str, Any]:
  """Figures of the section; prints them."""
  model = kvjax.load(SOURCE)
  e = engine(model, sharing=False)
  count, mean = (32, 16) if quick else (64, 48)
  repeats = 1 if quick else 3
  spreads = (0.0, 1.0) if quick else (0.0, 0.5, 1.0, 1.5)
  vocabulary = model.spec.vocab_size
  # Every shape is compiled before anything is timed, and the machine is warm.
  serve(e, requests(SLOTS + 4, 8, 1.0, vocabulary))
  serve(e, requests(SLOTS, 8, 1.0, vocabulary), batch=4)
  serve(e, requests(3, 4, 0.5, vocabulary), batch=1)
  rows = []
  for variation in spreads:
    items = requests(count, mean, variation, vocabulary)
    runs: dict[str, list[dict[str, Any]]] = {"static": [], "continuous": []}
    for _ in range(repeats):
      for kind, batch in (("static", SLOTS), ("continuous", None)):
        runs[kind].append(serve(e, [dataclasses.replace(r) for r in items], batch))
    row: dict[str, Any] = {"variation": variation}
    for kind, found in runs.items():
      middle = sorted(found, key=lambda r: r["wall"])[len(found) // 2]
      row[kind] = {
        "tokens_per_second": middle["tokens"] / middle["wall"],
        "first": percentiles(middle["first"]),
        "done": percentiles(middle["done"]),
        "walls": [r["wall"] for r in found],
      }
    pairs = zip(runs["static"], runs["continuous"], strict=True)
    row["speedup"] = statistics.median(a["wall"] / b["wall"] for a, b in pairs)
    rows.append(row)
  show(
    f"static against continuous batching, {count} requests, {SLOTS} slots, mean output {mean}",
    ["spread", "batching", "tokens/s", "first p50", "first p99", "done p50", "done p99", "gain"],
    [
      [
        r["variation"],
        kind,
        r[kind]["tokens_per_second"],
        r[kind]["first"]["p50"],
        r[kind]["first"]["p99"],
        r[kind]["done"]["p50"],
        r[kind]["done"]["p99"],
        f"{r['speedup']:.2f} ×" if kind == "continuous" else "",
      ]
      for r in rows
      for kind in ("static", "continuous")
    ],
  )
  return {
    "requests": count,
    "slots": SLOTS,
    "mean_output": mean,
    "dtype": model.dtype,
    "rows": rows,
  }
