"""axolotl's recipes: keys that are computed."""

from __future__ import annotations

import itertools
from typing import Any

from meshlora_extra.importing import loop, sources
from meshlora_extra.importing.draft import Draft

# Their type of rows -> (format here, prompt style); no value: read by the fields of the rows.
_TYPES: dict[str, tuple[str | None, str | None]] = {"alpaca": ("alpaca", "alpaca")}
_TYPES |= dict.fromkeys(("completion", "pretrain"), ("text", None))
_TYPES |= dict.fromkeys(("chat_template", "chat_template.default", "sharegpt"), (None, None))
_TRACKERS: dict[str, tuple[str, ...]] = {
    "wandb": ("use_wandb", "wandb_project"),
    "trackio": ("use_trackio", "trackio_project_name"),
}
_TRACKERS |= {"mlflow": ("use_mlflow",), "tensorboard": ("use_tensorboard",)}
_THINKING = ("field_thinking", "template_thinking_key", "split_thinking")
_WEIGHTS = ("message_field_training", "message_field_training_detail")
_RULES_OF_ROWS = {
    "roles": "roles are system, user, assistant and tool, as rows name them",
    **dict.fromkeys(_THINKING, "a thinking field is the template's own"),
    **dict.fromkeys(_WEIGHTS, "messages say what is trained by weight"),
    "train_on_eos": "the end of a trained turn is trained",
    "field_system": "a system turn is a message",
    "drop_system_message": "a system turn stays",
    "shards": "rows: a slice of a source is the nearest",
    "preprocess_shards": "",
}


def rules(draft: Draft) -> None:
    kind = draft.take("adapter")
    if kind is None and not draft.has("lora_model_dir"):
        raise draft.refuse("no adapter", "the recipe trains all parameters", "give adapter: lora in it, with lora_r")
    if kind not in ("lora", "qlora", None):
        raise draft.refuse(f"adapter: {kind}", "LoRA is all that is trained here", "give adapter: lora in it")
    _model(draft, str(kind))
    _data(draft)
    _objective(draft)
    _loop(draft)
    _adapter(draft)
    if "train.objective" in draft.values and draft.values["train.objective"]["kind"] != "orpo":
        sources.no_dropout(draft)


def _model(draft: Draft, kind: str) -> None:
    draft.put("model.path", draft.take("base_model"), "base_model")
    loop.dtype(draft, default="bfloat16")
    four, eight = draft.take("load_in_4bit"), draft.take("load_in_8bit")
    if loop.is_true(four) and kind == "qlora":
        sources.quantized(draft, "nf4", whose="load_in_4bit", nested=True)
    elif loop.is_true(four):
        draft.say("load_in_4bit: only adapter: qlora reads it there; the base is not quantised")
    elif loop.is_true(eight):
        sources.quantized(draft, "int8", whose="load_in_8bit")
    config, options = draft.take("model_quantization_config"), draft.under("model_quantization_config_kwargs")
    if config == "Mxfp4Config" and not options.get("dequantize"):
        sources.quantized(draft, "keep", whose="model_quantization_config")
    elif config and config != "Mxfp4Config":
        draft.lose("model_quantization_config", config, "model.quantization: keep reads checkpoints as they are")
    if draft.take("gptq"):
        sources.quantized(draft, "keep", whose="gptq")
    loop.recompute(draft, "gradient_checkpointing", "activation_checkpointing")


def _data(draft: Draft) -> None:
    given = draft.take("datasets")
    if given is None and (given := draft.take("pretraining_dataset")) is not None:
        draft.put("data.streaming", True, "pretraining_dataset")
        given = [{"path": given, "type": "pretrain"}] if isinstance(given, str) else given
    if not isinstance(given, list) or not given:
        raise draft.refuse("datasets", "it is a list of datasets", "give datasets: [{path: ..., type: ...}]")
    found = [_source(draft, f"datasets[{number}]", each) for number, each in enumerate(given)]
    sources.put_all(draft, "data.train", found, "datasets")
    if tests := draft.take("test_datasets"):
        found = [_source(draft, f"test_datasets[{number}]", each) for number, each in enumerate(tests)]
        sources.put_all(draft, "data.eval", found, "test_datasets")
    elif share := draft.take("val_set_size"):
        loop.held_out(draft, "val_set_size", is_number=share >= 1)
    draft.take("val_set_size")
    cut = str(draft.take("excess_length_strategy", default="drop"))
    if cut in ("drop", "truncate"):
        draft.put("data.too_long", cut, "excess_length_strategy" if cut != "drop" else "as there by default")
    elif cut == "raise":
        draft.put("data.too_long", "error", "excess_length_strategy")
    else:
        draft.lose("excess_length_strategy", cut, "data.too_long is truncate, drop, split or error")
    if loop.is_true(draft.take("sample_packing")):
        draft.put("data.packing", "rows", "sample_packing; incomplete last rows are left out there")
        draft.say(
            "sample_packing: a row there is micro_batch_size x sequence_len tokens, here sequence_len, as many "
            "rows a step: the same tokens"
        )
    else:
        draft.put("data.packing", "auto", "no sample_packing: a batch counts sequences")
    if (name := draft.take("chat_template")) is not None:
        sources.template(draft, name, whose="chat_template")
    _trained_on(draft)
    draft.take("special_tokens")  # null, where it is not a group
    for name, token in draft.under("special_tokens").items():
        if name in ("pad_token", "unk_token") or token is None:
            draft.idle.append(f"special_tokens.{name}")
        else:
            why = "the tokenizer's own are taken; set it in the tokenizer's files"
            draft.lose(f"special_tokens.{name}", token, why)


def _trained_on(draft: Draft) -> None:
    roles = draft.take("roles_to_train")
    if loop.is_true(draft.take("train_on_inputs")):
        draft.put("data.train_on", "everything", "train_on_inputs")
    elif roles and list(roles) != ["assistant"]:
        draft.put("data.train_on", list(roles), "roles_to_train")
    else:
        draft.put("data.train_on", "all", "answers, as there by default")


def _source(draft: Draft, where: str, given: Any) -> dict[str, Any]:
    """One of `datasets`."""
    entry = dict(given) if isinstance(given, dict) else {"path": given}
    path, files = entry.pop("path", None), entry.pop("data_files", None)
    if files and path in (None, "json", "csv", "parquet", "text"):
        path = files
    elif files:
        draft.lose(f"{where}.data_files", files, "a name of the hub is read by its splits; give the files themselves")
    if path is None:
        raise draft.refuse(f"{where}", "it has no path", "give path:")
    entry.pop("ds_type", None)
    columns = _columns(draft, where, entry)
    format = _format(draft, where, entry.pop("type", None))
    config, split, revision = (entry.pop(name, None) for name in ("name", "split", "revision"))
    found = sources.one(path, config=config, split=split, columns=columns, format=format, revision=revision)
    for key, value in entry.items():
        is_usual = (
            (key == "roles_to_train" and list(value) == ["assistant"])
            or (key == "train_on_eos" and value == "turn")
            or (key == "roles" and all(list(names) == [role] for role, names in value.items()))
        )
        if not is_usual and value not in (None, False, [], {}):
            draft.lose(f"{where}.{key}", value, _RULES_OF_ROWS.get(key, "sources have no such option"))
    return found


def _columns(draft: Draft, where: str, entry: dict[str, Any]) -> dict[str, str]:
    """Our names of columns, of the fields that a dataset names."""
    found = {}
    messages, mapping = entry.pop("field_messages", None), entry.pop("message_property_mappings", None) or {}
    is_sharegpt = mapping.get("role") == "from" and mapping.get("content") == "value"
    is_pairs = draft.recipe.given.get("rl") is not None  # their prompt may be a conversation of any kind
    own = "conversations" if is_sharegpt or is_pairs else "messages"
    if messages and messages != own:
        found[own] = messages
    for part, name in mapping.items():
        usual = {"role": ("role", "from"), "content": ("content", "value")}.get(part, ())
        if name not in usual:
            why = "messages have role and content, or from and value"
            draft.lose(f"{where}.message_property_mappings.{part}", name, why)
    fields = {"field": "text", "field_chosen": "chosen", "field_rejected": "rejected", "field_tools": "tools"}
    for theirs, ours in fields.items():
        if (name := entry.pop(theirs, None)) and name != ours:
            found[ours] = name
    return found


def _format(draft: Draft, where: str, kind: Any) -> str | None:
    """The format of a type of rows, and its prompt style."""
    if isinstance(kind, dict):
        draft.lose(f"{where}.type", kind, "a prompt of one's own is a data.map: file.py:function")
        return None
    if kind is None:
        return "tokens"
    if kind not in _TYPES:
        why = "this style of prompts is not here; a data.map: file.py:function can write it"
        draft.lose(f"{where}.type", kind, why)
        return None
    format, style = _TYPES[kind]
    if style:
        draft.put("data.prompt", style, f"{where}.type: {kind}")
    return format


def _objective(draft: Draft) -> None:
    kind = draft.take("rl")
    beta, alpha = draft.take("rl_beta", "dpo_beta"), draft.take("orpo_alpha")
    chosen, rejected = draft.take("kto_desirable_weight"), draft.take("kto_undesirable_weight")
    if kind is None:
        return
    if kind in ("grpo", "gdpo", "ebft"):
        raise loop.makes_rollouts(draft, f"rl: {kind}")
    if kind == "kto":
        sources.preferences(draft, "kto", beta, desirable_weight=chosen, undesirable_weight=rejected)
    elif kind == "orpo":
        sources.preferences(draft, "orpo", alpha or beta)
    elif kind == "simpo":
        sources.simpo(draft, beta, draft.take("simpo_gamma"), draft.take("cpo_alpha"))
    elif kind in ("dpo", "ipo"):
        loss = "ipo" if kind == "ipo" else draft.take("dpo_loss_type")
        weights, smoothing = draft.take("dpo_loss_weights"), draft.take("dpo_label_smoothing")
        sft = draft.take("rpo_alpha")
        options = {"label_smoothing": smoothing, "weighted": draft.take("dpo_use_weighting") or None}
        sources.pairs(draft, "dpo_loss_type", beta, loss, sft=sft, loss_weights=weights, **options)
        draft.say("losses of pairs are means of micro-batches there, here of the whole step")
    else:
        draft.lose("rl", kind, "of pairs there are dpo, ipo, simpo and orpo, of single answers kto")
    if kind in ("dpo", "ipo", "simpo", "orpo", "kto"):
        for key in ("data.packing", "data.train_on"):
            draft.values.pop(key, None)


def _loop(draft: Draft) -> None:
    loop.sizes(draft, "micro_batch_size")
    if int(draft.take("gradient_accumulation_steps", default=1)) > 1:  # measured: scripts/import_against_peers.py
        draft.say(
            "a step's loss is the mean of the means of its micro-batches there (0.19.0), here over all its tokens"
        )
    axes = {"context_parallel_size": "cp", "sequence_parallel_degree": "cp"}
    axes |= {"tensor_parallel_size": "tp", "expert_parallel_size": "ep"}
    loop.own_topology(draft, axes)
    draft.take("dp_shard_size", "dp_replicate_size")
    lr = loop.rate(draft)
    epochs, why = draft.take("num_epochs", default=1), "num_epochs; rounded once over all of them there"
    loop.length(draft, epochs, draft.take("max_steps"), of_epochs=why)
    loop.warmup(draft, ratio=0.03, ratio_why="the default there: 3% of the steps, at most 100")
    if "train.warmup_ratio" in draft.values:
        draft.say("warm-up: rounded down there, up here: a step at most")
    loop.schedule(draft, "lr_scheduler", lr, default="cosine")
    if share := draft.take("cosine_min_lr_ratio"):
        draft.put("train.min_lr", loop.product(float(share), lr), "cosine_min_lr_ratio x the peak")
    loop.optimizer(draft, draft.take("optimizer", default="adamw_torch_fused"), whose="optimizer")
    _events(draft)
    loop.logging(draft)
    loop.keeping(draft)
    threshold, patience = draft.take("loss_watchdog_threshold"), draft.take("loss_watchdog_patience")
    if threshold is not None:
        spike = {"above": float(threshold), "patience": int(patience or 3)}
        draft.put("train.on_spike", spike, "loss_watchdog_threshold, loss_watchdog_patience")
    loop.device(draft)
    loop.timeout(draft)
    used = [name for name, keys in _TRACKERS.items() if draft.has(*keys)]
    draft.take(*itertools.chain.from_iterable(_TRACKERS.values()))
    loop.tracking(draft, used, whose="trackers")


def _events(draft: Draft) -> None:
    if loop.is_true(draft.take("curriculum_sampling")):
        draft.put("data.shuffle", False, "curriculum_sampling: the order of the file")
    saves, evals = draft.take("saves_per_epoch"), draft.take("evals_per_epoch")
    if saves:
        draft.put("train.save_every", loop.part_of_epoch(int(saves)), "saves_per_epoch")
        if (limit := draft.take("save_total_limit")) is not None:
            draft.put("train.keep_last", int(limit), "save_total_limit")
    elif draft.has("save_steps", "save_strategy"):
        loop.saving(draft, default_steps=None)
    if evals and "data.eval" in draft.values:
        why = "evals_per_epoch; one more before the first step there"
        draft.put("train.eval_every", loop.part_of_epoch(int(evals)), why)
    elif evals:
        draft.idle.append("evals_per_epoch (no data for it)")
    else:
        loop.evaluation(draft, is_on=draft.has("eval_steps"))


def _adapter(draft: Draft) -> None:
    sources.factors(draft)
    for name in ("lora_r", "lora_alpha"):
        if not draft.has(name) and not draft.has("lora_model_dir"):
            raise draft.refuse(name, "this key is required there, too", f"give {name}")
    linear, names = draft.take("lora_target_linear"), draft.take("lora_target_modules")
    if loop.is_true(linear):
        sources.targets(draft, "all-linear", whose="lora_target_linear")
        if names and not isinstance(names, str):
            draft.say("lora_target_modules beside lora_target_linear: all linears of the decoder have them already")
    else:
        sources.targets(draft, names, whose="lora_target_modules")
    sources.adapter(draft, draft.take("lora_model_dir"), whose="lora_model_dir")
    sources.settle_adapter(draft)
