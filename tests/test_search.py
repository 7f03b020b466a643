"""How far a prefix reaches over device and tiers, against a search that asks for everything."""

import dataclasses
import random

import pytest
from driving import Driver, group, needed_pages, random_layout

from kvjax.config import SchedulerConfig
from kvjax.geometry import resumable
from kvjax.offload.search import Found, Search, piece_key
from kvjax.prefix import Chain, root_key

ROOT = root_key(b"stub")


class Pieces:
  """What the tiers have of one sequence: (group, stop) -> first logical page."""

  def __init__(self, d: Driver, tokens, there: dict[tuple[int, int], int]):
    self.layout, self.tokens, self.there = d.layout, tokens, there
    self.chain = Chain(ROOT, d.unit)
    self.names = {
      piece_key(d.layout[i], self.chain, tokens, stop): (i, first)
      for (i, stop), first in there.items()
    }

  def probe(self, group: int, key: bytes, stop: int) -> Found | None:
    entry = self.names.get(key)
    if entry is None:
      return None
    assert entry[0] == group
    return Found(key, group, entry[1], stop, "host")

  def has(self, group: int, logical: int) -> bool:
    chunk = self.layout[group].chunk(logical)
    return any(
      i == group and first <= logical < stop <= chunk.stop
      for (i, stop), first in self.there.items()
    )

  def reach(self, d: Driver):
    index = d.cache.index
    hit = index.lookup(self.chain, self.tokens, len(self.tokens) - 1)
    above = 0 if hit is None else hit.length
    search = Search(d.layout, self.chain, self.tokens, self.probe)
    standing = index.standing(self.chain, self.tokens, len(self.tokens) - 1)
    return above, search.reach(index, standing, above), search


def brute_force_reach(d: Driver, tokens, pieces: Pieces) -> int:
  """Every length, every page of it. What the device has of a path is what the index says, which
  has a brute-force test of its own: not all that lies there by chance, as it names boundaries."""
  index = d.cache.index
  standing = index.standing(pieces.chain, tokens, len(tokens) - 1)
  for length in range(len(tokens) - 1, 0, -1):
    if not resumable(d.layout, length):
      continue
    held = index.held(standing, length)
    if all(
      pieces.has(i, logical) or page >= 0
      for i, g in enumerate(d.layout)
      if g.reusable
      for logical, page in zip(sorted(needed_pages(g, length)), held[i], strict=True)
    ):
      return length
  return 0


def random_pieces(rng: random.Random, d: Driver, tokens) -> dict[tuple[int, int], int]:
  """Some parts of some chunks; at times all of a group."""
  there = {}
  for i, g in enumerate(d.layout):
    share = rng.choice([0.3, 0.7, 0.95, 1])
    for chunk in g.chunks(range(len(tokens) // g.page_size)):
      for stop in range(chunk.start + 1, chunk.stop + 1):
        if g.reusable and rng.random() < share:
          there[i, stop] = rng.randint(chunk.start, stop - 1) if share < 1 else chunk.start
  return there


@pytest.mark.parametrize("seed", range(60))
def test_the_reach_is_that_of_a_brute_force_search(seed):
  """Random groups, chunks, histories and pieces; each need is met by the device or by a piece."""
  rng = random.Random(seed)
  layout = random_layout(rng, slots=2, longest=48, step=16)
  layout = tuple(dataclasses.replace(g, blocks_per_chunk=rng.randint(1, 4)) for g in layout)
  config = SchedulerConfig(max_sequences=2, token_budget=16, query_block=8)
  d = Driver(layout, config)
  if d.cache.index is None:
    pytest.skip("all of it is scratch memory")
  stem = [rng.randrange(3) for _ in range(40)]
  farther = 0
  for _ in range(12):
    prompt = stem[: rng.randint(1, 40)] + [rng.randrange(3) for _ in range(rng.randint(1, 7))]
    if rng.random() < 0.6:
      d.add(prompt, rng.randint(1, 48 - len(prompt)) if len(prompt) < 48 else 1)
      d.drain()
    asked = stem[: rng.randint(20, 40)] + [rng.randrange(3) for _ in range(3)]
    pieces = Pieces(d, asked, random_pieces(rng, d, asked))
    above, reach, _ = pieces.reach(d)
    want = brute_force_reach(d, asked, pieces)
    assert max(want, above) == (above if reach is None else reach.length)
    if reach is None:
      continue
    farther += 1
    for i, g in enumerate(layout):
      wanted = sorted(needed_pages(g, reach.length)) if g.reusable else []
      assert len(reach.pages[i]) == len(wanted)
      lacking = [at for at, page in zip(wanted, reach.pages[i], strict=True) if page < 0]
      assert len(lacking) == len(reach.pieces[i])
      for at, found in zip(lacking, reach.pieces[i], strict=True):
        assert found.first <= at < found.stop
        assert found.stop <= g.chunk(at).stop
      kept = {page for page in reach.pages[i] if page >= 0}
      assert (d.cache.pages[i].stamp[list(kept)] > 0).all()
  if seed == 0:
    assert farther > 2  # it is about something


def reach_of(d, tokens, there):
  return Pieces(d, tokens, there).reach(d)


def driver(*groups):
  return Driver(tuple(groups), SchedulerConfig(max_sequences=4, token_budget=64, query_block=8))


def chunked(g, blocks):
  return dataclasses.replace(g, blocks_per_chunk=blocks)


def test_an_unaligned_window_takes_129_pages():
  """W 4096 over pages of 32, eight per chunk: a hit at 97,984 of 98,012 tokens."""
  g = chunked(group("w", 32, 400, longest=100_000, step=64, window=4096, slots=1), 8)
  d = driver(g)
  tokens = [0] * 98_012
  there = {(0, chunk.stop): chunk.start for chunk in g.chunks(range(97_984 // 32))}
  _, reach, _ = reach_of(d, tokens, there)
  assert reach.length == 97_984
  # An aligned window needs 128; the whole pages of one that begins inside a page are 129.
  assert len(reach.pieces[0]) == len(g.coverage(97_984)) == 128
  assert len(range((98_012 - 4095) // 32, -(-98_012 // 32))) == 129
  assert len(g.coverage(98_012)) == 129


def test_only_pages_of_the_window_are_asked_for():
  """A prefix of 128K over W = 512 takes 32 pages of the window's group, and asks for few names."""
  full = chunked(group("full", 16, 8200, longest=131_072, step=64, slots=1), 32)
  window = chunked(group("w", 16, 100, longest=131_072, step=64, window=512, slots=1), 4)
  d = driver(full, window)
  tokens = [1] * 131_072
  there = {
    (i, chunk.stop): chunk.start
    for i, g in enumerate(d.layout)
    for chunk in g.chunks(range(131_056 // 16))
  }
  _, reach, search = reach_of(d, tokens, there)
  assert reach.length == 131_056
  assert len(reach.pieces[0]) == 131_056 // 16
  assert len(reach.pieces[1]) == 32
  assert len({key for i, key in search._probed if i == 1}) < 40


def test_recurrent_states_meet_full_pages():
  """States at the ends of pages 0 and 3, full pages 0 and 1, of 256 tokens: 256 can be resumed."""
  full = group("full", 256, 8, longest=2048, step=64)
  state = group("state", 256, 8, longest=2048, step=64, state=True)
  d = driver(full, state)
  _, reach, search = reach_of(d, [1] * 1500, {(0, 1): 0, (0, 2): 1, (1, 1): 0, (1, 4): 3})
  assert reach.length == 256
  assert search.veto is not None


def test_writer_and_reader_agree_on_what_a_window_keeps():
  """Full 32, sliding 8, W 8 over eight pages of the window: boundaries need its pages 3 and 7."""
  full = group("full", 32, 8, longest=256, step=64)
  window = group("w", 8, 16, longest=256, step=64, window=8)
  d = driver(full, window)
  assert [list(window.coverage(n)) for n in (32, 64)] == [[3], [7]]
  there = {(0, 1): 0, (0, 2): 1, (1, 4): 3, (1, 8): 7}
  _, reach, _ = reach_of(d, [1] * 65, there)
  assert reach.length == 64
  _, reach, _ = reach_of(d, [1] * 64, there)  # the last token is computed anyway
  assert reach.length == 32


def test_the_group_that_vetoes_is_named():
  full = group("full", 4, 32, longest=64)
  window = group("w", 4, 32, longest=64, window=8)
  d = driver(full, window)
  everything = {(0, stop): stop - 1 for stop in range(1, 9)}
  _, reach, search = reach_of(d, [1] * 33, everything)
  assert reach is None
  assert search.veto == 1
  _, reach, search = reach_of(d, [1] * 33, {(1, stop): stop - 1 for stop in range(1, 9)})
  assert reach is None
  assert search.veto == 0
  _, reach, search = reach_of(d, [1] * 33, {})
  assert reach is None
  assert search.veto is None  # nobody has anything of this prompt


def test_a_scratch_group_is_never_asked_for():
  full = group("full", 4, 32, longest=64)
  scratch = group("scratch", 4, 32, longest=64, reusable=False)
  d = driver(full, scratch)
  _, reach, search = reach_of(d, [1] * 33, {(0, stop): stop - 1 for stop in range(1, 9)})
  assert reach.length == 32
  assert reach.pieces[1] == ()
  assert {i for i, _ in search._probed} == {0}
