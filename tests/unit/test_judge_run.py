"""`meshlora judge run`: what it puts around a command, and what it says of one that fails. Whole runs: tests/judged."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GPT2Config, LlamaConfig

from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_judge.command import main
from meshlora_judge.running import command, cpu, listening, twins
from meshlora_judge.running.child import Run, environment
from meshlora_judge.twin import shrink_config


@pytest.fixture
def run(tmp_path: Path) -> Run:
    command.prepare(tmp_path / "run", steps=2, has_twins=True)
    return Run(tmp_path / "run", ranks=1)


def test_processes_of_a_command_import_nothing_heavy_and_run_the_users_own_start(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import sys; sys.was_own = True")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'own'}")
    code = "import sys; print([sys.was_own, *({'torch', 'transformers', 'peft', 'numpy'} & {*sys.modules})])"
    program = [sys.executable, "-P", "-c", code]
    done = subprocess.run(program, env=dict(environment(run.folder)), capture_output=True, text=True, timeout=60)
    assert done.stdout == "[True]\n", done.stderr


def test_a_module_is_changed_after_its_import_and_its_loader_is_its_own_again(run: Run, tmp_path: Path) -> None:
    package = tmp_path / "site" / "accelerate" / "commands"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "launch.py").write_text("def launch_command(args):\n    return args.multi_gpu\n")
    code = (
        "import types; from accelerate.commands import launch\n"
        "given = dict(num_processes=2, multi_gpu=False, use_fsdp=False, use_deepspeed=False)\n"
        "args = types.SimpleNamespace(**given, use_megatron_lm=False, tpu=False, cpu=True)\n"
        "print(launch.launch_command(args), 'exec_module' in vars(launch.__spec__.loader))"
    )
    known = dict(environment(run.folder))
    known["PYTHONPATH"] += f":{tmp_path / 'site'}"
    program = [sys.executable, "-P", "-c", code]
    done = subprocess.run(program, env=known, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True False\n", done.stderr


def test_a_twin_with_real_tokens_keeps_vocabulary_ids_and_positions() -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 6}
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    given = LlamaConfig(vocab_size=32003, eos_token_id=32001, pad_token_id=32002, rope_parameters=rope, **sizes)
    tiny = shrink_config(given, keeps_tokens=True)
    assert (tiny.vocab_size, tiny.eos_token_id, tiny.pad_token_id) == (32003, 32001, 32002)
    assert tiny.max_position_embeddings == given.max_position_embeddings
    assert tiny.rope_parameters["original_max_position_embeddings"] == 8192
    assert (tiny.num_hidden_layers, tiny.hidden_size) == (2, 64)
    assert shrink_config(given).eos_token_id == 2
    assert shrink_config(GPT2Config(n_layer=3), keeps_tokens=True).n_positions == 1024


def test_a_model_is_read_once_as_a_twin_beside_its_tokenizer(run: Run, tmp_path: Path) -> None:
    base = tmp_path / "base"
    LlamaConfig(vocab_size=300, hidden_size=512, num_attention_heads=8, num_hidden_layers=6).save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    (base / "model.safetensors").write_text("never read")
    given = {"device_map": "auto", "attn_implementation": "flash_attention_2", "output_loading_info": True}
    folder, kept = twins._replaced(base, given, run.folder / "twins", run)
    again, _ = twins._replaced(base, {"config": AutoConfig.from_pretrained(base)}, run.folder / "twins", run)
    assert folder == again
    assert kept == {"attn_implementation": "sdpa", "output_loading_info": True}
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert (folder / "model.safetensors").stat().st_size > 100_000
    said = command.said(run.folder)
    assert f"{base} is a twin of it: 2 of 6 layers, 64 of 512 features, 8 of 8 heads, its 300 tokens kept" in said
    assert "attn_implementation=flash_attention_2 is sdpa, as on CPUs" in said
    other = AutoConfig.from_pretrained(base, rms_norm_eps=0.1)  # the judge must have what the recipe changed
    changed, _ = twins._replaced(base, {"config": other}, run.folder / "twins", run)
    assert AutoConfig.from_pretrained(changed).rms_norm_eps == 0.1


def test_a_quantised_base_is_refused_in_words(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="quantization_config"), run.refusing():
        twins._replaced(tmp_path, {"quantization_config": object()}, run.folder / "twins", run)
    error = command.failure(run.folder, 1)
    assert isinstance(error, UserError)
    assert "--no-twin" in str(error)


def test_arguments_of_a_trainer_keep_it_on_cpus_and_from_saving(run: Run) -> None:
    class Arguments:
        def __init__(self) -> None:
            self.push_to_hub, self.save_strategy, self.report_to, self.use_cpu = True, "steps", ["wandb"], False
            self.fp16 = self.bf16 = True
            self.__post_init__()

        def __post_init__(self) -> None:
            self.was = (self.push_to_hub, self.save_strategy, self.report_to, self.use_cpu, self.fp16, self.bf16)

    cpu.arguments_on_cpu(types.SimpleNamespace(TrainingArguments=Arguments), run)
    assert Arguments().was == (False, "no", "none", True, False, True)
    assert command.said(run.folder) == ["fp16=True is False, as on CPUs"]


def test_groups_speak_gloo(run: Run) -> None:
    asked: list[Any] = []
    module = types.SimpleNamespace(init_process_group=lambda backend=None, **kwargs: asked.append((backend, kwargs)))
    cpu.group_on_cpu(module, run)
    module.init_process_group("nccl", rank=1, device_id=3)
    module.init_process_group()
    assert asked == [("gloo", {"rank": 1}), ("gloo", {})]


def test_a_rank_that_has_recorded_waits_for_the_others_and_ends(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_WAIT_S", 0.1)
    slept: list[float] = []
    monkeypatch.setattr(listening.time, "sleep", lambda seconds: slept.append(seconds))
    with pytest.raises(SystemExit) as ended:
        listening._end(0, 2, run.folder)
    assert ended.value.code == 0
    assert slept
    slept.clear()
    with pytest.raises(SystemExit):
        listening._end(1, 2, run.folder)
    assert not slept


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: no rows\nx FAILED\n",
            "ValueError: no rows",
        ),
        ("KeyError: 'a'\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n", "KeyError: 'a'"),
        ("subprocess.CalledProcessError: Command died\n", "subprocess.CalledProcessError: Command died"),
        ("bash: no such thing\n", "bash: no such thing"),
        ("", "it said nothing"),
    ],
)
def test_a_failed_command_is_told_by_its_own_error(run: Run, output: str, said: str) -> None:
    (run.folder / "output.txt").write_text(output)
    assert f"exit code 3: {said}" in str(command.failure(run.folder, 3))


def test_a_command_that_fails_after_all_ranks_have_recorded_is_judged(run: Run) -> None:
    (run.folder / "recording").mkdir()
    for rank in (0, 1):
        (run.folder / "recording" / f"rank-{rank:05d}.safetensors").touch()
    (run.folder / "done" / "0").touch()
    assert "rank 1 did not record all steps" in str(command.failure(run.folder, 0))
    (run.folder / "output.txt").write_text("")
    assert command.failure(run.folder, 1) is not None
    (run.folder / "done" / "1").touch()
    assert command.failure(run.folder, 1) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "it needs a command"),
        (["--steps", "0", "--", "true"], "it must be at least 1"),
        (["--", "/no/such/program"], "it cannot be started (No such file or directory)"),
        (["--", "true"], "it ended without a step of a torch optimizer"),
        (["--json", "/no/folder/x.json", "--", "true"], "there is no folder"),
    ],
)
def test_mistakes_end_with_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_to_keep_must_be_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert main(["run", "--keep", str(tmp_path), "--", "true"]) == 2
    assert "it is not an empty folder" in capsys.readouterr().err


def test_settings_travel_to_the_processes(tmp_path: Path) -> None:
    command.prepare(tmp_path / "run", steps=5, has_twins=False)
    assert json.loads((tmp_path / "run" / "settings.json").read_text()) == {"steps": 5, "has_twins": False}
    found = Run(tmp_path / "run", ranks=2)
    assert (found.steps, found.has_twins) == (5, False)
