"""What five trainers inherit from transformers' arguments: sizes, length, rates, saving, evaluation, device.

Owns: keys that are computed from several. Does not own: names of arguments that each trainer has for itself; it says
them to the functions here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshlora.run.config.foreign.trainers import OPTIMIZERS, SCHEDULES
from meshlora_extra.importing.draft import Draft
from meshlora_ground.errors import UserError

_LONGEST_TIMEOUT_S = 10**7


def sizes(draft: Draft, name: str, *, default: int = 1, accumulation: int = 1) -> None:
    """Sizes per process, the value of `name`, as those of all together. accumulation: where none is given."""
    micro, processes = int(draft.take(name, default=default)), draft.num_processes
    times = int(draft.take("gradient_accumulation_steps", default=accumulation))
    product = f"{micro} x {times} x {processes} process{'es' if processes > 1 else ''}"
    why = f"{product}: {name} x gradient_accumulation_steps x processes"
    draft.put("train.batch_size", micro * times * processes, why)
    draft.put("train.micro_batch_size", micro, "at once on one process")


def length(draft: Draft, epochs: Any, steps: Any, *, of_epochs: str) -> None:
    """Epochs, or steps, which win where they are above 0."""
    if steps is not None and int(steps) > 0:
        draft.put("train.steps", int(steps), "max_steps, which wins over epochs")
    else:
        draft.put("train.epochs", _plain(float(epochs)), of_epochs)


def _plain(value: float) -> float | int:
    """A whole number without its point."""
    return int(value) if value == int(value) else value


def rate(draft: Draft, *, name: str = "learning_rate", default: float | None = None) -> float:
    """The peak rate, of the recipe or of its trainer."""
    lr = draft.take(name)
    if lr is None:
        lr, why = default, f"the default of {draft.title}"
    else:
        why = name
    if lr is None:
        raise draft.refuse(name, "this key is required there, too", f"give {name}")
    draft.put("train.lr", float(lr), why)
    return float(lr)


def warmup(draft: Draft, *, ratio: Any = None, ratio_why: str = "") -> None:
    """Warm-up in steps or as a share of them; the first rate is 0 there. ratio: where the recipe says nothing."""
    steps, share, why = draft.take("warmup_steps"), draft.take("warmup_ratio"), ""
    if steps is not None and 0 < float(steps) < 1:
        share, steps, why = float(steps), None, "warmup_steps below 1, a share of the steps"
    if steps:
        draft.put("train.warmup_steps", int(steps), "warmup_steps")
    elif share:
        draft.put("train.warmup_ratio", float(share), why or "warmup_ratio")
    elif ratio and steps is None and share is None:
        draft.put("train.warmup_ratio", ratio, ratio_why)
    else:
        return
    draft.put("train.warmup_from_zero", True, f"as {draft.title}: the first rate is 0")


def schedule(draft: Draft, whose: str, lr: float, *, default: str) -> None:
    """The schedule by its name, the value of `whose`, with the options that transformers gives it."""
    name = draft.take(whose, default=default)
    given = draft.take("lr_scheduler_kwargs") or draft.under("lr_scheduler_kwargs")
    options = dict(given) if isinstance(given, dict) else {}
    ours = SCHEDULES.get(str(name).lower())
    if ours is None:
        draft.lose(whose, name, "no schedule here is that")
        return
    draft.put("train.schedule", ours, whose)
    if ours == "cosine_with_restarts":
        draft.put("train.num_cycles", int(options.pop("num_cycles", 1)), "num_cycles")
    elif ours == "polynomial":
        draft.put("train.power", float(options.pop("power", 1.0)), "power")
        draft.put("train.min_lr", float(options.pop("lr_end", 1e-7)), "lr_end")
    elif ours == "warmup_stable_decay":
        draft.put("train.decay_steps", int(options.pop("num_decay_steps", 0)), "num_decay_steps")
    if (least := options.pop("min_lr", None)) is not None:
        draft.put("train.min_lr", float(least), "min_lr")
    for ratio in ("min_lr_rate", "min_lr_ratio"):
        if (share := options.pop(ratio, None)) is not None:
            draft.put("train.min_lr", product(float(share), lr), f"{ratio} x the peak")
    for key, value in options.items():
        draft.lose(f"lr_scheduler_kwargs.{key}", value, "train.schedule has no such option")


def product(share: float, lr: float) -> float:
    """A share of a rate as one would write it."""
    return float(f"{share * lr:.10g}")


def optimizer(draft: Draft, name: Any, *, whose: str) -> None:
    ours = OPTIMIZERS.get(str(name).lower())
    if ours is None:
        draft.lose(whose, name, "the optimizers here are adamw, adamw_8bit and lora_fa")
    else:
        draft.put("train.optimizer", ours, f"{whose}: {name}")


def betas(draft: Draft, given: Any, *, whose: str) -> None:
    """AdamW's two, as a list."""
    if given is None:
        return
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(each, int | float) for each in given):
        raise draft.refuse(f"{whose}: {given}", "it is a list of two numbers there")
    draft.put("train.beta1", float(given[0]), whose)
    draft.put("train.beta2", float(given[1]), whose)


def saving(draft: Draft, *, default_steps: int | None = 500) -> None:
    """When checkpoints are written. default_steps: of a strategy of steps without their number."""
    strategy = str(draft.take("save_strategy", default="steps")).lower()
    steps, limit = draft.take("save_steps"), draft.take("save_total_limit")
    if strategy == "epoch":
        draft.put("train.save_every", "epoch", "save_strategy")
    elif strategy == "no":
        draft.put("train.save_every", 0, "save_strategy: at the end only")
    elif strategy == "best":
        draft.put("train.keep_best", True, "save_strategy")
    elif steps is not None:
        draft.put("train.save_every", *_interval(draft, steps, "save_steps"))
    elif default_steps is not None:
        draft.put("train.save_every", default_steps, f"the default of {draft.title}")
    if limit and draft.values.get("train.save_every"):
        draft.put("train.keep_last", int(limit), "save_total_limit")


def _interval(draft: Draft, steps: Any, whose: str) -> tuple[Any, str]:
    """Steps between two events; below 1 a share of all, as parts of an epoch."""
    number = float(steps)
    if number >= 1:
        return int(number), whose
    epochs = float(draft.values.get("train.epochs", 0))
    if not epochs:
        every = max(1, -(-int(draft.values["train.steps"] * number * 1e6) // 10**6))
        return every, f"{whose}: {steps} of all steps"
    parts = 1 / (number * epochs)
    if parts < 1 or abs(parts - round(parts)) > 1e-6:
        draft.say(f"{whose}: {steps} of all steps is rounded to whole parts of an epoch")
    return part_of_epoch(max(1, round(parts))), f"{whose}: {steps} of all steps"


def part_of_epoch(parts: int) -> str:
    """Each of so many parts of an epoch, as our keys have it."""
    return "epoch" if parts == 1 else f"epoch/{parts}"


def evaluation(draft: Draft, *, default_steps: Any = None, is_on: bool = False) -> None:
    """When it is evaluated, if there are data for it. default_steps: of a strategy of steps without their number."""
    strategy = draft.take("eval_strategy", "evaluation_strategy")
    steps = draft.take("eval_steps", default=default_steps)
    if isinstance(strategy, bool):
        strategy = "steps" if strategy else "no"
    strategy = str(strategy or ("steps" if is_on else "no")).lower()
    if strategy == "no":
        if "data.eval" in draft.values and not is_on:
            draft.say("no evaluation strategy is given: data.eval is scored at the end only")
        return
    if "data.eval" not in draft.values:
        draft.idle.append("eval_steps")
        return
    if strategy == "epoch":
        draft.put("train.eval_every", "epoch", "eval_strategy")
    elif steps is not None:
        draft.put("train.eval_every", *_interval(draft, steps, "eval_steps"))
    else:
        draft.put("train.eval_every", draft.take("logging_steps", default=500), "eval_strategy: as logging_steps")


def keeping(draft: Draft) -> None:
    """The best checkpoint, and an early end."""
    best = draft.take("load_best_model_at_end")
    patience = draft.take("early_stopping_patience", "early_stopping_steps", "early_stop_interval")
    if (best or patience) and not draft.values.get("train.eval_every"):
        draft.say("load_best_model_at_end and early stopping go by evaluations, of which there are none")
        return
    if best:
        draft.put("train.keep_best", True, "load_best_model_at_end; the result stays the last adapter")
    if patience:
        draft.put("train.early_stopping", {"patience": int(patience)}, "early_stopping_patience")


def dtype(draft: Draft, *, default: str, whose: str = "bf16") -> None:
    """The dtype of the base. default: where neither bf16 nor fp16 is on."""
    bf16, fp16 = draft.take("bf16", "bfloat16"), draft.take("fp16", "float16")
    if bf16 == "auto" or is_true(bf16):
        draft.put("model.dtype", "bfloat16", "bf16" + (": auto, on GPUs that have it" if bf16 == "auto" else ""))
    elif is_true(fp16):
        draft.put("model.dtype", "float16", "fp16; the loss is scaled there as here")
    else:
        draft.put("model.dtype", default, f"{whose} is not set")


def is_true(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "yes", "1")


def recompute(draft: Draft, *names: str, default: bool | None = None) -> None:
    """Whether activations are recomputed, by the first of `names` that is given."""
    given, whose = draft.take(*names, default=default), names[0]
    if given == "offload":
        draft.say(f"{whose}: offload: activations stay on the device; no number changes")
    is_on = given not in (None, False) and str(given).lower() not in ("false", "none", "0")
    draft.put("train.recompute", "full" if is_on else "none", whose)


def logging(draft: Draft, name: str = "logging_steps") -> None:
    """Steps between printed lines, of which 0 and a share of the steps say nothing here."""
    steps = draft.take(name)
    if steps is not None and float(steps) >= 1:
        draft.put("train.log_every", int(steps), name)
    elif steps is not None:
        draft.idle.append(name)


def tracking(draft: Draft, given: Any, *, whose: str) -> None:
    """The trackers that there are here; others are named, and change no number."""
    known = ("wandb", "tensorboard", "mlflow", "trackio")
    names = draft.names(given, whose) if isinstance(given, list) else str(given or "none").replace(",", " ").split()
    found = [name for name in names if name in known]
    if found:
        draft.put("train.track", found, whose)
    for name in set(names) - set(found) - {"none", "all"}:
        draft.idle.append(f"{whose}: {name}")


def timeout(draft: Draft) -> None:
    if (seconds := draft.take("ddp_timeout")) is not None:
        shorter = min(float(seconds), _LONGEST_TIMEOUT_S)
        draft.put("train.timeout_s", _plain(shorter), "ddp_timeout" + (", cut" if shorter < float(seconds) else ""))


def device(draft: Draft) -> None:
    """CPU, and the topology of processes, sharded where it is so there."""
    if is_true(draft.take("use_cpu", "no_cuda")):
        draft.put("device", "cpu", "use_cpu")
    sharded = draft.has("fsdp", "fsdp_config", "fsdp_version") or draft.under("fsdp_config")
    stage = str(draft.take("deepspeed", default=""))
    draft.take("fsdp", "fsdp_config", "fsdp_version")
    is_zero3 = any(each in stage.lower() for each in ("zero3", "z3", "stage3", "stage_3"))
    if stage and not is_zero3 and not sharded and draft.num_processes > 1:
        draft.say("deepspeed: the base is whole on each rank, as with ZeRO 1 and 2; dp_shard is ZeRO 3")
    if draft.num_processes > 1 and "topology" not in draft.values:
        shard = ",dp_shard" if sharded or is_zero3 else ""
        draft.put("topology", f"dp={draft.num_processes}{shard}", "processes" + (", sharded as there" if shard else ""))
    elif (sharded or is_zero3) and draft.num_processes == 1:
        draft.say("sharding over one process is none; give --nproc N, or num_processes in an accelerate file")


def own_topology(draft: Draft, axes: dict[str, str]) -> None:
    """Note splits of tensors or sequences, which sizes depend on. axes: their key -> our axis."""
    for name, ours in axes.items():
        if int(draft.take(name, default=1)) > 1:
            draft.lose(name, draft.recipe.given[name], f"write topology: {ours}=N, and divide train.batch_size by it")


def held_out(draft: Draft, name: str, *, is_number: bool) -> None:
    """The share of `data.train` that is scored, or the number of its rows."""
    share = float(draft.take(name))
    draft.put("data.eval", int(share) if is_number else share, f"{name}; drawn by the seed, not the same rows as there")


def makes_rollouts(draft: Draft, given: str) -> UserError:
    """The error for a recipe of reinforcement learning."""
    return draft.refuse(given, "rollouts are made by meshlora rl, whose run file has other keys", "docs/rl.md")


def arguments(draft: Draft, usual: Mapping[str, Any], *, ratio_why: str = "", **evaluated: Any) -> None:
    """All that has the same name in every trainer of transformers' arguments, but data.

    usual: the defaults of the trainer. ratio_why: of its warm-up. evaluated: of `evaluation`.
    """
    micro, times = usual["per_device_train_batch_size"], usual.get("gradient_accumulation_steps", 1)
    sizes(draft, "per_device_train_batch_size", default=micro, accumulation=times)
    lr = rate(draft, default=usual["learning_rate"])
    length(draft, draft.take("num_train_epochs", default=3), draft.take("max_steps"), of_epochs="num_train_epochs")
    warmup(draft, ratio=usual.get("warmup_ratio"), ratio_why=ratio_why)
    evaluation(draft, **evaluated)
    optimizer(draft, draft.take("optim", default=usual.get("optim", "adamw_torch")), whose="optim")
    schedule(draft, "lr_scheduler_type", lr, default=draft.recipe.trainer.defaults["train.schedule"])
    saving(draft)
    logging(draft)
    keeping(draft)
    timeout(draft)
    device(draft)
    draft.take("do_eval")
    tracking(draft, draft.take("report_to", default="none"), whose="report_to")
    if smoothing := draft.take("label_smoothing_factor"):
        draft.put("train.objective", {"kind": "sft", "label_smoothing": float(smoothing)}, "label_smoothing_factor")
    draft.copy("train.seed", "seed", "data_seed")
