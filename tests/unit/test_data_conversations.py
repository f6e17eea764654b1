"""Conversations as people have them become those that chat templates read; what would be lost is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshlora.reading.conversations import checked_messages, checked_tools
from meshlora.reading.records import MalformedError, Record
from meshlora.reading.tokenization import tokenize
from meshlora_ground.errors import UserError
from tests.unit.records import END, MARKED, UNMARKED, WITH_TOOLS, make_tokenizer, trained_text

ASK, SAY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"type": "function", "function": {"name": "now", "arguments": {"zone": 1}}}
TOOL = {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object"}}}
CALLS = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "12"}, SAY]


def record(*messages: dict[str, Any], tools: Any = None) -> Record:
    return Record(messages=checked_messages(list(messages)), tools=tools, origin="a.jsonl:1")


def test_the_keys_and_roles_of_sharegpt_are_those_of_templates() -> None:
    turns = [("system", "s"), ("human", "h"), ("gpt", "g"), ("observation", "o"), ("tool", "t"), ("assistant", "a")]
    roles = ["system", "user", "assistant", "tool", "tool", "assistant"]
    found = checked_messages([{"from": role, "value": text} for role, text in turns])
    assert list(found) == [{"role": role, "content": text} for role, (_, text) in zip(roles, turns, strict=True)]


@pytest.mark.parametrize(
    "call",
    [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": '{"zone": 1}'}}]},
        {"role": "assistant", "tool_calls": [CALL["function"]]},
        {"role": "assistant", "function_call": {"name": "now", "arguments": '{"zone": 1}'}},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "function_call", "value": json.dumps([CALL["function"]])},
    ],
)
def test_every_spelling_of_a_call_is_the_one_that_templates_read(call: dict[str, Any]) -> None:
    assert checked_messages([call]) == ({"role": "assistant", "tool_calls": [CALL]},)


@pytest.mark.parametrize("tools", [[TOOL], [TOOL["function"]], json.dumps([TOOL]), [json.dumps(TOOL["function"])]])
def test_every_spelling_of_tools_is_the_one_that_templates_read(tools: Any) -> None:
    assert checked_tools(tools) == (TOOL,)
    assert checked_tools("") is checked_tools([]) is None


@pytest.mark.parametrize(
    "template", [WITH_TOOLS, WITH_TOOLS.replace("{% generation %}", "").replace("{% endgeneration %}", "")]
)
def test_tools_and_calls_reach_the_template_as_transformers_passes_them(template: str) -> None:
    tokenizer = make_tokenizer(chat_template=template, eos=END)
    found = tokenize([record(*CALLS, tools=checked_tools([TOOL]))], tokenizer, max_length=999)
    theirs = tokenizer.apply_chat_template(CALLS, tools=[TOOL])
    assert found.input_ids.tolist() == theirs["input_ids"]
    assert trained_text(found, tokenizer) == f'<call>now{{"zone": 1}}{END}b{END}'


def test_a_call_is_refused_where_the_template_would_lose_it() -> None:
    tokenizer = make_tokenizer(chat_template=MARKED)
    with pytest.raises(UserError, match=r"a.jsonl:1 first: the chat template writes nothing of their trained answers"):
        tokenize([record(ASK, {"role": "assistant", "tool_calls": [CALL]})], tokenizer, max_length=99)
    said: list[str] = []
    tokenize([record(ASK, SAY, tools=checked_tools([TOOL]))], tokenizer, max_length=99, say=said.append)
    assert said == ["a.jsonl:1: messages have tools, which the chat template does not name"]


def test_tools_for_which_a_tokenizer_has_another_template_are_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": WITH_TOOLS, "tool_use": MARKED}
    with pytest.raises(UserError, match="tool_use"):
        tokenize([record(ASK, SAY, tools=checked_tools([TOOL]))], tokenizer, max_length=99)


READS_PARTS = "{% for p in m.content %}{{ p.text }}{% endfor %}"
PRINTS = "{{ '<|start|>' }}{{ m.content }}{{ '<|end|>' }}"  # a list as Python prints it


@pytest.mark.parametrize("content", ["{{ m.content + '<|end|>' }}", PRINTS, READS_PARTS])
def test_parts_of_text_are_one_text_whether_or_not_the_template_reads_parts(content: str) -> None:
    template = "{% for m in messages %}{{ m.role }}{% generation %}" + content + "{% endgeneration %}{% endfor %}"
    parts = [{"type": "text", "text": "the hou"}, {"type": "text", "text": "se is"}]
    tokenizer = make_tokenizer(chat_template=template)
    found = tokenize([record(ASK | {"content": parts}, SAY | {"content": parts})], tokenizer, max_length=99)
    text = tokenizer.decode(found.input_ids)
    assert text.count("the house is") == 2, text
    assert "type" not in text


def test_text_is_a_part_for_a_template_that_reads_nothing_else() -> None:
    """As those of LLaVA and Idefics, under which a plain chat would be refused."""
    template = f"{{% for m in messages %}}{{{{ m.role + ':' }}}}{READS_PARTS}{{{{ '{END}' }}}}{{% endfor %}}"
    tokenizer = make_tokenizer(chat_template=template + "{% if add_generation_prompt %}assistant:{% endif %}", eos=END)
    found = tokenize([record(ASK, SAY, ASK, SAY | {"content": "the"})], tokenizer, max_length=99)
    assert tokenizer.decode(found.input_ids) == f"user:a{END}assistant:b{END}user:a{END}assistant:the{END}"
    assert trained_text(found, tokenizer) == f"b{END}the{END}"


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"training": False}])
@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_a_turn_that_is_not_to_be_trained_is_not(flag: dict[str, Any], template: str) -> None:
    tokenizer = make_tokenizer(chat_template=template, eos=END)
    kept = record(ASK, SAY | {"content": "left"} | flag, ASK | flag, SAY | {"weight": 1})
    assert trained_text(tokenize([kept], tokenizer, max_length=99), tokenizer) == f"b{END}"


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_a_turn_of_the_user_that_is_not_to_be_trained_is_left_out_where_all_else_is_trained(template: str) -> None:
    tokenizer = make_tokenizer(chat_template=template, eos=END)
    found = tokenize([record(ASK, SAY, ASK | {"weight": 0}, SAY)], tokenizer, max_length=99, train_on="everything")
    left_out = tokenizer.decode(found.input_ids[~found.is_trained])
    assert left_out.removesuffix("\n") == tokenizer.apply_chat_template([ASK], tokenize=False).removesuffix("\n")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (ASK | {"weight": 1}, "messages[0] has weight 1, but only turns of the assistant are trained"),
        (ASK | {"train": True}, "messages[0] has train true, but only turns of the assistant are trained"),
        (SAY | {"weight": True}, "a weight that is neither 0 (not trained) nor 1 (trained)"),
        (SAY | {"train": 0}, "a train that is neither false (not trained) nor true (trained)"),
        (SAY | {"train": False, "weight": 0}, "has weight and train: one of them"),
        (SAY | {"train_detail": []}, "has train_detail, but whole turns are trained or not"),
        (ASK | {"tool_calls": [CALL]}, "only an assistant turn can have"),
        (SAY | {"tool_calls": ["now"]}, "messages[0].tool_calls[0] is a string"),
        (SAY | {"tool_calls": [{"function": {}}]}, "no call of a function with a name"),
        (SAY | {"tool_calls": [{"name": "f", "arguments": "[1]"}]}, "arguments that are a list, not an object"),
        (SAY | {"tool_calls": [{"name": "f", "arguments": "{x"}]}, "messages[0].tool_calls[0].arguments is no JSON"),
        ({"from": "function_call", "value": "now()"}, "messages[0].content is no JSON"),
        ({"from": "function_call", "value": '{"name": "f", "name": "g"}'}, "given twice"),
        ({"from": "gpt", "value": None}, "messages[0] has no content"),
        ({"role": "tool", "content": None}, "messages[0] has no content"),
    ],
)
def test_what_would_be_ignored_or_lost_is_refused(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedError) as error:
        checked_messages([message, SAY])
    assert reason in str(error.value)


@pytest.mark.parametrize("tools", ["{", 3, ["now"], [{"type": "function"}], [{"name": 3}]])
def test_tools_that_are_none_are_refused(tools: Any) -> None:
    with pytest.raises(MalformedError, match="tools"):
        checked_tools(tools)
