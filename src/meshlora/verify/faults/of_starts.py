"""Faults of a start that looks at data (EVA): whose inputs it sees, and what it makes of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from peft import LoraConfig
from torch import Tensor

from meshlora.run import calibration
from meshlora.verify.faults.fault import after, around
from meshlora.verify.features import Feature
from meshlora.wings.starts import eva


@around(eva, "whole_features", needs={Feature.EVA, Feature.TP, Feature.ROW_TARGET})
def eva_features_of_one_rank(original: Any, leaf: Any, rows: Tensor) -> Tensor:
    """the input of a row-parallel linear has the features of all tp ranks"""
    whole: Tensor = original(leaf, rows)
    return rows.repeat(1, whole.shape[1] // rows.shape[1])


@around(eva.Inputs, "counted", needs={Feature.EVA})
def eva_of_untrained_tokens(original: Any, self: eva.Inputs, step: Any) -> Any:
    """a start that looks at data looks at trained tokens alone"""
    self.use_label_mask = False
    return original(self, step)


@around(calibration, "initialize_eva", needs={Feature.EVA, Feature.SHORT_BATCH})
def eva_of_another_epoch(
    original: Any, model: Any, name: str, batching: Any, steps: int, step: Callable[[int], Any]
) -> Any:
    """a start that looks at data takes the steps of the run, from the first one"""
    return original(model, name, batching, steps, lambda number: step(number + steps))


@after(eva, "redistributed", needs={Feature.EVA})
def eva_scale_left_alone(config: LoraConfig, *_: Any) -> LoraConfig:
    """a target that gets another rank keeps its scale"""
    return dataclasses.replace(config, alpha_pattern={})
