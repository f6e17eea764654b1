"""Capture copies, and is not disturbed by recomputed activations; the judge puts parts together by its own rules."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from meshlora_ground.topology import Topology
from meshlora_judge.capture import Capture, MicroBatchCapture
from meshlora_judge.ownership import fingerprints, places
from meshlora_judge.pieces import in_pieces, mask_of, rows_of
from meshlora_judge.results import relative
from meshlora_judge.trace import Trace
from meshlora_judge.twin import twin_config
from meshlora_judge.unshard import (
    Layout,
    Ownership,
    Piece,
    ShapeError,
    canonical,
    factor_pieces,
    is_complete,
    layout_of,
    token_pieces,
)
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


def test_what_acts_on_logits_is_not_captured() -> None:
    """Ranks have parts of a vocabulary there; logits are compared as they leave."""
    model = AutoModelForCausalLM.from_config(twin_config("inkling2_text"))
    plain, wrapped = _captured(model), _captured(get_peft_model(model, LoraConfig(target_modules=["q_proj"])))
    for micro in (plain, wrapped):
        assert any(name.endswith("lm_head") for name in micro.forward)
        assert not [name for name in micro.forward if "softcap" in name]


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
    ownership = Ownership(ranks, reference, Topology.parse(topology))
    found = canonical(reference, ownership.tokens, "forward", name)
    assert found is not None
    return token_pieces(ownership, "forward", name, *found), found[0]


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
    assert relative(pieces, whole) == 0
    assert len({piece.copy for piece in pieces}) == (2 if kind == "whole" else 1)


def _flat_pieces(ranks: list[Trace]) -> tuple[list[Piece], Tensor]:
    reference = _reference()
    for micro in reference.micro_batches:
        micro.forward["m"] = micro.forward["m"].flatten(0, 1)
    ownership = Ownership(ranks, reference, Topology.parse("tp=2,sp"))
    found = canonical(reference, ownership.tokens, "forward", "m")
    assert found is not None
    assert found[1] == Layout(1)
    return token_pieces(ownership, "forward", "m", *found), found[0]


def test_sequences_of_dp_ranks_are_put_together_and_a_missing_one_is_seen() -> None:
    ranks = [Trace(micro_batches=[_micro(A, C, length=4)]), Trace(micro_batches=[_micro(B, length=2)])]
    for trace in ranks:
        for micro in trace.micro_batches:
            micro.forward["m"] = _output(micro)
    pieces, whole = _pieces(ranks, "dp=2")
    assert relative(pieces, whole) == 0
    assert not is_complete(pieces[:1], whole)
    assert relative(pieces[:1], whole) == math.inf
    twice = Piece(1, pieces[0].copy, pieces[0].values * 1.5, pieces[0].rows)
    assert relative([*pieces, twice], whole) > 0.1  # what is there twice is compared twice


def test_swapped_slices_are_different() -> None:
    ranks = []
    for rank in (1, 0):
        micro = _micro(A, B, length=3)
        micro.forward["m"] = _output(micro).flatten(0, 1).chunk(2)[rank].unsqueeze(0)
        other = _micro(C, length=4)
        other.forward["m"] = _output(other).flatten(0, 1).chunk(2)[rank].unsqueeze(0)
        ranks.append(Trace(micro_batches=[micro, other]))
    pieces, whole = _pieces(ranks, "tp=2,sp")
    assert relative(pieces, whole) > 0.01


def test_layouts_are_told_by_the_tokens() -> None:
    micro = _micro(A, B, length=3)
    shapes = {(2, 3, 8): Layout(2), (6, 8): Layout(1), (1, 3, 8): Layout(2, is_once=True)}
    shapes[2, 5, 3, 8] = Layout(2, is_swapped=True)
    assert {shape: layout_of(torch.Size(shape), micro) for shape in shapes} == shapes
    assert layout_of(torch.Size((2, 8, 7)), micro) is None


def test_a_part_that_cannot_be_one_is_an_error() -> None:
    whole = torch.ones(8, 6)
    ownership = Ownership([Trace(), Trace()], Trace(), Topology(tp=2))
    for shape in [(8, 4), (4, 3), (8, 6, 1), (3, 6)]:
        with pytest.raises(ShapeError):
            factor_pieces([{"f": torch.ones(shape)}] * 2, ownership, "f", whole)
    with pytest.raises(ShapeError, match="rank 1 has no f"):
        factor_pieces([{"f": whole}, {}], ownership, "f", whole)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite_is_never_within_a_limit(value: float) -> None:
    whole = torch.ones(4)
    assert relative([Piece(0, (), torch.tensor([1.0, 1.0, 1.0, value]))], whole) == math.inf


def test_zero_where_the_reference_is_not_is_never_within_a_limit() -> None:
    assert relative([Piece(0, (), torch.zeros(4))], torch.full((4,), 1e-30)) == math.inf
    assert relative([Piece(0, (), torch.zeros(4))], torch.zeros(4)) == 0
    assert relative([Piece(0, (), torch.full((4,), 1e-9))], torch.zeros(4)) > 1


def test_worst_copy_counts_not_the_mean_of_copies() -> None:
    whole = torch.ones(4)
    pieces = [Piece(0, (0,), whole), Piece(1, (1,), whole * 1.5)]
    assert relative(pieces, whole) == pytest.approx(0.5)


def _weight(rows: int, columns: int = 4) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _model(weight: Tensor) -> nn.Module:
    """A model whose one linear is `m`."""
    model, linear = nn.Module(), nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight)
    model.m = linear
    return model


def _held(weight: Tensor, *indices: list[int]) -> tuple[Ownership, list[Trace]]:
    """An ownership of ranks that hold the rows `indices[rank]` of `weight`, -1 for padding, and their traces."""

    def trace(weight: Tensor) -> Trace:
        rows, columns = fingerprints(_model(weight))
        return Trace(rows=rows, columns=columns)

    padded = torch.cat([weight, torch.zeros(1, weight.shape[1], dtype=weight.dtype)])
    ranks = [trace(padded[index]) for index in indices]
    return Ownership(ranks, trace(weight), Topology(tp=len(ranks))), ranks


# [Q|K|V] of 4 query heads and 2 key/value heads of one row each: on 2 ranks, and on 4, where two share a k and a v.
FUSED = ([0, 1, 4, 6], [2, 3, 5, 7])
SHARED = ([0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7])
PADDED = ([0, 1, 2], [3, 4, 5], [6, 7, -1])


def test_rows_of_bfloat16_numbers_are_told_apart() -> None:
    """In float64 their lower 45 bits are 0: products alone gave one of two in a thousand rows the print of another."""
    matrix = torch.nn.Linear(64, 8000, bias=False, dtype=torch.bfloat16)
    rows, _ = fingerprints(nn.Sequential(matrix))
    assert len(rows["0"].unique()) == 8000


@pytest.mark.parametrize("held", [FUSED, SHARED, PADDED], ids=["fused", "shared", "padded"])
def test_rows_that_a_rank_holds_are_found_by_content(held: tuple[list[int], ...]) -> None:
    ownership, _ = _held(_weight(8), *held)
    for rank, index in enumerate(held):
        assert ownership.index(rank, "m", "rows", len(index), 8, "").tolist() == index
    whole = _weight(8, 2)
    padded = torch.cat([whole, torch.full((1, 2), 0.5, dtype=whole.dtype)])  # what is in the padding is nobody's
    factors = [{"m.lora_B": padded[index]} for index in held]
    pieces = factor_pieces(factors, ownership, "m.lora_B", whole)
    assert [piece.index.tolist() for piece in pieces] == [[i for i in index if i >= 0] for index in held]  # type: ignore[union-attr]
    assert is_complete(pieces, whole)
    assert relative(pieces, whole) == 0


def test_shared_rows_that_differ_between_ranks_are_seen() -> None:
    ownership, _ = _held(_weight(8), *SHARED)
    whole = _weight(8, 2)
    factors = [{"m.lora_B": whole[index].clone()} for index in SHARED]
    factors[1]["m.lora_B"][1] *= 2
    pieces = factor_pieces(factors, ownership, "m.lora_B", whole)
    assert relative(pieces, whole) > 0.1


def test_factor_rows_that_do_not_go_with_the_base_are_different() -> None:
    ownership, _ = _held(_weight(8), *FUSED)
    whole = _weight(8, 2)
    pieces = factor_pieces([{"m.lora_B": part} for part in whole.chunk(2)], ownership, "m.lora_B", whole)
    assert relative(pieces, whole) > 0.1


def test_outputs_follow_the_rows_of_the_weight() -> None:
    held, ranks = _held(_weight(4), [0, 2], [1, 3])
    for rank, index in enumerate(([0, 2], [1, 3])):
        for micro in (_micro(A, B, length=3), _micro(C, length=4)):
            micro.forward["m"] = _output(micro)[..., index]
            ranks[rank].micro_batches.append(micro)
    whole = dataclasses.replace(_reference(), rows=held.reference.rows)
    ownership = Ownership(ranks, whole, held.topology)
    found = canonical(whole, ownership.tokens, "forward", "m")
    assert found is not None
    pieces = token_pieces(ownership, "forward", "m", *found)
    assert relative(pieces, found[0]) == 0


def test_columns_of_a_transposed_weight_are_its_inputs() -> None:
    plain, transposed, conv = _model(_weight(6)), nn.Module(), Conv1D(6, 4)
    conv.weight = nn.Parameter(_weight(6).T)
    transposed.m = conv
    assert all(torch.equal(a["m"], b["m"]) for a, b in zip(fingerprints(plain), fingerprints(transposed), strict=True))


def test_rows_that_are_alike_are_taken_in_order_or_not_told() -> None:
    weight = _weight(6)
    weight[1] = weight[4]
    whole = fingerprints(_model(weight))[0]["m"]
    assert places(whole[:3], whole, rank=0, size=2).tolist() == [0, 1, 2]  # type: ignore[union-attr]
    assert places(whole[[0, 2, 3]], whole, rank=0, size=2).tolist() == [0, 2, 3]  # type: ignore[union-attr]
    assert places(whole[[4, 0, 2]], whole, rank=0, size=2) is None


def test_rows_of_another_weight_are_not_told() -> None:
    whole = fingerprints(_model(_weight(6)))[0]["m"]
    other = fingerprints(_model(_weight(6) + 1))[0]["m"]
    assert places(other[:3], whole, rank=0, size=2) is None


def test_adapter_is_read_by_pieces_and_b_outside_them_is_found() -> None:
    config, pieces = twin_config("gpt2"), {"c_attn": ["q", "v"]}
    width = config.hidden_size
    a, b = _weight(4, width), _weight(3 * width)
    b *= mask_of(config, "h.0.attn.c_attn", ["q", "v"], (3 * width, 4))
    names = {"h.0.attn.c_attn.lora_A": a, "h.0.attn.c_attn.lora_B": b}
    found = in_pieces(config, names, pieces)
    assert {name.rpartition("lora_")[2] for name in found} == {"A.q", "A.v", "B.q", "B.v"}
    assert torch.equal(found["h.0.attn.c_attn.lora_A.v"], a[2:])
    assert torch.equal(found["h.0.attn.c_attn.lora_B.q"], b[:width, :2])
    assert torch.equal(found["h.0.attn.c_attn.lora_B.v"], b[2 * width :, 2:])
    b[width, 0] = 1e-9  # a row of k
    outside = in_pieces(config, names, pieces)["h.0.attn.c_attn.lora_B outside its pieces"]
    assert outside.nonzero().tolist() == [[width, 0]]


def test_rows_of_shared_heads_are_fewer() -> None:
    config = twin_config("phi3", num_attention_heads=8, num_key_value_heads=2)
    rows = {piece: rows_of(config, "self_attn.qkv_proj", piece, 12 * 8).tolist() for piece in "qkv"}
    assert rows == {"q": [*range(64)], "k": [*range(64, 80)], "v": [*range(80, 96)]}
    assert rows_of(config, "mlp.gate_up_proj", "up", 10).tolist() == [*range(5, 10)]
