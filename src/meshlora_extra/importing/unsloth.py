"""unsloth's scripts and notebooks, and TRL's Python scripts: keys that are computed."""

from __future__ import annotations

from meshlora.run.config.foreign.trainers import OF_SFT_CONFIG
from meshlora_extra.importing import loop, trl
from meshlora_extra.importing.draft import Draft
from meshlora_extra.importing.sources import factors, no_dropout, put_data, quantized, settle_adapter, targets, template

_SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def rules(draft: Draft) -> None:
    method = trl.method_of(draft)
    if loop.is_true(draft.take("full_finetuning")):
        raise draft.refuse("full_finetuning: True", "LoRA is all that is trained here", "leave it out")
    path = draft.take("model_name")
    if path is None:
        raise draft.refuse("model_name", "no model is named in it as text", "write its name into the call")
    draft.put("model.path", str(path), "model_name")
    _base(draft, str(path))
    put_data(draft)
    name = draft.take("get_chat_template")
    if isinstance(name, str):
        template(draft, name, whose="get_chat_template")
    trl.read_rows(draft, method)
    if method == "sft":
        is_answers = loop.is_true(draft.take("train_on_responses_only"))
        why = "train_on_responses_only is called" if is_answers else "train_on_responses_only is not called: everything"
        if is_answers or draft.values.get("data.train_on") != "all":
            draft.put("data.train_on", "all" if is_answers else "everything", why)
        draft.notes = [note for note in draft.notes if not note.startswith("train_on:")]
    draft.take("train_on_responses_only")
    trl.objective(draft, method)
    patched = draft.take("config_class") == "SFTConfig"
    trl.arguments(draft, method, OF_SFT_CONFIG if patched else None)
    if patched:
        for name, ours in {"weight_decay": "train.weight_decay", "logging_steps": "train.log_every"}.items():
            if draft.recipe.given.get(name) is None:
                draft.put(ours, OF_SFT_CONFIG[name], f"the default of {draft.title}")
    seed = draft.take("random_state")
    if seed is not None and "train.seed" not in draft.values:
        draft.put("train.seed", int(seed), "random_state")
    given = draft.take("use_gradient_checkpointing", default=True)
    draft.put("train.recompute", "full" if given else "none", "use_gradient_checkpointing")
    factors(draft, rank=("r",))
    targets(draft, draft.take("target_modules", default=_SEVEN), whose="target_modules")
    first = draft.take("init_lora_weights")
    if first not in (None, True):
        draft.put("lora.init_lora_weights", first, "init_lora_weights")
    if method != "sft":
        no_dropout(draft)
    settle_adapter(draft)


def _base(draft: Draft, path: str) -> None:
    four, eight = draft.take("load_in_4bit", default=True), draft.take("load_in_8bit")
    if path.lower().endswith("bnb-4bit"):
        quantized(draft, "keep", whose="model_name, already in 4 bits")
    elif loop.is_true(eight):
        quantized(draft, "int8", whose="load_in_8bit")
    elif loop.is_true(four):
        quantized(draft, "nf4", whose="load_in_4bit", nested=True)
    given = draft.take("dtype", "torch_dtype")
    is_half = str(given) in ("float16", "half") or (
        loop.is_true(draft.recipe.given.get("fp16")) and not loop.is_true(draft.recipe.given.get("bf16"))
    )
    draft.take("bf16", "fp16")
    draft.put("model.dtype", "float16" if is_half else "bfloat16", "dtype, by the GPU where it is none")
