"""A verdict as JUnit's XML, which every CI shows: one testcase for each phase that was compared or is wrong."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from meshlora_ground.errors import printable
from meshlora_ground.files import write_atomically
from meshlora_judge.steps.verdict import PHASES, Verdict

_SUITE = "meshlora judge"


def write_junit(verdict: Verdict, file: Path) -> None:
    """Write or replace `file`. Facts and notes are properties of the suite."""
    cases = []
    for phase, words in PHASES.items():
        wrong = [finding for finding in verdict.findings if finding.phase == phase]
        if not wrong and phase not in verdict.compared:
            continue
        case = ElementTree.Element("testcase", classname=_SUITE, name=words)
        if wrong:
            failure = ElementTree.SubElement(case, "failure", message=_text(wrong[0]), type=wrong[0].cause)
            failure.text = "\n".join(map(_text, wrong))
        cases.append((case, bool(wrong)))
    failed = sum(is_wrong for _, is_wrong in cases)
    root = ElementTree.Element("testsuite", name=_SUITE, tests=f"{len(cases)}", failures=f"{failed}", errors="0")
    properties = ElementTree.SubElement(root, "properties")
    for name, value in (*verdict.facts.items(), *(("note", note) for note in verdict.notes)):
        ElementTree.SubElement(properties, "property", name=name, value=_text(value))
    root.extend(case for case, _ in cases)
    content = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    write_atomically(file, lambda temporary: temporary.write_bytes(content))


def _text(value: object) -> str:
    return printable(f"{value}")  # XML has no control characters
