"""torchtune's recipes: keys that are computed."""

from __future__ import annotations

from meshlora_extra.importing import loop, sources
from meshlora_extra.importing.draft import Draft

# Their builder of a dataset -> (its source, format here, prompt style, whether prompts are trained, columns).
_Built = tuple[str | None, str | None, str | None, bool, dict[str, str]]
_DATASETS: dict[str, _Built] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca", "alpaca", True, {}),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca", "alpaca", True, {}),
    "chat_dataset": (None, None, None, False, {}),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt", None, False, {}),
    "instruct_dataset": (None, "alpaca", None, False, {"instruction": "input", "output": "output"}),
    "samsum_dataset": ("Samsung/samsum", "alpaca", None, False, {"instruction": "dialogue", "output": "summary"}),
    "text_completion_dataset": (None, "text", None, True, {}),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", "text", None, True, {"text": "page"}),
    "preference_dataset": (None, "preference", None, False, {}),
}
_LINEARS = {"output_proj": "o_proj"}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def rules(draft: Draft) -> None:
    builder = str(draft.take("model._component_", default="")).rpartition(".")[2]
    if "lora" not in builder:
        raise draft.refuse(f"model._component_: {builder}", "the recipe trains all parameters", "take its LoRA recipe")
    if "ppo" in str(draft.recipe.given.get("loss._component_", "")).lower() or draft.has("reward_functions"):
        raise loop.makes_rollouts(draft, "PPO or GRPO")
    path = draft.take("checkpointer.checkpoint_dir")
    draft.put("model.path", str(path).rstrip("/"), f"checkpointer.checkpoint_dir; the model is {builder}")
    quantized = loop.is_true(draft.take("model.quantize_base")) or builder.startswith("qlora")
    if quantized:
        draft.put("model.quantization", "nf4", builder)
        draft.lose("model.quantize_base", True, "torchao's nf4 quantises its scales, too; bitsandbytes' here does not")
    _dtype(draft)
    is_pairs = _objective(draft)
    _data(draft, is_pairs)
    _loop(draft)
    _adapter(draft)


def _dtype(draft: Draft) -> None:
    given = str(draft.take("dtype", default="bf16"))
    draft.put("model.dtype", _DTYPES.get(given, "auto"), "dtype")
    if given == "bf16":
        draft.lose("dtype of factors", "bf16", "factors, gradients and moments are float32 here, bfloat16 there")


def _objective(draft: Draft) -> bool:
    """Whether it is of pairs."""
    name = str(draft.take("loss._component_", default="")).rpartition(".")[2]
    beta, smoothing = draft.take("loss.beta"), draft.take("loss.label_smoothing")
    if name == "DPOLoss":
        sources.preferences(draft, "dpo", beta, label_smoothing=smoothing or None)
        return True
    if name in ("RSOLoss", "SimPOLoss", "IPOLoss"):
        draft.lose("loss._component_", name, "of pairs there is dpo with the sigmoid loss, and orpo")
        sources.preferences(draft, "dpo", beta)
        return True
    return False


def _data(draft: Draft, is_pairs: bool) -> None:
    name = str(draft.take("dataset._component_", default="")).rpartition(".")[2]
    built = _DATASETS.get(name)
    own, files = draft.take("dataset.source"), draft.take("dataset.data_files")
    if built is None:
        why = "its rows are made by code; export them, or write a data.map: file.py:function"
        draft.lose("dataset._component_", name, why)
        built = (None, None, None, False, {})
    usual, format, style, on_prompt, columns = built
    path = files if files and own in (None, "json", "csv", "parquet", "text") else own or usual or name
    found = _columns(draft, columns)
    source = sources.one(path, split=draft.take("dataset.split"), columns=found, format=format)
    sources.put_all(draft, "data.train", [source], "dataset")
    if style:
        draft.put("data.prompt", style, name)
        draft.say("data.prompt: the style stands inside the model's chat markers there, and is plain text here")
    chat = draft.take("dataset.conversation_style")
    if chat is not None:
        draft.put("data.format", "sharegpt" if chat == "sharegpt" else "messages", "dataset.conversation_style")
    trained = draft.take("dataset.train_on_input")
    masking = draft.take("dataset.masking_strategy")
    if masking is not None:
        trained = masking == "train_on_all"
        if masking == "train_on_last":
            trained = None
            draft.put("data.train_on", "last", "dataset.masking_strategy")
    if not is_pairs and "data.train_on" not in draft.values:
        is_all = on_prompt if trained is None else loop.is_true(trained)
        why = "dataset.train_on_input" if trained is not None else f"the default of {name}"
        draft.put("data.train_on", "everything" if is_all else "all", why)
    if loop.is_true(draft.take("dataset.packed")):
        draft.put("data.packing", "rows", "dataset.packed; a sequence longer than a row is an error there")
    if draft.copy("data.max_length", "tokenizer.max_seq_len", "max_seq_len"):
        draft.say("tokenizer.max_seq_len: the last token of a cut sequence is replaced by its end there")
    if (template := draft.take("tokenizer.prompt_template")) is not None:
        draft.lose("tokenizer.prompt_template", template, "data.prompt has styles by name")
    _validation(draft)


def _columns(draft: Draft, usual: dict[str, str]) -> dict[str, str]:
    given = draft.take("dataset.column_map") or draft.under("dataset.column_map")
    column, talk = draft.take("dataset.column"), draft.take("dataset.conversation_column")
    found = dict(usual)
    if column:
        found = {"text": column}
    if talk:
        kind = "conversations" if draft.recipe.given.get("dataset.conversation_style") == "sharegpt" else "messages"
        found = {} if talk == kind else {kind: talk}
    names = {name: name for name in ("output", "instruction", "chosen", "rejected", "prompt")}
    names["input"] = "instruction" if usual else "input"
    for theirs, column in given.items():
        if theirs in names:
            found[names[theirs]] = column
        else:
            draft.lose(f"dataset.column_map.{theirs}", column, "rows here have no such field")
    return found


def _validation(draft: Draft) -> None:
    name = str(draft.take("dataset_val._component_", default="")).rpartition(".")[2]
    split, own = draft.take("dataset_val.split"), draft.take("dataset_val.source")
    every = draft.take("run_val_every_n_steps")
    if not name:
        return
    path = own or (_DATASETS.get(name) or (None,))[0] or name
    sources.put_all(draft, "data.eval", [sources.one(path, split=split or "train")], "dataset_val")
    if every:
        draft.put("train.eval_every", int(every), "run_val_every_n_steps")


def _loop(draft: Draft) -> None:
    loop.sizes(draft, "batch_size")
    epochs, most = draft.take("epochs", default=1), draft.take("max_steps_per_epoch")
    if most is not None:
        draft.put("train.steps", int(epochs) * int(most), "epochs x max_steps_per_epoch, if an epoch has as many")
    else:
        draft.put("train.epochs", int(epochs), "epochs; their steps are rounded down there")
    _optimizer(draft)
    _curve(draft)
    _events(draft)


def _optimizer(draft: Draft) -> None:
    name = str(draft.take("optimizer._component_", default="torch.optim.AdamW"))
    known = {"torch.optim.AdamW": "adamw", "bitsandbytes.optim.PagedAdamW": "adamw"}
    known |= dict.fromkeys(("bitsandbytes.optim.PagedAdamW8bit", "bitsandbytes.optim.AdamW8bit"), "adamw_8bit")
    if name in known:
        draft.put("train.optimizer", known[name], f"optimizer: {name}")
    else:
        draft.lose("optimizer._component_", name, "the optimizers here are adamw, adamw_8bit and lora_fa")
    loop.rate(draft, name="optimizer.lr", default=1e-3)
    loop.betas(draft, draft.take("optimizer.betas"), whose="optimizer.betas")


def _curve(draft: Draft) -> None:
    warm = draft.take("lr_scheduler.num_warmup_steps", "num_warmup_steps")
    curve = draft.take("lr_scheduler._component_")
    if curve is not None:
        if not str(curve).endswith("get_cosine_schedule_with_warmup"):
            draft.lose("lr_scheduler._component_", curve, "no schedule here is that")
        draft.put("train.schedule", "cosine", "lr_scheduler")
        if warm:
            draft.put("train.warmup_steps", int(warm), "lr_scheduler.num_warmup_steps")
            draft.put("train.warmup_from_zero", True, "as torchtune: the first rate is 0")


def _events(draft: Draft) -> None:
    clip = draft.take("clip_grad_norm")
    draft.put("train.max_grad_norm", clip or 0, "clip_grad_norm" + ("" if clip else ": null, no clipping"))
    if not draft.copy("train.seed", "seed"):
        draft.say("seed: another each time there; here 0 unless train.seed says otherwise")
    loop.recompute(draft, "enable_activation_checkpointing", default=False)
    loop.logging(draft, "log_every_n_steps")
    logger = str(draft.take("metric_logger._component_", default="")).rpartition(".")[2]
    trackers = {"WandBLogger": ["wandb"], "TensorBoardLogger": ["tensorboard"]}.get(logger, [])
    loop.tracking(draft, trackers, whose="metric_logger")
    loop.own_topology(draft, {"tensor_parallel_dim": "tp"})
    loop.device(draft)


def _adapter(draft: Draft) -> None:
    given = draft.take("model.lora_attn_modules", default=[])
    names = [_LINEARS.get(name, name) for name in draft.names(given, "model.lora_attn_modules")]
    if loop.is_true(draft.take("model.apply_lora_to_mlp")):
        names += ["gate_proj", "up_proj", "down_proj"]
    if loop.is_true(draft.take("model.apply_lora_to_output")):
        names.append("lm_head")
    draft.put("lora.target_modules", names, "model.lora_attn_modules, apply_lora_to_mlp, apply_lora_to_output")
    for name, ours in {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}.items():
        draft.copy(f"lora.{ours}", f"model.{name}")
