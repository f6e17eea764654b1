"""Answers are found under templates in the shape of published ones, without knowing any family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshlora.reading.chat import stop_tokens
from meshlora.reading.readers import READERS
from meshlora.reading.records import Record
from meshlora.reading.tokenization import tokenize
from meshlora.reading.turns import Ends, Messages, Turns
from meshlora_ground.errors import UserError
from tests.unit.records import END, EOS, MARKED, UNMARKED, chat, make_tokenizer, trained_text

_HEADER = "{{ '<|start|>' + m.role + '\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
_THOUGHT = "{% if '</think>' in m.content %}{% set said = m.content.split('</think>')[1].strip() %}{% endif %}"

# Writes an empty thought before the last answer alone, and drops those of earlier ones (Qwen3).
THINKS_LAST = (
    "{% for m in messages %}"
    + _HEADER
    + "{% set said = m.content %}{% if m.role == 'assistant' %}"
    + _THOUGHT
    + "{% if loop.last %}"
    "{{ '<think>\n' + (m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '')"
    " + '\n</think>\n\n' }}{% endif %}{% endif %}{{ said + '<|end|>\n' }}{% endfor %}" + _PROMPT
)
# Its generation prompt begins a thought that no stored answer has (R1's distillations).
PROMPTS_THOUGHT = (
    "{% for m in messages %}"
    + _HEADER
    + "{% set said = m.content %}{% if m.role == 'assistant' %}"
    + _THOUGHT
    + "{% endif %}{{ said + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n<think>\n' }}{% endif %}"
)
# The last answer ends in another token than those before it (gpt-oss).
RETURNS_LAST = UNMARKED.replace("+ '<|end|>'", "+ ('<eos>' if loop.last else '<|end|>')", 1)
# All ends with one more token, which nobody generates (Phi-3.5).
FINAL = UNMARKED + "{% if not add_generation_prompt %}{{ '<eos>' }}{% endif %}"
# No generation prompt: an answer follows the turn before it (Mistral).
BARE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|start|>' + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + '<|end|>' }}{% endif %}{% endfor %}"
)
# What the model has to say at an answer's end is the next header (GLM).
NEXT_HEADER_ENDS = (
    "{% for m in messages %}{{ ('<|end|>' if m.role == 'user' else '<|start|>assistant\n') + m.content }}{% endfor %}"
    + _PROMPT
)
# Cuts, counts or repeats what it is given.
READS = UNMARKED.replace("m.content + '<|end|>' }}{{", "m.content + (m.content | length | string) + '<|end|>' }}{{", 1)
TWICE = UNMARKED.replace("m.content + '<|end|>'", "m.content + m.content + '<|end|>'", 1)
THREE = chat(("user", "hi"), ("assistant", "hello"), ("user", "and?"), ("assistant", "bye"))


def _trained(template: str, record: Record = THREE, *, eos: str = END, **options: Any) -> str:
    tokenizer = make_tokenizer(chat_template=template, eos=eos)
    return trained_text(tokenize([record], tokenizer, max_length=512, **options), tokenizer)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (THINKS_LAST, f"hello{END}<think>\n\n</think>\n\nbye{END}"),
        (PROMPTS_THOUGHT, f"hello{END}bye{END}"),
        (FINAL, f"hello{END}bye{END}"),
        (BARE, f"hello{END}bye{END}"),
        (NEXT_HEADER_ENDS, f"hello{END}bye"),
    ],
)
def test_answers_of_a_plain_chat_are_trained_with_their_ends(template: str, expected: str) -> None:
    assert _trained(template) == expected


def test_what_two_texts_have_in_common_does_not_end_inside_a_special_token() -> None:
    ends = Ends.of(["<|eot|>"], ["<|end|>", "<|e"])
    assert ends.common("a<|end|>b", "a<|eot|>b") == 1
    assert ends.common("a<|end|>b", "a<|end|>c") == 8
    assert ends.common("abc", "ab") == 2


def test_an_answer_ends_at_each_token_that_the_model_stops_at(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(chat_template=RETURNS_LAST, eos=EOS)
    tokenizer.name_or_path = str(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": tokenizer.convert_tokens_to_ids([EOS, END])})
    )
    assert stop_tokens(tokenizer) == [EOS, EOS, END]
    found = tokenize([THREE], tokenizer, max_length=512, say=pytest.fail)
    assert trained_text(found, tokenizer) == f"hello{END}bye{EOS}"


def test_stop_tokens_are_part_of_the_cache_key(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(chat_template=FINAL, eos=EOS)
    tokenizer.name_or_path = str(tmp_path)
    first = tokenize([THREE], tokenizer, max_length=512, cache_dir=tmp_path)
    assert trained_text(first, tokenizer) == f"hello{END}bye{END}\n{EOS}", "no stop token but eos, at the very end"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.convert_tokens_to_ids(END)}))
    second = tokenize([THREE], tokenizer, max_length=512, cache_dir=tmp_path)
    assert trained_text(second, tokenizer) == f"hello{END}bye{END}"


def test_a_stop_config_that_is_none_is_one_message(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(chat_template=UNMARKED)
    tokenizer.name_or_path = str(tmp_path)
    for text, said in {
        "[": ": it is not a readable JSON file",
        "[1, 2]": ": it must be a JSON object",
        '{"eos_token_id": "</s>"}': ": eos_token_id='</s>': it is a token's number, or a list of numbers",
        '{"eos_token_id": [0, true]}': r": eos_token_id=\[0, True\]: it is a token's number, or a list of numbers",
    }.items():
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(UserError, match=f"generation_config.json{said}"):
            stop_tokens(tokenizer)


@pytest.mark.parametrize(
    ("template", "words"), [(READS, "it writes others when they are marked"), (TWICE, "a text of it is rendered twice")]
)
def test_an_answer_that_cannot_be_told_is_refused_with_the_template_as_cause(template: str, words: str) -> None:
    with pytest.raises(UserError, match=f"under this chat template it cannot be told .*{words}.*data.train_on: last"):
        _trained(template)


def test_an_answer_in_a_prompt_needs_no_place() -> None:
    prompt = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello", "weight": 0})
    twice_in_prompts = TWICE.replace("m.content + m.content", "m.content + (m.content if not loop.last else '')")
    answer = ({"role": "user", "content": "and?"}, {"role": "assistant", "content": "bye"})
    assert _trained(twice_in_prompts, Record(messages=prompt + answer, origin="a.jsonl:1")) == f"bye{END}"


def test_reasoning_that_the_template_drops_is_said_with_the_first_place() -> None:
    thought = chat(
        ("user", "hi"),
        ("assistant", "<think>why</think>hello"),
        ("user", "and?"),
        ("assistant", "bye"),
        origin="a.jsonl:2",
    )
    said: list[str] = []
    tokenizer = make_tokenizer(chat_template=THINKS_LAST, eos=END)
    found = tokenize([THREE, thought], tokenizer, max_length=512, say=said.append)
    assert trained_text(found, tokenizer, 1) == f"hello{END}<think>\n\n</think>\n\nbye{END}"
    assert said == [
        "1 of 2 records, a.jsonl:2 first: as at inference the chat template leaves out the reasoning of 1 earlier "
        "answers, which is not trained; data.turns: apart trains it, a sequence for each answer",
        "1 of 4 answers have reasoning: 0 trained with it, 1 without",
    ]


def test_what_is_lost_is_said_again_when_tokens_come_from_the_cache(tmp_path: Path) -> None:
    record = chat(("user", "hi"), ("assistant", "<think>why</think>hello"))
    tokenizer = make_tokenizer(chat_template=PROMPTS_THOUGHT, eos=END)
    said: list[str] = []
    for _ in range(2):
        tokenize([record], tokenizer, max_length=512, cache_dir=tmp_path, lost_text="note", say=said.append)
    assert len(said) == 4
    assert said[:2] == said[2:]
    with pytest.raises(
        UserError, match=r"a.jsonl:1 first: the chat template leaves out the reasoning of 1 trained answer"
    ):
        tokenize([record], tokenizer, max_length=512, cache_dir=tmp_path)


def test_reasoning_in_a_field_that_a_template_with_markers_drops_is_said() -> None:
    messages = (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "reasoning_content": "why"},
    )
    said: list[str] = []
    record, tokenizer = Record(messages=messages, origin="a.jsonl:1"), make_tokenizer(chat_template=MARKED)
    found = tokenize([record], tokenizer, max_length=512, say=said.append, lost_text="note")
    assert trained_text(found, tokenizer) == f"hello{END}"
    assert said == [
        "1 of 1 answers have reasoning: 0 trained with it, 1 without",
        "1 of 1 records, a.jsonl:1 first: the chat template leaves out the reasoning in a field of its own of 1 "
        "trained answer, which is not trained (data.lost_text: note)",
    ]


def _thought(*turns: tuple[str, str]) -> Record:
    """A conversation whose answers `why: what` have thought."""
    said = [(role, "<think>{}</think>{}".format(*text.split(": ")) if ": " in text else text) for role, text in turns]
    return chat(*said)


_FIELD = Record(
    messages=({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello", "reasoning": "why"}),
    origin="a.jsonl:1",
)
_CALL = {"type": "function", "function": {"name": "now", "arguments": {"zone": "utc"}}}
_CALLED = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [_CALL]})
_SAID_AND_CALLED = (_CALLED[0], {**_CALLED[1], "content": "wait"}, {"role": "tool", "content": "5"})
_THEN = ({"role": "assistant", "content": "five"},)
# Writes a call without the words beside it, and reasoning in a field while the answer is the last.
CALLS_ALONE = (
    "{% for m in messages %}" + _HEADER + "{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ '<call>' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}{% else %}"
    "{% if m.reasoning and loop.last %}{{ m.reasoning + '!' }}{% endif %}{{ m.content }}{% endif %}"
    "{{ '<|end|>\n' }}{% endfor %}" + _PROMPT
)


def _conversation(*messages: dict[str, Any]) -> Record:
    return Record(messages=messages, origin="a.jsonl:1")


@pytest.mark.parametrize(
    ("template", "record", "words", "offered"),
    [
        (
            PROMPTS_THOUGHT,
            _thought(("user", "hi"), ("assistant", "why: hello")),
            "the reasoning of 1",
            {"as_generated"},
        ),
        (UNMARKED, _FIELD, "the reasoning in a field of its own of 1", set()),
        # Not even as the last answer would it be written: it is no earlier answer as at inference.
        (UNMARKED, _conversation(*_FIELD.messages, *THREE.messages), "in a field of its own of 1", {"train_on: last"}),
        (UNMARKED, _conversation(*_CALLED[:1], {**_CALLED[1], "content": "wait"}), "calls of tools of 1", set()),
        (CALLS_ALONE, _conversation(*_SAID_AND_CALLED, *_THEN), "words of 1", {"as_generated", "train_on: last"}),
    ],
)
def test_text_that_is_lost_of_a_last_answer_is_refused_unless_asked(
    template: str, record: Record, words: str, offered: set[str]
) -> None:
    with pytest.raises(UserError) as refused:
        _trained(template, record)
    message = str(refused.value)
    assert f"1 of 1 records, a.jsonl:1 first: the chat template leaves out {words}" in message or words in message
    assert "data.lost_text: note" in message
    assert "data.chat_template: FILE" in message
    for way in ("as_generated", "train_on: last"):
        assert (way in message) == (way in offered), message
    said: list[str] = []
    _trained(template, record, lost_text="note", say=said.append)
    assert len([line for line in said if line.endswith("(data.lost_text: note)")]) == 1


@pytest.mark.parametrize("template", [CALLS_ALONE, THINKS_LAST])
def test_reasoning_of_earlier_answers_is_no_reason_to_refuse(template: str) -> None:
    field, thought = _conversation(*_FIELD.messages, *THREE.messages), _thought(("user", "hi"), ("assistant", "a: b"))
    record = field if template == CALLS_ALONE else _conversation(*thought.messages, *THREE.messages)
    said: list[str] = []
    _trained(template, record, say=said.append)
    assert any("the reasoning of 1 earlier answers" in line and "data.turns: apart" in line for line in said), said
    said.clear()
    _trained(template, record, train_on="everything", say=said.append)
    assert any("the reasoning of 1 earlier answers" in line and "data.turns" not in line for line in said), said


def test_an_answer_of_which_nothing_is_written_is_left_out_where_that_is_asked() -> None:
    gone, there = _conversation(*_CALLED), _conversation(*_CALLED, *THREE.messages)
    with pytest.raises(UserError, match=r"a.jsonl:1 first: the chat template writes nothing of their trained answers"):
        _trained(UNMARKED, gone)
    with pytest.raises(UserError, match=r"leaves out calls of tools of 2 trained answers; .*data.lost_text: note"):
        tokenize([gone, there], make_tokenizer(chat_template=UNMARKED, eos=END), max_length=512)
    for template in (UNMARKED, MARKED):
        tokenizer, said = make_tokenizer(chat_template=template, eos=END), list[str]()
        found = tokenize([gone, there], tokenizer, max_length=512, lost_text="note", say=said.append)
        assert [trained_text(found, tokenizer, n) for n in range(len(found))] == [f"hello{END}bye{END}"]
        assert any("left out, as the chat template writes nothing of their trained answers" in line for line in said)


def test_what_is_lost_of_pairs_and_of_texts_that_are_read_is_said(tmp_path: Path) -> None:
    """Of a prompt only what the model reads: its reasoning is not there at inference either."""
    asked = {"role": "user", "content": "hi"}
    rows = {
        "pairs": {"prompt": [asked], "chosen": "<think>why</think>yes", "rejected": "no"},
        "feedback": {"prompt": [asked], "completion": "<think>why</think>yes", "label": True},
    }
    tokenizer = make_tokenizer(chat_template=PROMPTS_THOUGHT, eos=END)
    for reader, row in rows.items():
        other = {**row, "prompt": [{**asked, "content": "who"}]}
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, (row, other))))
        read, said = READERS[reader], list[str]()
        with pytest.raises(UserError, match="leaves out the reasoning of") as refused:
            read(str(tmp_path / "a.jsonl"), tokenizer, max_length=512)
        assert "apart" not in str(refused.value)
        read(str(tmp_path / "a.jsonl"), tokenizer, max_length=512, lost_text="note", say=said.append)
        assert any("which is not trained (data.lost_text: note)" in line for line in said)
    said = []
    read_only_calls = [{**_SAID_AND_CALLED[1], "weight": 0}, _SAID_AND_CALLED[2]]
    _trained(CALLS_ALONE, _conversation(asked, *read_only_calls, *_THEN), say=said.append)
    assert said == [
        "1 of 1 records, a.jsonl:1 first: texts of other messages are not in the text that the chat template renders: "
        "the model does not read them"
    ]


_EMPTY = chat(("user", "hi"), ("assistant", ""), ("user", "and?"), ("assistant", "bye"), origin="a.jsonl:3")
# Leaves out what says nothing.
DROPS_EMPTY = UNMARKED.replace("{% for m in messages %}", "{% for m in messages if m.content %}", 1)


@pytest.mark.parametrize(
    ("template", "expected", "words"),
    [
        (UNMARKED, f"{END}bye{END}", "trained answers are empty"),
        (THINKS_LAST, f"{END}<think>\n\n</think>\n\nbye{END}", "trained answers are empty"),
        (BARE, f"{END}bye{END}", "trained answers are empty"),
        # Nothing that the rendering has without the answer is taken for it.
        (DROPS_EMPTY, f"bye{END}", "empty answers are not in the text"),
    ],
)
def test_of_an_empty_answer_the_end_is_trained_and_that_is_said(template: str, expected: str, words: str) -> None:
    said: list[str] = []
    assert _trained(template, _EMPTY, say=said.append) == expected
    (line,) = said
    assert line.startswith("1 of 1 records, a.jsonl:3 first: ")
    assert words in line


def test_an_empty_last_answer_is_what_the_template_adds() -> None:
    """Its thought, which an empty content leads to under this template as a full one does."""
    only = chat(("user", "hi"), ("assistant", ""))
    assert _trained(THINKS_LAST, only) == f"<think>\n\n</think>\n\n{END}"


@pytest.mark.parametrize("streaming", [False, True])
def test_empty_answers_are_left_out_where_that_is_asked(streaming: bool, tmp_path: Path) -> None:
    rows = [("hi", ""), ("hi", "hello"), ("who?", " ")]
    messages = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in rows]
    mixed = [*messages[0], *messages[1]]
    source = tmp_path / "chat.jsonl"
    source.write_text("".join(json.dumps({"messages": each}) + "\n" for each in (messages[0], mixed, messages[2])))
    said: list[str] = []
    tokenizer = make_tokenizer(chat_template=UNMARKED, eos=END)
    read = READERS["streamed" if streaming else "text"]
    options: dict[str, Any] = {"columns": None, "max_length": 512, "vocab_size": 10**6, "cache_dir": tmp_path / "cache"}
    found = read(str(source), tokenizer, say=said.append, skips_empty=True, **options)
    assert trained_text(found, tokenizer) == f"hello{END}"
    assert len(found) == 1
    assert [line for line in said if "skip" in line] == [
        f"2 records, {source}:1 first: left out, as no trained answer says anything (data.empty_answers: skip)"
    ]
    source.write_text(json.dumps({"messages": messages[0]}) + "\n")
    with pytest.raises(UserError, match="no answer says anything"):
        read(str(source), tokenizer, say=said.append, skips_empty=True, **options)


_CALLS = (
    "{% for m in messages %}" + _HEADER + "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}{{ '<|end|>\n' }}{% endfor %}"
    + _PROMPT
)


def test_no_content_beside_a_call_is_not_the_word_none() -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "utc"}}}
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]})
    assert _trained(_CALLS, Record(messages=messages, origin="a:1")) == f'<call>now{{"zone": "utc"}}{END}'


_WORD = st.sampled_from(
    ["the river", "house.", " city ", "name : The Mill", "é🙂", "a\n\nb", "<b>bold</b>", "{}", "[x]"]
)
_TURNS = st.lists(st.tuples(_WORD, _WORD), min_size=1, max_size=4)


@pytest.mark.long
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=_TURNS, template=st.sampled_from([UNMARKED, THINKS_LAST, PROMPTS_THOUGHT, RETURNS_LAST, FINAL, BARE]))
def test_random_conversations_train_every_word_of_an_answer_and_none_of_others(
    turns: list[tuple[str, str]], template: str
) -> None:
    # Each text has a word of its own, so that it is known whose it is.
    texts = [(f"u{n}q {user}", f"s{n}a {answer}") for n, (user, answer) in enumerate(turns)]
    record = chat(*(turn for user, answer in texts for turn in (("user", user), ("assistant", answer))))
    trained = _trained(template, record)
    for user, answer in texts:
        assert answer.strip() in trained
        assert user.partition(" ")[0] not in trained
    assert "<|start|>" not in trained


def test_text_of_an_answer_outside_of_generation_is_lost_text() -> None:
    outside = "{{ m.content.split('|')[0] + '|' }}{% generation %}{{ m.content.split('|')[1] + '<|end|>' }}"
    template = MARKED.replace("{% generation %}{{ m.content + '<|end|>' }}", outside)
    assert outside in template
    record, said = chat(("user", "hi"), ("assistant", "[A] first|then"), ("user", "and?"), ("assistant", "[A] a|b")), []
    with pytest.raises(UserError, match=r"writes outside of {% generation %}, words of 2 trained answers; .*note"):
        _trained(template, record)
    assert _trained(template, record, lost_text="note", say=said.append) == f"then{END}b{END}"
    assert said[-1].endswith("(data.lost_text: note)")
    assert _trained(template, record, train_on="everything").endswith(f"[A] a|b{END}\n")


def test_an_answer_costs_two_renderings() -> None:
    """One for its beginning and one for its end, which of the last answer is the end of the whole."""
    rendered = []

    def render(messages: Messages, leads_on: bool) -> str:
        rendered.append((len(messages), leads_on))
        text = "".join(f"<|start|>{each['role']}\n{each['content']}{END}" for each in messages)
        return text + "<|start|>assistant\n" * leads_on

    turns = Turns(THREE.messages or (), render, Ends.of([END], ["<|start|>", END]))
    assert [turns.text[slice(*turns.span(index))] for index in (1, 3)] == [f"hello{END}", f"bye{END}"]
    assert rendered == [(4, False), (4, False), (1, True), (2, False), (3, True)]
