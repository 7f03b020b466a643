"""The engine: the only place with a clock and side effects.

Each call of `step` plans the next device step while the device still works on the last one,
dispatches it, and only then reads the last one's tokens. What a sequence does next never depends
on the value of its newest token, only on its being there, so nothing waits for the read; a
sequence that turns out to have ended computed one step too many, which is thrown away and counted.
"""

import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from kvjax import pages as pages_lib
from kvjax.config import Config
from kvjax.engine.batching import shape_of
from kvjax.engine.cache_manager import CacheManager
from kvjax.engine.executor import Dispatched, Executor
from kvjax.engine.scheduler import Plan, Scheduler
from kvjax.engine.sequence import Sequence
from kvjax.engine.suspended import Suspended, SuspendedSequence
from kvjax.errors import RequestError
from kvjax.geometry import hash_unit, longest
from kvjax.metrics import Metrics
from kvjax.offload.open import open_offload
from kvjax.offload.piece import LAYOUT_VERSION
from kvjax.planning import attention_implementations, plan_for
from kvjax.prefix import Chain, namespace, root_key
from kvjax.request import Completion, Request
from kvjax.sharding import Shardings
from kvjax.weights.load import Model

_IDLE_SECONDS = 0.05  # how long a step without work waits for files


class Engine:
  """Serves requests from one model.

  Args:
    model: with weights.
    config: the declaration.
    clock: seconds; only differences are used.
    executor: what computes the steps; the model on the device when None. Anything else answers
      for the model, to study the host alone.
  """

  def __init__(
    self,
    model: Model,
    config: Config,
    clock: Any = time.perf_counter,
    executor: Executor | None = None,
  ):
    self.config = config
    self.tokenizer = model.tokenizer
    self.layout = plan_for(model, config)
    self.metrics = Metrics()
    self._spec = model.spec
    self._clock = clock
    cache = config.cache
    shard = "" if config.mesh.tensor == 1 else f" tensor={config.mesh.tensor}"
    self._namespace = namespace(
      f"{model.source} {model.fingerprint} {model.dtype} {model.spec}{shard} "
      f"pieces {LAYOUT_VERSION}",
      self.layout,
    )
    self._offload = open_offload(self.layout, config.offload, self._namespace, clock)
    self._cache = CacheManager(
      self.layout,
      cache.prefix_sharing,
      cache.check_invariants,
      config.scheduler.look_ahead,
      self._offload,
    )
    self._scheduler = Scheduler(self._cache, config.scheduler)
    self._invariant = config.model.numerics == "batch_invariant"
    if executor is None:
      if model.params is None:
        raise ValueError("model: expected weights, got a description; load with weights=True")
      implementations = attention_implementations(config)
      shardings = Shardings(config.mesh)
      executor = Executor(model.params, model.spec, self.layout, shardings, implementations)
    self._executor = executor
    if self._offload is not None and config.offload.restore == "auto":
      largest = max(range(len(self.layout)), key=lambda i: self.layout[i].chunk_bytes)
      self._offload.rates.host = executor.measure_copies(largest)
    self._requests: dict[str, list[Sequence]] = {}
    self._arrivals = 0
    self._dispatched: Dispatched | None = None
    self._last_read = clock()
    self._ended_early: list[Completion] = []  # between steps; the next one returns them

  def add(self, request: Request) -> None:
    """Queues a request.

    Raises:
      RequestError: it can never be served, with the figures; nothing is queued.
    """
    self._queue(request, [(i, (), ()) for i in range(request.sampling.n)])

  def _queue(self, request: Request, completions: list[tuple[int, Any, Any]]) -> None:
    """Queues completions of a request: (index, tokens so far, their log-probabilities)."""
    limit = self._check(request)
    now = self._clock()
    root = root_key(self._namespace, request.cache_salt)
    chain = Chain(root, hash_unit(self.layout))
    sequences = []
    for index, tokens, logprobs in completions:
      s = Sequence(request, index, self._arrivals, self.tokenizer, limit, chain.copy(), now)
      s.go_on_from(tokens, logprobs)
      sequences.append(s)
    for s in sequences:
      s.siblings = list(sequences)
    self._arrivals += 1
    self._requests[request.id] = sequences
    for s in sequences:
      self._scheduler.add(s)

  def suspend(self, request_id: str) -> Suspended | None:
    """Takes a request out, in any state; its pages go to the tiers as far as they take them.

    Returns:
      What `resume` goes on from, in this engine or in another one with the same model. None if its
      completions have all ended meanwhile: they come from the next `step`.

    Raises:
      RequestError: no such request is in flight.
    """
    if request_id not in self._requests:
      raise RequestError("id", "the id of a request in flight", request_id)
    if self._dispatched is not None:  # tokens that the device has sampled are kept
      dispatched, self._dispatched = self._dispatched, None
      self._ended_early += self._read(dispatched)
    sequences = self._requests.pop(request_id, None)
    if not sequences:
      return None
    out = []
    for s in sequences:
      new = tuple(s.tokens[s.prompt_length :])
      out.append(SuspendedSequence(s.index, new, tuple(s.logprobs)))
      self._scheduler.remove(s, urgent=True)
    return Suspended(sequences[0].request, tuple(out))

  def resume(self, suspended: Suspended) -> None:
    """Queues a request that `suspend` took out of an engine: it goes on with the same tokens.

    Raises:
      RequestError: as `add`.
    """
    completions: list[tuple[int, Any, Any]] = [
      (s.index, s.token_ids, s.logprobs) for s in suspended.sequences
    ]
    self._queue(suspended.request, completions)

  @property
  def unfinished(self) -> int:
    """Completions that are waiting or running."""
    return sum(len(sequences) for sequences in self._requests.values())

  def abort(self, request_id: str) -> None:
    """Ends a request in any state; its completions come from the next `step`, with what was done
    and the finish reason "abort". An id that is not in flight is ignored."""
    for s in list(self._requests.get(request_id, ())):
      s.finish_reason = "abort"
      self._ended_early.append(self._finish(s))

  def step(self) -> list[Completion]:
    """Plans and dispatches one step, reads the previous one, and returns what finished."""
    offload = self._offload
    if offload is not None:
      offload.poll()
    plan = self._scheduler.plan()
    if plan is None and offload is not None:
      self._executor.pack(offload.stores.take())
      if self._dispatched is None and not self._ended_early:
        offload.fetches.wait(_IDLE_SECONDS)
    previous, self._dispatched = self._dispatched, None
    done, self._ended_early = self._ended_early, []
    if plan is not None:
      self._count(plan)
      shape = shape_of(plan, self.config.scheduler, self._invariant)
      if previous is not None and shape not in self._executor.compiled:
        # Read first: a step that a compilation ran beside could not be timed.
        done += self._read(previous)
        previous = None
      if previous is None:
        self._last_read = self._clock()
      before = self._executor.compile_seconds
      self._dispatched = self._executor.dispatch(plan, shape)
      # Rates are those of the device; compilation has figures of its own.
      self._last_read += self._executor.compile_seconds - before
    if previous is not None:
      done += self._read(previous)
    if self._dispatched is not None and not self.config.scheduler.overlap:
      done += self._read(self._dispatched)
      self._dispatched = None
    return done

  def run(self) -> Iterator[Completion]:
    """Steps until nothing is unfinished, yielding completions as they finish."""
    while self.unfinished or self._ended_early or self._dispatched is not None:
      yield from self.step()

  def reset_prefix_cache(self) -> None:
    """Forgets every cached prefix, after a change to the weights, say. What is running keeps its
    pages, and nothing of it is kept for others."""
    self._cache.reset(self._scheduler.running)

  def close(self) -> None:
    """Waits for what is in flight, a deadline at most for files, and drops every request."""
    if self._dispatched is not None:
      self._executor.read(self._dispatched)
      self._dispatched = None
    for request_id in list(self._requests):
      self.abort(request_id)
    self._ended_early.clear()
    if self._offload is not None:
      self._executor.pack(self._offload.stores.take())
      self._offload.stores.flush(self.config.offload.deadline_seconds)
      self._offload.close()

  def figures(self) -> dict[str, Any]:
    """Everything measured so far, JSON-able: `kvjax.metrics.Metrics` and the engine's own."""
    waiting = len(self._scheduler.waiting)
    pages = pages_lib.describe(self._cache.pages, self.layout)
    return {
      **self.metrics.figures(),
      "offload": None if self._offload is None else self._offload.figures(),
      "running": len(self._scheduler.running),
      "waiting": waiting,
      "pages": {
        g.name: {
          **pages[g.name],
          "page_size": g.page_size,
          "page_bytes": g.page_bytes,
          "peak_used": self.metrics.peak_pages.get(g.name, 0),
          "waste": self.metrics.waste(g.name),
          "evictions": evictions,
        }
        for g, evictions in zip(self.layout, self._cache.evictions, strict=True)
      },
      "compilations": {
        "count": len(self._executor.compiled),
        "seconds": self._executor.compile_seconds,
        "shapes": {str(s): seconds for s, seconds in self._executor.compiled.items()},
      },
    }

  def _check(self, request: Request) -> int:
    """The request's limit in tokens, or RequestError."""
    if request.id in self._requests:
      raise RequestError("id", "an id that is not in flight", request.id)
    prompt, sampling = request.prompt_token_ids, request.sampling
    vocabulary = self._spec.vocab_size
    if not prompt:
      raise RequestError("prompt_token_ids", "at least one token", prompt)
    for key, ids in (
      ("prompt_token_ids", prompt),
      ("stop_token_ids", sampling.stop_token_ids),
      ("logit_bias", tuple(sampling.logit_bias)),
    ):
      for token in ids:
        if not 0 <= token < vocabulary:
          raise RequestError(key, f"token ids in [0, {vocabulary - 1}]", token)
    most = self.layout[0].max_length
    if len(prompt) >= most:
      raise RequestError(
        "prompt",
        f"at most {most - 1} tokens (max_length {most} holds prompt and output)",
        f"{len(prompt)} tokens",
      )
    new = most - len(prompt)
    if sampling.min_tokens > new:
      raise RequestError(
        "min_tokens",
        f"at most the {new} new tokens that the context of {most} has room for",
        sampling.min_tokens,
      )
    limit = len(prompt) + (new if sampling.max_tokens is None else min(sampling.max_tokens, new))
    lacking = self._scheduler.can_ever_fit(limit)
    if lacking:
      holds = longest(self.layout) + 1  # the last token is sampled, never written
      figures = ", ".join(f"{k}: {need} of {total}" for k, (need, total) in lacking.items())
      raise RequestError(
        "prompt" if len(prompt) >= holds else "max_tokens",
        f"a request of at most {holds} tokens, which is what the pools hold",
        f"{len(prompt)} prompt + {limit - len(prompt)} new tokens",
        f"Pages needed of pages there are: {figures}. Raise cache.memory_bytes",
      )
    return limit

  def _count(self, plan: Plan) -> None:
    m = self.metrics
    m.steps += 1
    m.prefill_steps += bool(plan.prefill)
    m.preemptions = self._scheduler.preemptions
    for a in plan.admitted:
      fresh, start = 0, a.reached
      for stop, source in a.sources:
        tokens = max(min(stop, a.sequence.prompt_length) - start, 0)
        m.prompt_tokens_by_source[source] += tokens
        fresh, start = fresh + tokens, max(start, stop)
      m.prompt_tokens += fresh
      m.restored_tokens += a.found - fresh
    m.recomputed_tokens += plan.computed_before
    m.prompt_tokens += plan.prompt_tokens
    m.prompt_tokens_by_source["computed"] += plan.prompt_tokens
    for g, p in zip(self.layout, plan.pages, strict=True):
      pages = int((p.last[plan.slots] - p.first[plan.slots]).sum())
      used = int((plan.stops - g.retention.first_readable(plan.stops)).sum())
      in_use = int(np.count_nonzero(p.refs))
      m.sample_pages(g.name, in_use, pages * g.page_size, used)

  def _read(self, dispatched: Dispatched) -> list[Completion]:
    results = self._executor.read(dispatched)
    now = self._clock()
    seconds, self._last_read = now - self._last_read, now
    self.metrics.seconds += seconds
    if dispatched.plan.prefill:
      self.metrics.prefill_seconds += seconds
      if self._offload is not None and seconds > 0:
        tokens = sum(w.count for w in dispatched.plan.prefill)
        self._offload.rates.add("prefill", tokens / seconds)
    plan, done = dispatched.plan, []
    counts = (plan.stops - plan.starts)[: len(plan.decode)].tolist()
    sampled = list(zip(plan.decode, dispatched.rows, counts, strict=False))
    sampled += [
      (w.sequence, row, w.samples)
      for w, row in zip(plan.prefill, dispatched.rows[len(plan.decode) :], strict=True)
    ]
    gaps: dict[float, int] = {}  # tokens by the time of the one before, which most share
    for i in range(plan.steps):
      ids, finite = results.tokens[i], results.finite[i]
      for s, row, count in cast(list[tuple[Sequence, int, int]], sampled):
        if i >= count:
          continue
        if s.finish_reason is not None:
          self.metrics.discarded_tokens += 1
          continue
        if not finite[row]:
          s.finish_reason = "error"
          done.append(self._finish(s))
          continue
        wanted = s.logprobs_wanted
        s.accept(ids[row], None if wanted is None else results.logprobs(row, i, wanted))
        self.metrics.decode_tokens += 1
        before = s.last_token_at
        if before != now:
          if before is None:
            self.metrics.time_to_first_token.add(now - s.arrived)
          else:
            # Tokens of one call arrive together: the gap before them is shared by all of them.
            gap = (now - before) / count
            gaps[gap] = gaps.get(gap, 0) + count
          s.last_token_at = now
        if s.finish_reason is not None:
          done.append(self._finish(s))
    for gap, count in gaps.items():
      self.metrics.time_between_tokens.add(gap, count)
    return done

  def _finish(self, s: Sequence) -> Completion:
    self._scheduler.remove(s)
    siblings = self._requests[s.request.id]
    siblings.remove(s)
    if not siblings:
      del self._requests[s.request.id]
    self.metrics.completions += 1
    return s.completion()
