"""Tokens added to a vocabulary, from the tokenizer to what is served: the same logits at every stage, in float64."""

from __future__ import annotations

import functools
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import meshlora
from meshlora.cli.main import main
from meshlora.run.config.file import read_run
from meshlora.run.grown import mean_row, with_vocabulary_of
from meshlora_judge.compare import largest_loss_gap, read_losses, relative
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from tests.one_process import train_alone
from tests.pool import Pool
from tests.ranks.test_trainer import run_and_keep_groups
from tests.run_files import EXAMPLES, copy_tokenizer, write_run_file

ADDED = {"add_tokens": ["<tool>", "<seen>"], "add_special_tokens": ["<end>"]}
TEXT = "<tool> def add(x, y) <seen> return x <end>"
ROWS = 2048


@functools.cache
def _lines() -> str:
    records = [json.loads(line) for line in (EXAMPLES / "docstrings" / "train.jsonl").read_text().splitlines()[:9]]
    for record in records:
        record["prompt"] = f"<tool> {record['prompt']} <seen>"
        record["completion"] = f"<seen> {record['completion'][:40]} <end>"
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture(scope="module", params=["tied", "untied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in float64 of several shards, with a tokenizer."""
    folder = tmp_path_factory.mktemp("base") / "model"
    config = twin_config("llama", vocab_size=ROWS, tie_word_embeddings=request.param == "tied")
    write_twin(config, folder.with_name("one-file"), dtype=torch.float64, seed=0)
    _base(folder.with_name("one-file")).save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    copy_tokenizer(folder)
    return folder


def _run(base: Path, folder: Path, name: str, topology: str = "", **groups: Any) -> Path:
    (folder / "train.jsonl").write_text(_lines())
    groups.setdefault("model", ADDED)
    groups["model"] = {"path": str(base), "dtype": "float64"} | groups["model"]
    lora = groups.pop("lora", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]})
    train = {"lr": 1e-2, "micro_batch_size": 2, "max_grad_norm": 0.1}
    return write_run_file(folder / f"{name}.yaml", lora=lora, topology=topology, train=train, preflight="off", **groups)


def _base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def _logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad(), meshlora.lift():
        found: Tensor = model(input_ids=ids).logits
    return found


def _ids(folder: Path) -> Tensor:
    found: Tensor = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    assert {2048, 2049, 2050} <= set(found.flatten().tolist())
    return found


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and float((found - expected).norm() / expected.norm()) < 1e-12


def _ours(base: Path, adapter: Path) -> Any:
    return meshlora.load(with_vocabulary_of(str(base), str(adapter)), adapter=adapter, dtype="float64", device="cpu")


def _of_peft(base: Path, adapter: Path) -> Any:
    """As PEFT's documentation has it: the base is resized to the tokenizer, then the adapter is loaded."""
    model = _base(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(adapter)))
        return PeftModel.from_pretrained(model, str(adapter)).eval()


CHOICES: dict[str, dict[str, Any]] = {
    "rows": {},
    "in full": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "some rows": {"trainable_token_indices": [2049, 7]},
    "lora": {"target_modules": ["q_proj", "embed_tokens"]},
}
COVER = ("rows", "some rows")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("choice", [pytest.param(n, marks=[] if n in COVER else pytest.mark.proof) for n in CHOICES])
def test_added_tokens_have_the_same_logits_at_every_stage(
    choice: str, base: Path, tmp_path: Path, pools: Callable[[int], Pool], capsys: pytest.CaptureFixture[str]
) -> None:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]} | CHOICES[choice]
    is_tied = 'tie_word_embeddings": true' in (base / "config.json").read_text()
    file = _run(base, tmp_path, "split", "tp=2", lora=lora)
    pools(2).run(run_and_keep_groups, file, 2)
    adapter = tmp_path / "split" / "adapter"
    # Trained as one process with transformers + peft trains it.
    losses = train_alone(file, initial=tmp_path / "split" / "initial", out=tmp_path / "reference")
    # Without what is stored of the base, which the reference has in its model.
    trained = load_file(adapter / "adapter_model.safetensors")
    for key, value in load_file(tmp_path / "reference" / "adapter_model.safetensors").items():
        assert relative(trained.pop(key), value) < 1e-6, key
    assert largest_loss_gap(read_losses(tmp_path / "split" / "metrics.jsonl"), losses) < 1e-11
    # Saved: with its tokenizer, and with rows of the base where some are not trained.
    assert bool(trained) == (choice != "rows"), trained.keys()
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    ids = _ids(adapter)
    ours = _logits(_ours(base, adapter), ids)
    # Loaded by PEFT, on the base resized by hand and by its own class.
    assert _is_close(_logits(_of_peft(base, adapter), ids), ours)
    assert _is_close(_logits(AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float64), ids), ours)
    # Merged, and read by transformers alone.
    merged = tmp_path / "merged"
    assert main(["merge", "--model", str(base), "--adapter", str(adapter), "--out", str(merged)]) == 0
    assert _is_close(_logits(_base(merged), _ids(merged)), ours)
    assert len(AutoTokenizer.from_pretrained(merged)) == ROWS + 3 == _base(merged).config.vocab_size
    assert _base(merged).config.tie_word_embeddings == (is_tied and choice in ("rows", "some rows"))
    # Spoken, of the original base and the adapter as of the merged model.
    capsys.readouterr()
    texts = []
    for options in (["--model", str(base), "--adapter", str(adapter)], ["--model", str(merged)]):
        asked = ["--prompt", "<tool> def add(x)", "--plain", "--max-new-tokens", "8", "--dtype", "float64"]
        assert main(["generate", *options, *asked]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_new_rows_are_the_mean_and_the_same_to_the_bit(base: Path, tmp_path: Path) -> None:
    folder = Path(read_run(_run(base, tmp_path, "grown")).model.path)
    again = Path(read_run(_run(base, tmp_path, "again")).model.path)
    assert again == folder
    grown, before = _base(folder), _base(base)
    for old, new in zip(_ends(before), _ends(grown), strict=True):
        assert torch.equal(new[:ROWS], old)
        assert torch.equal(new[ROWS:], mean_row(old).expand(3, -1))
        torch.testing.assert_close(mean_row(old), old.mean(0, keepdim=True), rtol=1e-12, atol=1e-15)
    links = [file for file in folder.glob("*.safetensors") if file.is_symlink()]
    assert 0 < len(links) < len(list(folder.glob("*.safetensors")))  # what has no vocabulary is not copied
    assert not (base / ".grown.json").exists()
    assert len(AutoTokenizer.from_pretrained(base)) == ROWS


def _ends(model: Any) -> list[Tensor]:
    return [model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()]


def test_mean_does_not_depend_on_threads() -> None:
    weight = torch.randn(5000, 33, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = mean_row(weight)
    torch.set_num_threads(2)
    try:
        assert torch.equal(mean_row(weight), found)
    finally:
        torch.set_num_threads(1)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, weight.double().mean(0, keepdim=True).bfloat16())


def test_tokenizer_with_more_tokens_than_the_base_has_rows(base: Path, tmp_path: Path) -> None:
    by_hand = tmp_path / "by-hand"
    _base(base).save_pretrained(by_hand)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<tool>", "<seen>"])
    tokenizer.save_pretrained(by_hand)
    run = read_run(_run(by_hand, tmp_path, "of-tokenizer", model={"add_tokens": "of_tokenizer"}))
    assert _base(Path(run.model.path)).config.vocab_size == ROWS + 2
    assert run.lora is not None
    assert set(map(tuple, run.lora["trainable_token_indices"].values())) == {(2048, 2049)}


# --- folders of PEFT with embeddings inside ---------------------------------------------------------------------------


def test_folder_of_peft_with_its_embeddings_is_trained_on_and_read_by_peft_again(base: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<tool>", "<seen>", "<end>"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _base(base)
        model.resize_token_embeddings(len(tokenizer))  # rows with a noise that no seed of ours knows
        with torch.no_grad():
            model.get_output_embeddings().weight[ROWS:] += 0.1 * torch.randn(3, 1, dtype=torch.float64)
        config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        theirs = get_peft_model(model, config)
        theirs.peft_config["default"].base_model_name_or_path = str(base)
        theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    assert any("embed_tokens" in key for key in load_file(tmp_path / "theirs" / "adapter_model.safetensors"))
    ids = _ids(tmp_path / "theirs")
    assert _is_close(_logits(_ours(base, tmp_path / "theirs"), ids), _logits(theirs, ids))

    (tmp_path / "train.jsonl").write_text(_lines())
    file = _run(base, tmp_path, "on", model={}, lora=None, adapter=str(tmp_path / "theirs"))
    run_and_keep_groups(file, 1)
    trained = tmp_path / "on" / "adapter"
    ours = _logits(_ours(base, trained), ids)
    assert not _is_close(ours, _logits(theirs, ids))
    assert _is_close(_logits(_of_peft(base, trained), ids), ours)
    assert main(["merge", "--model", str(base), "--adapter", str(trained), "--out", str(tmp_path / "merged")]) == 0
    assert _is_close(_logits(_base(tmp_path / "merged"), ids), ours)


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "there already": ({"add_tokens": ["def"]}, "'def': it is a token already, number [0-9]+"),
    "nothing to add": ({"add_tokens": "of_tokenizer"}, "2048 tokens, and the base 2048 rows: none is without"),
    "empty": ({"add_tokens": []}, "model.add_tokens"),
    "no name": ({"add_special_tokens": [""]}, "model.add_special_tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tokens_that_cannot_be_added_are_refused(name: str, base: Path, tmp_path: Path) -> None:
    options, words = REFUSED[name]
    with pytest.raises(meshlora.UserError, match=words):
        read_run(_run(base, tmp_path, "refused", model=options))


def test_an_adapter_is_continued_on_its_own_vocabulary(base: Path, tmp_path: Path) -> None:
    file = _run(base, tmp_path, "both", adapter="anywhere", lora=None)
    assert yaml.safe_load(file.read_text())["model"]["add_tokens"]
    with pytest.raises(meshlora.UserError, match="continued on the vocabulary that it has"):
        read_run(file)


def test_a_grown_base_that_nothing_has_used_for_long_is_removed(base: Path, tmp_path: Path) -> None:
    """And what it links to is not; one that was used since is kept."""

    def grown(token: str) -> Path:
        return Path(read_run(_run(base, tmp_path, "unused", model={"add_tokens": [token]})).model.path)

    long_ago = time.time() - 31 * 24 * 3600
    old, used = grown("<old>"), grown("<used>")
    for one in (old, used):
        os.utime(one / ".grown.json", (long_ago, long_ago))
    assert grown("<used>") == used  # which removes the other
    assert (used / "config.json").is_file()
    assert not old.exists()
    assert not [*old.parent.glob("removed-*")]
    _base(base)
    assert grown("<old>") == old
    assert (old / "config.json").is_file()
