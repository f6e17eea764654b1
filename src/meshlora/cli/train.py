"""`meshlora train`: start the ranks of a run, or be one of them.

Owns: its arguments, who checks and proves a run before its first step, and its exit code. Does not own: the checks
(`run.prepare`), the proof (`verify.preflight`), the training (`run.run`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import (
    add_json,
    add_local_rank,
    add_ranks_per_gpu,
    add_run_file,
    check_json,
    checked_place,
    run_file_words,
    write_result,
)
from meshlora.run.extras import part
from meshlora_ground.errors import UserError
from meshlora_ground.lifetime import import_libraries


def add(commands: Any) -> None:
    """Register the command."""
    add_training(commands.add_parser("train", help="train an adapter as a run file says"), command="train")


def add_training(train: argparse.ArgumentParser, *, command: str) -> None:
    """Add the arguments of a command that trains."""
    add_run_file(train)
    train.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    add_ranks_per_gpu(train)
    train.add_argument(
        "--no-preflight",
        action="store_true",
        help="train without a proof that this model, adapter and topology train as one process would; only families "
        "that are proved for everyone are then accepted",
    )
    train.add_argument(
        "--resume", metavar="auto|FOLDER", help="go on from this checkpoint; auto: from the last whole one, if any"
    )
    train.add_argument(
        "--resume-despite",
        action="append",
        default=[],
        metavar="NAME",
        help="what may differ from it, as in data",
    )
    train.add_argument(
        "--stopped-exit-code",
        type=int,
        default=0,
        metavar="N",
        help="exit code of a run that was asked to stop before its last step, for a scheduler to tell (default 0)",
    )
    train.add_argument(
        "--hardware", metavar="FILE", help="of meshlora calibrate: show the planned time of a step beside the seen one"
    )
    train.add_argument("--watch", action="store_true", help="show the run on a page of this machine, as it goes")
    add_json(train)
    add_local_rank(train)
    train.set_defaults(run=_train, command=command)


def _train(options: argparse.Namespace) -> None:
    import_libraries()
    from meshlora.run.edge import rank_edge

    place = checked_place(options)
    if options.resume_despite and options.resume is None:
        raise UserError(
            f"--resume-despite {options.resume_despite[0]}", "it has no effect without --resume", "give both"
        )
    if options.stopped_exit_code not in {0, *range(3, 126)}:
        given, rule = f"--stopped-exit-code {options.stopped_exit_code}", "1 and 2 are failures, above 125 are signals"
        raise UserError(given, rule, "use one of 3 to 125, as in 85; or 0, as for a run that is done")
    check_json(options)
    _check_sharing(options)
    if options.nproc is not None:
        is_done = start(options)
    else:
        with rank_edge(is_watched=True) as watch, contextlib.ExitStack() as held:
            is_done = _train_as_rank(options, place, watch, held)
    if not is_done and options.stopped_exit_code:  # out here: to the other ranks this one has ended well
        raise SystemExit(options.stopped_exit_code)


def _check_sharing(options: argparse.Namespace) -> None:
    """Refuse a `--ranks-per-gpu` that could not be followed, whatever the machine has. Raises: UserError."""
    shares = options.ranks_per_gpu
    if shares == 1:
        return
    if options.nproc is None:
        rule = "ranks share GPUs only where this command starts them, on one machine"
        raise UserError(f"--ranks-per-gpu {shares}", rule, "give --nproc N, without another launcher")
    if options.hardware:
        rule = "a planned step is one of ranks with GPUs of their own"
        raise UserError(f"--ranks-per-gpu {shares} with --hardware", rule, "leave out one of them")


def start(options: argparse.Namespace) -> bool:
    """Check and prove the run of `--nproc N`, and start its ranks on this machine. Returns False if it was stopped.

    options: of this command.
    """
    from meshlora.comm.groups import on_gpus
    from meshlora.run.config.file import read_runs
    from meshlora.run.launch import launch
    from meshlora.run.together import holding_outputs, prepare_runs
    from meshlora.verify.pool import stop_forking
    from meshlora.verify.preflight import preflight

    resume, despite = options.resume, options.resume_despite
    configs, _ = _fitted(read_runs(options.file, options.overrides), world=options.nproc)
    shares = options.ranks_per_gpu
    device = next(iter(configs.values())).device
    takes_gpus = on_gpus(device, num_ranks=options.nproc, ranks_per_gpu=shares)
    _check_command(configs, options.command)
    runs = prepare_runs(configs, world=options.nproc, resume=resume, despite=despite)
    if options.command == "rl":
        rollouts = part("rollouts", "rl")
        rollouts.check_rewards(runs[""], rollouts.check_rl(runs[""]))
    with holding_outputs(runs, resume=resume, despite=despite) as runs:
        if _are_finished(runs):
            _write(options, runs, is_done=True)
            return True
        if options.hardware:
            part("plan", "--hardware").hardware_of_run(
                runs, options.hardware
            )  # before ranks are started: the file may be wrong
        preflight(runs, skip=options.no_preflight, ranks_per_gpu=shares)
        stop_forking()
        words = [options.command, *run_file_words(options)]
        words += ["--resume", resume] if resume is not None else []
        words += [word for name in despite for word in ("--resume-despite", name)]
        words += ["--hardware", options.hardware] if options.hardware else []
        words += ["--no-preflight"] if options.no_preflight else []  # for what the adapter's card says
        timeout_s = max(config.train.timeout_s for config in configs.values())
        with _watched(runs, options):
            said = launch(
                words,
                nproc=options.nproc,
                on_gpus=takes_gpus,
                ranks_per_gpu=shares,
                command=options.words,
                timeout_s=timeout_s,
            )
        is_done = said is not False
        _write(options, runs, is_done=is_done)
    return is_done


def _train_as_rank(options: argparse.Namespace, place: Any, watch: Any, held: contextlib.ExitStack) -> bool:
    """Train as one rank of a launcher, or alone. Returns False if it was stopped. held: closes the locks of outputs."""
    from meshlora.comm.groups import join
    from meshlora.run.agreement import agreed, one_day
    from meshlora.run.config.file import read_runs
    from meshlora.run.edge import be_deterministic, how_to_go_on, launched_by_us, leave_result, log_to_file
    from meshlora.run.machines import machines, own_words
    from meshlora.run.run import train
    from meshlora.run.together import holding_outputs, logs_of, prepare_runs, words_of
    from meshlora.verify.pool import stop_forking
    from meshlora.verify.preflight import preflight
    from meshlora_ground.console import Console

    is_main, world, day = place is None or place.rank == 0, place.world if place else 1, one_day()

    def look() -> dict[str, Any]:
        configs, note = _fitted(read_runs(options.file, options.overrides), world=world)
        _check_command(configs, options.command)
        runs = prepare_runs(configs, world=world, resume=options.resume, despite=options.resume_despite, day=day)
        shares = place.ranks_per_gpu if place else 1
        runs = {name: _described(run, note, options, ranks_per_gpu=shares) for name, run in runs.items()}
        if launched_by_us() or not is_main:
            return runs
        return held.enter_context(holding_outputs(runs, resume=options.resume, despite=options.resume_despite))

    runs = agreed(look, words_of, own=own_words())
    if _are_finished(runs, is_main=is_main):
        _write(options, runs if is_main else {}, is_done=True)
        return True
    config = next(iter(runs.values())).config
    if config.train.deterministic:
        be_deterministic()
    # Before this process opens its GPU: templates of prompts are rendered in a fork of it.
    rollouts = part("rollouts", "rl") if options.command == "rl" else None
    prompts = rollouts.check_rl(runs[""], say=Console().say if is_main else None) if rollouts is not None else None
    if line := machines(config.device, watch):
        Console().say(line)
    planned = None
    if options.hardware and is_main:
        plan = part("plan", "--hardware")
        planned = plan.planned_step(runs, plan.hardware_of_run(runs, options.hardware))
    if not launched_by_us() and is_main:
        if place is not None:  # join first: ranks that wait for this one then notice if it ends here
            join(config.device)
        preflight(runs, skip=options.no_preflight)
        stop_forking()
    if place is not None and place.rank > 0:
        log_to_file(logs_of(runs), place.rank, goes_on=any(run.resume is not None for run in runs.values()))
    makes = None
    if rollouts is not None:
        makes = rollouts.making(runs[""], prompts)
        if is_main:
            rollouts.check_rewards(runs[""], prompts if not launched_by_us() else None)
            rollouts.describe(runs[""], prompts, Console())
    go_on = how_to_go_on(options.words)
    with _watched(runs, options) if is_main and not launched_by_us() else contextlib.nullcontext():
        is_done = train(runs, go_on=go_on, watch=watch, planned=planned, making=makes, ends_if_stopped=True)
    if launched_by_us():  # which ends with the code itself
        leave_result(is_done)
        return True
    _write(options, runs if is_main else {}, is_done=is_done)
    return is_done


def _fitted(configs: dict[str, Any], *, world: int) -> tuple[dict[str, Any], Sequence[str]]:
    """(`configs` on a topology of `world` processes, notes that say so), where `train.on_fewer` asks for it."""
    if next(iter(configs.values())).train.on_fewer == "stop":
        return configs, ()
    fitted: tuple[dict[str, Any], Sequence[str]] = part("elastic", "train.on_fewer").fitted(configs, world=world)
    return fitted


def _check_command(configs: Mapping[str, Any], command: str) -> None:
    """Refuse a run file that is not for this command. Raises: UserError."""
    for config in configs.values():
        if command == "rl" and config.rl is None:
            raise UserError("this run file", "it has no group rl", "meshlora train runs it")
        if command != "rl" and config.rl is not None:
            raise UserError("rl", "only meshlora rl makes rollouts", "use that, or leave it out")


@contextlib.contextmanager
def _watched(runs: Mapping[str, Any], options: argparse.Namespace) -> Iterator[None]:
    """With `--watch`, a page shows the run during the block, and the others beside it."""
    if not options.watch:
        yield
        return
    from meshlora_ground.console import Console

    output = Path(next(iter(runs.values())).config.train.output).absolute()
    with part("page", "--watch").serving(output.parent, first=output.name) as url:
        Console().say(f"watch it: {url}   (on this machine, while the run lasts; whoever has the address may look)")
        yield


def _write(options: argparse.Namespace, runs: Mapping[str, Any], *, is_done: bool) -> None:
    """Write the result of `--json`. runs: of the main rank; empty on others, which write nothing."""
    from meshlora.run.watch.metrics import last_values

    outputs = {name: Path(run.config.train.output) for name, run in runs.items()}
    found = {
        name: {
            "output": f"{output}",
            "adapter": f"{output / 'adapter'}" if is_done else None,
            "num_steps": runs[name].steps,
            **last_values(output / "metrics.jsonl"),
        }
        for name, output in outputs.items()
    }
    if found:
        write_result(options, {"is_done": is_done, "runs": found})


def _described(run: Any, note: Sequence[str], options: argparse.Namespace, *, ranks_per_gpu: int) -> Any:
    """`run` with its command, what is proved of it, and a further note."""
    from meshlora.run.edge import command_of, whole_command
    from meshlora.verify.preflight import proof_words

    proof = proof_words(run, skip=options.no_preflight, ranks_per_gpu=ranks_per_gpu)
    command = whole_command(command_of(options.words))
    return dataclasses.replace(run, notes=(*note, *run.notes), command=command, proof=proof)


def _are_finished(runs: Mapping[str, Any], *, is_main: bool = True) -> bool:
    """Whether all runs are complete; the main rank then reports each, and writes a merged model that is missing."""
    from meshlora.run.checkpoint.manifest import read_manifest
    from meshlora.run.run import merge_at_end
    from meshlora_ground.console import Console

    if not all(run.is_finished for run in runs.values()):
        return False
    for run in runs.values() if is_main else ():
        output = Path(run.config.train.output)
        done = read_manifest(output / "adapter", kinds=("adapter",)).step
        words = f"all {run.steps:,} steps are done" if done == run.steps else f"stopped early, after {done:,} steps"
        Console().say(f"{words}: {output}/adapter")
        if run.config.train.merge_at_end:
            merge_at_end(run)
    return True
