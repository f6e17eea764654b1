"""The loss over a vocabulary that is split over tp: all logits of all tokens never exist, on no rank, in neither pass.

Owns: the cross-entropy from hidden states, chunk by chunk of tokens, with its gradients; and the recipe, by which a
model's own forward tells what it does to logits that nobody computes.
Does not own: the head itself, the summing of gradients over ranks (`parallel.region`, `train.gradsync`).

Rank r of tp holds rows `r*V/tp .. (r+1)*V/tp` of the head, V being padded at its end to a multiple of tp. The padding
is no part of the vocabulary: it enters neither the softmax nor the mean of label smoothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from meshlora.errors import UnsupportedError, UserError
from meshlora.parallel.collectives import all_gather
from meshlora.parallel.groups import Axis

IGNORED = -100  # the label of a token that is not trained

# Of the logits of one chunk over the whole vocabulary, so that the chunks are the same for every tp. Smaller chunks
# read the head's weight more often than its products can hide.
CHUNK_BYTES = 128 * 2**20

Head = Callable[[Tensor], Tensor]


def summed_cross_entropy_from_hidden(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    parameters: Sequence[Tensor] = (),
    *,
    axis: Axis,
    vocab: int,
    label_smoothing: float = 0.0,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Sum over the trained tokens of `(1-e) * -log p(label) + e * mean over the vocabulary of -log p`, e the smoothing.

    one -> one, in fp32 (fp64 for float64). The gradients come into being in the forward, a chunk at a time, and the
    backward scales them. That of `hidden` is each rank's term of a sum over `axis`, those of `parameters` are local:
    to add them up is the caller's part.

    Args:
        hidden: `[T, H]`, the same on all ranks of `axis`.
        head: `[t, H]` -> this rank's logits `[t, V/tp]`, with all that the model does to logits. Each token by itself.
        labels: `[T]`, shifted already, the same on all ranks of `axis`; `IGNORED` where untrained. Untrained tokens
            never reach the head.
        parameters: the tensors behind `head` that get a gradient. What is not listed here gets none.
        vocab: entries without the padding.
        chunk_tokens: trained tokens that pass the head at once; by default as many as `CHUNK_BYTES` hold.

    Raises:
        UserError: a label is not in the vocabulary.
    """
    assert labels.shape == hidden.shape[:1], (tuple(labels.shape), tuple(hidden.shape))
    assert 0.0 <= label_smoothing <= 1.0, label_smoothing
    loss = _ChunkLoss(axis, vocab, label_smoothing, _exact_dtype(hidden))
    rows = (labels != IGNORED).nonzero().squeeze(1)
    labels = labels[rows]
    _check_labels(labels, vocab)
    tokens = chunk_tokens or max(1, CHUNK_BYTES // (vocab * loss.dtype.itemsize))
    # Read here: inside a Function gradients are off, and which inputs want one does not depend on that.
    has_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (hidden, *parameters))
    return _SummedCrossEntropy.apply(hidden, head, rows, labels, loss, tokens, has_gradient, *parameters)


def _exact_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _check_labels(labels: Tensor, vocab: int) -> None:
    """A label in the padding, or behind it, would belong to no rank: its loss would be wrong without a sign."""
    if labels.numel():
        least, most = torch.stack(labels.aminmax()).tolist()
        if least < 0 or most >= vocab:
            wrong = least if least < 0 else most
            raise UserError(f"label {wrong}", f"is not in the vocabulary of {vocab}", "look at the tokenizer")


@dataclass(frozen=True)
class _ChunkLoss:
    """The loss of one chunk of trained tokens from this rank's logits, and its gradient for them.

    Attributes:
        axis: the ranks that share the vocabulary. vocab: its entries without padding.
        label_smoothing: weight of the mean over the vocabulary. dtype: what is computed in.
    """

    axis: Axis
    vocab: int
    label_smoothing: float
    dtype: torch.dtype

    def __call__(self, logits: Tensor, labels: Tensor, gradient: Tensor) -> Tensor:
        """logits `[t, V/tp]`, labels `[t]` -> loss of each token `[t]`; `gradient` `[t, V/tp]` gets d sum(loss) / dx.

        With m the greatest logit and Z = sum_v exp(x[v] - m) over all ranks:
            loss = log Z + (1-e) (m - x[label]) + e (m - mean_v x[v])
            dx[v] = exp(x[v] - m) / Z - (1-e) [v == label] - e / vocab, and 0 in the padding
        One all-gather of four numbers a token; no [t, V/tp] beside the two in the signature (on CPU, bf16 needs one).
        """
        eps, num_local = self.label_smoothing, logits.shape[1]
        assert num_local * self.axis.size >= self.vocab, (num_local, self.axis.size, self.vocab)
        first = self.axis.rank * num_local
        num_real = min(max(self.vocab - first, 0), num_local)  # 0 where a small vocabulary ends before this rank
        real = logits[:, :num_real]

        place = labels - first
        is_here = (place >= 0) & (place < num_real)
        place = place.clamp(0, num_local - 1).unsqueeze(1)
        label_logit = logits.gather(1, place).squeeze(1).to(self.dtype).where(is_here, 0.0)
        # Finite also where this rank has no logit but -inf: exp(-inf - -inf) is no number.
        highest = label_logit.new_full(labels.shape, torch.finfo(self.dtype).min)
        if num_real:
            highest = torch.maximum(highest, real.amax(1).to(self.dtype))
        total = real.sum(1, dtype=self.dtype) if eps else torch.zeros_like(highest)
        gradient[:, num_real:] = 0
        exps = torch.sub(real, highest.unsqueeze(1), out=gradient[:, :num_real]).exp_()

        mine = torch.stack([highest, exps.sum(1), label_logit, total])
        by_rank = all_gather(mine, self.axis).view(self.axis.size, *mine.shape)  # [tp, 4, t]
        top = by_rank[:, 0].amax(0)
        z = (by_rank[:, 1] * (by_rank[:, 0] - top).exp()).sum(0)
        # Differences to the greatest logit, as a softmax in one process takes them: small where the model is sure.
        loss = z.log() + (1 - eps) * (top - by_rank[:, 2].sum(0))
        if eps:
            loss += eps * (top - by_rank[:, 3].sum(0) / self.vocab)

        exps.mul_(((highest - top).exp() / z).unsqueeze(1))
        if eps:
            exps.sub_(eps / self.vocab)
        gradient.scatter_add_(1, place, (eps - 1) * is_here.to(self.dtype).unsqueeze(1))
        return loss


class _SummedCrossEntropy(Function):
    """Forward: loss and gradients, chunk by chunk. Backward: the gradients times the scalar that comes in."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        rows: Tensor,
        labels: Tensor,
        loss: _ChunkLoss,
        chunk_tokens: int,
        has_gradient: bool,
        *parameters: Tensor,
    ) -> Tensor:
        losses = hidden.new_empty(rows.shape, dtype=loss.dtype)
        trained = [p for p in parameters if has_gradient and p.requires_grad]
        d_hidden = torch.zeros_like(hidden) if has_gradient and hidden.requires_grad else None
        # At least fp32: a sum over chunks in bf16 would lose what each chunk adds.
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in trained]
        # One for all chunks: to get fresh memory costs more than to compute in it.
        buffer = hidden.new_empty(0, dtype=loss.dtype)

        def one_chunk(rows: Tensor, labels: Tensor, out: Tensor) -> None:  # a function: its logits end with it
            x = hidden.index_select(0, rows).requires_grad_(d_hidden is not None)
            with torch.set_grad_enabled(has_gradient):
                logits = head(x)
            d_logits = buffer.resize_(logits.shape)
            out.copy_(loss(logits.detach(), labels, d_logits))
            if not has_gradient:
                return
            inputs = [x, *trained] if d_hidden is not None else trained
            grads = list(torch.autograd.grad(logits, inputs, d_logits.to(logits.dtype)))
            if d_hidden is not None:
                d_hidden.index_copy_(0, rows, grads.pop(0))
            for total, grad in zip(sums, grads, strict=True):
                total.add_(grad)

        for start in range(0, len(rows), chunk_tokens):  # not split: that makes a chunk of no tokens
            chunk = slice(start, start + chunk_tokens)
            one_chunk(rows[chunk], labels[chunk], losses[chunk])
        ctx.save_for_backward(d_hidden, *(s.to(p.dtype) for s, p in zip(sums, trained, strict=True)))
        ctx.is_trained = [p.requires_grad for p in parameters]
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, *sums = (None if d is None else _scaled(d, grads[0]) for d in ctx.saved_tensors)
        by_parameter = iter(sums)
        return (d_hidden, *[None] * 6, *(next(by_parameter) if trained else None for trained in ctx.is_trained))


def _scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    """Out of place: whoever keeps the graph may come again. The factor stays fp32: bf16 would round a mean's 1/n."""
    return (tensor.to(torch.promote_types(tensor.dtype, factor.dtype)) * factor).to(tensor.dtype)


# --- the recipe -----------------------------------------------------------------------------------------------------

_METADATA = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_meta")
    ),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "element_size", "__len__")),
    torch.is_floating_point,
    torch.numel,
}

# What acts on each logit by itself, by name: with these arguments a slice of the vocabulary is as good as the whole.
_ELEMENTWISE = (
    *("mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "neg", "negative"),
    *("tanh", "clamp", "clip", "clamp_min", "clamp_max", "pow", "exp", "sigmoid"),
)
_OPERATORS = ("mul", "rmul", "truediv", "rtruediv", "add", "radd", "sub", "rsub", "neg", "pow")
_IN_PLACE_OPERATORS = {"imul": "mul", "itruediv": "div", "idiv": "div", "iadd": "add", "isub": "sub", "ipow": "pow"}
_CASTS = ("to", "float", "double", "half", "bfloat16", "contiguous")

# The function that a model calls -> the one that replays it, out of place.
_OUT_OF_PLACE: dict[Callable[..., Any], Callable[..., Tensor]] = {
    **{getattr(torch, name): getattr(torch, name) for name in _ELEMENTWISE},
    **{getattr(Tensor, name): getattr(Tensor, name) for name in (*_ELEMENTWISE, *_CASTS)},
    **{getattr(Tensor, f"__{name}__"): getattr(Tensor, f"__{name}__") for name in _OPERATORS},
}
_IN_PLACE: dict[Callable[..., Any], Callable[..., Tensor]] = {
    **{getattr(o, f"{n}_"): getattr(o, n) for o in (torch, Tensor) for n in _ELEMENTWISE if hasattr(o, f"{n}_")},
    **{getattr(Tensor, f"__{op}__"): getattr(Tensor, name) for op, name in _IN_PLACE_OPERATORS.items()},
}


@dataclass(frozen=True)
class _Operation:
    """One recorded call: `function(*before, logits, *after, **kwargs)`, cast back to the input's dtype if in place."""

    function: Callable[..., Tensor]
    after: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_in_place: bool
    before: tuple[Any, ...] = ()

    def __call__(self, logits: Tensor) -> Tensor:
        result = self.function(*self.before, logits, *self.after, **self.kwargs)
        return result.to(logits.dtype) if self.is_in_place else result


class LogitsRecipe(Tensor):
    """Logits that are not computed: the hidden states they come from, and what the model did to them since.

    A head returns one in place of logits, `[..., H]` -> `[..., V]` without storage. The model's own forward then scales
    it, caps it, casts it; each such call is recorded and gives a recipe again. `replay` does the same to real logits.
    Only what acts on each logit by itself is recorded, since each rank replays it on its own slice of the vocabulary.

    Attributes:
        hidden: what the head was called with, `[..., H]`. operations: what was recorded, in order.
    """

    hidden: Tensor
    operations: tuple[_Operation, ...]

    @staticmethod
    def __new__(
        cls, hidden: Tensor, *, vocab: int, dtype: torch.dtype | None = None, operations: tuple[_Operation, ...] = ()
    ) -> LogitsRecipe:
        shape = (*hidden.shape[:-1], vocab)
        # Not the meta device: a model may ask where its logits are.
        recipe = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype or hidden.dtype, device=hidden.device)
        recipe.hidden, recipe.operations = hidden, operations
        return recipe

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def replay(self, logits: Tensor) -> Tensor:
        """What the model makes of these logits `[..., V/tp]`, out of place."""
        for operation in self.operations:
            logits = operation(logits)
        return logits

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        names = [operation.function.__name__ for operation in self.operations]
        return f"LogitsRecipe(shape={tuple(self.shape)}, dtype={self.dtype}, operations={names})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _record(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        _refuse(func)  # reached only by a way around __torch_function__


def _record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogitsRecipe:
    """The recipe after this call. A call in place changes the recipe itself."""
    is_in_place = func in _IN_PLACE
    if not is_in_place and func not in _OUT_OF_PLACE:
        _refuse(func)
    places = [i for i, arg in enumerate(args) if isinstance(arg, LogitsRecipe)]
    if len(places) != 1 or any(isinstance(value, LogitsRecipe) for value in kwargs.values()):
        _refuse(func)
    place, recipe = places[0], args[places[0]]
    others = [_scalar(arg, func) for i, arg in enumerate(args) if i != place]
    operation = _Operation(
        _IN_PLACE[func] if is_in_place else _OUT_OF_PLACE[func],
        tuple(others[place:]),
        {name: _scalar(value, func) for name, value in kwargs.items()},
        is_in_place,
        before=tuple(others[:place]),
    )
    with torch._C.DisableTorchFunctionSubclass():
        # One logit tells which dtype the call gives, and whether it gives its input back (a cast without effect).
        probe = torch.zeros((1,) * recipe.ndim, dtype=recipe.dtype, device=recipe.device)
        vocab = recipe.shape[-1]
    result = operation(probe)
    if result is probe:
        return recipe
    if is_in_place:
        recipe.operations += (operation,)
        return recipe
    operations = (*recipe.operations, operation)
    return LogitsRecipe(recipe.hidden, vocab=vocab, dtype=result.dtype, operations=operations)


def _scalar(value: Any, func: Callable[..., Any]) -> Any:
    """An argument that is the same for every logit: a number, a dtype, or an untrained tensor of one element."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
        # [1]: replayed logits have fewer dims; 0-dim stays, for it takes no part in the choice of a dtype.
        return value.detach().reshape(1) if value.ndim else value.detach()
    if value is None or isinstance(value, bool | int | float | torch.dtype | torch.memory_format):
        return value
    return _refuse(func)


def _refuse(func: Any) -> NoReturn:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = f"reading .{getattr(getattr(func, '__self__', None), '__name__', '?')}"
    raise UnsupportedError(
        f"this model's forward calls {name} on its logits",
        "with the head split over tp, only what acts on each logit by itself is known to be exact",
        "use tp=1",
    )
