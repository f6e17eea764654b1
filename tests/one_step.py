"""Commands of one step on the embedded base, for tests of what they do with devices: run files, and words of Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.run_files import TINY, write_run_file

LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
ON_TRAINER = f"""
import sys, meshlora
from meshlora_extra.hf import MeshTrainer
from peft import LoraConfig
from transformers import TrainingArguments

lora = LoraConfig(**{LORA})
model = meshlora.load({str(TINY)!r}, lora=lora, dtype="float32", device=sys.argv[1])
options = dict(max_steps=1, per_device_train_batch_size=1, save_strategy="no", report_to=[], disable_tqdm=True)
rows = [dict(input_ids=[3, 4, 5, 6], labels=[3, 4, 5, 6])] * 2
arguments = TrainingArguments(sys.argv[2], use_cpu=sys.argv[1] == "cpu", **options)
MeshTrainer(model=model, args=arguments, train_dataset=rows).train()
"""


def run_file(folder: Path, **groups: Any) -> str:
    """On one process, on whatever device there is."""
    rows = [{"prompt": f"def f_{number}(x):", "completion": " return x"} for number in range(4)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own: dict[str, Any] = {"topology": "dp=1", **groups}
    own["model"] = {"dtype": "float32"} | groups.get("model", {})
    own["train"] = {"steps": 1, "batch_size": 2, "micro_batch_size": 1} | groups.get("train", {})
    own["data"] = {"max_length": 32, "eval": str(folder / "train.jsonl")} | groups.get("data", {})
    return str(write_run_file(folder / "run.yaml", lora=LORA, **own))


def rl_file(folder: Path, **groups: Any) -> str:
    """The same for rollouts, whose prompts are conversations: their template is rendered in a fork."""
    file = run_file(
        folder,
        rl={"completions": 2, "max_new_tokens": 2, "rewards": [{"kind": "regex", "pattern": "e"}]},
        train={"objective": {"kind": "grpo"}},
        data={"chat_template": str(folder / "chat.jinja"), "eval": None},
        **groups,
    )
    (folder / "chat.jinja").write_text("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
    asked = {"messages": [{"role": "user", "content": "def f(x):"}]}
    (folder / "train.jsonl").write_text(f"{json.dumps(asked)}\n" * 2)
    return file


def adapter(folder: Path) -> str:
    """A folder with an adapter, as PEFT saves it."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), LoraConfig(**LORA, task_type="CAUSAL_LM"))
    model.save_pretrained(folder / "adapter")
    return str(folder / "adapter")


def on_trainer(folder: Path, device: str) -> list[str]:
    """The words of a script that trains with `MeshTrainer` on `device`."""
    (folder / "on_trainer.py").write_text(ON_TRAINER)
    return [str(folder / "on_trainer.py"), device, str(folder / "out")]


def meshlora(*words: str) -> list[str]:
    """The words of a command of ours."""
    return ["-P", "-m", "meshlora", *words]
