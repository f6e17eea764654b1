"""`meshlora inspect` shows what a run left and says what is not whole, whatever lies there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshlora.cli.main import main
from meshlora.run.lock import hold
from tests.manifests import manifest_of, sign
from tests.unit.saved import save, save_steps


def _inspect(folder: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["inspect", str(folder)])
    out, err = capfd.readouterr()
    assert (out + err).replace("\n", "").isprintable()
    assert len(err) < 2000
    return code, out, err


def test_run_is_shown_with_what_resume_would_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "initial", "initial", step=0)
    save_steps(tmp_path, 2, 4)
    (tmp_path / "checkpoints" / "latest").symlink_to("step-000004")
    code, out, err = _inspect(tmp_path, capfd)
    assert (code, err) == (0, "")
    rows = [line.split(maxsplit=1) for line in out.splitlines()]
    assert [row[0] for row in rows] == [
        "initial",
        "checkpoints/step-000002",
        "checkpoints/step-000004",
        "checkpoints/latest",
        "--resume",
    ]
    assert "goes on after step 4" in out
    (tmp_path / "checkpoints" / "step-000004" / "adapter_model.safetensors").write_bytes(b"")
    code, out, err = _inspect(tmp_path, capfd)
    assert code == 1
    assert "adapter_model.safetensors is damaged" in err
    assert "goes on after step 2" in out
    save(tmp_path / "adapter", "adapter", step=6)
    assert "all 6 steps are done" in _inspect(tmp_path, capfd)[1]


def test_who_trains_there_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_steps(tmp_path, 2)
    with hold(tmp_path):
        assert f"process {os.getpid()} on host" in _inspect(tmp_path, capfd)[1]
    assert "trains now" not in _inspect(tmp_path, capfd)[1]


def test_checkpoint_is_shown_file_by_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder,) = save_steps(tmp_path, 4, updates=3, eval_loss=0.5)
    code, out, err = _inspect(folder, capfd)
    assert (code, err) == (0, "")
    for words in ("after 4 of 6 steps, 1 of them left out", "dp=2", "0.5", "torch ", "0.001", "200 bytes, as they"):
        assert words in out
    (folder / "adapter_model.safetensors").write_bytes(bytes(200))
    code, out, err = _inspect(folder, capfd)
    assert code == 1
    assert "200 bytes, adapter_model.safetensors is damaged" in out
    assert "100 bytes, as they were" in out


@pytest.mark.parametrize("kind", ["initial", "adapter"])
def test_adapter_is_shown(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "moved", kind, step=0 if kind == "initial" else 6)  # type: ignore[arg-type]
    code, out, _ = _inspect(folder, capfd)
    assert code == 0
    assert out.split()[0] == kind


def test_text_of_strangers_is_shown_as_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither markup nor escape sequences come through."""
    (folder,) = save_steps(tmp_path, 4)
    sign(folder, identity={"[/red]\x1b[2J": "[bold]\x1b]0;title\x07" + "9" * 9000}, versions={"\x9b1m": "[/]"})
    code, out, _ = _inspect(folder, capfd)
    assert code == 0
    assert "\x1b" not in out
    assert "\x07" not in out
    assert r"[/red]\x1b[2J" in out
    assert r"[bold]\x1b]0;title" in out
    assert len(out) < 5000
    assert manifest_of(folder)["versions"] == {"\x9b1m": "[/]"}


def test_a_plain_adapter_of_peft_is_shown_and_a_damaged_one_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It has no manifest: nothing of a run is missing there."""
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    tensors = {f"base_model.model.q_proj.lora_{side}.weight": torch.randn(4, 4) for side in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors")
    code, out, err = _inspect(folder, capfd)
    assert (code, err) == (0, "")
    for words in ("of PEFT, with no manifest", "LORA", "2 tensors"):
        assert words in " ".join(out.split())
    tensors["base_model.model.q_proj.lora_B.weight"] *= 0
    save_file(tensors, folder / "adapter_model.safetensors")
    code, _, err = _inspect(folder, capfd)
    assert code == 1
    assert "cannot be what was trained. (1) never trained: B is zero everywhere" in err
    assert err.count(f"{folder}") == 1
    (folder / "adapter_model.safetensors").write_bytes(b"cut")
    code, _, err = _inspect(folder, capfd)
    assert code == 1
    assert "adapter_model.safetensors" in err
    assert "manifest" not in err


@pytest.mark.parametrize("what", ["nothing there", "empty", "a file", "a link to itself", "a long name", "a NUL"])
def test_what_no_run_left_is_a_mistake(what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    if what == "empty":
        folder.mkdir()
    if what == "a file":
        folder.write_text("")
    if what == "a link to itself":
        folder.symlink_to(folder)
    if what == "a long name":
        folder = tmp_path / ("x" * 300)
    if what == "a NUL":
        folder = Path("a\0b")
    code = main(["inspect", str(folder)])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    words = {"a long name": "a name in it at most 240", "a NUL": "a path has no NUL character"}
    assert words.get(what, "there is nothing in it that a run left") in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "what", ["adapter empty", "adapter is a pipe", "step is a link to itself", "manifest is a folder"]
)
def test_hostile_folder_is_not_whole_and_no_traceback(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder,) = save_steps(tmp_path, 2)
    if what == "adapter empty":
        (tmp_path / "adapter").mkdir()
    if what == "adapter is a pipe":
        os.mkfifo(tmp_path / "adapter")
    if what == "step is a link to itself":
        (tmp_path / "checkpoints" / "step-000003").symlink_to("step-000003")
    if what == "manifest is a folder":
        (folder / "manifest.json").unlink()
        (folder / "manifest.json").mkdir()
    code, _, err = _inspect(tmp_path, capfd)
    assert code == 1
    assert err.count("error: ") == 1
