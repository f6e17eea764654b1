"""Preparing the runs of a run file: the checks of each, and those of several adapters trained together.

Owns: every refusal that is specific to several adapters in one run; holding their output folders. Does not own: the
checks of one run (`run.prepare`), the lock (`run.lock`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from peft import LoraConfig

from meshlora.adapter.initialization import WHOLE_MATRIX
from meshlora.adapter.targets.resolve import Target
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.plan.rules import ModelPlan
from meshlora.run.config.run import RunConfig
from meshlora.run.lock import hold, holder_of
from meshlora.run.prepare import blueprint_of, check_request, first_day, prepare, read_output, read_run_data
from meshlora.run.prepared import Prepared
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.tasks import CAUSAL
from meshlora_ground.versions import digest

# Longer values are compared by hash.
_LONGEST_SHOWN = 64
_WAY_OUT = "train the adapters one by one, or leave it out"


def prepare_run(
    config: RunConfig,
    *,
    world: int | None = None,
    resume: str | None = None,
    despite: Collection[str] = (),
    base: Blueprint | None = None,
    day: str | None = None,
) -> Prepared:
    """Check one run: `prepare_run(read_run(Path("run.yaml")))`. No process is started, no weight is read.

    Args:
        world: number of processes, if known.
        resume: folder of the checkpoint to resume from, or "auto": the last whole one in the output, if any.
        despite: names of settings that may differ from the run that saved it.
        base: blueprint of another run on the same model and topology, to reuse.
        day: today, as all ranks have it; default: as this process has it.

    Raises:
        UserError: the first thing that does not fit.
    """
    topology = check_request(config, world=world, resumes=resume is not None)
    blueprint = blueprint_of(
        config, base or make_blueprint(config.model.path, topology, config.model, config.train.objective)
    )
    data = read_run_data(config, blueprint, day=first_day(config, resume=resume, day=day))
    return prepare(config, blueprint, data, resume=resume, despite=despite)


def prepare_runs(
    configs: Mapping[str, RunConfig],
    *,
    world: int | None = None,
    resume: str | None = None,
    despite: Collection[str] = (),
    day: str | None = None,
) -> dict[str, Prepared]:
    """Check every run of a run file (`run.config.file.read_runs`); arguments as in `prepare_run`.

    Each of several adapters resumes from its own last whole checkpoint.

    Raises:
        UserError: the first thing that does not fit, with the adapter's name if there are several.
    """
    if "" not in configs:
        if resume not in (None, "auto"):
            raise UserError(
                f"--resume {resume}", "each of several adapters has checkpoints of its own", "use --resume auto"
            )
        _check_options(next(iter(configs.values())))
        # Of a micro-batch each adapter would have a row, and short ones would be padded to the longest.
        configs = {name: _padded(config) for name, config in configs.items()}
    runs: dict[str, Prepared] = {}
    base: Blueprint | None = None  # made with the first
    for name, config in configs.items():
        with _named(name):
            runs[name] = prepare_run(config, world=world, resume=resume, despite=despite, base=base, day=day)
        base = runs[name].blueprint
    if "" not in runs:
        if runs[name].blueprint.dtype == torch.float16:
            raise UnsupportedError("float16 with several adapters", "their loss scale is not proved", "use bfloat16")
        if runs[name].config.train.optimizer == "adamw_8bit":
            given = "train.optimizer=adamw_8bit with several adapters"
            raise UnsupportedError(given, "it is not proved with them", "use optimizer: adamw")
        for name, run in runs.items():
            if any(data is not None and data.images is not None for data in (run.train_data, run.eval_data)):
                raise UnsupportedError(f"adapter {name}: images", "they are not proved with several adapters", _WAY_OUT)
            if run.train_data.routed is not None:
                what = f"adapter {name}: routed_experts"
                raise UnsupportedError(what, "they are not supported with several adapters", _WAY_OUT)
            if run.config.reference is not None:
                given, why = (
                    f"adapter {name}: reference: {run.config.reference}",
                    "it is not proved with several adapters",
                )
                raise UnsupportedError(given, why, "use reference: base, or train the adapters one by one")
            check_adapter_together(name, run.blueprint.trained.config, run.blueprint.trained.targets, run.plan)
    return runs


def _padded(config: RunConfig) -> RunConfig:
    """Rows of one sequence, where the run file leaves it open."""
    is_open = config.data.packing == "auto"
    return dataclasses.replace(config, data=dataclasses.replace(config.data, packing=False)) if is_open else config


def words_of(runs: Mapping[str, Prepared]) -> dict[str, str]:
    """The facts about `runs` that must be the same on all ranks, for `agreement.agreed`."""
    words = {}
    for name, run in runs.items():
        of = f" of adapter {name}" if name else ""
        done = "all steps done" if run.is_finished else "no checkpoint"
        output = Path(run.config.train.output)
        words[f"in {output}"] = f"step {run.resume.step}" if run.resume is not None else done
        words[f"as holder of the lock of {output}"] = str(holder_of(output) or "nobody")
        words[f"as run file{of}"] = _options(run.config)
        words[f"as files of the base{of}"] = _sizes(run.files["model"])
        words |= {f"as {key}{of}": _shown(value) for key, value in run.identity.items()}
    return words


def _options(config: RunConfig) -> str:
    """A hash of all options but paths, which may differ between machines: what lies there is compared by itself."""
    given = dataclasses.asdict(config)
    for part, paths in {"model": ("path",), "data": ("train", "eval", "cache_dir")}.items():
        given[part] = {name: value for name, value in given[part].items() if name not in paths}
    del given["adapter"]
    given["train"]["objective"].pop("reference", None)
    return digest([json.dumps(given, sort_keys=True, default=str)])


def _sizes(files: Collection[Path]) -> str:
    """A hash of names and sizes: reading the whole base on every rank would take too long."""
    return digest([f"{file.name} {file.stat().st_size}" for file in files])


def _shown(value: str) -> str:
    return value if len(value) <= _LONGEST_SHOWN else hashlib.sha256(value.encode()).hexdigest()[:16]


@contextlib.contextmanager
def holding_outputs(
    runs: Mapping[str, Prepared], *, resume: str | None = None, despite: Collection[str] = ()
) -> Iterator[dict[str, Prepared]]:
    """Lock the outputs of `runs` inside the block; yields `runs`, updated from the outputs once they are locked.

    Called by the one process of a job that outlives the others, after all other checks and before an output is
    written. Arguments as in `prepare_run`, which read the outputs before they were locked.

    Raises:
        UserError: another run trains in one of them, or has used it since.
    """
    with contextlib.ExitStack() as held:
        found = {}
        for name, run in runs.items():
            with _named(name):
                held.enter_context(hold(Path(run.config.train.output)))
                found[name] = read_output(run, resume=resume, despite=despite)
        yield found


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix user errors inside the block with the adapter's name, if there are several."""
    try:
        yield
    except UserError as error:
        if not name:
            raise
        raise type(error)(f"adapter {name}: {error.given}", error.rule, error.way_out) from error


def logs_of(runs: Mapping[str, Prepared]) -> Path:
    """The folder of the ranks' logs: the output, or the common parent of the outputs of several adapters."""
    output = Path(next(iter(runs.values())).config.train.output)
    return output if "" in runs else output.parent


def check_adapter_together(name: str, lora: LoraConfig, targets: Mapping[str, Target], plan: ModelPlan) -> None:
    """Refuse the adapter `name` among several if its options are not proved there.

    Raises:
        UnsupportedError: names the option or the target.
    """
    refused = {
        f"bias={lora.bias!r}": lora.bias != "none",
        "modules_to_save": bool(lora.modules_to_save),
        "trainable_token_indices": bool(lora.trainable_token_indices),
        f"init_lora_weights={lora.init_lora_weights!r}": lora.init_lora_weights in WHOLE_MATRIX,
        **{f"LoRA on the router {target}": True for target in targets if target in plan.matrices},
    }
    for option, is_given in refused.items():
        if is_given:
            raise UnsupportedError(f"adapter {name}: {option}", "it is not supported among several adapters", _WAY_OUT)


def _check_options(config: RunConfig) -> None:
    """Refuse run-wide options that are not proved for several adapters.

    Raises:
        UnsupportedError: names the option.
    """
    train = config.train
    given = {
        f"train.router_aux_loss_coef={train.router_aux_loss_coef}": train.router_aux_loss_coef > 0,
        f"train.track={train.track}": bool({*train.track} - {"tensorboard"}),  # others: one run per process
        "train.routing_record": train.routing_record is not None,
        "train.routing_replay": train.routing_replay is not None,
        "data.follow_s": config.data.follow_s is not None,
        "rl": config.rl is not None,
        f"train.objective={train.objective.kind}": train.objective.task != CAUSAL,
    }
    for option, is_given in given.items():
        if is_given:
            raise UnsupportedError(option, "it is not supported with several adapters", _WAY_OUT)
