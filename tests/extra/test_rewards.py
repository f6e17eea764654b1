"""Rewards: what each says of a completion, and that one which fails names the completion."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from meshlora.adapter.formats.peft_format import lora_config, save_adapter
from meshlora.loading.blueprint import make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.reading.preferences import read_margins
from meshlora.reading.tokenizer import load_tokenizer, padding_token_id
from meshlora.run.config.rl import (
    REWARDS,
    FunctionReward,
    JsonSchemaReward,
    MatchReward,
    ModelReward,
    RegexReward,
    UnitTestsReward,
)
from meshlora.run.heads import outputs_of, set_padding
from meshlora.train.collation import collate
from meshlora_extra.rl.prompts import Prompt
from meshlora_extra.rl.rewards import Completion, Rewards
from meshlora_extra.rl.unit_tests import code_in, run_tests
from meshlora_ground.errors import UserError
from meshlora_ground.objectives.rewards import Reward as RewardObjective
from meshlora_ground.topology import Topology
from tests.for_each import for_each
from tests.run_files import copy_tokenizer

LIMITS = UnitTestsReward(cpu_s=1, wall_s=4.0, memory_mb=512)


def _said(text: str, prompt: str = "ask ", **fields: Any) -> Completion:
    return Completion(prompt, text, fields, "prompts.jsonl:3")


def _values(reward: Any, *completions: Completion) -> list[float]:
    return [scored.total for scored in Rewards([reward])(completions)]


def test_a_pattern_is_found_or_is_all() -> None:
    assert _values(RegexReward(pattern="b+"), _said("abc"), _said("ac")) == [1, 0]
    assert _values(RegexReward(pattern="b+", whole=True), _said("abc"), _said("bb")) == [0, 1]


def test_a_pattern_that_never_ends_names_the_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshlora_extra.rl.rewards._PATTERN_S", 0.1)
    with pytest.raises(UserError, match=r"of the completion 'aaa.* of prompts\.jsonl:3: the pattern .* took longer"):
        _values(RegexReward(pattern="(a+)+$"), _said("a" * 60 + "b"))


ENDLESS = {
    "pattern": ({"kind": "regex", "pattern": "(a+)+$"}, "a" * 60 + "b"),
    "schema": ({"kind": "json_schema", "schema": {"pattern": "(a+)+$"}}, '"' + "a" * 60 + 'b"'),
    "recursion": (
        {
            "kind": "json_schema",
            "schema": {
                "$ref": "#/$defs/0",
                "$defs": {f"{n}": {"allOf": [{"$ref": f"#/$defs/{n + 1}"}]} for n in range(20)}
                | {"20": {"items": {"$ref": "#/$defs/0"}}},
            },
        },
        "[" * 49 + "]" * 49,
    ),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_completion_that_cannot_be_judged_ends_the_run_or_is_counted(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshlora_extra.rl.rewards._PATTERN_S", 0.1)
    given, text = ENDLESS[what]
    stops, counts = (REWARDS[given["kind"]](**given, on_failure=how, weight=2.0) for how in ("stop", "zero"))
    words = "recurses too deeply" if what == "recursion" else r"took longer than 0\.1 s"
    with pytest.raises(UserError, match=rf"of prompts\.jsonl:3: the .*: it {words}; .*on_failure: zero"):
        _values(stops, _said(text))
    scored = Rewards([counts, RegexReward(pattern="", weight=0.5)])([_said("1"), _said(text)])
    assert [each.failed for each in scored] == [(), (given["kind"],)]
    assert scored[1].total == 0.5


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "#/$defs/x"}, "there is nothing at .ref '#/.defs/x', and nothing is fetched"),
        ({"items": {"$ref": "https://example.org/schema"}}, "nothing at .ref 'https://example.org/schema'"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "nothing at .ref 'file:///etc/passwd'"),
        ({"$ref": "#"}, "refers to itself without an end"),
    ],
)
def test_a_schema_that_refers_to_nothing_is_refused_before_a_completion(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Rewards([JsonSchemaReward(schema=schema)])


def test_a_schema_may_refer_to_itself_and_have_data_that_look_like_it() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}, "not": {"const": {"$ref": "#/nowhere"}}}
    said = [_said('{"child": {"child": {}}}'), _said('{"child": {"child": 3}}'), _said('{"$ref": "#/nowhere"}')]
    assert _values(JsonSchemaReward(schema=tree), *said) == [1, 0, 0]
    assert _values(JsonSchemaReward(schema={"$ref": "https://json-schema.org/draft/2020-12/schema"}), _said("{}")) == [
        1
    ]


@pytest.mark.parametrize(
    ("reward", "fields", "words"),
    [
        (MatchReward(), {"tests": "pass"}, r"p\.jsonl:2: reward match: the prompt's record has no 'answer'"),
        (MatchReward(how="number"), {"answer": "none"}, r"p\.jsonl:2: reward match: answer='none': it has no number"),
        pytest.param(
            UnitTestsReward(memory_mb=512),
            {"answer": "1"},
            r"p\.jsonl:2: reward tests: .* has no 'tests': .*; it has answer",
            marks=pytest.mark.sandbox,
        ),
    ],
)
def test_every_prompt_has_what_its_rewards_need(reward: Any, fields: dict[str, Any], words: str) -> None:
    prompts = [
        Prompt("ask", (1,), each, f"p.jsonl:{n}") for n, each in enumerate([{"answer": "1", "tests": ""}, fields], 1)
    ]
    rewards = Rewards([reward])
    rewards.check(prompts[:1])
    with pytest.raises(UserError, match=words):
        rewards.check(prompts)


def test_json_is_what_the_schema_accepts(tmp_path: Path) -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    said = [_said(' {"n": 3}\n'), _said('{"n": "3"}'), _said("n: 3")]
    assert _values(JsonSchemaReward(schema=schema), *said) == [1, 0, 0]
    (tmp_path / "schema.json").write_text('{"type": "array"}')
    assert _values(JsonSchemaReward(schema=str(tmp_path / "schema.json")), _said("[]"), _said("{}")) == [1, 0]
    with pytest.raises(UserError, match="it is no JSON schema"):
        Rewards([JsonSchemaReward(schema={"type": "number of"})])


def test_an_answer_is_matched_as_text_or_by_its_last_number() -> None:
    assert _values(MatchReward(), _said(" 42 ", answer="42"), _said("42.", answer="42")) == [1, 0]
    number = MatchReward(field="solution", how="number")
    said = [_said(f"so it is {text}", solution="#### 1,200") for text in ("3 * 400 = 1200.", "1200 or 12", "none")]
    assert _values(number, *said) == [1, 0, 0]
    with pytest.raises(UserError, match="the prompt's record has no 'solution'"):
        _values(number, _said("1", answer="1"))


@for_each(
    ("said", "answer", "is_right"),
    [
        (f"{2**53 + 1}", f"{2**53}", False),
        ("1e999", "1e9999", False),
        ("1e9999", "10e9998", True),
        ("1e-9999", "0", False),
        ("0.1", "0.1000", True),
        ("so .5 it is", "5e-1", True),
        ("1,200.0", "12e2", True),
        ("-0.00e5", "0", True),
        ("5-42", "42", True),
        ("(5)-42", "42", True),
        ("x=-42", "-42", True),
        ("+42.", "42", True),
        ("-42", "42", False),
        ("half, 1/2", "2", True),
        ("007", "7", True),
        ("9" * 5000, "9" * 4999, False),
        ("9" * 5000, "9" * 5000, True),
        ("1e" + "9" * 5000, "1", False),
    ],
)
def test_numbers_are_compared_exactly(said: str, answer: str, is_right: bool) -> None:
    assert _values(MatchReward(how="number"), _said(said, answer=answer)) == [float(is_right)]


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("name", "program", "end"),
    [
        ("well", "assert 1 + 1 == 2", "passed"),
        ("ill", "assert 1 + 1 == 3", "failed: AssertionError: "),
        ("thinks", "while True: pass", "used more than 1 s of a processor"),
        ("waits", "import time; time.sleep(100)", "took longer than 1 s"),
        ("takes", "bytearray(600 * 2**20)", "failed: MemoryError: "),
        ("writes", "open('f', 'wb').write(bytes(2**26))", "failed: OSError: [Errno 27] File too large"),
    ],
    ids=["well", "ill", "thinks", "waits", "takes", "writes"],
)
def test_a_program_ends_within_its_limits(name: str, program: str, end: str) -> None:
    begun = time.monotonic()
    limits = UnitTestsReward(cpu_s=1, wall_s=1.0 if name == "waits" else 60.0, memory_mb=512)
    assert run_tests([program], limits) == [end]
    assert time.monotonic() - begun < 30


@pytest.mark.sandbox
def test_tests_may_end_the_program_themselves() -> None:
    cases = "import unittest\nclass T(unittest.TestCase):\n def test(self): assert f(3) == 6\nunittest.main()"
    ends = [cases, "import sys\nsys.exit(f(3) != 6)", "assert f(3) == 6\nexit()"]
    right, wrong = (f"def f(x): return x {sign} 2" for sign in "*+")
    assert run_tests([right] * 3, LIMITS, ends) == ["passed"] * 3
    ended = ["failed: SystemExit: True", "failed: SystemExit: True", "failed: AssertionError: "]
    assert run_tests([wrong] * 3, LIMITS, ends) == ended


@pytest.mark.sandbox
def test_code_is_that_of_the_block_and_meets_the_tests_of_its_prompt() -> None:
    assert code_in("Here:\n```python\nx = 1\n```\nthat is it") == "x = 1\n"
    assert code_in("x = 1") == "x = 1"
    reward = UnitTestsReward(field="check", with_prompt=True, cpu_s=2, memory_mb=512)
    said = [_said(f"  return a {sign} b\n", "def f(a, b):\n", check="assert f(2, 3) == 6") for sign in "*+"]
    assert _values(reward, *said) == [1, 0]


@pytest.mark.sandbox
def test_tests_that_cannot_be_run_here_are_refused_before_the_run() -> None:
    with pytest.raises(UserError, match="an empty program does not pass here"):
        Rewards([UnitTestsReward(memory_mb=1)])


def test_a_function_gets_what_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass Kept:\n    level: int\n"
        "def one(completion, prompt, level): return len(completion) * level + prompt.count('k')\n"
        "def many(prompts, completions, level, **kwargs): return [len(c) * l for c, l in zip(completions, level)]\n"
        "def wrong(completion): return {'x': float('nan'), 'y': None}.get(completion, 1.0)\n"
        "def fails(completion): return 1 / (len(completion) - 2)\n"
        "def alone(completions): return [len(completions[0])]\n"
        "def ends(completion): raise SystemExit(0)\n"
        "number = 3\n"
    )
    assert _values(FunctionReward(name=f"{file}:one"), _said("abc", level=2, other=1)) == [7]
    assert _values(FunctionReward(name=f"{file}:many"), _said("abc", level=2), _said("a", level=5)) == [6, 5]
    assert _values(FunctionReward(name=f"{file}:alone"), _said("abc")) == [3]
    assert _values(FunctionReward(name="math:sqrt"), *[]) == []
    for function, text, words in (
        ("wrong", "x", r"own\.py:wrong of the completion 'x' of prompts\.jsonl:3: it is nan, no finite number"),
        ("wrong", "y", r"of the completion 'y' of prompts\.jsonl:3: it is None, no finite number"),
        ("ends", "abc", r"of the completion 'abc' of prompts\.jsonl:3: it raised SystemExit"),
        ("fails", "ab", r"of the completion 'ab' of prompts\.jsonl:3: it raised ZeroDivisionError"),
    ):
        with pytest.raises(UserError, match=words):
            _values(FunctionReward(name=f"{file}:{function}"), _said("abc"), _said(text))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing.py:f", "there is no file nothing.py"),
        ("no_such_module:f", "No module named 'no_such_module'; install it, or name its file"),
        ("math:no", "math has no function no"),
        ("math", "as in module:function"),
        ("builtins:max", "no signature found for builtin .*give a function of Python"),
    ],
)
def test_a_function_that_is_not_there_is_named(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Rewards([FunctionReward(name=name)])


def test_code_of_the_working_folder_is_not_run_by_its_module_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_this_folder.py").write_text("def f(completion): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="No module named"):
        Rewards([FunctionReward(name="of_this_folder:f")])
    assert _values(FunctionReward(name="of_this_folder.py:f"), _said("a")) == [1]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model without training."""
    folder = tmp_path_factory.mktemp("judge")
    copy_tokenizer(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=2048, pad_token_id=1, num_labels=1, max_position_embeddings=64, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_a_reward_model_says_what_transformers_says_of_the_whole_text(
    judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, sizes = LlamaForSequenceClassification.forward, list[int]()

    def counted(self: Any, input_ids: torch.Tensor, **rest: Any) -> Any:
        sizes.append(len(input_ids))
        return forward(self, input_ids, **rest)

    model, tokenizer = (
        LlamaForSequenceClassification.from_pretrained(judge).eval(),
        load_tokenizer(judge, trust_remote_code=False),
    )
    said = [_said(text) for text in ("short", "a longer one than that", "x")]
    with torch.no_grad():
        alone = [model(**tokenizer("ask " + each.text, return_tensors="pt")).logits.item() for each in said]
    monkeypatch.setattr(LlamaForSequenceClassification, "forward", counted)
    assert _values(ModelReward(path=str(judge), batch_size=2), *said) == pytest.approx(alone, rel=1e-4)
    assert sizes == [2, 1]
    with pytest.raises(UserError, match=r"of prompts\.jsonl:3: .* the reward model has 64 positions"):
        _values(ModelReward(path=str(judge)), _said("many words " * 60))
    with pytest.raises(UserError, match="there is no such folder"):
        Rewards([ModelReward(path="nowhere")])


def test_code_that_ends_the_process_as_it_is_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(UserError, match="its code raised SystemExit"):
        Rewards([FunctionReward(name=f"{tmp_path / 'ends.py'}:f")])


def test_a_reward_model_pads_where_positions_and_its_head_do_not_see_it(tmp_path: Path) -> None:
    """Whatever side its tokenizer says: BERT takes the first token, at its place."""
    copy_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": "left"}))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(vocab_size=2048, num_labels=1, **sizes)).save_pretrained(tmp_path)
    said = [_said("short"), _said("a longer one than that")]
    alone = [_values(ModelReward(path=str(tmp_path)), one)[0] for one in said]
    assert _values(ModelReward(path=str(tmp_path)), *said) == pytest.approx(alone, rel=1e-4)


def test_positions_of_a_reward_model_are_counted_as_it_counts_them(tmp_path: Path) -> None:
    """RoBERTa begins behind its padding token: two fewer than its configuration says."""
    copy_tokenizer(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RobertaConfig(vocab_size=2048, num_labels=1, pad_token_id=1, max_position_embeddings=20, **sizes)
    RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, trust_remote_code=False)
    texts = {len(tokenizer("ask " + "x " * number).input_ids): "x " * number for number in range(30)}
    assert _values(ModelReward(path=str(tmp_path)), _said(texts[18]))
    with pytest.raises(UserError, match="the reward model has 18 positions, and this text 19 tokens"):
        _values(ModelReward(path=str(tmp_path)), _said(texts[19]))


def test_a_reward_model_without_its_head_or_with_pickles_is_refused(judge: Path, tmp_path: Path) -> None:
    LlamaForSequenceClassification.from_pretrained(judge).model.save_pretrained(tmp_path)
    config = json.loads((judge / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    copy_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"it lacks score\.weight, which would be random"):
        Rewards([ModelReward(path=str(tmp_path))])
    torch.save(load_file(judge / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="it cannot be loaded"):
        Rewards([ModelReward(path=str(tmp_path))])


@pytest.mark.sandbox
def test_the_sum_is_weighted(judge: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def two(completion): return 2\n")
    alone = _values(ModelReward(path=str(judge)), _said("7"))[0]
    rewards = Rewards(
        [
            RegexReward(pattern="7", weight=0.5),
            JsonSchemaReward(schema={}, weight=-4.0),
            MatchReward(weight=8.0),
            UnitTestsReward(weight=16.0, memory_mb=512),
            FunctionReward(name=f"{tmp_path / 'own.py'}:two", weight=16.0),
            ModelReward(path=str(judge), weight=-64.0),
            RegexReward(pattern="8", weight=128.0),
        ]
    )
    (scored,) = rewards([_said("7", answer="7", tests="assert 1")])
    assert scored.total == pytest.approx(0.5 - 4 + 8 + 16 + 32 - 64 * alone)
    assert [*scored.parts.values()] == [1, 1, 1, 1, 2, alone, 0]
    assert [*scored.parts][-1] == "regex 7"


def test_an_adapter_of_the_objective_reward_is_a_reward_with_the_tokens_of_its_training(tmp_path: Path) -> None:
    """A head that a run has trained, on the frozen base: what is scored is what evaluation scores."""
    base, pairs = tmp_path / "base", tmp_path / "pairs.jsonl"
    tiny = Path(__file__).parents[2] / "examples" / "tiny_base"
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).save_pretrained(base)
    copy_tokenizer(base)
    pairs.write_text(json.dumps({"prompt": "ask ", "chosen": "7 of them", "rejected": "no"}) + "\n")
    objective = RewardObjective(center=0.1)
    lora = lora_config({"r": 2, "target_modules": "all-linear", "init_lora_weights": False}, "test")
    blueprint = make_blueprint(base, Topology(), BaseOptions(), objective).with_adapter(lora)
    model = load_blueprint(blueprint, device="cpu", seed=3).eval()
    tokenizer = load_tokenizer(base, trust_remote_code=False)
    set_padding(model, padding_token_id(tokenizer))
    save_adapter(model, tmp_path / "run" / "adapter")
    tokenizer.save_pretrained(tmp_path / "run" / "adapter")
    rows = read_margins(str(pairs), tokenizer, max_length=64)
    batch = collate([*rows], pad_token_id=padding_token_id(tokenizer), num_targets=1)
    with torch.no_grad():
        expected = outputs_of(model, batch)[:, 0].tolist()
    for folder in (tmp_path / "run", tmp_path / "run" / "adapter"):
        found = _values(ModelReward(path=str(folder)), _said("7 of them"), _said("no"))
        assert found == pytest.approx(expected, rel=1e-4)
    assert abs(expected[0] - expected[1]) > 1e-3, "a score that says nothing of the answer shows nothing"
