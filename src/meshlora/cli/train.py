"""`meshlora train`: start the ranks of a run, or be one of them.

Owns: its arguments and its exit code. Does not own: what it does (`cli.job`).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from meshlora.cli.arguments import add_json, add_local_rank, add_ranks_per_gpu, add_run_file, check_json, checked_place
from meshlora_ground.errors import UserError
from meshlora_ground.lifetime import import_libraries

if TYPE_CHECKING:
    from meshlora.cli.job import Job
    from meshlora.processes.launchers import Place


def add(commands: Any) -> None:
    add_training(commands.add_parser("train", help="train an adapter as a run file says"), command="train")


def add_training(train: argparse.ArgumentParser, *, command: str) -> None:
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
        "--resume-despite", action="append", default=[], metavar="NAME", help="what may differ from it, as in data"
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
    place = checked_place(options)
    if options.resume_despite and options.resume is None:
        way_out = "give both"
        raise UserError(f"--resume-despite {options.resume_despite[0]}", "it has no effect without --resume", way_out)
    if options.stopped_exit_code not in {0, *range(3, 126)}:
        given, rule = f"--stopped-exit-code {options.stopped_exit_code}", "1 and 2 are failures, above 125 are signals"
        raise UserError(given, rule, "use one of 3 to 125, as in 85; or 0, as for a run that is done")
    check_json(options)
    _check_sharing(options)
    from meshlora.run.edge import rank_edge

    if options.nproc is not None:
        is_done = start(options)
    else:
        with rank_edge(is_watched=True) as watch:
            is_done = job_of(options, place).run(watch)
    if not is_done and options.stopped_exit_code:  # out here: to the other ranks this one has ended well
        raise SystemExit(options.stopped_exit_code)


def start(options: argparse.Namespace) -> bool:
    """Check and prove the run of `--nproc N`, and start its ranks on this machine. Returns False if it was stopped."""
    return job_of(options).run()


def job_of(options: argparse.Namespace, place: Place | None = None) -> Job:
    """The job that the arguments ask for. place: this process', under a launcher."""
    from meshlora.cli.job import Job  # takes seconds to import
    from meshlora.verify.options import same_fields

    given = same_fields(Job, options) | {"place": place, "has_page": options.watch}
    if place is not None:
        given["ranks_per_gpu"] = place.ranks_per_gpu
    return Job(**given)


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
