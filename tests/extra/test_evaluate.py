"""`meshlora evaluate` and what it is made of: perplexity, prompts with several references, decoding, scores."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaForCausalLM

from meshlora.cli.main import main
from meshlora.reading.records import Record, prompts_of
from meshlora.reading.sources import read_records
from meshlora.reading.tokenization import tokenize
from meshlora.reading.tokenizer import padding_token_id
from meshlora.run.config.run_file import GenerateConfig
from meshlora.run.decoding import generate
from meshlora.run.evaluate import perplexity
from meshlora.train.collation import collate
from meshlora_extra.paper.scores import scores
from meshlora_ground.errors import UserError
from meshlora_ground.float64 import lift
from tests.for_each import for_each
from tests.unit.mistakes import Setup, one_error

BASE = str(Path(__file__).parents[2] / "examples" / "tiny_base")
PROMPTS = ["def add(a, b):", "def log_last_packets(data, port=0):\n", "x", "class Stack:\n    def push(self, item):"]


BEAMS = {"num_beams": 4, "length_penalty": -5.0}


def record(prompt: str, completion: str) -> Record:
    return Record(prompt=prompt, completion=completion, origin="here")


# --- the loss ---------------------------------------------------------------------------------------------------------


def evaluated(setup: Setup, *words: str) -> dict[str, object]:
    setup.write()
    out = setup.folder / "result.json"
    assert main(["evaluate", str(setup.folder / "run.yaml"), *words, "--json", str(out)]) == 0
    found: dict[str, object] = json.loads(out.read_text())
    return found


def test_loss_is_that_of_transformers_and_peft_over_the_whole_file(setup: Setup) -> None:
    """Micro-batches of 3 do not divide the 8 sequences; without label smoothing, whatever the run trains with."""
    setup.set("train.micro_batch_size", 3)
    setup.set("train.objective", {"kind": "sft", "label_smoothing": 0.3})
    setup.set("model.dtype", "float64")
    found = evaluated(setup, "--adapter", str(setup.adapter))
    tokenizer = AutoTokenizer.from_pretrained(setup.model)
    data = tokenize(read_records(setup.folder / "eval.jsonl"), tokenizer, max_length=64)
    batch = collate(list(data), pad_token_id=0)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(setup.model), setup.adapter).double().eval()
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    expected = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()))
    assert found["loss"] == pytest.approx(expected, rel=1e-5)  # the reference has float32 islands
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert (found["examples"], found["trained_tokens"]) == (8, data.num_trained_tokens)


def test_new_head_is_the_adapters_and_its_scores_are_those_of_transformers_and_peft(setup: Setup) -> None:
    rows = [{"text": f"text {n} " + "word " * (n % 3), "label": n % 3} for n in range(5)]
    (setup.folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    setup.set("train.objective", {"kind": "classify", "num_labels": 3})
    setup.set("train.micro_batch_size", 2)
    setup.set("model.dtype", "float64")
    tokenizer = AutoTokenizer.from_pretrained(setup.model)
    base = AutoModelForSequenceClassification.from_pretrained(setup.model, num_labels=3, dtype=torch.float64)
    base.config.pad_token_id = padding_token_id(tokenizer)
    options = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["score"], "init_lora_weights": False}
    model = get_peft_model(base, LoraConfig(**options, task_type="SEQ_CLS")).eval()
    model.save_pretrained(setup.folder / "labels")
    found = evaluated(setup, "--adapter", str(setup.folder / "labels"))
    labels = torch.tensor([row["label"] for row in rows])
    with torch.no_grad(), lift():
        outputs = torch.cat([model(**tokenizer(row["text"], return_tensors="pt")).logits for row in rows])
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(outputs, labels).item(), rel=1e-10)
    assert found["accuracy"] == pytest.approx((outputs.argmax(1) == labels).double().mean().item())
    assert found["examples"] == 5


def test_which_adapter_is_evaluated(setup: Setup) -> None:
    """The finished one of the run; `--base` and `--adapter` say else, and nothing takes its place."""
    base = evaluated(setup, "--base")
    assert base["adapter"] is None
    finished = setup.folder / "output" / "adapter"
    finished.parent.mkdir()
    (setup.folder / "adapter").rename(finished)
    assert evaluated(setup)["adapter"] == str(finished)
    assert evaluated(setup, "--base") == base
    assert evaluated(setup, "--adapter", str(finished))["adapter"] == str(finished)


@pytest.mark.usefixtures("nothing_has_happened_yet")
def test_base_is_not_scored_in_place_of_a_run_that_is_not_done(setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    """A mistyped output would give the base's number as the run's; nor does the adapter that it starts from."""
    file = str(setup.folder / "run.yaml")
    setup.write()
    assert main(["evaluate", file]) == 2
    message = one_error(*capfd.readouterr())
    assert f"train.output={setup.folder / 'output'}: the run has no finished adapter there" in message
    assert "--base" in message
    setup.from_adapter()
    setup.write()
    assert main(["evaluate", file]) == 2
    assert f"--adapter {setup.adapter}" in one_error(*capfd.readouterr())


def test_only_the_first_sequences_are_evaluated_where_a_limit_is_set(setup: Setup) -> None:
    setup.set("data.eval_limit", 3)
    assert evaluated(setup, "--base")["examples"] == 3
    file = str(setup.folder / "train.jsonl")
    assert evaluated(setup, "--base", "--data", file)["examples"] == 8, "of another file all is meant"


def test_only_categories_that_are_asked_for_are_evaluated(setup: Setup) -> None:
    rows = [{"context": f"x {n}", "completion": "y z", "cate": n < 2} for n in range(5)]
    (setup.folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for categories, number in {"seen": 2, "unseen": 3, "all": 5}.items():
        setup.set("data.eval_categories", categories)
        assert evaluated(setup, "--base")["examples"] == number


def test_perplexity_of_a_huge_loss_is_infinite() -> None:
    assert perplexity(2.0) == math.exp(2.0)
    assert perplexity(1e6) == math.inf


# --- generated text ---------------------------------------------------------------------------------------------------


def test_records_with_one_prompt_are_its_references() -> None:
    """Wherever they are in the file, as in microsoft/LoRA's gpt2_decode.py."""
    found = prompts_of([record("a", " 1"), record("a", " 2 "), record("b", " 3"), record("a", " 4")])
    assert [(prompt.text, prompt.references) for prompt in found] == [("a", ("1", "2", "4")), ("b", ("3",))]


def test_record_without_a_prompt_cannot_be_a_reference() -> None:
    with pytest.raises(UserError, match="a record of text"):
        prompts_of([Record(text="x", origin="train.jsonl:1")])


@pytest.mark.parametrize("num_beams", [1, 4])
def test_prompts_together_are_continued_as_each_alone(num_beams: int) -> None:
    """Padding on the left changes nothing: in float64 the texts are equal."""
    texts = []
    for batch_size in (1, len(PROMPTS)):
        options = GenerateConfig(max_new_tokens=12, num_beams=num_beams, batch_size=batch_size)
        texts.append(list(generate(BASE, PROMPTS, options=options, dtype="float64")))
    assert texts[0] == texts[1]


def test_decoding_is_that_of_transformers() -> None:
    settings = {"max_new_tokens": 24, "num_beams": 4, "length_penalty": -5.0, "no_repeat_ngram_size": 2}
    (found,) = generate(BASE, PROMPTS[:1], options=GenerateConfig(**settings), dtype="float64")
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    inputs = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    expected = model.generate(**inputs, **settings, pad_token_id=tokenizer.pad_token_id, do_sample=False)
    assert found == tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.long
@for_each(
    "settings",
    [
        {"num_beams": 3},
        {"no_repeat_ngram_size": 1},
        {"search": "gpt2_beam", "no_repeat_ngram_size": 1},
        {"stop": [" "]},
        {"do_sample": True},
        {"do_sample": True, "temperature": 9.0},
        {"do_sample": True, "top_p": 0.05},
        {"do_sample": True, "seed": 1},
        BEAMS,
    ],
    ids=str,
)
def test_every_option_of_decoding_has_an_effect(settings: dict[str, Any]) -> None:
    plain = {key: settings[key] for key in ("do_sample",) if len(settings) > 1 and key in settings}
    plain |= {key: settings[key] for key in ("num_beams",) if "length_penalty" in settings}
    plain |= {"no_repeat_ngram_size": 1} if "search" in settings else {}
    assert _said(json.dumps(plain)) != _said(json.dumps(settings))


@functools.cache
def _said(settings: str) -> list[str]:
    options = GenerateConfig(**json.loads(settings), max_new_tokens=24)
    return list(generate(BASE, ['def list_paths(target):\n    """'], options=options, dtype="float64"))


def test_continuations_have_at_most_so_many_tokens_and_so_many_prompts_are_continued_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes, plain = [], LlamaForCausalLM.generate

    def noted(self: LlamaForCausalLM, **words: Any) -> torch.Tensor:
        output: torch.Tensor = plain(self, **words)
        shapes.append((len(output), output.shape[1] - words["input_ids"].shape[1]))
        return output

    monkeypatch.setattr(LlamaForCausalLM, "generate", noted)
    list(generate(BASE, PROMPTS, options=GenerateConfig(max_new_tokens=3, batch_size=3), dtype="float64"))
    assert shapes == [(3, 3), (1, 3)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scores_count_every_reference() -> None:
    hypotheses = ["the cat sat on the mat today", "a dog runs in the old park"]
    references = [["nothing alike at all here", "the cat sat on the mat today"], ["a dog runs in the old park"]]
    found = scores(hypotheses, references)
    assert (found["bleu"], found["rouge_l"]) == (pytest.approx(100.0), pytest.approx(100.0))
    worse = scores(hypotheses, [references[0][:1], references[1]])
    assert worse["bleu"] < 80
    assert worse["rouge_l"] < 80


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_generated_texts_are_written_and_scored(setup: Setup) -> None:
    """Two references of one prompt are one prompt."""
    lines = ["def f||one", "def f||two", "def g||three"]
    (setup.folder / "eval.txt").write_text("\n".join(lines) + "\n")
    setup.set("data.eval", str(setup.folder / "eval.txt"))
    setup.tree["generate"] = {"max_new_tokens": 4, "num_beams": 2}
    texts = setup.folder / "texts.txt"
    found = evaluated(setup, "--base", "--generate", "--hypotheses", str(texts))
    assert (found["prompts"], found["references"], found["examples"]) == (2, 3, 3)
    assert len(texts.read_text().splitlines()) == 2
    assert {"bleu", "nist", "meteor", "rouge_l", "cider", "bleu_signature"} <= found.keys()


def test_metrics_of_the_run_file_are_said_beside_the_code_that_computed_them(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    """In place of scores, which nobody asked for; of all of another file, too."""
    rows = [{"prompt": f"def f{n}(", "completion": f"{n}"} for n in range(3)]
    (setup.folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = setup.folder / "mine.py"
    code.write_text("def words(prompt, answer, reference):\n    return len(prompt) + int(reference)\n")
    metrics = ["exact_match", {"regex": "", "name": "any"}, f"{code}:words"]
    setup.tree["generate"] = {"max_new_tokens": 4, "metrics": metrics, "limit": 2}
    found = evaluated(setup, "--base", "--generate")
    assert found["metrics"] == {"exact_match": 0.0, "any": 1.0, "words": 7.5}
    assert found["code"] == {str(code): hashlib.sha256(code.read_bytes()).hexdigest()}
    assert (found["prompts"], "bleu" in found) == (2, False)
    assert "exact_match 0.0000  any 1.0000  words 7.5000" in capsys.readouterr().out
    found = evaluated(setup, "--base", "--generate", "--data", str(setup.folder / "eval.jsonl"))
    assert (found["prompts"], found["metrics"]["words"]) == (3, 8.0)  # type: ignore[index]
    assert "metrics" not in evaluated(setup, "--base"), "without --generate"


@pytest.mark.usefixtures("nothing_has_happened_yet")
@for_each(
    ("words", "said"),
    [
        (["--hypotheses", "x"], ("--hypotheses x", "no effect without --generate")),
        (["--references", "x"], ("--references x", "no effect without --generate")),
        (["--scores", "e2e-metrics"], ("--scores e2e-metrics", "no effect without --generate")),
        (["--generate", "--references", "nowhere/x"], ("nowhere/x", "no folder nowhere")),
        (["--generate", "--scores", "generation-eval", "--references", "tests"], ("tests", "there already")),
        (["--set", "generate.stop=['']"], ("generate.stop", "empty text")),
        (["--set", "generate.search=gpt2_beam", "--set", "generate.do_sample=true"], ("do_sample", "gpt2_beam")),
        (["--json", "nowhere/x"], ("nowhere/x", "no folder nowhere")),
        (["--json", "tests"], ("tests: it is a folder", "name of a file")),
        (["--adapter", "nowhere"], ("nowhere", "no such folder")),
        (["--data", "nowhere.txt"], ("nowhere.txt", "no such file")),
        (["--nproc", "0"], ("--nproc 0", "at least 1")),
        (["--set", "topology=tp=2"], ("tp=2", "1 processes")),
        (["--nproc", "3"], ("tp=2",)),
        (["--set", "generate.num_beams=0"], ("generate.num_beams=0", "at least 1")),
        (["--set", "generate.length_penalty=2"], ("generate.length_penalty", "no effect without beams")),
        (["--set", "generate.top_p=0.5"], ("generate.top_p", "no effect without do_sample")),
        (["--generate", "--set", "generate.max_new_tokens=1000"], ("eval.jsonl:1", "positions", "max_new_tokens")),
        (["--generate", "--set", "generate.metrics=[json_match]"], ("eval.jsonl:1", "is no JSON")),
        (["--generate", "--set", "generate.metrics=['no.py:f']"], ("no.py:f", "there is no file no.py")),
        (["--set", "data.eval=null"], ("data.eval", "nothing to evaluate on", "--data FILE")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistake_is_found_before_anything_starts(
    words: list[str], said: tuple[str, ...], setups: Callable[[], Setup], capfd: pytest.CaptureFixture[str]
) -> None:
    setup = setups()
    setup.write()
    which = [] if "--adapter" in words else ["--base"]
    assert main(["evaluate", str(setup.folder / "run.yaml"), *which, *words]) == 2
    message = one_error(*capfd.readouterr())
    assert not [word for word in said if word not in message], message


@pytest.mark.usefixtures("nothing_has_happened_yet")
@pytest.mark.parametrize(
    ("name", "words"),
    [("sacrebleu", []), ("pyter", ["--scores", "generation-eval"]), ("nltk", ["--scores", "generation-eval"])],
)
def test_missing_scorer_is_named_with_the_way_to_get_it(
    name: str, words: list[str], setup: Setup, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    setup.write()
    assert main(["evaluate", str(setup.folder / "run.yaml"), "--base", "--generate", *words]) == 2
    message = one_error(*capfd.readouterr())
    assert name in message
    assert "pip install 'meshlora[metrics]'" in message
