"""Which files a path means: a file, a saved dataset, a folder of files, a pattern.

Owns: that, in which order, and splits. Does not own: names of the hub (`meshlora_ground.hub`), reading (`sources.py`).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshlora.reading.data_files import is_folder, kind_of, parse_object
from meshlora.reading.records import listed, quoted
from meshlora_ground.errors import UserError, reason

KINDS = (".jsonl", ".json", ".csv", ".parquet")
_MOST = 100_000  # files of one path
# Words in names of files that say which split they are of, as `datasets` reads them.
_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


def places(source: Any) -> list[Any]:
    """Files and saved datasets, or a dataset in memory. Raises: UserError: a path, a pattern or a folder that names
    nothing to read; several splits."""
    if isinstance(source, (str, os.PathLike)):
        return files_of(source)
    if isinstance(source, (list, tuple)):
        if not source:
            raise UserError("source=[]", "names no file")
        return [place for path in source for place in files_of(path)]
    import datasets

    if isinstance(source, datasets.Dataset):
        return [source]
    if isinstance(source, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        ways = ", ".join(f"source[{key!r}]" for key in source)
        raise UserError("source", "holds several splits", f"give one: {ways}")
    raise UserError(f"source of type {type(source).__name__}", "must be a path, a list of paths or a datasets.Dataset")


def files_of(given: str | os.PathLike[str], split: str | None = None) -> list[Path]:
    """The files and saved datasets of a path, in order.

        files_of("data/*.jsonl.gz")
        files_of("a_saved_dataset_dict", "train")

    Raises:
        UserError: as `places`; a split where there is none of this name.
    """
    path = Path(given)
    if not os.path.lexists(path) and glob.has_magic(str(given)):
        found = sorted(Path(name) for name in glob.iglob(str(given), recursive=True) if os.path.isfile(name))
        if not found:
            raise UserError(f"{given}", "no file is of this pattern", "is this the path?")
        if not split:  # a pattern means all of its files, whatever their names say
            return found
        return _of_split(path, found, split)
    if not is_folder(path):
        if split is not None:
            raise UserError(f"{path} with split {split}", "a file has no splits", "leave it out")
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        if split not in splits:
            rule = "holds several splits" if split is None else f"has no split {quoted(split)}"
            ways = ", ".join(str(path / name) for name in splits[:20])
            raise UserError(f"{path}", rule, f"name one: {ways}")
        return [path / split]
    if (path / "state.json").exists():
        return [path]
    return _of_split(path, _data_files(path), split)


def _data_files(folder: Path) -> list[Path]:
    """The data files of a folder, and of its `data` folder, where repositories of datasets have them."""
    beside = folder / "data"
    inside = [*folder.iterdir()]
    if beside.is_dir() and not beside.samefile(folder):  # a link to itself would have each file twice
        inside += beside.iterdir()
    found = [path for path in sorted(inside) if kind_of(path) in KINDS and not path.name.startswith(".")]
    if not found:
        rule = f"is a folder that neither Dataset.save_to_disk wrote nor has files {', '.join(KINDS)}"
        raise UserError(f"{folder}", rule, f"it holds {_names(sorted(inside))}")
    if len(found) > _MOST:
        raise UserError(f"{folder}", f"has more than {_MOST:,} files", "put more into each")
    return found


def _of_split(given: Path, files: list[Path], split: str | None) -> list[Path]:
    """Those whose names say that they are of `split`; all, if no names say it of different ones."""
    by_word: dict[str, list[Path]] = {}
    for path in files:
        words = re.split(r"[\W_]+", path.stem.lower())
        for word in {_OF_WORD.get(word, word) for word in words}:  # once, if a name says it twice
            by_word.setdefault(word, []).append(path)
    if split is None:
        there = sorted(by_word.keys() & {*_OF_WORD.values()})
        if len(there) > 1:
            raise UserError(f"{given}", f"holds files of several splits, {', '.join(there)}", "say which with split:")
        return files
    found = by_word.get(_OF_WORD.get(split.lower(), split.lower()))
    if found is None:
        raise UserError(f"{given}", f"no file is of split {quoted(split)}", f"its files: {_names(files)}")
    return found


def _names(paths: list[Path]) -> str:
    return listed([path.name for path in paths]) or "nothing"


def check_saved(path: Path) -> None:
    """Check that `Dataset.save_to_disk` wrote a folder, and that it names no file outside itself. Raises: UserError."""
    try:
        state = parse_object((path / "state.json").read_text(encoding="utf-8"))
        names: Iterable[str] = [entry["filename"] for entry in state["_data_files"]]
        outside = [name for name in names if Path(name).name != name]
    except Exception as error:  # an untrusted file may hold anything
        raise UserError(f"{path}", f"cannot be read as a saved dataset ({reason(error)})") from error
    if outside:
        raise UserError(f"{path / 'state.json'}", f"names {quoted(outside[0])}, outside of its folder")
