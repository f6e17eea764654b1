"""Evaluation: the mean loss over a whole set, each example exactly once on any topology.

Owns: the loop over the set, the sum over ranks, perplexity, and the checks of `meshlora evaluate` before ranks start.
Does not own: the loss itself (`run.objectives`), when a run evaluates (`run.trainer`), generated text
(`run.decoding`), what it is worth (`run.answers`) or its scores (`meshlora_extra.paper.scores`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshlora.adapter.attach import runtime
from meshlora.adapter.formats.peft_format import CONFIG_FILE
from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import join
from meshlora.feature import check_proved
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.reading.clock import today
from meshlora.reading.tokenizer import padding_token_id
from meshlora.run import heads
from meshlora.run.advantages import with_advantages
from meshlora.run.answers import Prompts, read_prompts
from meshlora.run.checkpoint.identity import DATA, DATE, hash_of_data
from meshlora.run.checkpoint.resuming import said_of_adapter
from meshlora.run.config.run_file import RunConfig, paths_of
from meshlora.run.distillation.teachers import load_teacher, teacher_of
from meshlora.run.objectives import count, first_pass, loss_sums, of_reference
from meshlora.run.run_data import check_fits
from meshlora.run.texts import Texts
from meshlora.train.batches import Batching
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError
from meshlora_ground.float64 import lift
from meshlora_ground.objective import COUNTED, Objective
from meshlora_ground.tasks import CAUSAL
from meshlora_ground.topology import Topology


@torch.no_grad()
def mean_loss(
    model: Any,
    data: TokenizedDataset,
    objective: Objective,
    batching: Batching,
    *,
    batch_size: int,
    advance: Callable[[], None] = lambda: None,
) -> tuple[float, int, dict[str, float]]:
    """(mean loss over `data`; number of items averaged: tokens, pairs or records; means of other statistics of a head,
    by name), over all ranks.

    batch_size: examples that are compared with each other, if the objective does so. advance: called after each
    micro-batch. Collective. Sums are float64.
    """
    data = with_advantages(objective, data)
    mesh, every = runtime(model).mesh, data.rows_of(np.arange(data.num_examples))
    is_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    others: dict[str, torch.Tensor] = {}
    size = batch_size if objective.is_of_step else len(every)
    for start in range(0, len(every), size):
        indices = every[start : start + size]
        with lift(model.dtype == torch.float64):
            point = first_pass(objective, model, batching, (data, indices))
        for batch in batching.batches(data, indices):
            with lift(model.dtype == torch.float64):
                reference = of_reference(objective, model, batch)
                ((loss, values),) = loss_sums(objective, model, batch, [("", batch)], reference, [point])
            sums[0] += loss
            sums[1] += count(objective, batch) * mesh.is_counted
            if objective.task != CAUSAL:
                for name, value in values.items():
                    others[name] = others.get(name, 0) + value.double()
            advance()
    model.train(is_training)  # it may be called between two steps
    total, number = all_reduce_sum(sums, mesh.losses).tolist()
    summed = {name: all_reduce_sum(value, mesh.losses) for name, value in others.items()}
    return total / number, int(number), heads.means(summed, number)


def perplexity(loss: float) -> float:
    """exp of a mean loss per token in nats; infinite if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that passed every check; of the base alone if its blueprint has no adapter. notes: for the user."""

    config: RunConfig
    blueprint: Blueprint
    data: TokenizedDataset
    pad_token_id: int
    notes: tuple[str, ...] = ()
    held: frozenset[str] = frozenset()


def adapter_of_run(config: RunConfig) -> Path:
    """The finished adapter of the run of a run file. Raises: UserError: there is none, and nothing takes its place."""
    finished = Path(config.train.output) / "adapter"
    if (finished / CONFIG_FILE).is_file():
        return finished
    way_out = "train it, name another with --adapter FOLDER, or evaluate the base with --base"
    if config.adapter is not None:
        way_out = f"train it, name the one that it starts from with --adapter {config.adapter}, or the base with --base"
    raise UserError(f"train.output={config.train.output}", "the run has no finished adapter there", way_out)


def prepare_evaluation(
    config: RunConfig, *, adapter: Path | None, world: int = 1, day: str | None = None
) -> Evaluation:
    """Check that model, adapter and `data.eval` of a run fit together, and tokenise the data (cached).

    day: today, as all ranks have it. Chat templates write that of `data.date`, else that of the adapter's own run.

    Raises:
        UserError: the first thing that does not fit.
    """
    if config.data.eval is None:
        raise UserError("data.eval", "there is nothing to evaluate on", "give it, or --data FILE")
    if adapter is None and config.train.objective.needs_base:
        given = f"train.objective={config.train.objective.kind} without an adapter"
        raise UserError(given, "it compares the adapter with the base", "give --adapter FOLDER")
    topology = Topology.parse(config.topology, world=world)
    # No dropout is active outside of training; nor are kernels, which the preflight proves.
    options = dataclasses.replace(config.model, disable_dropout=True, kernels="none")
    blueprint = make_blueprint(config.model.path, topology, options, config.train.objective)
    check_proved(blueprint.plan)
    if adapter is not None:
        blueprint = blueprint.with_folder(adapter, ignore_dropout=True).with_reference(config.reference)
    teacher_of(config, blueprint)
    said = blueprint.check_weights()  # of a head that is new the adapter has the values
    begun = None if adapter is None else said_of_adapter(adapter, DATE)
    config = config.with_data(date=config.data.date or begun or day or today())
    texts = Texts(config.model, config.data, config.train.objective)
    tokenizer = texts.tokenizer()
    check_fits(tokenizer, blueprint, max_length=config.data.longest)
    notes = [*filter(None, [said])]
    categories, held = config.data.eval_categories, frozenset[str]()
    if config.data.eval_share is not None:
        split = texts.read_split(tokenizer, blueprint.config, seed=config.train.seed, say=notes.append)
        _check_split(config, split.train, adapter)
        data, held = split.eval, split.held
    else:
        data = texts.read(config.data.eval_files, tokenizer, blueprint.config, say=notes.append, categories=categories)
    pad = padding_token_id(tokenizer)
    return Evaluation(config, blueprint, data.first(config.data.eval_limit), pad, tuple(notes), held)


def _check_split(config: RunConfig, trained: TokenizedDataset, adapter: Path | None) -> None:
    """Refuse to evaluate the run's own adapter on rows that are not those held out of its training."""
    if adapter is None or not adapter.resolve().is_relative_to(Path(config.train.output).resolve()):
        return
    there = said_of_adapter(adapter, DATA)
    if there is not None and there != hash_of_data(trained.arrays):
        given = f"data.eval={config.data.eval} with the adapter in {adapter}"
        rule = "its run was trained on other data, or held out other rows, so that it may have been trained on these"
        raise UserError(given, rule, "give the data options and train.seed of that run, or --data FILE")


def load_for_evaluation(run: Evaluation) -> Any:
    """The model with its adapter, on the mesh of this job. Every rank of it calls this."""
    return load_blueprint(run.blueprint, device=run.config.device).eval()


def prepare_prompts(run: Evaluation) -> Prompts:
    """The prompts of `meshlora evaluate --generate`. Raises: UserError: as `run.answers.read_prompts`."""
    config = run.config
    tokenizer = Texts(config.model, config.data, config.train.objective).tokenizer()
    return read_prompts(config.data, config.generate, tokenizer, run.blueprint.config, held=run.held)


def load_to_generate(run: Evaluation) -> Any:
    """The model, split as for the loss, but with one stage on each pp rank: nothing is generated through several."""
    flat = dataclasses.replace(run.blueprint.topology, interleave=1)
    return load_for_evaluation(dataclasses.replace(run, blueprint=run.blueprint.on(flat)))


def evaluate(run: Evaluation) -> dict[str, Any]:
    """Loss over all of the data, with perplexity for text. Every rank calls this and gets the same result."""
    join(run.config.device)
    model = load_for_evaluation(run)
    load_teacher(model, teacher_of(run.config, run.blueprint), device=run.config.device)
    heads.set_padding(model, run.pad_token_id)
    objective = run.config.train.objective
    size = run.config.train.micro_batch_size
    state, only = runtime(model), objective.trained_row
    batching = Batching(state.mesh, size, run.pad_token_id, only=only, balances=state.context.balances)
    loss, number, means = mean_loss(model, run.data, objective, batching, batch_size=run.config.train.batch_size)
    adapter = run.blueprint.adapter
    share = run.config.data.eval_share
    of_files = run.config.data.eval if share is None else f"{share:g} of the rows of data.train"
    found: dict[str, Any] = {"model": run.config.model.path, "adapter": None, "data": of_files}
    if adapter is not None:
        found["adapter"] = str(adapter.folder)
    if not isinstance(of_files, str):
        found["data"] = paths_of(run.config.data.eval_files)
    found |= {"topology": str(run.blueprint.topology), "examples": run.data.num_examples, "loss": loss}
    found |= {COUNTED[objective.per]: number, **means}
    if objective.is_of_text:
        value = perplexity(loss)
        found["perplexity"] = value if math.isfinite(value) else None  # JSON has no infinity
    return found
