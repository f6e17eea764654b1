"""The reference: the same steps on one process by transformers + peft.

Owns: what a single process would have produced. None of meshlora's layers, collectives, gradient sync, adapter code or
batches is used here; only what both sides need: the sequences of a run, and the lift.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from meshlora.config import RunConfig
from meshlora.data import TokenizedDataset
from meshlora.errors import UnsupportedError
from meshlora.lift import lift
from meshlora.oracle.batches import UNTRAINED, MicroBatch, micro_batches, micro_batches_of
from meshlora.oracle.capture import Capture, copy
from meshlora.oracle.case import Case
from meshlora.oracle.ownership import fingerprints
from meshlora.oracle.pieces import in_pieces, mask_of, pieces_of
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
    label_smoothing: float = 0.0
    lora_plus_ratio: float | None = None
    lora_plus_embedding_lr: float = 1e-6


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


def loss_sum(model: nn.Module, batch: MicroBatch, *, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """(summed loss, logits `[B, S, V]`) of one micro-batch, lifted where the model is float64."""
    with lift(next(model.parameters()).dtype == torch.float64):
        # PEFT's wrapper calls forward(), past the hooks of a capture; the model inside it has the adapter's layers.
        inner = getattr(model, "get_base_model", lambda: model)()
        logits = inner(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(),
            batch.labels.flatten(),
            ignore_index=UNTRAINED,
            reduction="sum",
            label_smoothing=label_smoothing,
        )
    return loss, logits


def accumulate(model: nn.Module, batches: Iterable[MicroBatch], *, label_smoothing: float = 0.0) -> float:
    """Leave on the factors the gradient of the mean loss over all trained tokens of `batches`; returns that loss."""
    total, tokens = 0.0, 0
    for batch in batches:
        loss, _ = loss_sum(model, batch, label_smoothing=label_smoothing)
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
    optimizer = make_optimizer(model, settings)
    losses = []
    for batches, rate in zip(steps, settings.learning_rates, strict=False):
        optimizer.zero_grad(set_to_none=True)
        losses.append(accumulate(model, batches, label_smoothing=settings.label_smoothing))
        if settings.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(list(trainable(model).values()), settings.max_grad_norm)
        set_rate(optimizer, rate)
        optimizer.step()
    return losses


def make_optimizer(model: nn.Module, settings: AdamW) -> torch.optim.Optimizer:
    """AdamW on what is trainable; with LoRA+ in the groups that PEFT makes. Their rates are relative to the peak."""
    options: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps}
    peak = max(settings.learning_rates)
    optimizer: torch.optim.Optimizer
    if settings.lora_plus_ratio is None:
        parameters = list(trainable(model).values())
        optimizer = torch.optim.AdamW(parameters, lr=peak, weight_decay=settings.weight_decay, **options)
    else:
        optimizer = create_loraplus_optimizer(
            model,
            torch.optim.AdamW,
            lr=peak,
            loraplus_lr_ratio=settings.lora_plus_ratio,
            loraplus_weight_decay=settings.weight_decay,
            loraplus_lr_embedding=settings.lora_plus_embedding_lr,
            **options,
        )
    for group in optimizer.param_groups:
        group["share"] = group["lr"] / peak
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of this step; groups keep their relation."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["share"]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by the names of the model without PEFT's wrappers: `model.layers.0.mlp.up_proj.lora_A`,
    `model.embed_tokens.lora_embedding_A`, `model.norm.weight`.
    """
    return {_plain(name): p for name, p in model.named_parameters() if p.requires_grad}


def _plain(name: str) -> str:
    name = name.removeprefix(_PREFIX).replace(".modules_to_save.default", "").replace(".base_layer.", ".")
    return name.removesuffix(".weight").removesuffix(".default") if ".lora_" in name else name


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
        rates,
        (options.beta1, options.beta2),
        options.eps,
        options.weight_decay,
        options.max_grad_norm or None,
        options.label_smoothing,
        options.lora_plus_ratio,
        options.lora_plus_embedding_lr,
    )
    freeze_outside_pieces(model, pieces_in(adapter))
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
    freeze_outside_pieces(model, case.pieces)
    factors = trainable(model)
    rates = linear_rates(case.lr, warmup_steps=case.warmup_steps, steps=case.steps)
    settings = AdamW(
        rates,
        (case.beta1, case.beta2),
        case.eps,
        case.weight_decay,
        lora_plus_ratio=case.lora_plus_ratio,
        lora_plus_embedding_lr=case.lora_plus_embedding_lr,
    )
    optimizer = make_optimizer(model, settings)
    inner = model.get_base_model()
    trace = Trace(initial=_copies(case, model, factors), scalings=scalings(model), rates=rates)
    trace.rows, trace.columns = fingerprints(inner)
    trace.base, trace.row_norms = _base_values(case, factors)
    for step, rate in enumerate(rates):
        batches = _case_batches(case, step)
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            with Capture(inner) as capture:
                loss = accumulate(model, batches, label_smoothing=case.label_smoothing)
            trace.micro_batches = capture.micro_batches
            _forget_head(trace, inner)
            trace.order = list(capture.micro_batches[0].forward)
            trace.gradients = _gradients(case, model, factors)
        else:
            loss = accumulate(model, batches, label_smoothing=case.label_smoothing)
        norm = torch.nn.utils.clip_grad_norm_(list(factors.values()), case.max_grad_norm)
        if step == 0:
            trace.clipped = _gradients(case, model, factors)
        set_rate(optimizer, rate)
        optimizer.step()
        trace.losses.append(loss)
        trace.grad_norms.append(float(norm))
        trace.num_tokens.append(sum(batch.num_tokens for batch in batches))
    trace.final = _copies(case, model, factors)
    trace.final_logits = _first_logits(case, model)
    trace.eval_losses = [evaluate(case, model)]
    return trace


def _forget_head(trace: Trace, model: Any) -> None:
    """Of the head only the logits of the model are compared: nobody else computes its output for all tokens."""
    head = model.get_output_embeddings()
    names = [name.replace(".base_layer", "") for name, module in model.named_modules() if module is head]
    for micro in trace.micro_batches:
        for name in names:
            logits = micro.forward[""]
            micro.forward.pop(name, None)
            micro.backward.pop(name, None)
            micro.base.pop(name, None)
            micro.forward[""] = logits
        micro.backward.pop("", None)


def _base_values(case: Case, factors: dict[str, nn.Parameter]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(values in the base of what is trained of it, norms of the rows of what DoRA scales)."""
    wanted = {name for name in factors if ".lora_" not in name}
    scaled = [name for name in factors if name.endswith(".lora_magnitude_vector")]
    if not wanted and not scaled:
        return {}, {}
    # From the checkpoint: PEFT trains biases where they are.
    fresh = AutoModelForCausalLM.from_pretrained(
        case.model, dtype=getattr(torch, case.dtype), local_files_only=True, trust_remote_code=case.trust_remote_code
    )
    base = {name: copy(parameter).double() for name, parameter in fresh.named_parameters(remove_duplicate=False)}
    norms = {}
    for name in scaled:
        module = name.rpartition(".lora_")[0]
        is_transposed = isinstance(fresh.get_submodule(module), Conv1D)
        norms[name] = base[f"{module}.weight"].norm(dim=0 if is_transposed else 1)
    return {name: base[name] for name in wanted}, norms


def freeze_outside_pieces(model: nn.Module, pieces: Mapping[str, Sequence[str]]) -> None:
    """Keep B zero outside the blocks of an adapter on pieces: these entries get no gradient."""
    for name, parameter in trainable(model).items():
        module, _, part = name.rpartition(".lora_")
        if part == "B" and (names := pieces_of(module, pieces)):
            config = model.get_base_model().config  # type: ignore[operator]
            mask = mask_of(config, module, names, (parameter.shape[0], parameter.shape[1])).to(parameter)
            parameter.register_hook(lambda grad, mask=mask: grad * mask)


def pieces_in(adapter: str | Path) -> dict[str, list[str]]:
    """The pieces that an adapter folder names besides its PEFT files."""
    file = Path(adapter) / "meshlora.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))["pieces"]) if file.is_file() else {}


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
    return _copies(case, model, trainable(model)), _first_logits(case, model)


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


def _copies(case: Case, model: Any, factors: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    copies = {name: copy(parameter) for name, parameter in factors.items()}
    return in_pieces(model.get_base_model().config, copies, case.pieces)


def _gradients(case: Case, model: Any, factors: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    copies = {name: copy(p.grad) for name, p in factors.items() if p.grad is not None}
    return in_pieces(model.get_base_model().config, copies, case.pieces)
