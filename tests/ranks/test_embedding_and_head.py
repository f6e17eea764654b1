"""Adapters outside the decoder layers: on the embedding and the head, tied or not; modules and biases trained in full.

Each is proved against transformers + peft on one process; what a proof does not look at follows after that: files on
other topologies, several adapters, the base below them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.adapter.attach import adapter_factors
from meshlora.comm.groups import num_processes
from meshlora.verify.request import with_biases
from meshlora_judge.compare import relative
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from tests.blueprints import load_without_proof
from tests.conftest import Prove
from tests.pool import Pool
from tests.twins import make_batches

TOPOLOGIES = ("tp=2", "tp=2,sp", "dp=2,tp=2")
TIED = {"model": twin_config("llama", tie_word_embeddings=True)}
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}

# What is trained of which model.
PROOFS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "embedding": ({"family": "llama"}, {"target_modules": ["embed_tokens", "q_proj"]}),
    "scaled embedding": ({"family": "gemma3_text"}, {"target_modules": ["embed_tokens", "down_proj"]}),
    "head": ({"family": "llama"}, {"target_modules": ["lm_head", "o_proj"]}),
    "capped head": ({"family": "gemma2"}, {"target_modules": ["lm_head"]}),
    "both, tied": (TIED, {"target_modules": ["embed_tokens", "lm_head"]}),
    "saved: norms and head": (
        {"family": "llama"},
        {"target_modules": ["q_proj"], "modules_to_save": ["model.norm", "lm_head", "layers.0.input_layernorm"]},
    ),
    "saved: every norm": ({"family": "qwen3"}, {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    "saved: last norm": ({"family": "llama"}, {"target_modules": "all-linear", "modules_to_save": ["model.norm"]}),
    "saved: embedding": ({"family": "llama"}, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "saved: head, tied": (TIED, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "saved: both, tied": (
        TIED,
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    ),
    "saved: row linear": ({"family": "llama"}, {"target_modules": ["q_proj"], "modules_to_save": ["1.mlp.down_proj"]}),
    "saved: blocks": (
        {"family": "qwen3"},
        {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["0.mlp", "1.self_attn"]},
    ),
    "saved: blocks with biases": (
        {"family": "qwen2"},
        {"target_modules": ["down_proj"], "modules_to_save": ["0.self_attn", "model.norm"]},
    ),
    "saved: a layer": ({"family": "gemma3_text"}, {"target_modules": ["q_proj"], "modules_to_save": ["layers.1"]}),
    "biases: all": ({"family": "gpt2"}, {"target_modules": ["c_attn", "mlp.c_proj"], "bias": "all"}),
    "biases: of targets": ({"family": "qwen2"}, {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}),
    # And of these, several at once.
    "embedding and head": (
        {"family": "llama"},
        {"target_modules": ["embed_tokens", "q_proj", "lm_head", "o_proj"]},
    ),
    "saved: of every kind": (
        {"family": "llama"},
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["model.norm", "lm_head", "embed_tokens", "layers.0.input_layernorm", "1.mlp.down_proj"],
        },
    ),
}  # fmt: skip

# By default what is cut in a way of its own; on which of two biases and norms there are is one rule.
COVER = {
    "embedding and head": "tp=2,sp",
    "scaled embedding": "tp=2",
    "capped head": "tp=2,sp",
    "both, tied": "tp=2,sp",
    "saved: of every kind": "dp=2,tp=2",
    "biases: all": "tp=2,sp",
    "saved: blocks": "tp=2,sp",
    "saved: both, tied": "tp=2,sp",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "topologies"),
    [
        *((name, (topology,)) for name, topology in COVER.items()),
        *(pytest.param(name, TOPOLOGIES, marks=pytest.mark.proof) for name in PROOFS),
    ],
)
def test_trains_as_one_process_does(name: str, topologies: tuple[str, ...], prove: Prove) -> None:
    model, options = PROOFS[name]
    for outcome in prove(**model, lora=LORA | options, topologies=topologies, steps=2):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("saved: last norm", ""),
        ("biases: of targets", ""),
        ("saved: embedding", "embed_tokens: its weight trained in full"),
        pytest.param(
            "saved: row linear",
            "down_proj: its bias and weight trained in full, of a model in bfloat16",
            marks=pytest.mark.proof,
        ),
        pytest.param("saved: norms and head", "lm_head: its weight trained in full", marks=pytest.mark.proof),
        pytest.param("biases: all", "ln_1: its bias trained in full", marks=pytest.mark.proof),
    ],
)
def test_what_is_trained_in_full_of_a_bfloat16_model_is_right_or_refused(name: str, words: str, prove: Prove) -> None:
    asked, lora = PROOFS[name]
    request = {**asked, "topologies": ("tp=2,sp",), "steps": 1, "lora": LORA | lora, "dtype": "bfloat16"}
    if words:
        with pytest.raises(meshlora.UnsupportedError, match=words):
            prove(**request)
    else:
        assert [(o.passed, o.divergence, o.error) for o in prove(**request)] == [(True, None, "")]


# --- files ----------------------------------------------------------------------------------------------------------

FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"target_modules": ["embed_tokens", "lm_head", "o_proj"], "modules_to_save": ["norm"]}),
    "llama, saved": ("llama", {}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "llama, blocks": ("llama", {}, {"target_modules": ["q_proj"], "modules_to_save": ["0.mlp", "1.self_attn"]}),
    "llama, one copy": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "llama, tied": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["embed_tokens", "lm_head"]}),
    "gpt2": ("gpt2", {}, {"target_modules": ["c_attn", "c_fc"], "bias": "all"}),
    "gemma3_text": ("gemma3_text", {}, {"target_modules": ["embed_tokens"], "modules_to_save": ["q_norm"]}),
}


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=[] if n in ("llama", "gpt2") else pytest.mark.proof) for n in FILES]
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, a float64 twin, and `adapter`, one of which nothing is zero nor what the base has."""
    family, overrides, options = FILES[request.param]
    folder = tmp_path_factory.mktemp("made")
    write_twin(with_biases(twin_config(family, **overrides)), folder / "model", dtype=torch.float64, seed=0)
    model = meshlora.load(folder / "model", lora=LoraConfig(**LORA, **options), dtype="float64")
    _move(model, "default")
    meshlora.save_adapter(model, folder / "adapter")
    return folder


def _move(model: Any, adapter: str, seed: int = 0) -> None:
    """As after training: every parameter of the adapter off what it was."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for factor in adapter_factors(model, adapter):
            shape = factor.parameter.shape
            factor.parameter.add_(0.1 * torch.randn(shape, generator=generator, dtype=torch.float64))


def _load(folder: Path, adapter: Path, topology: str) -> Any:
    """In float64, also of a family whose proofs are not on record."""
    shape = meshlora.Topology.parse(topology, world=num_processes())
    return load_without_proof(folder, adapter=adapter, topology=shape, dtype="float64")


def _logits_and_save(folder: Path, adapter: Path, out: Path, topology: str) -> Tensor:
    model = _load(folder / "model", adapter, topology).eval()
    meshlora.save_adapter(model, out)
    return _logits(model)


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    with meshlora.lift():
        logits: Tensor = model(input_ids=make_batches().input_ids, use_cache=False).logits
    return logits


def _base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="eager")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT's, about merging
def test_saved_is_the_same_to_the_byte_on_every_topology_and_peft_has_our_logits(
    made: Path, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    ours = pools(2).run(_logits_and_save, made, made / "adapter", first, "tp=2,sp")[0]
    pools(4).run(_logits_and_save, made, first, second, "dp=2,tp=2")
    _logits_and_save(made, second, third, "")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert len({(folder / name).read_bytes() for folder in (made / "adapter", first, second, third)}) == 1
    theirs = _logits(PeftModel.from_pretrained(_base(made), str(first)).eval())
    assert relative(ours, theirs) < 1e-11
    assert relative(_logits(_base(made).eval()), theirs) > 1e-3, "the adapter is not nothing"


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_file_of_peft_that_holds_the_base_layer_too_is_read(target: str, tmp_path: Path) -> None:
    """PEFT stores the weight below an adapter on embedding or head, unasked; equal to the base's it says nothing."""
    write_twin(twin_config("llama"), tmp_path / "model", dtype=torch.float64, seed=0)
    lora = LoraConfig(**LORA, target_modules=[target], init_lora_weights=False)
    peft_model = get_peft_model(_base(tmp_path), lora, autocast_adapter_dtype=False).eval()
    with pytest.warns(UserWarning, match="save_embedding_layers"):
        peft_model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("base_layer.weight"))
    model = meshlora.load(tmp_path / "model", adapter=tmp_path / "adapter", dtype="float64").eval()
    assert relative(_logits(model), _logits(peft_model)) < 1e-11
    tensors[key][3, 3] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(meshlora.UserError, match="base_layer"):
        meshlora.load(tmp_path / "model", adapter=tmp_path / "adapter", dtype="float64")


# --- several adapters -----------------------------------------------------------------------------------------------

SAVED = {"one": ["model.norm", "lm_head"], "two": ["model.norm", "q_proj"]}


def _write_two(folder: Path) -> None:
    """`one` and `two`, which train different modules of a llama in full, one of them both."""
    write_twin(twin_config("llama"), folder / "model", dtype=torch.float64, seed=0)
    model = meshlora.load(folder / "model", dtype="float64")
    for seed, (name, saved) in enumerate(SAVED.items()):
        meshlora.add_adapter(model, name, LoraConfig(**LORA, target_modules=["v_proj"], modules_to_save=saved))
        _move(model, name, seed)
        meshlora.save_adapter(model, folder / name, adapter=name)


def _switched(folder: Path, topology: str) -> tuple[dict[str, Tensor], dict[str, set[str]]]:
    """(logits, what is trained of the base) with each adapter, in turn, and without."""
    model = meshlora.load(folder / "model", topology=topology, dtype="float64").eval()
    logits, trained = {"base": _logits(model)}, {}
    for name in SAVED:
        meshlora.load_adapter(model, folder / name, adapter=name)
    logits["added"] = _logits(model)
    for turn, name in enumerate(("one", "two", "one")):
        meshlora.set_adapter(model, name)
        trained[name] = {n for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n}
        with meshlora.disable_adapter(model):
            logits[f"disabled {turn}"] = _logits(model)
        logits[f"{name} {turn}"] = _logits(model)
    meshlora.set_adapter(model, None)
    logits["off"] = _logits(model)
    trained["off"] = {n for n, p in model.named_parameters() if p.requires_grad}
    return logits, trained


@pytest.mark.parametrize("topology", [pytest.param("tp=2", marks=pytest.mark.proof), "tp=2,sp"])
def test_adapters_with_other_modules_trained_in_full_are_switched(
    topology: str, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    _write_two(tmp_path)
    logits, trained = pools(2).run(_switched, tmp_path, topology)[0]
    for name in ("added", "off", "disabled 0", "disabled 1", "disabled 2"):
        assert torch.equal(logits[name], logits["base"]), name
    assert torch.equal(logits["one 0"], logits["one 2"])
    for turn, name in enumerate(SAVED):
        peft_model = PeftModel.from_pretrained(_base(tmp_path), str(tmp_path / name)).eval()
        assert relative(logits[f"{name} {turn}"], _logits(peft_model)) < 1e-11
    assert trained == {
        "one": {"model.norm.weight", "lm_head.weight"},
        "two": {"model.norm.weight", *(f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))},
        "off": set(),
    }
