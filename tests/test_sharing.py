"""Sharing in the engine: the same tokens cold, warm, shared, forked, preempted, alone, in company.

Each test also asserts that the event took place. Tiny models, float32.
"""

import dataclasses
import functools

import numpy as np
import pytest

import kvjax
from kvjax import config as C
from kvjax import testing
from kvjax.errors import ConfigError, RequestError

MAX_LENGTH = 128


GROUPS = {
  "full": ("full",),
  "mixed": ("full", "sliding"),
  "varied": ("full", "sliding", "sliding2"),
}
KINDS = ("mixed", "varied")


@functools.cache
def model(kind):
  return testing.tiny_model(kind)


def engine(kind="mixed", *, cache=None, **scheduler):
  base = {"max_sequences": 4, "token_budget": 32, "query_block": 8}
  base |= {"decode_buckets": (64,), "prefill_buckets": (64,)}
  roomy = {name: C.GroupConfig(pages=300) for name in GROUPS[kind]}
  cache = C.CacheConfig(page_size=4, groups=roomy) if cache is None else cache
  config = C.Config(
    model=C.ModelConfig(source="gguf:tiny", max_length=MAX_LENGTH),
    cache=dataclasses.replace(cache, check_invariants=True),
    scheduler=C.SchedulerConfig(**(base | scheduler)),
  )
  return kvjax.Engine(model(kind), config)


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "logprobs": 2}


def request(name, ids, seed=1, salt=None, **sampling):
  fields = {"max_tokens": 10, "ignore_eos": True, "temperature": 0} | sampling
  return kvjax.Request(name, tuple(ids), kvjax.SamplingParams(**fields), seed, cache_salt=salt)


def prompt(seed, count, stem=()):
  rng = np.random.default_rng(seed)
  return (*stem, *(int(t) for t in rng.integers(3, 260, count)))


def run(e, *requests):
  for r in requests:
    e.add(r)
  return {(c.request_id, c.index): c for c in e.run()}


def tokens(done):
  return {key: c.token_ids for key, c in done.items()}


def sources(e):
  return e.figures()["prompt_tokens_by_source"]


def off(page_size=4):
  return C.CacheConfig(page_size=page_size, prefix_sharing=False)


STEM = prompt(0, 41)


def family(count=5, **sampling):
  """Requests with a common stem, half of them sampled with penalties that read the prompt."""
  return [
    request(f"r{i}", prompt(i + 1, 3 + 2 * i, STEM), i, **(sampling | (SAMPLED if i % 2 else {})))
    for i in range(count)
  ]


@functools.cache
def expected(kind):
  """Every request of the family alone and cold."""
  out = {}
  e = engine(kind, cache=off(), max_sequences=1)
  for r in family():
    out |= run(e, r)
  assert sources(e)["device"] == 0
  return tokens(out)


@pytest.mark.parametrize("kind", KINDS)
def test_warm_is_cold(kind):
  """One after the other: all but the first find the stem."""
  e = engine(kind)
  done = {}
  for r in family():
    done |= run(e, r)
  assert tokens(done) == expected(kind)
  assert sources(e)["device"] == 4 * 40
  assert e.figures()["prefill_tokens"] == sources(e)["computed"]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", GROUPS)
def test_shared_in_flight_is_cold(kind):
  """All at once: the stem is computed once, by the first."""
  e = engine(kind, max_sequences=8)
  assert tokens(run(e, *family())) == expected(kind)
  assert sources(e)["device"] == 4 * 40
  assert sum(sources(e).values()) == sum(len(r.prompt_token_ids) for r in family())


@pytest.mark.parametrize("kind", KINDS)
def test_identical_prompts_are_computed_once(kind):
  """The same prompt four times: the last page's tokens are computed by each, the rest once."""
  same = [request(f"r{i}", STEM) for i in range(4)]
  e = engine(kind)
  done = tokens(run(e, *same))
  assert len(set(done.values())) == 1
  assert sources(e) == {"computed": 41 + 3 * 1, "device": 3 * 40, "host": 0, "disk": 0}


def test_the_same_long_prompt_four_times():
  """Windows much shorter than the prompt, more than half of all layers: four equal answers."""
  long = prompt(5, 100)
  e = engine("mixed")
  done = [tokens(run(e, request(f"r{i}", long)))[f"r{i}", 0] for i in range(4)]
  assert len(set(done)) == 1
  assert done[0] == tokens(run(engine("mixed", cache=off()), request("a", long)))["a", 0]
  assert sources(e)["device"] == 3 * 96


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 40, 41])
def test_completions_of_one_prompt_fork(kind, length):
  """n > 1: the prompt is computed once and shared; only its last token is fed to each."""
  r = request("r", prompt(3, length), n=4, seed=9, **SAMPLED | {"temperature": 0.9})
  cold = tokens(run(engine(kind, cache=off()), r))
  e = engine(kind)
  assert tokens(run(e, r)) == cold
  assert len(set(cold.values())) > 1
  if length > 1:
    expected = {"computed": length + 3, "device": 3 * (length - 1), "host": 0, "disk": 0}
    assert sources(e) == expected
    assert "copies of shared pages" in e.figures()["compilations"]["shapes"]


@pytest.mark.parametrize("slots", [1, 3])
def test_completions_that_find_no_slot_share_what_is_left(slots):
  r = request("r", STEM, n=6, seed=9, **SAMPLED | {"temperature": 0.9})
  e = engine("mixed", max_sequences=slots)
  assert tokens(run(e, r)) == tokens(run(engine("mixed", cache=off()), r))
  assert sources(e)["device"] >= 5 * 40


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_and_resumed_from_what_is_cached(kind):
  """Pools too small for all: some are preempted, and come back to pages that are still there."""
  groups = {name: C.GroupConfig(pages=31) for name in GROUPS[kind]}
  e = engine(kind, cache=C.CacheConfig(page_size=4, groups=groups))
  items = [
    request(f"r{i}", prompt(i + 1, 20), i, max_tokens=40, **(SAMPLED if i % 2 else {}))
    for i in range(6)
  ]
  done = tokens(run(e, *items))
  figures = e.figures()
  assert figures["preemptions"] > 0
  assert figures["restored_tokens"] > 0
  assert figures["prompt_tokens"] == sum(len(r.prompt_token_ids) for r in items)
  assert done == tokens(run(engine(kind, cache=off()), *items))


def test_a_conversation_goes_on_from_its_own_answer():
  e = engine("mixed")
  first = run(e, request("a", STEM, max_tokens=30))["a", 0]
  turn = (*STEM, *first.token_ids, *prompt(8, 6))
  got = run(e, request("b", turn))
  assert sources(e)["device"] >= 68
  assert (
    tokens(got)["b", 0] == tokens(run(engine("mixed", cache=off()), request("b", turn)))["b", 0]
  )


def test_switched_off_nothing_is_shared():
  e = engine("mixed", cache=off())
  run(e, *family(), request("n", STEM, n=3))
  assert sources(e)["device"] == 0
  assert all(g["cached"] == 0 for g in e.figures()["pages"].values())


def test_salts_isolate():
  e = engine("mixed")
  run(e, request("a", STEM, salt="x"))
  run(e, request("b", STEM, salt="y"), request("c", STEM))
  assert sources(e)["device"] == 0
  run(e, request("d", STEM, salt="x"))
  assert sources(e)["device"] == 40


@pytest.mark.parametrize("bad", ["", 7])
def test_a_salt_is_a_non_empty_string(bad):
  with pytest.raises(RequestError, match="cache_salt: expected a non-empty string"):
    request("a", STEM, salt=bad)


def test_prefix_sharing_is_a_bool():
  with pytest.raises(ConfigError, match=r"cache\.prefix_sharing: expected true or false"):
    C.CacheConfig(prefix_sharing=1)


def test_reset_forgets():
  e = engine("mixed")
  run(e, request("a", STEM))
  e.reset_prefix_cache()
  assert all(g["cached"] == 0 for g in e.figures()["pages"].values())
  assert tokens(run(e, request("b", STEM)))["b", 0] == tokens(run(e, request("c", STEM)))["c", 0]
  assert sources(e)["device"] == 40


def test_aborting_the_first_leaves_the_others_right():
  """The one that computes the common prefix goes away while others wait for it."""
  e = engine("mixed", token_budget=8)
  items = family()
  for r in items:
    e.add(r)
  e.step()
  e.step()
  e.abort("r0")
  done = {(c.request_id, c.index): c for c in e.run()}
  assert done["r0", 0].finish_reason == "abort"
  rest = {k: v for k, v in tokens(done).items() if k[0] != "r0"}
  assert rest == {k: v for k, v in expected("mixed").items() if k[0] != "r0"}
  assert sources(e)["device"] >= 3 * 40


def test_priorities_do_not_change_tokens():
  e = engine("mixed", max_sequences=2)
  items = [dataclasses.replace(r, priority=-i) for i, r in enumerate(family())]
  for r in items[:2]:
    e.add(r)
  e.step()
  e.step()
  done = run(e, *items[2:])
  assert next(iter(done))[0] in {"r3", "r4"}
  assert tokens(done) == expected("mixed")
  assert e.figures()["preemptions"] > 0


def test_eviction_is_counted_and_harmless():
  groups = {"full": C.GroupConfig(pages=33), "sliding": C.GroupConfig(pages=24)}
  e = engine("mixed", cache=C.CacheConfig(page_size=4, groups=groups))
  answers = []
  for i in range(12):
    answers.append(tokens(run(e, request(f"r{i}", prompt(i % 5, 60))))[f"r{i}", 0])
    assert answers[i] == answers[i % 5]
  figures = e.figures()["pages"]
  assert figures["full"]["evictions"] > 0
  assert all(g["used"] + g["cached"] + g["free"] == g["total"] for g in figures.values())


def test_steady_sharing_compiles_nothing():
  e = engine("mixed")
  run(e, *family(), request("n", STEM, n=3))
  counts = []
  for again in range(3):
    items = [dataclasses.replace(r, id=f"{again} {r.id}") for r in family()]
    run(e, *items, request("m", STEM, n=3), request("x", prompt(again + 50, 30)))
    counts.append(e.figures()["compilations"]["count"])
  assert counts[0] == counts[1] == counts[2]
