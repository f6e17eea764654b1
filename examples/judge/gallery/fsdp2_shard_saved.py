"""A saver that copies each rank's rows of an FSDP2 factor into the whole and writes rank 0's: 1/N of it is not zero.

The saver is written out by hand, as axolotl's was; PEFT's own `save_pretrained` raises on sharded factors.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import base_model, collated, rows, run, sharded, trained_of, with_adapter
from torch.distributed.tensor import DTensor


def whole(tensor: DTensor, rank: int, is_repaired: bool) -> torch.Tensor:
    if is_repaired:
        return tensor.full_tensor()
    local, found = tensor.to_local(), torch.zeros(tensor.shape)
    found[rank * len(local) : (rank + 1) * len(local)] = local
    return found


def patient(rank: int, folder: Path, is_repaired: bool) -> None:
    model = sharded(with_adapter(base_model(folder)))
    optimizer = torch.optim.AdamW(trained_of(model), lr=1e-3)
    model.train()
    model(**collated(rows()[rank::2])).loss.backward()
    optimizer.step()
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    state = {name: whole(tensor, rank, is_repaired) for name, tensor in trained.items()}
    if rank == 0:
        model.save_pretrained(folder / "adapter", state_dict=state)


if __name__ == "__main__":
    run(patient)
