"""LoRA factors in a `.pt` file, as `gpt2_ft.py` of microsoft/LoRA saves them.

Nothing of the file is run. Does not own: names and shapes of its tensors (`meshlora_extra.paper.export`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshlora_ground.errors import UserError, reason

PICKLED = frozenset((".bin", ".pt", ".pth", ".ckpt"))
# Keys under which people wrap a state dict.
_WRAPPERS = ("model_state_dict", "state_dict", "model")
_FACTORS = (".lora_A", ".lora_B")


def read_pickled(file: Path) -> dict[str, Tensor]:
    """The state dict in `file`, which may be wrapped: `{"model_state_dict": ...}`.

    torch's restricted unpickler reads it, which builds tensors and containers and calls nothing else.

    Raises:
        UserError: missing, damaged, with anything but tensors and containers, or no state dict.
    """
    if not file.is_file():
        raise UserError(f"{file}", "there is no such file")
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # untrusted bytes read by a library may raise anything
        rule = f"it cannot be read as tensors alone ({reason(error)})"
        raise UserError(f"{file}", rule, "a whole model, or code, is not read: save its state_dict()") from error
    for name in _WRAPPERS:  # from the outside in
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise UserError(f"{file}", "it holds no state dict", "save {'model_state_dict': lora.lora_state_dict(model)}")
    tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
    for key, tensor in tensors.items():
        is_plain = tensor.layout == torch.strided and not tensor.is_meta
        if key.endswith(_FACTORS) and not (is_plain and tensor.is_floating_point() and torch.isfinite(tensor).all()):
            raise UserError(f"{file}: {key}", "its values are not finite floats", "use an earlier checkpoint")
    return tensors


def without_base(
    file: Path, tensors: Mapping[str, Tensor], base: Callable[[str], Tensor | None]
) -> tuple[dict[str, Tensor], int]:
    """(tensors without those of the frozen base, how many these are), of a file that may hold the whole model.

    It does if the weight beside some `lora_A` is there. base: the model's own tensor of a name, if it has one; the
    file's must be the same once they have its dtype, else the file trained more than an adapter.

    Raises:
        UserError: names the first that differs.
    """
    owners = {key.rpartition(".")[0] for key in tensors if key.endswith(_FACTORS)}
    if not any(f"{owner}.weight" in tensors for owner in owners):
        return dict(tensors), 0
    kept = {key: tensor for key, tensor in tensors.items() if key.endswith(_FACTORS)}
    compared = 0
    for key, tensor in tensors.items():
        if key in kept or (own := base(key)) is None:
            continue
        compared += 1  # of names that the model has
        if own.shape != tensor.shape or not torch.equal(own, tensor.to(own.dtype)):
            rule = "it differs from the model's, so that more was trained than an adapter, or on another model"
            raise UserError(f"{file}: {key}", rule, "give the model that was trained from")
    if not compared:
        raise UserError(f"{file}", "none of its weights belongs to the model", "give the model that was trained from")
    return kept, len(tensors) - len(kept)


def check_effect(file: Path, changes: Mapping[str, Tensor]) -> None:
    """Refuse an adapter without effect. changes: every B, and trained biases. Raises: UserError: all are zero."""
    if not any(tensor.any() for tensor in changes.values()):
        rule = "every lora_B is zero, so that the adapter has no effect"
        raise UserError(f"{file}", rule, "was it saved before its training?")
