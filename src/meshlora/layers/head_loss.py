"""The loss over a vocabulary split over tp: no rank ever materialises the logits of all tokens, in either pass.

Owns: the cross-entropy, the log-probabilities and the entropy from hidden states, in chunks of tokens, with their
gradients. Does not own: the head itself, what a model does to its logits (`layers.logits_recipe`), gradient sums over
ranks (`model.regions`, `train.gradsync`).

Rank r of tp holds rows `r*V/tp .. (r+1)*V/tp` of the head, with V padded at its end to a multiple of tp. The padding is
not part of the vocabulary: it enters neither the softmax nor the mean of label smoothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from meshlora.comm.collectives import all_gather
from meshlora.comm.groups import Axis
from meshlora.layers.notes import noted
from meshlora_ground.compat.torch_tensors import assert_on_device
from meshlora_ground.errors import UserError
from meshlora_ground.float64 import is_lifted, lift, wide_dtype
from meshlora_ground.transfer import to_device

IGNORED = -100  # the label of a token that is not trained

# Size of one chunk's logits over the whole vocabulary, so that the chunks are the same for every tp. Smaller chunks
# read the head's weight more often than its products can hide. A GPU also pays for each kernel of a chunk, whatever its
# size, and has the memory: 0.6 % of 80 GB, and with the bf16 logits and their gradient twice that.
CHUNK_BYTES = 128 * 2**20
CHUNK_BYTES_OF_GPU = 512 * 2**20
_TILE = 256  # rows

Head = Callable[[Tensor], Tensor]


class ChunkKernels(NamedTuple):
    """Two passes over the logits of a chunk, in place of several: a note on these (`wings.kernels.loss_chunk`).

    sums: sums `[4, t]`, logits, number of real ones, place and is_here of `Targets` -> m, Z, x[label] of this rank.
    gradient: logits, sums of all ranks, the same three -> the gradient without smoothing, written over the logits.
    """

    sums: Callable[..., Tensor]
    gradient: Callable[..., Tensor]


def shifted(labels: Tensor) -> Tensor:
    """Labels `[B, S]` as Hugging Face's models take them -> the label of each token: the one after it."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def summed_cross_entropy_from_hidden(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    parameters: Sequence[Tensor] = (),
    *,
    axis: Axis,
    vocab: int,
    label_smoothing: float = 0.0,
    trained: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sum over the trained tokens of `(1-e) * -log p(label) + e * mean over the vocabulary of -log p`, e the smoothing.

    one -> one, in fp32 (fp64 for float64). The gradients are computed in the forward, chunk by chunk, and scaled in the
    backward. That of `hidden` is each rank's term of a sum over `axis`, those of `parameters` are local: the caller
    sums them.

    Args:
        hidden: `[T, H]`, the same on all ranks of `axis`.
        head: `[t, H]` -> this rank's final logits `[t, V/tp]`, with all that the model does to them, token by token.
        labels: `[T]`, shifted already, the same on all ranks of `axis`; `IGNORED` where untrained. Untrained tokens
            never reach the head.
        parameters: the tensors used by `head` that get a gradient. Tensors not listed here get none.
        vocab: entries without the padding.
        trained: int64, the indices of labels other than `IGNORED`, in order. If given, it saves a host sync.
        sizes: `[K]`; the result is then `[K]`, the sums over K groups of these numbers of consecutive tokens. Without
            `parameters`.

    Raises:
        UserError: a label is not in the vocabulary; on a GPU an assertion there, reported at a later sync.
    """
    assert 0.0 <= label_smoothing <= 1.0, label_smoothing
    assert sizes is None or (sum(sizes) == len(labels) and not parameters), (sizes, tuple(labels.shape))
    loss = ChunkLoss(axis, vocab, label_smoothing, wide_dtype(hidden.dtype))
    chunks = Chunks.of(hidden, head, labels, trained, loss)
    groups = None if sizes is None else to_device(torch.tensor(sizes), hidden.device)
    # Read here: inside a Function grad mode is always off, and requires_grad of its inputs does not reflect it.
    return CrossEntropy.apply(hidden, chunks, groups, torch.is_grad_enabled(), *parameters)


def log_probabilities_from_hidden(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    parameters: Sequence[Tensor] = (),
    *,
    axis: Axis,
    vocab: int,
    trained: Tensor | None = None,
) -> Tensor:
    """log p(label) of each token, `[T]`, 0 where untrained; for losses that weight tokens differently.

    Arguments, gradients and errors are those of `summed_cross_entropy_from_hidden`, but a token's weight is known only
    in the backward: there the logits are recomputed, chunk by chunk.
    """
    loss = ChunkLoss(axis, vocab, 0.0, wide_dtype(hidden.dtype))
    chunks = Chunks.of(hidden, head, labels, trained, loss)
    found = _LogProbabilities.apply(hidden, chunks, *parameters)
    return found.new_zeros(labels.shape).index_copy(0, chunks.rows, found)


def scores_from_hidden(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    parameters: Sequence[Tensor] = (),
    *,
    axis: Axis,
    vocab: int,
    trained: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(log p(label), entropy, mean logit, 1 if no token is likelier than the label, log of the sum of p^2 over the
    vocabulary) of each token, `[T]`, 0 where untrained.

    The first two have gradients. Arguments and errors are those of `log_probabilities_from_hidden`.
    """
    loss = ChunkLoss(axis, vocab, 0.0, wide_dtype(hidden.dtype))
    chunks = Chunks.of(hidden, head, labels, trained, loss)
    found = _Scores.apply(hidden, chunks, *parameters)
    return tuple(values.new_zeros(labels.shape).index_copy(0, chunks.rows, values) for values in found)


def _check_labels(labels: Tensor, vocab: int) -> None:
    """A label in the padding, or beyond it, would belong to no rank: its loss would be silently wrong."""
    if not labels.numel():
        return
    least, most = labels.aminmax()
    if labels.is_cuda:  # without a host sync; the run ends at the next one
        assert_on_device((least >= 0) & (most < vocab), f"a label is not in the vocabulary of {vocab}")
    elif least < 0 or most >= vocab:
        wrong = least if least < 0 else most
        raise UserError(f"label {int(wrong)}", f"is not in the vocabulary of {vocab}", "look at the tokenizer")


class Targets(NamedTuple):
    """The labels of trained tokens, as this rank's part of the vocabulary has them.

    place: int64 `[t, 1]`, the label's entry of this rank; any where another rank has it. is_here: bool `[t]`.
    minus: `[t, 1]`, what the gradient gets at the label. least, zero: `[1]`, the least number and 0. All three have the
    dtype of the loss.
    """

    place: Tensor
    is_here: Tensor
    minus: Tensor
    least: Tensor
    zero: Tensor

    def of(self, chunk: slice) -> Targets:
        """Those of some tokens, views."""
        return self._replace(place=self.place[chunk], is_here=self.is_here[chunk], minus=self.minus[chunk])


@dataclass(frozen=True)
class ChunkLoss:
    """The loss of one chunk of trained tokens from this rank's logits, and its gradient for them.

    A kernel of a few numbers costs a GPU the launch of a large one: what needs no logits is computed once for all
    chunks, before them (`targets`) and after them (`losses`).

    Attributes:
        axis: the ranks that share the vocabulary. vocab: its entries without padding.
        label_smoothing: weight of the mean over the vocabulary. dtype: of the computation.
    """

    axis: Axis
    vocab: int
    label_smoothing: float
    dtype: torch.dtype

    def num_real(self, num_local: int) -> int:
        """How many of this rank's `num_local` entries are no padding: 0 where a small vocabulary ends before it."""
        return min(max(self.vocab - self.axis.rank * num_local, 0), num_local)

    def targets(self, labels: Tensor, num_local: int) -> Targets:
        """labels `[T]` -> theirs. num_local: V/tp."""
        place = labels - self.axis.rank * num_local
        is_here = (place >= 0) & (place < self.num_real(num_local))
        minus = (self.label_smoothing - 1) * is_here.to(self.dtype).unsqueeze(1)
        least, zero = minus.new_full((1,), torch.finfo(self.dtype).min), minus.new_zeros(1)
        return Targets(place.clamp_(0, num_local - 1).unsqueeze(1), is_here, minus, least, zero)

    def __call__(self, logits: Tensor, targets: Targets, gradient: Tensor, sums: Tensor) -> None:
        """logits `[t, V/tp]` -> `gradient` `[t, V/tp]` gets d sum(loss) / dx, `sums` `[4, t]`, of zeros, what the
        loss of each token needs.

        With m the largest logit and Z = sum_v exp(x[v] - m) over all ranks:
            sums = m, Z, x[label], sum_v x[v]; the last for label smoothing alone
            dx[v] = exp(x[v] - m) / Z - (1-e) [v == label] - e / vocab, and 0 in the padding
        One all-gather of four numbers per token; no other tensor `[t, V/tp]` (on CPU, bf16 needs one).
        """
        eps, num_local = self.label_smoothing, logits.shape[1]
        assert num_local * self.axis.size >= self.vocab, (num_local, self.axis.size, self.vocab)
        num_real = self.num_real(num_local)
        real = logits[:, :num_real]
        highest, z, label_logit, total = sums
        # Finite even if all of this rank's logits are -inf: exp(-inf - -inf) is NaN. Its shape `[1]` lets its dtype be
        # that of the result, as below that of 0.
        if num_real:
            torch.maximum(real.amax(1), targets.least, out=highest)
        else:
            highest.copy_(targets.least)
        torch.where(targets.is_here, logits.gather(1, targets.place).squeeze(1), targets.zero, out=label_logit)
        if eps:
            torch.sum(real, 1, dtype=self.dtype, out=total)
        if num_real < num_local:
            gradient[:, num_real:] = 0
        exps = torch.sub(real, highest.unsqueeze(1), out=gradient[:, :num_real]).exp_()
        torch.sum(exps, 1, out=z)
        exps.div_(self._divisor(sums).unsqueeze(1))
        if eps:
            exps.sub_(eps / self.vocab)
        gradient.scatter_add_(1, targets.place, targets.minus)

    def by_kernels(self, kernels: ChunkKernels, logits: Tensor, targets: Targets, sums: Tensor) -> Tensor:
        """As a call, without smoothing; -> the gradient, in the dtype of the logits."""
        given = self.num_real(logits.shape[1]), targets.place, targets.is_here
        kernels.sums(sums, logits, *given)
        self._divisor(sums)
        return kernels.gradient(logits, sums, *given)

    def _divisor(self, sums: Tensor) -> Tensor:
        """sums `[4, t]` of this rank's logits -> of all ranks'; and what this rank's exponentials are divided by."""
        if self.axis.size == 1:
            return sums[1]
        mine = sums.contiguous()
        by_rank = all_gather(mine, self.axis).view(self.axis.size, *mine.shape)  # [tp, 4, t]
        top = by_rank[:, 0].amax(0)
        z = (by_rank[:, 1] * (by_rank[:, 0] - top).exp()).sum(0)
        factor = (top - sums[0]).exp()  # infinite for a rank without one finite logit: its exponentials are 0
        sums[0], sums[1] = top, z
        sums[2:] = by_rank[:, 2:].sum(0)
        return z * factor

    def losses(self, sums: Tensor) -> Tensor:
        """`[T]` from the sums `[4, T]` of all ranks: `log Z + (1-e) (m - x[label]) + e (m - mean_v x[v])`.

        Differences to the largest logit, as in a single-process softmax: small where the model is confident.
        """
        eps = self.label_smoothing
        top, z, label_logit, total = sums
        loss = z.log() + (1 - eps) * (top - label_logit)
        if eps:
            loss += eps * (top - total / self.vocab)
        return loss


@dataclass(frozen=True)
class _ChunkScores:
    """Of each token what `scores_from_hidden` says beside its `ChunkLoss`.

    Attributes:
        found: `[4, T]`, where they are put. weights: `[2, T]` of log p(label) and of the entropy, in the sum whose
            gradient is wanted; None: no gradient is.
    """

    found: Tensor
    weights: Tensor | None = None

    def __call__(self, logits: Tensor, targets: Targets, gradient: Tensor, chunk: slice, loss: ChunkLoss) -> None:
        """gradient: that of `loss`, p - [v == label]; becomes that of the weighted sum. With H = -sum_v p[v] log p[v]:
            d log p(label) / dx[v] = [v == label] - p[v],    dH / dx[v] = -p[v] log p[v] - p[v] H
        One more all-gather, of five numbers per token.
        """
        num_real = loss.num_real(logits.shape[1])
        real, at_label, is_here = logits[:, :num_real].to(loss.dtype), targets.place, targets.is_here
        p = gradient.scatter_add(1, at_label, -targets.minus)[:, :num_real]
        own = torch.special.entr(p)
        highest = real.amax(1) if num_real else real.new_full(is_here.shape, torch.finfo(loss.dtype).min)
        label_logit = logits.gather(1, at_label).squeeze(1).to(loss.dtype).where(is_here, 0.0)
        mine = torch.stack([own.sum(1), highest, label_logit, real.sum(1), p.square().sum(1)])
        by_rank = all_gather(mine, loss.axis).view(loss.axis.size, *mine.shape)  # [tp, 5, t]
        entropy = by_rank[:, 0].sum(0)
        self.found[0, chunk], self.found[1, chunk] = entropy, by_rank[:, 3].sum(0) / loss.vocab
        self.found[2, chunk] = (by_rank[:, 2].sum(0) >= by_rank[:, 1].amax(0)).to(loss.dtype)
        self.found[3, chunk] = by_rank[:, 4].sum(0).log()
        if self.weights is not None:
            of_label, of_entropy = self.weights[:, chunk].unsqueeze(2)
            gradient.mul_(-of_label)
            gradient[:, :num_real] += of_entropy * (own - p * entropy.unsqueeze(1))


@dataclass(frozen=True)
class Chunks:
    """The trained tokens, which pass the head chunk by chunk.

    Attributes:
        rows: their rows in `hidden`. labels: their labels. tokens: number of tokens in a chunk. is_lifted: whether the
            head runs in lifted float64.
    """

    head: Head
    rows: Tensor
    labels: Tensor
    loss: ChunkLoss
    tokens: int
    is_lifted: bool

    @classmethod
    def of(cls, hidden: Tensor, head: Head, labels: Tensor, rows: Tensor | None, loss: ChunkLoss) -> Chunks:
        """The rows of `hidden` `[T, H]` whose label is not `IGNORED`. rows: their indices, if known."""
        assert labels.shape == hidden.shape[:1], (tuple(labels.shape), tuple(hidden.shape))
        if rows is None:
            rows = (labels != IGNORED).nonzero().squeeze(1)  # waits for a GPU
        targets = labels[rows]
        _check_labels(targets, loss.vocab)
        return cls(head, rows, targets, loss, chunk_tokens(loss.vocab, loss.dtype, is_cpu=hidden.is_cpu), is_lifted())

    def run(
        self,
        hidden: Tensor,
        parameters: Sequence[Tensor],
        *,
        needs_hidden: bool,
        weights: Tensor | None = None,
        scores: _ChunkScores | None = None,
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """(loss of each token, gradient of their sum for `hidden`, and for each of `parameters`).

        weights: token weights in that sum; None: ones. scores: the gradient is that of their sum instead.
        """
        of_tokens = hidden.new_zeros(4, len(self.rows), dtype=self.loss.dtype)
        targets: list[Targets] = []  # of all chunks: known with the width of the first one's logits
        # Untrained tokens get none, and never reach the head.
        d_hidden = torch.zeros_like(hidden) if needs_hidden else None
        # At least fp32: a bf16 sum over chunks would lose the contribution of each chunk.
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        # Shared by all chunks: allocating fresh memory costs more than computing in it.
        buffer = hidden.new_empty(0, dtype=self.loss.dtype)

        def one_chunk(chunk: slice) -> None:  # a function: its logits are freed on return
            rows = self.rows[chunk]
            x = hidden.index_select(0, rows).requires_grad_(needs_hidden)
            inputs = [x, *parameters] if needs_hidden else list(parameters)
            with torch.set_grad_enabled(bool(inputs)), lift(self.is_lifted):
                logits = self.head(x)
            if not targets:
                targets.append(self.loss.targets(self.labels, logits.shape[1]))
            own, kernels = targets[0].of(chunk), noted(logits, ChunkKernels)
            if kernels is not None and scores is None and weights is None and not self.loss.label_smoothing:
                d_logits = self.loss.by_kernels(kernels, logits.detach(), own, of_tokens[:, chunk])
            else:
                d_logits = buffer.resize_(logits.shape)
                self.loss(logits.detach(), own, d_logits, of_tokens[:, chunk])
            if scores is not None:
                scores(logits.detach(), own, d_logits, chunk, self.loss)
            if not inputs:
                return
            if weights is not None:
                d_logits.mul_(weights[chunk].unsqueeze(1))
            grads = list(torch.autograd.grad(logits, inputs, d_logits.to(logits.dtype)))
            if d_hidden is not None:
                d_hidden.index_copy_(0, rows, grads.pop(0))
            for total, grad in zip(sums, grads, strict=True):
                total.add_(grad)

        for start in range(0, len(self.rows), self.tokens):  # not split(): of no tokens it makes an empty chunk
            one_chunk(slice(start, start + self.tokens))
        losses = self.loss.losses(of_tokens)
        return losses, d_hidden, [s.to(p.dtype) for s, p in zip(sums, parameters, strict=True)]


def chunk_tokens(vocab: int, dtype: torch.dtype, *, is_cpu: bool) -> int:
    """Tokens of a chunk whose loss is computed in `dtype`: what `CHUNK_BYTES` holds, or `CHUNK_BYTES_OF_GPU`, in whole
    tiles of a GPU's products where it holds one: of 261 rows the last tile would do the work of 256 more.
    """
    number = (CHUNK_BYTES if is_cpu else CHUNK_BYTES_OF_GPU) // (vocab * dtype.itemsize)
    return number - number % _TILE if number > _TILE else max(1, number)


class CrossEntropy(Function):
    """Forward: sums and gradients, chunk by chunk. Backward: the gradients times the incoming gradient of each sum."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, chunks: Chunks, sizes: Tensor | None, has_gradient: bool, *parameters: Tensor
    ) -> Tensor:
        ctx.is_trained = [p.requires_grad for p in parameters]  # autograd wants a gradient, or None, for each
        trained = [p for p in parameters if has_gradient and p.requires_grad]
        losses, d_hidden, sums = chunks.run(hidden, trained, needs_hidden=has_gradient and hidden.requires_grad)
        ctx.save_for_backward(d_hidden, sizes, *sums)
        if sizes is None:
            return losses.sum()
        group_of = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes, output_size=len(hidden))
        return losses.new_zeros(len(sizes)).index_add_(0, group_of[chunks.rows], losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, sizes, *sums = ctx.saved_tensors
        if d_hidden is not None:
            of_tokens = grads[0]
            if sizes is not None:
                of_tokens = of_tokens.repeat_interleave(sizes, output_size=len(d_hidden)).unsqueeze(1)
            d_hidden = _scaled(d_hidden, of_tokens)
        of_parameters = _in_place_of(ctx.is_trained, [_scaled(total, grads[0]) for total in sums])
        return (d_hidden, None, None, None, *of_parameters)


class _LogProbabilities(Function):
    """Forward: log-probabilities, chunk by chunk; only the inputs are saved. Backward: the chunks again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, chunks: Chunks, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, *parameters)
        ctx.chunks = chunks
        return chunks.run(hidden, (), needs_hidden=False)[0].neg_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _again(ctx, weights=-grads[0])


class _Scores(Function):
    """`_LogProbabilities` with the entropy; and with what has no gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, chunks: Chunks, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, *parameters)
        ctx.chunks = chunks
        found = hidden.new_empty(4, len(chunks.rows), dtype=chunks.loss.dtype)
        losses, _, _ = chunks.run(hidden, (), needs_hidden=False, scores=_ChunkScores(found))
        entropy, *others = found.unbind()
        ctx.mark_non_differentiable(*others)
        return losses.neg_(), entropy, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights = torch.stack(grads[:2])  # the others are marked as without
        return _again(ctx, scores=_ChunkScores(weights.new_empty(4, weights.shape[1]), weights))


def _again(ctx: Any, **options: Any) -> tuple[Tensor | None, ...]:
    """The chunks once more, for the gradients of what was saved. options: of `Chunks.run`."""
    hidden, *parameters = ctx.saved_tensors
    needs_hidden, _, *needs = ctx.needs_input_grad
    trained = [p for p, is_needed in zip(parameters, needs, strict=True) if is_needed]
    _, d_hidden, sums = ctx.chunks.run(hidden, trained, needs_hidden=needs_hidden, **options)
    return (d_hidden, None, *_in_place_of(needs, sums))


def _in_place_of(are_needed: Sequence[bool], found: Sequence[Tensor]) -> Iterator[Tensor | None]:
    """For each parameter its gradient, of those that are needed alone, or None."""
    gradients = iter(found)
    for is_needed in are_needed:
        yield next(gradients) if is_needed else None


def _scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    """Out of place, for a retained graph. The factor stays fp32: bf16 would round a mean's 1/n."""
    if tensor.ndim and not factor.ndim:
        factor = factor.view(1)  # a number would take the dtype of the tensor
    return torch.mul(tensor, factor, out=torch.empty_like(tensor))
