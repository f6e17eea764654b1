"""What the planner says of a step on one GPU, beside what was measured there.

    python benchmarks/planned_gpu.py

Owns: the measured steps, the comparison. Does not own: the models (`gpu_shapes`), the prices (`planner.hardware`).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_shapes import real_shapes

from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora_extra.planner.choose import choose
from meshlora_extra.planner.hardware import GPUS
from meshlora_extra.planner.problem import Problem
from meshlora_ground.console import Console
from meshlora_ground.topology import Topology

# ms of a step: 2026-11, torch 2.11, kernels: none, nothing recomputed (results/gpu_nvidia-*.md). The code had more
# operators then, of the mixture twice as many.
SEEN = {"h200": {"8b": 295, "1b": 260, "moe": 146}, "h100": {"8b": 309, "1b": 281}}


def main() -> None:
    """Print a line per card and model."""
    console = Console()
    shapes = {shape.name: shape for shape in real_shapes()}
    for card, name, seen in ((card, name, seen) for card, steps in SEEN.items() for name, seen in steps.items()):
        shape = shapes[name]
        problem = Problem(
            make_blueprint(shape.config, Topology(), BaseOptions(dtype="bfloat16")),
            shape.lora_config(),
            gpus=1,
            gpu=GPUS[card],
            seq=shape.seq_len,
            global_batch=shape.batch_size,
            micro_batch=shape.batch_size,
            recompute="none",
        )
        (planned,) = choose(problem, [Topology()]).ranked
        ratio = 1e3 * planned.time_s / seen
        console.say(f"{card}, {name}: {1e3 * planned.time_s:.0f} ms planned, {seen} seen: {ratio:.2f}")


if __name__ == "__main__":
    main()
