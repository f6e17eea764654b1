"""ms-swift's scripts and YAML: keys that are computed."""

from __future__ import annotations

import re
from typing import Any

from meshlora_extra.importing import loop, sources
from meshlora_extra.importing.draft import Draft

_COUNTED = re.compile(r"(?P<name>.*?)#(?P<count>\d+)")
_CUTS = {"delete": "drop", "left": "truncate", "right": "truncate", "split": "split", "raise": "error"}
_SCALES = {"default": "all", "last_round": "last", "all": "everything"}
_ROLLOUTS = ("num_generations", "reward_funcs", "num_iterations")


def rules(draft: Draft) -> None:
    kind = draft.take("tuner_type", "train_type", "sft_type", default="lora")
    if kind != "lora":
        raise draft.refuse(f"tuner_type: {kind}", "LoRA is all that is trained here", "give lora in it")
    method = str(draft.take("rlhf_type") or (draft.recipe.method if draft.recipe.method != "rlhf" else "dpo") or "sft")
    if method in ("grpo", "gkd") or draft.has(*_ROLLOUTS):
        raise loop.makes_rollouts(draft, f"rlhf_type: {method}")
    task = draft.take("task_type", default="causal_lm")
    if task != "causal_lm":
        raise draft.refuse(
            f"task_type: {task}", "its rows are not those of train.objective: classify or embed", "docs/objectives.md"
        )
    draft.put("model.path", str(draft.take("model", "model_id_or_path")), "model; a name of ModelScope unless use_hf")
    _model(draft)
    _data(draft, method)
    _objective(draft, method)
    _loop(draft)
    sources.factors(draft, rank=("lora_rank",))
    sources.targets(draft, draft.take("target_modules"), whose="target_modules")
    first = draft.take("init_weights", default=True)
    if str(first) in ("gaussian", "pissa", "olora", "False") or str(first).startswith("pissa_niter_"):
        draft.put("lora.init_lora_weights", first, "init_weights")
    elif first is not True:
        why = "lora.init_lora_weights has true, false, gaussian, pissa and olora of these"
        draft.lose("init_weights", first, why)
    sources.adapter(draft, draft.take("adapters", "resume_from_adapter"), whose="adapters")
    sources.settle_adapter(draft)


def _model(draft: Draft) -> None:
    if not draft.has("torch_dtype"):
        loop.dtype(draft, default="auto", whose="torch_dtype")
    draft.take("bf16", "fp16")
    method, bits = draft.take("quant_method"), draft.take("quant_bits")
    nested = draft.take("bnb_4bit_use_double_quant", default=True)
    if bits is not None and str(method) in ("None", "bnb") and bits in (4, 8):
        is_nested = bits == 4 and loop.is_true(nested)
        sources.quantized(draft, {4: "nf4", 8: "int8"}[bits], whose="quant_bits", nested=is_nested)
    elif bits is not None:
        draft.lose("quant_method", method, "4 bits are bitsandbytes' nf4, 8 int8")
    loop.recompute(draft, "gradient_checkpointing", "activation_checkpointing", default=True)


def _data(draft: Draft, method: str) -> None:
    given = draft.take("dataset")
    names = given if isinstance(given, list) else str(given or "").split()
    if not names:
        raise draft.refuse("dataset", "it names no data", "give --dataset in it")
    sources.put_all(draft, "data.train", [_source(draft, str(each)) for each in names], "dataset")
    tests = draft.take("val_dataset")
    if tests:
        found = [_source(draft, str(each)) for each in (tests if isinstance(tests, list) else str(tests).split())]
        sources.put_all(draft, "data.eval", found, "val_dataset")
    elif draft.take("split_dataset_ratio"):
        loop.held_out(draft, "split_dataset_ratio", is_number=False)
    draft.take("split_dataset_ratio")
    draft.copy("data.max_length", "max_length")
    cut = str(draft.take("truncation_strategy", default="delete"))
    if cut in _CUTS:
        draft.put("data.too_long", _CUTS[cut], f"truncation_strategy: {cut}")
        if cut == "left":
            draft.lose("truncation_strategy", cut, "sequences are cut on the right")
    else:
        draft.lose("truncation_strategy", cut, "data.too_long is truncate, drop, split or error")
    if loop.is_true(draft.take("packing")):
        draft.put("data.packing", "rows", "packing")
    if (name := draft.take("template")) is not None:
        sources.template(draft, name, whose="template")
    else:
        draft.say("template: chosen by the model there, perhaps with a system text of its own; here the tokenizer's")
    if (columns := draft.take("columns")) is not None:
        draft.lose("columns", columns, "theirs -> standard names there; write data.columns: {ours: theirs}")
    if method == "pt":
        draft.put("data.format", "text", "swift pt")
        return
    scale = draft.take("loss_scale")
    usual = "last_round" if method in ("dpo", "kto") else "default"
    if str(scale or usual) not in _SCALES:
        draft.lose("loss_scale", scale, "weights of parts of an answer; data.train_on is all, last or everything")
    elif method == "sft":
        why = "loss_scale" if scale else "answers, as there by default"
        draft.put("data.train_on", _SCALES[str(scale or usual)], why)
    elif scale and scale != usual:
        draft.lose("loss_scale", scale, "of preferences the answers are trained")


def _source(draft: Draft, name: str) -> dict[str, Any]:
    counted = _COUNTED.fullmatch(name)
    count = None
    if counted is not None:
        name, count = counted["name"], counted["count"]
        draft.say(f"{name}#{count}: {count} rows drawn at random there, the first {count} here")
    name = name.removeprefix("HF::").removeprefix("MS::")
    if "self-cognition" in name:
        draft.take("model_name", "model_author")
        why = "its rows have placeholders, filled by model_name and model_author: export them, or "
        draft.lose("dataset", name, why + "write a data.map: file.py:function")
    path, _, subset = name.partition(":")
    return sources.one(path, config=subset or None, rows=f":{count}" if count else None)


def _objective(draft: Draft, method: str) -> None:
    beta, loss = draft.take("beta"), draft.take("loss_type")
    chosen, rejected = draft.take("desirable_weight"), draft.take("undesirable_weight")
    draft.take(*_ROLLOUTS, "max_completion_length", "temperature", "epsilon")
    if method == "kto":
        sources.preferences(draft, "kto", beta, desirable_weight=chosen, undesirable_weight=rejected)
    elif method == "simpo":
        usual = 2.0 if beta is None else beta
        sources.simpo(draft, usual, draft.take("simpo_gamma", default=1.0), draft.take("cpo_alpha"))
    elif method == "orpo":
        sources.preferences(draft, method, beta)
    elif method == "dpo":
        sources.pairs_of_trl(draft, beta, loss)
        draft.put("lora.lora_dropout", 0.0, "all dropout is off in preference runs there")
        draft.read.add("lora_dropout")
    elif method not in ("sft", "pt"):
        raise draft.refuse(
            f"rlhf_type: {method}",
            "of pairs there are dpo, simpo and orpo, of single answers kto",
            "docs/objectives.md",
        )
    if method in ("dpo", "orpo"):
        draft.say("losses of pairs are means of micro-batches there, here of the whole step")


def _loop(draft: Draft) -> None:
    micro = int(draft.take("per_device_train_batch_size", default=1))
    usual = {"per_device_train_batch_size": 1, "learning_rate": 1e-4}
    usual["gradient_accumulation_steps"] = -(-16 // (micro * draft.num_processes))
    loop.own_topology(draft, {"sequence_parallel_size": "cp"})
    loop.arguments(draft, usual, default_steps=draft.recipe.given.get("save_steps", 500), is_on=True)
