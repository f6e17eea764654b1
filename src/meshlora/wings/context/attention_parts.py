"""Attention of queries to parts of the keys, merged by the logarithms of their sums.

Owns: which keys are seen as slices and which by a mask (`parts_of`), attention to parts as one autograd function
(`attend`), and the ring, in which keys and values of other ranks pass by. Does not own: what is seen
(`wings.context.context` asks transformers' mask functions), who holds which tokens (`meshlora.plan.token_order`).

A softmax over all keys is one over each part, `out_i` and `lse_i = log sum exp` of it, summed with the weights
`exp(lse_i - lse)`; the backward of a part needs the whole `lse` and `out` alone: docs/parallelism.md, "Attention in
parts". Keys seen as slices take torch's fused kernel, on a GPU in two-byte dtypes; all else is a few products, some
queries at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from meshlora.comm.groups import Axis
from meshlora.comm.messages import pass_on
from meshlora.layers.kept_attention import apart, once
from meshlora_ground.compat import torch_fused
from meshlora_ground.float64 import wide_dtype
from meshlora_ground.transfer import to_device

# Fewer queries than this that see the same slice take a mask together with their neighbours.
_FEWEST = 4
# Scores of a product in torch: some queries at a time, within this.
_SCORE_BYTES = 32 * 1024 * 1024
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)  # of torch's kernel for CPUs


@dataclass(frozen=True, eq=False)
class Part:
    """Queries `queries` of the rows `rows` of a batch, and the keys that they see.

    keys: a slice: all of it, or of as many keys as queries those up to their own number if `is_causal`, or where `mask`
    `[b, 1, n, m]` is true.
    """

    rows: slice
    queries: slice
    keys: slice
    mask: Tensor | None = None
    is_causal: bool = False


@dataclass(frozen=True)
class How:
    """scale: of the scores. softcap: they are `softcap * tanh(score / softcap)`. key_width: of a head."""

    scale: float
    softcap: float | None
    key_width: int


# --- which keys are seen as slices ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """The keys that queries see, int64 `[n]` each: the first, the last, how many.

    own: `[n]`, the number of a query's own key, -1 if it is not among them.
    """

    first: np.ndarray
    last: np.ndarray
    number: np.ndarray
    own: np.ndarray

    @classmethod
    def of_mask(cls, mask: Tensor, own: np.ndarray) -> Seen:
        """mask: bool `[n, m]`."""
        bits = mask.to(torch.uint8)
        last = mask.shape[-1] - 1 - bits.flip(-1).argmax(-1)
        found = torch.stack([bits.argmax(-1), last, mask.sum(-1)]).cpu().numpy()
        return cls(found[0], found[1], found[2], own)

    @classmethod
    def joined(cls, pieces: Sequence[Seen]) -> Seen:
        """One after the other."""
        each = [np.stack([piece.first, piece.last, piece.number, piece.own]) for piece in pieces]
        return cls(*np.concatenate(each, 1))

    def is_equal(self, other: Seen) -> bool:
        """Whether all see the same."""
        mine, theirs = vars(self).values(), vars(other).values()
        return all(map(np.array_equal, mine, theirs))


def columns_of(seen: Sequence[Seen], queries: slice) -> slice:
    """From the first to the last key that any of `queries` sees in any row; none at all: 0 to 0."""
    firsts, stops = [], []
    for one in seen:
        which = np.flatnonzero(one.number[queries]) + queries.start  # those that see any
        if len(which):
            firsts.append(int(one.first[which].min()))
            stops.append(int(one.last[which].max()) + 1)
    if not firsts:
        return slice(0, 0)
    return slice(min(firsts), max(stops))


def groups_of(seen: Seen) -> Iterator[tuple[slice, list[tuple[slice, bool]] | None]]:
    """(queries, the slices of keys that they see, and whether causally) of neighbours that see alike.

    None in place of the slices: a mask says it.
    """
    is_slice = (seen.number > 0) & (seen.last - seen.first + 1 == seen.number)
    is_causal = is_slice & (seen.last == seen.own)
    # 0: sees nothing; 1: a slice up to itself; 2: another slice; 3: only a mask says it.
    kind = np.select([seen.number == 0, is_causal, is_slice], [0, 1, 2], 3)
    same_first, same_last = np.diff(seen.first) == 0, np.diff(seen.last) == 0
    goes_on = np.choose(kind[:-1], [True, same_first & (np.diff(seen.own) == 1), same_first & same_last, np.True_]) & (
        np.diff(kind) == 0
    )
    masked = 0  # where the queries begin that wait for a mask
    ends = [*(np.flatnonzero(~goes_on) + 1).tolist(), len(kind)]
    for begin, end in zip([0, *ends], ends, strict=False):
        if kind[begin] == 3 or (kind[begin] > 0 and end - begin < _FEWEST):
            continue
        if masked < begin:
            yield slice(masked, begin), None
        masked = end
        first, last = int(seen.first[begin]), int(seen.last[begin])
        if kind[begin] == 2:
            yield slice(begin, end), [(slice(first, last + 1), False)]
        elif kind[begin] == 1:
            slices = [(slice(last, last + end - begin), True)]
            if last > first:  # all of them see what is before the first query's own key
                slices.insert(0, (slice(first, last), False))
            yield slice(begin, end), slices
    if masked < len(kind):
        yield slice(masked, len(kind)), None


# --- attention --------------------------------------------------------------------------------------------------------


def attend(
    query: Tensor, pair: Tensor, sinks: Tensor | None, parts: Sequence[Sequence[Part]], how: How, axis: Axis
) -> Tensor:
    """Attention of `query` `[B, h, n, d]` -> `[B, n, h, dv]`. What no part shows to a query adds nothing to it.

    pair: keys and values side by side, `[B, m, hk, d + dv]`; h is a multiple of hk.
    sinks: `[h]`, a logit of each head that is in the sum and has no value.
    parts: of this rank's pair, then, if pairs are to pass by, of those of the ranks before it on `axis` in this order.
    """
    return _Attention.apply(query, pair, sinks, parts, how, axis)


class _Attention(Function):
    """each -> each. forward: pairs go round `axis`, from each rank to the next, and each attends to those that come by;
    backward: they go round again, and their gradients with them, which end where the pairs come from.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        pair: Tensor,
        sinks: Tensor | None,
        parts: Sequence[Sequence[Part]],
        how: How,
        axis: Axis,
    ) -> Tensor:
        assert len(parts) in (1, axis.size), (len(parts), axis.size)
        # In a layer that runs twice the sum of all parts is kept, not each part.
        attention = functools.partial(_Attention._of_parts, query, pair, sinks, parts, how, axis)
        out, lse = once("attention in parts", attention)
        ctx.save_for_backward(query, pair, sinks, out, lse)
        ctx.parts, ctx.how, ctx.axis = parts, how, axis
        return out

    @staticmethod
    def _of_parts(
        query: Tensor, pair: Tensor, sinks: Tensor | None, parts: Sequence[Sequence[Part]], how: How, axis: Axis
    ) -> tuple[Tensor, Tensor]:
        """out `[B, n, h, dv]` and lse `[B, h, n]`."""
        rows, heads, number, _ = query.shape
        wide = wide_dtype(query.dtype)
        out = query.new_zeros((rows, number, heads, pair.shape[-1] - how.key_width), dtype=wide)
        lse = query.new_full((rows, heads, number), -torch.inf, dtype=wide)
        passing = pair
        for step, of_step in enumerate(parts):  # own pair first, so the ring needs one pass less
            passing = pass_on(passing, axis) if step else passing
            key, value = _split(passing, how)
            for part in _small(of_step, query, how, value):
                _add(out.transpose(1, 2), lse, part, *_forward(part, query, key, value, how))
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(wide).view(1, -1, 1))
            out.transpose(1, 2).mul_((lse - total).exp_().unsqueeze(-1))
            lse = total
        return out.to(query.dtype), lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, pair, sinks, out, lse = ctx.saved_tensors
        back = _Backward(query, out.transpose(1, 2), lse, grads[0].transpose(1, 2), ctx.how)
        own = back.through(pair, ctx.parts[0])
        # The gradient of a pair travels beside it, and arrives at its owner one pass after the last part.
        passing, travelling = pair, pair[..., :0]
        for of_step in ctx.parts[1:]:
            both = pass_on(torch.cat([passing, travelling], -1), ctx.axis)
            passing, travelling = both[..., : pair.shape[-1]], both[..., pair.shape[-1] :]
            found = back.through(passing, of_step)
            travelling = (found + travelling if travelling.shape[-1] else found).to(pair.dtype)
        if len(ctx.parts) > 1:
            own += pass_on(travelling, ctx.axis)
        of_sinks = None if sinks is None else back.of_sinks(sinks)
        return back.query_grad.to(query.dtype), own.to(pair.dtype), of_sinks, None, None, None


class _Backward:
    """The backward of all parts: of each, the gradient of its pair is returned and that of the query added up."""

    def __init__(self, query: Tensor, out: Tensor, lse: Tensor, grad: Tensor, how: How) -> None:
        self.query, self.out, self.grad, self.how = query, out, grad, how
        # A query that sees nothing has no share of anything: exp(score - inf).
        self.lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        self.shift = (grad * out).sum(-1, dtype=lse.dtype)  # [B, h, n]
        self.query_grad = torch.zeros_like(query, dtype=lse.dtype)

    def through(self, pair: Tensor, parts: Sequence[Part]) -> Tensor:
        """The gradient of `pair` from `parts` of it."""
        found = torch.zeros_like(pair, dtype=self.lse.dtype)
        key, value = _split(pair, self.how)
        key_grad, value_grad = _split(found, self.how)
        for part in _small(parts, self.query, self.how, value):
            where = part.rows, slice(None), part.queries
            seen = part.rows, slice(None), part.keys
            given = self.grad[where], self.query[where], key[seen], value[seen], self.out[where], self.lse[where]
            back: tuple[Tensor, ...]
            if _is_fused(part, self.query, value, self.how):
                back = torch_fused.attention_back(*given, is_causal=part.is_causal, scale=self.how.scale)
            else:
                back = self._products(part, *given[:4])
            for into, term in zip((self.query_grad[where], key_grad[seen], value_grad[seen]), back, strict=True):
                into += term
        return found

    def _products(self, part: Part, grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The gradients of query, key and value, by matrix products."""
        where = part.rows, slice(None), part.queries
        scores, slope = _scores(part, query, key, self.how)
        share = (scores - _by_group(self.lse[where].unsqueeze(-1), key)).exp_()
        grad, query = _by_group(grad, key), _by_group(query, key)
        value_grad = share.to(grad.dtype).transpose(-1, -2) @ grad
        score_grad = (grad @ value.transpose(-1, -2)).to(share.dtype)
        # In place: scores are the largest tensors here.
        score_grad = score_grad.sub_(_by_group(self.shift[where].unsqueeze(-1), key)).mul_(share).mul_(self.how.scale)
        if slope is not None:
            score_grad *= slope
        score_grad = score_grad.to(query.dtype)
        query_grad = (score_grad @ key).unflatten(2, (-1, part.queries.stop - part.queries.start)).flatten(1, 2)
        return query_grad, score_grad.transpose(-1, -2) @ query, value_grad

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """The gradient of sink logits `[h]`, which only take from what all values get."""
        share = (sinks.to(self.lse.dtype).view(1, -1, 1) - self.lse).exp_()
        return -(share * self.shift).sum((0, 2)).to(sinks.dtype)


def _split(pair: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """`[B, m, hk, d + dv]` -> views `[B, hk, m, d]`, `[B, hk, m, dv]`."""
    key, value = pair.transpose(1, 2).split([how.key_width, pair.shape[-1] - how.key_width], -1)
    return key, value


def _is_fused(part: Part, query: Tensor, value: Tensor, how: How) -> bool:
    """Whether torch has one kernel for `part`, which gives the sums and takes them back."""
    return part.mask is None and how.softcap is None and value.shape[-1] == how.key_width and has_kernel(query)


def has_kernel(query: Tensor) -> bool:
    """Whether torch has a kernel for plain attention of `query`, with values as wide as keys. The meta device is taken
    for a GPU.
    """
    if query.is_cpu:
        return query.dtype in _DTYPES
    width = query.shape[-1]
    # What torch's flash attention takes.
    fits = query.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256
    return fits and (query.is_meta or agrees(query.device, query.dtype, width))


@functools.cache
@apart()
def agrees(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether torch's kernel is on `device` and computes what its definition says, as its sums are not public. A few
    queries, and of other keys only their part in the sums: two e-folds.
    """
    generator, scale, number = torch.Generator().manual_seed(0), width**-0.5, 24
    given = [torch.randn(2, heads, number, width, generator=generator, device="cpu") for heads in (4, 4, 2, 2)]
    grad, query, key, value = (to_device(tensor.to(dtype), device) for tensor in given)
    for is_causal in (False, True):
        try:
            out, sums = torch_fused.attention_with_sums(query, key, value, is_causal=is_causal, scale=scale)
            of_part = grad, query, key, value, out, sums + 2
            found = out, sums, *torch_fused.attention_back(*of_part, is_causal=is_causal, scale=scale)
        except RuntimeError:  # no such kernel here
            return False
        expected = _by_definition(grad.double(), query.double(), key.double(), value.double(), is_causal, scale)
        if not all(torch.allclose(a.double(), b, rtol=0.02, atol=0.02) for a, b in zip(found, expected, strict=True)):
            return False
    return True


def _by_definition(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """out, sums, and the gradients of query, key and value with sums that are larger by 2; twice the heads of keys."""
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = query @ key.transpose(-1, -2) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    sums = scores.logsumexp(-1)
    out, share = scores.softmax(-1) @ value, (scores - sums.unsqueeze(-1) - 2).exp()
    score_grad = share * (grad @ value.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    of_keys = (score_grad.transpose(-1, -2) @ query, share.transpose(-1, -2) @ grad)
    return out, sums, score_grad @ key, *(each.unflatten(1, (-1, 2)).sum(2) for each in of_keys)


def _small(parts: Sequence[Part], query: Tensor, how: How, value: Tensor) -> Iterator[Part]:
    """`parts` with as many queries as their products may have at a time."""
    for part in parts:
        if _is_fused(part, query, value, how):
            yield part
            continue
        rows = len(range(*part.rows.indices(query.shape[0])))
        each = wide_dtype(query.dtype).itemsize * rows * query.shape[1] * (part.keys.stop - part.keys.start)
        most = max(1, _SCORE_BYTES // each)
        for begin in range(part.queries.start, part.queries.stop, most):
            queries = slice(begin, min(part.queries.stop, begin + most))
            own = slice(begin - part.queries.start, queries.stop - part.queries.start)
            keys, mask = part.keys, part.mask
            if part.is_causal:
                keys = slice(keys.start, keys.start + own.stop)
                numbers = torch.arange(own.stop, device=query.device)
                mask = numbers <= numbers[own, None]
                mask = mask.view(1, 1, *mask.shape)
            elif mask is not None:
                mask = mask[:, :, own]
            yield dataclasses.replace(part, queries=queries, keys=keys, mask=mask, is_causal=False)


def _forward(part: Part, query: Tensor, key: Tensor, value: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """out `[b, h, n, dv]` and lse `[b, h, n]` of a part by itself."""
    seen = part.rows, slice(None), part.keys
    query, key, value = query[part.rows, :, part.queries], key[seen], value[seen]
    if _is_fused(part, query, value, how):
        return torch_fused.attention_with_sums(query, key, value, is_causal=part.is_causal, scale=how.scale)
    scores, _ = _scores(part, query, key, how)
    lse = scores.logsumexp(-1, keepdim=True)
    share = scores.sub_(lse.masked_fill(lse == -torch.inf, 0)).exp_().to(value.dtype)
    shape = *query.shape[:3], -1
    return (share @ value).reshape(shape), lse.reshape(shape[:3])


def _scores(part: Part, query: Tensor, key: Tensor, how: How) -> tuple[Tensor, Tensor | None]:
    """Scores `[b, hk, g n, m]`, -inf where a key is not seen; their derivative by those before the soft cap."""
    scores = (_by_group(query, key) @ key.transpose(-1, -2)).to(wide_dtype(query.dtype)).mul_(how.scale)
    slope = None
    if how.softcap is not None:
        scores = scores.div_(how.softcap).tanh_()
        slope = 1 - scores * scores
        scores *= how.softcap
    if part.mask is not None:
        by_query = scores.unflatten(2, (-1, query.shape[2]))
        by_query.masked_fill_(~part.mask.unsqueeze(1), -torch.inf)
    return scores, slope


def _by_group(x: Tensor, key: Tensor) -> Tensor:
    """`[b, h, n, d]` -> `[b, hk, g n, d]`: the g heads of queries that share each head of keys, one after the other."""
    return x.unflatten(1, (key.shape[1], -1)).flatten(2, 3)


def _add(out: Tensor, lse: Tensor, part: Part, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a part into `out` `[B, h, n, dv]` and `lse` `[B, h, n]`."""
    out, lse = out[part.rows, :, part.queries], lse[part.rows, :, part.queries]
    total = torch.logaddexp(lse, part_lse.to(lse.dtype))
    weight = (part_lse.to(lse.dtype) - total).exp_().nan_to_num_(0.0)  # nothing is seen: -inf - -inf
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(total)
