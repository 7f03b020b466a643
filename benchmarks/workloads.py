"""What the benchmarks serve: length mixes and models, all from seeds."""

import dataclasses

import numpy as np

from kvjax import testing
from kvjax.geometry import Retention
from kvjax.models.spec import ModelSpec


def chat_lengths(count: int, seed: int = 0, longest: int = 2048) -> np.ndarray:
  """Prompt and output lengths like those of chat logs: int [count, 2], their sum at most `longest`.

  Lognormal with medians of 90 and 150 tokens and long tails (sigma 1.2 and 0.9): about the figures
  published for ShareGPT conversations (means of 160-220 and 200-340 tokens).
  """
  rng = np.random.default_rng(seed)
  prompt = np.exp(rng.normal(np.log(90), 1.2, count)).astype(int) + 1
  output = np.exp(rng.normal(np.log(150), 0.9, count)).astype(int) + 1
  prompt = np.minimum(prompt, longest - 64)
  return np.stack([prompt, np.minimum(output, longest - prompt)], 1)


def describe_lengths(lengths: np.ndarray) -> dict[str, list[int]]:
  """Percentiles 10, 50, 90, 99 and the maximum, of prompts, outputs and sums."""
  columns = {"prompt": lengths[:, 0], "output": lengths[:, 1], "total": lengths.sum(1)}
  return {k: [int(np.percentile(v, p)) for p in (10, 50, 90, 99, 100)] for k, v in columns.items()}


def spread_lengths(count: int, mean: int, variation: float, seed: int = 0) -> np.ndarray:
  """Lengths of one mean and a coefficient of variation (gamma distributed): int [count]."""
  if not variation:
    return np.full(count, mean)
  shape = variation**-2
  rng = np.random.default_rng(seed)
  drawn = rng.gamma(shape, mean / shape, count)
  return np.maximum(1, np.round(drawn * mean / drawn.mean())).astype(int)


def tokens(rng: np.random.Generator, count: int, vocabulary: int) -> tuple[int, ...]:
  """Random token ids."""
  return tuple(int(x) for x in rng.integers(10, vocabulary - 10, count))


def spec_with_groups(count: int, context: int) -> ModelSpec:
  """A tiny model whose layers form `count` groups: one full, the others with windows."""
  spec = testing.tiny_spec("full", context=context)
  full = spec.layers[0]
  layers = [full]
  for i in range(count - 1):
    retention = Retention(window=(128 << i % 3) + 64 * (i // 3))
    attention = dataclasses.replace(full.attention, retention=retention)
    layers.append(dataclasses.replace(full, attention=attention))
  return dataclasses.replace(spec, layers=tuple(layers), name=f"{count} groups")
