"""What a run starts from: its base, split, with the adapter that it trains.

Owns: the adapter, a fresh one or that of a folder, and the frozen one that it is compared with. Does not own: planning
them (`loading.blueprint`), whether they can be trained as configured (`run.prepare`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshlora.adapter.formats.peft_format import lora_config
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.plan.features import Asked
from meshlora.plan.pairs import check
from meshlora.run.config.run_file import ModelConfig
from meshlora_ground.objective import Objective
from meshlora_ground.topology import Topology


@dataclass(frozen=True)
class Start:
    """A base and an adapter of a run file.

    lora: fields of a fresh adapter. folder: or that of one to continue from. reference: folder of the one that it is
    compared with. asked: `RunConfig.asked`.
    """

    model: ModelConfig
    objective: Objective
    topology: Topology
    lora: Mapping[str, Any] | None
    folder: str | None
    reference: str | None
    asked: Asked

    def blueprint(self, base: Blueprint | None) -> Blueprint:
        """The blueprint of base and adapter. base: of another run on the same model and topology, to reuse.

        Raises:
            UserError: names the option or the module that does not fit. UnsupportedError: what is not proved.
        """
        base = base or make_blueprint(self.model.path, self.topology, self.model, self.objective)
        if self.folder is not None:
            blueprint = base.with_folder(Path(self.folder))
        else:
            blueprint = base.with_adapter(lora_config(dict(self.lora or {}), "lora", unknown_is_error=True))
        check({**self.asked, **blueprint.asked})
        return blueprint.with_reference(self.reference)
