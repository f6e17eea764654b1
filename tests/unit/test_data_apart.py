"""Answers as sequences of their own: each is trained once, where it is the last, in the place of its conversation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshlora.reading.mixture import joined_sources
from meshlora.reading.readers import READERS
from meshlora.reading.records import Record
from meshlora.reading.tokenization import tokenize
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError
from tests.unit.records import END, MARKED, UNMARKED, chat, make_tokenizer, pair, trained_text
from tests.unit.test_data_streamed import assert_same
from tests.unit.test_data_turns import CALLS_ALONE, PROMPTS_THOUGHT, THINKS_LAST

ONE = chat(("user", "hi"), ("assistant", "<think>a</think>hello"), origin="a.jsonl:1")
TWO = chat(
    *((m["role"], m["content"]) for m in ONE.messages or ()), ("user", "and?"), ("assistant", "<think>b</think>bye")
)
AFTER = chat(("user", "hi"), ("assistant", "hello"), ("user", "and?"), ("assistant", "bye"), ("user", "so"))


def _apart(template: str, *records: Record, **options: Any) -> tuple[list[str], list[str], TokenizedDataset]:
    """(all of each sequence, what is trained of it, all of them)."""
    tokenizer = make_tokenizer(chat_template=template, eos=END)
    data = tokenize(records, tokenizer, max_length=512, **{"turns": "apart", **options})
    return [tokenizer.decode(one.input_ids) for one in data], [*_trained(data, tokenizer)], data


def _trained(data: TokenizedDataset, tokenizer: Any) -> list[str]:
    return [trained_text(data, tokenizer, index) for index in range(len(data))]


@pytest.mark.parametrize("template", [THINKS_LAST, MARKED, UNMARKED])
def test_each_answer_is_trained_once_where_it_is_the_last(template: str) -> None:
    texts, trained, data = _apart(template, ONE, TWO)
    tokenizer = make_tokenizer(chat_template=template)
    for text, record, number in zip(texts, (ONE, TWO, TWO), (2, 2, 4), strict=True):
        messages = list(record.messages or ())[:number]
        assert text == tokenizer.apply_chat_template(messages, tokenize=False)
    first, second = (f"<think>\na\n</think>\n\nhello{END}", f"<think>\nb\n</think>\n\nbye{END}")
    if template != THINKS_LAST:
        first, second = (f"<think>a</think>hello{END}", f"<think>b</think>bye{END}")
    assert trained == [first, first, second]
    assert data.examples is not None
    assert data.examples.tolist() == [0, 1, 3]
    assert (data.num_examples, data.rows_of(np.array([1, 0])).tolist()) == (2, [1, 2, 0])
    assert data.first(1).input_ids.tolist() == data[0].input_ids.tolist()
    assert data.first(1).num_examples == 1


def test_turns_of_others_are_trained_with_the_answer_after_them_and_a_prompt_is_not() -> None:
    _, trained, _ = _apart(UNMARKED, AFTER, train_on=["user", "assistant"])
    of_user = "<|start|>user\n{}<|end|>"
    assert trained == [f"{of_user.format('hi')}hello{END}", f"{of_user.format('and?')}bye{END}", of_user.format("so")]
    _, trained, _ = _apart(UNMARKED, AFTER)
    assert trained == [f"hello{END}", f"bye{END}"]
    _, trained, data = _apart(UNMARKED, AFTER, pair("the house ", "near"), train_on="last")
    assert trained == [f"bye{END}", f"near{END}"]
    assert data.num_examples == 2
    messages = tuple({**each, "weight": 0} if each["content"] == "hello" else each for each in AFTER.messages or ())
    _, trained, _ = _apart(UNMARKED, dataclasses.replace(AFTER, messages=messages))
    assert trained == [f"bye{END}"]


def test_what_it_costs_is_said_and_what_it_does_not_go_with_is_refused() -> None:
    said: list[str] = []
    _, _, data = _apart(UNMARKED, ONE, TWO, say=said.append)
    lengths = np.diff(data.offsets)
    factor = lengths.sum() / (lengths[0] + lengths[2])
    assert (
        said[-1] == f"data.turns: apart: 3 sequences of 2 records, {factor:.2f} times the tokens of the longest of each"
    )
    for options, words in (
        ({"train_on": "everything"}, "a sequence for each trained answer"),
        ({"train_on": ["user"]}, "a sequence for each trained answer"),
        ({"turns": "whole", "answers": "as_generated"}, "give data.turns: apart"),
        ({"train_on": ["user", "assistant"], "answers": "as_generated"}, "only answers are generated"),
        ({"turns": "part"}, "did you mean 'apart'"),
    ):
        with pytest.raises(UserError, match=words):
            _apart(UNMARKED, ONE, **options)
    with pytest.raises(UserError, match="compared as wholes"):
        tokenize([(ONE, TWO)], make_tokenizer(chat_template=UNMARKED), max_length=512, turns="apart")


@pytest.mark.parametrize("too_long", ["split", "drop"])
def test_streamed_answers_are_those_that_are_held_and_long_ones_stay_in_their_place(
    too_long: str, tmp_path: Path
) -> None:
    file, tokenizer = tmp_path / "a.jsonl", make_tokenizer(chat_template=THINKS_LAST, eos=END)
    said: dict[str, list[str]] = {}
    file.write_text("".join(json.dumps({"messages": one.messages}) + "\n" for one in (TWO, ONE, AFTER)))
    options: dict[str, Any] = {"columns": None, "vocab_size": 10**6, "turns": "apart", "answers": "as_generated"}
    options |= {"too_long": too_long, "max_length": 60}
    found = {
        name: READERS[name](
            str(file), tokenizer, cache_dir=tmp_path / name, say=said.setdefault(name, []).append, **options
        )
        for name in ("text", "streamed")
        for _ in range(2)  # made, and from the cache
    }
    assert_same(found["text"], found["streamed"])
    assert said["text"] == said["streamed"]
    examples = found["text"].examples
    assert found["streamed"].examples.tolist() == examples.tolist()
    assert (examples[0], examples[-1], len(examples)) == (0, len(found["text"]), 4)
    both = joined_sources([found["text"], found["text"].first(2)], ["a", "b"], [1.0, 1.0])
    assert both.examples is not None
    assert both.parts == ((3, 1.0), (2, 1.0))
    assert both.examples.tolist() == [*examples, *(examples[1:3] + len(found["text"]))]


def test_answers_as_generated_follow_the_generation_prompt_as_they_are_given() -> None:
    """The template drops the thought, which its generation prompt begins."""
    options = {"answers": "as_generated"}
    texts, trained, _ = _apart(PROMPTS_THOUGHT, TWO, **options)
    prompts = [
        make_tokenizer(chat_template=PROMPTS_THOUGHT).apply_chat_template(
            list(TWO.messages or ())[:number], tokenize=False, add_generation_prompt=True
        )
        for number in (1, 3)
    ]
    assert texts == [f"{prompts[0]}a</think>hello{END}", f"{prompts[1]}b</think>bye{END}"]
    assert trained == [f"a</think>hello{END}", f"b</think>bye{END}"]
    _, trained, _ = _apart(MARKED, TWO, **options)
    assert trained == [f"<think>a</think>hello{END}", f"<think>b</think>bye{END}"]
    said: list[str] = []
    _, trained, _ = _apart(PROMPTS_THOUGHT, AFTER, say=said.append, **options)
    assert trained == [f"hello{END}", f"bye{END}"]
    assert any("opens reasoning that trained answers do not close" in line for line in said)


def test_what_has_no_form_of_its_own_is_not_generated() -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "utc"}}}
    asked, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "wait", "tool_calls": [call]}
    with pytest.raises(UserError, match=r"messages\[1\]: it has content of which the template writes nothing"):
        _apart(CALLS_ALONE, Record(messages=(asked, said), origin="a:1"), answers="as_generated")
    with pytest.raises(UserError, match="reasoning in a field"):
        _apart(
            UNMARKED,
            Record(messages=(asked, {**said, "tool_calls": [], "reasoning": "why"}), origin="a:1"),
            answers="as_generated",
        )
    _, trained, _ = _apart(
        CALLS_ALONE, Record(messages=(asked, {**said, "content": ""}), origin="a:1"), answers="as_generated"
    )
    assert trained == [f'<call>now{{"zone": "utc"}}{END}']
