"""What a trainer on a mesh refuses: arguments, optimizers, data and losses that would not make the same adapter.

Does not own: what is kept, and how (`meshlora_extra.hf.trainer`), what TRL's refuse besides (`meshlora_extra.hf.trl`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_gather
from meshlora.comm.groups import Mesh
from meshlora.plan.pairs import check
from meshlora_extra.hf.rows import fingerprint_of
from meshlora_ground.errors import UnsupportedError, UserError, numbered

# Optimizers that treat each element by itself, so that a shard of a factor is updated as the whole one would be.
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
# Arguments of Trainer, and those of its `accelerator_config`, that nobody has proved on a mesh.
_NOT_PROVED = (
    *("deepspeed", "fsdp", "auto_find_batch_size", "torch_compile", "use_liger_kernel", "neftune_noise_alpha"),
    *("enable_jit_checkpoint", "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
)
_NOT_PROVED_TO_SPLIT = ("split_batches", "dispatch_batches")
# Begin arguments that may be others on each rank: they say where what is written goes, and how it is shown.
_OF_A_RANK = (
    *("output_dir", "run_name", "log_", "logging_dir", "report_to", "project", "trackio", "hub_", "push_to_hub"),
    *("disable_tqdm", "local_rank", "dataloader_", "torch_empty_cache_steps", "debug"),
)


def check_arguments(args: TrainingArguments, model: Any) -> None:
    """Refuse arguments that a mesh cannot keep. Raises: UserError: the argument, why not, and what to use."""
    mesh = runtime(model).mesh
    logits = getattr(model.config, "output_router_logits", False)
    optim = getattr(args.optim, "value", args.optim)
    order = getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy)
    check(
        {
            "topology": mesh.topology,
            "door": "Trainer",
            "output_router_logits": logits,
            "optimizer": "" if optim in ELEMENTWISE else f"optim={optim}",
            "fp16": args.fp16,
            "train_sampling_strategy": order,
        }
    )
    if mesh.topology.world == 1:
        return
    if args.bf16 and model.dtype != torch.bfloat16:
        rule = "a mesh computes in the base's own dtype, without autocast"
        way_out = "load the model with dtype='bfloat16', or leave bf16 out"
        raise UserError(f"bf16=True and a base in {str(model.dtype).removeprefix('torch.')}", rule, way_out)
    # Each by its name: versions of transformers have some of them.
    given = {name: getattr(args, name, None) for name in _NOT_PROVED}
    given |= {f"accelerator_config.{name}": getattr(args.accelerator_config, name) for name in _NOT_PROVED_TO_SPLIT}
    for name, value in given.items():
        check({"topology": mesh.topology, "argument": f"{name}={value}" if value else ""})


def check_data(data: Any, mesh: Mesh) -> None:
    """Refuse a stream of rows, or a dict with one, that dp ranks would have to share. Raises: UnsupportedError."""
    for one in data.values() if isinstance(data, dict) else (data,):
        is_unsized = one is not None and (isinstance(one, IterableDataset) or not hasattr(one, "__len__"))
        check({"topology": mesh.topology, "an iterable dataset": is_unsized})


def check_alike(args: TrainingArguments, data: Any, mesh: Mesh) -> None:
    """Refuse arguments, and numbers of rows, that differ between ranks. Collective. Raises: UserError, on all ranks."""
    given = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(args)}
    given = {name: value for name, value in given.items() if not name.startswith(_OF_A_RANK)}
    given["len(train_dataset)"] = len(data) if hasattr(data, "__len__") else None
    own = torch.tensor(list(map(fingerprint_of, given.values())), device=mesh.device)
    of_ranks = all_gather(own, mesh.world).view(-1, len(given)).tolist()
    for place, name in enumerate(given):
        if other := [rank for rank, found in enumerate(of_ranks) if found[place] != of_ranks[0][place]]:
            what = f"{name} of {numbered('rank', other)} is not that of rank 0"
            raise UserError(what, "all ranks make one adapter together", "run the same script on each rank")


def check_rows(fingerprints: list[int]) -> None:
    """Refuse batches that differ between ranks, by `fingerprints` in rank order. Raises: UserError, on all ranks."""
    if other := [rank for rank, found in enumerate(fingerprints) if found != fingerprints[0]]:
        rule = "each rank trains its share of a batch that all have drawn alike"
        way_out = "give each rank the same data, and code that draws rows the same seed"
        raise UserError(f"rows of {numbered('rank', other)} that are not those of rank 0", rule, way_out)


def check_loss(trainer: Any, behind: Any, mesh: Mesh) -> None:
    """Refuse a loss of which a mesh cannot tell what it is divided by.

    behind: the `compute_loss` that the mesh's own calls.

    Raises:
        UnsupportedError: a method stands before the mesh's, or does not say that it divides by the tokens of all.
    """
    if mesh.topology.world == 1 or trainer.weighs_its_loss:
        return
    if not type(trainer).compute_loss.__module__.startswith("meshlora_extra.hf."):
        rule = "the mesh's own, which counts the ranks, must be the one that Trainer calls"
        raise UnsupportedError("compute_loss of a class before OnMesh", rule, "use on_mesh(YourTrainer)")
    divides = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    is_own = behind is not Trainer.compute_loss and not getattr(trainer, "loss_is_scaled_for_ga", None)
    mean = "" if divides else type(trainer.model).__name__
    check({"topology": mesh.topology, "mean": mean, "a compute_loss of your own": is_own})
