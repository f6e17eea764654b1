"""The reference: the same steps on one process by transformers + peft.

Owns: the training loop of a single process. It uses none of meshlora's layers, collectives, gradient sync, adapter code
or batches, only what both sides share: the sequences of a run, and the lift.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import PeftModel
from peft.optimizers import create_lorafa_optimizer, create_loraplus_optimizer
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor, nn
from transformers import AutoConfig, get_scheduler

from meshlora_ground.compat.peft_targets import targets_as_configured
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UnsupportedError, reason
from meshlora_ground.float64 import lift
from meshlora_ground.objective import TEXT, Objective
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.objectives.labels import Embed
from meshlora_ground.objectives.preferences import Dpo
from meshlora_ground.tasks import CAUSAL, task_of
from meshlora_judge.batches import UNTRAINED, MicroBatch, micro_batches_of
from meshlora_judge.dropout import Masks
from meshlora_judge.experts import (
    PREFIX,
    ROWS,
    adapted_stacks,
    output_side,
    plain_name,
    plain_names,
    share_adapters,
    unshare_adapters,
)
from meshlora_judge.float8 import multiply_in_float8
from meshlora_judge.formulas.pairs import said
from meshlora_judge.formulas.policies import entropies, least_entropy
from meshlora_judge.formulas.preferences import gained
from meshlora_judge.invoked import invoke
from meshlora_judge.noise import add_noise
from meshlora_judge.objectives import contrast, embeddings, load_balancing_loss, losses
from meshlora_judge.packed import load_base
from meshlora_judge.pieces import mask_of, pieces_of
from meshlora_judge.quantized import quantize_base
from meshlora_judge.settings import Base, Training


def reference_model(
    model: Base,
    adapter: str | Path,
    *,
    objective: Objective = TEXT,
    pad: int = 0,
    is_stock: bool = False,
    dropouts: Collection[str] = (),
) -> Any:
    """The checkpoint with a trainable PEFT adapter on one process, the model's own dropouts off.

    pad: the padding token of the batches, for a model of another task. dropouts: configuration fields whose dropout
    stays on.
    is_stock: leave PEFT's rewriting of target names on, and do not share adapters of experts.
    """
    base = _base_model(model, objective=objective, pad=pad, dropouts=dropouts)
    with contextlib.nullcontext() if is_stock else targets_as_configured():
        # Where the base is: PEFT would read it onto a GPU that it sees.
        found = PeftModel.from_pretrained(base, str(adapter), is_trainable=True, torch_device="cpu")
    for name, module in found.named_modules():
        assert not type(module).__module__.startswith("meshlora"), name  # the judge runs none of our layers
    if own_words(adapter).get("share_experts") and not is_stock:
        share_adapters(found)
    invoke(found)
    return found.train()


def _base_model(model: Base, *, objective: Objective, pad: int = 0, dropouts: Collection[str] = ()) -> Any:
    config = AutoConfig.from_pretrained(model.path, local_files_only=True, trust_remote_code=model.trust_remote_code)
    objective.configure(config)
    for name, value in config.to_dict().items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float) and name not in dropouts:
            setattr(config, name, 0.0)
    if objective.task != CAUSAL:
        config.classifier_dropout = 0.0
    found = _loaded(model, model.path, config)
    if objective.task != CAUSAL:
        found.config.get_text_config().pad_token_id = pad
    quantize_base(found, model.quantization)
    multiply_in_float8(found, model.compute, quantization=model.quantization, folder=model.path)
    return found


def _loaded(model: Base, folder: str | Path, config: Any) -> Any:
    """The checkpoint in `folder`, in the dtype and with the attention of `model`."""
    dtype, options = getattr(torch, model.dtype), {"local_files_only": True}
    options |= {"trust_remote_code": model.trust_remote_code}
    # The other ways of experts do not compute in float64.
    ways = {"attn_implementation": model.attn_implementation, "experts_implementation": "eager"}
    found = load_base(folder, config, dtype=dtype, **ways, **options)
    if dtype == torch.float64:
        for parameter in found.parameters():  # some routers are float32 whatever dtype is requested
            parameter.data = parameter.data.to(dtype)
    return found


def check_forward(model: Base, batch: MicroBatch, error: Exception) -> None:
    """Refuse a model whose forward, alone in transformers, ends in an error as `error` is one.

    Raises:
        UnsupportedError: it does: releases have families with a forward that never ran.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "memory" in str(error):
        return
    config = AutoConfig.from_pretrained(model.path, local_files_only=True, trust_remote_code=model.trust_remote_code)
    try:
        losses_of(_loaded(model, model.path, config), batch)
    except Exception as found:  # noqa: BLE001 - of any library, in a family that nobody here has seen
        if type(found) is not type(error):
            return
        given, version = f"model_type {config.model_type!r}", transformers.__version__
        rule = f"transformers {version} itself ends in an error on its text: {reason(found)}"
        raise UnsupportedError(given, rule, "use another version of it, or a text model alone") from error


def losses_of(
    model: nn.Module,
    batch: MicroBatch,
    *,
    objective: Objective | None = None,
    base: Tensor | None = None,
    point: Tensor | None = None,
    routed: list[tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, Tensor]:
    """(losses before averaging, one per token, pair or record; logits `[B, S, V]`, or the outputs of another head) of
    one micro-batch, lifted if the model is float64. Of a text to embed the first is its embedding: `contrast` compares
    those of a whole step.

    objective: None: no losses. base, point: from `before_losses`, if the objective needs them.
    routed: if given, the layers' router logits are appended.
    """
    options: dict[str, Any] = {"output_router_logits": True} if routed is not None else {}
    with lift(next(model.parameters()).dtype == torch.float64):
        # PEFT's wrapper calls forward(), past the hooks of a capture; the model inside it has the adapter's layers.
        inner = getattr(model, "get_base_model", lambda: model)()
        if task_of(inner.config) == CAUSAL:
            options["use_cache"] = False
        dtype, more = next(model.parameters()).dtype, dict(batch.more)
        for name, value in more.items():
            if value.is_floating_point():  # pixels
                more[name] = value.to(dtype)
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if "encoder_input_ids" in more:  # the decoder reads labels as the model itself shifts them
            inputs = {"input_ids": more.pop("encoder_input_ids"), "attention_mask": more.pop("encoder_attention_mask")}
            inputs["decoder_input_ids"] = _shifted(inner, batch.labels)
            inputs["decoder_attention_mask"] = batch.attention_mask
        found = inner(**inputs, **options, **more)
        outputs = found.logits if "logits" in found else found.last_hidden_state
        if routed is not None:
            routed.append(found.router_logits)
        if objective is None:
            return outputs.new_empty(0), outputs
        if isinstance(objective, Embed):
            return embeddings(objective, outputs, batch), outputs
        each = losses(objective, outputs, batch, base, is_training=torch.is_grad_enabled(), point=point)
    return each, outputs


def _shifted(model: Any, labels: Tensor) -> Tensor:
    """What the decoder of `model` reads, as its forward makes it of `labels`."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        found = model.prepare_decoder_input_ids_from_labels(labels=labels)
    else:
        shift = sys.modules[type(model).__module__].shift_tokens_right
        found = shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)
    assert isinstance(found, Tensor)
    return found


def frozen_policy(model: Base, adapter: str | Path | None, **options: Any) -> Any:
    """A second model: the checkpoint with the adapter in the folder `adapter`, frozen; None: there is no such folder.

    options: of `reference_model`.
    """
    return None if adapter is None else reference_model(model, adapter, **options).eval().requires_grad_(False)


def base_beside_biases(model: Base, adapter: str | Path, *, objective: Objective, pad: int = 0) -> Any:
    """The frozen base as a second model, where `objective` needs it and the adapter trains its biases: PEFT does so in
    place, and `disable_adapter` leaves them as trained. None: it need not be.
    """
    file = Path(adapter) / "adapter_config.json"
    if not objective.needs_base or json.loads(file.read_text(encoding="utf-8")).get("bias", "none") == "none":
        return None
    return _base_model(model, objective=objective, pad=pad).eval().requires_grad_(False)


def teacher_model(student: Base, folder: str | Path) -> Any:
    """Another checkpoint, in the dtype of the student, frozen and without dropout."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=student.trust_remote_code)
    return _loaded(student, folder, config).eval().requires_grad_(False)


@torch.no_grad()
def base_logits(model: Any, batch: MicroBatch, objective: Objective, policy: Any = None) -> Tensor | None:
    """Logits of the frozen `policy`, or of the base for None; None if the objective does not need them."""
    if policy is not None:
        return losses_of(policy, batch)[1]
    if not objective.needs_base:
        return None
    with model.disable_adapter():
        return losses_of(model, batch)[1]


def before_losses(
    model: Any, batches: Sequence[MicroBatch], objective: Objective, policy: Any = None, masks: Masks | None = None
) -> tuple[list[Tensor | None], Tensor | None]:
    """(`base_logits` of each batch; KTO's reference point, the mean gain of all their other rows, or the quantile of
    entropies, or what is `said` of pairs, or None). masks: as of `accumulate`.
    """
    rows, point = [], None
    if isinstance(objective, Distill) and objective.context is not None:  # the other rows are what a teacher sees
        of_teacher = [batch.other for batch in batches if batch.other is not None]
        return [base_logits(model, other, objective, policy) for other in of_teacher], None
    for batch in batches:
        other = batch.other
        if other is None:
            continue
        base = base_logits(model, other, objective, policy)
        assert base is not None
        with torch.no_grad(), lift(next(model.parameters()).dtype == torch.float64):
            rows.append(gained(losses_of(model, other)[1], base, other))
    bases = [base_logits(model, batch, objective, policy) for batch in batches]
    in_order = isinstance(objective, Dpo) and objective.is_of_step
    if in_order or getattr(objective, "top_entropy", 1.0) < 1:
        for batch, base in zip(batches, bases, strict=True):
            with masks.of_batch(batch) if masks is not None else contextlib.nullcontext(), torch.no_grad():
                logits = losses_of(model, batch)[1]
            with lift(logits.dtype == torch.float64):
                of_pairs = said(objective, logits, base, batch)
                rows.append(entropies(logits[batch.labels != UNTRAINED]) if of_pairs is None else of_pairs)
        point = torch.cat(rows) if in_order else least_entropy(objective, torch.cat(rows))
    elif rows:
        point = torch.cat(rows).mean().clamp(min=0)
    return bases, point


def accumulate(
    model: nn.Module,
    batches: Sequence[MicroBatch],
    settings: Training,
    *,
    before: tuple[Sequence[Tensor | None], Tensor | None] | None = None,
    masks: Masks | None = None,
) -> tuple[float, float | None]:
    """Accumulate the gradient of the mean loss over `batches`, load balancing included, in the factors' `.grad`.
    Returns (the loss without load balancing, the load-balancing loss).

    before: `before_losses` of the batches, if already known. masks: dropout masks; None if the model has no dropout.
    """
    objective, coef = settings.objective, settings.router_aux_loss_coef
    bases, point = before or before_losses(model, batches, objective, masks=masks)
    number = 0
    routed: list[tuple[Tensor, ...]] | None = [] if coef else None
    sums: list[Tensor] = []
    texts: list[Tensor] = []
    for batch, base in zip(batches, bases, strict=True):
        with masks.of_batch(batch) if masks is not None else contextlib.nullcontext():
            each, _ = losses_of(model, batch, objective=objective, base=base, point=point, routed=routed)
        if isinstance(objective, Embed):
            texts.append(each)
            continue
        number += len(each)
        sums.append(each.sum())
        if routed is None:
            sums[-1].backward()
    if isinstance(objective, Embed):  # one loss for all, of one batch of all
        with lift(next(model.parameters()).dtype == torch.float64):
            each = contrast(objective, torch.cat(texts), batches[0].each)
        number, sums = len(each), [each.sum()]
        sums[0].backward()
    number = number or 1  # all rollouts of the step are masked: of loss 0
    aux = None
    if routed is not None:  # computed over all micro-batches together, so one backward for all
        with lift(next(model.parameters()).dtype == torch.float64):
            inner = model.get_base_model()  # type: ignore[operator]
            balance = load_balancing_loss(inner, routed, [batch.attention_mask for batch in batches])
            (torch.stack(sums).sum() + coef * number * balance).backward()
        aux = float(balance.detach())
    has_images = any("pixel_values" in batch.more for batch in batches)
    for name, parameter in trainable(model).items():
        if parameter.grad is None and batches[0].is_of_images and not has_images:
            continue  # a vision part, in a step that has none
        if parameter.grad is None:
            given = f"an adapter on {name.rpartition('.')[0]}"
            rule = "one process gives it no gradient: text does not pass through it"
            raise UnsupportedError(given, rule, "leave it out with exclude_modules")
        parameter.grad /= number
    return sum(float(each.detach()) for each in sums) / number, aux


def train(model: nn.Module, steps: Iterable[list[MicroBatch]], settings: Training, policy: Any = None) -> list[float]:
    """AdamW over `steps`, each a list of micro-batches; returns the loss of each step. policy: `frozen_policy`."""
    masks = Masks(model, seed=settings.seed)
    add_noise(model, masks, alpha=settings.neftune_alpha)
    optimizer = make_optimizer(model, settings)
    losses = []
    for step, (batches, rate) in enumerate(zip(steps, rates_of(settings), strict=False)):
        masks.step = step
        optimizer.zero_grad(set_to_none=True)
        before = before_losses(model, batches, settings.objective, policy, masks)
        loss, _ = accumulate(model, batches, settings, before=before, masks=masks)
        losses.append(loss)
        if settings.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(list(trainable(model).values()), settings.max_grad_norm)
        set_rate(optimizer, rate)
        optimizer.step()
    return losses


def make_optimizer(model: nn.Module, settings: Training) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters, with LoRA+ in PEFT's parameter groups; LoRA-FA freezes every A.

    `share`: a group's rate / peak.
    """
    options: dict[str, Any] = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    optimizer: torch.optim.Optimizer
    kind: Any = torch.optim.AdamW
    if settings.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit  # takes seconds

        kind, options = AdamW8bit, options | {"min_8bit_size": settings.min_8bit_size}
    if settings.optimizer == "lora_fa":
        of: Any = model.peft_config["default"]  # type: ignore[index]
        optimizer = create_lorafa_optimizer(model, of.r, of.lora_alpha, settings.lr, weight_decay=settings.weight_decay)
        for group in optimizer.param_groups:
            group.update(betas=options["betas"], eps=settings.eps)
    elif settings.lora_plus_ratio is None:
        parameters = list(trainable(model).values())
        optimizer = kind(parameters, weight_decay=settings.weight_decay, **options)
    else:
        optimizer = create_loraplus_optimizer(
            model,
            kind,
            loraplus_lr_ratio=settings.lora_plus_ratio,
            loraplus_weight_decay=settings.weight_decay,
            loraplus_lr_embedding=settings.lora_plus_embedding_lr,
            **options,
        )
    others = [name for name in trainable(model) if ".lora_" not in name or name.endswith(".bias")]
    if not settings.decay_biases_and_norms and others:
        from transformers import Trainer  # takes a second

        undecayed = dict(model.named_parameters())
        for name in Trainer.get_decay_parameter_names(None, model):
            undecayed.pop(name, None)
        _leave_out(optimizer, {*undecayed.values()})
    for group in optimizer.param_groups:
        group["share"] = group["lr"] / settings.lr
    return optimizer


def _leave_out(optimizer: torch.optim.Optimizer, undecayed: Set[nn.Parameter]) -> None:
    """Exclude `undecayed` from weight decay."""
    for group in [*optimizer.param_groups]:
        kept, apart = list[nn.Parameter](), list[nn.Parameter]()
        for parameter in group["params"]:
            of = apart if parameter in undecayed else kept
            of.append(parameter)
        group["params"] = kept
        if apart:
            optimizer.add_param_group({**group, "params": apart, "weight_decay": 0.0})


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of this step, keeping the ratios between groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["share"]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by their names without PEFT's wrappers: `model.layers.0.mlp.up_proj.lora_A`."""
    wrapped = plain_names(model)
    return {_plain(name, wrapped): p for name, p in model.named_parameters() if p.requires_grad}


def token_rows(model: nn.Module) -> dict[str, list[int]]:
    """Name in `trainable` of rows of a vocabulary -> their tokens. A tied head has those of the embedding."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, TrainableTokensLayer) and not module.tied_adapter:
            found[f"{plain_name(path)}{ROWS}"] = module.token_indices["default"]
    return found


def _plain(name: str, wrapped: Mapping[str, str]) -> str:
    owner, _, part = name.removeprefix(PREFIX).rpartition(".lora_")
    if owner:
        name = f"{wrapped.get(owner, owner)}.lora_{part}"
    return plain_name(name)


def rates_of(settings: Training) -> list[float]:
    """Linear warm-up from its first part, then the schedule, whose end would be reached one step after the last."""
    lr, warmup, steps = settings.lr, settings.warmup_steps, np.arange(settings.steps)
    if settings.schedule == "cycle":
        at = sorted(settings.cycle)
        return list(np.interp(steps, at, [settings.cycle[step] for step in at]).tolist())
    rates = settings.min_lr + (lr - settings.min_lr) * _left(settings)
    first = 0 if settings.warmup_from_zero else 1
    return list(np.where(steps < warmup, lr * (steps + first) / max(1, warmup), rates).tolist())


def _left(settings: Training) -> np.ndarray:
    """What is left, in each step, of the way from the peak rate to the last one; unused during the warm-up."""
    warmup, steps = settings.warmup_steps, np.arange(settings.steps)
    after, number, start = np.maximum(steps - warmup, 0), max(1, len(steps) - warmup), max(1, warmup)
    # Of these two transformers' own functions are the reference: rounding decides in which step a restart is.
    if settings.schedule == "cosine_with_restarts":
        return _theirs(settings, num_cycles=settings.num_cycles)
    if settings.schedule == "polynomial":
        return _theirs(settings, lr_end=0.0, power=settings.power)
    scale, decay = settings.timescale or start, max(1, settings.decay_steps)
    decayed = np.maximum(after - (number - decay), 0) / decay
    courses = {"linear": 1 - decayed, "cosine": (1 + np.cos(np.pi * decayed)) / 2, "1-sqrt": 1 - np.sqrt(decayed)}
    found: dict[str, np.ndarray] = {
        "constant": after**0,
        "linear": 1 - after / number,
        "cosine": (1 + np.cos(np.pi * after / number)) / 2,
        "cosine_of_run": (1 + np.cos(np.pi * steps / max(1, len(steps)))) / 2,
        "inverse_sqrt": np.sqrt(scale / (scale + after)),
        "warmup_stable_decay": courses[settings.decay_type],
    }
    return found[settings.schedule]


def _theirs(settings: Training, **own: float) -> np.ndarray:
    """The rates of transformers' schedule of this name with a peak of 1 and its options `own`."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    lengths = {"num_warmup_steps": settings.warmup_steps, "num_training_steps": settings.steps}
    scheduler = get_scheduler(settings.schedule, optimizer, **lengths, scheduler_specific_kwargs=own)
    return np.array([scheduler.lr_lambdas[0](step) for step in range(settings.steps)])


def reference_run(
    base: Base,
    settings: Training,
    data: TokenizedDataset,
    *,
    pad_token_id: int,
    adapter: str | Path,
    out: str | Path,
    compared_with: str | Path | None = None,
    dropouts: Collection[str] = (),
) -> list[float]:
    """A whole run on one process: start from `adapter`, save with peft to `out`, return the losses.

        reference_run(Base("model", dtype="float64"), Training(steps=3), data, pad_token_id=0, adapter="a", out="b")

    The sequences are the run's; everything else is transformers, peft and torch. compared_with: folder of the frozen
    adapter that the objective compares with; None: the base, or nothing. dropouts: see `reference_model`.
    """
    options: dict[str, Any] = {"objective": settings.objective, "pad": pad_token_id}
    model = reference_model(base, adapter, dropouts=dropouts, **options)
    policy = frozen_policy(base, compared_with, **options)
    if policy is None:
        policy = base_beside_biases(base, adapter, **options)
    if isinstance(settings.objective, Distill) and settings.objective.folder is not None:
        policy = teacher_model(base, settings.objective.folder)
    batches = (micro_batches_of(data, settings, step, pad_token_id=pad_token_id) for step in range(settings.steps))
    freeze_outside_pieces(model, own_words(adapter).get("pieces", {}))
    losses = train(model, batches, settings, policy)
    unshare_adapters(model)
    model.save_pretrained(str(out), save_embedding_layers=False)
    return losses


def freeze_outside_pieces(model: nn.Module, pieces: Mapping[str, Sequence[str]]) -> None:
    """Keep B zero outside the blocks of an adapter on pieces, by masking its gradient."""
    stacks, config = adapted_stacks(model), model.get_base_model().config  # type: ignore[operator]
    for name, parameter in trainable(model).items():
        module, _, part = name.rpartition(".lora_")
        stack = stacks.get(module)
        if part == output_side(stack) and (names := pieces_of(module, pieces)):
            mask = mask_of(config, module, names, parameter.shape, stack).to(parameter)
            parameter.register_hook(lambda grad, mask=mask: grad * mask)


def own_words(adapter: str | Path) -> dict[str, Any]:
    """meshlora's own metadata in an adapter folder: its pieces, and whether experts share it."""
    file = Path(adapter) / "meshlora.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def scalings(model: nn.Module) -> dict[str, float]:
    """Module -> PEFT's scale of its adapter."""
    wrapped, found = plain_names(model), {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer) and "default" in module.scaling:
            name = path.removeprefix(PREFIX)
            found[wrapped.get(name, name)] = float(module.scaling["default"])
    return found
