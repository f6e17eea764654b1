"""The frozen policy of dpo, kto and kl_coef: TRL's, where a run goes on from an adapter; kept when it is resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshlora.cli.main import main
from meshlora.run.config.file import read_run, read_runs
from meshlora.run.together import prepare_run, prepare_runs
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.float64 import lift
from meshlora_ground.objectives.policies import Policy
from meshlora_ground.objectives.preferences import Dpo
from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from meshlora_judge.inputs import write_adapter
from tests.one_process import train_alone
from tests.pool import Pool
from tests.ranks.test_trainer import run_and_keep_groups
from tests.run_files import TINY, metrics_of, write_run_file

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
# Each step is of all records, so that their order is nothing.
NUMBER, STEPS = 4, 3
TEXTS = [f"Return the {'sum of ' * (k % 3)}item {k * 7} of the list." for k in range(NUMBER)]
ANSWERS = [f" Yes {k}" + " indeed" * k for k in range(NUMBER)]
RECORDS: dict[str, dict[str, list[Any]]] = {
    "dpo": {"prompt": TEXTS, "chosen": ANSWERS, "rejected": [" no" * (k % 4 + 1) for k in range(NUMBER)]},
    "kto": {"prompt": TEXTS, "completion": ANSWERS, "label": [k % 3 != 1 for k in range(NUMBER)]},
}
PROMPT = 5
ROLLOUTS = torch.randint(10, 200, (NUMBER, 12), generator=torch.Generator().manual_seed(0))
ADVANTAGES = [1.0, -0.5, 0.3, -1.2]
TRAIN: dict[str, Any] = {"steps": STEPS, "batch_size": NUMBER, "lr": 1e-3, "schedule": "constant", "weight_decay": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters whose B is not zero, and records of each objective."""
    root = tmp_path_factory.mktemp("reference")
    write_adapter(TINY, LORA, root / "sft", seed=1, trust_remote_code=False)
    write_adapter(TINY, LORA | {"r": 3, "target_modules": ["v_proj"]}, root / "other", seed=2, trust_remote_code=False)
    for kind, columns in RECORDS.items():
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        (root / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [
        {"input_ids": ids.tolist(), "is_trained": [0] * PROMPT + [1] * (len(ids) - PROMPT), "advantage": advantage}
        for ids, advantage in zip(ROLLOUTS, ADVANTAGES, strict=True)
    ]
    (root / "policy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, row in enumerate(rows):
        row |= {"reward": row.pop("advantage"), "group": number // 2}
    (root / "grpo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def run_of(folder: Path, name: str, objective: dict[str, Any], **changes: Any) -> Path:
    """The run file of an objective that goes on from the adapter `sft`."""
    data = {"train": str(folder / f"{objective['kind']}.jsonl")}
    train = TRAIN | {"objective": objective, "save_every": 2} | changes.pop("train", {})
    groups = {"lora": None, "adapter": str(folder / "sft")} | changes
    return write_run_file(folder / f"{name}.yaml", data=data, train=train, **groups)


def _sft(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    return PeftModel.from_pretrained(model, str(folder / "sft"), is_trainable=True).double()


def _policy_by_trl(folder: Path, out: Path, changed: dict[str, Any]) -> list[dict[str, float]]:
    """Its loss and its reference, on rollouts that are given."""
    import trl
    from trl.trainer.utils import use_adapter

    options: dict[str, Any] = {"beta": 0.2, "loss_type": "bnpo", "use_bias_correction_kl": False, "epsilon": 0.2}
    options |= changed
    config = trl.GRPOConfig(str(out), use_cpu=True, bf16=False, report_to=[], activation_checkpointing=False, **options)
    data, tokenizer = Dataset.from_dict({"prompt": TEXTS}), AutoTokenizer.from_pretrained(TINY)
    trainer: Any = trl.GRPOTrainer(
        _sft(folder), reward_funcs=lambda **_: [], args=config, train_dataset=data, processing_class=tokenizer
    )
    trainer.current_gradient_accumulation_steps = 1
    model, completion = trainer.model, ROLLOUTS[:, PROMPT:]
    whole = torch.ones_like(ROLLOUTS)
    with torch.no_grad(), use_adapter(model, "ref"):
        reference = trainer._get_per_token_logps_and_entropies(model, ROLLOUTS, whole, completion.shape[1])[0]
    inputs = {
        "prompt_ids": ROLLOUTS[:, :PROMPT],
        "prompt_mask": whole[:, :PROMPT],
        "completion_ids": completion,
        "completion_mask": whole[:, PROMPT:],
        "advantages": torch.tensor(ADVANTAGES),
        "ref_per_token_logps": reference,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=TRAIN["lr"], weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        loss = trainer._compute_loss(model, inputs)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append({"loss": float(loss.detach())})
    return losses


def _by_trl(kind: str, folder: Path, out: Path, changed: dict[str, Any]) -> list[dict[str, float]]:
    import trl

    if kind == "policy":
        return _policy_by_trl(folder, out, changed)
    options: dict[str, Any] = {
        "per_device_train_batch_size": NUMBER,
        "max_steps": STEPS,
        "learning_rate": TRAIN["lr"],
        "beta": 0.2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
    }
    options |= changed
    made = {"dpo": (trl.DPOTrainer, trl.DPOConfig), "kto": (trl.KTOTrainer, trl.KTOConfig)}
    trainer, config = made[kind]
    tokenizer, data = AutoTokenizer.from_pretrained(TINY), Dataset.from_dict(RECORDS[kind])
    made_trainer: Any = trainer(
        model=_sft(folder), args=config(str(out), **options), train_dataset=data, processing_class=tokenizer
    )
    made_trainer.train()
    return [line for line in made_trainer.state.log_history if "loss" in line]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "options", "of_trl"),
    [
        ("dpo", {"beta": 0.2}, {}),
        ("dpo", {"beta": 0.2, "loss": "ipo"}, {"loss_type": ["ipo"]}),
        (
            "dpo",
            {"beta": 0.2, "loss": ["apo_zero", "hinge"], "loss_weights": [0.8, 0.3], "length_weight": 0.4},
            {"loss_type": ["apo_zero", "hinge"], "loss_weights": [0.8, 0.3], "ld_alpha": 0.4},
        ),
        ("kto", {"beta": 0.2}, {}),
        ("policy", {"kl_coef": 0.2}, {}),
        ("policy", {"kl_coef": 0.2, "kl_correction": True}, {"use_bias_correction_kl": True}),
    ],
)
def test_run_from_an_adapter_has_the_numbers_of_trl(
    kind: str, options: dict[str, Any], of_trl: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """In float64: what is left is what TRL itself computes in float32, not what two orders of sums differ by."""
    with lift(True):
        expected = [line["loss"] for line in _by_trl(kind, folder, tmp_path, of_trl)]
    name = "-".join(["trl", kind, *of_trl])
    file = run_of(folder, name, {"kind": kind, **options}, model={"dtype": "float64"})
    assert main(["train", str(file), "--no-preflight"]) == 0
    lines = [line for line in metrics_of(folder / name) if "loss" in line]
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-6)
    assert abs(expected[-1] - expected[0]) > 1e-3, "nothing was learnt"
    if kind == "dpo":
        assert lines[0]["margin"] == 0
        # Of answers that have gained nothing: log 2, (1 / 2 beta)^2, and 0.8 + 0.3.
        first = {"loss_type": 6.25, "loss_type-loss_weights-ld_alpha": 1.1}.get("-".join(of_trl), 0.69314718)
        assert lines[0]["loss"] == pytest.approx(first, rel=1e-7)
    else:
        assert lines[0]["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("reference", ["start", "other"])
def test_reference_stays_what_it_was_on_a_mesh_and_when_the_run_is_resumed(
    reference: str, folder: Path, pools: Callable[[int], Pool]
) -> None:
    policy = reference if reference == "start" else str(folder / reference)
    name, objective = f"mesh-{reference}", {"kind": "dpo", "beta": 0.2, "reference": policy}
    groups: dict[str, Any] = {"model": {"dtype": "float64"}, "topology": "tp=2,sp"}
    file = run_of(folder, name, objective, train={"save_every": 2}, **groups)
    pools(2).run(run_and_keep_groups, file, 2)
    losses = train_alone(file, initial=folder / "sft", out=folder / f"alone-{reference}")
    assert largest_loss_gap(read_losses(folder / name / "metrics.jsonl"), losses) < 1e-11
    assert compare_adapters(folder / name / "adapter", folder / f"alone-{reference}").relative < 1e-6
    before = (folder / name / "adapter" / "adapter_model.safetensors").read_bytes()
    (folder / name / "adapter").rename(folder / f"first-{reference}")
    pools(2).run(run_and_keep_groups, file, 2, "auto")
    assert (folder / name / "adapter" / "adapter_model.safetensors").read_bytes() == before


@pytest.mark.long
def test_another_reference_is_another_run(folder: Path) -> None:
    write_adapter(TINY, LORA, folder / "mine", seed=4, trust_remote_code=False)
    objective = {"kind": "dpo", "beta": 0.2, "reference": str(folder / "mine")}
    file = run_of(folder, "resumed", objective, train={"steps": 2, "save_every": 1})
    assert main(["train", str(file), "--no-preflight"]) == 0
    for name in ("mine", "resumed/adapter"):
        shutil.rmtree(folder / name)
    write_adapter(TINY, LORA, folder / "mine", seed=5, trust_remote_code=False)
    again = [sys.executable, "-m", "meshlora", "train", str(file), "--no-preflight", "--resume", "auto"]
    ended = subprocess.run(again, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "it is of a run with other reference" in ended.stderr


@pytest.mark.parametrize("kind", ["dpo", "kto", "policy", "grpo"])
def test_evaluate_compares_with_the_same_policy(kind: str, folder: Path, tmp_path: Path) -> None:
    """The adapter is its own reference: dpo and kto gain nothing, and a divergence from itself is none."""
    found = {}
    of_divergence = {"kl_coef": 0.3} if kind in ("policy", "grpo") else {"beta": 0.2}
    cases: dict[str, dict[str, Any]] = {
        reference: of_divergence | {"reference": reference} for reference in ("start", "base", str(folder / "other"))
    }
    if kind in ("policy", "grpo"):
        cases["none"] = {}
    for name, options in cases.items():
        objective = {"kind": kind, **options}
        file = run_of(folder, f"evaluated-{kind}-{len(found)}", objective, model={"dtype": "float64"})
        words = ["--adapter", str(folder / "sft"), "--data", str(folder / f"{kind}.jsonl")]
        words += ["--json", str(tmp_path / "found.json")]
        assert main(["evaluate", str(file), *words]) == 0
        found[name] = json.loads((tmp_path / "found.json").read_text())["loss"]
    own = found.pop("start")
    expected = {"dpo": 0.6931471805599453, "kto": 0.5}.get(kind) or found.pop("none")
    assert own == pytest.approx(expected, rel=1e-12)
    assert all(abs(loss - own) > 1e-4 for loss in found.values())
    assert len({*found.values()}) == 2


def test_introduction_names_the_reference(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for name, adapter in {"goes-on": {}, "fresh": {"lora": LORA, "adapter": None}}.items():
        file = run_of(folder, name, {"kind": "dpo"}, train={"steps": 1}, **adapter)
        assert main(["train", str(file), "--no-preflight"]) == 0
        said[name] = capsys.readouterr().out
    assert f"reference: the adapter in {folder / 'sft'}, from which the run starts" in said["goes-on"]
    assert "reference: the base, without an adapter" in said["fresh"]


def test_mistake_is_one_message(folder: Path) -> None:
    with pytest.raises(UserError, match="no effect without kl_coef"):
        Policy(reference="base")
    with pytest.raises(UserError, match="must name a policy"):
        Dpo(reference="")
    with pytest.raises(UserError, match=r"train\.objective\.reference=.*no such folder"):
        prepare_run(read_run(run_of(folder, "lost", {"kind": "dpo", "reference": str(folder / "nowhere")})))
    changed = run_of(folder, "pissa", {"kind": "dpo", "reference": str(folder / "other")})
    config = folder / "other" / "adapter_config.json"
    before = config.read_text()
    try:
        config.write_text(json.dumps(json.loads(before) | {"init_lora_weights": "pissa"}))
        with pytest.raises(UnsupportedError, match="needs the frozen base"):
            prepare_run(read_run(changed))
    finally:
        config.write_text(before)


def test_several_adapters_are_compared_with_the_base(folder: Path) -> None:
    file = run_of(folder, "several", {"kind": "dpo"})
    tree = yaml.safe_load(file.read_text())
    tree["adapters"] = {"one": {"adapter": tree.pop("adapter")}, "two": {"lora": LORA}}
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(UnsupportedError, match=r"adapter one: reference: .*several adapters"):
        prepare_runs(read_runs(file))
