"""The topology: the axes of the two meshes of ranks, what each axis cuts, and the sizes.

Owns: the table of axes and what differs between ranks along each; sets of axes by what they cut; parsing, divisibility
rules between axes, the coordinates of ranks. Does not own: whether a model can be split that way (`plan.rules`), the
gradient reductions that follow (`plan.grads`), process groups (`comm.groups`).

The same ranks form two meshes, each in the order of its table, the last axis fastest, so that the ranks of a
tensor-parallel group are neighbours. The axes of the two meshes are independent but for the number of ranks; a set of
axes is within one mesh. Stages of layers are outermost: each is a block of neighbouring ranks, as a rule whole nodes.
Between them go messages of two ranks each, and nothing that all ranks wait for; every other axis, the expert mesh too,
is within a stage. The size of the axis of sequences, and of the expert mesh's first, follows from the others.

| cuts      | each rank along it has       | parameters | gradient of a parameter it does not cut        |
|-----------|------------------------------|------------|------------------------------------------------|
| layers    | its own decoder layers       | by layer   | full: it is on one stage alone                 |
| sequences | its own rows                 | equal      | sum over it                                    |
| tokens    | its own tokens of equal rows | equal      | sum over it                                    |
| features  | its own part of matrices     | by layout  | sum over it, or mean, by domain (`plan.grads`) |
| experts   | its own experts              | by expert  | sum over it: one adapter for all experts       |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

from meshlora_ground.errors import UserError, did_you_mean


class Cuts(StrEnum):
    """What differs between the ranks along an axis."""

    LAYERS = "layers"
    SEQUENCES = "sequences"
    TOKENS = "tokens"
    FEATURES = "features"
    EXPERTS = "experts"


# Names of the axes that layouts and expert dispatch use.
TP, EP, ETP = "tp", "ep", "etp"

# Name -> what it cuts, in mesh order.
DENSE = {"pp": Cuts.LAYERS, "dp": Cuts.SEQUENCES, "cp": Cuts.TOKENS, TP: Cuts.FEATURES}
# The expert mesh. The ranks along edp hold copies of the same experts, each with its own tokens.
EXPERTS = {"edp": Cuts.TOKENS, EP: Cuts.EXPERTS, ETP: Cuts.FEATURES}
# Options of an axis, on or off: name -> (the axis, which needs several ranks, or another that will do; why).
FLAGS: dict[str, tuple[tuple[str, ...], str]] = {
    "sp": ((TP,), "sequence parallelism splits tokens over the tp ranks"),
    "dp_shard": (("dp", "cp"), "it shards the frozen base over the ranks with different tokens"),
    "ring": (("cp",), "keys and values are passed from one cp rank to the next"),
    "two-stage": ((ETP,), "it is a way to the etp ranks of an expert"),
}
# Options of an axis that are numbers: name -> (the axis, which needs several ranks; why).
NUMBERS: dict[str, tuple[tuple[str, ...], str]] = {
    "interleave": (("pp",), "it is the number of stages of layers on each of its ranks")
}
DENSE_AXES, EXPERT_AXES = tuple(DENSE), tuple(EXPERTS)


def _cutting(what: Cuts) -> frozenset[str]:
    return frozenset(name for name, cuts in DENSE.items() if cuts is what)


# The dense axes by what they cut. Ranks read different rows along those that cut sequences, the same along all others.
LAYERS, SEQUENCES = _cutting(Cuts.LAYERS), _cutting(Cuts.SEQUENCES)
TOKENS, FEATURES = _cutting(Cuts.TOKENS), _cutting(Cuts.FEATURES)
# Along these, ranks have different tokens and equal parameters: gradients, losses and counts are summed over them.
DATA = SEQUENCES | TOKENS


def field_of(flag: str) -> str:
    """The field of `Topology` for a flag."""
    return flag.replace("-", "_")


def copies_axis(number: int) -> str:
    """Name of the axis of `number` neighbouring tp ranks that hold the same key/value heads, a part of tp."""
    return f"kv/{number}"


def size_of_copies(axis: str) -> int | None:
    """The size of a `copies_axis`; None for an axis of a mesh."""
    _, slash, number = axis.partition("/")
    return int(number) if slash else None


def axis_sets(copies: Iterable[int], *, has_experts: bool) -> list[frozenset[str]]:
    """Every set of axes with a process group, the empty set first, in the same order on every rank.

    copies: numbers of neighbouring tp ranks that hold the same key/value heads. has_experts: include the expert mesh.
    """
    found = _subsets(DENSE_AXES)
    if has_experts:
        found += _subsets(EXPERT_AXES)[1:]
    for axis in map(copies_axis, sorted(copies)):
        found += [frozenset({axis}), DATA | {axis}]
    return found


def _subsets(names: tuple[str, ...]) -> list[frozenset[str]]:
    found = [frozenset[str]()]
    # Each name doubles the list, so the order is the same on every rank: groups are opened in it.
    for name in names:
        found += [axes | {name} for axes in found]
    return found


# The size of the first expert axis follows from the others, and is never given.
_SIZES = (*DENSE_AXES, *EXPERT_AXES[1:])
(_REST,) = SEQUENCES
_OTHERS = tuple(name for name in DENSE_AXES if name != _REST)


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes. `world == pp * dp * cp * tp == pp * edp * ep * etp`.

    Attributes:
        pp: pipeline-parallel size. Each pp rank has 1/pp of the decoder layers; see `wings.stages.cut`.
        interleave: stages of layers on each pp rank, which take turns: shorter ones, so that ranks wait less.
        dp: data-parallel size. Each dp rank sees its own sequences.
        cp: context-parallel size. Each cp rank has 1/cp of the tokens of every sequence, inside attention too.
        tp: tensor-parallel size. Each tp rank holds 1/tp of every split weight.
        sp: sequence parallelism: between regions each tp rank holds 1/tp of the tokens.
        ep: expert-parallel size. Each ep rank holds 1/ep of the experts of every layer.
        etp: expert-tensor-parallel size. Each etp rank holds 1/etp of every expert.
        two_stage: tokens are dispatched over ep, then over etp, instead of over both at once.
        dp_shard: each of the dp * cp ranks holds its share of every decoder layer's frozen matrices, gathered layer by
            layer.
        ring: keys and values of other cp ranks pass by one rank's at a time, instead of being gathered.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    sp: bool = False
    ep: int = 1
    etp: int = 1
    two_stage: bool = False
    dp_shard: bool = False
    ring: bool = False
    interleave: int = 1

    def __post_init__(self) -> None:
        for name in (*_SIZES, *NUMBERS):
            size = getattr(self, name)
            if size < 1:
                raise UserError(f"{name}={size}", "the size of an axis is at least 1", f"use {name}=1 to leave it out")
        given = [flag for flag in FLAGS if getattr(self, field_of(flag))]
        given += [name for name in NUMBERS if getattr(self, name) > 1]
        for flag in given:
            needs, why = {**FLAGS, **NUMBERS}[flag]
            if self.size_over(needs) == 1:
                sizes = " and ".join(f"{name}=1" for name in needs)
                raise UserError(f"{flag} with {sizes}", why, f"raise {' or '.join(needs)} or leave out {flag}")
        if self.per_stage % (self.ep * self.etp):
            whole = _product(self.sizes, _of_stage(DENSE_AXES))
            rule = f"ep*etp must divide {whole}"
            way_out = f"use ep*etp in {set_of(divisors(self.per_stage))}"
            raise UserError(f"ep*etp={self.ep * self.etp} with {whole}={self.per_stage}", rule, way_out)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def per_stage(self) -> int:
        """Number of ranks that together hold a stage of layers."""
        return self.world // self.size_over(LAYERS)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dense axes in mesh order, slowest first."""
        return {name: getattr(self, name) for name in DENSE_AXES}

    @property
    def edp(self) -> int:
        """Expert-data-parallel size: the number of ranks that hold each part of an expert."""
        return self.per_stage // (self.ep * self.etp)

    @property
    def expert_sizes(self) -> dict[str, int]:
        """Sizes of the expert axes in mesh order, slowest first."""
        return {name: getattr(self, name) for name in EXPERT_AXES}

    def with_stages(self, pp: int) -> Topology:
        """This topology with pp ranks along the axis of layers."""
        if pp == 1:
            return replace(self, pp=1, interleave=1)
        return replace(self, pp=pp)

    @property
    def num_stages(self) -> int:
        """Number of stages of layers. Stage i is on pp rank i modulo pp."""
        return self.size_over(LAYERS) * self.interleave

    def place_of_rows(self, rank: int) -> int:
        """The index of `rank` among the ranks that read the same rows, the last axis fastest."""
        index = 0
        for name, place in self.coordinates(rank).items():
            if name not in SEQUENCES:
                index = index * getattr(self, name) + place
        return index

    @property
    def is_whole(self) -> bool:
        """Whether each rank runs all layers, whole (experts aside), on whole sequences: the model's code, unchanged."""
        return self.world == self.size_over(SEQUENCES)

    @property
    def is_split(self) -> bool:
        """Whether a rank lacks a part of a layer, experts included, of the layers or of sequences."""
        return not self.is_whole or self.ep * self.etp > 1

    @property
    def token_cut(self) -> frozenset[str]:
        """The axes over which the tokens of a batch are split between regions."""
        return TOKENS | FEATURES if self.sp else TOKENS

    @property
    def experts_repeat_over_dp(self) -> bool:
        """Whether the ranks of a data-parallel group all hold the same part of the same experts."""
        for group in self.groups_over(DATA):
            held = set[tuple[int, int]]()
            for rank in group:
                place = self.expert_coordinates(rank)
                held.add((place[EP], place[ETP]))
            if len(held) > 1:
                return False
        return True

    @classmethod
    def parse(cls, text: str, *, world: int | None = None) -> Self:
        """Read `"dp=2,tp=2,sp"`, `"dp=4,ep=2,etp=2,two-stage"`, `"dp=8,dp_shard"`.

        A missing dp becomes `world / (pp * cp * tp)` if `world` is given, else the smallest that ep*etp allows.

        Raises:
            UserError: unknown axis, not a number, an axis twice, or sizes that do not multiply to `world`.
        """
        given: dict[str, Any] = {}
        for item in text.split(","):
            name, equals, value = [part.strip() for part in item.partition("=")]
            if not item.strip():  # of a comma at an end
                continue
            if field_of(name) in given:
                raise UserError(f"topology {text!r}", f"{name} is given twice", "give each axis once")
            if name in FLAGS:
                given[field_of(name)] = _parse_flag(text, name, equals, value)
            elif name not in (*_SIZES, *NUMBERS):
                known = [*_SIZES, *FLAGS, *NUMBERS]
                raise UserError(f"topology {text!r}", f"{name!r} is not an axis", did_you_mean(name, known))
            elif not (value.isascii() and value.isdecimal()):
                rule = f"{name} needs a whole number, as in {name}=2"
                raise UserError(f"topology {text!r}", rule, f"it has {value!r}")
            else:
                given[name] = int(value)
        if _REST not in given:
            given[_REST] = _missing(world, given)
        # The rules between sizes are those of any topology, so they come before the number of processes.
        topology = cls(**given)
        if world is not None and topology.world != world:
            way_out = f"start {topology.world}, or use sizes whose product {_product(given, DENSE_AXES)} is {world}"
            raise UserError(f"topology {topology} needs {topology.world} processes", f"{world} were started", way_out)
        return topology

    def __str__(self) -> str:
        parts = []
        for axes in (DENSE_AXES, EXPERT_AXES[1:]):
            # Options are said after the axes of their mesh.
            numbers = [name for name, (needs, _) in NUMBERS.items() if needs[0] in axes]
            parts += [f"{name}={getattr(self, name)}" for name in (*axes, *numbers) if getattr(self, name) > 1]
            parts += [flag for flag, (needs, _) in FLAGS.items() if needs[0] in axes and getattr(self, field_of(flag))]
        return ",".join(parts) or f"{_REST}=1"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank` on the dense mesh: `{"pp": h, "dp": i, "cp": j, "tp": k}`."""
        return self._place(rank, self.sizes)

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank` on the expert mesh of its stage: `{"edp": i, "ep": j, "etp": k}`."""
        return self._place(rank, self.expert_sizes)

    def stage_of(self, rank: int) -> int:
        """The place of `rank` along the axis of layers."""
        return rank // self.per_stage

    def _place(self, rank: int, sizes: dict[str, int]) -> dict[str, int]:
        assert 0 <= rank < self.world, (rank, self)
        return {name: rank // self.stride_of(name) % size for name, size in sizes.items()}

    def stride_of(self, axis: str) -> int:
        """The rank distance of neighbours along an axis: 1 along the last of a mesh."""
        for mesh in (DENSE_AXES, EXPERT_AXES):
            if axis in mesh:
                return self.size_over(mesh[mesh.index(axis) + 1 :])
        return 1  # copies are neighbours

    def groups_over(self, axes: frozenset[str]) -> list[list[int]]:
        """The ranks of every group over `axes`: those that agree on every other axis, in mesh order.

        An axis may be `copies_axis(n)`, a part of tp.
        """
        of_experts = axes & set(EXPERT_AXES)
        assert not of_experts or of_experts == axes, axes
        sizes = self.sizes
        if of_experts:  # inside a stage they have a mesh of their own
            sizes = {"pp": self.pp} | self.expert_sizes
        parts = [(name, size, self.stride_of(name)) for name, size in sizes.items()]
        for axis in axes:
            if copies := size_of_copies(axis):
                name, size, _ = parts.pop()  # tp, the last: so many neighbours, and the rest of it beyond them
                parts += [(name, size // copies, copies), (axis, copies, 1)]
        first, inside = [0], [0]  # the first ranks of all groups; how far the ranks of a group are from its first
        for name, size, stride in parts:
            if name in axes:
                inside = [rank + place * stride for rank in inside for place in range(size)]
            else:
                first = [rank + place * stride for rank in first for place in range(size)]
        return [[begin + rank for rank in inside] for begin in first]

    def size_over(self, axes: Iterable[str]) -> int:
        """The number of ranks in a group over `axes`."""
        return math.prod(size_of_copies(axis) or getattr(self, axis) for axis in axes)


def dense_sizes(world: int) -> Iterator[dict[str, Any]]:
    """All sizes of the dense axes for `world` ranks, in one stage."""
    others = _of_stage(_OTHERS)
    for sizes in itertools.product(divisors(world), repeat=len(others)):
        if world % math.prod(sizes) == 0:
            yield {_REST: world // math.prod(sizes), **dict(zip(others, sizes, strict=True))}


def _of_stage(axes: Iterable[str]) -> list[str]:
    """The dense axes among `axes` that are within a stage of layers."""
    return [name for name in axes if name not in LAYERS]


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def set_of(numbers: Iterable[int]) -> str:
    """`{1, 2, 4}`, for messages."""
    return "{" + ", ".join(map(str, numbers)) + "}"


def _parse_flag(text: str, name: str, equals: str, value: str) -> bool:
    flags = {"": True, "true": True, "1": True, "false": False, "0": False}
    if (equals and not value) or value.lower() not in flags:
        raise UserError(f"topology {text!r}", f"{name} is a flag", f"write {name}, or leave it out")
    return flags[value.lower()]


def _product(sizes: dict[str, Any], axes: Iterable[str]) -> str:
    """`dp*tp`, for messages: the oldest two axes, and others that are in use."""
    return "*".join(name for name in axes if name in (_REST, TP) or sizes.get(name, 1) > 1)


def _missing(world: int | None, given: dict[str, Any]) -> int:
    """The size of the dense axis that follows from the others."""

    def given_over(axes: Iterable[str]) -> int:
        return math.prod(given.get(name, 1) for name in axes)

    others, experts = given_over(_OTHERS), given_over(EXPERT_AXES[1:])
    if world is None or others < 1:
        inside = given_over(_of_stage(_OTHERS))
        return max(1, experts // math.gcd(experts, inside)) if others else 1
    if world % others:
        what = _product(given, _OTHERS)
        rule = f"{what} must divide the number of processes"
        nproc = max(others, world // others * others)
        way_out = f"use {what} in {set_of(divisors(world))}, or --nproc {nproc}"
        raise UserError(f"{what}={others} on {world} processes", rule, way_out)
    return world // others
