"""`meshlora judge merge` passes PEFT's merges, and names what else a merged checkpoint may hold."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from meshlora_ground.errors import MeshloraError, UserError
from meshlora_ground.parser import Parser
from meshlora_judge.command import main
from meshlora_judge.quantized import rounded_matrix
from meshlora_judge.verbs import merge as verb
from tests.peft_adapters import make_base, save_adapter, with_adapter
from tests.wrong_adapters import alpha, edited, without

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
FILE = "model.safetensors"
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
Change = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")


def make_adapter(base: Path, folder: Path, **lora: Any) -> Path:
    return save_adapter(load(base), folder, **{"lora_alpha": 6} | lora)


def merged(base: Path, adapter: Path, out: Path, dtype: torch.dtype = torch.float32) -> Path:
    """By PEFT, of the base in `dtype`."""
    with_adapter(load(base, dtype), adapter).merge_and_unload().save_pretrained(out)
    return out


def judge(folder: Path, base: Path, adapter: Path, file: Path, *words: str) -> dict[str, Any]:
    """What the command writes; its exit code is that of its verdict."""
    parser = Parser()
    verb.add(parser.add_subparsers())
    line = ["merge", str(folder), "--model", str(base), "--adapter", str(adapter), "--json", str(file), *words]
    options = parser.parse_args(line)
    try:
        options.run(options)
        code = 0
    except UserError:
        raise
    except MeshloraError as error:
        code = error.exit_code
    value: dict[str, Any] = json.loads(file.read_text())
    assert code == {"proved": 0, "refuted": 1}[value["verdict"]], value["text"]
    return value


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(base, adapter, PEFT's merge), in float32."""
    folder = tmp_path_factory.mktemp("llama")
    base = make_base(folder / "base", "llama")
    adapter = make_adapter(base, folder / "adapter", target_modules="all-linear")
    return base, adapter, merged(base, adapter, folder / "merged")


GOOD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"target_modules": "all-linear"}),
    "dora": ("llama", {}, {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "rslora_patterns": (
        "qwen2",
        {},
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "rank_pattern": {"v_proj": 2}},
    ),
    "conv1d": ("gpt2", {"tie_word_embeddings": False}, {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "tied_head": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["q_proj", "up_proj"]}),
    "embedding": ("llama", {"tie_word_embeddings": False}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "saved_head": (
        "llama",
        {"tie_word_embeddings": False},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "tokens": (
        "llama",
        {"tie_word_embeddings": False},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]},
    ),
    "biases": ("qwen2", {}, {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "experts": ("qwen3_moe", {}, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "mixtral": ("mixtral", {}, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "gemma3": ("gemma3_text", {}, {"target_modules": ["q_proj", "gate_proj"]}),
}


@pytest.mark.parametrize("kind", GOOD)
def test_a_merge_of_peft_is_right(kind: str, tmp_path: Path) -> None:
    family, sizes, lora = GOOD[kind]
    base = make_base(tmp_path / "base", family, **sizes)
    adapter = make_adapter(base, tmp_path / "adapter", **lora)
    value = judge(merged(base, adapter, tmp_path / "merged"), base, adapter, tmp_path / "found.json")
    assert value["verdict"] == "proved", value["text"]
    changed = [each for each in value["tensors"] if each["arrived"] is not None]
    assert changed
    assert all(abs(each["arrived"] - 1) < 1e-4 and each["roundings"] <= 1 for each in changed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_merge_in_low_precision_says_what_was_lost(
    dtype: torch.dtype, llama: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, adapter, _ = llama
    low = tmp_path / "low"
    load(base, dtype).save_pretrained(low)
    value = judge(merged(low, adapter, tmp_path / "merged", dtype), low, adapter, tmp_path / "found.json")
    assert value["verdict"] == "proved", value["text"]
    tensors = load_file(tmp_path / "merged" / FILE)
    weight = tensors["model.layers.1.mlp.down_proj.weight"]
    weight.view(torch.int16).view(-1)[weight.abs().argmax()] += 3  # steps of the dtype
    shutil.copytree(tmp_path / "merged", tmp_path / "wrong")
    save_file(tensors, tmp_path / "wrong" / FILE, metadata={"format": "pt"})
    value = judge(tmp_path / "wrong", low, adapter, tmp_path / "found.json")
    assert re.search(r"model\.layers\.1\.mlp\.down_proj\.weight. 13 tensors are right", value["text"]), value["text"]
    small = edited(adapter, tmp_path / "small", lora_alpha=alpha(adapter) / 300)
    value = judge(merged(low, small, tmp_path / "of_small", dtype), low, small, tmp_path / "found.json")
    assert value["verdict"] == "proved", value["text"]
    stayed = [each["stayed"] for each in value["tensors"] if each["stayed"] is not None]
    assert min(stayed) > (0.4 if dtype == torch.bfloat16 else 0.05)


def _scaled(by: float) -> Change:
    def change(base: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: base[name] + by * (right[name] - base[name]) for name in right}

    return change


def _rounded(kind: str, *, base_alone: bool) -> Change:
    def change(base: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, value in right.items():
            is_adapted = bool((value != base[name]).any())
            if not is_adapted:
                found[name] = value
            elif base_alone:
                found[name] = rounded_matrix(base[name], kind) + (value - base[name])
            else:
                found[name] = rounded_matrix(value, kind)
        return found

    return change


def _with(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda base, right: {key: change(value) if name in key else value for key, value in right.items()}


# Name -> (the wrong checkpoint's tensors, from the base's and the right ones; what is said).
WRONG: dict[str, tuple[Change, str]] = {
    "not_merged": (lambda base, right: base, r"not merged: 14 tensors \(down_proj, gate_proj, k_proj"),
    "twice": (_scaled(2), r"scaled by 2 \(as if use_rslora were on, or applied twice"),
    "half": (_scaled(0.5), "merged, scaled by 0.5"),
    "subtracted": (_scaled(-1), "merged, scaled by -1"),
    "one_kind_left_out": (
        lambda base, right: right | {name: base[name] for name in right if "v_proj" in name},
        r"not merged: model\.layers\.0\.self_attn\.v_proj\.weight, .*12 tensors are right",
    ),
    "transposed": (
        lambda base, right: (
            right | {n: base[n] + (right[n] - base[n]).T for n in right if re.search("q_proj|o_proj", n)}
        ),
        "merged with a transposed delta: .*q_proj",
    ),
    "in_bfloat16": (
        lambda base, right: {name: value.bfloat16().float() for name, value in right.items()},
        "(?=.*merged, then rounded to bfloat16: 14 tensors).*no adapter is on it, and it is rounded to bf",
    ),
    "in_int8": (_rounded("int8", base_alone=False), "merged, then rounded to int8"),
    "on_nf4": (_rounded("nf4", base_alone=True), "merged on a base rounded to nf4"),
    "on_fp8": (_rounded("fp8", base_alone=True), "merged on a base rounded to fp8"),
    "a_norm_changed": (_with("layers.1.input_layernorm", lambda x: x + 0.1), "no adapter is on it, and it is changed"),
    "a_head_lost": (lambda base, right: {n: x for n, x in right.items() if n != "lm_head.weight"}, "missing: lm_head"),
    "wrappers_left": (
        lambda base, right: right | {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 4)},
        r"unknown to the model: model\.layers\.0\.self_attn\.q_proj\.lora_A",
    ),
    "noise": (
        _with("up_proj", lambda x: x + 0.02 * torch.randn_like(x)),
        r"neither the base nor merged \(of the adapter's change \d+% is in it\): .*up_p",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_each_fault_is_named(fault: str, llama: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, adapter, right = llama
    change, expected = WRONG[fault]
    wrong = tmp_path / "wrong"
    shutil.copytree(right, wrong)
    tensors = change(load_file(base / FILE), load_file(right / FILE))
    save_file({name: x.contiguous() for name, x in tensors.items()}, wrong / FILE, metadata={"format": "pt"})
    value = judge(wrong, base, adapter, tmp_path / "found.json")
    assert value["verdict"] == "refuted"
    assert re.search(expected, value["text"]), value["text"]


@pytest.mark.parametrize(("by", "said"), [(1, "tensors in few bits"), (0, "not merged"), (2, "scaled by about 2")])
def test_a_checkpoint_in_eight_bits(by: int, said: str, llama: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """As LLM.int8() stores it: a scale a row."""
    base, adapter, right = llama
    tensors = _scaled(by)(load_file(base / FILE), load_file(right / FILE))
    for name in [*tensors]:
        if "proj" in name:
            largest = tensors[name].abs().amax(1)
            tensors[name] = (tensors[name] / largest[:, None] * 127).round().to(torch.int8)
            tensors[name.replace(".weight", ".SCB")] = largest
    wrong = tmp_path / "wrong"
    shutil.copytree(right, wrong)
    save_file(tensors, wrong / FILE, metadata={"format": "pt"})
    config = json.loads((wrong / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (wrong / "config.json").write_text(json.dumps(config))
    value = judge(wrong, base, adapter, tmp_path / "found.json")
    assert (value["verdict"], value["dtype"]) == ("proved" if by == 1 else "refuted", "few bits")
    assert said in value["text"]
    assert all(abs(each["arrived"] - by) < 0.05 for each in value["tensors"] if each["arrived"] is not None)


def test_another_adapter_was_merged(llama: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, adapter, _ = llama
    part = edited(adapter, tmp_path / "part", without("mlp"))
    value = judge(merged(base, part, tmp_path / "merged"), base, adapter, tmp_path / "found.json")
    assert re.search(r"not merged: 6 tensors \(down_proj, gate_proj, up_proj\)", value["text"])


def test_a_tied_head_that_carries_the_adapter_of_the_embedding(tmp_path: Path) -> None:
    """PEFT merges into the shared weight, and warns: the head of base + adapter has none."""
    base = make_base(tmp_path / "base", "llama", tie_word_embeddings=True)
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "embed_tokens"])
    value = judge(merged(base, adapter, tmp_path / "merged"), base, adapter, tmp_path / "found.json")
    assert "tied to model.embed_tokens.weight, and so carries its adapter: lm_head.weight" in value["text"]


@pytest.mark.parametrize("layer", ["gate_up_proj", "down_proj"])
def test_experts_that_a_merge_leaves_out(layer: str, tmp_path: Path) -> None:
    """Also where the file has them one by one."""
    base = make_base(tmp_path / "base", "qwen3_moe")
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=EXPERTS)
    model = PeftModel.from_pretrained(load(base), str(adapter)).merge_and_unload()
    with torch.no_grad():
        for name, parameter in load(base).named_parameters():
            if layer in name:
                model.get_parameter(name).copy_(parameter)
    model.save_pretrained(tmp_path / "merged")
    assert any(".experts.0." in key for key in load_file(tmp_path / "merged" / FILE))
    value = judge(tmp_path / "merged", base, adapter, tmp_path / "found.json")
    assert re.search(rf"not merged: model\.layers\.1\.mlp\.experts\.{layer}\.", value["text"]), value["text"]


def test_what_rounding_the_base_loses_beside_the_adapter(llama: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, adapter, right = llama
    value = judge(right, base, adapter, tmp_path / "found.json", "--quantization", "fp8")
    assert 0 < value["rounding_moves"] < value["adapter_moves"]


def test_the_command_says_it_in_one_line_and_by_its_exit_code(
    llama: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter, right = llama
    for folder, code, start in ((right, 0, "proved: "), (base, 1, "error: refuted: "), (tmp_path, 2, "error: ")):
        assert main(["merge", str(folder), "--model", str(base), "--adapter", str(adapter)]) == code
        said = "".join(capsys.readouterr())
        assert said.startswith(start), said
        assert said.count("\n") == 1, said


def test_folders_that_are_none_are_one_line(llama: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, adapter, right = llama
    other = make_base(tmp_path / "other", "llama", hidden_size=128)
    for words, said in (
        ((tmp_path, base, adapter), r"it holds no config\.json"),
        ((right, base, tmp_path), r"it holds no adapter_config\.json"),
        ((right, other, adapter), "PEFT does not read it whole"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            judge(*words, tmp_path / "found.json")
        assert "\n" not in f"{caught.value}"
