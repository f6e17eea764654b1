"""A run that makes its own rollouts: its checks, and what makes them on a rank.

Does not own: the run (`run.run`), making rollouts (`rl.rollouts`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from meshlora.plan.pairs import check
from meshlora.run.asking import recorded
from meshlora.run.prepared import Prepared
from meshlora.run.texts import Texts
from meshlora.run.trained import TrainedAdapter
from meshlora_extra.engines import served
from meshlora_extra.rl.engine import Engine
from meshlora_extra.rl.prompts import Prompts, read_prompts
from meshlora_extra.rl.rewards import Rewards
from meshlora_extra.rl.rollouts import Generator, OwnGenerator, Publisher, Rollouts, complete_by_engine
from meshlora_ground.console import Console

PUBLISHED = "published"  # in the output


def check_rl(run: Prepared, *, say: Callable[[str], None] | None = None) -> Prompts | None:
    """The prompts of a run with `rl`; None if its rollouts are recorded. say: told what is read.

    Raises:
        UserError: prompts that cannot be used. UnsupportedError: what does not go with making rollouts.
    """
    rl = run.config.rl
    assert rl is not None
    if rl.is_folder:
        return None
    check(run.asked)
    if rl.is_engine or rl.publish_to is not None:
        served(run.blueprint.trained, run.blueprint.plan, "lora")
    return read_prompts(run.config, _texts(run).tokenizer(), run.blueprint.config, say)


def _texts(run: Prepared) -> Texts:
    return Texts(run.config.model, run.config.data, run.config.train.objective)


def check_rewards(run: Prepared, prompts: Prompts | None) -> None:
    """Refuse rewards that could not be computed, before ranks start. Raises: UserError: the reward, and the prompt."""
    assert run.config.rl is not None
    if prompts is not None:
        Rewards(run.config.rl.rewards).check(prompts.prompts)


def making(run: Prepared, prompts: Prompts | None) -> Callable[[TrainedAdapter], None] | None:
    """What sets how the rollouts of `run` are made, for `run.run.train`; None if they are recorded. prompts: of
    `check_rl`.
    """
    rl, tokenizer = run.config.rl, _texts(run).tokenizer()
    assert rl is not None
    if prompts is None:
        return None

    def set_up(one: TrainedAdapter) -> None:
        assert one.followed is not None
        rewards, engine, publisher = None, None, None
        to: str | Path | None = rl.publish_to
        generate: Generator = OwnGenerator(one, rl, tokenizer)
        if one.mesh.rank == 0:  # once: each rank for itself could differ
            rewards = Rewards(rl.rewards)
        if rl.is_engine:
            engine, to = Engine(rl.source, one.run.config.train.timeout_s), to or one.output / PUBLISHED
            generate = functools.partial(complete_by_engine, one, rl, engine)
        if to:
            publisher = Publisher(one, Path(to), engine, rl.adapter_name)
        rollouts = Rollouts(one, rl, prompts, generate, rewards, tokenizer, publisher)
        one.followed.make, one.followed.check = rollouts.make, rollouts.check
        one.asking = recorded(prompts.form, one.run.config.data, tokenizer)

    return set_up


def describe(run: Prepared, prompts: Prompts | None, console: Console) -> None:
    rl = run.config.rl
    assert rl is not None
    if prompts is None:
        console.say(f"rollouts: recorded in {rl.source}")
        return
    worth = "a teacher says what they are worth"
    if rl.rewards:
        worth = "rewards: " + ", ".join(f"{one.kind} x {one.weight:g}" for one in rl.rewards)
    source = rl.source
    if rl.is_own:
        source = "this model"
    console.say(
        f"rollouts: {len(prompts.prompts):,} prompts, {prompts.per_step} a step with {rl.completions} completions "
        f"each, from {source}; {worth}"
    )
