"""The gradients of recorded micro-batches on one process: in float64, and in the precision of the trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora_judge.recording.files import Recording
from meshlora_judge.steps import causes
from meshlora_judge.steps.losses import loss_sum
from meshlora_judge.steps.model import replayed_model, set_values, trained_by_peft
from meshlora_judge.steps.ranks import MicroBatchOf

_SCALED = "the adapter is scaled by "


class Reference:
    """The models of one recording.

    Attributes:
        loss: what it is. shapes: trained parameter -> its whole shape. wanted: what PEFT would train; empty if unknown.
    """

    def __init__(self, base: str, recording: Recording) -> None:
        self.base, self.recording, self.loss = base, recording, recording.loss
        self._exact = replayed_model(base, recording, dtype=torch.float64)
        self._rounded: Any = None
        named = {name: p for name, p in self._exact.named_parameters() if p.requires_grad}
        self.shapes = {name: list(parameter.shape) for name, parameter in named.items()}
        self.wanted = trained_by_peft(base, recording)

    def dtype_of(self, name: str) -> str:
        """The dtype that sets how exact the trainer's gradient of `name` can be."""
        dtypes = {lies["dtype"] for lies in self.recording.frozen.values()} or {"float64"}
        own = {*dtypes, self.recording.trained[name]["dtype"], self.recording.autocast or "float64"}
        return next((each for each in ("float16", "bfloat16", "float32") if each in own), "float64")

    def gradients(
        self, values: Mapping[str, Tensor], micro: Sequence[MicroBatchOf], *, variant: str = ""
    ) -> tuple[list[dict[str, Tensor]], list[int]]:
        """(the gradient of each micro-batch's summed loss, its number of tokens, pairs or sequences), in float64."""
        return self._of(self._exact, values, micro, variant)

    def rounded_gradients(
        self, values: Mapping[str, Tensor], micro: Sequence[MicroBatchOf]
    ) -> list[dict[str, Tensor]] | None:
        """The same in the trainer's precision; None if that is float64."""
        if all(self.dtype_of(name) == "float64" for name in self.shapes):
            return None
        if self._rounded is None:
            self._rounded = replayed_model(self.base, self.recording, dtype=None)
        autocast = self.recording.autocast
        kind = getattr(torch, autocast) if autocast else None
        with torch.autocast("cpu", dtype=kind) if kind else contextlib.nullcontext():
            return self._of(self._rounded, values, micro, "")[0]

    def variants(self, micro: Sequence[MicroBatchOf]) -> Iterator[tuple[str, str]]:
        """(key, words) of the mistakes that make sense for these micro-batches."""
        given = micro[0].given
        masks = [each.given.get("attention_mask") for each in micro]
        for variant in causes.VARIANTS[self.loss["kind"]]:
            if variant == "no positions" and "position_ids" not in given:
                continue
            if variant in ("no attention mask", "padding is trained too") and all(
                mask is None or bool((mask == 1).all()) for mask in masks
            ):
                continue
            yield variant, f"it fits another loss: {variant}"
        for scale in causes.SCALES:
            yield f"{_SCALED}{scale:g}", f"it fits a forward in which the adapter is scaled by {scale:g}"

    def _of(
        self, model: Any, values: Mapping[str, Tensor], micro: Sequence[MicroBatchOf], variant: str
    ) -> tuple[list[dict[str, Tensor]], list[int]]:
        set_values(model, values)
        found, counts = list[dict[str, Tensor]](), list[int]()
        scale = float(variant.removeprefix(_SCALED)) if variant.startswith(_SCALED) else 1.0
        with _scaled(model, scale):
            for each in micro:
                model.zero_grad(set_to_none=True)
                total, count = loss_sum(model, each.given, self.loss, variant)
                if count:
                    total.backward()
                gradients = {}
                for name, parameter in model.named_parameters():
                    if parameter.requires_grad:
                        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                        gradients[name] = grad.double().clone()
                found.append(gradients)
                counts.append(count)
        model.zero_grad(set_to_none=True)
        return found, counts


@contextlib.contextmanager
def _scaled(model: Any, factor: float) -> Iterator[None]:
    """Every adapter's scale times `factor`."""
    changed = []
    for module in model.modules():
        scaling = getattr(module, "scaling", None)
        if factor != 1 and isinstance(scaling, dict):
            changed.append((scaling, dict(scaling)))
            for name in scaling:
                scaling[name] *= factor
    try:
        yield
    finally:
        for scaling, before in changed:
            scaling.update(before)
