"""The terminal: the single outlet for everything meshlora prints, except the line of an error.

Any text is printed literally: no markup, no highlighting, no emoji by name, control characters escaped.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from meshlora_ground.errors import MeshloraError, printable, reason

# Columns. A terminal whose size nobody has set has 0 of them, as has COLUMNS=0.
_NARROWEST, _USUAL = 20, 80


class Console(rich.console.Console):
    """rich's console for untrusted text. `say` a line; `print` a table, whose titles and cells may be plain `str`."""

    def __init__(
        self, *, file: IO[str] | None = None, width: int | None = None, force_terminal: bool | None = None
    ) -> None:
        super().__init__(
            file=file, width=width, force_terminal=force_terminal, markup=False, highlight=False, emoji=False
        )
        if width is None and self.width < _NARROWEST:  # rich would print nothing of a table
            self.width = _USUAL

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's. Raises: MeshloraError: the terminal, or the file in its place, takes no more."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            raise MeshloraError(
                f"the output of this command could not be written ({error.strerror or reason(error)})"
            ) from None

    def say(self, text: str, *, style: str | None = None) -> None:
        """Print `text`, of one or more lines, without wrapping, so that paths can be copied."""
        self.print(text, style=style, soft_wrap=True)

    def show_rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print names and values, one pair per line."""
        table = Table(show_header=False, box=None)
        for row in rows:
            table.add_row(*row)
        self.print(table)

    @contextlib.contextmanager
    def busy(self, text: RenderableType) -> Iterator[Callable[[str], None]]:
        """Show a spinner and `text` on a terminal while the block runs; yields a function that changes the text."""

        def shown(text: RenderableType) -> RenderableType:
            return self.render_str(text) if isinstance(text, str) else text  # a `str` would be read as markup

        with self.status(shown(text)) as status:
            yield lambda text: status.update(shown(text))

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape every `str`: lines, titles and cells of tables. Here, so that rich measures the escaped text."""
        return super().render_str(self.shown(text), **options | {"markup": False, "highlight": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape everything else, such as a `Text` built by a caller or by rich."""
        for segment in super().render(renderable, options):
            # Control segments are rich's own: they move the cursor.
            yield segment if segment.control else Segment(self.shown(segment.text), segment.style)

    def shown(self, text: str) -> str:
        """`text` as this terminal can show it: no control characters, and no characters that it has not."""
        text = printable(text)
        if self.encoding.startswith("utf"):
            return text
        return text.encode(self.encoding, "backslashreplace").decode(self.encoding)


def ask(question: str, default: str | None) -> str | None:
    """The answer to a question, stripped; None if there is nobody at a terminal."""
    if not sys.stdin.isatty():
        return None
    try:
        return input(f"{question}{f' [{default}]' if default else ''}: ").strip()
    except EOFError:
        return None


def hand_over(text: str) -> None:
    """Print the output of a command: unchanged into a pipe or file, escaped on a terminal."""
    if sys.stdout.isatty():
        Console().say(text)
    else:
        print(text)


def hand_over_piece(text: str) -> None:
    """Print a part of a command's output at once, without an end of line: as `hand_over`."""
    sys.stdout.write(Console().shown(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def read_line(prompt: str) -> str | None:
    """The next line of stdin; None at its end. prompt: shown on a terminal, where the line can be edited.

    Raises: KeyboardInterrupt: as its handler says.
    """
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # what it does, it does by being there: arrows, and earlier lines
    try:
        return input(prompt)
    except EOFError:
        return None
