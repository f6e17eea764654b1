"""`meshlora chat`: its arguments, and the ranks of a conversation: in a terminal, from a pipe, or on a page.

Does not own: the conversation (`meshlora_extra.chat`), how its model is asked (`run.asking`).
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from meshlora.cli.arguments import add_local_rank, checked_place
from meshlora_extra.commands.generate import add_asking, decoding_of
from meshlora_ground.errors import UserError
from meshlora_ground.reading import path_argument

_GIVEN = ["model", "adapter", "run_file", "topology", "system", "chat_template", "max_new_tokens", "temperature"]
_GIVEN += ["top_p", "seed", "dtype", "port"]


def add(commands: Any) -> None:
    chat = commands.add_parser("chat", help="talk to a model and its adapter, in the terminal or on a page")
    which = chat.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=path_argument, metavar="FOLDER")
    which.add_argument(
        "--run", dest="run_file", type=path_argument, metavar="RUN.yaml", help="the base and the adapter of this run"
    )
    chat.add_argument("--adapter", metavar="FOLDER", help="PEFT adapter; without it the base model speaks")
    add_asking(chat, is_always=True)
    chat.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="of an answer (default 512)")
    chat.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    chat.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest that make up this much")
    chat.add_argument("--seed", type=int, default=0)
    chat.add_argument("--dtype", help="default: as the run has it, or as the model is stored")
    chat.add_argument("--trust-remote-code", action="store_true")
    chat.add_argument("--page", action="store_true", help="on a page of this machine, the base beside the adapter")
    chat.add_argument("--port", type=int, metavar="N", help="of the page; default: any that is free")
    chat.add_argument("--nproc", type=int, metavar="N", help="N ranks on this machine; default: one process")
    chat.add_argument("--topology", metavar="AXES", help="as of generate")
    add_local_rank(chat)
    chat.set_defaults(run=_chat)


def _chat(options: argparse.Namespace) -> None:
    from meshlora.comm.groups import leave, on_gpus
    from meshlora.run.edge import rank_edge
    from meshlora.run.launch import launch
    from meshlora.run.machines import machines

    _check(options)
    place = checked_place(options)
    with rank_edge(is_watched=True) if place is not None else contextlib.nullcontext() as watch:
        world = options.nproc or (place.world if place else 1)
        # Before CUDA is opened here.
        takes_gpus = options.nproc is not None and on_gpus("auto", num_ranks=options.nproc)
        run = _prepare(options, world=world)
        machines("auto", watch)
        if options.nproc is not None:
            launch(["chat", *_own_words(options)], nproc=options.nproc, on_gpus=takes_gpus, talks=not options.page)
            return
        _talk(options, *run, is_main=place is None or place.rank == 0)
        leave()


def _check(options: argparse.Namespace) -> None:
    if options.run_file is not None and options.adapter is not None:
        given, rule = f"--adapter {options.adapter} with --run", "the run has its own"
        raise UserError(given, rule, "give --model and --adapter, or --run alone")
    if options.port is not None and not options.page:
        raise UserError(f"--port {options.port}", "it has no effect without --page", "give both")
    if options.port is not None and not 0 <= options.port < 2**16:
        raise UserError(f"--port {options.port}", "a port is below 65536", "leave it out")


def _prepare(options: argparse.Namespace, *, world: int) -> tuple[Any, Any, Any, Any]:
    """(blueprint, tokenizer, options of decoding, how it is asked) for `world` ranks. Raises: UserError."""
    from meshlora.loading.blueprint import read_model_config
    from meshlora.run.asking import asking_tokenizer, check_template
    from meshlora.run.generated import blueprint_to_generate
    from meshlora_extra.chat.prompts import asking_for, with_day

    base: dict[str, Any] = {"dtype": options.dtype or "auto", "trust_remote_code": options.trust_remote_code}
    if options.run_file is not None:
        base |= _of_run(options)
    asking = with_day(asking_for(options))
    # Of a model that is not there the tokenizer says less.
    read_model_config(options.model, trust_remote_code=base["trust_remote_code"])
    tokenizer = asking_tokenizer(options.model, asking, trust_remote_code=base["trust_remote_code"])
    check_template(tokenizer, asking)
    adapter = Path(options.adapter) if options.adapter else None
    blueprint = blueprint_to_generate(options.model, adapter=adapter, topology=options.topology, world=world, **base)
    return blueprint, tokenizer, decoding_of(options), asking


def _of_run(options: argparse.Namespace) -> dict[str, Any]:
    """What a run file says of its base; its folders go to `options`. Raises: UserError: it has no finished adapter."""
    from meshlora.run.config.file import read_run

    config = read_run(options.run_file)
    adapter = Path(config.train.output) / "adapter"
    if not (adapter / "adapter_config.json").is_file():
        rule = f"{adapter} is not there: it has no finished adapter"
        way_out = f"train it, give --model and --adapter, or talk to the base: --model {config.model.path}"
        raise UserError(f"--run {options.run_file}", rule, way_out)
    options.model, options.adapter = config.model.path, str(adapter)
    return {
        "dtype": options.dtype or config.model.dtype,
        "trust_remote_code": options.trust_remote_code or config.model.trust_remote_code,
        "quantization": config.model.quantization,
        "compute": config.model.compute,
    }


def _talk(
    options: argparse.Namespace, blueprint: Any, tokenizer: Any, decoding: Any, asking: Any, *, is_main: bool
) -> None:
    """Load the model, and answer until the conversation ends. Every rank calls this."""
    from meshlora.run.edge import say_in_training
    from meshlora_extra.chat.speaker import Speaker
    from meshlora_extra.chat.terminal import Talk, say

    speaker = Speaker(blueprint, tokenizer, decoding)
    if not is_main:
        speaker.follow()
        return
    who = f"{options.model}" if options.adapter is None else f"{options.model} with {options.adapter}"
    say(f"{who}, chat template of {asking.template_of}{f', on {speaker.topology}' if speaker.topology else ''}")
    say_in_training()  # from now on Ctrl-C is for this process
    if options.page:
        from meshlora_extra.chat.page import serve

        serve(speaker, names=(options.model, options.adapter), system=asking.system, port=options.port or 0)
    else:
        Talk(speaker, system=asking.system).run()
    speaker.leave()


def _own_words(options: argparse.Namespace) -> list[str]:
    """The arguments that ranks are started with: all but `--nproc`."""
    words = []
    for name in _GIVEN:
        if name in ("model", "adapter") and options.run_file is not None:
            continue  # which come from it
        if (value := getattr(options, name)) is not None:
            words.append(f"--{'run' if name == 'run_file' else name.replace('_', '-')}={value}")
    for name in ("trust_remote_code", "page"):
        words += [f"--{name.replace('_', '-')}"] * getattr(options, name)
    return words
