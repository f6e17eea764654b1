"""accelerate's DDP on two ranks, with accumulation and clipping: is its step that of one process?"""

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from two_ranks import batches, make_base, run

import meshlora_judge


def _ddp(rank, base, folder, loss_of):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(1)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows, total = batches(rank)
    model.train()
    with meshlora_judge.record(model, folder, steps=2):
        for batch in rows * 2:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch, total))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()


def _over_all_tokens(model, batch, total):
    # Undoes DDP's mean over two ranks and accelerate's over two micro-batches.
    return model(**batch, num_items_in_batch=total).loss * 4


def _mean_of_means(model, batch, total):
    return model(**batch).loss


@pytest.mark.judged
def test_ddp(judge_step, tmp_path):
    base = make_base(tmp_path / "base")
    run(_ddp, base, judge_step.folder, _over_all_tokens)
    judge_step.verdict(judge_step.folder, base)


@pytest.mark.judged
def test_a_mean_of_means_is_not_the_mean(judge_step, tmp_path):
    base = make_base(tmp_path / "base")
    run(_ddp, base, judge_step.folder, _mean_of_means)
    with pytest.raises(pytest.fail.Exception, match="mean of the micro-batches' means"):
        judge_step.verdict(judge_step.folder, base)
