"""The preflight: before a run starts, its model's twin is proved on its topology with its adapter, once.

Owns: what stands for a run (its proof's request and key), and the refusal. Does not own: the memory of passed proofs
(`verify.cache`). The proof itself is that of `meshlora verify`, on CPUs, in float64.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import meshlora
from meshlora.api import read_model_config
from meshlora.console import Console
from meshlora.errors import MeshloraError, UnsupportedError
from meshlora.guards import dropout_fields, handle_dropout
from meshlora.oracle.case import digest, versions
from meshlora.plan.families import check_proved
from meshlora.plan.quantization import BLOCK
from meshlora.plan.rules import ModelPlan
from meshlora.plan.topology import Topology, divisors
from meshlora.plan.twin import shrink_config
from meshlora.train.launch import signals_end_what_was_started
from meshlora.train.prepare import Prepared
from meshlora.verify.cache import proved_on, remember, usable_cache
from meshlora.verify.document import document, is_proved
from meshlora.verify.proof import Outcome, Processes, run_proof
from meshlora.verify.report import write_report
from meshlora.verify.request import CACHE, Proof, Request, prepare_proof

# What a machine can run beside the job: ranks beyond two on an axis show nothing that two do not.
_MOST_RANKS = 8


def preflight(run: Prepared, *, skip: bool = False, console: Console | None = None, cache_dir: Path = CACHE) -> None:
    """Prove that `run` trains as one process would, or remember that it was proved.

    skip: take only what is proved for every user of a family, and say what that gives up.

    Raises:
        UnsupportedError: the twin trains differently, or does not have every kind of block that the model has; with
            `skip`, a family without a proof. MeshloraError: the proof broke off; KeyboardInterrupt.
    """
    console = console or Console()
    if skip:
        check_proved(run.plan.model_type, run.topology, has_experts=bool(run.plan.experts))
        console.say(
            "no preflight: that this model, adapter and topology train as one process would is not proved on this "
            "machine"
        )
        return
    proof, key = proof_of(run, cache_dir)
    asked = _asked(proof, key)
    if proved_on(cache_dir, asked):
        return
    started = time.perf_counter()
    what = f"{run.plan.model_type} on {proof.topologies[0]}"
    console.say(
        f"preflight: proving a twin of {what} against transformers + peft on one process (once; about half a minute)"
    )
    with signals_end_what_was_started(), usable_cache(cache_dir) as (usable, why_not):
        proof = dataclasses.replace(proof, request=dataclasses.replace(proof.request, cache_dir=usable))
        with Processes() as processes, console.busy("preflight") as update:
            outcomes = list(run_proof(proof, processes, progress=lambda text: update(f"preflight: {text}")))
        seconds = time.perf_counter() - started
        _refuse_a_difference(proof, outcomes, seconds, what, folder=None if why_not else cache_dir / "failed", key=key)
        if not why_not:
            details = document(proof, outcomes, command=_command(proof), seconds=seconds)
            why_not = remember(cache_dir, asked, details)
    lost = f"; not remembered, so the next run proves it again: {why_not}" if why_not else ""
    console.say(f"preflight: {what} proved in {seconds:.0f} s{lost}")


def preflight_state(run: Prepared, *, cache_dir: Path = CACHE) -> str:
    """What `meshlora check` says of the preflight of `run`.

    Raises:
        UnsupportedError: it cannot be proved, whatever the numbers are.
    """
    date = proved_on(cache_dir, _asked(*proof_of(run, cache_dir)))
    if date:
        return f"preflight: proved, {date}"
    return "preflight: train will prove this combination first (about half a minute)"


def _refuse_a_difference(
    proof: Proof, outcomes: list[Outcome], seconds: float, what: str, *, folder: Path | None, key: str
) -> None:
    """Raise for a failed proof, with its report in `folder`, or where that is None in a new one that stays."""
    if is_proved(outcomes):
        return
    folder = folder.expanduser() if folder else Path(tempfile.mkdtemp(prefix="meshlora-report-"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    report = folder / f"{key}.html"
    write_report(document(proof, outcomes, command=_command(proof), seconds=seconds, details=True), report)
    found = outcomes[0].divergence
    if found is None:
        cause = outcomes[0].error.splitlines()[-1]
        raise MeshloraError(f"preflight of {what}: the proof broke off ({cause}); the report is {report}")
    raise UnsupportedError(
        what,
        f"its twin does not train as one process would ({found.phase} of {found.name}: {found.cause})",
        f"the report is {report}; use another topology, or tp=1 with dp as you like",
    )


def _command(proof: Proof) -> str:
    return (
        f"meshlora verify --family {proof.case.model_type} --topology {proof.topologies[0]}  # the twin of your own "
        "configuration: --model FOLDER --twin"
    )


def proof_of(run: Prepared, cache_dir: Path) -> tuple[Proof, str]:
    """The proof that stands for `run`, and the key under which it is remembered."""
    config = twin_of(run)
    topology = provable(run.topology)
    request = Request(
        topologies=(str(topology),),
        model=config,
        lora=lora_on_twin(run, config, topology),
        label_smoothing=run.config.train.label_smoothing,
        objective=run.config.train.objective,
        packing=run.config.data.packing,
        recompute=run.config.train.recompute != "none",
        quantization=run.config.model.quantization,
        router_aux_loss_coef=run.config.train.router_aux_loss_coef,
        lora_plus_ratio=run.config.train.lora_plus_ratio,
        lora_plus_embedding_lr=run.config.train.lora_plus_embedding_lr,
        device="cpu",
        trust_remote_code=run.config.model.trust_remote_code,
        cache_dir=cache_dir,
    )
    proof = prepare_proof(request)
    _check_same_blocks(run.plan, proof.plans[topology])
    return proof, digest([proof.key, str(topology), json.dumps(versions()), *_sources()])


def _asked(proof: Proof, key: str) -> dict[str, Any]:
    """What a record of `proof` must say; of the model its kind, the rest of its configuration is in the key."""
    request = {name: value for name, value in vars(proof.request).items() if name not in ("model", "cache_dir")}
    return {
        "key": key,
        "model_type": proof.case.model_type,
        "topology": str(proof.topologies[0]),
        "request": request,
    }


def provable(topology: Topology) -> Topology:
    """`topology`, or with fewer ranks on dp and on the axes of experts where it needs more than a machine can spare."""
    if topology.world <= _MOST_RANKS:
        return topology
    ep, etp = (divisors(size)[min(1, size - 1)] for size in (topology.ep, topology.etp))
    least = 2 if topology.dp_shard else 1
    smaller = [
        dataclasses.replace(topology, dp=dp, ep=ep, etp=etp)
        for dp in range(least, max(least + 1, _MOST_RANKS // topology.tp + 1))
        if dp * topology.tp % (ep * etp) == 0
    ]
    if not smaller:
        return dataclasses.replace(topology, dp=ep * etp, ep=ep, etp=etp)  # above 1, as none of 1 or 2 would do

    def likeness(other: Topology) -> tuple[int, int]:
        return sum(getattr(other, axis) > 1 or getattr(topology, axis) == 1 for axis in ("dp", "edp")), -other.dp

    return max(smaller, key=likeness)


def lora_on_twin(run: Prepared, config: Any, topology: Topology) -> dict[str, Any]:
    """The run's adapter on the twin: the same rank and scale, on the same kinds of linears.

    Layers and linears that are named by number do not exist in a twin: there each kind of linear that has an adapter
    somewhere has one in every layer.
    """
    bare = prepare_proof(Request(topologies=(str(topology),), model=config, device="cpu"))
    kinds = set(map(kind_of, run.targets))
    lora, plan = run.lora, bare.plans[topology]
    targets = [name for name in (plan.embedding, *plan.linears) if kind_of(name) in kinds]
    # What has an adapter in some layers and is trained in full in others, is trained in full in one of the twin's.
    saved = {wanted.rpartition(".")[2] for wanted in lora.modules_to_save or ()}
    first = {end: next((name for name in targets if name.rpartition(".")[2] == end), end) for end in saved}
    experts = [name for name in plan.projections if kind_of(name) in kinds]
    matrices = [f"{name}.weight" for name in plan.matrices if kind_of(name) in kinds]
    of_kind = {kind_of(name): list(target.pieces) for name, target in run.targets.items() if target.num_experts}
    pieces = {key: list(names) for key, names in (getattr(lora, "pieces", None) or {}).items() if "experts" not in key}
    pieces |= {name: of_kind[kind_of(name)] for name in experts if of_kind[kind_of(name)]}
    on_twin = {
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "lora_dropout": lora.lora_dropout,
        "bias": lora.bias,
        "modules_to_save": sorted(first.values()) or None,
        "init_lora_weights": lora.init_lora_weights,
        "target_modules": sorted(set(targets) - set(first.values())),
    }
    if experts or matrices:
        on_twin["target_parameters"] = [*experts, *matrices]
    if any(target.is_shared for target in run.targets.values()):
        on_twin["share_experts"] = True
    return on_twin | ({"pieces": pieces} if pieces else {})


def kind_of(name: str) -> str:
    """`model.layers.17.mlp.up_proj` -> `model.layers.*.mlp.up_proj`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _check_same_blocks(plan: ModelPlan, twin: ModelPlan) -> None:
    """A proof of the twin says something of the model only where the twin has every kind of block that it has."""
    missing = _kinds(plan) - _kinds(twin)
    if missing:
        name, how = min(missing)
        raise UnsupportedError(
            f"{plan.model_type}: {name} ({how})",
            "its twin has no such block, so a proof of the twin would not cover it",
            "prove the model itself with `meshlora verify --model FOLDER`, then train with --no-preflight",
        )


def _kinds(plan: ModelPlan) -> set[tuple[str, str]]:
    regions = {(kind_of(r.name), "split region" if r.is_split else "whole region") for r in plan.regions}
    experts = {(kind_of(name), f"experts, {rule.split}") for name, rule in plan.projections.items()}
    return regions | experts | {(kind_of(name), str(rule.split)) for name, rule in plan.linears.items()}


def twin_of(run: Prepared) -> Any:
    """The configuration of the run's twin, with the dropouts that the run has."""
    given = copy.deepcopy(_config(run))
    config = shrink_config(given, tp=run.topology.tp, block=BLOCK if run.plan.quantized else 1)
    handle_dropout(given, disable=run.config.model.disable_dropout)
    for name, rate in dropout_fields(given).items():  # a twin has none of its own
        setattr(config, name, rate)
    return config


def _config(run: Prepared) -> Any:
    return read_model_config(run.config.model.path, trust_remote_code=run.config.model.trust_remote_code)


def _sources() -> Iterable[str]:
    """The product's own code: a proof of other code is no proof."""
    root = Path(meshlora.__file__).parent
    return [file.read_text(encoding="utf-8") for file in sorted(root.rglob("*.py"))]
