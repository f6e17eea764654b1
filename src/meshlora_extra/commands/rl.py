"""`meshlora rl`: its arguments. A training (`cli.train`) that makes the rollouts it trains on (`meshlora_extra.rl`)."""

from __future__ import annotations

from typing import Any

from meshlora.cli.train import add_training


def add(commands: Any) -> None:
    rl = commands.add_parser(
        "rl",
        help="reinforcement learning: make rollouts, reward them, train on them",
        description="Each step generates completions of prompts, computes their rewards, and trains on them, as the "
        "groups rl and train of the run file say. The rollouts are kept in OUTPUT/rollouts, a file a step.",
    )
    add_training(rl, command="rl")
