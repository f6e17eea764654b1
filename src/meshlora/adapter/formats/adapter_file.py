"""The one reader of `adapter_model.safetensors`: its tensors under the names that PEFT loads.

Owns: names as people's files have them (wrappers, a prefix that is missing or there twice, embeddings that PEFT writes
several times), and the checks on any tensor: its shape, its type, its values, and whether its vocabulary is the base's.
Does not own: which tensors an adapter has (`adapter.formats.file_tensors`), the folder (`adapter.formats.peft_format`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshlora.feature import features
from meshlora.model.stream import FLOATS
from meshlora_ground.errors import UserError, did_you_mean
from meshlora_ground.files import open_safetensors

PREFIX = "base_model.model."
# torch.compile, FSDP and activation checkpointing name what they wrap, at any depth.
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_COPY = re.compile(r"^(?P<owner>.*)\.modules_to_save\.(?P<leaf>.*)$")


class AdapterFile:
    """An open adapter file whose tensors have the names that PEFT loads: `base_model.model.` and the module's name."""

    def __init__(self, opened: Any, names: Mapping[str, str]) -> None:
        self._opened, self.names = opened, names

    def __contains__(self, key: str) -> bool:
        return key in self.names

    def keys(self) -> set[str]:
        """The names of its tensors."""
        return set(self.names)

    def get_slice(self, key: str) -> Any:
        """As of a safetensors file."""
        return self._opened.get_slice(self.names[key])

    def get_tensor(self, key: str) -> Tensor:
        """As of a safetensors file."""
        return self._opened.get_tensor(self.names[key])


@contextlib.contextmanager
def open_adapter(file: Path, names: Mapping[str, str] | None = None) -> Iterator[AdapterFile]:
    """Open the adapter file `file`. names: its `AdapterFile.names`, where they are known.

    Raises:
        UserError: it cannot be read, or two of its tensors have one name.
    """
    opening: contextlib.AbstractContextManager[Any] = open_safetensors(file)
    for feature in features():
        opening = feature.opened_adapter(file) or opening
    with opening as opened:
        yield AdapterFile(opened, names_of(file, opened.keys()) if names is None else names)


def names_of(file: Path, stored: Iterable[str]) -> dict[str, str]:
    """The name that PEFT loads -> the name in the file, without what PEFT passes over.

    `embed_tokens.modules_to_save.weight` is such: PEFT writes a trained embedding as `embed_tokens.weight`, and once
    more under this name if the vocabulary was resized.

    Raises:
        UserError: two of its tensors have one name.
    """
    found: dict[str, str] = {}
    for key in sorted(stored):
        name = _without_wrappers(key)
        if name in found:
            rule = f"without the names of wrappers it is {found[name]}, which is in the file too"
            raise UserError(f"{file}: {key}", rule, "save the adapter again with save_pretrained of peft")
        found[name] = key
    if not any(name.startswith(PREFIX) for name in found):
        found = {f"{PREFIX}{name}": key for name, key in found.items()}
    return {name: key for name, key in found.items() if not _is_second_copy(name, found)}


def _without_wrappers(key: str) -> str:
    name = _WRAPPERS.sub("", key)
    while name.startswith(("module.", PREFIX * 2, f"{PREFIX}module.")):  # DataParallel's, and what PEFT wrapped twice
        name = name.removeprefix(PREFIX).removeprefix("module.")
    return name


def _is_second_copy(name: str, names: Collection[str]) -> bool:
    # Alone, without the plain name, it is the trained module itself.
    match = _COPY.match(name)
    return match is not None and f"{match['owner']}.{match['leaf']}" in names


def read_adapter_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of an adapter file under the names that PEFT loads, checked by `read_tensor`."""
    with open_adapter(file) as opened:
        return {key: read_tensor(opened, file, key) for key in sorted(opened.keys())}


def read_tensor(opened: Any, file: Path, key: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """A copy of the tensor `key` of an open adapter file.

    Raises:
        UserError: its shape is not `shape`, its type is not a float, or its values are not all finite.
    """
    view = opened.get_slice(key)
    if shape is not None:
        check_shape(file, key, tuple(view.get_shape()), shape)
    if view.get_dtype() not in FLOATS:
        raise UserError(f"{file}: {key}", f"its type is {view.get_dtype()}", f"it must be one of {', '.join(FLOATS)}")
    # A copy: what safetensors gives may be a view of the mapped file.
    tensor: Tensor = opened.get_tensor(key).clone()
    if not torch.isfinite(tensor).all():
        raise UserError(f"{file}: {key}", "it holds values that are not finite", "use an earlier checkpoint")
    return tensor


def check_shape(file: Path, what: str, found: tuple[int, ...], needed: tuple[int, ...]) -> None:
    """Refuse a tensor whose shape does not fit the model and the configuration."""
    if found != needed:
        rule = f"its shape is {list(found)}, this model and adapter_config.json need {list(needed)}"
        raise UserError(f"{file}: {what}", rule, "it belongs to another model or another rank")


def check_keys(file: Path, given: set[str], expected: Iterable[str]) -> None:
    """Refuse a file that lacks one of `expected`, or has others. Raises: UserError: names the first."""
    wanted = set(expected)
    if missing := sorted(wanted - given):
        near = ""
        if 0 < len(given) <= 10_000:  # the nearest of more takes seconds to find
            near = did_you_mean(missing[0], given)
        raise UserError(f"{file}", f"it lacks {len(missing)} of {len(wanted)} tensors, first {missing[0]}", near)
    if extra := sorted(given - wanted):
        rule = f"{len(extra)} of its tensors have no place in this model, first {extra[0]}"
        raise UserError(f"{file}", rule, "it belongs to another model, or its adapter_config.json does")


def check_vocabulary(
    opened: AdapterFile, file: Path, shapes: Mapping[str, tuple[int, ...]], rows: Mapping[str, int]
) -> None:
    """Refuse an adapter that was made on another vocabulary than the base's.

    shapes: key -> the shape that this base needs. rows: the embedding and the head by name -> their rows.

    Raises:
        UserError: how many rows the adapter was made on, and how to get such a base.
    """
    for key in sorted(opened.keys() & shapes.keys()):
        name = key.removeprefix(PREFIX)
        owner = next((module for module in rows if name.startswith(f"{module}.")), None)
        found, needed = tuple(opened.get_slice(key).get_shape()), shapes[key]
        if owner is None or len(found) != len(needed):
            continue
        # Of a factor the vocabulary is the first dim or the second; that one alone differs, or it is another model.
        differing = [(given, own) for given, own in zip(found, needed, strict=True) if given != own]
        if len(differing) == 1 and differing[0][1] == rows[owner]:
            raise another_vocabulary(f"{file}: {key}", differing[0][0], rows[owner])


def another_vocabulary(where: str, made_on: int, rows: int, *, at_least: bool = False) -> UserError:
    """The error for an adapter that was made on `made_on` rows, or at_least as many, where the base has `rows`."""
    number = f"at least {made_on}" if at_least else f"{made_on}"
    given = f"the adapter was made on a vocabulary of {number} rows, this base has {rows}"
    if made_on < rows:
        return UserError(where, given, "give the base that it was made on")
    way_out = f"make such a base: tokenizer.add_tokens, model.resize_token_embeddings({made_on}), and save_pretrained"
    return UserError(where, given, f"{way_out} of both into one folder")
