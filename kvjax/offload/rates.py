"""Whether it is faster to take something back than to compute it again."""

import dataclasses


@dataclasses.dataclass(slots=True)
class Rates:
  """Measured; None before the first sample."""

  host: float | None = None  # bytes/s from host memory into the pools
  disk: float | None = None  # bytes/s from files into host memory
  prefill: float | None = None  # tokens/s

  def add(self, name: str, value: float) -> None:
    """A sample: the mean moves a fifth of the way to it."""
    old = getattr(self, name)
    setattr(self, name, value if old is None else 0.8 * old + 0.2 * value)

  def seconds(self, nbytes: dict[str, int]) -> float:
    """To take back so many bytes from "host" and "disk"; what comes from disk goes the whole way.
    Nothing for a way that has not been measured: trying it measures it."""
    out = 0.0
    for source, count in nbytes.items():
      if self.host is not None:
        out += count / self.host
      if source == "disk" and self.disk is not None:
        out += count / self.disk
    return out

  def worth(self, tokens: int, nbytes: dict[str, int]) -> bool:
    """Whether taking back `nbytes` is faster than computing `tokens` tokens."""
    return self.prefill is None or self.seconds(nbytes) < tokens / self.prefill
