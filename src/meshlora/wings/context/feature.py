"""What this wing brings to the core: layers that see the tokens of other ranks."""

from __future__ import annotations

from meshlora.feature import Feature
from meshlora.wings.context.borders import install_context


class _Context(Feature):
    axes = ("cp",)
    borders = staticmethod(install_context)


FEATURE = _Context()
