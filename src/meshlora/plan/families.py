"""Families: which `model_type`s are proved to train right when they are split.

Owns: the list of proofs and the refusals that follow from the configuration alone.
Each name in `PROVED` has a float64 proof against one-process transformers + peft behind it, on tp=2 and tp=2,sp
(`tests/parity/test_families.py` repeats them): unproven means refused. With tp=1 the model's own code runs unchanged
and any dense family is accepted. `meshlora train` proves each run's own combination besides (`verify.preflight`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from meshlora.errors import UnsupportedError
from meshlora.plan.topology import Topology

# Written by `scripts/prove_families.py --record`: family -> worst relative error of its proof.
_RECORD = json.loads(Path(__file__).with_name("proved.json").read_text(encoding="utf-8"))
PROVED = frozenset(_RECORD["families"])

# What one process would do with these is not what their files say.
_REFUSED = {
    "emu3_text_model": "transformers stores it under a name that it does not load",
    "youtu": "transformers zeroes the padding token's embedding whenever it loads this family, and meshlora reads the "
    "stored one",
    "xglm": "transformers itself overflows on it in float64, so that it cannot be proved",
}

_EXPERTS = re.compile(r"Experts|MoE$|Moe$|MoeBlock|MoEBlock")


def check_family(model: Any, topology: Topology) -> None:
    """Refuse what cannot be right whatever the proofs say. `model` may be on the meta device.

    Raises:
        UnsupportedError: expert parallelism, a mixture of experts, an encoder-decoder, a family of `_REFUSED`.
    """
    config = model.config
    what = f"model_type {config.model_type!r}"
    if config.model_type in _REFUSED:
        raise UnsupportedError(what, _REFUSED[config.model_type])
    if config.model_type == "bloom" and config.pretraining_tp > 1 and config.slow_but_exact:
        raise UnsupportedError(
            "slow_but_exact", "it slices a weight past its adapter", "set it to false in config.json"
        )
    if topology.ep * topology.etp > 1:
        raise UnsupportedError(
            f"topology {topology}", "expert parallelism is not supported yet", "leave out ep and etp"
        )
    if any(_EXPERTS.search(type(module).__name__) for module in model.modules()):
        raise UnsupportedError(what, "mixtures of experts are not supported yet")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(what, "only decoder-only language models are supported")


def check_proved(config: Any, topology: Topology) -> None:
    """Refuse a split that nobody has proved.

    Raises:
        UnsupportedError: a family without a proof where tp > 1.
    """
    if topology.tp > 1 and config.model_type not in PROVED:
        raise UnsupportedError(
            f"model_type {config.model_type!r}",
            f"its split over tp={topology.tp} is not proved against one process",
            "use tp=1, with dp as you like; the proved families are " + ", ".join(sorted(PROVED)),
        )
