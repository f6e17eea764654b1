"""`model.generate` of a parallel model: transformers' own, on a mesh.

Owns: the forwards of generation (`generating`), what ranks that generate must have in common, and the end of a loop in
which several replicas take part. Does not own: prompts and texts (`run.decoding`), which rank continues which prompt
(`run.generated`).

A decode step has one token a row, which sp cannot cut: inside `generating` every tp rank has all tokens between
regions. Caches hold the heads of this rank, as the layers that fill them do. cp ranks run forwards that nobody has cut:
each is a replica that generates by itself. So are dp ranks, of their own prompts. If replicas hold each other's experts
or shards (`in_step`), a forward of one is a forward of all: none leaves its loop before the last has finished.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_gather, all_reduce_sum
from meshlora.comm.groups import Axis, Mesh
from meshlora.loading.own_loop import given_tokens
from meshlora.plan.pairs import check
from meshlora.wings.context.context import as_transformers_attends
from meshlora.wings.experts.same_tokens import fingerprint
from meshlora.wings.stages.hold import without_images
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import FEATURES, LAYERS

# Arguments of transformers' `generate` with loops of their own, in which nobody has compared ranks.
_REFUSED = ("assistant_model", "prompt_lookup_num_tokens", "custom_generate")


@contextlib.contextmanager
def generating(model: Any) -> Iterator[None]:
    """Inside the block forwards of `model` are those of generation: of any number of tokens, in evaluation mode, and
    without gradients. Afterwards all is as before, gradients and random numbers too.

        with generating(model):
            model.generate(...)
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = []  # of GPUs whose random state is kept besides that of the host
    if model.device.type == "cuda":
        devices.append(model.device)
    model.eval()
    try:
        with whole_tokens(model), torch.random.fork_rng(devices):
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training


@contextlib.contextmanager
def whole_tokens(model: Any) -> Iterator[None]:
    """Inside the block every rank has all tokens of its rows, and forwards of this thread have no gradient."""
    with runtime(model).cut.left(model), as_transformers_attends(model):
        yield


def replica(mesh: Mesh) -> Axis:
    """The ranks that compute the forwards of this one's rows together: each has a part of the matrices, or layers."""
    return mesh.over(FEATURES | LAYERS)


def in_step(model: Any) -> Axis | None:
    """The ranks whose replicas compute each other's forwards, as each holds experts or shards of the base that others
    need; None: replicas know nothing of each other.
    """
    mesh: Mesh = runtime(model).mesh
    topology = mesh.topology
    shares_experts = bool(runtime(model).whole.plan.experts) and topology.ep * topology.etp > 1
    if mesh.data.size > 1 and (topology.dp_shard or shares_experts):
        return mesh.data
    return None


def all_finished(model: Any, *, is_finished: bool) -> bool:
    """Whether this rank, and all that are `in_step` with it, have finished. Collective over these."""
    axis = in_step(model)
    if axis is None:
        return is_finished
    left = torch.tensor([int(not is_finished)], device=model.device)
    return not all_reduce_sum(left, axis).item()


def generate(model: Any, *args: Any, **options: Any) -> Any:
    """transformers' `generate` of a parallel model, with its arguments: every rank calls it, those of a replica with
    the same prompts, and gets the tokens of one process.

    Raises:
        UserError: tp or pp ranks have different prompts, or would draw different tokens. UnsupportedError: ranks
            have several stages; a loop in which nobody has compared ranks.
    """
    mesh: Mesh = runtime(model).mesh
    check({"topology": mesh.topology, "door": "generate"})
    own = type(model).generate
    if mesh.topology.world == 1:
        return own(model, *args, **options)
    for name in _REFUSED:
        if options.get(name) is not None:
            check({"topology": mesh.topology, "argument": f"generate({name}=...)"})
    if options.get("cache_implementation") == "paged":
        raise UnsupportedError("cache_implementation='paged'", "it is continuous batching", "use model.generate_batch")
    _compare(model, args, options)
    if not runtime(model).plan.has_first_stage:  # transformers runs the tower before the first forward
        options = without_images(options)
    options["synced_gpus"] = in_step(model) is not None
    with whole_tokens(model):
        found = own(model, *args, **options)
    tokens = found
    if not isinstance(found, Tensor):  # return_dict_in_generate
        tokens = found.sequences
    _check_drawn(tokens, replica(mesh))
    return found


def _compare(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Compare what the ranks of a replica are given, and where their random numbers begin if any are drawn."""
    axis = replica(runtime(model).mesh)
    if axis.size == 1:
        return
    config = options.get("generation_config")
    given = (options.get("do_sample"), getattr(config, "do_sample", None), model.generation_config.do_sample)
    draws = False
    for value in reversed(given):  # the first that says it counts
        if value is not None:
            draws = bool(value)
    if "inputs" in options:
        name, prompts = "inputs", options["inputs"]
    else:
        name, prompts = given_tokens(args, options)
    device = model.device
    state = torch.zeros(1)  # where nothing is drawn it need not be one
    if draws and device.type == "cuda":
        state = torch.cuda.get_rng_state(device)
    elif draws:
        state = torch.get_rng_state()
    rows = [fingerprint(state.to(device)[None])]
    if isinstance(prompts, Tensor):
        rows.append(fingerprint(prompts.to(device)))
    of_ranks = all_gather(torch.cat(rows, 1), axis).tolist()
    if any(one[3:] != of_ranks[0][3:] for one in of_ranks):
        rule = "tp and pp ranks compute one forward together, and need the same rows in the same order"
        raise UserError(f"generate: the {name} of tp ranks differ", rule, "give each rank the prompts of its dp rank")
    if any(one != of_ranks[0] for one in of_ranks):
        rule = "each would draw tokens of its own, of one forward that they compute together"
        way_out = "call torch.manual_seed(seed) on every rank, with one seed for the ranks of a replica"
        raise UserError("generate(do_sample=True): the random states of tp ranks differ", rule, way_out)


def _check_drawn(tokens: Tensor, axis: Axis) -> None:
    """Raises UnsupportedError, on all ranks of `axis`, if what they have generated differs."""
    # Of three numbers, not of the tokens: texts of other lengths would not even have one shape.
    of_ranks = all_gather(fingerprint(tokens), axis).tolist()
    if any(one != of_ranks[0] for one in of_ranks):
        given = f"tp and pp ranks {list(axis.ranks)} have generated different tokens"
        rule = "they computed one forward together, and then each chose tokens of its own: no text is right"
        raise UnsupportedError(given, rule, "try torch.use_deterministic_algorithms(True), and leave out top_p")
