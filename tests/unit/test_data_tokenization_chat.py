"""Conversations become tokens: which are the assistant's, and what is refused rather than guessed."""

from __future__ import annotations

import pytest

from meshlora.data import Record, tokenize
from meshlora.errors import UserError
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


def test_loss_on_all_trains_whole_conversations() -> None:
    assert tokenize([TWO_TURNS], make_tokenizer(chat_template=MARKED), max_length=256, loss_on="all").is_trained.all()


def test_nothing_is_added_to_what_the_template_wrote() -> None:
    tokenizer = make_tokenizer(chat_template=MARKED, adds_bos=True)
    ids = tokenize([TWO_TURNS], tokenizer, max_length=256)[0].input_ids.tolist()
    assert tokenizer.bos_token_id not in ids
    assert tokenizer.eos_token_id not in ids


def test_a_derived_turn_without_eos_is_trained_to_its_end() -> None:
    tokenizer = make_tokenizer(chat_template=UNMARKED, eos=EOS)
    dataset = tokenize([TWO_TURNS], tokenizer, max_length=256)
    assert trained_text(dataset, tokenizer) == f"hello{END}\nbye{END}\n"


# Like the templates of reasoning models: what it makes of a turn depends on whether it is the last.
REWRITES = UNMARKED.replace("m.content + '<|end|>'", "m.content + ('!' if loop.last else '') + '<|end|>'")
PROMPTS_OTHERWISE = UNMARKED.replace("prompt %}{{ '<|start|>assistant\n", "prompt %}{{ '<|start|>assistant\n<think>")
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + MARKED


@pytest.mark.parametrize(
    ("template", "record", "reason"),
    [
        (None, TWO_TURNS, "need a chat template"),
        (REWRITES, TWO_TURNS, "a.jsonl:1: .*messages.2. is rendered differently once later messages follow"),
        (PROMPTS_OTHERWISE, TWO_TURNS, "a.jsonl:1: .*messages.2. does not continue the generation prompt"),
        (REFUSES, TWO_TURNS, "a.jsonl:1: 5 messages .*no system role"),
        (UNMARKED, chat(("assistant", "hello")), "a.jsonl:1: .*starts with an assistant turn"),
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
