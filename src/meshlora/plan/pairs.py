"""Which features go together: what is refused, why and what to do instead; and the test that proves the rest.

Owns: the table, and the one check of it, for all that starts a run, a proof, a plan, a loop or a rollout. Does not own:
features (`plan.features`); what one feature by itself cannot be: a value out of range, a model without it.

A pair that stands in no row is refused: nobody has said that the two train what one process does. docs/support.md is
written from this table.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from meshlora.plan.features import Asked, Feature, features_of
from meshlora_ground.errors import UnsupportedError

Side = frozenset[Feature]
F = Feature


@dataclass(frozen=True)
class Refused:
    """because: why any one of each of `sides` is refused together. way_out: what to do instead."""

    sides: tuple[Side, ...]
    because: str
    way_out: str = "leave it out"


@dataclass(frozen=True)
class Proved:
    """by: the test that shows each of `one` beside each of `other`, where no row above refuses the two."""

    one: Side
    other: Side
    by: str


def _refused(*sides: Feature | set[Feature]) -> Callable[..., Refused]:
    """A row, whose message names the sides in this order: `_refused(one, other)(because, way_out)`."""
    return functools.partial(Refused, tuple(frozenset({s} if isinstance(s, Feature) else s) for s in sides))


_ALONE = "train the adapters one by one, or leave it out"
_EAGER = "set train.cuda_graphs: off"
_PLAIN = "leave it out, or use optimizer: adamw"

REFUSED: tuple[Refused, ...] = (
    # Two options of a run.
    _refused({F.PACKING, F.TRAIN_ON, F.APART, F.SAMPLES, F.MERGED, F.ROUTER_LOSS, F.RECORD, F.REPLAY}, F.OTHER_HEAD)(
        "it is for language models: this objective has another head"
    ),
    _refused({F.TOO_LONG, F.AS_GENERATED, F.LOST_TEXT, F.TEMPLATE, F.SYSTEM}, F.OF_LABELS)(
        "its records are plain texts, cut where they are too long"
    ),
    _refused({F.CATEGORIES, F.SEPARATOR, F.SKIPPED_EMPTY, F.STYLE}, F.COMPARED)("only records of sft have it"),
    _refused(F.STYLE, {F.SYSTEM, F.TEMPLATE})(
        "a style writes plain text, which has no turns", "leave out data.prompt, or the other"
    ),
    _refused(F.METRICS, F.COMPARED)(
        "only records of sft have an answer to compare with",
        "leave it out, or measure the finished adapter: meshlora evaluate --generate --data FILE",
    ),
    _refused(F.SKIPPED_BAD, F.NOTHING_ALONE)("its rows are compared with others, or have labels", "correct the rows"),
    _refused(F.PACKING, F.PAIRS)("a pair is two rows", "set data.packing: false"),
    _refused(F.IN_CONTEXT, {F.PACKING, F.CONTEXT})(
        "its teacher has other rows than the student, of other lengths", "use neither packing nor cp"
    ),
    _refused(F.PACKING, F.RECORDS)("a record is two rows", "set data.packing: false"),
    _refused(F.PACKING, F.SEQUENCES)("its ratio or its mean is of whole sequences", "set data.packing: false"),
    _refused(F.PACKING, F.OTHER_ATTENTION)(
        "that sequences of a row are kept apart is shown for eager and sdpa", "use one of these"
    ),
    _refused(F.SPLIT, F.COMPARED)("its answers are compared as wholes", "use truncate, drop or error"),
    _refused(F.APART, F.COMPARED)("its answers are compared as wholes"),
    _refused(F.STREAMING, {F.COMPARED, F.SEPARATOR, F.CATEGORIES})(
        "its records are held in memory", "leave out one of them"
    ),
    _refused(F.STREAMING, F.OWN_SOURCES)("their tokens are joined in memory", "leave out streaming, or the options"),
    _refused(F.SHARE, F.STREAMING)("tokens that stay in the cache's file are not cut", "give data.eval: FILE"),
    _refused(F.SHARE, F.OF_ROLLOUTS)("rollouts of one prompt are compared with each other", "give data.eval: FILE"),
    _refused(F.SHARE, F.CATEGORIES)("its categories are those of the training data", "give data.eval: FILE"),
    _refused(F.MAPPED, F.STREAMING)("what its function makes is held in memory", "leave out one of them"),
    _refused(F.WHOLE_ROWS, {F.STREAMING, F.WEIGHTED, F.FOLLOWED, F.RL})(
        "its rows are made of all of the data, once", "use packing: true"
    ),
    _refused(F.IN_ORDER, F.WEIGHTED)("sources with weights are drawn", "leave out one of them"),
    _refused({F.FEW, F.SLICED, F.MAPPED, F.IN_ORDER}, {F.FOLLOWED, F.RL})(
        "a stream, and prompts of rl, have a way of their own"
    ),
    _refused({F.RECORD, F.REPLAY}, F.BASE)(
        "a step of this objective runs the frozen base too, whose routing is another", "leave them out"
    ),
    _refused(F.RECORD, F.REPLAY)("what is replayed is recorded already", "give one"),
    _refused(F.LORA_PLUS, F.LORA_FA)("A is not trained: B alone has a rate", "leave out one of them"),
    # Rollouts, and data that come step by step.
    _refused(F.RL, F.NO_RL)("it learns from rewards in groups, or from a teacher", "give kind: grpo, or distill"),
    _refused(F.RL, {F.TAUGHT, F.IN_CONTEXT})("its teacher is one that reads what is generated", "give a folder"),
    _refused(F.RL, F.HELD_OUT, F.OF_ROLLOUTS)("a run of rl is watched by its rewards"),
    _refused(F.FOLLOWED, F.MADE)("it makes its rollouts"),
    _refused(F.TEMPERATURE, F.UNCORRECTED, F.MADE)(
        "what is trained is not what samples: that is to be corrected", "leave out one"
    ),
    _refused(F.TEMPERATURE, F.ENGINE)(
        "an engine's log-probabilities are those before the temperature, unless it was started otherwise"
    ),
    _refused(F.OLDER, F.UNCORRECTED, F.ENGINE)(
        "the adapter that samples is an older one: that is to be corrected", "leave out one"
    ),
    _refused(F.PUBLISHED, F.RECORDED)("nothing is generated", "use meshlora publish"),
    _refused(F.FOLLOWED, F.NO_ROLLOUTS)(
        "a stream holds rollouts, which this objective does not read",
        "give an objective that trains on rollouts, or leave it out",
    ),
    _refused(F.FOLLOWED, F.SEVERAL_PATHS)("a stream is one folder", "give data.train as its path"),
    _refused({F.FOLLOWED, F.RL}, F.EPOCHS)("a stream has no epochs", "give train.steps"),
    _refused({F.FOLLOWED, F.RL}, {F.EVAL_BY_EPOCH, F.SAVE_BY_EPOCH})("a stream has no epochs", "give it in steps"),
    _refused({F.FOLLOWED, F.RL}, {F.RECORD, F.REPLAY})("such a record is of data that are known beforehand"),
    _refused(F.MADE, {F.LORA_DROPOUT, F.NOISE})(
        "the policy that is trained would be another one than the one that acts"
    ),
    _refused(F.MADE, F.MODEL_DROPOUT)(
        "the policy that is trained would be another one than the one that acts", "set model.disable_dropout: true"
    ),
    _refused(
        {F.DISTILLED, F.MADE, F.SAMPLES, F.METRICS, F.LOAD, F.COMMAND, F.GENERATE, F.BATCHED, F.LABELS, F.SCORES},
        F.INTERLEAVE,
    )("a rank runs its stages in turns in training by the model itself alone", "leave out interleave"),
    # What comes with the data.
    _refused({F.PACKING, F.NOISE, F.RECORD, F.REPLAY, F.OTHER_HEAD, F.DISTILLED}, F.IMAGES)(
        "it is not proved with images"
    ),
    _refused(F.ROUTED, {F.RECORD, F.REPLAY})("the data say the experts of each token", "leave one out"),
    _refused(F.TOP_ENTROPY, {F.ROUTED, F.RECORD, F.REPLAY})("its first pass follows no record", "leave one out"),
    _refused(F.ROUTED, F.STAGES)("they are not replayed with pp", "use other axes"),
    # Encoders, of which dp, dp_shard and tp are proved.
    _refused(
        {F.STAGES, F.CONTEXT, F.SEQUENCE, F.EXPERTS, F.QUANTIZED, F.COMPUTE, F.PACKING, F.NOISE, F.RECOMPUTED}
        | {F.COPIES, F.ROWS, F.WHOLE_MATRIX, F.EVA, F.INVOKED, F.ON_EMBEDDING, F.ON_POSITIONS, F.ON_HEAD, F.PLAN}
        | {F.COMPARED, F.DISTILLED, F.ADAPTERS, F.RL, F.FOLLOWED, F.SAMPLES, F.METRICS, F.EVALUATED, F.COMMAND}
        | {F.LOAD, F.GENERATE, F.BATCHED, F.MANAGER, F.LABELS, F.SCORES, F.TRAINER, F.TRL, F.COMBINED, F.IN_MEMORY},
        F.ENCODER,
    )("with an encoder, training on pairs is proved, over dp, dp_shard and tp"),
    _refused(
        {F.TOO_LONG, F.AS_GENERATED, F.LOST_TEXT, F.TEMPLATE, F.SYSTEM, F.STYLE, F.TRAIN_ON, F.APART, F.SEPARATOR}
        | {F.CATEGORIES, F.SKIPPED_EMPTY, F.SKIPPED_BAD, F.STREAMING},
        F.ENCODER,
    )("its records are a prompt and a completion, plain texts, cut where they are too long"),
    _refused({F.MODEL_DROPOUT, F.LORA_DROPOUT}, F.ENCODER)(
        "masks are drawn by the tokens of the decoder, and those of the encoder are others",
        "set model.disable_dropout: true, and lora_dropout: 0",
    ),
    # Recorded micro-batches.
    _refused(F.GRAPHS, {F.STAGES, F.CONTEXT, F.TENSOR, F.EXPERT, F.EXPERT_TENSOR, F.SHARDED})(
        "messages between ranks within a micro-batch are not recorded", f"use dp alone, or {_EAGER}"
    ),
    _refused(F.GRAPHS, {F.ROUTER_LOSS, F.RECORD, F.REPLAY, F.ROUTED})(
        "what looks at routers in each micro-batch is passed by in a record", _EAGER
    ),
    _refused(F.GRAPHS, F.OFFLOADED)("copies to host memory wait for events of their own", "use train.recompute: full"),
    _refused(F.GRAPHS, {F.NOISE, F.FLOAT16})("its numbers are those of the host, which change with each step", _EAGER),
    _refused(
        F.GRAPHS,
        {F.COMPARED, F.DISTILLED, F.WEIGHTED_TOKENS, F.ADAPTERS, F.QUANTIZED, F.COMPOSITE, F.ENCODER}
        | {F.TASK, F.IMAGES, F.OTHER_ATTENTION, F.FOLLOWED, F.RL, F.INVOKED, F.ROWS}
        | {F.ON_EMBEDDING, F.ON_POSITIONS, F.ON_HEAD, F.COPIES, F.PIECES, F.EVA},
    )("it is not proved in a record", _EAGER),
    # Stages of layers, tokens cut over ranks, a sharded base.
    _refused({F.RECORD, F.REPLAY, F.TASK, F.OTHER_HEAD, F.TRAINED_TIED}, F.STAGES)(
        "it is not proved with stages of layers", "use pp=1"
    ),
    _refused(F.SHARDED, F.INTERLEAVE)("it is not proved with stages of layers", "use pp=1"),
    _refused(F.OTHER_ATTENTION, F.CONTEXT)("cut sequences attend by sdpa or eager", "use attn_implementation=sdpa"),
    _refused(F.TRAINED_SHARD, F.SHARDED)(
        "what dp_shard shards is frozen, and it shards the matrices of decoder layers",
        "leave out dp_shard, or give it LoRA; norms, biases, embedding and head can be trained",
    ),
    _refused(F.WHOLE_MATRIX, F.SHARDED)(
        "it changes weights of which a rank holds a part only", "leave out dp_shard, or use init_lora_weights: true"
    ),
    # The adapter, and the base that it is on.
    _refused(F.TRAINED_QUANTIZED, F.QUANTIZED)("a quantised matrix is frozen", "give it LoRA"),
    _refused(F.WHOLE_MATRIX, F.QUANTIZED)("it changes the base, which is quantised", "use init_lora_weights: true"),
    _refused(F.COMPUTE, F.OTHER_BITS)(
        "its base is in few bits already, and they are not those of float8",
        "use model.quantization: fp8, or keep of a checkpoint in float8, or leave out one of them",
    ),
    _refused(F.COMPUTE, F.FLOAT16)("the range of its numbers is too small for their scales", "use bfloat16"),
    _refused(F.TRAINED_QUANTIZED, F.COMPUTE)("a matrix with products in float8 is frozen", "give it LoRA"),
    _refused({F.WHOLE_MATRIX, F.DORA}, F.COMPUTE)(
        "it looks at the base, whose products are of rounded numbers", "leave out one of them"
    ),
    _refused(F.WHOLE_MATRIX, F.FLOAT64)("PEFT computes it in float32", "use float32"),
    _refused(F.BASE, F.WHOLE_MATRIX)(
        "it needs the frozen base, which has given its principal part to the adapter", "use init_lora_weights: true"
    ),
    _refused(F.BASE_ALONE, F.WHOLE_MATRIX)(
        "the base has given its principal part to the adapter", "load the base without it"
    ),
    _refused(F.ALL_BIASES, F.COMPOSITE)("text trains no bias of its tower", "use bias='lora_only'"),
    _refused(F.SAVED_BIAS, F.ALL_BIASES)(
        "PEFT stores its bias twice, under two names",
        "use bias='none' or 'lora_only': modules_to_save trains that bias too",
    ),
    _refused({F.DORA, F.PIECES}, F.WHOLE_MATRIX)("the two are not proved together", "leave out one of them"),
    _refused(F.OF_LINEARS, {F.PIECES, F.ON_EMBEDDING})("it is for whole linear layers", "leave out one of them"),
    _refused({F.DORA, F.WHOLE_MATRIX, F.OF_LINEARS}, F.ON_EXPERTS)("PEFT has none for a parameter"),
    _refused(
        F.EVA, {F.COMPARED, F.FOLLOWED, F.RL, F.IMAGES, F.STAGES, F.ADAPTERS, F.ROWS, F.ON_HEAD, F.ROUNDED, F.LOAD}
    )("it begins by data in meshlora train, of sft on text, proved in float64", "use init_lora_weights: true"),
    _refused(F.DORA, F.RENAMED)(
        "PEFT reads this name as a word for experts, and what it can read instead has no DoRA",
        "leave out use_dora, or this target",
    ),
    _refused(F.OF_LINEARS, F.RENAMED)(
        "PEFT reads this name as a word for experts, and what it can read instead begins otherwise",
        "use init_lora_weights: true, or leave out this target",
    ),
    _refused({F.DORA, F.OF_LINEARS}, F.BY_WEIGHT)(
        "PEFT has none for a parameter", "name it in target_modules, and only there"
    ),
    _refused(F.WHOLE_MATRIX, F.ON_TIED_HEAD)("it shares its weight with the embedding", "use init_lora_weights: true"),
    _refused({F.WHOLE_MATRIX, F.OF_LINEARS}, F.ON_EMBEDDING)("it is for linear layers"),
    _refused(F.LORA_BIAS, {F.DORA, F.NAMED_INIT})("PEFT refuses the two together", "leave out one of them"),
    _refused(F.LORA_BIAS, {F.ON_EMBEDDING, F.ON_PARAMETERS, F.ON_EXPERTS, F.BY_WEIGHT, F.RENAMED})(
        "PEFT has it for linears that it takes for modules alone", "leave out lora_bias, or this target"
    ),
    _refused(F.LORA_BIAS, F.PIECES)("such a bias is of the whole matrix", "leave out one of them"),
    _refused(
        F.INVOKED,
        {F.TASK, F.DORA, F.WHOLE_MATRIX, F.ON_EMBEDDING, F.ON_HEAD, F.ON_PARAMETERS, F.ON_EXPERTS, F.MERGED}
        | {F.IN_MEMORY, F.BATCHED, F.BEAMS, F.GPT2_BEAM},
    )("PEFT has an adapter invoked by tokens for linears of a causal model alone, not merged, and without beams"),
    _refused(F.INVOKED, F.LORA_BIAS)("the two together are not proved", "leave out one of them"),
    _refused(
        F.COMBINED,
        {F.INVOKED, F.DORA, F.LORA_BIAS, F.WHOLE_MATRIX, F.COPIES, F.ROWS, F.PIECES, F.ON_PARAMETERS, F.ON_EXPERTS},
    )("a sum is of LoRA on linears and the embedding", "use adapters without it"),
    _refused(F.LORA_DROPOUT, F.ON_PARAMETERS)(
        "PEFT has no dropout for experts, routers and linears that it names as parameters",
        "leave lora_dropout at 0.0, or leave these targets out",
    ),
    _refused(F.LORA_DROPOUT, F.ON_HEAD)(
        "it is computed for some trained tokens at a time", "leave lora_dropout at 0.0, or leave the head out"
    ),
    _refused(F.EIGHT_BIT, {F.ON_PARAMETERS, F.PIECES})(
        "PEFT keeps several of these in one matrix, whose blocks of 256 elements are not those of each", _PLAIN
    ),
    _refused(F.EIGHT_BIT, F.ROWS)("it is not proved with them", _PLAIN),
    _refused(F.EIGHT_BIT, F.TRAINED_EMBEDDING)(
        "transformers leaves its moments in 32 bits, and bitsandbytes itself does not", _PLAIN
    ),
    _refused(F.LORA_FA, {F.COPIES, F.ROWS, F.DORA, F.LORA_BIAS, F.ON_EMBEDDING, F.ON_PARAMETERS, F.PIECES})(
        "PEFT's optimizer pairs one A with one B of a linear, and would take other parameters for these", _PLAIN
    ),
    # Several adapters at once.
    _refused(
        {F.ROUTER_LOSS, F.TRACKERS, F.RECORD, F.REPLAY, F.FOLLOWED, F.RL, F.OTHER_HEAD, F.EIGHT_BIT, F.IMAGES}
        | {F.DISTILLED, F.ROUTED, F.BIASES, F.SAVED, F.ROWS, F.WHOLE_MATRIX, F.ON_ROUTER, F.RESUMED, F.ON_POSITIONS},
        F.ADAPTERS,
    )("it is not proved with several adapters", _ALONE),
    _refused(F.FLOAT16, F.ADAPTERS)("their loss scale is not proved", "use bfloat16"),
    _refused(F.REFERENCE, F.ADAPTERS)(
        "it is not proved with several adapters", "use reference: base, or train the adapters one by one"
    ),
    _refused(F.RESUMED_FOLDER, F.ADAPTERS)("each of several adapters has checkpoints of its own", "use --resume auto"),
    # Proofs and plans.
    _refused(F.ADAPTERS, F.SCHEDULE, F.PROOF)("several adapters are not proved with it"),
    _refused(F.ADAPTERS, {F.ROUNDED, F.ON_GPU, F.WHOLE_MODEL})(
        "several adapters are proved on twins, in float64, on CPUs", "give --family or --twin, and --device cpu"
    ),
    _refused({F.EIGHT_BIT, F.COMPUTE}, {F.ROUNDED, F.ON_GPU})(
        "rounding moves codes, as a fault would", "prove it in float64 on CPUs: --device cpu"
    ),
    _refused(F.TEACHER, F.WHOLE_MODEL)("its teacher is another twin", "give --family, or --twin"),
    _refused({F.BASE, F.TEACHER}, F.EXPERTS, F.ROUNDED)(
        "routing is replayed below float64, and the frozen base routes by itself", "use float64"
    ),
    _refused(F.PARTS, F.PROOF)("it is proved of the adapter of the run alone", "use reference: start"),
    _refused(F.PLAN, {F.ADAPTERS, F.COMPARED, F.DISTILLED, F.FLOAT64})(
        "plans are of one adapter, train.objective=sft, at most four bytes", ""
    ),
    _refused(F.PLAN, F.KEPT_ATTENTION)("its memory is not planned", "plan full, which takes less memory and more time"),
    # Loops and trainers of others.
    _refused(F.TRAINER, F.STAGES)("its loop has no turns of stages", "use meshlora train"),
    _refused(F.ROUTER_LOGITS, F.MESH)(
        "the load-balancing loss of Hugging Face's models is that of each rank's own tokens",
        "leave it out, or use meshlora train",
    ),
    _refused(F.ARGUMENT, F.MESH)("it is not proved on a mesh"),
    _refused(F.WHOLE_OPTIMIZER, F.MESH)(
        "it uses whole matrices, or rounds their blocks, and a rank has a part of each",
        "use torch's AdamW, Adam, SGD, Adagrad or RMSprop",
    ),
    _refused(F.LOSS_SCALE, F.MESH)(
        "its loss scale would be that of each rank's own gradients", "load the model with dtype='bfloat16' or 'float32'"
    ),
    _refused(F.BY_LENGTH, F.DP)(
        "it orders the rows by the batch of one process, and dp ranks share one", "use random, or dp=1"
    ),
    _refused(F.UNSIZED, F.DP)("its last rows are not proved to be counted once", "use one with a length, or dp=1"),
    _refused(F.OWN_MEAN, F.DP)("its loss is a mean of a rank's own rows, and ranks have unequal shares", "use dp=1"),
    _refused(F.OWN_LOSS, F.DP)(
        "a mean of a rank's own rows is not that of all",
        "divide by num_items_in_batch and set loss_is_scaled_for_ga = True, or use dp=1",
    ),
    _refused(F.MANAGER, F.MESH)("requests that come one by one are not proved on a mesh", "use model.generate_batch"),
    _refused(F.EVALUATED, F.OTHER_HEAD)("such a model writes no text"),
    _refused(F.SAMPLED, F.GPT2_BEAM)("that search draws nothing", "give one of them"),
    _refused(F.PROBABILITIES, {F.BEAMS, F.GPT2_BEAM})("a beam is searched for, not drawn", "set generate.num_beams: 1"),
    _refused(F.EIGHT_BIT, F.FLOAT64, F.GPU)(
        "the kernels of bitsandbytes on GPUs have no float64", "use model.dtype: float32"
    ),
    _refused(F.BATCHED, F.CONTEXT)("it brings an attention of its own", "use model.generate"),
    _refused(F.SCORES, F.CONTEXT)("its ranks have parts of the tokens", "use other axes"),
    _refused(F.TRL, {F.CONTEXT, F.STAGES})(
        "its losses are of whole rows, of which a rank has a part", "use dp or tp, or MeshTrainer, or meshlora train"
    ),
    _refused(F.TRL_SAMPLES, F.LORA_DROPOUT)(
        "what is generated runs in training mode, with dropout of its own",
        "give GRPOConfig(disable_dropout=True), or an adapter with lora_dropout=0",
    ),
    _refused(F.HIDDEN_STATES, {F.SEQUENCE, F.STAGES})("a rank has a part of them only", "use tp=1 for it, or dp"),
    _refused(F.ATTENTIONS, {F.TENSOR, F.STAGES})("a rank has a part of them only", "use tp=1 for it, or dp"),
)

# Every feature is in one of these by name: one that is in none goes with nothing.
AXES = frozenset(
    {F.DP, F.STAGES, F.INTERLEAVE, F.CONTEXT, F.RING, F.TENSOR, F.SEQUENCE, F.EXPERT, F.EXPERT_TENSOR, F.TWO_STAGE}
    | {F.SHARDED, F.MESH}
)
BASES = frozenset(
    {F.EXPERTS, F.COMPOSITE, F.ENCODER, F.TASK, F.QUANTIZED, F.OTHER_BITS, F.COMPUTE, F.FLOAT16, F.FLOAT64}
    | {F.OTHER_ATTENTION, F.MODEL_DROPOUT}
)
METHODS = frozenset(
    {F.WHOLE_MATRIX, F.NAMED_INIT, F.DORA, F.LORA_BIAS, F.LORA_DROPOUT, F.BIASES, F.ALL_BIASES, F.SAVED, F.SAVED_BIAS}
    | {F.COPIES, F.ROWS, F.PIECES, F.SHARED_EXPERTS, F.ON_EMBEDDING, F.ON_HEAD, F.ON_TIED_HEAD, F.ON_PARAMETERS}
    | {F.ON_EXPERTS, F.BY_WEIGHT, F.RENAMED, F.ON_ROUTER, F.TRAINED_TIED, F.TRAINED_SHARD, F.TRAINED_QUANTIZED}
    | {F.TRAINED_EMBEDDING, F.INVOKED, F.EVA, F.OF_LINEARS, F.ON_POSITIONS}
)
OBJECTIVES = frozenset(
    {F.COMPARED, F.PAIRS, F.RECORDS, F.SEQUENCES, F.OTHER_HEAD, F.BASE, F.NO_RL, F.NO_ROLLOUTS, F.UNCORRECTED}
    | {F.NOTHING_ALONE, F.OF_ROLLOUTS, F.OF_LABELS, F.REFERENCE, F.TOP_ENTROPY, F.WEIGHTED_TOKENS}
    | {F.DISTILLED, F.TAUGHT, F.TEACHER, F.IN_CONTEXT}
)
READING = frozenset(
    {F.SEPARATOR, F.CATEGORIES, F.SKIPPED_EMPTY, F.SKIPPED_BAD, F.TOO_LONG, F.SPLIT, F.TRAIN_ON, F.APART}
    | {F.AS_GENERATED, F.LOST_TEXT, F.TEMPLATE, F.STREAMING, F.HELD_OUT, F.SHARE, F.SEVERAL_PATHS}
    | {F.OWN_SOURCES, F.WEIGHTED, F.SLICED, F.FEW, F.MAPPED, F.IN_ORDER, F.STYLE, F.SYSTEM}
)
STEPS = frozenset(
    {F.PACKING, F.WHOLE_ROWS, F.IMAGES, F.ROUTED, F.EIGHT_BIT, F.LORA_FA, F.LORA_PLUS, F.SCHEDULE, F.NOISE}
    | {F.ROUTER_LOSS, F.RECORD, F.REPLAY, F.RECOMPUTED, F.KEPT_ATTENTION, F.OFFLOADED}
)
AROUND = frozenset(
    {F.EPOCHS, F.EVAL_BY_EPOCH, F.SAVE_BY_EPOCH, F.SAMPLES, F.METRICS, F.MERGED, F.TRACKERS}
    | {F.RESUMED_FOLDER, F.RESUMED}
)
ROLLOUTS = frozenset({F.FOLLOWED, F.RL, F.MADE, F.ENGINE, F.RECORDED, F.PUBLISHED, F.TEMPERATURE, F.OLDER})
SEVERAL = frozenset({F.ADAPTERS})
RECORDED = frozenset({F.GRAPHS})
PROOFS = frozenset({F.PROOF, F.PARTS, F.ROUNDED, F.ON_GPU, F.WHOLE_MODEL})
LOOPS = frozenset(
    {F.LOAD, F.GENERATE, F.BATCHED, F.COMMAND, F.LABELS, F.SCORES, F.TRAINER, F.TRL, F.TRL_SAMPLES, F.BASE_ALONE}
    | {F.COMBINED, F.IN_MEMORY}
    | {F.ROUTER_LOGITS, F.HIDDEN_STATES, F.ATTENTIONS, F.MANAGER, F.EVALUATED, F.ARGUMENT, F.WHOLE_OPTIMIZER, F.GPU}
    | {F.LOSS_SCALE, F.BY_LENGTH, F.UNSIZED, F.OWN_LOSS, F.OWN_MEAN, F.SAMPLED, F.BEAMS, F.GPT2_BEAM, F.PROBABILITIES}
)
PLANS = frozenset({F.PLAN})
GROUPS = {
    "axes": AXES,
    "bases": BASES,
    "methods of adapters": METHODS,
    "objectives": OBJECTIVES,
    "reading": READING,
    "steps": STEPS,
    "around the steps": AROUND,
    "rollouts": ROLLOUTS,
    "several adapters": SEVERAL,
    "records of micro-batches": RECORDED,
    "proofs": PROOFS,
    "loops of others": LOOPS,
    "plans": PLANS,
}
_EVERY = frozenset().union(*GROUPS.values())
_TRAINED = AXES | BASES | METHODS | OBJECTIVES | STEPS

PROVED: tuple[Proved, ...] = (
    Proved(AXES, AXES, "tests/parity/test_topologies.py::test_adapter_is_the_one_a_single_process_produces"),
    Proved(AXES, METHODS, "tests/ranks/test_methods.py::test_trains_as_one_process_does"),
    Proved(AXES, OBJECTIVES, "tests/verify/test_objectives.py::test_objective_is_that_of_one_process_on_every_mesh"),
    Proved(
        AXES,
        frozenset({F.PACKING, F.WHOLE_ROWS}),
        "tests/verify/test_packing.py::test_packed_rows_are_the_sequences_one_by_one_on_every_mesh",
    ),
    # Any other two of these: the twin of each run has both, else the run is refused.
    Proved(_TRAINED, _TRAINED, "tests/verify/test_preflight.py::test_twin_that_lacks_what_the_model_has_is_refused"),
    # Reading ends with tokens, before a process starts.
    Proved(READING, _EVERY, "tests/unit/test_features.py::test_features_together_are_refused_in_words_or_make_a_run"),
    Proved(AROUND, _EVERY, "tests/ranks/test_dp_shard.py::test_a_run_with_all_that_a_run_has_gives_the_bytes_of_dp"),
    Proved(
        ROLLOUTS, _EVERY, "tests/extra/test_rl.py::test_recorded_rollouts_give_one_adapter_and_that_of_transformers"
    ),
    Proved(SEVERAL, _EVERY, "tests/verify/test_several_adapters.py::test_what_one_adapter_may_have_several_may"),
    Proved(RECORDED, _EVERY, "tests/ranks/test_graphs.py::test_replayed_steps_are_the_eager_ones"),
    Proved(
        PROOFS, _EVERY, "tests/parity/test_topologies.py::test_low_precision_stays_within_the_references_own_rounding"
    ),
    Proved(LOOPS, _EVERY, "tests/ranks/test_own_loop.py::test_own_loop_saves_the_adapter_of_one_process"),
    Proved(PLANS, _EVERY, "tests/extra/test_planner_ranks.py::test_real_ranks_send_what_is_planned"),
)


def check(asked: Asked) -> None:
    """Refuse what does not go together: `check({"topology": topology, "train.sample_every": 2})`.

    Asked early and again wherever more is known: of the run file, of the model with its adapter, of the data.

    Raises:
        UnsupportedError: names the first two or three.
    """
    if (error := refusal(asked)) is not None:
        raise error


def refusal(asked: Asked) -> UnsupportedError | None:
    """What `check` would raise."""
    # In the order of `Feature`, by which a message names them.
    given = features_of(asked)
    has = frozenset(given)
    for row in REFUSED:
        if all(side & has for side in row.sides):
            found = [next(feature for feature in given if feature in side) for side in row.sides]
            return UnsupportedError(_said(found, asked), row.because, row.way_out)
    for pair in itertools.combinations(given, 2):
        # No silence: what no row refuses, a row must have proved.
        if proof_of(*pair) is None:
            why = "nobody has said that the two go together"
            return UnsupportedError(_said(pair, asked), why, "leave out one of them, or see docs/support.md")
    return None


@functools.cache
def proof_of(one: Feature, other: Feature) -> str | None:
    """The test that shows two features together; None: there is none."""
    for row in PROVED:
        if (one in row.one and other in row.other) or (other in row.one and one in row.other):
            return row.by
    return None


_BETWEEN = {"door": "in"}  # and else "with"


def _said(features: tuple[Feature, ...] | list[Feature], asked: Asked) -> str:
    """In one line; axes by the topology that has them."""
    words, topology = "", asked.get("topology")
    for feature in features:
        if not words:
            words = feature.given(asked)
        elif feature.key == "topology":  # whole, as after "on"
            words += f" on {topology}"
        else:
            words += f" {_BETWEEN.get(feature.key, 'with')} {feature.given(asked)}"
    return words
