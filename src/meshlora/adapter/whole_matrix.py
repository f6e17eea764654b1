"""Initialisations that need a whole weight: PiSSA and OLoRA.

Owns: the factors that are taken out of the base, and the base without them. Does not own: drawn factors
(`adapter.initialization`).

The weight is gathered over tp, the factors are computed once, on rank 0, and every rank gets the same bits: two ranks
might not agree on the signs of singular vectors. Each then takes its own part of the product out of its own part of the
weight. PEFT does the same each time that it loads such an adapter, and so do we.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from peft import LoraConfig
from torch import Tensor

from meshlora.comm.collectives import all_gather, broadcast_in_place
from meshlora.comm.groups import Mesh
from meshlora.common.errors import UnsupportedError
from meshlora.layers.linear import ParallelLinear
from meshlora.plan.layout import Split
from meshlora.plan.rules import ModelPlan

WHOLE_MATRIX = ("pissa", "olora")


def check_whole_matrix(config: LoraConfig, targets: Collection[str], plan: ModelPlan, dtype: torch.dtype) -> None:
    """Refuse what PEFT does not decompose either, before any weight is read.

    Raises:
        UnsupportedError: a base in float64, quantised or sharded over dp; OLoRA on a weight that is stored transposed.
    """
    init = config.init_lora_weights
    if init in WHOLE_MATRIX and plan.topology.dp_shard:
        raise UnsupportedError(
            f"init_lora_weights={init!r} on {plan.topology}",
            "it changes weights of which a rank holds a part only",
            "leave out dp_shard, or use init_lora_weights: true",
        )
    if init in WHOLE_MATRIX and plan.quantized:
        raise UnsupportedError(
            f"init_lora_weights={init!r} in {plan.quantization}",
            "it changes the base, which is quantised",
            "use init_lora_weights: true",
        )
    if init in WHOLE_MATRIX and dtype == torch.float64:
        raise UnsupportedError(f"init_lora_weights={init!r} in float64", "PEFT computes it in float32", "use float32")
    transposed = [name for name in targets if name in plan.linears and plan.linears[name].is_transposed]
    if init == "olora" and transposed:
        raise UnsupportedError(f"olora on {transposed[0]}", "PEFT decomposes the transposed weight", "use pissa")


@torch.no_grad()
def take_out_of_base(leaf: ParallelLinear, mesh: Mesh, *, init: str, r: int, scaling: float) -> dict[str, Tensor]:
    """Take the principal part of rank r out of the weight of `leaf`; returns it, whole, as `{"A", "B"}` in float32.

    pissa: the r largest singular values (Meng et al., 2024). olora: the first r columns of a QR (Büyükakyüz, 2024).
    Collective: all ranks must call it.
    """
    rule, tp = leaf.rule, mesh.tp
    dim = {Split.COLUMN: 0, Split.ROW: 1, Split.WHOLE: None}[rule.split]
    whole = leaf.weight.detach()
    if dim is not None and rule.layout is not None:
        whole = rule.layout.join(list(all_gather(whole.unsqueeze(0), tp)), dim)
    a = torch.empty(r, rule.in_features, device=mesh.device)
    b = torch.empty(rule.out_features, r, device=mesh.device)
    if mesh.rank == 0:
        first, second = _factors(whole.float(), init=init, r=r, scaling=scaling)
        a.copy_(first)
        b.copy_(second)
    for factor in (a, b):
        broadcast_in_place(factor, mesh.world)
    own_a, own_b = a, b
    if dim == 0 and rule.layout is not None:
        own_b = rule.layout.cut(b, 0, rank=tp.rank, size=tp.size)
    elif dim == 1 and rule.layout is not None:
        own_a = rule.layout.cut(a, 1, rank=tp.rank, size=tp.size)
    leaf.weight.copy_(leaf.weight.float() - scaling * own_b @ own_a)
    return {"A": a, "B": b}


def _factors(weight: Tensor, *, init: str, r: int, scaling: float) -> tuple[Tensor, Tensor]:
    """(A `[r, in]`, B `[out, r]`) of a float32 weight `[out, in]`."""
    if init == "olora":
        q, upper = torch.linalg.qr(weight)
        return upper[:r], q[:, :r]
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    roots = (values[:r] / scaling).sqrt()
    return roots[:, None] * right[:r], left[:, :r] * roots
