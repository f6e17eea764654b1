"""The preflight of a run file: of each adapter by itself and, of several, that together they train as each would alone.

Owns: that second proof, on the twin: all adapters at once on the run's topology against single runs of ours on one
process, factor by factor. Does not own: the proof of a single run against transformers + peft (`verify.preflight`),
which comes first: from the two follows that several at once train as PEFT would train each.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshlora.adapter.manage import add_adapter, runtime, set_adapter
from meshlora.adapter.peft_format import lora_config
from meshlora.api import load_without_proof
from meshlora.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from meshlora.console import Console
from meshlora.data import TokenizedDataset
from meshlora.errors import UnsupportedError
from meshlora.oracle.compare import Worst, compare_adapters
from meshlora.oracle.inputs import write_twin
from meshlora.plan.topology import Topology
from meshlora.proof_records import CACHE, proved_on, remember, usable_cache
from meshlora.train.launch import signals_end_what_was_started
from meshlora.train.many import ManyTrainer
from meshlora.train.metrics import Reporter, StepMetrics
from meshlora.train.prepare import Prepared
from meshlora.train.trainer import Trainer
from meshlora.verify.preflight import preflight, preflight_state, proof_of
from meshlora.verify.proof import Processes
from meshlora.verify.stand_in import StandIn, provable
from meshlora.versions import digest

# As of "what the optimizer changed" in a proof: AdamW divides by small moments. Rounding alone gives 1e-13.
LIMIT = 1e-6


@dataclass(frozen=True)
class OnTwin:
    """One adapter on the twin: its LoRA options, its sequences, and how it is trained. Travels between processes."""

    lora: Mapping[str, Any]
    lengths: tuple[int, ...]
    train: TrainConfig


@dataclass(frozen=True)
class Base:
    """What all adapters have in common. folder: of the twin and all outputs. The rest: as of the run."""

    folder: Path
    trust_remote_code: bool
    quantization: str | None
    attn_implementation: str | None


def preflight_runs(
    runs: Mapping[str, Prepared], *, skip: bool = False, console: Console | None = None, cache_dir: Path = CACHE
) -> None:
    """`preflight` of each run of a run file, and of several adapters together; arguments and errors as there."""
    console = console or Console()
    for run in runs.values() if not skip else list(runs.values())[:1]:
        preflight(run, skip=skip, console=console, cache_dir=cache_dir)
    if skip or "" in runs:
        return
    asked = _asked(runs, cache_dir)
    if proved_on(cache_dir, asked):
        return
    first = next(iter(runs.values()))
    topology, started = provable(first.topology), time.perf_counter()
    what = f"{len(runs)} adapters at once on {topology}"
    console.say(f"preflight: {what} against each by itself (once; seconds)")
    with signals_end_what_was_started(), usable_cache(cache_dir) as (_, why_not), console.busy("preflight"):
        with Processes() as processes:
            worst = compare_on_twin(runs, topology, processes)
        adapter, found = max(worst.items(), key=lambda item: item[1].relative)
        if not found.relative <= LIMIT:
            raise UnsupportedError(
                what,
                f"on the twin {adapter} does not train as it would by itself ({found.name}: {found.relative:.1e} off)",
                "train the adapters one by one",
            )
        seconds = time.perf_counter() - started
        why_not = why_not or remember(cache_dir, asked, {"worst": found.relative})
    lost = f"; not remembered, so the next run proves it again: {why_not}" if why_not else ""
    console.say(f"preflight: {what} proved in {seconds:.0f} s{lost}")


def runs_state(runs: Mapping[str, Prepared], *, cache_dir: Path = CACHE) -> str:
    """What `meshlora check` says of the preflight of a run file."""
    states = {name: preflight_state(run, cache_dir=cache_dir) for name, run in runs.items()}
    if "" in runs:
        return states[""]
    date = proved_on(cache_dir, _asked(runs, cache_dir))
    together = f"proved, {date}" if date else "train will prove it"
    return "\n".join([*(f"{name}: {state}" for name, state in states.items()), f"together: preflight: {together}"])


def _asked(runs: Mapping[str, Prepared], cache_dir: Path) -> dict[str, Any]:
    """What a record of the proof of all `runs` together must say."""
    keys = [proof_of(run, cache_dir)[1] for run in runs.values()]
    first = next(iter(runs.values()))
    return {
        "key": digest(["several adapters at once", *keys]),
        "model_type": first.plan.model_type,
        "topology": str(provable(first.topology)),
        "request": keys,
    }


def compare_on_twin(runs: Mapping[str, Prepared], topology: Topology, processes: Processes) -> dict[str, Worst]:
    """Adapter -> its factor that differs most between training together on `topology` and alone on one process."""
    first = next(iter(runs.values()))
    stand_in = StandIn(*runs.values())
    adapters = {name: _on_twin(run, number, stand_in.lora(run)) for number, (name, run) in enumerate(runs.items())}
    alone, ranks = processes.reference("cpu"), processes.ranks(topology.world, "cpu")
    alone.start()
    ranks.start()
    with tempfile.TemporaryDirectory(prefix="meshlora-") as temporary:
        folder = Path(temporary)
        options = first.config.model
        base = Base(folder, options.trust_remote_code, options.quantization, stand_in.attn_implementation)
        expected = alone.run(train_alone, base, stand_in.config, adapters)[0]
        found = ranks.run(train_at_once, base, adapters, str(topology))[0]
        worst = {}
        for name in adapters:
            factors = compare_adapters(*(folder / how / name / "adapter" for how in _HOW))
            numbers = Worst("loss, norm, rate or tokens of a step", _largest_gap(found[name], expected[name]))
            worst[name] = max(factors, numbers, key=lambda one: one.relative)
        return worst


_HOW = _TOGETHER, _ALONE = "together", "alone"
Numbers = list[tuple[float, ...]]  # of each step: loss, gradient norm, learning rate, trained tokens


def _largest_gap(ours: Numbers, alone: Numbers) -> float:
    """The largest relative difference; infinite where the numbers of steps differ."""
    if len(ours) != len(alone):
        return math.inf
    pairs = [pair for a, b in zip(ours, alone, strict=True) for pair in zip(a, b, strict=True)]
    return max(abs(a - b) / max(abs(b), 1e-300) for a, b in pairs)


class _Recorder(Reporter):
    """The numbers of each step, instead of a file."""

    def __init__(self, own: OnTwin) -> None:
        super().__init__(Path("unused"), steps=own.train.steps or 0, log_every=1, is_main=False)
        self.numbers: Numbers = []

    def step(self, metrics: StepMetrics) -> None:
        """Record one step."""
        self.numbers.append((metrics.loss, metrics.grad_norm, metrics.lr, metrics.tokens))


def _on_twin(run: Prepared, number: int, lora: Mapping[str, Any]) -> OnTwin:
    """The run's adapter with options of its own, whatever the run's are, so that mixed-up adapters show.

    Both factors are drawn, every other adapter is clipped, and they end one after another. eps is of the size of the
    gradients: with the usual one AdamW forgets a gradient's scale, and with it a wrong count.
    """
    options = TrainConfig(
        output="unused",
        steps=2 + number % 2,
        batch_size=2 + number % 3,
        micro_batch_size=3,
        lr=1e-2 / (1 + number),
        max_grad_norm=0.02 * (number % 2),
        eps=1e-3,
        label_smoothing=run.config.train.label_smoothing,
        lora_plus_ratio=run.config.train.lora_plus_ratio,
        lora_plus_embedding_lr=run.config.train.lora_plus_embedding_lr,
        seed=number,
        replica_check_every=0,
    )
    lengths = tuple(4 + (3 * number + 5 * place) % 9 for place in range(5))
    return OnTwin({**lora, "init_lora_weights": False}, lengths, options)


def train_alone(base: Base, config: Any, adapters: Mapping[str, OnTwin]) -> dict[str, Numbers]:
    """Make the twin of the configuration `config`, and train each of `adapters` by itself on it, on one process."""
    write_twin(config, base.folder / "twin", dtype=torch.float64, seed=0)
    recorders = {name: _Recorder(own) for name, own in adapters.items()}
    for name, own in adapters.items():
        model = _load(base, Topology())
        run = _prepared(model, base.folder / _ALONE / name, own, Topology())
        add_adapter(model, name, run.lora, seed=own.train.seed)
        set_adapter(model, name)
        Trainer(run, model, recorders[name]).train()
    return {name: recorder.numbers for name, recorder in recorders.items()}


def train_at_once(base: Base, adapters: Mapping[str, OnTwin], topology: str) -> dict[str, Numbers]:
    """Train all of `adapters` at once, on the calling ranks."""
    shape = Topology.parse(topology)
    model = _load(base, shape)
    runs = {}
    for name, own in adapters.items():
        runs[name] = _prepared(model, base.folder / _TOGETHER / name, own, shape)
        add_adapter(model, name, runs[name].lora, seed=own.train.seed)
    recorders = {name: _Recorder(own) for name, own in adapters.items()}
    ManyTrainer(runs, model, recorders).train()
    return {name: recorder.numbers for name, recorder in recorders.items()}


def _load(base: Base, topology: Topology) -> Any:
    return load_without_proof(
        base.folder / "twin",
        topology=topology,
        dtype="float64",
        device="cpu",
        attn_implementation=base.attn_implementation,
        trust_remote_code=base.trust_remote_code,
        disable_dropout=True,
        quantization=base.quantization,
    )


def _prepared(model: Any, output: Path, own: OnTwin, topology: Topology) -> Prepared:
    """The run of one adapter on the twin, on sequences of random tokens."""
    lora = lora_config(own.lora, "lora")
    train = TrainConfig(**{**vars(own.train), "output": str(output)})
    config = RunConfig(ModelConfig("unused"), DataConfig("unused"), train, lora={}, topology=str(topology))
    generator = np.random.Generator(np.random.PCG64(own.train.seed))
    number = sum(own.lengths)
    tokens = generator.integers(0, model.config.get_text_config().vocab_size, number).astype(np.int32)
    offsets = np.cumsum([0, *own.lengths]).astype(np.int64)
    data = TokenizedDataset(tokens, np.ones(number, dtype=bool), offsets)
    return Prepared(config, topology, runtime(model).plan, lora, {}, 0, 0, data, None, own.train.steps or 0)
