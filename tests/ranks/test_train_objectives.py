"""`meshlora train` on rollouts and on pairs gives the adapter of one process; what cannot be trained so is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshlora.cli.main import main
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.objective import COUNTED
from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from tests.for_each import for_each
from tests.one_process import train_alone
from tests.pool import Pool
from tests.ranks.test_trainer import run_and_keep_groups, run_file
from tests.run_files import EXAMPLES, metrics_of

FILES = {"policy": "rollouts", "dpo": "pairs", "orpo": "pairs", "kto": "feedback"}
REPORTED = {
    "policy": {"ratio", "clip_fraction", "kl"},
    "dpo": {"accuracy", "margin"},
    "orpo": {"nll", "accuracy", "log_odds_ratio"},
    "kto": {"accuracy", "kl"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "policy": {"train__objective": {"kind": "policy", "kl_coef": 0.1}},
    "dpo": {"train__objective": {"kind": "dpo", "beta": 0.2, "label_smoothing": 0.1}},
    "orpo": {"train__objective": {"kind": "orpo", "beta": 0.2}},
    "kto": {"train__objective": {"kind": "kto", "beta": 0.2, "desirable_weight": 1.2, "undesirable_weight": 0.8}},
}


def objective_file(folder: Path, name: str, topology: str, objective: str, **changes: Any) -> Path:
    """A run of `objective` over 19 rows: a short batch at the end of the epoch, unequal shares, dummies."""
    data = folder / f"{FILES[objective]}.jsonl"
    lines = (EXAMPLES / "docstrings" / data.name).read_text().splitlines()[:19]
    rows = [json.loads(line) for line in lines]
    for number, row in enumerate(rows):
        if objective == "policy":
            row["weight"] = 0.5 + number % 3
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"train__objective": objective, "data__train": str(data), **OPTIONS[objective], **changes}
    return run_file(folder, name, topology, **{"data__eval": str(data), **changes})


# The third step has what is left of an epoch of 19 rows; it is evaluated once, at the end.
SHORT = {"train__steps": 3, "train__eval_every": 3, "train__save_every": 0}
BOTH = ("tp=2,sp", "dp=2")


@pytest.mark.long
@pytest.mark.parametrize(
    ("objective", "topologies"),
    [
        # Of tokens and of pairs; what orpo and kto make of pairs and of likes is proved in `tests/verify`.
        pytest.param("policy", ("dp=2",), id="policy"),
        pytest.param("dpo", ("tp=2,sp",), id="dpo"),
        *(pytest.param(objective, BOTH, marks=pytest.mark.proof, id=f"{objective}-both") for objective in FILES),
    ],
)
def test_run_gives_the_adapter_of_one_process_on_every_mesh(
    objective: str, topologies: tuple[str, ...], tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    outputs = {}
    for topology in topologies:
        file = objective_file(tmp_path, f"run-{topology}", topology, objective, **SHORT)
        pools(2).run(run_and_keep_groups, file, 2)
        outputs[topology] = tmp_path / f"run-{topology}"
    losses = train_alone(file, initial=outputs[topologies[0]] / "initial", out=tmp_path / "reference")
    reported = REPORTED[objective]
    for output in outputs.values():
        assert compare_adapters(output / "adapter", tmp_path / "reference").relative < 1e-6
        assert largest_loss_gap(read_losses(output / "metrics.jsonl"), losses) < 1e-11
        lines = metrics_of(output)
        assert all(reported < line.keys() for line in lines if "loss" in line)
        evaluated = [line for line in lines if "eval_loss" in line]
        assert evaluated
        assert not any("eval_perplexity" in line for line in evaluated), "no loss of these is one of text"
    columns = [_column(output, sorted(reported)[0]) for output in outputs.values()]
    assert all(largest_loss_gap(columns[0], column) < 1e-11 for column in columns[1:])
    assert main(["evaluate", str(file), "--json", str(tmp_path / "evaluated.json")]) == 0
    found = json.loads((tmp_path / "evaluated.json").read_text())
    assert found["loss"] == pytest.approx(evaluated[-1]["eval_loss"], rel=1e-11)
    counted = COUNTED[read_run(file).train.objective.per]
    assert counted == "trained_tokens" or found[counted] == 19


def _column(output: Path, name: str) -> list[float]:
    lines = metrics_of(output)
    return [line[name] for line in lines if name in line]


@for_each(
    ("objective", "changes", "words"),
    [
        ("policy", {"train__objective": {"kind": "policy", "beta": 0.5}}, "unknown key"),
        ("dpo", {"train__objective": {"kind": "dpo", "label_smoothing": 0.5}}, "the other answer would be the better"),
        ("policy", {"train__objective": {"kind": "policy", "clip_low": 1.5}}, "above 0, at most 1"),
        ("policy", {"train__objective": {"kind": "policy", "kl_coef": -1.0}}, "not negative"),
        ("dpo", {"train__objective": {"kind": "dpo", "betta": 0.1}}, "did you mean 'beta'"),
        ("dpo", {"train__objective": {"kind": "dqo"}}, "did you mean 'dpo'"),
        ("dpo", {"train__objective": {"beta": 0.1}}, "objective.kind: this key is required"),
        ("orpo", {"data__packing": True}, "a pair is two rows"),
        ("kto", {"data__packing": True}, "a record is two rows"),
        ("kto", {"train__objective": {"kind": "kto", "desirable_weight": 0}}, "above 0, at most"),
        (
            "kto",
            {"data__train": str(EXAMPLES / "docstrings" / "pairs.jsonl")},
            "has chosen and rejected, which train.objective dpo and its like read",
        ),
        ("policy", {"train__routing_record": "somewhere"}, "runs the frozen base too"),
        ("dpo", {"data__train": str(EXAMPLES / "docstrings" / "train.jsonl")}, "'chosen' is missing"),
        ("policy", {"data__train": str(EXAMPLES / "docstrings" / "train.jsonl")}, "has neither advantage nor"),
        ("policy", {"data__train": "nowhere.jsonl"}, "there is no such file"),
        ("policy", {"data__columns": {"advantage": "reward"}}, "has neither advantage"),
    ],
)
def test_mistake_is_one_message(objective: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        prepare_run(read_run(objective_file(tmp_path, "wrong", "", objective, **changes)))


def test_objective_that_needs_the_base_is_refused_where_the_adapter_has_taken_its_principal_part(
    tmp_path: Path,
) -> None:
    file = objective_file(tmp_path, "pissa", "", "dpo", lora__init_lora_weights="pissa", model__dtype="float32")
    with pytest.raises(UnsupportedError, match="needs the frozen base"):
        prepare_run(read_run(file))
