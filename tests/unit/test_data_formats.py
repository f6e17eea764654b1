"""Every file of tests/data, as people have theirs, is read at once, and the trained tokens are those of its answers.

What is expected is written down here a second time, as the conversation that the file holds and the answers in it; its
tokens are what transformers makes of it, the trained ones those of the answers where they stand in its text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from meshlora.reading.places import files_of
from meshlora.reading.preferences import read_feedback
from meshlora.reading.readers import READERS
from meshlora.reading.sources import read_records
from meshlora.reading.tokenization import tokenize
from meshlora_ground.errors import UserError
from tests.unit.records import END, WITH_TOOLS, make_tokenizer

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data"
PAGE, START, STOP = (
    ROOT / "docs/data.md",
    "<!-- formats, written by tests/unit/test_data_formats.py -->\n",
    "<!-- end -->",
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@dataclass(frozen=True)
class Says:
    """A sequence. messages and tools: as `apply_chat_template` takes them. answers: its trained texts, in order."""

    messages: Sequence[dict[str, Any]]
    answers: Sequence[str]
    tools: Any = None

    def tokens(self, tokenizer: Any) -> tuple[list[int], list[bool]]:
        text = tokenizer.apply_chat_template(self.messages, tools=self.tools, tokenize=False)
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask, at = [False] * len(found.input_ids), 0
        for answer in self.answers:
            at = text.index(f"<|start|>assistant\n{answer}{END}", at) + len("<|start|>assistant\n")
            end = at + len(answer + END)
            mask = [old or (a < end and b > at) for old, (a, b) in zip(mask, found.offset_mapping, strict=True)]
            at = end
        return found.input_ids, mask


@dataclass(frozen=True)
class Plain:
    """A sequence of texts that are tokenised each for itself. answer: trained, with the end token after it."""

    prompt: str
    answer: str

    def tokens(self, tokenizer: Any) -> tuple[list[int], list[bool]]:
        parts = [tokenizer(text, add_special_tokens=False).input_ids for text in (self.prompt, self.answer)]
        return parts[0] + parts[1] + [tokenizer.eos_token_id], [False] * len(parts[0]) + [True] * (len(parts[1]) + 1)


@dataclass(frozen=True)
class Ids:
    """A sequence of tokens."""

    ids: list[int]
    mask: list[int]

    def tokens(self, _: Any) -> tuple[list[int], list[bool]]:
        return self.ids, [*map(bool, self.mask)]


@dataclass(frozen=True)
class Case:
    """A file. what: in words. expected: its sequences. options: of `data`. reader: of the objective."""

    file: str
    what: str
    expected: Sequence[Any]
    reader: str = "text"
    options: dict[str, Any] = field(default_factory=dict)
    split: str | None = None


SYSTEM = {"role": "system", "content": "Answer in one word."}
TWO = [user("What is two and three?"), assistant("Five."), user("And four more?"), assistant("Nine.")]
WHOLE, LAST = Says([SYSTEM, *TWO], ["Five.", "Nine."]), Says([SYSTEM, *TWO], ["Nine."])
FIRST = Says(TWO[:2], ["Five."])
COLOUR = Says([user("Name a colour."), assistant("Red.")], ["Red."])
SUM = Says([user("Add the numbers.\n2, 3"), assistant("5")], ["5"])
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "now", "description": "The time in a city", "parameters": CITY}}]
NOW = {"name": "now", "arguments": {"city": "Rome"}}
CALLS = Says(
    [
        user("What is the time in Rome?"),
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": NOW}]},
        {"role": "tool", "content": '{"time": "12:00"}'},
        assistant("It is noon."),
    ],
    ['<call>now{"city": "Rome"}', "It is noon."],
    TOOLS,
)
# Arrow gives both tools the same keys, and None to the one that lacks them.
SUMS = {
    "name": "add",
    "description": "A sum",
    "parameters": {"type": "object", "properties": {"numbers": {"type": "array"}}},
}
TWO_TOOLS = Says(CALLS.messages, CALLS.answers, [*TOOLS, {"type": "function", "function": SUMS}])
NINE, TEN = (Says([*TWO[:3], assistant(answer)], [answer]) for answer in ("Nine.", "Ten."))
DOG = Says([COLOUR.messages[0], assistant("Dog.")], ["Dog."])
AFTER_SYSTEM = Says([SYSTEM, *TWO[:2]], ["Five."])
SIX = Says([TWO[0], assistant("Six.")], ["Six."])
RED, ONCE = Plain("Name a colour:", " Red."), Plain("", "Once.")
MILL = [Plain("name : The Mill | food : English", " The Mill is English ."), Plain("name : The Mill", " The Mill .")]
HH = "\n\nHuman: Name a colour.\n\nAssistant: It is"
# Each answer, then the one to the other prompt beside it.
CROSSED = [(TWO[0], ["Five.", "Six."]), (TWO[2], ["Six.", "Five."])]
RANKED = [(TWO[0], ["Five.", "Dog.", "Six.", "Dog."]), (COLOUR.messages[0], ["Red.", "Six.", "Dog.", "Six."])]
ASKED = {"columns": {"prompt": "question", "completion": "answer"}}
PAIRS = {"reader": "pairs"}
CASES = [
    Case("alpaca.json", "Alpaca, a JSON list", [COLOUR, SUM]),
    Case("alpaca_history.jsonl", "Alpaca with system and history", [WHOLE]),
    Case("alpaca_with_text.json", "Alpaca with the text of its prompt", [COLOUR]),
    Case("alpaca.json.zst", "compressed by zstd", [COLOUR, SUM]),
    Case("sharegpt.json", "ShareGPT", [WHOLE]),
    Case("sharegpt_tools.json", "ShareGPT with tools", [CALLS]),
    Case("sharegpt_weights.jsonl", "ShareGPT with weights", [LAST]),
    Case("axolotl_train.jsonl", "a `train` flag for each turn", [LAST]),
    Case("openai.jsonl", "OpenAI chat", [WHOLE, FIRST]),
    Case("openai.jsonl.gz", "compressed by gzip", [WHOLE, FIRST]),
    Case("openai_tools.jsonl", "OpenAI chat with tools", [CALLS]),
    Case("openai_weights.jsonl", "OpenAI chat with weights", [LAST]),
    Case("openai_parts.jsonl", "OpenAI chat, content in parts", [WHOLE]),
    Case("tools.parquet", "tools in Parquet", [TWO_TOOLS]),
    Case("ultrachat.parquet", "messages in Parquet", [Says(TWO, ["Five.", "Nine."])]),
    Case("dolly.jsonl", "Dolly", [COLOUR, SUM]),
    Case("gsm8k.jsonl", "GSM8K", [FIRST]),
    Case("openorca.jsonl", "OpenOrca", [AFTER_SYSTEM, FIRST]),
    Case("metamath.jsonl", "MetaMathQA", [FIRST]),
    Case("aya.jsonl", "Aya", [FIRST]),
    Case("helpsteer.jsonl", "HelpSteer, HelpSteer2", [FIRST]),
    Case("xlam.jsonl", "xLAM, calls and tools as JSON", [Says(CALLS.messages[:2], CALLS.answers[:1], TOOLS)]),
    Case("magpie.jsonl", "Magpie", [FIRST]),
    Case("openthoughts.jsonl", "OpenThoughts", [AFTER_SYSTEM]),
    Case("guanaco.jsonl", "OpenAssistant Guanaco", [Plain("", "### Human: Name a colour.### Assistant: Red.")]),
    Case("prompt_completion.jsonl", "TRL prompt and completion", [RED, ONCE]),
    Case("trl_conversational.jsonl", "TRL prompt and completion, messages", [LAST]),
    Case("text.jsonl", "documents", [Plain("", "The house is near the river.")]),
    Case("questions.csv", "CSV, `columns`", [RED, Plain("Name two,\nor three:", " Blue, green.")], options=ASKED),
    Case("e2e.txt", "the LoRA paper's", MILL),
    Case("saved", "a saved `Dataset`", [WHOLE]),
    Case("splits", "a saved `DatasetDict`, `split: train`", [COLOUR], split="train"),
    Case("parts", "a folder of files", [WHOLE, FIRST]),
    Case("parts/*.jsonl", "a pattern", [WHOLE, FIRST]),
    Case("hub", "a cloned dataset, `split: test`", [SUM], split="test"),
    Case("tokens.jsonl", "tokens with labels", [Ids([10, 11, 12, 13], [0, 0, 1, 1])]),
    Case(
        "tokens_trl.parquet", "tokens with a mask", [Ids([10, 11, 12, 13], [0, 0, 1, 1]), Ids([20, 21, 22], [0, 1, 1])]
    ),
    Case("preference.jsonl", "pairs, text", [RED, Plain("Name a colour:", " Dog.")], **PAIRS),
    Case("preference_messages.jsonl", "pairs, messages", [FIRST, SIX], **PAIRS),
    Case("preference_conversations.jsonl", "pairs of conversations", [NINE, TEN], **PAIRS),
    Case("preference_hh.jsonl", "pairs of whole texts", [Plain(HH, " red."), Plain(HH, " dog.")], **PAIRS),
    Case("preference_sharegpt.json", "pairs, LLaMA-Factory's ShareGPT", [FIRST, SIX], **PAIRS),
    Case(
        "preference_alpaca.json",
        "pairs, LLaMA-Factory's Alpaca",
        [SUM, Says([*SUM.messages[:1], assistant("6")], ["6"])],
        **PAIRS,
    ),
    Case(
        "preference_orca.jsonl",
        "pairs with system and question",
        [Says([SYSTEM, *each.messages], each.answers) for each in (FIRST, SIX)],
        **PAIRS,
    ),
    Case("preference_ultrafeedback.parquet", "pairs, UltraFeedback's", [FIRST, SIX], **PAIRS),
    Case("helpsteer3.jsonl", "HelpSteer3, without its tie", [FIRST, SIX, COLOUR, DOG], **PAIRS),
    Case("helpsteer2_preference.jsonl", "HelpSteer2's preferences", [FIRST, SIX, COLOUR, DOG], **PAIRS),
    Case(
        "helpsteer3.jsonl",
        "the same, each answer by itself",
        [Says([ask, assistant(text)], [text]) for ask, texts in RANKED for text in texts],
        "feedback",
    ),
    Case("feedback.jsonl", "KTO", [RED, RED, Plain("Name a pet:", " Red."), Plain("Name a pet:", " Red.")], "feedback"),
    Case(
        "feedback_sharegpt.json",
        "KTO, LLaMA-Factory's",
        [Says([ask, assistant(text)], [text]) for ask, texts in CROSSED for text in texts],
        "feedback",
    ),
]


def tokenizer() -> Any:
    return make_tokenizer(chat_template=WITH_TOOLS, eos=END)


@functools.cache
def _read(number: int) -> tuple[Any, list[str]]:
    """(the tokens of a case, what is said)."""
    case, said = CASES[number], list[str]()
    source = [str(path) for path in files_of(DATA / case.file, case.split)]
    options = {"columns": None, "max_length": 1000, "vocab_size": 320, "say": said.append} | case.options
    return READERS[case.reader](source, tokenizer(), **options), said


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.file for case in CASES])
def test_file_is_read_at_once_and_trains_its_answers_alone(number: int) -> None:
    found, said = _read(number)
    expected = [each.tokens(tokenizer()) for each in CASES[number].expected]
    assert [sequence.input_ids.tolist() for sequence in found] == [ids for ids, _ in expected]
    assert [sequence.is_trained.tolist() for sequence in found] == [mask for _, mask in expected]
    assert any(mask for _, masks in expected for mask in masks)
    assert sum("read as" in line for line in said) == 1, said


@pytest.mark.parametrize("number", [n for n, case in enumerate(CASES) if isinstance(case.expected[0], Says)])
def test_answers_that_are_expected_are_those_of_transformers(number: int) -> None:
    """So that what is written down above is no second opinion of ours: where no turn is left out."""
    for each in CASES[number].expected:
        if len(each.answers) < sum(message["role"] == "assistant" for message in each.messages):
            continue
        theirs = tokenizer().apply_chat_template(each.messages, tools=each.tools, return_assistant_tokens_mask=True)
        assert each.tokens(tokenizer()) == (theirs["input_ids"], [*map(bool, theirs["assistant_masks"])])


def _table() -> str:
    rows = ["| file | what it is | what a run says of it | sequences | trained tokens |", "|---|---|---|---|---|"]
    for number, case in enumerate(CASES):
        found, said = _read(number)
        (line,) = (line for line in said if "read as" in line)
        words = line.split(": read as ", 1)[1].removesuffix("; to read it otherwise: data.format, data.columns")
        trained = f"{int(found.is_trained.sum())} of {len(found.input_ids)}"
        rows.append(f"| `{case.file}` | {case.what} | {words} | {len(found)} | {trained} |")
    return "\n".join(rows) + "\n"


def test_table_of_the_docs_is_what_is_read() -> None:
    text, table = PAGE.read_text("utf-8"), _table()
    written = text.split(START)[1].split(STOP)[0]
    assert written.strip() == table.strip(), f"the table of {PAGE} should be\n\n{table}"


def test_every_file_is_in_the_table() -> None:
    there = {path.relative_to(DATA).parts[0] for path in DATA.rglob("*") if path.is_file()}
    assert there - {"nlg", "templates"} == {case.file.split("/")[0] for case in CASES}  # those are of other tests
    assert len(CASES) >= 20


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "q", "completion": "a", "system": "", "tools": "[]"}, "q"),
        ({"instruction": "q", "output": "a", "history": ""}, None),
    ],
)
def test_empty_cells_of_a_table_are_no_fields(row: dict[str, Any], prompt: str | None, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (record,) = read_records(str(tmp_path / "rows.jsonl"))
    assert record.prompt == prompt


@pytest.mark.parametrize("number", [n for n, case in enumerate(CASES) if case.file == "helpsteer3.jsonl"])
def test_ties_are_left_out_and_said(number: int) -> None:
    why = "helpsteer3.jsonl:2 first: overall_preference is 0, so neither answer is preferred"
    assert sum(line.startswith("1 row left out, ") and line.endswith(why) for line in _read(number)[1]) == 1


def test_answer_to_another_prompt_does_not_bring_its_own_along(tmp_path: Path) -> None:
    """Where completions are whole conversations."""
    rows = [
        {
            "prompt": f"q{n}",
            "completion": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}],
            "label": True,
        }
        for n in range(2)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = WITH_TOOLS
    found = read_feedback(str(tmp_path / "rows.jsonl"), tokenizer, max_length=64)
    texts = [tokenizer.decode(sequence.input_ids) for sequence in found]
    assert "q0" in texts[1]
    assert "a1" in texts[1]
    assert "q1" not in texts[1]


def test_token_below_zero_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, -1099511627776, 3]}\n')
    records = read_records(str(tmp_path / "rows.jsonl"))
    with pytest.raises(UserError, match=r"rows\.jsonl:1"):
        tokenize(records, make_tokenizer(), max_length=8)
