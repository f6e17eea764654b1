"""Eight adapters at once on one base against eight runs in turn, of one sequence of 64 tokens each a step.

    python benchmarks/many_adapters.py [--turns N] [--threads N] [--quick] [--tiny] [--json FILE]

First every loss and every LoRA gradient at once is compared with that of each adapter alone in transformers + peft
(fp32; the base plain, and of 4 bits, which is bitsandbytes' own on PEFT's side). Then steps are timed, those of
meshlora's own trainers (batch, forward, loss, backward, gradients, clipping, AdamW): all adapters at once, one after
another, and one after another in a plain PEFT loop; the three take turns, on each of `BASES`. A row says how fast all
at once would be if a step were the base's own products and nothing else. Last, whole runs:
`meshlora train` of a file with eight adapters against eight such commands, from the command to the adapter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from base_products import time_products
from cores import dtypes_here, fewer
from meshlora.adapter.attach import adapter_factors, add_adapter, runtime, set_adapters
from meshlora.layers.tokens import Share
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.run.config.run_file import DataConfig, ModelConfig, RunConfig, TrainConfig
from meshlora.run.prepared import Prepared
from meshlora.run.trained import TrainedAdapter
from meshlora.run.trainer import Trainer
from meshlora.run.watch.metrics import Reporter
from meshlora.train.batch import Batch
from meshlora.train.losses import language_model_losses
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.topology import Topology
from processes import be_quiet
from table import Findings, Parity, ParityError, faster, parser, run, seconds_left, turns_within

K, SEQ, RANK, TARGET = 8, 64, 16, 3.0
LIMIT = 1e-4  # fp32, relative
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
BASES = {
    "bfloat16 base": ("bfloat16", None),
    "nf4 base, bfloat16": ("bfloat16", "nf4"),
    "float32 base": ("float32", None),
}
NAMES = [f"adapter-{number}" for number in range(K)]
STEPS_OF_A_RUN = 50
SECONDS_OF_RUNS = 100  # what they take at the most; with less left of a budget they are left out
TOKENIZER = Path(__file__).parents[1] / "examples" / "tiny_base"
RECORDS = Path(__file__).parents[1] / "examples" / "docstrings" / "train.jsonl"


def lora_of(number: int) -> LoraConfig:
    """Factors are both drawn, or half of the gradients would be zero."""
    return LoraConfig(r=RANK, lora_alpha=8 + 4 * number, target_modules="all-linear", init_lora_weights=False)


def make_checkpoint(folder: Path, model: dict[str, Any]) -> None:
    """A random checkpoint with a tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**model), dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TOKENIZER / name).read_bytes())


def base_of(folder: Path, dtype: str, quantization: str | None) -> Blueprint:
    """The checkpoint alone, on one process."""
    return make_blueprint(folder, Topology(), BaseOptions(dtype=dtype, quantization=quantization))


def ours(base: Blueprint) -> Any:
    """The checkpoint with all adapters."""
    model = load_blueprint(base, device="cpu")
    for number, name in enumerate(NAMES):
        add_adapter(model, name, lora_of(number), seed=number)
    return model.train()


def peft_alone(folder: Path, dtype: str, quantization: str | None, number: int) -> Any:
    """The checkpoint with adapter `number` in PEFT."""
    options: dict[str, Any] = {}
    if quantization is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=quantization, bnb_4bit_compute_dtype=getattr(torch, dtype)
        )
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), device_map="cpu", **options)
    return get_peft_model(base, lora_of(number)).train()


def data_of(number: int, vocab: int) -> TokenizedDataset:
    """Sequences of 64 random tokens, all trained but the first."""
    generator = np.random.Generator(np.random.PCG64(number))
    tokens = generator.integers(0, vocab, 8 * SEQ).astype(np.int32)
    return TokenizedDataset(tokens, np.ones(8 * SEQ, dtype=bool), np.arange(0, 8 * SEQ + 1, SEQ).astype(np.int64))


# --- parity -----------------------------------------------------------------------------------------------------------


def check_parity(folder: Path, vocab: int, quantization: str | None) -> float:
    """The worst relative difference of a loss or a gradient at once from PEFT alone, fp32.

    Raises:
        ParityError: it is above `LIMIT`.
    """
    model = ours(base_of(folder, "float32", quantization))
    set_adapters(model, NAMES)
    rows = [torch.from_numpy(data_of(number, vocab)[0].input_ids).long() for number in range(K)]
    ids = torch.stack(rows)
    labels = torch.cat([ids[:, 1:], torch.full((K, 1), -100)], 1)
    with runtime(model).dropout.of([Share(name, torch.arange(SEQ)) for name in NAMES], NAMES):
        batch = Batch(ids, torch.ones_like(ids), labels, K * (SEQ - 1), torch.arange(K * SEQ).view(K, SEQ))
        own = [(name, batch.rows(number, number + 1)) for number, name in enumerate(NAMES)]
        losses = language_model_losses(model, batch, own, label_smoothing=0.0)
        torch.autograd.backward(losses)
    worst = 0.0
    for number, name in enumerate(NAMES):
        alone = peft_alone(folder, "float32", quantization, number)
        peers = {
            key.removeprefix("base_model.model.").replace(".default.weight", ""): parameter
            for key, parameter in alone.named_parameters()
            if parameter.requires_grad
        }
        factors = {factor.name: factor.parameter for factor in adapter_factors(model, name)}
        with torch.no_grad():
            for key, parameter in factors.items():
                peers[key].copy_(parameter)
        loss = summed_loss(alone, ids[number : number + 1], labels[number : number + 1])
        loss.backward()
        gaps = {"loss": abs(float(losses[number]) - float(loss)) / float(loss)}
        for key, peer in peers.items():
            found = factors[key].grad
            assert found is not None, key
            assert peer.grad is not None, key
            gaps[key] = float((found - peer.grad).norm() / peer.grad.norm())
        worst = max(worst, *gaps.values())
    if not worst <= LIMIT:
        raise ParityError("losses and gradients at once against PEFT alone", worst, LIMIT)
    return worst


def summed_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Of the plain loop."""
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


# --- steps ------------------------------------------------------------------------------------------------------------


class Ours:
    """meshlora's trainers of all adapters, at once or each by itself: the same objects."""

    def __init__(self, folder: Path, dtype: str, quantization: str | None, vocab: int) -> None:
        base = base_of(folder, dtype, quantization)
        self.model = ours(base)
        runs = {name: self._run(number, vocab, base) for number, name in enumerate(NAMES)}
        quiet = {name: Reporter(Path("unused"), steps=1, log_every=1, is_main=False) for name in NAMES}
        self.trainer = Trainer(runs, self.model, quiet)

    def _run(self, number: int, vocab: int, base: Blueprint) -> Prepared:
        train = TrainConfig("unused", steps=10_000, batch_size=1, micro_batch_size=K, replica_check_every=0)
        config = RunConfig(ModelConfig("unused"), DataConfig("unused"), replace(train, lr=1e-5, seed=number), lora={})
        data = data_of(number, vocab)
        return Prepared(config, base.with_adapter(lora_of(number)), 0, data, None, 10_000)

    def at_once(self, steps: int) -> float:
        """Seconds a step of all adapters."""
        return self._steps(self.trainer.adapters, steps)

    def _steps(self, adapters: list[TrainedAdapter], steps: int) -> float:
        self.trainer.train_step(adapters)  # which are trained has changed
        started = time.perf_counter()
        for _ in range(steps):
            self.trainer.train_step(adapters)
        return (time.perf_counter() - started) / steps

    def in_turn(self, steps: int) -> float:
        """Seconds for a step of each adapter, one after another."""
        return sum(self._steps([one], steps) for one in self.trainer.adapters)


class Peft:
    """A plain loop; one model for all, as the adapter's numbers make no difference to the time."""

    def __init__(self, folder: Path, dtype: str, quantization: str | None, vocab: int) -> None:
        self.model = peft_alone(folder, dtype, quantization, 0)
        self.dtype = getattr(torch, dtype)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0, fused=True)
        self.trained = trained
        ids = torch.from_numpy(data_of(0, vocab)[0].input_ids).long().unsqueeze(0)
        self.batch = ids, torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)

    def in_turn(self, steps: int) -> float:
        """Seconds for K steps."""
        self._one_step()
        started = time.perf_counter()
        for _ in range(steps * K):
            self._one_step()
        return (time.perf_counter() - started) / steps

    def _one_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = summed_loss(self.model, *self.batch) / (SEQ - 1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()


# --- whole runs -------------------------------------------------------------------------------------------------------


def time_runs(folder: Path, steps: int, dtype: str) -> tuple[float, float]:
    """Seconds of (one command with all adapters, a command for each), from its start to its end."""
    shared = {
        "model": {"path": str(folder), "dtype": dtype},
        "lora": {"r": RANK, "lora_alpha": 16, "target_modules": "all-linear"},
        "data": {
            "train": str(RECORDS),
            "max_length": SEQ,
            "cache_dir": str(folder / "cache"),
            "train_on": "everything",
        },
        "train": {"steps": steps, "batch_size": 1, "micro_batch_size": K, "log_every": steps},
        "device": "cpu",
    }
    with tempfile.TemporaryDirectory() as outputs:  # beside the checkpoint: in it they are refused
        many = {
            **shared,
            "train": {**shared["train"], "output": f"{outputs}/many"},
            "adapters": {name: {"train": {"seed": number}} for number, name in enumerate(NAMES)},
        }
        at_once = _time_command(folder, many)
        in_turn = 0.0
        for number, name in enumerate(NAMES):
            own = {**shared["train"], "output": f"{outputs}/{name}", "seed": number}
            in_turn += _time_command(folder, {**shared, "train": own})
    return at_once, in_turn


def _time_command(folder: Path, tree: dict[str, Any]) -> float:
    file = folder / "run.yaml"
    file.write_text(json.dumps(tree))
    command = [sys.executable, "-m", "meshlora", "train", str(file), "--no-preflight", "--set", "train.overwrite=true"]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - started


def measure(options: argparse.Namespace) -> Findings:
    """All of it, as the interface of benchmarks has it."""
    be_quiet()
    torch.set_num_threads(options.threads)
    model = MODEL | (TINY if options.tiny else {"num_hidden_layers": fewer(MODEL["num_hidden_layers"])})
    number, steps = (2, 1) if options.tiny else (5, 2) if options.quick else (options.turns, 3)
    dtypes = dtypes_here(["float32", "bfloat16"])
    # Without units for bfloat16 the packed base is multiplied in float32, as one would there.
    bases = BASES if "bfloat16" in dtypes else {"float32 base": ("float32", None), "nf4 base": ("float32", "nf4")}
    rows = []
    details: dict[str, Any] = {"model": model, "threads": options.threads, "seconds": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder, model)
        worst = max(check_parity(folder, model["vocab_size"], kind) for kind in (None, "nf4"))
        for place, (base, (dtype, quantization)) in enumerate(bases.items(), 1):
            how = folder, dtype, quantization, model["vocab_size"]
            own, alone = Ours(*how), Peft(*how)
            times: dict[str, list[float]] = {"at once": [], "in turn": [], "PEFT in turn": [], "products": []}
            for _ in turns_within(number, options, share=place / (len(bases) + 1)):
                times["at once"].append(own.at_once(steps))
                times["in turn"].append(own.in_turn(steps))
                times["PEFT in turn"].append(alone.in_turn(steps))
                if quantization is None:
                    times["products"].append(statistics.median(time_products(alone.model, K * SEQ, steps)))
            details["seconds"][base] = times
            what = f"{K} adapters, {SEQ} tokens each, a step, {base}"
            for other, other_name in (("in turn", "meshlora, in turn"), ("PEFT in turn", "PEFT, in turn")):
                rows.append(
                    faster(
                        what,
                        ours=times["at once"],
                        peer=times[other],
                        unit="s",
                        ours_name="at once",
                        peer_name=other_name,
                        target=TARGET if other == "in turn" else None,
                    )
                )
            if times["products"]:
                names = {"ours_name": "the base's products alone, at once", "peer_name": "meshlora, in turn"}
                rows.append(
                    faster(f"the most there is to win: {what}", times["products"], times["in turn"], unit="s", **names)
                )
        if not options.tiny and seconds_left(options) > SECONDS_OF_RUNS:
            # Their vocabulary is that of the records' tokenizer, whatever is measured above.
            steps = fewer(STEPS_OF_A_RUN)
            pairs = [time_runs(folder, steps, dtypes[-1]) for _ in range(1 if options.quick else 3)]
            details["seconds"]["whole runs"] = pairs
            rows.append(
                faster(
                    f"{K} runs of {steps} steps, from command to adapter",
                    ours=[at_once for at_once, _ in pairs],
                    peer=[in_turn for _, in_turn in pairs],
                    unit="s",
                    ours_name="one command",
                    peer_name=f"{K} commands in turn",
                    target=TARGET,
                )
            )
    said = "loss and every LoRA gradient of each adapter, at once, against PEFT alone, fp32"
    return Findings(Parity(said, worst, LIMIT, agrees=True), rows, details)


def main() -> int:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--turns", type=int, default=15, help="turns of a full run (default 15)")
    made.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    options = made.parse_args()
    return run("Eight adapters at once", options, measure, name="many_adapters")


if __name__ == "__main__":
    sys.exit(main())
