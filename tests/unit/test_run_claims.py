"""Every script is run by something that somebody runs, and what runs them says what failed, hung or may not be here."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.conftest import _not_of_slice
from tests.processes import wait_until
from tests.scripts import ROOT, load_script

SCRIPTS = ROOT / "scripts"
# Script -> who runs it, where `make claims` does not.
ELSEWHERE = {
    "describe_house.py": "Makefile",
    "floor.py": "Makefile",
    "gpu_campaign.py": "scripts/prove_on_gpu.py",
    "gpu_results.py": "scripts/prove_on_gpu.py",
    "proof_slice.py": "Makefile",
    "run_claims.py": "Makefile",
    "search_site.py": "Makefile",
    "set_up.sh": "Makefile",
    "site_hook.py": "mkdocs.yml",
    "try_wheel.py": "Makefile",  # gigabytes of an empty environment: make test-wheel, at night
    "write_coming_from.py": "tests/unit/test_aliases.py",
    "write_schema.py": "tests/unit/test_schema.py",
}


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    made: ModuleType = load_script("run_claims")
    return made


def test_no_script_is_there_that_nobody_runs(claims: ModuleType) -> None:
    """chaos.py had not run for weeks, and ended in 3 of 10."""
    first = [Path(claim.words.split()[0]) for claim in claims.CLAIMS.values()]
    of_claims = {path.name for path in first if path.parent.name == "scripts"}
    there = {file.name for file in SCRIPTS.iterdir() if file.suffix in (".py", ".sh")}
    text = "".join(file.read_text("utf-8") for file in SCRIPTS.glob("*.py"))
    of_others = {name for name in there if re.search(rf"^(from|import) {Path(name).stem}\b", text, re.MULTILINE)}
    assert there - of_others <= of_claims | ELSEWHERE.keys(), "nobody runs it: name it in CLAIMS of run_claims.py"
    assert of_claims | ELSEWHERE.keys() <= there
    for script, who in ELSEWHERE.items():
        assert Path(script).stem in (ROOT / who).read_text("utf-8"), f"{who} does not run {script}"


def test_ci_runs_the_claims_and_a_slice_of_the_proofs() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target, script in {"claims": "scripts/run_claims.py", "proof-slice": "scripts/proof_slice.py"}.items():
        assert f"\nmake {target}" in (ROOT / ".ci" / "run").read_text("utf-8")
        assert script in makefile.partition(f"\n{target}:")[2].partition("\n\n")[0]


@pytest.mark.long
def test_one_that_fails_or_hangs_ends_no_other_and_is_named(
    claims: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def says(code: str, **options: Any) -> Any:
        return claims.Claim(f"-c {shlex.quote(code)}", **options)

    # Its child, which holds the output open, is in the same process group.
    hangs = (
        f"import subprocess; subprocess.run(['sh', '-c', 'echo $$ > {tmp_path}/pid; trap : INT; sleep 60; sleep 60'])"
    )
    refuses = "import sys; print('error: no namespaces'); sys.exit(2)"
    made = {
        "holds": says("print('turn', {turn}, {tenth}); print(3)", is_timed=True),
        "hangs": says(hangs),
        "fails": says("raise SystemExit('error: 7 of 8')"),
        "may refuse": says(refuses, may_refuse=True),
        "may not": says(refuses),
        "other words": says("print('0 ready, 1 refused')", says="1 ready"),
    }
    monkeypatch.setattr(claims, "CLAIMS", made)
    monkeypatch.setattr(claims, "LIMIT_S", 2.0)
    monkeypatch.setattr(claims, "ENDING_S", 1.0)
    assert claims.main(["--turn", "27"]) == 1
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == "claims in small, turn 27 (--turn)"
    ends = [(line[:8].strip(), line.partition(" s  ")[2]) for line in lines]
    assert ends == [
        ("holds", "holds: 3"),
        ("FAILED", "hangs: it had not ended after 2 s"),
        ("FAILED", "fails: error: 7 of 8"),
        ("not here", "may refuse: error: no namespaces"),
        ("FAILED", "may not: error: no namespaces"),
        ("FAILED", "other words: 0 ready, 1 refused"),
    ]
    assert last.endswith("failed: hangs, fails, may not, other words")
    child = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}")
    wait_until(lambda: not child.exists(), timeout_s=10.0)  # killed, and somebody else's to bury


def _git(folder: Path, *words: str) -> None:
    own = ("-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)


def test_turn_is_the_number_of_commits_or_says_what_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shallow clone it would be that of slice 1 for ever."""
    script = load_script("proof_slice")
    whole, shallow, none = (tmp_path / name for name in ("whole", "shallow", "none"))
    for folder in (whole, none):
        folder.mkdir()
    _git(whole, "init", "-q")
    for message in ("one", "two", "three"):
        _git(whole, "commit", "-q", "--allow-empty", "-m", message)
    _git(tmp_path, "clone", "-q", "--depth", "1", whole.as_uri(), "shallow")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    found = {}
    for folder in (whole, shallow, none):
        monkeypatch.setattr(script, "ROOT", folder)
        found[folder.name] = script.turn()
    assert found["whole"][0] == 3
    assert found["whole"][1].endswith(", number 3")
    assert found["shallow"][0] > 3
    assert "shallow" in found["shallow"][1]
    assert "no git" in found["none"][1]


def test_each_marked_test_is_in_one_slice_and_stays_there() -> None:
    def marked(file: str, number: int) -> list[Any]:
        return [SimpleNamespace(location=(file, 0, ""), nodeid=f"{file}::test[{n}]") for n in range(number)]

    def slices(items: list[Any]) -> dict[str, int]:
        out = {n: {item.nodeid for item in _not_of_slice(items, f"{n}/40")} for n in range(40)}
        inside = [(item.nodeid, n) for item in items for n in range(40) if item.nodeid not in out[n]]
        assert Counter(name for name, _ in inside).keys() == {item.nodeid for item in items}
        assert len(inside) == len(items), "a test is in two slices"
        return dict(inside)

    items = [*marked("tests/a.py", 400), *marked("tests/b.py", 5)]
    before, after = slices(items), slices([*items[7:], *marked("tests/c.py", 30)])
    assert {name: number for name, number in after.items() if name in before}.items() <= before.items()
    assert len({before[item.nodeid] for item in items[-5:]}) == 1, "they share what they need"
    assert len(set(before.values())) == 40
