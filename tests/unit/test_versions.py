"""Versions: those of the installed distributions, or of what is on the path without metadata."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshlora
from meshlora_ground.versions import COMPUTING, own_files, version_of, versions


@pytest.fixture
def no_metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", missing)
        version_of.cache_clear()
        yield
    version_of.cache_clear()


def test_without_metadata_a_version_is_that_of_the_module(no_metadata: None) -> None:
    found = versions()
    assert found["meshlora"] == meshlora.__version__
    assert all(found[name] == sys.modules[name].__version__ for name in COMPUTING)


def test_a_module_without_a_version_is_not_a_missing_one(
    no_metadata: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_kernels.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert version_of("some-kernels") == "unknown"
    assert version_of("no-kernels") == ""


def test_only_one_file_asks_for_metadata() -> None:
    asking = [file.name for file in own_files() if "importlib.metadata" in file.read_text()]
    assert asking == ["extras.py", "versions.py"]  # what other packages add is asked of metadata, too
