"""The scheduler alone, with sequences whose tokens nobody computes: policy and invariants."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import pages as pages_lib
from kvjax.config import SchedulerConfig
from kvjax.engine.batching import SlotSampling, build, shape_of, shapes
from kvjax.engine.cache_manager import CacheManager
from kvjax.engine.scheduler import HEADROOM, PATIENCE, Scheduler
from kvjax.engine.sequence import Scheduled
from kvjax.geometry import GroupGeometry, Leaf, Retention
from kvjax.prefix import Chain


class Sequence(Scheduled):
  """A prompt of one repeated token, that no other has."""

  def __init__(self, order, prompt, limit, priority=0):
    chain = Chain(b"%d" % order, 1)
    super().__init__([7] * prompt, limit, (priority, order, 0), chain)
    self.bias = (np.zeros(0, np.int32),) * 3
    self.biases = 0
    self.seed = np.zeros(2, np.uint32)

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
  for w in plan.work():
    w.sequence.tokens += [7] * w.samples


settings.register_profile("scheduler", deadline=None, max_examples=150)


@settings(settings.get_profile("scheduler"))
@given(data=st.data())
def test_everything_is_served_within_budgets(data):
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
    step = max(budget, config.decode_steps)
    g = group(f"g{i}", page, window, 1000, slots, step)
    most = g.peak_pages(64) * slots
    layout.append(group(f"g{i}", page, window, draw(st.integers(1, most)), slots, step))
  layout = tuple(layout)
  cache = CacheManager(layout, sharing=draw(st.booleans()), checked=True)
  scheduler = Scheduler(cache, config)
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
    pages_lib.check(scheduler.cache.pages, layout)
    assert sum(w.count for w in plan.prefill) <= budget
    shape = shape_of(plan, config)
    assert shape in shapes(config)
    batch, _, rows = build(plan, shape, SlotSampling(slots))
    assert len(batch.tokens) == shape.decode_rows + shape.prefill_blocks * shape.query_block
    assert len(set(rows)) == len(rows)
    assert (batch.slots < slots).sum() == len(plan.decode) + sum(w.count for w in plan.prefill)
    for w in plan.work():
      for g, p in zip(layout, plan.pages, strict=True):
        need = g.span(w.start, w.count)
        assert p.first[w.slot] <= need.start
        assert p.last[w.slot] >= need.stop
  for s in everything:
    assert len(s.tokens) == s.limit
    assert s.slot is None
  assert (pages_lib.available(scheduler.cache.pages) == [g.pages for g in layout]).all()


def scheduler_of(pages, *, page_size=4, slots=4, budget=16):
  config = SchedulerConfig(max_sequences=slots, token_budget=budget, query_block=8)
  layout = (group("full", page_size, None, pages, slots, budget),)
  return Scheduler(CacheManager(layout, sharing=False, checked=True), config)


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
        for w in plan.work()
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
    assert plan.decode == [short]
    assert sum(w.count for w in plan.prefill) == 8


def test_admission_counts_what_prompts_were_promised():
  """A prompt in chunks holds few pages at first; nobody else may be admitted on what it needs."""
  scheduler = scheduler_of(pages=10, budget=8)
  scheduler.add(Sequence(0, 32, 33))  # needs 8 pages, takes 2 in the first step
  scheduler.plan()
  scheduler.add(Sequence(1, 12, 13))  # needs 3 of the 2 that are left
  scheduler.plan()
  assert [s.order[1] for s in scheduler.running] == [0]
  scheduler.add(Sequence(2, 4, 5))  # needs one, and may pass
  scheduler.plan()
  assert [s.order[1] for s in scheduler.waiting] == [1]
  assert scheduler.waiting[0].passed == 1


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_remove_gives_back_what_was_held(state):
  scheduler = scheduler_of(pages=10)
  s = Sequence(0, 10, 20)
  scheduler.add(s)
  if state == "running":
    scheduler.plan()
    assert pages_lib.available(scheduler.cache.pages)[0] == 7
  scheduler.remove(s)
  assert pages_lib.available(scheduler.cache.pages)[0] == 10
  assert not scheduler.waiting
  assert not scheduler.running


def served(scheduler, most=2000):
  """Steps until all is served; for each plan the Work by sequence."""
  plans = []
  while scheduler.waiting or scheduler.running:
    assert len(plans) < most
    plan = scheduler.plan()
    if plan is not None:
      read(plan)
      plans.append({w.sequence: w for w in plan.work()})
  return plans


def first_step(plans, s):
  return next(i for i, plan in enumerate(plans) if s in plan)


def last_step(plans, s):
  return max(i for i, plan in enumerate(plans) if s in plan)


def test_a_head_that_does_not_fit_is_passed_but_not_for_ever():
  scheduler = scheduler_of(pages=12, slots=3, budget=64)
  scheduler.add(Sequence(0, 20, 40))  # 5 pages now
  scheduler.plan()
  big = Sequence(1, 40, 44)  # 10 pages
  scheduler.add(big)
  small = [Sequence(i, 4, 6) for i in range(2, 60)]
  for s in small:
    scheduler.add(s)
  scheduler.plan()
  assert small[0].slot is not None
  assert big.slot is None
  for s in [scheduler.running[0]]:
    read_all(scheduler, s)
  plans = served(scheduler)
  before = sum(
    first_step(plans, s) < first_step(plans, big) for s in small if any(s in p for p in plans)
  )
  assert 0 < before <= PATIENCE


def read_all(scheduler, s):
  """What the first plans sampled becomes known."""
  for r in scheduler.running:
    r.tokens += [7] * r.in_flight


def test_a_short_prompt_is_not_starved_by_a_long_one():
  scheduler = scheduler_of(pages=200, slots=4, budget=8)
  long, short = Sequence(0, 60, 61), Sequence(1, 6, 8)
  scheduler.add(long)
  scheduler.add(short)
  plans = served(scheduler)
  assert first_step(plans, short) <= 1
  assert last_step(plans, short) < last_step(plans, long)
  # The oldest has at least every other step of the prompts.
  steps = [i for i, plan in enumerate(plans) if any(not w.decode for w in plan.values())]
  assert sum(long in plans[i] and plans[i][long].count == 8 for i in steps) >= len(steps) // 2


def test_a_long_prompt_is_not_starved_by_short_ones():
  scheduler = scheduler_of(pages=200, slots=4, budget=8)
  long = Sequence(0, 60, 61)
  scheduler.add(long)
  for i in range(1, 60):
    scheduler.add(Sequence(i, 8, 9))
  assert last_step(served(scheduler), long) <= 2 * 60 // 8 + 2


def test_decoding_never_waits_for_prompts():
  """Long prompts arrive without pause; whoever decodes does so in every step."""
  scheduler = scheduler_of(pages=400, slots=8, budget=8)
  short = Sequence(0, 2, 60)
  scheduler.add(short)
  for i in range(1, 20):
    scheduler.add(Sequence(i, 50, 52))
  plans = served(scheduler)
  steps = [i for i, plan in enumerate(plans) if short in plan]
  assert steps == list(range(steps[0], steps[-1] + 1))


def test_priority_goes_first_and_is_preempted_last():
  scheduler = scheduler_of(pages=100, slots=1)
  low, high = Sequence(0, 8, 10, priority=5), Sequence(1, 8, 10, priority=-1)
  scheduler.add(low)
  scheduler.add(high)
  assert run(scheduler) == [high, low]


@pytest.mark.parametrize(("slots", "pages"), [(1, 100), (4, 12)])
def test_a_higher_priority_takes_slots_and_pages(slots, pages):
  scheduler = scheduler_of(pages=pages, slots=slots, budget=64)
  low = [Sequence(i, 20, 30, priority=1) for i in range(slots)]
  for s in low:
    scheduler.add(s)
  read(scheduler.plan())
  assert scheduler.running
  high = Sequence(9, 24, 30, priority=0)
  scheduler.add(high)
  plan = scheduler.plan()
  read(plan)
  assert high in [w.sequence for w in plan.prefill]
  assert scheduler.preemptions > 0
  done = run(scheduler)
  assert done[0] is high
  assert set(done) == {high, *low}


def test_an_equal_priority_takes_nothing():
  scheduler = scheduler_of(pages=100, slots=1)
  scheduler.add(Sequence(0, 8, 20))
  read(scheduler.plan())
  scheduler.add(Sequence(1, 8, 20))
  read(scheduler.plan())
  assert scheduler.preemptions == 0


@pytest.mark.parametrize("budget", [4, 8, 64])
def test_no_ping_pong(budget):
  """A sequence that comes back stays for HEADROOM tokens of growth at least."""
  scheduler = scheduler_of(pages=30, slots=4, budget=budget)
  everything = [Sequence(i, 12, 60) for i in range(6)]
  for s in everything:
    scheduler.add(s)
  returns, steps, before = 0, 0, 0
  since: dict = {}
  while scheduler.waiting or scheduler.running:
    steps += 1
    assert steps < 3000
    plan = scheduler.plan()
    if plan is None:
      continue
    for a in plan.admitted:
      if a.reached:
        returns += 1
        since[a.sequence] = {r: r.length for r in scheduler.running}
    read(plan)
    if scheduler.preemptions > before:
      before = scheduler.preemptions
      for s in scheduler.waiting:
        if s in since:
          lengths = since.pop(s)
          grown = max(r.length - lengths[r] for r in [s, *scheduler.running] if r in lengths)
          assert grown >= HEADROOM
  assert scheduler.preemptions > 0
  assert returns > 0
