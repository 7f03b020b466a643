"""Planning: from a model and a cache declaration to the geometry of every group.

The byte budget is divided so that as many sequences as possible of the declared workload fit, up to
`max_sequences`; without one the workload is sequences of one length, the longest at which all of
them fit. Each group gets the pages that those sequences really hold, whole pages of its own size.
What a given budget has left goes to all groups in proportion, for cached prefixes.
"""

from collections.abc import Callable, Mapping

import jax

from kvjax.config import CacheConfig, Config, GroupConfig, OffloadConfig
from kvjax.errors import ConfigError, nearest
from kvjax.geometry import GroupGeometry, Layout, sequence_bytes
from kvjax.models.spec import Group, ModelSpec, groups
from kvjax.offload.sizes import with_chunks
from kvjax.weights.load import Model
from pallas_kernels.attention import choices

STEP_TOKENS = 512
"""Most tokens that one sequence gains in a step, unless the caller plans for another number."""

_CPU_SHARE = 0.25  # of the memory that is available now
_DEVICE_SHARE = 0.9  # of the device memory that the weights leave free


def plan(
  spec: ModelSpec,
  cache: CacheConfig | None = None,
  *,
  max_sequences: int = 8,
  max_length: int | None = None,
  step_tokens: int = STEP_TOKENS,
  decode_tokens: int | None = None,
  dtype: str = "float32",
  available_bytes: int | None = None,
  offload: OffloadConfig | None = None,
) -> Layout:
  """Divides memory over the model's cache groups.

  Args:
    spec: the model.
    cache: page sizes, budget and dtype; the defaults when None.
    max_sequences: sequences that run at once.
    max_length: tokens per sequence, prompt and output; the model's context when None.
    step_tokens: most tokens that one sequence gains in one step (the prefill chunk).
    decode_tokens: where all sequences together gain at most step_tokens in one step, as in the
      engine: most tokens for which one that computes no prompt takes pages at once. None: any may
      gain step_tokens, whatever the others do.
    dtype: of the model; the cache has it too unless `cache.dtype` says otherwise.
    offload: chunk sizes; chosen when None.
    available_bytes: budget when `cache.memory_bytes` is None; measured when None.

  Returns:
    A tuple of GroupGeometry. `kvjax.describe(layout)` says what fits and why.

  Raises:
    ConfigError: unknown group names, or a budget that holds no sequence at all, with figures.
  """
  cache = CacheConfig() if cache is None else cache
  longest = spec.max_length if max_length is None else max_length
  if longest > spec.max_length:
    raise ConfigError(
      f"config.model.max_length: expected at most the model's context of {spec.max_length} tokens, "
      f"got {longest}"
    )
  found = groups(spec, dtype if cache.dtype == "auto" else cache.dtype)
  _check_names(cache.groups, found)

  def geometry(group: Group, pages: int) -> GroupGeometry:
    declared = cache.groups.get(group.name, GroupConfig())
    return GroupGeometry(
      name=group.name,
      layers=group.layers,
      page_size=declared.page_size or cache.page_size,
      retention=group.retention,
      leaves=group.leaves,
      pages=pages,
      max_length=longest,
      step_tokens=min(step_tokens, longest),
      max_sequences=max_sequences,
    )

  single = tuple(geometry(g, 1) for g in found)
  declared = {name: g.pages for name, g in cache.groups.items() if g.pages is not None}
  budget = cache.memory_bytes
  if budget is None:
    budget = available_memory() if available_bytes is None else available_bytes
  taken = sum(g.page_bytes * declared[g.name] for g in single if g.name in declared)
  if taken > budget and (len(declared) < len(single) or cache.memory_bytes is not None):
    where = "cache.memory_bytes" if cache.memory_bytes is not None else "the memory that is there"
    keys = ", ".join(f"config.cache.groups.{name}.pages" for name in declared)
    raise ConfigError(f"{keys}: expected pools within {where} ({budget} bytes), got {taken} bytes")
  budget -= taken
  planned = tuple(g for g in single if g.name not in declared)
  spare = cache.memory_bytes is not None and cache.prefix_sharing
  counts = _divide(
    planned, _workload(cache, longest), max_sequences, longest, budget, spare, decode_tokens
  )
  try:
    layout = tuple(
      geometry(group, declared.get(group.name) or counts[group.name]) for group in found
    )
  except ValueError as e:
    raise ConfigError(f"config.cache: {e}") from e
  return with_chunks(layout, offload or OffloadConfig())


def _workload(cache: CacheConfig, longest: int) -> tuple[int, ...]:
  too_long = [n for n in cache.lengths if n > longest]
  if too_long:
    raise ConfigError(
      f"config.cache.lengths: expected at most model.max_length ({longest}), got {too_long}"
    )
  return cache.lengths


def _divide(
  layout: Layout,
  lengths: tuple[int, ...],
  sequences: int,
  longest: int,
  budget: int,
  spare: bool,
  decode_tokens: int | None,
) -> dict[str, int]:
  """Pages of each group: `sequences` of `lengths` in turn, or as many as the budget holds; more
  with `spare`. Without lengths, the longest common one."""
  if not layout:
    return {}

  def pages(count: float, mix: tuple[int, ...]) -> dict[str, int]:
    # Always room for one sequence of the longest kind, and never more than an index can address.
    step = decode_tokens or layout[0].step_tokens
    return {
      g.name: min(max(g.room(mix, count, step), g.peak_pages(max(mix))), g.most_pages)
      for g in layout
    }

  def fits(count: float, mix: tuple[int, ...]) -> bool:
    found = pages(count, mix)
    return sum(g.page_bytes * found[g.name] for g in layout) <= budget

  if not lengths:
    length = _most(lambda n: fits(sequences, (n,)), longest)
    if not length:
      # Not even one page each for all sequences: fewer run at once, sharing what there is.
      return _few(layout, longest, budget)
    lengths = (length,)
  elif not fits(0, lengths):
    return _few(layout, longest, budget)
  # In quarters of a sequence: groups differ in how far the next whole one is.
  most = max(4 * sequences, 4 * budget // max(sequence_bytes(layout, 1), 1) if spare else 0)
  return pages(_most(lambda n: fits(n / 4, lengths), most) / 4, lengths)


def _most(holds: Callable[[int], bool], high: int) -> int:
  """Largest n in [1, high] for which `holds`, which is false from some n on; 0 for none."""
  low = 0
  while low < high:
    middle = (low + high + 1) // 2
    if holds(middle):
      low = middle
    else:
      high = middle - 1
  return low


def _few(layout: Layout, longest: int, budget: int) -> dict[str, int]:
  if sequence_bytes(layout, 1) > budget:
    sizes = ", ".join(f"{g.name}: {g.page_bytes} bytes per page" for g in layout)
    raise ConfigError(
      f"config.cache.memory_bytes: expected at least {sequence_bytes(layout, 1)} bytes, one page "
      f"in every group ({sizes}), got {budget}"
    )
  # One sequence gets all there is, so that as long a prompt as possible can be served.
  length = _most(lambda n: sequence_bytes(layout, n) <= budget, longest)
  return {g.name: g.peak_pages(length) for g in layout}


def _check_names(declared: Mapping[str, GroupConfig], found: tuple[Group, ...]) -> None:
  names = [g.name for g in found]
  for name in declared:
    if name not in names:
      raise ConfigError(
        f"config.cache.groups.{name}: the model has no such group; expected one of {names}."
        f"{nearest(name, names)}"
      )


def available_memory() -> int:
  """Bytes that the cache may take on the default device, weights already loaded."""
  device = jax.devices()[0]
  stats = device.memory_stats() if device.platform != "cpu" else None
  if stats:
    return int(_DEVICE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
  with open("/proc/meminfo", encoding="ascii") as f:
    for line in f:
      if line.startswith("MemAvailable:"):
        return int(_CPU_SHARE * int(line.split()[1]) * 1024)
  raise ConfigError("config.cache.memory_bytes: expected a number: this platform does not say")


def plan_for(model: Model, config: Config) -> Layout:
  """The layout that an engine with this declaration runs in."""
  scheduler = config.scheduler
  return plan(
    model.spec,
    config.cache,
    max_sequences=scheduler.max_sequences,
    max_length=config.model.max_length,
    step_tokens=max(scheduler.token_budget, scheduler.decode_steps),
    decode_tokens=max(scheduler.look_ahead, scheduler.decode_steps),
    dtype=model.dtype,
    offload=config.offload,
  )


def attention_implementations(config: Config) -> tuple[str, ...]:
  """The attention implementations to try, in order; ConfigError for one that does not exist."""
  names = config.kernels.attention
  try:
    return choices(None if names == "auto" else names)
  except ValueError as e:
    raise ConfigError(f"config.kernels.attention: {e}") from e
