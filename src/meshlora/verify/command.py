"""`meshlora verify`: run a proof, show it, write it down, and say with the exit code what it found."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from meshlora.errors import MeshloraError, UserError
from meshlora.state.files import write_json_atomically
from meshlora.verify.document import document, is_proved
from meshlora.verify.proof import Outcome, Processes, run_proof
from meshlora.verify.report import write_report
from meshlora.verify.request import Request, prepare_proof
from meshlora.verify.show import show


class NotProvedError(MeshloraError):
    """Ours differs from the reference, or a deliberate fault was not caught."""


def verify(
    request: Request,
    *,
    command: str,
    json_file: str | None = None,
    html_file: str | None = None,
    console: Console | None = None,
) -> None:
    """Prove `request`, with the result on the terminal and in the files that are asked for.

    Raises:
        UserError: the request is wrong or refused. NotProvedError: something differs, or a mutation survived.
    """
    console = console or Console()
    started = time.perf_counter()
    for file in filter(None, (json_file, html_file)):
        _check_writable(Path(file))
    proof = prepare_proof(request)
    with Processes() as processes, console.status("starting") as status:
        outcomes = list(run_proof(proof, processes, progress=status.update))
    show(console, proof, outcomes)
    seconds = time.perf_counter() - started
    if json_file:
        write_json_atomically(Path(json_file), document(proof, outcomes, command=command, seconds=seconds))
    if html_file:
        write_report(document(proof, outcomes, command=command, seconds=seconds, details=True), Path(html_file))
        console.print(f"report: {html_file}", highlight=False, soft_wrap=True)
    if not is_proved(outcomes):
        raise NotProvedError(_what_differs(outcomes))
    console.print(f"proved in {seconds:.0f} s", highlight=False)


def _what_differs(outcomes: list[Outcome]) -> str:
    """The first thing that is not as it should be, in one line."""
    wrong = next(outcome for outcome in outcomes if outcome.passed != (outcome.mutation is None))
    if wrong.mutation is not None:
        return f"{wrong.topology}: the mutation {wrong.mutation} was not caught: the proof proves too little"
    if wrong.divergence is None:
        return (
            f"{wrong.topology}: the run broke off: {wrong.error.splitlines()[-1] if wrong.error else 'no reason given'}"
        )
    found = wrong.divergence
    return f"{wrong.topology} differs from one process: {found.phase} of {found.name}; {found.cause}"


def _check_writable(file: Path) -> None:
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise UserError(f"{file}", "it is a folder, or its folder does not exist", "give the name of a file")
