"""A server of models under OpenAI's interface, as vLLM and SGLang are: its names, and its log-probabilities of prompts.

Owns: the requests, and what is said of a server that does not answer them. Does not own: HTTP (`meshlora_ground.http`),
or what the numbers should be (`meshlora_judge.served.computed`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from meshlora_ground.errors import UserError, did_you_mean, one_line
from meshlora_ground.http import LOOPBACK, AnswerError, answer_of

# What asks for log-probabilities of a prompt's own tokens. vLLM has the first, most others the second; some of these
# refuse to complete nothing.
WAYS: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"max_tokens": 1, "prompt_logprobs": 1},
    "echo": {"max_tokens": 0, "echo": True, "logprobs": 1},
    "echo and one more token": {"max_tokens": 1, "echo": True, "logprobs": 1},
}


@dataclass
class Server:
    """The server at `url`, as in `http://127.0.0.1:8000`, with or without `/v1`.

    key: sent as a bearer token. timeout_s: of one whole answer. way: of WAYS, once one was answered.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    timeout_s: float = 120.0
    way: str | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            host = parts.hostname
        except ValueError:
            parts, host = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not host:
            raise UserError(f"{self.url}", "it is no address of a server", "as in http://127.0.0.1:8000")
        if parts.scheme == "http" and host not in LOOPBACK:
            rule = "prompts and keys go to other machines by https only"
            raise UserError(f"{self.url}", rule, f"use https, or ssh -L 8000:{host}:{parts.port or 80}")

    def models(self) -> dict[str, str | None]:
        """Name -> the name of its base, where the server tells it, of all that it serves."""
        answer = self._answer("models", None)
        listed = answer.get("data") if isinstance(answer, Mapping) else None
        found: dict[str, str | None] = {}
        for each in listed if isinstance(listed, list) else []:
            if isinstance(each, Mapping) and isinstance(each.get("id"), str):
                parent = each.get("parent")
                found[each["id"]] = parent if isinstance(parent, str) else None
        if not found:
            raise self._wrong("its answer to /v1/models names no model")
        return found

    def log_probs(self, model: str, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Float64 `[N]`: the log-probability by `model` of each token but the first of each prompt, in one row.

        Raises: UserError: it cannot be reached, refuses, or no way gives such numbers.
        """
        found = []
        for prompt in prompts:
            found += self._of_prompt(model, list(prompt))
        return torch.tensor(found, dtype=torch.float64)

    def _of_prompt(self, model: str, prompt: list[int]) -> list[float]:
        refused = {}
        for way in [self.way] if self.way else WAYS:
            try:
                answer = self._answer("completions", {"model": model, "prompt": prompt, "temperature": 0, **WAYS[way]})
            except _RefusedError as error:
                refused[way] = f"{error}"
                continue
            numbers = _numbers(answer, prompt)
            if numbers is not None:
                self.way = way
                return numbers
            refused[way] = "its answer has no such numbers"
        said = "; ".join(f"{way}: {why}" for way, why in refused.items())
        raise self._wrong(f"it gives no log-probabilities of a prompt's tokens by {model!r} ({said})")

    def _wrong(self, rule: str) -> UserError:
        return UserError(f"the server at {self.url}", rule, "is it one like vLLM's or SGLang's?")

    def _answer(self, path: str, body: Mapping[str, Any] | None) -> Any:
        url = f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{path}"
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        content = None if body is None else json.dumps(body).encode()
        try:
            text = answer_of(url, content, timeout_s=self.timeout_s, headers=headers, most_bytes=2**26)
        except AnswerError as error:
            if error.status in (401, 403):
                rule = f"it wants a key: {error.status} {one_line(str(error), 200)}"
                raise UserError(f"the server at {self.url}", rule, "give it by --key-file") from None
            if error.status is None:
                raise UserError(f"the server at {self.url}", f"{error}", "is it started, and there?") from None
            if body is None:
                raise self._wrong(f"/v1/{path}: {error.status} {one_line(str(error), 200)}") from None
            raise _RefusedError(f"{error.status} {one_line(str(error), 200)}") from None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self._wrong(f"its answer is not JSON: {one_line(text, 100)!r}") from None


class _RefusedError(Exception):
    """A status that refuses the request, which another way might not meet."""


def _numbers(answer: Any, prompt: list[int]) -> list[float] | None:
    """The log-probabilities of `prompt[1:]` in an answer; None if they are not there."""
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping):
        return None
    found: Any = None
    of_prompt, echoed = choice.get("prompt_logprobs"), choice.get("logprobs")
    if isinstance(of_prompt, list):
        # Each a table by token id: the prompt's own token, and the likeliest.
        found = []
        for token, table in zip(prompt[1:], of_prompt[1:], strict=False):
            entry = table.get(f"{token}") if isinstance(table, Mapping) else None
            found.append(entry.get("logprob") if isinstance(entry, Mapping) else None)
    elif isinstance(echoed, Mapping) and isinstance(echoed.get("token_logprobs"), list):
        found = echoed["token_logprobs"][1 : len(prompt)]  # then those of the completion
    if found is None or len(found) != len(prompt) - 1:
        return None
    is_right = [isinstance(x, int | float) and math.isfinite(x) and x < 1e-3 for x in found]
    return list(map(float, found)) if all(is_right) else None


def served_names(models: Mapping[str, str | None], name: str | None, base: str | None, folder: str) -> tuple[str, Any]:
    """(the name to judge, the name of its base or None): those given, else what the server's list leaves no doubt of.

    folder: name of the adapter's folder. Raises: UserError: not served, or nobody can tell which it is.
    """
    for given in (name, base):
        if given is not None and given not in models:
            raise UserError(f"model {given!r}", "the server does not serve it", did_you_mean(given, models))
    if name is None:
        adapters = [each for each, parent in models.items() if parent is not None]
        if folder in models:
            name = folder
        elif len(adapters) == 1:
            name = adapters[0]
        elif len(models) == 1:
            name = next(iter(models))
        else:
            shown = one_line(", ".join(models), 300)
            raise UserError("--name", f"the server serves several models: {shown}", "give the one to judge")
    return name, base or models[name]
