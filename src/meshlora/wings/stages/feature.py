"""What this wing brings to the core."""

from __future__ import annotations

from meshlora.feature import Feature

FEATURE = Feature()
