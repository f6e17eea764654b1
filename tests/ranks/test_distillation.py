"""A run distils from a second model, or from itself in a context, as transformers and PEFT do on one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from meshlora.cli.main import main
from meshlora.run.config.file import read_run
from meshlora.run.distillation.recording import record
from meshlora.run.evaluate import prepare_evaluation
from meshlora.run.together import prepare_run
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from tests.for_each import for_each
from tests.one_process import train_alone
from tests.pool import Pool
from tests.ranks.test_trainer import run_and_keep_groups, run_file, small_base
from tests.run_files import copy_lines, copy_tokenizer, metrics_of

SHORT = {"train__steps": 3, "train__eval_every": 3, "train__save_every": 0}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of other sizes, with the vocabulary and the tokenizer of the student."""
    folder = tmp_path_factory.mktemp("teacher")
    _write_model(folder, 2048)
    return folder


def _write_model(folder: Path, vocab_size: int) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    copy_tokenizer(folder)


def distill_file(folder: Path, name: str, topology: str, **changes: Any) -> Path:
    for part, lines in (("train", 19), ("eval", 5)):
        copy_lines(part, folder / f"{part}.jsonl", 0, lines)
    return run_file(folder, name, topology, **SHORT | changes)


@pytest.mark.parametrize("topology", ["tp=2,sp", "pp=2"])
@pytest.mark.parametrize("kind", ["a second model", "itself in a context"])
def test_run_gives_the_adapter_of_one_process(
    kind: str, topology: str, teacher: Path, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    objective: dict[str, Any] = {"kind": "distill", "teacher": str(teacher), "divergence": "jsd", "beta": 0.3}
    if kind != "a second model":
        objective = {"kind": "distill", "teacher": "itself", "context": "Be brief.", "divergence": "reverse_kl"}
    objective |= {"temperature": 1.3, "cross_entropy": 0.2}
    file = distill_file(tmp_path, "run", topology, train__objective=objective)
    pools(2).run(run_and_keep_groups, file, 2)
    output = tmp_path / "run"
    losses = train_alone(file, initial=output / "initial", out=tmp_path / "reference")
    assert compare_adapters(output / "adapter", tmp_path / "reference").relative < 1e-6
    assert largest_loss_gap(read_losses(output / "metrics.jsonl"), losses) < 1e-11
    lines = metrics_of(output)
    assert all({"divergence", "nll"} < line.keys() for line in lines if "loss" in line)
    evaluated = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert main(["evaluate", str(file), "--json", str(tmp_path / "evaluated.json")]) == 0
    found = json.loads((tmp_path / "evaluated.json").read_text())
    assert found["loss"] == pytest.approx(evaluated[-1], rel=1e-11)


def test_a_teacher_is_the_reference(tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    """Of a run that goes on from an adapter the teacher is that adapter, unless it is to be the base."""
    first = distill_file(tmp_path, "first", "tp=2", train__objective="sft")
    pools(2).run(run_and_keep_groups, first, 2)
    adapter = tmp_path / "first" / "adapter"
    for reference, is_equal in (("start", True), ("base", False)):
        objective = {"kind": "distill", "teacher": "itself", "reference": reference}
        file = distill_file(tmp_path, reference, "tp=2", train__objective=objective)
        file.write_text(yaml.safe_dump({**_without_lora(file), "adapter": str(adapter)}))
        pools(2).run(run_and_keep_groups, file, 2)
        assert (metrics_of(tmp_path / reference)[0]["divergence"] < 1e-12) == is_equal


def _without_lora(file: Path) -> dict[str, Any]:
    tree = yaml.safe_load(file.read_text())
    del tree["lora"]
    return dict(tree)


def _record(file: Path, out: Path) -> None:
    config = read_run(file)
    run = prepare_evaluation(config, adapter=None, world=2)
    record(run, out, 5)


@pytest.mark.parametrize("topology", ["tp=2,sp", "dp=2", "cp=2", "pp=2"])
def test_a_record_is_what_transformers_says(topology: str, tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    file, out = distill_file(tmp_path, "teacher", topology), tmp_path / "taught.jsonl"
    pools(2).run(_record, file, out)
    model = AutoModelForCausalLM.from_pretrained(small_base(), dtype="float64")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 5
    for row in rows:
        log_p = model(torch.tensor([row["input_ids"]])).logits[0].log_softmax(1)
        at = torch.tensor(row["is_trained"]).nonzero().squeeze(1) - 1
        values, ids = log_p[at].topk(5, 1)
        assert row["teacher_tokens"] == ids.tolist()
        assert torch.allclose(torch.tensor(row["teacher_log_probs"], dtype=torch.float64), values, atol=2e-6)
    if topology == "dp=2":  # and it is what is read
        files = {"data__train": str(out), "data__eval": str(out)}
        student = distill_file(tmp_path, "student", "", train__objective={"kind": "distill"}, **files)
        data = prepare_run(read_run(student)).train_data
        likeliest = [ids[0] for row in rows for ids in row["teacher_tokens"]]
        assert data.columns["teacher_token_0"][data.is_trained].tolist() == likeliest


def test_a_teacher_of_another_vocabulary_or_tokenizer_is_refused(teacher: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    _write_model(other, 2050)
    swapped = tmp_path / "swapped"
    shutil.copytree(teacher, swapped)
    file = swapped / "tokenizer.json"
    tokens = json.loads(file.read_text())
    vocabulary = tokens["model"]["vocab"]
    first, second = [*vocabulary][100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokens))
    for folder, words in ((other, "vocabulary of 2,050"), (swapped, "in another order"), (tmp_path / "no", "no such")):
        objective = {"kind": "distill", "teacher": str(folder)}
        with pytest.raises(UserError, match=words):
            prepare_run(read_run(distill_file(tmp_path, "wrong", "", train__objective=objective)))


@for_each(
    ("changes", "words"),
    [
        ({"topology": "cp=2"}, "other rows than the student"),
        ({"topology": "pp=2,interleave=2"}, "leave out interleave"),
        ({"data__packing": True}, "other rows than the student"),
    ],
)
def test_what_a_context_does_not_go_with_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    topology = changes.pop("topology", "")
    objective = {"kind": "distill", "teacher": "itself", "context": "Be brief."}
    file = distill_file(tmp_path, "wrong", topology, train__objective=objective, **changes)
    with pytest.raises(UnsupportedError, match=words):
        prepare_run(read_run(file), world=2)
