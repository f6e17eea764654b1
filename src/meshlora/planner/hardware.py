"""Hardware: peak numbers from datasheets, and the efficiencies reached.

Owns: the table of GPUs, files with measured numbers, the time of work and messages. Does not own: the amount of work
(`planner.trace`), the messages (`planner.communication`).

Datasheets give upper bounds. The numbers reached are these times an efficiency, a named field that can be measured and
replaced: `--hardware FILE.json` takes any field of `Hardware`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshlora.common.errors import UserError, did_you_mean
from meshlora.common.files import read_json
from meshlora.planner.fake import Work


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU and its interconnect. Bandwidths are per GPU and direction, in GB/s = 1e9 bytes per second.

    Attributes:
        memory_gb: as in datasheets, 1e9 bytes. usable_memory: share available to tensors; the rest is the context,
            kernels' buffers and fragmentation.
        half_tflops: dense bf16 and fp16. full_tflops: fp32 (not tf32).
        matmul_efficiency: share of these that matrix products reach. memory_gb_s: bandwidth of the GPU's memory.
            memory_efficiency: share of it that is reached.
        kernel_s: the least time between kernel launches, as eager code launches each from Python.
        gpus_per_node, node_gb_s: the GPUs joined by the fast link, and its bandwidth. network_gb_s: bandwidth between
            nodes. link_efficiency: share of either that collectives reach.
        overlap_efficiency: share of kernels' time that a gather of weights can overlap with.
        launch_s: alpha of any collective. node_hop_s, network_hop_s: added per doubling of its ranks.
        source: of the numbers.
    """

    name: str
    memory_gb: float
    half_tflops: float
    full_tflops: float
    memory_gb_s: float
    node_gb_s: float
    network_gb_s: float
    gpus_per_node: int = 8
    usable_memory: float = 0.92
    matmul_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    overlap_efficiency: float = 0.8
    kernel_s: float = 6e-6
    launch_s: float = 12e-6
    node_hop_s: float = 2e-6
    network_hop_s: float = 6e-6
    source: str = ""

    @property
    def usable_bytes(self) -> int:
        """Memory available to tensors."""
        return int(self.memory_gb * 1e9 * self.usable_memory)

    def work_s(self, work: Mapping[Work, float], *, is_half: bool) -> float:
        """Time of consecutive kernels, each bound by its flops, its bytes or its launch, whichever is slowest."""
        flops_s = 1e12 * self.matmul_efficiency * (self.half_tflops if is_half else self.full_tflops)
        bytes_s = 1e9 * self.memory_efficiency * self.memory_gb_s
        return sum(n * max(w.flops / flops_s, w.num_bytes / bytes_s, self.kernel_s) for w, n in work.items())

    def crosses_nodes(self, span: int) -> bool:
        """Whether `span` consecutive ranks, from the first of a node, are on several nodes."""
        return span > self.gpus_per_node

    def message_s(self, wire_bytes: float, *, ranks: int, is_network: bool) -> float:
        """Time of one collective in which each of `ranks` ranks sends `wire_bytes`, by the alpha-beta model."""
        hop_s, gb_s = (self.network_hop_s, self.network_gb_s) if is_network else (self.node_hop_s, self.node_gb_s)
        return self.launch_s + hop_s * math.log2(ranks) + wire_bytes / (1e9 * gb_s * self.link_efficiency)


# Datasheets sum both directions of NVLink and PCIe: half of it here. Networks: one NIC per GPU, as in the
# manufacturer's reference systems (DGX A100 200 Gb/s, DGX H100, H200 and B200 400 Gb/s; L40S servers 200 Gb/s per two).
GPUS = {
    gpu.name: gpu
    for gpu in (
        Hardware(
            "a100", 80, 312, 19.5, 2039, 300, 25, source="NVIDIA A100 80GB SXM datasheet (2021); DGX A100 datasheet"
        ),
        Hardware("h100", 80, 989, 67, 3350, 450, 50, source="NVIDIA H100 SXM5 datasheet (2023); DGX H100 datasheet"),
        Hardware("h200", 141, 989, 67, 4800, 450, 50, source="NVIDIA H200 SXM datasheet (2024); DGX H200 datasheet"),
        Hardware("b200", 180, 2250, 75, 7700, 900, 50, source="NVIDIA DGX B200 datasheet (2024), an eighth of it"),
        Hardware("l40s", 48, 362, 91.6, 864, 32, 12.5, source="NVIDIA L40S datasheet (2023), PCIe 4.0 x16"),
    )
}


def hardware_named(name: str, file: str | None = None) -> Hardware:
    """The GPU `name` of the table, with the fields of `file` replaced.

    Raises:
        UserError: a name that is not in the table, unless the file gives every number; a file that is not a JSON
            object, or has unknown keys, or values that are not positive numbers.
    """
    given = _read(file) if file is not None else {}
    gpu = GPUS.get(name.lower())
    if gpu is not None:
        return dataclasses.replace(gpu, **given)
    needed = {f.name for f in dataclasses.fields(Hardware) if f.default is dataclasses.MISSING} - {"name"}
    if file is None or needed - given.keys():
        missing = f"; or give {', '.join(sorted(needed - given.keys()))} in --hardware" if file is not None else ""
        raise UserError(f"--gpu {name}", "it is not in the table of GPUs", did_you_mean(name.lower(), GPUS) + missing)
    return Hardware(**{"name": name, **given})


def _read(file: str) -> dict[str, Any]:
    path = Path(file)
    if not path.is_file():
        raise UserError(f"--hardware {file}", "there is no such file")
    stored = read_json(path)
    if not isinstance(stored, dict):
        raise UserError(f"--hardware {file}", "it must be a JSON object with fields of the table of GPUs")
    known = {field.name: field.type for field in dataclasses.fields(Hardware)}
    found: dict[str, Any] = {}
    for key, value in stored.items():
        if key not in known:
            raise UserError(f"--hardware {file}: {key}", "unknown key", did_you_mean(key, known))
        is_text = key in ("name", "source")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        is_whole = isinstance(value, int) or key != "gpus_per_node"
        if not (isinstance(value, str) if is_text else is_number and is_whole):
            raise UserError(f"--hardware {file}: {key}={value!r}", "it must be " + _rule(key, is_text))
        if key.startswith(("usable_", "matmul_eff", "memory_eff", "link_eff", "overlap_eff")) and value > 1:
            raise UserError(f"--hardware {file}: {key}={value!r}", "it is a share, at most 1")
        found[key] = value
    return found


def _rule(key: str, is_text: bool) -> str:
    return "text" if is_text else "a whole number above 0" if key == "gpus_per_node" else "a number above 0"
