"""`meshlora import`: recipes as they are published become run files, or every gap is named; nothing of them is run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshlora.cli.main import main
from meshlora.run.config.file import read_runs
from meshlora.run.config.foreign.trainers import INHERITED, OTHERS, TRAINERS, facts_of
from meshlora_extra.importing.draft import Draft
from meshlora_extra.importing.imported import RULES, imported
from meshlora_extra.importing.write import text_of
from meshlora_ground.errors import UserError
from tests.for_each import for_each
from tests.run_files import TINY, copy_lines

RECIPES = Path(__file__).parents[1] / "recipes"
_NESTED, _DATA = "with quantised scales", "dataset"
# Recipe -> the keys without an answer; none: it is ready.
GAPS: dict[str, tuple[str, ...]] = {
    "automodel_hellaswag.yaml": ("dataset._target_", "peft.lora_A_init", "peft.lora_dtype"),
    "automodel_squad.yaml": ("dataset._target_", "peft.lora_A_init", "peft.lora_dtype"),
    "axolotl_gemma3_qlora.yaml": (f"load_in_4bit {_NESTED}", "unfrozen_parameters"),
    "axolotl_gpt_oss.yaml": ("datasets[0].field_thinking", "datasets[0].template_thinking_key", "optimizer"),
    "axolotl_llama3_dpo.yaml": ("special_tokens.eos_token",),
    "axolotl_llama3_instruct.yaml": (),
    "axolotl_llama3_lora.yaml": (),
    "axolotl_llama3_lora_1b.yaml": (),
    "axolotl_llama3_qlora.yaml": (f"load_in_4bit {_NESTED}",),
    "axolotl_mistral_qlora.yaml": (f"load_in_4bit {_NESTED}",),
    "axolotl_qwen3_qlora.yaml": (f"load_in_4bit {_NESTED}", "optimizer"),
    "llama_factory_dpo.yaml": (),
    "llama_factory_kto.yaml": (),
    "llama_factory_loraplus.yaml": (),
    "llama_factory_pissa.yaml": (),
    "llama_factory_qlora.yaml": (f"quantization_bit {_NESTED}",),
    "llama_factory_sft.yaml": (),
    "swift_dpo.sh": (),
    "swift_packing.sh": (_DATA,),
    "swift_sft.sh": (_DATA,),
    "swift_tuners.sh": (_DATA,),
    "torchtune_llama2_dpo.yaml": ("dtype of factors", "dataset._component_"),
    "torchtune_llama3_1.yaml": ("dtype of factors",),
    "torchtune_llama3_2_qlora.yaml": ("model.quantize_base", "dtype of factors"),
    "trl_dpo.sh": (),
    "trl_reward.sh": (),
    "trl_sft.sh": ("eos_token",),
    "trl_sft.yaml": (),
    "unsloth_llama3_1.py": (f"load_in_4bit {_NESTED}",),
}


def test_every_recipe_is_in_the_table() -> None:
    assert {file.name for file in RECIPES.iterdir()} - {"dataset_info.json"} == GAPS.keys()
    assert len(GAPS) >= 25


@for_each(("name", "gaps"), GAPS.items(), ids=list(GAPS))
def test_recipe_is_ready_or_each_of_its_gaps_is_named(
    name: str, gaps: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.yaml"
    arguments = ["import", str(RECIPES / name), "--out", str(out)]
    code, said = main(arguments), capsys.readouterr().err
    assert (code, out.exists()) == ((2, False) if gaps else (0, True)), said
    assert [gap.key for gap in imported(RECIPES / name).gaps] == list(gaps)
    for gap in gaps:
        assert f"\n  {gap}: " in said
    if gaps:
        assert main([*arguments, "--allow-missing"]) == 0
        written = " ".join(out.read_text().replace("\n#", " ").split())  # comments are wrapped
        for gap in gaps:
            assert f"NOT TAKEN: {gap}: " in written


@for_each("name", GAPS)
def test_what_is_written_is_a_run_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text_of(imported(RECIPES / name), file="run.yaml", schema="#"))
    read_runs(file, downloads=False)


def _values(name: str, **options: Any) -> dict[str, Any]:
    return imported(RECIPES / name, **options).values


@for_each(
    ("name", "key", "value"),
    [
        # The default of each trainer where it is silently another one than ours.
        ("llama_factory_sft.yaml", "lora.lora_alpha", 16),
        ("llama_factory_sft.yaml", "lora.target_modules", "all-linear"),
        ("llama_factory_sft.yaml", "train.seed", 42),
        ("llama_factory_sft.yaml", "train.recompute", "full"),
        ("llama_factory_dpo.yaml", "lora.lora_dropout", 0.0),
        ("llama_factory_loraplus.yaml", "train.lora_plus_ratio", 16),
        ("llama_factory_pissa.yaml", "lora.init_lora_weights", "pissa_niter_16"),
        ("llama_factory_qlora.yaml", "model.quantization", "nf4"),
        ("llama_factory_sft.yaml", "data.max_samples", 1000),
        ("llama_factory_sft.yaml", "data.chat_template", "chatml"),
        ("axolotl_llama3_lora.yaml", "data.too_long", "drop"),
        ("axolotl_llama3_lora.yaml", "data.packing", "rows"),
        ("axolotl_llama3_lora.yaml", "data.prompt", "alpaca"),
        ("axolotl_llama3_lora.yaml", "data.eval", 0.05),
        ("axolotl_llama3_lora.yaml", "train.eval_every", "epoch/4"),
        ("axolotl_llama3_lora.yaml", "train.save_every", "epoch"),
        ("axolotl_llama3_lora.yaml", "train.keep_last", 4),
        ("axolotl_llama3_lora.yaml", "train.optimizer", "adamw_8bit"),
        ("axolotl_llama3_lora.yaml", "train.warmup_ratio", 0.1),
        ("axolotl_llama3_lora.yaml", "train.warmup_from_zero", True),
        ("axolotl_llama3_qlora.yaml", "model.quantization", "nf4"),
        ("axolotl_llama3_lora_1b.yaml", "train.on_spike", {"above": 5.0, "patience": 3}),
        ("axolotl_qwen3_qlora.yaml", "data.train", {"path": "mlabonne/FineTome-100k", "rows": ":20%"}),
        ("axolotl_llama3_dpo.yaml", "data.columns", {"conversations": "conversation"}),
        ("axolotl_llama3_dpo.yaml", "train.objective", {"kind": "dpo", "beta": 0.1}),
        ("swift_sft.sh", "train.weight_decay", 0.1),
        ("swift_sft.sh", "train.beta2", 0.95),
        ("swift_sft.sh", "train.schedule", "cosine"),
        ("swift_sft.sh", "lora.lora_dropout", 0.05),
        ("swift_sft.sh", "data.too_long", "drop"),
        ("swift_sft.sh", "data.system", "You are a helpful assistant."),
        ("swift_tuners.sh", "data.max_length", "model"),
        ("swift_tuners.sh", "lora.target_modules", "all-linear"),
        ("torchtune_llama3_1.yaml", "train.max_grad_norm", 0),
        ("torchtune_llama3_1.yaml", "train.weight_decay", 0.01),
        ("torchtune_llama3_1.yaml", "data.max_length", "model"),
        ("torchtune_llama3_1.yaml", "data.train_on", "everything"),
        (
            "torchtune_llama3_1.yaml",
            "lora.target_modules",
            ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        ),
        ("torchtune_llama2_dpo.yaml", "train.steps", 1000),
        ("trl_sft.sh", "data.train_on", "everything"),
        ("trl_sft.sh", "model.dtype", "float32"),
        ("trl_sft.sh", "lora.lora_dropout", 0.05),
        ("trl_sft.sh", "lora.target_modules", ["q_proj", "v_proj"]),
        ("trl_sft.sh", "data.eval", {"path": "trl-lib/Capybara", "split": "test"}),
        ("trl_reward.sh", "train.objective", {"kind": "reward", "center": 0.01}),
        ("trl_reward.sh", "data.too_long", "drop"),
        ("trl_sft.yaml", "data.train_on", "all"),
        ("trl_sft.yaml", "train.min_lr", 1e-5),
        ("trl_sft.yaml", "lora.lora_alpha", 32),
        ("trl_sft.yaml", "train.track", ["wandb"]),
        ("trl_dpo.sh", "train.lr", 5e-6),
        ("trl_dpo.sh", "train.steps", 1000),  # beside one epoch
        ("unsloth_llama3_1.py", "model.quantization", "nf4"),
        ("unsloth_llama3_1.py", "data.train_on", "all"),
        ("unsloth_llama3_1.py", "train.lr", 2e-4),
        ("unsloth_llama3_1.py", "data.max_length", 2048),
        ("automodel_squad.yaml", "lora.target_modules", ".*_proj"),
        ("automodel_squad.yaml", "train.batch_size", 64),
        ("automodel_squad.yaml", "data.shuffle", False),
        ("automodel_squad.yaml", "train.seed", 42),
    ],
)
def test_value_that_a_recipe_means(name: str, key: str, value: object) -> None:
    assert _values(name)[key] == value


_RPO = {"loss": ["ipo", "sft"], "loss_weights": [1.0, 0.2]}


@pytest.mark.parametrize(
    ("name", "changes", "objective", "gaps"),
    [
        (
            "swift_dpo.sh",
            None,
            {"kind": "dpo", "beta": 0.1, "loss": ["sigmoid", "sft"], "loss_weights": [1.0, 0.1]},
            [],
        ),
        (
            "axolotl_llama3_dpo.yaml",
            {"dpo_loss_type": ["ipo"], "rpo_alpha": 0.2},
            {"kind": "dpo", "beta": 0.1} | _RPO,
            [],
        ),
        ("axolotl_llama3_dpo.yaml", {"rl": "ipo"}, {"kind": "dpo", "beta": 0.1, "loss": "ipo"}, []),
        (
            "axolotl_llama3_dpo.yaml",
            {"rl": "simpo", "rl_beta": 2, "simpo_gamma": 0.8},
            {"kind": "simpo", "beta": 2.0, "gamma": 0.8},
            ["cpo_alpha"],
        ),
        ("llama_factory_dpo.yaml", {"pref_loss": "ipo", "pref_ftx": 0.2}, {"kind": "dpo", "beta": 0.1} | _RPO, []),
        ("llama_factory_dpo.yaml", {"pref_loss": "simpo"}, {"kind": "simpo", "beta": 0.1, "gamma": 0.5}, []),
        ("llama_factory_dpo.yaml", {"pref_loss": "kto_pair"}, {"kind": "dpo", "beta": 0.1}, ["pref_loss"]),
        ("llama_factory_sft.yaml", {"use_dft_loss": True}, {"kind": "sft", "loss": "dft"}, []),
        ("trl_sft.yaml", {"loss_type": "dft"}, {"kind": "sft", "loss": "dft"}, []),
    ],
)
def test_losses_of_a_recipe_are_ours(
    name: str, changes: dict[str, Any] | None, objective: dict[str, Any], gaps: list[str], tmp_path: Path
) -> None:
    found = imported(RECIPES / name if changes is None else _recipe(tmp_path, name, **changes))
    assert found.values["train.objective"] == objective
    assert {gap.key for gap in found.gaps} - {"special_tokens.eos_token", "dataset"} == {*gaps}


def test_options_of_the_losses_of_trl_are_ours(tmp_path: Path) -> None:
    """Of `f_divergence` and others, only where they have an effect there."""
    words = "trl dpo --model_name_or_path m --dataset_name d --use_peft --loss_type robust --label_smoothing 0.1 "
    words += "--ld_alpha 0.3 --f_divergence_type forward_kl --f_alpha_divergence_coef 0.7 --discopop_tau 0.1"
    (tmp_path / "dpo.sh").write_text(words)
    assert imported(tmp_path / "dpo.sh").values["train.objective"] == {
        "kind": "dpo",
        "beta": 0.1,
        "loss": "robust",
        "label_smoothing": 0.1,
        "length_weight": 0.3,
        "f_divergence": "forward_kl",
    }
    words = "trl kto --model_name_or_path m --dataset_name d --use_peft --loss_type apo_zero_unpaired"
    (tmp_path / "kto.sh").write_text(words)
    found = imported(tmp_path / "kto.sh").values["train.objective"]
    assert found == {"kind": "kto", "beta": 0.1, "loss": "apo_zero_unpaired"}


def test_sizes_per_process_are_multiplied_and_global_ones_are_not() -> None:
    assert _values("axolotl_llama3_lora.yaml")["train.batch_size"] == 8
    of_four = _values("axolotl_llama3_lora.yaml", processes=4)
    assert (of_four["train.batch_size"], of_four["train.micro_batch_size"], of_four["topology"]) == (32, 2, "dp=4")
    launched = _values("trl_dpo.sh")  # by accelerate, with four
    assert (launched["train.batch_size"], launched["topology"]) == (64, "dp=4")
    assert _values("automodel_squad.yaml", processes=4)["train.batch_size"] == 64
    assert _values("swift_tuners.sh", processes=2)["train.batch_size"] == 32


def _recipe(folder: Path, name: str, **changes: Any) -> Path:
    """A copy of a recipe with keys changed; None: left out."""
    tree = yaml.safe_load((RECIPES / name).read_text()) | changes
    file = folder / name
    file.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}))
    return file


def test_numbers_of_accelerate_and_deepspeed_win_over_the_recipes(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": 0.3}))
    accelerate = tmp_path / "accelerate.yaml"
    accelerate.write_text(yaml.safe_dump({"num_processes": 2, "distributed_type": "DEEPSPEED"}))
    file = _recipe(tmp_path, "axolotl_llama3_lora.yaml", deepspeed="ds.json", max_grad_norm=1.0)
    found = imported(file)
    assert found.num_processes == 2  # by its name
    assert found.values["train.max_grad_norm"] == 0.3
    assert found.values["topology"] == "dp=2,dp_shard"
    assert imported(file, processes=4).values["topology"] == "dp=4,dp_shard"
    other = tmp_path / "other"
    other.mkdir()
    file = _recipe(other, "axolotl_llama3_lora.yaml")
    assert imported(file).num_processes == 1
    assert imported(file, beside=[accelerate]).num_processes == 2


def test_names_of_datasets_are_those_of_the_file_beside(tmp_path: Path) -> None:
    entries = {
        "mine": {"file_name": "mine.json", "formatting": "sharegpt", "columns": {"messages": "talk"}, "num_samples": 9},
        "pairs": {"hf_hub_url": "o/n", "subset": "s", "columns": {"prompt": "question", "response": "answer"}},
        "odd": {"file_name": "odd.json", "formatting": "sharegpt", "tags": {"user_tag": "person"}},
    }
    file = _recipe(tmp_path, "llama_factory_sft.yaml", dataset="mine,pairs")
    assert [gap.key for gap in imported(file).gaps] == ["dataset", "dataset"]  # nothing says where they are
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(entries))
    found = imported(file)
    assert found.gaps == []
    assert found.values["data.train"] == [
        {"path": str(tmp_path / "data" / "mine.json"), "rows": ":9", "columns": {"conversations": "talk"}},
        {"path": "o/n:s/train", "columns": {"instruction": "question", "output": "answer"}},
    ]
    file = _recipe(tmp_path, "llama_factory_sft.yaml", dataset="odd,none")
    assert [gap.key for gap in imported(file).gaps] == ["dataset odd: tags", "dataset"]


def test_variables_and_sums_of_a_script_are_read_and_others_named(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(
        "N=2  # it's a comment\nexport NPROC_PER_NODE=$N\nNPROC_PER_NODE=$N swift sft --model m/m --dataset d/d#9 "
        '--gradient_accumulation_steps $(expr 16 / $N / 2) --learning_rate $RATE --output_dir "$HOME/x" | tee log\n'
    )
    found = imported(file)
    assert (found.num_processes, found.values["train.batch_size"]) == (2, 8)
    assert found.values["data.train"] == {"path": "d/d", "rows": ":9"}
    assert [gap.key for gap in found.gaps] == ["learning_rate", "output_dir"]


def test_command_that_names_a_yaml_is_that_file_with_its_options_on_top(tmp_path: Path) -> None:
    _recipe(tmp_path, "llama_factory_dpo.yaml")
    file = tmp_path / "run.sh"
    file.write_text("llamafactory-cli train llama_factory_dpo.yaml learning_rate=3e-6 --lora_rank 4\n")
    found = imported(file).values
    assert (found["lora.r"], found["lora.lora_alpha"], found["train.objective"]["kind"]) == (4, 8, "dpo")


def test_notebook_is_read_cell_by_cell_without_its_magics(tmp_path: Path) -> None:
    lines = (RECIPES / "unsloth_llama3_1.py").read_text().splitlines(keepends=True)
    cells = [
        {"cell_type": "markdown", "source": ["# not code ("]},
        {"cell_type": "code", "source": ["%%capture\n", "!pip install unsloth\n"]},
        {"cell_type": "code", "source": lines},
    ]
    file = tmp_path / "notebook.ipynb"
    file.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    script = imported(RECIPES / "unsloth_llama3_1.py")
    assert imported(file).values == script.values


def test_script_is_never_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    text = (RECIPES / "unsloth_llama3_1.py").read_text()
    file = tmp_path / "train.py"
    file.write_text(f"open({str(trace)!r}, 'w').write('run')\n{text}")
    imported(file)
    assert not trace.exists()


_OF_SFT_CONFIG = """
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("m/m", load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model)
rank = compute()
trainer = SFTTrainer(model=model, train_dataset=load_dataset("json", data_files="a.jsonl", split="train"),
                     args=SFTConfig(output_dir="o", max_steps=rank))
"""


def test_defaults_are_those_of_the_patched_class_and_what_is_computed_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(_OF_SFT_CONFIG)
    found = imported(file)
    wanted = {
        "train.batch_size": 8,
        "train.optimizer": "adamw_8bit",
        "train.weight_decay": 0.001,
        "train.warmup_ratio": 0.1,
        "train.seed": 3407,
        "train.log_every": 1,
        "data.train": "a.jsonl",
        "data.train_on": "everything",
        "lora.r": 16,
    }
    assert {key: found.values[key] for key in wanted} == wanted
    assert "model.quantization" not in found.values
    assert [gap.key for gap in found.gaps] == ["max_steps"]


@for_each(
    ("name", "changes", "said"),
    [
        ("axolotl_llama3_lora.yaml", {"adapter": None}, "the recipe trains all parameters"),
        ("axolotl_llama3_lora.yaml", {"lora_r": None}, "lora_r: this key is required there, too"),
        ("axolotl_llama3_lora.yaml", {"learning_rate": "fast"}, "learning_rate: fast: it is a number there"),
        ("axolotl_llama3_lora.yaml", {"learning_rate": float("nan")}, "learning_rate: nan: it is a number there"),
        ("axolotl_llama3_lora.yaml", {"datasets": None}, "datasets: it is a list of datasets"),
        ("axolotl_llama3_lora.yaml", {"rl": "grpo"}, "rollouts are made by meshlora rl"),
        ("llama_factory_sft.yaml", {"finetuning_type": "full"}, "finetuning_type: full: LoRA is all that is trained"),
        ("llama_factory_sft.yaml", {"stage": "ppo"}, "stage: ppo: it is sft, pt, dpo or kto"),
        ("trl_sft.yaml", {"use_peft": None, "lora_r": None, "lora_target_modules": None}, "no use_peft"),
        ("trl_sft.yaml", {"num_generations": 4}, "rollouts and rewards are made by meshlora rl"),
        ("torchtune_llama3_1.yaml", {"model": {"_component_": "llama3_1_8b"}}, "the recipe trains all parameters"),
        ("automodel_squad.yaml", {"peft": None}, "no peft: the recipe trains all parameters"),
    ],
)
def test_recipe_of_something_else_is_one_message(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _recipe(tmp_path, name, **changes)
    assert main(["import", str(file), "--out", str(tmp_path / "run.yaml")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("error: ") == 1
    assert not (tmp_path / "run.yaml").exists()


@for_each(
    ("text", "name", "arguments", "said"),
    [
        ("a: 1\n", "x.yaml", (), "x.yaml: its keys are no trainer's that is known; axolotl, LLaMA-Factory"),
        ("- 1\n", "x.yaml", (), "it is no recipe"),
        ("a: [", "x.yaml", (), "it is not readable YAML"),
        ("a: &b 1\n", "x.yaml", (), "an anchor or alias in line 1"),
        (
            "sequence_len: 1\nuse_peft: true\n",
            "x.yaml",
            (),
            "keys of axolotl and of trl; say whose it is: --from axolotl",
        ),
        (
            "use_peft: 1\n",
            "x.yaml",
            ("--from", "axolotle"),
            "--from axolotle: no such trainer is known; did you mean 'axolotl'?",
        ),
        ("model: {}\ndata: {}\ntrain: {}\n", "x.yaml", (), "it is a run file already"),
        ("print('hello'\n", "x.py", (), "it is no Python that can be read (line 1)"),
        ("print('hello')\n", "x.py", (), "no call of an SFTTrainer"),
        ("[]", "x.ipynb", (), "it is no notebook"),
        ("echo hello\n", "x.sh", (), "it is no recipe: no mapping of keys, and no command of a trainer"),
        ("use_peft: true\n", "x.yaml", ("--nproc", "0"), "--nproc 0: it is a number of processes"),
        ("use_peft: true\n", "x.yaml", ("--beside", "none.json"), "--beside none.json: there is no such file"),
        ("use_peft: true\n", "x.yaml", ("--beside", "x.yaml"), "it is no accelerate YAML"),
    ],
)
def test_file_that_is_no_recipe_is_one_message(
    text: str,
    name: str,
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    assert main(["import", name, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("error: ") == 1


def test_missing_file_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text("a: 1\n")
    assert main(["import", str(tmp_path / "recipes.yaml")]) == 2
    assert "there is no such file; did you mean 'recipe.yaml'?" in capsys.readouterr().err


def test_a_file_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.yaml"
    out.write_text("mine\n")
    arguments = ["import", str(RECIPES / "llama_factory_dpo.yaml"), "--out", str(out)]
    assert main(arguments) == 2
    assert "it is there already; choose another, or --force" in capsys.readouterr().err
    assert out.read_text() == "mine\n"
    assert main([*arguments, "--force"]) == 0
    assert "kind: dpo" in out.read_text()


_ODD: tuple[Any, ...] = (True, -1.5, "odd", [1, "a"], {"a": {"b": [None]}}, [{"path": 3}], [["a"]])
_OF_EACH = ("automodel_squad", "axolotl_llama3_dpo", "llama_factory_pissa", "torchtune_llama2_dpo", "trl_sft")


@for_each("name", [f"{name}.yaml" for name in _OF_EACH])
def test_no_value_of_a_recipe_ends_in_a_traceback(name: str, tmp_path: Path) -> None:
    tree = yaml.safe_load((RECIPES / name).read_text())
    places = [(key,) for key in tree]
    places += [(key, inner) for key, value in tree.items() if isinstance(value, dict) for inner in value]
    for place in places:
        for odd in _ODD:
            changed = copy.deepcopy(tree)
            group = changed if len(place) == 1 else changed[place[0]]
            group[place[-1]] = odd
            file = tmp_path / name
            file.write_text(json.dumps(changed))  # which is YAML
            try:
                draft = imported(file, whose=name.split("_")[0].replace("llama", "llama-factory"))
                text_of(draft, file="run.yaml", schema="#")
            except UserError:
                continue
            except Exception as error:
                raise AssertionError(f"{'.'.join(place)}: {odd!r}") from error


def test_unknown_key_is_a_gap_and_never_dropped(tmp_path: Path) -> None:
    file = _recipe(
        tmp_path, "llama_factory_sft.yaml", brand_new_option=3, other_group={"a": 1, "b": 2}, off_by_default=False
    )
    (tmp_path / "dataset_info.json").write_bytes((RECIPES / "dataset_info.json").read_bytes())
    found = {gap.key: gap.value for gap in imported(file).gaps}
    assert found == {"brand_new_option": 3, "other_group": {"a": 1, "b": 2}}


@for_each("name", GAPS)
def test_each_key_became_something_or_is_named(name: str) -> None:
    draft = imported(RECIPES / name)
    text = text_of(draft, file="run.yaml", schema="#")
    assert not list(draft.left) or {key for key, _ in draft.left} <= {*draft.idle, *_last_parts(draft)}, text


def _last_parts(draft: Draft) -> set[str]:
    """Keys that lines, gaps and groups name."""
    said = " ".join([*draft.why.values(), *(gap.key for gap in draft.gaps)])
    return {key for key, _ in draft.left if key in said or key.partition(".")[0] in said}


@for_each("name", list(TRAINERS))
def test_default_of_a_trainer_is_written_where_a_recipe_is_silent(name: str) -> None:
    file = next(file for file in sorted(RECIPES.iterdir()) if file.name.startswith(name.replace("-", "_")))
    draft = imported(file)
    of_adapter = "adapter" in draft.values
    for key in TRAINERS[name].defaults:
        assert key in draft.values or (of_adapter and key.startswith("lora.")) or key == "train.keep_last"


def test_every_trainer_has_its_rules_and_no_key_has_two_rows() -> None:
    assert RULES.keys() == TRAINERS.keys()
    for trainer in TRAINERS.values():
        names = [name for fact in trainer.facts for name in fact.names.split()]
        if trainer.name != "unsloth":  # whose rows go before those of TRL
            assert sorted(names) == sorted(set(names)), trainer.name
    for facts in (INHERITED, OTHERS):
        names = [name for fact in facts for name in fact.names.split()]
        assert sorted(names) == sorted(set(names))


@for_each("name", list(TRAINERS))
def test_signs_of_a_trainer_are_keys_of_its_table(name: str) -> None:
    trainer = TRAINERS[name]
    groups = {key.partition(".")[0] for key in facts_of(trainer)}
    assert set(trainer.signs) <= facts_of(trainer).keys() | groups


_OF_TRL = {"model_name_or_path": str(TINY), "dataset_name": "train.jsonl", "use_peft": True, "lora_r": 4}
_OF_TRL |= {"completion_only_loss": True, "max_length": 64, "warmup_steps": 2, "per_device_train_batch_size": 2}
_OF_TRL |= {"gradient_accumulation_steps": 3, "num_train_epochs": 2, "output_dir": "out", "trust_remote_code": False}
_BUILDER = "torchtune.datasets.text_completion_dataset"
_OF_TORCHTUNE: dict[str, Any] = {
    "checkpointer": {"checkpoint_dir": f"{TINY}/"},
    "dataset": {"_component_": _BUILDER, "source": "json", "data_files": "train.jsonl", "column": "completion"},
}
_OF_TORCHTUNE |= {"seed": 0, "dtype": "fp32", "batch_size": 2, "gradient_accumulation_steps": 3, "epochs": 2}
# Of steps at which something is done, 0 is none.
_OF_TORCHTUNE |= {"log_every_n_steps": 0, "run_val_every_n_steps": 0, "output_dir": "out"}


@for_each(
    ("changes", "name"),
    [(_OF_TRL, ""), ({**_OF_TRL, "logging_steps": 0}, ""), (_OF_TORCHTUNE, "torchtune_llama3_1.yaml")],
    ids=["trl", "trl, without lines", "torchtune"],
)
def test_imported_file_passes_check(
    changes: dict[str, Any],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy_lines("train", tmp_path / "train.jsonl", 0, 12)
    monkeypatch.chdir(tmp_path)
    given = yaml.safe_load((RECIPES / name).read_text()) if name else {}
    given.get("lr_scheduler", {})["num_warmup_steps"] = 2
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(given | changes))
    assert main(["import", "recipe.yaml", "--force"]) == 0
    assert main(["check", "run.yaml"]) == 0
    assert "steps       4 of 6 sequences" in capsys.readouterr().out
