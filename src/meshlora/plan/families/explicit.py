"""Explicit plans: how families are split that transformers has no plan for, or whose plan gathers inside a block.

Owns: the table of families, but for mixtures of experts (`plan.families.explicit_sparse`). Names are relative to the
decoder layer. The sizes come from the model; here stands only what its code implies: which linears are column- or
row-parallel, how fused ones are made of pieces, which counts of heads the code reads, which arguments have a dim of
heads. Does not own: what follows from it (`plan.rules`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshlora.plan.families.explicit_sparse import SPARSE
from meshlora.plan.families.family import COLUMN, ROW, FamilyPlan, fused, fused_mlp, gated_mlp, separate

_GPT_MLP = {"mlp.c_fc": COLUMN, "mlp.c_proj": ROW}
_CODEGEN_MLP = {"mlp.fc_in": COLUMN, "mlp.fc_out": ROW}
_DENSE_MLP = {"mlp.dense_h_to_4h": COLUMN, "mlp.dense_4h_to_h": ROW}
_LAYER_MLP = {"fc1": COLUMN, "fc2": ROW}  # in the decoder layer itself
_PER_HEAD = fused("q k v", groups="heads")

_LLAMA = FamilyPlan({**separate("self_attn"), **gated_mlp()})
_GLM = FamilyPlan({**separate("self_attn"), **fused_mlp("mlp", "gate_up_proj", "down_proj")})
_GPT2 = FamilyPlan(
    {"attn.c_attn": fused("q k v"), "attn.c_proj": ROW, **_GPT_MLP},
    local={"attn": ("split_size",)},
)
_OLMO2 = FamilyPlan(_LLAMA.leaves, wide_norms=("self_attn.q_norm", "self_attn.k_norm"))
_OPT = FamilyPlan({**separate("self_attn", out="out_proj"), **_LAYER_MLP}, after=("final_layer_norm", "project_out"))
_HYBRID = FamilyPlan({**separate("self_attn"), **gated_mlp("feed_forward")})  # state-space mixers stay whole
_WHOLE = FamilyPlan({})  # nothing of a layer can be split exactly: only the vocabulary is
_LFM2 = FamilyPlan({**separate("self_attn", out="out_proj"), **gated_mlp("feed_forward", names="w1 w3 w2")})


def _gpt_bigcode(config: Any) -> FamilyPlan:
    leaf = fused("q k v") if config.multi_query else _PER_HEAD
    local = ("embed_dim",) if config.multi_query else ()
    return FamilyPlan({"attn.c_attn": leaf, "attn.c_proj": ROW, **_GPT_MLP}, local={"attn": local})


def _falcon(config: Any) -> FamilyPlan:
    groups = "kv_heads" if config.new_decoder_architecture else 1 if config.multi_query else "heads"
    return FamilyPlan(
        {
            "self_attention.query_key_value": fused("q k v", groups=groups),
            "self_attention.dense": ROW,
            **_DENSE_MLP,
        },
        # With alibi the mask has a dim of heads too.
        sliced={"self_attention": {"alibi": 1, "attention_mask": 1}},
    )


_EXPLICIT: dict[str, FamilyPlan | Callable[[Any], FamilyPlan]] = {
    "bamba": _HYBRID,
    "biogpt": FamilyPlan({**separate("self_attn", out="out_proj"), **_LAYER_MLP}),
    "bitnet": FamilyPlan(_LLAMA.leaves, wide_norms=("self_attn.attn_sub_norm", "mlp.ffn_sub_norm")),
    "bloom": FamilyPlan(
        {"self_attention.query_key_value": _PER_HEAD, "self_attention.dense": ROW, **_DENSE_MLP},
        sliced={"self_attention": {"alibi": "batch*heads"}},
        passes={"self_attention": ("residual",), "mlp": ("residual",)},
    ),
    "codegen": FamilyPlan(
        # Its code reads q, v and k of four groups of heads, on any width.
        {"attn.qkv_proj": fused("q v k", groups=4, local_groups=4), "attn.out_proj": ROW, **_CODEGEN_MLP}
    ),
    "cohere": FamilyPlan(_LLAMA.leaves, parameters={"self_attn.q_norm.weight": 0, "self_attn.k_norm.weight": 0}),
    "ctrl": FamilyPlan(
        {
            **separate("multi_head_attention", names="Wq Wk Wv", out="dense"),
            "ffn.0": COLUMN,
            "ffn.2": ROW,
        }
    ),
    "diffllama": FamilyPlan(
        # Head i goes with head i + heads/2, so each half is shared out by itself.
        {
            "self_attn.q_proj": fused("q1 q2"),
            "self_attn.k_proj": fused("k1 k2"),
            "self_attn.v_proj": fused("v1 v2"),
            "self_attn.o_proj": ROW,
            **gated_mlp(),
        },
        whole=tuple(f"self_attn.lambda_{name}" for name in ("q1", "k1", "q2", "k2")),
    ),
    "doge": FamilyPlan(gated_mlp()),
    "emu3_text_model": _LLAMA,
    "falcon": _falcon,
    "falcon_h1": _HYBRID,
    "falcon_mamba": _WHOLE,
    "glm": _GLM,
    "glm4": _GLM,
    "gpt2": _GPT2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": FamilyPlan({**separate("attn.attention", out="out_proj"), **_GPT_MLP}),
    "gpt_neox": FamilyPlan({"attention.query_key_value": _PER_HEAD, "attention.dense": ROW, **_DENSE_MLP}),
    "gpt_neox_japanese": FamilyPlan(
        {"attention.query_key_value": _PER_HEAD, "attention.dense": ROW, **_DENSE_MLP},
        whole=("attention.dense_bias",),  # the layer adds it
    ),
    "gptj": FamilyPlan({**separate("attn", out="out_proj"), **_CODEGEN_MLP}),
    "granite_swa": FamilyPlan(_LLAMA.leaves, parameters={"self_attn.sinks": 0}),
    "hunyuan_v1_dense": _LLAMA,
    "lfm2": _LFM2,
    "lfm3": FamilyPlan({**_LFM2.leaves, "self_attn.g_proj": COLUMN}),
    "mamba": _WHOLE,
    "mamba2": _WHOLE,
    "minicpm3": FamilyPlan({**separate("self_attn", names="q_b_proj q_proj kv_b_proj"), **gated_mlp()}),
    "modernbert-decoder": FamilyPlan({**separate("attn", out="Wo"), **fused_mlp("mlp", "Wi", "Wo")}),
    "moshi": FamilyPlan(
        {
            **separate("self_attn", names="q_proj.linear k_proj.linear v_proj.linear", out="o_proj.linear"),
            **fused_mlp("mlp", "fc1", "fc2"),
        }
    ),
    "mpt": FamilyPlan(
        {"attn.Wqkv": fused("q k v"), "attn.out_proj": ROW, "ffn.up_proj": COLUMN, "ffn.down_proj": ROW},
        sliced={"attn": {"position_bias": 0}},
        passes={"ffn": ("residual",)},
    ),
    "nemotron": FamilyPlan({**separate("self_attn"), "mlp.up_proj": COLUMN, "mlp.down_proj": ROW}),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmo_hybrid": _OLMO2,
    "openai-gpt": _GPT2,
    "opt": _OPT,
    "persimmon": FamilyPlan({"self_attn.query_key_value": _PER_HEAD, "self_attn.dense": ROW, **_DENSE_MLP}),
    "phi3": FamilyPlan(
        {
            "self_attn.qkv_proj": fused("q k v"),
            "self_attn.o_proj": ROW,
            **fused_mlp("mlp", "gate_up_proj", "down_proj"),
        },
        local={"self_attn": ("config.num_attention_heads",)},
    ),
    "recurrent_gemma": FamilyPlan(gated_mlp("mlp_block")),
    "rwkv": _WHOLE,
    "stablelm": _LLAMA,
    "xlstm": _WHOLE,
}


def explicit_plan(config: Any) -> FamilyPlan | None:
    """Our plan of a model's family, None where there is none."""
    plan = _EXPLICIT.get(config.model_type) or SPARSE.get(config.model_type)
    return plan(config) if callable(plan) else plan
