"""The model that answers a conversation: on one process, or on rank 0 of a mesh whose other ranks follow.

Owns: loading it, a question's way to all ranks and back as text, and the end of them. Does not own: decoding
(`run.streaming`), what is asked (the terminal, the page).

Other ranks wait in the job's store rather than in a collective: a user may think for hours, and collectives end after
some minutes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from torch.distributed import DistStoreError
from transformers import PreTrainedTokenizerBase

from meshlora.adapter.attach import disable_adapter, runtime
from meshlora.comm.groups import meet
from meshlora.loading.blueprint import Blueprint
from meshlora.loading.load import load_blueprint
from meshlora.loading.positions import most_positions
from meshlora.reading.chat import conversation_prompts
from meshlora.reading.records import Record
from meshlora.run.config.run_file import GenerateConfig
from meshlora.run.decoding import ends_of
from meshlora.run.streaming import GrowingText, continue_one
from meshlora_ground.errors import UserError

_TURN, _LOOK = "talk/{}", timedelta(seconds=30)
Message = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """text: without special tokens. why: it ended by itself, or was stopped, or max_new_tokens or positions cut it."""

    text: str
    why: Literal["ended", "stopped", "cut", "positions"]
    num_tokens: int


class Speaker:
    """`blueprint`, loaded, with the tokenizer that asks it. Every rank makes one; all but rank 0 then `follow`."""

    def __init__(self, blueprint: Blueprint, tokenizer: PreTrainedTokenizerBase, options: GenerateConfig) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.has_adapter = blueprint.adapter is not None
        self.positions = most_positions(blueprint.config)
        self._network = load_blueprint(blueprint).eval()
        mesh = runtime(self._network).mesh
        self._store = meet() if mesh.world.size > 1 else None
        self.topology = str(blueprint.topology) if mesh.world.size > 1 else ""  # of one process there is nothing to say
        self._turn = 0

    def tokens_of(self, messages: Sequence[Message], *, way_out: str) -> list[int]:
        """What leads to the answer. Raises: UserError: a template that refuses it; more than the model's positions."""
        (text,) = conversation_prompts([Record(messages=tuple(messages), origin="the conversation")], self.tokenizer)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if self.positions is not None and len(ids) >= self.positions:
            given, rule = f"a conversation of {len(ids):,} tokens", f"the model has {self.positions:,} positions"
            raise UserError(given, rule, way_out)
        return ids

    def ask(
        self,
        ids: list[int],
        *,
        of_base: bool = False,
        hear: Callable[[str], object] = lambda _: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """The answer to `tokens_of`; on rank 0. of_base: of the model with its adapter switched off. hear: called with
        its text as it comes."""
        most = self.options.max_new_tokens
        if self.positions is not None:
            most = min(most, self.positions - len(ids))
        asked: dict[str, Any] = {"ids": ids, "most": most, "of_base": of_base, "seed": self.options.seed + self._turn}
        self._tell(asked)
        text = GrowingText(self.tokenizer)

        def hear_text(further: str) -> None:
            if further:
                hear(further)

        tokens = self._answer(**asked, hear=lambda new: hear_text(text.add(new)), is_stopped=is_stopped)
        hear_text(text.rest())
        why: Literal["ended", "stopped", "cut", "positions"] = "stopped"
        if tokens and tokens[-1] in ends_of(self.tokenizer, self.options):
            why = "ended"
        elif len(tokens) == most:
            why = "cut" if most == self.options.max_new_tokens else "positions"
        return Answer(text.whole, why, len(tokens))

    def follow(self) -> None:
        """On the other ranks: answer what rank 0 asks, until it leaves."""
        while True:
            asked = json.loads(self._heard())
            if asked is None:
                return
            self._answer(**asked)

    def leave(self) -> None:
        """On rank 0: let the other ranks end."""
        self._tell(None)

    def _tell(self, asked: dict[str, Any] | None) -> None:
        if self._store is not None:
            self._store.set(_TURN.format(self._turn), json.dumps(asked))

    def _heard(self) -> bytes:
        assert self._store is not None
        key = _TURN.format(self._turn)
        while not self._store.check([key]):  # the launcher ends this rank if rank 0 ends
            with contextlib.suppress(DistStoreError, RuntimeError):  # nothing came in that time
                self._store.wait([key], _LOOK)
        found: bytes = self._store.get(key)
        return found

    def _answer(self, *, ids: list[int], most: int, of_base: bool, seed: int, **heard: Callable[..., Any]) -> list[int]:
        """heard: `hear` and `is_stopped` of `continue_one`, on rank 0."""
        options = dataclasses.replace(self.options, max_new_tokens=most, seed=seed)
        with disable_adapter(self._network) if of_base else contextlib.nullcontext():
            found = continue_one(self._network, self.tokenizer, ids, options, **heard)
        self._turn += 1
        return found
