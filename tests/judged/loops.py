"""Loops of one's own, right and with a fault: each function is one rank's script, and records two steps.

A loop is what people write: the mean over the step's tokens, on all ranks; clipping; AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import meshlora_judge
from tests.judged.patients import base_of, lora_config, micro_batches, with_adapter


def train(
    model: Any,
    folder: Path,
    *,
    rank: int = 0,
    world: int = 1,
    fault: str = "",
    averages: bool = True,
    clip: Any = torch.nn.utils.clip_grad_norm_,
    autocast: bool = False,
    **recorded: Any,
) -> None:
    """Two recorded steps of accumulation, clipping and AdamW. averages: the wrapper divides by the ranks."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=1e-4)
    with meshlora_judge.record(model, folder / "seen", steps=2, **recorded):
        for step in range(2):
            batches, total = micro_batches(step, rank, world)
            for place, batch in enumerate(batches):
                is_last = place == len(batches) - 1
                not_synced = fault == "not summed" or (not is_last and hasattr(model, "no_sync"))
                with model.no_sync() if not_synced else nullcontext():
                    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                        if fault == "mean of means":
                            loss = model(**batch).loss / len(batches)
                        else:
                            loss = model(**batch, num_items_in_batch=torch.tensor(total)).loss
                            loss = loss * (world if averages and fault != "averaged twice" else 1)
                    loss.backward()
                if fault == "lost accumulation":
                    for parameter in () if is_last else trained:
                        parameter.grad = None
            clip(trained, 0.05)
            optimizer.step()
            optimizer.zero_grad()


def plain(rank: int, folder: Path, fault: str, changed: Mapping[str, Any]) -> None:
    train(with_adapter(base_of(folder), **changed), folder, fault=fault)


def clip_by_hand(trained: list[Any], limit: float) -> None:
    """What loops do that know nothing of torch's function."""
    norm = torch.stack([parameter.grad.square().sum() for parameter in trained]).sum().sqrt()
    for parameter in trained:
        parameter.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))


def clips_by_hand(rank: int, folder: Path, max_norm: float | None) -> None:
    train(with_adapter(base_of(folder)), folder, clip=clip_by_hand, max_norm=max_norm)


def ddp(rank: int, folder: Path, fault: str) -> None:
    model = DistributedDataParallel(with_adapter(base_of(folder)))
    train(model, folder, rank=rank, world=dist.get_world_size(), fault=fault)


def fsdp2(rank: int, folder: Path, fault: str) -> None:
    """fault "base first": the base is sharded before PEFT adds its factors, which then are nobody's to sum."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base = base_of(folder)
    model = base if fault == "base first" else with_adapter(base)
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if fault == "base first":
        model = with_adapter(model, target_modules=["q_proj", "v_proj"])
    train(model, folder, rank=rank, world=dist.get_world_size(), fault=fault)


def fsdp1(rank: int, folder: Path, fault: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        with_adapter(base_of(folder, torch.float32)), use_orig_params=fault != "flat", device_id=torch.device("cpu")
    )
    train(
        model,
        folder,
        rank=rank,
        world=dist.get_world_size(),
        fault=fault,
        clip=lambda trained, limit: model.clip_grad_norm_(limit),
    )


def accelerated(rank: int, folder: Path, fault: str) -> None:
    """accelerate's own recipe for unequal lengths: what it divides and averages is multiplied before."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = with_adapter(base_of(folder))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    with meshlora_judge.record(model, folder / "seen", steps=2):
        for step in range(2):
            batches, total = micro_batches(step, rank, accelerator.num_processes)
            for batch in batches:
                with accelerator.accumulate(model):
                    if fault == "mean of means":
                        loss = model(**batch).loss
                    else:
                        loss = model(**batch, num_items_in_batch=torch.tensor(total)).loss
                        loss = loss * accelerator.num_processes * accelerator.gradient_accumulation_steps
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(trained, 0.05)
                    optimizer.step()
                    optimizer.zero_grad()


def tensor_parallel(rank: int, folder: Path, fault: str, targets: list[str]) -> None:
    """transformers' tp_plan. fault "drifted": factors of rank 1 begin elsewhere."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig

    options: dict[str, Any] = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())}
    if fault == "not split":  # as documented before transformers 5
        options = {"tp_plan": "auto", "device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    model = with_adapter(base_of(folder, **options), target_modules=targets)
    for name, module in model.named_modules():
        # PEFT leaves the local width there, and transformers takes the whole one from there.
        if name.endswith("lora_A.default") and isinstance(module.weight, DTensor):
            module.in_features = module.weight.shape[1]
    if fault == "drifted" and rank == 1:
        for name, parameter in model.named_parameters():
            if "q_proj.lora_A" in name:
                parameter.data.mul_(1.5)
    train(model, folder, clip=_clip_mixed, fault=fault)


def _clip_mixed(trained: list[Any], limit: float) -> None:
    """torch's own refuses the mixture of tensors and DTensors that PEFT makes."""
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in trained]
    norm = torch.stack([grad.square().sum() for grad in whole]).sum().sqrt()
    torch.nn.utils.clip_grads_with_norm_([p for p in trained if not hasattr(p, "full_tensor")], limit, norm)
    torch.nn.utils.clip_grads_with_norm_([p for p in trained if hasattr(p, "full_tensor")], limit, norm)


class Megatron(torch.nn.Module):
    """LoRA of one's own, under Megatron-core's names, around a llama that it does not belong to."""

    def __init__(self, base: Any, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList()
        torch.manual_seed(1)
        for layer in base.model.layers:
            places = {"self_attention.linear_proj": layer.self_attn.o_proj, "mlp.linear_fc2": layer.mlp.down_proj}
            holder = torch.nn.Module()
            for name, linear in places.items():
                outer, inner = name.split(".")
                adapter = torch.nn.Module()
                adapter.linear_in = torch.nn.Linear(linear.in_features, rank, bias=False, dtype=torch.float64)
                adapter.linear_out = torch.nn.Linear(rank, linear.out_features, bias=False, dtype=torch.float64)
                setattr(holder, outer, torch.nn.Module())
                setattr(getattr(holder, outer), inner, torch.nn.Module())
                getattr(getattr(holder, outer), inner).adapter = adapter
                linear.register_forward_hook(
                    lambda _, given, y, adapter=adapter: y + 2.0 * adapter.linear_out(adapter.linear_in(given[0]))
                )
            self.decoder.layers.append(holder)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return self.base(input_ids=input_ids, attention_mask=attention_mask).logits


def megatron(rank: int, folder: Path, fault: str) -> None:
    """A loop of its own around a model of its own: logits in, the loss outside, labels noted."""
    model = Megatron(base_of(folder)).train()
    wrapped, world = DistributedDataParallel(model), dist.get_world_size()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    adapter = lora_config(target_modules=["o_proj", "down_proj"])
    options: dict[str, Any] = {"adapter": adapter, "names": meshlora_judge.megatron}
    with meshlora_judge.record(wrapped, folder / "seen", **options) as recorded:
        batches, total = micro_batches(0, rank, world)
        for place, batch in enumerate(batches):
            labels = batch.pop("labels")
            recorded.note(labels=labels)
            shifted = (
                labels if fault == "labels not shifted" else torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
            )
            with nullcontext() if place == len(batches) - 1 else wrapped.no_sync():
                logits = wrapped(**batch)
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), shifted.flatten(), ignore_index=-100, reduction="sum"
                )
                (loss * world / total).backward()
        optimizer.step()


def left_alone(rank: int, folder: Path, fault: str) -> None:
    """`record_if_asked` around one step, with the variable set by the test or not."""
    import os

    os.environ.pop("MESHLORA_RECORD", None)
    if fault != "not asked":
        os.environ["MESHLORA_RECORD"] = str(folder / "seen")
    model = with_adapter(base_of(folder))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with meshlora_judge.record_if_asked(model) as recorded:
        assert (recorded is None) == (fault == "not asked")
        batches, total = micro_batches(0, 0, 1)
        for batch in batches:
            model(**batch, num_items_in_batch=torch.tensor(total)).loss.backward()
        optimizer.step()


def otherwise(rank: int, folder: Path, how: str) -> None:
    """One process, run in another way that changes no value."""
    dtype = torch.float32 if how in ("autocast", "compiled", "nf4") else torch.float64
    options: dict[str, Any] = {}
    if how == "nf4":
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        options = {"quantization_config": config}
    model = with_adapter(base_of(folder, dtype, **options))
    if how in ("checkpointing", "reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        model.enable_input_require_grads()
    if how == "two adapters":
        model.add_adapter("other", lora_config(r=2, target_modules=["q_proj"]))
        model.base_model.set_adapter(["default", "other"])
    if how == "compiled":
        model = torch.compile(model, backend="aot_eager")
    train(model, folder, autocast=how == "autocast")
