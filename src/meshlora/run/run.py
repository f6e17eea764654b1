"""One rank of a training run, from prepared runs to saved adapters.

Owns: loading, the output folders, messages before and after training. Does not own: the steps (`run.trainer`),
refusals (`run.prepare`, `run.together`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from meshlora.adapter.attach import runtime
from meshlora.adapter.description import describe_adapter
from meshlora.adapter.formats.peft_format import begin_adapter
from meshlora.comm.collectives import all_gather, broadcast_in_place
from meshlora.comm.groups import Mesh, join, leave
from meshlora.comm.patience import patient_for
from meshlora.loading.load import load_blueprint
from meshlora.processes.heartbeat import Watch
from meshlora.processes.launchers import launcher_place
from meshlora.run.calibration import begun
from meshlora.run.checkpoint.identity import Contents, identity_of_contents
from meshlora.run.checkpoint.retention import MERGED, clear_leftovers, set_aside
from meshlora.run.distillation.teachers import load_teacher, teacher_of
from meshlora.run.edge import be_deterministic, hear_no_more, noticing_signals, say_in_training
from meshlora.run.extras import part
from meshlora.run.followed import FOLDER, stream_of
from meshlora.run.prepared import Prepared
from meshlora.run.trained import TrainedAdapter
from meshlora.run.trainer import Trainer
from meshlora.run.watch.metrics import Planned, Reporter
from meshlora.run.watch.samples import FILE as SAMPLES
from meshlora.run.watch.samples import forget_after
from meshlora.run.watch.tracking import Tracker, open_trackers
from meshlora_ground.console import Console
from meshlora_ground.errors import UserError
from meshlora_ground.file_hash import FileHashes
from meshlora_ground.files import open_safetensors
from meshlora_ground.weight_files import weight_files

# While rank 0 waits for hashes: how often it tells the other ranks.
_PAUSE_S = 5.0


def train(
    runs: Mapping[str, Prepared],
    *,
    console: Console | None = None,
    go_on: str = "--resume auto",
    watch: Watch | None = None,
    ends_if_stopped: bool = False,
    planned: Planned | None = None,
    making: Callable[[TrainedAdapter], None] | None = None,
) -> bool:
    """Train the adapters of `runs`, by name, on one base; a single one is named "". Finished ones are left as they are.

    Every rank of the job calls this. The caller checks that the runs are proved. Returns whether all steps are done, or
    the run was asked to stop before.

    go_on: the command to print for resuming runs that were asked to stop. watch: of this rank (`edge.rank_edge`).
    ends_if_stopped: the caller then ends this process, which hears no signal any more. planned: the planner's step, on
    rank 0, to be shown beside the seen one. making: called with each adapter that follows a stream which the run makes
    itself, to set what makes its steps (`run.followed`).
    """
    given, runs = runs, {name: run for name, run in runs.items() if not run.is_finished}
    console, first = console or Console(), next(iter(runs.values()))
    if first.config.train.deterministic:
        be_deterministic()
    join(first.config.device)
    with _hashing(runs.values()) as hashes:
        model, names = _loaded(runs)
        runs = {name: begun(run, model, names[name]) for name, run in runs.items()}
        mesh = runtime(model).mesh
        runs = {name: with_contents(run, hashes, mesh, console=console) for name, run in runs.items()}
    is_main, held_bytes = mesh.rank == 0, _held_bytes(model, mesh)
    with contextlib.ExitStack() as opened:
        stop = opened.enter_context(noticing_signals(watch))
        reporters = {}
        for name, run in runs.items():
            notes = [*run.notes]
            if is_main:
                notes += prepare_output(run)
            reporter = reporters[names[name]] = opened.enter_context(_reporter(name, run, console, mesh))
            reporter.planned = planned
            introduce(run, notes, reporter, held_bytes)
        opened.enter_context(patient_for(mesh, first.config.train.timeout_s, watch=watch))
        check = None
        if first.config.train.merge_at_end and is_main:
            check = functools.partial(_check_merge, first)
        trainer = Trainer({names[name]: run for name, run in runs.items()}, model, reporters, stop, check)
        if making is not None:
            for one in trainer.adapters:
                making(one)
        say_in_training()
        is_done = trainer.train()
        for one in trainer.adapters:
            one.reporter.compare_with_plan()
            if one.is_done:
                one.reporter.say(f"adapter: {one.output / 'adapter'}")
            elif one.name:
                one.reporter.say(f"stopped as asked; saved in {one.last_saved}")
            else:
                one.reporter.say(f"stopped as asked; saved in {one.last_saved}. Go on with:\n{go_on}")
        if not is_done and is_main and len(runs) > 1:
            console.say(f"Go on with:\n{go_on}")
        if not is_done and ends_if_stopped:
            hear_no_more()
            broadcast_in_place(torch.zeros(1, device=mesh.device), mesh.world)  # no rank ends before all are deaf
    leave()
    if is_done and first.config.train.merge_at_end and is_main:
        for run in given.values():
            merge_at_end(run, console=console)
    return is_done


def _held_bytes(model: Any, mesh: Mesh) -> int:
    """What the model and a teacher beside it hold on the fullest rank. Collective."""
    held = 0
    for each in (model, runtime(model).teacher or torch.nn.Module()):
        held += sum(tensor.nbytes for tensor in itertools.chain(each.parameters(), each.buffers()))
    return int(all_gather(torch.tensor([held], device=mesh.device), mesh.world).max())


def _loaded(runs: Mapping[str, Prepared]) -> tuple[Any, dict[str, str]]:
    """(the base with the initial adapters of `runs`; the name of each in the model)."""
    first = next(iter(runs.values()))
    device = first.config.device
    if "" in runs:  # the adapter decides which matrices a sharded base keeps whole, so it is loaded along with it
        model = load_blueprint(first.start, device=device, seed=first.config.train.seed)
        return load_teacher(model, teacher_of(first.config, first.blueprint), device=device), {"": "default"}
    model = load_blueprint(dataclasses.replace(first.blueprint, adapter=None), device=device)
    for name, run in runs.items():
        begin_adapter(model, name, run.start.trained, seed=run.config.train.seed)
    return model, {name: name for name in runs}


def _reporter(name: str, run: Prepared, console: Console, mesh: Mesh) -> Reporter:
    """The reporter of one adapter's run."""
    config, output, trackers = run.config, Path(run.config.train.output), list[Tracker]()
    if mesh.rank == 0:
        trackers = open_trackers(config.train.track, output, config=dataclasses.asdict(config), done=run.start_step)
    return Reporter(
        output / "metrics.jsonl",
        steps=run.steps,
        log_every=config.train.log_every,
        is_main=mesh.rank == 0,
        console=console,
        done=run.start_step,
        goes_on_without=config.train.on_save_error == "continue",
        trackers=trackers,
        name=name,
    )


def _hashing(runs: Iterable[Prepared]) -> FileHashes:
    """Hash, in the background and on rank 0, what is not known yet: loading the base meanwhile reads the same bytes."""
    place, unknown = launcher_place(), list[Path]()
    if place is None or place.rank == 0:
        for run in runs:
            unknown += itertools.chain(*_unknown(run).values())
    return FileHashes(unknown)


def with_contents(run: Prepared, hashes: FileHashes, mesh: Mesh, *, console: Console | None = None) -> Prepared:
    """`run` with its complete identity, on rank 0, which writes the manifests. Collective; polls, so that no rank
    waits for another longer than `_PAUSE_S`, however large the base is."""
    for turn in itertools.count():  # in turns: a single long wait would run into the timeout of collectives
        is_there = torch.tensor([mesh.rank > 0 or hashes.are_there(_PAUSE_S)], dtype=torch.int32, device=mesh.device)
        if broadcast_in_place(is_there, mesh.world).item():
            break
        if turn == 0 and mesh.rank == 0:
            text = "reading the base for its hash, once: later runs know it while its files do not change"
            (console or Console()).say(text)
    if mesh.rank > 0:
        return run
    return run.with_contents(identity_of_contents(_unknown(run), hashes))


def _unknown(run: Prepared) -> Contents:
    return {name: files for name, files in run.files.items() if name not in run.identity}


def merge_at_end(run: Prepared, *, console: Console | None = None) -> None:
    """Write the merged model beside the finished adapter, unless it exists. One process. Raises: MeshloraError: it
    could not be written, or computes something else than model and adapter."""
    output = Path(run.config.train.output)
    if _is_merged(output / MERGED):
        return
    if said := set_aside(output, run.steps, ends=(MERGED,)):
        (console or Console()).say(f"{MERGED} was not whole: {said}")
    base, trust = run.blueprint.stored_config, run.blueprint.options.trust_remote_code
    done = part("merging", "train.merge_at_end").merge(
        run.config.model.path, output / "adapter", output / MERGED, config=base, trust_remote_code=trust
    )
    changed = f"{done.num_changed} of {done.num_tensors} tensors changed"
    (console or Console()).say(f"merged: {output / MERGED} ({changed}; {done.check})")


def _is_merged(folder: Path) -> bool:
    """Whether `folder` holds a whole merged model. Its values were compared when it was written."""
    try:
        for file in weight_files(folder):
            with open_safetensors(file):
                pass
    except UserError:
        return False
    return (folder / "config.json").is_file()


def _check_merge(run: Prepared, adapter: Path) -> None:
    """Check on `adapter`, of the same tensors, that the finished one can be merged. Raises: UserError: it cannot."""
    base, trust = run.blueprint.stored_config, run.blueprint.options.trust_remote_code
    try:
        part("merging", "train.merge_at_end").check_merge(
            run.config.model.path, adapter, config=base, trust_remote_code=trust
        )
    except UserError as error:
        raise UserError("train.merge_at_end", f"it would fail at the end ({error})", "leave it out") from None


def introduce(run: Prepared, notes: list[str], reporter: Reporter, held_bytes: int) -> None:
    """Report what is trained and the starting point, before the first step. held_bytes: of weights on a rank."""
    for note in notes:
        reporter.say(note)
    for path in run.slow_paths:
        reporter.say(f"slow path: {path}")
    reporter.slow_paths = run.slow_paths
    data = f"{len(run.train_data):,} sequences"
    if (stream := stream_of(run.config)) is not None:
        data = f"rollouts as they come to {stream.folder}"
    reporter.say(
        f"{run.plan.model_type} on {run.topology}: {run.blueprint.trained.num_trainable:,} trainable parameters, "
        f"{data}, {run.steps:,} steps"
    )
    reporter.say(f"{run.blueprint.size}; weights take {held_bytes / 1e6:,.1f} MB of a rank's memory")
    for line in describe_adapter(run.blueprint.trained):
        reporter.say(line)
    if run.config.train.objective.needs_base:
        words = "the base, without an adapter"
        if (folder := run.config.reference) is not None:
            words = f"the adapter in {folder}" + ", from which the run starts" * (folder == run.config.adapter)
        reporter.say(f"reference: {words}")
    if run.answers is not None:
        reporter.say(run.answers.words)
    if (planned := reporter.planned) is not None:
        reporter.say(f"planned {planned.step_time_s:.3g} s a step ({planned.words})")
    if run.resume is not None:
        reporter.say(f"goes on after step {run.resume.step} of {run.resume.topology}: {run.resume.folder}")


def _forget_rollouts(run: Prepared, done: int) -> None:
    """Remove rollouts of steps after `done` that a run with other settings made: this one makes its own."""
    rl, stream = run.config.rl, stream_of(run.config)
    if rl is None or rl.is_folder or (run.resume is not None and run.resume.identity == run.identity):
        return
    assert stream is not None
    stream.forget_after(math.ceil(done / rl.updates) * rl.updates)  # of its last generation are all updates


def prepare_output(run: Prepared) -> list[str]:
    """Make the output folder, on rank 0. Removes an earlier run (`prepare` has checked `train.overwrite`), or if this
    one resumes, the results of later steps. Returns messages for the user."""
    output, done, said = Path(run.config.train.output), run.start_step, None
    output.mkdir(parents=True, exist_ok=True)
    if not run.resumes:
        for name in ("adapter", "checkpoints", MERGED, FOLDER):
            shutil.rmtree(output / name, ignore_errors=True)
    clear_leftovers(output)
    if run.is_finished:  # one of several adapters may have all its steps
        return []
    _forget_rollouts(run, done)
    if run.resumes:
        said = set_aside(output, done)
    if done:
        forget_after(output / SAMPLES, done)
    else:
        (output / SAMPLES).unlink(missing_ok=True)
        shutil.rmtree(output / "initial", ignore_errors=True)  # it is saved anew
    return [said] if said else []
