"""Metrics on generated answers: what each says of an answer, and what is said of a user's function that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshlora.run.answer_metrics import Answer, Measures
from meshlora.run.config.file import read_run
from meshlora.run.config.metrics import RegexMetric
from meshlora_ground.errors import UserError
from tests.run_files import write_run_file

CALL = '{"name": "f", "arguments": {"a": 1}}'


def value(metric: Any, text: str, *references: str) -> float:
    (found,) = Measures([metric]).means([Answer("the prompt", text, references or ("",), "eval.jsonl:3")]).values()
    return found


@pytest.mark.parametrize(
    ("metric", "text", "references", "expected"),
    [
        ("exact_match", " Paris\n", ["Paris"], 1),
        ("exact_match", "paris", ["Paris"], 0),
        ("exact_match", "Paris.", ["Paris"], 0),
        ("exact_match", "one  two", ["one two"], 0),
        ("exact_match", "two", ["one", "two"], 1),
        ("json_valid", f" {CALL}\n", ["x"], 1),
        ("json_valid", f"{CALL} and more", ["x"], 0),
        ("json_valid", '{"a": 1, "a": 2}', ["x"], 0),
        ("json_valid", "", ["x"], 0),
        ("json_match", '{"arguments": {"a": 1.0},\n "name": "f"}', [CALL], 1),
        ("json_match", '{"name": "f", "arguments": {"a": 2}}', [CALL], 0),
        ("json_match", '{"name": "f", "arguments": {"a": true}}', [CALL], 0),
        ("json_match", '{"name": "f", "arguments": {"a": 1, "b": 1}}', [CALL], 0),
        ("json_match", "[1, 2]", ["[2, 1]"], 0),
        ("json_match", "[[1], {}]", ["[[1], {}]"], 1),
        ("json_match", "no JSON", ["1"], 0),
        (RegexMetric(r"\d+"), "it is 42.", ["x"], 1),
        (RegexMetric(r"\d+"), "it is many", ["x"], 0),
        (RegexMetric(r"\d+", whole=True), "it is 42.", ["x"], 0),
        (RegexMetric(r"\d+", whole=True), " 42 ", ["x"], 1),
    ],
)
def test_an_answer_is_worth(metric: Any, text: str, references: list[str], expected: float) -> None:
    assert value(metric, text, *references) == expected


def test_means_are_over_the_answers() -> None:
    answers = [Answer("p", text, ("yes",), "eval.jsonl:1") for text in ("yes", "no", "yes", "{}")]
    metrics = ["json_valid", RegexMetric("^[a-z]+$", name="word"), "exact_match"]
    assert Measures(metrics).means(answers) == {"json_valid": 0.25, "word": 0.75, "exact_match": 0.5}


def test_a_function_gets_prompt_answer_and_reference_and_the_best_reference_counts(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def near(prompt, answer, reference):\n    return len(prompt) + (answer == reference) / 4\n")
    assert value(f"{file}:near", "b", "a", "b") == 10.25
    assert value(f"{file}:near", "b", "a") == 10


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f(p, a, r): raise ValueError('no')", "f of the answer 'b' to eval.jsonl:3: it raised ValueError (no)"),
        ("def f(p, a): return 1", "to eval.jsonl:3: it raised TypeError"),
        ("def f(p, a, r): exit(3)", "to eval.jsonl:3: it raised SystemExit"),
        ("def f(p, a, r): return None", "to eval.jsonl:3: it is None, no finite number; return a number"),
        ("def f(p, a, r): return float('nan')", "to eval.jsonl:3: it is nan, no finite number"),
        ("def g(): pass", r"mine.py has no function f"),
        ("1 / 0", "its code raised ZeroDivisionError"),
    ],
)
def test_a_function_that_fails_is_named_with_the_row(code: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(UserError) as raised:
        value(f"{tmp_path / 'mine.py'}:f", "b", "a")
    assert said in str(raised.value)
    assert "generate.metrics" in str(raised.value)


def test_a_pattern_that_takes_for_ever_is_named_with_the_row() -> None:
    with pytest.raises(UserError, match=r"regex of the answer .* to eval.jsonl:3: it took longer than 2 s"):
        value(RegexMetric("(a+)+$"), "a" * 60 + "b")


def test_a_reference_that_is_no_json_is_named_before_anything_is_generated() -> None:
    with pytest.raises(UserError, match=r"json_match of eval.jsonl:3: its reference 'Paris' is no JSON"):
        Measures(["json_match"]).check(("1", "Paris"), "eval.jsonl:3")
    Measures(["json_valid", "exact_match"]).check(("Paris",), "eval.jsonl:3")


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (["exact"], "'exact': there is no such metric, and it names no function.*known: exact_match"),
        (["exact_match", "exact_match"], "two are named exact_match"),
        ([{"regex": "a"}, {"regex": "b"}], "two are named regex.*name: "),
        ([{"regex": "a(", "name": "x"}], r"'a\(': it is no regular expression"),
        ([{"regex": "a", "name": "loss"}], "'loss': it is to be a name .* and none of loss"),
        ([{"regex": "a", "name": "a b"}], "'a b': it is to be a name"),
        (["mine.py:loss"], "'loss': it is to be a name"),
        ([{"regexp": "a"}], "regexp"),
    ],
)
def test_a_metric_that_is_none_is_refused(metrics: list[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        read_run(write_run_file(tmp_path / "run.yaml", generate={"metrics": metrics}))
    two = [{"regex": "a"}, {"regex": "b", "name": "has_b"}, "mine.py:close", "exact_match"]
    read_run(write_run_file(tmp_path / "run.yaml", generate={"metrics": two}))


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"patience": 2, "metric": "exact_match"}, "give generate.metrics: .exact_match."),
        ({"metric": "json_valid"}, "metric=json_valid: it has no effect by itself; give early_stopping.patience, or"),
    ],
)
def test_a_metric_that_nobody_computes_is_not_watched(train: dict[str, Any], said: str, tmp_path: Path) -> None:
    data = {"eval": str(tmp_path / "train.jsonl")}
    options = {"eval_every": 1, "early_stopping": train}
    with pytest.raises(UserError, match=said):
        read_run(write_run_file(tmp_path / "run.yaml", data=data, train=options))
    file = write_run_file(
        tmp_path / "run.yaml",
        data=data,
        train={"eval_every": 1, "early_stopping": {"patience": 1, "metric": "json_vaild"}},
        generate={"metrics": ["json_valid"]},
    )
    with pytest.raises(UserError, match=r"neither loss nor one of .*did you mean 'json_valid'"):
        read_run(file)
