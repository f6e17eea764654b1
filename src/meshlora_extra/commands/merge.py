"""`meshlora merge`: its arguments and what it says. The merging is in `meshlora_extra.merging`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from meshlora.cli.arguments import add_json, check_json, write_result


def add(commands: Any) -> None:
    merge = commands.add_parser("merge", help="write a checkpoint with the adapter in its weights")
    merge.add_argument("--model", required=True, metavar="FOLDER", help="checkpoint in safetensors")
    merge.add_argument("--adapter", required=True, metavar="FOLDER", help="PEFT adapter (LoRA, DoRA)")
    merge.add_argument("--out", required=True, metavar="FOLDER", help="new folder")
    merge.add_argument("--dtype", default="auto", help="of the written weights; default: as they are stored")
    merge.add_argument("--quantize", choices=("fp8", "mxfp4"), help="round linears and experts to few bits at the end")
    merge.add_argument("--no-logits", action="store_true", help="do not run model + adapter and the merged model")
    merge.add_argument("--trust-remote-code", action="store_true")
    add_json(merge)
    merge.set_defaults(run=_merge)


def _merge(options: argparse.Namespace) -> None:
    from meshlora.loading.blueprint import read_model_config, resolve_dtype
    from meshlora_extra.merging.merge import merge
    from meshlora_ground.console import Console

    check_json(options)
    config = read_model_config(options.model, trust_remote_code=options.trust_remote_code)
    done = merge(
        options.model,
        options.adapter,
        options.out,
        config=config,
        dtype=None if options.dtype == "auto" else resolve_dtype(options.dtype, config),
        quantize=options.quantize,
        check_logits=not options.no_logits,
        trust_remote_code=options.trust_remote_code,
    )
    say = Console().say
    if done.is_untied:
        say("the adapter makes tied weights differ: both are stored, and config.json says tie_word_embeddings: false")
    say(f"{done.num_changed} of {done.num_tensors} tensors changed, {done.num_bytes / 1e9:.3g} GB")
    say(f"checked: {done.check}")
    say(f"merged: {options.out}")
    write_result(options.json, {"out": options.out, **dataclasses.asdict(done)})
