"""LLaMA-Factory's recipes: keys that are computed, and the names in dataset_info.json."""

from __future__ import annotations

from typing import Any

from meshlora_extra.importing import loop, sources
from meshlora_extra.importing.beside import Beside
from meshlora_extra.importing.draft import Draft

# Their field of an alpaca row, and what it is called where nothing is said -> ours.
_ALPACA = {"prompt": ("instruction", "instruction"), "query": ("input", "input"), "response": ("output", "output")}
_USUAL_TAGS = (
    {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"},
    {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
)


def rules(draft: Draft, beside: Beside) -> None:
    kind, stage = draft.take("finetuning_type", default="lora"), str(draft.take("stage", default="sft"))
    if kind != "lora":
        raise draft.refuse(f"finetuning_type: {kind}", "LoRA is all that is trained here", "give lora in it")
    if stage not in ("sft", "pt", "dpo", "kto"):
        raise draft.refuse(f"stage: {stage}", "it is sft, pt, dpo or kto that is trained here", "docs/objectives.md")
    draft.put("model.path", draft.take("model_name_or_path"), "model_name_or_path")
    pure = draft.take("pure_bf16")
    loop.dtype(draft, default="bfloat16" if pure else "auto")
    if pure:
        draft.lose("pure_bf16", True, "factors are float32 here")
    _quantized(draft)
    _data(draft, beside, stage)
    _objective(draft, stage)
    _loop(draft)
    _adapter(draft)
    if stage in ("dpo", "kto"):
        sources.no_dropout(draft)


def _quantized(draft: Draft) -> None:
    bits, nested = draft.take("quantization_bit"), draft.take("double_quantization", default=True)
    if bits is None:
        return
    if bits not in (4, 8):
        draft.lose("quantization_bit", bits, "4 bits are nf4, 8 int8")
        return
    is_nested = bits == 4 and loop.is_true(nested)
    sources.quantized(draft, {4: "nf4", 8: "int8"}[bits], whose="quantization_bit", nested=is_nested)


def _data(draft: Draft, beside: Beside, stage: str) -> None:
    draft.take("dataset_dir")
    names = _names(draft.take("dataset"))
    if not names:
        raise draft.refuse("dataset", "it names no data", "give dataset: NAME in it")
    found = [_source(draft, beside, each) for each in names]
    sources.put_all(draft, "data.train", found, "dataset, by dataset_info.json")
    if tests := _names(draft.take("eval_dataset")):
        sources.put_all(draft, "data.eval", [_source(draft, beside, each) for each in tests], "eval_dataset")
    elif share := draft.take("val_size"):
        loop.held_out(draft, "val_size", is_number=share > 1)
    draft.take("val_size")
    draft.put("data.max_length", int(draft.take("cutoff_len", default=2048)), "cutoff_len")
    draft.put("data.too_long", "truncate", "cutoff_len")
    draft.say(
        "cutoff_len: cut turn by turn there, a long prompt before its answer; on the right here, where a row "
        "without a trained token is an error"
    )
    if (name := draft.take("template")) is not None:
        sources.template(draft, name, whose="template")
    if stage in ("sft", "pt"):
        _trained_on(draft, stage)
    if loop.is_true(draft.take("disable_shuffling")):
        draft.put("data.shuffle", False, "disable_shuffling")


def _names(given: Any) -> list[str]:
    words = given if isinstance(given, list) else str(given or "").split(",")
    return [str(each).strip() for each in words if str(each).strip()]


def _trained_on(draft: Draft, stage: str) -> None:
    packing, neat = loop.is_true(draft.take("packing", default=stage == "pt")), loop.is_true(draft.take("neat_packing"))
    if neat:
        draft.put("data.packing", "rows", "neat_packing; longer sequences are left out there")
    elif packing:
        draft.put("data.packing", "rows", "packing")
        draft.lose("packing", True, "sequences of a row see each other there without neat_packing, and never here")
    if stage == "pt":
        draft.put("data.format", "text", "stage: pt")
        return
    if loop.is_true(draft.take("train_on_prompt")):
        draft.put("data.train_on", "everything", "train_on_prompt")
    elif loop.is_true(draft.take("mask_history")):
        draft.put("data.train_on", "last", "mask_history; it also cuts from the first turns there")
    else:
        draft.put("data.train_on", "all", "answers, as there by default")


def _source(draft: Draft, beside: Beside, name: str) -> dict[str, Any]:
    """A dataset by its name in dataset_info.json."""
    if beside.data is None:
        draft.lose("dataset", name, "no dataset_info.json lies beside it, which says where its data are: --beside FILE")
        return sources.one(name)
    entry = beside.data.get(name)
    if entry is None:
        draft.lose("dataset", name, f"{beside.folder / 'dataset_info.json'} has no such name")
        return sources.one(name)
    if "script_url" in entry or "cloud_file_name" in entry:
        draft.lose(f"dataset {name}", entry, "data made by a script, or in a cloud, have no place here")
    hub = entry.get("hf_hub_url") or entry.get("ms_hub_url")
    path = hub if hub else str(beside.folder / str(entry.get("file_name", name)))
    rows, columns = entry.get("num_samples"), _columns(draft, name, entry)
    options = {"config": entry.get("subset"), "split": entry.get("split"), "rows": f":{rows}" if rows else None}
    return sources.one(path, columns=columns, **options)


def _columns(draft: Draft, name: str, entry: dict[str, Any]) -> dict[str, str]:
    """Our names of the columns that an entry of dataset_info.json names."""
    given, tags = dict(entry.get("columns") or {}), dict(entry.get("tags") or {})
    own = ["system", "tools", "images", "kto_tag", "chosen", "rejected"]
    if entry.get("formatting", "alpaca") == "alpaca":
        found, own = _of_alpaca(given), ["history", *own]
    else:
        found = _of_messages(draft, name, given, tags)
    for theirs in own:
        column = given.pop(theirs, theirs)
        if column not in (theirs, None) and (theirs, column) != ("kto_tag", "label"):
            found[theirs] = column
    if given:
        draft.lose(f"dataset {name}: columns", given, "rows here have no such field")
    return found


def _of_alpaca(given: dict[str, Any]) -> dict[str, str]:
    found = {}
    for theirs, (usual, ours) in _ALPACA.items():
        column = given.pop(theirs, usual)
        if column not in (usual, None):
            found[ours] = column
    return found


def _of_messages(draft: Draft, name: str, given: dict[str, Any], tags: dict[str, Any]) -> dict[str, str]:
    """The column of conversations; messages have role and content, or from and value."""
    is_openai = tags.get("role_tag") == "role"
    kind, usual = ("messages", _USUAL_TAGS[1]) if is_openai else ("conversations", _USUAL_TAGS[0])
    odd = {tag: word for tag, word in tags.items() if usual.get(tag, word) != word}
    if odd:
        draft.lose(f"dataset {name}: tags", odd, "messages have role and content, or from and value")
    column = given.pop("messages", "conversations")
    return {} if column == kind else {kind: column}


def _objective(draft: Draft, stage: str) -> None:
    beta, loss = draft.take("pref_beta"), str(draft.take("pref_loss", default="sigmoid"))
    smoothing, dft = draft.take("dpo_label_smoothing"), draft.take("use_dft_loss")
    sft, gamma, ld_alpha = draft.take("pref_ftx"), draft.take("simpo_gamma"), draft.take("ld_alpha")
    chosen, rejected = draft.take("kto_chosen_weight"), draft.take("kto_rejected_weight")
    if stage == "kto":
        sources.preferences(draft, "kto", beta, desirable_weight=chosen, undesirable_weight=rejected)
    elif stage == "dpo" and loss in ("orpo", "simpo"):
        if sft:
            draft.lose("pref_ftx", sft, f"{loss} has no likelihood of its own weight beside it")
        sources.preferences(draft, loss, beta, gamma=(gamma if gamma is not None else 0.5) if loss == "simpo" else None)
    elif stage == "dpo" and loss == "sigmoid" and smoothing:
        parts: dict[str, Any] = {"loss": ["sigmoid", "sft"], "loss_weights": [1.0, float(sft)]} if sft else {}
        sources.preferences(draft, "dpo", beta, label_smoothing=smoothing, length_weight=ld_alpha, **parts)
    elif stage == "dpo":
        sources.pairs(draft, "pref_loss", beta, loss, sft=sft, length_weight=ld_alpha)
    elif loop.is_true(dft):
        draft.put("train.objective", {"kind": "sft", "loss": "dft"}, "use_dft_loss")
    if stage in ("dpo", "kto"):
        draft.say("losses of pairs are means of micro-batches there, here of the whole step")


def _loop(draft: Draft) -> None:
    loop.arguments(draft, {"per_device_train_batch_size": 8, "learning_rate": 5e-5})
    is_off = loop.is_true(draft.take("disable_gradient_checkpointing"))
    draft.put("train.recompute", "none" if is_off else "full", "on unless disable_gradient_checkpointing")


def _adapter(draft: Draft) -> None:
    sources.factors(draft, rank=("lora_rank",), of_alpha="twice lora_rank, as there where it is absent")
    sources.targets(draft, draft.take("lora_target", default="all"), whose="lora_target")
    extra = draft.take("additional_target")
    if extra:
        draft.put("lora.modules_to_save", _names(extra), "additional_target")
    for name in ("add_tokens", "add_special_tokens"):
        if tokens := draft.take(name):
            draft.put(f"model.{name}", _names(tokens), name)
    if loop.is_true(draft.take("resize_vocab")) and not extra:
        draft.say("resize_vocab trains the embedding and the head in full; here the rows of added tokens alone")
    iterations = int(draft.take("pissa_iter", default=16))
    if loop.is_true(draft.take("pissa_init")):
        word = "pissa" if iterations == -1 else f"pissa_niter_{iterations}"
        draft.put("lora.init_lora_weights", word, "pissa_init")
    sources.adapter(draft, draft.take("adapter_name_or_path"), whose="adapter_name_or_path")
    sources.settle_adapter(draft)
