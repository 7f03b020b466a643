"""Tiers for tests that are slow, lose things and fail, as told by a seed, without threads."""

import random
from concurrent.futures import Future

import numpy as np

from kvjax.config import OffloadConfig
from kvjax.offload.host import HostTier
from kvjax.offload.manager import Offload
from kvjax.offload.piece import Piece


class SlowJobs:
  """Workers whose jobs are done some calls of `tick` later, in any order; some take very long."""

  def __init__(self, rng: random.Random, hang=0.01):
    self.rng = rng
    self.hang = hang
    self.jobs = []

  def submit(self, job):
    future = Future()
    wait = self.rng.choice([0, 1, 2, 5])
    if self.rng.random() < self.hang:
      wait = 200
    self.jobs.append([wait, future, job])
    return future

  def tick(self):
    self.rng.shuffle(self.jobs)
    for entry in self.jobs:
      entry[0] -= 1
    due, self.jobs = (
      [e for e in self.jobs if e[0] < 0],
      [e for e in self.jobs if e[0] >= 0],
    )
    for _, future, job in due:
      try:
        future.set_result(job())
      except OSError as error:
        future.set_exception(error)

  def close(self):
    pass


class FlakyFiles:
  """A disk tier in memory that forgets, refuses, and finds its pieces damaged."""

  def __init__(self, rng: random.Random, lose=0.1, refuse=0.1, most=200):
    self.rng, self.lose, self.refuse, self.most = rng, lose, refuse, most
    self.pieces: dict[bytes, Piece] = {}
    self.counts = dict.fromkeys(("stores", "loads", "lost", "refused"), 0)

  def size(self, key):
    piece = self.pieces.get(key)
    return None if piece is None else piece.nbytes

  def read(self, key, group):
    piece = self.pieces.get(key)
    if piece is None or piece.group != group:
      return None
    if self.rng.random() < self.lose:
      self.counts["lost"] += 1
      self.pieces.pop(key)
      if self.rng.random() < 0.3:
        raise OSError("the disk is on fire")
      return None
    self.counts["loads"] += 1
    return piece

  def write(self, piece):
    if self.rng.random() < self.refuse:
      self.counts["refused"] += 1
      return False
    while len(self.pieces) >= self.most:
      self.pieces.pop(self.rng.choice(list(self.pieces)))
    self.pieces[piece.key] = Piece(piece.key, piece.group, piece.first, np.array(piece.array))
    self.counts["stores"] += 1
    return True

  def clear(self):
    self.pieces.clear()

  def figures(self):
    return dict(self.counts)


class Packed:
  """A packed chunk that takes its time to arrive; its bytes are those of the moment of packing."""

  def __init__(self, rows: np.ndarray, rng: random.Random):
    self.rows = rows.copy()
    self.rows.setflags(write=False)
    self.shape = rows.shape
    self._left = rng.choice([0, 0, 1, 3])

  def is_ready(self):
    self._left -= 1
    return self._left < 0

  def __array__(self, dtype=None, copy=None):
    return self.rows


def random_offload(rng: random.Random, layout, clock) -> Offload:
  """Tiers of random sizes over a layout whose chunks are set: host, disk or both."""
  total = sum(g.pool_bytes for g in layout)
  largest = max(g.chunk_bytes for g in layout)
  host = disk = jobs = None
  if rng.random() < 0.8:
    host = HostTier(
      max(rng.choice([largest, total // 4, 4 * total]), largest), rng.choice(["lru", "arc"])
    )
  if host is None or rng.random() < 0.6:
    disk, jobs = FlakyFiles(rng), SlowJobs(rng)
  config = OffloadConfig(
    host_bytes=host.capacity if host else 0,
    disk_path=None if disk is None else "stub",
    store_after=rng.choice([0, 0, 1]),
    restore=rng.choice(["always", "auto"]),
    in_flight_bytes=rng.choice([1, 2000, 10**9]),
    deadline_seconds=rng.choice([3, 50]),
  )
  return Offload(layout, config, host, disk, jobs, clock, lambda text: None)
