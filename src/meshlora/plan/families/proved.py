"""Families: the `model_type`s whose split training is proved correct.

Owns: the record of proofs, and refusals that follow from the configuration alone. Does not own: running proofs.
Every family in `PROVED` has a float64 proof against one-process transformers + peft on tp=2 and tp=2,sp; those in
`PROVED_CONTEXT` also on cp=2, those in `PROVED_STAGES` on pp=2, and those in `PROVED_EXPERTS` on tp=2,sp,ep=2 and
tp=2,sp,etp=2 with adapters on experts (`tests/parity` repeats them). Unproven families are refused, except dense
ones on data-parallel ranks, which run the model's code unchanged.
`meshlora train` also proves the combination of each run (`verify.preflight`). If the minor version of a library differs
from that of the record, a family must have been proved with the installed one (`meshlora verify --family`).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from meshlora_ground.errors import UnsupportedError
from meshlora_ground.proof_records import CACHE, proved_on
from meshlora_ground.topology import LAYERS, TOKENS, Topology
from meshlora_ground.versions import digest, other_minors, own_sources, versions

# Written by `scripts/prove_families.py --record`: family -> topology -> worst relative error of its proof.
_FILE: dict[str, Any] = json.loads(Path(__file__).with_name("proved.json").read_text(encoding="utf-8"))
_RECORD: dict[str, dict[str, float]] = _FILE["families"]
PROVED = frozenset(_RECORD)


def _proved_over(axes: frozenset[str]) -> frozenset[str]:
    """The families with a proof on a topology that has more than one rank over `axes`."""
    found = set()
    for name, topologies in _RECORD.items():
        if any(Topology.parse(topology).size_over(axes) > 1 for topology in topologies):
            found.add(name)
    return frozenset(found)


PROVED_CONTEXT, PROVED_STAGES = _proved_over(TOKENS), _proved_over(LAYERS)
PROVED_EXPERTS = frozenset(name for name, found in _RECORD.items() if any("ep=" in topology for topology in found))

# Families for which a single process deviates from its own files, or cannot be compared.
_REFUSED = {
    "emu3_text_model": "transformers stores it under a name that it does not load",
    "laguna": "PEFT does not load the adapters that it saves of it: it renames those of its shared experts",
    **dict.fromkeys(("pp_formulanet", "qwen2_5_omni"), "it is several models and has no input embedding"),
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"),
        "its indexer runs once for each block of a batch, which a proof does not follow",
    ),
    **dict.fromkeys(
        ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
        "transformers itself fails on text with its configuration, which lacks vision_start_token_id",
    ),
    "shieldgemma2": "transformers stores it under names that it does not load",
    "youtu": "transformers zeroes the padding token's embedding whenever it loads this family, and meshlora reads the "
    "stored one",
    "xglm": "transformers itself overflows on it in float64, so that it cannot be proved",
}

# Families whose split cannot be proved, or is not right yet.
_REFUSED_SPLIT = {
    **dict.fromkeys(
        ("blip-2", "instructblip", "instructblipvideo"), "transformers' forward takes no text without images"
    ),
    "muse_glimmer": "its embedding is a module with a norm inside",
    "unlimited_ocr": "transformers takes the names of its own layers for older ones, and renames those of an adapter",
    "vibevoice_asr": "its audio part cannot be shrunk to that of a twin",
    "voxtral_realtime": "transformers' forward takes no text without audio",
}
# Families that cannot go on with a part of each sequence's tokens.
_REFUSED_CONTEXT = {
    "minimax": "its lightning attention sees earlier tokens by a state of its own",
    "recurrent_gemma": "its recurrent units see earlier tokens by a state of their own",
}

# Families that need, beside the residual stream, what another stage has.
_REFUSED_STAGES = {
    **dict.fromkeys(
        ("falcon_h1", "falcon_mamba", "llama4_text", "mamba", "mamba2", "xlstm"),
        "its code reads weights of layers, or of the embedding, where other stages have them",
    ),
    "nanochat": "its last norm runs before the layers too",
    "openai-gpt": "its layers share an activation",
    "rwkv": "its layers pass a state on beside the residual stream",
}


def check_family(model: Any, topology: Topology) -> None:
    """Refuse families that no proof can make right. `model` may be on the meta device.

    Raises:
        UnsupportedError: an encoder-decoder, a family in `_REFUSED`, bloom with `slow_but_exact`; on `topology` one in
            `_REFUSED_SPLIT`, `_REFUSED_CONTEXT` or `_REFUSED_STAGES`, gpt2 with `reorder_and_upcast_attn`.
    """
    config = model.config
    what = f"model_type {config.model_type!r}"
    if config.model_type in _REFUSED:
        raise UnsupportedError(what, _REFUSED[config.model_type])
    if not topology.is_whole and config.model_type in _REFUSED_SPLIT:
        raise UnsupportedError(f"{what} on {topology}", _REFUSED_SPLIT[config.model_type], "use dp alone")
    if topology.size_over(TOKENS) > 1 and config.model_type in _REFUSED_CONTEXT:
        raise UnsupportedError(f"{what} on {topology}", _REFUSED_CONTEXT[config.model_type], "use dp, tp and sp")
    # Of gpt2, with eager alone.
    if topology.size_over(TOKENS) > 1 and getattr(config, "reorder_and_upcast_attn", False):
        raise UnsupportedError(
            f"reorder_and_upcast_attn on {topology}",
            "it is attention in code of the family's own, which sees no tokens of other ranks",
            "set it to false in config.json, or use dp, tp and sp",
        )
    if topology.size_over(LAYERS) > 1 and config.model_type in _REFUSED_STAGES:
        raise UnsupportedError(f"{what} on {topology}", _REFUSED_STAGES[config.model_type], "use pp=1")
    if config.model_type == "bloom" and config.pretraining_tp > 1 and config.slow_but_exact:
        raise UnsupportedError(
            "slow_but_exact", "it slices a weight past its adapter", "set it to false in config.json"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(what, "only decoder-only language models are supported")


def check_proved(model_type: str, topology: Topology, *, has_experts: bool) -> None:
    """Refuse an unproved split.

    Raises:
        UnsupportedError: a family without a proof if tp > 1, or, with experts, if any size but dp is above 1.
    """
    # Several axes at once need a proof of each, not of every combination: a run proves its own.
    proved = PROVED_EXPERTS if has_experts else PROVED
    if topology.size_over(TOKENS) > 1:
        proved &= PROVED_CONTEXT
    if topology.size_over(LAYERS) > 1:
        proved &= PROVED_STAGES
    if _is_split(topology) and model_type not in proved:
        families = "families with experts" if has_experts else "families"
        raise UnsupportedError(
            f"model_type {model_type!r}",
            f"its split over {topology} is not proved against one process",
            f"use dp alone, as much as you like; the proved {families} are {', '.join(sorted(proved))}",
        )


def check_proved_here(model_type: str, topology: Topology, *, has_experts: bool, cache_dir: Path = CACHE) -> None:
    """Refuse a split that is not proved with the installed libraries.

    Raises:
        UnsupportedError: as `check_proved`; or the minor version of torch, transformers or peft differs from that of
            the record, and `cache_dir` has no proof of the family with the installed one.
    """
    check_proved(model_type, topology, has_experts=has_experts)
    here, there = versions(), _FILE["versions"]
    others = other_minors(there, here)
    if not _is_split(topology) or not others or proved_on(cache_dir, proof_of_family(model_type, topology)):
        return
    installed, recorded = (", ".join(f"{name} {of[name]}" for name in others) for of in (here, there))
    raise UnsupportedError(
        f"model_type {model_type!r} on {topology} with {installed}",
        f"its split is proved with {recorded}",
        f"prove it with yours, once: meshlora verify --family {model_type} --topology {_smallest(topology)}",
    )


def proof_of_family(model_type: str, topology: Topology) -> dict[str, Any]:
    """The cache record of a family's proof on `topology` with the installed libraries and the present code."""
    asked = {"family": model_type, "topology": str(_smallest(topology)), "libraries": versions()}
    return {"key": f"family-{digest([json.dumps(asked, sort_keys=True), *own_sources()])}", **asked}


def _is_split(topology: Topology) -> bool:
    return not topology.is_whole or topology.ep * topology.etp > 1


def _smallest(topology: Topology) -> Topology:
    """`topology` with the fewest equivalent dp ranks: a proof on two ranks or more also covers larger dp."""
    for dp in range(min(2, topology.dp), topology.dp):
        if dp * topology.tp % (topology.ep * topology.etp):
            continue  # the expert mesh is made of the same ranks
        smaller = dataclasses.replace(topology, dp=dp)
        if (smaller.edp > 1) == (topology.edp > 1):
            return smaller
    return topology
