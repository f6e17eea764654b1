"""Causes: the likely cause, in words, of a failing tensor's symptoms; one rule per phase.

Owns: the rules, for dense blocks, dropout and experts. A rule only says what the numbers show, for example that the
ranks' copies add up to the reference, or that the gap is the same for every token; "" means that it does not apply.
Does not own: the choice of the tensor (`meshlora_judge.diagnosis.diagnose`), comparing numbers
(`meshlora_judge.diagnosis.symptoms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from meshlora_judge.capture import CHOICES
from meshlora_judge.diagnosis.symptoms import (
    Failure,
    are_columns_moved,
    centred,
    is_held_by_several,
    is_in_rank_order,
    is_near,
    is_permuted,
    is_scaled_by_column,
    is_scaled_by_row,
    rank_errors,
    ratio_of,
    squares_of_copies,
)
from meshlora_judge.experts import stack_of
from meshlora_judge.judge import judge
from meshlora_judge.saved import CONFIG, FRESH, WEIGHTS
from meshlora_judge.unshard import Piece, Tokens, assembled, canonical, sequences_of

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
        known = set(Tokens(case.evidence.reference).sequences)
        taken = {s for trace in case.evidence.ranks for m in trace.micro_batches for s in sequences_of(m)}
        if any(len(set(sequence)) > 1 for sequence in taken - known):  # a dummy's tokens are all alike
            return "the step takes other sequences, or other tokens of them: the order of the epoch, or the padding"
        return "the dp ranks' shares of a global batch are not disjoint, or do not cover it: a wrong accumulation index"
    ours, expected = case.evidence.ranks[0].num_tokens[0], case.evidence.reference.num_tokens[0]
    if ours > expected:
        return "tokens are counted that train nothing: of a dummy micro-batch, of padding, or of a rank twice"
    return "trained tokens are lost: labels shifted after the tokens were split, or a rank's tokens not counted"


def _loaded_adapter(case: Failure) -> str:
    wrong = [p for p in case.result.pieces if not torch.equal(p.values.double(), p.of(case.whole).double())]
    if wrong and not any(bool(p.values.any()) for p in wrong):
        return "these ranks hold zeros: the adapter was loaded on the other ranks only"
    if stack_of(case.result.name.rpartition(".lora_")[0]) in case.evidence.reference.stacks:
        return (
            "the adapters on this rank are not those of the experts, or of the parts of them, whose matrices it holds"
        )
    if is_in_rank_order(case.result, case.evidence.topology):
        return "the adapter is cut in the order of the ranks, and the base weight that it goes with is held otherwise"
    if is_permuted(case.result):
        return "each rank holds another rank's slice of the adapter, or rows of it that the base's rows do not go with"
    return "the adapter that training starts from is not the one in the file"


def _forward(case: Failure) -> str:
    name, whole = case.result.name, case.whole
    if words := _experts(case) or _dropout(case):
        return words
    fact, block = case.fact(name), case.block(name)
    gaps = torch.cat([p.values.double() - p.of(whole).double() for p in case.result.pieces if p.dim is None] or [whole])
    is_offset = gaps.ndim > 1 and float(centred(gaps).norm()) <= case.tolerance * float(gaps.norm())
    if case.tp > 1 and case.is_embedding(name):
        if case.adds_up_over("tp"):
            return "the embedding is not summed over tp: each rank has the tokens of its own part of the vocabulary"
        return "a rank looks up rows of the embedding that are another's, or for tokens that are another's"
    if case.is_embedding(name) and case.evidence.case.neftune_alpha:
        return "the noise on embedded tokens is not that of one process: its size, or the tokens or seed that it is of"
    has_magnitude = f"{name}.lora_magnitude_vector" in case.evidence.reference.initial
    if has_magnitude and case.ratio is None and is_scaled_by_column(case.result.pieces, whole, case.tolerance):
        return "each output feature is scaled by a number of its own: DoRA's norm, of a part or without the adapter"
    if fact == "row" and case.tp > 1:
        if is_offset:
            return "the bias of a row-parallel linear is added on every rank, before the sum over tp"
        if words := _wrong_sum(case, "tp", "row-parallel output"):
            return words
        if case.adds_up_over("tp"):
            return "row-parallel output not reduced over tp: the ranks' outputs add up to the reference"
        also = "row-parallel output not reduced over tp, or " if case.evidence.topology.sp else ""
        also += f"{_OTHERS}; or " if case.sees_others(name) else ""
        return (
            f"{also}what a rank brings to this row-parallel linear does not go together: its heads of q, k and v, its "
            "pieces, its part of an argument, or another rank's slice of the weight"
        )
    if fact in ("column", "whole", "row") and (words := _lora_part(case)):
        return words
    if fact != "column" and case.sees_others(name):
        return f"{_OTHERS}; or its own weights"
    if is_permuted(case.result):
        if case.tp == 1:
            cut = ", or the cut over cp" if case.evidence.topology.cp > 1 else ""
            return f"the numbers are there, for other tokens: their order, or which tokens see each other{cut}"
        over = "tp or cp" if case.evidence.topology.cp > 1 else "tp"
        return f"the tokens are in the wrong order: the cut or the gather over {over} does not follow the ranks"
    if case.tp > 1 and "norm" in name and is_scaled_by_row(case.result.pieces, whole, case.tolerance):
        return "each token is scaled by a number of its own: the norm is that of a rank's part of the width"
    if case.evidence.topology.sp and case.fact(block).startswith("whole region"):
        return "a block that is not split saw only its rank's slice of the tokens"
    gathered = f", or how they are gathered over {case.over_data}" if case.evidence.topology.dp_shard else ""
    return f"this module is the first that differs: its own weights, or how it is split{gathered}"


def _lora_part(case: Failure) -> str:
    """The fault of the adapter's term alone, if the reference captured the base output."""
    whole, base = case.whole, _canonical_base(case)
    if base is None:
        return ""
    pieces = [
        Piece(p.rank, p.copy, p.values.double() - p.of(base).double(), p.rows, p.dim, p.index)
        for p in case.result.pieces
    ]
    if not any(bool(p.values.abs().max() > 1e-12) for p in pieces if p.values.numel()):
        return "the adapter's term is missing"
    term = (whole - base).double()
    ratio = ratio_of(pieces, term, case.tolerance)
    if ratio is None:
        is_moved = are_columns_moved(assembled(pieces, term), term)
        return "the adapter's term is added to other features: another piece of a fused matrix" if is_moved else ""
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
    return f"{what} {done} over {axis} twice" if case.ratio == size else ""


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
    if not is_near(gap @ span @ span.T, gap, case.tolerance):
        return ""
    ratio = 1 + float((gap * term).sum() / term.square().sum())
    if not is_near((ratio - 1) * term, gap, case.tolerance):
        return _OTHER_MASK
    return _NOT_SCALED if abs(ratio - (1 - rate)) < case.tolerance else ""


def _experts(case: Failure) -> str:
    """The fault of the output of a module of experts."""
    name = case.result.name
    if not any(stack.startswith(f"{name}.") for stack in case.evidence.reference.rows):
        return ""
    chosen = next((phase.results for phase in judge(case.evidence) if phase.name == "router_choices"), [])
    if any(result.name == f"{name}{CHOICES}" and not result.passed for result in chosen):
        return "tokens are sent to other experts than the router's scores say"
    if case.result.whole is None:
        return ""
    if words := _wrong_sum(case, "etp", "the experts' output is", "summed"):
        return words
    if is_permuted(case.result):
        return "the experts' output goes to other tokens: rows come back in another order than they left in"
    return (
        "what experts make of their tokens: rows or routing weights that do not go together, a sum over etp that lacks "
        "a term or has the bias of every rank, another rank's experts, or an adapter's term"
    )


def _logits(case: Failure) -> str:
    if all(are_columns_moved(piece.values, piece.of(case.whole)) for piece in case.result.pieces):
        return "the logits are those of other tokens: the parts of the vocabulary are not joined in the ranks' order"
    return "every layer agrees and the logits do not: the output head, or how the last layer's tokens are joined"


def _loss(case: Failure) -> str:
    if words := _number(case):
        return words
    if len({trace.losses[0] for trace in case.evidence.ranks}) > 1:
        part = "looks at its own part of the vocabulary" if case.tp > 1 else "reports the mean of its own tokens"
        return f"the ranks have different losses: a rank {part} alone"
    split = ", or the labels, padding or smoothing of a vocabulary that is split" if case.tp > 1 else ", or smoothing"
    return (
        "the logits are right, and the loss is not the sum over trained tokens divided by their global number: a mean "
        f"of micro-batch means, other labels, what the objective makes of them{split}"
    )


def _backward(case: Failure) -> str:
    name, one, order = case.result.name, case.evidence.reference, case.evidence.reference.order
    blocks = {stack.rpartition(".")[0].rpartition(".")[0] for stack in one.stacks}
    scores = {other.partition("#")[0] for micro in one.micro_batches for other in micro.forward}
    if one.aux_losses and name.rpartition(".")[0] in blocks and name in scores:
        return "the gradient of a router's scores: that of the load-balancing loss, or of the routing weights"
    if name == "logits":
        return "the gradient of the loss itself: tokens are weighed differently"
    following = order[order.index(name) + 1 :]
    fed = next((case.block(n) for n in following if case.block(n) not in ("", case.block(name))), "")
    where = f"of {fed} " if fed else ""
    if words := _wrong_sum(case, "tp", f"the input gradient {where}is"):
        return words
    if case.tp > 1 and following and "norm" in following[0] and case.block(following[0]) == case.block(name) != "":
        return f"the backward of {following[0]}: over a width that is split its sums need those of all tp ranks"
    if not fed and case.tp > 1:
        return "the gradient that comes from the output head is not reduced over tp"
    if case.tp > 1 and case.fact(fed).startswith("split region") and not case.fact(name):
        return f"the input gradient of the column-parallel linears {where}is not reduced over tp"
    if case.sees_others(name) and case.fact(name) != "row":
        return "the gradients of keys, values or states lack the terms of the tokens of other cp ranks that saw them"
    gathered = (
        f", or the weights that are gathered for it over {case.over_data}" if case.evidence.topology.dp_shard else ""
    )
    return (
        "the first gradient, from the loss on, that differs: the backward of what this module's output goes into"
        f"{gathered}"
    )


def _gradients(case: Failure) -> str:
    failed, stacks = case.failed, case.evidence.reference.stacks
    if all(stack_of(result.name.rpartition(".lora_")[0]) in stacks for result in failed):
        return _gradients_of_experts(case)
    kinds = sorted({_kind(case, r.name) for r in failed})
    is_all = len(failed) == len(case.phase.results)
    which = "every factor" if is_all else " and ".join(kinds)
    for axis, size in reversed(case.evidence.topology.sizes.items()):
        # Only factors that are whole on a rank are summed over tp; all factors are summed over the other axes.
        is_summed = all(is_held_by_several(r, case.evidence.topology) for r in failed) if axis == "tp" else is_all
        if size == 1 or not is_summed:
            continue
        over = axis if all(p.dim is None for r in failed for p in r.pieces) else f"the {axis} ranks that hold it"
        if words := _unsummed(case, axis, which, over):
            return words
    by_rank = {
        rank: ratio_of([p for p in case.result.pieces if p.rank == rank], case.whole, case.tolerance)
        for rank in {p.rank for p in case.result.pieces}
    }
    ratios = {round(r, 6) for r in by_rank.values() if r}
    if all(by_rank.values()) and len(ratios) > 1:
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
    if all(by_rank.values()) and ratios:
        return (
            f"the gradient of {which} is {min(ratios):.4g} times what it should be: a factor, such as the LoRA scale, "
            "is left out or applied twice"
        )
    return f"the gradient of {which} {_WRONG_ALONE}"


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
        return words + (", or though each rank has all of it" if words.endswith("twice") else "")
    if all(case.adds_up_over(axis, result) for result in case.failed):
        return f"the gradient of {which} is not summed over {over}: the ranks' gradients add up to the reference"
    return ""


def _kind(case: Failure, name: str) -> str:
    """`A of column-parallel linears`, for the trained parameter `name`."""
    module, _, part = name.rpartition(".lora_")
    split = case.fact(name)
    if not module:
        return "what is trained of the base"
    side = "the magnitude" if part.startswith("magnitude") else part.removeprefix("embedding_").partition(".")[0]
    return f"{side} of " + (
        f"{split}-parallel linears"
        if split in ("column", "row")
        else f"{split or 'the'} " + ("linears" if split else "embedding")
    )


def _kind_of_expert(case: Failure, name: str) -> str:
    module, _, part = name.rpartition(".lora_")
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
    return f"{case.result.note}: optimizer steps are left out, or not reported" if case.result.note else ""


def _grad_norm(case: Failure) -> str:
    if words := _number(case):
        return words
    whole, shared = squares_of_copies(case.evidence)
    total = sum(float(g.double().square().sum()) for g in case.evidence.reference.gradients.values())
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
    ours, reference = trace.rates, one.rates
    wrong = [i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if abs(a - b) > 1e-9 * b]
    if wrong:
        return f"the learning rate of step {wrong[0] + 1} is {ours[wrong[0]]:.3g}, not {reference[wrong[0]]:.3g}"
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
    words = "; or dropout has the masks of another step" if case.evidence.reference.dropouts else ""
    return words + "; or noise is that of another step" * bool(case.evidence.case.neftune_alpha)


def _saved_file(case: Failure) -> str:
    result, evidence = case.result, case.evidence
    if result.name == CONFIG:
        return f"the stored configuration is not the one that was trained: {result.note}"
    if result.name.endswith(f"/{WEIGHTS}"):
        return f"{result.note}: rounded, stored before the last step, or entries that no factor has"
    if "outside its pieces" in result.name:
        return "B is stored, or trained, at rows that are not those of its pieces"
    if result.note:
        times = any(f" {word}" in result.note for word in ("mismatch", "size"))
        also = f": {evidence.saved.config_note}" if evidence.saved.config_note else ""
        return "whole entries are stored more than once, or in parts" if times else f"PEFT expects another file{also}"
    if result.name not in evidence.saved.read:
        return "PEFT computes something else with the saved adapter" + (
            f": {evidence.saved.config_note}" if evidence.saved.config_note else ""
        )
    stored, final = evidence.saved.read[result.name], evidence.reference.final[result.name]
    for dim in range(stored.ndim):
        parts = stored.tensor_split(case.tp, dim)
        expected = final.tensor_split(case.tp, dim)
        missing = [i for i, shard in enumerate(parts) if not bool(shard.any())]
        if missing:
            shards = f"shard of tp rank {missing[0]} is" if len(missing) == 1 else f"shards of tp ranks {missing} are"
            return f"the {shards} missing in the file"
        if case.tp > 1 and all(is_near(a, b, 1e-4) for a, b in zip(parts, expected[::-1], strict=True)):
            return "the shards are stored in reversed order"
    if is_near(stored, final, 1e-4):
        return "what is stored is rounded: the file has a lower precision than the ranks"
    return "what is stored is not what the ranks hold"


def _fresh_adapter(case: Failure) -> str:
    if case.result.name.startswith(f"{FRESH}/"):
        return f"a fresh adapter is saved with other values or another configuration than it has: {case.result.note}"
    if not case.result.pieces:
        return f"a fresh adapter has other tensors than PEFT's, or of other shapes: {case.result.note}"
    ratio = ratio_of(case.result.pieces, case.whole, case.tolerance)
    if case.tp > 1 and ratio is not None and abs(ratio / math.sqrt(case.tp) - 1) < case.tolerance:
        return "A's bound comes from the local fan-in: it is sqrt(tp) too large"
    if any(error <= 1e-12 for error in rank_errors(case.result).values()):
        return "ranks drew different values: the generator's seed depends on the rank"
    return "the values are not those that seed and name determine"


def _collectives(case: Failure) -> str:
    phase, _, kind = case.result.name.partition(" ")
    if kind in ("send", "receive"):
        return f"{case.result.note}: in the {phase} stages hand on another number of tensors than one a micro-batch"
    has_cp = case.evidence.topology.cp > 1
    often = ["once per linear instead of once per region"] if case.tp > 1 or not has_cp else []
    often += ["more than once for the keys and values of an attention over cp"] if has_cp else []
    return f"{case.result.note}: the {phase} communicates {', or '.join(often)}"


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
    "collectives": _collectives,
    "adapters": "what one adapter alone has is another's: its tokens, their number, its scale, its limit or its rate",
}
