"""Stopping on a signal: the first asks, the second kills."""

import contextlib
import signal
import threading
import types
from collections.abc import Iterator
from typing import Any


class Interrupted(BaseException):
  """A signal that arrived while the engine was starting, where no loop looks for it."""


class Stop:
  """Turns the first SIGINT or SIGTERM into a flag; the second one kills the process at once.

  Attributes:
    signal: the number of the signal, or 0.
  """

  def __init__(self) -> None:
    self.signal = 0
    self._urgent = False
    self._before: dict[int, Any] = {}

  def __enter__(self) -> "Stop":
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGINT, signal.SIGTERM):
        self._before[number] = signal.signal(number, self._caught)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _caught(self, number: int, frame: types.FrameType | None) -> None:
    self.signal = number
    for each in (signal.SIGINT, signal.SIGTERM):
      signal.signal(each, signal.SIG_DFL)
    if self._urgent:
      raise Interrupted

  @contextlib.contextmanager
  def urgent(self) -> Iterator[None]:
    """Within it a signal raises Interrupted instead of waiting for the loop to look."""
    self._urgent = True
    try:
      if self.signal:
        raise Interrupted
      yield
    finally:
      self._urgent = False
