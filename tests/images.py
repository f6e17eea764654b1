"""Folders of processors with the tokenizer of the small base, and small pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from meshlora.reading.processor import load_processor
from meshlora_judge.twin import twin_config

BASE = Path(__file__).parents[1] / "examples" / "tiny_base"
# Content as text or as parts; every image is one placeholder. The assistant's turns are marked.
_TURN = (
    "{%- macro parts(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}{%- for part in content -%}"
    "{{- part.text if part.type == 'text' else 'PLACEHOLDER' -}}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
TEMPLATE = _TURN + (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{- '### assistant\n' -}}"
    "{%- generation -%}{{- parts(m.content) + eos_token -}}{%- endgeneration -%}{{- '\n' -}}"
    "{%- else -%}{{- '### ' + m.role + '\n' + parts(m.content) + '\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '### assistant\n' -}}{%- endif -%}"
)
# model_type -> (tokens by their names in the tokenizer, what the template writes for an image, the image processor)
KINDS: dict[str, tuple[dict[str, str], str, dict[str, Any]]] = {
    "qwen3_vl": (
        {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 64, "longest_edge": 1024},
        },
    ),
    "gemma3": (
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "<start_of_image>",
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}, "do_pan_and_scan": None},
    ),
}


def write_processor(folder: Path, model_type: str) -> Path:
    """The files of a processor and its tokenizer; none of the model."""
    tokens, placeholder, image_processor = KINDS[model_type]
    tokenizer = AutoTokenizer.from_pretrained(BASE, extra_special_tokens=tokens, local_files_only=True)
    tokenizer.add_tokens(list(tokens.values()), special_tokens=True)
    tokenizer.chat_template = TEMPLATE.replace("PLACEHOLDER", placeholder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))
    if model_type == "gemma3":
        (folder / "processor_config.json").write_text(
            json.dumps({"processor_class": "Gemma3Processor", "image_seq_length": 4})
        )
    return folder


def write_model(folder: Path, dtype: torch.dtype) -> Path:
    """A tiny Qwen3-VL with its processor."""
    write_processor(folder, "qwen3_vl")
    config = twin_config("qwen3_vl", tp=2, vocab_size=2056)
    tokenizer = load_processor(folder, config).tokenizer
    config.vision_config.patch_size = 4
    config.text_config.vocab_size = 2056
    for name in ("image_token", "video_token", "vision_start_token", "vision_end_token"):
        setattr(config, f"{name}_id", tokenizer.convert_tokens_to_ids(getattr(tokenizer, name)))
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def write_pictures(folder: Path) -> list[str]:
    """Three small pictures of unequal size, in three formats."""
    generator = np.random.default_rng(0)
    names = ["wide.png", "small.jpg", "tall.webp"]
    for name, size in zip(names, [(20, 30), (12, 12), (40, 16)], strict=True):
        Image.fromarray(generator.integers(0, 255, (*size, 3), dtype=np.uint8)).save(folder / name)
    return names


def part(word: str) -> dict[str, str]:
    """A part of a message: an image if `word` is a file's name, else text."""
    kind = "image" if word.endswith((".png", ".jpg", ".webp")) else "text"
    return {"type": kind, kind: word}


def conversation(*words: str, answer: str = "a house") -> dict[str, Any]:
    """A row of a data file: a question of parts, and its answer."""
    question = {"role": "user", "content": [part(word) for word in words]}
    return {"messages": [question, {"role": "assistant", "content": answer}]}


def write_rows(file: Path, *rows: dict[str, Any]) -> Path:
    """A JSONL file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
