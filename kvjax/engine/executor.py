"""The executor: compiled programs, the device state, and the one packed read of each step."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kvjax import state as state_lib
from kvjax import steps as step_lib
from kvjax.engine.batching import Shape, SlotSampling, build
from kvjax.engine.scheduler import Plan
from kvjax.geometry import NO_PAGE, Layout
from kvjax.models.decoder import Params
from kvjax.models.spec import ModelSpec
from kvjax.pages import Copies
from kvjax.request import TokenLogprobs
from kvjax.sampling import TOP_LOGPROBS
from kvjax.sharding import Shardings
from kvjax.state import EngineState
from kvjax.steps import Batch


@dataclasses.dataclass
class Dispatched:
  """A step that the device is working on."""

  plan: Plan
  rows: list[int]  # sampled row of each of plan.decode + plan.prefill
  packed: jax.Array


class Results:
  """What was read of one step.

  Attributes:
    tokens: [step][row] ids; finite: [step][row] whether the logits were finite.
  """

  def __init__(self, packed: np.ndarray):
    # Always [steps, R + 1, PACKED_WIDTH].
    self._packed = packed if packed.ndim == 3 else packed[None]
    unreserved = int(self._packed[:, -1, 0].sum())
    if unreserved:
      raise RuntimeError(f"{unreserved} rows of a step had no page: the tables are wrong")
    self.tokens: list[list[int]] = self._packed[..., 0].tolist()
    self.finite: list[list[int]] = self._packed[..., 1].tolist()

  def logprobs(self, row: int, step: int, top: int) -> TokenLogprobs:
    """Log-probability of the token and of the `top` most likely ones."""
    words = self._packed[step, row]
    values = words[3 + TOP_LOGPROBS :].view(np.float32)
    best = tuple((int(words[3 + i]), float(values[i])) for i in range(top) if values[i] > -np.inf)
    return TokenLogprobs(int(words[0]), float(words[2:3].view(np.float32)[0]), best)


class Executor:
  """Runs plans on the device.

  Attributes:
    compiled: seconds that each shape, and each small program beside the steps, took to compile (or
      to load from the cache on disk).
  """

  def __init__(
    self,
    params: Params,
    spec: ModelSpec,
    layout: Layout,
    shardings: Shardings,
    implementation: Any = None,
  ):
    self.compiled: dict[Shape | str, float] = {}
    self._shardings = shardings
    self._params = shardings.place_params(params)
    self._spec = spec
    self._implementation = implementation
    self._state = shardings.place_state(state_lib.init(layout))
    self._sampling = SlotSampling(layout[0].max_sequences)
    self._programs: dict[Shape | str, Any] = {}

  def dispatch(self, plan: Plan, shape: Shape) -> Dispatched:
    """Starts a step and returns without waiting for it."""
    batch, stops, rows = build(plan, shape, self._sampling)
    self._prepare(plan)
    state = self._state.replace(pages=plan.pages)
    args = (self._params, state, batch) + ((stops,) if shape.steps > 1 else ())
    program = self._program(shape, lambda: self._compile(shape, args))
    self._state, packed = program(*args)
    packed.copy_to_host_async()
    return Dispatched(plan, rows, packed)

  def read(self, dispatched: Dispatched) -> Results:
    """Waits for a step's one packed array."""
    return Results(np.asarray(dispatched.packed))

  def _prepare(self, plan: Plan) -> None:
    """What must be on the device before a step: tokens that nobody computes, copied pages."""
    for sequence, slot, found, _ in plan.admitted:
      if found:
        tokens = np.zeros(self._state.tokens.shape[1], np.int32)
        tokens[: len(sequence.tokens)] = sequence.tokens
        args: tuple[Any, ...] = (self._state.tokens, np.int32(slot), tokens)
        new = self._beside("tokens of a cached prefix", _place_tokens, args)
        self._state = self._state.replace(tokens=new)
    if plan.copies is not None:
      # A sequence writes one shared page in a step at most: the one that it goes on in.
      most = self._sampling.slots
      copies = tuple(
        Copies(*(np.pad(ids, (0, most - len(ids)), constant_values=NO_PAGE) for ids in copy))
        for copy in plan.copies
      )
      pools = self._beside("copies of shared pages", _copy_pages, (self._state.pools, copies))
      self._state = self._state.replace(pools=pools)

  def _beside(self, name: str, function: Any, args: tuple[Any, ...]) -> Any:
    """A small program beside the steps; its first argument is donated, and its result is alike."""

    def compile() -> Any:
      shardings = jax.tree.map(lambda x: x.sharding, args[0])
      return jax.jit(function, donate_argnums=0, out_shardings=shardings).lower(*args).compile()

    return self._program(name, compile)(*args)

  @property
  def compile_seconds(self) -> float:
    return sum(self.compiled.values())

  def _program(self, key: Shape | str, compile: Callable[[], Any]) -> Any:
    """A program that is kept; compiled, and timed, when it is first asked for."""
    program = self._programs.get(key)
    if program is None:
      start = time.perf_counter()
      program = self._programs[key] = compile()
      self.compiled[key] = time.perf_counter() - start
    return program

  def _compile(self, shape: Shape, args: tuple[Any, ...]) -> Any:
    statics: dict[str, Any] = {"spec": self._spec, "implementation": self._implementation}
    if shape.steps > 1:
      statics["steps"] = shape.steps
    jitted = jax.jit(
      _run if shape.steps == 1 else _run_many,
      static_argnames=tuple(statics),
      donate_argnums=1,
      out_shardings=self._shardings.outputs(args[1]),
    )
    return jitted.lower(*args, **statics).compile()


def _run(
  params: Params, state: EngineState, batch: Batch, *, spec: ModelSpec, implementation: Any
) -> tuple[EngineState, jax.Array]:
  state, out = step_lib.step(params, state, batch, spec=spec, implementation=implementation)
  return state, step_lib.pack(out)


def _run_many(
  params: Params,
  state: EngineState,
  batch: Batch,
  stops: jax.Array,
  *,
  spec: ModelSpec,
  implementation: Any,
  steps: int,
) -> tuple[EngineState, jax.Array]:
  state, out = step_lib.decode(
    params, state, batch, spec=spec, steps=steps, stops=stops, implementation=implementation
  )
  return state, step_lib.pack(out)


def _place_tokens(tokens: jax.Array, slot: jax.Array, row: jax.Array) -> jax.Array:
  return tokens.at[slot].set(row)


def _copy_pages(pools: Any, copies: tuple[Copies, ...]) -> Any:
  return tuple(state_lib.copy_pages(pool, c) for pool, c in zip(pools, copies, strict=True))


def enable_compilation_cache(directory: str | None) -> None:
  """Keeps compiled programs on disk, so that only the first run of a shape compiles it."""
  jax.config.update("jax_compilation_cache_dir", directory)
  if directory is not None:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
