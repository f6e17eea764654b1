"""Long texts: only their beginning is tokenised, and it has the tokens that it has in the whole."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import meshlora.reading.leading
from meshlora.reading.leading import leading_tokens
from meshlora.reading.records import Record
from meshlora.reading.tokenization import tokenize
from meshlora_ground.errors import UserError
from tests.run_files import TINY
from tests.unit.records import END, EOS, MARKED, UNMARKED, chat, make_tokenizer

ROOT = Path(__file__).parents[2]
MAX_LENGTH = 50


@functools.cache
def prose() -> str:
    """English and tables: every page of the documentation."""
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md")))


@functools.cache
def code() -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "src").rglob("*.py")))


def _fast(backend: tokenizers.Tokenizer, trainer: Any) -> Any:
    backend.train_from_iterator([prose()[:30_000], code()[:30_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)


def _tokenizer(kind: str) -> Any:
    """The ways in which families of models tokenise."""
    options: dict[str, Any] = {"vocab_size": 600, "special_tokens": [EOS, "<unk>"], "show_progress": False}
    if kind == "examples":
        return AutoTokenizer.from_pretrained(TINY)
    if kind == "bytes_split_by_a_pattern":  # GPT-2, Llama 3, Qwen
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return _fast(backend, trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options))
    if kind == "merges_over_the_whole_text":  # Llama 2, Gemma: nothing splits words
        backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(split=True)  # to train in seconds
        fast = _fast(backend, trainers.BpeTrainer(**options))
        backend = fast.backend_tokenizer
        backend.pre_tokenizer = None  # type: ignore[assignment]
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)
    if kind == "unigram":  # T5, XLM-R
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        return _fast(backend, trainers.UnigramTrainer(unk_token="<unk>", **options))
    assert kind == "word_pieces"  # BERT
    # The longest word that is looked at, 100 characters by default, is shorter than what is read at once, as in use.
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>", max_input_chars_per_word=50))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _fast(backend, trainers.WordPieceTrainer(**options))


@pytest.mark.parametrize(
    "kind", ["examples", "bytes_split_by_a_pattern", "merges_over_the_whole_text", "unigram", "word_pieces"]
)
def test_the_first_tokens_of_long_texts_are_those_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A margin of 20 tokens, so that there is a cut every few words: fifty times less than what is used.
    monkeypatch.setattr(meshlora.reading.leading, "_MARGIN", 20)
    tokenizer = _tokenizer(kind)
    made_up = [
        "ab" * 1000,
        " \n" * 1000,
        "é🙂" * 1000,
        "a" + "\u0301" * 1000,
        "1234567890" * 200,
        " " * 2000,
        "中文" * 1000,
    ]
    texts = [text[start : start + 1500] for text in (prose(), code()) for start in range(0, 60_000, 997)]
    texts += made_up
    whole = tokenizer(texts, add_special_tokens=False).input_ids
    for characters in (1, 2, 3):  # for some texts just enough for the tokens that are kept, and hence not enough
        monkeypatch.setattr(meshlora.reading.leading, "_CHARACTERS", characters)
        found = leading_tokens(texts, tokenizer, max_length=MAX_LENGTH)
        assert sum(not tokens.is_whole for tokens in found) > len(texts) - len(made_up)
        for tokens, ids in zip(found, whole, strict=True):
            assert tokens.ids[:MAX_LENGTH] == ids[:MAX_LENGTH]
            assert len(tokens.ids) >= min(MAX_LENGTH, len(ids))


def test_a_text_of_millions_of_characters_is_not_tokenised_beyond_its_beginning() -> None:
    tokenizer = make_tokenizer()
    seen: list[int] = []

    def counting(texts: list[str], **options: Any) -> Any:
        seen.extend(map(len, texts))
        return tokenizer(texts, **options)

    leading_tokens(["the house " * 10**6], counting, max_length=64)  # type: ignore[arg-type]
    assert sum(seen) < 100_000


def test_a_text_of_few_tokens_is_read_on_until_there_are_enough() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    text = " " * 30_000 + "the river"  # of the first 8,000 characters nothing is left
    (found,) = leading_tokens([text], tokenizer, max_length=4)
    assert found.is_whole
    assert found.ids == tokenizer("the river", add_special_tokens=False).input_ids


def test_a_batch_is_bounded_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshlora.reading.leading, "_BATCH", 100)
    tokenizer = make_tokenizer()
    sizes: list[int] = []

    def counting(texts: list[str], **options: Any) -> Any:
        sizes.append(sum(map(len, texts)))
        return tokenizer(texts, **options)

    texts = ["a" * number for number in (60, 60, 30, 300, 1, 1)]
    found = leading_tokens(texts, counting, max_length=64)  # type: ignore[arg-type]
    assert sizes == [60, 90, 300, 2]
    assert [tokens.ids for tokens in found] == tokenizer(texts, add_special_tokens=False).input_ids


BARE = UNMARKED.replace("<|end|>", "")  # eos is only where the conversation has it


def _tokens_of_each_kind(template: str, long: str) -> list[list[Any]]:
    turns = [("user", "u"), ("assistant", f"{END}a"), ("user", "x"), ("assistant", f"b{END}" + long)]
    weighted = chat(*turns, origin="a:6")
    assert weighted.messages is not None
    weighted.messages[1]["weight"] = 0
    records = [
        Record(text=long, origin="a:1"),
        Record(prompt="p", completion=long, origin="a:2"),
        chat(("user", "u"), ("assistant", f"{END}a{END}" + long + f"{END}b"), *turns, origin="a:3"),
        chat(*turns, origin="a:4"),
        weighted,
    ]
    tokenizer = make_tokenizer(chat_template=template, eos=END, adds_bos=True)
    data = tokenize(records, tokenizer, max_length=MAX_LENGTH)
    records.append(Record(prompt=long, completion="c", origin="a:2"))
    of_all = tokenize(records, tokenizer, max_length=MAX_LENGTH, train_on="everything")
    return [array.tolist() for found in (data, of_all) for array in (found.input_ids, found.is_trained, found.offsets)]


@pytest.mark.parametrize("template", [MARKED, *(pytest.param(t, marks=pytest.mark.proof) for t in (UNMARKED, BARE))])
def test_what_is_trained_of_a_long_record_is_what_is_trained_of_the_whole(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = _tokens_of_each_kind(template, prose()[:12_000])
    monkeypatch.setattr(meshlora.reading.leading, "_CHARACTERS", 10**6)
    assert cut == _tokens_of_each_kind(template, prose()[:12_000])


def test_a_tokenizer_that_fails_is_one_message() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, EOS: 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)
    with pytest.raises(UserError, match=r"tokenizer TokenizersBackend: fails on .*UNK"):
        tokenize([Record(text="b", origin="a:1")], tokenizer, max_length=4)
