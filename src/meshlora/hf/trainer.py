"""`transformers.Trainer` around a model that `meshlora.load` has split: the adapter that it makes on one process.

Owns: what of Trainer must know the mesh: its processes, rows, numbers of tokens, losses, gradients, files. Does not
own: its loop, arguments, callbacks, schedules, metrics, which are Trainer's own; TRL (`hf.trl`).

Trainer takes the mean of the gradients of all processes. So the loss of a rank is its part of the sum over tokens,
times dp, divided by the tokens of all; and gradients are summed over the axes of each factor, and divided by dp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import seed_worker

from meshlora.adapter.attach import active_factors, runtime
from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import Mesh
from meshlora.common.errors import UnsupportedError, UserError
from meshlora.hf.processes import Writer, be_alone, collect_over
from meshlora.hf.rows import STANDS_IN, SharedRows, fitted, shifted
from meshlora.hf.state import OPTIMIZER_FILE, read_adapter_into, read_optimizer, write_adapter_into, write_optimizer
from meshlora.train.gradsync import clip_gradients, finish_gradients_on_device
from meshlora.train.losses import language_model_loss
from meshlora.train.recompute import recompute_layers

# Its methods are those of the Trainer that stands behind `OnMesh` among the bases.
_Trainer: Any = Trainer if TYPE_CHECKING else object

# Optimizers that treat each element by itself, so that a shard of a factor is updated as the whole one would be.
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
_LOSS_INPUTS = {"input_ids", "attention_mask", "labels", "position_ids"}


class OnMesh(_Trainer):
    """What a Trainer must do otherwise around a split model; stands before the Trainer among the bases of a class.

        class MyTrainer(OnMesh, transformers.Trainer): ...

    Every rank makes one, with the same arguments and data. `per_device_train_batch_size` is of each dp rank, as with
    DistributedDataParallel: a step has that times dp times `gradient_accumulation_steps` rows, in the order of one
    process with a batch of per_device_train_batch_size times dp.
    """

    # Read by `model.wrappers`: this trainer wraps nothing.
    keeps_the_mesh = True
    model: Any
    args: TrainingArguments
    data_collator: Any
    _tr_loss: Tensor

    def __init__(self, model: Any = None, args: TrainingArguments | None = None, **options: Any) -> None:
        """Raises:
        UserError: the model is not of `meshlora.load`, or has no active adapter; an argument that a mesh cannot keep.
        """
        self._mesh: Mesh = runtime(model).mesh
        be_alone(self._mesh)
        if args is None:
            args = TrainingArguments()
        check_arguments(args, model)
        args.distributed_state = Writer(self._mesh)
        active_factors(model)
        self._is_finished, self._stands_in, self._added, self._logged_at = True, False, 0, -1
        super().__init__(model=model, args=args, **options)
        if self.args.gradient_checkpointing:
            # Ours, whose second forward runs every collective on every rank; Trainer would turn on transformers' own.
            recompute_layers(model, "full")
            self.args.gradient_checkpointing = False

    # ---- processes and rows

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        collect_over(self.accelerator, self._mesh)
        self.gather_function = self.accelerator.gather_for_metrics

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **options: Any) -> Any:
        dp = self._mesh.dp
        collator, self.data_collator = self.data_collator, SharedRows(self.data_collator, dp)
        try:
            loader = super()._get_dataloader(dataset, description, batch_size * dp.size, *args, **options)
        finally:
            self.data_collator = collator
        if loader.worker_init_fn is not None:  # all ranks alike: a collator that draws must draw the same
            loader.worker_init_fn = _seed_worker
        return loader

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return super().get_total_train_batch_size(args) * self._mesh.dp.size

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        own = super()._get_num_items_in_batch(batch_samples, device)
        if own is None or self._mesh.dp.size == 1:
            return own
        return all_reduce_sum(torch.as_tensor(own, device=self._mesh.device).reshape(1).clone(), self._mesh.dp)[0]

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        if not isinstance(inputs, Mapping):
            return inputs
        self._stands_in = bool(inputs.get(STANDS_IN))
        own = {name: value for name, value in inputs.items() if name != STANDS_IN}
        found = fitted(own, self._mesh.topology, pad_token_id=self.model.config.get_text_config().pad_token_id or 0)
        if isinstance(ids := found.get("input_ids"), Tensor):
            self._added = ids.shape[1] - own["input_ids"].shape[1]
        return found

    # ---- losses and gradients

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Trainer's loss, of this rank's tokens: times dp if it is divided by the tokens of all."""
        is_plain = not return_outputs and self.compute_loss_func is None and inputs.keys() <= _LOSS_INPUTS
        if not is_plain or num_items_in_batch is None or "labels" not in inputs:
            found = super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
            loss, *outputs = found if return_outputs else (found,)
            # Of whole rows on each cp rank, while losses are summed over cp.
            loss = loss * (1 if num_items_in_batch is None else self._mesh.dp.size) / self._mesh.cp.size
            return (loss, *outputs) if return_outputs else loss
        # The logits are never whole; right under cp too, which cuts the rows.
        summed = language_model_loss(
            model,
            inputs["input_ids"],
            inputs.get("attention_mask"),
            shifted(inputs["labels"]),
            label_smoothing=self.args.label_smoothing_factor,
            position_ids=inputs.get("position_ids"),
        )
        return summed * self._mesh.dp.size / num_items_in_batch

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        self._is_finished = False
        return super().training_step(*args, **options)

    def _finish(self) -> None:
        """Sum the gradients of all micro-batches over the mesh, once a step, before anything reads them."""
        if self._is_finished:
            return
        self._is_finished = True
        counted = int(self._mesh.cp.rank == 0)
        finish_gradients_on_device(self._mesh, [active_factors(self.model)], [counted])

    def _clip_grad_norm(self, model: Any) -> Tensor:
        self._finish()
        return torch.tensor(clip_gradients(self.model, self.args.max_grad_norm), dtype=torch.float64)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self._finish()
        return torch.tensor(clip_gradients(self.model, None), dtype=torch.float64) if grad_norm is None else grad_norm

    def _of_all(self, loss: Tensor) -> Tensor:
        """The loss of all rows from each rank's share of it."""
        return all_reduce_sum(loss.reshape(1).clone(), self._mesh.data)[0] / self._mesh.dp.size

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **options: Any) -> None:
        if self.control.should_log and self.state.global_step > self._logged_at:  # a step is logged once
            self._logged_at = self.state.global_step
            tr_loss.copy_(self._of_all(tr_loss))
        super()._maybe_log_save_evaluate(tr_loss, *args, **options)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self._tr_loss = self._of_all(self._tr_loss)
        return super()._finalize_training(*args, **options)

    # ---- evaluation

    def prediction_step(self, *args: Any, **options: Any) -> tuple[Any, Any, Any]:
        loss, logits, labels = super().prediction_step(*args, **options)
        if loss is not None:
            loss = self._of_all(loss)
        if self._added:
            logits, labels = (_without(value, self._added) for value in (logits, labels))
        if self._stands_in:
            logits, labels = (None if value is None else value[:0] for value in (logits, labels))
        return loss, logits, labels

    # ---- files

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir or ".")
        write_adapter_into(self.model, folder)
        if self.args.should_save and (tokenizer := getattr(self, "processing_class", None)) is not None:
            tokenizer.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        write_optimizer(self.model, self.optimizer.optimizer, Path(output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # the same on all ranks
            super()._save_rng_state(output_dir)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        super()._save_checkpoint(*args, **options)
        all_reduce_sum(torch.zeros(1, device=self._mesh.device), self._mesh.world)  # all files are there

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        read_adapter_into(self.model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        read_adapter_into(self.model, Path(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / OPTIMIZER_FILE).is_file():
            return
        read_optimizer(self.model, self.optimizer.optimizer, Path(checkpoint))
        schedule = torch.load(Path(checkpoint) / "scheduler.pt", map_location="cpu", weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)


class MeshTrainer(OnMesh, Trainer):
    """`transformers.Trainer` for a model of `meshlora.load`, on dp, tp, sp, cp, ep and etp: same arguments, data,
    callbacks, evaluation, checkpoints, and the adapter of one process. See `OnMesh`.
    """


def check_arguments(args: TrainingArguments, model: Any) -> None:
    """Refuse arguments that a mesh cannot keep, before anything is trained.

    Raises:
        UserError: the argument, why not, and what to use.
    """
    mesh = runtime(model).mesh
    if mesh.topology.pp > 1:
        raise UnsupportedError(f"Trainer on {mesh.topology}", "its loop has no turns of stages", "use meshlora train")
    if mesh.topology.world == 1:
        return
    optim = getattr(args.optim, "value", args.optim)
    if optim not in ELEMENTWISE:
        rule = "it uses whole matrices, or rounds their blocks, and a rank has a part of each"
        raise UnsupportedError(f"optim={optim}", rule, f"use one of {', '.join(ELEMENTWISE)}")
    for name, given in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if getattr(args, name) and model.dtype != given:
            raise UserError(
                f"{name}=True and a base in {str(model.dtype).removeprefix('torch.')}",
                "a mesh computes in the base's own dtype, without autocast",
                f"load the model with dtype={str(given).removeprefix('torch.')!r}, or leave {name} out",
            )
    refused = {
        "deepspeed": args.deepspeed,
        "fsdp": args.fsdp,
        "auto_find_batch_size": args.auto_find_batch_size,
        "torch_compile": args.torch_compile,
        "use_liger_kernel": args.use_liger_kernel,
        "neftune_noise_alpha": args.neftune_noise_alpha,
        "accelerator_config.split_batches": args.accelerator_config.split_batches,
        "accelerator_config.dispatch_batches": args.accelerator_config.dispatch_batches,
    }
    for name, value in refused.items():
        if value:
            raise UnsupportedError(f"{name}={value}", "it is not proved on a mesh", "leave it out")
    if getattr(model.config, "output_router_logits", False):
        rule = "the load-balancing loss of Trainer is that of each rank's own tokens"
        raise UnsupportedError("output_router_logits=True", rule, "leave it out, or use meshlora train")


def _without(value: Any, added: int) -> Any:
    """Logits `[B, S + added, V]` or labels `[B, S + added]` without what was added for sp."""
    if isinstance(value, tuple | list):
        return type(value)(_without(one, added) for one in value)
    return value[:, :-added] if isinstance(value, Tensor) and value.ndim >= 2 else value


def _seed_worker(worker_id: int) -> None:
    seed_worker(worker_id, num_workers=1, rank=0)
