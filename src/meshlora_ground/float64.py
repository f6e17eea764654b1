"""The lift: float64 runs without float32 islands.

Model code computes norms, rotary tables, softmaxes and the loss in float32 whatever the model's dtype. In a float64
run each of these turns a last-bit difference into 1e-7, which hides small faults. Inside `lift()` a request for float32
on a float64 tensor gives float64 instead, and so does a product of matrices of both, or a sample of an image at
coordinates; nothing else changes. In a comparison both sides must run inside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of factors, losses and exact products with tensors of `dtype`: float32, or float64 with float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Of two tensors of one dtype.
_OF_TWO = {Tensor.__matmul__, Tensor.matmul, torch.matmul, nn.functional.grid_sample}


class _Lift(TorchFunctionMode):
    depth = 0  # of nested blocks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if len(args) > 1:
                args = tuple([torch.float64 if a is torch.float32 else a for a in args])
            if kwargs:
                kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        # Other operations promote by themselves. Of transformers below 5.23: frequencies times positions, which are
        # integers made float32. Of glm4v: positions at coordinates, which are integers made float32 too.
        if func in _OF_TWO and {x.dtype for x in args[:2]} == {torch.float32, torch.float64}:
            args = tuple([x.double() for x in args[:2]])
        return func(*args, **kwargs) if kwargs else func(*args)


@contextlib.contextmanager
def lift(enabled: bool = True) -> Iterator[None]:
    """Turn float32 islands of float64 tensors into float64 inside the block."""
    if not enabled:
        yield
        return
    _Lift.depth += 1
    try:
        with _Lift():
            yield
    finally:
        _Lift.depth -= 1


def is_lifted() -> bool:
    """Whether a `lift()` block is active: recomputation in the backward runs outside any TorchFunctionMode."""
    return _Lift.depth > 0
