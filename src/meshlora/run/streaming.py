"""One continuation that is heard token by token, and can be stopped: on one process or a mesh.

Owns: the text of tokens as they come, and that all ranks stop at one token. Does not own: decoding (`run.decoding`),
what a mesh changes (`wings.generation.rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_reduce_sum
from meshlora.reading.tokenizer import padding_token_id
from meshlora.run.config.run_file import GenerateConfig
from meshlora.run.decoding import ends_of, words_of_transformers
from meshlora.wings.generation.rows import generating
from meshlora_ground.float64 import lift

_UNFINISHED = "\ufffd"  # a character of which only some bytes have come


class GrowingText:
    """The text of tokens as they come, without special tokens: whole characters, each once.

    text = GrowingText(tokenizer)
    said = text.add([17]) + text.add([4]) + text.rest()
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._said = tokenizer, ""
        self.tokens = list[int]()

    @property
    def whole(self) -> str:
        """The text of all tokens so far."""
        return str(self._tokenizer.decode(self.tokens, skip_special_tokens=True))

    def add(self, tokens: Sequence[int]) -> str:
        """What these add to the text; what is not yet certain comes later."""
        self.tokens += tokens
        return "" if (text := self.whole).endswith(_UNFINISHED) else self._further(text)

    def rest(self) -> str:
        """What has not been said yet, after the last token."""
        return self._further(self.whole)

    def _further(self, text: str) -> str:
        if not text.startswith(self._said):  # some tokenizers change a space when the next word comes
            return ""
        further, self._said = text[len(self._said) :], text
        return further


def continue_one(
    network: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    options: GenerateConfig,
    *,
    hear: Callable[[list[int]], object] = lambda _: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[int]:
    """The tokens after `prompt`, with the one that ended them, if any: those of `continued`, one prompt at a time.
    Every rank calls it with the same prompt, replicas too, and gets the same tokens.

        tokens = continue_one(model, tokenizer, ids, GenerateConfig(), hear=print)

    hear: called with each token as it comes. is_stopped: asked after each; a rank that says so stops them all.
    """
    ids = torch.tensor([list(prompt)], device=network.device)
    with generating(network), lift(network.dtype == torch.float64):
        torch.manual_seed(options.seed % 2**63)
        output = network.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.max_new_tokens,
            eos_token_id=ends_of(tokenizer, options) or None,
            pad_token_id=padding_token_id(tokenizer),
            streamer=_Ear(hear, len(prompt)),
            stopping_criteria=StoppingCriteriaList([_Stop(network, is_stopped)]),
            **words_of_transformers(options),
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


class _Ear(BaseStreamer):
    """Hands on new tokens; transformers gives it the prompt first."""

    def __init__(self, hear: Callable[[list[int]], object], num_known: int) -> None:
        self._hear, self._num_known = hear, num_known

    def put(self, value: Tensor) -> None:
        tokens: list[int] = value.flatten().tolist()
        known = min(self._num_known, len(tokens))
        self._num_known -= known
        if new := tokens[known:]:
            self._hear(new)

    def end(self) -> None:
        """Nothing is held back here."""


class _Stop(StoppingCriteria):
    def __init__(self, network: Any, is_stopped: Callable[[], bool]) -> None:
        self._world, self._is_stopped = runtime(network).mesh.world, is_stopped

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        told = torch.tensor([int(self._is_stopped())], device=input_ids.device)
        if self._world.size > 1:  # a rank that goes on alone would wait for the others for ever
            told = all_reduce_sum(told, self._world)
        return (told > 0).expand(len(input_ids))
