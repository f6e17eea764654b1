"""Tokenizers and records for the tests of tokenisation: a small byte-level BPE, chat templates, pairs, chats."""

from __future__ import annotations

import functools
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from meshlora.reading.records import Record
from meshlora_ground.dataset import TokenizedDataset

EOS, BOS, START, END = "<eos>", "<bos>", "<|start|>", "<|end|>"
CORPUS = ["the house is near the river and the city centre", "name : The Mill | food : English", "user assistant"]

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}{{ '<|start|>tools\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}{{ '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@functools.cache
def serialized() -> str:
    """A byte-level BPE like GPT-2's, small; byte-level ones trim spaces from their offsets unless told otherwise."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[EOS, BOS, START, END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    return backend.to_str()


def make_tokenizer(*, chat_template: str | None = None, eos: str | None = EOS, adds_bos: bool = False) -> Any:
    backend = tokenizers.Tokenizer.from_str(serialized())
    if adds_bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=BOS, pad_token=END)
    tokenizer.chat_template = chat_template
    return tokenizer


def pair(prompt: str, completion: str, origin: str = "a.txt:1") -> Record:
    return Record(prompt=prompt, completion=completion, origin=origin)


def chat(*turns: tuple[str, str], origin: str = "a.jsonl:1") -> Record:
    return Record(messages=tuple({"role": role, "content": content} for role, content in turns), origin=origin)


def trained_text(dataset: TokenizedDataset, tokenizer: Any, index: int = 0) -> str:
    sequence = dataset[index]
    return tokenizer.decode(sequence.input_ids[sequence.is_trained])


TWO_TURNS = chat(("system", "be kind"), ("user", "hi"), ("assistant", "hello"), ("user", "and?"), ("assistant", "bye"))
