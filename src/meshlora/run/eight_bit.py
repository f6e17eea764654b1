"""AdamW with moments in 8 bits, by the kernels of bitsandbytes: the update of one process on every mesh.

Owns: the moments, their update, and their way into a checkpoint and back. Does not own: which factors have 8 bits and
whose blocks the mesh cuts (`run.optimizers`), groups and rates (`run.optimizer`), the file (`run.checkpoint`).

Each 256 neighbouring elements of a factor, flattened, are a block: codes of 8 bits, and the largest of them as a
scale. Where every rank's part of a factor is whole blocks of it, a rank updates its part: the blocks are those of one
process. Where the mesh cuts a block, gradient and factor are put together in each step, and every rank updates the
whole factor and keeps all of its moments. What is small has moments in 32 bits, by the size of the whole factor. The
arithmetic is in float32, whatever the factors are in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.attach import Factor, full_factor, local_part
from meshlora.adapter.plan import Trained
from meshlora.comm.groups import Mesh
from meshlora.plan.pairs import check
from meshlora.run.optimizers import BLOCK, cuts_blocks, has_eight_bits
from meshlora.wings.quantized.quantized import bitsandbytes_functions

MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALES = tuple(f"{moment}_absmax" for moment in MOMENTS)


class AdamW8bit(torch.optim.Optimizer):
    """bitsandbytes' `AdamW8bit` on a mesh.

    groups: of the factors, each with `lr` and `weight_decay`. factors: on this rank. parameters: those of the adapter,
    by name, with their whole shapes. least: elements of a whole factor from which on its moments have 8 bits.

    The state of a factor is `step`, and `exp_avg` and `exp_avg_sq`: float32 of its shape, or codes (uint8) of its part
    or of all of it, each then with the scales of its blocks, `exp_avg_absmax` and `exp_avg_sq_absmax`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        factors: Sequence[Factor],
        parameters: Mapping[str, Trained],
        mesh: Mesh,
        *,
        least: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        for factor in factors:
            dtype, device = str(factor.parameter.dtype).removeprefix("torch."), factor.parameter.device.type
            check({"train.optimizer": "adamw_8bit", "model.dtype": dtype, "device": device})
        self.mesh, self.parameters, self.least = mesh, parameters, least
        self.factors = {factor.parameter: factor for factor in factors}
        self._levels: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def is_small(self, name: str) -> bool:
        """Whether the moments of a parameter of the adapter have 32 bits."""
        return not has_eight_bits(self.parameters[name].shape, self.least)

    def is_cut(self, factor: Factor) -> bool:
        """Whether the mesh cuts a block of this factor."""
        is_small = self.is_small(factor.name)
        return not is_small and cuts_blocks(self.parameters[factor.name], self.mesh.topology)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every factor that has a gradient. Collective. closure: there is none."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(self.factors[parameter], parameter.grad, group)

    def begin(self, factor: Factor) -> dict[str, Any]:
        """The state of `factor` before its first step."""
        like = factor.parameter.detach()
        if self.is_small(factor.name):
            return {"step": 0} | {m: torch.zeros_like(like, dtype=torch.float32) for m in MOMENTS}
        shape = self.parameters[factor.name].shape if self.is_cut(factor) else like.shape
        codes = {moment: like.new_zeros(shape, dtype=torch.uint8) for moment in MOMENTS}
        blocks = -(-math.prod(shape) // BLOCK)
        return {"step": 0, **codes, **{s: like.new_zeros(blocks, dtype=torch.float32) for s in _SCALES}}

    def _update(self, factor: Factor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        parameter, state = factor.parameter, self.state[factor.parameter]
        if not state:
            state |= self.begin(factor)
        state["step"] = step = int(state["step"]) + 1  # a tensor, after resuming
        is_cut = self.is_cut(factor)
        values = parameter.detach()
        if is_cut:
            values, gradient = (
                full_factor(values, factor.rule, self.mesh),
                full_factor(gradient, factor.rule, self.mesh),
            )
        values, gradient, kernels = values.contiguous(), gradient.contiguous(), bitsandbytes_functions()
        first, second = group["betas"]
        given = {"eps": group["eps"], "step": step, "lr": group["lr"], "weight_decay": group["weight_decay"]}
        given |= {"beta1": first, "beta2": second, "beta3": 0.0, "alpha": 0.0}
        moments = {"state1": state["exp_avg"], "state2": state["exp_avg_sq"]}
        if state["exp_avg"].dtype == torch.uint8:
            signed, unsigned = self._of_codes(values.device)
            scales = {"absmax1": state["exp_avg_absmax"], "absmax2": state["exp_avg_sq_absmax"]}
            given |= {"qmap1": signed, "qmap2": unsigned}
            kernels.optimizer_update_8bit_blockwise("adam", gradient, values, **moments, **scales, **given)
        else:
            kernels.optimizer_update_32bit("adam", gradient, values, **moments, **given)
        if is_cut:
            values = local_part(values, factor.rule, self.mesh)
        if values.data_ptr() != parameter.data_ptr():
            parameter.copy_(values)

    def _of_codes(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The numbers of the codes of both moments: the second is not negative."""
        if device not in self._levels:
            make = bitsandbytes_functions().create_dynamic_map
            self._levels[device] = make(signed=True).to(device), make(signed=False).to(device)
        return self._levels[device]

    def held(self, key: str, factor: Factor) -> Tensor:
        """What this rank holds of `key` of `factor`, as its part of a tensor of the whole factor's shape: scales are
        repeated for each element of their block. Zeros before the first step, and for scales in 32 bits.
        """
        found = self.state[factor.parameter].get(key)
        if found is None:
            return torch.zeros_like(factor.parameter)
        if key in _SCALES:
            like = self.state[factor.parameter][key.removesuffix("_absmax")]
            found = found.repeat_interleave(BLOCK)[: like.numel()].view(like.shape)
        found = found.to(factor.parameter.dtype)
        return local_part(found, factor.rule, self.mesh) if self.is_cut(factor) else found

    def keys(self, name: str) -> tuple[str, ...]:
        """What a checkpoint has of the parameter `name` of the adapter."""
        return MOMENTS if self.is_small(name) else (*MOMENTS, *_SCALES)

    def stored(self, key: str, name: str, whole: Tensor) -> Tensor:
        """`whole`, put together of `held`, as it is in a checkpoint: codes, or one scale a block."""
        if key in _SCALES:
            return whole.flatten()[::BLOCK].float().contiguous()
        return whole.to(torch.float32 if self.is_small(name) else torch.uint8)

    def spread(self, key: str, name: str, stored: Tensor) -> Tensor:
        """What `stored` was made of."""
        shape = self.parameters[name].shape
        return stored.repeat_interleave(BLOCK)[: math.prod(shape)].view(shape) if key in _SCALES else stored

    def packed(self, key: str, factor: Factor, own: Tensor) -> Tensor:
        """The state `key` of `factor`, of its part of what `spread` returns; of all of it if the mesh cuts a block."""
        own = own.contiguous().to(factor.parameter.device)
        return own.flatten()[::BLOCK].contiguous() if key in _SCALES else own
