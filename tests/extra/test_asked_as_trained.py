"""What is asked of a model is what it was trained on: of a chat every command makes the tokens of the training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from meshlora.loading.blueprint import read_model_config
from meshlora.reading import clock
from meshlora.reading.records import Record
from meshlora.run.asking import asking_of
from meshlora.run.config.file import read_run
from meshlora.run.config.run_file import GenerateConfig, RunConfig
from meshlora.run.decoding import ends_of, read_prompts
from meshlora.run.evaluate import prepare_evaluation, prepare_prompts
from meshlora.run.texts import Texts
from meshlora.run.together import prepare_run
from meshlora_extra.rl.prompts import read_prompts as read_prompts_of_rl
from tests.unit.mistakes import Setup

# The prompt begins a thought, of which the stored answer has the end; the date is written.
TEMPLATE = (
    "{{ strftime_now('%d') }}{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and loop.last %}<t></t>"
    "{% endif %}{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}[assistant]<t>{% endif %}"
)
ASKED = [
    {"role": "user", "content": "def g"},
    {"role": "assistant", "content": "return g"},
    {"role": "user", "content": "def h"},
]
ANSWER = {"role": "assistant", "content": "return h"}


@pytest.fixture
def chats(setup: Setup) -> Setup:
    """A run on chats, with a template of its own."""
    file = setup.folder / "own.jinja"
    file.write_text(TEMPLATE)
    setup.data({"messages": [*ASKED, ANSWER]}, {"messages": [ASKED[0], ASKED[1]]})
    setup.set("data.eval", str(setup.folder / "train.jsonl"))
    options = {"data.chat_template": str(file), "data.date": "2026-01-15", "data.train_on": "last", "topology": ""}
    for name, value in options.items():
        setup.set(name, value)
    setup.write()
    return setup


def _config(chats: Setup, **options: Any) -> RunConfig:
    for name, value in options.items():
        chats.set(name.replace("__", "."), value)
    chats.write()
    return read_run(chats.folder / "run.yaml")


def _trained_after(chats: Setup) -> list[list[int]]:
    """Of each record the tokens before the first trained one."""
    data = prepare_run(_config(chats)).train_data
    return [each.input_ids[: int(each.is_trained.argmax())].tolist() for each in data]


def test_every_command_asks_with_the_tokens_of_the_training(chats: Setup) -> None:
    expected = _trained_after(chats)
    assert len(expected[0]) > len(expected[1]) > 0
    evaluated = prepare_prompts(prepare_evaluation(_config(chats), adapter=None))
    assert evaluated.encoded == expected
    assert evaluated.references == [("return h",), ("return g",)]
    answers = prepare_run(_config(chats, generate={"metrics": ["exact_match"]})).answers
    assert answers is not None
    assert answers.prompts.encoded == expected
    assert answers.prompts.texts == [AutoTokenizer.from_pretrained(chats.model).decode(each) for each in expected]
    samples = prepare_run(_config(chats, generate={}, train__sample_every=1)).samples
    assert samples is not None
    assert [*map(list, samples.encoded)] == expected
    tokenizer = AutoTokenizer.from_pretrained(chats.model)
    assert [tokenizer.decode(each) for each in expected] == [*samples.prompts]
    model, prompts = read_model_config(chats.model), [Record(messages=(ASKED[0],), origin="--prompt")]
    (chats.adapter / "chat_template.jinja").write_text(TEMPLATE)
    asking = dataclasses.replace(asking_of(chats.adapter), day="2026-01-15")
    _, encoded = read_prompts(chats.model, prompts, GenerateConfig(), asking=asking)
    assert encoded == expected[1:]
    chats.drop("data.eval")
    chats.set("train.sample_every", 0)
    rl = {"rewards": [{"kind": "match", "field": "answer"}], "completions": 2, "max_new_tokens": 4}
    config = _config(chats, rl=rl, train__objective={"kind": "grpo"}, train__batch_size=2)
    said: list[str] = []
    texts = Texts(config.model, config.data, config.train.objective)
    found = read_prompts_of_rl(config, texts.tokenizer(), model, said.append)
    assert [list(each.ids) for each in found.prompts] == expected
    assert "the chat template writes the date: 2026-01-15 (data.date)" in said
    config = _config(
        chats,
        rl=rl,
        train__objective={"kind": "grpo"},
        train__batch_size=2,
        data__system="Be kind.",
        data__max_length=96,
    )
    found = read_prompts_of_rl(config, texts.tokenizer(), model)
    assert all("Be kind." in each.text for each in found.prompts)


def test_a_call_in_a_prompt_that_the_template_leaves_out_is_said_not_refused(chats: Setup) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    chats.data({"messages": [ASKED[0], call, ASKED[2], ANSWER]})
    rl = {"rewards": [{"kind": "match", "field": "answer"}], "completions": 2, "max_new_tokens": 4}
    chats.drop("data.eval")
    config = _config(chats, rl=rl, train__objective={"kind": "grpo"}, train__batch_size=2)
    said: list[str] = []
    texts = Texts(config.model, config.data, config.train.objective)
    read_prompts_of_rl(config, texts.tokenizer(), read_model_config(chats.model), said.append)
    assert any("messages have tool_calls, which the chat template does not name" in line for line in said), said


def test_a_text_ends_at_each_token_that_ends_an_answer_in_training(tmp_path: Path, chats: Setup) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chats.model)
    (chats.model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, tokenizer.eos_token_id]}))
    assert ends_of(tokenizer, GenerateConfig()) == [tokenizer.eos_token_id, 7]
    assert clock.day_of(tokenizer)
