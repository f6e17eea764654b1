"""A proof: one reference run, our runs on each topology, and a verdict on each.

Owns: the cache of reference runs, too. Does not own: the request and its checks (`verify.request`), the comparison
(`meshlora_judge.judge`), our side on a rank (`verify.ours`), showing results (`verify.report.show`).
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from meshlora.verify.at_once import LIMIT, adapters_of, compare_at_once
from meshlora.verify.faults.generated import NotPutInError
from meshlora.verify.ours import run_case
from meshlora.verify.pool import Pool, RankEndedError, RankError
from meshlora.verify.request import Proof
from meshlora_ground.errors import UserError
from meshlora_ground.files import new_folder
from meshlora_ground.private import NotOwnError, check_tree, close_tree, locked
from meshlora_ground.proof_records import proofs_folder
from meshlora_ground.topology import Topology
from meshlora_judge.case import Case, is_whole, write_inventory
from meshlora_judge.diagnosis.diagnose import Divergence, first_divergence, until_found
from meshlora_judge.judge import Evidence, judge
from meshlora_judge.reference_case import make_reference
from meshlora_judge.results import Phase, TensorResult
from meshlora_judge.saved import Saved, read_saved
from meshlora_judge.trace import Trace
from meshlora_judge.unshard import by_expert, with_prints_of_each

# For a rank that hangs; a dead one is noticed at once. A checkpoint is loaded, and computed in float64.
_TIMEOUT_OF_TWINS_S, _TIMEOUT_S = 600.0, 7200.0

Made = tuple[Case, Trace, list[Trace]]  # a case with its inputs, the reference, its rounded versions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """One run and its verdict.

    Attributes:
        phases: empty if the run broke off. divergence: the first difference from the reference, if any. error: the
            traceback of a rank. losses: ours and the reference's, per step. collectives, budget: "phase kind" -> calls
            on the busiest rank, and as planned.
    """

    topology: Topology
    mutation: str | None
    phases: list[Phase]
    divergence: Divergence | None
    seconds: float
    error: str = ""
    losses: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    collectives: dict[str, int] = field(default_factory=dict)
    budget: dict[str, int] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every tensor of every phase is within its limit."""
        return not self.error and all(phase.passed for phase in self.phases)


class Processes:
    """A context manager of the processes of proofs: one for references, and a pool per number of ranks."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, str], Pool] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def reference(self, device: str) -> Pool:
        """The process of the reference, which builds no layer of meshlora."""
        return self._pools.setdefault((0, device), Pool(1, device=device))

    def ranks(self, number: int, device: str, *, ranks_per_gpu: int = 1) -> Pool:
        """A pool of `number` ranks for our side."""
        key = (number, f"{device} {ranks_per_gpu}")
        return self._pools.setdefault(key, Pool(number, device=device, ranks_per_gpu=ranks_per_gpu))


def run_proof(
    proof: Proof, processes: Processes, *, progress: Callable[[str], None] = lambda text: None
) -> Iterator[Outcome]:
    """Yield outcomes: for each topology without a fault, then with each mutation that can show on it.

    Raises:
        RankError: the reference itself failed. UserError: a rank refuses the model. RankEndedError: a rank was killed,
            hangs, or ran out of memory or disk: no verdict, with or without a mutation.
    """
    worker = processes.reference(proof.case.device)
    worker.start()  # without waiting: it starts while the ranks do
    shares = proof.request.ranks_per_gpu
    processes.ranks(proof.topologies[0].world, proof.case.device, ranks_per_gpu=shares).start()
    progress("the reference: transformers + peft on one process")
    made = reference_of(proof, worker)
    for topology in proof.topologies:
        pool = processes.ranks(topology.world, proof.case.device, ranks_per_gpu=shares)
        for mutation in (None, *proof.mutations_on(topology)):
            progress(_called(topology, mutation))
            yield _run(proof, made, topology, mutation, pool, worker)


def _called(topology: Topology, mutation: str | None) -> str:
    return f"{topology} with {mutation}" if mutation else str(topology)


def reference_of(proof: Proof, worker: Pool) -> Made:
    """From the cache; computed if missing or incomplete."""
    root = proofs_folder(proof.request.cache_dir)
    root.make()
    folder = root.path / proof.key
    # A maker is stopped after its own limit: one that holds the lock for twice as long hangs.
    with locked(root, f"{proof.key}.lock", "makes the same reference", limit_s=2 * _timeout_s(proof)):
        if not (_is_own(folder) and is_whole(folder)):
            for remains in root.path.glob(f".{proof.key}.*"):  # left by a killed process
                shutil.rmtree(remains, ignore_errors=True)
            with root.usable():
                _remove(folder)
            _make_reference(proof, worker, folder)
    case = dataclasses.replace(
        proof.case, model=proof.case.model or str(folder / "model"), adapter=str(folder / "adapter")
    )
    rounded = list(map(Trace.load, sorted(folder.glob("rounded-*.safetensors"))))
    return case, Trace.load(folder / "reference.safetensors"), rounded


def _make_reference(proof: Proof, worker: Pool, folder: Path) -> None:
    with new_folder(folder) as new:
        twin = proof.config if proof.is_twin else None
        try:
            worker.run(make_reference, proof.case, twin, str(new), timeout_s=_timeout_s(proof))
        except RankEndedError as error:
            raise RankEndedError(f"the process of the reference: {error}") from None
        except RankError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise RankError(f"the reference itself fails on this model:\n{error}", error.cause) from error
        write_inventory(new)
    close_tree(folder)


def _is_own(folder: Path) -> bool:
    """Whether only this user can have written the reference."""
    try:
        check_tree(folder)
    except FileNotFoundError:
        return False
    except NotOwnError as error:
        logger.warning("%s, so the reference is not believed; it is made again", error)
        return False
    return True


def _remove(folder: Path) -> None:
    """Remove a folder, or a file or link of that name, if it exists."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _timeout_s(proof: Proof) -> float:
    return _TIMEOUT_OF_TWINS_S if proof.is_twin else _TIMEOUT_S


def _adapters(
    proof: Proof, case: Case, topology: Topology, mutation: str | None, pool: Pool, worker: Pool
) -> list[Phase]:
    """The phase of several adapters trained together, if the request has several."""
    if proof.request.adapters == 1:
        return []
    with tempfile.TemporaryDirectory(prefix="meshlora-") as folder:
        head = proof.plans[topology].head or "-"
        worst = compare_at_once(
            adapters_of(case, topology, proof.request.adapters, Path(folder), head=head),
            dropouts=case.dropout,
            ranks=pool,
            alone=worker,
            mutation=mutation,
            timeout_s=_timeout_s(proof),
        )
    results = []
    for adapter, one in worst.items():
        name = one.name.removeprefix("base_model.model.").removesuffix(".weight")  # as in files of PEFT
        results.append(TensorResult(f"{adapter}: {name}", one.relative, LIMIT))
    return [Phase("adapters", results)]


def _run(proof: Proof, made: Made, topology: Topology, mutation: str | None, pool: Pool, worker: Pool) -> Outcome:
    started = time.perf_counter()
    try:
        evidence = evidence_of(made, topology, mutation, pool, worker, timeout_s=_timeout_s(proof))
        found = judge(evidence)
        if mutation is not None:
            found = until_found(found)  # the first difference is all that is asked
        phases = list(found)
        if all(phase.passed for phase in phases):
            phases += _adapters(proof, made[0], topology, mutation, pool, worker)
    except RankEndedError as error:
        raise RankEndedError(f"{_called(topology, mutation)}: no verdict: {error}") from None
    except RankError as error:
        if isinstance(error.cause, NotPutInError) or (isinstance(error.cause, UserError) and mutation is None):
            raise error.cause from None
        text = str(error).strip()
        return Outcome(topology, mutation, [], None, time.perf_counter() - started, text)
    ranks, reference, facts = evidence.ranks, evidence.reference, dict[str, str]()
    for trace in ranks:
        facts |= trace.facts
    return Outcome(
        topology,
        mutation,
        phases,
        first_divergence(phases, evidence),
        time.perf_counter() - started,
        losses=(ranks[0].losses, reference.losses),
        collectives=_most(trace.collectives for trace in ranks),
        budget=_most(trace.budget for trace in ranks),
        facts=facts,
    )


def _most(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """For each key, the largest number of any rank."""
    found = dict[str, int]()
    for of_rank in counts:
        for key, number in of_rank.items():
            found[key] = max(number, found.get(key, 0))
    return found


def evidence_of(
    made: Made, topology: Topology, mutation: str | None, pool: Pool, worker: Pool, *, timeout_s: float
) -> Evidence:
    """Run our side, and pair its traces and files with the reference."""
    case, reference, rounded = made
    with pool.scratch(_room(case, topology)) as folder:
        pool.run(run_case, case, str(topology), str(folder), mutation, timeout_s=timeout_s)
        ranks = [Trace.load(folder / f"rank-{rank}.safetensors") for rank in range(topology.world)]
        worker.run(read_saved, case, str(folder), reference.stacks, timeout_s=timeout_s)
        saved = Saved.load(folder)
    held = [by_expert(trace, reference, topology, rank) for rank, trace in enumerate(ranks)]
    return Evidence(case, topology, with_prints_of_each(reference), rounded, held, saved)


def _room(case: Case, topology: Topology) -> int:
    """A rough upper limit of bytes written: no rank records more than the reference, and adapters are small."""
    reference = Path(case.adapter).with_name("reference.safetensors")
    return (topology.world + 1) * reference.stat().st_size
