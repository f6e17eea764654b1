"""The features of a run, a proof, a plan or a loop that can be asked for, with the predicate of each.

Owns: their names, how a message says one that is given, and when it is. Does not own: which of them go together
(`plan.pairs`).

What is asked for is a plain mapping, `Asked`: option or fact -> value, as far as it is known yet. Options have the
names of a run file; facts of the model, the adapter and the data have names of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

Asked = Mapping[str, Any]

_TASK, _PAIRED = "CAUSAL_LM", "SEQ_2_SEQ_LM"  # as in `meshlora_ground.tasks`
_OF_RL = ("grpo", "distill")  # kinds
_BY_LENGTH = ("group_by_length", "batch_rebalance")
_OF_LABELS, _ALONE = ("labelled", "labelled_words", "similar"), ("text", "pairs", "margins", "feedback")  # readers


def _is(value: object) -> Callable[[Any], bool]:
    return lambda given: bool(given == value)


def _other_than(value: object) -> Callable[[Any], bool]:
    return lambda given: bool(given != value)


def _but(*values: object) -> Callable[[Any], bool]:
    return lambda given: given not in values


def _begins(words: str) -> Callable[[Any], bool]:
    return lambda given: bool(given.startswith(words))


def _begins_as(*words: str) -> Callable[[Any], bool]:
    return lambda given: isinstance(given, str) and given.lower().startswith(words)


def _is_text(given: Any) -> bool:
    return isinstance(given, str)


def _objective(predicate: Callable[[Any], bool], of_docs: str) -> tuple[str, Callable[[Any], bool], str, str]:
    return "train.objective", predicate, of_docs, "{key}={0.kind}"


class Feature(Enum):
    """Key of what is asked for, predicate on its value, words of the docs, and how a message says the value."""

    # The topology.
    DP = "topology", lambda given: given.dp > 1, "dp", "dp"
    STAGES = "topology", lambda given: given.pp > 1, "pp", "pp"
    INTERLEAVE = "topology", lambda given: given.interleave > 1, "interleave", "interleave"
    CONTEXT = "topology", lambda given: given.cp > 1, "cp", "cp"
    RING = "topology", lambda given: given.ring, "ring", "ring"
    TENSOR = "topology", lambda given: given.tp > 1, "tp", "tp"
    SEQUENCE = "topology", lambda given: given.sp, "sp", "sp"
    EXPERT = "topology", lambda given: given.ep > 1, "ep", "ep"
    EXPERT_TENSOR = "topology", lambda given: given.etp > 1, "etp", "etp"
    TWO_STAGE = "topology", lambda given: given.two_stage, "two-stage", "two-stage"
    SHARDED = "topology", lambda given: given.dp_shard, "dp_shard", "a sharded base"
    MESH = "topology", lambda given: given.world > 1, "several ranks", "several ranks"

    # The model, and how it computes.
    EXPERTS = "experts", bool, "routed experts", "experts"
    COMPOSITE = "composite", bool, "a composite", "a composite ({})"
    ENCODER = "task", _is(_PAIRED), "an encoder beside the decoder", "an encoder beside the decoder"
    TASK = "task", _but(_TASK, _PAIRED), "a model with another head", "a model for {}"
    QUANTIZED = "model.quantization", bool, "", "quantization {}"
    OTHER_BITS = "model.quantization", _but("fp8", "keep"), "a base in few bits that are not float8", "quantization {}"
    COMPUTE = "model.compute", bool, "", "{key}={}"
    FLOAT16 = "model.dtype", _is("float16"), "float16", "{}"
    FLOAT64 = "model.dtype", _is("float64"), "float64", "{}"
    OTHER_ATTENTION = (
        "model.attn_implementation",
        _but("eager", "sdpa"),
        "attention by other than sdpa and eager",
        "{key}={}",
    )
    MODEL_DROPOUT = "dropout", bool, "dropout of the model", "the model's {}"

    # The adapter.
    WHOLE_MATRIX = "init_lora_weights", _begins_as("pissa", "olora"), "PiSSA, OLoRA", "{key}={!r}"
    EVA = "init_lora_weights", _is("eva"), "EVA", "{key}={!r}"
    OF_LINEARS = "init_lora_weights", _begins_as("eva", "orthogonal"), "EVA, `orthogonal`", "{key}={!r}"
    NAMED_INIT = "init_lora_weights", lambda given: isinstance(given, str), "`init_lora_weights` by name", "{key}={!r}"
    DORA = "use_dora", bool, ""
    LORA_BIAS = "lora_bias", bool, ""
    LORA_DROPOUT = "lora_dropout", bool, "", "{key}={}"
    BIASES = "bias", _other_than("none"), "", "bias={!r}"
    ALL_BIASES = "bias", _is("all"), "`bias: all`", "bias={!r}"
    SAVED = "modules_to_save", bool, ""
    SAVED_BIAS = "modules_to_save with a bias", bool, "", "modules_to_save: {}"
    COPIES = "modules_to_save, or biases", bool, "`modules_to_save`, or biases"
    ROWS = "trainable_token_indices", bool, ""
    INVOKED = "alora_invocation_tokens", bool, ""
    PIECES = "pieces", bool, ""
    SHARED_EXPERTS = "share_experts", bool, ""
    ON_EMBEDDING = "an adapter on the embedding", bool, "an adapter on the embedding", "{key} {}"
    ON_POSITIONS = "an adapter on positions", bool, "an adapter on an embedding of positions", "{key} {}"
    ON_HEAD = "an adapter on the output head", bool, "an adapter on the output head", "{key} {}"
    ON_TIED_HEAD = "an adapter on the tied head", bool, "an adapter on a tied head", "{key} {}"
    ON_PARAMETERS = "an adapter on the parameter", bool, "an adapter on parameters (experts, routers)", "{key} {}"
    ON_EXPERTS = "an adapter on experts or routers", bool, "an adapter on experts or routers", "an adapter on {}"
    BY_WEIGHT = "by_weight", bool, "linears in `target_parameters`", "target_parameters: {}"
    RENAMED = "renamed", bool, "linears that PEFT takes for experts by their name", "an adapter on {}"
    ON_ROUTER = "LoRA on the router", bool, "an adapter on a router", "{key} {}"
    TRAINED_TIED = "tied", bool, "training one end of tied weights", "training {}, tied,"
    TRAINED_SHARD = "sharded", bool, "training a matrix of the layers", "training {}"
    TRAINED_QUANTIZED = "quantised", bool, "training a quantised matrix", "training {}"
    TRAINED_EMBEDDING = "the embedding in modules_to_save", bool, "the embedding in `modules_to_save`"

    # The objective.
    COMPARED = _objective(lambda given: given.reader != "text", "any objective but sft")
    PAIRS = _objective(lambda given: given.unit == "pair", "objectives of pairs")
    RECORDS = _objective(lambda given: given.unit == "record", "objectives of records")
    SEQUENCES = _objective(lambda of: getattr(of, "is_of_sequences", False), "policy gradients of whole sequences")
    TOP_ENTROPY = _objective(lambda given: getattr(given, "top_entropy", 1) < 1, "`top_entropy`")
    OTHER_HEAD = _objective(lambda given: given.task != _TASK, "classify, classify_tokens, embed, reward")
    OF_LABELS = _objective(lambda given: given.reader in _OF_LABELS, "classify, classify_tokens, embed")
    BASE = _objective(lambda given: given.needs_base, "objectives with a frozen policy")
    NO_RL = _objective(lambda given: given.kind not in _OF_RL, "any objective but grpo and distill")
    NO_ROLLOUTS = _objective(lambda given: not given.is_of_rollouts, "objectives without rollouts")
    OF_ROLLOUTS = _objective(lambda given: given.is_of_rollouts, "objectives of rollouts")
    UNCORRECTED = (
        "train.objective",
        lambda given: given.is_of_rollouts and given.importance_cap is None,
        "`importance_cap: null`",
        "train.objective.importance_cap=null",
    )
    WEIGHTED_TOKENS = _objective(lambda given: getattr(given, "loss", "nll") == "dft", "`loss: dft`")
    NOTHING_ALONE = _objective(lambda given: given.reader not in _ALONE, "objectives that compare rows, or have labels")
    DISTILLED = _objective(lambda given: given.kind == "distill", "distill")
    TAUGHT = _objective(lambda given: given.reader == "taught", "a recorded teacher")
    TEACHER = _objective(lambda given: bool(getattr(given, "folder", None)), "a teacher that is a model")
    IN_CONTEXT = _objective(lambda given: bool(getattr(given, "context", None)), "a teacher's context")
    REFERENCE = "reference", bool, "a reference that is an adapter", "{key}: {}"

    # The data.
    PACKING = "data.packing", lambda given: given is True or given == "rows", ""
    WHOLE_ROWS = "data.packing", _is("rows"), "`data.packing: rows`", "{key}={}"
    SEPARATOR = "data.separator", bool, ""
    CATEGORIES = "data.eval_categories", _other_than("all"), "", "{key}={}"
    SKIPPED_EMPTY = "data.empty_answers", _other_than("train"), "`data.empty_answers: skip`"
    SKIPPED_BAD = "data.on_bad_row", _is("skip"), "`data.on_bad_row: skip`", "{key}={}"
    TOO_LONG = "data.too_long", _other_than("truncate"), "`data.too_long` but truncate", "{key}={}"
    SPLIT = "data.too_long", _is("split"), "`data.too_long: split`", "{key}={}"
    TRAIN_ON = "data.train_on", _other_than("all"), "", "{key}={}"
    APART = "data.turns", _is("apart"), "`data.turns: apart`", "{key}={}"
    AS_GENERATED = "data.answers", _other_than("as_rendered"), "`data.answers: as_generated`", "{key}={}"
    LOST_TEXT = "data.lost_text", _other_than("refuse"), "`data.lost_text: note`", "{key}={}"
    TEMPLATE = "data.chat_template", bool, ""
    STYLE = "data.prompt", bool, "", "{key}={}"
    SYSTEM = "data.system", bool, ""
    STREAMING = "data.streaming", bool, ""
    FOLLOWED = "data.follow_s", bool, "", "{key}={:g}"
    HELD_OUT = "data.eval", bool, ""
    SHARE = "data.eval", lambda given: isinstance(given, int | float), "rows of `data.train` as `data.eval`", "{key}={}"
    SEVERAL_PATHS = "data.train", lambda given: not isinstance(given, str), "several sources", "several paths in {key}"
    OWN_SOURCES = "sources", lambda given: given > 1, "sources with options of their own", "{} sources of their own"
    WEIGHTED = "weights", bool, "sources with weights", "weights of sources"
    SLICED = "rows of sources", bool, "`rows` of a source", "{key}"
    FEW = "data.max_samples", bool, "", "{key}={}"
    MAPPED = "data.map", bool, "", "{key}={}"
    IN_ORDER = "data.shuffle", _is(False), "`data.shuffle: false`", "{key}=false"
    IMAGES = "images", bool, "images"
    ROUTED = "routed_experts of the data", bool, "`routed_experts` of the data"

    # The loop.
    EIGHT_BIT = "train.optimizer", _is("adamw_8bit"), "adamw_8bit", "{key}={}"
    LORA_FA = "train.optimizer", _is("lora_fa"), "lora_fa", "{key}={}"
    LORA_PLUS = "train.lora_plus_ratio", bool, ""
    SCHEDULE = "train.schedule", _other_than("linear"), "any schedule but linear", "{key}={}"
    NOISE = "train.neftune_alpha", bool, "", "{key}={:g}"
    ROUTER_LOSS = "train.router_aux_loss_coef", bool, "", "{key}={}"
    RECORD = "train.routing_record", bool, ""
    REPLAY = "train.routing_replay", bool, ""
    RECOMPUTED = "train.recompute", _other_than("none"), "", "{key}={}"
    KEPT_ATTENTION = "train.recompute", _is("keep_attention"), "`train.recompute: keep_attention`", "{key}={}"
    OFFLOADED = "train.recompute", _is("offload"), "`train.recompute: offload`", "{key}={}"
    GRAPHS = "train.cuda_graphs", _is("on"), "", "{key}={}"
    EPOCHS = "train.epochs", bool, ""
    EVAL_BY_EPOCH = "train.eval_every", _is_text, "`train.eval_every` by epochs", "{key}={}"
    SAVE_BY_EPOCH = "train.save_every", _is_text, "`train.save_every` by epochs", "{key}={}"
    SAMPLES = "train.sample_every", bool, "", "{key}={}"
    METRICS = "generate.metrics", bool, "`generate.metrics` in training", "{key}"
    MERGED = "train.merge_at_end", bool, ""
    TRACKERS = "train.track", lambda given: bool({*given} - {"tensorboard"}), "trackers but tensorboard", "{key}={}"
    ADAPTERS = "adapters", lambda given: given > 1, "several adapters", "{} adapters"
    RESUMED_FOLDER = "resume", lambda given: given not in (None, "auto"), "`--resume FOLDER`", "--resume {}"
    RESUMED = "resumes", bool, "`--resume` of a proof", "--resume"

    # Rollouts that a run makes.
    RL = "rl", bool, "rl", "rl"
    MADE = "rl", lambda given: not given.is_folder, "rl that generates", "rl"
    ENGINE = "rl", lambda given: given.is_engine, "rl with an engine", "rl.source={0.source}"
    RECORDED = "rl", lambda given: given.is_folder, "rl of recorded rollouts", "recorded rollouts"
    PUBLISHED = "rl", lambda given: bool(given.publish_to), "`rl.publish_to`", "rl.publish_to"
    TEMPERATURE = "rl", lambda rl: rl.temperature != 1.0, "`rl.temperature` but 1", "rl.temperature={0.temperature:g}"
    OLDER = (
        *("rl", lambda given: max(given.publish_every, given.updates) > 1, "`rl.publish_every`, `rl.updates`"),
        "rl.publish_every={0.publish_every}, rl.updates={0.updates}",
    )

    # The door: who asks.
    PROOF = "door", _is("meshlora verify"), "`meshlora verify`", "{}"
    PLAN = "door", _is("meshlora plan"), "`meshlora plan` of a run", "{}"
    LOAD = "door", _is("meshlora.load"), "`meshlora.load`", "{}"
    GENERATE = "door", _is("generate"), "`model.generate`", "{}"
    BATCHED = "door", _begins("generate_batch"), "`generate_batch`", "{}"
    COMMAND = "door", _is("meshlora generate"), "`meshlora generate`", "{}"
    LABELS = "door", _is("labels"), "`model(labels=)`", "{}"
    SCORES = "door", _is("token_scores"), "`token_scores`", "{}"
    TRAINER = "door", _is("Trainer"), "`MeshTrainer`", "{}"
    TRL = "door", _begins("trl."), "TRL's trainers", "{}"
    TRL_SAMPLES = "door", _is("trl.GRPOTrainer"), "GRPOTrainer", "{}"
    COMBINED = "door", _is("add_weighted_adapter"), "sums of adapters", "{}"
    IN_MEMORY = "door", _is("merge"), "`meshlora.merge`", "{}"
    BASE_ALONE = "door", _is("disable_adapter"), "`disable_adapter`", "{}"
    ROUTER_LOGITS = "output_router_logits", bool, "", "{key}=True"
    HIDDEN_STATES = "output_hidden_states", bool, "", "{key}=True"
    ATTENTIONS = "output_attentions", bool, "", "{key}=True"
    MANAGER = "door", _is("a manager of continuous batching"), "a manager of continuous batching", "{}"
    EVALUATED = "door", _is("--generate"), "`meshlora evaluate --generate`", "{}"
    # Arguments of loops and of trainers of others, and of texts.
    ARGUMENT = "argument", bool, "arguments that are refused by name", "{}"
    WHOLE_OPTIMIZER = "optimizer", bool, "optimizers that use whole matrices", "{}"
    LOSS_SCALE = "fp16", bool, "`fp16` of Trainer", "fp16=True"
    BY_LENGTH = "train_sampling_strategy", _BY_LENGTH.__contains__, "`train_sampling_strategy` by length", "{key}={}"
    UNSIZED = "an iterable dataset", bool, "an iterable dataset"
    OWN_LOSS = "a compute_loss of your own", bool, "a `compute_loss` that divides by itself"
    OWN_MEAN = "mean", bool, "models that take no `num_items_in_batch`", "{}"
    SAMPLED = "generate.do_sample", bool, ""
    BEAMS = "generate.num_beams", lambda given: given > 1, "", "beams"
    GPT2_BEAM = "generate.search", _is("gpt2_beam"), "`generate.search: gpt2_beam`", "{key}={}"
    PROBABILITIES = "log-probabilities", bool, "log-probabilities of texts"
    GPU = "device", _is("cuda"), "a GPU", "a GPU"
    # Of a proof.
    PARTS = "parts of a reference", bool, "`pieces`, `share_experts` of a reference", "a reference with {}"
    ROUNDED = "proof.dtype", _other_than("float64"), "a proof below float64", "a proof in {}"
    ON_GPU = "proof.device", _other_than("cpu"), "a proof on GPUs", "a proof on {}"
    WHOLE_MODEL = "proof.model", bool, "a proof of a checkpoint", "--model {}"

    def __init__(self, key: str, predicate: Callable[[Any], bool], of_docs: str, said: str = "{key}") -> None:
        self.key, self.predicate, self.said = key, predicate, said
        self.of_docs = of_docs or f"`{key}`"

    def is_in(self, asked: Asked) -> bool:
        """Whether it is asked for."""
        # Not known yet is not asked for: `check` is called again where more is known.
        value = asked.get(self.key)
        return value is not None and bool(self.predicate(value))

    def given(self, asked: Asked) -> str:
        """As the one who asks has given it: by the option of a run file, or by that of `meshlora verify`."""
        words = self.said.format(asked[self.key], key=self.key)
        if asked.get("door") != "meshlora verify" or not words.startswith(("data.", "train.")):
            return words
        name, equals, value = words.partition("=")
        option = f"--{name.rpartition('.')[2].replace('_', '-')}"
        if equals:
            return f"{option} {value}"
        return option


KEYS = frozenset(feature.key for feature in Feature)


def features_of(asked: Asked) -> list[Feature]:
    """What is asked for, in the order of `Feature`."""
    unknown = asked.keys() - KEYS
    assert not unknown, unknown
    return [feature for feature in Feature if feature.is_in(asked)]
