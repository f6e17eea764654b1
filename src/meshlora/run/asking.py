"""How a model is asked: as the data of its training asked it.

Owns: what a run records of that in its manifest, reading it back from an adapter's folder, and the tokenizer that asks
so. Does not own: encoding prompts (`run.decoding`), the templates (`reading.tokenizer`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from meshlora.reading.chat import CONVERSATIONS, TEXTS, further_stops
from meshlora.reading.prompt_styles import STYLES
from meshlora.reading.tokenizer import tokenizer_with
from meshlora.run.checkpoint.identity import DATE
from meshlora.run.checkpoint.manifest import NotWholeError, read_manifest
from meshlora_ground.errors import UserError

_TEMPLATE = "chat_template.jinja"  # of a finished adapter: the text that its run has read its data with
_OPTION = "data.chat_template="  # as `tokenizer_with` names it


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How a model is asked.

        asking = asking_of(Path("runs/mine/adapter"))

    Attributes:
        form: of the training's data, conversations or texts; "" if nobody has said it.
        chat_template: a name or file, as of `data.chat_template`; None: the tokenizer's own. template_of: whose it is.
        stop_tokens, separator, system: as of `data`. style: that of `data.prompt`, in which texts are written.
        day: that the chat template writes.
    """

    form: str = ""
    chat_template: str | None = None
    template_of: str = ""
    stop_tokens: tuple[str, ...] = ()
    separator: str = ""
    system: str = ""
    style: str = ""
    day: str | None = None


def recorded(form: str, data: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What a manifest says of it: names and texts. data: the `DataConfig`, which has read its texts by `tokenizer`."""
    found = {}
    if form:
        found["form"] = form
    if stops := further_stops(tokenizer):
        found["stop_tokens"] = json.dumps(stops)
    for name in ("separator", "system", "prompt"):  # that have something before the answer
        if value := getattr(data, name, None):
            found[name] = value
    return found


def asking_of(adapter: Path | None, *, model: str | Path = "") -> Asking:
    """How the run asked that made the adapter in `adapter`, as far as its folder says. model: the base's folder."""
    if adapter is None:
        return Asking(template_of=str(model))
    try:
        saved = read_manifest(adapter)
    except NotWholeError:  # of another program
        said: Mapping[str, str] = {}
        day = None
    else:
        said, day = saved.asking, saved.identity.get(DATE)
    asking = Asking(day=day, separator=said.get("separator", ""), system=said.get("system", ""), template_of=str(model))
    if (form := said.get("form", "")) in (CONVERSATIONS, TEXTS):
        asking = dataclasses.replace(asking, form=form)
    if (style := said.get("prompt", "")) in STYLES:
        asking = dataclasses.replace(asking, style=style)
    if "stop_tokens" in said:
        asking = dataclasses.replace(asking, stop_tokens=_texts(said["stop_tokens"]))
    # The adapter has learnt the form of its own template, not of the base's.
    if (own := adapter / _TEMPLATE).is_file():
        asking = dataclasses.replace(asking, chat_template=str(own), template_of=str(adapter))
    return asking


def _texts(value: str) -> tuple[str, ...]:
    """A list of texts as JSON; none if it is something else, as in a manifest that somebody has written."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        return ()
    return tuple(found)


def asking_tokenizer(model: str | Path, asking: Asking, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder `model`, with what `asking` says. Raises: UserError: as `tokenizer_with`, in the
    names of a command's options."""
    try:
        return tokenizer_with(
            str(model),
            trust_remote_code=trust_remote_code,
            chat_template=asking.chat_template,
            stop_tokens=list(asking.stop_tokens),
            date=asking.day,
        )
    except UserError as error:
        if not error.given.startswith(_OPTION):
            raise
        given = error.given.replace(_OPTION, "--chat-template ")
        raise UserError(given, error.rule, error.way_out) from None


def check_template(tokenizer: PreTrainedTokenizerBase, asking: Asking) -> None:
    """Raises: UserError: there is no chat template to ask with."""
    try:
        tokenizer.get_chat_template()
    except ValueError:
        rule = "a conversation needs a chat template, and it has no default one"
        way_out = "give --chat-template NAME or FILE (docs/generation.md), or send plain text (generate --plain)"
        raise UserError(f"the tokenizer of {asking.template_of}", rule, way_out) from None
