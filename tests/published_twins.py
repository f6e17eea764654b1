"""Published checkpoints (`tests/published/*.json`), and their twins: tiny, with the same flags and formats on disk."""

from __future__ import annotations

import fnmatch
import json
import re
import tempfile
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from meshlora.loading.blueprint import read_model_config
from meshlora.verify.faults.of_objectives import as_proved
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import layers_of_twin, shrink_config
from tests.packed import BLOCK, PUBLISHED

FOLDER = Path(__file__).with_name("published")
Pack = Callable[[str, Tensor, int], dict[str, Tensor]]

# In no published checkpoint in few bits: embeddings, heads, routers, norms, positions; indexers of DeepSeek-V4.
_IN_PLAIN_NUMBERS = re.compile(
    r"embed|lm_head|^head\.|norm|router|position|patch|compressor|\.attn\.indexer|\.(gate|wg|shared_expert_gate)\.weight$"
)


@dataclass(frozen=True)
class Published:
    """One file of `tests/published`.

    Attributes:
        config: its config.json; values that are its class's defaults may be left out. unsure: what is not certain.
        files: what config.json does not say. dtype: of its weights, where config.json has none. head: `its own`, where
            the class of its configuration ties it. experts: how they are stored. beside: weights that are not the
            model's (`mtp`, or a layer more than config.json counts). prefix: start of a name as transformers writes it
            -> in the files. pickled: that they are. needs: what a run file must say.
        objective: what it is trained for. An encoder's twin has a head of it, which published files may lack: a new
            one is drawn.
    """

    repository: str
    config: dict[str, Any]
    files: dict[str, Any] = field(default_factory=dict)
    unsure: tuple[str, ...] = ()
    objective: str = "sft"

    @property
    def quantization(self) -> dict[str, Any]:
        """`quantization_config`, of the text part if it is there; empty if its weights are plain numbers."""
        text = self.config.get("text_config") or {}
        found: dict[str, Any] = self.config.get("quantization_config") or text.get("quantization_config") or {}
        return found

    @property
    def format(self) -> str:
        """In words of the page."""
        given = self.quantization
        method = given.get("quant_method")
        parts = (self.config, self.config.get("text_config") or {}, self.files)
        dtypes = [part[name] for part in parts for name in ("torch_dtype", "dtype") if name in part]
        experts = ", experts in MXFP4" if "fp4" in (given.get("expert_dtype"), self.config.get("expert_dtype")) else ""
        words = {
            None: [*dtypes, "float32"][0] + (", pickled" if "pickled" in self.files else ""),
            "fp8": f"FP8, {'128×128' if given.get('weight_block_size') else 'per tensor'}{experts}",
            "fbgemm_fp8": "FP8, per row (fbgemm)",
            "mxfp4": "MXFP4",
            "compressed-tensors": f"compressed-tensors, {given.get('format')}",
            "bitsandbytes": f"bitsandbytes {given.get('bnb_4bit_quant_type')}",
            "modelopt": f"modelopt {given.get('quant_algo')}",
        }
        return words.get(method, f"{str(method).upper()} int{given.get('bits')}")


def read_published(name: str) -> Published:
    """The published checkpoint `Qwen--Qwen3-8B`."""
    found = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    unsure = tuple(found.get("unsure", ()))
    return Published(
        found["repository"], found["config"], found.get("files", {}), unsure, found.get("objective", "sft")
    )


def names() -> list[str]:
    """All of them."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def config_of(published: Published) -> PretrainedConfig:
    """Its configuration, read as a user's folder is."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(published.config), encoding="utf-8")
        config = read_model_config(folder)
    config.dtype = config.dtype or published.files.get("dtype")
    if "head" in published.files:
        config.tie_word_embeddings = False
    as_proved(published.objective).configure(config)  # its head
    return config


def write_published_twin(published: Published, folder: Path, *, tp: int = 2) -> Path:
    """The twin of a published checkpoint, in two files, under the names and in the format of the published one."""
    config = config_of(published)
    plain = _plain_linears(published, config.get_text_config().num_hidden_layers)
    twin = shrink_config(config, tp=tp, layers=plain)
    write_twin(twin, folder, dtype=torch.float32, seed=0)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    tensors = _beside(published, tensors, twin) | {_stored_name(key, published): t for key, t in tensors.items()}
    if published.config["model_type"] == "llama4" and published.files.get("experts") == "one by one":
        tensors = _one_by_one(tensors)
    quantization = _tiny(published, layers_of_twin(config, layers=plain))
    if quantization:
        is_whole = "quantization_config" in published.config  # else of the text part alone
        packed = {key: t for key, t in tensors.items() if is_whole or key.startswith("language_model.")}
        # DeepSeek-V4 says it beside, V4.1 inside.
        of_experts = {name: published.config[name] for name in ("expert_dtype",) if name in published.config}
        tensors = {key: t for key, t in tensors.items() if key not in packed}
        tensors |= _packed(packed, quantization | of_experts)
    tensors = {
        key: t.bfloat16() if t.dtype == torch.float32 and not _is_scale(key) else t for key, t in tensors.items()
    }
    _save(tensors, folder)
    file = folder / "config.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    if "dtype" in published.files:  # config.json has none
        stored.pop("dtype", None)
    else:
        stored["dtype"] = "bfloat16"
    if "head" in published.files:  # nor does it say that the head is not the embedding
        stored.pop("tie_word_embeddings", None)
    if quantization:
        (stored if "quantization_config" in published.config else stored["text_config"])["quantization_config"] = (
            quantization
        )
    file.write_text(json.dumps(stored), encoding="utf-8")
    return folder


def _is_scale(key: str) -> bool:
    return key.endswith(("_scale_inv", "_scale", "_scale_2", "_scale_ub", "absmax", "quant_map", "scales"))


def _save(tensors: dict[str, Tensor], folder: Path) -> None:
    """In two files with an index, as whatever is larger than 5 GB is published."""
    keys = sorted(tensors)
    weight_map = {
        key: f"model-0000{1 + (2 * place >= len(keys))}-of-00002.safetensors" for place, key in enumerate(keys)
    }
    for name in set(weight_map.values()):
        part = {key: tensors[key].contiguous() for key in keys if weight_map[key] == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _stored_name(key: str, published: Published) -> str:
    for new, old in published.files.get("prefix", {}).items():
        if key.startswith(new) and not (old and key.startswith(old)):
            return old + key.removeprefix(new)
    return key


def _beside(published: Published, tensors: dict[str, Tensor], twin: PretrainedConfig) -> dict[str, Tensor]:
    """The weights of multi-token prediction that are published beside the model's."""
    text = twin.get_text_config()
    last, hidden = text.num_hidden_layers - 1, text.hidden_size
    layer = re.compile(rf"^(.*layers\.){last}\.")
    found: dict[str, Tensor] = {}
    for kind in published.files.get("beside", ()):
        copies = {key: tensor for key, tensor in tensors.items() if layer.match(key)}
        fused, norm = torch.randn(hidden, 2 * hidden), torch.ones(hidden)
        if kind == "mtp":
            found |= {layer.sub("mtp.layers.0.", key): tensor.clone() for key, tensor in copies.items()}
            found |= {"mtp.fc.weight": fused, "mtp.norm.weight": norm}
            found |= {"mtp.pre_fc_norm_embedding.weight": norm.clone(), "mtp.pre_fc_norm_hidden.weight": norm.clone()}
        else:
            more = f"model.layers.{last + 1}."
            found |= {layer.sub(more, key): tensor.clone() for key, tensor in copies.items()}
            found |= {f"{more}eh_proj.weight": fused, f"{more}enorm.weight": norm, f"{more}hnorm.weight": norm.clone()}
            head = torch.randn(text.vocab_size, hidden)
            found |= {f"{more}embed_tokens.weight": head, f"{more}shared_head.head.weight": head.clone()}
            found[f"{more}shared_head.norm.weight"] = norm.clone()
    return found


def _one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fused, transposed experts as linears of each, as compressed-tensors has them."""
    found: dict[str, Tensor] = {}
    for key, stack in tensors.items():
        owner, _, leaf = key.rpartition(".")
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf, ())
        if not owner.endswith(".experts"):
            found[key] = stack
        for expert, matrix in enumerate(stack if owner.endswith(".experts") else ()):
            for name, part in zip(names, matrix.T.chunk(len(names)), strict=True):
                found[f"{owner}.{expert}.{name}.weight"] = part.clone()
    return found


def _modules_in_plain_numbers(quantization: dict[str, Any]) -> list[str]:
    fields = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules")
    return [name for key in fields for name in quantization.get(key) or ()]


def _plain_linears(published: Published, num_layers: int) -> dict[int, Hashable]:
    """Layer -> the linears of it that the list of exceptions names: in its twin layers differ as they do in it."""
    found: dict[int, set[str]] = {layer: set() for layer in range(num_layers)}
    for name in _modules_in_plain_numbers(published.quantization):
        match = re.search(r"\blayers\.(\d+)\.(.*)", name)
        if match and int(match[1]) in found:
            found[int(match[1])].add(match[2])
    return {layer: tuple(sorted(names)) for layer, names in found.items() if names}


def _tiny(published: Published, layers: list[int]) -> dict[str, Any]:
    """`quantization_config` with tiny blocks, its exceptions renumbered as the twin's layers are."""
    given: dict[str, Any] = json.loads(json.dumps(published.quantization))
    for key in ("modules_to_not_convert", "ignore", "llm_int8_skip_modules"):
        if given.get(key):
            given[key] = [new for name in given[key] if (new := _renumbered(name, layers)) is not None]
    if given.get("weight_block_size"):
        given["weight_block_size"] = [BLOCK, BLOCK]
    if given.get("group_size"):
        given["group_size"] = BLOCK
    for group in (given.get("config_groups") or {}).values():
        if (group.get("weights") or {}).get("group_size", 16) != 16:  # that of NVFP4 is tiny, and fixed
            group["weights"]["group_size"] = BLOCK
    return given


def _renumbered(name: str, layers: list[int]) -> str | None:
    match = re.search(r"\blayers\.(\d+)\b", name)
    if match is None:
        return name
    old = int(match[1])
    return f"{name[: match.start(1)]}{layers.index(old)}{name[match.end(1) :]}" if old in layers else None


def _packed(tensors: dict[str, Tensor], quantization: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors, with those of linears in few bits."""
    left = [_pattern(name) for name in _modules_in_plain_numbers(quantization)]
    pack = _packer(quantization)
    is_mxfp4 = quantization["quant_method"] == "mxfp4"
    found: dict[str, Tensor] = {}
    for seed, (key, value) in enumerate(sorted(tensors.items())):
        name = key.removesuffix(".weight")
        of_experts = is_mxfp4 and key.endswith(("experts.gate_up_proj", "experts.down_proj"))
        of_linear = not is_mxfp4 and value.ndim == 2 and key.endswith(".weight")
        is_left = _IN_PLAIN_NUMBERS.search(key) or any(p.search(n) for p in left for n in (name, f"model.{name}"))
        found |= pack(key, value, seed) if (of_experts or of_linear) and not is_left else {key: value}
    return found


def _pattern(name: str) -> re.Pattern[str]:
    if name.startswith("re:"):
        return re.compile(name.removeprefix("re:"))
    return re.compile(
        rf"(^|\.){fnmatch.translate(name)[4:-3]}($|\.)" if "*" in name else rf"(^|\.){re.escape(name)}($|\.)"
    )


def _packer(quantization: dict[str, Any]) -> Pack:
    method = quantization["quant_method"]
    if quantization.get("expert_dtype") == "fp4":
        return PUBLISHED["fp8 with mxfp4 experts"].pack
    if method == "fp8" and not quantization.get("weight_block_size"):
        return PUBLISHED["fp8 of a tensor"].pack
    if method == "fp8" and quantization.get("scale_fmt") == "ue8m0":
        return _fp8_of_powers
    if method == "compressed-tensors":
        cases = {"float-quantized": "compressed-tensors fp8", "nvfp4-pack-quantized": "compressed-tensors nvfp4"}
        return PUBLISHED[cases.get(quantization["format"], "compressed-tensors int4 experts")].pack
    if method == "modelopt":
        return PUBLISHED["modelopt nvfp4"].pack
    if method == "bitsandbytes":
        return PUBLISHED["nf4"].pack
    if method == "gptq" and not quantization.get("desc_act"):
        return PUBLISHED["gptq experts"].pack
    return PUBLISHED[{"fbgemm_fp8": "fbgemm"}.get(method, method)].pack


def _fp8_of_powers(key: str, value: Tensor, seed: int) -> dict[str, Tensor]:
    """Scales that are powers of two."""
    found = PUBLISHED["fp8"].pack(key, value, seed)
    return found | {f"{key}_scale_inv": found[f"{key}_scale_inv"].log2().ceil().exp2()}


def stored_keys(folder: Path) -> set[str]:
    """The names in the files of a checkpoint."""
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= set(tensors.keys())
    return found
