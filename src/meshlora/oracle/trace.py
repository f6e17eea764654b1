"""A trace: what one process of a run left behind, in memory and as one safetensors file.

Owns: the fields and the file. The reference leaves one trace, our side one per rank with what that rank holds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshlora.oracle.capture import MicroBatchCapture

_FACTORS = (
    *("initial", "gradients", "final", "fresh", "fresh_both"),
    *("rows", "columns", "base", "row_norms"),
)
_SCALARS = (
    "losses",
    "aux_losses",
    "grad_norms",
    "num_tokens",
    "rates",
    "eval_losses",
    "scalings",
    "fresh_scalings",
    "collectives",
    "budget",
    "order",
    "facts",
    "terms",
    "stacks",
    "dropouts",
)


@dataclass
class Trace:
    """Everything that is compared.

    Attributes:
        micro_batches: forwards and backwards of the first optimizer step.
        losses, grad_norms, num_tokens, rates: per optimizer step; the norm is that before clipping, the rate is the
            learning rate.
        aux_losses: that of load balancing, per optimizer step; empty where it is off.
        eval_losses: the mean loss over all sequences of the case, each time that they are evaluated.
        scalings, fresh_scalings: module -> scale of its adapter; of the one that is drawn (ours only).
        initial, gradients, final: factor -> value before the first step, gradient of the first step before clipping,
            value after the last step. clipped: per optimizer step, factor -> gradient after clipping.
        fresh, fresh_both: factors of adapters drawn from the user's configuration, and with B drawn too (ours only).
        rows, columns: module -> fingerprints of the rows and columns of its weight (`oracle.ownership`); of a
            projection of experts `[E, ...]`.
        base: trained parameter of the base -> its value there. row_norms: magnitude of DoRA -> norms of the base's rows
            (both reference only).
        final_logits: of the first micro-batch, after the last step (reference only).
        order: modules in execution order.
        facts: what the plan says of each linear and block, for the words of a diagnosis: name -> "column", "row",
            "whole", "split region", "whole region" (ours only).
        terms: modules whose output has a gradient that may be one term of a sum over tp: what lies between where a
            region is entered and where it is left (ours only).
        stacks: projection of experts with an adapter -> the values of an `oracle.experts.Stack` (reference only).
        dropouts: module with a dropout, `NAME.lora_dropout` for that of an adapter -> its rate (reference only).
        collectives, budget: "phase kind" -> calls in the first step, and how many there may be (ours only).
    """

    micro_batches: list[MicroBatchCapture] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    aux_losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)
    scalings: dict[str, float] = field(default_factory=dict)
    fresh_scalings: dict[str, float] = field(default_factory=dict)
    dropouts: dict[str, float] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    clipped: list[dict[str, Tensor]] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)
    fresh: dict[str, Tensor] = field(default_factory=dict)
    fresh_both: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    base: dict[str, Tensor] = field(default_factory=dict)
    row_norms: dict[str, Tensor] = field(default_factory=dict)
    final_logits: Tensor | None = None
    order: list[str] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    budget: dict[str, int] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    terms: list[str] = field(default_factory=list)
    stacks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write everything to `path`; not atomic, the caller owns the folder."""
        tensors: dict[str, Tensor] = {}
        for kind in _FACTORS:
            tensors |= {f"{kind}/{name}": tensor for name, tensor in getattr(self, kind).items()}
        for step, gradients in enumerate(self.clipped):
            tensors |= {f"clipped/{step}/{name}": tensor for name, tensor in gradients.items()}
        for index, micro in enumerate(self.micro_batches):
            tensors |= {f"ids/{index}": micro.input_ids, f"mask/{index}": micro.attention_mask}
            for kind in ("forward", "backward", "base"):
                tensors |= {f"micro-{kind}/{index}/{name}": tensor for name, tensor in getattr(micro, kind).items()}
        if self.final_logits is not None:
            tensors["final_logits"] = self.final_logits
        save_file(tensors, path, metadata={"scalars": json.dumps({name: getattr(self, name) for name in _SCALARS})})

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read what `save` wrote."""
        with safe_open(path, framework="pt") as file:
            trace = cls(**json.loads(file.metadata()["scalars"]))
            for key in sorted(file.keys(), key=_file_order):
                trace._put(key, file.get_tensor(key))
        return trace

    def _put(self, key: str, tensor: Tensor) -> None:
        kind, _, rest = key.partition("/")
        if kind == "final_logits":
            self.final_logits = tensor
        elif kind in _FACTORS:
            getattr(self, kind)[rest] = tensor
        elif kind == "clipped":
            step, _, name = rest.partition("/")
            self.clipped += [{} for _ in range(int(step) + 1 - len(self.clipped))]
            self.clipped[int(step)][name] = tensor
        elif kind == "ids":
            self.micro_batches.append(MicroBatchCapture(tensor, tensor))
        elif kind == "mask":
            self.micro_batches[int(rest)].attention_mask = tensor
        else:
            index, _, name = rest.partition("/")  # of a micro-batch
            getattr(self.micro_batches[int(index)], kind.removeprefix("micro-"))[name] = tensor


def _file_order(key: str) -> tuple[Any, ...]:
    """The ids of micro-batches first, by number: they make the place for the rest."""
    kind, _, rest = key.partition("/")
    return (0, int(rest), "") if kind == "ids" else (1, 0, key)
