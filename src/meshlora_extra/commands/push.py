"""The command that sends an adapter to the hub: `meshlora push`. What is sent is in `meshlora_extra.hub.push`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import add_json, check_json, write_result


def add(commands: Any) -> None:
    push = commands.add_parser(
        "push",
        help="send an adapter folder to the hub, privately",
        description="Sends adapter, card, tokenizer and chat template in one commit; no training state. Needs a token "
        "that may write, as huggingface_hub reads it: hf auth login, or HF_TOKEN.",
    )
    push.add_argument("folder", metavar="FOLDER", help="adapter folder, or the output of a finished run")
    push.add_argument("name", metavar="OWNER/NAME", help="repository; it is made if it is not there")
    push.add_argument("--base", metavar="OWNER/NAME", help="the base's name on the hub, if it was loaded from a folder")
    push.add_argument("--public", action="store_true", help="everybody may read it (default: nobody else)")
    add_json(push)
    push.set_defaults(run=_push)


def _push(options: argparse.Namespace) -> None:
    from meshlora.run.checkpoint.manifest import FILE, read_whole
    from meshlora_extra.hub.push import base_to_name, files_to_push, push
    from meshlora_ground.console import Console
    from meshlora_ground.hub import endpoint

    check_json(options)
    folder = Path(options.folder)
    if not (folder / "adapter_config.json").exists() and (folder / "adapter").is_dir():
        folder = folder / "adapter"
    files = files_to_push(folder)
    if (folder / FILE).exists():
        read_whole(folder, kinds=("adapter", "checkpoint", "initial"))
    base, say = base_to_name(folder, options.base), Console().say
    size = sum(file.stat().st_size for file in files)
    who = "everybody" if options.public else "you and whom you let"
    say(f"sending {len(files)} files, {size / 1e6:,.1f} MB, to {endpoint()} as {options.name}, to be read by {who}")
    where = push(folder, options.name, base=base, is_public=options.public)
    say(f"pushed: {where}")
    write_result(options.json, {"name": options.name, "where": where, "num_files": len(files), "num_bytes": size})
