"""Adapters that tokens invoke (aLoRA): where they act, on every mesh, in generation and in files, as PEFT has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.variants import calculate_alora_offsets
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.adapter.plan import plan_adapter
from meshlora.plan.derive import plan_model
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora.verify import preflight
from meshlora.wings.invoked.rows import invoked_tokens
from meshlora_ground.topology import Topology
from meshlora_judge.case import random_tokens
from meshlora_judge.compare import relative
from meshlora_judge.inputs import write_adapter, write_twin
from meshlora_judge.invoked import check_invocations, with_invocations
from meshlora_judge.twin import twin_config
from tests.conftest import Prove
from tests.pool import Pool
from tests.ranks.test_trainer import folder as runs
from tests.ranks.test_trainer import run_file

__all__ = ["runs"]  # a fixture

CALL = [5, 9]
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}
INVOKED = {**LORA, "alora_invocation_tokens": CALL, "task_type": "CAUSAL_LM"}

# Rows with, without and with several invocations, one at the very start, one cut off by the end.
ROWS = torch.tensor(
    [
        [31, 77, 5, 9, 8, 200, 4, 6],
        [31, 77, 5, 8, 9, 200, 4, 5],
        [5, 9, 77, 5, 9, 8, 5, 6],
        [5, 9, 77, 5, 8, 9, 4, 6],
    ]
)


def _by_peft(ids: Tensor, call: list[int]) -> Tensor:
    """What PEFT's own function says."""
    config = LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=call)
    acts = torch.zeros_like(ids, dtype=torch.bool)
    for row, offset in enumerate(calculate_alora_offsets({"default": config}, "default", ids)):
        if offset is not None:
            acts[row, ids.shape[1] - offset :] = True
    return acts


@pytest.mark.parametrize("call", [CALL, [5], [5, 9, 77], [9, 9], list(range(9))])
def test_adapter_acts_where_peft_says(call: list[int]) -> None:
    assert torch.equal(invoked_tokens(ROWS, call), _by_peft(ROWS, call))


def test_sequences_of_a_packed_row_are_invoked_one_by_one() -> None:
    lengths = (6, 9, 8, 1, 8)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    row = ROWS.view(1, -1)
    each = [_by_peft(part, CALL) for part in row.split(lengths, 1)]
    assert torch.equal(invoked_tokens(row, CALL, positions), torch.cat(each, 1))
    assert not torch.equal(invoked_tokens(row, CALL), torch.cat(each, 1))


def test_padding_invokes_nothing() -> None:
    mask = torch.ones_like(ROWS)
    mask[:, :2] = 0
    acts = invoked_tokens(ROWS, CALL, mask=mask)
    assert torch.equal(acts[:3], _by_peft(ROWS, CALL)[:3])
    assert not acts[3].any()


# --- training -------------------------------------------------------------------------------------------------------

# What is trained of which model, where.
PROOFS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sp": ("llama", {"lora_dropout": 0.12}, "tp=2,sp"),
    "shards": ("llama", {}, "dp=2,dp_shard"),
    "cp": ("llama", {"options": {"packing": True}}, "cp=2"),
    "ring": ("qwen3", {}, "cp=2,ring"),
    "packed": ("llama", {"options": {"packing": "auto"}}, "dp=2,tp=2"),
    "stages": ("llama", {"options": {"recompute": True, "micro_batch_size": 1}}, "pp=2"),
    "recomputed": ("llama", {"options": {"recompute": True, "resume": True}}, "tp=2,sp"),
    "experts": ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"]}, "tp=2,sp,ep=2"),
    "several": ("llama", {"options": {"adapters": 2}}, "tp=2,sp"),
    "fused": ("phi3", {"target_modules": "all-linear"}, "tp=2,sp"),
}
COVER = ("sp", "shards", "cp", "stages")


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in COVER else pytest.mark.proof) for n in PROOFS])
def test_trains_as_one_process_does(name: str, prove: Prove) -> None:
    family, words, topology = PROOFS[name]
    words = INVOKED | words
    options = words.pop("options", {})
    for outcome in prove(family=family, lora=words, topologies=(topology,), **{"steps": 2} | options):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


# --- generation, files ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `model` and `adapter`."""
    found = tmp_path_factory.mktemp("invoked")
    write_twin(twin_config("llama"), found / "model", dtype=torch.float64, seed=0)
    write_adapter(found / "model", INVOKED, found / "adapter", seed=1, trust_remote_code=False)
    return found


def _theirs(folder: Path, adapter: str = "adapter") -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    return PeftModel.from_pretrained(base, str(folder / adapter)).eval()


# Prompts padded on the left: with, without, with two invocations.
PROMPTS = torch.tensor([[0, 0, 31, 5, 9, 8, 20], [0, 31, 5, 8, 9, 200, 4], [5, 9, 77, 5, 9, 8, 6]])
MASK = (PROMPTS != 0).long()
NEW: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
ASKED: list[dict[str, Any]] = [{}, {"num_return_sequences": 2, "do_sample": True}, {"cache_implementation": "static"}]


def _generated(model: Any, asked: dict[str, Any]) -> Tensor:
    torch.manual_seed(3)
    with meshlora.lift(), torch.no_grad():
        found: Tensor = model.generate(input_ids=PROMPTS, attention_mask=MASK, **NEW | asked)
    return found


def _on_mesh(folder: Path, topology: str) -> tuple[Tensor, list[Tensor], Tensor]:
    """Body of a rank: logits of rows, what is generated, the same without a cache."""
    model = meshlora.load(folder / "model", adapter=folder / "adapter", topology=topology).eval()
    with meshlora.lift(), torch.no_grad():
        logits: Tensor = model(input_ids=ROWS).logits
    return logits, [_generated(model, asked) for asked in ASKED], _generated(model, {"use_cache": False})


@pytest.mark.parametrize("topology", ["tp=2", "tp=2,sp", "cp=2"])
def test_says_and_generates_what_peft_does(topology: str, folder: Path, pools: Callable[[int], Pool]) -> None:
    theirs = _theirs(folder)
    with meshlora.lift(), torch.no_grad():
        logits = theirs(input_ids=ROWS).logits
        with theirs.disable_adapter():
            base = theirs(input_ids=ROWS).logits
    expected = []
    for asked in ASKED:
        if asked.get("num_return_sequences"):  # PEFT has the offsets of the prompts for twice as many rows
            continue
        expected.append(_generated(theirs, asked))
    for found, (plain, twice, static), uncached in pools(2).run(_on_mesh, folder, topology):
        assert relative(found, logits) <= 1e-12
        assert relative(found[:, :2][:2], base[:, :2][:2]) <= 1e-12, "the base before the invocation"
        assert relative(found[1], base[1]) <= 1e-12, "and where there is none"
        assert relative(found[0, 2:], base[0, 2:]) > 1e-3
        assert torch.equal(plain, expected[0])
        assert torch.equal(static, expected[1])
        assert torch.equal(uncached, plain)
        assert len(twice) == 2 * len(PROMPTS)


def test_answers_of_one_prompt_are_invoked_by_it(folder: Path) -> None:
    model = meshlora.load(folder / "model", adapter=folder / "adapter").eval()
    several = {"num_return_sequences": 3, "do_sample": True, "top_k": 1}
    assert torch.equal(_generated(model, several), _generated(model, {}).repeat_interleave(3, 0))


def test_file_is_read_by_peft_and_says_what_invokes(folder: Path) -> None:
    ours = meshlora.load(folder / "model", adapter=folder / "adapter")
    meshlora.save_adapter(ours, folder / "ours")
    words = json.loads((folder / "ours" / "adapter_config.json").read_text(encoding="utf-8"))
    assert words["alora_invocation_tokens"] == CALL
    assert words["task_type"] == "CAUSAL_LM", "PEFT runs the base with any other"
    with meshlora.lift(), torch.no_grad():
        assert torch.equal(_theirs(folder, "ours")(input_ids=ROWS).logits, _theirs(folder)(input_ids=ROWS).logits)


# --- what a proof sees ----------------------------------------------------------------------------------------------


def test_sequences_of_a_proof_are_invoked_twice_once_and_never() -> None:
    data = with_invocations(random_tokens(num_sequences=9, vocab_size=250, seed=0), CALL)
    numbers = set[int]()
    for sequence in data:
        ids = sequence.input_ids.tolist()
        numbers.add(sum(ids[at : at + 2] == CALL for at in range(len(ids))))
    assert numbers == {0, 1, 2}
    check_invocations(data, CALL)
    with pytest.raises(meshlora.UserError, match=r"alora_invocation_tokens=\[7, 7, 7\]: no sequence"):
        check_invocations(data, [7, 7, 7])


def test_preflight_of_a_run_invokes_by_tokens_that_its_twin_has(runs: Path) -> None:
    call = [300, 299, 300, 7, 8, 9]
    run = prepare_run(read_run(run_file(runs, "invoked", "tp=2", lora__alora_invocation_tokens=call)))
    proof, _ = preflight.proof_of(run, runs)
    found, size = proof.case.lora["alora_invocation_tokens"], proof.config.get_text_config().vocab_size
    assert max(found) < size
    assert found[0] == found[2]
    assert len({*found}) == 3
    assert {"invoked", "invoked_twice"} <= proof.features_on(proof.topologies[0])


# --- what is refused ------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"alora_invocation_tokens": []}, "it is a list of token ids"),
    "text": ({"alora_invocation_tokens": "<|call|>"}, "it is a list of token ids"),
    "past the end": ({"alora_invocation_tokens": [5, 256]}, "the vocabulary has 256 tokens"),
    "padding": ({"alora_invocation_tokens": [5, 3]}, "it ends with the padding token"),
    "dora": ({"use_dora": True}, "alora_invocation_tokens with use_dora"),
    "embedding": ({"target_modules": ["embed_tokens"]}, "PEFT has an adapter invoked by tokens for linears"),
    "head": ({"target_modules": ["lm_head"]}, "PEFT has an adapter invoked by tokens for linears"),
    "pissa": ({"init_lora_weights": "pissa"}, "alora_invocation_tokens with init_lora"),
}


@pytest.mark.filterwarnings("ignore:aLoRA is currently")
@pytest.mark.parametrize("name", REFUSED)
def test_what_peft_has_not_is_refused(name: str) -> None:
    options, words = REFUSED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(twin_config("llama", pad_token_id=3))
    with pytest.raises(meshlora.UserError, match=words):
        plan_adapter(model, plan_model(model, Topology()), LoraConfig(**INVOKED | options))


def test_what_would_not_know_the_invocation_is_refused(folder: Path) -> None:
    model = meshlora.load(folder / "model", adapter=folder / "adapter").eval()
    ids = PROMPTS[2:]
    with pytest.raises(meshlora.UserError, match="alora_invocation_tokens in merge"):
        meshlora.merge(model)
    with pytest.raises(meshlora.UserError, match=r"generate\.num_beams|beams"):
        model.generate(input_ids=ids, num_beams=2, max_new_tokens=2)
    with pytest.raises(meshlora.UserError, match="alora_invocation_tokens in generate_batch"):
        model.generate_batch(inputs=ids.tolist())
    with pytest.raises(meshlora.UserError, match="inputs_embeds with adapter 'default'"):
        model(inputs_embeds=model.get_input_embeddings()(ids))
    with meshlora.disable_adapter(model):
        model(inputs_embeds=model.get_input_embeddings()(ids))
