"""`meshlora export`: its arguments, and which conversion they ask for. The formats are in `adapter.formats`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import add_json, check_json, read_blueprint, write_result
from meshlora_ground.errors import UserError


def add(commands: Any) -> None:
    export = commands.add_parser(
        "export", help="write an adapter as PEFT, microsoft/LoRA, engines or llama.cpp store it"
    )
    option = export.add_argument
    option(
        "adapter",
        metavar="ADAPTER",
        help="adapter folder, or a lora_state_dict in safetensors or a .pt; for gguf also the folder of a model",
    )
    option("--layout", required=True, choices=("peft", "loralib", "per-expert", "gguf"))
    option("--out", required=True, metavar="PATH", help="new folder; for loralib a .safetensors file, for gguf a .gguf")
    option(
        "--model", metavar="FOLDER", help="for per-expert, and back, and gguf; to check names; only config.json is read"
    )
    option("--trust-remote-code", action="store_true")
    option("--lora-alpha", type=float, metavar="N", help="of a lora_state_dict that does not say it")
    option("--enable-lora", metavar="LIST", help="of a lora_state_dict that does not say it, as in 1,0,1 for q and v")
    add_json(export)
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    from meshlora_extra.engine_export import export_per_expert, import_per_expert
    from meshlora_extra.paper.export import export
    from meshlora_ground.console import Console

    check_json(options)
    given, layout = Path(options.adapter), options.layout
    is_file = given.exists() and not given.is_dir()  # of loralib
    for option in ("lora_alpha", "enable_lora"):
        if not is_file and getattr(options, option) is not None:
            name = option.replace("_", "-")
            raise UserError(f"--{name}", "an adapter folder says it itself", f"leave out --{name}")
    if is_file and layout != "peft":
        raise UserError(f"{given} and --layout {layout}", "it is one file already", "use --layout peft")
    if options.model and layout == "loralib":
        raise UserError(f"--model {options.model}", "this needs no model", "leave out --model")
    if not options.model and layout == "per-expert":
        raise UserError("--layout per-expert", "the model says how its experts lie", "give --model FOLDER")
    words = ""
    if layout == "gguf":
        number = _export_gguf(options)
    elif is_file:
        number = _import_loralib(options)
    elif not options.model:
        number = export(given, options.out, layout=layout)
    else:
        blueprint = read_blueprint(options, "")
        if layout == "peft":
            number = import_per_expert(given, options.out, model=blueprint.model, plan=blueprint.plan)
        else:
            exported = export_per_expert(given, options.out, model=blueprint.model, plan=blueprint.plan)
            number, words = exported.num_tensors, f"{exported}"  # with the rank, and what was padded to it
    Console().say(f"exported and read back: {options.out} ({words or number} tensors)")
    write_result(options.json, {"out": options.out, "layout": layout, "num_tensors": number})


def _export_gguf(options: argparse.Namespace) -> int:
    """Of an adapter, or of a model: what the folder is."""
    from meshlora.adapter.formats.peft_format import CONFIG_FILE
    from meshlora_extra.llama_cpp.adapter import export_adapter
    from meshlora_extra.llama_cpp.files import library
    from meshlora_extra.llama_cpp.model import export_model

    library()  # what is missing is said first
    given, out = Path(options.adapter), Path(options.out)
    if (given / CONFIG_FILE).exists():
        if not options.model:
            raise UserError("--layout gguf of an adapter", "its names are of the model", "give --model FOLDER")
        return export_adapter(given, out, read_blueprint(options, ""))
    if options.model:
        raise UserError(f"--model {options.model}", f"{given} is no adapter", "leave it out to write a model")
    options.model = options.adapter
    return export_model(out, read_blueprint(options, ""), trust_remote_code=options.trust_remote_code)


def _import_loralib(options: argparse.Namespace) -> int:
    from meshlora_extra.paper.export import import_loralib
    from meshlora_extra.paper.pickled import PICKLED
    from meshlora_ground.console import Console

    enabled = _enabled(options.enable_lora)
    model: Any = None
    base: Any = None
    if options.model:
        blueprint = read_blueprint(options, "")
        model = blueprint.model
        weights = None
        if Path(options.adapter).suffix in PICKLED:  # other files hold no base to compare
            weights = blueprint.weights()

        def base(name: str) -> Any:
            if weights is None or name not in weights.stored:
                return None
            return weights.read(name)

    done = import_loralib(
        options.adapter, options.out, lora_alpha=options.lora_alpha, enable_lora=enabled, model=model, base=base
    )
    if done.num_of_base:
        Console().say(f"it holds the frozen base too: those {done.num_of_base} tensors, the model's own, are left out")
    if done.prefix:
        Console().say(f"all names began with {done.prefix} of a wrapper around the model: it is taken off")
    if model is None:
        Console().say("names and shapes were compared with no model: --model FOLDER does")
    return done.num_tensors


def _enabled(text: str | None) -> list[bool] | None:
    if text is None:
        return None
    words = text.split(",")
    if not set(words) <= {"0", "1"}:
        raise UserError(f"--enable-lora {text}", "it is a list of 0 and 1, one for each piece", "1,0,1 for q and v")
    return [word == "1" for word in words]
