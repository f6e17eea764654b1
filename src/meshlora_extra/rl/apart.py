"""The code of a completion and its tests in two interpreters. A program of its own: it imports nothing of meshlora.

    python -I -S apart.py code  CHANNEL CPU_S MEMORY_BYTES PROCESSES PATHS...
    python -I -S apart.py tests CHANNEL CPU_S MEMORY_BYTES PROCESSES PATHS... < {"code": ..., "tests": ...}

CHANNEL is the number of a socket to the other. PATHS are where packages are. The second prints `passed`, or why not: it
runs none of the completion's code, so nothing that the code does to its own interpreter can change the verdict.

The tests find the names of the completion behind their own and Python's. Plain data goes over the channel as JSON and
is compared where the tests are; anything else stays where it is, and the other side holds a `Remote`, which asks.

Owns: limits of an interpreter, the words of the channel, what each side may ask. Does not own: what the two may reach
(`rl.sandbox`), starting and ending them (`rl.unit_tests`).
"""

from __future__ import annotations

import builtins
import collections
import functools
import io
import json
import operator
import os
import resource
import site
import sys
import types
from _thread import RLock
from collections.abc import Callable
from importlib import import_module
from typing import Any

_LARGEST_FILE, _MOST_FILES = 16 * 2**20, 64
_PLAIN: tuple[Any, ...] = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
_LARGEST_INT = 2**63  # as a number; others go as hexadecimal digits, which have no limit in Python
_SAME = (type(None), bool, str, float)  # as JSON has them


def _of(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of `module`, which is imported when it is called."""
    return lambda *parts: operator.attrgetter(name)(import_module(module))(*parts)


# What is copied: its type -> its parts, and what makes it of them. No code of the other side has a say in either.
_COPIED: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "builtins.tuple": (tuple, lambda *parts: parts),
    "builtins.frozenset": (tuple, lambda *parts: frozenset(parts)),
    "builtins.bytes": (lambda it: (it.hex(),), bytes.fromhex),
    "builtins.complex": (lambda it: (it.real, it.imag), complex),
    "builtins.range": (lambda it: (it.start, it.stop, it.step), range),
    "builtins.slice": (lambda it: (it.start, it.stop, it.step), slice),
    "builtins.ellipsis": (lambda it: (), lambda: ...),
    "decimal.Decimal": (lambda it: (str(it),), _of("decimal", "Decimal")),
    "fractions.Fraction": (lambda it: (it.numerator, it.denominator), _of("fractions", "Fraction")),
    "datetime.date": (lambda it: (it.isoformat(),), _of("datetime", "date.fromisoformat")),
    "datetime.time": (lambda it: (it.isoformat(),), _of("datetime", "time.fromisoformat")),
    "datetime.datetime": (lambda it: (it.isoformat(),), _of("datetime", "datetime.fromisoformat")),
    "datetime.timedelta": (lambda it: (it.days, it.seconds, it.microseconds), _of("datetime", "timedelta")),
    "collections.deque": (lambda it: (it.maxlen, *it), lambda most, *items: collections.deque(items, most)),
    "collections.OrderedDict": (lambda it: it.items(), lambda *items: collections.OrderedDict(items)),
    "collections.Counter": (lambda it: it.items(), lambda *items: collections.Counter(dict(items))),
    "collections.defaultdict": (lambda it: it.items(), lambda *items: collections.defaultdict(None, items)),
    "numpy.ndarray": (
        lambda it: (it.dtype.str, it.tobytes(), *it.shape),
        lambda kind, data, *shape: import_module("numpy").frombuffer(data, kind).reshape(shape).copy(),
    ),
    "numpy.generic": (
        lambda it: (it.dtype.str, it.tobytes()),
        lambda kind, data: import_module("numpy").frombuffer(data, kind)[0],
    ),
}
_NUMBERS = "biufcSUMm"  # kinds of numpy's types that are bytes


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Modules that both sides import for themselves. None of them ends a process, or runs what it is given.
_MODULES = _set(
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math numpy operator "
    "random re statistics string typing"
)
# Special names that a Remote looks up where its object is. Libraries try others, as numpy `__array_interface__`, an
# address in memory.
_ASKED = _set("name qualname doc dict annotations module wrapped")
_UNARY = _set(
    "bool len iter next str repr hash int float complex index abs neg pos invert round trunc floor ceil dir reversed "
    "getitem setitem delitem enter exit format"
)
_BINARY = _set("add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift")
_COMPARED = _set("lt le gt ge")


class Gone(BaseException):
    """The other side has ended, or speaks nonsense. No `except Exception` of the tests takes it for an answer."""


class UnlikeError(TypeError):
    """What works on objects of one interpreter and not between two."""


def _two(name: str) -> Callable[[Any, Any], Any]:
    """The function of an operator: `add` -> `operator.add`."""
    if name == "divmod":
        return divmod  # which `operator` lacks
    if name in ("and", "or"):
        name += "_"  # keywords of Python
    function: Callable[[Any, Any], Any] = getattr(operator, name)
    return function


def _special(name: str) -> Callable[..., Any]:
    return lambda it, *args: getattr(it, f"__{name}__")(*args)


def _plain(value: Any) -> tuple[bool, Any]:
    """Whether `value` is plain data of some kind, as a named tuple is, and which."""
    for kind in _PLAIN:
        if isinstance(value, kind):
            return True, kind(value)
    return False, None


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: _two(name) for name in _BINARY | _COMPARED | {"eq"}},
    **{name: vars(builtins).get(name) or vars(operator).get(name) or _special(name) for name in _UNARY},
    "call": lambda function, *args, **named: function(*args, **named),
    "contains": operator.contains,
    "exit": _special("exit"),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "plain": _plain,
}


class Remote:
    """An object of the other side. An operator with plain data would hand that to the completion, and leave the result
    to it: `f(3) - 6 < 1e-9` could be true of any number. So data is compared and computed with here, and only
    what is of one side on both sides of an operator is asked for.
    """

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattribute__(self, name: str) -> Any:
        if name in ("_peer", "_number", "__class__"):
            return object.__getattribute__(self, name)
        if name == "__mro_entries__":
            raise UnlikeError("a class of the tests cannot derive from one of the completion")
        if name.startswith("__") and name.endswith("__") and name[2:-2] not in _NAMES:
            raise AttributeError(name)
        return self._peer.ask("getattr", (self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", (self, name, value))

    def __delattr__(self, name: str) -> None:
        self._peer.ask("delattr", (self, name))

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        return self._peer.ask("call", (self, *args), named)

    def __eq__(self, other: object) -> Any:
        if type(other) is Remote:
            return self is other or self._peer.ask("eq", (self, other))
        is_plain, value = self._peer.ask("plain", (self,))
        return bool(is_plain and value == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, item: Any) -> bool:
        if type(item) is Remote:
            return bool(self._peer.ask("contains", (self, item)))
        return any(each == item for each in self)  # type: ignore[attr-defined]

    def __instancecheck__(self, other: Any) -> bool:
        return type(other) is Remote and bool(self._peer.ask("isinstance", (other, self)))

    def __subclasscheck__(self, other: Any) -> bool:
        return type(other) is Remote and bool(self._peer.ask("issubclass", (other, self)))


def _asks(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._peer.ask(name, (self, *args))


def _computes(name: str, *, is_reflected: bool = False) -> Callable[[Remote, Any], Any]:
    def method(self: Remote, other: Any) -> Any:
        pair = (other, self) if is_reflected else (self, other)
        if type(other) is Remote:
            return self._peer.ask(name, pair)
        is_plain, value = self._peer.ask("plain", (self,))
        if not is_plain:
            raise UnlikeError(f"{name} of an object of the other side and plain data")
        return _two(name)(*((other, value) if is_reflected else (value, other)))

    return method


_NAMES = _ASKED | {"eq", "contains", "call"} | _UNARY | _BINARY | _COMPARED
for _name in _UNARY:
    setattr(Remote, f"__{_name}__", _asks(_name))
for _name in _BINARY | _COMPARED:
    setattr(Remote, f"__{_name}__", _computes(_name))
for _name in _BINARY:
    setattr(Remote, f"__r{_name}__", _computes(_name, is_reflected=True))


class Peer:
    """One end of the channel. One thread at a time asks, and answers what it is asked while it waits.

    A container that goes over is a copy until the call ends: what the other side has made of it comes back with the
    answer, into the same object.
    """

    def __init__(self, channel: int, operations: dict[str, Callable[..., Any]], *, is_judge: bool) -> None:
        """is_judge: of the tests: the other side may ask of objects alone that this one has handed to it."""
        self.is_gone, self._is_judge = False, is_judge
        self._lines, self._words = os.fdopen(channel, "rb", closefd=False), os.fdopen(channel, "wb", closefd=False)
        self._operations = operations
        self._lock, self._depth = RLock(), 0
        # Numbers are those of the sender, above 0 of its own objects, below of the receiver's.
        self._held: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}
        self._containers: dict[int, Any] = {}  # of this call
        self._container_numbers: dict[int, int] = {}

    def ask(self, what: str, args: tuple[Any, ...] = (), named: dict[str, Any] | None = None) -> Any:
        """What the other side answers. Raises: what it raises. Gone: it is."""
        with self._lock:
            self._depth += 1
            try:
                given = list(map(self._encode, args)), {k: self._encode(v) for k, v in (named or {}).items()}
                self._send(["ask", what, *given, self._printed()])
                while (message := self._receive())[0] == "ask":
                    self._answer(message)
                return self._result(what, message)
            finally:
                self._end_call()

    def answer_all(self) -> None:
        """Answer until the other side has ended."""
        while True:
            self._answer(self._receive())

    def hello(self) -> None:
        """Say that this side is there."""
        self._send(["hello"])

    def await_hello(self) -> bool:
        """Whether the other side is there."""
        return self._lines.readline() == b'["hello"]\n'

    def _answer(self, message: list[Any]) -> None:
        self._depth += 1
        try:
            args, named, printed = self._read(self._asked, message)
            sys.stdout.write(printed)
            try:
                answer = ["value", self._encode(self._operations[message[1]](*args, **named))]
            except Gone:
                raise
            except BaseException as error:  # noqa: BLE001  # whatever its code raises is the answer
                answer = ["error", self._encode_error(error)]
            # What the call has changed in them.
            back = self._containers and list(map(self._encode, (*args, *named.values())))
            self._send([*answer, back or [], self._printed()])
        finally:
            self._end_call()

    def _asked(self, message: list[Any]) -> tuple[list[Any], dict[str, Any], str]:
        _, what, args, named, printed = message
        if self._is_judge and what not in _READING:  # `type` would make an object here that is equal to everything
            kind, number = args[0]
            assert kind == "held"
            assert number < 0
        return list(map(self._decode, args)), {k: self._decode(v) for k, v in named.items()}, str(printed)

    def _result(self, what: str, message: list[Any]) -> Any:
        def read(message: list[Any]) -> tuple[Any, Any, str]:
            kind, value, back, printed = message
            found = self._decode_error(value) if kind == "error" else self._decode(value)
            for each in back:
                self._decode(each)
            return kind == "error", found, str(printed)

        is_error, value, printed = self._read(read, message)
        sys.stdout.write(printed)
        if not is_error:
            return value
        if isinstance(value, StopIteration) and what != "next":  # it would end a loop of the tests
            raise RuntimeError("StopIteration")
        raise value from None

    def _end_call(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._containers.clear()
            self._container_numbers.clear()

    def _printed(self) -> str:
        if isinstance(sys.stdout, Printed):
            return sys.stdout.taken()
        return ""

    def _send(self, message: list[Any]) -> None:
        try:
            self._words.write(json.dumps(message).encode() + b"\n")
            self._words.flush()
        except OSError:
            self.is_gone = True
            raise Gone from None

    def _receive(self) -> list[Any]:
        return self._read(json.loads, self._lines.readline())

    def _read(self, how: Callable[[Any], Any], what: Any) -> Any:
        """`how(what)`: of the words of the other side, which may be anything."""
        try:
            return how(what)
        except Exception as error:  # of a stranger's words a decoder may raise anything, which tests could catch
            self.is_gone = True
            raise Gone from error

    def _encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SAME:
            return value
        if kind is int:
            if -_LARGEST_INT < value < _LARGEST_INT:
                return value
            return ["int", hex(value)]
        if kind is list or kind is set or kind is bytearray:
            return [kind.__name__, self._container(value), list(map(self._encode, value))]
        if kind is dict:
            items = [[self._encode(key), self._encode(each)] for key, each in value.items()]
            return ["dict", self._container(value), items]
        if kind is Remote:
            return ["held", -value._number]
        if isinstance(value, BaseException):
            return ["error", self._encode_error(value)]
        if isinstance(value, type):
            return self._encode_type(value)
        if kind is types.ModuleType and value.__name__ in _MODULES:
            return ["module", value.__name__]
        if kind is types.CoroutineType:
            return ["coroutine", self._hold(value)]
        name = _copied_as(value)
        if name is not None:
            return ["copy", name, list(map(self._encode, _COPIED[name][0](value)))]
        return ["held", self._hold(value)]

    def _encode_type(self, kind: type) -> Any:
        if getattr(builtins, kind.__name__, None) is kind:
            return ["builtin", kind.__name__]
        if number := vars(kind).get("_number_of_peer"):
            return ["held", -number]
        if issubclass(kind, BaseException):
            above = [self._encode_type(base) for base in kind.__bases__ if issubclass(base, BaseException)]
            return ["errors", self._hold(kind), kind.__name__, above]
        return ["held", self._hold(kind)]

    def _encode_error(self, error: BaseException) -> Any:
        more = {name: self._encode(each) for name, each in vars(error).items() if not name.startswith("_")}
        return [self._encode_type(type(error)), list(map(self._encode, error.args)), str(error), more]

    def _hold(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._held) + 1)
        self._held[number] = value  # and is kept alive: the id stays its own
        return number

    def _container(self, value: Any) -> int:
        number = self._container_numbers.setdefault(id(value), len(self._containers) + 1)
        self._containers[number] = value
        return number

    def _decode(self, words: Any) -> Any:
        if not isinstance(words, list):
            return words
        kind, *rest = words
        if kind == "copy":
            return _COPIED[rest[0]][1](*map(self._decode, rest[1]))
        if kind == "held":
            return self._of_number(rest[0])
        if kind == "coroutine":
            return self.awaited(self._of_number(rest[0]))
        if kind == "error":
            return self._decode_error(rest[0])
        if kind == "errors":
            return self._error_class(*rest)
        if kind == "int":
            return int(rest[0], 16)
        if kind == "module":
            assert rest[0] in _MODULES
            return import_module(rest[0])
        if kind == "builtin":
            found = getattr(builtins, rest[0])
            assert isinstance(found, type)  # `exit` would end the tests
            return found
        return self._fill(kind, *rest)

    def _fill(self, kind: str, number: int, items: list[Any]) -> Any:
        """The container of `number` with `items`."""
        value = self._containers.get(-number)
        if value is None:  # seen for the first time
            value = {"list": list, "set": set, "dict": dict, "bytearray": bytearray}[kind]()
            self._containers[-number] = value
            self._container_numbers[id(value)] = -number
        if isinstance(value, dict):
            found: Any = {self._decode(key): self._decode(each) for key, each in items}
        else:
            found = list(map(self._decode, items))
        if isinstance(value, (dict, set)):
            value.clear()
            value.update(found)
        else:
            value[:] = found
        return value

    def _of_number(self, number: int) -> Any:
        if number < 0:
            return self._held[-number]
        return self._remotes.setdefault(number, Remote(self, number))

    async def awaited(self, value: Remote) -> Any:
        """What a coroutine of the other side returns."""
        return self.ask("await", (value,))

    def _error_class(self, number: int, name: str, above: list[Any]) -> Any:
        """A class that is raised and caught here in place of one there: of the same name, below the same of Python."""
        if number not in self._remotes:
            bases = tuple(map(self._decode, above))
            assert all(issubclass(base, BaseException) for base in bases)
            own = {"__str__": _said, "__module__": "__main__", "_number_of_peer": number}
            self._remotes[number] = type(name, bases, own)
        return self._remotes[number]

    def _decode_error(self, words: list[Any]) -> BaseException:
        kind, args, text, more = words
        found, given = self._decode(kind), list(map(self._decode, args))
        assert issubclass(found, BaseException)
        if not issubclass(found, (Exception, SystemExit)) or issubclass(found, StopAsyncIteration):
            found = RuntimeError  # the other would end the tests, and not as they say
        try:
            error: BaseException = found(*given)  # its constructor may want other arguments
        except TypeError:
            error = RuntimeError(text)
        vars(error).update({name: self._decode(each) for name, each in more.items() if not name.startswith("_")})
        vars(error)["_text_of_peer"] = text
        return error


def _said(self: BaseException) -> str:
    return str(vars(self).get("_text_of_peer") or BaseException.__str__(self))


def _copied_as(value: Any) -> str | None:
    """The entry of `_COPIED` that `value` goes by."""
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in _NUMBERS:
        return "numpy.ndarray" if kind.__name__ == "ndarray" else "numpy.generic"
    name = f"{kind.__module__}.{kind.__qualname__}"
    is_zoned = kind.__module__ == "datetime" and getattr(value, "tzinfo", None) is not None
    if is_zoned or name.startswith("numpy.") or name not in _COPIED:
        return None
    return name


class Printed(io.StringIO):
    """What the completion's code prints, until the next message takes it along."""

    def taken(self) -> str:
        """The text, once."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


class _Typed(io.TextIOBase):
    """What the tests have as their input."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        return str(self._peer.ask("readline"))

    def read(self, size: int | None = -1, /) -> str:
        return str(self._peer.ask("read"))


def run_code(channel: int) -> None:
    """The side of the completion: load its code when it is told to, and answer all that the tests ask."""
    space = _main_module()

    def load(code: str) -> None:
        exec(compile(code, "completion", "exec"), space)

    @functools.cache
    def loop() -> Any:
        return import_module("asyncio").new_event_loop()

    def named(name: str) -> Any:
        if name in space and not name.startswith("__"):
            return space[name]
        raise NameError(name)

    own = {"load": load, "name": named, "await": lambda it: loop().run_until_complete(it)}
    peer = Peer(channel, {**_OPERATIONS, **own}, is_judge=False)
    sys.stdout, sys.stdin = Printed(), _Typed(peer)
    builtins.input = lambda prompt="": peer.ask("input", (str(prompt),))
    peer.hello()
    try:
        peer.answer_all()
    finally:
        os._exit(0)


def run_tests(channel: int, code: str, tests: str) -> str:
    """`passed`, or why not: the side that has the verdict."""
    peer = Peer(channel, {**_OPERATIONS, **_SERVED}, is_judge=True)
    if not peer.await_hello():
        return "not started"
    space = _main_module()
    sys.stdin = io.StringIO()
    end: BaseException | None = None
    try:
        peer.ask("load", (code,))
        space["__builtins__"] = _Names(peer)
        completion = types.ModuleType("completion")
        vars(completion)["__getattr__"] = space["__getattr__"] = _attribute_of(peer)
        sys.modules["completion"] = completion
        exec(compile(tests, "tests", "exec"), space)
    except BaseException as error:  # noqa: BLE001  # however the tests end is the verdict
        end = error
    if peer.is_gone:
        return "failed: the completion's process has ended"
    # `exit()` in the tests, not in the completion.
    is_own_end = isinstance(end, SystemExit) and "_text_of_peer" not in vars(end) and not end.code
    if end is None or is_own_end:
        return "passed"
    return f"failed: {type(end).__name__}: {end}"[:400]


class _Names(dict[str, Any]):
    """Python's names, and behind them those of the completion: its own `all` takes the place of none."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(vars(builtins))
        self._peer = peer

    def __missing__(self, name: str) -> Any:
        try:
            value = self._peer.ask("name", (name,))
        except NameError:
            raise KeyError(name) from None
        if type(value) is Remote:
            self[name] = value
        return value


def _attribute_of(peer: Peer) -> Callable[[str], Any]:
    def attribute(name: str) -> Any:
        try:
            return peer.ask("name", (name,))
        except NameError:
            raise AttributeError(name) from None

    return attribute


def _of_tests(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of an attribute, without those by which a completion could come to more than it was given."""

    def refusing(value: Any, name: str, *to: Any) -> Any:
        is_told = name in ("__name__", "__qualname__", "__doc__", "__module__")
        is_hidden = name.startswith("_") or isinstance(value, type) or type(value).__module__ != "__main__"
        if is_hidden and not is_told:
            raise AttributeError(name)
        return function(value, name, *to)

    return refusing


# What a completion may ask without an object of the tests.
_READING: dict[str, Callable[..., Any]] = {
    "input": lambda prompt: builtins.input(prompt),
    "readline": lambda: sys.stdin.readline(),
    "read": lambda: sys.stdin.read(),
}
# What it may ask of one otherwise than the tests may of its own.
_SERVED = {**_READING, "getattr": _of_tests(getattr), "setattr": _of_tests(setattr), "delattr": _of_tests(delattr)}


def _main_module() -> dict[str, Any]:
    """The names of a `__main__` of its own, as for a program."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["main.py"]
    site.setquit()
    return vars(module)


def _limit(which: int, most: int, *, more: int = 0) -> None:
    """more: beyond the limit that is told, the one that ends."""
    _, hard = resource.getrlimit(which)
    told, ends = most, most + more
    if hard != resource.RLIM_INFINITY:
        told, ends = min(told, hard), min(ends, hard)
    resource.setrlimit(which, (told, ends))


def main(words: list[str]) -> None:
    """Limit this interpreter, and be one of the two sides."""
    side, number, cpu_s, memory, processes, *paths = words
    _limit(resource.RLIMIT_CPU, int(cpu_s), more=1)
    _limit(resource.RLIMIT_AS, int(memory))
    _limit(resource.RLIMIT_FSIZE, _LARGEST_FILE)
    _limit(resource.RLIMIT_NOFILE, _MOST_FILES)
    _limit(resource.RLIMIT_CORE, 0)
    if int(processes):
        _limit(resource.RLIMIT_NPROC, int(processes))
    job = json.loads(sys.stdin.buffer.read()) if side == "tests" else {}
    verdict, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    sys.path.extend(paths)
    channel = int(number)
    if side == "tests":
        os.write(verdict, run_tests(channel, **job).encode(errors="replace"))
        os._exit(0)
    os.close(verdict)
    run_code(channel)


if __name__ == "__main__":
    main(sys.argv[1:])
