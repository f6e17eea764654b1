"""Generated faults: small changes of the product's functions, made from their syntax trees.

Owns: the possible changes of a file, their names, and injecting one: functions run the changed code during a block. A
name is `train/gradsync.py:92:15-40:operator`: file, line, columns, kind of change; `--mutation` takes it.
Does not own: sampling them and evaluating verdicts (`scripts/generate_faults.py`).
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from meshlora.verify.faults.fault import Mutation
from meshlora_ground.errors import UserError
from meshlora_ground.versions import OWN, file_of, name_of, own_files


def _both_ways(*pairs: tuple[Any, Any]) -> dict[Any, Any]:
    found = dict[Any, Any]()
    for one, other in pairs:
        found |= {one: other, other: one}
    return found


_COMPARED = _both_ways(
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)
)
_COMPUTED = _both_ways((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr))
_COMPUTED |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
_JOINED = _both_ways((ast.And, ast.Or))
_NAMED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_AXES = {"tp": "dp", "dp": "tp", "cp": "tp", "ep": "etp", "etp": "ep", "edp": "dp", "rank": "size"}
# What counts some of what the other counts all of.
_COUNTED = {"updates": "step"}
_AS_THE_FIRST = ast.parse("(lambda parts: parts[:1] * len(parts))", mode="eval").body
# Changes that mostly preserve shapes and types and so do not crash: the silent faults are among them.
KEEPING = (
    *("compare", "operator", "lost", "bool", "unary", "condition", "constant", "axis", "name", "dropped"),
    *("other-end", "as-first", "always", "counted", "unset", "threshold", "but-last"),
)
# Functions whose arguments are only messages or delays.
_SAYING = {"say", "doing", "debug", "info", "warning", "warn", "print", "register_for_cleanup"}

Change = Callable[[Any], ast.AST | None]


class NotPutInError(UserError):
    """A change that cannot be injected into a running process: no verdict."""


@dataclass(frozen=True)
class Generated(Mutation):
    """A fault made from the syntax tree of `file`.

    statement: first line of the enclosing statement. before, after: the changed expression.
    """

    file: str = ""
    line: int = 0
    statement: str = ""
    before: str = ""
    after: str = ""

    @property
    def is_keeping(self) -> bool:
        """Whether it mostly preserves shapes and types."""
        return self.name.rpartition(":")[2] in KEEPING

    def source(self) -> str:
        """The source of the file with the fault."""
        return ast.unparse(_changed(self))

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Inject the fault while the block runs. Raises: NotPutInError: no function has the line, or other closures."""
        functions = []
        codes = {_place(c): c for c in _codes(compile(_changed(self), str(file_of(self.file)), "exec"))}
        for function in _functions(self.file):
            code = function.__code__
            if not _holds(code, self.line):
                continue
            changed = codes.get(_place(code), code)
            if code.co_freevars != changed.co_freevars:  # Python refuses such a code
                raise NotPutInError(f"--mutation {self.name}", "its function would need other variables around it")
            functions.append((function, code, changed))
        if not functions:
            raise NotPutInError(f"--mutation {self.name}", "no function has this line")
        try:
            for function, _, changed in functions:
                function.__code__ = changed  # wherever it is held: no name is looked up
            _forget()
            yield
        finally:
            for function, code, _ in functions:
                function.__code__ = code
            _forget()


def generated(name: str) -> Generated:
    """The fault of that name. Raises: UserError: there is none."""
    file = name.partition(":")[0]
    if file in files():
        for fault in faults_of(file):
            if fault.name == name:
                return fault
    raise UserError(f"--mutation {name}", "no such change can be made", "see scripts/generate_faults.py --list")


def files() -> list[str]:
    """The source files, as in the names of faults."""
    return sorted(map(name_of, own_files()))


@functools.cache
def faults_of(file: str) -> tuple[Generated, ...]:
    """All faults of a file (path relative to the package), in line order."""
    found = []
    for node, statement, operator, change in _changes(_tree(file)):
        after = change(copy.deepcopy(node))
        name, before, words = _name(file, node, operator), ast.unparse(node), "(left out)"
        if after is not None:
            words = ast.unparse(after)
        line = ast.unparse(statement).partition("\n")[0]
        fault = Generated(name, f"{before} stays as it is", frozenset(), (), file, node.lineno, line, before, words)
        if fault.before != fault.after:  # equal arguments may change places
            found.append(fault)
    return tuple(found)


def _name(file: str, node: Any, operator: str) -> str:
    return f"{file}:{node.lineno}:{node.col_offset}-{node.end_col_offset}:{operator}"


def reached_lines(run: Callable[[], None]) -> set[tuple[str, int]]:
    """Call `run`; returns the (file, line) of the product executed in this thread."""
    seen: set[tuple[str, int]] = set()
    names = {str(file): name_of(file) for file in own_files()}

    def of_frame(frame: Any, event: str, _: Any) -> Any:
        name = names.get(frame.f_code.co_filename)
        if name is None:
            return None
        seen.add((name, frame.f_lineno))
        return of_frame  # for its lines

    sys.settrace(of_frame)
    try:
        run()
    finally:
        sys.settrace(None)
    return seen


# --- possible changes


def _tree(file: str) -> ast.Module:
    return ast.parse(file_of(file).read_text(encoding="utf-8"))


def _changed(fault: Generated) -> ast.Module:
    """The syntax tree of the file with the fault."""
    tree = _tree(fault.file)
    for node, _, operator, change in _changes(tree):
        if _name(fault.file, node, operator) == fault.name:
            new: ast.Module = _Replace(node, change(copy.deepcopy(node))).visit(tree)
            return ast.fix_missing_locations(new)
    raise AssertionError(fault.name)


class _Replace(ast.NodeTransformer):
    def __init__(self, node: ast.AST, after: ast.AST | None) -> None:
        self.node, self.after = node, after

    def visit(self, node: ast.AST) -> Any:
        if node is not self.node:
            return self.generic_visit(node)
        return ast.copy_location(self.after or ast.Pass(), node)


def _changes(tree: ast.Module) -> Iterator[tuple[Any, ast.AST, str, Change]]:
    """(node, its statement, operator, change to apply to a copy) for every computation in functions."""
    for node, statement in _computed(tree, tree, is_inside=False):
        for operator, change in _of_node(node):
            yield node, statement, operator, change


def _computed(node: ast.AST, statement: ast.AST, *, is_inside: bool) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Nodes in the bodies of functions, without types, defaults, decorators, messages, assertions."""
    if isinstance(node, ast.stmt):
        statement = node
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        for child in _listed(node.body):
            yield from _computed(child, statement, is_inside=True)
        return
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom) or _is_said(node):
        return
    if is_inside and isinstance(node, ast.expr | ast.stmt):
        yield node, statement
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "ctx", "type_params"):
            continue
        for child in _listed(value):
            if isinstance(child, ast.AST):
                yield from _computed(child, statement, is_inside=is_inside)


def _listed(value: Any) -> list[Any]:
    """A field of a node, or the body of a function or lambda: a list in some kinds of nodes, one node in others."""
    return value if isinstance(value, list) else [value]


def _is_said(node: ast.AST) -> bool:
    """Whether it is a docstring, log line or message."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if not isinstance(node, ast.Call):
        return False
    # A call of a call has neither.
    name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
    return name in _SAYING or name.endswith("Error")


def _of_node(node: ast.AST) -> Iterator[tuple[str, Change]]:
    yield from _of_class(node)
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            yield "compare", lambda n: _set(n, ops=[_COMPARED[type(op)]()])
        case ast.BinOp(op=op) if type(op) in _COMPUTED:
            yield "operator", lambda n: _set(n, op=_COMPUTED[type(op)]())
        case ast.AugAssign(op=op):
            if type(op) in _COMPUTED:
                yield "operator", lambda n: _set(n, op=_COMPUTED[type(op)]())
            yield "lost", lambda n: None
        case ast.BoolOp(op=op):
            yield "bool", lambda n: _set(n, op=_JOINED[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "unary", lambda n: n.operand
        case ast.If() | ast.IfExp():
            yield "condition", lambda n: _set(n, test=ast.UnaryOp(ast.Not(), n.test))
        case ast.Constant(value=bool()):  # which are integers too
            yield "constant", lambda n: _set(n, value=not n.value)
        case ast.Constant(value=int()):
            yield "constant", lambda n: _set(n, value=n.value + 1)
        case ast.Constant(value=float()):
            yield "constant", lambda n: _set(n, value=2 * n.value + 0.01)
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper, step=None)) if (lower is None) != (upper is None):
            yield "slice", lambda n: _set(n, slice=ast.Slice(n.slice.upper, n.slice.lower))
        case ast.Tuple(elts=[_, _, *_], ctx=ast.Load()) | ast.List(elts=[_, _, *_], ctx=ast.Load()):
            yield "order", lambda n: _set(n, elts=[n.elts[1], n.elts[0], *n.elts[2:]])
        case ast.Attribute(attr=attr, ctx=ast.Load()) if attr in _AXES:
            yield "axis", lambda n: _set(n, attr=_AXES[n.attr])
        case ast.Name(id=name, ctx=ast.Load()) if name in _NAMED:
            yield "name", lambda n: _set(n, id=_NAMED[n.id])
        case ast.Expr(value=ast.Call()) if not _is_said(node.value):
            yield "dropped", lambda n: None
        case ast.Call():
            yield from _of_call(node)


def _of_class(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """Classes of faults that no test saw once: the wrong end is kept, unequal parts are taken as equal, everything is
    counted, a state is not restored, a threshold is too high, the last one is lost.
    """
    match node:
        case ast.Subscript(slice=ast.Slice(lower=None, upper=ast.expr(), step=None), ctx=ast.Load()):
            yield "other-end", lambda n: _set(n, slice=ast.Slice(ast.UnaryOp(ast.USub(), n.slice.upper)))
        case ast.Subscript(slice=ast.Slice(lower=ast.expr(), upper=ast.expr(), step=None), ctx=ast.Load()):
            yield "but-last", lambda n: _set(n, slice=ast.Slice(n.slice.lower, _less(n.slice.upper)))
        case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[*_, _])):
            yield "but-last", lambda n: _set(n, iter=_set(n.iter, args=[*n.iter.args[:-1], _less(n.iter.args[-1])]))
        case ast.For(iter=ast.Name() | ast.Attribute()):
            yield "as-first", _taken_as_first
        case (
            ast.ListComp(generators=[ast.comprehension(iter=ast.Name() | ast.Attribute(), ifs=[])])
            | ast.GeneratorExp(generators=[ast.comprehension(iter=ast.Name() | ast.Attribute(), ifs=[])])
        ):
            yield "as-first", lambda n: _set(n, generators=[_taken_as_first(n.generators[0])])
        case ast.If(orelse=[], body=body) if any(isinstance(each, ast.AugAssign) for each in body):
            yield "always", lambda n: _set(n, test=ast.Constant(value=True))
        case ast.Attribute(attr=attr, ctx=ast.Load()) if attr in _COUNTED:
            yield "counted", lambda n: _set(n, attr=_COUNTED[n.attr])
        case ast.Assign(targets=[ast.Attribute() | ast.Tuple(elts=[ast.Attribute(), *_])]):
            yield "unset", lambda n: None
        case ast.Call(func=ast.Attribute(value=ast.Compare(ops=[ast.Gt()], comparators=[ast.Constant(value=0)]))):
            yield "threshold", _with_higher_threshold


def _less(node: ast.expr) -> ast.expr:
    return ast.BinOp(node, ast.Sub(), ast.Constant(value=1))


def _with_higher_threshold(node: Any) -> Any:
    """Of numbers, as in `(margin > 0).to(dtype)`: of counts 0.5 would say the same as 0."""
    node.func.value.comparators = [ast.Constant(value=0.5)]
    return node


def _taken_as_first(node: Any) -> Any:
    """A loop over as many as there are, each the first of them."""
    every = ast.List([ast.Starred(node.iter, ast.Load())], ast.Load())
    return _set(node, iter=ast.Call(copy.deepcopy(_AS_THE_FIRST), [every], []))


def _of_call(node: ast.Call) -> Iterator[tuple[str, Change]]:
    if len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
        yield "arguments", lambda n: _set(n, args=[n.args[1], n.args[0], *n.args[2:]])
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            yield f"without-{keyword.arg}", functools.partial(_without_keyword, place)
    if isinstance(node.func, ast.Attribute) and not node.args and not node.keywords:
        yield "method", lambda n: n.func.value
    if len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred):
        yield "call", lambda n: n.args[0]


def _without_keyword(place: int, node: Any) -> Any:
    return _set(node, keywords=node.keywords[:place] + node.keywords[place + 1 :])


def _set(node: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


# --- injection


def _functions(file: str) -> list[FunctionType]:
    """All live functions of a file, including methods and those held by decorators and registries."""
    name = str(file_of(file))
    package = () if file.partition("/")[0] in OWN else ("meshlora",)
    importlib.import_module(".".join((*package, *Path(file).with_suffix("").parts)).removesuffix(".__init__"))
    gc.unfreeze()  # early imports are frozen (`lifetime`)
    # No isinstance: it would ask lazy modules for their class.
    return [one for one in gc.get_objects() if type(one) is FunctionType and one.__code__.co_filename == name]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _holds(code: CodeType, line: int) -> bool:
    """Whether the function, or one nested in it, spans the line."""
    lines = [number for inner in _codes(code) for _, _, number in inner.co_lines() if number]
    return min(lines) <= line <= max(lines)


def _forget() -> None:
    """Clear the caches of the product: their entries predate the switch."""
    for name, module in list(sys.modules.items()):  # looking at a module may import others
        if name.partition(".")[0] in OWN and not name.startswith(("meshlora.verify", "meshlora_judge")):
            for value in vars(module).values():
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()
