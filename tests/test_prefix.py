"""The prefix index against a brute-force search, and the cases that went wrong elsewhere."""

import random

import pytest
from driving import Driver, brute_force_hit, group, needed_pages, random_layout

from kvjax.config import SchedulerConfig
from kvjax.geometry import hash_unit, resumable, stride
from kvjax.prefix import Chain, digest, namespace, root_key


def config(slots=4, budget=16, **more):
  return SchedulerConfig(max_sequences=slots, token_budget=budget, query_block=8, **more)


def driver(*groups, slots=4, budget=64):
  return Driver(tuple(groups), config(slots, budget))


def serve(d, tokens, new=1, **more):
  """A prompt from beginning to end; returns what it found cached."""
  (s,) = d.add(tokens, new, **more)
  d.drain()
  return s.found


def found(d, tokens, salt=None):
  """What a prompt would find, which is what the brute-force search finds."""
  from driving import Stub

  s = Stub(tokens, len(tokens) + 1, (0, 0, 0), root_key(b"stub", salt), d.unit, salt)
  hit = d.cache.hit(s)
  length = 0 if hit is None else hit.length
  assert length == brute_force_hit(d, tokens, salt)
  return length


def evict(d, group_index, logical, tokens):
  """Takes a cached page for something else, as the allocator would."""
  import numpy as np

  s = Chain(root_key(b"stub"), d.unit)
  index = d.cache.index
  page = {entry[1]: page for page, entry in index._where[group_index].items()}[logical]
  index.evict([np.array([page] if i == group_index else [], int) for i in range(len(d.layout))])
  d.cache.pages = index.flush(d.cache.pages)
  index.check(d.cache.pages)
  assert s.key(0, tokens)


def cached_pages(d, group_index):
  """Logical pages that the index knows in a group, of a single sequence."""
  return sorted(logical for _, logical in d.cache.index._where[group_index].values())


@pytest.mark.parametrize("seed", range(100))
def test_the_longest_hit_is_that_of_a_brute_force_search(seed):
  """Random layouts of up to six groups, histories with eviction, and every prefix asked for."""
  rng = random.Random(seed)
  slots = rng.randint(1, 4)
  layout = random_layout(rng, slots=slots, longest=48, step=rng.choice([3, 16, 48]))
  d = Driver(layout, config(slots, layout[0].step_tokens))
  stems = [[rng.randrange(3) for _ in range(rng.randint(0, 30))] for _ in range(3)]
  prompts = []
  for _ in range(12):
    prompt = rng.choice(stems) + [rng.randrange(3) for _ in range(rng.randint(1, 12))]
    salt = rng.choice([None, None, "a"])
    prompts.append((prompt, salt))
    d.add(prompt, rng.randint(1, 12), salt=salt, n=rng.choice([1, 1, 2]))
    for _ in range(rng.randint(0, 12)):
      d.step()
    if rng.random() < 0.4:
      d.drain()
    for tokens, s in prompts[-3:]:
      found(d, [*tokens, 1, 2], s)
  d.drain()
  for tokens, s in prompts:
    found(d, [*tokens, 0], s)
  assert_all_cached_pages_can_be_hit(d)


def assert_all_cached_pages_can_be_hit(d):
  """With nothing running, every stamped page is one that some live boundary brings."""
  index = d.cache.index
  if index is None:
    return
  reached = [set() for _ in d.layout]
  stack = list(index._roots.values())
  while stack:
    at = stack.pop()
    stack += at.children.values()
    if at.live:
      for pages, some in zip(reached, index.brought(at), strict=True):
        pages.update(some)
  for p, pages in zip(d.cache.pages, reached, strict=True):
    assert {int(i) for i in p.stamp.nonzero()[0]} == pages


def test_some_histories_hit_and_some_evict():
  """The property above is not about empty indices."""
  hits = evictions = 0
  for seed in range(40):
    rng = random.Random(seed)
    layout = random_layout(rng, slots=2, longest=48, step=16)
    d = Driver(layout, config(2))
    stem = [rng.randrange(3) for _ in range(24)]
    for _ in range(8):
      d.add([*stem, *(rng.randrange(3) for _ in range(8))], 4)
      d.drain()
    hits += d.counts["hits"]
    evictions += sum(d.cache.evictions)
  assert hits > 80
  assert evictions > 80


@pytest.mark.parametrize("seed", range(40))
def test_coverage_is_what_can_be_read(seed):
  rng = random.Random(seed)
  for g in random_layout(rng, slots=2, longest=64, step=16):
    for length in range(1, 64):
      assert set(g.coverage(length)) == needed_pages(g, length)


def test_whole_pages_of_a_window_reach_back_to_its_first_position():
  """W 4096, 32 tokens a page, an unaligned length of 98,012: 129 pages."""
  g = group("sliding", 32, 200, longest=2**17, window=4096)
  assert len(g.coverage(98_012)) == 129
  assert len(g.coverage(98_016)) == 128


def test_hits_among_scattered_positions():
  """W 4, pages of 1, positions 2-5 and 11-13 cached, a prompt of 15: 5, 6 or 14; 14 is taken."""
  d = driver(group("sliding", 1, 40, window=4))
  tokens = [i % 3 for i in range(15)]
  serve(d, tokens[:14])
  for logical in (0, 1, 6, 7, 8, 9, 10):
    if logical in cached_pages(d, 0):
      evict(d, 0, logical, tokens)
  assert found(d, tokens) == 14
  live = [n for n in range(1, 15) if found(d, [*tokens[:n], 9]) == n]
  assert live == [5, 6, 14]


def test_a_local_chunk_needs_nothing_of_the_chunks_before():
  """C 8, pages of 4: at 12 page 2 is needed, at 16 none."""
  g = group("local", 4, 40, chunk=8)
  assert list(g.coverage(12)) == [2]
  assert list(g.coverage(15)) == [2, 3]  # the second one in part: nobody else can go on from it
  assert not g.aligned(15)
  assert list(g.coverage(16)) == []


@pytest.mark.parametrize(
  ("full", "sliding", "window", "tokens", "kept"),
  [(32, 8, 8, 64, [3, 7]), (32, 16, 32, 112, [0, 1, 2, 3, 4, 5])],
)
def test_what_is_kept_is_what_can_be_asked_for(full, sliding, window, tokens, kept):
  longest = {"longest": 128, "step": 128}
  d = driver(
    group("full", full, 9, **longest),
    group("sliding", sliding, 40, window=window, **longest),
    budget=128,
  )
  prompt = [i % 3 for i in range(tokens)]
  serve(d, prompt)
  assert cached_pages(d, 1) == kept
  boundaries = [n for n in range(1, tokens + 1) if resumable(d.layout, n)]
  asked = sorted({i for n in boundaries for i in d.layout[1].coverage(n)})
  assert asked == kept
  for n in boundaries:
    assert found(d, [*prompt[:n], 7]) == n


def test_a_state_is_resumed_at_its_own_boundary_only():
  """States after pages 0 and 3, full pages 0 and 1, 256 tokens each: 256, not 1024, not 0."""
  more = {"longest": 1100, "step": 1100}
  d = driver(group("full", 256, 9, **more), group("state", 256, 9, state=True, **more), budget=1100)
  tokens = [i % 3 for i in range(1025)]
  serve(d, tokens)
  assert found(d, tokens) == 1024
  for logical in (1, 2):
    evict(d, 1, logical, tokens)
  assert found(d, tokens) == 1024
  evict(d, 0, 2, tokens)
  assert found(d, tokens) == 256


def test_more_states_than_full_pages():
  """N states and N - 1 full pages after a drop: resume after N - 1 pages."""
  d = driver(group("full", 4, 20), group("state", 4, 20, state=True))
  tokens = [i % 3 for i in range(17)]
  serve(d, tokens)
  evict(d, 0, 3, tokens)
  assert found(d, tokens) == 12
  assert serve(d, tokens) == 12


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("unit", [16, 64, 1152])
def test_scratch_memory_is_never_keyed(size, unit):
  """A scratch group with other page sizes neither vetoes a hit nor takes part in it."""
  more = {"longest": 4 * unit, "step": 4 * unit}
  d = driver(
    group("full", unit, 9, **more),
    group("scratch", size, 4 * unit // size + 9, reusable=False, **more),
    budget=4 * unit,
  )
  assert d.unit == unit
  tokens = [i % 3 for i in range(3 * unit + 1)]
  serve(d, tokens)
  assert serve(d, tokens) == 3 * unit
  assert cached_pages(d, 1) == []
  assert not d.cache.pages[1].stamp.any()


def test_the_hash_unit_follows_from_the_groups():
  assert hash_unit((group(page_size=64), group(page_size=256))) == 64
  assert stride((group(page_size=64), group(page_size=256))) == 256
  mixed = (group(page_size=16), group(page_size=48), group(page_size=5, reusable=False))
  assert hash_unit(mixed) == 16
  assert stride(mixed) == 48


def test_the_last_sampled_token_has_no_entry_yet():
  """Prompt 20, 12 more tokens, pages of 16: one page is whole, since token 32 is never written."""
  d = driver(group("full", 16, 20))
  (s,) = d.add([1] * 20, 12)
  d.drain()
  assert len(s.tokens) == 32
  assert cached_pages(d, 0) == [0]


def test_an_answer_can_be_gone_on_from():
  """The next turn of a conversation finds its own last turn."""
  d = driver(group("full", 4, 40), group("sliding", 4, 40, window=8))
  (s,) = d.add([1, 2, 0, 1, 1], 22)
  d.drain()
  assert serve(d, [*s.tokens, 1, 2]) == 24


def test_salts_keep_tenants_apart():
  d = driver(group("full", 4, 40))
  tokens = [1, 2] * 10
  serve(d, tokens, salt="a")
  assert found(d, tokens) == 0
  assert found(d, tokens, salt="b") == 0
  assert found(d, tokens, salt="a") == 16


def test_keys_are_tagged():
  """A salt that equals an adapter's name, or a field that spells another one, is another key."""
  base = digest(model="m")
  keys = [
    root_key(base),
    root_key(base, salt="x"),
    root_key(base, adapter="x"),
    root_key(base, salt="x", adapter="x"),
    root_key(base, salt="None"),
    root_key(base, salt="x:str:1:y"),
    root_key(digest(model="n"), salt="x"),
  ]
  assert len(set(keys)) == len(keys)
  assert digest(a=b"1") != digest(a="1") != digest(a=1)
  assert digest(a="b", c="d") != digest(a="bc", c="")


@pytest.mark.parametrize("change", [{"page_size": 8}, {"window": 9}, {"name": "other"}])
def test_the_namespace_names_the_geometry(change):
  fields = {"name": "g", "page_size": 4, **change}
  assert namespace("m", (group("g", 4),)) != namespace("m", (group(pages=16, **fields),))
  assert namespace("m", (group("g", 4),)) != namespace("n", (group("g", 4),))
  # Memory and schedule are not part of it: what is on disk outlives a change of them.
  assert namespace("m", (group("g", 4, 16),)) == namespace("m", (group("g", 4, 99, slots=9),))


def test_a_chain_names_every_token_before():
  a, b = Chain(b"root", 4), Chain(b"root", 4)
  assert a.key(8, [1, 2, 3, 4, 5, 6, 7, 8]) == b.key(8, [1, 2, 3, 4, 5, 6, 7, 8])
  assert Chain(b"root", 4).key(8, [9, 2, 3, 4, 5, 6, 7, 8]) != a.key(8, [])
  assert Chain(b"other", 4).key(4, [1, 2, 3, 4]) != a.key(4, [])
  with pytest.raises(ValueError, match="expected 12 tokens"):
    a.key(12, [1] * 9)


def test_tails_are_evicted_before_heads_and_old_ones_before_new_ones():
  d = driver(group("full", 4, 12, longest=40), slots=1)
  first, second = [1] * 17, [2] * 17
  serve(d, first)
  serve(d, second)  # 4 whole pages of each, 5 with the last one
  assert (found(d, first), found(d, second)) == (16, 16)
  serve(d, [0] * 21)  # 6 pages: 4 are free, then the first one's tail
  assert (found(d, first), found(d, second)) == (8, 16)


def test_a_hit_makes_recent():
  d = driver(group("full", 4, 14, longest=40), slots=1)
  first, second = [1] * 17, [2] * 17
  serve(d, first)
  serve(d, second)
  assert serve(d, first) == 16
  serve(d, [0] * 33)
  assert found(d, first) > found(d, second)


def test_hits_are_held_before_anything_is_taken():
  """Nothing is evicted that the same request is about to use, whatever the order of the groups."""
  layout = (group("sliding", 4, 9, window=8, longest=32), group("full", 4, 9, longest=32))
  d = driver(*layout, slots=1)
  prompt = [1, 2, 0, 2] * 4
  serve(d, [*prompt, 1])
  serve(d, [2] * 20)  # takes what is free, and tails
  length = found(d, [*prompt, 0, 0])
  assert length > 0
  assert serve(d, [*prompt, *[0] * 14]) == length


def test_renumbering_keeps_the_order(monkeypatch):
  monkeypatch.setattr("kvjax.prefix._MAX_STAMP", 40)
  d = driver(group("full", 4, 12, longest=40), slots=1)
  for token in (1, 2):
    serve(d, [token] * 17)
  for _ in range(5):
    serve(d, [1] * 17)
    serve(d, [2] * 17)
  assert d.cache.index.now < 200
  serve(d, [0] * 21)
  assert (found(d, [1] * 17), found(d, [2] * 17)) == (8, 16)


def test_reset_forgets_everything():
  d = driver(group("full", 4, 40))
  d.add([1] * 20, 5)
  d.step()
  d.step()
  d.cache.reset(d.scheduler.running)
  assert found(d, [1] * 20) == 0
  d.drain()
  assert found(d, [1] * 20) == 0  # computed before the reset, in part
  serve(d, [1] * 20)
  assert found(d, [1] * 20) == 16


@pytest.mark.parametrize("seed", range(30))
def test_predicted_pages_are_those_that_are_taken(seed):
  """With a hit or without: never fewer than what a lone prompt takes, and exact for full groups."""
  rng = random.Random(seed)
  layout = random_layout(rng, slots=2, longest=48, step=rng.choice([3, 16, 48]))
  d = Driver(layout, config(2, layout[0].step_tokens))
  stem = [rng.randrange(3) for _ in range(24)]
  d.add([*stem, 1, 2], 3)
  d.drain()
  prompt = stem[: rng.randint(4, 24)] + [rng.randrange(3) for _ in range(rng.randint(1, 16))]
  for p in (prompt, [2, 2, 1, *prompt][:47]):
    (s,) = d.add(p, 1)
    hit = d.cache.hit(s)
    predicted = d.cache.needed(s, hit, d.scheduler._step_tokens)
    before, least = d.cache.available(), d.cache.available()
    while s.slot is not None or s in d.scheduler.waiting:
      plan = d.step()
      if plan is not None:  # its tables are those before the sequence has left
        refs = [(t.refs > 0).sum() for t in plan.pages]
        least = [min(a, g.pages - n) for a, g, n in zip(least, layout, refs, strict=True)]
    d.drain()
    for g, most, was, then in zip(layout, predicted, before, least, strict=True):
      taken = was - then
      assert taken <= most, g.name
      if g.retention.reach is None and g.reusable:
        assert taken == most, g.name
