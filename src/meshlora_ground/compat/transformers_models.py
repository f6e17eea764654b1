"""Private names of transformers: how its models are built, read and run."""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshlora_ground.compat import replaced

# The field of a configuration that records where it was loaded from, which says nothing about the model.
READ_FROM = "_name_or_path"


def attention_of(config: Any) -> str | None:
    """The attention implementation of a model with `config`. The public `attn_implementation` can only be set."""
    found: str | None = config._attn_implementation
    return found


def has_sdpa(model: nn.Module) -> bool:
    """Whether transformers has attention by sdpa for `model`. The public way is to build one and see it refused."""
    return bool(getattr(model, "_supports_sdpa", False))


def calls_attention(module: nn.Module) -> bool:
    """Whether the forward of `module` calls attention by transformers' registry. Nothing public tells it."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names


def calls_of_attention(module: nn.Module) -> int:
    """How often that forward calls the function which it has from the registry: uses of the variable with it."""
    code = list(dis.get_instructions(inspect.unwrap(type(module).forward)))
    found = next(at for at, step in enumerate(code) if step.argval == "get_interface")
    variable = next(step.argval for step in code[found:] if step.opname == "STORE_FAST")
    return sum(step.opname == "LOAD_FAST" and step.argval == variable for step in code[found:])


def keeps_inputs(module: nn.Module) -> bool:
    """Whether the forward of `module` goes on from earlier tokens' inputs in transformers' cache, as recurrences do."""
    return "update_conv_state" in inspect.unwrap(type(module).forward).__code__.co_names


def keeps_state(module: nn.Module) -> bool:
    """Whether the forward of `module` goes on from a recurrent state in transformers' cache."""
    return "update_recurrent_state" in inspect.unwrap(type(module).forward).__code__.co_names


def reads_keys(module: nn.Module) -> bool:
    """Whether the forward of `module` gives its keys to transformers' cache, and takes those of earlier tokens too."""
    return "update" in inspect.unwrap(type(module).forward).__code__.co_names


def asks_for_earlier(module: nn.Module) -> bool:
    """Whether the forward of `module` asks transformers' cache how many tokens are before those at hand."""
    return "get_seq_length" in inspect.unwrap(type(module).forward).__code__.co_names


def initialize(model: Any, module: nn.Module) -> None:
    """Initialize `module` by the rule of `model`. The public API initializes whole models, loaded weights included."""
    model._init_weights(module)


def kept_in_float32(model: Any, dtype: torch.dtype) -> set[str]:
    """Patterns of modules that transformers keeps in float32 in a model of `dtype`. They have no public reader."""
    if dtype not in (torch.float16, torch.bfloat16):
        return set()
    always, of_float16 = model._keep_in_fp32_modules_strict or (), model._keep_in_fp32_modules or ()
    return {*always, *(of_float16 if dtype == torch.float16 else ())}


def unexpected_keys(model: Any) -> Collection[str]:
    """Patterns of checkpoint keys that `model` may lack. They have no public reader."""
    found: Collection[str] = model._keys_to_ignore_on_load_unexpected or ()
    return found


def packed_sequence_indices(position_ids: Tensor) -> Tensor:
    """`[B, S]` -> the number of each token's sequence in its row, from position ids that restart with each: what
    transformers' `find_packed_sequence_indices` finds, also of rows with one sequence.
    """
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


@contextlib.contextmanager
def all_rows_packed() -> Iterator[None]:
    """Inside the block transformers takes rows for packed ones, and does not ask the device whether they are."""
    from transformers import masking_utils

    with replaced(masking_utils, "find_packed_sequence_indices", lambda ids: packed_sequence_indices(ids)):
        yield


@contextlib.contextmanager
def no_rows_packed() -> Iterator[None]:
    """Inside the block transformers takes each row for one sequence, and does not ask the device whether it is."""
    from transformers import masking_utils

    with replaced(masking_utils, "find_packed_sequence_indices", lambda ids: None):
        yield


def without_fused_projection(mixer: nn.Module) -> None:
    """Let state-space mixers of the kind of `mixer` call their projection out, for as long as the process lives.

    On a GPU transformers has one kernel for scan, norm and projection, which reads the weight of the projection and
    does not call it: a split one would lack its sum over the ranks. What returns None is passed over.
    """
    code: Any = sys.modules[type(mixer).__module__]
    if hasattr(code, "mamba2_split_conv1d_scan_combined"):
        code.mamba2_split_conv1d_scan_combined = lambda *_, **__: None


def cut_deepstack(model: nn.Module, cut: Callable[[Tensor], Tensor]) -> None:
    """Let features of images that a decoder adds between its layers (qwen3_vl) be added to the tokens that `cut` keeps.
    The model selects rows of a whole `[B, S, H]`, in a method of its own without a public border.

    cut: `[B, S, H]` -> the part that goes through the layers.
    """

    def process(hidden: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        """hidden: already cut. mask: bool `[B, S]`. features: `[N, H]`, one for each True."""
        features = features.to(hidden)
        whole = features.new_zeros(*mask.shape, features.shape[-1])
        return hidden + cut(whole.masked_scatter(mask.unsqueeze(-1), features))

    for module in model.modules():
        if hasattr(module, "_deepstack_process"):
            object.__setattr__(module, "_deepstack_process", process)


def gate_of(experts: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The activation of fused experts, from gate and up `[N, 2 F]` to `[N, F]`; None if it is not its own function."""
    return getattr(experts, "_apply_gate", None)


def checkpoint_with(layer: nn.Module, function: Callable[..., Any]) -> None:
    """Let a GradientCheckpointingLayer call `function(forward, *args)`. The public API takes one set of options of
    `torch.utils.checkpoint` for all layers, with a `context_fn` without arguments.
    """
    layer._gradient_checkpointing_func = function  # type: ignore[assignment]


def finish_together(model: Any, all_finished: Callable[..., bool]) -> None:
    """Let `model.generate(synced_gpus=True)` of this object ask `all_finished(is_finished=...)` whether to leave its
    loop. transformers' own asks torch's default group, which has no collectives on CPUs here, and all ranks of the job.
    """

    def unfinished(this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        return not (all_finished(is_finished=this_peer_finished) if synced_gpus else this_peer_finished)

    object.__setattr__(model, "_has_unfinished_sequences", unfinished)
