"""Two nodes: network, host name, home and mounts of their own, one shared folder; `scripts/two_nodes.sh` runs it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from tests.one_process import train_alone
from tests.run_files import copy_lines, write_run_file

pytestmark = pytest.mark.cluster

NODES = ("node1", "node2")
ADDRESS = "10.77.0.1"
# From the end of a rank to the end of all, on both nodes.
PATIENCE_S = 10.0
PACKAGES = os.pathsep.join([str(Path(__file__).parents[2] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass
class Node:
    """A node: how to start a process there."""

    name: str
    home: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *words: str, cwd: Path, before: str = "", **env: str) -> subprocess.Popen[str]:
        """before: shell commands in the node's own mounts."""
        hosts = self.home / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"10.77.0.{n + 1} {name}\n" for n, name in enumerate(NODES)))
        script = f'hostname {self.name}; mount --bind {hosts} /etc/hosts; {before} exec "$@"'
        own = {"HOME": str(self.home), "TMPDIR": str(self.home), "GLOO_SOCKET_IFNAME": f"ml-{self.name}"}
        process = subprocess.Popen(
            ["ip", "netns", "exec", f"ml-{self.name}", "unshare", "--uts", "--mount", "sh", "-c", script, "sh", *words],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": PACKAGES, "OMP_NUM_THREADS": "1"} | own | env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.started.append(process)
        return process


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    spaces = [f"ml-{name}" for name in NODES]
    for space in spaces:
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        ip("netns", "add", space)
    ip("link", "add", spaces[0], "type", "veth", "peer", "name", spaces[1])
    for number, space in enumerate(spaces):
        ip("link", "set", space, "netns", space)
        ip("-n", space, "address", "add", f"10.77.0.{number + 1}/24", "dev", space)
        ip("-n", space, "link", "set", space, "up")
        ip("-n", space, "link", "set", "lo", "up")
    found = [Node(name, tmp_path_factory.mktemp(name)) for name in NODES]
    try:
        yield found
    finally:
        for process in (process for node in found for process in node.started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    copy_lines("train", tmp_path / "train.jsonl", 0, 24)
    train = {"steps": 12, "batch_size": 4, "micro_batch_size": 1, "save_every": 4, "log_every": 1, "warmup_steps": 2}
    return write_run_file(tmp_path / "run.yaml", model={"dtype": "float64"}, train=train)


def _torchrun(number: int, per_node: int, *, restarts: int = 0) -> list[str]:
    words = ["--nnodes", "2", "--nproc-per-node", str(per_node)]
    if restarts:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESS}:29512", "--rdzv-id", "two-nodes"]
        words += [*meeting, "--max-restarts", str(restarts)]
        words += ["--local-addr", f"10.77.0.{number + 1}"]
    else:
        words += ["--node-rank", str(number), "--master-addr", ADDRESS, "--master-port", "29511"]
    return [sys.executable, "-m", "torch.distributed.run", *words, "-m", "meshlora"]


def _train(run_file: Path, topology: str, *more: str) -> list[str]:
    output = run_file.with_name(topology.replace("=", "").replace(",", "-"))
    words = ["--set", f"topology={topology}", "--set", f"train.output={output}"]
    return ["train", str(run_file), "--no-preflight", *words, *more]


def _output(words: list[str]) -> Path:
    return Path(next(word for word in words if word.startswith("train.output=")).partition("=")[2])


def _both(
    nodes: list[Node], words: list[str], per_node: int, *, restarts: int = 0, before: str = "", faults: str = ""
) -> list[subprocess.Popen[str]]:
    """words: of meshlora, with the run file. before: on the second node. faults: a folder for PYTHONPATH, on both."""
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [faults, PACKAGES]))}
    cwd = Path(words[1]).parent
    return [
        node.start(*_torchrun(number, per_node, restarts=restarts), *words, cwd=cwd, before=before * number, **env)
        for number, node in enumerate(nodes)
    ]


def _ended(processes: list[subprocess.Popen[str]], limit_s: float = 240.0) -> list[tuple[int, str, str]]:
    found = []
    for process in processes:
        out, err = process.communicate(timeout=limit_s)
        found.append((process.returncode, out, err))
    return found


def _adapter(output: Path) -> bytes:
    return (output / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(("topology", "per_node"), [("dp=2", 1), ("tp=2", 1), ("dp=2,tp=2,sp", 2)])
def test_adapter_of_two_nodes_is_that_of_one_process(
    nodes: list[Node], run_file: Path, topology: str, per_node: int
) -> None:
    words = _train(run_file, topology)
    for code, out, err in _ended(_both(nodes, words, per_node)):
        assert code == 0, out + err
        first = next((line for line in out.splitlines() if "machines" in line), "")
        assert not first or f"2 machines (node1, node2): {2 * per_node} ranks on CPUs; " in first
    losses = train_alone(run_file, initial=_output(words) / "initial", out=run_file.with_name("reference"))
    assert largest_loss_gap(read_losses(_output(words) / "metrics.jsonl"), losses) < 1e-11
    assert compare_adapters(_output(words) / "adapter", run_file.with_name("reference")).relative < 1e-9


FAULT = """
import os, sys, time
from pathlib import Path

if os.environ.get("RANK") == "{rank}" and not Path({mark!r}).exists():  # once, whatever is restarted
    from meshlora.run import trainer

    train_step = trainer.Trainer.train_step

    def faulty_step(self, adapters):
        if adapters[0].done == 9:
            Path({mark!r}).write_text(str(time.time()))
            {fault}
        return train_step(self, adapters)

    trainer.Trainer.train_step = faulty_step
"""
FAULTS = {
    "killed": (3, "os.kill(os.getpid(), 9)", "rank 3 (node2): it ended without a word, as by SIGKILL"),
    "raised": (3, "raise ZeroDivisionError('the cause')", "ZeroDivisionError: the cause"),
    # Rank 0, whose machine has the store.
    "first killed": (0, "os.kill(os.getpid(), 9)", "rank 0 (node1): it ended without a word, as by SIGKILL"),
    "first raised": (0, "raise ZeroDivisionError('the cause')", "ZeroDivisionError: the cause"),
}


def _with_fault(folder: Path, fault: str, *, rank: int) -> Path:
    """The folder of a fault in step 10 of `rank`, which comes once."""
    faults = folder / "faults"
    faults.mkdir()
    (faults / "sitecustomize.py").write_text(FAULT.format(rank=rank, mark=str(folder / "fault-at"), fault=fault))
    return faults


@pytest.mark.parametrize("how", FAULTS)
def test_end_of_a_rank_ends_both_nodes_with_its_cause(nodes: list[Node], run_file: Path, how: str) -> None:
    rank, fault, cause = FAULTS[how]
    faults = _with_fault(run_file.parent, fault, rank=rank)
    found = _ended(_both(nodes, _train(run_file, "dp=2,tp=2,sp"), 2, faults=str(faults)))
    assert time.time() - float((run_file.parent / "fault-at").read_text()) < PATIENCE_S
    for code, out, err in found:
        assert code != 0
        said = [line for line in (out + err).splitlines() if line.startswith("error: ")]
        assert len(said) == 1, out + err
        assert cause in out + err, out + err


@pytest.mark.parametrize("catches_up", [True, False])
def test_node_with_an_old_view_of_the_checkpoints_waits_or_ends_all(
    nodes: list[Node], run_file: Path, catches_up: bool
) -> None:
    words = _train(run_file, "dp=2")
    output = _output(words)
    assert [code for code, *_ in _ended(_both(nodes, words, 1))] == [0, 0]
    adapter = _adapter(output)
    shutil.rmtree(output / "adapter")  # as if it had been stopped after step 8
    old = run_file.with_name("old")
    shutil.copytree(output, old)
    shutil.rmtree(old / "checkpoints" / "step-000008")
    before = f"mount --bind {old} {output};" + f" (sleep 10; umount -l {output}) &" * catches_up
    found = _ended(_both(nodes, [*words, "--resume", "auto"], 1, before=before))
    if catches_up:
        assert [code for code, *_ in found] == [0, 0], found
        assert "goes on after step 8" in found[0][1]
        assert _adapter(output) == adapter
        return
    for code, _, err in found:
        assert code != 0
        assert f"rank 1 (node2) sees step 4 in {output}, rank 0 step 8: " in err, err
    assert not (output / "adapter").exists()


def test_output_on_one_node_alone_is_refused(nodes: list[Node], run_file: Path) -> None:
    words = _train(run_file, "dp=2")
    _output(words).mkdir()
    empty = run_file.with_name("empty")
    empty.mkdir()
    found = _ended(_both(nodes, words, 1, before=f"mount --bind {empty} {_output(words)};"))
    for code, _, err in found:
        assert code != 0
        assert "rank 1 (node2) sees nobody as holder of the lock of" in err, err


def test_torchrun_restarts_a_killed_rank_to_the_same_bytes(nodes: list[Node], run_file: Path) -> None:
    words = _train(run_file, "dp=2,tp=2,sp", "--resume", "auto")
    faults = _with_fault(run_file.parent, FAULTS["killed"][1], rank=3)
    found = _ended(_both(nodes, words, 2, restarts=3, faults=str(faults)))
    assert [code for code, *_ in found] == [0, 0], "\n".join(out + err for _, out, err in found)
    assert (run_file.parent / "fault-at").exists()
    assert any("goes on after step 8" in out for _, out, _ in found)
    broken = _adapter(_output(words))
    again = run_file.with_name("again")
    words = [f"train.output={again}" if word.startswith("train.output=") else word for word in words]
    assert [code for code, *_ in _ended(_both(nodes, words, 2))] == [0, 0]
    assert _adapter(again) == broken
