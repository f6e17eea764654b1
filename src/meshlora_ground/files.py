"""Atomic writing of files and folders, and reading of JSON and safetensors with clear errors.

Writing is to a temporary name in the same folder, fsync, rename. Does not own: what is in the files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from meshlora_ground.errors import UserError
from meshlora_ground.reading import parse_json, read_text


def write_atomically(path: Path, write: Callable[[Path], object], *, mode: int = 0o644) -> None:
    """Call `write` with a temporary path beside `path`, fsync what it wrote, then rename it to `path`."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(mode)  # mkstemp makes files for the owner alone
        fsync(temporary)
        temporary.replace(path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_json_atomically(path: Path, value: Any) -> None:
    """Write `value` as sorted, indented JSON."""
    write_text_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` in UTF-8."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` if the block succeeds, and is removed if it fails.

    An existing folder is moved aside first and removed last, so a configuration is never paired with the weights of
    another save. Files in it that the block did not write are kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    try:
        yield temporary
        temporary.chmod(0o755)
        for file in temporary.iterdir():
            fsync(file)
        old = temporary.with_suffix(".old")
        if path.is_dir():
            for file in path.iterdir():
                if file.is_file() and not (temporary / file.name).exists():
                    shutil.copy2(file, temporary / file.name)
            path.replace(old)
        try:
            temporary.replace(path)
        except BaseException:
            if old.is_dir():
                old.replace(path)
            raise
        fsync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open `path` for reading slices. Raises: UserError: missing, cut short, or not a safetensors file."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}", "it is a folder, a pipe or a device, no file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"{path}", "the file is missing") from None
    except SafetensorError as error:
        rule = f"it is damaged or not a safetensors file ({error})"
        raise UserError(f"{path}", rule, "copy or download it again") from None
    except OSError as error:
        raise UserError(f"{path}", f"it cannot be read ({error.strerror or error})") from None


def why_not_writable(folder: Path) -> str:
    """Why files cannot be created in `folder`, or "": found by trying, as mode bits do not tell."""
    probe = folder / ".meshlora-probe"
    try:
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        return error.strerror or f"{error}"
    return ""


def check_result_file(file: Path, given: str, *, makes_folder: bool = False) -> None:
    """Refuse, before the work, a file that could not be written after it. makes_folder: its folder may be missing.
    Raises: UserError: about `given`."""
    folder = file.absolute().parent
    while makes_folder and not folder.exists():
        folder = folder.parent
    if file.is_dir():
        raise UserError(given, "it is a folder", "give the name of a file")
    if not folder.is_dir():
        raise UserError(given, f"there is no folder {file.parent}", "give another file, or make the folder")
    if file.exists() and not file.is_file():
        raise UserError(given, "it is not a file that can be replaced", "give the name of a file")
    if why_not := why_not_writable(folder):
        raise UserError(given, f"it cannot be written ({why_not})", "choose another file")


def read_json(path: Path, *, most_bytes: int = 4 * 2**20) -> Any:
    """Parse a JSON file of at most `most_bytes`. Raises: UserError: missing, unreadable, too large, or not JSON."""
    try:
        return parse_json(read_text(path, most_bytes=most_bytes))
    except FileNotFoundError:
        raise UserError(f"{path}", "the file is missing") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}", f"it is not a readable JSON file ({why})") from None


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
