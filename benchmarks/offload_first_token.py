"""Time to the first token of a prompt by where its prefix comes from."""

import statistics
import tempfile
from typing import Any

import numpy as np
import workloads
from offload_serving import engine, forget_device, forget_host, settle, timed
from serving_runs import SOURCE
from tables import show

import kvjax
from kvjax import OffloadConfig

SOURCES = ("computed", "device", "host", "disk")


def run(quick: bool) -> dict[str, Any]:
  """Figures of the section; prints them. Asserts that tokens came from where they should, and that
  the first token is the same."""
  model = kvjax.load(SOURCE, "float32")
  lengths = [64, 128] if quick else [128, 256, 512, 1024, 2048, 4096, 8191]
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    offload = OffloadConfig(host_bytes=2**31, disk_path=folder, restore="always")
    e = engine(model, max(lengths) + 1, offload)
    rng = np.random.default_rng(0)
    for length in [80, *lengths]:  # the first one compiles
      rounds = 1 if length > 4096 or length == 80 else 2 if quick else 3
      seconds: dict[str, list[float]] = {source: [] for source in SOURCES}
      for round in range(rounds):
        ids = workloads.tokens(rng, length, model.spec.vocab_size)
        first = None
        for source in SOURCES:
          if source == "host":
            forget_device(e)
          elif source == "disk":
            forget_device(e)
            forget_host(e)
          got = timed(e, f"{length} {round} {source}", ids)
          settle(e)
          assert got["sources"][source] >= 0.7 * length - 16, (length, source, got["sources"])
          first = first or got["tokens"]
          assert got["tokens"] == first
          seconds[source].append(got["seconds"])
      if length != 80:
        rows.append(
          {"length": length, "seconds": {s: statistics.median(seconds[s]) for s in SOURCES}}
        )
    figures = e.figures()["offload"]
    e.close()
  show(
    "time to first token in ms, one request at a time, float32 (times: of computing)",
    ["prompt", *SOURCES, *(f"{s}: times" for s in SOURCES[1:])],
    [
      [
        r["length"],
        *(1000 * r["seconds"][s] for s in SOURCES),
        *(r["seconds"]["computed"] / r["seconds"][s] for s in SOURCES[1:]),
      ]
      for r in rows
    ],
  )
  pays = {
    s: next((r["length"] for r in rows if r["seconds"][s] < r["seconds"]["computed"]), None)
    for s in SOURCES[1:]
  }
  print("  pays from: " + ", ".join(f"{s} {n} tokens" for s, n in pays.items()))
  return {"rows": rows, "pays_from": pays, "rates": figures["rates"]}
