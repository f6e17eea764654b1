"""The JSON schema of a run file: what it accepts and refuses is what `config.file` accepts and refuses."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from meshlora.adapter.targets.resolve import SUPPORTED
from meshlora.cli.main import main
from meshlora.run.config.file import read_runs
from meshlora_ground.errors import UserError
from meshlora_ground.yaml_reading import parse_yaml
from tests.for_each import for_each
from tests.scripts import load_script

written = load_script("write_schema")
EXAMPLES = [file for file in sorted(Path("examples").rglob("*.yaml")) if "\nmodel:" in file.read_text("utf-8")]
GOOD: dict[str, Any] = {
    "model": {"path": "x"},
    "data": {"train": ["a.jsonl", "b.jsonl"], "eval": "c.jsonl"},
    "train": {"output": "o", "steps": 3},
    "lora": {"r": 4, "target_modules": "all-linear"},
}
NEVER = object()


def _with(path: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    group = functools.reduce(lambda tree, key: tree.setdefault(key, {}), parents, tree)
    group.pop(last, None) if value is NEVER else group.update({last: value})
    return tree


def _is_read(tree: Any, folder: Path) -> bool:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    try:
        read_runs(file, downloads=False)
    except UserError:
        return False
    return True


@functools.cache
def _checker() -> jsonschema.Draft202012Validator:
    schema = json.loads(written.FILE.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_shipped_schema_is_that_of_the_code() -> None:
    assert json.loads(written.FILE.read_text("utf-8")) == written.schema(), "run scripts/write_schema.py"


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(written.FILE.read_text("utf-8"))
    assert main(["schema", "--line"]) == 0
    mark, _, path = capsys.readouterr().out.strip().partition("$schema=")
    assert mark == "# yaml-language-server: "
    assert Path(path).samefile(written.FILE)


@for_each("file", EXAMPLES, ids=str)
def test_every_example_is_valid_and_names_the_schema(file: Path) -> None:
    text = file.read_text("utf-8")
    _checker().validate(parse_yaml(text))
    first = text.partition("\n")[0]
    assert (file.parent / first.removeprefix("# yaml-language-server: $schema=")).samefile(written.FILE)


@for_each(
    ("path", "value"),
    [
        ("train", {"output": "o", "epochs": 0.5, "schedule": "cycle", "cycle": {0: 0.0, 3: 1e-3}}),
        ("train.objective", "dpo"),
        ("train.objective", {"kind": "dpo", "beta": 0.2}),
        ("train.objective", {"kind": "sft", "label_smoothing": 0.1}),
        ("train.recompute", 1),
        ("train.save_every", "epoch/4"),
        ("train.schedule", "constant_with_warmup"),
        ("train.on_spike", {"factor": 3, "then": "note"}),
        ("train.recompute", "keep_attention"),
        ("train.recompute", "offload"),
        ("train.epochs", None),
        ("data.packing", True),
        ("data.train_on", ["assistant"]),
        ("data.train", ["a.jsonl", {"path": "b.csv", "weight": 2}]),
        ("data.columns", {"text": "body"}),
        ("preset", "microsoft-e2e"),
        ("adapters", {"a": {"lora": {"r": 2}, "train": {"lr": 1e-4}, "data": {"train": "d.jsonl"}}}),
    ],
)
def test_what_is_right_is_valid(path: str, value: Any, tmp_path: Path) -> None:
    tree = _with(path, value)
    assert _is_read(tree, tmp_path)
    _checker().validate(tree)


@for_each(
    ("path", "value"),
    [
        ("topolgy", "tp=2"),
        ("train.learning_rate", 1e-4),
        ("train.lr", "fast"),
        ("train.lr", 0),
        ("train.steps", 2.5),
        ("train.batch_size", 0),
        ("train.beta1", 1),
        ("train.output", 3),
        ("train.output", NEVER),
        ("train.objective", "dp"),
        ("train.objective", {}),
        ("train.objective", {"kind": "dpo", "bet": 0.2}),
        ("train.objective", {"kind": "dpo", "beta": -1}),
        ("train.recompute", True),
        ("train.save_every", "epoch/0"),
        ("train.save_every", -1),
        ("train.on_spike", {"factor": 1}),
        ("train.cycle", {0: "x"}),
        ("data", NEVER),
        ("data.train", 3),
        ("data.train", ["a", 3]),
        ("data.train", {"path": "b.csv", "wieght": 2}),
        ("data.loss_on", "all"),
        ("model.dtype", "bfloat"),
        ("model.quantization", "nf5"),
        ("generate", {"temperatur": 0.5}),
        ("preset", "microsoft"),
        ("adapters", {"a": {"train": {"micro_batch_size": 4}}}),
        ("adapters", {"a": {"model": {"path": "x"}}}),
    ],
)
def test_what_is_wrong_is_not_valid(path: str, value: Any, tmp_path: Path) -> None:
    tree = _with(path, value)
    assert not _is_read(tree, tmp_path)
    assert not _checker().is_valid(tree)


def test_every_key_is_described() -> None:
    schema = written.schema()
    bare = [
        f"{name}.{key}"
        for name, group in {"": schema, **schema["$defs"]}.items()
        for key, value in group["properties"].items()
        if key != "kind" and not value.get("description")
    ]
    assert not bare


def test_the_fields_of_lora_are_those_that_are_supported() -> None:
    assert written.LORA.keys() == SUPPORTED
