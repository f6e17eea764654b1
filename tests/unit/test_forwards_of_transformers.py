"""A family whose forward transformers itself cannot run is refused in words; an error of anybody else stays one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from meshlora_ground.errors import UnsupportedError
from meshlora_judge.reference import check_forward
from meshlora_judge.settings import Base
from tests.twins import make_batches, make_twin

_OWN = ValueError("of somebody")


def _one(*_: object, **__: object) -> Tensor:
    return torch.zeros(3)  # the forward asks for a pair


def test_a_forward_that_transformers_cannot_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Base(str(make_twin(tmp_path, "llama") / "model"), dtype="float64")
    check_forward(base, make_batches(), _OWN)  # of what was around its forward
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", _one)
    check_forward(base, make_batches(), TypeError("another"))
    check_forward(base, make_batches(), ValueError("can't allocate memory"))
    words = r"model_type 'llama': transformers .* itself ends in an error on its text: too many values"
    with pytest.raises(UnsupportedError, match=words):
        check_forward(base, make_batches(), _OWN)
