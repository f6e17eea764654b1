"""Preparing a run: everything that can be known, and refused, before any process starts or any weight is read.

Owns: whether the model, adapter, data and topology of a run fit together. `meshlora check` does only this;
`meshlora train` does it first. Does not own: process groups and weights, neither of which is touched here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshlora.adapter.formats.peft_format import CONFIG_FILE, PIECES_FILE, WEIGHTS_FILE, lora_config
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.plan.features import Asked
from meshlora.plan.pairs import check, refusal
from meshlora.plan.rules import ModelPlan
from meshlora.plan.table import notes_of_whole
from meshlora.reading.chat import further_stops
from meshlora.reading.clock import today
from meshlora.reading.places import places
from meshlora.reading.tokenizer import padding_token_id
from meshlora.run.answers import prepare_answers
from meshlora.run.asking import recorded
from meshlora.run.checkpoint.identity import DATE, contents, identity
from meshlora.run.checkpoint.resuming import day_of_run, going_on, said_of_adapter
from meshlora.run.config.metrics import code_of
from meshlora.run.config.run_file import DataConfig, RunConfig, TrainConfig, paths_of
from meshlora.run.distillation.teachers import teacher_of
from meshlora.run.early_stopping import Patience, values_until
from meshlora.run.followed import stream_of
from meshlora.run.graphs.choice import with_graphs
from meshlora.run.learning_rate import notes_of_rate
from meshlora.run.length import in_steps, notes_in_steps, num_steps
from meshlora.run.offload import notes_of_offload
from meshlora.run.optimizers import check_trainable
from meshlora.run.output import check_output, holds_run
from meshlora.run.packing_check import check_packing
from meshlora.run.prepared import Prepared, asked_of
from meshlora.run.recompute import check_recompute, recomputed_every
from meshlora.run.run_data import RunData
from meshlora.run.slow_paths import SlowPath, check_fast, slow_paths
from meshlora.run.spikes import notes_of_spikes
from meshlora.run.watch.samples import prepare_samples
from meshlora.run.watch.tracking import check_trackers
from meshlora.wings.experts.balance import check_load_balancing
from meshlora.wings.experts.routing import check_routing, step_file
from meshlora.wings.found.feature import notes_of, use_twins
from meshlora.wings.kernels.kernels import with_kernels
from meshlora.wings.starts.eva import check_words
from meshlora_ground.compat.transformers_models import attention_of
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.pickled import OLD_WEIGHTS
from meshlora_ground.topology import TOKENS, Topology
from meshlora_ground.user_code import file_of
from meshlora_ground.weight_files import weight_files
from meshlora_judge.twin import shrink_config


def check_request(config: RunConfig, *, world: int | None, resumes: bool) -> Topology:
    """The topology of a run, after all checks that need no file.

    world: number of processes, if known.

    Raises:
        UserError: the first thing that does not fit.
    """
    train = config.train
    topology = Topology.parse(config.topology, world=world)
    if train.batch_size < topology.dp:
        rule = f"each of the dp={topology.dp} ranks needs at least one sequence a step"
        raise UserError(f"train.batch_size={train.batch_size}", rule, "raise train.batch_size or lower dp")
    check({**config.asked, "topology": topology, "generate.metrics": config.generate.metrics})
    check_output(config, resumes=resumes)
    check_trackers(train.track)
    return topology


def blueprint_of(config: RunConfig, topology: Topology, *, base: Blueprint | None = None) -> Blueprint:
    """The model and the adapter of a run. Checks that they can be trained as configured and that no weight is missing.

    base: of another run on the same model and topology, to reuse.

    Raises:
        UserError: names the option, the module or the tensor that does not fit. UnsupportedError: what is not proved.
    """
    train = config.train
    use_twins(functools.partial(shrink_config, tp=topology.tp))
    base = base or make_blueprint(config.model.path, topology, config.model, train.objective)
    if config.adapter is not None:
        blueprint = base.with_folder(Path(config.adapter))
    else:
        check_words(config.lora or {})
        blueprint = base.with_adapter(lora_config(dict(config.lora or {}), "lora", unknown_is_error=True))
    check({**config.asked, **blueprint.asked})
    blueprint = blueprint.with_reference(config.reference)
    if config.data.packing is True:
        _check_packing(blueprint)  # before weights and data, which the message would wait for
    teacher_of(config, blueprint)
    check_recompute(blueprint.model, train.recompute)
    check_trainable(train.optimizer, blueprint.trained, blueprint.plan)
    if train.router_aux_loss_coef:
        check_load_balancing(blueprint.model)
    said = blueprint.check_weights()
    is_proved = config.preflight in ("auto", "device")
    every = recomputed_every(train.recompute)
    blueprint, kernels = with_kernels(blueprint, device=config.device, is_proved=is_proved, recomputed_every=every)
    return dataclasses.replace(blueprint, notes=tuple(filter(None, (said, kernels, *notes_of(base.model)))))


def first_day(given: str | None, *, output: str, policy: str | None, resume: str | None, day: str | None) -> str:
    """The day at which the clock of chat templates stands in a run: the `given` one, or on which the run was begun.

    policy: folder of an adapter that makes rollouts, and acts on its own day. resume: as in `prepare`. day: today, as
    all ranks have it.
    """
    begun = None if resume is None else day_of_run(Path(output), resume)
    if begun is None and policy is not None:
        begun = said_of_adapter(Path(policy), DATE)
    return given or begun or day or today()


def prepare(
    config: RunConfig, data: RunData, *, world: int | None, resume: str | None, despite: Collection[str], adapters: int
) -> Prepared:
    """Check a run against its model, its data and the content of its output folder.

    world: number of processes, if known.
    resume: folder of the checkpoint to resume from, or "auto": the last whole one in the output, if any.
    despite: names of settings that may differ from the run that saved it. adapters: of the run file.

    Raises:
        UserError: the first thing that does not fit.
    """
    steps = num_steps(config.train, data.train.num_examples)
    train = in_steps(config.train, steps=steps, num_sequences=data.train.num_examples)
    of_train = [*notes_in_steps(config.train, train, steps=steps), *notes_of_rate(train), *notes_of_spikes(train)]
    config = dataclasses.replace(config, train=train)
    blueprint, options = data.blueprint, data.texts.data
    samples = prepare_samples(
        options,
        data.tokenizer,
        blueprint.config,
        held=data.held,
        every=train.sample_every,
        max_new_tokens=config.generate.max_new_tokens,
    )
    answers = prepare_answers(options, config.generate, data.tokenizer, blueprint.config, held=data.held)
    asked = {**config.asked, "adapters": adapters}
    rows = _rows(data, asked=asked, micro_batch_size=train.micro_batch_size)
    config = config.with_data(packing=rows.packing, date=data.day or options.date)
    slow = _slow(config, data, rows)
    config, of_graphs = with_graphs(config, blueprint, data.train, asked_of(asked, blueprint, data.train, data.eval))
    run = Prepared(
        config,
        blueprint,
        padding_token_id(data.tokenizer),
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
            data.texts.model,
            adapters={"adapter": config.adapter, "reference": config.reference},
            of_adapter=(CONFIG_FILE, WEIGHTS_FILE, OLD_WEIGHTS, PIECES_FILE),
            weights=weight_files(Path(data.texts.model.path)),
            replay=_check_routing(blueprint.plan, train, steps=steps, resume=resume),
            **_further_files(config, options),
        ),
        samples=samples,
        answers=answers,
        notes=(
            *(*blueprint.notes, *notes_of_whole(blueprint.plan), *data.notes, *rows.notes, *of_train),
            *(*notes_of_offload(config, blueprint, data.train, world=world), *of_graphs),
        ),
        slow_paths=slow,
        chat_template=None if options.chat_template is None else str(data.tokenizer.chat_template),
        asking=recorded(data.form, options, data.tokenizer),
        stop_tokens=tuple(further_stops(data.tokenizer)),
    )
    return read_output(run, resume=resume, despite=despite)


def _slow(config: RunConfig, data: RunData, rows: _Rows) -> tuple[SlowPath, ...]:
    """The slow paths that are known before the run starts. Raises: UserError: there are, with `train.require_fast`."""
    options = data.texts.data
    found = slow_paths(
        data.blueprint,
        data.train,
        device=config.device,
        preflight=config.preflight,
        kernels=config.model.kernels,
        row_length=options.longest if options.packing is True else None,
        is_apart=rows.is_apart,
    )
    slow = tuple(found)
    if config.train.require_fast:
        check_fast(slow)
    return slow


def _further_files(config: RunConfig, options: DataConfig) -> dict[str, Any]:
    """Files that only some runs read, as `contents` takes them."""
    beside = dict[str, list[Path]]()
    found: dict[str, Any] = {"code": code_of(config.generate.metrics), "beside": beside}
    if options.map is not None and (file := file_of(options.map)) is not None:
        beside["data.map file"] = [file]
    if (teacher := config.teacher) is not None:
        beside["teacher"] = [Path(teacher) / "config.json", *weight_files(Path(teacher))]
    if config.rl is not None:
        found |= {"prompts": places(paths_of(options.train)), "rewards": [*map(Path, config.rl.files)]}
    return found


def _check_routing(plan: ModelPlan, train: TrainConfig, *, steps: int, resume: str | None) -> list[Path]:
    """Check the recording or replay of routing. Returns the files that a replay reads."""
    if (folder := train.routing_replay or train.routing_record) is None:
        return []
    # A resumed run owns the record in the folder, even if it ended before its first checkpoint.
    resumes = resume is not None and (resume != "auto" or holds_run(Path(train.output)))
    replays, may_overwrite = train.routing_replay is not None, train.overwrite or resumes
    check_routing(Path(folder), replays=replays, steps=steps, plan=plan, may_overwrite=may_overwrite)
    return [step_file(Path(folder), step) for step in range(steps)] if replays else []


def _check_packing(blueprint: Blueprint) -> bool:
    options = blueprint.options
    attention, trust = options.attn_implementation, options.trust_remote_code
    return check_packing(blueprint.config, attn_implementation=attention, trust_remote_code=trust)


@dataclass(frozen=True)
class _Rows:
    """How sequences share rows.

    packing: as in `data`, but False where auto pads. is_apart: whether attention keeps joined sequences apart without a
    mask of the whole row, None if there would be none anyway.
    """

    packing: bool | Literal["auto"]
    is_apart: bool | None = None
    notes: tuple[str, ...] = ()


def _rows(data: RunData, *, asked: Asked, micro_batch_size: int) -> _Rows:
    """`data.packing: auto` packs only where the sequences of a micro-batch can be one row."""
    blueprint, packing = data.blueprint, data.texts.data.packing
    cuts_rows = blueprint.topology.size_over(TOKENS) > 1
    is_apart: bool | None = None
    assert packing != "rows", "its rows are examples since the data were read"
    if packing is True:
        is_apart = _check_packing(blueprint)
        return _Rows(packing, None if cuts_rows else is_apart)
    if packing is False or micro_batch_size == 1:
        return _Rows(False)
    why = ""
    refused = refusal({**asked_of(asked, blueprint, data.train, data.eval), "data.packing": True})
    if refused is not None:
        why = refused.rule
    elif asked["adapters"] > 1:
        why = "each of several adapters would have a row of its own, and short ones would be padded to the longest"
    elif cuts_rows:
        why = "cp cuts each row"
    else:
        try:
            is_apart = _check_packing(blueprint)
            if not is_apart:
                why = f"attention of {blueprint.plan.model_type} takes a mask of the whole row"
        except UnsupportedError as error:
            why = error.rule
    if why:
        return _Rows(False, is_apart, (f"data.packing: auto: rows are padded: {why}",))
    return _Rows(packing, is_apart)


def read_output(run: Prepared, *, resume: str | None, despite: Collection[str] = ()) -> Prepared:
    """`run` updated from its output folder. Called again under the lock: others may have used the folder until then.
    Raises: UserError: the output holds a run, or one that this run cannot resume."""
    options = run.config.train
    check_output(run.config, resumes=resume is not None)
    if resume is None:
        return run
    own = {name: value for name, value in run.identity.items() if name not in run.files}
    output, patience, every = Path(options.output), options.early_stopping, run.eval_every
    stream = stream_of(run.config)
    found = going_on(
        output,
        resume,
        steps=run.steps,
        identity=own,
        files=run.files,
        despite=despite,
        stops_early=lambda step: (
            Patience(patience, values_until(output / "metrics.jsonl", step, every, patience.metric).values()).is_out
            or (stream is not None and stream.num_steps == step)
        ),
    )
    return run.going_on(found)
