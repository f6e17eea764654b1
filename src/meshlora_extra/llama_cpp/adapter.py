"""An adapter as a GGUF file, as convert_lora_to_gguf.py of llama.cpp writes it.

Owns: the names `<weight>.lora_a` and `<weight>.lora_b`, their order, the one `adapter.lora.alpha`.

llama.cpp multiplies each product by alpha / r, with the r of its own tensors: targets may differ in rank. Where alpha
would differ, the scale is put into B.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from meshlora.adapter.formats.adapter_file import read_adapter_tensors
from meshlora.adapter.formats.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_config
from meshlora.loading.blueprint import Blueprint
from meshlora_extra.engines import check_options
from meshlora_extra.llama_cpp.files import Entry, Names, check_new, library, write_gguf
from meshlora_extra.paper.export import Factors, factors_of, side_of
from meshlora_ground.errors import UnsupportedError


def export_adapter(folder: Path, out: Path, blueprint: Blueprint) -> int:
    """Write the PEFT folder `folder`, of the base of `blueprint`, as `out`; the number of tensors.

    Raises:
        UserError: files missing, damaged or of another model; `out` exists. UnsupportedError: a family or an option
            that llama.cpp does not have, by name.
    """
    check_new(out)
    names, where = Names(blueprint.config), f"{folder / CONFIG_FILE}"
    config = read_config(folder, ignore_dropout=True)
    check_options(config, where)
    blueprint.with_folder(folder, ignore_dropout=True)  # every tensor is one of this model
    tensors = read_adapter_tensors(folder / WEIGHTS_FILE)
    if base := next((key for key in tensors if side_of(key) is None), None):
        raise UnsupportedError(
            f"{folder}: {base}", "a GGUF adapter is LoRA and nothing more", "merge it: meshlora merge"
        )
    factors, _ = factors_of(tensors, config, f"{folder}", strict=False)
    alpha = next(iter(factors.values())).lora_alpha
    entries: dict[str, Entry] = {}
    for name, each in factors.items():
        if blueprint.config.tie_word_embeddings and (each.is_embedding or name.endswith("lm_head")):
            rule = "llama.cpp has one tensor for both tied ones, and an adapter on neither alone"
            raise UnsupportedError(f"{folder}: {name}", rule, "merge it: meshlora merge")
        a, b = _in_llama_cpp(each, name, names, alpha)
        target = names.of(f"{name}.weight")
        for side, tensor in (("a", a), ("b", b)):
            shape = tuple(tensor.shape)
            entries[f"{target}.lora_{side}"] = Entry(shape, tensor.dtype, functools.partial(_given, tensor))

    def describe(writer: Any) -> None:
        writer.add_type(library().GGUFType.ADAPTER)
        writer.add_string(library().Keys.Adapter.TYPE, "lora")
        writer.add_float32(library().Keys.Adapter.LORA_ALPHA, alpha)

    write_gguf(out, names, entries, describe, base=str(blueprint.source))
    return len(entries)


def _in_llama_cpp(each: Factors, name: str, names: Names, alpha: float) -> tuple[Tensor, Tensor]:
    """(A `[r, in]`, of an embedding `[V, r]`; B `[out, r]`), scaled by alpha / r together, in float32."""
    a, b = each.a.float(), names.in_order(name, each.b.float())
    if each.is_embedding:
        a = a.T.contiguous()
    if not math.isclose(each.lora_alpha, alpha, rel_tol=1e-12):
        b = b * (each.lora_alpha / alpha)
    return a, b


def _given(tensor: Tensor) -> Tensor:
    return tensor
