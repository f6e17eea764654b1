"""The table of axes: what follows from an entry is asked of the table, by what an axis cuts and not by its name."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

import meshlora_judge
from meshlora_ground.topology import (
    DATA,
    DENSE_AXES,
    EXPERT_AXES,
    FEATURES,
    LAYERS,
    SEQUENCES,
    TOKENS,
    TP,
    Topology,
    axis_sets,
    copies_axis,
    dense_sizes,
    divisors,
    size_of_copies,
)
from meshlora_ground.versions import name_of, own_files

# The table of features has a row for each of them.
# Faults say in words what a run must have for them to show, and the generated ones exchange names of axes. Imports
# write the topology that the keys of another trainer name.
BY_NAME = {"meshlora_ground/topology.py", "plan/features.py", "verify/features.py"}


def test_no_other_file_names_an_axis_that_cuts_sequences_or_tokens() -> None:
    names = {*DATA, *LAYERS, EXPERT_AXES[0], "dp_shard"}
    found = set()
    for file in own_files():
        path = name_of(file)
        if path in BY_NAME or path.startswith(("verify/faults/", "meshlora_extra/importing/")):
            continue
        constants = (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant))
        found |= {(path, n.value, n.lineno) for n in constants if isinstance(n.value, str) and n.value in names}
    assert not found


def test_sums_over_tokens_have_their_groups_besides_those_of_shared_rows() -> None:
    sets = axis_sets({2}, has_experts=True)
    assert sets[0] == frozenset()
    assert len(set(sets)) == len(sets)
    for axes in (DENSE_AXES, EXPERT_AXES):
        assert {frozenset(some) for n in (1, 2) for some in itertools.combinations(axes, n)} <= set(sets)
    assert {frozenset({copies_axis(2)}), DATA | {copies_axis(2)}} <= set(sets)
    assert size_of_copies(copies_axis(2)) == 2
    assert size_of_copies(TP) is None


@pytest.mark.parametrize(
    ("text", "parts"), [("dp=2,tp=2", 1), ("dp=2,tp=2,sp", 2), ("dp=2", 1), ("cp=3,tp=2", 3), ("cp=3,tp=2,sp", 6)]
)
def test_tokens_of_a_batch_are_cut_in_as_many_parts_as_padding_must_divide_by(text: str, parts: int) -> None:
    topology = Topology.parse(text)
    assert topology.size_over(topology.token_cut) == parts


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [("dp=4,dp_shard", True), ("pp=2", False), ("dp=2,tp=2", False), ("dp=4,ep=2", True), ("cp=2", False)],
)
def test_layers_are_whole_where_only_sequences_and_experts_are_cut(text: str, is_whole: bool) -> None:
    assert Topology.parse(text).is_whole == is_whole


def test_every_dense_axis_is_asked_for_by_one_thing_that_it_cuts() -> None:
    assert sorted([*LAYERS, *SEQUENCES, *TOKENS, *FEATURES]) == sorted(DENSE_AXES)
    assert len(SEQUENCES) == 1, "the axis that takes the ranks that are left is that of sequences"


def test_the_judge_knows_sizes_and_places_and_not_what_an_axis_cuts() -> None:
    for file in Path(meshlora_judge.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "meshlora_ground.topology":
                assert {name.name for name in node.names} == {"Topology"}, file


@pytest.mark.parametrize("world", [1, 6, 8])
def test_dense_sizes_are_all_ways_to_use_the_ranks(world: int) -> None:
    found = [Topology(**sizes) for sizes in dense_sizes(world)]
    assert {topology.world for topology in found} == {world}
    pairs = {(cp, tp) for cp in divisors(world) for tp in divisors(world) if world % (cp * tp) == 0}
    assert {(t.dp, t.cp, t.tp) for t in found} == {(world // (cp * tp), cp, tp) for cp, tp in pairs}
