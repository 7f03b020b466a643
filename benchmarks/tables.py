"""Tables for reading: one heading, columns as wide as they need."""

from collections.abc import Sequence
from typing import Any


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
  """Prints a table; floats get three significant figures, shares are given as text."""
  cells = [list(map(text, row)) for row in (head, *rows)]
  widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
  print(f"\n{title}")
  for row in cells:
    print("  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)))


def text(value: Any) -> str:
  if isinstance(value, float):
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
  return str(value)


def percent(share: float) -> str:
  return f"{100 * share:.1f} %"
