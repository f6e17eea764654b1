"""Mistakes with `MeshTrainer` that would make another adapter than one process are refused by all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainerCallback

import meshlora
from meshlora.adapter.attach import active_factors
from meshlora_extra.hf.rows import fingerprint_of
from meshlora_ground.errors import MeshloraError
from tests.extra.test_hf_trainer import BASE, _arguments, _entropies, _rows
from tests.pool import Pool

LORA = LoraConfig(r=2, target_modules="all-linear")


def _said(model: Any, out: Path, arguments: dict[str, Any] | None = None, kind: type = Trainer, **options: Any) -> str:
    """What MeshTrainer says of a mistake, after which the adapter is as it was."""
    from meshlora_extra.hf import on_mesh

    start = [factor.parameter.detach().clone() for factor in active_factors(model)]
    more = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no", **(arguments or {})}
    collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(BASE))
    given = {"train_dataset": _rows(8, 0), "data_collator": collator, **options}
    with pytest.raises(MeshloraError) as caught:
        on_mesh(kind)(model=model, args=_arguments(out, batch=2, **more), **given).train()
    for factor, before in zip(active_factors(model), start, strict=True):
        assert torch.equal(factor.parameter, before), factor.name
    model.zero_grad()
    return str(caught.value)


def _mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return _entropies(outputs, labels, "mean")


def _nearly_summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A sum, with a mean of the rank's own rows that a rule by the signature, or by doubled tokens, would let pass."""
    return (_entropies(outputs, labels, "sum") + 10 * outputs.logits.square().mean()) / num_items_in_batch


def _mistaken_losses(out: Path) -> list[str]:
    model = meshlora.load(BASE, lora=LORA, topology="dp=2", dtype="float32")
    return [_said(model, out, compute_loss_func=loss) for loss in (_mean, _nearly_summed)]


@pytest.mark.long
def test_a_loss_function_that_is_a_mean_is_refused_on_dp(pools: Callable[[int], Pool], tmp_path: Path) -> None:
    """Loss and gradient would be those of one process times dp, or of unequal shares."""
    for said in pools(2).run(_mistaken_losses, tmp_path):
        for words in said:
            assert words.startswith("a compute_loss_func that is a mean and dp=2: each rank has a share"), said


def _nan(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return outputs.logits.sum() * float("nan")


class _OtherRate(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if torch.distributed.get_rank() == 1:
            given["optimizer"].param_groups[0]["lr"] = 1.0


class _OtherName(Trainer):
    """A loss of a batch whose labels have another name, so that Trainer cannot count them."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(
            **{name: value for name, value in inputs.items() if name != "targets"}, labels=inputs["targets"]
        ).loss


class _Renaming(DataCollatorForSeq2Seq):
    def __call__(self, *given: Any, **options: Any) -> Any:
        batch = dict(super().__call__(*given, **options))
        batch["targets"] = batch.pop("labels")
        return batch


def _mistakes(topology: str, out: Path) -> dict[str, str]:
    model = meshlora.load(BASE, lora=LORA, topology=topology, dtype="float32")
    rank, rows = model.meshlora.mesh.rank, _rows(8, 0)
    other = [dict(row) for row in rows]
    other[3] = {**rows[3], "input_ids": [4, *rows[3]["input_ids"][1:]]}
    masked = [{**row, "labels": [-100] * len(row["labels"])} for row in rows]
    batches = {"max_steps": 4, "gradient_accumulation_steps": 1}
    return {
        "seed": _said(model, out, {"seed": 7 + rank}),
        "steps": _said(model, out, {"max_steps": 1 + rank}),
        "length": _said(model, out, train_dataset=rows[rank:]),
        "data": _said(model, out, {"gradient_accumulation_steps": 4}, train_dataset=other if rank else rows),
        "masked": _said(model, out, batches, train_dataset=masked),
        "rate": _said(model, out, callbacks=[_OtherRate()]),
        "no labels": _said(model, out, None, _OtherName, data_collator=_Renaming(AutoTokenizer.from_pretrained(BASE))),
        "nan": _said(model, out, compute_loss_func=_nan),
        "nan, not clipped": _said(model, out, {"max_grad_norm": 0.0}, compute_loss_func=_nan),
    }


@pytest.mark.long
def test_ranks_with_other_data_and_losses_that_are_no_number_train_nothing(
    pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    for said in pools(2).run(_mistakes, "dp=2", tmp_path):
        for name, words in {
            "seed": "seed of rank 1 is not that of rank 0: all ranks make one adapter together",
            "steps": "max_steps of rank 1 is not that of rank 0",
            "length": "len(train_dataset) of rank 1 is not that of rank 0",
            "data": "rows of rank 1 that are not those of rank 0: each rank trains its share",
            "masked": "no rank has a trained token in this step",
            "rate": "learning rates that differ: ",
            "no labels": "a batch without labels and dp=2: num_items_in_batch, by which its loss is divided",
            "nan": "the gradient norm of step 1 is nan: the adapter is left as it was",
            "nan, not clipped": "the gradient norm of step 1 is nan",
        }.items():
            assert said[name].startswith(words), said


def test_a_fingerprint_tells_numbers_texts_and_their_places_apart() -> None:
    like = {"input_ids": [1, 2], "text": "a", "weight": 0.5, "pixels": torch.ones(2, 2, dtype=torch.bfloat16)}
    others: list[Any] = [
        like | {"input_ids": [2, 1]},
        like | {"input_ids": [[1], [2]]},
        like | {"text": "b"},
        like | {"weight": 0.25},
        like | {"pixels": torch.ones(2, 2)},
        like | {"pixels": np.ones((2, 2))},
        [],
        {},
        None,
    ]
    assert fingerprint_of(like) == fingerprint_of(dict(like))
    assert len({fingerprint_of(value) for value in [like, *others]}) == len(others)  # no rows are [] and {}
    assert fingerprint_of(object()) == fingerprint_of(object())
