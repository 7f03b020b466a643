"""Pieces for tests of the disk tier, and processes that share a directory."""

import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvjax.offload.disk import DiskTier
from kvjax.offload.files import HEADER_BYTES
from kvjax.offload.piece import Piece

NAMESPACE = bytes(range(32))
OTHER = bytes(32)
FILE_BYTES = HEADER_BYTES + 64
"""Of the file of a piece of the usual size."""


def key_of(i):
  return hashlib.sha256(str(i).encode()).digest()


def piece_of(i, size=64):
  """Four pages of `size` bytes together, made from the number i."""
  array = np.random.default_rng(i).integers(0, 256, (4, size // 4), np.uint8)
  return Piece(key_of(i), "full", i, array)


def same(got, i, size=64):
  return got.first == i and got.array.tobytes() == piece_of(i, size).array.tobytes()


def tier_of(directory, capacity=None, namespace=NAMESPACE, report=lambda text: None):
  return DiskTier(str(directory), capacity, namespace, report)


def filled(directory, count, capacity, namespace=NAMESPACE, first=0):
  """A tier with pieces that were used long ago, one second after another."""
  tier = tier_of(directory, capacity, namespace)
  for i in range(first, first + count):
    assert tier.write(piece_of(i))
    used_at(path_of(directory, i, namespace), 1000 + i)
  return tier


def path_of(directory, i, namespace=NAMESPACE):
  name = key_of(i).hex()
  return Path(directory) / namespace[:16].hex() / name[:2] / f"{name}.kv"


def there(directory, numbers, namespace=NAMESPACE):
  """Those of some numbers whose pieces have a file."""
  return [i for i in numbers if path_of(directory, i, namespace).exists()]


def all_files(directory):
  return [path for path in Path(directory).rglob("*") if not path.is_dir()]


def used_at(path, seconds):
  os.utime(path, (seconds, seconds))


def failing(number, real=None, when=lambda *args: True):
  """A stand-in for a function of os that fails, always or when its arguments say so."""

  def call(*args, **more):
    if when(*args):
      raise OSError(number, os.strerror(number))
    return real(*args, **more)

  return call


def is_directory(fd):
  return stat.S_ISDIR(os.fstat(fd).st_mode)


def child(script, *args):
  """Starts a Python process that has all this, `directory` (the first argument), and sys.argv."""
  here = Path(__file__).parent
  start = (
    f"import json, os, random, signal, sys, time; sys.path.append({str(here)!r}); "
    "from disk_files import *; directory = sys.argv[1]\n"
  )
  return subprocess.Popen(
    [sys.executable, "-c", start + script, *map(str, args)],
    stdout=subprocess.PIPE,
    text=True,
    cwd=here.parent,
  )


def output(process):
  """What a process prints; it must succeed."""
  out, _ = process.communicate(timeout=60)
  assert process.returncode == 0
  return out
