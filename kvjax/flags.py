"""Config files and dotted flags: `--config=FILE --config.cache.page_size=32`.

A script defines the flag and lets this module parse the command line:

  CONFIG = kvjax.flags.DEFINE_config()

  def main(argv):
    config = CONFIG.value  # a kvjax.config.Config

  if __name__ == "__main__":
    app.run(main, flags_parser=kvjax.flags.parse)

Flags of the script's own stand beside it. Overrides apply in any order, before or after
`--config`; of one key given twice the last counts. A wrong command line, config file or value is
one line on stderr and exit status 2.

Own code rather than ml_collections.config_flags, because that sets attributes of the config in
place (a frozen dataclass has none to set), takes the first types it can convert to and cannot add
an entry to a mapping.
"""

import dataclasses
import json
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from absl import flags

from kvjax.config import (
  Config,
  GroupConfig,
  Section,
  declared_fields,
  keys,
)
from kvjax.errors import ConfigError, nearest, show
from kvjax.rules import expected, unknown

# absl lists these flags in `--help` under the script that calls DEFINE_config.
flags.disclaim_key_flags()


def convert(kind: Any, text: str) -> Any:
  """The value of the annotated type `kind` that a flag's text stands for, else the text itself.

  "none" is None where None is allowed; a tuple is comma-separated, or a JSON array; a mapping is a
  JSON object. Text that
  cannot be converted is left for validation, which names the key and what was expected.
  """
  origin, inner = typing.get_origin(kind), typing.get_args(kind)
  if origin is types.UnionType:
    if types.NoneType in inner and text.lower() == "none":
      return None
    if any(typing.get_origin(each) is Mapping for each in inner) and text.startswith("{"):
      try:
        return json.loads(text)
      except (ValueError, RecursionError):
        return text
    tuples = [each for each in inner if typing.get_origin(each) is tuple]
    single = [each for each in inner if each not in tuples and each is not types.NoneType]
    several = "," in text or text.startswith("[")
    return convert((tuples if tuples and several else single)[0], text)
  if origin is tuple:
    if text.startswith("["):
      try:
        return tuple(json.loads(text))
      except (ValueError, RecursionError):
        return text
    return tuple(convert(inner[0], each) for each in text.split(",")) if text else ()
  if kind is bool:
    return {"true": True, "false": False}.get(text.lower(), text)
  if kind is int and re.fullmatch(r"[+-]?[0-9]{1,30}", text):
    return int(text)
  if kind is float and re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
    return float(text)
  return text


def override(config: Config, changes: Mapping[str, Any]) -> Config:
  """A config with some keys replaced.

  Args:
    config: left as it is.
    changes: dotted key below `config` (`"cache.page_size"`, `"cache.groups.sliding.pages"`, where
      the group's entry need not exist) -> value. A str is converted to the key's type, as from the
      command line; anything else is taken as it is.

  Raises:
    ConfigError: names every unknown key and every value of the wrong type or out of range.
  """
  wrong: list[str] = []
  paths = {tuple(key.split(".")): value for key, value in changes.items()}
  changed = _replace(config, paths, Config.KEY, wrong)
  if wrong:
    raise ConfigError("; ".join(wrong))
  return changed


_Paths = Mapping[tuple[str, ...], Any]


def _replace(section: Any, paths: _Paths, root: str, wrong: list[str]) -> Any:
  """`section` with the values at `paths` below it; what cannot be done is appended to `wrong`."""
  declared = {name: (kind, rule) for name, kind, rule in declared_fields(type(section))}
  values: dict[str, Any] = {}
  for name in dict.fromkeys(path[0] for path in paths):
    key = f"{root}.{name}"
    if name not in declared:
      wrong.append(unknown(root, name, declared))
      continue
    kind, rule = declared[name]
    below = {path[1:]: value for path, value in paths.items() if path[0] == name}
    value = below.pop((), getattr(section, name))
    if typing.get_origin(kind) is Mapping:
      values[name] = _replace_groups(value, below, key, wrong)
    elif isinstance(value, Section):
      values[name] = _replace(value, below, key, wrong)
    elif isinstance(value, str) and isinstance(kind, type) and issubclass(kind, Section):
      wrong.append(_no_value(key, value, (each for each, *_ in declared_fields(kind))))
    elif below:
      wrong += [f"{key}.{'.'.join(path)}: there is no such key; {key} is a value" for path in below]
    elif isinstance(value, str) and not rule.from_flag:
      wrong.append(f"{key}: expected in the config file, as {expected(kind, rule)}; not as a flag")
    else:
      values[name] = convert(kind, value) if isinstance(value, str) else value
  try:
    return dataclasses.replace(section, **values)
  except ConfigError as error:
    wrong.append(str(error))
    return section


def _replace_groups(groups: Any, paths: _Paths, root: str, wrong: list[str]) -> Any:
  """The mapping of groups with the entries at `paths` replaced or created."""
  names = [name for name, *_ in declared_fields(GroupConfig)]
  if isinstance(groups, str):
    wrong.append(_no_value(root, groups, [f"GROUP.{name}" for name in names]))
    return {}
  if not isinstance(groups, Mapping):
    return groups
  changed = dict(groups)
  for group in dict.fromkeys(path[0] for path in paths):
    below = {path[1:]: value for path, value in paths.items() if path[0] == group}
    entry = below.pop((), changed.get(group, GroupConfig()))
    if isinstance(entry, str):
      wrong.append(_no_value(f"{root}.{group}", entry, names))
    elif isinstance(entry, GroupConfig):
      changed[group] = _replace(entry, below, f"{root}.{group}", wrong)
    else:
      changed[group] = entry
  return changed


def _no_value(key: str, text: str, names: Iterable[str]) -> str:
  one = ", ".join(names)
  return f"{key}: expected a value for {key}.NAME, NAME being one of {one}, got {show(text)}"


def load_config_file(path: str | os.PathLike[str]) -> Config:
  """The Config that a Python file's `get_config()` returns.

  Raises:
    ConfigError: the file is missing, cannot be read, raises, has no `get_config`, or returns
      something else; names the file, and the line where that is known.
  """
  file = Path(path)
  try:
    source = file.read_bytes()
  except (FileNotFoundError, NotADirectoryError):
    near = nearest(file.name, (each.name for each in file.parent.glob("*.py")))
    raise ConfigError(f"{file}: expected a Python config file, found no such file.{near}") from None
  except (OSError, ValueError) as error:
    raise ConfigError(f"{file}: expected a Python config file, cannot read it: {error}") from None
  module = types.ModuleType("kvjax_config_file")
  module.__file__ = str(file)
  sys.modules[module.__name__] = module  # where dataclasses look up the file's own classes
  try:
    exec(compile(source, str(file), "exec"), module.__dict__)
  except Exception as error:
    _raised(file, error)
  get_config = module.__dict__.get("get_config")
  if not callable(get_config):
    raise ConfigError(f"{file}: expected a function get_config() that returns a kvjax Config")
  try:
    config = get_config()
  except Exception as error:
    _raised(file, error)
  if not isinstance(config, Config):
    raise ConfigError(
      f"{file}: expected get_config() to return a kvjax Config, got {show(config)}"
      + (". Is its return statement missing?" if config is None else "")
    )
  return config


def _raised(file: Path, error: Exception) -> NoReturn:
  """Raises a ConfigError with the line of the config file at which `error` came up."""
  lines = [
    frame.lineno
    for frame in traceback.extract_tb(error.__traceback__)
    if frame.filename == str(file)
  ]
  if isinstance(error, SyntaxError) and error.filename == str(file):
    lines.append(error.lineno)
  where = f"{file}, line {lines[-1]}" if lines else f"{file}"
  what = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
  raise ConfigError(f"{where}: {what}") from error


class _Words(flags.ArgumentParser[str]):
  """Leaves conversion to `override`, which knows the key; says in `--help` what is expected."""

  def __init__(self, words: str):
    self.syntactic_help = words


class _OverrideFlag(flags.Flag[str]):
  """The text of one dotted key."""

  def __init__(self, name: str, help: str, words: str):
    super().__init__(_Words(words), flags.ArgumentSerializer(), name, None, help)


class _FileFlag(flags.Flag[str]):
  """The path of the config file; knows the holder that combines it with the overrides."""

  def __init__(self, name: str, default: str | None, help: str, holder: "ConfigHolder"):
    super().__init__(_Words("a path"), flags.ArgumentSerializer(), name, default, help)
    self.holder = holder


class ConfigHolder:
  """What DEFINE_config returns; `value` is the config once the command line is parsed."""

  def __init__(self, name: str, flag_values: flags.FlagValues):
    self.name = name
    self._flags = flag_values
    self._made: tuple[str, dict[str, str], Config] | None = None

  @property
  def value(self) -> Config:
    """The file's config with the overrides.

    Raises:
      ConfigError: no file was given, or the file or an override is wrong.
      absl.flags.UnparsedFlagAccessError: the command line is not parsed yet.
    """
    path: str | None = getattr(self._flags, self.name)
    if not path:
      raise ConfigError(f"--{self.name}: required, such as --{self.name}=configs/smollm2.py")
    overrides = self.overrides
    if self._made is None or self._made[:2] != (path, overrides):
      self._made = (path, overrides, override(load_config_file(path), overrides))
    return self._made[2]

  @property
  def overrides(self) -> dict[str, str]:
    """Dotted key below the config -> the text given on the command line."""
    prefix = f"{self.name}."
    given = {name: self._flags[name] for name in self._flags if name.startswith(prefix)}
    return {
      name[len(prefix) :]: flag.value for name, flag in given.items() if flag.value is not None
    }


def DEFINE_config(
  name: str = "config",
  default: str | None = None,
  help: str = "Python file whose get_config() returns the Config of the experiment",
  flag_values: flags.FlagValues = flags.FLAGS,
) -> ConfigHolder:
  """Defines `--NAME=FILE` and a flag `--NAME.KEY` for every dotted key, listed by `--help`.

  Keys of groups (`--NAME.cache.groups.GROUP.page_size`) and the answer to unknown keys need
  `parse` as the flags_parser of `absl.app.run`.

  Args:
    default: path of the file if the flag is not given; None makes the flag required.
  """
  holder = ConfigHolder(name, flag_values)
  groups = [key.name.split("*.")[1] for key in keys(GroupConfig)]
  help += f"; groups have --{name}.cache.groups.GROUP.KEY for KEY in {', '.join(groups)}"
  flags.DEFINE_flag(_FileFlag(name, default, help, holder), flag_values)
  for key in keys():
    if key.rule.from_flag and "*" not in key.name:
      words = expected(key.kind, key.rule)
      if key.default is not dataclasses.MISSING:
        words += f"; default {key.default}"
      flag = _OverrideFlag(key.name.replace(Config.KEY, name, 1), key.rule.help, words)
      flags.DEFINE_flag(flag, flag_values)
  return holder


def parse(argv: list[str], flag_values: flags.FlagValues = flags.FLAGS) -> list[str]:
  """Parses the command line for `absl.app.run(main, flags_parser=kvjax.flags.parse)`.

  Loads the config of every DEFINE_config, so that whatever is wrong shows before main runs: one
  line on stderr, exit status 2.

  Args:
    argv: program name and arguments.

  Returns:
    Program name and what is left besides flags.
  """
  try:
    argv = [argv[0], *flag_values.read_flags_from_files(argv[1:], force_gnu=False)]
    files = [flag_values[name] for name in flag_values]
    holders = [flag.holder for flag in files if isinstance(flag, _FileFlag)]
    for holder in holders:
      # absl refuses flags that it does not know. Known to it, a group's key can be set, and a
      # wrong key is answered by the declaration, with the nearest name that exists.
      for arg in argv[1 : argv.index("--") if "--" in argv else None]:
        match = re.match(rf"--?({re.escape(holder.name)}\.[^=\s]+)(=|$)", arg)
        if match and match[1] not in flag_values:
          flag = _OverrideFlag(match[1], "given on the command line", "text")
          flags.DEFINE_flag(flag, flag_values)
    rest: list[str] = flag_values(argv)
    for holder in holders:
      _ = holder.value
    return rest
  except (flags.Error, ConfigError) as error:
    program = os.path.basename(argv[0])
    print(f"{program}: {' '.join(str(error).splitlines())}", file=sys.stderr)
    sys.exit(2)
