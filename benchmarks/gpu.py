"""Training steps on one GPU at real shapes, against PEFT, and against the GPU's own matmul ceiling, in one run.

    python benchmarks/gpu.py [--shape NAME ...] [--turns N] [--json FILE]
    python benchmarks/gpu.py --dry-run              # without a GPU: the plan, then the whole of it at tiny sizes
    python benchmarks/gpu.py --device cpu --tiny    # the same at tiny sizes on the CPU
    python benchmarks/gpu.py --topology tp=8 ...    # several GPUs, with torchrun and NCCL: gpu_ranks.py

Random weights, made on the device; bf16 base, factors of LoRA in fp32 unless a system says otherwise, SDPA attention.
All systems of a shape share the tensors of one base, take turns, and start from one adapter, which meshlora writes and
PEFT reads. A step is forward, loss, backward, AdamW (fused), nothing recomputed. Each shape is measured on one long
sequence a row, and on packed rows of the same length.

Parity first: the same systems with two layers in fp32, loss and every gradient against PEFT + SDPA; then, at full size
in bf16, the loss and the gradient as a whole. What of ours differs ends the benchmark; another peer that differs, or
that does not run here, is left out with its reason.

Peak memory of a system is that of the allocator in its own turns, less what the other systems keep.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import meshlora
from gpu_ranks import measure_topologies
from gpu_shapes import (
    RANK,
    Inputs,
    Shape,
    describe,
    flops_per_token,
    inputs_of,
    packed_lengths,
    real_shapes,
    resized,
    tiny,
)
from meshlora.adapter.attach import active_factors, runtime
from meshlora.layers.by_sequence import keep_apart
from meshlora.loading import load as api
from meshlora.train.gradsync import finish_gradients_on_device
from meshlora.train.losses import language_model_losses
from processes import be_quiet, begin_high_water_mark, memory_bytes
from table import Findings, Parity, ParityError, Row, greater, parser, run, smaller

FP32_LIMIT = 1e-3  # relative, two layers; a wrong scale of LoRA is 1 off
BF16_LOSS_LIMIT = 1e-2  # relative, at full size: rounding is about 1e-3
BF16_GRADIENT_LIMIT = 0.1  # relative, all gradients as one vector; without experts, whose routing rounding changes
LEARNING_RATE = 1e-4
STEPS = 3  # timed ones a turn


# --- the systems' names ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """One competitor. kind: "meshlora", "peft", "compile" or "liger"; factors_dtype: of LoRA's factors."""

    name: str
    kind: str
    factors_dtype: torch.dtype = torch.float32


OURS = System("meshlora", "meshlora")
PEER = System("PEFT + SDPA", "peft")
SYSTEMS = (
    OURS,
    PEER,
    System("PEFT + SDPA, bf16 factors", "peft", torch.bfloat16),
    System("PEFT + torch.compile", "compile"),
    System("PEFT + liger-kernel", "liger"),
)


# --- the device -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What is different between a GPU and the CPU that stands for it in a dry run."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def allocated_bytes(self) -> int:
        """What tensors take now."""
        return torch.cuda.memory_allocated(self.device) if self.is_gpu else memory_bytes("VmRSS")

    def begin_peak(self) -> None:
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            begin_high_water_mark()

    def peak_bytes(self) -> int:
        """The most since `begin_peak`."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_gpu else memory_bytes("VmHWM")

    def collect(self) -> None:
        """Give back what nobody uses."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_gpu else "CPU, which stands for a GPU"

    def matmul_flops(self, sizes: list[tuple[int, int, int]], dtype: torch.dtype, repeats: int = 10) -> float:
        """The most FLOP/s that a product of one of `sizes` (m, k, n) reaches: the ceiling of this run."""
        best = 0.0
        for m, k, n in sizes:
            a, b = (torch.randn(*size, device=self.device, dtype=dtype) for size in ((m, k), (k, n)))
            out = torch.empty(m, n, device=self.device, dtype=dtype)
            for _ in range(3):
                torch.mm(a, b, out=out)
            seconds = []
            for _ in range(5):
                self.synchronize()
                started = time.perf_counter()
                for _ in range(repeats):
                    torch.mm(a, b, out=out)
                self.synchronize()
                seconds.append((time.perf_counter() - started) / repeats)
            best = max(best, 2 * m * k * n / statistics.median(seconds))
        return best


# --- the systems ----------------------------------------------------------------------------------------------------


class Candidate:
    """A model on the shared base, with its optimizer. Subclasses say how to make gradients."""

    def __init__(self, system: System, model: Any, dtype: torch.dtype) -> None:
        self.system, self.model, self.dtype = system, model.train(), dtype
        # The shared base does not train, and the optimizer's moments do not exist before the first step.
        self.optimizer: torch.optim.Optimizer | None = None

    def factors(self) -> dict[str, nn.Parameter]:
        """Trainable parameters, by the name that PEFT's files have."""
        return {
            name.removeprefix("_orig_mod.").replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def loss(self, inputs: Inputs) -> Tensor:
        """Mean over trained tokens, of a graph whose leaves are the factors."""
        given = {"input_ids": inputs.ids, "position_ids": inputs.position_ids, "use_cache": False}
        is_mixed = self.dtype == torch.bfloat16 and self.system.factors_dtype == torch.float32
        with torch.autocast(inputs.ids.device.type, torch.bfloat16) if is_mixed else contextlib.nullcontext():
            logits = self.model(**given).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), inputs.shifted.flatten())

    def gradients(self, inputs: Inputs) -> Tensor:
        """Leave the gradient of the mean loss on the factors; returns that loss, detached and on the device."""
        loss = self.loss(inputs)
        loss.backward()
        return loss.detach()

    def step(self, inputs: Inputs) -> None:
        """One optimizer step."""
        if self.optimizer is None:
            factors = self.factors().values()
            self.optimizer = torch.optim.AdamW(factors, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        self.optimizer.zero_grad(set_to_none=True)
        self.gradients(inputs)
        self.optimizer.step()


class Meshlora(Candidate):
    """As the trainer runs it: what the host knows of a batch it need not ask the device for."""

    def __init__(self, system: System, model: Any, dtype: torch.dtype) -> None:
        super().__init__(system, model, dtype)
        keep_apart(model)

    def factors(self) -> dict[str, nn.Parameter]:
        return {factor.name: factor.parameter for factor in active_factors(self.model)}

    def gradients(self, inputs: Inputs) -> Tensor:
        batch, mesh = inputs.ours, runtime(self.model).mesh
        (loss,) = language_model_losses(self.model, batch, [("default", batch)], label_smoothing=0.0)
        loss.backward()
        totals = finish_gradients_on_device(mesh, [active_factors(self.model)], [inputs.num_trained])
        return loss.detach() / totals[0]


class Liger(Candidate):
    """Its loss is fused with the head, and needs the labels. What it changes in transformers holds in its turns."""

    def __init__(self, system: System, model: Any, dtype: torch.dtype, patch: ModulePatch) -> None:
        super().__init__(system, model, dtype)
        self.patch = patch

    def loss(self, inputs: Inputs) -> Tensor:
        given = {"input_ids": inputs.ids, "position_ids": inputs.position_ids, "use_cache": False}
        is_mixed = self.dtype == torch.bfloat16
        with torch.autocast(inputs.ids.device.type, torch.bfloat16) if is_mixed else contextlib.nullcontext():
            return self.model(**given, labels=inputs.labels).loss

    def gradients(self, inputs: Inputs) -> Tensor:
        with self.patch.applied():
            return super().gradients(inputs)


class ModulePatch:
    """What a call changed in the names of a module, taken back, and to be put there again for a while."""

    def __init__(self, module: ModuleType, apply: Callable[[], None]) -> None:
        self.module, before = module, dict(vars(module))
        try:
            apply()
            self.changed = {k: v for k, v in vars(module).items() if k not in before or before[k] is not v}
        finally:
            for name in [name for name in vars(module) if name not in before]:
                delattr(module, name)
            vars(module).update(before)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        before = {name: vars(self.module).get(name) for name in self.changed}
        vars(self.module).update(self.changed)
        try:
            yield
        finally:
            vars(self.module).update(before)


class NotHere(RuntimeError):
    """A peer that cannot run on this machine; the message says why."""


@dataclass
class Bench:
    """One shape on one machine: the shared base, and the systems on it.

    resident: bytes that a system keeps between its turns, its factors and their moments. left_out: reasons by system.
    """

    shape: Shape
    machine: Machine
    dtype: torch.dtype
    folder: Path
    compile_backend: str
    candidates: dict[str, Candidate] = field(default_factory=dict)
    resident: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def build(self, systems: tuple[System, ...]) -> None:
        """All of `systems`; ours first, since the others read its adapter."""
        assert systems[0] is OURS, systems
        torch.manual_seed(0)
        implementation = {"experts_implementation": self._experts()} if self.shape.has_experts else {}
        with torch.device(self.machine.device):
            base = AutoModelForCausalLM.from_config(
                copy.deepcopy(self.shape.config), dtype=self.dtype, attn_implementation="sdpa", **implementation
            )
        base.requires_grad_(False)
        for system in systems:
            for candidate in self._attempt(system, self._make, system, base):
                self.candidates[system.name] = candidate

    def _experts(self) -> str:
        # grouped_mm is the fastest of PEFT's (moe_vs_peft.py); on GPUs its kernel is for bf16.
        return "grouped_mm" if self.dtype == torch.bfloat16 or not self.machine.is_gpu else "eager"

    def _make(self, system: System, base: Any) -> Candidate:
        if system.kind == "meshlora":
            # Whole tensors are not copied: the base is there once.
            with mock.patch.object(api, "_random_weights", return_value=dict(base.state_dict())):
                model = meshlora.load(
                    copy.deepcopy(self.shape.config),
                    lora=self.shape.lora_config(),
                    dtype=self.dtype,
                    device=self.machine.device.type,
                    attn_implementation="sdpa",
                )
            meshlora.save_adapter(model, self.folder / "adapter")
            # Else the peak of every system would hold a second base.
            shared = {p.untyped_storage().data_ptr() for p in base.parameters()}
            own_base = [name for name, p in model.named_parameters() if not p.requires_grad]
            copied = [n for n in own_base if model.get_parameter(n).untyped_storage().data_ptr() not in shared]
            assert own_base, "no frozen base"
            assert not copied, copied
            return Meshlora(system, model, self.dtype)
        own = copy.deepcopy(base, {id(p): p for p in base.parameters()})  # modules of its own, the same tensors
        patch = _liger(own) if system.kind == "liger" else None
        model = PeftModel.from_pretrained(
            own,
            str(self.folder / "adapter"),
            is_trainable=True,
            autocast_adapter_dtype=system.factors_dtype == torch.float32,
        )
        for parameter in model.parameters():
            if parameter.requires_grad:
                wanted = torch.float32 if self.dtype == torch.float32 else system.factors_dtype
                parameter.data = parameter.data.to(wanted)
        if patch is not None:
            return Liger(system, model, self.dtype, patch)
        if system.kind == "compile":
            # Two shapes of input, each a graph of its own: packed rows have a mask.
            model = torch.compile(model, backend=self.compile_backend, dynamic=False)
        return Candidate(system, model, self.dtype)

    def _attempt(self, system: System, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What `work(*args)` returns, alone in a list; empty if it failed and left `system` out.

        What we cannot do is an error, and what the reference cannot: but that it may be out of memory.
        """
        try:
            return [work(*args)]
        except Exception as error:  # a peer fails in ways of its own
            if system is OURS or (system is PEER and not isinstance(error, torch.OutOfMemoryError)):
                raise
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:160]}"
        self.left_out[system.name] = reason
        self.candidates.pop(system.name, None)
        self.machine.collect()
        print(f"{self.shape.name}: {system.name} is left out: {reason}", file=sys.stderr, flush=True)
        return []

    # --- parity -----------------------------------------------------------------------------------------------------

    def check(self, batches: list[Inputs]) -> float | None:
        """The worst difference of a loss or a gradient from the reference, relative, of what is not left out; None
        where the reference itself found no room.

        Raises:
            ParityError: ours differs.
        """
        worst = 0.0
        for inputs in batches:
            if PEER.name not in self.candidates:
                return None
            found = self._attempt(PEER, self._first_gradients, self.candidates[PEER.name], inputs)
            if not found:
                return None
            [(loss, reference)] = found
            for candidate in list(self.candidates.values()):
                if candidate.system is PEER:
                    continue
                off = self._attempt(candidate.system, self._difference, candidate, inputs, loss, reference)
                worst = max([worst, *off])
        return worst

    def _difference(self, candidate: Candidate, inputs: Inputs, loss: float, reference: dict[str, Tensor]) -> float:
        what = f"{candidate.system.name}, {self.shape.name}, {inputs.name}, {str(self.dtype).removeprefix('torch.')}"
        own_loss, own = self._first_gradients(candidate, inputs)
        if own.keys() != reference.keys():
            odd = sorted(own.keys() ^ reference.keys())[:4]
            raise ParityError(f"{what}: factors that the other has not, {odd}", math.inf, FP32_LIMIT)
        of_loss = abs(own_loss - loss) / abs(loss)
        if self.dtype == torch.float32:
            of_factors = max(_distance([own[name]], [whole]) for name, whole in reference.items())
            return _within(what, max(of_loss, of_factors), FP32_LIMIT)
        _within(f"{what}, loss", of_loss, BF16_LOSS_LIMIT)
        if self.shape.has_experts:
            return of_loss
        names = list(reference)
        of_all = _distance([own[name] for name in names], [reference[name] for name in names])
        _within(f"{what}, gradient", of_all, BF16_GRADIENT_LIMIT)
        return max(of_loss, of_all)

    def _first_gradients(self, candidate: Candidate, inputs: Inputs) -> tuple[float, dict[str, Tensor]]:
        """The loss, and every gradient under our names and in our shapes."""
        for parameter in candidate.factors().values():
            parameter.grad = None
        loss = float(candidate.gradients(inputs))
        gradients = {}
        for name, parameter in candidate.factors().items():
            assert parameter.grad is not None, name
            is_ours = candidate.system is OURS
            own, gradient = (name, parameter.grad) if is_ours else self._as_ours(name, parameter.grad)
            gradients[own] = gradient.float().clone()
            parameter.grad = None
        return loss, gradients

    def _as_ours(self, name: str, gradient: Tensor) -> tuple[str, Tensor]:
        """PEFT's name and shape to ours. Of experts the inner wrapper is that of the parameter that is named first;
        its A is expert-major, its B expert-minor."""
        module, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        bare = module.removesuffix(".base_layer")
        if not bare.endswith(".experts"):
            return f"{module}.{side}", gradient
        num = self.shape.config.num_experts
        own = f"{bare}.{'down_proj' if bare == module else 'gate_up_proj'}.{side}"
        if side == "lora_A":
            return own, gradient.view(num, RANK, -1)
        return own, gradient.view(len(gradient), RANK, num).permute(2, 0, 1)

    # --- times and memory -------------------------------------------------------------------------------------------

    def warm_up(self, batches: list[Inputs]) -> None:
        """Two steps on each input: kernels are chosen, graphs compiled, moments there; then what a system keeps."""
        for candidate in list(self.candidates.values()):
            self._attempt(candidate.system, self._warm_up, candidate, batches)

    def _warm_up(self, candidate: Candidate, batches: list[Inputs]) -> None:
        for inputs in batches:
            for _ in range(2):
                candidate.step(inputs)
        assert candidate.optimizer is not None
        candidate.optimizer.zero_grad(set_to_none=True)
        kept = [*candidate.factors().values()]
        kept += [t for state in candidate.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        self.resident[candidate.system.name] = sum(t.numel() * t.element_size() for t in kept)

    def measure(self, batches: list[Inputs], turns: int) -> dict[str, dict[str, list[dict[str, float]]]]:
        """By input and system, of each turn: `step_time_s`, the median, and `peak_bytes`. Systems take turns."""
        found: dict[str, dict[str, list[dict[str, float]]]] = {
            inputs.name: {name: [] for name in self.candidates} for inputs in batches
        }
        for turn in range(turns):
            for inputs in batches:
                for name, candidate in list(self.candidates.items()):
                    found[inputs.name][name] += self._attempt(candidate.system, self._turn, candidate, inputs)
            print(f"{self.shape.name}: turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
        return {given: {name: by[name] for name in self.candidates} for given, by in found.items()}

    def _turn(self, candidate: Candidate, inputs: Inputs) -> dict[str, float]:
        candidate.step(inputs)
        self.machine.synchronize()
        self.machine.begin_peak()
        seconds = []
        for _ in range(STEPS):
            started = time.perf_counter()
            candidate.step(inputs)
            self.machine.synchronize()
            seconds.append(time.perf_counter() - started)
        peak = self.machine.peak_bytes()
        assert candidate.optimizer is not None
        candidate.optimizer.zero_grad(set_to_none=True)  # no system's gradients lie there in the turn of another
        others = sum(
            size for name, size in self.resident.items() if name != candidate.system.name and name in self.candidates
        )
        return {"step_time_s": statistics.median(seconds), "peak_bytes": peak - others}


def _within(what: str, difference: float, limit: float) -> float:
    if not difference <= limit:
        raise ParityError(f"{what}, against {PEER.name}", difference, limit)
    return difference


def _distance(own: list[Tensor], reference: list[Tensor]) -> float:
    """Relative L2 distance of the tensors as one vector."""
    difference = sum(float((a - b).double().norm() ** 2) for a, b in zip(own, reference, strict=True))
    return math.sqrt(difference / sum(float(b.double().norm() ** 2) for b in reference))


def _liger(model: Any) -> ModulePatch:
    """Apply liger-kernel to one model; its changes to the module of the family are kept apart."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise NotHere(f"liger-kernel is not installed ({error})") from error
    module = sys.modules[type(model).__module__]
    forward = type(model).forward
    patch = ModulePatch(module, lambda: _apply_liger_kernel_to_instance(model=model))
    if type(model).forward is not forward:  # some versions change the class
        model.forward = MethodType(type(model).forward, model)
        type(model).forward = forward
    return patch


# --- the run --------------------------------------------------------------------------------------------------------


def measure_shape(
    shape: Shape, machine: Machine, systems: tuple[System, ...], turns: int, backend: str
) -> dict[str, Any]:
    """Parity in fp32 with two layers, then parity, memory and times in bf16."""
    shallow = Shape(shape.name, resized(shape.config, num_hidden_layers=2), 1, min(shape.seq_len, 512), shape.lora)
    result: dict[str, Any] = {"left_out": {}}
    for dtype, of in ((torch.float32, shallow), (torch.bfloat16, shape)):
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(of, machine, dtype, Path(folder), backend)
            wanted = [s for s in systems if s.name not in result["left_out"]]
            if dtype == torch.float32:  # the same as PEER there
                wanted = [s for s in wanted if s.factors_dtype == torch.float32]
            bench.build(tuple(wanted))
            batches = inputs_of(of, machine.device)
            off = result[f"off_{str(dtype).removeprefix('torch.')}"] = bench.check(batches)
            if off is None and dtype == torch.float32:
                raise RuntimeError(f"{shape.name}: no room to compare two layers: {bench.left_out}")
            if dtype == torch.bfloat16:
                bench.warm_up(batches)
                result["runs"] = bench.measure(batches, turns)
            result["left_out"] |= bench.left_out
        del bench
        machine.collect()
    h, m = (shape.config.hidden_size, shape.batch_size * shape.seq_len)
    wide = shape.config.moe_intermediate_size if shape.has_experts else shape.config.intermediate_size
    sizes = [(m, h, h), (m, h, wide), (m, wide, h), (2 * m, 2 * m, 2 * m)]
    result["ceiling_flops"] = machine.matmul_flops(sizes, torch.bfloat16)
    result["inputs"] = {
        inputs.name: {
            "num_tokens": inputs.num_tokens,
            "lengths": inputs.lengths,
            "flops_per_token": flops_per_token(shape, inputs.lengths),
            "ceiling_tokens_per_s": result["ceiling_flops"] / flops_per_token(shape, inputs.lengths),
        }
        for inputs in batches
    }
    return result


def rows_of(shape: Shape, result: dict[str, Any]) -> list[Row]:
    """Ours against each peer that ran, against the ceiling, and against what is asked for."""
    rows = []
    for name, runs in result["runs"].items():
        about = result["inputs"][name]
        rates = {s: [about["num_tokens"] / turn["step_time_s"] for turn in turns] for s, turns in runs.items()}
        peaks = {s: [turn["peak_bytes"] / 2**30 for turn in turns] for s, turns in runs.items()}
        what, ours = f"{shape.name}, {name}", {"ours_name": OURS.name}
        is_asked = name == "one sequence"
        for peer in (s for s in rates if s != OURS.name):
            speed, memory = (
                (shape.target_speed, shape.target_memory) if peer == PEER.name and is_asked else (None, None)
            )
            names = {**ours, "peer_name": peer}
            rows.append(greater(what, rates[OURS.name], rates[peer], unit="tokens/s", target=speed, **names))
            rows.append(
                smaller(f"{what}, peak memory", peaks[OURS.name], peaks[peer], unit="GiB", target=memory, **names)
            )
        ceiling = len(rates[OURS.name]) * [about["ceiling_tokens_per_s"]]
        rows.append(greater(what, rates[OURS.name], ceiling, unit="tokens/s", peer_name="matmul ceiling", **ours))
        if shape.target_rate is not None and is_asked:
            asked = len(ceiling) * [shape.target_rate]
            rows.append(
                greater(
                    what, rates[OURS.name], asked, unit="tokens/s", peer_name="asked of an H200", target=1.0, **ours
                )
            )
    return rows


def page(shapes: list[Shape], results: dict[str, dict[str, Any]], machine: Machine) -> str:
    """tokens/s, part of the ceiling and peak memory of each system."""
    lines = [f"{machine.name()}. bf16 base, r={RANK}, SDPA, nothing recomputed; medians of the turns."]
    for shape in shapes:
        result = results[shape.name]
        lines += ["", f"## {shape.name}: {describe(shape)}", ""]
        in_bf16 = "not compared" if result["off_bfloat16"] is None else f"{result['off_bfloat16']:.0e}"
        lines += [
            f"matmul ceiling {result['ceiling_flops'] / 1e12:.1f} TFLOP/s; parity: fp32, two layers "
            f"{result['off_float32']:.0e}, bf16 {in_bf16}.",
            "",
            "| input | system | step | tokens/s | of the ceiling | peak memory |",
            "|---|---|---|---|---|---|",
        ]
        for name, runs in result["runs"].items():
            about = result["inputs"][name]
            for system, turns in runs.items():
                step = statistics.median(turn["step_time_s"] for turn in turns)
                peak = statistics.median(turn["peak_bytes"] for turn in turns)
                rate = about["num_tokens"] / step
                lines.append(
                    f"| {name} | {system} | {1e3 * step:,.0f} ms | {rate:,.0f} | "
                    f"{rate / about['ceiling_tokens_per_s']:.1%} | {peak / 2**30:.2f} GiB |"
                )
        if result["left_out"]:
            lines += ["", *(f"- {name} is left out: {reason}" for name, reason in result["left_out"].items())]
    return "\n".join(lines)


def print_plan(shapes: list[Shape], systems: tuple[System, ...], turns: int) -> None:
    """What a run on a GPU would measure."""
    print(f"plan: {turns} turns of {STEPS} steps of each system, after parity in fp32 with two layers and in bf16")
    for shape in shapes:
        print(f"- {shape.name}: {describe(shape)}")
        asked = {"times as fast as PEFT + SDPA": shape.target_speed, "of its memory": shape.target_memory}
        asked |= {"tokens/s on an H200": shape.target_rate}
        targets = [f"{value:,g} {what}" for what, value in asked.items() if value is not None]
        print(f"  packed rows of {packed_lengths(shape.seq_len)}; asked for: {', '.join(targets) or 'nothing'}")
    print(f"- systems: {', '.join(system.name for system in systems)}", flush=True)


def measure(options: argparse.Namespace) -> Findings:
    """All shapes, one after the other."""
    machine = Machine(
        torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    )
    systems = tuple(s for s in SYSTEMS if options.compile or s.kind != "compile")
    shapes = [shape for shape in real_shapes() if options.shape is None or shape.name in options.shape]
    turns = 2 if options.quick else options.turns
    if options.dry_run:
        print_plan(shapes, systems, turns)
    if options.tiny:
        shapes, turns = [tiny(shape) for shape in shapes], 2
    # Inductor needs a compiler, and minutes; that dynamo takes the model shows without it.
    backend = "inductor" if machine.is_gpu else "eager"
    results = {shape.name: measure_shape(shape, machine, systems, turns, backend) for shape in shapes}
    worst = max(result["off_float32"] for result in results.values())
    details = {
        "device": machine.name(),
        "systems": [{**asdict(s), "factors_dtype": str(s.factors_dtype)} for s in systems],
        "shapes": results,
    }
    what = f"loss and every gradient, two layers in fp32, and loss and gradient in bf16, against {PEER.name}"
    rows = [row for shape in shapes for row in rows_of(shape, results[shape.name])]
    return Findings(Parity(what, worst, FP32_LIMIT, agrees=True), rows, details, page(shapes, results, machine))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for --tiny")
    made.add_argument("--dry-run", action="store_true", help="print the plan, then run all of it tiny on the CPU")
    made.add_argument("--shape", action="append", choices=[s.name for s in real_shapes()], help="only this; may repeat")
    made.add_argument("--turns", type=int, default=5, help=f"of each system and input, {STEPS} timed steps each")
    made.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    made.add_argument("--topology", action="append", help="several GPUs, as in tp=8 (gpu_ranks.py); may be repeated")
    options = made.parse_args()
    if options.dry_run:
        options.device, options.tiny = "cpu", True
    if options.device == "cpu" and not options.tiny:
        made.error("--device cpu is for --tiny: the shapes are those of a GPU")
    if options.device == "cuda" and not torch.cuda.is_available():
        made.error("there is no GPU here; --dry-run works without one")
    be_quiet()
    if options.topology:
        title = "LoRA steps on several GPUs: topologies of meshlora against one process"
        return run(title, options, measure_topologies, name="gpu_ranks")
    return run("LoRA steps on one GPU: meshlora against PEFT", options, measure, name="gpu")


if __name__ == "__main__":
    sys.exit(main())
