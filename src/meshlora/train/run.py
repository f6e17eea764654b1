"""One rank of a training run, from prepared run to saved adapter."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from meshlora.adapter.describe import describe_targets
from meshlora.adapter.manage import runtime
from meshlora.adapter.merge import check_merge, merge
from meshlora.api import load_blueprint
from meshlora.console import Console
from meshlora.errors import UserError
from meshlora.parallel.collectives import broadcast_in_place
from meshlora.parallel.groups import Mesh, join, launcher_place, leave
from meshlora.state.file_hash import FileHashes
from meshlora.state.files import open_safetensors
from meshlora.state.weights import checkpoint_files
from meshlora.train.edge import another_rank_failed, end_at_once, say_in_training
from meshlora.train.identity import Contents, identity_of_contents
from meshlora.train.keeping import MERGED, clear_leftovers, set_aside
from meshlora.train.metrics import Reporter
from meshlora.train.prepare import Prepared
from meshlora.train.samples import FILE as SAMPLES
from meshlora.train.samples import forget_after
from meshlora.train.stopping import noticing_signals
from meshlora.train.tracking import open_trackers
from meshlora.train.trainer import Trainer

# Of the wait for hashes between two words to the other ranks.
_PAUSE_S = 5.0


def train(run: Prepared, *, console: Console | None = None, go_on: str = "--resume auto") -> None:
    """Train as `run` says. Every rank of the job calls this; that the run is proved is its caller's part.

    go_on: what to say of how a run that was asked to stop goes on, a command.
    """
    config = run.config
    join(config.device)
    with hashing_contents([run]) as hashes:
        model = load_blueprint(run.start, device=config.device, seed=config.train.seed)
        run = with_contents(run, hashes, runtime(model).mesh, console=console)
    output = Path(config.train.output)
    is_main = runtime(model).mesh.rank == 0
    done = run.resume.step if run.resume is not None else 0
    notes = list(run.notes)
    if is_main:
        notes += prepare_output(run)
    with Reporter(
        output / "metrics.jsonl",
        steps=run.steps,
        log_every=config.train.log_every,
        is_main=is_main,
        console=console,
        done=done,
        goes_on_without=config.train.on_save_error == "continue",
        trackers=open_trackers(config.train.track, output, config=dataclasses.asdict(config), done=done)
        if is_main
        else (),
    ) as reporter:
        introduce(run, notes, reporter)
        mesh = runtime(model).mesh
        with (
            noticing_signals(end_at_once, is_lost=another_rank_failed) as stop,
            mesh.patient_for(config.train.timeout_s),
        ):
            check = functools.partial(_check_merge, run) if config.train.merge_at_end and is_main else None
            trainer = Trainer(run, model, reporter, stop, check)
            say_in_training()
            is_done = trainer.train()
            if is_done:
                reporter.say(f"adapter: {output / 'adapter'}")
            else:
                reporter.say(f"stopped as asked; saved in {trainer.last_saved}. Go on with:\n{go_on}")
    leave()
    if is_done and config.train.merge_at_end and is_main:
        merge_at_end(run, console=console)


def hashing_contents(runs: Iterable[Prepared]) -> FileHashes:
    """On rank 0 the hashes of all files that `runs` read and whose content is not known yet, in the background: while
    the base is loaded, which reads the same bytes. On other ranks of nothing."""
    place = launcher_place()
    is_main = place is None or place.rank == 0
    return FileHashes(file for run in runs if is_main for files in _unknown(run).values() for file in files)


def with_contents(run: Prepared, hashes: FileHashes, mesh: Mesh, *, console: Console | None = None) -> Prepared:
    """`run` with an identity that is whole, on rank 0, which writes it into manifests. Collective, of short parts: no
    rank waits for another longer than `_PAUSE_S`, however large the base is."""
    for turn in itertools.count():
        is_there = torch.tensor([mesh.rank > 0 or hashes.are_there(_PAUSE_S)], dtype=torch.int32, device=mesh.device)
        if broadcast_in_place(is_there, mesh.world).item():
            break
        if turn == 0 and mesh.rank == 0:
            text = "reading the base for its hash, once: later runs know it while its files do not change"
            (console or Console()).say(text)
    if mesh.rank > 0:
        return run
    return dataclasses.replace(run, identity={**run.identity, **identity_of_contents(_unknown(run), hashes)})


def _unknown(run: Prepared) -> Contents:
    return {name: files for name, files in run.files.items() if name not in run.identity}


def merge_at_end(run: Prepared, *, console: Console | None = None) -> None:
    """Write the model with the finished adapter in its weights beside it, where it is not there yet. One process.

    Raises:
        MeshloraError: it could not be written, or does not compute what model and adapter do.
    """
    output = Path(run.config.train.output)
    if _is_merged(output / MERGED):
        return
    if said := set_aside(output, run.steps, ends=(MERGED,)):
        (console or Console()).say(f"{MERGED} was not whole: {said}")
    base, trust = copy.deepcopy(run.blueprint.config), run.blueprint.options.trust_remote_code
    done = merge(run.config.model.path, output / "adapter", output / MERGED, config=base, trust_remote_code=trust)
    changed = f"{done.num_changed} of {done.num_tensors} tensors changed"
    (console or Console()).say(f"merged: {output / MERGED} ({changed}; {done.check})")


def _is_merged(folder: Path) -> bool:
    """Whether a merged model is there: it was read back and compared when it was written, and none of it is cut."""
    try:
        for file in checkpoint_files(folder):
            with open_safetensors(file):
                pass
    except UserError:
        return False
    return (folder / "config.json").is_file()


def _check_merge(run: Prepared, adapter: Path) -> None:
    """That the end of the run can be merged: of an adapter with the tensors that it will have.

    Raises:
        UserError: it cannot.
    """
    base, trust = copy.deepcopy(run.blueprint.config), run.blueprint.options.trust_remote_code
    try:
        check_merge(run.config.model.path, adapter, config=base, trust_remote_code=trust)
    except UserError as error:
        raise UserError("train.merge_at_end", f"it would fail at the end ({error})", "leave it out") from None


def introduce(run: Prepared, notes: list[str], reporter: Reporter) -> None:
    """Say what is trained, and from where, before the first step."""
    for note in notes:
        reporter.say(note)
    reporter.say(
        f"{run.plan.model_type} on {run.topology}: {run.blueprint.trained.num_trainable:,} trainable parameters, "
        f"{len(run.train_data):,} sequences, {run.steps:,} steps"
    )
    for line in describe_targets(run.blueprint.trained.targets):
        reporter.say(line)
    if run.resume is not None:
        reporter.say(f"goes on after step {run.resume.step} of {run.resume.topology}: {run.resume.folder}")


def prepare_output(run: Prepared) -> list[str]:
    """Make the output folder, on rank 0: empty of an earlier run (`train.overwrite`, else `prepare` has refused), or
    where the run goes on, without what comes after the step that it goes on from. Returns what to say of it."""
    output, done = Path(run.config.train.output), run.resume.step if run.resume is not None else 0
    output.mkdir(parents=True, exist_ok=True)
    for name in () if run.resumes else ("adapter", "checkpoints", MERGED):
        shutil.rmtree(output / name, ignore_errors=True)
    clear_leftovers(output)
    if run.is_finished:  # one of several adapters may have all its steps
        return []
    said = set_aside(output, done) if run.resumes else None
    if done:
        forget_after(output / SAMPLES, done)
    else:
        (output / SAMPLES).unlink(missing_ok=True)
        shutil.rmtree(output / "initial", ignore_errors=True)
    return [said] if said else []
