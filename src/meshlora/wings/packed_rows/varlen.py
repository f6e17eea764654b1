"""Attention of all sequences of packed rows in one call: torch's flash attention for sequences of unequal lengths.

Owns: where it stands for transformers' sdpa (`in_one_call`), and its comparison with its definition at first use. Does
not own: the lengths, and attention to one sequence after the other, which runs wherever this does not
(`wings.packed_rows.by_sequence`).

One call for each sequence gives a GPU many short kernels, and their results are joined. The kernel takes where each
sequence ends instead, made on the host and copied without waiting. It computes plain causal attention in two-byte
dtypes: windows that cut a sequence, soft caps and sinks go on as they are, and so does all on CPUs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora.layers.kept_attention import apart
from meshlora_ground.compat.transformers_models import attention_of
from meshlora_ground.transfer import to_device

Lengths = Sequence[Sequence[int]]
# Arguments of transformers' sdpa that it heeds; others it passes over.
_HEEDED = {"dropout": (None, 0.0), "is_causal": (None, True), "position_bias": (None,)}
# Arguments of the kernel by name, besides those by place.
_NEEDED = {"scale", "window_size"}
_SLIDING, _CHUNKED = "sliding_attention", "chunked_attention"  # in the configuration, of layers that may differ
_LIMIT = 0.02  # of two-byte dtypes, as in `wings.context.attention_parts`


class Ends:
    """Where the sequences of a batch end, on its device: made once for all layers.

    Attributes:
        fixed: said on the device alone, of a recorded forward, whatever lengths the host gives; None: of no such one.
    """

    def __init__(self) -> None:
        self.fixed: Tensor | None = None
        self._of: Lengths | None = None
        self._found: Tensor | None = None

    def of(self, lengths: Lengths, device: torch.device) -> Tensor:
        """int32 `[N + 1]`: 0, and the end of each sequence in the tokens `[B S]`."""
        if self.fixed is not None:
            return self.fixed
        # By identity: a forward has one object, and comparing thousands of lengths in each layer costs.
        if self._found is None or self._of is not lengths or self._found.device != device:
            flat = torch.tensor([0, *(n for row in lengths for n in row)], dtype=torch.int32, device="cpu")
            self._of, self._found = lengths, to_device(flat.cumsum(0, dtype=torch.int32), device)
        return self._found


def fits(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Collection[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> bool:
    """Whether transformers' sdpa with these arguments is plain causal attention, for which there is a kernel here.

    masks: of each sequence by itself; None: causal.
    """
    is_plain = not args and all(kwargs.get(name) in values for name, values in _HEEDED.items())
    is_causal = getattr(module, "is_causal", True) and all(mask is None for mask in masks)
    return bool(is_plain and is_causal) and value.shape[-1] == key.shape[-1] and has_kernel(query)


def in_one_call(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, ends: Ends, *, scale: float | None
) -> Tensor:
    """Causal attention of each sequence to itself, `[B, h, S, d]` -> `[B, S, h, d]`; h a multiple of the heads of keys.

    lengths: of each row, summing to S.
    """
    each = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    marks, longest = ends.of(lengths, query.device), max(n for row in lengths for n in row)
    kernel = _kernel()
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if "enable_gqa" in _arguments(kernel):  # torch 2.11 has no such argument, and takes fewer heads of keys unasked
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    out: Tensor = kernel(*each, marks, marks, longest, longest, **options)
    return out.unflatten(0, (query.shape[0], -1))


def has_kernel(query: Tensor) -> bool:
    """Whether the kernel is on the device of `query`, for its dtype and width, and computes its definition."""
    width = query.shape[-1]
    return query.is_cuda and computes_in(query.dtype, width) and agrees(query.device, query.dtype, width)


def computes_in(dtype: torch.dtype, width: int) -> bool:
    """Whether the kernel is made for `dtype` and heads of `width`."""
    return dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256


def why_none(model: Any, dtype: torch.dtype, longest: int) -> str | None:
    """Why there can be no kernel for joined rows of up to `longest` tokens, as far as is known before `model` runs."""
    text = model.config.get_text_config()
    attention = attention_of(text)
    if attention != "sdpa":
        return f"attn_implementation={attention}, and it is for sdpa"
    for module in model.modules():
        width = getattr(module, "qk_head_dim", getattr(module, "head_dim", None))
        if not hasattr(module, "is_causal") or not isinstance(width, int):
            continue
        if not computes_in(dtype, width):
            named = f"{dtype}".removeprefix("torch.")
            return f"heads of {width} in {named}, and it is for bfloat16 and float16, multiples of 8 up to 256"
        if getattr(module, "v_head_dim", width) != width:
            return "values of another width than keys"
    window, of_layers = getattr(text, "sliding_window", None), getattr(text, "layer_types", None) or (_SLIDING,)
    if _CHUNKED in of_layers:  # whatever their size: a mask by chunks is none of distances, and stays that of the row
        return f"attention in chunks of {text.attention_chunk_size} tokens, with a mask of the whole row"
    if isinstance(window, int) and _SLIDING in of_layers and longest >= window:
        return f"a window of {window} tokens, and rows have up to {longest}"
    return None


def _kernel() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@functools.cache
def _arguments(kernel: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters)


@functools.cache
@apart()
def agrees(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether `in_one_call` computes on `device` what its definition says, both ways, for rows of several sequences."""
    if not _arguments(_kernel()) >= _NEEDED:
        return False  # of another torch
    lengths, generator = [[3, 9, 5], [16, 1]], torch.Generator().manual_seed(0)
    given = [torch.randn(2, heads, 17, width, generator=generator, device="cpu").to(dtype) for heads in (4, 2, 2, 4)]
    *inputs, grad = (to_device(tensor, device) for tensor in given)
    grad = grad.transpose(1, 2)
    try:
        found = _both_ways(inputs, grad, lambda q, k, v: in_one_call(q, k, v, lengths, Ends(), scale=width**-0.5))
    except RuntimeError:  # no such kernel for this device
        return False
    wide = [tensor.double().cpu() for tensor in (*inputs, grad)]
    expected = _both_ways(wide[:3], wide[3], lambda q, k, v: _by_definition(q, k, v, lengths))
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(a.cpu().double(), b, rtol=_LIMIT, atol=_LIMIT) for a, b in pairs)


def _both_ways(inputs: Sequence[Tensor], grad: Tensor, function: Callable[..., Tensor]) -> list[Tensor]:
    """The result, and the gradients of the inputs."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _by_definition(query: Tensor, key: Tensor, value: Tensor, lengths: Lengths) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    numbers = torch.stack([torch.repeat_interleave(torch.tensor(row, device="cpu")) for row in lengths])  # of sequences
    sees = (numbers[:, :, None] == numbers[:, None]).tril().unsqueeze(1)
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~sees, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)
