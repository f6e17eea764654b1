"""The final check of a merge: logits of transformers + peft with the adapter against those of the merged model.

Owns: running both, and the tolerance. Uses none of the arithmetic of `meshlora_extra.merging.changes`.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import logging

from meshlora.model.weights import CheckpointSource
from meshlora_extra.merging.head import set_head
from meshlora_ground.compat.peft_targets import targets_as_configured
from meshlora_ground.errors import MeshloraError, reason
from meshlora_ground.float64 import wide_dtype
from meshlora_ground.model_class import model_class, take_quantization

_NUM_TOKENS = 12
# Relative to the logits' norm. Below float32, merged weights are rounded once more than PEFT's.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Base:
    """A base to run. source: its weights, where they are in few bits, which transformers might keep. adapter: that goes
    on it, and decides of its head.
    """

    folder: Path
    trust_remote_code: bool = False
    source: CheckpointSource | None = None
    adapter: Path | None = None

    def load(self, dtype: torch.dtype) -> Any:
        """The model in `dtype`, in plain numbers."""
        options = {"local_files_only": True, "trust_remote_code": self.trust_remote_code}
        config = AutoConfig.from_pretrained(self.folder, **options)
        if self.adapter is not None:
            set_head(config, self.adapter)
        # Other experts lack float64.
        how = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
        if self.source is None:
            return model_class(config).from_pretrained(self.folder, config=config, **how, **options)
        take_quantization(config)
        model = model_class(config).from_config(config, trust_remote_code=self.trust_remote_code, **how)
        with torch.no_grad():
            for name, value in model.state_dict().items():
                if self.source.shape(name) is not None:
                    value.copy_(self.source.read(name))
        return model


def compare_logits(model: Base, adapter: Path, merged: Base, stored: torch.dtype | None) -> float:
    """Relative L2 difference on random tokens between the logits of `merged` and of `model` with `adapter`.

    Both run in float32 (float64 if `stored` is), one after the other. Of weights in few bits (`stored` None) no limit
    is known. Rounded weights can flip the choice of a router
    at a tie, so if a model with experts differs, its logits are compared with those of PEFT's own merge, also rounded
    to `stored`.

    Raises:
        MeshloraError: they differ by more than rounding to `stored` explains, or one of them does not run.
    """
    dtype = torch.float32 if stored is None else wide_dtype(stored)
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as stack, targets_as_configured():
            if logging.is_progress_bar_enabled():
                logging.disable_progress_bar()
                stack.callback(logging.enable_progress_bar)
            warnings.simplefilter("ignore")  # peft's, about tied weights and fan_in_fan_out
            base = model.load(dtype)
            theirs = _logits(PeftModel.from_pretrained(base, str(adapter), torch_device="cpu"))
            del base
            model_of_ours = merged.load(dtype)
            ours = _logits(model_of_ours)
            chooses = any(each.ndim == 3 and ".experts." in name for name, each in model_of_ours.named_parameters())
            del model_of_ours
            difference = _relative(ours, theirs)
            if stored is None:
                return difference
            if difference > _TOLERANCE[stored] and stored != dtype and chooses:
                difference = _relative(ours, _logits(_merged_by_peft(model, adapter, stored)))
    except Exception as error:  # two libraries and every family: any type
        raise MeshloraError(
            f"merged model: transformers + peft cannot run it to compare logits ({reason(error)}); "
            "nothing was written; --no-logits leaves this out"
        ) from error
    if not difference <= _TOLERANCE[stored]:
        raise MeshloraError(
            f"merged model: its logits differ from those of model + adapter by {difference:.1e} of their norm, and "
            f"{_TOLERANCE[stored]:.0e} is what rounding explains; nothing was written"
        )
    return difference


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def _merged_by_peft(model: Base, adapter: Path, stored: torch.dtype) -> Any:
    """PEFT's own merge in float32, its weights rounded to `stored`."""
    base = model.load(torch.float32)
    merged = PeftModel.from_pretrained(base, str(adapter), torch_device="cpu").merge_and_unload()
    with torch.no_grad():
        for parameter in merged.parameters():
            parameter.copy_(parameter.to(stored))
    return merged


def _logits(model: Any) -> Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (2, _NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids))
    logits: Tensor = found.logits if "logits" in found else found.last_hidden_state
    return logits.double()
