"""Token mixers with heads of their own: gated delta nets and state-space mixers (mamba-2).

Owns: the forms of their code, and which families have them: the pieces of their fused linears, the channels of their
convolution, parameters with a value per head. Sizes come from the module. Does not own: short convolutions, whose
channels are plain features (`wings.tables`); which rows a rank holds (`plan.layout`).

A rank holds some of the heads, with all that belongs to them: rows of every projection, channels of the convolution,
decay, step and skip, the gated norm, columns of the projection out. What several heads share (the key head of a delta
net, the B and C of a state-space mixer's group) goes with them; with fewer of these than ranks, several hold each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshlora.plan.families.family import Leaf, fused
from meshlora.plan.layout import Layout, Piece, Split


@dataclass(frozen=True)
class Mixer:
    """One form of mixer.

    Attributes:
        pieces: piece -> (its number of units, the rows of a unit), each an attribute of the module, or a number.
        leaves: path -> split linear, with its pieces; repeated as often as its `groups` says.
        parameters: path -> (its split dim, the pieces along it); of buffers too. Those that are absent are passed over.
        widths: attribute -> the pieces whose rows it counts.
        shared: the numbers of units that may be below tp.
        norm: path of an RMS norm over the rows of "x" in each group of "B"; "": its norm is over a single head.
        state: attributes with the sizes of its recurrent state, `[B, ...]`.
    """

    pieces: Mapping[str, tuple[str, str | int]]
    leaves: Mapping[str, Leaf]
    parameters: Mapping[str, tuple[int, str]]
    widths: Mapping[str, str]
    shared: tuple[str, ...] = ()
    norm: str = ""
    state: tuple[str, ...] = ()

    def fits(self, module: nn.Module) -> bool:
        """Whether `module` has the linears of this form."""
        return self.leaves.keys() <= {path for path, _ in module.named_modules()}

    def layout(self, module: nn.Module, pieces: str, groups: int | str = 1) -> Layout:
        """The layout of a dim with `pieces`, repeated `groups` times: a number, or an attribute of `module`."""
        found = []
        for name in pieces.split():
            count, rows = self.pieces[name]
            found.append(Piece(name, _int(module, count), _int(module, rows), can_replicate=count in self.shared))
        return Layout(tuple(found), _int(module, groups))

    def leaf_layout(self, module: nn.Module, path: str) -> Layout:
        """The layout of the split dim of the linear at `path`."""
        leaf = self.leaves[path]
        return self.layout(module, leaf.pieces, leaf.groups)

    def obstacle(self, module: nn.Module, tp: int) -> str:
        """Why `tp` ranks cannot share its heads; "" if they can."""
        for count, _ in self.pieces.values():
            number = _int(module, count)
            if number % tp == 0:
                continue
            if count not in self.shared:
                return f"tp={tp} must divide {count}={number}"
            if tp % number:
                return f"tp={tp} must divide {count}={number} or be a multiple of it"
        return ""

    def local(self, module: nn.Module, *, tp: int) -> dict[str, dict[str, int]]:
        """Path in the module -> attribute -> its value on a rank."""
        own: dict[str, int] = {}
        for count, _ in self.pieces.values():
            own[count] = max(1, _int(module, count) // tp)
        for name, pieces in self.widths.items():
            own[name] = self.layout(module, pieces).local_size(tp)
        found = {}
        for path, part in module.named_modules():
            # Parts that have a copy of an attribute: of the same name and value.
            values = {name: n for name, n in own.items() if getattr(part, name, None) == getattr(module, name)}
            if path == self.norm and hasattr(part, "group_size"):
                values["group_size"] = self.layout(module, "x").local_size(tp) // own[self.pieces["B"][0]]
            if values:
                found[path] = values
        return found


def _int(module: nn.Module, name: str | int) -> int:
    """The attribute `name` of a module; a number itself."""
    if isinstance(name, int):
        return name
    value: Any = getattr(module, name)
    assert isinstance(value, int), (type(module).__name__, name, value)
    return value


def _row(pieces: str) -> Leaf:
    return Leaf(Split.ROW, pieces)


_KEYS, _VALUES, _ONE = ("num_k_heads", "head_k_dim"), ("num_v_heads", "head_v_dim"), ("num_v_heads", 1)
_HEADS, _GROUPS = ("num_heads", "head_dim"), ("n_groups", "ssm_state_size")
_Pieces = dict[str, tuple[str, str | int]]
_DELTA_PIECES: _Pieces = {**dict.fromkeys("qk", _KEYS), **dict.fromkeys("vz", _VALUES), **dict.fromkeys("ba", _ONE)}
_DELTA_PARAMETERS = {"conv1d.weight": (0, "q k v"), "dt_bias": (0, "a"), "A_log": (0, "a")}
_DELTA_STATE = ("num_v_heads", "head_k_dim", "head_v_dim")
_DELTA_WIDTHS = {"key_dim": "k", "value_dim": "v", "conv_dim": "q k v"}


def _delta_net(leaves: Mapping[str, Leaf]) -> Mixer:
    return Mixer(_DELTA_PIECES, leaves, _DELTA_PARAMETERS, _DELTA_WIDTHS, ("num_k_heads",), state=_DELTA_STATE)


# By key head: its query, itself, then the values and gates that it serves.
_FUSED_DELTA = _delta_net(
    {
        "in_proj_qkvz": fused("q k v z", groups="num_k_heads"),
        "in_proj_ba": fused("b a", groups="num_k_heads"),
        "out_proj": _row("v"),
    }
)
_DELTA = _delta_net(
    {
        "in_proj_qkv": fused("q k v"),
        "in_proj_z": fused("z"),
        "in_proj_b": fused("b"),
        "in_proj_a": fused("a"),
        "out_proj": _row("v"),
    }
)
_SEPARATE_DELTA = _delta_net(
    {**{f"{name}_proj": fused(name) for name in "qkvba"}, "g_proj": fused("z"), "o_proj": _row("v")}
)
_KIMI_PIECES: _Pieces = {**dict.fromkeys("qkvgz", _HEADS), "b": ("num_heads", 1)}


def _kimi_delta(*, decay: str, gate: str, dim: int) -> Mixer:
    """A delta net with a decay of each channel. decay, gate: the linears to them. dim: of the heads in `A_log`."""
    return Mixer(
        _KIMI_PIECES,
        {
            **{f"{name}_proj": fused(name) for name in "qkvb"},
            f"forget_gate.{decay}": fused("g"),
            gate: fused("z"),
            "o_proj": _row("v"),
        },
        {"conv1d.weight": (0, "q k v"), "forget_gate.dt_bias": (0, "g"), "forget_gate.A_log": (dim, "b")},
        {"qkv_dim": "q", "conv_dim": "q k v"},
        state=("num_heads", "head_dim", "head_dim"),
    )


_MAMBA2 = Mixer(
    {"z": _HEADS, "x": _HEADS, "B": _GROUPS, "C": _GROUPS, "dt": ("num_heads", 1)},
    {"in_proj": fused("z x B C dt"), "out_proj": _row("x")},
    {
        "conv1d.weight": (0, "x B C"),
        "conv1d.bias": (0, "x B C"),
        **dict.fromkeys(("dt_bias", "A_log", "D"), (0, "dt")),
        "norm.weight": (0, "x"),
        "mup_vector": (2, "z x B C dt"),
    },
    {"intermediate_size": "x", "conv_dim": "x B C"},
    shared=("n_groups",),
    norm="norm",
    state=("num_heads", "head_dim", "ssm_state_size"),
)

MIXERS: dict[str, tuple[str, Mixer]] = {
    "bailing_hybrid": ("self_attn", _kimi_delta(decay="f_proj", gate="g_proj", dim=0)),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), ("mamba", _MAMBA2)),
    "glm5_next_text": ("self_attn", _kimi_delta(decay="f_b_proj", gate="g_b_proj", dim=0)),
    "kimi_linear": ("self_attn", _kimi_delta(decay="f_b_proj", gate="g_b_proj", dim=2)),  # of low rank
    **dict.fromkeys(("mamba2", "nemotron_h"), ("mixer", _MAMBA2)),
    "olmo_hybrid": ("linear_attn", _SEPARATE_DELTA),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"), ("linear_attn", _DELTA)),
    "qwen3_next": ("linear_attn", _FUSED_DELTA),
}


def mixer_of(model_type: str, path: str, module: nn.Module) -> Mixer | None:
    """The form of the block `module` at `path` of a decoder layer, if it is a mixer of the family `model_type`."""
    block, mixer = MIXERS.get(model_type, ("", None))
    return mixer if mixer is not None and path == block and mixer.fits(module) else None
