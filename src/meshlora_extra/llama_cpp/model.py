"""A whole model as a GGUF file, as convert_hf_to_gguf.py of llama.cpp writes it: weights, sizes and tokenizer.

Owns: the metadata of a model, and which tokenizers llama.cpp splits as transformers does. An adapter is merged before
(`meshlora merge`).
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from meshlora.loading.blueprint import Blueprint
from meshlora.model.stream import FLOATS
from meshlora.model.weights import Source
from meshlora.reading.tokenizer import load_tokenizer
from meshlora_extra.llama_cpp.files import Entry, Names, check_new, library, write_gguf
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.files import read_json

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How byte-level BPE splits text before its merges -> llama.cpp's name of that.
_SPLITS = {_WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe", _WORDS + r"\p{N}" + _REST: "qwen2"}
_ROPE = ("default", "linear", "llama3", "yarn")
_FILE_TYPES = {torch.bfloat16: "MOSTLY_BF16", torch.float16: "MOSTLY_F16"}
_MOST_BYTES = 2**27  # of a tokenizer.json


def export_model(out: Path, blueprint: Blueprint, *, trust_remote_code: bool = False) -> int:
    """Write the checkpoint of `blueprint` as `out`; the number of tensors.

    Raises:
        UserError: files missing or damaged; `out` exists. UnsupportedError: a family or tokenizer that llama.cpp would
            compute otherwise, or weights in few bits.
    """
    check_new(out)
    config, folder = blueprint.config, blueprint.source
    assert folder is not None
    names = Names(config)
    if blueprint.packing:
        raise UnsupportedError(
            f"{folder}", "its weights are in few bits of another kind", "merge with --dtype bfloat16"
        )
    blueprint.check_weights()
    split = _split_of(folder)
    source = blueprint.weights()
    entries = {}
    for name, parameter in blueprint.model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # llama.cpp takes the embedding
        dtype = FLOATS[source.stored[name].tensors[0].dtype]
        entries[names.of(name)] = Entry(tuple(parameter.shape), dtype, functools.partial(_read, source, names, name))
    factors = _rope_factors(config, names.head_dim)
    if factors is not None:
        entries["rope_freqs.weight"] = Entry(tuple(factors.shape), factors.dtype, lambda: factors)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)

    def describe(writer: Any) -> None:
        writer.add_type(library().GGUFType.MODEL)
        writer.add_name(folder.name)
        kinds = {entry.dtype for entry in entries.values() if len(entry.shape) > 1}
        if len(kinds) == 1:  # what `ollama list` shows
            writer.add_file_type(library().LlamaFileType[_FILE_TYPES.get(kinds.pop(), "ALL_F32")])
        _add_sizes(writer, config, names.head_dim)
        _add_tokenizer(writer, tokenizer, folder, split, config.vocab_size)

    write_gguf(out, names, entries, describe, base="")
    return len(entries)


def _read(source: Source, names: Names, name: str) -> Tensor:
    return names.in_order(name, source.read(name))


def _add_sizes(writer: Any, config: PretrainedConfig, head_dim: int) -> None:
    """What llama.cpp builds the model from."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope, scaling = config.rope_parameters, library().RopeScalingType
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE:
        raise UnsupportedError(f"rope_type={kind}", f"GGUF files are written with {', '.join(_ROPE)}")
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(scaling.LINEAR if kind == "linear" else scaling.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        length = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(length)


def _rope_factors(config: PretrainedConfig, head_dim: int) -> Tensor | None:
    """Llama 3's divisors of the frequencies, `[head_dim/2]`, which llama.cpp reads as a tensor; None of others."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    found = []
    for wavelength in (2 * math.pi / frequencies).tolist():
        smooth = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(found, dtype=torch.float32)


def _split_of(folder: Path) -> str:
    """llama.cpp's name of how the tokenizer in `folder` splits text before its merges."""
    file = folder / "tokenizer.json"
    stored = read_json(file, most_bytes=_MOST_BYTES)
    steps = stored.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    kinds, last = [step.get("type") for step in steps], steps[-1]
    found = None
    if stored["model"].get("type") == "BPE" and last.get("type") == "ByteLevel" and not last["add_prefix_space"]:
        if kinds == ["ByteLevel"] and last["use_regex"]:
            found = "gpt-2"
        elif kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and last["use_regex"]:
            found = "smollm"
        elif kinds == ["Split", "ByteLevel"] and not last["use_regex"]:
            found = _SPLITS.get(steps[0]["pattern"].get("Regex", ""))
    if found is None or (found == "llama-bpe") != bool(stored["model"].get("ignore_merges")):
        given = f"{file}: {json.dumps(steps):.80}"
        rule = "it is not known to be one that llama.cpp splits alike"
        way_out = "convert_hf_to_gguf.py of llama.cpp may know it; an adapter alone needs no tokenizer"
        raise UnsupportedError(given, rule, way_out)
    return found


def _add_tokenizer(writer: Any, tokenizer: Any, folder: Path, split: str, number: int) -> None:
    gguf, added = library(), tokenizer.added_tokens_decoder
    by_id = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    tokens, kinds = [], []
    for id_ in range(number):
        kind = gguf.TokenType.NORMAL
        if id_ not in by_id:
            kind = gguf.TokenType.UNUSED
        elif id_ in added:
            kind = gguf.TokenType.CONTROL if added[id_].special else gguf.TokenType.USER_DEFINED
        tokens.append(by_id.get(id_, f"[PAD{id_}]"))
        kinds.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=number)
    first = tokenizer("a").input_ids[:1]
    special.add_special_token = {"bos": tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]}
    special.add_to_gguf(writer, quiet=True)
