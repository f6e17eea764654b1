"""Recipes of other trainers, trained by them and, imported, by meshlora: the same loss at every step.

    python scripts/import_against_peers.py trl
    python scripts/import_against_peers.py llamafactory axolotl --python /path/to/their/environment/bin/python

Each trains the same 64 conversations in the same order, from the same adapter, on one process, in float32, on CPUs. The
recipe says the rest, with its trainer's own defaults, and `meshlora import` makes our run file of it. TRL is that of
this environment; the others need their own, whose Python is named (tried: llamafactory 0.9.5; axolotl 0.19.0, without
its packages for GPUs).

Exits 1 where a loss differs by more than a hundred-thousandth of itself, or by more than the digits that a peer prints.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
# No text behind the end of an answer: LLaMA-Factory trains it, nobody else does.
TEMPLATE = """{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '### assistant\\n' -}}{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}
{{- '### ' + message['role'] + '\\n' + message['content'] + '\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### assistant\\n' -}}{%- endif -%}
"""
STEPS = 20
_RELATIVE = 1e-5

LLAMA_FACTORY = {
    "model_name_or_path": "base",
    "adapter_name_or_path": "start",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_target": "all",
    "dataset_dir": ".",
    "dataset": "docs",
    "disable_shuffling": True,
    "cutoff_len": 256,
    "output_dir": "theirs",
    "overwrite_output_dir": True,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "max_steps": STEPS,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "logging_steps": 1,
    "report_to": "none",
}
AXOLOTL = {
    "base_model": "base",
    "lora_model_dir": "start",
    "datasets": [{"path": "chat.jsonl", "type": "chat_template", "ds_type": "json"}],
    "chat_template": "tokenizer_default",
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_linear": True,
    "sequence_len": 256,
    "shuffle_merged_datasets": False,
    "curriculum_sampling": True,
    # Of several micro-batches axolotl 0.19.0 takes the mean of their means: 4.254 in the first step, for 4.251.
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_epochs": 3,
    "optimizer": "adamw_torch",
    "lr_scheduler": "cosine",
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "weight_decay": 0.0,
    "bf16": False,
    "tf32": False,
    "logging_steps": 1,
    "output_dir": "theirs",
    "dataset_prepared_path": "prepared",
    # Its own kernels are for GPUs alone.
    "lora_mlp_kernel": False,
    "lora_qkv_kernel": False,
    "lora_o_kernel": False,
}
TRL = {
    "model_name_or_path": "base",
    "dataset_name": "chat.jsonl",
    "use_peft": True,
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_target_modules": "all-linear",
    "max_length": 256,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "max_steps": STEPS,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "logging_steps": 1,
    "bf16": False,
    "output_dir": "theirs",
    "report_to": "none",
}
# TRL's command draws its adapter: this takes the keys of the recipe, and the adapter that all begin with.
_TRL_LOOP = """
import sys, yaml
from datasets import load_dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
given = yaml.safe_load(open("recipe.yaml"))
ours = ("model_name_or_path", "dataset_name", "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
options = {key: value for key, value in given.items() if key not in ours}
options |= {"train_sampling_strategy": "sequential", "save_strategy": "no", "use_cpu": True}
base = AutoModelForCausalLM.from_pretrained("base", dtype="float32")
model = PeftModel.from_pretrained(base, "start", is_trainable=True)
rows = load_dataset("json", data_files="chat.jsonl", split="train", cache_dir="cached")
tokenizer = AutoTokenizer.from_pretrained("base")
SFTTrainer(model, SFTConfig(**options), train_dataset=rows, processing_class=tokenizer).train()
"""
_START = """
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
model.save_pretrained("base")
config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
get_peft_model(model, config).save_pretrained("start")
"""


def make_inputs(folder: Path) -> None:
    """A base in float32, its template, the conversations, and the adapter that all trainers begin with."""
    source = REPOSITORY / "examples" / "tiny_base"
    run([sys.executable, "-c", _START, str(source)], folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "base" / name).write_bytes((source / name).read_bytes())
    (folder / "base" / "chat_template.jinja").write_text(TEMPLATE)
    lines = (REPOSITORY / "examples" / "docstrings" / "train.jsonl").read_text().splitlines()[:64]
    conversations = []
    for line in lines:
        row = json.loads(line)
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        conversations.append(json.dumps({"messages": turns}))
    (folder / "chat.jsonl").write_text("\n".join(conversations) + "\n")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    named = {"file_name": "chat.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"docs": named}))


def run(command: list[str], folder: Path) -> str:
    """What `command` printed, in `folder`, without a GPU or a network; its end is shown if it fails."""
    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def losses_printed(text: str) -> list[str]:
    """The losses that a Trainer printed, one a step, with the digits that it printed."""
    rows = [ast.literal_eval(found) for found in re.findall(r"\{'loss': [^}]*\}", text)]
    return [str(row["loss"]) for row in rows]


def of_trl(folder: Path, python: str) -> list[str]:
    """TRL's own trainer."""
    return losses_printed(run([python, "-c", _TRL_LOOP], folder))


def of_llama_factory(folder: Path, python: str) -> list[str]:
    """LLaMA-Factory's own command."""
    run([str(Path(python).with_name("llamafactory-cli")), "train", "recipe.yaml"], folder)
    rows = [json.loads(line) for line in (folder / "theirs" / "trainer_log.jsonl").read_text().splitlines()]
    return [str(row["loss"]) for row in rows if "loss" in row]


def of_axolotl(folder: Path, python: str) -> list[str]:
    """Axolotl's own command."""
    return losses_printed(run([python, "-m", "axolotl.cli.train", "recipe.yaml"], folder))


PEERS: dict[str, tuple[dict[str, object], Callable[[Path, str], list[str]]]] = {
    "trl": (TRL, of_trl),
    "llamafactory": (LLAMA_FACTORY, of_llama_factory),
    "axolotl": (AXOLOTL, of_axolotl),
}


def of_ours(folder: Path) -> list[float]:
    """The losses of the recipe as `meshlora import` understands it."""
    command = [sys.executable, "-m", "meshlora"]
    run([*command, "import", "recipe.yaml", "--out", "run.yaml"], folder)
    given = yaml.safe_load((folder / "run.yaml").read_text())
    given.pop("lora", None)
    given["adapter"] = "start"
    given["data"]["shuffle"] = False
    given["train"] |= {"output": "ours", "log_every": 1}
    (folder / "same.yaml").write_text(yaml.safe_dump(given))
    run([*command, "train", "same.yaml", "--no-preflight", "--set", "model.dtype=float32"], folder)
    rows = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def compare(peer: str, python: str) -> bool:
    """Print the two courses of the loss; whether they are the same."""
    recipe, train = PEERS[peer]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        theirs, ours = train(folder, python), of_ours(folder)
    worst, is_same = 0.0, len(theirs) == len(ours) > 0
    for printed, loss in zip(theirs, ours, strict=False):
        digits = len(printed.partition(".")[2])
        difference = abs(float(printed) - loss)
        worst = max(worst, difference / abs(loss))
        if difference > max(_RELATIVE * abs(loss), 0.5000001 * 10.0**-digits):
            is_same = False
    verdict = "the same" if is_same else "ANOTHER COURSE"
    print(f"{peer}: {len(theirs)} steps there, {len(ours)} here; largest difference {worst:.1e}: {verdict}")
    return is_same


def main() -> int:
    """Compare each peer that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", choices=sorted(PEERS))
    parser.add_argument("--python", default=sys.executable, help="that of the peer's environment")
    options = parser.parse_args()
    same = [compare(peer, options.python) for peer in options.peers]
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
