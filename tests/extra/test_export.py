"""Adapters in PEFT's and in microsoft/LoRA's form: the same update of the weights, both ways, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2LMHeadModel

import meshlora
from meshlora.cli.main import main
from meshlora_extra.paper import export as export_module
from meshlora_extra.paper.export import export, import_loralib
from meshlora_ground.errors import MeshloraError, UnsupportedError, UserError
from tests.extra.test_merge import assert_merged, make_adapter, one_error, peft_logits
from tests.peft_adapters import make_base

HIDDEN, R = 64, 4


def make_pieces(model: Path, folder: Path, enabled: tuple[bool, bool, bool] = (True, False, True)) -> Path:
    """An adapter on pieces of GPT-2's c_attn = [Q|K|V], in block form."""
    k = sum(enabled)
    names = [name for name, on in zip("qkv", enabled, strict=True) if on]
    lora = {
        "target_modules": ["c_attn"],
        "r": R,
        "rank_pattern": {"c_attn": k * R},
        "alpha_pattern": {"c_attn": k * 12},
    }
    make_adapter(model, folder, **lora)
    tensors = load_file(folder / "adapter_model.safetensors")
    for key in [key for key in tensors if "lora_B" in key]:
        mask = torch.zeros_like(tensors[key])
        for j, name in enumerate(names):
            start = "qkv".index(name) * HIDDEN
            mask[start : start + HIDDEN, j * R : (j + 1) * R] = 1
        tensors[key] = tensors[key] * mask
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "meshlora.json").write_text(json.dumps({"pieces": {"c_attn": names}}))
    return folder


def merged_linear(a: Tensor, b: Tensor, enable_lora: list[bool]) -> Tensor:
    """`MergedLinear.merge_AB` of microsoft/LoRA (loralib/layers.py), written out: the update `[out, in]` over s."""
    delta = F.conv1d(a.unsqueeze(0), b.unsqueeze(-1), groups=sum(enable_lora)).squeeze(0)
    size = b.shape[0] // sum(enable_lora)
    rows = torch.zeros(len(enable_lora), size, dtype=torch.bool)
    rows[torch.tensor(enable_lora)] = True
    whole = torch.zeros(len(enable_lora) * size, a.shape[1])
    whole[rows.view(-1)] = delta
    return whole


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("gpt2") / "model", "gpt2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.mark.parametrize("enabled", [(True, False, True), (True, True, True), (False, True, False)])
def test_pieces_become_a_merged_linear_with_the_same_update(
    enabled: tuple[bool, bool, bool], gpt2: Path, tmp_path: Path
) -> None:
    adapter = make_pieces(gpt2, tmp_path / "adapter", enabled)
    assert main(["export", str(adapter), "--layout", "loralib", "--out", str(tmp_path / "lora.safetensors")]) == 0
    state, ours = load_file(tmp_path / "lora.safetensors"), load_file(adapter / "adapter_model.safetensors")
    with safe_open(tmp_path / "lora.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["loralib"])
    k = sum(enabled)
    assert (metadata["r"], metadata["lora_alpha"]) == (R, 12)
    for layer in range(2):
        module = f"transformer.h.{layer}.attn.c_attn"
        a, b = state[f"{module}.lora_A"], state[f"{module}.lora_B"]
        assert (a.shape, b.shape) == ((R * k, HIDDEN), (HIDDEN * k, R))
        assert metadata["enable_lora"][module] == list(enabled)
        expected = ours[f"base_model.model.{module}.lora_B.weight"] @ ours[f"base_model.model.{module}.lora_A.weight"]
        torch.testing.assert_close(merged_linear(a, b, list(enabled)), expected, rtol=1e-6, atol=1e-7)
    assert (
        main(["export", str(tmp_path / "lora.safetensors"), "--layout", "peft", "--out", str(tmp_path / "back")]) == 0
    )
    back = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[key], ours[key]) for key in ours)
    assert torch.equal(peft_logits(gpt2, tmp_path / "back"), peft_logits(gpt2, adapter))
    assert (tmp_path / "back" / "meshlora.json").exists()


def test_plain_adapter_with_patterns_and_biases_survives_both_ways(tmp_path: Path) -> None:
    model = make_base(tmp_path / "model", "qwen2")
    adapter = make_adapter(
        model,
        tmp_path / "adapter",
        target_modules=["q_proj", "k_proj", "up_proj"],
        use_rslora=True,
        rank_pattern={"k_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 3},
        bias="lora_only",
    )
    export(adapter, tmp_path / "lora.safetensors", "loralib")
    state = load_file(tmp_path / "lora.safetensors")
    assert state["model.layers.0.self_attn.k_proj.lora_A"].shape[0] == 2
    assert "model.layers.0.self_attn.q_proj.bias" in state
    import_loralib(tmp_path / "lora.safetensors", tmp_path / "back")
    expected = peft_logits(model, adapter)
    assert (peft_logits(model, tmp_path / "back") - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_embedding_survives_both_ways(llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter", target_modules=["embed_tokens", "q_proj"])
    export(adapter, tmp_path / "lora.safetensors", "loralib")
    import_loralib(tmp_path / "lora.safetensors", tmp_path / "back")
    assert torch.equal(peft_logits(llama, tmp_path / "back"), peft_logits(llama, adapter))


def test_file_of_microsoft_lora_needs_alpha_and_pieces(gpt2: Path, tmp_path: Path) -> None:
    adapter = make_pieces(gpt2, tmp_path / "adapter")
    export(adapter, tmp_path / "ours.safetensors", "loralib")
    theirs = tmp_path / "theirs.safetensors"
    save_file(load_file(tmp_path / "ours.safetensors"), theirs)
    with pytest.raises(UserError, match="--lora-alpha"):
        import_loralib(theirs, tmp_path / "back")
    with pytest.raises(UserError, match="--enable-lora"):
        import_loralib(theirs, tmp_path / "back", lora_alpha=12)
    line = ["export", str(theirs), "--layout", "peft", "--out", str(tmp_path / "back")]
    assert main([*line, "--lora-alpha", "12", "--enable-lora", "1,0,1"]) == 0
    assert torch.equal(peft_logits(gpt2, tmp_path / "back"), peft_logits(gpt2, adapter))


def test_peft_layout_drops_our_file_and_changes_no_tensor(gpt2: Path, tmp_path: Path) -> None:
    adapter = make_pieces(gpt2, tmp_path / "adapter")
    export(adapter, tmp_path / "plain", "peft")
    assert sorted(p.name for p in (tmp_path / "plain").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert torch.equal(peft_logits(gpt2, tmp_path / "plain"), peft_logits(gpt2, adapter))
    export(tmp_path / "plain", tmp_path / "again", "peft")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_pieces_merge_as_any_adapter_does(gpt2: Path, tmp_path: Path) -> None:
    assert_merged(gpt2, make_pieces(gpt2, tmp_path / "adapter"), tmp_path / "out")


def test_adapter_that_is_not_zero_outside_of_its_pieces_is_none_of_loralib(gpt2: Path, tmp_path: Path) -> None:
    adapter = make_pieces(gpt2, tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key][HIDDEN, 0] = 1
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="not zero outside"):
        export(adapter, tmp_path / "out.safetensors", "loralib")
    # PEFT does not know of pieces: to it this is one more adapter.
    assert export(adapter, tmp_path / "out", "peft") == len(tensors)
    assert not (tmp_path / "out" / "meshlora.json").exists()


def test_pieces_in_any_order_and_of_any_layout_are_plain_to_peft(gpt2: Path, tmp_path: Path) -> None:
    adapter = make_pieces(gpt2, tmp_path / "adapter")
    (adapter / "meshlora.json").write_text('{"pieces": {"c_attn": ["v", "q"]}}', encoding="utf-8")
    export(adapter, tmp_path / "out", "peft")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(
        torch.equal(value, written[key]) for key, value in load_file(adapter / "adapter_model.safetensors").items()
    )


def test_interleaved_pieces_are_not_for_loralib(gpt2: Path, tmp_path: Path) -> None:
    adapter = make_pieces(gpt2, tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key in [key for key in tensors if "lora_B" in key]:
        whole = tensors[key]
        # [Q|K|V] -> q k v q k v …
        tensors[key] = whole.view(3, HIDDEN, -1).transpose(0, 1).reshape(whole.shape).contiguous()
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    export(adapter, tmp_path / "plain", "peft")
    with pytest.raises(UserError, match="not zero outside"):
        export(adapter, tmp_path / "lora.safetensors", "loralib")


@pytest.mark.parametrize(
    ("lora", "word"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ],
)
def test_what_loralib_does_not_know_is_refused(lora: dict[str, Any], word: str, llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter", target_modules=["q_proj"], **lora)
    with pytest.raises(UnsupportedError, match=word):
        export(adapter, tmp_path / "lora.safetensors", "loralib")


def test_file_that_reads_back_differently_is_not_left(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter", target_modules=["q_proj"])
    honest = export_module.save_file

    def lossy(tensors: dict[str, Tensor], *arguments: Any, **options: Any) -> None:
        honest({key: tensor.half().float() for key, tensor in tensors.items()}, *arguments, **options)

    monkeypatch.setattr(export_module, "save_file", lossy)
    monkeypatch.setattr("meshlora.adapter.formats.peft_format.save_file", lossy)
    before = sorted(tmp_path.rglob("*"))
    for layout, out in (("peft", "out"), ("loralib", "out.safetensors")):
        with pytest.raises(MeshloraError, match="read back"):
            export(adapter, tmp_path / out, layout)
        assert sorted(tmp_path.rglob("*")) == before


def test_mistakes_say_what_to_do(llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter", target_modules=["q_proj"])
    export(adapter, tmp_path / "lora.safetensors", "loralib")
    torch.save(load_file(tmp_path / "lora.safetensors"), tmp_path / "lora.bin")
    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "lora.safetensors").read_bytes()[:-40])
    new, lora = str(tmp_path / "new"), str(tmp_path / "lora.safetensors")
    cases: list[tuple[list[str], tuple[str, ...]]] = [
        ([str(tmp_path / "nowhere"), "--layout", "peft", "--out", new], ("nowhere", "no such folder")),
        ([str(adapter), "--layout", "peft", "--out", str(adapter)], ("there already",)),
        ([str(adapter), "--layout", "loralib", "--out", new], (".safetensors",)),
        ([str(adapter), "--layout", "loralib", "--out", lora], ("there already",)),
        ([str(adapter), "--layout", "peft", "--out", new, "--lora-alpha", "3"], ("--lora-alpha", "leave out")),
        ([str(tmp_path / "lora.bin"), "--layout", "peft", "--out", new], ("lora.bin", "--model")),
        ([str(tmp_path / "other.safetensors"), "--layout", "peft", "--out", new, "--lora-alpha", "3"], ("lora_A",)),
        ([str(tmp_path / "cut.safetensors"), "--layout", "peft", "--out", new], ("damaged",)),
        ([lora, "--layout", "loralib", "--out", new], ("--layout peft",)),
        ([lora, "--layout", "peft", "--out", new, "--enable-lora", "q"], ("--enable-lora", "1,0,1")),
        ([lora, "--layout", "peft", "--out", new, "--lora-alpha", "-1"], ("lora_alpha", "above 0")),
    ]
    capfd.readouterr()
    for line, words in cases:
        before = sorted(tmp_path.rglob("*"))
        assert main(["export", *line]) == 2, line
        message = one_error(*capfd.readouterr())
        assert not [word for word in words if word not in message], message
        assert sorted(tmp_path.rglob("*")) == before


def _renamed(file: Path, out: Path, name: Callable[[str], str]) -> Path:
    """The lora_state_dict `file` with other names, and its metadata."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file({name(key): tensor for key, tensor in load_file(file).items()}, out, metadata=metadata)
    return out


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_of_a_wrapped_model_would_load_as_an_adapter_that_does_nothing(
    prefix: str, llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter", target_modules=["q_proj", "embed_tokens"])
    export(adapter, tmp_path / "lora.safetensors", "loralib")
    wrapped = _renamed(tmp_path / "lora.safetensors", tmp_path / "wrapped.safetensors", lambda key: prefix + key)
    line = ["export", str(wrapped), "--layout", "peft", "--out", str(tmp_path / "back"), "--model", str(llama)]
    assert main(line) == 0
    assert f"all names began with {prefix} " in capfd.readouterr().out
    assert torch.equal(peft_logits(llama, tmp_path / "back"), peft_logits(llama, adapter))


def test_names_that_the_model_has_not_are_refused(
    llama: Path, gpt2: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter", target_modules=["q_proj"], bias="none")
    export(adapter, tmp_path / "lora.safetensors", "loralib")
    lora = tmp_path / "lora.safetensors"
    layer = "model.layers.0.self_attn.q_proj"
    narrow = load_file(lora) | {f"{layer}.lora_A": torch.ones(4, HIDDEN - 1)}
    save_file(narrow, tmp_path / "narrow.safetensors")
    save_file(load_file(lora) | {f"{layer}.bias": torch.ones(HIDDEN)}, tmp_path / "biased.safetensors")
    changes: dict[str, tuple[Callable[[str], str], Path, str]] = {
        "one": (
            lambda key: key.replace("model.layers.0", "module.model.layers.0"),
            llama,
            "around a part of the model",
        ),
        "part": (lambda key: key.replace("model.layers.0", "model._orig_mod.layers.0"), llama, "around a part of the"),
        "inner": (lambda key: key.removeprefix("model."), llama, "did you mean 'model.layers.0.self_attn.q_proj'?"),
        "other": (lambda key: key, gpt2, f"{layer}: the model has no such matrix"),
    }
    cases = [
        (_renamed(lora, tmp_path / f"{n}.safetensors", change), m, word) for n, (change, m, word) in changes.items()
    ]
    cases += [
        (tmp_path / "narrow.safetensors", llama, f"{layer}: it is for a matrix [64, 63], and the model's is [64, 64]"),
        (tmp_path / "biased.safetensors", llama, f"{layer}.bias [64]: the model has no such bias"),
    ]
    for file, model, word in cases:
        before = sorted(tmp_path.rglob("*"))
        line = ["export", str(file), "--layout", "peft", "--out", str(tmp_path / "new"), "--lora-alpha", "12"]
        capfd.readouterr()
        assert main([*line, "--model", str(model)]) == 2, file
        assert word in one_error(*capfd.readouterr())
        assert sorted(tmp_path.rglob("*")) == before


def test_peft_itself_finds_nothing_under_names_of_another_model(llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter", target_modules=["q_proj"])
    export(adapter, tmp_path / "lora.safetensors", "loralib")
    other = _renamed(tmp_path / "lora.safetensors", tmp_path / "other.safetensors", lambda key: f"decoder.{key}")
    import_loralib(other, tmp_path / "back")
    with pytest.raises(ValueError, match="not found in the base model"):
        peft_logits(llama, tmp_path / "back")


def test_adapter_of_one_layer_is_none_of_the_others(gpt2: Path, tmp_path: Path) -> None:
    """A file of `attn.c_proj` alone was loaded onto `mlp.c_proj` too, of which it has no tensors."""
    adapter = make_adapter(gpt2, tmp_path / "adapter", target_modules=["h.0.attn.c_proj"])
    export(adapter, tmp_path / "lora.safetensors", "loralib")
    import_loralib(tmp_path / "lora.safetensors", tmp_path / "back")
    found = meshlora.load(gpt2, adapter=tmp_path / "back").meshlora.adapters["default"].targets
    assert list(found) == ["transformer.h.0.attn.c_proj"]


def _of_ddp(gpt2: Path, lora: Path, file: Path, *, whole: bool = False, **changed: torch.Tensor) -> Path:
    """What gpt2_ft.py of microsoft/LoRA saves of a model in DistributedDataParallel, in its last checkpoint all of it.

    changed: tensors of other values, by the end of their names.
    """
    state = load_file(lora)
    if whole:
        state |= {f"{key}": tensor for key, tensor in GPT2LMHeadModel.from_pretrained(gpt2).state_dict().items()}
        state["lm_head.decoder.weight"] = state.pop("lm_head.weight")
        state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    for key in state:
        state[key] = next((tensor for end, tensor in changed.items() if key.endswith(end)), state[key])
    torch.save({"model_state_dict": {f"module.{key}": tensor for key, tensor in state.items()}}, file)
    return file


@pytest.mark.parametrize("whole", [False, True])
def test_checkpoint_of_microsofts_own_run_becomes_its_adapter(
    whole: bool, gpt2: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = make_pieces(gpt2, tmp_path / "adapter")
    export(adapter, tmp_path / "lora.safetensors", "loralib")
    file = _of_ddp(gpt2, tmp_path / "lora.safetensors", tmp_path / "model.500.pt", whole=whole)
    line = ["export", str(file), "--layout", "peft", "--out", str(tmp_path / "back"), "--model", str(gpt2)]
    assert main([*line, "--lora-alpha", "12", "--enable-lora", "1,0,1"]) == 0
    said = capfd.readouterr().out
    assert "all names began with module. " in said
    assert ("the frozen base too" in said) is whole
    stored = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert all(tensor.any() for key, tensor in stored.items() if ".lora_B." in key)
    assert torch.equal(peft_logits(gpt2, tmp_path / "back"), peft_logits(gpt2, adapter))


class _Runs:
    """Unpickled in full it would write a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.file), "w")


def test_pickled_file_that_is_no_adapter_of_the_model_is_refused_and_runs_nothing(
    gpt2: Path, llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    export(make_pieces(gpt2, tmp_path / "adapter"), tmp_path / "lora.safetensors", "loralib")
    lora, state = tmp_path / "lora.safetensors", load_file(tmp_path / "lora.safetensors")
    shape = next(tensor.shape for key, tensor in state.items() if key.endswith("lora_B"))
    good = _of_ddp(gpt2, lora, tmp_path / "good.pt")
    zero = _of_ddp(gpt2, lora, tmp_path / "zero.pt", lora_B=torch.zeros(shape))
    wild = _of_ddp(gpt2, lora, tmp_path / "wild.pt", lora_B=torch.full(shape, torch.nan))
    base = _of_ddp(gpt2, lora, tmp_path / "base.pt", whole=True, **{"c_fc.bias": torch.full((4 * HIDDEN,), 0.1)})
    torch.save({key: tensor for key, tensor in state.items() if key.endswith("lora_A")}, tmp_path / "half.pt")
    torch.save({"model_state_dict": state, "args": _Runs(tmp_path / "ran")}, tmp_path / "code.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "cut.pt").write_bytes(good.read_bytes()[:300])
    cases: list[tuple[Path, Path | None, str]] = [
        (good, None, "--model"),
        (good, llama, "the model has no such matrix"),
        (zero, gpt2, "every lora_B is zero"),
        (wild, gpt2, "not finite"),
        (base, gpt2, "c_fc.bias: it differs from the model's"),
        (tmp_path / "half.pt", gpt2, "it needs lora_A and lora_B"),
        (tmp_path / "code.pt", gpt2, "it cannot be read as tensors alone"),
        (tmp_path / "list.pt", gpt2, "no state dict"),
        (tmp_path / "cut.pt", gpt2, "it cannot be read as tensors alone"),
    ]
    for file, model, word in cases:
        line = ["export", str(file), "--layout", "peft", "--out", str(tmp_path / "new"), "--lora-alpha", "12"]
        line += ["--enable-lora", "1,0,1", *(["--model", str(model)] if model else [])]
        capfd.readouterr()
        assert main(line) == 2, file
        assert word in one_error(*capfd.readouterr()), file
        assert not (tmp_path / "new").exists()
        assert not (tmp_path / "ran").exists()
