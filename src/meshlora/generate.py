"""Continuing prompts on one process: the quick look at what an adapter learnt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from meshlora.api import load, read_model_config
from meshlora.errors import UserError
from meshlora.train.prepare import load_tokenizer, padding_token_id


@torch.no_grad()
def generate(
    model: str | Path,
    prompts: Sequence[str],
    *,
    adapter: Path | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Iterator[str]:
    """The continuation of each prompt, without the prompt. temperature 0 is greedy.

    Raises:
        UserError: a wrong folder or option.
    """
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}", "at least 1")
    if not 0 <= temperature < math.inf:
        raise UserError(f"--temperature {temperature}", "0 (greedy) or above")
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed {seed}", "at least 0, and below 2**63")
    config = read_model_config(model, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    encoded = [tokenizer(prompt, return_tensors="pt", return_token_type_ids=False) for prompt in prompts]
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    for prompt, inputs in zip(prompts, encoded, strict=True):
        num_tokens = inputs["input_ids"].shape[1]
        if num_tokens == 0:
            raise UserError(f"--prompt {prompt!r}", "it has no tokens")
        if num_tokens + max_new_tokens > limit:
            raise UserError(
                f"--prompt of {num_tokens} tokens with --max-new-tokens {max_new_tokens}",
                f"the model has {limit} positions",
                "shorten the prompt or lower --max-new-tokens",
            )
    network = load(
        model,
        adapter=adapter,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        disable_dropout=True,
        ignore_lora_dropout=True,
    ).eval()
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    for inputs in encoded:
        output = network.generate(
            **inputs.to(network.device),
            max_new_tokens=max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=padding_token_id(tokenizer),
            **sampling,
        )
        yield tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
