"""The input of the planner: the model without weights, the batch, the machines.

Owns: also what is refused on any topology. Does not own: topologies, predictions (`meshlora_extra.planner.choose`).
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from meshlora.loading.blueprint import Blueprint, read_model_config
from meshlora.loading.positions import most_positions
from meshlora.plan.derive import decoder_layers
from meshlora.run.config.run_file import RunConfig
from meshlora.run.optimizers import check_trainable
from meshlora.wings.quantized.kinds import OF_LIBRARY
from meshlora.wings.quantized.quantized import levels_of_int8
from meshlora_extra.planner.hardware import Hardware
from meshlora_extra.planner.kinds import Shrunk, shrink
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology

Recompute = str | int

_MOST, _MOST_GPUS = 10**8, 10**5


@dataclass(frozen=True)
class Problem:
    """The input that all topologies share.

    Attributes:
        blueprint: of the base, on one GPU, without dropout. seq: tokens per sequence.
        global_batch: sequences per optimizer step. micro_batch, recompute: the user's choice, or None. optimizer,
            min_8bit_size: as in a run file.

    Raises:
        UserError: a size out of range; sequences longer than the model's positions; layers that cannot be recomputed.
        UnsupportedError: adapters on some of the layers.
    """

    blueprint: Blueprint
    lora: LoraConfig
    _: KW_ONLY
    gpus: int
    gpu: Hardware
    seq: int
    global_batch: int
    micro_batch: int | None = None
    recompute: Recompute | None = None
    optimizer: str = "adamw"
    min_8bit_size: int = 4096

    def __post_init__(self) -> None:
        if self.gpus > _MOST_GPUS:
            raise UserError(f"--gpus {self.gpus}", f"plans are for at most {_MOST_GPUS:,}")
        for name, value in {"--gpus": self.gpus, "--seq": self.seq, "--global-batch": self.global_batch}.items():
            if not 1 <= value <= _MOST:
                raise UserError(f"{name} {value}", f"it must be at least 1 and at most {_MOST:,}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise UserError(f"--micro-batch {self.micro_batch}", "it must be at least 1")
        limit = most_positions(self.blueprint.config)
        if limit and self.seq > limit:
            raise UserError(f"--seq {self.seq}", f"the model has {limit} positions", f"use at most {limit}")
        if self.lora.layers_to_transform is not None:
            rule = "a layer of each kind stands for all of them, whether they have adapters or not"
            raise UnsupportedError("layers_to_transform", rule, "plan it on all layers: it costs no less")
        if {packing.kind for packing in self.blueprint.plan.quantized.values()} & {*OF_LIBRARY}:
            levels_of_int8()  # cached, and bitsandbytes imported: its tables cannot be made of fake tensors
        if self.recompute not in (None, "none"):
            self._check_recompute()
        check_trainable(self.optimizer, self.blueprint.with_adapter(self.lora).trained, self.blueprint.plan)

    def _check_recompute(self) -> None:
        given, layers = f"--recompute {self.recompute}", decoder_layers(self.model)[1]
        is_number = isinstance(self.recompute, int) and 1 <= self.recompute <= len(layers)
        if self.recompute not in ("full", "offload") and not is_number:
            raise UserError(given, f"it must be none, full, offload or a number n from 1 to {len(layers)}")
        if not self.can_recompute:
            raise UserError(given, "the layers of this family cannot be computed twice", "use none")

    @property
    def model(self) -> Any:
        """The whole model, on the meta device."""
        return self.blueprint.model

    @cached_property
    def shrunk(self) -> Shrunk:
        """The model with one layer of each kind."""
        return shrink(self.model)

    @cached_property
    def can_recompute(self) -> bool:
        """Whether transformers can recompute every layer."""
        return all(isinstance(layer, GradientCheckpointingLayer) for layer in decoder_layers(self.model)[1])

    @property
    def small(self) -> Blueprint:
        return dataclasses.replace(self.blueprint, model=self.shrunk.model)

    @property
    def quantization(self) -> str | None:
        """Of the base, one of `wings.quantized.kinds.KINDS`, or None."""
        return self.blueprint.options.quantization

    @property
    def compute(self) -> str | None:
        """Products of the base in float8, as in a run file, or None."""
        return self.blueprint.options.compute

    @property
    def is_half(self) -> bool:
        """Whether matrix products are in a two-byte dtype."""
        return self.blueprint.dtype.itemsize == 2


def problem_of_run(config: RunConfig, blueprint: Blueprint, *, gpus: int, gpu: Hardware, seq: int) -> Problem:
    """The problem of a run: its model on one GPU, its adapter, sizes and recomputation. blueprint: with the adapter."""
    return Problem(
        dataclasses.replace(blueprint, adapter=None).on(Topology()),
        blueprint.trained.config,
        gpus=gpus,
        gpu=gpu,
        seq=seq,
        global_batch=config.train.batch_size,
        micro_batch=config.train.micro_batch_size,
        recompute=config.train.recompute,
        optimizer=config.train.optimizer,
        min_8bit_size=config.train.min_8bit_size,
    )


def read_config(model: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a checkpoint's folder, or of a JSON file. Raises: as `blueprint.read_model_config`."""
    path = Path(model)
    if not path.is_file():
        return read_model_config(model, trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder) / "config.json")
        return read_model_config(folder, trust_remote_code=trust_remote_code)
