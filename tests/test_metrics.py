"""What a run measures about itself."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.metrics import Histogram, Metrics

durations = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=60)


@settings(deadline=None, max_examples=100)
@given(durations, st.sampled_from([1, 50, 90, 99, 100]))
def test_percentiles_are_right_within_half_a_bin(samples: list[float], percent: int):
  h = Histogram()
  for x in samples:
    h.add(x)
  expected = np.percentile(samples, percent, method="inverted_cdf")
  assert h.percentile(percent) == pytest.approx(expected, rel=0.0101)
  assert h.figures()["mean"] == pytest.approx(np.mean(samples))
  assert h.figures()["count"] == len(samples)


def test_a_count_is_as_many_samples():
  together, apart = Histogram(), Histogram()
  for seconds, count in ((0.1, 7), (3.0, 2), (0.02, 1)):
    together.add(seconds, count)
    for _ in range(count):
      apart.add(seconds)
  assert together.figures() == pytest.approx(apart.figures())
  assert together.percentile(80) == pytest.approx(0.1, rel=0.01)
  assert together.percentile(90) == pytest.approx(3.0, rel=0.01)


def test_memory_does_not_grow_with_samples():
  h = Histogram()
  for x in np.random.default_rng(0).lognormal(size=20000):
    h.add(float(x))
  assert h.count == 20000
  # Eight orders of magnitude and more fit into as many bins as 2 % steps take.
  assert len(h._bins) < np.log(1e8) / Histogram.RESOLUTION


def test_no_samples_and_no_time():
  assert Histogram().figures() == {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None}
  h = Histogram()
  h.add(0.0)  # a clock that did not move
  assert h.percentile(50) == pytest.approx(1e-9, rel=0.01)


def test_figures_are_json_and_rates_have_a_time():
  m = Metrics(
    prompt_tokens=280,
    prompt_tokens_by_source={"computed": 250, "device": 30},
    recomputed_tokens=50,
    decode_tokens=80,
    seconds=4.0,
    prefill_seconds=1.5,
  )
  m.time_to_first_token.add(0.25)
  figures = json.loads(json.dumps(m.figures()))
  assert figures["prefill_tokens_per_second"] == 200
  assert figures["output_tokens_per_second"] == 20
  assert figures["decode_step_seconds"] == 2.5
  assert figures["time_to_first_token_seconds"]["p50"] == pytest.approx(0.25, rel=0.01)
  assert figures["time_between_tokens_seconds"]["p50"] is None
  idle = Metrics().figures()
  assert (idle["prefill_tokens_per_second"], idle["output_tokens_per_second"]) == (None, None)


def test_every_counter_is_in_the_figures():
  """A counter that is added to Metrics and forgotten in its figures shows here."""
  figures = Metrics(
    prompt_tokens=1,
    prompt_tokens_by_source={"computed": 2},
    recomputed_tokens=3,
    restored_tokens=4,
    decode_tokens=5,
    discarded_tokens=6,
    steps=7,
    prefill_steps=8,
    preemptions=9,
    completions=10,
  ).figures()
  names = [
    "prompt_tokens",
    "prompt_tokens_by_source",
    "recomputed_tokens",
    "restored_tokens",
    "prefill_tokens",
    "decode_tokens",
    "discarded_tokens",
    "steps",
    "prefill_steps",
    "preemptions",
    "completions",
  ]
  assert [figures[n] for n in names] == [1, {"computed": 2}, 3, 4, 2 + 3, 5, 6, 7, 8, 9, 10]


def test_waste_is_the_share_of_slots_without_a_token():
  m = Metrics()
  assert m.waste("full") is None
  m.sample_pages("full", pages=3, held=48, used=33)
  m.sample_pages("full", pages=2, held=32, used=27)
  m.sample_pages("sliding", pages=5, held=0, used=0)
  assert m.waste("full") == pytest.approx(1 - 60 / 80)
  assert m.waste("sliding") is None
  assert m.peak_pages == {"full": 3, "sliding": 5}


def test_metrics_share_nothing():
  a, b = Metrics(), Metrics()
  a.sample_pages("full", 1, 16, 9)
  a.prompt_tokens_by_source["computed"] += 5
  a.time_to_first_token.add(1.0)
  assert b == Metrics() or b.figures() == Metrics().figures()
  assert b.held == {}
