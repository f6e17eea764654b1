"""Continuing prompts on one process: the quick look at what an adapter learnt.

Owns: model, adapter and tokenizer from folders to texts. Does not own: decoding itself (`train.decoding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from meshlora.api import load, read_model_config
from meshlora.config import GenerateConfig
from meshlora.train.decoding import continuations, encode_prompts
from meshlora.train.tokenizer import load_tokenizer


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

    options: greedy, one prompt at a time, where they are None. names: of the prompts, for messages.

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
