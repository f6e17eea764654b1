"""Preparing a run of several adapters: each as its single run is, and what several cannot have is refused.

Owns: which options of a run several adapters can have, the checks between them, and holding their outputs. Does not
own: the checks of each (`train.prepare`), which adapters these can be (`adapter.many`), the lock (`train.lock`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from meshlora.adapter.many import check_many
from meshlora.blueprint import Blueprint
from meshlora.config import RunConfig
from meshlora.config.objective import Sft
from meshlora.errors import UnsupportedError, UserError
from meshlora.guards import dropout_fields
from meshlora.train.lock import hold
from meshlora.train.prepare import Prepared, prepare, read_output

# What is longer is told apart by its hash.
_LONGEST_SHOWN = 64
_WAY_OUT = "train the adapters one by one, or leave it out"


def prepare_runs(
    configs: Mapping[str, RunConfig],
    *,
    world: int | None = None,
    resume: str | None = None,
    despite: Collection[str] = (),
) -> dict[str, Prepared]:
    """Check every run of a run file (`run_file.read_runs`); arguments as of `prepare`.

    Each of several adapters goes on from the last whole checkpoint of its own.

    Raises:
        UserError: the first thing that does not fit, with the name of the adapter where there are several.
    """
    if "" in configs:
        return {"": prepare(configs[""], world=world, resume=resume, despite=despite)}
    if resume not in (None, "auto"):
        raise UserError(
            f"--resume {resume}", "each of several adapters has checkpoints of its own", "use --resume auto"
        )
    _check_options(next(iter(configs.values())))
    runs: dict[str, Prepared] = {}
    base: Blueprint | None = None  # made with the first
    for name, config in configs.items():
        with _named(name):
            runs[name] = prepare(config, world=world, resume=resume, despite=despite, base=base)
        base = runs[name].blueprint
    _check_base(runs[name].blueprint)
    for name, run in runs.items():
        check_many(name, run.blueprint.trained.config, run.blueprint.trained.targets, run.plan)
    return runs


def words_of(runs: Mapping[str, Prepared]) -> dict[str, str]:
    """What all ranks must see alike of `runs`, for `agreement.agreed`."""
    words = {}
    for name, run in runs.items():
        of = f" of adapter {name}" if name else ""
        done = "all steps done" if run.is_finished else "no checkpoint"
        words[f"in {run.config.train.output}"] = f"step {run.resume.step}" if run.resume is not None else done
        words |= {f"as {key}{of}": _shown(value) for key, value in run.identity.items()}
    return words


def _shown(value: str) -> str:
    return value if len(value) <= _LONGEST_SHOWN else hashlib.sha256(value.encode()).hexdigest()[:16]


@contextlib.contextmanager
def holding_outputs(
    runs: Mapping[str, Prepared], *, resume: str | None = None, despite: Collection[str] = ()
) -> Iterator[dict[str, Prepared]]:
    """Keep all other runs out of the outputs of `runs` inside the block; yields `runs` with what these hold now.

    By the one process of a job that outlives the others. It comes after all other checks, and before the output is
    touched. Arguments as of `prepare`, which has read the outputs before they were held.

    Raises:
        UserError: another run trains in one of them, or has used it in between.
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
    """A mistake inside the block is said with the name of the adapter, where there are several."""
    try:
        yield
    except UserError as error:
        if not name:
            raise
        raise type(error)(f"adapter {name}: {error.given}", error.rule, error.way_out) from error


def logs_of(runs: Mapping[str, Prepared]) -> Path:
    """The folder in which the ranks' logs lie: the output, or what the outputs of several adapters have in common."""
    output = Path(next(iter(runs.values())).config.train.output)
    return output if "" in runs else output.parent


def _check_options(config: RunConfig) -> None:
    """Refuse what is for all adapters of a run and is not proved for several.

    Raises:
        UnsupportedError: names the option.
    """
    train, data = config.train, config.data
    given = {
        f"train.objective={train.objective.kind}": not isinstance(train.objective, Sft),
        f"train.router_aux_loss_coef={train.router_aux_loss_coef}": train.router_aux_loss_coef > 0,
        f"train.sample_every={train.sample_every}": train.sample_every > 0,
        f"train.track={train.track}": bool(train.track),
        "train.merge_at_end": train.merge_at_end,
        "train.routing_record": train.routing_record is not None,
        "train.routing_replay": train.routing_replay is not None,
        "data.packing": data.packing,
    }
    for option, is_given in given.items():
        if is_given:
            raise UnsupportedError(option, "it is not supported with several adapters", _WAY_OUT)


def _check_base(base: Blueprint) -> None:
    """The same of what the base is, and not an option.

    Raises:
        UnsupportedError: names the dtype or the dropout.
    """
    if base.dtype == torch.float16:
        raise UnsupportedError("float16 with several adapters", "their loss scale is not proved", "use bfloat16")
    if dropouts := {name: rate for name, rate in dropout_fields(base.model.config).items() if rate}:
        raise UnsupportedError(
            f"{min(dropouts)}={dropouts[min(dropouts)]} in the model's configuration with several adapters",
            "the model's own dropout is not proved with them",
            "use model.disable_dropout: true",
        )
