"""Step times of meshlora, one-process PEFT, and transformers tensor parallelism + PEFT, in one run.

    python benchmarks/tp_vs_peft.py [--steps N] [--out benchmarks/results/NAME]

Every system loads the same random checkpoint and the same adapter. Before anything is timed, the loss and every LoRA
gradient of the first step are compared with one-process PEFT: a system that disagrees ends the benchmark. A step is
forward, loss, backward, gradient sync where the system needs one, AdamW. The systems take turns, a few steps at a time
(A B C D A B C D ...), so that what else the machine does hits all alike; while one runs, the others wait on their pipe.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

import meshlora
from meshlora.adapter.manage import active_factors
from meshlora.parallel.allocator import keep_freed_memory
from meshlora.train.losses import language_model_loss
from processes import Group, batch_of, be_quiet, open_groups

TOLERANCE = 1e-4  # fp32, relative; meshlora without its gradient sums over tp is 1.0 off
BLOCK = 3  # timed steps a turn
LEARNING_RATE = 1e-4
RANK = 16
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class System:
    """One competitor: how it is loaded, on how many processes, with how many threads each."""

    name: str
    kind: str
    topology: str = ""
    num_ranks: int = 1
    num_threads: int = 1


@dataclass(frozen=True)
class Shape:
    """Tokens of one step."""

    seq_len: int
    batch_size: int

    def __str__(self) -> str:
        return f"seq {self.seq_len} × batch {self.batch_size}"


REFERENCE = System("PEFT, 1 process, 1 thread", "peft")
PEER = System("transformers tp=2 + PEFT", "transformers", num_ranks=2)
SYSTEMS = (
    System("meshlora tp=2", "meshlora", "tp=2", 2),
    System("meshlora tp=2,sp", "meshlora", "tp=2,sp", 2),
    REFERENCE,
    System("PEFT, 1 process, 2 threads", "peft", num_threads=2),
    PEER,
)
SHAPES = (Shape(256, 2), Shape(32, 1))


# --- the systems: all of this runs on the ranks ---------------------------------------------------------------------


class Candidate:
    """A loaded model with its optimizer. Subclasses say how to load it and how to make its gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        factors = list(self.factors().values())
        # What meshlora's trainer takes, and transformers' by default. torch refuses it for DTensors beside plain ones.
        fused = len({isinstance(factor, DTensor) for factor in factors}) == 1
        self.optimizer = torch.optim.AdamW(factors, lr=LEARNING_RATE, weight_decay=0.0, fused=fused)

    def factors(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by module and side: `model.layers.0.mlp.up_proj.lora_A`."""
        return {
            name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def gradients(self, ids: Tensor, labels: Tensor) -> float:
        """Leave the gradient of the mean loss on the factors; returns that loss."""
        logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        return float(loss.detach())

    def step(self, ids: Tensor, labels: Tensor) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.gradients(ids, labels)
        self.optimizer.step()


class Meshlora(Candidate):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        keep_freed_memory()  # as its trainer does

    def factors(self) -> dict[str, nn.Parameter]:
        return {factor.name: factor.parameter for factor in active_factors(self.model)}

    def gradients(self, ids: Tensor, labels: Tensor) -> float:
        loss = language_model_loss(self.model, ids, torch.ones_like(ids), labels)
        loss.backward()
        return float(loss.detach()) / meshlora.finish_gradients(self.model, num_tokens=labels.numel())


def load(system: System, folder: Path) -> Candidate:
    """`system` with the checkpoint and the adapter under `folder`."""
    if system.kind == "meshlora":
        model = meshlora.load(folder / "model", adapter=folder / "adapter", topology=system.topology, device="cpu")
        return Meshlora(model)
    sharding = {"tp_plan": "auto"} if system.kind == "transformers" else {}
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, **sharding)
    model = PeftModel.from_pretrained(base, str(folder / "adapter"), is_trainable=True)
    if system.kind == "transformers":
        _repair_row_parallel(model)
    return Candidate(model)


def _repair_row_parallel(model: nn.Module) -> None:
    """Let row-parallel adapters train: as installed, the first forward ends with `shape '[...]' is invalid`.

    peft makes lora_A from the local width and then wraps it as a DTensor of the whole one, but leaves `in_features`
    local, and transformers (>= 5.21) takes the global shape of the input from there.
    """
    for name, module in model.named_modules():
        if name.endswith("lora_A.default") and isinstance(module.weight, DTensor):
            module.in_features = module.weight.shape[1]


class CollectiveCounter(TorchDispatchMode):
    """Counts the operators that communicate, by pass, and all backward operators to show that it sees that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.collectives: Counter[str] = Counter()
        self.num_operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators[self.phase] += 1
        space, _, name = func.name().partition("::")
        if "c10d" in space and "wait" not in name and "wrap" not in name:
            self.collectives[f"{self.phase} {name.split('.')[0].strip('_')}"] += 1
        return func(*args, **(kwargs or {}))


# What a rank holds between two calls from the parent.
_held: dict[str, Candidate] = {}


def open_system(system: System, folder: Path) -> None:
    _held["candidate"] = load(system, folder)


def _batch(shape: Shape) -> tuple[Tensor, Tensor]:
    return batch_of(shape.batch_size, shape.seq_len, MODEL["vocab_size"])


def first_gradients(shape: Shape) -> tuple[float, dict[str, Tensor]]:
    """The loss and this rank's part of every LoRA gradient, before any optimizer step."""
    candidate = _held["candidate"]
    candidate.optimizer.zero_grad(set_to_none=True)
    loss = candidate.gradients(*_batch(shape))
    gradients = {name: p.grad for name, p in candidate.factors().items() if p.grad is not None}
    return loss, {name: g.to_local() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def time_steps(shape: Shape, steps: int) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of each of `steps` steps, after one that warms the caches up again."""
    candidate, batch = _held["candidate"], _batch(shape)
    candidate.step(*batch)
    times = []
    for _ in range(steps):
        started, cpu_started = time.perf_counter(), time.process_time()
        candidate.step(*batch)
        times.append((time.perf_counter() - started, time.process_time() - cpu_started))
    return times


def count_collectives(system: System, folder: Path, shape: Shape) -> Counter[str]:
    """Collectives of one forward and backward with gradient sync, of the checkpoint in `folder`."""
    candidate = load(system, folder)
    with CollectiveCounter() as counter:

        def watch(_module: nn.Module, _args: Any, output: Any) -> None:
            # meshlora's logits never exist whole: what the head reads stands for them.
            last = getattr(output.logits, "hidden", output.logits)
            last.register_hook(lambda _gradient: setattr(counter, "phase", "backward"))

        candidate.model.register_forward_hook(watch)  # the gradient of the logits opens the backward
        candidate.gradients(*_batch(shape))
    if counter.num_operators["backward"] < counter.num_operators["forward"] / 4:
        raise RuntimeError(f"the counter does not see the backward: {dict(counter.num_operators)}")
    return counter.collectives


# --- the run --------------------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, **overrides: int) -> Path:
    """A random fp32 checkpoint and an adapter whose A and B are both non-zero, written by transformers and peft."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**MODEL, **overrides}), dtype=torch.float32)
    model.save_pretrained(folder / "model")
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(folder / "adapter")
    return folder


def check_parity(groups: dict[str, Group]) -> dict[str, dict[str, float]]:
    """Worst relative difference from one-process PEFT, by shape and system.

    Raises:
        RuntimeError: one is above `TOLERANCE`.
    """
    worst: dict[str, dict[str, float]] = {}
    for shape in SHAPES:
        [(loss, reference)] = groups[REFERENCE.name].call(first_gradients, shape)
        errors = worst[str(shape)] = {}
        for name, group in groups.items():
            ranks = group.call(first_gradients, shape)
            losses = [abs(rank_loss - loss) / abs(loss) for rank_loss, _ in ranks]
            if any(gradients.keys() != reference.keys() for _, gradients in ranks):
                raise RuntimeError(f"{name}: its factors are not those of {REFERENCE.name}")
            differences = [_difference([g[key] for _, g in ranks], whole) for key, whole in reference.items()]
            errors[name] = max(*losses, *differences)
            if not errors[name] <= TOLERANCE:
                raise RuntimeError(f"{name}, {shape}: {errors[name]:.1e} off {REFERENCE.name}; no times are printed")
    return worst


def _difference(parts: list[Tensor], whole: Tensor) -> float:
    """Relative L2 distance of a gradient, which each rank holds whole or a slice of, from the reference."""
    split = [dim for dim in range(whole.dim()) if parts[0].shape[dim] != whole.shape[dim]]
    candidates = [torch.cat(parts, dim=split[0])] if split else parts
    return max(float((c - whole).norm() / whole.norm()) for c in candidates)


def measure_collectives(groups: dict[str, Group], four: Path, two: Path) -> dict[str, dict[str, float]]:
    """Collectives per layer and step of each parallel system: (four layers - two layers) / 2."""
    result = {}
    for name, group in groups.items():
        if group.system.num_ranks > 1:
            more, less = (group.call(count_collectives, group.system, f, SHAPES[1])[0] for f in (four, two))
            result[name] = {kind: (more[kind] - less[kind]) / 2 for kind in more if more[kind] != less[kind]}
    return result


def measure_times(groups: dict[str, Group], steps: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Seconds and CPU seconds of each step by shape and system; of a step on several ranks, those of the slowest."""
    times: dict[str, Any] = {str(shape): {name: {"wall": [], "cpu": []} for name in groups} for shape in SHAPES}
    for done in range(0, steps, BLOCK):
        for shape in SHAPES:
            for name, group in groups.items():
                by_rank = group.call(time_steps, shape, min(BLOCK, steps - done))
                for ranks in zip(*by_rank, strict=True):
                    for clock, values in zip(("wall", "cpu"), zip(*ranks, strict=True), strict=True):
                        times[str(shape)][name][clock].append(max(values))
    return times


def report(results: dict[str, Any]) -> str:
    """The Markdown page."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# Tensor-parallel LoRA: meshlora against transformers + PEFT",
        "",
        f"Llama, hidden {MODEL['hidden_size']}, {MODEL['num_hidden_layers']} layers, intermediate "
        f"{MODEL['intermediate_size']}, vocab {MODEL['vocab_size']}, {MODEL['num_attention_heads']}/"
        f"{MODEL['num_key_value_heads']} heads, LoRA r={RANK} on all seven linears, fp32, gloo, one thread a rank "
        "unless it says otherwise.",
        "",
        f"- hardware: {results['hardware']}",
        f"- versions: {versions}",
        f"- command: `{results['command']}`",
        f"- a step: forward, loss, backward, gradient sync where needed, AdamW; the systems take turns, {BLOCK} steps "
        "at a time",
        f"- AdamW is the fused one but for `{PEER.name}`: torch refuses it for DTensors beside plain parameters",
        f"- `{PEER.name}` needs `lora_A.in_features = lora_A.weight.shape[1]` on row-parallel layers; as installed it "
        "does not train",
    ]
    for shape, systems in results["times_s"].items():
        peer = systems[PEER.name]
        lines += [
            "",
            f"## {shape}",
            "",
            "| system | median step | min..max | CPU time a rank | speed against the peer: median, fastest "
            "| off PEFT, step 1 |",
            "|---|---|---|---|---|---|",
        ]
        for name, times in systems.items():
            wall = times["wall"]
            by_median = statistics.median(peer["wall"]) / statistics.median(wall)
            by_fastest = min(peer["wall"]) / min(wall)
            lines.append(
                f"| {name} | {1e3 * statistics.median(wall):.0f} ms | {1e3 * min(wall):.0f}..{1e3 * max(wall):.0f} ms "
                f"| {1e3 * statistics.median(times['cpu']):.0f} ms | {by_median:.2f}×, {by_fastest:.2f}× "
                f"| {results['parity'][shape][name]:.0e} |"
            )
        lines += [
            "",
            f"{len(peer['wall'])} steps each; the peer is `{PEER.name}`. CPU time (median, slowest rank, all its "
            "threads) leaves out waiting: it hardly moves when the machine is shared, where step times do.",
        ]
    lines += [
        "",
        "## Collectives per layer and step",
        "",
        "Counted at dispatch level in both passes: (4 layers - 2 layers) / 2, so that embedding and head do not count.",
        "",
        "| system | all | by pass and operator |",
        "|---|---|---|",
    ]
    for name, counts in results["collectives_per_layer"].items():
        kinds = ", ".join(f"{kind}: {number:g}" for kind, number in sorted(counts.items(), reverse=True))
        lines.append(f"| {name} | {sum(counts.values()):g} | {kinds} |")
    return "\n".join(lines) + "\n"


def hardware() -> str:
    """`2-core-x86`: what the times depend on, and nothing that names the machine."""
    machine = platform.machine().lower()
    return f"{len(os.sched_getaffinity(0))}-core-{'x86' if machine in ('x86_64', 'amd64') else machine}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="timed steps per system and shape")
    default = Path(__file__).parent / "results" / f"tp_vs_peft_{hardware()}_{time.strftime('%Y%m')}"
    parser.add_argument("--out", type=Path, default=default, help="results are written to OUT.md and OUT.json")
    options = parser.parse_args()
    be_quiet()
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name) / "four")
        shallow = make_checkpoint(Path(name) / "two", num_hidden_layers=2)
        threads = {system: system.num_threads for system in SYSTEMS}
        with open_groups(threads, Path(name), open_system, folder) as groups:
            parity = check_parity(groups)
            collectives = measure_collectives(groups, folder, shallow)
            times = measure_times(groups, options.steps)
    results = {
        "hardware": hardware(),
        "command": " ".join(["python", *sys.argv]),
        "versions": {
            "meshlora": meshlora.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "python": platform.python_version(),
        },
        "model": {**MODEL, "lora_rank": RANK, "dtype": "float32"},
        "systems": [asdict(system) for system in SYSTEMS],
        "parity": parity,
        "collectives_per_layer": collectives,
        "times_s": times,
    }
    page = report(results)
    print(page)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # Not with_suffix: a name may hold dots.
    Path(f"{options.out}.md").write_text(page)
    Path(f"{options.out}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
