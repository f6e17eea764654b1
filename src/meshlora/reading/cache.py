"""Token arrays on disk: one safetensors file per content hash.

Owns: the key, the file, and safety with any number of concurrent processes. Does not own: tokenisation
(`tokenization.py`), which files are trusted and how to wait (`meshlora_ground.private`).

Files are written atomically. A damaged file is detected by its checksum, one with another dataset by its arrays; both
are made again. Neither protects against an attacker, who would write matching ones: ownership and mode of the file do.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from meshlora.reading.records import Record, without_paths
from meshlora_ground.errors import reason
from meshlora_ground.files import write_atomically
from meshlora_ground.private import NotOwnError, PrivateFolder, locked, open_own

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Arrays = dict[str, np.ndarray]

# Increase it whenever the same records and options give different arrays than before.
FORMAT_VERSION = 9

# More than one core needs for ten gigabytes of text.
_LONGEST_S = 3600.0
_LONGEST_STREAM_S = 48 * 3600.0  # of what does not fit into memory
_LAYOUT = {  # name: type, number of dims
    "input_ids": ("I32", 1),
    "is_trained": ("BOOL", 1),
    **dict.fromkeys(("offsets", "sources", "too_long", "lost", "bad"), ("I64", 1)),
}

_DTYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype("int64"), "I32": np.dtype("int32"), "BOOL": np.dtype("bool")}

logger = logging.getLogger(__name__)


class RecordsDigest:
    """The SHA-256 of the content of `records`, and of those that are added one after the other."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._digest, self.number = hashlib.sha256(), 0
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add one. Others give other bytes: a JSON list each, with the order of keys, as a template may see it."""
        messages = record.messages and [*map(without_paths, record.messages)]  # the content of images is in `options`
        content = (record.text, record.prompt, record.completion, messages, record.tools, record.tokens)
        fields = (*content, record.separator)
        self._digest.update(b"\n" + json.dumps(fields).encode())
        self.number += 1

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def cache_key(digest: RecordsDigest, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str | None:
    """The hexadecimal SHA-256 of everything the arrays depend on; None if the tokenizer cannot be serialised.

    It covers the content of records, not their origin: a file that moved is the same data. It covers the serialised
    tokenizer without the truncation and padding that earlier calls left behind. A tokenizer in Python (a "slow" one)
    has no serialised form, so nothing is cached for it rather than something stale.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not tokenizer.is_fast:
        return None
    content = json.loads(backend.to_str())
    content.pop("truncation", None)
    content.pop("padding", None)
    head = {
        "format_version": FORMAT_VERSION,
        "options": dict(options),
        "tokenizer": content,
        "class": type(tokenizer).__qualname__,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        # Decides whether a literal `<eos>` in the data is the eos token; not part of the serialised form.
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "chat_template": tokenizer.chat_template,
        # Either may change tokenisation; making the arrays again costs seconds.
        "versions": {"tokenizers": tokenizers.__version__, "transformers": transformers.__version__},
    }
    return hashlib.sha256(f"{json.dumps(head, sort_keys=True)}\n{digest.hexdigest()}".encode()).hexdigest()


def load_or_make(
    cache_dir: Path,
    key: str,
    blocks: Callable[[], Iterable[Arrays]],
    *,
    num_records: int,
    max_length: int,
    is_mapped: bool = False,
) -> Arrays:
    """The arrays of `key`: from the cache, or made by the first process to ask while the others wait.

    blocks: makes the arrays of some records at a time, with `lengths` of sequences in place of `offsets`.
    num_records, max_length: of the requested dataset; a file that does not fit is made again. is_mapped: the arrays
    stay in the file, and are read as they are needed.

    Raises:
        UserError: `cache_dir` cannot be created or written, or others can write it; another process holds the lock
            for an hour, or for two days if is_mapped. Whatever `blocks` raises.
    """
    folder = PrivateFolder(cache_dir, f"cache_dir={cache_dir}", "choose another folder")
    folder.make()
    path = cache_dir / f"{key}.safetensors"
    options: dict[str, Any] = {"num_records": num_records, "max_length": max_length, "is_mapped": is_mapped}
    load = functools.partial(_load, path, key, **options)
    if (arrays := load(says_why_not=False)) is None:
        limit_s = _LONGEST_STREAM_S if is_mapped else _LONGEST_S
        with locked(folder, f"{key}.lock", "makes the same tokens", limit_s=limit_s):
            # Another process may have written the file while this one waited.
            if (arrays := load(says_why_not=True)) is None:
                made = blocks()
                with folder.usable():
                    write_atomically(path, lambda temporary: _write_blocks(temporary, key, made), mode=0o600)
                arrays = load(says_why_not=True)
    assert arrays is not None, path
    return arrays


def _write_blocks(path: Path, key: str, blocks: Iterable[Arrays]) -> None:
    """Write the arrays of all blocks one after the other as a safetensors file, of which no array is held in memory."""
    with contextlib.ExitStack() as held:
        parts = {name: held.enter_context(tempfile.TemporaryFile(dir=path.parent)) for name in _LAYOUT}
        last = np.zeros(1, dtype=np.int64)
        parts["offsets"].write(last.tobytes())
        for block in blocks:
            for name, array in block.items():
                if name == "lengths":  # of sequences of the block; in the file each begins where the one before ends
                    name, array = "offsets", last[-1] + np.cumsum(array)
                    if len(array):
                        last = array
                parts[name].write(array.tobytes())
        arrays: Arrays = {}
        for name, part in parts.items():
            part.flush()
            dtype = _DTYPES[_LAYOUT[name][0]]
            # An array without elements cannot be mapped.
            arrays[name] = np.memmap(part, dtype, "r") if part.tell() else np.empty(0, dtype)
        save_file(arrays, path, metadata={"key": key, "sha256": _checksum(arrays)})


def _load(
    path: Path, key: str, *, num_records: int, max_length: int, says_why_not: bool, is_mapped: bool
) -> Arrays | None:
    """The arrays, or None if the file is missing, damaged, or not certain to be this user's."""
    try:
        with open_own(path) as stream:
            arrays, metadata = _read(stream.fileno(), is_mapped=is_mapped)
        # The checksum covers names, types, shapes and values; the key shows that the file was not renamed.
        if (metadata.get("key"), metadata.get("sha256")) != (key, _checksum(arrays)):
            raise ValueError("its checksum differs")
        if not _fits(arrays, num_records=num_records, max_length=max_length):
            raise ValueError("its sequences are not those of the records")
    except FileNotFoundError:
        return None
    except NotOwnError as error:
        why_not = f"{error}, so it is not believed"
    except (SafetensorError, OSError, ValueError) as error:
        why_not = f"{path} is damaged ({reason(error)})"
    else:
        return arrays
    if says_why_not:
        logger.warning("%s; it is made again", why_not)
    return None


def _read(descriptor: int, *, is_mapped: bool) -> tuple[Arrays, Mapping[str, str]]:
    """Arrays and metadata of the open file `descriptor`, even if its path has been replaced since. Raises: ValueError:
    the arrays are not those of a dataset. SafetensorError, OSError: it cannot be read."""
    # As torch's tensors they are mapped, as numpy's they are copies.
    with safe_open(f"/dev/fd/{descriptor}", framework="pt" if is_mapped else "numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if {name: (one.get_dtype(), len(one.get_shape())) for name, one in slices.items()} != _LAYOUT:
            raise ValueError("it does not hold the arrays of a dataset")
        arrays: Arrays = {}
        for name in _LAYOUT:
            arrays[name] = np.asarray(file.get_tensor(name))
            arrays[name].flags.writeable = False
        return arrays, file.metadata() or {}


def _fits(arrays: Arrays, *, num_records: int, max_length: int) -> bool:
    """Whether the arrays hold sequences of `num_records` records, none of them empty or longer than `max_length`."""
    ids, offsets, sources = arrays["input_ids"], arrays["offsets"], arrays["sources"]
    if len(offsets) != len(sources) + 1 or offsets[0] != 0 or not offsets[-1] == len(ids) == len(arrays["is_trained"]):
        return False
    for own in (sources, arrays["too_long"]):  # indices of records, in order
        if len(own) and (own[0] < 0 or own[-1] >= num_records or (np.diff(own) < 0).any()):
            return False
    lengths = np.diff(offsets)
    return len(lengths) > 0 and bool(lengths.min() > 0 and lengths.max() <= max_length and ids.min() >= 0)


def _checksum(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
