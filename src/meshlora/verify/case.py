"""The case of a proof: its sequences, its records, and its adapter in words that PEFT itself understands.

Does not own: which requests are refused, topologies and blueprints (`verify.request`), the shapes of twins
(`meshlora_judge.twin`), what a case is (`meshlora_judge.case`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from peft import LoraConfig
from transformers import PretrainedConfig

from meshlora.adapter.initialization import start_of
from meshlora.plan.own_dropouts import dropout_fields
from meshlora.plan.rules import ModelPlan
from meshlora.reading.processor import load_processor
from meshlora.reading.sources import read_records
from meshlora.reading.tokenization import tokenize
from meshlora.reading.tokenizer import load_tokenizer, padding_token_id
from meshlora.run.config.model_presets import num_chosen
from meshlora.verify.options import Request, same_fields
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.objective import Objective
from meshlora_ground.tasks import CAUSAL
from meshlora_ground.topology import Topology
from meshlora_judge import case
from meshlora_judge.case import Case
from meshlora_judge.images import with_images
from meshlora_judge.invoked import check_invocations, with_invocations
from meshlora_judge.objectives import has_load_balancing

_MAX_LENGTH, _MAX_LENGTH_WITH_IMAGES = 128, 2048  # tokens of a sequence of the user's
_CHOICE = 2  # records that are read, for each that is needed: some may be equal, or have nothing trained
_AUX_LOSS_COEF = 0.1  # large enough for a wrong one to show
_MIN_8BIT_SIZE = 600  # of a twin's factors some are below it, and some above
# Sequences of a record, by the reader of its objective; of the others 1.
_ROWS = {"pairs": 2, "margins": 2, "feedback": 2, "similar": 3}
# Their records are a prompt and an answer, of a token each.
_ANSWERS = ("pairs", "margins", "feedback", "rollouts", "rewarded")


def case_of(
    request: Request, config: PretrainedConfig, plan: ModelPlan, batch_size: int, *, tokens: Sequence[int]
) -> Case:
    """The case of `request`, on random sequences or those of the user. tokens: whose rows the adapter trains."""
    objective, number = request.objective, case.num_sequences_for(batch_size, request.steps)
    found, pad = _sequences(request, config, _ROWS.get(objective.reader, 1) * number)
    if tokens and request.data is None:
        found = case.with_tokens(found, tokens)
    invocation = request.lora.get("alora_invocation_tokens") or ()
    if request.data is None:
        found = with_invocations(found, invocation)
    if request.images and request.data is None:
        found = with_images(found, config, seed=request.seed)
    if plan.encoder and request.data is None:
        found = case.with_prompts(found, config, seed=request.seed)
    segments = (getattr(config, "type_vocab_size", None) or 0) > 1
    vocab_size = config.get_text_config().vocab_size
    data = as_records(found, objective, vocab_size=vocab_size, seed=request.seed, segments=segments)
    case.check_tokens(data, tokens)
    check_invocations(data, invocation)
    if request.routed:
        data = _with_experts(request, config, plan, data)
    own = {
        "adapter": "",
        "model_type": config.model_type,
        "resumes": request.resume,
        "further": data.further,
        "columns": {name: tuple(column.tolist()) for name, column in data.columns.items()},
        "rows_per_example": data.rows_per_example,
        "predicts_next": data.predicts_next,
        "routed": (),  # not as the request has it
        "input_ids": tuple(data.input_ids.tolist()),
        "is_trained": tuple(data.is_trained.tolist()),
        "offsets": tuple(data.offsets.tolist()),
        "batch_size": batch_size,
        "warmup_steps": min(1, request.steps - 1),
        "pad_token_id": pad,
        "dropout": tuple(sorted(dropout_fields(config))),
    }
    # Tuples all the way down: a case is hashed.
    if data.targets is not None:
        own["targets"] = tuple(map(tuple, data.targets.tolist()))
    if data.routed is not None:
        own["routed"] = tuple(tuple(map(tuple, token)) for token in data.routed.tolist())
    if request.optimizer == "adamw_8bit":
        own["min_8bit_size"] = _MIN_8BIT_SIZE
    if request.schedule == "cycle":
        own["warmup_steps"] = 0  # its rates say what it begins with
    return Case(**(same_fields(Case, request) | own))


def _with_experts(
    request: Request, config: PretrainedConfig, plan: ModelPlan, data: TokenizedDataset
) -> TokenizedDataset:
    """`data` with random experts of each token.

    Raises:
        UnsupportedError: below float64, where all runs replay the reference's routing; stages of layers; a router that
            chooses among groups, or an unknown number of experts, whose random choices would be none that it makes.
    """
    text = config.get_text_config()
    chosen, groups = num_chosen(text.to_dict()), getattr(text, "n_group", None) or 1
    numbers = {rule.num_choices for rule in plan.experts.values()}
    if request.dtype == "float64" and chosen and groups == 1 and len(numbers) == 1 and plan.topology.pp == 1:
        size = {"layers": text.num_hidden_layers, "experts": min(numbers), "chosen": chosen}
        return case.with_routed(data, **size, seed=request.seed)
    if request.routed == "auto":
        return data
    raise UnsupportedError("routed_experts", "they are proved in float64, of routers that choose among all experts")


def _sequences(request: Request, config: PretrainedConfig, number: int) -> tuple[TokenizedDataset, int]:
    """(`number` sequences, padding token id). Raises: UserError: text without a tokenizer, or too little of it."""
    text_config, data = config.get_text_config(), request.data
    size = text_config.vocab_size
    if data is None:
        pad = getattr(text_config, "pad_token_id", None)
        if not isinstance(pad, int) or not 0 <= pad < size:
            pad = 0
        options = {"seed": request.seed, "pad_token_id": pad, "shortest": 1}
        if request.objective.reader in _ANSWERS:
            options["shortest"] = 2
        return case.random_tokens(num_sequences=number, vocab_size=size, **options), pad
    if not isinstance(request.model, str) or request.twin:
        raise UserError(f"--data {data}", "a twin has no tokenizer", "leave out --data, or give --model without --twin")
    tokenizer = load_tokenizer(request.model, trust_remote_code=request.trust_remote_code)
    records, longest = read_records([data]), _MAX_LENGTH
    if request.images:  # each image is read, to know its tokens: not those of a whole file
        records, longest = records[: _CHOICE * number], _MAX_LENGTH_WITH_IMAGES
    limit = min(getattr(text_config, "max_position_embeddings", None) or longest, longest)
    has_images = any(record.images for record in records)
    if has_images and not request.images:
        raise UserError(f"--data {data}", "it has images", "give --images")
    if request.images and not has_images:
        rule = f"none of its first {len(records)} records has an image"
        raise UserError(f"--data {data}", rule, "leave out --images")
    processor = functools.partial(load_processor, request.model, config)
    found = tokenize(records, tokenizer, max_length=limit, vocab_size=size, processor=processor)
    return case.distinct_sequences(found, number, source=data), padding_token_id(tokenizer)


def as_records(
    found: TokenizedDataset, objective: Objective, *, vocab_size: int, seed: int, segments: bool = False
) -> TokenizedDataset:
    """Turn the sequences `found` into records of `objective`. segments: texts of two segments each."""
    if objective.reader == "pairs":
        return case.as_pairs(found)
    if objective.reader == "margins":
        return case.with_margins(found, seed=seed)
    if objective.reader == "feedback":
        return case.with_feedback(found)
    if objective.reader in ("rollouts", "rewarded"):
        is_rewarded = objective.reader == "rewarded"
        is_truncated = getattr(objective, "mask_truncated", False)
        options = {"is_rewarded": is_rewarded, "is_truncated": is_truncated}
        return case.with_rollouts(found, vocab_size=vocab_size, seed=seed, **options)
    if objective.reader in ("labelled", "labelled_words"):
        return case.with_labels(found, objective, seed=seed, segments=segments)
    if objective.reader == "taught":
        return case.with_teacher(found, vocab_size=vocab_size, seed=seed)
    if objective.reader == "in_context":
        return case.with_context(found, vocab_size=vocab_size, seed=seed)
    if objective.reader == "similar":
        return case.as_similar(found, _ROWS["similar"])
    return found


def in_peft_words(given: dict[str, Any], lora: LoraConfig, plans: dict[Topology, ModelPlan]) -> dict[str, Any]:
    """`given`, the adapter `lora` as the user wrote it, as fields that PEFT itself understands."""
    plain = dict(given)
    for own in ("pieces", "share_experts", "vision"):
        plain.pop(own, None)
    if lora.lora_dropout:
        plain["lora_dropout"] = lora.lora_dropout
    if lora.target_parameters or any(plan.text for plan in plans.values()):
        plain |= {"target_modules": lora.target_modules, "target_parameters": lora.target_parameters}
    elif lora.exclude_modules and "exclude_modules" not in plain:
        plain["exclude_modules"] = sorted(lora.exclude_modules)
    start = start_of(lora)
    if start.changes_base or start.looks_at_data:
        plain["init_lora_weights"] = True  # initial values have their own proof, of PiSSA and OLoRA in float32
        plain.pop("eva_config", None)
    if lora.alora_invocation_tokens:
        plain["task_type"] = CAUSAL  # PEFT would warn, and run the base
    if lora.modules_to_save:
        plain["modules_to_save"] = lora.modules_to_save
    if getattr(lora, "pieces", None):
        plain |= {"rank_pattern": lora.rank_pattern, "alpha_pattern": lora.alpha_pattern}
    for plan in plans.values():
        if any(rule.is_transposed for rule in plan.linears.values()):
            plain["fan_in_fan_out"] = True  # else PEFT sets it with a warning
    found: dict[str, Any] = json.loads(json.dumps(plain))  # no tuples: as it is read from a file
    return found


def eva_words(words: dict[str, Any], lora: LoraConfig) -> dict[str, Any] | None:
    """The adapter that begins as the data say, in PEFT's `words` but for its start; None: it does not."""
    if not start_of(lora).looks_at_data:
        return None
    return words | {"init_lora_weights": lora.init_lora_weights, "eva_config": dataclasses.asdict(lora.eva_config)}


def aux_loss_coef(request: Request, config: PretrainedConfig, plans: dict[Topology, ModelPlan]) -> float:
    if request.router_aux_loss_coef is not None:
        return request.router_aux_loss_coef
    of_twin = request.family is not None and request.objective.task == CAUSAL
    if of_twin and any(plan.experts for plan in plans.values()) and has_load_balancing(config):
        return _AUX_LOSS_COEF
    return 0.0
