"""The systems that `benchmarks/gpu.py` compares: their names, and how each computes the gradients of a step.

Owns: what is ours and what a peer's, replays of a record, kernels of liger-kernel put in and taken out. Does not own:
models, parity, turns (`gpu.py`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_shapes import Inputs, Shape
from meshlora.adapter.attach import active_factors, runtime
from meshlora.layers.tokens import Share
from meshlora.run.graphs.graphs import Graphs
from meshlora.run.graphs.recorder import Recorder, recorder
from meshlora.train.batch import Batch
from meshlora.train.gradsync import finish_gradients_on_device
from meshlora.train.losses import language_model_losses
from meshlora.wings.packed_rows.by_sequence import keep_apart

LEARNING_RATE = 1e-4


# --- the systems' names ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """One competitor.

    Attributes:
        kind: "meshlora", "peft", "compile", "liger" or "qlora". factors_dtype: of LoRA's factors.
        kernels, quantization, compute: as in `meshlora.load`; a peer's quantization is that which it is compared with.
        recompute: of shapes whose layers compute their activations twice.
        is_recorded: forward and backward are replayed as a CUDA graph, from the second step on an input on.
    """

    name: str
    kind: str
    factors_dtype: torch.dtype = torch.float32
    kernels: str = "none"
    quantization: str | None = None
    compute: str | None = None
    recompute: str = "full"
    is_recorded: bool = False

    @property
    def is_ours(self) -> bool:
        return self.kind == "meshlora"

    @property
    def is_untried(self) -> bool:
        """No GPU has run it yet: what fails of it is to take no number of another away."""
        return self.is_recorded or self.kernels == "fused" or self.compute is not None


OURS = System("meshlora", "meshlora")
OURS_LIGER = System("meshlora + liger", "meshlora", kernels="liger")
PEER = System("PEFT + SDPA", "peft")
PEER_LIGER = System("PEFT + liger-kernel", "liger")
FLOAT8 = System("meshlora + liger, fp8", "meshlora", kernels="liger", compute="fp8")
KEPT = System("meshlora + liger, keep_attention", "meshlora", kernels="liger", recompute="keep_attention")
OFFLOADED = System("meshlora + liger, offload", "meshlora", kernels="liger", recompute="offload")
FUSED = System("meshlora + fused", "meshlora", kernels="fused")
RECORDED = System("meshlora + fused, recorded", "meshlora", kernels="fused", is_recorded=True)
RECORDED_FLOAT8 = System(
    "meshlora + fused, fp8, recorded", "meshlora", kernels="fused", compute="fp8", is_recorded=True
)
SYSTEMS = (
    OURS,
    OURS_LIGER,
    PEER,
    System("PEFT + SDPA, bf16 factors", "peft", torch.bfloat16),
    System("PEFT + torch.compile", "compile"),
    PEER_LIGER,
)
OF_FLOAT8 = (
    FLOAT8,
    System("meshlora + liger, fp8_backward", "meshlora", kernels="liger", compute="fp8_backward"),
    System("meshlora, fp8 products", "meshlora", compute="fp8"),
)
OF_RECOMPUTE = (
    KEPT,
    OFFLOADED,
    System("meshlora, keep_attention", "meshlora", recompute="keep_attention"),
    System("meshlora, offload", "meshlora", recompute="offload"),
)
OF_RECORDS = (FUSED, RECORDED, RECORDED_FLOAT8, System("meshlora, recorded", "meshlora", is_recorded=True))
QUANTIZED = (
    OURS,
    PEER,
    System("meshlora, nf4", "meshlora", quantization="nf4"),
    System("meshlora, fp8", "meshlora", quantization="fp8"),
    System("meshlora, mxfp4", "meshlora", quantization="mxfp4"),
    System("PEFT QLoRA, nf4", "qlora", quantization="nf4"),
)


def systems_of(shape: Shape) -> tuple[System, ...]:
    """Those that are measured on `shape`: ours first."""
    if shape.is_quantized:
        return QUANTIZED
    ours, peers = SYSTEMS[:2], SYSTEMS[2:]
    if shape.has_experts:  # which keep their products
        return (*ours, *(system for system in OF_RECORDS if system.compute is None), *peers)
    if shape.recompute:
        return (*ours, *OF_FLOAT8, *OF_RECOMPUTE, *peers)
    return (*ours, *OF_FLOAT8, *OF_RECORDS, *peers)


# --- the systems ----------------------------------------------------------------------------------------------------


class Candidate:
    """A model on the shared base, with its optimizer. Subclasses say how to make gradients."""

    def __init__(self, system: System, model: Any, dtype: torch.dtype) -> None:
        self.system, self.model, self.dtype = system, model.train(), dtype
        # The shared base does not train, and the optimizer's moments do not exist before the first step.
        self.optimizer: torch.optim.Optimizer | None = None
        self.refused: dict[str, str] = {}  # inputs on which it is not what its name says, and why

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
        loss = self.summed_gradients(inputs)
        totals = finish_gradients_on_device(
            runtime(self.model).mesh, [active_factors(self.model)], [inputs.num_trained]
        )
        return loss / totals[0]

    def summed_gradients(self, inputs: Inputs) -> Tensor:
        """Leave the gradient of the summed loss on the factors; returns that loss."""
        loss = self.summed(inputs.ours)
        loss.backward()
        return loss.detach()

    def summed(self, batch: Batch) -> Tensor:
        """The loss, as a sum over trained tokens."""
        (loss,) = language_model_losses(self.model, batch, [("default", batch)], label_smoothing=0.0)
        return loss


class Recorded(Meshlora):
    """The same with `train.cuda_graphs`: the second step on an input records it, and the first replay is compared.

    Each input has `Graphs` of its own, so that one which cannot be recorded ends no other. Their memory is shared.
    """

    def __init__(self, system: System, model: Any, dtype: torch.dtype) -> None:
        super().__init__(system, model, dtype)
        self.forget()

    def forget(self) -> None:
        """Give back all records, and their memory."""
        self.graphs: dict[str, Graphs] = {}
        self.recorder: Recorder = recorder() or Again()

    def summed_gradients(self, inputs: Inputs) -> Tensor:
        if inputs.name in self.refused:
            return super().summed_gradients(inputs)
        graphs = self.graphs[inputs.name] = self.graphs.get(inputs.name) or self._graphs(inputs.name)
        graphs.begin()
        takes = graphs.takes(inputs.ours)
        loss = graphs.run(inputs.ours) if takes else super().summed_gradients(inputs)
        graphs.end()
        return loss

    def _graphs(self, name: str) -> Graphs:
        return Graphs(
            self.model,
            active_factors(self.model),
            self.recorder,
            label_smoothing=0.0,
            masks=lambda _: contextlib.nullcontext(),
            share=lambda batch: Share(None, batch.tokens),
            eager=self.summed,
            say=lambda why: self.refused.update({name: why.rpartition("from now on: ")[2]}),
        )


class Again:
    """In the place of a record on a CPU, which has none: what was to be recorded runs again."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


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


def liger(model: Any) -> ModulePatch:
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
