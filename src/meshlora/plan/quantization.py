"""Quantised frozen bases: which matrices are quantised, and how their blocks are split.

Owns: the kinds, the block size, which linears are quantised, and the rule that no block is split. Does not own: the
arithmetic, which is bitsandbytes' (`layers.quantized`).

A block is `BLOCK` consecutive input features of one output feature, with its own scale. As tp splits no block, its
values are the same on every topology: quantising before the split equals quantising after it.
"""

from __future__ import annotations

import dataclasses

from meshlora.common.errors import UnsupportedError, UserError, did_you_mean
from meshlora.plan.layout import Split
from meshlora.plan.rules import LinearRule, ModelPlan

# Kind -> bits per weight: QLoRA's NormalFloat (Dettmers et al., 2023); 255 equally spaced values.
KINDS = {"nf4": 4, "int8": 8}
BLOCK = 64


def with_quantization(plan: ModelPlan, kind: str | None) -> ModelPlan:
    """`plan` with every linear but the head quantised as `kind` (None: not quantised).

    Raises:
        UserError: unknown kind; a block would be split. UnsupportedError: a model with routed experts.
    """
    if kind is None:
        return plan
    if kind not in KINDS:
        raise UserError(f"quantization {kind!r}", f"it must be one of {', '.join(KINDS)}", did_you_mean(kind, KINDS))
    if plan.experts:
        raise UnsupportedError(
            f"quantization {kind} of {plan.model_type!r}", "routed experts are not quantised yet", "leave it out"
        )
    names = [name for name in plan.linears if name != plan.head]
    for name in names:
        _check_blocks(plan.linears[name], kind, tp=plan.topology.tp)
    return dataclasses.replace(plan, quantization=kind, quantized=frozenset(names))


def _check_blocks(rule: LinearRule, kind: str, *, tp: int) -> None:
    what = f"quantization {kind} of {rule.name} with {rule.in_features} input features"
    if rule.in_features % BLOCK:
        raise UserError(what, f"blocks of {BLOCK} must divide them", "leave out model.quantization")
    if rule.split is not Split.ROW or rule.layout is None:
        return
    runs = [run for rank in range(tp) for run in rule.layout.runs(rank=rank, size=tp)]
    if any(run.start % BLOCK or run.stop % BLOCK for run in runs):
        raise UserError(
            f"{what} over tp={tp}",
            f"a rank would hold a part of a block of {BLOCK}",
            f"use a tp that divides its {rule.in_features // BLOCK} blocks, and dp_shard for more memory",
        )


def check_not_quantized(plan: ModelPlan, parameter: str) -> None:
    """Refuse to train the base's `parameter` if it is quantised.

    Raises:
        UnsupportedError: it is quantised.
    """
    owner, _, leaf = parameter.rpartition(".")
    if leaf == "weight" and owner in plan.quantized:
        raise UnsupportedError(
            f"training {parameter} in {plan.quantization}", "a quantised matrix is frozen", "give it LoRA"
        )
