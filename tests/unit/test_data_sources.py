"""Files, folders and datasets become records; every mistake in them is named by file and line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshlora.reading.preferences import read_preferences
from meshlora.reading.readers import READERS
from meshlora.reading.records import Record, listed
from meshlora.reading.sources import read_records
from meshlora_ground.errors import UserError
from tests.unit.records import EOS, UNMARKED, make_tokenizer

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def error_of(source: Any, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        read_records(source, **options)
    return str(error.value)


# ---- what is read


def test_jsonl_of_all_three_kinds_is_taken_literally_with_its_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        '{"text": " one\\u2028two "}\n\n{"prompt": "p ", "completion": "c\\n"}\r\n'
        '{"context": "p", "completion": "c"}\n' + json.dumps({"messages": CHAT}) + "\n",
    )
    assert read_records(path) == [
        Record(text=" one\u2028two ", origin=f"{path}:1"),
        Record(prompt="p ", completion="c\n", origin=f"{path}:3"),
        Record(prompt="p", completion=" c", origin=f"{path}:4"),
        Record(messages=tuple(CHAT), origin=f"{path}:5"),
    ]


def test_an_empty_prompt_is_generation_from_nothing_not_a_mistake(tmp_path: Path) -> None:
    assert read_records(write(tmp_path / "a.jsonl", '{"prompt": "", "completion": "c"}'))[0].prompt == ""


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '{"text": "one\u2028two\x85three"}\n{"text": "four"}')
    assert [record.text for record in read_records(path)] == ["one\u2028two\x85three", "four"]


def test_a_byte_order_mark_is_not_part_of_the_data(tmp_path: Path) -> None:
    assert read_records(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "x"}'))[0].text == "x"
    assert read_records(write(tmp_path / "a.txt", b"\xef\xbb\xbfp||c"))[0].prompt == "p"
    assert read_records(write(tmp_path / "a.csv", b"\xef\xbb\xbftext\nx\n"))[0].text == "x"


def test_separated_text_joins_by_exactly_one_space_whatever_was_around_the_separator(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "name : A | area : B||It is A . \n\nq || r s\t\r\n||unprompted\n")
    assert read_records(path) == [
        Record(prompt="name : A | area : B", completion=" It is A .", origin=f"{path}:1"),
        Record(prompt="q", completion=" r s", origin=f"{path}:3"),
        Record(prompt="", completion=" unprompted", origin=f"{path}:4"),
    ]


def test_csv_values_stay_strings_and_know_their_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'prompt,completion\n"1 +\n1","2"\n3,4.0\n')
    assert read_records(path) == [
        Record(prompt="1 +\n1", completion="2", origin=f"{path}:2"),
        Record(prompt="3", completion="4.0", origin=f"{path}:4"),
    ]


def test_parquet_dataset_and_saved_folder_give_the_same_records(tmp_path: Path) -> None:
    import datasets

    rows = [{"question": f"q{i}", "answer": f"a{i}", "id": i} for i in range(3)]
    columns = {"prompt": "question", "completion": "answer"}
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(str(tmp_path / "saved"))
    expected = [("q0", "a0"), ("q1", "a1"), ("q2", "a2")]
    for source, name in [
        (dataset, "dataset"),
        (tmp_path / "a.parquet", f"{tmp_path}/a.parquet"),
        (str(tmp_path / "saved"), f"{tmp_path}/saved"),
    ]:
        records = read_records(source, columns=columns)
        assert [(record.prompt, record.completion) for record in records] == expected
        assert [record.origin for record in records] == [f"{name} row {i}" for i in range(3)]


def test_a_datasets_selection_and_its_format_do_not_matter() -> None:
    import datasets

    dataset = datasets.Dataset.from_dict({"text": ["a", "b", "c"]}).select([2, 0]).with_format("numpy")
    assert [record.text for record in read_records(dataset)] == ["c", "a"]


def test_arrow_fills_messages_with_none_which_a_template_must_not_see(tmp_path: Path) -> None:
    import datasets

    messages = [{"role": "user", "content": "hi", "name": "Ann"}, {"role": "assistant", "content": "hello"}]
    dataset = datasets.Dataset.from_dict({"messages": [messages]})
    assert read_records(dataset)[0].messages == tuple(messages)


def test_several_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    paths = [write(tmp_path / "b.jsonl", '{"text": "b"}'), str(write(tmp_path / "a.txt", "p||c"))]
    assert [record.origin for record in read_records(paths)] == [f"{tmp_path}/b.jsonl:1", f"{tmp_path}/a.txt:1"]


def test_columns_name_what_is_read_and_the_rest_is_ignored(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "no", "question": "q", "completion": "c", "id": 3}')
    # Naming only one of the pair leaves the other under its own name.
    assert read_records(path, columns={"prompt": "question"})[0].prompt == "q"
    assert read_records(path, columns={"text": "question"})[0].text == "q"


def _said_of(source: Any, columns: dict[str, str] | None) -> list[str]:
    said: list[str] = []
    read_records(source, columns=columns, say=said.append)
    return said


def test_what_the_chosen_columns_leave_out_is_said_once_for_each_path(tmp_path: Path) -> None:
    import datasets

    rows = [{"instruction": "q", "input": "x", "output": "a", "id": 1}, {"instruction": "q", "output": "a", "n": 1}]
    columns = {"prompt": "instruction", "completion": "output"}
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    other = write(tmp_path / "b.csv", "instruction,output,extra\nq,a,1\nq,a,2\n")
    read, ways = "read as prompt_completion (instruction, output)", "; to read it otherwise: data.format, data.columns"
    alpaca = " (in Alpaca's records `input` is part of what is asked: data.format: alpaca reads it)"
    assert _said_of([path, other], columns) == [
        f"{path}: {read}; not read: input, id, n{alpaca}{ways}",
        f"{other}: {read}; not read: extra{ways}",
    ]
    dataset = datasets.Dataset.from_list([rows[0]])
    assert _said_of(dataset, columns) == [f"dataset: {read}; not read: input, id{alpaca}{ways}"]
    dataset.to_parquet(tmp_path / "a.parquet")
    assert len(_said_of(tmp_path / "a.parquet", columns)) == 1
    assert _said_of(dataset.select_columns(["instruction", "output"]), columns) == [f"dataset: {read}{ways}"]
    assert _said_of(write(tmp_path / "c.jsonl", '{"text": "a"}'), None) == [
        f"{tmp_path}/c.jsonl: read as text (text){ways}"
    ]
    assert _said_of([other, other, other], columns)[0].startswith(f"{other}: read as")


def test_what_is_said_of_names_that_a_stranger_chose_is_short_and_without_control_characters(tmp_path: Path) -> None:
    row = {"text": "a", "\x1b]0;owned\x07": 1} | {f"{'x' * 10**5}{number}": 1 for number in range(20)}
    (said,) = _said_of(write(tmp_path / "a.jsonl", json.dumps(row)), {"text": "text"})
    assert "'\\x1b]0;owned\\x07'" in said
    assert said.isprintable()
    assert " and 11 more" in said
    assert len(said) < 1500


# ---- what is refused


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "x"', "bad JSON"),
        ('["x"]', "a list, not an object"),
        ("{}", "no field"),
        ('{"prompt": "x"}', "'completion' is missing"),
        ('{"completion": "x"}', "'prompt' is missing"),
        ('{"prompt": "x", "completoin": "y"}', "unknown field 'completoin'; did you mean 'completion'?"),
        ('{"text": "x", "weight": 2}', "'weight' may say something about the training, and would not be read"),
        ('{"messages": [], "prompt": "y", "completion": "z"}', "different kinds of record, messages (messages) and"),
        ('{"prompt": "x", "context": "y", "completion": "z"}', "different kinds of record"),
        ('{"prompt": "x", "completion": "y", "tols": [1]}', "unknown field 'tols'; did you mean 'tools'?"),
        ('{"prompt": "x", "chosen": "y", "rejected": "z"}', "has chosen and rejected, which train.objective dpo"),
        ('{"chosen": "y", "rejected": "z"}', "has chosen and rejected, which train.objective dpo"),
        ('{"prompt": "x", "completion": ""}', "empty completion"),
        ('{"prompt": "x", "completion": " \\n"}', "empty completion"),
        ('{"text": ""}', "empty text"),
        ('{"text": 3}', "text is a number, not a string"),
        ('{"prompt": null, "completion": "x"}', "prompt is null, not a string"),
        ('{"text": "\\ud83d"}', "lone surrogate"),
        ('{"messages": "hi"}', "messages is a string, not a list"),
        ('{"messages": []}', "no assistant turn"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "no assistant turn"),
        ('{"messages": ["hi"]}', "messages[0] is a string, not an object"),
        ('{"messages": [{"content": "hi"}]}', "messages[0] has no role"),
        ('{"messages": [{"role": "asistant", "content": "hi"}]}', "unknown role 'asistant'; did you mean 'assistant'?"),
        ('{"messages": [{"role": ["user"], "content": "hi"}]}', "unknown role"),
        ('{"messages": [{"role": "assistant"}]}', "messages[0] has no content"),
        ('{"messages": [{"role": "assistant", "content": null}]}', "messages[0] has no content"),
        (
            '{"messages": [{"role": "assistant", "content": ["hi"]}]}',
            "messages[0].content[0] is a string, not an object",
        ),
        ('{"messages": [{"role": "user", "content": "a", "weight": 1}]}', "only turns of the assistant are trained"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}', "neither 0 (not trained) nor 1"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": true}]}', "neither 0 (not trained) nor 1"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": "0"}]}', "neither 0 (not trained) nor 1"),
    ],
)
def test_a_malformed_json_line_is_named_with_its_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "good"}\n\n' + line + "\n")
    message = error_of(path)
    assert f"{path}:3: " in message
    assert reason in message
    assert "1 malformed record:" in message


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no separator", "0 separators '||'"),
        ("a||b||c", "2 separators '||'"),
        ("a|| ", "empty completion"),
        (b"caf\xe9||x", "not UTF-8 (byte 4 of the line)"),
    ],
)
def test_a_malformed_text_line_is_named_with_its_reason(tmp_path: Path, line: str | bytes, reason: str) -> None:
    line = line if isinstance(line, bytes) else line.encode()
    message = error_of(write(tmp_path / "a.txt", b"good||line\n" + line))
    assert f"{tmp_path}/a.txt:2: {reason}" in message


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("p,c\nonly one\n", ":3: 1 values under 2 columns"),
        ('p,"c"x\n', ":3: bad CSV"),
        ("p,\n", ":3: empty completion"),
        (b"p,caf\xe9\n", ":3: not UTF-8 (byte 6 of the line)"),
    ],
)
def test_a_malformed_csv_row_is_named_with_its_reason(tmp_path: Path, rows: str | bytes, reason: str) -> None:
    rows = rows if isinstance(rows, bytes) else rows.encode()
    rows = rows if rows.count(b"\n") > 1 else b"good,row\n" + rows
    assert f"{tmp_path}/a.csv{reason}" in error_of(write(tmp_path / "a.csv", b"prompt,completion\n" + rows))


def test_five_malformed_lines_are_shown_and_all_are_counted_over_all_files(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", "bad\n" * 3)
    second = write(tmp_path / "b.jsonl", "bad\n" * 4)
    message = error_of([first, second])
    assert "7 malformed records" in message
    assert message.count("bad JSON") == 1
    assert f"{first}:1, 2, 3, {second}:1, 2 and 2 more: bad JSON" in message
    wrong = [{"messages": [{"role": f"r{number}", "content": "a"}]} for number in (*range(7), 0)]
    third = write(tmp_path / "c.jsonl", "".join(json.dumps(row) + "\n" for row in wrong))
    message = error_of(third)
    assert message.count("unknown role") == 5
    assert f"{third}:1, 8: messages[0] has unknown role 'r0'" in message
    assert message.endswith("and 2 more")


@pytest.mark.parametrize(
    ("row", "proposal"),
    [
        ({"ask": "q", "say": "a", "id": 3}, "user: ask, assistant: say"),
        ({"question_text": "q", "n": "x", "final_answer": "a"}, "user: question_text, assistant: final_answer"),
        ({"turns": CHAT}, "messages: turns"),
        ({"body": "a text", "n": 3}, "text: body"),
        ({"a": "q", "b": "a", "c": "x"}, ""),
        ({"a'b": "q", "c d": "a"}, ""),
    ],
)
def test_rows_of_no_known_format_say_their_fields_once_and_propose_columns(
    row: dict[str, Any], proposal: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", (json.dumps(row) + "\n") * 300)
    message = error_of(path)
    assert message.startswith("300 malformed records")
    assert message.count("unknown field") == 1
    assert f"its fields: {listed(row)}" in message
    assert f"{path}:1, 2, 3, 4, 5 and 295 more: unknown field" in message
    assert ("--set" in message) == bool(proposal)
    if proposal:
        assert f"perhaps --set 'data.columns={{{proposal}}}'" in message
        assert len(read_records(path, columns=yaml.safe_load(f"{{{proposal}}}"))) == 300


def test_columns_are_proposed_for_pairs_and_for_tables(tmp_path: Path) -> None:
    import datasets

    path = write(tmp_path / "a.jsonl", json.dumps({"query": "q", "better_reply": "a", "worse_reply": "b"}))
    with pytest.raises(UserError, match=r"\{question: query, chosen: better_reply, rejected: worse_reply\}"):
        read_preferences(str(path), make_tokenizer(), max_length=8)
    table = datasets.Dataset.from_dict({"the_question": ["q"], "the_reply": ["a"], "n": [1]})
    assert "perhaps --set 'data.columns={user: the_question, assistant: the_reply}'" in error_of(table)


def test_pairs_of_names_that_fit_alike_are_not_chosen_among(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"question": "q", "answer": "a", "response": "b"}')
    assert "user_assistant (question, answer) and user_assistant (question, response)" in error_of(path)
    (record,) = read_records(path, columns={"question": "question", "response": "response"})
    assert record.messages is not None
    assert record.messages[-1]["content"] == "b"


def test_columns_of_user_and_assistant_make_a_conversation(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"ask": "q", "reply": "a", "rules": "be kind"}')
    (record,) = read_records(path, columns={"user": "ask", "assistant": "reply", "system": "rules"})
    roles = [(message["role"], message["content"]) for message in record.messages or ()]
    assert roles == [("system", "be kind"), ("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize(
    ("row", "columns", "words"),
    [
        ({"a": "q", "b": "c"}, {"prompt": "a", "completion": "b"}, "data.columns: {user: a, assistant: b} makes"),
        ({"prompt": "q", "completion": "c"}, None, "data.columns: {user: prompt, assistant: completion} makes"),
        ({"a": "q", "b": "c"}, {"user": "a", "assistant": "b"}, ""),
        ({"prompt": "q", "completion": [{"role": "assistant", "content": "c"}]}, None, ""),
        ({"text": "q"}, None, ""),
    ],
)
def test_plain_text_in_spite_of_a_chat_template_is_said_once(
    row: dict[str, Any], columns: dict[str, str] | None, words: str, tmp_path: Path
) -> None:
    files = [str(write(tmp_path / name, (json.dumps(row) + "\n") * 3)) for name in ("a.jsonl", "b.jsonl")]
    for template in (None, UNMARKED):
        said, tokenizer = list[str](), make_tokenizer(chat_template=template)
        with contextlib.suppress(UserError):  # a conversation needs a template
            READERS["text"](files, tokenizer, columns=columns, say=said.append, max_length=64)
        joined = [line for line in said if "joined as plain text" in line]
        assert len(joined) == int(bool(words and template))
        assert all(words in line for line in joined)


def test_pairs_of_plain_text_are_said_and_a_separator_and_a_style_ask_for_plain_text(tmp_path: Path) -> None:
    tokenizer, said = make_tokenizer(chat_template=UNMARKED), list[str]()
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}))
    read_preferences(str(path), tokenizer, max_length=64, say=said.append)
    assert any("data.columns: {question: prompt, chosen: chosen, rejected: rejected} makes" in line for line in said)
    said.clear()
    plain = write(tmp_path / "b.jsonl", json.dumps({"prompt": "q", "completion": "c"}))
    asked = write(tmp_path / "c.jsonl", json.dumps({"question": "q", "answer": "c"}))
    for source, options in ((plain, {"separator": EOS}), (asked, {"prompt": "qa"})):
        READERS["text"](str(source), tokenizer, columns=None, say=said.append, max_length=64, **options)
    assert not any("joined as plain text" in line for line in said)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error_not_a_run_without_data(tmp_path: Path, name: str, content: str) -> None:
    if name == "a.csv":
        content = content and "text\n\n"
    assert "holds no record" in error_of(write(tmp_path / name, content))
    # Also beside one that is not empty.
    assert f"{tmp_path}/{name}: holds no record" in error_of([write(tmp_path / "b.txt", "p||c"), tmp_path / name])


def test_an_empty_dataset_is_an_error(tmp_path: Path) -> None:
    import datasets

    empty = datasets.Dataset.from_dict({"text": []})
    assert "holds no record" in error_of(empty)
    empty.to_parquet(tmp_path / "a.parquet")
    assert "holds no record" in error_of(tmp_path / "a.parquet")


def test_a_missing_file_names_the_nearest_in_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "x")
    assert f"did you mean '{tmp_path}/train.jsonl'?" in error_of(tmp_path / "trian.jsonl")
    assert f"{tmp_path} holds train.jsonl" in error_of(tmp_path / "0")
    assert "does not exist either" in error_of(tmp_path / "none" / "train.jsonl")


def test_a_folder_that_is_no_dataset_and_one_with_splits_say_what_to_name(tmp_path: Path) -> None:
    import datasets

    assert "neither Dataset.save_to_disk wrote nor has files .jsonl" in error_of(tmp_path)
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})})
    splits.save_to_disk(str(tmp_path / "splits"))
    assert f"{tmp_path}/splits/train" in error_of(tmp_path / "splits")
    assert "source['train']" in error_of(splits)
    assert read_records(tmp_path / "splits" / "train")[0].text == "a"


def test_columns_that_do_not_exist_name_the_nearest(tmp_path: Path) -> None:
    import datasets

    dataset = datasets.Dataset.from_dict({"question": ["q"], "answer": ["a"]})
    wrong = {"prompt": "questoin", "completion": "answer"}
    assert "did you mean 'question'?" in error_of(dataset, columns=wrong)
    assert "did you mean 'prompt'?" in error_of(dataset, columns={"promt": "question"})
    assert "more than one kind" in error_of(dataset, columns={"prompt": "question", "text": "answer"})
    assert "unknown field 'ask'" in error_of(datasets.Dataset.from_dict({"ask": ["q"], "say": ["a"]}))
    path = write(tmp_path / "a.jsonl", '{"question": "q", "answer": "a"}')
    assert f"{path}:1: no column 'questoin' (for prompt); did you mean 'question'?" in error_of(path, columns=wrong)
    path = write(tmp_path / "a.csv", "question,answer\nq,a\n")
    assert f"{path}:1: columns question, answer" in error_of(path, columns=wrong)
    assert "more than one column 'text'" in error_of(write(tmp_path / "b.csv", "text,text\na,b\n"))


def test_columns_on_a_file_without_columns_is_an_error_not_an_option_without_effect(tmp_path: Path) -> None:
    assert "they have no effect on" in error_of(write(tmp_path / "a.txt", "p||c"), columns={"prompt": "p"})


def test_a_row_of_a_table_is_named_by_its_number() -> None:
    import datasets

    dataset = datasets.Dataset.from_dict({"prompt": ["p", "p"], "completion": ["c", None]})
    assert "dataset row 1: completion is null" in error_of(dataset)


def test_what_is_neither_a_path_nor_a_dataset_is_refused(tmp_path: Path) -> None:
    assert "source of type dict" in error_of({"text": ["a"]})
    assert "names no file" in error_of([])
    assert "is not a Parquet file" in error_of(write(tmp_path / "a.parquet", "no"))


@pytest.mark.parametrize("fields", [{}, {"text": "a", "prompt": "b", "completion": "c"}, {"prompt": "b"}])
def test_a_record_made_by_hand_is_of_exactly_one_kind(fields: dict[str, str]) -> None:
    with pytest.raises(UserError, match="exactly one of"):
        Record(**fields, origin="by hand")
