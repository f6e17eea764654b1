"""A case: everything that determines the result of one process, and nothing else, no topology for example.

Owns: the training tokens, and the hash under which a reference run is cached, too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.encoded import prompts, with_start
from meshlora_ground.errors import UserError
from meshlora_ground.further_inputs import KnownInputs
from meshlora_ground.versions import digest, sources_of, version_of, versions
from meshlora_judge.settings import Base, Training

# Odd lengths, so that a sequence length is never mistaken for a number of heads or a width, and short ones: a cp rank
# has none of their tokens, a convolution reaches beyond them, and of a single token nothing is predicted.
_LENGTHS = (21, 2, 19, 1, 17, 13, 9, 3)
# Checkpoint files above this size are identified by size and modification time instead of content.
_HASHED_BYTES = 256 * 2**20
_INVENTORY = "files.json"
REFERENCE, TEACHER = "reference", "teacher"  # folders beside that of the adapter
_RECORDED = 5  # tokens that a teacher's record has
_CONTEXT = 4  # tokens that a teacher alone sees


@dataclass(frozen=True, kw_only=True)
class Case(Training):
    """One training problem. No option of AdamW is at its default, so that an ignored one shows.

    Attributes:
        model: checkpoint folder. adapter: folder of the PEFT adapter both sides start from, A and B non-zero.
        model_type: from the model's configuration. dtype: dtype of the base.
        lora: the user's LoRA configuration as plain values, for fresh adapters.
        reference: that of the frozen adapter that the objective compares with, in the folder `REFERENCE`; None: it
            compares with the base, or with nothing.
        eva: that of an adapter which begins with `init_lora_weights: eva`; None: no proof of such a start.
        input_ids, is_trained, offsets: the sequences, as in `TokenizedDataset`.
        max_grad_norm: low enough to clip.
        eps: AdamW's; near the size of a clipped gradient, so that AdamW does not turn the rounding of tiny elements
            into large steps, and a gradient of the wrong size shows in its update.
        columns, rows_per_example, targets, predicts_next: as in `TokenizedDataset`.
        attn_implementation: of both sides, as in transformers.
        quantization: of the frozen base: nf4, int8, mxfp4, nvfp4, fp8; keep, as it is stored; or None.
        compute: products of the frozen linears in float8: fp8, fp8_backward; or None.
        kernels: of our side, as in a run file; the reference has none.
        packing: our side packs several sequences into a row, "auto": those of a micro-batch; recompute: it recomputes
            activations, "keep_attention": but those of attention, "offload": from inputs on the host; resumes: it stops
            before its last step and resumes from its checkpoint. The reference does none of these.
        pieces: fused target -> its pieces with an adapter. share_experts: all experts of a layer share one adapter.
        further: what the model takes beside the tokens, if anything: images, token types.
        routed: of rollouts whose engine said them, the experts of each token in every layer, dense ones too; -1 where
            it did not.
        dropout: fields of the model's configuration whose dropouts stay on; LoRA's is in `lora`.
        device: "cpu" or "cuda".
    """

    model: str
    adapter: str
    model_type: str
    dtype: str
    lora: dict[str, Any]
    input_ids: tuple[int, ...]
    is_trained: tuple[bool, ...]
    offsets: tuple[int, ...]
    reference: dict[str, Any] | None = None
    eva: dict[str, Any] | None = None
    lr: float = 1e-2
    beta1: float = 0.8
    beta2: float = 0.95
    weight_decay: float = 0.1
    decay_biases_and_norms: bool = False
    max_grad_norm: float = 1e-2
    eps: float = 1e-4
    columns: dict[str, tuple[float, ...]] = field(default_factory=dict)
    rows_per_example: int = 1
    targets: tuple[tuple[float, ...], ...] = ()
    predicts_next: bool = True
    packing: bool | Literal["auto"] = False
    recompute: bool | Literal["keep_attention", "offload"] = False
    resumes: bool = False
    attn_implementation: str | None = "eager"
    quantization: str | None = None
    compute: str | None = None
    kernels: Literal["liger", "fused", "none"] = "none"
    pieces: dict[str, list[str]] = field(default_factory=dict)
    share_experts: bool = False
    further: KnownInputs | None = None
    routed: tuple[tuple[tuple[int, ...], ...], ...] = ()
    dropout: tuple[str, ...] = ()
    pad_token_id: int = 0
    trust_remote_code: bool = False
    device: str = "cpu"

    @property
    def eval_every(self) -> int:
        """As in a run file. One evaluation is followed by a step of the same process: dropout must be on again."""
        return 1 if self.resumes else max(1, self.steps - 1)

    def max_grad_norm_at(self, step: int) -> float:
        """The limit in optimizer step `step`. The last of several steps is not clipped."""
        if 0 < step == self.steps - 1:
            return self.max_grad_norm * 1e6
        return self.max_grad_norm

    @property
    def base(self) -> Base:
        """The base model."""
        options: dict[str, Any] = {"dtype": self.dtype, "attn_implementation": self.attn_implementation}
        options |= {"trust_remote_code": self.trust_remote_code, "quantization": self.quantization}
        options["compute"] = self.compute
        return Base(self.model, **options)

    @property
    def data(self) -> TokenizedDataset:
        """The sequences as both sides read them."""
        data = TokenizedDataset(
            np.array(self.input_ids, dtype=np.int32),
            np.array(self.is_trained, dtype=bool),
            np.array(self.offsets, dtype=np.int64),
            {name: np.array(column, dtype=np.float32) for name, column in self.columns.items()},
            self.rows_per_example,
            self.further,
            predicts_next=self.predicts_next,
        )
        if self.targets:
            data = replace(data, targets=np.array(self.targets, dtype=np.float32))
        if self.routed:
            data = replace(data, routed=np.array(self.routed, dtype=np.int16))
        return data


def batch_size_for(largest_dp: int) -> int:
    """Sequences per step: odd, so that dp ranks have unequal shares and some need a dummy micro-batch."""
    return 2 * max(2, largest_dp) + 1


def num_sequences_for(batch_size: int, steps: int) -> int:
    """Sequences in a case: odd, so that evaluation has a remainder and needs a dummy micro-batch."""
    number = batch_size * max(1, steps - 1)
    if steps > 2:
        number -= 1  # the last step begins a second epoch, after a batch that is not full
    return number


def random_tokens(
    *, num_sequences: int, vocab_size: int, seed: int, pad_token_id: int = 0, shortest: int = 1
) -> TokenizedDataset:
    """Sequences of unequal length, none below `shortest`, each with an untrained prefix of unequal length, one in four
    with none: text is trained from its first token on, which no token predicts. A last token is always trained. The
    padding token also occurs as a trained token of long ones, as with a tokenizer that pads with eos.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    lengths = [max(shortest, _LENGTHS[i % len(_LENGTHS)]) for i in range(num_sequences)]
    ids = generator.integers(min(3, vocab_size - 1), vocab_size, size=sum(lengths), dtype=np.int32)
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    is_trained = np.ones(len(ids), dtype=bool)
    for index, (start, length) in enumerate(zip(offsets.tolist(), lengths, strict=False)):
        if index % 4:  # the others are trained from their first token on
            is_trained[start : start + min(2 + index % 3, length - 1)] = False
        if index % 2 == 0 and length > 4:
            ids[start + length - 1] = ids[start + length - 4] = pad_token_id
    return TokenizedDataset(ids, is_trained, offsets)


def with_prompts(data: TokenizedDataset, config: Any, *, seed: int) -> TokenizedDataset:
    """The same sequences as completions of random prompts, for an encoder-decoder: its start token, which nothing
    predicts, then trained tokens. No padding token is among these, as transformers counts what is none (mbart).
    """
    generator, pad = np.random.Generator(np.random.PCG64([seed, 5])), config.pad_token_id
    ids, each = list[np.ndarray](), list[np.ndarray]()
    for index, sequence in enumerate(data):
        own = np.where(sequence.input_ids == pad, pad + 1, sequence.input_ids)
        ids.append(with_start(config, own))
        # Longer than any completion, so that the two are never mistaken for each other, and of unequal length.
        each.append(generator.integers(3, config.vocab_size, size=max(_LENGTHS) + 3 + 5 * index % 13))
    offsets = np.cumsum([0, *map(len, ids)]).astype(np.int64)
    is_trained = np.ones(offsets[-1], dtype=bool)
    is_trained[offsets[:-1]] = False
    return replace(data, input_ids=np.concatenate(ids), is_trained=is_trained, offsets=offsets, further=prompts(each))


def with_tokens(data: TokenizedDataset, ids: Iterable[int]) -> TokenizedDataset:
    """The same sequences with two of the tokens `ids` in each that is long enough, in turn."""
    # Where they are read and predicted: what a row of the vocabulary trains shows only there.
    own, found = itertools.cycle(ids), data.input_ids.copy()
    for start, end in itertools.pairwise(data.offsets.tolist()):
        if end - start > 8:
            found[start + 5], found[start + 7] = next(own), next(own)
    return replace(data, input_ids=found)


def check_tokens(data: TokenizedDataset, ids: Iterable[int]) -> None:
    """Check that each of `ids`, tokens whose rows are trained, is read somewhere, and predicted. Raises: UserError."""
    is_first, is_last = np.zeros_like(data.is_trained), np.zeros_like(data.is_trained)
    is_first[data.offsets[:-1]] = is_last[data.offsets[1:] - 1] = True
    found = {*data.input_ids[~is_last].tolist()}
    if data.predicts_next:
        found &= {*data.input_ids[data.is_trained & ~is_first].tolist()}
    if missing := sorted({*ids} - found):
        rule = "no sequence of the proof has it both read and predicted, so its row would not be proved"
        raise UserError(f"trainable_token_indices: {missing[0]}", rule, "give fewer tokens, or --data with them")


def with_rollouts(
    data: TokenizedDataset, *, vocab_size: int, seed: int, is_rewarded: bool = False, is_truncated: bool = False
) -> TokenizedDataset:
    """The same sequences as rollouts: advantages of both signs, weights, and old log-probabilities around those of a
    uniform model, so that the ratio is clipped for some tokens and not for others; an engine's around these, unknown of
    some sequences. is_rewarded: rewards in place of advantages, of groups of one to four sequences.
    is_truncated: one in three is marked as cut off.
    """
    generator = np.random.Generator(np.random.PCG64([seed, 1]))
    number, lengths = len(data.input_ids), np.diff(data.offsets)
    columns = {
        "advantage": generator.normal(size=number),
        "old_log_prob": -np.log(vocab_size) + generator.normal(scale=0.3, size=number),
        "weight": generator.uniform(0.5, 1.5, size=number),
    }
    engine = columns["old_log_prob"] + generator.normal(scale=0.3, size=number)
    is_known = np.repeat(np.arange(len(data)) % 5 != 1, lengths)
    columns["engine_log_prob"] = np.where(is_known, engine, np.nan)
    if is_truncated:
        columns["truncated"] = np.repeat(np.arange(len(data)) % 3 == 1, lengths)
    targets = None
    if is_rewarded:
        del columns["advantage"]
        # Groups of 4, 1, 3 and 2, the third's rollouts between those of the fourth, and one of equal rewards.
        pattern = np.array([0, 0, 0, 0, 1, 2, 3, 2, 3, 2])
        places = np.arange(len(data))
        groups = pattern[places % 10] + 4 * (places // 10)
        rewards = np.where(groups % 7 == 6, 0.5, generator.normal(size=len(data)))
        _, firsts, group_of = np.unique(groups, return_index=True, return_inverse=True)
        targets = np.array([rewards, places - firsts[group_of]], dtype=np.float32).T
    typed = {name: column.astype(np.float32) for name, column in columns.items()}
    return replace(data, columns=typed, targets=targets)


def with_teacher(data: TokenizedDataset, *, vocab_size: int, seed: int) -> TokenizedDataset:
    """The same sequences with random likeliest tokens of a teacher, one fewer at every third token."""
    generator = np.random.Generator(np.random.PCG64([seed, 4]))
    number, columns = len(data.input_ids), dict(data.columns)
    tokens = np.argsort(generator.random((number, vocab_size)), axis=1)[:, :_RECORDED]
    weights = -np.sort(-generator.exponential(size=(number, _RECORDED + 1)), axis=1)
    log_p = np.log(weights / weights.sum(1, keepdims=True))[:, :_RECORDED]  # what is left is of the others
    log_p[::3, -1] = -np.inf
    for rank in range(_RECORDED):
        columns[f"teacher_token_{rank}"] = tokens[:, rank].astype(np.float32)
        columns[f"teacher_log_prob_{rank}"] = log_p[:, rank].astype(np.float32)
    return replace(data, columns=columns)


def with_context(data: TokenizedDataset, *, vocab_size: int, seed: int) -> TokenizedDataset:
    """Each sequence, and after it the one that its teacher sees: with further, untrained tokens before it."""
    generator = np.random.Generator(np.random.PCG64([seed, 5]))
    ids, is_trained = list[np.ndarray](), list[np.ndarray]()
    for number, sequence in enumerate(data):
        more = generator.integers(min(3, vocab_size - 1), vocab_size, size=_CONTEXT + number % 3, dtype=np.int32)
        own = sequence.is_trained.copy()
        own[:1] = False  # nothing predicts it where there is no context
        ids += [sequence.input_ids, np.concatenate([more, sequence.input_ids])]
        is_trained += [sequence.is_trained, np.concatenate([np.zeros(len(more), dtype=bool), own])]
    offsets = np.cumsum([0, *map(len, ids)]).astype(np.int64)
    return TokenizedDataset(np.concatenate(ids), np.concatenate(is_trained), offsets, rows_per_example=2)


def with_routed(data: TokenizedDataset, *, layers: int, experts: int, chosen: int, seed: int) -> TokenizedDataset:
    """The same sequences with `chosen` random experts of each token in each layer; of last tokens none, as engines."""
    generator = np.random.Generator(np.random.PCG64([seed, 3]))
    scores = generator.random((len(data.input_ids), layers, experts))
    routed = np.argsort(scores, axis=2)[:, :, :chosen].astype(np.int16)
    routed[data.offsets[1:] - 1] = -1
    return replace(data, routed=routed)


def as_pairs(data: TokenizedDataset) -> TokenizedDataset:
    """The same sequences in pairs that share their first two tokens, or all but the last of a shorter one."""
    ids, lengths = data.input_ids.copy(), np.diff(data.offsets)
    for pair, (first, second) in enumerate(zip(data.offsets[:-1:2], data.offsets[1:-1:2], strict=True)):
        shared = min(2, *lengths[2 * pair : 2 * pair + 2] - 1)
        ids[second : second + shared] = ids[first : first + shared]
    return replace(data, input_ids=ids, rows_per_example=2)


def with_margins(data: TokenizedDataset, *, seed: int) -> TokenizedDataset:
    """The sequences of `as_pairs` with random margins, of which two are below 0."""
    data = as_pairs(data)
    margins = np.random.Generator(np.random.PCG64([seed, 4])).uniform(0.2, 1.5, size=data.num_examples)
    margins[[1, -1]] *= -1
    return replace(data, targets=margins.astype(np.float32).repeat(2).reshape(-1, 1))


def with_feedback(data: TokenizedDataset) -> TokenizedDataset:
    """The sequences of `as_pairs` with a "desirable" column: two of three pairs are liked."""
    data = as_pairs(data)
    liked = np.repeat(np.where(np.arange(data.num_examples) % 3 != 1, 1.0, -1.0), 2)
    column = np.repeat(liked, np.diff(data.offsets)).astype(np.float32)
    return replace(data, columns={"desirable": column})


def with_labels(data: TokenizedDataset, objective: Any, *, seed: int, segments: bool) -> TokenizedDataset:
    """The sequences with random labels of `objective`, of texts or of their trained tokens; segments: two in each."""
    generator = np.random.Generator(np.random.PCG64([seed, 2]))
    number = len(objective.names)
    if not hasattr(objective, "problem"):
        labels = generator.integers(number, size=len(data.input_ids)).astype(np.float32)
        return replace(data, columns={"label": labels}, predicts_next=False)
    further = None
    if segments:
        is_second = [np.arange(length) >= length // 2 for length in np.diff(data.offsets)]
        further = KnownInputs([{"token_type_ids": half.astype(np.int64)} for half in is_second])
    targets: np.ndarray[Any, Any]
    if objective.problem == "single":
        targets = generator.integers(number, size=(len(data), 1))
    elif objective.problem == "multi":
        targets = generator.integers(2, size=(len(data), number))
    else:
        targets = generator.normal(size=(len(data), number))
    data = replace(data, is_trained=np.ones_like(data.is_trained), predicts_next=False)
    return replace(data, further=further, targets=targets.astype(np.float32))


def as_similar(data: TokenizedDataset, rows: int) -> TokenizedDataset:
    """The sequences in groups of `rows`: an anchor, its positive, negatives."""
    return replace(data, is_trained=np.ones_like(data.is_trained), rows_per_example=rows, predicts_next=False)


def distinct_sequences(data: TokenizedDataset, number: int, *, source: str) -> TokenizedDataset:
    """The first `number` distinct sequences with a trained token, and images. Raises: UserError: there are fewer."""
    seen: dict[tuple[int, ...], int] = {}
    for index, sequence in enumerate(data):
        if len(seen) < number and sequence.is_trained[1:].any():
            seen.setdefault(tuple(sequence.input_ids.tolist()), index)
    if len(seen) < number:
        raise UserError(f"{source}: {len(seen)} different sequences", f"{number} are needed", "give a longer file")
    ids, is_trained, offsets, inputs, numbers = [], [], [0], [], []
    for index in seen.values():
        sequence = data[index]
        ids.append(sequence.input_ids)
        is_trained.append(sequence.is_trained)
        offsets.append(offsets[-1] + len(sequence.input_ids))
        if data.images is not None:
            inputs.append({name: value.numpy() for name, value in sequence.more().items()})
            numbers.append(data.images.number(index))
    further = None
    if data.images is not None:
        further = KnownInputs(inputs, numbers, data.images.token)
    places = np.array(offsets, dtype=np.int64)
    return TokenizedDataset(np.concatenate(ids), np.concatenate(is_trained), places, further=further)


def case_hash(case: Case, *, inputs: Iterable[str]) -> str:
    """The hash of every input of a reference run, without paths. inputs: `file_fingerprint`, or a configuration."""
    values = dataclasses.asdict(replace(case, model="", adapter="", further=None))
    if case.further is not None:
        values["further"] = case.further.digest().tobytes().hex()
    made_with = [json.dumps(versions())]
    if case.quantization in ("nf4", "int8") or case.optimizer == "adamw_8bit":
        made_with.append(version_of("bitsandbytes"))
    made_with += sources_of("meshlora_judge.reference_case")
    return digest([json.dumps(values, sort_keys=True, default=str), *inputs, *made_with])


def file_fingerprint(folder: Path) -> list[str]:
    """One line for each file of a checkpoint folder that defines the model."""
    return [_fingerprint(file) for file in sorted(folder.iterdir()) if file.suffix in (".json", ".safetensors", ".py")]


def write_inventory(folder: Path) -> None:
    """Record the contents of a reference folder, so that truncated or deleted files are noticed."""
    (folder / _INVENTORY).write_text(json.dumps(_contents(folder)), encoding="utf-8")


def is_whole(folder: Path) -> bool:
    """Whether a reference folder still matches its inventory."""
    try:
        return bool(json.loads((folder / _INVENTORY).read_text(encoding="utf-8")) == _contents(folder))
    except (OSError, ValueError):
        return False


def _contents(folder: Path) -> list[str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != _INVENTORY)
    return [_fingerprint(file, name=str(file.relative_to(folder))) for file in files]


def _fingerprint(file: Path, *, name: str = "") -> str:
    stat, name = file.stat(), name or file.name
    if stat.st_size > _HASHED_BYTES:
        return f"{name} {stat.st_size} {stat.st_mtime_ns}"
    with file.open("rb") as stream:
        return f"{name} {hashlib.file_digest(stream, 'sha256').hexdigest()}"
