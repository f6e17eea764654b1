"""The reference: the same steps on one process by transformers + peft.

Owns: what a single process would have produced. None of meshlora's layers, collectives, gradient sync or adapter code
is used here; only what both sides need: the token batches of a run, and the lift.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from meshlora.config import RunConfig
from meshlora.data import GlobalBatches, TokenizedDataset, collate
from meshlora.lift import lift

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class MicroBatch:
    """Plain tensors of one micro-batch: `[B, S]` each; labels are shifted already and -100 where untrained."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


@dataclass(frozen=True)
class AdamW:
    """Settings of the reference optimizer, one learning rate per step."""

    learning_rates: Sequence[float]
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0


def reference_model(
    folder: str | Path, adapter: str | Path, *, dtype: torch.dtype, attn_implementation: str | None = None
) -> Any:
    """The checkpoint with the PEFT adapter, trainable, on one process."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attn_implementation, local_files_only=True
    )
    for name, value in base.config.to_dict().items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float) and value > 0:
            raise ValueError(f"{name}={value}: the reference runs without dropout")
    model = PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
    return model.train()


def loss_sum(model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """(summed loss, logits `[B, S, V]`) of one micro-batch, lifted where the model is float64."""
    with lift(next(model.parameters()).dtype == torch.float64):
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, logits


def accumulate(model: nn.Module, batches: Iterable[MicroBatch]) -> float:
    """Leave on the factors the gradient of the mean loss over all trained tokens of `batches`; returns that loss."""
    total, tokens = 0.0, 0
    for batch in batches:
        loss, _ = loss_sum(model, batch)
        loss.backward()
        total += float(loss.detach())
        tokens += int((batch.labels != -100).sum())
    for parameter in trainable(model).values():
        assert parameter.grad is not None
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
    order = GlobalBatches(len(data), options.batch_size, options.seed)

    def micro_batches(step: int) -> list[MicroBatch]:
        indices = order.batch(step)
        parts = [indices[i : i + options.micro_batch_size] for i in range(0, len(indices), options.micro_batch_size)]
        batches = [collate([data[int(i)] for i in part], pad_token_id=pad_token_id) for part in parts]
        return [MicroBatch(b.input_ids, b.attention_mask, b.labels) for b in batches]

    warmup = options.warmup_steps
    rates = [options.lr * ((s + 1) / warmup if s < warmup else (steps - s) / (steps - warmup)) for s in range(steps)]
    settings = AdamW(
        rates, (options.beta1, options.beta2), options.eps, options.weight_decay, options.max_grad_norm or None
    )
    losses = train(model, (micro_batches(step) for step in range(steps)), settings)
    model.save_pretrained(str(out))
    return losses
