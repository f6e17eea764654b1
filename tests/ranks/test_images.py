"""A run with images, from file to adapter, is that of transformers + peft with the processor's own batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

import meshlora
from meshlora.reading.processor import load_processor
from meshlora.reading.sources import read_records
from meshlora_ground.float64 import lift
from tests.images import conversation, write_model, write_pictures, write_rows
from tests.pool import Pool
from tests.ranks.test_trainer import run_and_keep_groups
from tests.run_files import metrics_of, write_run_file

STEPS, RATE = 3, 5e-3
ROWS = (
    conversation("wide.png", "what is it?"),
    conversation("no image here", answer="I see"),
    conversation("small.jpg", "and", "tall.webp", answer="two of them"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL with its processor, pictures, and conversations of which one has no image."""
    root = tmp_path_factory.mktemp("images")
    write_model(root / "model", torch.float64)
    write_pictures(root)
    write_rows(root / "train.jsonl", *ROWS)
    return root


def run_file(folder: Path, name: str, topology: str) -> Path:
    return write_run_file(
        folder / f"{name}.yaml",
        model={"path": str(folder / "model"), "dtype": "float64"},
        lora={"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "vision": True, "init_lora_weights": False},
        data={"max_length": 128},
        train={"steps": STEPS, "batch_size": 3, "micro_batch_size": 1, "lr": RATE},
        topology=topology,
    )


def reference(folder: Path, adapter: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and adapter of transformers + peft on the batch of all records: every step has all of them."""
    base = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float64)
    model = PeftModel.from_pretrained(base, str(adapter), is_trainable=True).train()
    processor = load_processor(folder / "model", base.config)
    batch = processor.apply_chat_template(
        [list(record.messages or ()) for record in read_records(folder / "train.jsonl")],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"padding": True, "padding_side": "right"},
    )
    labels = batch["input_ids"].masked_fill(batch.pop("assistant_masks") == 0, -100)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with lift():
            logits = model(**batch).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = RATE * (STEPS - step) / STEPS
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, get_peft_model_state_dict(model, save_embedding_layers=False)


# On the second rank of dp there is no image in one step of three, and a dummy.
@pytest.mark.long
@pytest.mark.parametrize("topology", ["tp=2,sp", "dp=2"])
def test_run_with_images_is_that_of_transformers_and_peft(
    topology: str, folder: Path, pools: Callable[[int], Pool]
) -> None:
    pools(2).run(run_and_keep_groups, run_file(folder, topology, topology), 2)
    output = folder / topology
    losses, theirs = reference(folder, output / "initial")
    metrics = metrics_of(output)
    assert [m["loss"] for m in metrics if "grad_norm" in m] == pytest.approx(losses, rel=1e-11)
    ours = load_file(output / "adapter" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert any("visual" in name for name in ours)
    assert AutoImageProcessor.from_pretrained(output / "adapter").patch_size == 4  # from its folder alone
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].double(), value, rtol=1e-6, atol=1e-9)


def _asked(folder: Path, model: Any) -> tuple[list[list[int]], float]:
    """The continuation of two questions with images, and the loss of their tokens, by the model's own methods."""
    processor = load_processor(folder / "model", model.config)
    batch = processor.apply_chat_template(
        [list(record.messages or ())[:1] for record in read_records(folder / "train.jsonl")][::2],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
        processor_kwargs={"padding": True, "padding_side": "left"},
    )
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with lift(), torch.no_grad():
        found = model.generate(**batch, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
        loss = model(**batch, labels=labels).loss
    return found[:, labels.shape[1] :].tolist(), float(loss)


def _asked_of_stages(folder: Path) -> tuple[list[list[int]], float]:
    return _asked(folder, meshlora.load(folder / "model", topology="pp=2").eval())


@pytest.mark.long
def test_stages_say_of_images_what_one_process_says(folder: Path, pools: Callable[[int], Pool]) -> None:
    """The tower is of the first stage; each makes the positions of an image's tokens, of a cache's length later."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float64).eval()
    tokens, loss = _asked(folder, model)
    assert len({token for row in tokens for token in row}) > 2, "it says one thing: this shows nothing"
    for found in pools(2).run(_asked_of_stages, folder):
        assert found == (tokens, pytest.approx(loss, rel=1e-12))
