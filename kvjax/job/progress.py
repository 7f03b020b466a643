"""The progress bar: lines done, prefill and decode tokens per second apart, pages in use."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tqdm

_INTERVAL_SECONDS = 0.25


def describe(figures: Mapping[str, Any], prefill_rate: float, decode_rate: float) -> str:
  """One line of an engine's figures; rates in tokens per second."""
  parts = [f"prefill {prefill_rate:,.0f} tok/s", f"decode {decode_rate:,.0f} tok/s"]
  parts.append(f"{figures.get('running', 0)} running, {figures.get('waiting', 0)} waiting")
  pages = figures.get("pages", {})
  if pages:
    used = (f"{group} {each['used']}/{each['total']}" for group, each in pages.items())
    parts.append("pages " + " ".join(used))
  return " | ".join(parts)


class Progress:
  """A bar on standard error, a few times a second; nothing when that is not a terminal."""

  def __init__(self, total: int | None, *, quiet: bool = False):
    shown = sys.stderr.isatty() and not quiet
    self._bar = tqdm.tqdm(
      total=total, unit="line", file=sys.stderr, disable=not shown, dynamic_ncols=True
    )
    self._then = time.monotonic()
    self._tokens = (0, 0)

  def advance(self, lines: int = 1) -> None:
    self._bar.update(lines)

  def skip(self) -> None:
    """A line that is not to be counted."""
    if self._bar.total is not None:
      self._bar.total -= 1

  def due(self) -> bool:
    """Whether `show` would draw: an engine's figures need not be collected otherwise."""
    return not self._bar.disable and time.monotonic() - self._then >= _INTERVAL_SECONDS

  def show(self, figures: Mapping[str, Any]) -> None:
    """Redraws with rates over the time since the last call."""
    now = time.monotonic()
    seconds = max(now - self._then, 1e-9)
    tokens = (figures.get("prefill_tokens", 0), figures.get("decode_tokens", 0))
    rates = [(new - old) / seconds for new, old in zip(tokens, self._tokens, strict=True)]
    self._then, self._tokens = now, tokens
    self._bar.set_postfix_str(describe(figures, *rates))

  @contextlib.contextmanager
  def aside(self) -> Iterator[None]:
    """Takes the bar off the screen while something else is printed."""
    if self._bar.disable:
      yield
      return
    self._bar.clear()
    try:
      yield
    finally:
      self._bar.refresh()

  def close(self) -> None:
    self._bar.close()
