"""The command line: `meshlora train | verify | check | inspect | plan | calibrate | launch-script | evaluate | ...`.

Owns: arguments, and the edge where an error becomes one line and an exit code: 0 success, 1 failure, 2 a wrong
request. Does not own: the work itself; merge and export (`cli.adapter`), plan (`cli.plan`), calibrate
(`cli.calibrate`), launch-script (`cli.launch_script`), evaluate and generate (`cli.evaluate`), inspect (`cli.inspect`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without it a rank whose peers have ended prints forty lines of C++ addresses before the cause.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Only the process that downloads a name of the hub goes online (`common.hub`), as the user's own value lets it.
os.environ.setdefault("MESHLORA_HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", ""))
os.environ["HF_HUB_OFFLINE"] = "1"

from meshlora.cli.adapter import add_merge_and_export
from meshlora.cli.calibrate import add_calibrate
from meshlora.cli.evaluate import add_evaluate, add_local_rank, add_run_file, checked_place, run_file_words
from meshlora.cli.inspect import add_inspect, show_rows
from meshlora.cli.launch_script import add_launch_script
from meshlora.cli.plan import add_plan, hardware_of_run, planned_step
from meshlora.common.errors import MeshloraError, UserError, report
from meshlora.common.lifetime import end_with, import_libraries, note_interrupts
from meshlora.common.reading import path_argument

# Among words that are joined by NUL: not part of a command that a user would give.
_LOCAL_RANK = re.compile(r"\0--local[-_]rank[=\0][^\0]*")
# Metavars of arguments that are paths.
_PATHS = {"FILE", "FOLDER", "FOLDER|FILE", "auto|FOLDER", "PATH", "ADAPTER", "RUN", "RUN.yaml"}


class _Parser(argparse.ArgumentParser):
    """argparse with our error format and exit code 2; rejects strings that cannot be a path."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        if options.get("metavar") in _PATHS:
            options["type"] = path_argument
        return super().add_argument(*names, **options)

    def error(self, message: str) -> None:  # type: ignore[override]
        said = MeshloraError(f"{message}; see {self.prog} --help")  # escaped: it repeats the arguments
        print(f"error: {said}", file=sys.stderr)
        raise SystemExit(UserError.exit_code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    interrupts: list[int] = []
    if "MESHLORA_LAUNCHER" in os.environ:  # `train.edge` takes seconds to import
        end_with(int(os.environ["MESHLORA_LAUNCHER"]))
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun: its ranks would train on, unseen, after it was killed
        end_with(os.getppid())
    if arguments is None:  # the process is ours
        sys.excepthook = _say_fault
    try:
        note_interrupts(interrupts)
        options = _parser().parse_args(arguments)
        words = _LOCAL_RANK.sub("", "\0".join(["meshlora", *(sys.argv[1:] if arguments is None else arguments)]))
        options.words = shlex.join(words.split("\0"))
        _take_local_rank(options)
        _locate(options)
        run: Callable[[argparse.Namespace], None] = options.run
        run(options)
    except BaseException as error:
        # Libraries turn an interrupt into errors of their own.
        if interrupts or isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr, flush=True)
            return 130
        if not isinstance(error, MeshloraError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _take_local_rank(options: argparse.Namespace) -> None:
    """Read `--local-rank`, which launchers without LOCAL_RANK in the environment give to every process.

    Raises:
        UserError: the environment says otherwise.
    """
    if (given := options.local_rank) is None:
        return
    if os.environ.setdefault("LOCAL_RANK", str(given)) != str(given):
        raise UserError(f"--local-rank {given}", f"LOCAL_RANK is {os.environ['LOCAL_RANK']}", "leave it out")


def _locate(options: argparse.Namespace) -> None:
    """Replace names of the hub in `--model` and `--adapter` by their folders."""
    from meshlora.common.hub import located

    trust = getattr(options, "trust_remote_code", False)
    is_shape = options.command in ("plan", "export") or getattr(options, "twin", False)
    kinds: dict[str, Any] = {"model": "config" if is_shape else "model", "adapter": "adapter"}
    for name, kind in kinds.items():
        if given := getattr(options, name, None):
            setattr(options, name, located(given, f"--{name}", kind=kind, trust_remote_code=trust))


def _say_fault(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
    """Print an unexpected error with its traceback, escaped: it may contain a user's values."""
    print(report("".join(traceback.format_exception(error)).rstrip()), file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="meshlora", description="LoRA adapters on any mesh of processes.")
    add_local_rank(parser, default=None)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    train = commands.add_parser("train", help="train an adapter as a run file says")
    add_run_file(train)
    train.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
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
    add_local_rank(train)
    train.set_defaults(run=_train)

    _add_verify(commands)

    check = commands.add_parser("check", help="check a run file, its model and its data, without starting ranks")
    add_run_file(check)
    check.add_argument("--plot", metavar="FILE", help="draw the learning rate of every step into a .png, .svg or .html")
    check.add_argument("--prove", action="store_true", help="do the preflight now, as train does before its first step")
    check.set_defaults(run=_check)

    add_inspect(commands)
    add_plan(commands)
    add_calibrate(commands)
    add_launch_script(commands)
    add_evaluate(commands)
    add_merge_and_export(commands)

    plot = commands.add_parser("plot", help="draw loss, learning rate, gradient norm and speed of runs into one file")
    plot.add_argument("runs", nargs="+", metavar="RUN", help="output folder of a run, or its metrics.jsonl")
    plot.add_argument("--out", default="runs.png", metavar="FILE", help=".png, .svg, .pdf or .html (default runs.png)")
    plot.set_defaults(run=_plot)
    return parser


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="prove that a model, an adapter and a topology train as one process would",
        description="Compare training on each topology with transformers + peft on one process, tensor by tensor. "
        "Exit code 0: proved; 1: they differ; 2: the request is wrong, or refused.",
    )
    verify.add_argument("--model", metavar="FOLDER", help="checkpoint")
    verify.add_argument("--family", metavar="MODEL_TYPE", help="any model_type of transformers; needs no files")
    verify.add_argument("--twin", action="store_true", help="shrink the configuration; weights are not read")
    verify.add_argument(
        "--topology", action="append", metavar="T", help="as in dp=2,tp=2,sp; auto; may be repeated (default: tp=2,sp)"
    )
    verify.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="a field of the family's configuration, as in num_key_value_heads=2",
    )
    verify.add_argument("--lora", metavar="FILE", help="YAML with fields of peft.LoraConfig; default: r=8, all linears")
    verify.add_argument("--dtype", default="float64", help="float64 (default), float32 or bfloat16")
    verify.add_argument("--objective", default="sft", help="kind of train.objective (default sft)")
    verify.add_argument(
        "--packing",
        nargs="?",
        const=True,
        default=False,
        choices=[True, "auto"],
        metavar="auto",
        help="several sequences in one row, with auto those of a micro-batch, against one a row",
    )
    verify.add_argument("--images", action="store_true", help="some sequences have images: of --data, or random")
    verify.add_argument("--resume", action="store_true", help="our side is stopped, and goes on from its checkpoint")
    verify.add_argument("--recompute", action="store_true", help="train.recompute: full, against none")
    verify.add_argument("--quantization", metavar="KIND", help="of the frozen base: nf4, int8, mxfp4, fp8 or keep")
    verify.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps (default 3)")
    verify.add_argument("--micro-batch-size", type=int, default=2, metavar="N", help="sequences at once (default 2)")
    verify.add_argument("--adapters", type=int, default=1, metavar="N", help="also train so many at once")
    verify.add_argument("--data", metavar="FILE", help="take sequences from here; default: random tokens")
    verify.add_argument("--nproc", type=int, metavar="N", help="at most N processes; for auto: exactly (default 4)")
    verify.add_argument("--json", metavar="FILE", help="write the result, as docs/verify.md describes")
    verify.add_argument("--html", metavar="FILE", help="write a report to look at")
    verify.add_argument(
        "--mutation", action="append", default=[], metavar="NAME", help="put this fault in, or all; it must be caught"
    )
    verify.add_argument("--seed", type=int)
    verify.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    verify.add_argument("--trust-remote-code", action="store_true")
    verify.set_defaults(run=_verify)


def _train(options: argparse.Namespace) -> None:
    import_libraries()
    from meshlora.train.edge import rank_edge

    place = checked_place(options)
    if options.resume_despite and options.resume is None:
        raise UserError(
            f"--resume-despite {options.resume_despite[0]}", "it has no effect without --resume", "give both"
        )
    if options.stopped_exit_code not in {0, *range(3, 126)}:
        given, rule = f"--stopped-exit-code {options.stopped_exit_code}", "1 and 2 are failures, above 125 are signals"
        raise UserError(given, rule, "use one of 3 to 125, as in 85; or 0, as for a run that is done")
    if options.nproc is not None:
        _start_ranks(options)
        return
    with rank_edge(is_watched=True) as watch, contextlib.ExitStack() as held:
        is_done = _train_as_rank(options, place, watch, held)
    if not is_done and options.stopped_exit_code:  # out here: to the other ranks this one has ended well
        raise SystemExit(options.stopped_exit_code)


def _start_ranks(options: argparse.Namespace) -> None:
    """Check and prove the run of `--nproc N`, and start its ranks on this machine."""
    from meshlora.cli.elastic import fitted
    from meshlora.comm.groups import on_gpus
    from meshlora.config.file import read_runs
    from meshlora.train.launch import launch
    from meshlora.train.together import holding_outputs, prepare_runs
    from meshlora.verify.pool import stop_forking
    from meshlora.verify.preflight import preflight

    resume, despite = options.resume, options.resume_despite
    configs, _ = fitted(read_runs(options.file, options.overrides), world=options.nproc)
    on_gpus(next(iter(configs.values())).device, num_ranks=options.nproc)
    runs = prepare_runs(configs, world=options.nproc, resume=resume, despite=despite)
    with holding_outputs(runs, resume=resume, despite=despite) as runs:
        if _are_finished(runs):
            return
        if options.hardware:
            hardware_of_run(runs, options.hardware)  # before ranks are started: the file may be wrong
        preflight(runs, skip=options.no_preflight)
        stop_forking()
        words = ["train", *run_file_words(options)]
        words += ["--resume", resume] if resume is not None else []
        words += [word for name in despite for word in ("--resume-despite", name)]
        words += ["--hardware", options.hardware] if options.hardware else []
        timeout_s = max(config.train.timeout_s for config in configs.values())
        is_done = launch(words, nproc=options.nproc, command=options.words, timeout_s=timeout_s)
    if is_done is False and options.stopped_exit_code:
        raise SystemExit(options.stopped_exit_code)


def _train_as_rank(options: argparse.Namespace, place: Any, watch: Any, held: contextlib.ExitStack) -> bool:
    """Train as one rank of a launcher, or alone. Returns False if it was stopped. held: closes the locks of outputs."""
    from meshlora.cli.elastic import fitted
    from meshlora.comm.groups import join
    from meshlora.common.console import Console
    from meshlora.config.file import read_runs
    from meshlora.train.agreement import agreed
    from meshlora.train.edge import be_deterministic, how_to_go_on, launched_by_us, leave_result, log_to_file
    from meshlora.train.machines import machines, own_words
    from meshlora.train.run import train
    from meshlora.train.together import holding_outputs, logs_of, prepare_runs, words_of
    from meshlora.verify.pool import stop_forking
    from meshlora.verify.preflight import preflight

    is_main, world = place is None or place.rank == 0, place.world if place else 1

    def look() -> dict[str, Any]:
        configs, note = fitted(read_runs(options.file, options.overrides), world=world)
        runs = prepare_runs(configs, world=world, resume=options.resume, despite=options.resume_despite)
        runs = {name: dataclasses.replace(run, notes=(*note, *run.notes)) for name, run in runs.items()}
        if launched_by_us() or not is_main:
            return runs
        return held.enter_context(holding_outputs(runs, resume=options.resume, despite=options.resume_despite))

    runs = agreed(look, words_of, own=own_words())
    if _are_finished(runs, is_main=is_main):
        return True
    config = next(iter(runs.values())).config
    if config.train.deterministic:
        be_deterministic()
    if line := machines(config.device, watch):
        Console().say(line)
    planned = planned_step(runs, hardware_of_run(runs, options.hardware)) if options.hardware and is_main else None
    if not launched_by_us() and is_main:
        # Join first: ranks that wait for this one then notice if it ends here.
        join(config.device)
        preflight(runs, skip=options.no_preflight)
        stop_forking()
    if place is not None and place.rank > 0:
        log_to_file(logs_of(runs), place.rank, goes_on=any(run.resume is not None for run in runs.values()))
    go_on = how_to_go_on(options.words)
    is_done = train(runs, go_on=go_on, watch=watch, planned=planned, ends_if_stopped=True)
    if launched_by_us():  # which ends with the code itself
        leave_result(is_done)
        return True
    return is_done


def _are_finished(runs: Mapping[str, Any], *, is_main: bool = True) -> bool:
    """Whether all runs are complete; the main rank then reports each, and writes a merged model that is missing."""
    from meshlora.common.console import Console
    from meshlora.train.run import merge_at_end

    if not all(run.is_finished for run in runs.values()):
        return False
    for run in runs.values() if is_main else ():
        output = Path(run.config.train.output)
        Console().say(f"all {run.steps:,} steps are done: {output}/adapter")
        if run.config.train.merge_at_end:
            merge_at_end(run)
    return True


def _verify(options: argparse.Namespace) -> None:
    import_libraries()
    from meshlora.adapter.formats.peft_format import read_lora
    from meshlora.comm.launchers import launcher_place
    from meshlora.train.edge import rank_edge
    from meshlora.verify.command import verify
    from meshlora.verify.faults.objectives import as_proved
    from meshlora.verify.faults.registry import MUTATIONS
    from meshlora.verify.request import DEFAULT_LORA, DROPOUT, SEED, Request, same_fields

    place = launcher_place()
    if place is not None and place.world > 1:
        with rank_edge():
            raise UserError(
                f"meshlora verify as one of {place.world} ranks of a launcher",
                "it starts ranks of its own",
                "start it once, without torchrun or srun",
            )
    names = [name for each in options.mutation for name in (MUTATIONS if each == "all" else [each])]
    given = same_fields(Request, options) | {
        "topologies": tuple(options.topology or ["tp=2,sp"]),
        "overrides": _fields(options.overrides),
        "lora": read_lora(options.lora) if options.lora else dict(DEFAULT_LORA),
        "default_dropout": 0.0 if options.lora else DROPOUT,
        "objective": as_proved(options.objective),
        "seed": SEED if options.seed is None else options.seed,
        "mutations": tuple(dict.fromkeys(names)),
    }
    verify(Request(**given), command=options.words, json_file=options.json, html_file=options.html)


def _fields(overrides: Sequence[str]) -> dict[str, Any]:
    """Values of `KEY=VALUE`, parsed as YAML."""
    from meshlora.config.file import yaml_value

    fields = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            raise UserError(f"--set {override}", "it must read KEY=VALUE, as in --set num_key_value_heads=2")
        fields[name] = yaml_value(f"--set {override}", text)
    return fields


def _check(options: argparse.Namespace) -> None:
    import_libraries()
    from meshlora.common.console import Console
    from meshlora.config.file import read_runs
    from meshlora.train.optimizer import learning_rate
    from meshlora.train.together import prepare_runs
    from meshlora.train.watch.plot import plot_schedule
    from meshlora.verify.preflight import preflight, preflight_state

    runs = prepare_runs(read_runs(options.file, options.overrides))
    if options.plot and "" not in runs:
        raise UserError(f"--plot {options.plot}", "it draws the schedule of one adapter", "leave it out")
    console = Console()
    for name, run in runs.items():
        if name:
            console.say(f"adapter {name}", style="bold")
        show_rows(_rows_of(run), console)
        for note in run.notes:
            console.say(f"note: {note}")
    run = next(iter(runs.values()))
    if options.plot:
        train = run.config.train
        rates = [learning_rate(step, options=train, steps=run.steps) for step in range(run.steps)]
        plot_schedule(rates, Path(options.plot), title=f"{train.schedule}, {run.steps:,} steps")
        console.say(f"learning rate: {options.plot}")
    command = shlex.join(["meshlora", "train", *run_file_words(options), "--nproc", str(run.topology.world)])
    if options.prove:
        preflight(runs)
    console.say(preflight_state(runs))
    console.say(f"ready: {command}")


def _rows_of(run: Any) -> list[tuple[str, str]]:
    """The summary of a prepared run."""
    from meshlora.adapter.targets.resolve import describe_targets
    from meshlora.config.presets import resolved

    config, adapter = run.config, run.blueprint.trained
    return [
        *([(f"preset {config.preset}", resolved(config))] if config.preset is not None else []),
        ("model", f"{config.model.path} ({run.plan.model_type}, {run.plan.num_layers} layers)"),
        ("topology", f"{run.topology} ({run.topology.world} processes)"),
        ("adapter", "\n".join([f"{adapter.num_trainable:,} trainable parameters", *describe_targets(adapter.targets)])),
        ("train data", _size(run.train_data)),
        ("eval data", _size(run.eval_data)),
        ("steps", f"{run.steps:,} of {config.train.batch_size} sequences"),
        ("output", config.train.output),
    ]


def _plot(options: argparse.Namespace) -> None:
    from meshlora.common.console import Console
    from meshlora.train.watch.plot import plot_runs

    plot_runs([Path(run) for run in options.runs], Path(options.out))
    Console().say(f"drawn: {options.out}")


def _size(data: object) -> str:
    from meshlora.data import TokenizedDataset

    if not isinstance(data, TokenizedDataset):
        return "none"
    return f"{len(data):,} sequences, {len(data.input_ids):,} tokens, {data.num_trained_tokens:,} trained"
