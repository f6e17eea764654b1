"""The judge in the CI of others: JUnit's XML, pytest's plugin, the GitHub Action."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshlora_judge.command import main
from meshlora_judge.junit import write_junit
from meshlora_judge.steps.verdict import Finding, Verdict
from tests.scripts import ROOT

EXAMPLES = ROOT / "examples" / "judge"
PYTEST = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "meshlora_judge.plugin", "-p", "no:cacheprovider"]

# A model of one parameter, whose recording is replaced by a verdict that the test gives.
JUDGED = """
import pytest, meshlora_judge.verbs.step
from meshlora_judge.steps.verdict import Finding, Verdict

wrong = Finding(0, "gradient", "zero", "it is zero", ("q_proj.lora_A",), (1,))
verdicts = {"right": Verdict(facts={"processes": "2"}), "wrong": Verdict([wrong])}
meshlora_judge.verbs.step.judged = lambda folder, base: verdicts[base]

@pytest.mark.judged
def test_right(judge_step):
    assert judge_step.verdict(judge_step.folder, "right").is_proved

@pytest.mark.judged
def test_wrong(judge_step):
    judge_step.verdict(judge_step.folder, "wrong")

@pytest.mark.judged
def test_nothing(judge_step):
    pass

def test_plain(judge_step):
    judge_step.verdict(judge_step.folder, "right")
"""


def _verdict() -> Verdict:
    verdict = Verdict(facts={"processes": "2"}, notes=["dropout \x1b is off"])
    verdict.compare("gradient", 0.5, 1e-5)
    verdict.compare("update", 0.0, 1e-5)
    found = Finding(1, "gradient", "zero", "it is <zero>", ("q_proj.lora_A",), (1,))
    verdict.findings += [found, Finding(1, "rows", "same rows", "they are alike")]
    return verdict


def test_junit_has_a_testcase_for_each_phase_and_its_failures(tmp_path: Path) -> None:
    write_junit(_verdict(), tmp_path / "found.xml")
    root = ElementTree.fromstring((tmp_path / "found.xml").read_bytes())
    cases = {case.get("name"): case.find("failure") for case in root.iter("testcase")}
    assert (root.get("tests"), root.get("failures")) == ("3", "2")
    assert {name: failure is not None for name, failure in cases.items()} == {
        "each rank's rows are its own": True,
        "gradients before clipping": True,
        "what the optimizer changed": False,
    }
    failure: Any = cases["gradients before clipping"]
    assert failure.get("type") == "zero"
    assert failure.text == "step 2, gradients of q_proj.lora_A on rank 1: it is <zero>"
    assert [each.get("value") for each in root.iter("property")] == ["2", r"dropout \x1b is off"]


def test_the_plugin_imports_nothing_until_it_is_asked(tmp_path: Path) -> None:
    code = "import sys, meshlora_judge.plugin; print({'torch', 'transformers', 'peft', 'pytest'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_the_fixture_fails_with_the_paragraph_and_the_mark_labels_junit(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(JUDGED)
    arguments = [
        "--strict-markers",
        "-W",
        "error",
        "--rootdir",
        str(tmp_path),
        "--junit-xml",
        "found.xml",
        "test_it.py",
    ]
    done = subprocess.run([*PYTEST, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "refuted: step 1, gradients of q_proj.lora_A on rank 1: it is zero" in done.stdout, done.stdout
    assert "it is marked as judged, and judged no step" in done.stdout
    assert "1 failed, 3 passed, 1 error" in done.stdout
    root = ElementTree.fromstring((tmp_path / "found.xml").read_bytes())
    labels = {}
    for case in root.iter("testcase"):
        labels[case.get("name")] = {each.get("name"): each.get("value") for each in case.iter("property")}
    assert labels["test_right"] == {"judge.proved": "True", "judge.processes": "2"}
    assert labels["test_wrong"]["judge.proved"] == "False"
    assert labels["test_plain"] == {}


def test_both_distributions_have_the_plugin() -> None:
    for folder in (ROOT, ROOT / "distributions" / "judge"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["entry-points"]["pytest11"] == {"meshlora_judge.plugin": "meshlora_judge.plugin"}


def test_the_action_runs_a_command_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    action = yaml.safe_load((EXAMPLES / "action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    line = next(step for step in action["runs"]["steps"] if "meshlora-judge run" in step.get("run", ""))
    # What a user gives comes from the environment: as text of the script it could be another script.
    assert not any("${{" in step.get("run", "") for step in action["runs"]["steps"])
    assert {value.strip("${} ") for value in line["env"].values()} == {f"inputs.{name}" for name in action["inputs"]}
    words = shlex.split(
        line["run"].replace("$STEPS", "3").replace("$OPTIONS", "--no-twin").replace("$COMMAND", "true x")
    )
    seen: list[Any] = []
    monkeypatch.setattr("meshlora_judge.verbs.run._run", seen.append)
    assert main(words[1:]) == 0
    assert (seen[0].steps, seen[0].no_twin, seen[0].junit) == (3, True, "judge.xml")
    assert seen[0].cmd[-2:] == ["true", "x"]
    uploaded = next(step["with"]["path"] for step in action["runs"]["steps"] if "upload" in step.get("uses", ""))
    assert uploaded.split() == [seen[0].junit, seen[0].json]


def test_the_workflow_gives_the_action_what_it_takes() -> None:
    action = yaml.safe_load((EXAMPLES / "action.yml").read_text())
    jobs = yaml.safe_load((EXAMPLES / "workflow.yml").read_text())["jobs"]
    given = next(step["with"] for step in jobs["recipe"]["steps"] if "actions/judge" in step.get("uses", ""))
    assert given.keys() <= action["inputs"].keys()


@pytest.mark.long
def test_examples_of_maintainers_tests_pass() -> None:
    """On two ranks each, by the plugin alone; with the options of their repository, not of ours."""
    options = ["-o", "addopts=", "-o", "filterwarnings=default", "--strict-markers", "-m", "judged", str(EXAMPLES)]
    done = subprocess.run([*PYTEST, *options], capture_output=True, text=True, timeout=300, cwd=EXAMPLES)
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout
