"""The values of an adapter's tensors: which rows and columns are exactly zero, what repeats, what is not finite.

Owns: what a sound training cannot leave behind. Exact zeros tell, as A is drawn at random and a trained B has none in a
whole shard. Does not own: which tensors should be there (`adapter_files.whole`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshlora_ground.errors import UserError
from meshlora_judge.adapter_files.finding import Finding, found
from meshlora_judge.adapter_files.names import Part
from meshlora_judge.adapter_files.reading import Adapter
from meshlora_judge.adapter_files.whole import is_of_experts, ranks_of

_COMPUTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MOST_PARTS = 1024
_FEWEST_ROWS, _FEWEST_VALUES = 8, 32  # of less, a pattern may be chance: Adam's first step is +-lr everywhere
# Modules whose rows are several matrices, of which an adapter may have some.
_FUSED = re.compile(r"qkv|query_key_value|c_attn|in_proj|gate_up|fc1|kv_a|kv_b|Wi\b|wi\b", re.IGNORECASE)


@dataclass(frozen=True)
class Values:
    """What is kept of a tensor after it was read.

    Attributes:
        rows, columns: which of them are not all zero, of the tensor as a matrix `[out, r]` or `[r, in]`.
        copies: equal parts that its rows (of A: its columns) consist of; 1: it does not repeat.
        apart: of B over several experts: how much more columns agree in expert-major order than in PEFT's, in standard
            errors; 0 elsewhere.
    """

    part: Part
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_finite: bool
    rows: Tensor
    columns: Tensor
    copies: int
    apart: float = 0.0

    @property
    def is_zero(self) -> bool:
        return len(self.rows) > 0 and not bool(self.rows.any())


def read_values(adapter: Adapter) -> dict[str, Values]:
    """Key -> what its tensor holds, read one after the other."""
    parts = adapter.names.by_module()
    found = {}
    for part in adapter.names.parts:
        tensor = adapter.read(part.key)
        dtype, shape = tensor.dtype, tuple(tensor.shape)
        if dtype not in _COMPUTED:
            tensor = _in_float32(tensor, f"{adapter.file}: {part.key}")
        is_stack = is_of_experts(adapter.config, part.module)
        matrix = as_matrix(tensor, part.side, is_stack=is_stack)
        is_live = matrix != 0
        rows, columns = is_live.any(1), is_live.any(0)
        apart = 0.0
        if part.side == "B" and is_stack and (a := parts[part.module].get("A")) is not None and tensor.ndim == 2:
            apart = expert_major(matrix, ranks_of(adapter.config, a.module))
        # A is cut by columns and B by rows: the dims of the base's own weight that ranks share out.
        if part.side in ("A", "B"):
            copies = repeats(matrix.T if part.side == "A" else matrix)
        else:
            copies = 1
        is_finite = bool(torch.isfinite(tensor).all())
        found[part.key] = Values(part, shape, dtype, is_finite, rows, columns, copies, apart)
    return found


def _in_float32(tensor: Tensor, given: str) -> Tensor:
    """For types that lack operations. Raises: UserError: it is one without a number in each place."""
    try:
        return tensor.abs() if tensor.is_complex() else tensor.float()
    except NotImplementedError:  # packed, as two of float4 in a place: torch has no list of types that it converts
        raise UserError(given, f"values of {tensor.dtype} cannot be read", "save it in float32") from None


def as_matrix(tensor: Tensor, side: str, *, is_stack: bool = False) -> Tensor:
    """A tensor of any number of dims as a matrix: B `[out, ...]`, A `[r, ...]`, of experts A `[E r, in]`."""
    if tensor.ndim == 3 and is_stack:  # [E, r, in] and [E, out, r]
        return tensor.flatten(0, 1) if side == "A" else tensor.permute(1, 0, 2).flatten(1)
    if tensor.ndim < 2:
        return tensor.reshape(-1, 1)
    return tensor.flatten(1)


def repeats(matrix: Tensor) -> int:
    """How many equal blocks the rows consist of; blocks of few values count as one."""
    copies = 1
    # Prime by prime: 64 equal parts are six times two halves.
    for number in (2, 2, 2, 2, 2, 2, 3, 5, 7):
        size = len(matrix) // (copies * number)
        if not size or len(matrix) % (copies * number) or size * matrix.shape[1] < _FEWEST_VALUES:
            continue
        blocks = matrix.reshape(copies * number, size, -1)
        if bool((blocks == blocks[:1]).all()) and bool(blocks.any()) and not bool((blocks == blocks[0, 0, 0]).all()):
            copies *= number
    return copies


def parts_of(is_live: Tensor) -> list[tuple[int, int]]:
    """(k, N) for each N where all that is not zero lies in part k of N, as ranks cut `len(is_live)` rows."""
    places = is_live.nonzero().flatten()
    total = len(is_live)
    if total < _FEWEST_ROWS or not len(places) or len(places) == total:
        return []
    begin, end = int(places[0]), int(places[-1]) + 1
    if end - begin != len(places):
        return []
    # The last part may be shorter, so that several N fit it: the callers take the one that most factors agree on.
    fitting = []
    for number in range(2, min(total, _MOST_PARTS) + 1):
        size = -(-total // number)
        if begin % size == 0 and end == min(begin + size, total):
            fitting.append((begin // size + 1, number))
    return fitting


def expert_major(b: Tensor, ranks: Iterable[int]) -> float:
    """How much more the columns of B agree with E blocks of r columns than with PEFT's r blocks of E columns.

    Columns of one expert are trained on the same tokens, and point in similar directions. The unit is the standard
    error of the mean over experts; 0 where it cannot be said.
    """
    for rank in ranks:
        experts = b.shape[1] // rank
        if rank < 2 or experts < 4 or b.shape[1] % rank:
            continue
        unit = torch.nn.functional.normalize(b.float(), dim=0)
        theirs = unit.reshape(len(b), rank, experts).permute(2, 1, 0)  # [E, r, out], as PEFT reads them
        if bool((theirs == theirs[:1]).all()):
            return 0.0  # all experts share one adapter
        major = unit.reshape(len(b), experts, rank).permute(1, 2, 0)
        alike = [(block @ block.mT).abs().sum((1, 2)) for block in (major, theirs)]
        more = alike[0] - alike[1]
        # Of many experts a difference too small to matter is still many standard errors.
        if float(more.mean()) <= 0.1 * rank:
            return 0.0
        return float(more.mean() / (more.std() / experts**0.5 + 1e-12))
    return 0.0


def of_values(adapter: Adapter, values: Mapping[str, Values]) -> list[Finding]:
    """All findings about single tensors and pairs of factors."""
    modules = adapter.names.by_module().values()
    pairs = [{side: values[part.key] for side, part in sides.items()} for sides in modules]
    return [
        *_not_finite(values.values()),
        *_types(values, pairs),
        *_untrained(adapter, pairs),
        *_shards(adapter, pairs),
        *_lost_experts(adapter, pairs),
        *_copies(pairs),
    ]


def _not_finite(values: Iterable[Values]) -> list[Finding]:
    plain, half = list[str](), list[str]()
    for value in values:
        if not value.is_finite:
            keys = half if value.dtype == torch.float16 else plain
            keys.append(value.part.key)
    way_out = "use an earlier checkpoint"
    return [
        *found("not finite", "values that are NaN or infinite", plain, way_out),
        *found("overflow", "values that are NaN or infinite in float16: above 65,504 it overflows", half, way_out),
    ]


def _types(values: Mapping[str, Values], pairs: list[dict[str, Values]]) -> list[Finding]:
    odd = [
        f"{key} of {value.dtype}".replace("torch.", "") for key, value in values.items() if value.dtype not in _COMPUTED
    ]
    mixed, kinds = list[str](), set[torch.dtype]()
    for pair in pairs:
        own = {pair[side].dtype for side in pair if side.endswith(("A", "B"))}
        kinds |= own
        if len(own) > 1:
            mixed.append(next(iter(pair.values())).part.module)
    words = ", ".join(sorted(f"{kind}".removeprefix("torch.") for kind in kinds))
    result = found("type", "tensors of a type that no factor is trained in", odd, "save them in float32 or bfloat16")
    way_out = "PEFT writes both in one: something else has written or cast this file"
    result += found("mixed types", "A and B of one module have different types", mixed, way_out)
    if len(kinds) > 1 and not mixed:
        result.append(Finding("mixed types", f"factors are of {words}", (), "", is_note=True))
    return result


def _untrained(adapter: Adapter, pairs: list[dict[str, Values]]) -> list[Finding]:
    """B of a linear and A of an embedding are zero before the first step."""
    # zero: modules whose B is. lost: of these, those whose A is, too. undone: those whose A alone is.
    zero, trained, lost, undone = [], 0, [], []
    for pair in pairs:
        first = pair.get("B") or pair.get("embedding_A")
        other = pair.get("A") or pair.get("embedding_B")
        if first is None:
            continue
        # Zero before the first step is the one side, the other is drawn: if that is zero, too, it was lost.
        if first.is_zero:
            zero.append(first.part.module)
            if other is not None and other.is_zero:
                lost.append(first.part.module)
            continue
        trained += 1
        if other is not None and other.is_zero and not is_of_experts(adapter.config, other.part.module):
            undone.append(other.part.name)
    result, magnitudes = [], list[str]()
    for pair in pairs:
        if "magnitude" in pair and pair["magnitude"].is_zero:
            magnitudes.append(pair["magnitude"].part.name)
    result += found("zero", "DoRA's magnitude is zero, so these modules give nothing", magnitudes, "save it again")
    result += found("zero", "both factors are zero: they were never written", lost, "gather them before saving")
    result += found("zero", "A is zero where B is not, which no training leaves", undone, "gather it before saving")
    if zero and not trained and not lost:
        what = "never trained: B is zero everywhere, as PEFT makes it"
        way_out = "the file is of before the first step, or the optimizer never had these parameters"
        result += found("never trained", what, zero, way_out)
    elif zero and not lost:
        what = "B is zero, so nothing was trained in these modules"
        result += found("untrained", what, zero, "right where no data reached them", is_note=True)
    return result


def _shards(adapter: Adapter, pairs: list[dict[str, Values]]) -> list[Finding]:
    """Parts of factors that are zero, in most modules of a name."""
    seen: dict[str, dict[str, list[tuple[int, int]]]] = {}
    blocks, unclear, total, hits = [], [], Counter[str](), Counter[str]()
    sides = (("B", True, "rows of B"), ("A", False, "columns of A"), ("embedding_B", True, "rows of embedding_B"))
    for pair in pairs:
        for side, is_row, words in (*sides, ("A", True, "ranks of A")):
            value = pair.get(side)
            if value is None or value.is_zero or _is_padded(pair, words):
                continue
            label = f"{value.part.module.rpartition('.')[2]} {words}"
            # Counted before any is left out: of a kind most must show a shard, or it is chance (`_is_common`).
            total[label] += 1
            mask = value.rows if is_row else value.columns
            # Of a stack these are experts: `_lost_experts` looks at them.
            if words == "ranks of A" and is_of_experts(adapter.config, value.part.module):
                continue
            places = parts_of(mask)
            if places and side == "B" and _may_be_a_piece(adapter, value.part.module, *places[0]):
                unclear.append(value.part.name)
            elif places:
                seen.setdefault(words, {})[value.part.name] = places
                hits[label] += 1
            elif _has_zero_block(mask) and not _FUSED.search(value.part.module.rpartition(".")[2]):
                blocks.append((label, value.part.name))
                hits[label] += 1
    result = []
    way_out = "one rank's shard was saved as if it were whole: gather (full_tensor, summon_full_params) before saving"
    for words, places_of in seen.items():
        left = {name: places for name, places in places_of.items() if _is_common(name, words, total, hits)}
        # The part that most factors agree on first, then what is left.
        while left:
            (number, of), _ = Counter(place for places in left.values() for place in places).most_common(1)[0]
            what = f"only part {number} of {of} of the {words} is not zero"
            result += found("shard", what, [name for name in left if (number, of) in left[name]], way_out)
            left = {name: places for name, places in left.items() if (number, of) not in places}
    kept = [name for label, name in blocks if 2 * hits[label] >= total[label]]
    what = "blocks of rows or columns are exactly zero"
    result += found("zero block", what, kept, "parts of other ranks are missing: gather before saving")
    what = "only one piece of a fused matrix is not zero"
    return result + found("piece", what, unclear, "right where only this piece was to be trained", is_note=True)


def _is_common(name: str, words: str, total: Counter[str], hits: Counter[str]) -> bool:
    label = f"{name.rpartition('.')[0].rpartition('.')[2]} {words}"
    return 2 * hits[label] >= total[label]


def _is_padded(pair: Mapping[str, Values], words: str) -> bool:
    """Whether ranks of zeros in A are zero in B, too: a smaller rank in a larger one."""
    a, b = pair.get("A"), pair.get("B")
    if words != "ranks of A" or a is None or b is None:
        return False
    return a.rows.shape == b.columns.shape and not bool((b.columns & ~a.rows).any())


def _may_be_a_piece(adapter: Adapter, module: str, number: int, of: int) -> bool:
    """Whether part `number` of `of` may be q, k, v, gate or up of a fused matrix, the others not trained."""
    leaf = module.rpartition(".")[2]
    pieces = adapter.own.get("pieces")
    if isinstance(pieces, dict) and leaf in pieces:
        return True
    # Of q, k and v or gate and up the first is a half or a third; k and v are the last, and short where heads share.
    return bool(_FUSED.search(leaf)) and ((number == 1 and of <= 3) or number >= of - 1)


def _has_zero_block(is_live: Tensor) -> bool:
    """Whether a quarter is zero, in at most four runs of four or more."""
    if len(is_live) < 2 * _FEWEST_ROWS or bool(is_live.all()):
        return False
    # Few long runs are lost blocks; rows that training itself left at zero lie scattered.
    _, lengths = torch.unique_consecutive(is_live, return_counts=True)
    firsts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)[:-1]))
    zeros = lengths[~is_live[firsts]]
    return len(zeros) <= 4 and int(zeros.min()) >= 4 and 4 * int(zeros.sum()) >= len(is_live)


def _lost_experts(adapter: Adapter, pairs: list[dict[str, Values]]) -> list[Finding]:
    """Experts of a stack whose two factors are zero, and stacks in expert-major order."""
    lost, major = [], []
    for pair in pairs:
        a, b = pair.get("A"), pair.get("B")
        if a is None or b is None or not is_of_experts(adapter.config, a.part.module):
            continue
        for rank in ranks_of(adapter.config, a.part.module):
            number = len(a.rows) // rank
            if number < 2 or len(a.rows) % rank or len(b.columns) != len(a.rows) or len(a.shape) != 2:
                continue
            # PEFT's order: in A the ranks of an expert are adjacent, in B the experts of a rank.
            has_a = a.rows.reshape(number, rank).any(1)
            has_b = b.columns.reshape(rank, number).any(0)
            if bool(has_a.any()) and not bool((has_a | has_b).all()):
                gone = (~(has_a | has_b)).nonzero().flatten().tolist()
                lost.append(f"{a.part.module}: {len(gone)} of {number}, first {gone[0]}")
            break
        # Six standard errors: of thousands of stacks that are right none is this far off by chance.
        if b.apart > 6:
            major.append(b.part.name)
    what = "experts whose two factors are zero"
    way_out = "their ranks were not gathered: gather over expert-parallel ranks before saving"
    result = found("experts missing", what, lost, way_out)
    what = "columns of B lie expert by expert, where PEFT has them rank by rank (column j E + e is rank j of expert e)"
    return result + found("expert-major", what, major, "write B as [E, out, r].permute(1, 2, 0).reshape(out, r E)")


def _copies(pairs: list[dict[str, Values]]) -> list[Finding]:
    seen: dict[tuple[str, int], list[str]] = {}
    for pair in pairs:
        for side, words in (("B", "rows of B"), ("A", "columns of A")):
            value = pair.get(side)
            if value is not None and value.copies > 1:
                # By the number, too: a gather that went wrong repeats every factor equally often.
                seen.setdefault((words, value.copies), []).append(value.part.name)
    result = []
    for (words, number), names in seen.items():
        parts = "halves" if number == 2 else f"{number} parts"
        what = f"{parts} of the {words} are equal to the bit"
        result += found("copies", what, names, f"one shard was gathered {number} times: gather each rank's own")
    return result
