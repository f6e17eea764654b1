"""The beam search of microsoft/LoRA: the tokens that its own code gave, recorded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from meshlora.run.config.run_file import GenerateConfig
from meshlora.run.decoding import ends_of, generate, texts_of
from meshlora.run.gpt2_beam import gpt2_beam
from meshlora_ground.errors import UnsupportedError

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "official_beams.json").read_text())
BASE = str(Path(__file__).parents[2] / "examples" / "tiny_base")


def weights(name: str, shape: tuple[int, ...], index: int) -> torch.Tensor:
    """As the model of the record had them: the same everywhere, with beams that end at unequal lengths."""
    numbers = torch.arange(math.prod(shape), dtype=torch.float64)
    x = torch.sin(numbers * (0.37 + 0.11 * index) + index) + 0.5 * torch.cos(numbers**1.5 * (0.05 + 0.01 * index))
    x = x.view(shape)
    if "ln_" in name:
        return 1 + 0.1 * x if name.endswith("weight") else 0.1 * x
    return 0.1 * x if name.endswith("bias") else x * (0.9 if "wte" in name else 0.35)


@pytest.fixture(scope="module")
def network() -> GPT2LMHeadModel:
    sizes = {"vocab_size": 40, "n_positions": 96, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    parameters = dict(model.transformer.named_parameters())
    with torch.no_grad():
        for index, name in enumerate(sorted(parameters)):
            parameters[name].copy_(weights(name, tuple(parameters[name].shape), index))
    return model


def searched(network: Any, contexts: list[list[int]], run: dict[str, Any]) -> list[list[int]]:
    length = max(map(len, contexts))
    options = GenerateConfig(
        max_new_tokens=run["eval_len"],
        num_beams=run["beam"],
        length_penalty=run["length_penalty"],
        no_repeat_ngram_size=run["no_repeat_ngram_size"],
        search="gpt2_beam",
    )
    ids = torch.tensor([[0] * (length - len(row)) + row for row in contexts])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in contexts])
    with torch.no_grad():
        found = gpt2_beam(network, ids, mask, options, ends=RECORDED["eos"])
    return [row + [0] * (run["eval_len"] - len(row)) for row in found]


@pytest.mark.parametrize("run", RECORDED["runs"], ids=lambda run: f"{run['beam']}-{run['no_repeat_ngram_size']}")
def test_beams_are_those_of_microsofts_own_search(run: dict[str, Any], network: GPT2LMHeadModel) -> None:
    """Prompts together, with padding, as theirs one by one: in a batch theirs continues the wrong prompt."""
    assert searched(network, RECORDED["contexts"], run) == run["predict"]
    assert [searched(network, [context], run)[0] for context in RECORDED["contexts"]] == run["predict"]


def test_names_of_the_prompt_may_be_copied(network: GPT2LMHeadModel) -> None:
    """A ban over prompt and text, as transformers has it, gives another text."""
    banned = {"beam": 4, "eval_len": 3, "length_penalty": 1.0, "no_repeat_ngram_size": 2}
    prompt = [31, 31, 17, 11]
    (first,) = searched(network, [prompt], banned | {"no_repeat_ngram_size": 0})
    copied = [*first[:2], *prompt]
    (found,) = searched(network, [copied], banned)
    assert found == searched(network, [copied], banned | {"no_repeat_ngram_size": 0})[0]


def test_padding_needs_positions(network: GPT2LMHeadModel) -> None:
    class WithoutPositions:
        def forward(self, input_ids: torch.Tensor) -> None: ...

    with pytest.raises(UnsupportedError, match=r"batch_size: 1"):
        searched(WithoutPositions(), [[1, 2], [3]], RECORDED["runs"][0])


def test_search_of_the_options_is_used() -> None:
    words = {"max_new_tokens": 12, "num_beams": 3, "no_repeat_ngram_size": 1}
    prompts = ["def add(a, b):\n    return a"]
    texts = [
        list(generate(BASE, prompts, options=GenerateConfig(**words, search=search), dtype="float64"))
        for search in ("transformers", "gpt2_beam")
    ]
    assert texts[0] != texts[1]


def test_text_ends_at_what_is_given() -> None:
    """Its token ends the search, 628 for two newlines in GPT-2; what other tokens spell is cut."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    spelt = [tokenizer(text, add_special_tokens=False).input_ids for text in ("\n", "self.x")]
    assert (len(spelt[0]), len(spelt[1]) > 1) == (1, True)
    options = GenerateConfig(stop=["\n", "self.x"])
    assert ends_of(tokenizer, options) == [tokenizer.eos_token_id, spelt[0][0]]
    rows = [tokenizer(text, add_special_tokens=False).input_ids for text in ("a\nb", "a = self.x", "c")]
    assert texts_of(rows, tokenizer, options) == ["a", "a = ", "c"]
    (whole,) = generate(BASE, ["def add(a, b):"], options=GenerateConfig(max_new_tokens=24))
    (cut,) = generate(BASE, ["def add(a, b):"], options=GenerateConfig(max_new_tokens=24, stop=[whole[3:5]]))
    assert cut == whole.partition(whole[3:5])[0] != whole
