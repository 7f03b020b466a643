"""Two models whose groups have unequal pages: how offload cuts each group into chunks.

Command:  python examples/chunks.py
          python examples/chunks.py --blocks_per_chunk=2
          python examples/chunks.py --block_size=512 --page_sizes=16,32
Shows:    a layout out of a model's published geometry, without the model, and the text that
          `run.py --plan` prints of it. A `block_size` that is no multiple of some group's page size
          is refused with the next one that is.
Prints:   of DeepSeek-V4-Flash, then of Gemma 4 31B: groups, what fits, chunks.
"""

from absl import app, flags

import kvjax
from kvjax.geometry import GroupGeometry, Leaf, Retention
from kvjax.offload.sizes import with_chunks
from kvjax.report import describe

BLOCKS = flags.DEFINE_integer("blocks_per_chunk", None, "pages per chunk, of every group")
SIZE = flags.DEFINE_integer("block_size", None, "tokens per chunk, of every group")
PAGES = flags.DEFINE_list("page_sizes", ["16", "32"], "of Gemma's sliding and full layers")

LENGTH, STEP, SEQUENCES = 131072, 2048, 8


def group(name, layers, page_size, pages, *leaves, **retention):
  return GroupGeometry(
    name=name,
    layers=tuple(range(layers)),
    page_size=page_size,
    retention=Retention(**retention),
    leaves=tuple(Leaf(name, shape, dtype) for name, shape, dtype in leaves),
    pages=pages,
    max_length=LENGTH,
    step_tokens=STEP,
    max_sequences=SEQUENCES,
  )


def deepseek_v4_flash():
  """43 layers with a window of 128 positions; 21 of them also keep one entry for every 4 tokens and
  its index, 20 one for every 128 (here beside those of 4; 584 bytes each, so 146 and 5 per token),
  and the windows out of which these are made."""
  entries = ("every 4", (146,), "uint8"), ("index", (33,), "uint8"), ("every 128", (5,), "uint8")
  window = "latent", (584,), "uint8"
  return (
    group("compressed", 21, 256, 4096, *entries),
    group("sliding", 22, 64, 1024, window, window=128),
    group("sliding_2", 21, 64, 1024, window, window=128),
    group("making_4", 21, 4, 4160, ("sums", (2, 2, 512), "float32"), window=8),
    group("making_128", 20, 8, 2304, ("sums", (2, 512), "float32"), window=128),
  )


def gemma_4_31b(sliding, full):
  """60 layers, every sixth full; 16 heads of 256 in windows of 1,024, 4 of 512 over everything."""
  return (
    group("sliding", 50, sliding, 32768 // sliding, ("kv", (2, 16, 256), "bfloat16"), window=1024),
    group("full", 10, full, LENGTH // full, ("kv", (2, 4, 512), "bfloat16")),
  )


def main(_):
  offload = kvjax.OffloadConfig(
    host_bytes=2**35, blocks_per_chunk=BLOCKS.value, block_size=SIZE.value
  )
  sizes = [int(size) for size in PAGES.value]
  for name, layout in (
    ("DeepSeek-V4-Flash", deepseek_v4_flash()),
    ("Gemma 4 31B", gemma_4_31b(*sizes)),
  ):
    print(f"{name}\n{describe(with_chunks(layout, offload), offload)}\n")


if __name__ == "__main__":
  app.run(main)
