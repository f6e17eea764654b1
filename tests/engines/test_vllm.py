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
from transformers import LlamaConfig, LlamaForCausalLM

from meshlora.loading.load import load
from meshlora.text.tokenizer import load_tokenizer
from tests.run_files import EXAMPLES, TINY, copy_lines, copy_tokenizer, write_run_file
from tests.scripts import ROOT

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
    """A llama whose heads are as wide as vLLM's kernels want, trained until it no longer repeats one token."""
    folder = tmp_path_factory.mktemp("vllm") / "base"
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
    model = LlamaForCausalLM(config)
    tokenizer = load_tokenizer(TINY, trust_remote_code=False)
    records = [json.loads(line) for line in (EXAMPLES / "docstrings" / "train.jsonl").read_text().splitlines()[:512]]
    texts = ["".join(part for part in record.values() if isinstance(part, str)) for record in records]
    ids = tokenizer("\n".join(texts)).input_ids
    rows = torch.tensor(ids[: len(ids) // 64 * 64]).view(-1, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        batch = rows[torch.arange(16 * step, 16 * step + 16) % len(rows)]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


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
