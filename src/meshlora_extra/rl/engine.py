"""An engine that serves adapters under OpenAI's interface, as vLLM does: loading an adapter, completing prompts.

Owns: the requests, and what is said of answers that are not what was asked for. Does not own: the adapter's folder
(`rl.publishing`), the records made of completions (`rl.rollouts`).

vLLM lets adapters be loaded while it serves if it was started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=true and
--enable-lora. It reads the folder itself: both see it under one path.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshlora.reading.records import MalformedError
from meshlora.reading.rollouts import check_log_probs, check_routed, check_tokens
from meshlora.run.decoding import Continuation
from meshlora_ground.errors import UserError, reason
from meshlora_ground.http import AnswerError, answer_of


@dataclass(frozen=True)
class Engine:
    """The engine at `url`, as in `http://127.0.0.1:8000`, with or without `/v1`. timeout_s: of one whole answer."""

    url: str
    timeout_s: float = 600.0

    def load_adapter(self, name: str, folder: Path) -> None:
        """Make `folder` the adapter `name`, in place of an earlier one of this name.

        A changed adapter comes from a new path: an engine may keep what it computed with another of the same path.

        Raises:
            UserError: the engine cannot be reached, or refuses it.
        """
        # Load_inplace: a name may be loaded twice.
        body = {"lora_name": name, "lora_path": str(folder.absolute()), "load_inplace": True}
        self._answer("load_lora_adapter", body, why="it loads an adapter", is_json=False)

    def complete(
        self, model: str, prompts: Sequence[Sequence[int]], *, vocab_size: int, n: int, max_tokens: int, **options: Any
    ) -> list[list[Continuation]]:
        """`n` completions of each prompt by the adapter, or base, `model`, sampled as they are.

            Engine(url).complete("meshlora", [[5, 6, 7]], vocab_size=2048, n=8, max_tokens=64, temperature=1.0, seed=3)

        vocab_size: of the model that is trained.

        Raises:
            UserError: the engine cannot be reached, refuses it, or its answer is none that a step could train on.
        """
        # An engine takes what is not given from the model's generation_config.json.
        whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 1}
        asked = {"model": model, "prompt": list(map(list, prompts)), "n": n, "max_tokens": max_tokens}
        answer = self._answer(
            "completions", {**asked, **whole, "return_token_ids": True, **options}, why="it completes prompts"
        )
        if not isinstance(answer, Mapping):
            raise self._wrong("its answer is no object with choices")
        if answer.get("model", model) != model:  # another adapter, or the base, may have answered
            raise self._wrong(f"{str(answer['model'])[:100]!r} has completed the prompts, and {model!r} was asked")
        choices, number = answer.get("choices"), n * len(prompts)
        given = choices if isinstance(choices, list) else []
        if len(given) != number:
            raise self._wrong(f"it gave {len(given)} completions, and {number} were asked for")
        numbered = [choice for choice in given if isinstance(choice, dict) and type(choice.get("index")) is int]
        by_index = {choice["index"]: choice for choice in numbered}
        if by_index.keys() != set(range(number)):  # whose prompt is whose would be a guess
            raise self._wrong(f"its completions are not numbered from 0 to {number - 1}")
        found = []
        for place in range(number):
            try:
                found.append(_completed(by_index[place], len(prompts[place // n]), vocab_size, max_tokens))
            except MalformedError as wrong:
                raise self._wrong(f"completion {place}: {wrong}") from None
        return [found[start : start + n] for start in range(0, len(found), n)]  # by prompt

    def _wrong(self, rule: str) -> UserError:
        return UserError(f"the engine at {self.url}", rule, "is it one like vLLM's?")

    def _answer(self, path: str, body: Mapping[str, Any], *, why: str, is_json: bool = True) -> Any:
        url = f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{path}"
        try:
            text = answer_of(url, json.dumps(body).encode(), timeout_s=self.timeout_s)
        except AnswerError as error:
            if error.status is None:
                way_out = "is it started, and at this address?"
                raise UserError(f"the engine at {self.url}", f"{error}", way_out) from None
            way_out = ""
            if error.status == 404 and path == "load_lora_adapter" and "Not Found" in str(error):
                way_out = "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=true and --enable-lora"
            rule = f"{why} not: {error.status} {_message(str(error))}"
            raise UserError(f"the engine at {self.url}", rule, way_out) from None
        try:
            return json.loads(text) if is_json else text
        except (ValueError, RecursionError):
            raise self._wrong(f"its answer is not JSON: {text[:100]!r}") from None


def _completed(choice: Mapping[str, Any], num_prompt: int, vocab_size: int, max_tokens: int) -> Continuation:
    """What a choice says. num_prompt: tokens of its prompt. Raises: MalformedError."""
    tokens, said = choice.get("token_ids"), choice.get("logprobs")
    if not isinstance(tokens, list) or not tokens:
        raise MalformedError("it has no token_ids (return_token_ids, of vLLM from 0.10.2 on)")
    check_tokens(tokens, "token_ids", vocab_size)
    if len(tokens) > max_tokens:
        raise MalformedError(f"it has {len(tokens)} tokens, and at most {max_tokens} were asked for")
    scores = said.get("token_logprobs") if isinstance(said, dict) else None
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise MalformedError("it has not one log-probability for each token")
    check_log_probs(scores, "token_logprobs")
    log_probs, experts = list(map(float, scores)), choice.get("routed_experts")
    is_truncated = choice.get("finish_reason") == "length"
    if experts is None:
        return Continuation(tokens, log_probs, is_truncated=is_truncated)
    routed = _array(experts)
    check_routed(routed, num_prompt + len(tokens))
    return Continuation(tokens, log_probs, list(routed.tolist()), is_truncated)


def _array(text: Any) -> np.ndarray:
    """The array in an answer: a `.npy` in base64, as vLLM with --enable-return-routed-experts gives them.

    Read by hand: `np.load` first takes the memory that the header asks for.

    Raises:
        MalformedError: it is none of numbers.
    """
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, is_by_column, dtype = read[np.lib.format.read_magic(file)](file)
    except Exception as error:  # untrusted bytes read by a library may raise anything
        raise MalformedError(f"its routed_experts cannot be read ({reason(error)})") from error
    content = file.read()  # as much as the server has sent, and no more
    if dtype.kind not in "ui" or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(content):
        raise MalformedError(f"its routed_experts are {dtype} {list(shape)} in {len(content)} bytes")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if is_by_column else "C")


def _message(said: str) -> str:
    """The message in an error of OpenAI's form, or the text."""
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        return said[:300]
    if isinstance(found, dict):
        found = found.get("error", found)
    if isinstance(found, dict):
        found = found.get("message", said)
    return str(found)[:300]
