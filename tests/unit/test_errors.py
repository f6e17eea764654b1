"""Messages of errors: escaped, bounded, on lines of their own, and with all that they have to say still in them."""

from __future__ import annotations

import pickle
import time

import pytest

from meshlora.cli.main import main
from meshlora.verify.pool import RankError
from meshlora_ground.errors import (
    MeshloraError,
    RankFailedError,
    SaveError,
    UnsupportedError,
    UserError,
    did_you_mean,
    numbered,
    reason,
)

TITLE, SHOWN = "\x1b]0;title\x07\u202e\udc80", "\\x1b]0;title\\x07\\u202e\\udc80"


def test_control_characters_of_a_value_are_escaped_in_every_part() -> None:
    error = UserError(f"a{TITLE}", f"b{TITLE}", f"c{TITLE}")
    assert str(error) == f"a{SHOWN}: b{SHOWN}; c{SHOWN}"
    assert (error.given, error.rule, error.way_out) == (f"a{SHOWN}", f"b{SHOWN}", f"c{SHOWN}")
    assert str(MeshloraError(TITLE)) == str(SaveError(TITLE)) == SHOWN


def test_what_is_fit_to_print_is_left_alone() -> None:
    words = ("C:\\new, \\d+ and 'größer 更大'\t[bold]", "must divide num_key_value_heads=8", "use tp in {1, 2}")
    assert str(UserError(*words)) == "{}: {}; {}".format(*words)


@pytest.mark.parametrize("value", ["x\nerror: the disk is full", "x\r\nerror: y", "x\x0berror: y", "x\u2028error: y"])
def test_value_with_a_newline_cannot_fake_a_second_error(value: str) -> None:
    for error in (UserError(value, "unknown key"), MeshloraError(value), SaveError(f"{value}: not saved")):
        assert len(str(error).splitlines()) == 1


def test_lines_of_our_own_stay() -> None:
    error = UserError(
        "2 malformed records", "each must be {text}", "correct them:\n  a:1: empty\n  b:2: empty\nerror: x"
    )
    assert str(error).splitlines()[1:] == ["  a:1: empty", "  b:2: empty\\nerror: x"]


@pytest.mark.parametrize("long", range(3))
def test_long_value_is_cut_and_given_rule_and_way_out_stay(long: int) -> None:
    parts = ["train.lrr", "unknown key", "did you mean 'lr'?"]
    begin, end = parts[long][:5], parts[long][-5:]
    parts[long] = begin + "x" * 10**6 + end
    said = str(UserError(*parts))
    assert len(said) < 1_980
    assert len(said) > 1_900, "there was room for more"
    for words in (begin, " … ", end, *(part for part in parts if len(part) < 100)):
        assert words in said


def test_all_parts_long_have_equal_room() -> None:
    error = UserError("a" * 10**5, "b" * 10**5, "c" * 10**5)
    assert {len(error.given), len(error.rule), len(error.way_out)} == {652}
    assert len(str(error)) < 1_980


def test_numbers_beyond_the_most_that_are_shown_are_counted() -> None:
    assert numbered("rank", [3]) == "rank 3"
    assert numbered("rank", range(16)).endswith("14, 15")
    assert numbered("rank", range(18)) == f"ranks {', '.join(map(str, range(16)))} and 2 more"


def test_long_message_keeps_its_end() -> None:
    said = str(MeshloraError("step 3: " + "x" * 10**6 + " lower train.lr"))
    assert len(said) < 1_980
    assert said.startswith("step 3: ")
    assert said.endswith(" lower train.lr")


def test_message_with_the_name_of_an_adapter_before_it_is_the_same_message() -> None:
    """As `train.together` and `run_file` do; and it travels between processes."""
    first = UnsupportedError(f"k{TITLE}" + "x" * 10**6, "unknown key", "leave it out")
    again = type(first)(f"adapter wide: {first.given}", first.rule, first.way_out)
    assert len(str(again)) < 1_980
    assert str(again).startswith(f"adapter wide: k{SHOWN}")
    assert str(again).endswith(": unknown key; leave it out")
    copy = pickle.loads(pickle.dumps(again))
    assert type(copy) is UnsupportedError
    assert str(copy) == str(again)


@pytest.mark.parametrize("kind", [RankFailedError, RankError])
def test_traceback_of_a_rank_keeps_its_lines_its_beginning_and_its_end(kind: type[MeshloraError]) -> None:
    text = "rank 1: Traceback\n  File\n" + "  frame\n" * 10**5 + f"ValueError: {TITLE}"
    said = str(kind(text))
    assert len(said) == 20_000
    assert said.splitlines()[:2] == ["rank 1: Traceback", "  File"]
    assert said.splitlines()[-1] == f"ValueError: {SHOWN}"
    assert str(pickle.loads(pickle.dumps(kind(text)))) == said


def test_nearest_of_names_a_megabyte_long_is_not_looked_for() -> None:
    started = time.perf_counter()
    assert did_you_mean("a" * 10**6, ["lr", "ab" * 10**6]).startswith("known: ")
    assert len(did_you_mean("b" * 10**6, [f"{n}" * 10**6 for n in range(5)])) < 420
    assert time.perf_counter() - started < 2
    assert did_you_mean("lrr", ["lr", "a" * 10**6]) == "did you mean 'lr'?"


def test_names_of_others_are_escaped_and_bounded_where_they_are_listed() -> None:
    assert did_you_mean("x", [f"zzzzzz{TITLE}"]) == f"known: zzzzzz{SHOWN}"
    assert did_you_mean(f"zzzzzz{TITLE}", [f"zzzzzzz{TITLE}"]) == f"did you mean 'zzzzzzz{SHOWN}'?"
    many = did_you_mean("zz", [f"name_{n}," for n in range(10_000)])
    assert len(many) < 420
    assert many.endswith(", …"), "cut between names"
    assert did_you_mean("x", []) == "known: "


def test_reason_of_a_library_is_one_line_escaped_and_bounded() -> None:
    assert reason(ValueError(f"a\n  b{TITLE}")) == f"a b{SHOWN}"
    assert reason(KeyError("rope")) == "KeyError: 'rope'"
    assert len(reason(ValueError("word " * 10**6))) <= 400
    assert len(reason(ValueError("x" * 10**6))) == 400


@pytest.mark.parametrize("word", [f"--{TITLE}", "--x\nerror: y", "--" + "x" * 10**6])
def test_argument_that_argparse_repeats_is_escaped_and_bounded(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "run.yaml", word])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: unrecognized arguments: --")
    assert said.endswith("; see meshlora check --help\n")
    assert len(said.splitlines()) == 1
    assert len(said) <= 2_000
    assert "\x1b" not in said
