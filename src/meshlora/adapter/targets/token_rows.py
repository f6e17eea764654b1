"""Rows of a vocabulary that an adapter trains in place of those of the base: `trainable_token_indices`.

Owns: which modules have such rows, as PEFT reads the option; refusing what PEFT or a mesh does not compute. Does not
own: their computation (`layers.token_rows`), their initial values (`adapter.attach`).

As in PEFT, a list is of the input embedding, and a mapping names modules. A head that is tied with an embedding that
has rows has the same ones, unless the mapping gives it others. A row itself is trained, not its difference from the
base.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig

from meshlora.feature import features
from meshlora.model.inject import is_tied
from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import UnsupportedError, UserError, did_you_mean

DELTA = "trainable_tokens_delta"  # PEFT's name of a parameter that holds rows, not differences
_OPTION = "trainable_token_indices"


@dataclass(frozen=True)
class TokenRows:
    """The rows `[n, H]` of tokens `ids` in the vocabulary of `module`.

    tied: other modules that have the same rows. num_tokens: of the vocabulary.
    """

    module: str
    ids: tuple[int, ...]
    num_tokens: int
    tied: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the trained parameter."""
        return f"{self.module}.{DELTA}"

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules that have them."""
        return (self.module, *self.tied)


def resolve_rows(
    model: Any, plan: ModelPlan, config: LoraConfig, *, targets: Collection[str], copies: Collection[str]
) -> dict[str, TokenRows]:
    """Module -> its rows. targets: modules with LoRA. copies: base parameters that are trained in full.

    Raises:
        UserError: a name that is no module with a vocabulary, or a token past its end. UnsupportedError: names what
            cannot be combined.
    """
    given = getattr(config, _OPTION, None)
    if not given:
        return {}
    if isinstance(given, list):
        by_module = {plan.embedding: given}
    else:
        by_module = _by_module(model, plan, given)
    tied = _tied(model, plan, given, by_module)
    found = {}
    for module, ids in by_module.items():
        if module in tied:
            continue  # it has those of the embedding
        rows = TokenRows(module, tuple(ids), _num_tokens(model, plan, module))
        if module == plan.embedding:
            rows = dataclasses.replace(rows, tied=tied)
        _check_rows(model, plan, rows, targets=targets, copies=copies)
        found[module] = rows
    return found


def _by_module(model: Any, plan: ModelPlan, given: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The embedding and the head among the keys of `given`."""
    ends, found = [name for name in (plan.embedding, plan.head) if name], dict[str, list[int]]()
    for key, ids in given.items():
        matched = [name for name, _ in model.named_modules() if name.endswith(key)]  # without a dot, as in PEFT
        # PEFT goes by any end of a name, as `head` is one of `lm_head`; whole parts of names alone are taken here.
        if len(matched) != 1 or matched[0] not in ends or not f".{matched[0]}".endswith(f".{key}"):
            named, known = ", ".join(matched) or "no module", " and ".join(ends) or "none"
            rule = f"it names {named}, and the modules with a vocabulary are {known}"
            raise UserError(f"{_OPTION}: {key}", rule, did_you_mean(key, ends))
        if matched[0] in found:
            raise UserError(f"{_OPTION}: {key}", f"it names {matched[0]}, as another key does", "give one of the two")
        found[matched[0]] = ids
    return found


def _tied(model: Any, plan: ModelPlan, given: Any, by_module: Mapping[str, list[int]]) -> tuple[str, ...]:
    """The head, if it has the rows of the embedding: PEFT goes by the configuration of the model."""
    says_so = bool(model.config.to_dict().get("tie_word_embeddings", False))
    if plan.embedding not in by_module or not is_tied(model, plan) or not says_so:
        return ()
    if plan.head not in by_module:
        return (plan.head,)
    if by_module[plan.head] != by_module[plan.embedding]:
        return ()
    if plan.head not in given:
        rule = "PEFT then unties its rows"
        raise UnsupportedError(f"{_OPTION} of {plan.head} by a shorter name", rule, f"write {plan.head!r}")
    return (plan.head,)


def _num_tokens(model: Any, plan: ModelPlan, module: str) -> int:
    if module in plan.linears:
        return plan.linears[module].out_features
    if rule := plan.parameters.get(f"{module}.weight"):  # split: the module has the rows of one rank
        return rule.layout.size
    return int(model.get_submodule(module).num_embeddings)


def _check_rows(
    model: Any, plan: ModelPlan, rows: TokenRows, *, targets: Collection[str], copies: Collection[str]
) -> None:
    if max(rows.ids) >= rows.num_tokens:
        rule = f"the vocabulary of {rows.module} has {rows.num_tokens} tokens, from 0"
        way_out = "give the base with the tokens added: its embedding is resized before it is saved"
        raise UserError(f"{_OPTION}: {max(rows.ids)}", rule, way_out)
    for name in rows.modules:
        for feature in features():
            feature.check_trained_base(plan, f"{name}.weight")
        given, way_out = f"{_OPTION} of {name}", f"take {name} out of one of the two"
        if name in targets:
            rule = "it has LoRA too, and a token's row is trained either way"
            raise UnsupportedError(given, rule, f"{way_out}: exclude_modules leaves a target out")
        if f"{name}.weight" in copies:
            raise UserError(given, "it is trained in full too, by modules_to_save", way_out)
        if getattr(model.get_submodule(name), "bias", None) is not None:
            rule = "it has a bias, which PEFT then leaves out"
            raise UnsupportedError(given, rule, f"name {name} in modules_to_save")
