"""The disk tier's directory: its capacity, and threads, processes and kills around it."""

import errno
import json
import os
import threading
import time

import numpy as np
from disk_files import (
  FILE_BYTES,
  NAMESPACE,
  OTHER,
  all_files,
  child,
  failing,
  filled,
  key_of,
  output,
  path_of,
  piece_of,
  same,
  there,
  tier_of,
  used_at,
)

from kvjax.offload.files import HEADER_BYTES

# Capacity.


def test_the_least_recently_used_leave(tmp_path):
  tier = filled(tmp_path, 10, 10 * FILE_BYTES)
  assert tier.evictions == 0  # full, and not more
  assert same(tier.read(key_of(0), "full"), 0)
  assert tier.write(piece_of(2))
  assert tier.write(piece_of(10))
  # 11 files are too many, 9 are less than 95 %.
  assert there(tmp_path, range(11)) == [0, 2, 4, 5, 6, 7, 8, 9, 10]
  assert tier.evictions == 2
  assert same(tier.read(key_of(4), "full"), 4)
  assert tier.write(piece_of(11))
  assert tier.write(piece_of(12))
  assert there(tmp_path, range(13)) == [0, 2, 4, 7, 8, 9, 10, 11, 12]
  assert tier.failures == {}


def test_use_by_another_counts(tmp_path):
  tier = filled(tmp_path, 4, 4 * FILE_BYTES)
  other = tier_of(tmp_path, 4 * FILE_BYTES)
  assert same(other.read(key_of(0), "full"), 0)
  assert tier.write(piece_of(4))
  assert there(tmp_path, range(5)) == [0, 3, 4]
  assert (tier.evictions, other.evictions) == (2, 0)


def test_all_namespaces_count(tmp_path):
  other = filled(tmp_path, 3, None, OTHER)
  tier = filled(tmp_path, 2, 5 * FILE_BYTES, first=3)
  assert tier.evictions == 0
  assert tier.write(piece_of(5))
  assert there(tmp_path, range(3), OTHER) == [2]
  assert there(tmp_path, range(6)) == [3, 4, 5]
  assert other.read(key_of(0), "full") is None
  assert other.failures == {}


def test_the_file_just_written_stays(tmp_path):
  tier = filled(tmp_path, 3, 3 * FILE_BYTES)
  for i in range(3):
    used_at(path_of(tmp_path, i), time.time() + 10_000)  # a clock that is wrong
  assert tier.write(piece_of(3))
  assert there(tmp_path, range(4)) in ([0, 3], [1, 3], [2, 3])
  # One that takes all the capacity, or 95 % of it, drives out the rest.
  assert tier.write(piece_of(4, size=3 * FILE_BYTES - HEADER_BYTES))
  assert there(tmp_path, range(5)) == [4]


def test_a_piece_larger_than_the_capacity(tmp_path):
  told = []
  tier = tier_of(tmp_path, FILE_BYTES - 1, report=told.append)
  assert not tier.write(piece_of(0))
  assert not tier.write(piece_of(1))
  assert (tier.refusals, tier.failures) == (2, {"large": 2})
  assert all_files(tmp_path) == []
  (text,) = told
  assert "expected pieces of at most the capacity, 575 bytes, got 576. Raise the capacity" in text


def test_what_others_write_is_noticed(tmp_path):
  """A tier sees its own writes; those of others with every twentieth of the capacity."""
  capacity = 40 * FILE_BYTES
  tier = tier_of(tmp_path, capacity)
  other = tier_of(tmp_path, None)
  for i in range(60):
    assert other.write(piece_of(i))
  for i in range(100, 103):
    assert tier.write(piece_of(i))
  assert len(all_files(tmp_path)) < 38
  assert there(tmp_path, range(100, 103)) == [100, 101, 102]


def test_room_that_others_made_is_noticed(tmp_path):
  tier = filled(tmp_path, 10, 10 * FILE_BYTES)
  for i in range(5):
    path_of(tmp_path, i).unlink()
  assert tier.write(piece_of(10))
  assert there(tmp_path, range(11)) == [5, 6, 7, 8, 9, 10]
  assert tier.evictions == 0


def test_the_directory_is_looked_at_when_it_may_be_full(tmp_path, monkeypatch):
  monkeypatch.setattr(os, "fsync", lambda fd: None)  # for speed
  tier = tier_of(tmp_path, 100 * FILE_BYTES)
  scans = []
  scan = tier._scan
  monkeypatch.setattr(tier, "_scan", lambda: scans.append(1) or scan())
  for i in range(100):
    assert tier.write(piece_of(i))
  assert len(scans) == 100 // 6  # after each time six files, more than a twentieth of the capacity
  assert tier.evictions == 0
  assert tier.write(piece_of(100))  # one too many
  assert tier.evictions == 7
  assert len(all_files(tmp_path)) == 94
  for i in range(6):
    assert tier_of(tmp_path).write(piece_of(i))
  # A tier that has just started knows what was there before.
  again = tier_of(tmp_path, 100 * FILE_BYTES)
  assert again.write(piece_of(101))
  assert again.evictions == 7


def test_removed_bytes_make_room(tmp_path, monkeypatch):
  tier = filled(tmp_path, 10, 10 * FILE_BYTES)
  scans = []
  scan = tier._scan
  monkeypatch.setattr(tier, "_scan", lambda: scans.append(1) or scan())
  tier.capacity = 1000 * FILE_BYTES  # so that a twentieth of it does not come about
  tier._found, tier._since = 999 * FILE_BYTES, 0
  tier.remove(key_of(0))
  path_of(tmp_path, 1).write_bytes(b"x" * FILE_BYTES)
  assert tier.read(key_of(1), "full") is None
  for i in range(10, 13):
    assert tier.write(piece_of(i))
  assert scans == []
  assert tier.write(piece_of(13))
  assert scans == [1]


def test_files_of_others_are_left_alone(tmp_path):
  own = [
    tmp_path / "notes.txt",
    tmp_path / "photos" / "ab" / f"{'0' * 64}.kv",
    tmp_path / NAMESPACE[:16].hex() / "ab" / "photo.kv",
    tmp_path / NAMESPACE[:16].hex() / "ab" / ".cache.tmp",
    tmp_path / NAMESPACE[:16].hex() / "more" / f"{'0' * 64}.kv",
  ]
  for path in own:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(10 * FILE_BYTES))
    used_at(path, 1000)
  tier = tier_of(tmp_path, 2 * FILE_BYTES)
  assert tier.write(piece_of(0))
  assert tier.write(piece_of(1))
  assert tier.evictions == 0  # they do not count either
  assert tier.write(piece_of(2))
  tier.clear()
  assert sorted(all_files(tmp_path)) == sorted(own)
  assert all(path.stat().st_size == 10 * FILE_BYTES for path in own)


def test_files_that_vanish_while_evicting(tmp_path, monkeypatch):
  tier = filled(tmp_path, 4, 4 * FILE_BYTES)
  unlink = os.unlink

  def late(path):
    unlink(path)  # another process was faster
    unlink(path)

  with monkeypatch.context() as m:
    m.setattr(os, "unlink", late)
    assert tier.write(piece_of(4))
  assert there(tmp_path, range(5)) == [2, 3, 4]
  assert (tier.evictions, tier.failures) == (0, {})


def test_files_that_cannot_be_deleted(tmp_path, monkeypatch):
  told = []
  tier = filled(tmp_path, 4, 4 * FILE_BYTES)
  tier._report = told.append
  with monkeypatch.context() as m:
    m.setattr(os, "unlink", failing(errno.EPERM))
    assert tier.write(piece_of(4))
    assert tier.write(piece_of(5))
  assert tier.failures == {"undeletable": 2}
  assert len(told) == 1
  assert "cannot be deleted: Operation not permitted" in told[0]
  assert tier.write(piece_of(6))
  assert there(tmp_path, range(7)) == [4, 5, 6]


# Threads and processes.


def test_threads(tmp_path):
  tier = tier_of(tmp_path, 6 * FILE_BYTES)
  wrong = []

  def work(seed):
    for i in np.random.default_rng(seed).integers(0, 12, 60).tolist():
      if not tier.write(piece_of(i)):
        wrong.append(i)
      got = tier.read(key_of(i), "full")
      if got is not None and not same(got, i):
        wrong.append(i)

  threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  figures = tier.figures()
  assert wrong == []
  assert figures["failures"] == {}
  assert figures["bytes_written"] == figures["stores"] * FILE_BYTES
  assert figures["bytes_read"] == figures["loads"] * FILE_BYTES
  assert figures["loads"] > 0
  assert figures["evictions"] > 0
  left = all_files(tmp_path)
  assert len(left) <= 6
  assert all(path.suffix == ".kv" for path in left)


def test_another_process_goes_on_from_there(tmp_path):
  out = output(
    child(
      """
tier = tier_of(directory)
assert all(tier.write(piece_of(i)) for i in range(3))
print("jax" in sys.modules)
""",
      tmp_path,
    )
  )
  assert out == "False\n"  # the module needs no jax
  tier = tier_of(tmp_path)
  assert tier.size(key_of(2)) == 64
  assert all(same(tier.read(key_of(i), "full"), i) for i in range(3))
  assert tier.write(piece_of(0))
  assert (tier.stores, tier.loads) == (0, 3)


def test_processes_that_write_and_evict_at_once(tmp_path):
  capacity = 6 * FILE_BYTES
  script = """
tier = tier_of(directory, int(sys.argv[2]))
rng = random.Random(int(sys.argv[3]))
for _ in range(120):
  i = rng.randrange(12)
  if rng.random() < 0.5:
    assert tier.write(piece_of(i))
  got = tier.read(key_of(i), "full")
  assert got is None or same(got, i)
print(json.dumps(tier.figures()))
"""
  children = [child(script, tmp_path, capacity, seed) for seed in range(3)]
  figures = [json.loads(output(process)) for process in children]
  assert [f["failures"] for f in figures] == [{}] * 3
  assert all(f["evictions"] > 0 and f["loads"] > 0 for f in figures)
  left = all_files(tmp_path)
  assert 0 < sum(path.stat().st_size for path in left) <= capacity
  tier = tier_of(tmp_path)
  assert sorted(left) == sorted(path_of(tmp_path, i) for i in there(tmp_path, range(12)))
  assert all(same(tier.read(key_of(i), "full"), i) for i in there(tmp_path, range(12)))


def test_leftovers_of_killed_processes(tmp_path):
  tier = filled(tmp_path, 1, None)
  folder = path_of(tmp_path, 0).parent
  other = tmp_path / OTHER[:16].hex() / "ab"
  other.mkdir(parents=True)
  stem = f".{key_of(0).hex()}.{'0' * 15}"
  old = [folder / f"{stem}1.tmp", other / f"{stem}2.tmp", folder.parent / f".probe.{'0' * 16}.tmp"]
  for path in old:
    path.write_bytes(bytes(FILE_BYTES))
    used_at(path, time.time() - 3700)
  fresh = folder / f"{stem}3.tmp"
  fresh.write_bytes(bytes(FILE_BYTES))
  used_at(fresh, time.time() - 3500)
  tier = tier_of(tmp_path, 2 * FILE_BYTES)
  assert sorted(all_files(tmp_path)) == sorted([fresh, path_of(tmp_path, 0)])
  tier.clear()
  assert all_files(tmp_path) == [fresh]  # some process is still writing it
  assert tier.write(piece_of(0))
  assert tier.write(piece_of(1))
  assert there(tmp_path, [0, 1]) == [1]  # it takes space


def test_killed_at_every_step_of_writing(tmp_path):
  script = """
def deadly(name):
  real = getattr(os, name)
  def call(*args, **more):
    global left
    left -= 1
    if left < 0:
      os.kill(os.getpid(), signal.SIGKILL)
    if name == "write":
      args = args[0], args[1][:200]  # so that there are files of many lengths
    return real(*args, **more)
  setattr(os, name, call)

for step in range(100):
  pid = os.fork()
  if not pid:
    tier = tier_of(f"{directory}/{step}")
    left = step
    for name in ("makedirs", "open", "write", "fsync", "replace", "close"):
      deadly(name)
    os._exit(not tier.write(piece_of(0)))
  status = os.waitpid(pid, 0)[1]
  if not os.WIFSIGNALED(status):
    break
print(step, status)
"""
  steps, status = map(int, output(child(script, tmp_path)).split())
  assert steps >= 12  # among them four writes
  assert status == 0
  found, leftovers = [], 0
  for step in range(steps + 1):
    directory = tmp_path / str(step)
    temporary = list(directory.rglob("*.tmp"))
    leftovers += len(temporary)
    for path in temporary:
      used_at(path, time.time() - 3700)
    tier = tier_of(directory)
    found.append(tier.size(key_of(0)))
    got = tier.read(key_of(0), "full")
    assert tier.failures == {}, f"step {step}"
    assert (got is None) == (found[-1] is None)
    assert got is None or same(got, 0)
    assert all_files(directory) == ([] if got is None else [path_of(directory, 0)])
  first = found.index(64)
  assert found == [None] * first + [64] * (steps + 1 - first)
  assert 0 < first < steps
  assert leftovers >= 6


def test_killed_at_any_moment(tmp_path):
  size = 1 << 18
  script = """
rng = random.Random(0)
for turn in range(12):
  begun, ready = os.pipe()
  pid = os.fork()
  if not pid:
    tier = tier_of(directory)
    for i in range(turn * 1000, turn * 1000 + 1000):
      tier.write(piece_of(i, 1 << 18))
      os.write(ready, b"x")
  os.read(begun, 1)
  time.sleep(rng.uniform(0, 0.05))
  os.kill(pid, signal.SIGKILL)
  os.waitpid(pid, 0)
"""
  output(child(script, tmp_path))
  for path in tmp_path.rglob("*.tmp"):
    used_at(path, time.time() - 3700)
  tier = tier_of(tmp_path)
  assert not list(tmp_path.rglob("*.tmp"))
  pieces = there(tmp_path, range(12_000))
  assert len(pieces) >= 12
  assert len(all_files(tmp_path)) == len(pieces)
  for i in pieces:
    assert same(tier.read(key_of(i), "full"), i, size)
  assert tier.loads == len(pieces)
  assert tier.failures == {}
