"""A model's own dropouts: which are exact on a mesh, by family and configuration field, and the refusal of others.

Owns: the table, what is set to 0, and the refusals. Does not own: masks (`meshlora_ground.masks`), the modules that
apply them (`layers.dropout`).

A dropout is exact if it is a separate `nn.Dropout`, acts on hidden states token by token and is called once per
forward. Not exact: dropout on attention weights, `F.dropout` in a model's forward, layer drop, router noise, and a
module called twice (phi's `resid_dropout`), whose two masks would be equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from meshlora.plan.rules import kind_of
from meshlora_ground.compat import torch_tensors
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.tasks import CAUSAL, task_of

_DROPOUT_WORDS = ("dropout", "pdrop", "layerdrop", "drop_rate", "drop_path", "jitter")

_GPT2 = {"resid_pdrop": ("attn.resid_dropout", "mlp.dropout"), "embd_pdrop": ("transformer.drop",)}
# model_type -> configuration field with the rate -> suffixes of the names of the modules that use it.
EXACT_DROPOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("codegen", "gpt2", "gpt_bigcode", "gptj"), _GPT2),
    "gpt_neo": {"resid_dropout": ("attention.resid_dropout", "mlp.dropout"), "embed_dropout": ("transformer.drop",)},
    "gpt_neox": {"hidden_dropout": ("emb_dropout", "post_attention_dropout", "post_mlp_dropout")},
    "persimmon": {"hidden_dropout": ("layers.*.dropout",)},
    "phi": {"embd_pdrop": ("embed_dropout",)},
    "stablelm": {"hidden_dropout": ("layers.*.dropout",)},
}


def is_exact_module(model_type: str, name: str) -> bool:
    """Whether the `nn.Dropout` module `name` is exact on every mesh."""
    kind = f".{kind_of(name)}"
    return any(kind.endswith(f".{end}") for ends in EXACT_DROPOUTS.get(model_type, {}).values() for end in ends)


def handle_dropout(config: Any, *, disable: bool | Literal["unsupported"]) -> None:
    """Set the model's own dropouts and router noise to 0 in `config` and its sub-configurations, or refuse those that
    would depend on the topology.

    disable: True: set all to 0. "unsupported": only those that would be refused.

    Raises:
        UnsupportedError: some are not exact, and `disable` is off; or one drops everything.
    """
    if disable and task_of(config) != CAUSAL and not getattr(config, "classifier_dropout", None):
        config.classifier_dropout = 0.0  # heads have one of 0.1 without being asked
    for part, name, value in _dropouts(config):
        is_exact = name in EXACT_DROPOUTS.get(part.model_type, {})  # on every mesh
        if disable is True or (disable == "unsupported" and not is_exact):
            setattr(part, name, type(value)(0))  # some families insist on whole numbers
        elif not is_exact:
            raise UnsupportedError(
                f"{name}={value} in the model's configuration",
                "its random numbers would depend on the topology",
                "turn what is not exact off: disable_dropout='unsupported' (in a run file, model.disable_dropout: "
                "unsupported), or all of the model's own dropouts: true",
            )
        elif value >= 1:
            raise UnsupportedError(f"{name}={value} in the model's configuration", "nothing would be left", "below 1")


def dropout_fields(config: Any) -> dict[str, float]:
    """Field -> rate of the dropouts left in `config` by `handle_dropout`."""
    return {name: float(value) for _, name, value in _dropouts(config)}


def check_dropouts(model: Any) -> None:
    """Check that a built model has only exact dropouts, wherever their rates came from.

    Raises:
        UnsupportedError: names the module.
    """
    for name, module in model.named_modules():
        is_dropout = torch_tensors.is_dropout(module) and module.p > 0
        if is_dropout and not is_exact_module(model.config.model_type, name):
            way_out = "turn it off: model.disable_dropout: unsupported"
            raise UnsupportedError(f"{name}: dropout {module.p}", "its masks would depend on the topology", way_out)


def _dropouts(config: Any) -> list[tuple[Any, str, float]]:
    """(configuration, field, rate) of all dropouts above 0 in `config` and its sub-configurations."""
    found = []
    unused = ("classifier", "summary_") if task_of(config) == CAUSAL else ()
    for part in parts_of(config):
        for name, value in vars(part).items():
            is_dropout = any(word in name for word in _DROPOUT_WORDS) and not name.startswith(unused)
            if is_dropout and not isinstance(value, bool) and isinstance(value, int | float) and value > 0:
                found.append((part, name, value))
    return found


def parts_of(config: Any) -> Iterator[Any]:
    """A configuration and its sub-configurations."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from parts_of(value)
