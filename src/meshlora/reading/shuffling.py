"""Permutations that a seed and a key determine, on every machine and in every version of numpy."""

from __future__ import annotations

import numpy as np


def shuffled(number: int, *, seed: int, key: tuple[int, ...]) -> np.ndarray:
    """A permutation of `range(number)`: int64 `[number]`.

    numpy guarantees the raw streams of `PCG64` and `SeedSequence` but not `Generator.permutation`, so the order sorts
    raw 64-bit keys, with ties in index order.
    """
    keys = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)).random_raw(number)
    return np.argsort(keys, kind="stable").astype(np.int64)
