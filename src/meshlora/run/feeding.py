"""What a loop of a user's own gives its ranks: which rows (`sampler`), and as which tensors (`collator`).

Owns: each rank's rows of a dataset, in epochs, with a place to resume from; batches of Hugging Face's form that sp and
cp can cut. Does not own: the order of rows (`reading.sampler`), batches of `meshlora train` (`train.batches`).

All ranks have the same number of batches, as their collectives must match. A global batch is that of one process with
`batch_size` times dp rows; tp, sp, cp and ep ranks of one replica have the same rows of it, dp ranks a contiguous part
each. Of a last batch with fewer rows than dp a rank may have none: its batch is `[]`, of which `collator` makes one row
without labels, which adds neither loss nor tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Sampler

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_gather
from meshlora.comm.groups import Mesh
from meshlora.reading.sampler import GlobalBatches
from meshlora.reading.tokenizer import padding_token_id
from meshlora.train.batch import IGNORED
from meshlora.train.collation import cut_length
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology


def sampler(
    model: Any, dataset: Any, *, batch_size: int, seed: int = 0, shuffle: bool = True, drop_last: bool = False
) -> RankSampler:
    """This rank's batches of `dataset`, for a `torch.utils.data.DataLoader`. Collective.

        rows = meshlora.sampler(model, dataset, batch_size=4)
        loader = DataLoader(dataset, batch_sampler=rows, collate_fn=meshlora.collator(model, tokenizer))

    batch_size: rows of each dp rank. seed: of the order, another one in each epoch; shuffle=False: that of the dataset.
    drop_last: leave out the last batch of an epoch if it is smaller than the others; else every row is seen once.

    Raises:
        UserError: a number below 1, or a negative seed; ranks have given others, or have datasets of other lengths.
            UnsupportedError: the dataset has no length.
    """
    if not hasattr(dataset, "__len__"):
        raise UnsupportedError(f"{type(dataset).__name__} in a sampler", "it has no length", "use a dataset with one")
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}", "must be at least 1")
    mesh, number = runtime(model).mesh, len(dataset)
    given = {"len(dataset)": number, "batch_size": batch_size, "seed": seed, "shuffle": shuffle, "drop_last": drop_last}
    own = torch.tensor([*map(int, given.values())], device=mesh.device)
    of_ranks = all_gather(own, mesh.world).view(-1, len(given)).tolist()
    for place, name in enumerate(given):
        found = [row[place] for row in of_ranks]
        if other := [rank for rank, value in enumerate(found) if value != found[0]]:
            what = f"{name}={found[other[0]]} on rank {other[0]}, {found[0]} on rank 0"
            raise UserError(what, "all ranks sample one dataset in one order", "give each rank the same")
    if number < 1 or (drop_last and number < batch_size * mesh.dp.size):
        rule = f"a batch is of {batch_size * mesh.dp.size} rows: batch_size times dp"
        raise UserError(f"a dataset of {number} rows", rule, "give more rows, or drop_last=False")
    batches = GlobalBatches(number, batch_size * mesh.dp.size, seed, shuffles=shuffle)
    return RankSampler(batches, mesh, drops_last=drop_last)


class RankSampler(Sampler[list[int]]):
    """See `sampler`. Each iteration is the rest of an epoch, and the next one begins the next epoch."""

    def __init__(self, batches: GlobalBatches, mesh: Mesh, *, drops_last: bool) -> None:
        self._batches, self._dp, self._drops_last = batches, mesh.dp, drops_last
        self._done = 0  # batches, over all epochs

    def __len__(self) -> int:
        """Batches of an epoch, on every rank."""
        if self._drops_last:
            return self._batches.num_sequences // self._batches.global_batch_size
        return self._batches.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = divmod(self._done, len(self))
        for place in range(first, len(self)):
            self._done = epoch * len(self) + place + 1  # before it is given: a saved state has it behind it
            share = np.array_split(self._rows(epoch, place), self._dp.size)[self._dp.rank]
            yield share.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch `epoch`, counted from 0, unless it has begun."""
        if self._done // len(self) != epoch:
            self._done = epoch * len(self)

    def state_dict(self, *, done: int | None = None) -> dict[str, int]:
        """What `load_state_dict` goes on from, on any mesh with the same global batch.

        done: batches that the loop has used, over all epochs. Give it with workers, which fetch ahead.
        """
        batches = self._batches
        return {
            "done": self._done if done is None else done,
            "rows": batches.num_sequences,
            "global_batch_size": batches.global_batch_size,
            "seed": batches.seed,
            "shuffle": int(batches.shuffles),
            "drop_last": int(self._drops_last),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the batches of `state`. Raises: UserError: it is of another dataset, order or global batch."""
        for name, value in self.state_dict().items():
            if name != "done" and state.get(name) != value:
                given = f"the state of a sampler with {name}={state.get(name)}"
                raise UserError(given, f"this one has {value}", "resume with the sampler that was saved")
        self._done = state["done"]

    def _rows(self, epoch: int, place: int) -> np.ndarray:
        """The rows of a global batch."""
        return self._batches.batch(epoch * self._batches.steps_per_epoch + place)


def collator(model: Any, tokenizer: Any, *, columns: Sequence[str] = ()) -> RankCollator:
    """A `collate_fn` for rows of Hugging Face's form, whose batches go into `model(**batch)` on this mesh.

        loader = DataLoader(dataset, batch_sampler=rows, collate_fn=meshlora.collator(model, tokenizer))

    Rows have `input_ids`, and `labels` of the same length, -100 where untrained; without these all tokens are trained.
    Batches have `input_ids`, `attention_mask` and `labels`, int64 `[B, S]`, not shifted, on the host: filled up on the
    right, and further until sp and cp can cut them. columns: names of what else rows have for each token, such as
    advantages: float32 `[B, S]`, 0 where there is no token.
    """
    pad = padding_token_id(getattr(tokenizer, "tokenizer", tokenizer))  # of a processor its tokenizer
    return RankCollator(runtime(model).mesh.topology, pad, tuple(columns))


@dataclass(frozen=True)
class RankCollator:
    """See `collator`."""

    topology: Topology
    pad_token_id: int
    columns: tuple[str, ...]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Raises UserError: a row has not one label, or one of a column, for each of its tokens."""
        pad, columns, found = self.pad_token_id, self.columns, dict[str, list[Tensor]]()
        dummy = {"input_ids": [pad] * 2, "labels": [IGNORED] * 2, **dict.fromkeys(columns, [0.0] * 2)}
        given = rows or [dummy]
        longest = max(len(row["input_ids"]) for row in given)
        kinds = dict.fromkeys(columns, torch.float32)
        for number, row in enumerate(given):
            length = len(row["input_ids"])
            values = {"labels": row["input_ids"], "attention_mask": [1] * length, **row}
            for name in ("input_ids", "attention_mask", "labels", *columns):
                num_there = len(values[name]) if name in values else "no"
                if num_there != length:
                    rule = "every token of a row has one"
                    raise UserError(f"row {number} of a batch: {num_there} {name} for {length} input_ids", rule)
                own = torch.as_tensor(values[name], dtype=kinds.get(name, torch.int64))
                filler = {"input_ids": pad}.get(name, 0)
                found.setdefault(name, []).append(F.pad(own, (0, longest - length), value=filler))
        batch = {name: torch.stack(each) for name, each in found.items()}
        # Padding of labels is 0 like that of all else, and 0 is a token.
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return fitted(batch, self.topology, pad_token_id=pad)


def fitted(inputs: Mapping[str, Any], topology: Topology, *, pad_token_id: int) -> dict[str, Any]:
    """`inputs` of a model's forward with `[B, S]` filled up on the right until sp and cp can cut them.

    What is added is masked, untrained, and behind all else: with causal attention it changes nothing.
    """
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return dict(inputs)
    multiple = topology.tp if topology.sp else 1
    missing = cut_length(ids.shape[1], parts=topology.cp, multiple=multiple) - ids.shape[1]
    if not missing:
        return dict(inputs)
    filled = {"labels": IGNORED, "shift_labels": IGNORED, "input_ids": pad_token_id}
    found = dict(inputs)
    if "position_ids" not in found:
        found.setdefault("attention_mask", torch.ones_like(ids))
    for name, value in found.items():
        if isinstance(value, Tensor) and value.shape[:2] == ids.shape and value.ndim == 2:
            found[name] = F.pad(value, (0, missing), value=filled.get(name, 0))
    return found
