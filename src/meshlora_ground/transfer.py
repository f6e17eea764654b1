"""From the host to the device without waiting: small tensors that the host made, not weights (`model`)."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` on `device`. A GPU fetches it in its turn, and the host goes on.

    That needs memory that cannot be paged out: a copy from other memory begins when all work before it is done, and
    the host waits for that.
    """
    if tensor.is_cpu and torch.device(device).type == "cuda":
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
