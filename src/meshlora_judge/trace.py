"""A trace: the recorded values of one process of a run, in memory and as one safetensors file.

Owns: the fields and the file. The reference has one trace, our side one per rank with that rank's parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from meshlora_judge.capture import MicroBatchCapture
from meshlora_judge.experts import Stack
from meshlora_judge.values import read_values, write_values


@dataclass
class Trace:
    """Everything that is compared.

    Attributes:
        micro_batches: forwards and backwards of the first optimizer step.
        losses, grad_norms, num_tokens, rates: per optimizer step: loss, norm before clipping, trained tokens, learning
            rate.
        aux_losses: load-balancing loss per optimizer step; empty if off.
        eval_losses: the mean loss over all sequences of the case, for each evaluation.
        scalings, fresh_scalings: module -> scale of its adapter, and of the fresh adapter (ours only).
        initial, gradients, final: factor -> value before the first step, gradient of the first step before clipping,
            value after the last step. clipped: per optimizer step, factor -> gradient after clipping.
        fresh, fresh_both: factors of adapters drawn from the user's configuration, and with B drawn too (ours only).
        eva, eva_scalings: target -> A of an adapter that begins as its data say, whole, and its scale.
        rows, columns: module -> fingerprints of the rows and columns of its weight; of experts `[E, ...]`.
        base: trained base parameter -> its value in the base. row_norms: magnitude of DoRA -> norms of the base's rows
            (both reference only).
        final_logits: of the first micro-batch, after the last step (reference only).
        order: modules in execution order.
        facts: linear or block -> its split in the plan, for the words of a diagnosis: "column", "row", "whole",
            "split region", "whole region" (ours only).
        terms: modules inside a region, where the gradient of an output may be one term of a sum over tp (ours only).
        stacks: projection of experts with an adapter -> layout of the adapter (reference only).
        dropouts: module with a dropout, `NAME.lora_dropout` for an adapter's -> rate (reference only).
        collectives, budget: "phase kind" -> calls in the first step, and the plan's limit (ours only).
    """

    micro_batches: list[MicroBatchCapture] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    aux_losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)
    scalings: dict[str, float] = field(default_factory=dict)
    fresh_scalings: dict[str, float] = field(default_factory=dict)
    dropouts: dict[str, float] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    clipped: list[dict[str, Tensor]] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)
    fresh: dict[str, Tensor] = field(default_factory=dict)
    fresh_both: dict[str, Tensor] = field(default_factory=dict)
    eva: dict[str, Tensor] = field(default_factory=dict)
    eva_scalings: dict[str, float] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    base: dict[str, Tensor] = field(default_factory=dict)
    row_norms: dict[str, Tensor] = field(default_factory=dict)
    final_logits: Tensor | None = None
    order: list[str] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    budget: dict[str, int] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    terms: list[str] = field(default_factory=list)
    stacks: dict[str, Stack] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the trace to `path`; not atomic, the caller owns the folder."""
        write_values(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read what `save` wrote."""
        values = read_values(path)
        micro_batches = [MicroBatchCapture(**micro) for micro in values.pop("micro_batches")]
        stacks = {name: Stack(**stack) for name, stack in values.pop("stacks").items()}
        return cls(micro_batches, stacks=stacks, **values)
