"""What the wheel asks for is what its code imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from meshlora_ground.versions import OWN
from tests.judge_alone import PACKAGES
from tests.scripts import ROOT

# Named in `train.track` by those who have them; and what comes with torch for GPUs.
BY_THEIR_OWN_NAME = {"wandb", "mlflow", "trackio", "triton"}


# What imports a package that nobody has to have: it is imported only where that is there.
_OURS = ("loss", "stream", "tail")
_OF_FLOAT8 = ("quantized/float8_kernels.py", "quantized/float8_block_kernels.py")
_KERNELS = (*(f"kernels/{name}_kernels.py" for name in _OURS), *_OF_FLOAT8)
WHERE_IT_IS = {(f"src/meshlora/wings/{file}", "triton") for file in _KERNELS}

# The distribution of the judge alone.
JUDGE = "distributions/judge"


def _project(folder: str = ".") -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"])


def _names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(words).name) for words in requirements}


def _imports(file: Path) -> set[tuple[str, bool]]:
    """(package, whether importing the file imports it) of all imports, `importlib.import_module("NAME")` included."""
    tree = ast.parse(file.read_text("utf-8"))
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and re.search(r"\bimport_module$", ast.unparse(node.func)):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        found |= {(name.partition(".")[0], node in tree.body) for name in names}
    return {(name, is_always) for name, is_always in found if name not in {*sys.stdlib_module_names, *OWN}}


def test_every_extra_is_on_the_page_of_installation() -> None:
    page = (ROOT / "docs/install.md").read_text("utf-8")
    rows = [line.partition("|")[2].partition("|")[0] for line in page.splitlines()]
    for extra in _project()["optional-dependencies"]:
        assert any(f"`{extra}`" in row for row in rows), f"docs/install.md does not name the extra {extra}"


def test_every_import_is_declared() -> None:
    assert not _undeclared(".", (ROOT / "src").rglob("*.py"))


def test_every_import_of_the_judge_is_declared_where_it_is_alone() -> None:
    files = [file for package in PACKAGES for file in (ROOT / "src" / package).rglob("*.py")]
    assert not _undeclared(JUDGE, files)
    whole = {*_project()["dependencies"], *_project()["optional-dependencies"]["quantization"]}
    alone = _project(JUDGE)
    assert {*alone["dependencies"], *alone["optional-dependencies"]["quantization"]} <= whole


def test_the_distribution_of_the_judge_has_every_file_of_it() -> None:
    """Setuptools finds no packages outside of the folder of a pyproject: they are listed."""
    given, whole = (
        tomllib.loads((ROOT / f / "pyproject.toml").read_text())["tool"]["setuptools"] for f in (JUDGE, ".")
    )
    folders = {file.parent for package in PACKAGES for file in (ROOT / "src" / package).rglob("*.py")}
    assert {*given["packages"]} == {".".join(folder.relative_to(ROOT / "src").parts) for folder in folders}
    assert given["package-data"] == {
        name: whole["package-data"][name] for name in PACKAGES if name in whole["package-data"]
    }


def _undeclared(folder: str, files: Iterable[Path]) -> list[str]:
    """What `files` import that the project in `folder` does not declare."""
    project = _project(folder)
    needed = _names(project["dependencies"])
    optional = _names([words for extra in project["optional-dependencies"].values() for words in extra])
    distributions = metadata.packages_distributions()
    missing = []
    for file in files:
        for name, is_always in _imports(file):
            if (f"{file.relative_to(ROOT)}", name) in WHERE_IT_IS:
                continue
            owners = {canonicalize_name(owner) for owner in distributions.get(name, [name])}
            if not owners & (needed if is_always else needed | optional | BY_THEIR_OWN_NAME):
                missing.append(f"{file.relative_to(ROOT)}: {name}")
    return missing


def test_the_pinned_versions_are_in_the_declared_ranges() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    versions = {canonicalize_name(name): version for name, version in pinned.items()}
    project = _project()
    for words in [*project["dependencies"], *(x for extra in project["optional-dependencies"].values() for x in extra)]:
        requirement = Requirement(words)
        if version := versions.get(canonicalize_name(requirement.name)):
            assert requirement.specifier.contains(version), words


def test_every_place_has_the_same_version() -> None:
    version = re.escape(_project()["version"])
    for name, line in (
        ("src/meshlora/__init__.py", f'^__version__ = "{version}"$'),
        (f"{JUDGE}/pyproject.toml", f'^version = "{version}"$'),
        ("CITATION.cff", f"^version: {version}$"),
        ("CHANGELOG.md", f"^## {version}\\b"),
    ):
        assert re.search(line, (ROOT / name).read_text(), re.MULTILINE), name


def test_workflows_run_what_a_contributor_runs() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            for step in job["steps"]:
                words = step.get("run", "").split()
                if words[:1] == ["make"]:
                    called |= set(matrix["target"] if "matrix.target" in step["run"] else words[1:2])
    assert {"test", "docs", "proof", "test-wheel", "test-vllm"} <= called
    assert called <= targets
