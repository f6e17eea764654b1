"""pytest's plugin of the judge: the fixture `judge_step`, and the mark `judged`.

    def test_my_trainer(judge_step):
        with judge_step(model, base="folder/of/the/base") as step:
            ...  # one optimizer step, as the trainer makes it

Nothing is imported before a test asks for it, pytest included: installing the judge slows no test suite down.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MARK = (
    "judged: the test proves a trainer's step by meshlora_judge; facts of the verdict become properties in JUnit's XML"
)


def pytest_configure(config: Any) -> None:
    """Called by pytest."""
    config.addinivalue_line("markers", _MARK)
    config.pluginmanager.register(_fixtures(), "meshlora_judge fixtures")


class JudgeStep:
    """What a test is given.

    Attributes:
        folder: where ranks that the test starts record to, by `meshlora_judge.record(model, folder)`.
    """

    def __init__(self, folder: Path, properties: list[tuple[str, object]]) -> None:
        self.folder = folder
        self.verdicts: list[Any] = []
        self._properties = properties

    @contextmanager
    def __call__(self, subject: Any, *, base: str | Path, steps: int = 1, loss: Any = None) -> Iterator[Any]:
        """Record the block's optimizer steps of a model or Trainer in this process; then they must be proved."""
        from meshlora_judge import record

        with record(subject, self.folder, steps=steps, loss=loss) as recorder:
            yield recorder
        self.verdict(self.folder, base)

    def verdict(self, folder: str | Path, base: str | Path) -> Any:
        """The verdict on what all ranks recorded in `folder`. The test fails with its paragraph if it is refuted."""
        import pytest

        from meshlora_judge.verbs.step import judged

        found = judged(Path(folder), str(base))
        self.verdicts.append(found)
        self._properties.append(("judge.proved", found.is_proved))
        self._properties += [(f"judge.{name}", value) for name, value in found.facts.items()]
        if not found.is_proved:
            pytest.fail(found.paragraph(), pytrace=False)
        return found


def _fixtures() -> Any:
    import pytest

    class Fixtures:
        @pytest.fixture
        def judge_step(self, request: Any, tmp_path: Path) -> Iterator[JudgeStep]:
            """Record and judge a step: `with judge_step(model, base=FOLDER): ...`"""
            is_marked = request.node.get_closest_marker("judged") is not None
            # As record_property does, which warns in pytest's default family of JUnit's XML.
            step = JudgeStep(tmp_path / "recorded", request.node.user_properties if is_marked else [])
            yield step
            if is_marked and not step.verdicts:
                pytest.fail("it is marked as judged, and judged no step", pytrace=False)

    return Fixtures()
