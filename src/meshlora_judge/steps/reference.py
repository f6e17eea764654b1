"""The gradients of recorded micro-batches on one process: in float64, and in the precision of the trainer.

Where float64 does not fit into memory it is float32, whose own rounding is measured: the same rows one by one.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora_ground.errors import UnsupportedError
from meshlora_judge.recording.files import Recording
from meshlora_judge.steps import causes
from meshlora_judge.steps.fit import combined
from meshlora_judge.steps.losses import PAIRED, is_packed, loss_sum
from meshlora_judge.steps.model import check_base, replayed_model, set_values, trained_by_peft
from meshlora_judge.steps.ranks import MicroBatchOf

_SCALED = causes.NUMBERS[0]
# Of this machine's memory, for the reference and the same model in the trainer's precision.
_SHARE = 0.7


class Reference:
    """The models of the ranks' recordings.

    Attributes:
        loss: what it is. precision: float64, or float32. start: the trained values that the run began with, if known.
        shapes: trained parameter -> its whole shape. wanted: what PEFT would train; empty if unknown.
    """

    def __init__(self, base: str, recordings: Sequence[Recording]) -> None:
        recording = recordings[0]
        if (recording.config.get("text_config") or recording.config).get("output_router_logits"):
            rule = "the routers' load-balancing loss is not replayed"
            raise UnsupportedError("output_router_logits of the configuration", rule, "record a run without it")
        self.base, self.recording, self.loss = base, recording, recording.loss
        self.precision = _precision_for(recording)
        self._exact = replayed_model(base, recording, dtype=self.precision)
        for other in recordings[1:]:
            check_base(self._exact, other, base)
        self._rounded: Any = None
        self.start: Mapping[str, Tensor] | None = None
        self.shapes = {name: list(p.shape) for name, p in self._exact.named_parameters() if p.requires_grad}
        self.wanted = trained_by_peft(base, recording)

    def begin(self, before: Mapping[str, Tensor]) -> None:
        """The first recorded step has the values `before`: if the run began there, they are what DPO compares with.

        An adapter that PEFT draws at random (`init_lora_weights: false`) is none that was trained: trainers then take
        the bare base, and what is right cannot be told.
        """
        is_drawn = any(given.get("init_lora_weights") is False for given in self.recording.adapters.values())
        if not self.recording.steps[0].optimizer["state"] and not is_drawn:
            self.start = dict(before)

    def dtype_of(self, name: str) -> str:
        """The dtype that sets how exact the trainer's gradient of `name` can be."""
        dtypes = {lies["dtype"] for lies in self.recording.frozen.values()} or {"float64"}
        own = {*dtypes, self.recording.trained[name]["dtype"], self.recording.autocast or "float64"}
        # Base, adapter or autocast: whichever of them is coarse rounds every gradient on its way.
        for each in ("float16", "bfloat16", "float32"):
            if each in own:
                return each
        return "float64"

    def gradients(
        self, values: Mapping[str, Tensor], micro: Sequence[MicroBatchOf], *, variant: str = ""
    ) -> tuple[list[dict[str, Tensor]], list[int]]:
        """(the gradient of each micro-batch's summed loss, its number of tokens, pairs or sequences), in float64."""
        return self._of(self._exact, values, micro, variant)

    def rounded_gradients(self, values: Mapping[str, Tensor], micro: Sequence[MicroBatchOf]) -> list[dict[str, Tensor]]:
        """The same in the trainer's precision: in float64 too transformers computes norms and softmax in float32."""
        if all(self.dtype_of(name) == "float64" for name in self.shapes):
            return self._of(self._exact, values, micro, "", is_lifted=False)[0]
        if self._rounded is None:
            self._rounded = replayed_model(self.base, self.recording, dtype=None)
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.recording.autocast:
            context = torch.autocast("cpu", dtype=getattr(torch, self.recording.autocast))
        with context:
            return self._of(self._rounded, values, micro, "", is_lifted=False)[0]

    def row_by_row(self, values: Mapping[str, Tensor], micro: Sequence[MicroBatchOf]) -> list[dict[str, Tensor]]:
        """`gradients` by other sums of the same terms: how far they are apart is rounding. Pairs stay together."""
        found = list[dict[str, Tensor]]()
        for each in micro:
            rows = [each]
            if self.loss["kind"] not in PAIRED:
                rows = [_row(each, row) for row in range(len(each.given["input_ids"]))]
            gradients, _ = self._of(self._exact, values, rows, "")
            found.append(combined(gradients, [1.0] * len(rows)))
        return found

    def variants(self, micro: Sequence[MicroBatchOf]) -> Iterator[tuple[str, str]]:
        """(key, words) of the mistakes that make sense for these micro-batches."""
        given = micro[0].given
        masks = [mask for each in micro if (mask := each.given.get("attention_mask")) is not None]
        is_masked = any(not bool((mask == 1).all()) for mask in masks)
        for way in causes.SCALES:
            yield f"{_SCALED}{way}", f"it fits a forward in which {_SCALED}{way}"
        for variant in causes.VARIANTS[self.loss["kind"]]:
            if variant == "no positions" and "position_ids" not in given:
                continue
            if variant == causes.OVER_BORDERS and not is_packed(given):
                continue
            if variant == causes.BARE_REFERENCE and self.start is None:
                continue
            # Without padding these two are no mistakes: they give the right gradient.
            if variant in ("no attention mask", "padding is trained too") and not is_masked:
                continue
            yield variant, f"it fits another loss or forward: {variant}"

    def _of(
        self,
        model: Any,
        values: Mapping[str, Tensor],
        micro: Sequence[MicroBatchOf],
        variant: str,
        *,
        is_lifted: bool = True,
    ) -> tuple[list[dict[str, Tensor]], list[int]]:
        set_values(model, values)
        found, counts = list[dict[str, Tensor]](), list[int]()
        way = variant.removeprefix(_SCALED) if variant.startswith(_SCALED) else "1"
        with _scaled(model, way):
            for each in micro:
                model.zero_grad(set_to_none=True)
                total, count = loss_sum(model, each.given, self.loss, variant, start=self.start, is_lifted=is_lifted)
                if count and total.requires_grad:
                    total.backward()
                gradients = {}
                for name, parameter in model.named_parameters():
                    if parameter.requires_grad:
                        # An expert that no token reached has none, where the trainer may have zeros.
                        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                        gradients[name] = own.to(torch.float64, copy=True)
                found.append(gradients)
                counts.append(count)
        model.zero_grad(set_to_none=True)
        return found, counts


def _precision_for(recording: Recording) -> torch.dtype:
    if any(lies["dtype"] == "float64" for lies in recording.frozen.values()):
        return torch.float64
    number = sum(math.prod(lies["shape"]) for lies in recording.frozen.values())
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.float64 if number * (8 + 4) <= _SHARE * there else torch.float32


def _row(micro: MicroBatchOf, row: int) -> MicroBatchOf:
    """One row of a micro-batch, as one of its own."""
    number = len(micro.given["input_ids"])
    given = dict(micro.given)
    for name, value in given.items():
        if isinstance(value, Tensor) and value.ndim and len(value) == number:
            given[name] = value[row : row + 1]
    return MicroBatchOf(micro.rank, micro.number, given)


@contextlib.contextmanager
def _scaled(model: Any, way: str) -> Iterator[None]:
    """Every adapter's scale as in `causes.SCALES`, or times a number."""
    changed = []
    for module in model.modules():
        scaling = getattr(module, "scaling", None)
        if way != "1" and isinstance(scaling, dict):
            changed.append((scaling, dict(scaling)))
            for name, scale in changed[-1][1].items():
                scaling[name] = _scale(way, scale, module.r[name])
    try:
        yield
    finally:
        for scaling, before in changed:
            scaling.update(before)


def _scale(way: str, scale: float, r: int) -> float:
    known = dict(zip(causes.SCALES, (1.0, scale * scale, scale / r, scale * r**0.5, scale / r**0.5), strict=True))
    return known[way] if way in known else scale * float(way)
