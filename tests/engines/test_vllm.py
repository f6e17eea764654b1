"""vLLM says the same tokens as meshlora, with an adapter trained on two processes and without. `make test-vllm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshlora.loading.load import load
from meshlora.reading.tokenizer import load_tokenizer
from tests.run_files import copy_lines, write_run_file
from tests.scripts import ROOT, load_script

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
NUM_TOKENS = 32
PROMPTS = [
    'def log_last_packets(data, port=0):\n    """',
    'def list_paths(target):\n    """',
    'def read_settings(path):\n    """',
    'def count_events(log, since=None):\n    """',
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return load_script("grpo_vllm", "examples").make_base(tmp_path_factory.mktemp("vllm") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    """Trained on tp=2,sp to end every docstring in another way than the base does."""
    copy_lines("train", base.with_name("train.jsonl"), 600, 1000)
    file = write_run_file(
        base.with_name("run.yaml"),
        model={"path": str(base), "dtype": "float32"},
        lora={"r": 8, "lora_alpha": 32, "target_modules": "all-linear"},
        train={"steps": 40, "batch_size": 16, "micro_batch_size": 16, "lr": 1e-2},
        topology="tp=2,sp",
        device="cpu",
    )
    _run([sys.executable, "-m", "meshlora", "train", str(file), "--nproc", "2"])
    return file.with_suffix("") / "adapter"


@pytest.fixture(scope="module")
def said_by_vllm(base: Path, adapter: Path) -> dict[str, list[dict[str, Any]]]:
    assert PYTHON.exists(), "make test-vllm sets it up"
    program = ROOT / "tests" / "engines" / "vllm_tokens.py"
    text = _run([str(PYTHON), str(program), str(base), str(adapter), str(NUM_TOKENS)], said=json.dumps(PROMPTS))
    return dict(json.loads(text.splitlines()[-1]))


@pytest.mark.parametrize("name", ["base", "adapter"])
def test_vllm_says_the_same_tokens(
    name: str, base: Path, adapter: Path, said_by_vllm: dict[str, list[dict[str, Any]]]
) -> None:
    tokenizer = load_tokenizer(base, trust_remote_code=False)
    network = load(base, adapter=adapter if name == "adapter" else None, dtype="float32").eval()
    for prompt, found in zip(PROMPTS, said_by_vllm[name], strict=True):
        ids = torch.tensor([tokenizer(prompt).input_ids])
        with torch.no_grad():
            output = network.generate(input_ids=ids, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=1)
        assert output[0, ids.shape[1] :].tolist() == found["ids"], prompt


@pytest.mark.parametrize("name", ["base", "adapter"])
def test_vllm_says_what_the_command_prints(
    name: str, base: Path, adapter: Path, said_by_vllm: dict[str, list[dict[str, Any]]]
) -> None:
    words = ["generate", "--model", str(base), "--dtype", "float32", "--max-new-tokens", str(NUM_TOKENS)]
    words += ["--adapter", str(adapter)] if name == "adapter" else []
    words += [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    assert _run([sys.executable, "-m", "meshlora", *words]) == "".join(f"{x['text']}\n" for x in said_by_vllm[name])


def test_there_is_something_to_compare(said_by_vllm: dict[str, list[dict[str, Any]]]) -> None:
    """Many tokens, and others with the adapter than without."""
    base, adapter = ([said["ids"] for said in said_by_vllm[name]] for name in ("base", "adapter"))
    assert all(one != other for one, other in zip(base, adapter, strict=True))
    assert min(len({token for ids in each for token in ids}) for each in (base, adapter)) > 20


def _run(words: list[str], *, said: str | None = None) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" or words[0] != str(PYTHON)}
    done = subprocess.run(
        words, input=said, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_policy_learns_from_what_the_engine_samples(tmp_path: Path) -> None:
    """Two ranks train, the adapter is swapped after each step; engine and trainer compute the same policy."""
    example = ROOT / "examples" / "grpo_vllm.py"
    said = _run([sys.executable, "-P", str(example), "--folder", str(tmp_path), "--vllm", str(PYTHON)])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines]
    assert len(rewards) == 20
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.3
    # Float32 on both sides. An adapter of a step before would be 1e-2 off, and more from step to step.
    assert max(line["engine_gap"] for line in lines) < 1e-4
    assert all(line["ratio"] == 1.0 for line in lines)
    assert f"reward: {sum(rewards[:4]) / 4:.3f} in the first 4 steps" in said
    assert "mismatch of log-probabilities: at most" in said
