"""Layouts: exact permutations, with the vectors that other trainers use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlora.plan.layout import Layout, Piece


def qkv_blocks(rows: int, q: int, *, unit: int = 1) -> Layout:
    kv = (rows - q) // 2
    return Layout((Piece("q", q // unit, unit), Piece("k", kv // unit, unit), Piece("v", kv // unit, unit)))


def test_packed_qkv_vectors_of_another_trainer() -> None:
    """The rows that a C++ trainer with packed [Q|K|V] files gives to each rank."""
    assert qkv_blocks(12, 4).rows(rank=1, size=2).tolist() == [2, 3, 6, 7, 10, 11]
    assert qkv_blocks(16, 8).rows(rank=2, size=4).tolist() == [4, 5, 10, 14]
    packed = torch.arange(12)
    shards = [packed[:6], packed[6:]]
    assert qkv_blocks(12, 4).join(shards, 0).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


def test_interleaved_per_head_keeps_heads_together() -> None:
    """GPT-NeoX: [q k v] of head 0, then of head 1, ..."""
    layout = Layout((Piece("q", 4, 2), Piece("k", 4, 2), Piece("v", 4, 2)), groups=4)
    assert layout.rows(rank=1, size=2).tolist() == list(range(12, 24))
    assert layout.piece_rows("k").tolist() == [2, 3, 8, 9, 14, 15, 20, 21]
    assert layout.piece_rows("k", rank=1, size=2).tolist() == [2, 3, 8, 9]


def test_interleaved_per_group_with_fewer_groups_than_ranks_replicates_k_and_v() -> None:
    """Falcon's newer decoders: [q q k v] of group 0, then of group 1; on four ranks each group lies on two."""
    layout = Layout((Piece("q", 4, 1), Piece("k", 2, 1, True), Piece("v", 2, 1, True)), groups=2)
    assert layout.rows(rank=0, size=2).tolist() == [0, 1, 2, 3]
    assert [layout.rows(rank=rank, size=4).tolist() for rank in range(4)] == [
        [0, 2, 3],
        [1, 2, 3],
        [4, 6, 7],
        [5, 6, 7],
    ]
    assert {run.piece: run.copies for run in layout.runs(rank=3, size=4)} == {"q": 1, "k": 2, "v": 2}


def test_local_groups_that_do_not_shrink() -> None:
    """CodeGen reads its qkv in four groups on any width: with two heads a group, a rank holds one of each group."""
    layout = Layout((Piece("q", 8, 1), Piece("v", 8, 1), Piece("k", 8, 1)), groups=4, local_groups=4)
    # Rank 1 has heads 4 to 7, of the groups 2 and 3, and its own groups are of one head.
    assert layout.rows(rank=1, size=2).tolist() == [12, 14, 16, 13, 15, 17, 18, 20, 22, 19, 21, 23]


def test_padded_vocabulary() -> None:
    layout = Layout.padded(10)
    whole = torch.arange(1.0, 11.0)
    parts = [layout.cut(whole, 0, rank=rank, size=4) for rank in range(4)]
    assert [part.tolist() for part in parts] == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 0, 0]]
    assert torch.equal(layout.join(parts, 0), whole)
    assert Layout.padded(3).runs(rank=3, size=4)[0].size == 0


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """(a layout, a number of ranks that it can be split over)."""
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    pieces = []
    for name in "qkvgu"[: draw(st.integers(1, 4))]:
        per_group = draw(st.integers(1, 6))
        pieces.append(Piece(name, groups * per_group, draw(st.integers(1, 3)), can_replicate=name in "kv"))
    layout = Layout(tuple(pieces), groups=groups)
    if not layout.can_split(size):
        size = 1
    return layout, size


@settings(max_examples=300, deadline=None)
@given(_layouts(), st.integers(0, 1))
def test_cut_and_join_are_inverse(given: tuple[Layout, int], dim: int) -> None:
    layout, size = given
    shape = (layout.size, 2) if dim == 0 else (2, layout.size)
    whole = torch.arange(2 * layout.size).view(shape)
    parts = [layout.cut(whole, dim, rank=rank, size=size) for rank in range(size)]
    assert all(part.shape[dim] == layout.local_size(size) for part in parts)
    assert torch.equal(layout.join(parts, dim), whole)


@settings(max_examples=300, deadline=None)
@given(_layouts())
def test_every_row_lies_on_as_many_ranks_as_its_run_says(given: tuple[Layout, int]) -> None:
    layout, size = given
    seen, copies = torch.zeros(layout.size), torch.zeros(layout.size)
    for rank in range(size):
        for run in layout.runs(rank=rank, size=size):
            seen[run.start : run.stop] += 1
            copies[run.start : run.stop] = run.copies
    assert torch.equal(seen, copies)
    if layout.copies(size) == {1}:
        rows = torch.cat([layout.rows(rank=rank, size=size) for rank in range(size)])
        assert torch.equal(rows.sort().values, torch.arange(layout.size))


@settings(max_examples=200, deadline=None)
@given(_layouts())
def test_pieces_partition_what_a_rank_holds(given: tuple[Layout, int]) -> None:
    layout, size = given
    rows = torch.cat([layout.piece_rows(piece.name, rank=0, size=size) for piece in layout.pieces])
    assert torch.equal(rows.sort().values, torch.arange(layout.local_size(size)))


def test_a_share_that_does_not_go_even_is_a_mistake() -> None:
    assert not Layout.plain(6).can_split(4)
    with pytest.raises(AssertionError):
        Layout.plain(6).runs(rank=0, size=4)
