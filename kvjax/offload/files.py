"""The files of the disk tier: one piece each, under its name whole or not at all.

A file is a header of constant size and the payload, the elements row by row. The header says what
the payload is; a checksum covers every other byte of the file.
"""

import contextlib
import dataclasses
import errno
import hashlib
import os
import stat
import struct

import ml_dtypes
import numpy as np

from kvjax.offload.piece import Piece

HEADER_BYTES = 512
"""Before the payload, which so begins at a block of the disk."""

_MAGIC = b"kvjax.kv"
_VERSION = 1
# The attributes of _Fields; then zeros up to the checksum.
_FIELDS = struct.Struct("<8sI4x32s32s128p32pQQQQ")
_CHECKSUM_AT = HEADER_BYTES - hashlib.sha256().digest_size

# What a payload may consist of, by the names that jax and numpy share.
_DTYPES = {
  np.dtype(kind).name: np.dtype(kind)
  for kind in (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
    *(ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint4),
    *(kind for name, kind in vars(ml_dtypes).items() if name.startswith("float8_")),
  )
}


class BadFile(Exception):
  """A file that is not the piece that was asked for.

  Attributes:
    kind: "checksum", "short", "long", "foreign", "version" or "unreadable".
  """

  def __init__(self, kind: str, why: str):
    super().__init__(why)
    self.kind = kind


def encode(piece: Piece, namespace: bytes) -> tuple[bytes, memoryview]:
  """Header and payload of a piece's file.

  Raises ValueError for a piece that no file can hold: a key that is not 32 bytes, a group's name
  of more than 127 bytes, an array that is not [pages, elements] of a dtype of jax.
  """
  array, group = np.asarray(piece.array), piece.group.encode()
  dtype = _DTYPES.get(array.dtype.name)
  if array.ndim != 2 or dtype is None:
    raise ValueError(
      f"piece.array: expected [pages, elements] of one of {', '.join(_DTYPES)}, "
      f"got {list(array.shape)} of {array.dtype.name}"
    )
  if len(piece.key) != 32:
    raise ValueError(f"piece.key: expected 32 bytes, got {len(piece.key)}")
  if len(group) > 127:
    raise ValueError(f"piece.group: expected a name of at most 127 bytes, got {piece.group!r}")
  payload = memoryview(np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8))
  names = (_MAGIC, _VERSION, namespace, piece.key, group, dtype.name.encode())
  numbers = (piece.first, *array.shape, payload.nbytes)
  head = _FIELDS.pack(*names, *numbers).ljust(_CHECKSUM_AT, b"\0")
  return head + _checksum(head, payload), payload


def place(path: str, header: bytes, payload: memoryview) -> None:
  """Writes a file that is under its name whole and synced. Raises OSError: then nothing is left."""
  folder, name = os.path.split(path)
  os.makedirs(folder, exist_ok=True)
  written = os.path.join(folder, _temporary_name(name.removesuffix(".kv")))
  try:
    _write_synced(written, header, payload)
    os.replace(written, path)
    written = path
    _sync_directory(folder)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(written)
    raise


def load(path: str, namespace: bytes, key: bytes, group: str) -> Piece:
  """Reads and verifies a piece, and says that it is in use.

  Raises:
    BadFile: anything about the content is not as expected.
    OSError, MemoryError: it cannot be read.
  """
  fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place is not waited for
  try:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
      raise BadFile("unreadable", "expected a file, got something else")
    header = bytearray(HEADER_BYTES)
    _fill(fd, memoryview(header))
    fields = _Fields(*_FIELDS.unpack_from(header))
    if fields.magic != _MAGIC:
      raise BadFile("foreign", f"expected a file that begins {_MAGIC!r}, got {fields.magic!r}")
    if fields.version != _VERSION:
      raise BadFile("version", f"expected version {_VERSION} of the format, got {fields.version}")
    size = HEADER_BYTES + fields.payload
    if found.st_size != size:
      kind = "short" if found.st_size < size else "long"
      raise BadFile(kind, f"expected {size} bytes, got {found.st_size}")
    payload = np.empty(fields.payload, np.uint8)
    _fill(fd, memoryview(payload))
    if _checksum(header[:_CHECKSUM_AT], memoryview(payload)) != header[_CHECKSUM_AT:]:
      raise BadFile("checksum", "expected content that fits its checksum, got damaged content")
    piece = _decode(fields, payload, namespace, key, group)
    renew(fd)
    return piece
  finally:
    os.close(fd)


def renew(file: int | str) -> None:
  """Says that a file (descriptor or path) is in use. By the file system's clock, which all share,
  and which needs no more than permission to write."""
  with contextlib.suppress(OSError):
    os.utime(file)


def probe(directory: str) -> None:
  """Does to a small file what is done to pieces. Raises OSError."""
  one, two = (os.path.join(directory, _temporary_name("probe")) for _ in range(2))
  content = os.urandom(64)
  try:
    _write_synced(one, content)
    os.replace(one, two)
    _sync_directory(directory)
    with open(two, "rb") as file:
      if file.read() != content:
        raise OSError(errno.EIO, "What was read is not what had been written")
    os.unlink(two)
  except BaseException:
    for name in (one, two):
      with contextlib.suppress(OSError):
        os.unlink(name)
    raise


@dataclasses.dataclass(frozen=True, slots=True)
class _Fields:
  """What a header holds before its checksum, in this order; `payload` is its bytes."""

  magic: bytes
  version: int
  namespace: bytes
  key: bytes
  group: bytes
  dtype: bytes
  first: int
  count: int
  elements: int
  payload: int


def _decode(
  fields: _Fields, payload: np.ndarray, namespace: bytes, key: bytes, group: str
) -> Piece:
  """The piece of an undamaged file. Raises BadFile when it is not the one that was asked for."""
  for name, expected, got in (
    ("namespace", namespace, fields.namespace),
    ("key", key, fields.key),
    ("group", group.encode(), fields.group),
  ):
    if got != expected:
      raise BadFile("foreign", f"expected {name} {expected!r}, got {got!r}")
  dtype = _DTYPES.get(fields.dtype.decode("utf-8", "replace"))
  if dtype is None or fields.count * fields.elements * dtype.itemsize != fields.payload:
    raise BadFile(
      "foreign",
      f"expected {fields.count} x {fields.elements} elements of a known dtype, got "
      f"{fields.payload} bytes of {fields.dtype!r}",
    )
  payload.flags.writeable = False
  return Piece(key, group, fields.first, payload.view(dtype).reshape(fields.count, fields.elements))


def _checksum(head: bytes | bytearray, payload: memoryview) -> bytes:
  h = hashlib.sha256(head)
  h.update(payload)
  return h.digest()


def _temporary_name(stem: str) -> str:
  return f".{stem}.{os.urandom(8).hex()}.tmp"  # no other process, on whatever host, has the same


def _write_synced(path: str, *parts: bytes | memoryview) -> None:
  """Makes a new file and brings it to the disk. Raises OSError."""
  fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
  try:
    for part in parts:
      left = memoryview(part)
      while left:
        left = left[os.write(fd, left) :]
    os.fsync(fd)
  finally:
    os.close(fd)


def _sync_directory(path: str) -> None:
  """Brings the names in a directory to the disk. Raises OSError."""
  fd = os.open(path, os.O_RDONLY)
  try:
    os.fsync(fd)
  except OSError as error:
    # Some network file systems cannot; a power cut may then cost a cached file, nothing more.
    if error.errno not in (errno.EINVAL, errno.ENOTSUP):
      raise
  finally:
    os.close(fd)


def _fill(fd: int, left: memoryview) -> None:
  """Reads until a buffer is full. Raises BadFile at the end of the file, or OSError."""
  while left:
    count = os.readv(fd, [left])
    if not count:
      raise BadFile("short", f"expected {len(left)} more bytes, got the end of the file")
    left = left[count:]
