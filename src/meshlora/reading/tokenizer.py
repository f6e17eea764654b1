"""The tokenizer of a model's folder, as it is or with a run's chat template, stop tokens and day.

Owns: loading it, its chat template, and the padding token. Does not own: tokenising data (`data`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from meshlora.reading.chat import add_stop_tokens, stop_ids
from meshlora.reading.clock import set_day
from meshlora.reading.data_files import is_folder, nearest_file
from meshlora.reading.named_templates import ELSEWHERE, TEMPLATES, named_template
from meshlora.reading.processor import FILES as PROCESSOR_FILES
from meshlora_ground.errors import UserError, did_you_mean, reason
from meshlora_ground.files import write_json_atomically
from meshlora_ground.reading import read_text

# `tokenizers` loops up to the largest token id of a vocabulary: a second per hundred million.
_MOST_TOKENS = 10**8
_GENERATION = "generation_config.json"
_MAY_BE_FAR = re.compile(rb":\s*\d{9}")


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder. Raises: UserError: there is none, or it cannot be read."""
    if Path(path).is_dir():
        is_folder(Path(path))  # reading a named pipe would block
        for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
            _check_numbers(Path(path, name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # untrusted files read by a library may raise anything
        rule = f"it cannot be loaded ({reason(error)})"
        raise UserError(
            f"tokenizer in {path}", rule, "are tokenizer.json and tokenizer_config.json there and whole?"
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def add_tokenizer(
    folder: Path, model: str, *, trust_remote_code: bool, chat_template: str | None, stop_tokens: Sequence[str] = ()
) -> None:
    """Write the tokenizer of `model` into `folder`, as it has to be to load from there, with its processor.

    Its own code, under `trust_remote_code`, is not copied. chat_template: the text with which the run has read its
    data, if it is not the tokenizer's own: its file may have changed since. stop_tokens: at which the model stops
    beside those that it says itself; all of them are then in a `generation_config.json`, where `generate` looks.
    """
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    has_one_template = not isinstance(tokenizer.chat_template, dict)  # several would be a folder of files
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        tokenizer.save_pretrained(temporary, save_jinja_files=has_one_template)
        for file in Path(temporary).iterdir():
            if file.is_file() and file.suffix != ".py":
                shutil.move(file, folder / file.name)
    if stop_tokens:
        add_stop_tokens(tokenizer, stop_tokens)
        stops = [*dict.fromkeys(stop_ids(tokenizer))]
        write_json_atomically(folder / _GENERATION, {"eos_token_id": stops})
    for name in PROCESSOR_FILES:
        if (file := Path(model, name)).is_file():
            shutil.copyfile(file, folder / name)


def tokenizer_with(
    path: str, *, trust_remote_code: bool, chat_template: str | None, stop_tokens: list[str], date: str | None
) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder, with what `data` of a run file says of it.

    date: at which the clock of its chat template stands.

    Raises:
        UserError: as `load_tokenizer`; a template that is neither a file nor one of the tokenizer's, ours or TRL's; a
            stop token that is none.
    """
    tokenizer, stops = load_tokenizer(path, trust_remote_code=trust_remote_code), [*stop_tokens]
    if chat_template is not None:
        tokenizer.chat_template, ends = _chat_template(chat_template, tokenizer)
        stops += ends
    if stops:
        add_stop_tokens(tokenizer, stops)
    if date is not None:
        set_day(tokenizer, date)
    return tokenizer


def _chat_template(given: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, Sequence[str]]:
    """(the text of a chat template: a file, else the name of one of `tokenizer`, of ours, or of one that TRL has for
    training; the tokens at which a model stops under one of ours).
    """
    file, option = Path(given), f"data.chat_template={given}"
    if not file.exists():
        named: Any = tokenizer.chat_template or {}
        if isinstance(named, str):  # a tokenizer with one has no name for it
            named = {"default": named}
        if given in named:
            return str(named[given]), ()
        if given in TEMPLATES:
            return named_template(given, tokenizer)
        of_trl = _templates_of_trl()
        if given in of_trl:
            return read_text(of_trl[given]), ()
        has = f"the tokenizer has {', '.join(map(repr, named)) or 'none'}, and TRL"
        has += f" {', '.join(of_trl)}" if of_trl else "'s are not installed (pip install trl)"
        if given in ELSEWHERE:
            raise UserError(option, f"it is another trainer's name, and {has}", f"here it is {ELSEWHERE[given]}")
        if file.name == given and not file.suffix:  # a name rather than a path
            near = did_you_mean(given, [*named, *TEMPLATES, *of_trl])
            raise UserError(option, f"there is no such file, and {has}", near)
        raise UserError(option, f"there is no such file, and {has}", nearest_file(file))
    if is_folder(file):
        raise UserError(option, "it is a folder", "name the file in it")
    try:
        text = read_text(file)
    except (OSError, ValueError) as error:
        raise UserError(option, f"it cannot be read ({error})", "is it a text in UTF-8?") from None
    if not text.strip():
        raise UserError(option, "the file is empty")
    return text, ()


def _templates_of_trl() -> dict[str, Path]:
    """Name -> file of the chat templates with `{% generation %}` that an installed TRL has for training (seen in 1.16).

    Only its files are read: it takes seconds to import.
    """
    found = importlib.util.find_spec("trl")
    if found is None or not found.origin:
        return {}
    files = sorted((Path(found.origin).parent / "chat_templates").glob("*_training.jinja"))
    return {file.stem: file for file in files}


def _check_numbers(file: Path) -> None:
    """Refuse absurdly large token ids, before the library loops up to them."""
    if not file.is_file() or not _MAY_BE_FAR.search(content := file.read_bytes()):
        return
    with contextlib.suppress(ValueError, RecursionError):  # the library reports invalid JSON
        for token, number in _numbers(json.loads(content)):
            if isinstance(number, int) and number >= _MOST_TOKENS:
                raise UserError(f"{file}: token {token!r}", f"its number {number} is beyond {_MOST_TOKENS:,}")


def _numbers(vocabulary: Any) -> list[tuple[Any, Any]]:
    """(token, id) of a vocabulary or tokenizer file; empty if it is neither."""
    if not isinstance(vocabulary, dict):
        return []
    added = vocabulary.get("added_tokens")
    if not isinstance(added, list):
        return list(vocabulary.items())
    named = [(token.get("content"), token.get("id")) for token in added if isinstance(token, dict)]
    if isinstance(model := vocabulary.get("model"), dict):
        named += _numbers(model.get("vocab"))
    return named


def padding_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the padding token; padding is masked, so any id will do."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
