"""Dropout and noise of a model off, and on again: what torch's generators drew cannot be drawn a second time."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NOISES = ("neftune_noise_alpha", "jitter_noise", "router_jitter_noise")  # on embedded tokens, and on routers' inputs


def without_dropout(model: nn.Module, notes: list[str]) -> Callable[[], None]:
    """Set every dropout and noise to 0; returns what sets them back."""
    changed: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_rate = "dropout" in name or name in _NOISES or (name == "p" and isinstance(module, _DROPOUTS))
            if is_rate and isinstance(value, float) and value > 0:
                changed.append((module, name, value))
                setattr(module, name, 0.0)
    if changed:
        rates = sorted({value for _, _, value in changed})
        shown = ", ".join(map(str, rates))
        notes.append(f"dropout or noise ({shown}) is off in the recorded steps: its draws are not replayed")

    def back() -> None:
        for module, name, value in changed:
            setattr(module, name, value)

    return back
