"""Families: the `model_type`s whose split training is proved correct.

Owns: the record of proofs, and the refusal of what has none. Does not own: running proofs (`verify.proof`), families
that no proof can make right (`plan.families.refused`).

Every family in `PROVED` has a float64 proof against one-process transformers + peft on tp=2 and tp=2,sp; those in
`PROVED_CONTEXT` also on cp=2, those in `PROVED_STAGES` on pp=2, and those in `PROVED_EXPERTS` on tp=2,sp,ep=2 and
tp=2,sp,etp=2 with adapters on experts (`tests/parity` repeats them). Unproven families are refused, except dense
ones on data-parallel ranks, which run the model's code unchanged.
`meshlora train` also proves the combination of each run (`verify.preflight`). If the minor version of a library differs
from that of the record, a family must have been proved with the installed one (`meshlora verify --family`).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from meshlora_ground.errors import UnsupportedError
from meshlora_ground.proof_records import CACHE, proved_on
from meshlora_ground.topology import LAYERS, TOKENS, Topology
from meshlora_ground.versions import digest, other_minors, own_sources, versions

# Written by `scripts/prove_families.py --record`: family -> topology -> worst relative error of its proof.
_FILE: dict[str, Any] = json.loads(Path(__file__).with_name("proved.json").read_text(encoding="utf-8"))
_RECORD: dict[str, dict[str, float]] = _FILE["families"]
PROVED = frozenset(_RECORD)
# Those whose twin has been seen to (`wings.found.probe.sees_later_tokens`): padding behind a token changes it.
SEE_LATER_TOKENS = frozenset[str](_FILE["see_later_tokens"])


def _proved_over(axes: frozenset[str]) -> frozenset[str]:
    """The families with a proof on a topology that has more than one rank over `axes`."""
    found = set()
    for name, topologies in _RECORD.items():
        if any(Topology.parse(topology).size_over(axes) > 1 for topology in topologies):
            found.add(name)
    return frozenset(found)


PROVED_CONTEXT, PROVED_STAGES = _proved_over(TOKENS), _proved_over(LAYERS)
PROVED_EXPERTS = frozenset(name for name, found in _RECORD.items() if any("ep=" in topology for topology in found))


def check_proved(model_type: str, topology: Topology, *, has_experts: bool) -> None:
    """Refuse an unproved split.

    Raises:
        UnsupportedError: a family without a proof if tp > 1, or, with experts, if any size but dp is above 1.
    """
    # Several axes at once need a proof of each, not of every combination: a run proves its own.
    proved = PROVED_EXPERTS if has_experts else PROVED
    if topology.size_over(TOKENS) > 1:
        proved &= PROVED_CONTEXT
    if topology.size_over(LAYERS) > 1:
        proved &= PROVED_STAGES
    if topology.is_split and model_type not in proved:
        families = "families with experts" if has_experts else "families"
        given = f"model_type {model_type!r}"
        way_out = f"use dp alone, as much as you like; the proved {families} are {', '.join(sorted(proved))}"
        raise UnsupportedError(given, f"its split over {topology} is not proved against one process", way_out)


def check_proved_here(model_type: str, topology: Topology, *, has_experts: bool, cache_dir: Path = CACHE) -> None:
    """Refuse a split that is not proved with the installed libraries.

    Raises:
        UnsupportedError: as `check_proved`; or the minor version of torch, transformers or peft differs from that of
            the record, and `cache_dir` has no proof of the family with the installed one.
    """
    check_proved(model_type, topology, has_experts=has_experts)
    here, there = versions(), _FILE["versions"]
    others = other_minors(there, here)
    if not topology.is_split or not others or proved_on(cache_dir, proof_of_family(model_type, topology)):
        return
    installed, recorded = (", ".join(f"{name} {of[name]}" for name in others) for of in (here, there))
    given = f"model_type {model_type!r} on {topology} with {installed}"
    way_out = f"prove it with yours, once: meshlora verify --family {model_type} --topology {_smallest(topology)}"
    raise UnsupportedError(given, f"its split is proved with {recorded}", way_out)


def proof_of_family(model_type: str, topology: Topology) -> dict[str, Any]:
    """The cache record of a family's proof on `topology` with the installed libraries and the present code."""
    asked = {"family": model_type, "topology": str(_smallest(topology)), "libraries": versions()}
    return {"key": f"family-{digest([json.dumps(asked, sort_keys=True), *own_sources()])}", **asked}


def _smallest(topology: Topology) -> Topology:
    """`topology` with the fewest equivalent dp ranks: a proof on two ranks or more also covers larger dp."""
    for dp in range(min(2, topology.dp), topology.dp):
        if dp * topology.tp % (topology.ep * topology.etp):
            continue  # the expert mesh is made of the same ranks
        smaller = dataclasses.replace(topology, dp=dp)
        if (smaller.edp > 1) == (topology.edp > 1):
            return smaller
    return topology
