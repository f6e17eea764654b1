"""Several adapters that ranks train at once, each against transformers + peft, which train it by itself on one process.

Owns: adapters that are unlike in all that may be mixed up, both sides, and how far apart they end. Does not own: the
proof of one adapter (`verify.proof`), the preflight (`verify.preflight`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peft import LoraConfig

from meshlora.adapter.attach import draw_adapter
from meshlora.adapter.formats.peft_format import lora_config
from meshlora.config.run import DataConfig, ModelConfig, RunConfig, TrainConfig
from meshlora.data import TokenizedDataset
from meshlora.loading.blueprint import make_blueprint, read_model_config
from meshlora.loading.load import load_blueprint
from meshlora.oracle.case import Case
from meshlora.oracle.compare import Worst, compare_adapters
from meshlora.oracle.reference import train_run
from meshlora.plan.topology import Topology
from meshlora.train.prepare import Prepared
from meshlora.train.trainer import Trainer
from meshlora.train.watch.metrics import Reporter, StepMetrics
from meshlora.verify.faults.registry import applied
from meshlora.verify.pool import Pool
from meshlora.verify.sequences import as_records

# As of "what the optimizer changed" in a proof: AdamW divides by small moments. Rounding alone gives 1e-13.
LIMIT = 1e-6
_TOGETHER, _ALONE = "together", "alone"


@dataclass(frozen=True)
class OneOfSeveral:
    """One adapter: its LoRA options, its sequences, and how it is trained. Travels between processes."""

    lora: Mapping[str, Any]
    lengths: tuple[int, ...]
    train: TrainConfig


@dataclass(frozen=True)
class Base:
    """What all adapters have in common. model: as of a run. outputs: a folder for all of them.

    packing, recompute: as of a run. dropout: fields of the model's configuration that are not set to 0.
    """

    model: ModelConfig
    outputs: Path
    packing: bool = False
    recompute: str | int = "none"
    dropout: tuple[str, ...] = ()

    def config(self, own: OneOfSeveral, output: Path, topology: str) -> RunConfig:
        """The run of one adapter."""
        train = TrainConfig(**{**vars(own.train), "output": str(output), "recompute": self.recompute})
        data = DataConfig("unused", packing=self.packing, max_length=2 * max(own.lengths))  # two in a row, or three
        return RunConfig(self.model, data, train, lora={}, topology=topology)

    def data(self, own: OneOfSeveral) -> TokenizedDataset:
        """Records of random tokens."""
        config = read_model_config(self.model.path, trust_remote_code=self.model.trust_remote_code)
        vocab, objective = config.get_text_config().vocab_size, own.train.objective
        lengths = own.lengths * (1 if objective.per == "token" else 2)
        generator, number = np.random.Generator(np.random.PCG64(own.train.seed)), sum(lengths)
        tokens = generator.integers(0, vocab, number).astype(np.int32)
        offsets = np.cumsum([0, *lengths]).astype(np.int64)
        sequences = TokenizedDataset(tokens, np.ones(number, dtype=bool), offsets)
        return as_records(sequences, objective, vocab_size=vocab, seed=own.train.seed)


def one_of_several(number: int, lora: Mapping[str, Any], train: TrainConfig) -> OneOfSeveral:
    """An adapter with the loss and LoRA+ of `train`, and all else of its own, so that mixed-up adapters show.

    Both factors are drawn; of three adapters one has no limit of its norm, one a low and one a high one, and they end
    one after another. eps is of the size of the gradients: with the usual one AdamW forgets a gradient's scale, and
    with it a wrong count.
    """
    options = TrainConfig(
        output="unused",
        steps=2 + number % 2,
        batch_size=2 + number % 3,
        micro_batch_size=3,
        lr=1e-2 / (1 + number),
        max_grad_norm=(0.0, 0.02, 20.0)[number % 3],
        eps=1e-3,
        objective=train.objective,
        lora_plus_ratio=train.lora_plus_ratio,
        lora_plus_embedding_lr=train.lora_plus_embedding_lr,
        seed=number + 1,
        replica_check_every=0,
    )
    lengths = tuple(4 + (3 * number + 5 * place) % 9 for place in range(5))
    return OneOfSeveral({**lora, "init_lora_weights": False}, lengths, options)


def adapters_of(case: Case, number: int, *, head: str = "") -> dict[str, OneOfSeveral]:
    """`number` adapters as that of `case`, of other ranks, scales and dropouts. head: the module that has none."""
    options = {name: getattr(case, name) for name in ("objective", "lora_plus_ratio", "lora_plus_embedding_lr")}
    train, lora = TrainConfig(output="unused", steps=1, lr=case.lr, **options), LoraConfig(**case.lora)
    # The last one's dropout is below 1 too. There is none with DoRA, on parameters, and on the head.
    on_head = head.rpartition(".")[2] in (lora.target_modules or ())
    has_none = lora.use_dora or bool(lora.target_parameters) or on_head
    found, further = {}, 0.0 if has_none else min(0.1, (1 - lora.lora_dropout) / number)
    of_ours: dict[str, Any] = {"pieces": case.pieces} if case.pieces else {}
    of_ours |= {"share_experts": True} if case.share_experts else {}
    for n in range(number):
        own = {"r": lora.r + n, "lora_alpha": lora.lora_alpha + 3 * n, "lora_dropout": lora.lora_dropout + further * n}
        found[f"adapter-{n + 1}"] = one_of_several(n, case.lora | own | of_ours, train)
    return found


def compare_at_once(
    base: Base,
    adapters: Mapping[str, OneOfSeveral],
    topology: Topology,
    *,
    ranks: Pool,
    alone: Pool,
    mutation: str | None = None,
    timeout_s: float = 300.0,
) -> dict[str, Worst]:
    """Adapter -> what differs most between training at once on `ranks` and by itself in `alone`: a factor or a loss."""
    found = ranks.run(train_at_once, base, adapters, str(topology), mutation, timeout_s=timeout_s)[0]
    expected = alone.run(train_alone, base, adapters, timeout_s=timeout_s)[0]
    worst = {}
    for name in adapters:
        factors = compare_adapters(base.outputs / _TOGETHER / name / "adapter", base.outputs / _ALONE / name)
        losses = Worst("loss of a step", _largest_gap(found[name], expected[name]))
        worst[name] = max(factors, losses, key=lambda one: one.relative)
    return worst


def _largest_gap(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference; infinite where the numbers of steps differ, or a loss is no number."""
    if len(ours) != len(theirs) or not all(map(math.isfinite, ours)):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


class _Recorder(Reporter):
    """The loss of each step, instead of a file."""

    def __init__(self, own: OneOfSeveral) -> None:
        super().__init__(Path("unused"), steps=own.train.steps or 0, log_every=1, is_main=False)
        self.losses: list[float] = []

    def step(self, metrics: StepMetrics) -> None:
        """Record one step."""
        self.losses.append(metrics.loss)


def train_at_once(
    base: Base, adapters: Mapping[str, OneOfSeveral], topology: str, mutation: str | None = None
) -> dict[str, list[float]]:
    """Train all of `adapters` at once, on the calling ranks; returns the losses of each."""
    shape = Topology.parse(topology)
    with applied(mutation):
        blueprint = make_blueprint(base.model.path, shape, base.model)
        model, runs = load_blueprint(blueprint, device="cpu"), {}
        for name, own in adapters.items():
            config = base.config(own, base.outputs / _TOGETHER / name, topology)
            one = blueprint.with_adapter(lora_config(own.lora, "lora"))
            runs[name] = Prepared(config, one, 0, base.data(own), None, own.train.steps or 0)
            draw_adapter(model, name, one.trained, seed=own.train.seed)
        recorders = {name: _Recorder(own) for name, own in adapters.items()}
        Trainer(runs, model, recorders).train()
    return {name: recorder.losses for name, recorder in recorders.items()}


def train_alone(base: Base, adapters: Mapping[str, OneOfSeveral]) -> dict[str, list[float]]:
    """Train each of `adapters` by itself with transformers and peft, from where it began on the ranks."""
    losses = {}
    for name, own in adapters.items():
        begin, end = base.outputs / _TOGETHER / name / "initial", base.outputs / _ALONE / name
        steps = own.train.steps or 0
        config = base.config(own, end, "")
        options: dict[str, Any] = {"pad_token_id": 0, "adapter": begin, "out": end, "dropouts": base.dropout}
        losses[name] = train_run(config, base.data(own), steps=steps, **options)
    return losses
