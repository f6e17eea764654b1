"""Dense tp=2 and tp=2,sp against transformers' tensor parallelism + PEFT, and against our own one process, in one run.

    python benchmarks/tp_vs_peft.py [--turns N] [--quick] [--json FILE]

Every system loads the same random checkpoint and the same adapter. Before anything is timed, the loss and every LoRA
gradient of the first step are compared with one-process PEFT: a system that disagrees ends the benchmark. A step is
forward, loss, backward, gradient sync where the system needs one, AdamW. The systems take turns, a few steps at a time
(A B C D A B C D ...), so that what else the machine does hits all alike; while one runs, the others wait on their pipe.

First with a float32 base, then with a bfloat16 one, as people train: there, products take a tenth of the time on CPUs
that have them, and what goes between ranks and what is done around the products shows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

import meshlora
from cores import dtypes_here, fewer
from meshlora.adapter.attach import active_factors
from meshlora.run.allocator import keep_freed_memory
from meshlora.train.losses import shifted_loss
from processes import Group, batch_of, be_quiet, open_groups
from table import Findings, Parity, ParityError, Row, faster, parser, run, turns_within

TOLERANCE = 1e-4  # fp32, relative; meshlora without its gradient sums over tp is 1.0 off
LEARNING_RATE = 1e-4
RANK = 16
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True)
class System:
    """One competitor: how it is loaded, on how many processes, with how many threads each. dtype: of the base."""

    name: str
    kind: str
    topology: str = ""
    num_ranks: int = 1
    num_threads: int = 1
    dtype: str = "float32"


@dataclass(frozen=True)
class Shape:
    """Tokens of one step."""

    seq_len: int
    batch_size: int

    def __str__(self) -> str:
        return f"seq {self.seq_len} × batch {self.batch_size}"


@dataclass(frozen=True)
class Turn:
    """Seconds and CPU seconds of each step of one turn."""

    wall_s: list[float]
    cpu_s: list[float]

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.wall_s)


TP = System("meshlora tp=2", "meshlora", "tp=2", 2)
SP = System("meshlora tp=2,sp", "meshlora", "tp=2,sp", 2)
ALONE = System("meshlora, 1 process", "meshlora")
ALONE_WIDE = System("meshlora, 1 process, 2 threads", "meshlora", num_threads=2)
REFERENCE = System("PEFT, 1 process", "peft")
PEER = System("transformers tp=2 + PEFT", "transformers", num_ranks=2)
SYSTEMS = (TP, SP, ALONE, ALONE_WIDE, REFERENCE, System("PEFT, 1 process, 2 threads", "peft", num_threads=2), PEER)
QUICK = (TP, SP, ALONE, REFERENCE, PEER)
DTYPES = ("float32", "bfloat16")
LIMIT_BFLOAT16 = 4.0  # times PEFT's own distance from float32
SHAPES = (Shape(32, 1), Shape(256, 2), Shape(1024, 1))
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
TINY_SHAPES = (Shape(16, 2),)
# By dtype and length of a sequence: how many times as fast as the peer, and as our own one process of one thread. The
# peer is what people would use, in the dtype that they would use; two ranks against one where products take the time.
AGAINST_PEER = {("bfloat16", 32): 2.3, ("bfloat16", 256): 1.5}
AGAINST_ALONE = {("float32", 256): 1.5, ("float32", 1024): 1.5}


# --- the systems: all of this runs on the ranks ---------------------------------------------------------------------


class Candidate:
    """A loaded model with its optimizer. Subclasses say how to load it and how to make its gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        factors = list(self.factors().values())
        # Two groups, as torch refuses DTensors beside plain tensors in one. Fused as meshlora's trainer takes it, and
        # transformers' by default.
        groups = [[f for f in factors if isinstance(f, DTensor) is is_sharded] for is_sharded in (True, False)]
        parameters = [{"params": group} for group in groups if group]
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

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
        loss = shifted_loss(self.model, ids, torch.ones_like(ids), labels)
        loss.backward()
        return float(loss.detach()) / meshlora.finish_gradients(self.model, num_tokens=labels.numel())


def load(system: System, folder: Path) -> Candidate:
    """`system` with the checkpoint and the adapter under `folder`."""
    if system.kind == "meshlora":
        model = meshlora.load(
            folder / "model", adapter=folder / "adapter", topology=system.topology, dtype=system.dtype, device="cpu"
        )
        return Meshlora(model)
    sharding = {"tp_plan": "auto"} if system.kind == "transformers" else {}
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, system.dtype), **sharding)
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


# What a rank holds between two calls from the parent.
_held: dict[str, Candidate] = {}


def open_system(system: System, folder: Path) -> None:
    _held["candidate"] = load(system, folder)


def tokens(candidate: Candidate, shape: Shape) -> tuple[Tensor, Tensor]:
    """Ids and labels of a step, within the model's vocabulary."""
    return batch_of(shape.batch_size, shape.seq_len, candidate.model.config.vocab_size)


def first_gradients(shape: Shape) -> tuple[float, dict[str, Tensor]]:
    """The loss and this rank's part of every LoRA gradient, before any optimizer step."""
    candidate = _held["candidate"]
    candidate.optimizer.zero_grad(set_to_none=True)
    loss = candidate.gradients(*tokens(candidate, shape))
    gradients = {name: p.grad for name, p in candidate.factors().items() if p.grad is not None}
    return loss, {name: g.to_local() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def time_steps(shape: Shape, steps: int) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of each of `steps` steps, after one that warms the caches up again."""
    candidate = _held["candidate"]
    batch = tokens(candidate, shape)
    candidate.step(*batch)
    times = []
    for _ in range(steps):
        started, cpu_started = time.perf_counter(), time.process_time()
        candidate.step(*batch)
        times.append((time.perf_counter() - started, time.process_time() - cpu_started))
    return times


# --- the run --------------------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, **overrides: int) -> Path:
    """A random fp32 checkpoint and an adapter whose A and B are both non-zero, written by transformers and peft."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**MODEL, **overrides}), dtype=torch.float32)
    model.save_pretrained(folder / "model")
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(folder / "adapter")
    return folder


Reference = dict[str, tuple[float, dict[str, Tensor]]]


def check_parity(
    groups: dict[str, Group], shapes: Sequence[Shape], exact: Reference | None
) -> tuple[dict[str, dict[str, float]], Reference]:
    """(worst difference by shape and system, one-process PEFT's loss and gradients by shape).

    exact: those of float32. Without them the differences are relative ones from PEFT here; with them, how many times as
    far off as PEFT here a gradient is.

    Raises:
        ParityError: one is above its limit.
    """
    worst: dict[str, dict[str, float]] = {}
    found: Reference = {}
    limit = TOLERANCE if exact is None else LIMIT_BFLOAT16
    for shape in shapes:
        [(loss, reference)] = groups[REFERENCE.name].call(first_gradients, shape)
        found[str(shape)] = loss, reference
        errors = worst[str(shape)] = {}
        for name, group in groups.items():
            ranks = group.call(first_gradients, shape)
            if any(gradients.keys() != reference.keys() for _, gradients in ranks):
                raise RuntimeError(f"{name}: its factors are not those of {REFERENCE.name}")
            parts = {key: [gradients[key] for _, gradients in ranks] for key in reference}
            if exact is None:
                losses = [abs(rank_loss - loss) / abs(loss) for rank_loss, _ in ranks]
                errors[name] = max(*losses, *(difference(parts[key], whole) for key, whole in reference.items()))
            else:
                wholes = exact[str(shape)][1]
                own = {key: difference([one], wholes[key]) for key, one in reference.items()}
                errors[name] = max(difference(parts[key], whole) / own[key] for key, whole in wholes.items())
            if not errors[name] <= limit:
                raise ParityError(f"{name}, {shape}, against {REFERENCE.name}", errors[name], limit)
    return worst, found


def difference(parts: list[Tensor], whole: Tensor) -> float:
    """Relative L2 distance of a gradient, which each rank holds whole or a slice of, from the reference."""
    split = [dim for dim in range(whole.dim()) if parts[0].shape[dim] != whole.shape[dim]]
    candidates = [torch.cat(parts, dim=split[0])] if split else parts
    return max(float((c - whole).norm() / whole.norm()) for c in candidates)


def measure_times(
    groups: dict[str, Group], shapes: Sequence[Shape], turns: Iterable[int], steps: int
) -> dict[str, dict[str, list[Turn]]]:
    """By shape and system, of each turn; of a step on several ranks, the time of the slowest."""
    times: dict[str, dict[str, list[Turn]]] = {str(shape): {name: [] for name in groups} for shape in shapes}
    for turn in turns:
        for shape in shapes:
            for name, group in groups.items():
                by_rank = group.call(time_steps, shape, steps)
                slowest = [
                    tuple(max(clock) for clock in zip(*ranks, strict=True)) for ranks in zip(*by_rank, strict=True)
                ]
                times[str(shape)][name].append(Turn(*(list(clock) for clock in zip(*slowest, strict=True))))
        print(f"turn {turn + 1}", file=sys.stderr, flush=True)
    return times


def rows_of(dtype: str, times: dict[str, dict[str, list[Turn]]], shapes: Sequence[Shape]) -> list[Row]:
    """Ours against the peer, then against our own one process."""
    rows = []
    for shape in shapes:
        seconds = {name: [turn.median_ms for turn in turns] for name, turns in times[str(shape)].items()}

        def row(ours: System, peer: System, target: float | None, shape: Shape, seconds: dict[str, list[float]]) -> Row:
            names = {"ours_name": ours.name, "peer_name": peer.name}
            return faster(
                f"{dtype} base, {shape}", seconds[ours.name], seconds[peer.name], unit="ms", target=target, **names
            )

        rows += [
            row(TP, PEER, AGAINST_PEER.get((dtype, shape.seq_len)), shape, seconds),
            row(SP, PEER, None, shape, seconds),
            row(TP, ALONE, AGAINST_ALONE.get((dtype, shape.seq_len)), shape, seconds),
        ]
        if ALONE_WIDE.name in seconds:
            rows.append(row(TP, ALONE_WIDE, None, shape, seconds))
    return rows


def page(parity: dict[str, dict[str, dict[str, float]]], times: dict[str, dict[str, dict[str, list[Turn]]]]) -> str:
    """What the rows are taken from."""
    lines = [
        f"Llama, hidden {MODEL['hidden_size']}, {MODEL['num_hidden_layers']} layers, intermediate "
        f"{MODEL['intermediate_size']}, vocab {MODEL['vocab_size']}, {MODEL['num_attention_heads']}/"
        f"{MODEL['num_key_value_heads']} heads, LoRA r={RANK} on all seven linears, gloo, one thread a rank "
        "unless it says otherwise.",
        "",
        "- a step: forward, loss, backward, gradient sync where needed, AdamW; the systems take turns, a few steps "
        "each, after one that is not timed",
        "- AdamW is the fused one of torch on all sides",
        f"- `{PEER.name}` needs `lora_A.in_features = lora_A.weight.shape[1]` on row-parallel layers; as installed it "
        "does not train",
        "- CPU time (of the slowest rank, all its threads) leaves out waiting: it hardly moves when the machine is "
        "shared, where step times do",
    ]
    off = {"float32": "off PEFT, step 1", "bfloat16": "off float32, times PEFT's, step 1"}
    for dtype, shape, systems in [(d, shape, systems) for d, by in times.items() for shape, systems in by.items()]:
        lines += [
            "",
            f"## {dtype}, {shape}",
            "",
            f"| system | median step | min..max | CPU time a rank | {off[dtype]} |",
            "|---|---|---|---|---|",
        ]
        for name, turns in systems.items():
            wall = [1e3 * second for turn in turns for second in turn.wall_s]
            cpu = [1e3 * second for turn in turns for second in turn.cpu_s]
            lines.append(
                f"| {name} | {statistics.median(wall):.0f} ms | {min(wall):.0f}..{max(wall):.0f} ms "
                f"| {statistics.median(cpu):.0f} ms | {parity[dtype][shape][name]:.2g} |"
            )
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> Findings:
    """Parity, then times."""
    systems, number, steps = (QUICK, 3, 2) if options.quick else (SYSTEMS, options.turns, 3)
    smaller = TINY if options.tiny else {"num_hidden_layers": fewer(MODEL["num_hidden_layers"])}
    of_all, dtypes = (TINY_SHAPES if options.tiny else SHAPES), dtypes_here(DTYPES)
    parity: dict[str, dict[str, dict[str, float]]] = {}
    times: dict[str, dict[str, dict[str, list[Turn]]]] = {}
    exact: Reference | None = None
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name) / "model", **smaller)
        for place, dtype in enumerate(dtypes, 1):
            # The longest sequence says least of what is around the products: a quick run has it once.
            shapes = [shape for shape in of_all if not (options.quick and dtype == "bfloat16" and shape.seq_len > 256)]
            meeting = Path(name) / dtype
            meeting.mkdir()
            threads = {replace(system, dtype=dtype): system.num_threads for system in systems}
            with open_groups(threads, meeting, open_system, folder) as groups:
                parity[dtype], found = check_parity(groups, shapes, exact)
                exact = exact or found
                # A quick run has the reference for parity only: no row of the table is about it.
                timed = {n: group for n, group in groups.items() if not (options.quick and n == REFERENCE.name)}
                times[dtype] = measure_times(
                    timed, shapes, turns_within(number, options, share=place / len(dtypes)), steps
                )
            rows += rows_of(dtype, times[dtype], shapes)
    worst = {dtype: max(error for errors in by.values() for error in errors.values()) for dtype, by in parity.items()}
    details = {
        "model": {**MODEL, **smaller, "lora_rank": RANK, "dtypes": dtypes},
        "systems": [asdict(system) for system in systems],
        "parity": parity,
        "times": {
            dtype: {s: {n: [asdict(turn) for turn in turns] for n, turns in by.items()} for s, by in shapes_of.items()}
            for dtype, shapes_of in times.items()
        },
    }
    what = f"loss and every gradient of step 1, all systems and shapes, float32, against {REFERENCE.name}"
    if "bfloat16" in dtypes:
        what = (
            f"every gradient of step 1, all systems and shapes: bfloat16 at most {worst['bfloat16']:.2f} times as far "
            f"off PEFT's float32 one as PEFT's own bfloat16 one is (limit {LIMIT_BFLOAT16:g}); float32, and the loss, "
            f"against {REFERENCE.name}"
        )
    return Findings(Parity(what, worst["float32"], TOLERANCE, agrees=True), rows, details, page(parity, times))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--turns", type=int, default=8, help="of each system and shape, 3 timed steps each")
    options = made.parse_args()
    be_quiet()
    return run("Tensor-parallel LoRA: meshlora against transformers + PEFT", options, measure, name="tp_vs_peft")


if __name__ == "__main__":
    sys.exit(main())
