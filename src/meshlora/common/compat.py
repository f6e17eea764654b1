"""Private names of torch, transformers and PEFT: all that the product uses, and no other file does.

Owns: those names, each behind a public one of ours, with what it is for and why there is no public way. Does not own:
what is done with them.

A private name can go with any release. `tests/unit/test_compat.py` then says which, and who needs it; where a library
gets a public way, the name leaves this file. Every layer and both sides of a proof import it: so nothing here computes
what a proof compares, and PEFT, transformers and rare parts of torch are imported where they are first needed.
"""

from __future__ import annotations

import contextlib
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
    """Inside the block `owner` has `value` under `name`; before and after what it has, or inherits.

        with replaced(F, "scaled_dot_product_attention", attention):

    Raises:
        AttributeError: it has nothing of that name.
    """
    getattr(owner, name)
    is_own = name in vars(owner)
    original = vars(owner).get(name)  # as it is stored: getattr would unwrap a staticmethod
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
    """How often `tensor`, or a view that shares its memory, was written in place.

    Autograd compares it with what it saved; to readers torch shows it only in the text of that error.
    """
    return tensor._version


def running_backward() -> int:
    """The number of the backward that this thread is in, -1 outside of one. Public hooks do not tell two apart."""
    return int(torch._C._current_graph_task_id())


def tensor_without_storage(
    kind: type[Tensor], shape: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Any:
    """A tensor of the subclass `kind` that names a device and holds nothing. The meta device is the public way, and
    says so where a model asks for its device.
    """
    return Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=device)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail if `condition` `[]` is false, without waiting for the device: torch's own `assert` reads it on the host.

    On a GPU the process fails at a later time at which it does wait.
    """
    torch._assert_async(condition, message)


# One kernel for many tensors. Public only inside torch's optimizers and `clip_grad_norm_`, whose norm is one sum.


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of `sources` to its neighbour in `targets`."""
    torch._foreach_copy_(targets, sources)


def multiply_each(tensors: list[Tensor], number: Tensor) -> None:
    """Multiply all `tensors` in place with `number` `[]`, which is on their device and has their dtype."""
    torch._foreach_mul_(tensors, number)


def norm_of_each(tensors: list[Tensor], *, dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm `[]` of each tensor, summed in `dtype` without copies in it."""
    return list(torch._foreach_norm(tensors, 2, dtype))


# ---- torch: what a TorchDispatchMode is given

# What `F.grouped_mm` calls, and what `Tensor.item` and `int(tensor)` do.
GROUPED_PRODUCT, READ_NUMBER = "aten::_grouped_mm", "aten::_local_scalar_dense"


def map_tensors(function: Callable[[Tensor], Any], nested: Any) -> Any:
    """`nested` arguments with `function` of each tensor in its place. torch's pytrees have no public module."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, function, nested)


def schema_of(operator: Any) -> Any:
    """The arguments and returns of an operator, with their aliases. Public on no operator."""
    return operator._schema


def storage_id(storage: torch.UntypedStorage) -> int:
    """What tells a storage from every other one that lives. `data_ptr`, the public way, is 0 for all without memory."""
    return int(storage._cdata)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, dropout: float, is_causal: bool, mask: Tensor | None, scale: Any
) -> Tensor:
    """Attention `[B, h, S, d]` as one kernel, also on the meta device, where the public function chooses another."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = fused(query, key, value, dropout, is_causal, attn_mask=mask, scale=scale)[0]
    return out


# ---- torch: modules


def is_dropout(module: nn.Module) -> bool:
    """Whether `module` is a dropout of torch's or derived from one. Their common class has no public name."""
    return isinstance(module, nn.modules.dropout._DropoutNd)


def own_parameter(module: nn.Module, name: str) -> Tensor | None:
    """The parameter that is registered on `module` itself. `getattr` would run what a parametrization makes of it."""
    return module._parameters.get(name)


def own_child(module: nn.Module, name: str) -> nn.Module | None:
    """The module that is registered on `module` itself; None where that name is something else."""
    return module._modules.get(name)


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a checkpoint has the buffer of this name. The public way is to make the whole `state_dict`."""
    return buffer not in module._non_persistent_buffers_set


def forward_hooks(module: nn.Module) -> MutableMapping[int, Callable[..., Any]]:
    """The forward hooks by number, in their order, to be moved: in public a hook is first or last when it comes."""
    return module._forward_hooks


# ---- torch.distributed


class NamedGroup(ProcessGroup):
    """A process group written in Python. torch.distributed names each group, through methods that are private."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub lacks this one
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
    """The store that the ranks of this job met at. torch hands out none; a second one would need a port of its own."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def set_timeout(group: ProcessGroup, limit_s: float) -> None:
    """From now on a collective of `group` waits `limit_s` seconds. In public the limit is set when a group opens."""
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), group)


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long a collective of `group`, of CPUs, waits. In public it can be given and not asked for.

    Raises:
        RuntimeError: under TORCH_DISTRIBUTED_DEBUG=DETAIL some versions of torch do not tell.
    """
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


def fake_store() -> Store:
    """The store of a job whose other ranks do not exist. Importing it is what registers torch's backend "fake"."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store: Store = FakeStore()
    return store


def meta_parameters_allowed() -> contextlib.AbstractContextManager[None]:
    """Inside, modules under `fully_shard` run on the meta device, which it refuses. It has no option for that."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return replaced(FSDPParamGroup, "_validate_no_meta_params", lambda self: None)


# (module, function) in which the body of torch's `fully_shard` and `replicate` runs; the variable `func` is that body.
COMPOSED = ("torch.distributed._composable.contract", "contract.<locals>.inner.<locals>.wrapper")


# ---- transformers

# The field of a configuration that says where it was read from: nothing of the model.
READ_FROM = "_name_or_path"


def attention_of(config: Any) -> str | None:
    """Which attention a model of `config` runs. The public words, `attn_implementation`, can only be set."""
    found: str | None = config._attn_implementation
    return found


def checkpoint_with(layer: nn.Module, function: Callable[..., Any]) -> None:
    """Let a GradientCheckpointingLayer call `function(forward, *args)`. In public a model takes options of
    `torch.utils.checkpoint`, `context_fn` not with arguments of its own, for all of its layers.
    """
    layer._gradient_checkpointing_func = function  # type: ignore[assignment]


def initialize(model: Any, module: nn.Module) -> None:
    """Fill `module` by the rule of `model`. In public only a whole model is filled, what was read of it too."""
    model._init_weights(module)


def kept_in_float32(model: Any, dtype: torch.dtype) -> set[str]:
    """Patterns of the modules that transformers keeps in float32 where the rest is `dtype`. Only it reads them."""
    if dtype not in (torch.float16, torch.bfloat16):
        return set()
    always, of_float16 = model._keep_in_fp32_modules_strict or (), model._keep_in_fp32_modules or ()
    return {*always, *(of_float16 if dtype == torch.float16 else ())}


def unexpected_keys(model: Any) -> Collection[str]:
    """Patterns of what is in checkpoints of `model` and not in it, without a fault. Only transformers reads them."""
    found: Collection[str] = model._keys_to_ignore_on_load_unexpected or ()
    return found


def gate_of(experts: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """What fused experts make of gate and up `[N, 2 F]`: `[N, F]`; None where it is not in a function of its own."""
    return getattr(experts, "_apply_gate", None)


# ---- PEFT


def refuse_mamba_targets(config: Any, model: Any, leaf: str) -> None:
    """PEFT's own refusal of modules whose weights fused kernels read past an adapter. In public only attaching says it.

    Raises:
        ValueError: it refuses the target `leaf` on `model`.
    """
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    _check_lora_target_modules_mamba(config, model, leaf)


def rewrite_targets(config: Any, model: Any) -> None:
    """What PEFT does to `config` when it attaches it: names that were experts in transformers 4 become parameters.

    Raises:
        ValueError: it wants gate and up together.
    """
    from peft.utils import transformers_weight_conversion

    transformers_weight_conversion.convert_peft_config_for_transformers(config, model, None)


def targets_as_configured() -> contextlib.AbstractContextManager[None]:
    """Inside, PEFT puts adapters where the configuration says, as every file that it and we write today does.

    For many families with experts it takes `gate_proj` among `target_modules`, even in `shared_expert.gate_proj`, for a
    word of transformers 4 for the experts, and leaves the linears of that name alone. It has no option for that.
    """
    from peft.utils import transformers_weight_conversion

    return replaced(transformers_weight_conversion, "convert_peft_config_for_transformers", lambda *_, **__: None)


def is_stored_in_out(wrapper: Any) -> bool:
    """Whether PEFT takes the experts' matrices under a `ParamWrapper` for `[E, in, out]`, else for `[E, out, in]`.

    In public the shapes of its factors tell it, unless `in` is `out`.
    """
    return not wrapper._did_swap_in_out_features
