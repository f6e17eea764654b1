"""vLLM serves an adapter and wrong copies of it: `meshlora judge served` tells them apart. `make test-vllm`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshlora_extra.rl.engine import Engine
from tests.scripts import ROOT, load_script
from tests.unit.test_judge_served import found, make_adapter
from tests.wrong_adapters import alpha, edited, exchanged, other_values, shifted, without

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
# Name -> (the folder that is served for an adapter, what the verdict says).
WRONG: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "alpha_doubled": (lambda a, out: edited(a, out, lora_alpha=2 * alpha(a)), "scaled by 2"),
    "rslora_dropped": (lambda a, out: edited(a, out, use_rslora=False), "as if use_rslora were off"),
    "mlp_stripped": (
        lambda a, out: edited(
            a,
            out,
            lambda tensors: {key: value for key, value in tensors.items() if ".mlp." not in key},
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        ),
        "without MLP",
    ),
    "no_down_proj": (lambda a, out: edited(a, out, without("down_proj")), "without down_proj"),
    "shifted": (lambda a, out: edited(a, out, shifted), "A and B of layers shifted by"),
    "k_and_v": (lambda a, out: edited(a, out, exchanged("k_proj", "v_proj")), "k_proj and v_proj exchanged"),
    "a_layer": (lambda a, out: edited(a, out, without(r"layers\.1\.")), "without layer 1"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("served")
    base = load_script("grpo_vllm", "examples").make_base(folder / "base")
    return base, make_adapter(base, folder / "mine", r=8, target_modules="all-linear", use_rslora=True, lora_alpha=8)


@pytest.fixture(scope="module")
def url(folders: tuple[Path, Path]) -> Iterator[str]:
    """A vLLM with the adapter under `mine`, and each mistake under its own name."""
    assert PYTHON.exists(), "make test-vllm sets it up"
    base, adapter = folders
    with load_script("grpo_vllm", "examples").vllm_serving(base, PYTHON, base.with_name("vllm.log")) as url:
        engine = Engine(url)
        engine.load_adapter("mine", adapter)
        for name, (change, _) in WRONG.items():
            engine.load_adapter(name, change(adapter, base.with_name(name)))
        engine.load_adapter("another", edited(adapter, base.with_name("another"), other_values))
        yield url


def test_the_right_adapter_is_proved(folders: tuple[Path, Path], url: str, tmp_path: Path) -> None:
    value = found(url, *folders, tmp_path / "found.json")
    assert (value["verdict"], value["found"][0]) == ("proved", "base + adapter")
    assert (value["dtype"], value["asked_by"], value["unseen"]) == ("float32", "prompt_logprobs", [])
    assert value["effect"] > 100 * value["limit"]


@pytest.mark.parametrize("mistake", WRONG)
def test_each_mistake_is_named(mistake: str, folders: tuple[Path, Path], url: str, tmp_path: Path) -> None:
    value = found(url, *folders, tmp_path / "found.json", "--name", mistake)
    assert value["verdict"] == "refuted"
    assert WRONG[mistake][1] in value["found"][0], value["text"]


def test_the_base_for_the_adapter_and_another_adapter(folders: tuple[Path, Path], url: str, tmp_path: Path) -> None:
    value = found(url, *folders, tmp_path / "found.json", "--name", str(folders[0]))
    assert (value["verdict"], value["found"][0]) == ("refuted", "the bare base")
    value = found(url, *folders, tmp_path / "found.json", "--name", "another")
    assert (value["verdict"], value["found"]) == ("refuted", [])
    assert "Another adapter, or another base" in value["text"]
