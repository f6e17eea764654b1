"""Fixtures of all tests: pools of ranks, one thread a process, temporary files in memory."""

from __future__ import annotations

import gc
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# The collector would look through all that libraries and the collection of tests make, and that stays, a third longer.
gc.disable()
# ruff: noqa: E402

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before transformers imports Triton, which reads it then

from meshlora.verify.options import Request
from meshlora.verify.proof import Outcome, Processes, run_proof
from meshlora.verify.request import prepare_proof
from meshlora.wings.kernels.liger import liger_version
from meshlora.wings.proved.families import _FILE, proof_of_family
from meshlora_ground.proof_records import remember
from meshlora_ground.topology import Topology
from meshlora_ground.versions import other_minors, versions
from tests.changed import COLLECTED
from tests.pool import Pool

Prove = Callable[..., list[Outcome]]

torch.set_num_threads(1)
pytest.register_assert_rewrite("tests.ranks.jobs", "tests.unit.mistakes", "tests.unit.records")

# These take above ten seconds, the first two minutes: first, so that no worker is left alone with one at the end.
_LONGEST = (
    "verify/test_mutations",
    "unit/test_hub",
    "parity/test_families",
    "ranks/test_failures",
    "parity/test_experts",
    "ranks/test_embedding_and_head",
    "extra/test_planner",
    "ranks/test_resume",
    "extra/test_planner_context",
    "verify/test_command",
    "verify/test_command_line",
    "verify/test_preflight",
    "extra/test_planner_base",
    "unit/test_twin",
)

# The suite writes some hundred megabytes, most of them with fsync.
_MEMORY, _ENOUGH_BYTES = Path("/dev/shm"), 4 * 2**30

# Of tests that tests/versions.txt names, with the fewest dp ranks.
_SPLITS = ("tp=2", "tp=2,sp", "tp=4", "dp=2,tp=2", "dp=2,tp=2,sp", "cp=2", "pp=2")

# Marked tests of a file that has no more than so many share a slice, as they share what they need.
_TOGETHER = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="K/N", help="of N parts of the chosen tests only the K-th, from 0")


def pytest_configure() -> None:
    """Temporary files in memory, where the machine has enough of it."""
    if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ENOUGH_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def pytest_collection_finish() -> None:
    """From here on garbage is collected, of the tests alone."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """The processes of the session's proofs."""
    with Processes() as started:
        yield started


@pytest.fixture(scope="session")
def pools(processes: Processes) -> Callable[[int], Pool]:
    """`pools(2)`: the session's pool of two ranks, which is that of its proofs too: a rank is imported once."""
    return lambda size: processes.ranks(size, "cpu")


@pytest.fixture(scope="session")
def prove(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Prove:
    """`prove(family=..., topologies=(...), ...)`: the outcomes of a request, with references of this session only."""
    cache = tmp_path_factory.mktemp("proofs")

    def run(**request: Any) -> list[Outcome]:
        return list(run_proof(prepare_proof(Request(**{"cache_dir": cache, **request})), processes))

    return run


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches of this session's own, here and in what the tests start."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        _remember_proofs_of_versions(home)
        yield


def _remember_proofs_of_versions(home: Path) -> None:
    """In other versions than the pinned ones: let ranks split llama, which they would refuse there. It is no proof:
    tests/parity/test_versions.py proves some of these splits in the same `make test-floor`, and no other family."""
    if not other_minors(_FILE["versions"], versions()):
        return
    for topology in _SPLITS:
        remember(home / ".cache" / "meshlora" / "proofs", proof_of_family("llama", Topology.parse(topology)), {})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests run where there is a GPU, those of liger-kernel where it is, those that mount where a process may,
    those of a sandbox where one can be had. Those of `make test-long` run with `-m long` or where files are named,
    those of `make proof` with `-m proof`, those of two nodes with `-m cluster`, those of SLURM with `-m slurm`, those
    of vLLM with `-m vllm`, of llama.cpp with `-m llama_cpp`, of METEOR with `-m meteor`.

    Workers of xdist take the longest files first.
    """
    from tests.processes import has_sandbox, own_mounts  # after its assertions were asked to be rewritten

    config.stash[COLLECTED] = frozenset(item.nodeid for item in items if not item.get_closest_marker("proof"))
    left_out = [] if torch.cuda.is_available() else ["gpu"]
    left_out += [] if own_mounts() else ["mounts"]
    left_out += [] if has_sandbox() else ["sandbox"]
    left_out += [] if liger_version() else ["liger"]
    on_request = ("proof", "cluster", "slurm", "vllm", "llama_cpp", "meteor")
    left_out += [name for name in on_request if name not in config.option.markexpr]
    others = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    if "long" not in config.option.markexpr and _is_whole(config):
        others += [item for item in items if item.get_closest_marker("long") and not item.get_closest_marker("proof")]
    if config.option.slice:
        others += _not_of_slice([item for item in items if item.get_closest_marker("proof")], config.option.slice)
    if unwanted := dict.fromkeys(others):
        config.hook.pytest_deselected(items=list(unwanted))
        items[:] = [item for item in items if item not in unwanted]
    if os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=_place)


def _is_whole(config: pytest.Config) -> bool:
    """Whether all tests were asked for, no file by name."""
    return {config.rootpath / name for name in config.args} == {config.rootpath / "tests"}


def _not_of_slice(items: list[pytest.Item], chosen: str) -> list[pytest.Item]:
    """Those of `items` that are in another slice than `chosen`, as in 3/40. By hashes, so that each stays in its slice
    when others come and go.
    """
    number, slices = map(int, chosen.split("/"))
    files = Counter(item.location[0] for item in items)
    own = [item.location[0] if files[item.location[0]] <= _TOGETHER else item.nodeid for item in items]
    return [item for item, name in zip(items, own, strict=True) if zlib.crc32(name.encode()) % slices != number]


def _place(item: pytest.Item) -> int:
    file = f"{item.path.parent.name}/{item.path.stem}"
    return _LONGEST.index(file) if file in _LONGEST else len(_LONGEST)
