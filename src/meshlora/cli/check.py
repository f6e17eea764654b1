"""`meshlora check`: everything that can be known of a run before it starts, and its summary."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from meshlora.cli import arguments
from meshlora_ground.errors import UserError
from meshlora_ground.lifetime import import_libraries


def add(commands: Any) -> None:
    check = commands.add_parser("check", help="check a run file, its model and its data, without starting ranks")
    arguments.add_run_file(check)
    check.add_argument("--plot", metavar="FILE", help="draw the learning rate of every step into a .png, .svg or .html")
    check.add_argument("--prove", action="store_true", help="do the preflight now, as train does before its first step")
    arguments.add_ranks_per_gpu(check)
    arguments.add_json(check)
    check.set_defaults(run=_check)


def _ranks_here(configs: Mapping[str, Any], ranks_per_gpu: int) -> int:
    """How many ranks share the GPUs of this machine."""
    import torch

    from meshlora_ground.topology import Topology

    world = Topology.parse(next(iter(configs.values())).topology).world
    return min(world, max(1, torch.cuda.device_count()) * ranks_per_gpu)


def _check(options: argparse.Namespace) -> None:
    import_libraries()
    from meshlora.comm.groups import on_gpus
    from meshlora.run.config.file import given_keys, read_runs
    from meshlora.run.extras import part
    from meshlora.run.learning_rate import learning_rate
    from meshlora.run.mistakes import all_at_once
    from meshlora.run.together import prepare_runs
    from meshlora.verify.preflight import preflight, preflight_state
    from meshlora_ground.console import Console

    arguments.check_json(options)
    shares = options.ranks_per_gpu
    if shares != 1 and not options.prove:
        raise UserError(f"--ranks-per-gpu {shares}", "it has no effect without --prove", "give both")
    with all_at_once(options.file, options.overrides):
        configs = read_runs(options.file, options.overrides)
        runs = prepare_runs(configs, world=None if shares == 1 else _ranks_here(configs, shares))
    if shares != 1:
        config = next(iter(runs.values())).config
        on_gpus(config.device, num_ranks=1, ranks_per_gpu=shares)
        if config.preflight in ("cpu", "off"):
            rule = f"with preflight: {config.preflight} no proof is on GPUs"
            raise UserError(f"--ranks-per-gpu {shares}", rule, "leave out one of them")
    if options.plot and "" not in runs:
        raise UserError(f"--plot {options.plot}", "it draws the schedule of one adapter", "leave it out")
    console = Console()
    given = given_keys(options.file, options.overrides)
    for name, run in runs.items():
        if name:
            console.say(f"adapter {name}", style="bold")
        console.show_rows(_rows_of(run, given[name]))
        for note in run.notes:
            console.say(f"note: {note}")
        for path in run.slow_paths:
            console.say(f"slow path: {path}")
    run, command_name = next(iter(runs.values())), "train"
    if run.config.rl is not None:
        rollouts, command_name = part("rollouts", "rl"), "rl"
        prompts = rollouts.check_rl(run, say=console.say)
        rollouts.check_rewards(run, prompts)
        rollouts.describe(run, prompts, console)
    if options.plot:
        train = run.config.train
        rates = [learning_rate(step, options=train, steps=run.steps) for step in range(run.steps)]
        part("plot", "--plot").plot_schedule(rates, Path(options.plot), title=f"{train.schedule}, {run.steps:,} steps")
        console.say(f"learning rate: {options.plot}")
    words = arguments.run_file_words(options.file, options.overrides)
    words += ["--nproc", str(run.topology.world), *arguments.ranks_per_gpu_words(options)]
    command = shlex.join(["meshlora", command_name, *words])
    if options.prove:
        preflight(runs, ranks_per_gpu=shares)
    state = preflight_state(runs, ranks_per_gpu=shares)
    console.say(state)
    console.say(f"ready: {command}")
    found = {name: _result(run) for name, run in runs.items()}
    arguments.write_result(options.json, {"runs": found, "preflight": state, "command": command})


def _rows_of(run: Any, given: Collection[str]) -> list[tuple[str, str]]:
    """Name and value of each line. given: keys that the run file has values for."""
    from meshlora.adapter.description import describe_adapter
    from meshlora.run.config.presets import resolved
    from meshlora.run.in_words import batch_in_words, defaults_in_words, rates_in_words, scale_in_words

    config, adapter = run.config, run.blueprint.trained
    rows = []
    if config.preset is not None:
        rows.append(("preset", f"{config.preset}\n{resolved(config)}"))
    train_data = "rollouts, a file a step" if config.is_stream else _size(run.train_data)
    rows += [
        ("model", f"{config.model.path} ({run.plan.model_type}, {run.plan.num_layers} layers)"),
        ("topology", f"{run.topology} ({run.topology.world} processes)"),
        ("adapter", "\n".join([run.blueprint.size, *describe_adapter(adapter)])),
        ("scale", scale_in_words(adapter)),
        ("train data", train_data),
        ("eval data", _size(run.eval_data)),
        ("steps", f"{run.steps:,} of {batch_in_words(config.train, run.topology)}"),
        ("rate", rates_in_words(config.train)),
        ("output", config.train.output),
    ]
    if defaults := defaults_in_words(config, given):
        rows.append(("defaults", defaults))
    return rows


def _result(run: Any) -> dict[str, Any]:
    from meshlora.adapter.description import describe_adapter
    from meshlora.run.in_words import batch_in_words, rates_in_words, scale_in_words

    config, adapter = run.config, run.blueprint.trained
    return {
        "preset": config.preset,
        "model": config.model.path,
        "model_type": run.plan.model_type,
        "num_layers": run.plan.num_layers,
        "topology": str(run.topology),
        "num_processes": run.topology.world,
        "num_trained_parameters": adapter.num_trainable,
        "num_parameters": run.blueprint.num_parameters,
        "targets": [line.strip() for line in describe_adapter(adapter)],
        "scale": scale_in_words(adapter),
        "train_data": _counts(run.train_data),
        "eval_data": _counts(run.eval_data),
        "num_steps": run.steps,
        "batch_size": config.train.batch_size,
        "batch": batch_in_words(config.train, run.topology),
        "rate": rates_in_words(config.train),
        "output": config.train.output,
        "notes": list(run.notes),
        "slow_paths": [*map(str, run.slow_paths)],
    }


def _counts(data: Any) -> dict[str, int] | None:
    if data is None:
        return None
    return {"sequences": len(data), "tokens": len(data.input_ids), "trained_tokens": data.num_trained_tokens}


def _size(data: object) -> str:
    from meshlora_ground.dataset import TokenizedDataset

    if not isinstance(data, TokenizedDataset):
        return "none"
    return f"{len(data):,} sequences, {len(data.input_ids):,} tokens, {data.num_trained_tokens:,} trained"
