"""Causes: the likely cause, in words, of a failing tensor's symptoms; one rule per phase.

A rule only says what the numbers show, for example that the ranks' copies add up to the reference, or that the gap is
the same for every token; "" means that it does not apply. Does not own: the choice of the tensor
(`meshlora_judge.diagnosis.diagnose`), comparing numbers (`meshlora_judge.diagnosis.symptoms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from meshlora_judge.capture import CHOICES
from meshlora_judge.diagnosis import symptoms
from meshlora_judge.diagnosis.symptoms import Failure
from meshlora_judge.experts import stack_of
from meshlora_judge.judge import judge
from meshlora_judge.saved import CONFIG, FRESH, WEIGHTS
from meshlora_judge.unshard import Tokens, assembled, canonical, sequences_of

_OTHER_MASK = "it drops other elements than one process: its mask knows the topology, or is another module's or step's"
_NOT_SCALED = "what its dropout keeps is not divided by the share that is kept"
_WRONG_ALONE = "is wrong though the gradients of all activations are right"
_OTHERS = (
    "what it sees of the tokens of other cp ranks: their keys, values or states, and the order of these; the rows of "
    "the mask, the keys that a block of queries is given, positions, or which tokens see each other"
)
_ROUTER = "what each module computes is right and what the experts are given is not: the routers' own arithmetic"
# Prefix of the name of a number, or of a clipped gradient -> its cause.
_NAMED = {
    "loss of evaluation": (
        "the training losses are right and the evaluated one is not: what is evaluated, or how it is averaged"
    ),
    "load-balancing loss": "the load-balancing loss does not count the tokens of all micro-batches and all ranks",
    "clipped ": "gradients and norm are right and the clipped gradients are not: by how much they are scaled down",
    "learning rate": "the learning rate is not what the schedule says, or not the one that is reported",
}


def _sequences(case: Failure) -> str:
    if case.result.name == "packed rows":
        return "packing is asked for, and each sequence has a row of its own"
    if case.result.name.startswith("sequence"):
        others = set[tuple[int, ...]]()
        for trace in case.evidence.ranks:
            for micro in trace.micro_batches:
                others |= {*sequences_of(micro)}
        others -= {*Tokens(case.evidence.reference).sequences}
        if any(len(set(sequence)) > 1 for sequence in others):  # a dummy's tokens are all alike
            return "the step takes other sequences, or other tokens of them: the order of the epoch, or the padding"
        return "the dp ranks' shares of a global batch are not disjoint, or do not cover it: a wrong accumulation index"
    # Every rank reports the number of all, so the first one's will do.
    ours, expected = case.evidence.ranks[0].num_tokens[0], case.evidence.reference.num_tokens[0]
    if ours > expected:
        return "tokens are counted that train nothing: of a dummy micro-batch, of padding, or of a rank twice"
    return "trained tokens are lost: labels shifted after the tokens were split, or a rank's tokens not counted"


def _loaded_adapter(case: Failure) -> str:
    is_wrong = has_values = False
    for piece in case.result.pieces:
        if not torch.equal(piece.values.double(), piece.of(case.whole).double()):
            is_wrong, has_values = True, has_values or bool(piece.values.any())
    if is_wrong and not has_values:
        return "these ranks hold zeros: the adapter was loaded on the other ranks only"
    if stack_of(case.result.name.rpartition(".lora_")[0]) in case.evidence.reference.stacks:
        return (
            "the adapters on this rank are not those of the experts, or of the parts of them, whose matrices it holds"
        )
    if symptoms.is_in_rank_order(case.result, case.evidence.topology):
        return "the adapter is cut in the order of the ranks, and the base weight that it goes with is held otherwise"
    if symptoms.is_permuted(case.result):
        return "each rank holds another rank's slice of the adapter, or rows of it that the base's rows do not go with"
    return "the adapter that training starts from is not the one in the file"


def _forward(case: Failure) -> str:
    name, topology, fact = case.result.name, case.evidence.topology, case.fact(case.result.name)
    # From what only some modules have to what any may: the first rule that knows the numbers has the word.
    for rule in (_experts, _dropout, _embedding, _magnitude, _row_parallel):
        if words := rule(case):
            return words
    if fact in ("column", "whole", "row") and (words := _lora_part(case)):
        return words
    if fact != "column" and case.sees_others(name):
        return f"{_OTHERS}; or its own weights"
    # The right numbers, in other rows.
    if symptoms.is_permuted(case.result):
        if case.tp > 1:
            over = "tp" + _if(topology.cp > 1, " or cp")
            return f"the tokens are in the wrong order: the cut or the gather over {over} does not follow the ranks"
        cut = _if(topology.cp > 1, ", or the cut over cp")
        return f"the numbers are there, for other tokens: their order, or which tokens see each other{cut}"
    if case.tp > 1 and "norm" in name and symptoms.is_scaled_by_row(case.result.pieces, case.whole, case.tolerance):
        return "each token is scaled by a number of its own: the norm is that of a rank's part of the width"
    if topology.sp and case.fact(case.block(name)).startswith("whole region"):
        return "a block that is not split saw only its rank's slice of the tokens"
    gathered = _if(topology.dp_shard, f", or how they are gathered over {case.over_data}")
    return f"this module is the first that differs: its own weights, or how it is split{gathered}"


def _embedding(case: Failure) -> str:
    """The fault of the embedding, if something is known of it."""
    if not case.is_embedding(case.result.name):
        return ""
    if case.tp > 1:
        if case.adds_up_over("tp"):
            return "the embedding is not summed over tp: each rank has the tokens of its own part of the vocabulary"
        return "a rank looks up rows of the embedding that are another's, or for tokens that are another's"
    if case.evidence.case.neftune_alpha:
        return "the noise on embedded tokens is not that of one process: its size, or the tokens or seed that it is of"
    return ""


def _magnitude(case: Failure) -> str:
    """The fault of DoRA's magnitudes, which scale output features."""
    if not _has_magnitude(case) or case.ratio is not None:
        return ""
    if symptoms.is_scaled_by_column(case.result.pieces, case.whole, case.tolerance):
        return "each output feature is scaled by a number of its own: DoRA's norm, of a part or without the adapter"
    is_dropped = f"{case.result.name}.lora_dropout" in case.evidence.reference.dropouts
    if not is_dropped or case.fact(case.result.name) == "row":
        return ""
    return (
        "what DoRA's magnitudes scale of the base is not of the input that the adapter's dropout leaves; or the first "
        "module that differs has other weights, or is split otherwise"
    )


def _has_magnitude(case: Failure) -> bool:
    return f"{case.result.name}.lora_magnitude_vector" in case.evidence.reference.initial


def _row_parallel(case: Failure) -> str:
    """The fault of a row-parallel linear over several tp ranks."""
    if case.fact(case.result.name) != "row" or case.tp == 1:
        return ""
    found = [p.values.double() - p.of(case.whole).double() for p in case.result.pieces if p.dim is None]
    gaps = torch.cat(found or [case.whole])
    # What is left of the gap without its mean over tokens is nothing: it is the same for each token.
    if gaps.ndim > 1 and float(symptoms.centred(gaps).norm()) <= case.tolerance * float(gaps.norm()):
        return "the bias of a row-parallel linear is added on every rank, before the sum over tp"
    # An average and a second sum are exact multiples, so they come before what only fits roughly.
    if words := _wrong_sum(case, "tp", "row-parallel output"):
        return words
    if case.adds_up_over("tp"):
        return "row-parallel output not reduced over tp: the ranks' outputs add up to the reference"
    also = _if(case.evidence.topology.sp, "row-parallel output not reduced over tp, or ")
    also += _if(case.sees_others(case.result.name), f"{_OTHERS}; or ")
    also += _if(_has_magnitude(case), "a rank scales its term by DoRA's norm of its own part of the row; or ")
    return (
        f"{also}what a rank brings to this row-parallel linear does not go together: its heads of q, k and v, its "
        "pieces, its part of an argument, or another rank's slice of the weight"
    )


def _lora_part(case: Failure) -> str:
    """The fault of the adapter's term alone, if the reference captured the base output."""
    base = _canonical_base(case)
    if base is None:
        return ""
    pieces, is_nothing = [], True
    for piece in case.result.pieces:
        own = replace(piece, values=piece.values.double() - piece.of(base).double())
        pieces.append(own)
        if own.values.numel() and float(own.values.abs().max()) > 1e-12:
            is_nothing = False
    if is_nothing:
        return "the adapter's term is missing"
    term = (case.whole - base).double()
    ratio = symptoms.ratio_of(pieces, term, case.tolerance)
    if ratio is None:
        is_moved = symptoms.are_columns_moved(assembled(pieces, term), term)
        return _if(is_moved, "the adapter's term is added to other features: another piece of a fused matrix")
    if abs(ratio - 1) < case.tolerance:
        return "the gap is the same for every token: the bias is missing, or is another rank's slice"
    if case.tp > 1 and abs(ratio * case.tp - 1) < case.tolerance:
        return "the LoRA scale is divided by tp, or follows another rule (rsLoRA, alpha_pattern)"
    return f"the LoRA scale is {ratio:.4g} times what it should be: applied twice, or with another rule"


def _canonical_base(case: Failure) -> Tensor | None:
    """Output of an adapter's target without the adapter's term, if the reference captured it."""
    reference = case.evidence.reference
    found = canonical(reference, Tokens(reference), "base", case.result.name)
    return None if found is None else found[0]


def _wrong_sum(case: Failure, axis: str, what: str, done: str = "reduced") -> str:
    """Whether ours is the multiple of the reference that an average, or a second sum, over `axis` makes."""
    size = getattr(case.evidence.topology, axis)
    if case.ratio == 1 / size:
        return f"{what} averaged over {axis} instead of summed"
    return _if(case.ratio == size, f"{what} {done} over {axis} twice")


def _if(holds: bool, words: str) -> str:
    """`words` where they apply."""
    return words if holds else ""


def _dropout(case: Failure) -> str:
    """The fault of the output of a dropout, or of a linear whose adapter has one."""
    name, whole, rates = case.result.name, case.whole, case.evidence.reference.dropouts
    if name in rates and case.result.pieces:
        ours = assembled(case.result.pieces, whole)
        return _NOT_SCALED if torch.equal(ours == 0, whole == 0) else _OTHER_MASK
    rate = rates.get(f"{name}.lora_dropout", 0.0)
    b = case.evidence.reference.initial.get(f"{name}.lora_B")
    if not rate or b is None or not case.result.pieces or (base := _canonical_base(case)) is None:
        return ""
    term = (whole - base).double()
    gap = assembled(case.result.pieces, whole) - whole.double()
    # Another input of A moves the output within the span of B, and nowhere else.
    span = torch.linalg.qr(b.double()).Q
    if not symptoms.is_near(gap @ span @ span.T, gap, case.tolerance):
        return ""
    ratio = 1 + float((gap * term).sum() / term.square().sum())
    if not symptoms.is_near((ratio - 1) * term, gap, case.tolerance):
        return _OTHER_MASK
    return _if(abs(ratio - (1 - rate)) < case.tolerance, _NOT_SCALED)


def _experts(case: Failure) -> str:
    """The fault of the output of a module of experts."""
    name = case.result.name
    if not any(stack.startswith(f"{name}.") for stack in case.evidence.reference.rows):
        return ""
    for phase in judge(case.evidence):
        if phase.name != "router_choices":
            continue
        # Judged anew: a proof with a fault stops at the phase that fails, which is an earlier one.
        if any(result.name == f"{name}{CHOICES}" and not result.passed for result in phase.results):
            return "tokens are sent to other experts than the router's scores say"
        break
    if case.result.whole is None:
        return ""
    if words := _wrong_sum(case, "etp", "the experts' output is", "summed"):
        return words
    if symptoms.is_permuted(case.result):
        return "the experts' output goes to other tokens: rows come back in another order than they left in"
    return (
        "what experts make of their tokens: rows or routing weights that do not go together, a sum over etp that lacks "
        "a term or has the bias of every rank, another rank's experts, or an adapter's term"
    )


def _logits(case: Failure) -> str:
    if all(symptoms.are_columns_moved(piece.values, piece.of(case.whole)) for piece in case.result.pieces):
        return "the logits are those of other tokens: the parts of the vocabulary are not joined in the ranks' order"
    return "every layer agrees and the logits do not: the output head, or how the last layer's tokens are joined"


def _loss(case: Failure) -> str:
    if words := _number(case):
        return words
    is_split = case.tp > 1
    if len({trace.losses[0] for trace in case.evidence.ranks}) > 1:
        part = "looks at its own part of the vocabulary" if is_split else "reports the mean of its own tokens"
        return f"the ranks have different losses: a rank {part} alone"
    split = ", or the labels, padding or smoothing of a vocabulary that is split" if is_split else ", or smoothing"
    return (
        "the logits are right, and the loss is not the sum over trained tokens divided by their global number: a mean "
        f"of micro-batch means, other labels, what the objective makes of them{split}"
    )


def _backward(case: Failure) -> str:
    name, order = case.result.name, case.evidence.reference.order
    if _is_router(case):
        return "the gradient of a router's scores: that of the load-balancing loss, or of the routing weights"
    # Nothing comes between the loss and the logits.
    if name == "logits":
        return "the gradient of the loss itself: tokens are weighed differently"
    following = order[order.index(name) + 1 :]
    fed = _next_block(case, following)
    where = _if(bool(fed), f"of {fed} ")
    if words := _wrong_sum(case, "tp", f"the input gradient {where}is"):
        return words
    if case.tp > 1 and following and "norm" in following[0] and case.block(following[0]) == case.block(name) != "":
        return f"the backward of {following[0]}: over a width that is split its sums need those of all tp ranks"
    # No block follows: the gradient comes from the head.
    if not fed and case.tp > 1:
        return "the gradient that comes from the output head is not reduced over tp"
    if case.tp > 1 and case.fact(fed).startswith("split region") and not case.fact(name):
        return f"the input gradient of the column-parallel linears {where}is not reduced over tp"
    if case.sees_others(name) and case.fact(name) != "row":
        return "the gradients of keys, values or states lack the terms of the tokens of other cp ranks that saw them"
    gathered = f", or the weights that are gathered for it over {case.over_data}"
    return (
        "the first gradient, from the loss on, that differs: the backward of what this module's output goes into"
        f"{_if(case.evidence.topology.dp_shard, gathered)}"
    )


def _is_router(case: Failure) -> bool:
    """Whether the failing tensor is of a router, in a run with a load-balancing loss."""
    one, name = case.evidence.reference, case.result.name
    # A router is beside the experts' projections: `mlp.gate` and `mlp.experts.down_proj`.
    blocks = {stack.rpartition(".")[0].rpartition(".")[0] for stack in one.stacks}
    if not one.aux_losses or name.rpartition(".")[0] not in blocks:
        return False
    return any(other.partition("#")[0] == name for micro in one.micro_batches for other in micro.forward)


def _next_block(case: Failure, following: list[str]) -> str:
    """The first other block that runs after the failing module, or ""."""
    own = case.block(case.result.name)
    for name in following:
        block = case.block(name)
        if block not in ("", own):
            return block
    return ""


def _gradients(case: Failure) -> str:
    failed, stacks, topology = case.failed, case.evidence.reference.stacks, case.evidence.topology
    if all(stack_of(result.name.rpartition(".lora_")[0]) in stacks for result in failed):
        return _gradients_of_experts(case)
    is_all = len(failed) == len(case.phase.results)
    which = "every factor"
    if not is_all:
        which = " and ".join(sorted({_kind(case, result.name) for result in failed}))
    is_whole = all(piece.dim is None for result in failed for piece in result.pieces)
    for axis, size in reversed(topology.sizes.items()):
        is_summed = is_all
        if axis == "tp":  # over tp only factors that are whole on a rank are summed; over the other axes all are
            is_summed = all(symptoms.is_held_by_several(result, topology) for result in failed)
        if size == 1 or not is_summed:
            continue
        over = axis if is_whole else f"the {axis} ranks that hold it"
        if words := _unsummed(case, axis, which, over):
            return words
    ratios = _ratios_of_ranks(case)
    if len(ratios) > 1:
        return (
            f"each rank scales {which} by a number of its own: divided by its own token count, or clipped by its norm"
        )
    if is_all and case.over_data:
        return (
            f"the gradients of the ranks of {case.over_data} are weighed unequally: a mean of means, or clipped before "
            "the sum"
        )
    if is_all:
        return "every gradient is off though every activation's gradient is right: clipped or scaled before the sum"
    if ratios:
        return (
            f"the gradient of {which} is {min(ratios):.4g} times what it should be: a factor, such as the LoRA scale, "
            "is left out or applied twice"
        )
    return f"the gradient of {which} {_WRONG_ALONE}"


def _ratios_of_ranks(case: Failure) -> set[float]:
    """The ratios of the ranks' parts to the reference's; empty if some rank's part is no multiple of it."""
    ratios = set[float]()
    for rank in {piece.rank for piece in case.result.pieces}:
        own = [piece for piece in case.result.pieces if piece.rank == rank]
        ratio = symptoms.ratio_of(own, case.whole, case.tolerance)
        if not ratio:
            return set()
        ratios.add(round(ratio, 6))
    return ratios


def _gradients_of_experts(case: Failure) -> str:
    """The fault if only gradients of adapters on experts fail."""
    if case.failed[0].whole is None:
        return f"nobody has the gradient that one process has: {case.failed[0].note}"
    which = " and ".join(sorted({_kind_of_expert(case, result.name) for result in case.failed}))
    for axis, size in case.evidence.topology.expert_sizes.items():
        if size > 1 and (words := _unsummed(case, axis, which, axis)):
            return words
    return f"the gradient of {which} {_WRONG_ALONE}"


def _unsummed(case: Failure, axis: str, which: str, over: str) -> str:
    """The fault of the sum of gradients over `axis`, which is `over` in words."""
    if words := _wrong_sum(case, axis, f"the gradient of {which} is", "summed"):
        return words + _if(words.endswith("twice"), ", or though each rank has all of it")
    if all(case.adds_up_over(axis, result) for result in case.failed):
        return f"the gradient of {which} is not summed over {over}: the ranks' gradients add up to the reference"
    return ""


def _kind(case: Failure, name: str) -> str:
    """`A of column-parallel linears`, for the trained parameter `name`."""
    module, _, part = name.rpartition(".lora_")
    split = case.fact(name)
    if not module:
        return "what is trained of the base"
    side = part.removeprefix("embedding_").partition(".")[0]
    if part.startswith("magnitude"):
        side = "the magnitude"
    if split in ("column", "row"):
        return f"{side} of {split}-parallel linears"
    return f"{side} of {split} linears" if split else f"{side} of the embedding"


def _kind_of_expert(case: Failure, name: str) -> str:
    module, _, part = name.rpartition(".lora_")
    # The plan knows all experts of a layer together.
    split = case.fact(stack_of(module)).removeprefix("expert ")
    projection = {"column": "first", "row": "second"}.get(split, split)
    return f"{part.partition('.')[0]} of the experts' {projection} projections"


def _number(case: Failure) -> str:
    """The fault of a step's reported numbers, as far as their name shows it."""
    if ", step " in case.result.name:
        return "the loss of a later step is right and a gradient of it is not, as it was in the first step"
    for begin, words in _NAMED.items():
        if case.result.name.startswith(begin):
            return words
    return _if(bool(case.result.note), f"{case.result.note}: optimizer steps are left out, or not reported")


def _grad_norm(case: Failure) -> str:
    if words := _number(case):
        return words
    whole, shared = symptoms.squares_of_copies(case.evidence)
    total = sum(float(gradient.double().square().sum()) for gradient in case.evidence.reference.gradients.values())
    ours = case.evidence.ranks[0].grad_norms[0]
    for extra, what in (
        (whole, "a whole factor"),
        (shared, "rows that several of them hold"),
        (whole + shared, "a factor"),
    ):
        if extra and abs(ours / math.sqrt(total + extra) - 1) < case.tolerance:
            return f"the copies that tp ranks hold of {what} are counted as often as there are ranks"
    return "the gradients are right and their norm is not"


def _deltas(case: Failure) -> str:
    trace, one = case.evidence.ranks[0], case.evidence.reference
    if len(trace.losses) != len(one.losses):
        return f"{len(trace.losses)} optimizer steps were taken, not {len(one.losses)}"
    if trace.num_tokens != one.num_tokens:
        return "the first step is right, and later ones take other sequences: the order of an epoch, or where it ends"
    for step, (ours, wanted) in enumerate(zip(trace.rates, one.rates, strict=False), start=1):
        if abs(ours - wanted) > 1e-9 * wanted:
            return f"the learning rate of step {step} is {ours:.3g}, not {wanted:.3g}"
    return (
        "gradients and clipping of step 1 and the reported learning rates are right: what the optimizer makes of them "
        "(its betas, epsilon, weight decay, the rates of its groups, or the factors that it steps)"
        f"{_of_another_step(case)}"
    )


def from_step(case: Failure, step: int) -> str:
    """What is wrong from `step` on, where step 1 and the optimizer are right."""
    return (
        f"from step {step} on; step 1 is right, and so is what the optimizer makes of the gradients: state carried "
        "between steps (evaluation, resuming, masks, accumulation), or what only later batches show"
        f"{_of_another_step(case)}"
    )


def _of_another_step(case: Failure) -> str:
    words = _if(bool(case.evidence.reference.dropouts), "; or dropout has the masks of another step")
    return words + _if(bool(case.evidence.case.neftune_alpha), "; or noise is that of another step")


def _saved_file(case: Failure) -> str:
    result, evidence = case.result, case.evidence
    also = _if(bool(evidence.saved.config_note), f": {evidence.saved.config_note}")
    if result.name == CONFIG:
        return f"the stored configuration is not the one that was trained: {result.note}"
    if result.name.endswith(f"/{WEIGHTS}"):
        return f"{result.note}: rounded, stored before the last step, or entries that no factor has"
    if "outside its pieces" in result.name:
        return "B is stored, or trained, at rows that are not those of its pieces"
    if " mismatch" in result.note or " size" in result.note:  # PEFT's words for other shapes than it expects
        return "whole entries are stored more than once, or in parts"
    if result.note:
        return f"PEFT expects another file{also}"
    if result.name not in evidence.saved.read:
        return f"PEFT computes something else with the saved adapter{also}"
    return _stored(evidence.saved.read[result.name], evidence.reference.final[result.name], case.tp)


def _stored(stored: Tensor, final: Tensor, tp: int) -> str:
    """The fault of a stored tensor that PEFT takes, but for its values."""
    for dim in range(stored.ndim):
        # A file that joins shards wrongly shows along the dim that is split, whichever it is.
        shards = stored.tensor_split(tp, dim)
        missing = [index for index, shard in enumerate(shards) if not bool(shard.any())]
        if len(missing) == 1:
            return f"the shard of tp rank {missing[0]} is missing in the file"
        if missing:
            return f"the shards of tp ranks {missing} are missing in the file"
        expected = final.tensor_split(tp, dim)
        if tp > 1 and all(symptoms.is_near(a, b, 1e-4) for a, b in zip(shards, expected[::-1], strict=True)):
            return "the shards are stored in reversed order"
    if symptoms.is_near(stored, final, 1e-4):
        return "what is stored is rounded: the file has a lower precision than the ranks"
    return "what is stored is not what the ranks hold"


def _fresh_adapter(case: Failure) -> str:
    if case.result.name.startswith(f"{FRESH}/"):
        return f"a fresh adapter is saved with other values or another configuration than it has: {case.result.note}"
    if not case.result.pieces:
        return f"a fresh adapter has other tensors than PEFT's, or of other shapes: {case.result.note}"
    ratio = symptoms.ratio_of(case.result.pieces, case.whole, case.tolerance)
    if case.tp > 1 and ratio is not None and abs(ratio / math.sqrt(case.tp) - 1) < case.tolerance:
        return "A's bound comes from the local fan-in: it is sqrt(tp) too large"
    if any(error <= 1e-12 for error in symptoms.rank_errors(case.result).values()):
        return "ranks drew different values: the generator's seed depends on the rank"
    return "the values are not those that seed and name determine"


def _collectives(case: Failure) -> str:
    phase, _, kind = case.result.name.partition(" ")
    if kind in ("send", "receive"):
        return f"{case.result.note}: in the {phase} stages hand on another number of tensors than one a micro-batch"
    per_linear = "once per linear instead of once per region"
    per_attention = "more than once for the keys and values of an attention over cp"
    often = per_linear
    if case.evidence.topology.cp > 1:
        often = f"{per_linear}, or {per_attention}" if case.tp > 1 else per_attention
    return f"{case.result.note}: the {phase} communicates {often}"


CAUSES: dict[str, str | Callable[[Failure], str]] = {
    "sequences": _sequences,
    "loaded_adapter": _loaded_adapter,
    "forward": _forward,
    "router_scores": _ROUTER,
    "router_choices": _ROUTER,
    "logits": _logits,
    "loss": _loss,
    "backward": _backward,
    "gradients": _gradients,
    "grad_norm": _grad_norm,
    "deltas": _deltas,
    "saved_file": _saved_file,
    "fresh_adapter": _fresh_adapter,
    "eva": "the start is that of other data, of a part of their features, or of other ranks and scales than PEFT's",
    "collectives": _collectives,
    "adapters": "what one adapter alone has is another's: its tokens, their number, its scale, its limit or its rate",
}
