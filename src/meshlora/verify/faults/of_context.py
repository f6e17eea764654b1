"""Faults of context parallelism: whose tokens, keys, masks and states a rank has, what is counted and summed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshlora.comm import collectives
from meshlora.comm.groups import Axis, Mesh
from meshlora.layers import held_tokens, tokens
from meshlora.layers.held_tokens import ContextCut, HeldTokens
from meshlora.layers.tokens import ForwardTokens, Share
from meshlora.run import trainer
from meshlora.run.formulas.seen import Sums
from meshlora.train import batches, gradsync
from meshlora.train.batch import IGNORED, Batch
from meshlora.train.losses import Rows
from meshlora.verify.faults.fault import after, around, instead_of, not_summed, result, reversed_ranks, stating
from meshlora.verify.features import Feature
from meshlora.wings.context import attention_parts, borders, passed_states
from meshlora.wings.context.attention_parts import Part
from meshlora.wings.context.context import Block, RowsOfMask
from meshlora.wings.context.context_cache import ContextCache
from meshlora.wings.context.passed_states import PassedStates
from meshlora.wings.experts.balance import LoadBalancing
from meshlora_ground.topology import SEQUENCES, TOKENS

# --- attention: whose keys and values, in which order, seen by whom


@instead_of(held_tokens, "gather_each_to_each", needs={Feature.GATHERED_KEYS})
def context_key_gradients_not_summed(x: Tensor, axis: Axis) -> Tensor:
    """keys and values have the gradients of the queries of all cp ranks"""
    return collectives.gather_each_to_one(x, axis)


@after(HeldTokens, "__init__", needs={Feature.GATHERED_KEYS})
def context_mask_of_rank_0(_: None, self: HeldTokens, order: np.ndarray, *__: Any) -> None:
    """a rank has the rows of the mask of its own queries"""
    self.own_on_host = order[:, : self.per_rank]


@after(HeldTokens, "__init__", needs={Feature.GATHERED_KEYS, Feature.BALANCED})
def context_order_not_undone(_: None, self: HeldTokens, *__: Any) -> None:
    """gathered keys and values are put in the order of the row, of which masks are"""
    self.places = None  # as if they were in order


@after(RowsOfMask, "_block", needs={Feature.GATHERED_KEYS})
def context_first_key_left_out(block: Block, *_: Any) -> Block:
    """a block of queries has all keys that one of them sees, from the first one on"""
    if block.keys.stop - block.keys.start == 1:  # a softmax over no key is no number
        return block
    keys = slice(block.keys.start + 1, block.keys.stop)
    return dataclasses.replace(block, keys=keys, mask=block.mask[..., 1:].contiguous())


@around(RowsOfMask, "_rows", needs={Feature.GATHERED_KEYS, Feature.PACKING})
def context_mask_of_the_first_row(original: Any, self: RowsOfMask, rows: slice, *rest: np.ndarray) -> Any:
    """documents are kept apart by the borders of their own row"""
    return original(self, rows if rows.stop is None else slice(0, 1), *rest)  # a stop of None is all rows


# --- what reads keys from a cache, or runs on whole rows


@instead_of(held_tokens, "gather_each_to_each", needs={Feature.GATHERED_BESIDE})
def context_cached_key_gradients_not_summed(x: Tensor, axis: Axis) -> Tensor:
    """keys from a cache, and rows made whole, have the gradients of the tokens of all cp ranks"""
    return collectives.gather_each_to_one(x, axis)


@after(HeldTokens, "__init__", needs={Feature.CACHED_KEYS})
def context_cached_mask_of_rank_0(_: None, self: HeldTokens, order: np.ndarray, *__: Any) -> None:
    """beside keys from a cache a rank has the rows of the mask of its own queries"""
    self.own_on_host = order[:, : self.per_rank]


@around(ContextCache, "update_indexer", needs={Feature.INDEXER})
def context_indexer_keys_of_own_tokens(original: Any, self: ContextCache, key: Tensor, *rest: Any) -> Tensor:
    """an indexer chooses among the keys of all cp ranks"""
    found: Tensor = original(self, key, *rest)
    return torch.zeros_like(found).scatter(1, self.held.own.unsqueeze(-1).expand_as(key), key)


@instead_of(ContextCache, "end", needs={Feature.PAST_KEYS})
def context_keys_after_own_tokens(self: ContextCache) -> int:
    """an attention whose own mask takes the last rows as those of its queries has no later keys"""
    return self.held.length


# --- recurrent mixers


@after(passed_states, "receive_from_neighbour", needs={Feature.PASSED_STATES})
def context_state_begins_again(state: Tensor, *_: Any, step: int) -> Tensor:
    """a recurrent mixer goes on from the state that the cp rank before it leaves"""
    return torch.zeros_like(state) if step > 0 else state  # forwards go up the ranks


@after(passed_states, "receive_from_neighbour", needs={Feature.PASSED_STATES})
def context_state_without_gradient(state: Tensor, *_: Any, step: int) -> Tensor:
    """the state that a cp rank leaves has the gradient of the ranks after it"""
    return torch.zeros_like(state) if step < 0 else state  # and backwards down


@after(PassedStates, "update_conv_state", needs={Feature.RECURRENT})
def context_convolution_begins_again(inputs: Tensor, *_: Any, conv_kernel_size: int, **__: Any) -> Tensor:
    """a convolution reaches into the tokens of the cp rank before"""
    reach = conv_kernel_size - 1
    return torch.cat([0 * inputs[..., :reach], inputs[..., reach:]], -1)  # zeros, as before a sequence


# --- the cut of what a layer is called with


@around(HeldTokens, "gathered", needs={Feature.GATHERED_KEYS})
def context_keys_and_values_gathered_apart(original: Any, self: HeldTokens, x: Tensor) -> Any:
    """keys and values of a layer are gathered over cp once, together"""
    return torch.cat([original(self, part) for part in x.chunk(2, -1)], -1) if x.ndim > 2 else original(self, x)


@around(ContextCut, "cut", needs={Feature.CP, Feature.BALANCED})
def context_cut_in_one_piece(original: Any, self: ContextCut, x: Tensor) -> Any:
    """the residual stream is cut as the masks are: a head and a tail of each document"""
    held = self.held
    if held is None:
        return x
    return x.narrow(1, held.axis.rank * held.per_rank, held.per_rank)


@around(borders, "cut_argument", needs={Feature.CP, Feature.ROPE})
def context_positions_begin_again(original: Any, held: HeldTokens | None, name: str, value: Any) -> Any:
    """a token has its position in the row, whichever cp rank has it"""
    found = original(held, name, value)
    if held is None or not isinstance(value, Tensor) or not name.startswith("position_"):
        return found
    dim = -2 if name == "position_embeddings" else -1  # those have a width
    return value.narrow(dim, 0, held.per_rank).expand_as(found)


@around(borders, "cut_argument", needs={Feature.CP, Feature.SECOND_INPUTS})
def context_second_input_of_the_first_tokens(original: Any, held: HeldTokens | None, name: str, value: Any) -> Any:
    """what a layer takes for each token beside the stream is that of the tokens of its cp rank"""
    found = original(held, name, value)
    if held is None or name != "per_layer_input":
        return found
    return value.narrow(1, 0, held.per_rank)


@around(ForwardTokens, "parts", needs={Feature.DROPOUT, Feature.FEW_TOKENS})
def context_tokens_taken_for_pooled(original: Any, self: ForwardTokens, module: str, num_rows: int) -> list[Any]:
    """a cp rank with as many tokens as there are sequences drops by its tokens, not by the first of each sequence"""
    firsts = [share.of_sequences() for share in self._shares or ()]
    if num_rows == sum(share.tokens.numel() for share in firsts):
        return tokens._in_turn(firsts, 0, num_rows)
    return original(self, module, num_rows)


@after(ForwardTokens, "_held", needs={Feature.CP, Feature.DROPOUT})
def context_dropout_of_the_first_tokens(found: list[Share], self: ForwardTokens, shares: list[Share]) -> list[Share]:
    """a mask of dropout is that of the tokens that a cp rank has"""
    changed = []
    for own, whole in zip(found, shares, strict=True):
        first = whole.tokens[:, : own.tokens.shape[1]]
        changed.append(dataclasses.replace(own, tokens=first))
    return changed


# --- rows, labels and counts


@after(batches, "collate", needs={Feature.CP})
def context_rows_cut_to_a_multiple(batch: Batch, *_: Any, row_multiple: int = 1, **__: Any) -> Batch:
    """a row whose length is no multiple of cp is padded, and loses no token"""
    longest = int(batch.attention_mask.sum(1).max())
    end = longest // row_multiple * row_multiple
    if batch.is_dummy or end == longest:
        return batch
    labels, mask = batch.labels.clone(), batch.attention_mask.clone()
    labels[:, max(end - 1, 0) :], mask[:, end:] = IGNORED, 0
    return dataclasses.replace(
        batch, labels=labels, attention_mask=mask, num_trained_tokens=int((labels != IGNORED).sum())
    )


def _with_labels(batch: Batch, labels: Tensor) -> Batch:
    cut = dataclasses.replace(batch, labels=labels)
    return dataclasses.replace(cut, num_trained_tokens=int((cut.own_labels != IGNORED).sum()))


def _edges(batch: Batch, step: int) -> tuple[Tensor, Tensor]:
    """(rows, positions) of a rank's tokens whose neighbour, `step` further in the row, another cp rank has."""
    assert batch.own is not None
    held = torch.zeros_like(batch.input_ids, dtype=torch.bool).scatter(1, batch.own, value=True)
    others = held & ~held.roll(-step, 1)
    others[:, -1 if step > 0 else 0] = False  # its neighbour is no token of the row
    rows, places = others.nonzero(as_tuple=True)
    return rows, places


@after(Batch, "cut", needs={Feature.CP})
def context_label_lost_at_a_cut(batch: Batch, *_: Any, **__: Any) -> Batch:
    """a token predicts the next one, which another cp rank may have"""
    # Labels shifted after the cut.
    labels = batch.labels.clone()
    labels[_edges(batch, 1)] = IGNORED
    return _with_labels(batch, labels)


@after(Batch, "cut", needs={Feature.CP})
def context_label_twice_at_a_cut(batch: Batch, *_: Any, **__: Any) -> Batch:
    """the first token of a part does not predict itself too"""
    # The label of the token before, which its own rank counts, is taken over by the first token of the next part.
    labels, (rows, places) = batch.labels.clone(), _edges(batch, -1)
    before, own = batch.labels[rows, places - 1], batch.labels[rows, places]
    labels[rows, places] = torch.where((before == IGNORED) | (own == IGNORED), own, before)
    return _with_labels(batch, labels)


@after(Batch, "cut", needs={Feature.CP})
def context_tokens_counted_on_each_rank(batch: Batch, *_: Any, **__: Any) -> Batch:
    """a trained token is counted by the cp rank that has it"""
    return dataclasses.replace(batch, num_trained_tokens=int((batch.labels != IGNORED).sum()))


@around(trainer, "loss_sums", needs={Feature.CP, Feature.OF_ROWS})
def context_losses_of_rows_on_each_rank(
    original: Any, objective: Any, model: Any, batch: Batch, own: Rows, *rest: Any
) -> list[tuple[Tensor, Sums]]:
    """a loss of whole rows, of which all cp ranks know the numbers, is counted by one of them"""
    counted = [(name, dataclasses.replace(rows, counts_rows=True)) for name, rows in own]
    found: list[tuple[Tensor, Sums]] = original(objective, model, batch, counted, *rest)
    return found


@around(trainer, "count", needs={Feature.CP, Feature.OF_ROWS, Feature.EXAMPLES})
def context_examples_counted_on_each_rank(original: Any, objective: Any, batch: Batch) -> Any:
    """a pair or a record, of which all cp ranks have tokens, is counted by one of them"""
    return original(objective, dataclasses.replace(batch, counts_rows=True))


# --- sums over cp


@around(gradsync, "_sum_bucket", needs={Feature.CP})
def context_gradients_summed_twice(
    original: Any, grads: Any, axes: frozenset[str], mesh: Mesh, *, scales: Tensor
) -> None:
    """gradients of factors are summed over cp once"""
    if "cp" in axes:
        scales = scales * mesh.cp.size
    original(grads, axes, mesh, scales=scales)


@after(LoadBalancing, "__init__", needs={Feature.CP, Feature.AUX_LOSS})
def context_choices_of_one_rank(_: None, self: LoadBalancing, *__: Any, **___: Any) -> None:
    """the load-balancing loss counts the choices of the tokens of all cp ranks"""
    self.axis = self.mesh.over((SEQUENCES | self.mesh.topology.token_cut) - TOKENS)


@after(LoadBalancing, "_counted", needs={Feature.CP, Feature.AUX_LOSS})
def context_tokens_of_balance_divided(found: Tensor, self: LoadBalancing, *_: Any) -> Tensor:
    """the load-balancing loss weighs as the trained tokens of all cp ranks do"""
    return torch.cat([found[:-1], found[-1:] / self.mesh.cp.size])  # the last is their number


@instead_of(attention_parts, "_add", needs={Feature.RING})
def ring_parts_added_up(out: Tensor, lse: Tensor, part: Part, part_out: Tensor, part_lse: Tensor) -> None:
    """parts are merged by the logarithms of their sums of exponentials"""
    where = part.rows, slice(None), part.queries
    out[where] += part_out
    lse[where] = torch.logaddexp(lse[where], part_lse)  # this is right: only the outputs are not weighted


@around(attention_parts._Backward, "through", needs={Feature.RING})
def ring_gradients_of_own_queries(original: Any, self: Any, pair: Tensor, parts: Any) -> Tensor:
    """keys and values get the gradients of the queries of all ranks that they have passed"""
    found: Tensor = original(self, pair, parts)
    passed, self.has_passed = getattr(self, "has_passed", False), True  # the first call is for the own keys
    return found * 0 if passed else found


@after(attention_parts, "_small", needs={Feature.RING, Feature.SOFT_CAPS})
def ring_last_queries_left_out(found: Iterator[Part], parts: Sequence[Part], *_: Any) -> list[Part]:
    """queries whose products are taken some at a time are all there"""
    small = list(found)
    return small[:-1] if len(small) > len(parts) else small


context_keys_in_reverse = after(held_tokens, "gather_each_to_each", needs={Feature.GATHERED_KEYS})(
    reversed_ranks("keys and values are gathered in the order of the cp ranks")
)
context_gradients_not_summed = after(gradsync, "_parts", needs={Feature.CP})(
    not_summed("cp", "gradients of factors are summed over cp")
)

# --- other arguments and results

ring_parts_of_own_tokens = after(RowsOfMask, "parts", needs={Feature.RING})(  # the first part is of the own keys
    result("keys that pass by are seen through the mask of their own positions", lambda parts: [parts[0]] * len(parts))
)
context_numbers_begin_again = instead_of(ContextCache, "get_seq_length", needs={Feature.OFFSET})(
    stating("an attention that numbers tokens goes on from those of the cp ranks before it", lambda *_: 0)
)
context_bias_of_the_first_queries = instead_of(ContextCache, "get_query_offset", needs={Feature.QUERY_OFFSET})(
    stating("a bias of keys is by the distance to a rank's own queries", lambda *_: 0)
)
