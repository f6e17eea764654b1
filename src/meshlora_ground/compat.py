"""Private names of torch, transformers and PEFT: every one that the product uses, and only here.

Owns: those names, each behind a public one of ours, with its purpose and why no public API does. Does not own: their
uses.

Any release may drop one. `tests/unit/test_compat_names.py` then says which, and who needs it; once a library has a
public API, the name leaves this file. Every layer and both sides of a proof import it: so nothing here computes
what a proof compares, and PEFT, transformers and rare parts of torch are imported on first use.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Store

# Sees every operator below autograd, in a backward too. torch's notes on extending it show this import.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set attribute `name` of `owner` to `value` for the block, then restore the original, own or inherited.

        with replaced(F, "scaled_dot_product_attention", attention):

    Raises:
        AttributeError: `owner` has no such attribute.
    """
    getattr(owner, name)
    is_own = name in vars(owner)
    original = vars(owner).get(name)  # as stored: getattr would unwrap a staticmethod
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


# ---- torch: tensors


def version_of(tensor: Tensor) -> int:
    """The number of in-place writes to `tensor` or to any view that shares its memory.

    Autograd compares it with the version it saved; otherwise torch shows it only in the text of that error.
    """
    return tensor._version


def running_backward() -> int:
    """The id of the backward pass running in this thread, -1 outside. Public hooks do not tell two passes apart."""
    return int(torch._C._current_graph_task_id())


def tensor_without_storage(
    kind: type[Tensor], shape: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Any:
    """A tensor of the subclass `kind` that reports a device and holds no memory. The public alternative, the meta
    device, shows where a model asks for its device.
    """
    return Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=device)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail if `condition` `[]` is false, without waiting for the device: a plain `assert` reads it on the host.

    On a GPU the process fails later, at its next synchronization.
    """
    torch._assert_async(condition, message)


# One kernel for many tensors. Exposed only through torch's optimizers and `clip_grad_norm_`, which sums all norms.


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of `sources` to its counterpart in `targets`."""
    torch._foreach_copy_(targets, sources)


def multiply_each(tensors: list[Tensor], number: Tensor) -> None:
    """Multiply all `tensors` in place by `number` `[]`, which has their device and dtype."""
    torch._foreach_mul_(tensors, number)


def norm_of_each(tensors: list[Tensor], *, dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm `[]` of each tensor, accumulated in `dtype` without converted copies."""
    return list(torch._foreach_norm(tensors, 2, dtype))


# ---- torch: operators as a TorchDispatchMode sees them

# The operators behind `F.grouped_mm`, and behind `Tensor.item` and `int(tensor)`.
GROUPED_PRODUCT, READ_NUMBER = "aten::_grouped_mm", "aten::_local_scalar_dense"
# How those begin that change each tensor of a list. Exposed only through torch's optimizers.
ON_EACH = "aten::_foreach_mul_".removesuffix("mul_")


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


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, dropout: float, is_causal: bool, mask: Tensor | None, scale: Any
) -> Tensor:
    """Fused attention `[B, h, S, d]`, also on the meta device, where the public function picks another kernel."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = fused(query, key, value, dropout, is_causal, attn_mask=mask, scale=scale)[0]
    return out


def fused_norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x r`, in the dtype of x, and `r = (mean(x^2) + eps)^-1/2` over the last dim, `[..., 1]`: one kernel on a GPU.

    The public function keeps r to itself. On the meta device, where torch has no kernel for it, another norm stands for
    it.
    """
    shape = [x.shape[-1]]
    if x.is_meta:
        n, _, r = torch.native_layer_norm(x, shape, None, None, eps)
        return n, r
    n, r = torch.ops.aten._fused_rms_norm(x, shape, None, eps)
    return n, r


def fused_norm_back(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> Tensor:
    """The gradient of x, where `grad` is that of `x r weight`; r of `fused_norm`."""
    shape, aten = [x.shape[-1]], torch.ops.aten
    dx: Tensor
    if x.is_meta:
        dx, *_ = aten.native_layer_norm_backward(grad, x, shape, r, r, weight, None, [True, False, False])
    else:
        dx, _ = aten._fused_rms_norm_backward(grad.contiguous(), x, shape, r, weight, [True, False])
    return dx


def attention_with_sums(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Fused attention, `[B, h, n, d]`, and the log of each query's sum of exponentials, `[B, h, n]`, which the public
    function keeps to itself. Causal: query i sees the keys up to the i-th. h is a multiple of the heads of keys.
    """
    aten = torch.ops.aten
    if query.is_cpu:
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
        return out, sums
    given = query, key.contiguous(), value.contiguous()
    out, sums, *_ = aten._scaled_dot_product_flash_attention(*given, 0.0, is_causal, scale=scale)
    return out, sums


def attention_back(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value of `attention_with_sums`. With `out` and `sums` of more keys than these,
    they are the terms of these keys.
    """
    aten = torch.ops.aten
    if query.is_cpu:
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward
        options: tuple[Any, ...] = (0.0, is_causal)
    else:
        # The kernel reads the sums without strides, and keys as torch's own context parallelism gives them. Its last
        # two are a random state, read for dropout alone.
        key, value, sums = key.contiguous(), value.contiguous(), sums.contiguous()
        back, state = aten._scaled_dot_product_flash_attention_backward, sums.new_zeros(2, dtype=torch.int64)
        options = None, None, query.shape[-2], key.shape[-2], 0.0, is_causal, state, state[:0]
    of_query, of_key, of_value = back(grad, query, key, value, out, sums, *options, scale=scale)
    return of_query, of_key, of_value


# ---- torch: modules


def is_dropout(module: nn.Module) -> bool:
    """Whether `module` is one of torch's dropouts or derived from one. Their base class has no public name."""
    return isinstance(module, nn.modules.dropout._DropoutNd)


def own_parameter(module: nn.Module, name: str) -> Tensor | None:
    """The parameter registered on `module` itself. `getattr` would run a parametrization."""
    return module._parameters.get(name)


def own_child(module: nn.Module, name: str) -> nn.Module | None:
    """The module registered on `module` itself; None if the name is anything else."""
    return module._modules.get(name)


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether checkpoints contain this buffer. The public way is to build the whole `state_dict`."""
    return buffer not in module._non_persistent_buffers_set


def forward_hooks(module: nn.Module) -> MutableMapping[int, Callable[..., Any]]:
    """The forward hooks by id, in order, for reordering: the public API only registers a hook first or last."""
    return module._forward_hooks


# ---- torch.distributed


class NamedGroup(ProcessGroup):
    """A process group written in Python. torch.distributed names each group through private methods."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # missing in the stub
        self._name = self._description = ""

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's own subclass does the same
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description


def job_store() -> Store:
    """The store of this job's rendezvous. torch does not expose it, and a second store would need its own port."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def can_split_groups() -> bool:
    """Whether `torch.distributed.split_group` works on this job: NCCL, bound to a device. torch does not say so."""
    from torch.distributed import distributed_c10d

    group = distributed_c10d._get_default_group()
    return distributed_c10d.get_backend(group) == "nccl" and group.bound_device_id is not None


def abort_groups() -> None:
    """Abort the communicators of all NCCL groups: their kernels wait for ranks that are gone. May block."""
    from torch.distributed import distributed_c10d

    if distributed_c10d.is_initialized() and distributed_c10d.get_backend() == "nccl":
        distributed_c10d._abort_process_group()


def set_timeout(group: ProcessGroup, limit_s: float) -> None:
    """Set the timeout of later collectives of `group`. Before torch 2.14 the public API sets it only when a group is
    created.
    """
    from torch.distributed import distributed_c10d

    set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=limit_s), group)


def timeout_of(group: ProcessGroup) -> timedelta:
    """The timeout of collectives of `group`, a group of CPUs. The public API can set it but not read it.

    Raises:
        RuntimeError: some versions of torch hide it under TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


def fake_store() -> Store:
    """The store of a job whose other ranks do not exist. Importing it registers torch's "fake" backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store: Store = FakeStore()
    return store


def meta_parameters_allowed() -> contextlib.AbstractContextManager[None]:
    """Let modules under `fully_shard` run on the meta device inside the block. torch has no option for that."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return replaced(FSDPParamGroup, "_validate_no_meta_params", lambda self: None)


# (module, function) that runs the body of torch's `fully_shard` and `replicate`, which is its variable `func`.
COMPOSED = ("torch.distributed._composable.contract", "contract.<locals>.inner.<locals>.wrapper")


# ---- transformers

# The field of a configuration that records where it was loaded from, which says nothing about the model.
READ_FROM = "_name_or_path"


def attention_of(config: Any) -> str | None:
    """The attention implementation of a model with `config`. The public `attn_implementation` can only be set."""
    found: str | None = config._attn_implementation
    return found


def has_sdpa(model: nn.Module) -> bool:
    """Whether transformers has attention by sdpa for `model`. The public way is to build one and see it refused."""
    return bool(getattr(model, "_supports_sdpa", False))


def set_attention(config: Any, name: str) -> None:
    """Set the attention implementation of `config` alone. Publicly it is set on all of a model's parts together, towers
    included, and only to names that transformers knows.
    """
    config._attn_implementation_internal = name


def attention_function(name: str, module: nn.Module) -> Callable[..., Any]:
    """transformers' attention function `name` for an attention module. "eager" is a function of each model's file, and
    in no registry.
    """
    if name != "eager":
        from transformers import AttentionInterface

        found: Callable[..., Any] = AttentionInterface()[name]
        return found
    code = inspect.unwrap(type(module).forward).__globals__
    own: Callable[..., Any] = code["eager_attention_forward"]
    return own


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


def rule_of_one_sequence(mask_function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The mask function of one sequence by itself, inside transformers' function for packed rows. None: the function is
    not one for packed rows, or depends on more than positions.

    From 5.23 on transformers gives it positions in the sequence; before, places in the row. There it is that of one
    sequence only if it compares distances: causal, or a window.
    """

    def captured(function: Callable[..., Any]) -> dict[str, Any]:
        cells = getattr(function, "__closure__", None) or ()
        return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))

    def maker(function: Any) -> str:  # the function that made it, or its own name
        return str(getattr(function, "__qualname__", "")).partition(".")[0]

    def is_of_positions(value: Any) -> bool:  # made of plain numbers alone
        if isinstance(value, (tuple, list)):
            return all(map(is_of_positions, value))
        if inspect.isfunction(value):
            return all(map(is_of_positions, captured(value).values()))
        return value is None or isinstance(value, (int, float))

    def is_of_distances(function: Callable[..., Any]) -> bool:
        if maker(function) == "and_masks":
            return all(map(is_of_distances, captured(function)["mask_functions"]))
        return maker(function) in ("causal_mask_function", "sliding_window_overlay")

    found = captured(mask_function).get("mask_functions", ())
    others = [function for function in found if maker(function) != "packed_sequence_mask_function"]
    if len(found) != 2 or len(others) != 1:
        return None
    if maker(others[0]) == "remap_positions_for_packed_sequence":
        alone: Callable[..., Any] = captured(others[0])["mask_function"]
        return alone if is_of_positions(alone) else None
    return others[0] if is_of_distances(others[0]) else None


def calls_attention(module: nn.Module) -> bool:
    """Whether the forward of `module` calls attention by transformers' registry. Nothing public tells it."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names


def calls_of_attention(module: nn.Module) -> int:
    """How often that forward calls the function which it has from the registry: uses of the variable with it."""
    code = list(dis.get_instructions(inspect.unwrap(type(module).forward)))
    found = next(at for at, step in enumerate(code) if step.argval == "get_interface")
    variable = next(step.argval for step in code[found:] if step.opname == "STORE_FAST")
    return sum(step.opname == "LOAD_FAST" and step.argval == variable for step in code[found:])


def views_as_its_input(decoder: nn.Module) -> bool:
    """Whether the forward of `decoder` ends in a view of what its layers return in the shape of its own input."""
    return "output_shape" in inspect.unwrap(type(decoder).forward).__code__.co_varnames


class Unviewed(Tensor):
    """A tensor that stays as it is in a view. All else that is computed of it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # typed as no subclass has it

    def view(self, *_: Any) -> Tensor:
        """The same values in the same shape."""
        return self.as_subclass(Tensor)


def keeps_inputs(module: nn.Module) -> bool:
    """Whether the forward of `module` goes on from earlier tokens' inputs in transformers' cache, as recurrences do."""
    return "update_conv_state" in inspect.unwrap(type(module).forward).__code__.co_names


def keeps_state(module: nn.Module) -> bool:
    """Whether the forward of `module` goes on from a recurrent state in transformers' cache."""
    return "update_recurrent_state" in inspect.unwrap(type(module).forward).__code__.co_names


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


def without_fused_projection(mixer: nn.Module) -> None:
    """Let state-space mixers of the kind of `mixer` call their projection out, for as long as the process lives.

    On a GPU transformers has one kernel for scan, norm and projection, which reads the weight of the projection and
    does not call it: a split one would lack its sum over the ranks. What returns None is passed over.
    """
    code: Any = sys.modules[type(mixer).__module__]
    if hasattr(code, "mamba2_split_conv1d_scan_combined"):
        code.mamba2_split_conv1d_scan_combined = lambda *_, **__: None


def gate_of(experts: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The activation of fused experts, from gate and up `[N, 2 F]` to `[N, F]`; None if it is not its own function."""
    return getattr(experts, "_apply_gate", None)


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


def is_mean(loss: Tensor) -> bool:
    """Whether `loss` is what `mean()`, or a loss function with its default reduction, has returned."""
    node = loss.grad_fn
    if node is None:
        return False
    return (
        node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", 0) == 1
    )  # torch's number of means


# ---- PEFT


def refuse_mamba_targets(config: Any, model: Any, leaf: str) -> None:
    """PEFT's check for modules whose fused kernels read weights past an adapter. Publicly it runs only on attaching.

    Raises:
        ValueError: PEFT refuses the target `leaf` on `model`.
    """
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    _check_lora_target_modules_mamba(config, model, leaf)


def rewrite_targets(config: Any, model: Any) -> None:
    """Convert `config` as PEFT does on attaching: names of experts in transformers 4 become parameters.

    Raises:
        ValueError: PEFT requires gate and up together.
    """
    from peft.utils import transformers_weight_conversion

    transformers_weight_conversion.convert_peft_config_for_transformers(config, model, None)


def targets_as_configured() -> contextlib.AbstractContextManager[None]:
    """Make PEFT take target names literally inside the block, as in every file that it and we write today.

    For many families with experts it reads `gate_proj` in `target_modules`, even in `shared_expert.gate_proj`, as
    transformers 4's name for the experts, and skips the linears of that name. It has no option for that.
    """
    from peft.utils import transformers_weight_conversion

    return replaced(transformers_weight_conversion, "convert_peft_config_for_transformers", lambda *_, **__: None)


def is_stored_in_out(wrapper: Any) -> bool:
    """Whether PEFT reads the experts' weights under a `ParamWrapper` as `[E, in, out]` rather than `[E, out, in]`.

    The shapes of its factors tell, unless `in` equals `out`.
    """
    return not wrapper._did_swap_in_out_features
