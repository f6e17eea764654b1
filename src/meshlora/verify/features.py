"""The features that faults need to show: those of a model, its topology and its adapter.

Owns: their names. Does not own: the features of a run (`verify.request`).
"""

from __future__ import annotations

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from transformers import PretrainedConfig

from meshlora.adapter.targets.options import is_open
from meshlora.model.regions import sees_all
from meshlora.plan.layout import Layout, Split
from meshlora.plan.rules import ModelPlan
from meshlora.plan.topology import DATA, DENSE_AXES, EXPERT_AXES, FLAGS, Topology, field_of


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
