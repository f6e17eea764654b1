"""Texts that a model on a mesh generates, the prompts divided among its replicas.

Owns: the split of a model that generates, which rank continues which prompt, and gathering. Does not own: decoding
(`run.decoding`), the prompts of a held-out set and what answers to them are worth (`run.answers`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_gather
from meshlora.feature import check_proved
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.pairs import check
from meshlora.run.config.run_file import GenerateConfig
from meshlora.run.decoding import Continuation, batches_of, continued
from meshlora.wings.generation.rows import in_step
from meshlora_ground.errors import UserError
from meshlora_ground.float64 import lift
from meshlora_ground.topology import Topology, divisors


def continued_by_all(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Sequence[Sequence[int]],
    options: GenerateConfig,
    *,
    log_probs: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Continuation]:
    """The continuation of every prompt, in their order, on every rank; every rank calls it with the same prompts.

        found = continued_by_all(model, tokenizer, [ids, ids, ...], GenerateConfig(do_sample=True, seed=step * 10**6))

    model: on any mesh but one with stages, whole or split, trained or not: it may be called between two steps, and
    leaves modes, gradients and random numbers as they are. Its batches, of `options.batch_size` prompts in turn, are
    divided among the ranks that hold replicas, over dp and cp; each draws from `options.seed` plus its number: these
    are the tokens of one process. Two calls that are to differ need seeds farther apart than there are batches.
    log_probs: see `Continuation`. advance: called with the number of prompts that this rank is done with.

    Raises:
        UserError, UnsupportedError: see `generate` and `continued`.
    """
    axis, batches = runtime(model).mesh.data, batches_of(encoded, options)
    if not batches:
        return []
    turns = -(-len(batches) // axis.size)
    # Replicas that need each other's forwards take turns together: one without a batch repeats the last.
    stop = len(batches)
    if in_step(model) is not None:
        stop = turns * axis.size
    turn = {number: batches[min(number, len(batches) - 1)] for number in range(axis.rank, stop, axis.size)}
    rows: list[Continuation] = []
    with lift(model.dtype == torch.float64):
        for found in continued(model, tokenizer, turn, options, log_probs=log_probs):
            rows += found
            advance(min(len(rows), len(encoded)))
    # All ranks have as many rows of as many tokens in what they exchange; -1 stands for none.
    most = turns * options.batch_size
    table = torch.full((most, options.max_new_tokens), -1, dtype=torch.int64)
    scores = torch.zeros(most, options.max_new_tokens, dtype=torch.float64)
    for place, row in enumerate(rows):
        table[place, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int64)
        if row.log_probs is not None:
            scores[place, : len(row.tokens)] = torch.tensor(row.log_probs, dtype=torch.float64)
    every = all_gather(table.to(model.device), axis).view(axis.size, most, -1).cpu()
    every_score: Tensor | None = None
    if log_probs:
        every_score = all_gather(scores.to(model.device), axis).view(axis.size, most, -1).cpu()
    gathered = []
    for number, batch in enumerate(batches):
        rank, start = number % axis.size, number // axis.size * options.batch_size
        for place in range(start, start + len(batch)):
            own, own_scores = every[rank, place], None
            tokens = own[own >= 0].tolist()
            if every_score is not None:
                own_scores = every_score[rank, place, : len(tokens)].tolist()
            gathered.append(Continuation(tokens, own_scores))
    return gathered


def blueprint_to_generate(
    model: str | Path, *, adapter: Path | None, topology: str | None, world: int, **base: Any
) -> Blueprint:
    """The blueprint of a model that generates on `world` ranks.

    base: as of `BaseOptions`: dtype, trust_remote_code, quantization.
    topology: None: tp over as many of the ranks as the model can be split over, and dp over the rest.

    Raises:
        UserError: the model or the adapter cannot be split so. UnsupportedError: it is not proved; it has stages.
    """
    options = BaseOptions(disable_dropout=True, **base)
    found = made = make_blueprint(model, Topology.parse("", world=1), options)
    if topology is not None:
        shape = Topology.parse(topology, world=world)
        check({"topology": shape, "door": "meshlora generate"})
        found = made.on(shape)
        check_proved(found.plan)
    else:
        for tp in reversed(divisors(world)):
            with contextlib.suppress(UserError):  # such a tp does not divide its heads, or the family has no split
                found = made.on(Topology(tp=tp, dp=world // tp))
                check_proved(found.plan)
                break
    return found if adapter is None else found.with_folder(adapter, ignore_dropout=True)
