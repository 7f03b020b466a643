"""What every benchmark shares: the machine, compiled steps on disk, figures in a file."""

import json
import os
import platform
from typing import Any

import jax

from kvjax.engine import enable_compilation_cache


def machine() -> dict[str, Any]:
  """What the figures were measured on."""
  model = ""
  if os.path.exists("/proc/cpuinfo"):
    with open("/proc/cpuinfo", encoding="utf-8") as file:
      names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    model = names[0] if names else ""
  return {
    "cores": os.cpu_count(),
    "cpu": model or platform.machine(),
    "python": platform.python_version(),
    "jax": jax.__version__,
    "backend": jax.default_backend(),
  }


def keep_compiled() -> None:
  """Compiled steps stay where `run.py` keeps them."""
  cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  enable_compilation_cache(os.path.join(cache, "kvjax", "xla"))


def write(path: str, figures: dict[str, Any]) -> None:
  """Writes figures as JSON."""
  with open(path, "w", encoding="utf-8") as file:
    json.dump(figures, file, indent=2)
    file.write("\n")
