"""Which files of a folder are the model: those that transformers loads, or a refusal at every door."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, modeling_utils

from meshlora.cli.main import main
from meshlora_ground.errors import UserError
from meshlora_ground.hub import located
from meshlora_ground.weight_files import INDEX, SINGLE, weight_files
from meshlora_judge.packed import load_base
from tests.unit.mistakes import Setup, one_error

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
STRAY = ("consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json")


def _index(folder: Path, *names: str) -> None:
    weight_map = {f"weight.{number}": name for number, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _folder(folder: Path, names: tuple[str, ...], indexed: tuple[str, ...], **config: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    (folder / "config.json").write_text(json.dumps(config))
    if indexed:
        _index(folder, *indexed)
    return folder


def _of_transformers(folder: Path, named: str | None = None) -> list[str]:
    found, _ = modeling_utils._get_resolved_checkpoint_files(
        folder, variant=None, gguf_file=None, use_safetensors=None, user_agent=None, is_remote_code=False,
        transformers_explicit_filename=named,
    )  # fmt: skip
    return sorted(found or [])


@pytest.mark.parametrize(
    ("names", "indexed", "config"),
    [
        ((SINGLE,), (), {}),
        ((SINGLE, *STRAY), (), {}),
        (SHARDS, SHARDS, {}),
        ((*SHARDS, *STRAY), SHARDS, {}),
        ((SINGLE,), (SINGLE,), {}),
        ((SINGLE,), (), {"transformers_weights": SINGLE}),
        (SHARDS, SHARDS, {"transformers_weights": INDEX}),
    ],
    ids=["single", "single_and_others", "shards", "shards_and_others", "index_of_one", "named", "named_index"],
)
def test_the_files_are_those_that_transformers_loads(
    names: tuple[str, ...], indexed: tuple[str, ...], config: dict[str, str], tmp_path: Path
) -> None:
    folder = _folder(tmp_path / "model", names, indexed, **config)
    assert [*map(str, weight_files(folder))] == _of_transformers(folder, config.get("transformers_weights"))


def test_two_models_in_a_folder_are_refused(tmp_path: Path) -> None:
    """transformers takes the single file, whatever the index says: a reader of the shards has another base."""
    folder = _folder(tmp_path / "model", (SINGLE, *SHARDS), SHARDS)
    assert _of_transformers(folder) == [str(folder / SINGLE)]
    with pytest.raises(UserError, match="which transformers loads, and the 2 shards of"):
        weight_files(folder)


def test_weights_that_only_the_configuration_names_are_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", (SINGLE, "other.safetensors"), (), transformers_weights="other.safetensors")
    assert _of_transformers(folder, "other.safetensors") == [str(folder / "other.safetensors")]
    with pytest.raises(UserError, match=r"transformers_weights='other\.safetensors'"):
        weight_files(folder)


def _two_models(folder: Path) -> None:
    """Other numbers in shards than in the model.safetensors beside them."""
    tensors = load_file(folder / SINGLE)
    shards: tuple[dict, dict] = ({}, {})  # type: ignore[type-arg] # of tensors
    for number, (name, tensor) in enumerate(tensors.items()):
        shards[number % 2][name] = 2 * tensor
    for file, part in zip(SHARDS, shards, strict=True):
        save_file(part, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in zip(SHARDS, shards, strict=True) for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    "line",
    [
        ["check", "{folder}/run.yaml"],
        ["train", "{folder}/run.yaml", "--nproc", "2"],
        ["evaluate", "{folder}/run.yaml", "--base"],
        ["merge", "--model", "{folder}/model", "--adapter", "{folder}/adapter", "--out", "{folder}/merged"],
        ["verify", "--model", "{folder}/model", "--topology", "dp=2"],
        ["generate", "--model", "{folder}/model", "--prompt", "a"],
        ["plan", "--model", "{folder}/model", "--topology", "tp=2"],
    ],
    ids=lambda line: line[0],
)
def test_no_command_takes_one_of_two_models(line: list[str], setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    setup.set("data.eval", setup.tree["data"]["train"])
    setup.write()
    _two_models(setup.model)
    assert main([part.format(folder=setup.folder) for part in line]) == 2
    message = one_error(*capfd.readouterr())
    assert f"{SINGLE}, which transformers loads, and the 2 shards of {INDEX}" in message
    assert not (setup.folder / "merged").exists()


def test_the_reference_reads_no_file_beside_a_packed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It unpacks formats by itself, and must not take up files that transformers would not load."""
    folder = _folder(tmp_path / "model", (SINGLE, "stray.safetensors"), ())
    read: list[str] = []
    monkeypatch.setattr("meshlora_judge.packed.take_quantization", lambda _: {"quant_method": "awq"})
    monkeypatch.setattr("meshlora_judge.packed.load_file", lambda file: read.append(Path(file).name) or {})
    monkeypatch.setattr("meshlora_judge.packed.own_class", lambda _: pytest.fail("read"))
    with pytest.raises(pytest.fail.Exception):
        load_base(folder, LlamaConfig(), local_files_only=True, trust_remote_code=False)
    assert read == [SINGLE]


def test_a_repository_with_two_models_is_refused_before_its_weights_are_loaded(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the hub says it holds: of the two only the shards would come, and be another base than transformers'."""
    commit = "a" * 40
    cache, name = tmp_path / "cache", "acme/two"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = cache / "models--acme--two" / "snapshots" / commit
    shutil.copytree(setup.model, folder)
    (cache / "models--acme--two" / "refs").mkdir()
    (cache / "models--acme--two" / "refs" / "main").write_text(commit)
    (folder / SINGLE).unlink()
    _index(folder, *SHARDS)
    trees = {file: {"size": 1, "blob_id": "0"} for file in (*(f.name for f in folder.iterdir()), SINGLE, *SHARDS)}
    (cache / "models--acme--two" / "trees").mkdir()
    tree = {"format_version": 1, "files": trees}
    (cache / "models--acme--two" / "trees" / f"{commit}.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match="acme/two: it holds two models"):
        located(name, "model.path")
