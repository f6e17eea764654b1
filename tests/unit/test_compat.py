"""What `meshlora_ground.compat` makes of private names of torch, transformers and PEFT is what it says."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from meshlora.comm.groups import simulated_job
from meshlora_ground.caches import cache_argument
from meshlora_ground.compat import (
    peft_targets,
    replaced,
    torch_distributed,
    torch_fused,
    torch_operators,
    torch_tensors,
    transformers_attention,
    transformers_models,
)
from tests.unit.test_compat_names import FUSED, MASKS


def test_numbers_of_sequences_are_those_of_transformers_without_a_look_at_them() -> None:
    masks = importlib.import_module(MASKS)
    for rows in ([[0, 1, 2, 0, 1], [0, 0, 1, 0, 1]], [[3, 4, 5, 0, 1], [0, 1, 2, 3, 4]]):
        positions = torch.tensor(rows)
        expected = masks.find_packed_sequence_indices(positions)
        with transformers_models.all_rows_packed():
            assert torch.equal(masks.find_packed_sequence_indices(positions), expected)
        with transformers_models.no_rows_packed():
            assert masks.find_packed_sequence_indices(positions) is None
    with transformers_models.all_rows_packed():  # nothing in it depends on a value
        assert masks.find_packed_sequence_indices(torch.arange(3, device="meta").expand(2, 3)).is_meta


def remap_positions_for_packed_sequence(rule: Any, positions: Tensor) -> Any:
    """As in transformers 5.23, by its name and variables; older ones have none."""
    mask_function = rule

    def inner_mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_function(batch, head, positions[batch, query], positions[batch, key])

    return inner_mask


# How transformers puts together the mask of packed rows: its rule, and its test of whether two tokens share a sequence.
_FORMS: dict[str, Callable[[Any, Any, Tensor], tuple[Any, Any]]] = {
    "5.17": lambda rule, same, positions: (rule, same),
    "5.23": lambda rule, same, positions: (same, remap_positions_for_packed_sequence(rule, positions)),
    "5.24": lambda rule, same, positions: (remap_positions_for_packed_sequence(rule, positions), same),
}


@pytest.mark.parametrize("form", _FORMS)
def test_rule_of_one_sequence_is_found_where_it_is_one_of_positions(form: str) -> None:
    masks = importlib.import_module(MASKS)
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    same = masks.packed_sequence_mask_function(masks.find_packed_sequence_indices(positions))

    def found(rule: Any) -> Any:
        return transformers_attention.rule_of_one_sequence(masks.and_masks(*_FORMS[form](rule, same, positions)))

    window = masks.sliding_window_causal_mask_function(2)
    of_tokens = masks.and_masks(masks.causal_mask_function, same)
    third = masks.and_masks(masks.causal_mask_function, lambda batch, head, query, key: key % 3 == 0)
    assert found(masks.causal_mask_function) is masks.causal_mask_function
    assert found(window) is window
    assert found(of_tokens) is None, "it holds a tensor with something of each token"
    assert found(third) is (None if form == "5.17" else third), "5.17 counts places in the row"
    assert transformers_attention.rule_of_one_sequence(masks.causal_mask_function) is None, "rows of one sequence"
    assert transformers_attention.rule_of_one_sequence(window) is None, "rows of one sequence"


@pytest.mark.parametrize("window", [None, 2])
def test_rule_of_one_sequence_is_found_in_the_installed_transformers(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AttentionMaskInterface

    masks = importlib.import_module(MASKS)
    given: list[Any] = []
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", lambda **of: given.append(of["mask_function"]))
    config = LlamaConfig(attn_implementation="sdpa", **({"sliding_window": window} if window else {}))
    make = masks.create_sliding_window_causal_mask if window else masks.create_causal_mask
    cache = {cache_argument(make): None}
    make(config, torch.zeros(1, 5, 4), None, position_ids=torch.tensor([[0, 1, 2, 0, 1]]), **cache)
    rule = transformers_attention.rule_of_one_sequence(given[0])
    assert rule is not None
    places = torch.arange(3)
    expected = places[:, None] >= places
    if window:
        expected &= places[:, None] - places < window
    assert torch.equal(rule(0, 0, places[:, None], places), expected)


def test_features_of_images_are_added_to_the_tokens_of_this_rank() -> None:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

    hidden, features = torch.randn(2, 5, 3), torch.randn(4, 3, requires_grad=True)
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]]).bool()
    theirs = Qwen3VLTextModel._deepstack_process(SimpleNamespace(), hidden, mask, features).view(1, 10, 3)
    (expected,) = torch.autograd.grad(theirs[:, 5:].square().sum(), features)
    decoder = nn.Module()
    decoder._deepstack_process = None
    transformers_models.cut_deepstack(decoder, lambda whole: whole.view(1, 10, 3)[:, 5:])
    ours = decoder._deepstack_process(hidden.view(1, 10, 3)[:, 5:], mask, features)
    (gradient,) = torch.autograd.grad(ours.square().sum(), features)
    assert torch.equal(ours, theirs[:, 5:])
    assert torch.equal(gradient, expected)


def test_what_is_replaced_comes_back_as_it_was() -> None:
    class Base:
        kept = staticmethod(lambda: "kept")

    class Heir(Base):
        pass

    stored = vars(Base)["kept"]
    for owner in (Base, Heir):
        with pytest.raises(ZeroDivisionError), replaced(owner, "kept", lambda: 1 / 0):
            owner.kept()
    assert vars(Base)["kept"] is stored
    assert "kept" not in vars(Heir)
    with pytest.raises(AttributeError, match="gone"), replaced(Base, "gone", None):
        pass


def test_a_write_in_place_is_a_new_version_also_of_a_view() -> None:
    x = torch.zeros(2, 2)
    before = torch_tensors.version_of(x)
    _ = x + 1
    assert torch_tensors.version_of(x) == before
    x[0].add_(1)
    assert torch_tensors.version_of(x) > before


def test_each_backward_has_a_number_of_its_own() -> None:
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(torch_tensors.running_backward()))
    for _ in range(2):
        x.sum().backward()
    assert torch_tensors.running_backward() == -1
    assert len(set(seen)) == 2
    assert min(seen) >= 0


def test_a_tensor_without_storage_says_where_it_is() -> None:
    class Empty(Tensor):
        __torch_dispatch__ = None

    found = torch_tensors.tensor_without_storage(Empty, (3, 2**40), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert type(found) is Empty
    assert (found.shape, found.dtype, found.device.type) == ((3, 2**40), torch.bfloat16, "cpu")


def test_a_false_condition_fails_with_its_words() -> None:
    torch_tensors.assert_on_device(torch.tensor(True), "a label")
    with pytest.raises(RuntimeError, match="a label"):
        torch_tensors.assert_on_device(torch.tensor(False), "a label")


def test_many_tensors_at_once_are_each_as_alone() -> None:
    sources = [torch.arange(4.0), torch.ones(2, 3)]
    targets = [torch.empty_like(t) for t in sources]
    torch_tensors.copy_each(targets, sources)
    torch_tensors.multiply_each(targets, torch.tensor(3.0))
    norms = torch_tensors.norm_of_each(targets, dtype=torch.float64)
    for source, target, norm in zip(sources, targets, norms, strict=True):
        assert torch.equal(target, 3 * source)
        assert norm.dtype == torch.float64
        assert torch.equal(norm, target.double().norm())


class _Names(torch_operators.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(torch_operators.schema_of(func).name)
        return func(*args, **(kwargs or {}))


def test_operators_have_the_names_that_the_planner_looks_for() -> None:
    x, w = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(2, 8, 8, dtype=torch.bfloat16)
    with _Names() as names:
        x.sum().item()
        F.grouped_mm(x, w, offs=torch.tensor([2, 4], dtype=torch.int32))
        torch_tensors.multiply_each([x.clone()], x.new_ones(()))
    assert {torch_operators.READ_NUMBER, torch_operators.GROUPED_PRODUCT} <= set(names.seen)
    assert any(name.startswith(torch_operators.ON_EACH) and name.endswith("_") for name in names.seen)


def test_a_schema_tells_views_and_arguments() -> None:
    view, zeros = torch.ops.aten.view.default, torch.ops.aten.zeros.default
    assert [r.alias_info.is_write for r in torch_operators.schema_of(view).returns] == [False]
    assert "device" in [argument.name for argument in torch_operators.schema_of(zeros).arguments]


def test_tensors_are_mapped_wherever_they_are() -> None:
    found = torch_operators.map_tensors(lambda t: t.shape, {"a": [torch.ones(2), 3], "b": (torch.ones(1, 4),)})
    assert found == {"a": [(2,), 3], "b": ((1, 4),)}


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_to_two_parts_is_merged_by_their_sums_and_its_backward_is_that_of_each(is_causal: bool) -> None:
    """Four heads of queries share two of keys; the second part is causal, or all of it is seen."""
    query, k, v = (torch.randn(1, heads, 6, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    seen = torch.ones(6, 12, dtype=torch.bool).tril(6 if is_causal else 12)
    more = [torch.cat([t, t.flip(2) + 1], 2).detach().requires_grad_() for t in (k, v)]
    whole = F.scaled_dot_product_attention(query, *more, attn_mask=seen, scale=0.5, enable_gqa=True)
    expected = torch.autograd.grad(whole.sum(), [query, *more])
    with torch.no_grad():
        parts = [[t[:, :, :6] for t in more], [t[:, :, 6:] for t in more]]
        hows: list[Any] = [{"is_causal": False, "scale": 0.5}, {"is_causal": is_causal, "scale": 0.5}]
        found = [torch_fused.attention_with_sums(query, *part, **how) for part, how in zip(parts, hows, strict=True)]
        sums = torch.logaddexp(found[0][1], found[1][1])
        out = sum(part * (one - sums).exp().unsqueeze(-1) for part, one in found)
        assert torch.allclose(out, whole, rtol=0, atol=1e-13)
        given = torch.ones_like(whole), query
        back = [torch_fused.attention_back(*given, *p, whole, sums, **how) for p, how in zip(parts, hows, strict=True)]
    of_queries, of_keys, of_values = zip(*back, strict=True)
    for ours, theirs in zip((sum(of_queries), torch.cat(of_keys, 2), torch.cat(of_values, 2)), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


def test_storages_are_told_apart_without_memory() -> None:
    x, y = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert torch_operators.storage_id(x.untyped_storage()) == torch_operators.storage_id(x[1:].untyped_storage())
    assert torch_operators.storage_id(x.untyped_storage()) != torch_operators.storage_id(y.untyped_storage())


def test_fused_attention_is_attention_and_one_operator_without_content() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
    options: dict[str, Any] = {"dropout": 0.0, "is_causal": True, "mask": None, "scale": 0.5}
    found = torch_fused.fused_attention(q, k, v, **options)
    assert torch.allclose(found, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5), rtol=0, atol=1e-12)
    meta = torch.empty(1, 2, 5, 8, device="meta")
    with _Names() as names:
        assert torch_fused.fused_attention(meta, meta, meta, **options).shape == meta.shape
    assert names.seen == [f"aten::{FUSED}"]


def test_a_fused_norm_is_the_norm_and_one_operator_each_way_without_content() -> None:
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    n, r = torch_fused.fused_norm(x, 1e-3)
    assert torch.allclose(n, F.rms_norm(x, [8], None, 1e-3), rtol=0, atol=1e-12)
    assert torch.allclose(r, (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt(), rtol=0, atol=1e-12)
    meta = torch.empty(5, 8, device="meta", dtype=torch.bfloat16)
    with _Names() as names:
        n, r = torch_fused.fused_norm(meta, 1e-3)
        assert torch_fused.fused_norm_back(n, meta, meta[0], r).shape == meta.shape
    assert [name for name in names.seen if "layer_norm" in name] == [
        "aten::native_layer_norm",
        "aten::native_layer_norm_backward",
    ]


def test_every_dropout_of_torch_is_one() -> None:
    kinds = [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout]
    assert all(torch_tensors.is_dropout(kind(0.5)) for kind in kinds)
    assert not torch_tensors.is_dropout(nn.Identity())


def test_what_is_on_a_module_itself() -> None:
    module = nn.BatchNorm1d(2)
    module.child = nn.Linear(2, 2)
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert torch_tensors.own_parameter(module, "weight") is module.weight
    assert torch_tensors.own_parameter(module, "running_mean") is None
    assert torch_tensors.own_child(module, "child") is module.child
    assert torch_tensors.own_child(module, "weight") is None
    assert torch_tensors.is_persistent(module, "running_mean")
    assert not torch_tensors.is_persistent(module, "scratch")


def test_hooks_run_in_the_order_of_the_mapping() -> None:
    module, seen = nn.Identity(), []
    for number in range(2):
        module.register_forward_hook(lambda *_, n=number: seen.append(n))
    hooks = torch_tensors.forward_hooks(module)
    first = next(iter(hooks))
    hooks[first] = hooks.pop(first)
    module(torch.ones(1))
    assert seen == [1, 0]


def test_a_group_in_python_takes_its_name() -> None:
    group = torch_distributed.NamedGroup(0, 1)
    group._set_group_name("name")
    group._set_group_desc("what for")
    assert (group.group_name, group.group_desc) == ("name", "what for")


def test_the_store_of_a_simulated_job() -> None:
    with simulated_job(3):
        assert dist.get_world_size() == 3
        assert isinstance(torch_distributed.job_store(), dist.Store)


def test_the_time_limit_of_a_group_is_the_one_that_was_set(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store, timeout=timedelta(seconds=70))
    try:
        assert dist.group.WORLD is not None
        assert torch_distributed.timeout_of(dist.group.WORLD) == timedelta(seconds=70)
        torch_distributed.set_timeout(dist.group.WORLD, 40)
        assert torch_distributed.timeout_of(dist.group.WORLD) == timedelta(seconds=40)
    finally:
        dist.destroy_process_group()


def test_groups_are_split_where_torch_can_split_them_and_aborted_where_kernels_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no GPU here: of the group only what is asked of it is in place."""
    aborted: list[None] = []
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", lambda: aborted.append(None))
    with simulated_job(3):
        assert not torch_distributed.can_split_groups()
        torch_distributed.abort_groups()
        assert not aborted
        monkeypatch.setattr(distributed_c10d, "get_backend", lambda *_: "nccl")
        assert not torch_distributed.can_split_groups()  # a script opened the group, and bound no device
        group = SimpleNamespace(bound_device_id=torch.device("cuda", 1))
        monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: group)
        assert torch_distributed.can_split_groups()
        torch_distributed.abort_groups()
        assert aborted


def test_the_check_for_meta_parameters_takes_nothing_and_comes_back() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    check = FSDPParamGroup._validate_no_meta_params
    assert list(inspect.signature(check).parameters) == ["self"]
    assert "_validate_no_meta_params" in FSDPParamGroup.lazy_init.__code__.co_names
    with torch_distributed.meta_parameters_allowed():
        assert FSDPParamGroup._validate_no_meta_params is not check
    assert FSDPParamGroup._validate_no_meta_params is check


def test_fully_shard_runs_where_callers_are_looked_for() -> None:
    code: CodeType = fully_shard.__code__
    assert (fully_shard.__globals__["__name__"], code.co_qualname) == torch_distributed.COMPOSED
    assert "func" in code.co_freevars


def _llama(**changes: Any) -> Any:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, **changes)
    return AutoModelForCausalLM.from_config(config)


def test_what_a_model_says_of_itself() -> None:
    model = _llama(attn_implementation="eager")
    assert transformers_models.attention_of(model.config) == "eager"
    assert transformers_models.READ_FROM in model.config.to_dict()
    model._keep_in_fp32_modules_strict, model._keep_in_fp32_modules = {"norm"}, {"q_proj"}
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    of = {dtype: transformers_models.kept_in_float32(model, dtype) for dtype in dtypes}
    assert of == {torch.float16: {"norm", "q_proj"}, torch.bfloat16: {"norm"}, torch.float32: set()}
    model._keys_to_ignore_on_load_unexpected = ["inv_freq"]
    assert list(transformers_models.unexpected_keys(model)) == ["inv_freq"]


def test_a_module_is_filled_by_the_rule_of_its_model() -> None:
    model = _llama()
    norm = model.model.norm
    with torch.no_grad():
        norm.weight.fill_(7)
    transformers_models.initialize(model, norm)
    assert torch.equal(norm.weight, torch.ones(8))


def test_a_layer_that_is_computed_twice_calls_the_given_function() -> None:
    model, seen = _llama().train(), []
    layer = model.model.layers[0]
    layer.gradient_checkpointing = True

    def twice(function: Callable[..., Any], *args: Any) -> Any:
        seen.append(len(args))
        return function(*args)

    transformers_models.checkpoint_with(layer, twice)
    model(torch.zeros(1, 2, dtype=torch.int64))
    assert seen == [1]


def test_calls_of_attention_are_counted() -> None:
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention
    from transformers.models.llama.modeling_llama import LlamaAttention

    each = [(LlamaAttention, 1), (DiffLlamaAttention, 2)]
    found = [transformers_models.calls_of_attention(kind.__new__(kind)) for kind, _ in each]
    assert found == [number for _, number in each]


def test_experts_are_gated_by_a_function_of_the_model() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts = SimpleNamespace(_apply_gate=GptOssExperts._apply_gate)
    assert transformers_models.gate_of(experts) is GptOssExperts._apply_gate  # type: ignore[arg-type]
    assert list(inspect.signature(GptOssExperts._apply_gate).parameters)[1:] == ["gate_up"]
    assert transformers_models.gate_of(nn.Identity()) is None


def test_kernels_of_a_mixer_do_not_pass_its_projection_by() -> None:
    from transformers.models.bamba import modeling_bamba
    from transformers.models.falcon_h1 import modeling_falcon_h1
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid
    from transformers.models.mamba2 import modeling_mamba2
    from transformers.models.nemotron_h import modeling_nemotron_h

    for code, kind in (
        (modeling_bamba, modeling_bamba.BambaMixer),
        (modeling_falcon_h1, modeling_falcon_h1.FalconH1Mixer),
        (modeling_granitemoehybrid, modeling_granitemoehybrid.GraniteMoeHybridMambaLayer),
        (modeling_mamba2, modeling_mamba2.Mamba2Mixer),
        (modeling_nemotron_h, modeling_nemotron_h.NemotronHMamba2Mixer),
    ):
        fused: Any = code
        assert "mamba2_split_conv1d_scan_combined(" in inspect.getsource(kind.forward)
        assert "if fused_output is not None" in inspect.getsource(kind.forward)
        with mock.patch.object(fused, "mamba2_split_conv1d_scan_combined", return_value="fused"):
            transformers_models.without_fused_projection(kind.__new__(kind))
            assert fused.mamba2_split_conv1d_scan_combined(None, D=None) is None
    transformers_models.without_fused_projection(nn.Identity())


def test_peft_refuses_what_fused_kernels_read() -> None:
    config = LoraConfig(target_modules=["out_proj"])
    mamba, llama = (SimpleNamespace(config=SimpleNamespace(model_type=name)) for name in ("mamba", "llama"))
    peft_targets.refuse_mamba_targets(config, llama, "out_proj")
    peft_targets.refuse_mamba_targets(config, mamba, "in_proj")
    with pytest.raises(ValueError, match="out_proj"):
        peft_targets.refuse_mamba_targets(config, mamba, "out_proj")


def test_peft_rewrites_names_of_experts_unless_it_is_kept_from_it() -> None:
    def attached() -> Any:
        """The names that PEFT attaches to, of a model that says that it is a Mixtral."""
        model: Any = nn.ModuleDict({"w2": nn.Linear(2, 2)})
        model.config = SimpleNamespace(model_type="mixtral")
        config = LoraConfig(target_modules=["w2"])
        peft.inject_adapter_in_model(config, model)
        return config.target_modules

    from peft.utils import transformers_weight_conversion

    config = LoraConfig(target_modules=["w2"])
    peft_targets.rewrite_targets(config, SimpleNamespace(config=SimpleNamespace(model_type="mixtral")))
    assert config.target_modules != {"w2"}
    original = transformers_weight_conversion.convert_peft_config_for_transformers
    with peft_targets.targets_as_configured():
        assert attached() == {"w2"}
    assert transformers_weight_conversion.convert_peft_config_for_transformers is original
    with pytest.raises(ValueError, match="target"):
        attached()


def test_peft_says_how_a_stack_of_experts_is_stored() -> None:
    class Experts(nn.Module):
        def __init__(self, *, is_transposed: bool) -> None:
            super().__init__()
            self.is_transposed = is_transposed
            self.stack = nn.Parameter(torch.zeros(2, 3, 5))

    for is_transposed in (False, True):
        model = nn.ModuleDict({"experts": Experts(is_transposed=is_transposed)})
        peft.inject_adapter_in_model(LoraConfig(target_parameters=["experts.stack"], target_modules=[], r=1), model)
        (wrapper,) = (m for m in model.modules() if isinstance(m, ParamWrapper))
        assert peft_targets.is_stored_in_out(wrapper) == is_transposed
        assert wrapper.lora_A["default"].weight.shape == (2, 3 if is_transposed else 5)  # [r E, in]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_mean_is_known_by_what_has_made_it(reduction: str) -> None:
    x = torch.zeros(3, 2, requires_grad=True)
    for loss in (
        F.cross_entropy(x, torch.zeros(3).long(), reduction=reduction),
        F.mse_loss(x, torch.ones(3, 2), reduction=reduction),
        getattr(x.exp(), reduction)(),
    ):
        assert torch_tensors.is_mean(loss) == (reduction == "mean")
