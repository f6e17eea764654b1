"""Stages of a pipeline: which decoder layers, and which modules around them, a pp rank has.

Owns: the cut of a model's layers into stages of equal cost, and the plan of one stage. Does not own: what a stage does
with the layers of others (`wings.stages.hold`), the order in which micro-batches pass
(`wings.stages.pipeline_schedule`).

What comes before the layers is of the first stage, towers too; what comes after them, and the head, of the last. A
layer costs the elements of the matrices that a token is multiplied with; the embedding, a lookup, costs nothing, the
head its matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import LAYERS, Topology, divisors, set_of


def with_stages(model: Any, plan: ModelPlan) -> ModelPlan:
    """`plan` with its stages, if its topology has several. `model` may be on the meta device.

    Raises:
        UserError: there are more stages than layers. UnsupportedError: layers of two stages share a weight.
    """
    number = plan.topology.num_stages
    if number == 1:
        return plan
    check_stages(model, plan)
    costs = tuple(layer_cost(model, plan, f"{plan.layers}.{i}") for i in range(plan.num_layers))
    first, last = featured_layers(model.config), first_sharing_layer(model.config)
    after = layer_cost(model, plan, plan.head)
    states_every = getattr(model.config.get_text_config(), "n_layers_per_attn_res_block", 0)
    stages = cut_layers(costs, number, after=after, first=first, last=last)
    found = replace(plan, stages=stages, states_every=states_every)
    check_shared(model, found)
    return with_choices(model.config, found)


def with_choices(config: Any, plan: ModelPlan) -> ModelPlan:
    """`plan` with stages that begin earlier where a layer takes the keys that an indexer in the one before has chosen.

    Raises:
        UnsupportedError: a stage would have no layer left.
    """
    kinds = getattr(config.get_text_config(), "indexer_types", None)
    if not kinds:
        return plan
    starts, num_layers = [], len(kinds)
    for start, _ in plan.stages:
        while kinds[start] == "shared" and start > 0:
            start -= 1
        starts.append(start)
    if len({*starts}) < len(starts):
        rule = "the layers with one indexer's choice of keys are of one stage, and one would have none left"
        raise UnsupportedError(f"{plan.model_type} on {plan.topology}", rule, "use fewer stages, pp times interleave")
    return replace(plan, stages=tuple(zip(starts, [*starts[1:], num_layers], strict=True)))


def check_stages(model: Any, plan: ModelPlan) -> None:
    """Refuse a model or a topology that is not proved with stages, and more stages than layers.

    Raises:
        UserError: there are more. UnsupportedError: names what is not proved.
    """
    topology = plan.topology
    check({**plan.asked, "composite": type(model).__name__ if plan.text else ""})
    first = featured_layers(model.config)
    most = plan.num_layers - max(first, 1) + 1
    if topology.num_stages > most:
        fitting = set_of(number for number in divisors(plan.num_layers) if number <= most)
        given = f"topology {plan.topology}"
        rule = f"each stage needs a layer, and the model has {plan.num_layers}"
        if first > 1:
            rule += f", of which the first {first}, whose tower adds features to them, are of one stage"
        raise UserError(given, rule, f"use at most {most} stages, pp times interleave, as in {fitting}")
    last = first_sharing_layer(model.config)
    if last is not None and topology.num_stages > last + 1:
        rule = f"layers {last} to {plan.num_layers - 1} have keys and values in common, and so are of the last stage"
        raise UserError(f"topology {topology}", rule, f"use at most {last + 1} stages, pp times interleave")


def featured_layers(config: Any) -> int:
    """After how many of the first layers features of a tower are added to the stream (DeepStack of qwen3_vl)."""
    for part in (config, getattr(config, "vision_config", None)):
        if found := getattr(part, "deepstack_visual_indexes", None):
            return len(found)
    return 0


def first_sharing_layer(config: Any) -> int | None:
    """The first layer whose keys and values later ones take, all of which are the model's last (gemma4); None: none."""
    try:
        modes = getattr(config.get_text_config(decoder=True), "kv_sharing_modes", [])
    except ValueError:  # nothing is there to share: transformers says so when it builds the model, and that is told
        return None
    return modes.index("store") if {"reuse", "store"} <= {*modes} else None


def check_trained(model: Any, plan: ModelPlan, parameters: Iterable[str], copies: Collection[str]) -> None:
    """Refuse an adapter that leaves a stage nothing to train, or trains a weight that two stages have.

    parameters: names of all trained parameters. copies: of those of the base.

    Raises:
        UnsupportedError: names the stage, or the weight.
    """
    if not plan.stages:
        return
    trained = {plan.rank_of(name) for name in parameters}
    if without := sorted({*range(plan.topology.size_over(LAYERS))} - trained):
        stages = plan.stages[without[0] :: plan.topology.size_over(LAYERS)]
        layers: list[int] = []
        for start, stop in stages:
            layers += range(start, stop)
        raise idle(plan.topology, layers)
    check_tied(model, plan, copies)


def idle(topology: Topology, layers: Sequence[int]) -> UnsupportedError:
    """The refusal of an adapter that trains nothing in `layers`, those of a rank."""
    given = f"an adapter on {topology} that trains nothing in layers {', '.join(map(str, layers))}"
    rule = "each stage of layers must have something to train"
    return UnsupportedError(given, rule, "use fewer stages, or more targets")


def check_tied(model: Any, plan: ModelPlan, copies: Collection[str]) -> None:
    """Refuse to train an end that is tied with the other, on another stage. copies: trained parameters of the base.

    Raises:
        UnsupportedError: names it.
    """
    if plan.topology.num_stages == 1:  # it may have no head
        return
    ends = {f"{plan.embedding}.weight", f"{plan.head}.weight"}
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name in copies:
        if is_tied and name in ends:
            check({"topology": plan.topology, "tied": name})


def check_shared(model: Any, plan: ModelPlan) -> None:
    """Refuse layers that share a weight with what another stage has; a head may be tied with the embedding.

    Raises:
        UnsupportedError: names both.
    """
    holders: dict[int, str] = {}
    ends = {f"{plan.embedding}.weight", f"{plan.head}.weight"}
    # With duplicates: a weight that is listed once would hide its second owner.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert isinstance(parameter, nn.Parameter)
        other = holders.setdefault(id(parameter), name)
        if plan.stage_of(other) != plan.stage_of(name) and {name, other} != ends:
            rule = f"it is one weight with {other}, of another stage"
            raise UnsupportedError(f"{plan.topology}: {name}", rule, "use pp=1")


@functools.lru_cache(maxsize=64)  # a planner asks for the same again with every topology
def cut_layers(
    costs: tuple[float, ...], number: int, *, after: float = 0.0, first: int = 0, last: int | None = None
) -> tuple[tuple[int, int], ...]:
    """(first layer, layer after the last) of each of `number` stages, such that the most expensive is cheapest.

    costs: of each layer, at least `number`. after: the cost of what the last stage has besides its layers. first: so
    many layers are of the first stage. last: the last stage begins at this layer or before. Of equally good cuts, the
    one whose later stages are short.
    """
    total = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # The least possible largest cost of the layers from `start` on in `stages` stages, and the first stage's end.
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for start in range(total):
        best[start, 1] = (sums[-1] - sums[start] + after, total)
        if last is not None and start > last:
            best[start, 1] = (math.inf, total)
    for stages in range(2, number + 1):
        for start in range(total - stages + 1):
            least, end = math.inf, 0
            earliest = max(start + 1, first if stages == number else 0)
            for stop in range(earliest, total - stages + 2):
                largest = max(sums[stop] - sums[start], best[stop, stages - 1][0])
                if largest <= least:  # of equals the last: later stages are short
                    least, end = largest, stop
            best[start, stages] = (least, end)
    found, start = [], 0
    for stages in range(number, 0, -1):
        stop = best[start, stages][1]
        found.append((start, stop))
        start = stop
    return tuple(found)


def layer_cost(model: Any, plan: ModelPlan, name: str) -> float:
    """Elements of the matrices of module `name` that a token is multiplied with."""
    total = 0.0
    if not name:  # a model without a head
        return total
    text = model.config.get_text_config()
    top_k = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 1
    for path, parameter in model.get_submodule(name).named_parameters(prefix=name):
        if parameter.ndim < 2:
            continue
        share = 1.0
        for expert, rule in plan.experts.items():
            if path.startswith(f"{expert}."):  # a token is multiplied with its own experts alone
                share = top_k / rule.num_experts
        total += parameter.numel() * share
    return total


def beside_text(model: Any, plan: ModelPlan) -> list[str]:
    """Names of the modules of a composite that are beside its text part, the topmost: towers, projectors."""
    found: list[str] = []
    if not plan.text:
        return found
    inside = [name for name in (plan.text, plan.embedding, plan.head, *plan.after) if name]
    for name, _ in model.named_modules():
        is_around = not name or any(f"{each}.".startswith(f"{name}.") for each in inside)
        if not is_around and not any(name.startswith(f"{each}.") for each in (*inside, *found)):
            found.append(name)
    return found


def plan_of_rank(plan: ModelPlan, rank: int) -> ModelPlan:
    """What of `plan` pp rank `rank` has."""
    if not plan.stages:
        return plan
    own, embedding, head = replace(plan, pp_rank=rank), plan.embedding, plan.head
    if not own.holds(embedding):
        embedding = ""
    if not own.holds(head):
        head = ""

    def held(rules: Any) -> Any:
        return {name: rule for name, rule in rules.items() if own.holds(name)}

    return replace(
        own,
        regions=tuple(region for region in plan.regions if own.holds(region.name)),
        linears=held(plan.linears),
        parameters=held(plan.parameters),
        attentions=tuple(filter(own.holds, plan.attentions)),
        wide_norms=held(plan.wide_norms),
        embedding=embedding,
        head=head,
        after=tuple(filter(None, (*plan.after, plan.head))),  # "" where there is no head
        experts=held(plan.experts),
        matrices=held(plan.matrices),
        units=tuple(filter(own.holds, plan.units)),
        quantized=held(plan.quantized),
    )
