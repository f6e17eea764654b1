"""A mutation: one deliberate fault, and how it is put in.

Owns: the word, and replacing functions of the product inside a context manager. The product knows nothing of it.
Does not own: which faults there are, each with its wrong code (the other files of this folder).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

# (owner, name, original -> replacement): what a fault replaces.
Change = tuple[Any, str, Callable[[Any], Any]]


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: as in `--mutation NAME`. invariant: what is true of the product and not with this fault.
        needs: what a run must have for the fault to show; `Proof.features_on` knows them: "tp", "dp" (size above 1),
            "ranks" (more than one), "sp", "row_bias", "column_bias", "row_target", "column_target", "scale" (alpha/r is
            not 1), "steps" (more than one), "targets" (several, by name), "digits" (more than bfloat16 has),
            "whole_mixer" (a block that mixes tokens and is not split), "fused_qkv", "fused_gate_up" (matrices that are
            split by pieces), "fused_blocks" (of which no rank holds neighbouring rows alone), "fused_target",
            "kv_replicas" (heads that several ranks hold), "kv_target", "sliced" (arguments with a dim of heads),
            "wide_norm", "padded_vocabulary", "riding" (under sp, targets whose z rides with a region's input),
            "riding_together" (several with one input); of experts "experts", "ep", "etp", "edp", "two_stage",
            "expert_axes" (ep or etp above 1), "gated_experts", "expert_bias", "routing_last" (weights are applied to
            what comes out), "dense_dp_is_not_edp", "expert_target", "shared_experts_adapter", "aux_loss",
            "other_tokens" (routers of some ranks see others); of the adapter and the run "pieces", "embedding_target",
            "uneven_heads" (no power of two), "ranks_by_pattern", "scales_by_pattern",
            "trained" (what is no LoRA), "dora", "smoothing", "lora_plus"; of the objective its name, and "base" (it
            needs the frozen base); "seed" (that is not 0), "short_batch" (the last of an epoch), "embedding_padding" (a
            target that knows its padding token), "lora_dropout", "odd_dropout" (no tenth), "model_dropout",
            "dropout" (either), "packing", "resume", "one_micro_batch" (a step has), "four_micro_batches"
            (or more); of the frozen base "dp_shard", "quantized".
        changes: the functions it replaces.
    """

    name: str
    invariant: str
    needs: frozenset[str]
    changes: tuple[Change, ...]

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """The fault is in while the block runs."""
        with ExitStack() as stack:
            for owner, name, replace in self.changes:
                stack.enter_context(mock.patch.object(owner, name, replace(getattr(owner, name))))
            yield


def mutation(name: str, invariant: str, needs: str, *changes: Change) -> Mutation:
    """A fault; `needs` in words, as in "tp row_target"."""
    return Mutation(name, invariant, frozenset(needs.split()), changes)


def by_name(*faults: Mutation) -> dict[str, Mutation]:
    """The faults of a theme."""
    return {fault.name: fault for fault in faults}


def then(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A replacement that calls the original and passes its result, and the arguments, to `function`."""
    return lambda original: lambda *args, **kwargs: function(original(*args, **kwargs), *args, **kwargs)


def instead(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A replacement that does not look at the original."""
    return lambda original: function


def in_call(owner: Any, name: str, replace: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A replacement that calls the original, and in that call alone `owner.name` is replaced."""

    def wrap(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(owner, name, replace(getattr(owner, name))):
                return original(*args, **kwargs)

        return call

    return wrap
