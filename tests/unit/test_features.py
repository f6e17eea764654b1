"""The table of what goes with what: two or three features together are refused in its words, or make a run."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlora.plan import pairs
from meshlora.plan.features import Feature, features_of
from meshlora.plan.pairs import AXES, PROVED, REFUSED, check, proof_of, refusal
from meshlora.run import together
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.versions import name_of, own_files
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from tests.changed import is_there
from tests.for_each import for_each
from tests.run_files import EXAMPLES, copy_tokenizer, write_run_file

F = Feature
DATA = EXAMPLES / "docstrings"


@dataclass(frozen=True)
class Recipe:
    """How a run file asks for some features. changes: `group__key` of it. axes: of its topology."""

    features: frozenset[Feature]
    changes: Mapping[str, Any] = field(default_factory=dict)
    axes: str = ""


def _recipe(*features: Feature, axes: str = "", **changes: Any) -> Recipe:
    return Recipe(frozenset(features), changes, axes)


def _objective(file: str, *features: Feature, **objective: Any) -> Recipe:
    only = {F.NO_ROLLOUTS} - {*features} if objective["kind"] not in ("policy", "grpo") else set()
    every = {F.COMPARED, *features, *only} | ({F.NO_RL} if objective["kind"] != "grpo" else set())
    return Recipe(frozenset(every), {"train__objective": objective, "data__train": str(DATA / file)})


RECIPES: dict[str, Recipe] = {
    "dp": _recipe(F.DP, axes="dp=2"),
    "pp": _recipe(F.STAGES, axes="pp=2"),
    "interleave": _recipe(F.STAGES, F.INTERLEAVE, axes="pp=2,interleave=2"),
    "cp": _recipe(F.CONTEXT, axes="cp=2"),
    "ring": _recipe(F.CONTEXT, F.RING, axes="cp=2,ring"),
    "sp": _recipe(F.TENSOR, F.SEQUENCE, axes="tp=2,sp"),
    "dp_shard": _recipe(F.DP, F.SHARDED, axes="dp=2,dp_shard"),
    "experts": _recipe(F.EXPERTS, model__path="moe"),
    "float64": _recipe(F.FLOAT64, model__dtype="float64"),
    "mxfp4": _recipe(F.QUANTIZED, model__quantization="mxfp4"),
    "pissa": _recipe(F.WHOLE_MATRIX, F.NAMED_INIT, lora__init_lora_weights="pissa"),
    "orthogonal": _recipe(F.OF_LINEARS, F.NAMED_INIT, lora__init_lora_weights="orthogonal"),
    "eva": _recipe(F.EVA, F.OF_LINEARS, F.NAMED_INIT, lora__init_lora_weights="eva"),
    "gaussian": _recipe(F.NAMED_INIT, lora__init_lora_weights="gaussian"),
    "dora": _recipe(F.DORA, lora__use_dora=True),
    "lora_bias": _recipe(F.LORA_BIAS, lora__lora_bias=True),
    "lora_dropout": _recipe(F.LORA_DROPOUT, lora__lora_dropout=0.1),
    "norms": _recipe(F.SAVED, F.COPIES, lora__modules_to_save=["norm"]),
    "rows": _recipe(F.ROWS, F.TRAINED_TIED, lora__trainable_token_indices=[3, 5]),
    "invoked": _recipe(F.INVOKED, lora__alora_invocation_tokens=[3, 5]),
    "embedding": _recipe(F.ON_EMBEDDING, lora__target_modules=["q_proj", "embed_tokens"]),
    "dpo": _objective("pairs.jsonl", F.PAIRS, F.BASE, kind="dpo"),
    "orpo": _objective("pairs.jsonl", F.PAIRS, kind="orpo"),
    "kto": _objective("feedback.jsonl", F.RECORDS, F.BASE, kind="kto"),
    "policy": _objective("rollouts.jsonl", F.NOTHING_ALONE, kind="policy"),
    "sequences": _objective("rollouts.jsonl", F.NOTHING_ALONE, F.SEQUENCES, kind="policy", ratio="sequence"),
    "classify": _objective(
        "labelled.jsonl",
        F.NOTHING_ALONE,
        F.RECORDS,
        F.OTHER_HEAD,
        F.OF_LABELS,
        kind="classify",
        labels=["none", "one", "more"],
    ),
    "reward": _objective("pairs.jsonl", F.PAIRS, F.OTHER_HEAD, kind="reward"),
    "rl": Recipe(
        frozenset({F.COMPARED, F.NOTHING_ALONE, F.OF_ROLLOUTS, F.RL, F.MADE}),
        {
            "train__objective": {"kind": "grpo"},
            "rl__rewards": [{"kind": "regex", "pattern": "a"}],
            "rl__completions": 2,
            "rl__max_new_tokens": 8,
        },
    ),
    "packing": _recipe(F.PACKING, data__packing=True),
    "separator": _recipe(F.SEPARATOR, data__separator="<|eos|>"),
    "bad rows": _recipe(F.SKIPPED_BAD, data__on_bad_row="skip"),
    "split": _recipe(F.TOO_LONG, F.SPLIT, data__too_long="split"),
    "drop": _recipe(F.TOO_LONG, data__too_long="drop"),
    "train_on": _recipe(F.TRAIN_ON, data__train_on="last"),
    "held out": _recipe(F.HELD_OUT, data__eval=str(DATA / "eval.jsonl")),
    "apart": _recipe(F.APART, data__turns="apart"),
    "streaming": _recipe(F.STREAMING, data__streaming=True),
    "followed": _recipe(F.FOLLOWED, data__follow_s=3.0),
    "8 bits": _recipe(F.EIGHT_BIT, train__optimizer="adamw_8bit"),
    "lora_fa": _recipe(F.LORA_FA, train__optimizer="lora_fa"),
    "lora_plus": _recipe(F.LORA_PLUS, train__lora_plus_ratio=4.0),
    "noise": _recipe(F.NOISE, train__neftune_alpha=5.0),
    "record": _recipe(F.RECORD, train__routing_record="record"),
    "recompute": _recipe(F.RECOMPUTED, train__recompute="full"),
    "kept attention": _recipe(F.RECOMPUTED, F.KEPT_ATTENTION, train__recompute="keep_attention"),
    "offload": _recipe(F.RECOMPUTED, F.OFFLOADED, train__recompute="offload"),
    "epochs": _recipe(F.EPOCHS, train__epochs=1.0, train__steps=None),
    "answers": _recipe(F.METRICS, F.HELD_OUT, generate__metrics=["exact_match"], data__eval=str(DATA / "eval.jsonl")),
    "samples": _recipe(F.SAMPLES, train__sample_every=2, data__sample_prompts=["def a():"]),
}
# A module has one of the two, by whichever option.
_OF_ONE_MODULE = ({"rows", "embedding"},)
# A record needs experts, a stream another folder, an objective its own rows: not beside what is of text alone.
_NEEDS = {"record": {"experts"}, "rl": set[str](), "followed": {"policy", "sequences"}, "separator": set[str]()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a base that has routed experts."""
    found = tmp_path_factory.mktemp("features")
    write_twin(
        twin_config("mixtral", vocab_size=2048, tie_word_embeddings=True), found / "moe", dtype=torch.float32, seed=0
    )
    copy_tokenizer(found / "moe")
    return found


def _file(folder: Path, recipes: list[Recipe]) -> Path | None:
    """A run file that asks for all of them; None: two say the same key, or axes that are no topology."""
    tree: dict[str, Any] = {"data__train": str(DATA / "eval.jsonl"), "lora__r": 4, "lora__target_modules": ["q_proj"]}
    own: dict[str, Any] = {}
    for recipe in recipes:
        if any(key in own and own[key] != value for key, value in recipe.changes.items()):
            return None
        own |= recipe.changes
    if "data__eval" in own:  # rows of the objective
        own["data__eval"] = (tree | own)["data__train"]
    groups: dict[str, dict[str, Any]] = {}
    for key, value in (tree | own).items():
        group, _, name = key.partition("__")
        groups.setdefault(group, {})[name] = str(folder / value) if value in ("moe", "record") else value
    axes = ",".join(dict.fromkeys(part for recipe in recipes for part in recipe.axes.split(",") if part))
    return write_run_file(folder / "run.yaml", **groups, **({"topology": axes} if axes else {}))


def _features(recipes: list[Recipe]) -> frozenset[Feature]:
    found = frozenset[Feature]().union(*(recipe.features for recipe in recipes))
    return found if F.COMPARED in found else found | {F.NO_RL, F.NO_ROLLOUTS}


def _rules(has: frozenset[Feature]) -> set[str]:
    """Why the table refuses these together."""
    return {row.because for row in REFUSED if all(side & has for side in row.sides)}


def _read_nothing(*_: object, **__: object) -> None:
    raise AssertionError("data were read for what is refused")


@given(names=st.lists(st.sampled_from([*RECIPES]), min_size=2, max_size=3, unique=True))
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
def _draw(folder: Path, names: list[str]) -> None:
    _together(folder, names)


def _together(folder: Path, names: list[str]) -> None:
    if any(both <= {*names} for both in _OF_ONE_MODULE):
        return
    recipes = [RECIPES[name] for name in names]
    has, file = _features(recipes), _file(folder, recipes)
    if file is None:
        return
    if rules := _rules(has):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(together, "read_data", _read_nothing)
            with pytest.raises(UnsupportedError) as raised:
                prepare_run(read_run(file))
        assert raised.value.rule in rules, (names, raised.value)
        assert raised.value.way_out, (names, raised.value)
    elif all(_NEEDS.get(name, {name}) & {*names} for name in names):
        asked = prepare_run(read_run(file)).asked
        assert has - {F.TRAINED_TIED} <= {*features_of(asked)}, names


def test_features_together_are_refused_in_words_or_make_a_run(folder: Path) -> None:
    _draw(folder)


def test_every_two_that_the_table_refuses_are_refused(folder: Path) -> None:
    number = 0
    for names in itertools.combinations(RECIPES, 2):
        if _rules(_features([RECIPES[name] for name in names])):
            number += 1
            _together(folder, [*names])
    assert number > 100


@pytest.mark.long
@for_each("name", {name: name for name in RECIPES})
def test_each_feature_alone_makes_a_run(name: str, folder: Path) -> None:
    needed = sorted(_NEEDS.get(name, set()))[:1]
    _together(folder, [name, *needed])


def test_two_features_are_refused_by_a_row_or_shown_by_a_test_that_is_there(pytestconfig: pytest.Config) -> None:
    two_sides = [row.sides for row in REFUSED if len(row.sides) == 2]
    refused = {frozenset(pair) for sides in two_sides for pair in itertools.product(*sides)}
    unknown = [
        pair for pair in itertools.combinations(F, 2) if frozenset(pair) not in refused and proof_of(*pair) is None
    ]
    assert not unknown
    assert all(is_there(row.by, pytestconfig) for row in PROVED)
    assert all(row.because for row in REFUSED)
    for side in itertools.chain.from_iterable(row.sides for row in REFUSED):
        assert side, "a row with an empty side refuses nothing"


def test_pair_in_no_row_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"train.neftune_alpha": 5.0, "train.lora_plus_ratio": 4.0}
    check(asked)
    monkeypatch.setattr(pairs, "PROVED", tuple(row for row in PROVED if row.one == AXES))
    pairs.proof_of.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=r"lora_plus_ratio with train.neftune_alpha=5: nobody has said"):
            check(asked)
    finally:
        monkeypatch.undo()
        pairs.proof_of.cache_clear()


def test_message_has_the_words_of_who_asks() -> None:
    asked = {"train.optimizer": "adamw_8bit", "adapters": 2}
    assert str(refusal(asked)).startswith("train.optimizer=adamw_8bit with 2 adapters: it is not proved")
    kept = {"train.recompute": "keep_attention", "door": "meshlora plan"}
    assert re.match(
        "meshlora plan with train.recompute=keep_attention: its memory is not planned; plan full", str(refusal(kept))
    )
    assert str(refusal({**asked, "door": "meshlora verify"})).startswith("--optimizer adamw_8bit with 2 adapters")
    recorded = {"train.objective": Distill(teacher="itself"), "train.cuda_graphs": "on"}  # a CPU would refuse it first
    assert "it is not proved in a record" in str(refusal(recorded))


_NUMBERS = "two numbers, of which one bounds the other"
_FLAGS = "arguments of one command that name one thing"
_OF_MODEL = "what a model itself lacks, or divides badly, on a topology"
_OF_RECORD = "what a record or a batch holds"
_SHOWN = "what a twin or the ranks have shown"
# Messages that name two things and are no refusal of two features: file and function -> why.
ALLOWED = {
    "meshlora_extra/commands/from_nlg.py:_in_steps": _NUMBERS,
    "meshlora_extra/chat/prompts.py:_of_line": _FLAGS,
    "meshlora_extra/commands/chat.py:_check": _FLAGS,
    "meshlora_extra/commands/generate.py:_questions": _FLAGS,
    "meshlora_extra/commands/plan.py:_check_asked": _FLAGS,
    "meshlora_extra/commands/plan.py:_fit_on_one": _FLAGS,
    "meshlora_extra/commands/launch_script.py:_check_options": _FLAGS,
    "meshlora_extra/commands/launch_script.py:_check_time": _NUMBERS,
    "cli/train.py:_check_sharing": _FLAGS,
    "run/config/run_file.py:_check_rl": _NUMBERS,
    "reading/answers_apart.py:check": _OF_RECORD,
    "reading/streamed.py:read_streamed": _OF_RECORD,
    "meshlora_extra/hf/rows.py:__call__": _OF_RECORD,
    "meshlora_extra/hf/summed.py:_try": _SHOWN,
    "meshlora_extra/hf/trainer.py:compute_loss": _OF_RECORD,
    "wings/generation/continuous.py:_check": _OF_MODEL,
    "loading/guards.py:_check_caller": "a wrapper of another library",
    "wings/context/mixing.py:_check": _OF_MODEL,
    "wings/context/mixing.py:with_mixers": _OF_MODEL,
    "feature.py:check_proved": _OF_MODEL,
    "plan/families/refused.py:check_family": _OF_MODEL,
    "wings/proved/families.py:check_proved_here": _OF_MODEL,
    "wings/quantized/kinds.py:_check_blocks": _OF_MODEL,
    "wings/quantized/kinds.py:_check_cuts": _OF_MODEL,
    "wings/stages/cut.py:idle": _NUMBERS,
    "wings/stages/cut.py:with_choices": _OF_MODEL,
    "meshlora_extra/planner/trace.py:trace": _OF_MODEL,
    "verify/preflight.py:_of_all": _SHOWN,
    "verify/request.py:_check": _NUMBERS,
    "verify/request.py:_config": _FLAGS,
    "verify/stand_in.py:check": _SHOWN,
}
_NAMES_TWO = re.compile(
    r" with (data|train|rl|model|generate)\.| with --| with (use_dora|init_|lora_)| with images"
    r"| on \{[\w.]*topology\}| (and|for) dp="
)


def test_no_other_place_refuses_two_features() -> None:
    """A refusal of two features is an error whose `given` names two: options, or one and a topology. An option that
    has no effect without another one is none."""
    found = {place for place, words in _refusals() if _NAMES_TWO.search(words)}
    assert found - ALLOWED.keys() == set(), "ask meshlora.plan.pairs.check"
    assert ALLOWED.keys() - found == set(), "take these out of ALLOWED"


def _refusals() -> Iterator[tuple[str, str]]:
    """(file and function, source of `given`) of every error of a user, names filled in from their assignments."""
    for file in own_files():
        if file.name == "pairs.py":
            continue
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                for given, rule in _errors_of(function):
                    if "no effect" not in rule:
                        yield f"{name_of(file)}:{function.name}", given


def _errors_of(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    named: dict[str, list[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Tuple):
            target, is_many = node.targets[0], isinstance(node.value, ast.Tuple)
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = node.value.elts if isinstance(node.value, ast.Tuple) and is_many else [node.value] * len(names)
            for name, value in zip(names, values, strict=False):
                named.setdefault(ast.unparse(name), []).append(ast.unparse(value))
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("UserError", "UnsupportedError") and node.args:
            given, *rest = (ast.unparse(part) for part in node.args)
            yield " ".join([given, *named.get(given, [])]), " ".join(rest)


def test_two_adapters_are_several_and_one_is_not() -> None:
    assert [F.ADAPTERS in features_of({"adapters": number}) for number in (1, 2)] == [False, True]
