"""Initialisation of adapters: a function of (seed, name), not of ranks; or of the full weight, for PiSSA and OLoRA.

Owns: the initial values of an adapter, and subtracting the PiSSA or OLoRA product from the base.

Every rank draws the full factor from a generator seeded by the factor's name, then slices it: the same bits on every
topology, no communication. The fan-in is always that of the full matrix.

For PiSSA and OLoRA the weight is gathered over tp and rank 0 alone computes the factors and broadcasts them, since two
ranks might disagree on the signs of singular vectors. Each rank subtracts its slice of the product from its slice of
the weight. As in PEFT, this happens again on every load of such an adapter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection

import torch
from peft import LoraConfig
from torch import Tensor

from meshlora.adapter.targets.resolve import Target
from meshlora.comm.collectives import all_gather, broadcast_in_place
from meshlora.comm.groups import Mesh
from meshlora.layers.linear import ParallelLinear
from meshlora.plan.layout import Split
from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import UnsupportedError

WHOLE_MATRIX = ("pissa", "olora")


def draw_factors(target: Target, *, init: bool | str, seed: int) -> dict[str, Tensor]:
    """The full factors of `target`, in float32 on the CPU.

    init: as `peft.LoraConfig.init_lora_weights`. True: A Kaiming-uniform with a=sqrt(5), B zero. "gaussian":
    A ~ N(0, 1/r^2), B zero. False: A and B both Kaiming-uniform, so that the adapter is not the identity. An embedding
    has A zero and B ~ N(0, 1); with False both are normal. Each piece of a fused matrix and each expert has its own
    draw; where PEFT mistakes the experts' input for their output, A and B swap roles.
    """
    found = {}
    for part, shape in target.shapes.items():
        if part not in target.further:  # which begins as the base has it
            found[part] = _draw(target, part, shape, init=init, seed=seed)
    return found


def _draw(target: Target, part: str, shape: tuple[int, ...], *, init: bool | str, seed: int) -> Tensor:
    side, name = part.partition(".")[0], target.name_of(part)
    if target.is_embedding:
        if side == "A" and init is not False:
            return torch.zeros(shape)
        return torch.randn(shape, generator=_generator(seed, name))
    # In PEFT's terms: the fan-in of its A is the input, the fan-in of its B the rank.
    is_first = (side == "A") != target.is_swapped
    if not is_first and init is not False:
        return torch.zeros(shape)
    matrix = shape[-2:]
    fan_in = matrix[0] if target.is_swapped else matrix[1]
    names = [name]
    if target.num_experts and not target.is_shared:
        names = [f"{name}.{expert}" for expert in range(shape[0])]
    drawn = []
    for own in names:
        if init == "gaussian" and is_first:
            drawn.append(torch.randn(matrix, generator=_generator(seed, own)) / target.r)
        else:
            drawn.append(_uniform(matrix, fan_in, _generator(seed, own)))
    return torch.stack(drawn).view(shape)


def _uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)): `torch.nn.init.kaiming_uniform_` with a=sqrt(5), the default of nn.Linear."""
    return (torch.rand(shape, generator=generator) * 2 - 1) * (1 / math.sqrt(fan_in))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # Of the name, not of a counter: a target more or less changes no other draw.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def check_decomposed(config: LoraConfig, targets: Collection[str], plan: ModelPlan) -> None:
    """Refuse weights that PEFT does not decompose either, before any weight is read.

    Raises:
        UnsupportedError: OLoRA on a transposed weight.
    """
    init = config.init_lora_weights
    transposed = [name for name in targets if name in plan.linears and plan.linears[name].is_transposed]
    if init == "olora" and transposed:
        raise UnsupportedError(f"olora on {transposed[0]}", "PEFT decomposes the transposed weight", "use pissa")


@torch.no_grad()
def take_out_of_base(leaf: ParallelLinear, mesh: Mesh, *, init: str, r: int, scaling: float) -> dict[str, Tensor]:
    """Subtract the principal part of rank r from the weight of `leaf`; returns its full `{"A", "B"}` in float32.

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
        # On one rank: two might disagree on the signs of singular vectors.
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
