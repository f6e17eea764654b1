"""Data of the LoRA paper's recipe: rows and tokens are those of microsoft/LoRA's own scripts, recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from meshlora.reading.nlg import of_categories
from meshlora.reading.records import prompts_of
from meshlora.reading.sources import read_records
from meshlora.run.config.file import read_run
from meshlora.run.config.run_file import GenerateConfig
from meshlora.run.decoding import encode_prompts, ends_of
from meshlora.run.texts import Texts
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError
from tests.for_each import for_each
from tests.run_files import write_run_file

NLG = Path(__file__).parents[1] / "recorded"
FILES = {"e2e": NLG / "e2e.txt", "webnlg": NLG / "webnlg.json", "dart": NLG / "dart.json"}
RECORDED: dict[str, Any] = json.loads((NLG / "official_tokens.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """GPT-2's, with the tokens and merges of these texts alone."""
    return AutoTokenizer.from_pretrained(NLG / "gpt2")


class _Config:
    vocab_size, max_position_embeddings = 50257, 1024

    def get_text_config(self) -> _Config:
        return self


def tokens_of(file: Path, folder: Path, tokenizer: Any, **data: Any) -> TokenizedDataset:
    data |= {"train": str(file), "cache_dir": str(folder / "cache"), "max_length": 512}
    config = read_run(write_run_file(folder / "run.yaml", data=data))
    texts = Texts(config.model, config.data, config.train.objective)
    return texts.read(str(file), tokenizer, _Config())  # type: ignore[arg-type]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@for_each("name", FILES)
@for_each("stage", ["source", "formatted", "encoded"])
def test_tokens_are_those_of_microsofts_encoder(name: str, stage: str, tmp_path: Path, tokenizer: Any) -> None:
    """From the file as it is published, from `_formatted.jsonl`, and from the ids that their training reads."""
    meant = RECORDED[name]["encoded"]
    file = FILES[name] if stage == "source" else jsonl(tmp_path / "rows.jsonl", RECORDED[name][stage])
    words = {} if stage == "encoded" else {"separator": "<|endoftext|>"}
    found = tokens_of(file, tmp_path, tokenizer, **words)
    assert [each.input_ids.tolist() for each in found] == [row["context"] + row["completion"] for row in meant]
    assert [int((~each.is_trained).sum()) for each in found] == [len(row["context"]) for row in meant]


def test_prompts_end_with_the_separator_and_texts_at_two_newlines(tokenizer: Any) -> None:
    prompts = prompts_of(read_records(FILES["e2e"]))
    options = GenerateConfig(stop=["\n\n"])
    asked = [each.text for each in prompts]
    encoded = [ids for _, ids in encode_prompts(asked, tokenizer, _Config(), options, separator="<|endoftext|>")]
    assert encoded == list({tuple(row["context"]): row["context"] for row in RECORDED["e2e"]["encoded"]}.values())
    assert ends_of(tokenizer, options) == [50256, 628]


def test_texts_that_are_not_good_are_left_out_and_categories_chosen() -> None:
    """The record has one entry of a category that the training data lack."""
    every = read_records(FILES["webnlg"])
    seen, unseen = (of_categories(every, name) for name in ("seen", "unseen"))
    meant = [row["cate"] for row in RECORDED["webnlg"]["formatted"]]
    assert [record.is_seen for record in every] == meant
    assert (len(seen), len(unseen)) == (meant.count(True), meant.count(False))
    assert sorted(record.origin for record in seen + unseen) == sorted(record.origin for record in every)
    with pytest.raises(UserError, match="no record is of these"):
        of_categories(seen, "unseen")
    with pytest.raises(UserError, match="does not say its category"):
        of_categories(read_records(FILES["dart"]), "seen")


@for_each(
    ("row", "said"),
    [
        ({"context": [1], "completion": "x"}, "completion is not a list of token ids"),
        ({"context": [1], "completion": []}, "completion is not a list of token ids"),
        ({"context": [1.5], "completion": [1]}, "context is not a list of token ids"),
        ({"context": "x", "completion": " "}, "empty completion"),
        ({"context": "x", "completion": "y", "cate": "Food"}, "cate is a string"),
        ({"tripleset": [["a", "b"]], "annotations": [{"text": "x"}]}, "an entry of triples and texts"),
        ({"tripleset": [["a", "b", 1]], "annotations": [{"text": "x"}]}, "a triple is a number"),
        ({"1": {"modifiedtripleset": [], "lexicalisations": []}}, "'category' is missing"),
    ],
)
def test_wrong_row_is_named(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_records(jsonl(tmp_path / "rows.jsonl", [row]))
    assert said in str(caught.value)
    assert "rows.jsonl:1" in str(caught.value)


def test_separator_without_effect_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [{"text": "The pub ."}])
    with pytest.raises(UserError, match="no record has a prompt"):
        tokens_of(file, tmp_path, tokenizer, separator="<|endoftext|>")
