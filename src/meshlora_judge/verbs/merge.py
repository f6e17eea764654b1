"""`meshlora judge merge`: is a checkpoint the base with this adapter merged, and what did rounding lose?

Owns: the arguments, and the words of the verdict. Does not own: the comparison (`meshlora_judge.merged`).
"""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshlora_ground.errors import MeshloraError, UserError, one_line

_MOST_NAMED = 4


def add(verbs: Any) -> None:
    help_ = "a merged checkpoint: is it the base with this adapter, and what did rounding lose?"
    parser = verbs.add_parser("merge", help=help_, description=f"{help_[0].upper()}{help_[1:]}")
    parser.add_argument("merged", metavar="FOLDER", help="the merged checkpoint")
    parser.add_argument("--model", metavar="FOLDER", required=True, help="the base")
    parser.add_argument("--adapter", metavar="FOLDER", required=True, help="the adapter, as PEFT saves it")
    quantized = ("nf4", "int8", "fp8")
    parser.add_argument(
        "--quantization", choices=quantized, help="say what rounding the base so loses beside the adapter"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code of the base's folder")
    parser.add_argument("--json", metavar="FILE", help="write what was found there, tensor by tensor")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from transformers.utils import logging

    from meshlora_ground.console import Console
    from meshlora_ground.files import check_result_file, write_json_atomically
    from meshlora_judge.merged import judge_merge

    if options.json:
        check_result_file(Path(options.json), f"--json {options.json}")
    logging.disable_progress_bar()
    for folder in (options.merged, options.model):
        if not (Path(folder) / "config.json").is_file():
            raise UserError(f"{folder}", "it holds no config.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about each other
        found = judge_merge(
            options.merged, options.model, Path(options.adapter), trust_remote_code=options.trust_remote_code
        )
        beside = _of_rounded_base(options) if options.quantization else {}
    is_proved, text = _verdict(found, options)
    if options.json:
        value = dataclasses.asdict(found) | {"verdict": "proved" if is_proved else "refuted", "text": text} | beside
        write_json_atomically(Path(options.json), value)
    if beside:
        Console().say(
            f"A base rounded to {options.quantization} moves log-probabilities by {beside['rounding_moves']:.2g}, and "
            f"the adapter moves them by {beside['adapter_moves']:.2g} (root mean square)."
        )
    if not is_proved:
        raise MeshloraError(text)
    Console().say(text)


def _verdict(found: Any, options: argparse.Namespace) -> tuple[bool, str]:
    """(whether it is right, the verdict in one paragraph)."""
    from meshlora_judge.merged import KEPT, RIGHT

    by_what: dict[str, list[Any]] = {}
    for each in found.tensors:
        by_what.setdefault(each.what, []).append(each)
    right, kept = by_what.pop(RIGHT, []), by_what.pop(KEPT, [])
    adapted = [each for each in found.tensors if each.arrived is not None]
    is_proved = not (by_what or found.missing or found.extra)
    given = f"{options.merged} is {options.model} with {options.adapter}"
    faults = [f"{what}: {_named(of)}" for what, of in by_what.items()]
    if found.missing:
        faults.append(f"missing: {_listed(found.missing)}")
    if found.extra:
        faults.append(f"unknown to the model: {_listed(found.extra)}")
    if is_proved:
        worst = max((each.roundings for each in adapted), default=0.0)
        how = (
            f"in {found.dtype}" if found.dtype == "few bits" else f"within one rounding of {found.dtype} ({worst:.2f})"
        )
        text = f"proved: {given}: {len(right)} tensors {how}, {len(kept)} others the base's."
    else:
        text = f"refuted: it is not so that {given}: {'; '.join(faults)}. {len(right)} tensors are right."
    if adapted:
        least = min(adapted, key=lambda each: each.arrived)
        stayed = sum(each.stayed for each in adapted) / len(adapted)
        mean = sum(each.arrived for each in adapted) / len(adapted)
        text += f" Of the adapter's change {mean:.2%} arrived (least, {least.arrived:.2%}: {least.name}); "
        text += f"{stayed:.1%} of the elements which it moves kept the base's value."
    return is_proved, text


def _named(tensors: Sequence[Any]) -> str:
    """The kinds of `tensors` where several layers have them, else their names."""
    if len(tensors) <= _MOST_NAMED:
        return ", ".join(each.name for each in tensors)
    kinds = sorted({each.kind for each in tensors})
    return f"{len(tensors)} tensors ({one_line(', '.join(kinds), 200)})"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{one_line(', '.join(names[:_MOST_NAMED]), 400)}{more}"


def _of_rounded_base(options: argparse.Namespace) -> dict[str, float]:
    """How far log-probabilities of random tokens are moved by rounding the base, and by the adapter."""
    from transformers import AutoConfig

    from meshlora_judge.served.computed import Computed, default_prompts
    from meshlora_judge.served.verdict import rms
    from meshlora_judge.settings import Base

    remote = options.trust_remote_code
    config = AutoConfig.from_pretrained(options.model, local_files_only=True, trust_remote_code=remote)
    prompts, adapter = default_prompts(config, None), Path(options.adapter)
    base = Base(options.model, dtype="float32", trust_remote_code=remote)
    try:
        rounded = Computed(dataclasses.replace(base, quantization=options.quantization), adapter, prompts)
    except ImportError:
        rule = "rounding to it needs bitsandbytes, which is not installed"
        raise UserError(f"--quantization {options.quantization}", rule, "pip install bitsandbytes") from None
    moved = rounded.log_probs()
    del rounded
    exact = Computed(base, adapter, prompts)
    full = exact.log_probs()
    return {"rounding_moves": rms(moved - full), "adapter_moves": rms(full - exact.log_probs(lambda _: 0.0))}
