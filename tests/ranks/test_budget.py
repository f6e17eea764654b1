"""The collective budget of docs/parallelism.md, counted at dispatch level in both passes, with and without LoRA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import meshlora
from meshlora.adapter.attach import runtime
from meshlora.plan.layout import Split
from meshlora.train.losses import shifted_loss, summed_cross_entropy
from meshlora.verify.budget import first_forwards_budget, micro_batch_budget
from meshlora_judge.capture import CollectiveCounter
from meshlora_judge.twin import twin_config
from tests.for_each import for_each
from tests.pool import Pool

BUDGET = {
    topology: {(phase, kind): number for phase in ("forward", "backward") for kind in kinds}
    for topology, number, kinds in (
        ("dp=2,dp_shard", 1, ["allgather"]),
        ("tp=2", 2, ["allreduce"]),
        ("tp=2,sp", 2, ["allgather", "reducescatter"]),
    )
}


def count_passes(model: Any, ids: Tensor, counter: CollectiveCounter | None = None) -> CollectiveCounter:
    """What the loss of `ids` sends forward and backward."""
    counter = counter or CollectiveCounter()
    counter.phase = "forward"
    with counter:
        loss = shifted_loss(model, ids, None, ids.roll(-1, 1))
        counter.phase = "backward"
        loss.backward()
    return counter


def _count(topology: str, num_layers: int, with_lora: bool) -> dict[tuple[str, str], int]:
    """Collectives of one forward and one backward; the embedding output carries a gradient as in deeper layers."""
    config = twin_config("llama", num_hidden_layers=num_layers)
    lora = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    model = meshlora.load(config, lora=lora, topology=topology)
    if not with_lora:
        meshlora.set_adapter(model, None)
    embeds = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with CollectiveCounter() as counter:
        counter.phase = "forward"
        logits = model(inputs_embeds=embeds, use_cache=False).logits
        loss = summed_cross_entropy(logits, torch.ones(2, 8, dtype=torch.int64))
        counter.phase = "backward"
        loss.backward()
    return dict(counter.counts)


@pytest.mark.long
@pytest.mark.parametrize("with_lora", [True, False], ids=["lora", "base"])
@pytest.mark.parametrize("topology", BUDGET)
def test_a_layer_costs_what_the_frozen_base_costs(topology: str, with_lora: bool, pools: Callable[[int], Pool]) -> None:
    two = pools(2).run(_count, topology, 2, with_lora)[0]
    four = pools(2).run(_count, topology, 4, with_lora)[0]
    assert {key: (n - two.get(key, 0)) / 2 for key, n in four.items() if n != two.get(key, 0)} == BUDGET[topology]


def _count_micro_batch(
    family: str, topology: str, options: dict[str, Any]
) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """(what a micro-batch from tokens to gradients takes, what the plan says), by phase and kind."""
    # The embedding is trained: below a frozen one nothing flows back, and the first layer saves a call.
    whole = {} if "target_modules" in options else {"target_modules": "all-linear", "modules_to_save": ["embed_tokens"]}
    lora = LoraConfig(**{"init_lora_weights": False, **whole, **options})
    model = meshlora.load(twin_config(family), lora=lora, topology=topology)
    ids = torch.arange(3, 51).view(2, 24)
    counter = CollectiveCounter()
    hooks = [
        model.register_forward_pre_hook(lambda *_: setattr(counter, "phase", "forward"), prepend=True),
        model.register_forward_hook(lambda *_: setattr(counter, "phase", "loss")),
    ]
    count_passes(model, ids, counter)
    for hook in hooks:
        hook.remove()
    plan = runtime(model).plan
    rows = sum(rule.split is Split.ROW for rule in plan.linears.values()) if options.get("use_dora") else 0
    budget = micro_batch_budget(plan, scaled_rows=rows) + first_forwards_budget(plan, 1)
    return dict(counter.counts), {key: n for key, n in budget.items() if n}


@pytest.mark.long
@for_each("topology", ["tp=2", "tp=2,sp", "dp=2,dp_shard"])
@for_each(
    ("family", "options"),
    [
        pytest.param("llama", {}, id="llama"),
        pytest.param("llama", {"use_dora": True}, id="dora"),
        pytest.param("llama", {"target_modules": ["lm_head", "embed_tokens"]}, id="embedding_and_head"),
        pytest.param("olmo2", {}, id="wide_norms"),
        pytest.param("bamba", {}, id="mixers"),
        pytest.param("doge", {}, id="whole_regions"),
    ],
)
def test_a_micro_batch_costs_what_the_plan_says(
    family: str, options: dict[str, Any], topology: str, pools: Callable[[int], Pool]
) -> None:
    """Layers, embedding, head and loss: the whole of it, and no call less than planned either."""
    for counted, budget in pools(2).run(_count_micro_batch, family, topology, options):
        assert counted == budget


def _bytes_of_attention(topology: str) -> tuple[dict[str, float], int]:
    """(what a rank gives the collectives of keys and values, in units of its own pair, by phase; layers)."""
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    model = meshlora.load(twin_config("llama"), lora=lora, topology=topology)
    ids = torch.arange(3, 51).view(2, 24)
    counter = count_passes(model, ids)
    config = model.config
    pair = 2 * config.num_key_value_heads * config.head_dim * 4 * ids.numel() // runtime(model).mesh.cp.size
    sent = {phase: counter.sent[phase, "alltoall"] / pair for phase in ("forward", "backward")}
    return sent, config.num_hidden_layers


@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_passes_keys_and_values_on_and_in_the_backward_their_gradients_too(
    size: int, pools: Callable[[int], Pool]
) -> None:
    """In the backward keys and values go as far as in the forward, and their gradients as far: home at last."""
    for sent, layers in pools(size).run(_bytes_of_attention, f"cp={size},ring"):
        assert sent == {"forward": layers * (size - 1), "backward": layers * 2 * (size - 1)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("flag", ["", ",ring"], ids=["gathered", "ring"])
def test_a_micro_batch_of_cut_sequences_costs_what_the_plan_says(
    flag: str, size: int, pools: Callable[[int], Pool]
) -> None:
    for counted, budget in pools(size).run(_count_micro_batch, "llama", f"cp={size}{flag}", {}):
        assert counted == budget


def _count_step(topology: str) -> dict[tuple[str, str], int]:
    model = meshlora.load(twin_config("llama"), lora=LoraConfig(target_modules="all-linear"), topology=topology)
    model(input_ids=torch.ones(2, 8, dtype=torch.int64)).logits.sum().backward()
    with CollectiveCounter() as counter:
        counter.phase = "step"
        meshlora.finish_gradients(model, num_tokens=16)
    return dict(counter.counts)


def test_a_step_adds_one_bucket_per_set_of_axes_and_one_scalar(pools: Callable[[int], Pool]) -> None:
    assert pools(4).run(_count_step, "dp=2,tp=2")[0] == {("step", "allreduce"): 3}
    assert pools(2).run(_count_step, "tp=2")[0] == {("step", "allreduce"): 1}
    assert pools(2).run(_count_step, "dp=2")[0] == {("step", "allreduce"): 2}
