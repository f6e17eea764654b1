"""Dropout masks, and noise of embeddings, as a pure function of (seed, optimizer step, module name, token, feature).

Both sides of a proof use them, as they use the same sequences: they are an input of a run, like its seed. Does not own:
which tokens and features a module sees (`layers.dropout`, `layers.noise`, `meshlora_judge.dropout`,
`meshlora_judge.noise`), which dropouts a model has (`plan.own_dropouts`).

Element (token t, feature f) is kept if 32 hashed bits compare with p. The hash is counter-based: no state, and any part
of the matrix can be computed alone, in any order. A token contributes two 32-bit words, so that tokens that agree in
one of them still have unrelated rows. Wrapping integer arithmetic gives the same bits on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

Key = int | Tensor
POSITION_BITS = 32
# Elements hashed at once: the memory needed besides the mask itself is a few words for each of these.
_BLOCK = 2**22

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: features land far from each other
# lowbias32 (Wellons, "Prospecting for hash functions"): its two multipliers.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
# Odd, with random bits: constants of xxHash.
_FACTORS = (-7046029288634856825, -4417276706812531889, 1609587929392839161)
_BEFORE = 0xED5AD4BB  # of triple32: a round before the second word enters, two after it


def token_numbers(places: Tensor, length: int) -> Tensor:
    """Token numbers, int64 `[B, length]`, of the sequences at `places`, int64 `[B]`, of the global batch.

    A number encodes the sequence and the position in it; it does not depend on topology, batch size or padding.
    """
    return (places << POSITION_BITS).unsqueeze(1) + torch.arange(length, device=places.device)


def numbers_by_content(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Token numbers, int64 `[B, S]`, of sequences whose places nobody knows: 31 bits hashed of their tokens in place.

    As `token_numbers` they depend on neither topology nor padding, on whichever side of a row. Equal sequences have
    equal numbers.
    """
    is_token = torch.ones_like(input_ids) if attention_mask is None else attention_mask.ne(0).to(input_ids.dtype)
    position = (is_token.cumsum(1) - 1).clamp(min=0)
    place = (hashed_in_place(input_ids, position) * is_token).sum(1) & 0x7FFFFFFF
    return (place << POSITION_BITS).unsqueeze(1) + position


def hashed_in_place(values: Tensor, places: Tensor) -> Tensor:
    """64 hashed bits of each of `values`, int64, at its place. A sum over them tells values, and their order, apart."""
    mixed = values * _FACTORS[0] + places * _FACTORS[1]  # wraps around
    mixed = (mixed ^ (mixed >> 29)) * _FACTORS[2]
    return mixed ^ (mixed >> 32)


def mask_key(seed: int, step: int, module: str) -> int:
    """The 64-bit key of the masks of `module` in optimizer step `step`, counted from 0."""
    return _key(f"dropout:{seed}:{step}:{module}")


def noise_key(seed: int, step: int) -> int:
    """The 64-bit key of the noise on the embedded tokens in optimizer step `step`, counted from 0."""
    return _key(f"neftune:{seed}:{step}")


def _key(words: str) -> int:
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big")


def words_of(key: int) -> tuple[int, int]:
    """The low and the high 32 bits."""
    return key & _WORD, key >> 32


def keep_mask(key: Key, tokens: Tensor, features: Tensor, p: float) -> Tensor:
    """bool `[T, H]`: whether feature `features[h]` of token `tokens[t]` is kept, with probability 1 - p.

    key: or its two words, low and high, int64 `[2]`. tokens: int64 `[T]`, any values; features: int64 `[H]`, in
    [0, 2**32). p: in [0, 1).
    """
    assert 0.0 <= p < 1.0, p
    least = round(p * 2**32) - 2**31
    kept = torch.empty(len(tokens), len(features), dtype=torch.bool, device=tokens.device)
    for block, hashed in _hashed(key, tokens, features):
        torch.ge(hashed, least, out=kept[block])
    return kept


def uniform(key: Key, tokens: Tensor, features: Tensor, dtype: torch.dtype) -> Tensor:
    """`[T, H]`: a number in (-1, 1), all 2**32 equally likely, with mean 0; rounded to `dtype`. Else as `keep_mask`."""
    drawn = torch.empty(len(tokens), len(features), dtype=dtype, device=tokens.device)
    for block, hashed in _hashed(key, tokens, features):
        drawn[block] = hashed.to(torch.float64).add_(0.5).mul_(2.0**-31)
    return drawn


def _hashed(key: Key, tokens: Tensor, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(tokens, 32 hashed bits of each of their elements as int32 `[t, H]`), some tokens at a time."""
    first, second = _row_words(key, tokens).unsqueeze(-1)
    columns = _signed(features * _GOLDEN)
    rows = max(1, _BLOCK // max(1, len(features)))
    for start in range(0, len(tokens), rows):
        block = slice(start, start + rows)
        x = _xor_shift(first[block] + columns, 17).mul_(_BEFORE - 2**32)
        x = _xor_shift(x.bitwise_xor_(second[block]), 16).mul_(_FIRST)
        x = _xor_shift(x, 15).mul_(_SECOND - 2**32)
        yield block, _xor_shift(x, 16)


def _row_words(key: Key, tokens: Tensor) -> Tensor:
    """Two int32 words for each token, `[2, T]`."""
    low, high = tokens & _WORD, (tokens >> 32) & _WORD
    one, other = key if isinstance(key, Tensor) else words_of(key)
    words = _mixed(torch.stack([low ^ one, low + other]))
    words = _mixed(torch.stack([words[0] + high, words[1] ^ high]))
    return _signed(_mixed(torch.stack([words[0] ^ other, words[1] + (one + _GOLDEN)])))


def _mixed(word: Tensor) -> Tensor:
    """A bijection of 32-bit words, kept in int64; in place."""
    word &= _WORD
    word ^= word >> 16
    word.mul_(_FIRST).bitwise_and_(_WORD)
    word ^= word >> 15
    word.mul_(_SECOND).bitwise_and_(_WORD)
    word ^= word >> 16
    return word


def _signed(word: Tensor) -> Tensor:
    """The low 32 bits as int32: the first half of each word, as all devices of torch store it."""
    return word.view(torch.int32)[..., ::2]


def _xor_shift(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits) of int32 words, in place; the shift brings zeros in."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))
