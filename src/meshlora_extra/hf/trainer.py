"""`transformers.Trainer` around a model that `meshlora.load` has split: the adapter that it makes on one process.

Owns: what of Trainer must know the mesh: its processes, rows, numbers of tokens, losses, gradients, files. Does not
own: its loop, arguments, callbacks, schedules, metrics, which are Trainer's own; TRL (`meshlora_extra.hf.trl`).

Trainer takes the mean of the gradients of all processes. So the loss of a rank is its part of the sum over tokens,
times dp, divided by the tokens of all; and gradients are summed over the axes of each factor, and divided by dp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import seed_worker

from meshlora.adapter.attach import active_factors, runtime
from meshlora.comm.collectives import all_gather, all_reduce_sum
from meshlora.comm.groups import Mesh
from meshlora.run.feeding import fitted
from meshlora.run.recompute import recompute_layers, switch_by_own_rule
from meshlora.train.elementwise import check_optimizer, check_rates
from meshlora.train.gradsync import check_total, clip_gradients, finish_gradients_on_device
from meshlora.train.losses import language_model_loss
from meshlora_extra.hf.arguments import check_alike, check_arguments, check_data, check_loss, check_rows
from meshlora_extra.hf.processes import Writer, be_alone, collect_over, stay_alone
from meshlora_extra.hf.rows import ROWS, STANDS_IN, SharedRows, fingerprint_of
from meshlora_extra.hf.state import (
    OPTIMIZER_FILE,
    read_adapter_into,
    read_optimizer,
    write_adapter_into,
    write_optimizer,
)
from meshlora_extra.hf.summed import SummedLoss
from meshlora_ground.errors import MeshloraError, UnsupportedError, UserError

# Its methods are those of the Trainer that stands behind `OnMesh` among the bases.
_Trainer: Any = Trainer if TYPE_CHECKING else object

# What callbacks of one rank may ask for, and all must do.
_FLAGS = ("should_log", "should_evaluate", "should_save", "should_training_stop", "should_epoch_stop")
# Arguments that turn recomputation on; older versions of transformers have one of them.
_RECOMPUTATION = ("activation_checkpointing", "gradient_checkpointing")
_LOSS_INPUTS = {"input_ids", "attention_mask", "labels", "position_ids"}


class OnMesh(_Trainer):
    """What a Trainer must do otherwise around a split model; stands before the Trainer among the bases of a class.

        class MyTrainer(OnMesh, transformers.Trainer): ...

    Every rank makes one, with the same arguments and data. `per_device_train_batch_size` is of each dp rank, as with
    DistributedDataParallel: a step has that times dp times `gradient_accumulation_steps` rows, in the order of one
    process with a batch of per_device_train_batch_size times dp.
    """

    # Read by `loading.guards`: this trainer wraps nothing.
    keeps_the_mesh = True
    # Whether its losses are put together by weights of their own.
    weighs_its_loss = False
    model: Any
    args: TrainingArguments
    data_collator: Any
    compute_loss_func: Any
    _tr_loss: Tensor

    def __init__(self, model: Any = None, args: TrainingArguments | None = None, **options: Any) -> None:
        """Raises:
        UserError: the model is not of `meshlora.load`, or has no active adapter; an argument that a mesh cannot keep.
        """
        mesh: Mesh = runtime(model).mesh
        self._mesh = mesh
        if args is None:
            args = TrainingArguments()
        check_arguments(args, model)
        active_factors(model)
        for data in (options.get("train_dataset"), options.get("eval_dataset")):
            check_data(data, mesh)
        if (given := options.get("optimizer_cls_and_kwargs")) is not None:
            check_optimizer(given[0], mesh)
        if (optimizer := (options.get("optimizers") or (None,))[0]) is not None:
            check_optimizer(type(optimizer), mesh)
        if mesh.topology.world > 1:
            args.accelerator_config.dispatch_batches = False  # each rank reads an iterable dataset by itself
            args.mixed_precision = "no"  # the base's own dtype, without autocast
        if asked := [name for name in _RECOMPUTATION if getattr(args, name, False)]:
            # Ours, whose second forward runs every collective on every rank; Trainer would turn on transformers' own.
            recompute_layers(model, "full")
            switch_by_own_rule(model, "full")
            for name in asked:
                setattr(args, name, False)
        self._is_finished, self._stands_in, self._added, self._logged_at = True, False, 0, -1
        args.distributed_state = Writer(mesh)
        be_alone(mesh)  # the last: making arguments undoes it
        super().__init__(model=model, args=args, **options)
        if self.accelerator.num_processes != 1:
            rule = "another trainer or Accelerator has counted the processes before"
            way_out = "make this one first"
            raise UnsupportedError(f"Trainer with {self.accelerator.num_processes} processes", rule, way_out)
        check_loss(self, self._behind, mesh)
        self._agree_after_substeps()

    @property
    def _behind(self) -> Any:
        """The `compute_loss` that the mesh's own calls: Trainer's, or that of a subclass."""
        bases = type(self).__mro__
        after = bases[bases.index(OnMesh) + 1 :]
        return next(vars(kind)["compute_loss"] for kind in after if "compute_loss" in vars(kind))

    def _begin(self) -> None:
        """As in `__init__`, whatever was made since: `TrainingArguments` of another trainer count processes anew."""
        stay_alone(self.accelerator, self._mesh, self.args.mixed_precision)
        self.args.distributed_state = Writer(self._mesh)
        own = self.compute_loss_func
        if own is not None and self._mesh.dp.size > 1 and not isinstance(own, SummedLoss):
            self.compute_loss_func = SummedLoss(own, self._mesh)

    def train(self, *args: Any, **options: Any) -> Any:
        self._begin()
        check_alike(self.args, self.train_dataset, self._mesh)
        self._logged_at = -1
        return super().train(*args, **options)

    def evaluate(self, *args: Any, **options: Any) -> Any:
        self._begin()
        return super().evaluate(*args, **options)

    def predict(self, *args: Any, **options: Any) -> Any:
        self._begin()
        return super().predict(*args, **options)

    # ---- processes and rows

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        collect_over(self.accelerator, self._mesh)
        self.gather_function = self.accelerator.gather_for_metrics

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **options: Any) -> Any:
        dp = self._mesh.dp
        check_data(dataset, self._mesh)
        collator, self.data_collator = self.data_collator, SharedRows(self.data_collator, dp)
        try:
            loader = super()._get_dataloader(dataset, description, batch_size * dp.size, *args, **options)
        finally:
            self.data_collator = collator
        if loader.worker_init_fn is not None:  # all ranks alike: a collator that draws must draw the same
            loader.worker_init_fn = functools.partial(seed_worker, num_workers=1, rank=0)
        return loader

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return super().get_total_train_batch_size(args) * self._mesh.dp.size

    def get_batch_samples(self, *args: Any, **options: Any) -> tuple[list[Any], Any]:
        batches, number = super().get_batch_samples(*args, **options)
        is_divided = self.compute_loss_func is None and self._behind is Trainer.compute_loss
        if batches and number is not None and is_divided:
            check_total(int(number))
        return batches, number

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        own, mesh = super()._get_num_items_in_batch(batch_samples, device), self._mesh
        if mesh.dp.size == 1:
            return own
        rows = [batch.get(ROWS) for batch in batch_samples if isinstance(batch, Mapping)]
        told = torch.tensor([fingerprint_of(rows), int(own or 0)], device=mesh.device)
        of_ranks = all_gather(told, mesh.world).view(-1, 2).tolist()
        check_rows([rows for rows, _ in of_ranks])
        if own is None:
            return None
        # Ranks of one replica have counted the same tokens.
        total = sum(number for _, number in of_ranks) * mesh.dp.size // len(of_ranks)
        return torch.tensor(total, device=mesh.device)

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        if not isinstance(inputs, Mapping):
            return inputs
        self._stands_in = bool(inputs.get(STANDS_IN))
        own = {name: value for name, value in inputs.items() if name not in (STANDS_IN, ROWS)}
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
        is_plain = is_plain and self._behind is Trainer.compute_loss
        if not is_plain or num_items_in_batch is None or "labels" not in inputs:
            found = super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
            loss, *outputs = found if return_outputs else (found,)
            is_summed = num_items_in_batch is not None or self.compute_loss_func is not None
            if not is_summed and self._mesh.dp.size > 1 and self.model.training:
                rule = "num_items_in_batch, by which its loss is divided, is not known"
                raise UserError(f"a batch without labels and dp={self._mesh.dp.size}", rule, "name them labels")
            # Of whole rows on each cp rank, while losses are summed over cp.
            loss = loss * (self._mesh.dp.size if is_summed else 1) / self._mesh.cp.size
            return (loss, *outputs) if return_outputs else loss
        # The logits are never whole; right under cp too, which cuts the rows.
        summed = language_model_loss(
            model,
            inputs["input_ids"],
            inputs.get("attention_mask"),
            inputs["labels"],
            label_smoothing=self.args.label_smoothing_factor,
            position_ids=inputs.get("position_ids"),
        )
        return summed * self._mesh.dp.size / num_items_in_batch

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        self._is_finished = False
        state = runtime(self.model)
        state.loop.masks = (self.args.seed, self.state.global_step)
        try:
            return super().training_step(*args, **options)
        finally:
            state.loop.masks = None
            state.dropout.say(None)

    def _finish(self) -> None:
        """Sum the gradients of all micro-batches over the mesh, once a step, before anything reads them."""
        if self._is_finished:
            return
        self._is_finished = True
        own = torch.tensor([float(sum(group["lr"] for group in self.optimizer.param_groups))], dtype=torch.float64)
        check_rates(all_gather(own.to(self._mesh.device), self._mesh.world).tolist(), self._mesh.topology)
        counted = int(self._mesh.cp.rank == 0)
        finish_gradients_on_device(self._mesh, [active_factors(self.model)], [counted])
        runtime(self.model).loop.is_divided = False  # by the tokens of all, as this expects

    def _clip_grad_norm(self, model: Any) -> Tensor:
        self._finish()
        return torch.tensor(clip_gradients(self.model, self.args.max_grad_norm), dtype=torch.float64)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self._finish()
        norm = clip_gradients(self.model, None) if grad_norm is None else float(grad_norm)
        if not math.isfinite(norm):
            step = f"step {self.state.global_step + 1}"
            raise MeshloraError(f"the gradient norm of {step} is {norm}: the adapter is left as it was before it")
        return torch.tensor(norm, dtype=torch.float64)

    def _of_all(self, loss: Tensor) -> Tensor:
        """The loss of all rows from each rank's share of it."""
        return all_reduce_sum(loss.reshape(1).clone(), self._mesh.data)[0] / self._mesh.dp.size

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **options: Any) -> None:
        self._agree()
        control = self.control
        is_heard = control.should_log or control.should_evaluate or control.should_save
        if control.should_log and self.state.global_step > self._logged_at:  # a step is logged once
            self._logged_at = self.state.global_step
            tr_loss.copy_(self._of_all(tr_loss))
        super()._maybe_log_save_evaluate(tr_loss, *args, **options)
        if is_heard:  # by callbacks, which may stop the training
            self._agree()

    def _agree(self) -> None:
        """What the callbacks of any rank ask for, all ranks do: else they wait for each other."""
        asked = torch.tensor([float(getattr(self.control, name)) for name in _FLAGS], device=self._mesh.device)
        for name, number in zip(_FLAGS, all_reduce_sum(asked, self._mesh.world).tolist(), strict=True):
            setattr(self.control, name, number > 0)

    def _agree_after_substeps(self) -> None:
        """Let ranks agree within an accumulation too: Trainer looks after each micro-batch whether it is to stop."""
        handler = self.callback_handler
        theirs = handler.on_substep_end

        def on_substep_end(*args: Any, **options: Any) -> Any:
            self.control = theirs(*args, **options)
            self._agree()
            return self.control

        handler.on_substep_end = on_substep_end

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self._tr_loss = self._of_all(self._tr_loss)
        return super()._finalize_training(*args, **options)

    # ---- evaluation

    def prediction_step(self, *args: Any, **options: Any) -> tuple[Any, Any, Any]:
        loss, logits, labels = super().prediction_step(*args, **options)
        if loss is not None:
            loss = self._of_all(loss)
        if self._added:  # for sp and cp: from logits `[B, S + added, V]` and labels `[B, S + added]`

            def own(found: Tensor) -> Tensor:
                return found[:, : -self._added] if found.ndim >= 2 else found

            logits, labels = (recursively_apply(own, value) for value in (logits, labels))
        if self._stands_in:
            logits, labels = (recursively_apply(lambda found: found[:0], value) for value in (logits, labels))
        return loss, logits, labels

    # ---- files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._save(output_dir)  # on every rank, of which older versions of transformers let the first alone save
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

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
        check_optimizer(type(self.optimizer.optimizer), self._mesh)  # also of a create_optimizer of one's own
        if checkpoint is None or not (Path(checkpoint) / OPTIMIZER_FILE).is_file():
            return
        read_optimizer(self.model, self.optimizer.optimizer, Path(checkpoint))
        schedule = torch.load(Path(checkpoint) / "scheduler.pt", map_location="cpu", weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)


class MeshTrainer(OnMesh, Trainer):
    """`transformers.Trainer` for a model of `meshlora.load`, on dp, tp, sp, cp, ep and etp: same arguments, data,
    callbacks, evaluation, checkpoints, and the adapter of one process. See `OnMesh`.
    """
