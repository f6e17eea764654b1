"""What this wing brings to the core: what an adapter trains of a vocabulary beside LoRA."""

from __future__ import annotations

from meshlora.feature import Feature
from meshlora.wings.vocabulary.chosen import as_tied, resolve_rows


class Wing(Feature):
    as_tied = staticmethod(as_tied)
    token_rows = staticmethod(resolve_rows)
