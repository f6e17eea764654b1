"""Continuations of prompts, by transformers' `generate` on a loaded model.

Owns: encoding prompts as in training, left padding, translation of options to transformers, where a text ends;
`generate`, from folders to texts on one process. Does not own: what a mesh changes (`wings.generation.rows`), dividing
prompts among ranks (`run.generated`), the other beam search (`run.gpt2_beam`), evaluation (`run.evaluate`), scores
(`meshlora_extra.paper.scores`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from meshlora.loading.blueprint import read_model_config
from meshlora.loading.load import load
from meshlora.loading.positions import most_positions
from meshlora.plan.pairs import check
from meshlora.reading.chat import conversation_prompts, stop_ids
from meshlora.reading.records import Record
from meshlora.reading.tokenization import separator_ids
from meshlora.reading.tokenizer import padding_token_id
from meshlora.run.asking import Asking, asking_of, asking_tokenizer, check_template
from meshlora.run.config.run_file import GenerateConfig
from meshlora.run.gpt2_beam import gpt2_beam
from meshlora.wings.generation.rows import all_finished, generating
from meshlora.wings.invoked.rows import invoked_by
from meshlora_ground.errors import UserError


def encode_prompts(
    prompts: Sequence[str | Record],
    tokenizer: PreTrainedTokenizerBase,
    model_config: Any,
    options: GenerateConfig,
    *,
    names: Sequence[str] = (),
    limit_name: str = "generate.max_new_tokens",
    separator: str = "",
) -> list[tuple[str, list[int]]]:
    """(text, token ids) of each prompt, with those of the separator that the model was trained with; of a conversation
    what leads to the answer to it: as in training, by the same template.

    names: of the prompts, and limit_name: of the option, for messages.

    Raises:
        UserError: one has no tokens, or leaves no room for `max_new_tokens` in the model's positions; as
            `conversation_prompts`.
    """
    chats = [each for each in prompts if isinstance(each, Record)]
    # Without any the tokenizer may have no template.
    of_chats = iter(conversation_prompts(chats, tokenizer) if chats else ())
    end, encoded = separator_ids(tokenizer, separator), list[tuple[str, list[int]]]()
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, Record):
            text, name = next(of_chats), prompt.origin
            ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        else:
            text, name = prompt, names[number] if names else f"prompt {prompt[:80]!r}"
            ids = tokenizer(text, verbose=False).input_ids + end
        _check_room(ids, model_config, options, name=name, limit_name=limit_name)
        encoded.append((text, ids))
    return encoded


def _check_room(ids: Sequence[int], model_config: Any, options: GenerateConfig, *, name: str, limit_name: str) -> None:
    """Refuse a prompt without tokens, or without room for `options.max_new_tokens`."""
    limit = most_positions(model_config) or math.inf
    if not ids:
        raise UserError(name, "it has no tokens")
    if len(ids) + options.max_new_tokens > limit:
        given = f"{name} of {len(ids)} tokens with {limit_name} {options.max_new_tokens}"
        raise UserError(given, f"the model has {limit} positions", f"shorten the prompt or lower {limit_name}")


def continuations(
    network: Any, tokenizer: PreTrainedTokenizerBase, encoded: Sequence[Sequence[int]], options: GenerateConfig
) -> Iterator[str]:
    """The continuation of each encoded prompt by `network`, in evaluation mode, without special tokens.

    On a mesh every rank calls this with the same prompts, and gets the same texts: tp ranks hold whole logits.
    """
    for found in continued(network, tokenizer, dict(enumerate(batches_of(encoded, options))), options):
        yield from texts_of([each.tokens for each in found], tokenizer, options)


def texts_of(rows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, options: GenerateConfig) -> list[str]:
    """The texts of continuations, without special tokens, each up to the first of `options.stop`."""
    texts = tokenizer.batch_decode(list(rows), skip_special_tokens=True)
    for stop in options.stop:
        texts = [text.partition(stop)[0] for text in texts]
    return texts


def ends_of(tokenizer: PreTrainedTokenizerBase, options: GenerateConfig) -> list[int]:
    """The tokens that end a continuation: those that end an answer in training, and of `options.stop` single ones."""
    ends = stop_ids(tokenizer)
    for stop in options.stop:
        ids = tokenizer(stop, add_special_tokens=False, verbose=False).input_ids
        if len(ids) == 1:
            ends.append(ids[0])
    return list(dict.fromkeys(ends))


def batches_of(encoded: Sequence[Sequence[int]], options: GenerateConfig) -> list[Sequence[Sequence[int]]]:
    """The prompts by `options.batch_size`."""
    return [encoded[start : start + options.batch_size] for start in range(0, len(encoded), options.batch_size)]


@dataclass(frozen=True)
class Continuation:
    """The tokens after one prompt, with the one that ended it, if any.

    log_probs: of each token, in nats, in the distribution that it was drawn from: that of the logits divided by the
    temperature, before top_p. None if nobody asked.
    routed_experts: of each token of prompt and continuation but the last, `[tokens][layers][k]`.
    is_truncated: it ends at the largest length, not by itself, as far as anybody has said so.
    """

    tokens: list[int]
    log_probs: list[float] | None = None
    routed_experts: list[Any] | None = None
    is_truncated: bool = False


def continued(
    network: Any,
    tokenizer: PreTrainedTokenizerBase,
    batches: Mapping[int, Sequence[Sequence[int]]],
    options: GenerateConfig,
    *,
    log_probs: bool = False,
) -> Iterator[list[Continuation]]:
    """The continuation of each prompt of each batch. The ranks of a replica call it with the same batches, at any time:
    between two steps of a training too.

    batches: by their number in the whole set, from which each batch draws its random numbers, whoever continues it.

    Raises:
        UnsupportedError: log-probabilities of a beam search, which draws nothing.
    """
    beams = {"generate.num_beams": options.num_beams, "generate.search": options.search}
    check({"log-probabilities": log_probs, **beams})
    for number, part in batches.items():
        with generating(network):
            torch.manual_seed((options.seed + number) % 2**63)  # of the batch, whichever rank has it
            found = _continued_once(network, tokenizer, part, options, log_probs=log_probs)
        yield found


def _continued_once(
    network: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    options: GenerateConfig,
    *,
    log_probs: bool,
) -> list[Continuation]:
    """The continuations of one batch, in turn."""
    pad, ends = padding_token_id(tokenizer), ends_of(tokenizer, options)
    length = max(map(len, prompts))
    ids, mask = torch.full((len(prompts), length), pad), torch.zeros(len(prompts), length, dtype=torch.int64)
    for number, row in enumerate(prompts):  # padded on the left: new tokens directly follow each prompt
        ids[number, length - len(row) :], mask[number, length - len(row) :] = torch.tensor(row), 1
    ids, mask = ids.to(network.device), mask.to(network.device)
    if options.search == "gpt2_beam":
        check({"alora_invocation_tokens": invoked_by(network), "generate.search": options.search})
        rows = gpt2_beam(network, ids, mask, options, ends=ends, all_finished=functools.partial(all_finished, network))
        return [Continuation(_ended(row, ends)) for row in rows]
    drawn, processors = _Drawn(options.temperature), LogitsProcessorList()
    if log_probs:
        processors.append(drawn)
    output = network.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=options.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=pad,
        logits_processor=processors,
        **words_of_transformers(options),
    )
    found = [Continuation(_ended(row, ends)) for row in output[:, length:].tolist()]
    if not log_probs:
        return found
    scores = drawn.finished(output).tolist()
    return [Continuation(each.tokens, row[: len(each.tokens)]) for each, row in zip(found, scores, strict=True)]


def _ended(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """`tokens` up to the first of `ends`, which is kept: what follows is padding."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens


class _Drawn(LogitsProcessor):
    """Keeps the log-probability of each token that is drawn. transformers calls it before it divides by temperature."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._last: Tensor | None = None  # [B, V], of the token that is drawn next
        self._found: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids)
        self._last = (scores / self.temperature).log_softmax(-1)
        return scores

    def _take(self, input_ids: Tensor) -> None:
        if self._last is not None:
            self._found.append(self._last.gather(1, input_ids[:, -1:]))

    def finished(self, input_ids: Tensor) -> Tensor:
        """`[B, new tokens]`, once all are drawn."""
        self._take(input_ids)
        return torch.cat(self._found, 1)


def words_of_transformers(options: GenerateConfig) -> dict[str, Any]:
    """The options as transformers' `generate` takes them."""
    words: dict[str, Any] = {"do_sample": options.do_sample, "num_beams": options.num_beams}
    if options.do_sample:
        # transformers samples from the 50 likeliest unless told otherwise.
        words |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    if options.num_beams > 1:
        words["length_penalty"] = options.length_penalty
    if options.no_repeat_ngram_size:
        words["no_repeat_ngram_size"] = options.no_repeat_ngram_size
    return words


def read_prompts(
    model: str | Path,
    prompts: Sequence[str] | Sequence[Record],
    options: GenerateConfig,
    *,
    adapter: Path | None = None,
    trust_remote_code: bool = False,
    names: Sequence[str] = (),
    asking: Asking | None = None,
) -> tuple[PreTrainedTokenizerBase, list[list[int]]]:
    """(tokenizer of the folder `model`, token ids of each prompt); arguments as in `generate`.

    Raises:
        UserError: a wrong folder; a prompt without tokens, or too long.
    """
    config = read_model_config(model, trust_remote_code=trust_remote_code)
    asking = asking or asking_of(adapter, model=model)
    tokenizer = asking_tokenizer(model, asking, trust_remote_code=trust_remote_code)
    if any(isinstance(prompt, Record) for prompt in prompts):
        check_template(tokenizer, asking)
    found = encode_prompts(
        prompts, tokenizer, config, options, names=names, limit_name="--max-new-tokens", separator=asking.separator
    )
    return tokenizer, [ids for _, ids in found]


def generate(
    model: str | Path,
    prompts: Sequence[str] | Sequence[Record],
    *,
    adapter: Path | None = None,
    options: GenerateConfig | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    names: Sequence[str] = (),
    asking: Asking | None = None,
) -> Iterator[str]:
    """The continuation of each prompt, without the prompt, by one process.

    options: default: greedy, one prompt at a time. names: of the prompts, for messages. asking: default: as the run
    that made the adapter asked, as far as its folder says (`run.asking`).
    prompts: texts, or conversations that the chat template leads to an answer to.

    Raises:
        UserError: a wrong folder or option.
    """
    options = options or GenerateConfig(batch_size=1)
    tokenizer, encoded = read_prompts(
        model, prompts, options, adapter=adapter, trust_remote_code=trust_remote_code, names=names, asking=asking
    )
    network = load(
        model,
        adapter=adapter,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        disable_dropout=True,
        ignore_lora_dropout=True,
    ).eval()
    yield from continuations(network, tokenizer, encoded, options)
