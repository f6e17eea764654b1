"""A merged checkpoint has the logits of model + adapter in transformers + peft, for every kind of adapter."""

from __future__ import annotations

import functools
import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter

import meshlora
from meshlora.cli.main import main
from meshlora.loading.blueprint import read_model_config
from meshlora.model.stream import write_stream
from meshlora.verify.pool import _context as started_from
from meshlora_extra.merging import merge as merge_module
from meshlora_extra.merging.merge import merge
from meshlora_ground.errors import MeshloraError
from meshlora_ground.weight_files import INDEX
from meshlora_judge.inputs import write_adapter, write_twin
from meshlora_judge.twin import twin_config
from tests.for_each import for_each
from tests.peft_adapters import make_base, save_adapter, with_adapter

IDS = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(5))
LINEAR = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def make_adapter(model: Path, folder: Path, **lora: Any) -> Path:
    return save_adapter(load(model), folder, **{"lora_alpha": 12} | lora)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(input_ids=IDS).logits
    return out


def peft_logits(model: Path, adapter: Path) -> Tensor:
    return logits(with_adapter(load(model), adapter))


def assert_merged(model: Path, adapter: Path, out: Path, *, base: Tensor | None = None, **options: Any) -> None:
    """base: the logits of the model, where they are known."""
    merge(model, adapter, out, config=read_model_config(model), check_logits=False, **options)
    expected, base = peft_logits(model, adapter), logits(load(model)) if base is None else base
    assert (expected - base).abs().max() > 1e-2  # the adapter does something
    assert (logits(load(out)) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


RENAMED: dict[str, tuple[dict[str, Any], str]] = {
    "laguna": ({"target_modules": ["q_proj", "up_proj", "down_proj"]}, ".mlp.shared_expert."),
    "mistral_large4": (
        {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        ".layers.1.experts.",
    ),
}


@for_each("family", RENAMED)
def test_names_that_peft_changes_on_loading_are_read_as_it_reads_them(family: str, tmp_path: Path) -> None:
    lora, written = RENAMED[family]
    model = tmp_path / "model"
    write_twin(twin_config(family), model, dtype=torch.float32, seed=0)
    write_adapter(model, {"r": 4, "lora_alpha": 12} | lora, tmp_path / "adapter", seed=0, trust_remote_code=False)
    assert any(written in key for key in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    merged = merge(model, tmp_path / "adapter", tmp_path / "out", config=read_model_config(model))
    assert "logits of transformers + peft: relative difference" in merged.check


@pytest.mark.parametrize("projections", [("gate_proj",), ("gate_proj", "up_proj", "down_proj")])
def test_single_experts_are_refused_in_words_before_peft_joins_them(
    projections: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, adapter = make_base(tmp_path / "model", "qwen3_moe"), tmp_path / "adapter"
    make_adapter(model, adapter, target_modules=["q_proj"])
    of_experts = {}
    for leaf in projections:
        for side, shape in (("A", (4, 8)), ("B", (8, 4))):
            of_experts[f"base_model.model.model.layers.1.mlp.experts.0.{leaf}.lora_{side}.weight"] = torch.ones(shape)
    save_file(of_experts, adapter / "adapter_model.safetensors")
    capfd.readouterr()
    assert main(["merge", "--model", str(model), "--adapter", str(adapter), "--out", str(tmp_path / "out")]) == 2
    assert "single experts" in one_error(*capfd.readouterr())


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": "all-linear"}),
    "gpt2_conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "gpt2_dora": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "gpt2_embedding": ("gpt2", {"target_modules": ["wte", "c_attn"]}),
    "qwen2_biases": ("qwen2", {"target_modules": LINEAR, "bias": "all"}),
    "lora_only_biases": ("qwen2", {"target_modules": ["q_proj", "k_proj"], "bias": "lora_only"}),
    "lora_bias": ("qwen2", {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
    "phi3_fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
    "dora": ("llama", {"target_modules": LINEAR, "use_dora": True}),
    "rslora_and_patterns": (
        "llama",
        {
            "target_modules": LINEAR,
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6},
            "alpha_pattern": {"v_proj": 5},
            "layers_to_transform": [1],
        },
    ),
    "head": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens"]}),
    "embedding_dora": ("llama", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "modules_to_save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "block_saved": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["0.mlp"]}),
    "tied_embedding": ("gemma", {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied_head": ("gemma", {"target_modules": ["lm_head", "q_proj"]}),
    "tied_both": ("gemma", {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied_neither": ("gemma", {"target_modules": ["q_proj"]}),
    "tied_head_saved": ("gemma", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tied_embedding_saved": ("gemma", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "tied_embedding_and_head_saved": ("gemma", {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]}),
    "tied_on_purpose": ("gemma", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "tied_saved_on_purpose": (
        "gemma",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tied_scaled_embedding_dora": ("gemma3_text", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "pissa": ("llama", {"target_modules": LINEAR, "init_lora_weights": "pissa"}),
    "pissa_conv1d": ("gpt2", {"target_modules": ["c_attn"], "init_lora_weights": "pissa"}),
    "olora": ("llama", {"target_modules": LINEAR, "init_lora_weights": "olora"}),
    "orthogonal": ("llama", {"target_modules": LINEAR, "init_lora_weights": "orthogonal"}),
    "mica": ("llama", {"target_modules": LINEAR, "init_lora_weights": "mica"}),
}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor]]:
    """`model_of(family)`: its model, made once, and the model's logits."""

    @functools.cache
    def made(family: str) -> tuple[Path, Tensor]:
        model = make_base(tmp_path_factory.mktemp(family), family)
        return model, logits(load(model))

    return made


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_model_and_adapter(
    kind: str, model_of: Callable[[str], tuple[Path, Tensor]], tmp_path: Path
) -> None:
    family, lora = KINDS[kind]
    model, base = model_of(family)
    adapter = make_adapter(model, tmp_path / "adapter", **lora)
    assert_merged(model, adapter, tmp_path / "out", base=base)


def one_error(out: str, err: str) -> str:
    assert out == ""
    assert err.startswith("error: "), err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1, err
    return err


def test_shards_stay_as_they_are(tmp_path: Path) -> None:
    model = make_base(tmp_path / "model", "llama", shard="60KB")
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=LINEAR)
    assert_merged(model, adapter, tmp_path / "out")
    files = sorted(p.name for p in model.glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == files
    before, after = (json.loads((folder / INDEX).read_text()) for folder in (model, tmp_path / "out"))
    assert after["weight_map"] == before["weight_map"]
    assert after["metadata"] == before["metadata"]
    for file in files:
        theirs, ours = load_file(model / file), load_file(tmp_path / "out" / file)
        assert all(torch.equal(ours[k], theirs[k]) != any(f"{part}.weight" in k for part in LINEAR) for k in theirs)


def test_untied_head_of_a_sharded_model_is_in_the_index(tmp_path: Path) -> None:
    model = make_base(tmp_path / "model", "gemma", shard="60KB")
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=["lm_head"])
    assert_merged(model, adapter, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert config["tie_word_embeddings"] is False
    assert index["weight_map"]["lm_head.weight"] == index["weight_map"]["model.embed_tokens.weight"]
    embeddings = [load_file(f / index["weight_map"]["model.embed_tokens.weight"]) for f in (model, tmp_path / "out")]
    assert torch.equal(*(tensors["model.embed_tokens.weight"] for tensors in embeddings))


@pytest.mark.parametrize("kind", ["tied_neither", "tied_on_purpose", "tied_saved_on_purpose"])
def test_what_is_changed_alike_stays_tied(
    kind: str, model_of: Callable[[str], tuple[Path, Tensor]], tmp_path: Path
) -> None:
    family, lora = KINDS[kind]
    model, _ = model_of(family)
    adapter = make_adapter(model, tmp_path / "adapter", **lora)
    assert not merge(model, adapter, tmp_path / "out", config=read_model_config(model), check_logits=False).is_untied
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_tied_weights_that_are_scaled_apart_are_untied(tmp_path: Path) -> None:
    """The same factors on the embedding and, the other way round, on the head, which has another alpha."""
    model = make_base(tmp_path / "model", "gemma")
    lora = {"target_modules": ["embed_tokens", "lm_head"], "alpha_pattern": {"lm_head": 3}}
    file = make_adapter(model, tmp_path / "adapter", **lora) / "adapter_model.safetensors"
    tensors = load_file(file)
    for side, other in ("AB", "BA"):
        own = tensors[f"base_model.model.model.embed_tokens.lora_embedding_{side}"]
        tensors[f"base_model.model.lm_head.lora_{other}.weight"] = own.T.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    assert_merged(model, file.parent, tmp_path / "out")


def test_keys_of_old_checkpoints_are_kept(tmp_path: Path) -> None:
    """GPT-2 on the hub has no `transformer.` in its keys, and causal masks that nobody reads."""
    model = make_base(tmp_path / "model", "gpt2")
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=["c_attn", "wte"])
    tensors = load_file(model / "model.safetensors")
    old = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    save_file(old, model / "model.safetensors", metadata={"format": "pt"})
    assert_merged(model, adapter, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == old.keys() | {"lm_head.weight"}


def test_update_of_a_concatenation_goes_to_its_parts(tmp_path: Path) -> None:
    """A checkpoint that stores q, k and v for a model that has one matrix; transformers concatenates on load."""
    pieces = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    join = WeightConverter(pieces, "self_attn.qkv_proj.weight", [Concatenate(dim=0)])
    before = conversion_mapping.get_checkpoint_conversion_mapping("phi3")
    conversion_mapping.register_checkpoint_conversion_mapping("phi3", [join], overwrite=True)
    try:
        model = make_base(tmp_path / "model", "phi3")
        whole = load_file(model / "model.safetensors")
        for key in [key for key in whole if "qkv_proj" in key]:
            sizes = (64, 32, 32)
            whole |= {
                key.replace("qkv", name): part.clone()
                for name, part in zip("qkv", whole.pop(key).split(sizes), strict=True)
            }
        save_file(whole, model / "model.safetensors", metadata={"format": "pt"})
        for kind, lora in (("plain", {}), ("dora", {"use_dora": True})):
            adapter = make_adapter(model, tmp_path / kind, target_modules=["qkv_proj", "o_proj"], **lora)
            assert_merged(model, adapter, tmp_path / f"out_{kind}")
            assert load_file(tmp_path / f"out_{kind}" / "model.safetensors").keys() == whole.keys()
    finally:
        if before is None:
            conversion_mapping._checkpoint_conversion_mapping_cache.pop("phi3")
        else:
            conversion_mapping.register_checkpoint_conversion_mapping("phi3", before, overwrite=True)


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    model = make_base(tmp_path / "model", "llama", dtype=torch.bfloat16)
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=["q_proj"])
    done = merge(model, adapter, tmp_path / "out", config=read_model_config(model))
    assert "relative difference" in done.check
    name = "model.layers.1.self_attn.q_proj"
    base, ours = (load_file(f / "model.safetensors")[f"{name}.weight"] for f in (model, tmp_path / "out"))
    lora = load_file(adapter / "adapter_model.safetensors")
    a, b = (lora[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, (base.double() + 3 * b @ a).float().bfloat16())


def test_float64_is_merged_in_float64(tmp_path: Path) -> None:
    """transformers + peft run models of float64, and their comparison lets the rounding of float32 pass."""
    model = make_base(tmp_path / "model", "llama", dtype=torch.float64)
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=["q_proj"])
    merge(model, adapter, tmp_path / "out", config=read_model_config(model), check_logits=False)
    name = "model.layers.1.self_attn.q_proj"
    base, ours = (load_file(f / "model.safetensors")[f"{name}.weight"] for f in (model, tmp_path / "out"))
    lora = load_file(adapter / "adapter_model.safetensors")
    a, b = (lora[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
    assert (ours - (base + 3 * b @ a)).norm() <= 1e-15 * ours.norm()


def test_dtype_is_that_of_the_weights_and_of_config(tmp_path: Path) -> None:
    model = make_base(tmp_path / "model", "llama", dtype=torch.bfloat16)
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=["q_proj"])
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "tokenizer.json").write_text("{}")
    line = ["merge", "--model", str(model), "--adapter", str(adapter), "--out", str(tmp_path / "out")]
    assert main([*line, "--dtype", "float32"]) == 0
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in model.iterdir()}
    expected = peft_logits(model, adapter)
    assert (logits(load(tmp_path / "out")) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


# What goes wrong.


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    make_base(folder / "model", "llama", shard="60KB")
    make_adapter(folder / "model", folder / "adapter", target_modules=["q_proj", "up_proj"])
    make_base(folder / "other", "llama", hidden_size=32)
    return folder


def edit_config(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "adapter" / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


def edit_tensors(edit: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "adapter" / "adapter_model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return apply


def pickled(folder: Path) -> None:
    (folder / "adapter" / "adapter_model.safetensors").rename(folder / "adapter" / "adapter_model.bin")


def not_finite(tensors: dict[str, Tensor]) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


MISTAKES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "adapter_missing": (lambda f: (f / "adapter").rename(f / "away"), ("adapter", "no such folder")),
    "model_missing": (lambda f: (f / "model").rename(f / "away"), ("model", "no such folder")),
    "out_is_there": (lambda f: (f / "out").mkdir(), ("--out", "there already", "overwritten")),
    "pickled": (pickled, ("adapter_model.bin", "weights_only=True")),
    "shard_missing": (lambda f: next((f / "model").glob("*-00002-*")).unlink(), ("not in the folder",)),
    "another_model": (
        lambda f: ((f / "model").rename(f / "away"), (f / "other").rename(f / "model")),
        ("shape", "another model"),
    ),
    "no_such_module": (edit_config(target_modules=["c_attn"]), ("peft cannot attach", "c_attn")),
    "another_rank": (edit_config(r=5), ("shape", "[5, 64]")),
    "tensor_missing": (edit_tensors(lambda t: t.pop(next(iter(t)))), ("lacks 1 of 8",)),
    "tensor_too_many": (edit_tensors(lambda t: t.update(x=torch.ones(1))), ("no place", "first x")),
    "not_finite": (edit_tensors(not_finite), ("not finite",)),
    "not_lora": (edit_config(peft_type="IA3"), ("IA3",)),
    "pissa_by_random_svd": (edit_config(init_lora_weights="pissa_niter_4"), ("pissa_niter_4", "plain adapter")),
    "corda": (edit_config(init_lora_weights="corda"), ("corda", "cannot be merged")),
    "lora_ga": (edit_config(init_lora_weights="lora_ga"), ("lora_ga", "cannot be rebuilt")),
    "loftq": (edit_config(init_lora_weights="loftq"), ("adapter_config.json",)),
    "token_indices": (edit_config(trainable_token_indices=[1]), ("lacks 1 of 9", "trainable_tokens_delta")),
    "layer_replication": (edit_config(layer_replication=[[0, 2]]), ("layer_replication",)),
    "another_task": (edit_config(task_type="SEQ_CLS"), ("SEQ_CLS",)),
    "bias_that_is_not_there": (edit_config(lora_bias=True), ("lora_bias", "has no bias")),
}


@for_each("name", MISTAKES)
def test_mistake_leaves_one_line_and_no_file(
    name: str, good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "case"
    shutil.copytree(good, folder)
    make, words = MISTAKES[name]
    make(folder)
    before = sorted(folder.rglob("*"))
    capfd.readouterr()
    line = ["--model", str(folder / "model"), "--adapter", str(folder / "adapter"), "--out", str(folder / "out")]
    assert main(["merge", *line]) == 2
    message = one_error(*capfd.readouterr())
    assert not [word for word in words if word not in message], message
    assert sorted(folder.rglob("*")) == before


def test_lora_on_an_embedding_with_a_norm_inside_is_merged_nowhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is added after the norm, and the norm of a sum is another model."""
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    write_twin(twin_config("muse_glimmer", tie_word_embeddings=False), model, dtype=torch.float32, seed=0)
    write_adapter(model, {"target_modules": ["embed_tokens"]}, adapter, seed=0, trust_remote_code=False)
    capfd.readouterr()
    assert main(["merge", "--model", str(model), "--adapter", str(adapter), "--out", str(tmp_path / "out")]) == 2
    assert "a norm inside the embedding" in one_error(*capfd.readouterr())
    ours = meshlora.load(model, adapter=adapter, device="cpu")
    with pytest.raises(meshlora.UnsupportedError, match=r"merge into .*a norm inside the embedding"):
        meshlora.merge(ours)


@pytest.mark.parametrize(
    ("fault", "raised"),
    [(OSError(28, "No space left on device"), MeshloraError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_merge_that_ends_early_leaves_nothing(
    fault: BaseException, raised: type, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(path: Path, *arguments: Any) -> dict[str, str]:
        if "00003" in path.name:
            raise fault
        return write_stream(path, *arguments)

    monkeypatch.setattr(merge_module, "write_stream", end)
    with pytest.raises(raised, match="No space left" if raised is MeshloraError else None):
        merge(good / "model", good / "adapter", tmp_path / "out", config=read_model_config(good / "model"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_head_that_is_stored_too_is_merged_on_its_own(change: float, tmp_path: Path) -> None:
    model = make_base(tmp_path / "model", "gemma")
    tensors = load_file(model / "model.safetensors")
    twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + change}
    save_file(twice, model / "model.safetensors", metadata={"format": "pt"})
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=["lm_head"])
    assert_merged(model, adapter, tmp_path / "out")


def flip_a_bit(path: Path, *arguments: Any) -> dict[str, str]:
    meant = write_stream(path, *arguments)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return meant


def swallow_the_update(weight: Tensor, *arguments: Any) -> Tensor:
    return weight


@pytest.mark.parametrize(
    ("part", "fault", "words"),
    [
        ("write_stream", flip_a_bit, "read back, it differs"),
        ("merged_weight", swallow_the_update, "logits differ"),
        ("merged_weight", lambda w, lora, a, b, m: w + 1.01 * lora.scaling * b @ a, "logits differ"),
        ("_index", lambda outputs: {"metadata": {}, "weight_map": {}}, "lacks"),
    ],
)
def test_what_is_not_what_was_meant_is_not_left(
    part: str, fault: Any, words: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_module, part, fault)
    with pytest.raises(MeshloraError, match=words):
        merge(good / "model", good / "adapter", tmp_path / "out", config=read_model_config(good / "model"))
    assert not list(tmp_path.iterdir())


def more_bytes_of_a_merge(folder: str, results: Any) -> None:
    """In a process of its own: what the largest size is above the size before."""

    def run(end: str) -> None:
        model, adapter, out = (Path(folder) / f"{name}{end}" for name in ("model", "adapter", "out"))
        merge(model, adapter, out, config=read_model_config(model), check_logits=False)

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    torch.set_num_threads(1)
    run("_small")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before = status("VmRSS")
    run("")
    results.put(status("VmHWM") - before)


def test_peak_memory_is_below_one_shard(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "vocab_size": 512, "num_hidden_layers": 8}
    model = make_base(tmp_path / "model", "llama", shard="40MB", **sizes)
    make_adapter(model, tmp_path / "adapter", target_modules=LINEAR)
    make_adapter(make_base(tmp_path / "model_small", "llama"), tmp_path / "adapter_small", target_modules=LINEAR)
    shards = [p.stat().st_size for p in model.glob("*.safetensors")]
    assert len(shards) > 1
    context, _ = started_from("cpu")
    results = context.SimpleQueue()
    process = context.Process(target=more_bytes_of_a_merge, args=(str(tmp_path), results))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0
    extra = results.get()
    assert 0 < extra < max(shards) / 2, (extra, max(shards))
