"""What is trained under published chat templates, against spans that were written down by hand for each conversation.

The templates and expectations are not part of this repository: this file is collected where they are
(`tests/unit/conftest.py`), in `../shared/templates/given`, or in the folder that MESHLORA_TEMPLATES names.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from meshlora.reading import clock, named_templates
from meshlora.reading.chat import tokenize_conversations
from meshlora.reading.formats import RECORDS, Formats
from meshlora.reading.lost import Lost, as_array
from meshlora.reading.records import MalformedError, Record
from meshlora_ground.errors import UserError
from tests.unit.conftest import TEMPLATES

BASE = Path(__file__).parents[2] / "examples" / "tiny_base"
DAY = "2026-01-15"  # on which the expected texts were rendered
NAMES = [one["name"] for one in json.loads((TEMPLATES / "index.json").read_text("utf-8"))]
REFUSED = {"refuse_unless_asked", "train_or_refuse", "template_refuses"}
NOTED = {"train_and_note", "refuse_unless_asked"}


@functools.cache
def _rows() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for line in (TEMPLATES / "expectations.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        found[row["template"]].append(row)
    return found


def _tokenizer(name: str, folder: Path) -> Any:
    (one,) = [each for each in json.loads((TEMPLATES / "index.json").read_text("utf-8")) if each["name"] == name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(BASE / "tokenizer.json"))
    tokenizer.add_tokens(one["special_tokens"], special_tokens=True)
    tokenizer.add_special_tokens({"eos_token": one["eos"], **({"bos_token": one["bos"]} if one["bos"] else {})})
    tokenizer.chat_template, tokenizer.name_or_path = (TEMPLATES / f"{name}.jinja").read_text("utf-8"), str(folder)
    stops = tokenizer.convert_tokens_to_ids(one["stops"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    clock.set_day(tokenizer, DAY)
    return tokenizer


def _record(row: dict[str, Any], origin: str) -> Record | None:
    fields = ("prompt", "completion", "tools") if "prompt" in row else ("messages", "tools")
    given = {name: row[name] for name in fields if row.get(name)}
    try:
        return Formats(RECORDS, "auto", None).choice(tuple(given)).make(given, origin)
    except (MalformedError, UserError):
        return None


def _fault(row: dict[str, Any], record: Record | None, found: Any, tokenizer: Any) -> str:
    """What is wrong with the tokens of a row, and with what is said of it; empty if nothing is."""
    reaction, notes = row["reaction"], list[str]()
    if record is not None and found is not None:
        try:
            notes = Lost(as_array([(0, found.lost)]), lambda _: record, 1).words("refuse")
        except UserError:
            found = None
    if found is None:
        return "" if reaction in REFUSED else "refused"
    if reaction == "template_refuses":
        return "accepted what the template refuses"
    if tokenizer.decode(found.ids) != row["text"]:
        return "another text"
    offsets = tokenizer(row["text"], add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for (start, end), is_trained in zip(offsets, found.is_trained, strict=True):
        must, may = (any(start < b and end > a for a, b in row[name]) for name in ("must", "may"))
        if is_trained != must and not (may and is_trained):
            return f"{'trained' if is_trained else 'not trained'}: {row['text'][start:end]!r} at {start}"
    return "lost without a word" if reaction in NOTED and not notes else ""


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained_is_what_was_written_down(name: str, tmp_path: Path) -> None:
    tokenizer, faults = _tokenizer(name, tmp_path), []
    for train_on in ("all", "last"):
        rows = [row for row in _rows()[name] if row["train_on"] == train_on]
        records = [_record(row, row["case"]) for row in rows]
        given = [record for record in records if record is not None]
        options = {"max_length": 2**20, "train_on": train_on, "processor": None, "skips": True}
        made = iter(tokenize_conversations(given, tokenizer, **options))  # type: ignore[arg-type]
        for row, record in zip(rows, records, strict=True):
            if fault := _fault(row, record, None if record is None else next(made), tokenizer):
                faults.append(f"{row['case']} {train_on} ({row['reaction']}): {fault}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("chatml", "chatml"), ("qwen", "qwen2.5"), ("gemma", "gemma2"), ("mistral", "mistral-v3"), ("phi3", "phi3")],
)
def test_templates_that_go_by_a_name_write_what_published_ones_do(ours: str, theirs: str) -> None:
    """Without a turn of the system, which Gemma 2 refuses, and Mistral's writes only where a user speaks last."""
    said = ("hi", " a\n b ", "and?", "bye")
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, said, strict=True)]
    own = Path(named_templates.__file__).parent / "templates" / f"{ours}.jinja"
    texts = []
    for file in (own, TEMPLATES / f"{theirs}.jinja"):
        found, _ = render_jinja_template(
            [messages], chat_template=file.read_text("utf-8"), bos_token="<bos>", eos_token="<eos>"
        )
        texts.append(found[0])
    assert texts[0] == texts[1]
