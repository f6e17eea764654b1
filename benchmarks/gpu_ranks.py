"""Steps of meshlora's own trainer on several GPUs: what each topology makes of the tokens/s of one.

    python benchmarks/gpu.py --topology tp=8 --topology dp=8 --topology dp=8,dp_shard --topology dp=8,ep=8
    torchrun --nnodes 2 --nproc-per-node 8 ... benchmarks/gpu_ranks.py --topology dp=2,tp=8 --shape 8b --out FILE

The first starts torchrun on this machine, for one process and then for each topology; the second is one topology on
several machines. Every run is `meshlora.run.trainer.Trainer` on random tokens and random weights, made on the device
of each rank and cut there, with NCCL between GPUs. Before anything is timed, loss and gradient norm of two steps with
two layers in float32 are compared with those of one process on the same sequences.

Owns: the body of a rank, and the comparison of topologies. Does not own: shapes (gpu_shapes.py), peers (gpu.py).
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from gpu_shapes import Shape, real_shapes, shallow, tiny
from meshlora.adapter.attach import runtime
from meshlora.loading import load as api
from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.run.config.run_file import DataConfig, ModelConfig, RunConfig, TrainConfig
from meshlora.run.prepared import Prepared
from meshlora.run.trainer import Trainer
from meshlora.run.watch.metrics import Reporter, StepMetrics
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.topology import Topology
from processes import be_quiet
from table import Findings, Parity, ParityError, Row, greater, turns_within

LIMIT = 1e-3  # relative, of loss and gradient norm, float32
WARM_UP, TIMED = 2, 3  # steps of a turn
PARITY_STEPS = 2


# --- a rank ---------------------------------------------------------------------------------------------------------


class Clock(Reporter):
    """Keeps the metrics of each step."""

    def __init__(self, steps: int) -> None:
        super().__init__(Path("unused"), steps=steps, log_every=1, is_main=False)
        self.metrics: list[StepMetrics] = []

    def step(self, metrics: StepMetrics) -> None:
        self.metrics.append(metrics)


def run_rank(shape: Shape, topology: Topology, *, dtype: str, device: str, steps: int, batch_size: int) -> Any:
    """(the trainer, the metrics of its steps) on this rank, after `steps` steps of `batch_size` sequences."""
    options = BaseOptions(dtype=dtype, attn_implementation="sdpa")
    base = make_blueprint(copy.deepcopy(shape.config), topology, options)
    blueprint = base.with_adapter(shape.lora_config())
    with tempfile.TemporaryDirectory() as folder:
        train = TrainConfig(
            output=f"{folder}/run",
            steps=steps,
            batch_size=batch_size,
            micro_batch_size=shape.batch_size,
            schedule="constant",
            lr=1e-4,
            replica_check_every=0,
            log_every=steps,
        )
        model = ModelConfig("unused", dtype=dtype)
        config = RunConfig(model, DataConfig("unused", max_length=shape.seq_len), train, lora={"r": 1})
        prepared = Prepared(config, blueprint, 0, random_tokens(shape, batch_size), None, steps)
        with mock.patch.object(api, "_random_weights", made_on_device):
            loaded = api.load_blueprint(blueprint, device=device)
        clock = Clock(steps)
        trainer = Trainer({"default": prepared}, loaded, {"default": clock})
        while len(clock.metrics) < steps:  # without its end, which saves
            for one, metrics in zip(trainer.adapters, trainer.train_step(trainer.adapters), strict=True):
                one.done += 1
                clock.step(metrics)
    return trainer, clock.metrics


def made_on_device(config: PretrainedConfig, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Random weights, the same on every rank, made on its GPU: eight ranks would fill the host's memory."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(seed)
    with device:
        return dict(AutoModelForCausalLM.from_config(config, dtype=dtype).state_dict())


def random_tokens(shape: Shape, number: int) -> TokenizedDataset:
    """Sequences of `seq_len` random tokens, all trained."""
    generator, total = np.random.Generator(np.random.PCG64(0)), number * shape.seq_len
    tokens = generator.integers(0, shape.config.vocab_size, total).astype(np.int32)
    offsets = np.arange(0, total + 1, shape.seq_len).astype(np.int64)
    return TokenizedDataset(tokens, np.ones(total, dtype=bool), offsets)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """What this rank finds: of the parity run loss and gradient norm, of the timed one seconds and memory."""
    topology = Topology.parse(options.topology)
    shape = next(shape for shape in real_shapes() if shape.name == options.shape)
    shape = tiny(shape) if options.tiny else shape
    how = {"device": options.device, "batch_size": options.batch_size}
    if options.parity:
        _, metrics = run_rank(shallow(shape), topology, dtype="float32", steps=PARITY_STEPS, **how)
        return {"loss": [m.loss for m in metrics], "grad_norm": [m.grad_norm for m in metrics]}
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    trainer, metrics = run_rank(shape, topology, dtype=dtype, steps=WARM_UP + TIMED, **how)
    device = runtime(trainer.model).mesh.device
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    seconds = [m.step_time_s for m in metrics[WARM_UP:]]
    return {"step_time_s": seconds, "tokens": options.batch_size * shape.seq_len, "peak_bytes": peak}


# --- all topologies of a machine ------------------------------------------------------------------------------------


def measure_topologies(options: argparse.Namespace) -> Findings:
    """Each topology against one process: parity, then turns."""
    rows: list[Row] = []
    details: dict[str, Any] = {}
    worst = 0.0
    for text in options.topology:
        topology = small(text) if options.tiny else Topology.parse(text)
        name = "moe" if topology.ep * topology.etp > 1 else next(iter(options.shape or ["8b"]))
        shape = next(shape for shape in real_shapes() if shape.name == name)
        copies = topology.dp
        with_all = {"shape": name, "batch_size": copies, "parity": True}
        one, all_ranks = (_torchrun(t, options, with_all) for t in (Topology(), topology))
        off = max(abs(a - b) / abs(b) for key in one for a, b in zip(all_ranks[key], one[key], strict=True))
        if not off <= LIMIT:
            raise ParityError(f"{topology}, {name}, float32, two layers, against one process", off, LIMIT)
        worst = max(worst, off)
        per_copy = tiny(shape).batch_size if options.tiny else shape.batch_size
        rates: dict[str, list[float]] = {"one": [], "all": []}
        found = []
        for _ in turns_within(2 if options.quick or options.tiny else options.turns, options):
            for which, t, number in (("one", Topology(), per_copy), ("all", topology, per_copy * copies)):
                result = _torchrun(t, options, {"shape": name, "batch_size": number, "parity": False})
                rates[which].append(result["tokens"] / float(np.median(result["step_time_s"])) / t.world)
                found.append({"topology": str(t), **result})
        what = f"{name}, {topology}, tokens/s a rank, {per_copy * copies} sequences a step"
        names = {"ours_name": str(topology), "peer_name": "one process", "unit": "tokens/s"}
        rows.append(greater(what, rates["all"], rates["one"], **names))
        details[str(topology)] = {"parity": off, "runs": found}
    said = "loss and gradient norm of two steps, two layers in float32, each topology against one process"
    return Findings(Parity(said, worst, LIMIT, agrees=True), rows, {"topologies": details})


def small(text: str) -> Topology:
    """A topology with axes of two ranks in place of more, for CPUs."""
    return Topology.parse(re.sub(r"=\d+", "=2", text))


def _torchrun(topology: Topology, options: argparse.Namespace, more: Mapping[str, Any]) -> dict[str, Any]:
    """What rank 0 of a run on this machine finds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        own = ["--topology", str(topology), "--shape", more["shape"], "--batch-size", str(more["batch_size"])]
        flags = [f"--{name}" for name, given in (("parity", more["parity"]), ("tiny", options.tiny)) if given]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command = [*launcher, str(topology.world), __file__, *own, *flags, "--device", options.device]
        done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{topology}: {' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    made.add_argument("--topology", required=True, help="as in dp=2,tp=8")
    made.add_argument("--shape", choices=[s.name for s in real_shapes()], default="8b")
    made.add_argument("--batch-size", type=int, default=1, help="sequences of a step, over all ranks")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--tiny", action="store_true", help="tiny sizes: only shows that it runs")
    made.add_argument("--parity", action="store_true", help="two layers in float32: loss and gradient norm")
    made.add_argument("--out", type=Path, help="rank 0 writes what it finds there; default: it prints it")
    options = made.parse_args()
    be_quiet()
    found = measured(options)
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return 0
    if options.out is None:
        print(json.dumps(found))
    else:
        options.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
