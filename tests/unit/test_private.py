"""Who is believed: folders and files that somebody else can have written are not."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshlora_ground.errors import UserError
from meshlora_ground.private import NotOwnError, PrivateFolder, check_tree, close_tree, open_own


@pytest.fixture(autouse=True)
def _umask_that_hides_nothing() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def private(path: Path) -> PrivateFolder:
    return PrivateFolder(path, f"cache_dir={path}", "choose another folder")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on all files are another user's."""
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)


def test_folders_and_files_are_made_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o755)
    private(tmp_path / "there" / "new" / "cache").write("file", b"content")
    assert mode(tmp_path / "there") == 0o755
    assert mode(tmp_path / "there" / "new") == mode(tmp_path / "there" / "new" / "cache") == 0o700
    assert mode(tmp_path / "there" / "new" / "cache" / "file") == 0o600


@pytest.mark.parametrize("bits", [0o777, 0o1777, 0o770, 0o702])
def test_folder_that_others_can_write_is_refused_with_the_way_out(tmp_path: Path, bits: int) -> None:
    folder = tmp_path / "a cache"
    folder.mkdir(mode=0o700)
    folder.chmod(bits)
    with pytest.raises(UserError) as caught:
        private(folder).make()
    assert str(caught.value) == (
        f"cache_dir={folder}: others can write it (mode {bits:04o}), so nothing in it is believed; "
        f"chmod go-w '{folder}', or choose another folder"
    )
    folder.chmod(bits & ~0o022)  # what the message says
    private(folder).make()


def test_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    somebody_else(monkeypatch)
    with pytest.raises(UserError, match=r"it belongs to .*uid \d+.*, so nothing in it is believed; move it away, or"):
        private(tmp_path).make()


def test_folder_of_an_older_version_and_a_link_to_ones_own_are_used(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "old")
    private(tmp_path / "link").make()
    (tmp_path / "old" / "file").write_bytes(b"content")
    (tmp_path / "old" / "file").chmod(0o644)
    with open_own(tmp_path / "link" / "file") as file:
        assert file.read() == b"content"


def _link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


NOT_OWN: dict[str, tuple[Callable[[Path], object], str]] = {
    "writable by all": (lambda file: file.chmod(0o606), "others can write it (mode 0606)"),
    "writable by the group": (lambda file: file.chmod(0o660), "others can write it (mode 0660)"),
    "in a folder that others can write": (lambda file: file.parent.chmod(0o777), "others can write it (mode 0777)"),
    "a link": (_link, "it is a symbolic link"),
    "a pipe": (_pipe, "it is neither a file nor a folder"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    private(tmp_path / "cache").write("file", b"content")
    return tmp_path / "cache" / "file"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", list(NOT_OWN))
def test_file_that_somebody_else_can_have_written_is_not_opened(file: Path, kind: str) -> None:
    make, words = NOT_OWN[kind]
    make(file)
    with pytest.raises(NotOwnError) as caught:
        open_own(file)
    assert words in str(caught.value)


def test_file_of_somebody_else_is_not_opened(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = (os.geteuid() + 1, os.getegid())
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        return os.stat_result([*real(descriptor)[:4], *others, *real(descriptor)[6:]])

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(NotOwnError, match=r"file: it belongs to .*uid"):
        open_own(file)


def test_file_that_is_exchanged_after_it_was_opened_is_judged_by_what_was_opened(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.chmod(0o666)
    real = os.open

    def open_and_exchange(path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = real(path, flags, mode)
        monkeypatch.setattr(os, "open", real)
        private(file.parent).write(file.name, b"fine")
        return descriptor

    monkeypatch.setattr(os, "open", open_and_exchange)
    with pytest.raises(NotOwnError, match="others can write it"):
        open_own(file)


@pytest.mark.parametrize("kind", ["writable by all", "writable by the group", "a link", "a pipe"])
def test_one_file_that_somebody_else_can_have_written_spoils_a_folder(file: Path, kind: str) -> None:
    check_tree(file.parents[1])
    NOT_OWN[kind][0](file)
    with pytest.raises(NotOwnError) as caught:
        check_tree(file.parents[1])
    assert NOT_OWN[kind][1] in str(caught.value)


def test_what_a_library_wrote_for_all_is_closed(tmp_path: Path) -> None:
    (tmp_path / "new" / "model").mkdir(parents=True)
    (tmp_path / "new" / "model" / "config.json").touch(mode=0o666)
    with pytest.raises(NotOwnError):
        check_tree(tmp_path / "new")
    close_tree(tmp_path / "new")
    check_tree(tmp_path / "new")
    assert mode(tmp_path / "new") == mode(tmp_path / "new" / "model") == 0o700
    assert mode(tmp_path / "new" / "model" / "config.json") == 0o600
