"""The command that measures the devices at hand for the planner: `meshlora calibrate`."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import checked_place
from meshlora_ground.errors import UserError

_DTYPES = ("float32", "bfloat16")


def add(commands: Any) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="measure products, attention, memory, launches and collectives on the devices at hand, for the planner",
        description="Writes a file for `meshlora plan --hardware` and train.hardware. Start it as training is started: "
        "with --nproc, or as ranks of torchrun or srun. Takes less than two minutes.",
    )
    calibrate.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    calibrate.add_argument("--topology", default="", metavar="T", help="whose axes are measured (default: dp over all)")
    calibrate.add_argument(
        "--dtype", action="append", choices=_DTYPES, help="of products; may be repeated (default: both)"
    )
    calibrate.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    calibrate.add_argument("--out", default="hardware.json", metavar="FILE", help="default: hardware.json")
    calibrate.set_defaults(run=_calibrate)


def _calibrate(options: argparse.Namespace) -> None:
    from meshlora.comm.groups import leave, on_gpus
    from meshlora.run.edge import rank_edge
    from meshlora.run.launch import launch
    from meshlora_ground.files import check_result_file
    from meshlora_ground.topology import Topology

    place = checked_place(options)
    world = options.nproc or (place.world if place else 1)
    dtypes = list(dict.fromkeys(options.dtype or _DTYPES))

    def check() -> Any:
        check_result_file(Path(options.out), options.out)
        topology = Topology.parse(options.topology, world=world)
        if topology.world != world:
            rule = f"it needs {topology.world} processes, and there are {world}"
            raise UserError(f"--topology {options.topology}", rule, f"use --nproc {topology.world}")
        return topology

    if options.nproc is not None:
        check()
        takes_gpus = on_gpus(options.device, num_ranks=options.nproc)
        words = ["calibrate", "--topology", options.topology, "--device", options.device, "--out", options.out]
        words += [word for name in dtypes for word in ("--dtype", name)]
        launch(words, nproc=options.nproc, on_gpus=takes_gpus)
        return
    with rank_edge(is_watched=True) if place is not None else contextlib.nullcontext():
        _as_rank(check(), dtypes, options)
        leave()


def _as_rank(topology: Any, dtypes: list[str], options: argparse.Namespace) -> None:
    """Measure, with all ranks of the job; rank 0 writes the file and prints what it says."""
    import torch

    from meshlora.comm.groups import join, open_mesh
    from meshlora.run.allocator import keep_freed_memory
    from meshlora_extra.planner.calibrate import calibrate
    from meshlora_extra.planner.show import calibrated
    from meshlora_ground.console import Console
    from meshlora_ground.files import write_json_atomically

    started = time.perf_counter()
    mesh = open_mesh(topology, device=join(options.device))
    if mesh.device.type == "cpu":
        keep_freed_memory()  # as in training
    fields, timings = calibrate(mesh, [getattr(torch, name) for name in dtypes])
    if mesh.rank > 0:
        return
    write_json_atomically(Path(options.out), fields)
    console = Console()
    console.print(calibrated(fields, timings))
    console.say(f"written: {options.out} ({time.perf_counter() - started:.0f} s)")
