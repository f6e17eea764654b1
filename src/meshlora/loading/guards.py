"""Guards on the model: refuse what would depend on the topology, or see only one rank's part.

Owns: refusing the model's own dropouts, length-dependent rotary embeddings, and outputs that only a whole model has.
Does not own: refusals that follow from the plan, methods of transformers that ignore the mesh (`loading.methods`),
third-party wrappers (`model.wrappers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from meshlora.adapter import attach
from meshlora.loading.methods import take_methods
from meshlora.loading.numbered import given_tokens
from meshlora.model.wrappers import refuse_wrappers
from meshlora.plan.dropout import is_exact_dropout, is_exact_module
from meshlora.plan.pairs import check
from meshlora_ground import compat
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.tasks import CAUSAL, task_of
from meshlora_ground.topology import Topology

_DROPOUT_WORDS = ("dropout", "pdrop", "layerdrop", "drop_rate", "drop_path", "jitter")
_LENGTH_DEPENDENT = ("longrope", "dynamic")
_LENGTHENED = ("linear", "yarn")  # rotary embeddings for `factor` times as many positions


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
        is_exact = is_exact_dropout(part.model_type, name)
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
        is_dropout = compat.is_dropout(module) and module.p > 0
        if is_dropout and not is_exact_module(model.config.model_type, name):
            way_out = "turn it off: model.disable_dropout: unsupported"
            raise UnsupportedError(f"{name}: dropout {module.p}", "its masks would depend on the topology", way_out)


def _dropouts(config: Any) -> list[tuple[Any, str, float]]:
    """(configuration, field, rate) of all dropouts above 0 in `config` and its sub-configurations."""
    found = []
    unused = ("classifier", "summary_") if task_of(config) == CAUSAL else ()
    for part in _configs(config):
        for name, value in vars(part).items():
            is_dropout = any(word in name for word in _DROPOUT_WORDS) and not name.startswith(unused)
            if is_dropout and not isinstance(value, bool) and isinstance(value, int | float) and value > 0:
                found.append((part, name, value))
    return found


def longest_fixed_length(config: Any) -> tuple[int, str] | None:
    """(length up to which nothing depends on the batch length, what does beyond it); None: nothing does.

    longrope and dynamic scaling use the padded length of the whole batch, which differs between topologies. Doge keeps
    the best tokens by topk, which breaks ties, as between repeated tokens, depending on the length.
    """
    limits: list[int] = []
    if config.model_type == "doge":
        return config.keep_window_size, "dynamic mask"
    for part in _configs(config):
        rope = getattr(part, "rope_parameters", None) or {}
        for entry in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
            if entry.get("rope_type") in _LENGTH_DEPENDENT:
                own = entry.get("original_max_position_embeddings")
                limits += [n for n in (own, getattr(part, "original_max_position_embeddings", None)) if n]
                limits.append(part.max_position_embeddings)
    return (min(limits), "rotary embedding") if limits else None


def most_positions(config: Any, model: nn.Module | None = None) -> int | None:
    """The most tokens of a sequence that the model in `config` has positions for; None: there is no such number.

    Linear scaling and YaRN of rotary embeddings multiply what the configuration gives. model: if known; one that counts
    positions from its padding token on, as RoBERTa does, has so many less.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    rope, most = getattr(text, "rope_parameters", None) or {}, limit
    if rope.get("rope_type") in _LENGTHENED and isinstance(factor := rope.get("factor"), int | float):
        most = max(most, int(factor * (rope.get("original_max_position_embeddings") or limit)))
    for name, module in model.named_modules() if model is not None else ():
        is_of_positions = isinstance(module, nn.Embedding) and name.endswith("position_embeddings")
        if is_of_positions and module.padding_idx is not None:
            most = min(most, module.num_embeddings - module.padding_idx - 1)
    return most


def guard_model(model: Any, topology: Topology) -> None:
    """Install the guards on a parallel model."""
    take_methods(model)
    refuse_wrappers(model, topology)
    fixed = longest_fixed_length(model.config)

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _check_outputs(model.config, kwargs, topology)
        if torch.is_grad_enabled():
            attach.check_not_merged(model.meshlora, "a forward with gradients")
        tokens = given_tokens(args, kwargs)[1]
        if fixed is not None and torch.is_grad_enabled() and tokens is not None and tokens.shape[1] > fixed[0]:
            raise UnsupportedError(
                f"a batch of {tokens.shape[1]} positions",
                f"beyond {fixed[0]} the model's {fixed[1]} depends on the batch's length, hence on the topology",
                f"train with sequences of at most {fixed[0]} tokens",
            )

    model.register_forward_pre_hook(check, with_kwargs=True)


def _check_outputs(config: Any, kwargs: dict[str, Any], topology: Topology) -> None:
    """Refuse hidden states and attentions of which a rank has a part only."""
    names = ("output_hidden_states", "output_attentions")
    wanted = {name: kwargs.get(name) for name in names}
    wanted = {name: getattr(config, name, False) if value is None else value for name, value in wanted.items()}
    if any(wanted.values()):  # of each forward
        check({"topology": topology, **wanted})


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and its sub-configurations."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _configs(value)
