"""Hardware: peak numbers from datasheets, the efficiencies reached, or what was measured in their place.

Owns: reading the table of GPUs (`gpus.yaml`) and files with measured numbers, the time of work and messages. Does not
own: the amount of work (`meshlora_extra.planner.trace`), the messages (`meshlora_extra.planner.communication`),
measuring (`meshlora_extra.planner.calibrate`).

Datasheets give upper bounds. The numbers reached are these times an efficiency, a named field that can be measured and
replaced: `--hardware FILE.json` takes any field of `Hardware`, and `meshlora calibrate` writes such a file.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshlora_extra.planner.fake import Work
from meshlora_ground.errors import UserError, did_you_mean
from meshlora_ground.files import read_json
from meshlora_ground.yaml_reading import parse_yaml

# (flops per byte, TFLOP/s), by the former: skinny products, as those of LoRA, reach less than square ones.
Rates = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU and its interconnect. Bandwidths are per GPU and direction, in GB/s = 1e9 bytes per second.

    Attributes:
        memory_gb: as in datasheets, 1e9 bytes. usable_memory: share available to tensors; the rest is the context,
            kernels' buffers and fragmentation. host_memory_gb: of a machine; 0: not known.
        half_tflops: dense bf16 and fp16. full_tflops: fp32 (not tf32).
        matmul_efficiency: share of these that matrix products reach. memory_gb_s: bandwidth of the GPU's memory.
            memory_efficiency: share of it that is reached.
        kernel_s: of the host for an operator: Python, autograd, the launch. It runs ahead of the GPU, so a step takes
            its time or the GPU's, whichever is longer.
        wait_s: of the GPU for its host in each step, besides: after the numbers of a step are read, the host begins the
            next one behind. Not on CPUs.
        gpus_per_node, node_gb_s: the GPUs joined by the fast link, and its bandwidth. network_gb_s: bandwidth between
            nodes. link_efficiency: share of either that collectives reach.
        overlap_efficiency: share of kernels' time that a gather of weights can overlap with.
        launch_s: alpha of any collective. node_hop_s, network_hop_s: added per doubling of its ranks.
        full_products, half_products, full_attention, half_attention: `Rates`, measured in place of TFLOP/s and
            efficiency; empty: as the products.
        float8_gain: how many times as fast as in bf16 a product in float8 is, with a scale for each row.
        half_memory_efficiency: of operators of two-byte models, where these are bound by arithmetic, as on CPUs; 0: as
            of all.
        host_s: of the host for each operator, where it waits for every kernel, as on CPUs; 0: it runs ahead.
        device: the type that was measured: cpu or cuda. ranks, nodes: that measured at once, and on so many machines;
            0: a datasheet's.
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
    host_memory_gb: float = 0.0
    matmul_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    overlap_efficiency: float = 0.8
    kernel_s: float = 50e-6
    wait_s: float = 22e-3
    launch_s: float = 12e-6
    node_hop_s: float = 2e-6
    network_hop_s: float = 6e-6
    full_products: Rates = ()
    half_products: Rates = ()
    full_attention: Rates = ()
    half_attention: Rates = ()
    float8_gain: float = 1.0
    half_memory_efficiency: float = 0.0
    host_s: float = 0.0
    device: str = "cuda"
    ranks: int = 0
    nodes: int = 0
    source: str = ""

    @property
    def usable_bytes(self) -> int:
        """Memory available to tensors."""
        return int(self.memory_gb * 1e9 * self.usable_memory)

    @property
    def waits_s(self) -> float:
        """`wait_s`; on CPUs 0."""
        return 0.0 if self.device == "cpu" else self.wait_s

    def work_s(self, work: Mapping[Work, float], *, is_half: bool) -> float:
        """Time of consecutive kernels: what keeps the device busy, or the launches of them, whichever takes longer."""
        return max(self.busy_s(work, is_half=is_half), self.launches_s(work))

    def launches_s(self, work: Mapping[Work, float]) -> float:
        """Of the host, which runs ahead of the kernels."""
        return self.kernel_s * sum(work.values())

    def busy_s(self, work: Mapping[Work, float], *, is_half: bool) -> float:
        """Time of kernels, each bound by its flops or its bytes, whichever is slower; and of the host for each, if that
        waits for them.
        """
        efficiency = self.memory_efficiency
        if is_half and self.half_memory_efficiency:
            efficiency = self.half_memory_efficiency
        bytes_s = 1e9 * efficiency * self.memory_gb_s
        total = 0.0
        for one, number in work.items():
            busy_s = one.num_bytes / bytes_s
            if one.flops:
                flops_s = one.flops / self._flops_s(one, is_half=is_half)
                if one.is_float8:
                    flops_s /= self.float8_gain
                if self._rates(one, is_half=is_half):
                    busy_s = flops_s  # a measured rate is that of the whole operator, its bytes included
                busy_s = max(flops_s, busy_s)
            total += number * (self.host_s + busy_s)
        return total

    def _rates(self, work: Work, *, is_half: bool) -> Rates:
        products, attention = self.full_products, self.full_attention
        if is_half:
            products, attention = self.half_products, self.half_attention
        if work.is_attention and attention:
            return attention
        return products

    def _flops_s(self, work: Work, *, is_half: bool) -> float:
        """Flops per second: measured, between the two nearest numbers of flops per byte, or the datasheet's."""
        if rates := self._rates(work, is_half=is_half):
            intensity, least = work.flops / work.num_bytes, rates[0][0]
            logs, tflops = [math.log(x) for x, _ in rates], [y for _, y in rates]  # interpolated over the logarithm
            # A product skinnier than any that was measured is bound by its bytes, as the skinniest is.
            share = min(1.0, intensity / least)
            if work.is_attention:
                share = 1.0
            return 1e12 * float(np.interp(math.log(intensity), logs, tflops)) * share
        peak, dtype = self.full_tflops, "float32"  # a datasheet's
        if is_half:
            peak, dtype = self.half_tflops, "bfloat16"
        if not peak:
            rule = "its products were not measured"
            raise UserError(f"{self.name}: {dtype}", rule, f"calibrate with --dtype {dtype}")
        return 1e12 * self.matmul_efficiency * peak

    def crosses_nodes(self, span: int) -> bool:
        """Whether `span` consecutive ranks, from the first of a node, are on several nodes."""
        return span > self.gpus_per_node  # ranks are numbered node by node

    def message_s(self, wire_bytes: float, *, ranks: int, is_network: bool) -> float:
        """Time of one collective in which each of `ranks` ranks sends `wire_bytes`, by the alpha-beta model."""
        hop_s, gb_s, what, where = self.node_hop_s, self.node_gb_s, "inside machines", "one"
        if is_network:
            hop_s, gb_s, what, where = self.network_hop_s, self.network_gb_s, "between machines", "several"
        if not gb_s:
            way_out = f"calibrate with ranks on {where}, or give --gpu too"
            raise UserError(f"{self.name}: messages {what}", "they were not measured", way_out)
        return self.launch_s + hop_s * math.log2(ranks) + wire_bytes / (1e9 * gb_s * self.link_efficiency)


def _table() -> dict[str, Hardware]:
    cards: dict[str, Any] = parse_yaml(Path(__file__).with_name("gpus.yaml").read_text(encoding="utf-8"))
    return {name: Hardware(name, **_hashable(fields)) for name, fields in cards.items()}


def _hashable(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with tuples for lists of rates, as a `Hardware` is hashed."""
    for name in _RATES:
        if name in fields:
            fields[name] = tuple((x, y) for x, y in fields[name])
    return fields


_RATES = ("full_products", "half_products", "full_attention", "half_attention")
GPUS = _table()
# Other spellings that people give, as `_plain` leaves them.
_ALSO = {"a10080": "a100", "a10080gb": "a100", "a10040gb": "a100-40", "rtxa6000": "a6000", "6000ada": "rtx6000-ada"}


def _plain(name: str) -> str:
    """`RTX 4090`, `rtx-4090` and `rtx4090` are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


# Between the parts of a card's name, as drivers write it: "NVIDIA A100-SXM4-40GB".
_BETWEEN = r"[ _-]*(?:sxm\d?|pcie)?[ _-]*"


def card_of(name: str) -> Hardware | None:
    """The GPU of the table that a driver calls `name`, such as "NVIDIA GeForce RTX 4090"; None if it is none of them.

    An L40 is no L4, and an L40S is neither: what follows the name must not go on with it.
    """
    if "laptop" in name.lower():  # the same name, less of all
        return None
    for short in sorted(GPUS, key=len, reverse=True):  # a100-40 before a100
        parts = re.findall(r"[a-z]+(?=\d)|\d+[a-z]*|[a-z]+", short)
        if re.search(_BETWEEN.join(parts) + r"(?:gb)?(?![0-9a-z])", name.lower()):
            return GPUS[short]
    return None


def cards_in_words() -> str:
    """All names of the table with their memory, the smallest first."""
    ordered = sorted(GPUS.values(), key=lambda gpu: (gpu.memory_gb, gpu.name))
    return ", ".join(f"{gpu.name} ({gpu.memory_gb:g} GB)" for gpu in ordered)


def hardware_named(name: str | None, file: str | None = None, *, option: str = "--gpu") -> Hardware:
    """The GPU `name` of the table, with the fields of `file` replaced; without a name, what `file` says alone.

    option: that gave the name, for messages.

    Raises:
        UserError: a name that is not in the table, unless the file gives every number; a file that is not a JSON
            object, or has unknown keys, or values that are not positive numbers.
    """
    given: dict[str, Any] = {}  # fields of the file
    if file is not None:
        given = _read(file)
    needed = {f.name for f in dataclasses.fields(Hardware) if f.default is dataclasses.MISSING} - {"name"}
    missing = needed - given.keys()
    if name is None:
        # Of a file alone 0 stands for a rate that was not measured: what needs it, says so.
        if lacks := sorted(missing - {"half_tflops", "full_tflops", "node_gb_s", "network_gb_s"}):
            way_out = "give --gpu, or a file that meshlora calibrate has written"
            raise UserError(f"--hardware {file}", f"it lacks {', '.join(lacks)}", way_out)
        return Hardware(**{"name": "measured", **dict.fromkeys(missing, 0.0), **given})
    asked = _plain(name)
    asked = _plain(_ALSO.get(asked, asked))
    for gpu in GPUS.values():
        if asked in (_plain(gpu.name), _plain(gpu.name).removeprefix("rtx")):  # a plain 4090 is an RTX 4090
            return dataclasses.replace(gpu, **given)
    if file is not None and not missing:
        return Hardware(**{"name": name, **given})
    way_out = f"or --hardware FILE with {', '.join(sorted(missing))}, which `meshlora calibrate` measures on the card"
    near = did_you_mean(name.lower(), GPUS)
    if near.startswith("did you mean"):
        way_out = f"{near} {way_out}"
    raise UserError(f"{option} {name}", f"it is not in the table of GPUs: {cards_in_words()}", way_out)


_SHARES = ("usable_", "matmul_eff", "memory_eff", "half_memory_eff", "link_eff", "overlap_eff")


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
        if rule := _broken_rule(key, value):
            shown = repr(value)
            if len(shown) >= 80:
                shown = "..."
            raise UserError(f"--hardware {file}: {key}={shown}", rule)
        found[key] = value
    return _hashable(found)


def _broken_rule(key: str, value: Any) -> str | None:
    """What `value` of `key` must be, if it is not."""
    if key in ("name", "source"):
        rule, is_kept = "it must be text", isinstance(value, str)
    elif key == "device":
        rule, is_kept = "it must be cpu or cuda", value in ("cpu", "cuda")
    elif key in _RATES:
        rule, is_kept = "it must be pairs [flops per byte, TFLOP/s] above 0, by the former", _are_rates(value)
    elif key in ("gpus_per_node", "ranks", "nodes"):
        rule, is_kept = "it must be a whole number above 0", isinstance(value, int) and _is_positive(value)
    elif _is_positive(value) and key.startswith(_SHARES):
        rule, is_kept = "it is a share, at most 1", value <= 1
    else:
        rule, is_kept = "it must be a number above 0", _is_positive(value)
    if is_kept:
        return None
    return rule


def _are_rates(value: Any) -> bool:
    if not value or not isinstance(value, list):
        return False
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or not (_is_positive(pair[0]) and _is_positive(pair[1])):
            return False
    return sorted(value) == value


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
