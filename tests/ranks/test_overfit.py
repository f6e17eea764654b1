"""Twenty steps on one sentence: the whole way from checkpoint to a generation that repeats it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoTokenizer

import meshlora
from meshlora.adapter.attach import active_factors
from meshlora.run.decoding import generate
from meshlora.train.losses import summed_cross_entropy
from tests.pool import Pool

BASE = Path(__file__).parents[2] / "examples" / "tiny_base"
SENTENCE = "def answer():\n    return 'forty-two, as any careful reader of the manual will know'"


def _overfit(out: Path) -> tuple[list[float], list[float]]:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    ids = torch.tensor([[*tokenizer(SENTENCE).input_ids, tokenizer.eos_token_id]] * 4)
    model = meshlora.load(
        BASE, lora=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"), topology="tp=2", dtype="float32"
    ).train()
    optimizer = torch.optim.Adam([f.parameter for f in active_factors(model)], lr=4e-3)
    losses, norms = [], []
    for _ in range(20):
        optimizer.zero_grad()
        loss = summed_cross_entropy(model(input_ids=ids).logits[:, :-1], ids[:, 1:])
        loss.backward()
        tokens = meshlora.finish_gradients(model, num_tokens=ids[:, 1:].numel())
        norms.append(meshlora.clip_gradients(model, 1.0))
        losses.append(float(loss.detach()) / tokens)
        optimizer.step()
    meshlora.save_adapter(model, out)
    return losses, norms


@pytest.mark.long
def test_twenty_steps_learn_one_sentence(tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    losses, norms = pools(2).run(_overfit, tmp_path / "adapter")[0]
    assert losses[-1] <= 0.1 * losses[0], losses
    assert norms[-1] <= 0.1 * norms[0], norms
    prompt, rest = SENTENCE[:13], SENTENCE[13:]
    assert next(generate(BASE, [prompt], adapter=tmp_path / "adapter", dtype="float32")) == rest
    assert next(generate(BASE, [prompt], dtype="float32")) != rest
