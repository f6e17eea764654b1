"""Records with more tokens than fit: cut, left out, split or refused, and how many is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshlora.reading.preferences import read_feedback, read_preferences
from meshlora.reading.records import Record
from meshlora.reading.rollouts import read_rollouts
from meshlora.reading.tokenization import tokenize
from meshlora_ground.errors import UserError
from tests.for_each import for_each
from tests.unit.records import END, MARKED, UNMARKED, chat, make_tokenizer, pair, trained_text

LONG = pair("near the river and the city centre " * 3, " the house", origin="a.jsonl:2")
RECORDS = [pair("near", " the river", origin="a.jsonl:1"), LONG, pair("the city", " is", origin="a.jsonl:3")]


def said_of(records: list[Record], tokenizer: Any = None, **options: Any) -> tuple[Any, list[str]]:
    said: list[str] = []
    return tokenize(records, tokenizer or make_tokenizer(), say=said.append, **options), said


def test_long_record_is_left_out_and_the_others_stay_what_they_are(tmp_path: Path) -> None:
    for _ in range(2):  # made, and from the cache
        found, said = said_of(RECORDS, max_length=12, too_long="drop", cache_dir=tmp_path)
        others = tokenize([RECORDS[0], RECORDS[2]], make_tokenizer(), max_length=12)
        assert found.input_ids.tolist() == others.input_ids.tolist()
        assert found.offsets.tolist() == others.offsets.tolist()
        assert found.sources.tolist() == [0, 2]
        assert said == ["1 of 3 records, a.jsonl:2 first, are longer than max_length=12: left out"]


def test_record_of_exactly_the_length_is_not_too_long() -> None:
    length = len(tokenize([LONG], make_tokenizer(), max_length=999).input_ids)
    for too_long in ("truncate", "drop", "split", "error"):
        found, said = said_of([LONG], max_length=length, too_long=too_long)
        assert (len(found), said, found.taken.num_too_long) == (1, [], 0)
    with pytest.raises(UserError, match=rf"1 of 1 records: a.jsonl:2 \({length} tokens or more\): are longer than"):
        tokenize([LONG], make_tokenizer(), max_length=length - 1, too_long="error")


def test_cut_records_are_counted_and_those_without_an_answer_end_the_run_with_the_way_out() -> None:
    long = Record(text="the house is near the river " * 9, origin="b.jsonl:7")
    _, said = said_of([RECORDS[0], long], max_length=12)
    assert said[0].startswith("1 of 2 records, b.jsonl:7 first, are longer than max_length=12: cut there")
    with pytest.raises(UserError, match=r"a.jsonl:2 \(25 tokens\): have no trained token .*too_long: drop"):
        tokenize(RECORDS, make_tokenizer(), max_length=12)


def test_short_record_that_trains_nothing_is_no_matter_of_length() -> None:
    record = Record(
        messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}), origin="a:1"
    )
    with pytest.raises(UserError, match="have no trained token; take them out of the data"):
        tokenize([record], make_tokenizer(chat_template=MARKED), max_length=64, too_long="drop")


@for_each("max_length", [2, 3, 7, 20])
@for_each("kind", ["text", "completion", "conversation", "all of it"])
def test_windows_predict_every_trained_token_exactly_once(kind: str, max_length: int) -> None:
    words = "the house is near the river and the city centre " * 4
    conversation = chat(("user", "hi"), ("assistant", words), ("user", words), ("assistant", "bye"))
    record = {
        "text": Record(text=words, origin="a:1"),
        "completion": pair(words, words),
        "conversation": conversation,
        "all of it": conversation,
    }[kind]
    tokenizer, train_on = make_tokenizer(chat_template=MARKED), "everything" if kind == "all of it" else "all"
    whole = tokenize([record], tokenizer, max_length=999, train_on=train_on)[0]
    found = tokenize([record, record], tokenizer, max_length=max_length, too_long="split", train_on=train_on)
    assert np.diff(found.offsets).max() == max_length
    assert set(found.sources.tolist()) == {0, 1}
    predicted = [
        (tuple(window.input_ids[place - 1 : place + 1]))
        for window in found.first(int((found.sources == 0).sum()))
        for place in range(1, len(window.input_ids))
        if window.is_trained[place]
    ]
    expected = [tuple(whole.input_ids[p - 1 : p + 1]) for p in range(1, len(whole.input_ids)) if whole.is_trained[p]]
    assert predicted == expected
    assert found.num_trained_tokens == 2 * len(expected)
    if kind in ("completion", "conversation"):  # windows of what is not trained are not kept
        assert len(found) < 2 * len(whole.input_ids) // (max_length - 1)


def test_split_says_how_many_sequences_came_of_how_many_records() -> None:
    found, said = said_of(RECORDS, max_length=12, too_long="split")
    assert said[1:] == [
        f"1 of 3 records, a.jsonl:2 first, are longer than max_length=12: split: {len(found)} sequences of 3 records"
    ]


def test_all_too_long_is_an_error_not_an_empty_run() -> None:
    with pytest.raises(UserError, match=r"all 2 records: they are longer than max_length=4; raise data.max_length"):
        tokenize([LONG, LONG], make_tokenizer(), max_length=4, too_long="drop")


def test_pair_with_one_long_answer_is_left_out_whole(tmp_path: Path) -> None:
    long = " the river" * 9
    rows = [
        {"prompt": "near", "chosen": " the", "rejected": " is"},
        {"prompt": "near", "chosen": " the city", "rejected": long},
        {"prompt": "near", "chosen": long, "rejected": " the"},
        {"prompt": "the", "chosen": " city", "rejected": " river"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    options: dict[str, Any] = {"max_length": 12, "too_long": "drop", "say": said.append}
    found = read_preferences(str(tmp_path / "a.jsonl"), make_tokenizer(), **options)
    assert (len(found), found.num_examples, found.sources.tolist()) == (4, 2, [0, 1, 6, 7])
    assert said[-1].endswith("max_length=12: left out, 4 in all")


def test_judged_answers_keep_their_label_where_another_is_left_out(tmp_path: Path) -> None:
    rows = [
        {"prompt": "near", "completion": " the river" * 9, "label": True},
        {"prompt": "the", "completion": " city", "label": False},
        {"prompt": "is", "completion": " near", "label": True},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_feedback(str(tmp_path / "a.jsonl"), make_tokenizer(), max_length=12, too_long="drop")
    # The second record stands beside the first one's answer, and goes with it.
    assert found.sources.tolist() == [4, 5]
    assert set(found.columns["desirable"].tolist()) == {1.0}


@pytest.mark.parametrize("has_tokens", [False, True])
def test_rollout_that_is_too_long_is_left_out_with_its_values(tmp_path: Path, has_tokens: bool) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "near", "completion": " the river" * 9, "advantage": 1.0},
        {"prompt": "the", "completion": " city", "advantage": -2.0},
    ]
    if has_tokens:
        rows[0] = {"input_ids": [5] * 40, "is_trained": [0, 1] * 20, "advantage": 1.0}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"max_length": 12, "vocab_size": 2048}
    found = read_rollouts(str(tmp_path / "a.jsonl"), make_tokenizer(), too_long="drop", **options)
    assert len(found) == 1
    assert set(found.columns["advantage"][found.is_trained].tolist()) == {-2.0}
    with pytest.raises(UserError, match=r"1 of [12] records: .*are longer than"):
        read_rollouts(str(tmp_path / "a.jsonl"), make_tokenizer(), too_long="error", **options)


def test_rollout_that_is_cut_keeps_the_values_of_its_first_tokens(tmp_path: Path) -> None:
    """Of text, whose log-probabilities are one a token of the completion."""
    completion = " the river" * 9
    options: dict[str, Any] = {"vocab_size": 2048}

    def read(number: int, max_length: int) -> Any:
        row = {"prompt": "near", "completion": completion, "advantage": 1.0}
        row["old_log_probs"] = [-1.0 - place for place in range(number)]
        (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
        return read_rollouts(str(tmp_path / "a.jsonl"), make_tokenizer(), max_length=max_length, **options)

    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "near", "completion": completion, "advantage": 1.0}) + "\n")
    whole = read_rollouts(str(tmp_path / "a.jsonl"), make_tokenizer(), max_length=64, **options)
    number = int(whole.is_trained.sum())
    cut = read(number, 12)
    values = cut.columns["old_log_prob"][cut.is_trained]
    assert 1 < len(values) < number
    assert values.tolist() == [-1.0 - place for place in range(len(values))]


def test_last_turn_that_is_cut_off_is_left_out_with_drop() -> None:
    record = chat(("user", "hi"), ("assistant", "hello"), ("user", "near the river " * 9), ("assistant", "bye"))
    short = chat(("user", "hi"), ("assistant", "hello"))
    tokenizer = make_tokenizer(chat_template=MARKED)
    with pytest.raises(UserError, match="have no trained token within max_length=30"):
        tokenize([record, short], tokenizer, max_length=30, train_on="last")
    found = tokenize([record, short], tokenizer, max_length=30, train_on="last", too_long="drop")
    assert len(found) == 1
    assert trained_text(found, tokenizer).startswith("hello")


EXCHANGES = chat(
    *(turn for n in range(6) for turn in (("user", f"near {n}?"), ("assistant", f"the river {n}"))), origin="c.jsonl:4"
)


def test_conversations_are_split_where_trained_turns_end() -> None:
    tokenizer = make_tokenizer(chat_template=MARKED, eos=END)
    whole = tokenize([EXCHANGES], tokenizer, max_length=999)
    length = len(whole.input_ids) // 2 + 3  # a cut there is inside an exchange
    found, said = said_of([EXCHANGES], tokenizer, max_length=length, too_long="split")
    assert len(said) == 1, "no turn is cut"
    parts = [tokenizer.decode(each.input_ids) for each in found]
    assert all(part.removesuffix("\n").endswith(END) for part in parts)
    assert "".join(parts) == tokenizer.decode(whole.input_ids)
    assert [trained_text(found, tokenizer, n) for n in range(len(found))] == [
        "".join(f"the river {n}{END}" for n in own) for own in (range(3), range(3, 6))
    ]


@for_each("template", [MARKED, UNMARKED])
def test_conversations_of_which_all_is_trained_are_split_where_answers_end(template: str) -> None:
    tokenizer = make_tokenizer(chat_template=template, eos=END)
    whole = tokenize([EXCHANGES], tokenizer, max_length=999, train_on="everything")
    length = len(whole.input_ids) // 2 + 3
    found, said = said_of([EXCHANGES], tokenizer, max_length=length, too_long="split", train_on="everything")
    assert [line for line in said if "is cut" in line] == []
    parts = [tokenizer.decode(each.input_ids) for each in found]
    assert len(parts) > 1
    assert all(part.removesuffix("\n").endswith(END) for part in parts)
    assert all(part.startswith(END) for part in parts[1:]), "seen again, so that the token behind it is predicted"
    assert "".join([parts[0], *(part.removeprefix(END) for part in parts[1:])]) == tokenizer.decode(whole.input_ids)


def test_a_turn_that_is_cut_is_said_with_the_number_of_records() -> None:
    tokenizer = make_tokenizer(chat_template=MARKED, eos=END)
    short = chat(("user", "near"), ("assistant", "the river"), origin="c.jsonl:4")
    long = chat(("user", "near"), ("assistant", "the river and the city " * 30), origin="c.jsonl:7")
    words = "a trained turn is cut by max_length, and trained there without its end"
    for too_long in ("truncate", "split"):
        _, said = said_of([short, long], tokenizer, max_length=60, too_long=too_long)
        assert [line for line in said if "is cut" in line] == [f"1 of 2 records, c.jsonl:7 first: {words}"], said
    _, said = said_of([LONG, RECORDS[0]], max_length=23, too_long="truncate")
    assert [line for line in said if "is cut" in line] == [f"1 of 2 records, a.jsonl:2 first: {words}"]
