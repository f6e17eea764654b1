"""Images of conversations: the processor's own batch, files that are refused, and what is never cut or trained."""

from __future__ import annotations

import io
import os
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Gemma3Config, LlamaConfig, Qwen3VLConfig

from meshlora.plan.pairs import check
from meshlora.reading import images as images_module
from meshlora.reading.preferences import read_preferences
from meshlora.reading.processor import load_processor
from meshlora.reading.rollouts import read_rollouts
from meshlora.reading.sources import read_records
from meshlora.reading.tokenization import tokenize
from meshlora.run.config.run_file import DataConfig, ModelConfig, RunConfig, TrainConfig
from meshlora.run.followed import no_tokens
from meshlora.run.prepared import asked_of
from meshlora.train.batch import IGNORED
from meshlora.train.collation import _more, collate
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UnsupportedError, UserError
from tests.for_each import for_each
from tests.images import conversation, part, write_pictures, write_processor, write_rows

CONFIGS = {"qwen3_vl": Qwen3VLConfig, "gemma3": Gemma3Config}


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = {}
    for name, config in CONFIGS.items():
        folder = write_processor(tmp_path_factory.mktemp(name), name)
        made[name] = load_processor(folder, config())
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pictures(tmp_path)
    return tmp_path


def read(folder: Path, *rows: Any, processor: Any, max_length: int = 128, **options: Any) -> TokenizedDataset:
    records = read_records(write_rows(folder / "a.jsonl", *rows))
    return tokenize(records, processor.tokenizer, max_length=max_length, processor=lambda: processor, **options)


# One image, none, and two; a turn with parts of text after the last image.
ROWS = (
    conversation("wide.png", "what is it?"),
    conversation("no image here"),
    {"messages": [*conversation("small.jpg", "and", "tall.webp")["messages"], *conversation("which?")["messages"]]},
)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_batch_is_the_one_that_the_processor_makes_of_the_conversations(
    name: str, processors: dict[str, Any], folder: Path
) -> None:
    processor = processors[name]
    batch = collate(list(read(folder, *ROWS, processor=processor)), pad_token_id=1, token_multiple=2)
    conversations = [list(record.messages or ()) for record in read_records(folder / "a.jsonl")]
    theirs = processor.apply_chat_template(
        conversations,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"padding": True, "padding_side": "right", "add_special_tokens": False},
    )
    length = theirs["input_ids"].shape[1]
    assert torch.equal(batch.input_ids[:, :length], theirs.pop("input_ids"))
    assert torch.equal(batch.attention_mask[:, :length], theirs.pop("attention_mask"))
    trained = batch.labels[:, : length - 1] != IGNORED
    assert torch.equal(trained.long(), theirs.pop("assistant_masks")[:, 1:])
    assert batch.more.keys() == theirs.keys()
    for key, value in theirs.items():
        ours = batch.more[key]
        assert torch.equal(ours[:, :length] if key in images_module.TOKEN_TYPES else ours, value), key


def test_images_are_never_trained(processors: dict[str, Any], folder: Path) -> None:
    processor = processors["qwen3_vl"]
    answer = {"role": "assistant", "content": [part("here:"), part("tall.webp")]}
    row = {"messages": [*conversation("wide.png", "what?")["messages"], {"role": "user", "content": "draw"}, answer]}
    for train_on in ("all", "everything"):
        (sequence,) = read(folder, row, processor=processor, train_on=train_on)
        of_images = np.isin(sequence.input_ids, [processor.image_token_id])
        assert of_images.sum() == 8 + 10  # two tokens for each 8 x 8 pixels
        assert not sequence.is_trained[of_images].any()
        text = processor.tokenizer.decode(sequence.input_ids[sequence.is_trained])
        assert "a house<|endoftext|>" in text
        assert "here:" in text
        assert ("draw" in text) == (train_on == "everything")


def test_answers_that_are_apart_have_the_images_before_them(processors: dict[str, Any], folder: Path) -> None:
    processor = processors["qwen3_vl"]
    first, second = (conversation(image, "what?")["messages"] for image in ("wide.png", "tall.webp"))
    beginnings = [{"messages": first}, {"messages": [*first, *second]}]
    apart = read(folder, beginnings[1], processor=processor, turns="apart")
    alone = read(folder, *beginnings, processor=processor, train_on="last")
    assert len(apart) == 2
    for one, other in zip(apart, alone, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.is_trained.tolist() == other.is_trained.tolist()
        ours, theirs = one.more(), other.more()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_sequence_is_never_cut_in_an_image_but_after_it(processors: dict[str, Any], folder: Path) -> None:
    processor = processors["qwen3_vl"]
    row = conversation("answer", "wide.png", answer="a house " * 20)
    (whole,) = read(folder, row, processor=processor)
    last = int(np.flatnonzero(whole.input_ids == processor.image_token_id)[-1])
    with pytest.raises(
        UserError, match=rf"a.jsonl:1 \({last + 1} tokens\): have images that do not end within max_len"
    ):
        read(folder, row, conversation("x"), processor=processor, max_length=last)
    (cut,) = read(folder, row, processor=processor, max_length=last + 12)
    assert len(cut.input_ids) == last + 12
    assert (cut.input_ids == processor.image_token_id).sum() == 8


def test_images_of_unequal_size_are_padded_on_the_right_and_below() -> None:
    one, two = torch.ones(1, 3, 4, 6), torch.ones(2, 3, 5, 2)
    found = _more([{"pixel_values": one}, {}, {"pixel_values": two, "n": torch.tensor([1, 2])}], 7)
    assert found["pixel_values"].shape == (3, 3, 5, 6)
    assert torch.equal(found["pixel_values"][0, :, :4, :], one[0])
    assert torch.equal(found["pixel_values"][1:, :, :, :2], two)
    assert found["pixel_values"].sum() == one.sum() + two.sum()
    assert found["n"].tolist() == [1, 2]


def bytes_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def noise(size: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (size, size, 3), dtype=np.uint8))


def written(content: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content)


def link_to_a_file_outside(file: Path) -> None:
    outside = file.parent.parent / "outside.png"
    noise(8).save(outside)
    file.symlink_to(outside)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda file: None, "cannot be read .No such file"),
    "pipe": (os.mkfifo, "not a regular file"),
    "folder": (Path.mkdir, "not a regular file"),
    "link": (link_to_a_file_outside, "not below the folder of the data file"),
    "text": (written(b"no image"), "cannot be read as PNG, JPEG, WEBP; is the file whole"),
    "gif": (written(bytes_of(noise(8), "GIF")), "cannot be read as PNG, JPEG, WEBP"),
    "png cut": (written(bytes_of(noise(64), "PNG")[:-2000]), "cannot be read as PNG, JPEG, WEBP"),
    "jpeg cut": (written(bytes_of(noise(64), "JPEG")[:-500]), "cannot be read as PNG, JPEG, WEBP"),
    "animated": (
        written(bytes_of(noise(8), "WEBP", save_all=True, append_images=[noise(8).rotate(90)])),
        "it is animated",
    ),
    # 8 kB in the file, 300 MB of pixels.
    "bomb": (written(bytes_of(Image.new("1", (8200, 8200)), "PNG")), "8200 x 8200 pixels, more than 67,108,864"),
    "large": (lambda file: os.truncate(os.open(file, os.O_CREAT | os.O_RDWR), 2**30), "larger than 64 MB"),
}


@pytest.mark.parametrize("what", list(BAD))
def test_a_file_that_is_no_whole_image_is_refused_with_record_and_file(
    what: str, processors: dict[str, Any], folder: Path
) -> None:
    make, words = BAD[what]
    make(folder / "bad.png")
    with pytest.raises(UserError, match=f"a.jsonl:2: image .*bad.png.*{words}"):
        read(folder, ROWS[0], conversation("bad.png", "what?"), processor=processors["qwen3_vl"])


@for_each("what", ["missing", "png cut"])
def test_a_record_whose_image_cannot_be_read_is_passed_over(
    what: str, processors: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    write_pictures(folder := tmp_path_factory.mktemp("pictures"))
    BAD[what][0](folder / "bad.png")
    said: list[str] = []
    options = {"processor": processors["qwen3_vl"], "on_bad_row": "skip", "say": said.append}
    found = read(folder, conversation("bad.png", "what?"), *[ROWS[0]] * 10, **options)
    expected = read(folder, *[ROWS[0]] * 10, processor=processors["qwen3_vl"])
    assert found.input_ids.tolist() == expected.input_ids.tolist()
    assert found.further is not None
    assert expected.further is not None
    assert found.further.digest().tolist() == expected.further.digest().tolist()
    assert said[0].startswith("1 of 11 rows cannot be trained, and are passed over")
    assert "a.jsonl:1: image " in said[0]


@pytest.mark.parametrize(
    "path", ["../outside.png", "/etc/hostname", "~/a.png", "https://example.org/a.png", "a\0b.png"]
)
def test_only_files_below_the_folder_of_the_data_are_read(path: str, processors: dict[str, Any], folder: Path) -> None:
    noise(8).save(folder.parent / "outside.png")
    row = {"messages": [{"role": "user", "content": [{"type": "image", "image": path}]}, *ROWS[0]["messages"][1:]]}
    with pytest.raises(UserError, match=r"a.jsonl:1: image .*(not below the folder|No such file|is an address)"):
        read(folder, row, processor=processors["qwen3_vl"])


def test_a_file_that_changes_during_a_run_is_refused(processors: dict[str, Any], folder: Path) -> None:
    data = read(folder, *ROWS, processor=processors["qwen3_vl"])
    before = data.arrays["further"]
    noise(9).save(folder / "tall.webp")
    data[0].more()
    with pytest.raises(UserError, match=r"a.jsonl:3: image .*tall.webp.*changed since the run began"):
        data[2].more()
    assert not np.array_equal(read(folder, *ROWS, processor=processors["qwen3_vl"]).arrays["further"], before)


def test_the_cache_knows_the_content_of_images_not_their_place(
    processors: dict[str, Any], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache, processor = tmp_path_factory.mktemp("cache"), processors["qwen3_vl"]

    def number_after(place: Path) -> int:
        read(place, *ROWS, processor=processor, cache_dir=cache)
        return len(list(cache.glob("*.safetensors")))

    assert number_after(folder) == 1
    moved = tmp_path_factory.mktemp("moved") / "here"
    shutil.copytree(folder, moved)
    assert number_after(moved) == 1
    noise(16).save(moved / "small.jpg")
    assert number_after(moved) == 2


@pytest.mark.parametrize("row", [conversation("say <|image_pad|>"), conversation("wide.png", "is <|image_pad|> it?")])
def test_a_placeholder_in_a_text_is_refused(row: Any, processors: dict[str, Any], folder: Path) -> None:
    with pytest.raises(UserError, match=r"a.jsonl:2: .*(it stands for an image|the processor refuses them)"):
        read(folder, ROWS[0], row, processor=processors["qwen3_vl"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "image"}], r"\[0\] has type; a part of image has type and image"),
        ([{"type": "image", "image": 3}], r"content\[0\].image is a number"),
        ([{"type": "image", "url": "a.png"}], "a part of image has type and image"),
        ([{"type": "video", "video": "a.mp4"}], "'video', not text or image"),
        ([{"type": "image", "image": "a.png", "text": "b"}], "a part of image has type and image"),
        (["a"], r"content\[0\] is a string, not an object"),
        ({"type": "text"}, "content is an object, not a string"),
    ],
)
def test_malformed_parts_are_named(content: Any, words: str, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(UserError, match=f"a.jsonl:1: messages.0..*{words}"):
        read_records(write_rows(tmp_path / "a.jsonl", row))


def test_preferences_have_the_images_of_their_prompt(processors: dict[str, Any], folder: Path) -> None:
    prompt, chosen = conversation("wide.png", "what?")["messages"]
    row = {"prompt": [prompt], "chosen": [chosen], "rejected": [{"role": "assistant", "content": "a tree"}]}
    processor = processors["qwen3_vl"]
    data = read_preferences(
        str(write_rows(folder / "a.jsonl", row)), processor.tokenizer, max_length=64, processor=lambda: processor
    )
    one, other = (sequence.more()["pixel_values"] for sequence in list(data)[:2])
    assert torch.equal(one, other)
    assert data.has_images([0])


def test_what_is_not_proved_with_images_is_refused(processors: dict[str, Any], folder: Path) -> None:
    data = read(folder, *ROWS, processor=processors["gemma3"])
    assert [data.has_images([index]) for index in range(3)] == [True, False, True]
    run = RunConfig(ModelConfig("m"), DataConfig("t", packing=True), TrainConfig("out", steps=1), lora={})
    base: Any = types.SimpleNamespace(asked={})
    check(asked_of(run.asked, base, no_tokens(), None))
    with pytest.raises(UnsupportedError, match=r"data.packing with images"):
        check(asked_of(run.asked, base, no_tokens(), data))
    row = {"messages": ROWS[0]["messages"], "advantage": 1.0}
    with pytest.raises(UserError, match=r"a.jsonl:1: a record with an image: images are not read here"):
        read_rollouts(
            str(write_rows(folder / "a.jsonl", row)), processors["gemma3"].tokenizer, max_length=64, vocab_size=4096
        )
    with pytest.raises(UnsupportedError, match="images for model_type 'llama': transformers has no processor"):
        load_processor(folder, LlamaConfig())
    with pytest.raises(UserError, match=r"it has no processor, as in preprocessor_config.json"):
        load_processor(folder, Gemma3Config())
