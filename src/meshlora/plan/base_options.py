"""How a base model is built and stored: what run files, commands and `meshlora.load` let a user choose.

Owns: the options' names, types and defaults. Does not own: what they do (`loading.blueprint`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """How a base model is built and stored.

    Attributes:
        dtype: of the computation; auto: as the checkpoint is stored.
        attn_implementation: as in transformers; default: what it chooses.
        trust_remote_code: run code that lies beside the model.
        disable_dropout: set all dropout in the model itself to 0; unsupported: only where it is not supported.
        allow_unused_weights: the checkpoint may hold weights that the model has no place for.
        quantization: of the frozen base while it is loaded; keep: as the checkpoint is stored.
        compute: the products of the frozen linears in float8: fp8, in both directions, or fp8_backward; None: in dtype.
        kernels: fused ones of a package, on GPUs; auto: liger where it is installed and the preflight proves there;
            fused: with low-rank terms of gated MLPs and of sums of the residual stream in kernels of our own.
        plan: file with the plan of a family that no table has, as `meshlora verify --save` writes it.
    """

    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    disable_dropout: bool | Literal["unsupported"] = False
    allow_unused_weights: bool = False
    quantization: Literal["nf4", "int8", "mxfp4", "nvfp4", "fp8", "keep"] | None = None
    compute: Literal["fp8", "fp8_backward"] | None = None
    kernels: Literal["auto", "liger", "fused", "none"] = "auto"
    plan: str | None = None
