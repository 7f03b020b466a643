"""numerics=batch_invariant: the same bits whatever happens around a request, in bfloat16 too."""

import dataclasses
import functools

import numpy as np
import pytest

import kvjax
from kvjax import config as C
from kvjax import testing
from kvjax.engine.batching import invariant_shape, shapes
from kvjax.errors import ConfigError


@functools.cache
def model(dtype):
  return testing.tiny_model("mixed", dtype=dtype)


def engine(dtype, cache=None, slots=4, **scheduler):
  config = C.Config(
    model=C.ModelConfig(source="gguf:tiny", max_length=128, numerics="batch_invariant"),
    cache=cache or C.CacheConfig(page_size=4, prefix_sharing=False),
    scheduler=C.SchedulerConfig(
      **{"max_sequences": slots, "token_budget": 12, "query_block": 8} | scheduler
    ),
  )
  return kvjax.Engine(model(dtype), config)


def requests():
  rng = np.random.default_rng(2)
  stem = tuple(int(t) for t in rng.integers(3, 260, 30))
  out = []
  for i in range(7):
    ids = (stem if i % 2 else ()) + tuple(int(t) for t in rng.integers(3, 260, 5 + 3 * i))
    bias = {7: 2.0} if i == 3 else {}
    sampling = kvjax.SamplingParams(
      max_tokens=24,
      temperature=0.7 * (i % 3),
      ignore_eos=True,
      logprobs=3,
      logit_bias=bias,
      n=2 if i == 5 else 1,
    )
    out.append(kvjax.Request(f"r{i}", ids, sampling, default_seed=i))
  return out


def run(e, items):
  for r in items:
    e.add(r)
  return {(c.request_id, c.index): (c.token_ids, c.logprobs) for c in e.run()}


@functools.cache
def alone(dtype):
  e = engine(dtype)
  return {key: value for r in requests() for key, value in run(e, [r]).items()}


ROOMY = C.CacheConfig(
  page_size=4, groups={"full": C.GroupConfig(pages=300), "sliding": C.GroupConfig(pages=300)}
)
TIGHT = C.CacheConfig(
  page_size=4, groups={"full": C.GroupConfig(pages=32), "sliding": C.GroupConfig(pages=32)}
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_do_not_depend_on_company(dtype):
  e = engine(dtype)
  assert run(e, requests()) == alone(dtype)
  assert len(e.figures()["compilations"]["shapes"]) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_do_not_depend_on_cached_prefixes(dtype):
  e = engine(dtype, ROOMY)
  assert run(e, requests()) == alone(dtype)
  again = [dataclasses.replace(r, id=f"{r.id}") for r in reversed(requests())]
  assert run(e, again) == alone(dtype)
  assert e.figures()["prompt_tokens_by_source"]["device"] > 200


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_do_not_depend_on_preemption(dtype):
  e = engine(dtype, TIGHT)
  assert run(e, requests()) == alone(dtype)
  assert e.figures()["preemptions"] > 0


def test_there_is_one_shape_and_it_is_listed():
  config = C.SchedulerConfig(max_sequences=3, token_budget=10)
  assert shapes(config, invariant=True) == (invariant_shape(config),)
  assert str(invariant_shape(config)) == "13 rows of any kind, 3 of them sampled"


def test_several_steps_a_call_are_refused():
  with pytest.raises(ConfigError, match=r"decode_steps: expected 1 with .*batch_invariant, got 4"):
    engine("float32", decode_steps=4)
