"""Private names of torch, transformers and PEFT, on which `meshlora_ground.compat` rests: each is there."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from peft.tuners.lora import ParamWrapper
from torch import nn
from transformers import GPT2Model, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from meshlora_ground import compat
from tests.for_each import for_each
from tests.unit.private_names import defined, private_names


@dataclass(frozen=True)
class Private:
    """A private name.

    Attributes:
        ours: the name in compat that rests on it. name: with its dots, from the library on. need: "to ...".
        of: what has the name, where dots do not lead to it: it is set on instances.
        since, until: compat needs it from that version of the library on, and up to the one that has a public API.
    """

    ours: str
    name: str
    need: str
    of: Callable[[], Any] | None = None
    since: str = ""
    until: str = ""

    @property
    def gone(self) -> str:
        """In words, where the installed library lacks it; else ""."""
        library, leaf = self.name.partition(".")[0], self.name.rpartition(".")[2]
        is_there = _is_there(self.name) if self.of is None else hasattr(self.of(), leaf)
        version = importlib.metadata.version(library)
        is_needed = Version(self.since or "0") <= Version(version) < Version(self.until or "1000")
        return (
            ""
            if is_there or not is_needed
            else f"{library} {version} has no {self.name} any more: compat.{self.ours} needs it {self.need}"
        )


def _is_there(path: str) -> bool:
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    so_far = first
    for part in rest:
        so_far = f"{so_far}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(so_far)
            except ImportError:
                return False
    return True


def _named_in(cls: type) -> Callable[[], Any]:
    """Something that has every attribute that the code of `cls` names."""

    def names(code: CodeType) -> set[str]:
        return {*code.co_names}.union(*(names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))

    functions = (getattr(value, "__func__", value) for value in vars(cls).values())
    codes = [function.__code__ for function in functions if inspect.isfunction(function)]
    return lambda: SimpleNamespace(**dict.fromkeys(set().union(*map(names, codes))))


_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
FUSED = "_scaled_dot_product_flash_attention_for_cpu"
_ON_GPU = "_scaled_dot_product_flash_attention"
_BAMBA = "transformers.models.bamba.modeling_bamba"
_LLAMA = "transformers.models.llama.modeling_llama"
MASKS = "transformers.masking_utils"
_CACHE = "transformers.cache_utils.Cache"
_MODEL, _CONFIG = "transformers.PreTrainedModel", "transformers.PretrainedConfig"
_REWRITE = "peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"
_RENAME = "peft.utils.transformers_weight_conversion.convert_peft_adapter_state_dict_for_transformers"
PRIVATE = [
    Private("TorchDispatchMode", "torch.utils._python_dispatch.TorchDispatchMode", "to count collectives"),
    Private("version_of", "torch.Tensor._version", "to notice that a tensor was written to since"),
    Private("running_backward", "torch._C._current_graph_task_id", "to tell one backward from the next"),
    Private("tensor_without_storage", "torch.Tensor._make_wrapper_subclass", "to make logits that nobody computes"),
    Private("assert_on_device", "torch._assert_async", "to check labels without waiting for a GPU"),
    Private("copy_each", "torch._foreach_copy_", "to put summed gradients back"),
    Private("multiply_each", "torch._foreach_mul_", "to divide gradients by the number of tokens"),
    Private("scale_each", "torch._foreach_mul_", "to scale the gradients of experts' factors, all in one kernel"),
    Private(
        "is_mean",
        "torch.autograd.graph.Node._saved_reduction",
        "to refuse a mean where a sum is meant",
        of=lambda: F.cross_entropy(torch.zeros(1, 2, requires_grad=True), torch.zeros(1).long()).grad_fn,
    ),
    Private("norm_of_each", "torch._foreach_norm", "to clip gradients"),
    Private(
        "of_compiled",
        "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
        "to record a compiled model",
        of=lambda: torch.compile(nn.Linear(1, 1), backend="eager"),
    ),
    Private("clippings", "torch.nn.utils.clip_grad._clip_grads_with_norm_", "to record how others clip"),
    Private("GROUPED_PRODUCT", "torch.ops.aten._grouped_mm", "to count the work of experts"),
    Private("FLOAT8_PRODUCT", "torch.ops.aten._scaled_mm", "to count the work of products in float8"),
    Private("scaled_product", "torch._scaled_mm", "to write a product in float8 where its result is to be"),
    Private("ON_EACH", "torch.ops.aten._foreach_mul_", "not to change numbers that are not there"),
    Private("READ_NUMBER", "torch.ops.aten._local_scalar_dense", "to answer code that asks a tensor without content"),
    Private("FUSED_ATTENTIONS", f"torch.ops.aten.{FUSED}", "to keep attention"),
    Private("FUSED_ATTENTIONS", f"torch.ops.aten.{_ON_GPU}", "to keep attention of GPUs"),
    Private("FUSED_ATTENTIONS", "torch.ops.aten._scaled_dot_product_efficient_attention", "to keep it under a mask"),
    Private("FUSED_ATTENTIONS", "torch.ops.aten._scaled_dot_product_cudnn_attention", "to keep attention of cuDNN"),
    Private("FUSED_ATTENTIONS", "torch.nn.attention.varlen._varlen_attn", "to keep attention of packed rows"),
    Private("map_tensors", "torch.utils._pytree.tree_map_only", "to take the content of tensors away"),
    Private("schema_of", "torch._ops.OpOverload._schema", "to know views", of=lambda: torch.ops.aten.mm.default),
    Private("storage_id", "torch.UntypedStorage._cdata", "to count the memory of each storage once"),
    Private("fused_attention", f"torch.ops.aten.{FUSED}", "to simulate the attention of GPUs"),
    Private("attention_with_sums", f"torch.ops.aten.{FUSED}", "to attend to keys in parts"),
    Private("fused_norm", "torch.ops.aten._fused_rms_norm", "to compute a norm in one kernel"),
    Private("fused_norm_back", "torch.ops.aten._fused_rms_norm_backward", "to compute its gradient in one kernel"),
    Private("attention_back", f"torch.ops.aten.{FUSED}_backward", "to attend to keys in parts"),
    Private("attention_with_sums", f"torch.ops.aten.{_ON_GPU}", "to attend to keys in parts on GPUs"),
    Private("attention_back", f"torch.ops.aten.{_ON_GPU}_backward", "to attend to keys in parts on GPUs"),
    Private("is_dropout", "torch.nn.modules.dropout._DropoutNd", "to refuse dropouts that are not exact"),
    Private("own_parameter", "torch.nn.Module._parameters", "to find stacks of experts", of=nn.Module),
    Private("own_child", "torch.nn.Module._modules", "to find projections of experts", of=nn.Module),
    Private("is_persistent", "torch.nn.Module._non_persistent_buffers_set", "to fill buffers", of=nn.Module),
    Private("forward_hooks", "torch.nn.Module._forward_hooks", "to hang the gather of a layer last", of=nn.Module),
    Private("NamedGroup", "torch.distributed.ProcessGroup._set_group_name", "to be named by torch.distributed"),
    Private("NamedGroup", "torch.distributed.ProcessGroup._set_group_desc", "to be described by torch.distributed"),
    Private("job_store", "torch.distributed.distributed_c10d._get_default_store", "to tell who is missing"),
    Private("can_split_groups", "torch.distributed.distributed_c10d._get_default_group", "to open an axis at once"),
    Private("abort_groups", "torch.distributed.distributed_c10d._abort_process_group", "to end with a failed rank"),
    Private(
        "set_timeout",
        "torch.distributed.distributed_c10d._set_pg_timeout",
        "to end a run whose rank hangs",
        until="2.14",
    ),
    Private("timeout_of", "torch.distributed.ProcessGroup._get_backend", "to wait as long as gloo does"),
    Private("timeout_of", "torch.distributed.ProcessGroupGloo._Options._timeout", "to wait as long as gloo does"),
    Private("fake_store", "torch.testing._internal.distributed.fake_pg.FakeStore", "to simulate a job"),
    Private("meta_parameters_allowed", f"{_FSDP}._validate_no_meta_params", "to simulate a sharded base"),
    Private("COMPOSED", "torch.distributed._composable.contract", "to refuse fully_shard around a divided model"),
    Private("READ_FROM", f"{_CONFIG}._name_or_path", "to know a model again in another folder", of=PretrainedConfig),
    Private("attention_of", f"{_CONFIG}._attn_implementation", "to resume with the attention that a run had"),
    Private("has_sdpa", "transformers.PreTrainedModel._supports_sdpa", "to say what eager attention costs"),
    Private("set_attention", f"{_CONFIG}._attn_implementation_internal", "to attend over cp", of=PretrainedConfig),
    Private("attention_function", f"{_LLAMA}.eager_attention_forward", "to attend over cp"),
    Private("all_rows_packed", f"{MASKS}.find_packed_sequence_indices", "to ask no device whether rows are packed"),
    Private("no_rows_packed", f"{MASKS}.find_packed_sequence_indices", "to ask no device whether padded rows are"),
    Private("packed_sequence_indices", f"{MASKS}.find_packed_sequence_indices", "to stand in for it"),
    Private("rule_of_one_sequence", f"{MASKS}.packed_sequence_mask_function", "to attend to one sequence at a time"),
    Private(
        "rule_of_one_sequence",
        f"{MASKS}.remap_positions_for_packed_sequence",
        "to attend to one at a time",
        since="5.23",
    ),
    Private("rule_of_one_sequence", f"{MASKS}.and_masks", "to attend to one at a time"),
    Private("rule_of_one_sequence", f"{MASKS}.causal_mask_function", "to attend to one at a time"),
    Private("rule_of_one_sequence", f"{MASKS}.sliding_window_overlay", "to attend to one at a time"),
    Private("calls_attention", f"{_LLAMA}.ALL_ATTENTION_FUNCTIONS", "to find what attends to other tokens"),
    Private("calls_of_attention", f"{_LLAMA}.ALL_ATTENTION_FUNCTIONS.get_interface", "to count its messages"),
    Private("reads_keys", f"{_CACHE}.update", "to give keys of other cp ranks in place of a cache's"),
    Private("asks_for_earlier", f"{_CACHE}.get_seq_length", "to say how many tokens are on the cp ranks before"),
    Private("keeps_inputs", f"{_CACHE}.update_conv_state", "to pass states over cp"),
    Private("keeps_state", f"{_CACHE}.update_recurrent_state", "to pass states over cp"),
    Private(
        "views_as_its_input",
        "transformers.GPT2Model.forward.output_shape",
        "to cut its tokens over cp",
        of=lambda: SimpleNamespace(**dict.fromkeys(inspect.unwrap(GPT2Model.forward).__code__.co_varnames)),
    ),
    Private("Unviewed", "torch._C._disabled_torch_function_impl", "to cut its tokens over cp"),
    Private(
        "checkpoint_with",
        "transformers.modeling_layers.GradientCheckpointingLayer._gradient_checkpointing_func",
        "to compute layers twice",
        of=_named_in(GradientCheckpointingLayer),
    ),
    Private(
        "finish_together",
        "transformers.GenerationMixin._has_unfinished_sequences",
        "to generate with experts on other ranks",
    ),
    Private("initialize", f"{_MODEL}._init_weights", "to compute buffers that no checkpoint stores"),
    Private("kept_in_float32", f"{_MODEL}._keep_in_fp32_modules_strict", "to load routers as transformers does"),
    Private("kept_in_float32", f"{_MODEL}._keep_in_fp32_modules", "to load float16 models as transformers does"),
    Private("unexpected_keys", f"{_MODEL}._keys_to_ignore_on_load_unexpected", "to accept checkpoints that hold more"),
    Private("gate_of", "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate", "to run experts"),
    Private("without_fused_projection", f"{_BAMBA}.mamba2_split_conv1d_scan_combined", "to split state-space mixers"),
    Private(
        "cut_deepstack",
        "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextModel._deepstack_process",
        "to add features of images to a cut stream",
    ),
    Private(
        "refuse_mamba_targets",
        "peft.tuners.tuners_utils._check_lora_target_modules_mamba",
        "to refuse what PEFT refuses on fused kernels",
    ),
    Private("rewrite_targets", _REWRITE, "to keep PEFT from rewriting what is stored"),
    Private("targets_as_configured", _REWRITE, "to make PEFT follow the configuration"),
    Private("names_as_loaded", _RENAME, "to know what PEFT makes of the names in a file"),
    Private(
        "is_stored_in_out",
        "peft.tuners.lora.ParamWrapper._did_swap_in_out_features",
        "to merge adapters of experts",
        of=_named_in(ParamWrapper),
    ),
]


@for_each("private", PRIVATE, ids=lambda p: p.name)
def test_every_private_name_is_there(private: Private) -> None:
    assert not private.gone, private.gone


@pytest.mark.parametrize("name", ["torch._foreach_norm", "torch.utils._pytree.tree_map_only", _REWRITE])
def test_a_name_that_went_is_told_in_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    private = next(p for p in PRIVATE if p.name == name)
    monkeypatch.delattr(name)
    version = importlib.metadata.version(name.partition(".")[0])
    assert private.gone.startswith(f"{name.partition('.')[0]} {version} has no {name} any more: compat.{private.ours} ")


def test_a_field_that_went_is_told_in_words() -> None:
    private = Private("is_stored_in_out", "peft.tuners.lora.ParamWrapper._gone", "to merge", of=_named_in(ParamWrapper))
    assert private.gone.endswith(
        " has no peft.tuners.lora.ParamWrapper._gone any more: compat.is_stored_in_out needs it to merge"
    )


def test_the_table_has_every_name_of_the_folder() -> None:
    trees = {file.name: ast.parse(file.read_text()) for file in sorted(Path(compat.__file__).parent.glob("*.py"))}
    text = {name: ast.unparse(node) for tree in trees.values() for node in tree.body for name in _bound(node)}
    assert {private.ours for private in PRIVATE} == text.keys() - {"replaced"}
    for private in PRIVATE:
        assert private.name.rpartition(".")[2] in text[private.ours], f"compat.{private.ours} uses no {private.name}"
    parts = {part for private in PRIVATE for part in private.name.split(".")}
    for file, tree in trees.items():
        for line, name in private_names(tree, defined([tree])):
            leaf = name.replace("::", ".").rpartition(".")[2]
            assert leaf in parts, f"meshlora_ground/compat/{file}:{line}: {name} is in no row of PRIVATE"


def _bound(node: ast.stmt) -> list[str]:
    """What a statement of compat gives a name to; of its imports only those under a name that is said twice."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.ImportFrom(names=names):
            return [alias.asname for alias in names if alias.asname]
        case ast.Assign(targets=targets):
            return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    return []
