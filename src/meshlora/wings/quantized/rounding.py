"""Merged weights in few bits: which of them, the tensors that each becomes, and the error of rounding.

Owns: `fp8` as transformers' FineGrainedFP8Config stores it, `mxfp4` as gpt-oss does, and their `quantization_config`.
Does not own: the rounding itself (`wings.quantized.quantized`), writing (`meshlora_extra.merging.merge`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.model.stored import Stored
from meshlora.model.stream import Entry
from meshlora.plan.derive import plan_model
from meshlora.wings.quantized.kinds import FLOAT8_BLOCK, MX_BLOCK, with_quantization
from meshlora.wings.quantized.packed import Mxfp4
from meshlora.wings.quantized.quantized import Packed, pack, stacked
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.topology import Topology


@dataclass
class Rounding:
    """What is written in few bits.

    Attributes:
        kind: fp8 or mxfp4. keys: of the stored tensors that are. config: `quantization_config` of the merged model.
            left: keys of matrices that blocks do not divide. squares: sums over their weights of (error, weight)².
    """

    kind: str
    keys: frozenset[str]
    config: dict[str, Any]
    left: tuple[str, ...] = ()
    squares: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))

    def entries(self, entry: Entry) -> dict[str, Entry]:
        """Part -> the tensor to write for a plain one."""
        if entry.key not in self.keys:
            return {"": entry}
        if self.kind == "fp8":
            # A block at the edge may be smaller, and has a scale of its own.
            blocks = tuple(-(-size // FLOAT8_BLOCK) for size in entry.shape)
            codes = dataclasses.replace(entry, dtype="F8_E4M3")
            return {"codes": codes, "scales": Entry(f"{entry.key}_scale_inv", blocks, "F32")}
        experts, inputs, outputs = entry.shape
        groups = (experts, outputs, inputs // MX_BLOCK)
        return {
            "codes": Entry(f"{entry.key}_blocks", (*groups, MX_BLOCK // 2), "U8"),
            "scales": Entry(f"{entry.key}_scales", groups, "U8"),
        }

    def rounded(self, value: Tensor, part: str) -> Tensor:
        """The tensor of `part` of a merged weight; that of codes counts the error."""
        if self.kind == "fp8":
            packed = pack(value, "fp8")
            if part == "scales":
                return packed.scales
            self._count(packed, value)
            return packed.codes.view(torch.float8_e4m3fn)
        # gpt-oss holds the transpose. A matrix is rounded twice, for either part: neither is kept for the other.
        each = [pack(matrix.T, "mxfp4") for matrix in value]
        found = stacked(each)
        if part == "scales":
            return found.scales
        for one, matrix in zip(each, value, strict=True):
            self._count(one, matrix.T)
        return found.codes.unflatten(-1, (-1, MX_BLOCK // 2))

    def _count(self, packed: Packed, value: Tensor) -> None:
        wide = value.double()  # squares of millions of small errors, added up
        error = packed.to(value.device, torch.float32).whole().double() - wide
        self.squares += torch.stack([error.square().sum(), wide.square().sum()])

    @property
    def words(self) -> str:
        """The error, in words."""
        error, weight = self.squares.sqrt().tolist()
        found = f"{len(self.keys)} matrices in {self.kind}: {error / weight:.1e} of their norm is lost by rounding"
        if self.left:
            found += f"; {len(self.left)} stay plain, as blocks of {FLOAT8_BLOCK} do not divide them ({self.left[0]})"
        return found


def rounding_of(kind: str, model: Any, stored: Mapping[str, Stored], given: Mapping[str, Any]) -> Rounding:
    """The weights of `model` (meta device) that are written in `kind`.

    given: `quantization_config` of the checkpoint.

    Raises:
        UnsupportedError: it has no weight that can be.
    """
    if kind == "mxfp4":
        experts = set[str]()
        for one in stored.values():
            if any(t.packed is not None and isinstance(t.packed[0], Mxfp4) for t in one.tensors):
                experts |= {t.key for t in one.tensors}
        if not experts:
            rule = "only experts that are stored in mxfp4 are written in it"
            raise UnsupportedError("--quantize mxfp4", rule, "use --quantize fp8, or leave it out")
        return Rounding(kind, frozenset(experts), dict(given))
    plan = with_quantization(plan_model(model, Topology()), "fp8")
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    # Projections of experts are parameters themselves.
    names = (plan.quantized.keys() & plan.projections.keys()) | {
        f"{name}.weight" for name in plan.quantized.keys() - plan.projections.keys()
    }
    chosen = sorted(names & stored.keys())
    fused = sorted(name for name in plan.projections if name in stored and not stored[name].experts)
    if fused:
        rule = "its experts are one tensor, and fp8 stores them one by one"
        raise UnsupportedError(f"--quantize fp8 of {fused[0]}", rule, "leave out --quantize")
    own = {t.key for name in chosen for t in stored[name].tensors if _divides(t.shape)}
    if not own:
        raise UnsupportedError("--quantize fp8", f"blocks of {FLOAT8_BLOCK} divide no matrix", "leave out --quantize")
    left, undivided = (linears - names) & stored.keys(), []
    for name in chosen:
        for tensor in stored[name].tensors:
            if tensor.key not in own:
                left.add(name)
                undivided.append(tensor.key)
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FLOAT8_BLOCK, FLOAT8_BLOCK],
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in left),
    }
    return Rounding(kind, frozenset(own), config, tuple(undivided))


def _divides(shape: tuple[int, ...]) -> bool:
    """Whether transformers' loader, which divides a matrix into equal blocks, reads one of `shape`."""
    return len(shape) == 2 and math.prod(shape) > 0 and all(n % FLOAT8_BLOCK == 0 or n < FLOAT8_BLOCK for n in shape)
