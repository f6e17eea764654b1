"""The commands that pages show: found, cleaned, and what is known of each without running it.

Owns: which lines and which words in backquotes are commands; which test runs one, or why none does. Does not own: the
tests (`tests/unit/test_commands_of_pages.py`).
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.scripts import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PROGRAMS = r"(?:\.venv/bin/)?(?:meshlora|python3?|pip|pytest)|make|torchrun|mpirun|srun|accelerate|scripts/\w+\.\w+"
_COMMAND = re.compile(rf"(?:\$ )?((?:[A-Z][A-Z_]*=\S+ )*(?:~/\w+/bin/)?(?:{PROGRAMS}) .*)")
# A comment, another program behind it, or words of the page in brackets at the end of the line.
_REST = re.compile(r"(?:\s+#\s.*|\s+(?:\||&&|>)\s.*|;\s.*|\s{2,}\(.*|\s+\[-.*)$")

# (pattern of a command, the test that runs it, or why none does), the first that matches.
_HERE, _READERS = "tests/unit/test_commands_of_pages.py", "files of the reader's own"
RUN_BY: list[tuple[str, str]] = [
    (r"examples/own_loop\.py", "tests/ranks/test_own_loop.py"),
    (r"examples/real_model\.py", "tests/ranks/test_real_model.py"),
    (r"meshlora verify .*--family [a-z]\w+ .*--mutation all", "minutes; tests/verify/test_mutations.py puts them in"),
    (r"meshlora verify .*--family [a-z]\w+", _HERE),
    (r"meshlora plan --model examples/.* --gpus T ", "a letter for a number"),
    (r"meshlora plan --model examples/.*16384", "minutes: tests/extra/test_planner.py has a tenth of it"),
    (r"meshlora plan --model examples/", _HERE),
    (r"meshlora import ", "tests/extra/test_import.py, of recipes of its own"),
    (r"meshlora init$", "it asks questions: tests/extra/test_init.py answers them"),
    (r"meshlora [a-z-]+ .*examples/(?!tiny_base --adapter A)|python examples/make_", _HERE),
    (r"meshlora judge run -- ", "tests/judged/test_run.py runs scripts of its own"),
    (r"meshlora judge step seen --model BASE", "tests/judged/test_loops.py, of recordings of its own"),
    (r"meshlora plot runs/lr-", "tests/extra/test_plot.py"),
    (r"meshlora launch-script", "tests/unit/test_launch_script.py"),
    (r"meshlora calibrate", "tests/extra/test_calibrate_ranks.py"),
    (r"meshlora .*(run\.yaml|RUN|runs\b|MODEL|FOLDER|ADAPTER|examples/tiny_base|--model M\b|--help)", _READERS),
    (r"meshlora verify ", _READERS),
    (r"\bpytest\b", "it runs tests"),
    (r"^make ", "it runs tests, programs of this table or the set-up"),
    (r"benchmarks/", "minutes to hours; tests/ranks/test_benchmarks.py runs each in small"),
    (r"scripts/describe_house", "make house"),
    (
        r"scripts/(prove_|keep_plans|gate_|chaos|try_peers|generate_faults|judge_trials|judge_gallery|import_against|same_adapter|two_nodes)",
        "minutes to hours; make claims, each in small",
    ),
    (r"scripts/(run_claims|proof_slice)", "make claims, make proof-slice"),
    (r"\bpip\d? |^python3 -m venv", "it installs"),
    (r"examples/launch/", "it needs a cluster of Ray"),
]


@dataclass(frozen=True)
class Command:
    page: str
    words: tuple[str, ...]
    is_whole: bool  # a line of its own; else words in backquotes, which may leave out arguments
    error: str = ""  # the message that the page shows below it

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def run_by(self) -> str | None:
        """The test that runs it, or why none does; None: nobody has said."""
        if self.page == "docs/tutorial.md":
            return "tests/ranks/test_tutorial.py"
        return next((who for pattern, who in RUN_BY if re.search(pattern, self.text)), None)


def commands() -> Iterator[Command]:
    """Every command of every page, in order."""
    for page in PAGES:
        name, text = str(page.relative_to(ROOT)), page.read_text("utf-8")
        for block in _blocks(text):
            lines = block.replace("\\\n", " ").splitlines()
            for line, below in itertools.pairwise([*lines, ""]):
                if (match := _COMMAND.match(line.strip())) and (words := _split(match[1])):
                    error = below.strip() if below.strip().startswith("error: ") else ""
                    yield Command(name, words, is_whole=True, error=error)
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for inline in re.findall(r"`([^`\n]+)`", prose):
            if (match := _COMMAND.fullmatch(inline)) and (words := _split(match[1])):
                yield Command(name, words, is_whole=False)


def _blocks(text: str) -> Iterator[str]:
    """What stands between fences but files, and lines that four spaces make code."""
    for words, block in re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if "title=" not in words:
            yield block
    yield "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))


def _split(text: str) -> tuple[str, ...]:
    """The words of a command; none where it is not one, but a sentence."""
    text = _REST.sub("", text)
    if text.count("'") % 2:  # it goes on in the next line
        text += "'"
    try:
        return tuple(shlex.split(text))
    except ValueError:
        return ()


def words_of_meshlora(words: tuple[str, ...]) -> list[str] | None:
    """The arguments of meshlora in a command, whoever starts it; None where it is another program."""
    for place, word in enumerate(words):
        if Path(word).name == "meshlora" and (place == 0 or words[place - 1] == "-m" or words[0] in ("mpirun", "srun")):
            return list(words[place + 1 :])
    return None
