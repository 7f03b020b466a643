"""Prompt lines through an engine into result records, each line on its own.

Lines are read only while the engine holds less than `look_ahead` completions, so memory does not
grow with the input, apart from a digest per line (ids must not repeat).
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvjax.errors import RequestError
from kvjax.job.progress import Progress
from kvjax.job.prompts import (
  BadLine,
  LineParser,
  PromptLine,
  RawLine,
  Tokenizer,
  encode_prompt,
)
from kvjax.job.records import (
  batch_record,
  encode_record,
  error_record,
  native_record,
  readable,
  readable_error,
)
from kvjax.job.results import InOrder, OutputRefused, ResultFile, key_of
from kvjax.job.source import Source
from kvjax.job.stop import Stop
from kvjax.request import Completion, Request


class Engine(Protocol):
  """The part of an engine that a job uses."""

  @property
  def unfinished(self) -> int: ...
  def add(self, request: Request) -> None: ...
  def step(self) -> Sequence[Completion]: ...
  def figures(self) -> Mapping[str, Any]: ...
  def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Serving:
  """A started engine, the tokenizer of its model, and the model's name for OpenAI responses."""

  engine: Engine
  tokenizer: Tokenizer
  name: str


@dataclasses.dataclass
class Counts:
  """Lines of the input, without blank ones; lines = served + failed + kept when all is done.

  Attributes:
    served, failed: lines that this run gave results or an error record.
    kept: lines whose records were there already; `kept_failed` of them are error records.
    records: records written by this run.
  """

  lines: int = 0
  served: int = 0
  failed: int = 0
  kept: int = 0
  kept_failed: int = 0
  records: int = 0


@dataclasses.dataclass
class _Pending:
  """A line in the engine: its place in the output, what is there already, what came back."""

  line: PromptLine
  place: int
  mask: int
  completions: dict[int, Completion] = dataclasses.field(default_factory=dict)


class Job:
  """Lines from a source through an engine into a result file.

  Args:
    source: raw lines.
    results: where records go, and which lines it holds already.
    parser: reads the lines.
    start: starts the engine; called once, when the first line needs it.
    look_ahead: lines are admitted while the engine holds fewer completions.
    ordered: records in input order; otherwise as they finish, an OpenAI line when it is whole.
    pretty: text for reading instead of records.
    progress: the bar.
  """

  def __init__(
    self,
    source: Source,
    results: ResultFile,
    parser: LineParser,
    start: Callable[[], Serving],
    *,
    look_ahead: int,
    ordered: bool = False,
    pretty: bool = False,
    progress: Progress,
  ):
    self.counts = Counts()
    self.serving: Serving | None = None
    self._source = source
    self._results = results
    self._parser = parser
    self._start = start
    self._look_ahead = look_ahead
    self._pretty = pretty
    self._progress = progress
    self._order = InOrder(self._append) if ordered else None
    self._place = 0
    self._seen: set[int] = set()
    self._pending: dict[str, _Pending] = {}

  @property
  def unwritten(self) -> int:
    """Finished lines that wait for earlier ones to be written in order."""
    return len(self._order) if self._order is not None else 0

  def run(self, stop: Stop) -> None:
    """Serves every line, or those that are finished when `stop` is set.

    Raises OutputError, OutputRefused, Interrupted, and whatever the engine raises.
    """
    while not stop.signal:
      self._admit(stop)
      if stop.signal:
        break
      busy = self.serving is not None and self.serving.engine.unfinished > 0
      if not busy and self._source.ended:
        break
      if busy:
        assert self.serving is not None
        for completion in self.serving.engine.step():
          self._take(completion)
      self._results.tick()
      if self.serving is not None and self._progress.due():
        self._progress.show(self.serving.engine.figures())

  def _admit(self, stop: Stop) -> None:
    """Reads lines until the engine has enough, the source has none, or `stop` is set."""
    while not stop.signal and not self._source.ended:
      held = self.serving.engine.unfinished if self.serving is not None else 0
      if held >= self._look_ahead:
        return
      raw = self._source.next(0.0 if held else 0.1)
      if raw is None:
        return
      self._line(raw, stop)

  def _line(self, raw: RawLine, stop: Stop) -> None:
    """One line: kept, refused, or handed to the engine."""
    bad: BadLine | None = None
    line: PromptLine | None = None
    try:
      line = self._parser.parse(raw)
      if line is None:
        self._progress.skip()
        return
    except BadLine as error:
      bad = error
    read = line if line is not None else bad
    assert read is not None
    self.counts.lines += 1
    finished = self._results.finished
    if finished.take(read.id, error_line=read.number):
      self._claim(read)
      self.counts.kept_failed += 1
      self._keep()
      return
    if not self._claim(read):
      self._refuse(
        BadLine(
          read.number,
          f"id: expected one that no earlier line has, got {read.id!r}",
          id=read.id,
          style=read.style,
          param="id" if read.style == "native" else "custom_id",
          code="duplicate_id",
        )
      )
      return
    mask = finished.take(read.id) if read.id is not None else 0
    whole = (1 << line.sampling.n) - 1 if line is not None else mask
    if mask and mask & whole == whole:
      self._keep()
    elif line is None:
      assert bad is not None
      self._refuse(bad)
    else:
      self._request(line, mask, stop)

  def _claim(self, read: PromptLine | BadLine) -> bool:
    """Whether the line is the first with its id; a line without one always is."""
    if read.id is None:
      return True
    key = key_of(read.id)
    if key in self._seen:
      return False
    self._seen.add(key)
    return True

  def _keep(self) -> None:
    self.counts.kept += 1
    self._progress.advance()
    if self._order is not None and (self._place or not self._results.finished.in_order):
      raise OutputRefused(
        f"{self._results.path}: its records are not those of the first lines in input order: "
        "continue without --ordered"
      )

  def _refuse(self, bad: BadLine, place: int | None = None) -> None:
    """Writes the error record of a line."""
    self.counts.failed += 1
    self._progress.advance()
    data = readable_error(bad) if self._pretty else encode_record(error_record(bad))
    self._write(self._next_place() if place is None else place, data)

  def _next_place(self) -> int:
    self._place += 1
    return self._place - 1

  def _request(self, line: PromptLine, mask: int, stop: Stop) -> None:
    place = self._next_place()
    name = json.dumps(line.id)
    if self.serving is None:
      with stop.urgent():
        self.serving = self._start()
    try:
      request = Request(
        name,
        encode_prompt(line, self.serving.tokenizer),
        line.sampling,
        default_seed=line.number,
        priority=line.priority,
        cache_salt=line.cache_salt,
      )
      self.serving.engine.add(request)
    except RequestError as error:
      bad = BadLine(
        line.number,
        str(error),
        id=line.id,
        style=line.style,
        param=error.key,
        code="cannot_be_served",
      )
      self._refuse(bad, place)
      return
    self._pending[name] = _Pending(line, place, mask)

  def _take(self, completion: Completion) -> None:
    """One finished completion: written at once, or with the others of its line."""
    pending = self._pending[completion.request_id]
    pending.completions[completion.index] = completion
    line = pending.line
    done = len(pending.completions) == line.sampling.n
    failed = any(each.finish_reason == "error" for each in pending.completions.values())
    together = self._pretty or self._order is not None or line.style != "native"
    if not together and not failed and not pending.mask >> completion.index & 1:
      self._write(pending.place, self._native([completion], pending))
    if not done:
      return
    del self._pending[completion.request_id]
    if failed:
      problem = "the model gave no finite logits for this prompt"
      bad = BadLine(line.number, problem, id=line.id, style=line.style, code="model_error")
      self._refuse(bad, pending.place)
      return
    if together:
      self._write(pending.place, self._whole(pending))
    self.counts.served += 1
    self._progress.advance()

  def _native(self, completions: Sequence[Completion], pending: _Pending) -> bytes:
    assert self.serving is not None
    tokenizer = self.serving.tokenizer
    return b"".join(
      encode_record(native_record(pending.line, each, tokenizer))
      for each in completions
      if not pending.mask >> each.index & 1
    )

  def _whole(self, pending: _Pending) -> bytes:
    """The records of a line of which every completion is there."""
    assert self.serving is not None
    completions = [pending.completions[index] for index in sorted(pending.completions)]
    if self._pretty:
      return readable(pending.line, completions)
    if pending.line.style == "native":
      return self._native(completions, pending)
    tokenizer, name = self.serving.tokenizer, self.serving.name
    record = batch_record(
      pending.line, completions, tokenizer, model=name, created=int(time.time())
    )
    return encode_record(record)

  def _write(self, place: int, data: bytes) -> None:
    if self._order is not None:
      self._order.put(place, data)
    else:
      self._append(data)

  def _append(self, data: bytes) -> None:
    with self._progress.aside():
      self._results.append(data)
    self.counts.records += data.count(b"\n") if not self._pretty else 1
