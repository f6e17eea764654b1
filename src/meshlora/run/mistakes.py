"""All mistakes of a run file in one answer, not one a call.

Owns: which checks do not depend on each other. Does not own: the checks (`run.prepare`, `run.config`), the words of an
error of several (`meshlora_ground.errors.Mistakes`).

Reading and preparing a run ends at its first mistake. Only then is the rest looked over: what is wrong is left out, a
topology that does not fit is that of one process, and nothing that takes long is done: no row is read, and nothing is
downloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.reading.places import files_of
from meshlora.run.config.file import check_folder, mended_runs, paths_in, positions_of
from meshlora.run.config.run_file import Given, RunConfig, sources_of
from meshlora.run.output import check_output
from meshlora.run.prepare import blueprint_of, check_request
from meshlora.run.run_data import check_fits
from meshlora.run.texts import Texts
from meshlora.run.watch.tracking import check_trackers
from meshlora_ground.errors import UserError, at_once, prefixed
from meshlora_ground.hub import is_dataset_of_hub, located_here
from meshlora_ground.tasks import CAUSAL
from meshlora_ground.topology import Topology

_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextlib.contextmanager
def all_at_once(
    file: str | Path, overrides: list[str] | None = None, *, world: int | None = None, resumes: bool = False
) -> Iterator[None]:
    """Add to a mistake that is raised inside the block, which reads and prepares `file`, all others of the file.

    world: number of processes, if known. resumes: `--resume` is given.

    Raises:
        UserError: the mistakes of the file's keys and values first, then the topology, the output, the model, the
            adapter and the data.
    """
    try:
        yield
    except UserError as first:
        found = _all(file, overrides, world, resumes)
        if f"{first}" not in {f"{each}" for each in found}:
            found.insert(0, first)
        raise at_once(found) from first


class _Noted:
    """Calls checks, and keeps what they refuse."""

    def __init__(self) -> None:
        self.found = list[UserError]()

    def __call__(self, check: Callable[_P, _R], *args: _P.args, **options: _P.kwargs) -> _R | None:
        """What `check` returns; None if it refuses."""
        try:
            return check(*args, **options)
        except UserError as error:
            self.found.append(error)
        except Exception:  # noqa: BLE001 - what a library raises at a wrong run follows from the mistake that is raised
            pass
        return None


def _all(file: str | Path, overrides: list[str] | None, world: int | None, resumes: bool) -> list[UserError]:
    runs = mended_runs(file, overrides)
    found, said = [], set[str]()
    for mended in runs.values():
        found += mended.mistakes
    for name, mended in runs.items():
        config, noted = mended.config, _Noted()
        if config is None:
            continue
        # In the wrong folder nothing of it is found.
        if noted(check_folder, Path(file), paths_in(config)):
            _look(config, noted, world=world if config.train.on_fewer == "stop" else None, resumes=resumes)
        for error in noted.found:
            if f"{error}" not in said and not mended.follows(error):
                said.add(f"{error}")  # what several adapters share is said once
                found.append(prefixed(error, f"adapter {name}: ") if name else error)
    return found


def _look(config: RunConfig, noted: _Noted, *, world: int | None, resumes: bool) -> None:
    """Check what can be known without reading rows or weights, each part as if the others were right."""
    topology = noted(Topology.parse, config.topology, world=world)
    noted(check_request, config, world=world, resumes=resumes)
    noted(check_output, config, resumes=resumes)
    noted(check_trackers, config.train.track)
    here = noted(_located, config)
    base = None
    if here is not None:
        base = noted(make_blueprint, here.model.path, Topology(), here.model, here.train.objective)
    if here is not None and base is not None:
        tokenizer = noted(Texts(here.model, here.data, here.train.objective).tokenizer)
        whole = base if topology is None else noted(base.on, topology)
        noted(blueprint_of, here, Topology(), base=base)
        noted(_check_weights, base)
        longest: int | str | None = here.data.max_length
        if longest == "model":
            longest = noted(positions_of, here.model)
        if tokenizer is not None and isinstance(longest, int):
            noted(check_fits, tokenizer, whole or base, max_length=longest)
    if not config.is_stream:
        _look_at_files(config.data.train, noted)
    _look_at_files(config.data.eval_files, noted)


def _located(config: RunConfig) -> RunConfig | None:
    """`config` with folders for names of the hub; None if one of them would have to be downloaded first."""
    model, adapter = config.model, config.adapter
    trust = model.trust_remote_code
    folder = located_here(model.path, "model.path", revision=model.revision, trust_remote_code=trust)
    if adapter is not None:
        adapter = located_here(adapter, "adapter", kind="adapter")
    if folder is None or (adapter is None) != (config.adapter is None):
        return None
    return dataclasses.replace(config, model=dataclasses.replace(model, path=folder, revision=None), adapter=adapter)


def _check_weights(base: Blueprint) -> Any:
    """Whether the checkpoint is whole; of a model with a new head only the adapter knows what it may lack."""
    return base.check_weights() if base.objective.task == CAUSAL else None


def _look_at_files(given: Given, noted: _Noted) -> None:
    for source in sources_of(given):
        for path in source.paths:
            if not is_dataset_of_hub(path):
                noted(files_of, path, source.split)
