"""METEOR 1.5, by the Java program that pycocoevalcap ships.

Owns: whether it can run here, and talking to it. Does not own: tokens (`meshlora_extra.paper.scores`).
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from meshlora_ground.errors import MeshloraError

WAY_OUT = "METEOR needs Java and pip install 'meshlora[meteor]'"

_SEPARATOR = " ||| "


def meteor(hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> float | None:
    """METEOR of a corpus of tokens, in percent; None where it cannot run. Raises: MeshloraError: the program fails."""
    program = _program()
    if program is None:
        return None
    words = ["java", "-Xmx2G", "-jar", program.name, "-", "-", "-stdio", "-l", "en", "-norm"]
    with subprocess.Popen(
        words, cwd=program.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def answer(*parts: str) -> str:
            process.stdin.write(_SEPARATOR.join(parts) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return process.stdout.readline().strip()  # type: ignore[union-attr]

        try:
            counts = [
                answer("SCORE", *map(_line, own), _line(tokens))
                for tokens, own in zip(hypotheses, references, strict=True)
            ]
            answer("EVAL", *counts)  # of the first text; a line for each, and then that of all
            last = [process.stdout.readline().strip() for _ in counts][-1]
            return 100 * float(last)
        except (OSError, ValueError) as error:
            raise MeshloraError("METEOR: its Java program failed; does `java -version` work?") from error
        finally:
            process.kill()


def _program() -> Path | None:
    if shutil.which("java") is None or (package := importlib.util.find_spec("pycocoevalcap")) is None:
        return None
    found = [Path(place, "meteor", "meteor-1.5.jar") for place in package.submodule_search_locations or ()]
    return next((jar for jar in found if jar.is_file()), None)


def _line(tokens: Sequence[str]) -> str:
    """Without the separator of its protocol."""
    return " ".join(tokens).replace("|||", "")
