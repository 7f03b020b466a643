"""Suspended requests: what is needed to go on with one later, here or in another process."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from kvjax.errors import RequestError
from kvjax.request import Request, SamplingParams, TokenLogprobs

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class SuspendedSequence:
  """One completion that has not ended: its place among the request's n, and its tokens so far."""

  index: int
  token_ids: tuple[int, ...]
  logprobs: tuple[TokenLogprobs, ...] = ()


@dataclasses.dataclass(frozen=True)
class Suspended:
  """A request that was taken out of an engine (`Engine.suspend`), to be given back to one
  (`Engine.resume`).

  It holds tokens. The cache entries for them are in the tiers, as long as these keep them; what is
  gone by then is computed again, with the same result.

  Attributes:
    request: as it was added.
    sequences: the completions that have not ended.
  """

  request: Request
  sequences: tuple[SuspendedSequence, ...]

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes JSON, whole or not at all."""
    target = Path(path)
    temporary = target.with_name(target.name + ".tmp")
    data = {"kvjax_suspended": _VERSION, **dataclasses.asdict(self)}
    with open(temporary, "w", encoding="utf-8") as f:
      json.dump(data, f)
      f.flush()
      os.fsync(f.fileno())
    os.replace(temporary, target)

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> "Suspended":
    """What `save` wrote.

    Raises:
      RequestError: the file is something else.
    """
    try:
      data = json.loads(Path(path).read_text(encoding="utf-8"))
      if data["kvjax_suspended"] != _VERSION:
        raise ValueError(f"version {data['kvjax_suspended']}")
      return cls(_request(data["request"]), tuple(map(_sequence, data["sequences"])))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise RequestError(
        "suspended", f"a file that Suspended.save wrote (version {_VERSION})", f"{path}: {error}"
      ) from error


def _request(data: dict[str, Any]) -> Request:
  sampling = dict(data["sampling"])
  sampling["logit_bias"] = {int(token): value for token, value in sampling["logit_bias"].items()}
  for name in ("stop", "stop_token_ids"):
    sampling[name] = tuple(sampling[name])
  fields = {**data, "prompt_token_ids": tuple(data["prompt_token_ids"])}
  return Request(**{**fields, "sampling": SamplingParams(**sampling)})


def _sequence(data: dict[str, Any]) -> SuspendedSequence:
  logprobs = tuple(
    TokenLogprobs(
      each["token_id"], each["logprob"], tuple((int(t), float(p)) for t, p in each["top"])
    )
    for each in data["logprobs"]
  )
  return SuspendedSequence(data["index"], tuple(data["token_ids"]), logprobs)
