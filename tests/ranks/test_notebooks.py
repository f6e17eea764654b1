"""The notebooks of examples/notebooks run from the first cell to the last, and store no outputs."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

from tests.scripts import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_stores_no_outputs_and_its_cells_are_python(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) >= 4
    assert not [cell for cell in cells if cell.outputs or cell.execution_count]
    for cell in cells:
        ast.parse(cell.source)


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of the examples, so that nothing is left in the clone."""
    from nbclient import NotebookClient

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(file, as_version=4)
    place = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=600, startup_timeout=300, kernel_name="python3", resources=place).execute()
    assert [cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
