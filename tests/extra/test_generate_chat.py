"""`meshlora generate` asks an adapter as its training did: the answers of transformers + peft through the template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from meshlora.cli.main import main
from meshlora.run.asking import asking_of
from meshlora.run.checkpoint.manifest import read_whole
from tests.extra.talking import QUESTIONS, TEMPLATE, answered, asked, trained
from tests.manifests import manifest_of, sign
from tests.run_files import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on conversations, with a template and a stop token of its own."""
    folder = tmp_path_factory.mktemp("talk")
    (folder / "own.jinja").write_text(TEMPLATE)
    trained(folder, chat_template=str(folder / "own.jinja"), stop_tokens=[" return"])
    return folder / "run"


def generate(*words: str, adapter: Path | None = None, most: int = 24) -> int:
    given = ["generate", "--model", str(TINY), "--dtype", "float32", "--max-new-tokens", str(most), *words]
    if adapter is not None:
        given += ["--adapter", str(adapter)]
    return main(given)


def _stops() -> tuple[int, ...]:
    from transformers import AutoTokenizer

    (found,) = AutoTokenizer.from_pretrained(TINY)(" return", add_special_tokens=False).input_ids
    return (found,)


def test_adapter_of_conversations_is_asked_through_its_template(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = run / "adapter"
    words = [word for question in QUESTIONS for word in ("--prompt", question)]
    assert generate(*words, adapter=adapter) == 0
    said, beside = capsys.readouterr()
    expected = answered(adapter, [*map(asked, QUESTIONS)], template=TEMPLATE, ends=_stops())
    assert said == "".join(f"{text}\n" for text in expected)
    assert beside == f"sent as a conversation: chat template of {adapter}\n"
    assert expected != answered(adapter, [*map(asked, QUESTIONS)], template=TEMPLATE), "no answer ends at a stop token"

    assert generate(*words, "--plain", adapter=adapter) == 0
    plain, beside = capsys.readouterr()
    assert plain == "".join(f"{text}\n" for text in answered(adapter, QUESTIONS, ends=_stops()))
    assert beside == "sent as plain text\n"
    assert plain != said


def test_adapter_of_a_style_is_asked_in_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, rows=[{"instruction": "Say it", "output": "it"}] * 4, prompt="alpaca", max_length=200)
    adapter = tmp_path / "run" / "adapter"
    capsys.readouterr()  # of the training
    assert generate("--prompt", "Say it", adapter=adapter) == 0
    said, beside = capsys.readouterr()
    preamble = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    )
    styled = f"{preamble}\n\n### Instruction:\nSay it\n\n### Response:\n"
    assert said == f"{answered(adapter, [styled])[0]}\n"
    assert beside == "sent as plain text in the style alpaca, as the adapter was trained; --plain sends it as it is\n"
    assert generate("--prompt", "Say it", "--plain", adapter=adapter) == 0
    assert capsys.readouterr().out == f"{answered(adapter, ['Say it'])[0]}\n" != said


def test_system_and_another_template_lead_to_their_answers(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own,) = answered(run / "adapter", [asked(QUESTIONS[0], system="Be brief.")], ends=_stops())
    (other,) = answered(run / "adapter", [asked(QUESTIONS[0])], ends=_stops())
    assert own != other
    template = str(TINY / "chat_template.jinja")
    words = ["--prompt", QUESTIONS[0], "--system", "Be brief.", "--chat-template", template]
    assert generate(*words, adapter=run / "adapter") == 0
    said, beside = capsys.readouterr()
    assert said == f"{own}\n"
    assert beside == f"sent as a conversation: chat template of {template}, system: Be brief.\n"

    adapter = tmp_path / "adapter"  # as of a run with such a turn
    shutil.copytree(run / "adapter", adapter)
    sign(adapter, asking={**_asking_of(adapter), "system": "Be brief."})
    assert generate("--prompt", QUESTIONS[0], "--chat-template", template, adapter=adapter) == 0
    assert capsys.readouterr() == (said, beside)
    assert generate("--prompt", QUESTIONS[0], "--chat-template", template, "--system", "", adapter=adapter) == 0
    assert capsys.readouterr().out == f"{other}\n"


def _asking_of(adapter: Path) -> dict[str, str]:
    return dict(manifest_of(adapter)["asking"])


def test_what_asked_is_recorded_and_other_adapters_are_asked_in_plain_text(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_whole(run / "adapter", kinds=("adapter",)).asking == {
        "form": "conversations",
        "stop_tokens": '[" return"]',
    }
    assert asking_of(run / "adapter").stop_tokens == (" return",)
    trained(tmp_path, rows=[{"prompt": "Say it", "completion": "it"}] * 4, separator="=>")
    adapter = tmp_path / "run" / "adapter"
    assert read_whole(adapter, kinds=("adapter",)).asking == {"form": "texts", "separator": "=>"}
    capsys.readouterr()  # of the training
    assert generate("--prompt", "Say it", adapter=adapter) == 0
    said, beside = capsys.readouterr()
    assert said == f"{answered(adapter, ['Say it=>'])[0]}\n"
    assert beside == "sent as plain text, as the adapter was trained; --chat sends it as a conversation\n"
    assert generate("--prompt", "Say it") == 0  # the base alone, of which nobody has said it
    assert (
        capsys.readouterr().err == "sent as plain text; --chat sends it as a conversation, through the chat template\n"
    )


def test_file_of_prompts_is_answered_line_by_line(tmp_path: Path, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    talk = [*asked(QUESTIONS[0]), {"role": "assistant", "content": "def f"}, *asked(QUESTIONS[1])]
    rows = [QUESTIONS[0], {"prompt": QUESTIONS[1], "id": 7}, {"messages": talk}, {"messages": [*talk, talk[1]]}]
    file, out = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "\n")
    asked_of = [asked(QUESTIONS[0]), asked(QUESTIONS[1]), talk, talk]  # the answer that is there is left out
    expected = answered(run / "adapter", asked_of, template=TEMPLATE, ends=_stops())
    assert generate("--prompts", str(file), adapter=run / "adapter") == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == expected
    assert lines[0] == {"prompt": QUESTIONS[0], "text": expected[0]}
    assert lines[1]["id"] == 7
    assert lines[2]["messages"] == talk
    assert generate("--prompts", str(file), "--out", str(out), "--nproc", "2", "--topology", "tp=2") == 0
    of_base = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert of_base[:2] == answered(None, QUESTIONS)  # of which nobody has said that it answers in conversations
    assert of_base[2:] == answered(None, asked_of[2:])
    mixed = "2 of 4 sent as conversations: chat template of "
    assert capfd.readouterr().err == f"{mixed}{TINY}; the others as plain text\n"


def test_empty_answer_is_said_and_is_no_empty_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = answered(run / "adapter", [asked(QUESTIONS[0])], template=TEMPLATE, ends=_stops())
    words = ["--prompt", QUESTIONS[0], "--stop", text[:1]]
    assert generate(*words, adapter=run / "adapter") == 0
    said, beside = capsys.readouterr()
    assert said == ""
    assert beside.splitlines()[1] == f"--prompt {QUESTIONS[0]!r}: the answer is empty: the model ended at once"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prompt", "a", "--plain", "--system", "b"), "--plain with --system"),
        (("--prompt", "a", "--plain", "--chat"), "--plain with --chat"),
        (("--prompt", "a", "--out", "x.jsonl"), "no effect without --prompts"),
        (("--prompt", "a", "--chat", "--separator", "=>"), "the chat template separates"),
        (("--prompt", "a", "--chat-template", "nope.jinja"), "--chat-template nope.jinja: there is no such file"),
        (("--prompts", "nowhere"), "--prompts nowhere: it cannot be read"),
        (("--prompts", "{bad}"), 'bad.jsonl:2: it is a number, neither a text nor an object; give "TEXT"'),
        (("--prompts", "{empty}"), "it has no prompt"),
    ],
)
def test_mistake_is_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text('"a"\n5\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    files = {"bad": str(tmp_path / "bad.jsonl"), "empty": str(tmp_path / "empty.jsonl")}
    assert generate(*(word.format(**files) for word in words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


def test_base_without_a_template_names_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(TINY, tmp_path / "base", ignore=shutil.ignore_patterns("chat_template.jinja"))
    assert main(["generate", "--model", str(tmp_path / "base"), "--prompt", "a", "--chat"]) == 2
    err = capsys.readouterr().err
    assert "needs a chat template" in err
    assert "--chat-template NAME or FILE" in err
