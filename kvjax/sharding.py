"""Tensor parallelism: logical axes of parameters and pools -> the device mesh.

One table says which axis of each array is split over the "tensor" axis of the mesh; the compiler
inserts the communication. An axis that does not divide is replicated.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.config import MeshConfig
from kvjax.errors import ConfigError
from kvjax.models.decoder import Params
from kvjax.state import EngineState

AXIS = "tensor"

# Axis that is split: rows of what is projected to heads, hidden units or tokens, columns of what
# comes back from them.
_PARAMS = {"embed": 0, "head": 0, "qkv": 0, "gate_up": 0, "out": 1, "down": 1}
_POOL = {"kv": 2}  # KV heads


class Shardings:
  """Where arrays live. With one device nothing is moved and nothing is constrained."""

  def __init__(self, config: MeshConfig):
    devices = jax.devices()
    if config.tensor > len(devices):
      raise ConfigError(
        f"config.mesh.tensor: expected at most the {len(devices)} devices of this platform, "
        f"got {config.tensor}"
      )
    self.mesh = Mesh(devices[: config.tensor], (AXIS,)) if config.tensor > 1 else None

  def place_params(self, params: Params) -> Params:
    return self._place(params, _PARAMS)

  def place_state(self, state: EngineState) -> EngineState:
    if self.mesh is None:
      return state
    return jax.tree.map(jax.device_put, state, self._of(state, _POOL))

  def outputs(self, state: EngineState) -> Any:
    """out_shardings of a step: (state, packed); None leaves them to the compiler."""
    if self.mesh is None:
      return None
    return self._of(state, _POOL), NamedSharding(self.mesh, PartitionSpec())

  def _place(self, tree: Any, axes: dict[str, int]) -> Any:
    if self.mesh is None:
      return tree
    return jax.tree.map(jax.device_put, tree, self._of(tree, axes))

  def _of(self, tree: Any, axes: dict[str, int]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: self._one(path, x, axes), tree)

  def _one(self, path: Any, x: Any, axes: dict[str, int]) -> NamedSharding:
    assert self.mesh is not None
    axis = axes.get(str(getattr(path[-1], "key", "")))
    if axis is None or x.shape[axis] % self.mesh.size:
      return NamedSharding(self.mesh, PartitionSpec())
    return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, AXIS))
