"""Causes of faults in mixtures of experts, from what the numbers show, as `oracle.diagnosis.causes` has those of dense
blocks.

Owns: the rules about experts, their tokens and the axes that they lie on. Empty words: nothing that only experts have.
"""

from __future__ import annotations

import torch

from meshlora.oracle.capture import CHOICES
from meshlora.oracle.diagnosis.failure import Failure
from meshlora.oracle.diagnosis.symptoms import is_permuted
from meshlora.oracle.experts import stack_of
from meshlora.oracle.unshard import Ownership, ShapeError, Tokens, canonical, token_pieces


def of_backward(case: Failure) -> str:
    """What is wrong with a gradient that goes back into a router."""
    scores = {name.partition("#")[0] for micro in case.evidence.reference.micro_batches for name in micro.forward}
    blocks = {stack.rpartition(".")[0].rpartition(".")[0] for stack in case.evidence.reference.stacks}
    name = case.result.name
    if case.evidence.reference.aux_losses and name.rpartition(".")[0] in blocks and name in scores:
        return "the gradient of a router's scores: that of the load-balancing loss, or of the routing weights"
    return ""


def of_forward(case: Failure) -> str:
    """What is wrong with the output of a module of experts."""
    name, topology = case.result.name, case.evidence.topology
    if not any(stack.startswith(f"{name}.") for stack in case.evidence.reference.rows):
        return ""
    if _choices_differ(case, name):
        return "tokens are sent to other experts than the router's scores say"
    if case.result.whole is None:
        return ""
    if topology.etp > 1 and case.ratio == 1 / topology.etp:
        return "the experts' output is averaged over etp instead of summed"
    if topology.etp > 1 and case.ratio == topology.etp:
        return "the experts' output is summed over etp twice"
    if is_permuted(case.result):
        return "the experts' output goes to other tokens: rows come back in another order than they left in"
    return (
        "what experts make of their tokens: rows or routing weights that do not go together, a sum over etp that lacks "
        "a term or has the bias of every rank, another rank's experts, or an adapter's term"
    )


def of_loaded_adapter(case: Failure) -> str:
    """What is wrong with a factor of experts before the first step."""
    if stack_of(case.result.name.rpartition(".lora_")[0]) not in case.evidence.reference.stacks:
        return ""
    return "the adapters on this rank are not those of the experts, or of the parts of them, whose matrices it holds"


def _choices_differ(case: Failure, experts: str) -> bool:
    evidence, name = case.evidence, f"{experts}{CHOICES}"
    tokens = Tokens(evidence.reference)
    found = canonical(evidence.reference, tokens, "forward", name)
    if found is None:
        return False
    rows = [tokens.rows(trace.micro_batches) for trace in evidence.ranks]
    ownership = Ownership(evidence.ranks, evidence.reference, evidence.topology)
    try:
        pieces = token_pieces(evidence.ranks, rows, ownership, "forward", name, *found)
    except ShapeError:
        return True
    return not all(torch.equal(piece.values, piece.of(found[0])) for piece in pieces)


def of_gradients(case: Failure) -> str:
    """What is wrong where only gradients of adapters on experts are."""
    failed = [result for result in case.phase.results if not result.passed]
    stacks = case.evidence.reference.stacks
    modules = {result.name.rpartition(".lora_")[0] for result in failed}
    if not all(stack_of(module) in stacks for module in modules):
        return ""
    first = failed[0]
    if first.whole is None:
        return f"nobody has the gradient that one process has: {first.note}"
    which = " and ".join(sorted({_kind(case, result.name) for result in failed}))
    for axis, size in case.evidence.topology.expert_sizes.items():
        if size == 1:
            continue
        if all(case.adds_up_over(axis, result) for result in failed):
            return f"the gradient of {which} is not summed over {axis}: the ranks' gradients add up to the reference"
        if case.ratio == 1 / size:
            return f"the gradient of {which} is averaged over {axis} instead of summed"
        if case.ratio == size:
            return f"the gradient of {which} is summed over {axis} twice, or though each rank has all of it"
    return f"the gradient of {which} is wrong though the gradients of all activations are right"


def _kind(case: Failure, name: str) -> str:
    module, _, part = name.rpartition(".lora_")
    split = case.fact(stack_of(module)).removeprefix("expert ")
    projection = {"column": "first", "row": "second"}.get(split, split)
    return f"{part.partition('.')[0]} of the experts' {projection} projections"
