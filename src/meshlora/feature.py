"""What a wing brings to the core, and which wings there are.

Owns: the interface, and the list. Does not own: what a wing does: that is in its folder in `wings`, whose `feature.py`
has its `FEATURE`. The core imports no wing: it asks all of them, at the places that the methods below name. A wing that
has nothing to say at a place leaves its method out.

A wing is one folder and one line of `WINGS`; docs/adding/wing.md shows one.
"""

from __future__ import annotations

import functools
import importlib

# In the order in which they are asked.
WINGS = ("stages", "experts", "quantized", "kernels", "context", "packed_rows", "images", "generation")


class Feature:
    """What a wing brings: each method is called where its first line says, for every model."""


@functools.cache
def features() -> tuple[Feature, ...]:
    """Those of all wings."""
    return tuple(importlib.import_module(f"meshlora.wings.{name}.feature").FEATURE for name in WINGS)
