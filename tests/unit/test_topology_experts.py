"""The axes of experts: sizes, places, groups, and the text form of all of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlora_ground.errors import UserError
from meshlora_ground.topology import EXPERT_AXES, Topology, divisors
from tests.for_each import for_each

SUBSETS = [frozenset(axes) for number in (1, 2, 3) for axes in itertools.combinations(EXPERT_AXES, number)]
# Every way to split up to 16 ranks over both meshes.
ALL = [
    Topology(dp=world // tp, tp=tp, ep=ep, etp=both // ep)
    for world in range(1, 17)
    for tp in divisors(world)
    for both in divisors(world)
    for ep in divisors(both)
]


@for_each("world", range(1, 17))
def test_sizes_that_divide_the_world_work_and_all_others_are_refused_with_those_that_do(world: int) -> None:
    for tp, ep, etp in itertools.product(divisors(world), range(1, world + 2), range(1, world + 2)):
        sizes = {"dp": world // tp, "tp": tp, "ep": ep, "etp": etp}
        if world % (ep * etp):
            allowed = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
            with pytest.raises(UserError) as caught:
                Topology(**sizes)
            assert str(caught.value).startswith(f"ep*etp={ep * etp} with dp*tp={world}: ep*etp must divide dp*tp; use ")
            assert str(caught.value).endswith(f"use ep*etp in {{{allowed}}}")
        else:
            topology = Topology(**sizes)
            assert topology.world == world == topology.edp * ep * etp
            assert topology.expert_sizes == {"edp": world // (ep * etp), "ep": ep, "etp": etp}


def test_ranks_lie_on_the_axes_of_experts_with_the_last_one_fastest() -> None:
    for topology in ALL:
        sizes = [range(size) for size in topology.expert_sizes.values()]
        places = [tuple(topology.expert_coordinates(rank).values()) for rank in range(topology.world)]
        assert places == list(itertools.product(*sizes)), topology
        assert tuple(topology.expert_coordinates(0)) == EXPERT_AXES


def test_groups_over_axes_of_experts_share_all_other_coordinates() -> None:
    for topology, axes in itertools.product(ALL, SUBSETS):
        groups = topology.groups_over(axes)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world))
        for group in groups:
            assert group == sorted(group)
            assert len(group) == topology.size_over(axes)
            others = [[topology.expert_coordinates(rank)[axis] for axis in set(EXPERT_AXES) - axes] for rank in group]
            assert all(other == others[0] for other in others)


def test_ranks_that_share_a_layer_of_experts_are_neighbours() -> None:
    topology = Topology(dp=4, tp=2, ep=2, etp=2)
    assert topology.groups_over(frozenset({"etp"})) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.groups_over(frozenset({"ep"})) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.groups_over(frozenset({"edp"})) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.groups_over(frozenset({"ep", "etp"})) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_dense_axes_know_nothing_of_experts() -> None:
    for topology in ALL:
        plain = Topology(dp=topology.dp, tp=topology.tp)
        assert all(topology.coordinates(rank) == plain.coordinates(rank) for rank in range(topology.world))
        for axes in ({"dp"}, {"tp"}, {"dp", "tp"}):
            assert topology.groups_over(frozenset(axes)) == plain.groups_over(frozenset(axes))


def test_no_group_spans_axes_of_both_meshes() -> None:
    with pytest.raises(AssertionError):
        Topology(dp=2, tp=2, ep=2).groups_over(frozenset({"dp", "ep"}))


@given(topology=st.sampled_from(ALL), sp=st.booleans(), two_stage=st.booleans())
def test_text_form_reads_back(topology: Topology, sp: bool, two_stage: bool) -> None:
    flagged = Topology(
        dp=topology.dp,
        tp=topology.tp,
        ep=topology.ep,
        etp=topology.etp,
        sp=sp and topology.tp > 1,
        two_stage=two_stage and topology.etp > 1,
    )
    assert Topology.parse(str(flagged), world=flagged.world) == flagged


@for_each(
    ("text", "shown"),
    [
        ("etp=2,ep=2,dp=4", "dp=4,ep=2,etp=2"),
        ("two-stage,etp=2,tp=2,sp", "tp=2,sp,etp=2,two-stage"),
        ("dp=2,etp=2,two-stage=true", "dp=2,etp=2,two-stage"),
        ("dp=2,etp=2,two-stage=false", "dp=2,etp=2"),
        ("ep=4", "dp=4,ep=4"),
        ("ep=2,etp=2,tp=2", "dp=2,tp=2,ep=2,etp=2"),
        ("ep=3,tp=2", "dp=3,tp=2,ep=3"),
        ("dp=2,ep=1,etp=1", "dp=2"),
    ],
)
def test_text_form_is_one_for_each_topology(text: str, shown: str) -> None:
    assert str(Topology.parse(text)) == shown


@for_each(
    ("text", "world", "words"),
    [
        ("dp=2,ep=2,two-stage", None, "two-stage with etp=1: .*raise etp or leave out two-stage"),
        ("dp=2,etp=2,two-stage=maybe", None, "two-stage is a flag"),
        ("dp=2,etp=2,two-stage,two-stage", None, "two-stage is given twice"),
        ("dp=2,etp=2,two_stage", None, "did you mean 'two-stage'"),
        ("dp=2,etpp=2", None, "did you mean 'etp'"),
        ("dp=2,ep=0", None, "ep=0: .*use ep=1 to leave it out"),
        ("dp=2,ep=two", None, "ep needs a whole number"),
        ("dp=6,ep=4", None, r"ep\*etp=4 with dp\*tp=6: .*use ep\*etp in \{1, 2, 3, 6\}"),
        ("dp=2,tp=2,ep=2,etp=4", None, r"use ep\*etp in \{1, 2, 4\}"),
        ("ep=4", 6, r"use ep\*etp in \{1, 2, 3, 6\}"),
        ("dp=2,ep=2", 4, "needs 2 processes"),
    ],
)
def test_wrong_axes_of_experts_say_what_to_do(text: str, world: int | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Topology.parse(text, world=world)
