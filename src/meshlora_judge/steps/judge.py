"""Recorded steps against transformers and PEFT on one process: each step by itself, from the values that it began with.

Owns: the phases and their limits. Gradients: relative L2 distance of each parameter from the reference's, in float64
where that fits into memory; in a lower precision the reference runs in it too, and the trainer may be four times as far
as that. Clipping and the update are judged from the gradients that the trainer had, so one fault is
not counted thrice. Does not own: causes (`steps.causes`), which parts make a whole (`steps.ranks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshlora_ground.errors import UnsupportedError
from meshlora_judge.recording.files import Recording, Step
from meshlora_judge.steps.gradients import Gradients, Judged, Observed
from meshlora_judge.steps.ranks import DataRanks, data_ranks, wholes
from meshlora_judge.steps.reference import Reference
from meshlora_judge.steps.update import judge_clipping, judge_state, judge_update
from meshlora_judge.steps.verdict import Finding, Verdict


def judge_steps(recordings: Sequence[Recording], base: str) -> Verdict:
    """The verdict on all recorded steps. Raises: UserError, UnsupportedError: it cannot be replayed."""
    verdict = Verdict(notes=sorted({note for recording in recordings for note in recording.notes}))
    ranks = data_ranks(recordings)
    _facts(verdict, recordings, ranks)
    if ranks.repeats:
        words = "it has the very rows of another rank, so all of them together train on one rank's share"
        verdict.findings.append(Finding(0, "rows", "same rows", words, ranks=ranks.repeats))
    reference = Reference(base, recordings)
    if reference.precision != torch.float64:
        verdict.notes.append("the reference is in float32, as float64 does not fit here; its own rounding is measured")
    _judge_trained(verdict, recordings, reference)
    previous: Gradients = {}
    for step in range(len(recordings[0].steps)):
        previous = _judge_step(verdict, recordings, ranks, reference, step, previous)
    return verdict


def _facts(verdict: Verdict, recordings: Sequence[Recording], ranks: DataRanks) -> None:
    first = recordings[0]
    sharded = [name for name, lies in first.frozen.items() if lies["kind"] != "plain"]
    split, counted = "nothing is sharded", "one"
    if sharded:
        split = f"{len(sharded)} of {len(first.frozen)} frozen parameters are sharded"
    if len(recordings) > 1:
        counted = f"{len(recordings)} processes, {ranks.number} with rows of their own"
    verdict.facts |= {
        "processes": counted,
        "base": f"{split}; {first.wrapper or 'no wrapper'}",
        "trained": f"{len(first.trained)} parameters",
        "steps": f"{len(first.steps)}, loss {first.loss['kind']}",
    }


def _judge_trained(verdict: Verdict, recordings: Sequence[Recording], reference: Reference) -> None:
    """Every parameter that PEFT trains is trained, has a gradient, and is the optimizer's."""
    wanted = reference.wanted or {*recordings[0].trained}
    for recording in recordings:
        step = recording.steps[0]
        owned = {name for group in step.optimizer["groups"] for name in group["names"]}
        for found, cause, words in (
            ({*recording.trained}, "frozen", "frozen, though its adapter trains it"),
            (owned, "not in the optimizer", "it is trained, and no group of the optimizer has it"),
            ({*step.raw} | {*step.clipped}, "no gradient", "no gradient reached it"),
        ):
            missing = tuple(sorted(wanted - found))
            if missing:
                verdict.findings.append(Finding(0, "trained", cause, words, missing, (recording.rank,)))
                break  # what is frozen is in no optimizer and has no gradient: one fault, said once
    verdict.compare("trained", 0.0, 1.0)


def _judge_step(
    verdict: Verdict,
    recordings: Sequence[Recording],
    ranks: DataRanks,
    reference: Reference,
    number: int,
    previous: Gradients,
) -> Gradients:
    """Judge one step; returns its right gradients. previous: those of the step before."""
    steps = [recording.steps[number] for recording in recordings]
    for rank, step in enumerate(steps):
        broken = tuple(name for name, value in step.before.items() if not bool(value.isfinite().all()))
        if broken:
            words = "it holds NaN or infinity before the step"
            verdict.findings.append(Finding(number, "trained", "not finite", words, broken, (rank,)))
            return previous
    _judge_between(verdict, recordings, number)
    known = len(verdict.findings)
    before = _copies(verdict, [step.before for step in steps], reference, number)
    if number == 0:
        reference.begin(before)
    micro = ranks.micro_batches(recordings, number)
    if not micro:
        raise UnsupportedError(f"step {number + 1}", "no forward of the model was seen", "record the model called")
    judged = Judged(verdict, reference, ranks, number, micro, before)
    found = judged.of_steps(steps)
    if len(verdict.findings) == known:  # else each rank has gradients at a place of its own
        observed = []
        for rank, step in enumerate(steps):
            observed.append(Observed(found[rank], step.left, previous, int(step.clip.get("calls", 0))))
        judged.judge(observed)
    _copies(verdict, [step.after for step in steps], reference, number)
    for rank, step in enumerate(steps):
        # A rank that ended where rank 0 did moved as it did, and has nothing to add.
        if rank == 0 or not _same_values(steps[0], step):
            judge_clipping(verdict, number, rank, dataclasses.replace(step, raw=dict(found[rank])))
            judge_update(verdict, number, rank, step)
    return judged.right


def _same_values(a: Step, b: Step) -> bool:
    return all(name in b.after and torch.equal(value, b.after[name]) for name, value in a.after.items())


def _judge_between(verdict: Verdict, recordings: Sequence[Recording], number: int) -> None:
    """A step begins with what the one before it ended with."""
    if not number:
        return
    for recording in recordings:
        ended, begins = recording.steps[number - 1].after, recording.steps[number].before
        changed = [name for name in ended if name in begins and not torch.equal(ended[name], begins[name])]
        verdict.compare("between", float(len(changed)), 0.5)
        if changed:
            words = "something else than the optimizer changed it after the step before"
            found = Finding(number, "between", "changed between steps", words, tuple(changed), (recording.rank,))
            verdict.findings.append(found)
        judge_state(verdict, number, recording.rank, recording.steps[number - 1], recording.steps[number])


def _copies(
    verdict: Verdict, values: Sequence[Mapping[str, Tensor]], reference: Reference, number: int
) -> dict[str, Tensor]:
    """Whole values of every trained parameter: rank 0's, where the ranks agree; where not, that is a finding."""
    found, drifted, lacking = dict[str, Tensor](), list[str](), list[str]()
    for name, shape in reference.shapes.items():
        copies = wholes([each.get(name) for each in values], shape)
        if copies is None or copies[0] is None:
            lacking.append(name)
            continue
        found[name] = copies[0]
        if any(copy is not None and not torch.equal(copy, copies[0]) for copy in copies):
            drifted.append(name)
    verdict.compare("replicas", float(len(drifted) + len(lacking)), 0.5)
    if lacking:
        shapes = {tuple(each[lacking[0]].shape) for each in values if lacking[0] in each}
        words = f"the ranks have parts of {sorted(shapes)}, which do not make the whole {reference.shapes[lacking[0]]}"
        verdict.findings.append(Finding(number, "replicas", "a shard", words, tuple(lacking)))
    if drifted:
        words = f"its copies have drifted apart: {len(values)} ranks train adapters of their own"
        verdict.findings.append(Finding(number, "replicas", "replicas drifted", words, tuple(drifted)))
    return found
