"""A SLURM cluster of two virtual nodes on this machine, in a folder of its own, for as long as a `with` block lasts.

Its daemons are children of this process. What it needs is in Debian: slurmctld slurmd slurm-client munge.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.processes import free_port, wait_until

# A requeued job waits until its old credentials have expired.
_CONFIGURATION = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_interval=2,batch_sched_delay=1,bf_interval=1
{nodes}
PartitionName=all Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """Attributes: environment: of commands that are to reach it."""

    environment: Mapping[str, str]

    def run(self, *command: str, cwd: Path, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        words: dict[str, object] = {"text": True, "capture_output": True, "check": False}
        return subprocess.run(command, cwd=cwd, env=dict(self.environment), timeout=timeout_s, **words)  # type: ignore[call-overload,no-any-return]

    def job(self, number: str) -> dict[str, str]:
        """What SLURM says of a job: `{"JobState": "COMPLETED", "Restarts": "1", ...}`."""
        said = self.run("scontrol", "--oneliner", "show", "job", number, cwd=Path("/")).stdout
        return dict(re.findall(r"(\w+)=(\S*)", said))


@contextlib.contextmanager
def cluster(environment: Mapping[str, str]) -> Iterator[Cluster]:
    """Two nodes, node1 and node2, that take jobs. environment: of jobs."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short path: it has sockets in it
    host, ports = socket.gethostname(), [free_port() for _ in range(3)]
    node = f"NodeName=node{{}} NodeHostname={host} NodeAddr=127.0.0.1 Port={{}} CPUs=2 State=UNKNOWN"
    nodes = "\n".join(node.format(number, ports[number]) for number in (1, 2))
    text = _CONFIGURATION.format(host=host, port=ports[0], user=getpass.getuser(), folder=folder, nodes=nodes)
    (folder / "slurm.conf").write_text(text)
    for name in ("munge", "state", "node1", "node2"):
        (folder / name).mkdir()
    munge = folder / "munge"
    (munge / "key").write_bytes(secrets.token_bytes(1024))
    (munge / "key").chmod(0o600)
    names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    files = [f"--{option}={munge / name}" for option, name in names.items()]
    daemons = [["munged", "--foreground", "--force", *files], ["slurmctld", "-D"]]
    daemons += [["slurmd", "-D", "-N", f"node{number}"] for number in (1, 2)]
    path = f"{environment['PATH']}:/usr/sbin"
    ours = Cluster({**environment, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path})
    started: list[subprocess.Popen[bytes]] = []
    try:
        for words in daemons:
            log = (folder / f"{words[0]}-{len(started)}.log").open("wb")
            started.append(subprocess.Popen(words, env=dict(ours.environment), stdout=log, stderr=log))
            log.close()
            if words[0] == "munged":
                wait_until((munge / "socket").exists, timeout_s=20)
        wait_until(lambda: _num_idle(ours) == 2, timeout_s=60, pause_s=0.5)
        yield ours
    finally:
        ours.run("scancel", "--user", getpass.getuser(), "--signal=KILL", "--full", cwd=folder)
        for daemon in reversed(started):
            daemon.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=20)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _num_idle(of: Cluster) -> int:
    said = of.run("sinfo", "--noheader", "--Node", "--format=%T", cwd=Path("/")).stdout
    return said.split().count("idle")


def environment(faults: Path) -> dict[str, str]:
    """Of commands and jobs: this checkout's meshlora, and what `faults/sitecustomize.py` changes in it."""
    import sys

    import meshlora

    source = str(Path(meshlora.__file__).resolve().parents[1])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # The last as the command line sets it, which comes after the faults have imported torch.
    own = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return os.environ | {"PYTHONPATH": f"{faults}:{source}", "PATH": path, **own}
