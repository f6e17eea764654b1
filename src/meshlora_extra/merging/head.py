"""The head of a model of another task than its checkpoint's, as an adapter's folder tells it.

Owns: the task and the labels in the model's configuration. Does not own: the files (`adapter.formats.peft_format`), the
weights of the head (`meshlora_extra.merging.changes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshlora.adapter.formats.peft_format import CONFIG_FILE, PIECES_FILE
from meshlora_ground.errors import UserError
from meshlora_ground.files import read_json
from meshlora_ground.tasks import CAUSAL, set_labels, set_task, task_of


def set_head(config: Any, folder: Path) -> None:
    """Make a model's configuration that of the task of the adapter in `folder`, with its labels.

    Raises:
        UserError: files that are missing or damaged. UnsupportedError: a task that is not known.
    """
    task = _read_mapping(folder / CONFIG_FILE).get("task_type")
    set_task(config, task or CAUSAL)
    if task_of(config) in (CAUSAL, "FEATURE_EXTRACTION"):
        return  # no labels
    own = _read_mapping(folder / PIECES_FILE)
    labels, problem, padding = own.get("labels"), own.get("problem_type"), own.get("pad_token_id")
    if not labels or not (isinstance(labels, list) and all(isinstance(name, str) for name in labels)):
        rule = f"a head has as many outputs as there are labels, and {PIECES_FILE} must name them"
        raise UserError(f"adapter {folder} of task_type={task}", rule, 'write {"labels": ["bad", "good"]} into it')
    if not isinstance(problem, str):
        problem = None
    set_labels(config, labels, problem)
    # A classifier reads its last token's state: without a padding token transformers refuses batches.
    if getattr(config, "pad_token_id", None) is None and isinstance(padding, int):
        config.pad_token_id = padding


def _read_mapping(file: Path) -> Mapping[str, Any]:
    """The mapping in `file`; empty if there is no such file."""
    if not file.is_file():
        return {}
    found = read_json(file)
    return found if isinstance(found, Mapping) else {}
