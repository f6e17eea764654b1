"""The manifest of a folder that a run saved: its kind, its run, and the exact files that it holds.

Owns: the one format for checkpoints, `initial` and the finished adapter; writing it, and reading it with all checks.
Does not own: the other files (`adapter.formats.peft_format`, `run.checkpoint.state`), the choice of the folder to
resume from (`run.checkpoint.resuming`), when two runs are the same (`run.checkpoint.identity`).

It depends on the run alone: no date, host or path, and for an adapter no topology, so the same run gives the same
bytes. It contains its own hash: not against an attacker, who can compute it too, but against accidents.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshlora.run.checkpoint.identity import shown
from meshlora_ground.errors import MeshloraError, UserError, reason
from meshlora_ground.file_hash import sha256_of
from meshlora_ground.files import write_json_atomically
from meshlora_ground.reading import parse_json, read_text
from meshlora_ground.topology import Topology

FILE, FORMAT = "manifest.json", 2
STATE_FILE = "training_state.safetensors"
_ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}
_NEEDED = {"checkpoint": _ADAPTER_FILES | {STATE_FILE}, "initial": _ADAPTER_FILES, "adapter": _ADAPTER_FILES}
_MAY_BE_THERE = {"meshlora.json"}
# A finished adapter has the files of a tokenizer too, and a card: text that its owner may change.
_OF_TOKENIZER = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
CARD = "README.md"
# Kind -> its name in messages, and the way out if it is not whole.
_SAID = {
    "checkpoint": ("checkpoint", "use an earlier one"),
    "initial": ("initial adapter", ""),
    "adapter": ("finished adapter", ""),
}
_MOST_STEPS, _MOST_BYTES, _LARGEST = 10**12, 2**50, 4 << 20
_LOSS_SCALE = {"scale", "good_steps", "skipped"}
_ADDED: dict[str, Any] = {"asking": {}}  # what a manifest may lack, as older ones do
_DIGEST = re.compile("[0-9a-f]{64}")
Kind = Literal["checkpoint", "initial", "adapter"]


class NotWholeError(UserError):
    """A folder is not, or no longer, what a run saved: `--resume auto` passes it over."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The values that a run records about a folder that it saves.

    Attributes:
        kind: checkpoint, initial (the adapter before step 1) or adapter (after the last that was done).
        step: optimizer steps done. steps: of the whole run.
        updates: steps that changed the adapter: all but skipped ones.
        identity: everything the steps depend on, by name. versions: of the software that computed them.
        topology: of the run that wrote a checkpoint; "" for an adapter, whose files do not depend on it.
        eval_loss: of the evaluation at that step, if any.
        loss_scale: state of the loss scale of a float16 run.
        skipped_in_row: number of steps skipped right before.
        asking: how its data asked the model (`run.asking`); empty in folders from before that was recorded.
    """

    kind: Kind
    step: int
    steps: int
    updates: int
    identity: Mapping[str, str]
    versions: Mapping[str, str]
    topology: str = ""
    eval_loss: float | None = None
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    skipped_in_row: int = 0
    asking: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The expected size and hash of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Saved(Manifest):
    """A saved folder with the content of its manifest. files: by name."""

    folder: Path
    files: Mapping[str, Entry]


# --- writing ----------------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Add the manifest to `folder`, which already holds all other files."""
    of_manifest = [file for file in folder.iterdir() if file.name != CARD]
    files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in of_manifest}
    content = {"format": FORMAT, **dataclasses.asdict(manifest), "files": files}
    content["sha256"] = _own_hash(content)
    assert _mistake(content) is None, _mistake(content)
    write_json_atomically(folder / FILE, content)


def _own_hash(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# --- reading ----------------------------------------------------------------------------------------------------------


def read_whole(folder: Path, *, kinds: tuple[Kind, ...] = ("checkpoint",)) -> Saved:
    """The saved folder `folder`, every file checked. Raises: NotWholeError: it is not of these kinds, or not whole."""
    saved = read_manifest(folder, kinds=kinds)
    for name in saved.files:
        if mistake := file_mistake(saved, name):
            what, way_out = _SAID[saved.kind]
            raise NotWholeError(f"{what} {saved.folder}", mistake, way_out)
    return saved


def read_manifest(folder: Path, *, kinds: tuple[Kind, ...] = ("checkpoint", "initial", "adapter")) -> Saved:
    """The manifest of `folder`. Of the other files only the names are checked. Raises: NotWholeError: it is missing or
    damaged, or files are missing or extra."""
    what, way_out = _SAID[kinds[0]]
    try:
        # The link `latest` is resolved at once, as it moves on to newer checkpoints.
        if folder.is_symlink():
            folder = folder.resolve()
        content = _read(folder, what, way_out)
        found = {file.name for file in os.scandir(folder)} - {FILE, CARD}
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise NotWholeError(f"{what} {folder}", f"it cannot be read ({reason(error)})", way_out) from None
    if (rule := _mistake(content)) is not None:
        raise NotWholeError(f"{what} {folder}", f"{FILE} is damaged: {rule}", way_out)
    if content["kind"] not in kinds:
        raise NotWholeError(f"{what} {folder}", f"it is of kind {content['kind']}, not {' or '.join(kinds)}", way_out)
    name = f"step-{content['step']:06d}"
    if content["kind"] == "checkpoint" and folder.resolve().name != name:
        rule = f"it is of step {content['step']}, and its folder has to be named {name}"
        raise NotWholeError(f"{what} {folder}", rule, way_out)
    if missing := sorted(content["files"].keys() - found):
        raise NotWholeError(f"{what} {folder}", f"{missing[0]} is missing", way_out)
    if extra := sorted(found - content["files"].keys()):
        rule = f"{shown(ascii(extra[0]))} is there besides the files that were saved"
        raise NotWholeError(f"{what} {folder}", rule, "move it elsewhere")
    content = _ADDED | content
    values = {each.name: content[each.name] for each in dataclasses.fields(Manifest)}
    files = {n: Entry(num_bytes=entry["bytes"], sha256=entry["sha256"]) for n, entry in content["files"].items()}
    return Saved(**{**values, "files": files}, folder=folder)


def is_saved(folder: Path) -> bool:
    """Whether `folder` looks like one saved by a run, or like an adapter, whole or not."""
    try:
        return any((folder / name).exists() for name in (FILE, *_NEEDED["checkpoint"]))
    except OSError:
        return False


def file_mistake(saved: Saved, name: str) -> str:
    """What is wrong with the file `name` of a folder; empty if it has the saved bytes."""
    file, expected = saved.folder / name, saved.files[name]
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size != expected.num_bytes or sha256_of(file) != expected.sha256:
            return f"{name} is damaged"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror or error})"
    return ""


def _read(folder: Path, what: str, way_out: str) -> Any:
    """The manifest as JSON values. Raises: NotWholeError: it is missing or not JSON. OSError: it cannot be read."""
    file = folder / FILE
    if not file.is_file():  # a pipe would block
        raise NotWholeError(f"{what} {folder}", f"it has no {FILE}", "give a folder that a run saved")
    try:
        return parse_json(read_text(file, most_bytes=_LARGEST))
    except ValueError as error:
        raise NotWholeError(f"{what} {folder}", f"{FILE} is damaged: {reason(error)}", way_out) from None


def _mistake(content: Any) -> str | None:
    """What is wrong with the values of a manifest; None if nothing. Its own hash is checked last, so that a bad value
    written by another program is named."""
    if not isinstance(content, dict):
        return "it is no JSON object"
    if content.get("format") != FORMAT or type(content["format"]) is not int:
        return f"its format is {shown(ascii(content.get('format')))}, this meshlora reads {FORMAT}"
    names = {each.name for each in dataclasses.fields(Manifest)} | {"format", "files", "sha256"}
    if wrong := sorted(names ^ (_ADDED | content).keys()):
        return f"{shown(ascii(wrong[0]))} is {'missing' if wrong[0] in names else 'no key of it'}"
    checks: dict[str, Callable[[Any], bool]] = {
        "kind": lambda value: isinstance(value, str) and value in _NEEDED,
        "steps": lambda value: _is_count(value, 1, _MOST_STEPS),
        "step": lambda value: _is_count(value, *((0, 0) if content["kind"] == "initial" else (1, content["steps"]))),
        "updates": lambda value: _is_count(value, 0, content["step"]),
        "skipped_in_row": lambda value: _is_count(value, 0, content["step"] - content["updates"]),
        "identity": _is_texts,
        "versions": _is_texts,
        "asking": _is_texts,
        "topology": lambda value: _is_topology(value) if content["kind"] == "checkpoint" else value == "",
        "eval_loss": lambda value: value is None or _is_finite(value),
        "loss_scale": _is_loss_scale,
        "files": lambda value: _are_entries(value, content["kind"]),
    }
    for name, is_right in checks.items():
        if not is_right(value := (_ADDED | content)[name]):
            return f"{name} cannot be {shown(ascii(value))}"
    return None if content["sha256"] == _own_hash(content) else "it does not have the hash that it carries"


def _is_count(value: Any, smallest: int, largest: int) -> bool:
    return type(value) is int and smallest <= value <= largest  # `True` is an int to isinstance


def _is_finite(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _is_topology(value: Any) -> bool:
    try:
        return isinstance(value, str) and len(value) < 100 and str(Topology.parse(value)) == value
    except MeshloraError:
        return False


def _is_loss_scale(value: Any) -> bool:
    if value == {}:
        return True
    if not isinstance(value, dict) or value.keys() != _LOSS_SCALE:
        return False
    if not _is_finite(value["scale"]) or value["scale"] <= 0:
        return False
    return _is_count(value["good_steps"], 0, _MOST_STEPS) and _is_count(value["skipped"], 0, _MOST_STEPS)


def _are_entries(value: Any, kind: str) -> bool:
    if not isinstance(value, dict) or not value.keys() >= _NEEDED[kind]:
        return False
    further = value.keys() - _NEEDED[kind] - _MAY_BE_THERE
    if not all(kind == "adapter" and _OF_TOKENIZER.fullmatch(name) and name not in (FILE, CARD) for name in further):
        return False
    for entry in value.values():
        if not isinstance(entry, dict) or entry.keys() != {"bytes", "sha256"}:
            return False
        number, digest = entry["bytes"], entry["sha256"]
        if not _is_count(number, 0, _MOST_BYTES) or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            return False
    return True
