"""Beam search as microsoft/LoRA's `gpt2_beam.py` has it, whose texts are those of the LoRA paper.

Owns: the search. Does not own: prompts, padding, and where a text ends (`run.decoding`).

It is another search than transformers': a finished beam leaves its place empty, in place of being replaced by the next
candidate; no beam stops before `max_new_tokens`, and unfinished ones compete at the end; the banned n-grams are those
of the new tokens alone, so that names of the prompt may be copied, and are left out before the softmax.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora.run.config.run_file import GenerateConfig
from meshlora_ground.caches import cache_argument
from meshlora_ground.errors import UnsupportedError


def gpt2_beam(
    network: Any,
    ids: Tensor,
    mask: Tensor,
    options: GenerateConfig,
    *,
    ends: Collection[int],
    all_finished: Callable[..., bool] = lambda *, is_finished: is_finished,
) -> list[list[int]]:
    """The best continuation of each row of `ids`, with its final token of `ends`, if any.

    ids: `[B, S]`, padded on the left, where mask `[B, S]` is 0. The best has the highest sum of log-probabilities over
    `length ** options.length_penalty`. A search whose beams are all finished before goes on without effect.
    all_finished: of `wings.generation.rows`: whether no other rank needs further forwards of this one.

    Raises:
        UnsupportedError: prompts of unequal length for a model without position_ids; no cache.
    """
    num, beams, device = len(ids), options.num_beams, ids.device
    positions = _positions(network, mask)
    in_cache = cache_argument(network.forward)
    output = network(input_ids=ids, attention_mask=mask, use_cache=True, **positions)
    cache, mask = output[in_cache], mask.repeat_interleave(beams, 0)
    cache.batch_repeat_interleave(beams)
    logits = output.logits[:, -1].repeat_interleave(beams, 0)  # [B * beams, V]
    sums = torch.zeros(num, beams, device=device, dtype=logits.dtype)
    sums[:, 1:] = -math.inf  # all beams of a prompt are alike: the first step takes those of one
    history = ids.new_empty(num * beams, 0)  # [B * beams, new tokens]
    best: list[tuple[float, list[int]]] = [(-math.inf, [])] * num
    for step in range(options.max_new_tokens):
        if step:
            positions = dict.fromkeys(positions, mask.sum(1, keepdim=True))  # of the token that follows
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
            given = {"input_ids": history[:, -1:], "attention_mask": mask, in_cache: cache, **positions}
            output = network(**given, use_cache=True)
            cache, logits = output[in_cache], output.logits[:, -1]
        _ban(logits, history.tolist(), options.no_repeat_ngram_size)
        # Sums of finished beams are -inf, and a row of banned tokens alone would be nan.
        found = sums[..., None] + logits.log_softmax(-1).nan_to_num(nan=-math.inf).view(num, beams, -1)
        sums, places = found.view(num, -1).topk(beams, dim=1)
        rows = (places // logits.shape[-1] + beams * torch.arange(num, device=device)[:, None]).view(-1)
        history = torch.cat((history[rows], (places % logits.shape[-1]).view(-1, 1)), 1)
        cache.reorder_cache(rows)  # beams go on from others, whose keys and values they need
        mask = mask[rows]
        is_last = step == options.max_new_tokens - 1
        _keep_best(best, sums, history.tolist(), options.length_penalty, ends=None if is_last else ends)
        if all_finished(is_finished=not torch.isfinite(sums).any()):
            break
    return [tokens for _, tokens in best]


def _positions(network: Any, mask: Tensor) -> dict[str, Tensor]:
    """`position_ids` of left-padded rows, where the model takes them."""
    if "position_ids" in inspect.signature(network.forward).parameters:
        return {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    if not mask.all():
        given = f"generate.search=gpt2_beam with several prompts for {type(network).__name__}"
        rule = "it takes no position_ids, which padded prompts need"
        raise UnsupportedError(given, rule, "set generate.batch_size: 1")
    return {}


def _ban(logits: Tensor, history: Sequence[Sequence[int]], size: int) -> None:
    """Overwrite the logits of tokens that would repeat an n-gram of `size` tokens of their row's history by -inf."""
    if not size:
        return
    for row, tokens in enumerate(history):
        start = tokens[len(tokens) - size + 1 :]
        for place in range(len(tokens) - size + 1):
            if tokens[place : place + size - 1] == start:
                logits[row, tokens[place + size - 1]] = -math.inf


def _keep_best(
    best: list[tuple[float, list[int]]],
    sums: Tensor,
    history: Sequence[list[int]],
    length_penalty: float,
    *,
    ends: Collection[int] | None,
) -> None:
    """Let beams that end in one of `ends`, or all if None, compete with the best so far, and take them out."""
    beams = sums.shape[1]
    for row, tokens in enumerate(history):
        if ends is not None and tokens[-1] not in ends:
            continue
        prompt, beam = divmod(row, beams)
        score = float(sums[prompt, beam]) / len(tokens) ** length_penalty
        if score > best[prompt][0]:
            best[prompt] = (score, tokens)
        sums[prompt, beam] = -math.inf  # its place stays empty, unlike in transformers
