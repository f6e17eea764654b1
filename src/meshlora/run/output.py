"""The output folder of a run: whether it may be written.

Owns: the refusals of a folder that holds another run, that the run reads from, or that cannot be written. Does not
own: resuming from what lies there (`run.checkpoint.resuming`), the lock (`run.lock`).
"""

from __future__ import annotations

import os
from pathlib import Path

from meshlora.run.config.run_file import RUN_CONTENT, RunConfig
from meshlora_ground.errors import UserError
from meshlora_ground.files import why_not_writable


def check_output(config: RunConfig, *, resumes: bool) -> None:
    """Refuse a folder that cannot be written, or whose content would be lost. Raises: UserError."""
    output = Path(config.train.output)
    parent = next(p for p in (output, *output.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise UserError(f"train.output={output}", f"{parent} is a file, a folder is needed", "choose another")
    if holds_run(output) and not (config.train.overwrite or resumes):
        way_out = "choose another, --resume auto to go on with it, or --set train.overwrite=true"
        raise UserError(f"train.output={output}", "it holds a run already", way_out)
    place = _resolved(output)
    for option, paths in config.inputs.items():
        for given in paths:
            if place in (_resolved(given), *_resolved(given).parents):
                rule = f"{option}={given} is there, and could be overwritten"
                raise UserError(f"train.output={output}", rule, "choose another folder")
    (model,) = config.inputs["model.path"]
    if _resolved(model) in place.parents:
        rule = f"it is in the folder of model.path={model}"
        raise UserError(f"train.output={output}", rule, "choose another folder")
    if why_not_writable(parent):
        raise UserError(f"train.output={output}", f"{parent} is not writable", "choose another")


def holds_run(output: Path) -> bool:
    """Whether a run has written to the folder."""
    return any((output / name).exists() for name in RUN_CONTENT)


def _resolved(path: str | Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises on a loop of links
