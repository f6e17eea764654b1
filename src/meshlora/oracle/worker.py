"""What the reference's own process does: make the inputs, run the reference, read back what we saved.

Owns: the files of a reference run. It runs in a process of its own, in which no layer of meshlora is ever made.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from meshlora.errors import reason
from meshlora.oracle.case import Case
from meshlora.oracle.inputs import write_adapter, write_twin
from meshlora.oracle.reference import read_back, trace_case


def make_reference(case: Case, twin: PretrainedConfig | None, folder: str) -> None:
    """Fill `folder`: `model/` where a twin is meant, `adapter/`, `reference.safetensors` (float64), and for a lower
    precision `rounded.safetensors`, the same in that precision.
    """
    root = Path(folder)
    if twin is not None:
        write_twin(twin, root / "model", dtype=getattr(torch, case.dtype), seed=case.seed)
    model = str(root / "model") if twin is not None else case.model
    write_adapter(model, case.lora, root / "adapter", seed=case.seed, trust_remote_code=case.trust_remote_code)
    here = dataclasses.replace(case, model=model, adapter=str(root / "adapter"))
    trace_case(here, precision="float64").save(root / "reference.safetensors")
    if case.dtype != "float64":
        trace_case(here, precision=case.dtype).save(root / "rounded.safetensors")


def read_back_to(case: Case, saved: str, file: str) -> str:
    """What PEFT makes of the adapter folder `saved`, into `file`; returns why it cannot, else nothing."""
    try:
        factors, logits = read_back(case, saved)
    except Exception as error:  # noqa: BLE001 - whatever PEFT says of a file that we wrote is the finding
        return f"PEFT cannot read it: {reason(error)}"
    save_file({**factors, "logits": logits}, file)
    return ""
