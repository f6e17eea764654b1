"""The terminal: the one place through which everything that meshlora prints goes, but for the line of an error.

Owns: that a text is shown as it is, whatever it holds: no markup, no highlighting, no emoji by name, control characters
escaped. Does not own: what is said; the words of errors (`common.errors`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from meshlora.common.errors import printable


class Console(rich.console.Console):
    """rich's console for texts of others. `say` a line; `print` a table, whose titles and cells may be plain `str`."""

    def __init__(
        self, *, file: IO[str] | None = None, width: int | None = None, force_terminal: bool | None = None
    ) -> None:
        super().__init__(
            file=file, width=width, force_terminal=force_terminal, markup=False, highlight=False, emoji=False
        )

    def say(self, text: str, *, style: str | None = None) -> None:
        """Print `text`, which may have several lines. None is folded: a path can be copied."""
        self.print(text, style=style, soft_wrap=True)

    @contextlib.contextmanager
    def busy(self, text: RenderableType) -> Iterator[Callable[[str], None]]:
        """A spinner on a terminal while the block runs, with `text` beside it; call what it yields to change that."""

        def shown(text: RenderableType) -> RenderableType:
            return self.render_str(text) if isinstance(text, str) else text  # a `str` would be read as markup

        with self.status(shown(text)) as status:
            yield lambda text: status.update(shown(text))

    def render_str(self, text: str, **options: Any) -> Text:
        """Every `str` comes by here: lines, titles and cells of tables. Escaped here, it is measured as it is shown."""
        return super().render_str(self._shown(text), **options | {"markup": False, "highlight": False, "emoji": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """All else comes by here: a `Text` that a caller or rich itself has made."""
        for segment in super().render(renderable, options):
            # What has a control code is rich's own: it moves the cursor.
            yield segment if segment.control else Segment(self._shown(segment.text), segment.style)

    def _shown(self, text: str) -> str:
        text = printable(text)
        if self.encoding.startswith("utf"):
            return text
        return text.encode(self.encoding, "backslashreplace").decode(self.encoding)


def hand_over(text: str) -> None:
    """Print the text that a command was asked for: unchanged for a program that reads it, escaped on a terminal."""
    if sys.stdout.isatty():
        Console().say(text)
    else:
        print(text)
