"""Gradients of several adapters that were trained in one backward: what `train.gradsync` is for one.

Owns: their memory, one flat buffer of which every gradient is a view; one sum over ranks for each set of axes, of all
adapters together; division by each adapter's own count, and each adapter's own norm. Does not own: which axes those are
(`plan.grads`), the gradients of one adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.manage import Factor, adapter_factors, runtime
from meshlora.compat import norm_of_each
from meshlora.errors import MeshloraError
from meshlora.parallel.collectives import all_reduce_sum
from meshlora.plan.grads import Segment, segment_of


@dataclass(frozen=True)
class _Piece:
    """Gradients of one adapter that are summed over the same axes and lie on the same ranks.

    values: a view of the buffer. adapter: its number. segment: what they have in common.
    """

    values: Tensor
    adapter: int
    segment: Segment

    @property
    def axes(self) -> tuple[list[str], list[str]]:
        """Over which they are summed; in an order that is the same on every rank."""
        return sorted(self.segment.grad_axes), sorted(self.segment.mean_axes)


class ManyGradients:
    """The gradients of the adapters `names` on this rank, which are zero until a backward adds to them.

    Raises:
        MeshloraError: an adapter has no factor on this rank.
    """

    def __init__(self, model: Any, names: list[str]) -> None:
        self.mesh, self.names = runtime(model).mesh, names
        tp = self.mesh.tp
        entries: list[tuple[int, Factor, list[Segment]]] = [
            (number, factor, factor.rule.segments(rank=tp.rank, size=tp.size))
            for number, name in enumerate(names)
            for factor in adapter_factors(model, name)
        ]
        # Neighbours have the same axes, and within them the same adapter: a sum has few pieces.
        entries.sort(key=lambda entry: (_place(entry[2]), entry[0]))
        size = sum(factor.parameter.numel() for _, factor, _ in entries)
        dtype = entries[0][1].parameter.dtype
        self._flat = torch.zeros(size, dtype=dtype, device=self.mesh.device)
        self.pieces: list[_Piece] = []
        start = 0
        runs: dict[tuple[Any, ...], tuple[int, int, Segment]] = {}
        for number, factor, segments in entries:
            stop = start + factor.parameter.numel()
            grad = self._flat[start:stop].view_as(factor.parameter)
            factor.parameter.grad = grad
            if len(segments) > 1:
                self.pieces += [_Piece(segment_of(grad, segment), number, segment) for segment in segments]
            else:
                first, _, segment = runs.get((_place(segments), number), (start, stop, segments[0]))
                runs[_place(segments), number] = first, stop, segment
            start = stop
        for (_, number), (first, last, segment) in runs.items():
            self.pieces.append(_Piece(self._flat[first:last], number, segment))
        self.pieces.sort(key=lambda piece: (piece.axes, piece.adapter))

    def zero(self) -> None:
        """Before the first backward of a step."""
        self._flat.zero_()

    @torch.no_grad()
    def finish(self, counts: Tensor) -> None:
        """Turn gradients of summed losses into those of each adapter's own mean. Collective, once per optimizer step.

        counts: `[K]`, float64, the trained tokens of each adapter in the step, over all ranks: not looked at here
            (`check_counts`), as a GPU would be waited for.
        """
        buckets: dict[str, list[_Piece]] = {}
        for piece in self.pieces:
            buckets.setdefault(str(piece.axes), []).append(piece)
        for pieces in buckets.values():
            segment = pieces[0].segment
            axis = self.mesh.over(segment.grad_axes | segment.mean_axes)
            if axis.size > 1:
                summed = all_reduce_sum(torch.cat([piece.values.reshape(-1) for piece in pieces]), axis)
                for piece, values in zip(pieces, summed.split([p.values.numel() for p in pieces]), strict=True):
                    piece.values.copy_(values.view_as(piece.values))
        for piece in self.pieces:
            piece.values.mul_(1 / (counts[piece.adapter] * self.mesh.over(piece.segment.mean_axes).size))

    def check_counts(self, counts: list[float]) -> None:
        """Raises:
        MeshloraError: an adapter has no trained token.
        """
        for name, count in zip(self.names, counts, strict=True):
            if count == 0:
                raise MeshloraError(f"adapter {name}: no rank has a trained token of it in this step")

    @torch.no_grad()
    def clip(self, max_norms: list[float]) -> Tensor:
        """Scale each adapter's gradients so that their own 2-norm is at most its own of `max_norms` `[K]`; 0: not.

        Collective. Returns the norms before, `[K]`, float64, on the device: every logical element counts once, whoever
        and how many hold it. One that is not finite makes that adapter's gradients no numbers.
        """
        squares: list[Tensor] = [torch.zeros((), dtype=torch.float64, device=self.mesh.device)] * len(self.names)
        of_pieces = norm_of_each([piece.values for piece in self.pieces], dtype=torch.float64)
        for piece, norm_of_piece in zip(self.pieces, of_pieces, strict=True):
            holders = piece.segment.copies * self.mesh.topology.size_over(piece.segment.replicas)
            squares[piece.adapter] = squares[piece.adapter] + norm_of_piece.square() / holders
        norms = all_reduce_sum(torch.stack(squares), self.mesh.world).sqrt()
        for piece in self.pieces:
            if most := max_norms[piece.adapter]:  # as `gradsync.clip_gradients`
                piece.values.mul_((most / (norms[piece.adapter] + 1e-6)).clamp(max=1.0))
        return norms


def _place(segments: list[Segment]) -> tuple[Any, ...]:
    """What makes factors neighbours: their axes and holders. Those whose rows differ in them come last."""
    if len(segments) > 1:
        return (True,)
    (one,) = segments
    axes = (one.grad_axes, one.mean_axes, one.replicas)
    return (False, *(tuple(sorted(each)) for each in axes), one.copies)
