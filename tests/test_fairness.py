"""Waiting has bounds: for a prefix that another one computes, for room, behind siblings."""

import numpy as np
import pytest
from driving import Driver, group

from kvjax.config import SchedulerConfig
from kvjax.engine.batching import _BIAS_BUCKETS, _bucket


def driver(pages, slots=8, longest=1000, budget=16):
  layout = (group("full", 4, pages, slots=slots, longest=longest, step=budget),)
  return Driver(layout, SchedulerConfig(max_sequences=slots, token_budget=budget, query_block=8))


def steps_of(d, s):
  """Steps from now until a sequence has ended."""
  start = d.steps
  while not s.ended:
    d.step()
  return d.steps - start


@pytest.mark.parametrize("priority", [0, 1])
def test_a_prefix_that_takes_long_to_come_is_not_waited_for(priority):
  """One page in common with a prompt of 920 tokens, behind one of 800 that has every other step."""

  def steps(shared):
    d = driver(900)
    d.add([0] * 800, 2)
    d.add([1] * 920, 2, priority=priority)
    d.step()
    (s,) = d.add([1 if shared else 2] * 4 + [2, 0], 2)
    taken = steps_of(d, s)
    d.drain()
    return taken

  # A lead of lower priority is not waited for at all; one chunk of the other should take 2 steps.
  assert steps(shared=True) <= steps(shared=False) + (8 if priority == 0 else 0)


def test_what_is_computed_soon_is_waited_for():
  d = driver(400)
  prompt = [i % 3 for i in range(64)]
  d.add(prompt, 2)
  d.step()
  d.add(prompt, 2)
  d.drain()
  assert d.counts["computed"] < 1.3 * 64


@pytest.mark.parametrize("n", [4, 40])
def test_siblings_that_wait_for_the_first_hide_nobody(n):
  d = driver(2000, slots=64)
  d.add([0] * 800, 2, n=n)
  d.step()
  (s,) = d.add([2, 2, 1], 2)
  assert steps_of(d, s) <= 5
  d.drain()


def test_tokens_of_forks_are_counted_once_when_there_is_no_room_for_all():
  """12 pages hold the prompt of 10 and the copies of two completions; eight are asked for."""
  d = driver(12, longest=64)
  d.add([i % 3 for i in range(40)], 6, n=8)
  counted = 0
  while d.alive or d.in_flight is not None:
    plan = d.step()
    if plan is not None:
      counted += plan.prompt_tokens
      for a in plan.admitted:
        counted += max(min(a.found, a.sequence.prompt_length) - a.reached, 0)
  assert counted == 8 * 40


def test_short_prompts_do_not_push_each_other_out_for_ever():
  """A pool of three pages for eight prompts of one token that need two pages each at their end."""
  d = driver(3, longest=64)
  for i in range(8):
    d.add([i % 3], 6)
  d.drain()
  assert d.scheduler.preemptions <= 8


def test_a_warm_prompt_of_higher_priority_gets_the_slot():
  """The room it needs beside its hit is there once the other one has been sent away."""
  d = driver(26, slots=2, longest=80)
  prompt = [i % 3 for i in range(48)]
  d.add(prompt, 30)
  for _ in range(4):
    d.step()
  (low,) = d.add([2, 2, 2], 20, priority=9)
  d.step()
  (s,) = d.add([*prompt, 1], 3)
  start = d.steps
  while s.slot is None:
    d.step()
  assert d.steps - start <= 2
  assert not low.ended
  assert d.scheduler.preemptions == 1
  d.drain()


def test_siblings_go_on_after_a_reset():
  for when in range(2, 12):
    d = driver(40, slots=2, longest=64)
    d.add([i % 3 for i in range(40)], 6, n=5)
    for _ in range(when):
      d.step()
    d.cache.reset(d.scheduler.running)
    d.drain()
    d.cache.check()
    assert d.cache.available() == [40]


def test_more_biases_than_the_largest_bucket():
  largest = _BIAS_BUCKETS[-1]
  assert _bucket(_BIAS_BUCKETS, largest) == largest
  assert _bucket(_BIAS_BUCKETS, largest + 1) == 2 * largest
  assert all(np.diff(_BIAS_BUCKETS) > 0)
