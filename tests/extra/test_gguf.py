"""GGUF files: transformers' own reader finds the same model, and the adapter is the difference to the merged one."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshlora.cli.main import main
from meshlora_judge.twin import twin_config
from tests.for_each import for_each

gguf = pytest.importorskip("gguf")

TINY = Path(__file__).parents[2] / "examples/tiny_base"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
# Name -> (family, changes of the configuration).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
}


def _base(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    family, changes = MODELS[name]
    torch.manual_seed(0)
    config = twin_config(family, vocab_size=2048, max_position_embeddings=128, **changes)
    if family == "qwen3":  # transformers reads no size of heads from such a file, and takes its own
        config.head_dim = 128
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # biases and norms too
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    for file in TOKENIZER:
        shutil.copy(TINY / file, folder)
    return folder


def _tensors(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {found.name: np.array(found.data) for found in gguf.GGUFReader(file).tensors}


def _logits(model: Any) -> Tensor:
    ids = torch.randint(3, 2048, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=ids).logits
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_the_same_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base = _base(tmp_path / "base", name, dtype)
    assert main(["export", str(base), "--layout", "gguf", "--out", str(tmp_path / "model.gguf")]) == 0
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    given = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = read.state_dict()
    for key, value in given.state_dict().items():
        assert torch.equal(theirs[key], value), key
    if name != "llama3":  # whose frequencies transformers does not read of such a file
        torch.testing.assert_close(_logits(read), _logits(given), rtol=0, atol=0)
    text = "def f(x):\n    return x + 12  # it's\t\u00e9"
    ours = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")(text).input_ids
    assert ours == AutoTokenizer.from_pretrained(TINY)(text).input_ids
    assert (tmp_path / "model.Modelfile").read_text() == "FROM ./model.gguf\n"


def test_frequencies_of_llama_3_are_those_of_transformers(tmp_path: Path) -> None:
    base = _base(tmp_path / "base", "llama3")
    assert main(["export", str(base), "--layout", "gguf", "--out", str(tmp_path / "model.gguf")]) == 0
    model = AutoModelForCausalLM.from_pretrained(base)
    theta, dim = LLAMA3["rope_theta"], model.config.head_dim
    plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    divisors = torch.from_numpy(_tensors(tmp_path / "model.gguf")["rope_freqs.weight"])
    torch.testing.assert_close(plain / divisors, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert len(divisors.unique()) > 2, "some frequencies are between"


ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": "all-linear"},
    "patterns": {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 3}},
    "rslora": {"target_modules": ["k_proj", "down_proj"], "use_rslora": True},
    "vocabulary": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
}


@pytest.mark.parametrize("lora", ADAPTERS)
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_an_adapter_is_the_difference_to_the_merged_model(name: str, lora: str, tmp_path: Path) -> None:
    base = _base(tmp_path / "base", name)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **ADAPTERS[lora])
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    merged.merge_and_unload().save_pretrained(tmp_path / "merged")
    for file in TOKENIZER:
        shutil.copy(TINY / file, tmp_path / "merged")
    line = ["export", str(tmp_path / "adapter"), "--model", str(base), "--layout", "gguf"]
    assert main([*line, "--out", str(tmp_path / "adapter.gguf")]) == 0
    for folder in ("base", "merged"):
        line = ["export", str(tmp_path / folder), "--layout", "gguf", "--out", str(tmp_path / f"{folder}.gguf")]
        assert main(line) == 0
    factors, before, after = (_tensors(tmp_path / f"{file}.gguf") for file in ("adapter", "base", "merged"))
    alpha = gguf.GGUFReader(tmp_path / "adapter.gguf").fields["adapter.lora.alpha"].contents()
    changed = {key.removesuffix(".lora_a") for key in factors if key.endswith(".lora_a")}
    for key, value in before.items():
        moved = value
        if key in changed:
            a, b = factors[f"{key}.lora_a"], factors[f"{key}.lora_b"]
            product = a @ b.T if key.startswith("token_embd") else b @ a
            assert np.abs(product).max() > 1e-3
            moved = value + alpha / b.shape[1] * product
        np.testing.assert_allclose(after[key], moved, rtol=0, atol=2e-6, err_msg=key)
    assert (tmp_path / "adapter.Modelfile").read_text() == f"FROM {base}\nADAPTER ./adapter.gguf\n"


def _adapter(folder: Path, base: Path, **lora: Any) -> Path:
    with warnings.catch_warnings():  # PEFT's own, about tied weights
        warnings.simplefilter("ignore")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, **lora))
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def _edited(base: Path, **changes: Any) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | changes))


def _other_split(base: Path) -> None:
    stored = json.loads((base / "tokenizer.json").read_text())
    stored["pre_tokenizer"]["add_prefix_space"] = True
    (base / "tokenizer.json").write_text(json.dumps(stored))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "family": (lambda base: _edited(base, model_type="olmo2"), "GGUF files are written of llama, mistral"),
    "activation": (lambda base: _edited(base, hidden_act="gelu"), "it would become silu"),
    "window": (lambda base: _edited(base, model_type="mistral", sliding_window=8), "sliding windows"),
    "tokenizer": (_other_split, "not known to be one that llama.cpp splits alike"),
}


@for_each("name", REFUSED)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = _base(tmp_path / "base", "llama")
    change, words = REFUSED[name]
    change(base)
    out = tmp_path / "model.gguf"
    assert main(["export", str(base), "--layout", "gguf", "--out", str(out)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


@for_each(
    ("lora", "words"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, "modules_to_save"),
        ({"target_modules": ["embed_tokens"]}, "one tensor for both tied ones"),
    ],
)
def test_adapters_that_llama_cpp_has_not_are_refused(
    lora: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = _base(tmp_path / "base", "llama")
    adapter = _adapter(tmp_path / "adapter", base, **lora)
    out = tmp_path / "adapter.gguf"
    line = ["export", str(adapter), "--model", str(base), "--layout", "gguf", "--out"]
    assert main([*line, str(out)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.gguf"
    out.with_suffix(".Modelfile").touch()
    for name, words in ((str(out), "nothing is overwritten"), (str(tmp_path / "model"), "ends in .gguf")):
        assert main(["export", str(TINY), "--layout", "gguf", "--out", name]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
