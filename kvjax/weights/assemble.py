"""GGUF tensors -> the decoder's parameter pytree."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvjax.models.decoder import Params
from kvjax.models.spec import Layer, ModelSpec

Read = Callable[[str], np.ndarray]
"""Tensor name -> array in the parameter dtype."""

Put = Callable[[np.ndarray], Any]
"""Host array -> device array."""

# Role in the decoder -> name in the file; several names are stacked row after row.
_MATRICES = {
  "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
  "out": ("attn_output.weight",),
  "gate_up": ("ffn_gate.weight", "ffn_up.weight"),
  "down": ("ffn_down.weight",),
}
_NORMS = {"attention_norm": "attn_norm.weight", "mlp_norm": "ffn_norm.weight"}
_POST_NORMS = {
  "post_attention_norm": "post_attention_norm.weight",
  "post_mlp_norm": "post_ffw_norm.weight",
}
_QK_NORMS = {"q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight"}


def expected(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
  """Every tensor that a GGUF file of this model must hold: name -> shape, row-major."""
  shapes: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (spec.vocab_size, spec.width),
    "output_norm.weight": (spec.width,),
  }
  if not spec.tied_head:
    shapes["output.weight"] = (spec.vocab_size, spec.width)
  for i, layer in enumerate(spec.layers):
    for name, shape in _layer_shapes(spec, layer).items():
      shapes[f"blk.{i}.{name}"] = shape
  return shapes


def _layer_shapes(spec: ModelSpec, layer: Layer) -> dict[str, tuple[int, ...]]:
  a, m, width = layer.attention, layer.mlp, spec.width
  query, key = a.heads * a.head_dim, a.kv_heads * a.head_dim
  shapes: dict[str, tuple[int, ...]] = {
    "attn_q.weight": (query, width),
    "attn_k.weight": (key, width),
    "attn_v.weight": (key, width),
    "attn_output.weight": (width, query),
    "ffn_gate.weight": (m.width, width),
    "ffn_up.weight": (m.width, width),
    "ffn_down.weight": (width, m.width),
  }
  shapes |= dict.fromkeys(_norms(layer, of_head=False).values(), (width,))
  shapes |= dict.fromkeys(_norms(layer, of_head=True).values(), (a.head_dim,))
  return shapes


def _norms(layer: Layer, *, of_head: bool) -> dict[str, str]:
  if of_head:
    return _QK_NORMS if layer.attention.qk_norm else {}
  return _NORMS | (_POST_NORMS if layer.post_norms else {})


def assemble(spec: ModelSpec, read: Read, put: Put, interleaved: bool) -> Params:
  """The parameter pytree; one layer's tensors are in host memory at a time.

  Args:
    read: tensor name -> array [out, in] or [n].
    put: host array -> device array.
    interleaved: query and key rows are stored for the rotation of neighbouring pairs.
  """
  params: Params = {
    "embed": put(read("token_embd.weight")),
    "norm": put(read("output_norm.weight")),
    "layers": [_layer(i, layer, read, put, interleaved) for i, layer in enumerate(spec.layers)],
  }
  if not spec.tied_head:
    params["head"] = put(read("output.weight"))
  return params


def _layer(i: int, layer: Layer, read: Read, put: Put, interleaved: bool) -> Params:
  def tensor(name: str) -> np.ndarray:
    x = read(f"blk.{i}.{name}")
    if interleaved and name in ("attn_q.weight", "attn_k.weight"):
      x = _halves(x, layer.attention.head_dim)
    return x

  out = {role: put(np.concatenate([tensor(n) for n in names])) for role, names in _MATRICES.items()}
  norms = _norms(layer, of_head=False) | _norms(layer, of_head=True)
  return out | {role: put(tensor(name)) for role, name in norms.items()}


def _halves(x: np.ndarray, head_dim: int) -> np.ndarray:
  """Rows of each head from pair order (0, 1), (2, 3), … to halves 0, 2, …, 1, 3, …"""
  rows, width = x.shape
  pairs = x.reshape(rows // head_dim, head_dim // 2, 2, width)
  return pairs.swapaxes(1, 2).reshape(rows, width)
