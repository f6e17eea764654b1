"""llama.cpp says the same tokens as meshlora: of a model, with an adapter, and merged. `make test-llama-cpp`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.cli.main import main
from meshlora.reading.tokenizer import load_tokenizer
from tests.scripts import ROOT

pytestmark = [pytest.mark.llama_cpp, pytest.mark.timeout(900)]

PYTHON, TINY, NUM_TOKENS = ROOT / ".venv-llama" / "bin" / "python", ROOT / "examples" / "tiny_base", 32
PROMPTS = [
    'def log_last_packets(data, port=0):\n    """',
    'def list_paths(target):\n    """',
    "# it's 12 + 345 \u00e9\n",
]
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, `adapter`, `merged`, in float32, and a .gguf of each."""
    assert PYTHON.exists(), "make test-llama-cpp sets it up"
    folder = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).save_pretrained(folder / "base")
    for file in FILES:
        (folder / "base" / file).write_bytes((TINY / file).read_bytes())
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, alpha_pattern={"q_proj": 8}
    )
    model = meshlora.load(folder / "base", lora=lora, seed=1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data *= 0.5
    meshlora.save_adapter(model, folder / "adapter")
    base, adapter = f"{folder / 'base'}", f"{folder / 'adapter'}"
    assert main(["merge", "--model", base, "--adapter", adapter, "--out", f"{folder / 'merged'}"]) == 0
    for name in ("base", "merged"):
        assert main(["export", f"{folder / name}", "--layout", "gguf", "--out", f"{folder / name}.gguf"]) == 0
    line = ["export", adapter, "--model", base, "--layout", "gguf", "--out", f"{folder / 'adapter'}.gguf"]
    assert main(line) == 0
    return folder


def _said(model: Path, adapter: Path | None) -> list[dict[str, list[int]]]:
    program = ROOT / "tests" / "engines" / "llama_cpp_tokens.py"
    words = [str(PYTHON), str(program), str(model), str(adapter or ""), str(NUM_TOKENS)]
    done = subprocess.run(words, input=json.dumps(PROMPTS), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", ["base", "adapter", "merged"])
def test_llama_cpp_says_the_same_tokens(name: str, made: Path) -> None:
    files = (made / "base.gguf", made / "adapter.gguf") if name == "adapter" else (made / f"{name}.gguf", None)
    said = _said(*files)
    tokenizer = load_tokenizer(TINY, trust_remote_code=False)
    folder = made / "base" if name == "adapter" else made / name
    network = meshlora.load(folder, adapter=made / "adapter" if name == "adapter" else None).eval()
    for prompt, found in zip(PROMPTS, said, strict=True):
        ids = torch.tensor([tokenizer(prompt).input_ids])
        assert found["prompt"] == ids[0].tolist(), "the tokenizer is the same one"
        with torch.no_grad():
            output = network.generate(input_ids=ids, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=1)
        ours = output[0, ids.shape[1] :].tolist()
        if network.config.eos_token_id in ours:
            ours = ours[: ours.index(network.config.eos_token_id)]
        assert found["ids"] == ours, prompt


def test_there_is_something_to_compare(made: Path) -> None:
    base, adapter = _said(made / "base.gguf", None), _said(made / "base.gguf", made / "adapter.gguf")
    assert all(one["ids"] != other["ids"] for one, other in zip(base, adapter, strict=True))
