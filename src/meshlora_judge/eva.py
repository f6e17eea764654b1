"""EVA on one process: the start that PEFT gives an adapter on the batches of a run.

Owns: the batches, and what of a start the signs of its vectors do not change. The algorithm is PEFT's own,
`initialize_lora_eva_weights`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, initialize_lora_eva_weights
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from meshlora_ground.float64 import lift
from meshlora_judge.batches import UNTRAINED, order_of_step
from meshlora_judge.case import Case
from meshlora_judge.experts import PREFIX


def eva_start(case: Case, base: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(target -> A `[rank, in]`, target -> scale) of the adapter `case.eva` on `base`, a model without adapters."""
    assert case.eva is not None
    # A second one: the forward is lifted, and PEFT's hooks decompose in float32.
    plain = copy.deepcopy(base).eval().requires_grad_(False)
    adapted = get_peft_model(base, LoraConfig(**case.eva), low_cpu_mem_usage=True)
    layers = _layers(adapted)

    def forward(_: nn.Module, batch: dict[str, Tensor]) -> None:
        inputs = dict[str, Tensor]()
        handles = [plain.get_submodule(name).register_forward_pre_hook(_keep(inputs, name)) for name in layers]
        with lift(next(plain.parameters()).dtype == torch.float64):
            plain(batch["input_ids"], attention_mask=batch["attention_mask"])
        for handle in handles:
            handle.remove()
        for name, layer in layers.items():
            layer(inputs[name])

    initialize_lora_eva_weights(adapted, list(_batches(case)), forward_fn=forward, show_progress_bar=False)
    found, scales = {}, {}
    for name, layer in _layers(adapted).items():
        found[name], scales[name] = layer.lora_A["default"].weight.detach().clone(), float(layer.scaling["default"])
    return found, scales


def invariant(a: Tensor) -> Tensor:
    """`A.T @ A`: the same for vectors of other signs, or turned among those of one singular value."""
    return a.double().T @ a.double()


def _layers(model: nn.Module) -> dict[str, Any]:
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            found[name.removeprefix(PREFIX)] = module
    return found


def _keep(inputs: dict[str, Tensor], name: str) -> Any:
    def keep(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs[name] = given[0]

    return keep


def _batches(case: Case) -> Iterator[dict[str, Tensor]]:
    """The steps of the first epoch, each one batch; labels as models take them."""
    for step in range(-(-case.data.num_examples // case.batch_size)):
        rows = [case.data[index] for index in order_of_step(case.data, case, step)]
        shape = (len(rows), max(len(row.input_ids) for row in rows))
        ids, mask = torch.full(shape, case.pad_token_id), torch.zeros(shape).long()
        labels = torch.full(shape, UNTRAINED)
        for number, row in enumerate(rows):
            for place, token in enumerate(row.input_ids.tolist()):
                ids[number, place], mask[number, place] = token, 1
                if row.is_trained[place]:
                    labels[number, place] = token
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        yield {name: value.to(case.device) for name, value in batch.items()}
