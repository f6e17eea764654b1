"""LoRA on mixture-of-experts layers: step times and memory of meshlora, its frozen base, and PEFT, in one run.

    python benchmarks/moe_vs_peft.py [--turns N] [--threads N] [--shape I] [--quick] [--json FILE]

Qwen3-MoE with random weights, fp32, LoRA on `gate_up_proj` and `down_proj` of all experts. PEFT (`target_parameters`)
runs on each experts implementation of transformers, and the fastest counts. All load the same checkpoint and adapter;
before anything is timed, the loss and every LoRA gradient of the first step are compared with PEFT's on its eager one,
and a system that disagrees ends the benchmark. Each system has a process of its own for each shape.

A step is forward, loss, backward, gradient sync where there are two ranks, AdamW. The frozen bases are meshlora's model
and that of transformers without an adapter, with no optimizer. In all systems the embedded tokens require a gradient,
so that the backward runs through all layers of the bases too. The systems take turns, so that what else the machine
does hits all alike; ratios are taken within a turn, and their median is printed. One of PEFT whose first forward and
backward take three times as long as those of the fastest is not measured further.

Memory is the high-water mark of resident memory above the level before. `first steps`: from before the first step, so
that gradients of the factors and moments of AdamW, of which the base has none, count. `later steps`: the moments are
there already. `less gradients`: the same, less the size of the gradients of the factors.

With ep=2 meshlora runs on two processes with half of the sequences each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import meshlora
from meshlora.adapter.attach import active_factors
from meshlora.train.losses import shifted_loss
from processes import Group, batch_of, be_quiet, begin_high_water_mark, memory_bytes, open_groups
from table import Findings, Parity, ParityError, Row, faster, parser, run, smaller, turns_within

TOLERANCE = 1e-4  # fp32, relative L2 of each gradient; a factor of another expert is 1.4 off
MEMORY_STEPS = 2
TIMED_STEPS = 2  # a turn, after one that warms the caches up again
PHASES = ("first steps", "later steps", "less gradients")  # of memory
LEARNING_RATE = 1e-4
RANK = 8
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MODEL = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "intermediate_size": 512,
    "num_experts_per_tok": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class System:
    """One competitor. kind: "meshlora", "base", "transformers" or, of PEFT, the experts implementation."""

    name: str
    kind: str
    topology: str = ""
    num_ranks: int = 1

    @property
    def is_peft(self) -> bool:
        return self.kind not in ("meshlora", "base", "transformers")

    @property
    def is_frozen(self) -> bool:
        return self.kind in ("base", "transformers")


@dataclass(frozen=True)
class Shape:
    """Experts of each layer, and tokens of one step."""

    num_experts: int
    batch_size: int
    seq_len: int

    def __str__(self) -> str:
        return f"{self.num_experts} experts × {self.batch_size * self.seq_len:,} tokens"


OURS = System("meshlora", "meshlora")
BASE = System("our frozen base", "base")
THEIR_BASE = System("transformers' frozen base", "transformers")
BASES = (BASE, THEIR_BASE)
REFERENCE = System("PEFT, eager", "eager")
SYSTEMS = (
    OURS,
    BASE,
    THEIR_BASE,
    REFERENCE,
    System("PEFT, batched_mm", "batched_mm"),
    System("PEFT, grouped_mm", "grouped_mm"),
)
WITH_EP = System("meshlora ep=2", "meshlora", "ep=2", 2)
SHAPES = (Shape(128, 2, 128), Shape(128, 4, 256), Shape(32, 4, 256))
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 32, "vocab_size": 128}
TINY_SHAPE = Shape(4, 2, 16)
# Asked for with many experts and few tokens at each, where PEFT's whole matrices weigh most; elsewhere shown.
TARGET_SHAPE, TARGET_SPEED, TARGET_MEMORY = SHAPES[0], 5.0, 0.4


# --- the systems: all of this runs on the ranks ---------------------------------------------------------------------


class Candidate:
    """A loaded model with its optimizer, if it trains anything."""

    def __init__(self, system: System, folder: Path, rank: int) -> None:
        self.system, self.rank = system, rank
        self.model: Any = (load_ours if system.kind in ("meshlora", "base") else load_theirs)(system, folder)
        self.model.train()
        self.model.get_input_embeddings().register_forward_hook(lambda _module, _args, out: out.requires_grad_())
        factors = list(self.factors().values())
        self.optimizer = torch.optim.AdamW(factors, lr=LEARNING_RATE, weight_decay=0.0, fused=True) if factors else None

    def factors(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        if self.system.is_peft:
            return {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return {f.name: f.parameter for f in active_factors(self.model)} if self.system.kind == "meshlora" else {}

    def gradients(self, ids: Tensor, labels: Tensor) -> float:
        """Leave the gradient of the mean loss on the factors; returns that loss."""
        ids, labels = (t.chunk(self.system.num_ranks)[self.rank] for t in (ids, labels))
        mask = torch.ones_like(ids)
        if self.system.kind not in ("meshlora", "base"):
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            loss.backward()
            return float(loss.detach())
        loss = shifted_loss(self.model, ids, mask, labels)
        loss.backward()
        if self.system.kind == "base":
            return float(loss.detach()) / labels.numel()
        return float(loss.detach()) / meshlora.finish_gradients(self.model, num_tokens=labels.numel())

    def step(self, ids: Tensor, labels: Tensor) -> tuple[float, float]:
        """One step; returns its seconds, and those of them until the gradients were there."""
        started = time.perf_counter()
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self.gradients(ids, labels)
        there = time.perf_counter()
        if self.optimizer is not None:
            self.optimizer.step()
        return time.perf_counter() - started, there - started


def load_ours(system: System, folder: Path) -> Any:
    """meshlora's model, by its public API."""
    adapter = folder / "adapter" if system.kind == "meshlora" else None
    return meshlora.load(folder / "model", adapter=adapter, topology=system.topology, device="cpu")


def load_theirs(system: System, folder: Path) -> Any:
    """PEFT's model on the experts implementation that `system` names, or the frozen base on the fastest one."""
    implementation = system.kind if system.is_peft else "grouped_mm"
    base = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, experts_implementation=implementation
    )
    return (
        PeftModel.from_pretrained(base, str(folder / "adapter"), is_trainable=True)
        if system.is_peft
        else (base.requires_grad_(False))
    )


# What a rank holds between two calls from the parent.
_held: dict[str, Candidate] = {}


def open_system(system: System, folder: Path) -> None:
    _held["candidate"] = Candidate(system, folder, dist.get_rank() if dist.is_initialized() else 0)


def _batch(shape: Shape) -> tuple[Tensor, Tensor]:
    return batch_of(shape.batch_size, shape.seq_len, _held["candidate"].model.config.vocab_size)


def measure_memory(shape: Shape) -> dict[str, int]:
    """Bytes that the first steps and later ones need above what was there."""
    candidate, batch = _held["candidate"], _batch(shape)
    grown = {}
    for phase in ("first steps", "later steps"):
        for factor in candidate.factors().values():
            factor.grad = None
        level = begin_high_water_mark()
        for _ in range(MEMORY_STEPS):
            candidate.step(*batch)
        grown[phase] = memory_bytes("VmHWM") - level
    grown["less gradients"] = grown["later steps"] - sum(p.numel() * 4 for p in candidate.factors().values())
    return grown


def first_gradients(shape: Shape) -> tuple[float, dict[str, Tensor]]:
    """The loss and every LoRA gradient, under our names and in our shapes, before any optimizer step."""
    candidate = _held["candidate"]
    loss = candidate.gradients(*_batch(shape))
    gradients = {}
    for name, parameter in candidate.factors().items():
        assert parameter.grad is not None, name
        known = _by_expert(name, parameter.grad, shape) if candidate.system.is_peft else (name, parameter.grad)
        gradients[known[0].removesuffix(".default")] = known[1].clone()
        parameter.grad = None
    return loss, gradients


def _by_expert(name: str, gradient: Tensor, shape: Shape) -> tuple[str, Tensor]:
    """PEFT's inner wrapper is that of the parameter named first; its A is expert-major, its B expert-minor."""
    module, _, side = name.removeprefix("base_model.model.").removesuffix(".default.weight").rpartition(".")
    inner = module.endswith(".base_layer")
    ours = f"{module.removesuffix('.base_layer')}.{'gate_up_proj' if inner else 'down_proj'}.{side}"
    if side == "lora_A":
        return ours, gradient.view(shape.num_experts, RANK, -1)
    return ours, gradient.view(len(gradient), RANK, shape.num_experts).permute(2, 0, 1)


def time_steps(shape: Shape) -> tuple[float, float]:
    """Median seconds of a step, and of its forward and backward."""
    candidate, batch = _held["candidate"], _batch(shape)
    candidate.step(*batch)
    steps = [candidate.step(*batch) for _ in range(TIMED_STEPS)]
    whole, passes = (statistics.median(times) for times in zip(*steps, strict=True))
    return whole, passes


# --- the run --------------------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, num_experts: int, sizes: Mapping[str, int]) -> Path:
    """A random fp32 checkpoint and an adapter whose A and B are both non-zero, written by transformers and peft."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**MODEL, **sizes}, num_experts=num_experts)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    lora = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=[], target_parameters=PARAMETERS, init_lora_weights=False
    )
    get_peft_model(model, lora).save_pretrained(folder / "adapter")
    return folder


def check_parity(groups: dict[str, Group], shape: Shape) -> tuple[dict[str, float], dict[str, float]]:
    """Of the first forward and backward, by system on one process: the worst relative difference from PEFT on eager
    experts, of loss and gradients; the seconds.

    Raises:
        ParityError: a difference is above `TOLERANCE`.
    """
    started = time.perf_counter()
    [(loss, reference)] = groups[REFERENCE.name].call(first_gradients, shape)
    worst, seconds = {REFERENCE.name: 0.0}, {REFERENCE.name: time.perf_counter() - started}
    for name, group in groups.items():
        if group.system.is_frozen or group.system == REFERENCE or group.system.num_ranks > 1:
            continue
        started = time.perf_counter()
        [(own_loss, own)] = group.call(first_gradients, shape)
        seconds[name] = time.perf_counter() - started
        if own.keys() != reference.keys():
            raise RuntimeError(
                f"{name}: its factors are not those of {REFERENCE.name}: {own.keys() ^ reference.keys()}"
            )
        differences = [float((own[key] - whole).norm() / whole.norm()) for key, whole in reference.items()]
        worst[name] = max(abs(own_loss - loss) / abs(loss), *differences)
        if not worst[name] <= TOLERANCE:
            raise ParityError(f"{name}, {shape}, against {REFERENCE.name}", worst[name], TOLERANCE)
    return worst, seconds


def fits(system: System, shape: Shape) -> bool:
    """Whether there is room: `batched_mm` keeps a copy of an expert's matrices for each choice of each token."""
    if system.kind != "batched_mm":
        return True
    choices = shape.batch_size * shape.seq_len * MODEL["num_experts_per_tok"] * MODEL["num_hidden_layers"]
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return choices * 3 * MODEL["hidden_size"] * MODEL["moe_intermediate_size"] * 4 < physical / 5


def measure_shape(
    systems: Sequence[System], shape: Shape, folder: Path, *, turns: Iterable[int], num_threads: int
) -> dict[str, Any]:
    """All of one shape: parity, memory, times."""
    threads = {system: num_threads for system in systems if fits(system, shape)}
    with tempfile.TemporaryDirectory() as stores, open_groups(threads, Path(stores), open_system, folder) as groups:
        parity, seconds = check_parity(groups, shape)
        fastest = min(seconds[name] for name, group in groups.items() if group.system.is_peft)
        peers = [name for name, group in groups.items() if group.system.is_peft]
        slow = {name: seconds[name] for name in peers if seconds[name] > 3 * fastest}
        groups = {name: group for name, group in groups.items() if name not in slow}
        memory = {}
        for name, group in groups.items():
            ranks = group.call(measure_memory, shape)
            memory[name] = {phase: max(rank[phase] for rank in ranks) for phase in ranks[0]}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        for turn in turns:
            for name, group in groups.items():
                whole, passes = zip(*group.call(time_steps, shape), strict=True)
                times[name].append((max(whole), max(passes)))
                print(f"{shape}, turn {turn + 1}, {name}: {max(whole):.2f} s a step", file=sys.stderr, flush=True)
    return {"parity": parity, "slow_s": slow, "memory_bytes": memory, "times_s": times}


def in_turns(times: dict[str, list[tuple[float, float]]], name: str, other: str, part: int) -> float:
    """Median over the turns of time of `name` / time of `other`; part 0: of a step, 1: of forward and backward."""
    return statistics.median(a[part] / b[part] for a, b in zip(times[name], times[other], strict=True))


def report(shape: Shape, results: dict[str, Any]) -> str:
    """The Markdown section of one shape."""
    times, memory, parity = results["times_s"], results["memory_bytes"], results["parity"]
    lines = [
        f"## {shape}",
        "",
        f"| system | step | forward and backward | {' | '.join(PHASES)} | off PEFT |",
        f"|---|---|---|{len(PHASES) * '---|'}---|",
    ]
    for name, turns in times.items():
        whole, passes = (1e3 * statistics.median(values) for values in zip(*turns, strict=True))
        peaks = " | ".join(f"{memory[name][phase] / 2**20:,.0f} MiB" for phase in PHASES)
        off = f"{parity[name]:.0e}" if name in parity else "–"
        lines.append(f"| {name} | {whole:,.0f} ms | {passes:,.0f} ms | {peaks} | {off} |")
    left_out = [system.name for system in SYSTEMS if not fits(system, shape)]
    if left_out:
        lines += ["", f"Left out, as this machine has not the memory: {', '.join(left_out)}."]
    if results["slow_s"]:
        slow = ", ".join(f"{name}, {seconds:.1f} s" for name, seconds in results["slow_s"].items())
        lines += ["", f"Not measured further after their first forward and backward: {slow}."]
    fastest = fastest_peer(results)
    step, passes = (in_turns(times, fastest, OURS.name, part) for part in (0, 1))
    frozen = {
        base.name: [in_turns(times, OURS.name, base.name, part) for part in (0, 1)]
        for base in BASES
        if base.name in times
    }
    against = {
        other: ", ".join(f"{memory[OURS.name][phase] / memory[other][phase]:.3f} {phase}" for phase in PHASES)
        for other in (fastest, *frozen)
    }
    lines += [
        "",
        f"- against {fastest}, the fastest: {step:.2f}× as fast a step, {passes:.2f}× forward and backward; "
        f"memory {against[fastest]}",
        *(
            f"- against {name}: {step:.3f} of the time with AdamW, {passes:.3f} without; memory {against[name]}"
            for name, (step, passes) in frozen.items()
        ),
    ]
    if WITH_EP.name in times:
        lines.append(f"- ep=2 on two processes: {in_turns(times, OURS.name, WITH_EP.name, 0):.2f}× as fast as one")
    return "\n".join(lines) + "\n"


def fastest_peer(results: dict[str, Any]) -> str:
    """PEFT's experts implementation that is the fastest on this shape."""
    times = results["times_s"]
    peers = [name for name in times if name.startswith("PEFT")]
    return min(peers, key=lambda name: statistics.median(whole for whole, _ in times[name]))


def rows_of(shape: Shape, results: dict[str, Any]) -> list[Row]:
    """Ours, on one process and with ep=2, against the fastest of PEFT."""
    steps = {name: [1e3 * whole for whole, _ in turns] for name, turns in results["times_s"].items()}
    memory = {name: peaks["first steps"] / 2**20 for name, peaks in results["memory_bytes"].items()}
    peer = fastest_peer(results)
    is_asked = shape == TARGET_SHAPE
    times = {"unit": "ms", "peer_name": peer}
    rows = [
        faster(
            f"experts, {shape}, a step",
            steps[OURS.name],
            steps[peer],
            ours_name=OURS.name,
            target=TARGET_SPEED if is_asked else None,
            **times,
        ),
        smaller(
            f"experts, {shape}, peak memory of steps",
            [memory[OURS.name]],
            [memory[peer]],
            unit="MiB",
            ours_name=OURS.name,
            peer_name=peer,
            target=TARGET_MEMORY if is_asked else None,
        ),
    ]
    if WITH_EP.name in steps:
        what = f"experts, {shape}, a step on two processes"
        rows.append(faster(what, steps[WITH_EP.name], steps[peer], ours_name=WITH_EP.name, **times))
    return rows


def measure(options: argparse.Namespace) -> Findings:
    """All shapes, one after the other."""
    systems: tuple[System, ...] = (OURS, REFERENCE, SYSTEMS[-1], WITH_EP) if options.quick else (*SYSTEMS, WITH_EP)
    shapes = [SHAPES[number] for number in options.shape or (range(1) if options.quick else range(len(SHAPES)))]
    if options.tiny:
        shapes = [TINY_SHAPE]
    number = 3 if options.quick else options.turns
    found: dict[Shape, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folders: dict[int, Path] = {}
        for place, shape in enumerate(shapes, 1):
            if shape.num_experts not in folders:
                folder = Path(name) / str(shape.num_experts)
                folders[shape.num_experts] = make_checkpoint(folder, shape.num_experts, TINY if options.tiny else {})
            folder = folders[shape.num_experts]
            found[shape] = measure_shape(
                systems,
                shape,
                folder,
                turns=turns_within(number, options, share=place / len(shapes)),
                num_threads=options.threads,
            )
    worst = max(error for results in found.values() for error in results["parity"].values())
    head = f"Qwen3-MoE, {MODEL}, r={RANK}, fp32, {options.threads} threads a process.\n\n"
    return Findings(
        Parity(f"loss and every gradient of step 1, against {REFERENCE.name}", worst, TOLERANCE, agrees=True),
        [row for shape, results in found.items() for row in rows_of(shape, results)],
        {"model": MODEL, "systems": [asdict(s) for s in systems], "shapes": {str(s): r for s, r in found.items()}},
        head + "\n".join(report(shape, results) for shape, results in found.items()),
    )


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--turns", type=int, default=7, help=f"of each system and shape, {TIMED_STEPS} timed steps each")
    made.add_argument("--threads", type=int, default=1, help="of each process")
    made.add_argument("--shape", type=int, action="append", help="measure only this of the shapes, from 0")
    options = made.parse_args()
    be_quiet()
    return run("LoRA on experts: meshlora against PEFT", options, measure, name="moe_vs_peft")


if __name__ == "__main__":
    sys.exit(main())
