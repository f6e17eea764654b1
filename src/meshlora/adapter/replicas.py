"""The replica check: replicated parameters are equal to the bit on all ranks, or the run stops.

Owns: which copies must agree, their fingerprints, the one collective that compares them, and the error that names a
drift. Does not own: when it is called, the layout of factors on the mesh (`plan.grads`).

A factor is replicated along dp, and along tp if it is not split; one of experts along edp. Copies start equal and get
the same updates, so one differing bit is a fault, and a silent one: a file holds the copy of one rank only.

Only factors of one adapter are checked. Drifting AdamW state makes the parameters drift in the next step; the
frozen base is never written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshlora.adapter.attach import active_factors, adapter_factors, runtime
from meshlora.comm.collectives import all_gather, all_reduce_sum
from meshlora.plan.grads import GradPart, part_of
from meshlora_ground.errors import MeshloraError, numbered
from meshlora_ground.topology import Topology, size_of_copies

# Lanes hashed at once. Bounds the memory: 16 bytes per lane for the weights, and as much for their products.
_CHUNK = 2**18
# 5 modulo 8: differences of its powers have few factors of 2, so swapped chunks are always seen.
_CHUNK_FACTOR = 6364136223846793005
# Not nondeterministic kernels: all copies get their gradient from the same sum.
_LIKELY_CAUSE = (
    "a GPU with memory errors, unlike hardware or library versions on the ranks, or code that changes parameters on "
    "some ranks only"
)


@torch.no_grad()
def check_replicas(
    model: Any, *, step: int | None = None, last_saved: Path | None = None, adapter: str | None = None
) -> None:
    """Compare all copies of every factor of `adapter`, by default the active one, to the bit. Collective: all ranks
    must call it, and all raise.

    One all-gather of 16 bytes per factor: every rank sees all fingerprints, so it can name the odd ranks, and all reach
    the same verdict. With 448 factors (7 linears, 32 layers) a rank receives 57 kB on 8 ranks and 29 MB on 4096.
    All-reduces would stay small there, but need one collective per axis, and could not name the odd ranks.

    Args:
        step: steps done, for the message; None: not known. last_saved: the folder of the last save, for the message.

    Raises:
        MeshloraError: a factor has drifted; names it, the axes, the ranks, a likely cause and the way out.
    """
    mesh = runtime(model).mesh
    if mesh.topology.world == 1:
        return
    factors = active_factors(model) if adapter is None else adapter_factors(model, adapter)
    weights = position_weights(mesh.device)
    names, parts, own = list[str](), list[GradPart](), list[Tensor]()
    for factor in factors:
        for part in factor.rule.parts(rank=mesh.tp.rank, size=mesh.tp.size):
            names.append(factor.name)
            parts.append(part)
            own.append(fingerprint(part_of(factor.parameter, part), weights))
    ours = torch.stack(own)  # [num_parts, 2]
    # Of one stage, whose topology is that of all without the others.
    everyone = all_gather(ours.unsqueeze(0), mesh.stage).cpu()  # [ranks, num_parts, 2]
    topology = mesh.topology.with_stages(1)
    replicas = [replicated_over(part, topology) for part in parts]
    drifts = find_drifts(everyone, replicas, topology)
    # Every stage has compared its own: the others must stop with it.
    drifted = torch.zeros(mesh.pp.size, dtype=torch.int32, device=mesh.device)
    drifted[mesh.pp.rank] = len(drifts)
    drifted = all_reduce_sum(drifted, mesh.pp)
    if not drifted.any():
        return
    when = "the adapter" if step is None else f"step {step}"
    if not drifts:
        others = numbered("stage", drifted.nonzero().flatten().tolist())
        raise MeshloraError(f"{when}: parameters of {others} drifted, as its ranks say")
    first, axes = next(iter(drifts.items()))
    who = _who(everyone[:, first], replicas[first], topology, first_rank=mesh.stage.ranks[0])
    saved, way_out = "nothing has been saved yet", "start again"
    if last_saved is not None:
        saved = f"the last save, of equal copies, is {last_saved}"
        way_out = f"go on from there in a new run (adapter: {last_saved})"
    raise MeshloraError(
        f"{when}: {names[first]} must be the same to the bit over "
        f"{_words(replicas[first])}, and differs over {_words(axes)}: "
        f"{who}; drifted are {len(drifts)} of {len(parts)} parameters. "
        f"Nothing is saved at this step; {saved}. Likely cause: {_LIKELY_CAUSE}. "
        f"Mend it, then {way_out}"
    )


def replicated_over(part: GradPart, topology: Topology) -> frozenset[str]:
    """The axes of size > 1 along which a part is replicated."""
    return frozenset(axis for axis in part.replicas if topology.size_over({axis}) > 1)


def find_drifts(everyone: Tensor, replicas: Sequence[frozenset[str]], topology: Topology) -> dict[int, frozenset[str]]:
    """Index of each part with unequal copies -> the axes over which they differ, in order.

    everyone: fingerprints of all ranks `[world, num_parts, 2]`. replicas: the replicated axes of each part.
    """
    differs = {axis: _differs_over(axis, everyone, topology) for axis in frozenset().union(*replicas)}
    found: dict[int, frozenset[str]] = {}
    for index, over in enumerate(replicas):
        # Copies that agree along each axis all agree.
        if axes := frozenset(axis for axis in over if differs[axis][index]):
            found[index] = axes
    return found


def position_weights(device: torch.device) -> Tensor:
    """Two fixed rows of odd pseudo-random int64 weights `[2, chunk]`, one per position in a chunk."""
    # numpy guarantees a raw PCG64 stream across versions; torch guarantees nothing across versions.
    raw = np.random.PCG64(0).random_raw(2 * _CHUNK).view(np.int64)
    return torch.from_numpy(raw | 1).view(2, _CHUNK).to(device)


def fingerprint(tensor: Tensor, weights: Tensor) -> Tensor:
    """Two int64 `[2]` of the bits of `tensor` and their order: sum of lane times weight, modulo 2^64.

    Computed on the tensor's device, by three kernels per chunk. Integer sums do not depend on the order.

    A change within one lane is always seen, as odd weights are invertible. Any other escapes one sum with probability
    at most 2^-32, and both with 2^-64. This needs lanes of at most 32 bits, so a float64 is two: times an odd weight,
    sign flips of two float64 would cancel, 2^63 (w1 + w2) = 0 modulo 2^64.
    """
    lane = torch.int16 if tensor.element_size() == 2 else torch.int32
    lanes = tensor.detach().contiguous().view(-1).view(lane)
    total = weights.new_zeros(2)
    for chunk in lanes.split(weights.shape[1]):
        total = (chunk * weights[:, : len(chunk)]).sum(dim=1).add_(total, alpha=_CHUNK_FACTOR)
    return total


def _differs_over(axis: str, everyone: Tensor, topology: Topology) -> list[bool]:
    """Whether copies of each part differ along `axis`."""
    lines = everyone[torch.tensor(topology.groups_over(frozenset({axis})))]  # [num_groups, size, num_parts, 2]
    return (lines != lines[:, :1]).any(dim=3).any(dim=1).any(dim=0).tolist()


def _who(values: Tensor, axes: frozenset[str], topology: Topology, *, first_rank: int = 0) -> str:
    """The ranks with odd copies of one part, `values` `[ranks, 2]`: those outside the majority of their group.

    first_rank: the global number of the first of these ranks.
    """
    found = []
    for ranks in topology.groups_over(axes):
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            holders.setdefault(tuple(values[rank].tolist()), []).append(first_rank + rank)
        most, *others = sorted(holders.values(), key=len, reverse=True)
        if others and len(most) > len(others[0]):
            odd = sorted(itertools.chain(*others))
            found.append(f"{numbered('rank', odd)} against the {len(most)} of the majority")
        elif others:
            sides = (numbered("rank", group) for group in holders.values())
            found.append(" against ".join(sides) + ", without a majority")
    return ", and ".join(found)


def _words(axes: frozenset[str]) -> str:
    return " and ".join(sorted("tp (key/value heads)" if size_of_copies(axis) else axis for axis in axes))
