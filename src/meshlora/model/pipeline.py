"""The running forward's way through the decoder layers that a rank has.

Owns: `Pipeline`, of a rank that has all of them: one stage. Does not own: several stages (`wings.stages.hold`), what a
rank has of the residual stream between layers (`model.regions`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshlora.comm.groups import SharedByCopies


class Pipeline(SharedByCopies):
    """The running forward's way through this rank's stages: one, of the whole model. One object per model.

    Attributes:
        stage: the one that runs.
        enter: cuts the residual stream `[B, S, H]` to what a rank has of it between layers.
        sent: what `signal` gives next, if a forward has sent something.
        noted: notes what borders know of the forward that has run; calling the result lets them know it again, for a
            backward that computes layers again after later forwards.
    """

    def __init__(self) -> None:
        self.stage = 0
        self.sent: Tensor | None = None
        self.enter: Callable[[Tensor], Tensor] = lambda x: x
        self.noted: Callable[[], Callable[[], None]] = lambda: lambda: None

    @property
    def is_last(self) -> bool:
        """Whether the model's output is that of the running stage."""
        return True

    @contextlib.contextmanager
    def at(self, stage: int) -> Iterator[None]:
        """Inside the block forwards are those of `stage` alone, one of this rank's."""
        assert stage == 0, stage
        yield

    def earlier(self) -> Iterator[int]:
        """The stages of this rank before its last, each running in its turn; none where `at` has chosen one."""
        return iter(())

    def runs(self, name: str) -> bool:
        """Whether the module `name` is of the running stage."""
        return True

    def signal(self) -> Tensor:
        """`[]`, 0: the loss of a stage before the last, after its forward. Its backward is that of what was sent."""
        raise AssertionError("the whole model is its last stage")

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block a forward gives what its own stage makes; else all give what the last one makes."""
        return contextlib.nullcontext()

    def whole(self, x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """`x` of the last stage, on all, sent as `dtype`. x: of another stage its signal, in the shape of the last's;
        backward: that of each stage's own."""
        return x

    def take_turns(self, model: Any) -> None:
        """`model` has its leaves: what is before and after its layers is to run in one stage alone."""

    def note_also(self, note: Callable[[], Callable[[], None]]) -> None:
        """Let `noted` note something more."""
        before = self.noted

        def noted() -> Callable[[], None]:
            known, more = before(), note()

            def know_again() -> None:
                known()
                more()

            return know_again

        self.noted = noted
