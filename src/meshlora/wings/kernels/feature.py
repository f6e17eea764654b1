"""What this wing brings to the core: the same numbers in less time and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshlora.feature import Feature
from meshlora.layers.linear import ParallelLinear
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.rules import ModelPlan, Region
from meshlora.wings.kernels import entrance, kernels
from meshlora.wings.kernels.chosen_experts import own_weights_of_experts
from meshlora.wings.kernels.early_a import with_riders
from meshlora.wings.kernels.fused import fuse
from meshlora.wings.kernels.gate_recompute import watch_activations
from meshlora.wings.kernels.rms_norm import own_gradients_of_norms
from meshlora.wings.kernels.rotary import own_rotations


class Wing(Feature):
    check_loading = staticmethod(kernels.check_loading)
    connect_linears = staticmethod(entrance.connect_linears)

    def change_modules(
        self, model: nn.Module, plan: ModelPlan, options: BaseOptions, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        watch_activations(model, plan.owners)
        # Before other forwards are given, which leave those with kernels alone.
        if (found := kernels.kernels_of(options, device=device, dtype=dtype)) is not None:
            if plan.units:  # whose layers get the forward of another class, later
                found = dataclasses.replace(found, stream=None)
            fuse(model, found)
        own_gradients_of_norms(model)
        own_rotations(model)
        own_weights_of_experts(model)

    def gather_input(
        self, gather: Callable[[Tensor], Tensor], model: nn.Module, plan: ModelPlan, region: Region
    ) -> Callable[[Tensor], Tensor]:
        leaves = [leaf for name in plan.riders(region) if isinstance(leaf := model.get_submodule(name), ParallelLinear)]
        return with_riders(gather, leaves) if leaves else gather
