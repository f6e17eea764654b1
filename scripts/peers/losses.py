"""The losses of TRL's trainers on given batches, and those of a step of `meshlora train` on the same: one process.

Float64 both, from one adapter with both factors away from zero; the reference is the base. TRL's policy gradients are
asked for their loss on rollouts that are given; its other trainers train a step.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshlora.cli.main import main
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora_ground.float64 import lift

TINY = str(Path(__file__).resolve().parents[2] / "examples/tiny_base")
NUMBER, PROMPT, LENGTHS = 4, 5, (7, 4, 6, 2)
_TEXTS = [f"Return the {'sum of ' * (k % 3)}item {k * 7} of the list." for k in range(NUMBER)]
_ANSWERS = [f" Yes {k}" + " indeed" * k for k in range(NUMBER)]
_RECORDS: dict[str, dict[str, list[Any]]] = {
    "dpo": {"prompt": _TEXTS, "chosen": _ANSWERS, "rejected": [" no" * (k % 4 + 1) for k in range(NUMBER)]},
    "kto": {"prompt": _TEXTS, "completion": _ANSWERS, "label": [k % 3 != 1 for k in range(NUMBER)]},
    "sft": {"prompt": _TEXTS, "completion": _ANSWERS},
}
_LIMIT = 1e-6


@dataclass(frozen=True)
class Loss:
    """A loss of TRL's and ours. kind: of ours. trl: options of its configuration. ours: of `train.objective`.

    engine: whether the rollouts say what an engine's log-probabilities were. why: where the two differ on purpose.
    """

    kind: str
    trl: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    engine: bool = False
    why: str = ""


_RUN = {"beta": 0.3}
_KL: dict[str, Any] = {"beta": 0.04, "loss_type": "dapo"}
LOSSES: dict[str, Loss] = {
    "dapo": Loss("policy", {"loss_type": "dapo"}),
    "bnpo": Loss("policy", {"loss_type": "bnpo"}),
    "grpo": Loss("policy", {"loss_type": "grpo"}, {"mean_over": "sequence"}),
    "dr_grpo": Loss(
        "policy",
        {"loss_type": "dr_grpo", "max_completion_length": 9},
        {"mean_over": "constant", "max_completion_length": 9},
    ),
    "cispo": Loss(
        "policy", {"loss_type": "cispo", "epsilon_high": 1.3}, {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.3}
    ),
    "gspo": Loss(
        "policy",
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"mean_over": "sequence", "ratio": "sequence"},
    ),
    "clip higher": Loss("policy", {"loss_type": "dapo", "epsilon_high": 0.28}, {"clip_high": 0.28}),
    "kl": Loss("policy", _KL | {"use_bias_correction_kl": False}, {"kl_coef": 0.04}),
    "kl, TRL's default": Loss("policy", _KL, {"kl_coef": 0.04, "kl_correction": True}),
    "entropy": Loss("policy", {"loss_type": "dapo", "entropy_coef": 0.01}, {"entropy_coef": 0.01}),
    "token_truncate": Loss("policy", {"loss_type": "dapo"}, {"importance_cap": 2.0}, engine=True),
    "sapo": Loss("policy", {"loss_type": "sapo"}, {"loss": "sapo", "mean_over": "sequence"}),
    "luspo": Loss(
        "policy",
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"ratio": "sequence", "mean_over": "constant", "max_completion_length": 1},
    ),
    "vespo": Loss("policy", {"loss_type": "vespo"}, {"loss": "vespo"}),
    "dpo": Loss("dpo", _RUN, _RUN),
    "dpo label_smoothing": Loss(
        "dpo",
        _RUN | {"label_smoothing": 0.1},
        _RUN | {"label_smoothing": 0.1},
        why="TRL 1.16 ignores it for its default loss; ours is conservative DPO",
    ),
    "ipo": Loss("dpo", _RUN | {"loss_type": ["ipo"]}, _RUN | {"loss": "ipo"}),
    "hinge": Loss("dpo", _RUN | {"loss_type": ["hinge"]}, _RUN | {"loss": "hinge"}),
    "apo_zero": Loss("dpo", _RUN | {"loss_type": ["apo_zero"]}, _RUN | {"loss": "apo_zero"}),
    "aot": Loss("dpo", _RUN | {"loss_type": ["aot"]}, _RUN | {"loss": "aot"}),
    "aot_unpaired": Loss("dpo", _RUN | {"loss_type": ["aot_unpaired"]}, _RUN | {"loss": "aot_unpaired"}),
    "wpo": Loss("dpo", _RUN | {"use_weighting": True}, _RUN | {"weighted": True}),
    "sigmoid_norm": Loss("dpo", _RUN | {"loss_type": ["sigmoid_norm"]}, _RUN | {"loss": "sigmoid_norm"}),
    "robust": Loss(
        "dpo",
        _RUN | {"loss_type": ["robust"], "label_smoothing": 0.1},
        _RUN | {"loss": "robust", "label_smoothing": 0.1},
    ),
    "sigmoid + sft": Loss(
        "dpo",
        _RUN | {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        _RUN | {"loss": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        why="TRL's part of the chosen answers is a mean over their tokens, ours over the pairs",
    ),
    "kto": Loss("kto", _RUN | {"desirable_weight": 1.3}, _RUN | {"desirable_weight": 1.3}),
    "sft": Loss("sft"),
    "sft label_smoothing": Loss("sft", {"label_smoothing_factor": 0.1}, {"label_smoothing": 0.1}),
    "dft": Loss("sft", {"loss_type": "dft"}, {"loss": "dft"}),
}


def start(folder: Path) -> Path:
    """An adapter with both factors away from zero, made once."""
    if not folder.is_dir():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        get_peft_model(model, config).save_pretrained(str(folder))
    return folder


def theirs(loss: Loss, adapter: Path, out: Path) -> float:
    """TRL's; leaves our records of it in `out/records.jsonl`."""
    out.mkdir(parents=True, exist_ok=True)
    with lift(True), contextlib.redirect_stdout(io.StringIO()):
        if loss.kind == "policy":
            return _of_rollouts(loss, adapter, out)
        columns = _RECORDS[loss.kind]
        _write(out, [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
        return _of_a_step(loss, adapter, out)


def ours(loss: Loss, adapter: Path, out: Path) -> float:
    """That of the first step of `meshlora train` on `out/records.jsonl`.

    Raises:
        MeshloraError: it is refused.
    """
    tree: dict[str, Any] = {
        "model": {"path": TINY, "dtype": "float64"},
        "adapter": str(adapter),
        "data": {"train": str(out / "records.jsonl"), "max_length": 64, "cache_dir": str(out / "cache")},
        "train": {"output": str(out / "run"), "steps": 1, "batch_size": NUMBER, "lr": 1e-3},
    }
    tree["train"]["objective"] = {"kind": loss.kind, **loss.ours}
    if loss.kind in ("dpo", "kto") or loss.ours.get("kl_coef"):
        tree["train"]["objective"]["reference"] = "base"
    (out / "run.yaml").write_text(yaml.safe_dump(tree))
    with contextlib.redirect_stdout(io.StringIO()):
        prepare_run(read_run(out / "run.yaml"))  # which says what is refused
        code = main(["train", str(out / "run.yaml"), "--no-preflight"])
    if code:
        raise RuntimeError(f"the run ended with {code}")
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    return float(next(line["loss"] for line in lines if "loss" in line))


def verdict(loss: Loss, expected: float, found: float) -> tuple[str, str]:
    """(what it is, why)."""
    # A loss of pairs is a small difference of sums of some 50, which TRL's head makes in 32 bits.
    relative = abs(found - expected) / max(1.0, abs(expected))
    words = f"TRL {expected:.10f}, meshlora {found:.10f}, {relative:.0e} off"
    if relative < _LIMIT:
        return "equal", words
    return ("other, said" if loss.why else "WRONG"), f"{words}{'; ' if loss.why else ''}{loss.why}"


def _model(adapter: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    for value in model.parameters():  # and no buffer, which the lift computes anew
        value.data = value.data.double()
    return model


def _as_the_base(model: Any) -> None:
    """TRL's reference is the adapter as it is: its loss would know nothing of it. Without factors it is the base."""
    for name, value in model.named_parameters():
        if ".ref." in name:
            value.data.zero_()


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    (out / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _of_a_step(loss: Loss, adapter: Path, out: Path) -> float:
    import trl

    trainer, config = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "sft": (trl.SFTTrainer, trl.SFTConfig),
    }[loss.kind]
    arguments = config(
        str(out / "trl"),
        per_device_train_batch_size=NUMBER,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        gradient_checkpointing=False,
        **loss.trl,
    )
    made: Any = trainer(
        model=_model(adapter),
        args=arguments,
        train_dataset=Dataset.from_dict(_RECORDS[loss.kind]),
        processing_class=AutoTokenizer.from_pretrained(TINY),
    )
    _as_the_base(made.model)
    made.train()
    return float(next(line["loss"] for line in made.state.log_history if "loss" in line))


def _scored(model: Any, ids: Tensor, mask: Tensor, kept: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
    """Log-probabilities and entropies `[B, kept]` of whole logits, where TRL's own head is in 32 bits."""
    log_p = model(input_ids=ids, attention_mask=mask).logits[:, -kept - 1 : -1].log_softmax(-1)
    own = log_p.gather(-1, ids[:, -kept:].unsqueeze(-1)).squeeze(-1)
    return own, -(log_p.exp() * log_p).sum(-1), None


def _of_rollouts(loss: Loss, adapter: Path, out: Path) -> float:
    import trl
    from trl.trainer.utils import use_adapter

    options = {"use_cpu": True, "bf16": False, "report_to": [], "steps_per_generation": 1} | loss.trl
    config = trl.GRPOConfig(str(out / "trl"), **options)
    trainer: Any = trl.GRPOTrainer(
        _model(adapter),
        reward_funcs=lambda **_: [],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": _TEXTS}),
        processing_class=AutoTokenizer.from_pretrained(TINY),
    )
    trainer.current_gradient_accumulation_steps = 1
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 200, (NUMBER, PROMPT + max(LENGTHS)), generator=numbers)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    whole = torch.cat([torch.ones(NUMBER, PROMPT, dtype=torch.int64), mask], 1)

    trainer._get_per_token_logps_and_entropies = _scored

    def scored() -> Tensor:
        return _scored(trainer.model, ids, whole, max(LENGTHS))[0]

    with torch.no_grad():
        now = scored()
        reference = None
        if config.beta:
            _as_the_base(trainer.model)
            with use_adapter(trainer.model, "ref"):
                reference = scored()
    # In 32 bits, as records are stored.
    old = (now + 0.3 * torch.randn(now.shape, generator=numbers, dtype=torch.float64)).float().double()
    engine = (old + 0.8 * torch.randn(now.shape, generator=numbers, dtype=torch.float64)).float().double()
    advantages = torch.tensor([1.0, -0.5, 0.25, -1.5], dtype=torch.float64)
    inputs = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": whole[:, :PROMPT],
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    if reference is not None:
        inputs["ref_per_token_logps"] = reference
    if loss.engine:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        inputs["importance_sampling_ratio"] = (old - engine).exp().clamp(max=2.0)
    rows = []
    for row, length in enumerate(LENGTHS):
        record: dict[str, Any] = {
            "input_ids": ids[row, : PROMPT + length].tolist(),
            "advantage": advantages[row].item(),
        }
        record |= {"is_trained": [0] * PROMPT + [1] * length, "old_log_probs": old[row, :length].tolist()}
        if loss.engine:
            record["engine_log_probs"] = engine[row, :length].tolist()
        rows.append(record)
    _write(out, rows)
    return float(trainer._compute_loss(trainer.model, inputs).detach())
