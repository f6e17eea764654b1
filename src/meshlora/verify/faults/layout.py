"""Mutations in what lies where: pieces of fused matrices, key/value heads, arguments with heads, the vocabulary,
what rides with a region's input, shards of a base that is sharded over dp, blocks of one that is quantised.

Owns: this part of the registry (`verify.faults.registry` has the rest). Does not own: the wrong code
(`verify.faults.misplaced`).
"""

from __future__ import annotations

from meshlora.adapter import attach
from meshlora.adapter import plan as adapter_plan
from meshlora.adapter.formats import file_tensors, peft_format
from meshlora.comm import collectives
from meshlora.layers import embedding, linear, split_norm
from meshlora.layers.embedding import ParallelEmbedding
from meshlora.layers.head import loss as vocabulary
from meshlora.layers.linear import ParallelLinear
from meshlora.model import regions, weights
from meshlora.plan.layout import Piece
from meshlora.train import gradsync
from meshlora.verify.faults import misplaced, wrong_code
from meshlora.verify.faults.fault import Mutation, in_call, instead, mutation, then
from meshlora.verify.faults.quantization import OF_QUANTIZATION
from meshlora.verify.faults.riding import OF_RIDING
from meshlora.verify.faults.sharding import OF_SHARDING

OF_LAYOUT: dict[str, Mutation] = (
    dict(
        [
            mutation(
                "qkv_pieces_reversed",
                "a rank holds the rows of a fused matrix in the order q, k, v",
                "tp fused_qkv",
                (weights, "_read_local", misplaced.pieces_reversed("q k v")),
            ),
            mutation(
                "gate_and_up_swapped",
                "a rank holds its rows of gate before those of up",
                "tp fused_gate_up",
                (weights, "_read_local", misplaced.pieces_reversed("gate up")),
            ),
            mutation(
                "fused_base_cut_as_one_matrix",
                "of a fused matrix each rank holds a share of every piece",
                "tp fused_blocks",
                (weights, "_read_local", misplaced.read_as_one_matrix),
                (attach, "local_part", misplaced.factor_as_one_matrix),
            ),
            mutation(
                "fused_b_cut_as_one_matrix",
                "the rows of B go with the rows of the base",
                "tp fused_blocks fused_target",
                (attach, "local_part", misplaced.factor_as_one_matrix),
            ),
            mutation(
                "piece_lands_on_the_next",
                "an adapter on a piece adds to the rows of that piece",
                "pieces",
                (ParallelLinear, "_piece_rows", misplaced.one_piece_further),
            ),
            mutation(
                "piece_on_the_next_in_file",
                "the saved B of an adapter on pieces is zero outside their rows",
                "pieces",
                (
                    peft_format,
                    "file_tensors",
                    in_call(file_tensors, "_rows_of_pieces", misplaced.rows_one_piece_further),
                ),
            ),
            mutation(
                "kv_head_of_another_rank",
                "a rank holds the key/value heads that its query heads go with",
                "kv_replicas",
                (Piece, "share", misplaced.units_dealt_round),
            ),
            mutation(
                "kv_replicas_not_summed",
                "the gradient of rows that several tp ranks hold is summed over them",
                "kv_replicas kv_target",
                (gradsync, "_segments", wrong_code.segments_with(wrong_code.without_axes(lambda axis: "/" in axis))),
            ),
            mutation(
                "kv_replicas_counted_in_norm",
                "rows that several tp ranks hold count once in the gradient norm",
                "kv_replicas kv_target",
                (gradsync, "_sum_of_squares", wrong_code.COPIES_COUNTED),
            ),
            mutation(
                "heads_of_rank_0_in_arguments",
                "of an argument with a dim of heads each rank sees its own",
                "sliced",
                (regions, "_cut_arguments", misplaced.arguments_of_rank_0),
            ),
            mutation(
                "wide_norm_weight_of_rank_0",
                "tp rank i holds the i-th slice of the weight of a norm over a split width",
                "tp wide_norm",
                (weights, "_read_local", misplaced.read_as(misplaced.rank_0, where=misplaced.is_wide_norm)),
            ),
            mutation(
                "wide_norm_over_local_width",
                "a norm over a split width has the mean of squares of the whole",
                "tp wide_norm",
                (split_norm, "reduce_each_to_each", instead(lambda x, axis: x * axis.size)),
            ),
            mutation(
                "wide_norm_gradient_not_reduced",
                "the gradient of a mean over a split width is summed over tp",
                "tp wide_norm",
                (split_norm, "reduce_each_to_each", instead(collectives.reduce_each_to_one)),
            ),
            mutation(
                "embedding_rows_of_another_rank",
                "a rank looks up the tokens of its own part of the vocabulary",
                "tp",
                (ParallelEmbedding, "_local", misplaced.rows_of_next_rank),
            ),
            mutation(
                "embedding_of_others_not_masked",
                "a rank adds nothing for tokens that are another's",
                "tp",
                (ParallelEmbedding, "_local", then(misplaced.nothing_masked)),
            ),
            mutation(
                "embedding_not_reduced",
                "the embedding of a token is the sum over tp",
                "tp",
                (embedding, "reduce_each_to_one", instead(lambda x, axis: x)),
            ),
            mutation(
                "embedding_b_not_summed",
                "the gradient of B on the embedding is summed over tp",
                "tp embedding_target",
                (adapter_plan, "embedding_rule", then(wrong_code.output_without_tp)),
            ),
            mutation(
                "logits_gathered_in_another_order",
                "logits are gathered in the order of the tp ranks",
                "tp",
                (linear, "gather_each_to_one", then(wrong_code.blocks_reversed)),
            ),
            mutation(
                "labels_of_another_rank",
                "a rank finds the labels of its own part of the vocabulary",
                "tp",
                (vocabulary._ChunkLoss, "__call__", misplaced.labels_of_next_rank),
            ),
            mutation(
                "padding_in_softmax",
                "the padding of a vocabulary is no part of the softmax",
                "padded_vocabulary",
                (vocabulary._ChunkLoss, "__call__", misplaced.padding_in_softmax),
            ),
            mutation(
                "smoothed_over_local_vocabulary",
                "label smoothing takes the mean over the whole vocabulary",
                "tp smoothing sft",
                (vocabulary._ChunkLoss, "__call__", misplaced.smoothed_over_local_vocabulary),
            ),
        ]
    )
    | OF_RIDING
    | OF_SHARDING
    | OF_QUANTIZATION
)
