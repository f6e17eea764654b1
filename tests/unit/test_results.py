"""`--json`: what a command says, as plain values in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from meshlora.cli.main import main
from tests.unit.mistakes import Setup


def _result(setup: Setup, *words: str) -> Any:
    file = setup.folder / "result.json"
    file.unlink(missing_ok=True)
    assert main([*words, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_results_are_those_of_the_run(setup: Setup) -> None:
    """From the check to the merged model, as a script would go on with what it reads."""
    setup.set("topology", "")
    setup.set("train.eval_every", 2)
    setup.set("preflight", "off")
    setup.write()
    file = str(setup.folder / "run.yaml")

    checked = _result(setup, "check", file)
    run = checked["runs"][""]
    assert (run["num_processes"], run["num_steps"]) == (1, setup.tree["train"]["steps"])
    assert run["train_data"]["sequences"] == len((setup.folder / "train.jsonl").read_text().splitlines())
    assert checked["command"].startswith("meshlora train ")

    trained = _result(setup, "train", file, "--no-preflight")
    done = trained["runs"][""]
    lines = [json.loads(line) for line in Path(done["output"], "metrics.jsonl").read_text().splitlines()]
    assert trained["is_done"]
    assert done["loss"] == [line["loss"] for line in lines if "loss" in line][-1]
    assert done["eval_loss"] == [line["eval_loss"] for line in lines if "eval_loss" in line][-1]
    assert _result(setup, "train", file, "--no-preflight", "--resume", "auto") == trained, "all its steps are done"

    with safe_open(Path(done["adapter"], "adapter_model.safetensors"), "pt") as saved:
        assert sum(saved.get_tensor(name).numel() for name in saved.keys()) == run["num_trained_parameters"]  # noqa: SIM118
        num_tensors = len(saved.keys())
    exported = _result(setup, "export", done["adapter"], "--layout", "peft", "--out", str(setup.folder / "peft"))
    assert exported == {"out": str(setup.folder / "peft"), "layout": "peft", "num_tensors": num_tensors}

    model = ["--model", str(setup.model), "--adapter", done["adapter"]]
    merged = _result(setup, "merge", *model, "--out", str(setup.folder / "merged"), "--no-logits")
    assert merged["num_bytes"] > 0
    assert 0 < merged["num_changed"] <= merged["num_tensors"]
    said = _result(setup, "generate", *model, "--prompt", "a", "--max-new-tokens", "1")
    assert [text["prompt"] for text in said["texts"]] == ["a"]

    assert _result(setup, "inspect", done["output"])["is_whole"]
    Path(done["adapter"], "adapter_config.json").write_text("{}")
    assert main(["inspect", done["output"], "--json", str(setup.folder / "result.json")]) == 1
    found = json.loads((setup.folder / "result.json").read_text())
    assert not found["is_whole"]
    assert len(found["problems"]) == 1


@pytest.mark.parametrize(
    "command", [["check", "run.yaml"], ["inspect", "."], ["generate", "--model", ".", "--prompt", "a"]]
)
def test_file_that_cannot_be_written_is_refused_first(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--json", "/nowhere/result.json"]) == 2
    assert capsys.readouterr().err == (
        "error: /nowhere/result.json: there is no folder /nowhere; give another file, or make the folder\n"
    )
