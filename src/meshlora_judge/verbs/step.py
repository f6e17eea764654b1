"""`meshlora judge step FOLDER --model BASE`: is a recorded step the one of a single process?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(verbs: Any) -> None:
    step = verbs.add_parser(
        "step",
        help="replay recorded steps on one process, and say what differs",
        description="Replay recorded optimizer steps of any trainer by transformers and PEFT on one process. Exit "
        "code 0: gradients, clipping and updates are those of one process; 1: they are not, and why; 2: it cannot be "
        "replayed.",
    )
    step.add_argument("folder", metavar="FOLDER", help="what meshlora_judge.record wrote")
    step.add_argument("--model", metavar="PATH", help="the base that was trained on (default: as recorded)")
    step.add_argument("--json", metavar="FILE", help="write the verdict")
    step.add_argument("--junit", metavar="FILE", help="write the verdict as JUnit's XML, for a CI")
    step.set_defaults(run=_judge)


def _judge(options: argparse.Namespace) -> None:
    from meshlora_ground.console import Console
    from meshlora_ground.files import check_result_file

    for file in (options.json, options.junit):
        if file:
            check_result_file(Path(file), file)
    verdict = judged(Path(options.folder), options.model)
    conclude(verdict, Console(), json_file=options.json, junit_file=options.junit)


def judged(folder: Path, base: str | None) -> Any:
    """The verdict on what `folder` holds, with no progress bars. base: by default the one that it names."""
    import warnings

    from transformers.utils import logging

    from meshlora_ground.errors import UserError
    from meshlora_judge.recording.files import read_recordings
    from meshlora_judge.steps.judge import judge_steps

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # PEFT calls what is deprecated
    recordings = read_recordings(folder)
    base = base or recordings[0].base
    if not base:
        rule = "the model was not read from a checkpoint, so nothing says what its frozen weights are"
        raise UserError(f"{folder}", rule, "save the base before training, and give it by --model")
    return judge_steps(recordings, base)


def conclude(verdict: Any, console: Any, *, json_file: str | None, junit_file: str | None) -> None:
    """Write and show a verdict on steps. Raises: MeshloraError: it is refuted."""
    from meshlora_ground.errors import MeshloraError
    from meshlora_ground.files import write_json_atomically
    from meshlora_judge.junit import write_junit
    from meshlora_judge.steps.verdict import PHASES

    if json_file:
        write_json_atomically(Path(json_file), verdict.as_json())
    if junit_file:
        write_junit(verdict, Path(junit_file))
    rows = [*verdict.facts.items()]
    wrong = {finding.phase for finding in verdict.findings}
    for phase, words in PHASES.items():
        if phase in verdict.compared or phase in wrong:
            worst, limit, number = verdict.compared.get(phase, (0.0, 0.0, 0))
            said = "differs" if phase in wrong else "the same"
            if phase in ("gradient", "clipping", "update"):
                said += f", at most {worst:.1e} off in {number} comparisons (limit {limit:.0e})"
            rows.append((words, said))
    rows += [("note", note) for note in verdict.notes]
    for name, said in rows:
        console.say(f"{name:<35} {said}")
    if not verdict.is_proved:
        raise MeshloraError(verdict.paragraph())
    console.say("proved: the step of a single process")
