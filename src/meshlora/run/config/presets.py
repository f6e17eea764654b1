"""Presets: published recipes as values of a run file.

Owns: how they are filled in. Does not own: their values (`presets.yaml`), the meaning of the keys
(`run.config.run_file`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from meshlora.run.config.model_presets import OF_MODEL, Facts
from meshlora_ground.errors import UserError, did_you_mean
from meshlora_ground.yaml_reading import parse_yaml

# Keys of a group that belong together: if one of them is given, the others are not taken from elsewhere.
_TARGETS = {"target_modules", "target_parameters", "pieces"}
TOGETHER: Mapping[str, Collection[Collection[str]]] = {
    "train": [{"steps", "epochs"}, {"warmup_steps", "warmup_ratio"}],
    "lora": [_TARGETS],
}


@functools.cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Name -> the groups of a run file that it fills in."""
    values: dict[str, Any] = parse_yaml(Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8"))
    return values


def filled(
    own: Mapping[str, Any], rest: Mapping[str, Any], together: Collection[Collection[str]] = ()
) -> dict[str, Any]:
    """`own`, completed from `rest`. together: sets of keys that all come from `own` if it has any of them."""
    found = dict(rest)
    for keys in together:
        if not own.keys().isdisjoint(keys):
            for key in keys:
                found.pop(key, None)
    return found | dict(own)


def with_preset(tree: Mapping[str, Any], *, facts: Callable[[], Facts] | None = None) -> dict[str, Any]:
    """The tree of a run file, completed with the values of its `preset`.

    Values of the file win, key by key. With `adapter:` the preset's `lora` is ignored, as the adapter has its own.
    facts: of the model, asked for by presets that depend on it; without it their values are left out.

    Raises:
        UserError: a preset that is not known, or not for this model.
    """
    name = tree.get("preset")
    if name is None:
        return dict(tree)
    if not isinstance(name, str) or name not in presets():
        raise UserError(f"preset: {name!r}", "there is no such preset", did_you_mean(str(name), presets()))
    whole, preset = dict(tree), {group: dict(values) for group, values in presets()[name].items()}
    if name in OF_MODEL and facts is not None:
        for group, values in OF_MODEL[name](facts(), tree).items():
            preset[group] = preset.get(group, {}) | values
    for group, values in preset.items():
        own = tree.get(group)
        if group in tree and not isinstance(own, Mapping):
            continue  # `run.config.file` reports the error
        if group == "lora" and tree.get("adapter") is not None:
            continue
        if group == "lora" and own and own.keys() & _TARGETS:
            values.pop("rank_pattern", None)  # of the preset's own targets
        whole[group] = filled(own or {}, values, TOGETHER.get(group, ()))
    return whole


def resolved(config: Any) -> str:
    """The values that a run uses for the keys of its preset, one line per group. config: the `RunConfig`."""
    lines, of_model = [], dict[str, list[str]]()
    if config.preset in OF_MODEL:
        of_model = {"lora": ["lora_dropout", "rank_pattern"], "train": ["lr"]}
    for group, values in presets()[config.preset].items():
        inside = [key for key in values.get("objective", ()) if key != "kind"]
        values = dict.fromkeys([*values, *inside, *of_model.get(group, ())])
        shown = own = getattr(config, group)
        if group == "train":
            shown = {**vars(own.objective), **vars(own), "objective": own.objective.kind}
            if not own.warmup_ratio:  # the run has it in steps
                values = dict.fromkeys("warmup_steps" if key == "warmup_ratio" else key for key in values)
        elif group != "lora":
            shown = vars(own)
        if shown is not None:  # of an adapter that is given there is no lora
            words = [f"{key} {shown[key]}" for key in values if shown.get(key) is not None]
            lines.append(f"{group}: {', '.join(words)}")
    return "\n".join(lines)
