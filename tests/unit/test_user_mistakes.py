"""A user's mistake gives one message: what was given, the rule, the way out. Exit code 2, and nothing has happened yet.

Each case breaks a copy of a good run in one place and lists words that the message must hold. `check` and
`train --nproc` must say the same, before a weight is read, a rank is started or a file is written.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora.state.weights
import meshlora.train.launch
import meshlora.train.run
from meshlora.cli import main
from meshlora.plan.twin import twin_config

TOKENIZER = Path(__file__).parents[2] / "examples" / "tiny_base"
UP = "model.layers.1.mlp.up_proj"
UP_A = f"base_model.model.{UP}.lora_A.weight"
Tensors = dict[str, Tensor]


@dataclass
class Setup:
    """A good run in a folder of its own, to be broken in one place.

    Attributes:
        tree: what run.yaml will hold; text: or its text, if not None.
        nproc: for `train`; arguments: of both commands, after the run file.
        command: a whole other command line instead, without the paths that vary.
    """

    folder: Path
    tree: dict[str, Any]
    text: str | None = None
    file: str = "run.yaml"
    nproc: int = 2
    arguments: list[str] = field(default_factory=list)
    command: list[str] | None = None

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"

    def set(self, path: str, value: Any) -> None:
        *parents, last = path.split(".")
        functools.reduce(lambda tree, key: tree[key], parents, self.tree)[last] = value

    def drop(self, path: str) -> None:
        *parents, last = path.split(".")
        del functools.reduce(lambda tree, key: tree[key], parents, self.tree)[last]

    def lora(self, **options: Any) -> None:
        self.tree["lora"].update(options)

    def config(self, **values: Any) -> None:
        _edit_json(self.model / "config.json", values)

    def family(self, model_type: str, **values: Any) -> None:
        """The configuration of another family; it must be refused before its weights are missed."""
        twin_config(model_type, **values).save_pretrained(self.model)

    def weights(self, edit: Callable[[Tensors], Any]) -> None:
        _edit_tensors(self.model / "model.safetensors", edit)

    def from_adapter(self) -> None:
        self.drop("lora")
        self.set("adapter", str(self.adapter))

    def adapter_config(self, **values: Any) -> None:
        self.from_adapter()
        _edit_json(self.adapter / "adapter_config.json", values)

    def adapter_weights(self, edit: Callable[[Tensors], Any]) -> None:
        self.from_adapter()
        _edit_tensors(self.adapter / "adapter_model.safetensors", edit)

    def data(self, *records: Any) -> None:
        text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
        (self.folder / "train.jsonl").write_text(text)

    def write(self) -> None:
        text = yaml.safe_dump(self.tree) if self.text is None else self.text
        (self.folder / "run.yaml").write_text(text)

    def command_lines(self) -> list[list[str]]:
        if self.command is not None:
            return [[part.format(folder=self.folder) for part in self.command]]
        run = [str(self.folder / self.file), *self.arguments]
        return [["check", *run], ["train", *run, "--nproc", str(self.nproc)]]


def _edit_json(file: Path, values: dict[str, Any]) -> None:
    tree = json.loads(file.read_text()) | values
    file.write_text(json.dumps(tree))


def _edit_tensors(file: Path, edit: Callable[[Tensors], Any]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that each case copies: model, tokenizer, adapter, data."""
    folder = tmp_path_factory.mktemp("good")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(twin_config("llama", vocab_size=2048), dtype=torch.float32)
    model.save_pretrained(folder / "model")
    for file in TOKENIZER.glob("*token*.json"):
        shutil.copy(file, folder / "model")
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"])
    get_peft_model(model, lora).save_pretrained(folder / "adapter")
    for name in ("train", "eval"):
        lines = [json.dumps({"prompt": f"def f_{i}():", "completion": f" return {i}"}) for i in range(8)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def setup(good: Path, tmp_path: Path) -> Setup:
    folder = tmp_path / "case"
    shutil.copytree(good, folder)
    tree = {
        "model": {"path": str(folder / "model")},
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "eval.jsonl"),
            "max_length": 64,
            "cache_dir": str(tmp_path / "cache"),
        },
        "train": {"output": str(folder / "output"), "steps": 4, "batch_size": 4, "lr": 1e-3},
        "lora": {"r": 4, "target_modules": ["q_proj", "up_proj"]},
        "topology": "tp=2",
        "device": "cpu",
    }
    return Setup(folder, tree)


@dataclass(frozen=True)
class Case:
    """A mistake: how to make it, and the words that must be said of it."""

    make: Callable[[Setup], Any]
    words: tuple[str, ...]


def case(make: Callable[[Setup], Any], *words: str) -> Case:
    return Case(make, words)


def several(*actions: Callable[[Setup], Any]) -> Callable[[Setup], None]:
    def make(s: Setup) -> None:
        for action in actions:
            action(s)

    return make


def setting(path: str, value: Any) -> Callable[[Setup], None]:
    return lambda s: s.set(path, value)


def lora(**options: Any) -> Callable[[Setup], None]:
    return lambda s: s.lora(**options)


def truncate(file: str, size: int) -> Callable[[Setup], None]:
    def make(s: Setup) -> None:
        path = s.folder / file
        path.write_bytes(path.read_bytes()[:size])

    return make


def text(file: str, content: str) -> Callable[[Setup], Any]:
    return lambda s: (s.folder / file).write_text(content)


def command(*parts: str) -> Callable[[Setup], None]:
    return lambda s: setattr(s, "command", list(parts))


def remove(*files: str) -> Callable[[Setup], None]:
    def make(s: Setup) -> None:
        for file in files:
            (s.folder / file).unlink()

    return make


def index_of_a_missing_shard(s: Setup) -> None:
    names = load_file(s.model / "model.safetensors").keys()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (s.model / "model.safetensors.index.json").write_text(json.dumps(index))


def index_that_maps_a_weight_to_the_wrong_shard(s: Setup) -> None:
    tensors = load_file(s.model / "model.safetensors")
    (s.model / "model.safetensors").unlink()
    moved = f"{UP}.weight"
    rest = {name: tensor for name, tensor in tensors.items() if name != moved}
    save_file(rest, s.model / "a.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(tensors, "a.safetensors")
    (s.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pickled_weights_only(s: Setup) -> None:
    torch.save(load_file(s.model / "model.safetensors"), s.model / "pytorch_model.bin")
    (s.model / "model.safetensors").unlink()


def pickled_adapter_only(s: Setup) -> None:
    s.from_adapter()
    (s.adapter / "adapter_model.safetensors").rename(s.adapter / "adapter_model.bin")


def earlier_run(s: Setup) -> None:
    (s.folder / "output").mkdir()
    (s.folder / "output" / "metrics.jsonl").write_text("{}\n")


def narrower_adapter(tensors: Tensors) -> None:
    for name in tensors:
        tensors[name] = tensors[name][:, :48].clone() if ".lora_A." in name else tensors[name]


MISTAKES: dict[str, Case] = {
    # The run file.
    "run_file_missing": case(
        lambda s: setattr(s, "file", "rum.yaml"), "rum.yaml", "no such run file", "did you mean 'run.yaml'?"
    ),
    "run_file_is_a_folder": case(lambda s: setattr(s, "file", "model"), "model", "not readable"),
    "run_file_is_not_yaml": case(lambda s: setattr(s, "text", "model: [1\n  x: }"), "run.yaml", "not readable YAML"),
    "run_file_is_a_list": case(lambda s: setattr(s, "text", "- a\n- b\n"), "run.yaml", "mapping", "model:"),
    "run_file_is_empty": case(lambda s: setattr(s, "text", ""), "run.yaml", "mapping", "model:"),
    "unknown_top_level_key": case(setting("topolgy", "tp=2"), "topolgy", "unknown key", "did you mean 'topology'?"),
    "unknown_nested_key": case(
        setting("train.warm_up_steps", 1), "train.warm_up_steps", "unknown key", "did you mean 'warmup_steps'?"
    ),
    "unknown_model_key": case(setting("model.name", "x"), "model.name", "unknown key", "path"),
    "text_where_a_number_is_due": case(setting("train.lr", "fast"), "train.lr", "'fast'", "a number"),
    "fraction_where_a_whole_number_is_due": case(setting("train.steps", 2.5), "train.steps", "2.5", "a whole number"),
    "value_where_a_group_is_due": case(setting("train", 3), "train: 3", "a group of keys", "steps"),
    "text_where_true_or_false_is_due": case(
        setting("train.overwrite", "maybe"), "train.overwrite", "'maybe'", "true or false"
    ),
    "unknown_choice": case(
        setting("model.dtype", "bfloat"), "model.dtype", "'bfloat'", "float32", "did you mean 'bfloat16'?"
    ),
    "required_key_missing": case(lambda s: s.drop("train.output"), "train.output", "required"),
    "required_group_missing": case(lambda s: s.drop("data"), "data", "required"),
    "set_without_value": case(
        lambda s: s.arguments.extend(["--set", "train.lr"]), "--set train.lr", "key.path=value", "train.lr=1e-4"
    ),
    "set_unknown_key": case(
        lambda s: s.arguments.extend(["--set", "train.lrr=1"]), "train.lrr", "unknown key", "did you mean 'lr'?"
    ),
    "set_below_a_value": case(
        lambda s: s.arguments.extend(["--set", "topology.tp=1"]), "--set topology.tp=1", "topology is a value"
    ),
    "steps_and_epochs": case(setting("train.epochs", 1), "both", "train.steps", "train.epochs", "give one"),
    "neither_steps_nor_epochs": case(lambda s: s.drop("train.steps"), "neither", "train.steps", "train.epochs"),
    "lora_and_adapter": case(setting("adapter", "x"), "both", "lora and adapter", "one of them"),
    "neither_lora_nor_adapter": case(lambda s: s.drop("lora"), "neither", "lora and adapter", "give lora"),
    "eval_every_without_eval_data": case(
        several(setting("train.eval_every", 2), lambda s: s.drop("data.eval")),
        "train.eval_every=2",
        "no effect without data.eval",
    ),
    "warmup_as_long_as_the_run": case(setting("train.warmup_steps", 4), "train.warmup_steps=4", "below the 4 steps"),
    "negative_learning_rate": case(setting("train.lr", -1.0), "train.lr=-1.0", "above 0"),
    "learning_rate_not_finite": case(setting("train.lr", float("inf")), "train.lr", "inf", "finite"),
    "weight_decay_not_a_number": case(setting("train.weight_decay", float("nan")), "train.weight_decay", "nan"),
    "replica_check_less_often_than_never": case(
        setting("train.replica_check_every", -1), "train.replica_check_every=-1", "not negative"
    ),
    "zero_steps": case(setting("train.steps", 0), "train.steps=0", "at least 1"),
    "zero_micro_batch": case(setting("train.micro_batch_size", 0), "train.micro_batch_size=0", "at least 1"),
    "batch_smaller_than_dp": case(
        several(setting("topology", "dp=8"), lambda s: setattr(s, "nproc", 8)),
        "train.batch_size=4",
        "dp=8",
        "raise train.batch_size or lower dp",
    ),
    "learning_rate_beyond_all_floats": case(setting("train.lr", 10**400), "train.lr", "finite"),
    "seed_beyond_64_bits": case(setting("train.seed", 2**63), "train.seed", "below 2**63"),
    "key_given_twice": case(
        lambda s: setattr(s, "text", yaml.safe_dump(s.tree) + "topology: dp=2\n"), "topology is given twice", "lines"
    ),
    # The topology.
    "unknown_axis": case(setting("topology", "tpp=2"), "'tpp=2'", "'tpp' is not an axis", "did you mean 'tp'?"),
    "axis_that_is_not_a_number": case(setting("topology", "tp=two"), "'two'", "whole number", "tp=2"),
    "axis_of_zero": case(setting("topology", "tp=0"), "tp=0", "at least 1", "tp=1"),
    "axis_twice": case(setting("topology", "tp=2,tp=2"), "tp is given twice", "each axis once"),
    "sp_without_tp": case(
        several(setting("topology", "dp=2,sp"), lambda s: setattr(s, "nproc", 2)), "sp with tp=1", "raise tp"
    ),
    "topology_is_a_number": case(setting("topology", 2), "topology: 2", "text"),
    "expert_parallelism": case(setting("topology", "dp=2,ep=2"), "ep=2", "not supported yet", "leave out ep"),
    "tp_that_does_not_divide_key_value_heads": case(
        several(setting("topology", "tp=8"), lambda s: setattr(s, "nproc", 8)),
        "tp=8",
        "num_key_value_heads=4",
        "tp in {1, 2, 4}",
    ),
    "tp_that_does_not_divide_the_mlp": case(
        several(
            setting("topology", "tp=4"),
            lambda s: setattr(s, "nproc", 4),
            lambda s: s.family("llama", vocab_size=2048, intermediate_size=130),
        ),
        "tp=4",
        "130",
        "tp in {1, 2}",
    ),
    # The model.
    "model_folder_missing": case(
        setting("model.path", "nowhere/llama"), "nowhere/llama", "no such folder", "hf download"
    ),
    "model_path_is_a_file": case(lambda s: s.set("model.path", str(s.model / "config.json")), "config.json", "folder"),
    "config_missing": case(remove("model/config.json"), "no config.json", "folder of one checkpoint"),
    "config_cut_short": case(truncate("model/config.json", 100), "config.json", "not a readable JSON file"),
    "config_is_a_list": case(text("model/config.json", "[]"), "config.json"),
    "config_of_a_wrong_type": case(
        lambda s: s.config(num_attention_heads="many"), "config.json", "num_attention_heads"
    ),
    "config_that_does_not_fit_itself": case(lambda s: s.config(hidden_size=60), "hidden", "60"),
    "config_without_model_type": case(text("model/config.json", "{}"), "config.json", "model_type"),
    "unknown_model_type": case(lambda s: s.config(model_type="lama"), "config.json", "'lama'", "did you mean 'llama'?"),
    "encoder_decoder": case(lambda s: s.family("t5"), "t5"),
    "mixture_of_experts": case(lambda s: s.family("mixtral"), "mixtral", "mixtures of experts", "not supported yet"),
    "family_without_a_tp_plan": case(lambda s: s.family("gpt2"), "gpt2", "no tensor-parallel plan", "use tp=1"),
    "family_that_transformers_changes_on_loading": case(lambda s: s.family("youtu"), "youtu", "padding token"),
    "quantised_checkpoint": case(
        lambda s: s.config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised", "not supported yet"
    ),
    "dropout_in_the_model": case(
        lambda s: s.config(attention_dropout=0.1), "attention_dropout=0.1", "depend on the topology", "disable_dropout"
    ),
    "attention_that_is_not_known": case(setting("model.attn_implementation", "fast"), "fast", "eager"),
    "attention_that_is_not_installed": case(
        setting("model.attn_implementation", "flash_attention_2"), "llama", "cannot build it", "FlashAttention2"
    ),
    "no_attention_heads": case(lambda s: s.config(num_attention_heads=0), "config.json", "ZeroDivisionError"),
    "pickled_weights_only": case(pickled_weights_only, "pickled", "unpickles nothing", "convert it"),
    "no_weights": case(remove("model/model.safetensors"), "no model.safetensors"),
    "weights_cut_short": case(truncate("model/model.safetensors", 5000), "model.safetensors", "damaged", "again"),
    "weights_empty": case(truncate("model/model.safetensors", 0), "model.safetensors", "damaged", "again"),
    "index_of_a_missing_shard": case(
        index_of_a_missing_shard, "index.json", "model-00001-of-00002.safetensors", "not in the folder"
    ),
    "index_is_a_list": case(text("model/model.safetensors.index.json", "[]"), "index.json", "weight_map"),
    "index_maps_a_weight_to_the_wrong_shard": case(
        index_that_maps_a_weight_to_the_wrong_shard, "lacks 1 weights", f"{UP}.weight"
    ),
    "weight_missing": case(
        lambda s: s.weights(lambda t: t.pop(f"{UP}.weight")), "lacks 1 weights", f"{UP}.weight", "did you mean"
    ),
    "weight_of_unexpected_name": case(
        lambda s: s.weights(lambda t: t.update({"model.extra.weight": torch.zeros(2)})),
        "model.extra.weight",
        "no place in LlamaForCausalLM",
        "allow_unused_weights",
    ),
    "weight_of_wrong_shape": case(
        lambda s: s.weights(lambda t: t.update({f"{UP}.weight": torch.zeros(96, 64)})),
        f"{UP}.weight",
        "[96, 64]",
        "[128, 64]",
    ),
    "weight_of_integers": case(
        lambda s: s.weights(lambda t: t.update({f"{UP}.weight": torch.zeros(128, 64, dtype=torch.int8)})),
        f"{UP}.weight",
        "integers",
        "not supported yet",
    ),
    # The tokenizer.
    "tokenizer_missing": case(
        remove("model/tokenizer.json", "model/tokenizer_config.json"),
        "tokenizer in",
        "cannot be loaded",
        "tokenizer.json",
    ),
    "tokenizer_damaged": case(truncate("model/tokenizer.json", 1000), "tokenizer in", "cannot be loaded", "whole"),
    "tokenizer_larger_than_the_vocabulary": case(
        several(
            lambda s: s.config(vocab_size=2000),
            lambda s: s.weights(
                lambda t: t.update({n: t[n][:2000].clone() for n in t if t[n].shape[0] == 2048}),
            ),
        ),
        "2048",
        "2000",
    ),
    "max_length_above_the_positions": case(
        setting("data.max_length", 4096), "data.max_length=4096", "128 positions", "at most 128"
    ),
    # A fresh adapter.
    "lora_unknown_option": case(lora(rank=8), "lora", "rank", "not an option", "did you mean"),
    "lora_is_a_number": case(setting("lora", 8), "lora: 8", "a group of keys"),
    "lora_dora": case(lora(use_dora=True), "use_dora=True", "not supported yet", "leave it at False"),
    "lora_dropout": case(lora(lora_dropout=0.1), "lora_dropout=0.1", "not supported yet", "leave it at 0.0"),
    "lora_modules_to_save": case(lora(modules_to_save=["lm_head"]), "modules_to_save", "not supported yet"),
    "lora_bias": case(lora(bias="all"), "bias='all'", "not supported yet", "'none'"),
    "lora_target_parameters": case(lora(target_parameters=["x"]), "target_parameters", "not supported yet"),
    "lora_init_from_the_weights": case(lora(init_lora_weights="pissa"), "'pissa'", "supported", "gaussian"),
    "lora_task_type": case(lora(task_type="SEQ_CLS"), "SEQ_CLS", "CAUSAL_LM"),
    "lora_rank_of_zero": case(lora(r=0), "r=0", "at least 1"),
    "lora_rank_is_text": case(lora(r="8x"), "r='8x'", "whole number"),
    "lora_alpha_of_zero": case(lora(lora_alpha=0), "lora_alpha=0", "above 0"),
    "lora_target_that_matches_nothing": case(
        lora(target_modules=["q_prj"]), "q_prj", "no linear layer", "did you mean 'q_proj'?"
    ),
    "lora_one_target_of_two_matches_nothing": case(
        lora(target_modules=["q_proj", "up"]), "'up' matches no linear layer", "up_proj"
    ),
    "lora_target_pattern_is_not_a_regular_expression": case(
        lora(target_modules="(q_proj"), "'(q_proj'", "regular expression"
    ),
    "lora_target_the_output_head": case(lora(target_modules=["lm_head"]), "lm_head", "output head", "not supported"),
    "lora_target_the_embedding": case(lora(target_modules=["embed_tokens"]), "embed_tokens", "Embedding"),
    "lora_target_is_not_a_linear": case(
        several(
            lambda s: s.family("gpt2", vocab_size=2048),
            setting("topology", "dp=2"),
            lora(target_modules=["c_attn"]),
        ),
        "c_attn",
        "Conv1D",
        "not supported",
    ),
    "lora_layer_that_is_not_there": case(lora(layers_to_transform=[0, 7]), "layers_to_transform", "7", "2 layers"),
    "lora_rank_pattern_matches_nothing": case(
        lora(rank_pattern={"v_proj": 8}), "rank_pattern", "'v_proj' matches none", "did you mean 'q_proj'?"
    ),
    "lora_alpha_pattern_matches_nothing": case(
        lora(alpha_pattern={"down_proj": 8}), "alpha_pattern", "'down_proj' matches none"
    ),
    "lora_target_is_a_number": case(lora(target_modules=3), "target_modules=3", "list of names"),
    "lora_target_is_a_name_where_a_pattern_is_due": case(
        lora(target_modules="q_proj"), "'q_proj'", "whole names", "[q_proj]"
    ),
    "lora_layers_are_text": case(lora(layers_to_transform=["0"]), "layers_to_transform=['0']", "whole number"),
    "lora_rank_pattern_is_a_list": case(lora(rank_pattern=["q_proj"]), "rank_pattern=['q_proj']", "{q_proj: 8}"),
    "lora_rank_pattern_is_not_a_regular_expression": case(
        lora(rank_pattern={"(q": 8}), "rank_pattern='(q'", "regular expression"
    ),
    "lora_rslora_is_text": case(lora(use_rslora="yes"), "use_rslora='yes'", "true or false"),
    "lora_exclude_matches_nothing": case(
        lora(exclude_modules=["q_prj"]), "exclude_modules=['q_prj']", "'q_prj' matches no", "did you mean 'q_proj'?"
    ),
    "lora_exclude_leaves_nothing": case(
        lora(exclude_modules=["q_proj", "up_proj"]), "matches no linear layer", "exclude_modules leaves"
    ),
    # An adapter to go on from.
    "adapter_folder_missing": case(
        several(lambda s: s.drop("lora"), setting("adapter", "nowhere/adapter")), "nowhere/adapter", "no such folder"
    ),
    "adapter_config_missing": case(
        several(Setup.from_adapter, remove("adapter/adapter_config.json")), "adapter_config.json", "missing"
    ),
    "adapter_weights_missing": case(
        several(Setup.from_adapter, remove("adapter/adapter_model.safetensors")),
        "adapter_model.safetensors",
        "missing",
    ),
    "adapter_of_another_model": case(
        lambda s: s.adapter_weights(narrower_adapter), "[4, 48]", "[4, 64]", "another model"
    ),
    "adapter_tensor_missing": case(
        lambda s: s.adapter_weights(lambda t: t.pop(UP_A)), "lacks 1 of", UP_A, "did you mean"
    ),
    "adapter_tensor_too_many": case(
        lambda s: s.adapter_weights(lambda t: t.update({UP_A.replace("up", "gate"): t[UP_A].clone()})),
        "no place",
        "gate_proj",
        "adapter_config.json",
    ),
    "adapter_with_nan": case(
        lambda s: s.adapter_weights(lambda t: t[UP_A].view(-1)[3].fill_(float("nan"))),
        UP_A,
        "not finite",
        "earlier checkpoint",
    ),
    "adapter_is_not_lora": case(lambda s: s.adapter_config(peft_type="IA3"), "'IA3'", "only LORA"),
    "adapter_pickled_only": case(pickled_adapter_only, "pickled", "unpickles nothing", "save it again"),
    "adapter_config_cut_short": case(
        several(Setup.from_adapter, truncate("adapter/adapter_config.json", 50)), "adapter_config.json", "JSON"
    ),
    "adapter_weights_cut_short": case(
        several(Setup.from_adapter, truncate("adapter/adapter_model.safetensors", 3000)), "adapter_model", "damaged"
    ),
    "adapter_config_with_an_unsupported_option": case(
        lambda s: s.adapter_config(use_dora=True), "use_dora=True", "not supported yet"
    ),
    "adapter_config_of_a_newer_peft": case(
        lambda s: s.adapter_config(use_magic=True), "use_magic", "not an option of this peft"
    ),
    "adapter_rank_that_is_not_the_files": case(lambda s: s.adapter_config(r=8), "[4, ", "[8, ", "another rank"),
    # The data.
    "data_file_missing": case(
        lambda s: s.set("data.train", str(s.folder / "trian.jsonl")), "trian.jsonl", "no such file", "train.jsonl"
    ),
    "eval_file_missing": case(
        lambda s: s.set("data.eval", str(s.folder / "evil.jsonl")), "evil.jsonl", "no such file", "eval.jsonl"
    ),
    "data_file_empty": case(lambda s: s.data(), "train.jsonl", "no record", "at least one"),
    "data_line_that_is_not_json": case(lambda s: s.data({"text": "a b"}, "{broken"), "train.jsonl:2", "bad JSON"),
    "data_line_of_unknown_fields": case(
        lambda s: s.data({"text": "a b"}, {"question": "a", "answer": "b"}), "train.jsonl:2", "question"
    ),
    "data_column_missing": case(setting("data.columns", {"prompt": "question"}), "question", "train.jsonl:1"),
    "data_without_trained_tokens": case(
        lambda s: s.data({"prompt": "a b c " * 50, "completion": " d"}),
        "train.jsonl:1",
        "no trained token",
        "max_length",
    ),
    "data_list_is_empty": case(setting("data.train", []), "data.train", "[]"),
    "cache_that_cannot_be_written": case(
        lambda s: s.set("data.cache_dir", str(s.folder / "train.jsonl")), "train.jsonl"
    ),
    # The output.
    "output_holds_a_run": case(earlier_run, "output", "holds a run already", "train.overwrite=true"),
    "output_is_a_file": case(text("output", ""), "output", "is a file", "folder"),
    "output_below_a_file": case(lambda s: s.set("train.output", str(s.folder / "run.yaml" / "x")), "run.yaml"),
    "output_holds_an_adapter": case(
        lambda s: (s.folder / "output" / "adapter").mkdir(parents=True), "holds a run already", "overwrite=true"
    ),
    "output_whose_adapter_the_run_goes_on_from": case(
        several(
            lambda s: shutil.copytree(s.adapter, s.folder / "output" / "adapter"),
            lambda s: s.drop("lora"),
            lambda s: s.set("adapter", str(s.folder / "output" / "adapter")),
            setting("train.overwrite", True),
        ),
        "adapter=",
        "would be overwritten",
        "choose another output",
    ),
    "output_is_nameless": case(setting("train.output", ""), "train.output=''", "name of a folder"),
    # Other commands.
    "generate_below_absolute_zero": case(
        command("generate", "--model", "{folder}/model", "--prompt", "a", "--temperature", "-1"), "--temperature -1"
    ),
    "generate_temperature_not_a_number": case(
        command("generate", "--model", "{folder}/model", "--prompt", "a", "--temperature", "nan"), "--temperature nan"
    ),
    "generate_no_tokens": case(
        command("generate", "--model", "{folder}/model", "--prompt", "a", "--max-new-tokens", "0"),
        "--max-new-tokens 0",
        "at least 1",
    ),
    "generate_model_missing": case(
        command("generate", "--model", "nowhere", "--prompt", "a"), "nowhere", "no such folder"
    ),
    "generate_adapter_missing": case(
        command("generate", "--model", "{folder}/model", "--prompt", "a", "--adapter", "nowhere"),
        "nowhere",
        "no such folder",
    ),
    "generate_unknown_dtype": case(
        command("generate", "--model", "{folder}/model", "--prompt", "a", "--dtype", "fp23"), "'fp23'", "float32"
    ),
    "generate_tokenizer_missing": case(
        several(
            command("generate", "--model", "{folder}/model", "--prompt", "a"),
            remove("model/tokenizer.json", "model/tokenizer_config.json"),
        ),
        "tokenizer in",
        "cannot be loaded",
    ),
    "generate_empty_prompt": case(command("generate", "--model", "{folder}/model", "--prompt", ""), "''", "no tokens"),
    "generate_beyond_the_positions": case(
        command("generate", "--model", "{folder}/model", "--prompt", "a", "--max-new-tokens", "1000"),
        "--max-new-tokens 1000",
        "128 positions",
        "shorten",
    ),
    "generate_seed_beyond_64_bits": case(
        command("generate", "--model", "{folder}/model", "--prompt", "a", "--seed", str(2**63)), "--seed", "2**63"
    ),
    "generate_adapter_of_another_model": case(
        several(
            lambda s: s.adapter_weights(narrower_adapter),
            command("generate", "--model", "{folder}/model", "--prompt", "a", "--adapter", "{folder}/adapter"),
        ),
        "[4, 48]",
        "another model",
    ),
    "generate_weight_of_wrong_shape": case(
        several(
            lambda s: s.weights(lambda t: t.update({f"{UP}.weight": torch.zeros(96, 64)})),
            command("generate", "--model", "{folder}/model", "--prompt", "a"),
        ),
        f"{UP}.weight",
        "[96, 64]",
    ),
    "plan_model_missing": case(
        command("plan", "--model", "nowhere", "--topology", "tp=2"), "nowhere", "no such folder"
    ),
    "plan_unknown_axis": case(
        command("plan", "--model", "{folder}/model", "--topology", "pp=2"), "'pp' is not an axis", "did you mean 'tp'?"
    ),
    "plan_tp_that_does_not_divide": case(
        command("plan", "--model", "{folder}/model", "--topology", "tp=3"), "tp=3", "num_attention_heads=8", "{1, 2, 4}"
    ),
}

# Only `train` knows how many processes there will be.
TRAIN_MISTAKES: dict[str, Case] = {
    "more_processes_than_the_topology": case(
        several(setting("topology", "dp=1,tp=2"), lambda s: setattr(s, "nproc", 3)),
        "tp=2",
        "2 processes",
        "3 were started",
    ),
    "processes_that_tp_does_not_divide": case(lambda s: setattr(s, "nproc", 3), "tp=2", "3 processes", "tp in {1, 3}"),
    "no_process": case(lambda s: setattr(s, "nproc", 0), "--nproc 0", "at least 1"),
}

# What argparse refuses ends the process itself.
USAGE_MISTAKES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no_command": ([], ("required", "command")),
    "unknown_command": (["trian", "run.yaml"], ("trian", "train")),
    "run_file_not_given": (["train"], ("RUN.yaml", "required")),
    "nproc_is_not_a_number": (["train", "run.yaml", "--nproc", "two"], ("--nproc", "'two'")),
    "unknown_argument": (["check", "run.yaml", "--fast"], ("--fast",)),
    "generate_without_a_prompt": (["generate", "--model", "m"], ("--prompt", "required")),
    "plan_without_a_topology": (["plan", "--model", "m"], ("--topology", "required")),
}


@pytest.fixture(autouse=True)
def nothing_has_happened_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank, no weight: a mistake must be found without them."""

    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("the mistake went unnoticed until ranks were started or weights were read")

    monkeypatch.setattr(meshlora.train.launch, "launch", too_late)
    monkeypatch.setattr(meshlora.train.run, "train", too_late)
    monkeypatch.setattr(meshlora.state.weights, "_read_slice", too_late)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_one_clear_message(mistake: Case, setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    mistake.make(setup)
    setup.write()
    messages = [message_of(line, setup, capfd) for line in setup.command_lines()]
    assert len(set(messages)) == 1, "check and train disagree"
    assert_words(messages[0], mistake.words)


@pytest.mark.parametrize("mistake", TRAIN_MISTAKES.values(), ids=TRAIN_MISTAKES.keys())
def test_mistake_in_the_number_of_processes(mistake: Case, setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    mistake.make(setup)
    setup.write()
    assert_words(message_of(setup.command_lines()[1], setup, capfd), mistake.words)


@pytest.mark.parametrize(("arguments", "words"), USAGE_MISTAKES.values(), ids=USAGE_MISTAKES.keys())
def test_mistake_on_the_command_line(
    arguments: list[str], words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert_words(one_error(*capfd.readouterr()), (*words, "--help"))


@pytest.mark.parametrize(
    ("device", "num_gpus", "words"),
    [("cuda", 0, ("device: cuda", "no CUDA device")), ("auto", 1, ("2 processes", "there are 1", "start fewer"))],
)
def test_fewer_gpus_than_processes(
    device: str,
    num_gpus: int,
    words: tuple[str, ...],
    setup: Setup,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    setup.set("device", device)
    setup.write()
    assert_words(message_of(setup.command_lines()[1], setup, capfd), words)


def test_the_run_that_is_broken_above_is_good(setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    for prepare in (lambda s: None, Setup.from_adapter):
        prepare(setup)
        setup.write()
        assert main(setup.command_lines()[0]) == 0, capfd.readouterr().err
        assert "ready" in capfd.readouterr().out


def message_of(line: list[str], setup: Setup, capfd: pytest.CaptureFixture[str]) -> str:
    """The one message of a command that must fail with exit code 2 and leave no file."""
    before = sorted(setup.folder.rglob("*"))
    assert main(line) == 2
    assert sorted(setup.folder.rglob("*")) == before
    return one_error(*capfd.readouterr())


def one_error(out: str, err: str) -> str:
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert sum(line.startswith("error: ") for line in err.splitlines()) == 1
    return err.removeprefix("error: ")


def assert_words(message: str, words: tuple[str, ...]) -> None:
    assert not [word for word in words if word not in message], message
