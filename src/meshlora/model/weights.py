"""Base weights: each rank reads only its own slices of a checkpoint.

Owns: reading slices of a Hugging Face checkpoint, checking that it fits the model, and filling a parallel model.
Does not own: finding its tensors (`model.stored`), how a weight is split (`plan`), adapters (`adapter`).

Peak host memory of a rank: its shard, packed where it is quantised, plus one tensor; under dp_shard plus one decoder
layer. A safetensors file is a memory map whose touched pages count as ours while it is open, so each tensor is read
through a new map.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshlora.comm.groups import Axis, Mesh
from meshlora.feature import first_answer
from meshlora.layers.adapted import AdaptedLeaf, Placement
from meshlora.layers.frozen import FewBits, FrozenMatrix
from meshlora.model.dp_shard import shard_unit
from meshlora.model.stored import Bounds, Part, Stored, StoredTensor, find_stored, stored_tensors
from meshlora.model.stream import FLOATS
from meshlora.plan.layout import Layout, contiguous
from meshlora.plan.rules import ModelPlan, Packing
from meshlora_ground.compat import torch_tensors, transformers_models
from meshlora_ground.errors import UnsupportedError, UserError, did_you_mean
from meshlora_ground.files import open_safetensors
from meshlora_ground.tasks import CAUSAL, task_of
from meshlora_ground.topology import EP, ETP

_ROWS_AT_ONCE = 4096  # a vocabulary may be gigabytes
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class Source:
    """A source of full tensors, read slice by slice.

    Attributes:
        stored: name in the model (not split) -> its stored tensors. description: for messages.
    """

    def __init__(self, stored: dict[str, Stored], description: str) -> None:
        self.stored, self.description = stored, description

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the whole tensor; None if it is absent."""
        return self.stored[name].shape if name in self.stored else None

    def mistake(self, name: str, needed: tuple[int, ...], num_experts: int = 0) -> tuple[str, str] | None:
        """(What is wrong, the rule) if the stored tensor does not have the shape `needed`, as in `Stored.mistake`."""
        return self.stored[name].mistake(name, needed, num_experts)

    def integers(self, name: str) -> str | None:
        """A stored tensor of `name` in few bits, or of integers, without its scales; None if there is none."""
        stored = self.stored[name]
        for tensor in stored.tensors:
            if tensor.value is None and tensor.dtype not in FLOATS:
                return tensor.key if stored.experts else name
        return None

    def packed(self) -> str | None:
        """The key of a weight that is stored in few bits; None if there is none."""
        every = itertools.chain.from_iterable(stored.tensors for stored in self.stored.values())
        return next((tensor.key for tensor in every if tensor.packed is not None), None)

    def read(self, name: str, *parts: Part) -> Tensor:
        """The slices `parts` of the tensor, concatenated along each dim. It may be a view: copy it."""
        stored = self.stored[name]
        blocks = list(stored.blocks(parts))
        if len(blocks) == 1 and not stored.experts:
            return read_slice(blocks[0].tensor, blocks[0].parts)
        whole: Tensor | None = None
        for tensor, own, place in blocks:
            value = read_slice(tensor, own)
            if whole is None:
                whole = value.new_empty(stored.shape_of(parts))
            if whole.dtype != value.dtype:  # some experts of a checkpoint in few bits are in plain numbers
                whole = whole.to(torch.promote_types(whole.dtype, value.dtype))
            whole[place] = value
        assert whole is not None, name
        return whole

    def unused(self, wanted: set[str]) -> list[str]:
        """Names in the source that are not in `wanted`."""
        return sorted(self.stored.keys() - wanted)


class StateDictSource(Source):
    """Tensors already in memory: a model with random weights."""

    def __init__(self, tensors: dict[str, Tensor], description: str = "the random weights") -> None:
        stored = {name: Stored(((StoredTensor.in_memory(name, tensor),),)) for name, tensor in tensors.items()}
        super().__init__(stored, description)


class CheckpointSource(Source):
    """A folder with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Keys are renamed as transformers would for this model (not split, meta device); tensors that it concatenates are
    concatenated, experts that are stored one by one are stacked.
    """

    def __init__(self, folder: Path, model: nn.Module, quantization: Mapping[str, Any] | None = None) -> None:
        super().__init__(find_stored(folder, model, quantization), f"checkpoint {folder}")
        self.folder, self.model = folder, model


def bounds_in(stored: StoredTensor, parts: tuple[Part, ...]) -> Bounds:
    of_dim = {part.dim: (part.start, part.stop) for part in parts}
    return [of_dim.get(dim, (0, size)) for dim, size in enumerate(stored.shape)]


def in_file(stored: StoredTensor, parts: tuple[Part, ...]) -> tuple[StoredTensor, tuple[Part, ...]]:
    """A tensor with swapped dims, and slices of it, as they are in the file."""
    assert stored.swapped is not None, stored
    one, other = stored.swapped
    dims = {one: other, other: one}
    return stored.with_swapped(one, other), tuple(
        Part(dims.get(part.dim, part.dim), part.start, part.stop) for part in parts
    )


def read_slice(stored: StoredTensor, parts: tuple[Part, ...] = ()) -> Tensor:
    """A slice of one stored tensor; in plain numbers, float32, if it is in few bits. It may be a view: copy it."""
    if stored.swapped:
        as_stored, parts = in_file(stored, parts)
        return read_slice(as_stored, parts).transpose(*stored.swapped)
    if stored.packed is not None:
        form, tensors = stored.packed
        return form.read(bounds_in(stored, parts), lambda part, of_part: read_bounds(tensors[part], of_part))
    if stored.rows is not None:
        rows, others = stored.rows, []
        for part in parts:
            if part.dim == stored.rows_dim:
                rows = rows[part.start : part.stop]
            else:
                others.append(part)
        return read_slice(dataclasses.replace(stored, rows=None), tuple(others)).index_select(stored.rows_dim, rows)
    index: list[slice] = [slice(None)] * len(stored.shape)
    for part in parts:
        index[part.dim] = slice(part.start, part.stop)
    if stored.value is not None:
        return stored.value[tuple(index)]
    with open_safetensors(stored.file) as file:
        if not index:  # safetensors slices no tensor without dims
            return file.get_tensor(stored.key).clone()
        tensor: Tensor = file.get_slice(stored.key)[tuple(index)]
        # A copy, or the memory map would live as long as the tensor.
        return tensor.clone()


def read_bounds(stored: StoredTensor, bounds: Bounds) -> Tensor:
    """A slice of a tensor of as many dims, or all of one that has fewer: a scale of the whole matrix."""
    parts = [Part(dim, *bound) for dim, bound in enumerate(bounds)]
    return read_slice(stored, tuple(parts[: len(stored.shape)]))


def fill(
    model: Any,
    plan: ModelPlan,
    source: Source,
    mesh: Mesh,
    *,
    whole: Any = None,
    allow_unused: bool = False,
    fresh: Collection[str] = (),
    seed: int = 0,
) -> None:
    """Give every parameter and buffer of `model` (meta device) its local part of `source`, on the mesh's device.

    whole: the model before its split, if `model` is a stage of it. fresh: names that need not be in `source`: of a new
        head, drawn from `seed`.

    Raises:
        UserError: as `check_checkpoint`; a value that is not finite, on the ranks that read it.
    """
    if whole is None:
        aliases = check_checkpoint(model, source, plan=plan, allow_unused=allow_unused, fresh=fresh)
    else:  # a stage alone would not use what is of the others
        aliases = check_checkpoint(whole, source, allow_unused=allow_unused, fresh=fresh)
    # Buffers first: a module's own initialization also draws its parameters, which on the meta device does nothing.
    _fill_buffers(model, plan, source, mesh)
    made: dict[int, nn.Parameter] = {}
    unit: str | None = None
    for path, module in [*model.named_modules(), ("", None)]:
        if unit is not None and not path.startswith(f"{unit}."):
            made.clear()  # a unit shares no parameter with others, and its whole weights must be freed
            shard_unit(model, unit, plan, mesh)
            unit = None
        if module is None:
            break
        if path in plan.units:
            unit = path
        for leaf, old in list(module.named_parameters(recurse=False)):
            if id(old) not in made:  # a tied weight is made once
                name = _base_name(path, module, leaf)
                if name in fresh and source.shape(name) is None:
                    drawn = _drawn(model, path, leaf, seed).to(mesh.device, old.dtype)
                    setattr(module, leaf, nn.Parameter(drawn, requires_grad=False))
                    continue
                where = _placement(name, module, old, plan)  # of the whole weight, in the file
                stored = _stored_name(aliases[name], source)
                assert stored is not None, name
                check_tied(aliases[name], source)
                if path in plan.quantized and leaf == "weight":
                    assert isinstance(module, FrozenMatrix)
                    packing, kind = plan.quantized[path], plan.quantization
                    module.hold(read_packed(stored, where, source, mesh, packing, dtype=old.dtype, quantization=kind))
                    continue
                tensor = _read_local(stored, where, source, mesh)
                value = tensor.to(device=mesh.device, dtype=old.dtype).contiguous()
                check_finite(value, stored, source)
                made[id(old)] = nn.Parameter(value, requires_grad=False)
            setattr(module, leaf, made[id(old)])  # tied modules get the same parameter


@torch.no_grad()
def _drawn(model: Any, path: str, leaf: str, seed: int) -> Tensor:
    """A parameter as the model's own class initialises it, a function of (seed, name): the same on every rank."""
    module = copy.deepcopy(model.get_submodule(path)).to_empty(device="cpu")  # on CPUs: a GPU draws other numbers
    digest = hashlib.sha256(f"{seed}:{path}.{leaf}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # 63 bits: torch takes signed seeds
        transformers_models.initialize(model, module)
    return getattr(module, leaf).detach()


def check_finite(value: Tensor, name: str, source: Source) -> None:
    if not value.numel():
        return
    # A fifth of the time of the copy into memory; isfinite takes five times that copy.
    least, most = value.aminmax()
    if not (least.isfinite() and most.isfinite()):
        given = f"{source.description}: {name}"
        rule = f"it holds values that are not finite as {str(value.dtype).removeprefix('torch.')}"
        raise UserError(given, rule, "copy or download it again, or use a dtype of a wider range")


def _base_name(path: str, module: nn.Module, leaf: str) -> str:
    """The name of a parameter in the model before the split."""
    if isinstance(module, AdaptedLeaf):
        return module.stored_name(path, leaf)
    return f"{path}.{leaf}" if path else leaf


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Name -> all names under which the same tensor may be stored (tied weights)."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        by_id.setdefault(id(parameter), []).append(_base_name(path, model.get_submodule(path), leaf))
    aliases: dict[str, list[str]] = {}
    for names in by_id.values():
        aliases |= dict.fromkeys(names, names)
    return aliases


def kept_wide(model: Any, dtype: torch.dtype) -> set[str]:
    """Names of tensors that transformers keeps in float32 in a half-precision model (`dtype_plan`): router biases."""
    globs = transformers_models.kept_in_float32(model, dtype)
    if not globs:
        return set()
    pattern = re.compile("|".join(glob.replace("*", ".*") for glob in sorted(globs)))
    return {name for name in model.state_dict() if pattern.search(name)}


def check_checkpoint(
    model: Any,
    source: Source,
    *,
    plan: ModelPlan | None = None,
    allow_unused: bool = False,
    fresh: Collection[str] = (),
) -> dict[str, list[str]]:
    """Check that `source` has every weight of `model`, and no other; returns the names of tied weights.

    plan: for a model that is split already. fresh: names that may be missing. Heads of another task are not used.

    Raises:
        UserError: weights are missing, of another shape or not used by the model. UnsupportedError: they are integers.
    """
    aliases = _aliases(model)
    missing = [name for name, names in aliases.items() if name not in fresh and _stored_name(names, source) is None]
    if missing:
        rule, way_out = f"it lacks {len(missing)} weights, first {missing[0]}", ""
        there = source.unused(set())
        if 0 < len(there) <= 10_000:  # of more names the search for a near one would take minutes
            rule += f"; {did_you_mean(missing[0], there)}"
        if task_of(model.config) != CAUSAL:
            way_out = "a part that is new is trained in full: name it in lora.modules_to_save"
        raise UserError(source.description, rule, way_out)
    if not allow_unused and (unused := _without_a_place(model, source).get("")):
        rule = f"{len(unused)} of its weights have no place in {type(model).__name__}, first {unused[0]}"
        way_out = "is it a checkpoint of another model? If they may be left out: model.allow_unused_weights: true"
        raise UserError(source.description, rule, way_out)
    _check_shapes(model, source, aliases, plan)
    return aliases


def extra_weights(model: nn.Module, source: Source) -> str:
    """The weights of a checkpoint that are known to have no place in its model, in words; empty if there are none."""
    number, groups = 0, []
    for kind, names in _without_a_place(model, source).items():
        if kind:
            number += len(names)
            groups.append(f"{len(names)} {kind}, first {names[0]}")
    if not groups:
        return ""
    return f"{number} weights of {source.description} are passed over: {'; '.join(groups)}"


_EXTRA = {
    "of multi-token prediction": r"(^|\.)mtp(_\w+)?\.",
    "of other modalities": r"^(model\.)?(visual|vision_\w+|audio_\w+|multi_modal_projector|embed_(vision|audio))\.",
    "that are computed": r"rotary_emb\.inv_freq|\.attn\.bias$|\.attn\.masked_bias$|position_ids$",
}


def _without_a_place(model: Any, source: Source) -> dict[str, list[str]]:
    """Kind -> names in `source` that `model` has not; those of the kind "" should not be there."""
    wanted = set(_aliases(model)) | {name for name, _ in model.named_buffers()}
    patterns = {kind: re.compile(pattern) for kind, pattern in _EXTRA.items()}
    if own := transformers_models.unexpected_keys(model):
        patterns["that transformers leaves out"] = re.compile("|".join(own))
    if task_of(model.config) != CAUSAL:
        own = "|".join(re.escape(name) for name, _ in model.named_children())
        patterns["of the head of another task"] = re.compile(rf"^(?!({own})\.)")
    config = model.config.get_text_config()
    # DeepSeek and GLM store the layers that predict further tokens as if they followed the last one.
    first, number = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    found: dict[str, list[str]] = {}
    for name in source.unused(wanted):
        layer = re.match(r"(model|model\.language_model|language_model\.model)\.layers\.(\d{1,6})\.", name)
        if layer and first <= int(layer[2]) < first + number:
            kind = "of multi-token prediction"
        else:
            kind = next((kind for kind, pattern in patterns.items() if pattern.search(name)), "")
        found.setdefault(kind, []).append(name)
    return found


def _check_shapes(model: nn.Module, source: Source, aliases: dict[str, list[str]], plan: ModelPlan | None) -> None:
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            own = _base_name(path, module, leaf)
            name = _stored_name(aliases[own], source)
            if name is None:  # it is to be drawn
                continue
            where = _placement(own, module, parameter, plan)
            if mistake := source.mistake(name, where.shape, where.num_experts):
                key, rule = mistake
                raise UserError(f"{source.description}: {key}", rule, "are the weights and config.json of one model?")
            if integers := source.integers(name):
                rule = (
                    "it holds integers or float8 numbers, and config.json has no quantization_config that explains it"
                )
                given = f"{source.description}: {integers}"
                raise UnsupportedError(given, rule, "use the checkpoint that was quantised")


def _stored_name(names: Sequence[str], source: Source) -> str | None:
    """The first of the names of a weight under which it is stored; None: under none."""
    return next((name for name in names if source.shape(name) is not None), None)


def check_tied(names: Sequence[str], source: Source) -> None:
    """Check that a tied weight that is stored twice has the same values; transformers would not tie them otherwise."""
    first, *others = [name for name in names if source.shape(name) is not None]
    for name in others:
        if not _are_equal(first, name, source):
            given = f"{source.description}: {first} and {name}"
            rule = "config.json ties them, but they differ"
            raise UserError(given, rule, "set tie_word_embeddings: false in config.json")


def _are_equal(one: str, other: str, source: Source) -> bool:
    shape = source.shape(one)
    if shape is None or shape != source.shape(other):
        return False
    for start in range(0, shape[0], _ROWS_AT_ONCE):
        rows = Part(0, start, min(start + _ROWS_AT_ONCE, shape[0]))
        if not torch.equal(source.read(one, rows), source.read(other, rows)):
            return False
    return True


def has_own_head(folder: Path) -> bool:
    """Whether a checkpoint holds an output head with other values than its embedding: transformers ties no such two."""
    try:
        stored = {t.key: Stored(((t,),)) for t in stored_tensors(folder) if t.key.endswith((_HEAD, _EMBEDDING))}
        heads, source = [key for key in stored if key.endswith(_HEAD)], Source(stored, f"checkpoint {folder}")
        others = [key for key in stored if key not in heads]
        return len(heads) == len(others) == 1 and not _are_equal(heads[0], others[0], source)
    except UserError:  # it is reported where weights are read
        return False


def _placement(name: str, module: nn.Module, parameter: Tensor, plan: ModelPlan | None) -> Placement:
    """The placement of the base parameter `name` in the stored tensor."""
    if isinstance(module, AdaptedLeaf):
        return module.placement(parameter)
    if plan is not None and (own := plan.parameters.get(name)) is not None:
        whole = list(parameter.shape)
        whole[own.dim] = own.layout.size
        return Placement(tuple(whole), own.dim, own.layout)
    return Placement(tuple(parameter.shape))


def _read_local(name: str, where: Placement, source: Source, mesh: Mesh) -> Tensor:
    """This rank's part of the stored tensor `name`, as we hold it: its runs concatenated, then padding."""
    axis, experts, parts = local_parts(where, mesh)
    tensor = source.read(name, *experts, *parts)
    if parts and where.layout is not None:
        dim = parts[0].dim
        # Ranks hold equally many rows, of a vocabulary that does not divide the last ones zeros.
        if missing := where.layout.local_size(axis.size) - tensor.shape[dim]:
            shape = list(tensor.shape)
            shape[dim] = missing
            tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return tensor.T if where.is_transposed else tensor


def local_parts(where: Placement, mesh: Mesh) -> tuple[Axis, list[Part], list[Part]]:
    """(The ranks that split the dim of `where`, this rank's experts, its slices of that dim), as stored; empty: all."""
    axis, experts, parts = mesh.tp, list[Part](), list[Part]()
    if where.num_experts:  # whole experts over ep, and of each its part over etp, not tp
        axis, ep = mesh.over({ETP}), mesh.over({EP})
        experts = parts_of_rank(0, Layout.plain(where.num_experts), rank=ep.rank, size=ep.size)
    if where.dim is not None and where.layout is not None:
        dim = where.dim
        if where.is_transposed:
            dim = 1 - dim
        parts = parts_of_rank(dim, where.layout, rank=axis.rank, size=axis.size)
    return axis, experts, parts


def parts_of_rank(dim: int, layout: Layout, *, rank: int, size: int) -> list[Part]:
    """The slices of a rank along `dim`; adjacent runs, as of interleaved gate and up, are one part."""
    runs = layout.runs(rank=rank, size=size)
    return [Part(dim, *bound) for bound in contiguous((run.start, run.stop) for run in runs)]


def read_packed(
    name: str,
    where: Placement,
    source: Source,
    mesh: Mesh,
    packing: Packing,
    *,
    dtype: torch.dtype,
    quantization: str | None,
) -> FewBits:
    """This rank's part of the stored tensor `name`, packed, by the wing that packs.

    Raises:
        UserError: a value that is not finite.
    """
    given = name, where, source, mesh, packing
    packed = first_answer(lambda wing: wing.read_packed(*given, dtype=dtype, quantization=quantization))
    assert packed is not None, packing
    return packed


def _fill_buffers(model: Any, plan: ModelPlan, source: Source, mesh: Mesh) -> None:
    """Read stored buffers; the others (rotary frequencies, scales) are computed by the model's own initialization,
    in a composite that of the part that a module is in.

    That computes the whole of a split buffer; this rank's part is cut out of it at the end.
    """
    buffers = dict(model.named_buffers())
    split = {name: rule for name, rule in plan.parameters.items() if name in buffers}
    for name, rule in split.items():
        owner, _, leaf = name.rpartition(".")
        local = getattr(model.get_submodule(owner), leaf)
        shape = (*local.shape[: rule.dim], rule.layout.size, *local.shape[rule.dim + 1 :])
        setattr(model.get_submodule(owner), leaf, local.new_empty(shape))
    parts, stored = {"": model}, list[tuple[nn.Module, str, Tensor]]()
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            parts[f"{path}."] = module
        computed = False
        for leaf, old in list(module.named_buffers(recurse=False)):
            name = f"{path}.{leaf}" if path else leaf
            if torch_tensors.is_persistent(module, leaf) and source.shape(name) is not None:
                value = source.read(name).to(device=mesh.device, dtype=old.dtype)
                stored.append((module, leaf, value))
                setattr(module, leaf, value.clone())
            elif old.is_meta:
                # NaN until the model's own initialization writes it: a buffer that it forgets is found below.
                poison = float("nan") if old.is_floating_point() else 0
                setattr(module, leaf, torch.full_like(old, poison, device=mesh.device))
                computed = True
        if computed:
            # Modules come after those around them, so the last match is the innermost.
            *_, part = (part for prefix, part in parts.items() if f"{path}.".startswith(prefix))
            transformers_models.initialize(part, module)
            above = path
            while (missing := _uncomputed(module)) and above:  # a model may compute those of all its layers
                above = above.rpartition(".")[0]
                transformers_models.initialize(part, model.get_submodule(above))
            if missing:
                raise UnsupportedError(
                    f"{path}.{missing}", "it is not stored, and the model's own initialisation does not compute it"
                )
    for module, leaf, value in stored:
        setattr(module, leaf, value)  # at the end: an initialisation writes these too, its own module's and others'
    for name, rule in split.items():
        owner, _, leaf = name.rpartition(".")
        whole = getattr(model.get_submodule(owner), leaf)
        local = rule.layout.cut(whole, rule.dim, rank=mesh.tp.rank, size=mesh.tp.size)
        setattr(model.get_submodule(owner), leaf, local)


def _uncomputed(module: nn.Module) -> str:
    """The first buffer of `module` with a NaN; "" if there is none."""
    for leaf, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and buffer.isnan().any():
            return leaf
    return ""
