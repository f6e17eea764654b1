"""A user's mistake gives one message: what was given, the rule, the way out. Exit code 2, and nothing has happened yet.

Each case breaks a copy of a good run in one place and lists words that the message must hold. `check` and
`train --nproc` must say the same, before a weight is read, a rank is started or a file is written.

Here: the run file, the topology and the number of processes; the rest is in `test_user_mistakes_*.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import yaml

from meshlora.cli.main import main
from tests.for_each import for_each
from tests.unit.mistakes import Case, Setup, assert_words, case, check_mistake, message_of, setting, several

pytestmark = pytest.mark.usefixtures("nothing_has_happened_yet")


MISTAKES: dict[str, Case] = {
    # The run file.
    "run_file_missing": case(
        lambda s: setattr(s, "file", "rum.yaml"), "rum.yaml", "no such run file", "did you mean 'run.yaml'?"
    ),
    "run_file_is_a_folder": case(lambda s: setattr(s, "file", "model"), "model", "not readable"),
    "run_file_is_not_yaml": case(lambda s: setattr(s, "text", "model: [1\n  x: }"), "run.yaml", "not readable YAML"),
    "run_file_is_a_list": case(lambda s: setattr(s, "text", "- a\n- b\n"), "run.yaml", "mapping", "model:"),
    "run_file_is_empty": case(lambda s: setattr(s, "text", ""), "run.yaml", "mapping", "model:"),
    "unknown_top_level_key": case(setting("topolgy", "tp=2"), "topolgy", "unknown key", "did you mean 'topology'?"),
    "unknown_nested_key": case(
        setting("train.warm_up_steps", 1), "train.warm_up_steps", "unknown key", "did you mean 'warmup_steps'?"
    ),
    "unknown_key_that_sets_the_title_of_a_terminal": case(
        setting("train.\x1b]0;title\x07", 1), "train.\\x1b]0;title\\x07", "unknown key", "known: "
    ),
    "unknown_key_that_looks_like_an_error_of_ours": case(
        setting("train.x\nerror: the disk is full", 1), "train.x\\nerror: the disk is full", "unknown key"
    ),
    "unknown_key_of_a_megabyte": case(setting("train." + "x" * 10**6, 1), "train.xxx", "xxx: unknown key; known: "),
    "unknown_model_key": case(setting("model.name", "x"), "model.name", "unknown key", "path"),
    "text_where_a_number_is_due": case(setting("train.lr", "fast"), "train.lr", "'fast'", "a number"),
    "fraction_where_a_whole_number_is_due": case(setting("train.steps", 2.5), "train.steps", "2.5", "a whole number"),
    "value_where_a_group_is_due": case(setting("train", 3), "train: 3", "a group of keys", "steps"),
    "text_where_true_or_false_is_due": case(
        setting("train.overwrite", "maybe"), "train.overwrite", "'maybe'", "true or false"
    ),
    "unknown_choice": case(
        setting("model.dtype", "bfloat"), "model.dtype", "'bfloat'", "float32", "did you mean 'bfloat16'?"
    ),
    "unknown_preset": case(
        setting("preset", "microsoft-e2"), "preset: 'microsoft-e2'", "did you mean 'microsoft-e2e'?"
    ),
    "preset_is_a_list": case(setting("preset", ["x"]), "preset: ['x']", "no such preset"),
    "preset_for_another_family": case(
        several(setting("preset", "microsoft-e2e"), setting("lora", {"lora_dropout": 0.0}), setting("train.eps", 1e-8)),
        "c_attn",
    ),
    "unknown_tracker": case(setting("train.track", ["tensorbord"]), "'tensorbord'", "did you mean 'tensorboard'?"),
    "tracker_not_installed": case(setting("train.track", ["trackio"]), "'trackio'", "pip install trackio"),
    "eval_limit_without_eval_data": case(
        several(setting("data.eval_limit", 2), lambda s: s.drop("data.eval")), "data.eval_limit=2", "without data.eval"
    ),
    "samples_of_nothing": case(
        several(setting("train.sample_every", 2), lambda s: s.drop("data.eval")),
        "train.sample_every=2",
        "data.sample_prompts",
    ),
    "sample_prompts_that_are_never_used": case(
        setting("data.sample_prompts", ["a"]), "data.sample_prompts", "no effect without train.sample_every"
    ),
    "sample_prompt_beyond_the_positions": case(
        several(setting("train.sample_every", 2), setting("data.sample_prompts", ["a " * 100])),
        "generate.max_new_tokens 64",
        "128 positions",
    ),
    "sampling_options_without_sampling": case(
        setting("generate", {"temperature": 0.5}), "generate.temperature", "no effect without do_sample"
    ),
    **{
        f"{option}_is_empty": case(setting(option, ""), f"{option}=''", "the name of a folder or a file")
        for option in ("model.path", "data.train", "data.eval", "data.chat_template", "train.routing_record")
    },
    "required_key_missing": case(lambda s: s.drop("train.output"), "train.output", "required"),
    "required_group_missing": case(lambda s: s.drop("data"), "data", "required"),
    "set_without_value": case(
        lambda s: s.arguments.extend(["--set", "train.lr"]), "--set train.lr", "key.path=value", "train.lr=1e-4"
    ),
    "set_key_without_a_name": case(lambda s: s.arguments.extend(["--set", "..=1"]), "--set ..=1", "key.path=value"),
    "set_unknown_key": case(
        lambda s: s.arguments.extend(["--set", "train.lrr=1"]), "train.lrr", "unknown key", "did you mean 'lr'?"
    ),
    "set_below_a_value": case(
        lambda s: s.arguments.extend(["--set", "topology.tp=1"]), "--set topology.tp=1", "topology is a value"
    ),
    "steps_and_epochs": case(setting("train.epochs", 1), "both", "train.steps", "train.epochs", "give one"),
    "neither_steps_nor_epochs": case(lambda s: s.drop("train.steps"), "neither", "train.steps", "train.epochs"),
    "lora_and_adapter": case(setting("adapter", "x"), "both", "lora and adapter", "one of them"),
    "neither_lora_nor_adapter": case(lambda s: s.drop("lora"), "neither", "lora and adapter", "give lora"),
    "eval_every_without_eval_data": case(
        several(setting("train.eval_every", 2), lambda s: s.drop("data.eval")),
        "train.eval_every=2",
        "no effect without data.eval",
    ),
    "warmup_as_long_as_the_run": case(setting("train.warmup_steps", 4), "train.warmup_steps=4", "below the 4 steps"),
    "warmup_ratio_of_the_whole_run": case(
        setting("train.warmup_ratio", 0.999), "train.warmup_ratio=0.999, or 4 steps: it must be below the 4 steps"
    ),
    "negative_learning_rate": case(setting("train.lr", -1.0), "train.lr=-1.0", "above 0"),
    "learning_rate_of_hundreds": case(setting("train.lr", 200), "train.lr=200", "at most 10"),
    "learning_rate_not_finite": case(setting("train.lr", float("inf")), "train.lr", "inf", "finite"),
    "weight_decay_not_a_number": case(setting("train.weight_decay", float("nan")), "train.weight_decay", "nan"),
    "replica_check_less_often_than_never": case(
        setting("train.replica_check_every", -1), "train.replica_check_every=-1", "not negative"
    ),
    "recompute_unknown": case(
        setting("train.recompute", "all"), "train.recompute=all", "none, full, keep_attention, offload or a"
    ),
    "recompute_of_eager_attention": case(
        several(setting("train.recompute", "keep_attention"), setting("model.attn_implementation", "eager")),
        "train.recompute=keep_attention with attn_implementation=eager",
        "only sdpa has what is kept",
        "use model.attn_implementation: sdpa, or train.recompute: full",
    ),
    "recompute_every_zeroth_layer": case(
        setting("train.recompute", 0), "train.recompute=0", "none, full, keep_attention, offload or a"
    ),
    "recompute_beyond_the_model": case(setting("train.recompute", 3), "train.recompute=3", "use at most 2"),
    "packing_with_another_attention": case(
        several(setting("data.packing", True), setting("model.attn_implementation", "flex_attention")),
        "model.attn_implementation=flex_attention",
        "eager and sdpa",
    ),
    "packing_over_convolutions": case(
        several(setting("data.packing", True), lambda s: s.family("lfm2"), setting("lora.target_modules", ["q_proj"])),
        "data.packing with model_type 'lfm2'",
        "mix sequences of one row",
        "data.packing: false",
    ),
    "zero_steps": case(setting("train.steps", 0), "train.steps=0", "at least 1"),
    "zero_micro_batch": case(setting("train.micro_batch_size", 0), "train.micro_batch_size=0", "at least 1"),
    "batch_smaller_than_dp": case(
        several(setting("topology", "dp=8"), lambda s: setattr(s, "nproc", 8)),
        "train.batch_size=4",
        "dp=8",
        "raise train.batch_size or lower dp",
    ),
    "learning_rate_beyond_all_floats": case(setting("train.lr", 10**400), "train.lr", "finite"),
    "seed_beyond_64_bits": case(setting("train.seed", 2**63), "train.seed", "below 2**63"),
    "key_given_twice": case(
        lambda s: setattr(s, "text", yaml.safe_dump(s.tree) + "topology: dp=2\n"), "topology is given twice", "lines"
    ),
    # The topology.
    "unknown_axis": case(setting("topology", "tpp=2"), "'tpp=2'", "'tpp' is not an axis", "did you mean 'tp'?"),
    "axis_that_is_not_a_number": case(setting("topology", "tp=two"), "'two'", "whole number", "tp=2"),
    "axis_of_zero": case(setting("topology", "tp=0"), "tp=0", "at least 1", "tp=1"),
    "axis_twice": case(setting("topology", "tp=2,tp=2"), "tp is given twice", "each axis once"),
    "sp_without_tp": case(
        several(setting("topology", "dp=2,sp"), lambda s: setattr(s, "nproc", 2)), "sp with tp=1", "raise tp"
    ),
    "topology_is_a_number": case(setting("topology", 2), "topology: 2", "text"),
    "expert_parallelism_of_a_dense_model": case(
        setting("topology", "dp=2,ep=2"), "dp=2,ep=2", "'llama' has no routed experts", "leave out ep"
    ),
    "topology_whose_experts_do_not_fit_the_ranks": case(
        setting("topology", "dp=2,ep=3"), "ep*etp=3", "must divide dp*tp", "use ep*etp in {1, 2}"
    ),
    "ring_without_cp": case(setting("topology", "tp=2,ring"), "ring with cp=1", "raise cp"),
    "cp_with_another_attention": case(
        several(setting("topology", "cp=2"), setting("model.attn_implementation", "flex_attention")),
        "attn_implementation=flex_attention on cp=2",
        "attend by sdpa or eager",
        "use attn_implementation=sdpa",
    ),
    "ring_of_a_family_with_indexers": case(
        several(
            setting("topology", "cp=2,ring"),
            lambda s: s.family("deepseek_v32"),
            setting("lora.target_modules", ["o_proj"]),
        ),
        "DeepseekV32Attention",
        "the keys of all tokens together",
        "leave out ring",
    ),
    "dp_shard_without_dp": case(setting("topology", "tp=2,dp_shard"), "dp_shard with dp=1", "raise dp"),
    "unknown_quantization": case(
        setting("model.quantization", "nf5"), "model.quantization", "'nf5'", "'fp8' or 'keep'"
    ),
    "two_stage_without_etp": case(setting("topology", "dp=2,ep=2,two-stage"), "two-stage with etp=1", "raise etp"),
    "tp_that_does_not_divide_the_heads": case(
        several(setting("topology", "tp=16"), lambda s: setattr(s, "nproc", 16)),
        "tp=16",
        "num_attention_heads=8",
        "tp in {1, 2, 4, 8}",
    ),
    "tp_that_is_no_multiple_of_key_value_heads": case(
        several(
            setting("topology", "tp=4"),
            lambda s: setattr(s, "nproc", 4),
            lambda s: s.family("llama", vocab_size=2048, num_attention_heads=12, hidden_size=96, num_key_value_heads=6),
        ),
        "tp=4",
        "num_key_value_heads=6 or be a multiple of it",
        "tp in {1, 2}",
    ),
    "tp_that_does_not_divide_the_mlp": case(
        several(
            setting("topology", "tp=4"),
            lambda s: setattr(s, "nproc", 4),
            lambda s: s.family("llama", vocab_size=2048, intermediate_size=130),
        ),
        "tp=4",
        "130",
        "tp in {1, 2}",
    ),
}


# Only `train` knows how many processes there will be.
TRAIN_MISTAKES: dict[str, Case] = {
    "more_processes_than_the_topology": case(
        several(setting("topology", "dp=1,tp=2"), lambda s: setattr(s, "nproc", 3)),
        "tp=2",
        "2 processes",
        "3 were started",
    ),
    "processes_that_tp_does_not_divide": case(
        lambda s: setattr(s, "nproc", 3), "tp=2", "3 processes", "use tp in {1, 3}, or --nproc 2"
    ),
    "cp_that_does_not_divide_the_processes": case(
        several(setting("topology", "cp=3"), lambda s: setattr(s, "nproc", 4)), "cp*tp=3", "4 processes", "{1, 2, 4}"
    ),
    "processes_that_the_memory_does_not_hold": case(
        lambda s: setattr(s, "nproc", 10**6), "1,000,000 processes on this machine", "at least 0.1 GB", "start at most"
    ),
    "no_process": case(lambda s: setattr(s, "nproc", 0), "--nproc 0", "at least 1"),
}


@for_each("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_one_clear_message(
    mistake: Case, setups: Callable[[], Setup], capfd: pytest.CaptureFixture[str]
) -> None:
    check_mistake(mistake, setups(), capfd)


@pytest.mark.parametrize("mistake", TRAIN_MISTAKES.values(), ids=TRAIN_MISTAKES.keys())
def test_mistake_in_the_number_of_processes(mistake: Case, setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    mistake.make(setup)
    setup.write()
    assert_words(message_of(setup.command_lines()[1], setup, capfd), mistake.words)


@pytest.mark.parametrize(
    ("device", "num_gpus", "words"),
    [("cuda", 0, ("device: cuda", "no CUDA device")), ("auto", 1, ("2 processes", "there are 1", "start fewer"))],
)
def test_fewer_gpus_than_processes(
    device: str,
    num_gpus: int,
    words: tuple[str, ...],
    setup: Setup,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    setup.set("device", device)
    setup.write()
    assert_words(message_of(setup.command_lines()[1], setup, capfd), words)


def test_the_run_that_is_broken_above_is_good(setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    for prepare in (lambda s: None, Setup.from_adapter):
        prepare(setup)
        setup.write()
        assert main(setup.command_lines()[0]) == 0, capfd.readouterr().err
        assert "ready" in capfd.readouterr().out
