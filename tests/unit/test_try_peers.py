"""`make test-peers`: it reads PEFT's configurations as they are written, and calls wrong what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import ROOT, load_script

TEXT = """
CASES = [
    ("one", "MLP", LoraConfig, {"target_modules": ["lin0"], "use_dora": True}),
    ("two", "Conv2d", LoraConfig, {"target_modules": ["conv2d"]}),
    ("three", "MLP", LoraConfig, {"target_modules": "all-linear", "rank_pattern": {"^foo": 16}}),
    ("another method", "MLP", IA3Config, {"target_modules": ["lin0"]}),
]

def test_it(self, r):
    LoraConfig(target_modules=["lin0"], use_dora=True)
    LoraConfig(target_modules=["lin0"], r=r)
    LoraConfig(target_parameters=["mlp.experts.down_proj"], eva_config=EvaConfig(rho=1.5))
    LoraConfig(task_type="SEQ_CLS")
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return load_script("try_peers")


def test_configurations_are_read_from_the_text_of_tests(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.configurations, "FILES", ["made"])
    (tmp_path / "test_made.py").write_text(TEXT)
    cases, left = script.configurations.cases(tmp_path)
    assert [(case.name, case.family) for case in cases] == [
        ("made:3", ""),
        ("made:5", ""),
        ("made:12 gpt_oss", "gpt_oss"),
    ]
    assert cases[0].options == {"target_modules": ["q_proj"], "use_dora": True}
    pattern = {"^model.layers.0.self_attn.q_proj": 16}
    assert cases[1].options == {"target_modules": "all-linear", "rank_pattern": pattern}
    assert cases[2].options["eva_config"].rho == 1.5
    assert left == {"not literal": 1, "no counterpart in a decoder": 2, "the same again": 1}


def test_a_case_is_equal_and_a_wrong_number_is_called_wrong(script: ModuleType, tmp_path: Path) -> None:
    """The same adapter is equal; with half of its scale logits, loss, gradients and what is merged are not."""
    adapters = script.adapters
    options: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 12}
    (tmp_path / "bases").mkdir()
    peft = adapters.theirs(script.configurations.Case("made", "llama", options), tmp_path / "bases", tmp_path)
    base = adapters.base_of("llama", tmp_path / "bases")
    verdicts = []
    for alpha in (12, 6):
        config = tmp_path / "start" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": alpha}))
        own = tmp_path / str(alpha)
        own.mkdir()
        for name in ("start", "after"):
            (own / name).symlink_to(tmp_path / name)
        mine = adapters.ours(base, own / "start", options, "", own / "mine")
        verdicts.append(adapters.verdict(peft, mine, base, own, merged=True))
    assert verdicts[0][0] == "equal", verdicts[0]
    assert verdicts[1][0] == "WRONG"
    for what in ("logits", "loss", "gradients", "merged", "in PEFT"):
        assert what in verdicts[1][1]


def test_what_peft_refuses_must_be_refused_or_read_by_it(script: ModuleType, tmp_path: Path) -> None:
    peft = {"family": "llama", "refused": "ValueError: no"}
    assert script.adapters.verdict(peft, {"fresh refused": "no"}, tmp_path, tmp_path, merged=False)[0] == "both refuse"
    verdict, why = script.adapters.verdict(peft, {}, tmp_path, tmp_path, merged=False)
    assert verdict == "WRONG"
    assert "not read by PEFT" in why
    assert script.adapters.verdict({}, {"crashed": "KeyError"}, tmp_path, tmp_path, merged=False)[0] == "CRASHED"


def test_a_loss_that_differs_is_wrong_unless_it_is_said(script: ModuleType) -> None:
    losses = script.losses
    assert losses.verdict(losses.LOSSES["dpo"], 0.5, 0.5000009)[0] == "equal"
    assert losses.verdict(losses.LOSSES["dpo"], 0.5, 0.5000011)[0] == "WRONG"
    assert losses.verdict(losses.LOSSES["dpo label_smoothing"], 0.5, 0.6)[0] == "other, said"
