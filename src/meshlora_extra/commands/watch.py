"""`meshlora watch`: the live page of the runs in a folder, while they train or after; it is `meshlora_extra.page`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from meshlora_ground.errors import UserError


def add(commands: Any) -> None:
    watch = commands.add_parser(
        "watch",
        help="show the runs in a folder on a page of this machine",
        description="Serves one page on 127.0.0.1, at an address that nobody can guess, until Ctrl-C. It only reads.",
    )
    watch.add_argument("folder", metavar="FOLDER", help="output of a run, or a folder with some")
    watch.add_argument("--port", type=int, default=0, metavar="N", help="default: any that is free")
    watch.set_defaults(run=_watch)


def _watch(options: argparse.Namespace) -> None:
    from meshlora_extra.page.seen import Runs
    from meshlora_extra.page.server import serve
    from meshlora_ground.console import Console

    folder = Path(options.folder)
    if not folder.is_dir():
        raise UserError(f"{folder}", "there is no such folder", "give the output of a run, or a folder with some")
    if not 0 <= options.port < 2**16:
        raise UserError(f"--port {options.port}", "a port is below 65536", "leave it out")
    runs = Runs(folder)
    if not runs.names():
        raise UserError(f"{folder}", "no run is there: nothing has a metrics.jsonl", "give the folder around outputs")
    try:
        serve(runs, lambda url: Console().say(f"watch it: {url}   (until Ctrl-C)"), port=options.port)
    except OSError as error:
        raise UserError(f"--port {options.port}", f"it cannot be used ({error.strerror})", "leave it out") from None
