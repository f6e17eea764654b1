"""The sequences that a proof trains on: random tokens, or a user's text.

Owns: where they come from, and what an objective makes of them. Does not own: how many there must be (`oracle.case`).
"""

from __future__ import annotations

from transformers import PretrainedConfig

from meshlora.common.errors import UserError
from meshlora.config.objective import Objective
from meshlora.data import TokenizedDataset, read_records, tokenize
from meshlora.oracle.case import as_pairs, distinct_sequences, random_tokens, with_feedback, with_rollouts
from meshlora.text.tokenizer import load_tokenizer, padding_token_id

_MAX_LENGTH = 128


def proof_sequences(
    config: PretrainedConfig,
    *,
    number: int,
    objective: Objective,
    seed: int,
    data: str | None,
    model: str | None,
    trust_remote_code: bool = False,
) -> tuple[TokenizedDataset, int]:
    """(`number` examples of `objective` to train on, the id of padding).

    Args:
        data: a file to take text from; None: random tokens. model: the folder with the tokenizer, None for a twin.

    Raises:
        UserError: text without a tokenizer, or too little of it.
    """
    found, pad = _tokens(
        config,
        number=number if objective.per == "token" else 2 * number,
        seed=seed,
        data=data,
        model=model,
        trust_remote_code=trust_remote_code,
    )
    return as_records(found, objective, vocab_size=config.get_text_config().vocab_size, seed=seed), pad


def as_records(found: TokenizedDataset, objective: Objective, *, vocab_size: int, seed: int) -> TokenizedDataset:
    """The sequences `found` as what `objective` trains on."""
    if objective.reader == "pairs":
        return as_pairs(found)
    if objective.reader == "feedback":
        return with_feedback(found)
    if objective.reader == "rollouts":
        return with_rollouts(found, vocab_size=vocab_size, seed=seed)
    return found


def _tokens(
    config: PretrainedConfig, *, number: int, seed: int, data: str | None, model: str | None, trust_remote_code: bool
) -> tuple[TokenizedDataset, int]:
    text_config = config.get_text_config()
    if data is None:
        pad = getattr(text_config, "pad_token_id", None)
        pad = pad if isinstance(pad, int) and 0 <= pad < text_config.vocab_size else 0
        size = text_config.vocab_size
        return random_tokens(num_sequences=number, vocab_size=size, seed=seed, pad_token_id=pad), pad
    if model is None:
        raise UserError(f"--data {data}", "a twin has no tokenizer", "leave out --data, or give --model without --twin")
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    limit = getattr(text_config, "max_position_embeddings", None) or _MAX_LENGTH
    records = read_records([data])
    found = tokenize(records, tokenizer, max_length=min(limit, _MAX_LENGTH), vocab_size=text_config.vocab_size)
    return distinct_sequences(found, number, source=data), padding_token_id(tokenizer)
