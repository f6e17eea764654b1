"""Injection: replace the leaves of a Hugging Face model by parallel ones, by name, from a plan.

Owns: which leaves are replaced, and freezing the base. Does not own: weights (`model.weights`), adapters (`adapter`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshlora.comm.groups import Axis, Mesh
from meshlora.feature import features, first_answer
from meshlora.layers.adapted import AdaptedLeaf
from meshlora.layers.embedding import ParallelEmbedding, parallelize_embedding
from meshlora.layers.held_tokens import ContextCut
from meshlora.layers.linear import ParallelHead, ParallelLinear
from meshlora.model.pipeline import Pipeline
from meshlora.model.regions import TokenCut, install_borders
from meshlora.model.wide_norm import widen_norm
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.layout import Split
from meshlora.plan.rules import LinearRule, ModelPlan
from meshlora_ground.errors import UserError


def parallelize(
    model: nn.Module,
    plan: ModelPlan,
    mesh: Mesh,
    *,
    targets: set[str],
    dtype: torch.dtype,
    options: BaseOptions | None = None,
) -> tuple[ContextCut, TokenCut, Pipeline]:
    """Replace in place, on the meta device, every split leaf, the head, experts, and every leaf that gets an adapter.

    The base is frozen. Everything else stays the model's own. Returns the cuts of its forwards over cp and
    under sp, and their way through this stage. options: with which the model was built; None: the usual ones.
    """
    pipeline = first_answer(lambda wing: wing.pipeline(model, plan, mesh)) or Pipeline()
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # adapters come later, and are trained
    tied = is_tied(model, plan)  # before the head gets a weight of its own
    sharing = _share_bias(model, plan)
    for name, rule in plan.linears.items():
        if rule.split is Split.WHOLE and name not in targets and name != plan.head:
            continue
        # The routers of some families have a wider dtype than the rest.
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        _replace(model, _leaf(plan, rule, mesh.tp, dtype=weight.dtype))
    for name, split in plan.parameters.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(module, nn.Embedding) and owner != plan.embedding and split.dim == 0:
            parallelize_embedding(module, split, mesh.tp, name=owner)
        elif owner != plan.embedding:
            whole = getattr(module, leaf)
            shape = list(whole.shape)
            shape[split.dim] = split.layout.local_size(mesh.tp.size)  # equal on all ranks, padding included
            empty = torch.empty(shape, dtype=whole.dtype, device="meta")
            if isinstance(whole, nn.Parameter):  # else a buffer, which is split in the same way
                empty = nn.Parameter(empty, requires_grad=False)
            setattr(module, leaf, empty)
    _connect(model, plan)
    if plan.embedding and (plan.topology.tp > 1 or plan.embedding in targets):
        embedding = model.get_submodule(plan.embedding)
        parallelize_embedding(embedding, plan.parameters.get(f"{plan.embedding}.weight"), mesh.tp, name=plan.embedding)
    if tied:
        head, embedding = model.get_submodule(plan.head), model.get_submodule(plan.embedding)
        head.weight = embedding.weight  # each may have been given one of its own above
    for module in sharing:
        module.bias = model.get_submodule(plan.head).bias
    for feature in features():
        feature.replace(model, plan, mesh, dtype=dtype)
    for name, layout in plan.wide_norms.items():
        widen_norm(model.get_submodule(name), layout, mesh.over(plan.axes_of_norm(name)), name=name)
    for feature in features():
        feature.change_modules(model, plan, options or BaseOptions(), dtype=dtype, device=mesh.device)
    # After the leaves: a module that is replaced would lose its hooks.
    cuts = install_borders(model, plan, mesh, pipeline)
    for feature in features():
        feature.finish_model(model)
    pipeline.take_turns(model)
    return *cuts, pipeline


ParallelLeaf = AdaptedLeaf | ParallelEmbedding


def parallel_leaves(model: nn.Module) -> dict[str, ParallelLeaf]:
    """Name -> leaf that can carry adapters, in module order."""
    found: dict[str, ParallelLeaf] = {}
    for path, module in model.named_modules():
        if isinstance(module, AdaptedLeaf):
            found[module.name_at(path)] = module
        elif isinstance(module, ParallelEmbedding):
            found[path] = module
    return found


def adopt(model: nn.Module, plan: ModelPlan, name: str, tp: Axis) -> ParallelLeaf:
    """The parallel leaf `name`; a module that is still the model's own is wrapped and shares its weights.

    Raises:
        UserError: it is still the model's own, and sharded over dp.
    """
    module = model.get_submodule(name)
    if isinstance(module, ParallelLeaf):
        return module
    if (own := first_answer(lambda wing: wing.adopt(module, plan, name))) is not None:
        return own
    if name in plan.tables:
        parallelize_embedding(module, None, tp, name=name)
        assert isinstance(module, ParallelEmbedding)
        return module
    if plan.is_sharded(f"{name}.weight", ndim=2):
        why = "its weight is sharded over dp already, and no adapter was on it when the model was loaded"
        raise UserError(f"an adapter on {name}", why, "load the model with the adapter that has the most targets first")
    rule = plan.linears[name]
    assert isinstance(module, nn.Linear | Conv1D), type(module)
    assert isinstance(module.weight, nn.Parameter)
    assert rule.split is Split.WHOLE, rule
    leaf = ParallelLinear(rule, tp, scatters_tokens=False, dtype=module.weight.dtype, device="meta")
    leaf.weight = module.weight
    if rule.is_transposed:  # a view: Conv1D has [in, out]
        leaf.weight = nn.Parameter(module.weight.T, requires_grad=False)
    leaf.register_parameter("bias", module.bias)
    leaf.train(module.training)  # a new module is in training mode
    _replace(model, leaf)
    _connect(model, plan)
    return leaf


def _leaf(plan: ModelPlan, rule: LinearRule, tp: Axis, *, dtype: torch.dtype) -> ParallelLinear:
    cls = ParallelHead if rule.name == plan.head else ParallelLinear
    scatters = plan.topology.sp and rule.split is Split.ROW
    return cls(rule, tp, scatters_tokens=scatters, dtype=dtype, device="meta")


def _connect(model: nn.Module, plan: ModelPlan) -> None:
    for feature in features():
        feature.connect_linears(model, plan)


def _replace(model: nn.Module, leaf: ParallelLinear) -> None:
    parent, _, child = leaf.rule.name.rpartition(".")
    setattr(model.get_submodule(parent), child, leaf)


def _share_bias(model: nn.Module, plan: ModelPlan) -> list[nn.Module]:
    """The modules that have the bias of the head for theirs."""
    if not plan.head or (bias := model.get_submodule(plan.head).bias) is None:
        return []
    return [m for name, m in model.named_modules() if name != plan.head and getattr(m, "bias", None) is bias]


def is_tied(model: nn.Module, plan: ModelPlan) -> bool:
    """Whether head and embedding are one parameter."""
    if not plan.head or not plan.embedding:
        return False
    return model.get_submodule(plan.head).weight is model.get_submodule(plan.embedding).weight
