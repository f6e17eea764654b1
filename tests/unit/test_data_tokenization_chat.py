"""Conversations become tokens: which are the assistant's, and what is refused rather than guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshlora.reading.records import Record
from meshlora.reading.tokenization import tokenize
from meshlora_ground.errors import UserError
from tests.unit.records import END, EOS, MARKED, TWO_TURNS, UNMARKED, chat, make_tokenizer, trained_text


def test_templates_with_and_without_generation_markers_train_the_same_tokens() -> None:
    marked = tokenize([TWO_TURNS], make_tokenizer(chat_template=MARKED, eos=END), max_length=256)
    unmarked = tokenize([TWO_TURNS], make_tokenizer(chat_template=UNMARKED, eos=END), max_length=256)
    assert marked.input_ids.tolist() == unmarked.input_ids.tolist()
    assert marked.is_trained.tolist() == unmarked.is_trained.tolist()
    assert trained_text(marked, make_tokenizer()) == f"hello{END}bye{END}"


def test_conversations_agree_with_what_transformers_says_is_the_assistants() -> None:
    tokenizer = make_tokenizer(chat_template=MARKED)
    theirs = tokenizer.apply_chat_template(list(TWO_TURNS.messages), return_assistant_tokens_mask=True)
    ours = tokenize([TWO_TURNS], tokenizer, max_length=256)[0]
    assert ours.input_ids.tolist() == theirs["input_ids"]
    assert ours.is_trained.astype(int).tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize("content", [" hello", "hello ", "  ", "é", "🙂", "\n\nhello\n"])
def test_spaces_and_split_characters_on_a_turns_border_are_the_assistants(content: str) -> None:
    # Without an end token inside the markers the border is the content itself. Byte-level tokenizers trim spaces from
    # offsets and split characters over tokens, and the mask of transformers 5.23 is wrong for most of these.
    template = MARKED.replace(
        "m.content + '<|end|>' }}{% endgeneration %}{{ '", "m.content }}{% endgeneration %}{{ '<|end|>"
    )
    assert template != MARKED
    tokenizer = make_tokenizer(chat_template=template.replace("assistant\n' }}{% gen", "assistant:<|end|>' }}{% gen"))
    record = chat(("user", "a"), ("assistant", content), ("user", "c"), ("assistant", content))
    assert trained_text(tokenize([record], tokenizer, max_length=256), tokenizer) == content * 2


def test_train_on_everything_trains_whole_conversations() -> None:
    assert tokenize(
        [TWO_TURNS], make_tokenizer(chat_template=MARKED), max_length=256, train_on="everything"
    ).is_trained.all()


def test_nothing_is_added_to_what_the_template_wrote() -> None:
    tokenizer = make_tokenizer(chat_template=MARKED, adds_bos=True)
    ids = tokenize([TWO_TURNS], tokenizer, max_length=256)[0].input_ids.tolist()
    assert tokenizer.bos_token_id not in ids
    assert tokenizer.eos_token_id not in ids


def test_a_turn_that_no_stop_token_ends_is_trained_to_its_last_special_token_and_said() -> None:
    tokenizer = make_tokenizer(chat_template=UNMARKED, eos=EOS)
    said: list[str] = []
    dataset = tokenize([TWO_TURNS], tokenizer, max_length=256, say=said.append)
    assert trained_text(dataset, tokenizer) == f"hello{END}bye{END}"
    words = "the rendered text does not end trained answers with a token that the model stops at"
    assert said == [f"1 of 1 records, a.jsonl:1 first: {words}"]


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + MARKED


@pytest.mark.parametrize(
    ("template", "record", "reason"),
    [
        (None, TWO_TURNS, "need a chat template"),
        (REFUSES, TWO_TURNS, "a.jsonl:1: 5 messages .*no system role"),
        (UNMARKED, chat(("assistant", "hello")), r"a.jsonl:1: messages\[0\].*no generation prompt leads to it"),
    ],
)
def test_a_conversation_whose_assistant_turns_are_unknown_is_refused_not_guessed(
    template: str | None, record: Record, reason: str
) -> None:
    assert template not in (MARKED, REFUSES.removesuffix(MARKED))
    with pytest.raises(UserError, match=reason):
        tokenize([record], make_tokenizer(chat_template=template), max_length=256)


def test_rewritten_turns_do_no_harm_where_the_template_marks_them() -> None:
    template = MARKED.replace("m.content + '<|end|>'", "m.content + ('!' if loop.last else '') + '<|end|>'")
    tokenizer = make_tokenizer(chat_template=template)
    assert trained_text(tokenize([TWO_TURNS], tokenizer, max_length=256), tokenizer) == f"hello{END}bye!{END}"


# ---- turns with weight 0

FIRST_IS_OUT = Record(
    messages=tuple(
        {"role": role, "content": content} | ({"weight": weight} if weight is not None else {})
        for role, content, weight in [
            ("user", "hi", None),
            ("assistant", "hello", 0),
            ("user", "and?", None),
            ("assistant", "bye", 1),
            ("user", "so?", None),
            ("assistant", "ok", None),
        ]
    ),
    origin="a.jsonl:1",
)


def _without_weights(record: Record) -> Record:
    messages = tuple({k: v for k, v in m.items() if k != "weight"} for m in record.messages or ())
    return Record(messages=messages, origin=record.origin)


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_a_turn_with_weight_0_is_not_trained_and_its_neighbours_are(template: str) -> None:
    tokenizer = make_tokenizer(chat_template=template, eos=END)
    found = tokenize([FIRST_IS_OUT], tokenizer, max_length=256)
    assert trained_text(found, tokenizer) == f"bye{END}ok{END}"
    plain = tokenize([_without_weights(FIRST_IS_OUT)], tokenizer, max_length=256)
    assert trained_text(plain, tokenizer) == f"hello{END}bye{END}ok{END}"
    assert found.input_ids.tolist() == plain.input_ids.tolist()


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_train_on_everything_trains_everything_but_turns_with_weight_0(template: str) -> None:
    tokenizer = make_tokenizer(chat_template=template, eos=END)
    found = tokenize([FIRST_IS_OUT], tokenizer, max_length=256, train_on="everything")
    assert tokenizer.decode(found.input_ids[~found.is_trained]) == f"hello{END}"


def test_weights_are_part_of_the_cache_key(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(chat_template=MARKED)
    for record in (_without_weights(FIRST_IS_OUT), FIRST_IS_OUT, FIRST_IS_OUT):
        cached = tokenize([record], tokenizer, max_length=256, cache_dir=tmp_path)
        assert cached.is_trained.tolist() == tokenize([record], tokenizer, max_length=256).is_trained.tolist()


def test_conversation_whose_turns_all_have_weight_0_says_so() -> None:
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0})
    record = Record(messages=messages, origin="a.jsonl:1")
    with pytest.raises(UserError, match=r"every turn of the assistant has weight 0.: have no trained token"):
        tokenize([record], make_tokenizer(chat_template=MARKED), max_length=64)


def test_weight_0_under_marks_that_do_not_name_turns_is_refused_not_guessed() -> None:
    # The last turn is marked twice and the first not at all: as many marks as turns, and each would be the wrong one.
    twice = MARKED.replace(
        "{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}",
        "{% if loop.index > 4 %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% generation %}{{ '<|end|>' }}{% endgeneration %}{% elif loop.index < 3 %}{{ m.content }}"
        "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}",
    )
    assert twice != MARKED
    tokenizer = make_tokenizer(chat_template=twice)
    tokenize([_without_weights(FIRST_IS_OUT)], tokenizer, max_length=64, lost_text="note")
    with pytest.raises(
        UserError, match=r"a.jsonl:1: .*some turns of the assistant are trained: .*cannot be told which is which"
    ):
        tokenize([FIRST_IS_OUT], tokenizer, max_length=64)


# ---- keys of messages


def _said_of(template: str, **keys: object) -> list[str]:
    messages = ({"role": "user", "content": "a", **keys}, {"role": "assistant", "content": "b", "weight": 1})
    said: list[str] = []
    record = Record(messages=messages, origin="a.jsonl:7")
    tokenize([record, record], make_tokenizer(chat_template=template), max_length=64, say=said.append)
    return said


def test_keys_of_messages_that_the_template_does_not_name_are_said_once() -> None:
    assert _said_of(MARKED) == []
    assert _said_of(MARKED, steps=[1], id=3) == [
        "a.jsonl:7: messages have steps, id, which the chat template does not name"
    ]
    assert _said_of(MARKED + "{% set a = messages[0].steps %}{{ a.id }}", steps={"id": 1}, id=3) == []
    assert len(_said_of(MARKED + "{% set steps_of = 1 %}", steps=[1])) == 1
    # transformers shows a template the one under the name of the other
    assert _said_of(MARKED + "{% set a = messages[0].reasoning_content %}", thinking="t") == []


def test_keys_that_are_not_read_are_known_when_tokens_come_from_the_cache(tmp_path: Path) -> None:
    messages = ({"role": "user", "content": "a", "id": 1}, {"role": "assistant", "content": "b"})
    said: list[str] = []
    for _ in range(2):
        tokenize(
            [Record(messages=messages, origin="a:1")],
            make_tokenizer(chat_template=MARKED),
            max_length=64,
            cache_dir=tmp_path,
            say=said.append,
        )
    assert len(said) == 2


# ---- data.train_on

TOOLS = chat(
    ("system", "be kind"),
    ("user", "hi"),
    ("assistant", "look"),
    ("tool", "one"),
    ("tool", "two"),
    ("assistant", "hello"),
    ("user", "and?"),
    ("assistant", "bye"),
)


@pytest.mark.long
@pytest.mark.parametrize("template", [MARKED, UNMARKED])
@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("all", f"look{END}hello{END}bye{END}"),
        ("last", f"bye{END}"),
        (["assistant"], f"look{END}hello{END}bye{END}"),
        (["user"], f"<|start|>user\nhi{END}<|start|>user\nand?{END}"),
        (["tool", "assistant"], f"look{END}<|start|>tool\none{END}\n<|start|>tool\ntwo{END}hello{END}bye{END}"),
        (["system"], f"<|start|>system\nbe kind{END}"),
    ],
)
def test_turns_that_are_trained_are_those_that_are_named(template: str, train_on: Any, expected: str) -> None:
    tokenizer = make_tokenizer(chat_template=template, eos=END)
    found = tokenize([TOOLS], tokenizer, max_length=256, train_on=train_on)
    # With marks a turn of another role ends where the template ends it, with a line.
    assert trained_text(found, tokenizer).replace(f"{END}\n<|start|>user", f"{END}<|start|>user").rstrip("\n") in (
        expected,
        expected.replace(f"two{END}", f"two{END}\n"),
    )
    plain = tokenize([TOOLS], tokenizer, max_length=256, train_on="everything")
    assert found.input_ids.tolist() == plain.input_ids.tolist()


# A template that puts the results of several tools into one turn, as Qwen's does.
JOINS_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|start|>user\n' }}{% endif %}"
    "{{ '[' + m.content + ']' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|end|>\n' }}{% endif %}"
    "{% else %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def test_results_of_tools_that_the_template_joins_are_one_turn() -> None:
    tokenizer = make_tokenizer(chat_template=JOINS_TOOLS, eos=END)
    found = tokenize([TOOLS], tokenizer, max_length=256, train_on=["tool"])
    assert trained_text(found, tokenizer) == f"<|start|>user\n[one][two]{END}"


def test_turns_of_users_are_told_though_later_messages_change_others() -> None:
    template = UNMARKED.replace("'\n' + m.content", "'\n' + ('!' if loop.last else '') + m.content")
    assert template != UNMARKED
    texts = []
    for each in (UNMARKED, template):
        tokenizer = make_tokenizer(chat_template=each, eos=END)
        texts.append(trained_text(tokenize([TOOLS], tokenizer, max_length=256, train_on=["user"]), tokenizer))
    assert texts[0] == texts[1]
    assert texts[0].startswith("<|start|>user")


def test_a_turn_with_words_of_another_role_in_it_is_refused_not_guessed() -> None:
    """Mistral's templates write what the system says into the user's turn."""
    template = UNMARKED.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}").replace(
        "+ m.content + '<|end|>\n' }}",
        "+ m.content + (messages[0].content if m.role == 'user' else '') + '<|end|>\n' }}",
    )
    record = chat(("system", "be kind"), ("user", "hi"), ("assistant", "hello"))
    with pytest.raises(UserError, match=r"messages\[1\]: texts of other messages stand between its own"):
        tokenize([record], make_tokenizer(chat_template=template), max_length=256, train_on=["user"])


def test_prompt_is_the_users_and_completion_the_assistants() -> None:
    tokenizer = make_tokenizer()
    record = Record(prompt="near the river", completion=" the", origin="a:1")
    for train_on, expected in {
        ("user",): "near the river",
        ("assistant",): f" the{EOS}",
        ("user", "assistant"): f"near the river the{EOS}",
    }.items():
        assert trained_text(tokenize([record], tokenizer, max_length=64, train_on=train_on), tokenizer) == expected
