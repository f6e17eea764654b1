"""Output of the planner: tables for the terminal, JSON, and the run file of the best topology.

Owns: what is printed and written. Does not own: the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from meshlora_extra.planner.calibrate import Timing
from meshlora_extra.planner.choose import Choice, Prediction
from meshlora_extra.planner.communication import grouped
from meshlora_extra.planner.fake import Call
from meshlora_extra.planner.problem import Problem
from meshlora_extra.planner.simulate import Simulation
from meshlora_ground.topology import LAYERS, TOKENS

_GB = 1e9
# The keys of `communication.grouped` in words.
_PLACES = {
    "layers": "collectives of layers",
    "ends": "collectives of embedding, head, loss",
    "buckets": "collectives of gradient buckets",
    "scalars": "collectives of scalars",
    "stages": "messages of stages",
}


def ranking(problem: Problem, choice: Choice) -> Table:
    """One row per topology, the best first: micro-batches, recomputation, memory, time, throughput, collectives."""
    gpu = problem.gpu
    model = f"{problem.model.config.model_type} in {_dtype(problem)}"
    if problem.quantization:
        model += f" and {problem.quantization}"
    if problem.compute:
        model += f" with products in {problem.compute}"
    title = (
        f"{model} on {problem.gpus:,} x {gpu.name}: {problem.global_batch:,} sequences of {problem.seq:,} tokens a step"
    )
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # fits in 80 columns
    table.add_column("topology", overflow="fold")  # long ones are folded, in place of numbers cut short
    table.add_column("batches", justify="right", no_wrap=True)
    table.add_column("re-\ncompute", no_wrap=True)
    for name in ("GB", "s\na step", "tokens/s\na GPU", "calls"):
        table.add_column(name, justify="right", no_wrap=True)
    for prediction in choice.ranked:
        rows = f"{prediction.micro_batches} x {prediction.micro_batch}"
        memory = f"{prediction.memory_bytes / _GB:,.1f}"
        rest = _speed_of(problem, prediction)
        table.add_row(str(prediction.topology), rows, str(prediction.recompute), memory, *rest)
    return table


def first_of(choice: Choice, number: int) -> Choice:
    """The best `number` of a choice, without those that were left out: what fits on a screen."""
    return Choice(choice.ranked[:number], ())


def not_shown(choice: Choice, number: int) -> str:
    """What `first_of` leaves away, in a line; "" if that is nothing."""
    others, refused = len(choice.ranked) - number, len(choice.left_out)
    said = []
    if others > 0:
        said.append(f"{others} more {'topology' if others == 1 else 'topologies'}")
    if refused:
        said.append(f"{refused} {'topology' if refused == 1 else 'topologies'} that cannot be, with the reason")
    if not said:
        return ""
    return f"not shown: {', and '.join(said)}: --all"


def _dtype(problem: Problem) -> str:
    return str(problem.blueprint.dtype).removeprefix("torch.")


def _speed_of(problem: Problem, prediction: Prediction) -> tuple[str, str, str]:
    """Seconds, throughput and calls, as `ranking` shows them."""
    if not prediction.fits:
        return "-", "no room", "-"
    calls = sum(grouped(prediction.messages, micro_batches=prediction.micro_batches).values())
    time_s, number = f"{prediction.time_s:,.2f}", f"{calls:,}"
    if prediction.time_s >= 1000:
        time_s = f"{prediction.time_s:,.0f}"
    if calls >= 10_000:
        number = f"{calls / 1000:,.0f}k"
    return time_s, f"{prediction.tokens_per_s(problem.global_batch, problem.seq):,.0f}", number


def breakdown(problem: Problem, prediction: Prediction) -> Table:
    """The memory, time and messages of a rank, in parts."""
    table = Table("", Column(justify="right"), title=f"{prediction.topology}: a rank, a step", show_header=False)
    for name, number in memory_parts(prediction).items():
        table.add_row(name, f"{number / _GB:,.2f} GB")
    table.add_row("together, at most", f"{prediction.memory_bytes / _GB:,.2f} GB")
    table.add_row("room on a GPU", f"{prediction.usable_bytes / _GB:,.2f} GB", end_section=True)
    if prediction.host_bytes:
        words = f"{prediction.host_bytes / _GB:,.2f} GB"
        if prediction.host_room:
            words += f" of {prediction.host_room / _GB:,.0f}"
        table.add_row("inputs of layers on a machine", words, end_section=True)
    shows = {
        "gathers of weights": prediction.topology.dp_shard,
        "waiting for other stages": prediction.topology.num_stages > 1,
        "waiting for the host": problem.gpu.waits_s > 0,
    }
    for name, time_s in prediction.parts_s.items():
        if shows.get(name, True):
            table.add_row(name, f"{time_s:,.3f} s")
    table.add_row("together", f"{prediction.time_s:,.3f} s", end_section=True)
    for link, traffic in prediction.traffic.items():
        words = {"node": "messages inside nodes", "network": "messages between nodes"}[link]
        table.add_row(words, f"{traffic.calls:,}, {traffic.wire_bytes / _GB:,.2f} GB sent")
    for name, calls in grouped(prediction.messages, micro_batches=prediction.micro_batches).items():
        table.add_row(_PLACES[name], f"{calls:,}")
    return table


def memory_parts(prediction: Prediction) -> dict[str, int]:
    """Name -> bytes of a rank at the peak."""
    states, peak = prediction.states, prediction.peak
    return {
        "weights": states.weights,
        "buffers": states.buffers,
        "adapter": states.adapter,
        "moments": states.moments,
        "saved activations": peak.activations,
        "logits of a chunk": prediction.chunk_bytes,
        "gradients": states.gradients,
        # A chunk need not be part of the peak.
        "other working memory": max(0, peak.working - prediction.chunk_bytes - states.gradients),
    }


def why_best(choice: Choice) -> list[str]:
    """Why the best cuts tokens inside attention, and layers into stages: what the best topology that does not would
    cost. Of each empty if it does not, if there is no other, or if the best does not fit either.
    """
    best, found = choice.ranked[0], []
    for axes in (TOKENS, LAYERS):
        # Ranked: the first is the best of them.
        others = [other for other in choice.ranked if other.topology.size_over(axes) == 1]
        if not others or not best.fits or best.topology.size_over(axes) == 1:
            continue
        cut = ",".join(f"{axis}={best.topology.size_over({axis})}" for axis in sorted(axes))
        other = others[0]
        if other.fits:
            found.append(f"why {cut}: the best without it, {other.topology}, takes {_cost(best, other)}")
        else:
            found.append(f"why {cut}: without it nothing fits; {_lack(other)}")
    return found


def _lack(other: Prediction) -> str:
    missing = f"by {(other.memory_bytes - other.usable_bytes) / _GB:,.1f} GB"
    if other.memory_bytes <= other.usable_bytes:
        missing = f"({other.missing})"
    return (
        f"{other.topology}: does not fit {missing}, even with micro-batches of "
        f"{other.micro_batch} and recompute {other.recompute}"
    )


def _cost(best: Prediction, other: Prediction) -> str:
    """How much longer `other` takes, and in which parts."""
    longer = []
    for name, time_s in best.parts_s.items():
        more_s = other.parts_s[name] - time_s
        if more_s > 0.05 * (other.time_s - best.time_s):
            longer.append((more_s, name))
    longer.sort(key=lambda part: part[0])
    words = ", ".join(f"{_time(more_s)} more {name}" for more_s, name in reversed(longer)) or "about the same"
    return f"{other.time_s / best.time_s:.2f} x the time: {words}"


def why_not(choice: Choice) -> list[str]:
    """For each topology but the best, why it is worse."""
    (best, *others), found = choice.ranked, []
    for other in others:
        if other.fits:
            found.append(f"{other.topology}: {_cost(best, other)}")
        else:
            found.append(_lack(other))
    by_reason: dict[str, list[str]] = {}
    for topology, why in choice.left_out:
        by_reason.setdefault(why, []).append(topology)
    for why, topologies in by_reason.items():
        found.append(f"{'; '.join(topologies)}: {why}")  # one line for all that fail alike
    return found


def _time(time_s: float) -> str:
    if time_s < 1:
        return f"{1000 * time_s:,.0f} ms"
    return f"{time_s:,.2f} s"


def assumptions(problem: Problem) -> str:
    gpu = problem.gpu
    if gpu.ranks:
        source = gpu.source
        if gpu.ranks != problem.gpus:
            source += f" (planned for {problem.gpus:,})"
        return f"times follow from what was {source}; nothing overlaps but gathers of weights (dp_shard)"
    tflops, in_dtype = gpu.half_tflops, _dtype(problem)
    if not problem.is_half:
        tflops = gpu.full_tflops
        if problem.blueprint.options.dtype == "auto":  # nobody chose it, and it is rarely what is wanted
            in_dtype += f" (the checkpoint's; in bfloat16 {gpu.half_tflops:,.0f}: --dtype bfloat16)"
    return (
        f"times are estimates: {tflops:,.0f} TFLOP/s in {in_dtype} at "
        f"{gpu.matmul_efficiency:.0%}, {gpu.memory_gb_s:,.0f} GB/s of "
        f"memory at {gpu.memory_efficiency:.0%}, {gpu.kernel_s * 1e6:g} us of the host for an operator and "
        f"{gpu.waits_s * 1e3:g} ms more of it in a step, links of "
        f"{gpu.node_gb_s:g} GB/s in nodes of {gpu.gpus_per_node} and {gpu.network_gb_s:g} GB/s between them at "
        f"{gpu.link_efficiency:.0%}, nothing overlaps but gathers of weights (dp_shard), beside "
        f"{gpu.overlap_efficiency:.0%} of the kernels of the layer before ({gpu.source or 'given'}); "
        "--hardware FILE.json replaces any"
    )


def as_json(problem: Problem, choice: Choice) -> dict[str, Any]:
    """The choice as JSON values, in bytes and seconds."""
    return {
        "model_type": problem.model.config.model_type,
        "gpus": problem.gpus,
        "gpu": problem.gpu.name,
        "seq": problem.seq,
        "global_batch": problem.global_batch,
        "dtype": _dtype(problem),
        "quantization": problem.quantization,
        "compute": problem.compute,
        "topologies": [_prediction_json(problem, prediction) for prediction in choice.ranked],
        "left_out": [{"topology": topology, "why": why} for topology, why in choice.left_out],
        "why": why_best(choice),
        "why_not": why_not(choice),
    }


def _prediction_json(problem: Problem, prediction: Prediction) -> dict[str, Any]:
    return {
        "topology": str(prediction.topology),
        "micro_batch_size": prediction.micro_batch,
        "micro_batches": prediction.micro_batches,
        "recompute": prediction.recompute,
        "fits": prediction.fits,
        "memory_bytes": prediction.memory_bytes,
        "memory": memory_parts(prediction),
        "host_bytes": prediction.host_bytes,
        "time_s": prediction.time_s,
        "times_s": prediction.parts_s,
        "tokens_per_s_per_gpu": prediction.tokens_per_s(problem.global_batch, problem.seq),
        "collectives": grouped(prediction.messages, micro_batches=prediction.micro_batches),
        "links": {
            link: {"calls": traffic.calls, "bytes_sent": traffic.wire_bytes, "time_s": traffic.time_s}
            for link, traffic in prediction.traffic.items()
        },
    }


def calibrated(fields: Mapping[str, Any], timings: Sequence[Timing]) -> Table:
    """What was measured: rates by flops per byte, bandwidth, the host, and each axis by itself."""
    table = Table("", Column(justify="right"), title=fields["source"], show_header=False)
    for kind in ("products", "attention"):
        for size, dtype in (("full", "float32"), ("half", "bfloat16")):
            for intensity, tflops in fields.get(f"{size}_{kind}", ()):
                table.add_row(f"{dtype} {kind}, TFLOP/s at {intensity:,.0f} flops a byte", f"{tflops:,.3g}")
    table.add_row("operators between them, GB/s", f"{fields['memory_gb_s'] * fields['memory_efficiency']:,.3g}")
    if "half_memory_efficiency" in fields:
        share = fields["half_memory_efficiency"]
        table.add_row("in bfloat16", f"{fields['memory_gb_s'] * share:,.3g}")
    table.add_row("host, for each operator, us", f"{1e6 * fields.get('host_s', fields['kernel_s']):.1f}")
    by_axis: dict[str, list[Timing]] = {}
    for timing in timings:
        if timing.what == "message":
            by_axis.setdefault(timing.axis, []).append(timing)
    for axis, own in by_axis.items():
        most = max(timing.wire_bytes / timing.seconds for timing in own)
        least = min(timing.seconds for timing in own)
        table.add_row(
            f"collectives over {axis}={own[0].ranks}", f"{1e6 * least:,.0f} us and more, {most / _GB:,.2f} GB/s"
        )
    return table


def simulated(simulation: Simulation) -> Table:
    """Predicted and observed numbers, side by side."""
    rank = simulation.fullest
    table = Table("", title=f"a step on {simulation.world:,} simulated ranks")
    for name in ("predicted", "seen"):
        table.add_column(name, justify="right")
    for name, (predicted, seen) in rank.bytes.items():
        if name == "host" and not predicted + seen:
            continue
        table.add_row(f"{name}, GB", f"{predicted / _GB:,.3f}", f"{seen / _GB:,.3f}")
    for phase in ("forward", "loss", "backward", "step"):
        table.add_row(f"collectives, {phase}", _of_phase(rank.predicted_calls, phase), _of_phase(rank.calls, phase))
    table.add_row("bytes put into them", _bytes_of(rank.predicted_calls), _bytes_of(rank.calls))
    return table


def _of_phase(calls: Mapping[Call, int], phase: str) -> str:
    return f"{sum(number for call, number in calls.items() if call.phase == phase):,}"


def _bytes_of(calls: Mapping[Call, int]) -> str:
    return f"{sum(call.num_bytes * number for call, number in calls.items()):,}"


def run_file(problem: Problem, prediction: Prediction, *, model: str, data: str, output: str) -> str:
    """The run of `prediction` as YAML for `meshlora check` and `meshlora train`."""
    lora = problem.lora
    targets = lora.target_modules
    if isinstance(targets, set | list):
        targets = sorted(targets)
    values: dict[str, Any] = {  # in the order of docs/run-file.md
        "model": {"path": model, "dtype": _dtype(problem)},
        "lora": {"r": lora.r, "lora_alpha": lora.lora_alpha, "target_modules": targets},
        "data": {"train": data, "max_length": problem.seq},
        "train": {
            "output": output,
            "epochs": 1,
            "batch_size": problem.global_batch,
            "micro_batch_size": prediction.micro_batch,
            "recompute": prediction.recompute,
        },
        "topology": str(prediction.topology),
    }
    if problem.quantization is not None:
        values["model"]["quantization"] = problem.quantization
    if problem.compute is not None:
        values["model"]["compute"] = problem.compute
    if lora.target_parameters:
        values["lora"]["target_parameters"] = list(lora.target_parameters)
    nodes = -(-problem.gpus // problem.gpu.gpus_per_node)  # rounded up
    each = min(problem.gpus, problem.gpu.gpus_per_node)
    head = [
        f"# meshlora plan: {problem.gpus} x {problem.gpu.name}, {prediction.memory_bytes / _GB:.1f} GB a rank, about "
        f"{prediction.time_s:.2f} s a step",
        f"# torchrun --nnodes {nodes} --nproc-per-node {each} -m meshlora train {{this file}}",
    ]
    return "\n".join(head) + "\n" + yaml.safe_dump(values, sort_keys=False)
