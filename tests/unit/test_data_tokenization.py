"""Records become tokens: what is concatenated, what is trained, what is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from meshlora.reading.preferences import read_preferences
from meshlora.reading.records import Record
from meshlora.reading.rollouts import read_rollouts
from meshlora.reading.tokenization import tokenize
from meshlora.reading.tokenizer import load_tokenizer
from meshlora_ground.errors import UserError
from tests.unit.records import BOS, EOS, MARKED, TWO_TURNS, UNMARKED, make_tokenizer, pair


def test_completion_starts_exactly_at_its_own_first_token() -> None:
    tokenizer = make_tokenizer()
    # "the" + " house" would merge across the border if the two were tokenised as one string.
    dataset = tokenize([pair("near th", "e river")], tokenizer, max_length=64)
    prompt = tokenizer("near th").input_ids
    completion = tokenizer("e river").input_ids
    assert prompt + completion != tokenizer("near the river").input_ids, "the example shows nothing"
    assert dataset[0].input_ids.tolist() == [*prompt, *completion, tokenizer.eos_token_id]
    assert dataset[0].is_trained.tolist() == [False] * len(prompt) + [True] * (len(completion) + 1)
    assert dataset.num_trained_tokens == len(completion) + 1


def test_spaces_around_the_border_are_tokenized_as_they_stand() -> None:
    tokenizer = make_tokenizer()
    for prompt, completion in [("near", " the"), ("near ", "the"), ("near\n", "\n the ")]:
        ids = tokenize([pair(prompt, completion)], tokenizer, max_length=64)[0].input_ids
        assert tokenizer.decode(ids) == prompt + completion + EOS


def test_train_on_everything_trains_the_prompt_but_its_first_token_does_not_count() -> None:
    dataset = tokenize([pair("near", " the")], make_tokenizer(), max_length=64, train_on="everything")
    assert dataset[0].is_trained.all()
    assert dataset.num_trained_tokens == len(dataset.input_ids) - 1


def test_text_is_trained_whole_and_ends_with_eos() -> None:
    tokenizer = make_tokenizer()
    dataset = tokenize([Record(text="the house", origin="a:1")], tokenizer, max_length=64)
    assert dataset[0].input_ids.tolist() == [*tokenizer("the house").input_ids, tokenizer.eos_token_id]
    assert dataset[0].is_trained.all()
    assert dataset.num_trained_tokens == len(dataset.input_ids) - 1


def test_bos_is_added_where_the_tokenizer_adds_it_and_only_there() -> None:
    # Having a bos token is not the same as using it: both tokenizers here have one.
    for adds_bos in (False, True):
        tokenizer = make_tokenizer(adds_bos=adds_bos)
        assert tokenizer.bos_token_id is not None
        for record in (pair("near", " the"), pair("", "near the"), Record(text="near the", origin="a:1")):
            ids = tokenize([record], tokenizer, max_length=64)[0].input_ids.tolist()
            assert (ids[0] == tokenizer.bos_token_id) == adds_bos
            assert ids.count(tokenizer.bos_token_id) == adds_bos


def test_bos_of_a_completion_record_is_context_not_target() -> None:
    dataset = tokenize([pair("", "near the")], make_tokenizer(adds_bos=True), max_length=64)
    assert dataset[0].is_trained.tolist() == [False] + [True] * (len(dataset.input_ids) - 1)


def test_bos_and_eos_that_the_data_spells_out_are_not_doubled() -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    written = tokenize([pair(BOS + "near", " the" + EOS)], tokenizer, max_length=64)
    plain = tokenize([pair("near", " the")], tokenizer, max_length=64)
    assert written.input_ids.tolist() == plain.input_ids.tolist()


def test_truncation_is_on_the_right_and_takes_eos_with_it() -> None:
    tokenizer = make_tokenizer()
    record = pair("near", " the river and the city")
    whole = tokenize([record], tokenizer, max_length=64)[0]
    for max_length in range(3, len(whole.input_ids) + 2):
        cut = tokenize([record], tokenizer, max_length=max_length)[0]
        assert cut.input_ids.tolist() == whole.input_ids[:max_length].tolist()
        assert cut.is_trained.tolist() == whole.is_trained[:max_length].tolist()


def test_kinds_may_be_mixed_and_stay_in_order_over_more_than_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(chat_template=MARKED)
    kinds = [Record(text="the river", origin="t"), pair("near", " the"), TWO_TURNS]
    records = [kinds[i % 3] for i in (0, 1, 2, 1, 0, 2, 2, 1)]
    alone = [tokenize([record], tokenizer, max_length=64)[0].input_ids.tolist() for record in records]
    monkeypatch.setattr("meshlora.reading.tokenization._BLOCK", 3)
    together = tokenize(records, tokenizer, max_length=64)
    assert [sequence.input_ids.tolist() for sequence in together] == alone
    assert (together.input_ids.dtype, together.is_trained.dtype, together.offsets.dtype) == (
        np.int32,
        np.bool_,
        np.int64,
    )


def test_an_index_out_of_range_is_not_another_sequence() -> None:
    dataset = tokenize([pair("near", " the")] * 2, make_tokenizer(), max_length=64)
    assert len(dataset) == 2
    for index in (-1, 2):
        with pytest.raises(IndexError):
            dataset[index]


def test_records_without_a_trained_token_are_named_and_counted() -> None:
    records = [pair("near the river and the city centre", " c", origin=f"a.txt:{i}") for i in range(7)]
    with pytest.raises(UserError) as error:
        tokenize([*records, pair("n", " c", origin="good")], make_tokenizer(), max_length=4)
    message = str(error.value)
    assert "7 of 8 records" in message
    assert all(f"a.txt:{i} (" in message for i in range(5))
    assert "a.txt:5" not in message
    assert "good" not in message
    assert "raise data.max_length" in message


def test_a_record_whose_only_trained_token_is_its_first_has_nothing_to_predict() -> None:
    with pytest.raises(UserError, match=r"a.txt:1 .1 tokens.: have no trained token"):
        tokenize([Record(text=EOS, origin="a.txt:1")], make_tokenizer(), max_length=4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_length": 1}, "max_length=1: must be at least 2"),
        ({"train_on": "everythin"}, "did you mean 'everything'"),
        ({"train_on": ["asistant"]}, "did you mean 'assistant'"),
        ({"train_on": []}, "one role or more"),
        ({"too_long": "drops"}, "did you mean 'drop'"),
        ({"records": []}, "nothing to tokenise"),
        ({"tokenizer": "no eos"}, "has no eos token"),
    ],
)
def test_options_that_cannot_work_are_the_users_error(options: dict[str, Any], reason: str) -> None:
    options = {"records": [pair("a", "b")], "max_length": 8, **options}
    tokenizer = make_tokenizer(eos=None if options.pop("tokenizer", None) else EOS)
    with pytest.raises(UserError, match=reason):
        tokenize(options.pop("records"), tokenizer, **options)


def test_conversations_need_no_eos_token_for_their_template_ends_the_turns() -> None:
    assert len(tokenize([TWO_TURNS], make_tokenizer(chat_template=UNMARKED, eos=None), max_length=256)) == 1


def _far(ids: dict[str, int], kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast) -> Any:
    """A tokenizer of a few words with any numbers."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({EOS: 1, "<unk>": 2} | ids, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return kind(tokenizer_object=backend, eos_token=EOS)


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_token_beyond_the_vocabulary_is_named_with_its_record(is_cached: bool, tmp_path: Path) -> None:
    records = [pair("near", "the", origin="a.txt:1"), pair("near", "far", origin="a.txt:2")]
    tokenizer = _far({"near": 3, "the": 4, "far": 10**6})
    options: dict[str, Any] = {"max_length": 8, "cache_dir": tmp_path if is_cached else None}
    if is_cached:
        tokenize(records, tokenizer, **options)
    with pytest.raises(UserError, match=r"a.txt:2: token 1000000: the model has embeddings for 2048; is it the token"):
        tokenize(records, tokenizer, vocab_size=2048, **options)
    assert len(tokenize(records, tokenizer, vocab_size=10**6 + 1, **options)) == 2


def test_a_token_that_no_int32_holds_is_named_with_its_record() -> None:
    class Far(PreTrainedTokenizerFast):  # the library itself would walk up to such a number: a minute
        def __call__(self, texts: Any, **options: Any) -> Any:
            encoded = super().__call__(texts, **options)
            if isinstance(texts, list):
                encoded["input_ids"] = [[2**31 if id_ == 4 else id_ for id_ in ids] for ids in encoded["input_ids"]]
            return encoded

    with pytest.raises(UserError, match=r"a.txt:1: token 2147483648: no model has embeddings for so many"):
        tokenize([pair("near", "far")], _far({"near": 3, "far": 4}, Far), max_length=8)


@pytest.mark.parametrize("place", ["vocabulary", "added", "vocab.json"])
def test_a_vocabulary_that_would_be_walked_for_a_minute_is_refused_at_once(place: str, tmp_path: Path) -> None:
    tokenizer = _far({"near": 3})
    tokenizer.save_pretrained(tmp_path)
    load_tokenizer(tmp_path)
    file = tmp_path / ("vocab.json" if place == "vocab.json" else "tokenizer.json")
    tree: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"near": 3}
    if place == "added":
        tree["added_tokens"][0]["id"] = 4 * 10**9
        token = tree["added_tokens"][0]["content"]
    else:
        (tree["model"]["vocab"] if place == "vocabulary" else tree)[token := "far"] = 4 * 10**9
    file.write_text(json.dumps(tree))
    begun = time.monotonic()
    with pytest.raises(UserError, match=f"token {token!r}: its number 4000000000 is beyond 100,000,000"):
        load_tokenizer(tmp_path)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("objective", ["dpo", "policy"])
def test_every_objective_refuses_tokens_beyond_the_vocabulary(objective: str, tmp_path: Path) -> None:
    row = {"chosen": "near", "rejected": "far"} if objective == "dpo" else {"completion": "far", "advantage": 1}
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "near", **row}) + "\n")
    read = read_preferences if objective == "dpo" else read_rollouts
    with pytest.raises(UserError, match=r"a.jsonl:1: token 1000000: the model has embeddings for 2048"):
        read(str(tmp_path / "a.jsonl"), _far({"near": 3, "far": 10**6}), max_length=8, vocab_size=2048)
