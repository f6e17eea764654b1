"""An adapter's files beside its base: the modules that PEFT adapts there, the shapes it makes, the keys it loads, and
their names as it loads them.

PEFT itself decides, on a model of the meta device: no weight of the base is read but those that a scale is compared
with. Does not own: what the folder alone tells (`adapter_files.whole`).
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshlora_ground.compat.peft_names import names_as_loaded
from meshlora_ground.errors import MeshloraError, UserError, reason
from meshlora_ground.files import open_safetensors
from meshlora_ground.weight_files import weight_files
from meshlora_judge.adapter_files.finding import Finding, found
from meshlora_judge.adapter_files.names import Names, names_of
from meshlora_judge.adapter_files.reading import Adapter
from meshlora_judge.adapter_files.values import as_matrix
from meshlora_judge.adapter_files.whole import scale_of

_ABSURD = 10.0  # |s B A| of a base weight's norm; training moves weights by far less
_OF_TASKS = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoModel",
}


def of_model(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> list[Finding]:
    """All findings that need the base in `folder`. Raises: UserError: it is no model, or PEFT refuses the adapter."""
    with _quiet():
        model = _peft_model(adapter, shapes, folder)
        return _keys(model, adapter, shapes, folder) + _scales(model, adapter, shapes, folder)


def names_on_model(adapter: Adapter, config: Mapping[str, Any]) -> tuple[Names, list[Finding]]:
    """The names that PEFT, which renames those of some families, gives the tensors of `adapter` on a model of
    transformers' `config`; those of the file where transformers cannot build it, and a note that says so.
    """
    import transformers

    from meshlora_ground.model_class import model_class, take_quantization

    keys, parts = [part.key for part in adapter.names.parts], []
    if not adapter.names.is_peft:
        return adapter.names, []
    if (family := config.get("model_type")) not in transformers.CONFIG_MAPPING:
        return adapter.names, _as_in_file(f"transformers {transformers.__version__} has no model_type {family!r}")
    try:
        with _quiet():
            made = transformers.CONFIG_MAPPING[family].from_dict(dict(config))
            take_quantization(made)
            loaded = names_as_loaded(model_class(made).from_config(made), keys)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds on what is none of its own models
        why = f"transformers {transformers.__version__} cannot build its {family} ({reason(error)})"
        return adapter.names, _as_in_file(why)
    for part in adapter.names.parts:
        (there,) = names_of([loaded[part.key]], adapter.config, ()).parts
        parts.append(replace(there, key=part.key))
    return replace(adapter.names, parts=parts), []


def _as_in_file(why: str) -> list[Finding]:
    """The note that nobody has asked PEFT for names."""
    what = f"{why}, so trained tensors are looked for under the names of the file, which PEFT changes of some families"
    return [Finding("names", what, (), "judge it where the training's transformers is installed", is_note=True)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        yield


def _peft_model(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> Any:
    """PEFT's model of the adapter's configuration on the meta device."""
    import transformers
    from peft import PeftConfig, get_peft_model

    from meshlora_ground.model_class import model_class

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        auto = _OF_TASKS.get(f"{adapter.config.get('task_type')}")
        own = getattr(transformers, (config.architectures or [""])[0], None)
        if auto is not None:
            base = getattr(transformers, auto).from_config(config)
        elif own is not None and adapter.config.get("task_type") is None:
            base = own(config)
        else:
            base = model_class(config).from_config(config)
        _resize(base, adapter, shapes)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds on a folder that is no model
        given = f"model {folder}"
        raise UserError(given, f"transformers cannot build it ({reason(error)})", "give the base's folder") from None
    try:
        lora = PeftConfig.from_pretrained(str(adapter.folder))
        lora.inference_mode = False
        if hasattr(lora, "init_lora_weights"):
            lora.init_lora_weights = True  # others compute with the base's values, and shapes are the same
        return get_peft_model(base, lora)
    except Exception as error:  # noqa: BLE001 - PEFT's refusal, whatever it is
        raise MeshloraError(f"{adapter.folder}: PEFT cannot put it on {folder}: {reason(error)}") from None


def _resize(base: Any, adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give the base the vocabulary of the adapter, as whoever added tokens does before PEFT loads it."""
    get = getattr(base, "get_input_embeddings", None)
    # Models of images or sound have no embedding of tokens.
    if get is None or getattr(base, "main_input_name", "") != "input_ids":
        return
    embedding = get()
    if embedding is None:
        return
    path = next(name for name, module in base.named_modules() if module is embedding)
    for part in adapter.names.parts:
        shape = shapes[part.key]
        if len(shape) == 2 and part.name in (f"{path}.weight", f"{path}.embedding_A"):
            rows = shape[1] if part.side else shape[0]
            if rows > embedding.weight.shape[0]:
                base.resize_token_embeddings(rows, mean_resizing=False)
            return


def _keys(model: Any, adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> list[Finding]:
    """Keys that PEFT would miss, drop, or find in another shape."""
    from peft import get_peft_model_state_dict

    wanted = {key: tuple(each.shape) for key, each in get_peft_model_state_dict(model).items()}
    saved = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    missing, extra = sorted(saved - shapes.keys()), sorted(shapes.keys() - wanted.keys())
    wrong = sorted(key for key in wanted.keys() & shapes.keys() if wanted[key] != shapes[key])
    dropped, note = extra, ""
    # Keys under other names may still load, and those under their own be lost: PEFT renames and joins some families'.
    renamed = names_as_loaded(model.get_base_model(), shapes)
    if extra or any(key != loaded for key, loaded in renamed.items()):
        missing, dropped, note = _loaded(model, adapter, shapes, set(wrong), missing)
    result = []
    if note:
        result.append(Finding("dropped", f"PEFT cannot load it: {note}", (), "save it again with save_pretrained"))
    words = [f"{key} {list(shapes[key])} for {list(wanted[key])}" for key in wrong]
    way_out = "it belongs to another model, another vocabulary or another rank, or one shard was saved"
    what = f"tensors that PEFT needs on {folder} are not in the file, and would stay as they are drawn"
    return [
        *result,
        *found("shape", "shapes are not those that PEFT makes", words, way_out),
        *found("incomplete", what, missing, "they were not saved, or the targets are not those of the training"),
        *found("dropped", "PEFT would drop these tensors silently", dropped, "rename them as PEFT does, or save again"),
    ]


def _loaded(
    model: Any, adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], wrong: set[str], missing: list[str]
) -> tuple[list[str], list[str], str]:
    """(missing, dropped, why it fails) as PEFT's own loading says, which renames and joins factors of some families."""
    from peft import set_peft_model_state_dict

    given: dict[str, Tensor] = {}
    for key, shape in shapes.items():
        if key not in wrong:
            given[key] = torch.empty(shape, dtype=torch.float32)
    for key in missing:
        if ".lora_" not in key:  # PEFT takes these without asking whether they are there
            given[key] = torch.empty(model.state_dict().get(key, torch.empty(0)).shape)
    before = {key for key in model.state_dict() if ".lora_" in key and ".default" in key}
    try:
        result = set_peft_model_state_dict(copy.deepcopy(model), given, low_cpu_mem_usage=True)
    except Exception as error:  # noqa: BLE001 - PEFT's conversions raise what they like
        return missing, [], reason(error)
    absent = [key.replace(".default", "") for key in result.missing_keys if key in before]
    others = [key for key in missing if ".lora_" not in key]
    return sorted(set(absent) - wrong) + others, sorted(result.unexpected_keys), ""


def _scales(model: Any, adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> list[Finding]:
    """Modules whose delta s B A is far above the base's weight."""
    try:
        files = weight_files(folder)
    except UserError:
        return []  # a configuration alone
    absurd = []
    with contextlib.ExitStack() as stack, torch.device("cpu"):
        stored = {}
        for file in files:
            opened = stack.enter_context(open_safetensors(file))
            stored.update(dict.fromkeys(opened.keys(), opened))  # opened, not read: one weight at a time is in memory
        for module, sides in adapter.names.by_module().items():
            key = f"{module}.weight"
            scale = scale_of(adapter.config, module)
            if key not in stored or scale is None or not {"A", "B"} <= sides.keys():
                continue
            a = as_matrix(adapter.read(sides["A"].key), "A").double()
            b = as_matrix(adapter.read(sides["B"].key), "B").double()
            weight = stored[key].get_tensor(key)
            if not weight.is_floating_point() or weight.numel() != len(b) * a.shape[1] or len(a) != b.shape[1]:
                continue
            # |B A|^2 = tr(B^T B A A^T): the product itself would be as large as the weight.
            delta = scale * float(((b.T @ b) * (a @ a.T)).sum().clamp(min=0).sqrt())
            if delta > _ABSURD * float(weight.double().norm()) > 0:
                absurd.append(f"{module}: {delta / float(weight.double().norm()):.3g} times")
    way_out = "lora_alpha, r or use_rslora are not those of the training, or it diverged"
    return found("scale", "the delta s B A is far larger than the base's weight", absurd, way_out)
