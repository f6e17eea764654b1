"""The answers of a model to the prompts of its held-out data, measured in evaluations of a run.

Owns: the prompts, and that rank 0 measures for all. Does not own: what an answer is worth (`run.answer_metrics`),
generating on a mesh (`run.generated`), when a run evaluates (`run.trained`), scores of papers
(`meshlora_extra.paper.scores`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import broadcast_text
from meshlora.processes.launchers import launcher_place
from meshlora.reading.nlg import of_categories
from meshlora.reading.records import Prompt, prompts_of
from meshlora.run.answer_metrics import Answer, Measures
from meshlora.run.config.metrics import name_of
from meshlora.run.config.run_file import DataConfig, GenerateConfig
from meshlora.run.decoding import encode_prompts, texts_of
from meshlora.run.generated import continued_by_all
from meshlora.run.sources import held_out_records
from meshlora_ground.errors import UserError


@dataclass(frozen=True)
class Prompts:
    """Prompts with their references, their texts as they are asked, and their tokens."""

    prompts: list[Prompt]
    texts: list[str]
    encoded: list[list[int]]
    tokenizer: PreTrainedTokenizerBase

    @property
    def references(self) -> list[tuple[str, ...]]:
        return [prompt.references for prompt in self.prompts]


def read_prompts(
    data: DataConfig,
    options: GenerateConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: Any,
    *,
    held: frozenset[str],
) -> Prompts:
    """The prompts of `data.eval`, in the order of their first records, up to `generate.limit` of them. held: see
    `RunData`. Raises: UserError: a record without a prompt; a prompt that leaves no room for
    `generate.max_new_tokens`."""
    records = of_categories(held_out_records(data, held), data.eval_categories)
    prompts = prompts_of(records[: data.eval_limit])[: options.limit]
    asked, names = [prompt.chat or prompt.text or "" for prompt in prompts], [prompt.origin for prompt in prompts]
    encoded = encode_prompts(asked, tokenizer, model_config, options, names=names, separator=data.separator)
    return Prompts(prompts, [text for text, _ in encoded], [ids for _, ids in encoded], tokenizer)


@dataclass(frozen=True)
class Answers:
    """Prompts whose answers a run measures. measures: of rank 0, which alone has loaded the user's functions."""

    prompts: Prompts
    options: GenerateConfig
    measures: Measures | None

    @property
    def words(self) -> str:
        """What it costs."""
        number, names = len(self.prompts.prompts), ", ".join(map(name_of, self.options.metrics))
        return (
            f"{names}: each evaluation, and one before the first step, generates {number:,} answers of at most "
            f"{self.options.max_new_tokens:,} tokens (fewer with generate.limit)"
        )

    def measured(self, model: Any, *, advance: Callable[[int], None] = lambda _: None) -> dict[str, float]:
        """The mean of each metric over the answers of `model`, on every rank: rank 0 says them. Collective.

        Raises:
            UserError: a metric failed on an answer, the same on all ranks.
        """
        texts = answered(model, self.prompts, self.options, advance=advance)
        return measured_by_rank_0(model, self.measures, self.prompts, texts)


def answered(
    model: Any, prompts: Prompts, options: GenerateConfig, *, advance: Callable[[int], None] = lambda _: None
) -> list[str]:
    """The answer to each prompt, on every rank. Collective. model, advance: see `continued_by_all`."""
    found = continued_by_all(model, prompts.tokenizer, prompts.encoded, options, advance=advance)
    return texts_of([each.tokens for each in found], prompts.tokenizer, options)


def measured_by_rank_0(
    model: Any, measures: Measures | None, prompts: Prompts, texts: Sequence[str]
) -> dict[str, float]:
    """The means of the metrics of rank 0, on every rank of `model`: no other runs a user's code. Collective.

    Raises:
        UserError: a metric failed; the same on all ranks, so that none waits for another.
    """
    mesh, words = runtime(model).mesh, ""
    if mesh.rank == 0:
        assert measures is not None
        answers = []
        for prompt, asked, text in zip(prompts.prompts, prompts.texts, texts, strict=True):
            answers.append(Answer(asked, text, prompt.references, prompt.origin))
        try:
            words = json.dumps({"means": measures.means(answers)})
        except UserError as error:
            words = json.dumps({"error": [error.given, error.rule, error.way_out]})
    found = json.loads(broadcast_text(words, mesh.world, mesh.device))
    if "error" in found:
        raise UserError(*found["error"])
    means: dict[str, float] = found["means"]
    return means


def prepare_answers(
    data: DataConfig,
    options: GenerateConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: Any,
    *,
    held: frozenset[str],
) -> Answers | None:
    """The prompts of `generate.metrics` in a run; None without metrics. held: see `RunData`. Raises: UserError: as
    `read_prompts`; no data.eval; no such function; a reference that a metric cannot read."""
    if not options.metrics:
        return None
    if data.eval is None:
        raise UserError("generate.metrics", "there is nothing to answer", "give data.eval, or leave it out")
    prompts = read_prompts(data, options, tokenizer, model_config, held=held)
    return Answers(prompts, options, prepare_measures(options, prompts))


def prepare_measures(options: GenerateConfig, prompts: Prompts) -> Measures | None:
    """The metrics of `options`, where they are computed: on rank 0, or before there are ranks. Raises: UserError."""
    place = launcher_place()
    if not options.metrics or (place is not None and place.rank > 0):
        return None
    measures = Measures(options.metrics)
    for prompt in prompts.prompts:
        measures.check(prompt.references, prompt.origin)
    return measures
