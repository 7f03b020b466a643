"""What a run measures about itself, in bounded memory."""

import dataclasses
import math
from typing import Any


class Histogram:
  """Counts of durations in logarithmic bins, so that percentiles cost no memory per sample.

  A percentile is right within half a bin: RESOLUTION / 2, that is 1 %.
  """

  RESOLUTION = 0.02

  def __init__(self) -> None:
    self.count = 0
    self.total = 0.0
    self._bins: dict[int, int] = {}

  def add(self, seconds: float, count: int = 1) -> None:
    self.count += count
    self.total += seconds * count
    index = round(math.log(max(seconds, 1e-9)) / self.RESOLUTION)
    self._bins[index] = self._bins.get(index, 0) + count

  def percentile(self, percent: float) -> float | None:
    """Seconds that `percent` of the samples do not exceed; None without samples."""
    rank = math.ceil(self.count * percent / 100)
    for index in sorted(self._bins):
      rank -= self._bins[index]
      if rank <= 0:
        return math.exp(index * self.RESOLUTION)
    return None

  def figures(self) -> dict[str, float | int | None]:
    return {
      "count": self.count,
      "mean": self.total / self.count if self.count else None,
      **{f"p{p}": self.percentile(p) for p in (50, 90, 99)},
    }


@dataclasses.dataclass
class Metrics:
  """Counters of one engine. Tokens are counted when their step is planned, times when it is read.

  Attributes:
    prompt_tokens: prompt tokens of admitted sequences, each counted once.
    prompt_tokens_by_source: where their cache entries came from; sums to prompt_tokens.
      "device" ones were found under their names, or shared by completions of one prompt; "host"
      and "disk" ones were brought back by offload.
    recomputed_tokens: tokens computed again after a preemption (prompt and output).
    restored_tokens: tokens that a preempted sequence found still cached when it came back.
    decode_tokens: tokens sampled and kept.
    discarded_tokens: tokens sampled after their sequence had ended.
    steps, prefill_steps: device calls, and those with prefill rows.
    preemptions, completions: events.
    held, used: sums over steps of token slots allocated, and of those that hold readable tokens,
      by group.
    peak_pages: most pages in use at once, by group.
  """

  prompt_tokens: int = 0
  prompt_tokens_by_source: dict[str, int] = dataclasses.field(
    default_factory=lambda: dict.fromkeys(("computed", "device", "host", "disk"), 0)
  )
  recomputed_tokens: int = 0
  restored_tokens: int = 0
  decode_tokens: int = 0
  discarded_tokens: int = 0
  steps: int = 0
  prefill_steps: int = 0
  preemptions: int = 0
  completions: int = 0
  held: dict[str, int] = dataclasses.field(default_factory=dict)
  used: dict[str, int] = dataclasses.field(default_factory=dict)
  peak_pages: dict[str, int] = dataclasses.field(default_factory=dict)
  seconds: float = 0.0
  prefill_seconds: float = 0.0
  time_to_first_token: Histogram = dataclasses.field(default_factory=Histogram)
  time_between_tokens: Histogram = dataclasses.field(default_factory=Histogram)

  @property
  def prefill_tokens(self) -> int:
    """Tokens computed that were known before: prompts, and what preemptions made necessary."""
    return self.prompt_tokens_by_source["computed"] + self.recomputed_tokens

  def sample_pages(self, name: str, pages: int, held: int, used: int) -> None:
    """One step's occupancy of a group: pages in use, token slots held, tokens readable."""
    self.held[name] = self.held.get(name, 0) + held
    self.used[name] = self.used.get(name, 0) + used
    self.peak_pages[name] = max(self.peak_pages.get(name, 0), pages)

  def waste(self, name: str) -> float | None:
    """Share of the allocated token slots that held no readable token, averaged over steps."""
    held = self.held.get(name, 0)
    return 1 - self.used[name] / held if held else None

  def figures(self) -> dict[str, Any]:
    """JSON-able; times in seconds."""
    decode_seconds = self.seconds - self.prefill_seconds
    return {
      "prompt_tokens": self.prompt_tokens,
      "prompt_tokens_by_source": dict(self.prompt_tokens_by_source),
      "recomputed_tokens": self.recomputed_tokens,
      "restored_tokens": self.restored_tokens,
      "prefill_tokens": self.prefill_tokens,
      "decode_tokens": self.decode_tokens,
      "discarded_tokens": self.discarded_tokens,
      "steps": self.steps,
      "prefill_steps": self.prefill_steps,
      "preemptions": self.preemptions,
      "completions": self.completions,
      "step_seconds": self.seconds,
      "prefill_step_seconds": self.prefill_seconds,
      "decode_step_seconds": decode_seconds,
      "prefill_tokens_per_second": _rate(self.prefill_tokens, self.prefill_seconds),
      "output_tokens_per_second": _rate(self.decode_tokens, self.seconds),
      "time_to_first_token_seconds": self.time_to_first_token.figures(),
      "time_between_tokens_seconds": self.time_between_tokens.figures(),
    }


def _rate(count: int, seconds: float) -> float | None:
  return count / seconds if seconds > 0 else None
