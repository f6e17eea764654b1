"""Layers that are computed twice give the bits of layers that are computed once, and keep less in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import meshlora
from meshlora.adapter.attach import active_factors, runtime
from meshlora.adapter.formats.peft_format import WEIGHTS_FILE
from meshlora.plan.derive import decoder_layers
from meshlora.run.recompute import check_recompute, recompute_layers
from meshlora.train.losses import shifted_loss
from meshlora.wings.experts.routing import step_file
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.float64 import lift
from meshlora_ground.routing import RoutingRecord
from meshlora_ground.topology import Topology
from meshlora_judge.capture import CollectiveCounter
from meshlora_judge.compare import compare_adapters
from meshlora_judge.twin import twin_config
from tests.blueprints import build_meta
from tests.pool import Pool
from tests.ranks import test_training_experts as experts
from tests.run_files import untimed_metrics_of

folder = experts.folder  # a fixture
LAYERS, MODES = 4, ("none", 2, "full", "keep_attention", "offload")
Found = dict[str | int, dict[str, Any]]


class _Counter(CollectiveCounter):
    """Counts calls of attention kernels too, of forwards."""

    attentions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.attentions += "attention" in func.name() and "backward" not in func.name()
        return super().__torch_dispatch__(func, types, args, kwargs)


def _one_step(family: str, topology: str, dtype: str) -> Found:
    """Of each mode: gradients, collectives by phase, calls of attention kernels, and bytes that the forward leaves for
    the backward, other than kept attention."""
    config = twin_config(family, num_hidden_layers=LAYERS)
    targets = {"target_parameters": ["mlp.experts.gate_up_proj"]} if family == "qwen3_moe" else {}
    lora = LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False, **targets)
    model = meshlora.load(config, lora=lora, topology=topology, dtype=dtype)
    model.train()
    mesh = runtime(model).mesh
    ids = torch.randint(3, 200, (2, 16), generator=torch.Generator().manual_seed(mesh.dp.rank))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: Found = {}
    counter = _Counter()
    for layer in decoder_layers(model)[1]:
        layer.register_forward_pre_hook(lambda *_: setattr(counter, "phase", "layers"))
        layer.register_forward_hook(lambda *_: setattr(counter, "phase", "outside"), prepend=True)
    for mode in MODES:
        recompute_layers(model, mode)
        model.zero_grad()
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address comes twice
            return tensor

        counter.phase, counter.counts, counter.attentions = "outside", Counter(), 0
        with counter:
            with lift(dtype == "float64"), saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = shifted_loss(model, ids, torch.ones_like(ids), ids.roll(-1, 1))
            held = sum(t.untyped_storage().nbytes() for address, t in saved.items() if address not in own)
            counter.phase = "backward"
            loss.backward()
        gradients = {f.name: f.parameter.grad.clone() for f in active_factors(model) if f.parameter.grad is not None}
        found[mode] = {"loss": loss.detach(), "gradients": gradients, "collectives": dict(counter.counts), "held": held}
        found[mode]["attentions"] = counter.attentions
    return found


def _counts(found: dict[str, Any], phase: str) -> Counter[str]:
    return Counter({kind: number for (when, kind), number in found["collectives"].items() if when == phase})


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype", [*(pytest.param(t, marks=pytest.mark.proof) for t in ("float64", "float32")), "bfloat16"]
)
@pytest.mark.parametrize(
    ("family", "topology"),
    [
        *(("qwen3", topology) for topology in ("", "tp=2", "tp=2,sp", "cp=2", "cp=2,ring")),
        ("qwen3_moe", "tp=2,sp,ep=2"),
    ],
)
def test_gradients_are_the_same_bits_and_less_is_kept(
    family: str, topology: str, dtype: str, pools: Callable[[int], Pool]
) -> None:
    for found in pools(2 if topology else 1).run(_one_step, family, topology, dtype):
        plain = found["none"]
        assert plain["gradients"]
        for mode in MODES[1:]:
            again = found[mode]
            assert torch.equal(again["loss"], plain["loss"])
            assert again["gradients"].keys() == plain["gradients"].keys()
            for name, gradient in plain["gradients"].items():
                assert torch.equal(again["gradients"][name], gradient), name
        forward, backward = _counts(plain, "layers"), _counts(plain, "backward")
        assert _counts(found["full"], "backward") == backward + forward, "all of a layer's forward, once more"
        assert _counts(found[2], "backward") == backward + Counter({kind: n // 2 for kind, n in forward.items()})
        # What passes by in a ring is attention's own.
        forward_again = Counter() if "ring" in topology else forward
        assert _counts(found["keep_attention"], "backward") == backward + forward_again
        once = plain["attentions"]
        assert once >= LAYERS
        assert (found["full"]["attentions"], found["keep_attention"]["attentions"]) == (2 * once, once)
        assert found["offload"]["held"] < found["full"]["held"], "without inputs of layers"
        assert found["full"]["held"] < 0.75 * found[2]["held"] < 0.75 * 0.8 * plain["held"]


def test_attention_is_kept_beside_the_inputs_of_layers_and_freed() -> None:
    """In bytes that torch allocates and frees, of a model in float32."""
    config = twin_config("qwen3", num_hidden_layers=LAYERS)
    lora = LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = meshlora.load(config, lora=lora, dtype="float32").train()
    rows, tokens = 2, 64
    ids = torch.randint(3, 200, (rows, tokens), generator=torch.Generator().manual_seed(0))

    def step() -> tuple[int, int, int]:
        """Bytes held after the forward, after the backward, and after a forward without one."""
        model.zero_grad()
        with _memory() as dropped:
            loss = shifted_loss(model, ids, torch.ones_like(ids), ids.roll(-1, 1))
            del loss
        with _memory() as forward:
            loss = shifted_loss(model, ids, torch.ones_like(ids), ids.roll(-1, 1))
        with _memory() as backward:
            loss.backward()
            del loss
        held = _held(forward)
        return held, held + _held(backward), _held(dropped)

    found = {}
    for mode in ("none", "full", "keep_attention"):
        recompute_layers(model, mode)
        step()  # what stays from a first one on
        found[mode] = step()
    output, sums = (
        rows * tokens * config.num_attention_heads * config.head_dim,
        rows * tokens * config.num_attention_heads,
    )
    (plain, *left), (full, *full_left), (kept, *kept_left) = found.values()
    assert kept - full == 4 * LAYERS * (output + sums)
    assert kept < plain / 2
    assert left == full_left == kept_left, "gradients"
    assert left[1] == 0


def _memory() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def _held(seen: profile) -> int:
    return sum(event.self_cpu_memory_usage for event in seen.events())


def test_attention_without_a_kernel_is_computed_again() -> None:
    """Of values of another width than keys torch multiplies matrices."""
    model = meshlora.load(twin_config("deepseek_v3"), lora=LoraConfig(r=4, target_modules=["o_proj"])).train()
    ids, found = torch.arange(3, 19).view(1, 16), []
    for recompute in ("none", "keep_attention"):
        recompute_layers(model, recompute)
        model.zero_grad()
        shifted_loss(model, ids, None, ids.roll(-1, 1)).backward()
        found.append([factor.parameter.grad for factor in active_factors(model)])
    for once, again in zip(*found, strict=True):
        assert once is not None
        assert torch.equal(once, again)


@pytest.fixture(scope="module")
def routed_elsewhere(folder: Path, pools: Callable[[int], Pool]) -> Path:
    """A record that sends every token to the experts next to those that it would choose."""
    experts._run(pools, folder, "own-choice", "dp=1", routing_record=str(folder / "own"))
    other = folder / "elsewhere"
    other.mkdir()
    for step in range(experts.STEPS):
        record = RoutingRecord.load(step_file(folder / "own", step))
        for key, table in record.choices.items():
            record.choices[key] = (table + 1) % record.num_experts[key[1]]
        record.save(step_file(other, step))
    return other


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["tp=2,sp,ep=2", pytest.param("dp=2,ep=2", marks=pytest.mark.proof)])
def test_experts_of_the_second_forward_are_those_of_the_first(
    mesh: str, folder: Path, routed_elsewhere: Path, pools: Callable[[int], Pool]
) -> None:
    """Where the record decides and not the router, whose own choice is another; with load balancing beside it."""
    outputs = []
    for mode in ("none", "full"):
        name = f"{mode}-{mesh}"
        experts._run(
            pools, folder, name, mesh, recompute=mode, routing_replay=str(routed_elsewhere), router_aux_loss_coef=1.0
        )
        outputs.append(folder / name)
    plain, again = outputs
    assert compare_adapters(plain / "adapter", folder / "own-choice" / "adapter").relative > 1e-2
    assert (again / "adapter" / WEIGHTS_FILE).read_bytes() == (plain / "adapter" / WEIGHTS_FILE).read_bytes()
    assert untimed_metrics_of(again) == untimed_metrics_of(plain)


def test_recording_beside_recomputation_writes_the_same_choices(
    folder: Path, routed_elsewhere: Path, pools: Callable[[int], Pool]
) -> None:
    experts._run(pools, folder, "again", "tp=2,sp,ep=2", recompute=1, routing_record=str(folder / "again-routes"))
    for step in range(experts.STEPS):
        ours, theirs = (RoutingRecord.load(step_file(folder / name, step)) for name in ("again-routes", "own"))
        assert ours.choices.keys() == theirs.choices.keys()
        assert all(torch.equal(ours.choices[key], table) for key, table in theirs.choices.items())


def test_evaluation_keeps_nothing_and_computes_once() -> None:
    model = meshlora.load(twin_config("qwen3"), lora=LoraConfig(target_modules=["q_proj"]))
    recompute_layers(model, "full")
    passes = []
    attention = model.get_submodule("model.layers.0.self_attn")
    attention.register_forward_hook(lambda *_: passes.append(1))
    ids = torch.arange(3, 19).view(1, 16)
    for train, expected in ((True, 2), (False, 1)):
        passes.clear()
        model.train(train)
        shifted_loss(model, ids, None, ids.roll(-1, 1)).backward()
        assert len(passes) == expected


def test_layers_that_multiply_their_own_input_are_computed_again() -> None:
    """olmo2 has no norm before q, k and v: what they share of a layer's input is shared anew the second time."""
    found = []
    for recompute in ("none", "full"):
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = meshlora.load(twin_config("olmo2"), lora=lora).train()
        recompute_layers(model, recompute)
        ids = torch.arange(3, 19).view(1, 16)
        shifted_loss(model, ids, None, ids.roll(-1, 1)).backward()
        found.append([factor.parameter.grad for factor in active_factors(model)])
    for once, again in zip(*found, strict=True):
        assert once is not None
        assert torch.equal(once, again)


def test_more_layers_than_the_model_has_are_refused() -> None:
    config = twin_config("qwen3", num_hidden_layers=2)
    model, _ = build_meta(config, Topology.parse("tp=2"), dtype=torch.float32)
    check_recompute(model, 2)
    with pytest.raises(UnsupportedError, match="the model has 2 layers"):
        check_recompute(model, 3)


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_attention_is_kept_of_sdpa_alone(attention: str) -> None:
    config = twin_config("qwen3")
    config._attn_implementation = attention
    model, _ = build_meta(config, Topology.parse(""), dtype=torch.float32)
    check_recompute(model, "full")
    model.config._attn_implementation = attention
    given = f"train.recompute=keep_attention with attn_implementation={attention}"
    with pytest.raises(
        UnsupportedError, match=rf"{given}.*use model.attn_implementation: sdpa, or train.recompute: full"
    ):
        check_recompute(model, "keep_attention")


def test_layers_that_do_not_know_it_are_refused() -> None:
    model, _ = build_meta(twin_config("qwen3"), Topology.parse(""), dtype=torch.float32)
    decoder_layers(model)[1][1] = torch.nn.Identity()
    with pytest.raises(UnsupportedError, match=r"train.recompute=full with model_type 'qwen3': its Identity cannot"):
        check_recompute(model, "full")
    check_recompute(model, "none")
