"""What options of a run file do, where no other test shows it: seen in a run that is prepared, or is run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils
from transformers.models.llama.modeling_llama import LlamaMLP

from meshlora.comm.groups import Mesh
from meshlora.loading.blueprint import read_model_config
from meshlora.reading import formats, preferences
from meshlora.reading.sources import read_records
from meshlora.reading.tokenization import tokenize
from meshlora.run import prepare, trained
from meshlora.run.config.file import read_run
from meshlora.run.config.run_file import DataConfig, Format, GenerateConfig, TrainConfig
from meshlora.run.run import train
from meshlora.run.sources import records_of
from meshlora.run.texts import Texts
from meshlora.run.trainer import Trainer
from meshlora.train.batches import MicroBatch
from meshlora.wings.quantized import float8_matrix
from meshlora_ground.errors import UnsupportedError, UserError
from tests.for_each import for_each
from tests.unit.mistakes import Setup

OWN_TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""

GROUPS: dict[str, type] = {"data": DataConfig, "generate": GenerateConfig, "train": TrainConfig}
MOST = {
    f"{group}.{item.name}": item.metadata["most"]
    for group, kind in GROUPS.items()
    for item in dataclasses.fields(kind)
    if item.metadata.get("most") is not None
}
# What an option has an effect with.
GOES_WITH: dict[str, dict[str, Any]] = {
    "decay_steps": {"schedule": "warmup_stable_decay"},
    "num_cycles": {"schedule": "cosine_with_restarts"},
    "power": {"schedule": "polynomial"},
    "timescale": {"schedule": "inverse_sqrt"},
    "epochs": {"steps": None},
    "eval_limit": {"eval": "y"},
    "keep_last": {"save_every": 1},
    "lora_plus_embedding_lr": {"lora_plus_ratio": 2.0},
    "temperature": {"do_sample": True},
    "length_penalty": {"num_beams": 2},
    "min_8bit_size": {"optimizer": "adamw_8bit"},
}


def test_data_are_those_of_the_files_that_are_named(setup: Setup) -> None:
    (setup.folder / "eval.jsonl").write_text('{"prompt": "def g():", "completion": " return g"}\n')
    run, tokenizer = setup.prepared(), AutoTokenizer.from_pretrained(setup.model)
    assert run.eval_data is not None
    for data, file in ((run.train_data, "train.jsonl"), (run.eval_data, "eval.jsonl")):
        expected = tokenize(read_records(setup.folder / file), tokenizer, max_length=64)
        assert data.input_ids.tolist() == expected.input_ids.tolist()


def test_columns_of_the_run_file_are_read(setup: Setup) -> None:
    expected = setup.prepared().train_data
    lines = [json.loads(line) for line in (setup.folder / "train.jsonl").read_text().splitlines()]
    setup.data(*({"question": line["prompt"], "answer": line["completion"]} for line in lines))
    setup.drop("data.eval")
    found = setup.prepared(data__columns={"prompt": "question", "completion": "answer"}).train_data
    assert found.input_ids.tolist() == expected.input_ids.tolist()
    assert found.is_trained.tolist() == expected.is_trained.tolist()


def test_rows_are_read_in_the_format_of_the_run_file(setup: Setup) -> None:
    setup.data({"text": "a b c d", "instruction": "what?", "output": "that"})
    setup.drop("data.eval")
    assert not setup.prepared().train_data.is_trained.all()
    assert setup.prepared(data__format="text").train_data.is_trained.all()
    with pytest.raises(UserError, match=r"data\.format=feedback: train\.objective reads other records; one of auto,"):
        setup.prepared(data__format="feedback")


def test_sources_are_drawn_by_their_weights_on_any_mesh(setup: Setup) -> None:
    for name, number in (("a", 6), ("b", 2)):
        rows = [json.dumps({"text": f"{name} {index}"}) + "\n" for index in range(number)]
        (setup.folder / f"{name}.jsonl").write_text("".join(rows))
    files = [str(setup.folder / f"{name}.jsonl") for name in "ab"]
    weights = [{"path": file, "weight": weight} for file, weight in zip(files, (1, 3), strict=True)]
    run = setup.prepared(data__train=weights, train__batch_size=4)
    drawn = np.concatenate([run.batches.batch(step) for step in range(2)])  # an epoch
    assert ((drawn >= 6).sum(), (drawn < 6).sum()) == (6, 2)
    assert f"an epoch is 8 draws: 2 of {files[0]} (it has 6), 6 of {files[1]} (it has 2)" in run.notes
    other = setup.prepared(topology="dp=2,tp=2")
    assert np.concatenate([other.batches.batch(step) for step in range(2)]).tolist() == drawn.tolist()
    assert other.identity == run.identity
    reweighted = setup.prepared(data__train=[weights[0], weights[1] | {"weight": 1}])
    assert reweighted.identity["data"] != run.identity["data"], "a run of other weights is not resumed"


def test_a_source_has_a_split_columns_and_a_format_of_its_own(setup: Setup) -> None:
    setup.drop("data.eval")
    folder = setup.folder / "splits"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps({"ask": "a b", "reply": "c"}) + "\n")
    (folder / "test.jsonl").write_text("{broken\n")
    (setup.folder / "c.jsonl").write_text(json.dumps({"text": "a b c", "instruction": "x", "output": "y"}) + "\n")
    own = {"path": str(folder), "split": "train", "columns": {"prompt": "ask", "completion": "reply"}}
    found = setup.prepared(data__train=[own, {"path": str(setup.folder / "c.jsonl"), "format": "text"}]).train_data
    first, second = found
    assert not first.is_trained.all()
    assert second.is_trained.all()


def test_formats_of_run_files_are_those_that_are_read() -> None:
    read = {one.name for one in (*formats.RECORDS, *preferences.PREFERENCES, *preferences.FEEDBACK)}
    assert {"auto", *read} == set(get_args(Format))


def test_sequences_are_cut_to_the_length_of_the_run_file(setup: Setup) -> None:
    setup.config(max_position_embeddings=2048)
    setup.data(*[{"text": f"def f_{number}(): return {number}" * 20} for number in range(8)])
    assert {len(sequence.input_ids) for sequence in setup.prepared(data__max_length=12).train_data} == {12}


def test_prompts_are_trained_where_the_run_file_says_so(setup: Setup) -> None:
    data = setup.prepared(data__train_on="everything").train_data
    assert data.num_trained_tokens == len(data.input_ids) - len(data), "all but the first of each sequence"


def test_tokens_are_cached_where_the_run_file_says(setup: Setup, tmp_path: Path) -> None:
    setup.prepared(data__cache_dir=str(tmp_path / "tokens"))
    assert [file for file in (tmp_path / "tokens").rglob("*.safetensors") if file.stat().st_size]


def test_epochs_are_passes_over_the_data(setup: Setup) -> None:
    setup.drop("train.steps")
    assert setup.prepared(train__epochs=2.5, train__batch_size=3).steps == 8  # 2.5 times 3 steps of 8 sequences


def test_adapter_and_topology_are_those_of_the_run_file(setup: Setup) -> None:
    run = setup.prepared(lora={"r": 3, "target_modules": ["v_proj"]}, topology="dp=2,tp=2")
    assert run.blueprint.trained.config.r == 3
    assert {name.rpartition(".")[2] for name in run.blueprint.trained.targets} == {"v_proj"}
    assert (run.topology.dp, run.topology.tp) == (2, 2)


def test_weights_without_a_place_are_left_out_where_the_run_file_allows_it(setup: Setup) -> None:
    """Without the option: `weight_of_unexpected_name` in test_user_mistakes_model.py."""
    setup.weights(lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))
    assert setup.prepared(model__allow_unused_weights=True).steps == 4


def test_kernels_that_a_cpu_has_not_are_refused_where_the_run_file_names_them(setup: Setup) -> None:
    with pytest.raises(UserError, match=r"model\.kernels: liger: they run on GPUs alone; leave it out"):
        setup.prepared(model__kernels="liger", device="cpu")


def test_dropout_that_is_not_supported_is_disabled_where_the_run_file_says_so(setup: Setup) -> None:
    setup.config(attention_dropout=0.1)
    assert setup.prepared(model__disable_dropout=True).steps == 4


def test_code_beside_a_model_runs_where_the_run_file_trusts_it(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the library adds its folder
    file = setup.model / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    (setup.model / "tokenization_own.py").write_text(OWN_TOKENIZER)
    assert setup.prepared(model__trust_remote_code=True).steps == 4
    assert (tmp_path / "modules").is_dir()


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_a_configuration_runs_where_it_is_trusted(
    trusted: bool, setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the library adds its folder
    setup.config(auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    (setup.model / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\nclass OwnConfig(LlamaConfig):\n    pass\n"
    )
    found = read_model_config(setup.model, trust_remote_code=trusted)
    assert type(found).__name__ == ("OwnConfig" if trusted else "LlamaConfig")


@pytest.mark.parametrize(
    ("architecture", "has_code", "words"),
    [
        ("DeepseekV3ForCausalLM", True, "write model_type 'deepseek_v3' there, and leave out auto_map"),
        ("DeepseekV3ForCausalLM", False, "write model_type 'deepseek_v3' there"),
        ("OwnForCausalLM", True, "its own code is not trusted; set trust_remote_code if you trust that code"),
    ],
)
def test_family_of_own_code_is_told_by_its_architecture(
    architecture: str, has_code: bool, words: str, setup: Setup
) -> None:
    """kimi_k2 is deepseek_v3 under another name."""
    own = {"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}} if has_code else {}
    setup.config(model_type="kimi_k2", architectures=[architecture], **own)
    with pytest.raises(UserError, match=f"{re.escape(words)}$"):
        read_model_config(setup.model)


@for_each("option", MOST)
def test_the_most_of_an_option_is_taken_and_no_more(option: str) -> None:
    group, _, name = option.partition(".")
    values = {"data": {"train": "x"}, "generate": {}, "train": {"output": "x", "steps": 3, "lr": 1e-3}}[group]
    made, most, values = GROUPS[group], MOST[option], values | GOES_WITH.get(name, {})
    for value in (int(most), float(most)):
        assert getattr(made(**values | {name: value}), name) == most
    with pytest.raises(UserError, match=re.escape(f"at most {most:,.0f}")):
        made(**values | {name: int(most) + 1})


def micro_batches(setup: Setup, monkeypatch: pytest.MonkeyPatch, **options: object) -> list[tuple[int, torch.dtype]]:
    """(rows, dtype of the model) of each micro-batch of a run of one step on one process."""
    found, losses = [], Trainer._losses

    def noted(self: Trainer, micro: MicroBatch, *given: Any) -> Any:
        found.append((len(micro.batch.input_ids), self.model.dtype))
        return losses(self, micro, *given)

    monkeypatch.setattr(Trainer, "_losses", noted)
    train({"": setup.prepared(train__steps=1, topology="", **options)})
    return found


def test_so_many_sequences_are_computed_at_once(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"train__batch_size": 5, "train__micro_batch_size": 2}
    found = micro_batches(setup, monkeypatch, **options, data__packing=False)
    assert [rows for rows, _ in found] == [2, 2, 1]
    found = micro_batches(setup, monkeypatch, **options, data__packing="auto", train__overwrite=True)
    assert [rows for rows, _ in found] == [1, 1, 1], "those of a micro-batch are one row"


def test_sequences_share_a_row_where_the_run_file_says_so(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    found = micro_batches(setup, monkeypatch, train__micro_batch_size=1, data__packing=True)
    assert [rows for rows, _ in found] == [1], "four sequences, none of which is as long as a quarter of a row"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: s.set("train.objective", "dpo"), "a pair is two rows"),
        (lambda s: s.set("topology", "cp=2"), "cp cuts each row"),
        (lambda s: s.set("model.attn_implementation", "flex_attention"), "shown for eager and sdpa"),
    ],
    ids=["pairs", "cp", "attention"],
)
def test_rows_are_padded_with_a_word_where_joined_ones_are_not_proved(change: Any, why: str, setup: Setup) -> None:
    if why.startswith("a pair"):
        for file in ("train.jsonl", "eval.jsonl"):
            (setup.folder / file).write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 8)
    change(setup)
    run = setup.prepared()
    assert run.config.data.packing is False
    (note,) = [note for note in run.notes if note.startswith("data.packing: auto: rows are padded: ")]
    assert why in note


@pytest.mark.parametrize(
    "why", ["its layers mix sequences of one row", "attention of llama takes a mask of the whole row"]
)
def test_rows_are_padded_for_a_family_that_does_not_keep_them_apart(
    why: str, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the check of the twin says of which family is in test_packing.py."""

    def check(*_: Any, **__: Any) -> bool:
        if why.startswith("its"):
            raise UnsupportedError("data.packing", why)
        return False

    monkeypatch.setattr(prepare, "check_packing", check)
    run = setup.prepared()
    assert run.config.data.packing is False
    assert f"data.packing: auto: rows are padded: {why}" in run.notes


def test_rows_are_joined_without_a_word_and_old_runs_go_on(setup: Setup) -> None:
    joined = setup.prepared()
    assert joined.config.data.packing == "auto"
    assert not [note for note in joined.notes if "packing" in note]
    alone = setup.prepared(train__micro_batch_size=1)
    assert (alone.config.data.packing, alone.notes) == (False, joined.notes), "there is nothing to join"
    assert setup.prepared(data__packing=False).identity == joined.identity, "a run of padded rows is resumed"


def test_model_computes_in_the_dtype_of_the_run_file(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {dtype for _, dtype in micro_batches(setup, monkeypatch, model__dtype="float64")} == {torch.float64}


@pytest.mark.parametrize("compute", [None, "fp8_backward", "fp8"])
def test_products_are_in_float8_where_the_run_file_says_so(
    compute: str | None, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, rounding = [], float8_matrix.round_tokens
    setup.drop("data.eval")
    run = setup.prepared(train__steps=1, model__compute=compute, topology="")
    monkeypatch.setattr(float8_matrix, "round_tokens", lambda x: calls.append(1) or rounding(x))
    train({"": run})
    # Of the first layer's q, k and v nobody wants the gradient of the input.
    own = len(run.plan.linears) - 1
    assert len(calls) == {None: 0, "fp8_backward": own - 3, "fp8": 2 * own - 3}[compute]


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("full", 2), ("keep_attention", 2), ("offload", 2)])
def test_layers_are_computed_twice_where_the_run_file_says_so(
    recompute: str, times: int, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forward = [], LlamaMLP.forward
    setup.drop("data.eval")
    run = setup.prepared(train__steps=1, train__recompute=recompute, topology="")
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, *args: calls.append(1) or forward(self, *args))
    train({"": run})
    assert len(calls) == times * run.plan.num_layers, "one micro-batch"


def test_every_so_many_steps_are_said(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"train__steps": 5, "train__log_every": 2, "topology": ""}
    train({"": setup.prepared(**options)})
    said = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [word for word in said if word.endswith("/5")] == ["1/5", "2/5", "4/5", "5/5", "5/5"], "and an evaluation"


def test_how_much_is_trained_and_held_is_said(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    """As PEFT counts it, and in the bytes of what is in memory: here one process has all of it."""
    run = setup.prepared(train__steps=1, topology="")
    train({"": run})
    said = capsys.readouterr().out
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(setup.model), LoraConfig(**setup.tree["lora"]))
    num_trained, total = model.get_nb_trainable_parameters()
    held = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert f"{num_trained:,} of {total:,} parameters are trained ({num_trained / total:.2%})" in said
    assert f"weights take {held / 1e6:,.1f} MB of a rank's memory" in said


def test_ranks_are_waited_for_as_long_as_the_run_file_says(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """That they then are given up is in tests/ranks/test_failures.py."""
    waited: list[float] = []

    def noted(_: Mesh, timeout_s: float, **__: object) -> contextlib.nullcontext[None]:
        waited.append(timeout_s)
        return contextlib.nullcontext()

    monkeypatch.setattr("meshlora.run.run.patient_for", noted)
    train({"": setup.prepared(train__steps=1, train__timeout_s=7.0, topology="")})
    assert waited == [7.0]


def test_the_same_bytes_are_asked_of_torch_where_the_run_file_says_so(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO"):
        monkeypatch.setenv(name, "")  # the test's own afterwards
        monkeypatch.delenv(name)
    try:
        train({"": setup.prepared(train__steps=1, topology="")})
        assert not torch.are_deterministic_algorithms_enabled()
        options = {"train__steps": 1, "train__overwrite": True, "topology": ""}
        train({"": setup.prepared(train__deterministic=True, **options)})
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("preflight", "steps"), [("cpu", [3, 3]), ("device", [1, 3, 3])])
def test_replicas_of_the_first_step_belong_to_the_preflight_on_devices(
    preflight: str, steps: list[int], setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    monkeypatch.setattr(trained, "check_replicas", lambda _, *, step, **__: compared.append(step))
    options = {"train__steps": 3, "train__replica_check_every": 3, "topology": ""}
    train({"": setup.prepared(preflight=preflight, **options)})
    assert compared[-len(steps) :] == steps
    assert 2 not in compared


def test_long_records_are_left_out_where_the_run_file_says_so(setup: Setup) -> None:
    setup.data({"text": "def g(): return g" * 90}, {"text": "def g(): return g"})
    setup.drop("data.eval")
    run = setup.prepared(data__too_long="drop")
    assert len(run.train_data) == 1
    assert any("train.jsonl:1 first, are longer than max_length=64: left out" in note for note in run.notes), run.notes


def test_empty_answers_are_left_out_where_the_run_file_says_so(setup: Setup) -> None:
    asked = {"role": "user", "content": "def g"}
    setup.data(*({"messages": [asked, {"role": "assistant", "content": said}]} for said in ("", "return g")))
    setup.drop("data.eval")
    assert [len(setup.prepared(data__empty_answers=choice).train_data) for choice in ("train", "skip")] == [2, 1]


def test_bad_rows_are_passed_over_where_the_run_file_says_so(setup: Setup) -> None:
    rows = [json.dumps({"text": f"def g{number}(): return g"}) for number in range(10)]
    (setup.folder / "train.jsonl").write_text("\n".join([*rows[:5], '{"text": 3}', *rows[5:]]))
    setup.drop("data.eval")
    run = setup.prepared(data__on_bad_row="skip")
    assert len(run.train_data) == 10
    assert any("train.jsonl:6: text is a number, not a string" in note for note in run.notes), run.notes


def test_instructions_are_written_in_the_style_of_the_run_file(setup: Setup) -> None:
    setup.data({"instruction": "def g", "output": "return g"})
    setup.set("data.eval", str(setup.folder / "train.jsonl"))
    run, tokenizer = setup.prepared(data__prompt="alpaca"), AutoTokenizer.from_pretrained(setup.model)
    sequence = run.train_data[0]
    asked = "Write a response that appropriately completes the request.\n\n### Instruction:\ndef g\n\n### Response:\n"
    text, end = tokenizer.decode(sequence.input_ids), tokenizer.eos_token
    assert text == f"Below is an instruction that describes a task. {asked}return g{end}"
    assert tokenizer.decode(sequence.input_ids[sequence.is_trained]) == f"return g{end}"
    assert run.config.data.eval is not None
    (record,) = records_of(run.config.data, run.config.data.eval)  # what generates asks the same
    assert record.prompt == text.removesuffix(f"return g{end}")
    for rest in ({"data__system": "Be kind."}, {"data__chat_template": "alpaca"}):
        with pytest.raises(UserError, match="a style writes plain text, which has no turns"):
            setup.prepared(data__prompt="alpaca", **rest)


def test_system_says_what_the_run_file_gives_where_it_says_nothing(setup: Setup) -> None:
    turns = [{"role": "user", "content": "def g"}, {"role": "assistant", "content": "return g"}]
    setup.data({"messages": turns})
    setup.set("data.eval", str(setup.folder / "train.jsonl"))
    run, tokenizer = setup.prepared(data__system="Be kind."), AutoTokenizer.from_pretrained(setup.model)
    whole = [{"role": "system", "content": "Be kind."}, *turns]
    assert tokenizer.decode(run.train_data.input_ids) == tokenizer.apply_chat_template(whole, tokenize=False)
    assert run.config.data.eval is not None
    (record,) = records_of(run.config.data, run.config.data.eval)
    assert record.messages == tuple(whole)
    with pytest.raises(UserError, match=r"data\.system=' ': it must be a text"):
        setup.prepared(data__system=" ")


_PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content + eos_token }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else '' }}"
)


def test_a_step_on_answers_that_are_apart_is_the_step_on_their_conversations(setup: Setup) -> None:
    """Under a template that writes an answer alike wherever it stands: the same tokens, in the same places."""
    turns = [{"role": role, "content": f"def {role[:n]}"} for n in (1, 2, 3) for role in ("user", "assistant")]
    setup.data(*({"messages": turns[:number]} for number in (2, 6, 4)))
    (setup.folder / "eval.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (setup.folder / "own.jinja").write_text(_PLAIN)
    options = {"data__chat_template": str(setup.folder / "own.jinja"), "train__batch_size": 2, "train__eval_every": 1}
    options |= {"model__dtype": "float64", "train__steps": 2, "train__micro_batch_size": 1, "topology": ""}
    found = {}
    for choice in ("whole", "apart"):
        output = setup.folder / choice
        run = setup.prepared(data__turns=choice, train__output=str(output), preflight="off", **options)
        assert (len(run.train_data), run.train_data.num_examples) == {"whole": (3, 3), "apart": (6, 3)}[choice]
        train({"": run})
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        found[choice] = [
            line[key] for line in lines for key in ("loss", "eval_loss", "grad_norm", "tokens") if key in line
        ]
    assert len(found["whole"]) >= 8
    torch.testing.assert_close(found["apart"], found["whole"], rtol=1e-10, atol=0)


def test_answers_are_taken_as_they_are_given_where_the_run_file_says_so(setup: Setup) -> None:
    answer = {"role": "assistant", "content": "<think>def</think>return g"}
    setup.data({"messages": [{"role": "user", "content": "def g"}, answer]})
    setup.drop("data.eval")
    file, said = setup.folder / "own.jinja", "m.content.split('</think>')[-1]"
    file.write_text(_PLAIN.replace("m.content", said).replace("'<assistant>'", "'<assistant><think>'"))
    with pytest.raises(UserError, match=r"or data.answers: as_generated with data.turns: apart"):
        setup.prepared(data__chat_template=str(file))
    with pytest.raises(UserError, match=r"or data.answers: as_generated, which"):
        setup.prepared(data__turns="apart")
    assert any("leaves out the reasoning of 1" in note for note in setup.prepared(data__lost_text="note").notes)
    run, tokenizer = (
        setup.prepared(data__turns="apart", data__answers="as_generated"),
        AutoTokenizer.from_pretrained(setup.model),
    )
    sequence = run.train_data[0]
    assert tokenizer.decode(sequence.input_ids[sequence.is_trained]) == f"def</think>return g{tokenizer.eos_token}"


def test_answers_end_at_the_stop_tokens_of_the_run_file(setup: Setup) -> None:
    turns = [{"role": "user", "content": "def g"}, {"role": "assistant", "content": "return g"}]
    setup.data({"messages": turns})
    setup.drop("data.eval")
    file, tokenizer = setup.folder / "own.jinja", AutoTokenizer.from_pretrained(setup.model)
    file.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}~ {% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    trained = []
    for stops in ([], ["~"]):
        data = setup.prepared(data__chat_template=str(file), data__stop_tokens=stops).train_data
        trained.append(tokenizer.decode(data.input_ids[data.is_trained]))
    assert trained == ["return g~ ", "return g~"]
    with pytest.raises(UserError, match=r"data.stop_tokens: 'def g': it is 2 tokens"):
        setup.prepared(data__stop_tokens=["def g"])


def test_a_template_of_trl_goes_by_its_name_and_a_file_before_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chats, written = setup.folder / "trl" / "chat_templates", "{% for m in messages %}({{ m.content }}){% endfor %}"
    chats.mkdir(parents=True)
    (chats.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in ("small_training", "small"):
        (chats / f"{name}.jinja").write_text(written)
    (spec,) = [importlib.util.spec_from_file_location("trl", chats.parent / "__init__.py")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "trl" else None)
    setup.set("data.chat_template", "small_training")
    setup.write()
    config = read_run(setup.folder / "run.yaml")
    texts = Texts(config.model, config.data, config.train.objective)
    assert texts.tokenizer().chat_template == written
    monkeypatch.chdir(tmp_path)
    Path("small_training").write_text("mine")
    assert texts.tokenizer().chat_template == "mine"
    for name, words in (("small", "and TRL small_training"), ("small_trainin", "'small_training'")):
        data = dataclasses.replace(config.data, chat_template=name)
        with pytest.raises(UserError, match=words):
            dataclasses.replace(texts, data=data).tokenizer()


def test_conversations_are_rendered_by_the_template_of_the_run_file(setup: Setup) -> None:
    turns = [{"role": "user", "content": "def g"}, {"role": "assistant", "content": "return g"}]
    setup.data({"messages": turns})
    setup.drop("data.eval")
    file = setup.folder / "own.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    run, tokenizer = setup.prepared(data__chat_template=str(file)), AutoTokenizer.from_pretrained(setup.model)
    assert tokenizer.decode(run.train_data.input_ids) == "[user]def g[assistant]return g"
    tokenizer.chat_template = {"default": "no", "terse": file.read_text().replace("[", "<").replace("]", ">")}
    tokenizer.save_pretrained(setup.model)
    run = setup.prepared(data__chat_template="terse")
    assert tokenizer.decode(run.train_data.input_ids) == "<user>def g<assistant>return g"
