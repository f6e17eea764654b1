"""What one process computes: log-probabilities of prompts by the base and an adapter whose parts are scaled or moved.

Owns: those numbers, and the prompts. Does not own: which of them a server
resembles (`meshlora_judge.served.verdict`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshlora_ground.errors import UserError, reason
from meshlora_ground.float64 import lift
from meshlora_ground.reading import parse_json, read_text
from meshlora_judge.attached import LAYER, Part, load_adapted, parts_of
from meshlora_judge.quantized import quantize_base
from meshlora_judge.settings import Base

_NUM_PROMPTS, _PROMPT_TOKENS, _MOST_TOKENS = 8, 40, 2048
SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and nobody in the village was surprised.",
    "def mean(values):\n    return sum(values) / len(values)",
    "Question: What is the capital of France? Answer: Paris, on the river Seine.",
    "In 1905 a clerk of a patent office wrote four papers, each of which changed physics.",
)


class Computed:
    """A base with an adapter on one process, and the log-probabilities that it gives to the tokens of prompts."""

    def __init__(self, base: Base, adapter: Path, prompts: Sequence[Sequence[int]]) -> None:
        self.base, self.adapter, self.prompts = base, adapter, prompts
        self.model = load_adapted(base, adapter)
        self.parts = parts_of(self.model)

    def log_probs(self, factor: Callable[[Part], float] = lambda _: 1.0) -> Tensor:
        """Float64 `[N]`, as `Server.log_probs`, with each part scaled by its factor; 0 turns it off."""
        for part in self.parts:
            by = factor(part)
            part.module.enable_adapters(by != 0.0)
            if part.scale is not None:
                part.module.scaling["default"] = part.scale * by
        return log_probs_of(self.model, self.prompts)

    def merged(self, kind: str, *, is_before: bool = False) -> Tensor:
        """`log_probs` of a merge, rounded to `kind`, a float of torch or a kind of `quantize_base`; is_before: the base
        is rounded instead, and the adapter is added in full precision."""
        model = load_adapted(replace(self.base, quantization=kind if is_before else None), self.adapter)
        merged = model.merge_and_unload()
        if not is_before and kind in ("bfloat16", "float16"):
            with torch.no_grad():
                for parameter in merged.parameters():
                    parameter.copy_(parameter.to(getattr(torch, kind)))
        elif not is_before:
            quantize_base(merged, kind)
        return log_probs_of(merged, self.prompts)

    @contextlib.contextmanager
    def shifted(self, by: int, sides: str, *, is_rolled: bool) -> Iterator[None]:
        """Inside the block each layer has the factors `sides`, of "AB", of the layer `by` before it.

        is_rolled: the first have those of the last; else zeros.
        """
        rows = dict[str, list[Part]]()
        for part in self.parts:
            if part.scale is not None and part.layer >= 0 and len(part.module.lora_A):
                rows.setdefault(LAYER.sub(".*.", part.name, count=1), []).append(part)
        with contextlib.ExitStack() as stack:
            for row, side in itertools.product(rows.values(), sides):
                weights = [_factor(part, side) for part in row]
                values = [weight.data for weight in weights]
                for place, weight in enumerate(weights):
                    other = values[(place - by) % len(values)]
                    if not is_rolled and not 0 <= place - by < len(values):
                        other = torch.zeros_like(other)
                    if other.shape == weight.shape:
                        stack.callback(setattr, weight, "data", weight.data)
                        weight.data = other
            yield

    @contextlib.contextmanager
    def exchanged(self, one: str, other: str) -> Iterator[None]:
        """Inside the block the kinds `one` and `other` of each module have each other's factors."""
        with contextlib.ExitStack() as stack:
            for first, second in self.pairs(one, other):
                for side in "AB":
                    a, b = _factor(first, side), _factor(second, side)
                    stack.callback(setattr, a, "data", a.data)
                    stack.callback(setattr, b, "data", b.data)
                    a.data, b.data = b.data, a.data
            yield

    def pairs(self, one: str, other: str) -> list[tuple[Part, Part]]:
        """Parts of the two kinds in one module whose factors have equal shapes."""
        found, seconds = [], {}
        for part in self.parts:
            if part.scale is not None and len(part.module.lora_A) and part.kind == other:
                seconds[part.name.rpartition(".")[0]] = part
        for part in self.parts:
            second = seconds.get(part.name.rpartition(".")[0])
            if part.kind != one or second is None or not len(part.module.lora_A):
                continue
            if all(_factor(part, side).shape == _factor(second, side).shape for side in "AB"):
                found.append((part, second))
        return found


def _factor(part: Part, side: str) -> Any:
    return getattr(part.module, f"lora_{side}")["default"].weight


@torch.no_grad()
def log_probs_of(model: Any, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Float64 `[N]`: of each token but the first of each prompt, in one row."""
    inner = getattr(model, "get_base_model", lambda: model)()
    dtype = next(model.parameters()).dtype
    rows = dict[int, list[int]]()
    for place, prompt in enumerate(prompts):
        rows.setdefault(len(prompt), []).append(place)
    found = dict[int, Tensor]()
    for places in rows.values():  # of one length: nothing is padded
        ids = torch.tensor([list(prompts[place]) for place in places])
        with lift(dtype == torch.float64):
            logits = inner(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, :-1]
        logits = logits.to(torch.float64 if dtype == torch.float64 else torch.float32)
        each = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].double()
        found |= dict(zip(places, each, strict=True))
    return torch.cat([found[place] for place in range(len(prompts))])


def default_prompts(config: Any, tokenizer: Any) -> list[list[int]]:
    """Random tokens of the vocabulary, and sentences where there is a tokenizer."""
    text = config.get_text_config()
    most = int(text.vocab_size)
    left_out = set[int]()
    for holder in (config, text):
        for name, value in holder.to_dict().items():
            if name.endswith(("token_id", "token_index")) and isinstance(value, int):
                left_out.add(value)  # of images, for example, which have no meaning without them
    if tokenizer is not None:
        most = min(most, len(tokenizer))
        left_out |= {*tokenizer.all_special_ids}
    usable = torch.tensor([token for token in range(most) if token not in left_out])
    generator = torch.Generator().manual_seed(0)
    shape = (_NUM_PROMPTS, _PROMPT_TOKENS)
    prompts: list[list[int]] = usable[torch.randint(0, len(usable), shape, generator=generator)].tolist()
    if tokenizer is not None:
        for sentence in SENTENCES:
            ids = tokenizer(sentence).input_ids
            if len(ids) > 1:
                prompts.append(list(ids))
    return prompts


def prompts_in(file: Path, config: Any, tokenizer: Any) -> list[list[int]]:
    """The prompts in a file, one a line: a text, or a JSON list of token ids. Raises: UserError."""
    try:
        lines = read_text(file).splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"--prompts {file}", f"it cannot be read ({reason(error)})") from None
    found, most = [], int(config.get_text_config().vocab_size)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        ids: Any = None
        if line.lstrip().startswith("["):
            with contextlib.suppress(ValueError, json.JSONDecodeError):
                ids = parse_json(line)
        if not isinstance(ids, list):
            if tokenizer is None:
                rule = "it is a text, and there is no tokenizer beside the base"
                raise UserError(f"{file}, line {number}", rule, "give JSON lists of token ids, one a line")
            ids = list(tokenizer(line).input_ids)
        if not all(type(token) is int and 0 <= token < most for token in ids) or not 1 < len(ids) <= _MOST_TOKENS:
            rule = f"a prompt has 2 to {_MOST_TOKENS} tokens, each below vocab_size={most}"
            raise UserError(f"{file}, line {number}", rule)
        found.append(ids)
    if not found:
        raise UserError(f"--prompts {file}", "it holds no prompt")
    return found
