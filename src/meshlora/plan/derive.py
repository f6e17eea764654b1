"""Deriving a plan from the family's tensor-parallel plan and the module tree on the meta device.

Owns: which blocks of a decoder layer become which regions, and refusing modules that cannot be split safely. Does not
own: the data types of a plan (`plan.rules`), families (`plan.families.styles`), experts
(`wings.experts.forms`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshlora.feature import check_axes, features
from meshlora.plan.blocks import Heads, kept_whole, leaf_layout, local_attributes, parameter_layout
from meshlora.plan.families.family import FamilyPlan, Leaf
from meshlora.plan.families.refused import check_family
from meshlora.plan.families.styles import family_plan, known_plan, text_decoder
from meshlora.plan.layout import Layout, Split
from meshlora.plan.pairs import check
from meshlora.plan.rules import Domain, ExpertsRule, LinearRule, ModelPlan, ParameterRule, Region
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.model_class import reads_pairs
from meshlora_ground.tasks import PAIRED, task_of
from meshlora_ground.topology import Topology, divisors, set_of

# Pieces of fused linears that are proved to take adapters of their own.
_ADAPTED = {"q", "k", "v", "gate", "up"}


def plan_model(model: PreTrainedModel, topology: Topology, *, has_stages: bool = True) -> ModelPlan:
    """Derive the plan of `model` (a transformers causal LM, possibly on the meta device) on `topology`.

    has_stages: False: without the cut of its layers into stages, as of a model with some of the layers.

    Raises:
        UnsupportedError: no exact split is known for the family, a style, a layer or a parameter.
        UserError: tp does not divide the heads or a width; the message names values that do. An axis needs a wing.
    """
    check_axes(topology)
    check_family(model, topology)
    check({"topology": topology, "task": task_of(model.config)})
    experts: dict[str, ExpertsRule] = {}
    for feature in features():
        experts |= feature.find_experts(model, topology)
    linears = _whole_linears(model, experts)
    linears |= _fused(model, linears)
    head = _name_of(model, model.get_output_embeddings())
    if head not in linears:
        head = ""
    units: tuple[str, ...] = ()
    encoders = encoder_layers(model)
    if topology.dp_shard:
        stacks = (*encoders, decoder_layers(model))  # as they run
        units = tuple(f"{prefix}.{index}" for prefix, found in stacks for index in range(len(found)))
    # One process trains models whose layers are not found in one list, too, if they say how many there are.
    given = getattr(model.config.get_text_config(), "num_hidden_layers", None) if topology.is_whole else None
    num_layers = len(decoder_layers(model)[1]) if given is None else given
    of_routers = Domain.EQUAL if topology.is_whole else Domain.RESIDUAL
    whole = ModelPlan(
        model.config.model_type,
        topology,
        _name_of_layers(model),
        num_layers,
        (),
        linears,
        text="" if encoders else text_decoder(model)[0],
        encoder="".join(name for name, _ in encoders),
        embedding=_name_of(model, model.get_input_embeddings()),
        positions=_positions(model),
        head=head,
        experts=experts,
        matrices=_router_matrices(model, experts, linears, of_routers),
        units=units,
        task=PAIRED if encoders else task_of(model.config),
        readers=_readers(model, experts),
    )
    if topology.is_whole:
        return whole
    plan = _Planner(model, whole).plan()
    if has_stages:
        for feature in features():
            plan = feature.with_stages(model, plan)
    return plan


def _whole_linears(model: nn.Module, experts: Mapping[str, ExpertsRule]) -> dict[str, LinearRule]:
    """The rules of all linears of a model that nothing splits."""
    routers = frozenset().union(*(rule.routers for rule in experts.values()))
    found: dict[str, LinearRule] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        if name in routers and type(module).forward is not nn.Linear.forward:
            continue  # a linear by inheritance only: it returns a choice of experts, not a product
        if isinstance(module, NonDynamicallyQuantizableLinear):
            continue  # inside nn.MultiheadAttention, which reads its weight and never calls it
        if name.endswith("sconv.weight_proj"):
            continue  # PEFT renames adapters on it (inkling2) as it loads them, and loses them
        if not _is_product(module):
            continue  # a block-diagonal product (deepseek_v4), say: neither PEFT nor `ParallelLinear` computes it
        sizes, has_bias = _features(module), module.bias is not None
        found[name] = LinearRule(name, Split.WHOLE, *sizes, has_bias, is_transposed=isinstance(module, Conv1D))
    return found


def _name_of_layers(model: Any) -> str:
    """Of the decoder layers; "" for a model that has none to find, which one process trains all the same."""
    try:
        return decoder_layers(model)[0]
    except UnsupportedError:
        return ""


def _readers(model: Any, experts: Mapping[str, ExpertsRule]) -> frozenset[str]:
    """The linears that read their block's input, as the family's table says; none for a family without one."""
    try:
        prefix, layers = decoder_layers(model)
        family = family_plan(model, prefix, layers, {*experts, *(rule.block for rule in experts.values())})
    except UnsupportedError:
        return frozenset()
    found = set[str]()
    for path, leaf in family.leaves.items():
        if leaf.split is Split.COLUMN:
            found |= {f"{prefix}.{index}.{path}" for index in range(len(layers))}
    return frozenset(found)


class _Planner:
    """The state of one derivation of a tensor-parallel plan. whole: the plan without tp."""

    def __init__(self, model: Any, whole: ModelPlan) -> None:
        self.model, self.config, self.whole = model, model.config, whole
        self.what = f"model_type {whole.model_type!r}"
        self.linears, self.experts = dict(whole.linears), whole.experts
        self.layers_name, self.layers = decoder_layers(model)
        self.regions: list[Region] = []
        self.parameters: dict[str, ParameterRule] = {}
        self.wide_norms: dict[str, Layout] = {}
        self.limits: dict[str, Layout] = {}  # what tp must divide -> of which layout

    def plan(self) -> ModelPlan:
        apart = {*self.experts, *(rule.block for rule in self.experts.values())}
        family = family_plan(self.model, self.layers_name, self.layers, apart)
        for prefix, layers in ((self.layers_name, self.layers), *encoder_layers(self.model)):
            for index, layer in enumerate(layers):
                self._plan_layer(f"{prefix}.{index}", layer, family)
        self._check_divisible()
        self._split_vocabulary()
        per_layer = self._split_per_layer_inputs(family)
        plan = replace(
            self.whole,
            layers=self.layers_name,
            regions=tuple(self.regions),
            linears=self.linears,
            parameters=self.parameters,
            wide_norms=self.wide_norms,
            after=self._modules_after(family),
            per_layer=per_layer,
        )
        # `plan.linears` is this very dict: domains follow from the regions, which are complete only now.
        for name, rule in self.linears.items():
            domain = Domain.RESIDUAL if rule.split is Split.ROW else plan.domain_of(name)
            self.linears[name] = replace(rule, domain=domain)
        for feature in features():
            plan = feature.with_mixers(self.model, plan)
        return plan

    def _plan_layer(self, prefix: str, layer: nn.Module, family: FamilyPlan) -> None:
        if any(parameter.ndim > 1 for parameter in layer.parameters(recurse=False)):
            raise UnsupportedError(self.what, "its decoder layers own matrices directly", "use tp=1")
        modules = dict(layer.named_modules())
        present = {path: leaf for path, leaf in family.leaves.items() if path in modules}
        self._plan_children(prefix, "", layer, present, family)

    def _plan_children(
        self, prefix: str, parent: str, module: nn.Module, present: dict[str, Leaf], family: FamilyPlan
    ) -> None:
        """Plan the children of a decoder layer, or those of the block of routed experts at path `parent` in it."""
        for child_name, child in module.named_children():
            path = f"{parent}.{child_name}".removeprefix(".")
            name = f"{prefix}.{path}"
            inside = {p: leaf for p, leaf in present.items() if p == path or p.startswith(f"{path}.")}
            # Experts have rules of their own, and a router beside them is right on any slice of the tokens.
            if name in self.experts or path in family.token_wise or self._is_token_wise(name, child):
                continue
            if path in family.opened or any(expert.startswith(f"{name}.") for expert in self.experts):
                self._plan_children(prefix, path, child, present, family)
            elif self._take_planned(name, path, child):
                continue
            elif not inside:
                if not kept_whole(child):
                    continue
                self.regions.append(Region(name, is_split=False))
            # A linear of the layer itself, as fc1 and fc2 of opt.
            elif path in inside:
                self._split_leaf(prefix, path, inside[path], heads=None)
                if inside[path].split is Split.COLUMN:
                    self.regions.append(Region(name, is_split=True))
            else:
                self._split_block(prefix, path, child, inside, family)

    def _is_token_wise(self, name: str, module: nn.Module) -> bool:
        """Whether a module beside experts is their router or a shared expert's gate, which are token-wise."""
        block = name.rpartition(".")[0]
        widths = {1}  # of a gate; a router has one for each expert
        for rule in self.experts.values():
            if rule.name.startswith(f"{block}."):
                widths.add(rule.num_choices)
        matrices = [parameter for parameter in module.parameters() if parameter.ndim > 1]
        return bool(matrices) and widths.issuperset(map(len, matrices))

    def _is_whole(self, name: str, module: nn.Module) -> bool:
        """Whether a module in a split block has linears, and none of them is split."""
        linears = [path for path, _ in module.named_modules(prefix=name) if path in self.linears]
        return bool(linears) and all(self.linears[path].split is Split.WHOLE for path in linears)

    def _split_block(
        self, prefix: str, block: str, child: nn.Module, inside: dict[str, Leaf], family: FamilyPlan
    ) -> None:
        """Plan a block with split linears: an attention or an MLP."""
        name = f"{prefix}.{block}"
        heads = Heads.of(child, self.config)
        splits = {leaf.split for leaf in inside.values()}
        # What follows an opened block's columns may stand in another of its children.
        if splits != {Split.COLUMN, Split.ROW} and not (family.opened and splits == {Split.COLUMN}):
            raise UnsupportedError(name, f"a split region needs column and row linears, its plan has {sorted(splits)}")
        for path, leaf in inside.items():
            self._split_leaf(prefix, path, leaf, heads)
        for path, dim in family.parameters.items():
            if path.startswith(f"{block}."):
                self._split_parameter(f"{prefix}.{path}", dim, heads)
        for path in family.wide_norms:
            if path.startswith(f"{block}."):
                self._split_parameter(f"{prefix}.{path}.weight", 0, heads)
                if rule := self.parameters.get(f"{prefix}.{path}.weight"):
                    self.wide_norms[f"{prefix}.{path}"] = rule.layout
        self._check_every_parameter_is_claimed(name, child, {f"{prefix}.{path}" for path in family.whole}, heads)
        local: dict[str, dict[str, int]] = {}
        sliced: dict[str, tuple[int | str, int]] = {}
        if heads is not None:
            for path, module in child.named_modules(prefix=name):
                if self._is_whole(path, module):  # an indexer, which may have as many heads
                    continue
                own = family.local.get(path.removeprefix(f"{prefix}."), ())
                if values := local_attributes(module, heads, own, tp=self.whole.topology.tp):
                    local[path] = values
            for argument, of_heads in family.sliced.get(block, {}).items():
                sliced[argument] = (of_heads, heads.query)
        self.regions.append(Region(name, True, local, sliced, family.passes.get(block, ())))

    def _take_planned(self, name: str, path: str, module: nn.Module) -> bool:
        """Take the plan of a wing for the block `module` at `path` of a decoder layer. False: no wing plans it."""
        tp, model_type = self.whole.topology.tp, self.config.get_text_config().model_type
        for feature in features():
            if planned := feature.planned_block(model_type, path, module, self.linears, name=name, tp=tp):
                self.linears.update(planned.linears)
                self.parameters.update(planned.parameters)
                self.wide_norms.update(planned.wide_norms)
                self.regions.append(planned.region)
                if planned.region.is_split:
                    self._check_every_parameter_is_claimed(name, module, set(), None)
                return True
        return False

    def _split_leaf(self, prefix: str, path: str, leaf: Leaf, heads: Heads | None) -> None:
        name = f"{prefix}.{path}"
        rule = self.linears.get(name)
        if rule is None:
            raise UnsupportedError(name, "its tensor-parallel plan splits it, and it is not a linear layer", "use tp=1")
        width = "out_features" if leaf.split is Split.COLUMN else "in_features"
        layout = leaf_layout(path, leaf, getattr(rule, width), heads)
        self.linears[name] = replace(rule, split=leaf.split, layout=layout)
        self._limit(layout, heads, f"{name}.{width}={layout.size}")

    def _split_parameter(self, name: str, dim: int, heads: Heads | None) -> None:
        parent, _, leaf = name.rpartition(".")
        try:
            owner = self.model.get_submodule(parent)
        except AttributeError:  # not in this layer, or not with these options
            return
        parameter = getattr(owner, leaf, None)
        if parameter is not None and leaf == "weight" and (groups := getattr(owner, "n_groups", 0)):
            # Of a grouped linear: each group of rows reads its own group of heads.
            layout = Layout.plain(groups, parameter.shape[dim] // groups)
            self.parameters[name] = ParameterRule(dim, layout)
            self._limit(layout, None, f"n_groups={groups} of {name}")
        elif parameter is not None:
            layout = parameter_layout(name.removeprefix(f"{self.layers_name}."), parameter.shape[dim], heads)
            self.parameters[name] = ParameterRule(dim, layout)
            self._limit(layout, heads, name)

    def _limit(self, layout: Layout, heads: Heads | None, width: str) -> None:
        """Record what tp must divide, under the name users know."""
        for piece in layout.pieces:
            what = width
            if heads is not None and piece.can_replicate:
                what = f"num_key_value_heads={piece.num_units} or be a multiple of it"
            elif heads is not None:
                what = f"num_attention_heads={piece.num_units}"
            self.limits.setdefault(what, Layout((piece,)))

    def _check_every_parameter_is_claimed(
        self, name: str, region: nn.Module, whole: set[str], heads: Heads | None
    ) -> None:
        """Refuse a split region with a parameter that is neither split, a norm's or linear's, nor declared whole."""
        for path, module in region.named_modules(prefix=name):
            if isinstance(module, nn.ModuleList) and heads is not None and len(module) == heads.query > 1:
                raise UnsupportedError(path, "a module for each head is not split yet", "use tp=1")
            if path in self.linears:
                continue
            for leaf, parameter in module.named_parameters(recurse=False):
                is_norm = "Norm" in type(module).__name__ and parameter.ndim == 1
                if parameter.numel() > 1 and not is_norm and f"{path}.{leaf}" not in {*self.parameters, *whole}:
                    rule = "its tensor-parallel plan does not say how it is split"
                    raise UnsupportedError(f"{path}.{leaf} {list(parameter.shape)}", rule, "use tp=1")

    def _check_divisible(self) -> None:
        """Refuse a tp that does not divide the heads and every split width, naming values that do."""
        tp = self.whole.topology.tp
        for what, layout in self.limits.items():
            if not layout.can_split(tp):
                # Each limit is of one piece (`_limit`).
                most = max(limit.pieces[0].num_units for limit in self.limits.values())
                working = [n for n in divisors(most) if all(limit.can_split(n) for limit in self.limits.values())]
                raise UserError(f"tp={tp}", f"tp must divide {what}", f"use tp in {set_of(working)}")

    def _split_vocabulary(self) -> None:
        """Split the embedding and the head, tied or not."""
        has_head = self.whole.head in self.linears
        if not isinstance(self.model.get_input_embeddings(), nn.Embedding) or has_head != self.whole.has_vocabulary:
            raise UnsupportedError(self.what, "its embedding or its output head is not an ordinary one", "use tp=1")
        num_embeddings = self.model.get_input_embeddings().num_embeddings
        # Padded: tp need not divide a vocabulary.
        self.parameters[f"{self.whole.embedding}.weight"] = ParameterRule(0, Layout.padded(num_embeddings))
        if not has_head:
            return
        rule = self.linears[self.whole.head]
        self.linears[self.whole.head] = replace(rule, split=Split.COLUMN, layout=Layout.padded(rule.out_features))
        bias = self.model.get_output_embeddings().bias
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if parameter is bias and name != f"{self.whole.head}.bias":  # bert's is that of another module, too
                self.parameters[name] = ParameterRule(0, Layout.padded(rule.out_features))

    def _split_per_layer_inputs(self, family: FamilyPlan) -> tuple[str, int]:
        """`ModelPlan.per_layer`, of an embedding that is split as that of the tokens is; a model may have none."""
        name = f"{self.layers_name.rpartition('.')[0]}.{family.per_layer}"
        found = dict(self.model.named_modules()).get(name) if family.per_layer else None
        if not isinstance(found, nn.Embedding):
            return "", 0
        self.parameters[f"{name}.weight"] = ParameterRule(0, Layout.padded(found.num_embeddings))
        return name, found.embedding_dim // len(self.layers)

    def _modules_after(self, family: FamilyPlan) -> tuple[str, ...]:
        """Norms registered after the layers, modules outside the base model, and those listed by the family. None
        without a split vocabulary: all ranks then compute the same after the layers.
        """
        if not self.whole.has_vocabulary:
            return ()
        found, is_after = [], False
        base = self.layers_name.rpartition(".")[0]
        for name, module in self.model.named_modules():
            if not self.whole.is_text(name):
                continue
            is_after = is_after or name.startswith(f"{self.layers_name}.")
            is_inside = name.startswith((f"{self.layers_name}.", f"{self.whole.embedding}."))
            # What is registered after the layers need not run after them: a norm does, and what is outside the base.
            is_likely = "Norm" in type(module).__name__ or not name.startswith(f"{base}.")
            path = name.removeprefix(f"{base}.")
            named = path in family.after
            is_likely = is_likely and path not in family.before
            if named or (is_after and not is_inside and is_likely and name != self.whole.head):
                found.append(name)
        return tuple(found)


def _positions(model: Any) -> tuple[str, ...]:
    """The embeddings of positions, by name; those of other classes look up by other rules."""
    tables = [name for name, module in model.named_modules() if type(module) is nn.Embedding]
    number = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tokens = _name_of(model, model.get_input_embeddings())
    return tuple(n for n in tables if model.get_submodule(n).num_embeddings == number and n != tokens)


def _is_product(linear: nn.Linear | Conv1D) -> bool:
    """Whether a linear, whose class may have its own forward, maps `[T, in]` to `[T, out]`."""
    if type(linear).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    sizes = _features(linear)
    try:
        with torch.no_grad():
            found = linear(torch.empty(3, sizes[0], dtype=linear.weight.dtype, device=linear.weight.device))
    except RuntimeError:  # the shapes do not go together
        return False
    return isinstance(found, Tensor) and found.shape == (3, sizes[1])


def _router_matrices(
    model: Any, experts: Mapping[str, ExpertsRule], linears: Mapping[str, LinearRule], domain: Domain
) -> dict[str, LinearRule]:
    """Rules of routers that are not linears but own a weight `[experts, H]`."""
    found = {}
    for rule in experts.values():
        for name in rule.routers:
            weight = getattr(model.get_submodule(name), "weight", None)
            if name not in linears and isinstance(weight, nn.Parameter) and weight.ndim == 2:
                found[name] = LinearRule(name, Split.WHOLE, weight.shape[1], weight.shape[0], False, domain=domain)
    return found


def _fused(model: Any, linears: Mapping[str, LinearRule]) -> dict[str, LinearRule]:
    """Rules of the fused linears whose pieces may have adapters: those of which that is proved."""
    family = known_plan(model.config.get_text_config())
    if family is None:
        return {}
    leaves = family.leaves.items()
    fused = {path: leaf for path, leaf in leaves if leaf.pieces and _ADAPTED.issuperset(leaf.pieces.split())}
    if not fused:
        return {}
    prefix, layers = decoder_layers(model)
    found: dict[str, LinearRule] = {}
    for index, layer in enumerate(layers):
        for path, leaf in fused.items():
            rule = linears.get(f"{prefix}.{index}.{path}")
            if rule is not None:
                heads = Heads.of(layer.get_submodule(path.partition(".")[0]), model.config)
                layout = leaf_layout(path, leaf, rule.out_features, heads)
                found[rule.name] = replace(rule, fused=layout)
    return found


def _outer_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.ModuleList]]:
    """Without a look inside them: the layers of a large model have thousands of modules."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}".removeprefix(".")
        if isinstance(child, nn.ModuleList) and len(child):
            yield path, child
        else:
            yield from _outer_lists(child, path)


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """(name, decoder layers): the only ModuleList that is not nested in another.

    Raises:
        UnsupportedError: there is none, or more than one.
    """
    text, decoder = text_decoder(model)
    lists = dict(_outer_lists(decoder, text))
    if len(lists) > 1:  # convolutions or heads beside them, by the names that transformers gives layers
        lists = {name: m for name, m in lists.items() if name.rpartition(".")[2] in ("layers", "h", "blocks")}
    if len(lists) != 1:
        rule = f"it must hold exactly one list of decoder layers (found: {', '.join(lists) or 'none'})"
        raise UnsupportedError(f"model_type {model.config.model_type!r}", rule)
    return next(iter(lists.items()))


def num_streams(config: Any) -> int:
    """How many residual streams the layers of a model hand on: hyper-connections' (deepseek_v4), AltUp's (gemma3n)."""
    text = config.get_text_config()
    return getattr(text, "hc_mult", None) or getattr(text, "altup_num_inputs", None) or 1


def encoder_layers(model: PreTrainedModel) -> tuple[tuple[str, nn.ModuleList], ...]:
    """(name, layers) of the encoder whose states the decoder attends to, as of `decoder_layers`; () without one."""
    if not reads_pairs(model.config):
        return ()
    encoder = model.get_encoder()
    lists = dict(_outer_lists(encoder, _name_of(model, encoder)))
    if len(lists) != 1:
        raise UnsupportedError(f"model_type {model.config.model_type!r}", "its encoder has several lists of layers")
    return tuple(lists.items())


def _features(module: nn.Linear | Conv1D) -> tuple[int, int]:
    """(in, out) of the whole matrix."""
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return module.in_features, module.out_features


def _name_of(model: nn.Module, module: nn.Module | None) -> str:
    """The name of `module`; "" of None."""
    return next((name for name, other in model.named_modules() if other is module), "")
