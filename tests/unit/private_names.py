"""Finding private names of torch, transformers and PEFT in source text: for tests of where they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

import torch
from peft.tuners import tuners_utils
from peft.tuners.lora import layer
from torch import Tensor, nn
from torch.distributed import Backend, ProcessGroup, distributed_c10d
from transformers import PretrainedConfig, PreTrainedModel

LIBRARIES = ("torch", "transformers", "peft")
# Internal without an underscore: their first lines say so, or torch has them for its own tests.
INTERNAL = ("peft.utils.transformers_weight_conversion", "torch.testing")
# Python's own, by the name before the dot.
_OF_PYTHON = ("os.", "sys.", "server._")
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_OPERATOR = re.compile(r"(aten|prims|c10d|_\w+)::_\w+")
_BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "replaced", "mock.patch.object"}


@cache
def _of_libraries() -> frozenset[str]:
    """Private names on what our code handles most: names of ours may be the same, on objects of ours."""
    things: list[object] = [nn.Module(), Tensor, torch.UntypedStorage, torch.ops.aten.mm.default, torch, torch._C]
    things += [PreTrainedModel, PretrainedConfig(), ProcessGroup, Backend, distributed_c10d, tuners_utils, layer]
    return frozenset(name for thing in things for name in dir(thing) if _PRIVATE.fullmatch(name))


def defined(trees: Iterable[ast.Module]) -> set[str]:
    """Private names that `trees` define: functions, classes, variables, attributes of `self` and `cls`."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if _PRIVATE.fullmatch(name)}


def private_names(tree: ast.Module, ours: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of each private name of a library in `tree`. ours: what `defined` finds in the whole product."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if _is_of_library(module):
                for path in (f"{module}.{alias.name}" for alias in names):
                    if _is_private(path):
                        yield node.lineno, path
            case ast.Import(names=names):
                for alias in names:
                    if _is_of_library(alias.name) and _is_private(alias.name):
                        yield node.lineno, alias.name
            case ast.Attribute(value=owner, attr=name) if _PRIVATE.fullmatch(name):
                if _is_foreign(name, ast.unparse(owner), ours):
                    yield node.lineno, f"{ast.unparse(owner)}.{name}"
            case ast.Constant(value=str(text)):
                is_path = _is_of_library(text) and re.fullmatch(r"[\w.]+", text) and _is_private(text)
                if is_path or _OPERATOR.fullmatch(text) or (text in _of_libraries() and text not in ours):
                    yield node.lineno, text
            case ast.Call(func=function, args=[_, ast.Constant(value=str(text)), *_]):
                if ast.unparse(function) in _BY_NAME and _PRIVATE.fullmatch(text) and text not in ours:
                    yield node.lineno, text
            case ast.ClassDef(bases=[_, *_], body=body):
                for method in body:
                    if isinstance(method, ast.FunctionDef) and method.name in _of_libraries():
                        yield method.lineno, method.name


def _is_foreign(name: str, owner: str, ours: set[str]) -> bool:
    if f"{owner}.{name}".startswith(_OF_PYTHON):
        return False
    return name not in ours or (name in _of_libraries() and owner not in ("self", "cls"))


def _is_of_library(path: str) -> bool:
    return path.partition(".")[0] in LIBRARIES


def _is_private(path: str) -> bool:
    return any(part.startswith("_") for part in path.split(".")) or path.startswith(INTERNAL)
