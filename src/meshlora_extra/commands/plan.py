"""The command that plans a run before any GPU is used: `meshlora plan`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import read_blueprint
from meshlora_ground.errors import MeshloraError, UnsupportedError, UserError
from meshlora_ground.lifetime import import_libraries

# Topologies that are shown unless all are asked for.
_SHOWN = 5
# What has to be said to choose a topology: option -> what it is, and an example.
_ASKED = {
    "gpus": ("how many", "--gpus 8"),
    "gpu": ("of which kind", "--gpu h100"),
    "seq": ("tokens of a row", "--seq 4096"),
}


def add(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="which topology is best on so many GPUs, what one card can do, how a model is split",
        description="With --topology alone: how each linear is split. With --gpus and --gpu: memory, messages and time "
        "of every topology that is proved for the family, with the base whole on each dp rank and sharded over them "
        "(dp_shard), the best first. With --one-gpu: whether one card is enough.",
    )
    option = plan.add_argument
    option(
        "--model", required=True, metavar="FOLDER|FILE", help="checkpoint, of which config.json is read, or such a file"
    )
    option("--topology", action="append", default=[], metavar="T", help="as in dp=2,tp=2,sp; with --gpus only this one")
    option("--gradients", action="store_true", help="also the axes over which each factor's gradient is summed")
    option("--gpus", type=int, metavar="N", help="how many there are")
    option("--gpu", metavar="NAME", help="of which kind, as in rtx4090 or h100")
    option(
        "--one-gpu",
        metavar="NAME",
        help="does it fit on one of these, and what must be given up: the first way that does",
    )
    option("--hardware", metavar="FILE", help="JSON with measured numbers in the place of the datasheet's")
    option("--seq", type=int, metavar="N", help="tokens of a sequence (with --one-gpu: 1024)")
    option("--global-batch", type=int, metavar="N", help="sequences of a step (default: one a GPU)")
    option("--micro-batch", type=int, metavar="N", help="sequences at once (default: what is fastest)")
    option("--recompute", metavar="R", help="none, full, offload or n (default: the fastest of the others)")
    option("--optimizer", default="adamw", choices=["adamw", "adamw_8bit", "lora_fa"], help="as train.optimizer")
    option("--lora", metavar="FILE", help="YAML with fields of peft.LoraConfig; default: r=16, all-linear")
    option("--dtype", default="auto", help="of the base; default: what the configuration says")
    option("--quantization", metavar="KIND", help="of the frozen base: nf4, int8, mxfp4, nvfp4, fp8 or keep")
    option("--compute", metavar="KIND", help="products of the frozen base: fp8 or fp8_backward")
    option("--all", action="store_true", help="every topology, and why others cannot be (default: the best 5)")
    option("--simulate", action="store_true", help="run a step of the best on ranks that do not exist")
    option("--json", metavar="FILE", help="write all numbers")
    option("--out", metavar="RUN.yaml", help="write the run file of the best")
    option("--data", default="train.jsonl", metavar="FILE", help="training data, for --out")
    option("--trust-remote-code", action="store_true")
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> None:
    import_libraries()
    if options.one_gpu is not None:
        _fit_on_one(options)
        return
    if options.gpus is not None or options.gpu is not None:
        _choose(options)
        return
    planned = ("hardware", "seq", "global_batch", "micro_batch", "recompute", "lora", "quantization", "compute")
    for name in (*planned, "all", "simulate", "json", "out"):
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')}", "it has no effect without --gpus", "give --gpus and --gpu")
    if not options.topology:
        raise UserError("meshlora plan", "--topology is required, or --gpus and --gpu", "as in --topology dp=2,tp=2,sp")
    from meshlora.plan.table import gradient_table, notes_of_whole, plan_table
    from meshlora_ground.console import Console

    console = Console()
    for topology in options.topology:
        plan = read_blueprint(options, topology).plan
        console.print(plan_table(plan))
        for note in notes_of_whole(plan):
            console.say(f"note: {note}")
        if options.gradients:
            console.print(gradient_table(plan))


def _choose(options: argparse.Namespace) -> None:
    _check_asked(options)
    from meshlora.plan.table import gradient_table, notes_of_whole
    from meshlora_extra.planner import show
    from meshlora_extra.planner.choose import choose
    from meshlora_extra.planner.hardware import hardware_named
    from meshlora_extra.planner.problem import read_config
    from meshlora_ground.console import Console
    from meshlora_ground.files import write_text_atomically
    from meshlora_ground.topology import Topology

    gpu = hardware_named(options.gpu, options.hardware)
    config = read_config(options.model, trust_remote_code=options.trust_remote_code)
    problem = _problem(options, config, gpu, num_gpus=options.gpus, usual_batch=options.gpus)
    topologies = [Topology.parse(text, world=options.gpus) for text in options.topology]
    choice = choose(problem, topologies)  # none given: all
    best = choice.ranked[0]
    console = Console()
    shown = choice
    if not (options.all or topologies):  # those that were asked for are all of interest
        shown = show.first_of(choice, _SHOWN)
    console.print(show.ranking(problem, shown))
    console.print(show.breakdown(problem, best))
    for line in (*show.why_best(choice), *show.why_not(shown)):
        console.say(line)
    if shown is not choice and (line := show.not_shown(choice, _SHOWN)):
        console.say(line)
    console.say(show.assumptions(problem))
    for note in notes_of_whole(problem.blueprint.on(best.topology).plan):
        console.say(f"note: {note}")
    if not best.fits:  # shown all the same, for what comes nearest
        way_out = "use more GPUs, or shorter sequences"
        raise MeshloraError(f"no topology fits: {best.topology} comes nearest, {best.missing}; {way_out}")
    if options.gradients:
        console.print(gradient_table(problem.small.on(best.topology, has_stages=False).plan))
    found = show.as_json(problem, choice)
    if options.simulate:
        found["simulation"] = _simulate(console, problem, best)
    if options.json:
        write_text_atomically(Path(options.json), json.dumps(found, indent=1) + "\n")
    if options.out:
        _write_run_file(options, problem, best, console)


def _problem(options: argparse.Namespace, config: Any, gpu: Any, *, num_gpus: int, usual_batch: int) -> Any:
    """The `Problem` of what is asked. usual_batch: sequences of a step where their number is not said."""
    from meshlora_extra.planner.problem import Problem

    return Problem(
        read_blueprint(options, "", config=config),
        _lora(options.lora),
        gpus=num_gpus,
        gpu=gpu,
        seq=options.seq,
        global_batch=usual_batch if options.global_batch is None else options.global_batch,
        micro_batch=options.micro_batch,
        recompute=_recompute(options.recompute),
        optimizer=options.optimizer,
    )


def _write_run_file(options: argparse.Namespace, problem: Any, prediction: Any, console: Any) -> None:
    from meshlora_extra.planner import show
    from meshlora_ground.files import write_text_atomically

    model, output = _shown_model(Path(options.model)), f"runs/{Path(options.out).stem}"
    text = show.run_file(problem, prediction, model=model, data=options.data, output=output)
    write_text_atomically(Path(options.out), text)
    console.say(f"written: {options.out}")


def _check_asked(options: argparse.Namespace) -> None:
    """Raises: UserError: something is missing, each with its own example."""
    missing = []
    for name in _ASKED:
        is_told = name == "gpu" and options.hardware  # a file alone may say all of it
        if getattr(options, name) is None and not is_told:
            missing.append(name)
    if not missing:
        return
    verb = "is" if len(missing) == 1 else "are"
    rule = " and ".join(f"--{name} ({_ASKED[name][0]})" for name in missing) + f" {verb} required, too"
    way_out = "as in " + " ".join(_ASKED[name][1] for name in missing)
    if "gpu" in missing:
        from meshlora_extra.planner.hardware import cards_in_words

        way_out += f"; known: {cards_in_words()}; others by --hardware FILE, which meshlora calibrate writes"
    raise UserError("meshlora plan with --gpus, --gpu", rule, way_out)


def _fit_on_one(options: argparse.Namespace) -> None:
    """Say the first way in which the model can be trained on one card. Raises: MeshloraError: there is none."""
    from meshlora_extra.planner import one_gpu, show
    from meshlora_extra.planner.hardware import hardware_named
    from meshlora_extra.planner.problem import read_config
    from meshlora_ground.console import Console
    from meshlora_ground.files import write_text_atomically

    for name in ("gpus", "gpu", "recompute", "topology", "simulate", "gradients", "all"):
        if getattr(options, name):
            way_out = f"leave it out, or plan with --gpus 1 --gpu {options.one_gpu}"
            raise UserError(
                f"--{name} with --one-gpu", "one card has one topology, and what it must give up is asked", way_out
            )
    gpu = hardware_named(options.one_gpu, options.hardware, option="--one-gpu")
    config = read_config(options.model, trust_remote_code=options.trust_remote_code)
    problem_of = _on_one(options, config, gpu)
    dtype = str(read_blueprint(options, "", config=config).dtype).removeprefix("torch.")
    seq = _row_on_one(options, config)
    ladder = one_gpu.ways(dtype, options.quantization, seq, options.micro_batch or one_gpu.MICRO_BATCH)
    rungs = one_gpu.climb(ladder, problem_of)
    console, best = Console(), rungs[-1]
    batch = options.global_batch or one_gpu.BATCH
    console.say(
        f"{config.model_type} on one {gpu.name}, {gpu.usable_bytes / 1e9:.1f} of whose {gpu.memory_gb:g} GB tensors "
        f"may take: {batch:,} rows of {seq:,} tokens a step, the base in {dtype}"
    )
    console.print(one_gpu.table(rungs))
    if options.json:
        write_text_atomically(Path(options.json), json.dumps(one_gpu.as_json(rungs), indent=1) + "\n")
    if best.problem is None or best.prediction is None or not best.fits:
        raise MeshloraError(_more_cards(one_gpu.cards_needed(problem_of(_whole_rows(rungs))), gpu.name))
    console.say(show.assumptions(best.problem))
    console.say(
        "so: meshlora train RUN.yaml "
        + " ".join(f"--set {each}" for each in (*best.way.settings(), f"train.batch_size={batch}"))
    )
    if options.out:
        _write_run_file(options, best.problem, best.prediction, console)


def _row_on_one(options: argparse.Namespace, config: Any) -> int:
    """Tokens of a row: as asked, or as a run file has it, at most what the model can see."""
    from meshlora.loading.positions import most_positions
    from meshlora_extra.planner.one_gpu import SEQ

    if options.seq is not None:
        return int(options.seq)
    return min(SEQ, most_positions(config) or SEQ)


def _on_one(options: argparse.Namespace, config: Any, gpu: Any) -> Any:
    """A function: way -> its `Problem` on one `gpu`."""
    from meshlora_extra.planner.one_gpu import BATCH

    def problem_of(way: Any) -> Any:
        asked = argparse.Namespace(**{**vars(options), **vars(way)})  # which has options of the plan
        return _problem(asked, config, gpu, num_gpus=1, usual_batch=BATCH)

    return problem_of


def _whole_rows(rungs: Any) -> Any:
    """The way that gives up no data and no bits, on more cards."""
    import dataclasses

    return dataclasses.replace(rungs[0].way, dtype=rungs[-1].way.dtype)


def _more_cards(found: Any, name: str) -> str:
    """What to do where no way fits."""
    if found is None:
        return f"no way fits on one {name}, nor is there a number of them, up to 64, that was found to have room"
    number, needs = found.topology.world, f"{found.memory_bytes / 1e9:,.1f} GB each"
    return (
        f"no way fits on one {name}; {number} of them have room, with whole rows and the base in full: "
        f"{found.topology}, {needs}; see --gpus {number} --gpu {name}"
    )


def _shown_model(folder: Path) -> str:
    """The model as a run file names it."""
    from meshlora_ground.weight_files import repository_of

    if repository := repository_of(folder):
        return repository.name
    if folder.is_dir():
        return str(folder)
    if folder.name == "config.json":
        return str(folder.parent)
    return folder.stem


def _simulate(console: Any, problem: Any, best: Any) -> dict[str, Any]:
    """Simulate a step of `best` and print it. Raises: MeshloraError: it differs from the prediction."""
    from meshlora_extra.planner import show
    from meshlora_extra.planner.simulate import simulate

    simulation = simulate(problem, best)
    console.print(show.simulated(simulation))
    differences = list(simulation.differences())
    if differences:
        raise MeshloraError("the simulated step is not as predicted: " + "; ".join(differences))
    console.say(
        f"as predicted: shapes, numbers and bytes of collectives, states; the peak within 5 % "
        f"({simulation.time_s:.1f} s, {simulation.host_bytes / 1e9:.2f} GB of this process)"
    )
    return {
        name: {"predicted": predicted, "seen": seen} for name, (predicted, seen) in simulation.fullest.bytes.items()
    }


def _lora(file: str | None) -> Any:
    from meshlora.adapter.formats.peft_format import lora_config
    from meshlora.run.config.file import read_lora

    values: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    if file:
        values = read_lora(file)
    return lora_config(values, "--lora", unknown_is_error=True)


def _recompute(text: str | None) -> str | int | None:
    if text is None or text in ("none", "full", "offload"):
        return text
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"--recompute {text}", "it must be none, full, offload or a number n, for every n-th layer")
    return int(text)


def hardware_of_run(runs: Mapping[str, Any], file: str) -> Any:
    """The `Hardware` of `file`. Raises: UserError: the file is wrong, or of another type of device than the runs."""
    from meshlora.comm.groups import on_gpus
    from meshlora_extra.planner.hardware import hardware_named

    gpu = hardware_named(None, file)
    device = "cpu"
    if on_gpus(next(iter(runs.values())).config.device, num_ranks=1):
        device = "cuda"
    if gpu.device != device:
        raise UserError(f"--hardware {file}", f"it is of {gpu.device}, and this run is on {device}", "calibrate here")
    return gpu


def planned_step(runs: Mapping[str, Any], gpu: Any) -> Any:
    """The `Planned` of a run, to show beside what is seen; None, with the reason said, where it cannot be planned.

    Rows are as long as the longest of a micro-batch is on average, taken in the order of the data; where its sequences
    are joined to one row, as long as they are themselves.
    """
    from meshlora.plan.pairs import check
    from meshlora.run.watch.metrics import Planned
    from meshlora_extra.planner.choose import choose
    from meshlora_extra.planner.problem import problem_of_run
    from meshlora_ground.console import Console

    run = next(iter(runs.values()))
    data, train, topology = run.config.data, run.config.train, run.topology
    # Of the sequences, in tokens.
    lengths, rows = run.train_data.offsets[1:] - run.train_data.offsets[:-1], train.micro_batch_size
    of_rows = lengths
    if data.packing != "auto":
        of_rows = [int(lengths[first : first + rows].max()) for first in range(0, len(lengths), rows)]
    try:
        if len(lengths) == 0:
            raise UnsupportedError("this run", "plans are of data that are known beforehand")
        check({**run.asked, "adapters": len(runs), "door": "meshlora plan"})
        seq = round(sum(of_rows) / len(of_rows))
        if data.packing is True:  # rows are full
            seq = data.longest
        problem = problem_of_run(run.config, run.blueprint, gpus=topology.world, gpu=gpu, seq=seq)
        best = choose(problem, [topology]).ranked[0]
    except UserError as error:
        Console().say(f"not planned: {error}")
        return None
    words = f"rows of {problem.seq:,} tokens on {topology.world} x {gpu.name}"
    if gpu.ranks not in (0, topology.world):  # fewer at once have more of the memory's bandwidth each
        words += f", where {gpu.ranks} ranks were measured"
    return Planned(best.time_s, words, best.parts_s)
