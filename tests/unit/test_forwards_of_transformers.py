"""A family whose forward transformers itself cannot run is refused in words; an error of anybody else stays one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshlora_ground.errors import UnsupportedError
from meshlora_judge.reference import losses_of, reference_model
from meshlora_judge.settings import Base
from tests.twins import make_batches, make_twin


class _NoPair(nn.Module):
    """The forward of transformers asks the rotary embedding for a pair."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(3)


def _llama(folder: Path) -> Any:
    twin = make_twin(folder, "llama")
    return reference_model(Base(str(twin / "model"), dtype="float64"), twin / "adapter")


def _raise(*_: Any) -> None:
    raise ValueError("of a hook")


def test_an_error_of_transformers_own_code_is_a_refusal(tmp_path: Path) -> None:
    model = _llama(tmp_path)
    model.get_base_model().model.rotary_emb = _NoPair()
    words = r"model_type 'llama': transformers .* itself ends in an error on its text"
    with pytest.raises(UnsupportedError, match=words):
        losses_of(model, make_batches())


def test_an_error_of_a_hook_is_none(tmp_path: Path) -> None:
    model = _llama(tmp_path)
    model.get_base_model().model.norm.register_forward_hook(_raise)
    with pytest.raises(ValueError, match="of a hook"):
        losses_of(model, make_batches())
