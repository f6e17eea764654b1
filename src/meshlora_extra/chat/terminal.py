"""A conversation in a terminal, or line by line from a pipe.

Owns: what a line means, the turns so far, Ctrl-C and Ctrl-D. Does not own: the model (`meshlora_extra.chat.speaker`).

At a terminal Ctrl-C ends the answer, not the program, and a mistake is said. From a pipe nobody can correct one: it
ends the command.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from meshlora.run.edge import handling_signals
from meshlora_extra.chat.speaker import Answer, Message, Speaker
from meshlora_ground.console import Console, hand_over_piece, read_line
from meshlora_ground.errors import MeshloraError, UserError

HELP = """\
/system TEXT  the system's turn from now on, in a new conversation; without TEXT: none
/base         the last question, answered by the base: with the adapter switched off
/reset        begin anew
/help         this
/exit         leave, as Ctrl-D does; Ctrl-C stops an answer
A line that begins with // is said with one of them."""
_WAY_OUT = "begin anew with /reset, or ask more briefly"
# Why an answer has an end that is not its own.
WHY = {
    "stopped": "(stopped)",
    "cut": "(cut after {} tokens: --max-new-tokens)",
    "positions": "(cut after {} tokens: the model has no more positions; /reset begins anew)",
}
EMPTY = "(an empty answer: the model ended at once)"


@dataclass
class Talk:
    """A conversation with `speaker`, until the input ends or /exit.

    Attributes:
        system: text of the system's turn. turns: so far. asked: what the last answer was to.
    """

    speaker: Speaker
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    asked: list[Message] = field(default_factory=list)
    _answers: bool = False
    _is_stopped: bool = False

    def run(self) -> None:
        """Raises: UserError: from a pipe, a line that cannot be answered."""
        is_terminal = sys.stdin.isatty()
        with handling_signals((signal.SIGINT,), self._interrupt):
            while True:
                try:
                    line = read_line("you> " if is_terminal else "")
                    if line is None:
                        if is_terminal:
                            say("")  # the shell's prompt does not belong behind ours
                        return
                    if not self.hear(line):
                        return
                except KeyboardInterrupt:
                    say("\n(/exit or Ctrl-D leaves)" if is_terminal else "interrupted")
                    if not is_terminal:
                        raise
                except MeshloraError as error:
                    if not is_terminal:
                        raise
                    say(f"error: {error}")

    def hear(self, line: str) -> bool:
        """Do what `line` asks for. Returns whether the conversation goes on. Raises: MeshloraError."""
        word, _, rest = line.strip().partition(" ")
        if not word:
            return True
        if not word.startswith("/") or word.startswith("//"):
            self._answer_to(line.removeprefix("/") if word.startswith("//") else line)
            return True
        if word in ("/exit", "/quit"):
            return False
        commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/base": self._ask_base,
            "/reset": self._reset,
            "/help": lambda _: say(HELP),
        }
        if word not in commands:
            raise UserError(word, "there is no such command", "/help names them; // says a slash")
        commands[word](rest.strip())
        return True

    def _answer_to(self, question: str) -> None:
        system: list[Message] = []
        if self.system:
            system.append({"role": "system", "content": self.system})
        asked = [*system, *self.turns, {"role": "user", "content": question}]
        ids = self.speaker.tokens_of(asked, way_out=_WAY_OUT)
        self.asked = asked
        answer = self._say_answer(ids, "", of_base=False)
        if answer.num_tokens or answer.why != "stopped":  # else it is as if nothing had been asked
            turn = {"role": "assistant", "content": answer.text}
            self.turns += [asked[-1], turn]

    def _ask_base(self, _: str) -> None:
        if not self.speaker.has_adapter:
            raise UserError("/base", "there is no adapter: it is the base that answers")
        if not self.asked:
            raise UserError("/base", "nothing has been asked yet", "ask something first")
        self._say_answer(self.speaker.tokens_of(self.asked, way_out=_WAY_OUT), "base: ", of_base=True)

    def _say_answer(self, ids: list[int], who: str, *, of_base: bool) -> Answer:
        """Ask, and print what comes. who: before it, on a terminal."""
        if who and sys.stdout.isatty():
            hand_over_piece(who)
        self._is_stopped, self._answers = False, True
        try:
            answer = self.speaker.ask(ids, of_base=of_base, hear=hand_over_piece, is_stopped=lambda: self._is_stopped)
        finally:
            self._answers = False
        if answer.text.strip() or sys.stdout.isatty():
            hand_over_piece("\n")
        if answer.why in WHY:
            say(WHY[answer.why].format(answer.num_tokens))
        elif not answer.text.strip():
            say(EMPTY)
        return answer

    def _set_system(self, text: str) -> None:
        self.system = text
        self._reset("")

    def _reset(self, _: str) -> None:
        self.turns, self.asked = [], []
        if sys.stdin.isatty():
            say("(a new conversation)" if not self.system else f"(a new conversation, system: {self.system})")

    def _interrupt(self, *_: object) -> None:
        if self._answers:
            self._is_stopped = True
        else:
            raise KeyboardInterrupt


def say(text: str) -> None:
    """What is no answer goes to stderr: stdout has answers alone."""
    Console(file=sys.stderr).say(text)
