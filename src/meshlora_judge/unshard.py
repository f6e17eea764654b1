"""Where each rank's part belongs in the whole: the judge's own view of sharding, from shapes and tokens alone.

Owns: the canonical order of tokens, and the pieces of a whole tensor. Nothing here knows the plan: a dim shorter than
the reference's is split, in the way the rank's weights are; 1/tp of the tokens is the tp rank's slice of them; and a
sequence is identified by its tokens, not by its intended rank. Experts on a rank are identified by their matrices.
Which tokens of a row a rank has it says itself: together they must be all, each with the reference's values.

Canonical: all real tokens of all sequences of a step, one after another, `[T, ...]`; padding is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshlora_ground.topology import Topology
from meshlora_judge.capture import MicroBatchCapture, rows_of_tokens, spans
from meshlora_judge.experts import stack_of
from meshlora_judge.ownership import places
from meshlora_judge.trace import Trace

_FACTORS = ("initial", "gradients", "final", "fresh", "fresh_both")


@dataclass(frozen=True)
class Piece:
    """One rank's part of a tensor.

    Attributes:
        rank: its rank. copy: pieces of the same copy together must be the whole tensor.
        values: the part. rows: their rows in the whole; None: all.
        dim: the split dim; None: not split. index: their entries in the whole along it.
    """

    rank: int
    copy: tuple[int, ...]
    values: Tensor
    rows: Tensor | None = None
    dim: int | None = None
    index: Tensor | None = None

    def places(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Index of these values in the whole: `whole[places]` has their shape."""
        entries = list(map(torch.arange, whole.shape[: 1 + (self.dim or 0)]))
        if self.rows is not None:
            entries[0] = self.rows
        if self.dim is not None and self.index is not None:
            entries[self.dim] = self.index
        return torch.meshgrid(*entries, indexing="ij")

    def of(self, whole: Tensor) -> Tensor:
        """The part of `whole` that corresponds to this piece."""
        return whole[self.places(whole)]

    def along(self, whole: Tensor) -> Tensor:
        """All rows of `whole`, at this piece's entries along the split dim."""
        return replace(self, rows=None).of(whole)

    @property
    def start(self) -> int:
        """The first of the entries along the dim that is split."""
        return int(self.index[0]) if self.index is not None and len(self.index) else 0


class ShapeError(ValueError):
    """A rank's tensor cannot be a part of the reference's."""


@dataclass(frozen=True)
class Layout:
    """Token dims: `[B, S, ...]`, flat `[B*S, ...]`, swapped `[B, x, S, ...]`, once `[1, S, ...]`, pooled `[B, x]`."""

    num_token_dims: int
    is_swapped: bool = False
    is_once: bool = False
    is_pooled: bool = False


def layout_of(shape: torch.Size, micro: MicroBatchCapture) -> Layout | None:
    """The layout of an output of the reference on `micro`; None if it has no token dims."""
    b, s = micro.input_ids.shape
    if shape[:2] == (b, s):
        return Layout(2)
    # Experts and some MLPs see tokens without rows.
    if shape[:1] == (b * s,):
        return Layout(1)
    if len(shape) > 2 and shape[:2] == (1, s):
        return Layout(2, is_once=True)
    if len(shape) > 3 and (shape[0], shape[2]) == (b, s):
        return Layout(2, is_swapped=True)
    if len(shape) == 2 and shape[0] == b:
        return Layout(2, is_pooled=True)
    return None


class Tokens:
    """The canonical order of a step's tokens, from the reference's micro-batches.

    Attributes:
        sequences: their token ids, all different. starts: sequence -> row of its first token.
    """

    def __init__(self, reference: Trace) -> None:
        self.sequences, self.starts, start = list[tuple[int, ...]](), dict[tuple[int, ...], int](), 0
        for micro in reference.micro_batches:
            for sequence in sequences_of(micro):
                self.sequences.append(sequence)
                self.starts[sequence] = start
                start += len(sequence)
        assert len(self.starts) == len(self.sequences), "the sequences of a case differ from each other"

    def rows(self, micros: Iterable[MicroBatchCapture]) -> list[Tensor]:
        """For each micro-batch the canonical rows of its B·S tokens, -1 for tokens of no sequence: int64 `[B*S]`."""
        return [rows_of_tokens(micro.input_ids, micro.attention_mask, self.starts) for micro in micros]


def sequences_of(micro: MicroBatchCapture) -> list[tuple[int, ...]]:
    """The token ids of each sequence, without padding."""
    return [sequence for _, _, sequence in spans(micro.input_ids, micro.attention_mask)]


def most_in_a_row(micro: MicroBatchCapture) -> int:
    """The largest number of sequences in a row."""
    numbers = Counter(row for row, _, _ in spans(micro.input_ids, micro.attention_mask))
    return max(numbers.values(), default=0)


def canonical(reference: Trace, tokens: Tokens, phase: str, name: str) -> tuple[Tensor, Layout] | None:
    """The reference's output `name` as `[T, ...]`, and its original layout; None if it has no token dims."""
    layouts, shapes, parts, places = set[Layout](), set[torch.Size](), [], []
    once = Layout(2, is_once=True)
    for micro, row in zip(reference.micro_batches, tokens.rows(reference.micro_batches), strict=True):
        value = getattr(micro, phase).get(name)
        if value is None:
            return None
        layout = layout_of(value.shape, micro)
        if layout is None:
            return None
        layouts.add(layout)
        parts.append(flat_tokens(value, layout, micro)[row >= 0])
        shapes.add(parts[-1].shape[1:])
        places.append(row[row >= 0])
    if once in layouts:  # with one sequence in a micro-batch [B, S] looks like [1, S]
        layouts = {once}
    if len(layouts) > 1 or len(shapes) > 1:  # attention probabilities are [B, H, S, S]
        return None
    return torch.cat(parts)[torch.argsort(torch.cat(places))], layouts.pop()


def flat_tokens(value: Tensor, layout: Layout, micro: MicroBatchCapture) -> Tensor:
    """`value` with one token dim: `[B*S, ...]`, or a rank's slice `[B*S/tp, ...]`."""
    if layout.is_swapped:
        value = value.movedim(2, 1)
    if layout.is_pooled:
        value = value.unsqueeze(1).expand(-1, micro.input_ids.shape[1], -1)
    if layout.is_once and value.shape[0] == 1:
        value = value.expand(micro.input_ids.shape[0], *value.shape[1:])
    return value.flatten(0, 1) if layout.num_token_dims == 2 else value


class Ownership:
    """The entries of each rank along a split dim: by the rows and columns of its weights, else by rank order."""

    def __init__(self, ranks: list[Trace], reference: Trace, topology: Topology) -> None:
        self.ranks, self.reference, self.topology = ranks, reference, topology
        self.tokens = Tokens(reference)
        self.rows = [self.tokens.rows(trace.micro_batches) for trace in ranks]

    def is_of_experts(self, module: str) -> bool:
        """Whether `module` is a projection of experts with an adapter, of all experts or of one."""
        return stack_of(module) in self.reference.stacks

    def copy_of(self, rank: int, module: str, *, is_split: bool) -> tuple[int, ...]:
        """The copy of a parameter of `module` that `rank` holds, or holds a part of."""
        if self.is_of_experts(module):
            place, split = self.topology.expert_coordinates(rank), "etp"
            if module not in self.reference.stacks:  # of one expert, which some ep rank has
                del place["ep"]
        else:
            place, split = self.topology.coordinates(rank), "tp"
        if is_split:  # the ranks along it have one copy together
            del place[split]
        return tuple(place.values())

    def one_of(self, rank: int, projection: str) -> str:
        """The projection of one of the experts on `rank`."""
        for name in self.ranks[rank].rows:
            if stack_of(name) == projection:
                return name
        return projection

    def index(self, rank: int, module: str, kind: str, local: int, whole: int, what: str) -> Tensor:
        """The entries, or -1. kind: "rows" or "columns" of the weight of `module`, or "". Raises: ShapeError."""
        tp_rank, tp = self.topology.coordinates(rank)["tp"], self.topology.tp
        if self.is_of_experts(module):
            tp_rank, tp = self.topology.expert_coordinates(rank)["etp"], self.topology.etp
        prints = getattr(self.ranks[rank], kind, {}).get(module)
        every = getattr(self.reference, kind, {}).get(module)
        if prints is not None and every is not None and (len(prints), len(every)) == (local, whole):
            found = places(prints, every, rank=tp_rank, size=tp)
            if found is not None:
                return found
        # Nothing is known of its content: the ranks' order, as everywhere else.
        if local * tp == whole:
            return torch.arange(local) + tp_rank * local
        if local < whole < local * tp and whole % local == 0 and tp % (whole // local) == 0:
            return torch.arange(local) + tp_rank * (whole // local) // tp * local  # replicated on several ranks
        raise ShapeError(f"{what}: {local} of {whole} entries are not a part of it on {tp} ranks")

    def piece(
        self,
        rank: int,
        copy: tuple[int, ...],
        values: Tensor,
        whole: Tensor,
        dim: int | None,
        known: tuple[str, str],
        what: str,
        rows: Tensor | None = None,
    ) -> Piece:
        """`values` without padding, as a piece of `whole`. known: (module, kind) for `index`."""
        if dim is None:
            return Piece(rank, copy, values, rows)
        index = self.index(rank, *known, values.shape[dim], whole.shape[dim], what)
        keep = (index >= 0).nonzero().flatten()
        return Piece(rank, copy, values.index_select(dim, keep), rows, dim, index[keep])


def token_pieces(ownership: Ownership, phase: str, name: str, whole: Tensor, layout: Layout) -> list[Piece]:
    """The ranks' pieces of the module output `name`: of all ranks of a stage that has it.

    Raises:
        ShapeError: no stage has such an output, a rank of one lacks it, or its shape cannot be a part.
    """
    pieces, topology, stages = list[Piece](), ownership.topology, set[int]()
    for rank, trace in enumerate(ownership.ranks):
        if any(name in getattr(micro, phase) for micro in trace.micro_batches):
            stages.add(topology.stage_of(rank))
    for rank, trace in enumerate(ownership.ranks):
        if stages and topology.stage_of(rank) not in stages:
            continue
        tp_rank, place = topology.coordinates(rank)["tp"], topology.place_of_rows(rank)
        what = f"rank {rank}: {name}"
        for micro, row in zip(trace.micro_batches, ownership.rows[rank], strict=True):
            value = getattr(micro, phase).get(name)
            if value is None:
                raise ShapeError(f"rank {rank} has no {phase} of {name or 'the model'}")
            flat = flat_tokens(value, layout, micro)
            own, is_cut = row, False
            if flat.shape[0] != row.numel() and micro.held is not None:
                own = row.view(micro.input_ids.shape).gather(1, micro.held).flatten()
            held = own
            if flat.shape[0] != held.numel():
                is_cut = flat.shape[0] * topology.tp == held.numel()
                if not is_cut:
                    raise ShapeError(f"{what} is {list(value.shape)} for {held.numel()} of {row.numel()} tokens")
                own = held.tensor_split(topology.tp)[tp_rank]
            dim = _split_dim(flat.shape, whole.shape, what, first=1)
            copy = list[int]()
            if held is row:  # with all tokens of their rows, not each some, ranks have copies
                copy.append(place // topology.tp)
            if not is_cut and dim is None:
                copy.append(tp_rank)
            # Features of a linear's output are rows of its weight; any other dim is along neither side.
            kind = "rows" if dim == whole.ndim - 1 else ""
            known = name.partition("#")[0], kind
            pieces.append(ownership.piece(rank, tuple(copy), flat[own >= 0], whole, dim, known, what, own[own >= 0]))
    return pieces


def factor_pieces(ranks: list[dict[str, Tensor]], ownership: Ownership, name: str, whole: Tensor) -> list[Piece]:
    """The ranks' pieces of the trained parameter `name`, or of its gradient: one copy per dp rank of its stage.

    A factor of one expert has pieces on the ranks that hold the expert, one copy per edp rank.

    Raises:
        ShapeError: as above, two stages have it, or an expert is missing on ranks that should hold it.
    """
    stages, stage_of = set[int](), ownership.topology.stage_of
    for rank, factors in enumerate(ranks):
        if name in factors:
            stages.add(stage_of(rank))
    if len(stages) > 1:
        raise ShapeError(f"stages {' and '.join(map(str, sorted(stages)))} both have {name}")
    pieces: list[Piece] = []
    module, kinds = _sides(name)
    is_expert, is_shared = ownership.is_of_experts(module), module in ownership.reference.stacks
    for rank, factors in enumerate(ranks):
        if stages and stage_of(rank) not in stages:
            continue
        if name not in factors and is_expert and not is_shared:
            continue
        if name not in factors:
            raise ShapeError(f"rank {rank} has no {name}")
        what = f"rank {rank}: {name}"
        dim = _split_dim(factors[name].shape, whole.shape, what)
        copy = ownership.copy_of(rank, module, is_split=dim is not None)
        known, kind = module, ""
        if is_shared:  # it is split like the matrices of this rank's experts
            known = ownership.one_of(rank, module)
        if dim is not None and dim < len(kinds):
            kind = kinds[dim]
        pieces.append(ownership.piece(rank, copy, factors[name], whole, dim, (known, kind), what))
    if is_expert:
        copies = {piece.copy for piece in pieces}
        is_split = any(piece.dim is not None for piece in pieces)
        for rank in range(len(ranks)):
            wanted = ownership.copy_of(rank, module, is_split=is_split)
            if stage_of(rank) in stages and wanted not in copies:
                raise ShapeError(f"no rank like {rank} has {name}")
    return pieces


def assembled(pieces: list[Piece], whole: Tensor, *, adds: bool = False) -> Tensor:
    """All pieces at their places in a tensor shaped like `whole`; overlapping ones overwrite, or with `adds` add."""
    result = torch.zeros(whole.shape, dtype=torch.float64)
    for piece in pieces:
        result.index_put_(piece.places(whole), piece.values.double(), accumulate=adds)
    return result


def _sides(name: str) -> tuple[str, tuple[str, ...]]:
    """(module, per dim "rows" or "columns" of the module's weight, or "") of a trained parameter."""
    module, _, part = name.rpartition(".lora_")
    if not module:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight":
            return module, ("rows", "columns")
        return module, ("rows",)
    known = {"A": ("", "columns"), "B": ("rows", ""), "magnitude_vector": ("rows",), "embedding_A": ("", "rows")}
    known["B.bias"] = ("rows",)
    return module, known.get(part, ())  # a piece matches no whole weight


def _split_dim(local: torch.Size, whole: torch.Size, what: str, *, first: int = 0) -> int | None:
    """The one dim on which `local` differs from `whole`; None if there is none."""
    found, is_part = None, len(local) == len(whole)
    for dim, (own, size) in enumerate(zip(local, whole, strict=False)):
        if dim >= first and own != size:
            is_part = is_part and found is None
            found = dim
    if not is_part:
        raise ShapeError(f"{what} is {list(local)}, the whole is {list(whole)}")
    return found


def is_complete(pieces: list[Piece], whole: Tensor) -> bool:
    """Whether the pieces of a copy cover every element of `whole`."""
    seen = torch.zeros(whole.shape, dtype=torch.bool)
    for piece in pieces:
        seen[piece.places(whole)] = True
    return bool(seen.all())


def by_expert(trace: Trace, reference: Trace, topology: Topology, rank: int) -> Trace:
    """`trace` of a rank with its factors and fingerprints of experts separated by expert."""
    held = dict[str, list[int]]()
    for name, prints in trace.rows.items():
        if prints.ndim == 2:  # of several experts
            held[name] = _experts_of(name, trace, reference, topology, rank)
    shared = {name for name, stack in reference.stacks.items() if stack.is_shared}
    adapted = {name: own + _without_matrix(name, len(own), reference, topology, rank) for name, own in held.items()}
    factors: dict[str, Any] = {kind: _taken_apart(getattr(trace, kind), adapted, shared) for kind in _FACTORS}
    clipped = [_taken_apart(gradients, adapted, shared) for gradients in trace.clipped]
    found = with_prints_of_each(trace, held)
    for kind in ("rows", "columns"):
        for name, own in held.items():
            prints, every = getattr(trace, kind)[name][0], getattr(reference, kind)[name]
            for expert in adapted[name][len(own) :]:  # cut as the first one of the rank is
                alike = dict(zip(every[own[0]].tolist(), every[expert].tolist(), strict=True))
                values = [alike.get(value, value) for value in prints.tolist()]
                getattr(found, kind)[_name(name, expert)] = torch.tensor(values, dtype=prints.dtype)
    return replace(found, clipped=clipped, **factors)


def _without_matrix(name: str, held: int, reference: Trace, topology: Topology, rank: int) -> list[int]:
    """The experts on a rank whose factors are alone there: those behind all that the ranks of ep hold matrices of.

    The model's own code multiplies them with nothing (longcat_flash); they are dealt out as the others are.
    """
    stack = reference.stacks.get(name)
    total, routed = stack.num_experts if stack else 0, held * topology.ep
    each = max(0, total - routed) // topology.ep
    first = routed + topology.expert_coordinates(rank)["ep"] * each
    return list(range(first, first + each))


def with_prints_of_each(trace: Trace, held: Mapping[str, list[int]] | None = None) -> Trace:
    """`trace` with fingerprints separated by expert. held: projection -> experts on this rank; None: all."""
    found: dict[str, Any] = {}
    for kind in ("rows", "columns"):
        prints: dict[str, Tensor] = {}
        for name, own in getattr(trace, kind).items():
            if own.ndim == 1:
                prints[name] = own
                continue
            experts = held[name] if held is not None else list(range(len(own)))
            for expert, part in zip(experts, own, strict=True):
                prints[_name(name, expert)] = part
        found[kind] = prints
    return replace(trace, **found)


def _experts_of(name: str, trace: Trace, reference: Trace, topology: Topology, rank: int) -> list[int]:
    """The experts on a rank of the projection `name`, by vote of the rows and columns of their matrices."""
    number = len(trace.rows[name])
    votes = [Counter[int]() for _ in range(number)]
    for kind in ("rows", "columns"):
        owner: dict[int, int] = {}
        every = getattr(reference, kind).get(name)
        if every is not None and every.ndim == 2:
            for expert, prints in enumerate(every.tolist()):
                for value in prints:
                    if owner.setdefault(value, expert) != expert:
                        owner[value] = -1  # several experts have it, so it tells nothing
        for vote, prints in zip(votes, getattr(trace, kind)[name].tolist(), strict=True):
            for value in prints:
                if owner.get(value, -1) >= 0:
                    vote[owner[value]] += 1
    # Without a vote, of matrices that no rank could tell apart, the order of the ranks.
    experts, first = [], topology.expert_coordinates(rank)["ep"] * number
    for index, vote in enumerate(votes):
        experts.append(vote.most_common(1)[0][0] if vote else first + index)
    return experts


def _taken_apart(factors: Mapping[str, Tensor], held: Mapping[str, list[int]], shared: set[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in factors.items():
        module, _, part = name.rpartition(".lora_")
        experts = held.get(module)
        if experts is None:
            found[name] = tensor
        elif len(tensor) != (1 if module in shared else len(experts)):
            found[f"{name} of {len(tensor)} experts"] = tensor  # a name that the reference does not have
        elif module in shared:
            found[name] = tensor[0]
        else:
            for expert, matrix in zip(experts, tensor, strict=True):
                found[f"{_name(module, expert)}.lora_{part}"] = matrix
    return found


def _name(projection: str, expert: int) -> str:
    owner, _, leaf = projection.rpartition(".")
    return f"{owner}.{expert}.{leaf}"
