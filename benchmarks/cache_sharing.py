"""Prefix sharing on a real model: what it saves where prompts start alike."""

import dataclasses
import statistics
from typing import Any

import numpy as np
import workloads
from serving_runs import SLOTS, SOURCE, engine, percentiles, serve
from tables import show

import kvjax
from kvjax import Request, SamplingParams


def alike(count: int, prompts: int, length: int, vocabulary: int, round: int) -> list[Request]:
  """`count` requests over `prompts` system prompts, in turn, with 16 to 32 tokens of their own."""
  rng = np.random.default_rng(100 + round)
  stems = [workloads.tokens(rng, length, vocabulary) for _ in range(prompts)]
  sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
  return [
    Request(
      f"{round} {i}",
      stems[i % prompts] + workloads.tokens(rng, int(rng.integers(16, 33)), vocabulary),
      sampling,
    )
    for i in range(count)
  ]


def run(quick: bool) -> dict[str, Any]:
  """Figures of the section; prints them."""
  model = kvjax.load(SOURCE, "float32")
  vocabulary = model.spec.vocab_size
  engines = {"off": engine(model, False), "on": engine(model, True)}
  for e in engines.values():  # compile, warm up
    serve(e, alike(SLOTS + 4, 4, 96, vocabulary, 90))
    serve(e, alike(SLOTS + 4, 4, 96, vocabulary, 90))
  count, length, rounds = (16, 128, 1) if quick else (64, 512, 3)
  found: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
  for round in range(rounds):
    items = alike(count, 4, length, vocabulary, round)  # new prompts in every round: cold
    for kind, e in engines.items():
      found[kind].append(serve(e, [dataclasses.replace(r) for r in items]))
  same = all(a["answers"] == b["answers"] for a, b in zip(found["off"], found["on"], strict=True))
  rows = []
  for kind, runs in found.items():
    middle = sorted(runs, key=lambda r: r["wall"])[len(runs) // 2]
    rows.append(
      {
        "sharing": kind,
        "prefill_tokens": middle["figures"]["prefill_tokens"],
        "first": percentiles(middle["first"]) | {"mean": statistics.mean(middle["first"])},
        "wall": middle["wall"],
        "walls": [r["wall"] for r in runs],
      }
    )
  show(
    f"{count} requests over 4 system prompts of {length} tokens, {SLOTS} slots, float32",
    ["sharing", "tokens computed", "first mean", "first p50", "first p99", "wall s"],
    [
      [
        r["sharing"],
        r["prefill_tokens"],
        *(r["first"][k] for k in ("mean", "p50", "p99")),
        r["wall"],
      ]
      for r in rows
    ],
  )
  speedup = statistics.median(
    a["wall"] / b["wall"] for a, b in zip(found["off"], found["on"], strict=True)
  )
  print(f"  the same tokens: {same}; {speedup:.2f} × as fast with sharing")
  return {
    "requests": count,
    "system_prompt_tokens": length,
    "rows": rows,
    "speedup": speedup,
    "same_tokens": same,
  }
