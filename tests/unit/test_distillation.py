"""Divergences are TRL's on the same numbers; records of teachers are read as they are written, or refused by line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from meshlora.comm.groups import Axis
from meshlora.layers.head_loss import Chunks, CrossEntropy
from meshlora.reading.readers import READERS
from meshlora.reading.records import Record
from meshlora.reading.taught import with_context
from meshlora.run.distillation.divergence import DivergenceLoss, Hidden, Likeliest
from meshlora_ground.errors import UserError
from meshlora_ground.objectives.distillation import ITSELF, Distill
from tests.for_each import for_each

TINY = Path(__file__).parents[2] / "examples" / "tiny_base"
ALONE = Axis(1, 0, (0,), None)
TOKENS, VOCAB = 11, 13
LABELS = torch.tensor([3, -100, 1, 0, -100, 12, 5, 5, 2, -100, 7])
TRAINED = LABELS != -100


@pytest.fixture(autouse=True)
def _unstable(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL warns that what is imported below may change."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def drawn(seed: int) -> Tensor:
    return 2 * torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ours(objective: Distill, student: Tensor, teacher: Hidden | Likeliest) -> Tensor:
    loss = DivergenceLoss.of(ALONE, VOCAB, torch.float64, objective, teacher)
    chunks = Chunks.of(student, lambda x: x, LABELS, None, loss)
    return CrossEntropy.apply(student, chunks, None, True) / TRAINED.sum()


def assert_same(objective: Distill, teacher: Hidden | Likeliest, student: Tensor, theirs: Tensor) -> None:
    """Loss and gradient."""
    found = ours(objective, student, teacher)
    assert found.item() == pytest.approx(theirs.item(), rel=1e-12)
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (found, theirs)]
    assert torch.allclose(*gradients, rtol=1e-10, atol=1e-14)


# Ours, and TRL's beta.
DIVERGENCES: dict[str, tuple[dict[str, Any], float]] = {
    "forward_kl": ({"divergence": "forward_kl"}, 0),
    "reverse_kl": ({"divergence": "reverse_kl"}, 1),
    "jsd": ({"divergence": "jsd", "beta": 0.3}, 0.3),
}


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_loss_and_gradient_are_those_of_gkd(divergence: str, temperature: float) -> None:
    from trl.experimental.gkd import GKDTrainer

    options, beta = DIVERGENCES[divergence]
    student, teacher = drawn(1).requires_grad_(), drawn(2)
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, LABELS, beta=beta, temperature=temperature)
    objective = Distill(teacher="a model", temperature=temperature, **options)
    assert_same(objective, Hidden(teacher[TRAINED], lambda x: x), student, theirs)


@pytest.mark.parametrize("rest", ["bucket", "renormalize"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("is_recorded", [False, True])
def test_loss_over_the_likeliest_tokens_is_that_of_trl(divergence: str, rest: Any, is_recorded: bool) -> None:
    """As its trainers have it that are given the teacher's top k: with a bucket of the rest, or without it."""
    from trl.experimental.server_distillation import server_distillation_trainer as trl

    options, beta = DIVERGENCES[divergence]
    student, teacher, k = drawn(3).requires_grad_(), drawn(4), 4
    log_p, ids = teacher.log_softmax(1).topk(k, 1)
    log_q = student.log_softmax(1).gather(1, ids)
    if rest == "bucket":
        known = torch.ones_like(ids, dtype=torch.bool)
        log_p_of_few, log_q_of_few = (trl._add_tail_bucket(each, known)[0] for each in (log_p, log_q))
    else:
        log_p_of_few, log_q_of_few = log_p.log_softmax(1), log_q.log_softmax(1)
    theirs = trl._jsd_divergence(log_q_of_few, log_p_of_few, beta)[TRAINED].sum() / TRAINED.sum()
    said: Any = Hidden(teacher[TRAINED], lambda x: x)
    if is_recorded:
        said = Likeliest(ids[TRAINED], log_p[TRAINED])
    objective = Distill(teacher="recorded" if is_recorded else "a model", top_k=k, rest=rest, **options)
    assert_same(objective, said, student, theirs)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_record_with_fewer_tokens_has_the_others_in_the_rest(divergence: str) -> None:
    options, _ = DIVERGENCES[divergence]
    student, log_p = drawn(5).requires_grad_(), drawn(6).log_softmax(1)[TRAINED]
    values, ids = log_p.topk(3, 1)
    few = Likeliest(ids[:, :2], values[:, :2])
    padded = Likeliest(
        torch.cat([ids[:, :2], torch.zeros_like(ids[:, :1])], 1), values.index_fill(1, torch.tensor([2]), -math.inf)
    )
    objective = Distill(**options)
    assert_same(objective, padded, student, ours(objective, student, few))


def test_cross_entropy_is_of_the_data_at_temperature_1() -> None:
    student, teacher = drawn(7).requires_grad_(), drawn(8)
    said = Hidden(teacher[TRAINED], lambda x: x)
    alone = ours(Distill(teacher="a model", temperature=2.0), student, said)
    objective = Distill(teacher="a model", temperature=2.0, cross_entropy=0.3)
    assert_same(objective, said, student, alone + 0.3 * F.cross_entropy(student, LABELS))


@for_each(
    ("options", "words"),
    [
        ({"context": "Be brief."}, "sees what the student sees"),
        ({"beta": 0.2}, "no effect on forward_kl"),
        ({"teacher": "a model", "rest": "renormalize"}, "all tokens are compared"),
        ({"temperature": 2.0}, "known at temperature 1 alone"),
        ({"divergence": "jsd", "beta": 1.0}, "above 0, below 1"),
        ({"reference": "base"}, "no effect"),
        ({"teacher": ""}, "it must name one"),
    ],
)
def test_option_without_effect_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Distill(**options)


# --- records


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY, local_files_only=True)


def _write(folder: Path, *rows: object) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


ROW = {
    "input_ids": [5, 6, 7, 8],
    "is_trained": [0, 0, 1, 1],
    "teacher_tokens": [[9, 7], [8]],
    "teacher_log_probs": [[-2.0, -0.5], [-0.1]],
}


def test_a_teacher_stands_at_its_tokens_likeliest_first(tmp_path: Path, tokenizer: Any) -> None:
    of_each = {"teacher_tokens": [None, None, [9, 7], [8]], "teacher_log_probs": [[], [], [-2.0, -0.5], [-0.1]]}
    data = READERS["taught"](_write(tmp_path, ROW, ROW | of_each), tokenizer, max_length=16, vocab_size=512)
    for sequence in data:
        assert [sequence.columns[f"teacher_token_{rank}"][2:].tolist() for rank in (0, 1)] == [[7, 8], [9, 0]]
        assert sequence.columns["teacher_log_prob_0"][2:].tolist() == pytest.approx([-0.5, -0.1])
        assert sequence.columns["teacher_log_prob_1"][2:].tolist() == [-2.0, -math.inf]
    cut = READERS["taught"](_write(tmp_path, ROW), tokenizer, max_length=3, vocab_size=512)
    assert cut.columns["teacher_token_0"].tolist() == [0, 0, 7]


@for_each(
    ("changes", "words"),
    [
        ({"teacher_tokens": [[9, 7]]}, "has 1 lists for 2 trained tokens"),
        ({"teacher_tokens": [[9], [8]]}, "at token 2 are not two lists of one length"),
        ({"teacher_tokens": [[9, 9], [8]]}, "has one twice at token 2"),
        ({"teacher_tokens": [[9, 700], [8]]}, "outside the vocabulary of 512"),
        ({"teacher_log_probs": [[-0.1, -0.2], [-0.1]]}, "more than 1 together"),
        ({"teacher_log_probs": [[-2.0, 0.5], [-0.1]]}, "at most 0"),
        ({"teacher_log_probs": [-2.0, 0.5]}, "not a list of lists"),
        ({"is_trained": [1, 0, 0, 0], "teacher_tokens": [], "teacher_log_probs": []}, "no trained token"),
    ],
)
def test_record_that_cannot_be_used_is_named_by_line(
    changes: dict[str, Any], words: str, tmp_path: Path, tokenizer: Any
) -> None:
    with pytest.raises(UserError, match=words) as error:
        READERS["taught"](_write(tmp_path, ROW, ROW | changes), tokenizer, max_length=16, vocab_size=512)
    assert "rows.jsonl:2" in str(error.value)


def test_record_that_cannot_be_used_is_passed_over_where_the_run_file_says_so(tmp_path: Path, tokenizer: Any) -> None:
    """Its columns are those of the rows that stay."""
    source, said = _write(tmp_path, *[ROW] * 5, ROW | {"teacher_tokens": [[9, 7]]}, *[ROW] * 5), list[str]()
    options: dict[str, Any] = {"max_length": 16, "vocab_size": 512, "say": said.append}
    data = READERS["taught"](source, tokenizer, on_bad_row="skip", **options)
    assert len(data) == 10
    assert data.columns["teacher_token_0"].tolist() == [0, 0, 7, 8] * 10
    assert any("1 of 11 rows cannot be trained, and are passed over" in line for line in said)


def test_the_teacher_alone_sees_the_context(tmp_path: Path, tokenizer: Any) -> None:
    row = {"prompt": "Name a colour:", "completion": " Red."}
    options = {"max_length": 64, "vocab_size": 2048, "context": "You like red."}
    data = READERS["in_context"](_write(tmp_path, row, row), tokenizer, **options)
    assert (data.num_examples, data.rows_per_example) == (2, 2)
    texts = [tokenizer.decode(sequence.input_ids, skip_special_tokens=True) for sequence in data]
    assert texts[:2] == ["Name a colour: Red.", "You like red.\n\nName a colour: Red."]
    trained = [sequence.input_ids[sequence.is_trained] for sequence in data]
    assert np.array_equal(trained[0], trained[1])
    with pytest.raises(UserError, match="compared at the same trained tokens"):
        READERS["in_context"](_write(tmp_path, row), tokenizer, **options | {"max_length": len(data[1].input_ids) - 2})
    with pytest.raises(UserError, match="stands before a prompt"):
        READERS["in_context"](_write(tmp_path, {"text": "a b c"}), tokenizer, **options)


def test_a_context_comes_before_what_the_system_says() -> None:
    turns = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"})
    system = {"role": "system", "content": "Be kind."}
    for messages, said in ((turns, "Be brief."), ((system, *turns), "Be brief.\n\nBe kind.")):
        found = with_context(Record(messages=messages, origin=""), "Be brief.").messages
        assert found == ({"role": "system", "content": said}, *turns)


def test_a_context_is_of_a_model_that_teaches_itself() -> None:
    objective = Distill(teacher=ITSELF, context="Be brief.")
    assert (objective.reader, objective.trained_row, objective.has_first_pass) == ("in_context", 0, True)
    assert (Distill(teacher=ITSELF).reader, Distill().reader) == ("text", "taught")
