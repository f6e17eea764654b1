"""Messages and tools of a conversation: from the shapes in which people have them to the one that templates read.

Owns: names of roles and keys (OpenAI, ShareGPT), calls of tools, which turns are trained, and what is refused.
Does not own: rows (`formats.py`), the template (`chat.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshlora.reading.records import MalformedError, checked_text, json_type, listed, quoted
from meshlora_ground.errors import did_you_mean
from meshlora_ground.reading import once

ROLES = ("system", "developer", "user", "assistant", "tool")
# Other names of roles: ShareGPT's, FastChat's, and of OpenAI's first function calls.
_ROLES_ELSEWHERE = {
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response"), "tool"),
    "human": "user",
    "function_call": "assistant",  # its content is the call
}
# Keys of a turn's reasoning: transformers passes each of them to a template under all of these names.
REASONING = ("reasoning_content", "reasoning", "thinking")
_CALL = "function_call"  # a role of ShareGPT, a key of OpenAI
# Names of the flag that says whether a turn is trained: OpenAI's, and those of axolotl's documentation.
_FLAGS = ("weight", "train", "training")
_PARTS_OF_TURNS = ("train_detail", "training_detail")


def checked_messages(value: object, name: str = "messages") -> tuple[dict[str, Any], ...]:
    """The messages of a conversation: `role`, `content`, and maybe `weight`, `tool_calls` and keys of the template.

        checked_messages([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "train": False}])

    An assistant turn with `weight` 0 is not trained. The arguments of a call are an object, as templates take them.

    Raises:
        MalformedError: it is no conversation, has no turn of the assistant, or says what would be ignored here.
    """
    if not isinstance(value, (list, tuple)):
        raise MalformedError(f"{name} is {json_type(value)}, not a list")
    messages, has_answer = [], False
    for index, each in enumerate(value):
        message = _checked_message(each, f"{name}[{index}]")
        has_answer |= message["role"] == "assistant"
        messages.append(message)
    if not has_answer:
        raise MalformedError(f"{name} has no assistant turn to train on")
    return tuple(messages)


_TO_COME = {"role": "assistant", "content": "…"}


def open_conversation(
    value: object, name: str = "messages"
) -> tuple[tuple[dict[str, Any], ...], dict[str, Any] | None]:
    """(the messages that ask for an answer, the answer that is there already, if any).

        open_conversation([{"role": "user", "content": "a"}])

    Raises:
        MalformedError: it is no conversation, or asks nothing.
    """
    if not isinstance(value, list):
        raise MalformedError(f"its {name} is {json_type(value)}, neither a text nor messages")
    last, given = (value or [None])[-1], [*value]
    is_answered = isinstance(last, Mapping) and last.get("role", last.get("from")) in ("assistant", "gpt")
    if not is_answered:
        given.append(_TO_COME)  # a conversation has a turn of the assistant: here it is the one to come
    *asked, answer = checked_messages(given, "messages")
    if not asked:
        raise MalformedError("nothing is asked before the assistant's turn")
    return tuple(asked), answer if is_answered else None


def untrained(messages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """The same messages, of which no turn is trained: a prompt."""
    return tuple({**each, "weight": 0} if each["role"] == "assistant" else each for each in messages)


def _checked_message(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise MalformedError(f"{where} is {json_type(value)}, not an object")
    # Arrow gives every message of a column the same keys, with None where one had none. A content of None beside calls
    # of tools is OpenAI's way, and templates ask for it.
    message = {key: item for key, item in value.items() if item is not None or key == "content"}
    if "role" not in message and "from" in message:  # ShareGPT's keys
        if message.get("content") is None:  # of Arrow: the text is in `value`
            message.pop("content", None)
        renamed = {"from": "role", "value": "content"}
        message = {renamed.get(key, key): item for key, item in message.items()}
    is_call = message.get("role") == _CALL
    message["role"] = _role(message, where)
    if (calls := _calls(message, where, is_content=is_call)) is not None:
        message["tool_calls"] = calls
    if message.get("content") is None and calls is None:
        raise MalformedError(f"{where} has no content")
    if message.get("content") is not None:
        message["content"] = _checked_content(message["content"], f"{where}.content")
    _set_weight(message, where)
    _check_json(message, where)
    return message


def _check_json(value: object, where: str) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedError(f"{where} holds what JSON cannot: {error}") from None


def _role(message: Mapping[str, Any], where: str) -> str:
    role, known = message.get("role"), f"known: {', '.join(ROLES)}"
    if role is None:
        raise MalformedError(f"{where} has no role; {known}")
    if not isinstance(role, str):
        raise MalformedError(f"{where} has unknown role {json_type(role)}; {known}")
    found = _ROLES_ELSEWHERE.get(role, role)
    if found not in ROLES:
        raise MalformedError(f"{where} has unknown role {quoted(role)}; {did_you_mean(role[:60], ROLES)}")
    return found


def _checked_content(value: object, where: str) -> str | list[dict[str, str]]:
    """Text, or parts of text and images."""
    if not isinstance(value, list):
        return checked_text(value, where)
    parts = []
    for index, part in enumerate(value):
        place = f"{where}[{index}]"
        if not isinstance(part, Mapping):
            raise MalformedError(f"{place} is {json_type(part)}, not an object")
        part = {key: item for key, item in part.items() if item is not None}  # Arrow's None, as above
        kind = part.get("type")
        if kind not in ("text", "image"):
            raise MalformedError(f"{place} has type {quoted(str(kind))}, not text or image")
        if set(part) != {"type", kind}:
            raise MalformedError(f"{place} has {listed(part)}; a part of {kind} has type and {kind}")
        parts.append({"type": kind, kind: checked_text(part[kind], f"{place}.{kind}")})
    return parts


def _set_weight(message: dict[str, Any], where: str) -> None:
    """Give the flag of a turn OpenAI's name and values: 0 for a turn that is not trained, else 1."""
    for name in _PARTS_OF_TURNS:
        if name in message:
            raise MalformedError(
                f"{where} has {name}, but whole turns are trained or not: split the turn, or leave it out"
            )
    given = {name: message.pop(name) for name in _FLAGS if name in message}
    if not given:
        return
    if len(given) > 1:
        raise MalformedError(f"{where} has {' and '.join(given)}: one of them")
    ((name, flag),) = given.items()
    # A weight is a number and the others are true or false; for Python `True == 1`.
    if (name == "weight") == isinstance(flag, bool) or flag not in (0, 1):
        known = "0 (not trained) nor 1 (trained)" if name == "weight" else "false (not trained) nor true (trained)"
        raise MalformedError(f"{where} has a {name} that is neither {known}")
    if flag and message["role"] != "assistant":
        # ShareGPT's files with weights have 0 there.
        raise MalformedError(f"{where} has {name} {json.dumps(flag)}, but only turns of the assistant are trained")
    message["weight"] = int(flag)


def _calls(message: dict[str, Any], where: str, *, is_content: bool) -> list[dict[str, Any]] | None:
    """The calls of a turn, taken out of `message`; None if it has none. is_content: its content is a call, as JSON."""
    place = f"{where}.tool_calls"
    if is_content:
        place = f"{where}.content"
        value = _parsed(message.pop("content", None), place)
    elif _CALL in message:
        value, place = message.pop(_CALL), f"{where}.{_CALL}"
    else:
        value = message.pop("tool_calls", None)
    if value is None or value == []:
        return None
    if message["role"] != "assistant":
        raise MalformedError(f"{where} has calls of tools, which only an assistant turn can have")
    calls = value if isinstance(value, list) else [value]  # OpenAI's first form has one
    return [_checked_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _checked_call(value: object, where: str) -> dict[str, Any]:
    """OpenAI's form, `{"type": "function", "function": {"name", "arguments"}}`, with arguments as an object."""
    if not isinstance(value, Mapping):
        raise MalformedError(f"{where} is {json_type(value)}, not an object")
    call = {key: item for key, item in value.items() if item is not None}
    if "function" not in call:
        call = {"type": "function", "function": call}
    function = call["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MalformedError(f"{where} is no call of a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # OpenAI writes them as text; templates write objects, and most would put quotes around a text once more.
        arguments = _parsed(arguments, f"{where}.arguments") if arguments.strip() else {}
    if not isinstance(arguments, Mapping):
        raise MalformedError(f"{where} has arguments that are {json_type(arguments)}, not an object")
    return {"type": "function", **call, "function": {**function, "arguments": dict(arguments)}}


def checked_tools(value: object) -> tuple[dict[str, Any], ...] | None:
    """The tools of a conversation, as `apply_chat_template` takes them; None if there are none.

        checked_tools('[{"name": "now", "description": "The time", "parameters": {}}]')

    value: a list, or the JSON of one, of functions, each as OpenAI has it or only what stands under its `function`.

    Raises:
        MalformedError: it is something else.
    """
    if isinstance(value, str):
        value = _parsed(value, "tools") if value.strip() else []
    if not isinstance(value, (list, tuple)):
        raise MalformedError(f"tools is {json_type(value)}, not a list")
    tools = []
    for index, each in enumerate(value):
        where = f"tools[{index}]"
        tool = _parsed(each, where) if isinstance(each, str) else each
        if not isinstance(tool, Mapping):
            raise MalformedError(f"{where} is no function with a name")
        if "function" not in tool:  # what stands under it alone
            tool = {"type": "function", "function": dict(tool)}
        function = tool["function"]
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise MalformedError(f"{where} is no function with a name")
        _check_json(tool, where)
        tools.append(dict(tool))
    return tuple(tools) or None


def _parsed(text: object, where: str) -> Any:
    if not isinstance(text, str):
        raise MalformedError(f"{where} is {json_type(text)}, not the JSON of an object")
    try:
        return json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{where} is no JSON ({error})") from None
