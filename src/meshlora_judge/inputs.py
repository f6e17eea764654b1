"""The inputs of both sides: a twin on disk, and an adapter with A and B non-zero, made by transformers and peft.

Values are pure functions of (seed, name). The rule for fresh adapters is written a second time from docs/oracle.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from meshlora_ground.compat.peft_targets import targets_as_configured
from meshlora_ground.model_class import model_class
from meshlora_ground.names_in_file import names_to_write
from meshlora_ground.objective import TEXT, Objective
from meshlora_judge import experts
from meshlora_judge.pieces import mask_of, pieces_of


def write_twin(config: PretrainedConfig, folder: Path, *, dtype: torch.dtype, seed: int) -> None:
    """A checkpoint with random weights; norms are moved off 1, biases and buffers off 0, which would hide faults.

    Zeros beside other numbers in a buffer are what it leaves out, as the later tokens in decays of minimax: they stay.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).from_config(config, dtype=torch.float64, attn_implementation="eager")
        with torch.no_grad():
            stored = model.state_dict().keys()
            buffers = [own for name, own in model.named_buffers() if name in stored and own.is_floating_point()]
            left_out = {own: own == 0 for own in buffers if own.any()}
            for tensor in (*model.parameters(), *buffers):
                tensor.add_(torch.randn_like(tensor), alpha=0.05)
                if tensor in left_out:
                    tensor[left_out[tensor]] = 0
                tensor.data = tensor.to(dtype)  # not all of the model: complex numbers of Llama 4 would become real
            _fill_tables(model)
    model.save_pretrained(folder)


def _fill_tables(model: Any) -> None:
    """Give each token experts of its own, all different, in tables that transformers leaves at zero (deepseek_v4)."""
    for module in model.modules():
        if isinstance(table := getattr(module, "tid2eid", None), Tensor):
            orders = torch.rand(len(table), module.num_experts).argsort(-1)
            table.copy_(orders[:, : table.shape[1]])


def write_adapter(
    model: str | Path,
    lora: Mapping[str, Any],
    folder: Path,
    *,
    seed: int,
    trust_remote_code: bool,
    objective: Objective = TEXT,
    pieces: dict[str, list[str]] | None = None,
    share_experts: bool = False,
) -> None:
    """PEFT's adapter for the configuration `lora`, with values drawn by name, A and B both non-zero."""
    pieces = pieces or {}
    with targets_as_configured():
        peft_model = without_values(model, LoraConfig(**lora), objective, trust_remote_code=trust_remote_code)
    stacks = experts.adapted_stacks(peft_model, is_shared=share_experts)
    stored = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    folder.mkdir(parents=True)
    config = peft_model.get_base_model().config
    peft_model.peft_config["default"].save_pretrained(str(folder))
    drawn = {key: _draw(seed, key, tuple(tensor.shape)) for key, tensor in stored.items()}
    of_experts = experts.names_in_file([key.removeprefix(experts.PREFIX) for key in drawn], stacks)
    for key, value in drawn.items():
        name = of_experts.get(key.removeprefix(experts.PREFIX), experts.plain_name(key))
        module, _, side = name.rpartition(".lora_")
        stack = stacks.get(module)
        if stack is not None:
            drawn[key] = value = _of_experts(value, side, stack)
        if side == experts.output_side(stack) and (names := pieces_of(module, pieces)):
            if stack is not None:  # in PEFT's file a shared factor is repeated for each expert
                stack = dataclasses.replace(stack, is_shared=False)
            value *= mask_of(config, module, names, value.shape, stack)
        if ".lora_" not in key:  # PEFT holds it in the dtype of the base, whatever the file's: any dtype has these
            drawn[key] = value.bfloat16().to(value.dtype)
    first: dict[int, str] = {}
    for name, parameter in peft_model.named_parameters(remove_duplicate=False):
        key = name.replace(".modules_to_save.default.", ".")
        if ".modules_to_save." in name and first.setdefault(id(parameter), key) != key:  # ensure_weight_tying
            drawn[key] = drawn[first[id(parameter)]].clone()
    if pieces or share_experts:
        own_file: dict[str, Any] = {"pieces": pieces}
        if share_experts:
            own_file["share_experts"] = True
        (folder / "meshlora.json").write_text(json.dumps(own_file), encoding="utf-8")
    named = _as_peft_loads(peft_model, drawn)
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _as_peft_loads(peft_model: Any, drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`drawn` under keys that PEFT loads as those of `drawn`: of some families it does not load what it saves."""
    module_of: dict[str, str] = {}
    for key in drawn:
        if ".lora_" in key:
            module_of[key] = key.removeprefix(experts.PREFIX).partition(".lora_")[0]
    renamed = names_to_write(peft_model.get_base_model(), dict.fromkeys(module_of.values()))
    found: dict[str, Tensor] = {}
    for key, value in drawn.items():
        module = module_of.get(key, "")
        found[key.replace(module, renamed.get(module, module), 1)] = value
    return found


def without_values(model: str | Path, lora: LoraConfig, objective: Objective, *, trust_remote_code: bool) -> Any:
    """PEFT's model for the checkpoint folder `model`, on the meta device: no weight is read."""
    config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=trust_remote_code)
    objective.configure(config)
    with torch.device("meta"):
        base = model_class(config).from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        lora.base_model_name_or_path = None  # else PEFT warns where it is another path of the same folder
        return get_peft_model(base, lora)


def _of_experts(drawn: Tensor, side: str, stack: experts.Stack) -> Tensor:
    """PEFT's factor of all experts: B scaled as on a linear, a shared factor repeated for each expert."""
    if side != "A":
        drawn = drawn * math.sqrt(stack.num_experts)
    if stack.is_shared:
        repeated = experts.Repeated(stack.num_experts, is_a=side == "A")
        return repeated.forward(repeated.right_inverse(drawn))
    return drawn


def _draw(seed: int, key: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:  # a magnitude, a norm or a bias: around 1, around 0
        return torch.randn(shape, generator=_generator(f"verify:{seed}:{key}")) * 0.1 + (not key.endswith("bias"))
    # B is small beside A: the adapter is far above rounding, but a deep model with it still computes finite numbers.
    largest = 0.25 if ".lora_B" in key or ".lora_embedding_B" in key else 1.0
    return torch.randn(shape, generator=_generator(f"verify:{seed}:{key}")) * (largest / math.sqrt(shape[-1]))


def expected_fresh(
    name: str, shape: tuple[int, ...], *, init: bool | str, seed: int, stacks: Mapping[str, experts.Stack]
) -> Tensor:
    """The whole factor `name` of a fresh adapter, for example `model.layers.0.mlp.up_proj.lora_A`.

    A is uniform in ±1/sqrt(in_features), or N(0, 1/r^2) for "gaussian"; B is zero, or uniform in ±1/sqrt(r) if `init`
    is False. On an embedding A is zero and B N(0, 1), or both N(0, 1). "orthogonal" is `_orthogonal`. The generator's
    seed is the first 8 bytes of sha256("{seed}:{name}"), halved. Each piece has its own name: `c_attn.lora_A.q`. So has
    each expert: `mlp.experts.gate_up_proj.lora_A.3`; where PEFT swaps the input and output sides, A and B swap in these
    rules.
    """
    module, _, part = name.rpartition(".lora_")
    stack = stacks.get(experts.stack_of(module))
    if stack is not None and not stack.is_shared:
        name = f"{experts.stack_of(module)}.lora_{part}.{module.split('.')[-2]}"
    part = part.partition(".")[0]
    generator = _generator(f"{seed}:{name}")
    if init == "orthogonal":
        return _orthogonal(module, part, shape, seed=seed)
    if part.startswith("embedding"):
        if part.endswith("A") and init is not False:
            return torch.zeros(shape)
        return torch.randn(shape, generator=generator)
    if len(shape) == 1:  # the bias of B, with `lora_bias`
        return torch.zeros(shape)
    is_swapped = stack is not None and stack.is_swapped
    is_first = part == ("B" if is_swapped else "A")
    if not is_first and init is not False:
        return torch.zeros(shape)
    rank, fan_in = shape
    if is_swapped:
        fan_in, rank = shape
    if init == "gaussian" and is_first:
        return torch.randn(shape, generator=generator) / rank
    return (torch.rand(shape, generator=generator) * 2 - 1) * (1 / math.sqrt(fan_in))


def _orthogonal(module: str, part: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """PEFT's: A of the odd rows of an orthogonal matrix, B of the even ones, each times a normal matrix / 10."""
    rank = shape[0] if part == "A" else shape[1]
    square = torch.randn(rank, rank, generator=_generator(f"{seed}:{module}.lora_Q"))
    rows = torch.linalg.qr(square)[0]
    generator = _generator(f"{seed}:{module}.lora_{part}")
    if part == "A":
        return torch.randn(shape[1], rank // 2, generator=generator).mm(rows[::2]).T / 10
    return torch.randn(rank // 2, shape[0], generator=generator).T.mm(rows[1::2]) / 10


def _generator(text: str) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") // 2
    return torch.Generator().manual_seed(seed)
