"""The kill table: every deliberate fault is caught, and the run without it passes.

For many of them also that the diagnosis names the right module and cause. Faults in what the families of the table do
not have (fused matrices, shared heads, DoRA) are shown on a case that has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import pytest

from meshlora.verify.faults.of_objectives import PROVED
from meshlora.verify.faults.registry import MUTATIONS
from meshlora.verify.options import DROPOUT, Request
from meshlora.verify.proof import Outcome
from meshlora.verify.report.document import is_proved
from meshlora.verify.request import prepare_proof
from meshlora_ground.topology import Topology
from tests.conftest import Prove
from tests.verify.diagnoses import DIAGNOSES
from tests.verify.mutation_cases import CASES
from tests.verify.run_cases import OF_KERNELS, OF_SUMS, OF_TAILS

FAMILY = "llama"
# Each fault is put in on one of the small topologies: that of its diagnosis, else the first on which it can show. Where
# it shows in the first step there is no other, which halves its cost. `make proof` has all diagnoses, on the largest
# those that need both of its axes, and all faults on all of them, in three steps.
SMALL, LARGEST = ("tp=2,sp", "tp=2", "dp=2"), "dp=2,tp=2,sp"
TOPOLOGIES = (*SMALL, LARGEST)
ON_BOTH_AXES = ("b_unequal_on_replicas", "clip_norm_counts_replicas", "dp_reduction_skipped")
# These need no several steps to be put in, and show in what a later one takes.
IN_LATER_STEPS = ("batch_filled_up", "epoch_in_file_order", "sampler_seed_ignored")


def _can_show(*topologies: str) -> dict[str, tuple[str, ...]]:
    """Topology -> the faults that can show on it with this family, as a proof knows them before any process starts."""
    proof = prepare_proof(Request(topologies, family=FAMILY, mutations=tuple(MUTATIONS)))
    return {str(topology): tuple(proof.mutations_on(topology)) for topology in proof.topologies}


def _of_each_place(shown: dict[str, Hashable]) -> tuple[str, ...]:
    """Of the faults that show at the same place, the first."""
    return tuple({place: name for name, place in reversed(shown.items())}.values())


# Of each group, the faults that are put in: in a quick one for each phase and topology, by default one of those that
# show at the same place of a topology.
_ON_ONE_AXIS = {name: shown for name, shown in DIAGNOSES.items() if name not in ON_BOTH_AXES}
QUICK = {
    *_of_each_place({name: phase for name, (_, phase, *_) in _ON_ONE_AXIS.items()}),
    *_of_each_place({name: topology for name, (topology, *_) in _ON_ONE_AXIS.items()}),
}
DEFAULT = {*_of_each_place({name: shown[:3] for name, shown in _ON_ONE_AXIS.items()}), *ON_BOTH_AXES}
GROUPS = {"quick": QUICK, "default": DEFAULT - QUICK, "rest": MUTATIONS.keys() - DEFAULT - QUICK}
_MARKS = {"quick": [], "default": [pytest.mark.long], "rest": [pytest.mark.proof]}


def _chosen(group: str) -> dict[tuple[str, int], list[str]]:
    """(topology, steps) -> the faults of the group that are put in there."""
    showing = _can_show(*TOPOLOGIES)
    chosen: dict[tuple[str, int], list[str]] = {(topology, steps): [] for topology in TOPOLOGIES for steps in (1, 3)}
    for name, mutation in MUTATIONS.items():
        diagnosed = [DIAGNOSES[name][0]] if name in DIAGNOSES else []
        topologies = [*diagnosed, *(t for t in TOPOLOGIES if name in showing[t])][:1] if name in GROUPS[group] else []
        if group == "rest" and name in ON_BOTH_AXES:
            topologies = [LARGEST]
        for topology in topologies:
            chosen[topology, 3 if "steps" in mutation.needs or name in IN_LATER_STEPS else 1].append(name)
    return {where: names for where, names in chosen.items() if names}


@pytest.fixture(scope="module")
def proved(prove: Prove) -> Callable[[str], list[Outcome]]:
    """`proved(group)`: the runs of the faults that are chosen for each topology, and there those without a fault."""

    @functools.cache
    def run(group: str) -> list[Outcome]:
        return [
            outcome
            for (topology, steps), names in _chosen(group).items()
            for outcome in prove(
                family=FAMILY,
                topologies=(topology,),
                steps=steps,
                # Two micro-batches a step show what three do; with dp each rank has half of the sequences.
                micro_batch_size=2 if "dp" in topology else 3,
                mutations=tuple(names),
            )
        ]

    return run


def _all_caught(outcomes: list[Outcome], topologies: tuple[str, ...] = TOPOLOGIES) -> None:
    plain = [o for o in outcomes if o.mutation is None]
    assert tuple(dict.fromkeys(str(o.topology) for o in plain)) == topologies
    assert all(o.passed for o in plain), [(o.topology, o.divergence) for o in plain]
    survivors = [(str(o.topology), o.mutation) for o in outcomes if o.mutation and o.passed]
    assert not survivors
    assert is_proved(outcomes)
    found = [(o.mutation, o.divergence, o.phases[-1].name) for o in outcomes if o.divergence]
    later = ("loss of evaluation", "loss of step 2", "loss of step 3")
    gone_on = [name for name, d, last in found if d.phase != last and not d.name.startswith(later)]
    assert not gone_on, "nothing is compared after what has caught a fault, but where a later step says it better"
    crashed = [(str(o.topology), o.mutation, o.error) for o in outcomes if o.error]
    assert not crashed, "a fault is caught by a difference, not by a crash"


@pytest.mark.parametrize("group", [pytest.param(group, marks=marks) for group, marks in _MARKS.items()])
def test_every_fault_is_caught_and_the_run_without_it_passes(
    group: str, proved: Callable[[str], list[Outcome]]
) -> None:
    _all_caught(proved(group), TOPOLOGIES if group == "rest" else SMALL)


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_every_fault_is_caught_on_every_topology_where_it_can_show(prove: Prove) -> None:
    outcomes = prove(family=FAMILY, topologies=TOPOLOGIES, mutations=tuple(MUTATIONS))
    ran = {t: tuple(o.mutation for o in outcomes if o.mutation and str(o.topology) == t) for t in TOPOLOGIES}
    assert ran == _can_show(*TOPOLOGIES)
    _all_caught(outcomes)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"topologies": ("dp=2,ep=2",)}),
        ("qwen3_moe", {"topologies": ("dp=2,ep=2",), "objective": PROVED["policy"]}),
        ("llama", {"objective": PROVED["policy"]}),
        ("llama", {"objective": PROVED["dpo"]}),
        ("llama", {"objective": PROVED["orpo"]}),
        ("llama", {"objective": PROVED["kto"]}),
        ("llama", {"packing": True}),
        ("llama", {"resume": True}),
        ("llama", {"adapters": 3}),
        ("llama", {"topologies": ("cp=2",)}),
        ("llama", {"topologies": ("cp=2,dp_shard",), "packing": True}),
        ("llama", {"topologies": ("cp=2",), "objective": PROVED["dpo"]}),
        ("qwen3_moe", {"topologies": ("cp=2,ep=2",)}),
        ("qwen3_next", {"topologies": ("cp=2",)}),
    ],
)
def test_every_fault_that_can_show_is_caught_whatever_is_asked_for(
    family: str, options: dict[str, Any], prove: Prove
) -> None:
    asked = {"topologies": ("tp=2,sp",), "default_dropout": DROPOUT, "objective": PROVED["sft"]} | options
    outcomes = prove(family=family, mutations=tuple(MUTATIONS), **asked)
    assert not [outcome.mutation for outcome in outcomes if outcome.passed != (outcome.mutation is None)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_no_fault_is_left_out_where_it_can_show(topology: str) -> None:
    parsed = Topology.parse(topology)
    has = (
        {"ranks", "adamw", "scale", "steps", "targets", "digits", "sft", "seed", "labels"}
        | {"short_batch", "unmasked", "first_tokens", "several_micro_batches", "mean_over_tokens"}
        | {a for a in ("dp", "tp") if getattr(parsed, a) > 1}
        | ({"data"} if parsed.dp > 1 else set())
        | ({"sp", "riding", "riding_together"} if parsed.sp else set())
    )
    if parsed.tp > 1:
        has |= {"row_bias", "column_bias", "row_target", "column_target"}
    assert set(_can_show(topology)[topology]) == {name for name, m in MUTATIONS.items() if m.needs <= has}


def test_every_fault_is_put_in_somewhere() -> None:
    """Those that the family has no place for are in the cases."""
    put_in = {name for group in GROUPS for names in _chosen(group).values() for name in names}
    assert put_in == {name for names in _can_show(*TOPOLOGIES).values() for name in names}
    in_cases = {name for _, diagnoses in CASES.values() for name in diagnoses}
    assert set(MUTATIONS) - put_in <= in_cases | set(OF_KERNELS) | set(OF_TAILS) | set(OF_SUMS)


# Combinations of what other cases have one by one.
COMBINED = (
    "several adapters with DoRA",
    "several adapters on experts",
    "copies of experts that are on ranks of their own",
    "experts on cp ranks",
    "scores with soft caps, of keys and values that pass by",
)


def _of_each_phase(diagnoses: dict[str, tuple[str, str, str]]) -> tuple[str, ...]:
    return _of_each_place({name: "late" if _is_late(shown) else shown[0] for name, shown in diagnoses.items()})


def _is_late(shown: tuple[str, str, str]) -> bool:
    """Whether a fault shows only after the first step."""
    return shown[0] == "deltas" or shown[1].endswith(("of step 2", "of step 3"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        *(
            pytest.param(
                case, _of_each_phase(diagnoses), id=case, marks=[pytest.mark.proof] if case in COMBINED else []
            )
            for case, (_, diagnoses) in CASES.items()
        ),
        *(
            pytest.param(case, tuple(diagnoses), id=f"{case}, all", marks=pytest.mark.proof)
            for case, (_, diagnoses) in CASES.items()
            if len(_of_each_phase(diagnoses)) < len(diagnoses)
        ),
    ],
)
def test_fault_in_what_only_some_runs_have_is_caught_and_named(
    case: str, chosen: tuple[str, ...], prove: Prove
) -> None:
    request, diagnoses = CASES[case]
    # One step shows most; several adapters take steps of their own, after those of the case.
    steps = request.get("steps", 3) if any(_is_late(diagnoses[name]) for name in chosen) else 1
    fewer = {} if "dp" in request["topologies"][0] or "objective" in request else {"micro_batch_size": 3}
    plain, *mutated = prove(**fewer | request | {"steps": steps}, mutations=chosen)
    assert plain.passed, plain.divergence
    assert [o.mutation for o in mutated] == [*chosen]
    wrong = []
    for outcome in mutated:
        phase, where, words = diagnoses[outcome.mutation]  # type: ignore[index]
        found = outcome.divergence
        if found is None or (found.phase, found.name) != (phase, where) or words not in found.cause:
            wrong.append((outcome.mutation, found, outcome.error))
    assert not wrong


def _outcome(proved: Callable[[str], list[Outcome]], mutation: str) -> Outcome:
    group = next(group for group, names in GROUPS.items() if mutation in names)
    return next(o for o in proved(group) if o.mutation == mutation)


def _marked(*given: tuple[Any, ...]) -> list[Any]:
    """Parameters of a test, of which the first is a fault: it is marked as the group in which that is put in."""
    found = []
    for each in given:
        (marks,) = (_MARKS[group] for group, names in GROUPS.items() if each[0] in names)
        found.append(pytest.param(*each, marks=marks))
    return found


@pytest.mark.parametrize("mutation", _marked(*((name,) for name in DIAGNOSES)))
def test_diagnosis_names_the_module_and_the_cause(mutation: str, proved: Callable[[str], list[Outcome]]) -> None:
    topology, phase, where, words = DIAGNOSES[mutation]
    outcome = _outcome(proved, mutation)
    found = outcome.divergence
    assert str(outcome.topology) == topology
    assert found is not None
    assert (found.phase, found.name) == (phase, where or found.name)
    assert words in found.cause, found.cause


@pytest.mark.parametrize(
    ("mutation", "ratio"),
    _marked(("row_output_averaged", 0.5), ("row_output_reduced_twice", 2.0), ("factor_gradients_averaged", 0.5)),
)
def test_missing_or_doubled_reduction_shows_its_ratio(
    mutation: str, ratio: float, proved: Callable[[str], list[Outcome]]
) -> None:
    outcome = _outcome(proved, mutation)
    assert outcome.divergence is not None
    assert outcome.divergence.ratio == ratio
    assert outcome.divergence.ranks == [0, 1]


@pytest.mark.parametrize(
    ("mutation", "ranks"),
    _marked(
        ("adapter_loaded_on_rank_0_only", [1]),
        ("b_unequal_on_replicas", [1]),
        ("column_bias_of_rank_0", [1]),
        ("shards_reversed_in_file", []),
    ),
)
def test_only_the_wrong_ranks_are_named(
    mutation: str, ranks: list[int], proved: Callable[[str], list[Outcome]]
) -> None:
    found = _outcome(proved, mutation).divergence
    assert found is not None
    assert found.ranks == ranks
