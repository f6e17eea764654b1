"""All mistakes of a run file in one answer, in the order to mend them; what only follows from one is not said."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from meshlora.cli.main import main
from meshlora.run.agreement import _packed, _unpacked
from meshlora.run.config.mending import checked
from meshlora_ground.errors import UnsupportedError, UserError, at_once, each_of, nearest, prefixed
from tests.for_each import for_each
from tests.unit.mistakes import Setup

pytestmark = pytest.mark.usefixtures("nothing_has_happened_yet")


def said(line: list[str], capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the one error of a command."""
    assert main(line) == 2
    out, err = capfd.readouterr()
    assert out == ""
    return err.splitlines()


def test_twelve_mistakes_are_said_in_one_answer(setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    """Foreign keys, slips, a wrong type, a broken rule, topology, adapter, files, output: with one call, not twelve."""
    setup.tree |= {"base_model": "x", "val_set_size": 0.1, "topology": "tp=3"}
    setup.tree["train"] |= {"learning_rate": 1e-4, "sav_every": 2, "batch_size": "four", "lr": -1.0}
    setup.tree["lora"] |= {"rank": 8, "target_modules": ["q_prj"]}
    setup.tree["data"] |= {"train": "nowhere.jsonl", "eval": str(setup.folder / "nor_this.jsonl")}
    setup.set("train.output", str(setup.folder / "model" / "out"))
    setup.write()
    before = sorted(setup.folder.rglob("*"))
    check, train = setup.command_lines()
    head, *lines = said(check, capfd)
    assert head == "error: 12 mistakes:", lines
    begins = [
        "lora.rank: unknown key; here it is lora.r",
        "train.learning_rate: unknown key; here it is train.lr",
        "train.sav_every: unknown key; did you mean 'save_every'?",
        "base_model: unknown key; here it is model.path",
        "val_set_size: unknown key; here it is data.eval",
        "train.batch_size: 'four': it must be a whole number",
        "train.lr=-1.0: it must be above 0",
        "train.output=",
        "tp=3: tp must divide num_attention_heads=8",
        "target_modules=['q_prj']: 'q_prj' matches no linear layer; did you mean 'q_proj'?",
        "nowhere.jsonl: there is no such file",
        f"{setup.folder / 'nor_this.jsonl'}: there is no such file",
    ]
    assert len(lines) == len(begins)
    for line, begin in zip(lines, begins, strict=True):
        assert line.startswith(f"  {begin}"), line
    assert sorted(setup.folder.rglob("*")) == before
    # Before ranks are started it is said, too, and of the processes as well.
    of_train = said(train, capfd)
    assert [line for line in of_train if "tp=3" in line] == [
        "  tp=3 on 2 processes: tp must divide the number of processes; use tp in {1, 2}, or --nproc 3"
    ]
    assert [line for line in of_train if "tp=3" not in line] == [head, *(line for line in lines if "tp=3" not in line)]


FOLLOWING = {
    "the length has another name": ({"train": {"steps": None, "num_train_epochs": 3}}, ["train.num_train_epochs"]),
    "the length is no number": ({"train": {"steps": "many"}}, ["train.steps"]),
    "the adapter has another name": ({"lora": None, "lora_r": 8}, ["lora_r"]),
    "the model has another name": ({"model": None, "model_name_or_path": "x"}, ["model_name_or_path"]),
    "held-out data are no data": ({"data": {"eval": True}, "train": {"eval_every": 2}}, ["data.eval"]),
    "the length of rows is no number": ({"data": {"max_length": "long"}}, ["data.max_length"]),
}


@for_each(("changes", "places"), FOLLOWING.values(), ids=FOLLOWING)
def test_what_follows_from_a_mistake_is_none(
    changes: dict[str, object], places: list[str], setups: Callable[[], Setup], capfd: pytest.CaptureFixture[str]
) -> None:
    setup = setups()
    for group, values in changes.items():
        if isinstance(values, dict):
            values = {**setup.tree[group], **values}
            values = {key: value for key, value in values.items() if value is not None}
        setup.tree[group] = values
        if values is None:
            del setup.tree[group]
    setup.write()
    (line,) = said(setup.command_lines()[0], capfd)
    assert [line.removeprefix("error: ").partition(":")[0]] == places


@for_each(
    ("path", "said"),
    [
        ("lora.rank", "here it is lora.r"),
        ("lora.lora_rank", "here it is lora.r"),
        ("lora.alpha", "here it is lora.lora_alpha"),
        ("lora.dropout", "here it is lora.lora_dropout"),
        ("train.use_liger", "here it is model.kernels: auto"),
        ("train.use_liger_kernel", "here it is model.kernels: auto"),
        ("data.split", "each source has its own, as in train: {path: FILE, split: …}"),
        ("data.path", "here it is data.train"),
    ],
)
def test_key_of_others_has_its_name_here(path: str, said: str) -> None:
    tree: dict[str, dict[str, object]] = {
        "model": {"path": "x"},
        "data": {"train": "a.jsonl"},
        "train": {"output": "o", "steps": 3},
        "lora": {"r": 4},
    }
    group, _, key = path.partition(".")
    tree[group][key] = 1
    with pytest.raises(UserError) as caught:
        checked(tree)
    assert str(caught.value).startswith(f"{path}: unknown key; {said}")


def test_rules_of_several_groups_and_within_one_are_all_said(setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    setup.tree["train"] |= {"lr": 0, "warmup_steps": -1, "keep_best": True, "eval_every": 0}
    setup.tree["data"] |= {"date": "yesterday"}
    setup.tree["topology"] = "sp"
    setup.write()
    _, *lines = said(setup.command_lines()[0], capfd)
    for words in ("train.lr=0", "train.warmup_steps=-1", "train.keep_best", "data.date='yesterday'", "sp with tp=1"):
        assert [line for line in lines if words in line], lines


def test_mistakes_of_several_adapters_are_said_once_where_they_share_them(
    setup: Setup, capfd: pytest.CaptureFixture[str]
) -> None:
    setup.tree["adapters"] = {"one": {"lora": {"target_modules": ["q_prj"]}}, "two": {"data": {"train": "no.jsonl"}}}
    setup.tree["topology"] = "tp=16"
    setup.write()
    lines = said(setup.command_lines()[0], capfd)
    assert len([line for line in lines if "tp=16" in line]) == 1
    assert [line for line in lines if "adapter one: target_modules=['q_prj']" in line]
    assert [line for line in lines if "adapter two: no.jsonl: there is no such file" in line]


def test_run_file_of_another_folder_names_the_one_to_go_to(
    setup: Setup, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As examples/*.yaml are: no hub is asked for `model`, and what else is missing there is not listed."""
    for name in ("model.path", "data.train", "data.eval"):
        group, _, key = name.partition(".")
        setup.set(name, str(Path(setup.tree[group][key]).relative_to(setup.folder)))
    (setup.folder / "runs").mkdir()
    setup.file = "runs/run.yaml"
    setup.write()
    (setup.folder / "run.yaml").rename(setup.folder / "runs" / "run.yaml")
    monkeypatch.chdir(tmp_path)
    (line,) = said(setup.command_lines()[0], capfd)
    assert line.startswith("error: model, train.jsonl, eval.jsonl in ")
    assert line.endswith(f", {tmp_path}, where there is none; go to {setup.folder}, or write them in full")


def test_held_out_file_is_missed_before_minutes_of_reading(
    setup: Setup, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshlora.run.texts.read_sources", lambda *_: pytest.fail("rows were read"))
    setup.set("data.eval", "nowhere.jsonl")
    setup.write()
    (line,) = said(setup.command_lines()[0], capfd)
    assert "nowhere.jsonl: there is no such file" in line


def test_a_name_of_the_hub_is_not_downloaded_for_a_file_that_is_wrong(
    setup: Setup, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MESHLORA_HF_HUB_OFFLINE", "")
    monkeypatch.setattr("meshlora_ground.hub._download", lambda *_: pytest.fail("it was downloaded"))
    setup.set("model.path", "some/model")
    setup.set("train.lr", -1.0)
    setup.set("data.train", "nowhere.jsonl")
    setup.write()
    _, rate, file = said(setup.command_lines()[0], capfd)
    assert "train.lr=-1.0" in rate
    assert "nowhere.jsonl" in file


def test_several_mistakes_travel_between_processes_and_take_a_prefix() -> None:
    both = at_once([UserError("a", "b"), UnsupportedError("c", "d", "e\n  f"), UserError("a", "b")])
    assert str(both) == "2 mistakes:\n  a: b\n  c: d; e\n    f"
    copy = pickle.loads(pickle.dumps(both))
    assert [type(each) for each in each_of(copy)] == [UserError, UnsupportedError]
    assert str(copy) == str(both) == str(_unpacked(json.loads(json.dumps(_packed(both)))))
    assert str(prefixed(both, "adapter x: ")).splitlines()[1] == "  adapter x: a: b"
    assert at_once([error := UserError("a", "b")]) is error


def test_mistakes_without_number_stay_readable() -> None:
    many = at_once(UserError(f"key{number}" + "x" * 10**5, "unknown key") for number in range(1000))
    assert str(many).startswith("1000 mistakes:\n  key0x")
    assert str(many).endswith("\n  and 960 more")
    assert len(str(many)) <= 8_000


@for_each(
    ("given", "known", "near"),
    [
        ("topolgy", ["topology", "train"], "topology"),
        ("warm_up_steps", ["warmup_steps"], "warmup_steps"),
        ("WarmupSteps", ["warmup_steps"], "warmup_steps"),
        ("lrr", ["lr"], "lr"),
        ("tpp", ["pp", "tp"], "tp"),
        ("rnu.yaml", ["run.yaml"], "run.yaml"),
        ("instrution", ["instruction"], "instruction"),
        ("rank", ["r", "rank_pattern"], None),
        ("nothere.jsonl", ["openhermes.jsonl"], None),
        ("nope.jsonl", ["eval.jsonl"], None),
        ("a.jsonl", ["b.jsonl"], None),
        ("--chat", ["--search"], None),
        ("grpo", ["dpo", "sft"], None),
        ("dq", ["dp", "tp"], None),
    ],
)
def test_only_a_slip_of_the_keys_is_guessed(given: str, known: list[str], near: str | None) -> None:
    """Following a guess that is another word trains on the held-out data, or sets another option."""
    assert nearest(given, known) == near
