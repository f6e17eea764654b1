"""What the command line says of itself: its version, its surroundings, the nearest name, and what may follow."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshlora.cli.main import main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"meshlora {importlib.metadata.version('meshlora')}\n"


def test_surroundings_are_told_and_nothing_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "someone"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://user:hf_secret@hub.example/hf_secret")
    assert main(["env", "--json"]) == 0
    said = capsys.readouterr().out
    found = json.loads(said)
    assert found["torch"] == torch.__version__
    assert found["hub_cache"] == "~/hub"
    assert found["hub"].startswith("https://hub.example")
    assert main(["env", "--json", str(tmp_path / "env.json")]) == 0
    said += capsys.readouterr().out
    assert json.loads((tmp_path / "env.json").read_text()) == found
    assert "hf_secret" not in said
    assert "someone" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian", "run.yaml"], "; did you mean 'train'?; see meshlora --help"),
        (["--verson"], "meshlora has no option --verson; did you mean '--version'?; see meshlora --help"),
        (["train", "--npoc", "2"], "meshlora train has no option --npoc; did you mean '--nproc'?"),
        (["check", "run.yaml", "--prvoe=1"], "meshlora check has no option --prvoe; did you mean '--prove'?"),
        (["completion", "bsh"], "shell 'bsh': it is none of bash, zsh, fish; did you mean 'bash'?"),
    ],
)
def test_nearest_name_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err


def test_what_is_no_option_of_ours_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Values that begin with dashes, and abbreviations."""
    assert main(["check", "--se", "train.lr=1", "--", "--prvoe"]) == 2
    assert "--prvoe: there is no such run file" in capsys.readouterr().err


def test_bash_completes_commands_and_keys_of_run_files() -> None:
    lines = ["meshlora chec", "meshlora check run.yaml --set train.warmup_st"]
    script = "; ".join(
        [
            'eval "$(meshlora completion bash)"',
            *(
                f'COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=($COMP_LINE); '
                f"COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _python_argcomplete meshlora; echo ${{COMPREPLY[@]}}"
                for line in lines
            ),
        ]
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True
    )
    assert [line.split() for line in done.stdout.splitlines()] == [["check"], ["train.warmup_steps="]]
