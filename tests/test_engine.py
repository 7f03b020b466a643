"""The engine on tiny models: same tokens whatever happens around a request, and what it refuses."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax import config as C
from kvjax import pages as pages_lib
from kvjax import testing
from kvjax.engine.sequence import _seed_words
from kvjax.errors import ConfigError, RequestError

MAX_LENGTH = 96


@functools.cache
def model(kind):
  return testing.tiny_model(kind)


def declare(kind="mixed", *, cache=None, tensor=1, **scheduler):
  # One bucket each: three shapes to compile.
  base = {"max_sequences": 4, "token_budget": 16, "query_block": 8}
  base |= {"decode_buckets": (64,), "prefill_buckets": (64,)}
  return C.Config(
    model=C.ModelConfig(source="gguf:tiny", max_length=MAX_LENGTH),
    cache=cache or C.CacheConfig(page_size=4),
    scheduler=C.SchedulerConfig(**(base | scheduler)),
    mesh=C.MeshConfig(tensor=tensor),
  )


def engine(kind="mixed", **more):
  return kvjax.Engine(model(kind), declare(kind, **more))


def tight(kind, pages, page_size=4):
  """A cache in which every group has exactly `pages` pages."""
  names = [g.name for g in kvjax.plan(model(kind).spec, max_length=MAX_LENGTH)]
  return C.CacheConfig(groups={n: C.GroupConfig(page_size=page_size, pages=pages) for n in names})


def requests(kind, count=7, **sampling):
  """Prompts of 1 to 40 tokens, some greedy, some sampled with every option."""
  rng = np.random.default_rng(count)
  vocabulary = model(kind).spec.vocab_size
  out = []
  for i in range(count):
    ids = tuple(int(t) for t in rng.integers(3, vocabulary, rng.integers(1, 41)))
    fields = {"max_tokens": int(rng.integers(8, 25)), "ignore_eos": True, "temperature": 0}
    if i % 2:
      fields |= {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logprobs": 3,
      }
    out.append(
      kvjax.Request(f"r{i}", ids, kvjax.SamplingParams(**(fields | sampling)), default_seed=i)
    )
  return out


def serve(e, items):
  """Completions by (id, index), with every invariant of the tables checked after every step."""
  for r in items:
    e.add(r)
  done = {}
  while e.unfinished:
    for c in e.step():
      done[c.request_id, c.index] = c
    pages_lib.check(e._cache.pages, e.layout)
  e.close()
  for group in e.figures()["pages"].values():
    assert group["used"] == 0
  return done


def tokens(done):
  return {key: c.token_ids for key, c in done.items()}


@functools.cache
def expected(kind):
  """Each request served alone, without overlap, in whole prompts and roomy pools."""
  out = {}
  e = engine(kind, max_sequences=1, token_budget=64, query_block=64, overlap=False)
  for r in requests(kind):
    out |= serve(e, [r])
  return tokens(out)


VARIANTS = {
  "together": {},
  "buckets": {"decode_buckets": (), "prefill_buckets": ()},
  "page 1": {"cache": C.CacheConfig(page_size=1)},
  "page 16, chunk 3": {"cache": C.CacheConfig(page_size=16), "token_budget": 3},
  "several steps a call": {"decode_steps": 4},
  "no overlap": {"overlap": False},
  "many slots": {"max_sequences": 16, "token_budget": 64, "query_block": 16},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_company_changes_nothing(variant):
  e = engine("mixed", **VARIANTS[variant])
  assert tokens(serve(e, requests("mixed"))) == expected("mixed")
  assert e.figures()["preemptions"] == 0


def test_company_changes_nothing_with_one_group():
  e = engine("full")
  assert len(e.layout) == 1
  assert tokens(serve(e, requests("full"))) == expected("full")


@pytest.mark.parametrize(("kind", "decode_steps"), [("full", 1), ("mixed", 1), ("mixed", 3)])
def test_preemption_changes_nothing(kind, decode_steps):
  need = max(
    g.peak_pages(64, 16) for g in kvjax.plan(model(kind).spec, tight(kind, 1), max_length=64)
  )
  e = engine(kind, cache=tight(kind, need + 2), decode_steps=decode_steps)
  done = serve(e, requests(kind))
  assert tokens(done) == expected(kind)
  figures = e.figures()
  assert figures["preemptions"] > 0
  assert figures["recomputed_tokens"] > 0
  assert figures["prompt_tokens"] == sum(len(r.prompt_token_ids) for r in requests(kind))
  assert figures["decode_tokens"] == sum(len(c.token_ids) for c in done.values())


def test_unequal_page_sizes_change_nothing():
  sizes = {"full": 16, "sliding": 3}
  cache = C.CacheConfig(groups={n: C.GroupConfig(page_size=s) for n, s in sizes.items()})
  e = engine("mixed", cache=cache)
  assert {g.name: g.page_size for g in e.layout} == sizes
  assert tokens(serve(e, requests("mixed"))) == expected("mixed")


@pytest.mark.smoke
def test_requests_join_while_others_run():
  e = engine("mixed")
  items = requests("mixed")
  done = {}
  for r in items:
    e.add(r)
    done |= {(c.request_id, c.index): c for c in [*e.step(), *e.step()]}
  done |= {(c.request_id, c.index): c for c in e.run()}
  assert tokens(done) == expected("mixed")


def test_same_run_twice_is_the_same_in_order():
  runs = [list(serve(engine("mixed"), requests("mixed")).values()) for _ in range(2)]
  assert runs[0] == runs[1]


def test_sliding_pages_are_given_back_as_the_window_passes():
  e = engine("mixed")
  e.add(requests("mixed", 1, max_tokens=60)[0])
  sliding = next(i for i, g in enumerate(e.layout) if g.name == "sliding")
  g = e.layout[sliding]
  most = -(-(g.retention.window - 1 + 16) // g.page_size) + 1
  while e.unfinished:
    e.step()
    p = e._cache.pages[sliding]
    assert (p.last - p.first).max() <= most
  assert e.metrics.peak_pages["full"] > e.metrics.peak_pages["sliding"]


@pytest.mark.smoke
def test_completions_of_one_request_differ_and_repeat():
  r = dataclasses.replace(
    requests("full", 2)[1],
    sampling=kvjax.SamplingParams(max_tokens=12, n=5, seed=7, ignore_eos=True),
  )
  done = serve(engine("full"), [r])
  assert sorted(done) == [("r1", i) for i in range(5)]
  assert len(set(tokens(done).values())) > 1
  assert tokens(done) == tokens(serve(engine("full", max_sequences=2), [r]))
  other = dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, seed=8))
  assert tokens(serve(engine("full"), [other])) != tokens(done)


def test_stop_token_ends_without_its_text():
  greedy = requests("full", 1)[0]
  whole = serve(engine("full"), [greedy])["r0", 0]
  stop = whole.token_ids[5]
  at = whole.token_ids.index(stop)
  r = dataclasses.replace(
    greedy, sampling=dataclasses.replace(greedy.sampling, stop_token_ids=(stop,))
  )
  c = serve(engine("full"), [r])["r0", 0]
  assert c.finish_reason == "stop"
  assert c.token_ids == whole.token_ids[: at + 1]
  assert c.text == model("full").tokenizer.decode(whole.token_ids[:at])


def test_min_tokens_holds_stop_ids_back():
  greedy = requests("full", 1)[0]
  first = serve(engine("full"), [greedy])["r0", 0].token_ids[0]
  sampling = dataclasses.replace(greedy.sampling, stop_token_ids=(first,), min_tokens=6)
  c = serve(engine("full"), [dataclasses.replace(greedy, sampling=sampling)])["r0", 0]
  assert first not in c.token_ids[:6]
  assert len(c.token_ids) >= 6


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_stop_string_across_token_borders(decode_steps):
  # Letters only, so that the text is one character per token.
  letters = [model("full").tokenizer.encode(c, add_special=False)[0] for c in "abcdefghij"]
  greedy = requests("full", 1, max_tokens=24, logit_bias=dict.fromkeys(letters, 100.0))[0]
  whole = serve(engine("full"), [greedy])["r0", 0]
  assert len(whole.text) == 24
  stop = whole.text[9:12]
  sampling = dataclasses.replace(greedy.sampling, stop=(stop,))
  e = engine("full", decode_steps=decode_steps)
  c = serve(e, [dataclasses.replace(greedy, sampling=sampling)])["r0", 0]
  assert c.finish_reason == "stop"
  assert c.text == whole.text[: whole.text.index(stop)]
  assert len(c.token_ids) < len(whole.token_ids)


def test_logit_bias_forces_and_forbids():
  r = requests("full", 1, logit_bias={5: 100.0}, max_tokens=6)[0]
  assert serve(engine("full"), [r])["r0", 0].token_ids == (5,) * 6
  plain = expected("full")["r0", 0]
  r = requests("full", 1, logit_bias={plain[0]: -100.0}, max_tokens=6)[0]
  assert plain[0] not in serve(engine("full"), [r])["r0", 0].token_ids


def test_logprobs_are_those_of_the_unmodified_logits():
  kind = "mixed"
  r = requests(kind, 2, max_tokens=8)[1]
  c = serve(engine(kind), [r])["r1", 0]
  assert [t.token_id for t in c.logprobs] == list(c.token_ids)
  ids = (*r.prompt_token_ids, *c.token_ids)
  logits = testing.reference_logits(model(kind).params, model(kind).spec, ids)
  for i, got in enumerate(c.logprobs):
    row = logits[len(r.prompt_token_ids) - 1 + i]
    row = row - np.log(np.exp(row - row.max()).sum()) - row.max()
    assert got.logprob == pytest.approx(row[got.token_id], abs=1e-4)
    best = np.argsort(-row)[:3]
    np.testing.assert_allclose([v for _, v in got.top], row[best], atol=1e-4)


def test_steady_state_compiles_nothing():
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
  )
  jax.jit(lambda x: x * 3 + 1)(1.0)  # too small for the cache on disk: the listener hears it
  assert compiled
  e = engine("mixed")
  serve(e, requests("mixed"))
  count = e.figures()["compilations"]["count"]
  assert count > 0
  compiled.clear()
  for r in requests("mixed", 9):
    e.add(dataclasses.replace(r, id=f"again-{r.id}"))
  for _ in e.run():
    pass
  assert compiled == []
  assert e.figures()["compilations"]["count"] == count


def test_every_shape_that_was_met_is_listed():
  from kvjax.engine.batching import shapes

  e = engine("mixed", decode_steps=4)
  serve(e, requests("mixed", 9))
  assert set(e._executor.compiled) <= set(shapes(e.config.scheduler))


@pytest.mark.parametrize("when", ["waiting", "running", "in flight"])
def test_abort_frees_exactly_what_it_held(when):
  e = engine("mixed")
  items = requests("mixed")
  for r in items:
    e.add(r)
  for _ in range({"waiting": 0, "running": 3, "in flight": 1}[when]):
    e.step()
  e.abort("r0")
  e.abort("nobody")
  done = {(c.request_id, c.index): c for c in e.run()}
  assert done["r0", 0].finish_reason == "abort"
  assert expected("mixed")["r0", 0][: len(done["r0", 0].token_ids)] == done["r0", 0].token_ids
  rest = {k: v for k, v in expected("mixed").items() if k[0] != "r0"}
  assert {k: c.token_ids for k, c in done.items() if k[0] != "r0"} == rest
  pages_lib.check(e._cache.pages, e.layout)
  assert all(g["used"] == 0 for g in e.figures()["pages"].values())


def test_context_end_finishes_with_length():
  r = kvjax.Request("long", tuple(range(3, 93)), kvjax.SamplingParams(ignore_eos=True))
  c = serve(engine("mixed"), [r])["long", 0]
  assert (c.finish_reason, len(c.token_ids)) == ("length", MAX_LENGTH - 90)


@pytest.mark.parametrize(
  ("ids", "fields", "key", "says"),
  [
    ((), {}, "prompt_token_ids", "at least one token"),
    ((-1,), {}, "prompt_token_ids", "-1"),
    ((10**6,), {}, "prompt_token_ids", "1000000"),
    ((3,) * MAX_LENGTH, {}, "prompt", f"at most {MAX_LENGTH - 1} tokens"),
    ((3,), {"stop_token_ids": (10**6,)}, "stop_token_ids", "1000000"),
    ((3,), {"min_tokens": MAX_LENGTH}, "min_tokens", f"at most the {MAX_LENGTH - 1} new tokens"),
    ((3,), {"logit_bias": {10**6: 1.0}}, "logit_bias", "1000000"),
  ],
)
def test_refusals(ids, fields, key, says):
  e = engine("full")
  with pytest.raises(RequestError, match=says) as error:
    e.add(kvjax.Request("bad", ids, kvjax.SamplingParams(**fields)))
  assert error.value.key == key
  assert e.unfinished == 0


def test_ids_in_flight_are_unique():
  e = engine("full")
  r = requests("full", 1)[0]
  e.add(r)
  with pytest.raises(RequestError, match="not in flight"):
    e.add(r)


def test_what_can_never_fit_is_refused_with_the_figures():
  e = engine("full", cache=tight("full", 5))
  with pytest.raises(RequestError, match=r"full: 6 of 5") as error:
    e.add(kvjax.Request("big", (3,) * 21, kvjax.SamplingParams(max_tokens=1)))
  assert error.value.key == "prompt"
  with pytest.raises(RequestError, match=r"at most 21 tokens.*9 prompt \+ 40 new") as error:
    e.add(kvjax.Request("big", (3,) * 9, kvjax.SamplingParams(max_tokens=40)))
  assert error.value.key == "max_tokens"
  # One more token than the pages hold: the last one is sampled, never written.
  e.add(kvjax.Request("fits", (3,) * 9, kvjax.SamplingParams(max_tokens=12, ignore_eos=True)))
  assert len(next(iter(e.run())).token_ids) == 12


def test_a_window_needs_fewer_pages_than_its_length_suggests():
  groups = {"full": C.GroupConfig(pages=24), "sliding": C.GroupConfig(pages=9)}
  e = engine("mixed", cache=C.CacheConfig(page_size=4, groups=groups))
  sliding = next(g for g in e.layout if g.name == "sliding")
  assert sliding.pages * 4 < 80
  sampling = kvjax.SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
  done = serve(e, [kvjax.Request("long", (3,) * 75, sampling)])
  assert len(done["long", 0].token_ids) == 10


def test_a_broken_model_gives_errors_not_answers():
  broken = dataclasses.replace(
    model("full"), params=jax.tree.map(lambda x: x * np.float32(np.nan), model("full").params)
  )
  e = kvjax.Engine(broken, declare("full"))
  done = serve(e, requests("full", 3))
  assert {c.finish_reason for c in done.values()} == {"error"}


def test_an_unknown_group_is_named():
  cache = C.CacheConfig(groups={"slidin": C.GroupConfig(page_size=4)})
  with pytest.raises(ConfigError, match=r"groups\.slidin.*Did you mean 'sliding'"):
    engine("mixed", cache=cache)


def test_figures_add_up():
  e = engine("mixed")
  items = requests("mixed")
  done = serve(e, items)
  f = e.figures()
  assert f["prompt_tokens"] == sum(len(r.prompt_token_ids) for r in items)
  assert sum(f["prompt_tokens_by_source"].values()) == f["prompt_tokens"]
  assert f["prefill_tokens"] == f["prompt_tokens"] + f["recomputed_tokens"]
  assert f["decode_tokens"] == sum(len(c.token_ids) for c in done.values())
  assert f["time_to_first_token_seconds"]["count"] == len(items)
  between = f["decode_tokens"] - len(items)
  assert f["time_between_tokens_seconds"]["count"] == between
  assert f["completions"] == len(items)
  for group in f["pages"].values():
    assert 0 <= group["waste"] < 1
    assert group["used"] + group["cached"] + group["free"] == group["total"]
    assert 0 < group["peak_used"] <= group["total"]


def test_streams_of_seeds_and_indices_never_coincide():
  """Seeds of more than 32 bits share no words with a small seed's further completions."""
  seeds = (0, 1, 5, 2**32, 2**32 + 5, 5 * 2**32, 2**63 - 1, -1, -(2**63))
  words = {
    (seed, index): tuple(
      _seed_words(kvjax.Request("r", (3,), kvjax.SamplingParams(seed=seed)), index).tolist()
    )
    for seed in seeds
    for index in range(4)
  }
  assert len(set(words.values())) == len(words)
