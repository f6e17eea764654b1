"""The loss of a chunk of tokens in two passes over its logits: `model.kernels: fused`.

Owns: what the two operators compute, by definition on CPUs and by kernels on GPUs; the note on the logits of a head, by
which the loss finds them. Does not own: the loss (`layers.head_loss`), the kernels (`wings.kernels.loss_kernels`).

The first pass reads the logits `[t, V/tp]` and leaves m, Z and x[label] of each token; the second writes the gradient
over them, in their dtype: no tensor of the size of the logits is wider, and none is read in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.layers.head_loss import ChunkKernels
from meshlora.layers.linear import ParallelHead
from meshlora.layers.notes import note


def note_logits(model: nn.Module, kernels: ChunkKernels) -> None:
    """Note `kernels` on the logits of every head of `model`: of those that the model's code changes nobody reads it."""
    for module in model.modules():
        if isinstance(module, ParallelHead):
            head: Any = module
            head.local_logits = _noting(module, kernels)


def _noting(head: ParallelHead, kernels: ChunkKernels) -> Callable[[Tensor], Tensor]:
    def local_logits(x: Tensor) -> Tensor:
        logits = type(head).local_logits(head, x)
        note(logits, kernels)
        return logits

    return local_logits


def chunk_kernels() -> ChunkKernels:
    """The two operators."""
    return ChunkKernels(torch.ops.meshlora.chunk_sums, torch.ops.meshlora.chunk_gradient)


# --- operators --------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("meshlora", "FRAGMENT")
# logits `[t, V]`, of which the first `real` are no padding; place, is_here: of each label, as in `Targets`.
# sums `[4, t]` gets m, Z and x[label] in its first three.
_TARGETS = "int real, Tensor place, Tensor is_here"
_LIBRARY.define(f"chunk_sums(Tensor(a!) sums, Tensor logits, {_TARGETS}) -> Tensor(a!)")
# sums of all ranks -> exp(x - m) / Z - [v == label], 0 in the padding, over the logits.
_LIBRARY.define(f"chunk_gradient(Tensor(a!) logits, Tensor sums, {_TARGETS}) -> Tensor(a!)")


def _sums_by_definition(sums: Tensor, logits: Tensor, real: int, place: Tensor, is_here: Tensor) -> Tensor:
    wide = logits[:, :real].to(sums.dtype)
    least = torch.finfo(sums.dtype).min
    sums[0] = wide.amax(1).clamp(min=least) if real else least
    sums[1] = (wide - sums[0].unsqueeze(1)).exp().sum(1)
    sums[2] = logits.gather(1, place).squeeze(1).to(sums.dtype).where(is_here, 0.0)
    return sums


def _gradient_by_definition(logits: Tensor, sums: Tensor, real: int, place: Tensor, is_here: Tensor) -> Tensor:
    found = (logits.to(sums.dtype) - sums[0].unsqueeze(1)).exp() / sums[1].unsqueeze(1)
    found[:, real:] = 0
    found.scatter_add_(1, place, -is_here.to(found.dtype).unsqueeze(1))
    return logits.copy_(found)


def _sums_on_gpu(sums: Tensor, logits: Tensor, real: int, place: Tensor, is_here: Tensor) -> Tensor:
    from meshlora.wings.kernels import loss_kernels  # which needs Triton

    return loss_kernels.chunk_sums(sums, logits, real, place, is_here)


def _gradient_on_gpu(logits: Tensor, sums: Tensor, real: int, place: Tensor, is_here: Tensor) -> Tensor:
    from meshlora.wings.kernels import loss_kernels

    return loss_kernels.chunk_gradient(logits, sums, real, place, is_here)


_LIBRARY.impl("chunk_sums", _sums_by_definition, "CPU")
_LIBRARY.impl("chunk_gradient", _gradient_by_definition, "CPU")
_LIBRARY.impl("chunk_sums", _sums_on_gpu, "CUDA")
_LIBRARY.impl("chunk_gradient", _gradient_on_gpu, "CUDA")
_LIBRARY.impl("chunk_sums", lambda sums, *_: sums, "Meta")
_LIBRARY.impl("chunk_gradient", lambda logits, *_: logits, "Meta")
