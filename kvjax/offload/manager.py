"""Offload: which pieces go to the tiers, which come back, and what is on its way.

Order between copies and steps needs no locks. A store is a gather from the pools that is dispatched
after the step that wrote the pages and before any step that may write them again, into memory of
its own; a load is a scatter into the pools that is dispatched when its bytes are in host memory,
before the step that reads them. The device runs what it is given in order. What blocks, files, is
done by worker threads; a sequence that waits for them holds no slot and no page.

A tier can fail, an answer cannot be wrong: a piece that is lost, damaged or late is a miss, and
what it held is computed again.
"""

from collections.abc import Callable, Sequence
from typing import Any

from kvjax.config import OffloadConfig
from kvjax.geometry import Layout
from kvjax.offload.fetches import Fetches, Load
from kvjax.offload.host import HostTier
from kvjax.offload.rates import Rates
from kvjax.offload.search import Reach
from kvjax.offload.stores import Stores
from kvjax.offload.tiers import Files, Jobs, Tiers

_WARN_AFTER = 64  # searches that found nothing, before a group is named for it


class Offload:
  """The tiers of one engine, and all that goes to them and comes from them. All calls come from
  the engine's thread.

  Args:
    layout: with every group's `blocks_per_chunk`.
    config: what is declared.
    host, disk: the tiers; None for one that is not there.
    workers: run what may block; None without a disk.
    clock: seconds.
    report: is told once of each kind of trouble.
  """

  def __init__(
    self,
    layout: Layout,
    config: OffloadConfig,
    host: HostTier | None,
    disk: Files | None,
    workers: Jobs | None,
    clock: Callable[[], float],
    report: Callable[[str], None],
  ):
    self.tiers = Tiers(layout, host, disk, workers)
    self.rates = Rates()
    self.stores = Stores(self.tiers, config)
    self.fetches = Fetches(self.tiers, config, self.rates, clock, report)
    self._config = config
    self._report = report
    self._vetoes = [0] * len(layout)
    self._searches = self._reached = 0
    self._warned = False

  @property
  def restores(self) -> bool:
    return self._config.restore != "never"

  def worth(self, tokens: int, reach: Reach) -> bool:
    """Whether taking back is faster than computing `tokens` tokens, as far as rates are known."""
    if self._config.restore != "auto":
      return self._config.restore == "always"
    return self.rates.worth(tokens, reach.nbytes(self.tiers.layout))

  def searched(self, reach: Reach | None, veto: int | None) -> None:
    """Counts a search, and says once when pieces are stored and a group makes all of them miss."""
    self._searches += 1
    self._reached += reach is not None
    if veto is not None:
      self._vetoes[veto] += 1
    stored = self.tiers.counts["stored"]
    if self._warned or self._reached or self._searches < _WARN_AFTER or not stored:
      return
    most = max(range(len(self._vetoes)), key=self._vetoes.__getitem__)
    if self._vetoes[most] * 2 > self._searches:
      self._warned = True
      g = self.tiers.layout[most]
      self._report(
        f"offload: {stored} chunks were stored and none was ever used: in "
        f"{self._vetoes[most]} of {self._searches} look-ups group {g.name} ({g.page_size} tokens "
        f"per page, {g.blocks_per_chunk} pages per chunk, keeps {g.retention}) lacked what the "
        "others had. Give that group smaller chunks (config.offload.blocks_per_chunk)"
      )

  def loaded(self, loads: Sequence[Load]) -> None:
    """Counts what a step brings back."""
    for load in loads:
      nbytes = len(load.rows) * self.tiers.layout[load.group].page_bytes
      self.tiers.count(load.group, "loaded", nbytes)

  def poll(self) -> None:
    """Takes note of what has arrived."""
    self.stores.poll()
    self.fetches.poll()

  def reset(self) -> None:
    """Forgets everything; what is on its way arrives unheard."""
    tiers = self.tiers
    tiers.generation += 1
    tiers.version += 1
    self.stores.reset()
    self.fetches.reset()
    if tiers.host is not None:
      tiers.host.clear()
    if tiers.disk is not None:
      tiers.disk.clear()

  def close(self) -> None:
    """Lets the workers end when they have done what is queued."""
    if self.tiers.workers is not None:
      self.tiers.workers.close()

  def figures(self) -> dict[str, Any]:
    """JSON-able."""
    tiers = self.tiers
    return {
      **tiers.counts,
      "in_flight_bytes": self.stores.in_flight_bytes,
      "searches": self._searches,
      "searches_that_reached_farther": self._reached,
      "rates": {
        "host_bytes_per_second": self.rates.host,
        "disk_bytes_per_second": self.rates.disk,
        "prefill_tokens_per_second": self.rates.prefill,
      },
      "rule": f"{self._config.restore}: taken back where bytes / rates < tokens / prefill rate",
      "groups": {
        g.name: {
          **counts,
          "blocks_per_chunk": g.blocks_per_chunk,
          "chunk_tokens": g.chunk_tokens,
          "chunk_bytes": g.chunk_bytes,
          "vetoes": vetoes,
        }
        for g, counts, vetoes in zip(tiers.layout, tiers.by_group, self._vetoes, strict=True)
        if g.reusable
      },
      "host": None if tiers.host is None else tiers.host.figures(),
      "disk": None if tiers.disk is None else tiers.disk.figures(),
    }
