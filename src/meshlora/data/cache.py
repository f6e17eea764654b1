"""Token arrays on disk: one safetensors file for each content.

Owns: the key, the file, and that any number of processes may ask for the same one at once. Does not own: how tokens
are made (`tokenization.py`), whose file is believed and how others wait (`common.private`).

A file exists whole or not at all. One that has been damaged since is recognised by its checksum, one that holds another
dataset by its arrays; both are made again. Neither protects from a stranger, who would write what fits: that nobody
else can have written the file does.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from meshlora.common.errors import reason
from meshlora.common.private import NotOwnError, PrivateFolder, locked, open_own, write_own
from meshlora.data.records import Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Arrays = dict[str, np.ndarray]

# Raise it whenever the same records and options give other arrays than before.
FORMAT_VERSION = 2

# Longer than one core needs for ten gigabytes of text.
_LONGEST_S = 3600.0
_LAYOUT = {"input_ids": ("I32", 1), "is_trained": ("BOOL", 1), "offsets": ("I64", 1)}  # name: type, number of dims

logger = logging.getLogger(__name__)


def cache_key(
    records: AbstractSequence[Record], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> str | None:
    """sha256, in hexadecimal, of all that the arrays depend on; None where the tokenizer's content cannot be known.

    Of the records their content, not their origin: a file that moved is still the same data. Of the tokenizer its
    serialised form, without the truncation and padding that earlier calls left behind. A tokenizer in Python (a
    "slow" one) has no serialised form, so nothing is cached for it rather than something stale.
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
        # Decides whether `<eos>` written out in the data is the eos token; not part of the serialised form.
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "chat_template": tokenizer.chat_template,
        # Both may change what text becomes which tokens; making the arrays again costs seconds.
        "versions": {"tokenizers": tokenizers.__version__, "transformers": transformers.__version__},
    }
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for record in records:
        # A JSON list a line: no two different records give the same bytes. Key order in messages is kept, since a
        # template may see it.
        fields = [record.text, record.prompt, record.completion, record.messages]
        digest.update(b"\n" + json.dumps(fields).encode())
    return digest.hexdigest()


def load_or_make(
    cache_dir: Path, key: str, make: Callable[[], Arrays], *, num_sequences: int, max_length: int
) -> Arrays:
    """The arrays of `key`: from the cache, or made once by whichever process comes first while the others wait.

    num_sequences, max_length: of the dataset that is asked for; a file that holds another one is made again.

    Raises:
        UserError: `cache_dir` cannot be made or written, or others can write it; who makes the arrays takes an hour.
            Whatever `make` raises.
    """
    folder = PrivateFolder(cache_dir, f"cache_dir={cache_dir}", "choose another folder")
    folder.make()
    path = cache_dir / f"{key}.safetensors"
    load = functools.partial(_load, path, key, num_sequences=num_sequences, max_length=max_length)
    if (arrays := load(says_why_not=False)) is not None:
        return arrays
    with locked(folder, f"{key}.lock", "makes the same tokens", limit_s=_LONGEST_S):
        # Another process may have made it while this one waited.
        if (arrays := load(says_why_not=True)) is not None:
            return arrays
        arrays = make()
        content = save(arrays, metadata={"key": key, "sha256": _checksum(arrays)})
        with folder.usable():
            write_own(path, content)
        return arrays


def _load(path: Path, key: str, *, num_sequences: int, max_length: int, says_why_not: bool) -> Arrays | None:
    """The arrays, or None where there is no file, or none that is sound and this user's."""
    try:
        with open_own(path) as stream:
            arrays, metadata = _read(stream.fileno())
        # The checksum covers names, types and shapes, and the key that this is the file it is named for.
        if (metadata.get("key"), metadata.get("sha256")) != (key, _checksum(arrays)):
            raise ValueError("its checksum differs")
        if not _fits(arrays, num_sequences=num_sequences, max_length=max_length):
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


def _read(descriptor: int) -> tuple[Arrays, Mapping[str, str]]:
    """Arrays and metadata of the open file `descriptor`, whatever has its name by now.

    Raises:
        ValueError: other arrays than a dataset has. SafetensorError, OSError: it cannot be read.
    """
    with safe_open(f"/dev/fd/{descriptor}", framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if {name: (one.get_dtype(), len(one.get_shape())) for name, one in slices.items()} != _LAYOUT:
            raise ValueError("it does not hold the arrays of a dataset")
        return {name: file.get_tensor(name) for name in _LAYOUT}, file.metadata() or {}


def _fits(arrays: Arrays, *, num_sequences: int, max_length: int) -> bool:
    """Whether the arrays hold as many sequences as there are records, none of them empty or longer than asked for."""
    ids, offsets = arrays["input_ids"], arrays["offsets"]
    if len(offsets) != num_sequences + 1 or offsets[0] != 0 or not offsets[-1] == len(ids) == len(arrays["is_trained"]):
        return False
    lengths = np.diff(offsets)
    return bool(lengths.min() > 0 and lengths.max() <= max_length and ids.min() >= 0)


def _checksum(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
