"""Adapters on some pieces of fused matrices: our configuration, its form in PEFT, and the checks.

Owns: the configuration and the meaning of its `pieces`. Does not own: the rows of a piece (`plan.layout`), the file
format (`adapter.formats.peft_format`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig

from meshlora.adapter.targets.options import matches, pattern_key
from meshlora.plan.layout import Layout, Piece
from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import UserError


@dataclass
class PieceLoraConfig(LoraConfig):
    """A `peft.LoraConfig` for adapters on some pieces of fused matrices.

    Attributes:
        pieces: target -> its pieces with an adapter, as in `{"c_attn": ["q", "v"]}`. To PEFT it is one adapter of
            the sum of their ranks (`rank_pattern`), with a B that is zero outside its blocks.
        share_experts: one adapter for all experts of a layer, instead of one each. To PEFT it is one each, all equal.
        vision: of a composite, also adapt the modules outside its text part: all, or those named, with all inside.
    """

    pieces: dict[str, list[str]] | None = None
    share_experts: bool = False
    vision: bool | list[str] = False


def own_words(config: LoraConfig) -> dict[str, Any]:
    """The options of `config` that PEFT lacks, as stored in `meshlora.json`; empty if none are set."""
    pieces, shared = getattr(config, "pieces", None) or {}, getattr(config, "share_experts", False)
    words: dict[str, Any] = {}
    if pieces or shared:  # even if there are none: `read_config` asks for them
        words["pieces"] = dict(pieces)
    if shared:
        words["share_experts"] = True
    return words


def with_own_words(
    config: LoraConfig,
    pieces: Mapping[str, list[str]] | None = None,
    *,
    share_experts: bool = False,
    vision: bool | list[str] = False,
) -> LoraConfig:
    """`config` with these options of ours added; unchanged if there are none."""
    known = own_words(config)
    pieces = {**known.get("pieces", {}), **(pieces or {})}
    shared = share_experts or "share_experts" in known
    vision = vision or getattr(config, "vision", False)
    if not pieces and not shared and not vision:
        return config
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(LoraConfig)}
    return PieceLoraConfig(**values, pieces=pieces or None, share_experts=shared, vision=vision)


def piece_of(fused: Layout | None, module: str, name: str) -> Piece:
    """The piece `name` of the linear `module`; fused: its layout, if it has pieces.

    Raises:
        UserError: there is no such piece.
    """
    pieces = () if fused is None else fused.pieces
    for piece in pieces:
        if piece.name == name:
            return piece
    known = ", ".join(piece.name for piece in pieces)
    if not known:
        known = "none: it is not a fused matrix, or adapters on parts of it are not proved"
    raise UserError(f"pieces: {name!r} of {module}", f"its pieces are: {known}", "name them as they are there")


def with_pieces(config: LoraConfig, pieces: Mapping[str, list[str]]) -> LoraConfig:
    """`config`, given with ranks and alphas per piece, with those that PEFT needs; unchanged if there are no pieces."""
    if not pieces:
        return config
    ranks, alphas = dict(config.rank_pattern), dict(config.alpha_pattern)
    for key, names in pieces.items():
        number = len(names)
        ranks[key] = number * ranks.get(key, config.r)
        # So that PEFT's scale, of the whole, is that of each piece: alpha / r, or with rsLoRA alpha / sqrt(r).
        growth = math.sqrt(number) if config.use_rslora else number
        alphas[key] = alphas.get(key, config.lora_alpha) * growth
    found = with_own_words(config, pieces)
    found.rank_pattern, found.alpha_pattern = ranks, alphas
    return found


def pieces_of(config: LoraConfig, name: str) -> list[str]:
    """The pieces of the linear `name` that have an adapter; empty for the whole."""
    chosen: dict[str, list[str]] = own_words(config).get("pieces", {})
    key = _key_of(chosen, name)
    return [] if key is None else chosen[key]


def _key_of(chosen: Iterable[str], name: str) -> str | None:
    """The first key of `pieces` that is about the linear `name`; None: none is."""
    return next((key for key in chosen if matches([key], [name])), None)


def check_pieces(config: LoraConfig, targets: Collection[str], plan: ModelPlan) -> None:
    """Check that each entry of `pieces` matches a target and names pieces of it."""
    chosen: dict[str, list[str]] = own_words(config).get("pieces", {})
    for key, names in chosen.items():
        about = matches([key], targets)
        if not about:
            way_out = "add it to target_modules, or of experts to target_parameters"
            raise UserError(f"pieces: {key}", f"{key!r} is none of the targets", way_out)
        if len(set(names)) != len(names) or not names:
            raise UserError(f"pieces: {key}: {names}", "each piece once, and at least one")
        check({"pieces": chosen, "init_lora_weights": config.init_lora_weights})
        for name in about:
            rule = plan.rule_of(name)
            fused = rule.fused if rule is not None else None
            for piece in names:
                piece_of(fused, name, piece)
            if key == _key_of(chosen, name):  # a later one is not in force
                _check_patterns(config, key, name)


def _check_patterns(config: LoraConfig, key: str, name: str) -> None:
    """Refuse a pattern that takes precedence over the entry for pieces: it would be read as their total rank."""
    for option in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, option) or {}
        found = pattern_key(pattern, name)
        if key in pattern and found != key:
            given = f"{option}: {found!r}"
            rule = f"it is about {name} too, which has adapters on pieces, by {key!r}"
            raise UserError(given, rule, f"give the pattern for {key}, before {found!r}, or name no pieces of it")
