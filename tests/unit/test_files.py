"""Files and folders that appear whole or not at all: what a failed write leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshlora_ground.files import new_folder, write_atomically, write_text_atomically


@pytest.mark.parametrize("before", [{}, {"file.json": "old"}])
def test_a_failed_write_leaves_what_was_there(before: dict[str, str], tmp_path: Path) -> None:
    for name, text in before.items():
        (tmp_path / name).write_text(text)

    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "file.json", write)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before


def test_a_failed_folder_leaves_what_was_there(tmp_path: Path) -> None:
    with new_folder(tmp_path / "saved") as folder:
        write_text_atomically(folder / "whole", "first")
    with pytest.raises(OSError, match="No space"), new_folder(tmp_path / "saved") as folder:  # noqa: PT012 - what comes before the failure is the point
        write_text_atomically(folder / "whole", "second")
        raise OSError(28, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert [(file.name, file.read_text()) for file in (tmp_path / "saved").iterdir()] == [("whole", "first")]
