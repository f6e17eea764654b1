"""The features that faults (`verify.faults`) need to show: of a topology, a model with its adapter, a run."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any, Self, TypeVar

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from transformers import PretrainedConfig

from meshlora.adapter.targets.options import is_open
from meshlora.model.padding import leaves_mask
from meshlora.plan.layout import Layout, Split
from meshlora.plan.rules import ModelPlan
from meshlora.plan.token_order import FEWEST
from meshlora.wings.context.borders import is_balanced
from meshlora.wings.context.mixing import CACHE, OFFSET, PAST, WHOLE
from meshlora.wings.quantized.kinds import BITS, KEEP, WITH_ZEROS
from meshlora.wings.stages.cut import featured_layers
from meshlora_ground.objective import Sft
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.objectives.policies import Grpo, Policy
from meshlora_ground.objectives.preferences import Dpo
from meshlora_ground.tasks import CAUSAL
from meshlora_ground.topology import DATA, EXPERT_AXES, Topology
from meshlora_judge.batches import micro_batches_of
from meshlora_judge.case import Case


class _Adapted:
    """A model with an adapter, as predicates see it.

    Attributes:
        text, rope: configuration of the text part, and of its positions. targets: names of linears with LoRA.
        biased, adapted: how those with a bias and the targets are split. shared: names of linears of which several
            ranks hold the same rows. fused: names of the pieces of each fused matrix. blocks: names of those whose
            rows on a rank are not contiguous.
    """

    def __init__(self, plan: ModelPlan, lora: LoraConfig, config: PretrainedConfig, *, has_pieces: bool) -> None:
        self.plan, self.lora, self.config, self.has_pieces = plan, lora, config, has_pieces
        self.text = config.get_text_config()
        self.rope = getattr(self.text, "rope_parameters", None) or {}
        self.targets, self.shared, self.blocks = set[str](), set[str](), set[str]()
        self.biased, self.adapted = set[Split](), set[Split]()
        self.fused: list[set[str]] = []
        self.is_padded = False
        for name, rule in plan.linears.items():
            if rule.has_bias:
                self.biased.add(rule.split)
            if name != plan.head and is_open(plan, lora, name) and _is_target(lora, name):
                self.targets.add(name)
                self.adapted.add(rule.split)
            if rule.layout is not None:
                self._see(name, rule.layout)

    def _see(self, name: str, layout: Layout) -> None:
        """Note what is special about the layout of a linear."""
        tp = self.plan.topology.tp
        if max(layout.copies(tp)) > 1:
            self.shared.add(name)
        if layout.is_padded and layout.size % tp:
            self.is_padded = True
        if len(layout.pieces) > 1:
            self.fused.append({piece.name for piece in layout.pieces})
            runs = layout.runs(rank=0, size=tp)
            if runs[-1].stop - runs[0].start != sum(run.size for run in runs):
                self.blocks.add(name)

    @property
    def has_uneven_heads(self) -> bool:
        """Whether the number of heads is no power of two."""
        heads = getattr(self.text, "num_attention_heads", None)
        return isinstance(heads, int) and heads & (heads - 1) != 0

    @property
    def has_several_targets(self) -> bool:
        """Whether the configuration names several targets, or all."""
        given = self.lora.target_modules
        if isinstance(given, str):
            return given == "all-linear"
        return len(given or ()) > 1

    @property
    def scale(self) -> float:
        """That of LoRA, for targets without a pattern."""
        rank: int = self.lora.r
        return self.lora.lora_alpha / (rank**0.5 if self.lora.use_rslora else rank)

    @property
    def is_on_embedding(self) -> bool:
        """Whether the embedding has LoRA."""
        return _is_target(self.lora, self.plan.embedding, is_linear=False)

    @property
    def has_tied_rows(self) -> bool:
        """Whether the adapter has rows of an embedding that is tied, and says nothing of the head."""
        if not getattr(self.config, "tie_word_embeddings", False):
            return False
        given = self.lora.trainable_token_indices
        return isinstance(given, list) or list(given or ()) in ([self.plan.embedding], ["embed_tokens"])

    @property
    def has_tied_copy(self) -> bool:
        """Whether the embedding is trained in full, and the head with it."""
        if not self.lora.ensure_weight_tying or not getattr(self.config, "tie_word_embeddings", False):
            return False
        return any(name.endswith(("embed_tokens", "lm_head")) for name in self.lora.modules_to_save or ())

    @cached_property
    def riders(self) -> list[int]:
        """For each region, the number of targets whose low-rank activations are gathered with its input."""
        plan, prefix = self.plan, f"{self.plan.layers}."

        def layer(name: str) -> int:
            return int(name.removeprefix(prefix).partition(".")[0])

        of_width = {name for name in self.targets if plan.linears[name].in_features == self.text.hidden_size}
        first = min((layer(name) for name in self.targets if name.startswith(prefix)), default=0)
        # Below the first target, and in its layer, no gradient flows back.
        above = (r for r in plan.regions if r.name.startswith(prefix) and layer(r.name) > first)
        return [len(of_width.intersection(plan.riders(region))) for region in above]


class _Run:
    """A run of a case, as predicates see it. adapters: how many are trained at once. computed: by kernels."""

    def __init__(
        self, case: Case, plan: ModelPlan, config: PretrainedConfig, *, adapters: int, computed: Collection[str]
    ) -> None:
        self.case, self.plan, self.config, self.adapters, self.computed = case, plan, config, adapters, computed
        self.topology, self.objective = plan.topology, case.objective
        self.lora = LoraConfig(**case.lora)
        self.micro_batches = -(-case.batch_size // (case.micro_batch_size * plan.topology.dp))
        # Names of what the model takes beside tokens, if that is of images.
        self.images = set[str]()
        if case.further is not None and case.further.has_images:
            self.images.update(*case.further.each)

    @property
    def has_loss_chunks(self) -> bool:
        """Whether kernels compute the loss of each chunk from the logits of the head."""
        changed = "final_logit_softcapping logits_scaling logit_scale unpadded_vocab_size lm_head_multiplier "
        changed += "output_logit_soft_cap logits_soft_cap"
        text = self.config.get_text_config()
        if self.case.kernels != "fused" or any(getattr(text, name, None) for name in changed.split()):
            return False
        return isinstance(self.objective, Sft) and self.objective.is_summed and not self.objective.label_smoothing

    @property
    def packed_kinds(self) -> set[str]:
        """The kinds in which matrices of the base are held in few bits."""
        return {packing.kind for packing in self.plan.quantized.values()}

    @property
    def packs_in_order(self) -> bool:
        """Whether inputs of integers that stay packed have the groups that a tensor says."""
        stored = getattr(self.config, "quantization_config", None) or {}
        return not self.packed_kinds.isdisjoint(WITH_ZEROS) and bool(stored.get("desc_act"))

    @property
    def trains_first_tokens(self) -> bool:
        """Whether rows hold one sequence each, whole, and the first token of some is trained."""
        is_whole = self.topology.cp == 1 and not self.case.packing
        return is_whole and any(self.case.is_trained[start] for start in self.case.offsets[:-1])

    @property
    def is_invoked_twice(self) -> bool:
        """Whether a sequence has what invokes the adapter more than once."""
        words = self.lora.alora_invocation_tokens or []
        for sequence in self.case.data:
            ids = sequence.input_ids.tolist()
            if words and sum(ids[at : at + len(words)] == words for at in range(len(ids))) > 1:
                return True
        return False

    @property
    def has_few_tokens(self) -> bool:
        """Whether a cp rank has as many tokens of a packed row as the row has documents, its padding counted as one."""
        case, cp = self.case, self.topology.cp
        if cp != self.topology.world or cp == 1 or case.packing != "auto":
            return False
        for step in range(case.steps):
            for rows in micro_batches_of(case.data, case, step, pad_token_id=case.pad_token_id):
                num_tokens = int(rows.attention_mask.sum())
                on_each = max(FEWEST, -(-num_tokens // cp))
                if on_each == len(rows.attention_mask) + (on_each * cp > num_tokens):
                    return True
        return False


Subject = TypeVar("Subject")
# What a predicate asks, and the predicate: anything that is true or false.
_Test = tuple[type, Callable[[Any], object]]


def _of_a(subject: type[Subject]) -> Callable[[Callable[[Subject], object]], _Test]:
    return lambda has: (subject, has)


_mesh, _model, _run = _of_a(Topology), _of_a(_Adapted), _of_a(_Run)


def _kind(kind: str) -> _Test:
    return _run(lambda r: r.objective.kind == kind)


def _optimizer(name: str) -> _Test:
    return _run(lambda r: r.case.optimizer == name)


def _pairs(has: Callable[[Dpo], object]) -> _Test:
    return _run(lambda r: isinstance(r.objective, Dpo) and has(r.objective))


def _policy(has: Callable[[Policy | Grpo], object]) -> _Test:
    return _run(lambda r: isinstance(r.objective, Policy | Grpo) and has(r.objective))


def _distill(has: Callable[[Distill], object]) -> _Test:
    return _run(lambda r: isinstance(r.objective, Distill) and has(r.objective))


class Feature(enum.StrEnum):
    """A feature: its name, as reports and messages have it, and what has it."""

    asks: type
    test: Callable[[Any], object]

    def __new__(cls, word: str, test: _Test) -> Self:
        self = str.__new__(cls, word)
        self._value_ = word  # enum's own: without it the value is the pair
        self.asks, self.test = test
        return self

    # --- the mesh: axes of more than one rank, flags

    PP = "pp", _mesh(lambda t: t.pp > 1)
    DP = "dp", _mesh(lambda t: t.dp > 1)
    CP = "cp", _mesh(lambda t: t.cp > 1)
    TP = "tp", _mesh(lambda t: t.tp > 1)
    EDP = "edp", _mesh(lambda t: t.edp > 1)
    EP = "ep", _mesh(lambda t: t.ep > 1)
    ETP = "etp", _mesh(lambda t: t.etp > 1)
    SP = "sp", _mesh(lambda t: t.sp)
    DP_SHARD = "dp_shard", _mesh(lambda t: t.dp_shard)
    RING = "ring", _mesh(lambda t: t.ring)  # of keys and values over cp
    TWO_STAGE = "two_stage", _mesh(lambda t: t.two_stage)
    INTERLEAVE = "interleave", _mesh(lambda t: t.interleave > 1)
    RANKS = "ranks", _mesh(lambda t: t.world > 1)
    EXPERT_AXES = "expert_axes", _mesh(lambda t: t.ep * t.etp > 1)
    DATA = "data", _mesh(lambda t: t.size_over(DATA) > 1)  # ranks with different sequences or tokens
    # Ranks route different tokens.
    OTHER_TOKENS = "other_tokens", _mesh(lambda t: t.size_over(DATA | t.token_cut) > 1)
    DENSE_DP_IS_NOT_EDP = (
        "dense_dp_is_not_edp",
        _mesh(lambda t: t.groups_over(DATA) != t.groups_over(frozenset(EXPERT_AXES[:1]))),
    )

    # --- the model: its linears, regions and norms

    ROW_BIAS = "row_bias", _model(lambda m: Split.ROW in m.biased)
    COLUMN_BIAS = "column_bias", _model(lambda m: Split.COLUMN in m.biased)
    # A mixer of tokens is not split.
    WHOLE_MIXER = (
        "whole_mixer",
        _model(lambda m: any(not r.is_split and not r.name.endswith(("mlp", "feed_forward")) for r in m.plan.regions)),
    )
    KV_REPLICAS = "kv_replicas", _model(lambda m: m.shared)  # heads that several ranks hold
    UNEVEN_HEADS = "uneven_heads", _model(lambda m: m.has_uneven_heads)  # their number is no power of two
    FUSED_QKV = "fused_qkv", _model(lambda m: {"q", "k", "v"} in m.fused)  # split piece by piece, and the next one
    FUSED_GATE_UP = "fused_gate_up", _model(lambda m: {"gate", "up"} in m.fused)
    FUSED_BLOCKS = "fused_blocks", _model(lambda m: m.blocks)  # rows on a rank are not contiguous
    # Regions take arguments with a dim of heads, other than a bias of positions that is not there.
    SLICED = "sliced", _model(lambda m: any(r.sliced for r in m.plan.regions) and getattr(m.config, "alibi", True))
    WIDE_NORM = "wide_norm", _model(lambda m: m.plan.wide_norms)  # over a width that is split
    MIXER = "mixer", _model(lambda m: any(name.endswith(".A_log") for name in m.plan.parameters))  # has heads
    STREAMS = "streams", _model(lambda m: (getattr(m.text, "hc_mult", 1) or 1) > 1)  # several residual ones
    HASH_ROUTER = "hash_router", _model(lambda m: "hash_moe" in (getattr(m.text, "mlp_layer_types", None) or ()))
    GROUPED_OUTPUT = "grouped_output", _model(lambda m: any(n.endswith(".o_a_proj.weight") for n in m.plan.parameters))
    SINKS = "sinks", _model(lambda m: any(name.endswith(".sinks") for name in m.plan.parameters))  # of heads
    # After a gate.
    GATED_NORM = "gated_norm", _model(lambda m: any(n.pieces[0].name == "x" for n in m.plan.wide_norms.values()))
    BLOCK_STATES = "block_states", _model(lambda m: hasattr(m.text, "n_layers_per_attn_res_block"))  # earlier streams
    SECOND_INPUTS = "second_inputs", _model(lambda m: m.plan.per_layer[0])  # of layers, beside the stream
    SHARED_KEYS = "shared_keys", _model(lambda m: "reuse" in getattr(m.text, "kv_sharing_modes", ()))  # between layers
    UNPADDED = "unpadded", _model(lambda m: getattr(m.text, "unpadded_vocab_size", None))  # a head with unused rows
    PADDED_VOCABULARY = "padded_vocabulary", _model(lambda m: m.is_padded)
    GATHERED_KEYS = "gathered_keys", _model(lambda m: m.plan.attentions and not m.plan.topology.ring)
    RECURRENT = "recurrent", _model(lambda m: m.plan.recurrent)  # mixers over cp
    PASSED_STATES = "passed_states", _model(lambda m: any(m.plan.recurrent.values()))
    # Keys, or whole rows, of what sees other tokens by no function of a registry.
    GATHERED_BESIDE = "gathered_beside", _model(lambda m: {CACHE, PAST, WHOLE} & {*m.plan.mixing.values()})
    CACHED_KEYS = "cached_keys", _model(lambda m: {CACHE, PAST} & {*m.plan.mixing.values()})
    PAST_KEYS = "past_keys", _model(lambda m: PAST in m.plan.mixing.values())  # of an attention with a mask of its own
    OFFSET = "offset", _model(lambda m: OFFSET in m.plan.mixing.values())  # attentions that number tokens
    QUERY_OFFSET = "query_offset", _model(lambda m: CACHE in m.plan.mixing.values() and hasattr(m.text, "rel_extent"))
    INDEXER = "indexer", _model(lambda m: m.plan.mixing and getattr(m.text, "index_topk", None))  # chooses keys
    # Cp ranks have heads and tails of sequences.
    BALANCED = "balanced", _model(lambda m: m.plan.attentions and is_balanced(m.config, m.plan))
    SOFT_CAPS = "soft_caps", _model(lambda m: getattr(m.text, "attn_logit_softcapping", None))  # of scores
    ROPE = "rope", _model(lambda m: m.plan.attentions and m.rope)
    M_ROPE = "m_rope", _model(lambda m: "mrope_section" in m.rope)  # positions of time, height and width
    ENCODER = "encoder", _model(lambda m: m.plan.encoder)  # whose states the decoder attends to
    # Of heads, split with them.
    RELATIVE_BIAS = "relative_bias", _model(lambda m: any("relative_attention_bias" in n for n in m.plan.parameters))
    EXPERTS = "experts", _model(lambda m: m.plan.experts)
    # Beside a layer's MLP, not in it.
    EXPERTS_BESIDE = (
        "experts_beside",
        _model(lambda m: m.plan.layers in {rule.block.rpartition(".")[0] for rule in m.plan.experts.values()}),
    )
    # Routing weights scale what experts give, not what they take.
    ROUTING_LAST = "routing_last", _model(lambda m: any(not rule.weights_first for rule in m.plan.experts.values()))
    ZERO_EXPERTS = "zero_experts", _model(lambda m: any(e.first.num_zero for e in m.plan.experts.values()))
    GATED_EXPERTS = "gated_experts", _model(lambda m: any(e.first.fused is not None for e in m.plan.experts.values()))
    # On what each gives, before its routing weight.
    EXPERT_NORM = "expert_norm", _model(lambda m: m.plan.experts and hasattr(m.text, "post_norm_eps"))
    EXPERT_BIAS = "expert_bias", _model(lambda m: any(rule.has_bias for rule in m.plan.projections.values()))

    # --- the adapter

    ROW_TARGET = "row_target", _model(lambda m: Split.ROW in m.adapted)
    COLUMN_TARGET = "column_target", _model(lambda m: Split.COLUMN in m.adapted)
    WHOLE_TARGET = "whole_target", _model(lambda m: Split.WHOLE in m.adapted)
    TARGETS = "targets", _model(lambda m: m.has_several_targets)  # by name, or all
    SCALE = "scale", _model(lambda m: m.scale != 1)
    KV_TARGET = "kv_target", _model(lambda m: m.targets & m.shared)  # an adapter on such heads
    FUSED_TARGET = "fused_target", _model(lambda m: m.targets & m.blocks and not m.has_pieces)
    RIDING = "riding", _model(lambda m: any(m.riders))  # under sp, activations are gathered with a region's input
    RIDING_TOGETHER = "riding_together", _model(lambda m: max(m.riders, default=0) > 1)  # several with one input
    PIECES = "pieces", _model(lambda m: m.has_pieces)  # targets are parts of fused matrices
    # PEFT would load factors under the names of these families' modules as those of others.
    OTHER_NAMES = (
        "other_names",
        _model(lambda m: m.plan.model_type in ("laguna", "mistral_large4", "deepseek_ocr2", "unlimited_ocr")),
    )
    EXPERT_TARGET = "expert_target", _model(lambda m: m.lora.target_parameters)
    EMBEDDING_TARGET = "embedding_target", _model(lambda m: m.is_on_embedding)
    EMBEDDING_PADDING = (  # its gradient is zero for that token
        "embedding_padding",
        _model(lambda m: m.is_on_embedding and getattr(m.text, "pad_token_id", None) is not None),
    )
    TRAINED = "trained", _model(lambda m: m.lora.modules_to_save)  # in full
    TOKEN_ROWS = "token_rows", _model(lambda m: m.lora.trainable_token_indices)  # in place of the base's
    TIED_ROWS = "tied_rows", _model(lambda m: m.has_tied_rows)  # which a tied head has too
    TIED_COPY = "tied_copy", _model(lambda m: m.has_tied_copy)  # of the embedding in full, which a tied head has too
    RANKS_BY_PATTERN = "ranks_by_pattern", _model(lambda m: m.lora.rank_pattern and not m.has_pieces)
    SCALES_BY_PATTERN = "scales_by_pattern", _model(lambda m: m.lora.alpha_pattern and not m.has_pieces)
    INVOKED = "invoked", _model(lambda m: m.lora.alora_invocation_tokens)  # acts from these tokens on
    INVOKED_TWICE = "invoked_twice", _run(lambda r: r.is_invoked_twice)
    DORA = "dora", _model(lambda m: m.lora.use_dora)  # magnitudes of rows
    LORA_BIAS = "lora_bias", _model(lambda m: m.lora.lora_bias)  # of B
    EVA = "eva", _run(lambda r: r.case.eva is not None)  # a start that looks at data
    LORA_DROPOUT = "lora_dropout", _run(lambda r: r.lora.lora_dropout > 0)
    MODEL_DROPOUT = "model_dropout", _run(lambda r: r.case.dropout)
    DROPOUT = "dropout", _run(lambda r: r.case.dropout or r.lora.lora_dropout > 0)
    # No multiple of 0.1: a rate rounded to one shows.
    ODD_DROPOUT = "odd_dropout", _run(lambda r: round(r.lora.lora_dropout, 1) != r.lora.lora_dropout)
    ADAPTERS = "adapters", _run(lambda r: r.adapters > 1)  # several, trained at once
    SHARED_EXPERTS_ADAPTER = "shared_experts_adapter", _run(lambda r: r.case.share_experts)

    # --- the frozen base

    QUANTIZED = "quantized", _run(lambda r: r.case.quantization is not None)
    # Some faults are of weights as they are stored.
    PLAIN_BASE = "plain_base", _run(lambda r: r.case.quantization is None)
    QUANTIZES = "quantizes", _run(lambda r: r.case.quantization not in (None, KEEP))  # on load
    FLOAT8 = "float8", _run(lambda r: r.case.compute is not None)  # products of its linears, in one direction or both
    FLOAT8_FORWARD = "float8_forward", _run(lambda r: r.case.compute == "fp8")
    FLOAT8_BACKWARD = "float8_backward", _run(lambda r: r.case.compute == "fp8_backward")
    STORED_FLOAT8 = "stored_float8", _run(lambda r: r.case.compute is not None and r.case.quantization is not None)
    FOUR_BITS = "four_bits", _run(lambda r: any(BITS.get(kind) == 4 for kind in r.packed_kinds))
    INTS = "ints", _run(lambda r: not r.packed_kinds.isdisjoint(WITH_ZEROS))  # GPTQ's, AWQ's
    INTS_IN_ORDER = "ints_in_order", _run(lambda r: r.packs_in_order)  # of activations: groups are no ranges
    NVFP4 = "nvfp4", _run(lambda r: r.case.quantization == "nvfp4")  # scales of blocks, and one of the matrix
    # What kernels compute, as the code of the model is known to them.
    KERNEL_NORMS = "kernel_norms", _run(lambda r: "norms" in r.computed)
    KERNEL_ROTATIONS = "kernel_rotations", _run(lambda r: "rotations" in r.computed)
    KERNEL_GATES = "kernel_gates", _run(lambda r: "gated MLPs" in r.computed)  # some without low-rank terms
    TAILS = "tails", _run(lambda r: "tails" in r.computed)  # gates with these
    STREAM_SUMS = "stream_sums", _run(lambda r: "sums" in r.computed)  # of the residual stream, with these
    LOSS_CHUNKS = "loss_chunks", _run(lambda r: r.has_loss_chunks)  # two passes over logits as the head gives them

    # --- batches

    STEPS = "steps", _run(lambda r: r.case.steps > 1)
    SEED = "seed", _run(lambda r: r.case.seed != 0)  # 0 is the default
    DIGITS = "digits", _run(lambda r: r.case.dtype != "bfloat16")  # enough of them for a small fault
    # The last of an epoch.
    SHORT_BATCH = "short_batch", _run(lambda r: r.case.steps > 1 and r.case.data.num_examples % r.case.batch_size)
    PACKING = "packing", _run(lambda r: r.case.packing)
    WHOLE_ROWS = "whole_rows", _run(lambda r: r.topology.cp == 1)  # on each rank
    FIRST_TOKENS = "first_tokens", _run(lambda r: r.trains_first_tokens)
    FEW_TOKENS = "few_tokens", _run(lambda r: r.has_few_tokens)
    # Padding at the end of rows has no mask.
    UNMASKED = "unmasked", _run(lambda r: not r.case.packing and not r.images and leaves_mask(r.plan))
    SEVERAL_ROWS = "several_rows", _run(lambda r: not r.case.packing and r.case.micro_batch_size > 1)
    ONE_MICRO_BATCH = "one_micro_batch", _run(lambda r: r.micro_batches == 1)  # in a step
    # Short sequences of a packed step may all share one row.
    SEVERAL_MICRO_BATCHES = "several_micro_batches", _run(lambda r: r.micro_batches > 1 and not r.case.packing)
    FOUR_MICRO_BATCHES = "four_micro_batches", _run(lambda r: r.micro_batches > 3)
    KEPT_ATTENTION = "kept_attention", _run(lambda r: r.case.recompute == "keep_attention")
    # Of a stage of one layer no other is fetched.
    OFFLOADED = (
        "offloaded",
        _run(lambda r: r.case.recompute == "offload" and r.plan.num_layers > r.plan.topology.num_stages),
    )
    IMAGES = "images", _run(lambda r: r.images)  # of some sequences
    IMAGE_GRID = "image_grid", _run(lambda r: "image_grid_thw" in r.images)  # positions by grids
    IMAGE_BLOCKS = "image_blocks", _run(lambda r: "token_type_ids" in r.images)  # their tokens see each other
    FEATURES = "features", _run(lambda r: r.images and featured_layers(r.config))  # of a tower, for the first layers
    # The adapter is on the tower of images.
    VISION = "vision", _run(lambda r: r.images and not all(map(r.plan.is_text, r.lora.target_modules or ())))

    # --- the objective: its kind, what it needs and what it is a mean over

    SFT = "sft", _kind("sft")
    POLICY = "policy", _kind("policy")
    GRPO = "grpo", _kind("grpo")
    DPO = "dpo", _kind("dpo")
    OF_SIGMOID = "of_sigmoid", _pairs(lambda o: o.loss == "sigmoid")  # alone, the default
    OTHER_PAIR_LOSS = "other_pair_loss", _pairs(lambda o: o.loss != "sigmoid")
    LOSS_WEIGHTS = "loss_weights", _pairs(lambda o: o.loss_weights)
    BY_LENGTH = "by_length", _pairs(lambda o: {"ipo", "sigmoid_norm"} & o.losses.keys())  # scores of answers
    LENGTH_WEIGHT = "length_weight", _pairs(lambda o: o.length_weight != 1)  # of the longer answer's end
    F_DIVERGENCE = "f_divergence", _pairs(lambda o: o.f_divergence != "reverse_kl")  # not the default, and the next one
    ALPHA = "alpha", _pairs(lambda o: o.f_alpha != Dpo.f_alpha)
    WEIGHTED_PAIRS = "weighted_pairs", _pairs(lambda o: o.weighted)
    ORDERED_PAIRS = "ordered_pairs", _pairs(lambda o: o.is_of_step)
    ORPO = "orpo", _kind("orpo")
    SIMPO = "simpo", _kind("simpo")
    DFT = "dft", _run(lambda r: isinstance(r.objective, Sft) and r.objective.loss == "dft")
    KTO = "kto", _kind("kto")
    KTO_POINT = "kto_point", _run(lambda r: r.objective.trained_row is not None and r.objective.has_first_pass)
    CLASSIFY = "classify", _kind("classify")
    CLASSIFY_TOKENS = "classify_tokens", _kind("classify_tokens")
    EMBED = "embed", _kind("embed")
    REWARD = "reward", _kind("reward")
    # A teacher alone looks at no label.
    LABELS = "labels", _run(lambda r: not isinstance(r.objective, Distill) or r.objective.cross_entropy > 0)
    DISTILLED = "distilled", _distill(lambda o: True)
    RUNNING_TEACHER = "running_teacher", _distill(lambda o: not o.is_recorded)
    RECORDED_TEACHER = "recorded_teacher", _distill(lambda o: o.is_recorded)
    TEACHES_ITSELF = "teaches_itself", _distill(lambda o: o.needs_base)
    SECOND_MODEL = "second_model", _distill(lambda o: o.folder is not None)
    IN_CONTEXT = "in_context", _distill(lambda o: o.context is not None)
    MIXED = "mixed", _distill(lambda o: o.divergence == "jsd")
    TEMPERED = "tempered", _distill(lambda o: o.temperature != 1)
    LIKELIEST = "likeliest", _distill(lambda o: o.top_k is not None and not o.is_recorded)  # are looked for
    TOLD = "told", _distill(lambda o: o.cross_entropy > 0)  # the tokens of the data, too
    SMOOTHING = "smoothing", _run(lambda r: getattr(r.objective, "label_smoothing", 0) > 0)
    BASE = "base", _run(lambda r: r.objective.needs_base)
    REFERENCE = "reference", _run(lambda r: r.case.reference is not None)  # a frozen adapter
    # Whose losses are of whole rows; and of these what a language model says of them.
    OF_ROWS = "of_rows", _run(lambda r: not r.objective.is_summed)
    LOG_PROBABILITIES = "log_probabilities", _run(lambda r: not r.objective.is_summed and r.objective.task == CAUSAL)
    MEAN_OVER_TOKENS = "mean_over_tokens", _run(lambda r: r.objective.per == "token")
    EXAMPLES = "examples", _run(lambda r: r.objective.per != "token")  # a mean over pairs or records
    # Embeddings are of all tokens, or of the last.
    POOLS_TO_THE_END = "pools_to_the_end", _run(lambda r: getattr(r.objective, "pooling", "cls") != "cls")
    ENTROPY = "entropy", _run(lambda r: r.objective.token_score == "entropy")  # a bonus
    ROUTED = "routed", _run(lambda r: r.case.routed)  # rollouts say the experts of tokens
    AUX_LOSS = "aux_loss", _run(lambda r: r.case.router_aux_loss_coef > 0)
    POLICY_GRADIENT = "policy_gradient", _policy(lambda o: True)
    IMPORTANCE = "importance", _policy(lambda o: o.importance_cap is not None)  # weights are capped
    # One for all tokens of a sequence (GSPO).
    SEQUENCE_RATIO = "sequence_ratio", _policy(lambda o: o.ratio == "sequence")
    MEANS_OF_SEQUENCES = "means_of_sequences", _policy(lambda o: "sequence" in (o.mean_over, o.ratio))
    CLIPS = "clips", _policy(lambda o: o.loss in ("clipped", "cispo"))
    CISPO = "cispo", _policy(lambda o: o.loss == "cispo")
    SAPO = "sapo", _policy(lambda o: o.loss == "sapo")
    VESPO = "vespo", _policy(lambda o: o.loss == "vespo")
    DELTA = "delta", _policy(lambda o: o.delta is not None)  # ratios are bounded, and the next two
    OFF_POLICY_MASK = "off_policy_mask", _policy(lambda o: o.off_policy_mask is not None)
    MASKS_TRUNCATED = "masks_truncated", _policy(lambda o: o.mask_truncated)
    TOP_ENTROPY = "top_entropy", _policy(lambda o: o.top_entropy < 1)  # tokens are chosen by it
    KL_CORRECTION = "kl_correction", _policy(lambda o: o.kl_correction)
    # The weight for the engine is of sequences, leaves out, or has a lower bound.
    CORRECTS_SEQUENCES = "corrects_sequences", _policy(lambda o: o.correction.startswith("sequence"))
    MASKS_WEIGHTS = "masks_weights", _policy(lambda o: o.correction.endswith("mask"))
    IMPORTANCE_FLOOR = "importance_floor", _policy(lambda o: o.importance_floor > 0)
    KL_ESTIMATE = "kl_estimate", _policy(lambda o: o.kl != "k3")  # not the default, and the next one
    SCALED_OTHERWISE = "scaled_otherwise", _policy(lambda o: getattr(o, "scale_rewards", "group") != "group")

    # --- the optimizer and its rates

    ADAMW = "adamw", _optimizer("adamw")
    ADAMW_8BIT = "adamw_8bit", _optimizer("adamw_8bit")
    LORA_FA = "lora_fa", _optimizer("lora_fa")  # A stays frozen
    LORA_PLUS = "lora_plus", _run(lambda r: r.case.lora_plus_ratio is not None)
    OTHER_SCHEDULE = "other_schedule", _run(lambda r: r.case.schedule != "linear")
    FINAL_RATE = "final_rate", _run(lambda r: r.case.min_lr > 0)
    NOISE = "noise", _run(lambda r: r.case.neftune_alpha > 0)  # on embedded tokens
    RESUME = "resume", _run(lambda r: r.case.resumes)  # stopped before its last step


def _of(subject: Topology | _Adapted | _Run) -> set[Feature]:
    return {feature for feature in Feature if isinstance(subject, feature.asks) and feature.test(subject)}


def features_of_topology(topology: Topology) -> set[Feature]:
    """The features that depend on neither model nor adapter."""
    return _of(topology)


def features_of_model(
    plan: ModelPlan, config: LoraConfig, model: PretrainedConfig, *, has_pieces: bool = False
) -> set[Feature]:
    """The features of a model on the topology of its plan, with an adapter.

    plan: of the model configured by `model`. config: of the adapter. has_pieces: it targets parts of matrices.
    """
    return _of(plan.topology) | _of(_Adapted(plan, config, model, has_pieces=has_pieces))


def features_of_run(
    case: Case, plan: ModelPlan, config: PretrainedConfig, *, adapters: int, computed: Collection[str]
) -> set[Feature]:
    """The features of the run of `case` on the topology of `plan`. config: of the model. adapters: trained at once.
    computed: by kernels, as `wings.kernels.kernels.computed` says.
    """
    run = _Run(case, plan, config, adapters=adapters, computed=computed)
    return features_of_model(plan, run.lora, config, has_pieces=bool(case.pieces)) | _of(run)


def _is_target(config: LoraConfig, name: str, *, is_linear: bool = True) -> bool:
    """Whether the adapter is on the module `name`, a linear or the embedding."""
    if config.target_modules == "all-linear":
        return is_linear and name.rpartition(".")[2] not in (config.modules_to_save or ())
    return bool(config.target_modules) and bool(check_target_module_exists(config, name))
