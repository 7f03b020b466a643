"""Offload in the engine: the same tokens whatever the tiers keep, lose, damage or refuse.

Each test asserts the counters that prove that what it is about took place.
"""

import dataclasses
import functools
import os
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax import config as C
from kvjax import testing
from kvjax.errors import ConfigError, RequestError
from kvjax.offload.disk import DiskTier
from kvjax.offload.piece import Piece

NEW = 10
LONGEST = 128
KINDS = ("mixed", "varied")


@functools.cache
def model(kind):
  return testing.tiny_model(kind)


def engine(kind="mixed", offload=None, *, pages=24, cache=None, executor=None, **scheduler):
  """Pools so small that nothing stays on the device from one request to the next but one."""
  names = [g.name for g in kvjax.plan(model(kind).spec, max_sequences=1, max_length=32)]
  cache = {
    "page_size": 4,
    "check_invariants": True,
    "groups": {name: C.GroupConfig(pages=pages) for name in names},
  } | (cache or {})
  base = {"max_sequences": 3, "token_budget": 24, "query_block": 8}
  few = {"decode_buckets": (64,), "prefill_buckets": (64,)}
  config = C.Config(
    model=C.ModelConfig(source="gguf:tiny", max_length=LONGEST),
    cache=C.CacheConfig(**cache),
    scheduler=C.SchedulerConfig(**(base | few | scheduler)),
    offload=offload or C.OffloadConfig(),
  )
  return kvjax.Engine(model(kind), config, executor=executor)


def offload(**more):
  base = {"host_bytes": 2**22, "blocks_per_chunk": 2, "restore": "always"}
  return C.OffloadConfig(**(base | more))


@functools.cache
def prompts():
  rng = np.random.default_rng(0)
  return tuple(tuple(int(t) for t in rng.integers(3, 250, length)) for length in (70, 66, 75, 60))


def serve(e, order, tag=""):
  """Tokens of prompts served one after the other."""
  out = []
  for k, i in enumerate(order):
    sampling = kvjax.SamplingParams(
      max_tokens=NEW, temperature=0.7 * (i % 2), seed=i, ignore_eos=True
    )
    e.add(kvjax.Request(f"{tag}{k}", prompts()[i], sampling))
    out += [c.token_ids for c in e.run()]
  return out


ROUNDS = (0, 1, 2, 3, 0, 1, 2, 3)


@functools.cache
def plain(kind):
  e = engine(kind, pages=96, cache={"prefix_sharing": False})
  return serve(e, ROUNDS)


def sources(e):
  figures = e.figures()
  by_source = figures["prompt_tokens_by_source"]
  assert sum(by_source.values()) == figures["prompt_tokens"]
  return by_source


@pytest.mark.parametrize("kind", KINDS)
def test_everything_goes_through_host_memory_and_back(kind):
  e = engine(kind, offload())
  assert serve(e, ROUNDS) == plain(kind)
  assert sources(e)["host"] >= 4 * 48
  figures = e.figures()["offload"]
  assert figures["stored"] > 0
  for name, group in figures["groups"].items():
    assert group["loaded_bytes"] > 0, name
  host = figures["host"]
  assert host["resident_bytes"] == sum(g["resident_bytes"] for g in host["groups"].values())
  for g in e.layout:
    # Exact: no row that is as long as all groups need.
    assert host["groups"][g.name]["resident_bytes"] % g.page_bytes == 0


def test_of_a_window_only_what_it_needs_is_moved():
  e = engine("mixed", offload())
  serve(e, ROUNDS)
  window = next(g for g in e.layout if g.retention.window)
  moved = e.figures()["offload"]["groups"][window.name]["loaded_bytes"]
  restored = sum(1 for i in ROUNDS[4:])
  most = restored * (window.pages_for(window.retention.window - 1) + 1) * window.page_bytes
  assert 0 < moved <= most


def test_another_process_goes_on_from_the_disk(tmp_path):
  disk = {"disk_path": str(tmp_path), "host_bytes": 0}
  first = engine("mixed", offload(**disk))
  assert serve(first, ROUNDS[:4]) == plain("mixed")[:4]
  assert sources(first)["disk"] == 0
  first.close()
  second = engine("mixed", offload(**disk))
  assert serve(second, ROUNDS[:4]) == plain("mixed")[:4]
  assert sources(second)["disk"] >= 4 * 48
  assert second.figures()["offload"]["disk"]["failures"] == {}
  # The host tier between them: what came from disk once comes from there.
  second.close()
  third = engine("mixed", offload(disk_path=str(tmp_path)))
  assert serve(third, ROUNDS) == plain("mixed")
  assert sources(third)["disk"] >= 4 * 48
  assert sources(third)["host"] >= 4 * 48


def test_other_weights_find_nothing(tmp_path):
  first = engine("mixed", offload(disk_path=str(tmp_path)))
  serve(first, ROUNDS[:2])
  first.close()
  other = dataclasses.replace(model("mixed"), fingerprint="other weights")
  e = kvjax.Engine(other, first.config)
  assert serve(e, ROUNDS[:2]) == plain("mixed")[:2]
  assert sources(e)["disk"] == 0
  assert e.figures()["offload"]["stored"] > 0


class Every:
  """Breaks a disk tier on every n-th call of `read`."""

  def __init__(self, n, how):
    self.n, self.how, self.calls = n, how, 0

  def __call__(self, read):
    def reading(tier, key, group):
      self.calls += 1
      if self.calls % self.n == 0:
        self.how(tier, key)
      return read(tier, key, group)

    return reading


def lose(tier, key):
  os.unlink(tier._path(key))


def damage(tier, key):
  path = Path(tier._path(key))
  data = bytearray(path.read_bytes())
  data[-7] ^= 4
  path.write_bytes(data)


@pytest.mark.parametrize(("n", "how"), [(3, lose), (5, damage)])
def test_lost_and_damaged_chunks_are_computed_again(tmp_path, monkeypatch, n, how):
  e = engine("mixed", offload(disk_path=str(tmp_path), host_bytes=0))
  breaking = Every(n, how)
  monkeypatch.setattr(DiskTier, "read", breaking(DiskTier.read))
  assert serve(e, ROUNDS) == plain("mixed")
  figures = e.figures()["offload"]
  assert breaking.calls >= n
  assert figures["lost"] == breaking.calls // n
  if how is damage:
    assert figures["disk"]["failures"] == {"checksum": breaking.calls // n}
  counted = sources(e)
  assert counted["computed"] > sum(map(len, prompts()))
  assert counted["computed"] < 2 * sum(map(len, prompts()))


def test_host_memory_at_its_least():
  window, full = engine("mixed").layout
  least = 2 * max(window.page_bytes, full.page_bytes)
  e = engine("mixed", offload(host_bytes=least))
  assert serve(e, ROUNDS) == plain("mixed")
  host = e.figures()["offload"]["host"]
  assert host["peak_bytes"] <= least
  assert host["evictions"] > 0


def test_a_full_disk(tmp_path, monkeypatch):
  def full(path, *parts):
    raise OSError(28, "No space left on device")

  e = engine("mixed", offload(disk_path=str(tmp_path), host_bytes=0))
  monkeypatch.setattr("kvjax.offload.files._write_synced", full)
  assert serve(e, ROUNDS) == plain("mixed")
  e.close()
  disk = e.figures()["offload"]["disk"]
  assert disk["refusals"] > 0
  assert disk["stores"] == 0
  assert list(tmp_path.rglob("*.kv")) == []


def test_a_disk_that_hangs_costs_one_deadline(tmp_path, monkeypatch):
  import threading

  first = engine("mixed", offload(disk_path=str(tmp_path), host_bytes=0))
  serve(first, ROUNDS[:4])
  first.close()
  release = threading.Event()
  whole = DiskTier.read
  monkeypatch.setattr(
    DiskTier, "read", lambda tier, key, group: release.wait(60) and whole(tier, key, group)
  )
  e = engine("mixed", offload(disk_path=str(tmp_path), host_bytes=0, deadline_seconds=0.2))
  assert serve(e, ROUNDS[:4]) == plain("mixed")[:4]
  figures = e.figures()["offload"]
  release.set()
  assert figures["late"] > 0
  assert sources(e)["disk"] == 0


def test_decoding_goes_on_while_a_disk_is_slow(tmp_path, monkeypatch):
  import time

  first = engine("mixed", offload(disk_path=str(tmp_path), host_bytes=0))
  serve(first, (0, 1, 2, 3))
  first.close()
  e = engine("mixed", offload(disk_path=str(tmp_path), host_bytes=0))
  serve(e, (3,), "warm")
  whole = DiskTier.read

  def slow(tier, key, group):
    time.sleep(0.3)
    return whole(tier, key, group)

  monkeypatch.setattr(DiskTier, "read", slow)
  greedy = kvjax.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
  e.add(kvjax.Request("runs", (5, 6, 7), greedy))
  e.step()
  e.add(kvjax.Request("waits", prompts()[0], greedy))
  before = sources(e)["disk"]
  steps = 0
  while sources(e)["disk"] == before:
    e.step()
    steps += 1
    assert steps < 10_000
  assert e.metrics.steps > 10 or steps > 10
  list(e.run())


def test_a_preempted_sequence_comes_back_from_host_memory():
  sampling = kvjax.SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
  items = [kvjax.Request(f"r{i}", prompts()[i][:40], sampling) for i in range(3)]

  def run(e):
    for r in items:
      e.add(r)
    return {c.request_id: c.token_ids for c in e.run()}

  want = run(engine("mixed", pages=96, cache={"prefix_sharing": False}))
  e = engine("mixed", offload(), pages=36)
  assert run(e) == want
  figures = e.figures()
  assert figures["preemptions"] > 0
  assert figures["restored_tokens"] > 0
  assert figures["offload"]["loaded"] > 0


def test_what_is_cheaper_to_compute_is_computed():
  e = engine("mixed", offload(restore="auto"))
  e._offload.rates.host = 1.0  # a byte per second
  assert serve(e, ROUNDS) == plain("mixed")
  assert sources(e)["host"] == 0
  assert e.figures()["offload"]["stored"] > 0
  e._offload.rates.host = 1e12
  assert serve(e, ROUNDS, "again") == plain("mixed")
  assert sources(e)["host"] > 0


def test_never_is_never():
  e = engine("mixed", offload(restore="never"))
  assert serve(e, ROUNDS) == plain("mixed")
  assert sources(e)["host"] == 0


def test_store_after_waits_for_somebody_to_ask_again():
  e = engine("mixed", offload(store_after=1))
  serve(e, (0, 1, 2, 3))
  assert e.figures()["offload"]["stored"] == 0
  serve(e, (0, 1, 2, 3), "second")
  assert e.figures()["offload"]["stored"] > 0
  assert sources(e)["host"] == 0
  assert serve(e, (0, 1, 2, 3), "third") == plain("mixed")[:4]
  assert sources(e)["host"] > 0


def test_a_salt_keeps_tenants_apart():
  e = engine("mixed", offload())
  sampling = kvjax.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)

  def one(name, salt, i=0):
    e.add(kvjax.Request(name, prompts()[i], sampling, cache_salt=salt))
    list(e.run())

  one("a", "mine")
  for i in (1, 2, 3):
    one(f"other{i}", "mine", i)
  one("b", "yours")
  one("c", None)
  assert sources(e)["host"] == 0
  one("d", "mine")
  assert sources(e)["host"] > 0


def test_a_reset_forgets_every_tier(tmp_path):
  e = engine("mixed", offload(disk_path=str(tmp_path)))
  serve(e, ROUNDS[:4])
  e._offload.stores.flush(10)
  assert list(tmp_path.rglob("*.kv"))
  e.reset_prefix_cache()
  assert not list(tmp_path.rglob("*.kv"))
  assert serve(e, ROUNDS[:4], "again") == plain("mixed")[:4]
  assert sources(e)["host"] == sources(e)["disk"] == 0


def test_a_request_aborted_while_it_waits_for_the_disk(tmp_path, monkeypatch):
  first = engine("mixed", offload(disk_path=str(tmp_path), host_bytes=0))
  serve(first, (0, 1))
  first.close()
  import threading

  release = threading.Event()
  whole = DiskTier.read
  monkeypatch.setattr(
    DiskTier, "read", lambda tier, key, group: release.wait(60) and whole(tier, key, group)
  )
  e = engine("mixed", offload(disk_path=str(tmp_path), host_bytes=0))
  e.add(kvjax.Request("r", prompts()[0], kvjax.SamplingParams(max_tokens=2, temperature=0)))
  e.step()
  assert e._scheduler.waiting
  e.abort("r")
  assert [c.finish_reason for c in e.step()] == ["abort"]
  release.set()
  assert len(e._offload.fetches) == 0
  assert all(g["used"] == 0 for g in e.figures()["pages"].values())
  assert serve(e, (0, 1)) == plain("mixed")[:2]


def test_sharing_off_with_offload_is_refused():
  with pytest.raises(ConfigError, match=r"prefix_sharing: expected true with config\.offload"):
    engine("mixed", offload(), cache={"prefix_sharing": False})


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
  (tmp_path / "file").write_text("x")
  with pytest.raises(ConfigError, match=r"config\.offload\.disk_path: expected a directory"):
    engine("mixed", offload(disk_path=str(tmp_path / "file")))


def test_chunks_that_never_hit_are_spoken_of(caplog):
  e = engine("mixed", offload())
  o = e._offload
  told = []
  o._report = told.append
  o.tiers.counts["stored"] = 5
  for _ in range(200):
    o.searched(None, 0)
  assert len(told) == 1
  assert f"group {e.layout[0].name}" in told[0]
  assert "200" in told[0] or "64" in told[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [0, 1, 3, 7])
def test_a_suspended_request_goes_on_with_the_same_tokens(kind, after, tmp_path):
  """Suspended in any state, to disk, and resumed by another engine."""
  sampling = kvjax.SamplingParams(max_tokens=NEW, temperature=0.7, seed=1, ignore_eos=True, n=2)
  request = kvjax.Request("r", prompts()[0], sampling, cache_salt="s")
  whole = engine(kind, pages=96)
  whole.add(request)
  want = {(c.request_id, c.index): c.token_ids for c in whole.run()}
  settings = offload(disk_path=str(tmp_path / "tier"), host_bytes=0)
  first = engine(kind, settings, pages=60)
  first.add(request)
  for _ in range(after):
    assert not first.step()
  suspended = first.suspend("r")
  assert first.unfinished == 0
  assert all(g["used"] == 0 for g in first.figures()["pages"].values())
  suspended.save(tmp_path / "r.json")
  first.close()
  second = engine(kind, settings, pages=60)
  loaded = kvjax.Suspended.load(tmp_path / "r.json")
  assert loaded == suspended
  second.resume(loaded)
  assert {(c.request_id, c.index): c.token_ids for c in second.run()} == want
  if after == 7:
    assert len(suspended.sequences[0].token_ids) > 0
    assert sources(second)["disk"] > 48


def test_suspending_what_is_not_there_is_an_error(tmp_path):
  e = engine("mixed")
  with pytest.raises(RequestError, match="id: expected the id of a request in flight"):
    e.suspend("nobody")
  (tmp_path / "x.json").write_text("{}")
  with pytest.raises(RequestError, match=r"suspended: expected a file that Suspended\.save wrote"):
    kvjax.Suspended.load(tmp_path / "x.json")


def test_pieces_know_their_size():
  piece = Piece(b"k" * 32, "full", 3, np.zeros((2, 5), np.float32))
  assert (piece.count, piece.nbytes) == (2, 40)
