"""The scheduler alone, with sequences whose tokens nobody computes: policy and invariants."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import pages as pages_lib
from kvjax.config import SchedulerConfig
from kvjax.engine.batching import SlotSampling, build, shape_of, shapes
from kvjax.engine.scheduler import Scheduler
from kvjax.geometry import GroupGeometry, Leaf, Retention


class Sequence:
  """What the scheduler sees of a sequence."""

  def __init__(self, order, prompt, limit):
    self.order = (order, 0)
    self.tokens = [7] * prompt
    self.length = prompt
    self.computed = 0
    self.reached = 0
    self.limit = limit
    self.slot = None
    self.bias = (np.zeros(0, np.int32),) * 3
    self.seed = np.zeros(2, np.uint32)
    self.prompt_length = prompt

  @property
  def remaining(self):
    return self.length - self.computed

  @property
  def in_flight(self):
    return self.length - len(self.tokens)

  class request:
    class sampling:
      temperature = top_k = min_p = presence_penalty = frequency_penalty = 0
      top_p = repetition_penalty = 1
      logprobs = None


def group(name, page_size, window, pages, slots, budget, longest=64):
  return GroupGeometry(
    name=name,
    layers=(0,),
    page_size=page_size,
    retention=Retention(window),
    leaves=(Leaf("kv", (1, 2), "float32"),),
    pages=pages,
    max_length=longest,
    step_tokens=min(budget, longest),
    max_sequences=slots,
  )


def read(plan):
  """The host reads the step: sampled tokens become known."""
  for w in (*plan.decode, *plan.prefill):
    w.sequence.tokens += [7] * w.samples


settings.register_profile("scheduler", deadline=None, max_examples=150)


@settings(settings.get_profile("scheduler"))
@given(data=st.data())
def test_everything_is_served_in_order_within_budgets(data):
  draw = data.draw
  slots, budget = draw(st.integers(1, 5)), draw(st.integers(1, 20))
  config = SchedulerConfig(
    max_sequences=slots,
    token_budget=budget,
    query_block=8,
    decode_steps=draw(st.sampled_from([1, 1, 3])),
  )
  layout = []
  for i, window in enumerate(
    draw(st.lists(st.sampled_from([None, 5, 16]), min_size=1, max_size=3))
  ):
    page = draw(st.sampled_from([1, 4, 7, 16]))
    g = group(f"g{i}", page, window, 1000, slots, budget)
    most = g.peak_pages(64) * slots
    layout.append(group(f"g{i}", page, window, draw(st.integers(1, most)), slots, budget))
  layout = tuple(layout)
  scheduler = Scheduler(layout, config)
  pending, everything = [], []
  for i in range(draw(st.integers(1, 8))):
    prompt = draw(st.integers(1, 40))
    s = Sequence(i, prompt, prompt + draw(st.integers(1, 20)))
    if not scheduler.can_ever_fit(s.limit):
      everything.append(s)
      pending.append(s)
  arrivals = draw(st.lists(st.integers(0, 30), min_size=len(pending), max_size=len(pending)))
  arrivals = sorted(arrivals)
  in_flight, steps, most_steps = None, 0, 4000
  while pending or scheduler.waiting or scheduler.running or in_flight:
    steps += 1
    assert steps < most_steps, "no progress"
    while pending and arrivals[len(everything) - len(pending)] <= steps:
      scheduler.add(pending.pop(0))
    plan = scheduler.plan()
    if in_flight is not None:
      read(in_flight)
    in_flight = plan
    if plan is None:
      continue
    pages_lib.check(plan.pages, layout)
    pages_lib.check(scheduler.pages, layout)
    assert sum(w.count for w in plan.prefill) <= budget
    shape = shape_of(plan, config)
    assert shape in shapes(config)
    batch, _, rows = build(plan, shape, SlotSampling(slots))
    assert len(batch.tokens) == shape.decode_rows + shape.prefill_blocks * shape.query_block
    assert len(set(rows)) == len(rows)
    assert (batch.slots < slots).sum() == len(plan.decode) + sum(w.count for w in plan.prefill)
    for w in (*plan.decode, *plan.prefill):
      for g, p in zip(layout, plan.pages, strict=True):
        need = g.span(w.start, w.count)
        assert p.first[w.slot] <= need.start
        assert p.last[w.slot] >= need.stop
  for s in everything:
    assert len(s.tokens) == s.limit
    assert s.slot is None
  assert (pages_lib.available(scheduler.pages) == [g.pages for g in layout]).all()


def scheduler_of(pages, *, page_size=4, slots=4, budget=16):
  config = SchedulerConfig(max_sequences=slots, token_budget=budget, query_block=8)
  return Scheduler((group("full", page_size, None, pages, slots, budget),), config)


def run(scheduler, most=500):
  """Steps until all is served; returns the order in which sequences got their last token."""
  done, steps = [], 0
  while scheduler.waiting or scheduler.running:
    steps += 1
    assert steps < most
    plan = scheduler.plan()
    if plan is not None:
      read(plan)
      done += [
        w.sequence
        for w in (*plan.decode, *plan.prefill)
        if w.sequence.slot is None and len(w.sequence.tokens) == w.sequence.limit
      ]
  return done


def test_the_newest_is_preempted_first():
  scheduler = scheduler_of(pages=6)
  old, new = Sequence(0, 10, 20), Sequence(1, 10, 20)  # 3 pages each, then 5 each
  scheduler.add(new)
  scheduler.add(old)
  assert run(scheduler) == [old, new]
  assert scheduler.preemptions > 0


def test_two_that_grow_by_one_page_each_both_finish():
  scheduler = scheduler_of(pages=7)
  a, b = Sequence(0, 16, 18), Sequence(1, 12, 15)  # 4 then 5 pages, 3 then 4 pages
  scheduler.add(a)
  scheduler.add(b)
  assert set(run(scheduler)) == {a, b}


def test_the_oldest_is_never_preempted():
  scheduler = scheduler_of(pages=12)
  sequences = [Sequence(i, 8, 40) for i in range(4)]
  for s in sequences:
    scheduler.add(s)
  oldest_computed = 0
  while sequences[0].length < 40:
    plan = scheduler.plan()
    read(plan)
    assert sequences[0].computed > oldest_computed
    oldest_computed = sequences[0].computed
  assert scheduler.preemptions > 0


def test_decoding_goes_on_beside_long_prompts():
  scheduler = scheduler_of(pages=100, budget=8)
  short = Sequence(0, 2, 40)
  scheduler.add(short)
  read(scheduler.plan())
  scheduler.add(Sequence(1, 60, 62))
  for _ in range(7):
    plan = scheduler.plan()
    read(plan)
    assert [w.sequence for w in plan.decode] == [short]
    assert sum(w.count for w in plan.prefill) == 8


def test_admission_counts_what_prompts_were_promised():
  """A prompt in chunks holds few pages at first; nobody else may be admitted on what it needs."""
  scheduler = scheduler_of(pages=10, budget=8)
  scheduler.add(Sequence(0, 32, 33))  # needs 8 pages, takes 2 in the first step
  scheduler.plan()
  scheduler.add(Sequence(1, 12, 13))  # needs 3 of the 2 that are left
  scheduler.plan()
  assert [s.order[0] for s in scheduler.running] == [0]
  scheduler.add(Sequence(2, 4, 5))
  scheduler.plan()
  assert [s.order[0] for s in scheduler.waiting] == [1, 2]  # first come, first served


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_remove_gives_back_what_was_held(state):
  scheduler = scheduler_of(pages=10)
  s = Sequence(0, 10, 20)
  scheduler.add(s)
  if state == "running":
    scheduler.plan()
    assert pages_lib.available(scheduler.pages)[0] == 7
  scheduler.remove(s)
  assert pages_lib.available(scheduler.pages)[0] == 10
  assert not scheduler.waiting
  assert not scheduler.running
