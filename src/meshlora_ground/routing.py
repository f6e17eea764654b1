"""Routing: the experts chosen for each token, recorded in one run and replayed in another.

A router's choice is discontinuous: where two experts nearly tie, the last bit of an activation decides. With the
choices of another run replayed, any remaining difference is arithmetic.

Owns: the choices by (step, block, token), their file, and the mechanism, the same for every router in transformers that
selects by `topk` over one row of scores per token. Does not own: which run replays which record, or the numbers of
tokens, which the caller provides: they are the same in every run, whatever the batches and ranks.

The router's own code runs unchanged; only the indices that `topk` returns are replaced, along with their scores. So
weights and gradients are those of the replayed choices. Where experts are selected within groups, the groups are those
of the replayed choices, filled up with the router's own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshlora_ground.compat import replaced
from meshlora_ground.errors import UnsupportedError, UserError, reason

_TOP_K = (torch.topk, Tensor.topk)


class RoutingRecord:
    """The choices of a run.

    Attributes:
        num_tokens: the number of numbered tokens.
        num_experts: block, as in `model.layers.0.mlp` -> the number of its experts.
        digest: a hash of the tokens in the order of their numbers; empty if the caller gives none.
        choices: (step, block) -> int32 `[num_tokens, k]`, -1 where none was recorded.
    """

    def __init__(self, num_tokens: int, num_experts: Mapping[str, int], *, digest: str = "") -> None:
        self.num_tokens, self.num_experts, self.digest = num_tokens, dict(num_experts), digest
        self.choices: dict[tuple[int, str], Tensor] = {}

    def put(self, step: int, block: str, tokens: Tensor, choices: Tensor) -> None:
        """Record `choices [T, k]` of `tokens`, int64 `[T]`; number -1 is padding and skipped."""
        is_token = tokens >= 0
        empty = torch.full((self.num_tokens, choices.shape[1]), -1, dtype=torch.int32)
        table = self.choices.setdefault((step, block), empty)
        table[tokens[is_token]] = choices.detach().cpu()[is_token].to(torch.int32)

    def get(self, step: int, block: str, tokens: Tensor) -> Tensor:
        """The choices of `tokens`: int64 `[T, k]`, -1 where the number is -1. Raises: UserError: one has no choice."""
        table = self.choices.get((step, block))
        if table is None:
            raise UserError(f"step {step + 1}, {block}", "no choices of experts are recorded for it")
        found = torch.where((tokens >= 0).unsqueeze(1), table[tokens.clamp(min=0)].long(), -1)
        if lost := ((tokens >= 0) & (found < 0).any(1)).nonzero().flatten().tolist():
            rule = f"no choice of experts is recorded for it, nor for {len(lost) - 1} more of this forward"
            raise UserError(f"step {step + 1}, {block}, token {int(tokens[lost[0]])}", rule)
        return found

    def save(self, file: Path) -> None:
        """Write one safetensors file, not atomically: the caller owns the folder."""
        tensors = {f"{step}/{block}": table.contiguous() for (step, block), table in self.choices.items()}
        numbers = {f"experts/{block}": str(number) for block, number in self.num_experts.items()}
        save_file(tensors, file, metadata={"num_tokens": str(self.num_tokens), "digest": self.digest, **numbers})

    @classmethod
    def load(cls, file: Path) -> RoutingRecord:
        """Read what `save` wrote. Raises: UserError: the file is missing, or not such a record."""
        try:
            if not file.is_file():  # a named pipe would block
                raise ValueError("it is no regular file")
            with safe_open(file, framework="pt") as stored:
                said = stored.metadata() or {}
                numbers = {k.removeprefix("experts/"): _count(v) for k, v in said.items() if k.startswith("experts/")}
                record = cls(_count(said["num_tokens"]), numbers, digest=said.get("digest", ""))
                for key in stored.keys():  # noqa: SIM118 - not a dict
                    step, _, block = key.partition("/")
                    described = stored.get_slice(key)
                    record._check_shape(block, described.get_shape(), described.get_dtype())
                    record.choices[_count(step), block] = stored.get_tensor(key)
            if not record.choices:
                raise ValueError("it holds no choices")
        except Exception as error:  # untrusted bytes read by a library may raise anything
            raise UserError(f"{file}", f"it is no record of routing ({reason(error)})") from error
        for (number, block), table in record.choices.items():
            if not bool(((table >= -1) & (table < record.num_experts[block])).all()):
                raise UserError(f"{file}: step {number + 1}, {block}", "these are no choices among its experts")
        return record

    def _check_shape(self, block: str, shape: list[int], dtype: str) -> None:
        """Check a table before it is read. Raises: ValueError."""
        number = self.num_experts.get(block, 0)
        if len(shape) != 2 or shape[0] != self.num_tokens or not 0 < shape[1] <= number or dtype != "I32":
            raise ValueError(
                f"{block[:200]!r} is {dtype} {shape}, of {self.num_tokens} tokens that choose among {number} experts"
            )


def _count(text: str) -> int:
    """Parse a count of tokens, experts or steps. Raises: ValueError."""
    if re.fullmatch(r"[0-9]{1,12}", text) is None:
        raise ValueError(f"{text[:40]!r} is no count")
    return int(text)


class Routing:
    """A context manager that records or replays the choices of the routers of `model`.

    Attributes:
        record: written, or read if it `replays`.
        step, tokens: set by the caller before each forward: the optimizer step, from 0, and the numbers of the tokens
            that the routers of this rank see, int64 `[T]`; -1 for padding, which the router places freely.
        is_on: whether the routers are watched at all; else they choose freely, and nothing is recorded.
    """

    def __init__(self, model: nn.Module, record: RoutingRecord, *, replays: bool) -> None:
        self.record, self.replays = record, replays
        self.step, self.tokens = 0, torch.empty(0, dtype=torch.int64)
        self.is_on = True
        self._blocks = {name: model.get_submodule(name) for name in record.num_experts}
        self._replaced = contextlib.ExitStack()

    def __enter__(self) -> Routing:
        for name, block in self._blocks.items():
            self._replaced.enter_context(replaced(block, "forward", self._watched(name, block.forward)))
        return self

    def __exit__(self, *_: object) -> None:
        self._replaced.close()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block the routers choose freely: what runs there is another model, or no step."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def _watched(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return forward(*args, **kwargs)
            given = self.record.get(self.step, name, self.tokens) if self.replays else None
            choosing = _Choosing(name, self.record.num_experts[name], len(self.tokens), given)
            with choosing:
                output = forward(*args, **kwargs)
            if choosing.chosen is None:
                raise UnsupportedError(f"the router of {name}", "it does not choose by topk over rows of scores")
            if not self.replays:
                self.record.put(self.step, name, self.tokens, choosing.chosen)
            return output

        return watched


class _Choosing(TorchFunctionMode):
    """Intercepts the router's `topk`: one row per token, one score per expert or group of experts."""

    def __init__(self, block: str, num_experts: int, num_tokens: int, given: Tensor | None) -> None:
        super().__init__()
        self.block, self.num_experts, self.num_tokens, self.given = block, num_experts, num_tokens, given
        self.chosen: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOP_K or not args or args[0].ndim != 2:
            return found
        scores, index = args[0], found[1]
        if scores.shape[0] != self.num_tokens or index.shape[0] != self.num_tokens:
            rule = f"it chooses for {scores.shape[0]} rows, of a forward of {self.num_tokens} tokens"
            raise UnsupportedError(f"the router of {self.block}", rule)
        width = scores.shape[1]
        if width == self.num_experts:
            index = self._own(index)
            self.chosen = index
        elif self.given is not None and width > 1 and self.num_experts % width == 0:
            index = self._groups(scores.detach(), index.shape[1])
        else:
            return found
        return torch.return_types.topk((scores.gather(1, index), index))

    def _own(self, index: Tensor) -> Tensor:
        """The given choices, or the router's own where none is given."""
        if self.given is None:
            return index
        if self.given.shape != index.shape:
            rule = f"its router makes {index.shape[1]}"
            way_out = "they are of another model"
            raise UserError(f"{self.block}: {self.given.shape[1]} choices for each token", rule, way_out)
        given = self.given.to(index.device)
        return torch.where(given >= 0, given, index)

    def _groups(self, scores: Tensor, number: int) -> Tensor:
        """`number` groups for each token: those of its given experts first, then the router's highest-scored."""
        assert self.given is not None
        given = self.given.to(scores.device)
        of_expert = given.clamp(min=0) // (self.num_experts // scores.shape[1])
        is_needed = torch.zeros_like(scores, dtype=torch.bool).scatter(1, of_expert, True)
        is_needed &= (given >= 0).any(1, keepdim=True)
        if bool((is_needed.sum(1) > number).any()):
            raise UserError(f"{self.block}", f"a token's experts are of more than {number} groups", "of another model")
        order = torch.argsort(scores, dim=1, descending=True, stable=True)
        first = torch.argsort(is_needed.gather(1, order).logical_not().to(torch.int8), dim=1, stable=True)
        return order.gather(1, first)[:, :number]
