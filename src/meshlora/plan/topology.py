"""The topology: sizes of the mesh axes, as text and as numbers.

Owns: parsing, the divisibility rules between axes, and which rank sits where. Does not own: whether a model can be
split that way (`plan.rules`), or the process groups (`parallel.groups`).

The same ranks lie on two meshes. The dense one is `(dp, tp)` with tp fastest, so that the ranks of one tensor-parallel
group are neighbours. That of experts is `(edp, ep, etp)` with etp fastest; nothing ties its axes to the dense ones but
the number of ranks. A set of axes is of one mesh or of the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from meshlora.errors import UserError, did_you_mean

_SIZES = ("dp", "tp", "ep", "etp")
_FLAGS = ("sp", "two-stage", "dp_shard")
EXPERT_AXES = ("edp", "ep", "etp")


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes. `world == dp * tp == edp * ep * etp`.

    Attributes:
        dp: data-parallel size. Each dp rank sees its own sequences.
        tp: tensor-parallel size. Each tp rank holds 1/tp of every split weight.
        sp: sequence parallelism: between regions each tp rank holds 1/tp of the tokens.
        ep: expert-parallel size. Each ep rank holds 1/ep of the experts of every layer.
        etp: expert-tensor-parallel size. Each etp rank holds 1/etp of every expert.
        two_stage: tokens go to their experts over ep first and over etp then, instead of over both at once.
        dp_shard: each dp rank holds 1/dp of every decoder layer's frozen matrices, and gathers them layer by layer.
    """

    dp: int = 1
    tp: int = 1
    sp: bool = False
    ep: int = 1
    etp: int = 1
    two_stage: bool = False
    dp_shard: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if size < 1:
                raise UserError(f"{name}={size}", "the size of an axis is at least 1", f"use {name}=1 to leave it out")
        if self.sp and self.tp == 1:
            raise UserError(
                "sp with tp=1", "sequence parallelism splits tokens over the tp ranks", "raise tp or leave out sp"
            )
        if self.two_stage and self.etp == 1:
            raise UserError(
                "two-stage with etp=1", "it is a way to the etp ranks of an expert", "raise etp or leave out two-stage"
            )
        if self.dp_shard and self.dp == 1:
            raise UserError(
                "dp_shard with dp=1", "it shards the frozen base over the dp ranks", "raise dp or leave out dp_shard"
            )
        if self.world % (self.ep * self.etp):
            raise UserError(
                f"ep*etp={self.ep * self.etp} with dp*tp={self.world}",
                "ep*etp must divide dp*tp",
                f"use ep*etp in {_set_of_divisors(self.world)}",
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dense axes in mesh order, slowest first."""
        return {"dp": self.dp, "tp": self.tp}

    @property
    def edp(self) -> int:
        """Expert-data-parallel size: on how many ranks each part of an expert lies."""
        return self.world // (self.ep * self.etp)

    @property
    def expert_sizes(self) -> dict[str, int]:
        """Sizes of the axes of experts in mesh order, slowest first."""
        return {"edp": self.edp, "ep": self.ep, "etp": self.etp}

    @property
    def experts_repeat_over_dp(self) -> bool:
        """Whether the ranks of a dp group all hold the same part of the same experts."""
        places = [self.expert_coordinates(rank) for rank in range(self.world)]
        held = [(place["ep"], place["etp"]) for place in places]
        return all(len({held[rank] for rank in group}) == 1 for group in self.groups_over(frozenset({"dp"})))

    @classmethod
    def parse(cls, text: str, *, world: int | None = None) -> Self:
        """Read `"dp=2,tp=2,sp"`, `"dp=4,ep=2,etp=2,two-stage"`, `"dp=8,dp_shard"`.

        A missing dp is `world / tp` where `world` is given, else the smallest that lets ep*etp divide dp*tp.

        Raises:
            UserError: unknown axis, not a number, an axis twice, or sizes that do not multiply to `world`.
        """
        sizes: dict[str, int] = {}
        flags: dict[str, bool] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (part.strip() for part in item.partition("="))
            if name in sizes or name in flags:
                raise UserError(f"topology {text!r}", f"{name} is given twice", "give each axis once")
            if name in _FLAGS:
                flags[name] = _parse_flag(text, name, equals, value)
            elif name not in _SIZES:
                raise UserError(
                    f"topology {text!r}", f"{name!r} is not an axis", did_you_mean(name, [*_SIZES, *_FLAGS])
                )
            elif not value.isdecimal():
                raise UserError(
                    f"topology {text!r}", f"{name} needs a whole number, as in {name}=2", f"it has {value!r}"
                )
            else:
                sizes[name] = int(value)
        sizes.setdefault("tp", 1)
        if "dp" not in sizes:
            sizes["dp"] = _missing_dp(world, sizes)
        sp, two_stage, dp_shard = (flags.get(name, False) for name in _FLAGS)
        topology = cls(sp=sp, two_stage=two_stage, dp_shard=dp_shard, **sizes)
        if world is not None and topology.world != world:
            raise UserError(
                f"topology {topology} needs {topology.world} processes",
                f"{world} were started",
                f"start {topology.world}, or use sizes whose product dp*tp is {world}",
            )
        return topology

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in _SIZES if getattr(self, name) > 1]
        dense = sum(part.startswith(("dp=", "tp=")) for part in parts)
        parts[dense:dense] = [name for name in ("sp", "dp_shard") if getattr(self, name)]
        if self.two_stage:
            parts.append("two-stage")
        return ",".join(parts) or "dp=1"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` sits on the dense axes: `{"dp": i, "tp": j}`."""
        assert 0 <= rank < self.world, (rank, self)
        return {"dp": rank // self.tp, "tp": rank % self.tp}

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` sits on the axes of experts: `{"edp": i, "ep": j, "etp": k}`."""
        assert 0 <= rank < self.world, (rank, self)
        return {"edp": rank // (self.ep * self.etp), "ep": rank // self.etp % self.ep, "etp": rank % self.etp}

    def groups_over(self, axes: frozenset[str]) -> list[list[int]]:
        """The rank lists of all groups that span `axes`: ranks that agree on every other axis, in mesh order.

        An axis may be `copies_axis(n)`: part of tp.
        """
        of_experts = axes & set(EXPERT_AXES)
        assert not of_experts or of_experts == axes, axes
        copies = next((int(axis.partition("/")[2]) for axis in axes if "/" in axis), 1)
        by_place: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            place = self.coordinates(rank) | {"tp": rank % self.tp // copies}
            if of_experts:
                place = self.expert_coordinates(rank)
            by_place.setdefault(tuple(i for axis, i in place.items() if axis not in axes), []).append(rank)
        return list(by_place.values())

    def size_over(self, axes: frozenset[str]) -> int:
        """Number of ranks of a group over `axes`."""
        sizes = {**self.sizes, **self.expert_sizes}
        return math.prod(sizes[axis] if axis in sizes else int(axis.partition("/")[2]) for axis in axes)


def copies_axis(number: int) -> str:
    """The axis of `number` neighbouring tp ranks that hold the same key/value heads."""
    return f"kv/{number}"


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _set_of_divisors(number: int) -> str:
    return "{" + ", ".join(map(str, divisors(number))) + "}"


def _parse_flag(text: str, name: str, equals: str, value: str) -> bool:
    flags = {"": True, "true": True, "1": True, "false": False, "0": False}
    if (equals and not value) or value.lower() not in flags:
        raise UserError(f"topology {text!r}", f"{name} is a flag", f"write {name}, or leave it out")
    return flags[value.lower()]


def _missing_dp(world: int | None, sizes: dict[str, int]) -> int:
    experts, tp = sizes.get("ep", 1) * sizes.get("etp", 1), sizes["tp"]
    if world is None or tp < 1:
        return max(1, experts // math.gcd(experts, tp)) if tp else 1
    if world % tp:
        raise UserError(
            f"tp={tp} on {world} processes",
            "tp must divide the number of processes",
            f"use tp in {_set_of_divisors(world)}",
        )
    return world // tp
