"""Model sources -> Model: `package:NAME`, `gguf:PATH`, or a path that ends in .gguf."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import WeightsError, nearest
from kvjax.models import FAMILIES
from kvjax.models.decoder import Params
from kvjax.models.spec import ModelSpec
from kvjax.tokenizer import Tokenizer
from kvjax.weights.assemble import assemble, expected
from kvjax.weights.check import check_tensors
from kvjax.weights.gguf import GGUFFile
from kvjax.weights.packages import locate


@dataclasses.dataclass(frozen=True)
class Model:
  """Attributes:
  spec: the declared layers (static).
  params: weights on the default device, see `kvjax.models.decoder.Params`; None when only the
    description was asked for.
  tokenizer: text <-> ids, with the model's chat template.
  dtype: "float32" or "bfloat16", of weights and computation.
  source: where it came from.
  fingerprint: names the content of its files, so that what was cached for other weights of the
    same shape is never taken for it.
  """

  spec: ModelSpec
  params: Params | None
  tokenizer: Tokenizer
  dtype: str
  source: str
  fingerprint: str = ""


def resolve_dtype(dtype: str) -> str:
  """What "auto" means: bfloat16 where the device multiplies it natively, else float32.

  That is every TPU and GPU, and CPUs with AVX512-BF16 or AMX. In float32 a request's tokens do not
  depend on its company; in bfloat16 near ties can fall either way.
  """
  if dtype not in ("auto", "float32", "bfloat16"):
    raise WeightsError(f"dtype: expected 'auto', 'float32' or 'bfloat16', got {dtype!r}")
  if dtype != "auto":
    return dtype
  native = jax.default_backend() != "cpu" or cpu_has_bfloat16()
  return "bfloat16" if native else "float32"


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
  """Whether the CPU has instructions for bfloat16 products; False where it cannot be read."""
  try:
    text = cpuinfo.read_text(encoding="utf-8", errors="replace")
  except OSError:
    return False
  return not {"avx512_bf16", "amx_bf16"}.isdisjoint(text.split())


def load(source: str, dtype: str = "auto", *, weights: bool = True) -> Model:
  """Loads a model.

  Args:
    source: "package:NAME" (an installed Python package that carries a GGUF file), "gguf:PATH", or
      a path that ends in .gguf.
    dtype: "float32", "bfloat16" or "auto" (see `resolve_dtype`).
    weights: False reads the description and the tokenizer only.

  Raises:
    WeightsError: naming everything that is missing, extra, misshapen, unreadable or unsupported.
  """
  file = _open(source)
  architecture = file.metadata.get("general.architecture")
  family = FAMILIES.get(str(architecture))
  if family is None:
    hint = nearest(str(architecture), FAMILIES)
    raise WeightsError(
      f"{file.name}: general.architecture: expected one of {sorted(FAMILIES)}, "
      f"got {architecture!r}.{hint}"
    )
  try:
    spec = family.spec(file.metadata)
    tokenizer = Tokenizer.from_gguf(file.metadata)
  except WeightsError as error:
    raise WeightsError(f"{file.name}: {error}") from error
  if "output.weight" not in file.tensors:
    spec = dataclasses.replace(spec, tied_head=True)
  check_tensors(file.name, {n: t.shape for n, t in file.tensors.items()}, expected(spec))
  file.check_readable()
  dtype = resolve_dtype(dtype)
  params = _params(spec, file, dtype, family.interleaved_rope) if weights else None
  return Model(spec, params, tokenizer, dtype, source, file.fingerprint())


def _open(source: str) -> GGUFFile:
  if not isinstance(source, str):
    raise WeightsError(f"source: expected a string, got {source!r}")
  kind, _, rest = source.partition(":")
  if kind == "package" and rest:
    files = locate(rest)
    return GGUFFile.open(files.parts, sha256=files.sha256)
  if kind == "gguf" and rest:
    return GGUFFile.open(Path(rest).expanduser())
  if source.endswith(".gguf"):
    return GGUFFile.open(Path(source).expanduser())
  raise WeightsError(
    f"source: expected 'package:NAME', 'gguf:PATH' or a path ending in .gguf, got {source!r}"
  )


def _params(spec: ModelSpec, file: GGUFFile, dtype: str, interleaved: bool) -> Params:
  target: Any = np.float32 if dtype == "float32" else jnp.bfloat16
  return assemble(spec, lambda name: file.read(name, target), jnp.asarray, interleaved)
