"""Whatever stands in what a stranger gave: it works, or one message says why not, soon, in little memory, and nothing
is written.

Few examples of each door by default; with `-m proof` many. They are the same ones each time, but for constants that
hypothesis takes from whatever modules are loaded: after other files there are others.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from meshlora.cli.main import main
from meshlora_ground.errors import UserError
from meshlora_ground.routing import RoutingRecord
from tests.unit.mistakes import Setup
from tests.unit.saved import save

FEW, MANY = 6, 400
LONGEST_S, MOST_KILOBYTES = 5.0, 2**20
# As many are asked for by default, and with the marker.
NUMBERS = [FEW, pytest.param(MANY, marks=[pytest.mark.proof, pytest.mark.timeout(3600)])]

SCALARS = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1, 2**31, 10**18, -(10**30), 1e300, 0.5, float("inf"), float("nan")]),
    st.sampled_from(["", "x" * 5000, "\x1b]0;title\x07", "[/INST]", "../..", "~nosuchuser", "a\0b", "\ud800", "1e-4"]),
    st.sampled_from(["(.+)+(.+)+(.+)+zzzz$", "error: x\nerror: y", "/dev/zero", "é" * 300, "all-linear", "float32"]),
    st.text(max_size=12),
    st.integers(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
DEEP = st.integers(1, 3000).map(lambda depth: "[" * depth + "]" * depth)


@st.composite
def changed(draw: st.DrawFn, tree: Any) -> Any:
    """A copy of `tree` in which one or two values are others, or gone, or one key is new."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 2))):
        holder = draw(st.sampled_from(_holders(tree)))
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        how = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if how == "add" and isinstance(holder, dict):
            holder[draw(st.text(max_size=10))] = draw(VALUES)
        elif keys and how == "remove":
            del holder[draw(st.sampled_from(keys))]
        elif keys:
            holder[draw(st.sampled_from(keys))] = draw(VALUES)
    return tree


def _holders(tree: Any) -> list[Any]:
    """All mappings and lists in `tree`."""
    if not isinstance(tree, dict | list):
        return []
    inner = tree.values() if isinstance(tree, dict) else tree
    return [tree, *(holder for value in inner for holder in _holders(value))]


@st.composite
def broken(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` cut, with other bytes in it, or something else altogether."""
    how = draw(st.sampled_from(["cut", "flip", "insert", "other", "deep"]))
    place = draw(st.integers(0, max(0, len(content) - 1)))
    if how == "cut":
        return content[:place]
    if how == "flip":
        return content[:place] + bytes([content[place] ^ draw(st.integers(1, 255))]) + content[place + 1 :]
    if how == "insert":
        return content[:place] + draw(st.binary(max_size=20)) + content[place:]
    return draw(st.binary(max_size=200)) if how == "other" else draw(DEEP).encode()


def _json(tree: Any) -> st.SearchStrategy[bytes]:
    """Files that should hold `tree` as JSON."""
    whole = json.dumps(tree).encode()
    return changed(tree).map(lambda other: json.dumps(other).encode()) | broken(whole)


def _try(number: int, examples: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """`check` of so many examples, the same ones each time."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    options = settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=checks,
        phases=[Phase.generate],
    )

    def example(value: Any) -> None:  # hypothesis takes functions alone
        check(value)

    options(given(examples)(example))()


def _keeps_contract(
    line: list[str], folder: Path, capfd: pytest.CaptureFixture[str], *, codes: tuple[int, ...]
) -> None:
    before = _contents(folder)
    peak, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, _cpu_s()
    code = main(line)
    assert _cpu_s() - begun < LONGEST_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MOST_KILOBYTES
    out, err = capfd.readouterr()
    assert code in codes, err
    assert "Traceback" not in out + err
    if code:
        assert err.startswith("error: ")
        assert len(err) <= 2001
        assert [text for text in err.splitlines() if text.startswith("error: ")] == err.splitlines()[:1]
        assert not [c for c in out + err if ord(c) < 32 and c not in "\n\t"]
    assert _contents(folder) == before


def _cpu_s() -> float:
    """Of this process and its children. By the clock a command of 0.2 s takes 5 where others use the cores; one that
    waits in vain ends at the time limit of the test."""
    return sum(os.times()[:4])


def _contents(folder: Path) -> list[tuple[str, int, int]]:
    files = sorted(folder.rglob("*"))
    return [(str(file), (stat := file.lstat()).st_size, stat.st_mtime_ns) for file in files]


@pytest.fixture
def check_run(setup: Setup, capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """`check_run(file, content)`: what `meshlora check` says of the run while `file` holds `content`."""

    def run(file: Path, content: bytes, *more: str) -> None:
        good = file.read_bytes() if file.exists() else None
        file.write_bytes(content)
        line = ["check", str(setup.folder / "run.yaml"), *more]
        _keeps_contract(line, setup.folder, capfd, codes=(0, 2))
        if good is None:
            file.unlink()
        else:
            file.write_bytes(good)

    setup.write()
    return run


@pytest.mark.parametrize("number", NUMBERS)
def test_run_file(number: int, setup: Setup, check_run: Callable[..., None]) -> None:
    whole = yaml.safe_dump(setup.tree).encode()
    trees = changed(setup.tree).map(lambda tree: yaml.safe_dump(tree).encode())
    _try(number, trees | broken(whole), functools.partial(check_run, setup.folder / "run.yaml"))


@pytest.mark.parametrize("number", NUMBERS)
def test_override(number: int, setup: Setup, check_run: Callable[..., None]) -> None:
    keys = [f"{group}.{key}" for group, keys in setup.tree.items() if isinstance(keys, dict) for key in keys]
    texts = st.one_of(VALUES.map(lambda value: yaml.safe_dump(value)), st.text(max_size=20), DEEP)
    overrides = st.tuples(st.sampled_from(keys) | st.text(max_size=12), texts).map("=".join)
    run = (setup.folder / "run.yaml").read_bytes()
    _try(number, overrides, lambda override: check_run(setup.folder / "run.yaml", run, "--set", override))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_file_of_a_model(name: str, number: int, setup: Setup, check_run: Callable[..., None]) -> None:
    file = setup.model / name
    tree = {"metadata": {"total_size": 1}, "weight_map": {"lm_head.weight": "model.safetensors", "x": "y"}}
    if file.exists():
        tree = json.loads(file.read_text())
    _try(number, _json(tree), functools.partial(check_run, file))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", ["adapter_config.json", "meshlora.json"])
def test_file_of_an_adapter(name: str, number: int, setup: Setup, check_run: Callable[..., None]) -> None:
    setup.from_adapter()
    setup.write()
    file = setup.adapter / name
    tree = json.loads(file.read_text()) if file.exists() else {"pieces": {"q_proj": ["q"]}, "share_experts": True}
    _try(number, _json(tree), functools.partial(check_run, file))


@pytest.mark.parametrize("number", NUMBERS)
def test_data(number: int, setup: Setup, check_run: Callable[..., None]) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    kinds = [{"prompt": "a", "completion": "b"}, {"text": "a b c"}, {"messages": chat}]
    lines = st.lists(st.sampled_from(kinds).flatmap(_json), min_size=1, max_size=4).map(b"\n".join)
    _try(number, lines, functools.partial(check_run, setup.folder / "train.jsonl"))


@pytest.mark.parametrize("number", NUMBERS)
def test_manifest(number: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "step-000004")
    file = folder / "manifest.json"

    def check(content: bytes) -> None:
        file.write_bytes(content)
        _keeps_contract(["inspect", str(folder)], tmp_path, capfd, codes=(0, 1, 2))

    _try(number, _json(json.loads(file.read_text())), check)


@pytest.mark.parametrize("number", NUMBERS)
def test_record_of_routing(number: int, tmp_path: Path) -> None:
    import torch

    file = tmp_path / "step.safetensors"
    save_file({"0/mlp": torch.zeros(4, 2, dtype=torch.int32)}, file, metadata={"num_tokens": "4", "experts/mlp": "8"})
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    headers = changed(header).map(lambda tree: json.dumps(tree).encode())
    files = headers.map(lambda text: len(text).to_bytes(8, "little") + text + data)

    def check(content: bytes) -> None:
        file.write_bytes(content)
        begun = _cpu_s()
        with contextlib.suppress(UserError):
            RoutingRecord.load(file)
        assert _cpu_s() - begun < LONGEST_S

    _try(number, files | broken(whole), check)
