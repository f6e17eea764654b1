"""Frozen bases in few bits: which matrices are packed, in which kind, and how their blocks are cut.

Owns: the kinds, which matrices are packed, the parts of blocks that a rank holds. Does not own: the arithmetic
(`wings.quantized.quantized`), the formats of checkpoints (`wings.quantized.packed`).

A block is a rectangle of a matrix `[out, in]` with its own scale. Its numbers depend on it alone, so that they are the
same on every topology. A rank holds the codes of its slice, and the scale of every block that it has a part of: where a
cut crosses a block, both ranks hold the scale.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from meshlora.plan.layout import Split, contiguous
from meshlora.plan.pairs import check
from meshlora.plan.rules import Domain, ExpertRule, LinearRule, ModelPlan, Packing, kind_of
from meshlora_ground.errors import UserError, did_you_mean

# Kind -> bits per weight: QLoRA's NormalFloat (Dettmers et al., 2023); 255 equally spaced values; E4M3 as in
# DeepSeek-V3; E2M1 of OCP Microscaling Formats 1.0; the same in NVIDIA's.
KINDS = {"nf4": 4, "int8": 8, "mxfp4": 4, "nvfp4": 4, "fp8": 8}
# Those of products in float8: `model.compute` -> kind, of plain numbers, and of those that are float8 already.
COMPUTE = {"fp8": "float8", "fp8_backward": "float8_backward"}
STORED = {"fp8": "stored_float8", "fp8_backward": "stored_float8_backward"}
# Kinds that checkpoints are stored in, besides.
_OF_FILES = {"fp4": 4, "fp8_e5m2": 8, "integers": 8, "signed4": 4, "ints4": 4, "ints8": 8}
BITS = KINDS | _OF_FILES | dict.fromkeys(STORED.values(), 8)
# Those whose blocks have a zero beside the scale.
WITH_ZEROS = ("ints4", "ints8")
FLOAT8_BLOCK = 128  # of either dim of a matrix
TOKEN_BLOCK = 32  # features of a token that share a scale in a product in float8; also MXFP8's
MX_BLOCK, NV_BLOCK = 32, 16  # input features of MXFP4, and of NVFP4, that share a scale
# Bytes that a row of scales ends with: its float32 factor, which all scales of the row have.
FACTOR_BYTES = {"nvfp4": 4}
KEEP = "keep"
PACKINGS = {
    "nf4": Packing("nf4", (1, 64), 4),
    "int8": Packing("int8", (1, 64), 4),
    "mxfp4": Packing("mxfp4", (1, MX_BLOCK), 1),
    "nvfp4": Packing("nvfp4", (1, NV_BLOCK), 1),
    "fp8": Packing("fp8", (128, 128), 4),
}
# Formats of which a twin has files of its own, and is kept as they are.
STORED_TWINS = ("gptq", "awq")
# Of the widths of a rank in a twin: of fp8 it has several blocks, and cuts cross them; they cross words of 8, and
# groups of 8, of integers.
TWIN_BLOCKS = {"nf4": 64, "int8": 64, "mxfp4": 32, "nvfp4": 16, "fp8": 96, "gptq": 12, "awq": 12}
_TWIN_BLOCK_OF_COMPUTE = 192  # the same, and half of it, the width of keys and values, is whole blocks of a token
# Kinds whose arithmetic is bitsandbytes'.
OF_LIBRARY = ("nf4", "fp4", "int8")


def with_quantization(plan: ModelPlan, kind: str | None, stored: Mapping[str, Packing] | None = None) -> ModelPlan:
    """`plan` with every linear but the head, and all routed experts, packed as `kind` (None: not packed).

    kind: one of `KINDS`, or "keep": as in the checkpoint. stored: parameter -> how the checkpoint packs it.

    Raises:
        UserError: unknown kind; blocks do not fit the matrix; nothing is stored in few bits; bitsandbytes is missing.
    """
    if kind is None:
        return plan
    if kind not in KINDS and kind != KEEP:
        known = [*KINDS, KEEP]
        raise UserError(f"quantization {kind!r}", f"it must be one of {', '.join(known)}", did_you_mean(kind, known))
    rules: dict[str, LinearRule] = {**_linears(plan), **plan.projections}
    if kind == KEEP:
        found = _kept(rules, stored or {})
    else:
        found = dict.fromkeys(rules, PACKINGS[kind])
    for name, packing in found.items():
        _check_blocks(plan, rules[name], packing, is_stored=kind == KEEP)
    check_library(packing.kind for packing in found.values())
    return dataclasses.replace(plan, quantization=kind, quantized=found)


def _linears(plan: ModelPlan) -> dict[str, LinearRule]:
    """Name -> rule of each linear but the head and routers."""
    # transformers leaves the head in plain numbers, too; what a router chooses hangs on small differences.
    left = {plan.head, *plan.routers, *filter(plan.is_of_head, plan.linears)}
    return {name: rule for name, rule in plan.linears.items() if name not in left}


def with_compute(plan: ModelPlan, compute: str | None) -> ModelPlan:
    """`plan` with the products of every linear but the head in float8; experts keep theirs (None: no product is). Of a
    base in few bits those of the linears that are float8 already: they are not rounded again.

    compute: one of `COMPUTE`.

    Raises:
        UserError: unknown; no linear can be; a cut crosses a block. UnsupportedError: the base is in other bits.
    """
    if compute is None:
        return plan
    if compute not in COMPUTE:
        raise UserError(
            f"compute {compute!r}", f"it must be one of {', '.join(COMPUTE)}", did_you_mean(compute, COMPUTE)
        )
    check({"model.compute": compute, "model.quantization": plan.quantization})
    # Of a transposed one, as of gpt2, the blocks are not proved.
    found = {name: rule for name, rule in _linears(plan).items() if not rule.is_transposed}
    rule = "none of its linears can have products in float8: they are experts, or stored transposed"
    if plan.quantization is not None:
        kinds = {name: packing.kind for name, packing in plan.quantized.items()}
        found = {name: each for name, each in found.items() if kinds.get(name) == "fp8"}
        rule = "none of its linears is stored in float8 (e4m3)"
    if not found:
        raise UserError(f"compute {compute} of model_type {plan.model_type!r}", rule, "leave out model.compute")
    packings = dict(plan.quantized)
    for name, each in found.items():
        _check_cuts(plan, each, compute)
        if name in packings:
            packings[name] = dataclasses.replace(packings[name], kind=STORED[compute])
        else:
            packings[name] = Packing(COMPUTE[compute], (FLOAT8_BLOCK, FLOAT8_BLOCK), 1)
    return dataclasses.replace(plan, compute=compute, quantized=packings)


def _check_cuts(plan: ModelPlan, rule: LinearRule, compute: str) -> None:
    """Check that tp leaves whole what is rounded: gradients of outputs, and blocks of features with one scale."""
    size = plan.topology.tp
    has_copies = rule.split is Split.COLUMN and rule.layout is not None and max(rule.layout.copies(size)) > 1
    if size > 1 and (has_copies or (rule.split is Split.WHOLE and rule.domain is Domain.PARTIAL)):
        what, why = f"compute {compute} of {rule.name} on {plan.topology}", "each tp rank has a term of its gradient"
        # Of heads of keys that several ranks hold, of what MLA makes of low rank: Q(a) + Q(b) is not Q(a + b).
        raise UserError(what, f"{why}, and the sum is what is rounded", "use dp_shard, cp or pp in place of tp")
    if rule.split is Split.WHOLE or rule.layout is None:
        return
    for rank in range(size):
        for run in rule.layout.runs(rank=rank, size=size):
            is_cut = run.stop % TOKEN_BLOCK and run.stop != rule.layout.size
            if run.start % TOKEN_BLOCK or is_cut:
                what = (
                    f"compute {compute} of {rule.name}, of which tp rank {rank} has features {run.start} to {run.stop}"
                )
                raise UserError(
                    what, f"blocks of {TOKEN_BLOCK} share a scale, and none is cut", "use dp_shard or less tp"
                )


def twin_block(quantization: str | None, compute: str | None, tp: int) -> int:
    """What divides the widths of a rank in a twin for `tp` ranks."""
    if compute is not None:
        return _TWIN_BLOCK_OF_COMPUTE
    if quantization in STORED_TWINS and tp % 2:  # the whole is cut into words of 8
        return 2 * TWIN_BLOCKS[str(quantization)]
    return TWIN_BLOCKS.get(quantization or "", 1)


def check_library(kinds: Iterable[str]) -> None:
    """Refuse kinds of bitsandbytes where it is not installed. Raises: UserError: it is not."""
    needs = sorted({*kinds} & {*OF_LIBRARY})
    if needs and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"quantization {needs[0]}", "it needs bitsandbytes", "pip install 'meshlora[quantization]'")


def _kept(rules: Mapping[str, LinearRule], stored: Mapping[str, Packing]) -> dict[str, Packing]:
    """Name -> packing of each matrix that is stored in few bits."""
    if not stored:
        raise UserError("quantization keep", "nothing of the checkpoint is stored in few bits", "leave it out")
    names = {f"{name}.weight": name for name in rules}
    for name, rule in rules.items():
        if isinstance(rule, ExpertRule):  # a parameter itself
            names[name] = names.pop(f"{name}.weight")
    found = {name: stored[key] for key, name in names.items() if key in stored}
    if not found:
        # The planner's model has one layer of each kind, whose numbers are others.
        of_kinds = {kind_of(key): packing for key, packing in stored.items()}
        found = {name: of_kinds[kind_of(key)] for key, name in names.items() if kind_of(key) in of_kinds}
    return found


def _check_blocks(plan: ModelPlan, rule: LinearRule, packing: Packing, *, is_stored: bool) -> None:
    kind, width = packing.kind, packing.block[1]
    what = f"quantization {kind} of {rule.name} with {rule.in_features} input features"
    if rule.in_features % width and not is_stored and kind != "fp8":
        raise UserError(what, f"blocks of {width} must divide them", "leave out model.quantization")
    columns = bounds_of(plan, rule)[1]
    if BITS[kind] == 4 and any(start % 2 or stop % 2 for start, stop in columns):
        raise UserError(f"{what} on {plan.topology}", "two of 4 bits share a byte, which cannot be cut", "use less tp")


def kind_for_twin(plan: ModelPlan) -> str | None:
    """The kind in which a twin of random weights stands for the frozen base of `plan`."""
    if plan.quantization != KEEP:
        return plan.quantization
    if plan.compute is not None:  # of other kinds there are no products in float8
        return "fp8"
    # Of a checkpoint in several kinds, the one that most matrices have.
    (kind, _), *_ = Counter(packing.kind for packing in plan.quantized.values()).most_common()
    of_others = {"fp4": "nf4", "fp8_e5m2": "fp8", "integers": "int8"} | dict.fromkeys((*WITH_ZEROS, "signed4"), "gptq")
    return of_others.get(kind, kind)


def bounds_of(plan: ModelPlan, rule: LinearRule) -> tuple[list[tuple[int, int]], ...]:
    """(ranges of outputs, of inputs) of the matrix of `rule` on rank 0 of its axis."""
    size = plan.topology.tp
    if isinstance(rule, ExpertRule):
        size = plan.topology.etp
    outputs, inputs = [(0, rule.out_features)], [(0, rule.in_features)]
    if rule.split is Split.WHOLE or rule.layout is None:
        return outputs, inputs
    own = contiguous((run.start, run.stop) for run in rule.layout.runs(rank=0, size=size))
    if rule.split is Split.COLUMN:
        return own, inputs
    return outputs, own


class Tensors(Protocol):
    """What is known of a stored tensor before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class Touched:
    """The blocks of `size` that a range touches: `first:last`, and how many elements of each it has."""

    first: int
    last: int
    counts: tuple[int, ...]

    @classmethod
    def by(cls, start: int, stop: int, size: int) -> Touched:
        """Of the range `start:stop`."""
        first, last = start // size, -(-stop // size)
        counts = (min((k + 1) * size, stop) - max(k * size, start) for k in range(first, last))
        return cls(first, last, tuple(counts))


def local_blocks(plan: ModelPlan, rule: LinearRule, packing: Packing) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(outputs, inputs) of rank 0 that share a scale, block by block."""
    rows, columns = bounds_of(plan, rule)
    return _counts(rows, packing.block[0]), _counts(columns, packing.block[1])


def _counts(bounds: Iterable[tuple[int, int]], size: int) -> tuple[int, ...]:
    found: tuple[int, ...] = ()
    for start, stop in bounds:  # each range begins a block of its own: neighbours may be far apart in the whole
        found += Touched.by(start, stop, size).counts
    return found


def check_not_quantized(plan: ModelPlan, parameter: str) -> None:
    """Refuse to train the base's `parameter` if it is quantised. Raises: UnsupportedError: it is quantised."""
    owner, _, leaf = parameter.rpartition(".")
    if leaf == "weight" and owner in plan.quantized:
        asked = {"model.quantization": plan.quantization, "model.compute": plan.compute}
        check({**asked, "quantised": parameter})
