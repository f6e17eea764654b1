"""Preparing the runs of a run file: the checks of each, and those of several adapters trained together.

Owns: which runs train together; holding their output folders. Does not own: the
checks of one run (`run.prepare`), the lock (`run.lock`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from meshlora.loading.blueprint import Blueprint
from meshlora.plan.pairs import check
from meshlora.run.config.run_file import RunConfig
from meshlora.run.lock import hold, holder_of
from meshlora.run.prepare import blueprint_of, check_request, first_day, prepare, read_output
from meshlora.run.prepared import Prepared
from meshlora.run.run_data import read_data
from meshlora.run.texts import Texts
from meshlora_ground.errors import UserError, prefixed
from meshlora_ground.versions import digest

# Longer values are compared by hash.
_LONGEST_SHOWN = 64


def prepare_run(
    config: RunConfig,
    *,
    world: int | None = None,
    resume: str | None = None,
    despite: Collection[str] = (),
    base: Blueprint | None = None,
    day: str | None = None,
    adapters: int = 1,
) -> Prepared:
    """Check one run: `prepare_run(read_run(Path("run.yaml")))`. No process is started, no weight is read.

    Args:
        world: number of processes, if known.
        resume: folder of the checkpoint to resume from, or "auto": the last whole one in the output, if any.
        despite: names of settings that may differ from the run that saved it.
        base: blueprint of another run on the same model and topology, to reuse.
        day: today, as all ranks have it; default: as this process has it.
        adapters: how many the run file has.

    Raises:
        UserError: the first thing that does not fit.
    """
    topology = check_request(config, world=world, resumes=resume is not None)
    blueprint = blueprint_of(config, topology, base=base)
    policy = None if config.rl is None else config.adapter
    day = first_day(config.data.date, output=config.train.output, policy=policy, resume=resume, day=day)
    texts = Texts(config.model, config.data, config.train.objective)
    seed, is_stream = config.train.seed, config.is_stream
    data = read_data(texts, blueprint, config.asked, seed=seed, is_stream=is_stream, day=day)
    return prepare(config, data, world=world, resume=resume, despite=despite, adapters=adapters)


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
    adapters = len(configs)
    several = {"adapters": adapters, "resume": resume} if "" not in configs else {}
    for name, config in configs.items():
        with _named(name):
            check({**config.asked, **several})
    runs: dict[str, Prepared] = {}
    base: Blueprint | None = None  # made with the first
    for name, config in configs.items():
        with _named(name):
            runs[name] = prepare_run(
                config, world=world, resume=resume, despite=despite, base=base, day=day, adapters=adapters
            )
        base = runs[name].blueprint
    for name, run in runs.items():
        with _named(name):
            check({**run.asked, **several})
    return runs


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
        # By names and sizes: reading the whole base on every rank would take too long.
        words[f"as files of the base{of}"] = digest([f"{f.name} {f.stat().st_size}" for f in run.files["model"]])
        words |= {f"as {key}{of}": _shown(value) for key, value in run.identity.items()}
    return words


def _options(config: RunConfig) -> str:
    """A hash of all options but paths, which may differ between machines: what lies there is compared by itself."""
    given = dataclasses.asdict(config)
    for part, paths in {"model": ("path",), "data": ("train", "eval", "cache_dir", "map")}.items():
        given[part] = {name: value for name, value in given[part].items() if name not in paths}
    del given["adapter"]  # a path, too
    for name in ("reference", "teacher"):
        given["train"]["objective"].pop(name, None)
    return digest([json.dumps(given, sort_keys=True, default=str)])


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
        raise prefixed(error, f"adapter {name}: ") from error


def logs_of(runs: Mapping[str, Prepared]) -> Path:
    """The folder of the ranks' logs: the output, or the common parent of the outputs of several adapters."""
    output = Path(next(iter(runs.values())).config.train.output)
    return output if "" in runs else output.parent
