"""TRL's arguments: keys that are computed."""

from __future__ import annotations

from typing import Any

from meshlora_extra.importing import loop, sources
from meshlora_extra.importing.draft import Draft

_ROLLOUTS = ("num_generations", "reward_funcs", "num_iterations")
_OF_PAIRS = ("dpo", "orpo", "kto", "cpo")
# The rate where none is given.
_RATES = {"sft": 2e-5, "dpo": 1e-6, "orpo": 1e-6, "kto": 1e-6, "cpo": 1e-6, "reward": 1e-4}


def method_of(draft: Draft) -> str:
    """sft, dpo, ...: as the command says, or as its keys do."""
    method = draft.recipe.method
    if not method:
        method = "dpo" if draft.has("beta", "loss_weights", "f_divergence_type", "max_prompt_length") else "sft"
        draft.say(f"the file does not say which trainer reads it: {method}, by its keys")
    if method in ("grpo", "rloo") or draft.has(*_ROLLOUTS):
        rule = "rollouts and rewards are made by meshlora rl, whose run file has other keys"
        raise draft.refuse(method, rule, "docs/rl.md")
    if method not in _RATES:
        raise draft.refuse(method, "it is sft, dpo, orpo, kto or reward that is trained here", "docs/objectives.md")
    draft.take(*_ROLLOUTS, "max_completion_length")
    return method


def rules(draft: Draft) -> None:
    method = method_of(draft)
    if not loop.is_true(draft.take("use_peft")) and not draft.has("lora_r", "lora_alpha", "lora_target_modules"):
        raise draft.refuse("no use_peft", "the recipe trains all parameters", "give use_peft: true in it")
    if not draft.copy("model.path", "model_name_or_path", "model_name", "model"):
        raise draft.refuse("model_name_or_path", "this key is required there, too", "give it")
    _dtype(draft)
    four, eight = draft.take("load_in_4bit"), draft.take("load_in_8bit")
    if loop.is_true(four) or loop.is_true(eight):
        kind, whose = ("nf4", "load_in_4bit") if loop.is_true(four) else ("int8", "load_in_8bit")
        sources.quantized(draft, kind, whose=whose, nested=loop.is_true(draft.take("use_bnb_nested_quant")))
        why = "factors are float32 here; there they are bfloat16 with a quantised base"
        draft.lose(f"{whose}: factors", "bfloat16", why)
    _data(draft)
    read_rows(draft, method)
    objective(draft, method)
    arguments(draft, method)
    draft.take("lora_task_type")
    sources.factors(draft)
    sources.targets(draft, draft.take("lora_target_modules", "target_modules"), whose="lora_target_modules")
    draft.take("config_class", "get_chat_template", "train_on_responses_only")
    if method in (*_OF_PAIRS, "reward"):
        sources.no_dropout(draft)


def _dtype(draft: Draft) -> None:
    """Of the base; bf16 is autocast over it there."""
    given, bf16 = draft.take("dtype", "torch_dtype"), draft.take("bf16")
    draft.take("fp16")
    name = "float32" if given in (None, "None") else str(given).removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32", "auto"):
        draft.lose("dtype", given, "model.dtype is auto, float32, bfloat16 or float16")
        return
    draft.put("model.dtype", name, "dtype" if given is not None else "the default of TRL's scripts")
    if name == "float32" and bf16 is not False:
        draft.say(
            "dtype: a base in float32 is computed under bfloat16 autocast there, in float32 here; dtype: bfloat16 is "
            "nearer in memory and speed"
        )


def _data(draft: Draft) -> None:
    if draft.has("load_dataset.train"):  # of a Python script
        sources.put_data(draft)
        return
    given, mixture = draft.take("dataset_name", "dataset_path"), draft.take("datasets")
    config = draft.take("dataset_config")
    trained, tested = draft.take("dataset_train_split", default="train"), draft.take("dataset_test_split")
    if mixture:
        found = []
        for number, each in enumerate(mixture):
            entry = dict(each) if isinstance(each, dict) else {"path": each}
            path, split = entry.pop("path"), entry.pop("split", "train")
            found.append(sources.one(path, config=entry.pop("name", None), split=split))
            entry.pop("data_files", None)
            for key, value in entry.items():
                draft.lose(f"datasets[{number}].{key}", value, "sources have no such option")
        sources.put_all(draft, "data.train", found, "datasets")
        return
    if given is None:
        raise draft.refuse("dataset_name", "it names no data", "give dataset_name in it")
    sources.put_all(draft, "data.train", [sources.one(given, config=config, split=trained)], "dataset_name")
    strategy = str(draft.recipe.given.get("eval_strategy") or "no").lower()
    if tested is not None or strategy not in ("no", "false"):
        found = [sources.one(given, config=config, split=tested or "test")]
        sources.put_all(draft, "data.eval", found, "dataset_test_split, test by default")


def read_rows(draft: Draft, method: str) -> None:
    """What is read of the rows, and which of it is trained."""
    draft.copy("data.max_length", "max_length", "max_seq_length")
    mode = str(draft.take("truncation_mode", default="keep_start"))
    if method == "reward":
        draft.put("data.too_long", "drop", "pairs that are longer than max_length are left out there")
    else:
        draft.put("data.too_long", "truncate", "truncation_mode: keep_start")
    if mode != "keep_start":
        draft.lose("truncation_mode", mode, "sequences are cut on the right")
    if loop.is_true(draft.take("packing")):
        draft.put("data.packing", "rows", "packing, by best fit as there")
    draft.copy("data.chat_template", "chat_template_path")
    field = draft.take("dataset_text_field")
    if field not in (None, "text"):
        draft.put("data.columns", {"text": field}, "dataset_text_field")
    answers, completions = draft.take("assistant_only_loss"), draft.take("completion_only_loss")
    if method != "sft":
        return
    if loop.is_true(answers) or loop.is_true(completions):
        draft.put("data.train_on", "all", "assistant_only_loss or completion_only_loss")
    elif completions is False:
        draft.put("data.train_on", "everything", "completion_only_loss: false")
    else:
        draft.put("data.train_on", "everything", "the default there of conversations and text")
        draft.say(
            "train_on: everything is TRL's default of conversations and text; of rows with prompt and completion "
            "only the completion is trained there: write all"
        )


def objective(draft: Draft, method: str) -> None:
    beta, loss = draft.take("beta"), draft.take("loss_type")
    center = draft.take("center_rewards_coefficient")
    if method == "reward":
        draft.put("train.objective", {"kind": "reward", "center": float(center or 0.0)}, "center_rewards_coefficient")
        return
    chosen, rejected = draft.take("desirable_weight"), draft.take("undesirable_weight")
    if method == "sft" and loss == "dft":
        draft.put("train.objective", {"kind": "sft", "loss": "dft"}, "loss_type")
    elif method in ("sft", "orpo") and loss not in (None, "nll", "chunked_nll"):
        draft.lose("loss_type", loss, "of text there are nll and dft, of orpo one loss")
    if method == "kto":
        other = None if loss in (None, "kto") else str(loss)
        sources.preferences(draft, "kto", beta, desirable_weight=chosen, undesirable_weight=rejected, loss=other)
    elif method == "orpo":
        sources.preferences(draft, method, beta)
    elif method == "cpo":
        if loss != "simpo":
            raise draft.refuse(f"cpo with loss_type: {loss}", "of CPO's losses there is simpo", "docs/objectives.md")
        sources.simpo(draft, beta, draft.take("simpo_gamma"), draft.take("cpo_alpha"))
    elif method == "dpo":
        divergence, alpha = draft.take("f_divergence_type"), draft.take("f_alpha_divergence_coef")
        options = {"f_divergence": divergence, "f_alpha": alpha if divergence == "alpha_divergence" else None}
        options["weighted"] = draft.take("use_weighting") or None
        sources.pairs_of_trl(draft, beta, loss, **options)
    if method in _OF_PAIRS:
        draft.say("losses of pairs are means of micro-batches there, here of the whole step")
        draft.say(
            "a model that comes with an adapter is compared with a copy of it there, here with the bare base: merge "
            "it first"
        )


def arguments(draft: Draft, method: str, usual: dict[str, Any] | None = None) -> None:
    """Arguments of the trainer. usual: its defaults, where they are not TRL's."""
    own = {"per_device_train_batch_size": 8, "learning_rate": _RATES[method], "optim": "adamw_torch_fused"}
    loop.arguments(draft, own | (usual or {}), ratio_why=f"the default of {draft.title}")
    loop.recompute(draft, "gradient_checkpointing", "activation_checkpointing", default=True)
