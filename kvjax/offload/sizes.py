"""How many pages a chunk has, per group: from the declaration, or chosen.

The fault that this replaces: one number of tokens for all groups, which fits no model whose groups
have different page sizes.
"""

import dataclasses
import math
from collections.abc import Mapping

from kvjax.config import OffloadConfig
from kvjax.errors import ConfigError, nearest
from kvjax.geometry import GroupGeometry, Layout

MOST_TOKENS = 512
"""Of a chunk that is chosen: prefixes are found in whole chunks, so larger ones would be missed."""


def with_chunks(layout: Layout, offload: OffloadConfig) -> Layout:
  """The layout with every group's `blocks_per_chunk`.

  From `offload.blocks_per_chunk`; else `offload.block_size` tokens, exactly converted; else the
  power of two that brings a chunk nearest to `offload.chunk_bytes`, with at most MOST_TOKENS.

  Raises:
    ConfigError: a group that does not exist, a `block_size` that is no multiple of some page size
      (with the next one that is), a chunk larger than the host tier.
  """
  sizes = _sizes(layout, offload)
  out = tuple(dataclasses.replace(g, blocks_per_chunk=sizes.get(g.name, 1)) for g in layout)
  if offload.host_bytes:
    for g in out:
      if g.reusable and g.chunk_bytes > offload.host_bytes:
        raise ConfigError(
          f"config.offload.host_bytes: expected at least {g.chunk_bytes} bytes, one chunk of group "
          f"{g.name} ({g.blocks_per_chunk} pages of {g.page_bytes} bytes), got {offload.host_bytes}"
        )
  return out


def how_chosen(offload: OffloadConfig) -> str:
  """In words, where the sizes of chunks come from."""
  if isinstance(offload.blocks_per_chunk, int):
    return "as many pages as config.offload.blocks_per_chunk says"
  near = (
    f"the powers of two nearest to config.offload.chunk_bytes ({offload.chunk_bytes}), at most "
    f"{MOST_TOKENS} tokens"
  )
  if offload.blocks_per_chunk is not None:
    names = ", ".join(offload.blocks_per_chunk)
    return f"{names}: as config.offload.blocks_per_chunk says; others: {near}"
  if offload.block_size is not None:
    return f"{offload.block_size} tokens of each group: config.offload.block_size"
  return near


def _sizes(layout: Layout, offload: OffloadConfig) -> Mapping[str, int]:
  groups = [g for g in layout if g.reusable]
  given = offload.blocks_per_chunk
  if isinstance(given, int):
    return {g.name: given for g in groups}
  if given is not None:
    names = [g.name for g in groups]
    for name in given:
      if name not in names:
        raise ConfigError(
          f"config.offload.blocks_per_chunk.{name}: the model has no such group that can be "
          f"offloaded; expected some of {names}.{nearest(name, names)}"
        )
    return {g.name: given.get(g.name) or _chosen(g, offload) for g in groups}
  if offload.block_size is not None:
    return _converted(groups, offload.block_size)
  return {g.name: _chosen(g, offload) for g in groups}


def _converted(groups: list[GroupGeometry], tokens: int) -> dict[str, int]:
  """Pages per chunk of `tokens` tokens in every group, which must divide."""
  if any(tokens % g.page_size for g in groups):
    common = math.lcm(*(g.page_size for g in groups))
    pages = ", ".join(f"{g.name}: {g.page_size}" for g in groups)
    raise ConfigError(
      f"config.offload.block_size: expected a multiple of every group's page size in tokens "
      f"({pages}), got {tokens}. The next that works is {-(-tokens // common) * common}; or give "
      "pages per chunk as config.offload.blocks_per_chunk, which works for any page sizes"
    )
  return {g.name: tokens // g.page_size for g in groups}


def _chosen(g: GroupGeometry, offload: OffloadConfig) -> int:
  aim = min(offload.chunk_bytes, offload.host_bytes or offload.chunk_bytes)
  most = min(MOST_TOKENS, g.max_length) // g.page_size
  nearest_power = round(math.log2(max(aim / g.page_bytes, 1)))
  blocks = 1 << min(nearest_power, max(most, 1).bit_length() - 1)
  while blocks > 1 and offload.host_bytes and blocks * g.page_bytes > offload.host_bytes:
    blocks //= 2
  return blocks
