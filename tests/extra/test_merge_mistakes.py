"""Merging an adapter whose configuration was edited by hand: one message, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshlora.loading.blueprint import read_model_config
from meshlora_extra.merging.merge import merge
from meshlora_ground.errors import UserError
from tests.extra.test_merge import make_adapter
from tests.for_each import for_each
from tests.peft_adapters import make_base


@for_each(
    ("option", "value"),
    [
        ("rank_pattern", ["x"]),
        ("rank_pattern", {"q_proj": "x"}),
        ("target_modules", 5),
        ("target_modules", "(*"),
        ("target_modules", ["nope"]),
        ("target_modules", ["norm"]),
        ("layers_to_transform", [1.5]),
        ("layers_to_transform", [99]),
        ("layers_pattern", 5),
        ("modules_to_save", 5),
        ("r", "4"),
        ("lora_alpha", "x"),
        ("bias", "some"),
        ("use_dora", "maybe"),
        ("runtime_config", 5),
        ("alora_invocation_tokens", [5, 9]),
    ],
)
def test_a_wrong_value_in_the_configuration_is_one_message(option: str, value: object, tmp_path: Path) -> None:
    model = make_base(tmp_path / "model", "llama")
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=["q_proj"])
    file = adapter / "adapter_config.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(stored | {"layers_to_transform": [0], option: value}), encoding="utf-8")
    with pytest.raises(UserError):
        merge(model, adapter, tmp_path / "out", config=read_model_config(model))
    assert not (tmp_path / "out").exists()
