"""PEFT on two ranks: is its step that of one process? DDP, FSDP2 in both orders, tensor parallel."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from two_ranks import batches, make_base, run

import meshlora_judge


def _adapted(model, targets="all-linear"):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def _shard(model, layers):
    mesh = init_device_mesh("cpu", (2,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _train(model, folder, rows, total, scale):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    model.train()
    with meshlora_judge.record(model, folder):
        for batch in rows:
            (model(**batch, num_items_in_batch=total).loss * scale).backward()
        optimizer.step()


def _ddp(rank, base, folder):
    model = DistributedDataParallel(_adapted(AutoModelForCausalLM.from_pretrained(base)))
    _train(model, folder, *batches(rank), scale=2)  # DDP divides the sum over ranks by their number


def _fsdp2(rank, base, folder, is_sharded_first):
    model = AutoModelForCausalLM.from_pretrained(base)
    if is_sharded_first:
        _shard(model, model.model.layers)
    adapted = _adapted(model, ["q_proj", "v_proj"])
    if not is_sharded_first:
        _shard(adapted, model.model.layers)
    _train(adapted, folder, *batches(rank), scale=2)


def _tp(rank, base, folder):
    model = AutoModelForCausalLM.from_pretrained(base, tp_plan="auto")
    rows, _ = batches(0)  # both ranks have the same rows
    _train(_adapted(model, ["q_proj"]), folder, rows, sum(batch["labels"].numel() - 1 for batch in rows), scale=1)


@pytest.mark.judged
def test_ddp(judge_step, tmp_path):
    base = make_base(tmp_path / "base")
    run(_ddp, base, judge_step.folder)
    judge_step.verdict(judge_step.folder, base)


@pytest.mark.judged
def test_fsdp2_of_an_adapted_model(judge_step, tmp_path):
    base = make_base(tmp_path / "base")
    run(_fsdp2, base, judge_step.folder, False)
    judge_step.verdict(judge_step.folder, base)


@pytest.mark.judged
def test_fsdp2_before_the_adapter_is_wrong(judge_step, tmp_path):
    """Each rank trains an adapter of its own, silently: the order that PEFT does not refuse."""
    base = make_base(tmp_path / "base")
    run(_fsdp2, base, judge_step.folder, True)
    with pytest.raises(pytest.fail.Exception, match="refuted"):
        judge_step.verdict(judge_step.folder, base)


@pytest.mark.judged
def test_tensor_parallel(judge_step, tmp_path):
    base = make_base(tmp_path / "base")
    run(_tp, base, judge_step.folder)
    judge_step.verdict(judge_step.folder, base)
