"""Does it fit on one card, and what must be given up: ways to train the same model, each cheaper than the one before.

Owns: the ladder of ways and its output. Does not own: what a way needs (`meshlora_extra.planner.choose`), the cards
(`meshlora_extra.planner.hardware`).

The order is that of what is lost. Smaller micro-batches and recomputation cost time, and no number of the adapter but
its rounding; a base in few bits is another base; shorter rows are other data. Each way keeps what was given up before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from meshlora.run.config.run_file import TrainConfig
from meshlora_extra.planner.choose import Prediction, choose
from meshlora_extra.planner.problem import Problem, Recompute
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology

# As a run file has them if it says nothing.
SEQ, BATCH, MICRO_BATCH = 1024, TrainConfig.batch_size, TrainConfig.micro_batch_size
_SHORTEST = 256  # tokens: below it little of a conversation is left
_MOST_CARDS = 64


@dataclass(frozen=True)
class Way:
    """How to train: `words` says what it gives up, the rest are keys of a run file."""

    words: str
    dtype: str
    quantization: str | None
    micro_batch: int
    recompute: Recompute
    seq: int

    def settings(self) -> list[str]:
        """The keys of a run file, as `--set` takes them."""
        given = [
            f"model.dtype={self.dtype}",
            f"data.max_length={self.seq}",
            f"train.micro_batch_size={self.micro_batch}",
            f"train.recompute={self.recompute}",
        ]
        if self.quantization is not None:
            given.append(f"model.quantization={self.quantization}")
        return given


@dataclass(frozen=True)
class Rung:
    """A way and what it needs; `refused` says why it cannot be, and then there is no prediction."""

    way: Way
    problem: Problem | None
    prediction: Prediction | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        return self.prediction is not None and self.prediction.fits


def ways(dtype: str, quantization: str | None, seq: int, micro_batch: int) -> Iterator[Way]:
    """The ladder, from what was asked to what gives up most."""
    way = Way("as it is", dtype, quantization, micro_batch, "none", seq)
    yield way
    if dtype not in ("bfloat16", "float16"):
        way = dataclasses.replace(way, words="bfloat16", dtype="bfloat16")
        yield way
    if micro_batch > 1:
        way = dataclasses.replace(way, words="one row at a time", micro_batch=1)
        yield way
    way = dataclasses.replace(way, words="all layers recomputed", recompute="full")
    yield way
    if quantization is None:
        for kind, bits in (("int8", 8), ("nf4", 4)):
            way = dataclasses.replace(way, words=f"the base in {bits} bits", quantization=kind)
            yield way
    while way.seq // 2 >= _SHORTEST:
        way = dataclasses.replace(way, words=f"rows of {way.seq // 2:,} tokens", seq=way.seq // 2)
        yield way


def climb(ladder: Iterator[Way], problem_of: Callable[[Way], Problem]) -> list[Rung]:
    """The rungs up to the first that fits. problem_of: the problem of a way, on one card.

    Raises:
        UserError: of the first way, which is what the user asked for.
    """
    found: list[Rung] = []
    for way in ladder:
        if found and way.seq < found[-1].way.seq and not _has_room_for_states(found[-1]):
            break  # shorter rows take nothing from weights, adapter and moments
        try:
            problem = problem_of(way)
            found.append(Rung(way, problem, choose(problem, [Topology()]).ranked[0]))
        except UserError as error:
            if not found:
                raise
            found.append(Rung(way, None, None, error.rule))
        if found[-1].fits:
            faster = _fastest(found[-1])
            if faster.way != way:
                found.append(faster)
            break
    return found


def _fastest(rung: Rung) -> Rung:
    """`rung` with the micro-batches and the recomputation that its room allows: they cost nothing but time."""
    assert rung.problem is not None
    problem = dataclasses.replace(rung.problem, micro_batch=None, recompute=None)
    best = choose(problem, [Topology()]).ranked[0]
    words = "nothing more: the fastest that fits"
    way = dataclasses.replace(rung.way, words=words, micro_batch=best.micro_batch, recompute=best.recompute)
    if (way.micro_batch, way.recompute) == (rung.way.micro_batch, rung.way.recompute):
        return rung
    return Rung(way, problem, best)


def _has_room_for_states(rung: Rung) -> bool:
    if rung.prediction is None:
        return True
    return rung.prediction.states.kept <= rung.prediction.usable_bytes


def cards_needed(problem: Problem) -> Prediction | None:
    """The fastest way on the smallest number of such cards, powers of two, that has room; None: no such number.

    problem: on one card, with its rows as asked. Looked at: the base sharded over dp, cut over tp, or in stages.
    """
    number = 2
    while number <= _MOST_CARDS:
        texts = [f"dp={number},dp_shard", f"pp={number}"]
        if number <= problem.gpu.gpus_per_node:
            texts.append(f"tp={number},sp")
        batch = max(problem.global_batch, number)
        on_more = dataclasses.replace(problem, gpus=number, global_batch=batch, micro_batch=None, recompute=None)
        try:
            best = choose(on_more, list(map(Topology.parse, texts))).ranked[0]
        except UserError:  # none of these can be
            return None
        if best.fits:
            return best
        number *= 2
    return None


def table(rungs: list[Rung]) -> Table:
    """A row for each rung: what it gives up, its predicted memory and speed, whether it fits."""
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    shown.add_column("given up, with all above")
    for name in ("GB", "tokens/s"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("", overflow="fold")
    for rung in rungs:
        shown.add_row(rung.way.words, *_cells(rung))
    return shown


def _cells(rung: Rung) -> tuple[str, str, str]:
    if rung.problem is None or rung.prediction is None:
        return "-", "-", f"cannot be: {rung.refused}"
    prediction = rung.prediction
    needed = f"{prediction.memory_bytes / 1e9:,.1f}"
    speed = f"{prediction.tokens_per_s(rung.problem.global_batch, rung.problem.seq):,.0f}"
    if prediction.fits:
        return needed, speed, "fits"
    return needed, speed, f"{(prediction.memory_bytes - prediction.usable_bytes) / 1e9:,.1f} GB too much"


def as_json(rungs: list[Rung]) -> list[dict[str, Any]]:
    """The rungs as JSON values, in bytes and tokens per second."""
    found = []
    for rung in rungs:
        values: dict[str, Any] = {**dataclasses.asdict(rung.way), "fits": rung.fits, "refused": rung.refused}
        if rung.problem is not None and rung.prediction is not None:
            values["memory_bytes"] = rung.prediction.memory_bytes
            values["tokens_per_s"] = rung.prediction.tokens_per_s(rung.problem.global_batch, rung.problem.seq)
        found.append(values)
    return found
