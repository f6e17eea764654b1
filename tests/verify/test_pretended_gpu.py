"""On a machine with a GPU: proofs on CPUs see none, those on it are spawned, and nothing forks that has opened it.

The GPU is pretended (`tests/pretended_gpu`), so a command that is right to use it ends where it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.comm.launchers import NO_GPUS
from meshlora.verify import pool as module
from tests.pool import Pool
from tests.processes import Started
from tests.run_files import TINY, write_run_file

TESTS = Path(__file__).parents[1]
PRETENDED = "this GPU is only pretended"
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
ON_TRAINER = f"""
import sys, meshlora
from meshlora.hf import MeshTrainer
from peft import LoraConfig
from transformers import TrainingArguments

lora = LoraConfig(**{LORA})
model = meshlora.load({str(TINY)!r}, lora=lora, dtype="float32", device=sys.argv[1])
options = dict(max_steps=1, per_device_train_batch_size=1, save_strategy="no", report_to=[], disable_tqdm=True)
rows = [dict(input_ids=[3, 4, 5, 6], labels=[3, 4, 5, 6])] * 2
arguments = TrainingArguments(sys.argv[2], use_cpu=sys.argv[1] == "cpu", **options)
MeshTrainer(model=model, args=arguments, train_dataset=rows).train()
"""


def _file(folder: Path, **groups: Any) -> str:
    """A run file of one step on one process, on whatever device there is."""
    rows = [{"prompt": f"def f_{number}(x):", "completion": " return x"} for number in range(4)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own: dict[str, Any] = {"topology": "dp=1", **groups}
    own["train"] = {"steps": 1, "batch_size": 2, "micro_batch_size": 1, **groups.get("train", {})}
    own["data"] = {"max_length": 32, "eval": str(folder / "train.jsonl")} | groups.get("data", {})
    return str(write_run_file(folder / "run.yaml", model={"dtype": "float32"}, lora=LORA, **own))


def _rl_file(folder: Path, **groups: Any) -> str:
    """The same for rollouts, whose prompts are conversations: their template is rendered in a fork."""
    file = _file(
        folder,
        rl={"completions": 2, "max_new_tokens": 2, "rewards": [{"kind": "regex", "pattern": "e"}]},
        train={"objective": {"kind": "grpo"}},
        data={"chat_template": str(folder / "chat.jinja"), "eval": None},
        **groups,
    )
    (folder / "chat.jinja").write_text("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
    asked = {"messages": [{"role": "user", "content": "def f(x):"}]}
    (folder / "train.jsonl").write_text(f"{json.dumps(asked)}\n" * 2)
    return file


def _adapter(folder: Path) -> str:
    lora = LoraConfig(**LORA, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), lora).save_pretrained(folder / "adapter")
    return str(folder / "adapter")


def _script(folder: Path, device: str) -> list[str]:
    (folder / "on_trainer.py").write_text(ON_TRAINER)
    return [str(folder / "on_trainer.py"), device, str(folder / "out")]


def _meshlora(*words: str) -> list[str]:
    return ["-P", "-m", "meshlora", *words]


def _ended(folder: Path, *words: str, gpus: int = 1) -> tuple[int, str, list[str]]:
    """(exit code, what it said, what its processes did with GPUs) of `python WORDS` where there are `gpus`."""
    log = folder / "log"
    log.touch()
    path = f"{TESTS / 'pretended_gpu'}:{Path(meshlora.__file__).parents[1]}"
    more = {"PYTHONPATH": path, "PRETENDED_GPUS": str(gpus), "PRETENDED_GPU_LOG": str(log)}
    with Started(folder, *words, **more) as run:
        code, out, err = run.end(timeout_s=900)
    return code, out + err, log.read_text().splitlines()


def _assert_it_came_to_the_gpu(code: int, said: str, did: list[str]) -> None:
    assert code == 1, said
    assert PRETENDED in said
    assert did
    assert {line.partition(":")[0] for line in did} == {"opened"}, did


@pytest.mark.timeout(900)
def test_train_proves_on_cpus_in_forks_and_then_on_the_gpu_in_what_it_spawns(tmp_path: Path) -> None:
    """The first command of a user: PEFT's loader took the GPU in the reference on CPUs, which was forked."""
    code, said, did = _ended(tmp_path, *_meshlora("train", _file(tmp_path)))
    assert "preflight: llama on dp=1 proved in" in said, said
    assert "preflight: proving a twin of llama on dp=1 on NVIDIA H200" in said, "and then the proof on the GPU"
    _assert_it_came_to_the_gpu(code, said, did)


ON_CPUS: dict[str, Callable[[Path], list[str]]] = {
    "train": lambda folder: _meshlora("train", _file(folder, device="cpu")),
    "train, two ranks": lambda folder: _meshlora(
        "train", _file(folder, device="cpu", topology="tp=2,sp"), "--nproc", "2"
    ),
    "train, device proof": lambda folder: _meshlora("train", _file(folder, device="cpu", preflight="device")),
    "check": lambda folder: _meshlora("check", _file(folder, device="cpu"), "--prove"),
    "verify": lambda _: _meshlora("verify", "--family", "llama", "--topology", "dp=2", "--device", "cpu"),
    "evaluate": lambda folder: _meshlora(
        "evaluate", _file(folder, device="cpu", topology="dp=2"), "--base", "--nproc", "2"
    ),
    "rl": lambda folder: _meshlora("rl", _rl_file(folder, device="cpu", topology="dp=2"), "--nproc", "2"),
    "merge": lambda folder: _meshlora(
        "merge", "--model", str(TINY), "--adapter", _adapter(folder), "--out", str(folder / "merged")
    ),
    "MeshTrainer": lambda folder: _script(folder, "cpu"),
}
ON_GPUS: dict[str, Callable[[Path], list[str]]] = {
    "train, two ranks": lambda folder: _meshlora("train", _file(folder, topology="dp=2"), "--nproc", "2"),
    "check": lambda folder: _meshlora("check", _file(folder), "--prove"),
    "verify": lambda _: _meshlora("verify", "--family", "llama", "--topology", "", "--device", "cuda"),
    "evaluate": lambda folder: _meshlora("evaluate", _file(folder), "--base"),
    "generate": lambda _: _meshlora("generate", "--model", str(TINY), "--prompt", "def f(x):", "--nproc", "2"),
    "rl": lambda folder: _meshlora("rl", _rl_file(folder), "--no-preflight"),
    "MeshTrainer": lambda folder: _script(folder, "cuda"),
}


@pytest.mark.proof  # each starts three interpreters or more
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", ON_CPUS)
def test_command_that_is_bound_to_cpus_passes_and_opens_no_gpu(command: str, tmp_path: Path) -> None:
    code, said, did = _ended(tmp_path, *ON_CPUS[command](tmp_path), gpus=2)
    assert code == 0, said
    assert not did


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", ON_GPUS)
def test_command_on_gpus_comes_to_them_without_a_fork(command: str, tmp_path: Path) -> None:
    _assert_it_came_to_the_gpu(*_ended(tmp_path, *ON_GPUS[command](tmp_path), gpus=2))


def test_ranks_of_a_pool_on_cpus_see_no_gpu(pools: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pools(1).start()
    ((seen),) = pools(1).run(_visible)
    assert seen == list(NO_GPUS.values())
    assert _visible() != seen, "this process sees those that it saw before"


def _visible() -> list[str | None]:
    import os

    return [os.environ.get(name) for name in NO_GPUS]


def test_ranks_are_not_forked_from_the_server_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have counted GPUs, and has imported nothing for us."""
    assert module._context("cpu")[0].get_start_method() == "forkserver"
    monkeypatch.setattr(module, "_own", set())
    assert module._context("cpu")[0].get_start_method() == "spawn"
    module.stop_forking()  # nor is it ended
    assert module._context("cpu")[0].get_start_method() == "spawn"
