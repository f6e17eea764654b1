"""unsloth's and TRL's scripts and notebooks, read as a syntax tree. Nothing of them is ever run.

Owns: which calls say something of a training, and their arguments as values: numbers, text, lists, and names that were
given such a value before. Does not own: what the arguments mean (`unsloth.py`, `trl.py`).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshlora.run.config.foreign.fact import Trainer
from meshlora.run.config.foreign.trainers import TRAINERS
from meshlora_extra.importing.draft import Recipe
from meshlora_ground.errors import UserError
from meshlora_ground.reading import parse_json

# Calls whose arguments are keys of the recipe.
_CALLS = frozenset(
    (
        *("from_pretrained", "get_peft_model", "LoraConfig", "BitsAndBytesConfig", "TrainingArguments"),
        *("SFTConfig", "SFTTrainer", "DPOConfig", "DPOTrainer", "KTOConfig", "KTOTrainer", "ORPOConfig", "ORPOTrainer"),
        *("GRPOConfig", "GRPOTrainer", "UnslothTrainingArguments", "UnslothTrainer"),
    )
)
_TRAINER = re.compile(r"(?:(SFT|DPO|KTO|ORPO|GRPO)|Unsloth)(?:Trainer|Config|TrainingArguments)|TrainingArguments")
# Arguments that are objects of the script, read elsewhere or of no effect on numbers.
_OBJECTS = frozenset(
    (
        *("model", "tokenizer", "processing_class", "train_dataset", "eval_dataset", "data_collator", "args"),
        *("formatting_func", "callbacks", "peft_config", "config", "quantization_config", "device_map", "token"),
        *("compute_metrics", "optimizers", "attn_implementation", "instruction_part", "response_part"),
    )
)
_OPERATORS: dict[type, Any] = {ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv}
# Lines of a notebook that are no Python.
_MAGIC = re.compile(r"^\s*[!%].*$", re.MULTILINE)


class _Unknown(Exception):
    """A value that only running the script would give."""


@dataclass
class _Seen:
    """What the calls of a script say.

    Attributes:
        names: variable -> the value that it was given last. given: argument -> value. lost: those that are computed.
        datasets: name -> the arguments of its `load_dataset`. calls: names of all calls.
    """

    names: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    lost: list[tuple[str, Any, str]] = field(default_factory=list)
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)


def read_python(file: Path, text: str, trainer: Trainer | None) -> Recipe:
    """The recipe of a script, or of a notebook's cells. Raises: UserError: no Python, or none of a training."""
    code = _cells(file, text) if file.suffix == ".ipynb" else text
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{file}", f"it is no Python that can be read{line}", "give a script or notebook") from None
    seen = _Seen()
    for node in _in_order(tree):
        _see(seen, node)
    trainers = [name for name in seen.calls if _TRAINER.fullmatch(name)]
    if not any(name.endswith("Trainer") for name in trainers):
        rule = "no call of an SFTTrainer, DPOTrainer, KTOTrainer or ORPOTrainer stands in it"
        raise UserError(f"{file}", rule, "it is read, never run; write the arguments as a YAML for TRL")
    is_unsloth = "get_peft_model" in seen.calls and re.search(r"\bunsloth\b", code) is not None
    whose = trainer or TRAINERS["unsloth" if is_unsloth else "trl"]
    return _recipe(file, whose, seen, trainers)


def _recipe(file: Path, whose: Trainer, seen: _Seen, trainers: list[str]) -> Recipe:
    given = dict(seen.given)
    for call in ("train_on_responses_only", "get_chat_template"):
        given.setdefault(call, call in seen.calls or None)
    if "LoraConfig" in seen.calls:
        given["use_peft"] = True
    given["config_class"] = next((name for name in trainers if name.endswith("Config")), "TrainingArguments")
    named = [found[1] for name in trainers if (found := _TRAINER.fullmatch(name)) is not None and found[1]]
    method = named[0].lower() if named else "sft"
    for ours in ("train", "eval"):
        entry = seen.datasets.get(str(given.pop(f"{ours}_dataset.name", "")))
        if entry is None and ours == "train" and seen.datasets:
            entry = next(iter(seen.datasets.values()))
        if entry is not None:
            given[f"load_dataset.{ours}"] = entry
    notes = []
    if len(set(trainers)) > 2:
        notes.append(f"the script names {', '.join(dict.fromkeys(trainers))}: arguments of the first call win")
    return Recipe(file, whose, given, method=method, notes=tuple(notes), lost=tuple(seen.lost))


def _cells(file: Path, text: str) -> str:
    """The code of a notebook."""
    try:
        tree = parse_json(text)
        cells = [cell for cell in tree["cells"] if cell["cell_type"] == "code"]
        sources = [cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}", f"it is no notebook ({type(error).__name__})", "give a script or notebook") from None
    return "\n\n".join(_MAGIC.sub("", source) for source in sources)


def _in_order(tree: ast.Module) -> Iterator[ast.AST]:
    """The assignments and calls of a script by their lines: of the module, and of functions in which it trains."""
    found = [node for node in _within(tree) if isinstance(node, ast.Assign | ast.Call)]
    # A call within an assignment is seen before it.
    yield from sorted(found, key=lambda node: (node.lineno, isinstance(node, ast.Assign), node.col_offset))


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, without those of functions in which nothing is trained."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not _trains(child):
            continue
        yield child
        yield from _within(child)


def _trains(function: ast.AST) -> bool:
    calls = [_last_name(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(name.endswith("Trainer") and _TRAINER.fullmatch(name) for name in calls)


def _see(seen: _Seen, node: ast.AST) -> None:
    if isinstance(node, ast.Assign):
        _assign(seen, node)
    elif isinstance(node, ast.Call):
        name = _last_name(node.func)
        seen.calls.append(name)
        if name in _CALLS:
            _arguments(seen, name, node)
        elif name == "get_chat_template":
            for keyword in node.keywords:
                if keyword.arg == "chat_template":
                    _keep(seen, "get_chat_template", keyword.value)


def _assign(seen: _Seen, node: ast.Assign) -> None:
    """Remember a plain value, and which dataset a name is."""
    for target in node.targets:
        if not isinstance(target, ast.Name):
            continue
        try:
            seen.names[target.id] = _value(node.value, seen.names)
        except _Unknown:
            seen.names.pop(target.id, None)
        if (entry := _dataset(seen, node.value)) is not None:
            seen.datasets[target.id] = entry


def _dataset(seen: _Seen, node: ast.expr) -> dict[str, Any] | None:
    """The arguments of the `load_dataset` that an expression comes from, whatever maps it behind."""
    while True:
        if isinstance(node, ast.Call) and _last_name(node.func) == "load_dataset":
            return _of_load(node, seen.names)
        if isinstance(node, ast.Name):
            return seen.datasets.get(node.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value  # `.map(...)`, `.shuffle(...)`
        elif isinstance(node, ast.Call) and node.args:
            node = node.args[0]  # `standardize_sharegpt(dataset)`
        elif isinstance(node, ast.Subscript):
            inner = _dataset(seen, node.value)
            if inner is not None and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                return {**inner, "split": node.slice.value}
            return inner
        else:
            return None


def _of_load(node: ast.Call, names: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, argument in zip(("path", "name"), node.args, strict=False):
        found[name] = _or_words(argument, names)
    for keyword in node.keywords:
        if keyword.arg in ("path", "name", "split", "data_files", "revision"):
            found[keyword.arg] = _or_words(keyword.value, names)
    return found


def _or_words(node: ast.expr, names: Mapping[str, Any]) -> Any:
    try:
        return _value(node, names)
    except _Unknown:
        return ast.unparse(node)[:200]


def _arguments(seen: _Seen, call: str, node: ast.Call) -> None:
    """Keep the arguments of a call; of two calls the first wins."""
    if call == "from_pretrained" and (node.args or node.keywords) and "model_name" not in seen.given:
        if _last_name(getattr(node.func, "value", node.func)).endswith(("Tokenizer", "Processor")):
            return
        for argument in node.args[:1]:
            _keep(seen, "model_name", argument)
    elif call == "from_pretrained":
        return
    for keyword in node.keywords:
        if keyword.arg is None:
            continue
        name = {"pretrained_model_name_or_path": "model_name"}.get(keyword.arg, keyword.arg)
        if name in ("train_dataset", "eval_dataset"):
            entry = _dataset(seen, keyword.value)
            if entry is not None and f"{name}.name" not in seen.given:
                seen.given[f"{name}.name"], seen.datasets[name] = name, entry
        elif call.endswith("Trainer") and name == "model" and isinstance(keyword.value, ast.Constant):
            _keep(seen, "model_name", keyword.value)
        elif name not in _OBJECTS and not name.startswith("_"):
            _keep(seen, name, keyword.value)


def _keep(seen: _Seen, name: str, node: ast.expr) -> None:
    if name in seen.given or any(lost[0] == name for lost in seen.lost):
        return
    try:
        seen.given[name] = _value(node, seen.names)
    except _Unknown:
        text = ast.unparse(node)
        if name in ("bf16", "fp16"):  # `is_bfloat16_supported()`: bf16 wherever the GPU has it
            seen.given[name] = name == "bf16"
        elif name == "dtype" or name == "torch_dtype":
            seen.given[name] = None
        else:
            seen.lost.append((name, text[:200], "the script computes it; it is read, not run"))


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """A plain value. Raises: _Unknown: only running the script would give it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each, names) for each in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {
            _value(key, names): _value(value, names) for key, value in zip(node.keys, node.values, strict=True) if key
        }
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand, names)
        if isinstance(value, int | float):
            return -value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, names), _value(node.right, names)
        are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if are_numbers and abs(left) < 1e12 and 0 < abs(right) < 1e12:
            return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Attribute) and _last_name(node.value) == "torch":
        return node.attr  # a dtype
    raise _Unknown


def _last_name(node: ast.AST) -> str:
    """The last part of a dotted name; "" of another expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
