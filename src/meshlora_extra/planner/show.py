"""Output of the planner: tables for the terminal, JSON, and the run file of the best topology.

Owns: what is printed and written. Does not own: the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from meshlora_extra.planner.calibrate import Timing
from meshlora_extra.planner.choose import Choice, Prediction
from meshlora_extra.planner.communication import grouped
from meshlora_extra.planner.problem import Problem
from meshlora_extra.planner.simulate import Simulation
from meshlora_ground.topology import LAYERS, TOKENS

_GB = 1e9


def ranking(problem: Problem, choice: Choice) -> Table:
    """One row per topology, the best first: micro-batches, recomputation, memory, time, throughput, collectives."""
    gpu = problem.gpu
    base = f" in {problem.quantization}" if problem.quantization else ""
    title = (
        f"{problem.model.config.model_type}{base} on {problem.gpus:,} x {gpu.name}: {problem.global_batch:,} sequences "
        f"of {problem.seq:,} tokens a step"
    )
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # fits in 80 columns
    for name in ("topology", "batches", "re-\ncompute", "GB", "s\na step", "tokens/s\na GPU", "calls"):
        is_name = name == "topology"  # long ones are folded, in place of numbers cut short
        justify: Literal["left", "right"] = "left" if is_name or name == "re-\ncompute" else "right"
        table.add_column(name, justify=justify, no_wrap=not is_name, overflow="fold" if is_name else "ellipsis")
    for prediction in choice.ranked:
        calls = sum(grouped(prediction.messages, micro_batches=prediction.micro_batches).values())
        rows = f"{prediction.micro_batches} x {prediction.micro_batch}"
        memory = f"{prediction.memory_bytes / _GB:,.1f}"
        speed = f"{prediction.tokens_per_s(problem.global_batch, problem.seq):,.0f}"
        time_s = f"{prediction.time_s:,.2f}" if prediction.time_s < 1000 else f"{prediction.time_s:,.0f}"
        number = f"{calls:,}" if calls < 10_000 else f"{calls / 1000:,.0f}k"
        rest = (time_s, speed, number) if prediction.fits else ("-", "no room", "-")
        table.add_row(str(prediction.topology), rows, str(prediction.recompute), memory, *rest)
    return table


def breakdown(problem: Problem, prediction: Prediction) -> Table:
    """The memory, time and messages of a rank, in parts."""
    table = Table("", Column(justify="right"), title=f"{prediction.topology}: a rank, a step", show_header=False)
    for name, number in memory_parts(prediction).items():
        table.add_row(name, f"{number / _GB:,.2f} GB")
    table.add_row("together, at most", f"{prediction.memory_bytes / _GB:,.2f} GB")
    table.add_row("room on a GPU", f"{prediction.usable_bytes / _GB:,.2f} GB", end_section=True)
    for name, time_s in prediction.parts_s.items():
        shows = {
            "gathers of weights": prediction.topology.dp_shard,
            "waiting for other stages": prediction.topology.num_stages > 1,
        }
        if not shows.get(name, True):
            continue
        table.add_row(name, f"{time_s:,.3f} s")
    table.add_row("together", f"{prediction.time_s:,.3f} s", end_section=True)
    for link, traffic in prediction.traffic.items():
        words = {"node": "messages inside nodes", "network": "messages between nodes"}[link]
        table.add_row(words, f"{traffic.calls:,}, {traffic.wire_bytes / _GB:,.2f} GB sent")
    for name, calls in grouped(prediction.messages, micro_batches=prediction.micro_batches).items():
        words = {"layers": "layers", "ends": "embedding, head, loss", "buckets": "gradient buckets"}.get(name, name)
        table.add_row(f"messages of {words}" if name == "stages" else f"collectives of {words}", f"{calls:,}")
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
        "other working memory": max(0, peak.working - prediction.chunk_bytes - states.gradients),
    }


def why_best(choice: Choice) -> list[str]:
    """Why the best cuts tokens inside attention, and layers into stages: what the best topology that does not would
    cost. Of each empty if it does not, if there is no other, or if the best does not fit either.
    """
    best, found = choice.ranked[0], []
    for axes in (TOKENS, LAYERS):
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
    missing = other.memory_bytes - other.usable_bytes
    return (
        f"{other.topology}: does not fit by {missing / _GB:,.1f} GB, even with micro-batches of "
        f"{other.micro_batch} and recompute {other.recompute}"
    )


def _cost(best: Prediction, other: Prediction) -> str:
    """How much longer `other` takes, and in which parts."""
    more = {name: other.parts_s[name] - best.parts_s[name] for name in best.parts_s}
    worst = sorted((name for name in more if more[name] > 0.05 * (other.time_s - best.time_s)), key=more.get)  # type: ignore[arg-type]
    words = ", ".join(f"{_time(more[name])} more {name}" for name in reversed(worst)) or "about the same"
    return f"{other.time_s / best.time_s:.2f} x the time: {words}"


def why_not(choice: Choice) -> list[str]:
    """For each topology but the best, why it is worse."""
    best = choice.ranked[0]
    found = [f"{other.topology}: {_cost(best, other)}" if other.fits else _lack(other) for other in choice.ranked[1:]]
    by_reason: dict[str, list[str]] = {}
    for topology, why in choice.left_out:
        by_reason.setdefault(why, []).append(topology)
    return found + [f"{'; '.join(topologies)}: {why}" for why, topologies in by_reason.items()]


def _time(time_s: float) -> str:
    return f"{1000 * time_s:,.0f} ms" if time_s < 1 else f"{time_s:,.2f} s"


def assumptions(problem: Problem) -> str:
    """The assumptions behind the times."""
    gpu = problem.gpu
    if gpu.ranks:
        at_once = "" if gpu.ranks == problem.gpus else f" (planned for {problem.gpus:,})"
        return f"times follow from what was {gpu.source}{at_once}; nothing overlaps but gathers of weights (dp_shard)"
    tflops = gpu.half_tflops if problem.is_half else gpu.full_tflops
    return (
        f"times are estimates: {tflops:,.0f} TFLOP/s at {gpu.matmul_efficiency:.0%}, {gpu.memory_gb_s:,.0f} GB/s of "
        f"memory at {gpu.memory_efficiency:.0%}, {gpu.kernel_s * 1e6:g} us of the host for an operator, links of "
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
        "quantization": problem.quantization,
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
    for name in ("full_products", "half_products", "full_attention", "half_attention"):
        words = f"{'float32' if name.startswith('full') else 'bfloat16'} {name.partition('_')[2]}, TFLOP/s"
        for intensity, tflops in fields.get(name, ()):
            table.add_row(f"{words} at {intensity:,.0f} flops a byte", f"{tflops:,.3g}")
    table.add_row("operators between them, GB/s", f"{fields['memory_gb_s'] * fields['memory_efficiency']:,.3g}")
    if "half_memory_efficiency" in fields:
        share = fields["half_memory_efficiency"]
        table.add_row("in bfloat16", f"{fields['memory_gb_s'] * share:,.3g}")
    table.add_row("host, for each operator, us", f"{1e6 * fields.get('host_s', fields['kernel_s']):.1f}")
    for axis in dict.fromkeys(t.axis for t in timings if t.what == "message"):
        own = [timing for timing in timings if timing.axis == axis]
        most = max(timing.wire_bytes / timing.seconds for timing in own)
        least = min(timing.seconds for timing in own)
        table.add_row(
            f"collectives over {axis}={own[0].ranks}", f"{1e6 * least:,.0f} us and more, {most / _GB:,.2f} GB/s"
        )
    return table


def simulated(simulation: Simulation) -> Table:
    """Predicted and observed numbers, side by side."""
    predicted, seen = (Column(name, justify="right") for name in ("predicted", "seen"))
    table = Table("", predicted, seen, title=f"a step on {simulation.world:,} simulated ranks")
    for name, pair in simulation.fullest.bytes.items():
        table.add_row(f"{name}, GB", *(f"{number / _GB:,.3f}" for number in pair))
    both_calls = (simulation.fullest.predicted_calls, simulation.fullest.calls)
    for phase in ("forward", "loss", "backward", "step"):
        numbers = [sum(n for call, n in calls.items() if call.phase == phase) for calls in both_calls]
        table.add_row(f"collectives, {phase}", *(f"{number:,}" for number in numbers))
    totals = [sum(call.num_bytes * n for call, n in calls.items()) for calls in both_calls]
    table.add_row("bytes put into them", *(f"{number:,}" for number in totals))
    return table


def run_file(problem: Problem, prediction: Prediction, *, model: str, data: str, output: str) -> str:
    """The run of `prediction` as YAML for `meshlora check` and `meshlora train`."""
    lora = problem.lora
    targets = lora.target_modules
    values: dict[str, Any] = {
        "model": {"path": model, "dtype": str(problem.blueprint.dtype).removeprefix("torch.")},
        "lora": {
            "r": lora.r,
            "lora_alpha": lora.lora_alpha,
            "target_modules": sorted(targets) if isinstance(targets, set | list) else targets,
        },
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
    if lora.target_parameters:
        values["lora"]["target_parameters"] = list(lora.target_parameters)
    nodes = -(-problem.gpus // problem.gpu.gpus_per_node)
    each = min(problem.gpus, problem.gpu.gpus_per_node)
    head = [
        f"# meshlora plan: {problem.gpus} x {problem.gpu.name}, {prediction.memory_bytes / _GB:.1f} GB a rank, about "
        f"{prediction.time_s:.2f} s a step",
        f"# torchrun --nnodes {nodes} --nproc-per-node {each} -m meshlora train {{this file}}",
    ]
    return "\n".join(head) + "\n" + yaml.safe_dump(values, sort_keys=False)
