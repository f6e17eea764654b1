"""Files that lie beside a recipe: accelerate's YAML, DeepSpeed's JSON, LLaMA-Factory's dataset_info.json.

Owns: which they are, and which of their numbers win over the recipe's. Does not own: what the recipe says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshlora_ground.errors import UserError
from meshlora_ground.reading import parse_json, read_text
from meshlora_ground.yaml_reading import parse_yaml

_ACCELERATE = ("accelerate.yaml", "accelerate_config.yaml", "default_config.yaml")


@dataclass
class Beside:
    """What the files beside a recipe say.

    Attributes:
        processes: of accelerate; 0: not said. given: keys that win over the recipe's. data: dataset_info.json, and the
            folder that it is in. files: the names of all.
    """

    processes: int = 0
    given: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    folder: Path = Path()
    files: list[str] = field(default_factory=list)


def read_beside(named: Sequence[Path], recipe: Path, given: Mapping[str, Any]) -> Beside:
    """Read the files that the user or the recipe names, and those whose name says what they are.

    Raises:
        UserError: one that the user names is missing, not readable, or none of these.
    """
    found = Beside()
    for path in named:
        _take(found, path, must=True)
    folder = recipe.parent
    others = [folder / name for name in _ACCELERATE if (folder / name) != recipe]
    if isinstance(config := given.get("deepspeed"), str) and config.endswith(".json"):
        others += [folder / config, Path(config)]
    data = str(given.get("dataset_dir") or "data")
    others += [root / data / "dataset_info.json" for root in (folder, Path(), folder.parent, folder.parent.parent)]
    others += [folder / "dataset_info.json"]
    for path in others:
        if path.is_file() and str(path) not in found.files:
            _take(found, path, must=False)
    return found


def _take(found: Beside, path: Path, *, must: bool) -> None:
    try:
        text = read_text(path)
        tree = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except FileNotFoundError:
        raise UserError(f"--beside {path}", "there is no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}", f"it cannot be read ({error})") from None
    if isinstance(tree, dict) and ("zero_optimization" in tree or "train_micro_batch_size_per_gpu" in tree):
        _deepspeed(found, tree)
    elif isinstance(tree, dict) and ("num_processes" in tree or "distributed_type" in tree):
        _accelerate(found, tree)
    elif isinstance(tree, dict) and tree and all(isinstance(each, dict) for each in tree.values()):
        if found.data is None:
            found.data, found.folder = tree, path.parent
    elif must:
        rule = "it is no accelerate YAML, no DeepSpeed JSON and no dataset_info.json"
        raise UserError(f"--beside {path}", rule)
    else:
        return
    found.files.append(str(path))


def _accelerate(found: Beside, tree: Mapping[str, Any]) -> None:
    if isinstance(count := tree.get("num_processes"), int):
        found.processes = count
    if (precision := tree.get("mixed_precision")) in ("bf16", "fp16"):
        found.given[precision] = True
    config = tree.get("deepspeed_config") or {}
    if config.get("zero_stage") == 3:
        found.given["deepspeed"] = "zero3"
    if tree.get("fsdp_config"):
        found.given["fsdp"] = True
    for name, ours in {"gradient_clipping": "max_grad_norm", "gradient_accumulation_steps": None}.items():
        if isinstance(value := config.get(name, tree.get(name)), int | float):
            found.given[ours or name] = value


def _deepspeed(found: Beside, tree: Mapping[str, Any]) -> None:
    """Numbers of DeepSpeed; "auto" means the recipe's."""
    names = {"gradient_clipping": "max_grad_norm", "train_micro_batch_size_per_gpu": "per_device_train_batch_size"}
    for theirs in (*names, "gradient_accumulation_steps"):
        if isinstance(value := tree.get(theirs), int | float):
            found.given[names.get(theirs, theirs)] = value
    zero = tree.get("zero_optimization") or {}
    found.given["deepspeed"] = f"stage{zero.get('stage', 0)}"
