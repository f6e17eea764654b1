"""Code of transformers that is known here: recognised by a digest of its statements.

Owns: the digest. Does not own: which code is known, and what is done in its place (`layers.rms_norm`, `layers.rotary`).

transformers copies a function into each of its families, under different names, and may change it there or everywhere:
the comparison is with a digest kept here, not with the installed code.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from types import CodeType


@functools.cache
def digest(code: CodeType, *, may_be_decorated: bool = False) -> str:
    """Digest of the source statements of `code`, but for its docstring, and of the names of its arguments; "" if these
    cannot be read.

    may_be_decorated: by what returned the function itself, as otherwise `code` would be another function's.
    """
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(code))).body
    except (OSError, SyntaxError, ValueError):
        return ""
    if not isinstance(function, ast.FunctionDef) or (function.decorator_list and not may_be_decorated):
        return ""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    statements = [ast.unparse(statement) for statement in body]
    return hashlib.sha256("\n".join([*code.co_varnames[: code.co_argcount], *statements]).encode()).hexdigest()[:16]
