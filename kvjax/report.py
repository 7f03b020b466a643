"""What a plan means, in words and figures: the text of `--plan`."""

from kvjax.config import Config, OffloadConfig
from kvjax.engine.batching import shapes
from kvjax.geometry import (
  Layout,
  concurrency,
  longest,
  pool_bytes,
  sequence_bytes,
  stride,
  token_bytes,
)
from kvjax.models.spec import parameter_count
from kvjax.offload.sizes import how_chosen
from kvjax.planning import attention_implementations, plan_for
from kvjax.sharding import Shardings
from kvjax.weights.load import Model

_LENGTHS = (128, 512, 2048, 8192, 32768, 131072)


def describe(layout: Layout, offload: OffloadConfig | None = None) -> str:
  """The groups, what fits in their pools, and what limits it; chunks and tiers of an offload."""
  lines = [*_groups(layout), "", *_fits(layout)]
  if offload is not None:
    lines += ["", *_offload(layout, offload)]
  return "\n".join(lines)


def plan_report(model: Model, config: Config) -> str:
  """What a run of this declaration would use, without running it."""
  layout = plan_for(model, config)
  spec, scheduler = model.spec, config.scheduler
  parameters = parameter_count(spec)
  weights = parameters * (4 if model.dtype == "float32" else 2)
  names = attention_implementations(config)
  Shardings(config.mesh)  # refuses what a run would refuse
  lines = [
    f"model   {spec.name} ({model.source}): {len(spec.layers)} layers, {parameters / 1e6:.1f} M "
    f"parameters, {human(weights)} in {model.dtype}",
    f"limits  {layout[0].max_sequences} sequences of at most {layout[0].max_length} tokens; "
    f"at most {scheduler.token_budget} prefill tokens per step",
    f"kernels paged attention: {', '.join(names)}",
    "",
    describe(layout, config.offload),
    "",
    "compiled shapes (each when first met, then kept in the compilation cache)",
    *(f"  {shape}" for shape in shapes(scheduler, config.model.numerics == "batch_invariant")),
  ]
  return "\n".join(lines)


def human(count: float) -> str:
  """Bytes in binary units."""
  for unit in ("B", "KiB", "MiB", "GiB"):
    if count < 1024:
      return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
    count /= 1024
  return f"{count:.1f} TiB"


def _groups(layout: Layout) -> list[str]:
  rows: list[tuple[str, ...]] = [
    ("group", "layers", "keeps", "page", "B/token", "B/page", "pages", "pool", "per sequence")
  ]
  for g in layout:
    rows.append(
      (
        g.name,
        str(len(g.layers)),
        str(g.retention),
        f"{g.page_size} tok",
        str(g.token_bytes),
        str(g.page_bytes),
        str(g.pages),
        human(g.pool_bytes),
        f"≤ {g.peak_pages(g.max_length)} pages",
      )
    )
  return _table(rows)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _offload(layout: Layout, offload: OffloadConfig) -> list[str]:
  if not offload.enabled:
    return ["offload none; see config.offload.host_bytes and config.offload.disk_path"]
  host = f"{human(offload.host_bytes)} of host memory" if offload.host_bytes else "no host memory"
  disk = "no disk"
  if offload.disk_path is not None:
    most = "what there is" if offload.disk_bytes is None else human(offload.disk_bytes)
    disk = f"{most} in {offload.disk_path}"
  rows: list[tuple[str, ...]] = [("chunks of", "pages", "tokens", "bytes")]
  for g in layout:
    if g.reusable:
      rows.append((g.name, str(g.blocks_per_chunk), str(g.chunk_tokens), human(g.chunk_bytes)))
    else:
      rows.append((g.name, "none: scratch memory", "", ""))
  return [
    f"offload {host}, {disk}; taken back: {offload.restore}",
    *("        " + line for line in _table(rows)),
    f"        {how_chosen(offload)}",
  ]


def _sharing(layout: Layout) -> str:
  if not any(g.reusable for g in layout):
    return "prefix  never shared: no group's pages can be reused"
  step = stride(layout)
  if step > layout[0].max_length:
    sizes = ", ".join(f"{g.name}: {g.page_size}" for g in layout if g.reusable)
    return f"prefix  never shared: no common multiple of the page sizes ({sizes}) fits a sequence"
  return f"prefix  shared at every multiple of {step} tokens"


def _fits(layout: Layout) -> list[str]:
  slots, most = layout[0].max_sequences, layout[0].max_length
  lines = [
    f"pools   {human(pool_bytes(layout))} in all; one more token takes {token_bytes(layout)} bytes "
    "until a window is full",
    _sharing(layout),
    "fits    tokens each  sequences  bytes each  limited by",
  ]
  for length in sorted({n for n in _LENGTHS if n < most} | {most}):
    count = concurrency(layout, length)
    tight = min(layout, key=lambda g: g.sequences(length))
    if count >= slots:
      count, limit = slots, "max_sequences"
    else:
      limit = f"group {tight.name}: {tight.pages} pages, {tight.peak_pages(length)} each"
    lines.append(
      f"        {length:>11}  {count:>9}  {human(sequence_bytes(layout, length)):>10}  {limit}"
    )
  reach = longest(layout)
  if reach < most:
    tight = min(layout, key=lambda g: g.longest(g.pages))
    lines.append(
      f"limit   a single sequence reaches {reach} of {most} tokens: group {tight.name} has "
      f"{tight.pages} pages. Raise cache.memory_bytes or lower model.max_length"
    )
  return lines
