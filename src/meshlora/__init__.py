"""LoRA adapters on any mesh of processes: the adapter one process would have produced.

`import meshlora` imports nothing else: each name below is imported on first access, so that the command line responds
at once, to Ctrl-C too.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshlora.adapter.attach import add_adapter as add_adapter
    from meshlora.adapter.attach import disable_adapter as disable_adapter
    from meshlora.adapter.formats.peft_format import load_adapter as load_adapter
    from meshlora.adapter.formats.peft_format import lora_config as lora_config
    from meshlora.adapter.formats.peft_format import save_adapter as save_adapter
    from meshlora.comm.groups import leave as leave
    from meshlora.layers.head_loss import shifted as shifted
    from meshlora.loading.load import load as load
    from meshlora.reading.preferences import read_preferences as read_preferences
    from meshlora.reading.records import Record as Record
    from meshlora.reading.rollouts import read_rollouts as read_rollouts
    from meshlora.reading.sampler import GlobalBatches as GlobalBatches
    from meshlora.reading.sources import read_records as read_records
    from meshlora.reading.stream import RolloutStream as RolloutStream
    from meshlora.reading.tokenization import tokenize as tokenize
    from meshlora.run.config.file import read_run as read_run
    from meshlora.run.config.run_file import GenerateConfig as GenerateConfig
    from meshlora.run.decoding import generate as generate
    from meshlora.run.feeding import collator as collator
    from meshlora.run.feeding import sampler as sampler
    from meshlora.run.held_out import mean_loss as mean_loss
    from meshlora.run.together import prepare_run as prepare_run
    from meshlora.train.batch import IGNORED as IGNORED
    from meshlora.train.batch import Batch as Batch
    from meshlora.train.batches import share as share
    from meshlora.train.collation import collate as collate
    from meshlora.train.gradsync import clip_gradients as clip_gradients
    from meshlora.train.gradsync import finish_gradients as finish_gradients
    from meshlora.train.losses import language_model_loss as language_model_loss
    from meshlora.train.losses import token_scores as token_scores
    from meshlora.train.packing import joined as joined
    from meshlora.train.packing import with_positions as with_positions
    from meshlora.train.step import step as step
    from meshlora.verify.alone import reference_run as reference_run
    from meshlora.wings.combined.sums import add_weighted_adapter as add_weighted_adapter
    from meshlora.wings.combined.sums import set_adapter as set_adapter
    from meshlora.wings.generation.in_memory import merge as merge
    from meshlora.wings.generation.in_memory import merged as merged
    from meshlora.wings.generation.in_memory import unmerge as unmerge
    from meshlora_extra.hf.adopt import adopt as adopt
    from meshlora_extra.hf.trainer import MeshTrainer as MeshTrainer
    from meshlora_extra.hf.trl import on_mesh as on_mesh
    from meshlora_ground.dataset import Sequence as Sequence
    from meshlora_ground.dataset import TokenizedDataset as TokenizedDataset
    from meshlora_ground.errors import MeshloraError as MeshloraError
    from meshlora_ground.errors import UnsupportedError as UnsupportedError
    from meshlora_ground.errors import UserError as UserError
    from meshlora_ground.float64 import lift as lift
    from meshlora_ground.topology import Topology as Topology
    from meshlora_judge.compare import compare_adapters as compare_adapters
    from meshlora_judge.compare import largest_loss_gap as largest_loss_gap
    from meshlora_judge.compare import read_losses as read_losses

__version__ = "0.1.0"

# PEFT imports bitsandbytes wherever it is installed, which then reports a missing fast path in every process.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

_HOME = {
    "IGNORED": "meshlora.train.batch",
    "Batch": "meshlora.train.batch",
    "collate": "meshlora.train.collation",
    "shifted": "meshlora.layers.head_loss",
    "Sequence": "meshlora_ground.dataset",
    "TokenizedDataset": "meshlora_ground.dataset",
    "joined": "meshlora.train.packing",
    "with_positions": "meshlora.train.packing",
    "read_preferences": "meshlora.reading.preferences",
    "Record": "meshlora.reading.records",
    "read_rollouts": "meshlora.reading.rollouts",
    "GlobalBatches": "meshlora.reading.sampler",
    "share": "meshlora.train.batches",
    "read_records": "meshlora.reading.sources",
    "tokenize": "meshlora.reading.tokenization",
    "add_adapter": "meshlora.adapter.attach",
    "disable_adapter": "meshlora.adapter.attach",
    "set_adapter": "meshlora.wings.combined.sums",
    "add_weighted_adapter": "meshlora.wings.combined.sums",
    "load_adapter": "meshlora.adapter.formats.peft_format",
    "lora_config": "meshlora.adapter.formats.peft_format",
    "save_adapter": "meshlora.adapter.formats.peft_format",
    "merge": "meshlora.wings.generation.in_memory",
    "merged": "meshlora.wings.generation.in_memory",
    "unmerge": "meshlora.wings.generation.in_memory",
    "load": "meshlora.loading.load",
    "MeshloraError": "meshlora_ground.errors",
    "UnsupportedError": "meshlora_ground.errors",
    "UserError": "meshlora_ground.errors",
    "adopt": "meshlora_extra.hf.adopt",
    "MeshTrainer": "meshlora_extra.hf.trainer",
    "on_mesh": "meshlora_extra.hf.trl",
    "lift": "meshlora_ground.float64",
    "Topology": "meshlora_ground.topology",
    "leave": "meshlora.comm.groups",
    "collator": "meshlora.run.feeding",
    "sampler": "meshlora.run.feeding",
    "clip_gradients": "meshlora.train.gradsync",
    "finish_gradients": "meshlora.train.gradsync",
    "mean_loss": "meshlora.run.held_out",
    "language_model_loss": "meshlora.train.losses",
    "token_scores": "meshlora.train.losses",
    "step": "meshlora.train.step",
    "read_run": "meshlora.run.config.file",
    "prepare_run": "meshlora.run.together",
    "GenerateConfig": "meshlora.run.config.run_file",
    "generate": "meshlora.run.decoding",
    "RolloutStream": "meshlora.reading.stream",
    "reference_run": "meshlora.verify.alone",
    "compare_adapters": "meshlora_judge.compare",
    "largest_loss_gap": "meshlora_judge.compare",
    "read_losses": "meshlora_judge.compare",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
