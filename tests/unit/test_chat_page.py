"""docs/chat.md: its table is what the templates of tests/data/templates do, computed here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from meshlora.reading.records import Record
from meshlora.reading.tokenization import tokenize
from meshlora_ground.errors import UserError
from tests.unit.records import END, make_tokenizer, trained_text

PAGE = Path(__file__).parents[2] / "docs/chat.md"
TEMPLATES = sorted((Path(__file__).parents[1] / "data/templates").glob("*.jinja"))
_BEGIN, _END = "<!-- table: tests/unit/test_chat_page.py -->\n", "<!-- end -->\n"


def _answer(number: int, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": f"Answer{number}", **more}


_ASKED = {"role": "user", "content": "Asked"}
_FIELDS = [_answer(n, reasoning_content=f"Thought{n}") for n in (1, 2)]
_INSIDE = [_answer(n, content=f"<think>\nThought{n}\n</think>\n\nAnswer{n}") for n in (1, 2)]
_CALL = {"type": "function", "function": {"name": "Called", "arguments": {"what": "Argument"}}}
_RESULT = {"role": "tool", "name": "Called", "content": "Result"}
_WORDS = ("Answer1", "Answer2", "Thought1", "Thought2", "Argument")

# Name of a column -> messages, options.
SITUATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, str]]] = {
    "two answers": ([_ASKED, _answer(1), _ASKED, _answer(2)], {}),
    "reasoning in a field": ([_ASKED, _FIELDS[0], _ASKED, _FIELDS[1]], {}),
    "`<think>` in the content": ([_ASKED, _INSIDE[0], _ASKED, _INSIDE[1]], {}),
    "the same, `turns: apart`": ([_ASKED, _INSIDE[0], _ASKED, _INSIDE[1]], {"turns": "apart"}),
    "the same, `as_generated`": (
        [_ASKED, _INSIDE[0], _ASKED, _INSIDE[1]],
        {"turns": "apart", "answers": "as_generated"},
    ),
    "a call": ([_ASKED, _answer(1, content=None, tool_calls=[_CALL]), _RESULT, _answer(2)], {}),
    "words beside a call": ([_ASKED, _answer(1, tool_calls=[_CALL]), _RESULT, _answer(2)], {}),
}


def _cell(template: str, messages: list[dict[str, Any]], options: dict[str, str]) -> str:
    """What becomes of the answers of a conversation."""
    tokenizer, said = make_tokenizer(chat_template=template, eos=END), list[str]()
    record = Record(messages=tuple(messages), origin="a.jsonl:1")
    try:
        found = tokenize([record], tokenizer, max_length=512, say=said.append, **options)
    except UserError as error:
        if "the chat template refuses them" in str(error):
            return "its own error"
        return "refused" if "data.lost_text: note" in str(error) else str(error)
    trained = "".join(trained_text(found, tokenizer, index) for index in range(len(found)))
    written = [word for word in _WORDS if word in f"{messages}"]
    lost = [word for word in written if trained.count(word) != 1]
    assert "Asked" not in trained
    assert "Result" not in trained
    if lost:
        assert lost == ["Thought1"]
        assert any("as at inference" in line for line in said)
        return "the last's alone"
    return "trained"


def _table() -> str:
    rows = [["template", *SITUATIONS], ["---"] * (len(SITUATIONS) + 1)]
    for file in TEMPLATES:
        template = file.read_text()
        what = re.match(r"\{#- (.*) #\}", template)
        assert what is not None, file
        rows.append([what[1], *(_cell(template, *situation) for situation in SITUATIONS.values())])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


@pytest.mark.long
def test_the_table_of_the_page_is_what_the_templates_do(capsys: pytest.CaptureFixture[str]) -> None:
    table = _table()
    with capsys.disabled():
        before, _, rest = PAGE.read_text().partition(_BEGIN)
        there, _, after = rest.partition(_END)
        if there != table:
            print(f"\n{table}")
    assert before
    assert after
    assert there == table, f"copy the table that is printed above to {PAGE.name}"
