"""Several adapters trained together, each compared with transformers + peft training it alone on one process.

The adapters differ in everything that could be mixed up. Does not own: the proof of one adapter (`verify.proof`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from peft import LoraConfig

from meshlora.adapter.attach import draw_adapter
from meshlora.adapter.formats.peft_format import lora_config
from meshlora.loading.blueprint import make_blueprint, read_model_config
from meshlora.loading.load import load_blueprint
from meshlora.run.config.run_file import DataConfig, RunConfig, TrainConfig
from meshlora.run.prepared import Prepared
from meshlora.run.trainer import Trainer
from meshlora.verify.alone import reference_run
from meshlora.verify.case import as_records
from meshlora.verify.faults.registry import applied
from meshlora.verify.ours import Recorder, run_config
from meshlora.verify.pool import Pool
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.topology import Topology
from meshlora_judge.case import Case
from meshlora_judge.compare import Worst, compare_adapters
from meshlora_judge.invoked import with_invocations
from meshlora_judge.trace import Trace

# That of the phase "deltas" of a proof: AdamW divides by small moments. Rounding alone gives 1e-13.
LIMIT = 1e-6


def one_of_several(like: RunConfig, number: int, lora: Mapping[str, Any], output: Path) -> RunConfig:
    """The run of one adapter: model, loss and LoRA+ as in `like`, all else unique, so that mixed-up adapters show.

    Both factors are random; max_grad_norm cycles through none, low and high; step counts differ. eps is as large as
    the gradients: with the usual one AdamW cancels their scale, and with it a wrong token count.
    """
    same = ("objective", "recompute", "neftune_alpha", "optimizer", "lora_plus_ratio", "lora_plus_embedding_lr")
    options = TrainConfig(
        output=str(output),
        steps=2 + number % 2,
        batch_size=2 + number % 3,
        micro_batch_size=3,
        lr=1e-2 / (1 + number),
        max_grad_norm=(0.0, 0.02, 20.0)[number % 3],
        eps=1e-3,
        seed=number + 1,
        replica_check_every=0,
        **{name: getattr(like.train, name) for name in same},
    )
    # Rows hold two or three sequences.
    data = DataConfig("unused", packing=like.data.packing, max_length=2 * max(_lengths(options)))
    lora = {**lora, "init_lora_weights": False}
    return RunConfig(like.model, data, options, lora=lora, topology=like.topology)


def _lengths(options: TrainConfig) -> list[int]:
    # Unlike each other, and from adapter to adapter.
    return [4 + (3 * (options.seed - 1) + 5 * place) % 9 for place in range(5)]


def _data(run: RunConfig) -> TokenizedDataset:
    """Random tokens as records of the objective."""
    config = read_model_config(run.model.path, trust_remote_code=run.model.trust_remote_code)
    vocab, objective, seed = config.get_text_config().vocab_size, run.train.objective, run.train.seed
    lengths = _lengths(run.train) * (1 if objective.per == "token" else 2)
    generator, number = np.random.Generator(np.random.PCG64(seed)), sum(lengths)
    tokens = generator.integers(0, vocab, number).astype(np.int32)
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    sequences = TokenizedDataset(tokens, np.ones(number, dtype=bool), offsets)
    sequences = with_invocations(sequences, (run.lora or {}).get("alora_invocation_tokens") or ())
    return as_records(sequences, objective, vocab_size=vocab, seed=seed)


def adapters_of(case: Case, topology: Topology, number: int, folder: Path, *, head: str = "") -> dict[str, RunConfig]:
    """Variants of the adapter of `case` with different ranks, scales and dropouts. head: the module without dropout."""
    like, lora = run_config(case, str(topology), folder), LoraConfig(**case.lora)
    like = dataclasses.replace(like, model=dataclasses.replace(like.model, dtype="float64"))
    # The last adapter's dropout is below 1 too. Parameters and the head allow none.
    on_head = head.rpartition(".")[2] in (lora.target_modules or ())
    has_none = bool(lora.target_parameters) or on_head
    found, further = {}, 0.0 if has_none else min(0.1, (1 - lora.lora_dropout) / number)
    of_ours: dict[str, Any] = {"pieces": case.pieces} if case.pieces else {}
    of_ours |= {"share_experts": True} if case.share_experts else {}
    for n in range(number):
        own = {"r": lora.r + n, "lora_alpha": lora.lora_alpha + 3 * n, "lora_dropout": lora.lora_dropout + further * n}
        name = f"adapter-{n + 1}"
        found[name] = one_of_several(like, n, case.lora | own | of_ours, folder / name)
    return found


def compare_at_once(
    runs: Mapping[str, RunConfig],
    *,
    dropouts: Collection[str],
    ranks: Pool,
    alone: Pool,
    mutation: str | None = None,
    timeout_s: float = 300.0,
) -> dict[str, Worst]:
    """Adapter -> the worst factor or loss, trained together on `ranks` against alone in `alone`.

    dropouts: fields of the model's configuration that keep their rates.
    """
    found = ranks.run(train_at_once, runs, mutation, timeout_s=timeout_s)[0]
    expected = alone.run(train_alone, runs, dropouts, timeout_s=timeout_s)[0]
    worst = {}
    for name, run in runs.items():
        factors = compare_adapters(Path(run.train.output) / "adapter", _alone(run))
        losses = Worst("loss of a step", _largest_gap(found[name], expected[name]))
        worst[name] = max(factors, losses, key=lambda one: one.relative)
    return worst


def _alone(run: RunConfig) -> Path:
    return Path(run.train.output) / "alone"


def _largest_gap(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference; infinite if step counts differ or a loss is not finite."""
    if len(ours) != len(theirs) or not all(map(math.isfinite, ours)):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def train_at_once(runs: Mapping[str, RunConfig], mutation: str | None) -> dict[str, list[float]]:
    """Train the adapters of all `runs` together on the calling ranks; returns the losses of each."""
    first = next(iter(runs.values()))
    with applied(mutation):
        blueprint = make_blueprint(first.model.path, Topology.parse(first.topology), first.model, first.train.objective)
        model, prepared = load_blueprint(blueprint, device="cpu"), {}
        for name, run in runs.items():
            assert run.lora is not None
            one = blueprint.with_adapter(lora_config(run.lora, "lora"))
            prepared[name] = Prepared(run, one, 0, _data(run), None, run.train.steps or 0)
            draw_adapter(model, name, one.trained, seed=run.train.seed)
        recorders = {name: Recorder(Trace(), run.train) for name, run in runs.items()}
        Trainer(prepared, model, recorders).train()
    return {name: recorder.trace.losses for name, recorder in recorders.items()}


def train_alone(runs: Mapping[str, RunConfig], dropouts: Collection[str]) -> dict[str, list[float]]:
    """Train each adapter alone with transformers + peft, from its initial state on the ranks."""
    losses = {}
    for name, run in runs.items():
        begin, steps = Path(run.train.output) / "initial", run.train.steps or 0
        options: dict[str, Any] = {"pad_token_id": 0, "adapter": begin, "out": _alone(run), "dropouts": dropouts}
        losses[name] = reference_run(run, _data(run), steps=steps, **options)
    return losses
