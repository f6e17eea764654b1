"""Faults of other people's training loops, each a small change of `judge_loops.Trainer`, with what may be said of it.

Owns: the kinds, the loops in which each makes a difference, and the causes that name it right. Does not own: drawing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from judge_loops import UNTRAINED, Loop, Trainer, drawn, tokens
from peft import LoraConfig
from torch import Tensor, nn


@dataclass(frozen=True)
class Kind:
    """A kind of fault. keys: causes, or parts of a refusal, that name it right. fits: loops in which it is one."""

    name: str
    cls: type[Trainer]
    keys: tuple[str, ...]
    fits: Callable[[Loop], bool]

    def loop(self, seed: int) -> Loop:
        """A right loop for it."""
        return next(loop for k in itertools.count() if self.fits(loop := drawn(seed + 10_000 * k)))


KINDS: dict[str, Kind] = {}


def kind(name: str, *keys: str, fits: Callable[[Loop], bool] = lambda loop: True) -> Callable[[type], type]:
    def known(cls: type) -> type:
        KINDS[name] = Kind(name, cls, keys or (name,), fits)
        return cls

    return known


def plant(name: str) -> type[Trainer]:
    return KINDS[name].cls


# Loops in which a fault makes a difference.


def ranks(loop: Loop) -> bool:
    return loop.world > 1


def synced(loop: Loop) -> bool:
    """The loop can leave the communication out, or change it."""
    return loop.wrapper in ("ddp", "by hand")


def many(loop: Loop) -> bool:
    return min(loop.micro) > 1


def unequal(loop: Loop) -> bool:
    return many(loop) and loop.no_token < 0


def padded(loop: Loop) -> bool:
    return loop.layout in ("right", "left") and loop.rows > 1


def deep(loop: Loop) -> bool:
    """The optimizer is Adam's, whose step is not linear in the gradient."""
    return loop.optimizer == "AdamW"


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Planted(Trainer):
    def some(self, part: str = "lora_", own: Callable[[nn.Parameter], bool] = lambda _: True) -> nn.Parameter:
        """A trained parameter, the same on every rank."""
        names = [name for name, p in self.trained().items() if part in name and own(p)]
        return self.trained()[self.draw.choice(sorted(names))]

    def number_of_micro(self) -> int:
        return self.loop.micro[self.rank]

    def before_hook(self, change: Callable[[], None], back: Callable[[], None] = lambda: None) -> None:
        """After the judge has seen what the optimizer is to do, and before it sees what it did."""
        self.optimizer.register_step_pre_hook(lambda *_: change())
        self.optimizer.register_step_post_hook(lambda *_: back())


# Sums over micro-batches and ranks.


@kind("not summed over ranks", "not summed over ranks", "replicas drifted", fits=synced)
class NotSummed(Planted):
    def is_summed(self, k: int, number: int) -> bool:
        return False

    def reduce(self) -> None:
        pass


@kind("summed over ranks twice", "summed, not averaged", "accumulation not divided", fits=ranks)
class Summed(Planted):
    def by_wrapper(self) -> int:
        return super().by_wrapper() * self.loop.world


@kind("averaged over ranks twice", "averaged twice", "accumulation divided twice", fits=ranks)
class AveragedTwice(Planted):
    def weight(self, k: int, batch: Any) -> float:
        return super().weight(k, batch) / self.loop.world


@kind("accumulation not divided", "accumulation not divided", "summed, not averaged", fits=many)
class NotDivided(Planted):
    def weight(self, k: int, batch: Any) -> float:
        return super().weight(k, batch) * self.loop.micro[0]


@kind("accumulation divided twice", "accumulation divided twice", "averaged twice", fits=many)
class DividedTwice(Planted):
    def weight(self, k: int, batch: Any) -> float:
        return super().weight(k, batch) / self.loop.micro[0]


@kind("mean of means", "mean of means", "mean of ranks' means", fits=unequal)
class MeanOfMeans(Planted):
    def weight(self, k: int, batch: Any) -> float:
        return self.by_wrapper() / (self.loop.world * self.number_of_micro() * tokens(batch))


@kind(
    "sum of means", "mean of means", "mean of ranks' means", fits=lambda loop: unequal(loop) and len({*loop.micro}) == 1
)
class SumOfMeans(Planted):
    def weight(self, k: int, batch: Any) -> float:
        return self.by_wrapper() / (self.loop.world * tokens(batch))


@kind("mean of ranks' means", "mean of ranks' means", "mean of means", fits=lambda loop: ranks(loop) and unequal(loop))
class MeanOfRanks(Planted):
    def weight(self, k: int, batch: Any) -> float:
        own = sum(map(tokens, self.rows(self.number, self.rank)))
        return self.by_wrapper() / (self.loop.world * own)


@kind("divided by all positions", "divided by all positions", "scaled")
class Positions(Planted):
    def total(self) -> int:
        every = [batch for rank in range(self.loop.world) for batch in self.rows(self.number, rank)]
        return sum(batch["input_ids"].numel() for batch in every)


@kind("mean of rows' means", "mean of rows' means", fits=lambda loop: padded(loop) and loop.loss == "own")
class MeanOfRows(Planted):
    def loss_of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=UNTRAINED)
        each = nn.functional.cross_entropy(logits.transpose(1, 2), shifted, reduction="none")
        return (
            (each.sum(1) / (shifted != UNTRAINED).sum(1).clamp_min(1)).sum() * tokens({"labels": labels}) / len(labels)
        )


@kind("accumulation lost", "lost accumulation", "left out", fits=lambda loop: many(loop) and loop.wrapper != "fsdp2")
class Lost(Planted):
    def after_micro(self, k: int, number: int) -> None:
        if k < number - 1:
            self.optimizer.zero_grad()


@kind(
    "first micro-batch only", "lost accumulation", "left out", fits=lambda loop: unequal(loop) and loop.wrapper != "ddp"
)
class FirstOnly(Planted):
    def backward(self, k: int, loss: Tensor) -> None:
        super().backward(k, loss if k == 0 else loss * 0)


@kind("one micro-batch left out", "left out", "lost accumulation", fits=unequal)
class LeftOut(Planted):
    def weight(self, k: int, batch: Any) -> float:
        return super().weight(k, batch) * (k != self.loop.seed % self.number_of_micro() or self.rank > 0)


@kind("one micro-batch twice", "counted twice", fits=unequal)
class Twice(Planted):
    def weight(self, k: int, batch: Any) -> float:
        return super().weight(k, batch) * (1 + (k == self.loop.seed % self.number_of_micro() and self.rank == 0))


@kind("one micro-batch for another", "counted twice", fits=unequal)
class Replaced(Planted):
    """The data loader hands the first rows out again: what is logged is not what is trained."""

    def weight(self, k: int, batch: Any) -> float:
        return super().weight(k, batch) * {0: 2, 1: 0}.get(k, 1)


@kind(
    "rank 0's gradients for all",
    "one rank's only",
    "not summed over ranks",
    fits=lambda loop: loop.wrapper == "by hand",
)
class Rank0(Planted):
    def reduce(self) -> None:
        for parameter in self.trained().values():
            dist.broadcast(parameter.grad, 0)


@kind("the same rows on both ranks", "same rows", fits=lambda loop: ranks(loop) and len({*loop.micro}) == 1)
class SameRows(Planted):
    def rows(self, number: int, rank: int) -> list[dict[str, Tensor]]:
        return super().rows(number, 0)


@kind("gradients not cleared", "not cleared", fits=lambda loop: loop.wrapper != "ddp")
class NotCleared(Planted):
    def clear(self) -> None:
        pass


@kind("gradients of the step before", "of the step before", fits=lambda loop: loop.warm > 0 and loop.wrapper != "fsdp2")
class Stale(Planted):
    def reduce(self) -> None:
        super().reduce()
        own = [p.grad.clone() for p in self.trained().values()]
        for parameter, grad in zip(self.trained().values(), getattr(self, "held", own), strict=True):
            parameter.grad.copy_(grad)
        self.held = own


# Copies on ranks.


@kind("an adapter of each rank's own", "replicas drifted", fits=lambda loop: loop.wrapper == "by hand")
class Seeds(Planted):
    def adapted(self, model: Any) -> Any:
        found = super().adapted(model)
        torch.manual_seed(77 + self.rank)
        for name, parameter in found.named_parameters():
            if "lora_A" in name:
                parameter.data = parameter.data + torch.randn_like(parameter) * 0.1
        return found


@kind("another rate on one rank", "replicas drifted", fits=lambda loop: synced(loop))
class RankRate(Planted):
    def started(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 1 + self.rank


@kind("one rank reset", "replicas drifted", "changed between steps", fits=synced)
class RankReset(Planted):
    def after_update(self) -> None:
        super().after_update()
        if self.rank == 1:
            with torch.no_grad():
                self.some("lora_B").zero_()


# Labels, masks, positions, forwards.


def shifts(loop: Loop) -> bool:
    return loop.loss == "own" and loop.layout != "packed"


@kind("labels not shifted", fits=shifts)
class NotShifted(Planted):
    def loss_of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@kind("labels shifted twice", fits=shifts)
class ShiftedTwice(Planted):
    def loss_of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss_of_logits(logits, nn.functional.pad(labels[:, 1:], (0, 1), value=UNTRAINED))


@kind("prompts trained", "prompts are trained too", fits=lambda loop: loop.loss == "own" and loop.layout != "packed")
class Prompts(Planted):
    def labels(self, batch: Any) -> Tensor:
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        return batch["input_ids"].masked_fill(mask == 0, UNTRAINED)


@kind(
    "padding trained",
    "padding is trained too",
    fits=lambda loop: loop.loss == "own" and padded(loop) and loop.layout == "right",
)
class Padding(Planted):
    def labels(self, batch: Any) -> Tensor:
        return torch.where(batch["attention_mask"] == 0, batch["input_ids"], batch["labels"])


@kind(
    "trained on the tokens to be ignored",
    "the last token is not trained",
    fits=lambda loop: loop.loss == "own" and loop.no_token < 0,
)
class LastToken(Planted):
    """The end of a text is its padding token, and a collator takes that out of the labels."""

    def labels(self, batch: Any) -> Tensor:
        labels = batch["labels"].clone()
        for row in labels:
            trained = torch.nonzero(row != UNTRAINED).flatten()
            row[trained[-1]] = UNTRAINED
        return labels


@kind("label smoothing", "labels are smoothed", fits=lambda loop: loop.loss == "own")
class Smoothing(Planted):
    def loss_of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=UNTRAINED)
        amount = [0.1, 0.05, 0.2][self.loop.seed % 3]
        each = logits.flatten(0, 1)
        return nn.functional.cross_entropy(each, shifted.flatten(), reduction="sum", label_smoothing=amount)


@kind("a temperature", "logits are divided", fits=lambda loop: loop.loss == "own")
class Temperature(Planted):
    def loss_of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss_of_logits(logits / [0.7, 2.0, 1.3][self.loop.seed % 3], labels)


class Inside(Planted):
    """A change of what the model is given, inside of it."""

    def started(self) -> None:
        self.inner.register_forward_pre_hook(
            lambda module, args, kwargs: (args, self.changed(kwargs)), with_kwargs=True
        )

    def changed(self, given: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


@kind("attention mask dropped", "no attention mask", fits=lambda loop: loop.layout == "left" and loop.rows > 1)
class NoMask(Inside):
    def changed(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name != "attention_mask"}


@kind("positions dropped", "no positions", fits=lambda loop: loop.layout == "packed" and loop.rows > 1)
class NoPositions(Inside):
    def changed(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name != "position_ids"}


@kind(
    "positions off by one",
    "positions are one too far",
    fits=lambda loop: loop.family in ("gpt2", "opt") and loop.layout == "right",
)
class Positions1(Inside):
    def changed(self, given: dict[str, Any]) -> dict[str, Any]:
        ids = given["input_ids"]
        return given | {"position_ids": (torch.arange(ids.shape[1]) + 1).expand(len(ids), -1)}


@kind(
    "the causal mask dropped",
    "not causal",
    fits=lambda loop: (
        loop.layout == "plain" and loop.attention == "eager" and not loop.checkpointing and loop.family != "opt"
    ),
)
class NotCausal(Inside):
    def changed(self, given: dict[str, Any]) -> dict[str, Any]:
        ids = given["input_ids"]
        length, dtype = ids.shape[1], next(self.inner.parameters()).dtype
        return given | {"attention_mask": torch.zeros(len(ids), 1, length, length, dtype=dtype)}


def plain_scale(loop: Loop) -> bool:
    return not loop.fresh or loop.warm > 0


class Scaled(Planted):
    def factor(self, module: Any, name: str) -> float:
        raise NotImplementedError

    def started(self) -> None:
        for module in self.inner.modules():
            scaling = getattr(module, "scaling", None)
            if isinstance(scaling, dict):
                for name in scaling:
                    scaling[name] *= self.factor(module, name)


@kind("scale twice", "the adapter is scaled", fits=lambda loop: plain_scale(loop) and loop.alpha != loop.r)
class ScaleTwice(Scaled):
    def factor(self, module: Any, name: str) -> float:
        return module.scaling[name]


@kind("scale left out", "the adapter is scaled", fits=lambda loop: plain_scale(loop) and loop.alpha != loop.r)
class ScaleOut(Scaled):
    def factor(self, module: Any, name: str) -> float:
        return 1 / module.scaling[name]


@kind(
    "scale of rslora for another",
    "the adapter is scaled",
    fits=lambda loop: plain_scale(loop) and "rank_pattern" not in loop.lora,
)
class ScaleRoot(Scaled):
    def factor(self, module: Any, name: str) -> float:
        root = module.r[name] ** 0.5
        return 1 / root if self.loop.lora.get("use_rslora") else root


@kind("scale by a factor", "the adapter is scaled", fits=plain_scale)
class ScaleBy(Scaled):
    def factor(self, module: Any, name: str) -> float:
        return [2.0, 0.5, 4.0][self.loop.seed % 3]


@kind(
    "scale by rank of ranks",
    "the adapter is scaled",
    fits=lambda loop: plain_scale(loop) and "rank_pattern" not in loop.lora,
)
class ScaleRank(Scaled):
    def factor(self, module: Any, name: str) -> float:
        return 1 / module.r[name]


@kind(
    "the adapter off in a micro-batch",
    "left out",
    "lost accumulation",
    fits=lambda loop: unequal(loop) and not loop.checkpointing and not loop.lora,
)
class OffOnce(Scaled):
    def started(self) -> None:
        self.is_off = False

    def loss(self, k: int, batch: dict[str, Tensor]) -> Tensor:
        scalings = [m.scaling for m in self.inner.modules() if isinstance(getattr(m, "scaling", None), dict)]
        known = [dict(each) for each in scalings]
        if k == 1 and self.rank == 0:
            for each in scalings:
                each.update(dict.fromkeys(each, 0.0))
        found = super().loss(k, batch)
        for each, before in zip(scalings, known, strict=True):
            each.update(before)
        return found


@kind("dropout left on", "disturbed", fits=lambda loop: not loop.checkpointing and "use_dora" not in loop.lora)
class Dropout(Planted):
    def started(self) -> None:
        for name, module in self.inner.named_modules():
            if "lora_A" in name and isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda _, args: nn.functional.dropout(args[0], 0.2))


@kind("noise in a gradient", "disturbed")
class Noise(Planted):
    def reduce(self) -> None:
        super().reduce()
        for parameter in self.trained().values():
            grad = local(parameter.grad)
            generator = torch.Generator().manual_seed(self.loop.seed)
            noise = torch.randn(grad.shape, generator=generator).to(grad.dtype)
            grad += noise * 0.3 * (grad.norm() / max(grad.numel(), 1) ** 0.5)


@kind("another term in the loss", "a penalty on the weights", fits=lambda loop: loop.wrapper != "fsdp2")
class Penalty(Planted):
    def reduce(self) -> None:
        super().reduce()
        for parameter in self.trained().values():
            parameter.grad += parameter.detach() * (0.3 * parameter.grad.norm() / parameter.norm().clamp_min(1e-6))


@kind("another base", "differ from those recorded", fits=lambda loop: loop.wrapper != "fsdp2")
class Base(Planted):
    def loaded(self) -> Any:
        model = super().loaded()
        frozen = [p for name, p in model.named_parameters() if name.endswith("weight") and p.ndim == 2]
        self.draw.choice(frozen).data.mul_(1.05)
        return model


@kind("another base, sharded", "differ from those recorded", fits=lambda loop: loop.wrapper == "fsdp2")
class BaseSharded(Base):
    pass


@kind(
    "merged and applied",
    "differ from those recorded",
    fits=lambda loop: loop.wrapper != "fsdp2" and not loop.fresh and not loop.lora,
)
class Merged(Planted):
    def adapted(self, model: Any) -> Any:
        found = super().adapted(model)
        found.merge_adapter()
        for module in found.modules():
            if hasattr(module, "merged_adapters"):
                module.merged_adapters.clear()
        return found


# One parameter's gradient.


@kind("a factor frozen", "frozen")
class Frozen(Planted):
    def adapted(self, model: Any) -> Any:
        self.inner = super().adapted(model)
        self.some().requires_grad_(False)
        return self.inner


class OfOne(Planted):
    """A change of one parameter's gradient, the same one in every step."""

    part = "lora_"

    def reduce(self) -> None:
        super().reduce()
        if not hasattr(self, "chosen"):
            self.chosen = self.some(self.part)
        self.change(local(self.chosen.grad))

    def change(self, grad: Tensor) -> None:
        raise NotImplementedError


def moving(loop: Loop) -> bool:
    """B is not zero, so A has a gradient."""
    return not loop.fresh or loop.warm > 0


@kind("a gradient zero", "zero", fits=moving)
class Zero(OfOne):
    def change(self, grad: Tensor) -> None:
        grad.zero_()


@kind(
    "a gradient scaled",
    "scaled",
    "accumulation not divided",
    "summed, not averaged",
    "averaged twice",
    "accumulation divided twice",
    fits=moving,
)
class GradScaled(OfOne):
    def change(self, grad: Tensor) -> None:
        grad.mul_([0.5, 2.0, -1.0, 1.3][self.loop.seed % 4])


@kind(
    "all A's gradients scaled",
    "scaled",
    "accumulation not divided",
    "summed, not averaged",
    "averaged twice",
    fits=moving,
)
class AScaled(Planted):
    def reduce(self) -> None:
        super().reduce()
        for name, parameter in self.trained().items():
            if "lora_A" in name:
                parameter.grad.mul_(1.5)


@kind("a shard of B", "a shard", fits=moving)
class Shard(OfOne):
    part = "lora_B"

    def change(self, grad: Tensor) -> None:
        if self.loop.wrapper == "fsdp2":
            grad.mul_(self.rank)
        else:
            grad[: len(grad) // 2] = 0


@kind("half the columns of A", "a shard", fits=lambda loop: moving(loop) and loop.r > 1)
class Columns(OfOne):
    part = "lora_A"

    def change(self, grad: Tensor) -> None:
        grad[:, grad.shape[1] // 2 :] = 0


@kind("every other row of B", "a shard", fits=lambda loop: moving(loop) and loop.wrapper != "fsdp2")
class Rows(OfOne):
    part = "lora_B"

    def change(self, grad: Tensor) -> None:
        grad[::2] = 0


@kind("halves of B exchanged", "permuted", fits=lambda loop: moving(loop) and loop.wrapper != "fsdp2")
class Exchanged(OfOne):
    part = "lora_B"

    def change(self, grad: Tensor) -> None:
        grad.copy_(grad.roll(len(grad) // 2, 0))


@kind("a gradient of another layer", "of another parameter", fits=moving)
class Another(Planted):
    def reduce(self) -> None:
        super().reduce()
        if not hasattr(self, "pair"):
            one = self.some("lora_B")
            same = [
                p for name, p in self.trained().items() if "lora_B" in name and p.shape == one.shape and p is not one
            ]
            self.pair = (one, same[0])
        one, other = self.pair
        local(one.grad).copy_(local(other.grad))


@kind("NaN in a factor", "not finite")
class Nan(OfOne):
    def change(self, grad: Tensor) -> None:
        if grad.numel():
            grad.view(-1)[0] = torch.nan


@kind("overflow of float16", "not finite", fits=lambda loop: loop.dtype == "float32" and not loop.autocast)
class Overflow(Planted):
    def reduce(self) -> None:
        super().reduce()
        for parameter in self.trained().values():
            grad = local(parameter.grad)
            grad.copy_((grad * 1e8).half().to(grad.dtype) / 1e8)


@kind(
    "gradients rounded to bfloat16",
    "disturbed",
    "rounded",
    fits=lambda loop: loop.dtype in ("float32", "float64") and not loop.autocast,
)
class GradRounded(Planted):
    def reduce(self) -> None:
        super().reduce()
        for parameter in self.trained().values():
            grad = local(parameter.grad)
            grad.copy_(grad.bfloat16().to(grad.dtype))


# Clipping.


def clips(loop: Loop) -> bool:
    return loop.clip == 0.05 and loop.wrapper != "fsdp2"


@kind("clipped parameter by parameter", "clipped unequally", "clipped by another norm", fits=clips)
class PerTensor(Planted):
    def clip(self) -> None:
        for parameter in self.trained().values():
            torch.nn.utils.clip_grad_norm_([parameter], self.loop.clip / 10)


@kind("clipped in part", "clipped unequally", "clipped by another norm", fits=clips)
class PartClipped(Planted):
    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_([p for n, p in self.trained().items() if "lora_B" in n], self.loop.clip)


@kind(
    "clipped by a local norm",
    "clipped by another norm",
    "clipped unequally",
    fits=lambda loop: loop.clip == 0.05 and loop.wrapper == "fsdp2",
)
class LocalNorm(Planted):
    def clip(self) -> None:
        grads = [local(p.grad) for p in self.trained().values()]
        norm = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
        for grad in grads:
            grad.mul_(min(1.0, self.loop.clip / (norm + 1e-6)))


@kind("clipping without effect", "not clipped", fits=clips)
class NoClip(Planted):
    def clip(self) -> None:
        known = {p: p.grad.clone() for p in self.trained().values()}
        super().clip()
        for parameter, grad in known.items():
            parameter.grad.copy_(grad)


@kind("clipped to another norm", "clipped by another norm", "clipped to another norm", fits=clips)
class OtherNorm(Planted):
    def clip(self) -> None:
        super().clip()
        for parameter in self.trained().values():
            parameter.grad.mul_([0.5, 0.7, 2.0][self.loop.seed % 3])


@kind(
    "clipped before the end of accumulation",
    "clipped before accumulation ended",
    fits=lambda loop: clips(loop) and loop.wrapper == "none" and unequal(loop),
)
class EarlyClip(Planted):
    def after_micro(self, k: int, number: int) -> None:
        self.clip()


@kind(
    "clipped by value",
    "clipped by value",
    "clipped unequally",
    fits=lambda loop: loop.clip == 0 and loop.wrapper != "fsdp2",
)
class ByValue(Planted):
    def clip(self) -> None:
        for parameter in self.trained().values():
            largest = float(parameter.grad.abs().max()) * 0.4
            parameter.grad.clamp_(-largest, largest)


# The optimizer's step.


@kind("not in the optimizer", "not in the optimizer")
class NotOwned(Planted):
    def made_optimizer(self) -> torch.optim.Optimizer:
        found = super().made_optimizer()
        found.param_groups[0]["params"].pop(0)
        return found


class Options(Planted):
    """The optimizer steps with other options than it has."""

    def started(self) -> None:
        known: list[dict[str, Any]] = []

        def change() -> None:
            known[:] = [dict(group) for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group.update(self.other(group))

        def back() -> None:
            for group, before in zip(self.optimizer.param_groups, known, strict=True):
                group.update(before)

        self.before_hook(change, back)

    def other(self, group: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


@kind("no weight decay", "no weight decay", fits=deep)
class NoDecay(Options):
    def other(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"weight_decay": 0.0}


@kind("more weight decay", "another weight decay", fits=deep)
class MoreDecay(Options):
    def other(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"weight_decay": group["weight_decay"] * 3}


@kind("another rate", "another rate")
class Rate(Options):
    def other(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"lr": group["lr"] * [2.0, 0.5, 0.1, 1.1][self.loop.seed % 4]}


@kind("other betas", "other betas", fits=deep)
class Betas(Options):
    def other(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"betas": (0.9, 0.95)}


@kind("another eps", "another eps", fits=deep)
class Eps(Options):
    def other(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"eps": 1e-3}


@kind("ascent", "uphill", fits=deep)
class Ascent(Options):
    def other(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"maximize": True}


@kind("rates of A and B exchanged", "another rate", fits=lambda loop: loop.groups and loop.optimizer == "AdamW")
class RatesExchanged(Options):
    def other(self, group: dict[str, Any]) -> dict[str, Any]:
        (other,) = [each for each in self.optimizer.param_groups if each is not group]
        self.rates = getattr(self, "rates", {id(g): g["lr"] for g in self.optimizer.param_groups})
        return {"lr": self.rates[id(other)]}

    def after_update(self) -> None:
        super().after_update()
        self.__dict__.pop("rates", None)


class After(Planted):
    """Something changes the values in the optimizer's step."""

    def started(self) -> None:
        known: dict[str, Tensor] = {}

        def change() -> None:
            known.update({name: local(p).detach().clone() for name, p in self.trained().items()})

        def back() -> None:
            with torch.no_grad():
                for name, parameter in self.trained().items():
                    local(parameter).copy_(self.instead(name, local(parameter), known[name]))

        self.before_hook(change, back)

    def instead(self, name: str, value: Tensor, before: Tensor) -> Tensor:
        raise NotImplementedError


@kind("old values written back", "not stepped")
class WroteBack(After):
    def instead(self, name: str, value: Tensor, before: Tensor) -> Tensor:
        return before


@kind("old values of B written back", "not stepped")
class WroteB(After):
    def instead(self, name: str, value: Tensor, before: Tensor) -> Tensor:
        return before if "lora_B" in name else value


@kind("values rounded to bfloat16", "rounded", fits=lambda loop: loop.adapter_dtype != "bfloat16")
class Rounded(After):
    def instead(self, name: str, value: Tensor, before: Tensor) -> Tensor:
        return value.bfloat16().to(value.dtype)


@kind("a moving average written back", "another rate", "another update")
class Average(After):
    def instead(self, name: str, value: Tensor, before: Tensor) -> Tensor:
        return 0.7 * before + 0.3 * value


@kind(
    "stepped twice",
    "stepped twice",
    "another rate",
    fits=lambda loop: loop.optimizer in ("AdamW", "Adam", "SGD") and loop.adapter_dtype != "bfloat16",
)
class StepTwice(Planted):
    def started(self) -> None:
        self.is_second = False

        def again() -> None:
            if not self.is_second:
                self.is_second = True
                type(self.optimizer).step.__wrapped__(self.optimizer)
                self.is_second = False

        self.before_hook(lambda: None, again)


# Between steps.


@kind(
    "state of the optimizer lost",
    "state changed",
    fits=lambda loop: loop.optimizer in ("AdamW", "Adam", "RMSprop", "Adagrad"),
)
class StateLost(Planted):
    def after_update(self) -> None:
        super().after_update()
        self.optimizer.state.clear()


@kind("momenta of the optimizer lost", "state changed", fits=lambda loop: loop.optimizer in ("AdamW", "Adam"))
class MomentaLost(Planted):
    def after_update(self) -> None:
        super().after_update()
        for state in self.optimizer.state.values():
            state["exp_avg"].zero_()


@kind("an adapter read again", "changed between steps")
class Reloaded(Planted):
    def started(self) -> None:
        self.first = {name: local(p).detach().clone() for name, p in self.trained().items()}

    def after_update(self) -> None:
        super().after_update()
        if hasattr(self, "first"):
            with torch.no_grad():
                for name, parameter in self.trained().items():
                    local(parameter).copy_(self.first[name])


@kind("B reset between steps", "changed between steps")
class Reset(Planted):
    def after_update(self) -> None:
        super().after_update()
        with torch.no_grad():
            local(self.some("lora_B")).zero_()


@kind(
    "another scale in the configuration",
    "the adapter is scaled",
    fits=lambda loop: plain_scale(loop) and "alpha_pattern" not in loop.lora,
)
class OtherAlpha(Planted):
    """What is written for the adapter is not what it was trained with."""

    def adapted(self, model: Any) -> Any:
        found = super().adapted(model)
        for config in found.peft_config.values():
            assert isinstance(config, LoraConfig)
            config.lora_alpha = config.lora_alpha * 2
        return found
