"""The LoRA configurations that PEFT's own tests use, read from its source distribution; none of its code is run.

Owns: finding them (every `LoraConfig(...)`, and every `(LoraConfig, {...})` of a list of cases), evaluating what is
literal, and the words for modules of toy models that stand for those of language models. Does not own: what is done
with them (`peers.adapters`).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peft

# Those whose cases are LoRA on what has a counterpart in a decoder.
FILES = [
    "custom_models",
    "decoder_models",
    "initialization",
    "lora_variants",
    "target_parameters",
    "trainable_tokens",
    "tuners_utils",
    "low_level_api",
    "mixed",
    "other",
    "helpers",
    "config",
    "integrations",
    "lora_conversion",
]
# What PEFT's tests of decoders are parametrised over, and further families with other names for the same parts.
DECODERS = [
    "opt",
    "gpt2",
    "gptj",
    "llama",
    "qwen2",
    "gemma3_text",
    "mistral",
    "bloom",
    "gpt_neox",
    "gpt_bigcode",
    "phi",
    "phi3",
    "qwen3",
    "gemma2",
    "cohere",
    "olmo2",
    "starcoder2",
    "glm4",
    "qwen3_moe",
    "mixtral",
]
# A module of a toy model -> that of a Llama, and of a GPT-2 where the toy is made like one.
_LLAMA = {
    "lin0": "q_proj",
    "lin1": "v_proj",
    "linear": "q_proj",
    "linear2": "down_proj",
    "lin": "o_proj",
    "emb": "embed_tokens",
    "embed": "embed_tokens",
    "embedding": "embed_tokens",
    "embed_token": "embed_tokens",
    "foo": "q_proj",
    "module": "self_attn",
    "bar": "v_proj",
    "bla": "k_proj",
    "oof": "o_proj",
    "baz": "down_proj",
}
# How PEFT's tests of patterns nest their toy; a caret means the whole name.
_NESTED = {
    "^module.module.foo": "^model.layers.1.self_attn.k_proj",
    "^module.foo": "^model.layers.1.self_attn.q_proj",
    "^foo": "^model.layers.0.self_attn.q_proj",
    "module.module.foo": "layers.1.self_attn.q_proj",
}
# Experts are in families that PEFT's tests name by the checkpoints they take.
_EXPERTS = {"feed_forward.experts": "llama4_text", "mlp.experts": "gpt_oss", "gate.weight": "mixtral"}
_GPT2 = {"conv1d": "c_attn", "emb": "wte", "lin0": "c_proj"}
# Words of toys that a language model has nothing for: convolutions, recurrences, towers, names made to confuse.
_NONE = re.compile(
    r"conv[0-9]d|conv$|conv0|mha|lstm|gru|my_module|layer[0-9]|to_[kqv]|proj_in|fc0|foo_|lora_head|trunk|vision"
    r"|classifier|score|other_layer|^l[12]\.|^module$|mod$|query|encoder|emb[0-9]|embed_in_2|linear1|relu|shared|^c$"
)
# In no row of ours, and in the vocabulary of a twin.
_NEVER = 251
_FEATURES = {"kasa_config", "velora_config", "monteclora_config", "use_bdlora", "corda_config", "arrow_config"}


@dataclass(frozen=True)
class Case:
    """A configuration on a model. name: `file:line`, with the family where it is tried on several."""

    name: str
    family: str
    options: dict[str, Any]


class _NotLiteral(Exception):
    """It is made of what only a run of the test would say."""


def source(folder: Path) -> Path:
    """The folder of the tests of the installed PEFT, from its source distribution, which is fetched once."""
    number = version("peft")
    tests = folder / f"peft-{number}" / "tests"
    if not tests.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        words = ["--quiet", "--no-deps", "--no-binary", "peft", "--no-build-isolation", "--dest", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", *words, f"peft=={number}"], check=True)
        with tarfile.open(folder / f"peft-{number}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return tests


def cases(tests: Path) -> tuple[list[Case], dict[str, int]]:
    """(the cases, why -> how many configurations were left out)."""
    found: list[Case] = []
    left = {"not literal": 0, "no counterpart in a decoder": 0, "the same again": 0}
    seen = set()
    for file in FILES:
        for line, given in _configurations((tests / f"test_{file}.py").read_text(encoding="utf-8")):
            try:
                options = {name: _value(node) for name, node in given.items()}
            except _NotLiteral:
                left["not literal"] += 1
                continue
            made = _on_a_decoder(options)
            if made is None:
                left["no counterpart in a decoder"] += 1
                continue
            key = repr(sorted(made.items(), key=str))
            if key in seen:
                left["the same again"] += 1
                continue
            seen.add(key)
            families = [_family_of_experts(made)]
            if file == "decoder_models" and made.get("target_modules") is None:
                families = [*DECODERS]
            for family in families:
                name = f"{file}:{line}"
                found.append(Case(f"{name} {family}".strip(), family, made))
    return found, left


def _configurations(text: str) -> Iterator[tuple[int, dict[str, ast.expr]]]:
    """(line, option -> expression) of each configuration in a file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LoraConfig":
            yield node.lineno, {str(word.arg): word.value for word in node.keywords}
        elif isinstance(node, ast.Tuple):
            for one, other in zip(node.elts, node.elts[1:], strict=False):
                if getattr(one, "id", "") == "LoraConfig" and isinstance(other, ast.Dict):
                    names = [ast.literal_eval(name) if name is not None else None for name in other.keys]
                    yield node.lineno, {str(name): value for name, value in zip(names, other.values, strict=True)}


def _value(node: ast.expr) -> Any:
    """Of literals, of members of peft's enumerations, and of its small configurations."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Config"):
        kind = getattr(peft, node.func.id, None) or getattr(peft.tuners.lora.config, node.func.id, None)
        if kind is not None and not node.args:
            return kind(**{str(word.arg): _value(word.value) for word in node.keywords})
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "TaskType":
        return str(getattr(peft.TaskType, node.attr).value)
    raise _NotLiteral


def _on_a_decoder(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options, in names of a decoder's modules; None: it has nothing for some of them."""
    if options.get("task_type", "CAUSAL_LM") != "CAUSAL_LM" or "None" in options:
        return None
    words = _GPT2 if "conv1d" in repr(options) else _LLAMA
    made: dict[str, Any] = {}
    for name, value in options.items():
        if name in ("target_modules", "modules_to_save", "exclude_modules", "target_parameters", "layers_pattern"):
            value = _renamed(value, words)
        elif name in ("rank_pattern", "alpha_pattern", "trainable_token_indices") and isinstance(value, dict):
            value = {_renamed(key, words): each for key, each in value.items()}
        if name == "alora_invocation_tokens":
            value = [min(token, _NEVER) for token in value]
            made["task_type"] = "CAUSAL_LM"  # without it PEFT warns, and runs the base
        if name not in _FEATURES and _NONE.search(" ".join(_texts(value))):
            return None
        made[name] = value
    return made


def _family_of_experts(options: Mapping[str, Any]) -> str:
    """The family whose experts `target_parameters` name; none: empty."""
    named = " ".join(options.get("target_parameters") or ())
    return next((family for words, family in _EXPERTS.items() if words in named), "")


def _renamed(value: Any, words: Mapping[str, str]) -> Any:
    if isinstance(value, str) and value in _NESTED:
        return _NESTED[value]
    if isinstance(value, str) and value != "all-linear":
        return re.sub(r"[A-Za-z_][A-Za-z_0-9]*", lambda found: words.get(found[0], found[0]), value)
    if isinstance(value, list | tuple):
        return [_renamed(each, words) for each in value]
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [str(key) for key in value]
    if isinstance(value, list):
        return [str(each) for each in value]
    return []
