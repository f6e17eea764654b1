"""What a recorded micro-batch is: rows of several sequences, and pairs that the trainer itself joins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshlora_ground.errors import UnsupportedError
from meshlora_ground.objective import Sft
from meshlora_ground.objectives.policies import Grpo
from meshlora_ground.objectives.preferences import Dpo, Simpo
from meshlora_judge.recording.losses import loss_of
from meshlora_judge.steps.losses import _labels_of_sides, is_packed, objective_of

ROW = torch.tensor([[0, 1, 2, 0, 1]])
ONES = torch.ones(1, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"position_ids": torch.arange(5)[None]}, False),
        ({"position_ids": ROW}, True),
        ({"position_ids": ROW, "attention_mask": ONES}, True),
        # Padding: positions there are anything, and mean nothing.
        ({"position_ids": ROW, "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}, False),
        # A mask of queries and keys says itself where the borders are.
        ({"position_ids": ROW, "attention_mask": torch.ones(1, 1, 5, 5)}, False),
    ],
)
def test_positions_that_begin_again_without_padding_are_packed_rows(given: dict[str, Any], expected: bool) -> None:
    assert is_packed(given) is expected


def test_labels_of_joined_pairs_are_their_completions() -> None:
    given = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 0], [5, 7, 0, 0, 0], [5, 6, 9, 0, 0], [5, 8, 9, 4, 0]]),
        "prompt_attention_mask": torch.tensor([[1, 1], [0, 1]]),
        "chosen_attention_mask": torch.tensor([[1, 1], [1, 0]]),
        "rejected_attention_mask": torch.tensor([[1, 0, 0], [1, 1, 1]]),
    }
    no = -100
    expected = [[no, no, 7, 8, no], [no, 7, no, no, no], [no, no, 9, no, no], [no, 8, 9, 4, no]]
    assert _labels_of_sides(given).tolist() == expected


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({"kind": "sft", "loss_type": "dft"}, Sft(loss="dft")),
        ({"kind": "dpo", "beta": 0.3}, Dpo(beta=0.3, loss=["sigmoid"])),
        (
            # TRL has a label_smoothing that this loss does not read.
            {"kind": "dpo", "loss_type": "ipo", "label_smoothing": 0.1, "ld_alpha": 0.5},
            Dpo(loss=["ipo"], length_weight=0.5),
        ),
        (
            {
                "kind": "dpo",
                "loss_type": ["hinge"],
                "f_divergence_type": "alpha_divergence",
                "f_alpha_divergence_coef": 2,
            },
            Dpo(loss=["hinge"], f_divergence="alpha_divergence", f_alpha=2),
        ),
        ({"kind": "simpo", "gamma": 0.5}, Simpo(gamma=0.5)),
        (
            {"kind": "grpo", "loss_type": "sapo", "epsilon": 0.2, "sapo_temperature_neg": 1.2, "vespo_k_pos": 2.0},
            Grpo(loss="sapo", mean_over="sequence", importance_cap=None, sapo_temperature_neg=1.2),
        ),
        (
            {"kind": "grpo", "loss_type": "cispo", "epsilon": 0.2, "epsilon_high": 5.0, "delta": 2.0},
            Grpo(loss="cispo", clip_low=1.0, clip_high=4.0, importance_cap=None),
        ),
        (
            {
                "kind": "grpo",
                "loss_type": "dapo",
                "epsilon": 0.2,
                "delta": 2.0,
                "beta": 0.1,
                "use_bias_correction_kl": True,
            },
            Grpo(delta=2.0, kl_coef=0.1, kl_correction=True, importance_cap=None),
        ),
    ],
    ids=str,
)
def test_a_recorded_loss_is_an_objective_of_the_judge(loss: dict[str, Any], expected: Any) -> None:
    assert objective_of(loss) == expected


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"kind": "distill"}, "does not have what the teacher says"),
        ({"kind": "kto"}, "reference point is of a whole step"),
        ({"kind": "reward"}, "head of one number"),
        ({"kind": "dpo", "loss_type": "aot_all"}, "no formula of it"),
        ({"kind": "grpo", "loss_type": "mine"}, "no formula of it"),
    ],
    ids=str,
)
def test_a_loss_that_a_recording_does_not_hold_is_refused_by_name(loss: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        objective_of(loss)


def test_a_trainer_of_trl_that_inherits_another_ones_class_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """GKDTrainer is an SFTTrainer, and its loss is not SFT's."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    with pytest.raises(UnsupportedError, match="a GKDTrainer: a recording does not have what the teacher says"):
        loss_of(object.__new__(GKDTrainer))


def test_smoothed_labels_of_sigmoid_are_refused_as_releases_of_trl_differ() -> None:
    from trl import DPOTrainer

    trainer = object.__new__(DPOTrainer)
    trainer.args = SimpleNamespace(loss_type=["sigmoid"], label_smoothing=0.1, beta=0.1)
    with pytest.raises(UnsupportedError, match="others do not"):
        loss_of(trainer)
    trainer.args.label_smoothing = 0.0
    assert loss_of(trainer)["loss_type"] == ["sigmoid"]
