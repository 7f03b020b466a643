"""The declaration: what is served, from which memory, in what order. Checked where it is built.

Each field's annotation and `Rule` are the one table behind validation, flag parsing and help.
Every wrong key of a declaration is reported, each under its full dotted name.
"""

import dataclasses
import itertools
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from kvjax.request import SamplingParams
from kvjax.errors import ConfigError, RequestError, nearest, show


@dataclasses.dataclass(frozen=True)
class Rule:
  """What one key means and which values it takes, on top of its annotation.

  Attributes:
    help: one line for `--help`.
    low, high: inclusive bounds of a number, or of every number in a tuple.
    words: what is expected, in words; None derives them from the annotation and the bounds.
    test: a further condition on a value of the right type.
    from_flag: whether a flag's text can set the key.
  """

  help: str
  low: float = -math.inf
  high: float = math.inf
  words: str | None = None
  test: Callable[[Any], bool] | None = None
  from_flag: bool = True


def _key(
  default: Any, help: str, low: float = -math.inf, high: float = math.inf, **more: Any
) -> Any:
  """A dataclass field with its rule."""
  return dataclasses.field(default=default, metadata={"rule": Rule(help, low, high, **more)})


def fits(kind: Any, value: Any, rule: Rule) -> bool:
  """Whether `value` is of the annotated type `kind`, strictly, and within the rule's bounds.

  A bool is no int and a float no int; an int is good for a float.
  """
  origin, inner = typing.get_origin(kind), typing.get_args(kind)
  if origin is types.UnionType:
    return any(fits(each, value, rule) for each in inner)
  if origin is Literal:
    return isinstance(value, str) and value in inner
  if origin is tuple:
    return isinstance(value, tuple) and all(fits(inner[0], each, rule) for each in value)
  if origin is not None:  # the mapping of groups, whose entries CacheConfig checks
    return isinstance(value, origin)
  if kind in (int, float):
    allowed = int if kind is int else (int, float)
    number = isinstance(value, allowed) and not isinstance(value, bool)
    return number and rule.low <= value <= rule.high
  return isinstance(value, kind) and value != ""


def expected(kind: Any, rule: Rule) -> str:
  """The words for what `fits` accepts."""
  if rule.words is not None:
    return rule.words
  origin, inner = typing.get_origin(kind), typing.get_args(kind)
  if origin is types.UnionType:
    return " or ".join(expected(each, rule) for each in inner)
  if origin is Literal:
    return "one of " + ", ".join(map(repr, inner))
  if origin is tuple:
    return f"a tuple, each entry {expected(inner[0], rule)}"
  if origin is not None:
    return f"a mapping from group name to {inner[1].__name__}"
  if kind in (int, float):
    bounds = f" in [{rule.low}, {rule.high}]" if rule.high < math.inf else ""
    return ("an integer" if kind is int else "a number") + bounds
  names = {type(None): "None", bool: "true or false", str: "a non-empty string"}
  return names.get(kind) or f"a {kind.__name__}"


def unknown(section: str, name: str, valid: Iterable[str]) -> str:
  """The error text for `name`, which is not among the `valid` names of a section."""
  names = list(valid)
  elsewhere = [key.name for key in keys() if key.name.endswith(f".{name}") and "*" not in key.name]
  hint = nearest(name, names) or nearest(f"{section}.{name}", elsewhere)
  return f"{section}.{name}: there is no such key.{hint or ' Valid here: ' + ', '.join(names)}"


class _Checked(type):
  """Refuses unknown and missing keys as a ConfigError, before the dataclass's own __init__."""

  def __call__(cls, *args: Any, **kwargs: Any) -> Any:
    declared = dataclasses.fields(typing.cast(Any, cls))
    names = [field.name for field in declared]
    root = typing.cast(type[Section], cls).KEY
    wrong = [unknown(root, name, names) for name in kwargs if name not in names]
    wrong += [
      f"{root}.{field.name}: required, and missing"
      for field in declared[len(args) :]
      if field.name not in kwargs
      and field.default is dataclasses.MISSING
      and field.default_factory is dataclasses.MISSING
    ]
    if wrong:
      raise ConfigError("; ".join(wrong))
    return super().__call__(*args, **kwargs)


class Section(metaclass=_Checked):
  """Base of the declaration's dataclasses: `KEY` is the dotted name, the fields are its keys."""

  KEY: ClassVar[str]

  def __post_init__(self) -> None:
    wrong = list(self.problems(self.KEY))
    if wrong:
      raise ConfigError("; ".join(wrong))

  def problems(self, key: str) -> Iterator[str]:
    """One text for each wrong value, named below `key`."""
    for name, kind, rule in declared_fields(type(self)):
      value = getattr(self, name)
      if not fits(kind, value, rule) or (rule.test is not None and not rule.test(value)):
        yield f"{key}.{name}: expected {expected(kind, rule)}, got {show(value)}"


def declared_fields(section: type[Section]) -> Iterator[tuple[str, Any, Rule]]:
  """(name, annotated type, rule) of each key of a section."""
  kinds = typing.get_type_hints(section)
  for field in dataclasses.fields(typing.cast(Any, section)):
    yield field.name, kinds[field.name], field.metadata.get("rule", Rule(""))


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
  dtype: Literal["auto", "float32", "bfloat16"] = _key(
    "auto", "compute type; auto: bfloat16 on TPU and GPU, float32 on CPU"
  )
  max_length: int | None = _key(
    None, "tokens of prompt and output per sequence; None: the model's context", 1, 2**24
  )


@dataclasses.dataclass(frozen=True)
class GroupConfig(Section):
  """Overrides for the layers of one cache group.

  A group does not know its own name: its values are checked by the CacheConfig that names it.
  """

  KEY = "config.cache.groups.*"

  page_size: int | None = _key(None, "tokens per page; None: cache.page_size", 1, 65536)
  pages: int | None = _key(None, "pages in the pool; None: planned from memory", 1, 2**31 - 1)

  def __post_init__(self) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class CacheConfig(Section):
  """Device memory for keys and values, and how each group cuts it into pages."""

  KEY = "config.cache"

  page_size: int = _key(16, "tokens per page, for every group that does not say", 1, 65536)
  memory_bytes: int | None = _key(
    None, "device bytes for the pools of all groups; None: planned from device memory", 1, 2**50
  )
  dtype: Literal["auto", "float32", "bfloat16"] = _key(
    "auto", "type of keys and values in memory; auto: the model's"
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

  max_sequences: int = _key(16, "sequences that run at once", 1, 4096)
  token_budget: int = _key(256, "most prefill tokens per step", 1, 65536)
  query_block: int = _key(
    64,
    "tokens per prefill query block",
    words="a power of two in [8, 256]",
    test=lambda value: value in (8, 16, 32, 64, 128, 256),
  )
  decode_steps: int = _key(1, "decode steps per call", 1, 64)
  decode_buckets: tuple[int, ...] = _key(
    (),
    "sequences per compiled decode shape; empty: chosen",
    1,
    4096,
    words="a tuple of strictly increasing integers in [1, 4096]",
    test=_increasing,
  )
  prefill_buckets: tuple[int, ...] = _key(
    (),
    "tokens per compiled prefill shape; empty: chosen",
    1,
    65536,
    words="a tuple of strictly increasing integers in [1, 65536]",
    test=_increasing,
  )
  overlap: bool = _key(True, "plan the next step while the device runs this one")


@dataclasses.dataclass(frozen=True)
class SamplingDefaults(Section):
  """Sampling of the prompts that do not say; the ranges are those of SamplingParams."""

  KEY = "config.sampling"

  max_tokens: int | None = _key(256, "most new tokens; None: all that the context allows")
  min_tokens: int = _key(0, "new tokens before an end-of-sequence or stop id may end the output")
  temperature: float = _key(1.0, "0 is greedy")
  top_p: float = _key(1.0, "keep the most likely tokens up to this probability")
  top_k: int = _key(0, "keep the k most likely tokens; 0 keeps all")
  min_p: float = _key(0.0, "drop tokens below this share of the most likely one")
  repetition_penalty: float = _key(1.0, "against tokens of prompt and output; 1 is none")
  presence_penalty: float = _key(0.0, "subtracted once for each token of the output")
  frequency_penalty: float = _key(0.0, "subtracted for each occurrence in the output")
  seed: int | None = _key(None, "of all randomness; None: drawn from the prompt's place")
  stop: tuple[str, ...] = _key((), 'strings that end the output; if one has a comma: ["a,b"]')
  ignore_eos: bool = _key(False, "run past the model's end of sequence")

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
  """Cache memory beyond the device."""

  KEY = "config.offload"

  host_bytes: int = _key(
    0,
    "host memory for cache pages; only 0 in this version",
    0,
    0,
    words="0 (host offload is not available in this version)",
  )


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section):
  """The devices that share one model."""

  KEY = "config.mesh"

  tensor: int = _key(1, "devices along the tensor axis", 1, 65536)


@dataclasses.dataclass(frozen=True)
class KernelsConfig(Section):
  """Which implementations compute; names are checked where the implementations are registered."""

  KEY = "config.kernels"

  attention: str | tuple[str, ...] = _key(
    "auto",
    "attention implementations, tried in order; auto: chosen",
    words="a name, or a non-empty tuple of names",
    test=lambda value: value != (),
  )


_PROMPTS_RULE = Rule(
  "the experiment's own sample prompts",
  words='a tuple of non-empty strings or prompt lines such as {"messages": [...]}',
  test=lambda value: all(
    isinstance(name, str) for line in value if isinstance(line, dict) for name in line
  ),
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
