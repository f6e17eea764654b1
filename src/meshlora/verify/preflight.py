"""The preflight: before a run, a one-time proof of its model's twin with its adapter on its topology.

The proof is that of `meshlora verify`: on CPUs in float64, and on the devices of the run in float32, whose rounding
gives the limits; several adapters are proved one by one, then together (`verify.at_once`). Does not own: the twin of a
run (`verify.stand_in`), records of passed proofs (`meshlora_ground.proof_records`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshlora.comm.groups import on_gpus, sharing_note
from meshlora.feature import check_proved
from meshlora.plan.own_dropouts import dropout_fields
from meshlora.run.launch import signals_end_what_was_started
from meshlora.run.model_card import NOT_PROVED
from meshlora.run.prepared import Prepared
from meshlora.run.recompute import asked_of
from meshlora.verify.at_once import LIMIT, compare_at_once, one_of_several
from meshlora.verify.options import Request, of_schedule
from meshlora.verify.proof import Outcome, Processes, run_proof
from meshlora.verify.report.document import document, is_proved
from meshlora.verify.request import Proof, prepare_proof
from meshlora.verify.stand_in import MOST_RANKS, StandIn, provable
from meshlora.wings.kernels.liger import liger_version
from meshlora.wings.quantized.kinds import KEEP, STORED_TWINS
from meshlora_ground.console import Console
from meshlora_ground.errors import MeshloraError, UnsupportedError
from meshlora_ground.objective import Objective
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.objectives.referenced import Referenced
from meshlora_ground.proof_records import CACHE, proved_on, remember, usable_cache
from meshlora_ground.topology import Topology
from meshlora_ground.versions import digest, own_sources, versions
from meshlora_judge.compare import Worst
from meshlora_judge.inputs import write_twin
from meshlora_judge.report.page import write_report
from meshlora_judge.stored_twin import write_stored_twin


@dataclass(frozen=True)
class _Claim:
    """What one proof of a preflight shows.

    Attributes:
        name: the adapter; empty for the only one. what, where, doing, when: words of messages. asked: what its record
            must contain. prove: called with a usable cache of references, processes and a progress
            callback; raises for a difference and returns further fields of the record.
    """

    name: str
    what: str
    where: str
    doing: str
    when: str
    asked: dict[str, Any]
    prove: Callable[[Path, Processes, Callable[[str], None]], Mapping[str, Any]]


def preflight(
    runs: Mapping[str, Prepared],
    *,
    skip: bool = False,
    ranks_per_gpu: int = 1,
    console: Console | None = None,
    cache_dir: Path = CACHE,
) -> None:
    """Prove that each of `runs`, by adapter, trains as one process would, and that several do together.

    On CPUs in float64, and on the devices of the run in float32, as `preflight` of the run file says. What is on record
    is not proved again. skip: as `preflight: off`: accept only families that ship with a proof, and say what is given
    up. ranks_per_gpu: so many share each GPU.

    Raises:
        UnsupportedError: a twin trains differently, or lacks a kind of block of the model; with `skip`, a family
            without a proof. MeshloraError: the proof broke off; KeyboardInterrupt.
    """
    console = console or Console()
    if skip or next(iter(runs.values())).config.preflight == "off":
        check_proved(next(iter(runs.values())).plan)
        console.say(
            "no preflight: that this model, adapter and topology train as one process would is not proved on this "
            "machine"
        )
        return
    claims = _claims(runs, cache_dir, ranks_per_gpu)
    if note := _devices_of(next(iter(runs.values())), ranks_per_gpu)[1]:
        console.say(note)
    for claim in claims:
        if proved_on(cache_dir, claim.asked):
            continue
        started = time.perf_counter()
        console.say(f"preflight: {claim.doing}")
        with signals_end_what_was_started(), usable_cache(cache_dir) as (usable, why_not):
            with Processes() as processes, console.busy("preflight") as update:
                details = claim.prove(usable, processes, update)
            why_not = why_not or remember(cache_dir, claim.asked, details)
        lost = f"; not remembered, so the next run proves it again: {why_not}" if why_not else ""
        console.say(f"preflight: {claim.what} proved in {time.perf_counter() - started:.0f} s{lost}")


def proof_words(run: Prepared, *, skip: bool, ranks_per_gpu: int = 1) -> str:
    """What a run shows by having got past its preflight, for the card of its adapter. Arguments: as of `preflight`."""
    if skip or run.config.preflight == "off":
        return f"{NOT_PROVED}: it was started without a preflight, and its family ships with a proof"
    devices, _ = _devices_of(run, ranks_per_gpu)
    places = ["in float64", *(f"on {place.name} in {place.dtype}" for place in devices)]
    return (
        f"before its first step a twin of model, adapter and mesh ({provable(run.topology)}), with the schedule "
        f"{run.config.train.schedule}, was trained as transformers + peft train it on one process, compared "
        f"tensor by tensor {' and '.join(places)}"
    )


def preflight_state(runs: Mapping[str, Prepared], *, ranks_per_gpu: int = 1, cache_dir: Path = CACHE) -> str:
    """The lines of `meshlora check` on the preflight of `runs`. Raises: UnsupportedError: no proof is possible."""
    first = next(iter(runs.values()))
    if first.config.preflight == "off":
        return "preflight: off"
    lines = []
    if note := _devices_of(first, ranks_per_gpu)[1]:
        lines.append(note)
    for claim in _claims(runs, cache_dir, ranks_per_gpu):
        state = f"train will prove {claim.when}"
        if date := proved_on(cache_dir, claim.asked):
            state = f"proved, {date}"
        words = [claim.name, "preflight", claim.where, state]
        lines.append(": ".join(word for word in words if word))
    return "\n".join(lines)


def _claims(runs: Mapping[str, Prepared], cache_dir: Path, ranks_per_gpu: int = 1) -> list[_Claim]:
    """For each run one on CPUs, and one on its devices if it asks for that; of several a last one for all together."""
    claims = [_of_one(name, run, cache_dir, _ON_CPUS) for name, run in runs.items()]
    if "" not in runs:  # several, each with a name
        claims.append(_of_all(runs, [claim.asked["key"] for claim in claims]))
    for name, run in runs.items():
        places, _ = _devices_of(run, ranks_per_gpu)
        claims += [_of_one(name, run, cache_dir, place) for place in places]
    return claims


@dataclass(frozen=True)
class _Place:
    """Where a proof runs: `cpu` or `cuda`, in which dtype, on how many ranks at most. name: of the devices.

    has_kernels: those of the run, if it has any. topology: in place of that of the run. ranks_per_gpu: of `preflight`.
    """

    device: str
    dtype: str
    most_ranks: int
    name: str
    has_kernels: bool = False
    topology: Topology | None = None
    ranks_per_gpu: int = 1


_ON_CPUS = _Place("cpu", "float64", MOST_RANKS, "")


def _devices_of(run: Prepared, ranks_per_gpu: int = 1) -> tuple[list[_Place], str]:
    """(the devices on which `run` is proved besides, in float32: GPUs, or CPUs if it says so; a note on its GPUs).
    Raises: UnsupportedError: it asks for its devices, and this machine has too few of them."""
    wanted = run.config.preflight
    if wanted in ("cpu", "off"):
        return [], ""
    if not on_gpus(run.config.device, num_ranks=1):
        if wanted == "device":
            return [_Place("cpu", "float32", MOST_RANKS, "CPUs")], ""
        return [], ""
    name, num_gpus = torch.cuda.get_device_properties(0).name, torch.cuda.device_count()
    most = num_gpus * ranks_per_gpu
    shown = f"{name}, CUDA {torch.version.cuda}"
    place = _Place("cuda", "float32", most, shown, has_kernels=True, ranks_per_gpu=ranks_per_gpu)
    if (needed := provable(run.topology, most_ranks=most).world) <= most:
        return [place], sharing_note(ranks_per_gpu) if ranks_per_gpu > 1 else ""
    given = f"preflight on {num_gpus} x {name}" + f", {ranks_per_gpu} ranks on each" * (ranks_per_gpu > 1)
    share = f"--ranks-per-gpu {-(-needed // num_gpus)}"
    rule = f"{run.topology} needs {needed} GPUs of one machine to have every axis of more than one rank"
    if wanted == "device":
        raise UnsupportedError(given, rule, f"use preflight: cpu, or let ranks share GPUs for it: {share}")
    if run.blueprint.options.kernels != "none":  # which one rank can show
        note = f"{given} is of one rank, for the kernels: {rule}"
        return [dataclasses.replace(place, most_ranks=1, topology=Topology())], note
    return [], f"{given} is left out: {rule}; check --prove {share} lets ranks share them for it"


def _of_one(name: str, run: Prepared, cache_dir: Path, place: _Place) -> _Claim:
    proof, key = proof_of(run, cache_dir, place)
    what = f"{run.plan.model_type} on {proof.topologies[0]}" + (f" on {place.name}, {place.dtype}," * bool(place.name))

    def prove(usable: Path, processes: Processes, update: Callable[[str], None]) -> Mapping[str, Any]:
        started = time.perf_counter()
        own = dataclasses.replace(proof, request=dataclasses.replace(proof.request, cache_dir=usable))
        outcomes = list(run_proof(own, processes, progress=lambda text: update(f"preflight: {text}")))
        command = (
            f"meshlora verify --family {proof.case.model_type} --topology {proof.topologies[0]}"
            f"{f' --dtype {place.dtype} --device {place.device}' * bool(place.name)}"
            f"{f' --ranks-per-gpu {place.ranks_per_gpu}' * (place.ranks_per_gpu > 1)}"
            f"{f' --kernels {proof.case.kernels}' * (proof.case.kernels != 'none')}"
            "  # the twin of your own configuration: --model FOLDER --twin"
        )
        details = functools.partial(document, proof, outcomes, command=command, seconds=time.perf_counter() - started)
        if not is_proved(outcomes):
            # A cache in place of one that cannot be written goes with this process.
            folder = cache_dir / "failed" if usable == cache_dir else None
            _refuse(what, outcomes[0], details(details=True), key, folder)
        return details()

    request = dict(vars(proof.request))
    del request["model"]  # the model type stands for its configuration, which the key covers
    del request["cache_dir"]
    asked = {
        "key": key,
        "model_type": proof.case.model_type,
        "topology": str(proof.topologies[0]),
        "request": request | {"objective": vars(proof.request.objective)},
    }
    doing = f"proving a twin of {what} against transformers + peft on one process (once; about half a minute)"
    return _Claim(name, what, place.name, doing, "this combination first (about half a minute)", asked, prove)


def _of_all(runs: Mapping[str, Prepared], keys: list[str]) -> _Claim:
    """keys: those of the claims of each."""
    first = next(iter(runs.values()))
    topology = provable(first.topology)
    what = f"{len(runs)} adapters at once on {topology}"

    def prove(_: Path, processes: Processes, __: Callable[[str], None]) -> Mapping[str, Any]:
        worst = compare_on_twin(runs, topology, processes)
        adapter, found = max(worst.items(), key=lambda item: item[1].relative)
        if not found.relative <= LIMIT:
            raise UnsupportedError(
                what,
                f"on the twin {adapter} does not train as it would by itself ({found.name}: {found.relative:.1e} off)",
                "train the adapters one by one",
            )
        return {"worst": found.relative}

    asked = {
        "key": digest(["several adapters at once", *keys]),
        "model_type": first.plan.model_type,
        "topology": str(topology),
        "request": keys,
    }
    return _Claim("together", what, "", f"{what} against each by itself (once; seconds)", "it", asked, prove)


def _refuse(what: str, outcome: Outcome, details: dict[str, Any], key: str, folder: Path | None) -> None:
    """Raise for a failed proof; its report goes to `folder`, or for None to a new permanent one."""
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="meshlora-report-"))
    folder = folder.expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    report = folder / f"{key}.html"
    write_report(details, report)
    found = outcome.divergence
    if found is None:
        cause = outcome.error.splitlines()[-1]
        raise MeshloraError(f"preflight of {what}: the proof broke off ({cause}); the report is {report}")
    rule = f"its twin does not train as one process would ({found.phase} of {found.name}: {found.cause})"
    raise UnsupportedError(what, rule, f"the report is {report}; use another topology, or tp=1 with dp as you like")


def _objective(run: Prepared) -> Objective:
    """The objective of `run`, with what its reference is in place of where: the base, or an adapter; so a teacher."""
    objective = run.config.train.objective
    if isinstance(objective, Distill) and objective.folder is not None:
        objective = dataclasses.replace(objective, teacher="a model")
    if not isinstance(objective, Referenced):
        return objective
    if run.config.reference is None and objective.needs_base:
        return dataclasses.replace(objective, reference="base")
    return dataclasses.replace(objective, reference="start")


def proof_of(run: Prepared, cache_dir: Path, place: _Place = _ON_CPUS) -> tuple[Proof, str]:
    """The proof that covers `run`, and the key of its record."""
    if place.topology is not None:
        run = run.on(place.topology)
    stand_in = StandIn(run, most_ranks=place.most_ranks)
    train, topology, options = run.config.train, stand_in.topology, run.blueprint.options
    request = Request(
        topologies=(str(topology),),
        model=stand_in.config,
        lora=stand_in.lora(run),
        reference=stand_in.reference(run),
        objective=_objective(run),
        packing=run.config.data.packing if run.config.data.packing != "rows" else True,  # its steps are those of true
        images=run.train_data.images is not None,
        routed=run.train_data.routed is not None and place.dtype == "float64",
        recompute=asked_of(train.recompute),
        # Of the schedule its kind and ends: steps and rates are the twin's own.
        **of_schedule(
            train.schedule,
            ends_above_zero=train.min_lr > 0,
            starts_at_zero=train.warmup_from_zero,
            decay_type=train.decay_type,
            has_timescale=train.timescale > 0,
        ),
        attn_implementation=stand_in.attn_implementation,
        quantization=stand_in.quantization,
        # Numbers of few bits are proved in float64: below, rounding moves codes.
        compute=stand_in.compute if place.dtype == "float64" else None,
        router_aux_loss_coef=train.router_aux_loss_coef,
        # Moments in 8 bits are proved in float64: below, rounding moves codes.
        optimizer="adamw" if place.dtype != "float64" and train.optimizer == "adamw_8bit" else train.optimizer,
        neftune_alpha=train.neftune_alpha,
        lora_plus_ratio=train.lora_plus_ratio,
        lora_plus_embedding_lr=train.lora_plus_embedding_lr,
        dtype=place.dtype,
        device=place.device,
        ranks_per_gpu=place.ranks_per_gpu,
        kernels="none" if not place.has_kernels or options.kernels == "auto" else options.kernels,
        trust_remote_code=options.trust_remote_code,
        cache_dir=cache_dir,
    )
    proof = prepare_proof(request)
    stand_in.check(proof)
    on = []
    if place.name:
        on.append(place.name)
    if proof.case.kernels != "none":
        on.append(f"liger-kernel {liger_version()}")
    return proof, digest([proof.key, str(topology), json.dumps(versions()), *on, *own_sources()])


def compare_on_twin(runs: Mapping[str, Prepared], topology: Topology, processes: Processes) -> dict[str, Worst]:
    """`compare_at_once` on the twin, with adapters like those of `runs`."""
    first, stand_in = next(iter(runs.values())), StandIn(*runs.values())
    alone, ranks = processes.reference("cpu"), processes.ranks(topology.world, "cpu")
    alone.start()
    ranks.start()
    with tempfile.TemporaryDirectory(prefix="meshlora-") as temporary:
        folder = Path(temporary)
        quantization = stand_in.quantization
        if quantization in STORED_TWINS:
            write_stored_twin(stand_in.config, folder / "twin", str(quantization), dtype=torch.float64)
            quantization = KEEP
        else:
            write_twin(stand_in.config, folder / "twin", dtype=torch.float64, seed=0)
        model = dataclasses.replace(
            first.config.model,
            path=str(folder / "twin"),
            dtype="float64",
            attn_implementation=stand_in.attn_implementation,
            disable_dropout="unsupported",
            quantization=quantization,  # type: ignore[arg-type] # one of them
            compute=stand_in.compute,  # type: ignore[arg-type] # the same
            kernels="none",
        )
        adapters = {}
        for number, (name, run) in enumerate(runs.items()):
            like = dataclasses.replace(run.config, model=model, topology=str(topology))
            adapters[name] = one_of_several(like, number, stand_in.lora(run), folder / name)
        dropouts = sorted(dropout_fields(stand_in.config))
        return compare_at_once(adapters, dropouts=dropouts, ranks=ranks, alone=alone)
