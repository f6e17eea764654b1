"""What the scripts of the gallery share: a tiny base, rows of unequal lengths, and ranks of gloo on this machine.

    python examples/judge/gallery/NAME.py FOLDER [--repaired]

writes FOLDER/base and what the judge is given, FOLDER/seen or FOLDER/adapter. --repaired: the fault is taken out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Threads of torch do not live on in a fork: there must be none.
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
logging.disable_progress_bar()
logging.set_verbosity_error()

LENGTHS = (9, 5, 12, 7, 4, 11, 6, 3)
VOCABULARY = 97
# Of a Trainer that takes one step, and is silent.
ONE_STEP = {"max_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
# What a script does on one rank: (rank, its folder, whether the fault is taken out).
Patient = Callable[[int, Path, bool], None]


def write_base(folder: Path, **sizes: Any) -> None:
    """A Llama of two layers, its weights drawn, in `folder`/base."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**(shape | sizes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder / "base")


def base_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "base")


def with_adapter(model: Any, *, seed: int = 1, **lora: Any) -> Any:
    """PEFT's model with a LoRA whose B is not zero, as in the middle of a run."""
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **(options | lora)))


def rows(lengths: Sequence[int] = LENGTHS) -> list[dict[str, list[int]]]:
    """One row of each length; the first third of it is a prompt, whose labels are -100."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in lengths:
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        prompt = length // 3
        found.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return found


def collated(few: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch, padded on the right."""
    width = max(len(row["input_ids"]) for row in few)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in few:
        own = len(row["input_ids"])
        batch["input_ids"].append(row["input_ids"] + [0] * (width - own))
        batch["attention_mask"].append([1] * own + [0] * (width - own))
        batch["labels"].append(row["labels"] + [-100] * (width - own))
    return {name: torch.tensor(values) for name, values in batch.items()}


def trained_of(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def num_trained(few: Sequence[dict[str, list[int]]]) -> int:
    """Tokens that are predicted: a row's first one is not."""
    return sum(label != -100 for row in few for label in row["labels"][1:])


def sharded(model: Any) -> Any:
    """The model with FSDP2 on each layer and on the whole, over both ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = next(module for name, module in model.named_modules() if name.endswith("model.layers"))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def run(patient: Patient, *, ranks: int = 2, group: bool = True, **sizes: Any) -> None:
    """Write the base, then `patient` on every rank. group: open torch's process group there."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new one")
    parser.add_argument("--repaired", action="store_true", help="with the fault taken out")
    options = parser.parse_args()
    write_base(options.folder, **sizes)
    context = multiprocessing.get_context("fork")
    given = (patient, ranks, group, options.folder, options.repaired)
    processes = [context.Process(target=_on_rank, args=(rank, *given)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


def _on_rank(rank: int, patient: Patient, ranks: int, group: bool, folder: Path, is_repaired: bool) -> None:
    port = 20000 + os.getppid() % 20000
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "RANK": f"{rank}", "WORLD_SIZE": f"{ranks}"}
    os.environ.update(address | {"LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": f"{ranks}", "ACCELERATE_USE_CPU": "true"})
    if group:
        dist.init_process_group("gloo", init_method=f"file://{folder.absolute()}/store", rank=rank, world_size=ranks)
    patient(rank, folder, is_repaired)
    if dist.is_initialized():
        dist.destroy_process_group()
