"""The host side: requests, the scheduler, and the loop that drives the device."""

from kvjax.engine.executor import enable_compilation_cache
from kvjax.engine.loop import Engine
from kvjax.engine.suspended import Suspended
from kvjax.request import Completion, Request, SamplingParams, TokenLogprobs

__all__ = [
  "Completion",
  "Engine",
  "Request",
  "SamplingParams",
  "Suspended",
  "TokenLogprobs",
  "enable_compilation_cache",
]
