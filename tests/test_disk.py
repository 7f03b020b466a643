"""The disk tier: what comes back is what was written, or nothing; and what a failure leaves."""

import errno
import hashlib
import json
import os
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from disk_files import (
  FILE_BYTES,
  NAMESPACE,
  OTHER,
  all_files,
  failing,
  is_directory,
  key_of,
  path_of,
  piece_of,
  same,
  there,
  tier_of,
  used_at,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvjax.errors import ConfigError
from kvjax.offload import files
from kvjax.offload.files import HEADER_BYTES
from kvjax.offload.piece import Piece

DTYPES = [
  *("float32", "float16", "int8", "uint8", "int32"),
  *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
]


# What comes back.


def every_pattern(dtype):
  """All bit patterns of one element, or for wide ones those that arithmetic would change."""
  dtype = np.dtype(dtype)
  if dtype.itemsize < 4:
    count = 1 << 8 * dtype.itemsize
    return np.arange(count, dtype=f"u{dtype.itemsize}").view(dtype)
  # Zeros of both signs, infinities, quiet and signalling NaN with payloads, subnormal, random.
  special = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC12345, 0xFFA00001, 0x7F800001, 1]
  rest = np.random.default_rng(0).integers(0, 1 << 32, 248, np.uint32)
  return np.concatenate([np.array(special, np.uint32), rest]).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_comes_back(tmp_path, dtype):
  array = every_pattern(dtype).reshape(4, -1)
  told = []
  assert tier_of(tmp_path, report=told.append).write(Piece(key_of(0), "sliding", 7, array))
  got = tier_of(tmp_path, report=told.append).read(key_of(0), "sliding")
  assert (got.key, got.group, got.first, got.count) == (key_of(0), "sliding", 7, 4)
  assert got.array.dtype == array.dtype
  assert got.array.shape == array.shape
  assert got.array.tobytes() == array.tobytes()
  with pytest.raises(ValueError, match="read-only"):
    got.array[0, 0] = 1
  assert told == []


@pytest.fixture(scope="module")
def pieces_of_all_kinds(tmp_path_factory):
  return tier_of(tmp_path_factory.mktemp("kinds"))


@example(dtype=">i4", shape=(2, 3), turned=False, first=0, group="full")
@example(dtype="float32", shape=(2, 3), turned=True, first=0, group="full")
@settings(max_examples=40, deadline=None)
@given(
  dtype=st.sampled_from([*DTYPES, ">i4", ml_dtypes.int4, ml_dtypes.float8_e5m2, "bool"]),
  shape=st.tuples(st.integers(0, 5), st.integers(0, 40)),
  turned=st.booleans(),
  first=st.integers(0, 2**63),
  group=st.text(st.characters(codec="utf-8"), max_size=31),
)
def test_any_piece_comes_back(pieces_of_all_kinds, dtype, shape, turned, first, group):
  bits = np.random.default_rng(1).integers(0, 2, shape)
  array = bits.astype(dtype)
  array = array.T if turned else array  # not contiguous
  tier = pieces_of_all_kinds
  tier.clear()
  assert tier.write(Piece(key_of(0), group, first, array))
  got = tier.read(key_of(0), group)
  assert (got.group, got.first, got.array.shape) == (group, first, array.shape)
  assert got.array.dtype.name == array.dtype.name
  assert (got.array == array).all()
  assert tier.size(key_of(0)) == array.nbytes
  assert tier.failures == {}


def test_jax_arrays(tmp_path):
  jnp = pytest.importorskip("jax.numpy")
  array = jnp.asarray([[1.5, -0.0], [2, 3]], jnp.bfloat16)
  tier = tier_of(tmp_path)
  assert tier.write(Piece(key_of(0), "full", 0, array))
  got = tier.read(key_of(0), "full").array
  assert isinstance(got, np.ndarray)
  assert got.dtype == ml_dtypes.bfloat16
  assert got.tobytes() == np.asarray(array).tobytes()


def test_where_a_piece_lies(tmp_path):
  tier = tier_of(tmp_path / "a" / "b")
  assert tier.size(key_of(0)) is None
  assert tier.write(piece_of(0))
  path = path_of(tmp_path / "a" / "b", 0)
  assert all_files(tmp_path) == [path]
  assert tier.size(key_of(0)) == 64
  data = path.read_bytes()
  assert len(data) == 512 + 64
  assert data[512:] == piece_of(0).array.tobytes()
  # Version 1 as it has always been: a change of the format needs another number.
  digest = hashlib.sha256(data).hexdigest()
  assert digest == "2df4eb8839989de6aa6c94eaf53a4364f10b31b056c6b212d624ac6737bde884"


def test_a_piece_that_is_there_is_not_written_again(tmp_path):
  tier = tier_of(tmp_path)
  assert tier.write(piece_of(0))
  before = path_of(tmp_path, 0).stat()
  used_at(path_of(tmp_path, 0), 1000)
  assert tier.write(piece_of(0))
  after = path_of(tmp_path, 0).stat()
  assert after.st_ino == before.st_ino
  assert after.st_mtime > 1000
  assert tier.stores == 1
  # One of another size is no piece.
  for torn, size in ((b"torn", None), (bytes(HEADER_BYTES + 5), 5)):
    path_of(tmp_path, 0).write_bytes(torn)
    assert tier.size(key_of(0)) == size
    assert tier.write(piece_of(0))
    assert same(tier.read(key_of(0), "full"), 0)


@pytest.mark.parametrize(
  ("change", "match"),
  [
    ({"key": b"short"}, r"piece.key: expected 32 bytes, got 5"),
    ({"group": "g" * 128}, r"piece.group: expected a name of at most 127 bytes, got 'ggg"),
    ({"array": np.zeros(3, np.int8)}, r"expected \[pages, elements\] of .*, got \[3\] of int8"),
    ({"array": np.zeros((1, 1), object)}, r"got \[1, 1\] of object"),
  ],
)
def test_pieces_that_no_file_can_hold(tmp_path, change, match):
  piece = {"key": key_of(0), "group": "full", "first": 0, "array": np.zeros((1, 1), np.int8)}
  with pytest.raises(ValueError, match=match):
    tier_of(tmp_path).write(Piece(**(piece | change)))
  assert all_files(tmp_path) == []


def test_remove_and_clear(tmp_path):
  tier, other = tier_of(tmp_path), tier_of(tmp_path, namespace=OTHER)
  for i in range(3):
    assert tier.write(piece_of(i))
    assert other.write(piece_of(i))
  tier.remove(key_of(1))
  tier.remove(key_of(9))
  assert tier.read(key_of(1), "full") is None
  assert there(tmp_path, range(3)) == [0, 2]
  tier.clear()
  assert there(tmp_path, range(3)) == []
  assert there(tmp_path, range(3), OTHER) == [0, 1, 2]
  assert tier.failures == {}


def test_figures(tmp_path):
  tier = tier_of(tmp_path, capacity=2 * FILE_BYTES)
  for i in range(3):
    assert tier.write(piece_of(i))
  assert not tier.write(piece_of(3, size=1024))
  assert same(tier.read(key_of(2), "full"), 2)
  assert tier.read(key_of(9), "full") is None
  figures = json.loads(json.dumps(tier.figures()))
  assert 0 < figures.pop("seconds_writing") < 5
  assert 0 < figures.pop("seconds_reading") < 5
  assert figures == {
    "stores": 3,
    "loads": 1,
    "bytes_written": 3 * FILE_BYTES,
    "bytes_read": FILE_BYTES,
    "evictions": 2,
    "refusals": 1,
    "failures": {"large": 1},
  }


# Files with anything wrong.


def resigned(data, at, content):
  """A file with other bytes at a place, and the checksum that fits them."""
  data = data[:at] + content + data[at + len(content) :]
  head, payload = data[: files._CHECKSUM_AT], data[HEADER_BYTES:]
  return head + hashlib.sha256(head + payload).digest() + payload


def miss(tier, kind, path, key=None):
  """Reading must be a miss of this kind; the file must go."""
  before = tier.failures.get(kind, 0)
  others = sum(tier.failures.values()) - before
  assert tier.read(key or key_of(0), "full") is None
  assert tier.failures.get(kind, 0) == before + 1, tier.failures
  assert sum(tier.failures.values()) == before + 1 + others
  assert not os.path.lexists(path)


def test_any_flipped_bit_is_a_miss(tmp_path):
  told = []
  tier = tier_of(tmp_path, report=told.append)
  assert tier.write(piece_of(0))
  path = path_of(tmp_path, 0)
  good = path.read_bytes()
  for at in range(len(good)):
    bad = bytearray(good)
    bad[at] ^= 1 << at % 8
    path.write_bytes(bad)
    assert tier.read(key_of(0), "full") is None, f"byte {at}"
    assert not path.exists(), f"byte {at}"
  assert sum(tier.failures.values()) == len(good)
  assert tier.failures["foreign"] == 8
  assert tier.failures["version"] == 4
  assert tier.failures["short"] == 8  # the payload's length
  assert tier.failures["checksum"] == len(good) - 20
  assert len(told) == len(tier.failures)
  path.write_bytes(good)
  assert same(tier.read(key_of(0), "full"), 0)


def test_any_other_length_is_a_miss(tmp_path):
  tier = tier_of(tmp_path)
  assert tier.write(piece_of(0))
  path = path_of(tmp_path, 0)
  good = path.read_bytes()
  for length in range(len(good)):
    path.write_bytes(good[:length])
    assert tier.size(key_of(0)) == (length - 512 if length >= 512 else None)
    miss(tier, "short", path)
  for more in (b"\0", b"x" * 511, good):
    path.write_bytes(good + more)
    miss(tier, "long", path)


def test_a_file_of_zeros_is_a_miss(tmp_path):
  tier = tier_of(tmp_path)
  assert tier.write(piece_of(0))
  path = path_of(tmp_path, 0)
  path.write_bytes(bytes(FILE_BYTES))
  miss(tier, "foreign", path)


@pytest.mark.parametrize("change", ["namespace", "key", "group"])
def test_an_intact_file_of_another_is_a_miss(tmp_path, change):
  told = []
  tier = tier_of(tmp_path, report=told.append)
  assert tier.write(piece_of(0))
  path = path_of(tmp_path, 0)
  if change == "namespace":
    # The folder has half of the namespace only: the header decides.
    other = tier_of(tmp_path, namespace=NAMESPACE[:16] + bytes(16), report=told.append)
    assert same(tier.read(key_of(0), "full"), 0)
    assert other.read(key_of(0), "full") is None
    tier = other
  elif change == "key":
    assert tier.write(piece_of(1))
    path.write_bytes(path_of(tmp_path, 1).read_bytes())
    assert tier.read(key_of(0), "full") is None
    assert same(tier.read(key_of(1), "full"), 1)
  else:
    assert tier.read(key_of(0), "sliding") is None
  assert tier.failures == {"foreign": 1}
  assert not path.exists()
  assert f"expected {change}" in told[0]


@pytest.mark.parametrize(
  ("field", "content", "kind"),
  [
    ("version", (2).to_bytes(4, "little"), "version"),
    ("dtype", b"\6object", "foreign"),
    ("dtype", b"\5int16", "foreign"),
    ("count", (3).to_bytes(8, "little"), "foreign"),
    ("elements", (2**63).to_bytes(8, "little"), "foreign"),
    ("payload", (2**63).to_bytes(8, "little"), "short"),
    ("payload", (0).to_bytes(8, "little"), "long"),
  ],
)
def test_headers_that_contradict_themselves(tmp_path, field, content, kind):
  """With a checksum that fits: by a program that writes another format."""
  offsets = {"version": 8, "dtype": 208, "count": 248, "elements": 256, "payload": 264}
  tier = tier_of(tmp_path)
  assert tier.write(piece_of(0))
  path = path_of(tmp_path, 0)
  good = path.read_bytes()
  path.write_bytes(resigned(good, offsets[field], content))
  miss(tier, kind, path)
  path.write_bytes(resigned(good, 0, b""))  # the tool itself breaks nothing
  assert same(tier.read(key_of(0), "full"), 0)


def test_a_directory_or_a_pipe_in_place_of_a_file(tmp_path):
  told = []
  tier = tier_of(tmp_path, report=told.append)
  path = path_of(tmp_path, 0)
  path.mkdir(parents=True)
  (path / "kept").touch()
  assert tier.size(key_of(0)) is None
  for _ in range(3):
    assert tier.read(key_of(0), "full") is None
  assert tier.failures == {"unreadable": 3}
  assert len(told) == 1
  assert str(path) in told[0]
  assert "cannot be deleted (Is a directory)" in told[0]
  assert not tier.write(piece_of(0))
  assert tier.failures == {"unreadable": 3, "unwritable": 1}
  assert all_files(tmp_path) == [path / "kept"]  # and no temporary file

  pipe = path_of(tmp_path, 1)
  pipe.parent.mkdir(exist_ok=True)
  os.mkfifo(pipe)
  assert tier.size(key_of(1)) is None
  miss(tier, "unreadable", pipe, key_of(1))


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
  tier = tier_of(tmp_path)
  assert tier.write(piece_of(0))
  path = path_of(tmp_path, 0)
  with monkeypatch.context() as m:
    m.setattr(os, "open", failing(errno.EMFILE))
    assert tier.read(key_of(0), "full") is None
  with monkeypatch.context() as m:
    m.setattr(np, "empty", lambda *args: bytearray(1 << 62))  # no machine has that
    assert tier.read(key_of(0), "full") is None
  assert tier.failures == {"unreadable": 2}
  assert same(tier.read(key_of(0), "full"), 0)  # the file was not to blame
  with monkeypatch.context() as m:
    m.setattr(os, "readv", failing(errno.EIO))
    miss(tier, "unreadable", path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path):
  tier = tier_of(tmp_path)
  assert tier.write(piece_of(0))
  path_of(tmp_path, 0).chmod(0)
  miss(tier, "unreadable", path_of(tmp_path, 0))


def test_a_file_that_vanishes_is_no_failure(tmp_path, monkeypatch):
  tier = tier_of(tmp_path)
  assert tier.read(key_of(0), "full") is None
  assert tier.write(piece_of(0))
  path_of(tmp_path, 0).unlink()
  assert tier.read(key_of(0), "full") is None
  assert tier.write(piece_of(0))
  monkeypatch.setattr(os, "readv", failing(errno.ESTALE))  # so says NFS
  assert tier.read(key_of(0), "full") is None
  assert tier.failures == {}


def test_every_kind_is_reported_once(tmp_path):
  told = []
  # A report may ask for figures: no lock is held.
  tier = tier_of(tmp_path, report=lambda text: told.append((text, tier.figures()["failures"])))
  for i in range(4):
    assert tier.write(piece_of(i))
    path = path_of(tmp_path, i)
    path.write_bytes(path.read_bytes()[: None if i % 2 else -1] + b"x" * (i % 2))
    assert tier.read(key_of(i), "full") is None
  assert tier.failures == {"short": 2, "long": 2}
  (first, counted), (second, _) = told
  assert counted == {"short": 1}
  assert first == (
    f"{path_of(tmp_path, 0)}: expected 576 bytes, got 575. It counts as not stored and was "
    "deleted. Check the disk if there are more. More failures of this kind (short) are counted only"
  )
  assert str(path_of(tmp_path, 1)) in second


# Writing that fails.


@pytest.mark.parametrize("call", ["open", "write", "partial", "fsync", "directory", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_fails(tmp_path, monkeypatch, call, number):
  told = []
  tier = tier_of(tmp_path, report=told.append)
  assert tier.write(piece_of(0))
  write, fsync = os.write, os.fsync
  left = [300]

  def partial(fd, data):
    count = write(fd, data[: left[0]])
    left[0] -= count
    if not count:
      raise OSError(number, os.strerror(number))
    return count

  fake = {
    "partial": ("write", partial),
    "directory": ("fsync", failing(number, fsync, is_directory)),
  }.get(call, (call, failing(number)))
  kind = "unwritable" if number == errno.EIO else "full"
  with monkeypatch.context() as m:
    m.setattr(os, *fake)
    for i in (1, 2):
      assert not tier.write(piece_of(i))
    if call != "open":
      assert same(tier.read(key_of(0), "full"), 0)  # what is there is still served
  assert all_files(tmp_path) == [path_of(tmp_path, 0)]
  assert (tier.refusals, tier.failures, tier.stores) == (2, {kind: 2}, 1)
  (text,) = told
  assert f"{path_of(tmp_path, 1)}: cannot be written: {os.strerror(number)}" in text
  assert ("Free some space" in text) == (kind == "full")
  assert tier.write(piece_of(1))  # when there is space again
  assert same(tier.read(key_of(1), "full"), 1)


def test_short_writes_and_reads_go_on(tmp_path, monkeypatch):
  write, readv = os.write, os.readv
  monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
  monkeypatch.setattr(os, "readv", lambda fd, buffers: readv(fd, [buffers[0][:11]]))
  tier = tier_of(tmp_path)
  assert tier.write(piece_of(0))
  assert path_of(tmp_path, 0).stat().st_size == FILE_BYTES
  assert same(tier.read(key_of(0), "full"), 0)


def test_the_order_of_writing(tmp_path, monkeypatch):
  """The file reaches the disk before its name, and the name before the write is done."""
  tier = tier_of(tmp_path)
  fsync, replace = os.fsync, os.replace
  done = []

  def sync(fd):
    fsync(fd)
    done.append(("directory",) if is_directory(fd) else ("file", os.fstat(fd).st_size))

  def rename(old, new):
    done.append(("rename", os.path.dirname(old) == os.path.dirname(new), os.path.exists(new)))
    replace(old, new)

  monkeypatch.setattr(os, "fsync", sync)
  monkeypatch.setattr(os, "replace", rename)
  assert tier.write(piece_of(0))
  assert done == [("file", FILE_BYTES), ("rename", True, False), ("directory",)]


def test_file_systems_that_cannot_sync_directories(tmp_path, monkeypatch):
  monkeypatch.setattr(os, "fsync", failing(errno.EINVAL, os.fsync, is_directory))
  tier = tier_of(tmp_path)
  assert tier.write(piece_of(0))
  assert same(tier.read(key_of(0), "full"), 0)


def test_the_directory_may_be_deleted_meanwhile(tmp_path):
  tier = tier_of(tmp_path / "a")
  assert tier.write(piece_of(0))
  path_of(tmp_path / "a", 0).unlink()
  for path in sorted((tmp_path / "a").rglob("*"), reverse=True):
    path.rmdir()
  assert tier.read(key_of(0), "full") is None
  assert tier.write(piece_of(1))
  assert same(tier.read(key_of(1), "full"), 1)


# The start.


def wrong_content(path, *args, real=open, **more):
  Path(path).write_bytes(b"other")
  return real(path, *args, **more)


@pytest.mark.parametrize("call", ["makedirs", "write", "fsync", "directory", "replace", "unlink"])
def test_a_directory_that_cannot_be_used(tmp_path, monkeypatch, call):
  unlink, fsync = os.unlink, os.fsync
  fake = (call, failing(errno.EROFS))
  if call == "directory":
    fake = ("fsync", failing(errno.EROFS, fsync, is_directory))
  with monkeypatch.context() as m:
    m.setattr(os, *fake)
    with pytest.raises(ConfigError) as e:
      tier_of(tmp_path)
  assert re.match(
    r"config.offload.disk_path: expected a directory in which .*, got '.*': Read-only file system. "
    "Choose",
    str(e.value),
  )
  if call == "unlink":
    unlink(*all_files(tmp_path))
  assert all_files(tmp_path) == []


def test_a_directory_that_returns_other_content(tmp_path, monkeypatch):
  monkeypatch.setattr("builtins.open", wrong_content)
  with pytest.raises(ConfigError, match=r"config.offload.disk_path: .*not what had been written"):
    tier_of(tmp_path)
  assert all_files(tmp_path) == []


def test_no_directory(tmp_path):
  (tmp_path / "file").touch()
  for directory in (tmp_path / "file", tmp_path / "file" / "below", ""):
    with pytest.raises(ConfigError, match=r"config.offload.disk_path: expected a directory"):
      tier_of(directory)
  with pytest.raises(ValueError, match="namespace: expected 32 bytes, got 3"):
    tier_of(tmp_path, namespace=b"abc")


def test_a_relative_directory(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  tier = tier_of("cache")
  (tmp_path / "elsewhere").mkdir()
  monkeypatch.chdir(tmp_path / "elsewhere")
  assert tier.write(piece_of(0))
  assert there(tmp_path / "cache", [0]) == [0]
