"""What the core asks of adapters that begin otherwise than drawn; see `meshlora.feature`.

Owns: which start a configuration asks for; initialisations and kinds of LoRA that PEFT has and meshlora refuses, by
name, with why and what to do instead.
"""

from __future__ import annotations

from peft import LoraConfig

from meshlora.adapter.initialization import Start
from meshlora.feature import Feature
from meshlora.wings.starts.decomposed import Decomposed
from meshlora.wings.starts.eva import Eva
from meshlora.wings.starts.orthogonal import Orthogonal
from meshlora_ground.errors import UnsupportedError

_EVA = "use init_lora_weights: eva, which looks at data too, or true"
_PLAIN = "leave it out: plain LoRA on the same targets trains as many parameters"
_STARTS = {
    "corda": (
        "it decomposes weights by a covariance of inputs that PEFT computes before, in a script of its own",
        _EVA,
    ),
    "lora_ga": ("it decomposes gradients of the whole weights, which no rank of a mesh has", _EVA),
    "loftq": (
        "PEFT stores a base that was quantised and changed target by target, of which an adapter's file says nothing",
        "use model.quantization: nf4 with init_lora_weights: true, or pissa without quantization",
    ),
    "mica": ("its B stays frozen, and only A is trained", "use train.optimizer: lora_fa, which freezes A, or true"),
}
_OPTIONS = {
    "use_qalora": ("QALoRA pools inputs by the groups of a GPTQ checkpoint", "use LoRA on model.quantization: nf4"),
    "arrow_config": ("Arrow routes tokens among adapters that are trained already", "train them one by one"),
    "velora_config": ("VeLoRA's gradients are approximations, of inputs that it compresses", _PLAIN),
    "use_bdlora": ("BD-LoRA's factors are blocks, one for each rank of an engine", _PLAIN),
    "kasa_config": ("KaSA cuts singular values off the base, and trains further ones", _PLAIN),
    "monteclora_config": ("MonteCLoRA draws other factors in every forward", _PLAIN),
    "corda_config": _STARTS["corda"],
    "lora_ga_config": _STARTS["lora_ga"],
    "loftq_config": _STARTS["loftq"],
    "layer_replication": (
        "the layers of a copy share their weights with the original's",
        "write the model with its layers repeated as a checkpoint of its own, and train that",
    ),
    "megatron_config": ("it is for models of Megatron", _PLAIN),
}


def refuse_others(config: LoraConfig) -> None:
    """Raises: UnsupportedError: one of these is set."""
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() in _STARTS:
        because, way_out = _STARTS[init.lower()]
        raise UnsupportedError(f"LoraConfig(init_lora_weights={init!r})", because, way_out)
    for option, (because, way_out) in _OPTIONS.items():
        if value := getattr(config, option, None):
            raise UnsupportedError(f"LoraConfig({option}={value!r})", because, way_out)


class Wing(Feature):
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
