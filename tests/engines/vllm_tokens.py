"""A program for vLLM's own environment: prints the greedy tokens of each prompt, with an adapter and without, as JSON.

    .venv-vllm/bin/python tests/engines/vllm_tokens.py MODEL ADAPTER NUM_TOKENS < PROMPTS.json

Knows nothing of meshlora: what it reads are the folders that meshlora wrote.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    model, adapter, number = sys.argv[1:]
    prompts = json.load(sys.stdin)
    engine = LLM(
        model=model,
        enable_lora=True,
        max_lora_rank=16,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=int(number))
    found = {}
    for name, request in (("base", None), ("adapter", LoRARequest("trained", 1, adapter))):
        outputs = engine.generate(prompts, sampling, lora_request=request, use_tqdm=False)
        found[name] = [{"ids": list(out.outputs[0].token_ids), "text": out.outputs[0].text} for out in outputs]
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main()
