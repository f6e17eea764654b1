"""What this wing brings to the core: models and adapters by their names on the hub."""

from __future__ import annotations

from typing import Literal

from meshlora.feature import Feature
from meshlora_ground.hub import located


class _Hub(Feature):
    def folder_of(self, given: str, kind: Literal["model", "adapter"], *, trust_remote_code: bool) -> str:
        return located(given, kind, kind=kind, trust_remote_code=trust_remote_code)


FEATURE = _Hub()
