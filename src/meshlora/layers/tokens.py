"""The tokens of the running forward: the adapter and the number of each.

Owns: `Share`, the tokens of one adapter; `ForwardTokens`, which locates them among the rows of a module's input;
`Segment`, a linear's product on some of its rows. Does not own: which rows of a batch are which adapter's
(`train.batches`), the computation (`layers.linear`), mask bits (`meshlora_ground.masks`).

The rows of one adapter are contiguous: a share is a range of the flat tokens `[B*S]` of the forward. The common case
is one share of all tokens, those of the adapter in use. A module sees all tokens or, in the layers, its cp rank's;
under sp between regions its tp rank's slice of these, in which a share may be truncated or empty; or, after pooling on
tp=1, a row of each sequence. The number of rows tells which.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from meshlora.comm.groups import Axis
from meshlora.layers.held_tokens import ContextCut
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.masks import POSITION_BITS, Key, keep_mask, mask_key


class CutsTokens(nn.Module):
    """A module that sends tokens elsewhere.

    Attributes:
        cuts_tokens: whether the tokens are replicated over tp, so that each rank sends its share of them.
    """

    cuts_tokens: bool


@dataclass(frozen=True)
class Mask:
    """The dropout mask of some rows in one call of a module.

    Attributes:
        key: from `meshlora_ground.masks.mask_key`. tokens: int64 `[T]`, the numbers of the rows. features: int64 `[H]`,
            those of the columns in the whole matrix. p: the dropout probability.
    """

    key: Key
    tokens: Tensor
    features: Tensor
    p: float

    def drop(self, x: Tensor) -> Tensor:
        """x `[T, H]` -> x keep / (1 - p), in new memory. Linear and its own adjoint."""
        # The same on all ranks, for the same token and feature.
        keep = keep_mask(self.key, self.tokens, self.features, self.p)
        return x.masked_fill(keep.logical_not_(), 0).mul_(1 / (1 - self.p))


@dataclass(frozen=True)
class Share:
    """The tokens of one adapter in the running forward.

    Attributes:
        adapter: its name; None: the one in use. tokens: int64 `[B, S]`, their numbers in the adapter's optimizer step.
        seed, step: of the adapter's run, for dropout masks and noise. is_token: `[B, S]`, 0 at padding, for noise.
    """

    adapter: str | None
    tokens: Tensor
    seed: int = 0
    step: int = 0
    is_token: Tensor | None = None

    def of_sequences(self) -> Share:
        """The first token of each sequence: what a module sees after pooling."""
        return replace(self, tokens=self.tokens[self.tokens & (2**POSITION_BITS - 1) == 0].unsqueeze(1))


@dataclass(frozen=True)
class Part:
    """Rows `start:stop` of a module's input: the tokens of `share` with the numbers `tokens`."""

    share: Share
    start: int
    stop: int
    tokens: Tensor


@dataclass(frozen=True)
class Segment:
    """The product of one adapter on rows `start:stop` of a linear's input: its scale, its mask."""

    start: int
    stop: int
    scale: float
    dropout: Mask | None = None


class ForwardTokens:
    """The tokens of the running forward; one object per model, shared by its layers.

    context: the cut over cp. sp: whether modules between regions see `tensor_split(tp)[rank]` of the flat tokens. keys:
    of the masks of each module, where the device knows them and the host does not, as in a record.
    """

    keys: Callable[[str], Key] | None = None

    def __init__(self, tp: Axis, *, sp: bool, context: ContextCut | None = None) -> None:
        self.tp, self.context, self.sp = tp, context, sp
        self._shares: tuple[Share, ...] | None = None
        self.adapters: tuple[str | None, ...] = ()
        self._is_base = False
        self._said: Callable[[], Share] | None = None  # of a loop of the user's own

    def at(self, seed: int, step: int, tokens: Tensor) -> contextlib.AbstractContextManager[None]:
        """Inside the block forwards and backwards belong to optimizer step `step` and `tokens`, int64 `[B, S]`."""
        return self.of([Share(None, tokens, seed, step)], [None])

    @contextlib.contextmanager
    def of(self, shares: Sequence[Share], adapters: Sequence[str | None]) -> Iterator[None]:
        """Inside the block forwards and backwards belong to these shares, in this order along the flat tokens.

        adapters: all trained ones, identical on all ranks: some may have tokens on other ranks only.
        """
        before, self._shares, self.adapters = (self._shares, self.adapters), tuple(shares), tuple(adapters)
        try:
            yield
        finally:
            self._shares, self.adapters = before

    def say(self, share: Callable[[], Share] | None) -> Callable[[], Share] | None:
        """Forwards and backwards from now on that are in no block have the tokens `share()`, made once it is needed.

        Returns what was said before.
        """
        before, self._said = self._said, None if share is None else functools.cache(share)
        return before

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
        """Whether shares assign their tokens to one of several adapters."""
        return len(self.adapters) > 1 and not self._is_base

    def parts(self, module: str, num_rows: int) -> list[Part]:
        """The `num_rows` input rows of `module`, by share; a share without any of them has an empty part.

        Raises:
            UserError: no shares are set. UnsupportedError: the rows are not tokens.
        """
        given = self._shares
        if given is None and self._said is not None:
            given = (self._said(),)
        if given is None:
            raise UserError(
                f"a forward in training with dropout in {module}",
                "masks are a function of the step and the tokens, and nobody has said which they are",
                "call it in a `meshlora.step`, with gradients, or in `model.meshlora.dropout.at(seed, step, tokens)`, "
                "or use model.eval(), or no dropout",
            )
        shares = list(given)
        if num_rows == _number(shares):
            return _in_turn(shares, 0, num_rows)
        held = self._held(shares)
        # A rank of cp may have as many tokens as there are sequences: its rows are tokens. Nobody pools over cp.
        if self.tp.size == 1 and held is shares:
            pooled = [share.of_sequences() for share in shares]
            if num_rows == _number(pooled):
                return _in_turn(pooled, 0, num_rows)
        total = _number(held)
        if num_rows == total:
            return _in_turn(held, 0, num_rows)
        if self.sp and num_rows * self.tp.size == total:
            return _in_turn(held, self.tp.rank * num_rows, num_rows)
        rule = f"it is called with {num_rows} rows for {total} tokens"
        way_out = "leave it out of target_modules, or set lora_dropout: 0 and train one adapter"
        raise UnsupportedError(f"dropout, or one of several adapters, in {module}", rule, way_out)

    def _held(self, shares: list[Share]) -> list[Share]:
        """The shares with the tokens of this cp rank alone; `shares` itself where nothing is cut."""
        if self.context is None or self.context.held is None:
            return shares
        found, row = [], 0
        for share in shares:
            own = self.context.held.own[row : row + len(share.tokens)]
            found.append(replace(share, tokens=share.tokens.gather(1, own.to(share.tokens.device))))
            row += len(share.tokens)
        return found

    def mask(self, module: str, p: float, part: Part, features: Tensor) -> Mask:
        """The mask of `part` in `module`, whose columns are `features` of the whole matrix."""
        key = mask_key(part.share.seed, part.share.step, module) if self.keys is None else self.keys(module)
        return Mask(key, part.tokens, features, p)


def _in_turn(shares: Sequence[Share], first: int, num_rows: int) -> list[Part]:
    """The parts of `num_rows` rows, the first of which is row `first` of the shares one after the other."""
    found, start = [], 0
    for share in shares:
        stop = start + share.tokens.numel()
        # Both in 0..num_rows: a share that is on other ranks alone gets an empty part.
        low, high = min(max(start - first, 0), num_rows), min(max(stop - first, 0), num_rows)
        skipped = max(first - start, 0)  # of its tokens, on tp ranks before this one
        found.append(Part(share, low, high, share.tokens.flatten()[skipped : skipped + high - low]))
        start = stop
    return found


def _number(shares: Sequence[Share]) -> int:
    return sum(share.tokens.numel() for share in shares)


def are_alike(segments: Sequence[Segment], factors: Sequence[Tensor]) -> bool:
    """Whether the products of all segments have the same shape, contiguous rows and no dropout.

    factors: A and B of each segment in turn.
    """
    size, rank = segments[0].stop - segments[0].start, len(factors[0])
    if size <= 0:
        return False
    start = segments[0].start
    for segment, a in zip(segments, factors[::2], strict=True):
        if segment.start != start or segment.stop != start + size or segment.dropout is not None or len(a) != rank:
            return False
        start = segment.stop
    return True


def owners(parts: Sequence[Part], names: Sequence[str | None]) -> Tensor:
    """int64 `[num_rows]`: for each row the index of its adapter in `names`."""
    found = []
    for part in parts:
        number = names.index(part.share.adapter)
        found.append(torch.full((part.stop - part.start,), number, device="cpu"))
    return torch.cat(found)
