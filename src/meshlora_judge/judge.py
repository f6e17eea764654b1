"""The judge: two traces in, a verdict out. Each tensor by itself; nothing is averaged.

Does not own: the likely cause (`meshlora_judge.diagnosis.diagnose`), or recording the traces.

Limits come from precision. In float64 (lifted) the relative L2 distance of a tensor is at most 1e-11, after AdamW 1e-6,
as Adam divides by tiny moments. In a lower precision the reference runs in that precision too, and ours may be four
times as far from float64 as the reference's own rounding: `max|ours - ref64| <= 4 max|ref_low - ref64|`, after AdamW
with the maximum over all tensors or over one, whichever is larger. For bfloat16 there are two such runs, as one process
can train in two ways: with the adapter in float32, and under autocast with the adapter in bfloat16, as ours is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from meshlora_ground.topology import Topology
from meshlora_judge import unshard
from meshlora_judge.capture import CHOICES, SCORES
from meshlora_judge.case import Case
from meshlora_judge.eva import invariant
from meshlora_judge.experts import stack_of
from meshlora_judge.inputs import expected_fresh
from meshlora_judge.results import (
    Phase,
    TensorResult,
    as_wanted,
    checked,
    minus,
    missing,
    only,
    relative,
    summed_where_unequal,
)
from meshlora_judge.saved import CONFIG, FIRST, FRESH, LAST, WEIGHTS, Saved
from meshlora_judge.trace import Trace

# Phase -> what it compares, in the order in which a fault shows first.
PHASES = {
    "sequences": "each sequence and token once",
    "loaded_adapter": "adapter as loaded",
    "forward": "output of every module",
    "router_scores": "weights of the chosen experts",
    "router_choices": "chosen experts, token by token",
    "logits": "logits",
    "loss": "loss of every step, and evaluated",
    "backward": "gradient of every module's output",
    "gradients": "gradient of every factor",
    "grad_norm": "gradient norm, clipping, learning rate",
    "deltas": "what the optimizer changed",
    "saved_file": "saved file, read by PEFT",
    "fresh_adapter": "fresh adapter, bit for bit",
    "eva": "start as the data say",
    "collectives": "collectives within the plan",
    "adapters": "several adapters at once",
}
_EVA = 1e-5  # of what PEFT decomposes in float32
_AFTER_ADAM = ("deltas", "saved_file")
_NOISE = 4.0


@dataclass(frozen=True)
class Evidence:
    """Everything that is compared: the reference, our ranks, and our files.

    rounded: the reference in our precision, one for each way to train in it; empty in float64.
    """

    case: Case
    topology: Topology
    reference: Trace
    rounded: list[Trace]
    ranks: list[Trace]
    saved: Saved


def judge(evidence: Evidence) -> Iterator[Phase]:
    """The phases in order, computed lazily; those of routers only for models with experts."""
    results = _Judge(evidence)
    left_out = {"adapters"}  # which have runs of their own
    if not results.of_routers(CHOICES):
        left_out |= {"router_scores", "router_choices"}
    if evidence.case.eva is None:
        left_out |= {"eva"}
    for name in PHASES:
        if name not in left_out:
            yield Phase(name, getattr(results, name)())


class _Judge:
    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.reference, self.ranks, self.topology = evidence.reference, evidence.ranks, evidence.topology
        # Of all ranks, where it does not matter which of them has what.
        self.micro_batches = [micro for trace in self.ranks for micro in trace.micro_batches]
        self.ownership = unshard.Ownership(self.ranks, self.reference, self.topology)
        self.tokens = self.ownership.tokens

    def sequences(self) -> list[TensorResult]:
        """Each sequence of the step is taken by one dp rank, on all its ranks; the count of trained tokens is right."""
        results = list[TensorResult]()
        for index, sequence in enumerate(self.tokens.sequences):
            times = self._times_taken(sequence)
            results.append(checked(f"sequence {index}", times == {1}, f"taken {_either(times)} times"))
        for step, number in enumerate(self.reference.num_tokens):
            results.append(self._counted(step, number))
        if self.evidence.case.packing:
            most = max(map(unshard.most_in_a_row, self.micro_batches))
            results.append(checked("packed rows", most > 1, "no row holds more than one sequence"))
        return results

    def _times_taken(self, sequence: tuple[int, ...]) -> set[int]:
        """How often all dp ranks together take `sequence`, by each set of ranks that has one rank of every dp rank."""
        times = Counter[int]()
        for rank, trace in enumerate(self.ranks):
            # One rank of every dp rank has this place: together they read all rows once.
            place = self.topology.place_of_rows(rank)
            times[place] += sum(unshard.sequences_of(micro).count(sequence) for micro in trace.micro_batches)
        return set(times.values())

    def _counted(self, step: int, number: int) -> TensorResult:
        """The ranks' counts of trained tokens in `step`, beside the reference's `number`."""
        ours = sorted({_at(trace.num_tokens, step, math.inf) for trace in self.ranks})
        error, note = max(number - ours[0], ours[-1] - number) / number, ""
        if error:
            note = f"{', '.join(map(str, ours))} trained tokens, not {number}"
        return TensorResult(f"tokens of step {step + 1}", error, 0.0, note=note)

    def loaded_adapter(self) -> list[TensorResult]:
        return self._factors(_of(self.ranks, "initial"), self.reference.initial)

    def fresh_adapter(self) -> list[TensorResult]:
        """Fresh adapters, as configured and with B drawn as well, follow the rule to the bit.

        Their scales, and the saved file of the second, match PEFT's reading of the configuration.
        """
        # Trained parts of the base are as the base has them, and only factors are drawn.
        saved, reference, results = self.evidence.saved, self.reference, list[TensorResult]()
        drawn = [name for name in reference.initial if ".lora_" in name]
        magnitudes, of_base = only(reference.row_norms, drawn), only(reference.base, reference.initial)
        expected: dict[str, Tensor] = {}
        as_configured = LoraConfig(**self.evidence.case.lora).init_lora_weights
        for kind, init in (("fresh", as_configured), ("fresh_both", False)):
            ranks = _of(self.ranks, kind)
            expected = self._expected(drawn, init)
            results += self._drawn(ranks, expected) + self._drawn(ranks, of_base)
            # With B drawn a magnitude is the sum's row norm, which is not checked; otherwise it is the base's.
            if kind == "fresh" and as_configured is not False:
                # What an orthogonal start multiplies to is 0 in float32 alone.
                is_exact = self.evidence.case.dtype == "float64" and as_configured != "orthogonal"
                limit = 1e-11 if is_exact else 1e-6
                results += [replace(result, limit=limit) for result in self._drawn(ranks, magnitudes)]
            results += missing(set[str]().union(*ranks) - {*drawn} - of_base.keys(), ())
        loaded, fresh = _of_all(_of(self.ranks, "scalings")), _of_all(_of(self.ranks, "fresh_scalings"))
        if (wrong := self._scaled_otherwise(saved.fresh_scalings, loaded, fresh)) or saved.fresh_note:
            note = saved.fresh_note or f"where it sits, or its scale, is not what PEFT says: {wrong[0]}"
            results.append(as_wanted(f"{FRESH}/{CONFIG}", note))
        return results + self._bits(FRESH, only(saved.fresh, expected), [expected])

    def eva(self) -> list[TensorResult]:
        """Of a start that looks at data: the ranks of targets, their scales, and what their vectors span."""
        reference, results = self.reference, list[TensorResult]()
        for rank, trace in enumerate(self.ranks):
            results += missing(trace.eva, reference.eva)
            for name in sorted(trace.eva.keys() & reference.eva.keys(), key=lambda name: self._place(f"{name}.lora_A")):
                ours, whole = trace.eva[name], reference.eva[name]
                note = ""
                if ours.shape != whole.shape:
                    note = f"rank {len(ours)}, not {len(whole)}"
                elif not math.isclose(trace.eva_scalings[name], reference.eva_scalings[name], rel_tol=1e-12):
                    note = f"scaled by {trace.eva_scalings[name]:g}, not {reference.eva_scalings[name]:g}"
                if note:
                    results.append(as_wanted(name, note))
                    continue
                piece = unshard.Piece(rank, (rank,), invariant(ours))
                results.append(TensorResult(name, relative([piece], invariant(whole)), _EVA))
        return results

    def _expected(self, drawn: Iterable[str], init: bool | str) -> dict[str, Tensor]:
        """The values that the rule gives the factors `drawn`, apart from magnitudes."""
        seed, stacks, expected = self.evidence.case.seed, self.reference.stacks, dict[str, Tensor]()
        for name in drawn:
            if name not in self.reference.row_norms:
                shape = tuple(self.reference.initial[name].shape)
                expected[name] = expected_fresh(name, shape, init=init, seed=seed, stacks=stacks)
        return expected

    def _drawn(self, ranks: list[dict[str, Tensor]], wholes: dict[str, Tensor]) -> list[TensorResult]:
        """Of the ranks' tensors those that `wholes` has, to the bit."""
        return self._factors([only(factors, wholes) for factors in ranks], wholes)

    def router_scores(self) -> list[TensorResult]:
        """The weights of each token's choices, in order."""
        return self._modules("forward", self.of_routers(SCORES))

    def router_choices(self) -> list[TensorResult]:
        """The same experts in the same order for each token, exactly."""
        results = list[TensorResult]()
        for result in self._modules("forward", self.of_routers(CHOICES), is_exact=True):
            if not result.passed and not result.note:
                result = replace(result, note=f"{_moved(result)} tokens go elsewhere")
            results.append(result)
        return results

    def of_routers(self, kind: str) -> list[str]:
        """The names under which the routers' scores, or choices, are captured; none in a model without experts."""
        return [name for name in self.reference.micro_batches[0].forward if name.endswith(kind)]

    def forward(self) -> list[TensorResult]:
        return self._modules("forward", [name for name in self.reference.order if name])

    def logits(self) -> list[TensorResult]:
        return self._modules("forward", [""])

    def backward(self) -> list[TensorResult]:
        """Gradients of outputs in the order of backward: from the head to the first layer."""
        with_gradient = self.reference.micro_batches[0].backward
        return self._modules("backward", [name for name in reversed(self.reference.order) if name in with_gradient])

    def loss(self) -> list[TensorResult]:
        """The reported loss of every step, and the loss of every evaluation."""
        balance = self._scalars("aux_losses", "load-balancing loss of step")
        return self._scalars("losses", "loss of step") + balance + self._scalars("eval_losses", "loss of evaluation")

    def grad_norm(self) -> list[TensorResult]:
        """The reported norm and learning rate of every step, and its gradients after clipping."""
        results = self._scalars("grad_norms", "norm of step", least_noise=self._noise_of_gradients())
        for step, wholes in enumerate(self.reference.clipped):
            ours = [_at(trace.clipped, step, {}) for trace in self.ranks]
            low = [trace.clipped[step] for trace in self.evidence.rounded]
            if step == 0:
                results += self._factors(ours, wholes, low, label="clipped ")
                continue
            # From the second step on gradients depend on the optimizer's updates.
            for result in self._factors(ours, wholes, low, label="clipped ", phase="deltas"):
                results.append(replace(result, name=f"{result.name}, step {step + 1}"))
        return results + self._scalars("rates", "learning rate of step")

    def gradients(self) -> list[TensorResult]:
        low = _of(self.evidence.rounded, "gradients")
        return self._factors(_of(self.ranks, "gradients"), self.reference.gradients, low)

    def deltas(self) -> list[TensorResult]:
        """The total change of each factor over all optimizer steps."""
        (whole,), low = _changes([self.reference]), _changes(self.evidence.rounded)
        return self._factors(_changes(self.ranks), whole, low, phase="deltas")

    def saved_file(self) -> list[TensorResult]:
        """The saved adapter as PEFT reads it, minus the start values, and the logits of PEFT's model.

        Also: the files equal the ranks' tensors to the bit, without extra entries, and the configuration is that of the
        start adapter.
        """
        saved, reference = self.evidence.saved, self.reference
        # Where PEFT cannot read the file there is nothing else to compare.
        if saved.note:
            return [as_wanted(WEIGHTS, saved.note)]
        results = self._read_by_peft()
        if saved.logits is not None and reference.final_logits is not None:
            floor = _of(self.evidence.rounded, "final_logits")
            piece = unshard.Piece(0, (), saved.logits)
            results.append(self._compare("logits of PEFT", [piece], reference.final_logits, floor, "saved_file"))
        if wrong := self._scaled_otherwise(saved.scalings):
            results.append(as_wanted(CONFIG, f"PEFT gives it another scale, or puts it elsewhere: {wrong[0]}"))
        if saved.config_note:
            results.append(as_wanted(CONFIG, saved.config_note))
        results += self._bits(LAST, saved.last, _of(self.ranks, "final"))
        return results + self._bits(FIRST, saved.first, _of(self.ranks, "initial"))

    def _read_by_peft(self) -> list[TensorResult]:
        """What training changed of each factor, by the saved file as PEFT reads it."""
        read, initial = self.evidence.saved.read, self.reference.initial
        (wholes,), low = _changes([self.reference]), _changes(self.evidence.rounded)
        # As after AdamW: all tensors share the noise.
        noise = _noise(wholes, low)
        results = missing(read.keys(), wholes.keys())
        for name in sorted(wholes.keys() & read.keys(), key=self._place):
            whole = wholes[name]
            if read[name].shape != whole.shape:
                results.append(as_wanted(name, f"{list(read[name].shape)}, not {list(whole.shape)}"))
                continue
            piece = unshard.Piece(0, (), read[name] - initial[name])
            floor = [changes[name] for changes in low]
            results.append(self._compare(name, [piece], whole, floor, "saved_file", least_noise=noise))
        return results

    def _scaled_otherwise(self, *found: dict[str, float]) -> list[str]:
        """Modules whose scale in any of `found` differs from the reference's, apart from rounding."""
        wanted, wrong = self.reference.scalings, list[str]()
        for scales in found:
            for name in scales.keys() | wanted.keys():
                # NaN, of a module that one side lacks, is close to nothing.
                if not math.isclose(scales.get(name, math.nan), wanted.get(name, math.nan), rel_tol=1e-12):
                    wrong.append(name)
        return sorted(wrong)

    def collectives(self) -> list[TensorResult]:
        """No rank makes more calls than the plan allows, and of messages between stages exactly as many."""
        results, keys = list[TensorResult](), set[str]()
        for trace in self.ranks:
            keys |= trace.collectives.keys() | trace.budget.keys()
        for key in sorted(keys):
            # Messages between stages are planned one by one; collectives have an upper limit.
            is_message = key.endswith((" send", " receive"))
            most, error, note = -1, 0.0, ""
            for trace in self.ranks:  # each with its own budget: stages have plans of their own
                used, budget = trace.collectives.get(key, 0), trace.budget.get(key, 0)
                # A collective too few is seen in the numbers; a message too few is one that a stage waits for.
                off = abs(used - budget) if is_message else max(0, used - budget)
                if off > most:
                    most, error = off, off / max(budget, 1)
                    note = f"{used} calls, the plan has {budget}"
            results.append(TensorResult(key, error, 0.0, note=note))
        return results

    def _modules(self, phase: str, names: list[str], *, is_exact: bool = False) -> list[TensorResult]:
        """Module outputs, or their gradients, over all tokens of the first step."""
        results = []
        terms = set[str]().union(*_of(self.ranks, "terms"))
        for name in names:
            found = unshard.canonical(self.reference, self.tokens, phase, name)
            if found is None or self._is_in_a_kernel(phase, name) or (phase == "backward" and self._is_of_all(name)):
                continue
            whole, layout = found
            shown = name or "logits"
            try:
                pieces = unshard.token_pieces(self.ownership, phase, name, whole, layout)
            except unshard.ShapeError as error:
                results.append(as_wanted(shown, str(error)))
                continue
            if phase == "backward" and name.partition("#")[0] in terms:
                pieces = summed_where_unequal(pieces, whole)
            floor: list[Tensor] | None = None
            if not is_exact:  # this output in our precision, of each run that has it
                lower = [unshard.canonical(trace, self.tokens, phase, name) for trace in self.evidence.rounded]
                floor = [each[0] for each in lower if each is not None]
            results.append(self._compare(shown, pieces, whole, floor, phase))
        # Of all modules, not of the routers' own names or the logits alone.
        if names and names[0] in self.reference.order and names != [""]:
            results += self._unknown_to_reference(phase, set(names))
        return results

    def _unknown_to_reference(self, phase: str, names: set[str]) -> list[TensorResult]:
        """A failed result for each module of some rank that is not among `names`; those of routers have own phases."""
        ours = set[str]()
        for micro in self.micro_batches:
            for name in getattr(micro, phase):
                if name and not name.endswith((SCORES, CHOICES)):
                    ours.add(name)
        return missing(ours - names, ())

    def _is_of_all(self, name: str) -> bool:
        """Whether a module has one output for all rows, as of positions: a rank has the gradient of its own rows."""
        first = self.reference.micro_batches[0].forward
        rows = max((len(output) for output in first.values() if output.ndim == 3), default=0)
        return name in first and first[name].ndim == 3 and len(first[name]) < rows

    def _is_in_a_kernel(self, phase: str, name: str) -> bool:
        # One kernel computes it and what comes after: the linear that is called with the product of a gate shows that,
        # the norm of the residual stream what was added to it.
        added = ("o_proj", "self_attn", "down_proj", "mlp")
        of_kind = {"liger": ("act_fn",), "fused": ("act_fn", "gate_proj", "up_proj", *added)}
        inside = of_kind.get(self.evidence.case.kernels, ())
        if name.rpartition(".")[2] not in inside:
            return False
        return not any(name in getattr(micro, phase) for micro in self.micro_batches)

    def _bits(self, file: str, stored: dict[str, Tensor], holders: list[dict[str, Tensor]]) -> list[TensorResult]:
        """Empty if the file equals `holders` (one per rank, or one for all) to the bit; else one failed result."""
        wrong = list[str]()
        if len(holders) == self.topology.world:
            for result in self._factors(holders, stored):
                if not result.passed:
                    wrong.append(result.name)
        else:
            (whole,) = holders
            for name, tensor in stored.items():
                if name not in whole or not torch.equal(tensor, whole[name]):
                    wrong.append(name)
        if not wrong:
            return []
        note = f"{len(wrong)} of its tensors are not what the ranks hold, to the bit, first {min(wrong)}"
        return [as_wanted(f"{file}/{WEIGHTS}", note)]

    def _factors(
        self,
        ours: list[dict[str, Tensor]],
        wholes: dict[str, Tensor],
        rounded: list[dict[str, Tensor]] | None = None,
        *,
        phase: str = "gradients",
        label: str = "",
    ) -> list[TensorResult]:
        """Trained parameters, or one tensor for each of them, such as gradients. rounded: the reference's in lower
        precision; None: exact equality is required.

        AdamW divides by moments that may be tiny, so the worst element after it is a matter of luck. There all tensors
        share the noise, as a single tensor may be lucky.
        """
        # Before AdamW each tensor has a noise of its own.
        least_noise = _noise(wholes, rounded or []) if phase in _AFTER_ADAM else None
        results = missing(set[str]().union(*ours), wholes.keys())
        # Gradients in the order of backward, the last module first: there a fault shows first.
        is_backward = phase == "gradients" and rounded is not None
        for name in sorted(wholes, key=self._place, reverse=is_backward):
            whole = wholes[name]
            try:
                pieces = unshard.factor_pieces(ours, self.ownership, name, whole)
            except unshard.ShapeError as error:
                results.append(as_wanted(name, str(error)))
                continue
            floor = None if rounded is None else [low[name] for low in rounded]
            results.append(self._compare(label + name, pieces, whole, floor, phase, least_noise=least_noise))
        return results

    def _place(self, factor: str) -> tuple[int, str]:
        """Sort key of a factor: its module's place in execution order."""
        module = factor.rpartition(".lora_")[0]
        if stack_of(module) in self.reference.stacks:
            module = stack_of(module).rpartition(".")[0]
        return self.reference.order.index(module) if module in self.reference.order else -1, factor

    def _noise_of_gradients(self) -> float:
        """How far the reference's rounding moves the whole gradient of the first step, relative to its norm.

        It bounds the change of the norm: | |g + d| - |g| | <= |d|. The actual change may be small by luck, even in all
        of a few steps.
        """
        reference = self.reference.gradients
        moved = [_square(minus(reference, trace.gradients)) for trace in self.evidence.rounded]
        return math.sqrt(max(moved, default=0.0) / max(_square(reference), 1e-300))

    def _scalars(self, field_name: str, label: str, *, least_noise: float = 0.0) -> list[TensorResult]:
        """One number per step. In low precision all steps share the noise, as a single number may be lucky.

        least_noise: lower bound of the noise of each number, relative to it.
        """
        reference: list[float] = getattr(self.reference, field_name)
        ours: list[list[float]] = _of(self.ranks, field_name)
        wholes = torch.tensor(reference, dtype=torch.float64)
        low, gaps = _of(self.evidence.rounded, field_name), list[float]()
        if reference:  # of no steps, as without load balancing, there is no largest gap
            gaps = [float((torch.tensor(own, dtype=torch.float64) - wholes).abs().max()) for own in low]
        numbers = set(map(len, ours))
        common = min(*numbers, len(reference))
        results = []
        if numbers != {len(reference)}:
            note = f"there are {_either(numbers)}, not {len(reference)}"
            results.append(as_wanted(f"{label} {common + 1}", note))
        for step, whole in enumerate(wholes[:common]):
            values = []
            for rank, own in enumerate(ours):  # each is a copy of its own: all must be right
                values.append(unshard.Piece(rank, (rank,), torch.tensor([own[step]], dtype=torch.float64)))
            least = None
            if gaps:
                least = max(max(gaps) / max(abs(float(whole)), 1e-300), least_noise)
            name = f"{label} {step + 1}"
            results.append(self._compare(name, values, whole.reshape(1), [], "loss", least_noise=least))
        return results

    def _compare(
        self,
        name: str,
        pieces: list[unshard.Piece],
        whole: Tensor,
        rounded: list[Tensor] | None,
        phase: str,
        *,
        least_noise: float | None = None,
    ) -> TensorResult:
        """Compare with the limit of the phase and precision. rounded: as in `_factors`.

        least_noise: lower bound of the noise, relative to the largest element.
        """
        if rounded is None:
            return TensorResult(name, relative(pieces, whole), 0.0, whole, pieces)
        noise = _noise({name: whole}, [{name: low} for low in rounded])
        if noise is None and least_noise is None:
            limit = 1e-6 if phase in _AFTER_ADAM else 1e-11
            return TensorResult(name, relative(pieces, whole), limit, whole, pieces)
        noises = noise or 0.0, least_noise or 0.0
        if not math.isfinite(sum(noises)):  # any error would be below such a limit
            return as_wanted(name, "one process itself computes values that are not finite")
        # Where the reference rounds to nothing, by luck, one unit of the precision is allowed all the same.
        limit = _NOISE * max(noises) + torch.finfo(getattr(torch, self.evidence.case.dtype)).eps
        return TensorResult(name, relative(pieces, whole, largest=True), limit, whole, pieces)


def _of(traces: list[Trace], kind: str) -> list[Any]:
    """One attribute of each trace."""
    return [getattr(trace, kind) for trace in traces]


def _changes(traces: list[Trace]) -> list[dict[str, Tensor]]:
    """What all optimizer steps together change of each factor, by trace."""
    return [minus(trace.final, trace.initial) for trace in traces]


def _at(values: list[Any], step: int, otherwise: Any) -> Any:
    """The value of a step, or `otherwise` of a rank that made fewer steps."""
    return values[step] if step < len(values) else otherwise


def _either(numbers: set[int]) -> str:
    """`1 or 2`, for notes."""
    return " or ".join(map(str, sorted(numbers)))


def _of_all(found: list[dict[str, float]]) -> dict[str, float]:
    """Module -> the number that every rank with it has; NaN if they differ."""
    joined: dict[str, float] = {}
    for one in found:
        for name, value in one.items():
            # NaN is equal to nothing, so a module on which ranks differ matches no scale.
            joined[name] = value if joined.get(name, value) == value else math.nan
    return joined


def _square(tensors: dict[str, Tensor]) -> float:
    """The sum of all squared elements."""
    return sum(float(tensor.double().square().sum()) for tensor in tensors.values())


def _largest(values: Tensor) -> float:
    return float(values.double().abs().max()) if values.numel() else 0.0


def _noise(wholes: dict[str, Tensor], rounded: list[dict[str, Tensor]]) -> float | None:
    """The reference's largest rounding error of an element, relative to the largest element; None in float64."""
    gaps, sizes = list[float](), [1e-300]
    for name, whole in wholes.items():
        sizes.append(_largest(whole))
        for low in rounded:
            gaps.append(_largest(low[name].double() - whole.double()))
    if not gaps:
        return None
    return float(torch.tensor(gaps).max()) / max(sizes)  # torch's maximum is NaN if any is, Python's may not be


def _moved(result: TensorResult) -> int:
    """The number of tokens with other experts than in the reference."""
    assert result.whole is not None
    moved = set[int]()
    for piece in result.pieces:
        if piece.rows is not None:
            is_other = (piece.values != piece.of(result.whole)).any(1)
            moved |= {*piece.rows[is_other].tolist()}
    return len(moved)
