"""Errors that a user can act on: what was expected, what came, what to do."""

import difflib
from collections.abc import Iterable
from typing import Any


def show(value: Any, most: int = 80) -> str:
  """repr of a value, cut in the middle so that a message stays readable."""
  text = repr(value)
  return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


def nearest(name: str, valid: Iterable[str]) -> str:
  """' Did you mean X?' for the valid name closest to `name`, or ''."""
  found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
  return f" Did you mean {found[0]!r}?" if found else ""


class KvjaxError(ValueError):
  """Base of every error that kvjax raises on purpose."""


class ConfigError(KvjaxError):
  """A declaration that cannot be served; names the key."""


class WeightsError(KvjaxError):
  """A model source that cannot be loaded; lists everything that is wrong with it."""


class RequestError(KvjaxError):
  """One request that cannot be served; the others are not affected.

  Attributes:
    key: the field of the request that is wrong.
  """

  def __init__(self, key: str, expected: str, got: Any, advice: str = ""):
    self.key = key
    super().__init__(
      f"{key}: expected {expected}, got {show(got)}" + (f". {advice}" if advice else "")
    )
