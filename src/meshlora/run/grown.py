"""Bases with more tokens than they were published with: a folder with a grown vocabulary, made of another one.

Owns: adding tokens to a tokenizer, the rows that they begin with, the folder that has both, and what an adapter's
folder needs so that PEFT finds such rows, too. Does not own: how rows are trained (`adapter.targets.token_rows`).

As `resize_token_embeddings` of transformers has it, a new row is the mean of those that are there, of the embedding and
of an output head of its own. The noise that it adds, 1e-9 of their covariance, is left out: every machine makes the
same rows. Rows that a folder of PEFT brings along take the place of these.

The folder is in a cache. Its shards without a vocabulary are links to those of the base; transformers, PEFT and engines
read it as any other. All that reads a base by its folder so reads a grown one: proofs, runs, merges, texts.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from meshlora.adapter.formats.adapter_file import PREFIX, open_adapter, read_adapter_tensors
from meshlora.adapter.formats.file_tensors import base_keys
from meshlora.adapter.formats.peft_format import CONFIG_FILE, WEIGHTS_FILE
from meshlora.loading.blueprint import Blueprint, build_on_meta, read_model_config
from meshlora.model.stored import StoredTensor
from meshlora.model.stream import FLOATS, Entry, write_stream
from meshlora.model.weights import CheckpointSource, read_slice
from meshlora.reading.tokenizer import load_tokenizer
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.files import new_folder, open_safetensors, read_json, write_json_atomically
from meshlora_ground.private import CACHE, PrivateFolder, locked
from meshlora_ground.weight_files import INDEX, repository_of, weight_files

# In a grown folder: how many rows its base has. A hidden file, so that no copy of the model takes it along.
_MARK = ".grown.json"
_ROWS_AT_ONCE, _LOCK_S = 4096, 7200.0
_KEPT_S = 30 * 24 * 3600.0  # since the last use: each holds the embeddings of a model, which are soon made again
# Written anew, or of the tokenizer before.
_NOT_LINKED = {"config.json", INDEX, "added_tokens.json", "special_tokens_map.json"}
# Where PEFT puts the base's own weight of a module, by what else it has there.
_INFIXES = (".token_adapter.base_layer", ".base_layer", ".original_module")


@dataclass(frozen=True)
class _Base:
    """A base and its vocabulary, before it grows.

    Attributes:
        names: the embedding and the head. ends: those with a weight of their own -> where it is stored.
        rows: of each, the number of tokens.
    """

    folder: Path
    trusts_code: bool
    names: tuple[str, ...] = ()
    ends: Mapping[str, StoredTensor] = field(default_factory=dict)
    rows: int = 0

    def read(self) -> _Base:
        """With what the folder says. Raises: UserError: it cannot be read, or its vocabulary is in few bits."""
        config = read_model_config(self.folder, trust_remote_code=self.trusts_code)
        model = build_on_meta(config, trust_remote_code=self.trusts_code)
        stored = CheckpointSource(self.folder, model, getattr(config, "quantization_config", None)).stored
        ends, found = [model.get_input_embeddings(), model.get_output_embeddings()], dict[str, StoredTensor]()
        names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
        for name in names:
            if f"{name}.weight" not in stored:  # tied
                continue
            (tensor,), module = stored[f"{name}.weight"].tensors, model.get_submodule(name)
            if tensor.dtype not in FLOATS or tensor.packed is not None or getattr(module, "bias", None) is not None:
                rule = "it is in few bits, or has a bias, and only plain rows are added to"
                raise UnsupportedError(f"more tokens of {name}", rule, "give a base that has them")
            found[name] = tensor
        return dataclasses.replace(self, names=tuple(names), ends=found, rows=len(ends[0].weight))

    def check_growth(self, rows: int) -> None:
        """Refuse a model that has a row for each token elsewhere, too. Raises: UnsupportedError: names it."""
        config = read_model_config(self.folder, trust_remote_code=self.trusts_code)
        grown = copy.deepcopy(config)
        grown.get_text_config().vocab_size = rows
        shapes = []
        for each in (config, grown):
            model = build_on_meta(each, trust_remote_code=self.trusts_code)
            ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end}
            own = {name: value for name, value in model.named_parameters() if id(value) not in ends}
            shapes.append({name: value.shape for name, value in own.items()})
        for name, shape in shapes[0].items():
            if shapes[1].get(name) != shape:
                raise UnsupportedError(f"more tokens of {self.folder}", f"{name} has a row for each of them, too")


@dataclass(frozen=True)
class Added:
    """A base that has tokens added. ids: of these. ends: its embedding and head; modules: those with rows stored."""

    folder: str
    ids: list[int]
    ends: list[str]
    modules: list[str]


def with_tokens(
    folder: str, tokens: Sequence[str] | str, special: Sequence[str], *, trust_remote_code: bool = False
) -> Added:
    """The base in `folder` with `tokens`, and `special` ones, added to its tokenizer and its rows.

        with_tokens("models/Qwen3-0.6B", ["<tool>"], [])

    tokens: "of_tokenizer": those that the tokenizer has beyond the rows of the base.

    Raises:
        UserError: a token that is there already, or none to add.
    """
    base = _Base(Path(folder), trust_remote_code).read()
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    if isinstance(tokens, str):
        ids = list(range(base.rows, len(tokenizer)))
        if not ids:
            rule = f"the tokenizer has {len(tokenizer)} tokens, and the base {base.rows} rows"
            raise UserError("model.add_tokens=of_tokenizer", f"{rule}: none is without", "name the tokens to add")
        tokens = []
    else:
        ids = []
    known = tokenizer.get_vocab()
    for token in (*tokens, *special):
        if known.get(token, base.rows) < base.rows:
            rule = f"it is a token already, number {known[token]}"
            way_out = f"leave it out; lora.trainable_token_indices: [{known[token]}] trains its row"
            raise UserError(f"model.add_tokens: {token!r}", rule, way_out)
    tokenizer.add_tokens([*tokens])
    tokenizer.add_tokens([*special], special_tokens=True)
    ids += [int(tokenizer.convert_tokens_to_ids(token)) for token in (*tokens, *special)]
    rows = max(len(tokenizer), base.rows)
    key = json.dumps(["tokens", list(tokens), list(special), rows])
    ids, folder = list(dict.fromkeys(ids)), _made(base, rows, tokenizer, {}, key)
    return Added(folder, ids, [*base.names], [*base.ends])


def with_vocabulary_of(folder: str, adapter: str, *, trust_remote_code: bool = False) -> str:
    """The base in `folder`, with as many rows as the `adapter`, a folder of PEFT, was made on: `folder` if it has them.

    Rows of the base that the adapter's file has are taken from there, others are means; the tokenizer is the adapter's,
    if it has one.
    """
    file, path = Path(adapter, WEIGHTS_FILE), Path(folder)
    if not file.is_file() or not Path(adapter, CONFIG_FILE).is_file() or not (path / "config.json").is_file():
        return folder  # it is said where they are read
    settings = read_json(Path(adapter, CONFIG_FILE))
    with open_adapter(file) as opened:
        sizes = {key: opened.get_slice(key).get_shape() for key in sorted(opened.keys())}
    of_vocabulary = {key for key in sizes if key.endswith(".weight") and ".lora_" not in key}
    if not of_vocabulary and not settings.get("trainable_token_indices"):
        return folder  # LoRA alone, as nearly always
    base = _Base(path, trust_remote_code).read()
    rows, values = 0, dict[str, str]()
    for name in base.ends:
        keys = {infix: f"{PREFIX}{name}{infix}.weight" for infix in ("", *_INFIXES)}
        for infix, key in keys.items():
            if key in sizes:
                rows = max(rows, sizes[key][0])
            # The plain name is that of the trained copy of a module that is saved.
            if key in sizes and (infix or not _is_saved(name, settings)):
                values[name] = key
    tokenizer = None
    if Path(adapter, "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(adapter, trust_remote_code=trust_remote_code)
        if _last_token(settings) >= base.rows:
            rows = max(rows, len(tokenizer))
    if rows <= base.rows:
        return folder
    # Adapters whose file has no rows of the base have one base in common.
    parts = sorted(Path(adapter).glob("tokenizer*")) if tokenizer is not None else []
    words = [f"{rows}", *(hashlib.sha256(part.read_bytes()).hexdigest() for part in parts)]
    if values:
        words.append(f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}")
    return _made(base, rows, tokenizer, {name: (file, key) for name, key in values.items()}, json.dumps(words))


def _is_saved(name: str, settings: Mapping[str, Any]) -> bool:
    return any(map(name.endswith, settings.get("modules_to_save") or ()))


def _last_token(settings: Mapping[str, Any]) -> int:
    """The highest of `trainable_token_indices`; -1: none."""
    given = settings.get("trainable_token_indices") or []
    if isinstance(given, Mapping):
        given = [each for ids in given.values() for each in ids]
    return max(given, default=-1)


def _made(
    base: _Base, rows: int, tokenizer: PreTrainedTokenizerBase | None, values: Mapping[str, tuple[Path, str]], key: str
) -> str:
    """The folder of `base` with `rows`, made if the cache lacks it. values: module -> tensor of an adapter's file."""
    bases = PrivateFolder(CACHE.expanduser() / "bases", f"the cache of grown bases, {CACHE}", "let HOME be elsewhere")
    bases.make()
    words = [str(base.folder.resolve()), key]
    for file in (*weight_files(base.folder), base.folder / "config.json", *base.folder.glob("tokenizer*")):
        stat = file.stat()
        words.append(f"{file.name} {stat.st_size} {stat.st_mtime_ns}")
    name = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
    out = bases.path / f"{base.folder.resolve().name[:40]}-{name}"
    with locked(bases, f"{name}.lock", "adds tokens to the same base", limit_s=_LOCK_S):
        if not (out / _MARK).is_file():
            base.check_growth(rows)
            with new_folder(out) as folder:
                _write(folder, base, rows, tokenizer, values)
        with contextlib.suppress(OSError):  # a cache that is only read
            os.utime(out / _MARK)
    _remove_unused(bases)
    return str(out)


def _remove_unused(bases: PrivateFolder) -> None:
    """Remove the grown bases that nothing has used for long. What they link to stays."""
    for mark in bases.path.glob(f"*/{_MARK}"):
        with contextlib.suppress(OSError):  # another process removes it, or it cannot be removed
            if time.time() - mark.stat().st_mtime < _KEPT_S:
                continue
            key = mark.parent.name.rpartition("-")[2]
            with locked(bases, f"{key}.lock", "uses a base with added tokens", limit_s=_LOCK_S):
                if time.time() - mark.stat().st_mtime >= _KEPT_S:  # not used since
                    gone = mark.parent.with_name(f"removed-{key}")  # at once: half of one is no base
                    mark.parent.rename(gone)
                    shutil.rmtree(gone)


def _write(
    folder: Path,
    base: _Base,
    rows: int,
    tokenizer: PreTrainedTokenizerBase | None,
    values: Mapping[str, tuple[Path, str]],
) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    names = {(tensor.file.name, tensor.key): name for name, tensor in base.ends.items()}
    for file in weight_files(base.folder):
        own = {key: name for (shard, key), name in names.items() if shard == file.name}
        if own and rows > base.rows:
            _write_shard(file, folder / file.name, base, rows, {key: (own[key], values.get(own[key])) for key in own})
    stored = read_json(base.folder / "config.json")
    parts = [part for part in (stored, stored.get("text_config")) if isinstance(part, dict)]
    of_vocabulary = [part for part in parts if "vocab_size" in part] or parts[-1:]
    for part in of_vocabulary:
        part["vocab_size"] = rows
    write_json_atomically(folder / "config.json", stored)
    if (base.folder / INDEX).is_file():
        index = read_json(base.folder / INDEX)
        # Sizes that nobody reads, and that are no longer right.
        write_json_atomically(folder / INDEX, {"metadata": {}, "weight_map": index["weight_map"]})
    for file in sorted(base.folder.iterdir()):
        if file.name.startswith(".") or file.name in _NOT_LINKED or (folder / file.name).exists():
            continue
        (folder / file.name).symlink_to(file.resolve())
    write_json_atomically(folder / _MARK, {"rows": base.rows, "base": str(base.folder.resolve())})


def _write_shard(
    file: Path, out: Path, base: _Base, rows: int, grown: Mapping[str, tuple[str, tuple[Path, str] | None]]
) -> None:
    """Copy a shard with its vocabulary grown. grown: key -> the module, and the tensor that is taken for its weight."""
    entries: list[Entry] = []
    with open_safetensors(file) as opened:
        metadata = opened.metadata() or {"format": "pt"}
        for key in opened.keys():  # noqa: SIM118 - no mapping
            view = opened.get_slice(key)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            if key in grown:
                shape = (rows, *shape[1:])
                if taken := grown[key][1]:
                    with open_adapter(taken[0]) as adapter:
                        dtype = adapter.get_slice(taken[1]).get_dtype()
            entries.append(Entry(key, shape, dtype))

    def read(entry: Entry) -> Tensor:
        if entry.key not in grown:
            with open_safetensors(file) as opened:
                value: Tensor = opened.get_tensor(entry.key).clone()
            return value
        name, taken = grown[entry.key]
        if taken is not None:
            with open_adapter(taken[0]) as adapter:
                return adapter.get_tensor(taken[1]).clone()
        weight = read_slice(base.ends[name])
        return torch.cat([weight, mean_row(weight).expand(rows - len(weight), -1)])

    write_stream(out, entries, read, metadata)


def mean_row(weight: Tensor) -> Tensor:
    """The mean `[1, H]` of the rows of `weight` `[V, H]`, the same to the bit on every machine."""
    total = torch.zeros(weight.shape[1], dtype=torch.float64).numpy()
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        # numpy adds rows one after the other; torch shares them among as many threads as there are.
        total += weight[first : first + _ROWS_AT_ONCE].double().numpy().sum(axis=0)
    return (torch.from_numpy(total) / len(weight)).to(weight.dtype).unsqueeze(0)


def rows_to_train(lora: Mapping[str, Any], added: Added) -> dict[str, Any]:
    """`lora` with the rows of `added` tokens to train, where it says nothing itself of the vocabulary."""
    named = [*(lora.get("modules_to_save") or ())]
    if isinstance(targets := lora.get("target_modules"), list):
        named += targets
    trained = {end for end in added.ends if any(map(end.endswith, named))}
    modules = [module for module in added.modules if module not in trained]
    is_tied = len(added.modules) < len(added.ends)  # one weight: rows of one of its names are rows of the other
    if lora.get("trainable_token_indices") or not modules or (is_tied and trained):
        return dict(lora)
    return {**lora, "trainable_token_indices": dict.fromkeys(modules, added.ids)}


def named_base(lora: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """`lora` with `folder` as the base that whoever loads the adapter begins with: PEFT then resizes it."""
    if lora.get("base_model_name_or_path"):
        return dict(lora)
    if repository := repository_of(folder):
        return {**lora, "base_model_name_or_path": repository.name, "revision": repository.commit}
    return {**lora, "base_model_name_or_path": str(Path(folder).absolute())}


def complete(folder: Path, base: str, blueprint: Blueprint) -> None:
    """Add what the adapter in `folder` lacks to be used on the base that `base` was grown of, if it was: as PEFT does,
    the embedding and the head, unless all of their new rows are trained."""
    if not (Path(base) / _MARK).is_file():
        return
    trained, first = blueprint.trained, read_json(Path(base) / _MARK)["rows"]
    new = set(range(first, max(rows for rows, _ in trained.vocabulary.values())))
    replaced = {name for rows in trained.rows.values() if new <= set(rows.ids) for name in rows.modules}
    source = CheckpointSource(Path(base), blueprint.model).stored
    keys = base_keys(trained.targets, blueprint.plan, trained.copies, trained.with_rows)
    tensors = read_adapter_tensors(folder / WEIGHTS_FILE)
    before = len(tensors)
    for name, key in keys.items():
        if name not in replaced and f"{name}.weight" in source:
            (stored,) = source[f"{name}.weight"].tensors
            tensors[key] = read_slice(stored)
    if len(tensors) > before:
        ordered = {key: tensors[key].contiguous() for key in sorted(tensors)}
        save_file(ordered, folder / WEIGHTS_FILE, metadata={"format": "pt"})
