"""A real model with tiers beneath its cache, and ways to make it forget what lies above one."""

import time
from typing import Any

from serving_runs import SOURCE

from kvjax import Engine, OffloadConfig, Request, SamplingParams
from kvjax import config as C
from kvjax.weights.load import Model

PAGE = 16


def engine(
  model: Model, longest: int, offload: OffloadConfig | None, *, slots: int = 1, pages: int = 0
) -> Engine:
  """An engine of `slots` sequences; pools for as many of the longest, or of `pages` pages."""
  group = C.GroupConfig(pages=pages or slots * -(-longest // PAGE))
  config = C.Config(
    model=C.ModelConfig(source=SOURCE, dtype=model.dtype, max_length=longest),
    cache=C.CacheConfig(page_size=PAGE, groups={"full": group}),
    scheduler=C.SchedulerConfig(max_sequences=slots, token_budget=256, query_block=64),
    offload=offload or OffloadConfig(),
  )
  return Engine(model, config)


def greedy(new: int) -> SamplingParams:
  return SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)


def timed(e: Engine, name: str, ids: tuple[int, ...], new: int = 1) -> dict[str, Any]:
  """Serves one request alone: seconds, its tokens, and where its prompt tokens came from."""
  before = dict(e.figures()["prompt_tokens_by_source"])
  start = time.perf_counter()
  e.add(Request(name, ids, greedy(new)))
  (done,) = list(e.run())
  seconds = time.perf_counter() - start
  after = e.figures()["prompt_tokens_by_source"]
  return {
    "seconds": seconds,
    "tokens": done.token_ids,
    "sources": {k: after[k] - before[k] for k in after},
  }


def settle(e: Engine) -> None:
  """Waits until everything that is on its way to a tier is there."""
  offload = e._offload
  assert offload is not None
  e._executor.pack(offload.stores.take())
  while offload.stores.in_flight_bytes:
    offload.poll()
    time.sleep(0.001)


def forget_device(e: Engine) -> None:
  """As if other requests had taken every cached page of the device."""
  assert e._cache.index is not None
  e._cache.index.clear()
  e._cache.pages = e._cache.index.flush(e._cache.pages)


def forget_host(e: Engine) -> None:
  """As if the process had been started anew: only files are left."""
  assert e._offload is not None
  assert e._offload.tiers.host is not None
  e._offload.tiers.host.clear()
  e._offload.tiers.version += 1
