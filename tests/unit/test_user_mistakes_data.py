"""Mistakes in the data that is read, and in the folder that is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import pytest

from meshlora.cli.main import main
from tests.for_each import for_each
from tests.unit.mistakes import Case, Setup, case, check_mistake, setting, several, text

pytestmark = pytest.mark.usefixtures("nothing_has_happened_yet")


def earlier_run(s: Setup) -> None:
    (s.folder / "output").mkdir()
    (s.folder / "output" / "metrics.jsonl").write_text("{}\n")


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def renumbered(number: int) -> Callable[[Setup], None]:
    """As many tokens as before, the one of `q` at a far place."""

    def make(s: Setup) -> None:
        file = s.model / "tokenizer.json"
        tree = json.loads(file.read_text())
        tree["model"]["vocab"]["q"] = number
        file.write_text(json.dumps(tree))

    return make


def padded_with(number: int) -> Callable[[Setup], None]:
    def make(s: Setup) -> None:
        file = s.model / "tokenizer.json"
        tree = json.loads(file.read_text())
        del tree["model"]["vocab"]["!"]
        tree["model"]["vocab"]["[PAD]"] = number
        file.write_text(json.dumps(tree))
        config = s.model / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token": "[PAD]"}))

    return make


def shared_cache(s: Setup) -> None:
    (s.folder / "shared").mkdir()
    (s.folder / "shared").chmod(0o770)
    s.set("data.cache_dir", str(s.folder / "shared"))


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
        lambda s: s.data({"text": "a b"}, {"ask": "a", "reply": "b"}), "train.jsonl:2", "its fields: ask, reply"
    ),
    "data_column_missing": case(setting("data.columns", {"prompt": "question"}), "question", "train.jsonl:1"),
    "data_without_trained_tokens": case(
        lambda s: s.data({"prompt": "a b c " * 50, "completion": " d"}),
        "train.jsonl:1",
        "no trained token",
        "max_length",
    ),
    "data_is_a_device": case(setting("data.train", "/dev/zero"), "/dev/zero", "is a device", "regular files"),
    "eval_is_a_device": case(setting("data.eval", "/dev/zero"), "/dev/zero", "is a device", "regular files"),
    "data_line_with_a_key_twice": case(
        lambda s: s.data('{"text": "a", "text": "b"}'), "train.jsonl:1", "'text' is given twice"
    ),
    "data_line_that_is_too_deep": case(
        lambda s: s.data({"text": "a"}, "[" * 10**5 + "]" * 10**5), "train.jsonl:2", "nested too deeply"
    ),
    "weight_of_a_user_turn": case(
        lambda s: s.data({"messages": [{"role": "user", "content": "a", "weight": 1}]}), "train.jsonl:1", "weight"
    ),
    "template_that_never_ends": case(
        several(lambda s: s.data(CHAT), text("model/chat_template.jinja", "{% for a in range(10**12) %}{% endfor %}")),
        "train.jsonl:1: 2 messages (user, assistant)",
        "the chat template refuses them",
        "Range too big",
    ),
    "tokenizer_with_numbers_beyond_the_vocabulary": case(
        several(renumbered(10**6), lambda s: s.data({"text": "a"}, {"text": "qqq"})),
        "train.jsonl:2: token 1000000",
        "the model has embeddings for 2048",
        "another model",
    ),
    "padding_beyond_the_vocabulary": case(
        padded_with(10**6), "whose padding is token 1000000", "has embeddings for 2048", "pad_token"
    ),
    "data_list_is_empty": case(setting("data.train", []), "data.train", "[]"),
    "cache_that_cannot_be_written": case(
        lambda s: s.set("data.cache_dir", str(s.folder / "train.jsonl")), "train.jsonl"
    ),
    "cache_that_others_can_write": case(
        shared_cache, "cache_dir=", "others can write it (mode 0770)", "chmod go-w ", "choose another folder"
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
        "could be overwritten",
        "choose another folder",
    ),
    "output_is_nameless": case(setting("train.output", ""), "train.output=''", "name of a folder"),
}


@for_each("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_one_clear_message(
    mistake: Case, setups: Callable[[], Setup], capfd: pytest.CaptureFixture[str]
) -> None:
    check_mistake(mistake, setups(), capfd)


def test_check_says_what_is_not_read_of_alpacas_records(setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    row = {"instruction": "a", "input": "b", "output": " c"}
    for name in ("train", "eval"):
        (setup.folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    setup.set("data.columns", {"prompt": "instruction", "completion": "output"})
    setup.write()
    for _ in range(2):  # the second time tokens come from the cache
        assert main(["check", str(setup.folder / "run.yaml")]) == 0
        out, _ = capfd.readouterr()
        for name in ("train", "eval"):
            assert (
                out.count(f"note: {setup.folder}/{name}.jsonl: read as prompt_completion (instruction, output); not")
                == 1
            )
        assert "data.format: alpaca reads it" in out


def test_check_says_that_an_evaluation_reads_what_is_trained(setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    train, said = f"{setup.folder}/train.jsonl", "is trained on, too"
    for given, is_said in (
        (train, True),
        ([f"{setup.folder}/eval.jsonl", train], True),
        (f"{setup.folder}/eval.jsonl", False),
        ([{"path": train, "rows": "4:"}], False),  # of a file that is cut in two
    ):
        setup.set("data.eval", given)
        setup.write()
        assert main(["check", str(setup.folder / "run.yaml")]) == 0
        assert (f"note: data.eval: {train} {said}" in capfd.readouterr().out) == is_said
