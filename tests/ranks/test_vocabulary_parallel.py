"""The loss over a split vocabulary is that of the whole one, and no rank ever holds all logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshlora.comm.collectives import all_reduce_sum, copy_one_to_each
from meshlora.comm.groups import Axis, open_mesh
from meshlora.layers import head_loss as vocabulary
from meshlora.layers.head_loss import IGNORED, summed_cross_entropy_from_hidden
from meshlora_ground.topology import Topology
from tests.for_each import for_each
from tests.pool import Pool

T, H, R = 24, 6, 2


@dataclass(frozen=True)
class Whole:
    """What one process has: a head with LoRA behind a soft cap, hidden states and labels."""

    hidden: Tensor
    weight: Tensor
    a: Tensor
    b: Tensor
    labels: Tensor

    def logits(self, hidden: Tensor, rows: slice = slice(None)) -> Tensor:
        """The logits of these rows of the head."""
        return 5.0 * torch.tanh((hidden @ self.weight[rows].T + (hidden @ self.a.T) @ self.b[rows].T) / 5.0)


def _whole(vocab: int, *, num_tokens: int = T) -> Whole:
    generator = torch.Generator().manual_seed(vocab)
    shapes = ((num_tokens, H), (vocab, H), (R, H), (vocab, R))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    labels = torch.randint(0, vocab, (num_tokens,), generator=generator)
    labels[:4] = torch.tensor([0, vocab - 1, vocab // 2, IGNORED])
    return Whole(*tensors, labels)


def _local(tensor: Tensor, axis: Axis, *, padding: float) -> Tensor:
    """This rank's rows of a matrix that is padded at its end."""
    missing = -len(tensor) % axis.size
    padded = torch.cat([tensor.detach(), tensor.new_full((missing, tensor.shape[1]), padding)])
    return padded.chunk(axis.size)[axis.rank].clone().requires_grad_()


def _parts(whole: Whole, tp: int, options: dict[str, Any], padding: float) -> dict[str, Tensor]:
    """The loss and this rank's gradients: of hidden and A summed over tp, of weight and B for its own rows."""
    axis = open_mesh(Topology(tp=tp)).tp
    hidden = whole.hidden.detach().requires_grad_()
    a = whole.a.detach().requires_grad_()
    weight, b = (_local(m, axis, padding=padding) for m in (whole.weight, whole.b))
    mine = Whole(hidden, weight, a, b, whole.labels)
    options = dict(options)
    chunk_tokens = options.pop("chunk_tokens", None) or len(whole.hidden)
    with mock.patch.object(vocabulary, "chunk_tokens", return_value=chunk_tokens):
        loss = summed_cross_entropy_from_hidden(
            copy_one_to_each(hidden, axis),  # the border: sums the gradient
            mine.logits,
            whole.labels,
            (weight, a, b),
            axis=axis,
            vocab=len(whole.weight),
            **options,
        )
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert a.grad is not None
    assert b.grad is not None
    d_a = all_reduce_sum(a.grad, axis)
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad, "a": d_a, "b": b.grad}


def _worst(parts: list[dict[str, Tensor]], whole: Whole, label_smoothing: float) -> float:
    """Greatest relative distance, of any rank's loss or gradient, from one process; the padding's gradient is zero."""
    loss = F.cross_entropy(whole.logits(whole.hidden), whole.labels, reduction="sum", label_smoothing=label_smoothing)
    leaves = [whole.hidden, whole.weight, whole.a, whole.b]
    expected = dict(zip(("hidden", "weight", "a", "b"), torch.autograd.grad(loss, leaves), strict=True))
    expected["loss"] = loss.detach()
    worst = 0.0
    for name, value in expected.items():
        by_rank = [part[name] for part in parts]
        if name in ("weight", "b"):
            joined = torch.cat(by_rank)
            assert not joined[len(value) :].any(), f"the padding of {name} has a gradient"
            by_rank = [joined[: len(value)]]
        worst = max(worst, *(float((got - value).norm() / value.norm()) for got in by_rank))
    return worst


@for_each("chunk_tokens", [5, None])
@for_each("label_smoothing", [0.0, 0.1])
@for_each("tp", [2, 4])
def test_loss_and_gradients_are_those_of_one_process(
    tp: int, label_smoothing: float, chunk_tokens: int | None, pools: Callable[[int], Pool]
) -> None:
    whole = _whole(50)  # 50 entries on 4 ranks are 13, 13, 13 and 11
    options = {"label_smoothing": label_smoothing, "chunk_tokens": chunk_tokens}
    parts = pools(tp).run(_parts, whole, tp, options, 0.0)
    assert _worst(parts, whole, label_smoothing) < 1e-13


@pytest.mark.parametrize("vocab", [50, 5])  # 5 entries on 4 ranks are 2, 2, 1 and none
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_what_the_padding_holds_changes_nothing(
    vocab: int, label_smoothing: float, pools: Callable[[int], Pool]
) -> None:
    whole = _whole(vocab)
    options = {"label_smoothing": label_smoothing, "chunk_tokens": 7}
    parts = pools(4).run(_parts, whole, 4, options, 1e6)
    assert _worst(parts, whole, label_smoothing) < 1e-13


def test_ranks_agree_on_the_loss_to_the_last_bit(pools: Callable[[int], Pool]) -> None:
    parts = pools(4).run(_parts, _whole(50), 4, {"label_smoothing": 0.1}, 0.0)
    assert len({float(part["loss"]) for part in parts}) == 1


def test_a_batch_without_trained_tokens_is_zero_on_every_rank(pools: Callable[[int], Pool]) -> None:
    whole = _whole(50)
    untrained = Whole(whole.hidden, whole.weight, whole.a, whole.b, torch.full_like(whole.labels, IGNORED))
    for part in pools(2).run(_parts, untrained, 2, {}, 0.0):
        assert not any(value.any() for value in part.values())


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator returns, in both passes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


def _largest(whole: Whole, tp: int, options: dict[str, Any]) -> int:
    with _Largest() as largest:
        _parts(whole, tp, options, 0.0)
    return largest.num_elements


def test_all_logits_of_all_tokens_never_exist(pools: Callable[[int], Pool]) -> None:
    whole = _whole(512, num_tokens=256)
    options = {"label_smoothing": 0.1, "chunk_tokens": 16}
    assert max(pools(2).run(_largest, whole, 2, options)) < 256 * 512 / 8
    with _Largest() as largest:  # the plain way is caught
        F.cross_entropy(whole.logits(whole.hidden), whole.labels).backward()
    assert largest.num_elements >= 256 * 512


def _weighted(log_p: Tensor, entropy: Tensor) -> Tensor:
    """A sum in which each token's log-probability and entropy have weights of their own."""
    weights = torch.linspace(-1, 2, len(log_p), dtype=torch.float64)
    return (weights * log_p + weights.flip(0) ** 2 * entropy).sum()


def _scores(whole: Whole, tp: int) -> dict[str, Tensor]:
    """Body of a rank: all scores, and the gradients of a weighted sum."""
    axis = open_mesh(Topology(tp=tp)).tp
    hidden, a = (x.detach().requires_grad_() for x in (whole.hidden, whole.a))
    weight, b = (_local(m, axis, padding=3.0) for m in (whole.weight, whole.b))
    mine = Whole(hidden, weight, a, b, whole.labels)
    with mock.patch.object(vocabulary, "chunk_tokens", return_value=7):
        log_p, entropy, mean, is_top, squares = vocabulary.scores_from_hidden(
            copy_one_to_each(hidden, axis),
            mine.logits,
            whole.labels,
            (weight, a, b),
            axis=axis,
            vocab=len(whole.weight),
        )
        _weighted(log_p, entropy).backward()
    gradients = {name: value.grad for name, value in {"hidden": hidden, "weight": weight, "a": a, "b": b}.items()}
    gradients["a"] = all_reduce_sum(gradients["a"], axis)  # type: ignore[arg-type]
    found = {"log_p": log_p, "entropy": entropy, "mean": mean, "is_top": is_top, "squares": squares, **gradients}
    return {name: value.detach() for name, value in found.items() if value is not None}


@pytest.mark.parametrize(("vocab", "tp"), [(50, 2), (5, 4)])
def test_scores_and_their_gradients_are_those_of_one_process(vocab: int, tp: int, pools: Callable[[int], Pool]) -> None:
    whole = _whole(vocab)
    whole.labels[5] = int(whole.logits(whole.hidden)[5].argmax())
    logits = whole.logits(whole.hidden)
    is_trained = whole.labels != IGNORED
    log_p = torch.log_softmax(logits, -1)
    expected = {
        "log_p": log_p.gather(1, whole.labels.clamp(min=0).unsqueeze(1)).squeeze(1).where(is_trained, 0.0),
        "entropy": -(log_p.exp() * log_p).sum(-1).where(is_trained, 0.0),
        "mean": logits.mean(-1).where(is_trained, 0.0),
        "squares": log_p.exp().square().sum(-1).log().where(is_trained, 0.0),
        "is_top": (logits.argmax(-1) == whole.labels).double(),
    }
    leaves = [whole.hidden, whole.weight, whole.a, whole.b]
    gradients = torch.autograd.grad(_weighted(expected["log_p"], expected["entropy"]), leaves)
    expected |= dict(zip(("hidden", "weight", "a", "b"), gradients, strict=True))
    parts = pools(tp).run(_scores, whole, tp)
    assert 0 < expected["is_top"].sum() < len(whole.labels)
    for name, value in expected.items():
        by_rank = [part[name] for part in parts]
        by_rank = [torch.cat(by_rank)[: len(value)]] if name in ("weight", "b") else by_rank
        for got in by_rank:
            torch.testing.assert_close(got, value.detach(), rtol=1e-11, atol=1e-12)
