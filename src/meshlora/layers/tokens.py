"""What the running forward is told of its tokens: whose they are, and which numbers they have.

Owns: `Share`, the tokens of one adapter; `ForwardTokens`, which finds them again among the rows of a module's input;
`Segment`, what a linear computes on some of its rows. Does not own: which rows of a batch are whose (`train.batches`),
what is computed (`layers.linear`), the bits of masks (`meshlora.common.masks`).

The tokens of one adapter are neighbours: a share is a range of the flat tokens `[B*S]` of the forward. The common case
is one share of all tokens, those of the adapter in use. A module sees all tokens or, under sp between regions, its
rank's slice of them, in which a share may be cut or have no token at all; which of the two, their number says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshlora.comm.groups import Axis
from meshlora.common.errors import UnsupportedError, UserError
from meshlora.common.masks import keep_mask, mask_key


@dataclass(frozen=True)
class Mask:
    """The mask of dropout on some rows of one call of a module.

    Attributes:
        key: of `meshlora.common.masks.mask_key`. tokens: int64 `[T]`, the numbers of the rows. features: int64 `[H]`,
        those
            of the columns in the whole matrix. p: the share that is dropped.
    """

    key: int
    tokens: Tensor
    features: Tensor
    p: float

    def drop(self, x: Tensor) -> Tensor:
        """x `[T, H]` -> x keep / (1 - p), in new memory. Linear and its own adjoint."""
        keep = keep_mask(self.key, self.tokens, self.features, self.p)
        return x.masked_fill(keep.logical_not_(), 0).mul_(1 / (1 - self.p))


@dataclass(frozen=True)
class Share:
    """The tokens of one adapter in the running forward.

    Attributes:
        adapter: its name; None: whichever is in use. tokens: int64 `[T]`, their numbers in its own optimizer step.
        seed, step: of its own run, for the masks of dropout.
    """

    adapter: str | None
    tokens: Tensor
    seed: int = 0
    step: int = 0


@dataclass(frozen=True)
class Part:
    """The rows `start:stop` of a module's input are those of `share` with the numbers `tokens`."""

    share: Share
    start: int
    stop: int
    tokens: Tensor


@dataclass(frozen=True)
class Segment:
    """What a linear does with the rows `start:stop` of its input: the product of one adapter, its scale, its mask."""

    start: int
    stop: int
    scale: float
    dropout: Mask | None = None


class ForwardTokens:
    """What the running forward is told of its tokens; one for each model, shared by its layers.

    sp: under it a rank's modules between regions see `tensor_split(tp)[rank]` of the flat tokens.
    """

    def __init__(self, tp: Axis, *, sp: bool) -> None:
        self.tp, self.sp = tp, sp
        self._shares: tuple[Share, ...] | None = None
        self.adapters: tuple[str | None, ...] = ()
        self._is_base = False

    def at(self, seed: int, step: int, tokens: Tensor) -> contextlib.AbstractContextManager[None]:
        """Inside the block forwards and backwards are of optimizer step `step` and of `tokens`, int64 `[B, S]`."""
        return self.of([Share(None, tokens.flatten(), seed, step)], [None])

    @contextlib.contextmanager
    def of(self, shares: Sequence[Share], adapters: Sequence[str | None]) -> Iterator[None]:
        """Inside the block forwards and backwards are of these shares, in this order along the flat tokens.

        adapters: all that are trained, alike on all ranks: others may have tokens of some that have none here.
        """
        before, self._shares, self.adapters = (self._shares, self.adapters), tuple(shares), tuple(adapters)
        try:
            yield
        finally:
            self._shares, self.adapters = before

    @contextlib.contextmanager
    def of_base(self) -> Iterator[None]:
        """Inside the block no share's adapter is used."""
        before, self._is_base = self._is_base, True
        try:
            yield
        finally:
            self._is_base = before

    @property
    def names_adapters(self) -> bool:
        """Whether shares say which of several adapters their tokens are for."""
        return len(self.adapters) > 1 and not self._is_base

    def parts(self, module: str, num_rows: int) -> list[Part]:
        """Whose the `num_rows` rows are that `module` is called with; a share without any of them has an empty part.

        Raises:
            UserError: nobody has said. UnsupportedError: they are no tokens.
        """
        if self._shares is None:
            raise UserError(
                f"a forward in training with dropout in {module}",
                "masks are a function of the step and the tokens, and nobody has said which they are",
                "call it inside `model.meshlora.dropout.at(seed, step, tokens)`, or use model.eval(), or no dropout",
            )
        total, first = sum(len(share.tokens) for share in self._shares), 0
        if num_rows != total:
            if not (self.sp and num_rows * self.tp.size == total):
                raise UnsupportedError(
                    f"dropout, or one of several adapters, in {module}",
                    f"it is called with {num_rows} rows for {total} tokens",
                    "leave it out of target_modules, or set lora_dropout: 0 and train one adapter",
                )
            first = self.tp.rank * num_rows
        found, start = [], 0
        for share in self._shares:
            stop = start + len(share.tokens)
            low, high = (min(max(edge - first, 0), num_rows) for edge in (start, stop))
            skipped = max(first - start, 0)
            found.append(Part(share, low, high, share.tokens[skipped : skipped + high - low]))
            start = stop
        return found

    def mask(self, module: str, p: float, part: Part, features: Tensor) -> Mask:
        """That of `part` in `module`, whose columns are `features` of the whole matrix."""
        return Mask(mask_key(part.share.seed, part.share.step, module), part.tokens, features, p)


def are_alike(segments: Sequence[Segment], factors: Sequence[Tensor]) -> bool:
    """Whether the products of all segments are of the same shape, of neighbouring rows, and without dropout.

    factors: the A and the B of each.
    """
    first = segments[0]
    size = first.stop - first.start
    return (
        size > 0
        and all(s.start == first.start + place * size for place, s in enumerate(segments))
        and all(s.stop - s.start == size and s.dropout is None for s in segments)
        and len({len(a) for a in factors[::2]}) == 1
    )


def owners(parts: Sequence[Part], names: Sequence[str | None]) -> Tensor:
    """int64 `[num_rows]`: for each row the place of its adapter in `names`."""
    return torch.cat([torch.full((part.stop - part.start,), names.index(part.share.adapter)) for part in parts])
