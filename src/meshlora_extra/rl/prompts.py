"""The prompts of a run of rollouts, and which of them each step continues.

Owns: reading them from `data.train`, their tokens, their order. Does not own: continuing them (`rl.rollouts`).

A record has a `prompt`, a text or messages, or `messages`, whose last turn of the assistant is left out. All other
fields are for rewards, such as `answer` or `tests`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from meshlora.reading.chat import CONVERSATIONS, TEXTS, Seen
from meshlora.reading.conversations import open_conversation
from meshlora.reading.formats import Format
from meshlora.reading.records import Record, checked_text
from meshlora.reading.sampler import GlobalBatches
from meshlora.reading.sources import Reading, read_rows
from meshlora.reading.system_turn import with_system
from meshlora.run.config.run_file import GenerateConfig, RunConfig, paths_of
from meshlora.run.decoding import encode_prompts
from meshlora_ground.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """text: as the model reads it. ids: its tokens. fields: of its record, for rewards. origin: where it stands.

    whole: with its completion, as a record of text; None if it has none.
    """

    text: str
    ids: tuple[int, ...]
    fields: Mapping[str, Any]
    origin: str
    whole: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Prompts:
    """All prompts. A pass takes each once, in an order of its own; per_step: how many a generation takes. form: of
    theirs, as in `run.asking.Asking`."""

    prompts: Sequence[Prompt]
    per_step: int
    seed: int
    form: str = ""

    def of_round(self, number: int) -> list[Prompt]:
        """Those of generation `number`, counted from 0: a function of it and the seed alone."""
        order = GlobalBatches(len(self.prompts), len(self.prompts), self.seed)  # of one batch: a pass
        places = np.arange(number * self.per_step, (number + 1) * self.per_step)
        # Passes follow each other without a short step between them: groups are independent of each other.
        passes, within = np.divmod(places, len(self.prompts))
        return [self.prompts[order.batch(int(one))[at]] for one, at in zip(passes, within, strict=True)]


@dataclass(frozen=True)
class _Asked:
    """A row: what is asked as a text, or as a conversation; its other fields; whole: as in `Prompt`."""

    text: str | None
    record: Record | None
    fields: Mapping[str, Any]
    origin: str
    whole: Mapping[str, Any] | None


def read_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, model_config: Any, say: Callable[[str], None] | None = None
) -> Prompts:
    """The prompts of `data.train`. say: told what is read, and what is left out.

    Raises:
        UserError: a file or record that cannot be used; a prompt that leaves no room for `rl.max_new_tokens`, unless
            `data.too_long` is drop.
    """
    rl, data = config.rl, config.data
    assert rl is not None
    rows = read_rows(
        paths_of(data.train),
        [
            Format("prompt", ("prompt",), functools.partial(_asked, "prompt"), takes_rest=True),
            Format("messages", ("messages",), functools.partial(_asked, "messages"), takes_rest=True),
        ],
        Reading(data.columns, say=say),
    )
    given = with_system((row.record for row in rows if row.record is not None), data.system, say)
    rows = [row if row.record is None else dataclasses.replace(row, record=next(given)) for row in rows]
    seen = Seen()
    for row in rows:
        if row.record is not None:
            seen.add(row.record)
    seen.tell(tokenizer, say)
    options, limit = GenerateConfig(max_new_tokens=rl.max_new_tokens), "rl.max_new_tokens"
    encoded = encode_prompts(
        [row.record or row.text or "" for row in rows],
        tokenizer,
        model_config,
        options,
        names=[row.origin for row in rows],
        limit_name=limit,
        separator=data.separator,
    )
    found = []
    for row, (text, ids) in zip(rows, encoded, strict=True):
        found.append(Prompt(text, tuple(ids), row.fields, row.origin, row.whole))
    most = data.longest - rl.max_new_tokens
    long = [prompt for prompt in found if len(prompt.ids) > most]
    if long and data.too_long != "drop":
        rule = f"with rl.max_new_tokens={rl.max_new_tokens} it is longer than data.max_length={data.max_length}"
        way_out = f"raise data.max_length, or leave such prompts out ({len(long)} of {len(found)}): data.too_long: drop"
        raise UserError(f"{long[0].origin}: a prompt of {len(long[0].ids)} tokens", rule, way_out)
    if long and say is not None:
        say(f"{len(long)} of {len(found)} prompts are left out: longer than {most} tokens")
    found = [prompt for prompt in found if len(prompt.ids) <= most]
    if not found:
        raise UserError(f"{data.train}", f"no prompt has at most {most} tokens", "raise data.max_length")
    lacking = next((prompt for prompt in found if prompt.whole is None), None)
    if rl.on_policy < 1 and lacking is not None:
        rule = "it has no completion, and rl.on_policy below 1 trains on those of the data, too"
        raise UserError(lacking.origin, rule, "give a field completion, or an answer in messages")
    has_chats = any(row.record is not None for row in rows)
    form = CONVERSATIONS if has_chats else TEXTS
    return Prompts(found, config.train.batch_size // rl.completions, config.train.seed, form)


def _asked(name: str, row: dict[str, Any], origin: str) -> _Asked:
    asked, rest = row[name], {key: value for key, value in row.items() if key != name}
    whole: dict[str, Any] | None = None
    if name == "prompt" and rest.get("completion"):
        whole = {name: asked, "completion": rest["completion"]}
    if name == "prompt" and isinstance(asked, str):
        return _Asked(checked_text(asked, "prompt"), None, rest, origin, whole)
    found, answer = open_conversation(asked, "prompt")
    if answer is not None:
        whole = {"messages": asked}
        rest = {"answer": answer.get("content"), **rest}  # what is left out is what it is compared with
    return _Asked(None, Record(messages=found, origin=origin), rest, origin, whole)
