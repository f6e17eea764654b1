"""Slow paths of a run: those known from its facts before it starts, and `train.require_fast`.

Owns: which these are, and the error. Does not own: what a slow path is, and those that show as code takes them
(`meshlora_ground.slow_paths`).

Only what has a better way on the devices of the run is one: on CPUs nothing is said of kernels that GPUs have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from meshlora.loading.blueprint import Blueprint
from meshlora.wings.kernels.fused import fusable
from meshlora.wings.kernels.liger import liger_version
from meshlora.wings.kernels.rms_norm import is_known
from meshlora.wings.packed_rows.by_sequence import knows_packed_rows
from meshlora_ground.compat.transformers_models import attention_of, has_sdpa
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError
from meshlora_ground.slow_paths import EXPERTS_ONE_BY_ONE, WHOLE_MASK, SlowPath
from meshlora_ground.versions import version_of

_TRANSFORMERS = "pip install transformers==5.23"  # whose code was read


def slow_paths(
    blueprint: Blueprint,
    data: TokenizedDataset,
    *,
    device: str,
    preflight: str,
    kernels: str,
    row_length: int | None,
    is_apart: bool | None,
) -> Iterator[SlowPath]:
    """Those of a run that are known before it starts.

    device, preflight: of the run file. kernels: `model.kernels`, as given there. row_length: tokens of a row, with
    `data.packing`. is_apart: whether attention keeps sequences of a row apart without a mask of the whole row; None:
    rows have one each for another reason.
    """
    has_gpu = torch.cuda.is_available()
    if has_gpu and device == "cpu":
        yield SlowPath("ranks on CPUs", "this machine has GPUs, and device: cpu was given", "device: auto")
    if attention_of(blueprint.model.config.get_text_config()) == "eager" and has_sdpa(blueprint.model):
        what = "attention with all scores in memory, S x S of each head"
        yield SlowPath(what, "model.attn_implementation: eager", "leave it out, for sdpa")
    if is_apart is False:
        yield from _of_masks(blueprint, data, row_length)
    if not is_known(LlamaRMSNorm) and any("RMSNorm" in type(m).__name__ for m in blueprint.model.modules()):
        cause = f"transformers {version_of('transformers')} writes them in another way than is known here"
        yield SlowPath("norms in separate operations, saved in float32", cause, _TRANSFORMERS)
    if blueprint.plan.compute is not None and (device == "cpu" or not has_gpu):
        yield SlowPath(
            f"products in float8 emulated in {blueprint.dtype}".replace("torch.", ""),
            "CPUs do not multiply e4m3",
            "leave out model.compute, or train on a GPU",
        )
    if has_gpu and device != "cpu" and blueprint.dtype != torch.float64:
        yield from _of_kernels(blueprint, kernels, preflight)


def _of_masks(blueprint: Blueprint, data: TokenizedDataset, row_length: int | None) -> Iterator[SlowPath]:
    """Of attention that joined sequences would have a mask of the whole row for."""
    is_of_version = not knows_packed_rows()
    cause = (
        f"transformers {version_of('transformers')} makes masks of packed rows in a way that is not known here"
        if is_of_version
        else f"attention of {blueprint.plan.model_type} depends on more than the positions of tokens"
    )
    if row_length is None:
        if is_of_version:  # else padding is the best there is
            yield SlowPath("rows padded to the longest of a micro-batch", cause, _TRANSFORMERS)
        return
    of_each = np.sort(np.diff(data.offsets))
    if of_each[:2].sum() > row_length:  # no row holds two
        return
    own = int((of_each.astype(np.int64) ** 2).sum() // max(1, of_each.sum()))
    times = row_length / max(1, own)
    cost = f"{row_length:,} x {row_length:,}, {times:.1f} times the scores of the sequences by themselves"
    way_out = f"{_TRANSFORMERS}, or data.packing: false" if is_of_version else "data.packing: false"
    yield SlowPath(f"{WHOLE_MASK.what}, {cost}", cause, way_out)


def _of_kernels(blueprint: Blueprint, wanted: str, preflight: str) -> Iterator[SlowPath]:
    """Of kernels that a GPU could have."""
    if blueprint.options.kernels == "none" and fusable(blueprint.model):
        if wanted == "none":
            cause, way_out = "model.kernels: none", "leave it out"
        elif not liger_version():
            cause, way_out = "liger-kernel is not installed", "pip install 'meshlora[kernels]'"
        else:
            cause, way_out = f"preflight: {preflight} does not prove kernels", "preflight: auto"
        yield SlowPath("norms, rotations and gated MLPs in separate kernels", cause, way_out)
    if blueprint.plan.experts and blueprint.dtype != torch.bfloat16:
        yield EXPERTS_ONE_BY_ONE


def check_fast(paths: Sequence[SlowPath]) -> None:
    """Refuse `paths`, of a run with `train.require_fast`. Raises: UserError: names each with its way out."""
    if paths:
        found = "; ".join(f"{path.what} ({path.cause})" for path in paths)
        ways = "; ".join(dict.fromkeys(path.way_out for path in paths))
        raise UserError("train.require_fast", f"the run takes a slow path: {found}", f"{ways}; or leave it out")


def new_ones(paths: Iterable[SlowPath], known: Iterable[SlowPath]) -> list[SlowPath]:
    """Those of `paths` that are not known by what they do, whose words may go on with a cost."""
    heads = tuple(path.what for path in known)
    return [path for path in paths if not any(head.startswith(path.what) for head in heads)]
