"""What this wing brings to the core: a plan for a family that no table has, found on a small model of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from meshlora.feature import Feature
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.families.family import FamilyPlan
from meshlora.wings.found.finder import Found, find_plan
from meshlora.wings.found.kept import as_yaml, given, kept, shipped, text_of
from meshlora.wings.found.probe import small_model
from meshlora.wings.found.trial import FAILURES
from meshlora_ground.errors import UnsupportedError, reason
from meshlora_ground.float64 import lift

# The field of a configuration with a plan that a user gives: so the configuration of a twin has it too.
FIELD = "meshlora_plan"
# A model of at most so many parameters is its own twin.
_SMALL = 5_000_000
_BY_MODEL: WeakKeyDictionary[Any, Found] = WeakKeyDictionary()
# How a configuration becomes that of a twin, first; empty: nobody has said it, and large models have no plan.
_SHRINK: list[Callable[[Any], Any]] = []


def use_twins(shrink: Callable[[Any], Any]) -> None:
    """Let plans of large models be found on the twin that `shrink` makes of their configuration."""
    _SHRINK[:] = [shrink]


def found_of(model: Any) -> Found | None:
    """What was found or given for `model` when it was planned; None: its family has a plan elsewhere."""
    return _BY_MODEL.get(model)


def plan_text(model: Any) -> str:
    """The plan that was found or given for `model` when it was planned, as YAML; "": its family has one elsewhere."""
    return as_yaml(_BY_MODEL[model], model) if model in _BY_MODEL else ""


def notes_of(model: Any) -> tuple[str, ...]:
    """What was found of `model`, in words; nothing if its family has a plan elsewhere."""
    if (found := _BY_MODEL.get(model)) is None:
        return ()
    units = "; ".join(f"{block} by {words}" for block, words in found.units.items()) or "no part of its layers"
    what = f"no table has a plan of model_type {model.config.model_type!r}"
    notes = [f"{what}; found: {len(found.plan.leaves)} linears, {units}"]
    if found.kept_whole:
        words = "; ".join(f"{block}: {why}" for block, why in found.kept_whole.items())
        notes.append(f"{len(found.kept_whole)} kinds of blocks stay whole: {words}")
    return tuple(notes)


class Wing(Feature):
    def configure(self, config: Any, options: BaseOptions) -> None:
        if options.plan is not None:
            setattr(config, FIELD, text_of(Path(options.plan)))

    def found_plan(self, model: Any, layers_name: str, experts: Collection[str]) -> FamilyPlan | None:
        own = getattr(model.config, FIELD, None)
        has_encoder = model.config.is_encoder_decoder  # those that are shipped are of decoders alone
        known = shipped(model.config.get_text_config().model_type)
        if own is None and known is not None and not has_encoder:
            return known.plan
        if model not in _BY_MODEL:
            found = _find(model, layers_name, experts)
            if own is not None:
                found = _agreeing(given(own, model), found, model)
            if found is None:
                return None
            _BY_MODEL[model] = found
        return _BY_MODEL[model].plan


def _find(model: Any, layers_name: str, experts: Collection[str]) -> Found | None:
    """What is found on a twin of `model`; None: nobody can make one."""
    config = model.config
    if sum(parameter.numel() for parameter in model.parameters()) > _SMALL:
        if not _SHRINK:
            return None
        config = _SHRINK[0](config)

    # Without the blocks around experts, in which other linears are, too.
    apart = [name for name in experts if not any(other.startswith(f"{name}.") for other in experts)]

    def find() -> Found:
        try:
            with lift():
                return find_plan(small_model(config), layers_name, apart)
        except FAILURES as error:  # of the family's code, on text alone
            rule = "neither transformers nor meshlora has a tensor-parallel plan for it, and none is found"
            what = f"model_type {model.config.model_type!r}"
            raise UnsupportedError(what, f"{rule} ({reason(error)})", "use tp=1, with dp as you like") from error

    return kept(model, find)


def _agreeing(own: Found, found: Found | None, model: Any) -> Found:
    """`own`, a plan that a user gave. Raises: UnsupportedError: the twin of `model` has other units."""
    others = {} if found is None else found.plan.leaves
    for path, leaf in own.plan.leaves.items():
        if others.get(path, leaf) != leaf:
            given_as, found_as = (f"{each.split} {each.pieces}".strip() for each in (leaf, others[path]))
            rule = f"it splits {path} as {given_as}, and the twin of this configuration as {found_as}"
            way_out = "leave the plan out: one is found for this configuration"
            raise UnsupportedError(f"plan of model_type {model.config.model_type!r}", rule, way_out)
    return own
