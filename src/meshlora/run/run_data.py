"""The data of a run: read, and checked against its model.

Owns: whether tokenizer, data and model fit together. Does not own: how texts become tokens (`run.texts`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from meshlora.loading.blueprint import Blueprint
from meshlora.loading.guards import longest_fixed_length
from meshlora.loading.positions import most_positions
from meshlora.plan.features import Asked
from meshlora.plan.pairs import check
from meshlora.reading.chat import form_read
from meshlora.reading.clock import set_day, written_day
from meshlora.reading.images import Images
from meshlora.reading.places import files_of
from meshlora.reading.tokenizer import padding_token_id
from meshlora.reading.whole_rows import in_rows, words_of_rows
from meshlora.run.config.run_file import sources_of
from meshlora.run.followed import no_tokens
from meshlora.run.prepared import asked_of
from meshlora.run.texts import Texts
from meshlora.wings.experts.routing import check_routed
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.further_inputs import FurtherInputs


@dataclass(frozen=True)
class RunData:
    """The data of a run. notes: which parts of its files are not read. day: that chat templates write, if any. form: of
    the data for training, as in `run.asking.Asking`. held: rows of the training data that are held out, as origins."""

    texts: Texts
    blueprint: Blueprint
    tokenizer: PreTrainedTokenizerBase
    train: TokenizedDataset
    eval: TokenizedDataset | None
    notes: tuple[str, ...] = ()
    day: str | None = None
    form: str = ""
    held: frozenset[str] = frozenset()


def read_data(
    texts: Texts, blueprint: Blueprint, asked: Asked, *, seed: int = 0, is_stream: bool = False, day: str | None = None
) -> RunData:
    """The tokenised (cached) data of a run, checked against its model.

    asked: `RunConfig.asked`. seed: `train.seed`, by which rows are held out. is_stream: the data for training come step
    by step. day: of `prepare.first_day`; default: today.

    Raises:
        UserError: a file, a record or a token that does not fit.
    """
    options, tokenizer = texts.data, texts.tokenizer()
    if day is not None:
        set_day(tokenizer, day)
    check_fits(tokenizer, blueprint, max_length=options.longest)
    notes: list[str] = []
    read = functools.partial(texts.read, tokenizer=tokenizer, model=blueprint.config, say=notes.append)
    train_data, eval_data, held = no_tokens(), None, frozenset[str]()
    trained = {(path, one.split, one.rows) for one in sources_of(options.train) for path in one.paths}
    for source in sources_of(options.eval_files):  # before the others are read, which may take minutes
        for path in source.paths:
            files_of(path, source.split)
            if (path, source.split, source.rows) in trained:
                notes.append(
                    f"data.eval: {path} is trained on, too: its loss says nothing of what the model never read"
                )
    if options.eval_share is not None:
        split = texts.read_split(tokenizer, blueprint.config, seed=seed, say=notes.append)
        train_data, eval_data, held = split.train, split.eval, split.held
    elif not is_stream:
        train_data = read(options.train)
    form = form_read(tokenizer)  # of the data for training alone
    if options.eval_files is not None:
        eval_data = read(options.eval_files, categories=options.eval_categories)
    check(asked_of(asked, blueprint, train_data, eval_data))
    check_vision(blueprint, train_data.images)
    if train_data.routed is not None:
        check_routed(train_data.routed, blueprint.plan)
    if isinstance(train_data.images, Images):
        form = form_read(train_data.images.processor.tokenizer)
    written = written_day(tokenizer)
    for data in (train_data, eval_data):
        if data is not None and isinstance(data.images, Images):  # whose processor has a template of its own
            written = written or written_day(data.images.processor.tokenizer)
    if options.date is not None and written is None:
        notes.append(f"data.date={options.date} has no effect: the chat template writes no date")
    if eval_data is not None:
        eval_data = eval_data.first(options.eval_limit)
    if options.packing == "rows":
        train_data = in_rows(train_data, options.longest)
        notes.append(words_of_rows(train_data, options.longest))
        # From here on they are examples, whose sequences share rows in a step, as of packing: true.
        texts = dataclasses.replace(texts, data=dataclasses.replace(options, packing=True))
    said = tuple(dict.fromkeys(notes))
    return RunData(texts, blueprint, tokenizer, train_data, eval_data, said, written, form, held)


def check_fits(tokenizer: PreTrainedTokenizerBase, blueprint: Blueprint, *, max_length: int) -> None:
    """Check the tokenizer against the model's vocabulary, and `max_length` against its positions."""
    text_config, topology = blueprint.config.get_text_config(), blueprint.topology
    if len(tokenizer) > text_config.vocab_size:
        rule = f"the model {blueprint.source} has embeddings for {text_config.vocab_size}"
        raise UserError(f"tokenizer with {len(tokenizer)} tokens", rule, "is it the tokenizer of another model?")
    pad = padding_token_id(tokenizer)  # embedded like any other token, though masked afterwards
    if not 0 <= pad < text_config.vocab_size:
        given = f"tokenizer whose padding is token {pad}"
        rule = f"the model {blueprint.source} has embeddings for {text_config.vocab_size}"
        raise UserError(given, rule, "name another pad_token, or eos_token, in tokenizer_config.json")
    fixed = longest_fixed_length(blueprint.config)
    if fixed is not None and max_length > fixed[0]:
        rule = f"beyond {fixed[0]} positions the model's {fixed[1]} depends on the batch, hence on the topology"
        raise UnsupportedError(f"data.max_length={max_length}", rule, f"use at most {fixed[0]}")
    limit = most_positions(blueprint.config, blueprint.model)
    multiple = topology.size_over(topology.token_cut)  # sequences are padded to a length that can be cut
    if limit and math.ceil(max_length / multiple) * multiple > limit:
        cut = {axis: size for axis, size in topology.sizes.items() if axis in topology.token_cut and size > 1}
        sizes = "*".join(f"{axis}={size}" for axis, size in cut.items())
        padded = f", padded to a multiple of {sizes}{' under sp' * topology.sp}" if multiple > 1 else ""
        rule = f"the model has {limit} positions"
        raise UserError(f"data.max_length={max_length}{padded}", rule, f"use at most {limit // multiple * multiple}")


def check_vision(blueprint: Blueprint, images: FurtherInputs | None) -> None:
    """Refuse an adapter outside the text part of a composite without images: it would have no gradient. Raises:
    UserError: names the first such module."""
    outside = [name for name in blueprint.trained.targets if not blueprint.plan.is_text(name)]
    if outside and images is None:
        rule = "text does not pass through it, and no training data has images"
        raise UserError(f"an adapter on {outside[0]}", rule, "leave out lora.vision, or train on images")
