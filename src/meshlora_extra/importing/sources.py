"""Sources of data, formats, templates, and adapters, as several trainers' rules write them.

Owns: what of ours says them. Does not own: how a trainer names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from meshlora.reading import named_templates
from meshlora_extra.importing.draft import Draft
from meshlora_ground.objectives.preferences import PairLoss

# Their name of a chat template, in small letters -> ours; another name means the tokenizer's own, or none here.
TEMPLATES = {name: name for name in named_templates.TEMPLATES} | dict(named_templates.ELSEWHERE)
del TEMPLATES["alpaca"]  # with others a style of plain prompts, which is data.prompt here
# `train[:1%]`, `train[95%:]`: a split and a slice of its rows, as `datasets` writes them.
_SLICE = re.compile(r"(?P<split>[\w.-]+)\[(?P<rows>\d*%?:\d*%?)\]")


def one(
    path: str | Sequence[str],
    *,
    config: str | None = None,
    split: Any = None,
    rows: str | None = None,
    columns: Mapping[str, str] | None = None,
    format: str | None = None,
    revision: str | None = None,
) -> dict[str, Any]:
    """A source of `data.train`. split: perhaps with a slice."""
    if (sliced := _SLICE.fullmatch(str(split))) is not None:
        split, rows = sliced["split"], rows or sliced["rows"]
    if isinstance(path, str) and revision:
        path = f"{path}@{revision}"
    if isinstance(path, str) and config:
        path, split = f"{path}:{config}/{split or 'train'}", None
    found: dict[str, Any] = {"path": path}
    options = {"split": split, "rows": rows, "columns": dict(columns or {}), "format": format}
    return found | {key: value for key, value in options.items() if value}


def put_all(draft: Draft, key: str, found: Sequence[dict[str, Any]], why: str) -> None:
    """Write sources under `data.train` or `data.eval`; what all have in common as `data.format`, `data.columns`."""
    own = list(map(dict, found))
    for each in own:
        draft.names(each["path"], why)
    for name in ("format", "columns"):
        values = [each.get(name) for each in own]
        if key == "data.train" and values[0] and all(value == values[0] for value in values):
            draft.put(f"data.{name}", values[0], why)
        if values[0] == draft.values.get(f"data.{name}"):
            for each in own:
                each.pop(name, None)
    for each in own:
        if key == "data.train" and each.get("split") == "train":  # the split that is read anyway
            del each["split"]
    written = [each["path"] if list(each) == ["path"] else each for each in own]
    draft.put(key, written[0] if len(written) == 1 else written, why)


def put_data(draft: Draft) -> None:
    """The datasets that `load_dataset` names."""
    for key, name in {"data.train": "load_dataset.train", "data.eval": "load_dataset.eval"}.items():
        entry: dict[str, Any] | None = draft.take(name)
        if entry is None:
            continue
        path, files = entry.get("path"), entry.get("data_files")
        if isinstance(files, dict):
            files = files.get("train", next(iter(files.values()), None))
        found: Any = files if files and path in ("json", "csv", "parquet", "text", None) else path
        source = one(found, config=entry.get("name"), split=entry.get("split"), revision=entry.get("revision"))
        put_all(draft, key, [source], "load_dataset")
    if "data.train" not in draft.values:
        draft.put("data.train", "train.jsonl", "no load_dataset is in the script")
        draft.lose("load_dataset", None, "the script makes its data; export them")


def template(draft: Draft, name: Any, *, whose: str) -> None:
    """A chat template by the name that a trainer gives it: the shipped one that writes the same, or the tokenizer's."""
    low = str(name).lower()
    if low in TEMPLATES:
        draft.put("data.chat_template", TEMPLATES[low], f"{whose}: {name}")
        return
    draft.idle.append(whose)
    if low not in ("tokenizer_default", "default", "none", "empty"):
        draft.say(f"{whose}: {name}: the tokenizer's own template is taken; compare with meshlora data RUN.yaml")


def targets(draft: Draft, given: Any, *, whose: str) -> None:
    """`target_modules`: a list, text with commas, all, or a regular expression."""
    if given is None:
        return
    if isinstance(given, list):
        draft.names(given, whose)
    elif isinstance(given, str):
        words = [word for word in re.split(r"[,\s]+", given) if word]
        given = words if len(words) > 1 else words[0]
    if isinstance(given, list) and len(given) == 1 and given[0] in ("all", "all-linear", "all_linear"):
        given = given[0]
    if given in ("all", "all-linear", "all_linear"):
        draft.put("lora.target_modules", "all-linear", f"{whose}; routers that are linears count there, not here")
        return
    if isinstance(given, str) and re.fullmatch(r"\w+", given):
        given = [given]
    draft.put("lora.target_modules", given, whose)


def factors(draft: Draft, *, rank: tuple[str, ...] = ("lora_r", "r"), of_alpha: str = "") -> None:
    """Rank, scale and dropout. of_alpha: which scale it is where none is given; default: the trainer's."""
    draft.copy("lora.r", *rank)
    draft.copy("lora.lora_dropout", "lora_dropout")
    if not draft.copy("lora.lora_alpha", "lora_alpha") and of_alpha:
        draft.put("lora.lora_alpha", 2 * int(draft.values.get("lora.r", 8)), of_alpha)


def adapter(draft: Draft, folder: Any, *, whose: str) -> None:
    """Go on from an adapter: it says rank, scale and targets itself."""
    if not folder:
        return
    if isinstance(folder, list):
        folder = folder if len(folder) > 1 else folder[0]
    if isinstance(folder, list) or "," in str(folder):
        draft.lose(whose, folder, "several adapters are merged there but the last; merge them into the base first")
        return
    draft.put("adapter", str(folder), whose)


def settle_adapter(draft: Draft) -> None:
    """With an adapter to go on from there are no fields of `lora`."""
    if "adapter" not in draft.values:
        return
    for key in [key for key in draft.values if key.startswith("lora.")]:
        del draft.values[key], draft.why[key]
    draft.say("the adapter's own rank, scale and targets are kept; those of the recipe are left out")


def quantized(draft: Draft, kind: str, *, whose: str, nested: bool = False) -> None:
    """A base in few bits. nested: its scales are quantised themselves there."""
    draft.put("model.quantization", kind, whose)
    if nested:
        why = "scales of 4 bits are float32 here; the base differs by their rounding"
        draft.lose(f"{whose} with quantised scales", True, why)


def preferences(draft: Draft, kind: str, beta: Any = None, **options: Any) -> None:
    """The objective of pairs or judged answers; dropout is off in it there."""
    objective: dict[str, Any] = {"kind": kind, "beta": float(beta if beta is not None else 0.1)}
    for name, value in options.items():
        if value is not None:
            objective[name] = value if isinstance(value, str | list | bool) else float(value)
    draft.put("train.objective", objective, f"{kind}; beta 0.1 where it is not given")


def pairs(draft: Draft, whose: str, beta: Any, loss: Any, *, sft: Any = None, **options: Any) -> None:
    """The objective of pairs with TRL's losses. whose: the key of `loss`, a name or several. sft: weight of the better
    answer's likelihood beside it. options: further ones, None where they are not given.
    """
    names, weights = draft.names(loss or "sigmoid", whose), options.pop("loss_weights", None)
    if missing := [name for name in names if name not in get_args(PairLoss)]:
        draft.lose(whose, loss, f"{missing[0]} is not there")
        names, weights = ["sigmoid"], None
    if sft:
        weights = [*(weights or [1.0] * len(names)), float(sft)]
        names = [*names, "sft"]
    smoothing = options.pop("label_smoothing", None)
    if smoothing and {"robust", "exo_pair", "aot", "aot_unpaired"} & {*names}:
        options["label_smoothing"] = smoothing
    elif smoothing:
        draft.say("label_smoothing: the loss there ignores it: nothing is written")
    if names != ["sigmoid"]:
        options["loss"] = names if len(names) > 1 else names[0]
    preferences(draft, "dpo", beta, loss_weights=weights if len(names) > 1 else None, **options)


def pairs_of_trl(draft: Draft, beta: Any, loss: Any, **options: Any) -> None:
    """`pairs` by the keys that TRL has and ms-swift hands on to it."""
    smoothing, tau = draft.take("label_smoothing"), draft.take("discopop_tau")
    options |= {"loss_weights": draft.take("loss_weights"), "length_weight": draft.take("ld_alpha")}
    options |= {"label_smoothing": smoothing, "discopop_tau": tau if "discopop" in str(loss) else None}
    pairs(draft, "loss_type", beta, loss, sft=draft.take("rpo_alpha"), **options)


def simpo(draft: Draft, beta: Any, gamma: Any, of_text: Any) -> None:
    """SimPO by TRL's trainer of CPO. of_text: its cpo_alpha, the weight of the likelihood."""
    if of_text is None or float(of_text):
        draft.lose("cpo_alpha", of_text if of_text is not None else 1.0, "simpo has no likelihood beside it")
    preferences(draft, "simpo", beta, gamma=gamma if gamma is not None else 0.5)


def no_dropout(draft: Draft) -> None:
    """All dropout, LoRA's too, is off in preference runs of TRL and LLaMA-Factory."""
    if draft.values.get("lora.lora_dropout", draft.recipe.trainer.defaults.get("lora.lora_dropout")):
        draft.say("all dropout is off in preference runs there: lora_dropout is written as 0")
    draft.put("lora.lora_dropout", 0.0, "all dropout is off in preference runs there")
