"""Random conversations under every template that is here: what none may do to what is trained.

They are those of `tests/data/templates`, in the shape of published ones, and those that the installed TRL has of
published models. Nothing here knows a header: each text has words of its own, so that it is known whose a trained word
is.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from meshlora.reading.chat import Row, tokenize_conversations
from meshlora.reading.lost import ANSWER, NO_END, REASONED
from meshlora.reading.records import Record
from tests.for_each import for_each
from tests.unit.records import serialized

_OWN, _TRL = Path(__file__).parents[1] / "data" / "templates", importlib.util.find_spec("trl")
_FOLDERS = [_OWN, *([Path(_TRL.origin).parent / "chat_templates"] if _TRL is not None and _TRL.origin else [])]
FILES = {file.stem: file for folder in _FOLDERS for file in sorted(folder.glob("*.jinja"))}
NAMES = sorted(FILES)
# How special tokens are spelt, and which of them end an answer.
_SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>]{1,40}｜>|</?s>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|<[be]os>|\[/?[A-Z_]{4,30}\]"
)
_STOPS = re.compile(r"im_end|eot|end_of|turn\|>|END_OF_TURN|eos|</s>|end▁of|return|<\|end|user\|>|observation")
_ROWS_AT_ONCE = 25  # in one process
# (role, number of the turn, kind) of each word: `wA3cw` is of the content of answer 3.
_WORD = re.compile(r"w([ASTU])(\d)([crt])w")
_PLAIN = ["é", "日本", "  ", "\n\n", "**", "assistant", '"', "\\", "\ue000", "{'a': 1}", "<b>", "a < b"]
_HOSTILE = [
    *("<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "[/INST]", "</s>", "<tool_call>", "</tool_call>"),
    *("{{ x }}", "<|eot_id|>", "<|", "|>", "<end_of_turn>", "<|user|>", "<|end|>", "<|return|>", "<｜Assistant｜>"),
]
_TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look up", "parameters": {"type": "object"}},
}


@functools.cache
def _folder(stops: tuple[int, ...], parent: Path) -> Path:
    folder = parent / "-".join(map(str, stops))
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(stops)}))
    return folder


@functools.cache
def _tokenizer(name: str, parent: Path) -> Any:
    template = FILES[name].read_text("utf-8")
    special = sorted({*_SPECIAL.findall(template), "</s>"})
    stops = [token for token in special if _STOPS.search(token)]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(serialized()))
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_special_tokens({"eos_token": stops[0], "bos_token": "<s>"})
    tokenizer.chat_template = template
    tokenizer.name_or_path = str(_folder(tuple(tokenizer.convert_tokens_to_ids(stops)), parent))
    return tokenizer


@st.composite
def _said(draw: st.DrawFn, word: str, junk: list[str]) -> str:
    """A text with `word` at its beginning, somewhere, and at its end."""
    parts = [word, *draw(st.lists(st.sampled_from([*junk, word]), max_size=3)), word]
    return " ".join(parts)


@st.composite
def _conversations(draw: st.DrawFn) -> Record:
    """Of up to four exchanges, with calls, thoughts in both forms, weights, and what looks like a header."""
    hostile = draw(st.sampled_from([[], [], _HOSTILE]))
    own = _PLAIN + hostile
    has_tools, messages = draw(st.booleans()), list[dict[str, Any]]()
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(_said("wS0cw", own))})
    for number in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(_said(f"wU{number}cw", own))})
        if has_tools and draw(st.booleans()):
            arguments = {"place": draw(_said(f"wA{number}tw", _PLAIN))}
            call = {"id": f"call{number:05d}", "type": "function"}
            call |= {"function": {"name": "look_up", "arguments": arguments}}
            messages.append({"role": "assistant", "content": draw(st.sampled_from(["", None])), "tool_calls": [call]})
            result = draw(_said(f"wT{number}cw", own))
            messages.append({"role": "tool", "name": "look_up", "tool_call_id": call["id"], "content": result})
        answer = {"role": "assistant", "content": draw(_said(f"wA{number}cw", _PLAIN))}
        thought = draw(_said(f"wA{number}rw", _PLAIN))
        how = draw(st.sampled_from(["", "", "field", "inside"]))
        if how == "field":
            answer["reasoning_content"] = thought
        elif how == "inside":
            answer["content"] = f"<think>\n{thought}\n</think>\n\n{answer['content']}"
        if draw(st.integers(0, 9)) == 0:
            answer["weight"] = 0
        messages.append(answer)
    return Record(messages=tuple(messages), tools=(_TOOL,) if has_tools else None, origin=f"{len(messages)} messages")


def _words_of(message: dict[str, Any]) -> set[str]:
    return {found[0] for found in _WORD.finditer(json.dumps(message, ensure_ascii=False))}


def _faults(record: Record, row: Row, tokenizer: Any, train_on: str) -> list[str]:
    text = tokenizer.decode(row.ids)
    trained = tokenizer.decode([token for token, is_trained in zip(row.ids, row.is_trained, strict=True) if is_trained])
    answers = [message for message in record.messages or () if message["role"] == "assistant"]
    wanted = [message for message in (answers[-1:] if train_on == "last" else answers) if message.get("weight") != 0]
    own = set[str]().union(*map(_words_of, wanted))
    found = {word[0] for word in _WORD.finditer(trained)}
    faults = [f"trained {word}, which is of others" for word in sorted(found - own)]
    for word in sorted(own):
        if text.count(word) != trained.count(word):
            faults.append(f"{word} stands {text.count(word)} times in the text, {trained.count(word)} of them trained")
        if word not in text and not {*row.lost} - {ANSWER, REASONED}:
            faults.append(f"{word} is not in the text, and nobody says so")
    return faults


@pytest.mark.long
@settings(max_examples=80, deadline=None, suppress_health_check=[*HealthCheck])
@given(
    records=st.lists(_conversations(), min_size=_ROWS_AT_ONCE, max_size=_ROWS_AT_ONCE),
    name=st.sampled_from(NAMES),
    train_on=st.sampled_from(["all", "all", "last"]),
)
def test_no_word_of_others_is_trained_and_none_of_an_answer_left_out_unsaid(
    records: list[Record], name: str, train_on: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = _tokenizer(name, tmp_path_factory.getbasetemp())
    rows = tokenize_conversations(records, tokenizer, max_length=2**20, train_on=train_on, processor=None, skips=True)
    for record, row in zip(records, rows, strict=True):
        faults = [] if row is None else _faults(record, row, tokenizer, train_on)
        assert not faults, (name, train_on, record.messages, faults)


@pytest.mark.long
@for_each("name", NAMES)
def test_plain_chats_are_never_refused(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = _tokenizer(name, tmp_path_factory.getbasetemp())
    turns = [
        {"role": role, "content": f"w{role[0].upper()}{number}cw said"}
        for number in range(3)
        for role in ("user", "assistant")
    ]
    records = [Record(messages=tuple(turns[: 2 * number]), origin="a:1") for number in (1, 2, 3)]
    rows = tokenize_conversations(records, tokenizer, max_length=2**20, train_on="all", processor=None)
    for record, row in zip(records, rows, strict=True):
        assert row is not None
        assert _faults(record, row, tokenizer, "all") == []
        assert {*row.lost} <= {ANSWER, NO_END}
