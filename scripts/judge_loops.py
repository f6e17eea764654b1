"""Training loops as other people write them, drawn from a seed: plain PEFT, DDP, FSDP2 or an all-reduce by hand.

Owns: what is drawn, and the loop, in the small methods that a planted fault replaces (`judge_faults`). Every loop is
right: the step of one process. Knows of the judge `meshlora_judge.record` alone. Does not own: the trials.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import meshlora_judge

VOCABULARY, STEPS, UNTRAINED = 97, 2, -100
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Family -> what its configuration has besides, and the modules that are adapted; "" for all linears.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": ({"tie_word_embeddings": False}, ("q_proj", "v_proj", "down_proj")),
    "qwen2": ({"tie_word_embeddings": True}, ("q_proj", "k_proj", "o_proj")),
    "qwen3": ({"head_dim": 8}, ()),
    "gemma2": ({"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}, ("q_proj", "o_proj")),
    "gemma3_text": ({"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}, ()),
    "mistral": ({"sliding_window": 5, "head_dim": 8}, ("q_proj", "v_proj")),
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48}, ("c_attn", "c_proj")),
    "phi3": ({"pad_token_id": 0}, ("qkv_proj", "gate_up_proj")),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, ("q_proj", "fc1")),
    "gpt_neox": ({}, ("query_key_value", "dense")),
    "qwen3_moe": (_MOE | {"head_dim": 8, "decoder_sparse_step": 1}, ("q_proj", "o_proj")),
    "mixtral": (_MOE, ("q_proj", "v_proj")),
}
# Optimizer -> its options.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6},
    "Adam": {"lr": 5e-3, "betas": (0.9, 0.95)},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5},
    "Adafactor": {"lr": 1e-2},
    "NAdam": {"lr": 2e-3},
    "Adagrad": {"lr": 1e-2},
}


@dataclass(frozen=True)
class Loop:
    """What somebody trains, and how.

    Attributes:
        dtype, adapter_dtype, autocast: of the base, of the adapter, of the forward ("": none).
        wrapper: none, ddp, fsdp2, or by hand: gradients summed by an all-reduce of the loop's own.
        micro: micro-batches of each rank. layout: right, left, packed or plain. loss: items, labels or own.
        no_token: the micro-batch (of rank 0) without any trained token, or -1. fresh: B begins with zero.
        warm: steps before the recorded ones. lora: further options of PEFT.
    """

    seed: int = 0
    family: str = "llama"
    dtype: str = "float64"
    adapter_dtype: str = "float64"
    autocast: str = ""
    wrapper: str = "none"
    micro: tuple[int, ...] = (2,)
    rows: int = 2
    layout: str = "right"
    attention: str = "sdpa"
    loss: str = "items"
    optimizer: str = "AdamW"
    groups: bool = False
    schedule: bool = False
    clip: float = 0.0
    no_token: int = -1
    fresh: bool = False
    warm: int = 1
    checkpointing: str = ""
    adapters: int = 1
    r: int = 4
    alpha: int = 8
    lora: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return len(self.micro)

    def __str__(self) -> str:
        """What is unlike the default."""
        said = [self.family, self.dtype, self.wrapper]
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name not in ("seed", "family", "dtype", "wrapper") and value != each.default and value:
                said.append(f"{each.name}={value}")
        return " ".join(said)


def drawn(seed: int, *, only: Mapping[str, Any] | None = None) -> Loop:
    """A right loop. only: what is not left to chance."""
    draw = random.Random(seed)
    family = draw.choice(list(FAMILIES))
    dtype = draw.choice(["float64", "float64", "float32", "float32", "bfloat16"])
    autocast = draw.choice(["", "", "bfloat16"]) if dtype == "float32" else ""
    adapter_dtype = draw.choice([dtype, "float32"]) if dtype == "bfloat16" else dtype
    wrapper = draw.choice(["none", "ddp", "ddp", "fsdp2", "by hand"])
    micro = [draw.randint(1, 4)] * (1 if wrapper == "none" else 2)
    if wrapper in ("ddp", "by hand") and draw.random() < 0.3:
        micro[1] = draw.randint(1, 4)
    options = {
        "seed": seed,
        "family": family,
        "dtype": dtype,
        "adapter_dtype": adapter_dtype,
        "autocast": autocast,
        "wrapper": wrapper,
        "micro": tuple(micro),
        "rows": draw.choice([1, 2, 3]),
        "layout": draw.choice(["right", "right", "left", "packed", "plain"]),
        "attention": draw.choice(["sdpa", "eager"]),
        "loss": draw.choice(["items", "labels", "own"]),
        "optimizer": draw.choice(["AdamW"] * 6 + list(OPTIMIZERS)),
        "groups": draw.random() < 0.4,
        "schedule": draw.random() < 0.5,
        "clip": draw.choice([0.0, 0.05, 1.0]),
        "fresh": draw.random() < 0.25,
        "warm": draw.choice([0, 1, 2]),
        "r": draw.choice([2, 4, 8]),
        "alpha": draw.choice([4, 8, 12]),
        "lora": _lora(draw, family, wrapper),
    }
    if family == "gemma2":
        options["attention"] = "eager"  # transformers has no other
    if wrapper == "fsdp2" and options["optimizer"] == "Adafactor":
        options["optimizer"] = "Adam"  # torch 2.13's Adafactor fails on a sharded parameter
    if dtype == "float64" and options["layout"] in ("left", "right"):
        # transformers' softmax in float32 makes NaN of a row that sees nothing: padding on the left, or in a window.
        options["layout"] = "plain" if "sliding_window" in FAMILIES[family][0] else "right"
    if family in ("opt", "gpt2") and options["layout"] == "packed":
        options["layout"] = "right"  # they count positions on from the mask, or take none
    if adapter_dtype != dtype:
        options["lora"].pop("modules_to_save", None)  # a head of another dtype takes no hidden states
    if options["loss"] != "labels" and sum(micro) > 1 and draw.random() < 0.2:
        options["no_token"] = 0
    if draw.random() < 0.2 and not family.startswith(("qwen3_moe", "mixtral")):
        options["checkpointing"] = "reentrant" if wrapper == "none" else "not reentrant"
    if draw.random() < 0.15 and wrapper != "fsdp2":
        options["adapters"] = 2
    return Loop(**(options | dict(only or {})))


def _lora(draw: random.Random, family: str, wrapper: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kind = draw.choice(["", "", "", "rslora", "dora", "patterns", "saved", "embeddings", "bias", "parameters"])
    if kind == "rslora":
        found["use_rslora"] = True
    if kind == "dora" and wrapper != "fsdp2":
        found["use_dora"] = True
    if kind == "patterns":
        first = next(iter(FAMILIES[family][1]), "q_proj")
        found |= {"rank_pattern": {first: 3}, "alpha_pattern": {first: 5}}
    if kind == "saved" and family in ("llama", "mistral", "phi3"):
        found["modules_to_save"] = ["lm_head"]
    if kind == "embeddings" and family in ("llama", "mistral"):
        found["target_modules"] = [*FAMILIES[family][1], "embed_tokens"]
    if kind == "bias" and family in ("qwen2", "gpt_neox", "opt"):
        found["bias"] = "lora_only"
    if kind == "parameters" and family in ("qwen3_moe", "mixtral") and wrapper == "none":
        found["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    return found


def base_of(loop: Loop, folder: Path) -> Path:
    """The checkpoint of a loop's base, written once for each family and dtype."""
    path = folder / f"{loop.family}-{loop.dtype}"
    if not path.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(loop.family, **(_SIZES | FAMILIES[loop.family][0]))
        for name in vars(config):
            if "drop" in name or name.endswith("pdrop"):
                setattr(config, name, 0.0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.to(getattr(torch, loop.dtype)).save_pretrained(path)
    return path


class Trainer:
    """One rank of a loop. A fault replaces a method, or what one of them returns."""

    def __init__(self, loop: Loop, rank: int, base: Path) -> None:
        self.loop, self.rank, self.base = loop, rank, base
        self.draw = random.Random(loop.seed)
        self.number = 0
        self.recorder: Any = None
        self.model = self.wrapped(self.adapted(self.loaded()))
        self.optimizer = self.made_optimizer()
        self.schedule = None
        if loop.schedule:
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.scaler = torch.amp.GradScaler("cpu") if loop.autocast == "float16" else None

    # What is trained.

    def loaded(self) -> Any:
        dtype = getattr(torch, self.loop.dtype)
        options = {"attn_implementation": self.loop.attention}
        if self.loop.family in ("qwen3_moe", "mixtral"):
            options["experts_implementation"] = "eager"  # torch's grouped matmul has no float64
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=dtype, **options)
        if self.loop.checkpointing:
            kind = {"use_reentrant": self.loop.checkpointing == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kind)
            model.enable_input_require_grads()
        return model

    def config(self) -> LoraConfig:
        loop = self.loop
        options: dict[str, Any] = {"target_modules": list(FAMILIES[loop.family][1]) or "all-linear"}
        options |= loop.lora
        if loop.family == "gpt2":
            options["fan_in_fan_out"] = True
        if loop.seed % 3 == 0 and "target_parameters" not in options:
            options["lora_dropout"] = 0.1  # which recording turns off
        return LoraConfig(r=loop.r, lora_alpha=loop.alpha, init_lora_weights=loop.fresh, **options)

    def adapted(self, model: Any) -> Any:
        torch.manual_seed(self.loop.seed)
        name = "default" if self.loop.adapters == 1 else "first"
        found = get_peft_model(model, self.config(), adapter_name=name, autocast_adapter_dtype=False)
        if self.loop.adapters == 2:
            found.add_adapter("second", self.config(), autocast_adapter_dtype=False)
            found.set_adapter("second")
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, self.loop.adapter_dtype))
        return found.train()

    def wrapped(self, model: Any) -> Any:
        self.inner = model
        if self.loop.wrapper == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        if self.loop.wrapper == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (self.loop.world,))
            layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.inner.named_parameters() if p.requires_grad}

    def made_optimizer(self) -> torch.optim.Optimizer:
        options = dict(OPTIMIZERS[self.loop.optimizer])
        groups: Any = [*self.trained().values()]
        if self.loop.groups:
            first = [p for name, p in self.trained().items() if "lora_A" in name]
            others = [p for name, p in self.trained().items() if "lora_A" not in name]
            groups = [{"params": first, "weight_decay": 0.02}, {"params": others, "lr": options["lr"] * 2}]
        return getattr(torch.optim, self.loop.optimizer)(groups, **options)

    # What it is trained on: every rank can make the rows of all.

    def rows(self, number: int, rank: int) -> list[dict[str, Tensor]]:
        """The micro-batches of a rank in a step."""
        generator = torch.Generator().manual_seed(1000 * self.loop.seed + 10 * number + rank)
        draw = random.Random(f"{self.loop.seed} {number} {rank}")
        found = []
        for micro in range(self.loop.micro[rank]):
            equal = draw.randint(5, 12)
            lengths = [equal if self.loop.layout == "plain" else draw.randint(4, 13) for _ in range(self.loop.rows)]
            texts = []
            for length in lengths:
                ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
                labels = torch.where(torch.arange(length) < draw.randint(1, length // 2), UNTRAINED, ids)
                if rank == 0 and micro == self.loop.no_token:
                    labels = torch.full_like(labels, UNTRAINED)
                texts.append((ids, labels))
            found.append(_packed(texts) if self.loop.layout == "packed" else _padded(texts, self.loop.layout))
        return found

    def micro_batches(self) -> list[dict[str, Tensor]]:
        return self.rows(self.number, self.rank)

    def total(self) -> int:
        """Trained tokens of the step, of all ranks."""
        every = [batch for rank in range(self.loop.world) for batch in self.rows(self.number, rank)]
        return sum(map(tokens, every))

    # A step.

    def labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["labels"]

    def forward(self, batch: dict[str, Any]) -> Any:
        kind = self.loop.autocast
        around = torch.autocast("cpu", dtype=getattr(torch, kind)) if kind else contextlib.nullcontext()
        with around:
            return self.model(**batch, use_cache=False)

    def loss_of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum over trained tokens."""
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=UNTRAINED)
        each = logits.flatten(0, 1) if logits.dtype == torch.float64 else logits.flatten(0, 1).float()
        return nn.functional.cross_entropy(each, shifted.flatten(), reduction="sum")

    def weight(self, k: int, batch: Mapping[str, Tensor]) -> float:
        """By what the sum of a micro-batch's losses is multiplied, before ranks are averaged or summed."""
        return self.by_wrapper() / self.total()

    def by_wrapper(self) -> int:
        return self.loop.world if self.loop.wrapper in ("ddp", "fsdp2") else 1

    def loss(self, k: int, batch: dict[str, Tensor]) -> Tensor:
        weight = self.weight(k, batch)
        if self.loop.loss == "own":
            self.recorder.note(labels=batch["labels"])
            logits = self.forward({name: value for name, value in batch.items() if name != "labels"}).logits
            return self.loss_of_logits(logits, self.labels(batch)) * weight
        given = batch | {"labels": self.labels(batch)}
        if self.loop.loss == "labels":
            return self.forward(given).loss * (tokens(batch) * weight)
        items = torch.tensor(1 / weight if weight else 1e30)
        return self.forward(given | {"num_items_in_batch": items}).loss

    def backward(self, k: int, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def is_summed(self, k: int, number: int) -> bool:
        """Whether the wrapper communicates after micro-batch k of `number`."""
        return k == number - 1

    def after_micro(self, k: int, number: int) -> None:
        pass

    def reduce(self) -> None:
        if self.loop.wrapper == "by hand":
            for parameter in self.trained().values():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)

    def before_clipping(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def clip(self) -> None:
        if self.loop.clip:
            torch.nn.utils.clip_grad_norm_([*self.trained().values()], self.loop.clip)

    def before_update(self) -> None:
        pass

    def update(self) -> None:
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def after_update(self) -> None:
        if self.schedule is not None:
            self.schedule.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        batches = self.micro_batches()
        for k, batch in enumerate(batches):
            with self.no_sync(not self.is_summed(k, len(batches))):
                self.backward(k, self.loss(k, batch))
            self.after_micro(k, len(batches))
        self.reduce()
        self.before_clipping()
        self.clip()
        self.before_update()
        self.update()
        self.after_update()
        self.clear()
        self.number += 1

    @contextlib.contextmanager
    def no_sync(self, is_off: bool) -> Any:
        if is_off and self.loop.wrapper == "ddp":
            with self.model.no_sync():
                yield
        else:
            yield

    def started(self) -> None:
        """Recording has begun."""

    def run(self, folder: Path) -> None:
        self.recorder = _Silent()
        for _ in range(self.loop.warm):
            self.step()
        with meshlora_judge.record(self.model, folder, steps=STEPS) as self.recorder:
            self.started()
            for _ in range(STEPS):
                self.step()


class _Silent:
    def note(self, **_: Any) -> None:
        pass


def tokens(batch: Mapping[str, Tensor]) -> int:
    """Trained tokens of a micro-batch."""
    return int((batch["labels"][:, 1:] != UNTRAINED).sum())


def _padded(texts: list[tuple[Tensor, Tensor]], layout: str) -> dict[str, Tensor]:
    longest = max(len(ids) for ids, _ in texts)
    found = {
        "input_ids": torch.zeros(len(texts), longest, dtype=torch.long),
        "attention_mask": torch.zeros(len(texts), longest, dtype=torch.long),
        "labels": torch.full((len(texts), longest), UNTRAINED),
    }
    for row, (ids, labels) in enumerate(texts):
        place = slice(longest - len(ids), None) if layout == "left" else slice(0, len(ids))
        found["input_ids"][row, place] = ids
        found["attention_mask"][row, place] = 1
        found["labels"][row, place] = labels
    if layout == "plain":
        found.pop("attention_mask")
    return found


def _packed(texts: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """All in one row, told apart by their positions."""
    labels = [labels.index_fill(0, torch.tensor([0]), UNTRAINED) for _, labels in texts]
    return {
        "input_ids": torch.cat([ids for ids, _ in texts])[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in texts])[None],
    }
