"""The executor: compiled programs, the device state, and the one packed read of each step."""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import SingleDeviceSharding

from kvjax import state as state_lib
from kvjax import steps as step_lib
from kvjax.engine.batching import Shape, SlotSampling, build
from kvjax.engine.scheduler import Plan
from kvjax.geometry import NO_PAGE, GroupGeometry, Layout
from kvjax.models.decoder import Params
from kvjax.models.spec import ModelSpec
from kvjax.offload.chunks import chunk_dtype, pack_pool, page_elements, unpack_pool
from kvjax.offload.fetches import Load
from kvjax.offload.piece import Piece
from kvjax.offload.stores import Store
from kvjax.pages import Copies
from kvjax.request import TokenLogprobs
from kvjax.sampling import TOP_LOGPROBS
from kvjax.sharding import Shardings
from kvjax.state import EngineState
from kvjax.steps import Batch

_COPIES = 8  # of a chunk, for one measurement


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
    self._layout = layout
    self._pinned: Any = None
    self._on_device: Any = None
    if shardings.mesh is None:
      self._pinned, self._on_device = pinned_memory()
    self._shardings = shardings
    self._params = shardings.place_params(params)
    self._spec = spec
    self._implementation = implementation
    self._state = shardings.place_state(state_lib.init(layout))
    self._sampling = SlotSampling(layout[0].max_sequences)
    self._programs: dict[Shape | str, Any] = {}
    kinds = tuple((x.shape, str(x.dtype), x.sharding) for x in jax.tree.leaves(self._params))
    # Engines that are equal in all of this run the same programs.
    self._alike = (spec, layout, implementation, shardings.mesh, kinds)

  def dispatch(self, plan: Plan, shape: Shape) -> Dispatched:
    """Starts a step and returns without waiting for it."""
    batch, stops, rows = build(plan, shape, self._sampling)
    self.pack(plan.stores)
    self._prepare(plan)
    state = self._state.replace(pages=plan.pages)
    args = (self._params, state, batch) + ((stops,) if shape.steps > 1 else ())
    program = self._program(shape, lambda: self._compile(shape, args))
    self._state, packed = program(*args)
    packed.copy_to_host_async()
    return Dispatched(plan, rows, packed)

  def pack(self, stores: Sequence[Store]) -> None:
    """Packs pages as every step so far has left them, on their way to host memory."""
    for store in stores:
      g = self._layout[store.group]
      # One program for every group: a partial chunk repeats its last page.
      ids = np.pad(store.pages, (0, g.blocks_per_chunk - len(store.pages)), mode="edge")
      args = (self._state.pools[store.group], ids.astype(np.int32))
      name = f"packing of group {g.name}"
      program = self._program(name, functools.partial(_compile_pack, g, args))
      packed = program(*args)
      if self._pinned is not None:
        packed = jax.device_put(packed, self._pinned)
      else:
        packed.copy_to_host_async()
      store.packed = packed

  def _unpack(self, load: Load) -> None:
    """Unpacks rows of a piece into pages, after every step so far and before the next."""
    g, array = self._layout[load.group], load.piece.array
    ids = np.full(g.blocks_per_chunk, NO_PAGE, np.int32)
    ids[load.rows] = load.pages
    if array.shape[0] < g.blocks_per_chunk:
      array = np.pad(np.asarray(array), ((0, g.blocks_per_chunk - array.shape[0]), (0, 0)))
    elif self._pinned is not None:
      array = jax.device_put(array, self._on_device)
    pools = list(self._state.pools)
    unpack = functools.partial(_unpack, g)
    args = (pools[load.group], ids, array)
    pools[load.group] = self._beside(f"unpacking of group {g.name}", unpack, args)
    self._state = self._state.replace(pools=tuple(pools))

  def measure_copies(self, group: int) -> float:
    """Bytes per second from host memory into the pools of a group, measured now. Writes no page."""
    g = self._layout[group]
    piece = Piece(b"", g.name, 0, np.zeros((g.blocks_per_chunk, page_elements(g)), chunk_dtype(g)))
    nothing = np.zeros(0, np.int32)
    seconds = []
    for _ in range(3):
      start = time.perf_counter()
      for _ in range(_COPIES):
        self._unpack(Load(group, piece, nothing, nothing))
      jax.block_until_ready(self._state.pools[group])
      seconds.append(time.perf_counter() - start)
    return _COPIES * g.chunk_bytes / min(seconds)

  def read(self, dispatched: Dispatched) -> Results:
    """Waits for a step's one packed array."""
    return Results(np.asarray(dispatched.packed))

  def _prepare(self, plan: Plan) -> None:
    """What must be on the device before a step: tokens that nobody computes, copied pages."""
    for a in plan.admitted:
      if a.found:
        tokens = np.zeros(self._state.tokens.shape[1], np.int32)
        tokens[: len(a.sequence.tokens)] = a.sequence.tokens
        args: tuple[Any, ...] = (self._state.tokens, np.int32(a.slot), tokens)
        new = self._beside("tokens of a cached prefix", _place_tokens, args)
        self._state = self._state.replace(tokens=new)
      for load in a.loads:
        self._unpack(load)
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
      program = _shared((*self._alike, key), compile)
      self._programs[key] = program
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


_PROGRAMS: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_MOST_PROGRAMS = 256


def _shared(key: Any, compile: Callable[[], Any]) -> Any:
  """A program of this process; the last _MOST_PROGRAMS are kept for further engines like theirs."""
  program = _PROGRAMS.pop(key, None)
  if program is None:
    program = compile()
  _PROGRAMS[key] = program
  while len(_PROGRAMS) > _MOST_PROGRAMS:
    _PROGRAMS.popitem(last=False)
  return program


def _compile_pack(g: GroupGeometry, args: tuple[Any, ...]) -> Any:
  return jax.jit(lambda pool, ids: pack_pool(pool, g, ids)).lower(*args).compile()


def _unpack(g: GroupGeometry, pool: Any, ids: jax.Array, chunk: jax.Array) -> Any:
  return unpack_pool(pool, g, ids, chunk)


def pinned_memory() -> tuple[Any, Any]:
  """(pinned host memory of the default device, the device's own memory) as shardings, if the
  platform has memory of that kind and it keeps what is put there; else (None, None). On a CPU all
  memory is the host's."""
  device = jax.devices()[0]
  if device.platform == "cpu":
    return None, None
  try:
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    words = np.arange(1024, dtype=np.uint32)
    there = jax.device_put(jax.device_put(words, device), pinned)
    if there.sharding.memory_kind == "pinned_host" and (np.asarray(there) == words).all():
      return pinned, SingleDeviceSharding(device)
  except (ValueError, RuntimeError) as error:
    logging.warning("pinned host memory cannot be used (%s); offload copies are slower", error)
  return None, None


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
