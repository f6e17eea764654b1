"""Records become tokens: what is concatenated, what is trained, what is refused, and the cache on disk."""

from __future__ import annotations

import functools
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast

from meshlora.data import Record, TokenizedDataset, tokenize
from meshlora.errors import UserError

EOS, BOS, START, END = "<eos>", "<bos>", "<|start|>", "<|end|>"
CORPUS = ["the house is near the river and the city centre", "name : The Mill | food : English", "user assistant"]

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@functools.cache
def serialized() -> str:
    """A byte-level BPE like GPT-2's, small; byte-level ones trim spaces from their offsets unless told otherwise."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[EOS, BOS, START, END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    return backend.to_str()


def make_tokenizer(*, chat_template: str | None = None, eos: str | None = EOS, adds_bos: bool = False) -> Any:
    backend = tokenizers.Tokenizer.from_str(serialized())
    if adds_bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=BOS, pad_token=END)
    tokenizer.chat_template = chat_template
    return tokenizer


def pair(prompt: str, completion: str, origin: str = "a.txt:1") -> Record:
    return Record(prompt=prompt, completion=completion, origin=origin)


def chat(*turns: tuple[str, str], origin: str = "a.jsonl:1") -> Record:
    return Record(messages=tuple({"role": role, "content": content} for role, content in turns), origin=origin)


def trained_text(dataset: TokenizedDataset, tokenizer: Any, index: int = 0) -> str:
    sequence = dataset[index]
    return tokenizer.decode(sequence.input_ids[sequence.is_trained])


TWO_TURNS = chat(("system", "be kind"), ("user", "hi"), ("assistant", "hello"), ("user", "and?"), ("assistant", "bye"))


# ---- prompt and completion, text


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


def test_loss_on_all_trains_the_prompt_but_its_first_token_does_not_count() -> None:
    dataset = tokenize([pair("near", " the")], make_tokenizer(), max_length=64, loss_on="all")
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
    monkeypatch.setattr("meshlora.data.tokenization._BLOCK", 3)
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


# ---- conversations


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


# ---- what is refused


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
        ({"loss_on": "completions"}, "did you mean 'completion'"),
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


# ---- the cache

RECORDS = [pair("near", " the river"), pair("the city", " is"), Record(text="the house", origin="t")]


class Counted(PreTrainedTokenizerFast):
    """Notes each call in a file, so that calls in other processes are seen too."""

    log: Path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.log.open("a") as file:
            file.write("call\n")
        return super().__call__(*args, **kwargs)


def counted(log: Path) -> Any:
    tokenizer = Counted(tokenizer_object=tokenizers.Tokenizer.from_str(serialized()), eos_token=EOS, bos_token=BOS)
    tokenizer.log = log
    return tokenizer


def num_calls(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def files_of(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.safetensors"))


def assert_same(one: TokenizedDataset, other: TokenizedDataset) -> None:
    for name in ("input_ids", "is_trained", "offsets"):
        a, b = getattr(one, name), getattr(other, name)
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)


def test_a_cache_hit_does_not_call_the_tokenizer(tmp_path: Path) -> None:
    cache, log = tmp_path / "new" / "cache", tmp_path / "log"
    first = tokenize(RECORDS, counted(log), max_length=16, cache_dir=cache)
    calls = num_calls(log)
    assert calls > 0
    second = tokenize(RECORDS, counted(log), max_length=16, cache_dir=cache)
    assert num_calls(log) == calls
    assert_same(first, second)
    assert_same(first, tokenize(RECORDS, make_tokenizer(), max_length=16))
    # One file and its lock: nothing temporary is left.
    assert {path.suffix for path in cache.iterdir()} == {".safetensors", ".lock"}


def test_a_cache_that_may_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("meshlora.data.cache.FileLock", refuse)
    assert_same(good, tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path))
    with pytest.raises(UserError, match="Permission denied"):
        tokenize(RECORDS, make_tokenizer(), max_length=15, cache_dir=tmp_path)


def test_a_file_that_moved_and_a_tokenizer_that_was_used_still_hit_the_cache(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenize(RECORDS, tokenizer, max_length=16, cache_dir=tmp_path)
    tokenizer(["near the river"], truncation=True, max_length=2, padding="max_length")  # leaves its mark in the backend
    moved = [Record(text=r.text, prompt=r.prompt, completion=r.completion, origin="elsewhere") for r in RECORDS]
    tokenize(moved, tokenizer, max_length=16, cache_dir=tmp_path)
    assert len(files_of(tmp_path)) == 1


def test_a_tokenizer_set_to_truncate_does_not_truncate_the_data() -> None:
    tokenizer = make_tokenizer()
    tokenizer(["near the river"], truncation=True, max_length=2, padding="max_length")
    assert_same(tokenize(RECORDS, tokenizer, max_length=16), tokenize(RECORDS, make_tokenizer(), max_length=16))


def changes() -> dict[str, tuple[list[Record], Any, dict[str, Any]]]:
    plain: dict[str, Any] = {"max_length": 16}
    split = make_tokenizer()
    split.split_special_tokens = True
    return {
        "max_length": (RECORDS, make_tokenizer(), {"max_length": 15}),
        "loss_on": (RECORDS, make_tokenizer(), {**plain, "loss_on": "all"}),
        "order of records": (RECORDS[::-1], make_tokenizer(), plain),
        "content of a record": ([*RECORDS[:-1], Record(text="the hous", origin="t")], make_tokenizer(), plain),
        "border of a record": ([pair("near ", "the river"), *RECORDS[1:]], make_tokenizer(), plain),
        "kind of a record": ([*RECORDS[:-1], pair("the house", " x")], make_tokenizer(), plain),
        "eos": (RECORDS, make_tokenizer(eos=END), plain),
        "post-processor": (RECORDS, make_tokenizer(adds_bos=True), plain),
        "chat template": (RECORDS, make_tokenizer(chat_template=MARKED), plain),
        "split_special_tokens": (RECORDS, split, plain),
    }


@pytest.mark.parametrize("change", list(changes()))
def test_whatever_the_tokens_depend_on_changes_the_key(tmp_path: Path, change: str) -> None:
    tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)
    records, tokenizer, options = changes()[change]
    cached = tokenize(records, tokenizer, cache_dir=tmp_path, **options)
    assert len(files_of(tmp_path)) == 2
    assert_same(cached, tokenize(records, tokenizer, **options))


def flip_one_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def with_arrays(path: Path, **arrays: np.ndarray) -> None:
    save_file({**load_file(path), **arrays}, path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-4]),
        lambda path: path.write_bytes(b"not safetensors at all"),
        flip_one_byte,
        lambda path: with_arrays(path, is_trained=np.zeros(3, dtype=bool)),
        lambda path: with_arrays(path, offsets=np.array([0, 0], dtype=np.int64)),
        lambda path: with_arrays(path, input_ids=np.zeros(3, dtype=np.float32)),
        lambda path: with_arrays(path, more=np.zeros(3, dtype=np.float32)),
    ],
)
def test_a_damaged_cache_file_is_made_again_not_trained_on(tmp_path: Path, damage: Any) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    good = tokenize(RECORDS, counted(log), max_length=16, cache_dir=cache)
    calls = num_calls(log)
    (path,) = files_of(cache)
    damage(path)
    for _ in range(2):  # made again once, and found sound after that
        assert_same(good, tokenize(RECORDS, counted(log), max_length=16, cache_dir=cache))
        assert num_calls(log) == 2 * calls


def test_a_file_of_another_key_under_this_name_is_not_believed(tmp_path: Path) -> None:
    good = tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)
    (path,) = files_of(tmp_path)
    tokenize(RECORDS[:1], make_tokenizer(), max_length=16, cache_dir=tmp_path)
    (other,) = set(files_of(tmp_path)) - {path}
    path.write_bytes(other.read_bytes())
    assert_same(good, tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path))


def test_a_failed_write_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(UserError, match="No space left on device"):
        tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}


def test_a_cache_dir_that_is_a_file_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cache_dir=.*cannot be written"):
        tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path / "file")


def test_records_that_are_refused_are_not_cached_and_free_the_lock(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="no trained token"):
            tokenize([pair("near the river", " c")], make_tokenizer(), max_length=2, cache_dir=tmp_path)
    assert files_of(tmp_path) == []


def tokenize_in_process(cache: str, log: str, barrier: Any, results: Any) -> None:
    tokenizer = counted(Path(log))
    barrier.wait(timeout=120)
    dataset = tokenize(RECORDS * 500, tokenizer, max_length=16, cache_dir=Path(cache))
    results.put((dataset.input_ids.tolist(), dataset.is_trained.tolist(), dataset.offsets.tolist()))


def test_two_processes_that_start_together_tokenize_once_and_read_the_same(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (str(tmp_path / "cache"), str(tmp_path / "log"), barrier, results)
    processes = [context.Process(target=tokenize_in_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    one, other = results.get(timeout=120), results.get(timeout=120)
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert one == other
    alone = tmp_path / "alone"
    tokenize(RECORDS * 500, counted(alone), max_length=16)
    assert num_calls(tmp_path / "log") == num_calls(alone)
    assert len(files_of(tmp_path / "cache")) == 1


def test_the_cache_file_is_plain_safetensors(tmp_path: Path) -> None:
    dataset = tokenize(RECORDS, make_tokenizer(), max_length=16, cache_dir=tmp_path)
    (path,) = files_of(tmp_path)
    arrays = load_file(path)
    assert set(arrays) == {"input_ids", "is_trained", "offsets"}
    assert np.array_equal(arrays["input_ids"], dataset.input_ids)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    assert json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]["key"] == path.stem
