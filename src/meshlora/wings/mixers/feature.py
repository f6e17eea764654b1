"""What this wing brings to the core: mixers with heads of their own, split over tp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from meshlora.feature import Feature
from meshlora.plan.layout import Layout
from meshlora.plan.rules import LinearRule, ParameterRule, PlannedBlock, Region
from meshlora.wings.mixers.block_states import keep_block_states
from meshlora.wings.mixers.mixers import mixer_of


def planned_block(
    model_type: str, path: str, module: nn.Module, linears: Mapping[str, LinearRule], *, name: str, tp: int
) -> PlannedBlock | None:
    """The plan of a mixer, whole where its heads cannot be shared; None: it is none of the family's."""
    mixer = mixer_of(model_type, path, module)
    if mixer is None:
        return None
    if reason := mixer.obstacle(module, tp):
        return PlannedBlock(Region(name, is_split=False, reason=reason))
    split: dict[str, LinearRule] = {}
    for place, leaf in mixer.leaves.items():
        rule = linears[f"{name}.{place}"]
        split[rule.name] = replace(rule, split=leaf.split, layout=mixer.leaf_layout(module, place))
    parameters: dict[str, ParameterRule] = {}
    for place, (dim, pieces) in mixer.parameters.items():
        if _has_tensor(module, place):
            parameters[f"{name}.{place}"] = ParameterRule(dim, mixer.layout(module, pieces))
    wide_norms: dict[str, Layout] = {}
    if mixer.norm and f"{name}.{mixer.norm}.weight" in parameters:
        layout = mixer.layout(module, "x", mixer.pieces["B"][0])  # groups are normalised apart
        if layout.groups % tp:
            wide_norms[f"{name}.{mixer.norm}"] = layout
    local: dict[str, dict[str, int]] = {}
    for place, own in mixer.local(module, tp=tp).items():
        local[f"{name}.{place}".rstrip(".")] = own  # "": the mixer itself
    return PlannedBlock(Region(name, True, local), split, parameters, wide_norms)


def _has_tensor(module: nn.Module, path: str) -> bool:
    """Whether there is a parameter or buffer at `path`."""
    owner, _, leaf = path.rpartition(".")
    return isinstance(getattr(dict(module.named_modules()).get(owner), leaf, None), Tensor)


class Wing(Feature):
    planned_block = staticmethod(planned_block)
    finish_model = staticmethod(keep_block_states)
