"""The declaration: what is served, from which memory, in what order. Checked where it is built.

Each field's annotation and `Rule` are the one table behind validation, flag parsing and help.
Every wrong key of a declaration is reported, each under its full dotted name.
"""

import dataclasses
import itertools
import json
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from kvjax.errors import RequestError, show
from kvjax.request import SamplingParams
from kvjax.rules import Rule, Section, declared_fields, key


def _increasing(values: tuple[int, ...]) -> bool:
  return all(a < b for a, b in itertools.pairwise(values))


_SOURCE = re.compile(r"package:[A-Za-z0-9_][A-Za-z0-9_.-]*|gguf:.+|(?![a-z]+:).+\.gguf", re.DOTALL)
_SOURCE_RULE = Rule(
  "where the model comes from",
  words='"package:NAME" (an installed package that carries a GGUF file), "gguf:PATH", or a path '
  "ending in .gguf; other sources (hf:, orbax:) are not available in this version",
  test=lambda value: _SOURCE.fullmatch(value) is not None,
)


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section):
  """Which model, in which precision, over how many tokens."""

  KEY = "config.model"

  source: str = dataclasses.field(metadata={"rule": _SOURCE_RULE})
  dtype: Literal["auto", "float32", "bfloat16"] = key(
    "auto", "compute type; auto: bfloat16 where the device multiplies it natively, else float32"
  )
  numerics: Literal["fast", "batch_invariant"] = key(
    "fast",
    "batch_invariant: every step has one shape and every token a row of its own, so that a "
    "request's tokens depend on nothing around it in any dtype; slower",
  )
  max_length: int | None = key(
    None, "tokens of prompt and output per sequence; None: the model's context", 2, 2**24
  )


@dataclasses.dataclass(frozen=True)
class GroupConfig(Section):
  """Overrides for the layers of one cache group.

  A group does not know its own name: its values are checked by the CacheConfig that names it.
  """

  KEY = "config.cache.groups.*"

  page_size: int | None = key(None, "tokens per page; None: cache.page_size", 1, 65536)
  pages: int | None = key(None, "pages in the pool; None: planned from memory", 1, 2**31 - 1)

  def __post_init__(self) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class CacheConfig(Section):
  """Device memory for keys and values, and how each group cuts it into pages."""

  KEY = "config.cache"

  page_size: int = key(16, "tokens per page, for every group that does not say", 1, 65536)
  memory_bytes: int | None = key(
    None, "device bytes for the pools of all groups; None: planned from device memory", 1, 2**50
  )
  dtype: Literal["auto", "float32", "bfloat16"] = key(
    "auto", "type of keys and values in memory; auto: the model's"
  )
  lengths: tuple[int, ...] = key(
    (),
    "typical tokens of a sequence (prompt and output), each as frequent as the others, by which "
    "memory is divided over the groups; empty: all as long as fits",
    1,
    2**24,
  )
  prefix_sharing: bool = key(True, "keep computed prefixes for later prompts that start alike")
  check_invariants: bool = key(
    False, "check the tables and the prefix index after every step: slow, for finding faults"
  )
  # A dict has no hash; equal declarations still hash alike without it.
  groups: Mapping[str, GroupConfig] = dataclasses.field(default_factory=dict, hash=False)

  def __post_init__(self) -> None:
    super().__post_init__()
    object.__setattr__(self, "groups", dict(self.groups))  # the caller's dict may change later

  def problems(self, key: str) -> Iterator[str]:
    yield from super().problems(key)
    for name, group in self.groups.items() if isinstance(self.groups, Mapping) else ():
      if not isinstance(name, str) or not re.fullmatch(r"[^\s.*=]+", name):
        yield f"{key}.groups: expected group names without spaces or any of . * =, got {show(name)}"
      elif not isinstance(group, GroupConfig):
        yield f"{key}.groups.{name}: expected a GroupConfig, got {show(group)}"
      else:
        yield from group.problems(f"{key}.groups.{name}")


@dataclasses.dataclass(frozen=True)
class SchedulerConfig(Section):
  """How many sequences run, and how much of them in one step."""

  KEY = "config.scheduler"

  max_sequences: int = key(16, "sequences that run at once", 1, 4096)
  token_budget: int = key(256, "most prefill tokens per step", 1, 65536)
  query_block: int = key(
    64,
    "tokens per prefill query block",
    words="a power of two in [8, 256]",
    test=lambda value: value in (8, 16, 32, 64, 128, 256),
  )
  decode_steps: int = key(1, "decode steps per call", 1, 64)
  decode_buckets: tuple[int, ...] = key(
    (),
    "sequences per compiled decode shape; empty: chosen",
    1,
    4096,
    words="a tuple of strictly increasing integers in [1, 4096]",
    test=_increasing,
  )
  prefill_buckets: tuple[int, ...] = key(
    (),
    "tokens per compiled prefill shape; empty: chosen",
    1,
    65536,
    words="a tuple of strictly increasing integers in [1, 65536]",
    test=_increasing,
  )
  look_ahead: int = key(
    4, "tokens for which a decoding sequence takes its pages at once, where there are enough", 1, 64
  )
  overlap: bool = key(True, "plan the next step while the device runs this one")


@dataclasses.dataclass(frozen=True)
class SamplingDefaults(Section):
  """Sampling of the prompts that do not say; the ranges are those of SamplingParams."""

  KEY = "config.sampling"

  max_tokens: int | None = key(256, "most new tokens; None: all that the context allows")
  min_tokens: int = key(0, "new tokens before an end-of-sequence or stop id may end the output")
  temperature: float = key(1.0, "0 is greedy")
  top_p: float = key(1.0, "keep the most likely tokens up to this probability")
  top_k: int = key(0, "keep the k most likely tokens; 0 keeps all")
  min_p: float = key(0.0, "drop tokens below this share of the most likely one")
  repetition_penalty: float = key(1.0, "against tokens of prompt and output; 1 is none")
  presence_penalty: float = key(0.0, "subtracted once for each token of the output")
  frequency_penalty: float = key(0.0, "subtracted for each occurrence in the output")
  seed: int | None = key(None, "of all randomness; None: drawn from the prompt's place")
  stop: tuple[str, ...] = key((), 'strings that end the output; if one has a comma: ["a,b"]')
  ignore_eos: bool = key(False, "run past the model's end of sequence")

  def params(self) -> SamplingParams:
    """The same values as the sampling parameters of a request."""
    return SamplingParams(**vars(self))

  def problems(self, key: str) -> Iterator[str]:
    wrong = list(super().problems(key))
    yield from wrong
    if not wrong:  # each value is of the right type: is it in range, and do they go together?
      parts = [{name: value} for name, value in vars(self).items()]
      refused = [text for part in parts for text in _refused(part)] or _refused(vars(self))
      yield from (f"{key}.{text}" for text in refused)


def _refused(values: dict[str, Any]) -> list[str]:
  """What SamplingParams says against the values; empty if it takes them."""
  try:
    SamplingParams(**values)
  except RequestError as error:
    return [str(error)]
  return []


@dataclasses.dataclass(frozen=True)
class OffloadConfig(Section):
  """Cache memory beyond the device: host memory and a directory, in chunks sized per group.

  With a disk and no host_bytes, chunks pass through host memory only on their way.
  """

  KEY = "config.offload"

  host_bytes: int = key(0, "host memory for cached pages; 0: none", 0, 2**50)
  disk_path: str | None = key(None, "directory for cached pages; None: none")
  disk_bytes: int | None = key(
    None, "most bytes of cached pages in disk_path; None: until the disk is full", 1, 2**60
  )
  # A mapping has no hash; equal declarations still hash alike without it.
  blocks_per_chunk: int | Mapping[str, int] | None = key(
    None,
    "pages per chunk, of all groups or by group; None: near chunk_bytes, or from block_size",
    1,
    2**20,
    words="an integer in [1, 1048576], a mapping from group name to such integers, or None",
    test=lambda value: not isinstance(value, Mapping) or all(map(_count, value, value.values())),
    hashed=False,
  )
  block_size: int | None = key(
    None, "tokens per chunk, of all groups; a multiple of every page size", 1, 2**24
  )
  chunk_bytes: int = key(
    2**20,
    "bytes of a chunk to aim at where nothing else is said: copies are at full rate there",
    1,
    2**32,
  )
  policy: Literal["lru", "arc"] = key("lru", "which chunk leaves host memory first")
  store_after: int = key(0, "look-ups of a prefix before it is stored; 0: stored at once", 0, 1000)
  restore: Literal["auto", "always", "never"] = key(
    "auto", "take chunks back instead of computing again; auto: where the measured rates say so"
  )
  in_flight_bytes: int = key(2**28, "most bytes of chunks on their way at once", 1, 2**40)
  deadline_seconds: float = key(
    10.0, "how long a request waits for chunks from disk before they are computed", 0.001, 3600
  )

  @property
  def enabled(self) -> bool:
    return self.host_bytes > 0 or self.disk_path is not None

  def problems(self, key: str) -> Iterator[str]:
    yield from super().problems(key)
    if self.blocks_per_chunk is not None and self.block_size is not None:
      yield (
        f"{key}.blocks_per_chunk, {key}.block_size: expected one of them, got "
        f"{show(self.blocks_per_chunk)} and {show(self.block_size)}"
      )
    if self.disk_bytes is not None and self.disk_path is None:
      yield f"{key}.disk_bytes: expected {key}.disk_path beside it, got {self.disk_bytes} alone"


def _count(name: Any, value: Any) -> bool:
  if not isinstance(name, str) or not name:
    return False
  return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**20


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section):
  """The devices that share one model."""

  KEY = "config.mesh"

  tensor: int = key(1, "devices along the tensor axis", 1, 65536)


@dataclasses.dataclass(frozen=True)
class KernelsConfig(Section):
  """Which implementations compute; names are checked where the implementations are registered."""

  KEY = "config.kernels"

  attention: str | tuple[str, ...] = key(
    "auto",
    "attention implementations, tried in order; auto: chosen",
    words="a name, or a non-empty tuple of names",
    test=lambda value: value != (),
  )


def _is_line(line: str | dict[Any, Any]) -> bool:
  """Whether a sample prompt can be written as a line of JSON and read again."""
  try:
    return bool(json.loads(json.dumps(line)) == line)
  except (TypeError, ValueError, RecursionError):
    return False


_PROMPTS_RULE = Rule(
  "the experiment's own sample prompts",
  words='a tuple of non-empty strings or prompt lines such as {"messages": [...]}',
  test=lambda value: all(_is_line(line) for line in value),
  from_flag=False,
)


@dataclasses.dataclass(frozen=True)
class Config(Section):
  """One experiment: everything that `run.py` needs to serve a model.

  Raises:
    ConfigError: here and in every section, when a key is unknown, missing, of the wrong type or
      out of range; names each wrong key, what was expected and what came.
  """

  KEY = "config"

  model: ModelConfig
  cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
  scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
  sampling: SamplingDefaults = dataclasses.field(default_factory=SamplingDefaults)
  offload: OffloadConfig = dataclasses.field(default_factory=OffloadConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  kernels: KernelsConfig = dataclasses.field(default_factory=KernelsConfig)
  prompts: tuple[str | dict, ...] = dataclasses.field(
    default=(), hash=False, metadata={"rule": _PROMPTS_RULE}
  )

  def problems(self, key: str) -> Iterator[str]:
    yield from super().problems(key)
    model, scheduler = self.model, self.scheduler
    if not isinstance(model, ModelConfig) or not isinstance(scheduler, SchedulerConfig):
      return
    offload = isinstance(self.offload, OffloadConfig) and self.offload.enabled
    if offload and isinstance(self.cache, CacheConfig) and not self.cache.prefix_sharing:
      yield (
        f"{key}.cache.prefix_sharing: expected true with {key}.offload, whose chunks are found by "
        "prefix, got false"
      )
    if model.numerics == "batch_invariant" and scheduler.decode_steps > 1:
      yield (
        f"{key}.scheduler.decode_steps: expected 1 with {key}.model.numerics=batch_invariant, "
        f"got {scheduler.decode_steps}"
      )


@dataclasses.dataclass(frozen=True)
class Key:
  """One dotted key of the declaration; `*` stands for a group's name.

  A required key has dataclasses.MISSING for its default.
  """

  name: str
  kind: Any
  rule: Rule
  default: Any


def keys(section: type[Section] = Config) -> Iterator[Key]:
  """Every key that holds a value, in the order of declaration: the listing behind `--help`."""
  defaults = {field.name: field for field in dataclasses.fields(typing.cast(Any, section))}
  for name, kind, rule in declared_fields(section):
    if isinstance(kind, type) and issubclass(kind, Section):
      yield from keys(kind)
    elif typing.get_origin(kind) is Mapping:
      yield from keys(GroupConfig)
    else:
      yield Key(f"{section.KEY}.{name}", kind, rule, defaults[name].default)
