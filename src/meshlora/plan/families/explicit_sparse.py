"""Explicit plans of mixtures of experts: their attention, dense MLPs and shared experts.

Owns: the table. Routed experts and routers need no word here (`plan.experts`), and a block that does not stand here is
kept whole: attention with an indexer that looks at all heads at once, state-space and linear-attention mixers.
Transformers' own plans of these families leave attention or shared experts out; of the others they are enough.
"""

from __future__ import annotations

from meshlora.plan.families.family import COLUMN, ROW, FamilyPlan, fused_mlp, gated_mlp, separate

_ATTENTION = separate("self_attn")
_GATED_ATTENTION = {**_ATTENTION, "self_attn.gate_proj": COLUMN}
# Multi-head latent attention.
_LATENT = separate("self_attn", names="q_proj q_b_proj kv_b_proj")
_DENSE = gated_mlp()
_SHARED = gated_mlp("mlp.shared_experts")
_ONE_SHARED = gated_mlp("mlp.shared_expert")
_WIDE = ("self_attn.q_norm", "self_attn.k_norm")
_SINKS = {"self_attn.sinks": 0}
_GRANITE_SHARED = fused_mlp("shared_mlp", "input_linear", "output_linear")

_LATENT_MOE = FamilyPlan({**_LATENT, **_DENSE, **_SHARED})
_ATTENTION_MOE = FamilyPlan({**_ATTENTION, **_DENSE, **_SHARED})
# The attention of these is kept whole.
_MLPS = FamilyPlan({**_DENSE, **_SHARED})

SPARSE: dict[str, FamilyPlan] = {
    "afmoe": FamilyPlan({**_GATED_ATTENTION, **_DENSE, **_SHARED}),
    "axk1": _LATENT_MOE,
    "axk2": _MLPS,
    "bailing_hybrid": _MLPS,
    "beam": FamilyPlan({**_GATED_ATTENTION, **_DENSE}, parameters={"self_attn.gate_bias": 0}),
    "cohere2_moe": _ATTENTION_MOE,
    "deepseek_v3": _LATENT_MOE,
    "deepseek_v32": _MLPS,
    "dots3_note_text": _MLPS,
    "exaone_moe": _ATTENTION_MOE,
    "flex_olmo": FamilyPlan(_ATTENTION, wide_norms=_WIDE),
    "flint": FamilyPlan({**_ATTENTION, **_DENSE, **_ONE_SHARED}, parameters=_SINKS),
    "glm4_moe_lite": _LATENT_MOE,
    "glm_moe_dsa": _MLPS,
    "gpt_oss": FamilyPlan(_ATTENTION, parameters=_SINKS),
    "granitemoe": FamilyPlan(_ATTENTION),
    "granitemoe_swa": FamilyPlan({**_ATTENTION, **_GRANITE_SHARED}, parameters=_SINKS),
    "granitemoehybrid": FamilyPlan({**_ATTENTION, **_GRANITE_SHARED}),
    "granitemoeshared": FamilyPlan({**_ATTENTION, **_GRANITE_SHARED}),
    "hunyuan_v1_moe": FamilyPlan({**_ATTENTION, **gated_mlp("mlp.shared_mlp")}),
    "inkling2_text": FamilyPlan({}),
    "inkling_text": FamilyPlan(_DENSE),
    "jamba": FamilyPlan({**_ATTENTION, **gated_mlp("feed_forward")}),
    "kimi_linear": _MLPS,
    "lfm2_moe": FamilyPlan({**separate("self_attn", out="out_proj"), **gated_mlp("feed_forward", names="w1 w3 w2")}),
    "llama4_text": FamilyPlan({**_ATTENTION, **gated_mlp("feed_forward"), **gated_mlp("feed_forward.shared_expert")}),
    "mimo_v2_flash": FamilyPlan({**_ATTENTION, **_DENSE}, parameters=_SINKS),
    "minimax_m2": FamilyPlan(_ATTENTION, wide_norms=_WIDE),
    "minimax_m3_vl_text": FamilyPlan(
        {
            **fused_mlp("mlp", "gate_up_proj", "down_proj"),
            **fused_mlp("mlp.shared_experts", "gate_up_proj", "down_proj"),
        }
    ),
    "nemotron_h": FamilyPlan(
        {
            **separate("mixer"),
            "mixer.up_proj": COLUMN,
            "mixer.down_proj": ROW,
            "mixer.shared_experts.up_proj": COLUMN,
            "mixer.shared_experts.down_proj": ROW,
        }
    ),
    "olmoe": FamilyPlan(_ATTENTION, wide_norms=_WIDE),
    "phimoe": FamilyPlan(_ATTENTION),
    "qwen2_moe": FamilyPlan({**_ATTENTION, **_DENSE, **_ONE_SHARED}),
    "qwen4_exp_text": FamilyPlan(_ONE_SHARED),
    "solar_open": FamilyPlan({**_ATTENTION, **_SHARED}),
}
