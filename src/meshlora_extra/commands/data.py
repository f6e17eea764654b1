"""`meshlora data`: the sequences that a run is trained on, with the trained tokens marked, and their lengths.

Does not own: the numbers (`reading.summary`), reading and tokens (`reading`). No weight is read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshlora.cli.arguments import add_run_file
from meshlora_ground.errors import UserError
from meshlora_ground.lifetime import import_libraries

if TYPE_CHECKING:
    from rich.text import Text

    from meshlora.reading.summary import Summary
    from meshlora.run.config.run_file import Given
    from meshlora_ground.console import Console
    from meshlora_ground.dataset import TokenizedDataset

_BAR = 40  # characters of the longest bar
_TRAINED, _LOST = "bold green", "red strike"
_MARKS = ("⟦", "⟧")  # around trained tokens where there are no colours


def add(commands: Any) -> None:
    data = commands.add_parser(
        "data",
        help="show sequences of a run with the trained tokens marked, counts, and the distribution of lengths",
        description="What tokens the run would see. On a terminal trained tokens are green, and words that the chat "
        "template leaves out are red and struck through; elsewhere trained tokens stand between ⟦ and ⟧, and words "
        "left out, as JSON, in the line above.",
    )
    add_run_file(data)
    data.add_argument("--show", type=int, default=1, metavar="N", help="the first N sequences (default 1)")
    data.add_argument("--eval", action="store_true", help="of data.eval in place of data.train")
    data.add_argument("--json", metavar="FILE", help="write the numbers")
    data.add_argument("--plot", metavar="FILE", help="draw the distribution of lengths: .png, .svg, .pdf or .html")
    data.set_defaults(run=_data)


def _data(options: argparse.Namespace) -> None:
    import_libraries()
    from meshlora.loading.blueprint import read_model_config
    from meshlora.reading.summary import summary
    from meshlora.run.config.file import read_run
    from meshlora.run.texts import Texts
    from meshlora_extra.plot import check_picture, plot_lengths
    from meshlora_ground.console import Console
    from meshlora_ground.files import check_result_file, write_json_atomically

    config = read_run(options.file, options.overrides)
    name, categories = "data.train", "all"
    paths: Given = config.data.train
    if options.eval:
        if config.data.eval is None:
            raise UserError("--eval", "the run file has no data.eval", "leave it out")
        name, paths, categories = "data.eval", config.data.eval_files, config.data.eval_categories
    if config.rl is not None:
        rule = "its data are prompts, whose completions the run makes"
        raise UserError(f"{options.file} with rl", rule, "meshlora check reads them")
    if options.show < 0:
        raise UserError(f"--show {options.show}", "it must not be negative")
    if options.json:
        check_result_file(Path(options.json), f"--json {options.json}")
    if options.plot:
        check_picture(Path(options.plot))
    model = read_model_config(config.model.path, trust_remote_code=config.model.trust_remote_code)
    texts = Texts(config.model, config.data, config.train.objective)
    tokenizer, notes = texts.tokenizer(), list[str]()
    if config.data.eval_share is not None:
        split = texts.read_split(tokenizer, model, seed=config.train.seed, say=notes.append)
        data = split.eval if options.eval else split.train
    else:
        data = texts.read(paths, tokenizer, model, say=notes.append, categories=categories)
    if options.eval:
        data = data.first(config.data.eval_limit)  # what an evaluation takes of it
    found, console = summary(data), Console()
    for index in range(min(options.show, len(data))):
        show_sequence(data, index, tokenizer, console)
    console.show_rows(_rows(name, found, config.data.longest))
    _show_lengths(found, console)
    for note in notes:
        console.say(f"note: {note}")
    if options.plot:
        plot_lengths(found.bins, Path(options.plot), title=f"{name}: {found.sequences:,} sequences")
        console.say(f"lengths: {options.plot}")
    if options.json:
        write_json_atomically(Path(options.json), {"data": name, **dataclasses.asdict(found)})
        console.say(f"numbers: {options.json}")


def show_sequence(data: TokenizedDataset, index: int, tokenizer: Any, console: Console) -> None:
    """Print a sequence, the trained tokens in colour or between marks."""
    from rich.text import Text

    from meshlora.reading.summary import parts

    found = parts(data, index)
    lost = sorted(data.lost_words(index) if data.lost_words is not None else (), key=lambda each: each[0])
    number, trained = (sum(len(ids) for is_trained, ids in found if is_trained >= least) for least in (False, True))
    above = f"sequence {index}: {number:,} tokens, {trained:,} trained"
    if lost and not console.is_terminal:
        above += f"; left out by the chat template: {json.dumps([words for _, words in lost], ensure_ascii=False)}"
    console.say(above, style="bold")
    if console.is_terminal:
        text = _in_colours(found, lost, tokenizer)
    else:
        text = Text()
        for is_trained, ids in found:
            words = tokenizer.decode(ids)
            if is_trained:
                words = words.join(_MARKS)
            text.append(words)
    console.print(text, soft_wrap=True)
    console.say("")


def _in_colours(found: list[tuple[bool, list[int]]], lost: Sequence[tuple[int, str]], tokenizer: Any) -> Text:
    """The parts of a sequence. lost: of words that are not in it the number of tokens before them, in order."""
    from rich.text import Text

    text, place, rest = Text(), 0, list(lost)
    for is_trained, ids in found:
        style, start = "", 0
        if is_trained:
            style = _TRAINED
        while rest and rest[0][0] < place + len(ids):  # words left out inside this part
            at, words = rest.pop(0)
            text.append(tokenizer.decode(ids[start : at - place]), style=style)
            text.append(words, style=_LOST)
            start = at - place
        text.append(tokenizer.decode(ids[start:]), style=style)
        place += len(ids)
    for _, words in rest:  # after its last token
        text.append(words, style=_LOST)
    return text


def _rows(name: str, found: Summary, max_length: int) -> list[tuple[str, str]]:
    sequences = f"{found.sequences:,}"
    if found.examples != found.sequences:  # pairs, or lists of texts
        sequences += f" in {found.examples:,} examples"
    long = f"{found.too_long:,} longer than max_length={max_length}"
    if found.dropped:
        long += f", {found.dropped:,} left out"
    share = found.trained_tokens / found.tokens
    return [
        (name, f"{found.records:,} records, {long}"),
        ("sequences", sequences),
        ("tokens", f"{found.tokens:,}, of which {found.trained_tokens:,} trained ({share:.1%})"),
        ("lengths", f"{found.shortest:,} to {found.longest:,}, median {found.median:,.0f}"),
    ]


def _show_lengths(found: Summary, console: Console) -> None:
    """Print the distribution of lengths, a line a range."""
    most = max(number for *_, number in found.bins)
    width = len(f"{found.bins[-1][1]:,}")
    for first, last, number in found.bins:
        bar = "█" * round(_BAR * number / most) or "▏" * bool(number)
        console.say(f"{first:>{width},} – {last:>{width},}  {bar:<{_BAR}} {number:,}")
