"""What this wing brings to the core: layers that see the tokens of other ranks."""

from __future__ import annotations

from meshlora.feature import Feature
from meshlora.wings.context.borders import install_context
from meshlora.wings.context.mixing import with_mixers
from meshlora_ground.topology import TOKENS


class Wing(Feature):
    axes = TOKENS
    with_mixers = staticmethod(with_mixers)
    borders = staticmethod(install_context)
