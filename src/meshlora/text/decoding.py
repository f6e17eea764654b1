"""Continuations of prompts, by transformers' `generate` on a loaded model.

Owns: encoding prompts as in training, left padding, translation of options to transformers; `generate`, from folders
to texts on one process. Does not own: evaluation (`train.evaluate`), scores (`text.scores`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from meshlora.common.errors import UserError
from meshlora.config.run import GenerateConfig
from meshlora.loading.blueprint import read_model_config
from meshlora.loading.load import load
from meshlora.text.tokenizer import load_tokenizer, padding_token_id


def encode_prompts(
    prompts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    model_config: Any,
    options: GenerateConfig,
    *,
    names: Sequence[str] = (),
    limit_name: str = "generate.max_new_tokens",
) -> list[list[int]]:
    """Token ids of each prompt.

    names: of the prompts, and limit_name: of the option, for messages.

    Raises:
        UserError: one has no tokens, or leaves no room for `max_new_tokens` in the model's positions.
    """
    encoded: list[list[int]] = [tokenizer(prompt, verbose=False).input_ids for prompt in prompts]
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None) or math.inf
    for name, ids in zip(names or [f"prompt {prompt[:80]!r}" for prompt in prompts], encoded, strict=True):
        if not ids:
            raise UserError(name, "it has no tokens")
        if len(ids) + options.max_new_tokens > limit:
            raise UserError(
                f"{name} of {len(ids)} tokens with {limit_name} {options.max_new_tokens}",
                f"the model has {limit} positions",
                f"shorten the prompt or lower {limit_name}",
            )
    return encoded


@torch.no_grad()
def continuations(
    network: Any, tokenizer: PreTrainedTokenizerBase, encoded: Sequence[Sequence[int]], options: GenerateConfig
) -> Iterator[str]:
    """The continuation of each encoded prompt by `network`, in evaluation mode, without special tokens.

    On a mesh every rank calls this with the same prompts, and gets the same texts: tp ranks hold whole logits.
    """
    words: dict[str, Any] = {"do_sample": options.do_sample, "num_beams": options.num_beams}
    if options.do_sample:
        words |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    if options.num_beams > 1:
        words["length_penalty"] = options.length_penalty
    if options.no_repeat_ngram_size:
        words["no_repeat_ngram_size"] = options.no_repeat_ngram_size
    pad = padding_token_id(tokenizer)
    torch.manual_seed(options.seed)
    for start in range(0, len(encoded), options.batch_size):
        part = encoded[start : start + options.batch_size]
        length = max(map(len, part))
        # Pad on the left: new tokens directly follow each prompt.
        ids = torch.tensor([[pad] * (length - len(row)) + list(row) for row in part])
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in part])
        output = network.generate(
            input_ids=ids.to(network.device),
            attention_mask=mask.to(network.device),
            max_new_tokens=options.max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=pad,
            **words,
        )
        yield from tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)


def generate(
    model: str | Path,
    prompts: Sequence[str],
    *,
    adapter: Path | None = None,
    options: GenerateConfig | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    names: Sequence[str] = (),
) -> Iterator[str]:
    """The continuation of each prompt, without the prompt.

    options: default: greedy, one prompt at a time. names: of the prompts, for messages.

    Raises:
        UserError: a wrong folder or option.
    """
    options = options or GenerateConfig(batch_size=1)
    config = read_model_config(model, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    encoded = encode_prompts(prompts, tokenizer, config, options, names=names, limit_name="--max-new-tokens")
    network = load(
        model,
        adapter=adapter,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        disable_dropout=True,
        ignore_lora_dropout=True,
    ).eval()
    yield from continuations(network, tokenizer, encoded, options)
