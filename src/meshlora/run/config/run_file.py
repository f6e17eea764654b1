"""The content of a run file as a tree of dataclasses.

Owns: names, types, defaults, and rules that need no file and no model. Does not own: objectives
(`meshlora_ground.objective`), YAML (`run.config.file`), whether model, data and topology fit together (`run.prepare`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from meshlora.plan.base_options import BaseOptions
from meshlora.plan.features import KEYS, Asked
from meshlora.plan.pairs import check
from meshlora.reading.row_slices import Slice
from meshlora.run.config.endings import EarlyStopping, LossSpike
from meshlora.run.config.metrics import RegexMetric, check_metrics, code_of, name_of
from meshlora.run.config.rl import RlConfig
from meshlora_ground.errors import UserError, did_you_mean
from meshlora_ground.numbers import check_numbers, number, require
from meshlora_ground.objective import Sft
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.objectives.kinds import AnyObjective
from meshlora_ground.objectives.referenced import Referenced
from meshlora_ground.private import CACHE
from meshlora_ground.reading import check_path
from meshlora_ground.topology import Topology

# Upper limits: far above any use, and below the point where arithmetic or a library fails.
_STEPS, _RATE, _FACTOR = 10**9, 1e3, 1e6
_LR = 10  # AdamW moves each element by as much in one step: hundreds are percent, or a slip
Format = Literal[
    "auto",
    "text",
    "prompt_completion",
    "context_completion",
    "messages",
    "sharegpt",
    "alpaca",
    "user_assistant",
    "xlam",
    "tokens",
    "preference",
    "feedback",
]
Schedule = Literal[
    "linear",
    "cosine",
    "cosine_of_run",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "inverse_sqrt",
    "warmup_stable_decay",
    "cycle",
]
# Other names that transformers has for them.
SCHEDULES_TOO: Mapping[str, Schedule] = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
# Options of a schedule -> their defaults, and the schedules that read them.
_FALLING = ("linear", "cosine", "cosine_of_run", "cosine_with_restarts", "polynomial", "warmup_stable_decay")
OF_SCHEDULES: Mapping[str, tuple[object, tuple[str, ...]]] = {
    "min_lr": (0.0, _FALLING),
    "num_cycles": (1, ("cosine_with_restarts",)),
    "power": (1.0, ("polynomial",)),
    "timescale": (0, ("inverse_sqrt",)),
    "decay_steps": (0, ("warmup_stable_decay",)),
    "decay_type": ("linear", ("warmup_stable_decay",)),
    "cycle": ({}, ("cycle",)),
}
# How often, by epochs: at the end of each, or so many times in it.
BY_EPOCH = re.compile(r"epoch(/[1-9]\d{0,8})?")


@dataclass(frozen=True)
class ModelConfig(BaseOptions):
    """The base model.

    Attributes:
        path: its folder, or its name on the hub.
        revision: of the name on the hub; default: main.
        add_tokens: added to the tokenizer and the vocabulary; of_tokenizer: what the tokenizer has beyond the rows.
        add_special_tokens: the same of special tokens.
    """

    path: str
    revision: str | None = None
    add_tokens: list[str] | Literal["of_tokenizer"] | None = None
    add_special_tokens: list[str] | None = None

    def __post_init__(self) -> None:
        check_path("model.path", self.path)
        for name in ("add_tokens", "add_special_tokens"):
            given = getattr(self, name)
            require(given is None or (bool(given) and "" not in [*given]), f"model.{name}", given, "a list of tokens")


@dataclass(frozen=True)
class Source:
    """One source of data, with options of its own.

    Attributes:
        path: as of data.train: a path, or several.
        weight: its share of the draws, beside the weights of the others.
        split: of a folder with several, or of a name on the hub.
        rows: a slice of its rows, as in "100:200", ":5%" or "95%:" (`reading.row_slices`).
        columns: in place of data.columns. format: in place of data.format.
    """

    path: str | list[str]
    weight: float | None = number(None, "above 0", most=_FACTOR)
    split: str | None = None
    rows: str = ""
    columns: dict[str, str] | None = None
    format: Format | None = None

    def __post_init__(self) -> None:
        require(bool(self.path), "path", self.path, "one or more")
        check_numbers("data.train", self)
        Slice(self.rows)
        for path in self.paths:
            check_path("path", path)

    @property
    def paths(self) -> list[str]:
        """Its paths."""
        return [self.path] if isinstance(self.path, str) else self.path


Given = str | Source | list[str | Source] | None


def sources_of(given: Given) -> list[Source]:
    """The sources of `data.train` or `data.eval`."""
    if given is None:
        return []
    each = given if isinstance(given, list) else [given]
    return [one if isinstance(one, Source) else Source(one) for one in each]


def are_read_at_once(given: Given, *, is_limited: bool) -> bool:
    """Whether no source has options of its own. is_limited: `data.max_samples` is of each source."""
    sources = sources_of(given)
    return all(each == Source(each.path) for each in sources) and (len(sources) < 2 or not is_limited)


def paths_of(given: Given) -> list[str]:
    """The paths of all sources of `data.train` or `data.eval`."""
    return [path for each in sources_of(given) for path in each.paths]


_MAP = re.compile(r".+\.py:[A-Za-z_]\w*", re.ASCII)


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclass(frozen=True)
class DataConfig:
    """The data: files, folders or patterns of JSON, CSV, Parquet or `context||completion`, or saved `datasets`.

    Attributes:
        train, eval: a path, a source, or a list of these. eval: or rows of train, drawn by train.seed, that are never
            trained (`reading.held_rows`): a share of them, below 1, or their number.
        columns: our field names -> theirs. format: of the rows (`reading.formats`), where their fields do not say it.
        map: file.py:function, a user's function that makes a row, a list of rows, or None of each row
            (`reading.row_map`).
        prompt: rows of an instruction are plain text in this style (`reading.prompt_styles`). system: what the system
            says in conversations in which it says nothing.
        max_samples: only the first N rows of each source. shuffle: False: each epoch has the order of the files.
        max_length: the most tokens of a sequence; model: as many as the model has positions for.
        packing: several sequences in one row; they do not attend to each other.
            True: in rows of up to max_length tokens; auto: those of a micro-batch, where that is proved; rows: in rows
            that are made of all of the data, and are its examples (`reading.whole_rows`).
        too_long: what becomes of a record with more tokens (`reading.too_long`). train_on: which turns are trained: all
            of the assistant, its last, everything, or those of these roles (`reading.train_on`).
        turns: a conversation is one sequence, or there is one for each trained answer (`reading.answers_apart`).
        answers: as the chat template renders them, or as they are given, after the generation prompt.
        lost_text: what becomes of text of trained answers that the chat template leaves out: it is refused, or said.
        empty_answers: what becomes of answers that say nothing: their end is trained, or they are left out.
        on_bad_row: what becomes of rows that cannot be trained, malformed ones or those that the chat template refuses:
            an error, or they are passed over and said, one in ten at most (`reading.bad_rows`).
        date: the day that a chat template writes if it asks for one, as in 2026-01-15; default: that on which the run
            was begun, in UTC.
        chat_template: file of a chat template in place of the tokenizer's own, or the name of one that it has, of one
            of ours (`reading.named_templates`), or of one that an installed TRL has for training. stop_tokens: at which
            the model stops, beside those that it says itself.
        separator: text between prompt and completion, special tokens included, as in <|endoftext|>.
        eval_categories: of WebNLG, the records of eval whose category is in its training data, or is not.
        streaming: records are not held in memory, and tokens stay in the file of the cache.
        follow_s: train is a folder of rollouts that grows, one file a step (`reading.stream`); a step waits this long
            for its file.
        cache_dir: folder of tokenised files.
        eval_limit: use only the first N examples of eval. sample_prompts: prompts continued at `train.sample_every`;
            default: the first prompts of eval.
    """

    train: str | Source | list[str | Source]
    eval: int | float | str | Source | list[str | Source] | None = None
    columns: dict[str, str] | None = None
    format: Format = "auto"
    map: str | None = None
    prompt: Literal["alpaca", "qa"] | None = None
    system: str | None = None
    max_samples: int | None = number(None, "at least 1", most=10**12)
    shuffle: bool = True
    max_length: int | Literal["model"] = number(1024, most=10**8)
    packing: bool | Literal["auto", "rows"] = "auto"
    too_long: Literal["truncate", "drop", "split", "error"] = "truncate"
    train_on: (
        Literal["all", "last", "everything"] | list[Literal["system", "developer", "user", "assistant", "tool"]]
    ) = "all"
    turns: Literal["whole", "apart"] = "whole"
    answers: Literal["as_rendered", "as_generated"] = "as_rendered"
    lost_text: Literal["refuse", "note"] = "refuse"
    empty_answers: Literal["train", "skip"] = "train"
    on_bad_row: Literal["error", "skip"] = "error"
    chat_template: str | None = None
    stop_tokens: list[str] = field(default_factory=list)
    date: str | None = None
    separator: str = ""
    eval_categories: Literal["all", "seen", "unseen"] = "all"
    streaming: bool = False
    follow_s: float | None = number(None, "above 0", most=10**7)
    cache_dir: str = str(CACHE / "tokens")
    eval_limit: int | None = number(None, "at least 1", most=10**12)
    sample_prompts: list[str] | None = None

    def __post_init__(self) -> None:
        if (share := self.eval_share) is not None:
            is_legal = share >= 1 if isinstance(share, int) else 0 < share < 1
            rule = "a share of the rows of data.train, above 0 and below 1, a whole number of them, or a file"
            require(is_legal, "data.eval", share, rule)
        for name, given in {"data.train": self.train, "data.eval": self.eval_files}.items():
            for path in given if isinstance(given, list) else [given]:
                if isinstance(path, str):
                    check_path(name, path)
        if self.map is not None:
            check_path("data.map", self.map)
            require(bool(_MAP.fullmatch(self.map)), "data.map", self.map, "path/to/file.py:function")
        if any(each.weight is not None for each in sources_of(self.eval_files)):
            raise UserError("data.eval with a weight", "an evaluation reads every example once", "leave it out")
        for name in ("train", "eval", "sample_prompts"):
            require(getattr(self, name) != [], f"data.{name}", [], "one or more")
        check_path("data.cache_dir", self.cache_dir, knows_home=True)
        check_path("data.chat_template", self.chat_template)
        require(self.system is None or bool(self.system.strip()), "data.system", repr(self.system), "a text")
        if self.date is not None:
            require(_is_day(self.date), "data.date", repr(self.date), "a day, as in 2026-01-15")
        check_numbers("data", self)
        if self.eval_limit is not None and self.eval is None:
            raise UserError(f"data.eval_limit={self.eval_limit}", "it has no effect without data.eval", "give both")
        if self.eval_categories != "all" and self.eval is None:
            given = f"data.eval_categories={self.eval_categories}"
            raise UserError(given, "it has no effect without data.eval", "give both")

    def num_read_apart(self, given: Given) -> int:
        """How many of the sources are read by themselves, as one has options of its own; 1: all are read at once."""
        is_limited = self.max_samples is not None
        return 1 if are_read_at_once(given, is_limited=is_limited) else len(sources_of(given))

    @property
    def longest(self) -> int:
        """`max_length`, once the model is known (`run.config.file`)."""
        assert isinstance(self.max_length, int), "it is a number since the run file was read"
        return self.max_length

    @property
    def eval_share(self) -> int | float | None:
        """The share of the rows of `train`, or their number, that is evaluated in place of files."""
        return self.eval if isinstance(self.eval, int | float) else None

    @property
    def eval_files(self) -> Given:
        """What is evaluated, if it has files of its own."""
        return None if isinstance(self.eval, int | float) else self.eval


@dataclass(frozen=True)
class GenerateConfig:
    """How text is generated: options of transformers' `generate`, with its names and defaults.

    Attributes:
        max_new_tokens: maximum tokens of a continuation. num_beams: 1 is no beam search.
        length_penalty: in beam search, the exponent of the length that divides a beam's score.
        no_repeat_ngram_size: no n-gram of this size occurs twice in a sequence; 0: no such rule.
        search: transformers: its `generate`; gpt2_beam: the beam search of microsoft/LoRA (`run.gpt2_beam`).
        stop: texts that end a continuation and are not part of it.
        do_sample: sample with temperature and top_p.
        temperature: divides the logits; top_p: the likeliest tokens that make up this probability (nucleus).
        batch_size: prompts at once. seed: of do_sample.
        metrics: what the answers to the prompts of data.eval are measured by (`run.config.metrics`), in evaluations of
            a run too. limit: continue only the first N prompts.
    """

    max_new_tokens: int = number(64, "at least 1", most=10**8)
    num_beams: int = number(1, "at least 1", most=10**4)
    length_penalty: float = number(1.0, most=_RATE)
    no_repeat_ngram_size: int = number(0, "not negative", most=10**8)
    search: Literal["transformers", "gpt2_beam"] = "transformers"
    stop: list[str] = field(default_factory=list)
    do_sample: bool = False
    temperature: float = number(1.0, "above 0", most=_FACTOR)
    top_p: float = number(1.0, "above 0, at most 1")
    batch_size: int = number(16, "at least 1", most=10**6)
    seed: int = number(0, "not negative")
    metrics: list[str | RegexMetric] = field(default_factory=list)
    limit: int | None = number(None, "at least 1", most=10**12)

    def __post_init__(self) -> None:
        check_numbers("generate", self)
        check_metrics(self.metrics)
        require(self.seed < 2**63, "generate.seed", self.seed, "below 2**63")
        if self.length_penalty != 1.0 and self.num_beams == 1 and self.search == "transformers":
            raise UserError("generate.length_penalty", "it has no effect without beams", "give generate.num_beams")
        if not all(self.stop):
            rule = "every text would end before its first token"
            raise UserError("generate.stop: an empty text", rule, "leave it out")
        check({"generate.search": self.search, "generate.do_sample": self.do_sample})
        for name in ("temperature", "top_p"):
            if getattr(self, name) != 1.0 and not self.do_sample:
                raise UserError(f"generate.{name}", "it has no effect without do_sample", "give generate.do_sample")


@dataclass(frozen=True)
class TrainConfig:
    """The loop. All sizes are in sequences and global: they do not change with the topology.

    Attributes:
        output: folder for the adapter, its checkpoints and `metrics.jsonl`; overwrite: allow a folder with a run.
        steps: optimizer steps; epochs: or passes over the data. Exactly one is given.
        batch_size: sequences per optimizer step, over all ranks; micro_batch_size: sequences (with packing: rows) at
            once on one dp rank.
        lr: peak learning rate. schedule: its course by optimizer step after a linear warm-up over warmup_steps
            (`run.learning_rate`): linear, polynomial or cosine to min_lr, constant, inverse_sqrt, warmup_stable_decay
            (constant, then to min_lr in the last decay_steps), or cycle: piecewise linear through the points
            `{step: rate}` of cycle, without lr and warm-up.
        warmup_steps: of a linear rise from 0 to lr. warmup_ratio: or their share of all steps, rounded up.
        warmup_from_zero: the first step has the rate 0, and not 1/warmup_steps of the peak.
        min_lr: of the last step. decay_steps: of warmup_stable_decay. decay_type: the course of its decay.
        num_cycles: of cosine_with_restarts, the cosines. power: of polynomial. timescale: of inverse_sqrt, in steps; 0:
            the warm-up.
        cycle: `{step: rate}`, the points of that schedule.
        optimizer: adamw; adamw_8bit, with moments in 8 bits (`run.eight_bit`); or lora_fa, which trains B alone
            (`run.lora_fa`).
        min_8bit_size: of adamw_8bit: elements of a parameter from which on its moments have 8 bits.
        weight_decay, beta1, beta2, eps: of the optimizer.
        max_grad_norm: clipping threshold of the global gradient norm; 0: no clipping.
        objective: the training objective with its parameters: docs/objectives.md.
        neftune_alpha: of the noise on embedded tokens in training, uniform within alpha / sqrt(tokens of the sequence *
            width); 0: none.
        router_aux_loss_coef: weight of the routers' load-balancing loss; 0: not computed.
        recompute: activation checkpointing of decoder layers: none; full; keep_attention: all of them, but what sdpa
            gave is kept; offload: full, with the layers' inputs in host memory; or a number n: every n-th layer.
        cuda_graphs: forward and backward of a micro-batch recorded and replayed as a CUDA graph: off; auto, where it
            can be; on, or refused.
        routing_record: folder to record every token's experts in every step; routing_replay: folder of such a record,
            whose experts replace the routers' choices.
        lora_plus_ratio: LoRA+: the learning rate of B over that of A; None: the same for both.
        lora_plus_embedding_lr: LoRA+: the peak learning rate of factors on the embedding.
        seed: of fresh factors, the order of the data, dropout and noise.
        eval_every, save_every: in optimizer steps, or epoch, or epoch/k, k times in one; 0: only at the end.
        log_every: steps between printed lines.
        keep_last: number of newest checkpoints kept, 0: all; keep_best: also keep the one with the lowest
            evaluation loss, or the best early_stopping.metric.
        early_stopping: end the run once the evaluation loss no longer falls, or a metric no longer rises.
        on_spike: what is done when the loss of steps jumps up: stop, or note it.
        on_save_error: whether a checkpoint that cannot be written stops the run. on_nonfinite: stop at a loss or
            gradient that is not finite, or skip the step.
        timeout_s: timeout of collectives in seconds.
        on_fewer: if started with another number of processes than the topology has, as by torchrun after a node was
            lost: stop, or continue on a topology that fits.
        deterministic: the same bytes on the same topology and devices, on GPUs too, where kernels are slower for it.
        require_fast: a slow path (`run.slow_paths`) is an error.
        replica_check_every: steps between comparisons of the replicas of each factor, which are also compared before
            every save; 0: never.
        decay_biases_and_norms: apply weight decay to biases and norm weights too.
        sample_every: steps between greedy continuations of some prompts; 0: never.
        merge_at_end: finally also write the whole model with the adapter merged.
        track: trackers that also receive the metrics (`run.watch.tracking`).
    """

    output: str
    steps: int | None = number(None, "at least 1", most=_STEPS)
    epochs: float | None = number(None, "above 0", most=10**6)
    batch_size: int = number(16, "at least 1", most=10**6)
    micro_batch_size: int = number(4, "at least 1", most=10**6)
    lr: float = number(2e-4, "above 0", most=_LR)
    schedule: Schedule = "linear"
    warmup_steps: int = number(0, "not negative", most=_STEPS)
    warmup_ratio: float = number(0.0, "in [0, 1)")
    warmup_from_zero: bool = False
    min_lr: float = number(0.0, "not negative")
    num_cycles: int = number(1, "at least 1", most=_STEPS)
    power: float = number(1.0, "above 0", most=_FACTOR)
    timescale: int = number(0, "not negative", most=_STEPS)
    decay_steps: int = number(0, "not negative", most=_STEPS)
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "linear"
    cycle: dict[int, float] = field(default_factory=dict)
    optimizer: Literal["adamw", "adamw_8bit", "lora_fa"] = "adamw"
    min_8bit_size: int = number(4096, "at least 1", most=10**12)
    weight_decay: float = number(0.0, "not negative", most=_RATE)
    decay_biases_and_norms: bool = True
    beta1: float = number(0.9, "in [0, 1)")
    beta2: float = number(0.999, "in [0, 1)")
    eps: float = number(1e-8, "above 0", most=_RATE)
    max_grad_norm: float = number(1.0, "not negative", most=1e30)
    objective: Annotated[AnyObjective, pydantic.Discriminator("kind")] = field(default_factory=Sft)
    neftune_alpha: float = number(0.0, "not negative", most=_FACTOR)
    router_aux_loss_coef: float = number(0.0, "not negative", most=_FACTOR)
    recompute: str | int = number("none", most=10**6)
    cuda_graphs: Literal["off", "auto", "on"] = "off"
    routing_record: str | None = None
    routing_replay: str | None = None
    lora_plus_ratio: float | None = number(None, "above 0", most=_FACTOR)
    lora_plus_embedding_lr: float = number(1e-6, "above 0", most=_RATE)
    seed: int = number(0, "not negative")
    eval_every: int | str = number(0, "not negative", most=_STEPS)
    save_every: int | str = number(0, "not negative", most=_STEPS)
    sample_every: int = number(0, "not negative", most=_STEPS)
    log_every: int = number(10, "at least 1", most=_STEPS)
    merge_at_end: bool = False
    track: list[str] = field(default_factory=list)
    replica_check_every: int = number(100, "not negative", most=_STEPS)
    keep_last: int = number(0, "not negative", most=_STEPS)
    keep_best: bool = False
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    on_spike: LossSpike = field(default_factory=LossSpike)
    on_save_error: Literal["stop", "continue"] = "stop"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    timeout_s: float = number(600.0, "above 0", most=10**7)
    on_fewer: Literal["stop", "continue"] = "stop"
    deterministic: bool = False
    require_fast: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("output", "routing_record", "routing_replay"):
            check_path(f"train.{name}", getattr(self, name))
        check_numbers("train", self)
        require(self.seed < 2**63, "train.seed", self.seed, "below 2**63")
        by_name = "none", "full", "keep_attention", "offload"
        is_known = self.recompute in by_name if isinstance(self.recompute, str) else self.recompute >= 1
        rule = "none, full, keep_attention, offload or a number n from 1, for every n-th layer"
        require(is_known, "train.recompute", self.recompute, rule)
        self._check_schedule()
        self._check_keeping()
        if self.lora_plus_ratio is None and self.lora_plus_embedding_lr != 1e-6:
            raise UserError("train.lora_plus_embedding_lr", "it has no effect without lora_plus_ratio", "give both")
        if self.min_8bit_size != 4096 and self.optimizer != "adamw_8bit":
            given = f"train.min_8bit_size with train.optimizer={self.optimizer}"
            raise UserError(given, "it has no effect: it is of moments in 8 bits", "it goes with optimizer: adamw_8bit")
        if (self.steps is None) == (self.epochs is None):
            given = "neither" if self.steps is None else "both"
            raise UserError(f"{given} of train.steps and train.epochs", "a run has exactly one length", "give one")

    @property
    def peak_lr(self) -> float:
        """The highest rate of the schedule."""
        return max(self.cycle.values()) if self.schedule == "cycle" else self.lr

    def _check_keeping(self) -> None:
        """Rules of the options that keep checkpoints."""
        for name in ("eval_every", "save_every"):
            every = getattr(self, name)
            rule = "a number of steps, epoch, or epoch/k for k times in an epoch, as in epoch/4"
            require(not isinstance(every, str) or bool(BY_EPOCH.fullmatch(every)), f"train.{name}", repr(every), rule)
        if self.keep_best and not self.eval_every:
            raise UserError("train.keep_best", "the best is known by evaluations", "give train.eval_every")
        if self.early_stopping.patience and not self.eval_every:
            raise UserError("train.early_stopping", "it is decided by evaluations", "give train.eval_every")
        if self.early_stopping.is_of_answers and not (self.early_stopping.patience or self.keep_best):
            given = f"train.early_stopping.metric={self.early_stopping.metric}"
            raise UserError(given, "it has no effect by itself", "give early_stopping.patience, or keep_best: true")
        if self.keep_last and not (self.save_every or self.keep_best):
            raise UserError("train.keep_last", "it has no effect without checkpoints", "give train.save_every")

    def _check_schedule(self) -> None:
        """Rules of the options of each schedule."""
        if self.warmup_steps and self.warmup_ratio:
            given = f"train.warmup_steps={self.warmup_steps} and train.warmup_ratio={self.warmup_ratio:g}"
            raise UserError(given, "a warm-up has one length", "give one")
        if self.warmup_from_zero and not (self.warmup_steps or self.warmup_ratio):
            rule = "it has no effect without train.warmup_steps or train.warmup_ratio"
            raise UserError("train.warmup_from_zero", rule, "give both")
        for name, (default, schedules) in OF_SCHEDULES.items():
            if getattr(self, name) != default and self.schedule not in schedules:
                rule = f"it has no effect with train.schedule={self.schedule}"
                raise UserError(f"train.{name}", rule, f"it goes with {' or '.join(schedules)}")
        require(self.min_lr <= self.lr, "train.min_lr", self.min_lr, f"at most train.lr={self.lr}")
        if self.schedule == "warmup_stable_decay":
            require(self.decay_steps >= 1, "train.decay_steps", self.decay_steps, "at least 1 with this schedule")
        if self.schedule == "cycle":
            require(len(self.cycle) >= 2, "train.cycle", self.cycle, "two points or more, {step: rate, step: rate}")
            require(min(self.cycle) >= 0, "train.cycle", self.cycle, "of steps from 0")
            require(min(self.cycle.values()) >= 0, "train.cycle", self.cycle, "of rates that are not negative")
            require(max(self.cycle.values()) > 0, "train.cycle", self.cycle, "of rates of which one is above 0")
            require(max(self.cycle.values()) <= _RATE, "train.cycle", self.cycle, f"of rates of at most {_RATE:,.0f}")
            require(max(self.cycle) <= _STEPS, "train.cycle", self.cycle, f"of steps of at most {_STEPS:,}")
            for name in ("warmup_steps", "warmup_ratio"):
                require(not getattr(self, name), f"train.{name}", getattr(self, name), "0 with train.schedule=cycle")


# Content of an output folder; one that holds any of it is not overwritten unless `overwrite` is set.
RUN_CONTENT = ("metrics.jsonl", "adapter", "initial", "checkpoints", "merged", "rollouts")
# Fields of `peft.LoraConfig`, and ours beside them, that `RunConfig.asked` knows.
_OF_ADAPTER = (
    *("init_lora_weights", "use_dora", "lora_bias", "lora_dropout", "bias", "modules_to_save"),
    *("trainable_token_indices", "alora_invocation_tokens", "pieces", "share_experts"),
)
# Keys that each adapter of a run may set for itself; all others are shared.
PER_ADAPTER = {
    "data": {
        *("train", "eval", "columns", "format", "max_length", "too_long", "train_on", "separator"),
        *("eval_limit", "eval_categories", "prompt", "system"),
    },
    "train": {
        *("steps", "epochs", "batch_size", "lr", "schedule", "warmup_steps", "warmup_ratio", "warmup_from_zero"),
        *("min_lr", "num_cycles", "power", "timescale", "decay_steps", "decay_type", "cycle"),
        *("weight_decay", "beta1", "beta2", "eps", "max_grad_norm", "lora_plus_ratio", "seed"),
        *("eval_every", "save_every", "keep_last", "keep_best", "early_stopping", "on_spike"),
    },
}


@dataclass(frozen=True)
class RunConfig:
    """A whole run.

    Attributes:
        model: the base model. data: what is trained on. train: the loop.
        lora: fields of `peft.LoraConfig`; adapter: or the folder of an adapter to continue from.
        topology: as in `dp=2,tp=2,sp`; a missing dp is inferred from the number of processes.
        device: where ranks compute.
        preflight: where the proof before the first step runs: on CPUs in float64; also on the devices of the run in
            float32; auto: on these too if they are GPUs; off: nowhere.
        generate: options of `meshlora evaluate --generate`, and metrics on answers.
        rl: how rollouts are made, of `meshlora rl`.
        preset: a recipe for values missing in the file (`run.config.presets`), already filled in here.
    """

    # Of this tree as `run.config.file` reads it, groups included.
    __pydantic_config__: ClassVar[Any] = {"strict": True, "extra": "forbid", "allow_inf_nan": False}

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    lora: dict[str, Any] | None = None
    adapter: str | None = None
    topology: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    preflight: Literal["auto", "cpu", "device", "off"] = "auto"
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    rl: RlConfig | None = None
    preset: str | None = None

    @property
    def reference(self) -> str | None:
        """Folder of the adapter with which the objective compares; None: it compares with the base, or with nothing."""
        objective = self.train.objective
        if not isinstance(objective, Referenced) or not objective.needs_base or objective.reference == "base":
            return None
        return self.adapter if objective.reference == "start" else objective.reference

    @property
    def teacher(self) -> str | None:
        """Folder of the second model that the adapter is distilled from, if there is one."""
        objective = self.train.objective
        return objective.folder if isinstance(objective, Distill) else None

    def __post_init__(self) -> None:
        check_path("adapter", self.adapter)
        if (self.lora is None) == (self.adapter is None):
            given = "neither" if self.lora is None else "both"
            rule = "a run starts from one of them"
            raise UserError(f"{given} of lora and adapter", rule, "give lora: {r: 16, ...}, or adapter:")
        if self.adapter is not None and (self.model.add_tokens or self.model.add_special_tokens):
            rule = "an adapter is continued on the vocabulary that it has"
            raise UserError("model.add_tokens with adapter", rule, "leave it out, or start with lora:")
        if self.train.eval_every and self.data.eval is None:
            rule = "it has no effect without data.eval"
            raise UserError(f"train.eval_every={self.train.eval_every}", rule, "give data.eval")
        if self.train.sample_every and self.data.eval is None and self.data.sample_prompts is None:
            way_out = "give data.sample_prompts, or data.eval with prompts"
            raise UserError(f"train.sample_every={self.train.sample_every}", "there is nothing to continue", way_out)
        if self.data.sample_prompts is not None and not self.train.sample_every:
            raise UserError("data.sample_prompts", "it has no effect without train.sample_every", "give both")
        watched, known = self.train.early_stopping, list(map(name_of, self.generate.metrics))
        if watched.is_of_answers and watched.metric not in known:
            way_out = did_you_mean(watched.metric, known) if known else "give generate.metrics: [exact_match]"
            rule = "it is neither loss nor one of generate.metrics"
            raise UserError(f"train.early_stopping.metric={watched.metric}", rule, way_out)
        if self.rl is not None:
            self._check_rl(self.rl)
        check(self.asked)

    @property
    def inputs(self) -> dict[str, list[str]]:
        """Option -> paths of everything that a run reads."""
        given = {"model.path": self.model.path, "adapter": self.adapter, "train.objective.reference": self.reference}
        given["train.objective.teacher"] = self.teacher
        given["data.chat_template"] = self.data.chat_template
        given["data.map"] = self.data.map and self.data.map.rpartition(":")[0]
        found = {option: [path] for option, path in given.items() if path is not None}
        found |= {"data.train": paths_of(self.data.train), "data.eval": paths_of(self.data.eval_files)}
        if self.train.routing_replay is not None:
            found["train.routing_replay"] = [self.train.routing_replay]
        if code := code_of(self.generate.metrics):
            found["generate.metrics"] = [*map(str, code)]
        if self.rl is not None:
            found["rl.source"] = [self.rl.source] if self.rl.is_folder else []
            found["rl.rewards"] = self.rl.files
        return found

    def with_data(self, **options: Any) -> RunConfig:
        """The run with other options of `data`."""
        return replace(self, data=replace(self.data, **options))

    @property
    def is_stream(self) -> bool:
        """Whether its data come step by step."""
        return self.data.follow_s is not None or self.rl is not None

    def _check_rl(self, rl: RlConfig) -> None:
        """Refuse what does not go with rollouts that the run makes."""
        train = self.train
        if train.objective.is_of_rollouts:
            require(bool(rl.rewards), "rl.rewards", [], "one or more")
            require(rl.completions >= 2, "rl.completions", rl.completions, "at least 2: those of a prompt are compared")
            require(rl.on_policy == 1, "rl.on_policy", rl.on_policy, "1: the data hold no rewards")
        elif rl.rewards:
            given = f"rl.rewards with train.objective={train.objective.kind}"
            raise UserError(given, "the teacher alone says what a completion is worth", "leave out rl.rewards")
        if rl.on_policy < 1 and (rl.completions > 1 or rl.updates > 1 or not rl.is_own):
            given = f"rl.on_policy={rl.on_policy:g}"
            rule = "a prompt has one completion in the data, which is trained on in one step"
            raise UserError(given, rule, "give completions: 1, and neither updates nor source")
        if train.batch_size % rl.completions:
            given = f"train.batch_size={train.batch_size} with rl.completions={rl.completions}"
            raise UserError(given, "a step has whole groups", f"use a multiple of {rl.completions}")
        if isinstance(self.data.max_length, int) and rl.max_new_tokens >= self.data.max_length:
            given = f"rl.max_new_tokens={rl.max_new_tokens} with data.max_length={self.data.max_length}"
            raise UserError(given, "a sequence holds the prompt, too", "raise data.max_length")

    @property
    def asked(self) -> Asked:
        """What is asked for, as far as the run file says it: see `plan.features`."""
        groups = {"model": self.model, "data": self.data, "train": self.train}
        found = {f"{group}.{name}": value for group, options in groups.items() for name, value in vars(options).items()}
        found |= {name: value for name, value in (self.lora or {}).items() if name in _OF_ADAPTER}
        found |= {"topology": Topology.parse(self.topology), "rl": self.rl, "reference": self.reference}
        every = list(map(sources_of, (self.data.train, self.data.eval_files)))
        found["sources"] = max(map(self.data.num_read_apart, (self.data.train, self.data.eval_files)))
        found["weights"] = any(each.weight is not None for of_option in every for each in of_option)
        found["rows of sources"] = any(each.rows for of_option in every for each in of_option)
        if self.rl is not None:  # the prompts of rl may be in several files
            del found["data.train"]
        return {key: value for key, value in found.items() if key in KEYS}
