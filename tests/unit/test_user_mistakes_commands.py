"""Mistakes in `generate` and `plan`, and words that argparse refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from meshlora.cli.main import main
from meshlora.verify.request import _device
from meshlora_ground.errors import UserError
from tests.for_each import for_each
from tests.unit.mistakes import (
    UP,
    Case,
    Setup,
    assert_words,
    case,
    check_mistake,
    command,
    narrower_adapter,
    one_error,
    remove,
    several,
)

pytestmark = pytest.mark.usefixtures("nothing_has_happened_yet")


GPUS = ("--gpus", "8", "--gpu", "h100", "--seq", "64")
generate = functools.partial(command, "generate", "--model", "{folder}/model", "--prompt", "a")
plan = functools.partial(command, "plan", "--model", "{folder}/model")

MISTAKES: dict[str, Case] = {
    # Other commands.
    "generate_below_absolute_zero": case(generate("--temperature", "-1"), "--temperature -1"),
    "generate_temperature_not_a_number": case(generate("--temperature", "nan"), "--temperature nan"),
    "generate_no_tokens": case(generate("--max-new-tokens", "0"), "--max-new-tokens 0", "at least 1"),
    "generate_model_missing": case(
        command("generate", "--model", "nowhere", "--prompt", "a"), "nowhere", "no such folder"
    ),
    "generate_adapter_missing": case(generate("--adapter", "nowhere"), "nowhere", "no such folder"),
    "generate_unknown_dtype": case(generate("--dtype", "fp23"), "'fp23'", "float32"),
    "generate_tokenizer_missing": case(
        several(generate(), remove("model/tokenizer.json", "model/tokenizer_config.json")),
        "tokenizer in",
        "cannot be loaded",
    ),
    "generate_empty_prompt": case(command("generate", "--model", "{folder}/model", "--prompt", ""), "''", "no tokens"),
    "generate_beyond_the_positions": case(
        generate("--max-new-tokens", "1000"), "--max-new-tokens 1000", "128 positions", "shorten"
    ),
    "generate_seed_beyond_64_bits": case(generate("--seed", str(2**63)), "--seed", "2**63"),
    "generate_adapter_of_another_model": case(
        several(lambda s: s.adapter_weights(narrower_adapter), generate("--adapter", "{folder}/adapter")),
        "[4, 48]",
        "another model",
    ),
    "generate_weight_of_wrong_shape": case(
        several(lambda s: s.weights(lambda t: t.update({f"{UP}.weight": torch.zeros(96, 64)})), generate()),
        f"{UP}.weight",
        "[96, 64]",
    ),
    "generate_on_too_few_processes": case(generate("--topology", "tp=2"), "tp=2 on 1 processes", "use tp in {1}"),
    "generate_on_no_process": case(generate("--nproc", "0"), "--nproc 0", "at least 1"),
    "generate_on_stages": case(
        generate("--nproc", "2", "--topology", "pp=2,interleave=2"), "generate on pp=2,", "leave out interleave"
    ),
    "generate_on_heads_in_thirds": case(
        generate("--nproc", "3", "--topology", "tp=3"), "tp=3", "num_attention_heads=8", "{1, 2, 4, 8}"
    ),
    "generate_adapter_missing_before_ranks_start": case(
        generate("--nproc", "2", "--adapter", "nowhere"), "nowhere", "no such folder"
    ),
    "plan_model_missing": case(
        command("plan", "--model", "nowhere", "--topology", "tp=2"), "nowhere", "no such folder"
    ),
    "plan_unknown_axis": case(plan("--topology", "tpq=2"), "'tpq' is not an axis", "did you mean 'tp'?"),
    "plan_tp_that_does_not_divide": case(plan("--topology", "tp=3"), "tp=3", "num_attention_heads=8", "{1, 2, 4, 8}"),
    "plan_without_a_topology": case(plan(), "--topology", "required", "--gpus"),
    "plan_option_without_gpus": case(plan("--topology", "tp=2", "--simulate"), "--simulate", "--gpus"),
    "plan_gpus_without_a_length": case(plan("--gpus", "8", "--gpu", "h100"), "--seq", "required"),
    "plan_gpus_of_no_kind": case(
        plan("--gpus", "2"),
        "--gpu (of which kind)",
        "--seq",
        "as in --gpu h100 --seq 4096",
        "rtx4090 (24 GB)",
        "--hardware",
    ),
    "plan_kind_without_a_number": case(plan("--gpu", "h100", "--seq", "64"), "--gpus (how many)", "as in --gpus 8"),
    "plan_unknown_gpu": case(plan("--gpus", "8", "--gpu", "h20", "--seq", "64"), "--gpu h20", "did you mean 'h200'?"),
    "plan_topology_of_another_size": case(plan(*GPUS, "--topology", "dp=2,tp=2"), "4 processes", "8 were started"),
    "plan_sharded_over_one_dp_rank": case(
        plan(*GPUS, "--topology", "tp=8,dp_shard"), "dp_shard with dp=1", "leave out dp_shard"
    ),
    "plan_unknown_quantization": case(plan(*GPUS, "--quantization", "nf5"), "'nf5'", "nf4, int8", "did you mean"),
    "plan_fewer_sequences_than_dp_ranks": case(
        plan(*GPUS, "--topology", "dp=8", "--global-batch", "4"), "--global-batch 4", "dp=8"
    ),
    "plan_sequence_too_long": case(
        plan("--gpus", "8", "--gpu", "h100", "--seq", "1000"), "--seq 1000", "128 positions"
    ),
    "plan_recompute_that_is_none": case(plan(*GPUS, "--recompute", "some"), "--recompute some", "none, full"),
    "plan_no_gpus": case(plan("--gpus", "0", "--gpu", "h100", "--seq", "64"), "--gpus 0"),
    "plan_hardware_missing": case(plan(*GPUS, "--hardware", "nowhere.json"), "nowhere.json", "no such file"),
}


# What argparse refuses ends the process itself.
USAGE_MISTAKES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no_command": ([], ("required", "command")),
    "unknown_command": (["trian", "run.yaml"], ("trian", "train")),
    "run_file_not_given": (["train"], ("RUN.yaml", "required")),
    "nproc_is_not_a_number": (["train", "run.yaml", "--nproc", "two"], ("--nproc", "'two'")),
    "unknown_argument": (["check", "run.yaml", "--fast"], ("--fast",)),
    "argument_without_a_name": (["train", "run.yaml", "other.yaml"], ("other.yaml", "see meshlora train --help")),
    "generate_without_a_prompt": (["generate", "--model", "m"], ("--prompt", "required")),
}


@for_each("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_one_clear_message(
    mistake: Case, setups: Callable[[], Setup], capfd: pytest.CaptureFixture[str]
) -> None:
    check_mistake(mistake, setups(), capfd)


def test_a_proof_on_more_ranks_than_the_memory_holds_is_refused() -> None:
    """Not by its command: where it is not refused, a machine goes down."""
    assert _device("auto", 2, 1) == "cpu"
    for wanted in ("auto", "cpu"):
        with pytest.raises(UserError, match=r"1,000,000 processes .*: on CPUs each takes .* GB, .*; start at most"):
            _device(wanted, 10**6, 1)


@pytest.mark.parametrize(("arguments", "words"), USAGE_MISTAKES.values(), ids=USAGE_MISTAKES.keys())
def test_mistake_on_the_command_line(
    arguments: list[str], words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert_words(one_error(*capfd.readouterr()), (*words, "--help"))
