"""TRL's trainers around a split model end where they end with PEFT on one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    TrainingArguments,
)

import meshlora
from meshlora.layers.linear import ParallelLinear
from meshlora.plan.derive import decoder_layers
from meshlora.run import recompute
from meshlora_extra.hf.trl import _scored
from meshlora_ground.errors import UserError
from meshlora_judge.compare import compare_adapters
from tests.pool import Pool
from tests.ranks.masked import MaskedPeft

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "examples/tiny_base")
LIMIT = 1e-9
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "learning_rate": 3e-3,
    "max_grad_norm": 0.1,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "seed": 5,
}


def _texts(number: int) -> list[str]:
    return [f"Return the {'sum of ' * (k % 5)}item {k * 7} of the list." for k in range(number)]


def _length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) + text.count("e") for text in completions]


def _trainer(kind: str, out: Path, dp: int = 1, **more: Any) -> tuple[Any, dict[str, Any]]:
    """(class of TRL, its arguments but for the model), with options away from their defaults.

    dp: ranks that share the rows of one process's batch.
    """
    import trl

    number = 16 if kind == "grpo" else 15  # the last batch is a short one
    texts, options = _texts(number), {**OPTIONS, **more}
    options["per_device_train_batch_size"] //= dp
    if kind == "sft":
        args = trl.SFTConfig(str(out), **{"max_length": 40, **options})
        return trl.SFTTrainer, {"args": args, "train_dataset": Dataset.from_dict({"text": texts})}
    if kind == "reward":
        args = trl.RewardConfig(str(out), max_length=60, center_rewards_coefficient=0.02, **options)
        answers = {"chosen": [f" Yes {k}" for k in range(15)], "rejected": [" no" * (k % 4 + 1) for k in range(15)]}
        margins = {"margin": [0.1 * (k % 3) for k in range(15)]}
        return trl.RewardTrainer, {
            "args": args,
            "train_dataset": Dataset.from_dict({"prompt": texts, **answers, **margins}),
        }
    if kind == "dpo":
        args = trl.DPOConfig(str(out), max_length=60, beta=0.3, label_smoothing=0.1, **options)
        answers = {"chosen": [f" Yes {k}" for k in range(15)], "rejected": [" no" * (k % 4 + 1) for k in range(15)]}
        data = {"prompt": texts, **answers}
        return trl.DPOTrainer, {"args": args, "train_dataset": Dataset.from_dict(data)}
    args = trl.GRPOConfig(
        str(out), num_generations=4, max_completion_length=12, beta=0.2, temperature=0.7, epsilon_high=0.3, **options
    )
    data = {"args": args, "reward_funcs": _length, "train_dataset": Dataset.from_dict({"prompt": texts})}
    return trl.GRPOTrainer, data


def _said(trainer: Any) -> list[dict[str, float]]:
    with meshlora.lift():
        trainer.train()
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "rewards/margins", "rewards/chosen", "reward", "kl")
    names += ("min_reward", "mean_reward", "max_reward")
    return [{name: line[name] for name in names if name in line} for line in trainer.state.log_history]


class _Exact:
    """The head of TRL's models by its definition: TRL's own adds up in float32 whatever the model's dtype is."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, temperature: float, *_: Any
    ) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
        logits = F.linear(hidden, weight, bias) / temperature
        log_p = logits.log_softmax(-1)
        chosen, entropy = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
        return chosen, entropy, None, logits.detach().mean(-1), logits.argmax(-1) == labels


def _whole(kind: str, start: Path) -> Any:
    """PEFT's model, with the adapter in `start`; a reward model has one of its own."""
    if kind != "reward":
        model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
        return PeftModel.from_pretrained(model, str(start), is_trainable=True)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(BASE, dtype=torch.float64, num_labels=1)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="SEQ_CLS")
    return get_peft_model(model, lora)


def _alone(kind: str, start: Path, out: Path, drops: bool = False, **more: Any) -> list[dict[str, float]]:
    trainer, options = _trainer(kind, out, **more)
    model = _whole(kind, start)
    if drops:
        options["callbacks"] = [_Steps(MaskedPeft(model, seed=OPTIONS["seed"]))]
    with mock.patch("trl.trainer.utils._ChunkedLogProbFunction", _Exact):
        made = trainer(model=model, processing_class=AutoTokenizer.from_pretrained(BASE), **options)
        for name, module in made.model.named_modules():
            if name.endswith("lora_dropout.ref"):  # of the frozen copy, which in TRL drops what it likes
                module.p = 0.0
        said = _said(made)
    model.save_pretrained(str(out / "adapter"), selected_adapters=["default"])
    return said


def _on_mesh(kind: str, topology: str, start: Path, out: Path, **more: Any) -> list[dict[str, float]]:
    """Body of a rank."""
    from meshlora_extra.hf import on_mesh

    if kind == "reward":
        model = meshlora.adopt(_whole(kind, start), topology=topology)
    else:
        model = meshlora.load(BASE, adapter=str(start), topology=topology, dtype="float64")
    trainer, options = _trainer(kind, out, model.meshlora.mesh.dp.size, **more)
    if kind == "dpo":
        options["ref_model"] = None
    args = options["args"]
    args.gradient_checkpointing = args.activation_checkpointing = topology == "tp=2,sp"  # TRL's default
    made = on_mesh(trainer)(model=model, processing_class=AutoTokenizer.from_pretrained(BASE), **options)
    said = _said(made)
    if topology == "tp=2,sp":
        functions = {layer._gradient_checkpointing_func for layer in decoder_layers(model)[1]}
        assert functions == {recompute._checkpointed}, "not transformers' own"
    made.save_model(str(out / "adapter"))
    return said


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "adapter"
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    model = meshlora.load(BASE, lora=lora, dtype="float64", seed=3)
    # Near the base, so that what GRPO generates is not noise; away from it, so that B has a gradient's history.
    with torch.no_grad():
        numbers = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=numbers, dtype=parameter.dtype) * 1e-3)
    meshlora.save_adapter(model, folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        ("dpo", "tp=2,sp"),
        ("reward", "tp=2,sp"),
        *(pytest.param(kind, "tp=2,sp", marks=pytest.mark.proof) for kind in ("sft", "grpo")),
        *(pytest.param(kind, "tp=2", marks=pytest.mark.proof) for kind in ("sft", "dpo", "grpo")),
    ],
)
def test_ends_where_trl_ends_on_one_process(
    kind: str, topology: str, start: Path, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    said = pools(1).run(_alone, kind, start, tmp_path / "alone")[0]
    found = pools(2).run(_on_mesh, kind, topology, start, tmp_path / "mesh")
    _same(said, found[0], tmp_path)


def _same(
    said: list[dict[str, float]], found: list[dict[str, float]], tmp_path: Path, left_out: tuple[str, ...] = ()
) -> None:
    """What both report, but for what is `left_out`, and both adapters."""
    assert len(found) == len(said) > 0
    for ours, theirs in zip(found, said, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {*left_out}:
            value = ours[name]
            limit = LIMIT if name == "grad_norm" else 1e-5  # Trainer and TRL add up the others in float32
            assert value == pytest.approx(theirs[name], rel=limit, abs=1e-7), (name, ours, theirs)
    worst = compare_adapters(tmp_path / "mesh/adapter", tmp_path / "alone/adapter")
    assert worst.relative <= LIMIT, worst


def _drawn(trainer: Any, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
    """Completions in place of sampled ones, whoever generates which: by the prompt, and the place in its group."""
    completions = []
    for place, ids in enumerate(prompt_ids):
        first = sum(ids) + 17 * (place % 4)
        completions.append([3 + (first * k) % 200 for k in range(1, 4 + first % 7)])
    return completions, None


def _both(body: Any, more: dict[str, Any], *given: Any) -> Any:
    import trl

    with mock.patch.object(trl.GRPOTrainer, "_generate_single_turn", _drawn):
        return body(*given, **more)


# Whole groups on each rank; and prompts as far from the start of a row, as positions are of float32.
_GROUPS = {"per_device_train_batch_size": 8, "pad_to_multiple_of": 32}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "topology", "more"),
    [
        ("sft", "dp=2", {}),
        ("dpo", "dp=2", {}),
        ("reward", "dp=2", {}),
        ("grpo", "dp=2", _GROUPS),
        ("sft", "tp=2,sp", {"packing": True}),
        ("sft", "dp=2", {"padding_free": True, "max_length": None}),
        ("grpo", "dp=2", {**_GROUPS, "loss_type": "grpo"}),
    ],
    ids=["sft", "dpo", "reward", "grpo", "packed", "padding-free", "means of rows"],
)
def test_shares_and_packed_rows_end_where_one_process_ends(
    kind: str, topology: str, more: dict[str, Any], start: Path, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    said = pools(1).run(_both, _alone, more, kind, start, tmp_path / "alone")[0]
    found = pools(2).run(_both, _on_mesh, more, kind, topology, start, tmp_path / "mesh")
    # Of GRPO means over tokens of a micro-batch, whose rows are drawn by each rank for itself.
    _same(said, found[0], tmp_path, ("entropy", "kl") if kind == "grpo" else ())


class _Steps(TrainerCallback):
    """Tells the masks of one process the step."""

    def __init__(self, masks: MaskedPeft) -> None:
        self.masks = masks

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.masks.step = state.global_step


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "topology", "more"),
    [
        ("sft", "tp=2,sp", {}),
        ("dpo", "tp=2,sp", {"disable_dropout": False}),
        ("dpo", "dp=2", {"disable_dropout": True}),
    ],
    ids=["sft", "dpo", "dpo without, as TRL has it by default"],
)
def test_dropout_is_that_of_one_process(
    kind: str, topology: str, more: dict[str, Any], pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.2)
    meshlora.save_adapter(meshlora.load(BASE, lora=lora, dtype="float64", seed=3), tmp_path / "start")
    drops = not more.get("disable_dropout", False)
    pools(1).run(_both, _alone, more, kind, tmp_path / "start", tmp_path / "alone", drops)
    pools(2).run(_both, _on_mesh, more, kind, topology, tmp_path / "start", tmp_path / "mesh")
    worst = compare_adapters(tmp_path / "mesh/adapter", tmp_path / "alone/adapter")
    assert worst.relative <= LIMIT, worst


def _with_dropout() -> str:
    """Body of a rank."""
    from meshlora_extra.hf import on_mesh

    model = meshlora.load(BASE, lora=LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1))
    trainer, options = _trainer("grpo", Path("unused"))
    with pytest.raises(UserError) as caught:
        on_mesh(trainer)(model=model, **options)
    said = str(caught.value)
    trainer, options = _trainer("grpo", Path("unused"), disable_dropout=True)
    on_mesh(trainer)(model=model, processing_class=AutoTokenizer.from_pretrained(BASE), **options)
    for module in model.modules():
        if isinstance(module, ParallelLinear):
            assert "default" not in module.dropout
    return said


def test_dropout_in_what_is_generated_is_refused_unless_trl_turns_it_off(pools: Callable[[int], Pool]) -> None:
    (said,) = pools(1).run(_with_dropout)
    assert "GRPOTrainer with lora_dropout=0.1: what is generated" in said
    assert "disable_dropout=True" in said


def _refused(topology: str, args: Any) -> str:
    import trl

    from meshlora_extra.hf import on_mesh

    model = meshlora.load(BASE, lora=LoraConfig(r=2, target_modules="all-linear"), topology=topology)
    if args == "its own":
        args = trl.SFTConfig("unused", use_cpu=True, bf16=False, report_to=[])

    class Own(trl.SFTTrainer):  # type: ignore[misc]
        """Of a user's module: one of TRL by its base."""

    with pytest.raises(UserError) as caught:
        on_mesh(Own)(model=model, args=args, train_dataset=Dataset.from_dict({"text": ["a"]}))
    return str(caught.value)


def _means(topology: str) -> list[str]:
    """Body of a rank: refusals of what is no sum over the rows of all."""
    import trl

    from meshlora_extra.hf import on_mesh

    model, said = meshlora.load(BASE, lora=LoraConfig(r=2, target_modules="all-linear"), topology=topology), []
    given: list[tuple[Any, Any]] = [
        (trl.DPOTrainer, trl.DPOConfig("unused", loss_type=["sigmoid", "sft"], use_cpu=True, bf16=False)),
        (trl.GRPOTrainer, trl.GRPOConfig("unused", loss_type="bnpo", use_cpu=True, bf16=False)),
        (trl.KTOTrainer, trl.KTOConfig("unused", use_cpu=True, bf16=False)),
    ]
    for trainer, args in given:
        with pytest.raises(UserError) as caught:
            on_mesh(trainer)(model=model, args=args)
        said.append(str(caught.value))
    return said


def test_losses_that_are_means_of_a_ranks_own_rows_are_refused(pools: Callable[[int], Pool]) -> None:
    (said, _) = pools(2).run(_means, "dp=2")
    for words, text in zip(("loss_type='sft'", "loss_type='bnpo'", "trl.KTOTrainer"), said, strict=True):
        assert f"{words} on dp=2: its loss is a mean of a rank's own rows" in text


def test_cp_and_arguments_that_trl_would_make_anew_are_refused(pools: Callable[[int], Pool]) -> None:
    assert "SFTTrainer on cp=2" in pools(2).run(_refused, "cp=2", "its own")[0]
    args = TrainingArguments("unused", use_cpu=True, report_to=[])
    for given, said in ((None, "no args"), (args, "args of TrainingArguments")):
        assert f"SFTTrainer with {said}" in pools(2).run(_refused, "tp=2", given)[0]


def test_input_that_would_not_be_scored_is_refused() -> None:
    model = meshlora.load(BASE, lora=LoraConfig(r=2, target_modules="all-linear"))
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(UserError, match="the model's input token_type_ids"):
        _scored(model, input_ids=ids, token_type_ids=ids, labels=ids, temperature=1.0, fused_lm_head=True)
