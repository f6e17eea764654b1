"""What PEFT writes and people's files have is read: resized vocabularies, single rows of them, names of wrappers."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from meshlora.adapter.formats.adapter_file import PREFIX, names_of, read_adapter_tensors
from meshlora.adapter.formats.peft_format import WEIGHTS_FILE, plan_folder, read_factors
from meshlora.adapter.targets.options import check_values
from meshlora.cli.main import main
from meshlora.loading.blueprint import make_blueprint, read_model_config
from meshlora.plan.base_options import BaseOptions
from meshlora_extra.merging.merge import merge
from meshlora_ground.errors import UserError
from meshlora_ground.float64 import lift
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.blueprints import load_without_proof
from tests.for_each import for_each

_ROWS, _MORE_ROWS = 256, 272
_BOTH = ["embed_tokens", "lm_head"]
# (family, whether the vocabulary was resized, options): each is a form of file that PEFT writes.
_FORMS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "resized, both trained": ("llama", True, {"modules_to_save": _BOTH}),
    "resized, neither trained": ("llama", True, {}),
    "resized, embedding trained": ("llama", True, {"modules_to_save": ["embed_tokens"]}),
    "resized, LoRA on both": ("llama", True, {"target_modules": [*_BOTH, "q_proj"]}),
    "resized and tied, embedding trained": ("gemma", True, {"modules_to_save": ["embed_tokens"]}),
    "resized and tied, head trained": ("gemma", True, {"modules_to_save": ["lm_head"]}),
    "resized and tied, both trained": (
        "gemma",
        True,
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "resized and tied, neither trained": ("gemma", True, {}),
    "rows": ("llama", False, {"trainable_token_indices": [7, 3]}),
    "rows of both": ("llama", False, {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [5]}}),
    "rows, tied": ("gemma", False, {"trainable_token_indices": {"embed_tokens": [7, 3]}}),
    "rows that differ, tied": ("gemma", False, {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [5]}}),
    "rows beside a trained head": ("llama", False, {"trainable_token_indices": [9], "modules_to_save": ["lm_head"]}),
    "rows, resized": ("llama", True, {"trainable_token_indices": [7, _MORE_ROWS - 1]}),
    "rows, resized and tied": ("gemma", True, {"trainable_token_indices": [7, _MORE_ROWS - 1]}),
}
_QUICK = ("resized, neither trained", "resized and tied, embedding trained", "rows", "rows, resized and tied")


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


def _resized(folder: Path, out: Path, *, seed: int) -> Path:
    """`folder` with more rows, drawn anew with each seed as transformers draws them."""
    model = _load(folder)
    torch.manual_seed(seed)
    model.resize_token_embeddings(_MORE_ROWS)
    model.save_pretrained(out)
    return out


def _attached(base: Path, adapter: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(_load(base), str(adapter), torch_device="cpu").eval()


def _make(root: Path, family: str, *, is_resized: bool, **lora: Any) -> tuple[Path, Path, Path]:
    """(the base as published, a base for the adapter, the adapter as PEFT saves it, all of its parameters moved)."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(twin_config(family, vocab_size=_ROWS), dtype=torch.float64)
    published = root / "published"
    model.save_pretrained(published)
    trained_on = _resized(published, root / "trained_on", seed=2) if is_resized else published
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(_load(trained_on), LoraConfig(**copy.deepcopy(options | lora)))  # it changes lists
        with torch.no_grad():
            for parameter in wrapped.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        # As if the tokens were added in the process that trained: PEFT looks at whether the base has fewer.
        wrapped.peft_config["default"].base_model_name_or_path = str(published)
        wrapped.save_pretrained(root / "adapter")
    base = _resized(published, root / "base", seed=3) if is_resized else published
    return published, base, root / "adapter"


def _drop_repeated_head(adapter: Path) -> None:
    """Leave the base weight of a tied embedding that is trained under one of its names, the other one."""
    tensors = load_file(adapter / WEIGHTS_FILE)
    one, other = (tensors[f"{PREFIX}{name}.weight"] for name in ("lm_head", "model.embed_tokens.original_module"))
    assert torch.equal(one, other)
    del tensors[f"{PREFIX}lm_head.weight"]
    save_file(tensors, adapter / WEIGHTS_FILE)


def _logits(model: Any) -> Tensor:
    ids = torch.randint(0, _ROWS, (2, 9), generator=torch.Generator().manual_seed(5))
    ids[:, :4] = torch.tensor([3, 7, 9, len(model.get_input_embeddings().weight) - 1])
    with torch.no_grad(), lift():
        logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in _QUICK else pytest.mark.proof) for form in _FORMS]
)
def test_merged_model_is_the_one_that_peft_merges(form: str, tmp_path: Path) -> None:
    family, is_resized, lora = _FORMS[form]
    _, base, adapter = _make(tmp_path, family, is_resized=is_resized, **lora)
    merge(base, adapter, tmp_path / "out", config=read_model_config(base), check_logits=False)
    merged, attached = _load(tmp_path / "out").eval(), _attached(base, adapter)
    expected = _logits(attached)
    assert (_logits(merged) - expected).abs().max() <= 1e-12
    assert (_logits(_load(base).eval()) - expected).abs().max() > 1e-3
    if "differ" in form:  # PEFT's own merge puts the rows of both into the weight that they share
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = attached.merge_and_unload().state_dict()
    for name, tensor in merged.state_dict().items():
        assert (tensor - theirs[name]).abs().max() <= 1e-12, name


def test_base_under_a_trained_copy_replaces_what_is_tied_to_it(tmp_path: Path) -> None:
    family, is_resized, lora = _FORMS["resized and tied, embedding trained"]
    _, base, adapter = _make(tmp_path, family, is_resized=is_resized, **lora)
    _drop_repeated_head(adapter)
    merge(base, adapter, tmp_path / "out", config=read_model_config(base), check_logits=False)
    assert (_logits(_load(tmp_path / "out").eval()) - _logits(_attached(base, adapter))).abs().max() <= 1e-12


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_resized_adapter_is_loaded_on_a_base_whose_new_rows_were_drawn_anew(family: str, tmp_path: Path) -> None:
    _, base, adapter = _make(tmp_path, family, is_resized=True, modules_to_save=_BOTH)
    tensors = load_file(adapter / WEIGHTS_FILE)
    assert f"{PREFIX}lm_head.modules_to_save.weight" in tensors  # written three times
    blueprint = make_blueprint(base, Topology(), BaseOptions(dtype=torch.float64))
    planned = plan_folder(blueprint.model, blueprint.plan, adapter)
    _, trained = read_factors(planned, blueprint.plan)
    assert {*trained} == {"model.embed_tokens.weight", "lm_head.weight"}
    for name, value in trained.items():
        assert torch.equal(value, tensors[f"{PREFIX}{name}"])
    model = load_without_proof(base, topology=Topology(), dtype=torch.float64, adapter=adapter, device="cpu")
    assert (_logits(model.eval()) - _logits(_attached(base, adapter))).abs().max() <= 1e-12


@pytest.mark.parametrize("form", ["resized, neither trained", "resized and tied, embedding trained"])
def test_rows_of_a_base_that_peft_would_put_there_are_not_passed_over(form: str, tmp_path: Path) -> None:
    family, is_resized, lora = _FORMS[form]
    _, base, adapter = _make(tmp_path, family, is_resized=is_resized, **lora)
    if family == "gemma":
        _drop_repeated_head(adapter)
    options = {"topology": Topology(), "dtype": torch.float64, "adapter": adapter, "device": "cpu"}
    with pytest.raises(UserError, match=r"not the weight of this model, and PEFT would put it there.*meshlora merge"):
        load_without_proof(base, **options)
    model = load_without_proof(tmp_path / "trained_on", **options)
    assert (_logits(model.eval()) - _logits(_attached(base, adapter))).abs().max() <= 1e-12


@pytest.mark.parametrize("form", ["resized, both trained", "resized, LoRA on both"])
def test_base_of_another_vocabulary_is_named_as_that_and_grows_where_a_command_has_both(
    form: str, tmp_path: Path
) -> None:
    family, is_resized, lora = _FORMS[form]
    published, base, adapter = _make(tmp_path, family, is_resized=is_resized, **lora)
    words = (f"made on a vocabulary of {_MORE_ROWS} rows, this base has {_ROWS}", f"embeddings({_MORE_ROWS})")
    with pytest.raises(UserError, match=words[0]) as caught:
        merge(published, adapter, tmp_path / "out", config=read_model_config(published))
    assert words[1] in str(caught.value)
    assert not (tmp_path / "out").exists()
    line = ["--model", str(published), "--adapter", str(adapter), "--out", str(tmp_path / "grown")]
    assert main(["merge", *line]) == 0
    assert len(_load(tmp_path / "grown").get_input_embeddings().weight) == _MORE_ROWS
    with pytest.raises(UserError, match=words[0]):
        make_blueprint(published, Topology(), BaseOptions(dtype=torch.float64)).with_folder(adapter)
    larger = _load(base)
    larger.resize_token_embeddings(_MORE_ROWS + 16)
    larger.save_pretrained(tmp_path / "larger")
    with pytest.raises(UserError, match=f"{_MORE_ROWS} rows, this base has {_MORE_ROWS + 16}; give the base"):
        merge(tmp_path / "larger", adapter, tmp_path / "out", config=read_model_config(tmp_path / "larger"))


def test_rows_past_the_end_of_a_vocabulary_are_named_as_that(tmp_path: Path) -> None:
    form = {"trainable_token_indices": [_MORE_ROWS - 1]}
    published, _, adapter = _make(tmp_path, "llama", is_resized=True, **form)
    with pytest.raises(UserError, match=f"at least {_MORE_ROWS} rows, this base has {_ROWS}; make such a base"):
        merge(published, adapter, tmp_path / "out", config=read_model_config(published))


@for_each("value", [[], [1, 1], [-1], [True], ["a"], "7", 7, {}, {"embed_tokens": []}, {"lm_head": 7}])
def test_rows_that_are_no_token_ids_are_refused(value: Any) -> None:
    config = LoraConfig(target_modules=["q_proj"])
    config.trainable_token_indices = value
    with pytest.raises(UserError, match="trainable_token_indices"):
        check_values(config)


# What is put around a model, or left away, as the names in people's files show it.
_WRAPPED: dict[str, Callable[[str], str]] = {
    "DistributedDataParallel": lambda key: f"module.{key}",
    "DistributedDataParallel inside": lambda key: key.replace(PREFIX, f"{PREFIX}module."),
    "torch.compile": lambda key: f"_orig_mod.{key}",
    "torch.compile of layers": lambda key: key.replace(".self_attn.", "._orig_mod.self_attn."),
    "both": lambda key: f"module._orig_mod.{key}",
    "FSDP": lambda key: f"_fsdp_wrapped_module.{key}".replace(".layers.0.", ".layers.0._fsdp_wrapped_module."),
    "checkpointing": lambda key: key.replace(".layers.1.", ".layers.1._checkpoint_wrapped_module."),
    "no prefix": lambda key: key.removeprefix(PREFIX),
    "prefix twice": lambda key: f"{PREFIX}{key}",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a base, an adapter on it)."""
    _, base, adapter = _make(tmp_path_factory.mktemp("plain"), "llama", is_resized=False, modules_to_save=["lm_head"])
    return base, adapter


@for_each("wrapper", _WRAPPED)
def test_names_of_wrappers_are_taken_off(wrapper: str, plain: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = plain
    tensors = load_file(adapter / WEIGHTS_FILE)
    wrapped = {_WRAPPED[wrapper](key): tensor for key, tensor in tensors.items()}
    assert wrapped.keys() != tensors.keys()
    shutil.copytree(adapter, tmp_path / "adapter")
    save_file(wrapped, tmp_path / "adapter" / WEIGHTS_FILE)
    found = read_adapter_tensors(tmp_path / "adapter" / WEIGHTS_FILE)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    make_blueprint(base, Topology(), BaseOptions(dtype=torch.float64)).with_folder(tmp_path / "adapter")
    if wrapper != "both":
        return
    merge(base, tmp_path / "adapter", tmp_path / "out", config=read_model_config(base))
    assert (_logits(_load(tmp_path / "out").eval()) - _logits(_attached(base, adapter))).abs().max() <= 1e-12


def test_two_tensors_of_one_name_are_refused() -> None:
    key = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
    with pytest.raises(UserError, match=r"module\..*: without the names of wrappers it is base_model.*in the file too"):
        names_of(Path(WEIGHTS_FILE), [f"module.{key}", key])


def test_what_matches_nothing_is_said_in_the_same_words(plain: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = plain
    shutil.copytree(adapter, tmp_path / "adapter")
    more = load_file(adapter / WEIGHTS_FILE) | {f"{PREFIX}model.layers.9.q_proj.lora_A.weight": torch.ones(1)}
    save_file(more, tmp_path / "adapter" / WEIGHTS_FILE)
    words = "1 of its tensors have no place in this model, first .*layers.9"
    with pytest.raises(UserError, match=words):
        merge(base, tmp_path / "adapter", tmp_path / "out", config=read_model_config(base))
    with pytest.raises(UserError, match=words):
        make_blueprint(base, Topology(), BaseOptions(dtype=torch.float64)).with_folder(tmp_path / "adapter")
