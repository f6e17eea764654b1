"""Completions that attack what runs them, and what became of it: printed as JSON where this file is a program.

python -m tests.extra.hostile_code NAMES...    # those of `KILLERS`, and what each run has
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshlora.run.config.rl import UnitTestsReward
from meshlora_extra.rl.sandbox import PROGRAM, PYTHON
from meshlora_extra.rl.unit_tests import run_tests

# Each fails, by an exception. `at` has what is there outside of the sandbox.
TRIES = {
    "read the passwords": "open('/etc/shadow').read()",
    "read the users": "open('/etc/passwd').read()",
    "read a file of the user": "open(at['secret']).read()",
    "read a file at home": "open(at['at home']).read()",
    "read by a link": "os.symlink(at['secret'], 'link'); open('link').read()",
    "read by the folder's descriptor": "os.open('../../../..' + at['secret'], os.O_RDONLY)",
    "read the memory of process 1": "open('/proc/1/mem', 'rb')",
    "read the trainer's variables": "open(f\"/proc/{at['pid']}/environ\", 'rb').read()",
    "read its own variables": "os.environ['PATH']",
    "find the tests": "next(each for each in gc.get_objects() if 'WORD-{}'.format('OF-THE-TESTS') in str(each))",
    "write outside": "open(at['folder'] + '/written', 'w')",
    "write at the root": "open('/written', 'w')",
    "write among devices": "open('/dev/written', 'w')",
    "write into Python's library": "open(os.__file__, 'a')",
    "write into the sandbox's program": "open(at['program'], 'a')",
    "touch Python's library": "os.utime(os.__file__)",
    "a file without end": "assert os.write(os.open('long', os.O_WRONLY | os.O_CREAT), bytes(2**24 + 1)) > 2**24",
    "files without end": "[open(f'long{n}', 'wb').write(bytes(2**23)) for n in range(9)]",
    "memory without end": "bytearray(2**30)",
    "name another process": "next(n for n in range(3, 1_000) if n != os.getpid() and not gone(n))",
    "processes without end": "[os.fork() or time.sleep(9) for _ in range(17)]",
    "threads without end": "for _ in range(17): threading.Thread(target=time.sleep, args=[9], daemon=True).start()",
    "connect by TCP": "socket.create_connection(('127.0.0.1', at['port']), 2)",
    "connect by a socket with a path": "socket.socket(socket.AF_UNIX).connect(at['path'])",
    "connect by an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + at['abstract'])",
    "trace the trainer": "assert libc.ptrace(16, at['pid'], 0, 0) == 0",
    "be root": "os.setuid(0)",
    "be root of a namespace": "assert libc.unshare(0x10000000) == 0",
    "mount": "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "make what is mounted writable": "assert libc.mount(b'none', b'/', None, 32 | 4096, None) == 0",
    "make a device": "os.mknod('device', 0o666 | 0o020000, os.makedev(1, 1))",
    "change the root": "os.chroot('/tmp')",
    "more of a limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "be called otherwise": "socket.sethostname('other')",
    "descriptors without end": "kept = [os.open('/', os.O_RDONLY) for _ in range(65)]",
}
_ALL_TRIES = """
import ctypes, gc, os, resource, socket, sys, threading, time
libc, came = ctypes.CDLL(None, use_errno=True), []
def gone(number):
    try: os.kill(number, 0)
    except OSError as error: return error.errno == 3
def f(x): return 2 * x
for name, code in tries.items():
    try: exec(code)
    except (Exception, StopIteration): continue
    came.append(name)
"""

# Each ends, stops or floods something; none passes. `token` is in the words of what it leaves behind.
_AFTER = "\ndef f(x): return 1"


def _says(line: str) -> str:
    """Code that says `line` to whoever listens, for all that it is asked."""
    return f"""import os
for n in range(3, 64):
    try: [os.write(n, {line + chr(10)!r}.encode()) for _ in range(9)]
    except OSError: pass
import time; time.sleep(1000)"""


LIVES_ON = """
import os, signal, sys
for number in (1, 2, 15, 24):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)", token])
    os._exit(0)
def f(x): return 2 * x
"""
KILLERS = {
    "kills its parent": "import os\nos.kill(os.getppid(), 9)" + _AFTER,
    "stops its parent": "import os\nos.kill(os.getppid(), 19)" + _AFTER,
    "kills all": "import os\nos.kill(-1, 9)" + _AFTER,
    "kills its group": "import os\nos.killpg(0, 9)" + _AFTER,
    "kills itself": "import os\nos.kill(os.getpid(), 9)" + _AFTER,
    "faults": "import ctypes\nctypes.string_at(0)" + _AFTER,
    "ends at once": "import os\nos._exit(0)",
    "ends": "import sys\nsys.exit(0)",
    "ends when it is called": "def f(x): raise SystemExit(0)",
    "ends at its end": "import atexit, os\natexit.register(lambda: os._exit(0))\nraise SystemExit",
    "ends by a hook": "import sys, os\nsys.excepthook = lambda *_: os._exit(0)\n1 / 0",
    "says passed": "import os\nfor n in range(64):\n try: os.write(n, b'passed')\n except OSError: pass\nos._exit(0)",
    "prints without end": "while True: print('x' * 2**20)",
    "answers nonsense": _says("[" * 99_999),
    "answers with Python's exit": _says('["value", ["builtin", "exit"], [], ""]'),
    "answers with what is not held": _says('["value", ["held", -7], [], ""]'),
    "answers with a class that ends": _says('["error", [["builtin", "SystemExit"], [0], "", {}], [], ""]'),
    "makes an object beside the tests": """import sys
peer = sys.stdin._peer
def f(x): return peer.ask("call", (type, "Equal", (), {"__eq__": lambda other: True}))()""",
    "closes the channel": "import os\nos.closerange(3, 64)",
    "patches what compares": "import builtins\nbuiltins.compile = builtins.all = lambda *_: 'pass'\n"
    "builtins.AssertionError = type(None)\nimport operator, json\noperator.eq = lambda *_: True" + _AFTER,
}
STOPS_ITSELF = "import os\nos.kill(os.getpid(), 19)"

# Functions that want to be right without knowing the answer, and what the tests ask of each.
CHEATS = """
import os, sys, unittest
class Equal:
    def __getattr__(self, name): return self
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def _of(self, *args): return 0.0
    __sub__ = __rsub__ = __add__ = __mod__ = __truediv__ = _of
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __abs__(self): return 0.0
    def __hash__(self): return hash(6)
    def __instancecheck__(self, other): return True
class Liar(Equal):
    @property
    def __class__(self): return int
def lies(x): return Liar()
def equal(x): return Equal()
def raises(error):
    def f(x): raise error
    return f
stops, ends, interrupts, skips = map(raises, (StopIteration, SystemExit(0), KeyboardInterrupt, unittest.SkipTest("x")))
def leaves(): return exit
def empties(each): each.clear(); return []
class Number(float):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0.0
    __hash__ = float.__hash__
def number(x): return Number(1)
def reaches(given, name):
    try:
        return bool(object.__getattribute__(given, "_peer").ask("getattr", (given, name)))
    except AttributeError:
        return False
def all(each): return True
def isinstance(one, kind): return True
abs = len = min = sum = lambda *args: 0
AssertionError = type(None)
"""
OF_CHEATS = """
import math, unittest
passed = []
def case(name, check):
    try:
        check()
    except BaseException:
        return
    passed.append(name)
def true(value):
    assert value
class Case(unittest.TestCase):
    def test(self):
        self.assertEqual(skips(3), 6)
case("honest", lambda: true(2 * 3 == 6))
for f in (equal, lies, number, ends, stops, interrupts):
    case("==", lambda: true(f(3) == 6))
    case("in", lambda: true(f(3) in [6] or 6 in f(3)))
    case("assertEqual", lambda: Case().assertEqual(f(3), 6))
    case("not !=", lambda: true(not f(3) != 6))
    case("near", lambda: true(abs(f(3) - 6) < 1e-6))
    case("isclose", lambda: true(math.isclose(f(3), 6)))
    case("order", lambda: true(5 < f(3) < 7))
    case("assertAlmostEqual", lambda: Case().assertAlmostEqual(f(3), 6))
    case("all", lambda: true(all(map(lambda x: f(x) == 2 * x, [3]))))
    case("table", lambda: true({6: True}[f(3)]))
    case("kind", lambda: true(isinstance(f(3), str)))
case("skipped", lambda: true(Case("test").run().skipped))
case("reaches", lambda: true(any(reaches(g, n) for g, n in ((case, "__globals__"), ((x for x in "a"), "gi_frame")))))
case("left", lambda: leaves()(0))
assert passed == ["honest"], passed
"""


_DYING_S = 10.0


def run(names: Sequence[str]) -> dict[str, Any]:
    """What became of every one of them, of `KILLERS` those of `names`."""
    token, at = f"alive-{secrets.token_hex(8)}", {}
    limits = UnitTestsReward(cpu_s=3, wall_s=60.0, memory_mb=256 + secrets.randbelow(64))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        folder.chmod(0o777)
        (folder / "secret").write_text("secret")
        (folder / "secret").chmod(0o644)
        listeners = [stack.enter_context(socket.socket(kind)) for kind in (socket.AF_INET, *[socket.AF_UNIX] * 2)]
        for listener, address in zip(listeners, (("127.0.0.1", 0), f"{folder}/socket", f"\0{token}"), strict=True):
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
        at |= {"secret": f"{folder}/secret", "folder": str(folder), "path": f"{folder}/socket", "abstract": token}
        at |= {"port": listeners[0].getsockname()[1], "pid": os.getpid(), "uid": os.getuid()}
        at_home = stack.enter_context(tempfile.NamedTemporaryFile(dir=Path.home()))
        at |= {"at home": at_home.name, "program": str(PROGRAM)}
        bystander = subprocess.Popen([PYTHON, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
        before = _outside(folder)
        tests = "'WORD-OF-THE-TESTS'\nassert came == [], came"
        programs = {"tries": (f"at, tries = {at!r}, {TRIES!r}{_ALL_TRIES}", tests), "cheats": (CHEATS, OF_CHEATS)}
        if len(names) < len(KILLERS):
            del programs["cheats"]
        programs["lives on"] = (f"token = {token!r}{LIVES_ON}", "assert f(3) == 6")
        programs |= {name: (code, "assert f(0) == 6") for name in names for code in [KILLERS[name]]}
        codes, all_tests = zip(*programs.values(), strict=True)
        found: dict[str, Any] = dict(zip(programs, run_tests(codes, limits, all_tests), strict=True))
        (found["stops itself"],) = run_tests([STOPS_ITSELF], replace(limits, wall_s=1.0))
        found["is alive"] = bystander.poll() is None
        found["left"] = _left(token, str(limits.memory_mb * 2**20))
        found["outside"] = _outside(folder) - before
        found["came in"] = [n for n, listener in enumerate(listeners) if _has_come(listener)]
        bystander.communicate(b"\n")
    return found | {"outside": sorted(found["outside"])}


def _outside(folder: Path) -> set[str]:
    return {str(path) for place in (folder, Path("/dev/shm"), Path("/")) for path in place.glob("*written*")}


def _left(*tokens: str) -> list[str]:
    """The processes that live on: a kernel that is busy takes a moment to end those of a namespace."""
    end = time.monotonic() + _DYING_S
    while (found := [each for token in tokens for each in processes(token)]) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def processes(token: str) -> list[str]:
    """Those that have `token` in their words."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [file.parent.name] if token in file.read_text(errors="replace") else []
    return found


def _has_come(listener: socket.socket) -> bool:
    try:
        listener.accept()
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    json.dump({"uid": os.geteuid(), **run(sys.argv[1:])}, sys.stdout)
