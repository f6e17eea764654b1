"""An adapter's file beside the values that were trained: which tensors differ, and as what each can be explained.

    with open_adapter(folder) as adapter:
        findings = differences_from(adapter, {"base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight": a})

Does not own: where the values come from (a recording of the training).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshlora_judge.adapter_files.finding import Finding, found
from meshlora_judge.adapter_files.names import names_of
from meshlora_judge.adapter_files.reading import Adapter

Values = Mapping[str, Tensor]
_WAYS_OUT = {
    "not saved": "the file lacks them: gather all parameters before saving",
    "zero": "they were emptied before they were saved: gather them first",
    "transposed": "save them as PEFT has them, A as [r, in] and B as [out, r]",
    "not finite": "save it again",
    "of other values": "save it again from the trained parameters",
}


def differences_from(
    adapter: Adapter, values: Values, *, ranks: Sequence[Values] = (), steps: Mapping[int, Values] | None = None
) -> list[Finding]:
    """Findings on every trained tensor that the file does not have as it was last.

    Args:
        values: name as in the training -> whole tensor after the last step.
        ranks: each rank's own values where they differ, or its shard. steps: values after other steps, by step.
    """
    in_file = {part.name: part.key for part in adapter.names.parts}
    by_rank = list(map(_by_name, ranks))
    by_step = {step: _by_name(own) for step, own in (steps or {}).items()}
    causes: dict[str, list[str]] = {}
    for name, value in _by_name(values).items():
        cause = "not saved"
        if name in in_file:
            others = {f"of step {step}": own[name] for step, own in by_step.items() if name in own}
            for rank, own in enumerate(by_rank):
                if name in own and not _is_same(own[name], value):
                    others[f"rank {rank}'s alone"] = own[name]
            cause = cause_of(adapter.read(in_file[name]), value, others)
        if cause:
            causes.setdefault(cause, []).append(name)
    result = []
    for cause, names in causes.items():
        stated = cause if cause == "not saved" else f"what is saved is {cause}"
        way_out = _WAYS_OUT.get(cause, "gather the trained parameters, and save those of the last step")
        result += found("differs", f"{stated}, of {len(values):,} trained tensors", names, way_out)
    return result


def _by_name(values: Values) -> dict[str, Tensor]:
    """Values under the names that parts of a file have."""
    names = names_of(list(values), None, ())
    return {part.name: values[part.key] for part in names.parts}


def trained_name(name: str) -> str:
    """The name that a trained parameter has in `Adapter.names`."""
    parts = names_of([name], None, ()).parts
    return parts[0].name if parts else name


def cause_of(saved: Tensor, value: Tensor, others: Mapping[str, Tensor]) -> str:
    """Why `saved` is not `value`, "" where it is. others: what else it may be -> that tensor."""
    if _is_same(saved, value):
        return ""
    if not torch.isfinite(saved.float()).all():
        return "not finite"
    if not saved.any():
        return "zero"
    # Before transposes and shards: a whole tensor of another step or rank is the plainest explanation.
    for words, other in others.items():
        if _is_same(saved, other):
            return words
    if saved.ndim == 2 and _is_same(saved.T, value):
        return "transposed"
    return _shard(saved, value) or _scaled(saved, value) or "of other values"


def _is_same(saved: Tensor, value: Tensor) -> bool:
    """Equal but for the rounding of either type."""
    if saved.shape != value.shape:
        return False
    # The file may have been written in a coarser type than the training's.
    eps = max(torch.finfo(saved.dtype).eps, torch.finfo(value.dtype).eps)
    saved, value = saved.double(), value.double()
    return bool((saved - value).norm() <= eps * value.norm())


def _shard(saved: Tensor, value: Tensor) -> str:
    """`a shard: part 1 of 8 of dim 0`, alone or with zeros in the place of the others."""
    for dim in range(value.ndim):
        total = value.shape[dim]
        lines = saved.movedim(dim, 0).flatten(1).any(1).nonzero().flatten()
        if saved.shape == value.shape:
            # Not all zero, which `cause_of` has seen to, so there is a first and a last line.
            begin, size = int(lines[0]), int(lines[-1]) + 1 - int(lines[0])
            if size < total and _is_same(saved.narrow(dim, begin, size), value.narrow(dim, begin, size)):
                return f"a shard: part {begin // size + 1} of {-(-total // size)} of dim {dim}, the others zero"
            continue
        size = saved.shape[dim] if saved.ndim == value.ndim else 0
        for begin in range(0, total - size + 1, size) if size else ():
            if _is_same(saved, value.narrow(dim, begin, size)):
                return f"a shard: part {begin // size + 1} of {-(-total // size)} of dim {dim}"
    return ""


def _scaled(saved: Tensor, value: Tensor) -> str:
    if saved.shape != value.shape or not value.any():
        return ""
    # The least-squares factor: exact, if it is one number.
    factor = float((saved.double() * value.double()).sum() / value.double().square().sum())
    if factor and _is_same(saved, (value.double() * factor).to(value.dtype)):
        return f"scaled by {factor:.4g}"
    return ""
