"""The identity of a run: everything its steps depend on besides the topology, by name.

Owns: which options affect no step, the hashes of all files that a run reads, and the comparison of two runs and their
versions. Does not own: the file that stores them (`run.checkpoint.manifest`), reading files
(`meshlora_ground.file_hash`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshlora_ground.errors import UserError, did_you_mean, one_line
from meshlora_ground.file_hash import FileHashes
from meshlora_ground.weight_files import INDEX, repository_of

# Name in an identity -> files.
Contents = Mapping[str, tuple[Path, ...]]

# Options that may differ between a run and the one that resumes it: they affect no step.
_CHOICES = ("output", "overwrite", "epochs", "steps", "micro_batch_size", "recompute", "track", "merge_at_end")
_FREE = {*_CHOICES, "keep_last", "keep_best", "early_stopping", "on_spike", "routing_replay", "warmup_ratio"} | {
    *(f"{name}_every" for name in ("eval", "save", "log", "replica_check", "sample")),
    *("on_save_error", "on_nonfinite", "timeout_s", "on_fewer", "deterministic", "require_fast", "cuda_graphs"),
}
# Options that manifests of earlier runs have not: at their defaults they are no part of an identity.
_LATER = ("num_cycles", "power", "timescale", "decay_type")
DATE = "data.date"  # name of the day that chat templates write
DATA = "data"  # of the tokens of the training data
_FREE_OF_RL = ("publish_to", "adapter_name")
_TOKENIZER = (
    *("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "additional_chat_templates/*", "preprocessor_config.json", "processor_config.json"),
)
shown = functools.partial(one_line, limit=200)  # text from a file, for a message


def identity(
    config: Any, *, steps: int, tokens: Mapping[str, Any], attention: str | None, kernels: str, day: str | None = None
) -> dict[str, str]:
    """Name -> value of everything the steps of a run depend on, except the content of files.

    config: the `RunConfig`. tokens: the arrays of the training data. attention, kernels: those that the model has. day:
    that chat templates write, if they ask for one.
    """
    found = {
        f"train.{name}": json.dumps(value, sort_keys=True)
        for name, value in dataclasses.asdict(config.train).items()
        if name not in _FREE
    }
    for item in dataclasses.fields(config.train):
        if item.name in _LATER and getattr(config.train, item.name) == item.default:
            del found[f"train.{item.name}"]
    own = dataclasses.asdict(config.train.objective)
    if (policy := own.pop("reference", None)) is not None and config.reference is not None:  # else it is the base
        own["reference"] = policy if policy == "start" else "a folder"  # whose files are in `contents`
    if config.teacher is not None:
        own["teacher"] = "a folder"
    found["train.objective"] = json.dumps(own, sort_keys=True)
    if config.data.eval_share is not None:  # which says more than the hash of the rows that are left
        found["data.eval"] = f"{config.data.eval_share:g} of the rows"
    if config.data.map is not None:  # its file is in `contents`
        found["data.map"] = config.data.map.rpartition(":")[2]
    if not config.data.shuffle:
        found["data.shuffle"] = "false"
    if repository := repository_of(config.model.path):
        found["model.revision"] = f"{repository.name}@{repository.commit}"
    if day is not None:
        found[DATE] = day
    if kernels != "none":  # which is what no value says
        found["model.kernels"] = kernels
    if config.rl is not None:
        own = {name: value for name, value in dataclasses.asdict(config.rl).items() if name not in _FREE_OF_RL}
        if own["on_policy"] == 1:  # as all were before there was another
            del own["on_policy"]
        found["rl"] = json.dumps(own, sort_keys=True)
    if config.adapter is None:
        found["lora"] = json.dumps(config.lora, sort_keys=True)
    return found | {
        "steps": str(steps),
        "model.dtype": config.model.dtype,
        "model.attn_implementation": str(attention),
        "model.quantization": json.dumps(config.model.quantization),
        "model.compute": json.dumps(config.model.compute),
        "model.disable_dropout": json.dumps(config.model.disable_dropout),
        "model.trust_remote_code": json.dumps(config.model.trust_remote_code),
        DATA: hash_of_data(tokens),
    }


def hash_of_data(tokens: Mapping[str, Any]) -> str:
    """Of the arrays of `TokenizedDataset`."""
    found = hashlib.sha256()
    for name in sorted(tokens):
        found.update(name.encode())
        found.update(np.ascontiguousarray(tokens[name]).data)
    return f"sha256:{found.hexdigest()}"


def contents(
    options: Any,
    *,
    adapters: Mapping[str, str | None],
    of_adapter: Collection[str],
    weights: Collection[Path],
    replay: Collection[Path],
    prompts: Collection[Path] = (),
    rewards: Collection[Path] = (),
    code: Collection[Path] = (),
    beside: Mapping[str, Collection[Path]],
) -> Contents:
    """Name -> the files that a run reads, all part of its identity.

    options: the `ModelConfig`. adapters: name -> folder. of_adapter: names of their files. weights: files of the base.
    replay: files of the replayed routing. prompts, rewards: files and folders of rollouts. code: files of
    `generate.metrics`. beside: name -> further files.
    """
    model = Path(options.path)
    found = {"model": [*weights, model / "config.json", model / INDEX], "tokenizer": list[Path]()}
    if options.trust_remote_code:
        found["model"] += model.rglob("*.py")
    for pattern in _TOKENIZER:
        found["tokenizer"] += model.glob(pattern)
    for name, folder in adapters.items():
        if folder is not None and (name == "adapter" or folder != adapters["adapter"]):
            found[name] = [Path(folder) / file for file in of_adapter]
    for name, paths in {"rl.prompts": prompts, "rl.rewards": rewards}.items():
        for path in paths:
            found.setdefault(name, []).extend(path.rglob("*") if path.is_dir() else [path])
    if code:  # no step depends on it, but when a run ends, and which checkpoint is the best
        found["generate.metrics"] = list(code)
    for name, files in beside.items():
        found[name] = list(files)
    if replay:
        found["train.routing_replay"] = list(replay)
    return {name: tuple(sorted({file for file in files if file.is_file()})) for name, files in found.items()}


def identity_of_contents(files: Contents, hashes: FileHashes) -> dict[str, str]:
    """Name -> one hash of its files: of names without folder, and bytes. Raises: UserError: one cannot be read."""
    found = {}
    for name, each in files.items():
        pairs = sorted([file.name, hashes[file]] for file in each)
        found[name] = f"sha256:{hashlib.sha256(json.dumps(pairs).encode()).hexdigest()}"
    return found


def check_same(
    what: str, there: Mapping[str, str], here: Mapping[str, str], *, despite: Collection[str], way_out: str
) -> None:
    """Check that the saved identity `there` equals that of the current run, `here`, except for names in `despite`.

    what: name of the saved folder, for the message. way_out: the alternative to `--resume-despite`.

    Raises:
        UserError: other values differ, all by name; or a name in `despite` is unknown.
    """
    names = there.keys() | here.keys()
    for name in despite:
        if name not in names:
            raise UserError(f"--resume-despite {name}", "no run has anything of this name", did_you_mean(name, names))
    changed = [name for name in sorted(names - {*despite}) if there.get(name, "none") != here.get(name, "none")]
    if not changed:
        return
    said = []
    for name in changed:
        if name == DATA and len(changed) > 1:  # its hash says less than what made it another
            continue
        one, other = there.get(name, "none"), here.get(name, "none")
        if name == "model.revision":
            way_out = f"give model.path: {shown(one)}"
        differs = f": {shown(one)} there, {shown(other)} here"
        if one.startswith("sha256:") or other.startswith("sha256:"):  # which nobody can read
            differs = ""
        said.append(f"{shown(name)}{differs}")
    flags = " ".join(f"--resume-despite {shown(name)}" for name in changed)
    rule = f"it is of a run with other {', and other '.join(said)}"
    raise UserError(f"--resume: {what}", rule, f"go on all the same with {flags}, or {way_out}")


def other_versions(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """The differing versions, in words; empty if none differ."""
    names = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    return ", ".join(f"{shown(name)} {shown(there.get(name, '?'))} there, {here.get(name, '?')} here" for name in names)
