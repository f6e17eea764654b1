"""One optimizer step of a loop of a user's own: `with meshlora.step(model, optimizer) as step: step.backward(loss)`.

Owns: the order of a step (backward, finish gradients, clip, update, zero), the mistakes that a loop can make in it, and
their agreement: one gather of a row of numbers from each rank, after which all ranks raise the same error or none does.
Does not own: gradient sums (`train.gradsync`), which rows a rank is given (`run.feeding`), a step of `meshlora train`
(`run.trainer`).

What is wrong is raised before any gradient is summed. A rank that raised another exception in the block joins the
gather where no other rank can be waiting in its forward, and says so; where ranks compute a forward together they raise
together, or the time limit ends the wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from meshlora.adapter.attach import Factor, active_factors, runtime
from meshlora.adapter.replicas import check_replicas
from meshlora.adapter.updates import is_finished
from meshlora.comm.collectives import all_gather
from meshlora.comm.groups import LOADING_S, Mesh
from meshlora.loading.own_loop import own_loss
from meshlora.train.elementwise import check_optimizer, check_rates
from meshlora.train.gradsync import check_total, clip_gradients_on_device, finish_gradients_on_device
from meshlora_ground.compat.torch_tensors import is_mean
from meshlora_ground.errors import MeshloraError, UserError, numbered
from meshlora_ground.topology import FEATURES, LAYERS, SEQUENCES

# How far losses of tp ranks, which compute one forward, may be apart: nothing that differs on purpose is that close.
_ALIKE = 1e-3
_PATIENCE_S = 1800.0  # torch's own
# Steps between comparisons of the copies that ranks hold, as `train.replica_check_every` has it by default.
_REPLICAS_EVERY = 100
_FAILED = 9
# What a rank tells the others of its step, by number: (what is given, the rule, the way out).
_MISTAKES = {
    1: ("a step without backward", "it would leave the adapter as it is", "call step.backward(loss), on every rank"),
    2: (
        "a step finished twice",
        "its end finishes the gradients, and finish_gradients was called in it",
        "leave finish_gradients out, or use it without meshlora.step",
    ),
    3: (
        "a mean where a sum is meant",
        "loss.backward() of model(..., labels=...) was called in a step, which divides sums by all tokens",
        "call step.backward(loss)",
    ),
    4: ("a step in which a factor has no gradient", "the forward has not used it", "use the whole model, in each step"),
}


def step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    seed: int = 0,
    number: int | None = None,
    timeout_s: float = _PATIENCE_S,
) -> Step:
    """The next optimizer step of the active adapter, a context. Every rank opens one at the same time.

        with meshlora.step(model, optimizer, max_norm=1.0) as step:
            for batch in micro_batches:
                step.backward(model(**batch).loss)
        scheduler.step()
        print(step.loss, step.grad_norm, step.num_tokens)

    At its end gradients are summed over the mesh, divided by the number of trained tokens of all micro-batches and
    ranks, and clipped to `max_norm` (None: not); the optimizer steps, and gradients are set to None. After any error
    gradients are None too, and the adapter is as it was before.

    seed, number: of the masks of dropout, which are a function of both, and of each token and its sequence: the same on
    every mesh. number: of the step, from 0; None: one more than of the last. Give it in a loop that resumes.
    timeout_s: how long a rank waits in it for another one, which may still be saving or evaluating.

    Raises:
        UserError: no adapter is active; the optimizer has not the factors of the adapter, or is not elementwise;
            gradients are left of before; a step of this model is open.
    """
    return Step(model, optimizer, max_norm, (seed, number), timeout_s)


class Step:
    """See `step`.

    Attributes, after the block:
        loss: the mean over all trained tokens of all ranks. grad_norm: the global 2-norm before clipping. num_tokens:
            the trained tokens, counted once.
    """

    loss: float
    grad_norm: float
    num_tokens: int

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None,
        masks: tuple[int, int | None],
        timeout_s: float,
    ) -> None:
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm
        self._masks, self._timeout_s = masks, timeout_s
        self._state, self._mesh = runtime(model), runtime(model).mesh
        self._factors: list[Factor] = []
        self._is_new, self._is_open = True, False
        self._sums: list[tuple[Tensor, Any]] = []
        self._divisor: Any = None

    def __enter__(self) -> Self:
        loop = self._state.loop
        if not self._is_new or loop.is_in_step:
            given = "a step in a step" if loop.is_in_step else "a step that has been used"
            raise UserError(given, "each is one update of the adapter", "open the next one with meshlora.step")
        self._factors = active_factors(self.model)
        _check_optimizer(self.optimizer, self._factors, self._mesh)
        for factor in self._factors:
            if factor.parameter.grad is not None:
                rule = "what is left of before would be counted as of this step"
                given = f"a step that begins with a gradient of {factor.name}"
                raise UserError(given, rule, "call optimizer.zero_grad()")
        self._is_new, self._is_open, loop.is_in_step, loop.is_divided = False, True, True, False
        seed, number = self._masks
        loop.masks = (seed, loop.num_steps if number is None else number)
        loop.num_steps = loop.masks[1] + 1
        # Another rank may be late by as much as it takes to save or evaluate.
        self._mesh.wait_at_most(self._timeout_s)
        return self

    def backward(self, loss: Tensor, num_tokens: int | None = None) -> None:
        """Add the gradients of a micro-batch.

        loss: `[]`, of this rank's rows: as `model(..., labels=...)` has returned it, whose tokens are known; or a sum
            over `num_tokens` trained tokens (or what else the loss is a mean of). tp ranks give the same; cp ranks too
            the same number, that of the whole rows.

        Raises:
            UserError: the step is over; the loss is no scalar, has no gradient, or is a mean of its own.
        """
        if not self._is_open:
            raise UserError("backward outside of its step", "the step is over", "call it inside of the `with` block")
        if loss.ndim != 0:
            raise UserError(f"a loss of shape {list(loss.shape)}", "it is one number", "call .sum() on it")
        if not loss.requires_grad:
            rule = "the forward ran without the adapter, or without gradients"
            raise UserError("a loss that nothing trained has made", rule, "leave out disable_adapter and no_grad")
        own = own_loss(loss)
        if own is not None:
            if num_tokens is not None and num_tokens != int(own.number):
                rule = f"the model has counted {int(own.number)} labels that a token before them predicts"
                raise UserError(f"num_tokens={num_tokens}", rule, "leave it out")
            own.total.backward()
            self._sums.append((own.total.detach(), own.number))
            if own.divisor is not None:
                self._divisor = own.divisor
            return
        if num_tokens is None or num_tokens < 0:
            given = f"num_tokens={num_tokens}"
            if num_tokens is None:
                given = "a loss of your own without num_tokens"
            raise UserError(given, "the step divides by the tokens of all", "call step.backward(loss_sum, num_tokens)")
        # Of one token the mean is the sum.
        if num_tokens > 1 and is_mean(loss):
            rule = "it is divided by the tokens of all micro-batches and ranks at the end of the step"
            raise UserError("a mean where a sum is meant", rule, "use reduction='sum', or .sum()")
        loss.backward()
        self._sums.append((loss.detach(), num_tokens))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        try:
            if error is None:
                self._finish()
            elif isinstance(error, Exception) and self._meets_at_the_end:
                self._gathered(_FAILED)
        finally:
            self._state.loop.is_in_step = self._state.loop.is_divided = False
            self._state.loop.masks = None
            self._state.dropout.say(None)
            for factor in self._factors:
                factor.parameter.grad = None
            self._sums.clear()
            self._mesh.wait_at_most(LOADING_S)

    def _finish(self) -> None:
        mesh, factors = self._mesh, self._factors
        rows = self._gathered(self._mistake())
        total, self.loss = _checked(rows, mesh)
        own = 0
        if mesh.cp.rank == 0:  # cp ranks give the number of the whole rows, which counts once
            own = int(rows[mesh.rank][1])
        # From here on nothing is refused but numbers that are not finite.
        finish_gradients_on_device(mesh, [factors], [own])
        self.grad_norm = float(clip_gradients_on_device(mesh, [factors], [self.max_norm]).item())
        self.num_tokens = total
        if not math.isfinite(self.loss) or not math.isfinite(self.grad_norm):
            raise MeshloraError(
                f"the loss of a step is {self.loss}, its gradient norm {self.grad_norm}: the adapter is left as it was"
            )
        self.optimizer.step()
        if (number := self._state.loop.num_steps) % _REPLICAS_EVERY == 0:
            check_replicas(self.model, step=number)

    def _mistake(self) -> int:
        """The number of this rank's mistake; 0: none."""
        is_complete = True
        for factor in self._factors:
            grad = factor.parameter.grad
            if grad is None:
                is_complete = False
            elif is_finished(grad):
                return 2
        if self._state.loop.is_divided:
            return 3
        if not self._sums:
            return 1
        # The last one asked: each of those before leaves factors without a gradient, too.
        return 0 if is_complete else 4

    def _gathered(self, mistake: int) -> list[list[float]]:
        """Of each rank: mistake, number of tokens, summed loss, divisor that was given (0: none), sum of the learning
        rates. Collective.
        """
        device, totals = self._mesh.device, [torch.zeros((), dtype=torch.float64)] * 5
        totals[0] = torch.tensor(float(mistake), dtype=torch.float64)
        if mistake == 0:
            # On the device, and read with those of the other ranks: each read would wait for the backward.
            for loss, number in self._sums:
                totals[1] = totals[1] + _float64(number, device)
                totals[2] = totals[2] + loss.double()
            if self._divisor is not None:
                totals[3] = _float64(self._divisor, device)
            for group in self.optimizer.param_groups:
                totals[4] = totals[4] + _float64(group["lr"], device)
        own = torch.stack([value.to(device) for value in totals])
        found: list[list[float]] = all_gather(own, self._mesh.world).view(-1, 5).tolist()
        return found

    @property
    def _meets_at_the_end(self) -> bool:
        """Whether ranks exchange nothing before the end of a step, so that all come to its gather."""
        topology = self._mesh.topology
        has_own_forward = self._mesh.same_rows.size == 1 and topology.pp == topology.ep == topology.etp == 1
        return has_own_forward and not topology.dp_shard


def _float64(value: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=device)


def _check_optimizer(optimizer: torch.optim.Optimizer, factors: Sequence[Factor], mesh: Mesh) -> None:
    """Refuse an optimizer that has not exactly the factors of the active adapter, or is not elementwise."""
    check_optimizer(type(optimizer), mesh)
    held = set[int]()  # by identity: tensors compare element by element
    for group in optimizer.param_groups:
        held |= set(map(id, group["params"]))
    ours = {id(factor.parameter): factor.name for factor in factors}
    if missing := [name for number, name in ours.items() if number not in held]:
        given = f"an optimizer without {missing[0]}, and {len(missing) - 1} more of {len(ours)} factors"
        rule = "it would leave them as they are"
        way_out = "make it after set_adapter, of all parameters with requires_grad"
        raise UserError(given, rule, way_out)
    if mesh.topology.world > 1 and held - ours.keys():
        given = f"an optimizer with {len(held - ours.keys())} parameters that are not the adapter's"
        rule = "their gradients would be those of this rank alone"
        raise UserError(given, rule, "give them an optimizer of their own")


def _checked(rows: Sequence[Sequence[float]], mesh: Mesh) -> tuple[int, float]:
    """(number of tokens, mean loss) of all ranks, from what each has told; the same errors on all.

    Raises:
        UserError: a mistake of some rank. MeshloraError: a rank failed; nothing was trained.
    """
    said: dict[int, list[int]] = {}
    for rank, row in enumerate(rows):
        said.setdefault(int(row[0]), []).append(rank)
    if failed := said.get(_FAILED):
        raise MeshloraError(f"{numbered('rank', failed)} raised an error in this step: no rank has made it")
    if mistakes := sorted(said.keys() - {0}):
        given, rule, way_out = _MISTAKES[mistakes[0]]
        raise UserError(f"{given} on {numbered('rank', said[mistakes[0]])}", rule, way_out)
    topology = mesh.topology
    _, numbers, losses, divisors, rates = zip(*rows, strict=True)
    for ranks in topology.groups_over(frozenset(topology.sizes) - SEQUENCES - LAYERS):
        _check_alike("trained tokens", numbers, ranks)
    for ranks in topology.groups_over(FEATURES):
        _check_alike("loss", losses, ranks, within=_ALIKE)
    check_rates(rates, topology)
    # Every replica of the rows has counted them; cp ranks the whole rows each, but each its part of the loss.
    total = round(sum(numbers) * mesh.data.size / mesh.cp.size / len(rows))
    check_total(total)
    if other := sorted({*divisors} - {0.0, 1.0, float(total)}):
        rule = f"the step has {total} trained tokens, of all micro-batches and ranks"
        raise UserError(f"num_items_in_batch={other[0]:g}", rule, "leave it out: the step divides by itself")
    return total, sum(losses) * mesh.data.size / len(rows) / total


def _check_alike(what: str, of_ranks: Sequence[float], ranks: Sequence[int], *, within: float = 0.0) -> None:
    """Refuse numbers of `ranks` that are further apart than `within` times the largest."""
    found = {rank: of_ranks[rank] for rank in ranks}
    if max(found.values()) - min(found.values()) > within * max(map(abs, found.values())):
        each = ", ".join(f"{value:g} on rank {rank}" for rank, value in found.items())
        rule = "ranks of one replica compute one step together, and need the same rows and labels"
        way_out = "give each rank the rows of its dp rank, as meshlora.sampler does"
        raise UserError(f"ranks with another {what}: {each}", rule, way_out)
