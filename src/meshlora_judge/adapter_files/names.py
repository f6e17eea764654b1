"""Names in adapter files: PEFT's, and those of the layouts that others write.

Owns: from a key to the module and the side of its factor, what in a key PEFT does not know, and the layout's name.
Does not own: which of them should be there (`adapter_files.whole`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshlora_judge.experts import PREFIX, ROWS

# A, B: of a linear, conv or stack of experts; embedding_A, embedding_B; magnitude: of DoRA; bias: of B.
_WRAPPER = re.compile(r"(?<![^.])(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
_RANK = re.compile(r"[._](?:tp_|ep_|dp_|pp_)?rank[_-]?\d+(?=[._]|$)")
_PEFT = re.compile(r"\.(lora_(?:A|B|embedding_A|embedding_B)|lora_magnitude_vector)(?:\.(.+))?$")
_TORCHTUNE = re.compile(r"\.(lora_a\.weight|lora_b\.weight|magnitude)$")
_MEGATRON = re.compile(r"\.(?:adapters?|adapter_layer\.\w+)\.(linear_in|linear_out)\.weight$")
_MCORE = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_SIDES = {"linear_in": "A", "linear_out": "B", "lora_a.weight": "A", "lora_b.weight": "B", "magnitude": "magnitude"}


@dataclass(frozen=True)
class Part:
    """A tensor of an adapter file.

    Attributes:
        key: its name there. module: the module in the base model. side: as above; "" if it is no factor of LoRA.
        adapter: the adapter's own name, where the key has it. flaw: what in the key PEFT does not know.
    """

    key: str
    module: str
    side: str
    adapter: str = ""
    flaw: str = ""

    @property
    def name(self) -> str:
        """Module and side, whatever else is in the key."""
        return f"{self.module}.lora_{self.side}" if self.side else self.module


@dataclass
class Names:
    """The names of a file. layout: who writes such. is_peft: whether PEFT reads this form of names."""

    parts: list[Part] = field(default_factory=list)
    layout: str = "PEFT"
    is_peft: bool = True

    def by_module(self) -> dict[str, dict[str, Part]]:
        """Module -> its factors by side."""
        found: dict[str, dict[str, Part]] = {}
        for part in self.parts:
            if part.side:
                found.setdefault(part.module, {}).setdefault(part.side, part)
        return found


def names_of(keys: Collection[str], config: Mapping[str, Any] | None, files: Collection[str]) -> Names:
    """Names of the tensors `keys` beside a configuration, or none, and other `files` of the folder."""
    # One key is enough: no writer mixes layouts, and the rest of the file may be other tensors.
    for pattern, layout in ((_MEGATRON, "Megatron"), (_TORCHTUNE, "torchtune")):
        if any(map(pattern.search, keys)):
            return Names([_other(key, pattern) for key in sorted(keys)], layout, is_peft=False)
    parts = list(map(_of_peft, sorted(keys)))
    # loralib's factors are parameters, not modules. AdaLoRA's in PEFT are, too, but come with a configuration.
    bare = [part for part in parts if part.side in ("A", "B") and part.key.endswith((".lora_A", ".lora_B"))]
    if bare and config is None:
        return Names(parts, "loralib", is_peft=False)
    names = Names(parts, "PEFT")
    if any(re.search(r"\.experts\.\d+\.", part.module) for part in parts if part.side):
        names.layout = "PEFT with a module per expert, as vLLM reads"
    elif any(part.module.rpartition(".")[2] in _MCORE for part in parts):
        names.layout = "PEFT with Megatron's names, as mcore-bridge writes"
    elif config is not None and dict(_mapping(config.get("auto_mapping"))).get("unsloth_fixed"):
        names.layout = "PEFT by unsloth"
    elif {"additional_config.json", "args.json"} & set(files):
        names.layout = "PEFT by ms-swift"
    return names


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _other(key: str, pattern: re.Pattern[str]) -> Part:
    match = pattern.search(key)
    if match is None:
        return Part(key, key, "")
    return Part(key, key[: match.start()], _SIDES[match[1]])


def _of_peft(key: str) -> Part:
    name, flaws = key, []
    if _WRAPPER.search(name):
        flaws.append("the name of a wrapper (FSDP, torch.compile or checkpointing)")
        name = _WRAPPER.sub("", name)
    if _RANK.search(name):
        flaws.append("the number of a rank")
        name = _RANK.sub("", name)
    if name.startswith(("module.", f"{PREFIX}module.")):
        flaws.append("the prefix module. of a wrapper")
        name = name.removeprefix(PREFIX).removeprefix("module.")
        name = name if name.startswith(PREFIX) else f"{PREFIX}{name}"
    if name.startswith(PREFIX * 2):
        flaws.append(f"the prefix {PREFIX} twice")
    elif not name.startswith("base_model."):
        flaws.append(f"no prefix {PREFIX}")
    # What remains is the module's name in the base, so that two spellings of one tensor are seen to be one.
    while name.startswith(PREFIX):
        name = name.removeprefix(PREFIX)
    match = _PEFT.search(name)
    if match is None:
        return Part(key, name.removesuffix(".default") if ROWS in name else name, "", "", ", ".join(flaws))
    side, rest = match[1].removeprefix("lora_").removesuffix("_vector"), match[2] or ""
    adapter, _, leaf = rest.rpartition(".")
    # An adapter's name may hold dots: only the last word can be the leaf.
    if leaf not in ("weight", "bias"):
        adapter, leaf = rest, ""
    if adapter:
        flaws.append(f"the adapter's name {adapter!r}")
    elif side in ("A", "B") and not leaf:
        flaws.append("no .weight at the end")
    if leaf == "bias":
        side = "bias" if side == "B" else ""
    return Part(key, name[: match.start()], side, adapter, ", ".join(flaws))
