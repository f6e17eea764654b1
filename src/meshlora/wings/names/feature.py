"""What this wing brings to the core: other names in an adapter's file for modules whose own names PEFT changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshlora.feature import Feature
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.names_in_file import names_to_write

if TYPE_CHECKING:
    from meshlora.adapter.targets.resolve import Target


class Wing(Feature):
    def names_in_file(self, model: Any, targets: Mapping[str, Target]) -> Mapping[str, tuple[str, str]]:
        targets_of: dict[str, list[str]] = {}
        for name, target in targets.items():
            module = name
            if target.num_experts:  # PEFT's factors are those of the module around the parameter
                module = name.rpartition(".")[0]
            targets_of.setdefault(module, []).append(name)
        found: dict[str, tuple[str, str]] = {}
        for module, written in names_to_write(model, targets_of).items():
            if not written:
                rule = "PEFT renames its factors when it loads them, and takes those of no name for this module's"
                raise UnsupportedError(f"LoRA on {module}", rule, f"name it in exclude_modules: [{module}]")
            found |= dict.fromkeys(targets_of[module], (module, written))
        return found
