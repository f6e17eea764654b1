"""Models of a command are replaced as they are read: by a twin of the same kind, with random weights, made once.

A twin has the vocabulary of its original and lies beside its tokenizer, so that a recipe's texts fit. Does not own: how
a configuration shrinks (`meshlora_judge.twin`).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from meshlora_judge.running.child import Run

# Where a model is to lie, which a twin on a CPU need not be told.
_PLACES = ("device_map", "max_memory", "offload_folder", "offload_state_dict", "offload_buffers")
# Which file is read: of a twin there is one.
_SOURCES = ("revision", "subfolder", "variant", "use_safetensors", "gguf_file", "cache_dir", "token", "force_download")
_ON_CPU = ("eager", "sdpa", "flex_attention")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".h5", ".msgpack")


def replace_models(module: Any, run: Run) -> None:
    """`PreTrainedModel.from_pretrained`, which also the Auto classes call. module: transformers.modeling_utils."""
    if not run.has_twins:
        return
    original = module.PreTrainedModel.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        twins = (run.folder / "twins").resolve()
        if path is not None and not Path(path).resolve().is_relative_to(twins):
            with run.refusing():
                path, kwargs = _replaced(path, kwargs, twins, run)
        return original(cls, path, *args, **kwargs)

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _replaced(path: Any, given: dict[str, Any], twins: Path, run: Run) -> tuple[Path, dict[str, Any]]:
    """(folder of the twin, the arguments with which it is read)."""
    from transformers import AutoConfig, PretrainedConfig

    from meshlora_ground.compat.transformers_models import attention_of
    from meshlora_ground.errors import UnsupportedError

    if given.get("quantization_config") is not None:
        rule = "a twin's weights are random, so what their rounding loses would say nothing"
        raise UnsupportedError("quantization_config", rule, "run the recipe without it, or in full size by --no-twin")
    source: dict[str, Any] = {
        name: given[name] for name in ("revision", "subfolder", "cache_dir", "token") if name in given
    }
    config = given.get("config")
    if not isinstance(config, PretrainedConfig):
        config = AutoConfig.from_pretrained(config or path, **source)
    folder = _twin_of(path, config, twins, run, source)
    kept = {name: value for name, value in given.items() if name not in (*_PLACES, *_SOURCES)}
    if "config" in kept:
        kept["config"] = AutoConfig.from_pretrained(folder)
    attention = kept.get("attn_implementation") or attention_of(config)  # the Auto classes put it there
    if isinstance(attention, str):
        if attention not in _ON_CPU:
            run.say(f"attn_implementation={attention} is sdpa, as on CPUs")
            attention = "sdpa"
        kept["attn_implementation"] = attention
    return folder, kept


def _twin_of(path: Any, config: Any, twins: Path, run: Run, source: dict[str, Any]) -> Path:
    """The folder of the twin for `config`. The first process makes it, the others wait."""
    from meshlora_ground.files import new_folder
    from meshlora_judge.twin import shrink_config

    asked = json.dumps([f"{path}", config.to_dict()], sort_keys=True, default=str)
    folder = twins / hashlib.sha256(asked.encode()).hexdigest()[:12]
    with (twins / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        tiny = shrink_config(config, tp=min(run.ranks, 8), keeps_tokens=True)
        with new_folder(folder) as temporary:
            _write(tiny, temporary, path, source, dtype=getattr(config, "dtype", None))
    run.say(f"{path} is a twin of it: {_sizes(config, tiny)}, its {tiny.get_text_config().vocab_size} tokens kept")
    return folder


def _write(tiny: Any, folder: Path, path: Any, source: dict[str, Any], *, dtype: Any) -> None:
    import torch
    from transformers import AutoTokenizer

    from meshlora_ground.compat import replaced
    from meshlora_judge.inputs import write_twin

    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    with replaced(torch.distributed, "is_initialized", lambda: False):  # else save_pretrained writes on rank 0 alone
        write_twin(tiny, folder, dtype=dtype or torch.float32, seed=0)
    if not Path(path).is_dir():
        with contextlib.suppress(Exception):  # a model without a tokenizer of its own: the recipe has another
            AutoTokenizer.from_pretrained(path, **source).save_pretrained(folder)
        return
    for file in Path(path).iterdir():  # tokenizer, chat template, processor
        if not file.name.endswith(_WEIGHTS) and not (folder / file.name).exists() and file.is_file():
            (folder / file.name).symlink_to(file.resolve())


def _sizes(config: Any, tiny: Any) -> str:
    said = []
    for name, word in (("num_hidden_layers", "layers"), ("hidden_size", "features"), ("num_attention_heads", "heads")):
        old, new = (getattr(each.get_text_config(), name, None) for each in (config, tiny))
        if old is not None and new is not None:
            said.append(f"{new} of {old} {word}")
    return ", ".join(said)
