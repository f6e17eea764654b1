"""`meshlora launch-script` writes the files under examples/launch, each as its launcher reads it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from meshlora.cli.main import main
from tests.for_each import for_each
from tests.run_files import write_run_file
from tests.scripts import ROOT

EXAMPLES = ROOT / "examples" / "launch"
KINDS = {"slurm": "slurm.sh", "k8s": "kubernetes.yaml", "skypilot": "skypilot.yaml", "torchrun": "torchrun.sh"}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def _written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch-script", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_examples_are_what_the_command_writes(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("examples/launch/llama-8b.yaml", f"--{kind}", "--nodes", "2", "--gpus-per-node", "8")
    assert _written(capsys, *words) == (EXAMPLES / KINDS[kind]).read_text()


@pytest.mark.parametrize("file", ["slurm.sh", "torchrun.sh"])
def test_shell_reads_the_scripts(file: str) -> None:
    assert subprocess.run(["bash", "-n", EXAMPLES / file], check=True, capture_output=True).stderr == b""


def test_pods_find_each_other_and_a_stopped_run_counts_as_failed() -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name = job["metadata"]["name"]
    assert service["metadata"]["name"] == pod["subdomain"] == service["spec"]["selector"]["job-name"] == name
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    words = shlex.split(container["args"][0])
    assert f"--master-addr={name}-0.{name}" in words
    assert {"--nnodes=2", "--nproc-per-node=8"} <= set(words)
    # Without it the pods of a node that is drained would be done, each for itself.
    assert words[words.index("--stopped-exit-code") + 1] == "85"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_a_run_on_cpus_asks_for_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run_file(tmp_path / "My run.yaml", topology="dp=2,tp=2", device="cpu"))
    for kind in KINDS:
        text = _written(capsys, run, f"--{kind}", "--nodes", "2", "--cpus-per-gpu", "3")
        asked = ("#SBATCH --gpus", "nvidia.com/gpu", "accelerators", "expandable_segments")
        assert not [word for word in asked if word in text]
        assert f"meshlora train {shlex.quote(run)} --resume auto" in text
        assert not {"@{", "None"} & {*text.replace("clusterIP: None", "").split()}
    assert "#SBATCH --job-name=my-run\n" in _written(capsys, run, "--slurm", "--nodes", "2")
    assert "#SBATCH --ntasks-per-node=2\n" in _written(capsys, run, "--slurm", "--nodes", "2")


def test_file_is_written_whole_and_says_what_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("examples/launch/llama-8b.yaml", "--slurm", "--gpus-per-node", "16", "--partition", "h100")
    out = tmp_path / "job.sh"
    said = _written(capsys, *words, "--set", "train.lr=1e-3", "--out", str(out))
    assert said.split() == f"written: {out}, for dp=2,tp=8,sp on 1 x 16 ranks".split()
    text = out.read_text()
    assert "#SBATCH --partition=h100\n" in text
    assert "account" not in text
    assert "llama-8b.yaml --set train.lr=1e-3 --resume auto --stopped-exit-code 85 ||" in text


def test_nothing_is_downloaded_where_the_file_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A login node has room for no model, and a laptop none for this one."""
    run = str(write_run_file(tmp_path / "run.yaml", model={"path": "acme/llama-70b"}, topology="tp=8"))
    assert "#SBATCH --gpus-per-node=8\n" in _written(capsys, run, "--slurm")


MISTAKES = {
    ("--slurm", "--nodes", "3", "--gpus-per-node", "8", "--set", "topology=dp=2,tp=8"): ("16", "24 were started"),
    ("--slurm", "--nodes", "2", "--gpus-per-node", "3"): ("tp=8 on 6 processes",),
    ("--slurm", "--nodes", "3"): ("--nodes 3: the 8 ranks of topology tp=8,sp do not divide",),
    ("--slurm", "--nodes", "0"): ("--nodes 0: it must be at least 1",),
    ("--slurm", "--gpus-per-node", "-8"): ("--gpus-per-node -8: it must be at least 1",),
    ("--slurm", "--time", "soon"): ("--time soon", "HH:MM:SS", "as in 24:00:00"),
    ("--slurm", "--time", "5"): ("--time 5 with --stop-before 300: the limit is 300 s",),
    ("--slurm", "--time", "0:04:00", "--stop-before", "240"): ("the limit is 240 s",),
    ("--slurm", "--image", "mine"): ("--image with --slurm: it is for --k8s; leave it out",),
    ("--k8s", "--partition", "h100"): ("--partition with --k8s: it is for --slurm; leave it out",),
    ("--k8s", "--image", "a b"): ("--image a b",),
    ("--k8s", "--name", "Llama_8B"): ("--name Llama_8B", "as in llama-8b"),
    ("--k8s", "--set", "train.lr=1e-3\n"): ("control characters",),
    (): ("one of the arguments --slurm --k8s --skypilot --torchrun is required",),
}


@for_each("words", MISTAKES, ids=" ".join)
def test_mistake_is_one_line_and_nothing_is_written(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job"
    try:
        code = main(["launch-script", "examples/launch/llama-8b.yaml", *words, "--out", str(out)])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not [word for word in MISTAKES[words] if word not in said], said
    assert not out.exists()


@pytest.mark.parametrize("time", ["30:00:00", "1-0", "2-12:30:00", "1500", "1500:30"])
def test_time_limits_are_read_as_slurm_reads_them(time: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("examples/launch/llama-8b.yaml", "--slurm", "--gpus-per-node", "8", "--time", time)
    assert f"#SBATCH --time={time}\n" in _written(capsys, *words, "--stop-before", "65000")


def test_no_word_of_an_argument_is_read_by_a_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kubernetes puts a variable of the container in the place of $(NAME), and makes $ of $$."""
    run = str(write_run_file(tmp_path / "$(OMP_NUM_THREADS)$$run.yaml", topology="dp=2", device="cpu"))
    text = _written(capsys, run, "--k8s", "--cpus-per-gpu", "3")
    (container,) = [*yaml.safe_load_all(text)][1]["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    assert "$(" not in script.replace("$$", "")
    # As the kubelet expands it: pairs first, from the left.
    assert run in shlex.split(script.replace("$$", "$"))
    assert run in shlex.split(_written(capsys, run, "--torchrun"))


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029", "\n"])
def test_the_command_stays_a_comment(end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / f"job{end}kind: Evil"
    for kind in KINDS:
        out.unlink(missing_ok=True)
        line = ("examples/launch/llama-8b.yaml", f"--{kind}", "--gpus-per-node", "8", "--out", str(out))
        assert main(["launch-script", *line]) == 0
        capsys.readouterr()
        lines = [part for part in out.read_text().splitlines() if "Evil" in part]  # at all that YAML takes for an end
        assert len(lines) == 1
        assert lines[0].startswith("# Written by: ")
