"""What this wing brings to the core: masks that know where sequences begin."""

from __future__ import annotations

from meshlora.feature import Feature
from meshlora.wings.packed_rows.row_masks import read_positions_in_masks


class Wing(Feature):
    finish_model = staticmethod(read_positions_in_masks)
