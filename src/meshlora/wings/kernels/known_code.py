"""Code of transformers that is known here: recognised by a digest of its statements.

Owns: the digest, and another function inside of decorators. Does not own: which code is known, and what is done in its
place (`wings.kernels.rms_norm`, `wings.kernels.rotary`).

transformers copies a function into each of its families, under different names, and may change it there or everywhere:
the comparison is with a digest kept here, not with the installed code.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from types import CellType, CodeType, FunctionType
from typing import Any


def digest(function: Any, *, may_be_decorated: bool = False) -> str:
    """Digest of the source statements of `function`, but for its docstring, and of the names of its arguments; "" if
    these cannot be read, or there is no such function.

    may_be_decorated: by what returned the function itself, or was taken off by `inspect.unwrap`: else its code would be
    another function's.
    """
    code = getattr(function, "__code__", None)
    return _digest(code, may_be_decorated) if isinstance(code, CodeType) else ""


@functools.cache
def _digest(code: CodeType, may_be_decorated: bool) -> str:
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(code))).body
    except (OSError, SyntaxError, ValueError):
        return ""
    # Of a lambda the source is the statement around it.
    if not isinstance(function, ast.FunctionDef) or (function.decorator_list and not may_be_decorated):
        return ""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    statements = list(map(ast.unparse, body))
    return hashlib.sha256("\n".join([*code.co_varnames[: code.co_argcount], *statements]).encode()).hexdigest()[:16]


def decorated_as(function: Any, inner: Any) -> Any:
    """`inner` inside of the decorators of `function`; None where one holds what it wraps in a way that is not known."""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        return inner
    inside = decorated_as(wrapped, inner)
    cells = getattr(function, "__closure__", None) or ()
    held = [cell.cell_contents is wrapped for cell in cells]
    if inside is None or sum(held) != 1:
        return None
    # A decorator holds what it wraps in a cell: a copy of it gets another one, and the original stays as it is.
    closure = tuple(CellType(inside) if is_it else cell for is_it, cell in zip(held, cells, strict=True))
    own = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    own.__kwdefaults__, own.__wrapped__ = function.__kwdefaults__, inside  # type: ignore[attr-defined]
    return own
