"""What this wing brings to the core: models and adapters by their names on the hub, and old files that lie there."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from meshlora.feature import Feature
from meshlora.model.stream import dtype_name
from meshlora_ground.hub import located
from meshlora_ground.pickled import OLD_WEIGHTS, unpickled


class Wing(Feature):
    def folder_of(self, given: str, kind: Literal["model", "adapter"], *, trust_remote_code: bool) -> str:
        return located(given, kind, kind=kind, trust_remote_code=trust_remote_code)

    def opened_adapter(self, file: Path) -> AbstractContextManager[Any] | None:
        old = file.with_name(OLD_WEIGHTS)
        if file.exists() or not old.exists():
            return None
        return contextlib.nullcontext(_Unpickled(unpickled(old)))


@dataclass(frozen=True)
class _Unpickled:
    """Tensors of a pickled file, opened as those of a safetensors file are."""

    tensors: Mapping[str, Tensor]

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_tensor(self, key: str) -> Tensor:
        return self.tensors[key]

    def get_slice(self, key: str) -> _Described:
        return _Described(self.tensors[key])


@dataclass(frozen=True)
class _Described:
    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return dtype_name(self.tensor.dtype) if self.tensor.is_floating_point() else str(self.tensor.dtype)
