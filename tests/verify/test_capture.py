"""Capture copies, and is not disturbed by recomputed activations; the judge puts parts together by its own rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from meshlora.oracle.capture import Capture, MicroBatchCapture
from meshlora.oracle.judge import _relative
from meshlora.oracle.trace import Trace
from meshlora.oracle.unshard import (
    Layout,
    Piece,
    ShapeError,
    Tokens,
    canonical,
    factor_pieces,
    is_complete,
    layout_of,
    token_pieces,
)
from meshlora.plan.topology import Topology
from meshlora.plan.twin import twin_config
from tests.twins import make_batches


class _InPlace(nn.Module):
    """Overwrites what its linear returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.linear(torch.eye(4)[input_ids]).mul_(-2.0)


def test_capture_copies_what_is_overwritten_later() -> None:
    model, ids = _InPlace(), torch.tensor([[0, 1]])
    with Capture(model) as capture:
        model(input_ids=ids, attention_mask=torch.ones_like(ids)).sum().backward()
    (micro,) = capture.micro_batches
    assert torch.equal(micro.forward["linear"], model.linear.weight.T[ids].detach())
    assert torch.equal(micro.forward[""], -2 * micro.forward["linear"])
    assert torch.equal(micro.backward["linear"], torch.full((1, 2, 4), -2.0))


def _captured(model: Any) -> MicroBatchCapture:
    batch = make_batches()
    with Capture(model) as capture:
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits.sum().backward()
    (micro,) = capture.micro_batches
    return micro


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_recomputation_is_not_captured_twice(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(twin_config("llama"), dtype=torch.float64, attn_implementation="eager")
    model.train()
    plain = _captured(model)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    recomputed = _captured(model)
    assert list(recomputed.forward) == list(plain.forward)
    assert all(torch.equal(recomputed.forward[name], plain.forward[name]) for name in plain.forward)
    assert recomputed.backward.keys() == plain.backward.keys()
    assert all(torch.allclose(recomputed.backward[n], plain.backward[n], rtol=1e-12) for n in plain.backward)


def _micro(*sequences: list[int], length: int) -> MicroBatchCapture:
    """A right-padded micro-batch."""
    ids = torch.zeros(len(sequences), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    return MicroBatchCapture(ids, mask)


def _output(micro: MicroBatchCapture) -> Tensor:
    """A module's output `[B, S, 4]` that tells its token, with rubbish at padding."""
    values = torch.stack([micro.input_ids * k for k in (1, 10, 100, 1000)], dim=-1).double()
    return values + (1 - micro.attention_mask)[..., None] * 0.123


A, B, C = [11, 12, 13], [21, 22], [31, 32, 33, 34]


def _reference() -> Trace:
    micros = [_micro(A, B, length=3), _micro(C, length=4)]
    for micro in micros:
        micro.forward["m"] = _output(micro)
    return Trace(micro_batches=micros, order=["m"])


def _pieces(ranks: list[Trace], topology: str, name: str = "m") -> tuple[list[Piece], Tensor]:
    reference = _reference()
    tokens = Tokens(reference)
    found = canonical(reference, tokens, "forward", name)
    assert found is not None
    rows = [tokens.rows(trace.micro_batches) for trace in ranks]
    return token_pieces(ranks, rows, Topology.parse(topology), "forward", name, *found), found[0]


def test_canonical_order_leaves_padding_out() -> None:
    whole = _pieces([_reference()], "")[1]
    assert whole[:, 0].tolist() == [*A, *B, *C]


@pytest.mark.parametrize("kind", ["whole", "features", "tokens", "flat tokens"])
def test_parts_of_tp_ranks_are_put_together_in_global_order(kind: str) -> None:
    ranks = []
    for rank in range(2):
        micros = [_micro(C, A, length=4), _micro(B, length=2)]  # grouped, padded and ordered in another way
        for micro in micros:
            value = _output(micro)
            if kind == "features":
                value = value.chunk(2, dim=2)[rank]
            elif kind != "whole":
                value = value.flatten(0, 1).chunk(2)[rank]
                value = value if kind == "flat tokens" else value.unsqueeze(0)
            micro.forward["m"] = value
        ranks.append(Trace(micro_batches=micros))
    pieces, whole = _pieces(ranks, "tp=2,sp") if kind != "flat tokens" else _flat_pieces(ranks)
    assert _relative(pieces, whole) == 0
    assert len({piece.copy for piece in pieces}) == (2 if kind == "whole" else 1)


def _flat_pieces(ranks: list[Trace]) -> tuple[list[Piece], Tensor]:
    reference = _reference()
    for micro in reference.micro_batches:
        micro.forward["m"] = micro.forward["m"].flatten(0, 1)
    tokens = Tokens(reference)
    found = canonical(reference, tokens, "forward", "m")
    assert found is not None
    assert found[1] == Layout(1)
    rows = [tokens.rows(trace.micro_batches) for trace in ranks]
    return token_pieces(ranks, rows, Topology.parse("tp=2,sp"), "forward", "m", *found), found[0]


def test_sequences_of_dp_ranks_are_put_together_and_a_missing_one_is_seen() -> None:
    ranks = [Trace(micro_batches=[_micro(A, C, length=4)]), Trace(micro_batches=[_micro(B, length=2)])]
    for trace in ranks:
        for micro in trace.micro_batches:
            micro.forward["m"] = _output(micro)
    pieces, whole = _pieces(ranks, "dp=2")
    assert _relative(pieces, whole) == 0
    assert not is_complete(pieces[:1], whole)
    assert _relative(pieces[:1], whole) == math.inf
    assert _relative([*pieces, pieces[0]], whole) == math.inf  # and one that is there twice


def test_swapped_slices_are_different() -> None:
    ranks = []
    for rank in (1, 0):
        micro = _micro(A, B, length=3)
        micro.forward["m"] = _output(micro).flatten(0, 1).chunk(2)[rank].unsqueeze(0)
        other = _micro(C, length=4)
        other.forward["m"] = _output(other).flatten(0, 1).chunk(2)[rank].unsqueeze(0)
        ranks.append(Trace(micro_batches=[micro, other]))
    pieces, whole = _pieces(ranks, "tp=2,sp")
    assert _relative(pieces, whole) > 0.01


def test_layouts_are_told_by_the_tokens() -> None:
    micro = _micro(A, B, length=3)
    shapes = {(2, 3, 8): Layout(2), (6, 8): Layout(1), (1, 3, 8): Layout(2, is_once=True)}
    shapes[2, 5, 3, 8] = Layout(2, is_swapped=True)
    assert {shape: layout_of(torch.Size(shape), micro) for shape in shapes} == shapes
    assert layout_of(torch.Size((2, 8, 7)), micro) is None


def test_a_part_that_cannot_be_one_is_an_error() -> None:
    whole = torch.ones(8, 6)
    for shape in [(8, 4), (4, 3), (8, 6, 1), (3, 6)]:
        with pytest.raises(ShapeError):
            factor_pieces([{"f": torch.ones(shape)}] * 2, Topology(tp=2), "f", whole)
    with pytest.raises(ShapeError, match="rank 1 has no f"):
        factor_pieces([{"f": whole}, {}], Topology(tp=2), "f", whole)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite_is_never_within_a_limit(value: float) -> None:
    whole = torch.ones(4)
    assert _relative([Piece(0, (), torch.tensor([1.0, 1.0, 1.0, value]))], whole) == math.inf


def test_zero_where_the_reference_is_not_is_never_within_a_limit() -> None:
    assert _relative([Piece(0, (), torch.zeros(4))], torch.full((4,), 1e-30)) == math.inf
    assert _relative([Piece(0, (), torch.zeros(4))], torch.zeros(4)) == 0
    assert _relative([Piece(0, (), torch.full((4,), 1e-9))], torch.zeros(4)) > 1


def test_worst_copy_counts_not_the_mean_of_copies() -> None:
    whole = torch.ones(4)
    pieces = [Piece(0, (0,), whole), Piece(1, (1,), whole * 1.5)]
    assert _relative(pieces, whole) == pytest.approx(0.5)
