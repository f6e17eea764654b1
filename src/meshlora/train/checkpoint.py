"""Checkpoints that a run goes on from: beside the adapter, all that decides what its remaining steps do.

Owns: the moments of the optimizer as logical tensors (full, under the names of the factors, whatever the topology),
the manifest with sizes and checksums, which checkpoint of a run is the last whole one, and whether it is of this run.
Does not own: the adapter's files (`adapter.peft_format`), the loop (`train.trainer`). The order of the data and the
learning rate are functions of the step, and need no state.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshlora.adapter.manage import active_factors, full_factor, local_part, runtime
from meshlora.errors import UserError
from meshlora.state.files import open_safetensors, read_json, write_json_atomically

FOLDER = "checkpoints"
STATE_FILE, MANIFEST = "training_state.safetensors", "training_state.json"
FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq")
# What may differ between a run and the one that goes on from its checkpoint: it changes no step.
_CHOICES = ("output", "overwrite", "epochs", "steps", "micro_batch_size", "recompute", "track", "merge_at_end")
_FREE = {*_CHOICES, "keep_last", "keep_best"} | {
    *(f"{name}_every" for name in ("eval", "save", "log", "replica_check", "sample")),
    *("on_save_error", "on_nonfinite", "timeout_s"),
}


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        step: optimizer steps that were done. topology: of the run that wrote it.
        updates: how many of the steps changed the adapter: all but those that were skipped.
        eval_loss: of the evaluation at that step, None where there was none.
        loss_scale: state of the loss scale, of a float16 run.
        skipped_in_row: steps that were left out right before.
    """

    folder: Path
    step: int
    topology: str
    updates: int
    eval_loss: float | None = None
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    skipped_in_row: int = 0


def identity(config: Any, *, steps: int, tokens: Mapping[str, Any]) -> dict[str, str]:
    """Name -> what of a run its steps depend on, besides the topology.

    config: the `RunConfig`. tokens: the arrays of the training data.
    """
    found = {
        f"train.{name}": json.dumps(value, sort_keys=True)
        for name, value in dataclasses.asdict(config.train).items()
        if name not in _FREE
    }
    folder = Path(config.model.path)
    weights = sorted((file.name, file.stat().st_size) for file in folder.glob("*.safetensors"))
    model = hashlib.sha256(json.dumps(weights).encode() + (folder / "config.json").read_bytes())
    data = hashlib.sha256()
    for name in sorted(tokens):
        data.update(name.encode() + tokens[name].tobytes())
    return found | {
        "steps": str(steps),
        "model": model.hexdigest(),
        "model.dtype": config.model.dtype,
        "model.quantization": json.dumps(config.model.quantization),
        "model.disable_dropout": json.dumps(config.model.disable_dropout),
        "data": data.hexdigest(),
        "lora": json.dumps(config.lora if config.adapter is None else config.adapter, sort_keys=True),
    }


# --- writing ----------------------------------------------------------------------------------------------------------


def state_writer(
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    updates: int,
    identity: Mapping[str, str],
    eval_loss: float | None = None,
    loss_scale: Mapping[str, float] | None = None,
    skipped_in_row: int = 0,
) -> Callable[[Path], None]:
    """A function that adds the training state to the folder of an adapter. Collective; rank 0 calls what it returns."""
    state = runtime(model)
    tensors: dict[str, Tensor] = {}
    for factor in active_factors(model):
        held = optimizer.state[factor.parameter]
        for moment in _MOMENTS:
            # Before the first update there are none, and they count as zero.
            moment_here = held[moment] if moment in held else torch.zeros_like(factor.parameter)
            full = full_factor(moment_here, factor.rule, state.mesh)
            if state.mesh.rank == 0:
                tensors[f"{moment}/{factor.name}"] = full.to("cpu", copy=True).contiguous()

    def write(folder: Path) -> None:
        save_file(tensors, folder / STATE_FILE, metadata={"format": "pt"})
        (folder / STATE_FILE).chmod(0o644)
        files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in folder.iterdir()}
        manifest = {
            "format": FORMAT,
            "step": step,
            "updates": updates,
            "eval_loss": eval_loss,
            "topology": str(state.mesh.topology),
            "identity": dict(identity),
            "loss_scale": dict(loss_scale or {}),
            "skipped_in_row": skipped_in_row,
            "files": dict(sorted(files.items())),
        }
        write_json_atomically(folder / MANIFEST, manifest)

    return write


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- finding ----------------------------------------------------------------------------------------------------------


def find_checkpoint(output: Path, given: str, say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint in folder `given`; for "auto" the last whole one of the run in `output`, None where there is none.

    say: called with a line for each that is damaged.

    Raises:
        UserError: the one that was given is not whole.
    """
    if given != "auto":
        return read_checkpoint(Path(given))
    # Not by the name `latest`: a rank killed at the right moment leaves a newer one that is whole.
    for _, folder in step_folders(output / FOLDER):
        try:
            return read_checkpoint(folder)
        except UserError as error:
            say(f"passed over: {error}")
    return None


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """(step, checkpoint) of all in `folder`, whole or not, the newest first."""
    numbers = [(found.name.removeprefix("step-"), found) for found in folder.glob("step-*")]
    return sorted(((int(number), found) for number, found in numbers if number.isdecimal()), reverse=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, every file compared with its manifest.

    Raises:
        UserError: it is none, or not whole.
    """
    manifest = _manifest(folder)
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"checkpoint {folder}", f"{name} is missing", "use an earlier one")
        if file.stat().st_size != expected["bytes"] or _sha256(file) != expected["sha256"]:
            raise UserError(f"checkpoint {folder}", f"{name} is damaged", "use an earlier one")
    # Not by the name `latest`, which goes on to the next one.
    folder = folder.resolve() if folder.is_symlink() else folder
    step, updates = manifest["step"], manifest.get("updates", manifest["step"])
    eval_loss, loss_scale = manifest.get("eval_loss"), manifest.get("loss_scale", {})
    skipped = manifest.get("skipped_in_row", 0)
    return Checkpoint(folder, step, manifest["topology"], updates, eval_loss, loss_scale, skipped)


def _manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        raise UserError(f"checkpoint {folder}", f"it has no {MANIFEST}", "give a folder that a run saved")
    found = read_json(folder / MANIFEST)
    needed = {"format": int, "step": int, "topology": str, "identity": dict, "files": dict}
    if not isinstance(found, dict) or any(not isinstance(found.get(key), kind) for key, kind in needed.items()):
        raise UserError(f"checkpoint {folder}", f"{MANIFEST} is damaged", "use an earlier one")
    if found["format"] != FORMAT:
        raise UserError(f"checkpoint {folder}", f"its format is {found['format']}, this meshlora reads {FORMAT}")
    if {Path(name).name for name in found["files"]} != set(found["files"]) or STATE_FILE not in found["files"]:
        raise UserError(f"checkpoint {folder}", f"{MANIFEST} names other files than a checkpoint has")
    counts = [found.get(key, 0) for key in ("updates", "skipped_in_row")]
    if any(type(count) is not int for count in counts) or not isinstance(found.get("eval_loss"), float | None):
        raise UserError(f"checkpoint {folder}", f"{MANIFEST} is damaged", "use an earlier one")
    return found


def check_same_run(checkpoint: Checkpoint, identity: Mapping[str, str], *, despite: Collection[str] = ()) -> None:
    """A run with `identity` may go on from `checkpoint`, `despite` the differences that are named.

    Raises:
        UserError: something else differs, by name.
    """
    stored = _manifest(checkpoint.folder)["identity"]
    for name in sorted(identity.keys() | stored.keys()):
        if stored.get(name) == identity.get(name) or name in despite:
            continue
        is_hash = name in ("model", "data")
        differs = "" if is_hash else f": {stored.get(name)} there, {identity.get(name)} here"
        raise UserError(
            f"--resume {checkpoint.folder}",
            f"it is of a run with other {name}{differs}",
            f"go on all the same with --resume-despite {name}, or start a new run",
        )


# --- going on ---------------------------------------------------------------------------------------------------------


def restore_optimizer(model: Any, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Give every factor of `model` the moments that `checkpoint` holds for it, cut for this rank.

    Raises:
        UserError: they are of another adapter.
    """
    mesh = runtime(model).mesh
    file = checkpoint.folder / STATE_FILE
    with open_safetensors(file) as opened:
        names = {f"{moment}/{factor.name}" for factor in active_factors(model) for moment in _MOMENTS}
        if names != set(opened.keys()):
            other = sorted(names ^ set(opened.keys()))[0]
            raise UserError(f"{file}", f"it is of another adapter: {other} is on one side only")
        for factor in active_factors(model):
            value = factor.parameter
            held = {}
            for moment in _MOMENTS:
                part = local_part(opened.get_tensor(f"{moment}/{factor.name}"), factor.rule, mesh)
                if part.shape != value.shape:
                    raise UserError(f"{file}: {moment}/{factor.name}", "its shape is not that of the factor")
                held[moment] = torch.empty_like(value).copy_(part)
            step = torch.tensor(float(checkpoint.updates), dtype=torch.float32, device=value.device)
            optimizer.state[value] = {"step": step, **held}
