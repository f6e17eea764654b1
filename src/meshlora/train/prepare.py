"""Preparing a run: everything that can be known, and refused, before any process starts or any weight is read.

Owns: whether model, adapter, data and topology of a run fit together. `meshlora check` is this and nothing else;
`meshlora train` does it first. Nothing here uses a process group or allocates a weight of the model.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers import PreTrainedTokenizerBase

from meshlora.adapter.peft_format import (
    CONFIG_FILE,
    PIECES_FILE,
    WEIGHTS_FILE,
    check_adapter,
    lora_config,
    read_config,
)
from meshlora.adapter.per_expert import engine_config
from meshlora.adapter.targets import Target, num_trainable, resolve_targets, trained_parameters
from meshlora.adapter.whole_matrix import WHOLE_MATRIX, check_whole_matrix
from meshlora.api import build_meta, read_model_config, resolve_dtype
from meshlora.compat import attention_of
from meshlora.config import RUN_CONTENT, RunConfig
from meshlora.data import READERS, GlobalBatches, TokenizedDataset
from meshlora.errors import UnsupportedError, UserError
from meshlora.guards import longest_fixed_length
from meshlora.plan.rules import ModelPlan
from meshlora.plan.topology import Topology
from meshlora.state.files import is_writable
from meshlora.state.weights import CheckpointSource, check_checkpoint, checkpoint_files
from meshlora.train.balance import check_load_balancing
from meshlora.train.identity import Contents, contents, identity
from meshlora.train.manifest import Saved
from meshlora.train.packing import check_packing
from meshlora.train.recompute import check_recompute
from meshlora.train.resuming import going_on
from meshlora.train.routing import check_routing, step_file
from meshlora.train.samples import Samples, prepare_samples
from meshlora.train.tokenizer import load_tokenizer, padding_token_id
from meshlora.train.tracking import check_trackers

_TOKENS = ("input_ids", "is_trained", "offsets")


@dataclass(frozen=True)
class Prepared:
    """A run that passed every check.

    Attributes:
        num_trainable: trainable elements, each counted once.
        identity: what its steps depend on, by name; without the content of the `files` that it reads, where that did
            not have to be known yet.
        resumes: it was asked to go on. resume: the checkpoint that it goes on from, if there is any.
        is_finished: it has all its steps already. samples: what is continued at intervals.
        notes: what the user should know.
    """

    config: RunConfig
    topology: Topology
    plan: ModelPlan
    lora: LoraConfig
    targets: dict[str, Target]
    num_trainable: int
    pad_token_id: int
    train_data: TokenizedDataset
    eval_data: TokenizedDataset | None
    steps: int
    identity: Mapping[str, str] = field(default_factory=dict)
    files: Contents = field(default_factory=dict)
    resumes: bool = False
    resume: Saved | None = None
    is_finished: bool = False
    samples: Samples | None = None
    notes: tuple[str, ...] = ()

    @property
    def batches(self) -> GlobalBatches:
        """The global order of sequences."""
        return GlobalBatches(self.train_data.num_examples, self.config.train.batch_size, self.config.train.seed)


def prepare(
    config: RunConfig, *, world: int | None = None, resume: str | None = None, despite: Collection[str] = ()
) -> Prepared:
    """Check a run against its model, adapter and data; tokenise the data (cached).

    Args:
        world: number of processes where it is known.
        resume: folder of a checkpoint to go on from, or "auto": the last whole one in the output, if there is any.
        despite: names of what may differ from the run that saved it.

    Raises:
        UserError: the first thing that does not fit.
    """
    topology = Topology.parse(config.topology, world=world)
    if config.train.batch_size < topology.dp:
        raise UserError(
            f"train.batch_size={config.train.batch_size}",
            f"each of the dp={topology.dp} ranks needs at least one sequence a step",
            "raise train.batch_size or lower dp",
        )
    _check_output(config, resumes=resume is not None)
    check_trackers(config.train.track)
    lora = _lora(config)
    hf_config = read_model_config(config.model.path, trust_remote_code=config.model.trust_remote_code)
    dtype = resolve_dtype(config.model.dtype, hf_config)
    model, plan = build_meta(
        hf_config,
        topology,
        dtype=dtype,
        attn_implementation=config.model.attn_implementation,
        disable_dropout=config.model.disable_dropout,
        trust_remote_code=config.model.trust_remote_code,
        quantization=config.model.quantization,
    )
    if config.adapter is not None:
        lora = engine_config(Path(config.adapter) / WEIGHTS_FILE, lora, plan)
    targets = resolve_targets(model, plan, lora, strict=config.adapter is None)
    check_whole_matrix(lora, targets, plan, dtype)
    if config.train.objective.needs_base and lora.init_lora_weights in WHOLE_MATRIX:
        raise UnsupportedError(
            f"train.objective={config.train.objective.kind} with init_lora_weights={lora.init_lora_weights!r}",
            "it needs the frozen base, which has given its principal part to the adapter",
            "use init_lora_weights: true",
        )
    if config.data.packing:
        check_packing(
            hf_config,
            attn_implementation=config.model.attn_implementation,
            trust_remote_code=config.model.trust_remote_code,
        )
    check_recompute(model, config.train.recompute)
    if config.train.router_aux_loss_coef:
        check_load_balancing(model)
    trained = trained_parameters(model, plan, lora, targets)
    check_checkpoint(
        model, CheckpointSource(Path(config.model.path), model), allow_unused=config.model.allow_unused_weights
    )
    if config.adapter is not None:
        check_adapter(model, Path(config.adapter), lora, targets, plan)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    check_fits(tokenizer, hf_config, config, topology)
    vocab_size = hf_config.get_text_config().vocab_size
    notes: list[str] = []
    options: dict[str, Any] = {"vocab_size": vocab_size, "say": notes.append}
    train_data = read_data(config, config.data.train, tokenizer, **options)
    eval_data = None
    if config.data.eval is not None:
        eval_data = read_data(config, config.data.eval, tokenizer, **options).first(config.data.eval_limit)
    steps = _num_steps(config, train_data.num_examples)
    if config.train.warmup_steps >= steps:
        raise UserError(
            f"train.warmup_steps={config.train.warmup_steps}", f"it must be below the {steps} steps of the run"
        )
    if config.train.warmup_steps + config.train.decay_steps > steps:
        raise UserError(
            f"train.warmup_steps={config.train.warmup_steps} and train.decay_steps={config.train.decay_steps}",
            f"together they are more than the {steps} steps of the run",
        )
    # The record in the folder is of this same run: one that goes on, also where it ended before its first checkpoint.
    resumes = resume is not None and (resume != "auto" or _holds_run(Path(config.train.output)))
    if (folder := config.train.routing_replay or config.train.routing_record) is not None:
        check_routing(
            Path(folder),
            replays=config.train.routing_replay is not None,
            steps=steps,
            plan=plan,
            may_overwrite=config.train.overwrite or resumes,
        )
    replays = config.train.routing_replay
    run = Prepared(
        config,
        topology,
        plan,
        lora,
        targets,
        num_trainable(model, targets, trained, plan),
        padding_token_id(tokenizer),
        train_data,
        eval_data,
        steps,
        identity=identity(
            config,
            steps=steps,
            tokens={**{name: getattr(train_data, name) for name in _TOKENS}, **train_data.columns},
            attention=attention_of(model.config),
        ),
        files=contents(
            config,
            weights=checkpoint_files(Path(config.model.path)),
            adapter=(CONFIG_FILE, WEIGHTS_FILE, PIECES_FILE),
            replay=[step_file(Path(replays), step) for step in range(steps)] if replays is not None else (),
        ),
        samples=prepare_samples(config, topology, tokenizer, hf_config),
        notes=tuple(notes),
    )
    return read_output(run, resume=resume, despite=despite)


def read_output(run: Prepared, *, resume: str | None, despite: Collection[str] = ()) -> Prepared:
    """`run` with what its output holds now. Once more by who holds the output, for others may have used it until then.

    Raises:
        UserError: the output holds a run, or one that this cannot go on with.
    """
    _check_output(run.config, resumes=resume is not None)
    if resume is None:
        return run
    own = {name: value for name, value in run.identity.items() if name not in run.files}
    found = going_on(
        Path(run.config.train.output), resume, steps=run.steps, identity=own, files=run.files, despite=despite
    )
    return dataclasses.replace(
        run,
        identity=found.identity,
        resumes=True,
        resume=found.resume,
        is_finished=found.is_finished,
        notes=tuple(dict.fromkeys((*run.notes, *found.notes))),
    )


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
    if not is_writable(parent):
        raise UserError(f"train.output={output}", f"{parent} is not writable", "choose another")


def _inputs(config: RunConfig) -> list[tuple[str, str]]:
    """(option, path) of all that a run reads."""
    given = {
        "model.path": config.model.path,
        "adapter": config.adapter,
        "data.train": config.data.train,
        "data.eval": config.data.eval,
        "train.routing_replay": config.train.routing_replay,
    }
    return [
        (name, path) for name, paths in given.items() for path in ([paths] if isinstance(paths, str) else paths or ())
    ]


def _resolved(path: str | Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises where links go in circles


def _holds_run(output: Path) -> bool:
    return any((output / name).exists() for name in RUN_CONTENT)


def _lora(config: RunConfig) -> LoraConfig:
    if config.adapter is not None:
        return read_config(Path(config.adapter))
    assert config.lora is not None
    return lora_config(config.lora, "lora", unknown_is_error=True)


def check_fits(tokenizer: PreTrainedTokenizerBase, hf_config: Any, config: RunConfig, topology: Topology) -> None:
    """Tokens fit the model's vocabulary, sequences its positions."""
    text_config = hf_config.get_text_config()
    if len(tokenizer) > text_config.vocab_size:
        raise UserError(
            f"tokenizer with {len(tokenizer)} tokens",
            f"the model {config.model.path} has embeddings for {text_config.vocab_size}",
            "is it the tokenizer of another model?",
        )
    pad = padding_token_id(tokenizer)  # looked up like any other, though what comes of it is masked
    if not 0 <= pad < text_config.vocab_size:
        raise UserError(
            f"tokenizer whose padding is token {pad}",
            f"the model {config.model.path} has embeddings for {text_config.vocab_size}",
            "name another pad_token, or eos_token, in tokenizer_config.json",
        )
    fixed = longest_fixed_length(hf_config)
    if fixed is not None and config.data.max_length > fixed[0]:
        raise UnsupportedError(
            f"data.max_length={config.data.max_length}",
            f"beyond {fixed[0]} positions the model's {fixed[1]} depends on the batch, hence on the topology",
            f"use at most {fixed[0]}",
        )
    limit = getattr(text_config, "max_position_embeddings", None)
    multiple = topology.tp if topology.sp else 1  # sequences are padded to a length that sp can cut
    if limit and math.ceil(config.data.max_length / multiple) * multiple > limit:
        padded = f", padded to a multiple of tp={multiple} under sp" if multiple > 1 else ""
        raise UserError(
            f"data.max_length={config.data.max_length}{padded}",
            f"the model has {limit} positions",
            f"use at most {limit // multiple * multiple}",
        )


def read_data(
    config: RunConfig,
    paths: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    say: Callable[[str], None] | None = None,
) -> TokenizedDataset:
    """The tokens of the files `paths`, read as the run's objective and `data` say. say: is told what is not read."""
    data = config.data
    return READERS[config.train.objective.reader](
        paths,
        tokenizer,
        columns=data.columns,
        max_length=data.max_length,
        loss_on=data.loss_on,
        cache_dir=Path(data.cache_dir).expanduser(),
        vocab_size=vocab_size,
        say=say,
    )


def _num_steps(config: RunConfig, num_sequences: int) -> int:
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None
    return max(1, math.ceil(config.train.epochs * math.ceil(num_sequences / config.train.batch_size)))
