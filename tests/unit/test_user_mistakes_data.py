"""Mistakes in the data that is read, and in the folder that is written."""

from __future__ import annotations

import shutil

import pytest

from tests.unit.mistakes import Case, Setup, case, check_mistake, setting, several, text

pytestmark = pytest.mark.usefixtures("nothing_has_happened_yet")


def earlier_run(s: Setup) -> None:
    (s.folder / "output").mkdir()
    (s.folder / "output" / "metrics.jsonl").write_text("{}\n")


MISTAKES: dict[str, Case] = {
    # The data.
    "data_file_missing": case(
        lambda s: s.set("data.train", str(s.folder / "trian.jsonl")), "trian.jsonl", "no such file", "train.jsonl"
    ),
    "eval_file_missing": case(
        lambda s: s.set("data.eval", str(s.folder / "evil.jsonl")), "evil.jsonl", "no such file", "eval.jsonl"
    ),
    "data_file_empty": case(lambda s: s.data(), "train.jsonl", "no record", "at least one"),
    "data_line_that_is_not_json": case(lambda s: s.data({"text": "a b"}, "{broken"), "train.jsonl:2", "bad JSON"),
    "data_line_of_unknown_fields": case(
        lambda s: s.data({"text": "a b"}, {"question": "a", "answer": "b"}), "train.jsonl:2", "question"
    ),
    "data_column_missing": case(setting("data.columns", {"prompt": "question"}), "question", "train.jsonl:1"),
    "data_without_trained_tokens": case(
        lambda s: s.data({"prompt": "a b c " * 50, "completion": " d"}),
        "train.jsonl:1",
        "no trained token",
        "max_length",
    ),
    "data_list_is_empty": case(setting("data.train", []), "data.train", "[]"),
    "cache_that_cannot_be_written": case(
        lambda s: s.set("data.cache_dir", str(s.folder / "train.jsonl")), "train.jsonl"
    ),
    # The output.
    "output_holds_a_run": case(earlier_run, "output", "holds a run already", "train.overwrite=true"),
    "output_is_a_file": case(text("output", ""), "output", "is a file", "folder"),
    "output_below_a_file": case(lambda s: s.set("train.output", str(s.folder / "run.yaml" / "x")), "run.yaml"),
    "output_holds_an_adapter": case(
        lambda s: (s.folder / "output" / "adapter").mkdir(parents=True), "holds a run already", "overwrite=true"
    ),
    "output_whose_adapter_the_run_goes_on_from": case(
        several(
            lambda s: shutil.copytree(s.adapter, s.folder / "output" / "adapter"),
            lambda s: s.drop("lora"),
            lambda s: s.set("adapter", str(s.folder / "output" / "adapter")),
            setting("train.overwrite", True),
        ),
        "adapter=",
        "would be overwritten",
        "choose another output",
    ),
    "output_is_nameless": case(setting("train.output", ""), "train.output=''", "name of a folder"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_one_clear_message(mistake: Case, setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    check_mistake(mistake, setup, capfd)
