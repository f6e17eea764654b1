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
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from meshlora.common.errors import MeshloraError, UserError, reason
from meshlora.data.records import is_number
from meshlora.text.decoding import Continuation

_LONGEST_ANSWER = 2**30
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Engine:
    """The engine at `url`, as in `http://127.0.0.1:8000`, with or without `/v1`. timeout_s: of one answer."""

    url: str
    timeout_s: float = 600.0

    def load_adapter(self, name: str, folder: Path) -> None:
        """Make `folder` the adapter `name`, in place of an earlier one of this name.

        A changed adapter comes from a new path: an engine may keep what it computed with another of the same path.

        Raises:
            UserError: the engine cannot be reached, or refuses it.
        """
        body = {"lora_name": name, "lora_path": str(folder.absolute()), "load_inplace": True}
        self._answer("load_lora_adapter", body, why="it loads an adapter", is_json=False)

    def complete(self, model: str, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[Continuation]]:
        """`n` completions of each prompt by the adapter, or base, `model`, sampled as they are.

            Engine(url).complete("meshlora", [[5, 6, 7]], n=8, max_tokens=64, temperature=1.0, seed=3)

        Raises:
            UserError: the engine cannot be reached, refuses it, or says no tokens or log-probabilities.
        """
        number = options.get("n", 1)
        # An engine takes what is not given from the model's generation_config.json.
        whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 1}
        body = {"model": model, "prompt": [[*ids] for ids in prompts], **whole, "return_token_ids": True, **options}
        answer = self._answer("completions", body, why="it completes prompts")
        choices = answer.get("choices") if isinstance(answer, Mapping) else None
        asked, given = number * len(prompts), choices if isinstance(choices, list) else []
        if len(given) != asked:
            raise self._wrong(f"it gave {len(given)} completions, and {asked} were asked for")
        numbered = [choice for choice in given if isinstance(choice, dict) and type(choice.get("index")) is int]
        by_index = {choice["index"]: choice for choice in numbered}
        if by_index.keys() != set(range(asked)):  # whose prompt is whose would be a guess
            raise self._wrong(f"its completions are not numbered from 0 to {asked - 1}")
        found = [self._completed(by_index[place]) for place in range(asked)]
        return [found[start : start + number] for start in range(0, len(found), number)]

    def _completed(self, choice: Mapping[str, Any]) -> Continuation:
        tokens, said = choice.get("token_ids"), choice.get("logprobs")
        scores = said.get("token_logprobs") if isinstance(said, dict) else None
        if not isinstance(tokens, list) or not tokens or any(type(one) is not int or one < 0 for one in tokens):
            raise self._wrong("a completion has no token_ids (return_token_ids, of vLLM from 0.10.2 on)")
        if not isinstance(scores, list) or len(scores) != len(tokens) or not all(map(is_number, scores)):
            raise self._wrong("a completion has not one log-probability for each token")
        return Continuation(tokens, [float(each) for each in scores], self._routed(choice.get("routed_experts")))

    def _routed(self, text: Any) -> list[Any] | None:
        """The experts in an answer: a `.npy` in base64, as vLLM with --enable-return-routed-experts gives them."""
        if text is None:
            return None
        try:
            found = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
        except (ValueError, TypeError, EOFError) as error:
            raise self._wrong(f"its routed_experts cannot be read ({reason(error)})") from None
        if found.ndim != 3 or found.dtype.kind not in "ui":
            raise self._wrong(
                f"its routed_experts are {found.dtype} of {found.ndim} dimensions, not [tokens, layers, k]"
            )
        return list(found.tolist())

    def _wrong(self, rule: str) -> UserError:
        return UserError(f"the engine at {self.url}", rule, "is it one like vLLM's?")

    def _answer(self, path: str, body: Mapping[str, Any], *, why: str, is_json: bool = True) -> Any:
        url = f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        # A proxy of the environment is not for this machine.
        own = [urllib.request.ProxyHandler({})] if urlsplit(url).hostname in _LOOPBACK else []
        try:
            with urllib.request.build_opener(*own).open(request, timeout=self.timeout_s) as answer:
                text = answer.read(_LONGEST_ANSWER).decode("utf-8", errors="replace")
        except urllib.error.HTTPError as error:
            raise self._refused(error, path, why) from None
        except (OSError, ValueError) as error:
            way_out = "is it started, and at this address?"
            raise UserError(f"the engine at {self.url}", f"it cannot be reached ({reason(error)})", way_out) from None
        try:
            return json.loads(text) if is_json else text
        except ValueError:
            raise self._wrong(f"its answer is not JSON: {text[:100]!r}") from None

    def _refused(self, error: urllib.error.HTTPError, path: str, why: str) -> MeshloraError:
        said = error.read(4000).decode("utf-8", errors="replace")
        way_out = ""
        if error.code == 404 and path == "load_lora_adapter" and "Not Found" in said:
            way_out = "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=true and --enable-lora"
        return UserError(f"the engine at {self.url}", f"{why} not: {error.code} {_message(said)}", way_out)


def _message(said: str) -> str:
    """The message in an error of OpenAI's form, or the text."""
    try:
        found = json.loads(said)
    except ValueError:
        return said[:300]
    inside = found.get("error", found) if isinstance(found, dict) else found
    return str(inside.get("message", said) if isinstance(inside, dict) else inside)[:300]
