"""`meshlora verify`: run a proof, print and write its result, and raise if it fails."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path

from rich.text import Text

from meshlora.run.launch import signals_end_what_was_started
from meshlora.verify.faults.registry import MUTATIONS, find
from meshlora.verify.options import DEFAULT_LORA, Request
from meshlora.verify.proof import Outcome, Processes, run_proof
from meshlora.verify.report.document import document, is_proved
from meshlora.verify.report.show import show
from meshlora.verify.request import Proof, prepare_proof
from meshlora.wings.proved.families import proof_of_family
from meshlora_ground.console import Console
from meshlora_ground.errors import MeshloraError, UserError
from meshlora_ground.files import check_result_file, write_json_atomically
from meshlora_ground.proof_records import remember, usable_cache
from meshlora_judge.report.page import write_report

# Columns of output to a pipe or a file, where folding lines gains nothing.
_WIDTH_OF_FILES = 200


class NotProvedError(MeshloraError):
    """Ours differs from the reference, or a deliberate fault survived."""


def verify(
    request: Request,
    *,
    command: str,
    json_file: str | None = None,
    html_file: str | None = None,
    plan_file: str | None = None,
    console: Console | None = None,
) -> None:
    """Prove `request`; the result goes to the terminal and to the given files.

    Raises:
        UserError: the request is wrong or refused. NotProvedError: something differs, or a mutation survived.
        MeshloraError: no verdict, as a rank died, or a file could not be written; KeyboardInterrupt.
    """
    console = console or _console()
    started = time.perf_counter()
    _check_files(json_file, html_file)
    if plan_file is not None:
        check_result_file(Path(plan_file), f"--save {plan_file}")
    proof = prepare_proof(request)
    if plan_file is not None and not proof.found:
        rule = f"the plan of {proof.case.model_type} is in a table of meshlora or transformers, and none was found"
        raise UserError(f"--save {plan_file}", rule, "leave out --save")
    _check_mutations(proof)
    for note in proof.notes:
        console.say(note)
    with signals_end_what_was_started(), usable_cache(request.cache_dir) as (cache_dir, why_not):
        if why_not:
            console.say(f"the reference is not kept for the next proof: {why_not}")
        proof = dataclasses.replace(proof, request=dataclasses.replace(request, cache_dir=cache_dir))
        outcomes = _run(proof, console)
    show(console, proof, outcomes)
    seconds = time.perf_counter() - started
    describe = functools.partial(document, proof, outcomes, command=command, seconds=seconds)
    files: dict[str, Callable[[Path], None]] = {}
    if json_file is not None:
        files[json_file] = lambda file: write_json_atomically(file, describe())
    if html_file is not None:
        files[html_file] = lambda file: write_report(describe(details=True), file)
    problems = {name: problem for name, write in files.items() if (problem := _write(name, write))}
    if html_file is not None and html_file not in problems:
        console.say(f"report: {html_file}")
    if not is_proved(outcomes):
        console.say(f"not proved, in {seconds:.0f} s")
        raise NotProvedError("; ".join([_what_differs(outcomes), *problems.values()]))
    console.say(f"proved in {seconds:.0f} s")
    if plan_file is not None:
        Path(plan_file).write_text(proof.found, encoding="utf-8")
        console.say(f"plan: {plan_file}; give it to a run by model.plan")
    if not why_not and (kept := _remember_family(proof)):
        console.say(f"not remembered for `meshlora.load`: {kept}")
    if problems:
        raise MeshloraError("; ".join(problems.values()))


def _remember_family(proof: Proof) -> str:
    """Record for `meshlora.load` that a family is proved with these libraries; returns why that failed, or "".

    Only for a whole family with the default adapter and sizes, in float64.
    """
    request = proof.request
    if request.family is None or request.overrides or request.dtype != "float64" or request.lora != DEFAULT_LORA:
        return ""
    wholes = [proof_of_family(request.family, topology) for topology in proof.topologies]
    return next(filter(None, (remember(request.cache_dir, asked, {}) for asked in wholes)), "")


def _run(proof: Proof, console: Console) -> list[Outcome]:
    """The outcomes of all runs, with a progress line on a terminal."""
    line = _Line(sum(1 + len(proof.mutations_on(topology)) for topology in proof.topologies))
    with Processes() as processes, console.busy(line):
        outcomes = []
        for outcome in run_proof(proof, processes, progress=line.update):
            outcomes.append(outcome)
            line.done += 1
    return outcomes


class _Line:
    """The progress line, which rich redraws: `run 3 of 26, 41 s: tp=2,sp with q_k_swapped`."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._text, self._started = "starting", time.monotonic()

    def update(self, text: str) -> None:
        """Set the run that starts now."""
        self._text = text

    def __rich__(self) -> Text:
        seconds = time.monotonic() - self._started
        number = min(self.done + 1, self.total)
        return Text(f"run {number} of {self.total}, {seconds:.0f} s: {self._text}", no_wrap=True, overflow="ellipsis")


def _what_differs(outcomes: list[Outcome]) -> str:
    """The first failure, in one line."""
    wrong = next(outcome for outcome in outcomes if outcome.passed != (outcome.mutation is None))
    if wrong.mutation is not None:
        return f"{wrong.topology}: the mutation {wrong.mutation} was not caught: the proof proves too little"
    if wrong.divergence is None:
        return (
            f"{wrong.topology}: the run broke off: {wrong.error.splitlines()[-1] if wrong.error else 'no reason given'}"
        )
    found = wrong.divergence
    return f"{wrong.topology} differs from one process: {found.phase} of {found.name}; {found.cause}"


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _WIDTH_OF_FILES))


def _check_mutations(proof: Proof) -> None:
    """Refuse a named fault that can show on no topology: one that is never injected proves nothing."""
    asked = proof.request.mutations
    if set(asked) == set(MUTATIONS):
        return
    for name in asked:
        if not any(name in proof.mutations_on(topology) for topology in proof.topologies):
            rule = f"it cannot show on {' or '.join(map(str, proof.topologies))}"
            raise UserError(f"--mutation {name}", rule, f"it needs {', '.join(sorted(find(name).needs))}")


def _check_files(json_file: str | None, html_file: str | None) -> None:
    """Fail before the proof, which takes minutes, if a result cannot be written."""
    for option, name in (("--json", json_file), ("--html", html_file)):
        if name is not None:
            check_result_file(Path(name), f"{option} {name}")
    if json_file is not None and html_file is not None and Path(json_file).absolute() == Path(html_file).absolute():
        raise UserError(f"--json and --html {html_file}", "they are two files", "give two names")


def _write(name: str, write: Callable[[Path], None]) -> str:
    """Write a file; returns why that failed, or "": the verdict is reported regardless."""
    try:
        write(Path(name))
    except OSError as error:
        return f"{name}: it cannot be written ({error.strerror})"
    return ""
