"""Threads for what may block: reading and writing files."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Workers:
  """A fixed number of daemon threads that run jobs in order.

  Unlike concurrent.futures' pools they do not keep the process from ending: a disk that hangs must
  not.
  """

  def __init__(self, count: int):
    self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
      queue.SimpleQueue()
    )
    self._count = count
    for i in range(count):
      threading.Thread(target=self._run, name=f"kvjax-offload-{i}", daemon=True).start()

  def submit(self, job: Callable[[], Any]) -> "Future[Any]":
    """Queues a job; its result or exception comes with the future."""
    future: Future[Any] = Future()
    self._jobs.put((future, job))
    return future

  def close(self) -> None:
    """Lets the threads end when they have done what is queued; does not wait."""
    for _ in range(self._count):
      self._jobs.put(None)

  def _run(self) -> None:
    while (entry := self._jobs.get()) is not None:
      future, job = entry
      if not future.set_running_or_notify_cancel():
        continue
      try:
        future.set_result(job())
      except BaseException as error:
        future.set_exception(error)
