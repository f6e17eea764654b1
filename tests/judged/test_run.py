"""`meshlora judge run` as a stranger uses it: their command, unchanged, on a twin of their model."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from meshlora_judge.command import main

pytestmark = pytest.mark.long

HAND = """
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("base", device_map="auto", dtype=torch.float32)
model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"])).train()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
for step in range(100):
    torch.manual_seed(step)
    batches = [torch.randint(0, 300, (2, length)) for length in (5, 9)]
    for number, ids in enumerate(batches):
        if sys.argv[1] == "right":
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(2 * 4 + 2 * 8)).loss
        else:
            loss = model(input_ids=ids, labels=ids).loss / 2
        loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step(), optimizer.zero_grad()
model.save_pretrained("saved")
"""
TRAINER = """
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32, attn_implementation="flash_attention_2")
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
rows = [dict(zip(("input_ids", "labels"), [torch.arange(1, 4 + i % 7)] * 2)) for i in range(64)]
def collate(rows):
    pad = lambda name, value: torch.nn.utils.rnn.pad_sequence([r[name] for r in rows], True, value)
    ids = pad("input_ids", 0)
    return dict(input_ids=ids, attention_mask=(ids != 0).long(), labels=pad("labels", -100))
class Theirs(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        number = num_items_in_batch if sys.argv[1] == "right" else None
        return super().compute_loss(model, inputs, return_outputs, number)
arguments = TrainingArguments("saved", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=50,
    bf16=sys.argv[1] == "right", save_steps=1, push_to_hub=True, tf32=True)
Theirs(model, arguments, train_dataset=rows, data_collator=collate).train()
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two scripts and a base without weights."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    LlamaConfig(vocab_size=300, num_key_value_heads=8, **sizes).save_pretrained(tmp_path / "base")
    (tmp_path / "hand.py").write_text(HAND)
    (tmp_path / "trainer.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(*command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    """(exit code, verdict, what was printed)"""
    code = main(["run", "--json", "verdict.json", "--junit", "verdict.xml", "--", *command])
    said = capsys.readouterr()
    return code, json.loads(Path("verdict.json").read_text()), said.out + said.err


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("launcher", "script"), [([sys.executable], "hand.py"), (TORCHRUN, "trainer.py")], ids=["loop", "trainer"]
)
def test_a_right_command_is_proved_and_a_wrong_one_refuted_by_name(
    launcher: list[str], script: str, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, verdict, said = _run(*launcher, script, "right", capsys=capsys)
    assert code == 0, said
    assert verdict["proved"]
    assert "2 of 16 layers, 64 of 2048 features" in said
    assert not (stranger / "saved" / "checkpoint-1").exists()
    code, verdict, said = _run(*launcher, script, "wrong", capsys=capsys)
    assert code == 1, said
    assert {found["cause"] for found in verdict["findings"]} == {"mean of means"}
    assert "<failure" in (stranger / "verdict.xml").read_text()


def test_a_command_that_breaks_says_its_own_error(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(stranger / "base")
    assert main(["run", "--keep", "kept", "--", sys.executable, "hand.py", "right"]) == 2
    assert "it failed with exit code 1: OSError" in capsys.readouterr().err
    assert "Traceback" in (stranger / "kept" / "output.txt").read_text()
