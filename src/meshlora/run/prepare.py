"""Preparing a run: everything that can be known, and refused, before any process starts or any weight is read.

Owns: whether the model, adapter, data and topology of a run fit together. `meshlora check` does only this;
`meshlora train` does it first. Does not own: process groups and weights, neither of which is touched here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from meshlora.adapter.formats.peft_format import CONFIG_FILE, PIECES_FILE, WEIGHTS_FILE, lora_config
from meshlora.loading.blueprint import Blueprint
from meshlora.loading.guards import longest_fixed_length, most_positions
from meshlora.plan.pairs import check, refusal
from meshlora.plan.rules import ModelPlan
from meshlora.plan.table import notes_of_whole
from meshlora.reading.bad_rows import ERROR
from meshlora.reading.chat import add_stop_tokens
from meshlora.reading.clock import day_of, set_day, today, written_day
from meshlora.reading.images import Images
from meshlora.reading.places import places
from meshlora.reading.processor import load_processor
from meshlora.reading.readers import READERS
from meshlora.reading.tokenizer import padding_token_id
from meshlora.run.checkpoint.identity import contents, identity
from meshlora.run.checkpoint.resuming import day_of_adapter, day_of_run, going_on
from meshlora.run.config.run import RUN_CONTENT, Given, RunConfig, paths_of
from meshlora.run.early_stopping import Patience, losses_until
from meshlora.run.followed import no_tokens, stream_of
from meshlora.run.optimizers import check_trainable
from meshlora.run.packing_check import check_packing
from meshlora.run.prepared import Prepared, asked_of
from meshlora.run.recompute import check_recompute
from meshlora.run.slow_paths import check_fast, slow_paths
from meshlora.run.sources import read_sources, tokenizer_of
from meshlora.run.watch.samples import Samples, prepare_samples
from meshlora.run.watch.tracking import check_trackers
from meshlora.wings.experts.balance import check_load_balancing
from meshlora.wings.experts.routing import check_routed, check_routing, step_file
from meshlora.wings.kernels.kernels import with_kernels
from meshlora_ground.compat import attention_of
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.files import why_not_writable
from meshlora_ground.further_inputs import FurtherInputs
from meshlora_ground.tasks import CAUSAL
from meshlora_ground.topology import TOKENS, Topology
from meshlora_ground.weight_files import weight_files


@dataclass(frozen=True)
class RunData:
    """The data of a run. notes: which parts of its files are not read. chat_template: as in `Prepared`. day: that chat
    templates write, if they ask for one.
    """

    pad_token_id: int
    train: TokenizedDataset
    eval: TokenizedDataset | None
    samples: Samples | None
    notes: tuple[str, ...] = ()
    chat_template: str | None = None
    day: str | None = None


def check_request(config: RunConfig, *, world: int | None, resumes: bool) -> Topology:
    """The topology of a run, after all checks that need no file.

    world: number of processes, if known.

    Raises:
        UserError: the first thing that does not fit.
    """
    train = config.train
    topology = Topology.parse(config.topology, world=world)
    if train.batch_size < topology.dp:
        raise UserError(
            f"train.batch_size={train.batch_size}",
            f"each of the dp={topology.dp} ranks needs at least one sequence a step",
            "raise train.batch_size or lower dp",
        )
    check({**config.asked, "topology": topology})
    _check_output(config, resumes=resumes)
    check_trackers(train.track)
    return topology


def blueprint_of(config: RunConfig, base: Blueprint) -> Blueprint:
    """`base` with the adapter of a run. Checks that it can be trained as configured and that no weight is missing.

    Raises:
        UserError: names the option, the module or the tensor that does not fit. UnsupportedError: what is not proved.
    """
    if config.adapter is not None:
        blueprint = base.with_folder(Path(config.adapter))
    else:
        blueprint = base.with_adapter(lora_config(config.lora or {}, "lora", unknown_is_error=True))
    check({**config.asked, **blueprint.asked})
    blueprint = blueprint.with_reference(config.reference)
    _check_model(blueprint, config)
    said = blueprint.check_weights()
    is_proved = config.preflight in ("auto", "device")
    blueprint, kernels = with_kernels(blueprint, device=config.device, is_proved=is_proved)
    return dataclasses.replace(blueprint, notes=tuple(filter(None, (said, kernels))))


def first_day(config: RunConfig, *, resume: str | None, day: str | None) -> str:
    """The day at which the clock of chat templates stands in a run: of `data.date`, or on which the run was begun.

    resume: as in `prepare`. day: today, as all ranks have it. A policy acts on the day of its adapter.
    """
    begun = None if resume is None else day_of_run(Path(config.train.output), resume)
    if begun is None and config.rl is not None and config.adapter is not None:
        begun = day_of_adapter(Path(config.adapter))
    return config.data.date or begun or day or today()


def dated(config: RunConfig, day: str) -> RunConfig:
    """`config` with `data.date`."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, date=day))


def read_run_data(config: RunConfig, blueprint: Blueprint, *, day: str | None = None) -> RunData:
    """The tokenised (cached) data of a run, checked against the model.

    day: of `first_day`; default: today.

    Raises:
        UserError: a file, a record or a token that does not fit.
    """
    tokenizer = tokenizer_of(config)
    if day is not None:
        set_day(tokenizer, day)
    check_fits(tokenizer, blueprint, max_length=config.data.max_length)
    notes: list[str] = []
    files = None if stream_of(config) is not None else config.data.train
    train_data, eval_data = (
        read_data(config, paths, tokenizer, blueprint.config, say=notes.append, categories=categories)
        if paths is not None
        else None
        for paths, categories in ((files, "all"), (config.data.eval, config.data.eval_categories))
    )
    if train_data is None:
        train_data = no_tokens()
    check(asked_of(config, blueprint, train_data, eval_data))
    images = [data.images for data in (train_data, eval_data) if data is not None]
    check_vision(blueprint, train_data.images)
    if train_data.routed is not None:
        check_routed(train_data.routed, blueprint.plan)
    of_processors = [each.processor.tokenizer for each in images if isinstance(each, Images)]
    written = next(filter(None, map(written_day, (tokenizer, *of_processors))), None)
    if config.data.date is not None and written is None:
        notes.append(f"data.date={config.data.date} has no effect: the chat template writes no date")
    return RunData(
        padding_token_id(tokenizer),
        train_data,
        eval_data.first(config.data.eval_limit) if eval_data is not None else None,
        prepare_samples(config, tokenizer, blueprint.config),
        tuple(dict.fromkeys(notes)),
        None if config.data.chat_template is None else str(tokenizer.chat_template),
        written,
    )


def prepare(
    config: RunConfig, blueprint: Blueprint, data: RunData, *, resume: str | None, despite: Collection[str]
) -> Prepared:
    """Check a run against its model, its data and the content of its output folder.

    resume: folder of the checkpoint to resume from, or "auto": the last whole one in the output, if any.
    despite: names of settings that may differ from the run that saved it.

    Raises:
        UserError: the first thing that does not fit.
    """
    if data.day is not None:
        config = dated(config, data.day)
    steps = _num_steps(config, data.train.num_examples)
    _check_warmup(config, steps)
    config, said, is_apart = _with_packing(config, blueprint, data)
    slow = tuple(slow_paths(config, blueprint, data.train, is_apart=is_apart))
    if config.train.require_fast:
        check_fast(slow)
    run = Prepared(
        config,
        blueprint,
        data.pad_token_id,
        data.train,
        data.eval,
        steps,
        identity=identity(
            config,
            steps=steps,
            tokens=data.train.arrays,
            attention=attention_of(blueprint.model.config),
            kernels=blueprint.options.kernels,
            day=data.day,
        ),
        files=contents(
            config,
            weights=weight_files(Path(config.model.path)),
            adapter=(CONFIG_FILE, WEIGHTS_FILE, PIECES_FILE),
            replay=_check_routing(blueprint.plan, config, steps, resume),
            prompts=[] if config.rl is None else [*places(paths_of(config.data.train))],
            rewards=[] if config.rl is None else [*map(Path, config.rl.files)],
        ),
        samples=data.samples,
        notes=(*blueprint.notes, *notes_of_whole(blueprint.plan), *data.notes, *said),
        slow_paths=slow,
        chat_template=data.chat_template,
    )
    return read_output(run, resume=resume, despite=despite)


def _check_routing(plan: ModelPlan, config: RunConfig, steps: int, resume: str | None) -> list[Path]:
    """Check the recording or replay of routing. Returns the files that a replay reads."""
    train = config.train
    if (folder := train.routing_replay or train.routing_record) is None:
        return []
    # A resumed run owns the record in the folder, even if it ended before its first checkpoint.
    resumes = resume is not None and (resume != "auto" or _holds_run(Path(train.output)))
    replays, may_overwrite = train.routing_replay is not None, train.overwrite or resumes
    check_routing(Path(folder), replays=replays, steps=steps, plan=plan, may_overwrite=may_overwrite)
    return [step_file(Path(folder), step) for step in range(steps)] if replays else []


def _check_model(blueprint: Blueprint, config: RunConfig) -> None:
    """Check that the model and the adapter can be trained as configured.

    Raises:
        UnsupportedError: names the option.
    """
    train = config.train
    if config.data.packing is True:
        _check_packing(blueprint)  # before weights and data, which the message would wait for
    check_recompute(blueprint.model, train.recompute)
    check_trainable(train.optimizer, blueprint.trained, blueprint.plan)
    if train.router_aux_loss_coef:
        check_load_balancing(blueprint.model)


def _check_packing(blueprint: Blueprint) -> bool:
    options = blueprint.options
    attention, trust = options.attn_implementation, options.trust_remote_code
    return check_packing(blueprint.config, attn_implementation=attention, trust_remote_code=trust)


def _with_packing(
    config: RunConfig, blueprint: Blueprint, data: RunData
) -> tuple[RunConfig, tuple[str, ...], bool | None]:
    """(`config` with `data.packing: auto` only where the sequences of a micro-batch can be one row; messages; whether
    attention keeps joined sequences apart without a mask of the whole row, None if there would be none anyway)."""
    if config.data.packing is True:
        is_apart = _check_packing(blueprint)
        return config, (), None if blueprint.topology.size_over(TOKENS) > 1 else is_apart
    padded = dataclasses.replace(config, data=dataclasses.replace(config.data, packing=False))
    if config.data.packing is False or config.train.micro_batch_size == 1:
        return padded, (), None
    why, found = _why_padded(config, blueprint, data), None
    try:
        if not why and not (found := _check_packing(blueprint)):
            why = f"attention of {blueprint.plan.model_type} takes a mask of the whole row"
    except UnsupportedError as error:
        why = error.rule
    return (padded, (f"data.packing: auto: rows are padded: {why}",), found) if why else (config, (), found)


def _why_padded(config: RunConfig, blueprint: Blueprint, data: RunData) -> str:
    """Why the sequences of a micro-batch keep rows of their own, whatever the model is; empty if they need not."""
    refused = refusal({**asked_of(config, blueprint, data.train, data.eval), "data.packing": True})
    if refused is not None:
        return refused.rule
    return "cp cuts each row" if blueprint.topology.size_over(TOKENS) > 1 else ""


def _check_warmup(config: RunConfig, steps: int) -> None:
    warmup, decay = config.train.warmup_steps, config.train.decay_steps
    if warmup >= steps:
        raise UserError(f"train.warmup_steps={warmup}", f"it must be below the {steps} steps of the run")
    if warmup + decay > steps:
        raise UserError(
            f"train.warmup_steps={warmup} and train.decay_steps={decay}",
            f"together they are more than the {steps} steps of the run",
        )


def read_output(run: Prepared, *, resume: str | None, despite: Collection[str] = ()) -> Prepared:
    """`run` updated from its output folder. Called again under the lock: others may have used the folder until then.

    Raises:
        UserError: the output holds a run, or one that this run cannot resume.
    """
    _check_output(run.config, resumes=resume is not None)
    if resume is None:
        return run
    own = {name: value for name, value in run.identity.items() if name not in run.files}
    options = run.config.train
    output, patience, every = Path(options.output), options.early_stopping, options.eval_every
    stream = stream_of(run.config)
    found = going_on(
        output,
        resume,
        steps=run.steps,
        identity=own,
        files=run.files,
        despite=despite,
        stops_early=lambda step: (
            Patience(patience, losses_until(output / "metrics.jsonl", step, every)).is_out
            or (stream is not None and stream.num_steps == step)
        ),
    )
    return run.going_on(found)


def _check_output(config: RunConfig, *, resumes: bool) -> None:
    output = Path(config.train.output)
    parent = next(p for p in (output, *output.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise UserError(f"train.output={output}", f"{parent} is a file, a folder is needed", "choose another")
    if _holds_run(output) and not (config.train.overwrite or resumes):
        raise UserError(
            f"train.output={output}",
            "it holds a run already",
            "choose another, --resume auto to go on with it, or --set train.overwrite=true",
        )
    place = _resolved(output)
    for option, given in _inputs(config):
        if place in (_resolved(given), *_resolved(given).parents):
            raise UserError(
                f"train.output={output}",
                f"{option}={given} is there, and could be overwritten",
                "choose another folder",
            )
    if _resolved(config.model.path) in place.parents:
        raise UserError(
            f"train.output={output}", f"it is in the folder of model.path={config.model.path}", "choose another folder"
        )
    if why_not_writable(parent):
        raise UserError(f"train.output={output}", f"{parent} is not writable", "choose another")


def _inputs(config: RunConfig) -> list[tuple[str, str]]:
    """(option, path) of everything that a run reads."""
    given = {
        "model.path": config.model.path,
        "adapter": config.adapter,
        "train.objective.reference": config.reference,
        "data.chat_template": config.data.chat_template,
        "data.train": paths_of(config.data.train),
        "data.eval": paths_of(config.data.eval),
        "train.routing_replay": config.train.routing_replay,
    }
    if config.rl is not None:
        given |= {"rl.source": config.rl.source if config.rl.is_folder else None, "rl.rewards": config.rl.files}
    return [
        (name, path) for name, paths in given.items() for path in ([paths] if isinstance(paths, str) else paths or ())
    ]


def _resolved(path: str | Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises on a loop of links


def _holds_run(output: Path) -> bool:
    return any((output / name).exists() for name in RUN_CONTENT)


def check_fits(tokenizer: PreTrainedTokenizerBase, blueprint: Blueprint, *, max_length: int) -> None:
    """Check the tokenizer against the model's vocabulary, and `max_length` against its positions."""
    text_config, topology = blueprint.config.get_text_config(), blueprint.topology
    if len(tokenizer) > text_config.vocab_size:
        raise UserError(
            f"tokenizer with {len(tokenizer)} tokens",
            f"the model {blueprint.source} has embeddings for {text_config.vocab_size}",
            "is it the tokenizer of another model?",
        )
    pad = padding_token_id(tokenizer)  # embedded like any other token, though masked afterwards
    if not 0 <= pad < text_config.vocab_size:
        raise UserError(
            f"tokenizer whose padding is token {pad}",
            f"the model {blueprint.source} has embeddings for {text_config.vocab_size}",
            "name another pad_token, or eos_token, in tokenizer_config.json",
        )
    fixed = longest_fixed_length(blueprint.config)
    if fixed is not None and max_length > fixed[0]:
        raise UnsupportedError(
            f"data.max_length={max_length}",
            f"beyond {fixed[0]} positions the model's {fixed[1]} depends on the batch, hence on the topology",
            f"use at most {fixed[0]}",
        )
    limit = most_positions(blueprint.config, blueprint.model)
    multiple = topology.size_over(topology.token_cut)  # sequences are padded to a length that can be cut
    if limit and math.ceil(max_length / multiple) * multiple > limit:
        cut = {axis: size for axis, size in topology.sizes.items() if axis in topology.token_cut and size > 1}
        sizes = "*".join(f"{axis}={size}" for axis, size in cut.items())
        padded = f", padded to a multiple of {sizes}{' under sp' * topology.sp}" if multiple > 1 else ""
        raise UserError(
            f"data.max_length={max_length}{padded}",
            f"the model has {limit} positions",
            f"use at most {limit // multiple * multiple}",
        )


def read_data(
    config: RunConfig,
    given: Given,
    tokenizer: PreTrainedTokenizerBase,
    model: PretrainedConfig,
    *,
    say: Callable[[str], None] | None = None,
    categories: str = "all",
) -> TokenizedDataset:
    """The tokens of the sources `given`, read for the run's objective and `data` options.

    say: told what is skipped. categories: `data.eval_categories`, for held-out files.
    """
    data, objective = config.data, config.train.objective
    own: dict[str, Any] = {"train_on": data.train_on, "too_long": data.too_long, "lost_text": data.lost_text}
    own |= {"turns": data.turns, "answers": data.answers}
    own["cache_dir"] = Path(data.cache_dir).expanduser()

    def processor() -> Any:
        found = load_processor(config.model.path, model)
        if data.chat_template is not None:
            found.tokenizer.chat_template = tokenizer.chat_template
        set_day(found.tokenizer, day_of(tokenizer))
        add_stop_tokens(found.tokenizer, data.stop_tokens)
        return found

    own |= {} if data.streaming else {"processor": processor}
    own |= {"separator": data.separator} if data.separator else {}
    own |= {"on_bad_row": data.on_bad_row} if data.on_bad_row != ERROR else {}
    own |= {"skips_empty": True} if data.empty_answers == "skip" else {}
    own |= {"categories": categories} if categories != "all" else {}
    read = functools.partial(
        READERS["streamed" if data.streaming else objective.reader],
        tokenizer=tokenizer,
        max_length=data.max_length,
        vocab_size=model.get_text_config().vocab_size,
        say=say,
        **(own if objective.task == CAUSAL else {"objective": objective}),
    )
    return read_sources(data, given, read, say)


def check_vision(blueprint: Blueprint, images: FurtherInputs | None) -> None:
    """Refuse an adapter outside the text part of a composite without images: it would have no gradient.

    Raises:
        UserError: names the first such module.
    """
    outside = [name for name in blueprint.trained.targets if not blueprint.plan.is_text(name)]
    if outside and images is None:
        raise UserError(
            f"an adapter on {outside[0]}",
            "text does not pass through it, and no training data has images",
            "leave out lora.vision, or train on images",
        )


def _num_steps(config: RunConfig, num_sequences: int) -> int:
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None
    return max(1, math.ceil(config.train.epochs * math.ceil(num_sequences / config.train.batch_size)))
