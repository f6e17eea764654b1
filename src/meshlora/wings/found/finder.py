"""The plan of a family that no table has, found on a small model of it.

For each kind of decoder layer: which linears are column- and row-parallel (`roles`), which module is the border of each
pair (the outermost one that is right in parts, `trial`), in which words (`words`). It is a proposal: the proof of a
twin decides, as for a line of a table. Does not own: where a plan is kept (`wings.found.kept`).
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.plan.blocks import Heads, local_attributes
from meshlora.plan.derive import encoder_layers
from meshlora.plan.families.family import ROW, FamilyPlan, Leaf
from meshlora.plan.layout import Layout
from meshlora.plan.rules import is_in
from meshlora.wings.found.indices import chooses_by
from meshlora.wings.found.probe import Seen, gradients, is_nonzero, linears_of, look, rows_in
from meshlora.wings.found.roles import roles_of
from meshlora.wings.found.trial import FAILURES, Proposal, passes_in_parts, without_statistics
from meshlora.wings.found.words import needs_of, row_layout, word_of

# Settings that are tried for a block, at most.
_MOST_TRIALS = 40


@dataclass
class Found:
    """A plan that was found. units: block -> what ranks share of it. kept_whole: block with linears -> why it is."""

    plan: FamilyPlan = field(default_factory=lambda: FamilyPlan({}))
    units: dict[str, str] = field(default_factory=dict)
    kept_whole: dict[str, str] = field(default_factory=dict)

    def add(self, plan: FamilyPlan) -> None:
        """Extend the plan by another."""
        changes: dict[str, Any] = {}
        for name, new in vars(plan).items():
            if isinstance(new, str):  # of second inputs, which are not found
                continue
            old = getattr(self.plan, name)
            changes[name] = tuple(dict.fromkeys((*old, *new))) if isinstance(new, tuple) else {**old, **new}
        self.plan = dataclasses.replace(self.plan, **changes)

    def drop(self, block: str) -> None:
        """Keep `block` whole."""
        changes: dict[str, Any] = {}
        for name, value in vars(self.plan).items():
            if isinstance(value, str):
                continue
            kept = [path for path in value if not is_in(path, block)]
            changes[name] = tuple(kept) if isinstance(value, tuple) else {path: value[path] for path in kept}
        self.plan = dataclasses.replace(self.plan, **changes)
        self.units.pop(block, None)

    def splits(self, block: str) -> bool:
        """Whether a linear in `block` is split."""
        return any(is_in(path, block) for path in self.plan.leaves)


def find_plan(model: Any, layers_name: str, apart: Collection[str]) -> Found:
    """The plan of `model`, small and with weights. apart: the names of its routed experts."""
    # First, as some models change their own modules when they run.
    found, (before, after) = Found(), _around(model, layers_name)
    for name in _kinds(model, (layers_name, *(name for name, _ in encoder_layers(model)))):
        prefix, layer = f"{name}.", model.get_submodule(name)
        own = {other.removeprefix(prefix) for other in apart if other.startswith(prefix)}
        layer.requires_grad_()
        one = _Layer(model, layer, own).find()
        layer.requires_grad_(False)
        found.add(one.plan)
        found.units |= one.units
        found.kept_whole |= one.kept_whole
    # A block that is whole in one kind of layer is so in all: its paths are the same.
    for block in found.kept_whole:
        found.drop(block)
    found.add(FamilyPlan({}, before=before, after=after))
    return found


def _around(model: Any, layers_name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the norms beside the layers that do not run after them, though registered there, the modules that do run after
    them: those beside them, and those that are registered before them elsewhere).

    Others are known by their place (`plan.derive`).
    """
    base, head = layers_name.rpartition(".")[0], model.get_output_embeddings()
    names = [name for name, _ in model.named_modules()]
    first = names.index(layers_name)
    before, found = [], []
    called = look(model, model.get_submodule(layers_name)[-1], ()).after
    for name, module in model.get_submodule(base).named_children():
        if "Norm" in type(module).__name__ and f"{base}.{name}" not in called and names.index(f"{base}.{name}") > first:
            before.append(name)
    for name in called:
        module, child = model.get_submodule(name), name.removeprefix(f"{base}.")
        if name.startswith(f"{layers_name}.") or module is head or not list(module.parameters()):
            continue
        if (child != name and "." not in child) or (child == name and names.index(name) < first):
            found.append(child)
    return tuple(before), tuple(found)


def _kinds(model: Any, stacks: Iterable[str]) -> list[str]:
    """The first layer of each kind, by name, in the lists `stacks`: of other modules, or other shapes."""
    first: dict[str, str] = {}
    for stack in stacks:
        for index, layer in enumerate(model.get_submodule(stack)):
            words = [type(layer).__name__]
            for name, module in layer.named_modules():
                shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
                words.append(f"{name} {type(module).__name__} {shapes}")
            first.setdefault("\n".join(words), f"{stack}.{index}")
    return list(first.values())


class _Layer:
    """The search in one decoder layer. apart: paths of its routed experts."""

    def __init__(self, model: Any, layer: nn.Module, apart: Collection[str]) -> None:
        self.model, self.layer, self.apart, self.found = model, layer, apart, Found()
        self.linears = linears_of(layer, apart)
        self.seen = look(model, layer, self.linears)
        self.rows = roles_of(self.seen) if self.seen.calls else {}
        self.reasons = dict[str, str]()  # block -> why it is none
        self.columns = set(itertools.chain.from_iterable(self.rows.values()))
        self.holders = {own for path in apart for own in itertools.accumulate(path.split("."), "{}.{}".format)}

    def find(self) -> Found:
        """What is found in it."""
        self._walk("", self.layer)
        # A row linear outside a block is right only with all that it reads.
        for row, columns in self.rows.items():
            if row in self.found.plan.leaves and not self.found.plan.leaves.keys() >= set(columns):
                for path in (row, *columns):
                    self.found.drop(path)
        opened = tuple(block for block in self.found.plan.opened if self.found.splits(block))
        self.found.plan = dataclasses.replace(self.found.plan, opened=opened)
        for path in self.linears:
            block = self._block(path)
            if not self.found.splits(block):
                why = "no linear in it reads what others alone have made"
                if path not in self.seen.calls:
                    why = "it is not called, or several times, in a forward of text alone"
                self.found.kept_whole[block] = self.reasons.get(block, why)
        return self.found

    def _block(self, path: str) -> str:
        """The child of the layer, or of an opened block or one with experts, that `path` is in."""
        for block in itertools.accumulate(path.split("."), "{}.{}".format):
            if block not in self.found.plan.opened and block not in self.holders:
                return block
        return path

    def _walk(self, parent: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            path = f"{parent}.{name}".removeprefix(".")
            if path in self.apart or not any(is_in(leaf, path) for leaf in {*self.rows, *self.columns}):
                continue
            if path in self.holders:
                self._walk(path, child)
            elif why := self._try_block(path, child):
                self._walk(path, child)
                self.found.add(FamilyPlan({}, opened=(path,)))
                self.reasons[path] = why

    def _try_block(self, path: str, block: nn.Module) -> str:
        """Split `block`; returns why that is not right, "" if it is."""
        columns = [name for name in self.linears if name in self.columns and is_in(name, path)]
        rows = {row: reads for row, reads in self.rows.items() if set(reads) & set(columns)}
        inside = [row for row in rows if is_in(row, path)]
        if not columns:
            return "" if path in self.rows else "its row linear reads what others have made"
        if inside and (len(inside) < len(rows) or any(not is_in(c, path) for c in itertools.chain(*rows.values()))):
            return "its linears belong to those of another block"
        if path not in self.seen.calls:
            return "it is not called as a module, or several times"
        if path in self.linears and not self._is_elementwise(path, rows):
            return "what reads it mixes its features in no module of its own"
        heads, layouts = Heads.of(block, self.model.config), dict[str, Layout]()
        for row in rows:
            if (layout := row_layout(row, self.seen.read[row].shape[-1], heads)) is None:
                return "the inputs of its row linear are not heads of one size"
            layouts[row] = layout
        own = {row: tuple(name for name in reads if name in columns) for row, reads in rows.items()}
        leaves = self._leaves(self.seen, own, layouts, heads)
        norms = self._wide_norms(path, block, columns) if isinstance(leaves, str) else ()
        if norms:
            leaves = self._leaves(self._seen_without(norms), own, layouts, heads)
        if isinstance(leaves, str):
            return leaves
        inner = [name.removeprefix(path).removeprefix(".") for name in columns]
        if chooses_by(block, inner, *self.seen.calls[path][:2]):
            return "it computes an index from what a rank would have a part of"
        border = None if inside else layouts[next(iter(rows))]
        return self._settle(Proposal(path, leaves, heads, wide_norms=norms, border=border), block)

    def _is_elementwise(self, column: str, rows: Mapping[str, Any]) -> bool:
        """Whether each input of the row linears comes of one row of `column`, so that any part of it is a block."""
        made = self.seen.made[column]
        for row, feature in itertools.product(rows, (0, made.shape[-1] - 1)):
            (found,) = gradients(self.seen.read[row], [made], features=torch.tensor([feature]))
            if not rows_in(found) <= {feature}:  # none of a feature that relu has set to zero for all tokens
                return False
        return True

    def _wide_norms(self, path: str, block: nn.Module, columns: list[str]) -> tuple[str, ...]:
        """The norms of a block over the whole width of one of its column linears."""
        made = [self.seen.made[name] for name in columns]
        found = []
        for inner, module in block.named_modules(prefix=path):
            weight = getattr(module, "weight", None)
            is_norm = "Norm" in type(module).__name__ and isinstance(weight, Tensor) and weight.ndim == 1
            if not is_norm or getattr(module, "bias", None) is not None or inner not in self.seen.calls:
                continue
            given = self.seen.calls[inner][0][0]
            others = [is_nonzero(each) for each in gradients(given, [*made, *self.seen.entered])]
            widths = {tensor.shape[-1] for tensor, reads in zip(made, others, strict=False) if reads}
            if given.shape[-1] in widths and not any(others[len(made) :]):
                found.append(inner)
        return tuple(found)

    def _seen_without(self, norms: tuple[str, ...]) -> Seen:
        """A forward in which `norms` only scale, so that features depend on none but themselves."""
        modules = [self.layer.get_submodule(path) for path in norms]
        for module in modules:
            without_statistics(module)
        try:
            return look(self.model, self.layer, self.linears)
        finally:
            for module in modules:
                del module.forward

    def _leaves(
        self, seen: Seen, rows: Mapping[str, tuple[str, ...]], layouts: Mapping[str, Layout], heads: Heads | None
    ) -> dict[str, Leaf] | str:
        """The leaves of a block, in words; or why there are none."""
        needs = needs_of(seen, rows, layouts)
        if not needs:
            return "its units cannot be shared by two ranks"
        leaves: dict[str, Leaf] = dict.fromkeys(rows, ROW)
        for name in dict.fromkeys(itertools.chain.from_iterable(rows.values())):
            word = word_of(name, seen.made[name].shape[-1], heads, needs)
            if word is None:
                return f"no layout gives each rank the rows of {name.rpartition('.')[2]} that it needs"
            leaves[name] = word
        return leaves

    def _settle(self, proposal: Proposal, block: nn.Module) -> str:
        """Find the attributes, arguments and parameters with which `proposal` is right in parts, and take it."""
        path, heads, call = proposal.block, proposal.heads, self.seen.calls[proposal.block]
        names = self._parameters(proposal, block)
        for local, sliced, dims in itertools.islice(self._settings(proposal, block, names), _MOST_TRIALS):
            tried = dataclasses.replace(proposal, local=local, sliced=sliced, parameters=dims)
            try:
                passes = passes_in_parts(tried, self.layer, call)
            except FAILURES:
                continue
            if passes is None:
                continue
            norms = {f"{norm}.weight" for norm in proposal.wide_norms}
            plan = FamilyPlan(
                proposal.leaves,
                local=local,
                sliced={path: sliced} if sliced else {},
                parameters={name: dim for name, dim in dims.items() if name not in norms},
                wide_norms=proposal.wide_norms,
                whole=tuple(name for name in names if name not in dims),
                passes={path: passes} if passes else {},
            )
            self.found.add(plan)
            of_heads = "features" if heads is None else f"{heads.query} heads, {heads.kv} of keys and values"
            self.found.units[path] = of_heads
            return ""
        return f"the parts of {path} do not sum up to it"

    def _parameters(self, proposal: Proposal, block: nn.Module) -> dict[str, int | None]:
        """Parameter of no linear -> its dim of heads or features; None: it has none. Not those of norms of one head."""
        widths = {self.seen.made[path].shape[-1] for path in proposal.leaves if path in self.columns}
        if proposal.heads is not None:
            widths |= {proposal.heads.query, proposal.heads.kv}
        found = dict[str, int | None]()
        for inner, module in block.named_modules(prefix=proposal.block):
            for name, parameter in module.named_parameters(recurse=False):
                if inner in self.linears or parameter.numel() < 2:
                    continue
                dim = next((dim for dim, width in enumerate(parameter.shape) if width in widths), None)
                if dim is not None or parameter.ndim > 1 or "Norm" not in type(module).__name__:
                    found[f"{inner}.{name}"] = dim
        return found

    def _settings(
        self, proposal: Proposal, block: nn.Module, parameters: Mapping[str, int | None]
    ) -> Iterator[tuple[dict[str, tuple[str, ...]], dict[str, int | str], dict[str, int]]]:
        """(attributes with local values, arguments and parameters with a dim of heads) to try, simple ones first."""
        split = {name: dim for name, dim in parameters.items() if dim is not None}
        dims = [split] if not split or proposal.wide_norms else [split, {}]
        # A norm of each head may be as wide as there are heads.
        apart = {name: dim for name, dim in split.items() if "norm" not in name}
        if len(dims) > 1 and 0 < len(apart) < len(split):
            dims.insert(1, apart)
        with_heads = self._with_heads(proposal, block)
        slices = [dict[str, int | str](), with_heads] if with_heads else [with_heads]
        names = self._attributes(proposal, block)
        for number in range(min(3, len(names)) + 1):
            for chosen in itertools.combinations(names, number):
                local = {path: tuple(name for own, name in chosen if own == path) for path, _ in chosen}
                for sliced, own in itertools.product(slices, dims):
                    yield local, sliced, own

    def _attributes(self, proposal: Proposal, block: nn.Module) -> list[tuple[str, str]]:
        """(module, attribute) with a number that a rank may have a part of, in modules with a split linear."""
        if proposal.heads is None:
            return []
        numbers = {proposal.heads.query, proposal.heads.kv}
        for path in proposal.leaves:
            numbers |= {self.seen.made[path].shape[-1], self.seen.read[path].shape[-1]}
        found = []
        for path, module in block.named_modules(prefix=proposal.block):
            if not any(leaf.rpartition(".")[0] == path for leaf in proposal.leaves):
                continue
            known = local_attributes(module, proposal.heads, (), tp=2)
            own = {name for name, value in vars(module).items() if type(value) is int and value in numbers}
            found += [(path, name) for name in vars(module) if name in own - known.keys()]
            config = getattr(module, "config", None)
            counts = ("num_attention_heads", "num_key_value_heads")
            found += [(path, f"config.{name}") for name in counts if getattr(config, name, None) in numbers]
        return found

    def _with_heads(self, proposal: Proposal, block: nn.Module) -> dict[str, int | str]:
        """The arguments of a block that have a dim of heads."""
        found: dict[str, int | str] = {}
        if proposal.heads is None:
            return found
        args, kwargs, _ = self.seen.calls[proposal.block]
        given = {**dict(zip(inspect.signature(block.forward).parameters, args, strict=False)), **kwargs}
        for name, value in given.items():
            if not isinstance(value, Tensor) or value.requires_grad:
                continue
            if value.ndim and value.shape[0] == self.seen.entered[0].shape[0] * proposal.heads.query:
                found[name] = "batch*heads"
            elif proposal.heads.query in value.shape:
                found[name] = value.shape.index(proposal.heads.query)
        return found
