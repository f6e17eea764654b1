"""What the reference's own process does: make the inputs and run the reference.

Owns: the files of a reference run. It runs in a process of its own, in which no layer of meshlora is ever made.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from transformers import PretrainedConfig

from meshlora.oracle.case import Case
from meshlora.oracle.inputs import write_adapter, write_twin
from meshlora.oracle.reference_case import trace_case


def make_reference(case: Case, twin: PretrainedConfig | None, folder: str) -> None:
    """Fill `folder`: `model/` where a twin is meant, `adapter/`, `reference.safetensors` (float64), and for a lower
    precision `rounded-N.safetensors`, the same in that precision, as often as there are ways to round.
    """
    root = Path(folder)
    if twin is not None:
        write_twin(twin, root / "model", dtype=getattr(torch, case.dtype), seed=case.seed)
    model = str(root / "model") if twin is not None else case.model
    write_adapter(
        model,
        case.lora,
        root / "adapter",
        seed=case.seed,
        trust_remote_code=case.trust_remote_code,
        pieces=case.pieces,
        share_experts=case.share_experts,
    )
    here = dataclasses.replace(case, model=model, adapter=str(root / "adapter"))
    trace_case(here, precision="float64").save(root / "reference.safetensors")
    if case.dtype != "float64":
        for number, autocast in enumerate((False, True) if case.dtype == "bfloat16" else (False,)):
            rounded = trace_case(here, precision=case.dtype, autocast=autocast)
            rounded.save(root / f"rounded-{number}.safetensors")
