"""What is to be run, and on what: the model without weights, the batch, the machines.

Owns: `Problem`, reading a configuration, what is refused whatever the topology. Does not own: topologies, predictions
(`planner.choose`).
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from meshlora.common.errors import UserError
from meshlora.layers.quantized import levels_of_int8
from meshlora.loading.blueprint import Blueprint, read_model_config
from meshlora.plan.derive import decoder_layers
from meshlora.planner.hardware import Hardware
from meshlora.planner.kinds import Shrunk, shrink
from meshlora.planner.trace import model_vocab

Recompute = str | int

_MOST, _MOST_GPUS = 10**8, 10**5


@dataclass(frozen=True)
class Problem:
    """What is to be run, and on what.

    Attributes:
        blueprint: of the base, on one GPU. shrunk: its model with one layer of each kind. seq: tokens of a sequence.
        global_batch: sequences of an optimizer step. micro_batch, recompute: where the user chose; else None.
    """

    blueprint: Blueprint
    lora: LoraConfig
    shrunk: Shrunk
    gpus: int
    gpu: Hardware
    seq: int
    global_batch: int
    micro_batch: int | None = None
    recompute: Recompute | None = None

    @property
    def small(self) -> Blueprint:
        """The blueprint of the shrunk model."""
        return dataclasses.replace(self.blueprint, model=self.shrunk.model)

    @property
    def model(self) -> Any:
        """On the meta device, whole."""
        return self.blueprint.model

    @property
    def dtype(self) -> torch.dtype:
        """Of the base."""
        return self.blueprint.dtype

    @property
    def quantization(self) -> str | None:
        """Of the base, one of `plan.quantization.KINDS`; None: it is not."""
        return self.blueprint.options.quantization

    @property
    def is_half(self) -> bool:
        """Whether products are of two bytes an element."""
        return self.dtype.itemsize == 2

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return int(self.model.get_input_embeddings().embedding_dim)

    @property
    def vocab(self) -> int:
        """Rows of the head."""
        return model_vocab(self.model)


def read_config(model: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a checkpoint's folder, or of a JSON file such as its config.json.

    Raises:
        UserError: as of `meshlora.loading.blueprint.read_model_config`.
    """
    path = Path(model)
    if not path.is_file():
        return read_model_config(model, trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder) / "config.json")
        return read_model_config(folder, trust_remote_code=trust_remote_code)


def pose(
    blueprint: Blueprint,
    lora: LoraConfig,
    *,
    gpus: int,
    gpu: Hardware,
    seq: int,
    global_batch: int,
    micro_batch: int | None = None,
    recompute: Recompute | None = None,
) -> Problem:
    """The problem, with all that every topology shares. blueprint: of the base, without dropout.

    Raises:
        UserError: a size below 1; sequences that are longer than the model's positions; layers that cannot be computed
            twice.
    """
    if gpus > _MOST_GPUS:
        raise UserError(f"--gpus {gpus}", f"plans are for at most {_MOST_GPUS:,}")
    for name, value in {"--gpus": gpus, "--seq": seq, "--global-batch": global_batch}.items():
        if not 1 <= value <= _MOST:
            raise UserError(f"{name} {value}", f"it must be at least 1 and at most {_MOST:,}")
    if micro_batch is not None and micro_batch < 1:
        raise UserError(f"--micro-batch {micro_batch}", "it must be at least 1")
    limit = getattr(blueprint.config.get_text_config(), "max_position_embeddings", None)
    if limit and seq > limit:
        raise UserError(f"--seq {seq}", f"the model has {limit} positions", f"use at most {limit}")
    if blueprint.options.quantization == "int8":
        levels_of_int8()
    if recompute not in (None, "none"):
        _check_recompute(blueprint.model, recompute)
    return Problem(blueprint, lora, shrink(blueprint.model), gpus, gpu, seq, global_batch, micro_batch, recompute)


def _check_recompute(model: Any, recompute: Recompute | None) -> None:
    layers = decoder_layers(model)[1]
    if recompute != "full" and not (isinstance(recompute, int) and 1 <= recompute <= len(layers)):
        raise UserError(f"--recompute {recompute}", f"it must be none, full or a number n from 1 to {len(layers)}")
    if not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        raise UserError(f"--recompute {recompute}", "the layers of this family cannot be computed twice", "use none")
