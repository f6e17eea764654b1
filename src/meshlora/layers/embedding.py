"""The input embedding, split over the vocabulary, with LoRA.

Owns: the lookup of local rows and the sum over tp. Does not own: the output head (`layers.linear`), rows that take the
place of the base's (`layers.token_rows`).

Each rank looks up the ids in its slice and has zeros for the others; the sum over tp is the whole embedding.
The module stays the model's own, so that a family's own code still runs (gemma scales its embeddings).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlora.comm.collectives import reduce_each_to_one
from meshlora.comm.groups import Axis
from meshlora.layers.adapted import become, parts_of, variant_of
from meshlora.layers.token_rows import ReplacedRows, base_rows, rows_of
from meshlora.layers.tokens import ForwardTokens
from meshlora.plan.rules import ParameterRule
from meshlora_ground.errors import UnsupportedError


class ParallelEmbedding(nn.Embedding):
    """An embedding `[V, H]` of which this rank holds `ceil(V / tp)` rows. Made by `parallelize_embedding`.

    Attributes:
        rule: how the vocabulary is split; None if it is whole.
        lora_embedding_A, lora_embedding_B: adapter name -> local factor `[r, V_local]`, `[H, r]`, named as PEFT does.
        scaling: adapter name -> s. variants, active, tokens: as in `AdaptedLeaf`.
        replaced: adapter name -> its rows in place of those of the base.
    """

    rule: ParameterRule | None
    tp: Axis
    first_id: int
    lora_embedding_A: nn.ParameterDict
    lora_embedding_B: nn.ParameterDict
    scaling: dict[str, float]
    variants: nn.ModuleDict
    replaced: nn.ModuleDict
    active: str | None
    tokens: ForwardTokens | None

    def add_adapter(self, name: str, factors: Mapping[str, Tensor], *, scaling: float) -> None:
        """Attach local factors `{"A": [r, V_local], "B": [H, r]}` as adapter `name`; frozen until set."""
        assert factors["A"].shape[1] == self.num_embeddings, (factors["A"].shape, self)
        self.lora_embedding_A[name] = nn.Parameter(factors["A"], requires_grad=False)
        self.lora_embedding_B[name] = nn.Parameter(factors["B"], requires_grad=False)
        self.scaling[name] = scaling

    def trained(self, adapter: str) -> dict[str, nn.Parameter]:
        """The trained tensors of `adapter` on this leaf, keyed as in `add_adapter`."""
        if adapter not in self.scaling:
            return {}
        found = {"A": self.lora_embedding_A[adapter], "B": self.lora_embedding_B[adapter]}
        return found | parts_of(self.variants, adapter)

    def forward(self, input: Tensor) -> Tensor:
        """ids `[B, S]` -> `[B, S, H]`, identical on all ranks."""
        ids, is_other = self._local(input)
        y = super().forward(ids)
        if (rows := rows_of(self.replaced, self.active)) is not None:
            y = rows.looked_up(y, ids, padding=self.padding_idx, scale=getattr(self, "embed_scale", None))
        if self.active is not None and self.active in self.scaling:
            y = self._with_lora(y, ids, self.active)
        elif self.tokens is not None and self.tokens.names_adapters and self.scaling:
            y = self._with_lora_of_each(y.flatten(0, -2), ids.flatten()).view(y.shape)
        if is_other is None:
            return y
        # One rank has a row, the others zeros.
        return reduce_each_to_one(y.masked_fill(is_other.unsqueeze(-1), 0), self.tp)

    def replace_rows(self, adapter: str, values: nn.Parameter, ids: Sequence[int]) -> None:
        """Let the rows `values` `[n, H]` of the tokens `ids` take the place of the base's while `adapter` is active."""
        self.replaced[adapter] = ReplacedRows(values, ids, first=self.first_id, num_local=self.num_embeddings)

    def base_rows(self, ids: Sequence[int]) -> Tensor:
        """The rows `[n, H]` of the tokens `ids` in the base. Collective."""
        return base_rows(self.weight, ids, first=self.first_id, tp=None if self.rule is None else self.tp)

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """(local rows to look up, mask of ids that other ranks hold); no mask if the vocabulary is whole."""
        if self.rule is None:
            return ids, None
        local = ids - self.first_id
        is_other = (local < 0) | (local >= self.num_embeddings)
        return local.masked_fill(is_other, 0), is_other

    def _with_lora_of_each(self, y: Tensor, ids: Tensor) -> Tensor:
        """Rows y `[T, H]` of the base for ids `[T]`, with each of several adapters on its own tokens."""
        assert self.tokens is not None
        found = []
        for part in self.tokens.parts(type(self).__name__, len(ids)):
            adapter, rows = str(part.share.adapter), slice(part.start, part.stop)
            own = y[rows]
            if adapter in self.scaling:  # else it is on other modules alone
                own = self._with_lora(own, ids[rows], adapter)
            found.append(own)
        return torch.cat(found)

    def _with_lora(self, y: Tensor, ids: Tensor, name: str) -> Tensor:
        """Rows y `[..., H]` of the base for `ids`, with adapter `name`."""
        # The padding token's column of A gets no gradient, as in PEFT.
        z = F.embedding(ids, self.lora_embedding_A[name].T, padding_idx=self.padding_idx).to(y.dtype)
        delta = z @ self.lora_embedding_B[name].T.to(y.dtype) * self.scaling[name]
        scale = getattr(self, "embed_scale", None)  # of gemma: PEFT scales its update too
        if scale is not None:
            delta = delta * scale.to(delta.dtype)
        y = y + delta
        variant = variant_of(self.variants, name)
        return y if variant is None else variant.product(self, name, y, ids, None)


def check_looked_up_alone(module: nn.Module, given: str, way_out: str) -> None:
    """Refuse `given`, which takes the weight of `module` for all of it, of an embedding with a norm inside (inkling).

    LoRA is added after the norm, as in PEFT, which leaves the norm out of trained rows, and out of what it merges.
    """
    if any(not isinstance(child, nn.ModuleDict | nn.ParameterDict) for child in module.children()):
        raise UnsupportedError(given, "a norm inside the embedding follows its lookup", way_out)


def parallelize_embedding(module: nn.Module, rule: ParameterRule | None, tp: Axis, *, name: str) -> None:
    """Make `module`, an embedding on the meta device, hold this rank's rows.

    Raises:
        UnsupportedError: it renormalises its rows, or is no embedding.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        raise UnsupportedError(f"{name}: {type(module).__name__}", "the input embedding is not an ordinary one")
    become(module, ParallelEmbedding)  # it stays an instance of the model's own class, too
    assert isinstance(module, ParallelEmbedding)
    module.rule, module.tp, module.first_id = rule, tp, 0
    module.lora_embedding_A, module.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()
    module.scaling, module.variants, module.replaced = {}, nn.ModuleDict(), nn.ModuleDict()
    module.active, module.tokens = None, None
    if rule is None:
        return
    local = rule.layout.local_size(tp.size)
    module.first_id, module.num_embeddings = tp.rank * local, local  # of the last ranks some rows may be padding
    empty = torch.empty(local, module.embedding_dim, dtype=module.weight.dtype, device=module.weight.device)
    module.weight = nn.Parameter(empty, requires_grad=False)
    if module.padding_idx is not None:
        padding = module.padding_idx - module.first_id
        module.padding_idx = padding if 0 <= padding < local else None  # a rank of tp has it, the others have none
