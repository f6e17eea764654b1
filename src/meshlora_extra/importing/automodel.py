"""NeMo AutoModel's recipes: keys that are computed."""

from __future__ import annotations

from meshlora_extra.importing import loop, sources
from meshlora_extra.importing.draft import Draft

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DTYPES |= {name: name for name in _DTYPES.values()}
_AXES = {"tp_size": "tp", "cp_size": "cp", "pp_size": "pp", "ep_size": "ep"}


def rules(draft: Draft) -> None:
    if not any(name.startswith("peft.") for name in draft.recipe.given):
        raise draft.refuse("no peft", "the recipe trains all parameters", "take its PEFT recipe")
    draft.put("model.path", draft.take("model.pretrained_model_name_or_path"), "model.pretrained_model_name_or_path")
    given = str(draft.take("model.torch_dtype", default="auto")).removeprefix("torch.")
    draft.put("model.dtype", _DTYPES.get(given, "auto"), "model.torch_dtype, the checkpoint's by default")
    _data(draft)
    _length(draft)
    _rates(draft)
    _adapter(draft)
    _topology(draft)
    if draft.take("checkpoint.enabled") is False:
        draft.put("train.save_every", 0, "checkpoint.enabled: false")
    if not draft.copy("train.seed", "seed") and draft.has("rng.seed"):
        draft.say("rng.seed: the fine-tuning recipe reads the seed at the top alone, which is 42 without it")
    if (minutes := draft.take("dist_env.timeout_minutes")) is not None:
        draft.put("train.timeout_s", 60 * int(minutes), "dist_env.timeout_minutes")


def _data(draft: Draft) -> None:
    kind = str(draft.take("dataset._target_", default="")).rpartition(".")[2]
    path = draft.take("dataset.dataset_name", "dataset.path_or_dataset", "dataset.path_or_dataset_id")
    limit = draft.take("dataset.limit_dataset_samples", "dataset.num_samples_limit")
    if kind != "ChatDataset":
        why = "its prompts are made in code; export them, or write a data.map: file.py:function"
        draft.lose("dataset._target_", kind, why)
    found = sources.one(path, split=draft.take("dataset.split"), rows=f":{limit}" if limit else None)
    sources.put_all(draft, "data.train", [found], "dataset")
    for name, value in draft.under("dataset").items():
        if value is not None:
            draft.lose(f"dataset.{name}", value, "sources have no such option")
    tests = draft.under("validation_dataset")
    if tests:
        where = tests.get("dataset_name") or tests.get("path_or_dataset") or tests.get("path_or_dataset_id") or path
        count = tests.get("limit_dataset_samples") or tests.get("num_samples_limit")
        found = sources.one(where, split=tests.get("split"), rows=f":{count}" if count else None)
        sources.put_all(draft, "data.eval", [found], "validation_dataset")
    draft.put("data.train_on", "all", "answers, as there")
    if rows := draft.take("packed_sequence.packed_sequence_size"):
        draft.put("data.packing", "rows", "packed_sequence")
        draft.put("data.max_length", int(rows), "packed_sequence.packed_sequence_size")


def _length(draft: Draft) -> None:
    whole, micro = draft.take("step_scheduler.global_batch_size"), draft.take("step_scheduler.local_batch_size")
    if whole is None:
        raise draft.refuse("step_scheduler.global_batch_size", "this key is required there, too", "give it")
    draft.put("train.batch_size", int(whole), "step_scheduler.global_batch_size, global there, too")
    draft.put("train.micro_batch_size", int(micro or 1), "step_scheduler.local_batch_size")
    epochs, steps = draft.take("step_scheduler.num_epochs"), draft.take("step_scheduler.max_steps")
    if steps is not None:
        draft.put("train.steps", int(steps), "step_scheduler.max_steps")
        if epochs is not None:
            draft.say("step_scheduler: the smaller of num_epochs and max_steps counts there; here max_steps")
    else:
        draft.put("train.epochs", int(epochs or 10), "step_scheduler.num_epochs, 10 where neither is given")
    if (saves := draft.take("step_scheduler.ckpt_every_steps")) is not None:
        draft.put("train.save_every", int(saves), "ckpt_every_steps; also at the end of each epoch there")
    evals = draft.take("step_scheduler.val_every_steps")
    if evals is not None and "data.eval" in draft.values:
        draft.put("train.eval_every", int(evals), "val_every_steps")


def _rates(draft: Draft) -> None:
    name = str(draft.take("optimizer._target_", default="torch.optim.Adam")).rpartition(".")[2]
    decay, betas = float(draft.take("optimizer.weight_decay", default=0)), draft.take("optimizer.betas")
    lr = loop.rate(draft, name="optimizer.lr", default=1e-3)
    if name not in ("Adam", "AdamW", "FusedAdam"):
        draft.lose("optimizer._target_", name, "the optimizers here are adamw, adamw_8bit and lora_fa")
    elif name == "Adam" and decay:
        draft.lose("optimizer.weight_decay", decay, "with Adam it is part of the gradient; here it is of AdamW")
    why = f"optimizer: {name}" + ("" if decay else ", the same without weight_decay")
    draft.put("train.optimizer", "adamw", why)
    draft.put("train.weight_decay", decay, "optimizer.weight_decay")
    loop.betas(draft, betas, whose="optimizer.betas")
    draft.copy("train.max_grad_norm", "clip_grad_norm.max_norm", "max_grad_norm")
    if any(each.startswith("lr_scheduler.") for each in draft.recipe.given):
        _scheduled(draft, lr)


def _scheduled(draft: Draft, lr: float) -> None:
    style, least = draft.take("lr_scheduler.lr_decay_style", default="cosine"), draft.take("lr_scheduler.min_lr")
    warm = draft.take("lr_scheduler.lr_warmup_steps")
    if style not in ("cosine", "linear", "constant"):
        draft.lose("lr_scheduler.lr_decay_style", style, "no schedule here is that")
        return
    draft.put("train.schedule", style, "lr_scheduler.lr_decay_style")
    if style != "constant":
        last = least if least is not None else float(f"{0.01 * lr:.10g}")
        draft.put("train.min_lr", float(last), "lr_scheduler.min_lr, a hundredth of the rate by default")
    if warm is None:
        draft.put("train.warmup_ratio", 0.1, "the default there: a tenth of the steps, at most 1,000")
    elif warm:
        draft.put("train.warmup_steps", int(warm), "lr_scheduler.lr_warmup_steps")
    if warm != 0:
        draft.put("train.warmup_from_zero", True, "from a tenth of the rate there, from 0 here")
        draft.say("warm-up: from a tenth of the rate there, from 0 here")


def _adapter(draft: Draft) -> None:
    for name, ours in {"peft.dim": "r", "peft.alpha": "lora_alpha", "peft.dropout": "lora_dropout"}.items():
        draft.copy(f"lora.{ours}", name)
    names, every = draft.take("peft.target_modules", default="*_proj"), draft.take("peft.match_all_linear")
    if loop.is_true(every):
        draft.put("lora.target_modules", "all-linear", "peft.match_all_linear; the head, too, there")
    else:
        patterns = _patterns(draft.names(names, "peft.target_modules"))
        draft.put("lora.target_modules", patterns, "peft.target_modules, a wildcard there")
    first = str(draft.take("peft.lora_A_init", default="xavier"))
    if first != "kaiming":
        draft.lose("peft.lora_A_init", first, "A is drawn uniformly after Kaiming here, as in PEFT")
    dtype = draft.take("peft.lora_dtype", default="the base's")
    if draft.values.get("model.dtype") != "float32" and "32" not in str(dtype):
        draft.lose("peft.lora_dtype", dtype, "factors are float32 here")
    if draft.values.get("lora.lora_dropout") and draft.take("peft.dropout_position", default="post") == "post":
        draft.lose("peft.dropout_position", "post", "dropout is before the factors, as in PEFT")
    draft.read.add("peft.dropout_position")


def _patterns(names: list[str]) -> str | list[str]:
    """Wildcards as a regular expression; names without one as they are."""
    if not any("*" in name for name in names):
        return names
    parts = [name.replace(".", r"\.").replace("*", ".*") for name in names]
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"


def _topology(draft: Draft) -> None:
    parts, product = [], 1
    for theirs, ours in _AXES.items():
        size = draft.take(f"distributed.{theirs}", default=1)
        if isinstance(size, int) and size > 1:
            parts.append(f"{ours}={size}")
            product *= size if ours != "ep" else 1
    if loop.is_true(draft.take("distributed.sequence_parallel")) and "tp=" in ",".join(parts):
        parts.append("sp")
    strategy, dp = draft.take("distributed.strategy"), draft.num_processes // product
    if dp > 1:
        parts.insert(0, f"dp={dp}")
        if strategy == "fsdp2":
            parts.append("dp_shard")
    if parts:
        draft.put("topology", ",".join(parts), "distributed, and processes")
