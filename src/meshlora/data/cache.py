"""Token arrays on disk: one safetensors file for each content.

Owns: the key, the file, and that any number of processes may ask for the same one at once. Does not own: how tokens
are made (`tokenization.py`).

A file is written beside its final name, flushed to the disk and renamed, so that it exists whole or not at all; one
that has been damaged since is recognised by its checksum and made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import transformers
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from meshlora.data.records import Record
from meshlora.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Arrays = dict[str, np.ndarray]

# Raise it whenever the same records and options give other arrays than before.
FORMAT_VERSION = 1

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


def load_or_make(cache_dir: Path, key: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays of `key`: from the cache, or made once by whichever process comes first while the others wait.

    Raises:
        UserError: `cache_dir` cannot be made or written. Whatever `make` raises.
    """
    path = cache_dir / f"{key}.safetensors"
    if (arrays := _load(path, key)) is not None:
        return arrays
    with _usable(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache_dir / f"{key}.lock")
        lock.acquire()
    try:
        # Another process may have made it while this one waited.
        if (arrays := _load(path, key)) is not None:
            return arrays
        arrays = make()
        with _usable(cache_dir):
            _store(path, key, arrays)
        return arrays
    finally:
        lock.release()


@contextmanager
def _usable(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cache_dir={cache_dir}", f"cannot be written ({error.strerror or error})", "choose another folder"
        ) from error


def _store(path: Path, key: str, arrays: Arrays) -> None:
    content = save(arrays, metadata={"key": key, "sha256": _checksum(arrays)})
    # The name is unique although the lock is held: on some network file systems locks do not hold.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            # Before the rename: otherwise a crash may leave the name on a file whose content never reached the disk.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _load(path: Path, key: str) -> Arrays | None:
    """The arrays, or None where there is no file or not a sound one."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError) as error:
        logger.warning("%s is damaged (%s); it is made again", path, error)
        return None
    # The checksum covers names, types and shapes, and the key that this is the file it is named for.
    if (metadata.get("key"), metadata.get("sha256")) == (key, _checksum(arrays)):
        return arrays
    logger.warning("%s is damaged (its checksum differs); it is made again", path)
    return None


def _checksum(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
