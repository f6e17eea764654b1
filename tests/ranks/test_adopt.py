"""A transformers + PEFT model in memory, on a mesh: its step, its file, its adapters and options are those of PEFT."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import meshlora
from meshlora.adapter.attach import runtime
from meshlora.run.feeding import fitted
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_judge.compare import compare_adapters
from meshlora_judge.twin import twin_config
from tests.for_each import for_each
from tests.pool import Pool, RankError
from tests.ranks.masked import MaskedPeft

TINY = Path(__file__).parents[2] / "examples/tiny_base"
LIMIT, NUMBER = 1e-11, 4
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Family -> LoRA's options, each one that an adapter must bring with it.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "patterns": (
        "tiny",
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}},
    ),
    "dropout": ("tiny", {"target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.3}),
    "dora": ("tiny", {"target_modules": ["o_proj", "gate_proj"], "use_dora": True, "use_rslora": True}),
    "besides": ("tiny", {"target_modules": ["v_proj"], "modules_to_save": ["norm"], "trainable_token_indices": [3, 5]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "bias": "lora_only"}),
    "experts": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": STACKS}),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    for family in ("gpt2", "qwen3_moe"):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(twin_config(family), dtype=torch.float64).save_pretrained(folder / family)
    return {"tiny": TINY, "gpt2": folder / "gpt2", "qwen3_moe": folder / "qwen3_moe"}


def _is_alone(options: dict[str, Any]) -> bool:
    """Whether PEFT can train such an adapter beside no other."""
    return "bias" in options or "target_parameters" in options


def _peft_model(base: Path, options: dict[str, Any]) -> Any:
    """With two adapters if there can be, the second active, and values that are no initialisation's."""
    torch.manual_seed(0)  # PEFT draws from it, and ranks of a pool have drawn before
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, experts_implementation="eager")
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    model = get_peft_model(model, config, adapter_name="second" if _is_alone(options) else "first")
    if not _is_alone(options):
        model.add_adapter("second", copy.deepcopy(config))
    numbers = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".first" in name or ".second" in name:
            parameter.data += torch.randn(parameter.shape, generator=numbers, dtype=parameter.dtype) * 0.02
    model.set_adapter("second")
    return model.train()


def _batch() -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (NUMBER, 16), generator=numbers)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)


def _alone(base: Path, options: dict[str, Any], out: Path) -> float:
    model = _peft_model(base, options)
    masks = MaskedPeft(model, seed=7, adapter="second")
    optimizer = _optimizer(model)
    with meshlora.lift():
        loss = model(**_batch()).loss
        loss.backward()
    optimizer.step()
    assert bool(masks.num_dropped) == ("lora_dropout" in options)
    model.save_pretrained(str(out), save_embedding_layers=False)
    return float(loss.detach())


def _on_mesh(topology: str, base: Path, options: dict[str, Any], out: Path) -> tuple[float, list[str], str | None]:
    """Body of a rank."""
    given = _peft_model(base, options)
    before = {name: value.clone() for name, value in given.state_dict().items()}
    model = meshlora.adopt(given, topology=topology)
    assert model.training
    mesh, batch = model.meshlora.mesh, _batch()
    rows = slice(mesh.dp.rank, None, mesh.dp.size)
    optimizer = _optimizer(model)
    with meshlora.step(model, optimizer, seed=7) as one, meshlora.lift():
        own = fitted({name: value[rows] for name, value in batch.items()}, mesh.topology, pad_token_id=0)
        one.backward(model(**own).loss)
    for name in model.meshlora.adapters:
        meshlora.save_adapter(model, out / name, adapter=name)
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items()), "it is another's"
    return one.loss, list(model.meshlora.adapters), model.meshlora.active


@pytest.mark.parametrize("topology", ["tp=2,sp", pytest.param("dp=2,dp_shard", marks=pytest.mark.proof)])
@for_each("name", OPTIONS)
def test_a_step_is_that_of_the_given_model(
    topology: str, name: str, bases: dict[str, Path], pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    _check_step(topology, name, bases, pools, tmp_path)


@pytest.mark.proof
@for_each("name", [name for name in OPTIONS if name != "besides"])  # which trains rows of a tied embedding
def test_a_step_on_stages_is_that_of_the_given_model(
    name: str, bases: dict[str, Path], pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    _check_step("pp=2", name, bases, pools, tmp_path)


def _check_step(topology: str, name: str, bases: dict[str, Path], pools: Callable[[int], Pool], tmp_path: Path) -> None:
    family, options = OPTIONS[name]
    loss = pools(1).run(_alone, bases[family], options, tmp_path / "peft")[0]
    if family == "qwen3_moe" and topology == "tp=2,sp":
        topology = "tp=2"
    ours, names, active = pools(2).run(_on_mesh, topology, bases[family], options, tmp_path / "ours")[0]
    assert abs(ours - loss) <= LIMIT * abs(loss)
    assert (names, active) == (["second"] if _is_alone(options) else ["first", "second"], "second")
    for adapter in names:  # the one that was trained, and the one that was not
        worst = compare_adapters(tmp_path / "ours" / adapter, tmp_path / "peft" / adapter)
        assert worst.relative <= LIMIT, worst
        stored, own = (
            json.loads((tmp_path / whose / adapter / "adapter_config.json").read_text()) for whose in ("peft", "ours")
        )
        for option in ("r", "lora_alpha", "base_model_name_or_path", *options):
            assert _sorted(stored[option]) == _sorted(own[option]), option


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def _without_adapter(topology: str) -> float:
    """Body of a rank: a plain model, one with an adapter of transformers' own method, and one on the meta device."""
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    batch = _batch()
    with torch.no_grad(), meshlora.lift():
        base = plain(**batch).logits
        bare = meshlora.adopt(plain, topology=topology)
        assert not bare.meshlora.adapters
        worst = float((bare(**batch).logits - base).abs().max())
        torch.manual_seed(3)
        plain.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False), "mine")
        mixed = meshlora.adopt(plain, topology=topology)
        assert mixed.meshlora.active == "mine"
        assert any(each.requires_grad for each in mixed.parameters())
        worst = max(worst, float((mixed(**batch).logits - plain(**batch).logits).abs().max()))
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY), dtype=torch.float64)
            empty = get_peft_model(empty, LoraConfig(r=2, target_modules=["q_proj"]))
        filled = meshlora.adopt(empty, source=TINY, topology=topology)
        assert filled.meshlora.active == "default"
        assert any(each.requires_grad for each in filled.parameters())
        return max(worst, float((filled(**batch).logits - base).abs().max()))  # a fresh adapter does nothing


def test_plain_models_and_those_on_the_meta_device(pools: Callable[[int], Pool]) -> None:
    assert max(pools(2).run(_without_adapter, "tp=2")) <= 1e-11


def _of_other_values(on: str) -> None:
    """Body of a rank."""
    base = AutoModelForCausalLM.from_pretrained(TINY)
    torch.manual_seed(torch.distributed.get_rank() if on == "adapter" else 0)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    if on == "base":
        base.lm_head.weight.data[3] += torch.distributed.get_rank()
    meshlora.adopt(model, topology="tp=2")


@for_each(("on", "name"), [("adapter", "q_proj.lora_A.weight"), ("base", "embed_tokens.weight")])
def test_ranks_with_other_values_are_refused_on_all(on: str, name: str, pools: Callable[[int], Pool]) -> None:
    """A fresh adapter that each rank draws for itself is the commonest mistake."""
    with pytest.raises(RankError, match=f"{name} has other values on rank 1 than on rank 0") as failure:
        pools(2).run(_of_other_values, on)
    assert "torch.manual_seed" in str(failure.value)


def test_a_model_that_is_used_stays_frozen(tmp_path: Path) -> None:
    get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), LoraConfig(target_modules=["q_proj"])).save_pretrained(
        tmp_path
    )
    used = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), tmp_path)
    model = meshlora.adopt(used)
    assert runtime(model).active == "default"
    assert not model.training
    held = {parameter.data_ptr() for parameter in used.parameters()}
    assert not held & {parameter.data_ptr() for parameter in model.parameters()}, "merging would change the given one"
    assert not any(parameter.requires_grad for parameter in model.parameters())


def _plain(**options: Any) -> Any:
    return get_peft_model(
        AutoModelForCausalLM.from_pretrained(TINY), LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | options)
    )


def _merged() -> Any:
    model = _plain()
    model.merge_adapter()
    return model


def _quantised() -> Any:
    model = _plain()
    model.base_model.model.config.quantization_config = {"quant_method": "bitsandbytes"}
    return model


def _changed() -> Any:
    model = _plain()
    model.base_model.model.lm_head = nn.Linear(128, 7, bias=False)
    return model


def _on_meta() -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=1))


def _loha() -> Any:
    return get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), LoHaConfig(target_modules=["q_proj"]))


@for_each(
    ("make", "error", "words"),
    [
        (lambda: nn.Linear(2, 2), UserError, "a Linear: it takes a model of transformers"),
        (lambda: meshlora.load(TINY), UserError, "it is on a mesh already"),
        (_quantised, UnsupportedError, "a quantised model"),
        (_loha, UnsupportedError, "only LoRA is trained"),
        (lambda: _plain(init_lora_weights="pissa"), UnsupportedError, "has taken a part out of the base"),
        (_merged, UserError, "an adapter is merged into its weight"),
        (_changed, UserError, r"lm_head.weight is \[7, 128\]"),
        (_on_meta, UserError, "the folder of its weights is not known"),
        (lambda: AutoModelForCausalLM.from_pretrained(TINY).model, UserError, "a LlamaForCausalLM is trained"),
    ],
)
def test_what_is_no_such_model_is_refused(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        meshlora.adopt(make())
