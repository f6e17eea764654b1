"""One process, sequences of unequal length: meshlora, which joins those of a micro-batch, against PEFT's padded rows.

    python benchmarks/padded_vs_peft.py [--turns N] [--quick] [--tiny] [--json FILE]

Four sequences of at most 512 tokens, half of the 4 x 512 places padding. meshlora gets them as its trainer makes them
of `data.packing: auto`, and as padded rows (`data.packing: false`). Loss and every LoRA gradient of the first step are
compared with PEFT's before anything is timed. A step is forward, loss, backward, fused AdamW; the systems take turns.
The interface is that of benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

import meshlora
from cores import dtypes_here, fewer
from dense_vs_peft import DTYPES, LIMIT_BFLOAT16
from meshlora.train.batch import Batch
from meshlora.train.collation import collate
from meshlora.train.losses import language_model_losses
from meshlora.train.packing import joined, with_positions
from meshlora.wings.packed_rows.by_sequence import keep_apart
from meshlora_ground.dataset import Sequence as TokenSequence
from processes import Group, be_quiet, open_groups
from table import Findings, Parity, ParityError, Row, faster, parser, run, turns_within
from tp_vs_peft import MODEL, RANK, TINY, TOLERANCE, Candidate, System, Turn, load, make_checkpoint

LENGTHS, TINY_LENGTHS = (512, 288, 160, 64), (16, 9, 5, 2)  # half of four rows each
LAYERS = 2
STEPS = 2  # timed ones a turn
TARGET_TIME = 1.5


def systems_of(dtype: str) -> tuple[System, System, System]:
    """(ours with joined rows, ours with padded rows, PEFT) beside a base of `dtype`."""
    kinds = {"meshlora, joined": "joined", "meshlora, padded": "padded", "PEFT, padded": "peft"}
    joined_rows, padded, reference = (System(f"{name}, {dtype}", kind, dtype=dtype) for name, kind in kinds.items())
    return joined_rows, padded, reference


# --- the systems: all of this runs in their processes ---------------------------------------------------------------


_held: dict[str, Any] = {}


def open_system(system: System, folder: Path, lengths: Sequence[int]) -> None:
    kind = "peft" if system.kind == "peft" else "meshlora"
    candidate = load(replace(system, kind=kind), folder)
    if system.kind == "joined":
        keep_apart(candidate.model)
    batch = batch_of(lengths, candidate.model.config.vocab_size, joins=system.kind == "joined")
    _held.update(candidate=candidate, batch=batch, gradients=_of_peft if kind == "peft" else _of_ours)


def batch_of(lengths: Sequence[int], vocab_size: int, *, joins: bool) -> Batch:
    """Random tokens, all trained, as meshlora's trainer makes a micro-batch of them; the same in every process."""
    generator = np.random.Generator(np.random.PCG64(0))
    sequences = [
        TokenSequence(generator.integers(0, vocab_size, length).astype(np.int32), np.ones(length, dtype=bool))
        for length in lengths
    ]
    if not joins:
        return collate(sequences, pad_token_id=0).to("cpu")
    row = collate([joined(sequences)], pad_token_id=0)
    return with_positions(row, [lengths], [range(len(lengths))]).to("cpu")


def _of_peft(candidate: Candidate, batch: Batch) -> float:
    """Leave the gradient of the mean loss on the factors; returns that loss. With the mask of a padding collator."""
    logits = candidate.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())
    loss.backward()
    return float(loss.detach())


def _of_ours(candidate: Candidate, batch: Batch) -> float:
    """The same, as the trainer does it."""
    (loss,) = language_model_losses(candidate.model, batch, [("default", batch)], label_smoothing=0.0)
    loss.backward()
    return float(loss.detach()) / meshlora.finish_gradients(candidate.model, num_tokens=batch.num_trained_tokens)


def first_gradients() -> tuple[float, dict[str, Tensor]]:
    """The loss and every LoRA gradient, before any optimizer step."""
    candidate: Candidate = _held["candidate"]
    loss = _held["gradients"](candidate, _held["batch"])
    return loss, {name: p.grad for name, p in candidate.factors().items() if p.grad is not None}


def time_steps(steps: int) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of each of `steps` steps, after one that warms the caches up again."""
    candidate: Candidate = _held["candidate"]
    times = []
    for _ in range(steps + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        candidate.optimizer.zero_grad(set_to_none=True)
        _held["gradients"](candidate, _held["batch"])
        candidate.optimizer.step()
        times.append((time.perf_counter() - started, time.process_time() - cpu_started))
    return times[1:]


# --- the run --------------------------------------------------------------------------------------------------------


def check_parity(groups: dict[str, Group]) -> dict[str, float]:
    """By dtype: float32, the worst relative difference of loss and gradients from PEFT; bfloat16, the most that one is
    further off PEFT's float32 one than PEFT's bfloat16 one is.

    Raises:
        ParityError: one is above its limit.
    """
    found = {name: group.call(first_gradients)[0] for name, group in groups.items()}
    exact_loss, exact = found[systems_of("float32")[-1].name]

    def off(system: System, name: str) -> float:
        return float((found[system.name][1][name] - exact[name]).norm() / exact[name].norm())

    worst = {}
    for dtype, limit in (("float32", TOLERANCE), ("bfloat16", LIMIT_BFLOAT16)):
        *ours, reference = systems_of(dtype)
        for system in (s for s in ours if s.name in found):
            loss, gradients = found[system.name]
            if gradients.keys() != exact.keys():
                raise RuntimeError("the factors are not the same")
            if dtype == "float32":
                differences = [abs(loss - exact_loss) / exact_loss, *(off(system, name) for name in exact)]
            else:
                differences = [off(system, name) / off(reference, name) for name in exact]
            worst[dtype] = max(worst.get(dtype, 0.0), *differences)
            if not worst[dtype] <= limit:
                raise ParityError(f"{system.name} against PEFT", worst[dtype], limit)
    return worst


def rows_of(times: dict[str, list[Turn]], what: str, *, is_asked: bool) -> list[Row]:
    """Ours with joined and with padded rows against PEFT."""
    rows = []
    for dtype in (dtype for dtype in DTYPES if systems_of(dtype)[-1].name in times):
        ours, padded, reference = systems_of(dtype)
        peer = [turn.median_ms for turn in times[reference.name]]
        for system, target in ((ours, TARGET_TIME if is_asked else None), (padded, None)):
            if system.name not in times:
                continue
            mine = [turn.median_ms for turn in times[system.name]]
            names = {"ours_name": system.name.removesuffix(f", {dtype}"), "peer_name": "PEFT, padded", "unit": "ms"}
            rows.append(faster(f"{dtype} base, {what}", mine, peer, target=target, **names))
    return rows


def measure(options: argparse.Namespace) -> Findings:
    """Parity, then times."""
    lengths, number = (TINY_LENGTHS if options.tiny else LENGTHS), (3 if options.quick else options.turns)
    sizes, dtypes = (TINY if options.tiny else {"num_hidden_layers": fewer(LAYERS)}), dtypes_here(DTYPES)
    kinds = ("joined", "peft") if options.quick else ("joined", "padded", "peft")
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name), **sizes)
        systems = [system for dtype in dtypes for system in systems_of(dtype) if system.kind in kinds]
        with open_groups(dict.fromkeys(systems, 1), Path(name), open_system, folder, lengths) as groups:
            worst = check_parity(groups)
            times: dict[str, list[Turn]] = {name: [] for name in groups}
            for _ in turns_within(number, options):
                for name, group in groups.items():
                    wall, cpu = zip(*group.call(time_steps, STEPS)[0], strict=True)
                    times[name].append(Turn(list(wall), list(cpu)))
    what = f"{len(lengths)} × {max(lengths)}, {1 - sum(lengths) / len(lengths) / max(lengths):.0%} of it padding"
    details = {
        "model": {**MODEL, **sizes, "lora_rank": RANK, "dtypes": dtypes},
        "lengths": lengths,
        "parity": worst,
        "times": {name: [vars(turn) for turn in found] for name, found in times.items()},
    }
    parity = Parity(
        "loss and every gradient of step 1, float32, against PEFT", worst["float32"], TOLERANCE, agrees=True
    )
    return Findings(parity, rows_of(times, what, is_asked=not options.tiny), details)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--turns", type=int, default=10, help=f"of each system, {STEPS} timed steps each")
    options = made.parse_args()
    be_quiet()
    return run("Sequences of unequal length on one process", options, measure, name="padded_vs_peft")


if __name__ == "__main__":
    sys.exit(main())
