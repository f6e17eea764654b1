"""Mutations: deliberate faults, each with the invariant that it breaks.

Owns: the registry, parts of which are in `verify.mutations_of_*`. One that survives `meshlora verify --mutation all`
on a topology that it can show on means that the proof proves less than it says.
Does not own: how a fault is put in (`verify.faults.fault`), the wrong code (`verify.faults.wrong_code`,
`verify.faults.misplaced`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from meshlora.adapter import attach
from meshlora.adapter import plan as adapter_plan
from meshlora.adapter.formats import peft_format
from meshlora.comm import collectives
from meshlora.common.errors import UserError, did_you_mean
from meshlora.data import sampler
from meshlora.layers import linear
from meshlora.layers.linear import ParallelLinear
from meshlora.layers.products import LoraLinearFunction
from meshlora.model import inject, regions, weights
from meshlora.plan.grads import Side
from meshlora.plan.layout import Split
from meshlora.plan.rules import Domain
from meshlora.train import batches, gradsync, objectives, trained, trainer
from meshlora.train.trained import TrainedAdapter
from meshlora.verify.faults import misplaced, wrong_code
from meshlora.verify.faults.dropout import OF_DROPOUT
from meshlora.verify.faults.experts import OF_EXPERTS
from meshlora.verify.faults.fault import Mutation, instead, mutation, then
from meshlora.verify.faults.generated import generated
from meshlora.verify.faults.layout import OF_LAYOUT
from meshlora.verify.faults.micro_batches import OF_MICRO_BATCHES
from meshlora.verify.faults.objectives import OF_OBJECTIVES
from meshlora.verify.faults.packing import OF_PACKING
from meshlora.verify.faults.resuming import OF_RESUMING
from meshlora.verify.faults.runs import OF_RUNS
from meshlora.verify.faults.several import OF_SEVERAL


def applied(name: str | None) -> AbstractContextManager[None]:
    """The mutation `name`, or nothing.

    Raises:
        UserError: there is no such mutation.
    """
    return find(name).apply() if name is not None else contextlib.nullcontext()


def find(name: str) -> Mutation:
    """The mutation of that name, or the generated one.

    Raises:
        UserError: there is none.
    """
    if ":" in name:
        return generated(name)
    if name not in MUTATIONS:
        raise UserError(f"--mutation {name}", "there is no such mutation", did_you_mean(name, ["all", *MUTATIONS]))
    return MUTATIONS[name]


_OF_TRAINING: dict[str, Mutation] = dict(
    [
        mutation(
            "row_output_not_reduced",
            "the output of a row-parallel linear is the sum over tp",
            "tp",
            (linear, "reduce_each_to_one", instead(lambda x, axis: x)),
            (linear, "reduce_scatter_each_to_each", instead(collectives.slice_one_to_each)),
        ),
        mutation(
            "row_output_averaged",
            "the output of a row-parallel linear is a sum over tp, not a mean",
            "tp",
            (linear, "reduce_each_to_one", then(lambda y, x, axis: y / axis.size)),
            (linear, "reduce_scatter_each_to_each", then(lambda y, x, axis: y / axis.size)),
        ),
        mutation(
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
        mutation(
            "base_shards_reversed",
            "tp rank i holds the i-th slice of a row-parallel weight",
            "tp",
            (weights, "_read_local", misplaced.read_as(misplaced.reversed_rank, where=misplaced.is_row_weight)),
        ),
        mutation(
            "column_bias_of_rank_0",
            "tp rank i holds the i-th slice of the bias of a column-parallel linear",
            "tp column_bias",
            (weights, "_read_local", misplaced.read_as(misplaced.rank_0, where=misplaced.is_column_bias)),
        ),
        mutation(
            "row_bias_on_every_rank",
            "the bias of a row-parallel linear is added once, after the sum",
            "tp row_bias",
            (ParallelLinear, "_leave_region", wrong_code.bias_before_reduction),
        ),
        mutation(
            "column_input_gradient_not_reduced",
            "the gradient that leaves a split region is the sum over tp",
            "tp",
            wrong_code.NO_REDUCTION_AT_ENTRY,
        ),
        mutation(
            "column_input_gradient_reduced_per_linear",
            "the gradient that leaves a split region is summed once for all of its column-parallel linears",
            "tp",
            wrong_code.NO_REDUCTION_AT_ENTRY,
            (ParallelLinear, "forward", wrong_code.reduce_in_each_column_linear),
        ),
        mutation(
            "column_a_not_summed",
            "the gradient of A of a column-parallel linear is summed over tp",
            "tp column_target",
            wrong_code.without_tp(Split.COLUMN, Side.INPUT),
        ),
        mutation(
            "row_b_not_summed",
            "the gradient of B of a row-parallel linear is summed over tp",
            "tp row_target",
            wrong_code.without_tp(Split.ROW, Side.OUTPUT),
        ),
        mutation(
            "factor_gradients_averaged",
            "gradients of factors are summed over tp, not averaged",
            "tp",
            (gradsync, "_sum_bucket", wrong_code.averaged_over_tp),
        ),
        mutation(
            "a_gradient_without_scale",
            "the gradients of both factors have the LoRA scale",
            "scale",
            (LoraLinearFunction, "backward", wrong_code.a_without_scale),
        ),
        mutation(
            "dp_reduction_skipped",
            "gradients of factors are summed over dp",
            "dp",
            (gradsync, "_segments", wrong_code.segments_with(wrong_code.without_axes(lambda axis: axis == "dp"))),
        ),
        mutation(
            "dp_mean_of_means",
            "every trained token weighs the same, on whichever dp rank it is",
            "dp",
            (
                trainer,
                "finish_gradients_on_device",
                wrong_code.scaled_before(lambda total, own, dp: total / (dp * own)),
            ),
        ),
        mutation(
            "local_token_count",
            "gradients are divided by the number of trained tokens of all ranks",
            "dp",
            (trainer, "finish_gradients_on_device", wrong_code.local_count),
        ),
        mutation(
            "micro_batch_means",
            "the loss is a sum over tokens: micro-batches of unequal length weigh unequally",
            "sft",
            (objectives, "language_model_loss", then(wrong_code.mean_times_ten)),
        ),
        mutation(
            "accumulation_indices_of_rank_0",
            "each sequence of a global batch is taken by exactly one dp rank",
            "dp",
            (batches, "share", lambda f: lambda indices, *, dp_rank, **rest: f(indices, dp_rank=0, **rest)),
        ),
        mutation(
            "dummy_micro_batch_counted",
            "a dummy micro-batch adds neither loss nor tokens",
            "dp",
            (batches, "collate", then(wrong_code.counted_dummy)),
        ),
        mutation(
            "labels_not_shifted",
            "the label of a position is the token after it",
            "",
            (batches, "collate", then(wrong_code.labels_not_shifted)),
        ),
        mutation(
            "epochs_in_one_order",
            "every epoch has an order of its own",
            "steps",
            (sampler, "epoch_order", lambda f: lambda n, *, seed, epoch: f(n, seed=seed, epoch=0)),
        ),
        mutation(
            "evaluation_per_sequence",
            "the evaluated loss is a mean over tokens",
            "",
            (TrainedAdapter, "evaluate", then(wrong_code.mean_over_sequences)),
        ),
        mutation(
            "labels_shifted_after_the_split",
            "labels are shifted before the tokens are cut over tp",
            "sp",
            (batches, "collate", then(wrong_code.labels_lost_at_cuts)),
        ),
        mutation(
            "a_drawn_per_rank",
            "a fresh A has the same bits on every rank and topology",
            "ranks",
            (attach, "draw_factors", wrong_code.seed_of_rank),
        ),
        mutation(
            "kaiming_on_local_fan_in",
            "the bound of a fresh A comes from the whole matrix' in_features",
            "tp row_target",
            (attach, "attach", wrong_code.local_fan_in),
        ),
        mutation(
            "b_unequal_on_replicas",
            "copies of a factor are equal to the bit",
            "tp",
            (attach, "draw_factors", then(wrong_code.other_b)),
        ),
        mutation(
            "lora_scale_divided_by_tp",
            "the LoRA scale does not know tp",
            "tp",
            (ParallelLinear, "add_adapter", wrong_code.scaling(lambda s, tp: s / tp)),
        ),
        mutation(
            "lora_scale_squared",
            "the LoRA scale is applied once",
            "scale",
            (ParallelLinear, "add_adapter", wrong_code.scaling(lambda s, tp: s * s)),
        ),
        mutation(
            "sp_slices_rotated",
            "tp rank i holds the i-th slice of the tokens",
            "sp",
            (regions, "slice_one_to_each", wrong_code.next_slice),
        ),
        mutation(
            "sp_gather_reversed",
            "slices of tokens are gathered in the order of the tp ranks",
            "sp",
            (regions, "gather_each_to_each", then(wrong_code.blocks_reversed)),
            (regions, "gather_each_to_one", then(wrong_code.blocks_reversed)),
        ),
        mutation(
            "whole_region_sees_its_slice",
            "a block that is not split sees all tokens",
            "sp whole_mixer",
            (regions, "_install_region", wrong_code.blind_whole_regions),
        ),
        mutation(
            "clip_norm_counts_replicas",
            "every logical element counts once in the gradient norm",
            "tp",
            (gradsync, "_sum_of_squares", then(wrong_code.replicas_counted)),
        ),
        mutation(
            "clip_before_reduction",
            "gradients are clipped after they are summed over all ranks",
            "ranks",
            (trainer, "finish_gradients_on_device", wrong_code.clip_first),
        ),
        mutation(
            "clipping_skipped",
            "gradients are scaled down to the largest norm",
            "",
            (
                trainer,
                "clip_gradients_on_device",
                lambda f: lambda mesh, adapters, limits: f(mesh, adapters, [None] * len(limits)),
            ),
        ),
        mutation(
            "warmup_skipped",
            "the learning rate falls from the end of the warm-up, not from the start",
            "steps",
            (
                trained,
                "learning_rate",
                lambda f: (
                    lambda step, *, options, steps: f(step, options=replace(options, warmup_steps=0), steps=steps)
                ),
            ),
        ),
        mutation(
            "weight_decay_skipped", "weights decay as configured", "digits", wrong_code.optimizer_with(weight_decay=0.0)
        ),
        mutation(
            "default_betas",
            "AdamW has the configured betas",
            "steps digits",
            wrong_code.optimizer_with(betas=(0.9, 0.999)),
        ),
        mutation(
            "scale_of_fresh_squared",
            "a fresh adapter has the scale of its configuration",
            "scale",
            (attach, "attach", wrong_code.scale_of_fresh_squared),
        ),
        mutation(
            "adapter_loaded_on_rank_0_only",
            "every rank holds its part of a loaded adapter",
            "ranks",
            (peft_format, "attach", wrong_code.on_rank_0_only),
        ),
        mutation(
            "shard_missing_in_file",
            "the saved file has the shards of all tp ranks",
            "tp",
            wrong_code.in_file(wrong_code.first_shard_only, split=True),
        ),
        mutation(
            "whole_entries_duplicated_in_file",
            "what every rank holds is saved once",
            "tp",
            wrong_code.in_file(lambda t, dim, tp: torch.cat([t] * tp, 0), split=False),
        ),
        mutation(
            "shards_reversed_in_file",
            "the saved file has the shards in the order of the tp ranks",
            "tp",
            wrong_code.in_file(lambda t, dim, tp: torch.cat(t.tensor_split(tp, dim)[::-1], dim), split=True),
        ),
        mutation(
            "rounded_in_file",
            "the saved file has the bits that the ranks hold",
            "",
            (peft_format, "save_file", wrong_code.rounded_in_file),
        ),
        mutation(
            "extra_entry_in_file",
            "the saved file holds the factors and nothing else",
            "",
            (peft_format, "gather_adapter", then(wrong_code.extra_entry)),
        ),
        mutation(
            "alpha_doubled_in_file",
            "the stored configuration is that of the adapter",
            "",
            (peft_format, "_config_to_store", then(lambda v, *_: v | {"lora_alpha": 2 * v["lora_alpha"]})),
        ),
        mutation(
            "target_missing_in_fresh_file",
            "the stored configuration of a fresh adapter names all of its targets",
            "targets",
            (adapter_plan, "final_config", then(wrong_code.one_target_less)),
        ),
        mutation(
            "head_input_gradient_not_reduced",
            "the gradient that leaves the head is the sum over the parts of the vocabulary",
            "tp",
            (inject, "install_borders", wrong_code.no_reduction_at_head),
        ),
        mutation(
            "trained_norm_not_summed",
            "the gradient of a norm that is trained is summed over the ranks that see different tokens or terms",
            "sp trained",
            (adapter_plan, "whole_rule", lambda f: lambda domain, *, sp: f(Domain.EQUAL, sp=sp)),
        ),
        mutation(
            "trained_weights_missing_in_file",
            "the saved file has what is trained of the base",
            "trained",
            (
                peft_format,
                "gather_adapter",
                then(lambda full, *_, **__: {n: t for n, t in full.items() if ".lora_" in n}),
            ),
        ),
        mutation(
            "dora_norm_over_local_slice",
            "the norm of a row that is split over tp is that of the whole row",
            "tp dora row_target",
            (linear, "all_reduce_sum", instead(lambda x, axis: x)),
        ),
        mutation(
            "dora_norm_of_base_alone",
            "DoRA divides by the norm of the weight with the adapter",
            "dora",
            (ParallelLinear, "weight_norm", wrong_code.norm_of_base_alone),
        ),
        mutation(
            "row_magnitude_summed_as_other_kind",
            "a row-parallel linear's magnitude is summed over tp under sp alone, as the residual stream is",
            "tp dora row_target",
            (adapter_plan, "factor_rule", wrong_code.row_magnitude_of_other_kind),
        ),
    ]
)
_MORE = [OF_LAYOUT, OF_EXPERTS, OF_OBJECTIVES, OF_DROPOUT, OF_PACKING, OF_RUNS]
_MORE += [OF_RESUMING, OF_MICRO_BATCHES, OF_SEVERAL]
MUTATIONS: dict[str, Mutation] = functools.reduce(operator.or_, _MORE, _OF_TRAINING)
