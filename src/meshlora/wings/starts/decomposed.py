"""PiSSA and OLoRA: factors that are a part of the weight, which is taken out of it.

The weight is gathered over tp, and rank 0 alone computes the factors and broadcasts them, since two ranks might
disagree on the signs of singular vectors. Each rank subtracts its slice of the product from its slice of the weight.
As in PEFT, this happens again on every load of such an adapter. So the random matrix of the fast decomposition
(`pissa_niter_N`) is a function of the target's name alone: a file has no seed, and its base is to be found again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from peft import LoraConfig
from torch import Tensor

from meshlora.adapter.initialization import Start, generator_of
from meshlora.adapter.targets.resolve import Target
from meshlora.comm.collectives import all_gather, broadcast_in_place
from meshlora.comm.groups import Mesh
from meshlora.layers.linear import ParallelLinear
from meshlora.plan.layout import Split
from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import UnsupportedError, UserError

_FAST = re.compile(r"pissa_niter_(\d{1,3})")


class Decomposed(Start):
    """pissa: the r largest singular values (Meng et al., 2024); pissa_niter_N: nearly, by N iterations of a subspace.
    olora: the first r columns of a QR (Büyükakyüz, 2024).
    """

    changes_base = True

    def __init__(self, init: str) -> None:
        super().__init__(init)
        self.is_qr = init.lower() == "olora"
        fast = _FAST.fullmatch(init)
        self.iterations = int(fast[1]) if fast else None
        if not (self.is_qr or fast or init == "pissa"):
            rule = "PEFT has pissa, and pissa_niter_N of N iterations, as in pissa_niter_16"
            raise UserError(f"LoraConfig(init_lora_weights={init!r})", rule)

    def check(self, config: LoraConfig, targets: Mapping[str, Target], plan: ModelPlan) -> None:
        """Refuse weights that PEFT does not decompose either. Raises: UnsupportedError: OLoRA on a transposed one."""
        transposed = [name for name in targets if name in plan.linears and plan.linears[name].is_transposed]
        if self.is_qr and transposed:
            raise UnsupportedError(f"olora on {transposed[0]}", "PEFT decomposes the transposed weight", "use pissa")

    @torch.no_grad()
    def take_out_of_base(self, leaf: ParallelLinear, mesh: Mesh, target: Target) -> dict[str, Tensor]:
        """Subtract the principal part of rank r from the weight of `leaf`; returns its full factors in float32."""
        rule, tp = leaf.rule, mesh.tp
        dim = {Split.COLUMN: 0, Split.ROW: 1, Split.WHOLE: None}[rule.split]
        whole = leaf.weight.detach()
        if dim is not None and rule.layout is not None:
            whole = rule.layout.join(list(all_gather(whole.unsqueeze(0), tp)), dim)
        a = torch.empty(target.r, rule.in_features, device=mesh.device)
        b = torch.empty(rule.out_features, target.r, device=mesh.device)
        if mesh.rank == 0:
            # On one rank: two might disagree on the signs of singular vectors.
            first, second = self.factors(whole.float(), target)
            a.copy_(first)
            b.copy_(second)
        for factor in (a, b):
            broadcast_in_place(factor, mesh.world)
        own_a, own_b = a, b
        if dim == 0 and rule.layout is not None:
            own_b = rule.layout.cut(b, 0, rank=tp.rank, size=tp.size)
        elif dim == 1 and rule.layout is not None:
            own_a = rule.layout.cut(a, 1, rank=tp.rank, size=tp.size)
        leaf.weight.copy_(leaf.weight.float() - target.scaling * own_b @ own_a)
        return {"A": a, "B": b}

    def factors(self, weight: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        """(A `[r, in]`, B `[out, r]`) of a float32 weight `[out, in]`."""
        r = target.r
        if self.is_qr:
            q, upper = torch.linalg.qr(weight)
            return upper[:r], q[:, :r]
        if self.iterations is None:
            left, values, right = torch.linalg.svd(weight, full_matrices=False)
        else:
            left, values, right = _fast_svd(weight, r, self.iterations, generator_of(0, target.name))
        roots = (values[:r] / target.scaling).sqrt()
        return roots[:, None] * right[:r], left[:, :r] * roots


def _fast_svd(weight: Tensor, r: int, iterations: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(`[out, r]`, `[r]`, `[r, in]`): `torch.svd_lowrank(weight, r, iterations)`, its random matrix from `generator`.

    Algorithm 5.1 on the range of algorithm 4.4 of Halko et al., 2009 (arXiv 0909.4061).
    """
    is_wide = weight.shape[0] < weight.shape[1]
    tall = weight.T if is_wide else weight
    # Drawn on the CPU: the same bits whatever computes the rest.
    random = torch.randn(tall.shape[1], r, generator=generator).to(tall)
    basis = torch.linalg.qr(tall @ random).Q
    for _ in range(iterations):
        basis = torch.linalg.qr(tall.T @ basis).Q
        basis = torch.linalg.qr(tall @ basis).Q
    left, values, right = torch.linalg.svd(basis.T @ tall, full_matrices=False)
    left = basis @ left
    if is_wide:
        return right.T, values, left.T
    return left, values, right
