"""Long seeded runs of the scheduler, cache manager and index, with every invariant at every step.

The stub driver (tests/driving.py) checks what every step reads and writes; `checked=True` checks
tables, stamps, names and the tree after every change. The same with a tiny real model checks that
the tokens are those of each request alone.
"""

import collections
import dataclasses
import random

import jax
import numpy as np
import pytest
from driving import Driver, random_layout
from slow_tiers import random_offload

import kvjax
from kvjax import config as C
from kvjax import pages as pages_lib
from kvjax import testing
from kvjax.config import SchedulerConfig
from kvjax.engine import cache_manager
from kvjax.engine.cache_manager import CacheManager
from kvjax.engine.sequence import _seed_words
from kvjax.offload import search, stores
from kvjax.offload.fetches import Fetches, Load
from kvjax.offload.stores import Stores
from kvjax.prefix import PrefixIndex, digest

STEPS = 100_000  # of the scheduler, in all
SEEDS = 100


def soak(seed, steps, offload=False):
  """A random history: layouts, prompts with common stems, forks, aborts, resets, tiny pools.

  Returns the driver, drained.
  """
  rng = random.Random(seed)
  slots, longest = rng.randint(1, 5), rng.choice([24, 48, 64])
  budget = rng.choice([1, 3, 8, 16, 64])
  config = SchedulerConfig(
    max_sequences=slots,
    token_budget=budget,
    query_block=8,
    decode_steps=rng.choice([1, 1, 1, 3]),
  )
  step = max(min(budget, longest), config.decode_steps)
  layout = random_layout(rng, slots=slots, longest=longest, step=step, most=4)
  if offload:
    layout = tuple(dataclasses.replace(g, blocks_per_chunk=rng.randint(1, 5)) for g in layout)
    d = Driver(layout, config, offload=lambda clock: random_offload(rng, layout, clock), rng=rng)
  else:
    d = Driver(layout, config, sharing=rng.random() < 0.9)
  stems = [[rng.randrange(3) for _ in range(rng.randint(0, longest // 2))] for _ in range(3)]
  served = []
  while d.steps < steps:
    while len(d.alive) < 2 * slots and rng.random() < 0.7:
      prompt = rng.choice(stems) + [rng.randrange(3) for _ in range(rng.randint(1, longest // 3))]
      if rng.random() < 0.2 and served:
        prompt = list(rng.choice(served).tokens)[: longest - 2]  # the next turn
      served += d.add(
        prompt,
        rng.randint(1, 20),
        n=rng.choice([1, 1, 1, 2, 4]),
        priority=rng.choice([0, 0, 0, -1, 2]),
        salt=rng.choice([None, None, None, "a"]),
      )
      served = served[-20:]
    d.step()
    event = rng.random()
    if event < 0.02 and d.alive:
      s = rng.choice(d.alive)
      d.counts["aborts that waited for a tier"] += s.fetch is not None
      d.abort(s)
    elif event < 0.03 and d.alive:
      d.stop(rng.choice(d.alive))
    elif event < 0.033:
      if d.offload is not None:
        d.counts["resets in flight"] += d.offload.stores.in_flight_bytes > 0
      d.cache.reset(d.scheduler.running)
  d.drain()
  d.cache.check()
  if d.offload is not None:
    d.settle()
  assert (d.cache.available() == [g.pages for g in layout]).all()
  assert not d.scheduler.running
  assert not d.scheduler.waiting
  return d


@pytest.mark.parametrize("part", range(10))
def test_soak(part):
  """10⁵ scheduler steps; most of them over tiers that are slow, full, refuse, lose, hang and raise
  (tests/slow_tiers.py). That each kind of event took place is asserted over all of a part."""
  total = collections.Counter()
  for seed in range(part * SEEDS // 10, (part + 1) * SEEDS // 10):
    d = soak(seed, STEPS // SEEDS, offload=seed % 4 != 0)
    total.update(d.counts)
    total["preemptions"] += d.scheduler.preemptions
    total["evictions"] += sum(d.cache.evictions)
    total["steps"] += d.steps
  assert total["steps"] >= STEPS // 10
  for event in ("hits", "forks", "copies", "restored", "preemptions", "evictions", "loads"):
    assert total[event] > 20, f"{event}: {total[event]}"


def test_resets_and_late_answers_while_something_is_on_its_way():
  total = collections.Counter()
  for seed in range(20):
    d = soak(1000 + seed, 300, offload=True)
    total.update(d.counts)
    total.update(d.offload.tiers.counts)
  for event in ("resets in flight", "aborts that waited for a tier", "late", "lost", "refused"):
    assert total[event] > 0, event


def test_a_seed_gives_the_same_history_again():
  first, again, other = soak(7, 300), soak(7, 300), soak(8, 300)
  assert first.log.digest() == again.log.digest()
  assert first.log.digest() != other.log.digest()
  first, again = soak(7, 300, offload=True), soak(7, 300, offload=True)
  assert first.log.digest() == again.log.digest()


def _no_change(*_, **__):
  return None


def _reserve_in_place(pages, layout, slots, starts, stops, tokens=None):
  taken, copies, short = _RESERVE(pages, layout, slots, starts, stops, tokens)
  nothing = [dataclasses.replace(c, target=np.full_like(c.target, 2**31 - 1)) for c in copies]
  return taken, tuple(nothing), short


def _lookup_without_salt(key):
  return lambda namespace, salt=None, adapter=None: key(namespace)


def _forget_to_unstamp(self, pages):
  for c in self._changes:
    for page in [page for page, value in c.items() if not value]:
      del c[page]
  return _FLUSH(self, pages)


def _retire_early(pages, layout, slots, lengths):
  return _RETIRE(pages, layout, slots, lengths + 1)


_RESERVE, _RETIRE = pages_lib.reserve, pages_lib.retire
_FLUSH = PrefixIndex.flush

FAULTS = {
  "evicted pages keep their names": (PrefixIndex, "evict", _no_change),
  "shared pages are not copied": (pages_lib, "reserve", _reserve_in_place),
  "stamps stay on dead pages": (PrefixIndex, "flush", _forget_to_unstamp),
  "pages are given back too early": (pages_lib, "retire", _retire_early),
  "a salt is ignored": ("driving", "root_key", None),
  "boundaries live on without their pages": (PrefixIndex, "_die", _no_change),
  "pages are released twice": (CacheManager, "give_back", None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
  """The soak is worth something: each of these faults fails it within a few seeds."""
  where, name, broken = FAULTS[fault]
  if name == "root_key":
    import driving

    where, broken = driving, _lookup_without_salt(driving.root_key)
  elif name == "give_back":
    whole_back = CacheManager.give_back

    def broken(self, s, urgent=False):
      slot = s.slot
      whole_back(self, s, urgent)
      for i, p in enumerate(self.pages):
        held = p.refs.copy()
        held[: slot + 1] = np.maximum(held[: slot + 1] - 1, 0)
        self.pages = (*self.pages[:i], p.replace(refs=held), *self.pages[i + 1 :])

  monkeypatch.setattr(where, name, broken)
  with pytest.raises((AssertionError, RuntimeError, KeyError, ValueError, IndexError)):
    _soaks(12)


def _soaks(count, offload=False):
  for seed in range(count):
    soak(seed, 400, offload)


def _take_late(self):
  stores, self.queue = self.queue, []
  before, self.late = getattr(self, "late", []), stores
  return before


def _first_rows(group, piece, rows, pages):
  return Load(group, piece, np.arange(len(rows), dtype=rows.dtype), pages)


def _key_of_length(g, chain, tokens, stop):
  return digest(kind="piece", group=g.name, stop=stop)


OFFLOAD_FAULTS = {
  "pages are packed a step too late": ((Stores, "take", _take_late),),
  "other rows of a piece are loaded": ((cache_manager, "Load", _first_rows),),
  "pieces are named by their length": (
    (search, "piece_key", _key_of_length),
    (stores, "piece_key", _key_of_length),
  ),
  "reservations are not ended": ((Stores, "_cancel", _no_change),),
  "fetches are not let go of": ((Fetches, "release", _no_change),),
}


@pytest.mark.parametrize("fault", OFFLOAD_FAULTS)
def test_a_planted_fault_of_offload_is_found(fault, monkeypatch):
  for where, name, broken in OFFLOAD_FAULTS[fault]:
    monkeypatch.setattr(where, name, broken)
  with pytest.raises((AssertionError, RuntimeError, KeyError, ValueError, IndexError)):
    _soaks(12, offload=True)


MAX_LENGTH = 96


def tiny(kind, **groups):
  cache = C.CacheConfig(
    groups={
      name: C.GroupConfig(page_size=size, pages=pages) for name, (size, pages) in groups.items()
    },
    check_invariants=True,
  )
  return C.Config(
    model=C.ModelConfig(source="gguf:tiny", max_length=MAX_LENGTH),
    cache=cache,
    scheduler=C.SchedulerConfig(
      max_sequences=4,
      token_budget=16,
      query_block=8,
      decode_buckets=(64,),
      prefill_buckets=(64,),
    ),
  )


def margin(model, r, c, index):
  """How much the chosen token of a completion was ahead of the next, after penalty and noise."""
  ids = (*r.prompt_token_ids, *c.token_ids)
  position, s = len(r.prompt_token_ids) + index, r.sampling
  logits = testing.reference_logits(model.params, model.spec, ids[:position])[-1]
  seen = np.isin(np.arange(len(logits)), ids[:position])
  by = np.where(logits > 0, 1 / s.repetition_penalty, s.repetition_penalty)
  logits = np.where(seen, logits * by, logits)
  if s.temperature:
    seed = jax.random.wrap_key_data(_seed_words(r, c.index), impl="threefry2x32")
    noise = jax.random.gumbel(jax.random.fold_in(seed, position), logits.shape, np.float32)
    logits = logits / s.temperature + noise
  best = np.sort(logits)
  assert np.argmax(logits) == c.token_ids[index]
  return best[-1] - best[-2]


def test_soak_with_a_model():
  """10³ steps of a tiny model with groups of unequal pages: the tokens of each request alone."""
  model = testing.tiny_model("mixed")
  rng = random.Random(0)
  e = kvjax.Engine(model, tiny("mixed", full=(4, 34), sliding=(2, 44)))
  # Whole prompts, other pages, nothing shared: as unlike the first one as it can be.
  plain = tiny("mixed", full=(16, 99), sliding=(16, 99))
  cache = dataclasses.replace(plain.cache, prefix_sharing=False)
  scheduler = dataclasses.replace(plain.scheduler, token_budget=64, max_sequences=1, overlap=False)
  alone = kvjax.Engine(model, dataclasses.replace(plain, cache=cache, scheduler=scheduler))
  stems = [[rng.randrange(3, 260) for _ in range(rng.randint(8, 40))] for _ in range(4)]
  asked, done, steps, count = {}, {}, 0, 0
  while steps < 1000 or e.unfinished:
    while steps < 1000 and e.unfinished < 8:
      ids = (*rng.choice(stems), *(rng.randrange(3, 260) for _ in range(rng.randint(1, 12))))
      sampling = kvjax.SamplingParams(
        max_tokens=rng.randint(1, 24),
        temperature=rng.choice([0, 0, 0.8]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        n=rng.choice([1, 1, 1, 3]),
        ignore_eos=True,
      )
      r = kvjax.Request(
        f"r{count}",
        ids,
        sampling,
        default_seed=count,
        priority=rng.choice([0, 0, 1]),
        cache_salt=rng.choice([None, None, "a", f"own {count}"]),
      )
      count += 1
      asked[r.id] = r
      e.add(r)
    for c in e.step():
      done[c.request_id, c.index] = c
    steps += 1
    if rng.random() < 0.01 and e._requests:
      e.abort(rng.choice(list(e._requests)))
  done |= {(c.request_id, c.index): c for c in e.run()}  # aborted in the last step
  figures = e.figures()
  assert figures["preemptions"] > 10
  assert figures["restored_tokens"] > 0
  assert figures["prompt_tokens_by_source"]["device"] > 1000
  assert figures["pages"]["full"]["evictions"] > 50
  assert figures["pages"]["sliding"]["evictions"] > 50
  assert set(done) == {(r.id, i) for r in asked.values() for i in range(r.sampling.n)}
  sample = rng.sample(sorted(asked), 40)
  for r in (asked[name] for name in sample):
    r = dataclasses.replace(r, cache_salt=f"alone {r.id}")
    alone.add(r)
    for c in alone.run():
      got = done[c.request_id, c.index]
      pairs = zip(got.token_ids, c.token_ids, strict=got.finish_reason != "abort")
      differs = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
      assert differs is None or margin(model, r, c, differs) < 1e-3
