"""The plan of a family that no table has, found on a small model of it.

For each kind of decoder layer: which linears are column- and row-parallel (`roles`), which module is the border of each
pair (the smallest change of the layer that is right in parts, `trial`), in which words (`words`). It is a proposal: the
proof of a twin decides, as for a line of a table. Does not own: where a plan is kept (`wings.found.kept`).
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.plan.blocks import Heads, local_attributes
from meshlora.plan.families.family import ROW, FamilyPlan, Leaf
from meshlora.plan.layout import Layout
from meshlora.wings.found.indices import chooses_by
from meshlora.wings.found.probe import Seen, called_after, gradients, is_nonzero, linears_of, look, rows_in
from meshlora.wings.found.roles import Roles, roles_of
from meshlora.wings.found.trial import FAILURES, Proposal, passes_in_parts, without_statistics
from meshlora.wings.found.words import needs_of, row_layout, split_dim, word_of

# Sets of attributes that are tried for a block, at most.
_MOST_TRIALS = 40


@dataclass
class Found:
    """What was found of a family.

    Attributes:
        leaves, local, sliced, parameters, wide_norms, whole, passes, opened, after: as in `FamilyPlan`.
        kept_whole: block with linears -> why it is not split.
        units: block -> what can be shared, as "8 heads, 4 of keys and values".
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    local: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sliced: dict[str, dict[str, int | str]] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    wide_norms: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    passes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    opened: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    kept_whole: dict[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    def plan(self) -> FamilyPlan:
        """It, as a table has it."""
        return FamilyPlan(
            self.leaves,
            local=self.local,
            sliced=self.sliced,
            parameters=self.parameters,
            wide_norms=self.wide_norms,
            whole=self.whole,
            passes=self.passes,
            after=self.after,
            opened=self.opened,
        )


def find_plan(model: Any, layers_name: str, apart: Collection[str]) -> Found:
    """The plan of `model`, small and with weights. apart: the names of its routed experts."""
    found, layers = Found(), model.get_submodule(layers_name)
    model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.requires_grad_())
    refused: dict[str, str] = {}
    for index in _kinds(layers):
        prefix = f"{layers_name}.{index}."
        own = {name.removeprefix(prefix) for name in apart if name.startswith(prefix)}
        layers[index].requires_grad_()
        one = _Layer(model, layers[index], own)
        one.find()
        layers[index].requires_grad_(False)
        refused |= one.found.kept_whole
        _join(found, one.found)
    # A block that is whole in one kind of layer is so in all: its paths are the same.
    for block in refused:
        if block in found.units:
            _drop(found, block)
    found.kept_whole = refused
    found.after = _after(model, layers_name)
    return found


def _after(model: Any, layers_name: str) -> tuple[str, ...]:
    """The modules that run after the layers: those beside these, and those that are registered before them elsewhere.

    Others are known by their place (`plan.derive`).
    """
    base, head = layers_name.rpartition(".")[0], model.get_output_embeddings()
    names = [name for name, _ in model.named_modules()]
    first = names.index(layers_name)
    found = dict[str, None]()
    for name in called_after(model, model.get_submodule(layers_name)[-1]):
        module, child = model.get_submodule(name), name.removeprefix(f"{base}.")
        if name.startswith(f"{layers_name}.") or module is head or not list(module.parameters()):
            continue
        if (child != name and "." not in child) or (child == name and names.index(name) < first):
            found[child] = None
    return tuple(found)


def _kinds(layers: nn.ModuleList) -> list[int]:
    """The first layer of each kind: of other modules, or other shapes."""
    first: dict[str, int] = {}
    for index, layer in enumerate(layers):
        words = [type(layer).__name__]
        for name, module in layer.named_modules():
            shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
            words.append(f"{name} {type(module).__name__} {shapes}")
        first.setdefault("\n".join(words), index)
    return list(first.values())


def _join(found: Found, one: Found) -> None:
    found.leaves |= one.leaves
    found.local |= one.local
    found.sliced |= one.sliced
    found.parameters |= one.parameters
    found.passes |= one.passes
    found.units |= one.units
    found.wide_norms = tuple(dict.fromkeys((*found.wide_norms, *one.wide_norms)))
    found.whole = tuple(dict.fromkeys((*found.whole, *one.whole)))
    found.opened = tuple(dict.fromkeys((*found.opened, *one.opened)))


def _drop(found: Found, block: str) -> None:
    """Keep `block` whole."""
    for fields in (found.leaves, found.local, found.sliced, found.parameters, found.passes, found.units):
        for path in [path for path in fields if _is_in(path, block)]:
            del fields[path]
    found.wide_norms = tuple(path for path in found.wide_norms if not _is_in(path, block))
    found.whole = tuple(path for path in found.whole if not _is_in(path, block))


def _is_in(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")


class _Layer:
    """The search in one decoder layer. apart: paths of its routed experts."""

    def __init__(self, model: Any, layer: nn.Module, apart: Collection[str]) -> None:
        self.model, self.layer, self.apart = model, layer, apart
        self.linears = linears_of(layer, apart)
        self.seen = look(model, layer, self.linears)
        self.roles = Roles({}) if self.seen.left is None else roles_of(self.seen)
        self.found = Found()

    def find(self) -> None:
        """Fill `found`."""
        self._walk("", self.layer)
        # A row linear outside is right only with all that it reads.
        for row, columns in self.roles.rows.items():
            missing = [path for path in columns if path not in self.found.leaves]
            if row in self.found.leaves and missing:
                for path in (row, *columns):
                    _drop(self.found, path)
        self.found.opened = tuple(
            block for block in self.found.opened if any(_is_in(path, block) for path in self.found.leaves)
        )
        for path in self.linears:
            block = self._block(path)
            if not any(_is_in(leaf, block) or _is_in(block, leaf) for leaf in self.found.leaves):
                why = "no linear in it reads what others alone have made"
                if path not in self.seen.calls:
                    why = "it is not called, or several times, in a forward of text alone"
                self.found.kept_whole.setdefault(block, why)

    def _block(self, path: str) -> str:
        """The child of the layer, or of an opened block or one with experts, that `path` is in."""
        parts = path.split(".")
        for number in range(1, len(parts)):
            block = ".".join(parts[:number])
            has_experts = any(_is_in(expert, block) for expert in self.apart)
            if block not in self.found.opened and not has_experts:
                return block
        return path

    def _walk(self, parent: str, module: nn.Module) -> None:
        split = {*self.roles.rows, *self.roles.columns}
        for name, child in module.named_children():
            path = f"{parent}.{name}".removeprefix(".")
            if path in self.apart or not any(_is_in(leaf, path) for leaf in split):
                continue
            if any(_is_in(expert, path) for expert in self.apart):
                self._walk(path, child)
            elif why := self._try_block(path, child):
                self._walk(path, child)
                if any(_is_in(leaf, path) for leaf in self.found.leaves):
                    self.found.opened = (path, *self.found.opened)
                    self.found.kept_whole.pop(path, None)
                elif list(child.children()):
                    for inner in [each for each in self.found.kept_whole if _is_in(each, path)]:
                        del self.found.kept_whole[inner]
                    self.found.kept_whole[path] = why

    def _try_block(self, path: str, block: nn.Module) -> str:
        """Split `block`; returns why that is not right, "" if it is."""
        columns = [name for name in self.roles.columns if _is_in(name, path)]
        rows = {row: reads for row, reads in self.roles.rows.items() if set(reads) & set(columns)}
        if not columns:
            return "" if path in self.roles.rows else "its row linear reads what others have made"
        inside = [row for row in rows if _is_in(row, path)]
        if inside and (len(inside) < len(rows) or any(not _is_in(c, path) for row in inside for c in rows[row])):
            return "its linears belong to those of another block"
        if path not in self.seen.calls:
            return "it is not called as a module, or several times"
        if path in self.linears and not self._is_elementwise(path, rows):
            return "what reads it mixes its features in no module of its own"
        own = {row: tuple(name for name in reads if name in columns) for row, reads in rows.items()}
        heads = Heads.of(block, self.model.config)
        layouts = self._row_layouts(rows, heads)
        if not layouts:
            return "the inputs of its row linear are not heads of one size"
        norms = self._wide_norms(path, block, columns)
        for wide in ((), norms) if norms else ((),):
            proposal = self._proposal(path, block, own, layouts, heads, wide)
            if not isinstance(proposal, str):
                break
        if isinstance(proposal, str):
            return proposal
        if not inside:  # its output leaves it split
            proposal = dataclasses.replace(proposal, border=next(iter(layouts.values())))
        inner = [name.removeprefix(path).removeprefix(".") for name in columns]
        if chooses_by(block, inner, *self.seen.calls[path][:2]):
            return "it computes an index from what a rank would have a part of"
        return self._settle(proposal, block, rows)

    def _is_elementwise(self, column: str, rows: Mapping[str, Any]) -> bool:
        """Whether each input of the row linears comes of one row of `column`, so that any part of it is a block."""
        for row in rows:
            width = self.seen.made[column].shape[-1]
            for feature in (0, width - 1):
                (found,) = gradients(self.seen.read[row], [self.seen.made[column]], features=torch.tensor([feature]))
                if rows_in(found) != {feature}:
                    return False
        return True

    def _row_layouts(self, rows: Mapping[str, Any], heads: Heads | None) -> dict[str, Layout]:
        found = {}
        for row in rows:
            layout = row_layout(row, self.seen.read[row].shape[-1], heads)
            if layout is None:
                return {}
            found[row] = layout
        return found

    def _wide_norms(self, path: str, block: nn.Module, columns: list[str]) -> tuple[str, ...]:
        """The norms of a block over the whole width of one of its column linears."""
        made = {name: self.seen.made[name] for name in columns}
        found = []
        for inner, module in block.named_modules(prefix=path):
            weight = getattr(module, "weight", None)
            is_norm = "Norm" in type(module).__name__ and isinstance(weight, Tensor) and weight.ndim == 1
            if not is_norm or getattr(module, "bias", None) is not None or inner not in self.seen.calls:
                continue
            given = self.seen.calls[inner][0][0]
            others = gradients(given, [*made.values(), *self.seen.entered])
            of_columns = [t for t, each in zip(made.values(), others, strict=False) if is_nonzero(each)]
            reads_stream = any(map(is_nonzero, others[len(made) :]))
            if of_columns and not reads_stream and given.shape[-1] in {t.shape[-1] for t in of_columns}:
                found.append(inner)
        return tuple(found)

    def _proposal(
        self,
        path: str,
        block: nn.Module,
        rows: Mapping[str, tuple[str, ...]],
        layouts: Mapping[str, Layout],
        heads: Heads | None,
        wide: tuple[str, ...],
    ) -> Proposal | str:
        """How the block is split, but for its attributes; or why it is not."""
        seen = self._seen_without(wide) if wide else self.seen
        parameters = {}
        for inner, module in block.named_modules(prefix=path):
            for name, parameter in module.named_parameters(recurse=False):
                if inner not in self.linears and parameter.numel() > 1:
                    parameters[f"{inner}.{name}"] = parameter
        needs = needs_of(seen, rows, layouts, parameters)
        if not needs.sizes:
            return "its units cannot be shared by two ranks"
        leaves: dict[str, Leaf] = dict.fromkeys(rows, ROW)
        for name in dict.fromkeys(itertools.chain.from_iterable(rows.values())):
            word = word_of(name, seen.made[name].shape[-1], heads, needs)
            if word is None:
                return f"no layout gives each rank the rows of {name.rpartition('.')[2]} that it needs"
            leaves[name] = word
        dims = {}
        for name, parameter in parameters.items():
            dim = split_dim(name, parameter.shape, heads, needs)
            is_norm = parameter.ndim == 1 and "Norm" in type(self.layer.get_submodule(name.rpartition(".")[0])).__name__
            if dim is None and not is_norm:
                return f"{name.rpartition('.')[2]} is neither split nor needed whole by each rank"
            if dim is not None and not (is_norm and dim < 0):
                dims[name] = dim
        for norm in wide:
            dims[f"{norm}.weight"] = 0
        return Proposal(path, leaves, heads, parameters=dims, wide_norms=wide)

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

    def _settle(self, proposal: Proposal, block: nn.Module, rows: Mapping[str, Any]) -> str:
        """Find the attributes and arguments with which `proposal` is right in parts, and take it."""
        path, call = proposal.block, self.seen.calls[proposal.block]
        whole = tuple(name for name, dim in proposal.parameters.items() if dim < 0)
        split = {name: dim for name, dim in proposal.parameters.items() if dim >= 0}
        proposal = dataclasses.replace(proposal, parameters=split)
        for local, sliced in itertools.islice(self._settings(proposal, block), _MOST_TRIALS):
            tried = dataclasses.replace(proposal, local=local, sliced=sliced)
            try:
                passes = passes_in_parts(tried, self.layer, call)
            except FAILURES:
                continue
            if passes is not None:
                self._take(tried, rows, whole, passes)
                return ""
        return f"the parts of {path} do not sum up to it"

    def _take(self, taken: Proposal, rows: Mapping[str, Any], whole: tuple[str, ...], passes: tuple[str, ...]) -> None:
        found, path = self.found, taken.block
        found.leaves |= taken.leaves
        found.local |= taken.local
        if taken.sliced:
            found.sliced[path] = dict(taken.sliced)
        norms = {f"{norm}.weight" for norm in taken.wide_norms}
        found.parameters |= {name: dim for name, dim in taken.parameters.items() if name not in norms}
        found.wide_norms += taken.wide_norms
        found.whole += whole
        if passes:
            found.passes[path] = passes
        if taken.heads is not None:
            found.units[path] = f"{taken.heads.query} heads, {taken.heads.kv} of keys and values"
        else:
            found.units[path] = ", ".join(f"{self.seen.read[row].shape[-1]} features" for row in rows)

    def _settings(
        self, proposal: Proposal, block: nn.Module
    ) -> Iterator[tuple[dict[str, tuple[str, ...]], dict[str, int | str]]]:
        """(attributes with local values, arguments with a dim of heads) to try, simple ones first."""
        slices: list[dict[str, int | str]] = [{}]
        if proposal.heads is not None and (sliced := self._with_heads(proposal, block)):
            slices.append(sliced)
        names = self._attributes(proposal, block)
        for number in range(min(3, len(names)) + 1):
            for chosen in itertools.combinations(names, number):
                local: dict[str, tuple[str, ...]] = {}
                for path, name in chosen:
                    local[path] = (*local.get(path, ()), name)
                for sliced in slices:
                    yield local, sliced

    def _attributes(self, proposal: Proposal, block: nn.Module) -> list[tuple[str, str]]:
        """(module, attribute) with a number that a rank may have a part of, in modules with a split linear."""
        heads = proposal.heads
        if heads is None:
            return []
        numbers = {heads.query, heads.kv}
        for path in proposal.leaves:
            if path in self.seen.made:
                numbers |= {self.seen.made[path].shape[-1], self.seen.read[path].shape[-1]}
        found = []
        for path, module in block.named_modules(prefix=proposal.block):
            if not any(leaf.rpartition(".")[0] == path for leaf in proposal.leaves):
                continue
            known = local_attributes(module, heads, (), tp=2)
            for name, value in vars(module).items():
                if isinstance(value, int) and not isinstance(value, bool) and value in numbers and name not in known:
                    found.append((path, name))
            counts = ("num_attention_heads", "num_key_value_heads")
            config = getattr(module, "config", None)
            found += [(path, f"config.{name}") for name in counts if getattr(config, name, None) in numbers]
        return found

    def _with_heads(self, proposal: Proposal, block: nn.Module) -> dict[str, int | str]:
        """The arguments of a block that have a dim of heads."""
        assert proposal.heads is not None
        args, kwargs, _ = self.seen.calls[proposal.block]
        given = {**dict(zip(_parameters(block), args, strict=False)), **kwargs}
        found: dict[str, int | str] = {}
        for name, value in given.items():
            if not isinstance(value, Tensor) or value.requires_grad:
                continue
            if value.ndim and value.shape[0] == self.seen.entered[0].shape[0] * proposal.heads.query:
                found[name] = "batch*heads"
            elif proposal.heads.query in value.shape:
                found[name] = value.shape.index(proposal.heads.query)
        return found


def _parameters(block: nn.Module) -> list[str]:
    return list(inspect.signature(block.forward).parameters)
