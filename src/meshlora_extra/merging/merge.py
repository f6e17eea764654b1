"""Merging: a checkpoint and an adapter in, one plain checkpoint with the same logits out.

Owns: the tensors to write, untying weights that the adapter makes differ, the output folder. One process, one tensor in
memory at a time; the model is built on the meta device only. Does not own: the changes of an adapter and their
arithmetic (`meshlora_extra.merging.changes`), file bytes (`model.stream`), comparing logits
(`meshlora_extra.merging.check`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from meshlora.adapter.formats.peft_format import CONFIG_FILE, WEIGHTS_FILE
from meshlora.loading.blueprint import build_on_meta
from meshlora.model.stored import StoredTensor
from meshlora.model.stream import FLOATS, Entry, check_stream, dtype_name, write_stream
from meshlora.model.weights import CheckpointSource, check_checkpoint, check_tied, has_own_head, kept_wide, read_slice
from meshlora.wings.quantized.rounding import Rounding, rounding_of
from meshlora_extra.merging.changes import Change, Changes, Lora, merged_expert, merged_weight, read_changes
from meshlora_extra.merging.check import Base, compare_logits
from meshlora_extra.merging.head import set_head
from meshlora_ground.errors import MeshloraError, UnsupportedError, UserError, reason
from meshlora_ground.files import new_folder, open_safetensors, read_json, write_json_atomically
from meshlora_ground.float64 import wide_dtype
from meshlora_ground.tasks import CAUSAL, HEADS, task_of
from meshlora_ground.weight_files import INDEX

_LARGEST_TO_RUN = 2 * 2**30
# Weights in any format.
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".ckpt"}
_HEAD_FIELDS = ("architectures", "id2label", "label2id", "problem_type", "pad_token_id")


@dataclass(frozen=True)
class Merged:
    """The result of a merge; `check` says how it was verified."""

    num_tensors: int
    num_changed: int
    num_bytes: int
    is_untied: bool
    check: str


@dataclass(frozen=True)
class _Output:
    """One tensor to write, `entry` of `file`: the parameter `name`, or its part at index `place`.

    tensor: where it is stored; of a new one, the tensor that it was tied to. part: codes or scales, if in few bits.
    """

    file: str
    entry: Entry
    name: str
    place: tuple[slice | int, ...] | None
    tensor: StoredTensor
    part: str = ""


@dataclass(frozen=True)
class _Planned:
    """A merge, before any weight of the model is read.

    Attributes:
        aliases: name -> all names of the same tensor. untied: names that no longer share one. head: fields of the
            configuration that say of a head that is not a vocabulary. dtype: of what is written; None: as it is stored.
            rounding: to few bits.
    """

    source: CheckpointSource
    changes: Changes
    aliases: Mapping[str, list[str]]
    untied: list[str]
    outputs: list[_Output]
    head: Mapping[str, Any]
    dtype: torch.dtype | None
    rounding: Rounding | None

    def read_base(self, name: str) -> Tensor:
        """A weight of the model, under whichever of its names it is stored."""
        return self.source.read(_stored_of(self.aliases.get(name, [name]), self.source))


def _stored_of(names: Iterable[str], source: CheckpointSource) -> str:
    """The first of `names` that the checkpoint stores."""
    return next(name for name in names if source.shape(name) is not None)


def check_merge(
    model_folder: str | Path, adapter_folder: str | Path, *, config: PretrainedConfig, trust_remote_code: bool = False
) -> None:
    """All checks that `merge` makes before it writes; they do not depend on the values of the adapter."""
    _planned(Path(model_folder), Path(adapter_folder), config, None, None, trust_remote_code=trust_remote_code)


def merge(
    model_folder: str | Path,
    adapter_folder: str | Path,
    out_folder: str | Path,
    *,
    config: PretrainedConfig,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    check_logits: bool = True,
    trust_remote_code: bool = False,
) -> Merged:
    """Write `out_folder`: the checkpoint of `model_folder` with the adapter in its weights, in the same shards.

    Products are computed in float32 (float64 for float64) and rounded once, to the stored type or to `dtype`. The
    folder appears complete, read back and compared, or not at all. A base in few bits is written in plain numbers.

    Args:
        config: the model's, from `loading.blueprint.read_model_config`.
        quantize: fp8 or mxfp4: round linears and experts to it at the end; what that loses is in `check`.
        check_logits: also run both in transformers + peft, if the model is small enough.

    Raises:
        UserError: the output exists, an input is missing, or the adapter does not fit. UnsupportedError: it cannot be
            merged. MeshloraError: the files read back differ, or the disk failed.
    """
    source_folder, out = Path(model_folder), Path(out_folder)
    if out.exists():
        raise UserError(f"--out {out}", "it is there already", "choose a new folder; nothing is overwritten")
    planned = _planned(  # every refusal comes before the first byte
        source_folder, Path(adapter_folder), config, dtype, quantize, trust_remote_code=trust_remote_code
    )
    outputs, is_untied = planned.outputs, bool(planned.untied) or has_own_head(source_folder)
    num_bytes = sum(o.entry.num_bytes for o in outputs)
    try:
        with new_folder(out) as folder:  # under another name until its end
            _copy_files(source_folder, folder)
            _write_config(source_folder, folder, planned, untie=is_untied)
            meant = _write_weights(folder, planned)
            check = "every tensor read back"
            _read_back(folder, outputs, meant, trust_remote_code=trust_remote_code)
            if check_logits and num_bytes < _LARGEST_TO_RUN:
                check += "; logits of transformers + peft: relative difference "
                check += f"{_compared(planned, Path(adapter_folder), folder, trust_remote_code=trust_remote_code):.1e}"
            elif check_logits:
                check += "; logits not compared, as the model is above 2 GiB"
            if planned.rounding is not None:
                check += f"; {planned.rounding.words}"
            elif planned.source.packed() is not None and planned.dtype is not None:
                words, rounding = str(planned.dtype).removeprefix("torch."), torch.finfo(planned.dtype).eps / 2
                check += f"; no longer in few bits, in {words}: within {rounding:.0e} of each"
    except (OSError, SafetensorError) as error:
        raise MeshloraError(f"{out}: the merged model could not be written ({reason(error)})") from error
    return Merged(
        num_tensors=len(outputs),
        num_changed=sum(o.name in planned.changes.by_name for o in outputs),
        num_bytes=num_bytes,
        is_untied=bool(planned.untied),
        check=check,
    )


def _compared(planned: _Planned, adapter: Path, folder: Path, *, trust_remote_code: bool) -> float:
    """The relative difference of logits; where weights are rounded to few bits, it is said and not judged."""
    source = planned.source
    base = Base(source.folder, trust_remote_code, source if source.packed() else None, adapter)
    with _as_peft_names_it(adapter, planned.changes) as readable:
        if planned.rounding is None:
            types = {FLOATS[o.entry.dtype] for o in planned.outputs if o.entry.dtype in FLOATS}
            narrowest = max(types, key=lambda t: torch.finfo(t).eps)  # bounds the difference of logits
            return compare_logits(base, readable, Base(folder, trust_remote_code), narrowest)
        merged = CheckpointSource(folder, source.model, planned.rounding.config)
        return compare_logits(base, readable, Base(folder, trust_remote_code, merged), None)


@contextlib.contextmanager
def _as_peft_names_it(adapter: Path, changes: Changes) -> Iterator[Path]:
    """`adapter`, or a copy of it whose tensors have the names that PEFT loads, where a wrapper gave them others."""
    if all(changes.in_file[key] == key for key in changes.names.values()):
        yield adapter
        return
    with tempfile.TemporaryDirectory() as made:
        shutil.copyfile(adapter / CONFIG_FILE, Path(made) / CONFIG_FILE)
        # Small: factors only.
        tensors = {changes.in_file[key]: changes.read(name) for name, key in changes.names.items()}
        save_file(tensors, Path(made) / WEIGHTS_FILE)
        yield Path(made)


def _planned(
    model_folder: Path,
    adapter_folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype | None,
    quantize: str | None,
    *,
    trust_remote_code: bool,
) -> _Planned:
    config = copy.deepcopy(config)  # set_head changes it
    set_head(config, adapter_folder)
    model = build_on_meta(config, trust_remote_code=trust_remote_code)
    stored_config = getattr(config, "quantization_config", None) or {}
    source = CheckpointSource(model_folder, model, stored_config)
    if source.packed() and dtype is None:  # no longer in few bits: of the type of the others
        dtype = getattr(config, "dtype", None)
        if not isinstance(dtype, torch.dtype):
            dtype = torch.bfloat16
    # Before the adapter is read: that puts its modules into the model.
    rounding = rounding_of(quantize, model, source.stored, stored_config) if quantize else None
    names, heads, head, has_head = set(model.state_dict()), set[str](), {}, task_of(config) != CAUSAL
    if has_head:
        heads = {name for name in names if name.partition(".")[0] in HEADS}
        head = {name: config.to_dict().get(name) for name in _HEAD_FIELDS}
    aliases = check_checkpoint(model, source, allow_unused=True, fresh=heads)  # tied names included
    for tied in set(map(tuple, aliases.values())):
        if heads.isdisjoint(tied):
            check_tied(tied, source)
    wide: set[str] = set()
    if dtype is not None:
        wide = kept_wide(model, dtype)
    # First aliases: equal changes are compared under all names.
    changes = _with_equal_changes(_with_aliases(read_changes(model, adapter_folder), aliases), aliases)
    untied = _untied_names(changes, aliases)  # each is stored on its own then
    outputs = _outputs(source, changes, untied, aliases, dtype, wide)
    if has_head:
        outputs = [one for one in outputs if one.name in names]  # without the head of the task before
        outputs += _new_head(source, changes, heads, dtype)  # a causal checkpoint has no score
    added = [name for name in untied if source.shape(name) is None]
    _check_new_keys(config, added, names, trust_remote_code=trust_remote_code)
    if rounding is not None:
        whole, outputs = outputs, []
        for one in whole:
            for part, entry in rounding.entries(one.entry).items():
                outputs.append(dataclasses.replace(one, entry=entry, part=part))
    return _Planned(source, changes, aliases, untied, outputs, head, dtype, rounding)


def _new_head(
    source: CheckpointSource, changes: Changes, heads: Collection[str], dtype: torch.dtype | None
) -> list[_Output]:
    """The tensors of a head that the checkpoint lacks, to be written into its last file."""
    file, found = max(source.stored.values(), key=lambda s: s.tensors[0].file.name).tensors[0].file.name, []
    for name in sorted(heads):
        if source.shape(name) is not None:
            continue
        change = changes.by_name.get(name, Change())
        if change.whole is None:
            raise UserError(f"{source.description}: {name}", "neither it nor the adapter has this weight of the head")
        value = changes.read(change.whole)
        entry = Entry(name, tuple(value.shape), dtype_name(dtype or value.dtype))
        found.append(_Output(file, entry, name, None, StoredTensor.in_memory(name, value)))
    return found


def _with_aliases(changes: Changes, aliases: Mapping[str, list[str]]) -> Changes:
    """Replace a base parameter under all names that share it; LoRA applies to one name only."""
    by_name = dict(changes.by_name)
    for name, change in changes.by_name.items():
        whole = change.whole
        if change.is_own:
            whole = change.beside
        by_name[name] = dataclasses.replace(by_name[name], beside=None)
        if whole is None:
            continue
        for alias in aliases.get(name, [name]):
            there = by_name.get(alias, Change())
            if not there.is_own:
                by_name[alias] = dataclasses.replace(there, whole=whole)
    return dataclasses.replace(changes, by_name=by_name)


def _with_equal_changes(changes: Changes, aliases: Mapping[str, list[str]]) -> Changes:
    """Give names that share a weight and have equal changes (PEFT's `ensure_weight_tying`) the same `Change`."""
    by_name = dict(changes.by_name)
    for first, *others in _tied(aliases):
        if first in by_name and all(_is_equal_change(changes, first, name) for name in others):
            by_name |= dict.fromkeys(others, by_name[first])  # the same object: `_untied_names` compares with a set
    return dataclasses.replace(changes, by_name=by_name)


def _is_equal_change(changes: Changes, first: str, second: str) -> bool:
    one, two = changes.by_name[first], changes.by_name.get(second, Change())
    if one.rows != two.rows:
        return False
    if (one.whole is None) != (two.whole is None) or (one.lora is None) != (two.lora is None):
        return False
    if one.whole and two.whole and not torch.equal(changes.read(one.whole), changes.read(two.whole)):
        return False
    if one.lora is None or two.lora is None:
        return True
    if one.lora.scaling != two.lora.scaling or one.lora.magnitude or two.lora.magnitude:
        return False
    left, right = _as_stored(changes, one.lora)
    other_left, other_right = _as_stored(changes, two.lora)
    return torch.equal(left, other_left) and torch.equal(right, other_right)


def _as_stored(changes: Changes, lora: Lora) -> tuple[Tensor, Tensor]:
    """The left and the right factor of what is added to the weight as it is stored."""
    a, b = changes.read(lora.a), changes.read(lora.b)
    if lora.is_transposed:
        return a.T, b.T
    return b, a


def _tied(aliases: Mapping[str, list[str]]) -> set[tuple[str, ...]]:
    """The names of each weight that has several."""
    return {tuple(names) for names in aliases.values() if len(names) > 1}


def _untied_names(changes: Changes, aliases: Mapping[str, list[str]]) -> list[str]:
    """Names that share one weight in the model but not in the merged model."""
    found: list[str] = []
    for names in _tied(aliases):
        if len({changes.by_name.get(name) for name in names}) > 1:
            found += names
    return sorted(found)


def _outputs(
    source: CheckpointSource,
    changes: Changes,
    untied: list[str],
    aliases: Mapping[str, list[str]],
    dtype: torch.dtype | None,
    wide: set[str],
) -> list[_Output]:
    """All tensors to write: those of the checkpoint under their keys, and new ones for untied weights."""

    def type_of(name: str, stored: str) -> str:
        if dtype is None or stored not in FLOATS or name in wide:
            return stored
        return dtype_name(dtype)

    outputs = []
    for name, stored in source.stored.items():
        if name in changes.by_name and (integers := source.integers(name)):
            raise UnsupportedError(f"{source.description}: {integers}", "it holds integers, and the adapter changes it")
        first = stored.tensors[0]
        if stored.experts and first.swapped:  # linears of each, in few bits alone: as the model holds them
            entry = Entry(name, stored.shape, type_of(name, first.dtype))
            outputs.append(_Output(first.file.name, entry, name, None, first))
            continue
        blocks = list(stored.blocks(()))  # several: parts of one parameter in several tensors
        for tensor, _, place in blocks:
            entry = Entry(tensor.key, tensor.shape, type_of(name, tensor.dtype))
            if tensor.rows is not None:
                entry = dataclasses.replace(entry, key=name)  # it is cut on loading: as what it becomes
            output = _Output(tensor.file.name, entry, name, place, tensor)
            if len(blocks) == 1 and not stored.experts:
                output = dataclasses.replace(output, place=None)
            outputs.append(output)
    for name in untied:
        if source.shape(name) is None:
            tensor = source.stored[_stored_of(aliases[name], source)].tensors[0]
            entry = Entry(name, tensor.shape, type_of(name, tensor.dtype))
            outputs.append(_Output(tensor.file.name, entry, name, None, tensor))
    return outputs


def _check_new_keys(config: PretrainedConfig, added: list[str], names: set[str], *, trust_remote_code: bool) -> None:
    """Refuse new keys that transformers would rename on load."""
    if not added:
        return
    from transformers.conversion_mapping import get_model_conversion_mapping

    model = build_on_meta(config, trust_remote_code=trust_remote_code)
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    for name in added:
        prefix = model.base_model_prefix
        found, pattern = rename_source_key(name, renamings, converters, prefix, dict.fromkeys(names, 1))
        if found != name or pattern is not None:
            raise UnsupportedError(name, f"it must be stored on its own now, and transformers would load it as {found}")


def _copy_files(source: Path, folder: Path) -> None:
    """Copy configuration, tokenizer, templates, licences, code: everything but weights and model card."""
    for path in sorted(source.iterdir()):
        if path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, folder / path.name)
        skip = path.suffix in _NOT_COPIED or path.name.endswith(".index.json") or path.name.lower() == "readme.md"
        if path.is_file() and not skip and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)


def _write_config(source: Path, folder: Path, planned: _Planned, *, untie: bool) -> None:
    head = {name: value for name, value in planned.head.items() if value is not None}
    stored = read_json(source / "config.json") | head
    for part in (stored, stored.get("text_config")):
        if not isinstance(part, dict):
            continue
        part.pop("quantization_config", None)  # plain numbers are written, or others in few bits
        if untie:
            part["tie_word_embeddings"] = False
        if planned.dtype is not None:
            words = str(planned.dtype).removeprefix("torch.")
            if part is stored and "torch_dtype" not in part:  # the name before transformers 4.56
                part["dtype"] = words
            for key in {"dtype", "torch_dtype"} & part.keys():
                part[key] = words
    if planned.rounding is not None:
        stored["quantization_config"] = planned.rounding.config
    write_json_atomically(folder / "config.json", stored)


def _write_weights(folder: Path, planned: _Planned) -> dict[str, dict[str, str]]:
    """Write all files; returns file -> key -> SHA-256 of the intended tensor."""
    outputs, source = planned.outputs, planned.source
    # A and B of both projections of a layer's experts: stored one by one, their matrices alternate.
    read_factor = functools.lru_cache(maxsize=4)(planned.changes.read)
    meant = {}
    for name, own in sorted(_by_file(outputs).items()):
        by_key = {o.entry.key: o for o in own}

        def read(entry: Entry, by_key: Mapping[str, _Output] = by_key) -> Tensor:
            return _value(by_key[entry.key], planned, read_factor)

        with open_safetensors(source.folder / name) as file:
            metadata = file.metadata() or {"format": "pt"}
        # Hashes of what was meant, to compare with what was written.
        meant[name] = write_stream(folder / name, [o.entry for o in own], read, metadata)
    if (source.folder / INDEX).is_file():
        write_json_atomically(folder / INDEX, _index(outputs))
    return meant


def _by_file(outputs: Iterable[_Output]) -> dict[str, list[_Output]]:
    found: dict[str, list[_Output]] = {}
    for one in outputs:
        found.setdefault(one.file, []).append(one)
    return found


def _index(outputs: list[_Output]) -> dict[str, Any]:
    total = {
        "total_parameters": sum(math.prod(o.entry.shape) for o in outputs),
        "total_size": sum(o.entry.num_bytes for o in outputs),
    }
    return {"metadata": total, "weight_map": {o.entry.key: o.file for o in outputs}}


def _value(output: _Output, planned: _Planned, read_factor: Callable[[str], Tensor]) -> Tensor:
    """The tensor to write, in its final type. read_factor: a cached reader of the adapter's tensors."""
    source, place = planned.source, output.place
    change = planned.changes.by_name.get(output.name, Change())
    if place is not None and change.whole is None and (change == Change() or source.stored[output.name].experts):
        value = read_slice(output.tensor)
        if lora := change.lora:
            value = merged_expert(value, place, lora, read_factor(lora.a), read_factor(lora.b))
    else:
        value = _merged_parameter(output.name, change, planned)
        if place is not None:
            value = value[place]
    if not output.part:
        value = value.to(FLOATS.get(output.entry.dtype, value.dtype))
    if change != Change() and not all(map(torch.isfinite, value.aminmax())):  # isfinite(value) would copy
        raise _not_finite(output, source)
    if planned.rounding is not None and output.part:
        return planned.rounding.rounded(value.float(), output.part)
    return value


def _not_finite(output: _Output, source: CheckpointSource) -> MeshloraError:
    """The error of a merged tensor, or of the stored one that it was made of, if that is to blame."""
    if output.name in source.stored:
        for tensor in source.stored[output.name].tensors:
            if not torch.isfinite(read_slice(tensor)).all():
                rule = "it holds values that are not finite"
                return UserError(f"{source.description}: {tensor.key}", rule, "copy or download it again")
    return MeshloraError(f"{output.entry.key}: merged, it holds values that are not finite as {output.entry.dtype}")


def _merged_parameter(name: str, change: Change, planned: _Planned) -> Tensor:
    changes = planned.changes
    if change.whole is None:
        value = planned.read_base(name)
    else:
        value = changes.read(change.whole)
    if lora := change.lora:
        magnitude = changes.read(lora.magnitude) if lora.magnitude else None
        value = merged_weight(value, lora, changes.read(lora.a), changes.read(lora.b), magnitude)
    if change.rows is not None:
        key, indices = change.rows
        # Rows that are replaced, not added.
        value = value.index_copy(0, torch.tensor(indices), changes.read(key).to(value.dtype))
    if change.bias is not None:
        key, scaling = change.bias
        wide = wide_dtype(value.dtype)
        value = value.to(wide).add_(changes.read(key).to(wide), alpha=scaling)  # rounded once, at the end
    return value


def _read_back(
    folder: Path, outputs: list[_Output], meant: Mapping[str, Mapping[str, str]], *, trust_remote_code: bool
) -> None:
    """Check that every file holds the intended tensors, the index matches, and config.json's checkpoint is complete."""
    for name, own in _by_file(outputs).items():
        check_stream(folder / name, [o.entry for o in own], meant[name])
    if (folder / INDEX).is_file() and read_json(folder / INDEX) != json.loads(json.dumps(_index(outputs))):
        raise MeshloraError(f"{INDEX}: read back, it differs from what was written")
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    model = build_on_meta(config, trust_remote_code=trust_remote_code)
    given = getattr(config, "quantization_config", None)
    tied = check_checkpoint(model, CheckpointSource(folder, model, given), allow_unused=True)  # as a user would load it
    stored = {o.name for o in outputs}
    for name, names in tied.items():
        if len(names) == 1 or not set(names) <= stored:
            continue
        if len({meant[o.file][o.entry.key] for o in outputs if o.name in names}) > 1:
            raise MeshloraError(f"{name}: its config.json still ties it to a weight that differs")
