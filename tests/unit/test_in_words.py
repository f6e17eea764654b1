"""What check and the card say of scale, batches, rates and defaults: the arithmetic, as it is done."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshlora.cli.main import main
from meshlora.run.config.run_file import TrainConfig
from meshlora.run.in_words import batch_in_words, rates_in_words
from meshlora.run.learning_rate import learning_rate
from meshlora_ground.topology import Topology
from tests.for_each import for_each
from tests.unit.mistakes import Setup


@for_each(
    ("batch", "at_once", "dp", "said"),
    [
        (16, 4, 2, "16 sequences = 4 at once x 2 dp ranks x 2 accumulated"),
        (16, 4, 1, "16 sequences = 4 at once x 1 dp rank x 4 accumulated"),
        (4, 8, 2, "4 sequences = 2 at once x 2 dp ranks x 1 accumulated"),
        (10, 4, 2, "10 sequences <= 4 at once x 2 dp ranks x 2 accumulated"),
        (3, 4, 2, "3 sequences <= 2 at once x 2 dp ranks x 1 accumulated"),
    ],
)
def test_batches_are_multiplied_out(batch: int, at_once: int, dp: int, said: str) -> None:
    train = TrainConfig("o", steps=1, batch_size=batch, micro_batch_size=at_once)
    assert batch_in_words(train, Topology(dp=dp)) == said


@for_each(
    ("options", "said", "first"),
    [
        ({}, "0.001, linear, without warm-up", 1e-3),
        ({"warmup_steps": 4}, "0.001, linear after 4 steps of warm-up, the first at 1/4 of it", 1e-3 / 4),
        ({"warmup_steps": 4, "warmup_from_zero": True}, "0.001, linear after 4 steps of warm-up, the first at 0", 0.0),
    ],
)
def test_rate_of_the_first_step_is_the_one_that_is_said(options: dict[str, Any], said: str, first: float) -> None:
    train = TrainConfig("o", steps=10, lr=1e-3, **options)
    assert rates_in_words(train) == said
    assert learning_rate(0, options=train, steps=10) == pytest.approx(first)


@for_each(
    ("lora", "said"),
    [
        ({"r": 8}, "1 = lora_alpha 8 / r 8"),
        ({"r": 8, "lora_alpha": 16}, "2 = lora_alpha 16 / r 8"),
        ({"r": 4, "lora_alpha": 16, "use_rslora": True}, "8 = lora_alpha 16 / sqrt(r 4), as use_rslora has it"),
        ({"r": 8, "lora_alpha": 16, "rank_pattern": {"v_proj": 4}}, "2 to 4 = lora_alpha 16 / r, by module"),
    ],
)
def test_check_shows_the_scale_of_what_is_trained(
    lora: dict[str, Any], said: str, setup: Setup, capfd: pytest.CaptureFixture[str]
) -> None:
    """LLaMA-Factory takes twice the rank where alpha is not given: unseen, an adapter learns at half of it."""
    setup.tree["lora"] = {"target_modules": ["q_proj", "v_proj"], **lora}
    setup.write()
    file = setup.folder / "found.json"
    assert main([*setup.command_lines()[0], "--json", str(file)]) == 0
    assert said in " ".join(capfd.readouterr().out.split())
    assert json.loads(file.read_text())["runs"][""]["scale"] == said
    file.unlink()


def test_defaults_that_are_others_elsewhere_are_said_unless_they_are_given(
    setup: Setup, capfd: pytest.CaptureFixture[str]
) -> None:
    def defaults() -> str:
        setup.write()
        assert main(setup.command_lines()[0]) == 0
        return " ".join(capfd.readouterr().out.partition(" defaults ")[2].partition("note:")[0].split())

    setup.tree["train"] = {"output": str(setup.folder / "out"), "steps": 4}
    setup.tree["lora"] = {"r": 4, "target_modules": ["q_proj"]}
    said = defaults()
    for words in (
        "lora_alpha 8 (LLaMA-Factory: 2 r)",
        "lr 0.0002 (TRL: 2e-05)",
        "batch_size 16 (TRL: 8 a device)",
        "train_on all (TRL: everything, of messages)",
    ):
        assert words in said
    setup.tree["train"] |= {"lr": 2e-4, "batch_size": 16}
    setup.tree["lora"]["lora_alpha"] = 8
    setup.tree["data"]["train_on"] = "all"
    assert defaults() == ""
