"""A completion that has some of everything, and tests that use it as if they were beside it."""

CODE = """
import functools, math, re
from math import sqrt
from collections import Counter, namedtuple, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from datetime import date
import enum
count = 0
def bump():
    global count
    count += 1
def back(x): return x
def sort(rows): rows.sort()
def same(x): return x
def apply(f, *args, **named): return f(*args, **named)
def total(each): return math.fsum(each)
def squares(n):
    for i in range(n): yield i * i
class TooFar(ValueError):
    def __init__(self, by): super().__init__(by); self.by = by
    def __str__(self): return f"too far by {self.by}"
class Deep(TooFar): pass
def fail(x):
    if x == 1: raise KeyError("a")
    if x == 2: raise Deep(3)
    if x == 3: raise StopIteration
    if x == 4: raise SystemExit(0)
Pair = namedtuple("Pair", "a b")
class Color(enum.IntEnum):
    RED = 1
class Tone(enum.Enum):
    LOW = 1
class Stack:
    limit = 3
    def __init__(self, items=()): self.items = list(items)
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, v): self.items[i] = v
    def __contains__(self, x): return x in self.items
    def __eq__(self, o): return isinstance(o, Stack) and self.items == o.items
    def __lt__(self, o): return self.items < o.items
    def __add__(self, o): return Stack(self.items + o.items)
    def __mul__(self, n): return Stack(self.items * n)
    def __repr__(self): return f"Stack({self.items})"
    def __enter__(self): return self
    def __exit__(self, *e): self.items = []; return True
    @property
    def top(self): return self.items[-1]
class Child(Stack): pass
@dataclass
class Point:
    x: int
    y: int
class Node:
    def __init__(self, val, next=None): self.val = val; self.next = next
def reverse(node):
    prev = None
    while node: node.next, prev, node = prev, node, node.next
    return prev
def hello(): print("hello", input("name? "))
def sum(a, b): return a + b
def doc():
    "says"
def named(f):
    @functools.wraps(f)
    def g(*args): return f.__name__, f(*args)
    return g
async def later(): return 3
def fill(grid): grid[0][0] = 9
def twice(f): return lambda x: f(f(x))
"""

TESTS = """
import math, io, contextlib, unittest, unittest.mock
def is_(n, ok):
    assert ok, n
is_(1, back([1, (2, {3}), {"a": [b"x", 1.5, None, True, 2j]}]) == [1, (2, {3}), {"a": [b"x", 1.5, None, True, 2j]}])
is_(2, back(10**5000) == 10**5000 and back(-2**64) == -2**64)
is_(3, math.isnan(back(float("nan"))) and back(float("inf")) == math.inf)
rows = [[3], [1]]; inner = rows[0]; sort(rows)
is_(4, rows == [[1], [3]] and rows[1] is inner)
is_(5, same(rows) is rows)
is_(6, apply(lambda a, b=2: a * b, 3, b=4) == 12)
is_(7, total(i for i in range(4)) == 6 and list(squares(4)) == [0, 1, 4, 9])
is_(8, [next(g) for g in [squares(3)]] == [0])
for n, kind in ((1, KeyError), (2, ValueError), (2, TooFar), (2, Deep), (3, RuntimeError), (4, SystemExit)):
    try: fail(n)
    except kind as error:
        if n == 2: is_(9, str(error) == "too far by 3" and error.by == 3 and error.args == (3,))
    else: is_(10, False)
is_(11, Pair(1, 2) == (1, 2) and Pair(1, 2).a == 1 and Pair(1, 2) == Pair(1, 2) and Pair(1,2) != (2, 1))
is_(12, Color.RED == 1 and Color.RED + 1 == 2 and Tone.LOW is Tone.LOW and Tone(1) is Tone.LOW and Tone.LOW != 1)
s = Stack([1, 2])
is_(13, s.push(3) is s and len(s) == 3 and list(s) == [1, 2, 3] and s[0] == 1 and s[-1] == 3 and 2 in s and 9 not in s)
s[0] = 7
is_(14, s[0] == 7 and s.top == 3 and s.items == [7, 2, 3] and s == Stack([7, 2, 3]) and s != Stack() and s != 3)
is_(15, str(s) == "Stack([7, 2, 3])" and f"{s}" == repr(s) and s.limit == 3 and Stack.limit == 3)
is_(16, isinstance(s, Stack) and isinstance(Child(), Stack) and not isinstance(s, Child) and issubclass(Child, Stack))
is_(17, Stack([1]) < Stack([2]) and (Stack([1]) + Stack([2])).items == [1, 2] and not isinstance(3, Stack))
is_(17, sorted([Stack([2]), Stack([1])])[0].items == [1])
with s as inside: raise ValueError("swallowed")
is_(17, Stack([1]).__mul__(2).items == [1, 1])
is_(18, len(s) == 0 and not s)
p = Point(1, y=2)
is_(19, p == Point(1, 2) and (p.x, p.y) == (1, 2) and repr(p) == "Point(x=1, y=2)"); p.x = 5
is_(20, p.x == 5 and vars is not None and p.__dict__ == {"x": 5, "y": 2})
r = reverse(Node(1, Node(2)))
is_(21, r.val == 2 and r.next.val == 1 and r.next.next is None)
class Own:
    def __init__(self, val, next=None): self.val, self.next = val, next
r = reverse(Own(1, Own(2)))
is_(22, r.val == 2 and r.next.val == 1 and isinstance(r, Own))
with contextlib.redirect_stdout(io.StringIO()) as out, unittest.mock.patch("builtins.input", return_value="you"):
    hello()
is_(23, out.getvalue() == "hello you\\n")
bump(); bump()
is_(24, count == 2)
import completion
is_(25, sum([1, 2]) == 3 and completion.sum(1, 2) == 3)
is_(26, doc.__doc__ == "says" and doc.__name__ == "doc" and callable(doc) and math.fabs(-1) == 1 and sqrt(4) == 2)
is_(27, back(Counter("aab")) == {"a": 2, "b": 1} and back(Fraction(1, 2)) == 0.5 and back(Decimal("1.5")) == 1.5)
is_(28, back(deque([1], 3)) == deque([1], 3) and back(OrderedDict(a=1)) == back(defaultdict(list, a=1)) == {"a": 1})
is_(29, back(date(2020, 1, 2)) == date(2020, 1, 2) and back(range(3)) == range(3) and back(slice(1, 2)) == slice(1, 2))
g = [[1, 2], [3]]; fill(g)
is_(30, g == [[9, 2], [3]])
is_(31, twice(lambda x: x + 1)(3) == 5)
is_(32, back(int) is int and back(ValueError) is ValueError and back("\\ud800") == "\\ud800")
is_(33, abs(back(1.414) - 1.414) < 1e-9 and {back((1, 2))} == {(1, 2)})
is_(34, p in [Point(5, 2)] and {Tone.LOW: 1}[Tone.LOW] == 1)
@named
def asked(x): return x
is_(35, asked(3) == ("asked", 3))
from __main__ import back as also
is_(35, also(3) == 3)
try: no_such_name
except NameError: pass
else: is_(35, False)
is_(36, dict(zip(back("ab"), back([1, 2]))) == {"a": 1, "b": 2})
try: fail(2)
except TooFar as error: again = error
is_(37, apply(str, again) == "too far by 3" or True)
import asyncio
is_(40, asyncio.run(later()) == 3)
import numpy as np
is_(38, (back(np.arange(6).reshape(2, 3)) == np.arange(6).reshape(2, 3)).all() and back(np.float64(1.5)) == 1.5)
x = np.array([3, 1]); is_(39, np.allclose(back(x), x))
"""
