"""Blueprints, and models made of them, in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig

from meshlora.loading.blueprint import make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.rules import ModelPlan
from meshlora_ground.topology import Topology


def build_meta(config: Any, topology: Topology, *, dtype: Any, **options: Any) -> tuple[Any, ModelPlan]:
    """(the model on the meta device, its plan)."""
    blueprint = make_blueprint(config, topology, BaseOptions(dtype=dtype, **options))
    return blueprint.model, blueprint.plan


def load_without_proof(
    folder: Path,
    *,
    topology: Topology,
    dtype: Any,
    lora: LoraConfig | None = None,
    adapter: Path | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Any:
    """`meshlora.load` of what the test itself proves."""
    blueprint = make_blueprint(folder, topology, BaseOptions(dtype=dtype))
    if lora is not None:
        blueprint = blueprint.with_adapter(lora)
    if adapter is not None:
        blueprint = blueprint.with_folder(adapter)
    return load_blueprint(blueprint, device=device, seed=seed)
