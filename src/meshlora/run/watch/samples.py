"""Samples: the model's continuations of a few prompts, at intervals of a run.

Owns: the choice of prompts, their continuations on every rank, `samples.jsonl`. Does not own: decoding
(`run.decoding`), when samples are due (`run.trained`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from meshlora.adapter.attach import runtime
from meshlora.reading.records import Record, asked_of
from meshlora.run.config.run_file import DataConfig, GenerateConfig
from meshlora.run.decoding import continuations, encode_prompts
from meshlora.run.sources import held_out_records
from meshlora.run.watch.metrics import lines_until
from meshlora_ground.errors import UserError
from meshlora_ground.files import write_atomically
from meshlora_ground.float64 import lift

FILE = "samples.jsonl"
NUM_PROMPTS = 4  # taken from the held-out data, if the run file names none


@dataclasses.dataclass(frozen=True)
class Samples:
    """Encoded prompts of a run. Decoding is greedy, whatever the run's: only the adapter changes between samples."""

    prompts: tuple[str, ...]
    encoded: tuple[tuple[int, ...], ...]
    tokenizer: PreTrainedTokenizerBase
    options: GenerateConfig

    def write(self, model: Any, file: Path, *, step: int, say: Callable[[str], None]) -> None:
        """Continue every prompt; rank 0 appends the texts to `file` and passes them to `say`. Collective."""
        with lift(model.dtype == torch.float64):
            texts = list(continuations(model, self.tokenizer, self.encoded, self.options))
        if runtime(model).mesh.rank:
            return
        with file.open("a", encoding="utf-8") as opened:
            for prompt, text in zip(self.prompts, texts, strict=True):
                opened.write(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
        for prompt, text in zip(self.prompts, texts, strict=True):
            say(f"  {' '.join(prompt.split())[-60:]!r} -> {' '.join(text.split())!r}")


def prepare_samples(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: Any,
    *,
    every: int,
    max_new_tokens: int,
    held: frozenset[str] = frozenset(),
) -> Samples | None:
    """The prompts of `train.sample_every`, which is `every`. held: as of `RunData`. Raises: UserError: there are none;
    one is too long."""
    if not every:
        return None
    options = GenerateConfig(max_new_tokens=max_new_tokens)
    prompts: list[str | Record] = [*(data.sample_prompts or ())]
    if data.sample_prompts is None:
        asked = dict[str, Record]()
        for record in held_out_records(data, held):
            if record.prompt or record.messages:
                one = asked_of(record)
                asked[json.dumps([one.prompt, one.messages, one.tools])] = one
        first = [one.prompt or one for one in [*asked.values()][:NUM_PROMPTS]]
        prompts = sorted(first, key=lambda one: isinstance(one, Record))  # texts, then conversations
    if not prompts:
        rule = "no record of data.eval has a prompt to continue"
        raise UserError(f"train.sample_every={every}", rule, "give data.sample_prompts")
    encoded = encode_prompts(prompts, tokenizer, model_config, options, separator=data.separator)
    texts, ids = zip(*encoded, strict=True)
    return Samples(texts, tuple(map(tuple, ids)), tokenizer, options)


def forget_after(file: Path, done: int) -> None:
    """Drop the samples of steps after `done`, from which the run resumes."""
    if not file.is_file():
        return
    kept, _ = lines_until(file, done)
    write_atomically(file, lambda path: path.write_bytes(b"".join(kept)))
