"""transformers' `tp_plan` with PEFT on a row-parallel layer: the first forward raises.

PEFT makes A of the local width and then a DTensor of the whole one, and leaves `in_features` as it was; transformers
takes the input's shape from there.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import collated, rows, run, trained_of, with_adapter
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import meshlora_judge


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "base", tp_plan="auto")
    model = with_adapter(model, target_modules=["q_proj", "o_proj"])
    for name, module in model.named_modules():
        if is_repaired and name.endswith("lora_A.default") and isinstance(module.weight, DTensor):
            module.in_features = module.weight.shape[1]
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-3, foreach=False)
    model.train()
    with meshlora_judge.record(model, folder / "seen"):
        model(**collated(rows())).loss.backward()
        optimizer.step()


if __name__ == "__main__":
    run(patient)
