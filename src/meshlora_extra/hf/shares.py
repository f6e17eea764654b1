"""What TRL's losses and gathers must know of dp: a rank has a share of the rows of each batch.

Owns: the weight of a rank's loss, which losses of TRL have none, dropout that TRL turns off. Does not own: the class of
such a trainer (`meshlora_extra.hf.trl`), the shares (`meshlora_extra.hf.rows`).

TRL is told that it is alone (`meshlora_extra.hf.processes`): it divides as one process that has this rank's rows alone.
Gradients are means over dp ranks. So a loss divided by what all ranks have is multiplied by dp, and a mean of own rows
by how many these are in comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import Axis
from meshlora.layers.dropout import TokenDropout
from meshlora.layers.linear import ParallelLinear
from meshlora.plan.pairs import check
from meshlora_extra.hf.rows import gathered_rows
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology

_KNOWN = ("SFTTrainer", "DPOTrainer", "GRPOTrainer", "RewardTrainer")
# Losses that sort, or average tokens of, the rows of a micro-batch: those of a rank give another one.
_OF_MICRO_BATCHES = {"DPOTrainer": ("sft", "aot", "aot_unpaired"), "GRPOTrainer": ("bnpo",)}
_OF_TOKENS_OF_ALL = ("dapo", "cispo", "vespo")  # of GRPO: divided by the tokens of all ranks
_GATHERED_OTHERWISE = ("precompute_ref_log_probs", "log_completions")  # past the mesh


def check_shares(trainer: str, args: Any, topology: Topology) -> None:
    """Refuse what is no sum over rows of several dp ranks. Raises: UnsupportedError."""
    if topology.dp == 1:
        return
    means = []
    if trainer not in _KNOWN:
        means.append(f"trl.{trainer}")
    given = getattr(args, "loss_type", None) or ()
    if isinstance(given, str):
        given = [given]
    means += [f"loss_type={loss!r}" for loss in given if loss in _OF_MICRO_BATCHES.get(trainer, ())]
    means += [f"{name}=..." for name in ("entropy_coef", "use_adaptive_entropy") if getattr(args, name, None)]
    for mean in means:
        check({"topology": topology, "mean": mean})
    for name in _GATHERED_OTHERWISE:
        if getattr(args, name, False):
            check({"topology": topology, "argument": f"{name}=True with dp"})


def weight_of(trainer: str, args: Any, inputs: Mapping[str, Any], dp: Axis) -> float:
    """What the loss of this rank's rows counts, so that the mean over dp ranks is the loss of all. Collective."""
    if dp.size == 1:
        return 1.0
    if trainer == "SFTTrainer":
        return float(dp.size)
    if trainer == "GRPOTrainer":  # else a mean over rows, of which ranks have equally many
        return float(dp.size if args.loss_type in _OF_TOKENS_OF_ALL else 1)
    own = inputs["input_ids"].new_tensor([len(inputs["input_ids"])])
    return float(own) * dp.size / float(all_reduce_sum(own.clone(), dp))


def labels_of_all(labels: Tensor, dp: Axis) -> Tensor:
    """The number of labels of all dp ranks that a token is before, `[]`. Collective."""
    return all_reduce_sum((labels[:, 1:] != -100).sum().reshape(1), dp)[0]


def check_equal_shares(number: int, dp: Axis, device: torch.device) -> None:
    """Refuse numbers of prompts that differ between dp ranks. Collective. Raises: UserError, on all ranks."""
    numbers = gathered_rows(torch.tensor([number], device=device), dp).tolist()
    if len(set(numbers)) > 1:
        rule = "each has as many of a batch, so that the groups of all can be put together"
        raise UserError(
            f"dp ranks with {numbers} prompts", rule, "give a batch size that dp divides, and whole batches"
        )


def switch_off_dropout(model: nn.Module) -> None:
    """What TRL's `disable_dropout=True` does to modules of torch, of those of a mesh."""
    for module in model.modules():
        if isinstance(module, ParallelLinear):
            module.dropout.clear()
        elif isinstance(module, TokenDropout):
            module.p = 0.0
