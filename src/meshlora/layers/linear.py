"""The linear layer with LoRA on a mesh: column-parallel, row-parallel or whole.

Owns: the module that holds the local parts of W, A and B. Does not own: its computation (`layers.products`), region
borders (`model.regions`), the initialization of factors (`adapter.initialization`).

Column-parallel layers communicate nothing. A row-parallel layer adds its base and LoRA terms locally and reduces the
sum once; the bias is added after that, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.comm.collectives import gather_each_to_one, reduce_each_to_one, reduce_scatter_each_to_each
from meshlora.comm.groups import Axis
from meshlora.layers.adapted import AdaptedLeaf, Placement, variant_of
from meshlora.layers.dropout import input_features
from meshlora.layers.frozen import FrozenMatrix, frozen_linear
from meshlora.layers.logits_recipe import LogitsRecipe
from meshlora.layers.products import Entered, GivenZFunction, LoraLinearFunction
from meshlora.layers.token_rows import ReplacedRows, base_rows, rows_of
from meshlora.layers.tokens import ForwardTokens, Mask, Part, Segment
from meshlora.plan.layout import Split
from meshlora.plan.rules import LinearRule


class ParallelLinear(AdaptedLeaf, FrozenMatrix):
    """This rank's part of a frozen linear of the base model, with its adapters.

    Attributes, besides those of `AdaptedLeaf` and `FrozenMatrix`:
        rule: the whole matrix and how it is split.
        weight: local part of W, `[out_local, in]` (column), `[out, in_local]` (row) or `[out, in]` (whole).
        bias: `[out_local]` (column) or `[out]` (row, whole), or None.
        dropout: adapter name -> probability of dropout on the input of A in training; absent if 0.
        scatters_tokens: under sp, whether the output leaves as this rank's slice of the tokens.
        enter: (this linear, x) -> what is known of x, before the products with an adapter. Another one where linears
            share work.
    """

    def __init__(
        self, rule: LinearRule, tp: Axis, *, scatters_tokens: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(*rule.local_features(tp.size))
        self.rule, self.tp, self.scatters_tokens = rule, tp, scatters_tokens
        empty = torch.empty(self.out_features, self.in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.register_parameter("bias", None)  # as nn.Linear does: `leaf.bias` is there
        if rule.has_bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype, device=device), requires_grad=False)
        self.dropout: dict[str, float] = {}
        self.enter: Callable[[ParallelLinear, Tensor], Entered] = lambda _, x: Entered(x)

    def set_dropout(self, name: str, p: float, tokens: ForwardTokens) -> None:
        """Give the input of adapter `name` dropout with probability `p` in training."""
        self.tokens = tokens
        if p > 0:
            self.dropout[name] = p

    def placement(self, parameter: Tensor) -> Placement:
        """Where its base `parameter` is stored."""
        rule = self.rule
        dim = {Split.COLUMN: 0, Split.ROW: 1, Split.WHOLE: None}[rule.split]
        if parameter.ndim == 1:  # a bias: a row-parallel linear has all of it
            return Placement((rule.out_features,), 0 if rule.split is Split.COLUMN else None, rule.layout)
        shape = (rule.out_features, rule.in_features)
        if rule.is_transposed:
            shape = (rule.in_features, rule.out_features)
        return Placement(shape, dim, rule.layout, rule.is_transposed, has_inputs_first=rule.is_transposed)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., in_local]` -> y `[..., out_local]`; a row layer returns the sum over tp."""
        segments, names = self._segments(x)
        is_row = self.rule.split is Split.ROW
        is_varied = any(name in self.variants for name in names)
        # A bias that comes after the sum over tp or a variant, or needs a gradient, is added separately.
        adds_bias = self.bias is not None and (is_row or is_varied or self.bias.requires_grad)
        bias = None if adds_bias else self.bias
        if not segments:  # no adapter is in use, or none of these tokens has one here
            y = frozen_linear(x, self.frozen_weight, bias)
        else:
            y = self._adapted(self.enter(self, x), bias, segments, names)
        if is_varied:  # before the sum over tp: it has a term of it as B has
            y = self._varied(x, y, segments, names)
        if is_row:
            y = self._leave_region(y)
        if adds_bias:
            y = y + self.bias.to(y.dtype)  # a trained one is wider than the model
        return y

    def _adapted(
        self, entered: Entered, bias: Tensor | None, segments: Sequence[Segment], names: Sequence[str]
    ) -> Tensor:
        """x `[..., in_local]` -> `[..., out_local]`, with the products of the adapters `names` on their segments."""
        frozen = entered.x, entered.token, self.frozen_weight, bias
        if entered.z is not None:
            y: Tensor = GivenZFunction.apply(*frozen, entered, entered.z, self.factor_b(names[0]))
        else:
            factors = [factor for name in names for factor in self.factors(name)]
            y = LoraLinearFunction.apply(*frozen, segments, entered, *factors)
        return y

    def _segments(self, x: Tensor) -> tuple[list[Segment], list[str]]:
        """The adapter products on the rows of x, and the adapter of each."""
        name = self.in_use
        if name is not None:
            return [Segment(0, x.numel() // x.shape[-1], self.scaling[name], self.mask(name, x))], [name]
        segments, names = [], []
        for part in self._parts(x):
            adapter = part.share.adapter
            if adapter in self.scaling:
                segments.append(Segment(part.start, part.stop, self.scaling[adapter], self.mask(adapter, x, part)))
                names.append(adapter)
        return segments, names

    def _parts(self, x: Tensor) -> list[Part]:
        """The rows of x of each adapter, if several are trained."""
        if self.active is not None or not self.scaling or self.tokens is None or not self.tokens.names_adapters:
            return []
        return self.tokens.parts(self.rule.name, x.numel() // x.shape[-1])

    def mask(self, adapter: str, x: Tensor, part: Part | None = None) -> Mask | None:
        """The dropout of `adapter` on its rows of x: those of `part`, or all."""
        if not self.training or adapter not in self.dropout:
            return None
        assert self.tokens is not None
        if part is None:
            (part,) = self.tokens.parts(self.rule.name, x.numel() // x.shape[-1])
        features = input_features(self.rule, self.tp, x.device).to(x.device)
        # Not the module's own name: its output may have a dropout too.
        return self.tokens.mask(f"{self.rule.name}.lora_dropout", self.dropout[adapter], part, features)

    def _varied(self, x: Tensor, y: Tensor, segments: Sequence[Segment], names: Sequence[str]) -> Tensor:
        """y `[..., out_local]` of x, with what the variants of the adapters `names` make of it on their segments."""
        inputs, rows = x.reshape(-1, self.in_features), y.reshape(-1, self.out_features)
        found, stop = [], 0
        for segment, name in zip(segments, names, strict=True):
            own = slice(segment.start, segment.stop)
            found.append(rows[stop : segment.start])  # of adapters that are on other modules alone
            varied = rows[own]
            if (variant := variant_of(self.variants, name)) is not None:
                varied = variant.product(self, name, varied, inputs[own], segment.dropout)
            found.append(varied)
            stop = segment.stop
        found.append(rows[stop:])
        whole = [part for part in found if len(part)] or found[:1]
        return (whole[0] if len(whole) == 1 else torch.cat(whole)).view(y.shape)

    def _piece_rows(self, piece: str) -> Tensor:
        assert self.rule.fused is not None, self.rule
        is_split = self.rule.split is Split.COLUMN
        return self.rule.fused.piece_rows(
            piece, rank=self.tp.rank if is_split else 0, size=self.tp.size if is_split else 1
        )

    def _leave_region(self, y: Tensor) -> Tensor:
        """y `[B, S, out]` or flat, one term of a sum -> the sum; under sp for our tokens, `[1, B*S/tp, out]`."""
        if self.scatters_tokens:
            own = reduce_scatter_each_to_each(y.reshape(-1, y.shape[-1]), self.tp)
            return own if y.ndim == 2 else torch.unsqueeze_copy(own, 0)  # no view: some models add to it in place
        return reduce_each_to_one(y, self.tp)

    def extra_repr(self) -> str:
        return f"{self.rule.split}, {self.in_features} -> {self.out_features}, adapters={list(self.scaling)}"


class ParallelHead(ParallelLinear):
    """The output head, whose logits are split over the vocabulary.

    It returns whole logits, gathered over tp. While `is_lazy` it returns a `LogitsRecipe` instead, from which the loss
    computes what it needs, a few tokens at a time.

    Attributes, besides those of `ParallelLinear`:
        replaced: adapter name -> its rows in place of those of the base.
    """

    is_lazy = False  # set by the loss, for the length of a forward

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.replaced = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., in]` -> logits `[..., vocab]`."""
        if self.is_lazy:
            return LogitsRecipe(x, vocab=self.rule.out_features)
        return self._whole(self.local_logits(x))

    def local_logits(self, x: Tensor) -> Tensor:
        """x `[..., in]` -> logits `[..., vocab/tp]` of this rank's rows, padding included."""
        logits = super().forward(x)
        if (rows := rows_of(self.replaced, self.active)) is not None:
            logits = rows.put_into(logits, x)
        return logits

    def replace_rows(self, adapter: str, values: nn.Parameter, ids: Sequence[int]) -> None:
        """Let the rows `values` `[n, H]` of the tokens `ids` take the place of the base's while `adapter` is active."""
        self.replaced[adapter] = ReplacedRows(values, ids, first=self._first_id, num_local=self.out_features)

    def base_rows(self, ids: Sequence[int]) -> Tensor:
        """The rows `[n, H]` of the tokens `ids` in the base. Collective."""
        others = None if self.rule.split is Split.WHOLE else self.tp
        return base_rows(self.weight, ids, first=self._first_id, tp=others)

    @property
    def _first_id(self) -> int:
        if self.rule.split is Split.WHOLE:
            return 0
        return self.tp.rank * self.out_features

    def _whole(self, y: Tensor) -> Tensor:
        if self.rule.split is Split.WHOLE:
            return y
        # Collectives work on dim 0; rows beyond the vocabulary are padding.
        parts = gather_each_to_one(y.movedim(-1, 0).contiguous(), self.tp)
        return parts[: self.rule.out_features].movedim(0, -1)
