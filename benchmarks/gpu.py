"""Training steps on one GPU at real shapes, against PEFT, and against the GPU's own matmul ceiling, in one run.

    python benchmarks/gpu.py [--shape NAME ...] [--system NAME ...] [--turns N] [--kernels] [--json FILE]
    python benchmarks/gpu.py --dry-run              # without a GPU: the plan, then the whole of it at tiny sizes
    python benchmarks/gpu.py --device cpu --tiny    # the same at tiny sizes on the CPU
    python benchmarks/gpu.py --topology tp=8 ...    # several GPUs, with torchrun and NCCL: gpu_ranks.py

Random weights, made on the device; bf16 base, factors of LoRA in fp32 unless a system says otherwise, SDPA attention.
All systems of a shape share the tensors of one base, but for those that a system keeps in few bits, take turns, and
start from one adapter, which meshlora writes and PEFT reads. A step is forward, loss, backward, AdamW (fused). Each
shape is measured on one long sequence a row, and on packed rows of the same length.

Parity first: the same systems with two layers in fp32, loss and every gradient against PEFT in fp32. Then at full size
in bf16, on at most 4,096 tokens a row: each side against PEFT in fp32 on the same weights, of a base in few bits those
that its codes stand for. There ours may be four times as far off as the rounding of PEFT in bf16, as in the judge of
`meshlora verify`: deep models with random weights amplify rounding, so two right systems may differ from each other by
more than any fixed limit. Products in float8 round sixteen times as coarsely: with two layers, in bf16, they may be
FLOAT8_LIMIT off, with all layers their loss may. What of ours differs ends the benchmark; a peer that differs, or that
does not run here, is left out with its reason, and so are fused kernels, records and products in float8, which no GPU
has run yet. Of a recorded system the third step on an input, a replay, is compared.

Peak memory of a system is that of the allocator in its own turns, less what only other systems keep.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import PeftModel, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import meshlora
from gpu_kernels import kernels_of, table_of
from gpu_machine import Machine
from gpu_ranks import measure_topologies
from gpu_shapes import (
    RANK,
    SHALLOW,
    Inputs,
    Shape,
    describe,
    flops_per_token,
    inputs_of,
    packed_lengths,
    real_shapes,
    shallow,
    tiny,
)
from gpu_systems import (
    FLOAT8,
    KEPT,
    OF_FLOAT8,
    OF_RECOMPUTE,
    OF_RECORDS,
    OFFLOADED,
    OURS,
    OURS_LIGER,
    PEER,
    PEER_LIGER,
    QUANTIZED,
    RECORDED,
    RECORDED_FLOAT8,
    SYSTEMS,
    Candidate,
    Liger,
    Meshlora,
    Recorded,
    System,
    liger,
    systems_of,
)
from meshlora.layers.frozen import unpacked
from meshlora.loading import load as api
from meshlora.run.recompute import recompute_layers
from meshlora.wings.quantized.quantized import pack
from meshlora_ground.errors import UserError
from processes import be_quiet
from table import Findings, Parity, ParityError, Row, greater, parser, run, seconds_left, smaller, turns_within

FP32_LIMIT = 1e-3  # relative, two layers; a wrong scale of LoRA is 1 off
NOISE = 4.0  # in bf16: how much further from fp32 than PEFT's own rounding, as `meshlora_judge.judge` has it
FLOAT8_LIMIT = 0.2  # relative, of products in float8; a wrong scale is 1 off
ROUNDING = torch.finfo(torch.bfloat16).eps  # what one number of PEFT may be nearer by luck
PARITY_TOKENS = 4096  # of a row, in bf16
KERNELS_S = 15.0  # what a profile of all systems takes


Found = tuple[float, dict[str, Tensor]]  # a loss, and the gradient of every factor


@dataclass
class Bench:
    """One shape on one machine: the shared base, and the systems on it.

    kept: bytes by address of what a system holds between its turns. recorded: bytes of the memory of its records, which
    is none that is taken while they are replayed. left_out: reasons by system.
    """

    shape: Shape
    machine: Machine
    dtype: torch.dtype
    folder: Path
    compile_backend: str
    base: Any = None
    candidates: dict[str, Candidate] = field(default_factory=dict)
    kept: dict[str, dict[int, int]] = field(default_factory=dict)
    recorded: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def build(self, systems: tuple[System, ...]) -> None:
        """All of `systems`; ours first, since the others read its adapter."""
        assert systems[0] is OURS, systems
        torch.manual_seed(0)
        self.base = self._random_base(self.dtype)
        for system in systems:
            for candidate in self._attempt(system, self._make, system):
                self.candidates[system.name] = candidate

    def _random_base(self, dtype: torch.dtype) -> Any:
        # grouped_mm is the fastest of PEFT's (moe_vs_peft.py); on GPUs its kernel is for bf16.
        experts = "grouped_mm" if dtype == torch.bfloat16 or not self.machine.is_gpu else "eager"
        implementation = {"experts_implementation": experts} if self.shape.has_experts else {}
        with torch.device(self.machine.device):
            base = AutoModelForCausalLM.from_config(
                copy.deepcopy(self.shape.config), dtype=dtype, attn_implementation="sdpa", **implementation
            )
        return base.requires_grad_(False)

    def _make(self, system: System) -> Candidate:
        if system.is_ours:
            return self._make_ours(system)
        if system.kind == "qlora":
            return self._make_qlora(system)
        own = copy.deepcopy(self.base, {id(p): p for p in self.base.parameters()})  # modules of its own, same tensors
        patch = liger(own) if system.kind == "liger" else None
        model = self._with_adapter(own, system)
        if patch is not None:
            return Liger(system, model, self.dtype, patch)
        if system.kind == "compile":
            # Two shapes of input, each a graph of its own: packed rows have a mask.
            model = torch.compile(model, backend=self.compile_backend, dynamic=False)
        return Candidate(system, model, self.dtype)

    def _make_ours(self, system: System) -> Candidate:
        adapter = self.folder / "adapter"
        begun = {"lora": self.shape.lora_config()} if system is OURS else {"adapter": adapter}
        # Whole tensors are not copied: the base is there once.
        with mock.patch.object(api, "_random_weights", return_value=dict(self.base.state_dict())):
            model = meshlora.load(
                copy.deepcopy(self.shape.config),
                dtype=self.dtype,
                device=self.machine.device.type,
                attn_implementation="sdpa",
                kernels=system.kernels,  # type: ignore[arg-type] # of the literals
                quantization=system.quantization,
                compute=system.compute,
                **begun,
            )
        if self.shape.recompute:
            recompute_layers(model, system.recompute)
        if system is OURS:
            meshlora.save_adapter(model, adapter)
            # Else the peak of every system would hold a second base.
            shared, own_base = _storages(self.base.parameters()), [p for p in model.parameters() if not p.requires_grad]
            copied = [name for name, p in model.named_parameters() if not p.requires_grad and _address(p) not in shared]
            assert own_base, "no frozen base"
            assert not copied, copied
        # In float32 the host reads sizes of experts, and nothing takes joined rows at once: there is no record.
        is_recorded = system.is_recorded and self.dtype == torch.bfloat16
        return (Recorded if is_recorded else Meshlora)(system, model, self.dtype)

    def _make_qlora(self, system: System) -> Candidate:
        """As in PEFT's guide: read by transformers in 4 bits, prepared, then the adapter."""
        folder = self.folder / "base"
        self.base.save_pretrained(folder)
        bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=system.quantization, bnb_4bit_compute_dtype=self.dtype
        )
        own = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=self.dtype,
            attn_implementation="sdpa",
            quantization_config=bits,
            device_map={"": self.machine.device},
        )
        own = prepare_model_for_kbit_training(own, use_gradient_checkpointing=False)
        return Candidate(system, self._with_adapter(own, system), self.dtype)

    def _with_adapter(self, base: Any, system: System) -> Any:
        """PEFT's model of `base` with the adapter that ours has written."""
        model = PeftModel.from_pretrained(
            base,
            str(self.folder / "adapter"),
            is_trainable=True,
            autocast_adapter_dtype=system.factors_dtype == torch.float32,
        )
        for parameter in model.parameters():
            if parameter.requires_grad:
                wanted = torch.float32 if self.dtype == torch.float32 else system.factors_dtype
                parameter.data = parameter.data.to(wanted)
        if self.shape.recompute:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def _attempt(self, system: System, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What `work(*args)` returns, alone in a list; empty if it failed and left `system` out.

        What we cannot do is an error, unless we refuse it in words, as kernels that are not installed, or no GPU has
        run it yet; so is what the reference cannot, unless it is out of memory.
        """
        try:
            return [work(*args)]
        except Exception as error:  # a peer fails in ways of its own
            allowed = UserError if system.is_ours and system is not OURS else torch.OutOfMemoryError
            is_strict = (system.is_ours and not system.is_untried) or system is PEER
            if system is OURS or (is_strict and not isinstance(error, allowed)):
                raise
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:160]}"
        self.left_out[system.name] = reason
        self.candidates.pop(system.name, None)
        self.kept.pop(system.name, None)
        self.machine.collect()
        print(f"{self.shape.name}: {system.name} is left out: {reason}", file=sys.stderr, flush=True)
        return []

    # --- parity -----------------------------------------------------------------------------------------------------

    def check(self, batches: list[Inputs]) -> float | None:
        """How far the systems are from PEFT in fp32 on the same weights, the worst of what is not left out: relative in
        fp32, in bf16 as a multiple of PEFT's own rounding. None where the reference found no room.

        Raises:
            ParityError: ours differs.
        """
        worst = 0.0
        for kind in {candidate.system.quantization: None for candidate in self.candidates.values()}:
            try:
                exact, rounded = self._references(kind, batches)
            except torch.OutOfMemoryError:
                print(f"{self.shape.name}: no room for the reference in fp32", file=sys.stderr, flush=True)
                return None
            finally:
                self.machine.collect()
            for candidate in [c for c in self.candidates.values() if c.system.quantization == kind]:
                for index, inputs in enumerate(batches):
                    low = [found[index] for found in rounded]
                    off = self._attempt(candidate.system, self._difference, candidate, inputs, exact[index], low)
                    if not off:
                        break
                    worst = max(worst, *off)
        return worst

    def _references(self, kind: str | None, batches: list[Inputs]) -> tuple[list[Found], list[list[Found]]]:
        """What PEFT finds in fp32, of each of `batches`; and if this is bf16, in the two ways in which one can train in
        it: with factors in fp32, and in bf16."""
        exact = self._found_by_peft(torch.float32, torch.float32, kind, batches)
        if self.dtype == torch.float32:
            return exact, []
        ways = (torch.float32, torch.bfloat16)
        return exact, [self._found_by_peft(self.dtype, factors, kind, batches) for factors in ways]

    def _found_by_peft(
        self, dtype: torch.dtype, factors_dtype: torch.dtype, kind: str | None, batches: list[Inputs]
    ) -> list[Found]:
        """Of a model of its own on a copy of the base in `dtype`, rounded to `kind`."""
        base = self._random_base(dtype)
        base.load_state_dict(self.base.state_dict())
        if kind is not None:
            _round_linears(base, kind)
        # Else the activations of 8B in fp32 would not fit beside its two bases.
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        system = System("PEFT", "peft", factors_dtype)
        candidate = Candidate(system, self._with_adapter(base, system), dtype)
        found = [self._first_gradients(candidate, inputs) for inputs in batches]
        del base, candidate  # PEFT's models are in cycles, and the next base would not fit beside this one
        self.machine.collect()
        return found

    def _difference(self, candidate: Candidate, inputs: Inputs, exact: Found, rounded: list[Found]) -> float:
        what = f"{candidate.system.name}, {self.shape.name}, {inputs.name}, {str(self.dtype).removeprefix('torch.')}"
        (own_loss, own), (loss, reference) = self._first_gradients(candidate, inputs), exact
        if own.keys() != reference.keys():
            odd = sorted(own.keys() ^ reference.keys())[:4]
            raise ParityError(f"{what}: factors that the other has not, {odd}", math.inf, FP32_LIMIT)
        off = {"loss": abs(own_loss - loss) / abs(loss)}
        noise = {"loss": max((abs(low - loss) / abs(loss) for low, _ in rounded), default=0.0)}
        is_coarse = candidate.system.compute is not None
        # Rounding changes which experts tokens go to; that of float8, deep down, everything.
        is_lost = self.shape.has_experts or (is_coarse and self.shape.config.num_hidden_layers > SHALLOW)
        names = [] if rounded and is_lost else list(reference)
        for name in names:
            off[name] = _distance(own[name], reference[name])
            noise[name] = max((_distance(low[name], reference[name]) for _, low in rounded), default=0.0)
        if rounded and not is_coarse:  # NOISE times the noise and one rounding, as the limit of the judge
            off = {name: value / (noise[name] + ROUNDING / NOISE) for name, value in off.items()}
        name = max(off, key=lambda name: off[name] if off[name] == off[name] else math.inf)
        what = f"{what}, {name}, against PEFT in fp32"
        if is_coarse:
            return _within(what, off[name], FLOAT8_LIMIT)
        if rounded:
            return _within(f"{what}, as a multiple of PEFT's rounding", off[name], NOISE)
        return _within(what, off[name], FP32_LIMIT)

    def _first_gradients(self, candidate: Candidate, inputs: Inputs) -> Found:
        """The loss, and every gradient under our names and in our shapes."""
        for _ in range(3 if isinstance(candidate, Recorded) else 1):  # the third is replayed
            for parameter in candidate.factors().values():
                parameter.grad = None
            loss = float(candidate.gradients(inputs))
        gradients = {}
        for name, parameter in candidate.factors().items():
            assert parameter.grad is not None, name
            own, gradient = (name, parameter.grad) if candidate.system.is_ours else self._as_ours(name, parameter.grad)
            gradients[own] = gradient.float().clone()
            parameter.grad = None
        if isinstance(candidate, Recorded):
            candidate.forget()  # rows that are timed may be longer, and only their records count as memory
            self.machine.collect()
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
        """Some steps on each input: kernels are chosen, graphs compiled, moments there; then what a system keeps."""
        self.kept[""] = _storages([*self.base.parameters(), *self.base.buffers()])
        for candidate in list(self.candidates.values()):
            self._attempt(candidate.system, self._warm_up, candidate, batches)

    def _warm_up(self, candidate: Candidate, batches: list[Inputs]) -> None:
        before = self.machine.recorded_bytes()
        for inputs in batches:
            for _ in range(min(2, self.shape.steps)):
                candidate.step(inputs)
        name = candidate.system.name
        self.recorded[name] = self.machine.recorded_bytes() - before
        self.left_out |= {f"{name}, {where}": why for where, why in candidate.refused.items()}
        assert candidate.optimizer is not None
        candidate.optimizer.zero_grad(set_to_none=True)
        held = [*candidate.model.parameters(), *candidate.model.buffers()]
        states = [state for p in held if (state := getattr(p, "quant_state", None)) is not None]  # of bitsandbytes
        held += [state.absmax for state in states]
        held += [t for state in candidate.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        if isinstance(candidate, Recorded):
            held += [t for one in candidate.graphs.values() for t in vars(one).values() if isinstance(t, Tensor)]
        self.kept[name] = _storages(held)

    def measure(self, batches: list[Inputs], turns: Iterable[int]) -> dict[str, dict[str, list[dict[str, float]]]]:
        """By input and system, of each turn: `step_time_s`, the median, and `peak_bytes`. Systems take turns."""
        found: dict[str, dict[str, list[dict[str, float]]]] = {
            inputs.name: {name: [] for name in self.candidates} for inputs in batches
        }
        for turn in turns:
            for inputs in batches:
                for name, candidate in list(self.candidates.items()):
                    if inputs.name not in candidate.refused:
                        found[inputs.name][name] += self._attempt(candidate.system, self._turn, candidate, inputs)
            print(f"{self.shape.name}: turn {turn + 1}", file=sys.stderr, flush=True)
        return {given: {name: by[name] for name in self.candidates if by[name]} for given, by in found.items()}

    def _turn(self, candidate: Candidate, inputs: Inputs) -> dict[str, float]:
        if self.shape.steps > 1:  # of a long row the one of the warm-up is enough
            candidate.step(inputs)
        self.machine.synchronize()
        self.machine.begin_peak()
        seconds = []
        for _ in range(self.shape.steps):
            started = time.perf_counter()
            candidate.step(inputs)
            self.machine.synchronize()
            seconds.append(time.perf_counter() - started)
        peak = self.machine.peak_bytes()
        assert candidate.optimizer is not None
        candidate.optimizer.zero_grad(set_to_none=True)  # no system's gradients lie there in the turn of another
        own = self.kept[candidate.system.name]
        others = {at: size for held in self.kept.values() for at, size in held.items() if at not in own}
        peak += self.recorded[candidate.system.name] - sum(others.values())
        return {"step_time_s": statistics.median(seconds), "peak_bytes": peak}

    def kernels(self, inputs: Inputs) -> dict[str, Any]:
        """`gpu_kernels.Step` of each system, as plain values."""
        return {
            name: kernels_of(functools.partial(candidate.step, inputs), self.machine).as_dict()
            for name, candidate in self.candidates.items()
            if inputs.name not in candidate.refused
        }


def _within(what: str, difference: float, limit: float) -> float:
    if not difference <= limit:
        raise ParityError(what, difference, limit)
    return difference


def _distance(own: Tensor, reference: Tensor) -> float:
    """Relative L2 distance."""
    return float((own - reference).double().norm() / reference.double().norm())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of the memory of `tensors`."""
    return {_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


@torch.no_grad()
def _round_linears(model: Any, kind: str) -> None:
    """Replace the weights of all linears but the head by what their codes stand for."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            module.weight.copy_(unpacked(pack(module.weight, kind)))


# --- the run --------------------------------------------------------------------------------------------------------


def measure_shape(
    shape: Shape, machine: Machine, systems: tuple[System, ...], turns: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Parity in fp32 with two layers, then parity, memory and times in bf16, and the kernels of a step."""
    # Inductor needs a compiler, and minutes; that dynamo takes the model shows without it.
    backend = "inductor" if machine.is_gpu else "eager"
    result: dict[str, Any] = {"left_out": {}}
    # Of fp32 and bf16 factors only one is another system there; products in float8 are not those of fp32.
    coarse = tuple(system for system in systems if system.compute is not None)
    in_fp32 = tuple(s for s in without(systems, [s.name for s in coarse]) if s.factors_dtype == torch.float32)
    with _bench(shallow(shape), machine, torch.float32, in_fp32, backend) as bench:
        off = result["off_float32"] = bench.check(inputs_of(bench.shape, machine.device))
        if off is None:
            raise RuntimeError(f"{shape.name}: no room to compare two layers")
        result["left_out"] |= bench.left_out
    if coarse:
        with _bench(shallow(shape), machine, torch.bfloat16, coarse, backend) as bench:
            result["off_float8"] = bench.check(inputs_of(bench.shape, machine.device))
            result["left_out"] |= bench.left_out
    batches = inputs_of(shape, machine.device)
    short = replace(shape, seq_len=min(shape.seq_len, PARITY_TOKENS))
    with _bench(shape, machine, torch.bfloat16, without(systems, result["left_out"]), backend) as bench:
        result["off_bfloat16"] = bench.check(batches if short == shape else inputs_of(short, machine.device))
        bench.warm_up(batches)
        result["runs"] = bench.measure(batches, turns_within(turns, options))
        if options.kernels and (left_s := seconds_left(options)) < KERNELS_S:
            result["left_out"]["kernels of a step"] = f"{left_s:.0f} s are left of {options.budget_s:.0f}"
        elif options.kernels:
            result["kernels"] = bench.kernels(batches[0])
        result["left_out"] |= bench.left_out
    h, m = (shape.config.hidden_size, shape.batch_size * shape.seq_len)
    wide = shape.config.moe_intermediate_size if shape.has_experts else shape.config.intermediate_size
    sizes = [(m, h, h), (m, h, wide), (m, wide, h), (8192, 8192, 8192) if machine.is_gpu else (m, m, m)]
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


@contextlib.contextmanager
def _bench(
    shape: Shape, machine: Machine, dtype: torch.dtype, systems: tuple[System, ...], backend: str
) -> Iterator[Bench]:
    """With `systems` built, and ours for the adapter that it writes, if it is not one of them."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shape, machine, dtype, Path(folder), backend)
        bench.build((OURS, *(system for system in systems if system is not OURS)))
        if OURS not in systems:
            del bench.candidates[OURS.name]
            machine.collect()
        yield bench
    bench.candidates.clear()
    bench.base = None
    machine.collect()


def without(systems: Iterable[System], left_out: Iterable[str]) -> tuple[System, ...]:
    """Those of `systems` that are not named."""
    return tuple(system for system in systems if system.name not in {*left_out})


def rows_of(shape: Shape, result: dict[str, Any], card: str) -> list[Row]:
    """Each of ours against its peers that ran, against the ceiling, and against what is asked for on `card`."""
    rows = []
    for name, runs in result["runs"].items():
        about = result["inputs"][name]
        rates = {s: [about["num_tokens"] / turn["step_time_s"] for turn in turns] for s, turns in runs.items()}
        peaks = {s: [turn["peak_bytes"] / 2**30 for turn in turns] for s, turns in runs.items()}
        what, is_asked = f"{shape.name}, {name}", name == "one sequence"
        rows += _busy_rows(shape, what, result.get("kernels", {}) if is_asked else {})
        for ours, peer in _pairs(shape, rates):
            speed, memory = _targets(shape, ours, peer, is_packed=not is_asked)
            names = {"ours_name": ours.name, "peer_name": peer.name}
            own, other = ours.name, peer.name
            rows.append(greater(what, rates[own], rates[other], unit="tokens/s", target=speed, **names))
            rows.append(smaller(f"{what}, peak memory", peaks[own], peaks[other], unit="GiB", target=memory, **names))
        for system in systems_of(shape):
            if system.is_ours and system.name in rates:
                ceiling = len(rates[system.name]) * [about["ceiling_tokens_per_s"]]
                names = {"ours_name": system.name, "peer_name": "matmul ceiling"}
                rows.append(greater(what, rates[system.name], ceiling, unit="tokens/s", **names))
        if "H200" in card and shape.target_rate is not None and is_asked and OURS.name in rates:
            asked = len(rates[OURS.name]) * [shape.target_rate]
            names = {"ours_name": OURS.name, "peer_name": "asked of an H200"}
            rows.append(greater(what, rates[OURS.name], asked, unit="tokens/s", target=1.0, **names))
    return rows


def _pairs(shape: Shape, ran: Iterable[str]) -> list[tuple[System, System]]:
    """(ours, a peer) that ran: peers with a base in few bits beside ours of the same kind alone."""
    there = [system for system in systems_of(shape) if system.name in {*ran}]
    peers = [system for system in there if not system.is_ours]
    return [(own, p) for own in there if own.is_ours for p in peers if p.quantization in (None, own.quantization)]


def _targets(shape: Shape, ours: System, peer: System, *, is_packed: bool) -> tuple[float | None, float | None]:
    """Of speed and of memory."""
    if is_packed:
        return (shape.target_packed if ours in (OURS_LIGER, RECORDED) and peer == PEER_LIGER else None), None
    if ours in (OURS, RECORDED) and peer == PEER:
        return shape.target_speed, shape.target_memory
    of_liger = {OURS_LIGER: shape.target_liger, FLOAT8: shape.target_float8, KEPT: shape.target_kept}
    of_liger |= {RECORDED: shape.target_liger, RECORDED_FLOAT8: shape.target_float8, OFFLOADED: shape.target_kept}
    return (of_liger.get(ours) if peer == PEER_LIGER else None), None


def _busy_rows(shape: Shape, what: str, kernels: dict[str, Any]) -> list[Row]:
    """How much longer a step of ours takes than the GPU has work."""
    rows = []
    for system in systems_of(shape):
        if system.is_ours and system.name in kernels and shape.target_busy is not None:
            step, busy = ([1e3 * kernels[system.name][name]] for name in ("step_time_s", "busy_s"))
            names = {"ours_name": system.name, "peer_name": "GPU busy"}
            rows.append(smaller(f"{what}, a step", step, busy, unit="ms", target=shape.target_busy, **names))
    return rows


def page(shapes: list[Shape], results: dict[str, dict[str, Any]], machine: Machine) -> str:
    """tokens/s, part of the ceiling and peak memory of each system."""
    lines = [f"{machine.name()}. bf16 base, r={RANK}, SDPA; medians of the turns."]
    for shape in shapes:
        result = results[shape.name]
        lines += ["", f"## {shape.name}: {describe(shape)}", ""]
        off = result["off_bfloat16"]
        in_bf16 = "not compared" if off is None else f"at most {off:.2f} times as far from fp32 as PEFT's rounding"
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
        if "kernels" in result:
            lines += ["", "A step by classes of kernels, ms (kernels):", "", table_of(result["kernels"])]
    return "\n".join(lines)


def print_plan(shapes: list[Shape], turns: int, wanted: Callable[[Shape], tuple[System, ...]]) -> None:
    """What a run on a GPU would measure."""
    print(f"plan: {turns} turns of each system, after parity in fp32 with two layers and in bf16")
    for shape in shapes:
        print(f"- {shape.name}: {describe(shape)}")
        asked = {"times as fast as PEFT + SDPA": shape.target_speed, "of its memory": shape.target_memory}
        asked |= {"tokens/s on an H200": shape.target_rate, "times PEFT + liger-kernel": shape.target_liger}
        asked |= {"times it on packed rows": shape.target_packed, "times it in float8": shape.target_float8}
        asked |= {"times it with kept attention": shape.target_kept, "of the GPU's busy time": shape.target_busy}
        targets = [f"{value:,g} {what}" for what, value in asked.items() if value is not None]
        packed = f"packed rows of {packed_lengths(shape.seq_len)}; " if shape.is_packed else ""
        print(f"  {packed}asked for: {', '.join(targets) or 'nothing'}")
        print(f"  {shape.steps} steps a turn of: {', '.join(system.name for system in wanted(shape))}", flush=True)


def measure(options: argparse.Namespace) -> Findings:
    """All shapes, one after the other."""
    machine = Machine(
        torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    )

    def wanted(shape: Shape) -> tuple[System, ...]:
        there = [system for system in systems_of(shape) if options.compile or system.kind != "compile"]
        return tuple(system for system in there if options.system is None or system.name in options.system)

    shapes = [shape for shape in real_shapes() if options.shape is None or shape.name in options.shape]
    turns = 2 if options.quick else options.turns
    if options.dry_run:
        print_plan(shapes, turns, wanted)
    if options.tiny:
        shapes, turns = [tiny(shape) for shape in shapes], min(turns, 2)
    results = {shape.name: measure_shape(shape, machine, wanted(shape), turns, options) for shape in shapes}
    worst = max(result["off_float32"] for result in results.values())
    details = {
        "device": machine.name(),
        "bf16_flops": max(result["ceiling_flops"] for result in results.values()),
        "copy_bytes_s": machine.copy_bytes_s(),
        "launch_s": machine.launch_s(),
        "shapes": results,
    }
    what = "loss and every gradient against PEFT in fp32, two layers in fp32, and all layers in bf16"
    rows = [row for shape in shapes for row in rows_of(shape, results[shape.name], machine.name())]
    return Findings(Parity(what, worst, FP32_LIMIT, agrees=True), rows, details, page(shapes, results, machine))


def main() -> int:
    every = dict.fromkeys(system.name for system in (*SYSTEMS, *OF_FLOAT8, *OF_RECOMPUTE, *OF_RECORDS, *QUANTIZED))
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for --tiny")
    made.add_argument("--dry-run", action="store_true", help="print the plan, then run all of it tiny on the CPU")
    made.add_argument("--shape", action="append", choices=[s.name for s in real_shapes()], help="only this; may repeat")
    made.add_argument("--system", action="append", choices=every, metavar="NAME", help=f"only this: {', '.join(every)}")
    made.add_argument("--turns", type=int, default=5, help="of each system and input, of 3 timed steps, long rows of 1")
    made.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    made.add_argument("--kernels", action="store_true", help="also the kernels of a step, by classes")
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
    return run("LoRA steps on one GPU: meshlora against PEFT", options, measure, name="gpu_steps")


if __name__ == "__main__":
    sys.exit(main())
