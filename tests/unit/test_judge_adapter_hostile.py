"""What `meshlora judge adapter` is given and cannot read: refused in one line, and nothing of it is run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshlora_judge import command
from tests.adapter_folders import CONFIG, LORA, PREFIX, WEIGHTS, files


def hostile(folder: Path, what: str) -> None:
    """A folder that holds `what`."""
    folder.mkdir()
    tensors = {f"{PREFIX}q_proj.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    files(folder, tensors, LORA)
    weights, config = folder / WEIGHTS, folder / CONFIG
    pickled = folder / "adapter_model.bin"
    if what == "no weights":
        weights.unlink()
    elif what == "no configuration":
        config.unlink()
    elif what == "cut":
        weights.write_bytes(weights.read_bytes()[:-8])
    elif what == "a header of 2**60 bytes":
        weights.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    elif what == "a tensor beyond the end":
        header = b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
        weights.write_bytes(len(header).to_bytes(8, "little") + header)
    elif what == "a sparse file of a terabyte":
        os.truncate(weights, 2**40)
    elif what == "no tensor":
        save_file({}, weights)
    elif what == "a link to itself":
        weights.unlink()
        weights.symlink_to(weights)
    elif what == "a broken link":
        config.unlink()
        config.symlink_to(folder / "nothing")
    elif what == "a pipe":
        weights.unlink()
        os.mkfifo(weights)
    elif what == "a folder for a file":
        weights.unlink()
        weights.mkdir()
    elif what == "a pickle that runs code":
        weights.unlink()
        pickled.write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    elif what == "a tensor of zero strides":
        weights.unlink()
        torch.save({f"{PREFIX}q.lora_A.weight": torch.zeros(1).expand(2**40)}, pickled)
    elif what == "a pickled list":
        weights.unlink()
        torch.save([torch.zeros(1)], pickled)
    elif what == "a distributed checkpoint":
        weights.unlink()
        (folder / ".metadata").write_bytes(b"")
    else:
        config.write_text(what)


CONFIGS = {
    "[]": "it must be a JSON object",
    "{": "not a readable JSON file",
    '{"r": "4"}': "it must be of type int",
    '{"r": true}': "it must be of type int",
    '{"r": 4, "lora_alpha": 1e999}': "is no number from 0",
    '{"r": 4, "rank_pattern": {"q": [1]}}': "is no number from 0",
    '{"r": 4, "target_modules": [1]}': "it must be a list of names",
    '{"r": 4, "peft_type": {}}': "it must be of type str",
    '{"r": 4, "r": 5}': "is given twice",
    "[" * 5000: "nested",
    json.dumps({"r": 4, "rank_pattern": {"(.*.*.*.*.*.*.*.*.*.*)*x": 4}}): "takes too long",
}
HOSTILE = {
    "no weights": "it holds no adapter_model.safetensors",
    "no configuration": "adapter_config.json: the file is missing",
    "cut": "damaged or not a safetensors file",
    "a header of 2**60 bytes": "damaged or not a safetensors file",
    "a tensor beyond the end": "damaged or not a safetensors file",
    "a sparse file of a terabyte": "no adapter has above",
    "a link to itself": "it cannot be read",
    "a broken link": "the file is missing",
    "a pipe": "it is a folder, a pipe or a device",
    "a folder for a file": "it is a folder, a pipe or a device",
    "a pickle that runs code": "torch.load(weights_only=True) does not read it",
    "a tensor of zero strides": "it is no plain tensor",
    "a pickled list": "it is no dict from names to tensors",
    "a distributed checkpoint": "its tensors are in parts",
}


@pytest.mark.parametrize("what", [*HOSTILE, *CONFIGS])
def test_what_cannot_be_read_is_refused_in_one_line(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile(tmp_path / "folder", what)
    assert command.main(["adapter", str(tmp_path / "folder")]) == 2
    out, err = capfd.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert (HOSTILE | CONFIGS)[what] in err
    assert not (tmp_path / "ran").exists()


def test_an_adapter_without_a_tensor_is_refuted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hostile(tmp_path / "folder", "no tensor")
    assert command.main(["adapter", str(tmp_path / "folder")]) == 1
    assert "cannot be what was trained. adapter_model.safetensors holds no tensor" in capfd.readouterr().err


@pytest.mark.parametrize("what", ["nothing", "a file", "an empty folder", "a link to itself"])
def test_what_is_no_folder_of_an_adapter_is_refused(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    if what == "a file":
        folder.write_text("")
    elif what == "an empty folder":
        folder.mkdir()
    elif what == "a link to itself":
        folder.symlink_to(folder)
    assert command.main(["adapter", str(folder)]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_a_type_without_a_number_in_each_place_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    packed = torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    names = [f"{PREFIX}q_proj.lora_{side}.weight" for side in "AB"]
    folder = files(tmp_path / "folder", dict.fromkeys(names, packed), LORA, "adapter_model.bin")
    assert command.main(["adapter", str(folder)]) == 2
    assert "float4_e2m1fn_x2 cannot be read; save it in float32" in capfd.readouterr().err
