"""Dropout of a model off, and on again: masks of torch's generators cannot be drawn a second time."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def without_dropout(model: nn.Module, notes: list[str]) -> Callable[[], None]:
    """Set every dropout to 0; returns what sets them back."""
    changed: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_rate = "dropout" in name or (name == "p" and isinstance(module, _DROPOUTS))
            if is_rate and isinstance(value, float) and value > 0:
                changed.append((module, name, value))
                setattr(module, name, 0.0)
    if changed:
        rates = sorted({value for _, _, value in changed})
        notes.append(f"dropout ({', '.join(map(str, rates))}) is off in the recorded steps: its masks are not replayed")

    def back() -> None:
        for module, name, value in changed:
            setattr(module, name, value)

    return back
