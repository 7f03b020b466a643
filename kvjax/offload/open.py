"""Opening the tiers that a declaration asks for."""

from collections.abc import Callable

from absl import logging

from kvjax.config import OffloadConfig
from kvjax.geometry import Layout
from kvjax.offload.disk import DiskTier
from kvjax.offload.host import HostTier
from kvjax.offload.manager import Offload
from kvjax.offload.workers import Workers

_WORKERS = 4  # threads that read and write files


def open_offload(
  layout: Layout, config: OffloadConfig, namespace: bytes, clock: Callable[[], float]
) -> Offload | None:
  """The tiers of an engine; None when none are declared.

  Raises:
    ConfigError: a directory that cannot be used.
  """
  if not config.enabled or not any(g.reusable for g in layout):
    return None
  host = HostTier(config.host_bytes, config.policy) if config.host_bytes else None
  disk = workers = None
  if config.disk_path is not None:
    disk = DiskTier(config.disk_path, config.disk_bytes, namespace, logging.warning)
    workers = Workers(_WORKERS)
  return Offload(layout, config, host, disk, workers, clock, logging.warning)
