"""Host bytes per cached token against the ideal: what a prefix needs and not one byte more."""

from typing import Any

import numpy as np
from tables import percent, show

from kvjax import OffloadConfig
from kvjax.geometry import GroupGeometry, Layout, Leaf, Retention
from kvjax.offload.chunks import chunk_dtype, page_elements
from kvjax.offload.host import HostTier
from kvjax.offload.piece import Piece
from kvjax.offload.sizes import with_chunks

LENGTH = 1536


def group(name: str, layers: int, page_size: int, width: int, **retention: Any) -> GroupGeometry:
  """A group of `width` bfloat16 per token and layer."""
  return GroupGeometry(
    name=name,
    layers=tuple(range(layers)),
    page_size=page_size,
    retention=Retention(**retention),
    leaves=(Leaf("kv", (width,), "bfloat16"),),
    pages=8,
    max_length=4096,
    step_tokens=256,
    max_sequences=1,
  )


MIXTURES: dict[str, Layout] = {
  "full": (group("full", 8, 16, 128),),
  "15 sliding (512), 3 full": (
    group("sliding", 15, 16, 128, window=512),
    group("full", 3, 16, 128),
  ),
  "pages of 32 (7 groups), 64, 8": (
    *(group(f"g{i}", 1, 32, 128) for i in range(7)),
    group("g7", 1, 64, 128),
    group("g8", 1, 8, 128),
  ),
  "pages of 256, 64, 64, 4, 8": (
    group("compressed", 2, 256, 92),
    group("sliding", 2, 64, 292, window=128),
    group("sliding_2", 2, 64, 292, window=128),
    group("making_4", 2, 4, 1024, window=8),
    group("making_128", 2, 8, 512, window=128),
  ),
}


def pieces(layout: Layout, sequence: int) -> list[Piece]:
  """What a sequence of LENGTH tokens leaves: its coverage, in chunks."""
  out = []
  for i, g in enumerate(layout):
    for part in g.chunks(g.coverage(LENGTH)):
      key = b"%4d %4d %8d" % (sequence, i, part.stop)
      rows = np.ones((len(part), page_elements(g)), chunk_dtype(g))
      out.append(Piece(key, g.name, part.start, rows))
  return out


def run(quick: bool) -> dict[str, Any]:
  """Figures of the section; prints them.

  The ideal is the bytes of the entries that must be there to continue from LENGTH tokens: all of a
  group without a bound, the last w - 1 positions of a window. The share is ideal bytes of the
  prefixes that fit as a whole over the budget.
  """
  capacity = 2**26 if quick else 2**28
  rows = []
  for label, mixture in MIXTURES.items():
    layout = with_chunks(mixture, OffloadConfig(host_bytes=capacity))
    tier, whole = HostTier(capacity), 0
    while True:
      fits = True
      for piece in pieces(layout, whole):
        fits = fits and tier.free >= piece.nbytes and tier.reserve(piece.key, piece.nbytes)
        if fits:
          tier.fill(piece)
      if not fits:
        break
      whole += 1
    ideal = sum(
      g.token_bytes * (LENGTH - max(int(g.retention.first_readable(LENGTH)), 0)) for g in layout
    )
    rows.append(
      {
        "mixture": label,
        "chunks": {g.name: g.blocks_per_chunk for g in layout},
        "prefixes": whole,
        "tokens": whole * LENGTH,
        "ideal_bytes_per_prefix": ideal,
        "share": whole * ideal / capacity,
        "share_of_used": whole * ideal / tier.used,
      }
    )
  show(
    f"prefixes of {LENGTH} tokens in {capacity >> 20} MiB of host memory",
    ["groups", "prefixes", "tokens", "of the ideal"],
    [
      [
        r["mixture"],
        r["prefixes"],
        r["tokens"],
        percent(r["share"]),
      ]
      for r in rows
    ],
  )
  return {"capacity_bytes": capacity, "length": LENGTH, "rows": rows}
