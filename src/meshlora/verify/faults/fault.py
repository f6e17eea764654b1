"""A mutation: one deliberate fault, and how it is injected.

    @around(batches, "share", needs="dp")
    def accumulation_indices_of_rank_0(original: Any, indices: Any, *, dp_rank: int, **rest: Any) -> Any:
        '''each sequence of a global batch is taken by exactly one dp rank'''
        return original(indices, dp_rank=0, **rest)

The wrong code is named after the fault; its docstring is the invariant that holds without the fault, not with it.

Owns: `Mutation`, replacing functions of the product inside a context manager, helpers of wrong code in several files.
The product does not know of it. Does not own: the faults themselves (the other files of this folder).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

from meshlora.processes.launchers import launcher_place

# A replacement: (owner, name, original -> replacement).
Change = tuple[Any, str, Callable[[Any], Any]]
Code = Callable[..., Any]


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: as in `--mutation NAME`. invariant: what holds in the product but not with the fault.
        needs: features a run must have for the fault to show, from `Proof.features_on`: "tp", "dp" (size above 1),
            "ranks" (more than one), "sp", "row_bias", "column_bias", "row_target", "column_target", "scale" (alpha/r is
            not 1), "steps" (more than one), "targets" (several, by name), "digits" (more than bfloat16 has),
            "whole_mixer" (a token mixer that is not split), "fused_qkv", "fused_gate_up" (matrices split piece by
            piece), "fused_blocks" (whose rows on a rank are not contiguous), "fused_target", "kv_replicas" (heads held
            by several ranks), "kv_target", "sliced" (arguments with a heads dim), "wide_norm", "padded_vocabulary",
            "mixer" (split, with heads of its own), "gated_norm" (over a split width, after its gate), "riding" (under
            sp, targets whose low-rank activations are gathered with a region's input), "riding_together" (several with
            one input); of experts "experts", "ep", "etp", "edp", "two_stage", "expert_axes" (ep or etp above 1),
            "gated_experts", "expert_bias", "routing_last" (weights scale the output), "dense_dp_is_not_edp",
            "expert_target", "shared_experts_adapter", "aux_loss", "other_tokens" (ranks route different tokens); of the
            adapter and the run "pieces", "embedding_target", "uneven_heads" (not a power of two), "ranks_by_pattern",
            "scales_by_pattern", "trained" (modules trained in full), "token_rows" (of a vocabulary, in place
            of the base's), "tied_rows" (that a tied head has too), "dora", "smoothing", "lora_plus", "noise" (on
            embedded tokens), "adamw", "adamw_8bit" or "lora_fa" (the optimizer); of cp "gathered_keys" (attention over
            cp, not as a ring), "balanced" (ranks have heads and tails of sequences), "soft_caps" (of scores), "rope",
            "recurrent" (mixers over cp), "passed_states" (of them); "data" (dp or cp above 1); of the objective its
            name, "base" (it needs the frozen base), "log_probabilities" (of whole rows), "examples" (its mean is over
            pairs or records), "pools_to_the_end" (embeddings are of all tokens, or of the last), "entropy" (a bonus),
            "policy_gradient", and of one "importance" (a cap of weights), "sequence_ratio", "means_of_sequences",
            "cispo", "kl_estimate" (not the default), "scaled_otherwise" (rewards, than by default), "routed" (rollouts
            say the experts of tokens); "seed" (not 0), "short_batch" (the last of an epoch), "embedding_padding" (a
            target with a padding token), "lora_dropout", "other_schedule" (not linear), "final_rate" (above 0),
            "odd_dropout" (not a multiple of 0.1), "model_dropout", "dropout" (either), "packing", "whole_rows" (on each
            rank: no cp), "first_tokens" (in whole rows of one sequence each, some of them trained), "few_tokens" (in a
            row on a cp rank, as many as it has documents), "unmasked" (padding at the end of rows has no mask),
            "m_rope" (positions of time, height and width), "resume", "one_micro_batch" (per step),
            "several_micro_batches", "four_micro_batches" (or more);
            of the frozen base "dp_shard", "quantized", "quantizes" (on load), "four_bits", "plain_base";
            "kernels" (fused, of a package); of images "images" (some sequences have them), "image_grid" (positions by
            grids), "image_blocks" (their tokens see each other), "features" (of a tower for the first layers), "vision"
            (an adapter on the tower).
        changes: the replaced functions.
    """

    name: str
    invariant: str
    needs: frozenset[str]
    changes: tuple[Change, ...]

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Inject the fault while the block runs."""
        with ExitStack() as stack:
            for change in self.changes:
                stack.enter_context(_replaced(change))
            yield


def fault(
    put_in: Callable[[Code, Any], Any],
    owner: Any,
    *names: str,
    needs: str = "",
    within: tuple[Any, str] | None = None,
    also: tuple[Change, ...] = (),
) -> Callable[[Code], Mutation]:
    """A decorator: the fault whose wrong code replaces each of `names` of `owner`.

    put_in(wrong code, original): the replacement. needs: separated by spaces, as in "tp row_target". within:
    (owner, name) of a function during whose calls alone the fault is injected. also: further replacements.
    """

    def of(wrong: Code) -> Mutation:
        changes: list[Change] = [(owner, name, functools.partial(put_in, wrong)) for name in names]
        if within is not None:
            changes = [(*within, functools.partial(_with, change)) for change in changes]
        return Mutation(wrong.__name__, wrong.__doc__ or "", frozenset(needs.split()), (*also, *changes))

    return of


def _around(wrong: Code, original: Code) -> Code:
    return lambda *args, **rest: wrong(original, *args, **rest)


def _after(wrong: Code, original: Code) -> Code:
    return lambda *args, **rest: wrong(original(*args, **rest), *args, **rest)


def _instead_of(wrong: Code, original: Code) -> Code:
    return wrong


# `fault` whose wrong code takes: the original and its arguments; the original's result and its arguments; only the
# arguments.
around = functools.partial(fault, _around)
after = functools.partial(fault, _after)
instead_of = functools.partial(fault, _instead_of)


def _replaced(change: Change) -> AbstractContextManager[Any]:
    owner, name, replace = change
    return mock.patch.object(owner, name, replace(getattr(owner, name)))


def _with(change: Change, original: Code) -> Code:
    """`original` with `change` injected during its calls."""

    def call(*args: Any, **rest: Any) -> Any:
        with _replaced(change):
            return original(*args, **rest)

    return call


def rank() -> int:
    """The global rank of this process."""
    place = launcher_place()
    return place.rank if place else 0


def without_axis(found: Any, axis: str) -> Any:
    """`found`, a rule or a part of a factor, without the sum of its gradient over `axis`."""
    return dataclasses.replace(found, grad_axes=found.grad_axes - {axis})
