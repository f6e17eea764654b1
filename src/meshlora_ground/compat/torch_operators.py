"""Private names of torch: operators, as a TorchDispatchMode sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Sees every operator below autograd, in a backward too. torch's notes on extending it show this import.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# The operators behind `F.grouped_mm`, behind products in float8, and behind `Tensor.item` and `int(tensor)`.
GROUPED_PRODUCT, FLOAT8_PRODUCT, READ_NUMBER = "aten::_grouped_mm", "aten::_scaled_mm", "aten::_local_scalar_dense"
# How those begin that change each tensor of a list. Exposed only through torch's optimizers.
ON_EACH = "aten::_foreach_mul_".removesuffix("mul_")
# Fused attention: its output, and what its backward needs beside it. On CPUs, on GPUs, and of sequences of packed rows.
FUSED_ATTENTIONS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
    }
)


def map_tensors(function: Callable[[Tensor], Any], nested: Any) -> Any:
    """Apply `function` to each tensor in `nested` arguments. torch's pytrees have no public module."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, function, nested)


def schema_of(operator: Any) -> Any:
    """The arguments and returns of an operator, with their aliases. No operator makes it public."""
    return operator._schema


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number unique among live storages. The public `data_ptr` is 0 for every storage without memory."""
    return int(storage._cdata)
