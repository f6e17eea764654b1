"""Mutations: deliberate faults, each with the invariant that it breaks.

Owns: the registry, and how each fault is put in: by replacing one function of the product inside a context manager, on
every rank. The product knows nothing of it. `meshlora verify --mutation all` shows that every fault that can show on a
topology does; one that survives means that the proof proves less than it says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from unittest import mock

import torch

from meshlora.adapter import manage, peft_format
from meshlora.data import sampler
from meshlora.errors import UserError, did_you_mean
from meshlora.parallel import collectives, linear, region
from meshlora.parallel.linear import LoraLinearFunction, ParallelLinear
from meshlora.plan.grads import Side
from meshlora.plan.rules import Split
from meshlora.state import weights
from meshlora.train import gradsync, trainer
from meshlora.train.trainer import Trainer
from meshlora.verify import faults
from meshlora.verify.faults import Change, instead, then


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: as in `--mutation NAME`. invariant: what is true of the product and not with this fault.
        needs: what a run must have for the fault to show: "tp", "dp" (size above 1), "sp", "row_bias", "column_bias",
            "scale" (alpha/r is not 1), "steps" (more than one), "targets" (several, by name), "digits" (more than
            bfloat16 has), "whole_mixer" (a block that mixes tokens and is not split).
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


def applied(name: str | None) -> AbstractContextManager[None]:
    """The mutation `name`, or nothing.

    Raises:
        UserError: there is no such mutation.
    """
    return find(name).apply() if name is not None else contextlib.nullcontext()


def find(name: str) -> Mutation:
    """The mutation of that name.

    Raises:
        UserError: there is none.
    """
    if name not in MUTATIONS:
        raise UserError(f"--mutation {name}", "there is no such mutation", did_you_mean(name, ["all", *MUTATIONS]))
    return MUTATIONS[name]


def _of(name: str, invariant: str, needs: str, *changes: Change) -> tuple[str, Mutation]:
    return name, Mutation(name, invariant, frozenset(needs.split()), changes)


MUTATIONS: dict[str, Mutation] = dict(
    [
        _of(
            "row_output_not_reduced",
            "the output of a row-parallel linear is the sum over tp",
            "tp",
            (linear, "reduce_each_to_one", instead(lambda x, axis: x)),
            (linear, "reduce_scatter_each_to_each", instead(collectives.slice_one_to_each)),
        ),
        _of(
            "row_output_averaged",
            "the output of a row-parallel linear is a sum over tp, not a mean",
            "tp",
            (linear, "reduce_each_to_one", then(lambda y, x, axis: y / axis.size)),
            (linear, "reduce_scatter_each_to_each", then(lambda y, x, axis: y / axis.size)),
        ),
        _of(
            "row_output_reduced_twice",
            "the output of a row-parallel linear is summed over tp once",
            "tp",
            (linear, "reduce_each_to_one", lambda f: lambda x, axis: f(f(x, axis), axis)),
            (
                linear,
                "reduce_scatter_each_to_each",
                lambda f: lambda x, axis: f(collectives.reduce_each_to_one(x, axis), axis),
            ),
        ),
        _of(
            "base_shards_reversed",
            "tp rank i holds the i-th slice of a row-parallel weight",
            "tp",
            (weights.Part, "of", faults.reversed_columns),
        ),
        _of(
            "column_bias_of_rank_0",
            "tp rank i holds the i-th slice of the bias of a column-parallel linear",
            "tp column_bias",
            (weights, "_read_local", faults.column_bias_of_rank_0),
        ),
        _of(
            "row_bias_on_every_rank",
            "the bias of a row-parallel linear is added once, after the sum",
            "tp row_bias",
            (ParallelLinear, "_leave_region", faults.bias_before_reduction),
        ),
        _of(
            "column_input_gradient_not_reduced",
            "the gradient that leaves a split region is the sum over tp",
            "tp",
            *faults.NO_REDUCTION_AT_ENTRY,
        ),
        _of(
            "column_input_gradient_reduced_per_linear",
            "the gradient that leaves a split region is summed once for all of its column-parallel linears",
            "tp",
            *faults.NO_REDUCTION_AT_ENTRY,
            (ParallelLinear, "forward", faults.reduce_in_each_column_linear),
        ),
        _of(
            "column_a_not_summed",
            "the gradient of A of a column-parallel linear is summed over tp",
            "tp",
            faults.without_axis("tp", split=Split.COLUMN, side=Side.INPUT),
        ),
        _of(
            "row_b_not_summed",
            "the gradient of B of a row-parallel linear is summed over tp",
            "tp",
            faults.without_axis("tp", split=Split.ROW, side=Side.OUTPUT),
        ),
        _of(
            "factor_gradients_averaged",
            "gradients of factors are summed over tp, not averaged",
            "tp",
            (gradsync, "_sum_bucket", faults.averaged_over_tp),
        ),
        _of(
            "a_gradient_without_scale",
            "the gradients of both factors have the LoRA scale",
            "scale",
            (LoraLinearFunction, "backward", faults.a_without_scale),
        ),
        _of("dp_reduction_skipped", "gradients of factors are summed over dp", "dp", faults.without_axis("dp")),
        _of(
            "dp_mean_of_means",
            "every trained token weighs the same, on whichever dp rank it is",
            "dp",
            (trainer, "finish_gradients", faults.scaled_before(lambda total, own, dp: total / (dp * own))),
        ),
        _of(
            "local_token_count",
            "gradients are divided by the number of trained tokens of all ranks",
            "dp",
            (trainer, "finish_gradients", faults.local_count),
        ),
        _of(
            "micro_batch_means",
            "the loss is a sum over tokens: micro-batches of unequal length weigh unequally",
            "",
            (trainer, "summed_cross_entropy", instead(faults.mean_times_ten)),
        ),
        _of(
            "accumulation_indices_of_rank_0",
            "each sequence of a global batch is taken by exactly one dp rank",
            "dp",
            (trainer, "share", lambda f: lambda indices, *, dp_rank, **rest: f(indices, dp_rank=0, **rest)),
        ),
        _of(
            "dummy_micro_batch_counted",
            "a dummy micro-batch adds neither loss nor tokens",
            "dp",
            (trainer, "collate", then(faults.counted_dummy)),
        ),
        _of(
            "labels_not_shifted",
            "the label of a position is the token after it",
            "",
            (trainer, "collate", then(faults.labels_not_shifted)),
        ),
        _of(
            "epochs_in_one_order",
            "every epoch has an order of its own",
            "steps",
            (sampler, "epoch_order", lambda f: lambda n, *, seed, epoch: f(n, seed=seed, epoch=0)),
        ),
        _of(
            "evaluation_per_sequence",
            "the evaluated loss is a mean over tokens",
            "",
            (Trainer, "evaluate", then(faults.mean_over_sequences)),
        ),
        _of(
            "labels_shifted_after_the_split",
            "labels are shifted before the tokens are cut over tp",
            "sp",
            (trainer, "collate", then(faults.labels_lost_at_cuts)),
        ),
        _of(
            "a_drawn_per_rank",
            "a fresh A has the same bits on every topology",
            "tp",
            (manage, "draw_factors", faults.seed_of_rank),
        ),
        _of(
            "a_drawn_per_dp_rank",
            "dp ranks start from the same factors",
            "dp",
            (manage, "draw_factors", faults.seed_of_rank),
        ),
        _of(
            "kaiming_on_local_fan_in",
            "the bound of a fresh A comes from the whole matrix' in_features",
            "tp",
            (manage, "attach", faults.local_fan_in),
        ),
        _of(
            "b_unequal_on_replicas",
            "copies of a factor are equal to the bit",
            "tp",
            (manage, "draw_factors", then(faults.other_b)),
        ),
        _of(
            "lora_scale_divided_by_tp",
            "the LoRA scale does not know tp",
            "tp",
            (ParallelLinear, "add_adapter", faults.scaling(lambda s, tp: s / tp)),
        ),
        _of(
            "lora_scale_squared",
            "the LoRA scale is applied once",
            "scale",
            (ParallelLinear, "add_adapter", faults.scaling(lambda s, tp: s * s)),
        ),
        _of(
            "sp_slices_rotated",
            "tp rank i holds the i-th slice of the tokens",
            "sp",
            (region, "slice_one_to_each", faults.next_slice),
        ),
        _of(
            "sp_gather_reversed",
            "slices of tokens are gathered in the order of the tp ranks",
            "sp",
            (region, "gather_each_to_each", then(faults.blocks_reversed)),
            (region, "gather_each_to_one", then(faults.blocks_reversed)),
        ),
        _of(
            "whole_region_sees_its_slice",
            "a block that is not split sees all tokens",
            "sp whole_mixer",
            (region, "_install_region", faults.blind_whole_regions),
        ),
        _of(
            "clip_norm_counts_replicas",
            "every logical element counts once in the gradient norm",
            "tp",
            (gradsync, "_sum_of_squares", then(faults.replicas_counted)),
        ),
        _of(
            "clip_before_reduction",
            "gradients are clipped after they are summed over all ranks",
            "tp",
            (trainer, "finish_gradients", faults.clip_first),
        ),
        _of(
            "clip_before_dp_reduction",
            "gradients are clipped after they are summed over dp",
            "dp",
            (trainer, "finish_gradients", faults.clip_first),
        ),
        _of(
            "clipping_skipped",
            "gradients are scaled down to the largest norm",
            "",
            (trainer, "clip_gradients", lambda f: lambda model, max_norm: f(model, None)),
        ),
        _of(
            "warmup_skipped",
            "the learning rate falls from the end of the warm-up, not from the start",
            "steps",
            (trainer, "linear", lambda f: lambda step, **options: f(step, **{**options, "warmup_steps": 0})),
        ),
        _of("weight_decay_skipped", "weights decay as configured", "digits", faults.optimizer_with(weight_decay=0.0)),
        _of(
            "default_betas", "AdamW has the configured betas", "steps digits", faults.optimizer_with(betas=(0.9, 0.999))
        ),
        _of(
            "last_step_left_out",
            "a run takes as many optimizer steps as configured",
            "steps",
            (Trainer, "train", faults.without_last_step),
        ),
        _of(
            "scale_of_fresh_squared",
            "a fresh adapter has the scale of its configuration",
            "scale",
            (manage, "attach", faults.scale_of_fresh_squared),
        ),
        _of(
            "adapter_loaded_on_rank_0_only",
            "every rank holds its part of a loaded adapter",
            "tp",
            (peft_format, "attach", faults.on_rank_0_only),
        ),
        _of(
            "adapter_loaded_on_dp_rank_0_only",
            "every dp rank holds a loaded adapter",
            "dp",
            (peft_format, "attach", faults.on_rank_0_only),
        ),
        _of(
            "shard_missing_in_file",
            "the saved file has the shards of all tp ranks",
            "tp",
            faults.in_file(faults.first_shard_only, split=True),
        ),
        _of(
            "whole_entries_duplicated_in_file",
            "what every rank holds is saved once",
            "tp",
            faults.in_file(lambda t, dim, tp: torch.cat([t] * tp, 0), split=False),
        ),
        _of(
            "shards_reversed_in_file",
            "the saved file has the shards in the order of the tp ranks",
            "tp",
            faults.in_file(lambda t, dim, tp: torch.cat(t.tensor_split(tp, dim)[::-1], dim), split=True),
        ),
        _of(
            "rounded_in_file",
            "the saved file has the bits that the ranks hold",
            "",
            (peft_format, "save_file", faults.rounded_in_file),
        ),
        _of(
            "extra_entry_in_file",
            "the saved file holds the factors and nothing else",
            "",
            (peft_format, "gather_adapter", then(faults.extra_entry)),
        ),
        _of(
            "alpha_doubled_in_file",
            "the stored configuration is that of the adapter",
            "",
            (peft_format, "_config_to_store", then(lambda v, *_: v | {"lora_alpha": 2 * v["lora_alpha"]})),
        ),
        _of(
            "target_missing_in_fresh_file",
            "the stored configuration of a fresh adapter names all of its targets",
            "targets",
            (manage, "final_config", then(faults.one_target_less)),
        ),
    ]
)
