"""Proofs with images: the text part split, the tower whole, and an adapter on both."""

from __future__ import annotations

from typing import Any

import pytest

from meshlora.common.errors import UnsupportedError, UserError
from meshlora.verify.request import Request, prepare_proof
from tests.conftest import Prove

ON_ALL = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "vision": True}
NIGHTLY = pytest.mark.proof  # the kill table has qwen3_vl and gemma3 by default


@pytest.mark.parametrize(
    ("family", "topologies"),
    [
        pytest.param("gemma3", ("tp=2,sp",), marks=NIGHTLY),
        pytest.param("qwen3_vl", ("tp=2,sp", "dp=2,tp=2"), marks=NIGHTLY),
        pytest.param("qwen2_5_vl", ("tp=2,sp",), marks=NIGHTLY),
        pytest.param("mistral3", ("tp=2,sp",), marks=NIGHTLY),
        pytest.param("llama4", ("tp=2,sp",), marks=NIGHTLY),
        pytest.param("qwen3_vl_moe", ("tp=2,sp,ep=2",), marks=NIGHTLY),
    ],
)
def test_twin_with_images_is_proved(family: str, topologies: tuple[str, ...], prove: Prove) -> None:
    lora: dict[str, Any] = {} if family == "qwen3_vl_moe" else {"lora": ON_ALL}
    for outcome in prove(family=family, images=True, topologies=topologies, **lora):
        assert outcome.passed, outcome.divergence or outcome.error


def test_some_sequences_of_a_step_have_no_image_and_some_have_several() -> None:
    proof = prepare_proof(Request(("dp=2",), family="qwen3_vl", images=True))
    images = proof.case.images
    assert images is not None
    assert {images.number(index) for index in range(proof.case.data.num_examples)} >= {0, 1, 2}
    assert {"images", "image_grid", "features"} <= proof.features_on(proof.topologies[0])
    token = proof.config.image_token_id
    trained = [sequence.input_ids[sequence.is_trained] for sequence in proof.case.data]
    assert not any((ids == token).any() for ids in trained)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"family": "llama"}, "its model takes no images"),
        ({"family": "gemma3", "packing": True}, "--images with --packing"),
        ({"family": "gemma3", "adapters": 2}, "--images with --adapters"),
    ],
)
def test_what_has_no_images_is_refused(request_: dict[str, Any], words: str) -> None:
    with pytest.raises((UserError, UnsupportedError), match=words):
        prepare_proof(Request(("tp=2,sp",), images=True, **request_))
