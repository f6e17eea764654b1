"""The stand-in for a run in its preflight: a twin of its model with its adapter, on its topology or a smaller one.

A twin that lacks a feature of the model is refused. Does not own: the shapes of twins (`meshlora_judge.twin`).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from meshlora.adapter.initialization import start_of
from meshlora.adapter.targets.resolve import Target
from meshlora.adapter.targets.token_rows import TokenRows
from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.own_dropouts import dropout_fields, handle_dropout
from meshlora.plan.rules import ModelPlan, kind_of
from meshlora.run.prepared import Prepared
from meshlora.verify.features import features_of_model, features_of_topology
from meshlora.verify.request import Proof
from meshlora.wings.quantized.kinds import kind_for_twin, twin_block
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.topology import LAYERS, Topology, divisors
from meshlora_judge.twin import layers_of_twin, shrink_config

# What a machine can run beside the job: more than two ranks on an axis show nothing new.
MOST_RANKS = 8
# The ones that a CPU can run in float64. Others are proved with the choice of transformers.
_ATTENTIONS = ("eager", "sdpa")
# Tokens of the twin with rows of their own: more show nothing new. And the first that may: those before are special.
_MOST_TOKENS, _FIRST_TOKEN = 4, 3
_AS_IN_THE_RUN = ("r", "lora_alpha", "use_rslora", "use_dora", "lora_bias", "lora_dropout", "bias")
_WAY_OUT = "prove the model itself with `meshlora verify --model FOLDER`, then train with --no-preflight"


class StandIn:
    """The twin of the model that `runs` share.

    Attributes:
        config: of the twin, with the dropout rates of the runs. topology: where it is proved.
        attn_implementation: of the runs, if a CPU supports it. quantization, compute: of its frozen base.
    """

    def __init__(self, *runs: Prepared, most_ranks: int = MOST_RANKS) -> None:
        self._run = run = runs[0]
        self._given = run.blueprint.config
        layers = _adapters_of_layers(runs)
        self.topology = provable(run.topology, most_ranks=most_ranks)
        stages = self.topology.num_stages
        self._layers = layers_of_twin(self._given, layers=layers, least=stages)
        attention = run.blueprint.options.attn_implementation
        self.attn_implementation = attention if attention in _ATTENTIONS else None
        self.quantization, self.compute = kind_for_twin(run.plan), run.plan.compute
        block = twin_block(self.quantization, self.compute, run.topology.tp)
        given = copy.deepcopy(self._given)
        self.config = shrink_config(given, tp=run.topology.tp, block=block, layers=layers, least=stages)
        handle_dropout(given, disable=run.blueprint.options.disable_dropout)
        for name, rate in dropout_fields(given).items():  # the twin has none by default
            setattr(self.config, name, rate)

    def reference(self, run: Prepared) -> dict[str, Any] | None:
        """The frozen adapter that `run` compares with, on the twin; None: it is that of `lora`, or there is none."""
        reference = run.blueprint.reference
        if reference is None or run.config.reference == run.config.adapter:
            return None
        return self.lora(dataclasses.replace(run, blueprint=dataclasses.replace(run.blueprint, adapter=reference)))

    def lora(self, run: Prepared) -> dict[str, Any]:
        """The adapter of `run` on the twin: each of its linears has the adapter of its counterpart in the model."""
        trust = run.blueprint.options.trust_remote_code
        options = BaseOptions(dtype="float64", trust_remote_code=trust, disable_dropout="unsupported")
        plan = make_blueprint(self.config, self.topology, options, run.config.train.objective).plan
        lora, targets = run.blueprint.trained.config, run.blueprint.trained.targets
        stood_for = self._stood_for(plan, [*plan.tables, *plan.linears])
        on = self._targets(plan, stood_for, targets)
        full = _trained_in_full(lora.modules_to_save or (), stood_for)
        modules, parameters = [], []
        ranks, alphas, pieces = dict[str, int](), dict[str, float](), dict[str, list[str]]()
        for key, names in (getattr(lora, "pieces", None) or {}).items():
            if "experts" not in key:  # those of experts go by the names of the twin
                pieces[key] = list(names)
        for name, target in on.items():
            if name not in stood_for:
                parameters.append(name)
            elif not any(f".{each}." in f".{name}." for each in full):
                modules.append(name)
            if target.pieces:  # which have the rank and scale of all
                if target.num_experts:
                    pieces[name] = list(target.pieces)
                continue
            if target.r != lora.r:
                ranks[name] = target.r
            # `lora_alpha` is scaling times r, or with rslora its root.
            alpha = target.scaling * (math.sqrt(target.r) if lora.use_rslora else target.r)
            if not math.isclose(alpha, lora.lora_alpha):
                alphas[name] = int(alpha) if alpha == int(alpha) else alpha
        on_twin = {name: getattr(lora, name) for name in _AS_IN_THE_RUN}
        on_twin |= {"modules_to_save": sorted(full) or None, "init_lora_weights": lora.init_lora_weights}
        if start_of(lora).looks_at_data:
            on_twin["init_lora_weights"] = True  # a twin is too narrow for as many vectors; `meshlora verify` proves it
        on_twin["target_modules"] = sorted(modules)
        further = {
            "target_parameters": parameters,
            "share_experts": any(target.is_shared for target in on.values()),
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
            "trainable_token_indices": self._rows(run.blueprint.trained.rows or {}),
            "alora_invocation_tokens": self._invocation(lora.alora_invocation_tokens or ()),
            "pieces": pieces,
            "ensure_weight_tying": lora.ensure_weight_tying,
        }
        return on_twin | {name: value for name, value in further.items() if value}

    def _invocation(self, tokens: Sequence[int]) -> list[int]:
        """Tokens of the twin for the first of `tokens`, as many as its sequences have twice; equal where these are."""
        padding, on_twin = getattr(self.config.get_text_config(), "pad_token_id", None), dict[int, int]()
        for token in tokens[:_MOST_TOKENS]:
            new = _FIRST_TOKEN + 2 * len(on_twin)
            on_twin.setdefault(token, new + (new == padding))
        return [on_twin[token] for token in tokens[:_MOST_TOKENS]]

    def _rows(self, rows: Mapping[str, TokenRows]) -> dict[str, list[int]]:
        """Module -> tokens of the twin, for those of `rows`: a few, over all of its vocabulary, in another order."""
        given, own = self._given.get_text_config(), self.config.get_text_config()
        padding, own_padding = getattr(given, "pad_token_id", None), getattr(own, "pad_token_id", None)
        few, on_twin = dict[str, tuple[int, ...]](), dict[int, int]()
        for module, each in rows.items():
            few[module] = each.ids[:_MOST_TOKENS]
            if padding in each.ids and padding not in few[module]:
                few[module] += (padding,)
            on_twin |= dict.fromkeys(few[module], 0)
        for place, token in enumerate(on_twin):
            last = len(on_twin) - 1 - place
            new = _FIRST_TOKEN + last * (own.vocab_size - _FIRST_TOKEN) // len(on_twin)
            on_twin[token] = new + (new == own_padding)
        if padding in on_twin and own_padding is not None:
            on_twin[padding] = own_padding
        return {module: [on_twin[token] for token in ids] for module, ids in few.items()}

    def _targets(self, plan: ModelPlan, stood_for: dict[str, str], targets: Mapping[str, Target]) -> dict[str, Target]:
        """Parameter or module of the twin -> target of its counterpart in the model.

        If no counterpart of a kind is a target but another module of that kind is, all of the kind in the twin are.
        """
        real = self._stood_for(plan, [*stood_for, *plan.projections, *plan.matrices])
        first = dict[str, Target]()
        for name, target in targets.items():
            first.setdefault(kind_of(name), target)
        for name, counterpart in real.items():
            if counterpart in targets:
                first.pop(kind_of(name), None)
        found = {}
        for name, counterpart in real.items():
            if target_of := targets.get(counterpart) or first.get(kind_of(name)):
                end = ".weight" if name in plan.matrices else ""
                found[name + end] = target_of
        return found

    def _stood_for(self, plan: ModelPlan, names: Iterable[str]) -> dict[str, str]:
        """Name in the twin -> name in the model."""
        prefix, layers = f"{plan.layers}.", self._layers

        def real(name: str) -> str:
            number, _, rest = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix) and number.isdecimal() and int(number) < len(layers):
                return f"{self._run.plan.layers}.{layers[int(number)]}.{rest}"
            return name

        return {name: real(name) for name in names}

    def check(self, proof: Proof) -> None:
        """Refuse a twin that lacks a feature of the model: its proof would not cover it. Raises: UnsupportedError."""
        run, twin = self._run, proof.plans[self.topology]
        if missing := _kinds(run.plan) - _kinds(twin):
            name, how = min(missing)
            rule = "its twin has no such block, so a proof of the twin would not cover it"
            raise UnsupportedError(f"{run.plan.model_type}: {name} ({how})", rule, _WAY_OUT)
        lora = run.blueprint.trained.config
        has = features_of_model(run.plan, lora, self._given, has_pieces=bool(getattr(lora, "pieces", None)))
        if lacks := has - proof.features_on(self.topology):
            given = f"{run.plan.model_type} on {run.topology}: {', '.join(sorted(lacks))}"
            rule = f"its twin on {self.topology} has none of it, so a proof of the twin would not cover it"
            raise UnsupportedError(given, rule, _WAY_OUT)


def provable(topology: Topology, *, most_ranks: int = MOST_RANKS) -> Topology:
    """`topology`, or if it is too large for a machine, a smaller one that keeps as many of its features as possible.

    It can still be larger than `most_ranks`, where no smaller one has every axis. It shrinks
    dp, cp and the axes of experts; features are axes of more than one rank, and experts with dp groups of their own.
    """
    interleave = min(topology.interleave, 2)
    if topology.world <= most_ranks:
        return dataclasses.replace(topology, interleave=interleave)
    topology = dataclasses.replace(topology.with_stages(min(topology.size_over(LAYERS), 2)), interleave=interleave)
    least = min(2, topology.dp)  # a sum over one rank proves nothing
    cp = min(3 if topology.ring else 2, topology.cp)  # in a ring of two each is the next and the one before
    of_stage = topology.per_stage // (topology.dp * topology.cp) * cp  # ranks of a stage, for each along dp
    others = topology.world // (topology.dp * topology.cp) * cp
    smaller = []
    for ep, etp in itertools.product(_few(topology.ep), _few(topology.etp)):
        sizes = range(least, max(least, most_ranks // others, ep * etp) + 1)
        fitting = [dp for dp in sizes if dp * of_stage % (ep * etp) == 0]
        smaller += [dataclasses.replace(topology, dp=dp, cp=cp, ep=ep, etp=etp) for dp in fitting]
    wanted = features_of_topology(topology)

    def likeness(other: Topology) -> tuple[int, int, int]:
        return -len(wanted - features_of_topology(other)), -other.world, -other.ep

    return max(smaller, key=likeness)


def _trained_in_full(wanted: Iterable[str], stood_for: Mapping[str, str]) -> set[str]:
    """Modules of the twin whose counterpart is one of `wanted`, by its end, or is in one; others by their last name."""
    full = set[str]()
    for end in wanted:
        names = {name for name, real in stood_for.items() if f".{real}".endswith(f".{end}")}
        for name, real in stood_for.items():
            _, is_in_block, rest = f".{real}".partition(f".{end}.")
            if is_in_block and name.endswith(f".{rest}"):
                names.add(name.removesuffix(f".{rest}"))
        last = end.rpartition(".")[2]
        full |= names or {end if last.isdecimal() else last}
    return full


def _few(size: int) -> list[int]:
    """The smallest divisors of `size` above 1, at most two."""
    return divisors(size)[1:3] or [1]


def _adapters_of_layers(runs: Iterable[Prepared]) -> dict[int, Hashable]:
    """Layer -> targets of the adapters in it."""
    found = dict[int, list[tuple[int, Target]]]()
    for number, run in enumerate(runs):
        prefix = f"{run.plan.layers}."
        for name, target in run.blueprint.trained.targets.items():
            layer, _, rest = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix) and layer.isdecimal():
                found.setdefault(int(layer), []).append((number, dataclasses.replace(target, name=rest)))
    return {layer: frozenset(targets) for layer, targets in found.items()}


def _kinds(plan: ModelPlan) -> set[tuple[str, str]]:
    """(kind of block, how it is split)."""
    found = set[tuple[str, str]]()
    for region in plan.regions:
        found.add((kind_of(region.name), "split region" if region.is_split else "whole region"))
    for name, experts in plan.projections.items():
        found.add((kind_of(name), f"experts, {experts.split}"))
    for name, linear in plan.linears.items():
        found.add((kind_of(name), str(linear.split)))
    return found
