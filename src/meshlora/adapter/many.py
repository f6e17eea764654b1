"""Several adapters that are trained at once on one base.

Owns: which adapters can be, making them trainable together, and one of them at a time for what is done one by one
(saving, evaluating, its optimizer). Does not own: what a linear computes with several (`parallel.many`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from peft import LoraConfig

from meshlora.adapter.manage import adapter_factors, runtime, set_adapter
from meshlora.adapter.targets import Target
from meshlora.adapter.whole_matrix import WHOLE_MATRIX
from meshlora.errors import UnsupportedError
from meshlora.parallel.inject import parallel_leaves
from meshlora.parallel.linear import ParallelLinear
from meshlora.plan.rules import ModelPlan

_ALONE = "train it in a run of its own"


def check_many(name: str, lora: LoraConfig, targets: Mapping[str, Target], plan: ModelPlan) -> None:
    """Refuse the adapter `name` among several where that is not proved.

    Raises:
        UnsupportedError: names the option or the target.
    """
    refused = {
        "use_dora": lora.use_dora,
        f"bias={lora.bias!r}": lora.bias != "none",
        "modules_to_save": bool(lora.modules_to_save),
        f"init_lora_weights={lora.init_lora_weights!r}": lora.init_lora_weights in WHOLE_MATRIX,
        "pieces": any(target.pieces for target in targets.values()),
        "a model with experts": bool(plan.experts),
    }
    for option, is_given in refused.items():
        if is_given:
            raise UnsupportedError(f"adapter {name}: {option}", "it is not supported among several adapters", _ALONE)
    for target in targets:
        if target not in plan.linears or target == plan.head:
            what = "the output head" if target == plan.head else "no linear of the model"
            raise UnsupportedError(
                f"adapter {name} on {target}", f"it is {what}, where several adapters are not supported", _ALONE
            )


def train_many(model: Any, names: Iterable[str]) -> None:
    """Make the adapters `names` trainable, all others not; none is the active one.

    Forwards inside `model.meshlora.many.at(...)` run each on its own tokens; others run the base.
    """
    state = runtime(model)
    set_adapter(model, None)
    for leaf in parallel_leaves(model).values():
        if isinstance(leaf, ParallelLinear) and leaf.scaling:  # not the head, which sees some tokens at a time
            leaf.many = state.many
    for name in names:
        for factor in adapter_factors(model, name):
            factor.parameter.requires_grad_(True)


@contextlib.contextmanager
def one_of_many(model: Any, name: str) -> Iterator[None]:
    """Inside the block `name` is the active adapter, for what works on that one. What is trainable stays as it is."""
    state = runtime(model)
    leaves = list(parallel_leaves(model).values())
    before = state.active, [leaf.active for leaf in leaves]
    try:
        state.active = name
        for leaf in leaves:
            leaf.active = name
        yield
    finally:
        state.active = before[0]
        for leaf, active in zip(leaves, before[1], strict=True):
            leaf.active = active
