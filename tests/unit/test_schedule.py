"""Schedules against those of transformers, and of a run's beginning and end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import get_scheduler

from meshlora.run.config.file import read_run
from meshlora.run.config.run_file import TrainConfig
from meshlora.run.learning_rate import learning_rate
from meshlora_ground.errors import UserError
from meshlora_judge.reference import rates_of
from tests.for_each import for_each
from tests.run_files import write_run_file

STEPS, PEAK = 20, 3e-4
# Ours -> (settings, theirs, its settings).
PEERS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "linear": ({}, "linear", {}),
    "linear to a floor": ({"schedule": "linear", "min_lr": PEAK / 10}, "warmup_stable_decay", {"decays": "linear"}),
    "cosine": ({}, "cosine", {}),
    "cosine to a floor": ({"schedule": "cosine", "min_lr": PEAK / 10}, "cosine_with_min_lr", {"min_lr": PEAK / 10}),
    "a polynomial of power 1": ({"schedule": "linear", "min_lr": 1e-7}, "polynomial", {"lr_end": 1e-7}),
    "cosine of one cycle": ({"schedule": "cosine"}, "cosine_with_restarts", {"num_cycles": 1}),
    "cosine_with_restarts": ({"num_cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
    "polynomial": ({"power": 2.5, "min_lr": 1e-7}, "polynomial", {"power": 2.5}),
    "polynomial of power 1": ({"schedule": "polynomial"}, "linear", {}),
    "constant": ({}, "constant_with_warmup", {}),
    "inverse_sqrt": ({}, "inverse_sqrt", {}),
    "inverse_sqrt on its own scale": ({"schedule": "inverse_sqrt", "timescale": 7}, "inverse_sqrt", {"timescale": 7}),
    "warmup_stable_decay": (
        {"decay_steps": 6, "min_lr": PEAK / 10},
        "warmup_stable_decay",
        {"num_decay_steps": 6, "decay_type": "linear", "min_lr_ratio": 0.1},
    ),
    "warmup_stable_decay by a cosine": (
        {"schedule": "warmup_stable_decay", "decay_steps": 6, "decay_type": "cosine"},
        "warmup_stable_decay",
        {"num_decay_steps": 6},
    ),
    "warmup_stable_decay by a root": (
        {"schedule": "warmup_stable_decay", "decay_steps": 6, "decay_type": "1-sqrt", "min_lr": PEAK / 10},
        "warmup_stable_decay",
        {"num_decay_steps": 6, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
    ),
}


def options(steps: int = STEPS, **settings: Any) -> TrainConfig:
    return TrainConfig(output="out", steps=steps, lr=PEAK, **settings)


def rates(config: TrainConfig) -> list[float]:
    assert config.steps is not None
    return [learning_rate(step, options=config, steps=config.steps) for step in range(config.steps)]


def theirs(name: str, *, warmup_steps: int, settings: dict[str, Any], steps: int = STEPS) -> list[float]:
    """The rates of transformers, whose warm-up begins at zero."""
    if settings.pop("decays", None):
        settings = {"num_decay_steps": steps - warmup_steps, "decay_type": "linear", "min_lr_ratio": 0.1}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, warmup_steps, steps, scheduler_specific_kwargs=settings)
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@for_each("warmup_steps", [1, 5])
@for_each("name", PEERS)
def test_after_the_warm_up_rates_are_those_of_transformers(name: str, warmup_steps: int) -> None:
    own, their_name, settings = PEERS[name]
    found = rates(options(**{"schedule": name, **own}, warmup_steps=warmup_steps))
    expected = theirs(their_name, warmup_steps=warmup_steps, settings=dict(settings))
    assert found[warmup_steps:] == pytest.approx(expected[warmup_steps:], rel=1e-12)


# A warm-up of transformers' warmup_stable_decay begins at its final rate: docs/run-file.md says by how much it differs.
FROM_ZERO = [
    name
    for name, (_, theirs, own) in PEERS.items()
    if theirs != "warmup_stable_decay" or not {"min_lr_ratio", "decays"} & own.keys()
]


@for_each("warmup_steps", [0, 1, 7, 24])
@for_each("steps", [25, 97, 98, 500])
@for_each("name", FROM_ZERO)
def test_every_rate_is_that_of_transformers(name: str, steps: int, warmup_steps: int) -> None:
    """From zero, as there. Without a warm-up its inverse_sqrt has a time scale of 10,000."""
    own, their_name, settings = PEERS[name]
    given = {"schedule": name, **own}
    if their_name == "inverse_sqrt" and not warmup_steps:
        given |= {"timescale": settings.get("timescale", 10_000)}
    if given["schedule"] == "warmup_stable_decay" and warmup_steps + 6 > steps:
        return
    found = rates(options(steps, **given, warmup_steps=warmup_steps, warmup_from_zero=warmup_steps > 0))
    expected = theirs(their_name, warmup_steps=warmup_steps, settings=dict(settings), steps=steps)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12 * PEAK)


@for_each("num_cycles", [2, 7, 49, 93])
def test_restarts_are_in_the_steps_in_which_transformers_has_them(num_cycles: int) -> None:
    """49 / 49 is 1 in floats, and 49 * (1 / 49) is less: a restart by whole numbers would be a step earlier."""
    found = rates(options(98, schedule="cosine_with_restarts", num_cycles=num_cycles))
    expected = theirs("cosine_with_restarts", warmup_steps=0, settings={"num_cycles": num_cycles}, steps=98)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12 * PEAK)
    judged = rates_of(options(98, schedule="cosine_with_restarts", num_cycles=num_cycles))
    assert judged == pytest.approx(expected, rel=1e-12, abs=1e-12 * PEAK)


@for_each("decay_type", ["linear", "cosine", "1-sqrt"])
@for_each("warmup_steps", [1, 5])
def test_a_warm_up_to_a_floor_begins_there_at_the_floor(warmup_steps: int, decay_type: str) -> None:
    """And not at 0, as docs/run-file.md says; all else is the same."""
    own = {"schedule": "warmup_stable_decay", "decay_steps": 6, "min_lr": PEAK / 10, "decay_type": decay_type}
    found = np.array(rates(options(**own, warmup_steps=warmup_steps, warmup_from_zero=True)))
    settings = {"num_decay_steps": 6, "decay_type": decay_type, "min_lr_ratio": 0.1}
    difference = np.array(theirs("warmup_stable_decay", warmup_steps=warmup_steps, settings=settings)) - found
    said = PEAK / 10 * np.maximum(0, 1 - np.arange(STEPS) / warmup_steps)
    assert difference == pytest.approx(said, abs=1e-15)


def test_cosine_warmup_with_min_lr_is_a_step_ahead_after_its_warm_up() -> None:
    found = rates(options(STEPS, schedule="cosine", min_lr=PEAK / 10, warmup_steps=5))
    expected = theirs("cosine_warmup_with_min_lr", warmup_steps=5, settings={"min_lr": PEAK / 10})
    assert expected[:5] == pytest.approx(found[:5], rel=1e-12)
    assert expected[5:-1] == pytest.approx(found[6:], rel=1e-12)


def test_restarts_end_at_the_floor_that_transformers_has_not() -> None:
    plain = rates(options(schedule="cosine_with_restarts", num_cycles=3))
    found = rates(options(schedule="cosine_with_restarts", num_cycles=3, min_lr=PEAK / 10))
    assert found == pytest.approx([PEAK / 10 + 0.9 * rate for rate in plain])


@for_each("name", ["constant_with_warmup", "cosine_with_min_lr"])
def test_other_names_of_transformers_are_read(name: str, tmp_path: Path) -> None:
    own, _, settings = {"constant_with_warmup": PEERS["constant"], "cosine_with_min_lr": PEERS["cosine to a floor"]}[
        name
    ]
    train = {"lr": PEAK, "steps": STEPS, **own, "schedule": name, "warmup_steps": 3, "warmup_from_zero": True}
    config = read_run(write_run_file(tmp_path / "run.yaml", train=train)).train
    assert rates(config) == pytest.approx(theirs(name, warmup_steps=3, settings=dict(settings)), rel=1e-12)


@for_each("name", PEERS)
def test_neither_end_wastes_a_step(name: str) -> None:
    found = rates(options(**{"schedule": name, **PEERS[name][0]}, warmup_steps=4))
    assert found[:5] == pytest.approx([PEAK / 4, PEAK / 2, 3 * PEAK / 4, PEAK, PEAK])
    assert found[-1] > PEERS[name][0].get("min_lr", 0.0)


@for_each("name", PEERS)
def test_run_without_a_warm_up_begins_at_the_peak(name: str) -> None:
    assert rates(options(**{"schedule": name, **PEERS[name][0]}))[0] == pytest.approx(PEAK)


MICROSOFTS = json.loads((Path(__file__).parents[1] / "recorded" / "official_schedules.json").read_text())["runs"]


@pytest.mark.parametrize("run", MICROSOFTS, ids=lambda run: f"{run['scheduler']}-{run['warmup_step']}")
def test_rates_are_those_of_microsofts_own_schedulers(run: dict[str, Any]) -> None:
    """Its cosine gives the first step no rate even without a warm-up, and its cycle divides by a millionth more."""
    name = {"cosine": "cosine_of_run"}.get(run["scheduler"], run["scheduler"])
    own: dict[str, Any] = {"schedule": name, "warmup_steps": run["warmup_step"], "warmup_from_zero": True}
    if not run["warmup_step"]:
        own = {"schedule": name}
    if name == "cycle":
        own["cycle"] = {0: 1e-4, 4: 1e-3, 20: 2e-4}
    settings = TrainConfig(output="out", steps=STEPS, lr=1e-3, **own)
    skipped = int(name == "cosine_of_run" and not run["warmup_step"])
    assert rates(settings)[skipped:] == pytest.approx(run["rates"][skipped:], rel=1e-6)
    assert rates_of(settings) == pytest.approx(rates(settings), rel=1e-12)


@pytest.mark.parametrize("name", [*PEERS, "cycle"])
def test_reference_follows_each_schedule(name: str) -> None:
    own = {"schedule": name, **PEERS[name][0]} if name in PEERS else {"schedule": name, "cycle": {2: 1e-4, 9: 0.0}}
    for warmup_steps in (0, 5) if name in PEERS else (0,):
        settings = options(**own, warmup_steps=warmup_steps)
        assert rates_of(settings) == pytest.approx(rates(settings), rel=1e-12, abs=1e-18)


def test_cycle_is_straight_lines_through_its_points() -> None:
    points = {2: 1e-4, 6: 5e-4, 15: 0.0}
    found = rates(options(schedule="cycle", cycle=points))
    assert found == pytest.approx(np.interp(range(STEPS), list(points), list(points.values())), abs=1e-18)


def test_peak_of_a_cycle_is_its_highest_point() -> None:
    assert options(schedule="cycle", cycle={0: 0.0, 5: 1e-3, 10: 0.0}).peak_lr == 1e-3
    assert options(schedule="cosine").peak_lr == PEAK


@for_each(
    ("settings", "words"),
    [
        ({"schedule": "constant", "min_lr": 1e-5}, "train.min_lr: it has no effect with train.schedule=constant"),
        (
            {"num_cycles": 2},
            "train.num_cycles: it has no effect with train.schedule=linear; it goes with cosine_with_r",
        ),
        ({"power": 2.0}, "train.power: it has no effect with train.schedule=linear; it goes with polynomial"),
        ({"timescale": 9}, "train.timescale: it has no effect with train.schedule=linear; it goes with inverse_sqrt"),
        ({"decay_type": "cosine"}, "train.decay_type: it has no effect with train.schedule=linear"),
        (
            {"schedule": "cycle", "cycle": {0: 1e-4, 3: 0.0}, "warmup_ratio": 0.5},
            "train.warmup_ratio=0.5: it must be 0",
        ),
        (
            {"warmup_steps": 2, "warmup_ratio": 0.1},
            "train.warmup_steps=2 and train.warmup_ratio=0.1: a warm-up has one",
        ),
        ({"warmup_ratio": 1.0}, "train.warmup_ratio=1.0: it must be in [0, 1)"),
        ({"decay_steps": 3}, "train.decay_steps: it has no effect with train.schedule=linear"),
        ({"cycle": {0: 1e-4, 9: 0.0}}, "train.cycle: it has no effect with train.schedule=linear"),
        ({"min_lr": 1.0}, "train.min_lr=1.0: it must be at most train.lr"),
        ({"warmup_from_zero": True}, "train.warmup_from_zero: it has no effect without train.warmup_steps"),
        ({"schedule": "warmup_stable_decay"}, "train.decay_steps=0: it must be at least 1 with this schedule"),
        ({"schedule": "cycle", "cycle": {3: 1e-4}}, "it must be two points or more"),
        ({"schedule": "cycle", "cycle": {-1: 1e-4, 3: 0.0}}, "of steps from 0"),
        ({"schedule": "cycle", "cycle": {0: 1e-4, 3: -1.0}}, "of rates that are not negative"),
        ({"schedule": "cycle", "cycle": {0: 0.0, 3: 0.0}}, "of rates of which one is above 0"),
        ({"schedule": "cycle", "cycle": {0: 1e-4, 3: 0.0}, "warmup_steps": 2}, "train.warmup_steps=2: it must be 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        options(**settings)
    assert words in str(caught.value)


def test_a_floor_as_high_as_the_peak_is_a_constant_rate() -> None:
    assert set(rates(options(schedule="cosine", min_lr=PEAK))) == {PEAK}
