"""Explicit plans: families without a plan in transformers, or with one that gathers inside a block.

Owns: the table, including mixtures of experts whose attention or shared experts transformers does not split. Names are
relative to the decoder layer. Sizes come from the model; the table has only what follows from the model's code: which
linears are column- or row-parallel, the pieces of fused ones, the head counts that the code reads, the arguments with a
dim of heads. Does not own: the rules that follow (`plan.rules`).

Routed experts and routers need no entry (`wings.experts.forms`), nor do mixers with heads of their own
(`wings.mixers.mixers`). Other blocks without an entry are kept whole, as recurrent units; so are indexers inside a
split attention, as all heads share their choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packaging.version import Version

from meshlora.plan.families.family import COLUMN, ROW, FamilyPlan, fused, fused_mlp, gated_mlp, separate
from meshlora_ground.versions import version_of

_ATTENTION = separate("self_attn")
_GATED_ATTENTION = {**_ATTENTION, "self_attn.gate_proj": COLUMN}
_LATENT = separate("self_attn", names="q_proj q_b_proj kv_b_proj")  # multi-head latent attention
_DENSE = gated_mlp()
_FUSED = fused_mlp("mlp", "gate_up_proj", "down_proj")
_SHARED = gated_mlp("mlp.shared_experts")
_ONE_SHARED = gated_mlp("mlp.shared_expert")
_GPT_MLP = {"mlp.c_fc": COLUMN, "mlp.c_proj": ROW}
_CODEGEN_MLP = {"mlp.fc_in": COLUMN, "mlp.fc_out": ROW}
_DENSE_MLP = {"mlp.dense_h_to_4h": COLUMN, "mlp.dense_4h_to_h": ROW}
_LAYER_MLP = {"fc1": COLUMN, "fc2": ROW}  # in the decoder layer itself
_PER_HEAD = fused("q k v", groups="heads")
_WIDE = ("self_attn.q_norm", "self_attn.k_norm")
_CONVOLVED_KEYS = {"self_attn.k_sconv.conv1d.weight": 0, "self_attn.v_sconv.conv1d.weight": 0}
_SINKS = {"self_attn.sinks": 0}
_STREAMS = ("attn_hc", "ffn_hc")  # what mixes several residual streams, token by token

_LLAMA = FamilyPlan({**_ATTENTION, **_DENSE})
_LFM2 = FamilyPlan(
    {
        **separate("self_attn", out="out_proj"),
        **gated_mlp("feed_forward", names="w1 w3 w2"),
        "conv.in_proj": fused("B C x"),
        "conv.out_proj": ROW,
    },
    parameters={"conv.conv.weight": 0, "conv.conv.bias": 0},
)
_GRANITE_MOE = FamilyPlan({**_ATTENTION, **fused_mlp("shared_mlp", "input_linear", "output_linear")})
_LATENT_MOE = FamilyPlan({**_LATENT, **_DENSE, **_SHARED})
_OF_LATENTS = ("axk1", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "mistral4")


# Its heads are in groups, each with a projection out of its own, that many heads' outputs to `o_lora_rank`.
_DEEPSEEK_V4 = FamilyPlan(
    {"self_attn.q_b_proj": COLUMN, "self_attn.o_b_proj": ROW, **_SHARED},
    local={"self_attn": ("config.o_groups",), "self_attn.o_a_proj": ("n_groups",)},
    parameters={"self_attn.sinks": 0, "self_attn.o_a_proj.weight": 0},
    whole=("self_attn.compressor.position_bias", "self_attn.compressor.indexer.position_bias"),
    token_wise=_STREAMS,
    after=("hc_head",),
)


def _gpt_bigcode(config: Any) -> FamilyPlan:
    leaf, local = _PER_HEAD, tuple[str, ...]()
    if config.multi_query:  # one key/value head behind all query heads; its code splits by the width
        leaf, local = fused("q k v"), ("embed_dim",)
    return FamilyPlan({"attn.c_attn": leaf, "attn.c_proj": ROW, **_GPT_MLP}, local={"attn": local})


def _falcon(config: Any) -> FamilyPlan:
    groups: int | str = "heads"
    if config.new_decoder_architecture:
        groups = "kv_heads"
    elif config.multi_query:
        groups = 1
    return FamilyPlan(
        {"self_attention.query_key_value": fused("q k v", groups=groups), "self_attention.dense": ROW, **_DENSE_MLP},
        # With alibi the mask has a dim of heads too.
        sliced={"self_attention": {"alibi": 1, "attention_mask": 1}},
    )


def _inkling2(_: Any) -> FamilyPlan:
    # Transformers 5.24 has modules around the linears, convolutions and clips of 5.23.
    out, names = "o_proj", "q_proj k_proj v_proj r_proj gate_proj sink_proj"
    convolutions, clips, bank = ("k_sconv", "v_sconv"), ("q_l2_clip", "rel_l2_clip"), "rel_logits_proj"
    if Version(version_of("transformers")) >= Version("5.24.dev0"):
        out, bank = "o_proj.linear", "relative_position_bias"
        names = f"q_proj.linear k_proj.linear v_proj.linear {bank}.linear o_proj.gate_proj sink_proj"
        convolutions, clips = ("k_proj.sconv", "v_proj.sconv"), ("q_proj.norm", f"{bank}.norm")
    local, parameters = dict[str, tuple[str, ...]](), dict[str, int]()
    for path in convolutions:
        local[f"self_attn.{path}"] = ("num_heads",)
        for name, dim in (("conv1d.weight", 0), ("static_weight", 1), ("weight_proj.weight", 0)):
            parameters[f"self_attn.{path}.{name}"] = dim
    for path in clips:
        parameters[f"self_attn.{path}.scale"] = 0
    return FamilyPlan(
        separate("self_attn", out=out, names=names),
        local=local,
        parameters=parameters,
        whole=(f"self_attn.{bank}.proj",),
        token_wise=("attention_input", "mlp_input"),
        after=("final_input",),
    )


_EXPLICIT: dict[str, FamilyPlan | Callable[[Any], FamilyPlan]] = {
    # Of several families.
    **dict.fromkeys(("emu3_text_model", "hunyuan_v1_dense", "hunyuan_vl_text", "qwen3_vl_text", "stablelm"), _LLAMA),
    **dict.fromkeys(("glm", "glm4", "glm4v_text", "glm_ocr_text"), FamilyPlan({**_ATTENTION, **_FUSED})),
    **dict.fromkeys(
        ("gpt2", "openai-gpt"),
        FamilyPlan({"attn.c_attn": fused("q k v"), "attn.c_proj": ROW, **_GPT_MLP}, local={"attn": ("split_size",)}),
    ),
    **dict.fromkeys(("olmo2", "olmo3", "olmo_hybrid"), FamilyPlan(_LLAMA.leaves, wide_norms=_WIDE)),
    # Beside mixers: those of jamba stay whole.
    **dict.fromkeys(("bamba", "falcon_h1", "jamba"), FamilyPlan({**_ATTENTION, **gated_mlp("feed_forward")})),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    **dict.fromkeys(("granitemoe", "phimoe"), FamilyPlan(_ATTENTION)),
    **dict.fromkeys(("flex_olmo", "minimax_m2", "olmoe"), FamilyPlan(_ATTENTION, wide_norms=_WIDE)),
    **dict.fromkeys(("granitemoehybrid", "granitemoeshared"), _GRANITE_MOE),
    **dict.fromkeys((*_OF_LATENTS, "sarvam_mla"), _LATENT_MOE),
    **dict.fromkeys(("cohere2_moe", "exaone_moe"), FamilyPlan({**_ATTENTION, **_DENSE, **_SHARED})),
    # Their attention is kept whole.
    **dict.fromkeys(("doge",), FamilyPlan(_DENSE)),
    # No part of a layer can be split exactly, only the vocabulary.
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), FamilyPlan({})),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"),
        FamilyPlan(
            _LLAMA.leaves,
            passes={"self_attn": ("shared_kv_states",)},
            token_wise=("per_layer_input_gate", "per_layer_projection"),
            per_layer="embed_tokens_per_layer",
            before=("per_layer_projection_norm",),
        ),
    ),
    # Of one.
    "afmoe": FamilyPlan({**_GATED_ATTENTION, **_DENSE, **_SHARED}),
    "axk2": FamilyPlan({**_LATENT_MOE.leaves, "self_attn.q_gate_proj": COLUMN}),  # both of each head
    "bailing_hybrid": FamilyPlan({**_LATENT_MOE.leaves, "self_attn.g_proj": COLUMN}),
    "beam": FamilyPlan({**_GATED_ATTENTION, **_DENSE}, parameters={"self_attn.gate_bias": 0}),
    "biogpt": FamilyPlan({**separate("self_attn", out="out_proj"), **_LAYER_MLP}),
    "bitnet": FamilyPlan(_LLAMA.leaves, wide_norms=("self_attn.attn_sub_norm", "mlp.ffn_sub_norm")),
    "bloom": FamilyPlan(
        {"self_attention.query_key_value": _PER_HEAD, "self_attention.dense": ROW, **_DENSE_MLP},
        sliced={"self_attention": {"alibi": "batch*heads"}},
        passes={"self_attention": ("residual",), "mlp": ("residual",)},
    ),
    "codegen": FamilyPlan(
        # Its code reads q, v and k in four groups of heads, each as wide as the heads, or `embed_dim`, come to.
        {"attn.qkv_proj": fused("q v k", groups=4, local_groups=4), "attn.out_proj": ROW, **_CODEGEN_MLP},
        local={"attn": ("embed_dim",)},
    ),
    "chameleon": FamilyPlan(
        _LLAMA.leaves,
        parameters={f"self_attn.{norm}.{name}": 0 for norm in ("q_norm", "k_norm") for name in ("weight", "bias")},
    ),
    "cohere": FamilyPlan(_LLAMA.leaves, parameters={"self_attn.q_norm.weight": 0, "self_attn.k_norm.weight": 0}),
    "ctrl": FamilyPlan(
        {**separate("multi_head_attention", names="Wq Wk Wv", out="dense"), "ffn.0": COLUMN, "ffn.2": ROW}
    ),
    "deepseek_v4": _DEEPSEEK_V4,
    "diffllama": FamilyPlan(
        # Head i is paired with head i + heads/2, so each half is split separately.
        {
            "self_attn.q_proj": fused("q1 q2"),
            "self_attn.k_proj": fused("k1 k2"),
            "self_attn.v_proj": fused("v1 v2"),
            "self_attn.o_proj": ROW,
            **_DENSE,
        },
        whole=tuple(f"self_attn.lambda_{name}" for name in ("q1", "k1", "q2", "k2")),
    ),
    "dots3_note_text": FamilyPlan({**_LATENT_MOE.leaves, "self_attn.g_proj": COLUMN}),  # a gate of each head
    "falcon": _falcon,
    "flint": FamilyPlan({**_ATTENTION, **_DENSE, **_ONE_SHARED}, parameters=_SINKS),
    "glm5_next_text": FamilyPlan(
        _LATENT_MOE.leaves,
        whole=("self_attn.indexer.index_kpool_compress_ape", "self_attn.indexer.index_kpool_compress_gate"),
        token_wise=_STREAMS,
        after=("hc_head",),
    ),
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": FamilyPlan({**separate("attn.attention", out="out_proj"), **_GPT_MLP}),
    "gpt_neox": FamilyPlan({"attention.query_key_value": _PER_HEAD, "attention.dense": ROW, **_DENSE_MLP}),
    "gpt_neox_japanese": FamilyPlan(
        {"attention.query_key_value": _PER_HEAD, "attention.dense": ROW, **_DENSE_MLP},
        whole=("attention.dense_bias",),  # the layer adds it
    ),
    "gpt_oss": FamilyPlan(_ATTENTION, parameters=_SINKS),
    "gptj": FamilyPlan({**separate("attn", out="out_proj"), **_CODEGEN_MLP}),
    "granite_swa": FamilyPlan(_LLAMA.leaves, parameters=_SINKS),
    "granitemoe_swa": FamilyPlan(_GRANITE_MOE.leaves, parameters=_SINKS),
    "hunyuan_v1_moe": FamilyPlan({**_ATTENTION, **gated_mlp("mlp.shared_mlp")}),
    "inkling2_text": _inkling2,
    "inkling_text": FamilyPlan(
        {**separate("self_attn", names="q_proj k_proj v_proj r_proj"), **_DENSE},
        parameters=_CONVOLVED_KEYS,
        whole=("self_attn.rel_logits_proj.proj", "mlp.global_scale"),
        token_wise=("mlp.gate", "mlp.shared_experts"),
    ),
    "lfm3": FamilyPlan(
        {**_LFM2.leaves, "self_attn.g_proj": COLUMN, "self_attn.o_proj": ROW}, parameters=_LFM2.parameters
    ),
    "llama4_text": FamilyPlan({**_ATTENTION, **gated_mlp("feed_forward"), **gated_mlp("feed_forward.shared_expert")}),
    "jetmoe": FamilyPlan({}),  # its attention has experts, too
    # Two attentions and two MLPs in a layer, its experts across.
    "longcat_flash": FamilyPlan(
        {
            **separate("self_attn.0", names="q_b_proj kv_b_proj"),
            **separate("self_attn.1", names="q_b_proj kv_b_proj"),
            **gated_mlp("mlps.0"),
            **gated_mlp("mlps.1"),
        },
        opened=("self_attn", "mlps", "input_layernorm", "post_attention_layernorm"),
    ),
    "mimo_v2_flash": FamilyPlan({**_ATTENTION, **_DENSE}, parameters=_SINKS),
    "minicpm3": FamilyPlan({**separate("self_attn", names="q_b_proj q_proj kv_b_proj"), **_DENSE}),
    # Its attention is whole: the indexer's choice has a dim of key/value heads.
    "minimax_m3_vl_text": FamilyPlan({**_FUSED, **fused_mlp("mlp.shared_experts", "gate_up_proj", "down_proj")}),
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
    "muse_spark_text": FamilyPlan(
        {**_GATED_ATTENTION, **_DENSE},
        token_wise=(
            *("post_attention_residual_gate", "post_feedforward_residual_gate"),
            *("mlp.pre_expert_proj", "mlp.post_expert_proj"),
        ),
    ),
    "nemotron": FamilyPlan({**_ATTENTION, "mlp.up_proj": COLUMN, "mlp.down_proj": ROW}),
    "nemotron_h": FamilyPlan(
        {
            **separate("mixer"),
            **gated_mlp("mixer", names="up_proj down_proj"),
            **gated_mlp("mixer.shared_experts", names="up_proj down_proj"),
        }
    ),
    "opt": FamilyPlan(
        {**separate("self_attn", out="out_proj"), **_LAYER_MLP}, after=("final_layer_norm", "project_out")
    ),
    "persimmon": FamilyPlan({"self_attn.query_key_value": _PER_HEAD, "self_attn.dense": ROW, **_DENSE_MLP}),
    "phi3": FamilyPlan(
        {"self_attn.qkv_proj": fused("q k v"), "self_attn.o_proj": ROW, **_FUSED},
        local={"self_attn": ("config.num_attention_heads",)},
    ),
    "qwen2_moe": FamilyPlan({**_ATTENTION, **_DENSE, **_ONE_SHARED}),
    "qwen4_exp_text": FamilyPlan(_ONE_SHARED),
    "recurrent_gemma": FamilyPlan(gated_mlp("mlp_block")),
    # A gate of each head, or of each of its features.
    "step3p5": FamilyPlan({**_ATTENTION, "self_attn.g_proj": COLUMN, **_DENSE, **_SHARED}),
    "solar_open": FamilyPlan({**_ATTENTION, **_SHARED}),
}


def explicit_plan(config: Any) -> FamilyPlan | None:
    """The explicit plan of a model's family, or None."""
    plan = _EXPLICIT.get(config.model_type)
    return plan(config) if callable(plan) else plan
