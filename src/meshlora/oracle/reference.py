"""The reference: the same steps on one process by transformers + peft.

Owns: what a single process would have produced. None of meshlora's layers, collectives, gradient sync, adapter code or
batches is used here; only what both sides need: the sequences of a run, and the lift.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from meshlora.config import RunConfig
from meshlora.data import TokenizedDataset
from meshlora.errors import UnsupportedError
from meshlora.lift import lift
from meshlora.oracle.batches import UNTRAINED, micro_batches, micro_batches_of
from meshlora.oracle.batches import MicroBatch as MicroBatch
from meshlora.oracle.capture import Capture, copy
from meshlora.oracle.case import Case
from meshlora.oracle.trace import Trace

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdamW:
    """Settings of the reference optimizer, one learning rate per step."""

    learning_rates: Sequence[float]
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0


def reference_model(
    folder: str | Path,
    adapter: str | Path,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The checkpoint with the PEFT adapter, trainable, on one process, without dropout."""
    from peft import PeftModel

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    for name, value in config.to_dict().items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    base = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=attn_implementation,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
    )
    model = PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
    for name, module in model.named_modules():
        assert not type(module).__module__.startswith("meshlora"), name  # the judge runs none of the accused's layers
    return model.train()


def loss_sum(model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """(summed loss, logits `[B, S, V]`) of one micro-batch, lifted where the model is float64."""
    with lift(next(model.parameters()).dtype == torch.float64):
        # PEFT's wrapper calls forward(), past the hooks of a capture; the model inside it has the adapter's layers.
        inner = getattr(model, "get_base_model", lambda: model)()
        logits = inner(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=UNTRAINED, reduction="sum"
        )
    return loss, logits


def accumulate(model: nn.Module, batches: Iterable[MicroBatch]) -> float:
    """Leave on the factors the gradient of the mean loss over all trained tokens of `batches`; returns that loss."""
    total, tokens = 0.0, 0
    for batch in batches:
        loss, _ = loss_sum(model, batch)
        loss.backward()
        total += float(loss.detach())
        tokens += batch.num_tokens
    for name, parameter in trainable(model).items():
        if parameter.grad is None:
            raise UnsupportedError(
                f"an adapter on {name.rpartition('.')[0]}",
                "one process gives it no gradient: text does not pass through it",
                "leave it out with exclude_modules",
            )
        parameter.grad /= tokens
    return total / tokens


def train(model: nn.Module, steps: Iterable[Sequence[MicroBatch]], settings: AdamW) -> list[float]:
    """AdamW over `steps`, each a list of micro-batches; returns the loss of each step."""
    parameters = list(trainable(model).values())
    optimizer = torch.optim.AdamW(
        parameters, lr=0.0, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    losses = []
    for batches, rate in zip(steps, settings.learning_rates, strict=False):
        optimizer.zero_grad(set_to_none=True)
        losses.append(accumulate(model, batches))
        if settings.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return losses


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable factors by their module and side: `model.layers.0.mlp.up_proj.lora_A`."""
    return {
        name.removeprefix(_PREFIX).replace(".default.weight", ""): p
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def linear_rates(lr: float, *, warmup_steps: int, steps: int) -> list[float]:
    """Up over the warm-up, then down to zero at `steps`."""
    return [
        lr * ((s + 1) / warmup_steps if s < warmup_steps else (steps - s) / (steps - warmup_steps))
        for s in range(steps)
    ]


def train_run(
    config: RunConfig, data: TokenizedDataset, *, steps: int, pad_token_id: int, adapter: str | Path, out: str | Path
) -> list[float]:
    """What one process makes of a whole run: starts from `adapter`, saves with peft to `out`, returns the losses.

    The token batches are those of the run; everything after them is transformers, peft and torch.
    """
    options, torch_dtype = config.train, getattr(torch, config.model.dtype)
    model = reference_model(
        config.model.path, adapter, dtype=torch_dtype, attn_implementation=config.model.attn_implementation
    )

    def batches(step: int) -> list[MicroBatch]:
        return micro_batches_of(
            data,
            batch_size=options.batch_size,
            micro_batch_size=options.micro_batch_size,
            seed=options.seed,
            step=step,
            pad_token_id=pad_token_id,
        )

    rates = linear_rates(options.lr, warmup_steps=options.warmup_steps, steps=steps)
    settings = AdamW(
        rates, (options.beta1, options.beta2), options.eps, options.weight_decay, options.max_grad_norm or None
    )
    losses = train(model, (batches(step) for step in range(steps)), settings)
    model.save_pretrained(str(out))
    return losses


def trace_case(case: Case, *, precision: str, autocast: bool = False) -> Trace:
    """What one process makes of `case`, computed in `precision` from weights that are stored in the case's dtype.

    autocast: PEFT computes the adapter of a bfloat16 model in float32, unless torch's autocast, as trainers use it,
    makes it bfloat16 too.
    """
    with torch.autocast(case.device, torch.bfloat16, enabled=autocast):
        return _trace_case(case, precision)


def _trace_case(case: Case, precision: str) -> Trace:
    model = _case_model(case, case.adapter, precision)
    factors = trainable(model)
    optimizer = torch.optim.AdamW(
        list(factors.values()),
        lr=case.lr,
        betas=(case.beta1, case.beta2),
        eps=case.eps,
        weight_decay=case.weight_decay,
    )
    trace = Trace(initial=_copies(factors), scalings=scalings(model))
    trace.rates = linear_rates(case.lr, warmup_steps=case.warmup_steps, steps=case.steps)
    for step, rate in enumerate(trace.rates):
        batches = _case_batches(case, step)
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            with Capture(model.get_base_model()) as capture:
                loss = accumulate(model, batches)
            trace.micro_batches, trace.order = capture.micro_batches, list(capture.micro_batches[0].forward)
            trace.gradients = _gradients(factors)
        else:
            loss = accumulate(model, batches)
        norm = torch.nn.utils.clip_grad_norm_(list(factors.values()), case.max_grad_norm)
        if step == 0:
            trace.clipped = _gradients(factors)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        trace.losses.append(loss)
        trace.grad_norms.append(float(norm))
        trace.num_tokens.append(sum(batch.num_tokens for batch in batches))
    trace.final = _copies(factors)
    trace.final_logits = _first_logits(case, model)
    trace.eval_losses = [evaluate(case, model)]
    return trace


@torch.no_grad()
def evaluate(case: Case, model: Any) -> float:
    """Mean loss over the trained tokens of all sequences of the case."""
    total, tokens = 0.0, 0
    for batch in micro_batches(
        case.data, range(len(case.data)), micro_batch_size=case.micro_batch_size, pad_token_id=case.pad_token_id
    ):
        total += float(loss_sum(model, batch.to(case.device))[0])
        tokens += batch.num_tokens
    return total / tokens


def scalings(model: nn.Module) -> dict[str, float]:
    """Module -> the scale that PEFT gives to its adapter."""
    return {
        name.removeprefix(_PREFIX): float(module.scaling["default"])
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and "default" in module.scaling
    }


def read_back(case: Case, saved: str | Path) -> tuple[dict[str, Tensor], Tensor]:
    """What PEFT finds in the adapter folder `saved`: (factors, logits of the first micro-batch) in float64."""
    model = _case_model(case, saved, "float64")
    return _copies(trainable(model)), _first_logits(case, model)


def _case_model(case: Case, adapter: str | Path, precision: str) -> Any:
    """float64 of a model that is stored in a lower precision: the same values, computed without rounding."""
    model = reference_model(
        case.model,
        adapter,
        dtype=getattr(torch, case.dtype),
        attn_implementation="eager",
        trust_remote_code=case.trust_remote_code,
    )
    if precision != case.dtype:
        model = model.double()
    return model.to(case.device)


def _case_batches(case: Case, step: int) -> list[MicroBatch]:
    batches = micro_batches_of(
        case.data,
        batch_size=case.batch_size,
        micro_batch_size=case.micro_batch_size,
        seed=case.seed,
        step=step,
        pad_token_id=case.pad_token_id,
    )
    return [batch.to(case.device) for batch in batches]


@torch.no_grad()
def _first_logits(case: Case, model: Any) -> Tensor:
    case = dataclasses.replace(case, micro_batch_size=2)  # the same ones, however many are computed at once
    return copy(loss_sum(model, _case_batches(case, 0)[0])[1])


def _copies(factors: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: copy(parameter) for name, parameter in factors.items()}


def _gradients(factors: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: copy(p.grad) for name, p in factors.items() if p.grad is not None}
