"""The tiny sizes of twins.

Owns: how many heads, features and tokens a twin has, such that tensor parallel ranks share them as they share those of
what the twin stands for. Does not own: which fields of a configuration they go into (`plan.families.twin`).
"""

from __future__ import annotations

import itertools

# Tokens of a twin; as many more as the vocabulary has over a multiple of tp.
_VOCABULARY = 256


def sizes_of(tp: int, block: int) -> dict[str, int]:
    """Kind of field -> tiny size: 8 heads and 4 key/value heads where tp divides them, else 2 tp and tp. Heads are of 8
    features, or as much wider as `block` asks for.
    """
    kv_heads = 4 if 4 % tp == 0 else tp
    return _sizes(2 * kv_heads, kv_heads, _VOCABULARY, tp, block)


def sizes_like(tp: int, block: int, *, heads: int, kv_heads: int, vocabulary: int) -> dict[str, int]:
    """The same for a model with so many. What stays: which of them tp divides, whether there are fewer key/value heads
    than ranks (these are as many as they were), groups of one head, numbers that are no power of two or odd, and what
    the vocabulary is modulo tp.
    """
    if kv_heads == heads:
        few = many = _like(heads, tp, least=min(heads, 8), multiple=1)
    else:
        few = kv_heads if kv_heads < tp else _like(kv_heads, tp, least=min(kv_heads, 4), multiple=1)
        many = _like(heads, tp, least=max(2 * few, min(heads, 8)), multiple=few if heads % kv_heads == 0 else 1)
    return _sizes(many, few, _VOCABULARY + (vocabulary - _VOCABULARY) % tp, tp, block)


def shared_heads(value: int, heads: int | None, sizes: dict[str, int]) -> int:
    """How many heads stand for `value`, which share the work of `heads`."""
    if value == 1:
        return 1
    if value == heads:
        return sizes["heads"]
    if value % sizes["tp"] == 0 and sizes["kv_heads"] % sizes["tp"]:  # of a mixer beside an attention with fewer
        return next(n for n in range(2, sizes["heads"] + 1) if sizes["heads"] % n == 0 == n % sizes["tp"])
    return sizes["kv_heads"]


def _like(value: int, tp: int, *, least: int, multiple: int) -> int:
    """The least number that tp divides, that is even and that is a power of two as `value` is."""

    def character(number: int) -> tuple[bool, bool, bool]:
        return number % tp == 0, number % 2 == 0, number & (number - 1) == 0

    candidates = (n for n in itertools.count(least) if n % multiple == 0)
    return next(n for n in candidates if character(n) == character(value))


def _sizes(heads: int, kv_heads: int, vocabulary: int, tp: int, block: int) -> dict[str, int]:
    head_dim = 8
    while heads * head_dim % (tp * block) and head_dim < 8 * tp * block:
        head_dim += 8
    hidden = heads * head_dim
    return {
        "tp": tp,
        "hidden": hidden,
        "inner": 2 * hidden,
        "expert_inner": hidden // 2,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "two_head_dims": 2 * head_dim,
        "rank": hidden // 4,
        "layers": 2,
        "vocabulary": vocabulary,
        "positions": 128,
        "window": 8,  # half of 16 tokens: a window over all tokens would hide a wrong mask
        "image": 16,
    }
