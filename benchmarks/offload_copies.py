"""Bytes per second of a chunk on every way, against its size and a plain copy of memory."""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from tables import show

import kvjax
from kvjax import OffloadConfig
from kvjax.geometry import GroupGeometry, Leaf, Retention
from kvjax.offload.disk import DiskTier
from kvjax.offload.piece import Piece

LAYERS, PAGE = 4, 4096  # bytes of a page in all layers
LARGEST = 2**24
KNEE = 0.8  # of the best rate
WAYS = ("plain copy", "device to host", "host to device", "both at once", "disk write", "disk read")


def geometry(blocks: int) -> GroupGeometry:
  """Pages of 16 tokens, 16 float32 in each of four layers; a pool of twice the largest chunk."""
  return GroupGeometry(
    name="full",
    layers=tuple(range(LAYERS)),
    page_size=16,
    retention=Retention(),
    leaves=(Leaf("kv", (PAGE // LAYERS // 16 // 4,), "float32"),),
    pages=2 * LARGEST // PAGE,
    max_length=16,
    step_tokens=16,
    max_sequences=1,
    blocks_per_chunk=blocks,
  )


def ways(size: int, tier: DiskTier) -> dict[str, Callable[[], Any]]:
  """For each way what moves one chunk of `size` bytes, and waits until it is there."""
  blocks = size // PAGE
  layout = (geometry(blocks),)
  out = np.arange(0, 2 * blocks, 2, dtype=np.int32)  # no two of them beside each other
  back = out + 1
  state = [jax.block_until_ready(kvjax.init(layout))]
  pack = jax.jit(kvjax.pack, static_argnums=1)
  unpack = jax.jit(kvjax.unpack, static_argnums=1, donate_argnums=0)
  rng = np.random.default_rng(0)
  chunk = rng.standard_normal((blocks, PAGE // 4)).astype(np.float32)
  target = np.empty_like(chunk)
  count = [0]

  def load() -> None:
    state[0] = unpack(state[0], 0, back, chunk)

  def both() -> None:
    packed = pack(state[0], 0, out)
    packed.copy_to_host_async()
    load()
    np.copyto(target, np.asarray(packed))
    jax.block_until_ready(state[0])

  def key(i: int) -> bytes:
    return size.to_bytes(16, "little") + i.to_bytes(16, "little")

  def write() -> None:
    count[0] += 1
    assert tier.write(Piece(key(count[0]), "full", 0, chunk))

  def read() -> None:
    assert tier.read(key(1), "full") is not None

  return {
    "plain copy": lambda: np.copyto(target, chunk),
    "device to host": lambda: np.copyto(target, np.asarray(pack(state[0], 0, out))),
    "host to device": lambda: (load(), jax.block_until_ready(state[0])),
    "both at once": both,
    "disk write": write,
    "disk read": read,
  }


def run(quick: bool) -> dict[str, Any]:
  """Figures of the section; prints them. "Both at once" counts the bytes of both."""
  sizes = [4**i * 2**12 for i in range(7)]
  if quick:
    sizes = sizes[::2]
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    tier = DiskTier(folder, None, bytes(32), print)
    moves = {size: ways(size, tier) for size in sizes}
    for each in moves.values():
      for name in WAYS:  # compile, write what is read
        each[name]()
    seconds: dict[tuple[int, str], list[float]] = {}
    for _ in range(3 if quick else 9):
      for size, each in moves.items():
        for name in WAYS:
          repeat = max(1, min(32, 2**21 // size)) if "disk" not in name else 1
          start = time.perf_counter()
          for _ in range(repeat):
            each[name]()
          spent = (time.perf_counter() - start) / repeat
          seconds.setdefault((size, name), []).append(spent)
  for size in sizes:
    rates = {
      name: size * (1 + (name == "both at once")) / statistics.median(seconds[size, name]) / 1e9
      for name in WAYS
    }
    rows.append({"bytes": size, "gigabytes_per_second": rates})
  show(
    "GB/s of one chunk (medians; files synced when written, verified when read)",
    ["KiB", *WAYS],
    [[r["bytes"] // 1024, *r["gigabytes_per_second"].values()] for r in rows],
  )
  default = {f.name: f.default for f in dataclasses.fields(OffloadConfig)}["chunk_bytes"]
  knees, shares = {}, {}
  for name in WAYS:
    curve = {r["bytes"]: r["gigabytes_per_second"][name] for r in rows}
    best = max(curve.values())
    knees[name] = min(size for size, rate in curve.items() if rate >= KNEE * best)
    near = min(curve, key=lambda size: abs(size - default))
    shares[name] = curve[near] / best
  print(
    "  smallest with 80 % of its best rate: "
    + ", ".join(f"{name} {size // 1024} KiB" for name, size in knees.items())
  )
  print(
    f"  at the default of {default // 1024} KiB: "
    + ", ".join(f"{name} {share:.0%} of its best" for name, share in shares.items())
  )
  return {"rows": rows, "knee_bytes": knees, "default_bytes": default, "share_of_best": shares}
