"""Instructions as plain text in a style, and the turn of the system that conversations do not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshlora.reading.prompt_styles import STYLES, record_formats
from meshlora.reading.readers import READERS
from meshlora.reading.sources import read_records
from meshlora_ground.errors import UserError
from tests.unit.records import EOS, UNMARKED, make_tokenizer, trained_text

# Stanford's words (tatsu-lab/stanford_alpaca, train.py), each section's newline included.
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n"
)
WITHOUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)
READ = ["text", "streamed"]


def _file(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "a.jsonl")


def _read(source: str, reader: str, folder: Path, **options: Any) -> tuple[Any, Any, list[str]]:
    tokenizer, said = make_tokenizer(chat_template=UNMARKED), list[str]()
    given = {"columns": None, "max_length": 1000, "vocab_size": 10**6, "cache_dir": folder / "cache"} | options
    return READERS[reader](source, tokenizer, say=said.append, **given), tokenizer, said


@pytest.mark.parametrize("reader", READ)
@pytest.mark.parametrize(
    ("style", "row", "prompt", "completion"),
    [
        ("alpaca", {"instruction": "Add.", "input": "2, 3", "output": "5"}, WITH_INPUT.format("Add.", "2, 3"), "5"),
        ("alpaca", {"instruction": "Add.", "input": "", "output": "5"}, WITHOUT.format("Add."), "5"),
        ("alpaca", {"instruction": "Add.", "output": " 5"}, WITHOUT.format("Add."), " 5"),
        ("alpaca", {"instruction": "Add.", "context": "2", "response": "5"}, WITH_INPUT.format("Add.", "2"), "5"),
        ("alpaca", {"question": "2 + 3?", "answer": "5"}, WITHOUT.format("2 + 3?"), "5"),
        ("qa", {"question": "2 + 3?", "answer": "5"}, "Question: 2 + 3?\nAnswer:", " 5"),
        ("qa", {"instruction": "Add.", "input": "2", "output": "5"}, "2\n\nQuestion: Add.\nAnswer:", " 5"),
    ],
)
def test_prompt_is_the_text_of_its_style_and_the_answer_alone_is_trained(
    style: str, row: dict[str, Any], prompt: str, completion: str, reader: str, tmp_path: Path
) -> None:
    found, tokenizer, _ = _read(_file(tmp_path, row), reader, tmp_path, prompt=style)
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, completion)]
    assert found.input_ids.tolist() == [*ids[0], *ids[1], tokenizer.eos_token_id]
    assert trained_text(found, tokenizer) == completion + EOS
    everything, _, _ = _read(_file(tmp_path, row), reader, tmp_path, prompt=style, train_on="everything")
    assert everything.is_trained.all()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "unknown field 'messages'"),
        ({"instruction": "a", "output": "b", "system": "c"}, "'system' may say something about the training"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "'history' may say something"),
        ({"instruction": "a", "output": " "}, "empty output"),
        ({"instruction": "", "output": "a"}, "empty instruction"),
    ],
)
def test_rows_that_a_style_cannot_write_are_named(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        read_records(_file(tmp_path, row), prompt="alpaca")
    assert f"{tmp_path}/a.jsonl:1: " in str(raised.value)
    assert words in str(raised.value)


def test_a_style_that_there_is_not_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'alpaca'"):
        record_formats("alpacca")
    assert {*STYLES} == {"alpaca", "qa"}


ASKED, SAID, OWN = ({"role": role, "content": role} for role in ("user", "assistant", "system"))
CHAT = [ASKED, SAID]
# Reader -> a row of conversations, in which the system says nothing or something; one of texts.
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    **dict.fromkeys(
        READ, ({"messages": CHAT}, {"messages": [OWN, *CHAT]}, {"prompt": "user", "completion": "assistant"})
    ),
    "pairs": (
        {"prompt": [ASKED], "chosen": [SAID], "rejected": [{**SAID, "content": "no"}]},
        {"prompt": [OWN, ASKED], "chosen": [SAID], "rejected": [{**SAID, "content": "no"}]},
        {"prompt": "user", "chosen": "assistant", "rejected": "no"},
    ),
    "feedback": (
        {"prompt": [ASKED], "completion": [SAID], "label": True},
        {"prompt": [OWN, ASKED], "completion": [SAID], "label": True},
        {"prompt": "user", "completion": "assistant", "label": True},
    ),
    "rollouts": (
        {"messages": CHAT, "advantage": 1.0},
        {"messages": [OWN, *CHAT], "advantage": 1.0},
        {"prompt": "user", "completion": "assistant", "advantage": 1.0},
    ),
}


@pytest.mark.parametrize("reader", ROWS)
def test_system_speaks_first_in_conversations_where_it_says_nothing(reader: str, tmp_path: Path) -> None:
    without, with_own, _ = ROWS[reader]
    texts = []
    for row in (without, with_own):
        file = _file(tmp_path, row, {**row, "prompt": [*row["prompt"], ASKED]} if reader == "feedback" else row)
        found, tokenizer, said = _read(file, reader, tmp_path, system="be kind")
        texts.append(tokenizer.decode(found[0].input_ids))
        assert any("conversations have their own" in line for line in said) == (row is with_own)
        assert trained_text(found, tokenizer) == "assistant<|end|>"
    assert texts[0].startswith("<|start|>system\nbe kind<|end|>\n<|start|>user\nuser<|end|>\n")
    assert texts[1].startswith("<|start|>system\nsystem<|end|>\n<|start|>user\nuser<|end|>\n")


@pytest.mark.parametrize("reader", ROWS)
def test_system_without_any_conversation_is_an_option_without_effect(reader: str, tmp_path: Path) -> None:
    row = ROWS[reader][2]
    with pytest.raises(UserError, match=r"data\.system='be kind': no record is a conversation"):
        _read(_file(tmp_path, row, {**row, "prompt": "other"}), reader, tmp_path, system="be kind")
