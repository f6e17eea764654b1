"""Routing of a training run, recorded and replayed: one file for each optimizer step.

Owns: numbering the tokens of a step, the files, and combining the parts of all ranks. Does not own: reading choices
from routers and forcing them (`meshlora.common.routing`).

A token's number is its position among all tokens of the step's sequences, in the order of the global batch: the same on
every topology. Padding has none, and its routing does not matter. In evaluations routers choose freely.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_gather, broadcast_in_place
from meshlora.common.errors import MeshloraError, UserError
from meshlora.common.files import why_not_writable, write_atomically
from meshlora.common.routing import Routing, RoutingRecord
from meshlora.data import Batch, TokenizedDataset
from meshlora.plan.rules import ModelPlan
from meshlora.train.batches import Batching


class RunRouting:
    """Records the choices of a run in a folder, or replays those of another.

    folder: of the files. replays: which of the two.
    """

    def __init__(self, model: Any, data: TokenizedDataset, folder: Path, batching: Batching, *, replays: bool) -> None:
        self.model, self.data, self.folder, self.replays = model, data, folder, replays
        self.mesh, self.plan, self.batching = runtime(model).mesh, runtime(model).plan, batching
        self._tokens: list[list[Tensor]] = []  # of each micro-batch: the token numbers of its rows
        self._routing: Routing | None = None
        self._has_begun = False

    @contextlib.contextmanager
    def step(self, step: int, indices: np.ndarray) -> Iterator[None]:
        """One optimizer step on the sequences `indices` of the global batch. Collective where it records.

        Raises:
            UserError: the step's file is missing, or of another model or batch. MeshloraError: the record cannot be
                written (on all ranks).
        """
        if not self.replays and not self._has_begun:
            self._on_rank_0(lambda: _make_room(self.folder, step))
            self._has_begun = True
        ids = [self.data[int(index)].input_ids for index in indices]
        lengths = list(map(len, ids))
        total = sum(lengths)
        numbers = torch.arange(total).split(lengths)
        self._tokens = [
            [torch.cat([numbers[place] for place in row]) for _, row in part]
            for part in self.batching.rows([(self.data, indices)])
        ]
        experts = {rule.block: rule.num_experts for rule in self.plan.experts.values()}
        digest = _digest(ids)
        record = RoutingRecord(total, experts, digest=digest)
        if self.replays:
            record = RoutingRecord.load(step_file(self.folder, step))
            if (record.num_tokens, record.num_experts) != (total, experts):
                raise UserError(
                    f"{step_file(self.folder, step)}",
                    f"it is of {record.num_tokens} tokens and {len(record.num_experts)} blocks of experts, this step "
                    f"has {total} and {len(experts)}",
                    "replay it on the same data, batch size, seed and model",
                )
            if record.digest != digest:  # the same number of tokens, common under truncation
                raise UserError(
                    f"{step_file(self.folder, step)}",
                    "it is of other tokens than this step has, or of the same in another order",
                    "replay it on the same data, batch size and seed",
                )
        with Routing(self.model, record, replays=self.replays) as routing:
            self._routing, routing.step = routing, step
            try:
                yield
            finally:
                self._routing = None
        if not self.replays:
            self._save(record, step)

    def before(self, number: int, batch: Batch) -> None:
        """Announce that micro-batch `number` of this rank runs next."""
        assert self._routing is not None
        whole = torch.full(tuple(batch.input_ids.shape), -1, dtype=torch.int64)
        for row, tokens in zip(whole, self._tokens[number], strict=False):  # a dummy has a row but no tokens
            row[: len(tokens)] = tokens
        self._routing.tokens = self.mesh.own_tokens(batch.held(whole))

    def _save(self, record: RoutingRecord, step: int) -> None:
        for key in sorted(record.choices):
            every = all_gather(record.choices[key].to(self.mesh.device).unsqueeze(0), self.mesh.world)
            record.choices[key] = every.amax(0).cpu()
        self._on_rank_0(lambda: write_atomically(step_file(self.folder, step), record.save))

    def _on_rank_0(self, write: Callable[[], None]) -> None:
        """Call `write` on rank 0 alone. Collective: a full disk must end every rank, not leave them waiting."""
        failure: OSError | SafetensorError | None = None
        if self.mesh.rank == 0:
            try:
                write()
            except (OSError, SafetensorError) as error:
                failure = error
        is_done = torch.tensor([int(failure is None)], device=self.mesh.device)
        if not broadcast_in_place(is_done, self.mesh.world).item():
            raise MeshloraError(
                f"train.routing_record={self.folder}: it could not be written ({failure or 'see rank 0'})"
            ) from failure


def step_file(folder: Path, step: int) -> Path:
    """The file of optimizer step `step`, from 0; the name counts from 1, as all messages do."""
    return folder / f"step-{step + 1:06d}.safetensors"


def check_routing(folder: Path, *, replays: bool, steps: int, plan: ModelPlan, may_overwrite: bool) -> None:
    """Refuse a record or a replay that would fail, before anything is loaded.

    Raises:
        UserError: the model has no experts; files of steps are missing; a record would overwrite another, or its
            folder is not writable.
    """
    option = f"train.{'routing_replay' if replays else 'routing_record'}={folder}"
    if not plan.experts:
        raise UserError(option, f"{plan.model_type} has no routed experts", "leave it out")
    if not replays:
        parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if not parent.is_dir():
            raise UserError(option, f"{parent} is a file, a folder is needed", "choose another")
        if _step_files(folder) and not may_overwrite:
            raise UserError(option, "it holds a record already", "choose another, or --set train.overwrite=true")
        if why_not_writable(parent):
            raise UserError(option, f"{parent} is not writable", "choose another")
        return
    there = {step for step in _step_files(folder) if step < steps}  # few, however many steps the run has
    if len(there) < steps:
        missing = next(step for step in range(steps) if step not in there)
        raise UserError(
            option,
            f"{step_file(folder, missing).name} is not there ({steps - len(there)} of {steps} steps have no file)",
            "record them with train.routing_record on the same data, batch size and seed",
        )


def _step_files(folder: Path) -> dict[int, Path]:
    """Step, from 0 -> its file, of all files in `folder`."""
    found = ((re.fullmatch(r"step-([0-9]{6,})\.safetensors", file.name), file) for file in folder.glob("step-*"))
    steps = ((int(match[1]) - 1, file) for match, file in found if match)
    return {step: file for step, file in steps if step >= 0 and file == step_file(folder, step) and file.is_file()}


def _make_room(folder: Path, first: int) -> None:
    """Make `folder`, without an earlier run's record of step `first` or later, which would outlast a shorter run's."""
    folder.mkdir(parents=True, exist_ok=True)
    for step, file in _step_files(folder).items():
        if step >= first:
            file.unlink()


def _digest(ids: Sequence[np.ndarray]) -> str:
    """Hash of the global batch: token ids, order and sequence borders; the same on every rank."""
    digest = hashlib.sha256()
    for each in ids:
        digest.update(len(each).to_bytes(8, "little") + each.astype("<i4").tobytes())
    return digest.hexdigest()
