"""Making the rollouts of a step: prompts, completions, rewards, and the records of a stream.

Owns: what is made when, and the fields of a record. Does not own: the prompts (`rl.prompts`), generation
(`run.generated`, `rl.engine`), rewards (`rl.rewards`), the stream (`reading.stream`), the step (`run.trainer`).

Everything is a function of the adapter and the number of the step, on any mesh: a run that was stopped makes the same
rollouts again, or finds them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from meshlora.adapter.formats.peft_format import save_adapter
from meshlora.comm.collectives import all_reduce_sum, broadcast_text
from meshlora.reading.stream import FAILED
from meshlora.run.config.rl import RlConfig
from meshlora.run.config.run_file import GenerateConfig
from meshlora.run.decoding import Continuation, ends_of, texts_of
from meshlora.run.generated import continued_by_all
from meshlora.run.trained import TrainedAdapter
from meshlora.train.losses import batch_log_probabilities
from meshlora_extra.rl.engine import Engine
from meshlora_extra.rl.prompts import Prompt, Prompts
from meshlora_extra.rl.publishing import publish, remove_older
from meshlora_extra.rl.rewards import Completion, Rewards, Scored
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import MeshloraError, UserError
from meshlora_ground.float64 import lift
from meshlora_ground.topology import LAYERS, SEQUENCES

_SAVED = ".publishing"  # in the output, while the adapter is on its way
_KEPT = 3  # published versions: one that is still being read is among them
# The mean of |log p when generating - log p when training| over a step, above which these are two policies. Rounding
# is far below; in float16 and bfloat16 it is not, and nothing is concluded.
_LARGEST_GAP = {torch.float64: 1e-6, torch.float32: 1e-3}
_ROUNDING = 1e-6  # of a mean over each sequence


# Who continues prompts: (prompts, of which some are given several times; step) -> a completion of each. Collective: the
# same on all ranks.
Generator = Callable[[Sequence[Prompt], int], list[Continuation]]


@dataclass
class Rollouts:
    """Makes the rollouts of a run whenever the stream of `one` lacks a step's. `make` is called on every rank.

    rewards: on rank 0; None on the others, which read what it wrote.
    """

    one: TrainedAdapter
    config: RlConfig
    prompts: Prompts
    generate: Generator
    rewards: Rewards | None
    tokenizer: PreTrainedTokenizerBase
    publish: Publisher | None = None

    def make(self, step: int) -> None:
        """Make those of `step`, from 1, and of all updates on that generation. Raises: UserError: a reward fails."""
        assert self.one.followed is not None
        stream, (number, later) = self.one.followed.stream, divmod(step - 1, self.config.updates)
        if later:  # the policy that acted is no longer there to be asked
            rule = f"the file is missing, and was made together with {stream.file(step - later).name}"
            way_out = f"remove that one, too, and go on from a checkpoint of at most {step - 1 - later} steps"
            raise UserError(f"{stream.file(step)}", rule, way_out)
        if self.publish is not None and self.publish.steps is None:  # this process has not yet
            self.publish(step - 1)
        chosen = self.prompts.of_round(number)
        if share_of(self.one.run.config.train.seed, step) >= self.config.on_policy:
            if self.rewards is not None:
                stream.write(step, [{**(prompt.whole or {}), "origin": prompt.origin} for prompt in chosen])
            return
        asked: list[Prompt] = []
        for prompt in chosen:
            asked += [prompt] * self.config.completions
        records: list[dict[str, Any]] = []
        with self.one.reporter.doing("rollouts"):
            said = self.generate(asked, step)
            if self.rewards is not None:
                records = self._records(asked, said, step)
        old: list[list[float]] = []
        needs_old = self.config.updates > 1 and self.one.objective.is_of_rollouts
        if needs_old:  # all ranks, as it is collective
            pairs = [(prompt.ids, each.tokens) for prompt, each in zip(asked, said, strict=True)]
            old = trainer_log_probs(self.one, pairs)
        if self.rewards is not None:
            later_ones = records
            if needs_old:
                later_ones = [each | {"old_log_probs": own} for each, own in zip(records, old, strict=True)]
            for other in range(step + 1, step + self.config.updates):
                stream.write(other, later_ones)
            stream.write(step, records)  # last: whoever finds it finds the others

    def _records(self, asked: Sequence[Prompt], said: Sequence[Continuation], step: int) -> list[dict[str, Any]]:
        assert self.rewards is not None
        options = GenerateConfig(stop=self.config.stop)  # texts end where generation stopped
        texts = texts_of([each.tokens for each in said], self.tokenizer, options)
        given = [
            Completion(prompt.text, text, prompt.fields, prompt.origin)
            for prompt, text in zip(asked, texts, strict=True)
        ]
        scored = self.rewards(given)
        self._tell(step, scored, said)
        adapter_steps: int | None = step - 1
        if self.publish is not None and not self.config.is_own:
            adapter_steps = self.publish.steps  # an engine has what was published last
        records = []
        for place, (prompt, each, text, score) in enumerate(zip(asked, said, texts, scored, strict=True)):
            record: dict[str, Any] = {
                "input_ids": [*prompt.ids, *each.tokens],
                "is_trained": [0] * len(prompt.ids) + [1] * len(each.tokens),
                "engine_log_probs": each.log_probs,
                "truncated": each.is_truncated,
            }
            if each.routed_experts is not None:
                record["routed_experts"] = each.routed_experts
            record["said"] = text
            if self.config.rewards:
                group = place // self.config.completions
                record |= {"reward": score.total, "group": group, "parts": dict(score.parts)}
            if score.failed:
                record[FAILED] = list(score.failed)
            records.append(record | {"origin": prompt.origin, "adapter_steps": adapter_steps})
        return records

    def _tell(self, step: int, scored: Sequence[Scored], said: Sequence[Continuation]) -> None:
        """One line about a generation. A group of equal rewards teaches nothing."""
        length = sum(len(each.tokens) for each in said) / len(said)
        if not self.config.rewards:
            self.one.reporter.say(f"rollouts of step {step}: {len(said)} completions, {length:.1f} tokens each")
            return
        totals = torch.tensor([each.total for each in scored], dtype=torch.float64)
        groups = totals.view(-1, self.config.completions)
        num_of_use = int((groups != groups[:, :1]).any(1).sum())  # advantages of equal rewards are 0
        self.one.reporter.say(
            f"rollouts of step {step}: reward {totals.mean():.3f} ± {totals.std():.3f}, which differs within "
            f"{num_of_use} of {len(groups)} groups; {length:.1f} tokens each"
        )
        if num_failed := sum(bool(each.failed) for each in scored):
            self.one.reporter.say(f"step {step}: {num_failed} of {len(scored)} completions could not be judged: 0 each")

    def check(self, step: int, means: Mapping[str, float]) -> None:
        """After a step: publish the adapter if it is due. Was the step on policy, and did the policy that is trained
        generate it?

        Raises:
            MeshloraError: the policy that generated was another one.
        """
        is_last = step == self.one.run.steps
        if self.publish is not None and (step % self.config.publish_every == 0 or is_last):
            self.publish(step)
        if (step - 1) % self.config.updates:  # later updates are off policy, and may differ
            return
        if math.isnan(means.get("ratio", means.get("divergence", 0.0))):  # the step was left out
            return
        if self.one.objective.is_of_rollouts:
            rounding = 0.0 if self.one.objective.per == "token" else _ROUNDING
            assert abs(means["ratio"] - 1.0) <= rounding, f"step {step}: the first ratio is {means['ratio']!r}"
        elif "engine_gap" not in means:  # completions of the data
            return
        most = _LARGEST_GAP.get(self.one.model.dtype)
        is_same = self.config.is_own and self.config.temperature == 1.0
        if is_same and most is not None and not means["engine_gap"] <= most:
            raise MeshloraError(
                f"step {step}: the log-probabilities of what was generated and of what is trained are "
                f"{means['engine_gap']:.1e} apart on average, where rounding is below {most:.0e}: the adapter that "
                "generated is not the one that is trained"
            )


@dataclass
class Publisher:
    """Publishes the adapter of `one` in `to`, and lets `engine` load it, if there is one. Every rank calls it.

    steps: of the adapter that was published last; None: none was.
    """

    one: TrainedAdapter
    to: Path
    engine: Engine | None
    name: str
    steps: int | None = None

    def __call__(self, steps: int) -> None:
        """Publish the adapter after `steps` steps. Raises: UserError: the folder, or the engine, refuses it."""
        saved = self.one.output / _SAVED
        with self.one.reporter.doing("publish"):
            with self.one.in_use():
                save_adapter(self.one.model, saved)
            if self.one.mesh.rank == 0:
                blueprint = self.one.run.blueprint
                version = publish(  # a path of its own: engines cache by path
                    saved, self.to, name=f"step-{steps:06d}", model_and_plan=lambda: (blueprint.model, blueprint.plan)
                )
                if self.engine is not None:
                    self.engine.load_adapter(self.name, version)
                remove_older(self.to, _KEPT)
                shutil.rmtree(saved, ignore_errors=True)
        self.steps = steps


def complete_by_engine(
    one: TrainedAdapter, config: RlConfig, engine: Engine, prompts: Sequence[Prompt], step: int
) -> list[Continuation]:
    """A `Generator`, but for the first three: an engine, which serves the published adapter. Rank 0 asks it."""
    said = ""
    if one.mesh.rank == 0:
        found = engine.complete(
            config.adapter_name,
            [prompt.ids for prompt in prompts[:: config.completions]],
            vocab_size=one.run.blueprint.config.get_text_config().vocab_size,
            n=config.completions,
            max_tokens=config.max_new_tokens,
            temperature=config.temperature,
            stop=config.stop,
            seed=seed_of(one.run.config.train.seed, step),
        )
        every = itertools.chain.from_iterable(found)
        said = json.dumps([(each.tokens, each.log_probs, each.routed_experts, each.is_truncated) for each in every])
    of_all = broadcast_text(said, one.mesh.world, one.mesh.device)
    return [Continuation(*each) for each in json.loads(of_all)]


@dataclass(frozen=True)
class OwnGenerator:
    """The model that is trained, on its own mesh."""

    one: TrainedAdapter
    config: RlConfig
    tokenizer: PreTrainedTokenizerBase

    def __call__(self, prompts: Sequence[Prompt], step: int) -> list[Continuation]:
        options = GenerateConfig(
            max_new_tokens=self.config.max_new_tokens,
            stop=self.config.stop,
            do_sample=True,
            temperature=self.config.temperature,
            batch_size=self.config.batch_size,
            seed=seed_of(self.one.run.config.train.seed, step),
        )
        with self.one.in_use():
            found = continued_by_all(
                self.one.model, self.tokenizer, [prompt.ids for prompt in prompts], options, log_probs=True
            )
        return [dataclasses.replace(each, is_truncated=self.is_truncated(each, options)) for each in found]

    def is_truncated(self, said: Continuation, options: GenerateConfig) -> bool:
        """Whether only the largest length has ended a continuation."""
        if len(said.tokens) < options.max_new_tokens or said.tokens[-1] in ends_of(self.tokenizer, options):
            return False
        text = self.tokenizer.decode(said.tokens, skip_special_tokens=True)
        return not any(stop in text for stop in options.stop)


def seed_of(seed: int, step: int) -> int:
    """The seed of a step's generation: far from those of other steps, from which batches count on."""
    return int.from_bytes(hashlib.sha256(f"rollouts {seed} {step}".encode()).digest()[:7], "big")


def share_of(seed: int, step: int) -> float:
    """A number in [0, 1) that says whether a step is on policy: the same on all ranks, and when a run goes on."""
    return int.from_bytes(hashlib.sha256(f"on policy {seed} {step}".encode()).digest()[:7], "big") / 2**56


@torch.no_grad()
def trainer_log_probs(one: TrainedAdapter, said: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
    """The log-probabilities of the tokens of each completion under the adapter as it is, as a step computes them.
    said: (tokens of the prompt, of the completion) of each. Collective.
    """
    ids = [np.array([*prompt, *tokens], np.int32) for prompt, tokens in said]
    trained = [np.arange(len(each)) >= len(prompt) for each, (prompt, _) in zip(ids, said, strict=True)]
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    step = (TokenizedDataset(np.concatenate(ids), np.concatenate(trained), offsets), np.arange(len(said)))
    # A row of its own for each, so that its place is known.
    batching = dataclasses.replace(one.batching, row_length=None, joins=False)
    # Of all completions; each dp rank fills its own.
    table = torch.zeros(len(said), max(len(tokens) for _, tokens in said), dtype=torch.float64, device=one.mesh.device)
    with lift(one.model.dtype == torch.float64):
        for rows, micro in zip(batching.rows([step]), batching.micro_batches([step]), strict=True):
            found = batch_log_probabilities(one.model, micro.batch)
            for row, (_, (place, *_)) in enumerate(rows):  # joins=False: one sequence a row
                own = found[row][micro.batch.labels[row] >= 0]  # trained tokens alone
                table[place, : len(own)] = own
    table = all_reduce_sum(table, one.mesh.over(SEQUENCES | LAYERS))  # exact: all but one rank add zeros
    return [row[: len(tokens)].tolist() for row, (_, tokens) in zip(table, said, strict=True)]
