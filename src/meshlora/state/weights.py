"""Base weights: each rank reads only its own slices of a checkpoint.

Owns: finding the tensors of a Hugging Face checkpoint (single file or sharded, old and new key names, tied weights)
and filling a parallel model from them. Does not own: how a weight is split (`plan`), adapters (`adapter`).

Peak host memory of a rank: its shard plus one tensor. A safetensors file is a memory map whose touched pages count as
ours while it is open, so each tensor is read through a map of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshlora.errors import UnsupportedError, UserError, did_you_mean
from meshlora.parallel.groups import Mesh
from meshlora.parallel.linear import ParallelLinear
from meshlora.plan.layout import Layout, Split
from meshlora.plan.rules import ModelPlan
from meshlora.state.files import open_safetensors, read_json


@dataclass(frozen=True)
class Part:
    """A slice of one dim: `start:stop`."""

    dim: int
    start: int
    stop: int


_ROWS_AT_ONCE = 4096


class Source(Protocol):
    """Where full tensors come from, a slice at a time."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the whole tensor; None where it is absent."""

    def is_float(self, name: str) -> bool:
        """Whether it holds floating-point numbers, rather than the integers of a quantised weight."""

    def read(self, name: str, part: Part | None) -> Tensor:
        """The whole tensor or one part of it, in memory of its own or to be copied."""

    def unused(self, wanted: set[str]) -> list[str]:
        """Names that the source has and nobody wants."""

    def describe(self) -> str:
        """For error messages."""


class StateDictSource:
    """Tensors that are in memory already: a model with random weights."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.tensors[name].shape) if name in self.tensors else None

    def is_float(self, name: str) -> bool:
        return self.tensors[name].is_floating_point()

    def read(self, name: str, part: Part | None) -> Tensor:
        tensor = self.tensors[name]
        return tensor if part is None else tensor.narrow(part.dim, part.start, part.stop - part.start)

    def unused(self, wanted: set[str]) -> list[str]:
        return []

    def describe(self) -> str:
        return "the random weights"


@dataclass(frozen=True)
class _Stored:
    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: F32, BF16, I8


class CheckpointSource:
    """A folder with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Keys are renamed as transformers would for this model; tensors that it concatenates (dim 0) are concatenated.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.folder = folder
        self.stored = _named_for_model(folder, model)

    def shape(self, name: str) -> tuple[int, ...] | None:
        pieces = self.stored.get(name)
        if pieces is None:
            return None
        return (sum(p.shape[0] for p in pieces), *pieces[0].shape[1:]) if len(pieces) > 1 else pieces[0].shape

    def is_float(self, name: str) -> bool:
        return all(piece.dtype.startswith(("F", "BF")) for piece in self.stored[name])

    def read(self, name: str, part: Part | None) -> Tensor:
        pieces = self.stored[name]
        if len(pieces) == 1:
            return _read_slice(pieces[0], part)
        whole = torch.cat([_read_slice(p, None) for p in pieces])
        return whole if part is None else whole.narrow(part.dim, part.start, part.stop - part.start).clone()

    def unused(self, wanted: set[str]) -> list[str]:
        return sorted(self.stored.keys() - wanted)

    def describe(self) -> str:
        return f"checkpoint {self.folder}"


def _read_slice(stored: _Stored, part: Part | None) -> Tensor:
    with open_safetensors(stored.file) as file:
        view = file.get_slice(stored.key)
        index: list[slice] = [slice(None)] * len(stored.shape)
        if part is not None:
            index[part.dim] = slice(part.start, part.stop)
        tensor: Tensor = view[tuple(index)] if index else file.get_tensor(stored.key)
        # A copy, or the memory map would live as long as the tensor.
        return tensor.clone()


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        UserError: none there, an index that names a missing file, or pickled weights only.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = read_json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"{index}", "it has no weight_map from names to files", "download it again")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if file.parent != folder or not file.is_file():
                raise UserError(f"{index}", f"it names {file.name}, which is not in the folder", "download it again")
        return files
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise UserError(
            f"{folder}",
            "it holds pickled weights only, and meshlora unpickles nothing",
            "convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
        )
    raise UserError(f"{folder}", "it holds no model.safetensors and no model.safetensors.index.json")


def _stored_tensors(folder: Path) -> Iterator[_Stored]:
    for path in checkpoint_files(folder):
        with open_safetensors(path) as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                view = file.get_slice(key)
                yield _Stored(path, key, tuple(view.get_shape()), view.get_dtype())


def _named_for_model(folder: Path, model: nn.Module) -> dict[str, list[_Stored]]:
    """Name in the model -> what is stored for it, in the order in which it is concatenated."""
    from transformers import conversion_mapping, core_model_loading

    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
    names = model.state_dict()
    found: dict[str, list[tuple[int, _Stored]]] = {}
    for stored in _stored_tensors(folder):
        name, pattern = core_model_loading.rename_source_key(
            stored.key, renamings, converters, model.base_model_prefix, names
        )
        order = 0
        if pattern is not None:
            converter = next(c for c in converters if pattern in c.source_patterns)
            operations = [type(o).__name__ for o in converter.operations]
            if operations != ["Concatenate"] or converter.operations[0].dim != 0:
                raise UnsupportedError(stored.key, f"its conversion on load ({operations}) is not supported yet")
            order = converter.source_patterns.index(pattern)
        found.setdefault(name, []).append((order, stored))
    return {name: [s for _, s in sorted(pieces, key=lambda p: p[0])] for name, pieces in found.items()}


@dataclass(frozen=True)
class Placement:
    """How a rank's tensor lies in the stored one: `shape` as stored, the dim that is split (None: none) as we hold it,
    its layout, and whether the stored one is transposed.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    layout: Layout | None = None
    is_transposed: bool = False


def fill(model: nn.Module, plan: ModelPlan, source: Source, mesh: Mesh, *, allow_unused: bool = False) -> None:
    """Give every parameter and buffer of `model` (meta device) its local part of `source`, on the mesh's device.

    Raises:
        UserError: what `check_checkpoint` refuses.
    """
    aliases = check_checkpoint(model, source, plan=plan, allow_unused=allow_unused)
    # Buffers first: a module's own rule also draws its parameters, which on the meta device does nothing.
    _fill_buffers(model, source, mesh)
    made: dict[int, nn.Parameter] = {}
    for path, module in list(model.named_modules()):
        for leaf, old in list(module.named_parameters(recurse=False)):
            if id(old) not in made:
                name = f"{path}.{leaf}" if path else leaf
                where = _placement(name, module, old, plan)
                tensor = _read_local(_stored_name(name, source, aliases), where, source, mesh)
                value = tensor.to(device=mesh.device, dtype=old.dtype).contiguous()
                _check_tied(aliases[name], source)
                made[id(old)] = nn.Parameter(value, requires_grad=False)
            setattr(module, leaf, made[id(old)])


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Name -> all names under which the same tensor may be stored (tied weights)."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {name: names for names in by_id.values() for name in names}


def check_checkpoint(
    model: nn.Module, source: Source, *, plan: ModelPlan | None = None, allow_unused: bool = False
) -> dict[str, list[str]]:
    """Every weight of `model` is in `source` and every one of `source` has a place; returns the names of tied weights.

    plan: of a model that is split already.

    Raises:
        UserError: weights are missing, of another shape or not used by the model. UnsupportedError: they are integers.
    """
    aliases = _aliases(model)
    missing = [n for n, names in aliases.items() if all(source.shape(a) is None for a in names)]
    if missing:
        there = source.unused(set())
        near = f"; {did_you_mean(missing[0], there)}" if len(there) <= 10_000 and there else ""
        raise UserError(source.describe(), f"it lacks {len(missing)} weights, first {missing[0]}{near}")
    ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []]
    ignored.append(re.compile(r"rotary_emb\.inv_freq|\.attn\.bias$|\.attn\.masked_bias$|position_ids$"))
    wanted = set(aliases) | {name for name, _ in model.named_buffers()}
    unused = [n for n in source.unused(wanted) if not any(p.search(n) for p in ignored)]
    if unused and not allow_unused:
        raise UserError(
            source.describe(),
            f"{len(unused)} of its weights have no place in {type(model).__name__}, first {unused[0]}",
            "is it a checkpoint of another model? If they may be left out: model.allow_unused_weights: true",
        )
    _check_shapes(model, source, aliases, plan)
    return aliases


def _check_shapes(model: nn.Module, source: Source, aliases: dict[str, list[str]], plan: ModelPlan | None) -> None:
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = _stored_name(f"{path}.{leaf}" if path else leaf, source, aliases)
            given = source.shape(name)
            needed = _placement(f"{path}.{leaf}" if path else leaf, module, parameter, plan).shape
            assert given is not None, name
            if given != needed:
                raise UserError(
                    f"{source.describe()}: {name}",
                    f"its shape is {list(given)}, config.json says {list(needed)}",
                    "are the weights and config.json of one model?",
                )
            if not source.is_float(name):
                raise UnsupportedError(
                    f"{source.describe()}: {name}",
                    "it holds integers, and quantised weights are not supported yet",
                    "use the checkpoint that was quantised",
                )


def _stored_name(name: str, source: Source, aliases: dict[str, list[str]]) -> str:
    return next(alias for alias in aliases[name] if source.shape(alias) is not None)


def _check_tied(names: list[str], source: Source) -> None:
    """Where a checkpoint stores a tied weight twice, both are the same; transformers would not tie them otherwise."""
    first, *others = [name for name in names if source.shape(name) is not None]
    for name in others:
        shape = source.shape(first)
        assert shape is not None
        same = shape == source.shape(name)
        for start in range(0, shape[0] if same else 0, _ROWS_AT_ONCE):
            rows = Part(0, start, min(start + _ROWS_AT_ONCE, shape[0]))
            same = same and torch.equal(source.read(first, rows), source.read(name, rows))
        if not same:
            raise UserError(
                f"{source.describe()}: {first} and {name}",
                "config.json ties them, but they differ",
                "set tie_word_embeddings: false in config.json",
            )


def _placement(name: str, module: nn.Module, parameter: Tensor, plan: ModelPlan | None) -> Placement:
    """Where the base parameter `name` lies in what is stored."""
    if isinstance(module, ParallelLinear):
        rule = module.rule
        if parameter.ndim == 1:
            return Placement((rule.out_features,), 0 if rule.split is Split.COLUMN else None, rule.layout)
        dim = {Split.COLUMN: 0, Split.ROW: 1, Split.WHOLE: None}[rule.split]
        shape = (rule.out_features, rule.in_features)
        return Placement(shape[::-1] if rule.is_transposed else shape, dim, rule.layout, rule.is_transposed)
    if plan is not None and (own := plan.parameters.get(name)) is not None:
        whole = list(parameter.shape)
        whole[own.dim] = own.layout.size
        return Placement(tuple(whole), own.dim, own.layout)
    return Placement(tuple(parameter.shape))


def _read_local(name: str, where: Placement, source: Source, mesh: Mesh) -> Tensor:
    """This rank's part of the stored tensor `name`, as we hold it: its runs one after another, then padding."""
    tp = mesh.tp
    if where.dim is None or where.layout is None:
        tensor = source.read(name, None)
        return tensor.T if where.is_transposed else tensor
    stored_dim = 1 - where.dim if where.is_transposed else where.dim
    runs = where.layout.runs(rank=tp.rank, size=tp.size)
    tensor = torch.cat([source.read(name, Part(stored_dim, run.start, run.stop)) for run in runs], stored_dim)
    if missing := where.layout.local_size(tp.size) - tensor.shape[stored_dim]:
        shape = list(tensor.shape)
        shape[stored_dim] = missing
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], stored_dim)
    return tensor.T if where.is_transposed else tensor


def _fill_buffers(model: Any, source: Source, mesh: Mesh) -> None:
    """Stored buffers are read; the others (rotary frequencies, scales) are computed by the model's own rule."""
    for path, module in model.named_modules():
        computed = False
        for leaf, old in list(module.named_buffers(recurse=False)):
            name = f"{path}.{leaf}" if path else leaf
            if leaf not in module._non_persistent_buffers_set and source.shape(name) is not None:
                module._buffers[leaf] = source.read(name, None).to(device=mesh.device, dtype=old.dtype)
            elif old.is_meta:
                # Not finite until the model's own rule has written it: a buffer that it forgets is found below.
                poison = float("nan") if old.is_floating_point() else 0
                module._buffers[leaf] = torch.full_like(old, poison, device=mesh.device)
                computed = True
        if computed:
            model._init_weights(module)
            for leaf, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and buffer.isnan().any():
                    raise UnsupportedError(
                        f"{path}.{leaf}", "it is not stored, and the model's own initialisation does not compute it"
                    )
