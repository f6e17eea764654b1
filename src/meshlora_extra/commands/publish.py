"""`meshlora publish`: its arguments. Writing versions is `rl.publishing`, telling an engine `rl.engine`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import add_json, check_json, read_blueprint, write_result
from meshlora_ground.errors import UserError


def add(commands: Any) -> None:
    publish = commands.add_parser(
        "publish",
        help="write an adapter for a serving engine, whole, and let a running one load it",
        description="Writes a new version in a folder, with a link `latest` to it; with --url, a running engine loads "
        "it in place of the version before.",
    )
    publish.add_argument("adapter", metavar="RUN_OR_ADAPTER", help="output of a run, a checkpoint, or adapter folder")
    publish.add_argument("--to", required=True, metavar="FOLDER", help="folder of published versions")
    publish.add_argument("--url", metavar="URL", help="of an engine that loads it, as in http://127.0.0.1:8000")
    publish.add_argument("--name", default="meshlora", help="the adapter's name in the engine (default meshlora)")
    publish.add_argument(
        "--model", metavar="FOLDER", help="the base, for adapters on experts; only config.json is read"
    )
    publish.add_argument("--trust-remote-code", action="store_true")
    add_json(publish)
    publish.set_defaults(run=_publish)


def _publish(options: argparse.Namespace) -> None:
    from meshlora_extra.rl.engine import Engine
    from meshlora_extra.rl.publishing import publish
    from meshlora_ground.console import Console

    check_json(options)
    if options.url is not None and not options.url.startswith(("http://", "https://")):
        raise UserError(f"--url {options.url}", "it begins with http:// or https://", "as in http://127.0.0.1:8000")
    adapter, name = _adapter_in(Path(options.adapter))

    def model_and_plan() -> tuple[Any, Any]:
        blueprint = read_blueprint(options, "")
        return blueprint.model, blueprint.plan

    version = publish(adapter, Path(options.to), name=name, model_and_plan=model_and_plan if options.model else None)
    Console().say(f"published: {version}")
    if options.url is not None:
        Engine(options.url).load_adapter(options.name, version)
        Console().say(f"loaded: {options.name} at {options.url}")
    write_result(options.json, {"folder": f"{version}", "name": options.name, "url": options.url})


def _adapter_in(folder: Path) -> tuple[Path, str]:
    """(the adapter's folder in that of a run, or of a checkpoint; how the version's name begins)."""
    from meshlora.run.checkpoint.manifest import FILE, read_whole
    from meshlora.run.checkpoint.resuming import find_checkpoint

    if not (folder / "adapter_config.json").exists():
        if (folder / "adapter").is_dir():
            folder = folder / "adapter"
        elif (folder / "checkpoints").is_dir():
            found = find_checkpoint(folder, "auto", lambda _: None)
            folder = found.folder if found is not None else folder
    if not (folder / FILE).exists():
        return folder, "adapter"
    saved = read_whole(folder, kinds=("adapter", "checkpoint", "initial"))
    return folder, f"step-{saved.step:06d}"
