"""Routing of a training run: recorded and replayed, one file for each optimizer step; or replayed from rollouts that
say the experts of each token.

Owns: numbering the tokens of a step, the files, and combining the parts of all ranks. Does not own: reading choices
from routers and forcing them (`meshlora_ground.routing`), rollouts (`reading.rollouts`).

A token's number is its position among all tokens of the step's sequences, in the order of the global batch: the same on
every topology. Padding has none, and its routing does not matter. In evaluations routers choose freely, and so does the
frozen base: it is another policy, whose experts nobody has recorded.
"""

from __future__ import annotations

import contextlib
import functools
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
from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora.train.batch import Batch
from meshlora.train.batches import Batching
from meshlora.train.step_part import StepPart
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import MeshloraError, UserError
from meshlora_ground.files import why_not_writable, write_atomically
from meshlora_ground.routing import Routing, RoutingRecord


class RunRouting(StepPart):
    """Records the choices of a run in a folder, or replays those of another, or those that its data say.

    folder: of the files; None: of data that say them. replays: which of the two.
    """

    def __init__(self, model: Any, folder: Path | None, batching: Batching, *, replays: bool) -> None:
        self.model, self.folder, self.replays = model, folder, replays
        self.mesh, self.plan, self.batching = runtime(model).mesh, runtime(model).plan, batching
        self._tokens: list[list[Tensor]] = []  # of each micro-batch: the token numbers of its rows
        self._routing: Routing | None = None
        self._has_begun = False

    @contextlib.contextmanager
    def step(self, step: int, data: TokenizedDataset, indices: np.ndarray) -> Iterator[None]:
        """One optimizer step on the sequences `indices` of `data`, the global batch. Collective where it records.

        Raises:
            UserError: the step's file is missing, or of another model or batch; experts in `data` that this model does
                not have. MeshloraError: the record cannot be written (on all ranks).
        """
        if self.folder is None and data.routed is None:
            yield
            return
        if self.folder is not None and not self.replays and not self._has_begun:
            self._on_rank_0(functools.partial(_make_room, self.folder, step))
            self._has_begun = True
        ids = [data[int(index)].input_ids for index in indices]
        lengths = list(map(len, ids))
        total = sum(lengths)
        numbers = torch.arange(total).split(lengths)
        self._tokens.clear()
        for part in self.batching.rows([(data, indices)]):
            self._tokens.append([])
            for _, row in part:  # several sequences in a packed one
                self._tokens[-1].append(torch.cat([numbers[place] for place in row]))
        experts = {rule.block: rule.num_choices for rule in self.plan.experts.values()}
        digest = _digest(ids)
        record = RoutingRecord(total, experts, digest=digest)
        if self.folder is None:
            record = self._of_data(data, indices, step, record)
        elif self.replays:
            file = f"{step_file(self.folder, step)}"
            record = RoutingRecord.load(Path(file))
            if (record.num_tokens, record.num_experts) != (total, experts):
                of_record = f"it is of {record.num_tokens} tokens and {len(record.num_experts)} blocks of experts"
                rule = f"{of_record}, this step has {total} and {len(experts)}"
                raise UserError(file, rule, "replay it on the same data, batch size, seed and model")
            if record.digest != digest:  # the same number of tokens, common under truncation
                rule = "it is of other tokens than this step has, or of the same in another order"
                raise UserError(file, rule, "replay it on the same data, batch size and seed")
        with Routing(self.model, record, replays=self.replays) as routing:
            self._routing, routing.step = routing, step
            try:
                yield
            finally:
                self._routing = None
        if not self.replays:
            self._save(record, step)

    def _of_data(self, data: TokenizedDataset, indices: np.ndarray, step: int, record: RoutingRecord) -> RoutingRecord:
        """`record` with the experts that `data` say. Tokens whose experts are not known lose their numbers."""
        assert data.routed is not None
        columns = check_routed(data.routed, self.plan)
        routed = np.concatenate([data.routed[data.offsets[index] : data.offsets[index + 1]] for index in indices])
        for block, column in columns.items():
            record.choices[step, block] = torch.from_numpy(routed[:, column].astype(np.int32))
        is_known = torch.from_numpy((routed >= 0).all((1, 2)))
        for rows in self._tokens:
            rows[:] = [torch.where(is_known[row], row, -1) for row in rows]
        return record

    def off(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block routers choose freely, and nothing is recorded."""
        if self._routing is None:
            return contextlib.nullcontext()
        return self._routing.off()

    def before(self, number: int, batch: Batch) -> None:
        """Announce that micro-batch `number` of this rank runs next."""
        if self._routing is None:  # these data do not say their experts
            return
        whole = torch.full(tuple(batch.input_ids.shape), -1, dtype=torch.int64)
        for row, tokens in zip(whole, self._tokens[number], strict=False):  # a dummy has a row but no tokens
            row[: len(tokens)] = tokens
        self._routing.tokens = self.mesh.own_tokens(batch.held(whole))

    def _save(self, record: RoutingRecord, step: int) -> None:
        assert self.folder is not None
        file = step_file(self.folder, step)
        for key in sorted(record.choices):
            every = all_gather(record.choices[key].to(self.mesh.device).unsqueeze(0), self.mesh.world)
            record.choices[key] = every.amax(0).cpu()  # -1 on ranks that do not have the token
        self._on_rank_0(lambda: write_atomically(file, record.save))

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
    option = f"train.routing_record={folder}"
    if replays:
        option = f"train.routing_replay={folder}"
    if not plan.experts:
        raise UserError(option, f"{plan.model_type} has no routed experts", "leave it out")
    if not replays:
        parent = folder
        while not parent.exists():  # it is made when the run begins
            parent = parent.absolute().parent
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
        rule = f"{step_file(folder, missing).name} is not there ({steps - len(there)} of {steps} steps have no file)"
        raise UserError(option, rule, "record them with train.routing_record on the same data, batch size and seed")


def check_routed(routed: np.ndarray, plan: ModelPlan) -> dict[str, int]:
    """Block of experts -> its layer in `routed`, int16 `[N, L, k]`: of the layers with experts, or of all.

    Raises:
        UserError: the model has no experts, or another number of layers, or they are no experts of it.
        UnsupportedError: stages of layers.
    """
    option = "routed_experts of the data"
    check({"topology": plan.topology, option: True})
    if not plan.experts:
        raise UserError(option, f"{plan.model_type} has no routed experts", "leave them out")
    layers = {}
    for experts in plan.experts.values():
        number_in_name = re.findall(r"\d+", experts.block.removeprefix(plan.layers))[0]
        layers[experts.block] = int(number_in_name)
    ordered = sorted(layers, key=lambda block: layers[block])
    number = routed.shape[1]
    columns = layers
    if number <= len(ordered):  # of the layers with experts alone
        columns = {block: column for column, block in enumerate(ordered)}
    if number < len(ordered) or max(columns.values()) >= number:
        rule = f"they are of {number} layers, and {len(ordered)} of {plan.model_type} have experts"
        raise UserError(option, rule, "give those of the model that is trained")
    for experts in plan.experts.values():
        own = routed[:, columns[experts.block]]
        # Rows of -1 are of tokens whose experts nobody knows.
        if own.shape[1] > 1 and bool((np.diff(np.sort(own), axis=1) == 0)[own[:, 0] >= 0].any()):
            rule = "a token goes to one expert twice"
            raise UserError(f"{option}, {experts.block}", rule, "are they of this engine?")
        if own.max(initial=-1) >= experts.num_choices:
            given = f"{option}, {experts.block}: expert {own.max()}"
            raise UserError(given, f"there are {experts.num_choices}", "give those of the model that is trained")
    return columns


def _step_files(folder: Path) -> dict[int, Path]:
    """Step, from 0 -> its file, of all files in `folder`."""
    found = {}
    for file in folder.glob("step-*"):
        match = re.fullmatch(r"step-([0-9]{6,})\.safetensors", file.name)
        if match is None:
            continue
        step = int(match[1]) - 1
        # "step-0000001" and "step-000000" are names of no step.
        if step >= 0 and file == step_file(folder, step) and file.is_file():
            found[step] = file
    return found


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
