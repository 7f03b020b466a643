"""Tiny models and tokenizers that run anywhere in seconds, without a download.

    model = kvjax.testing.tiny_model("mixed")
    layout = kvjax.plan(model.spec, max_sequences=4)

Weights are random and fixed by a seed, scaled so that greedy decoding wanders through the
vocabulary with margins far above rounding. `reference_logits` computes the same models a second
way: no pages, no cache, no batching, float64 numpy.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from gguf import GGUFValueType, GGUFWriter, TokenType

from kvjax.detokenizer import BYTE_OF_CHAR
from kvjax.geometry import Retention
from kvjax.models import FAMILIES
from kvjax.models.decoder import Params
from kvjax.models.spec import Layer, ModelSpec, Rope
from kvjax.tokenizer import Tokenizer
from kvjax.weights.assemble import assemble, expected
from kvjax.weights.load import Model

KINDS = ("full", "mixed", "varied")
"""Kinds of tiny models, see `tiny_spec`."""

ARCHITECTURES = {"full": "llama", "mixed": "gemma3"}
"""The kinds that `write_tiny_gguf` can write, and the architecture of their files."""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = ("t h", "th e", "Ġ the", "Ġ a", "i n")
_TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_metadata() -> dict[str, Any]:
  """The tokenizer keys of a GGUF file: byte-level BPE of 264 tokens with a chat template."""
  tokens = [*_SPECIAL, *BYTE_OF_CHAR, *(merge.replace(" ", "") for merge in _MERGES)]
  plain = len(tokens) - len(_SPECIAL)
  return {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": [int(TokenType.CONTROL)] * len(_SPECIAL)
    + [int(TokenType.NORMAL)] * plain,
    "tokenizer.ggml.merges": list(_MERGES),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": _TEMPLATE,
  }


def tiny_tokenizer() -> Tokenizer:
  """A tokenizer that can write any text, a byte per token but for a few merges."""
  return Tokenizer.from_gguf(tokenizer_metadata())


def tiny_metadata(kind: str = "full", window: int = 8, context: int = 256) -> dict[str, Any]:
  """All keys of a tiny GGUF file but `general.architecture`, which its writer adds.

  Args:
    kind: "full" (Llama: 2 layers of full attention, an output head of its own) or "mixed"
      (Gemma 3: 5 sliding layers, then a full one, tied head).
    window: tokens that the sliding layers read; "full" has none.
    context: tokens per sequence.
  """
  name = _architecture(kind)
  keys: dict[str, Any] = {
    "context_length": context,
    "embedding_length": 32,
    "block_count": 2 if kind == "full" else 6,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2 if kind == "full" else 1,
    "attention.key_length": 8,
    "attention.value_length": 8,
    "attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),  # as a file holds it
    "rope.freq_base": 10_000.0 if kind == "full" else 1_000_000.0,
  }
  if kind == "mixed":
    keys["attention.sliding_window"] = window
  metadata = {f"{name}.{key}": value for key, value in keys.items()}
  return {"general.name": f"tiny {kind}", **metadata, **tokenizer_metadata()}


def tiny_spec(kind: str = "full", window: int = 8, context: int = 256) -> ModelSpec:
  """A model small enough to compile in a second.

  Args:
    kind: "full" and "mixed" as in `tiny_metadata`; "varied": four layers in three groups (a
      window, three quarters of it with other head counts, full attention), linear rope scaling.
    window: tokens that the (widest) sliding layers read.
    context: tokens per sequence.

  Raises:
    ValueError: another kind.
  """
  if kind != "varied":
    return FAMILIES[_architecture(kind)].spec(tiny_metadata(kind, window, context))
  spec = tiny_spec("full", window, context)
  full = spec.layers[0]
  a = full.attention
  wide = dataclasses.replace(a, retention=Retention(window), qk_norm=True)
  narrow = dataclasses.replace(
    a, kv_heads=1, retention=Retention(max(1, window * 3 // 4)), rope=Rope(1000.0, scale=2.0)
  )
  layers = tuple(dataclasses.replace(full, attention=each) for each in (wide, narrow, a, narrow))
  return dataclasses.replace(spec, name="tiny varied", layers=layers)


def tiny_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
  """Random weights under their names in GGUF files, float32, halves of rope side by side.

  Sizes are such that each sublayer adds as much to the residual stream as the embedding, or more,
  that attention is peaked, and that logits have a standard deviation of about 4.
  """
  random = np.random.default_rng(seed)
  out = {}
  for name, shape in expected(spec).items():
    if len(shape) == 1:
      mean = next((m for part, m in _NORM_MEANS.items() if part in name), 1.0)
      values = mean * (1 + 0.1 * random.standard_normal(shape))
    else:
      gain = next((g for part, g in _GAINS.items() if part in name), 1.0)
      values = gain * shape[-1] ** -0.5 * random.standard_normal(shape)
    out[name] = values.astype(np.float32)
  return out


_NORM_MEANS = {"post_": 8.0, "attn_q_norm": 1.5, "attn_k_norm": 1.5}
_GAINS = {  # the first that fits
  "token_embd": 4.0,
  "attn_output": 8.0,
  "ffn_down": 8.0,
  "output.weight": 4.0,
  "attn_q": 2.0,
}


def tiny_params(spec: ModelSpec, seed: int = 0, dtype: str = "float32") -> Params:
  """`tiny_tensors` as the decoder's parameters, see `kvjax.models.decoder.Params`."""
  tensors = tiny_tensors(spec, seed)
  return assemble(spec, tensors.__getitem__, lambda x: jnp.asarray(x, jnp.dtype(dtype)), False)


def tiny_model(
  kind: str = "full", *, seed: int = 0, dtype: str = "float32", window: int = 8, context: int = 256
) -> Model:
  """A whole model with weights and tokenizer; arguments as in `tiny_spec` and `tiny_params`."""
  spec = tiny_spec(kind, window, context)
  params = tiny_params(spec, seed, dtype)
  return Model(spec, params, tiny_tokenizer(), dtype, f"tiny:{kind}")


def write_tiny_gguf(
  path: Path | str,
  kind: str = "full",
  *,
  seed: int = 0,
  window: int = 8,
  context: int = 256,
  metadata: Mapping[str, Any] | None = None,
  tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
  """Writes a tiny model as a GGUF file in float32; `kvjax.load("gguf:PATH")` gives `tiny_model`.

  Args:
    path: where to; replaced.
    kind, seed, window, context: as in `tiny_model`; "varied" has no GGUF architecture.
    metadata: keys to add or replace; None as a value leaves the key out.
    tensors: tensors to add or replace; None leaves the tensor out.

  Returns:
    The path.
  """
  spec = tiny_spec(kind, window, context)
  arrays: dict[str, np.ndarray | None] = dict(tiny_tensors(spec, seed))
  architecture = _architecture(kind)
  if FAMILIES[architecture].interleaved_rope:
    for name in arrays:
      if ".attn_q.weight" in name or ".attn_k.weight" in name:
        arrays[name] = _pairs(arrays[name], spec.layers[0].attention.head_dim)
  arrays |= tensors or {}
  keys = {**tiny_metadata(kind, window, context), **(metadata or {})}
  return write_gguf(
    Path(path),
    {name: x for name, x in arrays.items() if x is not None},
    {key: value for key, value in keys.items() if value is not None},
    str(keys.get("general.architecture", architecture)),
  )


def write_gguf(
  path: Path,
  tensors: Mapping[str, Any],
  metadata: Mapping[str, Any] | None = None,
  architecture: str = "llama",
) -> Path:
  """Writes one GGUF file with the gguf package's own writer and returns its path.

  Args:
    tensors: name -> array; it goes in as F32, F16 or integers by its dtype. Whatever has `rows`
      (uint8 rows of whole blocks) and `kind` (GGMLQuantizationType) goes in as it is.
    metadata: written as a string, bool, float32, or array by its type; an int as uint32.
  """
  writer = GGUFWriter(path, architecture)
  for key, value in (metadata or {}).items():
    match value:
      case _ if key == "general.architecture":
        continue
      case bool():
        writer.add_bool(key, value)
      case int():
        writer.add_uint32(key, value)
      case float():
        writer.add_float32(key, value)
      case str():
        writer.add_string(key, value)
      case []:
        writer.add_key_value(key, value, GGUFValueType.ARRAY, GGUFValueType.STRING)
      case _:
        writer.add_array(key, value)
  for name, tensor in tensors.items():
    if isinstance(tensor, np.ndarray):
      writer.add_tensor(name, tensor)
    else:
      writer.add_tensor(name, tensor.rows, raw_dtype=tensor.kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def reference_logits(params: Params, spec: ModelSpec, tokens: Any) -> np.ndarray:
  """Logits after each token of one sequence: float64 [n, V], computed plainly.

  Every position attends over all of the sequence at once under a mask, in float64.
  """
  embed = _wide(params["embed"])
  n = len(tokens)
  x = embed[np.asarray(tokens)] * float(np.asarray(spec.embedding_scale, params["embed"].dtype))
  at = np.arange(n)
  for layer, w in zip(spec.layers, params["layers"], strict=True):
    a = layer.attention
    h = _norm(x, w["attention_norm"], spec.norm_eps) @ _wide(w["qkv"]).T
    q, k, v = np.split(h.reshape(n, -1, a.head_dim), [a.heads, a.heads + a.kv_heads], axis=1)
    if a.qk_norm:
      q, k = _norm(q, w["q_norm"], spec.norm_eps), _norm(k, w["k_norm"], spec.norm_eps)
    q, k = _rotated(q, a.rope), _rotated(k, a.rope)
    distance = at[:, None] - at
    readable = distance >= 0
    if a.retention.window is not None:
      readable &= distance < a.retention.window
    heads = []
    for i in range(a.heads):
      j = i // (a.heads // a.kv_heads)
      score = np.where(readable, a.scale * (q[:, i] @ k[:, j].T), -np.inf)
      weight = np.exp(score - score.max(-1, keepdims=True))
      heads.append(weight / weight.sum(-1, keepdims=True) @ v[:, j])
    h = np.concatenate(heads, -1) @ _wide(w["out"]).T
    x = x + (_norm(h, w["post_attention_norm"], spec.norm_eps) if layer.post_norms else h)
    h = _mlp(layer, w, _norm(x, w["mlp_norm"], spec.norm_eps))
    x = x + (_norm(h, w["post_mlp_norm"], spec.norm_eps) if layer.post_norms else h)
  head = embed if spec.tied_head else _wide(params["head"])
  return _norm(x, params["norm"], spec.norm_eps) @ head.T


def _mlp(layer: Layer, w: Params, x: np.ndarray) -> np.ndarray:
  gate, up = np.split(x @ _wide(w["gate_up"]).T, 2, axis=-1)
  if layer.mlp.activation == "silu":
    gate = gate / (1 + np.exp(-gate))
  else:
    gate = gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
  return (gate * up) @ _wide(w["down"]).T


def _norm(x: np.ndarray, weight: Any, eps: float) -> np.ndarray:
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * _wide(weight)


def _rotated(x: np.ndarray, rope: Rope) -> np.ndarray:
  """x [n, heads, D] as complex numbers turned by position / scale * base ** (-2i / D)."""
  half = x.shape[-1] // 2
  turn = np.arange(len(x))[:, None] / rope.scale * rope.base ** (-np.arange(half) / half)
  z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turn)[:, None]
  return np.concatenate([z.real, z.imag], -1)


def _wide(x: Any) -> np.ndarray:
  return np.asarray(x, np.float64)


def _pairs(x: Any, head_dim: int) -> np.ndarray:
  """Rows of each head from halves to the pairs (0, D/2), (1, D/2 + 1), … of a Llama file."""
  rows, width = x.shape
  halves = x.reshape(rows // head_dim, 2, head_dim // 2, width)
  return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, width)


def _architecture(kind: str) -> str:
  if kind not in ARCHITECTURES:
    raise ValueError(f"kind: expected one of {list(ARCHITECTURES)} here, got {kind!r}")
  return ARCHITECTURES[kind]
