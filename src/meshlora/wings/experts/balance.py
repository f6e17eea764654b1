"""The load-balancing loss of routers (Switch Transformer, equations 4 to 6), over all tokens of an optimizer step.

Owns: the counts, their sums over ranks, and the term of each micro-batch. Does not own: the routers, whose logits are
found where transformers itself looks for them, or the weight of the loss.

aux = E sum_e f_e P_e, with f_e the fraction of tokens that choose expert e and P_e its mean probability, both over the
real tokens of all layers, micro-batches and ranks. f has no gradient, so it is counted first: in the normal forward if
a step has one micro-batch, in an extra forward if it has several. Why: docs/parallelism.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_reduce_sum
from meshlora.plan.families.styles import text_decoder
from meshlora.train.batch import Batch
from meshlora.train.batches import MicroBatch
from meshlora.train.step_part import StepPart
from meshlora.wings.experts import products
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.topology import DATA, LAYERS


class LoadBalancing(StepPart):
    """Watches the routers of a parallel model. coef: weight of the loss. count: what of a batch is in the mean that the
    objective is: trained tokens, pairs or records.
    """

    def __init__(self, model: Any, *, coef: float, count: Callable[[Batch], int]) -> None:
        state = runtime(model)
        self.coef, self.plan, self.mesh, self._count = coef, state.plan, state.mesh, count
        # The ranks whose routers see different tokens, or are of other layers.
        self.axis = state.mesh.over(DATA | LAYERS | state.plan.topology.token_cut)
        self.num_experts = max(rule.num_experts for rule in state.whole.plan.experts.values())
        self.top_k = int(getattr(model, "num_experts_per_tok", 0) or model.config.get_text_config().num_experts_per_tok)
        self.routers = _routers(model) if state.plan.experts else []  # a stage may have dense layers only
        self._logits: list[Tensor] = []
        self._probabilities = torch.zeros(self.num_experts, dtype=torch.float64, device=state.mesh.device)
        self._shares, self._rows, self._number = self._probabilities, 1.0, 1.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Collect the logits of every router inside the block; earlier ones are dropped."""
        self._logits.clear()  # of a forward whose term nobody asked for
        handles = [
            module.register_forward_hook(lambda _, __, out, i=index: self._logits.append(_at(out, i)))
            for module, index in self.routers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def count(self, batches: Sequence[MicroBatch], forward: Callable[[int, MicroBatch], object]) -> None:
        """Count over all tokens of a step, before the first of several micro-batches. Collective.

        forward: called with (number, micro-batch) to run the model on it.
        """
        counts = []
        for number, micro in enumerate(batches):
            with self.watching(), torch.no_grad():
                forward(number, micro)
            counts.append(self._counted(micro.batch))
        self._add_up(torch.stack(counts).sum(0))

    def count_here(self, batch: Batch) -> None:
        """Count over the only micro-batch of a step, just run inside `watching`. Collective."""
        self._add_up(self._counted(batch))

    def term(self, batch: Batch) -> Tensor:
        """Contribution of the micro-batch just run inside `watching` to a loss that is a sum."""
        assert self._logits or self.plan.stages, "no router has run"
        if not self._logits:
            return self._probabilities.new_zeros(())
        mask = self._own_tokens(batch)
        sums = torch.stack([torch.softmax(logits, -1).float()[mask].sum(0) for logits in self._logits]).sum(0)
        self._logits.clear()
        self._probabilities += sums.detach().double()
        # The sum is divided by all that is counted in a step: the term is multiplied by that here.
        scale = self.coef * self._number * self.num_experts / self._rows
        return (self._shares.to(sums.dtype) * sums).sum() * scale

    def finish(self) -> float:
        """The loss of the step, over all ranks, after its last micro-batch. Collective."""
        mean = all_reduce_sum(self._probabilities, self.axis) / self._rows
        return float(self.num_experts * (self._shares * mean).sum())

    def _add_up(self, counts: Tensor) -> None:
        total = all_reduce_sum(counts, self.axis)
        self._rows, self._number = float(total[-2]), float(total[-1])
        # Rounded as in transformers, which computes it in float32 even inside the lift. On the CPU: a GPU multiplies by
        # the reciprocal, which is rounded once more.
        shares = (torch.tensor(total[:-2].tolist(), dtype=torch.float32, device="cpu") / self._rows).to(total.device)
        self._shares = shares.double()
        self._probabilities.zero_()

    def _counted(self, batch: Batch) -> Tensor:
        """`[E + 2]`: choices of each expert; number of rows that chose; what `count` says."""
        mask = self._own_tokens(batch)
        found = torch.zeros(self.num_experts + 2, dtype=torch.float64, device=self._probabilities.device)
        for logits in self._logits:
            chosen = torch.softmax(logits.detach(), -1).topk(self.top_k, -1).indices[mask]
            found[:-2] += products.count_each(chosen.flatten(), self.num_experts)
            found[-2] += len(chosen)  # of all layers, as transformers concatenates them
        # Of one stage: all see the same tokens.
        found[-1] = self._count(batch) * self.mesh.cp.size / self.mesh.token_cut.size * self.mesh.is_counted
        return found

    def _own_tokens(self, batch: Batch) -> Tensor:
        """Mask of the real tokens among those that this rank's routers see: bool `[T]`."""
        mask = batch.attention_mask.bool() & (not batch.is_dummy)
        return self.mesh.own_tokens(batch.held(mask)).to(self._probabilities.device)


def check_load_balancing(model: Any) -> None:
    """Refuse a load-balancing loss for a model that has none in transformers. Raises: UnsupportedError: it has none."""
    _routers(model)


def _routers(model: Any) -> list[tuple[nn.Module, int]]:
    """(router, index of the logits in its output), as transformers records them."""
    coef = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
    recorder = text_decoder(model)[1].base_model.can_record_outputs.get("router_logits")
    if coef is None or recorder is None or isinstance(recorder, list):
        given = f"train.router_aux_loss_coef with model_type {model.config.model_type!r}"
        raise UnsupportedError(given, "transformers has no load-balancing loss for it", "leave it at 0")
    target, index = getattr(recorder, "target_class", recorder), getattr(recorder, "index", 0)
    part = getattr(recorder, "layer_name", None)
    found = [
        (module, index)
        for name, module in model.named_modules()
        if isinstance(module, target) and (part is None or part in name)
    ]
    if not found:
        raise UnsupportedError("train.router_aux_loss_coef", "this model has no routers", "leave it at 0")
    return found


def _at(output: Any, index: int) -> Tensor:
    logits = output if isinstance(output, Tensor) else output[index]
    assert isinstance(logits, Tensor)
    return logits.reshape(-1, logits.shape[-1])
