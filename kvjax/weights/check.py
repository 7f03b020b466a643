"""Do the tensors of a source match the model? One error that lists every difference."""

from collections.abc import Container, Mapping

from kvjax.errors import WeightsError, nearest

MOST_LINES = 20  # per kind of difference; the rest is counted


def bullets(lines: list[str]) -> str:
  """The lines as an indented list of at most MOST_LINES, with a count of what was left out."""
  shown = lines[:MOST_LINES]
  if len(lines) > MOST_LINES:
    shown = [*shown, f"… and {len(lines) - MOST_LINES} more"]
  return "\n".join(f"    {line}" for line in shown)


def check_tensors(
  source: str,
  found: Mapping[str, tuple[int, ...]],
  expected: Mapping[str, tuple[int, ...]],
  ignored: Container[str] = (),
) -> None:
  """Compares the names and shapes in a source with those that the model needs.

  Args:
    source: what the tensors come from, for the message.
    found: shape of each tensor in the source, in row-major order.
    expected: shape of each tensor that the model reads, in the same order.
    ignored: names that may be in the source without being read.

  Raises:
    WeightsError: listing, sorted by name, each missing tensor (with the nearest unused name), each
      tensor that nothing reads, and each tensor of another shape.
  """
  extra = sorted(name for name in found if name not in expected and name not in ignored)
  missing = sorted(name for name in expected if name not in found)
  misshapen = sorted(
    name for name in expected if name in found and tuple(found[name]) != tuple(expected[name])
  )
  kinds = (
    (
      "missing",
      # Looking for similar names is quadratic, so only for those that are shown.
      [
        f"{name} {tuple(expected[name])}" + (nearest(name, extra) if i < MOST_LINES else "")
        for i, name in enumerate(missing)
      ],
    ),
    ("not used by the model", [f"{name} {tuple(found[name])}" for name in extra]),
    (
      "of another shape",
      [f"{name}: expected {tuple(expected[name])}, got {tuple(found[name])}" for name in misshapen],
    ),
  )
  wrong = [(kind, lines) for kind, lines in kinds if lines]
  if wrong:
    summary = ", ".join(f"{len(lines)} {kind}" for kind, lines in wrong)
    raise WeightsError(
      f"{source}: its tensors do not fit the model ({len(expected)} expected, {len(found)} found): "
      f"{summary}\n"
      + "\n".join(f"  {kind}:\n{bullets(lines)}" for kind, lines in wrong)
      + "\nCheck that the file holds this architecture and is complete"
    )
