"""Texts that a model generates for a held-out set, the prompts divided among all ranks.

Owns: which prompts there are, which rank continues which, and gathering. Does not own: decoding (`text.decoding`),
scores (`text.scores`), losses (`train.evaluate`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_gather
from meshlora.common.float64 import lift
from meshlora.data import prompts_of
from meshlora.data.nlg import of_categories
from meshlora.data.records import Prompt
from meshlora.plan.topology import Topology
from meshlora.text.decoding import batches_of, continued, encode_prompts, texts_of
from meshlora.text.tokenizer import tokenizer_of
from meshlora.train.evaluate import Evaluation, load_for_evaluation
from meshlora.train.sources import records_of


@dataclass(frozen=True)
class Prompts:
    """Prompts with their references, and their tokens."""

    prompts: list[Prompt]
    encoded: list[list[int]]
    tokenizer: PreTrainedTokenizerBase

    @property
    def references(self) -> list[tuple[str, ...]]:
        return [prompt.references for prompt in self.prompts]


def prepare_prompts(run: Evaluation) -> Prompts:
    """The prompts of `data.eval`, in the order of their first records.

    Raises:
        UserError: a record without a prompt; a prompt that leaves no room for `generate.max_new_tokens`.
    """
    config, data = run.config, run.config.data
    assert data.eval is not None
    records = of_categories(records_of(data, data.eval), data.eval_categories)
    prompts = prompts_of(records[: data.eval_limit])
    tokenizer = tokenizer_of(config)
    names = [prompt.origin for prompt in prompts]
    encoded = encode_prompts(
        [prompt.text for prompt in prompts],
        tokenizer,
        run.blueprint.config,
        config.generate,
        names=names,
        separator=data.separator,
    )
    return Prompts(prompts, encoded, tokenizer)


def generated_texts(
    run: Evaluation, prompts: Prompts, *, world: int, advance: Callable[[int], None] = lambda _: None
) -> list[str]:
    """The continuation of every prompt, one line each. Every rank calls this, and gets all of them.

    Each of the `world` ranks holds the whole model, whatever the topology of the run, and continues its share of the
    batches: these are the batches of one process, so their texts are too. advance: called with the number of prompts
    that this rank is done with.
    """
    model = load_for_evaluation(
        dataclasses.replace(run, blueprint=run.blueprint.on(Topology.parse(f"dp={world}", world=world)))
    )
    axis, options = runtime(model).mesh.dp, run.config.generate
    batches = batches_of(prompts.encoded, options)
    own = {number: batches[number] for number in range(axis.rank, len(batches), axis.size)}
    rows: list[Sequence[int]] = []
    with lift(model.dtype == torch.float64):
        for continuations in continued(model, prompts.tokenizer, own, options):
            rows += continuations
            advance(len(rows))
    # All ranks have as many rows of as many tokens in what they exchange; -1 stands for none.
    most = -(-len(batches) // axis.size) * options.batch_size
    table = torch.full((most, options.max_new_tokens), -1, dtype=torch.int64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
    every = all_gather(table.to(model.device), axis).view(axis.size, most, -1).tolist()
    found: list[list[int]] = []
    for number, batch in enumerate(batches):
        start = number // axis.size * options.batch_size
        found += every[number % axis.size][start : start + len(batch)]
    texts = texts_of([[token for token in row if token >= 0] for row in found], prompts.tokenizer, options)
    return [" ".join(text.split()) for text in texts]
