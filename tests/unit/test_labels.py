"""Labels of a loop of one's own: those of Hugging Face's models, which are not shifted, would train another task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import meshlora
from meshlora.layers.head_loss import _check_labels
from meshlora.train.batch import Batch
from meshlora.train.losses import batch_log_probabilities, check_shifted, shifted_loss
from meshlora_ground.errors import UserError
from meshlora_judge.twin import twin_config
from tests.for_each import for_each

TEXT = [[5, 6, 7, 8, 9, 0, 0], [5, 3, 3, 4, 5, 6, 0]]
MASK = [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]]


def _shifted(labels: Tensor) -> Tensor:
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def _of_hugging_face(ids: Tensor, mask: Tensor, prompt: int) -> Tensor:
    """As its collators make them: the ids, -100 at padding and for the first `prompt` tokens."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :prompt] = -100
    return labels


@pytest.fixture(scope="module")
def model() -> Any:
    return meshlora.load(twin_config("llama"), lora=LoraConfig(target_modules=["q_proj"]))


def _log_probabilities(model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return batch_log_probabilities(model, Batch(ids, mask, labels, int((labels >= 0).sum()), ids))


LOSSES: dict[str, Callable[..., Tensor]] = {"shifted_loss": shifted_loss, "batch_log_probabilities": _log_probabilities}


@pytest.mark.parametrize("name", LOSSES)
def test_labels_of_hugging_face_would_train_each_token_to_repeat_itself(name: str, model: Any) -> None:
    ids, mask = torch.tensor(TEXT), torch.tensor(MASK)
    labels = _of_hugging_face(ids, mask, prompt=1)
    with pytest.raises(UserError, match=r"pad\(labels\[:, 1:\], \(0, 1\), value=-100\)"):
        LOSSES[name](model, ids, mask, labels)
    LOSSES[name](model, ids, mask, _shifted(labels))


@for_each("prompt", range(5))
@for_each("has_mask", [True, False])
def test_unshifted_labels_are_seen_behind_any_prompt(prompt: int, has_mask: bool) -> None:
    ids, mask = torch.tensor(TEXT), torch.tensor(MASK)
    labels = _of_hugging_face(ids, mask, prompt)
    with pytest.raises(UserError, match="the token after"):
        check_shifted(ids, labels, mask if has_mask else None, None)
    check_shifted(ids, _shifted(labels), mask if has_mask else None, None)


def _packed() -> tuple[Tensor, Tensor]:
    """Two sequences of one token each in a row; their last labels lie beyond the row's tokens."""
    return torch.tensor([[7, 7, 7, 8, 8, 8]]), torch.tensor([[0, 1, 2, 0, 1, 2]])


# ids, labels, mask, position ids: each of them right, and most of their labels the token at its place.
HONEST: dict[str, tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = {
    "one token all along": (torch.full((2, 6), 7), torch.full((2, 6), 7), None, None),
    "one answer, the last word of the prompt": (
        torch.tensor([[5, 7, 0, 0]]),
        torch.tensor([[-100, 7, -100, -100]]),
        torch.tensor([[1, 1, 0, 0]]),
        None,
    ),
    "packed": (_packed()[0], torch.tensor([[-100, -100, 7, -100, -100, 8]]), None, _packed()[1]),
    "a row of its own number in the mask": (
        _packed()[0],
        torch.tensor([[-100, -100, 7, -100, -100, 8]]),
        torch.tensor([[1, 1, 1, 2, 2, 2]]),
        None,
    ),
    "of a teacher's choice": (torch.tensor([[3, 4, 5]]), torch.tensor([[9, 9, -100]]), None, None),
    "nothing is trained": (torch.tensor([[3, 4, 5]]), torch.full((1, 3), -100), None, None),
}


@pytest.mark.parametrize("name", HONEST)
def test_shifted_labels_are_never_taken_for_unshifted_ones(name: str) -> None:
    ids, labels, mask, positions = HONEST[name]
    check_shifted(ids, labels, mask, positions)


def test_labels_without_the_first_column_would_not_fit() -> None:
    ids = torch.tensor(TEXT)
    with pytest.raises(UserError, match=r"labels \[2, 6\] and input_ids \[2, 7\]"):
        check_shifted(ids, ids[:, 1:], None, None)


@pytest.mark.parametrize("function", [meshlora.language_model_loss, meshlora.token_scores])
def test_shifted_labels_would_train_each_token_to_foresee_two(function: Callable[..., Any], model: Any) -> None:
    ids, mask = torch.tensor(TEXT), torch.tensor(MASK)
    labels = _of_hugging_face(ids, mask, prompt=1)
    with pytest.raises(UserError, match="labels that are shifted already"):
        function(model, ids, mask, _shifted(labels))
    function(model, ids, mask, labels)


def test_scores_stand_at_their_own_tokens(model: Any) -> None:
    ids, mask = torch.tensor(TEXT), torch.tensor(MASK)
    labels = _of_hugging_face(ids, mask, prompt=2)
    found = meshlora.token_scores(model, ids, mask, labels)
    log_p = model(input_ids=ids, attention_mask=mask).logits.float().log_softmax(-1)
    expected = log_p[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(found.log_probs[:, 1:], expected * (labels[:, 1:] != -100))
    assert not found.log_probs[:, :2].any()
    total = meshlora.language_model_loss(model, ids, mask, labels)
    torch.testing.assert_close(-found.log_probs.sum(), total)


@pytest.mark.parametrize("label", [-1, 64])
def test_a_label_that_belongs_to_no_rank_is_named(label: int) -> None:
    with pytest.raises(UserError, match=f"label {label}: is not in the vocabulary of 64"):
        _check_labels(torch.tensor([0, label, 63]), 64)
    _check_labels(torch.tensor([0, 63]), 64)
