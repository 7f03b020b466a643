"""Sections of a declaration: dataclasses whose fields carry rules, checked where they are built.

A field's annotation and its `Rule` say which values it takes. Every wrong key of a section is
reported in one error, each under its full dotted name.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from kvjax.errors import ConfigError, nearest, show


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


def key(
  default: Any,
  help: str,
  low: float = -math.inf,
  high: float = math.inf,
  *,
  hashed: bool | None = None,
  **more: Any,
) -> Any:
  """A dataclass field with its rule; `hashed=False` keeps it out of the section's hash."""
  rule = Rule(help, low, high, **more)
  return dataclasses.field(default=default, hash=hashed, metadata={"rule": rule})


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
  elsewhere = [
    f"{each.KEY}.{name}"
    for each in Section.__subclasses__()
    for key, kind, _ in declared_fields(each)
    if key == name and "*" not in each.KEY and not _has_keys(kind)
  ]
  hint = nearest(name, names) or nearest(f"{section}.{name}", elsewhere)
  return f"{section}.{name}: there is no such key.{hint or ' Valid here: ' + ', '.join(names)}"


def _has_keys(kind: Any) -> bool:
  """Whether a field of this type holds further keys rather than a value."""
  section = isinstance(kind, type) and issubclass(kind, Section)
  return section or typing.get_origin(kind) is Mapping


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
