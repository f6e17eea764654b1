"""Where each rank's part belongs in the whole: the judge's own view of sharding, from shapes and tokens alone.

Owns: the canonical order of tokens, and the pieces that a whole tensor is made of. Nothing here knows the plan: a dim
that is shorter than the reference's is split, in the way in which the rank's weights are; a rank that holds 1/tp of the
tokens has the next slice of them; and a sequence is known by its tokens, not by who was meant to take it.

Canonical: all real tokens of all sequences of a step, one after another, `[T, ...]`; padding is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshlora.oracle.capture import MicroBatchCapture, spans
from meshlora.oracle.experts import stack_of
from meshlora.oracle.ownership import places
from meshlora.oracle.trace import Trace
from meshlora.plan.topology import Topology


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a tensor.

    Attributes:
        rank: who. copy: pieces of the same copy together must be the whole tensor.
        values: what it holds. rows: the rows of the whole that these are; None: all.
        dim: the dim that is split; None: not split. index: which of the whole's entries along it these are.
    """

    rank: int
    copy: tuple[int, ...]
    values: Tensor
    rows: Tensor | None = None
    dim: int | None = None
    index: Tensor | None = None

    def of(self, whole: Tensor) -> Tensor:
        """The part of `whole` that this piece should equal."""
        return self.along(whole if self.rows is None else whole[self.rows])

    def along(self, whole: Tensor) -> Tensor:
        """The entries of `whole`, or of rows of it, that these are along the dim that is split."""
        return whole if self.dim is None or self.index is None else whole.index_select(self.dim, self.index)

    @property
    def start(self) -> int:
        """The first of the entries along the dim that is split."""
        return int(self.index[0]) if self.index is not None and len(self.index) else 0


class ShapeError(ValueError):
    """A rank's tensor cannot be a part of the reference's."""


@dataclass(frozen=True)
class Layout:
    """How tokens lie in an output: `[B, S, ...]` or flat `[B*S, ...]`; swapped `[B, x, S, ...]`; once `[1, S, ...]`."""

    num_token_dims: int
    is_swapped: bool = False
    is_once: bool = False


def layout_of(shape: torch.Size, micro: MicroBatchCapture) -> Layout | None:
    """The layout of an output of the reference on `micro`; None where its dims are not those of tokens."""
    b, s = micro.input_ids.shape
    if shape[:2] == (b, s):
        return Layout(2)
    if shape[:1] == (b * s,):
        return Layout(1)
    if len(shape) > 2 and shape[:2] == (1, s):
        return Layout(2, is_once=True)
    if len(shape) > 3 and (shape[0], shape[2]) == (b, s):
        return Layout(2, is_swapped=True)
    return None


class Tokens:
    """The canonical order of a step's tokens, from the reference's micro-batches.

    Attributes:
        sequences: the token ids of each; no two are alike. index: the way back.
        offsets: where each sequence begins.
    """

    def __init__(self, reference: Trace) -> None:
        self.sequences: list[tuple[int, ...]] = [s for m in reference.micro_batches for s in sequences_of(m)]
        self.offsets = [0]
        for sequence in self.sequences:
            self.offsets.append(self.offsets[-1] + len(sequence))
        self.index = {sequence: index for index, sequence in enumerate(self.sequences)}
        assert len(self.index) == len(self.sequences), "the sequences of a case differ from each other"

    def rows(self, micros: Iterable[MicroBatchCapture]) -> list[Tensor]:
        """For each micro-batch the canonical row of each of its B·S tokens, -1 where it is none: int64 `[B*S]`."""
        result = []
        for micro in micros:
            rows = torch.full(micro.input_ids.shape, -1, dtype=torch.int64)
            for row, start, sequence in spans(micro.input_ids, micro.attention_mask):
                if sequence in self.index:
                    here = torch.arange(len(sequence)) + self.offsets[self.index[sequence]]
                    rows[row, start : start + len(sequence)] = here
            result.append(rows.flatten())
        return result


def sequences_of(micro: MicroBatchCapture) -> list[tuple[int, ...]]:
    """The token ids of each sequence, without padding."""
    return [sequence for _, _, sequence in spans(micro.input_ids, micro.attention_mask)]


def most_in_a_row(micro: MicroBatchCapture) -> int:
    """The most sequences that a row holds."""
    return max(Counter(row for row, _, _ in spans(micro.input_ids, micro.attention_mask)).values(), default=0)


def canonical(reference: Trace, tokens: Tokens, phase: str, name: str) -> tuple[Tensor, Layout] | None:
    """The reference's output `name` as `[T, ...]` and how its tokens lay; None where it has no token dims."""
    layouts, parts, rows = set(), [], tokens.rows(reference.micro_batches)
    for micro, row in zip(reference.micro_batches, rows, strict=True):
        value = getattr(micro, phase).get(name)
        layout = None if value is None else layout_of(value.shape, micro)
        if value is None or layout is None:
            return None
        layouts.add(layout)
        parts.append(flat_tokens(value, layout, micro)[row >= 0])
    if any(layout.is_once for layout in layouts):  # with one sequence in a micro-batch [B, S] looks like [1, S]
        layouts = {Layout(2, is_once=True)}
    if len(layouts) > 1 or len({part.shape[1:] for part in parts}) > 1:  # attention probabilities are [B, H, S, S]
        return None
    whole = torch.cat(parts)
    order = torch.argsort(torch.cat([row[row >= 0] for row in rows]))
    return whole[order], layouts.pop()


def flat_tokens(value: Tensor, layout: Layout, micro: MicroBatchCapture) -> Tensor:
    """`[B*S, ...]` or this rank's slice of the tokens, `[B*S/tp, ...]`."""
    if layout.is_swapped:
        value = value.movedim(2, 1)
    if layout.is_once and value.shape[0] == 1:
        value = value.expand(micro.input_ids.shape[0], *value.shape[1:])
    return value.flatten(0, 1) if layout.num_token_dims == 2 else value


class Ownership:
    """Which entries along a split dim a rank holds: by the rows and columns of its weights, else by counting."""

    def __init__(self, ranks: list[Trace], reference: Trace, topology: Topology) -> None:
        self.ranks, self.reference, self.topology = ranks, reference, topology

    def is_of_experts(self, module: str) -> bool:
        """Whether `module` is a projection of experts with an adapter, or that of a single one."""
        return stack_of(module) in self.reference.stacks

    def copy_of(self, rank: int, module: str, *, is_split: bool) -> tuple[int, ...]:
        """Which copy of a parameter in `module` rank `rank` holds, or holds a part of."""
        is_of_experts = self.is_of_experts(module)
        place = (self.topology.expert_coordinates if is_of_experts else self.topology.coordinates)(rank)
        if is_split:
            del place["etp" if is_of_experts else "tp"]
        if is_of_experts and module not in self.reference.stacks:
            del place["ep"]
        return tuple(place.values())

    def one_of(self, rank: int, projection: str) -> str:
        """One expert of those that a rank holds of `projection`."""
        return next((name for name in self.ranks[rank].rows if stack_of(name) == projection), projection)

    def index(self, rank: int, module: str, kind: str, local: int, whole: int, what: str) -> Tensor:
        """The entries, -1 for padding. kind: "rows" or "columns" of the weight of `module`; "": of nothing known.

        Raises:
            ShapeError: `local` entries cannot be a rank's part of `whole`.
        """
        tp_rank, tp = self.topology.coordinates(rank)["tp"], self.topology.tp
        if self.is_of_experts(module):
            tp_rank, tp = self.topology.expert_coordinates(rank)["etp"], self.topology.etp
        prints = getattr(self.ranks[rank], kind, {}).get(module) if kind else None
        every = getattr(self.reference, kind, {}).get(module) if kind else None
        if prints is not None and every is not None and (len(prints), len(every)) == (local, whole):
            found = places(prints, every, rank=tp_rank, size=tp)
            if found is not None:
                return found
        if local * tp == whole:
            return torch.arange(local) + tp_rank * local
        if local < whole < local * tp and whole % local == 0 and tp % (whole // local) == 0:
            return torch.arange(local) + tp_rank * (whole // local) // tp * local  # several ranks hold the same
        raise ShapeError(f"{what}: {local} of {whole} entries are not a part of it on {tp} ranks")


def token_pieces(
    ranks: list[Trace],
    rows: list[list[Tensor]],
    ownership: Ownership,
    phase: str,
    name: str,
    whole: Tensor,
    layout: Layout,
) -> list[Piece]:
    """What the ranks hold of the module output `name`; `rows[rank]` is `Tokens.rows` of the rank's micro-batches.

    Raises:
        ShapeError: a rank has no such output, or one of a shape that cannot be a part.
    """
    pieces, topology = [], ownership.topology
    for rank, trace in enumerate(ranks):
        place = topology.coordinates(rank)
        for micro, row in zip(trace.micro_batches, rows[rank], strict=True):
            value = getattr(micro, phase).get(name)
            if value is None:
                raise ShapeError(f"rank {rank} has no {phase} of {name or 'the model'}")
            flat = flat_tokens(value, layout, micro)
            own, is_cut = row, False
            if flat.shape[0] != row.numel():
                is_cut = flat.shape[0] * topology.tp == row.numel()
                if not is_cut:
                    raise ShapeError(f"rank {rank}: {name} is {list(value.shape)} for {row.numel()} tokens")
                own = row.tensor_split(topology.tp)[place["tp"]]
            dim = _split_dim(flat.shape, whole.shape, f"rank {rank}: {name}", first=1)
            copy = () if is_cut or dim is not None else (place["tp"],)
            values, index = flat[own >= 0], None
            if dim is not None:
                kind = "rows" if dim == whole.ndim - 1 else ""
                module = name.partition("#")[0]
                index = ownership.index(rank, module, kind, flat.shape[dim], whole.shape[dim], f"rank {rank}: {name}")
                values, index = _without_padding(values, dim, index)
            pieces.append(Piece(rank, copy, values, own[own >= 0], dim, index))
    return pieces


def factor_pieces(ranks: list[dict[str, Tensor]], ownership: Ownership, name: str, whole: Tensor) -> list[Piece]:
    """What the ranks hold of the trained parameter `name` (or of its gradient): every dp rank has a copy of its own.

    Of an expert those ranks hold something that have that expert, and every edp rank has a copy of its own.

    Raises:
        ShapeError: as above; or nobody has an expert's where somebody should.
    """
    pieces: list[Piece] = []
    module, kinds = _sides(name)
    is_expert, is_shared = ownership.is_of_experts(module), module in ownership.reference.stacks
    for rank, factors in enumerate(ranks):
        if name not in factors and is_expert and not is_shared:
            continue
        if name not in factors:
            raise ShapeError(f"rank {rank} has no {name}")
        values, index = factors[name], None
        dim = _split_dim(values.shape, whole.shape, f"rank {rank}: {name}")
        if dim is not None:
            # What all experts share is cut as the matrices of this rank's are.
            known = ownership.one_of(rank, module) if is_shared else module
            kind = kinds[dim] if dim < len(kinds) else ""
            index = ownership.index(rank, known, kind, values.shape[dim], whole.shape[dim], f"rank {rank}: {name}")
            values, index = _without_padding(values, dim, index)
        pieces.append(Piece(rank, ownership.copy_of(rank, module, is_split=dim is not None), values, None, dim, index))
    if is_expert:
        copies = {piece.copy for piece in pieces}
        is_split = any(piece.dim is not None for piece in pieces)
        for rank in range(len(ranks)):
            wanted = ownership.copy_of(rank, module, is_split=is_split)
            if wanted not in copies:
                raise ShapeError(f"no rank like {rank} has {name}")
    return pieces


def sum_of(pieces: list[Piece], whole: Tensor) -> Piece:
    """All pieces added up where they belong, as one."""
    total = torch.zeros(whole.shape, dtype=torch.float64)
    for piece in pieces:
        rows = torch.arange(len(whole)) if piece.rows is None else piece.rows
        if piece.dim is None or piece.index is None:
            total.index_add_(0, rows, piece.values.double())
        else:
            places = (rows[:, None], piece.index[None, :])
            total.movedim(piece.dim, 1).index_put_(places, piece.values.double().movedim(piece.dim, 1), accumulate=True)
    return Piece(0, (), total)


def _sides(name: str) -> tuple[str, tuple[str, ...]]:
    """(module, what of its weight each dim goes along) of a trained parameter."""
    module, _, part = name.rpartition(".lora_")
    if not module:
        module, _, leaf = name.rpartition(".")
        return module, ("rows", "columns") if leaf == "weight" else ("rows",)
    known = {"A": ("", "columns"), "B": ("rows", ""), "magnitude_vector": ("rows",), "embedding_A": ("", "rows")}
    return module, known.get(part, ())  # a piece goes along no whole weight


def _split_dim(local: torch.Size, whole: torch.Size, what: str, *, first: int = 0) -> int | None:
    """The one dim on which `local` differs from `whole`, None where they are alike."""
    differing = [d for d in range(first, len(whole)) if len(local) == len(whole) and local[d] != whole[d]]
    if len(local) != len(whole) or len(differing) > 1:
        raise ShapeError(f"{what} is {list(local)}, the whole is {list(whole)}")
    return differing[0] if differing else None


def _without_padding(values: Tensor, dim: int, index: Tensor) -> tuple[Tensor, Tensor]:
    keep = (index >= 0).nonzero().flatten()
    return values.index_select(dim, keep), index[keep]


def is_complete(pieces: list[Piece], whole: Tensor) -> bool:
    """Whether the pieces of a copy have every element of `whole`."""
    seen = torch.zeros(whole.shape, dtype=torch.bool)
    for piece in pieces:
        if piece.dim is None or piece.index is None:
            seen[slice(None) if piece.rows is None else piece.rows] = True
        elif piece.rows is None:
            seen.movedim(piece.dim, 0)[piece.index] = True
        else:
            seen.movedim(piece.dim, 1)[piece.rows[:, None], piece.index[None, :]] = True
    return bool(seen.all())
