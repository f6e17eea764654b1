"""What of a vocabulary an adapter trains beside LoRA: rows of tokens, and weights that embedding and head share.

Owns: which modules have such rows, and which copy has two names, as PEFT reads the options; refusing what PEFT or a
mesh does not compute. Does not own: computing them (`layers.token_rows`), their initial values (`adapter.attach`).

As in PEFT, a list of `trainable_token_indices` is of the input embedding, and a mapping names modules. A head that is
tied with an embedding that has rows has the same ones, unless the mapping gives it others. With `ensure_weight_tying` a
copy of the embedding, or of the head, is one of both.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from peft import LoraConfig
from peft.utils.other import EMBEDDING_LAYER_NAMES

from meshlora.adapter.targets.options import matches
from meshlora.adapter.targets.token_rows import TokenRows
from meshlora.feature import features
from meshlora.layers.embedding import check_looked_up_alone
from meshlora.model.inject import is_tied
from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import UnsupportedError, UserError, did_you_mean

_OPTION = "trainable_token_indices"


def as_tied(model: Any, plan: ModelPlan, config: LoraConfig) -> LoraConfig:
    """`config` with `ensure_weight_tying` as PEFT takes it: the embedding in `modules_to_save`, in place of the head.

    Where nothing is tied, and on modules of other names, it has no effect in PEFT either.

    Raises:
        UnsupportedError: with LoRA on one of the two.
    """
    if not config.ensure_weight_tying or not is_tied(model, plan):
        return config
    saved, targets = [*(config.modules_to_save or ())], config.target_modules or ()
    if not any(name.rpartition(".")[2] in EMBEDDING_LAYER_NAMES for name in saved):
        ends = [plan.embedding, plan.head]
        if isinstance(targets, str):
            named = any(re.fullmatch(targets, end) for end in ends)
        else:
            named = bool(matches(targets, ends))
        if named:
            rule = "PEFT gives both names factors in the same memory, and its optimizer steps each of them"
            way_out = "leave it off, or name the embedding in modules_to_save"
            raise UnsupportedError("ensure_weight_tying with LoRA on tied weights", rule, way_out)
        return config
    if plan.embedding not in saved:
        saved.append(plan.embedding)
    # The first entry alone, as PEFT does it.
    for name in saved:
        if re.match(rf"(^|.*\.){name}($|\..*)", plan.head):
            saved.remove(name)
            break
    return dataclasses.replace(config, modules_to_save=saved)


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
    tied = _tied(model, plan, config, by_module)
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


def _tied(model: Any, plan: ModelPlan, config: LoraConfig, by_module: Mapping[str, list[int]]) -> tuple[str, ...]:
    """The head, if it has the rows of the embedding: PEFT goes by the configuration of the model."""
    given: Any = config.trainable_token_indices
    says_so = bool(model.config.to_dict().get("tie_word_embeddings", False))
    if plan.embedding not in by_module or not is_tied(model, plan) or not says_so:
        return ()
    if plan.head not in by_module:
        return (plan.head,)
    if by_module[plan.head] != by_module[plan.embedding]:
        if config.ensure_weight_tying:
            raise UserError(f"{_OPTION} with ensure_weight_tying", "tied modules have the same tokens", "give one list")
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
        if name == plan.embedding:
            check_looked_up_alone(model.get_submodule(name), given, "LoRA on it is supported")
        if name in targets:
            rule = "it has LoRA too, and a token's row is trained either way"
            raise UnsupportedError(given, rule, f"{way_out}: exclude_modules leaves a target out")
        if f"{name}.weight" in copies:
            raise UserError(given, "it is trained in full too, by modules_to_save", way_out)
        if getattr(model.get_submodule(name), "bias", None) is not None:
            rule = "it has a bias, which PEFT then leaves out"
            raise UnsupportedError(given, rule, f"name {name} in modules_to_save")
