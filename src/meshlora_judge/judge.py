"""The judge: two traces in, a verdict out. Each tensor by itself; nothing is averaged.

Owns: the phases, their limits, and what counts as equal. Does not own: the likely cause
(`meshlora_judge.diagnosis.diagnose`), or recording the traces.

Limits come from precision. In float64 (lifted) the relative L2 distance of a tensor is at most 1e-11, after AdamW 1e-6,
as Adam divides by tiny moments. In a lower precision the reference runs in that precision too, and ours may be four
times as far from float64 as the reference's own rounding: `max|ours - ref64| <= 4 max|ref_low - ref64|`, after AdamW
with the maximum over all tensors or over one, whichever is larger. For bfloat16 there are two such runs, as one process
can train in two ways: with the adapter in float32, and under autocast with the adapter in bfloat16, as ours is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from peft import LoraConfig
from torch import Tensor

from meshlora_ground.topology import Topology
from meshlora_judge.capture import CHOICES, SCORES
from meshlora_judge.case import Case
from meshlora_judge.experts import stack_of
from meshlora_judge.inputs import expected_fresh
from meshlora_judge.results import Phase, TensorResult, as_wanted, minus, missing, only, relative, summed_where_unequal
from meshlora_judge.saved import CONFIG, FIRST, FRESH, LAST, WEIGHTS, Saved
from meshlora_judge.trace import Trace
from meshlora_judge.unshard import (
    Ownership,
    Piece,
    ShapeError,
    canonical,
    factor_pieces,
    most_in_a_row,
    sequences_of,
    token_pieces,
)

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
    "collectives": "collectives within the plan",
    "adapters": "several adapters at once",
}
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
    has_experts = any(name.endswith(CHOICES) for name in evidence.reference.micro_batches[0].forward)
    left_out = ["adapters"]  # which have runs of their own
    left_out += [] if has_experts else ["router_scores", "router_choices"]
    return (Phase(name, getattr(results, name)()) for name in PHASES if name not in left_out)


class _Judge:
    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.reference, self.ranks, self.topology = evidence.reference, evidence.ranks, evidence.topology
        self.ownership = Ownership(self.ranks, self.reference, self.topology)
        self.tokens = self.ownership.tokens

    def sequences(self) -> list[TensorResult]:
        """Each sequence of the step is taken by one dp rank, on all its ranks; the count of trained tokens is right."""
        results = list[TensorResult]()
        places = [self.topology.place_of_rows(rank) for rank in range(self.topology.world)]
        for index, sequence in enumerate(self.tokens.sequences):
            takers = [sum(sequence == s for m in trace.micro_batches for s in sequences_of(m)) for trace in self.ranks]
            times = {sum(n for n, own in zip(takers, places, strict=True) if own == place) for place in places}
            note = "" if times == {1} else f"taken {' or '.join(map(str, sorted(times)))} times"
            results.append(as_wanted(f"sequence {index}", note))
        for step, number in enumerate(self.reference.num_tokens):
            # Infinite if a rank made fewer steps.
            ours = {t.num_tokens[step] if step < len(t.num_tokens) else math.inf for t in self.ranks}
            note = "" if ours == {number} else f"{', '.join(map(str, sorted(ours)))} trained tokens, not {number}"
            error = max(abs(n - number) / number for n in ours)
            results.append(TensorResult(f"tokens of step {step + 1}", error, 0.0, note=note))
        if self.evidence.case.packing:
            most = max(most_in_a_row(micro) for trace in self.ranks for micro in trace.micro_batches)
            results.append(as_wanted("packed rows", "" if most > 1 else "no row holds more than one sequence"))
        return results

    def loaded_adapter(self) -> list[TensorResult]:
        return self._factors([t.initial for t in self.ranks], self.reference.initial)

    def fresh_adapter(self) -> list[TensorResult]:
        """Fresh adapters, as configured and with B drawn as well, follow the rule to the bit.

        Their scales, and the saved file of the second, match PEFT's reading of the configuration.
        """
        saved, results = self.evidence.saved, list[TensorResult]()
        drawn = {name: t for name, t in self.reference.initial.items() if ".lora_" in name}
        magnitudes = {name: t for name, t in self.reference.row_norms.items() if name in drawn}
        of_base = {name: t for name, t in self.reference.base.items() if name in self.reference.initial}
        expected: dict[str, Tensor] = {}
        case, stacks = self.evidence.case, self.reference.stacks
        for kind, init in (("fresh", LoraConfig(**case.lora).init_lora_weights), ("fresh_both", False)):
            ranks = [getattr(trace, kind) for trace in self.ranks]
            expected = {
                name: expected_fresh(name, tuple(t.shape), init=init, seed=case.seed, stacks=stacks)
                for name, t in drawn.items()
                if name not in magnitudes
            }
            # With B drawn a magnitude is the sum's row norm, which is not checked; as configured it is the base's.
            for wholes in (expected, of_base, magnitudes if kind == "fresh" else {}):
                found = self._factors([only(r, wholes) for r in ranks], wholes)
                results += [replace(r, limit=1e-6) for r in found] if wholes is magnitudes else found
            unknown = {name for r in ranks for name in r} - drawn.keys() - of_base.keys()
            results += missing(unknown, ())
        of_ranks = [_of_all([getattr(t, k) for t in self.ranks]) for k in ("scalings", "fresh_scalings")]
        every = [saved.fresh_scalings, *of_ranks]
        if (wrong := self._scaled_otherwise(*every)) or saved.fresh_note:
            note = saved.fresh_note or f"where it sits, or its scale, is not what PEFT says: {wrong[0]}"
            results.append(as_wanted(f"{FRESH}/{CONFIG}", note))
        return results + self._bits(FRESH, only(saved.fresh, expected), [expected])

    def router_scores(self) -> list[TensorResult]:
        """The weights of each token's choices, in order."""
        return self._modules("forward", self._of_routers(SCORES))

    def router_choices(self) -> list[TensorResult]:
        """The same experts in the same order for each token, exactly."""
        results = self._modules("forward", self._of_routers(CHOICES), is_exact=True)
        return [
            result if result.passed or result.note else replace(result, note=f"{_moved(result)} tokens go elsewhere")
            for result in results
        ]

    def _of_routers(self, kind: str) -> list[str]:
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
            ours = [trace.clipped[step] if step < len(trace.clipped) else {} for trace in self.ranks]
            low = [trace.clipped[step] for trace in self.evidence.rounded]
            found = self._factors(ours, wholes, low, label="clipped ", phase="deltas" if step else "gradients")
            # From the second step on gradients depend on the optimizer's updates.
            results += [replace(result, name=f"{result.name}, step {step + 1}") if step else result for result in found]
        return results + self._scalars("rates", "learning rate of step")

    def gradients(self) -> list[TensorResult]:
        low = [trace.gradients for trace in self.evidence.rounded]
        return self._factors([t.gradients for t in self.ranks], self.reference.gradients, low)

    def deltas(self) -> list[TensorResult]:
        """The total change of each factor over all optimizer steps."""
        ours, low = ([minus(t.final, t.initial) for t in of] for of in (self.ranks, self.evidence.rounded))
        return self._factors(ours, minus(self.reference.final, self.reference.initial), low, phase="deltas")

    def saved_file(self) -> list[TensorResult]:
        """The saved adapter as PEFT reads it, minus the start values, and the logits of PEFT's model.

        Also: the files equal the ranks' tensors to the bit, without extra entries, and the configuration is that of the
        start adapter.
        """
        saved, reference, rounded = self.evidence.saved, self.reference, self.evidence.rounded
        if saved.note:
            return [as_wanted(WEIGHTS, saved.note)]
        wholes = minus(reference.final, reference.initial)
        low = [minus(trace.final, trace.initial) for trace in rounded]
        noise = _noise(wholes, low)
        results = missing(saved.read.keys(), wholes.keys())
        for name in sorted(wholes.keys() & saved.read.keys(), key=self._place):
            if saved.read[name].shape != wholes[name].shape:
                shapes = f"{list(saved.read[name].shape)}, not {list(wholes[name].shape)}"
                results.append(as_wanted(name, shapes))
                continue
            piece = Piece(0, (), saved.read[name] - reference.initial[name])
            floor = [d[name] for d in low]
            results.append(self._compare(name, [piece], wholes[name], floor, "saved_file", least_noise=noise))
        if saved.logits is not None and reference.final_logits is not None:
            piece = Piece(0, (), saved.logits)
            floor = [t.final_logits for t in rounded if t.final_logits is not None]
            results.append(self._compare("logits of PEFT", [piece], reference.final_logits, floor, "saved_file"))
        if wrong := self._scaled_otherwise(saved.scalings):
            results.append(as_wanted(CONFIG, f"PEFT gives it another scale, or puts it elsewhere: {wrong[0]}"))
        if saved.config_note:
            results.append(as_wanted(CONFIG, saved.config_note))
        results += self._bits(LAST, saved.last, [trace.final for trace in self.ranks])
        return results + self._bits(FIRST, saved.first, [trace.initial for trace in self.ranks])

    def _scaled_otherwise(self, *found: dict[str, float]) -> list[str]:
        """Modules whose scale in any of `found` differs from the reference's, apart from rounding."""
        scales, nothing = self.reference.scalings, math.nan
        return sorted(
            name
            for one in found
            for name in one.keys() | scales.keys()
            if not math.isclose(one.get(name, nothing), scales.get(name, nothing), rel_tol=1e-12)
        )

    def collectives(self) -> list[TensorResult]:
        """No rank makes more calls than the plan allows, and of messages between stages exactly as many."""
        results = []
        for key in sorted({k for t in self.ranks for k in (*t.collectives, *t.budget)}):
            calls = [(trace.collectives.get(key, 0), trace.budget.get(key, 0)) for trace in self.ranks]
            is_message = key.endswith((" send", " receive"))
            off = [abs(used - budget) if is_message else max(0, used - budget) for used, budget in calls]
            used, budget = calls[off.index(max(off))]  # stages have plans of their own
            note = f"{used} calls, the plan has {budget}"
            results.append(TensorResult(key, max(off) / max(budget, 1), 0.0, note=note))
        return results

    def _modules(self, phase: str, names: list[str], *, is_exact: bool = False) -> list[TensorResult]:
        """Module outputs, or their gradients, over all tokens of the first step."""
        results = []
        for name in names:
            found = canonical(self.reference, self.tokens, phase, name)
            if found is None:
                continue
            if self._is_in_a_kernel(phase, name):
                continue
            low = [canonical(trace, self.tokens, phase, name) for trace in self.evidence.rounded]
            floor = None if is_exact else [one[0] for one in low if one is not None]
            shown = name or "logits"
            try:
                pieces = token_pieces(self.ownership, phase, name, *found)
            except ShapeError as error:
                results.append(as_wanted(shown, str(error)))
                continue
            if phase == "backward" and any(name.partition("#")[0] in trace.terms for trace in self.ranks):
                pieces = summed_where_unequal(pieces, found[0])
            results.append(self._compare(shown, pieces, found[0], floor, phase))
        if names and names[0] in self.reference.order and names != [""]:
            ours = {n for t in self.ranks for m in t.micro_batches for n in getattr(m, phase) if n}
            ours = {n for n in ours if not n.endswith((SCORES, CHOICES))}
            results += [r for r in missing(ours, set(names)) if "not in the reference" in r.note]
        return results

    def _is_in_a_kernel(self, phase: str, name: str) -> bool:
        """Whether this activation has no output of its own on any rank, as one kernel computes it and the product after
        it: the linear that is called with the product shows it.
        """
        if self.evidence.case.kernels == "none" or name.rpartition(".")[2] != "act_fn":
            return False
        return not any(name in getattr(micro, phase) for trace in self.ranks for micro in trace.micro_batches)

    def _bits(self, file: str, stored: dict[str, Tensor], holders: list[dict[str, Tensor]]) -> list[TensorResult]:
        """Empty if the file equals `holders` (one per rank, or one for all) to the bit; else one failed result."""
        if len(holders) == self.topology.world:
            wrong = [r.name for r in self._factors(holders, stored) if not r.passed]
        else:
            (whole,) = holders
            wrong = [name for name in stored if name not in whole or not torch.equal(stored[name], whole[name])]
        note = f"{len(wrong)} of its tensors are not what the ranks hold, to the bit, first {min(wrong, default='')}"
        return [as_wanted(f"{file}/{WEIGHTS}", note)] if wrong else []

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
        least_noise = _noise(wholes, rounded or []) if phase in _AFTER_ADAM else None
        results = missing({name for factors in ours for name in factors}, wholes.keys())
        for name in sorted(wholes, key=self._place, reverse=phase == "gradients" and rounded is not None):
            whole = wholes[name]
            try:
                pieces = factor_pieces(ours, self.ownership, name, whole)
            except ShapeError as error:
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
        whole = sum(float(g.double().square().sum()) for g in reference.values())
        moved = [
            sum(float((trace.gradients[n].double() - g.double()).square().sum()) for n, g in reference.items())
            for trace in self.evidence.rounded
        ]
        return math.sqrt(max(moved, default=0.0) / max(whole, 1e-300))

    def _scalars(self, field_name: str, label: str, *, least_noise: float = 0.0) -> list[TensorResult]:
        """One number per step. In low precision all steps share the noise, as a single number may be lucky.

        least_noise: lower bound of the noise of each number, relative to it.
        """
        reference: list[float] = getattr(self.reference, field_name)
        numbers = {len(getattr(trace, field_name)) for trace in self.ranks}
        wholes = torch.tensor(reference, dtype=torch.float64)
        low = [torch.tensor(getattr(t, field_name), dtype=torch.float64) for t in self.evidence.rounded]
        results = []
        if numbers != {len(reference)}:
            note = f"there are {' or '.join(map(str, sorted(numbers)))}, not {len(reference)}"
            results.append(as_wanted(f"{label} {min(*numbers, len(reference)) + 1}", note))
        for step, whole in enumerate(wholes[: min(*numbers, len(reference))]):
            values = [
                Piece(rank, (rank,), torch.tensor([getattr(trace, field_name)[step]], dtype=torch.float64))
                for rank, trace in enumerate(self.ranks)
            ]
            seen = [float((own - wholes).abs().max()) / max(abs(float(whole)), 1e-300) for own in low]
            least = max(*seen, least_noise) if seen else None
            results.append(
                self._compare(f"{label} {step + 1}", values, whole.reshape(1), [], "loss", least_noise=least)
            )
        return results

    def _compare(
        self,
        name: str,
        pieces: list[Piece],
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
        noises = [found for found in (noise, least_noise) if found is not None]
        if not noises:
            limit = 1e-6 if phase in _AFTER_ADAM else 1e-11
            return TensorResult(name, relative(pieces, whole), limit, whole, pieces)
        if not math.isfinite(sum(noises)):
            return as_wanted(name, "one process itself computes values that are not finite")
        limit = _NOISE * max(noises) + torch.finfo(getattr(torch, self.evidence.case.dtype)).eps
        return TensorResult(name, relative(pieces, whole, largest=True), limit, whole, pieces)


def _of_all(found: list[dict[str, float]]) -> dict[str, float]:
    """Module -> the number that every rank with it has; NaN if they differ."""
    joined: dict[str, float] = {}
    for name, value in (item for one in found for item in one.items()):
        joined[name] = value if joined.get(name, value) == value else math.nan
    return joined


def _largest(values: Tensor) -> float:
    return float(values.double().abs().max()) if values.numel() else 0.0


def _noise(wholes: dict[str, Tensor], rounded: list[dict[str, Tensor]]) -> float | None:
    """The reference's largest rounding error of an element, relative to the largest element; None in float64."""
    gaps = [_largest(low[name].double() - whole.double()) for low in rounded for name, whole in wholes.items()]
    if not gaps:
        return None
    return float(torch.tensor(gaps).max()) / max(1e-300, *(_largest(whole) for whole in wholes.values()))  # or NaN


def _moved(result: TensorResult) -> int:
    """The number of tokens with other experts than in the reference."""
    assert result.whole is not None
    wrong = [p.rows[(p.values != p.of(result.whole)).any(1)] for p in result.pieces if p.rows is not None]
    return len(set(torch.cat(wrong).tolist())) if wrong else 0
