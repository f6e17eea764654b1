"""A finished adapter is at home in any folder: PEFT and transformers load it, tokenizer and template too."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshlora.cli.job import Job
from meshlora.reading.records import Record
from meshlora.run import trained
from meshlora.run.checkpoint.manifest import read_whole
from meshlora.run.config.file import read_run
from meshlora.run.config.run_file import GenerateConfig
from meshlora.run.decoding import ends_of, read_prompts
from meshlora.run.run import train
from meshlora.run.together import prepare_run
from meshlora_ground.errors import SaveError, UserError
from meshlora_judge.saved import _difference
from tests.run_files import TINY, copy_lines, write_run_file

MESSAGES = [{"role": "user", "content": "Hello?"}]


def test_adapter_trained_on_a_relative_path_loads_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "base").symlink_to(TINY)
    monkeypatch.chdir(tmp_path / "here")
    copy_lines("train", tmp_path / "here" / "train.jsonl", 0, 8)
    copy_lines("eval", tmp_path / "here" / "eval.jsonl", 0, 2)
    data = {"train": "train.jsonl", "eval": str(tmp_path / "here" / "eval.jsonl")}
    options = {"steps": 1, "lr": 0.01, "output": "out"}
    file = write_run_file(tmp_path / "here" / "run.yaml", model={"path": "base"}, data=data, train=options)
    run = dataclasses.replace(prepare_run(read_run(file), world=1), command=f"meshlora train {file}", proof="*none*")
    train({"": run})
    adapter = tmp_path / "here" / "out" / "adapter"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    adapter = adapter.rename(tmp_path / "elsewhere" / "mine")

    auto = AutoPeftModelForCausalLM.from_pretrained("mine", dtype=torch.float64)
    given, plain = (AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64) for _ in range(2))
    plain.load_adapter("mine")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        before = given(ids).logits
        found = [model(ids).logits for model in (auto, PeftModel.from_pretrained(given, "mine"), plain)]
    for other in found[1:]:  # PEFT keeps factors in float32 beside such a base, transformers does not
        torch.testing.assert_close(found[0], other, rtol=1e-6, atol=1e-6)
    assert (found[0] - before).abs().max() > 0.1

    tokenizer, base = AutoTokenizer.from_pretrained("mine"), AutoTokenizer.from_pretrained(TINY)
    assert tokenizer.get_vocab() == base.get_vocab()
    rendered = [each.apply_chat_template(MESSAGES, tokenize=False) for each in (tokenizer, base)]
    assert rendered[0] == rendered[1]

    card = (adapter / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft"
    assert str(tmp_path) not in card
    expected = ("`base`", "`train.jsonl`: 8 sequences", "`eval.jsonl`: loss ", "meshlora train run.yaml", "1 processes")
    assert [words for words in expected if words not in card] == []
    assert all(name in card for name in ("lr 0.01, linear, without warm-up", "torch 2", "*none*"))
    assert "steps of 4 sequences = 4 at once x 1 dp rank x 1 accumulated" in card
    assert " = lora_alpha " in card
    (adapter / "README.md").write_text("mine")  # text that its owner may change
    assert read_whole(adapter, kinds=("adapter",)).files.keys() >= {"tokenizer.json", "chat_template.jinja"}
    stored = json.loads((adapter / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == str(tmp_path / "here" / "base")


@pytest.mark.long
def test_card_of_a_resumed_run_is_that_of_the_run_that_nothing_interrupted(tmp_path: Path) -> None:
    """It named `--resume`, and a step, and lost the loss where the last checkpoint was of the last step."""
    copy_lines("train", tmp_path / "train.jsonl", 0, 8)
    copy_lines("train", tmp_path / "eval.jsonl", 0, 8)  # whose loss falls
    options = {"steps": 2, "lr": 2e-3, "save_every": 1, "eval_every": 1, "keep_best": True, "keep_last": 2}
    file = write_run_file(tmp_path / "run.yaml", data={"eval": str(tmp_path / "eval.jsonl")}, train=options)

    def run(*resume: str) -> dict[str, bytes]:
        words = shlex.join(["meshlora", "train", "run.yaml", *resume])
        prepared = prepare_run(read_run(file), world=1, resume=resume[1] if resume else None)
        train({"": Job(words, "run.yaml", no_preflight=True).described(prepared)})
        return {each.name: each.read_bytes() for each in (tmp_path / "run" / "adapter").iterdir()}

    whole = run()
    assert b"`eval.jsonl`: loss " in whole["README.md"]
    shutil.rmtree(tmp_path / "run" / "adapter")
    assert run("--resume", "auto") == whole
    for folder in ("adapter", "checkpoints/step-000002"):
        shutil.rmtree(tmp_path / "run" / folder)
    assert run("--resume", "auto") == whole


@pytest.mark.long
def test_template_that_has_changed_since_is_not_shipped_and_a_lost_tokenizer_loses_no_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_lines("train", tmp_path / "train.jsonl", 0, 8)
    shutil.copytree(TINY, tmp_path / "base")
    template = tmp_path / "mine.jinja"
    read = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    template.write_text(read)
    for name in ("changed", "moved", "no tokenizer"):
        options = {"steps": 1, "lr": 0.01, "output": str(tmp_path / name)}
        data = {"train": str(tmp_path / "train.jsonl"), "chat_template": str(template)}
        file = write_run_file(tmp_path / "run.yaml", model={"path": str(tmp_path / "base")}, data=data, train=options)
        run = prepare_run(read_run(file), world=1)
        if name == "changed":
            template.write_text("another")
        elif name == "moved":
            template.unlink()
        else:
            (tmp_path / "base" / "tokenizer.json").write_text("{}")
        adapter = tmp_path / name / "adapter"
        train({"": run})
        found = read_whole(adapter, kinds=("adapter",)).files.keys()
        assert ("tokenizer.json" in found) == (name != "no tokenizer")
        if name != "no tokenizer":
            assert (adapter / "chat_template.jinja").read_text() == read
        template.write_text(read)
    assert "note: the adapter is saved without a tokenizer (" in capsys.readouterr().out


def test_file_beside_the_adapter_that_cannot_be_made_ends_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a `SaveError`, which is raised on every rank: the others would wait for rank 0."""

    def fail(*_: object) -> None:
        raise UserError("run.yaml", "it is gone")

    copy_lines("train", tmp_path / "train.jsonl", 0, 8)
    options, data = {"steps": 1, "output": str(tmp_path / "out")}, {"train": str(tmp_path / "train.jsonl")}
    run = prepare_run(read_run(write_run_file(tmp_path / "run.yaml", data=data, train=options)), world=1)
    monkeypatch.setattr(trained, "write_manifest", fail)
    with pytest.raises(SaveError, match=r"initial: the adapter could not be written \(.*run\.yaml: it is gone\)"):
        train({"": run})


def test_the_judge_knows_a_relative_base_under_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`meshlora verify --model base`: PEFT's own start adapter names the base as it was given."""
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    theirs, ours = tmp_path / "theirs.json", tmp_path / "ours.json"
    values = {"inference_mode": True, "task_type": "CAUSAL_LM"}
    theirs.write_text(json.dumps({**values, "base_model_name_or_path": "base"}))
    for stored, is_right in ((str(tmp_path / "base"), True), ("base", False), (str(tmp_path), False)):
        ours.write_text(json.dumps({**values, "base_model_name_or_path": stored}))
        assert (_difference(ours, theirs, "CAUSAL_LM") == "") == is_right, stored


def test_the_judge_knows_linears_under_their_names_as_parameters_by_what_peft_loads(tmp_path: Path) -> None:
    """deepseek_v3 with all linears: PEFT would take `mlp.gate_proj` in a stored list for its experts."""
    theirs, ours = tmp_path / "theirs.json", tmp_path / "ours.json"
    values = {"inference_mode": True, "task_type": "CAUSAL_LM", "target_parameters": None}
    theirs.write_text(json.dumps({**values, "target_modules": ["q_proj", "gate_proj"]}))
    for parameters, is_right in ((["mlp.gate_proj.weight"], True), (None, False)):
        ours.write_text(json.dumps({**values, "target_modules": ["q_proj"], "target_parameters": parameters}))
        assert (_difference(ours, theirs, "CAUSAL_LM") == "") == is_right, parameters


def _with_tokens_of_chatml(base: Path) -> None:
    """The small base without its chat template, where its last two tokens are those of ChatML."""
    shutil.copytree(TINY, base)
    (base / "chat_template.jinja").unlink()
    tree = json.loads((base / "tokenizer.json").read_text())
    merges, vocabulary = tree["model"]["merges"], tree["model"]["vocab"]
    last = sorted(vocabulary, key=vocabulary.get)[-2:]
    merges = [pair for pair in merges if not {"".join(pair), *pair} & {*last}]
    for old, name in zip(last, ("<|im_start|>", "<|im_end|>"), strict=True):
        vocabulary[name] = vocabulary.pop(old)
        tree["added_tokens"].append({**tree["added_tokens"][0], "id": vocabulary[name], "content": name})
    tree["model"] |= {"merges": merges, "vocab": vocabulary}
    (base / "tokenizer.json").write_text(json.dumps(tree))


def test_template_by_name_is_shipped_with_the_token_that_ends_its_answers(tmp_path: Path) -> None:
    base, output = tmp_path / "base", tmp_path / "out"
    _with_tokens_of_chatml(base)
    turns = [{"role": "user", "content": "def f"}, {"role": "assistant", "content": "return g"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    data, options = {"chat_template": "chatml"}, {"steps": 1, "lr": 0.01, "output": str(output), "batch_size": 1}
    file = write_run_file(tmp_path / "run.yaml", model={"path": str(base)}, data=data, train=options)
    run, tokenizer = prepare_run(read_run(file), world=1), AutoTokenizer.from_pretrained(base)
    sequence = run.train_data[0]
    assert tokenizer.decode(sequence.input_ids) == (
        "<|im_start|>user\ndef f<|im_end|>\n<|im_start|>assistant\nreturn g<|im_end|>\n"
    )
    assert tokenizer.decode(sequence.input_ids[sequence.is_trained]) == "return g<|im_end|>"
    train({"": run})
    found = read_whole(output / "adapter", kinds=("adapter",)).files.keys()
    assert found >= {"tokenizer.json", "chat_template.jinja", "generation_config.json"}
    assert AutoTokenizer.from_pretrained(output / "adapter").chat_template == run.chat_template
    stops = json.loads((output / "adapter" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == tokenizer.convert_tokens_to_ids([tokenizer.eos_token, "<|im_end|>"])
    # Who asks the adapter afterwards, from its folder alone, asks in its form and stops where its answers end.
    asked = [Record(messages=(turns[0],), origin="--prompt")]
    ours, ((*ids,),) = read_prompts(base, asked, GenerateConfig(), adapter=output / "adapter")
    assert ids == sequence.input_ids[: len(ids)].tolist()
    assert {*ends_of(ours, GenerateConfig())} == {*stops}
