"""Topology: text form, divisibility, places and groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology
from tests.for_each import for_each

SIZES = st.integers(1, 6)


@given(dp=SIZES, tp=SIZES, sp=st.booleans(), dp_shard=st.booleans())
def test_text_form_reads_back(dp: int, tp: int, sp: bool, dp_shard: bool) -> None:
    topology = Topology(dp=dp, tp=tp, sp=sp and tp > 1, dp_shard=dp_shard and dp > 1)
    assert Topology.parse(str(topology), world=topology.world) == topology


def test_flags_of_the_dense_axes_follow_these() -> None:
    assert str(Topology.parse("dp_shard,ep=2,sp,tp=2,dp=2")) == "dp=2,tp=2,sp,dp_shard,ep=2"
    assert Topology.parse("tp=2,dp_shard", world=4) == Topology(dp=2, tp=2, dp_shard=True)


def test_experts_repeat_over_dp_where_no_axis_of_theirs_crosses_it() -> None:
    for text, repeats in {"dp=4": True, "dp=2,tp=2": True, "dp=2,tp=2,etp=2": True, "dp=2,tp=2,ep=2": True}.items():
        assert Topology.parse(text).experts_repeat_over_dp == repeats, text
    for text in ("dp=2,ep=2", "dp=4,ep=2", "dp=2,tp=2,ep=4", "dp=2,tp=2,ep=2,etp=2"):
        assert not Topology.parse(text).experts_repeat_over_dp, text


@given(dp=SIZES, tp=SIZES, axes=st.sampled_from([{"dp"}, {"tp"}, {"dp", "tp"}]))
def test_groups_cover_every_rank_once(dp: int, tp: int, axes: set[str]) -> None:
    topology = Topology(dp=dp, tp=tp)
    groups = topology.groups_over(frozenset(axes))
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world))
    for group in groups:
        places = [topology.coordinates(rank) for rank in group]
        assert all(len({p[axis] for p in places}) == 1 for axis in {"dp", "tp"} - axes)


def test_tp_ranks_are_neighbours() -> None:
    assert Topology(dp=2, tp=2).groups_over(frozenset({"tp"})) == [[0, 1], [2, 3]]


def test_missing_dp_is_what_the_world_leaves() -> None:
    assert Topology.parse("tp=2", world=8).dp == 4
    assert Topology.parse("", world=3).dp == 3


def test_missing_dp_without_a_world_is_the_smallest_that_experts_need() -> None:
    assert Topology.parse("ep=2") == Topology(dp=2, ep=2)
    assert Topology.parse("tp=2,ep=4") == Topology(dp=2, tp=2, ep=4)
    assert Topology.parse("tp=2") == Topology(tp=2)


@for_each(
    ("text", "world", "words"),
    [
        ("tpq=2", None, "did you mean 'tp'"),
        ("tp=two", None, "whole number"),
        ("tp=\u0662", None, "whole number"),
        ("tp=0", None, "at least 1"),
        ("tp=2,tp=2", None, "twice"),
        ("sp", None, "raise tp or leave out sp"),
        ("dp=2,ring", None, "raise cp or leave out ring"),
        ("sp=maybe,tp=2", None, "flag"),
        ("tp=2,dp_shard", None, "raise dp or cp or leave out dp_shard"),
        ("dp=2,dp-shard", None, "did you mean 'dp_shard'"),
        ("dp=2,dp_shard=2", None, "flag"),
        ("tp=3", 4, "{1, 2, 4}"),
        ("dp=2,tp=2", 2, "4 processes"),
        ("dp=2,ep=3", None, "divide"),
    ],
)
def test_wrong_topology_says_what_to_do(text: str, world: int | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Topology.parse(text, world=world)
