"""Proofs with images: the text part split, the tower whole, and an adapter on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshlora.reading.processor import load_processor
from meshlora.reading.sources import read_records
from meshlora.reading.tokenization import tokenize
from meshlora.verify.options import Request
from meshlora.verify.request import prepare_proof
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.objectives.labels import Classify
from tests.conftest import Prove
from tests.images import conversation, write_model, write_pictures, write_rows

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
        pytest.param("gemma3", ("pp=2",), marks=NIGHTLY),
        pytest.param("qwen2_5_vl", ("pp=2", "pp=2,tp=2,sp"), marks=NIGHTLY),
        pytest.param("qwen3_vl", ("pp=2,tp=2,sp", "pp=2,dp=2", "pp=2,interleave=2"), marks=NIGHTLY),
        pytest.param("aya_vision", ("pp=2",), marks=NIGHTLY),
        pytest.param("glm4v", ("tp=2",), marks=NIGHTLY),
        pytest.param("muse_glimmer", ("tp=2,sp",), marks=NIGHTLY),  # its sizes of patches have names of their own
    ],
)
def test_twin_with_images_is_proved(family: str, topologies: tuple[str, ...], prove: Prove) -> None:
    lora: dict[str, Any] = {} if family == "qwen3_vl_moe" else {"lora": ON_ALL}
    for outcome in prove(family=family, images=True, topologies=topologies, **lora):
        assert outcome.passed, outcome.divergence or outcome.error


def test_some_sequences_of_a_step_have_no_image_and_some_have_several() -> None:
    proof = prepare_proof(Request(("dp=2",), family="qwen3_vl", images=True))
    images = proof.case.data.images
    assert images is not None
    assert {images.number(index) for index in range(proof.case.data.num_examples)} >= {0, 1, 2}
    assert {"images", "image_grid", "features"} <= proof.features_on(proof.topologies[0])
    token = proof.config.image_token_id
    trained = [sequence.input_ids[sequence.is_trained] for sequence in proof.case.data]
    assert not any((ids == token).any() for ids in trained)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its processor, and records with none to three images each."""
    root = tmp_path_factory.mktemp("own")
    write_model(root / "model", torch.float32)
    names = write_pictures(root)
    rows = [conversation(*names[: n % 4], f"what is number {n}?", answer=f"it is {n}") for n in range(10)]
    write_rows(root / "images.jsonl", *rows)
    write_rows(root / "text.jsonl", *(conversation(f"what is {n}?", answer="it") for n in range(10)))
    return root


def of_data(own: Path, file: str, **rest: Any) -> Request:
    return Request(("tp=2,sp",), model=str(own / "model"), data=str(own / file), **rest)


def test_own_records_keep_their_images(own: Path) -> None:
    proof = prepare_proof(of_data(own, "images.jsonl", images=True))
    records = read_records(own / "images.jsonl")
    processor = load_processor(own / "model", proof.config)
    whole = tokenize(records, processor.tokenizer, max_length=128, processor=lambda: processor)
    data = proof.case.data
    assert data.images is not None
    assert [data.images.number(index) for index in range(len(data))] == [n % 4 for n in range(len(data))]
    for ours, theirs in zip(data, whole, strict=False):
        assert ours.input_ids.tolist() == theirs.input_ids.tolist()
        found, expected = ours.more(), theirs.more()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert proof.key != prepare_proof(of_data(own, "text.jsonl")).key


@pytest.mark.parametrize(
    ("file", "images", "words"),
    [("images.jsonl", False, "it has images; give --images"), ("text.jsonl", True, "none of its first 10 records has")],
)
def test_data_and_images_must_agree(own: Path, file: str, images: bool, words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepare_proof(of_data(own, file, images=images))


@NIGHTLY
def test_own_records_with_images_are_proved(own: Path, prove: Prove) -> None:
    of_model = {"model": str(own / "model"), "data": str(own / "images.jsonl"), "lora": ON_ALL}
    for outcome in prove(images=True, topologies=("tp=2,sp", "dp=2"), **of_model):
        assert outcome.passed, outcome.divergence or outcome.error


@NIGHTLY
@pytest.mark.parametrize("images", [False, True])
def test_composite_resumes_and_is_split_over_dp_and_tp(images: bool, prove: Prove) -> None:
    """On text alone too, where the tower has no adapter."""
    options = {"lora": ON_ALL} if images else {}
    for outcome in prove(family="gemma3", images=images, resume=True, topologies=("dp=2,tp=2", "pp=2"), **options):
        assert outcome.passed, outcome.divergence or outcome.error


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"family": "llama"}, "its model takes no images"),
        ({"family": "gemma3", "packing": True}, "--packing with images"),
        ({"family": "gemma3", "adapters": 2}, "images with 2 adapters"),
        ({"family": "gemma3", "objective": Classify(num_labels=2)}, "--objective classify with images"),
    ],
)
def test_what_has_no_images_is_refused(request_: dict[str, Any], words: str) -> None:
    with pytest.raises((UserError, UnsupportedError), match=words):
        prepare_proof(Request(("tp=2,sp",), images=True, **request_))
