"""`save_pretrained(state_dict=...)` with the state of a compiled model: PEFT finds no key of its own, writes 40 bytes.

Trainers pass a state dict so, to gather it over ranks; nothing warns.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import base_model, run, with_adapter


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    model = with_adapter(base_model(folder))
    compiled = torch.compile(model)
    state = (model if is_repaired else compiled).state_dict()
    model.save_pretrained(folder / "adapter", state_dict=state)


if __name__ == "__main__":
    run(patient, ranks=1)
