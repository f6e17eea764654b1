"""The features that faults need to show: those of a model, its topology and its adapter, and of a run of them.

Owns: their names, and which a run has. Does not own: what they mean (`verify.faults.fault`).
"""

from __future__ import annotations

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from transformers import PretrainedConfig

from meshlora.adapter.targets.options import is_open
from meshlora.model.padding import leaves_mask
from meshlora.plan.layout import Layout, Split
from meshlora.plan.rules import ModelPlan
from meshlora.plan.token_order import FEWEST
from meshlora.wings.context.borders import sees_all
from meshlora.wings.quantized.plan import KEEP
from meshlora_ground.objective import Grpo, Objective, Policy, Sft
from meshlora_ground.tasks import CAUSAL
from meshlora_ground.topology import DATA, DENSE_AXES, EXPERT_AXES, FLAGS, Topology, field_of
from meshlora_judge.batches import micro_batches_of
from meshlora_judge.case import Case


def features_of_model(
    plan: ModelPlan, config: LoraConfig, model: PretrainedConfig, *, has_pieces: bool = False
) -> set[str]:
    """Names of features, as in `verify.faults.fault.Mutation`.

    plan: of the model configured by `model`. config: of the adapter. has_pieces: it targets parts of matrices.
    """
    topology, text = plan.topology, model.get_text_config()
    has = features_of_topology(topology)
    has |= {f"{r.split}_bias" for r in plan.linears.values() if r.has_bias and r.split is not Split.WHOLE}
    own = [name for name in plan.linears if name != plan.head and is_open(plan, config, name)]
    targets = [plan.linears[name] for name in own if _is_target(config, name)]
    has |= {f"{rule.split}_target" for rule in targets}
    split = {name: layout for name, rule in plan.linears.items() if (layout := rule.layout)}
    shared = {name for name, layout in split.items() if max(layout.copies(topology.tp)) > 1}
    fused = {name: {p.name for p in layout.pieces} for name, layout in split.items() if len(layout.pieces) > 1}
    riders = _riders(plan, {rule.name for rule in targets}, text.hidden_size)
    blocks = {name for name in fused if not _is_one_run(split[name], topology.tp)}
    heads = getattr(text, "num_attention_heads", None)
    facts = {
        "targets": config.target_modules == "all-linear"
        or (not isinstance(config.target_modules, str) and len(config.target_modules or ()) > 1),
        "whole_mixer": any(not r.is_split and not r.name.endswith(("mlp", "feed_forward")) for r in plan.regions),
        "scale": config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r) != 1,
        "kv_replicas": bool(shared),
        "kv_target": any(rule.name in shared for rule in targets),
        "uneven_heads": isinstance(heads, int) and heads & (heads - 1) != 0,
        "fused_qkv": any(names == {"q", "k", "v"} for names in fused.values()),
        "fused_gate_up": any(names == {"gate", "up"} for names in fused.values()),
        "fused_target": any(rule.name in blocks and not has_pieces for rule in targets),
        "fused_blocks": bool(blocks),
        "sliced": any(r.sliced for r in plan.regions) and getattr(model, "alibi", True),
        "wide_norm": bool(plan.wide_norms),
        "mixer": any(name.endswith(".A_log") for name in plan.parameters),
        "gated_norm": any(layout.pieces[0].name == "x" for layout in plan.wide_norms.values()),
        "riding": any(riders),
        "riding_together": max(riders, default=0) > 1,
        "padded_vocabulary": any(layout.is_padded and layout.size % topology.tp for layout in split.values()),
        "pieces": has_pieces,
        "experts": bool(plan.experts),
        "expert_target": bool(config.target_parameters),
        "routing_last": any(not rule.weights_first for rule in plan.experts.values()),
        "gated_experts": any(rule.first.fused is not None for rule in plan.experts.values()),
        "expert_bias": any(rule.has_bias for rule in plan.projections.values()),
        "embedding_target": _is_target(config, plan.embedding, is_linear=False),
        "embedding_padding": _is_target(config, plan.embedding, is_linear=False)
        and getattr(text, "pad_token_id", None) is not None,
        "trained": bool(config.modules_to_save),
        "token_rows": bool(config.trainable_token_indices),
        "tied_rows": getattr(model, "tie_word_embeddings", False) and _is_of_embedding(config, plan),
        "ranks_by_pattern": bool(config.rank_pattern) and not has_pieces,
        "scales_by_pattern": bool(config.alpha_pattern) and not has_pieces,
        "dora": config.use_dora,
        "gathered_keys": bool(plan.attentions) and not topology.ring,
        "recurrent": bool(plan.recurrent),
        "passed_states": any(plan.recurrent.values()),
        "balanced": bool(plan.attentions) and not plan.recurrent and sees_all(model),
        "soft_caps": bool(getattr(text, "attn_logit_softcapping", None)),
        "rope": bool(plan.attentions) and bool(getattr(text, "rope_parameters", None)),
        "m_rope": "mrope_section" in (getattr(text, "rope_parameters", None) or {}),
    }
    return has | {name for name, is_there in facts.items() if is_there}


def features_of_topology(topology: Topology) -> set[str]:
    """The features that depend on neither model nor adapter."""
    has = {name for name in (*DENSE_AXES, *EXPERT_AXES) if getattr(topology, name) > 1}
    has |= {field for field in map(field_of, FLAGS) if getattr(topology, field)}
    facts = {
        "interleave": topology.interleave > 1,
        "ranks": topology.world > 1,
        "expert_axes": topology.ep * topology.etp > 1,
        "data": topology.size_over(DATA) > 1,
        "other_tokens": topology.size_over(DATA | topology.token_cut) > 1,
        "dense_dp_is_not_edp": topology.groups_over(DATA) != topology.groups_over(frozenset(EXPERT_AXES[:1])),
    }
    return has | {name for name, is_there in facts.items() if is_there}


def _riders(plan: ModelPlan, targets: set[str], width: int) -> list[int]:
    """For each region, the number of targets whose low-rank activations are gathered with its input `[..., width]`.

    Only in layers above the first target: below it no gradient flows back.
    """

    def layer(name: str) -> int:
        return int(name.removeprefix(f"{plan.layers}.").partition(".")[0])

    inputs = {name for name in targets if plan.linears[name].in_features == width}
    first = min((layer(name) for name in targets if name.startswith(f"{plan.layers}.")), default=0)
    inside = (region for region in plan.regions if region.name.startswith(f"{plan.layers}."))
    return [len(inputs.intersection(plan.riders(r))) for r in inside if layer(r.name) > first]


def _is_one_run(layout: Layout, tp: int) -> bool:
    """Whether a rank holds contiguous rows of a fused matrix."""
    runs = layout.runs(rank=0, size=tp)
    return runs[-1].stop - runs[0].start == sum(run.size for run in runs)


def _is_of_embedding(config: LoraConfig, plan: ModelPlan) -> bool:
    """Whether the adapter has rows of the embedding, and says nothing of the head."""
    given = config.trainable_token_indices
    return isinstance(given, list) or [*(given or ())] == [plan.embedding] or [*(given or ())] == ["embed_tokens"]


def _is_target(config: LoraConfig, name: str, *, is_linear: bool = True) -> bool:
    """Whether the adapter is on the module `name`, a linear or the embedding."""
    if config.target_modules == "all-linear":
        return is_linear and name.rpartition(".")[2] not in (config.modules_to_save or ())
    return bool(config.target_modules) and bool(check_target_module_exists(config, name))


def features_of_run(case: Case, plan: ModelPlan, config: PretrainedConfig, *, adapters: int) -> set[str]:
    """The features of the run of `case` on the topology of `plan`, named as in `verify.faults.fault.Mutation`.

    config: of the model. adapters: how many are trained at once.
    """
    topology, lora = plan.topology, LoraConfig(**case.lora)
    has = features_of_model(plan, lora, config, has_pieces=bool(case.pieces))
    further = case.further
    takes = {n for inputs in further.each for n in inputs} if further is not None and further.has_images else set()
    micro_batches = -(-case.batch_size // (case.micro_batch_size * topology.dp))
    facts = {
        "steps": case.steps > 1,
        "digits": case.dtype != "bfloat16",
        "seed": case.seed != 0,
        "short_batch": case.steps > 1 and case.data.num_examples % case.batch_size != 0,
        "odd_dropout": round(lora.lora_dropout, 1) != lora.lora_dropout,
        "aux_loss": case.router_aux_loss_coef > 0,
        "shared_experts_adapter": case.share_experts,
        "dropout": bool(case.dropout) or lora.lora_dropout > 0,
        "lora_dropout": lora.lora_dropout > 0,
        "model_dropout": bool(case.dropout),
        "smoothing": getattr(case.objective, "label_smoothing", 0) > 0,
        "images": bool(takes),
        "image_grid": "image_grid_thw" in takes,
        "image_blocks": "token_type_ids" in takes,
        "features": bool(takes and getattr(config.vision_config, "deepstack_visual_indexes", None)),
        "vision": bool(takes) and any(not plan.is_text(n) for n in lora.target_modules or ()),
        "packing": bool(case.packing),
        "whole_rows": topology.cp == 1,
        "first_tokens": topology.cp == 1 and not case.packing and _trains_first_tokens(case),
        "few_tokens": topology.cp == topology.world and _has_few_tokens(case, topology.cp),
        "unmasked": not case.packing and not takes and leaves_mask(plan),
        "resume": case.resumes,
        "adapters": adapters > 1,
        "one_micro_batch": micro_batches == 1,
        # Of a packed step the short sequences of a proof may all share one row.
        "several_micro_batches": micro_batches > 1 and not case.packing,
        "four_micro_batches": micro_batches > 3,
        "kernels": case.kernels != "none",
        "quantized": case.quantization is not None,
        "plain_base": case.quantization is None,
        "quantizes": case.quantization not in (None, KEEP),
        "four_bits": case.quantization in ("nf4", "mxfp4"),
        "base": case.objective.needs_base,
        "reference": case.reference is not None,
        "log_probabilities": not isinstance(case.objective, Sft) and case.objective.task == CAUSAL,
        "examples": case.objective.per != "token",
        "pools_to_the_end": getattr(case.objective, "pooling", "cls") != "cls",
        case.objective.kind: True,
        "entropy": case.objective.needs_entropy,
        "routed": bool(case.routed),
        **_of_policy(case.objective),
        "lora_plus": case.lora_plus_ratio is not None,
        "other_schedule": case.schedule != "linear",
        "final_rate": case.min_lr > 0,
        "noise": case.neftune_alpha > 0,
        case.optimizer: True,
    }
    return has | {name for name, is_there in facts.items() if is_there}


def _trains_first_tokens(case: Case) -> bool:
    return any(case.is_trained[start] for start in case.offsets[:-1])


def _has_few_tokens(case: Case, cp: int) -> bool:
    """Whether a cp rank has as many tokens of a packed row as the row has documents, its padding counted as one."""
    if cp == 1 or case.packing != "auto":
        return False
    for step in range(case.steps):
        for rows in micro_batches_of(case.data, case.train, step, pad_token_id=case.pad_token_id):
            num_tokens = int(rows.attention_mask.sum())
            on_each = max(FEWEST, -(-num_tokens // cp))
            if on_each == len(rows.attention_mask) + (on_each * cp > num_tokens):
                return True
    return False


def _of_policy(objective: Objective) -> dict[str, bool]:
    """Features of policy gradients."""
    if not isinstance(objective, Policy | Grpo):
        return {}
    return {
        "policy_gradient": True,
        "importance": objective.importance_cap is not None,
        "sequence_ratio": objective.ratio == "sequence",
        "means_of_sequences": objective.mean_over == "sequence" or objective.ratio == "sequence",
        "cispo": objective.loss == "cispo",
        "kl_estimate": objective.kl != "k3",
        "scaled_otherwise": getattr(objective, "scale_rewards", "group") != "group",
    }
