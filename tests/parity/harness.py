"""What both sides of a parity test run: a twin on disk, batches, the reference's numbers, ours.

Every comparison is per tensor; nothing is averaged over layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.adapter.manage import active_factors, full_factor, gather_adapter, runtime
from meshlora.oracle import reference
from meshlora.oracle.compare import relative
from meshlora.oracle.reference import MicroBatch
from meshlora.parallel.collectives import all_gather, all_reduce_sum
from meshlora.plan.twin import twin_config
from meshlora.train.losses import summed_cross_entropy

LEARNING_RATE = 1e-2
MAX_NORM = 0.5


@dataclass(frozen=True)
class Numbers:
    """What one side produced."""

    logits: Tensor
    loss: float
    grads: dict[str, Tensor]
    grad_norm: float
    after: dict[str, Tensor]


def make_twin(folder: Path, model_type: str, *, seed: int = 0, **overrides: Any) -> Path:
    """A float64 twin with random weights, and an adapter made by PEFT with A and B non-zero; returns `folder`."""
    config = twin_config(model_type, **overrides)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # norms at exactly 1 and biases at 0 would hide faults
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder / "model")
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(folder / "adapter")
    return folder


def make_batches(num_sequences: int = 4, seq_len: int = 16, *, seed: int = 1) -> MicroBatch:
    """Right-padded sequences with unequal lengths and unequal numbers of trained tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 256, (num_sequences, seq_len), generator=generator)
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100
    mask = torch.ones_like(ids)
    for row in range(num_sequences):
        length = seq_len - 2 * row
        ids[row, length:] = 0
        mask[row, length:] = 0
        labels[row, length - 1 :] = -100
        labels[row, : 1 + row] = -100
    return MicroBatch(ids, mask, labels)


def run_reference(folder: Path, batch: MicroBatch, *, steps: int) -> Numbers:
    """transformers + peft on one process."""
    model = reference.reference_model(
        folder / "model", folder / "adapter", dtype=torch.float64, attn_implementation="eager"
    )
    with torch.no_grad():
        _, logits = reference.loss_sum(model, batch)
    loss = reference.accumulate(model, [batch])
    factors = reference.trainable(model)
    grads = {name: p.grad.clone() for name, p in factors.items() if p.grad is not None}
    norm = float(torch.nn.utils.get_total_norm(list(grads.values())))
    settings = reference.AdamW([LEARNING_RATE] * steps, max_grad_norm=MAX_NORM)
    reference.train(model, [[batch]] * steps, settings)
    return Numbers(logits, loss, grads, norm, {name: p.detach().clone() for name, p in factors.items()})


def run_ours(folder: Path, batch: MicroBatch, topology: str, steps: int, device: str = "cpu") -> Numbers | None:
    """meshlora on the calling ranks; the result on rank 0, on the CPU."""
    model = meshlora.load(
        folder / "model",
        adapter=folder / "adapter",
        topology=topology,
        dtype="float64",
        attn_implementation="eager",
        device=device,
    ).train()
    mesh = runtime(model).mesh
    ids, mask, labels = (
        t.tensor_split(mesh.dp.size)[mesh.dp.rank].to(mesh.device)
        for t in (batch.input_ids, batch.attention_mask, batch.labels)
    )

    def backward() -> tuple[Tensor, float]:
        with meshlora.lift():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            loss = summed_cross_entropy(logits, labels)
        loss.backward()
        tokens = meshlora.finish_gradients(model, num_tokens=int((labels != -100).sum()))
        total = float(all_reduce_sum(loss.detach().reshape(1), mesh.dp)) / tokens
        return all_gather(logits.detach(), mesh.dp).cpu(), total

    logits, loss = backward()
    factors = active_factors(model)
    grads = {
        f.name: full_factor(f.parameter.grad, f.rule, mesh).cpu().clone()
        for f in factors
        if f.parameter.grad is not None
    }
    norm = meshlora.clip_gradients(model, None)
    optimizer = torch.optim.AdamW([f.parameter for f in factors], lr=LEARNING_RATE, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        backward()
        meshlora.clip_gradients(model, MAX_NORM)
        optimizer.step()
    after = gather_adapter(model, "default")
    return Numbers(logits, loss, grads, norm, after) if mesh.rank == 0 else None


def worst(ours: dict[str, Tensor], ref: dict[str, Tensor]) -> float:
    """The worst single tensor; the key sets must match."""
    assert ours.keys() == ref.keys(), sorted(ours.keys() ^ ref.keys())[:4]
    return max(relative(ours[name], ref[name]) for name in ref)


def compare(ours: Numbers, ref: Numbers) -> dict[str, float]:
    """Worst relative error by phase."""
    return {
        "logits": relative(ours.logits, ref.logits),
        "loss": abs(ours.loss - ref.loss) / abs(ref.loss),
        "gradients": worst(ours.grads, ref.grads),
        "grad_norm": abs(ours.grad_norm - ref.grad_norm) / ref.grad_norm,
        "adapter": worst(ours.after, ref.after),
    }
