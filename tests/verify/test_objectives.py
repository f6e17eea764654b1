"""Each objective on meshes is what one process makes of it, in float64; and a run file with it trains."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from meshlora.cli.main import main
from meshlora.reading.mixture import joined_sources
from meshlora.reading.preferences import read_feedback, read_preferences
from meshlora.reading.readers import READERS
from meshlora.reading.rollouts import read_rollouts
from meshlora.run.advantages import with_advantages, without_truncated
from meshlora.run.config.run_file import TrainConfig
from meshlora.train.collation import collate
from meshlora.verify import command
from meshlora.verify.faults.of_objectives import PROVED, as_proved
from meshlora.verify.options import DROPOUT, Request
from meshlora.verify.proof import Outcome, Processes, Proof, run_proof
from meshlora.verify.request import prepare_proof
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.objectives.policies import Grpo, Policy
from meshlora_ground.objectives.preferences import Dpo, Kto, PairLoss
from meshlora_judge.batches import micro_batches
from meshlora_judge.objectives import losses
from meshlora_judge.trace import Trace
from tests.conftest import Prove
from tests.for_each import for_each

TINY = Path(__file__).parents[2] / "examples" / "tiny_base"
TOPOLOGIES = ("tp=2,sp", "dp=2", "dp=2,tp=2", "dp=2,tp=2,sp")
# The kill table proves the others, on one axis each; so do the tests below, test_packing.py, test_several_adapters.py.
_ONCE = {"sft": "dp=2,tp=2,sp"}


@pytest.mark.parametrize(
    ("objective", "topologies"),
    [
        *(pytest.param(kind, (topology,), id=kind) for kind, topology in _ONCE.items()),
        *(pytest.param(kind, TOPOLOGIES, id=f"{kind} on each", marks=pytest.mark.proof) for kind in PROVED),
    ],
)
def test_objective_is_that_of_one_process_on_every_mesh(
    objective: str, topologies: tuple[str, ...], processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one case each, that of `meshlora verify --objective`: all at once that makes the parts of a step interact."""
    seen: list[tuple[Proof, list[Outcome]]] = []

    def run(proof: Proof, _: object, **__: object) -> list[Outcome]:
        proof = dataclasses.replace(proof, request=dataclasses.replace(proof.request, cache_dir=tmp_path))
        seen.append((proof, list(run_proof(proof, processes))))
        return seen[0][1]

    monkeypatch.setattr(command, "run_proof", run)
    words = [word for topology in topologies for word in ("--topology", topology)]
    assert main(["verify", "--family", "qwen3", "--objective", objective, *words]) == 0
    ((proof, outcomes),) = seen
    assert [str(o.topology) for o in outcomes] == list(topologies)
    assert all(o.passed for o in outcomes), [(o.topology, o.divergence, o.error) for o in outcomes]
    _check_case(proof, objective)


@pytest.mark.parametrize(
    ("objective", "topology"),
    [
        ("orpo", ""),
        pytest.param("kto", "tp=2,sp", marks=pytest.mark.proof),
        pytest.param("simpo", "cp=2", marks=pytest.mark.proof),
        pytest.param("dpo", "pp=2", marks=pytest.mark.proof),
        pytest.param("aot", "dp=2,ep=2", marks=pytest.mark.proof),
    ],
)
def test_load_balancing_weighs_as_the_mean_over_pairs_or_records_does(
    objective: str, topology: str, prove: Prove
) -> None:
    """Not as one over their tokens: a step's sum is divided by what its objective counts."""
    for outcome in prove(family="qwen3_moe", objective=as_proved(objective), topologies=(topology,), steps=1):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.parametrize(("kind", "bias"), [("kto", "lora_only"), pytest.param("dpo", "all", marks=pytest.mark.proof)])
def test_base_that_is_compared_with_has_the_biases_of_the_checkpoint(kind: str, bias: str, prove: Prove) -> None:
    """Which PEFT trains in place, and leaves as trained in `disable_adapter`."""
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "bias": bias}
    objective = PROVED[kind]
    assert isinstance(objective, Dpo | Kto)
    given = {"objective": dataclasses.replace(objective, reference="base"), "lora": lora, "steps": 2}
    for outcome in prove(family="qwen2", topologies=("tp=2",), **given):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "topologies"),
    [
        ("bert", ("dp=2",)),
        *(
            pytest.param(family, ("dp=2", "dp=2,dp_shard"), marks=pytest.mark.proof)
            for family in ("deberta-v2", "modernbert", "xlm-roberta")
        ),
    ],
)
def test_encoders_train_heads_with_dropout_before_and_after_pooling(
    family: str, topologies: tuple[str, ...], prove: Prove
) -> None:
    outcomes = prove(
        family=family, topologies=topologies, objective=PROVED["classify"], default_dropout=DROPOUT, steps=1
    )
    assert [(o.passed, o.divergence, o.error) for o in outcomes] == [(True, None, "")] * len(topologies)


def _check_case(proof: Proof, objective: str) -> None:
    """Unequal token counts, accumulation with a remainder, dropout, smoothing; clipping in every step."""
    case = proof.case
    assert case.lora["lora_dropout"] == DROPOUT
    assert case.objective == PROVED[objective]
    data, pairs = case.data, case.rows_per_example
    assert len({int(sequence.is_trained[1:].sum()) for sequence in data}) > 3
    for dp in (1, 2):
        assert case.batch_size % (dp * case.micro_batch_size) > 0
        assert case.batch_size > dp * case.micro_batch_size
    assert len(data) // pairs % case.batch_size, "the last batch of an epoch is a short one"
    reference = Trace.load(proof.request.cache_dir / proof.key / "reference.safetensors")
    assert min(reference.grad_norms) > case.max_grad_norm


@pytest.mark.long
def test_layers_that_are_computed_twice_have_the_masks_of_the_first_time(prove: Prove) -> None:
    options = {"default_dropout": DROPOUT, "recompute": True}
    (outcome,) = prove(family="qwen3", objective=PROVED["dpo"], topologies=("tp=2,sp",), steps=1, **options)
    assert outcome.passed, (outcome.divergence, outcome.error)


@pytest.mark.proof
@pytest.mark.parametrize(
    "objective",
    ["dpo", "orpo", "kto", "policy", "reward", "distill", "distill_recorded", "classify", "classify_tokens", "embed"],
)
def test_rows_that_are_compared_are_whole_on_cut_sequences(objective: str, prove: Prove) -> None:
    """What is made of a row's tokens needs all of them on each cp rank."""
    for outcome in prove(family="llama", objective=PROVED[objective], topologies=("cp=3", "dp=2,cp=2"), steps=1):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("objective", "micro_batch_size", "topologies", "steps"),
    [
        ("kto", 1, ("dp=2",), 2),
        ("orpo", 5, ("tp=2,sp",), 1),
        ("cispo", 1, ("dp=2",), 2),  # of the entropies of a whole step
        *(
            pytest.param(objective, size, ("tp=2,sp", "dp=2"), 3, marks=pytest.mark.proof)
            for objective in ("orpo", "kto")
            for size in (1, 5)
        ),
    ],
)
def test_neither_mesh_nor_micro_batches_change_what_is_compared(
    objective: str, micro_batch_size: int, topologies: tuple[str, ...], steps: int, prove: Prove
) -> None:
    """Of llama the divergence from the base is above 0, so that it counts; resumed, too."""
    options = {"micro_batch_size": micro_batch_size, "resume": micro_batch_size == 1, "steps": steps}
    outcomes = prove(family="llama", objective=PROVED[objective], topologies=topologies, **options)
    assert all(o.passed for o in outcomes), [(o.topology, o.divergence, o.error) for o in outcomes]


@pytest.mark.proof
@pytest.mark.parametrize("packing", [False, True])
def test_experts_that_rollouts_say_are_those_of_tokens_on_every_mesh(packing: bool, prove: Prove) -> None:
    """With load balancing and the base, which chooses by itself; on tp=2,sp,ep=2 the kill table has it."""
    topologies = ("dp=2,ep=2", "dp=2", "tp=2", "tp=2,sp,etp=2", *(() if packing else ("cp=2", "dp=2,cp=2,ep=2")))
    options = {"packing": packing, "routed": True, "recompute": not packing}
    outcomes = prove(family="qwen3_moe", objective=PROVED["grpo"], topologies=topologies, steps=2, **options)
    assert all(o.passed for o in outcomes), [(o.topology, o.divergence, o.error) for o in outcomes]


def test_lora_on_the_head_is_off_in_the_base(prove: Prove) -> None:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head", "down_proj"]}
    (outcome,) = prove(family="qwen3", objective=PROVED["policy"], topologies=("tp=2,sp",), lora=lora, steps=1)
    assert outcome.passed, (outcome.divergence, outcome.error)


def test_the_case_has_what_its_loss_distinguishes() -> None:
    proof = prepare_proof(Request(family="qwen3", topologies=("dp=2",), objective=PROVED["policy"]))
    columns = proof.case.columns
    assert min(columns["advantage"]) < 0 < max(columns["advantage"])
    ratios = np.exp(-np.log(proof.config.vocab_size) - np.array(columns["old_log_prob"]))
    assert 0.1 < (abs(ratios - 1) > 0.2).mean() < 0.9, "some are clipped and some are not"
    pairs = prepare_proof(Request(family="qwen3", topologies=("dp=2",), objective=PROVED["dpo"])).case.data
    assert pairs.num_examples * 2 == len(pairs)
    lengths = np.diff(pairs.offsets)
    assert (lengths[0::2] != lengths[1::2]).any()


def test_low_precision_of_experts_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="frozen base routes by itself"):
        prepare_proof(Request(family="qwen3_moe", topologies=("ep=2",), objective=PROVED["dpo"], dtype="float32"))


def test_unknown_objective_is_refused() -> None:
    for name, words in {
        "polcy": "did you mean 'policy'",
        "hinje": "did you mean 'hinge'",
        "nonsense": "known: aot",
    }.items():
        with pytest.raises(UserError, match=words):
            as_proved(name)


def test_name_of_a_loss_is_the_kind_that_has_it() -> None:
    for name in get_args(PairLoss):
        if name != "sft":
            found = as_proved(name)
            assert isinstance(found, Dpo)
            assert found.losses == {name: 1.0}
    assert [as_proved(name).kind for name in ("simpo", "dft", "sapo", "apo_zero_unpaired")] == [
        "simpo",
        "sft",
        "grpo",
        "kto",
    ]


# --- the judge's own losses, against numbers worked out by hand


def test_losses_of_the_judge_are_those_of_the_papers() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]], dtype=torch.float64))
    data = dataclasses.replace(
        next(iter(micro_batches(_rollout(), [0], TrainConfig("unused", steps=1), pad_token_id=0))),
        labels=torch.tensor([[0, 2]]),
        columns={
            "advantage": torch.tensor([[1.0, -2.0]]),
            "old_log_prob": torch.log(torch.tensor([[0.25, 0.5]])),
            "weight": torch.tensor([[1.0, 3.0]]),
            "engine_log_prob": torch.full((1, 2), torch.nan),
        },
    )
    # Ratios 2 and 1: the first is clipped to 1.2, the second counts as it is.
    found = losses(Policy(), logits, data, None, is_training=True).sum()
    assert float(found) == pytest.approx(-1.2 * 1.0 + 3 * 2.0)
    base = torch.log(torch.tensor([[[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]]], dtype=torch.float64))
    with_kl = losses(Policy(kl_coef=0.5), logits, data, base, is_training=True).sum()
    assert float(with_kl - found) == pytest.approx(0.5 * (0.5 - 1 - np.log(0.5)), rel=1e-5)


def _rollout():  # type: ignore[no-untyped-def]
    return prepare_proof(Request(family="qwen3", topologies=("dp=2",), objective=PROVED["policy"])).case.data


# --- records


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    return AutoTokenizer.from_pretrained(TINY, local_files_only=True)


def _write(folder: Path, *rows: object) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_advantages_stand_at_their_tokens(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    file = _write(
        tmp_path,
        {"input_ids": [5, 6, 7, 8], "is_trained": [0, 0, 1, 1], "advantages": [1.5, -2], "old_log_probs": [-1, -2]},
        {"input_ids": [5, 6, 7], "is_trained": [0, 1, 1], "advantage": 3, "weights": [0, 0.5, 2]},
        {"prompt": "a", "completion": " b", "advantage": -1.0},
    )
    data = read_rollouts(file, tokenizer, max_length=16, vocab_size=512)
    assert data[0].columns["advantage"].tolist() == [0, 0, 1.5, -2]
    assert data[1].columns["weight"].tolist() == [0, 0.5, 2]
    assert np.isnan(data[1].columns["old_log_prob"]).tolist() == [False, True, True]
    assert set(data[2].columns["advantage"][data[2].is_trained].tolist()) == {-1.0}
    batch = collate([data[0], data[1]], pad_token_id=0, columns=tuple(data.columns))
    assert batch.columns["advantage"].tolist() == [[0, 1.5, -2, 0], [3, 3, 0, 0]], "shifted as the labels are"


# By the reader of an objective: a row that it takes, and others with what is said of them.
_RECORDS: dict[str, tuple[dict[str, object], list[tuple[dict[str, object], str]]]] = {
    "rollouts": (
        {"prompt": "a", "completion": " b", "advantage": 1},
        [
            ({"input_ids": [5, 6], "is_trained": [0, 1]}, "has neither advantage nor advantages"),
            ({"input_ids": [5, 6], "is_trained": [0, 1], "advantage": 1, "advantages": [1]}, "one of the two"),
            (
                {"input_ids": [5, 6, 7], "is_trained": [0, 1, 1], "advantages": [1]},
                "has 1 numbers for 2 trained tokens",
            ),
            ({"input_ids": [5, 9999], "is_trained": [0, 1], "advantage": 1}, "outside the vocabulary of 512"),
            ({"input_ids": [5, 6], "is_trained": [0, 2], "advantage": 1}, "a 0 or 1"),
            ({"input_ids": [5, 6], "is_trained": [1, 0], "advantage": 1}, "no trained token"),
            ({"input_ids": [5, 6], "is_trained": [0, 1], "advantage": float("nan")}, "not a finite number"),
            ({"input_ids": [5, 6], "is_trained": [0, 1], "advantage": "1"}, "not a finite number"),
            ({"input_ids": [5, 6], "is_trained": [0, 1], "advantage": 1, "text": "x"}, "one of the two"),
            ({"prompt": "a", "completion": "b", "advantage": 1, "routed_experts": [[[1]]]}, "give input_ids"),
            *(
                ({"input_ids": [5, 6], "is_trained": [0, 1], "advantage": 1, "routed_experts": experts}, words)
                for experts, words in (
                    ([[1, 2]], "no list .tokens..layers..k. of whole numbers"),
                    ([[[1, 2]], [[1]]], "no list"),
                    ([[[1.5]]], "no list"),
                    ([[[True]]], "no list"),
                    ([[[1]]] * 3, "has 3 tokens, input_ids 2"),
                    ([[[40000]]], "no number of an expert"),
                    ([[[-1]]], "no number of an expert"),
                )
            ),
            ({"prompt": "a", "completion": "b", "advantage": 1, "old_logprobs": [1]}, "did you mean 'old_log_probs'"),
        ],
    ),
    "rewarded": (
        {"prompt": "a", "completion": " b", "reward": 1, "group": "a"},
        [
            ({"prompt": "a", "completion": " b", "group": "a"}, "has no reward"),
            ({"prompt": "a", "completion": " b", "group": "a", "reward": "1"}, "reward is not a finite number"),
            ({"prompt": "a", "completion": " b", "group": 1.5, "reward": 1}, "group is a number"),
            ({"prompt": "a", "completion": " b", "group": "a", "reward": 1, "advantage": 2}, "'advantage' may say"),
            (
                {"input_ids": [5, 6], "is_trained": [0, 1], "group": 1, "reward": 1, "engine_log_probs": [-1, -2, -3]},
                "engine_log_probs has 3 numbers for 1 trained tokens",
            ),
        ],
    ),
    "feedback": (
        {"prompt": "a", "completion": " b", "label": True},
        [
            ({"prompt": "a", "completion": "b"}, "'label' is missing"),
            ({"prompt": "a", "completion": "b", "label": 1}, "label is a number"),
            ({"prompt": "a", "completion": "b", "label": True, "weight": 1}, "'weight' may say something about"),
            ({"completion": [{"role": "assistant", "content": "b"}], "label": True}, "'prompt' is missing"),
        ],
    ),
    "pairs": (
        {"prompt": "a", "chosen": " b", "rejected": " c"},
        [
            ({"prompt": "a", "chosen": "b"}, "'rejected' is missing"),
            ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
            (
                {"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"},
                "chosen has no assistant turn",
            ),
            ({"prompt": "a", "chosen": "b", "rejected": "c", "weight": 1}, "'weight' may say something about"),
        ],
    ),
}


@for_each(("reader", "row", "words"), [(reader, *each) for reader, (_, rows) in _RECORDS.items() for each in rows])
def test_record_that_cannot_be_used_is_named_by_line(
    reader: str,
    row: dict[str, object],
    words: str,
    tmp_path: Path,
    tokenizer,  # type: ignore[no-untyped-def]
) -> None:
    file = _write(tmp_path, _RECORDS[reader][0], row)
    with pytest.raises(UserError, match=words) as error:
        READERS[reader](file, tokenizer, max_length=16, vocab_size=512)
    assert "rows.jsonl:2" in str(error.value)


def test_group_is_what_the_record_says_or_its_prompt(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    ids = [[5, 6, 7], [5, 8, 9], [5, 6, 8], [5, 6, 9]]
    rows = [{"input_ids": each, "is_trained": [0, 0, 1], "reward": n} for n, each in enumerate(ids)]
    data = READERS["rewarded"](_write(tmp_path, *rows), tokenizer, max_length=16, vocab_size=512)
    assert data.targets is not None
    assert data.targets.tolist() == [[0, 0], [1, 0], [2, 2], [3, 3]], "three of them begin alike"
    named = [row | {"group": group} for row, group in zip(rows, ("a", 1, 1, "a"), strict=True)]
    data = READERS["rewarded"](_write(tmp_path, *named), tokenizer, max_length=16, vocab_size=512)
    assert data.targets is not None
    assert data.targets.tolist() == [[0, 0], [1, 0], [2, 1], [3, 3]]
    for wrong, words in ((rows[:2], "each has one rollout"), ([rows[0], named[1]], "some rollouts have a group")):
        with pytest.raises(UserError, match=words):
            READERS["rewarded"](_write(tmp_path, *wrong), tokenizer, max_length=16, vocab_size=512)


def test_truncated_rollouts_are_compared_and_train_nothing(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    rows = [
        {"input_ids": [5, 6, 7 + n], "is_trained": [0, 1, 1], "reward": n, "truncated": n == 1, "group": 0}
        for n in range(3)
    ]
    options: dict[str, Any] = {"max_length": 16, "vocab_size": 512}
    raw = READERS["rewarded"](_write(tmp_path, *rows), tokenizer, **options, masks_truncated=True)
    found = with_advantages(Grpo(scale_rewards="none"), raw)
    assert found.is_trained.tolist() == [False, True, True] + [False] * 3 + [False, True, True]
    assert found.columns["advantage"].tolist()[::3] == [-1.0, 0.0, 1.0], "the group's mean is of all three"
    assert with_advantages(Grpo(), found) is found
    every = [row | {"truncated": True} for row in rows]  # a mean over no token is not defined: a loss of 0 is
    found = without_truncated(READERS["rewarded"](_write(tmp_path, *every), tokenizer, **options, masks_truncated=True))
    assert found.num_trained_tokens == 6
    assert not found.columns["weight"].any()
    assert "truncated" not in READERS["rewarded"](_write(tmp_path, *rows), tokenizer, **options).columns
    unsaid = [{name: row[name] for name in row if name != "truncated"} for row in rows]
    for given, words in ((unsaid, "no record has a field truncated"), ([rows[0], rows[1] | {"truncated": 1}], ":2")):
        with pytest.raises(UserError, match=words):
            READERS["rewarded"](_write(tmp_path, *given), tokenizer, **options, masks_truncated=True)


def test_experts_of_a_rollout_stand_at_their_tokens(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    """The last token, which predicts nothing, may have none; what is cut off is cut off of them too."""
    experts = [[[token, 7], [token, 6]] for token in range(4)]
    row = {"input_ids": [5, 6, 7, 8], "is_trained": [0, 0, 1, 1], "advantage": 1, "routed_experts": experts}
    data = read_rollouts(_write(tmp_path, row, row | {"routed_experts": experts[:3]}), tokenizer, **_LIMITS)
    assert data.routed is not None
    assert data.routed.tolist() == experts + experts[:3] + [[[-1, -1], [-1, -1]]]
    assert data.first(1).routed.tolist() == experts  # type: ignore[union-attr]
    both = joined_sources([data, data.first(1)], ["a", "b"], ())
    assert both.routed.tolist() == data.routed.tolist() + experts  # type: ignore[union-attr]
    cut = read_rollouts(_write(tmp_path, row), tokenizer, **_LIMITS | {"max_length": 3})
    assert cut.routed.tolist() == experts[:3]  # type: ignore[union-attr]
    plain = {name: value for name, value in row.items() if name != "routed_experts"}
    for rows, words in (
        ((row, plain), "some rollouts have routed_experts"),
        ((row, row | {"routed_experts": [[[1, 2]]] * 4}), "1 layers of 2, 2 layers of 2"),
    ):
        with pytest.raises(UserError, match=words):
            read_rollouts(_write(tmp_path, *rows), tokenizer, **_LIMITS)


_LIMITS = {"max_length": 16, "vocab_size": 512}


def test_pairs_of_text_and_of_messages_are_neighbours(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    file = _write(tmp_path, {"prompt": "a", "chosen": " b", "rejected": " c d"}, {"chosen": " x", "rejected": " y"})
    data = read_preferences(file, tokenizer, max_length=16)
    assert (data.num_examples, len(data)) == (2, 4)
    better, worse = data[0], data[1]
    assert better.input_ids[0] == worse.input_ids[0]
    assert len(better.input_ids) < len(worse.input_ids)


def test_answer_stands_beside_the_one_to_another_prompt(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    rows = [("a", " x", True), ("a", " y", False), ("b", " z", True), ("b", " v w", False)]
    file = _write(tmp_path, *({"prompt": p, "completion": c, "label": is_liked} for p, c, is_liked in rows))
    data = read_feedback(file, tokenizer, max_length=16)
    texts = [tokenizer.decode(sequence.input_ids, skip_special_tokens=True) for sequence in data]
    assert texts == ["a x", "a v w", "a y", "a v w", "b z", "b y", "b v w", "b y"]
    signs = [set(sequence.columns["desirable"].tolist()) for sequence in data]
    assert signs == [{1.0}, {1.0}, {-1.0}, {-1.0}] * 2
    assert (data.num_examples, data.first(3).num_examples) == (4, 3)


def test_feedback_on_one_prompt_is_refused(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    file = _write(tmp_path, *({"prompt": "a", "completion": c, "label": True} for c in (" b", " c")))
    with pytest.raises(UserError, match="answers to other prompts"):
        read_feedback(file, tokenizer, max_length=16)
