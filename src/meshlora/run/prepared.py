"""A prepared run: what training, proving and reporting know of a run that passed every check.

Owns: its fields, and how later steps add to them. Does not own: the checks that make it (`run.prepare`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from meshlora.loading.blueprint import Blueprint
from meshlora.plan.features import Asked
from meshlora.plan.rules import ModelPlan
from meshlora.reading.sampler import GlobalBatches
from meshlora.run.answers import Answers
from meshlora.run.checkpoint.identity import Contents
from meshlora.run.checkpoint.manifest import Saved
from meshlora.run.checkpoint.resuming import GoingOn
from meshlora.run.config.run_file import RunConfig
from meshlora.run.watch.samples import Samples
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.slow_paths import SlowPath
from meshlora_ground.topology import Topology


@dataclass(frozen=True)
class Prepared:
    """A run that passed every check.

    Attributes:
        blueprint: the model, its split and the adapter.
        identity: what its steps depend on, by name. The content of `files` is included only once it had to be read.
        resumes: `--resume` was given. resume: the checkpoint to resume from, if any.
        is_finished: all its steps are done already. samples: prompts that are continued at intervals.
        answers: prompts whose answers evaluations measure.
        notes: messages for the user. slow_paths: those known before it starts.
        command: what trains the whole run. proof: what is proved of it, in words.
        chat_template: the text of `data.chat_template`, as it was when the data were read; None if it is not given.
        asking: how its data ask the model (`run.asking.recorded`).
        stop_tokens: at which the model stops beside those that it says itself.
    """

    config: RunConfig
    blueprint: Blueprint
    pad_token_id: int
    train_data: TokenizedDataset
    eval_data: TokenizedDataset | None
    steps: int
    identity: Mapping[str, str] = field(default_factory=dict)
    files: Contents = field(default_factory=dict)
    resumes: bool = False
    resume: Saved | None = None
    is_finished: bool = False
    samples: Samples | None = None
    answers: Answers | None = None
    notes: tuple[str, ...] = ()
    slow_paths: tuple[SlowPath, ...] = ()
    command: str = ""
    proof: str = ""
    chat_template: str | None = None
    asking: Mapping[str, str] = field(default_factory=dict)
    stop_tokens: tuple[str, ...] = ()

    @property
    def plan(self) -> ModelPlan:
        """How the model is split."""
        return self.blueprint.plan

    @property
    def topology(self) -> Topology:
        """The topology of the plan."""
        return self.blueprint.topology

    @property
    def asked(self) -> Asked:
        """What is asked for: see `plan.features`."""
        config = {**self.config.asked, "generate.metrics": self.config.generate.metrics}
        return asked_of(config, self.blueprint, self.train_data, self.eval_data)

    @property
    def eval_every(self) -> int:
        """Steps between evaluations; 0: only at the end."""
        return _whole(self.config.train.eval_every)

    @property
    def save_every(self) -> int:
        """Steps between checkpoints; 0: only at the end."""
        return _whole(self.config.train.save_every)

    @property
    def start_step(self) -> int:
        """Steps done before this run."""
        return 0 if self.resume is None else self.resume.step

    @property
    def start(self) -> Blueprint:
        """The blueprint with the initial adapter: the checkpoint's, if the run resumes."""
        return self.blueprint if self.resume is None else self.blueprint.with_folder(self.resume.folder)

    @property
    def batches(self) -> GlobalBatches:
        """The global order of the training examples, where they are known before the run."""
        data, train = self.train_data, self.config.train
        return GlobalBatches(
            data.num_examples, train.batch_size, train.seed, data.parts, shuffles=self.config.data.shuffle
        )

    def described(self, notes: Iterable[str], *, command: str, proof: str) -> Prepared:
        """The run with what trains it, what is proved of it, and `notes` before its own."""
        return replace(self, notes=(*notes, *self.notes), command=command, proof=proof)

    def going_on(self, found: GoingOn) -> Prepared:
        """The run as `--resume` goes on with it."""
        return replace(
            self,
            identity=found.identity,
            resumes=True,
            resume=found.resume,
            is_finished=found.is_finished,
            notes=tuple(dict.fromkeys((*self.notes, *found.notes))),
        )

    def with_contents(self, hashes: Mapping[str, str]) -> Prepared:
        """The run with the content of its files in its identity."""
        return replace(self, identity={**self.identity, **hashes})  # paths are no part of it

    def on(self, topology: Topology) -> Prepared:
        """The same run on another topology, for a proof of it."""
        return replace(self, blueprint=self.blueprint.on(topology))


def _whole(steps: int | str) -> int:
    assert isinstance(steps, int), steps  # `run.length` has made steps of parts of an epoch
    return steps


def asked_of(asked: Asked, blueprint: Blueprint, train: TokenizedDataset, held_out: TokenizedDataset | None) -> Asked:
    """What is asked for, as far as a run file (`asked`), its model with the adapter and its data say it."""
    each = [data for data in (train, held_out) if data is not None]
    return {
        **asked,
        **blueprint.asked,
        "train.objective": asked["train.objective"],
        "images": any(data.images is not None for data in each),
        "routed_experts of the data": train.routed is not None,
    }
