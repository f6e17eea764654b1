"""The files of a checkpoint folder that are the model: those that transformers would load, or a refusal.

Owns: that choice, for both sides of a proof, merging and the hub, and which repository of the hub a folder is a
snapshot of. Does not own: the tensors in the files (`model.stored`), the hub (`meshlora_ground.hub`).

transformers (`_get_resolved_checkpoint_files`) takes what config.json names as `transformers_weights`, else
model.safetensors, else the shards of its index, else pickled weights. Where that could be another model than the
reader of the folder expects, it is refused: nobody can tell which of two is meant.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from meshlora_ground.errors import UserError
from meshlora_ground.files import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The largest checkpoints have some 100,000 tensors.
_INDEX_BYTES = 32 * 2**20
_LONGEST_NAME = 100
_SNAPSHOT = re.compile(r"models--(?P<name>[\w.-]+--[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})", re.ASCII)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the checkpoint in `folder`: one, or the shards that its index names.

        weight_files(Path("models/Qwen3-0.6B"))

    Raises:
        UserError: none found, two models in one folder, an index that names a missing file, or pickled weights only.
    """
    check_one_model(folder)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        way_out = "convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        raise UserError(f"{folder}", "it holds pickled weights only, and meshlora unpickles nothing", way_out)
    raise UserError(f"{folder}", f"it holds no {SINGLE} and no {INDEX}")


def check_one_model(folder: Path) -> None:
    """Refuse a folder whose files are two models, or one under a name that only its config.json tells.

    A folder without weights passes: some commands need its configuration alone.

    Raises:
        UserError: it is such a folder, or its index cannot be read.
    """
    has_single = (folder / SINGLE).is_file()
    if (folder / INDEX).is_file():
        check_no_single(f"model {folder}", shard_names(folder / INDEX), has_single=has_single)
    named = _named_by_config(folder)
    if named is not None and named != (SINGLE if has_single else INDEX):
        raise UserError(
            f"model {folder}",
            f"its config.json names other weights, transformers_weights={named!r:.{_LONGEST_NAME}}, and only "
            f"{SINGLE} or the shards of {INDEX} are read here",
            f"give that file the name {SINGLE} in a folder of its own, without transformers_weights",
        )


def check_no_single(given: str, shards: list[str], *, has_single: bool) -> None:
    """Refuse `shards`, of an index, beside a model.safetensors that is none of them. Raises: UserError: on `given`."""
    if has_single and shards != [SINGLE]:
        raise UserError(
            given,
            f"it holds two models: {SINGLE}, which transformers loads, and the {len(shards)} shards of {INDEX}",
            f"keep one of them in the folder: without {SINGLE} the shards are the model, without {INDEX} they are not",
        )


def shard_names(index: Path) -> list[str]:
    """The files that an index names, sorted. Raises: UserError: unreadable, or not from weights to files."""
    content = read_json(index, most_bytes=_INDEX_BYTES)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index}", "it has no weight_map from names to files", "download it again")
    return sorted(set(weight_map.values()))


def _shards(folder: Path) -> list[Path]:
    names, there = shard_names(folder / INDEX), set(os.listdir(folder))
    for name in names:
        if name not in there or not (folder / name).is_file():
            rule = f"it names {name[-_LONGEST_NAME:]!r}, which is not in the folder"
            raise UserError(f"{folder / INDEX}", rule, "download it again")
    return [folder / name for name in names]


def _named_by_config(folder: Path) -> object:
    """`transformers_weights` of config.json; None if there is neither."""
    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json", most_bytes=_INDEX_BYTES)
    return config.get("transformers_weights") if isinstance(config, dict) else None


@dataclass(frozen=True)
class Repository:
    """A snapshot in the cache. commit: 40 hexadecimal digits."""

    name: str
    commit: str
    folder: Path


def repository_of(folder: str | Path | None) -> Repository | None:
    """The model repository whose snapshot `folder` is, by its path; None for any other folder.

    repository_of(".../models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca").name
    """
    path = Path(folder or ".")
    found = _SNAPSHOT.fullmatch("/".join(path.parts[-3:]))
    return Repository(found["name"].replace("--", "/", 1), found["commit"], path) if found else None
