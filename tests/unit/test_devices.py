"""Each tensor that a step makes says where: one without a device is made on the host, and the host waits to move it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import meshlora
from tests.for_each import for_each

ROOT = Path(meshlora.__file__).parent
MAKERS = {"empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "scalar_tensor", "eye", "linspace"}
MAKERS |= {"rand", "randn", "randint", "randperm", "empty_strided"}
# What runs in a step, between the batch and the optimizer.
# Of wings, what plans, loads and saves.
OFF_THE_STEP = {"packed.py", "grouped_ints.py", "rounding.py", "per_expert.py", "targets.py", "routing.py"}
OF_A_STEP = [
    *(ROOT / "layers").rglob("*.py"),
    *(
        file
        for wing in ("context", "experts", "kernels", "packed_rows", "quantized", "stages")
        for file in (ROOT / "wings" / wing).glob("*.py")
        if file.name not in OFF_THE_STEP
    ),
    *(ROOT / "comm" / name for name in ("collectives.py", "direct.py")),
    *(ROOT / "model" / name for name in ("regions.py", "stream.py")),
    *(ROOT / "train" / f"{name}.py" for name in ("gradsync", "losses")),
    *(ROOT / "run" / f"{name}.py" for name in ("trainer", "step_sums", "objectives")),
]


def unplaced(tree: ast.AST) -> Iterator[str]:
    """Calls that make a tensor without saying where, other than those handed to `to_device`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    moved = {
        id(inner) for call in calls if ast.unparse(call.func).endswith("to_device") for inner in ast.walk(call.args[0])
    }
    for call in calls:
        owner, _, name = ast.unparse(call.func).rpartition(".")
        says = any(keyword.arg in ("device", None) for keyword in call.keywords)  # None: ** with it in
        if owner == "torch" and name in MAKERS and not says and id(call) not in moved:
            yield f"{call.lineno}: {ast.unparse(call)}"


@for_each("path", OF_A_STEP, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_tensor_of_a_step_names_its_device(path: Path) -> None:
    assert not list(unplaced(ast.parse(path.read_text())))


def test_a_call_without_a_device_is_found() -> None:
    text = """
a = torch.zeros(3)
b = torch.zeros(3, device=x.device)
c = to_device(torch.tensor([1, 2]), x.device)
d = torch.empty(3, **options)
e = to_device(a, torch.arange(2))
"""
    assert list(unplaced(ast.parse(text))) == ["2: torch.zeros(3)", "6: torch.arange(2)"]
