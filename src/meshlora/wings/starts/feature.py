"""What the core asks of adapters that begin otherwise than drawn; see `meshlora.feature`."""

from __future__ import annotations

from peft import LoraConfig

from meshlora.adapter.initialization import Start
from meshlora.feature import Feature
from meshlora.wings.starts.decomposed import Decomposed
from meshlora.wings.starts.eva import Eva
from meshlora.wings.starts.orthogonal import Orthogonal
from meshlora.wings.starts.others import refuse_others


class _Starts(Feature):
    def start_of(self, config: LoraConfig) -> Start | None:
        init = config.init_lora_weights
        refuse_others(config)
        if not isinstance(init, str):
            return None
        word = init.lower()  # as PEFT reads it
        if word == "olora" or word.startswith("pissa"):
            return Decomposed(init)
        if init == "orthogonal":
            return Orthogonal(init)
        if init == "eva":
            return Eva(init)
        return None


FEATURE = _Starts()
