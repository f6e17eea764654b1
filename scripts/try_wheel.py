"""Tries a wheel as a stranger would: in an empty environment, in a folder outside the repository.

    .venv/bin/python scripts/try_wheel.py dist/meshlora-*.whl dist/meshlora-*.tar.gz

Installs torch first (the version of constraints.txt) and then the wheel, copies the demo's model and data, and runs
each command that a first hour needs. Before, it checks that the wheel holds every file of src, and the source
archive the files of the wheel. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from meshlora_ground.versions import OWN

ROOT = Path(__file__).parents[1]
RUN = """\
model: {path: tiny_base, dtype: float32}
lora: {r: 8, lora_alpha: 16, target_modules: all-linear}
data: {train: train.jsonl, eval: eval.jsonl, max_length: 128}
train: {output: runs/mine, steps: 20, batch_size: 16, micro_batch_size: 16, lr: 1e-2, warmup_steps: 2, log_every: 10}
topology: tp=2,sp
"""
PROMPT = 'def list_paths(target):\n    """'
# (words, a part of what is printed, a file that is there afterwards)
COMMANDS = [
    (["--version"], "meshlora 0.", ""),
    (["verify", "--family", "qwen3", "--topology", "tp=2,sp"], "proved in", ""),
    (
        ["init", "--yes", "--model", "tiny_base", "--data", "train.jsonl", "--out", "made.yaml"],
        "made.yaml",
        "made.yaml",
    ),
    (["check", "made.yaml"], "ready", ""),
    (
        ["train", "made.yaml", "--nproc", "2", "--set", "train.epochs=1"],
        "step 57/57",
        "runs/made/adapter/adapter_model.safetensors",
    ),
    (["check", "run.yaml"], "tp=2,sp", ""),
    (["train", "run.yaml", "--nproc", "2"], "step 20/20", "runs/mine/adapter/adapter_model.safetensors"),
    (["inspect", "runs/mine"], "adapter", ""),
    (["evaluate", "run.yaml", "--adapter", "runs/mine/adapter"], "perplexity", ""),
    (["generate", "--model", "tiny_base", "--adapter", "runs/made/adapter", "--prompt", PROMPT], "List the paths", ""),
    (["plot", "runs/mine", "--out", "loss.png"], "", "loss.png"),
    (["merge", "--model", "tiny_base", "--adapter", "runs/mine/adapter", "--out", "merged"], "", "merged/config.json"),
    (["launch-script", "run.yaml", "--slurm", "--nodes", "1", "--gpus-per-node", "2"], "#SBATCH", ""),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("source", type=Path, help="source archive")
    options = parser.parse_args()
    if fault := _contents(options.wheel, options.source):
        print(f"error: {fault}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="meshlora-wheel-") as name:
        folder = Path(name)
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {"OMP_NUM_THREADS": "1", "MESHLORA_CACHE": str(folder / "cache"), "PYTHON": sys.executable}
        wheel = f"meshlora[plot] @ {options.wheel.resolve().as_uri()}"
        _run([ROOT / "scripts" / "set_up.sh", folder / "env", wheel], folder, environment)
        place = folder / "work"
        shutil.copytree(ROOT / "examples" / "tiny_base", place / "tiny_base")
        for file in ("train.jsonl", "eval.jsonl"):
            shutil.copy(ROOT / "examples" / "docstrings" / file, place)
        (place / "run.yaml").write_text(RUN)
        program = folder / "env" / "bin" / "meshlora"
        for words, said, file in COMMANDS:
            text = _run([program, *words], place, environment)
            if said not in text or (file and not (place / file).exists()):
                print(f"{text}\nerror: it printed no {said!r}, or there is no {file!r}", file=sys.stderr)
                return 1
    print("the wheel works")
    return 0


def _contents(wheel: Path, source: Path) -> str:
    """What `wheel` lacks of src, or the archive `source` of the wheel; "" for nothing."""
    src = ROOT / "src"
    there = {str(path.relative_to(src)) for package in OWN for path in (src / package).rglob("*") if path.is_file()}
    there = {name for name in there if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(source) as archive:
        sources = {name.partition("/src/")[2] for name in archive.getnames()}
    if there != packed:
        return f"{wheel.name} lacks {sorted(there - packed)}, and has besides {sorted(packed - there)}"
    return f"{source.name} lacks {sorted(packed - sources)}" if packed - sources else ""


def _run(words: list[str | Path], place: Path, environment: dict[str, str]) -> str:
    """What the command printed; ends this program with its output where it fails."""
    started = time.perf_counter()
    print(f"$ {Path(words[0]).name} {' '.join(map(str, words[1:]))}", flush=True)
    done = subprocess.run(
        words, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nerror: exit code {done.returncode}")
    print(f"    {time.perf_counter() - started:.0f} s", flush=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
