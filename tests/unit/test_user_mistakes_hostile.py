"""Files and values that would hang, fill the memory or end in a traceback: one message, soon, and nothing has happened.

What comes after the limit of these tests has hung.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from meshlora.adapter.targets import options
from meshlora.adapter.targets.options import check_patterns, pattern_key
from meshlora.cli.main import main
from meshlora_ground.errors import UserError
from meshlora_ground.limits import time_limit
from meshlora_ground.reading import parse_json
from meshlora_ground.yaml_reading import parse_yaml
from tests.for_each import for_each
from tests.unit.mistakes import (
    UP,
    UP_A,
    Case,
    Setup,
    assert_words,
    case,
    check_mistake,
    command,
    lora,
    one_error,
    setting,
    several,
    text,
)

LONG = "x" * 5000
SLOW = "(.+)+(.+)+(.+)+(.+)+zzzz$"
LIMIT_S = 60
pytestmark = pytest.mark.timeout(LIMIT_S)
VERIFY = ("verify", "--family", "llama", "--topology", "tp=2", "--set")


@pytest.fixture
def _seconds_of_patterns_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may run for a second runs for a tenth of one."""
    monkeypatch.setattr(options, "time_limit", lambda seconds: time_limit(seconds / 10))


def run_text(tail: str) -> Callable[[Setup], None]:
    """The good run file, and this below it."""
    return lambda s: setattr(s, "text", yaml.safe_dump(s.tree) + tail)


def override(value: str) -> Callable[[Setup], None]:
    return lambda s: s.arguments.extend(["--set", value])


def alias_bomb() -> str:
    levels = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    return "a: &a [x, x, x, x, x, x, x, x, x]\n" + levels


def instead(file: str, make: Callable[[Path], object]) -> Callable[[Setup], None]:
    """Something else in the place of a file."""

    def change(s: Setup) -> None:
        (s.folder / file).unlink(missing_ok=True)
        make(s.folder / file)

    return change


def config_text(field: str) -> Callable[[Setup], None]:
    """config.json with one more field, as text."""

    def change(s: Setup) -> None:
        file = s.model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()))[:-1] + f", {field}}}")

    return change


def config(**values: Any) -> Callable[[Setup], None]:
    return lambda s: s.config(**values)


def rope(theta: float) -> Callable[[Setup], None]:
    return config(rope_parameters={"rope_type": "default", "rope_theta": theta})


def adapter_config(**values: Any) -> Callable[[Setup], None]:
    return lambda s: s.adapter_config(**values)


def index_of(name: str) -> Callable[[Setup], Any]:
    """The index of shards, which are then the model."""
    index = text("model/model.safetensors.index.json", json.dumps({"weight_map": {"x": name}}))
    return several(index, lambda s: (s.model / "model.safetensors").unlink())


RUN_FILE: dict[str, Case] = {
    "aliases_in_the_run_file": case(lambda s: setattr(s, "text", alias_bomb()), "an anchor or alias in line 1"),
    "aliases_in_set": case(override("train.steps=[&a 1, *a]"), "--set train.steps", "an anchor or alias"),
    "yaml_2000_deep": case(run_text("x: " + "[" * 2000 + "]" * 2000), "nested more than 50 deep"),
    "yaml_2000_deep_in_set": case(override("lora.r=" + "[" * 400), "nested more than 50 deep"),
    "key_that_is_a_list": case(run_text("? [a, b]\n: c\n"), "a key in line", "no text and no number"),
    "key_that_is_a_mapping": case(run_text("{a: b}: c\n"), "a key in line"),
    "number_of_5000_digits": case(run_text("x: " + "9" * 5000), "a number in line", "too long"),
    "number_of_5000_digits_in_set": case(override("train.steps=" + "9" * 5000), "a number in line 1 is too long"),
    "number_of_5000_hexadecimal_digits": case(run_text("x: 0x" + "f" * 5000), "a number in line", "too long"),
    "number_of_5000_minutes": case(run_text("x: 1" + ":59" * 5000), "a number in line", "too long"),
    "date_that_does_not_exist": case(override("data.date=2020-99-99"), "data.date='2020-99-99'", "2026-01-15"),
    "nul_in_the_run_file": case(run_text("x: \0"), "#x0000"),
    "run_file_of_two_megabytes": case(run_text("# " + "x" * 2**21), "more than the 1,048,576 bytes"),
    "run_file_of_too_many_values": case(run_text("x: [" + "1, " * 31_000 + "]"), "more than 30,000 values"),
    "run_file_is_a_pipe": case(
        several(instead("pipe", os.mkfifo), lambda s: setattr(s, "file", "pipe")), "pipe or a device"
    ),
    "set_a_key_of_thousands_of_groups": case(override("a." * 1000 + "b=1"), "at most 10 groups"),
    # Paths.
    "nul_in_the_chat_template": case(override('data.chat_template="a\\0b"'), "data.chat_template='a\\x00b'", "no NUL"),
    "nul_in_the_model_path": case(override('model.path="a\\0b"'), "model.path='a\\x00b'", "no NUL"),
    "nul_in_the_output": case(override('train.output="a\\0b"'), "train.output", "no NUL"),
    "model_path_too_long": case(setting("model.path", LONG), "model.path='xxx", "at most 240"),
    "data_path_too_long": case(setting("data.train", ["a", LONG]), "data.train='xxx", "at most 240"),
    "eval_path_too_long": case(setting("data.eval", "x/" * 2500), "data.eval='x/x", "at most 4000 bytes"),
    "cache_dir_too_long": case(setting("data.cache_dir", LONG), "data.cache_dir='xxx", "at most 240"),
    "output_too_long": case(setting("train.output", LONG), "train.output='xxx", "at most 240"),
    "adapter_path_too_long": case(
        several(lambda s: s.drop("lora"), setting("adapter", LONG)), "adapter='xxx", "at most 240"
    ),
    "routing_record_too_long": case(setting("train.routing_record", LONG), "train.routing_record='xxx", "at most 240"),
    "output_that_is_no_text_of_a_path": case(override('train.output="a\\ud800"'), "characters that no path has"),
    "cache_dir_of_no_user": case(setting("data.cache_dir", "~nosuchuser/x"), "no such user", "in full"),
    "output_of_no_user": case(setting("train.output", "~nosuchuser/x"), "~ is not replaced", "in full"),
    "run_file_name_too_long": case(lambda s: setattr(s, "file", LONG), "at most 240"),
    # Ranges.
    "learning_rate_beyond_float32": case(setting("train.lr", 1e300), "train.lr=1e+300", "at most 10"),
    "weight_decay_beyond_float32": case(setting("train.weight_decay", 1e300), "train.weight_decay", "at most 1,000"),
    "timeout_of_aeons": case(setting("train.timeout_s", 1e30), "train.timeout_s=1e+30", "at most 10,000,000"),
    "steps_without_end": case(setting("train.steps", 10**18), "train.steps", "at most 1,000,000,000"),
    "epochs_without_end": case(
        several(lambda s: s.drop("train.steps"), setting("train.epochs", 1e300)), "train.epochs", "at most 1,000,000"
    ),
    "batch_without_end": case(setting("train.batch_size", 10**18), "train.batch_size", "at most 1,000,000"),
    "micro_batch_without_end": case(setting("train.micro_batch_size", 10**18), "train.micro_batch_size", "at most"),
    "max_length_without_end": case(setting("data.max_length", 10**18), "data.max_length", "at most 100,000,000"),
    "cycle_without_end": case(
        several(setting("train.schedule", "cycle"), setting("train.cycle", {0: 1e300, 4: 0.0})),
        "rates of at most 1,000",
    ),
    "continuation_without_end": case(
        setting("generate", {"max_new_tokens": 10**18}), "generate.max_new_tokens", "at most 100,000,000"
    ),
    "rank_without_end": case(lora(r=10**9), "r=1000000000", "at most 65536"),
    "rank_pattern_without_end": case(lora(rank_pattern={"q_proj": 10**9}), "rank_pattern['q_proj']", "at most 65536"),
    "alpha_without_end": case(lora(lora_alpha=1e300), "lora_alpha=1e+300", "at most 1e+09"),
    "rank_whose_factors_dwarf_the_base": case(
        lora(r=65_536, target_modules="all-linear"), "rank 65536", "elements, and the matrices", "lower r"
    ),
    # The output.
    "output_is_the_base": case(lambda s: s.set("train.output", str(s.model)), "model.path", "could be overwritten"),
    "output_is_the_base_by_another_name": case(
        lambda s: s.set("train.output", f"{s.model}/../model/."), "model.path", "could be overwritten"
    ),
    "output_in_the_base": case(
        lambda s: s.set("train.output", str(s.model / "run")), "it is in the folder of model.path"
    ),
    "output_holds_the_data": case(
        several(
            lambda s: (s.folder / "runs").mkdir(),
            lambda s: (s.folder / "train.jsonl").rename(s.folder / "runs" / "train.jsonl"),
            lambda s: s.set("data.train", str(s.folder / "runs" / "train.jsonl")),
            lambda s: s.set("train.output", str(s.folder / "runs")),
        ),
        "data.train=",
        "could be overwritten",
    ),
    **{
        f"adapter_named_{name}": case(
            lambda s, name=name: s.tree.update(adapters={name: {}, "b": {}}), f"adapters.{name}", "choose another"
        )
        for name in ("adapter", "checkpoints", "initial", "merged", "Logs")
    },
}

MODEL: dict[str, Case] = {
    "config_100_000_deep": case(text("model/config.json", "[" * 100_000), "config.json", "nested more than 50 deep"),
    "config_900_deep": case(config_text('"a": ' + "[" * 900 + "]" * 900), "config.json", "nested more than 50 deep"),
    "config_number_of_5000_digits": case(config_text('"a": ' + "9" * 5000), "a number of 5,000 digits"),
    "config_key_given_twice": case(config_text('"hidden_size": 64'), "config.json", "'hidden_size' is given twice"),
    "config_of_a_megabyte": case(config_text('"a": "' + "x" * 2**20 + '"'), "more than the 524,288 bytes"),
    "config_is_a_pipe": case(instead("model/config.json", os.mkfifo), "no config.json"),
    "config_model_type_is_a_list": case(config(model_type=["llama"]), "model_type ['llama']", "it must be text"),
    "layers_without_end": case(config(num_hidden_layers=10**9), "num_hidden_layers=1000000000", "more than 1,024"),
    "layers_of_a_part_without_end": case(
        config(vision_config={"num_hidden_layers": 10**9}), "num_hidden_layers=1000000000", "more than 1,024"
    ),
    "layers_beyond_the_stored_tensors": case(
        config(num_hidden_layers=1000), "'llama' with the sizes of its configuration", "parameters to store"
    ),
    "labels_without_end": case(config(num_labels=10**8), "num_labels=100000000", "more than 1,048,576"),
    "vocabulary_without_end": case(config(vocab_size=10**12), "vocab_size=1000000000000", "more than 16,777,216"),
    "number_that_is_none": case(config_text('"attention_multiplier": NaN'), "attention_multiplier", "finite"),
    "number_that_is_none_in_transformers_words": case(
        config_text('"attention_multiplier": {"__float__": "NaN"}'), "attention_multiplier", "finite"
    ),
    "norm_epsilon_is_nan": case(config(rms_norm_eps=float("nan")), "rms_norm_eps", "finite"),
    "norm_epsilon_is_infinite": case(config(rms_norm_eps=float("inf")), "rms_norm_eps", "finite"),
    "norm_epsilon_is_zero": case(config(rms_norm_eps=0.0), "rms_norm_eps=0.0", "above 0"),
    "norm_epsilon_is_negative": case(config(rms_norm_eps=-1e-6), "rms_norm_eps=-1e-06", "above 0"),
    "rope_theta_is_zero": case(rope(0), "rope_theta=0", "above 0"),
    "rope_theta_is_negative": case(rope(-5.0), "rope_theta=-5.0", "above 0"),
    "rope_theta_is_nan": case(rope(float("nan")), "rope_theta", "finite"),
    "dtype_of_integers": case(config(dtype="int8"), "'int8'", "one of auto, float64", "config.json"),
    "dtype_is_a_mapping": case(config(dtype={"a": 1}), "dtype {'a': 1}", "one of auto, float64"),
    "index_100_000_deep": case(
        text("model/model.safetensors.index.json", "[" * 100_000), "index.json", "nested more than 50 deep"
    ),
    "index_of_a_name_too_long": case(index_of(LONG), "index.json", "not in the folder"),
    "index_of_a_name_with_nul": case(index_of("x\0y"), "index.json", "'x\\x00y'", "not in the folder"),
    "weights_are_a_folder": case(
        several(index_of("shard"), lambda s: (s.model / "shard").mkdir()), "index.json", "not in the folder"
    ),
    "base_with_an_adapter": case(
        lambda s: (s.model / "adapter_config.json").write_bytes((s.adapter / "adapter_config.json").read_bytes()),
        "adapter_config.json",
        "another base",
        "one of its own",
    ),
}

ADAPTER: dict[str, Case] = {
    "target_pattern_without_end": case(lora(target_modules=SLOW), f"target_modules='{SLOW}'", "more than 1 s"),
    "target_pattern_of_a_stranger_without_end": case(
        adapter_config(target_modules=SLOW), f"target_modules='{SLOW}'", "more than 1 s", "a list of names"
    ),
    "exclude_pattern_without_end": case(adapter_config(exclude_modules=SLOW), "exclude_modules", "more than 1 s"),
    "rank_pattern_of_a_stranger_without_end": case(
        adapter_config(rank_pattern={SLOW: 3}), f"rank_pattern='{SLOW}'", "more than 1 s"
    ),
    "alpha_pattern_of_a_stranger_without_end": case(
        adapter_config(alpha_pattern={SLOW: 3}), f"alpha_pattern='{SLOW}'", "more than 1 s"
    ),
    "layers_pattern_of_a_stranger_without_end": case(
        adapter_config(layers_pattern=SLOW, layers_to_transform=[0]), f"layers_pattern='{SLOW}'", "more than 1 s"
    ),
    "modules_to_save_of_a_stranger_without_end": case(
        adapter_config(modules_to_save=[SLOW]), f"modules_to_save='{SLOW}'", "more than 1 s"
    ),
    "layers_pattern_that_is_none": case(
        adapter_config(layers_pattern="(", layers_to_transform=[0]), "layers_pattern='('", "regular expression"
    ),
    "rank_pattern_with_flags": case(
        adapter_config(rank_pattern={"(?i)q_proj": 4}), "rank_pattern='(?i)q_proj'", "regular expression"
    ),
    **{
        f"{option}_is_{value}": case(adapter_config(**{option: value}), f"{option}={value!r}", "it ")
        for option, value in (
            ("target_modules", 0),
            ("exclude_modules", False),
            ("modules_to_save", 0),
            ("target_parameters", 5),
            ("rank_pattern", None),
            ("alpha_pattern", []),
            ("layers_pattern", 0),
        )
    },
    "repetition_too_large": case(adapter_config(target_modules="a{99999999999999999999}"), "regular expression"),
    "pattern_3000_deep": case(adapter_config(target_modules="(" * 3000 + ")" * 3000), "regular expression"),
    "adapter_config_100_000_deep": case(
        several(Setup.from_adapter, text("adapter/adapter_config.json", "[" * 100_000)), "nested more than 50 deep"
    ),
    "adapter_config_is_a_pipe": case(
        several(Setup.from_adapter, instead("adapter/adapter_config.json", os.mkfifo)), "a pipe or a device"
    ),
    "adapter_weights_are_a_pipe": case(
        several(Setup.from_adapter, instead("adapter/adapter_model.safetensors", os.mkfifo)), "a pipe or a device"
    ),
    "pieces_100_000_deep": case(
        several(Setup.from_adapter, text("adapter/meshlora.json", "[" * 100_000)), "nested more than 50 deep"
    ),
}

MERGE = ("merge", "--model", "{folder}/model", "--adapter", "{folder}/adapter", "--out", "{folder}/merged")
OTHER_COMMANDS: dict[str, Case] = {
    "verify_layers_without_end": case(command(*VERIFY, "num_hidden_layers=1000000000"), "more than 1,024"),
    "verify_labels_without_end": case(command(*VERIFY, "num_labels=100000000"), "num_labels", "more than"),
    "verify_epsilon_is_nan": case(command(*VERIFY, "rms_norm_eps=.nan"), "rms_norm_eps", "finite"),
    "verify_set_2000_deep": case(command(*VERIFY, "a=" + "[" * 400), "nested more than 50 deep"),
    "verify_set_aliases": case(command(*VERIFY, "a=[&a 1, *a]"), "an anchor or alias"),
    "verify_lora_2000_deep": case(
        several(text("l.yaml", "[" * 2000), command(*VERIFY[:-1], "--lora", "{folder}/l.yaml")), "nested more than 50"
    ),
    "verify_json_name_too_long": case(command(*VERIFY[:-1], "--json", LONG), "path='xxx", "at most 240"),
    "verify_html_of_no_user": case(command(*VERIFY[:-1], "--html", "~nosuchuser/x"), "~ is not replaced"),
    "evaluate_adapter_name_too_long": case(command("evaluate", "{folder}/run.yaml", "--adapter", LONG), "at most 240"),
    "plan_hardware_100_000_deep": case(
        several(
            text("h.json", "[" * 100_000),
            command(
                *("plan", "--model", "{folder}/model", "--gpus", "2", "--gpu", "h100", "--seq", "64"),
                *("--hardware", "{folder}/h.json"),
            ),
        ),
        "h.json",
        "nested more than 50 deep",
    ),
    "plan_for_all_gpus_of_the_world": case(
        command("plan", "--model", "{folder}/model", "--gpus", "1" + "0" * 12, "--gpu", "h100", "--seq", "64"),
        "at most 100,000",
    ),
    "merge_pattern_without_end": case(
        several(adapter_config(target_modules=SLOW), command(*MERGE)), "target_modules", "more than 1 s"
    ),
    "merge_layers_without_end": case(
        several(config(num_hidden_layers=10**9), command(*MERGE)), "num_hidden_layers", "more than 1,024"
    ),
    "export_pattern_without_end": case(
        several(
            adapter_config(rank_pattern={SLOW: 3}),
            command("export", "{folder}/adapter", "--layout", "peft", "--out", "{folder}/out"),
        ),
        "rank_pattern",
        "more than 1 s",
    ),
}
MISTAKES = RUN_FILE | MODEL | ADAPTER | OTHER_COMMANDS


@pytest.mark.long
@pytest.mark.timeout(10 * LIMIT_S)
@pytest.mark.usefixtures("nothing_has_happened_yet", "_seconds_of_patterns_are_short")
@for_each("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_one_clear_message(
    mistake: Case, setups: Callable[[], Setup], capfd: pytest.CaptureFixture[str]
) -> None:
    with time_limit(LIMIT_S):
        check_mistake(mistake, setups(), capfd)


def test_a_pattern_without_end_ends_after_the_second_that_is_said() -> None:
    begun = time.monotonic()
    with pytest.raises(UserError, match="more than 1 s on the names of the model"):
        check_patterns(LoraConfig(target_modules=SLOW), [UP])
    assert 0.9 < time.monotonic() - begun < LIMIT_S / 2


def not_finite(number: float) -> Callable[[Setup], None]:
    return lambda s: s.weights(lambda t: t[f"{UP}.weight"].view(-1)[3].fill_(number))


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_base_weight_that_is_not_finite_is_named_while_it_is_loaded(
    number: float, setup: Setup, capfd: pytest.CaptureFixture[str]
) -> None:
    not_finite(number)(setup)
    for line in (
        ["generate", "--model", str(setup.model), "--prompt", "a"],
        [p.format(folder=setup.folder) for p in MERGE],
    ):
        assert main(line) == 2
        assert_words(one_error(*capfd.readouterr()), (f"{UP}.weight", "not finite", "download it again"))
    assert not (setup.folder / "merged").exists()


def test_base_weight_beyond_float16_is_named(setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    not_finite(1e6)(setup)
    assert main(["generate", "--model", str(setup.model), "--prompt", "a", "--dtype", "float16"]) == 2
    assert_words(one_error(*capfd.readouterr()), (f"{UP}.weight", "not finite as float16"))


def test_honest_configurations_pass(setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    """Lengths, angles and numbers of tokens may be large, limits in lists infinite, unknown fields anything."""
    setup.config(max_position_embeddings=10_485_760, sliding_window=2**40, num_training_tokens=15 * 10**12)
    setup.config(rope_parameters={"rope_type": "default", "rope_theta": 3_580_165_449})
    config_text('"time_step_limit": [0.0, Infinity], "label_smoothing": {"eps": 0.0}')(setup)
    setup.write()
    assert main(setup.command_lines()[0]) == 0, capfd.readouterr().err


def test_many_patterns_are_found_as_peft_finds_them() -> None:
    keys = ["k_proj", r"layers\.1\..*", "q", ".*q_proj", "up_proj|q_proj"]
    for name in ("model.layers.0.self_attn.q_proj", UP, UP_A, "k_proj", "x.q", "up_proj", "y"):
        assert pattern_key(keys, name) == get_pattern_key(keys, name)
    many = [f"nothing_{number}" for number in range(2000)]
    begun = time.process_time()
    assert all(pattern_key(many, f"layers.{n}") == f"layers.{n}" for n in range(100))
    assert time.process_time() - begun < 20  # minutes, where each is compiled each time


@pytest.mark.parametrize("source", ["[1, {a: [null, true, 1.5, -3]}]", "a: 0x1f\nb: 'é'\nc: '1e-3'\n", "", "~"])
def test_plain_yaml_is_read_as_before(source: str) -> None:
    assert parse_yaml(source) == yaml.safe_load(source)


@pytest.mark.parametrize("text", ["1e-4", "1E+2", "-2.5e3", ".5e-1"])
def test_powers_of_ten_are_numbers_as_in_yaml_1_2(text: str) -> None:
    """And in every editor; YAML 1.1 wants a point and a sign in them."""
    assert parse_yaml(text) == float(text)
    assert parse_yaml(f"'{text}'") == text


def test_off_is_the_word_that_an_option_has() -> None:
    """As in `preflight: off`."""
    assert parse_yaml("[off, yes, No, true, False]") == ["off", "yes", "No", True, False]


def test_half_of_a_surrogate_pair_is_no_text_of_a_run_file() -> None:
    with pytest.raises(ValueError, match="characters that no path has, nor any text, in line 2"):
        parse_yaml('a: 1\nb: "x\\ud800"')


def test_plain_json_is_read_as_before() -> None:
    source = '{"a": [1, -2.5e3, "\\u00e9", null, true, {"b": []}], "c": Infinity}'
    assert parse_json(source) == json.loads(source)


def test_build_within_bounds_needs_no_checkpoint() -> None:
    """A configuration without files is bounded too, and a large honest one is built."""
    from transformers import LlamaConfig

    from meshlora.loading.blueprint import build_on_meta

    model = build_on_meta(LlamaConfig(num_hidden_layers=300, vocab_size=128_256), dtype=torch.bfloat16)
    assert len(list(model.parameters())) > 2000
