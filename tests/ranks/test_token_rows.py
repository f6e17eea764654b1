"""Rows of a vocabulary that are trained in place of those of the base: PEFT's `trainable_token_indices`.

Each form is compared with PEFT on one process, and meshes with transformers + peft by proofs; then files, in both
directions and of resized vocabularies, and what is refused.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.adapter.attach import active_factors, set_adapters
from meshlora.adapter.plan import plan_adapter
from meshlora.cli.main import main
from meshlora.loading.blueprint import build_on_meta
from meshlora.plan.derive import plan_model
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora.verify import preflight
from meshlora_extra.engines import served
from meshlora_ground.float64 import lift
from meshlora_ground.objectives.preferences import Dpo
from meshlora_ground.topology import Topology
from meshlora_judge.case import check_tokens, random_tokens, with_tokens
from meshlora_judge.compare import relative
from meshlora_judge.inputs import write_twin
from meshlora_judge.reference import trainable
from meshlora_judge.twin import twin_config
from tests.conftest import Prove
from tests.ranks.test_trainer import folder, run_file

__all__ = ["folder"]  # a fixture

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
TIED = {"tie_word_embeddings": True, "pad_token_id": 3}
# Family, what its configuration differs in, the tokens: in no order, at both ends of the vocabulary, padding.
FORMS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "list": ("llama", {"pad_token_id": 3}, [200, 3, 7]),
    "list, tied": ("llama", TIED, [200, 3, 7]),
    "list, scaled": ("gemma3_text", {}, [200, 0, 7]),
    "both": ("llama", {}, {"embed_tokens": [200, 7], "lm_head": [9]}),
    "both, tied": ("llama", TIED, {"model.embed_tokens": [200, 3], "lm_head": [200, 3]}),
    "two, tied": ("llama", TIED, {"embed_tokens": [200, 7], "lm_head": [9, 200]}),
    "head": ("llama", {}, {"lm_head": [9, 200]}),
    "head, tied": ("llama", TIED, {"lm_head": [9, 200]}),
}


def _made(folder: Path, form: str) -> tuple[Path, Any]:
    """(a twin in float64, PEFT's model of it with every factor off what it was)."""
    family, overrides, tokens = FORMS[form]
    write_twin(twin_config(family, **overrides), folder / "model", dtype=torch.float64, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights
        theirs = get_peft_model(_base(folder / "model"), LoraConfig(**LORA, trainable_token_indices=tokens))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainable(theirs).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return folder / "model", theirs


def _base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def _ours(folder: Path, **options: Any) -> Any:
    return meshlora.load(folder, dtype="float64", device="cpu", attn_implementation="eager", **options)


def _logits(model: Any) -> Tensor:
    with torch.no_grad(), lift(True):
        found: Tensor = model(input_ids=IDS).logits
    return found


IDS = with_tokens(random_tokens(num_sequences=3, vocab_size=250, seed=0), [200, 3, 7, 9, 0]).input_ids[:32]
IDS = torch.from_numpy(IDS).long().view(2, 16)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_rows_train_run_and_are_stored_as_peft_has_them(form: str, tmp_path: Path) -> None:
    folder, theirs = _made(tmp_path, form)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = _ours(folder, adapter=tmp_path / "adapter")
    assert relative(_logits(ours), _logits(theirs)) <= 1e-12

    with lift(True):
        loss = meshlora.language_model_loss(ours, IDS, None, IDS)
        loss.backward()
        logits = theirs(input_ids=IDS).logits[:, :-1]
        their_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum")
        their_loss.backward()
    assert relative(loss.detach(), their_loss.detach()) <= 1e-12
    gradients = {name: parameter.grad for name, parameter in trainable(theirs).items()}
    assert {factor.name for factor in active_factors(ours)} == gradients.keys()
    for factor in active_factors(ours):
        assert factor.parameter.grad is not None
        assert relative(factor.parameter.grad, gradients[factor.name]) <= 1e-12, factor.name

    with meshlora.merged(ours):
        assert relative(_logits(ours), _logits(theirs)) <= 1e-12
    with meshlora.disable_adapter(ours), theirs.disable_adapter():
        assert relative(_logits(ours), _logits(theirs)) <= 1e-12
    meshlora.save_adapter(ours, tmp_path / "ours")
    stored = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "adapter")]
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(stored[0][key], stored[1][key]) for key in stored[0])
    read = PeftModel.from_pretrained(_base(folder), str(tmp_path / "ours"))
    assert relative(_logits(read), _logits(theirs)) <= 1e-12


def test_fresh_rows_are_those_of_the_base(tmp_path: Path) -> None:
    folder, _ = _made(tmp_path, "two, tied")
    model = _ours(folder, lora=LoraConfig(**LORA, trainable_token_indices=FORMS["two, tied"][2]))
    weight = _base(folder).get_input_embeddings().weight
    found = {factor.name: factor.parameter for factor in active_factors(model)}
    assert torch.equal(found["model.embed_tokens.trainable_tokens_delta"], weight[[200, 7]])
    assert torch.equal(found["lm_head.trainable_tokens_delta"], weight[[9, 200]])


TIED_LLAMA = {"model": twin_config("llama", tie_word_embeddings=True)}
# What is trained of which model, where.
PROOFS: dict[str, tuple[dict[str, Any], Any, dict[str, Any], str]] = {
    "tied": (TIED_LLAMA, [200, 7, 100, 3], {}, "tp=2,sp"),
    "both": ({"family": "llama"}, {"embed_tokens": [200, 7], "lm_head": [9, 150, 20]}, {}, "dp=2,tp=2"),
    "scaled, pairs": ({"family": "gemma3_text"}, [200, 7, 0], {"objective": Dpo()}, "tp=2"),
    "cp": (TIED_LLAMA, [200, 7], {"packing": True}, "cp=2"),
    "experts": ({"family": "qwen3_moe"}, [200, 7], {"lora": LORA | {"target_modules": ["q_proj"]}}, "tp=2,ep=2"),
    "stages": ({"family": "llama"}, {"embed_tokens": [200, 7], "lm_head": [9]}, {}, "pp=2"),
    "shards": (TIED_LLAMA, [200, 7], {}, "dp=2,dp_shard"),
    "resumed": (TIED_LLAMA, [200, 7], {"resume": True, "neftune_alpha": 5.0}, "tp=2"),
    "lora_plus": (TIED_LLAMA, [200, 7], {"lora_plus_ratio": 4.0}, "tp=2"),
}
COVER = ("tied", "both")


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in COVER else pytest.mark.proof) for n in PROOFS])
def test_trains_as_one_process_does(name: str, prove: Prove) -> None:
    model, tokens, options, topology = PROOFS[name]
    lora = options.get("lora", LORA) | {"trainable_token_indices": tokens}
    options = options | {"lora": lora, "topologies": (topology,)}
    for outcome in prove(**model, **{"steps": 2} | options):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


# --- files of resized vocabularies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["both", "list, tied"])
def test_file_of_a_resized_vocabulary_is_read_on_the_resized_base_alone(form: str, tmp_path: Path) -> None:
    folder, _ = _made(tmp_path, form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resized = _base(folder)
        resized.resize_token_embeddings(260)
        resized.save_pretrained(tmp_path / "resized")
        config = LoraConfig(**LORA, trainable_token_indices=FORMS[form][2], base_model_name_or_path=str(folder))
        theirs = get_peft_model(resized, config)
        theirs.save_pretrained(tmp_path / "adapter")  # with the weights of the base, which was not resized
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) > len(trainable(theirs))
    ours = _ours(tmp_path / "resized", adapter=tmp_path / "adapter")
    assert relative(_logits(ours), _logits(theirs)) <= 1e-12
    with pytest.raises(meshlora.UserError, match="made on a vocabulary of 260 rows, this base has 256"):
        _ours(folder, adapter=tmp_path / "adapter")


# --- what is refused ------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "past_the_end": ({"trainable_token_indices": [256]}, "the vocabulary of model.embed_tokens has 256 tokens"),
    "twice": ({"trainable_token_indices": [7, 7]}, "each once"),
    "no_vocabulary": ({"trainable_token_indices": {"q_proj": [7]}}, "q_proj: it names model.layers.0"),
    "no_module": ({"trainable_token_indices": {"embed_token": [7]}}, "it names no module.*embed_tokens"),
    "two_keys": ({"trainable_token_indices": {"embed_tokens": [7], "model.embed_tokens": [7]}}, "as another key does"),
    "beside_lora": ({"target_modules": ["embed_tokens"], "trainable_token_indices": [7]}, "it has LoRA too"),
    "beside_lora_of_the_head": (
        {"target_modules": ["lm_head"], "trainable_token_indices": [7]},
        "trainable_token_indices of lm_head: it has LoRA too",
    ),
    "in_full": ({"modules_to_save": ["embed_tokens"], "trainable_token_indices": [7]}, "it is trained in full too"),
    "head_in_full": (
        {"modules_to_save": ["lm_head"], "trainable_token_indices": [7]},
        "lm_head: it is trained in full",
    ),
    "tied_and_apart": (
        {"trainable_token_indices": {"embed_tokens": [7], "lm_head": [9]}, "ensure_weight_tying": True},
        "tied modules have the same tokens",
    ),
    "lora_on_tied": ({"target_modules": ["lm_head"], "ensure_weight_tying": True}, "factors in the same memory"),
}


def _planned(config: LoraConfig, topology: str = "", **overrides: Any) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(twin_config("llama", **TIED | overrides))
    return plan_adapter(model, plan_model(model, Topology.parse(topology)), config)


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_peft_or_a_mesh_would_train_otherwise_are_refused(name: str) -> None:
    options, words = REFUSED[name]
    with pytest.raises(meshlora.UserError, match=words):
        _planned(LoraConfig(**LORA | options))


@pytest.mark.parametrize(
    "options", [{"trainable_token_indices": [7]}, {"modules_to_save": ["embed_tokens"]}], ids=["rows", "in full"]
)
@pytest.mark.parametrize("family", ["inkling_text", "muse_glimmer"])
def test_weight_of_an_embedding_with_a_norm_inside_has_lora_alone(family: str, options: dict[str, Any]) -> None:
    """PEFT looks up trained rows without the norm, and a copy has a norm of its own."""
    model = build_on_meta(twin_config(family))
    plan = plan_model(model, Topology())
    assert plan_adapter(model, plan, LoraConfig(target_modules=["embed_tokens"])).targets
    with pytest.raises(meshlora.UnsupportedError, match=f"^{next(iter(options))}.*a norm inside the embedding"):
        plan_adapter(model, plan, LoraConfig(target_modules=["q_proj"], **options))


def test_rows_of_an_untied_embedding_leave_the_head_alone() -> None:
    both = {"modules_to_save": ["lm_head"], "trainable_token_indices": [7]}
    found = _planned(LoraConfig(**LORA | both), tie_word_embeddings=False)
    assert {"lm_head.weight", "model.embed_tokens.trainable_tokens_delta"} < found.parameters.keys()
    assert found.with_rows == {"model.embed_tokens"}


def test_tied_rows_are_refused_on_several_stages() -> None:
    config = LoraConfig(**LORA, trainable_token_indices=[7])
    with pytest.raises(meshlora.UnsupportedError, match=r"training model\.embed_tokens\.weight, tied"):
        _planned(config, "pp=2")


def test_engines_are_given_no_rows() -> None:
    planned = _planned(LoraConfig(**LORA, trainable_token_indices=[7]))
    with pytest.raises(meshlora.UnsupportedError, match=r"it: trainable_token_indices=\[7\]: engines take LoRA"):
        served(planned, None, "it")


def test_several_adapters_with_rows_are_refused(tmp_path: Path) -> None:
    folder, _ = _made(tmp_path, "list")
    model = _ours(folder, lora=LoraConfig(**LORA, trainable_token_indices=[7]))
    meshlora.add_adapter(model, "other", LoraConfig(**LORA))
    with pytest.raises(meshlora.UnsupportedError, match="trainable_token_indices with 2 adapters"):
        set_adapters(model, ["default", "other"])


# --- what a proof sees ----------------------------------------------------------------------------------------------


def test_proof_reads_and_predicts_every_token_whose_row_is_trained() -> None:
    data = random_tokens(num_sequences=5, vocab_size=250, seed=0)
    check_tokens(with_tokens(data, [251, 252, 253]), [251, 252, 253])
    with pytest.raises(meshlora.UserError, match="251: no sequence of the proof has it"):
        check_tokens(data, [251])
    last = data.offsets[1:] - 1
    data.input_ids[last] = 252  # predicted, and never read
    with pytest.raises(meshlora.UserError, match="252: no sequence of the proof has it"):
        check_tokens(data, [252])


def test_preflight_trains_rows_of_tokens_that_its_twin_has(folder: Path) -> None:
    given = {"embed_tokens": [300, 299, 0, 1, 2, 3, 4], "lm_head": [299]}
    run = prepare_run(read_run(run_file(folder, "rows", "tp=2", lora__trainable_token_indices=given)))
    proof, _ = preflight.proof_of(run, folder)
    found, size = proof.case.lora["trainable_token_indices"], proof.config.get_text_config().vocab_size
    of_embedding, of_head = found["model.embed_tokens"], found["lm_head"]
    assert [of_embedding[1]] == of_head
    assert len(set(of_embedding)) == len(of_embedding)
    assert min(of_embedding) < size // 2 <= max(of_embedding) < size  # of both ranks
    assert of_embedding != sorted(of_embedding)
    assert "token_rows" in proof.features_on(proof.topologies[0])
    check_tokens(proof.case.data, of_embedding)


def test_check_names_the_rows_that_a_run_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run_file(folder, "named", "", lora__trainable_token_indices=[7, 300])
    assert main(["check", str(file)]) == 0
    assert "2 rows of model.embed_tokens" in capsys.readouterr().out
